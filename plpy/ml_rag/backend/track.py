"""What this backend tells of its calls: begun, in which stage, how far, ended how. ``watch`` reads it.

Loaded by itself, ahead of ``bridge``: a call that needs no model must not wait for what talks to models.
Nothing here may make a user's call fail: whatever goes wrong with the file costs statistics and no answer.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from ml_rag import __version__
from ml_rag.backend import records, slots
from ml_rag.backend.records import Record
from ml_rag.backend.slots import Slot, SlotFile

VERSION = __version__

#: after the file could not be used
RETRY_SECONDS = 2.0
#: how often it is asked whether this is off, and whether the file is still the one that others open
CHECK_SECONDS = 1.0
#: rows that a statement goes through between two notes of it
ADVANCE = 100
#: a call that goes on for long writes its counters after so many stages
WRITE_STAGES = 32
#: calls inside calls
MAX_DEPTH = 100
#: what a call is called is an integer of PostgreSQL's
MAX_CALL = 2**31 - 1
SUCCESS = "00000"
#: class of the SQLSTATEs by which somebody ends a statement: cancelled, shut down
_ENDS = "57"
_OTHER = records.error_number("other")
_DISCOVER = records.stage_number("discover")

# Run under whatever search_path there is: nothing in them but names with their schema, and no operators.
_ROLE = """
SELECT current_user AS name,
  pg_catalog.quote_ident(current_user)::pg_catalog.regrole::pg_catalog.oid::pg_catalog.int8 AS oid
