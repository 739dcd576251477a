"""Stores to search, small ones to compare with brute force and large ones with an index, and the plans of searches."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import psycopg

from support.cluster import Connection, value_of
from support.reference import Segment
from support.stores import create_store, grant, mark, search

#: what CREATE INDEX … USING makes: both kinds of approximate index, for the cosine distance
INDEXES = [
    "hnsw (segment_embedding vector_cosine_ops)",
    "ivfflat (segment_embedding vector_cosine_ops) WITH (lists = 50)",
]


def hits(connection: Connection, query: str, **options: Any) -> list[tuple[str, float, float | None, float | None]]:
    """document_name, distance, keyword_score, score"""
    rows = search(connection, query, options)
    return [(row[2], None if row[6] is None else float(row[6]), row[8], row[9]) for row in rows]  # type: ignore[misc]


def random_segments(
    generator: random.Random, stores: Sequence[str], count: int, dimensions: int = 3, largest: int = 2
) -> list[Segment]:
    """Small whole numbers as vectors, so that many distances are equal; gaps, nulls and zero vectors among them."""
    segments = []
    for store in stores:
        for document in range(max(1, count // 8)):
            # documents of one name exist: their ids tell them apart
            name = f"doc {generator.randrange(max(1, count // 10))}"
            number = generator.randrange(-3, 4)
            for _ in range(8):
                embedding: tuple[float, ...] | None = tuple(
                    generator.randint(-largest, largest) for _ in range(dimensions)
                )
                if generator.random() < 0.05:
                    embedding = None
                text = None if generator.random() < 0.05 else f"{store} {document} {number}"
                segments.append(Segment(store, name, document, number, text, embedding))
                number += generator.choice((1, 1, 1, 2, 5))
    return segments


def load(owner: Connection, segments: Sequence[Segment], type: str = "vector(3)") -> None:
    """Make the stores of these segments."""
    for store in sorted({s.vector_store for s in segments}):
        rows = [
            (s.document_name or "", s.document, s.number or 0, s.text, s.embedding)
            for s in segments
            if s.vector_store == store
        ]
        create_store(owner, store, rows, type=type)


def create_partitioned(owner: Connection) -> None:
    """Store `docs` of two partitions, without rows."""
    create_store(owner, suffix=" PARTITION BY RANGE (document_id)")
    owner.execute(
        "CREATE TABLE docs_1 PARTITION OF docs FOR VALUES FROM (0) TO (1000);"
        "CREATE TABLE docs_2 PARTITION OF docs FOR VALUES FROM (1000) TO (1000000)"
    )


def create_large_store(owner: Connection, index: str, rows: int = 3000) -> None:
    """Store `docs` with an approximate index; one document of 300 is named rare."""
    create_store(owner)
    owner.execute(
        "INSERT INTO docs SELECT CASE WHEN i %% 300 = 0 THEN 'rare' ELSE 'common' END, '{}', i, 1, 's' || i,"
        " ARRAY[sin(i), cos(i * 1.7), sin(i * 0.3)]::vector FROM generate_series(1, %s) AS i",
        (rows,),
    )
    owner.execute(f"CREATE INDEX docs_embedding ON docs USING {index}; ANALYZE docs")


def plan_of(
    connection: Connection, store: str = "docs", metric: str = "COSINE", options: dict[str, Any] | None = None
) -> str:
    """The plan of a search by meaning of a store, under the settings that ml_rag runs it with."""
    options = {"vector_store": [store], "distance_metric": metric, "n_citations": 10, **(options or {})}
    found = value_of(
        connection, "SELECT ml_rag.statement('q', %s)", (json.dumps({"query_embedding": [1, 0, 0], **options}),)
    )
    settings, statement = found.split("\n", 1)
    with connection.transaction():
        for name, value in re.findall(r"SET (\S+) = ([^;]+);", settings):
            connection.execute(f"SET LOCAL {name} = {value}".encode())
        return "\n".join(r[0] for r in connection.execute(f"EXPLAIN (VERBOSE, COSTS OFF) {statement}".encode()))


def ids(connection: Connection, filters: Any, **options: Any) -> list[int]:
    """The ids of the documents found, in their order; at most 100."""
    options = {"query_embedding": [1, 0, 0], "distance_metric": "EUCLIDEAN", "n_citations": 100, **options}
    try:
        rows = search(connection, "q", {"filters": filters, **options})
    except psycopg.Error as e:
        if e.diag.sqlstate == "P0002":
            return []
        raise
    return sorted(row[3] for row in rows)


def create_rows(owner: Connection, metadata: list[Any], name: str = "docs") -> None:
    """A store with one segment for each of these, numbered from 1."""
    create_store(owner, name)
    insert_rows(owner, metadata, name)


def insert_rows(owner: Connection, metadata: list[Any], name: str = "docs") -> None:
    with owner.cursor() as cursor:
        cursor.executemany(
            f"INSERT INTO {name} VALUES ('d', %s, %s, 1, 's', '[1,0,0]')",
            [(json.dumps(m), i) for i, m in enumerate(metadata, 1)],
        )


#: the columns of the store `typed`: type, value in row 1, value in row 2
TYPED_COLUMNS = {
    "i2": ("smallint", "1", "2"),
    "i4": ("integer", "1", "2"),
    "i8": ("bigint", "1", "9007199254740993"),
    "num": ("numeric(6,2)", "1.50", "2"),
    "f4": ("real", "0.1", "2"),
    "f8": ("double precision", "0.1", "2e300"),
    "txt": ("text", "1", "it's"),
    "vch": ("varchar(10)", "abc", "Bcd"),
    "chr": ("char(5)", "ab", "b"),
    "nam": ("name", "abc", "bcd"),
    "boo": ("boolean", "false", "true"),
    "dat": ("date", "2024-02-29", "2024-10-01"),
    "tim": ("time", "01:00", "23:59:59"),
    "ts": ("timestamp", "2024-02-29 12:00", "2024-10-01"),
    "tz": ("timestamptz", "2024-02-29 12:00+00", "2024-10-01 00:00+02"),
    "ivl": ("interval", "1 hour", "2 days"),
    "uid": ("uuid", "5f0c8bd6-6ba3-4a0a-8d0e-6c1f3a6f1d11", "6f0c8bd6-6ba3-4a0a-8d0e-6c1f3a6f1d11"),
    "ip": ("inet", "10.0.0.1", "10.0.0.2"),
    "net": ("cidr", "10.0.0.0/8", "192.168.0.0/16"),
    "dom": ("short", "abc", "bcd"),
    "doi": ("positive", "1", "2"),
}
ARRAY_COLUMNS = {
    "ai": ("integer[]", "{1,2}", "{2,3}"),
    "at": ("text[]", "{a,b}", "{B,NULL}"),
    "av": ("varchar(3)[]", "{a}", "{c}"),
    "ad": ("date[]", "{2024-01-01}", "{2024-06-01,2025-01-01}"),
}


def create_typed(owner: Connection) -> None:
    """Store `typed`: rows 1 and 2 with values of every type, row 3 with nulls."""
    owner.execute(
        "CREATE DOMAIN short AS text CHECK (length(VALUE) < 9); CREATE DOMAIN positive AS integer CHECK (VALUE > 0);"
        "CREATE TYPE mood AS ENUM ('sad', 'happy', 'ok'); CREATE DOMAIN feeling AS mood;"
        "CREATE TYPE pair AS (a int, b int)"
    )
    everything = {
        **TYPED_COLUMNS,
        **ARRAY_COLUMNS,
        "mood": ("mood", "sad", "happy"),
        "feel": ("feeling", "sad", "happy"),
    }
    everything |= {"pair": ("pair", "(1,2)", "(3,4)"), "xml": ("tsvector", "a", "b"), "js": ("jsonb", '["x",1]', "2")}
    everything |= {"moods": ("mood[]", "{sad}", "{happy}"), "metadata": ("jsonb", '{"k": 1}', '{"i4": 9}')}
    owner.execute(
        "CREATE TABLE typed (document_id integer, "
        + ", ".join(f"{name} {type_}" for name, (type_, _, _) in everything.items())
        + ", segment text, segment_embedding vector(3))"
    )
    for i, at in ((1, 1), (2, 2)):
        values = [v[at] for v in everything.values()]
        owner.execute(f"INSERT INTO typed VALUES (%s, {', '.join(['%s'] * len(values))}, 's', '[1,0,0]')", (i, *values))
    owner.execute("INSERT INTO typed (document_id, segment, segment_embedding) VALUES (3, 's', '[1,0,0]')")
    mark(owner, "typed")
    grant(owner, "typed")
