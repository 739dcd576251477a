"""``python -m bench.versions --old DSN --new DSN``: the same calls in turn on two versions of ml_rag, each with a
cluster of its own on this machine, whose tables are made here.

Beside the wall time stands the processor time of the backend, which a busy machine disturbs less. Query vectors are
given, so no model server takes part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import psycopg
from pgvector.psycopg import register_vector
from rich.console import Console
from rich.table import Table

from bench import search
from bench.common import machine
from bench.measure import own_megabytes

FILTER = {"lt": 10}
#: sessions of which the first calls are timed
SESSIONS = 5


def _processor_ms(pid: int) -> float:
    """What a process has taken of the processor so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6


@contextmanager
def _connected(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        register_vector(connection)
        yield connection


class Version:
    """One version: a session of it, and the calls."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection
        self.pid = connection.info.backend_pid
        self.of = {name: search._Calls(connection, name) for name in ("bench_abstracts", "bench_segments")}
        self.taken: dict[str, list[tuple[float, float]]] = {}

    def calls(self) -> dict[str, Callable[[int], object]]:
        few, many = self.of["bench_abstracts"], self.of["bench_segments"]
        kinds: dict[str, dict[str, Any]] = {
            "by meaning": {},
            "by words": {"keyword_search": True, "semantic_search": False},
            "hybrid": {"keyword_search": True},
        }
        rows = f"{search.SEGMENTS:,} rows"
        calls: dict[str, Callable[[int], object]] = {"bare kNN, 5,000 rows": few.bare}
        calls |= {f"{kind}, 5,000 rows": lambda i, o=options: few.search(i, **o) for kind, options in kinds.items()}  # type: ignore[misc]
        calls |= {f"bare kNN, {rows}": many.bare}
        calls |= {f"{kind}, {rows}": lambda i, o=options: many.search(i, **o) for kind, options in kinds.items()}  # type: ignore[misc]
        for column, what in (("indexed_share", "index"), ("share", "no index")):
            for kind in ("by words", "hybrid"):
                options = kinds[kind] | {"filters": {column: FILTER}}
                calls[f"{kind}, 1 % pass, {what}"] = lambda i, o=options: many.search(i, **o)  # type: ignore[misc]
        calls["discovery"] = lambda _: self.connection.execute(
            "SELECT count(*) FROM ml_rag.discover(ARRAY['bench_abstracts'])"
        ).fetchone()
        calls["UPDATE of another column, 100 rows"] = lambda i: self.connection.execute(
            "UPDATE bench_abstracts SET share = share WHERE document_id BETWEEN %s AND %s", (20 * i, 20 * i + 99)
        )
        return calls

    def take(self, name: str, call: Callable[[int], object], i: int) -> None:
        before, began = _processor_ms(self.pid), time.perf_counter()
        call(i)
        wall = 1000 * (time.perf_counter() - began)
        self.taken.setdefault(name, []).append((wall, _processor_ms(self.pid) - before))

    def medians(self, name: str) -> tuple[float, float]:
        wall, processor = zip(*self.taken[name], strict=True)
        return statistics.median(wall), statistics.median(processor)


def _first(dsn: str) -> tuple[float, float]:
    """The first hybrid search of new sessions over all segments: milliseconds, and MB of memory of the session's own
    afterwards."""
    wall, memory = [], []
    for i in range(SESSIONS):
        with _connected(dsn) as connection:
            calls = search._Calls(connection, "bench_segments")
            began = time.perf_counter()
            calls.search(i, keyword_search=True)
            wall.append(1000 * (time.perf_counter() - began))
            memory.append(own_megabytes(connection.info.backend_pid))
    return statistics.median(wall), statistics.median(memory)


@click.command(help=__doc__)
@click.option("--old", required=True, help="A DSN of the older version's cluster: a superuser, a database to work in.")
@click.option("--new", required=True, help="The same of the newer version.")
@click.option("--rounds", type=click.IntRange(10), default=200, show_default=True)
def main(old: str, new: str, rounds: int) -> None:
    for dsn in (old, new):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS ml_rag CASCADE")
        search.prepare(dsn)
    console = Console(width=140)
    with ExitStack() as stack:
        versions = [Version(stack.enter_context(_connected(dsn))) for dsn in (old, new)]
        for name in versions[0].calls():
            for first in range(-10, rounds, 10):  # the first ten warm up
                for version in versions if first % 20 else versions[::-1]:
                    call = version.calls()[name]
                    for i in range(first, first + 10):
                        if first < 0:
                            call(i + 10)
                        else:
                            version.take(name, call, i)
        table = Table("", "wall ms: old", "new", "processor ms: old", "new", "new / old", "new / bare")
        bare = 1.0
        for name in versions[0].calls():
            (old_wall, old_ms), (new_wall, new_ms) = (version.medians(name) for version in versions)
            bare = new_ms if name.startswith("bare") else bare
            row = (f"{old_wall:.2f}", f"{new_wall:.2f}", f"{old_ms:.2f}", f"{new_ms:.2f}", f"{new_ms / old_ms:.2f}")
            table.add_row(name, *row, f"{new_ms / bare:.2f}")
    (old_first, old_memory), (new_first, new_memory) = _first(old), _first(new)
    table.add_row("first hybrid search of a session", f"{old_first:.1f}", f"{new_first:.1f}")
    table.add_row("memory of that session, MB", f"{old_memory:.1f}", f"{new_memory:.1f}")
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
