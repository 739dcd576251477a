"""Processes of this package's own that work for the model server, each over a socket: parsers of documents, models.

A message is its length, 8 bytes big endian, and what it says.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

_LENGTH_BYTES = 8
_RECEIVE_BYTES = 1 << 20
#: milliseconds between two looks at whether to keep waiting
POLL_MS = 20
_END_POLL_SECONDS = 0.002


class Lost(Exception):
    """The process is gone."""


class Useless(Exception):
    """The process is there, and of no use any more: what it does, and how that shows."""


class Child:
    """One process and the socket to it.

    No wait for it is without end, whatever the process does: ``go_on`` is called while a wait lasts and for each piece
    that comes, and may raise. What was sent or received in part by then is continued by the next wait.
    """

    def __init__(self, module: str, *arguments: str, environment: dict[str, str], most: int) -> None:
        """``most``: bytes of a message that comes from it."""
        self._connection, self.process = _start(module, *arguments, environment=environment)
        self._connection.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._connection)
        self._most = most
        self._unsent = b""
        self._received = bytearray()

    def tell(self, message: bytes, go_on: Callable[[], None], descriptor: int | None = None) -> None:
        """Send a message, and a file with it. Raises ``Lost``."""
        view = memoryview(self._unsent + len(message).to_bytes(_LENGTH_BYTES, "big") + message)
        try:
            while view:
                self._wait(select.POLLOUT, go_on)
                if descriptor is None:
                    sent = self._connection.send(view)
                else:
                    sent = socket.send_fds(self._connection, [view], [descriptor])
                view, descriptor = view[sent:], None
        except OSError as error:
            raise Lost from error
        finally:
            self._unsent = bytes(view)

    def message(self, go_on: Callable[[], None]) -> bytearray:
        """The next message, waited for. Raises ``Lost``; ``Useless``: it is too long."""
        while len(self._received) < _LENGTH_BYTES or len(self._received) < _LENGTH_BYTES + self._length():
            self._wait(select.POLLIN, go_on)
            try:
                piece = self._connection.recv(_RECEIVE_BYTES)
            except OSError as error:
                raise Lost from error
            if not piece:
                raise Lost
            self._received += piece
            go_on()
        end = _LENGTH_BYTES + self._length()
        message, self._received = self._received, self._received[end:]
        del message[end:], message[:_LENGTH_BYTES]
        return message

    def _length(self) -> int:
        """Bytes of the message whose head is here."""
        length = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
        if length > self._most:
            raise Useless("sent an unexpected reply", f"a message of {length} bytes")
        return length

    def _wait(self, event: int, go_on: Callable[[], None]) -> None:
        self._poll.modify(self._connection, event)
        waits = 0
        while not self._poll.poll(POLL_MS):
            go_on()
            self._check_alive(waits)
            waits += 1

    def _check_alive(self, waits: int) -> None:
        """Called after each of the looks of one wait, which are counted from 0; may raise ``Useless``."""

    def end(self, seconds: float = 0.0) -> int:
        """End it, and kill it and all that it has started after ``seconds``. Its exit status, or minus the signal."""
        self._connection.close()
        if self.process.returncode is None:
            until = time.monotonic() + seconds
            while self.is_alive and time.monotonic() < until:
                time.sleep(_END_POLL_SECONDS)
            # before it is waited for: until then no other group gets its number
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; it is not waited for, so that ``end`` finds what it has started."""
        with contextlib.suppress(ChildProcessError):  # another thread has just waited for it
            return (
                self.process.returncode is None
                and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            )
        return False


def receive(connection: socket.socket, count: int) -> bytearray | None:
    """So many bytes, or None where the other side has closed."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return data


def receive_message(connection: socket.socket) -> tuple[bytearray, int | None] | None:
    """In the process: the next message, and the descriptor of the file with it; None where the server has closed."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 1)
    rest = receive(connection, _LENGTH_BYTES - len(head)) if head else None
    body = None if rest is None else receive(connection, int.from_bytes(head + rest, "big"))
    return None if body is None else (body, descriptors[0] if descriptors else None)


def send_message(connection: socket.socket, message: bytes) -> None:
    """In the process: send a message."""
    connection.sendall(len(message).to_bytes(_LENGTH_BYTES, "big"))
    connection.sendall(message)


def inherited(names: Collection[str], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """What a process sees of the server's environment, in which the keys of remote models are; and this package."""
    found = {name: value for name, value in os.environ.items() if name in names or name.startswith(prefixes)}
    root = str(Path(__file__).resolve().parents[2])
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _start(module: str, *arguments: str, environment: dict[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
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
