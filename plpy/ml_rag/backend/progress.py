"""How far a long call is, for the client that waits for it: a NOTICE every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ml_rag.progress import SECONDS, State, line

#: notices that the rate is taken from
_MARKS = 6
_LOOK = """
SELECT pg_catalog.date_part('epoch', pg_catalog.statement_timestamp()) AS statement,
  pg_catalog.current_setting('ml_rag.progress_seconds', true) AS seconds
"""


class Pace:
    """What has been reported of the statement that runs. ``clock``: seconds, which never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._plan: Any = None
        #: when the client's statement began, by PostgreSQL's clock
        self._statement = 0.0
        #: when its last notice was, or its first report
        self._told = 0.0
        #: between two notices
        self._seconds = SECONDS
        self._state = State()
        #: time and state of the first report about this phase and of the notices since
        self._marks: list[tuple[float, State]] = []

    def report(self, plpy: Any, state: State) -> None:
        """Tell the client, if the last notice is long ago."""
        if self._plan is None:
            self._plan = plpy.prepare(_LOOK)
        found = plpy.execute(self._plan)[0]
        now, former, self._state = self._clock(), self._state, state
        if found["statement"] != self._statement:
            self._statement, self._told, self._marks = found["statement"], now, []
        if not self._marks or former[:2] != state[:2] or state.moved < former.moved:
            self._marks = [(now, state)]
        self._seconds = _number(found["seconds"])
        if 0 < self._seconds <= now - self._told:
            plpy.notice(line(state, now - self._marks[0][0], self._marks[0][1]))
            self._told = now
            self._marks = [*self._marks[1 - _MARKS :], (now, state)]

    def repeat(self, plpy: Any) -> None:
        """The same while the statement waits for what it reports next."""
        if self._marks and 0 < self._seconds <= self._clock() - self._told:
            if plpy.execute(self._plan)[0]["statement"] == self._statement:
                self.report(plpy, self._state)
            else:
                self._marks = []

    def advance(self, plpy: Any, rows: int) -> None:
        """So many more are done."""
        self.report(plpy, self._state._replace(done=self._state.done + rows))


def _number(setting: str | None) -> float:
    """Setting ml_rag.progress_seconds, 0 = no notices; what is not a number counts as not set."""
    try:
        return float(setting) if setting else SECONDS
    except ValueError:
        return SECONDS
