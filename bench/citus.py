"""A store distributed over one, two and four workers of Citus on this machine, beside one table of the same rows.

``PG_CONFIG=… python -m bench.citus [rows]`` makes the clusters with the helpers of the tests and a fake model server;
``python -m bench.citus vectorizer [rows]`` fills a table with a vectorizer, with the model in the folder ML_RAG_MODELS.
As all share the processors of one machine, the work of each counts: what its processes take of a processor.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psycopg

from bench import corpus
from bench.measure import in_turn
from bench.retrieval import MODEL
from bench.shards import CALLS, DIMENSIONS, asking, fill
from support.citus import citus
from support.private_cluster import PG_CONFIG, PrivateCluster
from support.processes import Background, children
from support.servers import running_server

ROUNDS = 40
_TICK = os.sysconf("SC_CLK_TCK")


def work(process: int) -> float:
    """Seconds of a processor that a process and its children, such as the sessions of a cluster, have taken."""
    ticks = 0
    for pid in (process, *children(process)):
        with contextlib.suppress(FileNotFoundError):  # one that has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICK


def main(rows: int) -> None:
    random = np.random.default_rng(3)
    vectors = random.normal(size=(rows, DIMENSIONS)).round(3)
    for workers in (1, 2, 4):
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
            with (
                citus(place, f"unix:{server.socket}", workers) as nodes,
                psycopg.connect(nodes[0].dsn, autocommit=True) as owner,
            ):
                run(owner, nodes, rows, vectors)


def run(owner: psycopg.Connection, nodes: list[PrivateCluster], rows: int, vectors: np.ndarray) -> None:
    options = json.dumps({"embed_model_id": "bench", "language": "en", "index": {"type": "none"}})
    for name in ("one", "shards"):
        owner.execute("SELECT ml_rag.create_store(%s, %s)", (f"public.{name}", options))
    fill(owner, rows, vectors)
    owner.execute("INSERT INTO shards SELECT * FROM one")
    owner.execute("SELECT ml_rag.distribute_store('shards', %s)", (json.dumps({"shard_count": len(nodes) - 1}),))
    for name in ("one", "shards"):
        owner.execute(f"SELECT ml_rag.index_store('{name}', 'COSINE', '{{\"type\": \"hnsw\"}}')".encode())
    with psycopg.connect(nodes[0].dsn, autocommit=True) as asker:
        measure(asker, nodes, vectors)


def measure(asker: psycopg.Connection, nodes: list[PrivateCluster], vectors: np.ndarray) -> None:
    ask = asking(asker, vectors)

    for call, options in CALLS.items():
        same = sum(ask("one", i, options) == ask("shards", i, options) for i in range(20))
        times = in_turn(
            {
                name: (lambda i, name=name, options=options: ask(name, i, options))  # type: ignore[misc]
                for name in ("one", "shards")
            },
            ROUNDS,
        )
        spent = {}
        for name in ("one", "shards"):
            before = [work(node.postmaster) for node in nodes]
            for i in range(ROUNDS):
                ask(name, i, options)
            spent[name] = [
                1000 * (work(node.postmaster) - was) / ROUNDS for node, was in zip(nodes, before, strict=True)
            ]
        one, shards = (statistics.median(times[name]) for name in ("one", "shards"))
        print(
            f"{len(nodes) - 1} workers, {call}: {one:.1f} ms, {shards / one:.1f} x; work {spent['one'][0]:.1f} ms,"
            f" here {spent['shards'][0]:.1f} ms, a worker {statistics.mean(spent['shards'][1:]):.1f} ms;"
            f" {same} of 20 the same",
            flush=True,
        )


def vectorizer(rows: int) -> None:
    """What each server does for the rows of a table that are embedded, by one run and by two at the same time."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        running_server(
            socket=Path(folder) / "model.sock",
            fake_models=False,
            config='[server]\nsocket_mode = "0666"\n',
            models_dir=Path(os.environ["ML_RAG_MODELS"]),
        ) as server,
    ):
        place = Path(folder)
        place.chmod(0o711)
        with (
            citus(place, f"unix:{server.socket}", 2) as nodes,
            psycopg.connect(nodes[0].dsn, autocommit=True) as owner,
        ):
            for name, runs in (("plain", 1), ("plain", 2), ("items", 1), ("items", 2)):
                embed(owner, name, runs, rows, [*(node.postmaster for node in nodes), server.process.pid])


def embed(owner: psycopg.Connection, name: str, runs: int, rows: int, processes: list[int]) -> None:
    """``plain`` is a table of the coordinator's, ``items`` lies on the workers."""
    options = json.dumps({"columns": "{body}", "embed_model_id": MODEL, "index": {"type": "none"}})
    owner.execute(f"CREATE TABLE {name} (id integer PRIMARY KEY, body text)".encode())
    owner.execute("SELECT ml_rag.create_vectorizer(%s, %s)", (name, options))
    if name == "items":
        owner.execute("SELECT ml_rag.distribute_store('items')")
    with owner.cursor().copy(f"COPY {name} (id, body) FROM STDIN".encode()) as copy:
        for row in enumerate(corpus.segments(rows)):
            copy.write_row(row)

    def run() -> None:
        with psycopg.connect(owner.info.dsn, autocommit=True) as session:
            session.execute("CALL ml_rag.run_vectorizer(%s)", (name,))
            # before the session ends, and what it has taken is no longer told
            arrived.wait()
            leave.wait()

    arrived, leave = threading.Barrier(runs + 1), threading.Event()
    before, began = [work(process) for process in processes], time.monotonic()
    calls = [Background(run) for _ in range(runs)]
    arrived.wait()
    seconds = time.monotonic() - began
    spent = [work(process) - was for process, was in zip(processes, before, strict=True)]
    leave.set()
    for call in calls:
        call.result()
    here, first, second, model = (1000 * taken / rows for taken in spent)
    assert owner.execute(f"SELECT count(segment_embedding) FROM {name}".encode()).fetchone() == (rows,)
    print(
        f"{name}, {runs} runs: {rows / seconds:.0f} rows/s; work of a row: here {here:.2f} ms,"
        f" the workers {first:.2f} and {second:.2f} ms, the model server {model:.1f} ms",
        flush=True,
    )
    owner.execute(f"DROP TABLE IF EXISTS {name}, {name}_calls".encode())


if __name__ == "__main__":
    os.environ.setdefault(PG_CONFIG, os.environ["PG_CONFIG"])
    subprocess.run([os.environ["PG_CONFIG"], "--version"], check=True)
    arguments = sys.argv[1:]
    if arguments[:1] == ["vectorizer"]:
        vectorizer(int(arguments[1]) if arguments[1:] else 1000)
    else:
        main(int(arguments[0]) if arguments else 3000)
