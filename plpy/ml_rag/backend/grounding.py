"""Whether the sentences of an answer stand on the texts that it was made from, by their words.

The score of a claim is the share of its words that the texts have, without stop words, to the power of 1.5. Numbers
and names decide: if the texts lack one, have another number in its place or two numbers in the other order, or if they
deny what the claim says, the claim is not supported, whatever else they share. An answer that is less than a sentence
is held against its question: the words of the question must stand near it.

Rules were compared on the sets of bench/grounding.py. Weights for pairs of words, stop words and the similarity of
embeddings moved an area under the ROC curve by 0.013 at most, so there are none.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any
from urllib.parse import quote

from ml_rag.backend.client import ModelServer
from ml_rag.backend.generate import generate
from ml_rag.backend.rerank import rerank
from ml_rag.errors import EngineFailed, WrongTask
from ml_rag.sentences import DENSE_WORD, LEADS_IN, STEM, WORD, spans

Pause = Callable[[], object]
#: words to those among them that are stop words
Stops = Callable[[Collection[str]], set[str]]
#: by words beside a number, the numbers
Places = dict[frozenset[str], set[str]]
Fit = tuple[int, int, Places]

#: characters of the texts that are read
LONGEST = 1_000_000
_POWER = 1.5
_NONE: frozenset[str] = frozenset()
#: the share that counts at most if a number or a name is wrong
_WRONG = 0.65
#: words between two numbers whose order counts
_BETWEEN = 5
#: a claim of at most this many content words that follows a question is held against it
_SHORT = 5
#: a word of the question counts 1 / (1 + 0.25 n), n words from the answer
_DISTANCE = 0.25
#: a further text is cited for a claim if it adds this share of its words
_ADDS = 0.15
#: a sentence with this share of a claim's words denies it if only one of the two has a negation
_SAME = 0.8
#: if more of the words of the texts have capitals, as in German, a capital does not make a name
_CAPITALS = 0.3

_TOKEN = re.compile(rf"\d+(?:[.,:/]\d+)*|{WORD.pattern}")
_GROUPS = re.compile(r"[.,](?=\d{3}(?!\d))")
_MARKER = re.compile(r"\[\d{1,3}(?:, ?\d{1,3})*\]|^\s*(?:[-*+•]|\(?\d{1,3}[.)])\s")
_CITATION = re.compile(r"(?:\[\d{1,3}(?:, ?\d{1,3})*\]\s*)+")
_QUESTION = re.compile(r"[?？][\"'”’)\]」』*_]*$")
#: where a part of a sentence begins that may have a number of its own
_CLAUSE = re.compile(
    r"[,;:()\u2013\u2014，；：、（）]|\b(?:and|or|but|und|oder|aber|et|ou|mais|y|o|e)\b", re.IGNORECASE
)
_POLITE = frozenset(
    re.findall(
        r"\w+",
        "hello hi hey thanks thank welcome sure okay ok yes please sorry glad happy help helps hope found find"
        " following know let question questions answer answers information below above documents document context"
        " provided according based here nothing relevant",
    )
)
#: with one of these an answer is a sentence, however short
_VERBS = frozenset(
    re.findall(
        r"\w+",
        "is are was were be been has have had can could may might must shall should will would do does did"
        " ist sind war waren hat haben kann muss darf wird werden est sont ont peut doit son tiene puede",
    )
)
_NEGATIONS = frozenset(
    re.findall(r"\w+", "not no never none nor cannot without nicht kein keine keinen nie pas jamais aucun nunca")
)
_ONE_TO_TWELVE = "one two three four five six seven eight nine ten eleven twelve"
_NUMBERS = {word: str(i) for i, word in enumerate(re.findall(r"\w+", _ONE_TO_TWELVE), 1)}
_JUDGE = "How far do the documents support this statement? Score 0 (not at all) to 4 (each part of it)."
_GRADES = [0, 1, 2, 3, 4]
_GRADE = {
    "type": "object",
    "properties": {"score": {"enum": _GRADES}},
    "required": ["score"],
    "additionalProperties": False,
}
_NUMBERS |= {number: word for word, number in _NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Word:
    """``stem``: what is compared. ``is_name``: it has a capital and does not begin its text. ``clause``: its number."""

    text: str
    stem: str
    is_name: bool = False
    clause: int = 0

    @property
    def is_number(self) -> bool:
        return self.stem[0].isdigit()


@dataclass(slots=True)
class Claim:
    """A sentence of an answer, where it stands, and how well the facts support it; None: it states nothing."""

    start: int
    end: int
    text: str
    score: float | None = None
    facts: Sequence[int] = ()


def words_of(text: str, pause: Pause = lambda: None) -> list[Word]:
    """In order; of a script without blanks between words, two characters in a row each."""
    words: list[Word] = []
    clause = end = 0
    for number, match in enumerate(_TOKEN.finditer(text)):
        if number % 1000 == 0:
            pause()
        token = match.group()
        clause += bool(_CLAUSE.search(text, end, match.end()))
        end = match.end()
        lower = token.lower()
        if token[0].isdigit():
            words.append(Word(lower, _GROUPS.sub("", token), clause=clause))
        elif DENSE_WORD.match(token):
            pairs = (token[i : i + 2] for i in range(max(1, len(token) - 1)))
            words += [Word(pair, pair, clause=clause) for pair in pairs]
        else:
            words.append(Word(lower, lower[:STEM], bool(words) and token[0].isupper(), clause))
    return words


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a place, with other content words: of its clause, with those before the sentence's first number too
    (``around``), and beside it.
    """

    stem: str
    clause: frozenset[str]
    around: frozenset[str]
    beside: frozenset[str]

    def besides(self) -> list[frozenset[str]]:
        """The words beside it, at most two, then each of them, then none."""
        return [self.beside, *(frozenset((word,)) for word in self.beside if len(self.beside) > 1), _NONE]


