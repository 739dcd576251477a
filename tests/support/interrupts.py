"""How soon PostgreSQL comes back once a statement is to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from support.cluster import Connection
from support.stores import error

#: both ways to end a statement from outside of it
WAYS = ["statement_timeout", "pg_cancel_backend"]
#: how long PostgreSQL may take to come back once the statement is to end
GRACE_SECONDS = 0.2
_RUNS_SECONDS = 0.3


def seconds_late(session: Connection, owner: Connection, way: str, call: Callable[[], object]) -> float:
    """The least of three takes: seconds from the moment a call is to end to its 57014.

    A busy machine makes single takes late; a wait that does not look at interrupts makes all of them.
    """
    return min(_take(session, owner, way, call) for _ in range(3))


def _take(session: Connection, owner: Connection, way: str, call: Callable[[], object]) -> float:
    due: list[float] = []
    pid = session.info.backend_pid

    def cancel() -> None:
        due.append(time.monotonic())
        owner.execute("SELECT pg_cancel_backend(%s::integer)", (pid,))

    timer = threading.Timer(_RUNS_SECONDS, cancel)
    if way == "statement_timeout":
        session.execute(f"SET statement_timeout = {_RUNS_SECONDS * 1000:.0f}")
        due.append(time.monotonic() + _RUNS_SECONDS)
    else:
        timer.start()
    with error("57014", ours=False):
        call()
    late = time.monotonic() - due[0]
    if way == "statement_timeout":
        session.execute("RESET statement_timeout")
    else:
        timer.join()
    assert late > -0.05, "it ended by itself"
    return late
