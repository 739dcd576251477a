"""The figures of a load test: computed, judged, as a table and as the page docs/load.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template

from bench.load.memory import Sample, growth
from bench.load.sessions import CANCEL_FLOOR, KINDS, WAYS, Call

#: demands: megabytes that one backend, and the model server, may grow by after warm-up; seconds to cancel
BACKEND_GROWTH, SERVER_GROWTH = 16.0, 96.0
CANCEL_SECONDS = 0.2


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


@dataclass(frozen=True, slots=True)
class Demand:
    """Something that has to hold."""

    what: str
    found: str
    met: bool


def latencies(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """One row a kind, in the order of KINDS: how many, seconds, how often the queue was full."""
    rows = []
    kinds = [kind for kind in KINDS if kind != "cancel"]
    for kind in (*kinds, *(f"cancel: {way}" for way in WAYS), CANCEL_FLOOR):
        mine = [call for call in calls if call.kind == kind and call.error is None]
        seconds = [call.seconds for call in mine]
        row: dict[str, Any] = {"kind": kind, "calls": len(mine), "refused": sum(call.refused for call in mine)}
        row |= {f"p{round(p * 100)}": percentile(seconds, p) for p in (0.5, 0.95, 0.99)}
        rows.append({**row, "max": max(seconds, default=math.nan)})
    return rows


def memory(samples: dict[str, list[Sample]], begin: float, end: float) -> dict[str, Any]:
    """Megabytes after warm-up and at the end: of the model server, and of the backend that has grown most."""
    backends: list[tuple[float, float, str]] = []
    found: dict[str, Any] = {"backends": 0}
    for name, mine in samples.items():
        if (change := growth(mine, begin, end)) is None:
            continue
        if name.startswith("backend"):
            backends.append((*change, name))
        else:
            found[name] = {"first": change[0], "last": change[1]}
    if backends:
        first, last, name = max(backends, key=lambda b: b[1] - b[0])
        found |= {
            "backends": len(backends),
            "grown most": {"first": first, "last": last, "kind": name.split(" ", 2)[2]},
            "all backends": {"first": sum(b[0] for b in backends), "last": sum(b[1] for b in backends)},
            "largest backend": max(b[1] for b in backends),
        }
    return found


def demands(figures: dict[str, Any], errors: Sequence[Call]) -> list[Demand]:
    """What has to hold, and whether it does."""
    rows = {row["kind"]: row for row in figures["latencies"]}
    cancels = [row for kind, row in rows.items() if kind.startswith("cancel")]
    worst = max((row["max"] for row in cancels if row["calls"]), default=math.nan)
    idle = [kind for kind, row in rows.items() if not row["calls"]]
    remembered = figures["memory"]
    found = [
        Demand("no unexpected error", f"{len(errors)}", not errors),
        Demand("every kind of call was answered", ", ".join(idle) + " not" if idle else "yes", not idle),
        Demand(
            f"a cancelled session is free within {CANCEL_SECONDS * 1000:.0f} ms",
            f"{worst * 1000:.0f} ms at most",
            worst <= CANCEL_SECONDS,
        ),
    ]
    if most := remembered.get("grown most"):
        grown = most["last"] - most["first"]
        found.append(
            Demand(
                f"no backend grows by more than {BACKEND_GROWTH:.0f} MB", f"{grown:+.1f} MB", grown <= BACKEND_GROWTH
            )
        )
    if server := remembered.get("model server"):
        grown = server["last"] - server["first"]
        found.append(
            Demand(
                f"the model server grows by at most {SERVER_GROWTH:.0f} MB", f"{grown:+.1f} MB", grown <= SERVER_GROWTH
            )
        )
    return found


def milliseconds(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{seconds * 1000:,.0f}".replace(",", " ")


def table(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """Head and rows, as text."""
    rows: list[tuple[str, ...]] = [("call", "sessions", "calls", "a second", "p50 ms", "p95 ms", "p99 ms", "max ms")]
    for row in figures["latencies"]:
        kind = "cancel" if row["kind"] == CANCEL_FLOOR else row["kind"].split(":")[0]
        sessions = f"{figures['sessions'][kind]}"
        rate = f"{row['calls'] / figures['seconds']:.2f}"
        rows.append(
            (
                row["kind"],
                sessions,
                f"{row['calls']}",
                rate,
                *(milliseconds(row[p]) for p in ("p50", "p95", "p99", "max")),
            )
        )
    return rows


def page(figures: dict[str, Any], judged: Sequence[Demand], rates: str) -> str:
    """docs/load.md; ``rates``: its part that bench/load/rates.py writes, as it is."""
    template = Template(
        (Path(__file__).parent / "page.md.j2").read_text(), trim_blocks=True, keep_trailing_newline=True
    )
    head, *rows = table(figures)
    return template.render(f=figures, head=head, rows=rows, demands=judged, rates=rates)
