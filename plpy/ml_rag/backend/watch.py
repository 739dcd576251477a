"""What ``track`` has told, for the views of sql/watch/watch.sql: each caller sees what pg_stat_activity would show it.

A file that is missing or cannot be read has nothing to tell.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from ml_rag.backend import session, slots, track
from ml_rag.backend.records import BUCKETS, ERRORS, ROUTINES, SHORTEST, STAGES, Activity, Record, error_number
from ml_rag.backend.slots import SlotFile

VERSION = track.VERSION
_TERMINATED = error_number("terminated")
Interrupt = Callable[[], object]
#: a server of many sessions has as many slots, and to add up those of thousands takes seconds
INTERRUPT_SLOTS = 64

# See the note in session: names with their schema, no operators.
_BACKENDS = """
SELECT a.pid, a.datid::pg_catalog.int8 AS database, a.datname, a.usename, a.state,
  pg_catalog.date_part('epoch', a.query_start) AS statement, pg_catalog.pg_has_role(a.usesysid, 'USAGE') AS is_open
FROM pg_catalog.pg_stat_activity AS a WHERE a.usesysid IS NOT NULL
"""
_ROLES = """
SELECT r.oid::pg_catalog.int8 AS oid, r.rolname,
  pg_catalog.pg_has_role(r.oid, 'USAGE') OR pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE') AS is_open
FROM pg_catalog.pg_roles AS r
"""
_SESSION = """
SELECT pg_catalog.pg_backend_pid() AS pid, pg_catalog.date_part('epoch', pg_catalog.statement_timestamp()) AS statement,
  pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE') AS sees_all,
  pg_catalog.pg_encoding_to_char(d.encoding) AS encoding, d.oid::pg_catalog.int8 AS database
FROM pg_catalog.pg_database AS d WHERE pg_catalog.nameeq(d.datname, pg_catalog.current_database())
"""

#: pid, datname, usename, role, routine, stage, model, started, stage_started, command, relation, phase, done, total,
#: failed, progress_started; times are seconds since 1970
ActivityRow = tuple[Any, ...]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[SlotFile, int | None] | None]:
    """A file, and this backend's own slot in it; None where there is none."""
    own = session.own_slot()
    if own is not None and own.file.path == path and own.file.is_current():
        yield own.file, own.number  # opened once more, closing it would give up the slot
        return
    try:
        file = SlotFile(path, create=False)
    except OSError:
        yield None
        return
    try:
        yield file, None
    finally:
        file.close()


def _in_flight(path: str) -> Iterator[Activity]:
    with _opened(path) as opened:
        if opened is None:
            return
        file, own = opened
        for slot in range(file.count()):
            found = file.read_activity(slot)
            if found is not None and found.in_flight and (slot == own or file.is_owned(slot)):
                yield found


def activity(plpy: Any) -> list[ActivityRow]:
    """The calls in flight, in every database. Of the sessions of others: that there is a call, and no more."""
    found = []
    for database, path in slots.databases():
        if path == slots.path_of(database):
            with contextlib.suppress(OSError):
                found += [(database, call) for call in _in_flight(path)]
    caller = session.execute(plpy, _SESSION)[0]
    backends = {(row["database"], row["pid"]): row for row in session.execute(plpy, _BACKENDS)}
    roles = {row["oid"]: row for row in session.execute(plpy, _ROLES)}
    is_utf8 = caller["encoding"] == "UTF8"
    rows: list[ActivityRow] = []
    for database, call in found:
        backend = backends.get((database, call.pid))
        if backend is None:
            continue
        is_own = call.pid == caller["pid"]
        role = roles.get(call.role)
        head = (call.pid, backend["datname"], backend["usename"])
        if not (is_own or backend["is_open"] or caller["sees_all"] or (role is not None and role["is_open"])):
            rows.append((*head, *[None] * 13))
            continue
        # An error may have gone by the end of its call. What began this statement, where the caller may know it:
        statement = caller["statement"] if is_own else backend["statement"]
        over = statement is not None and round(statement * 1e6) != call.statement
        if over or backend["state"] not in ("active", "fastpath function call", "disabled", None):
            continue
        texts = [
            # what another database wrote may have characters that this one's encoding lacks
            text if is_utf8 else text.encode("ascii", "replace").decode()
            for text in call.texts
        ]
        progress: tuple[Any, ...] = (None,) * 7
        if call.command:
            total = call.total if call.total >= 0 else None
            counts = (call.done, total, call.failed, call.progress_started / 1e6)
            progress = (ROUTINES[call.command - 1], texts[1] or None, texts[2] or None, *counts)
        stage = STAGES[call.stage] if call.stage else None
        times = (call.started / 1e6, call.stage_started / 1e6 if stage else None)
        rows.append(
            (*head, role and role["rolname"], ROUTINES[call.routine], stage, texts[0] or None, *times, *progress)
        )
    return rows


