"""HTTP to the model server, over a unix socket or TCP, without ever blocking the backend (``ml_rag.backend.sockets``).

A call that is cancelled closes its connection, which makes the server stop. As much of HTTP/1.1 is understood as a
model server speaks, or a proxy before it. ``http.client`` takes longer: it makes and reads headers by way of ``email``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import socket
import time
from collections.abc import Generator, Iterator
from typing import Any

from ml_rag.backend import calls
from ml_rag.backend.sockets import POLL_SECONDS, Interrupt, InterruptibleSocket, connect
from ml_rag.errors import EngineFailed, MlRagError, QueueFull, ServerUnreachable, from_json, retry_after
from ml_rag.protocol import CALL_HEADER, MAX_REPLY_VALUES, has_more_values, request_address

MAX_REPLY_BYTES = 512 * 1024 * 1024
#: seconds after which refused work looks again whether there is room, however long it is to wait
LONGEST_PAUSE = 10
#: of the head of a reply
_MAX_LINE, _MAX_FIELDS = 64 * 1024, 100
#: how long a server that refuses connections, or has no socket, is given to come back: systemd and Docker restart it
#: within this time
RESTART_SECONDS = 2.0
#: most that is received at once
_PIECE = 64 * 1024

#: the command that starts the model server; PostgreSQL's environment may name another one
_START = os.environ.get("ML_RAG_START_SERVER") or "ml-rag serve"
_ENDED = f'Start it with "{_START}" if systemd or Docker does not. Its log says why it ended.'
_HINT = f"Start it with \"{_START}\", or correct its address: SELECT ml_rag.configure('model_server', '…')."
_FORBIDDEN = (
    "PostgreSQL's operating system user may not open that socket: run ml-rag serve as that user, or set socket_group "
    "and socket_mode in its configuration."
)


class _NotHttp(Exception):
    """The bytes that came are not a reply."""


class _BrokenOff(Exception):
    """The connection ended before the reply did."""


class _Incoming(io.RawIOBase):
    """What comes over a socket; unlike that of ``makefile`` it leaves the socket to be closed at once."""

    def __init__(self, sock: InterruptibleSocket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._sock.recv_into(buffer)


class _Reply:
    """A reply whose head has been read. ``pieces`` may be asked for once."""

    def __init__(self, sock: InterruptibleSocket) -> None:
        self._file = io.BufferedReader(_Incoming(sock), _PIECE)
        self.status = 100
        while self.status == 100:  # Continue: the reply itself comes after it
            self.status, fields = self._head()
        self._is_chunked = fields.get(b"transfer-encoding", b"").lower() == b"chunked"
        self._length = 0 if self.status in (204, 304) else _length(fields.get(b"content-length"))
        #: whether the body says itself where it ends
        self.is_framed = self._is_chunked or self._length is not None
        self.is_last = not self.is_framed or b"close" in fields.get(b"connection", b"").lower()

    def _line(self) -> bytes:
        line = self._file.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            raise _NotHttp("a line without end") if len(line) == _MAX_LINE else _BrokenOff
        return line

    def _head(self) -> tuple[int, dict[bytes, bytes]]:
        line = self._line()
        version, _, status = line.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not status[:3].isdigit():
            raise _NotHttp(f"it begins with {line[:40]!r}")
        fields = {b"connection": b"close"} if version == b"HTTP/1.0" else {}
        for _ in range(_MAX_FIELDS):
            name, _, value = self._line().partition(b":")
            if name in (b"\r\n", b"\n"):
                return int(status[:3]), fields
            fields.setdefault(name.lower(), value.strip())
        raise _NotHttp("its head does not end")

    def pieces(self) -> Iterator[bytes]:
        """The body, as it arrives."""
        if self._is_chunked:
            while size := self._chunk_size():
                yield from self._exactly(size)
                if self._line().strip():
                    raise _NotHttp("a chunk without end")
            while self._line().strip():
                pass  # fields after the body
        elif self._length is not None:
            yield from self._exactly(self._length)
        else:
            while piece := self._file.read1(_PIECE):
                yield piece

    def _chunk_size(self) -> int:
        digits = self._line().partition(b";")[0].strip()
        if not 0 < len(digits) <= 16 or digits.strip(b"0123456789abcdefABCDEF"):
            raise _NotHttp(f"the size of a chunk is {digits[:40]!r}")
        return int(digits, 16)

    def _exactly(self, size: int) -> Iterator[bytes]:
        while size:
            # never more memory than has arrived, whatever size is announced
            piece = self._file.read1(min(size, _PIECE))
            if not piece:
                raise _BrokenOff
            size -= len(piece)
            yield piece

    def body(self) -> bytes:
        """All of it."""
        pieces, total = [], 0
        for piece in self.pieces():
            pieces.append(piece)
            total += len(piece)
            _check_bytes(total)
        if not (pieces or self.is_framed):
            raise _BrokenOff
        return b"".join(pieces)

    def lines(self) -> Iterator[bytes]:
        """The lines of the body, at least one, each as soon as it is there."""
        begun: list[bytes] = []
        size, has_begun = 0, False
        for piece in self.pieces():
            first, *others = piece.split(b"\n")
            begun.append(first)
            _check_bytes(size := size + len(first))
            for line in others:
                has_begun = True
                yield b"".join(begun)
                begun, size = [line], len(line)
        if last := b"".join(begun):
            yield last
        elif not has_begun:
            raise _BrokenOff


def _length(field: bytes | None) -> int | None:
    if field is not None and not (field.isdigit() and len(field) <= 18):
        raise _NotHttp(f"its length is {field[:40]!r}")
    return None if field is None else int(field)


def _check_bytes(count: int) -> None:
    if count >= MAX_REPLY_BYTES:
        raise EngineFailed("the model server's reply is too long", detail=f"Limit {MAX_REPLY_BYTES} bytes.")


def _parsed(text: bytes) -> Any:
    if has_more_values(text, MAX_REPLY_VALUES):
        detail = f"Its JSON has more than {MAX_REPLY_VALUES} values."
        raise EngineFailed("unexpected reply from the model server", detail=detail)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise EngineFailed("unexpected reply from the model server", detail=f"No JSON: {e}.") from None


def _error(reply: _Reply, address: str) -> MlRagError:
    try:
        error = _parsed(reply.body())
    except EngineFailed:
        error = None
    if error is None and reply.status in (502, 503, 504):  # a proxy that has no model server behind it, or lost it
        detail = f"{address}: HTTP status {reply.status}, of what stands before it."
        return ServerUnreachable("the model server cannot be reached", detail=detail, hint=_HINT)
    return from_json(error, reply.status)


def _is_dropped(sock: socket.socket) -> bool:
    """Whether a connection that waits for its next request has been closed: nothing else makes it readable."""
    look = select.poll()
    look.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)
    return bool(look.poll(0))


class ModelServer:
    """A connection to the model server that is kept between calls and reopened when it has gone stale."""

    def __init__(self, address: str, interrupt: Interrupt) -> None:
        self.address = address
        self._interrupt = interrupt
        self._sock: InterruptibleSocket | None = None

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connect(self, patience: float = RESTART_SECONDS) -> InterruptibleSocket:
        deadline = time.monotonic() + patience
        try:
            while True:
                try:
                    return connect(self.address, self._interrupt)
                except (ConnectionRefusedError, FileNotFoundError):
                    if time.monotonic() >= deadline or not self._may_return():
                        raise
                time.sleep(POLL_SECONDS)
                self._interrupt()
        except PermissionError as e:
            raise ServerUnreachable(
                "the model server may not be reached", detail=f"{self.address}: {e}.", hint=_FORBIDDEN
            ) from None
        except (OSError, ValueError) as e:
            raise ServerUnreachable(
                "the model server cannot be reached", detail=f"{self.address}: {e}.", hint=_HINT
            ) from None

    def _may_return(self) -> bool:
        """Whether a server that is being started can make its socket there."""
        family, target = request_address(self.address)
        return family != socket.AF_UNIX or os.path.isdir(os.path.dirname(target))

    def reach(self) -> None:
        """Connect once, and no more. Raises ServerUnreachable."""
        self._connect(patience=0.0).close()

    @contextlib.contextmanager
    def _reply(self, method: str, path: str, body: bytes, content_type: str) -> Iterator[_Reply]:
        """The reply to a request, where it is a 200; whatever goes wrong below HTTP becomes ServerUnreachable.

        The connection is closed where the block does not read all of it.
        """
        keep = False
        try:
            reply = self._ask(method, path, body, content_type)
            if reply.status != 200:
                raise _error(reply, self.address)
            yield reply
            keep = not reply.is_last
        except _NotHttp as e:
            message = "the model server answered with something that is not HTTP"
            raise ServerUnreachable(message, detail=f"{self.address}: {e}.", hint=_HINT) from None
        except (OSError, _BrokenOff) as e:
            detail = f"{self.address}: {str(e) or 'the connection was closed'}."
            raise ServerUnreachable("connection to the model server was lost", detail=detail, hint=_ENDED) from None
        finally:
            if not keep:
                self.close()

    def _ask(self, method: str, path: str, body: bytes, content_type: str) -> _Reply:
        """Send a request and read the head of its reply; a kept connection that was dropped is opened again.

        A server that took the request and then closed without a word may have died of it: it does not get it twice.
        """
        head = f"{method} {path} HTTP/1.1\r\nHost: ml_rag\r\nAccept-Encoding: identity\r\n"
        if call := calls.header():
            head += f"{CALL_HEADER}: {call}\r\n"
        if content_type:
            head += f"Content-Length: {len(body)}\r\nContent-Type: {content_type}\r\n"
        request = head.encode() + b"\r\n"
        if self._sock is not None and _is_dropped(self._sock):
            self.close()
        is_kept = self._sock is not None
        while True:
            self._sock = sock = self._sock or self._connect()
            try:
                return _exchange(sock, request, body)
            except ConnectionError:
                self.close()
                # a closed connection with a request unread in it is reset; with all of it read it just ends
                if not is_kept or sock.has_heard:
                    raise
                is_kept = False

    def call(self, method: str, path: str, payload: Any = None) -> Any:
        """The JSON of the reply; ``method`` is POST if there is a payload. Bulk work that is refused because others
        wait is sent again at the time named.

        Raises ServerUnreachable, EngineFailed for a reply that is not JSON, or its error."""
        body = b"" if payload is None else _json(payload)
        while True:
            try:
                with self._reply(method, path, body, "" if payload is None else "application/json") as reply:
                    data = reply.body()
                return _parsed(data)
            except QueueFull as e:
                seconds = retry_after(e.hint)
                if seconds is None or not calls.is_bulk():
                    raise
            self._pause(min(seconds, LONGEST_PAUSE))

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._interrupt()
            time.sleep(min(left, POLL_SECONDS))

    def stream(self, path: str, body: bytes, content_type: str) -> Generator[Any, None, None]:
        """The JSON of each line of the reply, at least one, as it arrives. Closed early, it makes the server stop.

        The connection is its own meanwhile: what is done with a line, by a trigger say, may ask the model server, too.
        """
        apart = ModelServer(self.address, self._interrupt)
        apart._sock, self._sock = self._sock, None
        try:
            with apart._reply("POST", path, body, content_type) as reply:
                yield from map(_parsed, reply.lines())
        finally:
            if self._sock is None:
                self._sock = apart._sock
            else:
                apart.close()


def _json(payload: Any) -> bytes:
    """At most 6 bytes for each character of a text. Names of files can have halves of characters."""
    try:
        return json.dumps(payload, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(payload).encode()


def _exchange(sock: InterruptibleSocket, head: bytes, body: bytes) -> _Reply:
    try:
        # what is small goes in one piece; what is large is not copied for it
        if len(body) <= _PIECE:
            sock.sendall(head + body)
        else:
            sock.sendall(head)
            sock.sendall(body)
    except ConnectionError:
        # a server that refuses a request may close before it has all of it; its reply says why
        with contextlib.suppress(OSError, _NotHttp, _BrokenOff):
            return _Reply(sock)
        raise
    return _Reply(sock)
