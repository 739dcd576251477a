"""Where sentences begin and end in a text as it is, and words: headings, list items and rows are sentences, too.

Standard library only: this module is imported in the PostgreSQL backend too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

#: the end of a sentence: white space and no lower case letter follow; full-width stops need none
# where a run of marks begins only, or a long one would be gone through from each of them
_END = re.compile(r"(?<![.!?…؟۔।॥։።])[.!?…؟۔।॥։።]+[\"'”’)\]*_]*(?=\s+(?![a-zà-öø-ÿ]))|[。！？｡][”’」』）》】\]]*")
# a number of one or two digits begins an item, or is a German ordinal after one of these words or before a month
_ABBREVIATION = re.compile(
    r"(?:^|[\s(])(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|No|Nr|vs|Fig|e\.g|i\.e|cf|(?:[A-Z]\.)+[A-Z]|approx|ext|incl|& Co"
    r"|ca|bzw|[Tt]el|vgl|Abs|Abb|[Mm]ind|inkl|zzgl|ggf|evtl|sog|geb|Hr|Dipl|Ing)\.$"
    r"|^\W*\d{1,2}\.$|\b(?i:d(?:er|ie|as|en|em|es)|[ai]m|vom|zu[mr]|beim|bis|seit|ab|und|oder)\s+\d{1,2}\.$"
)
#: what ends no sentence before a number
_BEFORE_NUMBER = re.compile(
    r"(?:^|[\s(])(?:Art|Kap|Bd|Ziff?|[Mm]ax|[Mm]in|[Ff]igs?|[Ss]ec|[Vv]ol|[Cc]h|no|pp?|Pos"
    r"|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Okt|Oct|Nov|De[zc]|Mo|Di|Mi|Do|Fr|Sa|So)\.$"
)
_NUMBER = re.compile(r"\s+\d")
_DAY = re.compile(r"\b\d{1,2}\.$")
_MONTH = re.compile(r"\s+(?:J(?:anuar|änner|uni|uli)|Februar|März|April|Mai|August|(?:Septem|Okto|Novem|Dezem)ber)\b")
#: a line that begins anew: a heading, an item of a list, a row of a table
ITEM = re.compile(r"#{1,6} |[-*+•] |\(?\d{1,3}[.)] |\|")
#: a line that nothing continues
CLOSED = ("#", "|")
#: the rule below the header of a table, and lines that hold no letter or digit
_NOTHING = re.compile(r"[\W_]*")
#: the header of a table with the rule below it; the first line after the rows
_HEADER = re.compile(r"^[ \t]*(\|.{0,1000})\n[ \t]*\|(?=.*-)[ \t:|-]*\r?(?:\n|\Z)", re.MULTILINE)
#: a cell that begins with a number, but for a year: such a row is none, as many tables have no header
_VALUE = re.compile(r"\|\s*[-+€$£¥]?(?!(?:19|20)\d\d\s*(?:\||\Z))\d")
_BELOW = re.compile(r"^(?![ \t]*\|)", re.MULTILINE)
_ROW = re.compile(r"\s*\|")
#: before a sentence; a definition of a list begins with a colon
_BLANK = re.compile(r"\s*(?::\s+)?")
#: scripts that have no blanks between words
DENSE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
DENSE_WORD = re.compile(f"[{DENSE}]")
WORD = re.compile(rf"[{DENSE}]+|[^\W_{DENSE}]+")
#: letters of a word that are as good as its stem in most languages
STEM = 6
#: what answers nothing, and states nothing: a heading, a question, what ends with a colon
LEADS_IN = re.compile(r"#{1,6} .*|.*[?？:：][\"'”’)\]」』*_]*", re.DOTALL)
#: characters that are looked at before a full stop
_BEHIND = 12
#: a longer one is cut at blanks: a text without full stops, such as one in Thai
_LONGEST = 1000


def ends(text: str, pause: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Where the sentences of a paragraph end; the last one ends with the text."""
    start = 0
    for number, match in enumerate(_END.finditer(text)):
        if number % 1000 == 0:
            pause()
        before = text[max(start, match.end() - _BEHIND) : match.end()]
        if (
            _ABBREVIATION.search(before)
            or (_DAY.search(before) and _MONTH.match(text, match.end()))
            or (_BEFORE_NUMBER.search(before) and _NUMBER.match(text, match.end()))
        ):
            continue
        start = match.end()
        yield start
    yield len(text)


def spans(text: str, pause: Callable[[], object] = lambda: None) -> Iterator[tuple[int, int]]:
    """First and last position of each sentence, end exclusive, without the blank space around it.

    ``pause`` is called for each, and for what is none: a text can be nothing but blank lines or full stops, or one
    paragraph of a million lines.
    """
    for first, last in _paragraphs(text, pause):
        start = first
        # a row of a table is one
        for end in [last - first] if _ROW.match(text, first, last) else ends(text[first:last], pause):
            pause()
            for piece in _pieces(text, start, first + end):
                begin, stop = _stripped(text, *piece)
                if begin < stop and not _NOTHING.fullmatch(text, begin, stop):
                    yield begin, stop
            start = first + end


def with_headers(
    text: str, pause: Callable[[], object] = lambda: None
) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
    """The sentences, each with the span of the header of the table that it stands in. A header has its own."""
    tables = _tables(text)
    table = next(tables, None)
    for start, end in spans(text, pause):
        while table is not None and start >= table[1]:
            table = next(tables, None)
        yield start, end, table[0] if table is not None and start >= table[0][0] else None


def first_cell(row: str) -> str:
    """What a row is about. If a header has all its words of a question there, its table probably has no header."""
    return row.split("|", 2)[1]


def _tables(text: str) -> Iterator[tuple[tuple[int, int], int]]:
    """The spans of the headers of tables in Markdown, each with the end of its table."""
    end = 0
    while found := _HEADER.search(text, end):
        below = _BELOW.search(text, found.end())
        end = below.start() if below else len(text)
        if _VALUE.search(found[1]) is None:
            yield found.span(1), end


def _paragraphs(text: str, pause: Callable[[], object]) -> Iterator[tuple[int, int]]:
    """Lines that belong together: up to a blank line, an item of a list, a heading or a row."""
    start = at = 0
    is_closed = False
    for number, line in enumerate(text.splitlines(keepends=True)):
        if number % 1000 == 0:
            pause()
        bare = line.strip()
        if is_closed or not bare or ITEM.match(bare):
            if start < at:
                yield start, at
            start = at
        is_closed = bare.startswith(CLOSED)
        at += len(line)
    if start < at:
        yield start, at


def _pieces(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    while end - start > _LONGEST:
        cut = max(text.rfind("\n", start + 1, start + _LONGEST), text.rfind(" ", start + 1, start + _LONGEST))
        cut = cut if cut > start else start + _LONGEST
        yield start, cut
        start = cut
    yield start, end


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    blank = _BLANK.match(text, start, end)
    start = blank.end() if blank else start
    return start, start + len(text[start:end].rstrip())
