"""The batch routines in tests: a table of texts, and calls."""

from __future__ import annotations

import json
from typing import Any

from support.cluster import Connection, value_of
from support.stores import create_store, fake_embedding

ROUTINES = ["ml_rag_table", "ml_generate_table", "ml_embed_table"]


def call(connection: Connection, routine: str, source: str, target: str, options: Any = None) -> dict[str, Any]:
    statement = f"CALL {routine}(%s, %s, %s)"
    result: dict[str, Any] = value_of(
        connection, statement, (source, target, None if options is None else json.dumps(options))
    )
    return result


def make_texts(owner: Connection) -> Connection:
    """Five texts, a null and a blank among them, and a store that has the others."""
    owner.execute("CREATE TABLE texts (id integer PRIMARY KEY, q text)")
    owner.execute("INSERT INTO texts VALUES (1, 'one two'), (2, NULL), (3, 'three'), (4, '  '), (5, 'five six')")
    rows = [("d", 1, i, t, fake_embedding(t)) for i, t in enumerate(["one two", "three", "five six"])]
    create_store(owner, "store", rows, type="vector(16)")
    return owner


def column(connection: Connection, query: str) -> list[Any]:
    return [row[0] for row in connection.execute(query).fetchall()]
