"""``make eval`` of tables in PDFs: the rows that stand in one line of a Markdown table, and what a page takes."""

from __future__ import annotations

import json
import re
import time
import unicodedata
from pathlib import Path

import pypdfium2 as pdfium  # type: ignore[import-untyped]

from ml_rag.ingest.parse import parse


def rows(path: Path) -> tuple[int, int, int]:
    """Rows of NAME.rows.json found in NAME.pdf, whose cells stand in one line of a table in their order; those each
    of whose cells the text of the file has at all; and all.

    White space does not count: where lines of Chinese, Japanese or Korean are joined, who made the rows put some.
    """
    content = path.read_bytes()
    blocks = parse(path.name, content).blocks
    lines = [_plain(line) for block in blocks for line in block.text.splitlines() if line.startswith("|")]
    with pdfium.PdfDocument(content) as pdf:
        text = _plain("".join(page.get_textpage().get_text_range() for page in pdf))
    asked = [[_plain(cell) for cell in row] for row in json.loads(path.with_suffix(".rows.json").read_text())]
    patterns = [re.compile(".*".join(map(re.escape, row))) for row in asked]
    there = sum(all(cell in text for cell in row) for row in asked)
    return sum(any(map(pattern.search, lines)) for pattern in patterns), there, len(asked)


def _plain(text: str) -> str:
    # the last two are how pdfium marks a hyphen at the end of a line
    return re.sub("[\\s\x02\ufffe]", "", unicodedata.normalize("NFC", text))


def measure(folder: Path) -> tuple[int, int, int, float]:
    """Of the PDFs in a folder: what ``rows`` says of all of them, and milliseconds of processor time a page."""
    found = there = all_rows = pages = 0
    seconds = 0.0
    for path in sorted(folder.glob("*.pdf")):
        some, given, several = rows(path)
        found, there, all_rows = found + some, there + given, all_rows + several
        content = path.read_bytes()
        with pdfium.PdfDocument(content) as pdf:
            pages += len(pdf)
        taken = []
        for _ in range(5):
            began = time.process_time()
            parse(path.name, content)
            taken.append(time.process_time() - began)
        seconds += min(taken)
    return found, there, all_rows, 1000 * seconds / max(pages, 1)
