"""What all curves share: a cluster of their own, made-up vectors, the bare statements that ours stand beside."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from psycopg import sql

from bench.measure import in_turn
from support.private_cluster import private_cluster

DIMENSIONS, MODEL = 384, "all_minilm_l6_v2"
#: rows that a search returns
N = 5
#: vectors asked with: near a segment, at none of them
QUESTIONS = 100
BLOCK = 20_000
TEXTS = [
    "What is AutoML?",
    "how do I load a folder of PDF files into a vector store",
    "which index is built for the cosine distance",
    "who may read the rows of another tenant",
    "what does error 55000 mean",
    "maximum number of citations",
    "does the answer name its sources",
    "how large is the embedding model",
]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """``owner``: the DSN of a superuser, whose the tables are; ``asker``: of a role that only reads."""

    owner: str
    asker: str
    address: str
    quick: bool
    most: bool

    @property
    def rounds(self) -> int:
        return 60 if self.quick else 200


@contextmanager
def own_cluster(dsn: str, folder: Path, quick: bool, most: bool) -> Iterator[Setting]:
    """A cluster of the same installation as that of ``dsn``, and with its model server."""
    with psycopg.connect(dsn) as connection:
        found = connection.execute(
            "SELECT (SELECT setting FROM pg_config() WHERE name = 'BINDIR'),"
            " (SELECT value FROM ml_rag.setting WHERE name = 'model_server')"
        ).fetchone()
    assert found is not None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        Path(name).chmod(0o711)
        with private_cluster(Path(name), durable=False, bindir=Path(found[0])) as cluster:
            cluster.configure(
                f"shared_buffers = '{memory // 4 // 2**20}MB'\nmax_wal_size = '16GB'\nmax_connections = 100\n"
                "max_locks_per_transaction = 256\nmaintenance_work_mem = '1GB'\nautovacuum = off"
            )
            cluster.stop("fast")
            cluster.start()
            with psycopg.connect(cluster.dsn, autocommit=True) as owner:
                _make_extension(owner, found[1])
                owner.execute("CREATE ROLE asker LOGIN; GRANT ml_rag_user TO asker; GRANT pg_read_all_data TO asker")
            yield Setting(cluster.dsn, psycopg.conninfo.make_conninfo(cluster.dsn, user="asker"), found[1], quick, most)


@contextmanager
def own_database(setting: Setting) -> Iterator[Setting]:
    """The same in a new database, so that the growth of its catalog can be measured."""
    name = "of_its_own"
    with psycopg.connect(setting.owner, autocommit=True) as owner:
        owner.execute(f"CREATE DATABASE {name}")
    own, asker = (psycopg.conninfo.make_conninfo(dsn, dbname=name) for dsn in (setting.owner, setting.asker))
    with psycopg.connect(own, autocommit=True) as owner:
        _make_extension(owner, setting.address)
    yield replace(setting, owner=own, asker=asker)
    with psycopg.connect(setting.owner, autocommit=True) as owner:
        owner.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _make_extension(owner: psycopg.Connection[Any], address: str) -> None:
    owner.execute("SET client_min_messages = error; CREATE EXTENSION ml_rag CASCADE")
    owner.execute("SELECT ml_rag.configure('model_server', %s)", (address,))


def blocks(rows: int, seed: int) -> Iterator[np.ndarray]:
    """Directions around 200 centres (seeded), so that neighbours exist as they do in real data."""
    centres = np.random.default_rng(7).normal(size=(200, DIMENSIONS)).astype("f4")
    source = np.random.default_rng(seed)
    for first in range(0, rows, BLOCK):
        n = min(BLOCK, rows - first)
        found = centres[source.integers(200, size=n)] + source.standard_normal((n, DIMENSIONS), dtype="f4")
        yield found / np.linalg.norm(found, axis=1, keepdims=True)


def questions() -> list[str]:
    """In pgvector's text form."""
    return [str([round(float(x), 5) for x in v]) for v in next(blocks(QUESTIONS, 9))]


#: a row as COPY takes it in binary: for each column its bytes and what numpy makes of it
_COLUMNS: dict[str, tuple[int, list[tuple[Any, ...]]]] = {
    "document_name": (16, [("name", "S16")]),
    "metadata": (3, [("metadata", "V3")]),
    "document_id": (8, [("id", ">i8")]),
    "segment_number": (4, [("number", ">i4")]),
    "segment": (100, [("text", "S100")]),
    "tenant": (4, [("tenant", ">i4")]),
    "segment_embedding": (
        4 + 4 * DIMENSIONS,
        [("dimensions", ">i2"), ("unused", ">i2"), ("vector", ">f4", (DIMENSIONS,))],
    ),
}


