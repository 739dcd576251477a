"""Retrieval: the first call, warm calls against the bare kNN statement, backend memory, many sessions."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psycopg
from pgvector import Vector
from pgvector.psycopg import register_vector
from psycopg.types.json import Jsonb

from bench.measure import Figure, in_turn, medians, milliseconds, own_megabytes

ROWS, DIMENSIONS = 100_000, 384
MODEL = "all_minilm_l6_v2"
QUESTIONS = [
    "What is AutoML?",
    "how do I load a folder of PDF files into a vector store",
    "which index is built for the cosine distance",
    "who may read the rows of another tenant",
    "what does error 55000 mean",
    "maximum number of citations",
    "does the answer name its sources",
    "how large is the embedding model",
]


def prepare(dsn: str) -> None:
    """The table: random directions around 200 centres (seeded), so that neighbours exist as they do in real data."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        register_vector(connection)
        have = connection.execute("SELECT to_regclass('bench_store') IS NOT NULL").fetchone()
        if have and have[0]:
            return
        connection.execute(
            f"CREATE TABLE bench_store (document_name text NOT NULL, metadata jsonb NOT NULL, document_id bigint, "
            f"segment_number integer, segment text NOT NULL, segment_embedding vector({DIMENSIONS}), "
            f"PRIMARY KEY (document_id, segment_number))"
        )
        random = np.random.default_rng(7)
        centres = random.normal(size=(200, DIMENSIONS))
        with connection.cursor().copy("COPY bench_store FROM STDIN WITH (FORMAT BINARY)") as copy:
            copy.set_types(["text", "jsonb", "int8", "int4", "text", "vector"])
            for i in range(ROWS):
                vector = centres[random.integers(200)] + random.normal(size=DIMENSIONS)
                text = f"Segment {i % 10} of document {i // 10}, a sentence of about the usual length for a citation."
                row = (f"document {i // 10}", Jsonb({}), i // 10, i % 10, text, Vector(vector / np.linalg.norm(vector)))
                copy.write_row(row)
        connection.execute(f"COMMENT ON COLUMN bench_store.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID={MODEL}'")
        connection.execute("SET maintenance_work_mem = '1GB'")
        connection.execute("CREATE INDEX ON bench_store USING hnsw (segment_embedding vector_cosine_ops)")
        connection.execute("VACUUM ANALYZE bench_store")


class EmbeddingCall:
    """The bare call: one POST over the model server's unix socket on a kept connection, floats decoded."""

    def __init__(self, address: str) -> None:
        self._http = http.client.HTTPConnection("model-server")
        self._http.sock = socket.socket(socket.AF_UNIX)
        self._http.sock.connect(address.removeprefix("unix:"))

    def __call__(self, text: str) -> Vector:
        body = json.dumps({"model": MODEL, "input": text})
        self._http.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        reply = self._http.getresponse()
        return Vector(json.loads(reply.read())["data"][0]["embedding"])

    def close(self) -> None:
        self._http.close()


@contextmanager
def connected(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        register_vector(connection)
        yield connection


def first_call(dsn: str) -> Figure:
    options = json.dumps({"skip_generate": True, "vector_store": ["bench_store"]})

    def once(_: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CALL ml_rag(%s, %s::jsonb)", (QUESTIONS[0], options)).fetchone()

    def floor(_: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SELECT 1").fetchone()

    m = medians(in_turn({"first": once, "floor": floor}, rounds=15, warmup=2))
    return Figure(
        "first ml_rag on a new connection, connecting included", "ms", m["first"], "connect, SELECT 1", m["floor"],
        "≤ 150 ms", m["first"] <= 150,
    )  # fmt: skip


def warm_calls(dsn: str, address: str) -> list[Figure]:
    knn = (
        "SELECT document_name, segment, segment_embedding <=> %s AS distance FROM bench_store "
        "ORDER BY segment_embedding <=> %s LIMIT 3"
    )
    embed = EmbeddingCall(address)
    with connected(dsn) as connection:
        # as ml_rag searches a table of this size: the bare statement is to find as much
        connection.execute("SET hnsw.ef_search = 200")
        rows = connection.execute("SELECT segment_embedding FROM bench_store ORDER BY random() LIMIT 300").fetchall()
        vectors: list[Vector] = [row[0] for row in rows]
        base = {"skip_generate": True, "vector_store": ["bench_store"]}
        by_vector = [json.dumps({**base, "query_embedding": v.to_list(), "embed_model_id": MODEL}) for v in vectors]
        by_text = json.dumps(base)

        def bare(i: int) -> object:
            return connection.execute(knn, (vectors[i], vectors[i])).fetchall()

        def bare_text(i: int) -> object:
            vector = embed(QUESTIONS[i % len(QUESTIONS)])
            return connection.execute(knn, (vector, vector)).fetchall()

        def rag_vector(i: int) -> object:
            return connection.execute("CALL ml_rag(%s, %s::jsonb)", ("a question", by_vector[i])).fetchone()

        def rag_text(i: int) -> object:
            return connection.execute("CALL ml_rag(%s, %s::jsonb)", (QUESTIONS[i % len(QUESTIONS)], by_text)).fetchone()

        calls = {"bare": bare, "rag_vector": rag_vector, "bare_text": bare_text, "rag_text": rag_text}
        m = medians(in_turn(calls, rounds=300, warmup=20, block=10))
    return [
        Figure(
            "warm ml_rag with query_embedding, 100 000 x 384, HNSW", "ms", m["rag_vector"],
            "the bare kNN statement, same ef_search", m["bare"], "≤ 1.5 x + 1 ms",
            m["rag_vector"] <= 1.5 * m["bare"] + 1,
        ),
        Figure(
            "warm ml_rag with a text query", "ms", m["rag_text"], "bare embedding call + bare kNN, same ef_search",
            m["bare_text"], "≤ 1.2 x", m["rag_text"] <= 1.2 * m["bare_text"],
        ),
    ]  # fmt: skip


def backend_memory(dsn: str) -> Figure:
    options = json.dumps({"skip_generate": True, "vector_store": ["bench_store"]})
    with connected(dsn) as connection:
        pid = connection.info.backend_pid
        seen = {}
        for i in range(1, 1001):
            connection.execute("CALL ml_rag(%s, %s::jsonb)", (QUESTIONS[i % len(QUESTIONS)], options)).fetchone()
            if i in (100, 1000):
                seen[i] = own_megabytes(pid)
    return Figure(
        "own memory of a backend after 100 calls", "MB", seen[100], "the same after 1 000 calls",
        seen[1000], "≤ 18 MB, not growing", seen[100] <= 18 and seen[1000] <= seen[100] + 1,
    )  # fmt: skip


def _queries_per_second(dsn: str, sessions: int, seconds: float) -> float:
    barrier = threading.Barrier(sessions + 1)
    counts = [0] * sessions
    stop = threading.Event()

    def work(number: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SELECT ml_embed_row(%s)", (QUESTIONS[0],))
            barrier.wait()
            while not stop.is_set():
                connection.execute("SELECT ml_embed_row(%s)", (QUESTIONS[(number + counts[number]) % len(QUESTIONS)],))
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(sessions)]
    for thread in threads:
        thread.start()
    barrier.wait()
    elapsed = milliseconds(lambda: time.sleep(seconds)) / 1000
    stop.set()
    done = sum(counts)
    for thread in threads:
        thread.join()
    return done / elapsed


def many_sessions(dsn: str) -> Figure:
    one, many = [], []
    for _ in range(3):
        one.append(_queries_per_second(dsn, 1, 3))
        many.append(_queries_per_second(dsn, 32, 5))
    value, floor = sorted(many)[1], sorted(one)[1]
    return Figure(
        "32 sessions embedding at once", "queries/s", value, "one session", floor, "≥ 2 x", value >= 2 * floor
    )
