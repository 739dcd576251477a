"""Tables of a PDF page, from the places of its words and the lines drawn on it.

Ruled tables are read off the grid of their lines. The others are rows of words that leave the same columns of white
between them; columns of running text are distinguished by the length of their lines and by the order of the file.
(pdfplumber was tried: it reads the file again in Python, 71 to 210 ms a page where all of this takes 3 to 11.)
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ml_rag.ingest.formats.pdf_cells import tables_in_order
from ml_rag.ingest.formats.pdf_grid import Ruling, ruled_tables
from ml_rag.ingest.formats.pdf_words import (
    FIGURE,
    GAP,
    GUTTER,
    MAX_HEADER,
    SNAP,
    TEXT_CHARACTERS,
    HeaderRow,
    Join,
    Row,
    Table,
    Word,
    WordPlace,
    cell_text,
    has_values,
    header_depth,
    merged_header,
    visual_rows,
)

#: words and rows of a page that are looked at
_MAX_WORDS = 20_000
_MAX_ROWS = 500
#: a usual space; where they are wider, as in type of one width, so are the other two
_SPACE = 0.4
#: the share of their width that lines of running text fill
_TEXT_FILL = 0.72
#: columns of text in one another
_MAX_DEPTH = 3
#: the share of the lines of columns of text that stand elsewhere in the file, such as footnotes
_ASTRAY = 0.1
#: the share of rows that words cover at most; of a table of two rows
_INK, _INK_OF_TWO = 0.8, 0.7

#: what stands before an item of a list
_ENUMERATOR = re.compile(r"(?:[\W_]+|o|[(\[]?(?:\d{1,3}|[A-Za-z]|[ivxIVX]{1,5})[.)\]:]*|(?:\d+\.)+\d*)$")

#: text and words of a line in a column
_Cell = tuple[str, list[Word]]


@dataclass(frozen=True, slots=True)
class _Setting:
    """Horizontal lines of the page that are in no grid, how lines are joined, how much wider than usual spaces are."""

    rules: list[float]
    join: Join
    scale: float


def may_have_tables(places: Sequence[WordPlace]) -> bool:
    """Whether two lines of a page at least have a wide gap, or words of another line beside them."""
    starts: dict[float, int] = {}
    found = 0
    number, end = -1, 0.0
    for _, left, right, y, size, line in places:
        if line == number:
            found += left - end > GUTTER * size
        elif starts.setdefault(round(y), line) != line:
            found += 1
        if found == 2:
            return True
        number, end = line, right
    return False


def find_tables(
    words: Sequence[Word], horizontal: Sequence[Ruling], vertical: Sequence[Ruling], join: Join
) -> list[Table]:
    """The tables of a page, no word in two of them."""
    tables: list[Table] = []
    rules = horizontal
    if len(words) > _MAX_WORDS:
        return []
    if horizontal and vertical:
        tables, rules = ruled_tables(words, horizontal, vertical, join)
        taken = {id(word) for table in tables for word in table.words}
        words = [word for word in words if id(word) not in taken]
    spaces = [
        (other.left - one.right) / one.size
        for one, other in pairwise(words)
        if one.line == other.line and 0 < other.left - one.right < GAP * one.size
    ]
    scale = max(1.0, median(spaces) / _SPACE) if spaces else 1.0
    if in_order := tables_in_order(words, join, scale):
        tables += in_order
        taken = {id(word) for table in in_order for word in table.words}
        words = [word for word in words if id(word) not in taken]
    tables += _unruled(words, _Setting([ruling.at for ruling in rules], join, scale), 0)
    return tables


def goes_on(table: Table, following: Table) -> bool:
    """Whether a table at the top of a page is the rest of the last one of the page before, without its header."""
    if len(table.columns) != len(following.columns) or not _names_columns(table.rows[0]):
        return False
    borders = zip(table.columns, following.columns, strict=True)
    return (
        all(left < other_right and other_left < right for (left, right), (other_left, other_right) in borders)
        and abs(table.columns[0][0] - following.columns[0][0]) < 2 * SNAP
        and table.rows[0] != following.rows[0]
        and not _has_header(following)
    )


def _has_header(table: Table) -> bool:
    """Whether the first row has words above all columns that are figures below it."""
    first, *others = table.rows
    columns = [i for i in range(len(first)) if others and all(FIGURE.fullmatch(row[i]) for row in others)]
    return bool(columns) and all(any(map(str.isalpha, first[i])) for i in columns)


def _names_columns(row: Sequence[str]) -> bool:
    """Whether the first row of a table names its columns: no cell is a figure."""
    return not any(map(FIGURE.fullmatch, row))


def _spans(rows: Iterable[Row], known: Sequence[tuple[float, float]], gutter: float) -> list[tuple[float, float]]:
    """Columns that rows fill, with those known: left and right of each, from the left."""
    found: list[tuple[float, float]] = []
    for left, right in sorted([*known, *(block for row in rows for block in row.blocks)]):
        if found and left - found[-1][1] < gutter:
            if right > found[-1][1]:
                found[-1] = (found[-1][0], right)
        else:
            found.append((left, right))
    return found


def _keeps(columns: list[tuple[float, float]], more: list[tuple[float, float]]) -> bool:
    """Whether none of the columns have grown together."""
    at = 0
    for left, right in more:
        held = 0
        while at < len(columns) and columns[at][0] <= right:
            held += columns[at][0] >= left
            at += 1
        if held > 1:
            return False
    return True


def _parts(columns: list[tuple[float, float]], row: Row) -> bool:
    """Whether a row has several runs below one of the columns."""
    if len(row.runs) <= len(columns):
        return False
    below = Counter(
        i for left, right in row.runs for i, column in enumerate(columns) if left < column[1] and column[0] < right
    )
    return max(below.values(), default=0) > 1


def _is_beside(row: Row, below: Row, gutter: float) -> bool:
    """Whether a row names the columns of the one below it, and names stand beside the cells.

    Two columns of words may be text.
    """
    columns = _spans((below,), (), gutter)
    names = _one_each(row, columns)
    return (
        1 < len(names) < len(_spans((row,), columns, gutter))
        and _names_columns(_texts(row, names))
        and (len(names) > 2 or has_values(_texts(below, columns)))
    )


def _unruled(words: Sequence[Word], how: _Setting, depth: int) -> list[Table]:
    rows = visual_rows(words, how.scale)
    if not 1 < sum(len(row.runs) > 1 for row in rows) <= _MAX_ROWS or depth > _MAX_DEPTH:
        return []
    tables: list[Table] = []
    at = free = 0
    while at < len(rows):
        if len(rows[at].runs) < 2:
            at += 1
            continue
        end, columns = _extent(rows, at, how.scale)
        found = _made(rows, free, at, end, columns, how, depth)
        if found is None:
            at += 1
        else:
            tables += found
            at = free = end
    return tables


def _extent(rows: list[Row], first: int, scale: float) -> tuple[int, list[tuple[float, float]]]:
    """One past the last row of the table that would begin with a row, and its columns."""
    size = rows[first].size
    gutter = GUTTER * scale * size
    columns = _spans(rows[first : first + 1], (), gutter)
    end, most = first + 1, 0.0
    for i in range(first + 1, len(rows)):
        row = rows[i]
        step = rows[i - 1].y - row.y
        if step > max(2.4 * max(size, row.size), 1.7 * most if end - first > 1 else 0.0):
            break
        if end - first == 1 and (_parts(columns, row) or _is_beside(rows[first], row, gutter)):
            break  # so far a header over columns of this row
        more = _spans((row,), columns, gutter)
        if _keeps(columns, more):
            is_apart = step > 1.5 * max(most, 1.25 * size) and row.runs[0][0] < columns[0][1]
            if len(row.runs) == 1 and (row.size > 1.12 * size or is_apart):
                break  # a heading
            columns = more
            if len(row.runs) > 1:
                end = i + 1
                most = max(most, step)
        elif len(row.runs) > 1 or i >= end + 2:
            break
    # a single run below the last row: the rest of a cell of it
    while end < len(rows) and len(rows[end].runs) == 1:
        row, step = rows[end], rows[end - 1].y - rows[end].y
        inner = _spans(rows[first:end], (), gutter)
        fits = any(left - 1 <= row.runs[0][0] and row.runs[0][1] <= right + gutter for left, right in inner)
        if step > 1.4 * size or step > 0.9 * most or row.size > 1.12 * size or not fits or len(inner) < 2:
            break
        end += 1
    return end, _spans((row for row in rows[first:end] if len(row.runs) > 1), (), gutter)


def _made(
    rows: list[Row],
    free: int,
    first: int,
    end: int,
    columns: list[tuple[float, float]],
    how: _Setting,
    depth: int,
) -> list[Table] | None:
    """The table in these rows; those in its columns where these are text; None where there is none.

    ``free``: the first row above it that is in no other table.
    """
    several = [row for row in rows[first:end] if len(row.runs) > 1]
    if len(columns) < 2 or len(several) < (3 if len(columns) == 2 else 2):
        return None
    cells = [_by_column(row, columns) for row in rows[first:end]]
    texts = [
        [(" ".join(word.text for word in line[column]), line[column]) for line in cells if column in line]
        for column in range(len(columns))
    ]
    if borders := _text_borders(texts):
        # each column of text, and what lies between them, by itself
        found: list[Table] = []
        for low, high in pairwise([0, *borders, len(columns)]):
            inside = [word for line in cells for column in range(low, high) for word in line.get(column, ())]
            found += _unruled(inside, how, depth + 1)
        return found
    is_named = first > free and _is_beside(rows[first - 1], rows[first], GUTTER * how.scale * rows[first].size)
    if not _is_table(cells, several, columns, texts, is_named=is_named):
        return None
    start = first
    while start > free and _stands_above(rows[start - 1], rows[start], columns):
        start -= 1
    header: list[HeaderRow] = []
    if start < first:
        above = [_by_span(row, columns) for row in rows[start : first + 1][:MAX_HEADER]]
        if not has_values([text for _, text in above[0]]):
            header = above[: header_depth(above)]
    body = min(start + len(header), first)
    cells[:0] = [_by_column(row, columns) for row in rows[start:first]]
    made = _logical_rows(rows[body:end], cells[body - start :], columns, how)
    if len(header) > first - start:
        header[-1] = [(None, text) for text in made.pop(0)]
    if header:
        made.insert(0, merged_header(header))
    return [Table(made, [word for row in rows[start:end] for word in row.words], columns)]


def _by_column(row: Row, columns: list[tuple[float, float]]) -> dict[int, list[Word]]:
    lefts = [left for left, _ in columns[1:]]
    if len(row.runs) == 1 and len(_spans((row,), columns, 0.1)) < len(columns):
        # over several columns: where it begins
        return {bisect_right(lefts, row.runs[0][0] + 1): row.words}
    found: dict[int, list[Word]] = {}
    for word in row.words:
        column = bisect_right(lefts, (word.left + word.right) / 2)
        if column in found:
            found[column].append(word)
        else:
            found[column] = [word]
    return found


def _is_text(column: list[_Cell]) -> bool:
    """Whether the lines of a column are as long as those of text."""
    return len(column) > 2 and sum(map(_length, column)) >= TEXT_CHARACTERS * len(column)


def _length(cell: _Cell) -> int:
    """Characters; those of Chinese, Japanese and Korean are as wide as two others."""
    text = cell[0]
    return len(text) if text.isascii() else len(text) + sum(character > "\u2e80" for character in text)


def _is_prose(column: list[_Cell]) -> bool:
    """Whether the lines of a column are those of running text, which fill it."""
    if len(column) < 3:
        return False
    width = max(line[-1].right for _, line in column) - min(line[0].left for _, line in column)
    long = [
        _length((text, line)) >= TEXT_CHARACTERS and line[-1].right - line[0].left >= _TEXT_FILL * width
        for text, line in column
    ]
    return sum(long) >= 0.6 * len(long)


def _text_borders(columns: list[list[_Cell]]) -> list[int]:
    """The columns before which another column of text begins, by the order of the file; cells of a row stand together.

    Where that goes over the columns line by line, all of them where two are running text.
    """
    lines = [{word.line for _, words in column for word in words} for column in columns]
    found = []
    if any(map(_is_text, columns)):
        for i in range(1, len(columns)):
            left, right = set().union(*lines[:i]), set().union(*lines[i:])
            sides = [line in left for line in sorted(left ^ right)]
            changes = sum(one != other for one, other in pairwise(sides)) + len(left & right)
            if min(len(left), len(right)) > 2 and changes <= max(1, _ASTRAY * len(sides)):
                found.append(i)
    own = Counter(line for one in lines for line in one)
    if not found and sum(map(_is_prose, columns)) > 1 and sum(n > 1 for n in own.values()) > 0.3 * len(own):
        return list(range(1, len(columns)))
    return found


def _is_table(
    cells: list[dict[int, list[Word]]],
    several: list[Row],
    columns: list[tuple[float, float]],
    texts: list[list[_Cell]],
    *,
    is_named: bool,
) -> bool:
    filled = sum(len(line) for line in cells if len(line) > 1)
    if filled < 0.4 * len(columns) * len(several):
        return False
    is_list = len(columns) == 2 and not is_named
    if is_list and sum(_ENUMERATOR.match(text) is not None for text, _ in texts[0]) >= 0.5 * len(texts[0]):
        return False  # a list
    inked = [sum(word.right - word.left for word in row.words) for row in several]
    wide = [row.words[-1].right - row.words[0].left for row in several]
    if sum(inked) > (_INK if len(several) > 2 else _INK_OF_TWO) * sum(wide):
        return False  # justified text
    if sum(len(column) >= 0.5 * len(several) for column in texts) < 2:
        return False  # labels of a picture
    size = several[0].size
    aligned = [_alignment(column, size) for column in texts if len(column) > 1]
    return bool(aligned) and sum(share >= 0.6 for share in aligned) >= 0.6 * len(aligned)


def _alignment(column: list[_Cell], size: float) -> float:
    """The share of the cells that begin, end or have their middle at the same place."""
    best = 0
    lefts = [line[0].left for _, line in column]
    rights = [line[-1].right for _, line in column]
    middles = [(left + right) / 2 for left, right in zip(lefts, rights, strict=True)]
    for places in (lefts, rights, middles):
        places.sort()
        best = max(best, *(bisect_right(places, one + 0.3 * size) - i for i, one in enumerate(places)))
    return best / len(column)


def _texts(row: Row, places: Sequence[tuple[float, float]]) -> list[str]:
    """The words of a row by the runs, blocks or columns that they stand in."""
    lefts = [left for left, _ in places[1:]]
    found: list[list[str]] = [[] for _ in places]
    for word in row.words:
        found[bisect_right(lefts, word.left)].append(word.text)
    return [" ".join(texts) for texts in found]


def _one_each(row: Row, columns: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """The runs of a row, or its blocks, if each column has one: between the columns beside it."""
    rights, lefts = [right for _, right in columns[:-1]], [left for left, _ in columns[1:]]
    for places in (row.blocks, row.runs):
        if (
            len(places) == len(columns)
            and all(after < left for after, (left, _) in zip(rights, places[1:], strict=True))
            and all(right < before for before, (_, right) in zip(lefts, places[:-1], strict=True))
        ):
            return places
    return ()


def _stands_above(row: Row, below: Row, columns: list[tuple[float, float]]) -> bool:
    """Whether a row above the first one is of the table, too: its cells may be over several columns."""
    step = (row.y - below.y) / max(row.size, below.size)
    if step > 2.4 or row.size > 1.12 * below.size or len(row.runs) < 2:
        return False
    if _one_each(row, columns):
        return True
    return (
        step <= 2
        and all(any(left <= run[1] and run[0] <= right for left, right in columns) for run in row.runs)
        and (columns[0][0] - 2 <= row.runs[0][0] and row.runs[-1][1] <= columns[-1][1] + row.size)
    )


def _by_span(row: Row, columns: list[tuple[float, float]]) -> HeaderRow:
    """The cells of a header above each column; each column belongs to the run whose middle is nearest.

    A run that is nearest to none stands in the column that is nearest to it.
    """
    if each := _one_each(row, columns):
        return [((row.y, place), text) for place, text in zip(each, _texts(row, each), strict=True)]
    runs, run_texts = row.runs, _texts(row, row.runs)
    middles = [(left + right) / 2 for left, right in columns]
    found: list[set[int]] = []
    for (left, right), middle in zip(columns, middles, strict=True):
        over = [i for i, (low, high) in enumerate(runs) if low <= right and left <= high]
        nearest = min(range(len(runs)), key=lambda i: abs((runs[i][0] + runs[i][1]) / 2 - middle))
        found.append({over[0]} if over else {nearest} if middle > row.runs[0][0] else set())
    for i in set(range(len(runs))).difference(*found):
        own = (runs[i][0] + runs[i][1]) / 2
        found[min(range(len(columns)), key=lambda column: abs(middles[column] - own))].add(i)
    texts = [" ".join(run_texts[i] for i in sorted(one)) for one in found]
    # a run over the first two columns is more likely two names that stand near one another
    return [((row.y, i > 0, *found[i]), text) for i, text in enumerate(texts)]


def _logical_rows(
    rows: list[Row],
    cells: list[dict[int, list[Word]]],
    columns: list[tuple[float, float]],
    how: _Setting,
) -> list[list[str]]:
    """Rows of text, where a cell may go over several lines."""
    bottom, top = rows[-1].y - rows[-1].size, rows[0].y + rows[0].size
    between = sorted(rule for rule in how.rules if bottom <= rule <= top)
    steps = [one.y - other.y for one, other in pairwise(rows)]
    tight = min(steps, default=0.0)
    # rules between most rows
    is_ruled = len(between) >= 0.5 * len(rows) and len(between) > 3
    uniform = not steps or max(steps) < 1.25 * tight or not any(step > 1.25 * tight for step in steps)
    groups: list[list[int]] = [[0]]
    held = set(cells[0])  # columns of the last group
    for i in range(1, len(rows)):
        line = cells[i]
        crossed = bisect_right(between, rows[i - 1].y) - bisect_right(between, rows[i].y) > 0
        if is_ruled:
            goes_on = not crossed
        elif crossed:
            goes_on = False
        elif uniform:
            goes_on = _continues(line, cells[groups[-1][-1]], 0 in line)
        else:
            step = steps[i - 1]
            goes_on = step <= 1.25 * tight and (
                (set(line) < held and (0 not in line or len(line) == 1) and not _has_values_below(line, cells[i - 1]))
                # cells at the bottom of their rows, lines of one above the others
                or (len(held) == 1 and 0 not in held and held <= set(line))
                or _continues(line, cells[groups[-1][0]], 0 in line)
            )
        if goes_on:
            groups[-1].append(i)
            held.update(line)
        else:
            groups.append([i])
            held = set(line)
    # a header over several lines ends with the first rule
    if not is_ruled and between:
        first = [i for i, row in enumerate(rows) if row.y > between[-1]] or [
            i for i, row in enumerate(rows) if len(between) > 1 and row.y > between[-2]
        ]
        if (
            1 < len(first) <= 3
            and len(first) < len(rows) - 1
            and not any(
                has_values([cell_text(cells[i].get(column, ()), how.join) for column in range(len(columns))])
                for i in first
            )
        ):
            groups = [first, *([i for i in group if i not in first] for group in groups)]
            groups = [group for group in groups if group]
    made = []
    for group in groups:
        texts = [""] * len(columns)
        for column in range(len(columns)):
            texts[column] = cell_text([word for i in group for word in cells[i].get(column, ())], how.join)
        made.append(texts)
    return made


def _has_values_below(line: dict[int, list[Word]], before: dict[int, list[Word]]) -> bool:
    """Whether a line has a value below a value, and not alone: that of another record, as of a group with one name."""
    return len(line) > 1 and any(
        column in before
        and all(FIGURE.fullmatch(" ".join(word.text for word in cell)) for cell in (words, before[column]))
        for column, words in line.items()
    )


def _continues(line: dict[int, list[Word]], before: dict[int, list[Word]], has_key: bool) -> bool:
    """Whether each cell of a line continues the one above it, by its words."""
    if (has_key and len(line) > 1) or not set(line) <= set(before):
        return False
    return all(
        words[0].text[:1].islower() or before[column][-1].text.endswith(("-", ",", "/", "&"))
        for column, words in line.items()
    )
