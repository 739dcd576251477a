"""Serving an application over HTTP: a connection that sends no whole request is closed and takes no place of others."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ml_rag.errors import MlRagError

#: seconds for which a connection may be without a whole head of a request
PATIENCE = 10.0
#: bytes of a head, and of the rest of a body that is not read
HEAD, BODY = 64 * 1024, 1024 * 1024
#: connections at most, and descriptors that are left for all else
MOST, OTHERS = 4096, 128


def protocol(connections: int = 0) -> type[asyncio.Protocol]:
    """uvicorn's protocol with these bounds. ``connections``: to the database."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if descriptors == resource.RLIM_INFINITY else min(MOST, descriptors - OTHERS - connections)

    class Protocol(AutoHTTPProtocol):  # type: ignore[valid-type,misc]
        #: since when a head is awaited, or bytes come that are part of none yet, and how many; None: neither. Not by
        #: uvloop's clock, which stands still while several connections come
        _since: float | None = None
        _loose = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._since = monotonic()
            self.loop.call_later(PATIENCE, self._look)
            if len(self.connections) > most:
                waiting = [other for other in self.connections if other._since is not None]
                min(waiting, key=lambda other: other._since).transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._since, self._loose = None, 0
                return
            self._since = monotonic() if self._since is None else self._since
            self._loose += len(data)
            # after a request it can be the rest of a body that is not read
            if self._loose > (HEAD if self.cycle is None else BODY):
                self.transport.close()

        def _look(self) -> None:
            if self._since is not None and monotonic() - self._since >= PATIENCE:
                self.transport.abort()
            elif self in self.connections:
                self.loop.call_later(PATIENCE, self._look)

    return Protocol


def serve(app: ASGIApp, host: str, port: int, connections: int, ready: Callable[[str], object]) -> None:
    """Serve until SIGTERM or SIGINT. ``ready`` gets the address, ``http://HOST:PORT``, once it is listened on.

    ``connections``: of the application to the database. Raises MlRagError where the address cannot be listened on.
    """
    address = f"{f'[{host}]' if ':' in host else host}:{port}"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(f"http://{address}")

    bounds: Any = protocol(connections)  # uvicorn's annotation names its own only
    server = Server(
        uvicorn.Config(app, http=bounds, ws="none", host=host, port=port, log_level="warning", server_header=False)
    )
    with contextlib.suppress(SystemExit):  # uvicorn's where another program has the port
        server.run()
    if not server.started:
        raise MlRagError(f"cannot listen on {address}", hint="The log above says why; --port takes another.")
