"""Indexes of a store, kind by kind: recall@10 against exact search, size, time to build, milliseconds of a search.

``python -m bench.index DSN`` prints the table of docs/embeddings.md. It needs a server with the extension, no model:
vectors are made up, directions around 200 centres (seeded), so that neighbours exist as they do in real data.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator

import numpy as np
import psycopg
from psycopg.types.json import Jsonb

TABLES = (("bench_index_384", 100_000, 384, 316), ("bench_index_1024", 20_000, 1024, 141))
QUESTIONS = 50


def kinds(lists: int) -> Iterator[dict[str, object]]:
    """Values of option index; ``lists``: the square root of the rows."""
    for quantization in ("none", "halfvec", "binary"):
        yield {"type": "hnsw", "quantization": quantization}
    for quantization in ("none", "halfvec", "binary"):
        yield {"type": "ivfflat", "lists": lists, "quantization": quantization}


def vectors(rows: int, dimensions: int, seed: int) -> Iterator[str]:
    """In pgvector's text form."""
    centres = np.random.default_rng(7).normal(size=(200, dimensions))
    source = np.random.default_rng(seed)
    for _ in range(rows):
        vector = centres[source.integers(200)] + source.normal(size=dimensions)
        yield "[" + ",".join(f"{x:.6f}" for x in vector / np.linalg.norm(vector)) + "]"


def make(connection: psycopg.Connection, table: str, rows: int, dimensions: int) -> None:
    """A store without an index."""
    connection.execute(f"DROP TABLE IF EXISTS {table}")
    connection.execute(
        f"CREATE TABLE {table} (document_name text, document_id bigint, segment_number integer, segment text,"
        f" segment_embedding vector({dimensions}))"
    )
    columns = "document_name, document_id, segment_number, segment, segment_embedding"
    with connection.cursor().copy(f"COPY {table} ({columns}) FROM STDIN") as copy:
        for i, vector in enumerate(vectors(rows, dimensions, 8)):
            copy.write_row((f"document {i}", i, 1, f"segment {i}", vector))
    connection.execute(f"COMMENT ON COLUMN {table}.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=none'")
    connection.execute(f"VACUUM ANALYZE {table}")


def searched(connection: psycopg.Connection, table: str, vector: str, exact: bool) -> tuple[set[int], float]:
    """The ten nearest, and how many milliseconds it took."""
    options = {"vector_store": [f"public.{table}"], "query_embedding": vector, "n_citations": 10}
    began = time.perf_counter()
    rows = connection.execute(
        "SELECT document_id FROM ml_rag_search('q', %s)", (Jsonb({**options, "index_options": {"exact": exact}}),)
    ).fetchall()
    return {row[0] for row in rows}, (time.perf_counter() - began) * 1000


def main(dsn: str) -> None:
    """Print the table."""
    print("| rows × dimensions | index | recall@10 | MB | built in s | ms |\n|---|---|---|---|---|---|")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET maintenance_work_mem = '1GB'; SET client_min_messages = 'error'")
        for table, rows, dimensions, lists in TABLES:
            make(connection, table, rows, dimensions)
            questions = list(vectors(QUESTIONS, dimensions, 9))
            exact = [searched(connection, table, vector, True) for vector in questions]
            size = connection.execute("SELECT pg_table_size(%s::regclass) / 1e6", (table,)).fetchone()
            name = f"{rows:,} × {dimensions:,}".replace(",", " ")
            milliseconds = statistics.median(ms for _, ms in exact)
            print(f"| {name} | none (table {size[0]:.0f} MB) | 1 | | | {milliseconds:.1f} |", flush=True)  # type: ignore[index]
            for kind in kinds(lists):
                began = time.perf_counter()
                connection.execute("SELECT ml_rag.index_store(%s, NULL, %s)", (table, Jsonb(kind)))
                seconds = time.perf_counter() - began
                (index, size_of_index) = connection.execute(
                    "SELECT i.oid::regclass::text, pg_relation_size(i.oid) / 1e6 FROM pg_index AS x"
                    " JOIN pg_class AS i ON i.oid = x.indexrelid WHERE x.indrelid = %s::regclass",
                    (table,),
                ).fetchone()  # type: ignore[misc]
                searched(connection, table, questions[0], False)
                found = [searched(connection, table, vector, False) for vector in questions]
                hits = sum(len(f & e) for (f, _), (e, _) in zip(found, exact, strict=True))
                milliseconds = statistics.median(ms for _, ms in found)
                what = ", ".join(f"{value}" for key, value in kind.items() if value != "none" and key != "lists")
                what += f", {lists} lists" if "lists" in kind else ""
                recall = hits / (10 * QUESTIONS)
                print(
                    f"| {name} | {what} | {recall:.3f} | {size_of_index:.0f} | {seconds:.0f} | {milliseconds:.1f} |",
                    flush=True,
                )
                connection.execute(f"DROP INDEX {index}")


if __name__ == "__main__":
    main(sys.argv[1])
