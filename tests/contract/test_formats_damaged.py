"""Real documents cut off and with flipped bits: a document or a DocumentError, nothing else, within a time bound."""

from __future__ import annotations

import random
import re
import time
import warnings
from pathlib import Path

import pytest

from ml_rag.abc import Document
from ml_rag.errors import DocumentError
from ml_rag.ingest.parse import parse
from support.shared_data import SHARED

DOCS = SHARED / "formats" / "docs"
#: seconds of a processor that a damaged document may take; whole ones take less than half a second
BOUND = 10.0

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not DOCS.is_dir(), reason="the public evaluation data is not beside the checkout"),
]


def outcome(name: str, content: bytes) -> Document | DocumentError:
    started = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries remark on damage; nobody reads that in the server
            document = parse(name, content)
    except DocumentError as refused:
        return refused
    finally:
        assert time.process_time() - started < BOUND
    assert document.blocks
    assert all("\0" not in block.text and block.text.encode() for block in document.blocks)
    return document


@pytest.mark.fuzz
@pytest.mark.parametrize("path", sorted(DOCS.glob("*")), ids=lambda path: path.name)
def test_damage_ends_in_a_document_or_a_document_error(path: Path) -> None:
    content = path.read_bytes()
    results = []
    chance = random.Random(path.name)
    for part in (0.02, 0.5, 0.95):
        results.append(outcome(path.name, content[: int(len(content) * part)]))
    for flips in (1, 8, 64, 512):
        damaged = bytearray(content)
        for _ in range(flips):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        results.append(outcome(path.name, bytes(damaged)))
    for result in results:
        if isinstance(result, DocumentError):
            assert re.fullmatch(r"[a-z].*[^.]", result.message)
            assert result.detail


@pytest.mark.parametrize("ending", ["docx", "pptx", "xlsx", "odt", "odp", "epub", "xls", "msg"])
def test_half_an_office_document_is_said_to_be_damaged(ending: str) -> None:
    paths = list(DOCS.glob(f"*.{ending}"))
    assert paths
    for path in paths:
        content = path.read_bytes()
        result = outcome(path.name, content[: len(content) // 2])
        assert isinstance(result, DocumentError)
        assert "damaged" in f"{result.message} {result.hint}"


@pytest.mark.fuzz
def test_no_document_passes_for_another_by_its_name() -> None:
    known = {".pdf", ".docx", ".pptx", ".xlsx", ".xls", ".html", ".rtf"}
    seen = set()
    for path in sorted(DOCS.glob("*")):
        whole = outcome(path.name, path.read_bytes())
        if isinstance(whole, Document) and path.suffix in known:
            seen.add(path.suffix)
            for wrong in ("a.txt", "a.pdf", "a.md", "a.csv", "a.zip"):
                renamed = outcome(wrong, path.read_bytes())
                assert renamed == whole, (path.name, wrong)
    assert seen == known
