"""``make load-test``: prints the table, writes bench/out/load.json, .md and .svg; ends with 1 where a demand fails.

Needs a server with the extension and a model server with the real models; ``make load-test`` starts the private ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import click
import psycopg
from rich.console import Console
from rich.table import Table

from bench.common import machine
from bench.load import database, memory, picture, rates, report
from bench.load.sessions import ANSWER_TOKENS, LOADING, Call, Plan, hurry, readable_folder, shares, work

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench" / "out"
#: sessions of one process of ours; those that cancel have one to themselves, so that nothing else makes them late
SESSIONS_A_PROCESS = 16
PROGRESS_SECONDS = 10.0
WARMUP_SECONDS = 60.0
#: how many times that the warm-up may take where sessions have not got through their first calls
LONGEST_WARMUP = 5


def processes(counts: dict[str, int]) -> list[list[tuple[str, int]]]:
    """The sessions of each process: kind and number."""
    loading = 0
    others: list[tuple[str, int]] = []
    cancelling: list[tuple[str, int]] = []
    for kind, count in counts.items():
        for n in range(count):
            if kind in LOADING:
                others.append((kind, loading))
                loading += 1
            else:
                (cancelling if kind == "cancel" else others).append((kind, n))
    parts = -(-len(others) // SESSIONS_A_PROCESS)
    return [cancelling, *(others[i::parts] for i in range(parts))]


class Run:
    """One load test in progress."""

    def __init__(self, dsn: str, counts: dict[str, int], console: Console, server: int | None) -> None:
        self.calls: list[Call] = []
        self._dsn, self._counts, self._console, self._server = dsn, counts, console, server
        self._backends: dict[str, int] = {}
        self._ready = self._warm = 0
        self._shown = 0.0
        #: the start, the end of the warm-up, the end: of ``time.monotonic``
        self.began = self.begin = self.end = 0.0
        self._at_first: dict[str, float] = {}
        self._at_last: dict[str, float] = {}
        self.watch = memory.Watch(self._pids)

    def _pids(self) -> dict[str, int]:
        pids = dict(self._backends)
        if self._server is not None:
            pids["model server"] = self._server
            pids |= {f"parser {pid}": pid for pid in memory.children(self._server)}
        return pids

    def go(self, warmup: float, seconds: float, pause: float) -> None:
        """All sessions until the time is over and their last calls are done."""
        context = multiprocessing.get_context("spawn")
        until = context.Value("d", 0.0)
        pipes: list[Pipe] = []
        running = []
        loading = sum(self._counts[kind] for kind in LOADING)
        questions, paragraphs = database.questions(), database.paragraphs()
        with readable_folder(loading) as folder:
            for sessions in processes(self._counts):
                ours, theirs = context.Pipe(duplex=False)
                plan = Plan(self._dsn, sessions, until, pause, folder, questions, paragraphs)
                process = context.Process(target=work, args=(plan, theirs), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                running.append(process)
            while self._ready < sum(self._counts.values()):
                self._receive(pipes)
            self.began = self._shown = time.monotonic()
            until.value = math.inf
            self.watch.start()
            while time.monotonic() < self.began + warmup or self._is_cold(warmup):
                self._receive(pipes)
                self._progress()
            self.begin = time.monotonic()
            self.end = until.value = self.begin + seconds
            self._at_first = self._moment()
            self._collect(pipes)
            self.watch.stop()
            for process in running:
                process.join()

    def _is_cold(self, warmup: float) -> bool:
        """Whether a session has not made its first calls yet; one that takes for ever is not waited for."""
        return self._warm < sum(self._counts.values()) and time.monotonic() < self.began + LONGEST_WARMUP * warmup

    def _receive(self, pipes: list[Pipe]) -> None:
        """What the processes have to say, within a second."""
        for pipe in wait(pipes, timeout=1):
            assert isinstance(pipe, Pipe)
            try:
                message = pipe.recv()
            except EOFError:
                raise click.ClickException("a process of the load test died; its error is above") from None
            if message[0] == "calls":
                self.calls += message[1]
            elif message[0] == "backend":
                _, pid, kind = message
                self._backends[f"backend {pid} {kind}"] = pid
            elif message[0] == "ready":
                self._ready += 1
            elif message[0] == "warm":
                self._warm += 1
            else:
                pipes.remove(pipe)

    def _collect(self, pipes: list[Pipe]) -> None:
        while pipes:
            if time.monotonic() >= self.end and not self._at_last:
                self._at_last = self._moment()
            self._receive(pipes)
            self._progress()

    def _moment(self) -> dict[str, float]:
        worked, had = memory.busy_seconds()
        shares = {name: memory.proportional(pid) for name, pid in self._pids().items()}
        backends = sum(share for name, share in shares.items() if name.startswith("backend"))
        return {"worked": worked, "had": had, "backends": backends, "model server": shares.get("model server", 0.0)}

    def moments(self) -> dict[str, Any]:
        """How busy the processors were while it was measured, and Pss in megabytes then and at the end."""
        first, last = self._at_first, self._at_last
        busy = (last["worked"] - first["worked"]) / max(last["had"] - first["had"], 0.01)
        return {"busy": busy, "pss": {name: [first[name], last[name]] for name in ("backends", "model server")}}

    def _progress(self) -> None:
        """A line every ten seconds."""
        now = time.monotonic()
        if (span := now - self._shown) < PROGRESS_SECONDS:
            return
        self._shown = now
        lately = Counter(call.kind for call in self.calls if call.began + call.seconds > now - span)
        errors = sum(call.error is not None for call in self.calls)
        # those of the warm-up are not measured: a session's first calls load modules
        since = self.begin or self.began
        cancels = [c.seconds for c in self.calls if c.kind.startswith("cancel") and not c.error and c.began >= since]
        rates = ", ".join(
            f"{kind} {sum(n for k, n in lately.items() if k.split(':')[0] == kind) / span:.1f}/s"
            for kind in self._counts
        )
        largest = max((self.watch.last(name) for name in self._backends), default=0.0)
        server = self.watch.last("model server")
        slowest = 1000 * max(cancels, default=0)
        self._console.print(
            f"{now - self.began:4.0f} s{'' if self.begin else ' (warming up)'}  {rates}; {errors} errors; "
            f"cancelling takes up to {slowest:.0f} ms; largest backend {largest:.0f} MB, model server {server:.0f} MB",
            highlight=False,
        )


def show(figures: dict[str, Any], judged: list[report.Demand], console: Console) -> None:
    for head, *rows in (report.table(figures), [("demand", "found", "met"), *_judgements(judged)]):
        table = Table(box=None, pad_edge=False)
        for n, name in enumerate(head):
            table.add_column(name, justify="right" if n and len(head) > 3 else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()


def _judgements(judged: list[report.Demand]) -> Iterator[tuple[str, str, str]]:
    for demand in judged:
        yield demand.what, demand.found, "yes" if demand.met else "NO"


@click.command(help=__doc__)
@click.option("--dsn", envvar=["ML_RAG_BENCH_DSN", "ML_RAG_TEST_DSN"], required=True)
@click.option("--minutes", type=click.FloatRange(0.2), default=5.0, show_default=True, envvar="LOAD_MINUTES")
@click.option("--sessions", type=click.IntRange(8), default=64, show_default=True, envvar="LOAD_SESSIONS")
@click.option("--rows", type=click.IntRange(1000), default=database.ROWS, show_default=True, envvar="LOAD_ROWS")
@click.option("--docs", is_flag=True, envvar="LOAD_DOCS", help="Write docs/load.md and docs/load.svg too.")
@click.option(
    "--pause", type=click.FloatRange(0), default=0.5, show_default=True, envvar="LOAD_PAUSE",
    help="Mean seconds between two calls of a session.",
)  # fmt: skip
def main(dsn: str, minutes: float, sessions: int, rows: int, docs: bool, pause: float) -> None:
    console = Console(width=220)
    counts = shares(sessions)
    warmup = min(WARMUP_SECONDS, 12 * minutes)
    console.print(f"preparing database {database.DATABASE}: {rows} segments, their indexes, the sample documents …")
    with psycopg.connect(dsn, autocommit=True) as connection:
        limit = connection.execute(
            "SELECT current_setting('max_connections')::integer, current_setting('server_version'),"
            " (SELECT value FROM ml_rag.setting WHERE name = 'model_server')"
        ).fetchone()
    assert limit is not None
    if limit[0] < sessions + 8:
        raise click.ClickException(f"max_connections is {limit[0]}: too few for {sessions} sessions")
    own = database.make(dsn, rows, sum(counts[kind] for kind in LOADING))

    console.print(f"{sessions} sessions: {', '.join(f'{n} {kind}' for kind, n in counts.items())}", highlight=False)
    run = Run(own, counts, console, memory.server_of(limit[2]))
    hurry()
    run.go(warmup, 60 * minutes, pause)
    measured = [call for call in run.calls if call.began + call.seconds >= run.begin and call.began < run.end]
    errors = [call for call in run.calls if call.error is not None]
    figures: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "postgres": limit[1].split()[0],
        "seconds": 60 * minutes,
        "warmup": run.begin - run.began,
        "sessions": counts,
        "minutes": f"{minutes:g}",
        "answer_tokens": ANSWER_TOKENS,
        "rows": rows,
        "pause": pause,
        **run.moments(),
        "latencies": report.latencies(measured),
        "errors": Counter(f"{call.kind}: {call.error}"[:300] for call in errors).most_common(20),
        "memory": report.memory(run.watch.samples, run.begin, run.end),
    }
    judged = report.demands(figures, errors)
    console.print()
    show(figures, judged, console)
    for error, count in figures["errors"]:
        console.print(f"{count} x {error}", highlight=False)
    drawn = picture.draw(figures, measured, run.watch.samples, run.began, run.begin)
    write(figures, judged, drawn, docs, console)
    sys.exit(0 if all(demand.met for demand in judged) else 1)


def write(figures: dict[str, Any], judged: list[report.Demand], drawn: str, docs: bool, console: Console) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    found = {**figures, "demands": [dataclasses.asdict(demand) for demand in judged]}
    (OUT / "load.json").write_text(json.dumps(found, indent=1) + "\n")
    for folder in [OUT, ROOT / "docs"] if docs else [OUT]:
        (folder / "load.md").write_text(report.page(figures, judged, rates.kept(rates.DOCUMENT.read_text())))
        (folder / "load.svg").write_text(drawn)
        console.print(f"written: {folder / 'load.md'}, {folder / 'load.svg'}")


if __name__ == "__main__":
    main()
