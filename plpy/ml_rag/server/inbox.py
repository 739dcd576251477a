"""The sockets beside those that the server listens on: for datagrams, by which PostgreSQL's sessions tell of calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from ml_rag.protocol import DATAGRAM_SUFFIX

log = logging.getLogger("ml_rag.server")

MAX_BYTES = 64 * 1024
#: datagrams that are read before other work has its turn
AT_ONCE = 64
_CREDENTIALS = struct.Struct("3i")


def beside(path: Path) -> Path:
    """Where the datagram socket of the unix socket at ``path`` is."""
    return path.with_name(path.name + DATAGRAM_SUFFIX)


def bind_beside(path: Path, mode: int, gid: int | None) -> socket.socket:
    """The datagram socket of the unix socket at ``path``, which is this server's own. Raises OSError."""
    place = beside(path)
    if place.is_socket():
        place.unlink()
    return bind_at(place, socket.SOCK_DGRAM, mode, gid)


def bind_at(path: Path, kind: socket.SocketKind, mode: int, gid: int | None) -> socket.socket:
    """A unix socket whose file has this mode and group; no client can connect before it listens. Raises OSError."""
    made = socket.socket(socket.AF_UNIX, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, int(kind == socket.SOCK_DGRAM))
        made.bind(str(path))
        path.chmod(mode)
        if gid is not None:
            os.chown(path, -1, gid)
    except BaseException:
        made.close()
        raise
    return made


def bind_udp(listener: socket.socket) -> socket.socket | None:
    """The UDP socket of a TCP socket, at the same address; None where another program has that port."""
    address = listener.getsockname()
    inbox = socket.socket(listener.family, socket.SOCK_DGRAM)
    try:
        inbox.bind(address)
    except OSError as error:
        inbox.close()
        log.warning("UDP port %d cannot be had: calls that come by TCP are not counted (%s)", address[1], error)
        return None
    return inbox


class Inbox:
    """What takes datagrams from its sockets and hands them on, those of allowed users."""

    def __init__(
        self, receive: Callable[[bytes], object], allowed: frozenset[int], refused: Callable[[], object]
    ) -> None:
        self._receive, self._allowed, self._refused = receive, allowed, refused
        self._sockets: list[socket.socket] = []

    def listen(self, inbox: socket.socket) -> None:
        """Read from the socket from now on, in the running event loop."""
        inbox.setblocking(False)
        self._sockets.append(inbox)
        asyncio.get_running_loop().add_reader(inbox, self._read, inbox)

    def close(self, inbox: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(inbox)
        self._sockets.remove(inbox)
        inbox.close()

    def drain(self) -> None:
        """Take what has come."""
        for inbox in self._sockets:
            self._read(inbox)

    def _read(self, inbox: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the socket is empty
            for _ in range(AT_ONCE):
                data, ancillary, _, _ = inbox.recvmsg(MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
                if inbox.family == socket.AF_UNIX and _sender(ancillary) not in self._allowed:
                    self._refused()
                else:
                    self._receive(data)


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """The uid of the process that sent a datagram over a unix socket."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            uid: int = _CREDENTIALS.unpack_from(data)[1]
            return uid
    return None
