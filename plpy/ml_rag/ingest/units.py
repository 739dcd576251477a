"""A Markdown text as words, with what lies between them: where it may be cut, and how good a place each is.

A word is a run between white space; Chinese and Japanese, which are written without any, count one character a word,
with the punctuation that belongs to it.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

from ml_rag.abc import CHARACTERS_PER_TOKEN
from ml_rag.ingest.formats.common import CAPTION

#: how good a cut is; a heading is better still and handled apart, since segments do not reach over one
PARAGRAPH, ROW, SENTENCE, LINE, WORD, CHARACTER = 5, 4, 3, 2, 1, 0
#: the gap after a heading: never cut there as long as another place can be had
AFTER_HEADING = -1

#: of a heading in the metadata of each segment below it: a line of 1 MB would be a thousand times as much in them
HEADING_CHARACTERS = 500

#: of what stands above a table and does not call itself a caption
_CAPTION_CHARACTERS = 120

#: looked at in one go: a tokenizer's results take much memory
_LINES_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 100_000

_CJK = "\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_OPENING = "「『（《【〈〔［｛“‘"
_CLOSING = "、。，．！？；：」』）》】〉〕］｝…”’"
_WORDS = re.compile(
    rf"[{_OPENING}]*[{_CJK}][{_CLOSING}]*|[{_OPENING}]*[^\s{_CJK}{_OPENING}{_CLOSING}]+[{_CLOSING}]*"
    rf"|[{_OPENING}{_CLOSING}]+"
)
_RUN = re.compile(r"\w+")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r"\s*(?:[-*+•]|\(?\d{1,3}[.)])\s")
_SEPARATOR = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$")
#: the end of a sentence, where white space follows and the next word does not begin in lower case
_SENTENCE_END = re.compile(r"[.!?。！？…][\"'”’)\]」』）》】*_]*$")
#: the end of a sentence where no white space follows
_FULL_WIDTH_END = re.compile(r"[。！？][”’」』）》】]*$")
_ABBREVIATION = re.compile(r"^\(?(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|No|Nr|vs|Fig|e\.g|i\.e|cf|\d{1,2})\.$")


@dataclass(frozen=True, slots=True)
class Table:
    """A pipe table: its header with the separator below, and the words of its body (first, one past the last)."""

    header: str
    tokens: int
    first: int
    end: int
    #: first word of the header
    start: int
    #: the line above or below it that says what it is about; empty where none does
    caption: str


@dataclass(slots=True)
class Units:
    """A text cut into words. Word i is ``text[starts[i]:ends[i]]``."""

    text: str
    starts: array[int]
    ends: array[int]
    #: how good a cut before word i is
    gaps: array[int]
    #: ``total[i]``: tokens of the words before word i
    total: array[int]
    #: first word of each heading -> (its level, its text)
    headings: dict[int, tuple[int, str]] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)

    def tokens(self, first: int, end: int) -> int:
        return self.total[end] - self.total[first]

    def table_at(self, word: int) -> Table | None:
        """The table to whose body the word belongs."""
        index = bisect_right(self.tables, word, key=lambda table: table.first) - 1
        return self.tables[index] if index >= 0 and self.tables[index].first <= word < self.tables[index].end else None

    def slice(self, first: int, end: int) -> str:
        return self.text[self.starts[first] : self.ends[end - 1]]


class Counter:
    """Counts tokens as an embedding model does. ``tokenizer``: a ``tokenizers.Tokenizer``, or None: one a word."""

    def __init__(self, tokenizer: Any = None, prefix: str = "") -> None:
        self._tokenizer = tokenizer
        self._prefix = prefix
        #: tokens of every text beside its own: special ones, and those of the model's prefix for documents
        self.overhead = self.count([""])[0]

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as the model will read it."""
        if self._tokenizer is None:
            return [sum(_plain_count(word) for word in _WORDS.findall(self._prefix + text)) for text in texts]
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch_fast([self._prefix + t for t in texts])]

    def per_word(self, lines: Sequence[str], words: Sequence[Sequence[tuple[int, int]]]) -> list[list[int]]:
        """Tokens of each word; ``words`` holds (start, end) of those of each line."""
        if self._tokenizer is None:
            return [[_plain_count(line[a:b]) for a, b in spans] for line, spans in zip(lines, words, strict=True)]
        encodings = self._tokenizer.encode_batch(list(lines), add_special_tokens=False)
        return [
            _attribute([end for _, end in encoding.offsets], [b for _, b in spans])
            for encoding, spans in zip(encodings, words, strict=True)
        ]


