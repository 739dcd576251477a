"""XML: feeds (RSS, Atom) entry by entry, XHTML as HTML, anything else as its text, in attributes if most is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ml_rag import abc
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats.archive import parse_xml as read_xml
from ml_rag.ingest.formats.archive import refuse_entities
from ml_rag.ingest.formats.common import Request, document, metadata, one_line
from ml_rag.ingest.formats.encoding import decode
from ml_rag.ingest.formats.html import html_to_markdown, parse_html

#: elements of an entry that hold text of several words, in whatever namespace
_TEXTS = frozenset({"description", "summary", "content", "encoded", "body", "subtitle", "abstract"})
#: empty elements between lines; items of a list, which stand side by side, are apart, too, but marks of letters are not
_BREAKS = frozenset({"lb", "br", "break", "linebreak", "tab"})
_WORDS = re.compile(r"[^\W\d_]{2,} [^\W\d_]{2,}")
_DRAWING = "{http://www.w3.org/2000/svg}"
_DECLARATION = re.compile(r"^\s*<\?xml[^>]*\?>")
#: of an entity, which is not needed: the text keeps the name of the entity, as HTML does
_ENTITY = re.compile(r"""<!ENTITY\s(?:[^<>"']|"[^"]*"|'[^']*'){1,4000}+>""")


def parse_xml(name: str, content: bytes, request: Request) -> abc.Document:
    """Format ``rss`` for a feed (RSS, Atom, RDF), ``html`` for XHTML, else ``xml``, as it stands if damaged."""
    # The text is decoded here, since the declared encoding is not always the real one.
    text = _DECLARATION.sub("", decode(content, request.language))
    source = _ENTITY.sub("", text).encode("utf-8", "replace")
    refuse_entities(source)
    try:
        root = read_xml(source)
    except DocumentError:
        return document("xml", [(text, {})])
    kind = _local(root)
    if kind == "html":
        return parse_html(name, source, request)
    if kind in {"rss", "feed", "RDF"} and (kind != "RDF" or root.find("{*}item") is not None):
        return _feed(root)
    return document("xml", [("\n\n".join(_texts(root)), {})], metadata(title=_child(root, "title")))


def _local(element: Any) -> str:
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _child(element: Any, *names: str) -> str | None:
    for name in names:
        found = element.find(name if name.startswith("{") else "{*}" + name)
        if found is not None and "".join(found.itertext()).strip():
            return "".join(found.itertext()).strip()
    return None


def _feed(root: Any) -> abc.Document:
    channel = root.find("{*}channel")
    head = root if channel is None else channel
    title = _child(head, "title")
    author = _child(head, "author", "managingEditor", "{http://purl.org/dc/elements/1.1/}creator")
    parts = [f"# {one_line(title)}"] if title else []
    about = _child(head, "description", "subtitle")
    parts.extend([_markdown(about)] if about else [])
    texts = [f"{{*}}{name}" for name in _TEXTS]
    for entry in root.iter("{*}item", "{*}entry"):
        if next(entry.iterancestors(*texts), None) is not None:  # read with that text
            continue
        parts.append(f"## {one_line(_child(entry, 'title') or 'Untitled')}")
        parts.extend(text for text in (_child(entry, "pubDate", "published", "updated", "date"),) if text)
        parts.extend(dict.fromkeys(filter(None, map(_text, _outermost(entry)))))
    return document("rss", [("\n\n".join(parts), {})], metadata(title=title, author=author))


def _outermost(element: Any) -> Iterator[Any]:
    """The elements of an entry that hold its text, but for those within others; what is short comes first."""
    found = []
    waiting = list(reversed(element))
    while waiting:
        child = waiting.pop()
        if _local(child) in _TEXTS:
            found.append(child)
        elif _local(child) not in ("item", "entry"):  # which has its own text
            waiting.extend(reversed(child))
    yield from sorted(found, key=lambda one: _local(one) in ("content", "encoded", "body"))


def _text(element: Any) -> str:
    kind = element.get("type", "html")
    if kind == "xhtml":
        from lxml import etree  # type: ignore[import-untyped]

        return _markdown(etree.tostring(element, encoding="unicode", with_tail=False))
    text = "".join(element.itertext()).strip()
    return text if kind == "text" else _markdown(text)


def _markdown(text: str) -> str:
    # A heading inside an entry stands below the entry's own.
    return re.sub(r"^(#{1,4}) ", r"##\1 ", html_to_markdown(text).strip(), flags=re.MULTILINE)


def _texts(root: Any) -> Iterator[str]:
    """The text of each element that has some of its own, inline markup included; of data its attributes, too."""
    waiting = [root]
    is_data = _is_data(root)
    while waiting:
        element = waiting.pop()
        if is_data:
            yield one_line(", ".join(f"{key}: {value}" for key, value in _attributes(element)))
        if _is_mixed(element):
            for one in element.iterdescendants("*"):
                following = one.getnext()
                is_beside = not one.tail and following is not None
                if _local(one) in _BREAKS or (is_beside and (following.tag == one.tag or _are_numbers(one, following))):
                    one.tail = f" {one.tail or ''}"
            yield one_line("".join(element.itertext()))
        else:
            waiting.extend(child for child in reversed(element) if isinstance(child.tag, str))


def _is_mixed(element: Any) -> bool:
    return bool((element.text or "").strip()) or any((child.tail or "").strip() for child in element)


def _attributes(element: Any) -> Iterator[tuple[str, str]]:
    return ((key, value) for key, value in element.items() if not key.startswith("{") and value.strip())


def _are_numbers(one: Any, following: Any) -> bool:
    return not len(one) and (one.text or "")[-1:].isdigit() and (following.text or "")[:1].isdigit()


def _is_data(root: Any) -> bool:
    """Whether attributes are what the document says: records, or more of its text is in them than in elements. Numbers
    and names, as those of drawings, do not count there."""
    if _has_records(root):
        return True
    values = (value for element in root.iter("*") for _, value in _attributes(element) if _WORDS.search(value))
    return sum(map(len, values)) > sum(len(text.strip()) for text in root.itertext())


def _has_records(root: Any) -> bool:
    """Whether neighbours of the same name have the same two attributes, without text around elements."""
    is_found = False
    for element in root.iter("*"):
        if element.tag.startswith(_DRAWING) or (len(element) and _is_mixed(element)):
            return False
        following = element.getnext()
        if not is_found and following is not None and following.tag == element.tag:
            is_found = len(dict(_attributes(element)).keys() & dict(_attributes(following)).keys()) > 1
    return is_found
