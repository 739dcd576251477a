"""Places in the drawings of the pages, as attributes of SVG, because the pages allow no style but their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ml_rag.integrations.journey import Candidates, key


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


#: measures beside one another, more than ml_rag_evaluate has
FAMILIES = 60


def measures(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The measures that all of some runs have between them, as they are sorted."""
    found: dict[str, None] = {}
    for run in runs:
        found.update(dict.fromkeys(run["measures"]))
    return sorted(found, key=lambda name: (name.partition("@")[0], int(name.partition("@")[2] or 0)))


def families(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Of each measure the one with the largest cut-off; as many as a page shows."""
    return list({name.partition("@")[0]: name for name in measures(runs)}.values())[:FAMILIES]


#: pixels of a drawing of curves, above and below its lines
HEIGHT, ABOVE, BELOW = 210, 12, 182


def curves(runs: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """A measure such as ``recall`` of some runs against its cut-off k; runs with the same values share a line.

    Places from left to right are in percent, from top to bottom in pixels. The lowest line is the tenth below them.
    """
    cutoffs = sorted({int(m.partition("@")[2]) for run in runs for m in run["measures"] if m.startswith(f"{name}@")})
    places = {k: round(4 + 92 * n / max(1, len(cutoffs) - 1), 2) for n, k in enumerate(cutoffs)}
    found: dict[tuple[tuple[int, float], ...], list[dict[str, Any]]] = {}
    for run in runs:
        values = ((k, run["measures"].get(f"{name}@{k}")) for k in cutoffs)
        known = tuple((k, min(1.0, max(0.0, float(value)))) for k, value in values if value is not None)
        if known:
            found.setdefault(known, []).append(run)
    low = min(0.9, math.floor(10 * min((value for line in found for _, value in line), default=0.0)) / 10)

    def height(value: float) -> float:
        return round(BELOW - (BELOW - ABOVE) * (value - low) / (1 - low), 1)

    return {
        "lines": [
            {"runs": of, "number": number, "points": [(places[k], height(value)) for k, value in line]}
            for number, (line, of) in enumerate(found.items())
        ],
        "ticks": [(height(value), f"{value:.2g}") for value in (low, (1 + low) / 2, 1.0)],
        "cutoffs": [(places[k], k) for k in cutoffs],
    }
