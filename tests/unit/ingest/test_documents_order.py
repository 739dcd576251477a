"""``POST /v1/documents``: the order of work, clients that go away, the end of the server."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ml_rag.ingest.sandbox import Sandbox
from ml_rag.server.engines.fake import FakeEmbed
from support.documents_app import (
    Server,
    by_index,
    lines,
    request,
    server,
)
from support.processes import wait_until

__all__ = ["server"]


def test_a_line_comes_as_soon_as_its_document_is_done(server: Server) -> None:
    with server.client() as client:
        times: list[tuple[float, int]] = []
        with client.stream("POST", "/v1/documents", **request([("a", b"red"), ("b", b"!sleep 2")])) as reply:
            for line in reply.iter_lines():
                times.append((time.monotonic(), json.loads(line)["index"]))
    assert [index for _, index in times] == [0, 1]
    assert times[1][0] - times[0][0] > 1


def test_parsing_goes_on_while_the_model_works_but_not_without_bound(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = most = begun = 0
    release = threading.Event()
    original = Sandbox.run

    async def counted(self: Sandbox, job: Any) -> Any:
        nonlocal running, most, begun
        running, begun = running + 1, begun + 1
        most = max(most, running)
        try:
            return await original(self, job)
        finally:
            running -= 1

    def blocked(self: FakeEmbed, texts: Sequence[str], cancelled: Callable[[], bool]) -> Any:
        assert release.wait(20)
        return np.ones((len(texts), 16), np.float32)

    monkeypatch.setattr(Sandbox, "run", counted)
    monkeypatch.setattr(FakeEmbed, "embed", blocked)
    text = " ".join(f"w{number}" for number in range(16 * 200)).encode()
    replies: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: replies.append(server.post([(str(n), text) for n in range(20)], chunking={"segment_tokens": 16}))
    )
    thread.start()
    seen = 0
    while seen != begun or not begun or running:
        seen = begun
        time.sleep(0.5)
    # 200 segments each: two batches are with the model, about 512 segments wait, two documents may come on top
    assert 2 < begun < 9
    release.set()
    thread.join(30)
    assert most == 2
    assert len(by_index(replies[0])) == 20


def leave_during(server: Server, files: Sequence[tuple[str, bytes]], **options: Any) -> None:
    """Send a request and go away while it is being worked on."""
    with server.client(0.7) as client, contextlib.suppress(httpx.ReadTimeout):
        with client.stream("POST", "/v1/documents", **request(files, **options)) as reply:
            for _ in reply.iter_lines():
                pass
        pytest.fail("the request should not have come to its end")


def test_parsing_stops_when_the_client_goes(server: Server) -> None:
    server.post([("warm", b"warm")])
    leave_during(server, [("a", b"!sleep 30"), ("b", b"!sleep 30"), ("c", b"red")])
    began = time.monotonic()
    assert [line["error"] for line in lines(server.post([("next", b"red")]))] == [None]
    assert time.monotonic() - began < 20  # both parsers were asleep


def test_embedding_stops_when_the_client_goes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = 0
    embed = FakeEmbed.embed

    def counted(self: FakeEmbed, given: Sequence[str], cancelled: Callable[[], bool]) -> Any:
        nonlocal texts
        texts += len(given)
        return embed(self, given, cancelled)

    monkeypatch.setattr(FakeEmbed, "embed", counted)
    text = " ".join(f"w{number}" for number in range(16 * 400)).encode()
    leave_during(server, [("a", text)], embed_model_id="slow", chunking={"segment_tokens": 16})
    time.sleep(0.3)
    seen = texts
    time.sleep(0.5)
    assert 0 < seen == texts < 100
    model = server.registry._model("slow")
    wait_until(lambda: model.leases == 0)


def test_closing_the_application_ends_the_children(server: Server, tmp_path: Path) -> None:
    other = Server(tmp_path)
    other.start()
    assert lines(other.post([("a", b"!facts")]))
    children = [child.process for child in other.sandbox._idle]
    assert children
    other.stop()
    assert [child.wait(5) is not None for child in children] == [True] * len(children)


def test_shutting_down_does_not_wait_for_a_document(tmp_path: Path, server: Server) -> None:
    other = Server(tmp_path)
    other.start()
    threading.Timer(0.7, other.registry.closing.set).start()
    began = time.monotonic()
    with pytest.raises(httpx.RemoteProtocolError):
        other.post([("a", b"!sleep 30")])
    other.stop()
    assert time.monotonic() - began < 10
