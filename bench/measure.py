"""How figures are taken: ours and the floor in turn, so that a machine whose speed drifts slows both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table. ``value`` and ``floor`` are in ``unit``; ``ratio`` is value / floor.

    ``limit`` says in words what must be reached and ``met`` whether it was.
    """

    name: str
    unit: str
    value: float
    floor_name: str
    floor: float | None
    limit: str
    met: bool

    @property
    def ratio(self) -> float | None:
        return self.value / self.floor if self.floor else None


def own_megabytes(pid: int) -> float:
    """Memory of a process's own: without shared buffers, and files that are mapped, such as libraries."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def milliseconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1000


def in_turn(
    calls: dict[str, Callable[[int], object]], rounds: int, warmup: int = 10, block: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of each call, taken A B C A B C …; each call gets the number of the round.

    ``block``: that many calls of A, then of B, and so on: for calls of a few milliseconds, where what the one leaves
    behind (threads that still spin, cold caches) would be counted to the next.
    """
    for i in range(warmup):
        for call in calls.values():
            call(i)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for first in range(0, rounds, block):
        for name, call in calls.items():
            for i in range(first, first + block):
                times[name].append(milliseconds(lambda call=call, i=i: call(i)))  # type: ignore[misc]
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}
