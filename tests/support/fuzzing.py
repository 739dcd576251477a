"""How much the fuzz tests do, and the account of what they did.

The ordinary suite runs a short form of each target, always the same cases. ``make fuzz-test`` sets ML_RAG_FUZZ=full:
the whole count, from FUZZ_SEED, at most FUZZ_SECONDS a target.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import seed as hypothesis_seed

FULL = os.environ.get("ML_RAG_FUZZ") == "full"
SEED = int(os.environ.get("FUZZ_SEED") or 1)
SECONDS = float(os.environ.get("FUZZ_SECONDS") or 600)


@dataclass
class Target:
    """What one target has done; ``coverage`` in its own words."""

    name: str
    wanted: int
    cases: int = 0
    coverage: str = ""
    findings: int = 0
    seconds: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    def next(self) -> bool:
        """Whether there is time for another case, which is then counted."""
        if time.monotonic() - self._began > SECONDS:
            return False
        self.cases += 1
        return True


LEDGER: list[Target] = []


@contextlib.contextmanager
def target(name: str, *, full: int, short: int) -> Iterator[Target]:
    """A target for the account. A failure inside is a finding."""
    entry = Target(name, full if FULL else short)
    LEDGER.append(entry)
    try:
        yield entry
    except BaseException:
        entry.findings += 1
        raise
    finally:
        entry.seconds = time.monotonic() - entry._began


def examples(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Settings of a hypothesis test that makes so many examples from SEED."""

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        chosen = settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
        )
        return hypothesis_seed(SEED)(chosen(test))

    return decorate


def counted(ends: Counter[str]) -> str:
    """How often each, the most frequent first."""
    return ", ".join(f"{n} {how}" for how, n in ends.most_common())


def table() -> list[str]:
    """The account, a line a target."""
    rows = [("target", "cases", "coverage", "findings", "seconds")]
    rows += [(t.name, f"{t.cases}", t.coverage, f"{t.findings}", f"{t.seconds:.0f}") for t in LEDGER]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in (1, 3, 4) else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