class Facts:
    """What the texts have."""

    def __init__(self, texts: Sequence[str], stops: Stops, pause: Pause) -> None:
        self.sentences: list[list[Word]] = []
        #: stems of each text
        self.stems: list[set[str]] = []
        #: by ``around`` and ``clause``: which numbers have these words beside them, and maybe another
        self.numbers: dict[tuple[frozenset[str], frozenset[str]], Places] = {}
        #: the same of all, and the keys by their words
        self.anywhere: Places = {}
        self.around: dict[str, list[tuple[frozenset[str], frozenset[str]]]] = {}
        #: two numbers with the words between them
        self.runs: set[tuple[str, ...]] = set()
        left = LONGEST
        read = []
        for whole in texts:
            text, left = whole[:left], max(0, left - len(whole))
            read.append([words_of(text[start:end], pause) for start, end in spans(text, pause)])
        self.stops = frozenset(stops({word.text for sentences in read for sentence in sentences for word in sentence}))
        names = words = 0
        for sentences in read:
            stems: set[str] = set()
            for sentence in sentences:
                pause()
                self._add(sentence)
                stems.update(word.stem for word in sentence)
                names += sum(word.is_name for word in sentence)
                words += sum(word.text not in self.stops for word in sentence)
            stems.update([_NUMBERS[stem] for stem in stems & _NUMBERS.keys()])
            self.stems.append(stems)
        self.all: set[str] = set().union(*self.stems)
        self.has_names = names < _CAPITALS * words

    def _add(self, sentence: list[Word]) -> None:
        self.sentences.append(sentence)
        for number in _numbers([word for word in sentence if word.text not in self.stops]):
            key = number.around, number.clause
            if key not in self.numbers:
                self.numbers[key] = {}
                for word in number.around:
                    self.around.setdefault(word, []).append(key)
            for places in (self.numbers[key], self.anywhere):
                for beside in number.besides():
                    places.setdefault(beside, set()).add(number.stem)
        self.runs.update(_runs(sentence))

    def content(self, words: Sequence[Word]) -> list[Word]:
        """Without stop words; all where nothing else is left."""
        return [word for word in words if word.text not in self.stops] or list(words)


def check(answer: str, texts: Sequence[str], question: str, stops: Stops, pause: Pause) -> list[Claim]:
    """The sentences of the answer, in order. ``question``: what it answers, or ""."""
    claims = [Claim(start, end, answer[start:end]) for start, end in _claims(answer, pause)]
    words = [words_of(_MARKER.sub(" ", claim.text), pause) for claim in claims]
    asked = words_of(question, pause)
    known = {word.text for found in (*words, asked) for word in found}
    facts = Facts(texts, lambda found: stops({*found, *known}), pause)
    for claim, found in zip(claims, words, strict=True):
        pause()
        content = facts.content(found)
        if _QUESTION.search(claim.text):
            asked = found
        if LEADS_IN.fullmatch(claim.text) or all(word.text in _POLITE or word.text in facts.stops for word in content):
            continue
        is_fragment = len(content) <= _SHORT and _VERBS.isdisjoint(word.text for word in found)
        context = [word for word in facts.content(asked) if word.stem in facts.all] if is_fragment else []
        claim.score = _score(found, content, context, facts, pause)
        if context:
            claim.score = min(claim.score, 1 - (1 - _nearness(context, content, facts, pause)) ** 3)
        claim.facts = _cited({word.stem for word in content}, facts)
    return claims


