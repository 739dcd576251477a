"""Places in the drawings of the pages, as attributes of SVG, because the pages allow no style but their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ml_rag.integrations.journey import Candidates, key

WIDTH = 1000


def strip(candidates: Candidates, citations: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Where each candidate and the threshold stand from the best value to the worst, in percent."""
    cited = {key(row) for row in citations}
    values = [value for row in candidates.rows if (value := candidates.value(row)) is not None]
    limit = candidates.threshold
    everything = values + ([] if limit is None else [limit])
    low, high = min(everything, default=0.0), max(everything, default=1.0)
    span = (high - low) or 1.0

    def place(value: float) -> float:
        share = (value - low) / span
        return round(1 + 98 * (share if candidates.is_distance else 1 - share), 2)

    ticks = [
        {"x": place(value), "is_kept": candidates.keeps(row), "is_cited": key(row) in cited}
        for row in candidates.rows
        if (value := candidates.value(row)) is not None
    ]
    best, worst = (low, high) if candidates.is_distance else (high, low)
    return {"ticks": ticks, "line": None if limit is None else place(limit), "best": best, "worst": worst}


def bars(waterfall: Sequence[tuple[str, float, float]]) -> list[dict[str, Any]]:
    """Each stage as a bar that begins where the one before it ends, in percent."""
    total = sum(ms for _, _, ms in waterfall) or 1.0
    return [
        {
            "stage": stage,
            "ms": ms,
            "x": round(100 * begin / total, 2),
            "width": max(0.3, round(100 * ms / total, 2)),
        }
        for stage, begin, ms in waterfall
    ]


def measures(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The measures that all of some runs have between them, as they are sorted."""
    found: dict[str, None] = {}
    for run in runs:
        found.update(dict.fromkeys(run["measures"]))
    return sorted(found, key=lambda name: (name.partition("@")[0], int(name.partition("@")[2] or 0)))


def _cutoffs(runs: Sequence[dict[str, Any]], name: str) -> list[int]:
    return sorted({int(m.partition("@")[2]) for run in runs for m in run["measures"] if m.startswith(f"{name}@")})


def cutoffs(runs: Sequence[dict[str, Any]], name: str) -> list[tuple[float, int]]:
    """Where each cut-off k stands, with its number."""
    found = _cutoffs(runs, name)
    return [(round(n * WIDTH / max(1, len(found) - 1), 1), k) for n, k in enumerate(found)]


def curves(runs: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """A measure such as ``recall`` of some runs against its cut-off k: a line each, 0 at the bottom."""
    places = cutoffs(runs, name)
    made = []
    for number, run in enumerate(runs):
        points = [
            (x, round(300 * (1 - float(value)), 1))
            for x, k in places
            if (value := run["measures"].get(f"{name}@{k}")) is not None
        ]
        if points:
            made.append(
                {"run": run, "number": number, "points": points, "path": " ".join(f"{x},{y}" for x, y in points)}
            )
    return made
