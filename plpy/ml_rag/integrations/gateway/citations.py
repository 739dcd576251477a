"""What an answer cites, by document: numbered, named, with the address that a chat client opens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

#: how citations reach the user: annotations, and in the text what has no address; only annotations; all in the text
STYLES = ("auto", "annotations", "text")

_MARKER = re.compile(r"\[(\d{1,3}(?:, ?\d{1,3})*)\]")
_IS_ADDRESS = re.compile(r"https?://", re.IGNORECASE)
#: ends a line, or begins a link or an element of a page, also in Markdown
_NOT_SHOWN = str.maketrans("[]<>`", "()()'")
_HEADING = "\n\nSources:\n"
_LISTED = re.compile(re.escape(_HEADING) + r"(?:- \[\d+\] [^\n]*(?:\n|\Z))+\Z")


@dataclass(frozen=True)
class Source:
    """A document that an answer cites."""

    number: int
    title: str
    url: str | None

    @property
    def line(self) -> str:
        """Of the list under an answer."""
        named = self.title if self.url in (None, self.title) else f"{self.title}: {self.url}"
        return f"- [{self.number}] {named}"


def titles(names: Sequence[str]) -> dict[str, str]:
    """What documents are called: the last part of their names, with as many folders as tell them apart."""
    made: dict[str, str] = {}
    for name in dict.fromkeys(names):
        parts = re.split(r"[/\\]", name.rstrip("/\\"))
        others = [re.split(r"[/\\]", other.rstrip("/\\")) for other in names if other != name]
        count = 1
        while count < len(parts) and any(other[-count:] == parts[-count:] for other in others):
            count += 1
        title = name if _IS_ADDRESS.match(name) else "/".join(parts[-count:])
        made[name] = " ".join(title.translate(_NOT_SHOWN).split()) or "document"
    return made


def _address(name: str, form: str | None) -> str | None:
    if _IS_ADDRESS.match(name):
        return name
    if form is None or not name:
        return None
    last = re.split(r"[/\\]", name)[-1]
    return form.replace("{document_name}", quote(name.lstrip("/"))).replace("{file_name}", quote(last))


def sources(citations: Sequence[Mapping[str, Any]], form: str | None) -> tuple[list[Source], list[int]]:
    """The documents of citations, those with an address first, and the number of each citation's.

    ``form``: the setting document_url.
    """
    names = [citation.get("document_name") or "" for citation in citations]
    called = titles(names)
    addresses = {name: _address(name, form) for name in called}
    ordered = sorted(called, key=lambda name: addresses[name] is None)
    found = [Source(number, called[name], addresses[name]) for number, name in enumerate(ordered, 1)]
    return found, [ordered.index(name) + 1 for name in names]


def renumbered(text: str, numbers: Sequence[int]) -> str:
    """The text, whose markers then refer to documents. A marker that refers to no citation stays."""

    def document(marker: re.Match[str]) -> str:
        cited = [int(number) for number in marker[1].split(",")]
        if not all(1 <= number <= len(numbers) for number in cited):
            return marker[0]
        return f"[{', '.join(str(number) for number in dict.fromkeys(numbers[n - 1] for n in cited))}]"

    return _MARKER.sub(document, text)


def url_citations(text: str, found: Sequence[Source]) -> list[dict[str, Any]]:
    """Where a text refers first to each document with an address, else its end, as OpenAI has them in responses."""
    places: dict[int, tuple[int, int]] = {}
    for marker in _MARKER.finditer(text):
        for number in marker[1].split(","):
            places.setdefault(int(number), marker.span())
    made = []
    for source in found:
        if source.url is not None:
            start, end = places.get(source.number, (len(text), len(text)))
            place = {"start_index": start, "end_index": end}
            made.append({"type": "url_citation", **place, "url": source.url, "title": source.title})
    return made


def listed(found: Sequence[Source], style: str) -> str:
    """What is written under an answer."""
    lines = [source.line for source in found if style == "text" or (style == "auto" and source.url is None)]
    return _HEADING + "\n".join(lines) if lines else ""


def without_list(text: str) -> str:
    """An answer as the model wrote it, where it comes back as a part of the history."""
    return _LISTED.sub("", text)
