"""backend/client.py without PostgreSQL: answers that come line by line, or break off."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable

import pytest

from ml_rag.errors import EngineFailed, ServerUnreachable
from support.backend_client import close_connections, connect, never, start
from support.hostile_server import HostileServer, head, reply, send

__all__ = ["close_connections", "start"]


NDJSON = "application/x-ndjson"


@pytest.mark.parametrize("announced", [True, False])
def test_a_stream_that_breaks_off_inside_a_line(start: Callable[..., HostileServer], announced: bool) -> None:
    data = head(100, content_type=NDJSON) + b'1\n{"a": ' if announced else chunks(b"1\n", b'{"a": ', end=False)
    lines = connect(start(send(data, close=True)).address, never).stream("/", b"", NDJSON)
    assert next(lines) == 1
    with pytest.raises((ServerUnreachable, EngineFailed)):
        next(lines)


def chunks(*pieces: bytes, end: bool = True) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + (b"0\r\n\r\n" if end else b"")


def test_a_stream_gives_each_line(start: Callable[..., HostileServer]) -> None:
    server = start(send(chunks(b'{"a": 1}\n{"b"', b": 2}\n", b'{"c": 3}')))
    client = connect(server.address, never)
    for _ in range(2):
        assert list(client.stream("/v1/documents", b"x", NDJSON)) == [{"a": 1}, {"b": 2}, {"c": 3}]
    assert server.connections == 1


def test_a_stream_gives_a_line_before_the_next_is_there(start: Callable[..., HostileServer]) -> None:
    go_on = threading.Event()

    def slow(client: socket.socket, request: bytes) -> None:
        data = chunks(b"1\n", b"2\n")
        cut = data.index(b"2\r\n2\n")
        client.sendall(data[:cut])
        go_on.wait(5)
        client.sendall(data[cut:])

    lines = connect(start(slow).address, never).stream("/", b"", NDJSON)
    assert next(lines) == 1
    go_on.set()
    assert list(lines) == [2]


def test_a_stream_that_breaks_off(start: Callable[..., HostileServer]) -> None:
    server = start(send(chunks(b'{"a": 1}\n', end=False), close=True))
    client = connect(server.address, never)
    lines = client.stream("/", b"", NDJSON)
    assert next(lines) == {"a": 1}
    with pytest.raises(ServerUnreachable, match="was lost"):
        next(lines)
    server.handler = reply({"n": 1})
    assert client.call("GET", "/") == {"n": 1}


@pytest.mark.parametrize("size", [b"9" * 30, b"-b2", b"ffffffffffffff"], ids=repr)
def test_a_chunk_of_a_size_that_none_can_have(start: Callable[..., HostileServer], size: bytes) -> None:
    first = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n'
    client = connect(start(send(first + size + b"\r\n 1}\n", close=True)).address, never)
    with pytest.raises(ServerUnreachable, match=r"not HTTP|was lost"):
        list(client.stream("/", b"", NDJSON))
    with pytest.raises(ServerUnreachable, match=r"not HTTP|was lost"):
        client.call("GET", "/")


def test_a_stream_that_breaks_off_before_its_first_line(start: Callable[..., HostileServer]) -> None:
    start_of_reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    server = start(send(start_of_reply, close=True))
    client = connect(server.address, never)
    with pytest.raises(ServerUnreachable, match="was lost"):
        list(client.stream("/", b"", "text/plain"))


def test_a_stream_left_in_the_middle_does_not_spoil_the_next_call(start: Callable[..., HostileServer]) -> None:
    server = start(send(chunks(*(b"%d\n" % i for i in range(1000)))))
    client = connect(server.address, never)
    lines = client.stream("/", b"", NDJSON)
    assert list(itertools.islice(lines, 3)) == [0, 1, 2]
    lines.close()  # type: ignore[attr-defined]
    server.handler = reply({"n": 1})
    assert client.call("GET", "/") == {"n": 1}


@pytest.mark.parametrize("line", [b"nonsense\n", b'{"a": \n', b"[" * 100_000 + b"\n"], ids=lambda line: str(line[:9]))
def test_a_line_that_is_no_json(start: Callable[..., HostileServer], line: bytes) -> None:
    server = start(send(chunks(b"1\n", line)))
    lines = connect(server.address, never).stream("/", b"", NDJSON)
    assert next(lines) == 1
    with pytest.raises(EngineFailed, match="unexpected reply"):
        next(lines)
