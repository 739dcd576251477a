"""A proxy before a real model server, that spoils the replies to one path on demand."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from support.hostile_server import HostileServer, head, hostile, silent

#: gets the connection, the request and the whole reply of the real server
Fault = Callable[[socket.socket, bytes, bytes], None]


class FaultyProxy:
    """A handler for ``hostile``. ``arm`` spoils what follows, until ``disarm``."""

    def __init__(self, behind: Path) -> None:
        self._behind = behind
        self._path = b""
        self._fault: Fault | None = None
        #: replies that were spoilt
        self.spoilt = 0

    def arm(self, path: str, fault: Fault) -> None:
        self._path, self._fault, self.spoilt = path.encode(), fault, 0

    def disarm(self) -> None:
        self._fault = None

    def __call__(self, client: socket.socket, request: bytes) -> None:
        reply = self._ask(request)
        if self._fault is not None and self._is_meant(request):
            self.spoilt += 1
            self._fault(client, request, reply)
        else:
            client.sendall(reply)
            hang_up(client)  # as the real server has said in its head

    def _is_meant(self, request: bytes) -> bool:
        return self._path in request.split(b"\r\n")[0]

    def _ask(self, request: bytes) -> bytes:
        line, _, rest = request.partition(b"\r\n")
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(str(self._behind))
            server.sendall(line + b"\r\nConnection: close\r\n" + rest)
            return b"".join(iter(lambda: server.recv(1 << 20), b""))


@contextlib.contextmanager
def faulty_proxy(folder: Path, behind: Path) -> Iterator[tuple[HostileServer, FaultyProxy]]:
    proxy = FaultyProxy(behind)
    with hostile(folder, proxy) as running:
        yield running, proxy


def hang_up(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


# -- faults -----------------------------------------------------------------------------------------------------------


def hang(client: socket.socket, request: bytes, reply: bytes) -> None:
    """No answer at all."""
    silent(client, request)


def trickle(client: socket.socket, request: bytes, reply: bytes) -> None:
    """All of it, a little at a time."""
    step = max(1, len(reply) // 40)
    for start in range(0, len(reply), step):
        client.sendall(reply[start : start + step])
        time.sleep(0.01)
    hang_up(client)


def garbage(client: socket.socket, request: bytes, reply: bytes) -> None:
    client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is no HTTP\r\n\r\n" * 20)
    hang_up(client)


def truncate(client: socket.socket, request: bytes, reply: bytes) -> None:
    """The head and half of the body."""
    start = reply.index(b"\r\n\r\n") + 4
    client.sendall(reply[: (start + len(reply)) // 2])
    hang_up(client)


def closed(client: socket.socket, request: bytes, reply: bytes) -> None:
    """Not a byte."""
    hang_up(client)


def no_json(client: socket.socket, request: bytes, reply: bytes) -> None:
    body = b'{"data": [{"index": 0, "embedding": [0.1, 0.2\n'
    client.sendall(head(len(body)) + body)


def other_json(client: socket.socket, request: bytes, reply: bytes) -> None:
    body = b'[{"hello": "world"}]\n'
    client.sendall(head(len(body)) + body)


def web_page(client: socket.socket, request: bytes, reply: bytes) -> None:
    """What a proxy or another server at that address says."""
    body = b"<html><body>Bad Gateway</body></html>"
    client.sendall(head(len(body), "502 Bad Gateway", "text/html") + body)


def change(numbers: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """Other vectors, or scores, in a reply that is proper else."""

    def fault(client: socket.socket, request: bytes, reply: bytes) -> None:
        body = _body(reply)
        if b"/v1/documents" in request.split(b"\r\n")[0]:
            lines = [_changed_line(json.loads(line), numbers) for line in body.splitlines()]
            changed = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        else:
            changed = json.dumps(_changed(json.loads(body), numbers)).encode()
        client.sendall(head(len(changed)) + changed)

    return fault


def _changed(reply: dict[str, Any], numbers: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
    for item in reply.get("data", ()):
        vector = numbers(np.array(json.loads(item["embedding"]), np.float32))
        item["embedding"] = json.dumps(vector.tolist(), separators=(",", ":"))
    for item in reply.get("results", ()):
        item["relevance_score"] = float(numbers(np.array([item["relevance_score"]], np.float32))[0])
    return reply


def _changed_line(line: dict[str, Any], numbers: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
    vectors = np.frombuffer(b64decode(line["embeddings"]), "<f4").reshape(-1, line["dimensions"])
    changed = np.array([numbers(vector) for vector in vectors], "<f4")
    return {**line, "dimensions": changed.shape[1], "embeddings": b64encode(changed.tobytes()).decode()}


def _body(reply: bytes) -> bytes:
    fields, _, body = reply.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in fields.lower():
        return body
    pieces = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return b"".join(pieces)
        pieces.append(body[:length])
        body = body[length + 2 :]


def not_a_number(vector: np.ndarray) -> np.ndarray:
    spoilt = vector.copy()
    spoilt[-1] = np.nan
    return spoilt


def infinite(vector: np.ndarray) -> np.ndarray:
    spoilt = vector.copy()
    spoilt[0] = np.inf
    return spoilt


def one_more(vector: np.ndarray) -> np.ndarray:
    return np.append(vector, np.float32(1))
