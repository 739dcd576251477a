"""What this backend tells of its calls: begun, in which stage, how far, ended how. ``watch`` reads it.

Loaded by itself, ahead of ``bridge``: a call that needs no model must not wait for what talks to models.
Nothing here may make a user's call fail: whatever goes wrong with the file costs statistics and no answer.
"""

from __future__ import annotations

import time
from typing import Any

from ml_rag import __version__
from ml_rag.backend import records, session
from ml_rag.backend.records import Record
from ml_rag.backend.session import Frame, current_role, execute, fail, look_around, state
from ml_rag.backend.slots import Slot

VERSION = __version__
#: the slot is given back: another version of this module follows
close = session.close

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
_DISCOVER, _EMBED, _SEARCH = map(records.stage_number, ("discover", "embed", "search"))

# names with their schema, no operators: see session
_SESSION = """
SELECT current_user AS role, pg_catalog.date_part('epoch', pg_catalog.statement_timestamp()) AS statement
"""

# -- what sql/watch/track.sql calls -----------------------------------------------------------------------------------


def begin(plpy: Any, routine: str, stage_name: str, role: str, statement: float) -> int | None:
    """A call begins: what it is called from now on, None where nobody is told, -1 where PostgreSQL wants the statement
    to end: ``ending`` has its error. ``statement``: seconds since 1970."""
    try:
        return _begin(plpy, routine, stage_name, "", role, statement)
    except plpy.SPIError as e:
        state.ending = e.sqlstate, str(e)
        return -1


def ending() -> tuple[str, str]:
    """SQLSTATE and message of the error behind the last -1 of ``begin``."""
    return state.ending


def _begin(plpy: Any, routine: str, stage_name: str, model: str, role: str, statement: float) -> int | None:
    """Raises the SPIError of a statement that is to end, and nothing else."""
    number = records.routine_number(routine)
    if number is None:
        return None
    try:
        if time.monotonic() > state.check_at:
            look_around(plpy)
        slot = state.slot
        if slot is None or len(state.frames) >= MAX_DEPTH:
            return None
        oid = state.roles.get(role)
        if oid is None:
            oid = current_role(plpy)  # anybody may call ml_rag._begin_call, and must not count for others
        began = round(statement * 1e6)
        if state.frames and state.statement != began:
            # an error that went by: the statement is over
            _pop(slot, 0, _OTHER)
        state.statement = began
        state.last_call = state.last_call % MAX_CALL + 1
        frame = Frame(state.last_call, oid, number, records.stage_number(stage_name), model)
        state.frames.append(frame)
        _show(slot)
        return frame.call
    except Exception as e:
        if isinstance(e, plpy.SPIError) and e.sqlstate.startswith(_ENDS):
            raise
        fail()
        return None


def _depth(call: int) -> int:
    """Where the call is in the stack; -1 = nowhere."""
    frames = state.frames
    depth = len(frames) - 1
    while depth >= 0 and frames[depth].call != call:
        depth -= 1
    return depth


def stage(call: int, name: str, model: str) -> None:
    """The call enters a stage; '' = none."""
    slot, depth = state.slot, _depth(call)
    if slot is not None and depth >= 0:
        _enter(slot, state.frames[depth], records.stage_number(name), model)


