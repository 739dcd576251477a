"""A POST over a connection that is kept, and its reply where that is what a model server's mostly is.

``http.client`` spends a third of a millisecond on each: it makes and reads headers by way of ``email``. Here nothing is
understood but a 200 with a Content-Length; any other reply goes to ``http.client``, with what was read of it.
"""

from __future__ import annotations

import http.client
import io
import socket

_MAX_HEAD = 16 * 1024
#: a body of more digits of bytes than that is left to ``http.client``, which takes no more memory than arrives
_MAX_DIGITS = 6
_buffer = bytearray(_MAX_HEAD)
_view = memoryview(_buffer)


class _Begun:
    """As much of a socket as ``http.client.HTTPResponse`` wants; what was read comes first."""

    def __init__(self, data: bytes, sock: socket.socket) -> None:
        self._data, self._sock = data, sock

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_Rest(self._data, self._sock))


class _Rest(io.RawIOBase):
    def __init__(self, data: bytes, sock: socket.socket) -> None:
        self._data, self._sock, self._begun = memoryview(data), sock, len(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._data:
            return _more(self._sock, buffer, self._begun)
        part = self._data[: len(buffer)]
        buffer[: len(part)] = part
        self._data = self._data[len(part) :]
        return len(part)


def send(sock: socket.socket, path: str, body: bytes) -> None:
    """The request, as ``http.client`` would have it."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: ml_rag\r\nAccept-Encoding: identity\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
    )
    sock.sendall(head.encode() + body)


def _length(head: bytes) -> int | None:
    """The Content-Length of a reply that is good and has nothing special; None for any other one."""
    head = head.lower()
    special = b"\r\ntransfer-encoding", b"\r\nconnection", b"\r\n ", b"\r\n\t"
    if not head.startswith(b"http/1.1 200 ") or any(text in head for text in special):
        return None
    _, *lengths = head.split(b"\r\ncontent-length: ")
    length = lengths[0].partition(b"\r\n")[0] if len(lengths) == 1 else b""
    if not length.isdigit() or len(length) > _MAX_DIGITS:
        return None
    return int(length)


def _more(sock: socket.socket, buffer: memoryview, begun: int) -> int:
    """Receive more of a reply of which ``begun`` bytes are here. A reset is the end of one that has begun."""
    try:
        return sock.recv_into(buffer)
    except ConnectionError:
        if not begun:
            raise
        return 0


def receive(sock: socket.socket) -> bytearray | http.client.HTTPResponse:
    """The body of a good reply, or the reply whose head ``http.client`` has read. Raises what that and sockets do.

    ConnectionError only where nothing of a reply has come: the caller sends the request again then.
    """
    end, n = -1, 0
    while end < 0 and n < _MAX_HEAD:
        got = _more(sock, _view[n:], n)
        if not got:
            break
        n += got
        end = _buffer.find(b"\r\n\r\n", 0, n)
        if end < 0 and _buffer.find(b"\n\n", 0, n) >= 0:  # http.client takes that for the end of a head, too
            break
    length = _length(bytes(_view[:end])) if end >= 0 else None
    begun = n - end - 4
    if length is None or begun > length:
        reply = http.client.HTTPResponse(_Begun(bytes(_view[:n]), sock), method="POST")  # type: ignore[arg-type]
        reply.begin()
        return reply
    body = bytearray(length)
    body[:begun] = _view[end + 4 : n]
    rest = memoryview(body)[begun:]
    while rest:
        got = _more(sock, rest, n)
        if not got:
            raise http.client.IncompleteRead(bytes(body[: length - len(rest)]), len(rest))
        rest = rest[got:]
    return body