def _plain_count(word: str) -> int:
    return max(1, len(_RUN.findall(word)))


def _attribute(token_ends: list[int], word_ends: list[int]) -> list[int]:
    """How many tokens end in each word."""
    counts = [0] * len(word_ends)
    word, last = 0, len(word_ends) - 1
    for end in token_ends:
        while word < last and end > word_ends[word]:
            word += 1
        counts[word] += 1
    return counts


def clean(text: str) -> str:
    """The text without NUL and lone surrogates, which neither PostgreSQL nor JSON can hold."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def units(text: str, counter: Counter, longest: int) -> Units:
    """Cut a text into words. One of more than ``longest`` tokens is cut into several."""
    lines = text.splitlines(keepends=True)
    kinds = _kinds(lines)
    found = Units(text, array("q"), array("q"), array("b"), array("q", [0]))
    tokens = array("q")
    first_words: dict[int, int] = {}
    previous = -1
    for index, offset, words in _counted_lines(lines, counter):
        first_words[index] = len(found.starts)
        kind, level, title = kinds[index]
        if kind == "heading":
            found.headings[len(found.starts)] = (level, title)
        for number, (start, end, count) in enumerate(words):
            begin = offset + start
            if number == 0:
                gap = _line_gap(found, kinds, previous, index, lines[index])
            elif kind == "heading":
                gap = AFTER_HEADING
            elif begin > found.ends[-1]:
                gap = SENTENCE if _ends_sentence(found, text[begin]) else WORD
            else:
                gap = SENTENCE if _ends_sentence(found, "") else CHARACTER
            _append(found, tokens, begin, offset + end, gap, count, longest)
        previous = index
    found.total.extend(accumulate(tokens))
    _find_tables(found, lines, kinds, first_words)
    return found


def _counted_lines(lines: list[str], counter: Counter) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
    """(number, offset, words) of each line that has words; a word is its start and end in the line and its tokens."""
    offset = 0
    for first in range(0, len(lines), _LINES_AT_ONCE):
        batch = []
        for index, line in enumerate(lines[first : first + _LINES_AT_ONCE], start=first):
            if spans := [match.span() for match in _WORDS.finditer(line)]:
                batch.append((index, offset, spans))
            offset += len(line)
        counts = _counts([(lines[index], spans) for index, _, spans in batch], counter)
        for index, at, spans in batch:
            yield index, at, [(start, end, next(counts)) for start, end in spans]


def _counts(lines: list[tuple[str, list[tuple[int, int]]]], counter: Counter) -> Iterator[int]:
    """Tokens of each word, line after line; long lines go to the tokenizer in pieces."""
    texts: list[str] = []
    words: list[list[tuple[int, int]]] = []
    size = 0
    for line, spans in lines:
        first = 0
        while first < len(spans):
            begin = spans[first][0]
            last = bisect_right(spans, begin + _CHARACTERS_AT_ONCE, first + 1, key=lambda span: span[1])
            texts.append(line[begin : spans[last - 1][1]])
            words.append([(start - begin, end - begin) for start, end in spans[first:last]])
            first = last
            size += len(texts[-1])
            if size > _CHARACTERS_AT_ONCE:
                yield from chain.from_iterable(counter.per_word(texts, words))
                texts, words, size = [], [], 0
    yield from chain.from_iterable(counter.per_word(texts, words))


def _append(found: Units, tokens: array[int], start: int, end: int, gap: int, count: int, longest: int) -> None:
    # of more characters than the model reads of a token it counts for more than its tokens
    cost = max(count, -(-(end - start) // CHARACTERS_PER_TOKEN))
    if cost <= longest or end - start < 2:
        found.starts.append(start)
        found.ends.append(end)
        found.gaps.append(gap)
        tokens.append(cost)
        return
    total, size = end - start, max(1, (end - start) * longest // (2 * cost))
    while start < end:
        stop = min(end, start + size)
        while stop < end and (unicodedata.combining(found.text[stop]) or found.text[stop] in "\u200d\ufe0f"):
            stop += 1
        found.starts.append(start)
        found.ends.append(stop)
        found.gaps.append(gap)
        tokens.append(-(-cost * (stop - start) // total))
        start, gap = stop, CHARACTER


def _ends_sentence(found: Units, following: str) -> bool:
    """Whether the word before ends a sentence. ``following``: the first character after a space, or "" without one."""
    if not found.ends:
        return False
    word = found.text[found.starts[-1] : found.ends[-1]]
    if not following:
        return bool(_FULL_WIDTH_END.search(word))
    return bool(_SENTENCE_END.search(word)) and not following.islower() and not _ABBREVIATION.search(word)


def _line_gap(found: Units, kinds: list[tuple[str, int, str]], previous: int, index: int, line: str) -> int:
    """How good a cut before the first word of a line is."""
    if previous < 0 or kinds[index][0] == "heading":
        return PARAGRAPH
    if kinds[previous][0] == "heading":
        return AFTER_HEADING
    if index > previous + 1:
        return PARAGRAPH
    if kinds[index][0] == "row" or _ITEM.match(line):
        return ROW if kinds[index][0] == kinds[previous][0] or kinds[index][0] != "row" else PARAGRAPH
    return SENTENCE if _ends_sentence(found, line.lstrip()[:1]) else LINE


def _kinds(lines: list[str]) -> list[tuple[str, int, str]]:
    """Each line's kind (heading, row of a table, text), and level and text of a heading."""
    kinds: list[tuple[str, int, str]] = []
    fence = ""
    for line in lines:
        if match := _FENCE.match(line):
            if not fence:
                fence = match[1]
            elif match[1].startswith(fence):
                fence = ""
        heading = None if fence else _HEADING.match(line.rstrip("\r\n"))
        if heading and (heading[2] or "").strip():
            kinds.append(("heading", len(heading[1]), heading[2].strip()[:HEADING_CHARACTERS]))
        else:
            kinds.append(("row" if not fence and line.lstrip().startswith("|") else "text", 0, ""))
    return kinds


