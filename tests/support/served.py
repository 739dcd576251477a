"""The gateway and the page of the integrations, served from a thread of the test's."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn


@contextlib.contextmanager
def served(made: Callable[[int], Any], http: Any = "auto") -> Iterator[int]:
    """The port of 127.0.0.1 at which an ASGI application answers that is made for it. ``http``: the protocol."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(made(port), http=http, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.02)
            yield port
        finally:
            server.should_exit = True
            thread.join(60)


@contextlib.contextmanager
def gateway_of(dsn: str, config: Any, connections: int = 8) -> Iterator[str]:
    """The base URL of a gateway for OpenAI's client."""
    from ml_rag.integrations import gateway
    from ml_rag.integrations.connections import protocol

    with served(lambda _: gateway.app(dsn, config, connections), protocol(connections)) as port:
        yield f"http://127.0.0.1:{port}/v1"


@contextlib.contextmanager
def explored(dsn: str, token: str, marks: str | None = None) -> Iterator[str]:
    """The address of the page that shows why."""
    from ml_rag.integrations import explore

    with served(lambda port: explore.app(dsn, token, port, marks)) as port:
        yield f"http://127.0.0.1:{port}"
