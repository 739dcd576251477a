"""Searches of 12 words beside the bare kNN statement, over abstracts and under filters of every width."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterator

import numpy as np
import psycopg
from pgvector import Vector
from psycopg import sql
from psycopg.types.json import Jsonb

from bench import corpus
from bench.measure import Figure, in_turn, medians, milliseconds
from bench.retrieval import DIMENSIONS, MODEL, EmbeddingCall, connected

ABSTRACTS, SEGMENTS = 5_000, 100_000
QUESTIONS, WORDS = 100, 12
#: of a thousand rows so many pass the filter
SHARES = (500, 100, 10, 1)
KNN = (
    "SELECT document_name, segment, segment_embedding <=> %s AS distance FROM {}"
    " ORDER BY segment_embedding <=> %s LIMIT {}"
)


def _vectors(rows: int) -> Iterator[Vector]:
    """Directions around 200 centres (seeded), so that neighbours exist as they do in real data."""
    source = np.random.default_rng(7)
    centres = source.normal(size=(200, DIMENSIONS))
    for _ in range(rows):
        vector = centres[source.integers(200)] + source.normal(size=DIMENSIONS)
        yield Vector(vector / np.linalg.norm(vector))


def _make(connection: psycopg.Connection, table: str, texts: Iterator[str], rows: int) -> None:
    """A store with both indexes, and twice a column of 0 to 999, one of them indexed; made once."""
    # of an extension that was dropped meanwhile
    index = 'SELECT ml_rag.enable_keyword_search(%s, \'{"language": "en"}\')'
    if connection.execute("SELECT to_regclass(%s) IS NOT NULL", (table,)).fetchone() == (True,):
        connection.execute(index, (table,))
        return
    name = sql.Identifier(table)
    connection.execute("SET maintenance_work_mem = '1GB'")
    connection.execute(
        sql.SQL(
            "CREATE TABLE {} (document_name text NOT NULL, metadata jsonb, document_id bigint, segment_number integer,"
            " share integer, indexed_share integer, segment text NOT NULL, segment_embedding vector({}),"
            " PRIMARY KEY (document_id, segment_number))"
        ).format(name, sql.Literal(DIMENSIONS))
    )
    shares = np.random.default_rng(8).permutation(rows) % 1000
    with connection.cursor().copy(sql.SQL("COPY {} FROM STDIN WITH (FORMAT BINARY)").format(name)) as copy:
        copy.set_types(["text", "jsonb", "int8", "int4", "int4", "int4", "text", "vector"])
        for i, (text, vector) in enumerate(zip(texts, _vectors(rows), strict=True)):
            share = int(shares[i])
            copy.write_row((f"document {i}", Jsonb({"page": i % 10}), i, 0, share, share, text, vector))
    connection.execute(
        sql.SQL("COMMENT ON COLUMN {}.segment_embedding IS {}").format(
            name, sql.Literal(f"GENAI_OPTIONS=EMBED_MODEL_ID={MODEL}")
        )
    )
    connection.execute(sql.SQL("CREATE INDEX ON {} USING hnsw (segment_embedding vector_cosine_ops)").format(name))
    connection.execute(sql.SQL("CREATE INDEX ON {} (indexed_share)").format(name))
    connection.execute(index, (table,))
    connection.execute(sql.SQL("VACUUM ANALYZE {}").format(name))


def prepare(dsn: str) -> None:
    with connected(dsn) as connection:
        pairs = corpus.segments(2 * ABSTRACTS)
        _make(connection, "bench_abstracts", (f"{first} {next(pairs)}" for first in pairs), ABSTRACTS)
        _make(connection, "bench_segments", corpus.segments(SEGMENTS), SEGMENTS)


def _questions() -> list[str]:
    """Of the words of the corpus, so that each is found somewhere."""
    source = random.Random(3)
    words = [word for text in itertools.islice(corpus.segments(300), 300) for word in text.split()]
    return [" ".join(source.sample(words, WORDS)) for _ in range(QUESTIONS)]


class _Calls:
    """The calls that are timed, over one table."""

    def __init__(self, connection: psycopg.Connection, table: str) -> None:
        self.connection, self.table = connection, table
        rows = connection.execute(
            sql.SQL("SELECT segment_embedding FROM {} ORDER BY md5(document_name) LIMIT {}").format(
                sql.Identifier(table), QUESTIONS
            )
        )
        # near a segment, but at none of them
        noise = np.random.default_rng(9)
        self.vectors = [Vector(v.to_numpy() + 0.05 * noise.normal(size=DIMENSIONS)) for (v,) in rows.fetchall()]
        self.questions = _questions()
        self._statements: dict[str, list[str]] = {}

    def bare(self, i: int, n: int = 3) -> list[tuple[object, ...]]:
        vector = self.vectors[i % QUESTIONS]
        return self.connection.execute(KNN.format(self.table, n), (vector, vector)).fetchall()  # type: ignore[arg-type]

    def search(self, i: int, *, has_vector: bool = True, **options: object) -> dict[str, object]:
        """``ml_rag`` without an answer; options are encoded once, as an application would hand on its own bytes."""
        key = json.dumps([has_vector, options], sort_keys=True)
        if key not in self._statements:
            base = {"skip_generate": True, "vector_store": [self.table], **options}
            self._statements[key] = [
                json.dumps({**base, "query_embedding": v.to_list(), "embed_model_id": MODEL} if has_vector else base)
                for v in self.vectors
            ]
        row = self.connection.execute(
            "CALL ml_rag(%s, %s::jsonb)", (self.questions[i % QUESTIONS], self._statements[key][i % QUESTIONS])
        ).fetchone()
        assert row is not None
        return row[0]


def _abstracts(dsn: str, address: str) -> list[Figure]:
    embed = EmbeddingCall(address)
    with connected(dsn) as connection:
        calls = _Calls(connection, "bench_abstracts")

        def bare_text(i: int) -> object:
            vector = embed(calls.questions[i % QUESTIONS])
            return connection.execute(KNN.format(calls.table, 3), (vector, vector)).fetchall()  # type: ignore[arg-type]

        times = in_turn(
            {
                "bare": calls.bare,
                "meaning": calls.search,
                "hybrid": lambda i: calls.search(i, keyword_search=True),
                "bare text": bare_text,
                "hybrid text": lambda i: calls.search(i, has_vector=False, keyword_search=True),
                "discovery": lambda _: connection.execute(
                    "SELECT count(*) FROM ml_rag.discover(ARRAY['bench_abstracts'])"
                ).fetchone(),
                "a statement": lambda _: connection.execute("SELECT 1").fetchone(),
            },
            rounds=200,
            warmup=20,
            block=10,
        )
    m = medians(times)
    p95 = statistics.quantiles(times["hybrid"], n=20)[-1]
    discovery = m["discovery"] - m["a statement"]
    firsts = [_first_calls(dsn) for _ in range(5)]
    first = statistics.median(firsts)
    over = f"over {ABSTRACTS:,} abstracts"
    return [
        Figure(f"by meaning, query vector given, {over}", "ms", m["meaning"],
               "the bare kNN statement", m["bare"], "≤ 1.5 x + 0.5 ms",
               m["meaning"] <= 1.5 * m["bare"] + 0.5),
        Figure(f"hybrid, query vector given, {over}", "ms", m["hybrid"], "by meaning alone", m["meaning"], "≤ 2 x",
               m["hybrid"] <= 2 * m["meaning"]),
        Figure(f"hybrid with a text question, {over}", "ms", m["hybrid text"], "bare embedding call + bare kNN",
               m["bare text"], "≤ 1.6 x", m["hybrid text"] <= 1.6 * m["bare text"]),
        Figure("discovery of one store, warm, less SELECT 1", "ms", discovery, "", None, "≤ 0.2 ms", discovery <= 0.2),
        Figure(f"hybrid, {over}, p95", "ms", p95, "its median", m["hybrid"], "≤ 1.6 x", p95 <= 1.6 * m["hybrid"]),
        Figure("calls 2 to 6 of a session, hybrid", "ms", first, "the later ones", m["hybrid"], "≤ 1.5 x",
               first <= 1.5 * m["hybrid"]),
    ]  # fmt: skip


def _first_calls(dsn: str) -> float:
    """The median of a session's calls 2 to 6; the first one imports and compiles."""
    with connected(dsn) as connection:
        calls = _Calls(connection, "bench_abstracts")
        calls.search(0, keyword_search=True)
        return statistics.median(milliseconds(lambda i=i: calls.search(i, keyword_search=True)) for i in range(1, 6))  # type: ignore[misc]


