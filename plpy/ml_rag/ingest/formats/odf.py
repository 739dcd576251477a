"""OpenDocument text, presentations and spreadsheets, from ``content.xml``."""

from __future__ import annotations

import contextlib
import posixpath
import re
import zipfile
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any

from ml_rag import abc
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats.archive import open_zip, parse_xml
from ml_rag.ingest.formats.common import (
    MAX_COLUMNS,
    Repeats,
    Request,
    damaged,
    document,
    dublin_core,
    encrypted,
    one_line,
    packed,
    pipe_table,
    power,
)
from ml_rag.ingest.formats.html import html_to_markdown
from ml_rag.ingest.formats.numbering import number_odf
from ml_rag.ingest.formats.pictures import Pictures
from ml_rag.ingest.formats.sheets import sheet_blocks, with_boxes

_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
_DRAW = "{urn:oasis:names:tc:opendocument:xmlns:drawing:1.0}"
_SVG = "{urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0}"
_OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
_PRESENTATION = "{urn:oasis:names:tc:opendocument:xmlns:presentation:1.0}"
_STYLE = "{urn:oasis:names:tc:opendocument:xmlns:style:1.0}"
_AUTHORS = (
    "{urn:oasis:names:tc:opendocument:xmlns:meta:1.0}initial-creator",
    "{http://purl.org/dc/elements/1.1/}creator",
)
_MATH = "{http://www.w3.org/1998/Math/MathML}"
_HREF = "{http://www.w3.org/1999/xlink}href"

#: older programs wrote comments on slides in the second namespace
_COMMENTS = {f"{_OFFICE}annotation", "{http://openoffice.org/2009/office}annotation"}
_SKIPPED = {*_COMMENTS, f"{_TEXT}tracked-changes", f"{_TEXT}ruby-text", f"{_TEXT}sequence-decls"}
_RAISED = re.compile(r"super|[1-9]")
#: of boxes and shapes, what stands around them
_AROUND = {f"{_DRAW}frame", f"{_DRAW}g", f"{_DRAW}a"}
#: boxes of a slide that each slide has
_RUNNING = ("header", "footer", "page-number", "date-time")
_VALUES = ("string-value", "date-value", "time-value", "boolean-value", "value")
_MAX_DEPTH = 100
#: a repeated row with text in it is written out at most so often
_MAX_REPEAT = 1000


def parse_odf(_name: str, content: bytes, request: Request) -> abc.Document:
    """One block of text, a block a slide (``{"slide": n}``) or a sheet (``{"sheet": name}``)."""
    with open_zip(content) as archive:
        names = archive.namelist()
        if "META-INF/manifest.xml" in names:
            manifest = parse_xml(archive.read("META-INF/manifest.xml"))
            if manifest.find(".//{*}encryption-data") is not None:
                raise encrypted("OpenDocument with a password")
        root = parse_xml(archive.read("content.xml"))
        meta = dublin_core(parse_xml(archive.read("meta.xml")), _AUTHORS) if "meta.xml" in names else {}
        body = root.find(f"{_OFFICE}body")
        part = None if body is None else next((child for child in body if isinstance(child.tag, str)), None)
        if part is None:
            raise damaged("OpenDocument without a body")
        if part.tag != f"{_OFFICE}spreadsheet":
            roots = [root, *(parse_xml(archive.read(name)) for name in ("styles.xml",) if name in names)]
            number_odf(part, roots)
            _raise(part, roots)
            _show_alternatives(part)
            _insert_objects(part, archive)
            if request.pictures is not None:
                _mark(part, archive, request.pictures)
    repeats = Repeats()
    blocks = _plain if request.pictures is None else request.pictures.blocks
    if part.tag == f"{_OFFICE}presentation":
        pages = enumerate(part.iterfind(f"{_DRAW}page"), 1)
        slides = [block for i, page in pages for block in blocks(_slide(page, repeats), {"slide": i})]
        return document("odp", slides, meta)
    if part.tag == f"{_OFFICE}spreadsheet":
        tables = part.iterfind(f"{_TABLE}table")
        sheets = [(table.get(f"{_TABLE}name") or "", _sheet(table, repeats)) for table in tables]
        return document("ods", sheet_blocks(sheets), meta)
    return document("odt", blocks("\n\n".join(_blocks(part, 0, repeats)), {}), meta)


def _plain(text: str, keys: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(text, keys)]


def _raise(part: Any, roots: Iterable[Any]) -> None:
    """Have it known of texts whether they are raised, such as powers."""
    raised = {
        properties.getparent().get(f"{_STYLE}name")
        for root in roots
        for properties in root.iter(f"{_STYLE}text-properties")
        if _RAISED.match(properties.get(f"{_STYLE}text-position", ""))
    }
    for span in part.iter(f"{_TEXT}span"):
        if span.get(f"{_TEXT}style-name") in raised:
            span.set("raised", "true")


