"""How far long work is, in one line: done, total, rate and what is left."""

from __future__ import annotations

from typing import NamedTuple

#: between two lines, and before the first
SECONDS = 10.0


class State(NamedTuple):
    """Where a call is. ``total`` -1: not known; ``segments``: of the documents that are being loaded."""

    relation: str = ""
    phase: str = ""
    done: int = 0
    total: int = -1
    failed: int = 0
    segments: int | None = None

    @property
    def moved(self) -> int:
        """What moves most evenly."""
        return self.done if self.segments is None else self.segments


def line(state: State, seconds: float, before: State) -> str:
    """What a notice says; ``before``: the state so many seconds ago, which rate and rest are taken from."""
    parts = [f"{state.done} of {max(state.done, state.total)}"] if state.total >= 0 else []
    parts += [f"{state.done} done"] if state.total < 0 < state.done else []
    parts += [f"{state.failed} failed"] if state.failed else []
    parts += [f"{state.segments} segments"] if state.segments else []
    if seconds > 0 and state.moved > before.moved:
        parts.append(f"{(state.moved - before.moved) / seconds:.3g} a second")
    if state.total > state.done > before.done:
        parts.append(f"about {duration(seconds * (state.total - state.done) / (state.done - before.done))} left")
    return ": ".join(filter(None, (state.relation, state.phase, ", ".join(parts))))


def duration(seconds: float) -> str:
    """Such as "40 s", "12 min", "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
