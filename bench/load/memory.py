"""Memory of the backends and of the model server while they work, and how busy the processors are, from /proc."""

from __future__ import annotations

import re
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """At ``at`` (``time.monotonic``): megabytes that are the process's own (RssAnon)."""

    at: float
    own: float


def _megabytes(path: Path, key: str) -> float:
    found = re.search(rf"^{key}:\s+(\d+) kB", path.read_text(), re.M)
    return int(found[1]) / 1024 if found else 0.0


def sample(pid: int) -> Sample | None:
    """The memory of a process; None where it has ended."""
    try:
        return Sample(time.monotonic(), _megabytes(Path(f"/proc/{pid}/status"), "RssAnon"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def proportional(pid: int) -> float:
    """Megabytes of a process with its share of what it has in common with others (Pss); dear to ask for."""
    try:
        return _megabytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def busy_seconds() -> tuple[float, float]:
    """Seconds that all processors together have worked, and have had, since the machine started."""
    fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / 100, sum(fields) / 100


def server_of(address: str) -> int | None:
    """The process that listens behind a model server's address; None where it is not on this machine."""
    if not address.startswith("unix:"):
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(address.removeprefix("unix:"))
        return struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0] or None


def children(pid: int) -> list[int]:
    """The processes that a process has started; none where it has ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@dataclass
class Watch:
    """Samples every process of ``pids()`` (name -> process) until it is stopped."""

    pids: Callable[[], dict[str, int]]
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            for name, pid in self.pids().items():
                if (found := sample(pid)) is not None:
                    self.samples.setdefault(name, []).append(found)

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        self._stop.set()

    def last(self, name: str) -> float:
        return self.samples[name][-1].own if self.samples.get(name) else 0.0


def growth(samples: Iterable[Sample], begin: float, end: float) -> tuple[float, float] | None:
    """Megabytes of the process's own after warm-up (``begin``) and at the end: medians over a sixth of the time each.

    None where the process was not there at both times.
    """
    inside = [s for s in samples if begin <= s.at <= end]
    part = max((end - begin) / 6, 1.5 * SAMPLE_SECONDS)
    first = [s.own for s in inside if s.at <= begin + part]
    last = [s.own for s in inside if s.at >= end - part]
    if not first or not last:
        return None
    return statistics.median(first), statistics.median(last)