def report(claims: Sequence[Claim], texts: Sequence[str], threshold: float, with_claims: bool) -> dict[str, Any]:
    """The reply of ml_check_grounding."""

    def is_supported(claim: Claim) -> bool:
        return claim.score is not None and claim.score >= threshold

    checked = [claim for claim in claims if claim.score is not None]
    cited = sorted({fact for claim in checked if is_supported(claim) for fact in claim.facts})
    places = {fact: place for place, fact in enumerate(cited)}
    found: dict[str, Any] = {
        "support_score": round(sum(claim.score or 0 for claim in checked) / len(checked), 4) if checked else 0,
        "cited_chunks": [
            {"chunk_text": texts[fact], "source": fact, "index": place} for place, fact in enumerate(cited)
        ],
    }
    if with_claims:
        found["claims"] = [
            {
                "start_pos": claim.start,
                "end_pos": claim.end,
                "claim_text": claim.text,
                "citation_indices": [places[fact] for fact in claim.facts] if is_supported(claim) else [],
                "grounding_check_required": claim.score is not None,
                "score": None if claim.score is None else round(claim.score, 4),
            }
            for claim in claims
        ]
    return found


def judge(server: ModelServer, claims: Sequence[Claim], texts: Sequence[str], model_id: str) -> None:
    """Scores by a cross-encoder (the best text) or by a generation model (all texts) in place of those by words."""
    task = server.call("GET", f"/v1/models/{quote(model_id, safe='')}").get("task")
    if task not in ("generate", "rerank"):
        raise WrongTask(f"model {model_id} judges nothing", detail="It neither generates nor reranks.")
    for claim in claims:
        if claim.score is None:
            continue
        if task == "generate":
            request = {
                "prompt": f"{_JUDGE}\n\n{claim.text}",
                "documents": [{"text": text} for text in texts],
                "options": {"model_id": model_id, "task": "judgement", "max_tokens": 32, "json_schema": _GRADE},
            }
            try:
                claim.score = _GRADES.index(json.loads(generate(server, request)["text"])["score"]) / (len(_GRADES) - 1)
            except (ValueError, KeyError, TypeError):
                raise EngineFailed("the judge gives no score", detail=f"Model {model_id}.") from None
        elif texts:
            scores = rerank(server, claim.text, list(texts), model_id)
            claim.score = max(scores)
            claim.facts = [scores.index(claim.score)]
        else:
            claim.score = 0.0


def supported(answer: str, claims: Sequence[Claim], threshold: float) -> str:
    """The answer without the claims that the facts do not support, and with nothing if no other is left."""
    bad = [claim for claim in claims if claim.score is not None and claim.score < threshold]
    if len(bad) == sum(claim.score is not None for claim in claims):
        return "" if bad else answer
    for claim in reversed(bad):
        # with the blank space before it; at the beginning, that after it
        before = answer[: claim.start].rstrip()
        after = answer[claim.end :]
        answer = before + after if before else after.lstrip()
    return answer


def _claims(answer: str, pause: Pause) -> Iterator[tuple[int, int]]:
    """The sentences; the numbers of citations that follow one belong to it."""
    former: tuple[int, int] | None = None
    for start, end in spans(answer, pause):
        marker = _CITATION.match(answer, start, end)
        if former and marker:
            former, start = (former[0], start + len(marker.group().rstrip())), marker.end()
        if former:
            yield former
        former = (start, end) if start < end else None
    if former:
        yield former


def _numbers(content: Sequence[Word]) -> Iterator[Number]:
    first = next((i for i, word in enumerate(content) if word.is_number), 0)
    shared = frozenset(word.stem for word in content[:first])
    clauses: dict[int, set[str]] = {}
    for word in content:
        if not word.is_number:
            clauses.setdefault(word.clause, set()).add(word.stem)
    words = {clause: (frozenset(stems), shared.union(stems)) for clause, stems in clauses.items()}
    for i, number in enumerate(content):
        if number.is_number:
            clause, around = words.get(number.clause, (_NONE, shared))
            beside = frozenset(w.stem for w in content[max(0, i - 1) : i + 2] if not w.is_number)
            yield Number(number.stem, clause, around, beside)


def _runs(words: Sequence[Word]) -> Iterator[tuple[str, ...]]:
    """Two numbers that follow each other, with the words between."""
    places = [i for i, word in enumerate(words) if word.is_number]
    for a, b in pairwise(places):
        if b - a <= _BETWEEN + 1:
            yield tuple(word.stem for word in words[a : b + 1])


