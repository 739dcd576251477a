"""Ruled tables of a PDF page: the cells between the lines drawn on it."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from typing import Any

from ml_rag.ingest.formats.pdf_words import (
    MAX_HEADER,
    SNAP,
    TEXT_CHARACTERS,
    Join,
    Table,
    Word,
    cell_text,
    header_depth,
    merged_header,
    visual_rows,
)

#: a page with more crossings to look at is a drawing
_MAX_CROSSINGS = 60_000
_MAX_CELLS = 20_000
_FAR = 1e6
#: characters of a cell over several rows that each of them repeats
_REPEATED = 200
#: paths of a page, and parts of them, that are looked at, and how deep forms in one another
_MAX_OBJECTS = 20_000
_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Ruling:
    """A line along an axis: ``at`` is its place across, from ``low`` to ``high`` along."""

    at: float
    low: float
    high: float


def objects(page: Any, raw: Any, kind: int) -> Iterator[tuple[Any, _Box, _Matrix]]:
    """The objects of a kind on a page, those in forms too: their place there, and the matrix that their points take."""
    places = [ctypes.c_float() for _ in range(4)]
    pointers = [ctypes.byref(place) for place in places]

    def read(holder: Any, count: Any, get: Any, matrix: _Matrix, depth: int) -> Iterator[tuple[Any, _Box, _Matrix]]:
        for i in range(count(holder)):
            thing = get(holder, i)
            found = raw.FPDFPageObj_GetType(thing)
            if found == kind and raw.FPDFPageObj_GetBounds(thing, *pointers):
                left, bottom, right, top = (place.value for place in places)
                yield thing, _box(matrix, left, bottom, right, top), matrix
            elif found == raw.FPDF_PAGEOBJ_FORM and depth < _MAX_DEPTH:
                inner = _matrix(raw, thing, matrix)
                yield from read(thing, raw.FPDFFormObj_CountObjects, raw.FPDFFormObj_GetObject, inner, depth + 1)

    yield from read(page.raw, raw.FPDFPage_CountObjects, raw.FPDFPage_GetObject, _IDENTITY, 0)


def rulings(page: Any, raw: Any, is_mirrored: bool) -> tuple[list[Ruling], list[Ruling]]:
    """Horizontal and vertical lines of a page, and edges of its boxes; mirrored: with x negated."""
    drawn = _Drawn(raw, *page.get_size())
    for path, place, matrix in islice(objects(page, raw, raw.FPDF_PAGEOBJ_PATH), _MAX_OBJECTS):
        drawn.add(path, *place, matrix)
    if is_mirrored:
        drawn.horizontal = [Ruling(one.at, -one.high, -one.low) for one in drawn.horizontal]
        drawn.vertical = [Ruling(-one.at, one.low, one.high) for one in drawn.vertical]
    return _merged(drawn.horizontal), _merged(drawn.vertical)


class _Drawn:
    """Collects lines of the paths of a page."""

    def __init__(self, raw: Any, width: float, height: float) -> None:
        self.horizontal: list[Ruling] = []
        self.vertical: list[Ruling] = []
        self._raw = raw
        self._area = width * height
        self._left = _MAX_OBJECTS
        self._places = [ctypes.c_float() for _ in range(2)]
        self._pointers = [ctypes.byref(place) for place in self._places]

    def add(self, path: Any, left: float, bottom: float, right: float, top: float, matrix: _Matrix) -> None:
        raw = self._raw
        if not all(abs(place) < _FAR for place in (left, bottom, right, top)):
            return  # nor does NaN come further
        if top - bottom <= SNAP:
            if right - left > SNAP:
                self.horizontal.append(Ruling((top + bottom) / 2, left, right))
        elif right - left <= SNAP:
            self.vertical.append(Ruling((left + right) / 2, bottom, top))
        elif (right - left) * (top - bottom) < 0.9 * self._area:
            segments = min(raw.FPDFPath_CountSegments(path), self._left)
            self._left -= segments
            inner = _matrix(raw, path, matrix)
            x, y = self._pointers
            before = start = (0.0, 0.0)
            for i in range(segments):
                segment = raw.FPDFPath_GetPathSegment(path, i)
                raw.FPDFPathSegment_GetPoint(segment, x, y)
                here = _point(inner, self._places[0].value, self._places[1].value)
                kind = raw.FPDFPathSegment_GetType(segment)
                if kind == raw.FPDF_SEGMENT_MOVETO:
                    start = here
                elif kind != raw.FPDF_SEGMENT_LINETO or not self._edge(before, here):
                    return  # a drawing
                if raw.FPDFPathSegment_GetClose(segment) and not self._edge(here, start):
                    return
                before = here

    def _edge(self, one: tuple[float, float], other: tuple[float, float]) -> bool:
        """Add a line; whether it is along an axis."""
        (left, right), (low, high) = sorted((one[0], other[0])), sorted((one[1], other[1]))
        if high - low < 1:
            if right - left >= 1:
                self.horizontal.append(Ruling(low, left, right))
        elif right - left < 1:
            self.vertical.append(Ruling(left, low, high))
        else:
            return False
        return True


_Matrix = tuple[float, float, float, float, float, float]
_IDENTITY: _Matrix = (1, 0, 0, 1, 0, 0)
#: left, bottom, right, top
_Box = tuple[float, float, float, float]


def _point(m: _Matrix, x: float, y: float) -> tuple[float, float]:
    return m[0] * x + m[2] * y + m[4], m[1] * x + m[3] * y + m[5]


def _box(m: _Matrix, left: float, bottom: float, right: float, top: float) -> _Box:
    if m is _IDENTITY:
        return left, bottom, right, top
    xs, ys = zip(*(_point(m, x, y) for x in (left, right) for y in (bottom, top)), strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def _matrix(raw: Any, thing: Any, outer: _Matrix) -> _Matrix:
    """Of an object's points to the page."""
    found = raw.FS_MATRIX()
    if not raw.FPDFPageObj_GetMatrix(thing, found):
        return outer
    a, b = _point(outer, found.a, found.b), _point(outer, found.c, found.d)
    e = _point(outer, found.e, found.f)
    return (
        a[0] - outer[4], a[1] - outer[5], b[0] - outer[4], b[1] - outer[5], *e
    )  # fmt: skip


