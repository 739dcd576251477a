"""What a process runs out of, as an error that says so: memory, disk, file descriptors. Standard library only."""

from __future__ import annotations

import errno
import tempfile

from ml_rag.errors import DiskFull, MlRagError, QueueFull

#: EFBIG: beyond the size of a file that this process may write
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def shortage(error: BaseException | None) -> MlRagError | None:
    """The error for one that says that something has run out, or was caused by one that does; None for others."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return QueueFull(
                "the model server has not enough memory",
                detail="it could get no more for this request",
                hint="Try again, send less at once, or raise the memory limit of the model server.",
            )
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return DiskFull(
                "the disk of the model server is full",
                detail=f"{error.strerror}: {error.filename or tempfile.gettempdir()}",
                hint="Free space there, or set TMPDIR of the model server to another folder, and call again.",
            )
        if isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR:
            return QueueFull(
                "the model server has too many open files",
                detail=error.strerror,
                hint="Try again, or raise the limit on open files of the model server (LimitNOFILE, ulimit -n).",
            )
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
