"""Spreadsheets: a block a sheet, its tables as pipe tables with the first row as header."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from typing import Any

from ml_rag import abc
from ml_rag.ingest.formats.archive import check_entities, core_properties, open_zip
from ml_rag.ingest.formats.common import (
    MAX_COLUMNS,
    Request,
    damaged,
    document,
    encrypted,
    metadata,
    packed,
    pipe_table,
)
from ml_rag.ingest.formats.ooxml import diagram, related, transitional

#: how XLSX writes a control character, such as the carriage return that other programs put before a line end
_CONTROL = re.compile("_x00[01][0-9A-Fa-f]_")
#: the format of numbers that have as many digits, such as postcodes
_ZEROS = re.compile("0{2,20}")
#: the type of cells of XLS with a duration; that of numbers with a number of digits is so much higher
_DURATION = 10
#: whole numbers up to it are exact
_MOST_EXACT = 2**53


@dataclass(slots=True)
class _Uncomputed:
    """Formulas whose value no program has computed."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        self.count += 1
        if self.count <= 5:
            self.first.append(place)

    def __str__(self) -> str:
        places = f"{', '.join(self.first)}{', …' * (self.count > 5)}"
        return f"values of formulas that no program has computed, {self.count}: {places}"


def parse_xlsx(_name: str, content: bytes, _request: Request) -> abc.Document:
    """Values as last computed, formulas not run: those without a value are named. Metadata of a block:
    ``{"sheet": name}``."""
    import warnings

    with open_zip(content) as archive:
        check_entities(archive)
        meta = core_properties(archive)
        content = transitional(archive, content)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # openpyxl tells of extensions it leaves out; none of them holds text
        from openpyxl.reader.excel import ExcelReader  # type: ignore[import-untyped]

        class Reader(ExcelReader):  # type: ignore[misc]
            def read_worksheets(self) -> None:
                """Each part once, however often the book names it: it is opened for its declared range at once."""
                parts = {self.parser.rels[sheet.id].target: sheet for sheet in reversed(self.parser.sheets) if sheet.id}
                self.parser.sheets = reversed(parts.values())
                super().read_worksheets()

            def read_chartsheet(self, *_: Any) -> None:
                """Left out, as all charts: openpyxl fails at some of them."""

        reader = Reader(BytesIO(content), read_only=True, data_only=True, keep_links=False)
        reader.read()
        sheets = []
        uncomputed = _Uncomputed()
        seen: set[str] = set()
        for sheet in reader.wb.worksheets:
            cells = (map(_without_controls, row) for row in _values(sheet, uncomputed))
            rows = list(_rows(cells))
            drawings = set(related(reader.archive, sheet._worksheet_path, "/drawing").values()) - seen
            seen |= drawings
            boxes = chain.from_iterable(diagram(reader.archive.read(path)) for path in sorted(drawings))
            sheets.append((sheet.title, with_boxes(rows, boxes)))
        reader.wb.close()
    return document("xlsx", sheet_blocks(sheets), meta, str(uncomputed) if uncomputed.count else None)


def parse_xls(_name: str, content: bytes, _request: Request) -> abc.Document:
    """Excel 97-2003. Metadata of a block: ``{"sheet": name}``."""
    import xlrd  # type: ignore[import-untyped]

    try:
        book = xlrd.open_workbook(file_contents=content, on_demand=True, ragged_rows=True)
    except xlrd.XLRDError as error:
        if "encrypted" in str(error).lower():
            raise encrypted(str(error)) from error
        raise damaged(f"XLS workbook: {error}", "Save it as XLSX.") from error

    _name_types(book)

    def value(cell: Any) -> Any:
        if cell.ctype == _DURATION:
            try:
                return datetime.timedelta(milliseconds=round(cell.value * 86_400_000))
            except OverflowError:
                return cell.value
        if cell.ctype > _DURATION:
            return _filled(cell.value, cell.ctype - _DURATION) if cell.value.is_integer() else cell.value
        if cell.ctype == xlrd.XL_CELL_DATE:
            try:
                moment = xlrd.xldate_as_datetime(cell.value, book.datemode)
                return moment.time() if 0 <= cell.value < 1 else moment
            except (ValueError, OverflowError, xlrd.XLDateError):
                return cell.value
        if cell.ctype == xlrd.XL_CELL_BOOLEAN:
            return bool(cell.value)
        return None if cell.ctype in {xlrd.XL_CELL_ERROR, xlrd.XL_CELL_EMPTY, xlrd.XL_CELL_BLANK} else cell.value

    sheets = []
    for n in range(book.nsheets):
        sheet = book.sheet_by_index(n)
        cells = ([value(cell) for cell in sheet.row(i)] for i in range(sheet.nrows))
        sheets.append((sheet.name, list(_rows(cells))))
        book.unload_sheet(n)
    return document("xls", sheet_blocks(sheets), metadata(author=book.user_name))


def _name_types(book: Any) -> None:
    """Give the numbers of an XLS book with formats that xlrd does not know types of their own."""
    from openpyxl.styles.numbers import is_timedelta_format  # type: ignore[import-untyped]

    for xf in book.xf_list:
        shown = book.format_map[xf.format_key].format_str if xf.format_key in book.format_map else ""
        if is_timedelta_format(shown):
            book._xf_index_to_xl_type_map[xf.xf_index] = _DURATION
        elif _ZEROS.fullmatch(shown):
            book._xf_index_to_xl_type_map[xf.xf_index] = _DURATION + len(shown)


