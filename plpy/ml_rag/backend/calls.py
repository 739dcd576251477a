"""What this session tells the model server of its calls: where they are, how far, and how they ended.

As statsd has it: at the end of a call one datagram, sent without waiting, says what is to be counted. What goes on
travels with the requests that a call makes anyway; routines that last (loads, batches, indexes) send datagrams of it
too. docs/protocol.md has the form of both. Nothing here makes a call wait or fail: where nobody listens or there is no
room, what is to be counted goes with the next datagram, unless that becomes too much.

Every call passes here, each time with a cold cache: what is on its way is written for speed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import zlib
from time import monotonic_ns
from typing import Any

from ml_rag.backend.progress import Pace
from ml_rag.progress import State
from ml_rag.protocol import BULK, ROUTINES, STAGES, SUCCESS, TOTAL, datagram_address

#: the numbers of questions (ml_rag._begin_question), of which nothing is told until they wait for a model or end
QUESTIONS = {-1: "ml_rag", -2: "ml_rag_search"}
#: the stage that comes after one in which a question waits for a model, where that asks none
FOLLOWING = {"rewrite": "discover", "embed": "search"}
#: how often it is asked whether this is off, and where the model server is
CHECK_NS = 1_000_000_000
#: calls inside calls
MAX_DEPTH = 100
#: counts that wait for a datagram that gets through, and their bytes
MAX_COUNTS = 256
MAX_WAITING = 24 * 1024
#: characters of a name that is told; of a trace
MAX_NAME = 200
MAX_TRACE = 16 * 1024
#: what a call is called is an integer of PostgreSQL's
MAX_CALL = 2**31 - 1
#: seconds since 1970
MAX_TIME = 1e11
#: class of the SQLSTATEs by which somebody ends a statement: cancelled, shut down
_ENDS = "57"

# Run under whatever search_path there is: nothing in them but names with their schema, and no operators.
_NOW = "SELECT current_user AS role, pg_catalog.date_part('epoch', pg_catalog.statement_timestamp()) AS statement"
_ROLE = """
SELECT current_user AS name,
  pg_catalog.quote_ident(current_user)::pg_catalog.regrole::pg_catalog.oid::pg_catalog.int8 AS oid,
  pg_catalog.pg_has_role(session_user, current_user, 'MEMBER') AS may_be_again
"""
_SETTINGS = """
SELECT s.name, s.value FROM ml_rag.setting AS s
WHERE pg_catalog.texteq(s.name, 'track') OR pg_catalog.texteq(s.name, 'model_server')
"""
_DATABASE = """
SELECT d.oid::pg_catalog.int8 AS oid, c.system_identifier
FROM pg_catalog.pg_database AS d, pg_catalog.pg_control_system() AS c
WHERE pg_catalog.nameeq(d.datname, pg_catalog.current_database())
"""
_plans: dict[str, Any] = {}


def execute(plpy: Any, statement: str) -> Any:
    """The rows of a statement that is prepared once in a session."""
    plan = _plans.get(statement)
    if plan is None:
        plan = _plans[statement] = plpy.prepare(statement)
    return plpy.execute(plan)


class Call:
    """A call in flight. Those that it makes itself lie above it on the stack. Times are ns of the clock that does not
    jump."""

    __slots__ = (
        *("began", "call", "following", "generated", "has_embedded", "is_question", "lasts", "model", "progress"),
        *("prompt", "role", "routine", "stage", "stage_began"),
    )

    def __init__(self, call: int, role: int, routine: str, stage: str) -> None:
        self.call, self.role, self.routine, self.stage = call, role, routine, stage
        #: what the stage waits for; the stage that comes when it has that, where this is known
        self.model = self.following = ""
        #: its end says when its stages ended, whether it has embedded anything or not
        self.is_question = stage == "discover"
        self.has_embedded = False
        #: a routine that begins at none of its stages goes on for long
        self.lasts = not stage
        #: relation, phase, done, total, failed
        self.progress: tuple[str, str, int, int, int] | None = None
        #: tokens
        self.prompt = self.generated = 0
        self.began = self.stage_began = monotonic_ns()


class Session:
    """What the functions below share."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        #: when the statement of the calls began, seconds since 1970
        self.statement = 0.0
        self.last_call = 0
        #: of what has ended, as JSON: role, routine, stage, µs, SQLSTATE, tokens of prompts and generated; of a
        #: question its steps too, and whether it has embedded anything
        self.counts: list[str] = []
        self.check_at = 0
        #: the roles, by name, that this session was lately seen to be
        self.roles: dict[str, int] = {}
        #: how each datagram begins: which cluster, database, process; '' until that is known
        self.head = ""
        #: family and address to send to; None where nothing is told
        self.target: tuple[socket.AddressFamily, Any] | None = None
        self.socket: socket.socket | None = None
        self.pace = Pace()
        #: SQLSTATE and message of the error by which PostgreSQL ends the statement
        self.ending: tuple[str, str] | tuple[None, None] = None, None


