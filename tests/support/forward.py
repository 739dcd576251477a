"""TCP in front of a unix socket, for clients that have no unix sockets."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo


@contextlib.contextmanager
def forwarded(path: Path) -> Iterator[int]:
    """A port of 127.0.0.1 behind which the server of this socket answers. Connections end with the block."""
    ended = threading.Event()

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as behind:
                behind.connect(str(path))
                other = {self.request: behind, behind: self.request}
                while not ended.is_set():
                    for source in select.select(list(other), [], [], 0.1)[0]:
                        content = source.recv(1 << 16)
                        if not content:
                            return
                        other[source].sendall(content)

    # leaving the block waits for the threads of the connections
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            ended.set()
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def by_tcp(dsn: str) -> Iterator[str]:
    """The DSN of the same database by TCP. Skips the test where the database is on another machine."""
    parts = conninfo_to_dict(dsn)
    path = Path(str(parts["host"])) / f".s.PGSQL.{parts['port']}"
    if not path.is_socket():
        pytest.skip("the database is on another machine")
    with forwarded(path) as port:
        yield make_conninfo(dsn, host="127.0.0.1", port=port)
