"""A control group with a limit on memory, for a process and its children."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import wait_until

_ROOT = Path("/sys/fs/cgroup")


class ControlGroup:
    """``prefix`` put before a command runs it in the group."""

    def __init__(self, folder: Path, limit_file: str) -> None:
        self.folder = folder
        self._limit_file = limit_file
        script = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        self.prefix = ["sh", "-c", script, "--"]

    def limit(self, value: int) -> None:
        (self.folder / self._limit_file).write_text(str(value))

    def kills(self) -> int:
        """How often the kernel has ended a process for the limit."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                lines = dict(line.split() for line in (self.folder / name).read_text().splitlines())
                return int(lines["oom_kill"])
        return 0


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[ControlGroup]:
    """Needs root and the memory controller, of either version of cgroups; the test is skipped without."""
    if os.getuid() != 0:
        pytest.skip("only root can make a control group")
    name = f"ml_rag_faults_{os.getpid()}_{os.urandom(2).hex()}"
    v1 = _ROOT / "memory"
    if (v1 / "memory.limit_in_bytes").exists():
        folder, limit_file = v1 / name, "memory.limit_in_bytes"
    elif "memory" in _controllers(_ROOT / "cgroup.subtree_control"):
        folder, limit_file = _ROOT / name, "memory.max"
    else:
        pytest.skip("there is no memory controller of control groups here")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    group = ControlGroup(folder, limit_file)
    try:
        group.limit(limit)
        for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            with contextlib.suppress(OSError):
                (folder / swap).write_text(str(limit if "memsw" in swap else 0))
        yield group
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), 20)
        folder.rmdir()


def _controllers(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
