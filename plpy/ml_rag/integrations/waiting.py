"""Statements that run for a request of HTTP: they end with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from anyio import CancelScope
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

#: seconds between two looks at whether the client is still there
LOOK = 0.5

Got = TypeVar("Got")


class Stream(StreamingResponse):
    """A reply that is sent while ``work`` runs, which ends with it, also if the client goes before it has begun."""

    def __init__(
        self,
        content: AsyncIterator[str],
        media_type: str,
        work: Sequence[asyncio.Task[Any]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await end(*self._work)


async def waited_for(request: Request, work: asyncio.Task[Got]) -> Got:
    """The result, unless the client goes away, which cancels the statement."""
    try:
        while not (await asyncio.wait({work}, timeout=LOOK))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the client has gone")
        return await work
    finally:
        await end(work)


async def cancelled_once(statement: Coroutine[Any, Any, Got]) -> Got:
    """The result. Where this is cancelled, however often, the statement is so once, and has ended."""
    work = asyncio.ensure_future(statement)
    try:
        return await asyncio.shield(work)
    finally:
        await end(work)


async def end(*work: asyncio.Task[Any]) -> None:
    """Cancel its statements where they still run.

    Once: anyio, by which starlette ends a stream and MCP a call, cancels again and again, and psycopg, which is to ask
    the server to cancel, then gives that up; the statement would continue without its connection.
    """
    running = [one for one in work if not one.done()]
    for one in running:
        one.cancel()
    if running:
        with CancelScope(shield=True):
            await asyncio.wait(running)
    for one in work:
        if not one.cancelled():
            one.exception()  # else asyncio logs it
