"""Tables with a vectorizer: a bulk load against encoding alone, and what a write costs against a table without one."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import psycopg

from bench import corpus
from bench.measure import Figure, in_turn, medians, milliseconds
from bench.retrieval import MODEL

ROWS = 2_000
#: rows that are drained between two looks at how fast the model encodes alone, and how many it then encodes
TURN, SAMPLE = 5_000, 500
#: rows of one INSERT or UPDATE
STATEMENT = 100

TABLE = "CREATE TABLE {} (id integer PRIMARY KEY, title text, body text, price numeric)"


def _make(connection: psycopg.Connection, table: str, **options: object) -> None:
    connection.execute(f"DROP TABLE IF EXISTS {table}, {table}_segments")
    connection.execute(TABLE.format(table))
    given = {"columns": "{title}: {body}", "embed_model_id": MODEL, **options}
    connection.execute("SELECT ml_rag.create_vectorizer(%s, %s)", (table, json.dumps(given)))


def bulk(dsn: str, model_folder: Path, rows: int = ROWS, words: int = corpus.WORDS_A_SEGMENT) -> list[Figure]:
    """Rows per second from COPY to the last embedding, with and without the index, against encoding alone.

    The vectorizer and the model take turns of seconds, so that other work on the machine slows both alike; of many rows
    the model encodes a sample alone, as long or short as the others.
    """
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(model_folder), device="cpu")
    texts = [f"row {i}: {text}" for i, text in enumerate(corpus.segments(rows, words=words))]
    turn = max(250, min(TURN, rows // 4) // 250 * 250)
    sample = min(SAMPLE, turn)
    # seconds
    drained = encoded = 0.0
    with psycopg.connect(dsn, autocommit=True) as connection:
        _make(connection, "bench_items", index={"type": "hnsw"}, keyword_search=False)

        def copied() -> None:
            with connection.cursor().copy("COPY bench_items (id, title, body) FROM STDIN") as copy:
                for i, text in enumerate(texts):
                    copy.write_row((i, *text.split(": ", 1)))

        def run(**options: int) -> dict[str, int]:
            query = "CALL ml_rag.run_vectorizer('bench_items', %s)"
            row = connection.execute(query, (json.dumps(options),)).fetchone()
            assert row is not None
            result: dict[str, int] = row[0]
            return result

        drained += milliseconds(copied) / 1000
        batches = turn // 250
        samples = 0
        for first in range(0, rows, turn):
            drained += milliseconds(lambda: run(batch_size=250, batches=batches)) / 1000
            encoded += milliseconds(lambda first=first: model.encode(texts[first : first + sample])) / 1000  # type: ignore[misc]
            samples += len(texts[first : first + sample])
        # what is left is the index
        indexed = milliseconds(run) / 1000
        counted = connection.execute("SELECT count(segment_embedding) FROM bench_items").fetchone()
        assert counted == (rows,), counted
        connection.execute("DROP TABLE bench_items")
    floor = samples / encoded
    values = {"": rows / drained, ", index included": rows / (drained + indexed)}
    return [
        Figure(
            f"a vectorizer after COPY of {rows} rows of {words} words{extra}", "rows/s", value,
            "SentenceTransformer.encode", floor, "≥ 0.85 x", value >= 0.85 * floor,
        )
        for extra, value in values.items()
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
