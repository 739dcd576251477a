"""A store of four partitions, here and on four clusters of this machine, beside one table of the same rows.

``PG_CONFIG=… python -m bench.shards [rows]`` makes the clusters with the helpers of the tests
and a fake model server.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from bench import corpus
from bench.measure import in_turn, own_megabytes
from support.private_cluster import private_cluster
from support.servers import running_server
from support.shards import Shard, attach, shards

DIMENSIONS, ROUNDS = 384, 60
COLUMNS = "document_name, metadata, document_id, segment_number, segment, segment_embedding"
CALLS: dict[str, dict[str, Any]] = {
    "by meaning": {},
    "by words": {"semantic_search": False, "keyword_search": True},
    "hybrid": {"keyword_search": True},
    "hybrid, neighbours": {"keyword_search": True, "retrieval_options": {"segment_overlap": 1}},
    "by meaning, exact": {"index_options": {"exact": True}},
}


def fill(connection: psycopg.Connection, rows: int, vectors: np.ndarray) -> None:
    with connection.cursor().copy(f"COPY one ({COLUMNS}) FROM STDIN") as copy:
        for i, text in enumerate(corpus.segments(rows)):
            copy.write_row((f"document {i // 10}", "{}", i // 10, i % 10, text, str(vectors[i].tolist())))


def main(rows: int) -> None:
    random = np.random.default_rng(3)
    vectors = random.normal(size=(rows, DIMENSIONS)).round(3)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        running_server(
            socket=Path(folder) / "fake.sock",
            config=f'[server]\nsocket_mode = "0666"\n[models.bench]\nengine = "fake"\ntask = "embed"\n'
            f"dimensions = {DIMENSIONS}\n",
            models_dir=Path(folder) / "none",
        ) as server,
    ):
        place = Path(folder)
        place.chmod(0o711)
        address = f"unix:{server.socket}"
        (place / "coordinator").mkdir(mode=0o711)
        with (
            private_cluster(place / "coordinator", durable=False) as cluster,
            shards(place, address, 4) as found,
            psycopg.connect(cluster.dsn, autocommit=True) as owner,
        ):
            run(owner, found, address, rows, vectors)


def run(owner: psycopg.Connection, found: list[Shard], address: str, rows: int, vectors: np.ndarray) -> None:
    owner.execute("CREATE EXTENSION ml_rag CASCADE; CREATE EXTENSION postgres_fdw")
    owner.execute("SELECT ml_rag.configure('model_server', %s)", (address,))
    options = {"embed_model_id": "bench", "language": "en", "index": {"type": "hnsw"}}
    owner.execute("SELECT ml_rag.create_store('public.one', %s)", (json.dumps(options | {"index": {"type": "none"}}),))
    fill(owner, rows, vectors)
    owner.execute("SELECT ml_rag.index_store('one', 'COSINE', '{\"type\": \"hnsw\"}')")
    for name in ("parts", "shards"):
        owner.execute("SELECT ml_rag.create_store(%s, %s)", (f"public.{name}", json.dumps(options | {"partitions": 4})))
        owner.execute(f"INSERT INTO {name} SELECT * FROM one")
        owner.execute(f"SELECT ml_rag.index_store('{name}')")
    for i, shard in enumerate(found):
        info = psycopg.conninfo.conninfo_to_dict(shard.dsn)
        owner.execute(
            f"CREATE SERVER {shard.server} FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '{info['host']}',"
            f" port '{info['port']}', dbname 'postgres', extensions 'vector, ml_rag', parallel_commit 'true',"
            " options '-c hnsw.ef_search=40 -c hnsw.iterative_scan=relaxed_order -c enable_seqscan=off -c jit=off')"
        )
        owner.execute(f"CREATE USER MAPPING FOR postgres SERVER {shard.server} OPTIONS (user 'postgres')")
        with shard.connect("loader") as loader:
            created = json.dumps(options | {"shard": True})
            loader.execute("SELECT ml_rag.create_store('public.shards', %s)", (created,))
            loader.execute("GRANT SELECT ON shards TO ml_rag_user")
        attach(owner, "shards", i, shard)
        with shard.connect() as other:
            other.execute("SELECT ml_rag.index_store('shards')")
    with psycopg.connect(owner.info.dsn, autocommit=True) as asker:
        measure(asker, found, vectors)


def asking(asker: psycopg.Connection, vectors: np.ndarray) -> Callable[[str, int, dict[str, Any]], Any]:
    """Citations of a store to question number i, with a query vector near one of the vectors."""
    random = np.random.default_rng(5)
    questions = corpus.questions()
    queries = (vectors[random.integers(len(vectors), size=200)] + random.normal(size=(200, DIMENSIONS)) * 0.7).round(3)

    def ask(name: str, i: int, options: dict[str, Any]) -> Any:
        given = {"vector_store": [f"public.{name}"], "skip_generate": True, "n_citations": 10, **options}
        given["query_embedding"] = queries[i % 200].tolist()
        row = asker.execute(
            "SELECT ml_rag_answer(%s, %s)", (questions[i % len(questions)], json.dumps(given))
        ).fetchone()
        assert row is not None
        return row[0]["citations"]

    return ask


def measure(asker: psycopg.Connection, found: list[Shard], vectors: np.ndarray) -> None:
    ask = asking(asker, vectors)

    for call, options in CALLS.items():
        same = sum(json.dumps(ask("one", i, options)) == json.dumps(ask("shards", i, options)) for i in range(20))
        times = in_turn(
            {
                name: (lambda i, name=name, options=options: ask(name, i, options))
                for name in ("one", "parts", "shards")
            },  # type: ignore[misc]
            ROUNDS,
        )
        p50 = {name: statistics.median(values) for name, values in times.items()}
        print(
            f"{call:20} one {p50['one']:7.2f} ms  partitions {p50['parts']:7.2f} ({p50['parts'] / p50['one']:.2f} x)"
            f"  shards {p50['shards']:7.2f} ({p50['shards'] / p50['one']:.2f} x)  same answers {same} of 20",
            flush=True,
        )
    print(f"backend here {own_megabytes(asker.info.backend_pid):.1f} MB of its own")
    for shard in found:
        with shard.connect() as other:
            pids = other.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'postgres_fdw' AND pid <> pg_backend_pid()"
            ).fetchall()
        print(
            shard.server, len(pids), "connections", [round(own_megabytes(pid), 1) for (pid,) in pids], "MB of their own"
        )
    print(subprocess.run(["uptime"], capture_output=True, text=True, check=True).stdout.strip())


if __name__ == "__main__":
    os.environ.setdefault("ML_RAG_TEST_PG_CONFIG", os.environ.get("PG_CONFIG", ""))
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
