"""Processes of this package's own that work for the model server, each over a socket: parsers of documents, models."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path


def inherited(names: Collection[str], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """What a process sees of the server's environment, in which the keys of remote models are; and this package."""
    found = {name: value for name, value in os.environ.items() if name in names or name.startswith(prefixes)}
    root = str(Path(__file__).resolve().parents[2])
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def start(module: str, *arguments: str, environment: dict[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Run a module in a process and a session of its own; the socket to it, whose number is its first argument there.

    Nothing that it prints is kept: that may be words of a caller's or of a document's, of any length.
    """
    connection, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
    except BaseException:
        connection.close()
        raise
    return connection, process


def cause(status: int) -> str:
    """How a process ended, by its exit status."""
    return f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit status {status}"