session = Session()

# -- what sql/watch/track.sql calls -----------------------------------------------------------------------------------
# role: current_user. statement: when that began, seconds since 1970. Where PostgreSQL wants the statement to end, they
# return None, and ``ending`` has its error.


def begin(plpy: Any, routine: str, stage_name: str, role: str, statement: float) -> int | None:
    """A call begins: what it is called from now on; None where nothing is told."""
    oid = _teller(plpy, role)
    if not oid or routine not in ROUTINES:
        return None
    session.last_call = session.last_call % MAX_CALL + 1
    return _push(session.last_call, oid, routine, stage_name if stage_name in STAGES else "", statement)


def stage(plpy: Any, call: int, name: str, model: str, role: str, statement: float) -> bool | None:
    """The call enters a stage; '' = none."""
    depth = _depth(call)
    if depth < 0 and call in QUESTIONS:  # it is told of from now on
        oid = _teller(plpy, role)
        if not oid:
            return None if oid is None else True
        _push(call, oid, QUESTIONS[call], "discover", statement)
        depth = _depth(call)
    if depth >= 0:
        _enter(session.calls[depth], name if name in STAGES else "", model)
    return True


def end(plpy: Any, call: int, sqlstate: str, role: str, trace: str = "[]", began: float = 0) -> bool | None:
    """The call has ended, and all that it has begun with it. ``trace`` (JSON) has the steps of a question that ended
    well and ``began`` then (seconds since 1970)."""
    depth = _depth(call)
    if depth >= 0:
        _pop(depth + 1, sqlstate)
        ended = session.calls.pop()
    elif call in QUESTIONS:
        oid = _teller(plpy, role)
        if not oid:
            return None if oid is None else True
        ended = Call(call, oid, QUESTIONS[call], "")
    else:
        return True
    if 0 < began < MAX_TIME:  # not NaN either: anybody may call this
        _count_question(ended, trace, began)
    else:
        _count(ended, sqlstate)
    _tell()
    return True


def ending() -> tuple[str, str] | tuple[None, None]:
    """SQLSTATE and message of the error by which PostgreSQL ends the statement; None where there is none."""
    found, session.ending = session.ending, (None, None)
    return found


def progress(
    plpy: Any,
    call: int | None,
    relation: str,
    phase: str,
    done: int,
    total: int,
    failed: int,
    segments: int | None = None,
) -> None:
    """How far the call is, for the client and for ml_rag.progress; ``total`` -1: not known.

    Where it was called by one that tells of itself, nothing; where ``call`` is None or 0, to the client alone.
    """
    if call:
        depth = _depth(call)
        if depth < 0 or _telling() not in (None, session.calls[depth]):
            return
        session.calls[depth].progress = relation[:MAX_NAME], phase[:MAX_NAME], done, total, failed
        _tell()
    session.pace.report(plpy, State(relation, phase, done, total, failed, segments))


def advance(plpy: Any, call: int | None, rows: int) -> None:
    """So many more are done."""
    if call:
        telling = _telling()
        if telling is None or telling.call != call or telling.progress is None:
            return
        relation, phase, done, total, failed = telling.progress
        telling.progress = relation, phase, done + rows, total, failed
        _tell()
    session.pace.advance(plpy, rows)


def tell_waiting() -> bool:
    """Send the counts that were kept because the model server had not yet read the earlier ones; whether any went."""
    if not session.counts:
        return False
    _tell()
    return not session.counts


# -- what the rest of the backend calls -------------------------------------------------------------------------------


