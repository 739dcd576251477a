"""Word documents (OOXML) through mammoth and the HTML converter: headings, lists, tables, footnotes, text boxes."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Callable
from html import escape
from io import BytesIO
from typing import Any

from ml_rag import abc
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats.archive import check_entities, core_properties, open_zip, parse_xml
from ml_rag.ingest.formats.common import Request, document, one_line
from ml_rag.ingest.formats.detect import detect
from ml_rag.ingest.formats.html import html_blocks
from ml_rag.ingest.formats.numbering import WordLabels, whole
from ml_rag.ingest.formats.ooxml import MATH, chart, diagram, formula, related, run_of, with_parts
from ml_rag.ingest.formats.running import LONGEST, SHOWN

# mammoth knows headings; the title styles are left to the caller.
_STYLES = """
p[style-name='Title'] => h1:fresh
p[style-name='Subtitle'] => p:fresh
p[style-name='Heading 7'] => h6:fresh
p[style-name='Heading 8'] => h6:fresh
p[style-name='Heading 9'] => h6:fresh
b => span
i => span
br[type='page'] => br
br[type='column'] => br
r.MlRagLabel => marker
"""
#: older versions of Word put the name of the file there
_FILE = re.compile(r"\.(?:png|jpe?g|gif|bmp|tiff?|emf|wmf|svg)\s*$", re.I)
_CAN_BE_NUMBERED = re.compile(rb"<[\w.-]+:(?:numPr|pStyle)\b")
_PART = re.compile(r"word/[^/]*\.xml")
#: what attributes that name a part begin with, in either kind of OOXML
_RELATED = (
    "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}",
    "{http://purl.oclc.org/ooxml/officeDocument/relationships}",
)
#: of a table of Word
_MOST_COLUMNS = 63
_COMPATIBLE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_VML = "{urn:schemas-microsoft-com:vml}"
#: elements that mammoth leaves out with the text in them: fields such as the number of a caption, directions of text,
#: characters with their readings
_AROUND = ("fldSimple", "dir", "bdo", "ruby", "rubyBase")
_HAS_SUCH = re.compile(
    rf"<[\w.-]+:(?:{'|'.join(_AROUND)}|cr|ptab|oMath|relIds|chart|textbox|txbxContent|ddList|AlternateContent|altChunk|tbl)\b".encode()
)


def parse_docx(_name: str, content: bytes, request: Request, *, is_inserted: bool = False) -> abc.Document:
    """One block, but for pictures that are described: the format has no page borders. Links keep their text. Headers
    and footers are metadata, as those of PDFs; what is more than these have stands at the end. Documents
    that are inserted stand in their place, unless it is one itself: a file can be within itself."""
    import mammoth  # type: ignore[import-untyped]

    unread: list[str] = []

    def inserted(name: str, content: bytes) -> str:
        made = None
        with contextlib.suppress(DocumentError):
            made = None if is_inserted else _inserted(name, content, request.language)
        if made is None or "left_out" in made.metadata:
            unread.append(name)
        return "" if made is None else "\n\n".join(block.text for block in made.blocks)

    with open_zip(content) as archive:
        check_entities(archive)
        meta = core_properties(archive)
        lines = _running(archive)
        content = _without_such(archive, content, inserted)

    marks: list[str] = []

    def convert_image(image: Any) -> list[Any]:
        def read() -> bytes:
            with image.open() as file:
                found: bytes = file.read()
                return found

        alt = image.alt_text or ""
        shown = {} if _FILE.search(alt) else {"alt": alt}
        if request.pictures is not None and (mark := request.pictures.mark(read)):
            marks.append(mark)
            shown["src"] = str(len(marks) - 1)
        space = [mammoth.html.text(" ")] if shown.get("alt") else []  # not part of the word beside it
        return [*space, mammoth.html.element("img", shown), *space]

    def convert(content: bytes) -> str:
        html: str = mammoth.convert_to_html(BytesIO(content), convert_image=convert_image, style_map=_STYLES).value
        return html

    try:
        html = convert(content)
    except KeyError:
        html = convert(_without_dangling(content))
    shown = [line for line in lines if len(line) <= LONGEST][:SHOWN]
    if shown:
        meta["running_lines"] = shown
    html += "".join(f"<p>{escape(line)}</p>" for line in lines if line not in shown)
    blocks = html_blocks(html, request.pictures, lambda source: marks[int(source)] if source else "", {})
    return document("docx", blocks, meta, f"inserted documents: {', '.join(unread)}" if unread else None)


def _inserted(name: str, content: bytes, language: str | None) -> abc.Document:
    from ml_rag.ingest.parse import parse

    if detect(name, content, language) == "docx":
        return parse_docx(name, content, Request(language), is_inserted=True)
    return parse(name, content, language=language)


def _running(archive: zipfile.ZipFile) -> list[str]:
    """The lines of headers and footers, but for those without a letter."""
    lines = []
    for name in filter(re.compile(r"word/(?:header|footer)[^/]*\.xml").fullmatch, archive.namelist()):
        with contextlib.suppress(DocumentError):  # one that is damaged takes no text away
            root = parse_xml(archive.read(name))
            for paragraph in root.iter(f"{root.tag.rpartition('}')[0]}}}p"):
                parts = paragraph.iter("{*}t", "{*}tab", "{*}br")
                own = (one for one in parts if next(one.iterancestors(paragraph.tag)) is paragraph)
                lines.append(one_line("".join(one.text or " " for one in own)))
    return [line for line in dict.fromkeys(lines) if re.search(r"[^\W\d_]", line)]


def _without_such(archive: zipfile.ZipFile, content: bytes, inserted: Callable[[str, bytes], str]) -> bytes:
    """The document with what stands in those elements in their place, formulas, diagrams, charts and the numbers of
    paragraphs as text, text boxes as older versions have them. ``inserted``: the text of a document, by its name and
    content."""
    from lxml import etree  # type: ignore[import-untyped]

    parts = {name: archive.read(name) for name in archive.namelist() if _PART.fullmatch(name)}
    changed = {}
    known = {key: parts.get(f"word/{key}.xml") for key in ("numbering", "styles")}
    numbering, styles = (None if part is None else parse_xml(part) for part in known.values())
    for name, part in parts.items():
        if _HAS_SUCH.search(part) or (numbering is not None and _CAN_BE_NUMBERED.search(part)):
            root = parse_xml(part)
            etree.strip_tags(root, *(f"{{*}}{tag}" for tag in _AROUND), f"{MATH}oMathPara")
            space = root.tag.rpartition("}")[0] + "}"
            for one in root.iter(f"{space}cr", f"{space}ptab"):
                one.tag = f"{space}br" if one.tag.endswith("cr") else f"{space}tab"
            data = related(archive, name)
            for one in list(root.iter("{*}relIds", "{*}chart")):
                key = next((value for key, value in one.items() if key.endswith(("}dm", "}id"))), "")
                drawing = next(one.iterancestors("{*}drawing"), None)
                if drawing is not None and (path := data.pop(key, "")):
                    shown = archive.read(path)
                    is_chart = one.tag.endswith("}chart")
                    _replace(drawing, _chart_lines(shown) if is_chart else diagram(shown))
            for one in list(root.iter(f"{space}altChunk")):
                key = next((value for key, value in one.items() if key.endswith("}id")), "")
                if path := data.pop(key, ""):
                    for text in inserted(path, archive.read(path)).split("\n\n"):
                        paragraph = one.makeelement(f"{space}p")
                        paragraph.append(run_of(text.split("\n"), space, one))
                        one.addprevious(paragraph)
            for one in list(root.iter(f"{_COMPATIBLE}AlternateContent")):
                _take_newer(one)
            for one in list(root.iter("{*}ddList")):
                _choose(one)
            for one in list(root.iter(f"{space}tbl")):
                _take_out_tables(one, space)
            for one in root.iter(f"{space}gridBefore"):
                _begin_later(one.getparent().getparent(), one.get(f"{space}val"), space)
            for one in list(root.iter(f"{MATH}oMath")):
                _replace(one, [formula(one)])
            for box in list(root.iter("{*}txbxContent")):
                _move_out(box)
                for shape in box.iterancestors(f"{_VML}*"):  # of an ellipse, mammoth leaves the text out
                    shape.tag = f"{_VML}shape"
            if numbering is not None:
                _show_numbers(root, WordLabels(numbering, styles))
            changed[name] = etree.tostring(root)
    return with_parts(archive, changed) if changed else content


def _show_numbers(root: Any, labels: WordLabels) -> None:
    """Put what Word shows before its paragraphs into them, as runs of a style of their own."""
    space = root.tag.rpartition("}")[0] + "}"
    for paragraph in root.iter(f"{space}p"):
        if next(paragraph.iterancestors(f"{_COMPATIBLE}Choice"), None) is not None:  # what follows has its text, too
            continue
        label = labels.label(paragraph)
        if label == "":  # for mammoth, each paragraph with a number is an item of a list
            properties = paragraph.find(f"{space}pPr")
            for old in properties.findall(f"{space}numPr"):
                properties.remove(old)
            none = [properties.makeelement(f"{space}{key}", {f"{space}val": "0"}) for key in ("ilvl", "numId")]
            properties.append(properties.makeelement(f"{space}numPr"))
            properties[-1].extend(none)
        elif label and next(paragraph.iter(f"{space}t", f"{space}drawing", f"{space}pict"), None) is not None:
            run = run_of([f"{label} "], space, paragraph)
            properties = run.makeelement(f"{space}rPr")
            properties.append(run.makeelement(f"{space}rStyle", {f"{space}val": "MlRagLabel"}))
            run.insert(0, properties)
            paragraph.find(f"{space}pPr").addnext(run)


def _without_dangling(content: bytes) -> bytes:
    """The document without references to what it does not have, such as the address of a link, or a note."""
    from lxml import etree

    with open_zip(content) as archive:
        parts = {name: parse_xml(archive.read(name)) for name in archive.namelist() if _PART.fullmatch(name)}
        for name, root in parts.items():
            space = root.tag.rpartition("}")[0] + "}"
            relations = name.replace("word/", "word/_rels/") + ".rels"
            known = parse_xml(archive.read(relations)) if relations in archive.NameToInfo else ()
            ids = {one.get("Id") for one in known}
            for one in root.iter("*"):
                for key, value in one.items():
                    if key.startswith(_RELATED) and value not in ids:
                        del one.attrib[key]
            for kind in ("footnote", "endnote"):
                notes = parts.get(f"word/{kind}s.xml", ())
                there = {note.get(f"{space}id") for note in notes}
                for one in list(root.iter(f"{space}{kind}Reference")):
                    if one.get(f"{space}id") not in there:
                        one.getparent().remove(one)
        return with_parts(archive, {name: etree.tostring(root) for name, root in parts.items()})


def _replace(element: Any, lines: list[str]) -> None:
    """Lines of text in place of an element of a paragraph."""
    space = element.getroottree().getroot().tag.rpartition("}")[0] + "}"
    element.getparent().replace(element, run_of(lines, space, element))


def _chart_lines(content: bytes) -> list[str]:
    with contextlib.suppress(DocumentError, ValueError):  # one that is damaged takes no text away
        return "\n\n".join(filter(None, chart(parse_xml(content)))).split("\n")
    return []


def _begin_later(row: Any, columns: str | None, space: str) -> None:
    """An empty cell over the columns before the first cell of a row."""
    first = row.find(f"{space}tc")
    if first is not None and (wide := min(whole(columns, 0), _MOST_COLUMNS)) > 0:
        cell = row.makeelement(f"{space}tc")
        for tag in ("tcPr", "p"):
            cell.append(cell.makeelement(f"{space}{tag}"))
        cell[0].append(cell.makeelement(f"{space}gridSpan", {f"{space}val": str(wide)}))
        first.addprevious(cell)


def _take_out_tables(table: Any, space: str) -> None:
    """Tables in cells below the table around them, unless that only places things on the page: more of its rows
    have several cells with text than a table."""
    rows = table.findall(f"{space}tr")
    holding = sum(row.find(f".//{space}tbl") is not None for row in rows)
    if not holding or next(table.iterancestors(f"{space}tbl"), None) is not None:
        return

    def is_filled(row: Any) -> bool:
        cells = row.iterchildren(f"{space}tc")
        return sum(any((one.text or "").strip() for one in cell.iter(f"{space}t")) for cell in cells) > 1

    if sum(is_filled(row) for row in rows if row.find(f".//{space}tbl") is None) > holding:
        inner = [one for one in table.iterdescendants(f"{space}tbl") if next(one.iterancestors(f"{space}tbl")) is table]
        for one in reversed(inner):
            table.addnext(one)


def _take_newer(element: Any) -> None:
    """Put what newer versions show in place of a choice whose text older ones lack in part."""
    newer, older = element.find("{*}Choice"), element.find("{*}Fallback")
    if newer is None or (older is not None and _letters(newer) in _letters(older)):
        return
    for one in list(newer):
        element.addprevious(one)
    element.getparent().remove(element)


def _letters(choice: Any) -> str:
    return "".join("".join(one.text or "" for one in choice.iter("{*}t")).split())


def _choose(entries: Any) -> None:
    """The entry that is chosen of a field, behind the run that has its list."""
    space = entries.tag.rpartition("}")[0] + "}"
    texts = [one.get(f"{space}val", "") for one in entries.iter(f"{space}listEntry")]
    chosen = next((one.get(f"{space}val", "") for one in entries.iter(f"{space}result", f"{space}default")), "0")
    run = next(entries.iterancestors(f"{space}r"), None)
    if run is not None and chosen.isdecimal() and int(chosen) < len(texts):
        run.addnext(run_of([texts[int(chosen)]], space, run))


def _move_out(box: Any) -> None:
    """Put the text of a box before its drawing, unless what older versions show in its place has it too."""
    within = next(box.iterancestors("{*}drawing"), None)
    for choice in box.iterancestors(f"{_COMPATIBLE}Choice"):
        within = choice.getparent()
        if within.find("{*}Fallback//{*}txbxContent") is not None:
            return
    if within is not None:
        picture = box.makeelement(f"{box.tag.rpartition('}')[0]}}}pict")
        within.addprevious(picture)
        picture.append(box)