def _show_alternatives(part: Any) -> None:
    """Put the texts that stand for a picture into it."""
    for frame in part.iter(f"{_DRAW}frame"):
        image = frame.find(f"{_DRAW}image")
        texts = [frame.findtext(f"{_SVG}{key}") or "" for key in ("title", "desc")]
        if image is not None and any(texts):
            paragraph = image.makeelement(f"{_TEXT}p")
            paragraph.text = one_line(" ".join(texts))
            image.append(paragraph)


def _insert_objects(part: Any, archive: zipfile.ZipFile) -> None:
    """Put formulas in their place, as text, and what charts and other documents have in their frame."""
    from lxml import etree  # type: ignore[import-untyped]

    names = set(archive.namelist()) - {"content.xml"}
    for frame in list(part.iter(f"{_DRAW}frame")):
        place = frame.find(f"{_DRAW}object")
        name = "" if place is None else posixpath.normpath(f"{place.get(_HREF, '')}/content.xml")
        if name not in names:
            continue
        names.remove(name)  # each is read once, whatever refers to it
        with contextlib.suppress(DocumentError):  # one that is damaged takes no text away
            root = parse_xml(archive.read(name))
            if root.tag != f"{_MATH}math":
                place.extend(root.iterfind(f"{_OFFICE}body"))
                continue
            for element in root.iter("{*}*"):
                element.tag = etree.QName(element).localname
            text = html_to_markdown(etree.tostring(root, encoding="unicode"))
            if frame.getparent().tag.startswith(_TEXT):
                shown = frame.makeelement(f"{_TEXT}span")
                shown.text, shown.tail = text, frame.tail
                frame.getparent().replace(frame, shown)
            else:
                etree.SubElement(place, f"{_TEXT}p").text = text


def _mark(part: Any, archive: zipfile.ZipFile, pictures: Pictures) -> None:
    """A paragraph with its mark in each picture that has a description, or after the table that this is in."""
    names = set(archive.namelist())
    for image in list(part.iter(f"{_DRAW}image")):
        if next(image.itersiblings(image.tag), None) is not None:
            continue  # the same picture in a simpler format follows
        name = posixpath.normpath(image.get(_HREF, ""))
        if name in names and (mark := pictures.mark(partial(archive.read, name))):
            paragraph = image.makeelement(f"{_TEXT}p")
            paragraph.text = mark
            if tables := list(image.iterancestors(f"{_TABLE}table")):
                tables[-1].addnext(paragraph)
            else:
                image.append(paragraph)


def _slide(page: Any, repeats: Repeats) -> str:
    parts: list[str] = []
    for child in page:
        kind = child.get(f"{_PRESENTATION}class")
        is_read = child.tag not in {*_COMMENTS, f"{_PRESENTATION}notes"} and kind not in _RUNNING
        text = "\n\n".join(_blocks(child, 0, repeats)) if is_read else ""
        if text and kind == "title":
            parts.insert(0, f"# {one_line(text)}")
        elif text:
            parts.append(text)
    notes = page.find(f"{_PRESENTATION}notes")
    if notes is not None:
        text = "\n\n".join(_blocks(notes, 0, repeats))
        parts.extend([f"Notes: {text}"] if text else [])
    return "\n\n".join(parts)


def _blocks(element: Iterable[Any], depth: int, repeats: Repeats) -> Iterator[str]:
    """Headings, paragraphs, lists and tables below an element, in Markdown."""
    if depth > _MAX_DEPTH:
        raise RecursionError("OpenDocument elements")
    for child in element:
        if child.tag in _SKIPPED or not isinstance(child.tag, str):
            continue
        if child.tag == f"{_TEXT}h":
            yield _heading(child)
            yield from _frames(child, depth, repeats)
        elif child.tag == f"{_TEXT}p":
            yield _inline(child, 0).strip()
            yield from _frames(child, depth, repeats)
        elif child.tag == f"{_TEXT}list":
            yield "\n".join(_list(child, 0, repeats))
        elif child.tag == f"{_TABLE}table":
            yield pipe_table(_table_rows(child, repeats))
        else:
            yield from _blocks(child, depth + 1, repeats)


def _heading(element: Any) -> str:
    level = element.get(f"{_TEXT}outline-level") or "1"
    text = one_line(_inline(element, 0))
    signs = "#" * max(1, min(int(level) if level.isdigit() else 1, 6))
    return f"{signs} {_labelled(element, text)}" if text else ""


def _labelled(paragraph: Any, text: str) -> str:
    """The text of a paragraph with its number, which is that of its item if it is the first one there."""
    around = paragraph.getparent()
    label = paragraph.get("label") or (around.get("label") if around.find("*") is paragraph else None)
    return f"{label} {text}" if label and text else text


