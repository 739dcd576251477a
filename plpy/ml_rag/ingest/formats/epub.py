"""EPUB: the documents of the spine in reading order, a block each."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote

from ml_rag import abc
from ml_rag.ingest.formats.archive import check_entities, open_zip, parse_xml
from ml_rag.ingest.formats.common import Request, damaged, document, dublin_core, encrypted, numbers
from ml_rag.ingest.formats.encoding import decode
from ml_rag.ingest.formats.html import html_blocks

_ENCRYPTED_CONTENT = ".//{http://www.w3.org/2001/04/xmlenc#}CipherReference"


def parse_epub(_name: str, content: bytes, request: Request) -> abc.Document:
    """Metadata of a block: ``{"section": n}``, 1-based, in the order of the spine."""
    pictures = request.pictures
    blocks: list[tuple[str, dict[str, Any]]] = []
    missing = []
    with open_zip(content) as archive:
        check_entities(archive)
        package = _package_path(archive)
        root = parse_xml(archive.read(package))
        _check_rights(archive)
        meta = dublin_core(root)
        names = set(archive.namelist())
        for i, path in enumerate(_spine(names, package, root), 1):
            if path is None:
                missing.append(i)
                continue

            def mark(address: str, path: str = path) -> str:
                name = _resolved(path, address)
                return pictures.mark(partial(archive.read, name)) if pictures and name in names else ""

            blocks += html_blocks(decode(archive.read(path)), pictures, mark, {"section": i})
    return document("epub", blocks, meta, numbers("section", missing))


def _resolved(path: str, address: str) -> str:
    """The name in the archive of what a document of it refers to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(address)))


def _package_path(archive: zipfile.ZipFile) -> str:
    root = parse_xml(archive.read("META-INF/container.xml"))
    found = root.find(".//{*}rootfile")
    path = None if found is None else found.get("full-path")
    if path is None or path not in archive.namelist():
        raise damaged("EPUB: no package document")
    return str(path)


def _spine(names: set[str], package: str, root: Any) -> Iterator[str | None]:
    """The paths of the documents, each once; None for one that the archive lacks."""
    items = {item.get("id"): item for item in root.iterfind(".//{*}manifest/{*}item")}
    seen = set()
    for reference in root.iterfind(".//{*}spine/{*}itemref"):
        item = items.get(reference.get("idref"))
        if item is not None and "nav" in (item.get("properties") or "").split():
            continue
        path = _resolved(package, (item is not None and item.get("href")) or "")
        if path not in names:
            yield None
        elif path not in seen:
            seen.add(path)
            yield path


def _check_rights(archive: zipfile.ZipFile) -> None:
    if "META-INF/encryption.xml" not in archive.namelist():
        return
    references = parse_xml(archive.read("META-INF/encryption.xml")).iterfind(_ENCRYPTED_CONTENT)
    # Fonts are often obscured in books that are free to read.
    if any((one.get("URI") or "").lower().endswith(("html", "htm", "xml")) for one in references):
        raise encrypted("EPUB: its content is under digital rights management")
