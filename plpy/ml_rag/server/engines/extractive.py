"""Answers without a language model: the sentences of the documents that answer the question best, verbatim.

A sentence counts by what it shares with the question: half its similarity (of embeddings, where a model is there), half
its words, weighted by their rarity among the sentences at hand; a little for the place of its document; and something
for a number where the question asks for one. Where several are wanted, the sentence after one that was chosen has an
advantage, as its continuation. A heading, a question and a line that ends with a colon answer nothing: the sentence
that follows one gets what it has, and each row of a table what its header has. Without a question it is the central
sentences that count: those most like all.

The weights were chosen on 300 questions of squad2 and reported on 300 others (bench/extractive.py).

A word is the first letters of a run of letters and digits, which is as good as a stem in most languages; where a script
has no blanks between words, it is two characters in a row.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ml_rag.abc import Cancelled, Delta, Sampling
from ml_rag.errors import InvalidRequest
from ml_rag.sentences import DENSE, DENSE_WORD, ITEM, LEADS_IN, STEM, WORD, first_cell, spans, with_headers
from ml_rag.server.chat.citations import without_markers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ml_rag.server.catalogue import ModelEntry

#: questions and sentences to vectors of length 1, a row each, and those of UNRELATED; None without a model
Embed = Callable[[Sequence[str], Sequence[str]], "tuple[NDArray[np.float32], NDArray[np.float32]] | None"]

SENTENCES, SUMMARY_SENTENCES = 2, 3
#: least support of an answer: by similarity, and by words alone. Of 600 answerable questions of squad2 1 % have less,
#: and 97 % of them (80 % by words alone) if the documents are of another article
MIN_SUPPORT, MIN_SUPPORT_WORDS = 0.3, 0.16
CHARACTERS_PER_TOKEN = 4

_SIMILARITY, _WORDS, _RANK, _NUMBER, _NEXT = 0.5, 0.5, 0.1, 0.1, 0.1
#: a further sentence has at least this share of the first one's score; a row, and a sentence of another document, the
#: second. With 0.6 for all, a wrong document stood beside the right one in 32 % of the answers on squad2, now in 17 %
_LEAST_SHARE, _LEAST_ELSEWHERE = 0.65, 0.8
#: sentences that are embedded: those with the best words. 3 citations of 256 tokens have about 30; embedding all finds
#: no more answers
_EMBEDDED = 16
#: what an embedding model finds alike in any two texts is seen in these
UNRELATED = (
    "The ferry leaves at noon.",
    "Add two eggs and stir.",
    "Her violin was tuned a semitone too low.",
    "Copper conducts heat well.",
    "They painted the fence green last summer.",
)

_STATES = re.compile(r"[.!。！।۔][\"'”’)\]」』*_]*$")
_PIECE = re.compile(rf"\s*(?:[{DENSE}]|[^\s{DENSE}]+)|\s+\Z")
#: what asks for a number, a date or a time
_ASKS_NUMBER = re.compile(
    r"\bhow (?:many|much|long|old|far|large|big|tall|high|often|fast|deep|wide|heavy)\b|\bwhen\b"
    r"|\b(?:what|which) (?:year|date|day|month|decade|century|percent\w*|number|amount|time|age|limit|price|cost)\b"
    r"|\b(?:wann|wie ?viele?|wie (?:lange|oft|hoch|alt|groß|weit)|combien|quand|cuánt[oa]s?|cuándo)\b"
    r"|\b(?:quant[oiae]|quando|hoeveel|wanneer|сколько|когда|ile|kiedy|quantos?|quantas?)\b"
    r"|多少|几|何时|何年|什么时候|哪年|哪一年|哪天|いつ|いくつ|いくら|何[人年月日時個回歳]|언제|얼마|몇",
    re.IGNORECASE,
)
_NUMBER_WORD = re.compile(
    r"\d|^(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|hundred|thousand|million|billion|dozen"
    r"|half|first|second|third|zwei|drei|vier|fünf|sechs|sieben|acht|neun|zehn|elf|zwölf|deux|trois|quatre|cinq|dos|tres"
    r"|cuatro|cinco)$|[一二三四五六七八九十百千万亿億两]"
)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of which texts, best first. ``text`` is empty where the central sentences are wanted.

    ``markers``: of that many texts, the first ones, a sentence is followed by the number of its text, and its own
    numbers in brackets get round ones. ``cosines``: of
    sentences whose vectors are stored, by their text with single blanks, with ``vector``, that of the question.
    """

    text: str
    documents: Sequence[str]
    max_sentences: int
    is_summary: bool = False
    markers: int = 0
    vector: Sequence[float] = ()
    cosines: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of a document, which is counted from 0."""

    document: int
    text: str
    #: of the table that it is a row of, and of a header itself
    header: str = ""
    is_header: bool = False

    @property
    def whole(self) -> str:
        """What it says by where it stands."""
        return f"{self.header}\n{self.text}" if self.header and not self.is_header else self.text

    @property
    def key(self) -> str:
        """The text with single blanks."""
        return " ".join(self.text.split())


@dataclass(frozen=True, slots=True)
class Extract:
    """The sentences of an answer in the order of the text, and how well the best one fits the question (0-1)."""

    sentences: list[Sentence]
    support: float
    min_support: float


def load(entry: ModelEntry, models_dir: Path) -> ExtractiveEngine:
    """There is nothing to load."""
    return ExtractiveEngine(entry.context_tokens or 32768)


class ExtractiveEngine:
    """A generation model that is given the documents as they are, and no prompt."""

    brief = False

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        #: vectors of UNRELATED by each model that was asked
        self.unrelated: dict[str, NDArray[np.float32]] = {}

    def close(self) -> None:
        """Nothing to free."""

    def count_tokens(self, messages: Sequence[dict[str, str]], cancelled: Cancelled | None = None) -> int:
        return sum(tokens_of(message["content"]) for message in messages)

    def generate(self, messages: Sequence[dict[str, str]], sampling: Sampling, cancelled: Cancelled) -> Iterator[Delta]:
        """Refuses: a text without documents has nothing to take sentences from. ``extract`` and ``deltas`` answer."""
        raise InvalidRequest(
            "this model answers from documents only",
            detail="It takes its sentences verbatim out of them.",
            hint='Give a text in "context", or name a language model in "model_id".',
        )

    def fitting(self, documents: Sequence[str]) -> list[str]:
        """Those, from the first on, that are read; the first one is cut where it is longer than that."""
        left = self.max_tokens * CHARACTERS_PER_TOKEN
        fitting: list[str] = []
        for text in documents:
            if fitting and len(text) > left:
                break
            fitting.append(text[:left])
            left -= len(text)
        return fitting

    def extract(self, question: Question, embed: Embed) -> Extract:
        """The best sentences. Blocks as long as ``embed`` does."""
        asked = words_of(question.text)
        sentences = _sentences_of(question.documents, asked)
        if not sentences:
            return Extract([], 0.0, MIN_SUPPORT)
        # those of a header count in each of its rows
        above = {header: words_of(header) & asked for header in {sentence.header for sentence in sentences}}
        words = [words_of(sentence.text) | above[sentence.header] for sentence in sentences]
        weights = _rarity(asked, words)
        present, share = _shares(weights, words)
        by_words = present if asked else _centrality(words)
        order = np.argsort(-(by_words + _RANK * _ranks(sentences)), kind="stable")[:_EMBEDDED]
        embedded = sorted(order.tolist())
        known = question.cosines if asked and not question.is_summary else {}
        measured = _similarities(question, [sentences[i] for i in embedded], known, embed)
        scores = _WORDS * by_words + _RANK * _ranks(sentences)
        support, least = float(share.max()), MIN_SUPPORT_WORDS
        if measured is not None:
            similar, central = measured
            scores[embedded] += _SIMILARITY * (similar if asked else central)
            support, least = float(np.clip(similar.max(), 0, 1)), MIN_SUPPORT
            if question.is_summary and asked:
                scores[embedded] += _SIMILARITY * central
        if _ASKS_NUMBER.search(question.text):
            scores += _NUMBER * np.array([_has_number(sentence.text, question.text) for sentence in sentences])
        _pass_on(scores, sentences, words, asked)
        chosen = _choose(scores, sentences, words, question)
        return Extract([sentences[i] for i in sorted(chosen)], support, least)

    def deltas(self, question: Question, found: Extract, sampling: Sampling) -> Iterator[Delta]:
        """The text sentence by sentence, within ``max_tokens`` and before the first stop sequence."""
        parts = list(_parts(question, found.sentences))
        text = "".join(parts)
        cuts = [at for stop in sampling.stop if stop and (at := text.find(stop)) >= 0]
        end = min([len(text), *cuts])
        pieces = _PIECE.findall(text[:end])
        is_long = len(pieces) > sampling.max_tokens
        if is_long:
            end = len("".join(pieces[: sampling.max_tokens]))
        at = 0
        for part in parts:
            if given := part[: max(0, end - at)]:
                yield Delta(given)
            at += len(part)
        yield Delta(
            "",
            finish_reason="length" if is_long else "stop",
            prompt_tokens=tokens_of(question.text) + sum(map(tokens_of, question.documents)),
            completion_tokens=min(len(pieces), sampling.max_tokens),
        )


def tokens_of(text: str) -> int:
    """Words, and characters of scripts without blanks."""
    return len(_PIECE.findall(text))


def words_of(text: str) -> set[str]:
    """See the module's docstring."""
    found: set[str] = set()
    for run in WORD.findall(text.lower()):
        if not DENSE_WORD.match(run):
            found.add(run[:STEM])
        elif len(run) == 1:
            found.add(run)
        else:
            found.update(run[i : i + 2] for i in range(len(run) - 1))
    return found


