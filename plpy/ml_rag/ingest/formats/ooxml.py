"""What Word, PowerPoint and Excel have alike: formulas, diagrams (SmartArt), parts that parts refer to."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterable
from typing import Any

from ml_rag.ingest.formats.archive import parse_xml
from ml_rag.ingest.formats.common import one_line

MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
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
    lines = parse_xml(content).iter("{*}p")
    texts = ("".join(part.text or " " for part in line.iter("{*}t", "{*}br")) for line in lines)
    return [text for text in map(one_line, texts) if text]
