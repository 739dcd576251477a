"""``make eval`` of tables in PDFs: the rows that stand in one line of a Markdown table, and what a page takes."""

from __future__ import annotations

import json
import re
import time
import unicodedata
from pathlib import Path

import pypdfium2 as pdfium  # type: ignore[import-untyped]

from ml_rag.ingest.parse import parse


def rows(path: Path) -> tuple[int, int]:
    """Rows of NAME.rows.json found in NAME.pdf, whose cells stand in one line of a table in their order; and all.

    White space does not count: where lines of Chinese, Japanese or Korean are joined, who made the rows put some.
    """
    blocks = parse(path.name, path.read_bytes()).blocks
    lines = [_plain(line) for block in blocks for line in block.text.splitlines() if line.startswith("|")]
    asked = json.loads(path.with_suffix(".rows.json").read_text())
    patterns = [re.compile(".*".join(re.escape(_plain(cell)) for cell in row)) for row in asked]
    return sum(any(map(pattern.search, lines)) for pattern in patterns), len(asked)


def _plain(text: str) -> str:
    return re.sub(r"\s", "", unicodedata.normalize("NFC", text))


def measure(folder: Path) -> tuple[int, int, float]:
    """Rows found and all rows of the PDFs in a folder, and milliseconds of processor time a page."""
    found = all_rows = pages = 0
    seconds = 0.0
    for path in sorted(folder.glob("*.pdf")):
        some, several = rows(path)
        found, all_rows = found + some, all_rows + several
        content = path.read_bytes()
        with pdfium.PdfDocument(content) as pdf:
            pages += len(pdf)
        taken = []
        for _ in range(5):
            began = time.process_time()
            parse(path.name, content)
            taken.append(time.process_time() - began)
        seconds += min(taken)
    return found, all_rows, 1000 * seconds / max(pages, 1)
