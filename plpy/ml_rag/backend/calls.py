"""What this session reports of its calls to the model server: where they are, how far, and how they ended.

As in statsd, one datagram at the end of a call, sent without waiting, reports its counts. The state of a call travels
with the requests that it makes anyway; routines that last (loads, batches, indexes) send datagrams of it too.
docs/protocol.md has the form of both. Nothing here makes a call wait or fail: if no server listens or the socket has no
room, the counts go with the next datagram, unless they become too many.

Any role may call what reports, with any argument. So who reports, and when the statement began, is asked of PostgreSQL.
Every question passes here, with a cold cache: its end is written for speed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from time import monotonic_ns
from typing import Any

from ml_rag.backend.progress import Pace
from ml_rag.progress import State
from ml_rag.protocol import BULK, ROUTINES, STAGES, SUCCESS, TOTAL, datagram_address

#: the numbers of questions (ml_rag._begin), of which nothing is reported until they wait for a model or end
QUESTIONS = {-1: "ml_rag", -2: "ml_rag_search"}
#: the stage that comes after one in which a question waits for a model, where that asks none
FOLLOWING = {"rewrite": "discover", "embed": "search"}
#: how often it is asked whether this is off, and where the model server is
CHECK_NS = 1_000_000_000
#: calls inside calls
MAX_DEPTH = 100
#: counts that wait for a datagram that gets through
MAX_COUNTS = 256
#: characters of a name, an SQLSTATE, a trace
MAX_NAME, MAX_STATE, MAX_TRACE = 200, 10, 16 * 1024
#: the number of a call is an integer of PostgreSQL's; time in seconds since 1970
MAX_CALL, MAX_TIME = 2**31 - 1, 1e11
#: class of the SQLSTATEs by which somebody ends a statement: cancelled, shut down
_ENDS = "57"

#: a stage of a question, and when it ended
Step = tuple[str, datetime]

# Run under whatever search_path there is: nothing in them but names with their schema, and no operators.
_NOW = """
SELECT pg_catalog.quote_ident(current_user)::pg_catalog.regrole::pg_catalog.oid::pg_catalog.int8 AS role,
  pg_catalog.date_part('epoch', pg_catalog.statement_timestamp()) AS statement, current_user AS name,
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
    """A call in flight. Those that it makes itself lie above it on the stack. Times are ns of a monotonic clock."""

    def __init__(self, number: int, routine: str, stage: str, role: int) -> None:
        self.number, self.role, self.routine, self.stage = number, role, routine, stage
        #: what the stage waits for; the stage that comes when it has that, where this is known
        self.model = self.following = ""
        #: its end says when its stages ended, whether it has embedded anything or not
        self.is_question, self.has_embedded = stage == "discover", False
        #: a routine that begins at none of its stages takes long
        self.lasts = not stage
        self.progress: State | None = None
        #: tokens
        self.prompt = self.generated = 0
        self.began = self.stage_began = monotonic_ns()

    def enter(self, stage: str, model: str = "") -> None:
        """Another stage begins, in which it waits for that model."""
        now = monotonic_ns()
        if self.stage and not self.is_question:
            self.count(self.stage, now - self.stage_began)
        self.stage, self.model, self.following, self.stage_began = stage, model, "", now
        if self.lasts or len(session.counts) > MAX_COUNTS:
            _send()

    def count(self, stage: str, ns: float, sqlstate: str = SUCCESS) -> None:
        state = '"00000"' if sqlstate == SUCCESS else json.dumps(sqlstate[:MAX_STATE])
        tokens = f"{self.prompt},{self.generated}" if stage == TOTAL else "0,0"
        took = max(0, int(ns // 1000))
        session.counts.append(f'[{self.role},"{self.routine}","{stage}",{took},{state},{tokens}]')

    def end(self, sqlstate: str) -> None:
        now = monotonic_ns()
        if self.stage and not (self.is_question and sqlstate == SUCCESS):
            self.count(self.stage, now - self.stage_began, sqlstate)
        self.count(TOTAL, now - self.began, sqlstate)

    def end_well(self, steps: Sequence[Step], began: float) -> None:
        """The same of a question."""
        with contextlib.suppress(TypeError):  # a name is not a text, or a time has no zone
            for (_, former), (stage, now) in pairwise(steps):
                if stage in STAGES and (stage != "embed" or self.has_embedded):
                    self.count(stage, round((now - former).total_seconds() * 1e6) * 1000)
        self.count(TOTAL, (time.time() - began) * 1e9)


class Session:
    """What the functions below share."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        #: when the statement of the calls began, seconds since 1970
        self.statement = 0.0
        self.last_call = 0
        #: of what has ended, as JSON: role, routine, stage, µs, SQLSTATE, tokens of prompts and generated
        self.counts: list[str] = []
        self.check_at = 0
        #: oids by name of the roles that this session was lately seen to be, and can be again as it likes: not the
        #: owner of a function that is SECURITY DEFINER
        self.roles: dict[str, int] = {}
        #: how each datagram begins: which cluster, database, process; '' until that is known
        self.head = ""
        #: family and address to send to; None where nothing is reported
        self.target: tuple[socket.AddressFamily, Any] | None = None
        self.socket: socket.socket | None = None
        self.pace = Pace()


session = Session()

# -- events: what sql/watch/track.sql and the rest of the backend report ----------------------------------------------


def report(plpy: Any, event: str, call: int, name: str, model: str, trace: str, began: float) -> Any:
    """An event of ml_rag._report: the number of a call that begins, and the error by which PostgreSQL ends the
    statement, as JSON text; PL/Python would give it another message."""
    try:
        if event == "begin":
            return begin(plpy, name, model), None
        if event == "stage":
            stage(plpy, call, name, model)
        else:
            steps: list[Step] = []
            with contextlib.suppress(TypeError, KeyError, ValueError, RecursionError):
                found = json.loads(trace) if len(trace) < MAX_TRACE else []
                steps = [(step["stage"], datetime.fromisoformat(step["ended"])) for step in found]
            end(plpy, call, name, steps, began)
    except plpy.SPIError as e:
        return None, json.dumps({"sqlstate": e.sqlstate, "message": str(e)})
    return None, None


def begin(plpy: Any, routine: str, stage_name: str) -> int | None:
    """A call begins: its number; None where nothing is reported."""
    if routine not in ROUTINES:
        return None
    session.last_call = session.last_call % MAX_CALL + 1
    call = _push(plpy, session.last_call, routine, stage_name if stage_name in STAGES else "")
    return None if call is None else call.number


def stage(plpy: Any, call: int, name: str, model: str = "") -> None:
    """The call enters a stage; '' = none."""
    found = _find(call)
    if found is None and call in QUESTIONS:  # it is reported from now on
        found = _push(plpy, call, QUESTIONS[call], "discover")
    if found is not None:
        found.enter(name if name in STAGES else "", model)


def end(plpy: Any, call: int, sqlstate: str, steps: Sequence[Step] = (), began: float = 0, role: str = "") -> None:
    """The call has ended, and all that it has begun with it. ``steps``: those of a question that ended well, which
    began then (seconds since 1970). ``role``: current_user, where the caller says so: to ask takes long."""
    found = _find(call)
    if found is not None:
        while (last := session.calls.pop()) is not found:
            last.end(sqlstate)
    elif call in QUESTIONS and (who := _who(plpy, role)):
        found = Call(call, QUESTIONS[call], "", who[0])
    else:
        return
    if 0 < began < MAX_TIME:  # not NaN either
        found.end_well(steps, began)
    else:
        found.end(sqlstate)
    _send()


def progress(plpy: Any, call: int | None, *state: Any) -> None:
    """How far the call is (the fields of ``State``), for the client and for ml_rag.progress.

    Where it was called by one that reports its own, nothing; where ``call`` is None or 0, to the client alone.
    """
    if call:
        found = _find(call)
        if found is None or _reporting() not in (None, found):
            return
        found.progress = State(*state)
        _send()
    session.pace.report(plpy, State(*state))


def advance(plpy: Any, call: int | None, rows: int) -> None:
    """So many more are done."""
    if call:
        found = _reporting()
        if found is None or found.number != call or found.progress is None:
            return
        found.progress = found.progress._replace(done=found.progress.done + rows)
        _send()
    session.pace.advance(plpy, rows)


@contextlib.contextmanager
def waiting(plpy: Any, routine: str, stage_name: str, model: str) -> Iterator[None]:
    """While the model server is asked in a stage. Where that was called by itself, it is a call like any other, whose
    error is reported by its ``sqlstate``."""
    alone = None if session.calls else begin(plpy, routine, stage_name)
    call = session.calls[-1] if session.calls else None
    if call is not None and call.stage == stage_name:
        call.model = model
        if call.is_question:
            call.following = FOLLOWING.get(stage_name, "")
            call.has_embedded |= stage_name == "embed"
    try:
        yield
    except Exception as e:
        if alone is not None:
            end(plpy, alone, getattr(e, "sqlstate", None) or "other")
        raise
    if alone is not None:
        end(plpy, alone, SUCCESS)
    elif session.calls and (following := session.calls[-1].following):
        session.calls[-1].enter(following)


def tokens(of: Mapping[str, Any]) -> None:
    """Count the tokens of a generation for the call that made it."""
    if session.calls:
        session.calls[-1].prompt += of["prompt_tokens"] or 0
        session.calls[-1].generated += of["generated_tokens"] or 0


# -- what the rest of the backend asks --------------------------------------------------------------------------------


def innermost() -> int:
    """What the call that runs now is called; 0 where nothing is reported."""
    return session.calls[-1].number if session.calls else 0


def is_bulk() -> bool:
    """Whether the call that the client made is bulk work, for which no user waits."""
    return bool(session.calls) and session.calls[0].routine in BULK


def header() -> str:
    """What a request to the model server says of the call that makes it; '' where nothing is reported."""
    return f"{session.head}[],{_in_flight()}]" if session.calls else ""


def counted_as() -> list[Any] | None:
    """What a generation is counted as that another program asks for: cluster, database, role, routine."""
    if not session.calls:
        return None
    cluster, database, *_ = json.loads(f"{session.head}0]")
    return [cluster, database, session.calls[-1].role, session.calls[-1].routine]


def origin(plpy: Any) -> tuple[str, int]:
    """Which cluster this is, of those that share a model server, and which database of it.

    A cluster is its data directory, in which every backend works: a standby has the identifier of its primary.
    """
    found = execute(plpy, _DATABASE)[0]
    here, host = os.stat("."), zlib.crc32(os.uname().nodename.encode())
    return f"{found['system_identifier']:x}-{host:x}-{here.st_dev:x}-{here.st_ino:x}", found["oid"]


def send_waiting() -> bool:
    """Send the counts that were kept because the model server had not yet read the earlier ones; whether any went."""
    if not session.counts:
        return False
    _send()
    return not session.counts


# -- within -----------------------------------------------------------------------------------------------------------


def _who(plpy: Any, role: str = "") -> tuple[int, float] | None:
    """The oid of current_user, and when the statement began (0 where ``role`` is known); None: nothing is reported.

    Raises the error by which PostgreSQL ends the statement, but no other: a defect of ours costs figures and no answer.
    """
    try:
        if monotonic_ns() > session.check_at:
            session.check_at = monotonic_ns() + CHECK_NS
            session.roles.clear()  # one may have been renamed
            _follow_settings(plpy)
        if session.target is None:
            return None
        if role in session.roles:
            return session.roles[role], 0.0
        now = execute(plpy, _NOW)[0]
        if now["may_be_again"]:
            session.roles[now["name"]] = now["role"]
        return now["role"], now["statement"]
    except Exception as e:
        if getattr(e, "sqlstate", "").startswith(_ENDS):
            raise
        return None


def _find(call: int) -> Call | None:
    """The call of that number that lies highest on the stack."""
    return next((found for found in reversed(session.calls) if found.number == call), None)


def _push(plpy: Any, number: int, routine: str, stage_name: str) -> Call | None:
    """Put a call on the stack; None where that is full, or nothing is reported."""
    who = _who(plpy)
    if who is None:
        return None
    role, statement = who
    while session.calls and session.statement != statement:
        session.calls.pop().end("other")  # an error that went by: the statement is over
    if len(session.calls) >= MAX_DEPTH:
        return None
    session.statement = statement
    call = Call(number, routine, stage_name, role)
    session.calls.append(call)
    if call.lasts:
        _send()
    return call


def _send() -> None:
    """Send the counts and the state of the calls, if a server listens and has room. Else the latest counts wait: as
    many as fit a datagram, of which the model server takes up to 64 kB."""
    s = session
    if s.target is None or s.socket is None:
        return
    data = f"{s.head}[{','.join(s.counts)}],{_in_flight() if s.calls else 'null'}]"
    try:
        s.socket.sendto(data.encode(), s.target[1])
        s.counts.clear()
    except OSError:
        del s.counts[:-MAX_COUNTS]


def _reporting() -> Call | None:
    """The call whose progress is reported."""
    return next((call for call in session.calls if call.progress is not None), None)


def _in_flight() -> str:
    """The call that the client made, at the stage of whatever it has come to, and its progress."""
    outer = session.calls[0]
    inner = next((call for call in reversed(session.calls) if call.stage), outer)
    clock = time.time() - monotonic_ns() / 1e9
    far = None
    if (of := _reporting()) is not None and (state := of.progress) is not None:
        names = of.routine, state.relation[:MAX_NAME], state.phase[:MAX_NAME]
        far = *names, state.done, state.total, state.failed, of.began / 1e9 + clock
    return json.dumps(
        (
            *(outer.role, outer.routine, outer.began / 1e9 + clock, inner.stage, inner.stage_began / 1e9 + clock),
            *(inner.model[:MAX_NAME], inner.following, session.statement, far),
        )
    )


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
        if s.socket is not None:
            s.socket.close()
        s.socket = None if target is None else socket.socket(target[0], socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    s.target = target