def _sentences_of(documents: Sequence[str], asked: set[str]) -> list[Sentence]:
    """Those of all documents; one that is repeated counts where it stands first. The header of a table is none, unless
    its first cell has all the words of the question that it has."""
    seen: set[str] = set()
    sentences = []
    for place, text in enumerate(documents):
        for start, end, header in with_headers(text):
            above = text[slice(*header)] if header else ""
            is_header = header is not None and start < header[1]
            sentence = Sentence(place, text[start:end], above, is_header)
            if is_header and not ((own := words_of(above) & asked) and own <= words_of(first_cell(above))):
                continue
            if sentence.key not in seen:
                seen.add(sentence.key)
                sentences.append(sentence)
    return sentences


def _rarity(asked: set[str], words: Sequence[set[str]]) -> dict[str, float]:
    """BM25's weight of each word of the question among the sentences."""
    counts = Counter(word for found in words for word in asked & found)
    n = len(words)
    return {word: math.log(1 + (n - counts[word] + 0.5) / (counts[word] + 0.5)) for word in asked}


def _shares(weights: dict[str, float], words: Sequence[set[str]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The share of the question's weight that each sentence has: of the words that some sentence has, and of all.

    Where those that some sentence has are less than half, they are counted as half: an "is" alone says little.
    """
    sums = np.array([sum(weights[word] for word in weights.keys() & found) for found in words])
    everywhere = set().union(*words)
    known = sum(weight for word, weight in weights.items() if word in everywhere)
    total = sum(weights.values())
    return sums / (max(known, total / 2) or 1), sums / (total or 1)


def _centrality(words: Sequence[set[str]]) -> NDArray[np.float64]:
    """How much each sentence says of what the others say, 0-1; a long one has no advantage."""
    counts = Counter(word for found in words for word in found)
    scores = np.array(
        [sum(counts[word] - 1 for word in found) / math.sqrt(len(found) + 5) if found else 0.0 for found in words]
    )
    central: NDArray[np.float64] = scores / (scores.max() or 1)
    return central


def _ranks(sentences: Sequence[Sentence]) -> NDArray[np.float64]:
    return np.array([1 / (1 + sentence.document) for sentence in sentences])


def _similarities(
    question: Question, sentences: Sequence[Sentence], known: Mapping[str, float], embed: Embed
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Of each sentence to the question, and to the mean of those that were embedded: 0 = as unrelated texts, 1 = the
    same. ``known``: cosines; with these the question is not embedded either. None without a model."""
    unknown = [sentence.whole for sentence in sentences if sentence.key not in known]
    embedded = embed([] if known else [question.text], unknown)
    if embedded is None:
        return None
    rows, unrelated = embedded
    if known and unrelated.shape[1] != len(question.vector):  # of another model
        return _similarities(question, sentences, {}, embed)
    asked, found = (_unit(np.array(question.vector, np.float32)), rows) if known else (rows[0], rows[1:])
    mean = _unit(found.mean(axis=0) if len(found) else asked)
    others = iter(found @ asked)
    cosines = np.array([known[s.key] if s.key in known else next(others) for s in sentences])
    return _above(cosines, unrelated @ asked), _above(found @ mean, unrelated @ mean)


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = vector / (np.linalg.norm(vector) or 1)
    return scaled


def _above(cosines: NDArray[np.floating], unrelated: NDArray[np.float32]) -> NDArray[np.float64]:
    """Cosines as similarities, from those of unrelated texts on."""
    base = max(0.0, float(unrelated.mean()))
    counted: NDArray[np.float64] = (cosines - base).astype(np.float64) / (1 - min(base, 0.99))
    return counted


def _has_number(sentence: str, question: str) -> float:
    """Whether it has a number that the question has not."""
    asked = set(WORD.findall(question.lower()))
    return float(any(_NUMBER_WORD.search(word) for word in WORD.findall(sentence.lower()) if word not in asked))


def _pass_on(
    scores: NDArray[np.float64], sentences: Sequence[Sentence], words: Sequence[set[str]], asked: set[str]
) -> None:
    """Sentences that lead in, or name no more than the question, are last; what follows one is as good as it was.

    One with a full stop says something, even in words of the question: "Is the gym free?", "The gym is free."
    """
    for i, sentence in enumerate(sentences):
        says_nothing = asked and words[i] <= asked and not _STATES.search(sentence.text)
        if not says_nothing and not LEADS_IN.fullmatch(sentence.text):
            continue
        after = sentences[i + 1] if i + 1 < len(sentences) else None
        if after is not None and after.document == sentence.document:
            scores[i + 1] = max(scores[i + 1], scores[i])
        scores[i] -= 1


def _choose(
    scores: NDArray[np.float64], sentences: Sequence[Sentence], words: Sequence[set[str]], question: Question
) -> list[int]:
    """Indexes of the best sentences, best first."""
    scores = scores.copy()
    chosen: list[int] = []
    least = np.full(len(sentences), -np.inf)
    while len(chosen) < min(question.max_sentences, len(sentences)):
        best = int(np.argmax(np.where(scores >= least, scores, -np.inf)))
        if scores[best] < least[best]:
            break
        if not chosen and not question.is_summary:
            is_near = [s.document == sentences[best].document and not s.header for s in sentences]
            least = np.where(is_near, _LEAST_SHARE, _LEAST_ELSEWHERE) * max(0.0, float(scores[best]))
        chosen.append(best)
        scores[best] = -np.inf
        if question.is_summary:
            # what has been said already is worth less
            for i, found in enumerate(words):
                scores[i] -= len(found & words[best]) / (2 * len(found) or 1)
        elif (
            best + 1 < len(sentences)
            and sentences[best + 1].document == sentences[best].document
            and not sentences[best + 1].header
        ):
            scores[best + 1] += _NEXT
    return chosen


def _parts(question: Question, sentences: Sequence[Sentence]) -> Iterator[str]:
    """The text of each sentence with its marker and the blank space before it."""
    former = ""
    for sentence in sentences:
        text = without_markers(sentence.text) if question.markers else sentence.text
        marker = f" [{sentence.document + 1}]" if sentence.document < question.markers else ""
        before = _between(former, text) if former else ""
        yield f"{before or ' ' if former and marker else before}{text}{marker}"
        former = text


def _between(former: str, text: str) -> str:
    """The least blank space that leaves them two sentences; an item of a list begins a line."""
    for blank in ("\n",) if ITEM.match(text) else ("", " ", "\n"):
        start = len(former) + len(blank)
        if list(spans(f"{former}{blank}{text}")) == [(0, len(former)), (start, start + len(text))]:
            return blank
    return "\n\n"
