"""What an answer cites, as annotations of its message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

_MARKER = re.compile(r"\[(\d{1,3}(?:, ?\d{1,3})*)\]")


def cited(text: str, citations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where the text refers to each citation, else at its end: web pages are url_citation, others file_citation."""
    places: dict[int, list[tuple[int, int]]] = {}
    for marker in _MARKER.finditer(text):
        for number in marker[1].split(","):
            places.setdefault(int(number), []).append(marker.span())
    found = []
    for number, citation in enumerate(citations, 1):
        name = citation.get("document_name") or ""
        for start, end in places.get(number, [(len(text), len(text))]):
            place = {"start_index": start, "end_index": end}
            if name.startswith(("https://", "http://")):
                found.append({"type": "url_citation", "url_citation": {**place, "url": name, "title": name}})
            else:
                file = {"file_id": name, "filename": PurePosixPath(name).name, "quote": citation["segment"]}
                found.append({"type": "file_citation", "file_citation": {**place, **file}})
    return found


def annotated(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    return cited(answer["text"] or "", answer.get("citations") or [])