def _find_tables(
    found: Units, lines: list[str], kinds: list[tuple[str, int, str]], first_words: dict[int, int]
) -> None:
    index = 0
    while index + 2 < len(lines):
        if not (kinds[index][0] == kinds[index + 1][0] == "row" and _SEPARATOR.match(lines[index + 1])):
            index += 1
            continue
        end = index + 2
        while end < len(lines) and kinds[end][0] == "row":
            end += 1
        if end > index + 2:
            # neither the separator nor the first row is ever parted from the header, where that can be helped
            found.gaps[first_words[index + 1]] = AFTER_HEADING
            found.gaps[first_words[index + 2]] = AFTER_HEADING
            body = first_words[index + 2]
            after = next((first_words[i] for i in range(end, len(lines)) if i in first_words), len(found.starts))
            header = "".join(lines[index : index + 2]).rstrip() + "\n"
            start, caption = first_words[index], _caption(lines, kinds, index, end)
            found.tables.append(Table(header, found.tokens(start, body), body, after, start, caption))
        index = end


def _caption(lines: list[str], kinds: list[tuple[str, int, str]], first: int, end: int) -> str:
    """Of the paragraphs beside a table the one that calls itself a caption, else a short one above, not a sentence.

    ``first`` and ``end``: the lines of the table.
    """
    above, below = _paragraph(lines, kinds, first - 1, -1), _paragraph(lines, kinds, end, 1)
    for text in (above, below):
        if CAPTION.match(text):
            return text
    return above if len(above) <= _CAPTION_CHARACTERS and not above.endswith(".") else ""


def _paragraph(lines: list[str], kinds: list[tuple[str, int, str]], at: int, step: int) -> str:
    """The next paragraph of a line of text; empty where it has more, or something else is there."""
    while 0 <= at < len(lines) and not lines[at].strip():
        at += step
    if not 0 <= at < len(lines) or kinds[at][0] != "text" or len(lines[at]) > HEADING_CHARACTERS:
        return ""
    beyond = at + step
    return lines[at].strip() if not 0 <= beyond < len(lines) or not lines[beyond].strip() else ""
