"""What a keyword index costs to build and to keep, against PostgreSQL's own to_tsvector over the same rows.

Both are taken in turn, as wall time and as processor time of the backend and its parallel workers: on a machine that
does other work besides, only the latter means much. ``python -m bench.keyword_build --rows 1000000`` measures alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import psycopg
from psycopg import sql
from rich.console import Console

from bench import corpus
from bench.common import own_database, print_table
from bench.measure import Figure, own_megabytes

COLUMNS = (
    "document_name text NOT NULL, document_id bigint, segment_number integer, segment text NOT NULL,"
    " segment_embedding vector(3), PRIMARY KEY (document_id, segment_number)"
)
COPY = "COPY {} (document_name, document_id, segment_number, segment) FROM STDIN"
FLOOR = "SELECT count(to_tsvector('english', segment)) FROM {}"
ENABLE = 'SELECT ml_rag.enable_keyword_search({}, \'{{"language": "en"}}\')'
INSERTS = 400
MEMORY_MB = 256
_TICKS = os.sysconf("SC_CLK_TCK")


def _processor_time(pid: int) -> float:
    """Seconds of a process and of those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / _TICKS


class _Server:
    """The processes behind a connection; parallel workers are children of the postmaster."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.backend = connection.info.backend_pid
        stat = Path(f"/proc/{self.backend}/stat").read_text()
        self._postmaster = int(stat.rsplit(")", 1)[1].split()[1])

    def seconds(self) -> float:
        """Of the backend, and of all workers that have ended."""
        return _processor_time(self.backend) + _processor_time(self._postmaster)

    @contextlib.contextmanager
    def peak(self) -> Iterator[list[float]]:
        """The most memory of its own (MB) that the backend has meanwhile, looked at 20 times a second."""
        found, done = [0.0], threading.Event()

        def look() -> None:
            while not done.wait(0.05):
                found[0] = max(found[0], own_megabytes(self.backend))

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield found
        finally:
            done.set()
            thread.join()


def _took(server: _Server, call: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of processors."""
    wall, used = time.perf_counter(), server.seconds()
    call()
    return time.perf_counter() - wall, server.seconds() - used


def _median(times: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(wall for wall, _ in times), statistics.median(used for _, used in times)


def measure(dsn: str, rows: int, rounds: int = 2) -> list[Figure]:
    """All figures over ``rows`` segments of about 100 words."""
    texts = list(corpus.segments(rows))
    with psycopg.connect(dsn, autocommit=True) as connection:
        server = _Server(connection)

        def run(statement: str, table: str) -> None:
            connection.execute(sql.SQL(statement).format(sql.Identifier(table)))

        def copy(table: str) -> None:
            with connection.cursor().copy(sql.SQL(COPY).format(sql.Identifier(table))) as sent:
                for i, text in enumerate(texts):
                    sent.write_row((f"document {i // 10}", i // 10, i % 10, text))

        def create(table: str) -> None:
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(table)))
            connection.execute(sql.SQL("CREATE TABLE {} (" + COLUMNS + ")").format(sql.Identifier(table)))

        def enable(table: str) -> None:
            connection.execute(sql.SQL(ENABLE).format(sql.Literal(table)))

        figures = []
        times: dict[str, list[tuple[float, float]]] = {"copy": [], "copy floor": [], "build": [], "build floor": []}
        peaks: dict[str, float] = {}
        for _ in range(rounds):
            create("bench_plain")
            plain = _took(server, lambda: copy("bench_plain"))
            words = _took(server, lambda: run(FLOOR, "bench_plain"))
            times["copy floor"].append((plain[0] + words[0], plain[1] + words[1]))
            create("bench_keyword")
            enable("bench_keyword")
            with server.peak() as peak:
                times["copy"].append(_took(server, lambda: copy("bench_keyword")))
            peaks["copy"] = peak[0]
        connection.execute("VACUUM ANALYZE bench_keyword")
        for _ in range(rounds):
            connection.execute("SELECT ml_rag.disable_keyword_search('bench_keyword')")
            times["build floor"].append(_took(server, lambda: run(FLOOR, "bench_keyword")))
            with server.peak() as peak:
                times["build"].append(_took(server, lambda: enable("bench_keyword")))
            peaks["build"] = peak[0]
        for name, what, floor in (
            ("build", f"keyword index on {rows:,} segments", "to_tsvector of all"),
            ("copy", f"COPY of {rows:,} segments with keyword index", "COPY, then to_tsvector of all"),
        ):
            for i, kind in enumerate(("", ", processor time")):
                ours, least = _median(times[name])[i], _median(times[f"{name} floor"])[i]
                figures.append(Figure(f"{what}{kind}", "s", ours, floor, least, "≤ 2 ×", ours <= 2 * least))
        figures += [
            Figure(f"memory of the backend, {what}", "MB", peaks[name], "", None, f"≤ {MEMORY_MB} MB",
                   peaks[name] <= MEMORY_MB)
            for name, what in (("build", "keyword index"), ("copy", "COPY with keyword index"))
        ]  # fmt: skip
        figures.append(_insert(connection, texts[0], rows))
        connection.execute("DROP TABLE bench_plain, bench_keyword")
        return figures


def _insert(connection: psycopg.Connection[Any], text: str, rows: int) -> Figure:
    numbers = itertools.count(rows)
    times: dict[str, list[float]] = {"bench_keyword": [], "bench_plain": []}
    for _ in range(INSERTS // 50):
        for table, found in times.items():
            statement = sql.SQL("INSERT INTO {} VALUES ('new', %s, 0, %s)").format(sql.Identifier(table))
            for _ in range(50):
                start = time.perf_counter()
                connection.execute(statement, (next(numbers), text))
                found.append((time.perf_counter() - start) * 1000)
    ours, least = (statistics.median(found) for found in times.values())
    return Figure("inserting one segment with keyword index, p50", "ms", ours, "without", least, "≤ 5 ×",
                  ours <= 5 * least)  # fmt: skip


@click.command(help=__doc__)
@click.option("--dsn", envvar=["ML_RAG_BENCH_DSN", "ML_RAG_TEST_DSN"], required=True)
@click.option("--rows", type=click.IntRange(1000), default=100_000, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(dsn: str, rows: int, rounds: int, output: Path | None) -> None:
    figures = measure(own_database(dsn), rows, rounds)
    print_table(figures, Console(width=200))
    if output is not None:
        output.write_text(json.dumps([{**asdict(f), "ratio": f.ratio} for f in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
