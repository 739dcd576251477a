"""How much memory the server may use and does, so that it refuses work before the kernel ends it.

The limit is the least of ``max_memory_bytes`` (where it is not set, 80 % of the machine's memory), the limits of the
server's control groups (systemd's ``MemoryHigh`` and ``MemoryMax``, Docker's ``--memory``, both versions of cgroups)
and ``RLIMIT_AS``. What a group uses is counted without the pages of files that the kernel can drop, such as weights
that are mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ml_rag.errors import QueueFull

log = logging.getLogger("ml_rag.server")

#: share of the machine's memory that is the limit where no ``max_memory_bytes`` is set, as systemd's unit has it
DEFAULT_SHARE = 0.8
#: share of the limit up to which requests are taken
SHARE = 0.9
#: bytes that a request takes for each of its body, from the parser to the model: measured 2 while it waits, 4-8 at work
BODY_FACTOR = 4
#: requests up to this size are taken as long as the limit itself is not reached
SMALL_BYTES = 64 * 1024
#: how long a reading counts, and how often memory is given back to the kernel at most
_READING_SECONDS = 0.05
_TRIM_SECONDS = 1.0
#: what cgroups write for "no limit": numbers near 2^63
_NO_LIMIT = 1 << 60
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of one limit. ``name`` says where it comes from."""

    name: str
    used: int
    limit: int


def _number(path: Path) -> int:
    """The number in a file; no limit where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max", or a file that this kernel lacks
        return _NO_LIMIT


def _table(path: Path) -> dict[str, int]:
    try:
        return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
    except (OSError, ValueError):
        return {}


def _group_folders(proc: Path) -> Iterator[tuple[bool, Path]]:
    """The server's control group and those around it, as folders: (is it version 2, folder)."""
    try:
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "self/mountinfo").read_text().splitlines()]
    except OSError:
        return
    for fields in mounts:
        kind = fields[fields.index("-") + 1]
        unified = kind == "cgroup2"
        if not unified and (kind != "cgroup" or "memory" not in fields[-1].split(",")):
            continue
        own = next(
            (path for _, names, path in groups if (not names if unified else "memory" in names.split(","))), None
        )
        if own is None:
            continue
        root, mount = fields[3], Path(fields[4])
        # a container sees its own group as the root of the mount, whatever it is called outside
        below = own.removeprefix(root.rstrip("/")).strip("/") if own.startswith(root.rstrip("/")) else ""
        folder = mount / below
        while True:
            yield unified, folder
            if folder == mount:
                break
            folder = folder.parent


def group_usage(proc: Path = Path("/proc")) -> Iterator[Usage]:
    """Of each control group with a limit."""
    for unified, folder in _group_folders(proc):
        limits, usage, cached, shared = (
            (("memory.max", "memory.high"), "memory.current", "file", "shmem")
            if unified
            else (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_cache", "total_shmem")
        )
        if (limit := min(_number(folder / name) for name in limits)) >= _NO_LIMIT:
            continue
        stat = _table(folder / "memory.stat")
        used = _number(folder / usage) - stat.get(cached, 0) + stat.get(shared, 0)
        if 0 <= used < _NO_LIMIT:
            yield Usage("the control group", used, limit)


def status_bytes(name: str) -> int:
    """A field of this process' status, in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def _anonymous_bytes(pid: int | str) -> int:
    """What a process has in memory that no file has; 0 where it is gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def default_limit() -> int:
    """``max_memory_bytes`` where it is not set."""
    return int(DEFAULT_SHARE * _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES"))


def _trim() -> None:
    """Give back to the kernel what has been freed; glibc keeps it otherwise."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Memory:
    """The guard. Its methods run in the event loop.

    ``unload_idle`` frees the models that are not in use; ``processes`` gives the ids of the server's processes.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        unload_idle: Callable[[], int] = lambda: 0,
        processes: Callable[[], Iterable[int]] = lambda: (),
    ) -> None:
        self._max_bytes = default_limit() if max_bytes is None else max_bytes
        self._unload_idle = unload_idle
        self._processes = processes
        #: bytes set aside for the requests in progress
        self._reserved = 0
        self._reading: tuple[float, list[Usage]] = (0.0, [])
        self._trimmed_at = 0.0

    def usage(self, *, fresh: bool = False) -> list[Usage]:
        """Of each limit there is. Limits may be changed while the server runs."""
        now = time.monotonic()
        if fresh or now - self._reading[0] > _READING_SECONDS:
            found = list(group_usage())
            used = _anonymous_bytes("self") + sum(map(_anonymous_bytes, self._processes()))
            found.append(Usage("max_memory_bytes", used, self._max_bytes))
            soft, _ = resource.getrlimit(resource.RLIMIT_AS)
            if soft != resource.RLIM_INFINITY:
                found.append(Usage("RLIMIT_AS", status_bytes("VmSize"), soft))
            self._reading = (now, found)
        return self._reading[1]

    def tightest(self) -> Usage | None:
        """The limit with the least room; None if no limit is set."""
        return min(self.usage(), key=lambda usage: usage.limit - usage.used, default=None)

    def _lacking(self, more: int, share: float, *, fresh: bool = False) -> Usage | None:
        """A limit within which so many more bytes have no room."""
        return next((u for u in self.usage(fresh=fresh) if u.used + more > share * u.limit), None)

    def _find_room(self, more: int, share: float) -> Usage | None:
        """As ``_lacking``, after freeing what can be freed."""
        lacking = self._lacking(more, share)
        now = time.monotonic()
        if lacking is None or now - self._trimmed_at < _TRIM_SECONDS:
            return lacking
        self._trimmed_at = now
        _trim()
        if self._lacking(more, share, fresh=True) is None:
            return None
        if unloaded := self._unload_idle():
            log.warning("memory is short: %d idle models are unloaded", unloaded)
        return self._lacking(more, share, fresh=True)

    def reserve(self, size: int, so_far: int = 0) -> int:
        """Set memory aside for a body, or for a piece of one of which so much has come; what ``release`` gets.

        Raises ``QueueFull``.
        """
        reserved = size * BODY_FACTOR
        if so_far + size <= SMALL_BYTES:
            lacking = self._find_room(0, 1.0)
        else:
            lacking = self._find_room(self._reserved + reserved, SHARE)
        if lacking is not None:
            raise QueueFull(
                "the model server has not enough memory for this request",
                detail=_told(lacking, f"{self._reserved} are set aside for requests in progress"),
                hint="Try again, send less at once, or raise the memory limit of the model server.",
            )
        self._reserved += reserved
        return reserved

    def release(self, reserved: int) -> None:
        self._reserved -= reserved

    def admit_model(self, model_id: str, file_bytes: int) -> None:
        """Whether a model with so many bytes of files can be loaded. Raises ``QueueFull``."""
        if lacking := self._find_room(file_bytes, SHARE):
            raise QueueFull(
                f"the model server has not enough memory to load model {model_id}",
                detail=_told(lacking, f"its files have {file_bytes}"),
                hint="Try again when other models are idle, or raise the memory limit of the model server.",
            )


def _told(usage: Usage, more: str) -> str:
    return f"{usage.name} allows {usage.limit} bytes, {usage.used} are in use, {more}; {SHARE:.0%} may be used"
