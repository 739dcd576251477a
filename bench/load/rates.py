"""``make load-rates``: searches that come at a fixed rate, whether earlier ones are done or not, beside other work.

Two sessions have answers generated and one loads documents all the time; first alone, then beside more and more
searches. The time of a search counts from the moment when it was due: one that waits for a session has waited. Writes
bench/out/load_rates.json, and with --docs the table of docs/load.md.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import psycopg
from rich.console import Console

from bench.common import machine
from bench.load import database
from bench.load.report import milliseconds, percentile
from bench.load.sessions import Call, Plan, Session, WrongAnswer, hurry, readable_folder, work

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench" / "out" / "load_rates.json"
DOCUMENT = ROOT / "docs" / "load.md"
MARK, END = "<!-- written by bench/load: rates -->", "<!-- end -->"
RATES = (0, 2, 5, 10, 20)
#: the calls that run next to the searches
BESIDE = [("answer", 0), ("answer", 1), ("load documents", 0)]
#: sessions that search; where all are busy, a search waits for one
SESSIONS = 32
WARMUP_SECONDS = 300
#: demands on a search at DEMANDED a second: seconds; the share that answers and loads may lose to it
DEMANDED, P50, P99, LOST = 5, 0.06, 0.3, 0.1


def overlap(calls: Iterable[Call], kind: str, begin: float, end: float) -> float:
    """How many calls of a kind fall into a span, those that reach beyond it by their part in it."""
    return sum(
        max(0.0, min(end, call.began + call.seconds) - max(begin, call.began)) / max(call.seconds, 1e-9)
        for call in calls
        if call.kind == kind and call.error is None
    )


async def at_rate(sessions: Sequence[Any], rate: float, seconds: float) -> list[Call]:
    """Searches, one every 1 / ``rate`` seconds; every other one hybrid."""
    free: asyncio.Queue[Any] = asyncio.Queue()
    for session in sessions:
        free.put_nowait(session)
    begin = time.monotonic() + 0.1

    async def search(n: int) -> Call:
        due = begin + n / rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        session = await free.get()
        error = None
        try:
            await (session._hybrid_search() if n % 2 else session._semantic_search())
        except (psycopg.Error, WrongAnswer) as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            free.put_nowait(session)
        return Call("search", due, time.monotonic() - due, error)

    return list(await asyncio.gather(*(search(n) for n in range(int(rate * seconds)))))


async def measure(plan: Plan, rates: Sequence[float], seconds: float, console: Console) -> list[dict[str, Any]]:
    """Of each rate: when it was measured, and its searches."""
    sessions = [Session(plan, "semantic search", n, SimpleNamespace(send=lambda _: None)) for n in range(SESSIONS)]  # type: ignore[arg-type]
    for session in sessions:
        await session._connect()
    # what a session's first calls load
    await asyncio.gather(*(session._hybrid_search() for session in sessions))
    found = []
    for rate in rates:
        begin = time.monotonic()
        calls = await at_rate(sessions, rate, seconds) if rate else await asyncio.sleep(seconds, [])
        found.append({"rate": rate, "begin": begin, "end": time.monotonic(), "calls": calls})
        console.print(f"{rate:g} a second: measured for {time.monotonic() - begin:.0f} s", highlight=False)
    for session in sessions:
        await session.close()
    return found


def figures(found: list[dict[str, Any]], beside: list[Call]) -> list[dict[str, Any]]:
    """One row a rate. What answers and loads lose is by their number a minute beside no search, which comes first."""
    rows: list[dict[str, Any]] = []
    for one in found:
        begin, end, calls = one["begin"], one["end"], one["calls"]
        seconds = [call.seconds for call in calls if call.error is None]
        row: dict[str, Any] = {"rate": one["rate"], "searches": len(seconds), "seconds": end - begin}
        row |= {
            "p50": percentile(seconds, 0.5),
            "p99": percentile(seconds, 0.99),
            "max": max(seconds, default=math.nan),
        }
        row["errors"] = len(calls) - len(seconds)
        for name, kind in (("answers", "answer"), ("loads", "load documents")):
            row[name] = 60 * overlap(beside, kind, begin, end) / (end - begin)
            row[f"{name} lost"] = 1 - row[name] / rows[0][name] if rows and rows[0][name] else 0.0
        rows.append(row)
    return rows


def is_met(row: dict[str, Any]) -> bool:
    return bool(row["p50"] <= P50 and row["p99"] <= P99 and not row["errors"])


def verdict(rows: list[dict[str, Any]]) -> str:
    """Where it breaks, in a sentence or two."""
    searched = [row for row in rows if row["rate"]]
    met = [row["rate"] for row in searched if is_met(row)]
    broken = next((row["rate"] for row in searched if not is_met(row)), None)
    limits = f"half within {milliseconds(P50)} ms and 99 % within {milliseconds(P99)} ms"
    text = f"{limits[0].upper()}{limits[1:]}: " + (f"up to {max(met):g} a second" if met else "at none of these rates")
    if broken is not None:
        text += f"; it breaks at {broken:g}"
    lost = [row for row in searched if row["rate"] == DEMANDED]
    if lost:
        text += (
            f". At {DEMANDED} a second answers lose {lost[0]['answers lost']:.0%} and loads {lost[0]['loads lost']:.0%}"
        )
    return f"{text}."


def page(document: dict[str, Any]) -> str:
    """The part of docs/load.md between the marks."""
    rows, of = document["figures"], document["machine"]
    head = ("searches a second", "searches", "p50 ms", "p99 ms", "max ms", "errors")
    head += ("answers a minute", "lost", "loads a minute", "lost")
    lines = [
        f"`make load-rates`, {document['at'][:10]}: {of['cores']} cores ({of['cpu']}), {document['rows']} segments,"
        f" {document['seconds']:g} s for each rate; load {document['load']:.1f} when it began.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---:|' * len(head)}",
    ]
    for row in rows:
        cells = [f"{row['rate']:g}", str(row["searches"])]
        cells += [milliseconds(row[name]) for name in ("p50", "p99", "max")]
        cells += [str(row["errors"]), f"{row['answers']:.1f}", f"{row['answers lost']:.0%}"]
        cells += [f"{row['loads']:.1f}", f"{row['loads lost']:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([MARK, *lines, "", verdict(rows), END])


def kept(text: str) -> str:
    """The part of a page that ``page`` has written, marks included."""
    return f"{MARK}{text.partition(MARK)[2].partition(END)[0]}{END}"


def run(dsn: str, rates: Sequence[float], seconds: float, rows: int, console: Console) -> dict[str, Any]:
    """Everything measured, as it is kept."""
    load = os.getloadavg()[0]
    own = database.make(dsn, rows, 1)
    context = multiprocessing.get_context("spawn")
    until = context.Value("d", math.inf)
    ours, theirs = context.Pipe(duplex=False)
    questions, paragraphs = database.questions(), database.paragraphs()
    with readable_folder(1) as folder:
        plan = Plan(own, BESIDE, until, 0.0, folder, questions, paragraphs)
        process = context.Process(target=work, args=(plan, theirs), daemon=True)
        process.start()
        theirs.close()
        beside: list[Call] = []
        warm = threading.Semaphore(0)

        def listen() -> None:
            while (message := ours.recv())[0] != "done":
                if message[0] == "calls":
                    beside.extend(message[1])
                elif message[0] == "warm":
                    warm.release()

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        for _ in BESIDE:  # the first answers wait for their model
            if not warm.acquire(timeout=WARMUP_SECONDS):
                raise click.ClickException("the work beside the searches does not begin; errors above say why")
        hurry()
        searching = Plan(own, [], None, 0.0, folder, questions, paragraphs)
        found = asyncio.run(measure(searching, rates, seconds, console))
        until.value = time.monotonic()
        listening.join()
        process.join()
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load": load,
        "rows": rows,
        "seconds": seconds,
        "figures": figures(found, beside),
        "errors": [c.error for calls in (*(one["calls"] for one in found), beside) for c in calls if c.error][:10],
    }


@click.command(help=__doc__)
@click.option("--dsn", envvar=["ML_RAG_BENCH_DSN", "ML_RAG_TEST_DSN"], required=True)
@click.option("--rate", "rates", type=click.FloatRange(0), multiple=True, default=RATES, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=120.0, show_default=True, envvar="LOAD_SECONDS")
@click.option("--rows", type=click.IntRange(1000), default=database.ROWS, show_default=True, envvar="LOAD_ROWS")
@click.option("--docs", is_flag=True, envvar="LOAD_DOCS", help="Write the table of docs/load.md too.")
def main(dsn: str, rates: Sequence[float], seconds: float, rows: int, docs: bool) -> None:
    console = Console(width=220)
    document = run(dsn, sorted({0.0, *rates}), seconds, rows, console)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(document, indent=1) + "\n")
    shown = page(document)
    console.print(shown, highlight=False)
    if docs:
        text = DOCUMENT.read_text()
        DOCUMENT.write_text(text.replace(kept(text), shown))
        console.print(f"written: {DOCUMENT}")
    for error in document["errors"]:
        console.print(error, highlight=False)
    wanted = [row for row in document["figures"] if row["rate"] == DEMANDED]
    sys.exit(0 if all(map(is_met, wanted)) and not document["errors"] else 1)


if __name__ == "__main__":
    main()