def _merged(rulings: Iterable[Ruling]) -> list[Ruling]:
    """Rulings in one line that touch, as one; dashes too."""
    found: list[Ruling] = []
    rows: list[list[Ruling]] = []
    for ruling in sorted(rulings, key=lambda one: one.at):
        if rows and ruling.at - rows[-1][0].at <= SNAP:
            rows[-1].append(ruling)
        else:
            rows.append([ruling])
    for row in rows:
        at = median(one.at for one in row)
        low, high = None, 0.0
        for one in sorted(row, key=lambda one: one.low):
            if low is None:
                low, high = one.low, one.high
            elif one.low <= high + SNAP:
                high = max(high, one.high)
            else:
                found.append(Ruling(at, low, high))
                low, high = one.low, one.high
        if low is not None:
            found.append(Ruling(at, low, high))
    return found


class _Joined:
    """Numbers from 0 on, joined in groups."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def first(self, i: int) -> int:
        """The smallest number of the group."""
        parents = self._parents
        while parents[i] != i:
            parents[i] = parents[parents[i]]
            i = parents[i]
        return i

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.first(one), self.first(other)))
        self._parents[high] = low


def ruled_tables(
    words: Sequence[Word], horizontal: Sequence[Ruling], vertical: Sequence[Ruling], join: Join
) -> tuple[list[Table], list[Ruling]]:
    """Tables of the grids that lines make, and the horizontal lines that belong to none."""
    if len(horizontal) * len(vertical) > _MAX_CROSSINGS:
        return [], list(horizontal)
    crossing = _Joined(len(horizontal) + len(vertical))
    for i, across in enumerate(horizontal):
        for j, upright in enumerate(vertical, len(horizontal)):
            if (
                across.low - SNAP <= upright.at <= across.high + SNAP
                and upright.low - SNAP <= across.at <= upright.high + SNAP
            ):
                crossing.join(i, j)
    groups: dict[int, tuple[list[Ruling], list[Ruling]]] = {}
    for i, ruling in enumerate((*horizontal, *vertical)):
        groups.setdefault(crossing.first(i), ([], []))[i >= len(horizontal)].append(ruling)
    tables: list[Table] = []
    rest: list[Ruling] = []
    for lying, upright_ones in groups.values():
        table = _grid(words, lying, upright_ones, join) if lying and upright_ones else None
        if table is None:
            rest += lying
        elif not {id(word) for word in table.words} & {id(word) for other in tables for word in other.words}:
            tables.append(table)
    return tables, rest


def _distinct(places: Iterable[float]) -> list[float]:
    found: list[float] = []
    for place in sorted(places):
        if not found or place - found[-1] > SNAP:
            found.append(place)
    return found


def _grid(words: Sequence[Word], across: list[Ruling], upright: list[Ruling], join: Join) -> Table | None:
    """The table in the grid that lines make; outer lines may be missing."""
    xs = _distinct([one.at for one in upright] + [end for one in across for end in (one.low, one.high)])
    ys = _distinct([one.at for one in across] + [end for one in upright for end in (one.low, one.high)])
    width, height = len(xs) - 1, len(ys) - 1
    if width < 2 or height < 2 or width * height > _MAX_CELLS:
        return None
    left, right, low, high = xs[0] - 1, xs[-1] + 1, ys[0], ys[-1]
    inside = [
        word
        for word in words
        if low <= word.y + word.size / 4 <= high and left <= (word.left + word.right) / 2 <= right
    ]
    if len(inside) < 3:
        return None
    cells = _cells(xs, ys, across, upright)
    held: dict[int, list[Word]] = {}
    inner_xs, inner_ys = xs[1:-1], ys[1:-1]
    for word in inside:
        column = bisect_right(inner_xs, (word.left + word.right) / 2)
        row = bisect_right(inner_ys, word.y + word.size / 4)
        held.setdefault(cells[(height - 1 - row) * width + column], []).append(word)
    # rows from the top; a cell is called by the number of its first part
    spans: dict[int, tuple[int, int, int, int]] = {}
    for place, cell in enumerate(cells):
        row, column = divmod(place, width)
        top, bottom, left, right = spans.get(cell, (row, row, column, column))
        spans[cell] = (min(top, row), max(bottom, row), min(left, column), max(right, column))
    sizes = Counter(cells)
    for cell in held:
        top, bottom, left_most, right_most = spans[cell]
        if sizes[cell] != (bottom - top + 1) * (right_most - left_most + 1):
            return None  # no cell of a table, which is a rectangle
    for cell in [cell for cell in held if spans[cell][2] < spans[cell][3]]:
        # a header over columns that have lines below it only
        top, bottom, left, right = spans[cell]
        if parted := _parted(held[cell], xs[left : right + 2]):
            del held[cell]
            for column, part in parted.items():
                held[-1 - top * width - left - column] = part
                spans[-1 - top * width - left - column] = (top, bottom, left + column, left + column)
    filled = [spans[cell] for cell in held]
    if any(_holds_columns(words) for words in held.values()):
        return None  # a frame around something else
    if len({span[0] for span in filled}) < 2 or len({span[2] for span in filled}) < 2 or len(filled) < 3:
        return None
    bands = _bands(held, spans, height)
    rows: list[list[str]] = []
    title = ""
    starts: list[int] = []
    for row in range(height):
        starts.append(len(rows))
        here = [cell for cell in held if spans[cell][0] <= row <= spans[cell][1]]
        if row in bands:
            for line in bands[row]:
                rows.append([cell_text(line.get(column, []), join) for column in range(width)])
            continue
        if not rows and len(here) == 1 and spans[here[0]][2:] == (0, width - 1) and not title:
            title = cell_text(held[here[0]], join)
            continue
        made = [""] * width
        for cell in here:
            text = cell_text(held[cell], join)
            if spans[cell][0] == row or len(text) <= _REPEATED:
                made[spans[cell][2]] = text
        rows.append(made)
    header = next((row for row in range(height) if any(span[0] == row for span in filled)), 0) + (1 if title else 0)
    if header not in bands:
        end = min(header + MAX_HEADER, height)
        texts = {
            (row, column): (cell, cell_text(held[cell], join))
            for cell in held
            for row in range(spans[cell][0], min(spans[cell][1] + 1, end))
            for column in range(spans[cell][2], spans[cell][3] + 1)
        }
        above = [[texts.get((row, column), (None, "")) for column in range(width)] for row in range(header, end)]
        depth = header_depth(above)
        if 1 < depth <= len(rows) - 2:
            rows[starts[header] : (*starts, len(rows))[header + depth]] = [merged_header(above[:depth])]
    if sum(any(row) for row in rows) < 2:
        return None
    return Table(rows, inside, list(pairwise(xs)), title)


def _parted(words: list[Word], xs: list[float]) -> dict[int, list[Word]]:
    """The words of a cell over several columns by column, where none of them is in two and each column has some."""
    found: dict[int, list[Word]] = {}
    for word in words:
        column = min(max(bisect_right(xs, (word.left + word.right) / 2) - 1, 0), len(xs) - 2)
        if word.right - 1 > xs[column + 1] or word.left + 1 < xs[column]:
            return {}
        found.setdefault(column, []).append(word)
    rows = visual_rows(words)
    apart = sum(len(row.runs) > 1 for row in rows) == len(rows)
    return found if len(found) == len(xs) - 1 and (len(found) > 2 or apart) else {}


def _holds_columns(words: list[Word]) -> bool:
    """Whether a cell has rows and columns of its own."""
    if len(words) < 6:
        return False
    rows = visual_rows(words)
    return len(rows) > 2 and sum(len(row.runs) > 1 for row in rows) > len(rows) / 2


def _cells(xs: list[float], ys: list[float], across: list[Ruling], upright: list[Ruling]) -> list[int]:
    """For each field of the grid, from the top, the first field of the cell that it is part of."""
    width, height = len(xs) - 1, len(ys) - 1
    fields = _Joined(width * height)
    walls: dict[int, list[Ruling]] = {}
    floors: dict[int, list[Ruling]] = {}
    for ruling in upright:
        walls.setdefault(_nearest(xs, ruling.at), []).append(ruling)
    for ruling in across:
        floors.setdefault(_nearest(ys, ruling.at), []).append(ruling)
    for row in range(height):
        high, low = ys[height - row], ys[height - row - 1]
        middle = (low + high) / 2
        for column in range(width):
            place = row * width + column
            if column + 1 < width and not any(wall.low <= middle <= wall.high for wall in walls.get(column + 1, ())):
                fields.join(place, place + 1)
            center = (xs[column] + xs[column + 1]) / 2
            if row + 1 < height and not any(
                floor.low <= center <= floor.high for floor in floors.get(height - row - 1, ())
            ):
                fields.join(place, place + width)
    return [fields.first(place) for place in range(width * height)]


def _nearest(places: list[float], at: float) -> int:
    index = bisect_right(places, at)
    return min((i for i in (index - 1, index) if 0 <= i < len(places)), key=lambda i: abs(places[i] - at))


def _bands(
    held: dict[int, list[Word]], spans: dict[int, tuple[int, int, int, int]], height: int
) -> dict[int, list[dict[int, list[Word]]]]:
    """Rows of the grid that hold several rows of the table, as where only columns have lines: words by column."""
    found: dict[int, list[dict[int, list[Word]]]] = {}
    in_rows = {row: [cell for cell in held if spans[cell][0] == spans[cell][1] == row] for row in range(height)}
    # a header and one row below it, however long, are more likely a header and several
    is_one = sum(map(bool, in_rows.values())) == 2
    for row, here in in_rows.items():
        lines = visual_rows([word for cell in here for word in held[cell]])
        if len(here) < 2 or len(lines) < 2:
            continue
        columns = {id(word): spans[cell][2] for cell in here for word in held[cell]}
        split: list[dict[int, list[Word]]] = []
        full = 0
        for line in lines:
            cells: dict[int, list[Word]] = {}
            for word in line.words:
                cells.setdefault(columns[id(word)], []).append(word)
            full += len(cells) >= 0.8 * len(here)
            if split and len(cells) < 0.8 * len(here) and is_one:
                for column, words in cells.items():
                    split[-1].setdefault(column, []).extend(words)
            else:
                split.append(cells)
        is_last = is_one and row == max(r for r, cells in in_rows.items() if cells)
        is_split = full >= 0.85 * len(lines) and _is_short(split) and (len(lines) > 2 or _are_figures(split))
        if is_split or (is_last and len(lines) > 2 and full >= 0.6 * len(lines)):
            found[row] = split
    return found


def _are_figures(rows: list[dict[int, list[Word]]]) -> bool:
    cells = [cell for row in rows for cell in row.values()]
    return sum(any(c.isdigit() for word in cell for c in word.text) for cell in cells) >= 0.6 * len(cells)


def _is_short(rows: list[dict[int, list[Word]]]) -> bool:
    lengths = [sum(len(word.text) + 1 for word in cell) for row in rows for cell in row.values()]
    return sum(lengths) <= TEXT_CHARACTERS * len(lengths)