def _score(words: Sequence[Word], content: Sequence[Word], asked: Sequence[Word], facts: Facts, pause: Pause) -> float:
    share = sum(word.stem in facts.all for word in content) / len(content)
    if _is_wrong(words, content, asked, facts, pause) or (share >= _SAME and _is_denied(words, content, facts, pause)):
        share = min(share, _WRONG)
    return math.pow(share, _POWER)


def _is_wrong(
    words: Sequence[Word], content: Sequence[Word], asked: Sequence[Word], facts: Facts, pause: Pause
) -> bool:
    """Whether a number or a name is not that of the facts."""
    if any((w.is_number or (w.is_name and facts.has_names)) and w.stem not in facts.all for w in content):
        return True
    if any(run not in facts.runs and (run[-1], *run[1:-1], run[0]) in facts.runs for run in _runs(words)):
        return True
    context = frozenset(word.stem for word in asked)
    #: by clause
    fits: dict[frozenset[str], list[Fit]] = {}
    for number in _numbers(content):
        if number.clause not in fits:
            fits[number.clause] = _fits(number.clause | context, facts, pause)
        if _is_exchanged(number, fits[number.clause], pause):
            return True
    return False


def _fits(words: frozenset[str], facts: Facts, pause: Pause) -> list[Fit]:
    """How many of a clause's words the numbers of the texts have around them, and in their clause; the best first."""
    found: list[Fit] = []
    for around, clause in {key for word in words for key in facts.around.get(word, ())}:
        pause()
        found.append((len(words & around), len(words & clause), facts.numbers[around, clause]))
    # where some have words in common, those that have none do not count
    return sorted(found, key=itemgetter(0), reverse=True) or [(0, 0, facts.anywhere)]


def _is_exchanged(number: Number, fits: Sequence[Fit], pause: Pause) -> bool:
    """Whether its words stand with another number rather than with this one."""
    own = other = (0, 0, 0)
    besides = number.besides()
    for around, clause, places in fits:
        pause()
        if around < max(own[0], other[0]):
            break
        for beside in besides:
            if stems := places.get(beside):
                fit = (around, len(beside), clause)
                is_own = number.stem in stems
                if is_own:
                    own = max(own, fit)
                if len(stems) > is_own:
                    other = max(other, fit)
    return other > own


def _is_denied(words: Sequence[Word], content: Sequence[Word], facts: Facts, pause: Pause) -> bool:
    """Whether the sentences that say the same have a negation where the claim has none, or the other way round."""
    stems = {word.stem for word in content if word.text not in _NEGATIONS}
    negated = _negations(words) > 0
    found = []
    for sentence in facts.sentences:
        pause()
        if len(stems & {word.stem for word in sentence}) >= _SAME * len(stems):
            found.append(_negations(sentence) > 0)
    return bool(found) and negated not in found


def _negations(words: Sequence[Word]) -> int:
    return sum(word.text in _NEGATIONS or (word.text == "t" and i > 0) for i, word in enumerate(words))


def _nearness(asked: Sequence[Word], content: Sequence[Word], facts: Facts, pause: Pause) -> float:
    """How near the words of a question stand to its answer, each weighted by rarity, in the best sentence."""
    wanted = {word.stem for word in content if word.stem in facts.all}
    stems = {word.stem for word in asked}
    counts = Counter(stem for sentence in facts.sentences for stem in stems & {word.stem for word in sentence})
    n = len(facts.sentences)
    weights = {stem: math.log(1 + (n - count + 0.5) / (count + 0.5)) for stem, count in counts.items()}
    best = 0.0
    for sentence in facts.sentences:
        pause()
        places = [i for i, word in enumerate(sentence) if word.stem in wanted]
        if not wanted or {sentence[i].stem for i in places} != wanted:
            continue
        # a word that the answer repeats is as near as one beside it
        nearest = dict.fromkeys(weights.keys() & wanted, 1)
        for i, word in enumerate(sentence):
            if word.stem in weights and word.stem not in wanted:
                distance = min(abs(i - place) for place in places)
                nearest[word.stem] = min(distance, nearest.get(word.stem, distance))
        best = max(best, sum(weights[stem] / (1 + _DISTANCE * (distance - 1)) for stem, distance in nearest.items()))
    return best / (sum(weights.values()) or 1)


def _cited(stems: set[str], facts: Facts) -> list[int]:
    """The texts that a claim stands on: the one with most of its words, and others as long as they add some."""
    left = stems & facts.all
    cited: list[int] = []
    while left:
        gains = [len(left & found) for found in facts.stems]
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] < (_ADDS * len(stems) if cited else 1):
            break
        cited.append(best)
        left -= facts.stems[best]
    return sorted(cited)