def _records(path: str, interrupt: Interrupt = lambda: None) -> tuple[int, dict[tuple[int, int], Record]]:
    """The epoch, and the sum over the slots by role and routine. ``interrupt`` ends it where PostgreSQL wants that."""
    with _opened(path) as opened:
        if opened is None:
            return 0, {}
        file, own = opened
        epoch = file.read_epoch()  # not the file's own, which says what this backend has counted since
        total: dict[tuple[int, int], Record] = {}
        for slot in range(file.count()):
            if slot % INTERRUPT_SLOTS == INTERRUPT_SLOTS - 1:
                interrupt()
            former = file.read_activity(slot)
            parts = [record for _, record in file.read_records(slot, epoch)]
            if former is not None and former.in_flight and slot != own and not file.is_owned(slot):
                # its backend is gone; whoever owns the slot next will count that
                parts.append(Record(former.role, former.routine))
                parts[-1].fail(former.stage, _TERMINATED)
            for part in parts:
                total.setdefault((part.role, part.routine), Record(part.role, part.routine)).merge(part)
        return epoch, total


def stats(plpy: Any) -> list[tuple[Any, ...]]:
    """What was counted in this database, of the roles whose sessions the caller may look at.

    Rows: role, routine, stage, calls, errors, errors by SQLSTATE as JSON text, milliseconds in all, on average, at
    most, percentiles 50, 95, 99, tokens of prompts, generated, since (seconds since 1970).
    """
    caller = session.execute(plpy, _SESSION)[0]
    epoch = 0
    records: dict[tuple[int, int], Record] = {}
    with contextlib.suppress(OSError):
        epoch, records = _records(slots.path_of(caller["database"]), lambda: session.execute(plpy, "SELECT 1"))
    roles = {row["oid"]: row for row in session.execute(plpy, _ROLES)}
    rows: list[tuple[Any, ...]] = []
    for (oid, _), record in records.items():
        role = roles.get(oid)  # None: dropped, or no role in particular
        if role["is_open"] if role is not None else caller["sees_all"]:
            name = role["rolname"] if role is not None else None
            rows += [(name, *row, epoch / 1e6) for row in _stages(record)]
    return rows


def _stages(record: Record) -> Iterator[tuple[Any, ...]]:
    for number, name in enumerate(STAGES):
        total, longest, failed, buckets = record.stage(number)
        n = sum(buckets)
        if not n and not failed:
            continue
        by_sqlstate = {ERRORS[i]: count for i, count in enumerate(record.errors) if count} if number == 0 else {}
        latency: tuple[float | None, ...] = (total / 1e3, None, None, None, None, None)
        if n:
            percentiles = (percentile(buckets, share, longest) / 1e3 for share in (0.5, 0.95, 0.99))
            latency = (total / 1e3, total / n / 1e3, longest / 1e3, *percentiles)
        tokens = record.tokens if name == "generate" or (number == 0 and any(record.tokens)) else (None, None)
        errors_text = json.dumps(by_sqlstate) if by_sqlstate else None
        yield (ROUTINES[record.routine], name, n + failed, failed, errors_text, *latency, *tokens)


def percentile(buckets: list[int], share: float, longest: int) -> float:
    """Microseconds that this share of the durations stayed below, estimated: exact to a class of durations.

    Within its class, they are taken to be spread evenly by logarithm.
    """
    wanted = share * sum(buckets)
    seen = 0
    for number, n in enumerate(buckets):
        if n and seen + n >= wanted:
            low = SHORTEST * 2 ** (number / 2) if number else 0.0
            high = SHORTEST * 2 ** ((number + 1) / 2) if number < BUCKETS - 1 else float(longest)
            part = (wanted - seen) / n
            value = low * (high / low) ** part if low else high * part
            return min(value, float(longest))
        seen += n
    return float(longest)


def reset(plpy: Any) -> float:
    """Count anew from now on; the time, seconds since 1970. Raises OSError where that is not possible."""
    path = slots.path_of(session.execute(plpy, _SESSION)[0]["database"])
    own = session.own_slot()
    if own is not None and own.file.path == path and own.file.is_current():
        own.follow_epoch()
        epoch = own.file.start_epoch()
        own.forget()
        return epoch / 1e6
    file = SlotFile(path, create=True)
    try:
        return file.start_epoch() / 1e6
    finally:
        file.close()
