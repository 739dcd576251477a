"""Who may wait for a model: what would only wait is refused early, with a time to come back.

A queue has places and seconds. One role may take half of both, whichever others ask; bulk work a quarter, so that a
question finds room however many rows are filled and documents loaded at the same time.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from math import ceil

from ml_rag.errors import QueueFull, try_again
from ml_rag.protocol import BULK
from ml_rag.server.calls import Datagram

#: shares of a queue
ROLE, BULK_WORK = 1 / 2, 1 / 4
#: how much of the mean the latest request makes up
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Caller:
    """The role whose session asks, in its cluster, and whether somebody waits for the answer."""

    role: tuple[str, int]
    is_bulk: bool

    @classmethod
    def of(cls, told: Datagram | None) -> Caller | None:
        """None for clients that are not sessions, or do not say whose they are: they have no share of their own."""
        if told is None or told.in_flight is None:
            return None
        return cls((told.cluster, told.in_flight.role), told.in_flight.routine in BULK)


#: of the request being served; the middleware sets it
current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)


class Admission:
    """The requests of one model that are admitted: those that wait, and those that are worked on."""

    def __init__(self, model_id: str, max_queue: int, max_wait_seconds: float) -> None:
        self._model_id, self.max_queue, self._max_wait = model_id, max_queue, max_wait_seconds
        self._admitted = 0
        #: requests that the thread works on
        self.running = 0
        #: of each role that has some, and of bulk work
        self._of: Counter[object] = Counter()
        #: of a request in the thread, on average
        self._seconds = 0.0

    @property
    def waiting(self) -> int:
        """Requests that wait for the thread."""
        return max(0, self._admitted - self.running)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """A place in the queue for the request being served. Raises ``QueueFull``."""
        caller = current_caller.get()
        self._check(self.waiting, 1, "")
        keys: list[object] = []
        if caller is not None:
            keys = [caller.role, BULK_WORK] if caller.is_bulk else [caller.role]
            # one of theirs may be worked on, and does not wait
            self._check(self._of[caller.role] - 1, ROLE, " for this role")
            if caller.is_bulk:
                self._check(self._of[BULK_WORK] - 1, BULK_WORK, " for bulk work")
        self._admitted += 1
        self._of.update(keys)
        try:
            yield
        finally:
            self._admitted -= 1
            self._of.subtract(keys)
            for key in keys:
                if not self._of[key]:
                    del self._of[key]

    def _check(self, waiting: int, share: float, whose: str) -> None:
        places, seconds = max(1, int(share * self.max_queue)), share * self._max_wait
        if self._max_wait and self._seconds:
            places = min(places, max(1, ceil(seconds / self._seconds)))
        if waiting < places:
            return
        raise QueueFull(
            f"the queue of model {self._model_id} is full{whose}",
            detail=f"{waiting} requests are waiting, which takes about {ceil(waiting * self._seconds)} s",
            hint=try_again((waiting - places + 1) * self._seconds)
            + " More may wait with a greater max_queue or max_wait_seconds in the model server's configuration.",
        )

    def works(self, requests: int) -> None:
        """So many of the admitted requests no longer wait."""
        self.running += requests

    def worked(self, requests: int, seconds: float) -> None:
        """The end of that, which took so long."""
        self.running -= requests
        mean = seconds / requests
        self._seconds += (mean - self._seconds) * (_WEIGHT if self._seconds else 1)
