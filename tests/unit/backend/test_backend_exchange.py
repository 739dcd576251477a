"""backend/exchange.py: whatever is answered to a POST, it is taken as http.client takes it."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable

import pytest

from ml_rag.backend import exchange
from ml_rag.errors import MlRagError, ServerUnreachable
from support.backend_client import close_connections, connect, never, start
from support.hostile_server import HostileServer, send

__all__ = ["close_connections", "start"]

OK = b"HTTP/1.1 200 OK\r\n"
LONG = b'{"text": "' + b"x" * 100_000 + b'"}'

#: replies, each the last one of its connection or not
USUAL = {
    "usual": OK + b"content-length: 8\r\ncontent-type: application/json\r\n\r\n" + b'{"n": 1}',
    "its length last": OK + b"Server: uvicorn\r\nContent-Length: 8\r\n\r\n" + b'{"n": 1}',
    "long": OK + b"Content-Length: %d\r\n\r\n" % len(LONG) + LONG,
}
UNUSUAL = {
    "an error": b'HTTP/1.1 429 Full\r\nContent-Length: 52\r\n\r\n{"error": {"message": "full", "code": "queue_full"}}',
    "chunked": OK + b'Transfer-Encoding: chunked\r\n\r\n8\r\n{"n": 1}\r\n0\r\n\r\n',
    "said to be closed": OK + b'Connection: close\r\nContent-Length: 8\r\n\r\n{"n": 1}',
    "lines without CR": b'HTTP/1.1 200 OK\nContent-Length: 8\n\n{"n": 1}',
    "a blank less": OK + b'Content-Length:8\r\n\r\n{"n": 1}',
    "a folded field": OK + b'X: a\r\n b\r\nContent-Length: 8\r\n\r\n{"n": 1}',
    "the same length twice": OK + b'Content-Length: 8\r\nContent-Length: 8\r\n\r\n{"n": 1}',
    "another status": b'HTTP/1.1 201 Created\r\nContent-Length: 8\r\n\r\n{"n": 1}',
    "continue first": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b'Content-Length: 8\r\n\r\n{"n": 1}',
    "much in its head": OK + b"X: %s\r\n" % (b"x" * 30_000) + b'Content-Length: 8\r\n\r\n{"n": 1}',
    "nothing in it": OK + b"Content-Length: 0\r\n\r\n",
    "no JSON": OK + b"Content-Length: 4\r\n\r\n{{{{",
}
BROKEN = {
    "a negative length": OK + b'Content-Length: -8\r\n\r\n{"n": 1}',
    "no number": OK + b'Content-Length: \xb2\r\n\r\n{"n": 1}',
    "nothing": b"",
    "half a head": OK + b"Content-Le",
    "half a body": OK + b'Content-Length: 8\r\n\r\n{"n"',
    "hardly anything of it": OK + b'Content-Length: 999999\r\n\r\n{"n"',
    "of more than there is memory": OK + b'Content-Length: 99999999999999999999\r\n\r\n{"n"',
    "no length": OK + b'\r\n{"n": 1}',
    "no HTTP": b"SSH-2.0-OpenSSH\r\n",
    "too many fields": OK + b"X: y\r\n" * 200 + b"\r\n",
}


def outcome(server: HostileServer, method: str) -> object:
    client = connect(server.address, never)
    try:
        value: object = client.call(method, "/", {} if method == "POST" else None)
    except MlRagError as e:
        value = type(e), e.message, e.detail, e.hint
    client.close()
    return value


def in_pieces(reply: bytes, size: int, *, close: bool) -> Callable[[socket.socket, bytes], None]:
    def handle(client: socket.socket, _: bytes) -> None:
        for at in range(0, len(reply), size):
            client.sendall(reply[at : at + size])
        if close:
            client.shutdown(socket.SHUT_RDWR)

    return handle


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", [*USUAL, *UNUSUAL, *BROKEN])
def test_a_reply_is_what_it_is_to_http_client(start: Callable[..., HostileServer], name: str, size: int) -> None:
    reply = {**USUAL, **UNUSUAL, **BROKEN}[name]
    server = start(in_pieces(reply, max(size, len(reply) // 2000), close=name in BROKEN))
    expected = outcome(server, "GET")
    server.handler = in_pieces(reply, max(size, len(reply) // 2000), close=name in BROKEN)
    assert outcome(server, "POST") == expected


@pytest.mark.parametrize("name", [name for name in {**USUAL, **UNUSUAL} if name != "an error"])
def test_the_connection_is_as_good_afterwards_as_before(start: Callable[..., HostileServer], name: str) -> None:
    reply = {**USUAL, **UNUSUAL}[name]
    server = start(send(reply))
    client = connect(server.address, never)
    for _ in range(3):
        try:
            client.call("POST", "/", {"a": 1})
        except MlRagError:
            assert name in ("nothing in it", "no JSON", "another status")
        server.handler = send(USUAL["usual"])
        assert client.call("POST", "/", {"a": "é"}) == {"n": 1}
        server.handler = send(reply)


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_reply_needs_no_http_client(
    start: Callable[..., HostileServer], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(exchange.http.client.HTTPResponse, "begin", None)
    server = start(send(USUAL[name]))
    assert connect(server.address, never).call("POST", "/", {}) is not None


def test_the_request_is_that_of_http_client(start: Callable[..., HostileServer]) -> None:
    server = start(send(USUAL["usual"]))
    connect(server.address, never).call("POST", "/v1/embeddings", {"a": "é"})
    connection = http.client.HTTPConnection("ml_rag")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(server.address.removeprefix("unix:"))
    connection.request("POST", "/v1/embeddings", b'{"a": "\\u00e9"}', {"Content-Type": "application/json"})
    connection.getresponse().read()
    connection.close()
    assert server.requests[0] == server.requests[1]


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\nCont", USUAL["usual"][:-3], UNUSUAL["chunked"][:-9]])
def test_a_request_that_was_answered_in_part_is_not_sent_twice(begun: bytes) -> None:
    """As where a proxy resets a connection whose model is at work."""
    taken: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    for answer in (USUAL["usual"], begun):
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
