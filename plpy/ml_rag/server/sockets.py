"""Where the server listens: a private unix socket whose peers are checked, and TCP where the administrator says so."""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import pwd
import socket
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ml_rag.errors import MlRagError
from ml_rag.protocol import DATAGRAM_SUFFIX
from ml_rag.server.inbox import beside, bind_at, bind_beside

if TYPE_CHECKING:
    from ml_rag.server.catalogue import ServerConfig

log = logging.getLogger("ml_rag.server")

#: longest path a unix socket can have on Linux, without the closing zero byte; that for datagrams has the longer one
MAX_SOCKET_PATH = 107 - len(DATAGRAM_SUFFIX)
_BACKLOG = 1024


class CannotListen(MlRagError):
    """The socket or address cannot be taken."""


def bind_unix(path: Path, config: ServerConfig) -> socket.socket:
    """A listening unix socket at ``path``, with ``socket_mode`` and ``socket_group``; its folder is made if missing.

    A socket file on which no server answers is removed first. Raises ``CannotListen``.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise CannotListen(f"the socket path {path} is too long", hint=f"Use at most {MAX_SOCKET_PATH} bytes.")
    mode = int(config.socket_mode, 8)
    gid = _group(config.socket_group)
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, mode=0o700)
            if gid is not None:
                os.chown(path.parent, -1, gid)
                path.parent.chmod(0o750)
        _remove_stale(path)
        listener = bind_at(path, socket.SOCK_STREAM, mode, gid)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise CannotListen(
            f"cannot listen on {path}",
            detail=error.strerror or str(error),
            hint="Choose a path in a folder this user may write to: ml-rag serve --socket PATH, or ML_RAG_SOCKET.",
        ) from error
    listener.setblocking(False)
    return listener


class UnixListener:
    """The unix socket of a server and the one for datagrams beside it, and whether their files are still there.

    Raises ``CannotListen``.
    """

    def __init__(self, path: Path, config: ServerConfig) -> None:
        self.path = path
        self._config = config
        self._bind()

    def _bind(self) -> None:
        self.socket = bind_unix(self.path, self._config)
        self._place = _file(self.path)
        self._bind_datagrams()

    def _bind_datagrams(self) -> None:
        mode, gid = int(self._config.socket_mode, 8), _group(self._config.socket_group)
        try:
            self.datagrams = bind_beside(self.path, mode, gid)
        except OSError as error:
            raise CannotListen(
                f"cannot listen on {beside(self.path)}",
                detail=error.strerror or str(error),
                hint="Remove what is there.",
            ) from error
        self._place_beside = _file(beside(self.path))

    def found(self) -> tuple[tuple[int, int] | None, ...]:
        """What is at the paths now; None: nothing."""
        return _file(self.path), _file(beside(self.path))

    def is_in_place(self) -> bool:
        return None not in self.found() and self.found() == (self._place, self._place_beside)

    def renew(self) -> None:
        """Listen again if that is not in place: connections to the old socket continue, new ones cannot reach it.

        Raises ``CannotListen`` if something else has taken the place.
        """
        if _file(self.path) == self._place is not None:
            self._bind_datagrams()
        else:
            self._bind()

    def remove(self) -> None:
        """Remove the files that are still this server's."""
        for path, place in ((self.path, self._place), (beside(self.path), self._place_beside)):
            if place is not None and _file(path) == place:
                with contextlib.suppress(OSError):
                    path.unlink()


def _file(path: Path) -> tuple[int, int] | None:
    """What is at a path now; None: nothing."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _group(name: str | None) -> int | None:
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise CannotListen(f"group {name} does not exist", hint="Correct socket_group.") from None


def _remove_stale(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise CannotListen(f"{path} exists and is not a socket", hint="Remove it or choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except (TimeoutError, BlockingIOError):
            pass  # somebody holds it, if only too busy to answer
    raise CannotListen(f"another server answers on {path}", hint="Stop it first, or choose another path with --socket.")


def bind_tcp(listen: str) -> socket.socket:
    """A listening TCP socket at ``"host:port"``. Raises ``CannotListen``."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise CannotListen(
            f"cannot listen on {listen}", hint="Give HOST:PORT, 127.0.0.1:8600 or [::1]:8600, port 0 to 65535."
        )
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # of a name that has both, the IPv4 address
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        is_v6 = family == socket.AF_INET6
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=is_v6)
    except (OSError, UnicodeError, ValueError) as error:  # ValueError: IPv6 is off; UnicodeError: not a name
        raise CannotListen(f"cannot listen on {listen}", detail=str(error)) from error
    listener.setblocking(False)
    return listener


def allowed_uids(config: ServerConfig) -> frozenset[int]:
    """The uids that may connect: the server's own, root, ``allowed_users``, the members of ``socket_group``."""
    return frozenset({0, os.getuid(), *_uids(config.allowed_users), *_members(config.socket_group)})


def _uids(users: Iterable[str | int]) -> Iterable[int]:
    for user in users:
        try:
            yield user if isinstance(user, int) else pwd.getpwnam(user).pw_uid
        except KeyError:
            # "postgres" is in the default, and need not exist where the database is in a container
            log.info("user %s, which is to be allowed, does not exist here", user)


def _members(group: str | None) -> Iterable[int]:
    if group is None:
        return
    try:
        entry = grp.getgrnam(group)
    except KeyError:
        return
    yield from _uids(entry.gr_mem)
    yield from (user.pw_uid for user in pwd.getpwall() if user.pw_gid == entry.gr_gid)


def peer_uid(connection: socket.socket) -> int | None:
    """The uid of the process at the other end of a unix socket; None for TCP."""
    if connection.family != socket.AF_UNIX:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
