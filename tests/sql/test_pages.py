"""Pages whose examples are of one database: each example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.cluster import Connection
from support.stores import create_store, fake_embedding

DOCS = Path(__file__).resolve().parents[2] / "docs"
SETUP = """
CREATE SCHEMA docs;
CREATE ROLE exporter;
CREATE TABLE products (id integer PRIMARY KEY, code text, description text);
INSERT INTO products VALUES (1, 'AX-4411', 'A valve for AX-4411 pumps.');
ALTER TABLE products ADD segment_embedding vector(16);
"""
METADATA = '{"author": "A", "year": 2003, "tags": ["hr"]}'


def examples(page: str) -> list[str]:
    found = re.findall(r"^( *)```sql\n(.*?)^\1```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [example for _, example in found]


@pytest.mark.parametrize("page", ["search.md", "keyword.md", "monitoring.md"])
def test_every_example_runs(owner: Connection, page: str) -> None:
    owner.execute(SETUP)
    rows = [
        (name, i, 1, text, fake_embedding(text))
        for i, (name, text) in enumerate({
            "monitoring.html": "How do I load documents? error 0x80070057 what plan costs $45.00?",
            "leave": "How many days of leave do I have, do I get?", "badge": "How do I reset my badge?",
        }.items())
    ]  # fmt: skip
    for name in ("docs.handbook", "handbook"):
        create_store(owner, name, rows, "vector(16)")
        owner.execute("SELECT ml_rag.enable_keyword_search(%s)", (name,))
        owner.execute(
            f"UPDATE {name} SET metadata = %s, segment = segment || ' office' WHERE document_id = 2", (METADATA,)
        )  # type: ignore[arg-type]
    found = examples(page)
    assert found
    try:
        for example in found:
            owner.execute(example)
    finally:
        owner.execute("DROP ROLE exporter")


def test_sizes_of_stores_and_of_their_keyword_indexes(owner: Connection) -> None:
    create_store(owner, "handbook", [("leave", 1, 1, "days of leave", fake_embedding("leave"))], "vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('handbook')")
    stores, indexes, extensions = examples("operations.md")[0].strip().split("\n")
    assert [name for name, _ in owner.execute(stores).fetchall()] == ["public.handbook"]
    assert len(owner.execute(indexes).fetchall()) == 1
    assert {name for name, *_ in owner.execute(extensions).fetchall()} == {"ml_rag", "vector"}
