"""Statements that run for a request of HTTP: they end with it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, TypeVar

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


async def end(work: asyncio.Task[Any]) -> None:
    """Cancel its statement where it still runs."""
    if not work.done():
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
