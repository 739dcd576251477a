"""TCP in front of a unix socket, for clients that have no unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while content := await source.read(1 << 16):
            target.write(content)
            await target.drain()
    target.close()


@contextlib.contextmanager
def forwarded(path: Path) -> Iterator[int]:
    """A port of 127.0.0.1 behind which the server of this socket answers."""
    loop = asyncio.new_event_loop()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_unix_connection(str(path))
        await asyncio.gather(_copy(reader, behind_writer), _copy(behind_reader, writer))

    server = loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        server.close()
        loop.close()
