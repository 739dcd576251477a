"""The calls of PostgreSQL's sessions, as these report them by datagrams: those in progress, and counts of all.

``docs/protocol.md`` has the form of a datagram, ``docs/monitoring.md`` what is made of them. All of it is in memory and
begins with the server. The senders decide what is reported, so everything is checked and bounded here.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from math import log2
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from ml_rag.protocol import ROUTINES, STAGES, SUCCESS, TERMINATED, TOTAL
from ml_rag.server.metrics import Metrics
from ml_rag.server.replies import CallInFlight, CallStatistics

#: what errors are counted by: these, and classes of SQLSTATEs
_ERRORS = frozenset(
    (
        *("22000", "22023", "42501", "42P01", "P0002", "55000", "08006", "53300", "57014", "38000"),
        *("22xxx", "23xxx", "25xxx", "40xxx", "42xxx", "53xxx", "54xxx", "55xxx", "57xxx", "P0xxx", "XXxxx"),
        TERMINATED,
    )
)
#: durations fall into this many classes, each sqrt(2) times as long as the one before; the first ends at 141 µs
CLASSES = 48
SHORTEST = 100
#: calls in flight, databases, pairs of role and routine (of up to 10 kB each): of more roles is counted for none
MAX_CALLS = 4096
MAX_DATABASES = 256
MAX_PAIRS = 4096
NO_ROLE = 0

_TEN_YEARS = 10 * 366 * 86400
Name = Annotated[str, Field(max_length=200)]
Cluster = Annotated[str, Field(pattern=r"^[0-9a-f-]{1,100}$")]
Oid = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
_Rows = Annotated[int, Field(ge=-1, lt=2**62)]
_Tokens = Annotated[int, Field(ge=0, lt=2**40)]
#: seconds since 1970
_Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]


class Counted(NamedTuple):
    """A stage of a call that has ended, or (stage ``total``) the call."""

    role: Oid
    routine: Name
    stage: Name
    microseconds: Annotated[int, Field(ge=0, le=_TEN_YEARS * 10**6)]
    sqlstate: Name
    prompt_tokens: _Tokens
    generated_tokens: _Tokens


class Progress(NamedTuple):
    command: Name
    relation: Name
    phase: Name
    done: _Rows
    total: _Rows
    failed: _Rows
    progress_started: _Moment


class InFlight(NamedTuple):
    """The call that a client made, at the stage of whatever it has come to."""

    role: Oid
    routine: Name
    started: _Moment
    stage: Name
    stage_started: _Moment
    #: what the stage waits for; the stage that comes when it has that, where this is known
    model: Name
    following: Name
    #: when the client's statement began
    statement: _Moment
    progress: Progress | None


class Datagram(NamedTuple):
    cluster: Cluster
    database: Oid
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    #: when the process began, ns since 1970: tells those of one number apart
    session: Annotated[int, Field(ge=0, lt=2**63)]
    counts: Annotated[list[Counted], Field(max_length=1024, fail_fast=True)]
    in_flight: InFlight | None


_datagram = TypeAdapter(Datagram)


@dataclass(slots=True)
class Figures:
    """Of one role, routine and stage. Times are those of calls without an error."""

    #: microseconds
    total: int = 0
    longest: int = 0
    errors: int = 0
    #: how many in each class of duration
    classes: Counter[int] = field(default_factory=Counter)

    def add(self, microseconds: int) -> None:
        self.total += microseconds
        self.longest = max(self.longest, microseconds)
        steps = int(2 * log2(microseconds / SHORTEST)) if microseconds > SHORTEST else 0
        self.classes[min(CLASSES - 1, steps)] += 1

    def percentile(self, share: float) -> float | None:
        """Milliseconds that this share of the durations stayed below: the middle of their class; None of none."""
        wanted = share * self.classes.total()
        for number, n in sorted(self.classes.items()):
            wanted -= n
            if wanted <= 0:
                middle = self.longest if number == CLASSES - 1 else SHORTEST * 2 ** (number / 2 + 0.25)
                return min(middle, self.longest) / 1e3
        return None


@dataclass(slots=True)
class Pair:
    """Of one role and routine."""

    stages: dict[str, Figures] = field(default_factory=lambda: defaultdict(Figures))
    sqlstates: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def rows(self, role: int, routine: str) -> Iterator[CallStatistics]:
        for stage, of in self.stages.items():
            n = of.classes.total()
            has_tokens = stage == "generate" or (stage == TOTAL and self.prompt_tokens + self.generated_tokens > 0)
            yield {
                "role": role, "routine": routine, "stage": stage, "calls": n + of.errors, "errors": of.errors,
                "errors_by_sqlstate": dict(self.sqlstates) if stage == TOTAL and self.sqlstates else None,
                "total_ms": of.total / 1e3,
                "mean_ms": of.total / n / 1e3 if n else None,
                "max_ms": of.longest / 1e3 if n else None,
                "p50_ms": of.percentile(0.5), "p95_ms": of.percentile(0.95), "p99_ms": of.percentile(0.99),
                "prompt_tokens": self.prompt_tokens if has_tokens else None,
                "generated_tokens": self.generated_tokens if has_tokens else None,
            }  # fmt: skip


@dataclass(slots=True)
class Database:
    since: float
    #: by role and routine
    pairs: dict[tuple[int, str], Pair] = field(default_factory=dict)


class Calls:
    """What the sessions have reported (``app.state.calls``)."""

    def __init__(self, metrics: Metrics) -> None:
        #: by routine and stage, by routine and SQLSTATE: looking them up takes as long as counting
        self._seconds = cache(metrics.call_seconds.labels)
        self._ended = cache(metrics.calls.labels)
        self._started = time.time()
        self._pairs = 0
        #: by cluster and oid, by cluster and process; the one reported last stands last
        self._databases: OrderedDict[tuple[str, int], Database] = OrderedDict()
        self._in_flight: OrderedDict[tuple[str, int], Datagram] = OrderedDict()

    def receive(self, data: bytes) -> Datagram | None:
        """Take a datagram, or the header of a request, which has the same form; None for one of another form."""
        try:
            report = _datagram.validate_json(data)
        except ValidationError:
            return None
        if b"\\u0000" in data:  # no text of PostgreSQL's
            return None
        former = self._in_flight.pop((report.cluster, report.pid), None)
        if former is not None and former.session != report.session:
            self._terminate(former)
        for counted in report.counts:
            self.count(report.cluster, report.database, counted)
        if report.in_flight is not None and report.in_flight.routine in ROUTINES:
            self._in_flight[report.cluster, report.pid] = report
            if len(self._in_flight) > MAX_CALLS:
                self._in_flight.popitem(last=False)
        return report

    def count(self, cluster: str, database: int, counted: Counted) -> None:
        """Count a stage of a call that has ended, or the call."""
        role, routine, stage, microseconds, sqlstate, prompt, generated = counted
        if routine not in ROUTINES or (stage != TOTAL and stage not in STAGES):
            return
        pair = self._pair(cluster, database, role, routine)
        pair.prompt_tokens += prompt
        pair.generated_tokens += generated
        figures = pair.stages[stage]
        if sqlstate == SUCCESS:
            figures.add(microseconds)
            self._seconds(routine, stage).observe(microseconds / 1e6)
        else:
            sqlstate = error_class(sqlstate)
            figures.errors += 1
        if stage == TOTAL:
            self._ended(routine, sqlstate).inc()
            if sqlstate != SUCCESS:
                pair.sqlstates[sqlstate] += 1

    def answered(self, report: Datagram) -> None:
        """A request that reported its call has its reply: the stage that comes then has begun."""
        key, call = (report.cluster, report.pid), report.in_flight
        if self._in_flight.get(key) is report and call is not None and call.following:
            now = call._replace(stage=call.following, stage_started=time.time(), model="", following="")
            self._in_flight[key] = report._replace(in_flight=now)

    def end(self, cluster: str, pid: int, session: int) -> None:
        """The process is gone: its call has ended by that."""
        report = self._in_flight.get((cluster, pid))
        if report is not None and report.session == session:
            del self._in_flight[cluster, pid]
            self._terminate(report)

    def reset(self, cluster: str, database: int) -> None:
        """Count anew from now on."""
        former = self._database(cluster, database)
        self._pairs -= len(former.pairs)
        self._databases[cluster, database] = Database(max(time.time(), former.since + 1e-6))

    def activity(self, cluster: str) -> list[CallInFlight]:
        """The calls in flight of a cluster."""
        ours = (report for report in self._in_flight.values() if report.cluster == cluster)
        return [_shown(report, report.in_flight) for report in ours if report.in_flight is not None]

    def stats(self, cluster: str, database: int) -> tuple[float, list[CallStatistics]]:
        """When counting began, and what was counted in a database."""
        found = self._database(cluster, database)
        return found.since, [row for (role, routine), pair in found.pairs.items() for row in pair.rows(role, routine)]

    def _database(self, cluster: str, database: int) -> Database:
        found = self._databases.get((cluster, database))
        if found is None:
            found = self._databases[cluster, database] = Database(self._started)
            if len(self._databases) > MAX_DATABASES:
                _, oldest = self._databases.popitem(last=False)
                self._pairs -= len(oldest.pairs)
        self._databases.move_to_end((cluster, database))
        return found

    def _pair(self, cluster: str, database: int, role: int, routine: str) -> Pair:
        pairs = self._database(cluster, database).pairs
        found = pairs.get((role, routine))
        if found is None:
            if role != NO_ROLE and self._pairs >= MAX_PAIRS:
                return self._pair(cluster, database, NO_ROLE, routine)
            found = pairs[role, routine] = Pair()
            self._pairs += 1
        return found

    def _terminate(self, report: Datagram) -> None:
        if (call := report.in_flight) is not None:
            for stage in (TOTAL, call.stage):
                counted = Counted(call.role, call.routine, stage, 0, TERMINATED, 0, 0)
                self.count(report.cluster, report.database, counted)


def _shown(report: Datagram, call: InFlight) -> CallInFlight:
    row: Any = call._asdict() | (call.progress._asdict() if call.progress is not None else {})
    del row["progress"], row["following"]
    row |= {"pid": report.pid, "session": report.session, "database": report.database}
    row["stage"] = call.stage if call.stage in STAGES else ""
    shown: CallInFlight = row
    return shown


def error_class(sqlstate: str) -> str:
    """What an SQLSTATE is counted as: by itself, by its class, or ``other``."""
    if sqlstate in _ERRORS:
        return sqlstate
    return of_class if (of_class := f"{sqlstate[:2]}xxx") in _ERRORS else "other"