"""
_SESSION = """
SELECT current_user AS role, pg_catalog.date_part('epoch', pg_catalog.statement_timestamp()) AS statement
"""
_DATABASE = """
SELECT d.oid::pg_catalog.int8 AS oid FROM pg_catalog.pg_database AS d
WHERE pg_catalog.nameeq(d.datname, pg_catalog.current_database())
"""
_DATABASES = "SELECT d.oid::pg_catalog.int8 AS oid FROM pg_catalog.pg_database AS d"
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

    def __init__(self, call: int, role: int, routine: int) -> None:
        self.call, self.role, self.routine = call, role, routine
        self.began = self.stage_began = time.perf_counter_ns()
        self.started = time.time_ns() // 1000
        self.stage = 0
        self.model = ""
        #: those that are over and not yet counted: stage, µs
        self.stages: list[tuple[int, int]] = []


class _State:
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


_state = _State()


def own_slot() -> Slot | None:
    """The slot of this backend, where it has one."""
    return _state.slot


def close() -> None:
    """Give the slot back: another version of this module follows."""
    slot, _state.slot = _state.slot, None
    if slot is not None:
        with contextlib.suppress(OSError):
            slot.give_up()


def _fail() -> None:
    """Go on without the file, and try again later."""
    _state.retry_at = time.monotonic() + RETRY_SECONDS
    _state.frames.clear()
    _state.progress_of = None
    close()


def _look_around(plpy: Any) -> None:
    """What need not be asked for each call."""
    now = time.monotonic()
    _state.check_at = now + CHECK_SECONDS
    _state.roles.clear()  # one may have been renamed
    _state.is_off = bool(execute(plpy, _IS_OFF))
    if _state.is_off:
        _state.frames.clear()
        _state.progress_of = None
    if _state.slot is not None and (_state.is_off or not _state.slot.file.is_current()):
        close()
    if _state.slot is None and not _state.is_off and now > _state.retry_at:
        # until it has worked
        _state.retry_at = now + RETRY_SECONDS
        path = slots.path_of(execute(plpy, _DATABASE)[0]["oid"])
        if not os.path.lexists(path):
            _remove_files_of_dropped_databases(plpy)
        _state.slot = _claim(path)
        if _state.slot is not None:
            _state.retry_at = 0.0


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


def _remove_files_of_dropped_databases(plpy: Any) -> None:
    found = list(slots.databases())
    known = {row["oid"] for row in execute(plpy, _DATABASES)}
    for oid, path in found:
        # a database that this transaction does not see yet has a young file
        with contextlib.suppress(OSError):
            if oid not in known and time.time() - os.stat(path).st_mtime > 3600:
                os.unlink(path)


# -- what sql/04_track.sql calls --------------------------------------------------------------------------------------


def begin(plpy: Any, routine: str, stage_name: str, role: str, statement: float) -> int | None:
    """A call begins: what it is called from now on, None where nobody is told, -1 where PostgreSQL wants the statement
    to end: ``ending`` has its error. ``statement``: seconds since 1970."""
    try:
        return _begin(plpy, routine, stage_name, "", role, statement)
    except plpy.SPIError as e:
        _state.ending = e.sqlstate, str(e)
        return -1


def ending() -> tuple[str, str]:
    """SQLSTATE and message of the error behind the last -1 of ``begin``."""
    return _state.ending


def _begin(plpy: Any, routine: str, stage_name: str, model: str, role: str, statement: float) -> int | None:
    """Raises the SPIError of a statement that is to end, and nothing else."""
    number = records.routine_number(routine)
    if number is None:
        return None
    try:
        if time.monotonic() > _state.check_at:
            _look_around(plpy)
        slot = _state.slot
        if slot is None or len(_state.frames) >= MAX_DEPTH:
            return None
        oid = _state.roles.get(role)
        if oid is None:
            # Anybody may call ml_rag._begin_call, and must not count for others. Who a session was, it can be again.
            session = execute(plpy, _ROLE)[0]
            role, oid = session["name"], session["oid"]
            _state.roles[role] = oid
        began = round(statement * 1e6)
        if _state.frames and _state.statement != began:
            # an error that went by: the statement is over
            _pop(slot, 0, _OTHER)
        _state.statement = began
        _state.last_call = _state.last_call % MAX_CALL + 1
        frame = Frame(_state.last_call, oid, number)
        frame.stage = records.stage_number(stage_name)
        frame.model = model
        _state.frames.append(frame)
        _show(slot)
        return frame.call
    except Exception as e:
        if isinstance(e, plpy.SPIError) and e.sqlstate.startswith(_ENDS):
            raise
        _fail()
        return None


def _depth(call: int) -> int:
    """Where the call is in the stack; -1 = nowhere."""
    frames = _state.frames
    depth = len(frames) - 1
    while depth >= 0 and frames[depth].call != call:
        depth -= 1
    return depth


def stage(call: int, name: str, model: str) -> None:
    """The call enters a stage; '' = none."""
    slot, depth = _state.slot, _depth(call)
    if slot is None or depth < 0:
        return
    try:
        frame = _state.frames[depth]
        now = time.perf_counter_ns()
        if frame.stage:
            frame.stages.append((frame.stage, (now - frame.stage_began) // 1000))
            if len(frame.stages) >= WRITE_STAGES:
                _count_stages(slot, frame)
                slot.write(frame.role, frame.routine)
        frame.stage = records.stage_number(name)
        frame.model = model
        frame.stage_began = now
        _show(slot)
    except Exception:  # noqa: BLE001
        _fail()


def _count_stages(slot: Slot, frame: Frame) -> Record:
    record = slot.record(frame.role, frame.routine)
    for number, microseconds in frame.stages:
        record.add(number, microseconds)
    frame.stages.clear()
    return record


def end(call: int, sqlstate: str) -> None:
    """The call has ended, and all that it has begun with it."""
    slot, depth = _state.slot, _depth(call)
    if slot is None or depth < 0:
        return
    try:
        _pop(slot, depth, None if sqlstate == SUCCESS else records.error_number(sqlstate))
        _show(slot)
    except Exception:  # noqa: BLE001
        _fail()


def _pop(slot: Slot, depth: int, error: int | None) -> None:
    """Count the frames from ``depth`` on as ended."""
    slot.follow_epoch()
    now = time.perf_counter_ns()
    while len(_state.frames) > depth:
        frame = _state.frames.pop()
        if frame is _state.progress_of:
            _state.progress_of = None
        record = _count_stages(slot, frame)
        if error is None:
            if frame.stage:
                record.add(frame.stage, (now - frame.stage_began) // 1000)
            record.add(0, (now - frame.began) // 1000)
        else:
            record.fail(frame.stage, error)
        slot.write(frame.role, frame.routine)


def progress(call: int, relation: str, phase: str, done: int, total: int, failed: int) -> None:
    """How far the call is; ``total`` -1: not known. Where it was called by one that tells of itself, nothing."""
    slot, depth = _state.slot, _depth(call)
    if slot is None or depth < 0:
        return
    try:
        frame = _state.frames[depth]
        if _state.progress_of is None:
            _state.progress_of = frame
        elif _state.progress_of is not frame:
            return
        _state.relation, _state.phase = relation, phase
        activity = slot.activity
        activity.done, activity.total, activity.failed = done, total, failed
        _show(slot)
    except Exception:  # noqa: BLE001
        _fail()


def advance(call: int) -> None:
    """One more is done; told now and then."""
    slot, frame = _state.slot, _state.progress_of
    if slot is None or frame is None or frame.call != call:
        return
    slot.activity.done += 1
    if slot.activity.done % ADVANCE == 0:
        try:
            slot.show()
        except Exception:  # noqa: BLE001
            _fail()


def _show_safely() -> None:
    try:
        if _state.slot is not None:
            _show(_state.slot)
    except Exception:  # noqa: BLE001
        _fail()


def _show(slot: Slot) -> None:
    """Write what is in flight: the call that the client made, in the stage of whatever it has come to."""
    activity, frames = slot.activity, _state.frames
    if not frames:
        activity.in_flight = False
    else:
        activity.in_flight = True
        outer, inner = frames[0], frames[-1]
        if not inner.stage:
            inner = next((frame for frame in reversed(frames) if frame.stage), outer)
        activity.role, activity.routine, activity.started = outer.role, outer.routine, outer.started
        activity.stage = inner.stage
        activity.stage_started = inner.started + (inner.stage_began - inner.began) // 1000
        activity.statement = _state.statement
        if (shown := _state.progress_of) is None:
            activity.command = 0
            activity.texts = inner.model, "", ""
        else:
            activity.command = 1 + shown.routine
            activity.progress_started = shown.started
            activity.texts = inner.model, _state.relation, _state.phase
    slot.show()


# -- what the rest of the backend calls -------------------------------------------------------------------------------


def innermost() -> int:
    """What the call that runs now is called; 0 where nobody is told."""
    return _state.frames[-1].call if _state.frames else 0


@contextlib.contextmanager
def waiting(plpy: Any, routine: str, stage_name: str, model: str) -> Iterator[None]:
    """While the model server is asked in a stage. Where that was called by itself, it is a call like any other.

    A call that is still at its first stage, to discover stores, embeds its question: that stage begins here, and the
    search when it ends. Here it costs less than a call of ml_rag._stage, and most calls come this way.
    An error is told by its ``sqlstate``.
    """
    if _state.frames:
        frame = _state.frames[-1]
        if frame.stage == _DISCOVER and stage_name == "embed":
            stage(frame.call, stage_name, model)
            yield
            stage(frame.call, "search", "")
            return
        if frame.model != model and frame.stage == records.stage_number(stage_name):
            frame.model = model
            _show_safely()
        yield
        return
    session = execute(plpy, _SESSION)[0]
    call = _begin(plpy, routine, stage_name, model, session["role"], session["statement"])
    if call is None:
        yield
        return
    try:
        yield
    except Exception as e:
        end(call, getattr(e, "sqlstate", None) or "other")
        raise
    end(call, SUCCESS)


def tokens(prompt: int, generated: int) -> None:
    """Count the tokens of a generation for the call that made it."""
    slot = _state.slot
    if slot is None or not _state.frames:
        return
    try:
        frame = _state.frames[-1]
        slot.record(frame.role, frame.routine).add_tokens(prompt, generated)
    except Exception:  # noqa: BLE001
        _fail()
