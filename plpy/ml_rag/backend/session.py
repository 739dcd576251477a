"""What this session keeps of its calls: those in flight, its slot, the roles it was, whether it tells anything at all.

What need not be asked for each call is asked here, now and then.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from ml_rag.backend import slots
from ml_rag.backend.slots import Slot, SlotFile

#: after the file could not be used
RETRY_SECONDS = 2.0
#: how often it is asked whether this is off, and whether the file is still the one that others open
CHECK_SECONDS = 1.0

# Run under whatever search_path there is: nothing in them but names with their schema, and no operators.
_ROLE = """
SELECT current_user AS name,
  pg_catalog.quote_ident(current_user)::pg_catalog.regrole::pg_catalog.oid::pg_catalog.int8 AS oid,
  pg_catalog.pg_has_role(session_user, current_user, 'MEMBER') AS may_be_again
"""
_DATABASE = """
SELECT d.oid::pg_catalog.int8 AS oid FROM pg_catalog.pg_database AS d
WHERE pg_catalog.nameeq(d.datname, pg_catalog.current_database())
"""
# A snapshot can be older than a database. That function is null for those that are not there now.
_DROPPED = """
SELECT o.oid FROM pg_catalog.unnest($1) AS o (oid)
WHERE pg_catalog.has_database_privilege(o.oid::pg_catalog.oid, 'CONNECT') IS NULL
"""
_IS_OFF = """
SELECT true FROM ml_rag.setting_value AS v
WHERE pg_catalog.texteq(v.name, 'track') AND pg_catalog.texteq(v.value, 'off')
"""
_plans: dict[str, Any] = {}


def execute(plpy: Any, statement: str) -> Any:
    """The rows of a statement that is prepared once in a session."""
    plan = _plans.get(statement)
    if plan is None:
        plan = _plans[statement] = plpy.prepare(statement)
    return plpy.execute(plan)


class Frame:
    """A call that has begun. Those that it makes itself lie above it in the stack."""

    __slots__ = ("began", "call", "model", "role", "routine", "stage", "stage_began", "stages", "started")

    def __init__(self, call: int, role: int, routine: int, stage: int, model: str) -> None:
        self.call, self.role, self.routine, self.stage = call, role, routine, stage
        #: ns of the clock that the others are measured by, µs since 1970
        self.began = self.stage_began = time.monotonic_ns()
        self.started = time.time_ns() // 1000
        self.model = model
        #: those that are over and not yet counted: stage, µs
        self.stages: list[tuple[int, int]] = []


class State:
    """Of this session. ``statement``: when the statement of the frames began, µs since 1970."""

    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.retry_at = self.check_at = 0.0
        self.frames: list[Frame] = []
        self.statement = 0
        self.last_call = 0
        #: the frame whose progress is shown, and the texts of that
        self.progress_of: Frame | None = None
        self.relation = self.phase = ""
        self.ending = ("", "")
        self.is_off = False
        #: the roles, by name, that this session was lately seen to be
        self.roles: dict[str, int] = {}


state = State()


def own_slot() -> Slot | None:
    """The slot of this backend, where it has one."""
    return state.slot


def close() -> None:
    """Give the slot back."""
    slot, state.slot = state.slot, None
    if slot is not None:
        with contextlib.suppress(OSError):
            slot.give_up()


def fail() -> None:
    """Go on without the file, and try again later."""
    state.retry_at = time.monotonic() + RETRY_SECONDS
    state.frames.clear()
    state.progress_of = None
    close()


def current_role(plpy: Any) -> int:
    """The oid of current_user, kept for ``CHECK_SECONDS`` where the session can be that again as it likes.

    It cannot be the owner of a function that is SECURITY DEFINER, and must not count for that one afterwards.
    """
    row = execute(plpy, _ROLE)[0]
    if row["may_be_again"]:
        state.roles[row["name"]] = row["oid"]
    oid: int = row["oid"]
    return oid


def look_around(plpy: Any) -> None:
    """What need not be asked for each call."""
    now = time.monotonic()
    state.check_at = now + CHECK_SECONDS
    state.roles.clear()  # one may have been renamed
    state.is_off = bool(execute(plpy, _IS_OFF))
    if state.is_off:
        state.frames.clear()
        state.progress_of = None
    if state.slot is not None and (state.is_off or not state.slot.file.is_current()):
        close()
    if state.slot is None and not state.is_off and now > state.retry_at:
        # until it has worked
        state.retry_at = now + RETRY_SECONDS
        database = execute(plpy, _DATABASE)[0]["oid"]
        _remove_files_of_dropped_databases(plpy, database)
        state.slot = _claim(slots.path_of(database))
        if state.slot is not None:
            state.retry_at = 0.0


def _claim(path: str) -> Slot | None:
    file = SlotFile(path, create=True)
    try:
        number = file.claim()
        slot = None if number is None else Slot(file, number)
    except BaseException:
        file.close()
        raise
    if slot is None:
        file.close()
    return slot


def _remove_files_of_dropped_databases(plpy: Any, own: int) -> None:
    """Nobody is connected to a database that is gone, or will ever be."""
    found = [(oid, path) for oid, path in slots.databases() if oid != own]
    if not found:
        return
    if _DROPPED not in _plans:
        _plans[_DROPPED] = plpy.prepare(_DROPPED, ["int8[]"])
    dropped = {row["oid"] for row in plpy.execute(_plans[_DROPPED], [[oid for oid, _ in found]])}
    for oid, path in found:
        if oid in dropped:
            with contextlib.suppress(OSError):
                os.unlink(path)
