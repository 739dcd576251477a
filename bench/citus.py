"""A store distributed over one, two and four workers of Citus on this machine, beside one table of the same rows.

``PG_CONFIG=… python -m bench.citus [rows]`` makes the clusters with the helpers of the tests and a fake model server.
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
from pathlib import Path

import numpy as np
import psycopg

from bench.measure import in_turn
from bench.shards import CALLS, DIMENSIONS, asking, fill
from support.citus import citus
from support.private_cluster import PG_CONFIG, PrivateCluster
from support.processes import children
from support.servers import running_server

ROUNDS = 40
_TICK = os.sysconf("SC_CLK_TCK")


def work(node: PrivateCluster) -> float:
    """Seconds of a processor that the sessions of a cluster have taken."""
    ticks = 0
    for pid in children(node.postmaster):
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
            before = [work(node) for node in nodes]
            for i in range(ROUNDS):
                ask(name, i, options)
            spent[name] = [1000 * (work(node) - was) / ROUNDS for node, was in zip(nodes, before, strict=True)]
        one, shards = (statistics.median(times[name]) for name in ("one", "shards"))
        print(
            f"{len(nodes) - 1} workers, {call}: {one:.1f} ms, {shards / one:.1f} x; work {spent['one'][0]:.1f} ms,"
            f" here {spent['shards'][0]:.1f} ms, a worker {statistics.mean(spent['shards'][1:]):.1f} ms;"
            f" {same} of 20 the same",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault(PG_CONFIG, os.environ["PG_CONFIG"])
    subprocess.run([os.environ["PG_CONFIG"], "--version"], check=True)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3000)
