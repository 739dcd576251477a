"""Words of a PDF page by their places, and tables made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

#: joins the lines of a cell
Join = Callable[[str, str], str]

#: lines that are nearer than this, in points, are one; pdfplumber's tolerance too
SNAP = 3.0
#: white space between two words that is more than a space, and between two columns, in sizes of the font
GAP, GUTTER = 1.0, 0.5
#: characters of a line of a column of running text
TEXT_CHARACTERS = 24
FIGURE = re.compile(r"[\d.,:%$€£¥()+/ -]*\d[\d.,:%$€£¥()+/ -]*")
_YEAR = re.compile(r"(?:19|20)\d\d")
#: rows of a header
MAX_HEADER = 4
#: words that are read against the direction of their page
_AGAINST = re.compile("-*<(?:[<-]*<)?")


@dataclass(slots=True)
class Word:
    """A word, its place in points, y upwards, and the number of its line in the order of the file."""

    text: str
    left: float
    right: float
    y: float
    size: float
    line: int
    #: the direction that it is read in: "|" that of its page, "<" the other one, "-" none
    direction: str = "|"
    #: whether a space follows where the line ends
    space: bool = False


#: the fields of a word
WordPlace = tuple[str, float, float, float, float, int]


@dataclass(slots=True)
class Table:
    """Rows of cells, the header first, and the words that they are made of."""

    rows: list[list[str]]
    words: list[Word]
    #: left and right border of each column
    columns: list[tuple[float, float]]
    #: what stands above all columns
    title: str = ""


#: for each column of a row of a header what tells its cell from others, None if it has none, and the text
HeaderRow = Sequence[tuple[Any, str]]


@dataclass(slots=True)
class Row:
    """Words on one base line, from the left."""

    y: float
    size: float
    words: list[Word]
    #: runs of words without a wide gap between them: left, right
    runs: list[tuple[float, float]] = field(default_factory=list)
    #: and those without white between them that could be between columns
    blocks: list[tuple[float, float]] = field(default_factory=list)


def visual_rows(words: Sequence[Word], scale: float = 1.0) -> list[Row]:
    """The words by their base lines, from the top."""
    rows: list[Row] = []
    row = None
    for word in sorted(words, key=lambda word: -word.y):
        if row is not None and row.y - word.y <= 0.35 * (row.size if row.size > word.size else word.size):
            row.words.append(word)
            if word.size > row.size:
                row.size = word.size
        else:
            row = Row(word.y, word.size, [word])
            rows.append(row)
    for row in rows:
        row.words.sort(key=left_of)
        gap, gutter = GAP * scale * row.size, GUTTER * scale * row.size
        run = block = row.words[0].left
        right = row.words[0].right
        for word in row.words:
            white = word.left - right
            if white >= gutter:
                row.blocks.append((block, right))
                block = word.left
                if white > gap:
                    row.runs.append((run, right))
                    run = word.left
            if word.right > right:
                right = word.right
        row.blocks.append((block, right))
        row.runs.append((run, right))
    return rows


def left_of(word: Word) -> float:
    return word.left


def _as_read(words: list[Word]) -> list[Word]:
    """The words of a line, from the left, in the order of reading; a number beside a turned word follows it."""
    for run in _AGAINST.finditer("".join(word.direction for word in words)):
        words[run.start() : run.end()] = words[run.start() : run.end()][::-1]
    return words


def cell_text(words: Sequence[Word], join: Join) -> str:
    """The words of a cell, line by line from the top."""
    if len({word.y for word in words}) < 2:
        return " ".join(word.text for word in _as_read(sorted(words, key=left_of))).replace("\ufffe", "\x02")
    text, space = "", False
    for row in visual_rows(words):
        read = _as_read(row.words)
        line = " ".join(word.text.replace("\ufffe", "\x02") for word in read)
        text = join(text + " " if space else text, line) if text else line
        space = read[-1].space
    return text


def merged_header(rows: Sequence[HeaderRow]) -> list[str]:
    """Rows of a header as one: what stands above a cell comes first, once."""
    return [" ".join(dict.fromkeys(text for _, text in column if text)) for column in zip(*rows, strict=True)]


def header_depth(rows: Sequence[HeaderRow]) -> int:
    """How many rows the header has: those below the first divide a cell over several columns, and are not records.

    A record has its name or a value below the name of one column. Without one above the first column, it begins with a
    name and has values, or stands below two rows. If the first cell of a divided header goes over more rows, these are
    part of it.
    """
    above, *others = rows
    depth = 1
    for i, row in enumerate(others[: MAX_HEADER - 1], 2):
        own = [(cell, text if cell != over else "") for (cell, text), (over, _) in zip(row, above, strict=True)]
        texts = [text for _, text in own]
        wide = [c for c, (one, following) in enumerate(pairwise(above)) if one[1] and one[0] == following[0]]
        divides = any(own[c][0] != own[c + 1][0] and texts[c] and texts[c + 1] for c in wide)
        named = [c for c, (_, name) in enumerate(above) if name and c not in wide and c - 1 not in wide]
        is_record = (
            any(is_value(texts[c]) or (texts[c] and c == 0) for c in named)
            if above[0][1]
            else texts[0] and (i > 2 or has_values(texts))
        )
        if (divides or (depth > 1 and row[0][1] and row[0] == rows[0][0])) and not is_record:
            depth = i
        elif any(texts):
            break
        above = [one if one[1] else over for one, over in zip(own, above, strict=True)]
    return depth


def has_values(row: Sequence[str]) -> bool:
    """Whether a row that begins with a name has values, as rows of a header have not."""
    return bool(row[0]) and any(map(is_value, row[1:]))


def is_value(text: str) -> bool:
    """Whether a text is a figure other than a year, which may be the name of a column."""
    return FIGURE.fullmatch(text) is not None and _YEAR.fullmatch(text) is None