def _frames(paragraph: Any, depth: int, repeats: Repeats) -> Iterator[str]:
    """What stands in the boxes and shapes of a paragraph."""
    for box in paragraph.iter(f"{_DRAW}*"):
        # one in another box comes with that
        if (
            box.tag not in _AROUND
            and next(box.iterancestors(f"{_TEXT}p", f"{_TEXT}h", f"{_DRAW}text-box")) is paragraph
        ):
            yield from _blocks(box, depth + 1, repeats)


def _list(element: Any, depth: int, repeats: Repeats) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise RecursionError("OpenDocument lists")
    for item in element:
        if item.tag not in {f"{_TEXT}list-item", f"{_TEXT}list-header"}:
            continue
        mark = item.get("label") or "-"
        for child in item:
            if child.tag == f"{_TEXT}list":
                yield from _list(child, depth + 1, repeats)
            elif child.tag == f"{_TEXT}h":
                yield f"\n{_heading(child)}\n"
                yield from filter(None, _frames(child, depth, repeats))
            elif child.tag == f"{_TEXT}p":
                if text := one_line(_inline(child, 0)):
                    yield f"{'  ' * depth}{mark} {text}"
                    mark = mark if mark == "-" else " " * min(len(mark), 9)
                yield from filter(None, _frames(child, depth, repeats))
            else:
                yield from filter(None, _blocks((child,), depth, repeats))


def _inline(element: Any, depth: int) -> str:
    if depth > _MAX_DEPTH:
        raise RecursionError("OpenDocument text")
    parts = [element.text or ""]
    for child in element:
        if child.tag == f"{_TEXT}s":
            count = child.get(f"{_TEXT}c") or "1"
            parts.append(" " * min(int(count) if count.isdigit() else 1, 100))
        elif child.tag in {f"{_TEXT}tab", f"{_TEXT}line-break"}:
            parts.append("\t" if child.tag.endswith("tab") else "\n")
        elif child.tag == f"{_TEXT}note":
            body = child.find(f"{_TEXT}note-body")
            parts.append(f" ({one_line(''.join(body.itertext()))})" if body is not None else "")
        elif isinstance(child.tag, str) and child.tag not in _SKIPPED and not child.tag.startswith(_DRAW):
            text = _inline(child, depth + 1)
            parts.append(power(next(filter(None, reversed(parts)), ""), text) if child.get("raised") else text)
        parts.append(child.tail or "")
    return "".join(parts)


def _sheet(table: Any, repeats: Repeats) -> list[list[str]]:
    return with_boxes(_table_rows(table, repeats), _blocks(table.iterchildren(f"{_TABLE}shapes"), 0, repeats))


def _table_rows(table: Any, repeats: Repeats) -> list[list[str]]:
    rows: list[list[str]] = []
    for row in table.iter(f"{_TABLE}table-row"):
        if next(row.iterancestors(f"{_TABLE}table")) is table:
            cells, times = _cells(row)
            own = sum(len(text) + 3 for text, _ in cells)
            repeats.add(sum((len(text) + 3) * n for text, n in cells) * times - own)
            rows.extend([packed(chain.from_iterable(repeat(text, n) for text, n in cells))] * times)
    return rows


def _cells(row: Any) -> tuple[list[tuple[str, int]], int]:
    """The texts of a row up to its last one, how often each is there, and how often the row is."""
    cells: list[tuple[str, int]] = []
    for cell in row.iterchildren(f"{_TABLE}table-cell", f"{_TABLE}covered-table-cell"):
        text = " ".join(_labelled(part, one_line(_inline(part, 0))) for part in _paragraphs(cell))
        if not text:  # some programs write the value alone
            text = next(filter(None, (cell.get(f"{_OFFICE}{key}") for key in _VALUES)), "")
        cells.append((text, min(_repeat(cell, "number-columns-repeated"), MAX_COLUMNS)))
    while cells and not cells[-1][0]:
        cells.pop()
    # Empty rows are only a border between tables, however many there are.
    return cells, min(_repeat(row, "number-rows-repeated"), _MAX_REPEAT) if cells else 1


def _paragraphs(cell: Any) -> Iterator[Any]:
    """Those of a cell in their order, in boxes too, but for comments and notes; notes stand where they belong."""
    waiting = list(reversed(cell))
    while waiting:
        element = waiting.pop()
        if element.tag in (f"{_TEXT}p", f"{_TEXT}h"):
            yield element
        if element.tag not in _SKIPPED and element.tag != f"{_TEXT}note":
            waiting.extend(reversed(element))


def _repeat(element: Any, key: str) -> int:
    value = element.get(f"{_TABLE}{key}") or "1"
    return max(1, int(value)) if value.isdigit() and len(value) < 8 else 1
