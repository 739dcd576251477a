"""Temporary folders that somebody removes, also where the process that made them was killed.

A folder is locked by its maker; the kernel gives the lock up when that process ends, however that comes about. So the
next process of the kind can tell those in use from those left behind. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

#: before the name of a folder that is not locked yet, and how long it may be that: its maker may have been suspended
_UNLOCKED, _UNLOCKED_SECONDS = ".new-", 60.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """A new folder ``PREFIX…`` below ``parent``, as a context manager or until ``remove``. Raises ``OSError``."""

    def __init__(self, parent: Path | str, prefix: str) -> None:
        self._descriptor: int | None = None
        while not self._make(parent, prefix):
            pass

    def _make(self, parent: Path | str, prefix: str) -> bool:
        """Make it, or False where it took so long that another process removed it meanwhile."""
        # under another name until it is locked, lest another process take it for one left behind
        made = Path(tempfile.mkdtemp(dir=parent, prefix=_UNLOCKED + prefix))
        try:
            self._descriptor = os.open(made, _FOLDER)
            with contextlib.suppress(OSError):  # a file system without locks: then it is never taken for left behind
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = made.rename(made.with_name(made.name.removeprefix(_UNLOCKED)))
        except FileNotFoundError:
            self._close()
            return False
        except BaseException:
            made.rmdir()
            self._close()
            raise
        return True

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it with all that is in it; a second time does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def sweep(parent: Path | str, prefix: str) -> list[str]:
    """Remove the folders ``PREFIX…`` of this user that a process which is gone has left behind; their names.

    A process that was killed while it made one has left it empty and under another name: it is removed after a while.
    """
    removed = []
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(parent)):
            if entry.name.startswith(prefix) and _is_left_behind(entry.path):
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry.name)
            elif entry.name.startswith(_UNLOCKED + prefix) and _is_old(entry) and _is_left_behind(entry.path):
                with contextlib.suppress(OSError):  # its maker may have taken it just now, or it is not empty
                    os.rmdir(entry.path)
                    removed.append(entry.name)
    return removed


def _is_old(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        return entry.stat(follow_symlinks=False).st_mtime < time.time() - _UNLOCKED_SECONDS
    return False


def _is_left_behind(path: str) -> bool:
    try:
        descriptor = os.open(path, _FOLDER)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
