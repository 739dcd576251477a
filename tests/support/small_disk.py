"""File systems that are full soon."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A tmpfs of so many kilobytes, mounted at ``path``."""

    def __init__(self, path: Path, kilobytes: int) -> None:
        self.path = path
        path.mkdir(mode=0o755, exist_ok=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k,mode=0755", "ml_rag_small_disk", path],
            capture_output=True,
            text=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")

    def grow(self, kilobytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", self.path], check=True)

    @property
    def free(self) -> int:
        """Bytes."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, leave: int = 0) -> Path:
        """A file that takes what is free, but for so many bytes."""
        ballast = self.path / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free - leave)
        return ballast


@contextlib.contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[SmallDisk]:
    """Needs root; the test is skipped without."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a file system")
    disk = SmallDisk(path, kilobytes)
    try:
        yield disk
    finally:
        # lazily: whoever still has a file open there must not keep the test from ending
        subprocess.run(["umount", "-l", path], check=True)
