"""The same rows in more and more stores, beside one table that has them all."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import psycopg

from bench.measure import own_megabytes
from bench.scale.setting import (
    Row,
    Setting,
    answer,
    bare,
    blocks,
    connect,
    copy,
    create_store,
    medians,
    options_of,
    questions,
    seconds,
    value,
)

COUNTS = (1, 10, 100, 1_000)
ROWS, QUICK_ROWS = 100_000, 40_000
LOCKS = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation'"


def measure(setting: Setting) -> list[Row]:
    rows = QUICK_ROWS if setting.quick else ROWS
    vectors = np.concatenate(list(blocks(rows, 8)))
    found: list[Row] = []
    for stores in COUNTS:
        with psycopg.connect(setting.owner, autocommit=True) as owner:
            owner.execute("SET client_min_messages = error")
            _make(owner, stores, vectors)
        row = {"stores": stores, "rows": rows, **_one(setting, stores)}
        found.append(row)
        print(json.dumps(row), flush=True)
    with psycopg.connect(setting.owner, autocommit=True) as owner:
        for stores in COUNTS:
            for first in range(0, stores, 100):
                tables = ", ".join(_table(stores, i) for i in range(first, min(first + 100, stores)))
                owner.execute(f"DROP TABLE {tables} CASCADE")
    return found


def _table(stores: int, i: int) -> str:
    return f"of_{stores}.store_{i}"


def _make(owner: psycopg.Connection[Any], stores: int, vectors: np.ndarray) -> None:
    owner.execute(f"CREATE SCHEMA of_{stores}; GRANT USAGE ON SCHEMA of_{stores} TO asker")
    size = len(vectors) // stores
    for i in range(stores):
        table = _table(stores, i)
        create_store(owner, table)
        copy(owner, table, vectors[i * size : (i + 1) * size], i * size)
        owner.execute('SELECT ml_rag.index_store(%s, NULL, \'{"type": "hnsw"}\')', (table,))
    owner.execute("VACUUM ANALYZE")


def _one(setting: Setting, stores: int) -> Row:
    asked = questions()
    one = [options_of(q, vector_store=["of_1.store_0"]) for q in asked]
    all_of = [options_of(q, schema=[f"of_{stores}"]) for q in asked]
    exact = {"index_options": {"exact": True}}
    one_exact = [options_of(q, vector_store=["of_1.store_0"], **exact) for q in asked]
    all_exact = [options_of(q, schema=[f"of_{stores}"], **exact) for q in asked]

    def union(question: str) -> str:
        parts = " UNION ALL ".join(f"({bare(_table(stores, i), question)})" for i in range(stores))
        return f"SELECT * FROM ({parts}) AS s ORDER BY distance LIMIT 5"

    with (
        connect(setting.asker) as ours,
        connect(setting.asker, ef_search=200) as plain_one,
        connect(setting.asker, ef_search=200 if stores == 1 else 40) as plain,
    ):
        first = seconds(lambda: answer(ours, all_of[0]))
        rounds = setting.rounds if stores < 100 else setting.rounds // 3 if stores < 1_000 else setting.rounds // 12
        n = len(asked)
        times = medians(
            {
                "ours one": lambda i: answer(ours, one[i % n]),
                "ours": lambda i: answer(ours, all_of[i % n]),
                "bare one": lambda i: plain_one.execute(bare("of_1.store_0", asked[i % n])).fetchall(),
                "bare": lambda i: plain.execute(union(asked[i % n])).fetchall(),
                "discovery": lambda _: ours.execute(
                    "SELECT count(*) FROM ml_rag.discover(schema => %s)", ([f"of_{stores}"],)
                ).fetchone(),
                "ours one, exact": lambda i: answer(ours, one_exact[i % n]),
                "ours, exact": lambda i: answer(ours, all_exact[i % n]),
            },
            rounds,
        )
        with ours.transaction():
            answer(ours, all_of[0])
            locks = value(ours, LOCKS)
        return {
            "first s": first,
            **{f"{name} ms": milliseconds for name, milliseconds in times.items()},
            "locks": locks,
            "backend MB": own_megabytes(ours.info.backend_pid),
            "bare backend MB": own_megabytes(plain.info.backend_pid),
        }
