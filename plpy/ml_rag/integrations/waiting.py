"""Statements that run for a request of HTTP: they end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from anyio import CancelScope
from starlette.exceptions import HTTPException
from starlette.requests import Request

#: seconds between two looks at whether the client is still there
LOOK = 0.5

Got = TypeVar("Got")


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


async def end(work: asyncio.Task[Any]) -> None:
    """Cancel its statement where it still runs.

    Once: anyio, by which starlette ends a stream and MCP a call, cancels again and again, and psycopg, which is to ask
    the server to cancel, then gives that up; the statement would go on without its connection.
    """
    if not work.done():
        work.cancel()
        with CancelScope(shield=True):
            await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # else asyncio logs it
