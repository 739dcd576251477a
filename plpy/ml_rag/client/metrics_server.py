"""Metrics of a program, served by a thread of its own to all that reach the port."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

#: connections at most: those that send no request would use up the descriptors of the program
MOST = 16


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection; the oldest is ended where there are too many."""

    daemon_threads = True
    request_queue_size = 4 * MOST

    def __init__(self, *args: Any) -> None:
        self._open: list[socket.socket] = []
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        if len(self._open) > MOST:
            with contextlib.suppress(OSError):
                self._open.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)


class _ServerOf6(_Server):
    address_family = socket.AF_INET6


def serve(app: Callable[..., Any], address: str, port: int) -> None:
    """Serve until the program ends. Raises OSError where it cannot listen."""
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    kind = _ServerOf6 if family == socket.AF_INET6 else _Server
    server = make_server(str(found[0]), port, app, kind, _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
