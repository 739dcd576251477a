"""A parsed document into segments, by tokens of the embedding model.

No segment is longer than asked for, as counted by the model's own tokenizer, and no word is cut unless it is longer
than a segment by itself. Structure decides where the cuts are: headings first, then paragraphs, rows and list items,
sentences, lines, words. (The library semantic-text-splitter was tried: it cuts "pre-|tax" and before a full stop,
and does not know tables or heading paths.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any, Literal, TypeVar, get_args

from ml_rag.abc import Block, Document, Segment
from ml_rag.errors import DocumentError, InvalidRequest
from ml_rag.ingest.formats.pictures import DESCRIBED_BY
from ml_rag.ingest.units import (
    AFTER_HEADING,
    CHARACTER,
    LINE,
    PARAGRAPH,
    ROW,
    SENTENCE,
    WORD,
    Counter,
    Table,
    Units,
    clean,
    units,
)
from ml_rag.protocol import MAX_SEGMENTS

_T = TypeVar("_T")

SplitBy = Literal["auto", "paragraph", "sentence", "page", "tokens"]
#: the values of ``split_by`` that cut; NONE gives each page as one segment, for who cuts it elsewhere
SPLIT_BY: tuple[SplitBy, ...] = get_args(SplitBy)
NONE: Literal["none"] = "none"
ContextKind = Literal["none", "headings"]
#: the values of ``context``
CONTEXTS: tuple[ContextKind, ...] = get_args(ContextKind)
MIN_SEGMENT_TOKENS = 16
#: where the model could take more: longer segments blur what their embedding says
DEFAULT_SEGMENT_TOKENS = 256

#: pieces counted in one call of the tokenizer: its results take much memory
_PIECES_AT_ONCE = 500
#: the context of a segment takes at most this part of its tokens
_CONTEXT_SHARE = 4
#: words and characters that a page has at most if it is not a segment of its own
_SHORT_WORDS, _SHORT_CHARACTERS = 6, 60
#: how full a segment must be for a table to begin in the next one
_BEFORE_TABLE = 0.3
_KEYS = ("split_by", "segment_tokens", "overlap_tokens", "context")
#: kinds of cuts in the order in which they are looked for, and how full a segment must be for one of each
_PREFERENCE = ((PARAGRAPH, 0.5), (ROW, 0.5), (SENTENCE, 0.5), (LINE, 0.6), (WORD, 0.0), (CHARACTER, 0.0))


@dataclass(frozen=True, slots=True)
class Chunking:
    """How to split; made by ``chunking``."""

    split_by: SplitBy | Literal["none"]
    #: most tokens of a segment, the model's special tokens and its prefix for documents among them
    segment_tokens: int
    #: tokens that a segment repeats of the one before
    overlap_tokens: int
    #: headings: the document's title and the headings that a segment stands under are embedded before its text
    context: ContextKind = "none"


def chunking(options: Any, max_tokens: int) -> Chunking:
    """Check the options, which are the fields of ``Chunking``; None or a missing one is its default.

    ``max_tokens``: the longest input of the embedding model. Raises ``InvalidRequest`` that names option, value and
    what is allowed.
    """
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise _invalid("chunking", options, f"an object with {', '.join(_KEYS)}")
    for key in options:
        if key not in _KEYS:
            raise _invalid("chunking", key, f"the keys {', '.join(_KEYS)}")
    split_by = options.get("split_by")
    if split_by is None:
        split_by = "auto"
    if split_by not in (*SPLIT_BY, NONE):
        raise _invalid("split_by", split_by, f"one of {', '.join(SPLIT_BY)}")
    context = options.get("context")
    if context is None:
        context = "none"
    if context not in CONTEXTS:
        raise _invalid("context", context, f"one of {', '.join(CONTEXTS)}")
    least = min(MIN_SEGMENT_TOKENS, max_tokens)
    segment_tokens = _integer(
        "segment_tokens", options.get("segment_tokens"), min(DEFAULT_SEGMENT_TOKENS, max_tokens), least, max_tokens
    )
    overlap_tokens = _integer("overlap_tokens", options.get("overlap_tokens"), 0, 0, segment_tokens // 2)
    return Chunking(split_by, segment_tokens, overlap_tokens, context)


def _integer(name: str, value: Any, default: int, least: int, most: int) -> int:
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _invalid(name, value, f"an integer from {least} to {most}")
    return value


def _invalid(name: str, value: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"invalid value of {name}", detail=f"{name} is {str(value)[:200]!r}; allowed: {allowed}")


def split(document: Document, how: Chunking, counter: Counter, most: int = MAX_SEGMENTS) -> list[Segment]:
    """The document's segments, in its order; every character of it but white space is in one of them.

    A segment's metadata are its block's, ``headings``, the path of headings it stands under, and ``table`` where one is
    in it: its number in the document, and its caption. A segment that continues a table begins with that table's
    header, and a row is cut only if it does not fit by itself. With ``overlap_tokens`` a segment begins with the last
    words of the one before it, where both are of one section of one block; a table's header takes their place. One of a
    picture's description begins with the name of the model that wrote it. A segment and its context have at most
    ``segment_tokens`` together. Raises ``DocumentError`` where there are more than ``most``.
    """
    if how.split_by == NONE:
        pages = (Block(_origin(page) + clean(page.text), page.metadata) for page in _joined(document.blocks, NONE))
        return _at_most(most, [Segment(page.text, 0, page.metadata) for page in pages if page.text.strip()])
    limit = max(1, how.segment_tokens - counter.overhead)
    context = _Context(document if how.context == "headings" else None, counter, limit // _CONTEXT_SHARE)
    overlap = min(how.overlap_tokens, limit // 2)
    path: list[tuple[int, str]] = []
    pieces: list[_Piece] = []
    labels = _Labels()
    for block in _joined(document.blocks, how.split_by):
        text = clean(block.text)
        found = units(text, counter, limit)
        if found.starts:
            origin = _origin(block)
            room = max(1, limit - counter.count([origin])[0] + counter.overhead) if origin else limit
            cutter = _Cutter(found, room, min(overlap, room // 2), how.split_by, context, labels.of(found.tables))
            pieces.extend(_Piece(cutter, block, *piece) for piece in cutter.pieces(path))
            _at_most(most, pieces)  # counting them takes most of the time
    return _at_most(most, _counted(pieces, how.segment_tokens, counter, context))


def _origin(block: Block) -> str:
    """What stands before a text that a model has made of a picture."""
    model = block.metadata.get(DESCRIBED_BY)
    return f"(Picture, described by the model {model})\n\n" if model else ""


def _at_most(most: int, found: list[_T]) -> list[_T]:
    if len(found) > most:
        raise DocumentError(
            "the document has too many segments",
            detail=f"it may have {most} with this embedding model",
            hint="Split the document, or raise segment_tokens.",
        )
    return found


class _Labels:
    """What segments report of the tables of a document; one that continues in the next block keeps its number."""

    def __init__(self) -> None:
        self._number = 0
        self._last: tuple[str, dict[str, Any]] | None = None

    def of(self, tables: Sequence[Table]) -> list[dict[str, Any]]:
        found = []
        for i, table in enumerate(tables):
            if i == 0 and self._last is not None and self._last[0] == table.header and not table.caption:
                found.append(self._last[1])
                continue
            self._number += 1
            found.append({"number": self._number, **({"caption": table.caption} if table.caption else {})})
        self._last = (tables[-1].header, found[-1]) if tables else None
        return found


class _Context:
    """What stands before segments where they are embedded: the title, then the headings; the last that fit."""

    def __init__(self, document: Document | None, counter: Counter, most: int) -> None:
        title = document.metadata.get("title") if document is not None else None
        self._title = (" ".join(clean(title).split()),) if isinstance(title, str) and title.strip() else ()
        self._is_wanted = document is not None
        self._counter = counter
        self._most = most
        self._known: dict[tuple[str, ...], tuple[str, int]] = {}

    def text(self, headings: tuple[str, ...]) -> str:
        return self._of(headings)[0]

    def tokens(self, headings: tuple[str, ...]) -> int:
        return self._of(headings)[1]

    def _of(self, headings: tuple[str, ...]) -> tuple[str, int]:
        if not self._is_wanted:
            return "", 0
        if headings not in self._known:
            self._known[headings] = self._shortened(headings if headings[:1] == self._title else self._title + headings)
        return self._known[headings]

    def _shortened(self, parts: tuple[str, ...]) -> tuple[str, int]:
        while parts:
            text = " > ".join(parts)
            tokens = self._counter.count([text])[0] - self._counter.overhead
            if tokens <= self._most:
                return text, tokens
            parts = parts[1:]
        return "", 0


def _joined(blocks: Sequence[Block], split_by: str) -> Iterator[Block]:
    """Neighbouring blocks of the same page (slide, sheet) as one; pages of a few words with a neighbour."""
    whole = _of_same_page(blocks, split_by)
    return whole if split_by in ("page", NONE) else _with_neighbours(whole)


def _with_neighbours(blocks: Iterator[Block]) -> Iterator[Block]:
    """A page or slide of a few words stands before the next one, or after the one before; its number goes."""
    short: list[Block] = []
    ready: Block | None = None
    for block in blocks:
        if not block.metadata.keys() & {"page", "slide"} or DESCRIBED_BY in block.metadata:
            yield from [ready] if ready else []
            yield from short
            short, ready = [], None
            yield block
        elif _is_short(block.text):
            short.append(block)
        else:
            yield from [ready] if ready else []
            ready = Block("\n\n".join([*(one.text for one in short), block.text]), block.metadata)
            short = []
    if ready:
        yield Block("\n\n".join([ready.text, *(one.text for one in short)]), ready.metadata)
    else:
        yield from short


def _is_short(text: str) -> bool:
    return len(text) <= _SHORT_CHARACTERS and len(text.split()) <= _SHORT_WORDS


def _of_same_page(blocks: Sequence[Block], split_by: str) -> Iterator[Block]:
    if split_by == "page":
        yield from blocks
        return
    for metadata, same in groupby(blocks, lambda block: block.metadata):
        yield Block("\n\n".join(block.text for block in same), metadata)


@dataclass(slots=True)
class _Piece:
    """Words ``first`` to before ``end``, the words from ``shared`` on before them repeated."""

    cutter: _Cutter
    block: Block
    shared: int
    first: int
    end: int
    headings: tuple[str, ...]
    #: without the header of the table that it continues
    bare: bool = False

    def text(self) -> str:
        table = None if self.bare else self.cutter.header(self.first)
        body = (table.header if table else "") + self.cutter.found.slice(self.shared, self.end)
        return _origin(self.block) + body

    def label(self) -> dict[str, Any] | None:
        """Of the first table that it has a part of."""
        tables = self.cutter.found.tables
        i = bisect_right(tables, self.shared, key=lambda table: table.end)
        return self.cutter.labels[i] if i < len(tables) and tables[i].start < self.end else None

    def shortened(self) -> list[_Piece]:
        """The same words in shorter pieces; none where that is a single word."""
        if self.shared < self.first:
            return [replace(self, shared=self.first)]
        if self.end == self.first + 1:
            header = None if self.bare else self.cutter.header(self.first)
            return [replace(self, bare=True)] if header else []
        found = self.cutter.found
        middle = (found.total[self.first] + found.total[self.end]) / 2
        words = range(self.first + 1, self.end)
        at = max(words, key=lambda word: (found.gaps[word], -abs(found.total[word] - middle)))
        return [replace(self, end=at), replace(self, shared=at, first=at)]


class _Cutter:
    def __init__(
        self,
        found: Units,
        limit: int,
        overlap: int,
        split_by: SplitBy,
        context: _Context,
        labels: list[dict[str, Any]],
    ) -> None:
        self.found = found
        self.labels = labels
        self._context = context
        self._limit = limit
        self._overlap = overlap
        self._split_by = split_by
        self._heading_words = list(found.headings)

    def pieces(self, path: list[tuple[int, str]]) -> list[tuple[int, int, int, tuple[str, ...]]]:
        """(shared, first, end, headings) of each piece; ``path``: the headings in force, kept up to date."""
        if self._split_by in ("page", "tokens"):
            sections = [(0, len(self.found.starts), self._path(path, 0, len(self.found.starts)))]
        else:
            sections = list(self._sections(path))
        ranges: list[tuple[int, int, int, tuple[str, ...]]] = []
        for first, end, headings in sections:
            for shared, start, stop in self._cut(first, end, headings):
                may_join = self._split_by == "auto" and start == first and ranges
                if may_join and self._joinable(ranges[-1], stop, headings):
                    before = ranges.pop()
                    ranges.append((before[0], before[1], stop, _common(before[3], headings)))
                else:
                    ranges.append((shared, start, stop, headings))
        return ranges

    def _path(self, path: list[tuple[int, str]], first: int, end: int) -> tuple[str, ...]:
        """The path at the start of a range; ``path`` becomes that at its end."""
        at_start: tuple[str, ...] | None = None if first in self.found.headings else tuple(t for _, t in path)
        headings = self._heading_words
        for word in headings[bisect_left(headings, first) : bisect_left(headings, end)]:
            level, title = self.found.headings[word]
            while path and path[-1][0] >= level:
                path.pop()
            path.append((level, title))
            if at_start is None:
                at_start = tuple(t for _, t in path)
        return at_start or ()

    def _sections(self, path: list[tuple[int, str]]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        """(first word, one past the last, heading path) of what stands between two headings.

        A heading that another one follows at once goes with that one.
        """
        count = len(self.found.starts)
        begin = 0
        for border in [*(word for word in self.found.headings if word > 0), count]:
            if border < count and self._only_headings(begin, border):
                continue
            headings = self._path(path, begin, border)
            if begin in self.found.headings:  # the path of what follows the headings that open the section
                headings = tuple(title for _, title in path)
            yield begin, border, headings
            begin = border

    def _only_headings(self, first: int, end: int) -> bool:
        """Whether the words are headings, each deeper than the one before, and the one at ``end`` deeper still."""
        found, level = self.found, 0
        for word in range(first, end):
            if word in found.headings:
                if found.headings[word][0] <= level:
                    return False
                level = found.headings[word][0]
            elif found.gaps[word] != AFTER_HEADING or "\n" in found.text[found.ends[word - 1] : found.starts[word]]:
                return False
        return found.headings[end][0] > level > 0

    def _joinable(self, before: tuple[int, int, int, tuple[str, ...]], stop: int, headings: tuple[str, ...]) -> bool:
        """Whether the piece up to ``stop`` still fits to the one before, under one heading."""
        if before[3] != headings and not _common(before[3], headings):
            return False
        header = self.header(before[1])
        limit = self._limit - self._context.tokens(_common(before[3], headings))
        return self.found.tokens(before[0], stop) + (header.tokens if header else 0) <= limit

    def header(self, word: int) -> Table | None:
        """The table whose header a piece that begins with this word repeats, or None."""
        table = self.found.table_at(word)
        return table if table is not None and table.tokens <= self._limit // 2 else None

    def _cut(self, first: int, end: int, headings: tuple[str, ...]) -> Iterator[tuple[int, int, int]]:
        """(shared, first, end) of the pieces of a section."""
        limit = self._limit - self._context.tokens(headings)
        start = first
        while start < end:
            shared = self._shared(first, start)
            stop = self._stop(shared, start, end, limit)
            if stop == start:  # not even one word fits beside what it would repeat
                shared = start
                stop = max(self._stop(start, start, end, limit), start + 1)
            yield shared, start, stop
            start = stop

    def _shared(self, first: int, start: int) -> int:
        """Where the repeated words before ``start`` begin."""
        total = self.found.total
        shared = start
        if start > first and not self.found.table_at(start):
            while shared > first + 1 and total[start] - total[shared - 1] <= self._overlap:
                shared -= 1
        return shared

    def _stop(self, shared: int, start: int, end: int, limit: int) -> int:
        """Where the piece that begins at ``shared`` ends best."""
        total, gaps = self.found.total, self.found.gaps
        header = self.header(start)
        room = limit - (header.tokens if header else 0)
        # as many words as fit
        last = max(start, min(end, bisect_right(total, total[shared] + room, start, end + 1) - 1))
        if self._split_by in ("paragraph", "sentence"):
            wanted = PARAGRAPH if self._split_by == "paragraph" else SENTENCE
            for word in range(start + 1, last + 1):
                if word < end and gaps[word] >= wanted:
                    return word
        if last == end or last <= start:
            return last
        if self._split_by == "tokens":
            return next((word for word in range(last, start, -1) if gaps[word] >= WORD), last)
        if (table := self.found.table_at(last)) is not None:
            # whole in the next segment, where it fits and this one has enough without it; else between two rows
            least = total[shared] + _BEFORE_TABLE * room
            whole = total[table.end] - total[table.start] <= limit
            if start < table.start <= last and whole and total[table.start] >= least:
                return table.start
            for word in range(last, max(start, table.first), -1):
                if gaps[word] == ROW:
                    return word
        for kind, fill in _PREFERENCE:
            least = total[shared] + fill * room
            for word in range(last, start, -1):
                if total[word] < least:
                    break
                if gaps[word] == kind:
                    return word
        return last


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _counted(pieces: Sequence[_Piece], most: int, counter: Counter, context: _Context) -> list[Segment]:
    """The segments, counted as a whole: in some tokenizers words do not add up exactly, and a piece is cut again."""
    if len(pieces) > _PIECES_AT_ONCE:
        batches = (pieces[at : at + _PIECES_AT_ONCE] for at in range(0, len(pieces), _PIECES_AT_ONCE))
        return [segment for batch in batches for segment in _counted(batch, most, counter, context)]
    segments: list[Segment] = []
    found = [Segment(piece.text(), 0, {}, context.text(piece.headings)) for piece in pieces]
    counts = counter.count([segment.embedded_text() for segment in found])
    for piece, segment, tokens in zip(pieces, found, counts, strict=True):
        if tokens > most and (shorter := piece.shortened()):
            segments.extend(_counted(shorter, most, counter, context))
            continue
        metadata = dict(piece.block.metadata)
        if piece.headings:
            metadata["headings"] = list(piece.headings)
        if label := piece.label():
            metadata["table"] = label
        if tokens <= most:
            segments.append(replace(segment, tokens=tokens, metadata=metadata))
        else:  # a word that fills segments by itself: without context
            segments.extend(Segment(part, count, metadata) for part, count in _characters(segment.text, most, counter))
    return segments


def _characters(text: str, most: int, counter: Counter) -> list[tuple[str, int]]:
    """A single word, cut in halves until each has few enough tokens."""
    tokens = counter.count([text])[0]
    if tokens <= most or len(text) == 1:
        return [(text, tokens)]
    middle = len(text) // 2
    return _characters(text[:middle], most, counter) + _characters(text[middle:], most, counter)
