"""Tables with a vectorizer: a bulk load against encoding alone, and what a write costs against a table without one."""

from __future__ import annotations

import functools
import json
import statistics
import time
from pathlib import Path

import psycopg

from bench import corpus
from bench.measure import Figure, in_turn, medians
from bench.retrieval import MODEL

ROWS = 2_000
#: rows of one INSERT or UPDATE
STATEMENT = 100

TABLE = "CREATE TABLE {} (id integer PRIMARY KEY, title text, body text, price numeric)"


def _make(connection: psycopg.Connection, table: str, **options: object) -> None:
    connection.execute(f"DROP TABLE IF EXISTS {table}, {table}_segments")
    connection.execute(TABLE.format(table))
    given = {"columns": "{title}: {body}", "embed_model_id": MODEL, **options}
    connection.execute("SELECT ml_rag.create_vectorizer(%s, %s)", (table, json.dumps(given)))


def bulk(dsn: str, model_folder: Path, rows: int = ROWS) -> list[Figure]:
    """Rows per second from COPY to the last embedding, with and without the index, three times each in turn."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(model_folder), device="cpu")
    texts = list(corpus.segments(rows))
    speeds: dict[str, list[float]] = {"none": [], "hnsw": [], "encode": []}
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(3):
            for index in ("none", "hnsw"):
                _make(connection, "bench_items", index={"type": index}, keyword_search=False)
                start = time.perf_counter()
                with connection.cursor().copy("COPY bench_items (id, title, body) FROM STDIN") as copy:
                    for i, text in enumerate(texts):
                        copy.write_row((i, f"row {i}", text))
                connection.execute("CALL ml_rag.run_vectorizer('bench_items')")
                speeds[index].append(rows / (time.perf_counter() - start))
            segments = [row[0] for row in connection.execute("SELECT segment FROM bench_items").fetchall()]
            start = time.perf_counter()
            model.encode(segments)
            speeds["encode"].append(rows / (time.perf_counter() - start))
        connection.execute("DROP TABLE bench_items")
    value = {name: statistics.median(found) for name, found in speeds.items()}
    return [
        Figure(
            f"a vectorizer after COPY of {rows} rows{extra}", "rows/s", value[index], "SentenceTransformer.encode",
            value["encode"], "≥ 0.85 x", value[index] >= 0.85 * value["encode"],
        )
        for index, extra in (("none", ""), ("hnsw", ", index included"))
    ]  # fmt: skip


def write(dsn: str) -> list[Figure]:
    """Milliseconds of an INSERT, of an UPDATE of the text and of another column, of 100 rows, against a plain table."""
    return [figure for destination in ("column", "table") for figure in _write(dsn, destination)]


def _write(dsn: str, destination: str) -> list[Figure]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS bench_plain")
        connection.execute(TABLE.format("bench_plain"))
        _make(connection, "bench_items", index={"type": "none"}, keyword_search=False, destination=destination)
        store = {"column": "bench_items", "table": "bench_items_segments"}[destination]
        tables = {"ours": "bench_items", "floor": "bench_plain"}
        statements = {
            "INSERT": "INSERT INTO {} (id, title, body) SELECT i, 'row ' || i, repeat('word ', 60)"
            " FROM generate_series(%(i)s, %(i)s + 99) AS i ON CONFLICT DO NOTHING",
            "UPDATE of the text": "UPDATE {} SET title = title || '.' WHERE id BETWEEN %(i)s AND %(i)s + 99",
            "UPDATE of another column": "UPDATE {} SET price = %(i)s WHERE id BETWEEN %(i)s AND %(i)s + 99",
        }
        figures = []
        for name, statement in statements.items():
            if name == "UPDATE of the text":
                # rows that have their embedding, as they mostly do
                connection.execute(
                    f"UPDATE {store} SET segment_embedding = (SELECT array_agg(1)::vector FROM generate_series(1, 384))"
                )
                connection.execute(f"VACUUM ANALYZE {store}, bench_plain")
            texts = {who: statement.format(table) for who, table in tables.items()}
            calls = {
                who: functools.partial(lambda text, i: connection.execute(text, {"i": STATEMENT * i}), text)
                for who, text in texts.items()
            }
            m = medians(in_turn(calls, rounds=200, warmup=0, block=10))
            figures.append(
                Figure(
                    f"{name}, {STATEMENT} rows of a vectorized table, destination {destination}", "ms", m["ours"],
                    "without one", m["floor"], "shown", True,
                )
            )  # fmt: skip
        connection.execute("SELECT ml_rag.drop_vectorizer('bench_items')")
        connection.execute("DROP TABLE bench_items, bench_plain")
    return figures
