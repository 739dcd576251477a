"""Tables of a PDF page whose cells go over several lines, from the order of the file: cell by cell, row by row.

Cells may stand at the top of their rows or in the middle, as browsers print them, where no lines are common to a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ml_rag.ingest.formats.pdf_words import GUTTER, Join, Table, Word, cell_text

#: between two lines of a cell, and between two rows, in sizes of the font
_LEADING, _BETWEEN = (0.9, 1.7), 5.0
#: how far the tops or the middles of the cells of a row are from each other, in sizes of the font
_OFF = 0.3
#: the share of the cells of a table that have text
_FILLED = 0.5
_MAX_COLUMNS = 100
#: how much further rows are apart than lines
_APART = 1.2


@dataclass(slots=True)
class _Cell:
    """Words that follow each other in the file, in lines below each other."""

    words: list[Word]
    left: float
    right: float
    top: float
    #: the base line and the right border of the last line
    y: float
    end: float
    #: the widest step between two lines
    leading: float = 0.0

    def takes(self, word: Word, gutter: float) -> bool:
        """Whether a word continues it; then the word becomes part of it."""
        size, step = word.size, self.y - word.y
        if size != self.words[0].size or word.right <= self.left:
            return False
        if abs(step) <= 0.2 * size:
            if not -size < word.left - self.end < gutter * size:
                return False
        elif not (_LEADING[0] * size <= step <= _LEADING[1] * size and word.left < self.right):
            return False
        else:
            self.leading = max(self.leading, step)
        self.words.append(word)
        self.left, self.right = min(self.left, word.left), max(self.right, word.right)
        self.y, self.end = word.y, word.right
        return True

    def stands_beside(self, other: _Cell) -> bool:
        """Whether it is to the right of another cell, in its row."""
        off = _OFF * self.words[0].size
        middle, other_middle = (self.top + self.y) / 2, (other.top + other.y) / 2
        return self.left > other.right and (abs(self.top - other.top) <= off or abs(middle - other_middle) <= off)


def tables_in_order(words: Sequence[Word], join: Join, scale: float) -> list[Table]:
    """The tables that have a cell of several lines."""
    cells: list[_Cell] = []
    for word in words:
        if not cells or not cells[-1].takes(word, GUTTER * scale):
            cells.append(_Cell([word], word.left, word.right, word.y, word.y, word.right))
    rows: list[list[_Cell]] = []
    for cell in cells:
        if rows and cell.stands_beside(rows[-1][-1]):
            rows[-1].append(cell)
        else:
            rows.append([cell])
    tables: list[Table] = []
    run: list[list[_Cell]] = []
    columns: list[tuple[float, float]] = []
    for row in [*rows, []]:
        wider = _with_row(columns, row) if run and _follows(run[-1], row) else []
        if wider and len(row) > 1:
            run.append(row)
            columns = wider
            continue
        if table := _made(run, columns, join):
            tables.append(table)
        run, columns = ([row], _with_row([], row)) if len(row) > 1 else ([], [])
    return tables


def _follows(before: list[_Cell], row: list[_Cell]) -> bool:
    """Whether a row stands below another one, in type of its size."""
    if not row:
        return False
    size = row[0].words[0].size
    step = _step(before, row)
    return abs(before[0].words[0].size - size) <= 0.12 * size and _LEADING[0] * size <= step <= _BETWEEN * size


def _step(before: list[_Cell], row: list[_Cell]) -> float:
    return min(cell.y for cell in before) - max(cell.top for cell in row)


def _with_row(columns: list[tuple[float, float]], row: list[_Cell]) -> list[tuple[float, float]]:
    """The columns as wide as a row needs them; none where a cell of it is in two, or two are in one."""
    cells = [(cell.left, cell.right) for cell in row]
    found: list[tuple[float, float]] = []
    for left, right in sorted([*columns, *cells]):
        if found and left < found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], right))
        else:
            found.append((left, right))
    lefts = [left for left, _ in found]
    if len(found) > _MAX_COLUMNS or any(
        len({bisect_right(lefts, left) for left, _ in those}) < len(those) for those in (columns, cells)
    ):
        return []
    return found


def _made(rows: list[list[_Cell]], columns: list[tuple[float, float]], join: Join) -> Table | None:
    leading = max((cell.leading for row in rows for cell in row), default=0.0)
    if len(rows) < 2 or not leading or sum(map(len, rows)) < _FILLED * len(columns) * len(rows):
        return None
    is_centred = any(abs(cell.top - row[0].top) > _OFF * cell.words[0].size for row in rows for cell in row)
    is_apart = all(_step(*two) >= _APART * leading for two in pairwise(rows))
    if len(rows) + len(columns) < 5 or not (is_centred or (is_apart and len(columns) > 2 and len(rows) > 2)):
        return None  # a list, or rows that their lines tell
    lefts = [left for left, _ in columns]
    made = [[""] * len(columns) for _ in rows]
    for row, texts in zip(rows, made, strict=True):
        for cell in row:
            texts[bisect_right(lefts, cell.left) - 1] = cell_text(cell.words, join)
    return Table(made, [word for row in rows for cell in row for word in cell.words], columns)
