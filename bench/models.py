"""The model server against the same models called in this process."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import psycopg

from bench.measure import Figure, in_turn, medians
from bench.retrieval import MODEL, QUESTIONS, EmbeddingCall


def query_embedding(address: str, model_folder: Path) -> Figure:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(model_folder), device="cpu")
    embed = EmbeddingCall(address)
    calls = {
        "server": lambda i: embed(QUESTIONS[i % len(QUESTIONS)]),
        "in_process": lambda i: model.encode(QUESTIONS[i % len(QUESTIONS)]),
    }
    m = medians(in_turn(calls, rounds=200, block=10))
    return Figure(
        "one query embedding through the model server", "ms", m["server"], "SentenceTransformer.encode",
        m["in_process"], "≤ 0.6 x", m["server"] <= 0.6 * m["in_process"],
    )  # fmt: skip


def load_folder(dsn: str, folder: Path, model_folder: Path) -> Figure:
    """Segments per second: the whole of vector_store_load against encoding alone, three times each, in turn."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(model_folder), device="cpu")
    ours, floor = [], []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(3):
            connection.execute("DROP TABLE IF EXISTS bench_load")
            start = time.perf_counter()
            options = json.dumps({"table_name": "bench_load", "embed_model_id": MODEL})
            connection.execute("CALL vector_store_load(%s, %s::jsonb)", (f"file://{folder}/", options))
            seconds = time.perf_counter() - start
            segments = [row[0] for row in connection.execute("SELECT segment FROM bench_load").fetchall()]
            ours.append(len(segments) / seconds)
            start = time.perf_counter()
            model.encode(segments)
            floor.append(len(segments) / (time.perf_counter() - start))
        connection.execute("DROP TABLE bench_load")
    value, base = statistics.median(ours), statistics.median(floor)
    return Figure(
        f"vector_store_load of a folder, {len(segments)} segments", "segments/s", value, "SentenceTransformer.encode",
        base, "≥ 0.85 x", value >= 0.85 * base,
    )  # fmt: skip


def generation(dsn: str, gguf: Path) -> list[Figure]:
    """Time to the first token and tokens per second, each prompt new to both, so that no prefix is reused."""
    import llama_cpp

    llama = llama_cpp.Llama(str(gguf), n_ctx=4096, verbose=False)
    story = (
        "A vector store is a table with a column of embeddings. Each row holds a segment of a document, and the "
        "distance between the embedding of a question and that of a segment says how near they are. "
    ) * 6
    tokens = 64

    def prompt(i: int, who: str) -> str:
        return f"Number {i}{who}. {story} Write a long story about it."

    def direct(i: int, n: int) -> int:
        reply = llama.create_chat_completion(
            [{"role": "user", "content": prompt(i, f"d{n}")}], max_tokens=n, temperature=0.0
        )
        return int(reply["usage"]["completion_tokens"])

    with psycopg.connect(dsn, autocommit=True) as connection:

        def ours(i: int, n: int) -> object:
            options = json.dumps({"model_id": gguf.parent.name, "max_tokens": n, "temperature": 0})
            return connection.execute("SELECT ml_generate(%s, %s::jsonb)", (prompt(i, f"o{n}"), options)).fetchone()

        calls = {
            "ours_first": lambda i: ours(i, 1),
            "direct_first": lambda i: direct(i, 1),
            "ours_all": lambda i: ours(i, tokens),
            "direct_all": lambda i: direct(i, tokens),
        }
        m = medians(in_turn(calls, rounds=7, warmup=1))
    llama.close()
    speed = {who: (tokens - 1) * 1000 / (m[f"{who}_all"] - m[f"{who}_first"]) for who in ("ours", "direct")}
    return [
        Figure(
            "ml_generate, speed to the first token", "1/s", 1000 / m["ours_first"], "llama-cpp-python called directly",
            1000 / m["direct_first"], "≥ 0.95 x", m["direct_first"] >= 0.95 * m["ours_first"],
        ),
        Figure(
            "ml_generate, generation", "tokens/s", speed["ours"], "llama-cpp-python called directly", speed["direct"],
            "≥ 0.95 x", speed["ours"] >= 0.95 * speed["direct"],
        ),
    ]  # fmt: skip
