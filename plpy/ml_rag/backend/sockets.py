"""Sockets whose waits PostgreSQL can end, as it cancels a statement by a signal.

A blocking read inside PL/Python ignores ``statement_timeout`` and ``pg_cancel_backend`` until it returns. So a socket
is non-blocking, and while there is nothing to read the ``interrupt`` callable runs after each signal and every
``POLL_SECONDS``; it raises when PostgreSQL wants the statement to end.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from ml_rag.protocol import request_address

try:
    import ctypes

    class _Pollfd(ctypes.Structure):
        _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))

    _poll: Callable[..., int] | None = ctypes.CDLL(None, use_errno=True).poll
except (ImportError, OSError, AttributeError):  # a Python without it, or a system that lets nothing be loaded
    _poll = None

Interrupt = Callable[[], object]

#: how long PostgreSQL may have to wait until a cancelled call notices; where signals end the wait it hardly ever has to
POLL_SECONDS = 0.05
CONNECT_SECONDS = 5.0
#: a machine at the other end that says nothing for a minute is gone; seconds, the last one milliseconds
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,
}


def _wait(fd: int, event: int, seconds: float) -> bool:
    """Whether the descriptor is ready for ``event`` (``select.POLLIN`` …) within ``seconds``; False after a signal.

    ``select.poll`` continues to wait after a signal for which Python has no handler (PEP 475), and PostgreSQL's are its
    own. poll(2) itself ends with any signal (signal(7)).
    """
    milliseconds = round(seconds * 1000)
    if _poll is None:
        poll = select.poll()
        poll.register(fd, event)
        return bool(poll.poll(milliseconds))
    ready = _poll(ctypes.byref(_Pollfd(fd, event, 0)), ctypes.c_ulong(1), milliseconds)
    if ready < 0 and (number := ctypes.get_errno()) != errno.EINTR:
        raise OSError(number, os.strerror(number))
    return ready > 0


class InterruptibleSocket(socket.socket):
    """A socket whose waits can be interrupted."""

    interrupt: Interrupt
    #: whether anything came since the last request
    has_heard = False
    _due = 0.0

    def _wait(self, event: int) -> None:
        while not _wait(self.fileno(), event, POLL_SECONDS):
            self._ask()

    def _ask(self) -> None:
        self.interrupt()
        self._due = time.monotonic() + POLL_SECONDS

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        # a server that never stops sending, or sends a little now and then, leaves no wait long enough
        if time.monotonic() > self._due:
            self._ask()
        while True:
            try:
                n = super().recv_into(buffer, nbytes, flags)
            except BlockingIOError:
                self._wait(select.POLLIN)
            else:
                self.has_heard = self.has_heard or n > 0
                return n

    def sendall(self, data: Any, flags: int = 0) -> None:
        self.has_heard = False
        self._due = time.monotonic() + POLL_SECONDS
        view = memoryview(data)
        while view:
            try:
                view = view[self.send(view, flags) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)


def connect(address: str, interrupt: Interrupt) -> InterruptibleSocket:
    """A connection to ``unix:/path`` or ``http://host:port``. Raises OSError, ValueError for a malformed address."""
    family, target = request_address(address)
    sock = InterruptibleSocket(family, socket.SOCK_STREAM)
    sock.interrupt = interrupt
    try:
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            # a machine that lost its power says nothing: the statement would wait for it for ever
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        deadline = time.monotonic() + CONNECT_SECONDS
        while (status := sock.connect_ex(target)) not in (0, errno.EISCONN):
            if status not in (errno.EAGAIN, errno.EINPROGRESS, errno.EALREADY):
                raise OSError(status, os.strerror(status))
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            # A full backlog of a unix socket cannot be polled for, hence the nap.
            select.select([], [] if status == errno.EAGAIN else [sock], [], POLL_SECONDS)
            interrupt()
    except BaseException:
        sock.close()
        raise
    return sock
