"""Answers whose text is passed on as the model writes it, where the model server can be reached from here.

The database finds what is cited, as the role that asks, and makes the request; only that is sent from here. Elsewhere,
and where the text is checked or changed once it is written, the answer comes from the database in one piece.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import httpx

from ml_rag.errors import EngineFailed, MlRagError, ServerUnreachable, from_json
from ml_rag.integrations.database import Rows, Schemas
from ml_rag.protocol import has_more_values

#: seconds for a connection, and for which a model server that cannot be reached is left alone
CONNECT, LEFT_ALONE = 2.0, 60.0
#: bytes of a reply, and of a line of it, which may have the prompt in it; values of its JSON
MAX_REPLY_BYTES, MAX_LINE_BYTES, MAX_VALUES = 256 * 1024 * 1024, 64 * 1024 * 1024, 64 * 1024
#: the address that stands for none
NONE = "none"
#: called for each piece of the text: with the answer document, whose text is empty, and the piece
Told = Callable[[Mapping[str, Any], str], Awaitable[None]]


class TooLong(MlRagError):
    """An answer took longer than statement_timeout."""

    sqlstate, status = "57014", 504


class Writer:
    """Asks for answers. ``address``: of the model server from here; None: where the database has it, if that is a unix
    socket; "none": it is not asked from here."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._left_alone_until = float("inf") if address == NONE else 0.0

    async def answer(self, rows: Rows, schemas: Schemas, parameters: Mapping[str, Any], told: Told) -> dict[str, Any]:
        """The document of ``ml_rag_answer``. Raises psycopg.Error and MlRagError."""
        if time.monotonic() >= self._left_alone_until:
            (row,) = await rows(schemas.answer_to_stream, parameters)
            document: dict[str, Any] = row["answer"]
            if not isinstance(document.get("prompt"), dict):
                return document
            asked = document.pop("prompt")
            address = self._address or asked["server"]
            if self._address is not None or address.startswith("unix:"):
                try:
                    async with asyncio.timeout(row["timeout"] / 1000 if row["timeout"] else None):
                        return await _written(address, asked["completion"], document, told)
                except TimeoutError:
                    raise TooLong("the answer took longer than statement_timeout") from None
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    pass
            self._left_alone_until = time.monotonic() + LEFT_ALONE
        whole: dict[str, Any] = (await rows(schemas.answer, parameters))[0]["answer"]
        return whole


async def _written(address: str, completion: Mapping[str, Any], document: dict[str, Any], told: Told) -> dict[str, Any]:
    socket = address.removeprefix("unix:") if address.startswith("unix:") else None
    transport = httpx.AsyncHTTPTransport(uds=socket)
    base, timeout = "http://ml_rag" if socket else address, httpx.Timeout(None, connect=CONNECT)
    body = {**completion, "stream": True, "stream_options": {"include_usage": True}}
    text, finish = "", None
    usage: dict[str, Any] = {}
    headers = {"Accept-Encoding": "identity"}
    async with httpx.AsyncClient(transport=transport, base_url=base, timeout=timeout, headers=headers) as client:
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise from_json(_parsed(b"\n".join([line async for line in _lines(reply)])), reply.status_code)
                async for line in _lines(reply):
                    if not line.startswith(b"data: {"):
                        continue
                    event = _parsed(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise from_json(event, 500)
                    usage = event.get("usage") or usage
                    for piece, reason in _said(event):
                        finish = reason or finish
                        if piece:
                            text += piece
                            await told(document, piece)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except httpx.HTTPError as error:
            raise ServerUnreachable("connection to the model server was lost", detail=repr(error)) from None
    if finish is None:
        raise EngineFailed("the answer of the model is incomplete", detail="It has no end.")
    told_usage = {
        "prompt_tokens": usage.get("prompt_tokens") or None,
        "generated_tokens": usage.get("completion_tokens") or None,
        "finish_reason": finish,
    }
    return {**document, "text": text, **({"usage": told_usage} if "usage" in document else {})}


async def _lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a reply as they come, not unpacked. Raises EngineFailed if it is too long."""
    begun: list[bytes] = []
    size = length = 0
    async for piece in reply.aiter_raw():
        *lines, rest = piece.split(b"\n")
        for line in lines:
            yield b"".join([*begun, line])
            begun, length = [], 0
        begun.append(rest)
        size, length = size + len(piece), length + len(rest)
        if size > MAX_REPLY_BYTES or length > MAX_LINE_BYTES:
            raise _unexpected("It is too long.")
    yield b"".join(begun)


def _parsed(text: bytes) -> Any:
    if has_more_values(text, MAX_VALUES):
        raise _unexpected(f"Its JSON has more than {MAX_VALUES} values.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unexpected(f"No JSON: {error}.") from None


def _said(event: Any) -> list[tuple[str, str | None]]:
    """The texts of an event, each with why the answer ends there."""
    try:
        said = [(choice["delta"].get("content") or "", choice["finish_reason"]) for choice in event["choices"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise _unexpected(f"No answer: {error!r}.") from None
    if not all(isinstance(text, str) for text, _ in said) or not isinstance(event.get("usage") or {}, dict):
        raise _unexpected("No answer: a text or a number of tokens is none.")
    return said


def _unexpected(detail: str) -> EngineFailed:
    return EngineFailed("unexpected reply from the model server", detail=detail)
