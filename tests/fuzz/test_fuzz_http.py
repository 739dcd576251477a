"""The HTTP surface of the model server, held to its own OpenAPI description, and to whatever else comes in as bytes."""

from __future__ import annotations

import random
import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from ml_rag.server.app import create_app
from ml_rag.server.catalogue import load_catalogue
from ml_rag.server.openapi import description
from ml_rag.server.registry import Registry
from support import fuzzing
from support.mutate import mutated
from support.servers import RunningServer, running_server

FULL, SHORT = 4_000, 150
FULL_BYTES, SHORT_BYTES = 3_000, 100
MODELS = {
    "/v1/embeddings": ["fake-embed", "fake-embed-wide", "no such model"],
    "/v1/tokens": ["fake-embed", "fake-rerank"],
    "/v1/rerank": ["fake-rerank", "fake-embed"],
    "/v1/chat/completions": ["fake-generate", "fake-generate", "fake-rerank"],
}
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
#: bounds that a test reaches without much traffic
CONFIG = "[server]\nmax_body_bytes = 1048576\nbody_timeout_seconds = 2\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(tcp=True, config=CONFIG) as server:
        yield server


def lively(server: RunningServer) -> None:
    """It goes on, and has met nothing that nobody foresaw."""
    assert server.url is not None
    assert httpx.get(f"{server.url}/healthz", timeout=30).json()["status"] == "ok"
    assert "unexpected" not in server.log(), server.log()[-3000:]
    assert "Traceback" not in server.log(), server.log()[-3000:]


def test_the_description_has_every_route_and_no_other(server: RunningServer) -> None:
    assert server.url is not None
    described = httpx.get(f"{server.url}/openapi.json").json()
    assert described == description()
    methods = {(path, method.upper()) for path, entry in described["paths"].items() for method in entry}
    served = set()
    for path, methods_of in routes():
        served |= {(path, method) for method in methods_of if method != "HEAD"}
    assert methods == served


def routes() -> list[tuple[str, set[str]]]:
    """Path and methods of every route of the application."""
    found: list[tuple[str, set[str]]] = []
    todo: list[Any] = list(create_app(Registry(load_catalogue(fake_models=True), Path())).routes)
    while todo:
        route = todo.pop()
        inner = getattr(getattr(route, "original_router", None), "routes", None) or getattr(route, "routes", None)
        if inner:
            todo.extend(inner)
        elif hasattr(route, "methods"):
            found.append((route.path.replace(":path}", "}"), route.methods))
    return found


def check_error(response: Any, what: str) -> str:
    """How a request ended; its errors are the server's own."""
    if response.status_code == 200:
        return "ok"
    error = response.json()["error"]
    assert response.status_code < 500, f"{what}: {error}"
    assert "Traceback" not in str(error), f"{what}: {error}"
    return str(error["code"])


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["as-described", "otherwise"])
def test_requests_by_the_description(server: RunningServer, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(description())
    operations = [result.ok() for result in schema.get_all_operations()]
    negative = mode is GenerationMode.NEGATIVE
    strategies = []
    for operation in operations:
        # nothing about a request without parameters can be otherwise
        if operation.body or not negative:
            strategies += [operation.as_strategy(generation_mode=mode)] * (5 if operation.body else 1)
    ended: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    name = f"HTTP requests {'not ' if negative else ''}as described"

    with fuzzing.target(name, full=FULL // 2, short=SHORT // 2) as account:

        @fuzzing.examples(account.wanted)
        @given(case=st.one_of(strategies), at=st.integers(0, 100))
        def run(case: schemathesis.Case, at: int) -> None:
            if not account.next():
                return
            if not negative and isinstance(case.body, dict) and (models := MODELS.get(case.operation.path)):
                case.body["model"] = models[at % len(models)]
            request = case.as_transport_kwargs(base_url=server.url)
            response = case.call(base_url=server.url)
            what = f"{request}"[:2000]
            ended[check_error(response, what)] += 1
            reached[case.operation.label] += 1
            checks = [*CHECKS, negative_data_rejection] if negative else CHECKS
            case.validate_response(response, checks=checks)

        run()
        account.coverage = f"{len(reached)} of {len(operations)} operations; {fuzzing.counted(ended)}"
        lively(server)
    if not negative:
        assert ended["ok"] > account.cases / 5, ended


def requests() -> list[bytes]:
    """Requests as they should be, byte by byte."""
    embed = b'{"model": "fake-embed", "input": ["one two", "three"]}'
    chat = b'{"model": "fake-generate", "stream": true, "messages": [{"role": "user", "content": "one"}]}'
    form = (
        b'--b\r\nContent-Disposition: form-data; name="options"\r\n\r\n{"embed_model_id": "fake-embed"}\r\n--b\r\n'
        b'Content-Disposition: form-data; name="file"; filename="a.txt"\r\nContent-Type: text/plain\r\n\r\none two\r\n'
        b"--b--\r\n"
    )
    host = b" HTTP/1.1\r\nHost: ml_rag\r\n"
    found = [b"GET " + path + host + b"\r\n" for path in (b"/healthz", b"/metrics", b"/v1/models/fake-embed?a=b#c")]
    for path, media, body in (
        (b"/v1/embeddings", b"application/json", embed),
        (b"/v1/chat/completions", b"application/json", chat),
        (b"/v1/documents", b"multipart/form-data; boundary=b", form),
    ):
        head = b"POST " + path + host + b"Content-Type: " + media + b"\r\n"
        found.append(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:7], body[7:]))
        found.append(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        found.append(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body) + body + found[0])
    return found


def mutated_request(whole: bytes, chance: random.Random, others: list[bytes]) -> tuple[bytes, bool]:
    """A request after an accident, and whether it is complete: its body only, or the whole of it."""
    head, _, body = whole.partition(b"\r\n\r\n")
    if b"Content-Length" in head and b"Expect" not in head and chance.random() < 0.6:
        body = mutated(body, chance, others)
        return re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head) + b"\r\n\r\n" + body, True
    return mutated(whole, chance, others), False


def exchange(path: Path, data: bytes, complete: bool) -> bytes:
    """What the server says to these bytes; to a request that may not be whole it may say nothing."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30 if complete else 0.1)
        client.connect(str(path))
        try:
            client.sendall(data)
            return client.recv(65536)
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            if complete:
                pytest.fail(f"no reply to {data[:2000]!r}")
            return b""


def test_bytes_that_are_hardly_http(server: RunningServer) -> None:
    whole = requests()
    statuses: Counter[str] = Counter()
    with fuzzing.target("HTTP bytes", full=FULL_BYTES, short=SHORT_BYTES) as account:
        for number in range(account.wanted):
            if not account.next():
                break
            chance = random.Random(f"{fuzzing.SEED} {number}")
            data, complete = mutated_request(whole[number % len(whole)], chance, whole)
            reply = exchange(server.socket, data, complete)
            status = reply[9:12].decode("latin-1") if reply else "none"
            statuses[status] += 1
            assert not reply or reply.startswith(b"HTTP/1."), (number, data[:300], reply[:300])
            assert not status.startswith("5"), (number, data[:300], reply[:600])
        account.coverage = f"replies: {fuzzing.counted(statuses)}"
        lively(server)
    assert statuses["200"] > account.cases / 50, statuses
