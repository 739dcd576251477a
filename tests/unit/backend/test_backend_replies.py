"""backend/client.py: a reply is taken as the standard library's client takes it, or refused where HTTP says so."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ml_rag.errors import EngineFailed, MlRagError, ServerUnreachable
from support.backend_client import close_connections, connect, never, start
from support.hostile_server import HostileServer, send

__all__ = ["close_connections", "start"]

OK = b"HTTP/1.1 200 OK\r\n"
LONG = b'{"text": "' + b"x" * 200_000 + b'"}'

#: proper replies, after which the connection is as good as before
GOOD = {
    "usual": OK + b"content-length: 8\r\ncontent-type: application/json\r\n\r\n" + b'{"n": 1}',
    "its length last": OK + b"Server: uvicorn\r\nContent-Length: 8\r\n\r\n" + b'{"n": 1}',
    "long": OK + b"Content-Length: %d\r\n\r\n" % len(LONG) + LONG,
    "chunked": OK + b'Transfer-Encoding: chunked\r\n\r\n4\r\n{"n"\r\n004;x=y\r\n: 1}\r\n0\r\n\r\n',
    "fields after its body": OK + b'Transfer-Encoding: Chunked\r\n\r\n8\r\n{"n": 1}\r\n0\r\nX: y\r\n\r\n',
    "said to be closed": OK + b'Connection: close\r\nContent-Length: 8\r\n\r\n{"n": 1}',
    "of HTTP/1.0": b'HTTP/1.0 200 OK\r\nContent-Length: 8\r\n\r\n{"n": 1}',
    "lines without CR": b'HTTP/1.1 200 OK\nContent-Length: 8\n\n{"n": 1}',
    "a blank less": OK + b'Content-Length:8\r\n\r\n{"n": 1}',
    "a folded field": OK + b'X: a\r\n b\r\nContent-Length: 8\r\n\r\n{"n": 1}',
    "the same length twice": OK + b'Content-Length: 8\r\nContent-Length: 8\r\n\r\n{"n": 1}',
    "continue first": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b'Content-Length: 8\r\n\r\n{"n": 1}',
    "much in its head": OK + b"X: %s\r\n" % (b"x" * 30_000) + b'Content-Length: 8\r\n\r\n{"n": 1}',
}
#: proper ones that hold an error, or no value
REFUSED = {
    "an error": (
        b'HTTP/1.1 429 Full\r\nContent-Length: 52\r\n\r\n{"error": {"message": "full", "code": "queue_full"}}',
        53,
    ),
    "another status": (b'HTTP/1.1 201 Created\r\nContent-Length: 8\r\n\r\n{"n": 1}', 38),
    "without content": (b"HTTP/1.1 204 No Content\r\n\r\n", 38),
    "nothing in it": (OK + b"Content-Length: 0\r\n\r\n", 38),
    "no JSON": (OK + b"Content-Length: 4\r\n\r\n{{{{", 38),
}
#: replies that end with their connection, before their end or in spite of it
BROKEN = {
    "nothing": b"",
    "half a head": OK + b"Content-Le",
    "half a body": OK + b'Content-Length: 8\r\n\r\n{"n"',
    "hardly anything of it": OK + b'Content-Length: 999999\r\n\r\n{"n"',
    "half a chunk": OK + b'Transfer-Encoding: chunked\r\n\r\n8\r\n{"n"',
    "no last chunk": OK + b'Transfer-Encoding: chunked\r\n\r\n8\r\n{"n": 1}\r\n',
    "no body at all": OK + b"\r\n",
}
NOT_HTTP = {
    "another protocol": b"SSH-2.0-OpenSSH\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "a negative length": OK + b'Content-Length: -8\r\n\r\n{"n": 1}',
    "a length that is no number": OK + b'Content-Length: \xb2\r\n\r\n{"n": 1}',
    "of more than there is memory": OK + b'Content-Length: 99999999999999999999\r\n\r\n{"n"',
    "too many fields": OK + b"X: y\r\n" * 200 + b"\r\n",
    "a line without end": OK + b"X" * 100_000,
    "a chunk that is longer than it says": OK + b'Transfer-Encoding: chunked\r\n\r\n2\r\n{"n": 1}\r\n0\r\n\r\n',
    "a chunk of no size": OK + b'Transfer-Encoding: chunked\r\n\r\n\r\n{"n": 1}\r\n0\r\n\r\n',
}
sizes = pytest.mark.parametrize("size", [1, 7, 1 << 20])


def in_pieces(reply: bytes, size: int, *, close: bool = False) -> Callable[[socket.socket, bytes], None]:
    size = max(size, len(reply) // 2000)

    def handle(client: socket.socket, _: bytes) -> None:
        for at in range(0, len(reply), size):
            client.sendall(reply[at : at + size])
        if close:
            client.shutdown(socket.SHUT_RDWR)

    return handle


def reference(server: HostileServer, method: str, path: str, payload: Any = None) -> http.client.HTTPResponse:
    """The reply as ``http.client`` has it."""
    connection = http.client.HTTPConnection("ml_rag")
    with socket.socket(socket.AF_UNIX) as connection.sock:
        connection.sock.connect(server.address.removeprefix("unix:"))
        body = None if payload is None else json.dumps(payload, ensure_ascii=False).encode()
        connection.request(method, path, body, {} if body is None else {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.msg["body"] = reply.read().decode()
    return reply


@sizes
@pytest.mark.parametrize("name", GOOD)
def test_a_reply_is_what_it_is_to_http_client(start: Callable[..., HostileServer], name: str, size: int) -> None:
    server = start(in_pieces(GOOD[name], size))
    expected = json.loads(reference(server, "GET", "/").msg["body"])
    client = connect(server.address, never)
    assert client.call("GET", "/") == client.call("POST", "/", {"a": "é"}) == expected
    assert list(client.stream("/", b"x", "text/plain")) == [expected]
    assert server.connections == (4 if name in ("said to be closed", "of HTTP/1.0") else 2)


@pytest.mark.parametrize("name", REFUSED)
def test_a_reply_without_a_value_is_an_error(start: Callable[..., HostileServer], name: str) -> None:
    reply, sqlstate_class = REFUSED[name]
    server = start(send(reply))
    client = connect(server.address, never)
    for _ in range(2):
        with pytest.raises(MlRagError) as caught:
            client.call("POST", "/", {})
        assert caught.value.sqlstate.startswith(str(sqlstate_class))
    server.handler = send(GOOD["usual"])
    assert client.call("POST", "/", {}) == {"n": 1}


@sizes
@pytest.mark.parametrize("name", BROKEN)
def test_a_reply_that_ends_too_early_is_a_broken_connection(
    start: Callable[..., HostileServer], name: str, size: int
) -> None:
    server = start(in_pieces(BROKEN[name], size, close=True))
    client = connect(server.address, never)
    for method in ("GET", "POST"):
        with pytest.raises(ServerUnreachable, match="was lost"):
            client.call(method, "/", {} if method == "POST" else None)
    with pytest.raises((ServerUnreachable, EngineFailed)):
        list(client.stream("/", b"", "text/plain"))


@sizes
@pytest.mark.parametrize("name", NOT_HTTP)
def test_what_is_not_http_is_told(start: Callable[..., HostileServer], name: str, size: int) -> None:
    client = connect(start(in_pieces(NOT_HTTP[name], size, close=True)).address, never)
    for method in ("GET", "POST"):
        with pytest.raises(ServerUnreachable, match="not HTTP") as caught:
            client.call(method, "/", {} if method == "POST" else None)
        assert len(caught.value.detail or "") < 200


def test_a_reply_without_length_ends_with_its_connection(start: Callable[..., HostileServer]) -> None:
    server = start(send(OK + b'\r\n{"n": 1}', close=True))
    client = connect(server.address, never)
    assert [client.call("GET", "/") for _ in range(2)] == [{"n": 1}] * 2
    assert server.connections == 2


@pytest.mark.parametrize(("method", "payload"), [("GET", None), ("POST", {"a": "é"})])
def test_the_request_is_that_of_http_client(start: Callable[..., HostileServer], method: str, payload: Any) -> None:
    server = start(send(GOOD["usual"]))
    connect(server.address, never).call(method, "/v1/embeddings", payload)
    reference(server, method, "/v1/embeddings", payload)
    assert server.requests[0] == server.requests[1]


def test_a_large_request_arrives_whole(start: Callable[..., HostileServer]) -> None:
    server = start(send(GOOD["usual"]))
    assert connect(server.address, never).call("POST", "/", "x" * 5_000_000) == {"n": 1}
    assert server.requests[0].partition(b"\r\n\r\n")[2] == b'"%s"' % (b"x" * 5_000_000)


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\nCont", GOOD["usual"][:-3], GOOD["chunked"][:-9]])
def test_a_request_that_was_answered_in_part_is_not_sent_twice(begun: bytes) -> None:
    """As where a proxy resets a connection whose model is at work."""
    taken: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    for answer in (GOOD["usual"], begun):
                        taken.append(client.recv(65536))
                        client.sendall(answer)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        client = connect(f"http://127.0.0.1:{listener.getsockname()[1]}", never)
        assert client.call("POST", "/", {}) == {"n": 1}
        with pytest.raises(ServerUnreachable):
            client.call("POST", "/", {})
        listener.shutdown(socket.SHUT_RDWR)
    assert len(taken) == 2