def _filled(number: float, digits: int) -> str:
    return f"{int(number):0{digits + (number < 0)}}"


def _values(sheet: Any, uncomputed: _Uncomputed) -> Iterator[list[Any]]:
    """The rows of a sheet of openpyxl's, without most of the empty cells before others, which it fills up; of rows that
    are left out, however many, one. ``uncomputed`` gets formulas without a value."""
    from openpyxl.worksheet._reader import FORMULA_TAG, WorkSheetParser  # type: ignore[import-untyped]

    class Parser(WorkSheetParser):  # type: ignore[misc]
        def parse_cell(self, element: Any) -> Any:
            cell = super().parse_cell(element)
            # one whose value is an empty text is of type str
            if cell["value"] is None and element.get("t") != "str" and element.find(FORMULA_TAG) is not None:
                uncomputed.add(f"{sheet.title}!{element.get('r', '')}")
            return cell

    book, before = sheet.parent, 0
    formats = {"date_formats": book._date_formats, "timedelta_formats": book._timedelta_formats}
    digits: dict[int, int] = {}
    with sheet._get_source() as source:
        parser = Parser(source, sheet._shared_strings, data_only=book.data_only, epoch=book.epoch, **formats)
        for number, row in parser.parse():
            if number > before + 1:
                yield []
            before = number
            cells: list[Any] = []
            column = 0
            for cell in sorted(row, key=lambda cell: cell["column"]):
                style, value = cell["style_id"], cell["value"]
                if style not in digits:
                    digits[style] = _digits(sheet, style)
                if digits[style] and type(value) is int:
                    value = _filled(value, digits[style])
                cells += [None] * min(cell["column"] - column - 1, MAX_COLUMNS)
                cells.append(value)
                column = cell["column"]
            yield cells


def _digits(sheet: Any, style: int) -> int:
    """How many digits a whole number in this style has at least."""
    from openpyxl.cell.read_only import ReadOnlyCell  # type: ignore[import-untyped]

    try:
        shown = ReadOnlyCell(sheet, 1, 1, None, style_id=style).number_format
    except (IndexError, TypeError):  # the book has no such style
        return 0
    return len(shown) if _ZEROS.fullmatch(shown) else 0


def _without_controls(value: Any) -> Any:
    return _CONTROL.sub(" ", value) if isinstance(value, str) else value


def _rows(cells: Iterable[Iterable[Any]]) -> Iterator[list[str]]:
    """Of rows without text, however many, the first one."""
    is_empty = False
    for row in cells:
        texts = packed(map(cell_text, row))
        if texts or not is_empty:
            yield texts
        is_empty = not texts


def with_boxes(rows: list[list[str]], texts: Iterable[str]) -> list[list[str]]:
    """Rows of a sheet with the texts of its boxes below them, each apart."""
    return rows + [row for text in texts if text for row in ([], [text])]


def cell_text(value: Any) -> str:
    """How a person would write the value: whole numbers without a point, midnight dates without the time, durations in
    hours."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) <= _MOST_EXACT else format(value, ".15g")
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ") if value.time() != datetime.time() else value.date().isoformat()
    if isinstance(value, datetime.timedelta):
        text = str(abs(value) % datetime.timedelta(hours=1)).partition(":")[2]
        return f"{'-' * (value.days < 0)}{abs(value) // datetime.timedelta(hours=1)}:{text}"
    return str(value).strip()


def sheet_blocks(sheets: Iterable[tuple[str, list[list[str]]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A block a sheet that has cells; with several sheets each starts with its name as a heading."""
    filled = [(name, text) for name, rows in sheets if (text := "\n\n".join(_regions(rows)))]
    for name, text in filled:
        yield (f"# {name}\n\n{text}" if len(filled) > 1 else text), {"sheet": name}


def _regions(rows: list[list[str]]) -> Iterator[str]:
    """Tables of a sheet: an empty row ends one where other columns follow; a lone cell above one is its title."""
    table: list[list[str]] = []
    #: from which column to which its rows go; whether one goes beyond a column
    extents: set[tuple[int, int]] = set()
    is_wide = False
    gap = False
    for row in rows:
        used = [i for i, cell in enumerate(row) if cell]
        if not used:
            gap = True
            continue
        extent = (used[0], used[-1])
        # titles do not count where there are other rows
        goes_on = extent in extents and (used[0] < used[-1] or not is_wide)
        if gap and table and not goes_on:
            yield from _titled(table)
            table, extents, is_wide = [], set(), False
        gap = False
        table.append(row)
        extents.add(extent)
        is_wide |= used[0] < used[-1]
    yield from _titled(table)


def _titled(table: list[list[str]]) -> Iterator[str]:
    widest = max((sum(map(bool, row)) for row in table), default=0)
    start = 0
    while widest > 1 and sum(map(bool, table[start])) == 1:
        yield next(cell for cell in table[start] if cell)
        start += 1
    yield pipe_table(table[start:])
