"""What an answer cites, by document: numbered, named, with the address that a chat client opens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any
from urllib.parse import quote

#: how citations reach the user: annotations, and in the text what has no address; only annotations; all in the text
STYLES = ("auto", "annotations", "text")

#: characters of a document's title, and of its name: those of a row can be of any length
TITLE, NAME = 200, 4000

#: of a marker: there are at most 100 citations, and one without end would be gone through again with each piece of it
_NUMBERS = r"\d{1,3}(?:, ?\d{1,3}){0,99}"
_MARKER = re.compile(rf"\[({_NUMBERS})\]")
#: the end of a text that may be the beginning of a marker
BEGUN = re.compile(rf"\[(?:{_NUMBERS}(?:, ?)?)?\Z")
_IS_ADDRESS = re.compile(r"https?://", re.IGNORECASE)
#: ends a line, or begins a link or an element of a page, also in Markdown
_NOT_SHOWN = str.maketrans("[]<>`", "()()'")
#: the same, and what ends an address
_NOT_OF_ADDRESSES = re.compile(r"[\s\[\]<>`\"\\]")
_HEADING = "\n\nSources:\n"
_LISTED = re.compile(re.escape(_HEADING) + r"(?:- \[\d+\] [^\n]*(?:\n|\Z))+\Z")


@dataclass(frozen=True)
class Source:
    """A document that an answer cites."""

    number: int
    #: what it is called by its name
    title: str
    url: str | None
    pages: Sequence[int] = ()
    #: what it calls itself
    document_title: str | None = None

    @property
    def label(self) -> str:
        """Its title, with its name unless that is its address, and the pages cited."""
        named = self.title
        if self.document_title is not None:
            named = self.document_title if self.url == self.title else f"{self.document_title} ({self.title})"
        pages = f", page{'s' * (len(self.pages) > 1)} {', '.join(map(str, self.pages))}" if self.pages else ""
        return named + pages

    @property
    def line(self) -> str:
        """Of the list under an answer."""
        is_told = self.url is None or (self.url == self.title and self.document_title is None)
        return f"- [{self.number}] {self.label if is_told else f'{self.label}: {self.url}'}"


def titles(names: Sequence[str]) -> dict[str, str]:
    """What documents are called: the last part of their names, with as many folders as tell them apart."""
    parts = {name: re.split(r"[/\\]", name.rstrip("/\\"))[::-1] for name in names}
    counts = dict.fromkeys(parts, 1)
    # the one that shares most folders with a name is beside it
    for name, other in pairwise(sorted(parts, key=parts.__getitem__)):
        pairs = zip(parts[name], parts[other], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        for one in (name, other):
            counts[one] = max(counts[one], shared + 1)
    made: dict[str, str] = {}
    for name, count in counts.items():
        title = name if _IS_ADDRESS.match(name) else "/".join(parts[name][:count][::-1])
        made[name] = _shown(title) or "document"
    return made


def _shown(text: str) -> str:
    """On one line, without what could become a link or an element."""
    return " ".join(text.translate(_NOT_SHOWN).split())


def _address(name: str, form: str | None) -> str | None:
    if _IS_ADDRESS.match(name):
        return _NOT_OF_ADDRESSES.sub(lambda found: quote(found[0]), name)
    if form is None or not name:
        return None
    last = re.split(r"[/\\]", name)[-1]
    return form.replace("{document_name}", quote(name.lstrip("/"))).replace("{file_name}", quote(last))


def sources(citations: Sequence[Mapping[str, Any]], form: str | None) -> tuple[list[Source], list[int]]:
    """The documents of citations, those with an address first, and the number of each citation's.

    ``form``: the setting document_url.
    """
    names = [(citation.get("document_name") or "")[:NAME] for citation in citations]
    called = titles(names)
    addresses = {name: _address(name, form) for name in called}
    ordered = sorted(called, key=lambda name: addresses[name] is None)
    pages: dict[str, set[int]] = {name: set() for name in called}
    own: dict[str, str | None] = dict.fromkeys(called)
    for name, citation in zip(names, citations, strict=True):
        if type(page := citation.get("page")) is int:
            pages[name].add(page)
        if isinstance(title := citation.get("title"), str) and own[name] is None:
            own[name] = _shown(title[:TITLE]) or None
    found = [
        Source(n, called[name], addresses[name], sorted(pages[name]), own[name]) for n, name in enumerate(ordered, 1)
    ]
    return found, [ordered.index(name) + 1 for name in names]


def renumbered(text: str, numbers: Sequence[int]) -> str:
    """The text, whose markers then refer to documents. A marker that refers to no citation stays."""

    def document(marker: re.Match[str]) -> str:
        cited = [int(number) for number in marker[1].split(",")]
        if not all(1 <= number <= len(numbers) for number in cited):
            return marker[0]
        return f"[{', '.join(str(number) for number in dict.fromkeys(numbers[n - 1] for n in cited))}]"

    return _MARKER.sub(document, text)


def grounded(
    grounding: Mapping[str, Any], answer: str, numbers: Sequence[int], markers: Sequence[int]
) -> dict[str, Any]:
    """The check of an answer by its citations, with the places of its claims in ``renumbered(answer, markers)``.

    ``numbers``: of each citation's document; each claim has ``sources``, those that support it. Claims about another
    text, which the answer was before it became an abstention, are left out with what they cite.
    """
    claims = grounding.get("claims") or []
    if not all(answer[claim["start_pos"] : claim["end_pos"]] == claim["claim_text"] for claim in claims):
        return {"support_score": grounding["support_score"]}
    chunks = [numbers[chunk["source"]] for chunk in grounding["cited_chunks"]]
    made, text, read = [], "", 0
    for claim in claims:
        start, end = claim["start_pos"], claim["end_pos"]
        text += renumbered(answer[read:start], markers)
        said, read = renumbered(answer[start:end], markers), end
        place = {"start_pos": len(text), "end_pos": len(text) + len(said), "claim_text": said}
        made.append({**claim, **place, "sources": list(dict.fromkeys(chunks[n] for n in claim["citation_indices"]))})
        text += said
    return {**grounding, **({"claims": made} if "claims" in grounding else {})}


def url_citations(
    text: str, found: Sequence[Source], claims: Sequence[Mapping[str, Any]] = (), *, has_markers: bool = True
) -> list[dict[str, Any]]:
    """Where a text refers to each document with an address, as OpenAI has them in responses.

    That is its first marker, else the first claim that it supports, else the end.
    """
    places: dict[int, tuple[int, int]] = {}
    for marker in _MARKER.finditer(text) if has_markers else ():
        for number in marker[1].split(","):
            places.setdefault(int(number), marker.span())
    for claim in claims:
        for number in claim["sources"]:
            places.setdefault(number, (claim["start_pos"], claim["end_pos"]))
    made = []
    for source in found:
        if source.url is not None:
            start, end = places.get(source.number, (len(text), len(text)))
            place = {"start_index": start, "end_index": end}
            made.append({"type": "url_citation", **place, "url": source.url, "title": source.label})
    return made


def listed(found: Sequence[Source], style: str) -> str:
    """What is written under an answer."""
    lines = [source.line for source in found if style == "text" or (style == "auto" and source.url is None)]
    return _HEADING + "\n".join(lines) if lines else ""


def without_list(text: str) -> str:
    """An answer as the model wrote it, where it comes back as a part of the history."""
    return _LISTED.sub("", text)
