"""A bound on the processor time of one step of an engine, kept by the kernel: past it, the process ends by SIGPROF."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

#: for a grammar to be made, and to choose one token by it: 1000 alternatives take 1 to 2 s in a vocabulary of 150 000
GRAMMAR_SECONDS = 5.0

_seconds = 0.0


def end_long_steps(seconds: float) -> None:
    """From now on end this process, which must be the engine's own, where a step takes longer. 0: never."""
    global _seconds
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _seconds = seconds


@contextlib.contextmanager
def step() -> Iterator[None]:
    """Around a step whose length a caller may choose."""
    if _seconds:
        signal.setitimer(signal.ITIMER_PROF, _seconds)
    try:
        yield
    finally:
        if _seconds:
            signal.setitimer(signal.ITIMER_PROF, 0)
