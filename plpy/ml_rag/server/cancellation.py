"""How the work for a request stops once its client has gone away."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request


class ClientGone(Exception):
    """The client closed its connection, or the server is shutting down."""


class Cancellation:
    """A ``Cancelled`` callable: true once set. Set and asked from any thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def __call__(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        with self._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    @contextlib.contextmanager
    def on_set(self, callback: Callable[[], object]) -> Iterator[None]:
        """Have ``callback`` called, from the thread that sets it, if this is set within the block (or was before)."""
        with self._lock:
            if not (already := self._event.is_set()):
                self._callbacks.append(callback)
        if already:
            callback()
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._callbacks.remove(callback)


@contextlib.asynccontextmanager
async def watch_disconnect(request: Request) -> AsyncIterator[Cancellation]:
    """A ``Cancelled`` callable that turns true as soon as the client of ``request`` goes away.

    Use it once the body has been read: ``async with watch_disconnect(request) as cancelled: …``. For a streamed reply
    keep the block around the body iterator, not around the making of the response. It turns true at the end of the
    block too, and when the server shuts down.
    """
    cancelled = Cancellation()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancelled.set()

    task = asyncio.create_task(watch())
    with request.app.state.registry.closing.on_set(cancelled.set):
        try:
            yield cancelled
        finally:
            cancelled.set()
            task.cancel()
