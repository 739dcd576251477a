"""HTTP to the model server, over a unix socket or TCP, without ever blocking the backend.

A blocking read inside PL/Python ignores ``statement_timeout`` and ``pg_cancel_backend`` until it returns. So the
socket is non-blocking, and while there is nothing to read the ``interrupt`` callable runs after each signal and every
``POLL_SECONDS``; it raises when PostgreSQL wants the statement to end, and the connection is closed, which makes the
server stop.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ml_rag.backend import exchange, poll
from ml_rag.errors import EngineFailed, ServerUnreachable, from_json

#: how long PostgreSQL may have to wait until a cancelled call notices; where signals end the wait it hardly ever has to
POLL_SECONDS = 0.05
CONNECT_SECONDS = 5.0
MAX_REPLY_BYTES = 512 * 1024 * 1024
#: a machine at the other end that says nothing for a minute is gone; seconds, the last one milliseconds
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,
}

Interrupt = Callable[[], object]
R = TypeVar("R")
L = TypeVar("L", bytes, bytes | bytearray)

_ENDED = 'Its log says why it ended; where nothing starts it again by itself, start it with "ml-rag serve".'
_HINT = "Start it with \"ml-rag serve\", or correct its address: SELECT ml_rag.configure('model_server', '…')."
_FORBIDDEN = (
    "PostgreSQL's operating system user may not open that socket: run ml-rag serve as that user, or set socket_group "
    "and socket_mode in its configuration."
)


class _InterruptibleSocket(socket.socket):
    """A socket whose waits can be interrupted; just the methods that http.client calls."""

    interrupt: Interrupt
    _due = 0.0

    def _wait(self, event: int) -> None:
        while not poll.wait(self.fileno(), event, POLL_SECONDS):
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
                return super().recv_into(buffer, nbytes, flags)
            except BlockingIOError:
                self._wait(select.POLLIN)

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._due = time.monotonic() + POLL_SECONDS
        view = memoryview(data).cast("B")
        while view:
            try:
                view = view[self.send(view, flags) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)


def _open_socket(address: str, interrupt: Interrupt) -> _InterruptibleSocket:
    target: Any
    if address.startswith("unix:"):
        family, target = socket.AF_UNIX, address.removeprefix("unix:")
    else:
        host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
        # a look-up would block: PostgreSQL's interrupts have to wait for the resolver's time-outs
        host = "127.0.0.1" if host == "localhost" else host.strip("[]")
        info = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        family, target = info[0], info[4]
    sock = _InterruptibleSocket(family, socket.SOCK_STREAM)
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


def _read(reply: http.client.HTTPResponse) -> bytes:
    """The whole body. ``http.client`` itself takes a body that is too short for all there is."""
    announced = reply.length is not None or reply.chunked
    data = reply.read(MAX_REPLY_BYTES)
    if len(data) == MAX_REPLY_BYTES:
        raise EngineFailed("the model server's reply is too long", detail=f"Limit {MAX_REPLY_BYTES} bytes.")
    if reply.length or not (data or announced):
        raise http.client.IncompleteRead(data, reply.length)
    return data


def _good(reply: http.client.HTTPResponse) -> http.client.HTTPResponse:
    """The reply where it is a 200. Raises the error that it tells of otherwise."""
    if reply.status != 200:
        try:
            error = json.loads(_read(reply))
        except (ValueError, RecursionError):
            error = None
        raise from_json(error, reply.status)
    return reply


def _is_dropped(connection: http.client.HTTPConnection) -> bool:
    """Whether a connection that waits for its next request has been closed: nothing else makes it readable."""
    if connection.sock is None:
        return True
    look = select.poll()
    look.register(connection.sock.fileno(), select.POLLIN | select.POLLRDHUP)
    return bool(look.poll(0))


class ModelServer:
    """A connection to the model server that is kept between calls and reopened when it has gone stale."""

    def __init__(self, address: str, interrupt: Interrupt) -> None:
        self.address = address
        self._interrupt = interrupt
        self._http: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def _connect(self) -> http.client.HTTPConnection:
        try:
            sock = _open_socket(self.address, self._interrupt)
        except PermissionError as e:
            raise ServerUnreachable(
                "the model server may not be reached", detail=f"{self.address}: {e}.", hint=_FORBIDDEN
            ) from None
        except (OSError, ValueError) as e:
            raise ServerUnreachable(
                "the model server cannot be reached", detail=f"{self.address}: {e}.", hint=_HINT
            ) from None
        connection = http.client.HTTPConnection("ml_rag")
        connection.auto_open = 0  # by itself it would look up the name above
        connection.sock = sock
        return connection

    def _send(self, ask: Callable[[http.client.HTTPConnection], R]) -> R:
        """Send and read the head of the reply; a kept connection that the server has dropped is opened again.

        A server that took the request and then closed without a word may have died of it: it does not get it twice.
        """
        if self._http is not None and _is_dropped(self._http):
            self.close()
        kept = self._http is not None
        while True:
            self._http = self._http or self._connect()
            try:
                return ask(self._http)
            except (ConnectionError, http.client.HTTPException) as e:
                self.close()
                # a closed connection with a request unread in it is reset; with all of it read it just ends
                if not kept or not isinstance(e, ConnectionError) or isinstance(e, http.client.RemoteDisconnected):
                    raise
                kept = False

    def _reply(self, method: str, path: str, body: bytes | None, content_type: str) -> http.client.HTTPResponse:
        def ask(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
            try:
                connection.request(method, path, body, {"Content-Type": content_type} if body is not None else {})
            except ConnectionError:
                # a server that refuses a request may close before it has all of it; its reply says why
                with contextlib.suppress(OSError, http.client.HTTPException):
                    return connection.getresponse()
                raise
            return connection.getresponse()

        return _good(self._send(ask))

    def _body(self, path: str, body: bytes) -> bytes | bytearray:
        """What is answered to a POST of JSON."""

        def ask(connection: http.client.HTTPConnection) -> bytearray | http.client.HTTPResponse:
            try:
                exchange.send(connection.sock, path, body)
            except ConnectionError:
                with contextlib.suppress(OSError, http.client.HTTPException):  # as above
                    return exchange.receive(connection.sock)
                raise
            return exchange.receive(connection.sock)

        reply = self._send(ask)
        if not isinstance(reply, http.client.HTTPResponse):
            return reply
        data = _read(_good(reply))
        if reply.will_close:
            self.close()
        return data

    def _guarded(self, lines: Iterator[L]) -> Iterator[L]:
        """The lines, with whatever goes wrong below HTTP as ServerUnreachable; the connection never outlives it."""
        done = False
        try:
            yield from lines
            done = True
        # the last three are http.client's, over a chunk whose size is negative, no number of C, or more than there is
        except (OSError, http.client.HTTPException, ValueError, OverflowError, MemoryError) as e:
            if not isinstance(e, http.client.IncompleteRead | OSError):
                message, hint = "the model server answered with something that is not HTTP", _HINT
            else:
                message, hint = "the model server broke off in mid-call", _ENDED
            raise ServerUnreachable(
                message, detail=f"{self.address}: {type(e).__name__} {e}.".replace(" .", "."), hint=hint
            ) from None
        finally:
            if not done:
                self.close()

    def call(self, method: str, path: str, payload: Any = None) -> Any:
        """The JSON of the reply; ``method`` is POST where there is a payload.

        Raises ServerUnreachable, EngineFailed for a reply that is no JSON, or its error."""
        body = None if payload is None else json.dumps(payload).encode()

        def read() -> Iterator[bytes | bytearray]:
            yield _read(self._reply(method, path, None, "")) if body is None else self._body(path, body)

        data = b"".join(self._guarded(read()))
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as e:
            raise EngineFailed("the model server answered nonsense", detail=f"No JSON: {e}.") from None

    def stream(self, path: str, body: bytes, content_type: str) -> Iterator[Any]:
        """The JSON of each line of the reply, at least one, as it arrives."""

        def read() -> Iterator[bytes]:
            reply = self._reply("POST", path, body, content_type)
            has_begun = False
            while line := reply.readline(MAX_REPLY_BYTES):
                has_begun = True
                yield line
            # http.client takes the end of the connection for the end of the lines
            if not has_begun or reply.length or (reply.chunked and reply.chunk_left is not None):
                raise http.client.IncompleteRead(b"")

        for line in self._guarded(read()):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as e:
                self.close()
                raise EngineFailed("the model server answered nonsense", detail=f"No JSON: {e}.") from None
