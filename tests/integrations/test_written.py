"""What a model server may send to a program that passes its text on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ml_rag.errors import EngineFailed
from ml_rag.integrations import written
from support.backend_client import close_connections, start
from support.hostile_server import HostileServer, endless, reply, send

__all__ = ["close_connections", "start"]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"


def event(content: Any) -> bytes:
    choice = {"delta": {"content": content}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def answer(server: HostileServer) -> dict[str, Any]:
    async def told(_: Mapping[str, Any], __: str) -> None:
        pass

    return await written._written(server.address, {}, {}, told)


@pytest.mark.parametrize(
    "again", [b"x" * 4096, event("x" * 4096), b"\n" * 4096], ids=["a line", "an answer", "empty lines"]
)
async def test_an_answer_without_end_is_given_up(
    start: Callable[..., HostileServer], monkeypatch: pytest.MonkeyPatch, again: bytes
) -> None:
    monkeypatch.setattr(written, "MAX_REPLY_BYTES", 1 << 20)
    for head in (HEAD, HEAD.replace(b"200 OK", b"500 Failed")):
        with pytest.raises(EngineFailed):
            await answer(start(endless(head + b"\r\n", again)))


async def test_a_line_without_end_is_given_up(
    start: Callable[..., HostileServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "MAX_LINE_BYTES", 1 << 16)
    with pytest.raises(EngineFailed, match="unexpected reply"):
        await answer(start(endless(HEAD + b"\r\n", b"x" * 4096)))


async def test_nothing_is_unpacked(start: Callable[..., HostileServer]) -> None:
    packed = zlib.compressobj(wbits=31)
    content = packed.compress(event("x")) + packed.flush()
    with pytest.raises(EngineFailed, match="incomplete"):
        await answer(start(send(HEAD + b"Content-Encoding: gzip\r\n\r\n" + content, close=True)))


@pytest.mark.parametrize(
    "content",
    [
        b"data: {" + b"[]," * written.MAX_VALUES + b"}",
        b'data: {"choices": [1]}',
        b'data: {"choices": null}',
        b'data: {"choices": [], "usage": 1}',
        b'data: {"usage": null}',
        event(5),
    ],
)
async def test_what_an_answer_cannot_be_is_an_error_of_the_model(
    start: Callable[..., HostileServer], content: bytes
) -> None:
    with pytest.raises(EngineFailed, match="unexpected reply"):
        await answer(start(reply(content + b"\n")))
