"""What Word, PowerPoint and Excel have alike: formulas, diagrams (SmartArt), charts, parts that parts refer to, the
strict kind of files."""

from __future__ import annotations

import contextlib
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import Any

from ml_rag.ingest.formats.archive import parse_xml
from ml_rag.ingest.formats.common import one_line, pipe_table

MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_STRICT = re.compile(rb"(=[\"'])http://purl\.oclc\.org/ooxml/(\w+)/")
#: what stands before a part of a formula
_SIGNS = {"num": "", "den": "/", "sup": "^", "sub": "_", "lim": "_", "root": "√"}
#: elements that begin and end with a character, which they can name -> where and what else
_DRAWN = {"nary": (("chr", "∫"), None), "d": (("begChr", "("), ("endChr", ")"))}
#: what stands between parts of the same kind
_BETWEEN = {"d": "|", "mr": " ", "m": "; ", "eqArr": "; "}


def formula(root: Any) -> str:
    """A formula in a line: ``(a+b)/2``, ``x^2``, ``√(x+1)``."""
    from lxml import etree  # type: ignore[import-untyped]

    found: list[str] = []
    #: of the elements around: what ends each; of those with a sign where that is, and the characters before
    open_ones: list[tuple[str, int, int]] = []
    characters = 0
    walk = etree.iterwalk(root, events=("start", "end"))
    for event, element in walk:
        if event == "end":
            end, sign, before = open_ones.pop()
            if sign >= 0 and characters == before:
                found[sign] = ""
            elif sign >= 0 and characters > before + 1:
                found[sign] += "("
                end = ")"
            found.append(end)
            continue
        tag = etree.QName(element).localname if isinstance(element.tag, str) else ""
        parent = etree.QName(element.getparent()).localname if tag in ("e", "mr") else ""
        if tag == "e" and parent == "rad":
            tag = "root"
        end, sign = "", -1
        if tag == "t":
            found.append("".join(element.itertext()))
            characters += len(found[-1])
        elif tag == "del":
            walk.skip_subtree()
        elif tag in _DRAWN:
            begin, last = _DRAWN[tag]
            found.append(_character(element, tag, *begin))
            end = _character(element, tag, *last) if last else ""
        elif tag in _SIGNS:
            sign = len(found)
            found.append(_SIGNS[tag])
        elif parent in _BETWEEN and element.getnext() is not None:
            end = _BETWEEN[parent]
        open_ones.append((end, sign, characters))
    return one_line("".join(found))


def run_of(lines: Iterable[str], space: str, beside: Any) -> Any:
    """Lines of text as an element of a paragraph of this namespace, for the tree of another element."""
    run = beside.makeelement(f"{space}r")
    for number, line in enumerate(lines):
        if number:
            run.append(run.makeelement(f"{space}br"))
        text = run.makeelement(f"{space}t")
        text.text = line
        run.append(text)
    return run


def _character(element: Any, tag: str, name: str, otherwise: str) -> str:
    one = element.find(f"{MATH}{tag}Pr/{MATH}{name}")
    return otherwise if one is None else str(one.get(f"{MATH}val", ""))


def transitional(archive: zipfile.ZipFile, content: bytes) -> bytes:
    """A file in the strict kind of OOXML with the names of the other kind, which alone libraries know."""
    if "_rels/.rels" not in archive.NameToInfo or b"http://purl.oclc.org/ooxml/" not in archive.read("_rels/.rels"):
        return content
    names = [name for name in archive.namelist() if name.endswith((".xml", ".rels"))]
    return with_parts(
        archive,
        {name: _STRICT.sub(rb"\1http://schemas.openxmlformats.org/\2/2006/", archive.read(name)) for name in names},
    )


def with_parts(archive: zipfile.ZipFile, changed: dict[str, bytes]) -> bytes:
    """The file with these parts changed."""
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name in dict.fromkeys(archive.namelist()):
            # a picture that is damaged takes no text away
            harmless = () if name.endswith((".xml", ".rels")) else (zipfile.BadZipFile, zlib.error, EOFError)
            with contextlib.suppress(*harmless):
                made.writestr(name, changed[name] if name in changed else archive.read(name))
    return out.getvalue()


def related(archive: zipfile.ZipFile, name: str, kind: str = "") -> dict[str, str]:
    """The parts of a kind that a part refers to, by what it calls them."""
    folder, _, file = name.rpartition("/")
    names = archive.NameToInfo
    relations = f"{folder}/_rels/{file}.rels"
    found = parse_xml(archive.read(relations)).iter("{*}Relationship") if relations in names else ()
    paths = {
        one.get("Id", ""): posixpath.normpath(posixpath.join("/", folder, one.get("Target", "")))[1:]
        for one in found
        if one.get("Type", "").endswith(kind)
    }
    return {key: path for key, path in paths.items() if path in names}


def diagram(content: bytes) -> list[str]:
    """The lines of a diagram, by its data; or of the boxes of a sheet."""
    return _lines(parse_xml(content))


def _lines(root: Any) -> list[str]:
    texts = ("".join(part.text or " " for part in line.iter("{*}t", "{*}br")) for line in root.iter("{*}p"))
    return [text for text in map(one_line, texts) if text]


def chart(root: Any) -> Iterator[str]:
    """The title of a chart; its values in a table, a series a column; and those of series with an x of their own, a
    point a row."""
    title = root.find("{*}chart/{*}title")
    if title is not None:
        yield "\n".join(_lines(title)) or (title.findtext(".//{*}v") or "")
    plots = root.iterfind("{*}chart/{*}plotArea/*")
    series = [one for plot in plots for one in sorted(plot.iterfind("{*}ser"), key=_order)]
    points, columns = ([one for one in series if (one.find("{*}xVal") is None) is other] for other in (False, True))
    labels: dict[int, str] = next(filter(None, (_points(one, "{*}cat") for one in columns)), {})
    values = [_values(one, "{*}val") for one in columns]
    numbers = sorted(labels.keys() | {i for found in values for i in found})
    rows = [[labels.get(i, ""), *(found.get(i, "") for found in values)] for i in numbers]
    yield pipe_table([["", *map(_name, columns)], *rows] if rows else [])
    rows = []
    for one in points:
        found = [_values(one, key) for key in ("{*}xVal", "{*}yVal", "{*}bubbleSize")]
        rows += [[_name(one), *(part.get(i, "") for part in found)] for i in sorted(set().union(*found))]
    yield pipe_table([["", "x", "y", "size" if any(row[3] for row in rows) else ""], *rows] if rows else [])


def _order(series: Any) -> int:
    found = series.find("{*}order")
    return 0 if found is None else int(found.get("val", "0"))


def _name(series: Any) -> str:
    return next(iter(_points(series, "{*}tx").values()), "") or (series.findtext("{*}tx/{*}v") or "")


def _values(series: Any, key: str) -> dict[int, str]:
    """Of the points, by their number, as people write them."""
    return {i: _number(text) for i, text in _points(series, key).items()}


def _number(text: str) -> str:
    try:
        return format(float(text), ".15g")
    except ValueError:  # such as #N/A
        return text


def _points(series: Any, key: str) -> dict[int, str]:
    """The texts of a part of a series, of several levels the innermost, by their number: as they stand there, since
    the file can say that there are more."""
    part = series.find(key)
    if part is None:
        return {}
    level = part.find(".//{*}lvl")
    points = list((part if level is None else level).iter("{*}pt"))
    return {int(one.get("idx", "0")): one.findtext("{*}v") or "" for one in reversed(points)}
