"""Ordinary tables with a vectorizer; import the fixture by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.cluster import Connection, value_of
from support.models_server import ModelsServer, embedding

ITEMS = "CREATE TABLE items (id integer PRIMARY KEY, name text, notes text, price numeric)"
COLUMNS = "{name}: {notes}"


@pytest.fixture
def items(owner: Connection, models: ModelsServer) -> Connection:
    """The owner's connection; the table items with three rows, and a vectorizer that has run."""
    owner.execute(ITEMS)
    owner.execute(
        "INSERT INTO items VALUES (1, 'lamp', 'of red glass', 5), (2, 'tent', 'for two', 50), (3, 'rope', NULL, 7)"
    )
    create(owner)
    assert run(owner)["embedded"] == 3
    models.requests.clear()
    return owner


def create(connection: Connection, relation: str = "items", columns: Any = COLUMNS, **options: Any) -> None:
    connection.execute(
        "SELECT ml_rag.create_vectorizer(%s, %s)", (relation, json.dumps({"columns": columns, **options}))
    )


def run(connection: Connection, relation: str = "items", **options: Any) -> dict[str, Any]:
    """``ml_rag.run_vectorizer``'s result."""
    result: dict[str, Any] = value_of(connection, "CALL ml_rag.run_vectorizer(%s, %s)", (relation, json.dumps(options)))
    return result


def pending(connection: Connection, relation: str = "items") -> int:
    n: int = value_of(connection, "SELECT pending FROM ml_rag.vectorizer WHERE relation = %s::regclass", (relation,))
    return n


def failures(connection: Connection) -> list[Any]:
    return connection.execute(
        "SELECT key, attempts, sqlstate, message, next_attempt = 'infinity' FROM ml_rag.vectorizer_error ORDER BY key"
    ).fetchall()


def assert_in_step(connection: Connection, relation: str = "items", model: str = "fake-embed") -> None:
    """Each row holds the embedding of its text, or has failed; nothing waits, no failure is of a row that is gone."""
    rows = connection.execute(f"SELECT segment, segment_embedding::real[] FROM {relation}").fetchall()
    for text, vector in rows:
        if vector is not None:
            assert vector == pytest.approx(embedding(text, model), abs=1e-6), text
    assert pending(connection, relation) == 0
    assert sum(vector is None for _, vector in rows) == len(failures(connection))
    indexed = connection.execute(
        "SELECT count(DISTINCT r.key), count(*) FROM ml_rag_internal.keyword_row AS r WHERE r.store = %s::regclass",
        (relation,),
    ).fetchone()
    has_index = "SELECT FROM ml_rag_internal.keyword_store WHERE store = %s::regclass"
    if connection.execute(has_index, (relation,)).fetchall():
        n = sum(text is not None for text, _ in rows)
        assert indexed == (n, n)


def assert_segments_in_step(connection: Connection, relation: str, key: str = "id") -> None:
    """The same where the destination is a table of segments, which are paragraphs."""
    rows = dict(connection.execute(f"SELECT {key}::text, segment FROM {relation}").fetchall())
    found: dict[str, list[tuple[str, Any]]] = {of: [] for of in rows}
    for of, number, text, vector in connection.execute(
        "SELECT source_id::text, segment_number, segment, segment_embedding::real[]"
        f" FROM {relation}_segments ORDER BY 1, 2"
    ):
        assert number == len(found[of]) + 1
        found[of].append((text, vector))
    failed = {failure[0].strip("{}") for failure in failures(connection)}
    assert failed <= rows.keys()
    for of, text in rows.items():
        if of in failed:
            assert found[of] == [(text, None)]
            continue
        assert [piece for piece, _ in found[of]] == [piece for piece in text.split("\n\n") if piece.strip()]
        for piece, vector in found[of]:
            assert vector == pytest.approx(embedding(piece, "fake-embed"), abs=1e-6)
    assert pending(connection, relation) == 0
    indexed = "SELECT count(DISTINCT key), count(*) FROM ml_rag_internal.keyword_row WHERE store = %s::regclass"
    n = sum(text is not None for pieces in found.values() for text, _ in pieces)
    assert connection.execute(indexed, (f"{relation}_segments",)).fetchone() == (n, n)
