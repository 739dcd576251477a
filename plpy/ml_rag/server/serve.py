"""Runs the application under uvicorn: the peer check on each connection, the timeouts, a quick and clean end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import orjson
import uvicorn
from starlette.datastructures import State
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ml_rag import __version__, priority
from ml_rag.errors import InvalidRequest, MlRagError, PrivilegeError, QueueFull
from ml_rag.server.app import create_app
from ml_rag.server.catalogue import Catalogue, ServerConfig
from ml_rag.server.inbox import Inbox, bind_udp
from ml_rag.server.notify import notify
from ml_rag.server.registry import Registry
from ml_rag.server.sockets import CannotListen, UnixListener, allowed_uids, bind_tcp, peer_uid

log = logging.getLogger("ml_rag.server")

#: how long requests in progress get at SIGTERM; they are cancelled at once, so this is a bound only
SHUTDOWN_SECONDS = 3
#: how long a refused peer may take to read why
REFUSED_SECONDS = 1.0
#: seconds from a line about a user to the next: users who may not connect must not be able to fill the log
REFUSED_LOG_SECONDS = 60.0
#: how often the socket's file is looked for, and how soon one in whose place there is something else is tried again
SOCKET_CHECK_SECONDS = 1.0
SOCKET_RETRY_SECONDS = 10.0
#: connections that are refused at once and still get that time: each holds a descriptor
MAX_REFUSALS = 16
#: descriptors that connections leave, at least
OTHER_DESCRIPTORS = 48
#: of a request's head, and of what comes in without being part of a body, such as trailers; a buffer more may come in
MAX_HEAD_BYTES = 64 * 1024
#: pieces of a body that may be shorter on average than so many bytes: a buffer of 256 kB holds thousands of them, and
#: all connections wait while it is read
MAX_SHORT_PIECES, SHORT_PIECE_BYTES = 4096, 8


def _protocol(
    allowed: frozenset[int], refused: Callable[[], object], header_timeout: float, max_connections: int
) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with the peer's uid checked first, and bounds: on connections, on a head and its time."""
    told: dict[int, float] = {}  # uid -> when the log had it last
    refusals = [0]  # connections that have been refused, and not yet closed

    class Protocol(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        #: bytes since the last head was complete or the last piece of a body came; the parser keeps them, without bound
        _loose_bytes = 0
        _pieces = _body_bytes = 0

        def connection_made(self, transport: Any) -> None:
            connection = transport.get_extra_info("socket")
            uid = peer_uid(connection)
            if uid is not None and uid not in allowed:
                refused()
                now = self.loop.time()
                if now - told.get(uid, -math.inf) >= REFUSED_LOG_SECONDS:
                    told[uid] = now
                    log.warning("refused a connection of uid %d", uid)
                self._refuse(transport, _forbidden(uid))
                return
            if len(self.connections) >= max_connections and not self._close_an_idle_one():
                log.warning("refused a connection: %d are open", len(self.connections))
                self._refuse(transport, _too_many(max_connections))
                return
            super().connection_made(transport)
            self._start_head_timer()

        def _refuse(self, transport: Any, reply: bytes) -> None:
            transport.write(reply)
            if refusals[0] >= MAX_REFUSALS:
                transport.close()
                return
            refusals[0] += 1
            transport.write_eof()
            # closing at once would reset the connection under a client that is still sending its request
            self.loop.call_later(REFUSED_SECONDS, self._end_refusal, transport)

        def _end_refusal(self, transport: Any) -> None:
            refusals[0] -= 1
            transport.abort()

        def _close_an_idle_one(self) -> bool:
            """A session that is kept waiting opens its connection again; one that waits in vain has an error."""
            for other in self.connections:
                cycle = getattr(other, "cycle", None)
                if cycle is not None and cycle.response_complete and not other.transport.is_closing():
                    other.transport.close()
                    return True
            return False

        def data_received(self, data: bytes) -> None:
            if self.transport is None or self.transport.is_closing():  # None: refused above
                return
            self._loose_bytes += len(data)
            super().data_received(data)
            if self._loose_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._stop_head_timer()
                self.transport.write(_head_too_long())
                self.transport.close()

        def eof_received(self) -> None:
            if self.transport is not None:
                super().eof_received()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
            if self.transport is not None:
                super().connection_lost(exc)

        def on_message_begin(self) -> None:
            # uvicorn would tell only the last request that the client has gone, and not read on to find out
            if self.cycle is not None and not self.cycle.response_complete:
                raise ValueError("a request has come before the answer to the last")  # answered by 400
            self._start_head_timer()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._stop_head_timer()
            self._loose_bytes = self._pieces = self._body_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._loose_bytes = 0
            self._pieces += 1
            self._body_bytes += len(body)
            if self._pieces > MAX_SHORT_PIECES and self._body_bytes < SHORT_PIECE_BYTES * self._pieces:
                raise ValueError("the body comes in too many pieces")  # answered by 400
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._loose_bytes = 0
            super().on_message_complete()

        def _start_head_timer(self) -> None:
            self._stop_head_timer()
            self._head_timer = self.loop.call_later(header_timeout, self.transport.close)

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Protocol


def _forbidden(uid: int) -> bytes:
    return _reply(
        PrivilegeError(
            "this user may not use the model server",
            detail=f"uid {uid} is not an allowed peer",
            hint="Add the user to allowed_users under [server] in the model server's configuration.",
        )
    )


def _too_many(limit: int) -> bytes:
    return _reply(
        QueueFull(
            "the model server has too many connections",
            detail=f"{limit} are open, and none of them is idle",
            hint="Try again, or raise max_connections under [server] in the model server's configuration and the limit "
            "on its open files.",
        )
    )


def _head_too_long() -> bytes:
    error = InvalidRequest("the request's head is too long", detail=f"it may have {MAX_HEAD_BYTES} bytes")
    return _reply(error, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)


def _reply(error: MlRagError, status: HTTPStatus | None = None) -> bytes:
    """A whole reply, for a connection that gets no further."""
    body = orjson.dumps(error.to_json())
    status = status or HTTPStatus(error.status)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-ml-rag-version: {__version__}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        state: State,
        unix: UnixListener | None,
        udp: socket.socket | None,
        on_ready: Callable[[], object],
    ) -> None:
        """``state``: of the application."""
        super().__init__(config)
        self._registry: Registry = state.registry
        self._inbox: Inbox = state.inbox
        self._unix = unix
        self._udp = udp
        self._on_ready = on_ready
        self._keeping: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        if self._udp is not None:
            self._inbox.listen(self._udp)
        if self._unix is not None:
            self._inbox.listen(self._unix.datagrams)
            self._keeping = asyncio.create_task(self._keep_socket(self._unix))
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: Any = None) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        await super().shutdown(sockets=sockets)

    async def _keep_socket(self, unix: UnixListener) -> None:
        """Put the socket back where its file is removed or replaced, as somebody who tidies /run or /tmp does."""
        loop = asyncio.get_running_loop()
        in_the_way: object = None
        told = ""
        again = 0.0
        while True:
            await asyncio.sleep(SOCKET_CHECK_SECONDS)
            if unix.is_in_place() or (unix.found() == in_the_way and loop.time() < again):
                continue
            listener, datagrams = unix.socket, unix.datagrams
            try:
                await asyncio.to_thread(unix.renew)
            except (CannotListen, OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                in_the_way, again = unix.found(), loop.time() + SOCKET_RETRY_SECONDS
                text = f"{error} ({error.detail})" if isinstance(error, CannotListen) and error.detail else str(error)
                if text != told:
                    told = text
                    log.error("the socket was removed or replaced, and cannot be put back: %s", text)
                continue
            finally:
                if unix.socket is not listener:
                    await self._listen_again(unix.socket)
                if unix.datagrams is not datagrams:
                    self._inbox.close(datagrams)
                    self._inbox.listen(unix.datagrams)
            told = ""
            log.warning("the socket %s had been removed or replaced: it was made again", unix.path)

    async def _listen_again(self, listener: socket.socket) -> None:
        """The same as uvicorn does with the sockets it is given."""
        make: Callable[[], asyncio.Protocol] = functools.partial(
            cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        former = self.servers[0]  # that of the first socket, which ``serve`` makes the unix one
        loop = asyncio.get_running_loop()
        self.servers[0] = await loop.create_server(make, sock=listener, backlog=self.config.backlog)
        former.close()  # no more than its listening: no client can find it any more, and it holds a descriptor

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._registry.closing.set()
        notify("STOPPING=1")
        super().handle_exit(sig, frame)


def serve(
    catalogue: Catalogue,
    models_dir: Path,
    socket_path: Path | None,
    listen: str | None = None,
    on_ready: Callable[[list[str]], object] = lambda addresses: None,
) -> None:
    """Serve until SIGTERM or SIGINT. ``on_ready`` gets the addresses once the server answers.

    Raises ``CannotListen``.
    """
    server = catalogue.server
    os.environ[priority.VARIABLE] = str(server.background_nice)
    max_connections = _max_connections(server, _allow_descriptors())
    _name_temporary_folder()
    registry = Registry(catalogue, models_dir)
    sockets, addresses = [], []
    unix = udp = None
    if socket_path is not None:
        unix = UnixListener(socket_path, server)
        sockets.append(unix.socket)
        addresses.append(f"unix:{socket_path}")
    if listen is not None:
        sockets.append(bind_tcp(listen))
        udp = bind_udp(sockets[-1])
        host, port = sockets[-1].getsockname()[:2]
        addresses.append(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    protocol = _protocol(
        allowed_uids(server), registry.metrics.refused_peers.inc, server.header_timeout_seconds, max_connections
    )
    app = create_app(registry)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=server.keep_alive_seconds,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        backlog=1024,
    )
    runner = _Server(config, app.state, unix, udp, lambda: on_ready(addresses))
    # uvicorn raises the signal that stopped it once more at the end; there is work left to do then
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        runner.run(sockets=sockets)
    finally:
        registry.close()
        for listener in sockets:
            listener.close()
        if unix is not None:
            unix.remove()


def _name_temporary_folder() -> None:
    """Where temporary files go. Python itself names no folder where each of them is full; the server still answers."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")  # noqa: S108 - what Python would have tried next
        log.warning("no room for temporary files in %s: no large document can be loaded", tempfile.tempdir)


def _allow_descriptors() -> int:
    """As many as this process may have; the usual start is 1024. Returns how many that are."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def _max_connections(server: ServerConfig, descriptors: int) -> int:
    """Connections that leave descriptors for models, uploads and parsers: a connection that cannot be accepted just
    breaks off, and one too many gets a reply that says so."""
    most = max(1, descriptors - max(OTHER_DESCRIPTORS, descriptors // 4))
    if most < server.max_connections:
        log.warning(
            "this process may open %d files: it takes %d connections, not the %d of max_connections",
            descriptors,
            most,
            server.max_connections,
        )
    return min(most, server.max_connections)


def exit_now() -> None:
    """End the process even while a model's thread is inside a call that cannot be interrupted, as loading one."""
    for thread in threading.enumerate():
        if thread.name.startswith("model-"):
            thread.join(timeout=1.0)
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)
