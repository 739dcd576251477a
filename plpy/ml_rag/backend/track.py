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
from ml_rag.backend import slots
from ml_rag.backend.slots import Activity, Record, SlotFile

VERSION = __version__

#: after the file could not be used
RETRY_SECONDS = 10.0
#: how often it is asked whether the file is still the one that others open
CHECK_SECONDS = 1.0
#: a call that goes on for long writes its counters so often
WRITE_SECONDS = 1.0
SUCCESS = "00000"
#: class of the SQLSTATEs by which somebody ends a statement: cancelled, shut down
_ENDS = "57"
_OTHER = slots.error_number("other")
_TERMINATED = slots.error_number("terminated")

# Run under whatever search_path there is: nothing in them but names with their schema, and no operators.
_SESSION = """
SELECT pg_catalog.quote_ident(current_user)::pg_catalog.regrole::pg_catalog.oid::pg_catalog.int8 AS role,
  pg_catalog.date_part('epoch', pg_catalog.statement_timestamp()) AS statement
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

    __slots__ = ("began", "call", "model", "role", "routine", "stage", "stage_began", "stage_started", "started")

    def __init__(self, call: int, role: int, routine: int) -> None:
        self.call, self.role, self.routine = call, role, routine
        self.began = self.stage_began = time.perf_counter_ns()
        self.started = self.stage_started = time.time_ns() // 1000
        self.stage = 0
        self.model = ""


class Slot:
    """The slot of this backend, and what its pages hold."""

    def __init__(self, file: SlotFile, number: int) -> None:
        self.file, self.number = file, number
        self.activity = Activity(os.getpid())
        self._records: dict[tuple[int, int], tuple[int, Record]] = {}
        self._unwritten: dict[tuple[int, int], float] = {}
        former = file.read_activity(number)
        for place, record in file.read_records(number, file.epoch):
            self._records[record.role, record.routine] = place, record
        if former is not None and former.in_flight and former.pid != os.getpid():
            self.record(former.role, former.routine).fail(former.stage, _TERMINATED)
            self.write(former.role, former.routine)
        self.show()

    def record(self, role: int, routine: int) -> Record:
        """The counters of a role and a routine. Where there is no room for more, those used least recently ago are
        counted among those of no role in particular (0)."""
        key = role, routine
        found = self._records.pop(key, None)
        if found is None:
            if len(self._records) < slots.RECORDS:
                place = next(iter(set(range(slots.RECORDS)) - {place for place, _ in self._records.values()}))
            else:
                place = self._make_room()
            found = place, Record(role, routine)
            self.file.write_record(self.number, *found)  # what was there counts no more
        self._records[key] = found  # the last one is the one used last
        return found[1]

    def _make_room(self) -> int:
        oldest = next(key for key in self._records if key[0] != 0)
        place, record = self._records.pop(oldest)
        common = self._records.get((0, record.routine))
        if common is None:
            # its place becomes the common one; another has to go for the one that is to come
            common = place, Record(0, record.routine)
            self._records[0, record.routine] = common
            common[1].merge(record)
            self.file.write_record(self.number, *common)
            return self._make_room()
        common[1].merge(record)
        self.file.write_record(self.number, *common)
        return place

    def write(self, role: int, routine: int) -> None:
        self.file.write_record(self.number, *self._records[role, routine])
        self._unwritten.pop((role, routine), None)

    def write_late(self, role: int, routine: int) -> None:
        """Write where the last time is long ago."""
        now = time.monotonic()
        if now > self._unwritten.setdefault((role, routine), now + WRITE_SECONDS):
            self.write(role, routine)

    def follow_epoch(self) -> None:
        """Forget what was counted before a reset."""
        epoch = self.file.read_epoch()
        if not epoch:  # truncated or damaged
            epoch = self.file.start_epoch(only_if_none=True)
        if epoch != self.file.epoch:
            self.file.epoch = epoch
            self.forget()

    def forget(self) -> None:
        """Count from 0."""
        self._records.clear()
        self._unwritten.clear()

    def show(self) -> None:
        self.file.write_activity(self.number, self.activity.page())


class _State:
    """Of this session. ``statement``: when the statement of the frames began, µs since 1970."""

    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.retry_at = self.check_at = 0.0
        self.frames: list[Frame] = []
        self.statement = 0
        self.last_call = 0
        #: the frame whose progress is shown
        self.progress_of: Frame | None = None


_state = _State()


def own_slot() -> Slot | None:
    """The slot of this backend, where it has one."""
    return _state.slot


def close() -> None:
    """Give the slot back: another version of this module follows."""
    slot, _state.slot = _state.slot, None
    if slot is not None:
        with contextlib.suppress(OSError):
            slot.file.close()


def _fail() -> None:
    """Go on without the file, and try again later."""
    _state.retry_at = time.monotonic() + RETRY_SECONDS
    _state.frames.clear()
    _state.progress_of = None
    close()


def _open(plpy: Any) -> Slot | None:
    now = time.monotonic()
    if _state.slot is not None and now > _state.check_at:
        _state.check_at = now + CHECK_SECONDS
        if not _state.slot.file.is_current():
            close()
    if _state.slot is None and now > _state.retry_at:
        # until it has worked
        _state.retry_at = now + RETRY_SECONDS
        oid = execute(plpy, _DATABASE)[0]["oid"]
        path = slots.path_of(oid)
        if not os.path.lexists(path):
            _remove_files_of_dropped_databases(plpy)
        _state.slot = _claim(path)
        if _state.slot is not None:
            _state.retry_at = 0.0
    return _state.slot


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


def begin(plpy: Any, routine: str) -> tuple[int | None, str | None, str | None]:
    """A call begins: (what it is to be called from now on; null where nobody is told), and SQLSTATE and message where
    PostgreSQL wants the statement to end."""
    try:
        return _begin(plpy, routine), None, None
    except plpy.SPIError as e:
        return None, e.sqlstate, str(e)


def _begin(plpy: Any, routine: str) -> int | None:
    """Raises the SPIError of a statement that is to end, and nothing else."""
    number = slots.routine_number(routine)
    if number is None:
        return None
    try:
        session = execute(plpy, _SESSION)[0]
        slot = _open(plpy)
        return None if slot is None else _push(slot, session, number)
    except Exception as e:
        if isinstance(e, plpy.SPIError) and e.sqlstate.startswith(_ENDS):
            raise
        _fail()
        return None


def _push(slot: Slot, session: Any, routine: int) -> int:
    statement = round(session["statement"] * 1e6)
    if _state.frames and _state.statement != statement:
        # an error that went by: the statement is over
        _pop(0, _OTHER)
    _state.statement = statement
    _state.last_call += 1
    _state.frames.append(Frame(_state.last_call, session["role"] or 0, routine))
    _show(slot)
    return _state.last_call


def _depth(call: int) -> int | None:
    return next((i for i in range(len(_state.frames) - 1, -1, -1) if _state.frames[i].call == call), None)


def stage(call: int, name: str, model: str) -> None:
    """The call enters a stage; '' = none."""
    slot, depth = _state.slot, _depth(call)
    if slot is None or depth is None:
        return
    try:
        frame = _state.frames[depth]
        now = time.perf_counter_ns()
        if _leave(slot, frame, now):
            slot.write_late(frame.role, frame.routine)
        frame.stage = slots.stage_number(name)
        frame.model = model
        frame.stage_began = now
        frame.stage_started = frame.started + (now - frame.began) // 1000
        _show(slot)
    except Exception:  # noqa: BLE001
        _fail()


def _leave(slot: Slot, frame: Frame, now: int) -> bool:
    if not frame.stage:
        return False
    slot.record(frame.role, frame.routine).add(frame.stage, (now - frame.stage_began) // 1000)
    return True


def end(call: int, sqlstate: str) -> None:
    """The call has ended, and all that it has begun with it."""
    slot, depth = _state.slot, _depth(call)
    if slot is None or depth is None:
        return
    try:
        _pop(depth, None if sqlstate == SUCCESS else slots.error_number(sqlstate))
        _show(slot)
    except Exception:  # noqa: BLE001
        _fail()


def _pop(depth: int, error: int | None) -> None:
    """Count the frames from ``depth`` on as ended."""
    slot = _state.slot
    assert slot is not None
    slot.follow_epoch()
    now = time.perf_counter_ns()
    while len(_state.frames) > depth:
        frame = _state.frames.pop()
        if frame is _state.progress_of:
            _state.progress_of = None
        if error is None:
            _leave(slot, frame, now)
            slot.record(frame.role, frame.routine).add(0, (now - frame.began) // 1000)
        else:
            slot.record(frame.role, frame.routine).fail(frame.stage, error)
        slot.write(frame.role, frame.routine)


def progress(call: int, relation: str, phase: str, done: int, total: int, failed: int) -> None:
    """How far the call is; ``total`` -1: not known. Where it was called by one that tells of itself, nothing."""
    slot, depth = _state.slot, _depth(call)
    if slot is None or depth is None:
        return
    try:
        frame = _state.frames[depth]
        if _state.progress_of is None:
            _state.progress_of = frame
            slot.activity.progress_started = frame.started
        elif _state.progress_of is not frame:
            return
        activity = slot.activity
        activity.relation, activity.phase = relation, phase
        activity.done, activity.total, activity.failed = done, total, failed
        _show(slot)
    except Exception:  # noqa: BLE001
        _fail()


def _show(slot: Slot) -> None:
    """Write what is in flight: the call that the client made, in the stage of whatever it has come to."""
    activity, frames = slot.activity, _state.frames
    activity.in_flight = bool(frames)
    activity.command = 0 if _state.progress_of is None else 1 + _state.progress_of.routine
    if frames:
        outer, inner = frames[0], frames[-1]
        for frame in reversed(frames):
            if frame.stage:
                inner = frame
                break
        activity.role, activity.routine, activity.started = outer.role, outer.routine, outer.started
        activity.stage, activity.model, activity.stage_started = inner.stage, inner.model, inner.stage_started
        activity.statement = _state.statement
    slot.show()


# -- what the rest of the backend calls -------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(plpy: Any, routine: str, stage_name: str, model: str) -> Iterator[None]:
    """A stage that may have been called by itself: then it is a call like any other.

    An error is told by its ``sqlstate``.
    """
    if _state.frames or execute(plpy, _IS_OFF):
        yield
        return
    call = _begin(plpy, routine)
    if call is None:
        yield
        return
    stage(call, stage_name, model)
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