def copy(connection: psycopg.Connection[Any], table: str, vectors: np.ndarray, first: int, tenants: Any = None) -> None:
    """Rows ``first`` and following: ten segments a document."""
    columns = {name: column for name, column in _COLUMNS.items() if name != "tenant" or tenants is not None}
    fields: list[tuple[Any, ...]] = [("fields", ">i2")]
    for name, (_, parts) in columns.items():
        fields += [(f"length of {name}", ">i4"), *parts]
    rows = np.zeros(len(vectors), np.dtype(fields))
    numbers = np.arange(first, first + len(vectors))
    rows["fields"] = len(columns)
    for name, (length, _) in columns.items():
        rows[f"length of {name}"] = length
    rows["name"] = np.char.mod("document %07d", numbers // 10)
    rows["metadata"] = np.void(b"\x01{}")
    rows["id"], rows["number"] = numbers // 10, numbers % 10
    text = "Segment %9d, a sentence of about the usual length for a citation"
    rows["text"] = np.char.ljust(np.char.mod(text, numbers), 100, ".")
    if tenants is not None:
        rows["tenant"] = tenants
    rows["dimensions"], rows["vector"] = DIMENSIONS, vectors
    statement = sql.SQL("COPY {} ({}) FROM STDIN WITH (FORMAT BINARY)").format(
        sql.SQL(table), sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    with connection.cursor().copy(statement) as sent:
        sent.write(b"PGCOPY\n\xff\r\n\0" + b"\0" * 8 + rows.tobytes() + b"\xff\xff")


def create_store(connection: psycopg.Connection[Any], name: str) -> None:
    """Without an index of the embeddings."""
    options = json.dumps({"embed_model_id": MODEL, "language": "en", "index": {"type": "none"}})
    connection.execute("SELECT ml_rag.create_store(%s, %s)", (name, options))


def bare(table: str, question: str, kind: str = "none", condition: str = "", columns: str = "") -> str:
    """The kNN statement that pgvector's documentation gives for such an index."""
    of = f"segment_embedding <=> '{question}'"
    if kind == "none":
        return (
            f"SELECT document_name, segment, {of} AS distance{columns} FROM {table} {condition} ORDER BY {of} LIMIT {N}"
        )
    candidates, order = {
        "halfvec": (
            2 * N,
            f"segment_embedding::halfvec({DIMENSIONS}) <=> '{question}'::halfvec({DIMENSIONS})",
        ),
        "binary": (
            400,
            f"binary_quantize(segment_embedding)::bit({DIMENSIONS})"
            f" <~> binary_quantize('{question}'::vector({DIMENSIONS}))",
        ),
    }[kind]
    return (
        f"SELECT document_name, segment, {of} AS distance{columns} FROM"
        f" (SELECT * FROM {table} {condition} ORDER BY {order} LIMIT {candidates}) AS s ORDER BY {of} LIMIT {N}"
    )


def answer(connection: psycopg.Connection[Any], options: str, text: str = "a question") -> dict[str, Any]:
    row = connection.execute("SELECT ml_rag_answer(%s, %s)", (text, options)).fetchone()
    assert row is not None
    found: dict[str, Any] = row[0]
    return found


def options_of(question: str | None, **options: object) -> str:
    """Options of a search without an answer; with a vector, or with a text that the model embeds."""
    given = {"skip_generate": True, "n_citations": N, **options}
    if question is not None:
        given |= {"query_embedding": json.loads(question), "embed_model_id": MODEL}
    return json.dumps(given)


def connect(dsn: str, *, ef_search: int = 40) -> psycopg.Connection[Any]:
    """Statements are not prepared by the client: their vectors stand in them."""
    connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=None)
    connection.execute(f"SET hnsw.ef_search = {ef_search}; SET jit = off; SET client_min_messages = error")
    return connection


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def value(connection: psycopg.Connection[Any], statement: str) -> Any:
    row = connection.execute(statement).fetchone()
    assert row is not None
    return float(row[0]) if isinstance(row[0], Decimal) else row[0]


def medians(calls: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Milliseconds at the median, blocks of ten calls in turn."""
    block = min(10, rounds)
    times = in_turn(calls, rounds - rounds % block, warmup=max(2, min(10, rounds // 3)), block=block)
    return {name: statistics.median(found) for name, found in times.items()}
