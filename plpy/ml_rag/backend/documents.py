"""Which documents a question names, by their file names, titles and paths; no model is asked.

A question and a name are compared word by word, in any case and whatever stands between the words: ``Perks Plus.PDF``
is perksplus.pdf. What reads as a name counts wherever it stands: with an ending or a folder, with digits, or of three
words and more. What could be two ordinary words ("benefit options") counts where it is written as a name is: joined,
in quotation marks or with capitals in running text; and where the question speaks of a document: "the employee
handbook", "the benefit options document", "role library: who …", "summarise the handbook". There a part of a name will
do, such as "the Standard plan document", or what it has: "the PDF with the job descriptions". What could be several
documents is none, unless the question speaks of several ("both plan documents"). Standard library only.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

#: words of a question that a name has at most, and first words of a question that are looked at
LONGEST_NAME = 16
WORDS = 400
#: characters of a question in which a label or a request for a summary is looked for: the time grows with their square
LONGEST_QUESTION = 4000
#: of a longer name, which any role may have given, the last characters are looked at
CHARACTERS = 300
#: names looked at between two looks at interrupts
BATCH = 25
#: places of a question where a name is looked for, likewise
PLACES = 16
#: parts of names that are looked for among all names
PARTS = 200

_BLANKS = re.compile(r"\s+")
_WORD = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ENDING = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,4}$")
_DOCUMENT = re.compile(r"(documents?|files?|docs?|pdfs?|docx|pptx?|xlsx?|csv|html?|txt|md|slides|spreadsheets?)$")
_SEVERAL = re.compile(r"(documents|files|docs|pdfs|spreadsheets)$")
#: what a document is by its own name: the last word of such a name speaks of one
_KIND = re.compile(
    r"(handbook|guide|guidelines?|manual|library|catalogu?e|report|polic(y|ies)|plan|minutes|memo|contract|brochure"
    r"|faq|readme|glossary|rules|terms)$"
)
#: what comes between a document and what it has
_HAS = frozenset(("with", "about", "on", "of", "for", "containing"))
#: words in which what it has is looked for
_HAD = 3
_NUMBERS = {"both": 2, "two": 2, "three": 3, "four": 4, "five": 5}
_ARTICLES = frozenset(("the", "this", "that", "these", "those", "our", "my", "your", "all", *_NUMBERS))
_BEFORE = frozenset(
    (
        "the",
        "this",
        "that",
        "our",
        "your",
        "from",
        "in",
        "of",
        "per",
        "according",
        "to",
        "and",
        "compare",
        "see",
        "read",
    )
)
#: what comes before a document that something is looked for in
_INSIDE = frozenset(("in", "from", "per", "see", "read", "to", "by"))
#: words that do not make the rest of a request for a summary a question
_FILLERS = _ARTICLES | {"it", "a", "an", "and", "of", "please", "whole", "entire", "following", "text", "paper", "me"}
_FILLERS |= {"called", "named", "titled", "entitled", "which", "is"}
_LABEL = re.compile(r"\s*([^:?!\n]{1,80}?)\s*(?::|\s[-–—])\s")
_HINT = re.compile(r"summar[iy]|sum up|overview|outline|gist|tl;?\s?dr|points|takeaways|contents", re.IGNORECASE)
_SUMMARY = re.compile(
    r"(?:\s*(?:please|can you|could you|give me|i need|write|show me)\b)*\s*"
    r"(?:(?:a |an |the |short |brief |quick |main )*"
    r"(?:summari[sz]e|sum up|summary of|overview of|outline of|gist of|tl;?\s?dr(?: of)?|(?:key |main )*"
    r"(?:points|takeaways|contents) (?:of|from|in)))\b:?\s*(.*?)\s*(?:,?\s*please)?[.!?\s]*$",
    re.IGNORECASE | re.DOTALL,
)


def words(text: str) -> list[str]:
    """The words of a text in lower case; capitals inside a word do not begin another."""
    return [word.lower() for word in _WORD.findall(text)]


@dataclass(slots=True)
class _Names:
    """The names that documents go by: squeezed together -> documents."""

    #: count wherever they stand
    always: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    #: count where the question speaks of a document
    ordinary: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    #: words of a name, by the last of them and by any of them, for parts of it
    by_last: dict[str, list[tuple[list[str], int]]] = field(default_factory=lambda: defaultdict(list))
    by_any: dict[str, list[tuple[list[str], int]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, number: int, name: str, titles: Sequence[str]) -> None:
        name = name[-CHARACTERS:]
        path = ([part for part in re.split(r"[/\\]+", name) if part] or [name])[-LONGEST_NAME:]
        stem = _ENDING.sub("", path[-1])
        *folders, file = ("".join(words(part)) for part in path)
        forms = {file, "".join(words(stem))}
        for first in range(len(path)):
            # without folder and ending it is an ordinary text
            for form in forms if first < len(folders) else {file} if stem != path[-1] else ():
                if squeezed := "".join([*folders[first:], form]):
                    self.always[squeezed].add(number)
        for text in (stem, *titles):
            parts = [
                sys.intern(word.lower())
                for run in _WORD.findall(text)
                for word in ((run,) if run.islower() else _CAMEL.split(run))
            ]
            if not parts:
                continue
            squeezed = "".join(parts)
            # one for all words of a name: a million of them would take a gigabyte, and seconds without an interrupt
            named = parts, number
            self.by_last[parts[-1]].append(named)
            for word in set(parts):
                self.by_any[word].append(named)
            if len(parts) == 1 and squeezed.isdigit():
                continue  # the key of a row: "a jacket under 100" names no document
            where = self.always if len(parts) > 2 or (text is stem and re.search(r"\d", stem)) else self.ordinary
            where[squeezed].add(number)

    def of_part(self, part: Sequence[str]) -> set[int]:
        """The documents that have these words in this order in a name: the last one last, else anywhere."""
        for names in (self.by_last, self.by_any):
            if found := {number for name, number in names.get(part[-1], ()) if _in_order(part, name)}:
                return found
        return set()

    def having(self, words: Sequence[str]) -> set[int]:
        """The documents that are the only ones with one of the words in a name."""
        found = ({number for _, number in self.by_any.get(word, ())} for word in words)
        return set().union(*(numbers for numbers in found if len(numbers) == 1))


def _in_order(part: Sequence[str], name: Sequence[str]) -> bool:
    rest = iter(name)
    return all(word in rest for word in part)


@dataclass(frozen=True, slots=True)
class Named:
    """``names``: of documents, in the order in which a question has them."""

    names: list[str]
    #: whether it asks for nothing but a summary: of them, or of what it does not name ("summarise this document")
    is_summary: bool


def named(
    question: str,
    documents: Iterable[tuple[str, Sequence[str]]],
    interrupt: Callable[[], object] = lambda: None,
) -> Named:
    """The documents that ``question`` names.

    ``documents``: name and titles of each. ``interrupt`` is called now and then.
    """
    listed = []
    names = _Names()
    for number, (name, titles) in enumerate(documents):
        if number % BATCH == 0:
            interrupt()
        listed.append(name)
        names.add(number, name, titles)
    asked = _Question(question)
    found = asked.documents(names, interrupt)
    return Named(list(dict.fromkeys(listed[number] for number in found)), asked.is_summary())


def asks_for_summary(question: str, names: Sequence[str], interrupt: Callable[[], object]) -> bool:
    """Whether ``question`` asks for nothing but a summary of documents of these names."""
    # most questions have no such word
    return _HINT.search(question) is not None and named(question, [(name, ()) for name in names], interrupt).is_summary


class _Question:
    def __init__(self, question: str) -> None:
        # no expression below sees a run of blanks
        question = _BLANKS.sub(lambda blanks: "\n" if "\n" in blanks[0] else " ", question).strip()
        matches = list(_WORD.finditer(question))[:WORDS]
        self.words = [match[0].lower() for match in matches]
        self._capitals = [match[0][0].isupper() for match in matches]
        #: what stands before each word, and after the last one
        ends = [0, *(match.end() for match in matches)]
        starts = [*(match.start() for match in matches), ends[-1] + 1]
        self._between = [question[end:start] for end, start in zip(ends, starts, strict=True)]
        #: which words a label ("role library: …") or a request for a summary says to be a name
        head = question if len(question) <= LONGEST_QUESTION else ""
        self._is_summary = _SUMMARY.match(head) is not None
        self._taken = [False] * len(self.words)
        self._parts = 0
        self.object = self._object(head, [match.start() for match in matches], [match.end() for match in matches])

    @staticmethod
    def _object(question: str, starts: list[int], ends: list[int]) -> tuple[int, int] | None:
        match = _SUMMARY.match(question) or _LABEL.match(question)
        if match is None:
            return None
        first, last = match.span(1)
        inside = [i for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if start >= first and end <= last]
        return (inside[0], inside[-1] + 1) if inside else None

    def is_summary(self) -> bool:
        """Whether nothing but a summary is asked for, once ``documents`` has taken the names out of it."""
        if not self._is_summary:
            return False
        first, last = self.object or (0, 0)
        return all(
            self._taken[i] or _DOCUMENT.match(word) or word in _FILLERS
            for i, word in enumerate(self.words[first:last], first)
        )

    def documents(self, names: _Names, interrupt: Callable[[], object]) -> list[int]:
        """Longest names first; what one has taken is not part of another."""
        at: dict[int, list[int]] = {}
        taken = self._taken
        for length in range(min(LONGEST_NAME, len(self.words)), 0, -1):
            for first in range(len(self.words) - length + 1):
                if first % PLACES == 0:
                    interrupt()
                if any(taken[first : first + length]):
                    continue
                if found := self._named(names, first, first + length):
                    taken[first : first + length] = [True] * length
                    at[first] = sorted(found)
        return [number for first in sorted(at) for number in at[first]]

    def _named(self, names: _Names, first: int, last: int) -> set[int] | None:
        squeezed = "".join(self.words[first:last])
        speaks = self._speaks_of_document(first, last)
        found = names.always.get(squeezed)
        if not found and (speaks or self._is_written_as_name(names, squeezed, first, last)):
            found = names.ordinary.get(squeezed)
        if not found and last < len(self.words):
            found = self._had(names, first, last)
        if not found and self._parts < PARTS and self._may_be_part(first, last):
            self._parts += 1
            found = names.of_part(self.words[first:last])
        if not found:
            return None
        if len(found) == 1 or self._several(first, last) in (0, len(found)):
            return found
        return None

    def _speaks_of_document(self, first: int, last: int) -> bool:
        before = self.words[first - 1] if first else ""
        is_ahead = (before in _BEFORE and _KIND.match(self.words[last - 1])) or _DOCUMENT.match(before)
        is_behind = self._is_before_document(last) or (last < len(self.words) and _KIND.match(self.words[last]))
        return bool(is_ahead or is_behind) or self._is_object(first, last)

    def _is_written_as_name(self, names: _Names, squeezed: str, first: int, last: int) -> bool:
        """Joined, in quotation marks, or with capitals where most words have none."""
        inside = self._between[first + 1 : last]
        before, after = self._between[first][-1:], self._between[last][:1]
        if before and before in "\"'“„«‘`" and after and after in "\"'”“»’`":
            return True
        if last - first == 1:
            return all(len(parts) > 1 for parts, _ in names.by_last.get(squeezed, ())) and squeezed in names.ordinary
        if all(between in ("_", "-", ".") for between in inside):
            return True
        others = self._capitals[:first] + self._capitals[last:]
        return all(self._capitals[first:last]) and 2 * sum(others) <= len(others)

    def _had(self, names: _Names, first: int, last: int) -> set[int] | None:
        """The document that is called one by what it has: "the PDF with the job descriptions"."""
        is_document = last - first == 1 and _DOCUMENT.match(self.words[first])
        if not is_document or not first or self.words[first - 1] not in _ARTICLES or self.words[last] not in _HAS:
            return None
        had = [word for word in self.words[last + 1 : last + 2 + _HAD] if word not in _ARTICLES][:_HAD]
        found = names.having(had)
        return found if len(found) == 1 else None

    def _may_be_part(self, first: int, last: int) -> bool:
        """Whether part of a name will do. One word needs an article: "the plan documents", but not "plan documents"."""
        if self._is_object(first, last):
            return True
        has_article = first > 0 and self.words[first - 1] in _ARTICLES
        is_inside = has_article and first > 1 and self.words[first - 2] in _INSIDE
        if is_inside and last - first == 1 and _KIND.match(self.words[first]):
            return True
        return self._is_before_document(last) and (last - first > 1 or has_article)

    def _is_before_document(self, last: int) -> bool:
        return last < len(self.words) and _DOCUMENT.match(self.words[last]) is not None

    def _is_object(self, first: int, last: int) -> bool:
        """Whether it is all that a label or a request for a summary names, but for an article."""
        if self.object is None:
            return False
        start, end = self.object
        return last == end and first - start in (0, 1) and (first == start or self.words[start] in _BEFORE)

    def _several(self, first: int, last: int) -> int:
        """How many documents the question speaks of here: 1; 0 = some."""
        if last < len(self.words) and _SEVERAL.match(self.words[last]):
            return next((_NUMBERS[word] for word in self.words[max(0, first - 2) : first] if word in _NUMBERS), 0)
        return 1
