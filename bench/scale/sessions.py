"""More and more sessions that search at once, as fast as they can, with a vector and with a text to embed."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from bench.load.report import percentile
from bench.retrieval import EmbeddingCall
from bench.scale.setting import (
    TEXTS,
    Row,
    Setting,
    answer,
    bare,
    blocks,
    connect,
    copy,
    create_store,
    options_of,
    questions,
)

COUNTS = (1, 4, 16, 64)
ROWS = 20_000
KINDS = ("bare", "ours", "bare with embedding", "ours with embedding")
SECONDS, QUICK_SECONDS = 15.0, 3.0
#: processes that the sessions of clients are spread over, so that no lock of Python's makes them wait for each other
PROCESSES = 4


def measure(setting: Setting) -> list[Row]:
    with psycopg.connect(setting.owner, autocommit=True) as owner:
        owner.execute("SET client_min_messages = error")
        create_store(owner, "public.shared")
        for i, vectors in enumerate(blocks(ROWS, 8)):
            copy(owner, "shared", vectors, i * len(vectors))
        owner.execute("SELECT ml_rag.index_store('shared', NULL, '{\"type\": \"hnsw\"}')")
        owner.execute("VACUUM ANALYZE shared")
    length = QUICK_SECONDS if setting.quick else SECONDS
    found: list[Row] = []
    for sessions in COUNTS:
        row: Row = {"sessions": sessions, "rows": ROWS}
        for kind in KINDS:
            times = _together(setting, sessions, kind, length)
            row |= {
                f"{kind} p50 ms": statistics.median(times) * 1000,
                f"{kind} p95 ms": percentile(times, 0.95) * 1000,
                f"{kind} a second": len(times) / length,
            }
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def _together(setting: Setting, sessions: int, kind: str, length: float) -> list[float]:
    """Seconds of all calls that ended in time."""
    context = multiprocessing.get_context("spawn")
    processes = min(sessions, PROCESSES)
    ready, go = context.Barrier(processes), context.SimpleQueue()
    running = [
        context.Process(target=_process, args=(setting, sessions // processes, kind, length, ready, go), daemon=True)
        for _ in range(processes)
    ]
    for process in running:
        process.start()
    times = [t for _ in running for t in go.get()]
    for process in running:
        process.join()
    return times


def _process(setting: Setting, sessions: int, kind: str, length: float, ready: Any, found: Any) -> None:
    times: list[list[float]] = [[] for _ in range(sessions)]
    inside = threading.Barrier(sessions, action=ready.wait)

    def work(number: int) -> None:
        with connect(setting.asker) as connection:
            call = _call(connection, setting, kind)
            for i in range(5):
                call(i)
            inside.wait()
            end = time.perf_counter() + length
            i = 7 * number
            while (began := time.perf_counter()) < end:
                call(i)
                i += 1
                if (now := time.perf_counter()) < end:
                    times[number].append(now - began)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.put([t for mine in times for t in mine])


def _call(connection: psycopg.Connection[Any], setting: Setting, kind: str) -> Callable[[int], object]:
    asked = questions()
    statements = [bare("shared", q) for q in asked]
    with_vector = [options_of(q, vector_store=["public.shared"]) for q in asked]
    with_text = options_of(None, vector_store=["public.shared"])
    n = len(asked)
    if kind == "bare":
        return lambda i: connection.execute(statements[i % n]).fetchall()
    if kind == "ours":
        return lambda i: answer(connection, with_vector[i % n])
    if kind == "ours with embedding":
        return lambda i: answer(connection, with_text, TEXTS[i % len(TEXTS)])
    embed = EmbeddingCall(setting.address)
    return lambda i: connection.execute(bare("shared", embed(TEXTS[i % len(TEXTS)]).to_text())).fetchall()
