"""What a peer that may connect can still try: heads and bodies without end, trickles, web pages."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from ml_rag import protocol
from ml_rag.errors import InvalidRequest
from ml_rag.protocol import has_more_values
from ml_rag.server.boundary import MAX_VALUES, check_values
from ml_rag.server.chat.request import ChatRequest
from ml_rag.server.routes import EmbeddingsBody, RerankBody
from ml_rag.server.serve import MAX_HEAD_BYTES
from support.servers import RunningServer, running_server

POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\n"


def resident_mib(server: RunningServer) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024


def flood(path: Path, start: bytes, piece: bytes, most: int) -> tuple[int, bytes]:
    """Send ``start``, then ``piece`` again and again; how many bytes the server took, and what it answered."""
    sent = 0
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(str(path))
        raw.sendall(start)
        try:
            while sent < most:
                raw.sendall(piece)
                sent += len(piece)
        except OSError:
            pass  # the server has closed
        answer = b""
        try:
            while got := raw.recv(65536):
                answer += got
        except OSError:
            pass
    return sent, answer


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /", b"a" * 65536),
        (b"GET /healthz HTTP/1.1\r\nX: ", b"a" * 65536),
        (b"GET /healthz HTTP/1.1\r\n", b"".join(b"X-%d: y\r\n" % i for i in range(8192))),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: ", b"a" * 65536),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2;x=", b"a" * 65536),
    ],
    ids=["path", "header", "headers", "trailer", "chunk extension"],
)
def test_a_head_without_end_is_refused_before_it_fills_the_memory(
    server: RunningServer, start: bytes, piece: bytes
) -> None:
    before = resident_mib(server)
    sent, answer = flood(server.socket, start, piece, 256 * 1024 * 1024)
    # what the kernel's buffers hold beside the bound
    assert sent < 4 * 1024 * 1024
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
    assert resident_mib(server) < before + 32
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_a_head_of_usual_size_passes_and_one_past_the_bound_does_not(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/healthz", headers={"X": "a" * (MAX_HEAD_BYTES // 2)}).status_code == 200
    _, answer = flood(server.socket, b"GET /healthz HTTP/1.1\r\nX: ", b"a" * (MAX_HEAD_BYTES + 1), 1)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"head is too long" in body


def test_pieces_of_a_body_do_not_count_as_a_head(server: RunningServer) -> None:
    text = "a " * 20_000

    def pieces() -> Iterator[bytes]:
        data = f'{{"model": "fake-embed", "input": "{text}"}}'.encode()
        yield from (data[i : i + 10] for i in range(0, len(data), 10))

    assert httpx.post(f"{server.url}/v1/embeddings", content=pieces(), timeout=60).status_code == 200


def test_a_trickle_of_a_body_is_cut_off(tmp_path: Path) -> None:
    """Each piece comes in time, and the whole would take an hour."""
    config = "[server]\nbody_timeout_seconds = 0.6\n"
    with running_server(socket=tmp_path / "s.sock", config=config) as running, socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(0.2)
        raw.connect(str(running.socket))
        raw.sendall(POST + b"Content-Length: 20000\r\n\r\n")
        answer, began = b"", time.monotonic()
        while not answer and time.monotonic() < began + 20:
            raw.sendall(b" ")
            try:
                answer = raw.recv(4096)
            except TimeoutError:
                continue
        while b"}" not in answer:  # head and body may come one after the other
            answer += raw.recv(4096)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"less than 1024 bytes a second" in answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '{"x": [' + "[]," * 8_000_000 + "[]]}"),
        ("/v1/chat/completions", '{"stop": [' + '"",' * 8_000_000 + '""]}'),
        ("/v1/embeddings", '{"input": [' + '"",' * 8_000_000 + '""]}'),
        ("/v1/rerank", '{"documents": [' + "{}," * 8_000_000 + "{}]}"),
    ],
)
def test_values_without_number_are_refused_before_they_are_read(server: RunningServer, path: str, body: str) -> None:
    before = resident_mib(server)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)), base_url="http://x", timeout=60) as client:
        answer = client.post(path, content=body.encode())
    assert answer.status_code == 400
    assert answer.json()["error"]["detail"] == f"its JSON may have {MAX_VALUES}"
    assert resident_mib(server) - before < 400


def test_the_number_of_values() -> None:
    def array(values: int) -> bytes:
        return b"[" + b",".join([b"1"] * values) + b"]"

    check_values(array(MAX_VALUES))
    with pytest.raises(InvalidRequest):
        check_values(array(MAX_VALUES + 1))
    text = r",[{\"\\" * MAX_VALUES
    check_values(json.dumps([text, text]).encode())
    check_values(json.dumps([text + "\\", '"']).encode())
    with pytest.raises(InvalidRequest):
        check_values(json.dumps([text, [0] * MAX_VALUES]).encode())


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_texts_are_cut_anywhere_when_values_are_counted(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(protocol, "_PIECE", size)
    for text in ["a", ",", '",', "\\", "\\,", '\\",[', '\\\\"{', ""]:
        body = json.dumps({text: [text, {"b": text}], "c": 1}).encode()
        assert not has_more_values(body, 5)
        assert has_more_values(body, 4)


def test_other_threads_run_while_values_are_counted() -> None:
    """A parser of documents can answer 256 MB."""
    turns = 0
    is_over = threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not is_over.wait(0.001):
            turns += 1

    thread = threading.Thread(target=take_turns)
    text = b'["' + b"one, two, " * 10_000_000 + b'"]'
    thread.start()
    assert not has_more_values(text, 1000)
    is_over.set()
    thread.join()
    assert turns > 30


@pytest.mark.parametrize("origin", ["http://evil.example", "null", ""])
def test_web_pages_may_not_use_it(server: RunningServer, origin: str) -> None:
    """A page can make the browser post to 127.0.0.1, and with a name that leads there read the answer too."""
    body = {"model": "fake-embed", "input": "a"}
    reply = httpx.post(f"{server.url}/v1/embeddings", json=body, headers={"Origin": origin})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden")
    assert "access-control-allow-origin" not in reply.headers
    assert httpx.options(f"{server.url}/v1/embeddings", headers={"Origin": origin}).status_code == 403


@pytest.mark.parametrize("body", [EmbeddingsBody, RerankBody, ChatRequest])
def test_no_more_than_a_few_errors_are_made_of_a_body(body: type[BaseModel]) -> None:
    """To make one for each value takes seconds, for which all requests wait."""
    wrong = [1] * 1000
    given = {"model": "m", "query": "q", "input": wrong, "messages": wrong, "documents": wrong, "stop": wrong}
    with pytest.raises(ValidationError) as caught:
        body.model_validate_json(json.dumps(given))
    assert caught.value.error_count() < 10


@pytest.mark.parametrize("n", [2, 5000])
def test_a_request_that_does_not_wait_for_the_reply_to_the_last_is_refused(server: RunningServer, n: int) -> None:
    _, answers = flood(server.socket, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * n, b"", 0)
    assert answers.startswith(b"HTTP/1.1 400 ")
    assert answers.count(b"HTTP/1.1 ") == 1


def test_a_body_in_very_many_pieces_is_refused(server: RunningServer) -> None:
    piece = b"1\r\n \r\n"
    sent, answer = flood(server.socket, POST + b"Transfer-Encoding: chunked\r\n\r\n", piece * 10_000, 64 * 1024 * 1024)
    assert sent < 4 * 1024 * 1024
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
