"""Locks on single bytes of a file, which the kernel gives up with the process that has them, however it ends.

They belong to the open file (``F_OFD_SETLK``, Linux 3.15): those of POSIX belong to the process and go with the first
of its descriptors of that file that is closed, and any function may have opened it too, as ``pg_read_binary_file``
does. Where there are no others, those of POSIX do. The two kinds exclude each other.
"""

from __future__ import annotations

import errno
import fcntl
import struct

#: of fcntl.h: type, whence, start, length, process (0, as it must be)
_FLOCK = "hhqqi0q"
_OPEN_FILE: int | None = getattr(fcntl, "F_OFD_SETLK", None)
_POSIX = {
    fcntl.F_RDLCK: fcntl.LOCK_SH | fcntl.LOCK_NB,
    fcntl.F_WRLCK: fcntl.LOCK_EX | fcntl.LOCK_NB,
    fcntl.F_UNLCK: fcntl.LOCK_UN,
}


def _set(fd: int, kind: int, at: int) -> None:
    if _OPEN_FILE is not None:
        try:
            fcntl.fcntl(fd, _OPEN_FILE, struct.pack(_FLOCK, kind, 0, at, 1, 0))
        except OSError as e:
            if e.errno != errno.EINVAL:  # a kernel without them
                raise
        else:
            return
    fcntl.lockf(fd, _POSIX[kind], 1, at)


def lock(fd: int, at: int, *, shared: bool = False) -> bool:
    """Lock a byte; False where another has it. ``fd`` is open for writing, or at least for reading where ``shared``."""
    try:
        _set(fd, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, at)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, at: int) -> None:
    """Let others have it."""
    _set(fd, fcntl.F_UNLCK, at)