def innermost() -> int:
    """What the call that runs now is called; 0 where nothing is told."""
    return session.calls[-1].call if session.calls else 0


class waiting:
    """While the model server is asked in a stage. Where that was called by itself, it is a call like any other.

    An error is told by its ``sqlstate``.
    """

    __slots__ = ("_call", "_plpy")

    def __init__(self, plpy: Any, routine: str, stage_name: str, model: str) -> None:
        self._plpy = plpy
        self._call: int | None = None
        if not session.calls:
            now = execute(plpy, _NOW)[0]
            self._call = begin(plpy, routine, stage_name, now["role"], now["statement"])
        if session.calls and session.calls[-1].stage == stage_name:
            call = session.calls[-1]
            call.model = model
            if call.is_question:
                call.following = FOLLOWING.get(stage_name, "")
                call.has_embedded |= stage_name == "embed"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._call is not None:
            if error is None or isinstance(error, Exception):
                sqlstate = SUCCESS if error is None else getattr(error, "sqlstate", None) or "other"
                end(self._plpy, self._call, sqlstate, "")
        elif error is None and session.calls and session.calls[-1].following:
            _enter(session.calls[-1], session.calls[-1].following, "")


def tokens(prompt: int, generated: int) -> None:
    """Count the tokens of a generation for the call that made it."""
    if session.calls:
        session.calls[-1].prompt += prompt
        session.calls[-1].generated += generated


def is_bulk() -> bool:
    """Whether nobody waits for the call that the client made."""
    return bool(session.calls) and session.calls[0].routine in BULK


def header() -> str:
    """What a request to the model server says of the call that makes it; '' where nothing is told."""
    return f"{session.head}[],{_in_flight()}]" if session.calls else ""


def origin(plpy: Any) -> tuple[str, int]:
    """Which cluster this is, of those that share a model server, and which database of it.

    A cluster is its data directory, in which every backend works: a standby has the identifier of its primary.
    """
    found = execute(plpy, _DATABASE)[0]
    here, host = os.stat("."), zlib.crc32(os.uname().nodename.encode())
    return f"{found['system_identifier']:x}-{host:x}-{here.st_dev:x}-{here.st_ino:x}", found["oid"]


# -- within -----------------------------------------------------------------------------------------------------------


def _depth(call: int) -> int:
    """Where the call is on the stack; -1 = nowhere."""
    calls = session.calls
    depth = len(calls) - 1
    while depth >= 0 and calls[depth].call != call:
        depth -= 1
    return depth


def _push(call: int, role: int, routine: str, stage_name: str, statement: float) -> int | None:
    """Put a call on the stack; its number, None where that is full."""
    s = session
    if s.calls and s.statement != statement:
        _pop(0, "other")  # an error that went by: the statement is over
    if len(s.calls) >= MAX_DEPTH:
        return None
    s.statement = statement
    s.calls.append(Call(call, role, routine, stage_name))
    if s.calls[-1].lasts:
        _tell()
    return call


def _pop(depth: int, sqlstate: str) -> None:
    """Count the calls from ``depth`` on as ended."""
    while len(session.calls) > depth:
        _count(session.calls.pop(), sqlstate)


def _enter(call: Call, name: str, model: str) -> None:
    now = monotonic_ns()
    counts = session.counts
    if call.stage and not call.is_question:
        took = (now - call.stage_began) // 1000
        counts.append(f'[{call.role},"{call.routine}","{call.stage}",{took},"{SUCCESS}",0,0]')
    call.stage, call.model, call.following, call.stage_began = name, model, "", now
    if call.lasts or len(counts) > MAX_COUNTS:
        _tell()


def _count(call: Call, sqlstate: str) -> None:
    """Note what a call that has ended is counted by."""
    counts, now = session.counts, monotonic_ns()
    state = '"00000"' if sqlstate == SUCCESS else json.dumps(sqlstate)
    if call.stage and not (call.is_question and sqlstate == SUCCESS):
        took = (now - call.stage_began) // 1000
        counts.append(f'[{call.role},"{call.routine}","{call.stage}",{took},{state},0,0]')
    took = (now - call.began) // 1000
    counts.append(f'[{call.role},"{call.routine}","{TOTAL}",{took},{state},{call.prompt},{call.generated}]')


