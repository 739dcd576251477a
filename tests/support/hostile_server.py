"""Model servers that misbehave: a thread on a unix socket that answers each request as the test says."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_rag.protocol import CALL_HEADER
from ml_rag.server.calls import Calls
from ml_rag.server.inbox import MAX_BYTES, beside, bind_beside
from ml_rag.server.metrics import Metrics
from support.cluster import Connection

#: gets the open connection and the request (head and body), writes what it likes
Handler = Callable[[socket.socket, bytes], None]

_numbers = itertools.count()


class HostileServer:
    """Answers every request by ``handler``; ``requests`` holds what came, ``gone`` is set when a client hung up.

    Connections over which nothing is asked do not count. What sessions tell of their calls it takes as a model server
    does, and those who ask for that do not count either.
    """

    def __init__(self, path: Path, handler: Handler) -> None:
        self.address = f"unix:{path}"
        self.handler = handler
        self.requests: list[bytes] = []
        self.connections = 0
        self.gone = threading.Event()
        self._path = path
        self._clients: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o666)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        self.calls = Calls(Metrics())
        self.show_calls: Handler = self._show_calls
        self._lock = threading.Lock()
        self._inbox = bind_beside(path, 0o666, None)
        self._inbox.setblocking(False)
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is closed
            while True:
                select.select([self._inbox], [], [], 0.5)
                with self._lock:
                    self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.calls.receive(self._inbox.recv(MAX_BYTES))

    def _show_calls(self, client: socket.socket, request: bytes) -> None:
        asked = json.loads(request.partition(b"\r\n\r\n")[2])
        cluster, database = asked["cluster"], asked["database"]
        with self._lock:
            self._drain()
            for pid, session in asked.get("gone", []):
                self.calls.end(cluster, pid, session)
            if asked.get("reset"):
                self.calls.reset(cluster, database)
            since, rows = self.calls.stats(cluster, database)
            answer = {"since": since, "activity": self.calls.activity(cluster), "stats": rows}
        reply(answer)(client, request)

    def _handle(self, client: socket.socket, request: bytes) -> None:
        told = re.search(rf"^{CALL_HEADER}: (.*)\r$".encode(), request, re.MULTILINE)
        with self._lock:
            call = self.calls.receive(told[1]) if told else None
        try:
            self.handler(client, request)
        finally:
            with self._lock:
                if call is not None:
                    self.calls.answered(call)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        has_asked = False
        with client, contextlib.suppress(OSError):
            while request := self._request(client):
                if request.startswith(b"POST /v1/calls "):
                    self.show_calls(client, request)
                    continue
                self.connections += not has_asked
                has_asked = True
                self.requests.append(request)
                self._handle(client, request)
        if has_asked:
            self.gone.set()

    @staticmethod
    def _request(client: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            if not (piece := client.recv(65536)):
                return b""
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length":
                length = int(value)
        while len(body) < length:
            if not (piece := client.recv(1 << 20)):
                return b""
            body += piece
        return head + b"\r\n\r\n" + body

    def close(self) -> None:
        """Stop listening and break every connection."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._inbox.close()
        beside(self._path).unlink(missing_ok=True)
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            client.close()
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def hostile(
    directory: Path, handler: Handler, name: str | None = None, *, owner: Connection | None = None
) -> Iterator[HostileServer]:
    """``owner``: of the database whose model server it is."""
    server = HostileServer(directory / (name or f"hostile{next(_numbers)}.sock"), handler)
    try:
        if owner is not None:
            owner.execute("SELECT ml_rag.configure('model_server', %s)", (server.address,))
        yield server
    finally:
        server.close()


def head(length: int | None, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    """The head of a reply."""
    fields = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}"]
    if length is not None:
        fields.append(f"Content-Length: {length}")
    return ("\r\n".join(fields) + "\r\n\r\n").encode()


def send(data: bytes, *, close: bool = False) -> Handler:
    """A handler that writes these bytes."""

    def handler(client: socket.socket, request: bytes) -> None:
        client.sendall(data)
        if close:
            client.shutdown(socket.SHUT_RDWR)

    return handler


def endless(first: bytes, again: bytes) -> Handler:
    """A handler that writes these bytes, then others until the client hangs up."""

    def handler(client: socket.socket, request: bytes) -> None:
        client.sendall(first)
        with contextlib.suppress(OSError):
            while True:
                client.sendall(again)

    return handler


def reply(body: Any, status: str = "200 OK") -> Handler:
    """A handler that answers properly: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(head(len(data), status) + data)


def encoded(vector: Sequence[float]) -> str:
    """The text form of a vector; NaN and infinity as pgvector would write them if it had them."""
    return json.dumps(list(vector), separators=(",", ":"))


def embeddings(*vectors: Sequence[float]) -> Any:
    """A proper reply to /v1/embeddings."""
    return {"data": [{"index": i, "embedding": encoded(v)} for i, v in enumerate(vectors)]}


def completion(text: Any, **more: Any) -> Any:
    """A proper reply to /v1/chat/completions."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}], **more}


def silent(client: socket.socket, request: bytes) -> None:
    """Never answers; returns when the client hangs up."""
    with contextlib.suppress(OSError):
        client.recv(1)
