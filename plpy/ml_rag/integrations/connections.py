"""Serving an application over HTTP: a connection that sends no whole request, or does not read its answer, is closed
and takes no place of others."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ml_rag.errors import MlRagError

#: seconds for which a connection may be without a whole head of a request, and then without all of its body; the former
#: for requests that are at work when the server ends, too
PATIENCE, BODY_PATIENCE = 10.0, 60.0
#: bytes of a head, or between pieces of a body, and of the rest of a body that is not read
HEAD, BODY = 64 * 1024, 1024 * 1024
#: bytes of the bodies of all requests that have not come as a whole; one that is uploaded has 64 MB
BODIES = 256 * 1024 * 1024
#: connections at most, and descriptors that are left for all else
MOST, OTHERS = 4096, 128


def protocol(connections: int = 0) -> type[asyncio.Protocol]:
    """uvicorn's protocol with these bounds. ``connections``: to the database."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if descriptors == resource.RLIM_INFINITY else min(MOST, descriptors - OTHERS - connections)

    coming = 0

    class Protocol(HttpToolsProtocol):
        #: since when a request is awaited, or bytes come that are part of none yet; None: neither. Not by uvloop's
        #: clock, which stands still while several connections come
        _since: float | None = None
        #: bytes since the last head was complete or a piece of a body came: the parser keeps what is in a head or a
        #: trailer
        _loose = 0
        #: since when answers are not read, as far as is known; None: they are
        _unread: float | None = None
        #: bytes of a body that has not come as a whole
        _coming = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._since = monotonic()
            self.loop.call_later(PATIENCE, self._look)
            others: Any = self.connections  # all of them are of this class
            if len(others) > most:
                min(others, key=Protocol._waits).transport.abort()

        def _waits(self) -> float:
            """Since when it is its client's turn; infinity: it is not."""
            return min(since for since in (self._since, self._unread, math.inf) if since is not None)

        def data_received(self, data: bytes) -> None:
            self._loose += len(data)
            super().data_received(data)
            self._since = monotonic() if self._since is None else self._since
            if self._is_asked() and not self.cycle.more_body:
                self._since = None
                self._count(0)
            # after a request that is answered it can be the rest of a body that is not read
            is_rest = self.cycle is not None and self.cycle.response_complete
            if self._loose > (BODY if is_rest else HEAD):
                self.transport.close()

        def on_headers_complete(self) -> None:
            self._loose = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if self._is_asked():
                self._loose = 0
                self._count(self._coming + len(body))
            super().on_body(body)
            others: Any = self.connections
            while coming > BODIES:
                # not the slowest: a client that keeps opening new ones could have those of others given up
                largest = max(others, key=lambda one: one._coming)
                largest._count(0)
                largest.transport.abort()

        def _count(self, length: int) -> None:
            """Note how long the body is that has not come as a whole; 0: it has, or is not waited for."""
            nonlocal coming
            coming += length - self._coming
            self._coming = length

        def _is_asked(self) -> bool:
            """Whether the head of a request has come that is not answered yet."""
            return self.cycle is not None and not self.cycle.response_complete

        def on_message_begin(self) -> None:
            # uvicorn would tell only the last request that the client has gone, and not read on to find out
            if self._is_asked():
                self.cycle.disconnected = True  # else its answer is an error in the log
                raise ValueError("a request has come before the answer to the last")  # answered by 400
            super().on_message_begin()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._count(0)
            if not self._is_asked():
                self._since = monotonic()

        def connection_lost(self, exc: Exception | None) -> None:
            self._count(0)
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = monotonic()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unread = None

        def _look(self) -> None:
            patience = BODY_PATIENCE if self._is_asked() else PATIENCE
            if self._unread is None and self.transport.is_closing():
                self._unread = monotonic()
            elif self._unread is not None and monotonic() - self._unread >= BODY_PATIENCE:
                self.transport.abort()
            if self._since is not None and monotonic() - self._since >= patience:
                self.transport.abort()
            elif self in self.connections:
                self.loop.call_later(PATIENCE, self._look)

    return Protocol


def serve(app: ASGIApp, host: str, port: int, connections: int, ready: Callable[[str], object]) -> None:
    """Serve until SIGTERM or SIGINT, and what is asked by then for ``PATIENCE`` more.

    ``ready`` gets the address, ``http://HOST:PORT``, once it is listened on. ``connections``: of the application to the
    database. Raises MlRagError where the address cannot be listened on.
    """
    address = f"{f'[{host}]' if ':' in host else host}:{port}"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(f"http://{address}")

    bounds: Any = protocol(connections)  # uvicorn's annotation names its own only
    server = Server(
        uvicorn.Config(
            app, http=bounds, ws="none", host=host, port=port, log_level="warning", server_header=False,
            timeout_graceful_shutdown=math.ceil(PATIENCE),
        )
    )  # fmt: skip
    with contextlib.suppress(SystemExit):  # uvicorn's where another program has the port
        server.run()
    if not server.started:
        raise MlRagError(f"cannot listen on {address}", hint="The log above says why; --port takes another.")