def _recall(calls: _Calls, column: str, share: int, questions: int = 50) -> float:
    """recall@10 of a search by meaning under a filter, against sorting all rows that pass it."""
    found = 0
    for i in range(questions):
        answer = calls.search(
            i, filters={column: {"lt": share}}, n_citations=10, retrieval_options={"segment_overlap": 0}
        )
        names = {citation["document_name"] for citation in answer["citations"]}  # type: ignore[index,attr-defined,union-attr]
        exact = calls.connection.execute(
            f"SELECT document_name FROM {calls.table} WHERE share < {share}"
            " ORDER BY (segment_embedding <=> %s) + 0 LIMIT 10",  # type: ignore[arg-type]
            (calls.vectors[i],),
        ).fetchall()
        found += len(names & {name for (name,) in exact})
    return found / (10 * questions)


def _filters(dsn: str) -> list[Figure]:
    with connected(dsn) as connection:
        calls = _Calls(connection, "bench_segments")
        m = medians(
            in_turn(
                {
                    "none": lambda i: calls.search(i, keyword_search=True),
                    "share": lambda i: calls.search(i, keyword_search=True, filters={"share": {"lt": 10}}),
                    "indexed_share": lambda i: calls.search(
                        i, keyword_search=True, filters={"indexed_share": {"lt": 10}}
                    ),
                },
                rounds=50,
                warmup=QUESTIONS,
                block=5,
            )
        )
        return [
            *(
                Figure(
                    f"hybrid under a filter that 1 % of {SEGMENTS:,} pass, {what} index on its column", "ms", m[column],
                    "without the filter", m["none"], "≤ 3 x", m[column] <= 3 * m["none"],
                )
                for column, what in (("share", "no"), ("indexed_share", "an"))
            ),
            *(
                Figure(
                    f"recall@10 by meaning where {share / 10:g} % pass, {what} index", "", recall, "exact search", 1.0,
                    "≥ 0.98", recall >= 0.98,
                )
                for share in SHARES
                for column, what in (("share", "no"), ("indexed_share", "an"))
                for recall in (_recall(calls, column, share),)
            ),
            *(
                Figure("recall@10 by meaning without a filter", "", recall, "exact search", 1.0, "none", True)
                for recall in (_recall(calls, "share", 1000),)
            ),
        ]  # fmt: skip


def measure(dsn: str, address: str) -> list[Figure]:
    prepare(dsn)
    return _abstracts(dsn, address) + _filters(dsn)