def _enter(slot: Slot, frame: Frame, number: int, model: str) -> None:
    try:
        now = time.monotonic_ns()
        if frame.stage:
            frame.stages.append((frame.stage, (now - frame.stage_began) // 1000))
            if len(frame.stages) >= WRITE_STAGES:
                _count_stages(slot, frame)
                slot.write(frame.role, frame.routine)
        frame.stage, frame.model, frame.stage_began = number, model, now
        _show(slot)
    except Exception:  # noqa: BLE001
        fail()


def _count_stages(slot: Slot, frame: Frame) -> Record:
    record = slot.record(frame.role, frame.routine)
    for number, microseconds in frame.stages:
        record.add(number, microseconds)
    frame.stages.clear()
    return record


def end(call: int, sqlstate: str) -> None:
    """The call has ended, and all that it has begun with it."""
    slot, depth = state.slot, _depth(call)
    if slot is None or depth < 0:
        return
    try:
        _pop(slot, depth, None if sqlstate == SUCCESS else records.error_number(sqlstate))
        _show(slot)
    except Exception:  # noqa: BLE001
        fail()


def _pop(slot: Slot, depth: int, error: int | None) -> None:
    """Count the frames from ``depth`` on as ended."""
    slot.follow_epoch()
    now = time.monotonic_ns()
    while len(state.frames) > depth:
        frame = state.frames.pop()
        if frame is state.progress_of:
            state.progress_of = None
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
    slot, depth = state.slot, _depth(call)
    if slot is None or depth < 0:
        return
    try:
        frame = state.frames[depth]
        if state.progress_of is None:
            state.progress_of = frame
        elif state.progress_of is not frame:
            return
        state.relation, state.phase = relation, phase
        activity = slot.activity
        activity.done, activity.total, activity.failed = done, total, failed
        _show(slot)
    except Exception:  # noqa: BLE001
        fail()


def advance(call: int) -> None:
    """One more is done; told now and then."""
    slot, frame = state.slot, state.progress_of
    if slot is None or frame is None or frame.call != call:
        return
    slot.activity.done += 1
    if slot.activity.done % ADVANCE == 0:
        try:
            slot.show()
        except Exception:  # noqa: BLE001
            fail()


def _show_safely() -> None:
    try:
        if state.slot is not None:
            _show(state.slot)
    except Exception:  # noqa: BLE001
        fail()


def _show(slot: Slot) -> None:
    """Write what is in flight: the call that the client made, in the stage of whatever it has come to."""
    activity, frames = slot.activity, state.frames
    if not frames:
        activity.in_flight = False
        slot.show()
        return
    outer = inner = frames[-1]
    if len(frames) > 1:
        outer = frames[0]
        if not inner.stage:
            inner = next((frame for frame in reversed(frames) if frame.stage), outer)
    activity.in_flight = True
    activity.role, activity.routine, activity.started = outer.role, outer.routine, outer.started
    activity.stage, activity.statement = inner.stage, state.statement
    activity.stage_started = inner.started + (inner.stage_began - inner.began) // 1000
    if (shown := state.progress_of) is None:
        activity.command = 0
        activity.texts = inner.model, "", ""
    else:
        activity.command = 1 + shown.routine
        activity.progress_started = shown.started
        activity.texts = inner.model, state.relation, state.phase
    slot.show()


# -- what the rest of the backend calls -------------------------------------------------------------------------------


def innermost() -> int:
    """What the call that runs now is called; 0 where nobody is told."""
    return state.frames[-1].call if state.frames else 0


class waiting:
    """While the model server is asked in a stage. Where that was called by itself, it is a call like any other.

    A call that is still at its first stage, to discover stores, embeds its question: that stage begins here, and the
    search when it ends. Here it costs less than a call of ml_rag._stage, and most calls come this way.
    An error is told by its ``sqlstate``.
    """

    __slots__ = ("_call", "_frame")

    def __init__(self, plpy: Any, routine: str, stage_name: str, model: str) -> None:
        self._frame: Frame | None = None
        self._call: int | None = None
        slot, number = state.slot, records.stage_number(stage_name)
        if not state.frames or slot is None:
            now = execute(plpy, _SESSION)[0]
            self._call = _begin(plpy, routine, stage_name, model, now["role"], now["statement"])
            return
        frame = state.frames[-1]
        if frame.stage == _DISCOVER and number == _EMBED:
            self._frame = frame
            _enter(slot, frame, number, model)
        elif frame.model != model and frame.stage == number:
            frame.model = model
            _show_safely()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._call is not None:
            if error is None:
                end(self._call, SUCCESS)
            elif isinstance(error, Exception):
                end(self._call, getattr(error, "sqlstate", None) or "other")
        elif self._frame is not None and error is None:
            slot = state.slot
            if slot is not None and state.frames and state.frames[-1] is self._frame:
                _enter(slot, self._frame, _SEARCH, "")


def tokens(prompt: int, generated: int) -> None:
    """Count the tokens of a generation for the call that made it."""
    slot = state.slot
    if slot is None or not state.frames:
        return
    try:
        frame = state.frames[-1]
        slot.record(frame.role, frame.routine).add_tokens(prompt, generated)
    except Exception:  # noqa: BLE001
        fail()
