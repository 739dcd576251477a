"""Stores with several embeddings: their columns, vectors and comments; import the fixture by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import sql

from support.cluster import Connection, value_of
from support.models_server import ModelsServer, embedding
from support.stores import create_store, fake_embedding, ident

TEXTS = ["red house", "green tree", "blue sea", "old stone wall", "white snow", "black cat", "brown dog"]
INSERT = (
    "INSERT INTO docs (document_name, metadata, document_id, segment_number, segment) VALUES ('d', '{}', %s, 1, %s)"
)


def rows(texts: list[str], first: int = 1) -> list[Any]:
    return [(f"d{i}", i, 1, text, fake_embedding(text)) for i, text in enumerate(texts, first)]


@pytest.fixture
def store(owner: Connection, models: ModelsServer) -> Connection:
    """The owner's connection; the store docs, of fake-embed."""
    create_store(owner, rows=rows(TEXTS), type="vector(16)")
    owner.execute("ALTER TABLE docs ALTER segment_embedding SET NOT NULL")
    owner.execute("SELECT ml_rag.index_store('docs')")
    return owner


def add(
    connection: Connection, name: str | None = "more", model: str | None = "narrow", store: str = "docs", **options: Any
) -> dict[str, Any]:
    """``ml_rag.add_embedding``'s result."""
    if model is not None:
        options["embed_model_id"] = model
    statement = "CALL ml_rag.add_embedding(%s, %s, %s)"
    result: dict[str, Any] = value_of(connection, statement, (store, name, json.dumps(options)))
    return result


def use(connection: Connection, name: str, store: str = "docs") -> str:
    """``ml_rag.use_embedding``: the name of the former default."""
    former: str = value_of(connection, "SELECT ml_rag.use_embedding(%s, %s)", (store, name))
    return former


def drop(connection: Connection, name: str, store: str = "docs") -> None:
    connection.execute("SELECT ml_rag.drop_embedding(%s, %s)", (store, name))


def listed(connection: Connection, store: str = "docs") -> dict[str, dict[str, Any]]:
    """``ml_rag.embeddings``, by name."""
    cursor = connection.execute("SELECT * FROM ml_rag.embeddings(%s)", (store,))
    assert cursor.description is not None
    columns = [column.name for column in cursor.description]
    return {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in cursor}


def default(connection: Connection, store: str = "docs") -> str:
    (name,) = [name for name, one in listed(connection, store).items() if one["is_default"]]
    return name


def vectors(connection: Connection, store: str = "docs", column: str = "segment_embedding") -> dict[str, Any]:
    statement = sql.SQL("SELECT segment, {}::real[] FROM {}").format(sql.Identifier(column), ident(store))
    return dict(connection.execute(statement).fetchall())


def assert_embedded(
    connection: Connection, model: str = "narrow", store: str = "docs", column: str = "segment_embedding_more"
) -> None:
    """That every row holds the model's embedding of the text it has."""
    found = vectors(connection, store, column)
    assert found
    for text, vector in found.items():
        assert vector == pytest.approx(embedding(text, model), abs=1e-6), text


def columns(connection: Connection, store: str = "docs") -> list[str]:
    statement = (
        "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
        " ORDER BY attnum"
    )
    return [name for (name,) in connection.execute(statement, (store,))]


def comment_on(connection: Connection, store: str = "docs", column: str = "segment_embedding") -> str | None:
    comment: str | None = value_of(
        connection,
        "SELECT col_description(attrelid, attnum) FROM pg_attribute WHERE attrelid = %s::regclass AND attname = %s",
        (store, column),
    )
    return comment


def triggers(connection: Connection, store: str = "docs") -> list[str]:
    statement = "SELECT tgname FROM pg_trigger WHERE tgrelid = %s::regclass AND NOT tgisinternal ORDER BY 1"
    return [name for (name,) in connection.execute(statement, (store,))]


def definition(connection: Connection, store: str = "docs") -> Any:
    """All that the catalog says about a table's columns but the dimensions of its embeddings."""
    return connection.execute(
        "SELECT attname, atttypid::regtype::text, attnotnull, attstorage, attacl::text,"
        " (SELECT array_agg(conname ORDER BY 1) FROM pg_constraint WHERE conrelid = attrelid AND contype <> 'n')"
        " FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attname",
        (store,),
    ).fetchall()