def _count_question(call: Call, trace: str, began: float) -> None:
    """The same of a question that ended well: the model server takes the times of its stages from the trace."""
    took = max(0, int((time.time() - began) * 1e6))  # the clock may have jumped
    steps = trace if len(trace) < MAX_TRACE else "[]"
    session.counts.append(
        f'[{call.role},"{call.routine}","{TOTAL}",{took},"{SUCCESS}",{call.prompt},{call.generated},'
        f"{steps},{'true' if call.has_embedded else 'false'}]"
    )


def _tell() -> None:
    """Send what is to be counted and what goes on."""
    s = session
    if s.target is None:
        return
    data = f"{s.head}[{','.join(s.counts)}],{_in_flight() if s.calls else 'null'}]".encode()
    for _ in range(2):
        is_new = s.socket is None
        try:
            if s.socket is None:
                s.socket = socket.socket(s.target[0], socket.SOCK_DGRAM)
                s.socket.setblocking(False)
                s.socket.connect(s.target[1])
            s.socket.send(data)
            s.counts.clear()
            return
        except BlockingIOError:
            break
        except OSError:  # whoever listened is gone; another may be there
            _close()
            if is_new:
                break
    _trim(s.counts)


def _trim(counts: list[str]) -> None:
    """Keep the latest, as many as fit a datagram (which the model server takes up to 64 kB of) beside what comes."""
    size = kept = 0
    for count in reversed(counts[-MAX_COUNTS:]):
        size += len(count)
        if size > MAX_WAITING:
            break
        kept += 1
    del counts[: len(counts) - kept]


def _close() -> None:
    if session.socket is not None:
        session.socket.close()
        session.socket = None


def _telling() -> Call | None:
    """The call whose progress is told."""
    return next((call for call in session.calls if call.progress is not None), None)


def _in_flight() -> str:
    """The call that the client made, at the stage of whatever it has come to, and its progress."""
    calls = session.calls
    outer = inner = calls[0]
    if len(calls) > 1:
        inner = next((call for call in reversed(calls) if call.stage), outer)
    clock = time.time() - monotonic_ns() / 1e9
    of = _telling()
    told = None if of is None or of.progress is None else (of.routine, *of.progress, of.began / 1e9 + clock)
    return json.dumps(
        (
            *(outer.role, outer.routine, outer.began / 1e9 + clock, inner.stage, inner.stage_began / 1e9 + clock),
            *(inner.model[:MAX_NAME], inner.following, session.statement, told),
        )
    )


def _teller(plpy: Any, role: str) -> int | None:
    """The oid of ``role``, which is to be current_user; 0 where nothing is told, None where the statement is to end."""
    s = session
    oid = s.roles.get(role)
    if oid is None or monotonic_ns() > s.check_at:
        try:
            oid = _look_around(plpy)
        except plpy.SPIError as e:
            if e.sqlstate.startswith(_ENDS):
                s.ending = e.sqlstate, str(e)
                return None
            return 0
        except Exception:  # noqa: BLE001 - a defect of ours costs figures and no answer
            return 0
    return oid if s.target is not None else 0


def _look_around(plpy: Any) -> int:
    """What need not be asked for each call; the oid of current_user.

    That is kept where the session can be that again as it likes. It cannot be the owner of a function that is SECURITY
    DEFINER, and must not count for that one afterwards: anybody may call the functions above, with any role.
    """
    s = session
    if monotonic_ns() > s.check_at:
        s.check_at = monotonic_ns() + CHECK_NS
        s.roles.clear()  # one may have been renamed
        _follow_settings(plpy)
    row = execute(plpy, _ROLE)[0]
    if row["may_be_again"]:
        s.roles[row["name"]] = row["oid"]
    oid: int = row["oid"]
    return oid


def _follow_settings(plpy: Any) -> None:
    s = session
    settings = {row["name"]: row["value"] for row in execute(plpy, _SETTINGS)}
    target = None
    if settings["track"] != "off":
        if not s.head:
            cluster, database = origin(plpy)
            s.head = f'["{cluster}",{database},{os.getpid()},{time.time_ns()},'
        with contextlib.suppress(OSError, ValueError):
            target = datagram_address(settings["model_server"])
    if target is None:
        s.calls.clear()
        s.counts.clear()
    if target != s.target:
        _close()
    s.target = target
