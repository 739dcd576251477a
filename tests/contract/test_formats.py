"""Real documents of many formats: what a right parse must contain is in the segments, and on the right page."""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ml_rag.abc import Document, Segment
from ml_rag.errors import DocumentError
from ml_rag.ingest.parse import parse
from ml_rag.ingest.split import chunking, split
from ml_rag.ingest.units import Counter
from support.shared_data import SHARED

FORMATS, NORTHWIND = SHARED / "formats", SHARED / "northwind"
MAX_TOKENS = 256
#: names in the manifest of formats that are called otherwise here; a feed is told from other XML
FORMAT_NAMES = {"md": "markdown", "txt": "text", "xml": "rss"}
ENCRYPTED = "pypdf__libreoffice-writer-password.pdf"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not FORMATS.is_dir(), reason="the public evaluation data is not beside the checkout"),
]


@functools.cache
def manifest() -> list[dict[str, Any]]:
    path = FORMATS / "manifest.json"
    return json.loads(path.read_text()) if path.is_file() else []


@functools.cache
def parsed(path: Path) -> Document:
    return parse(path.name, path.read_bytes())


def segments_of(path: Path, options: dict[str, Any] | None = None) -> list[Segment]:
    return split(parsed(path), chunking(options, MAX_TOKENS), Counter())


def letters_and_digits(text: str) -> str:
    return "".join(filter(str.isalnum, text))


READABLE = [entry for entry in manifest() if entry["file"] != ENCRYPTED]


@pytest.mark.parametrize("entry", READABLE, ids=lambda entry: entry["file"])
def test_format_is_found_in_the_content(entry: dict[str, Any]) -> None:
    # the name is no help except between text formats
    text_format = entry["format"] in ("asciidoc", "csv", "md", "txt")
    name = entry["file"] if text_format else "unnamed"
    expected = FORMAT_NAMES.get(entry["format"], entry["format"])
    assert parse(name, (FORMATS / "docs" / entry["file"]).read_bytes()).format == expected


@pytest.mark.parametrize("options", [None, {"segment_tokens": 64, "overlap_tokens": 16}], ids=["default", "short"])
@pytest.mark.parametrize("entry", READABLE, ids=lambda entry: entry["file"])
def test_probe_phrases_are_in_the_segments(entry: dict[str, Any], options: dict[str, int] | None) -> None:
    segments = segments_of(FORMATS / "docs" / entry["file"], options)
    assert segments
    assert max(segment.tokens for segment in segments) <= (options or {}).get("segment_tokens", MAX_TOKENS)
    if options is None:  # repeated words would stand between the halves of a phrase
        text = letters_and_digits("".join(segment.text for segment in segments))
        assert [probe for probe in entry["probes"] if letters_and_digits(probe) not in text] == []


def test_encrypted_document_fails_with_a_hint() -> None:
    with pytest.raises(DocumentError, match="encrypted") as caught:
        segments_of(FORMATS / "docs" / ENCRYPTED)
    assert "password" in (caught.value.hint or "").lower()


@functools.cache
def words_of_pages(file: str) -> dict[int, set[str]]:
    words: dict[int, set[str]] = defaultdict(set)
    for segment in segments_of(NORTHWIND / "pdf" / file):
        words[segment.metadata["page"]] |= set(re.findall(r"[a-z]{4,}", segment.text.lower()))
    return words


@pytest.mark.parametrize("path", sorted((NORTHWIND / "pdf").glob("*.pdf")), ids=lambda path: path.name)
def test_segments_carry_the_page_their_words_are_on(path: Path) -> None:
    pdfium = pytest.importorskip("pypdfium2")
    with pdfium.PdfDocument(path) as pdf:
        for number, page in enumerate(pdf, start=1):
            text = page.get_textpage().get_text_range().lower()
            words = set(re.findall(r"[a-z]{4,}", text))
            pages = words_of_pages(path.name)
            beside = pages[number - 1] | pages[number + 1] if len(words) <= 6 else set()
            missing = words - pages[number] - beside  # a page of a few words stands with a neighbour
            # words divided at the end of a line are mended in the segments
            assert len(missing) <= 0.05 * len(words), (number, sorted(missing))


def test_cited_pages_hold_more_of_the_answer_than_the_average_page() -> None:
    better = cited = 0
    for line in (NORTHWIND / "questions.jsonl").read_text().splitlines():
        question = json.loads(line)
        answer = set(re.findall(r"[a-z]{4,}", " ".join(question["answers"]).lower()))
        for citation in question["citations"]:
            pages = words_of_pages(citation["file"])
            found = {page: len(answer & words) for page, words in pages.items()}
            cited += 1
            better += found.get(citation["page"], 0) > sum(found.values()) / len(found)
    assert cited > 50
    assert better >= 0.9 * cited
