"""The connections of a gateway, shared by its tokens: one that asks without end leaves the others theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from ml_rag.integrations.gateway.refused import Refused

#: requests of one token that wait for its connections
WAITING = 16
#: seconds that each of them waits
PATIENCE = 10.0


class Shares:
    """As many connections for each token as there are for all of them, but at least one."""

    def __init__(self, tokens: Collection[str], connections: int) -> None:
        self._each = max(1, connections // max(1, len(tokens)))
        self._free = {token: asyncio.Semaphore(self._each) for token in tokens}
        self._waiting = dict.fromkeys(tokens, 0)

    async def take(self, token: str) -> Callable[[], None]:
        """Gives one connection back when it is called.

        Raises Refused (429) if too many requests of this token wait, or this one has waited too long.
        """
        free = self._free[token]
        if free.locked() and self._waiting[token] >= WAITING:
            raise self._refused()
        self._waiting[token] += 1
        try:
            await asyncio.wait_for(free.acquire(), PATIENCE)
        except TimeoutError:
            raise self._refused() from None
        finally:
            self._waiting[token] -= 1
        return free.release

    def _refused(self) -> Refused:
        return Refused(429, f"this token has {self._each} questions being answered; ask again later", "53300")
