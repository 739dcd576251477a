"""A statement that somebody else wrote: is it harmless, and what does it return? See sql/nlsql/statement.sql."""

from __future__ import annotations

import ctypes
import re
import resource
import signal
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ml_rag.backend import sizes, tree
from ml_rag.backend.retrieval.sqltext import identifier, is_utf8
from ml_rag.backend.sqlstate import sqlstate
from ml_rag.errors import MlRagError

#: of a call under no statement_timeout
SECONDS = 30
#: beyond what the backend has already when the statement begins
MEMORY_BYTES = 128 * 1024 * 1024
#: the same of parsing it once: to make views of it takes eight times as much
PARSING_BYTES = 32 * 1024 * 1024
#: of what is parsed, as text
MAX_PARSED_CHARACTERS = 4_000_000
#: of the rows as JSON
RESULT_BYTES = 16 * 1024 * 1024
#: in the rows; each takes some hundred bytes once they are jsonb
RESULT_VALUES = 1_000_000
#: of a statement
MAX_CHARACTERS = 20_000
#: times that it is parsed, 50 ms apart, while something that it reads is locked
_PARSED = 20

#: what holds while the statement runs; nothing of it can be undone from within
_SETTINGS = {
    "transaction_read_only": "on",
    # neither another process, which would have limits of its own, nor a library that ends this one for want of memory
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
}

#: of the view around the statement, as PostgreSQL writes a parsed one: the names of its columns, equal ones too
_COLUMNS = re.compile(r":eref \{ALIAS :aliasname ml_rag_statement :colnames \(((?:[^()\\]|\\.)*)\)", re.DOTALL)

_TOO_LONG = "54000: it is too long once it is parsed"
_ONLY_SELECT = "only a single SELECT is allowed: no other statement, no INSERT, UPDATE or DELETE in WITH, no INTO"


class Interrupted(MlRagError):
    """The call itself was cancelled."""

    sqlstate = "57014"


class _RolledBackError(Exception):
    """Ends the block in which the view is."""


class Within(NamedTuple):
    """What a statement may read: ``relations`` (OIDs), as long as the options of the call allow them."""

    relations: list[int]
    schemas: list[str] | None
    tables: list[str] | None


@dataclass
class Outcome:
    """``reason``: why it is not valid, None where it is. ``rows``: JSON text of each, where it was run.

    ``told``: what the model hears of the reason. An error of a run can quote values of rows, which are not for a model.
    """

    reason: str | None = None
    told: str | None = None
    columns: list[str] = field(default_factory=list)
    rows: list[str] | None = None
    has_more: bool = False


def examine(plpy: Any, statement: str, within: Within, schemas: list[str], max_rows: int, *, run: bool) -> Outcome:
    """Parse a statement, decide, and run it where ``run``. Afterwards everything is as it was.

    ``schemas``: where names without a schema are looked for.

    Raises Interrupted where the call was cancelled.
    """
    statement = statement.strip().rstrip(";").rstrip()
    if not statement or len(statement) > MAX_CHARACTERS:
        return Outcome(f"it is empty or longer than {MAX_CHARACTERS} characters")
    if not statement.isascii() and not is_utf8(plpy):
        # names in it would be others than those that are looked at
        return Outcome("it has characters that are not ASCII, and the encoding of the database is not UTF-8")
    outcome = Outcome()
    deadline = _Deadline(plpy)
    is_run = False
    try:
        with plpy.subtransaction():
            with deadline:
                _decide(plpy, statement, within, schemas, outcome)
                if is_run := outcome.reason is None and run:
                    _run(plpy, max_rows, outcome)
            raise _RolledBackError
    except _RolledBackError:
        pass
    except plpy.SPIError as e:
        if sqlstate(e) == "57014" and not deadline.is_over:
            raise Interrupted(str(e)) from None
        if sqlstate(e) == "57014":
            return Outcome(f"it took longer than {SECONDS} seconds")
        return Outcome(f"{sqlstate(e)}: {e}", f"{sqlstate(e)} ({type(e).__name__}) when it was run" if is_run else None)
    except MemoryError:
        return Outcome("53200: out of memory")
    return outcome


def _decide(plpy: Any, statement: str, within: Within, schemas: list[str], outcome: Outcome) -> None:
    """Leaves a view, or says in ``outcome`` why not."""
    # names in the statement are resolved by this path, which the functions called here do not go by
    path = ", ".join(["pg_catalog", *map(identifier, schemas), "pg_temp"])
    _value(plpy, "SELECT pg_catalog.set_config('search_path', $1, true)", "text", path)
    # Citus would warn that it cannot make the view on its workers
    plpy.execute("SELECT pg_catalog.set_config('citus.enable_ddl_propagation', 'off', true)")
    if named := _parse(plpy, statement, within, schemas):
        outcome.reason = f"it may use {named}, which runs code of an untrusted owner"
        return
    view = f"CREATE TEMP VIEW ml_rag_statement_columns AS SELECT true AS x FROM (\n{statement}\n) AS ml_rag_statement"  # noqa: S608
    try:
        with plpy.subtransaction():
            plpy.execute(view)
    except plpy.SPIError as e:
        # what is a statement, and none of which a view can be made
        if sqlstate(e) not in ("42601", "0A000"):
            raise
        outcome.reason = f"{sqlstate(e)}: {_ONLY_SELECT} ({e})"
        return
    text = _parsed(plpy, "ml_rag_statement_columns")
    if text is None:
        outcome.reason = _TOO_LONG
        return
    if found := _COLUMNS.search(text):
        outcome.columns = [
            re.sub(r"\\(.)", r"\1", name[1:-1], flags=re.DOTALL) for name in re.split(r"(?<!\\) ", found[1])
        ]
    names = ", ".join(f"c{place}" for place in range(len(outcome.columns)))
    plpy.execute(f"CREATE TEMP VIEW ml_rag_statement ({names}) AS (\n{statement}\n)")
    # by now what it reads is locked, and so are the parts of that: it keeps its owner, which may have changed meanwhile
    own = "pg_catalog.to_regclass('pg_temp.ml_rag_statement')::pg_catalog.oid"
    plpy.execute(f"SELECT ml_rag._hold_with(pg_catalog.array_remove(ml_rag._read_with({own}), {own}))")
    refusal = (
        "SELECT ml_rag._refusal(ml_rag._parsed('ml_rag_statement'), ARRAY("
        "SELECT t.relation FROM ml_rag._askable_tables($2, $3) AS t"
        " WHERE t.relation OPERATOR(pg_catalog.=) ANY ($1)"
        " UNION ALL SELECT pg_catalog.to_regclass('pg_temp.ml_rag_statement')::pg_catalog.oid))"
    )
    arguments = ("oid[]", within.relations, "text[]", within.schemas, "text[]", within.tables)
    outcome.reason = _value(plpy, refusal, *arguments) or _too_large(plpy)


def _parse(plpy: Any, statement: str, within: Within, schemas: list[str]) -> str | None:
    """Parse it, so that what it reads is locked; or the type, among those that it may use, that runs code.

    To parse a constant runs the CHECK of its domain, and one can be made while a lock is waited for: so locks of tables
    are waited for before types are looked at, and none after it."""
    hold = (
        "SELECT ml_rag._hold(ARRAY(SELECT c.oid FROM pg_catalog.pg_class AS c"
        " WHERE c.oid OPERATOR(pg_catalog.=) ANY ($1)"
        " AND ($2 IS NULL OR pg_catalog.lower(c.relname) OPERATOR(pg_catalog.=) ANY ($2))))"
    )
    words = re.findall(r"\w[\w$]*", statement.lower())
    types = "SELECT ml_rag._type_that_runs_code($1, $2)"
    lock_timeout = _value(plpy, "SELECT pg_catalog.current_setting('lock_timeout')")
    set_lock_timeout = "SELECT pg_catalog.set_config('lock_timeout', $1, true)"
    for attempt in range(_PARSED):
        # all of them where the one that is locked may be written otherwise
        _value(plpy, hold, "oid[]", within.relations, "text[]", words if attempt < _PARSED / 2 else None)
        _value(plpy, set_lock_timeout, "text", "1ms")
        try:
            with plpy.subtransaction():
                named: str | None = _value(plpy, types, "text", statement, "text[]", schemas)
                if named is None:
                    # by itself: where its parentheses are balanced, those around it later cannot be closed from within
                    with _MemoryLimit(PARSING_BYTES):
                        plpy.prepare(statement)
            return named
        except plpy.SPIError as e:
            if sqlstate(e) != "55P03" or attempt == _PARSED - 1:
                raise
        finally:
            _value(plpy, set_lock_timeout, "text", lock_timeout)
        _value(plpy, "SELECT pg_catalog.pg_sleep(0.05)")
    raise AssertionError


def _too_large(plpy: Any) -> str | None:
    """Why the view could take too long where PostgreSQL cancels nothing, or too much memory; see ``sizes``."""
    text = _parsed(plpy, "ml_rag_statement")
    if text is None:
        return _TOO_LONG
    (query,) = tree.parse(text)
    functions = sizes.functions(query)
    signatures = _value(plpy, "SELECT ml_rag._signatures($1)", "oid[]", functions)
    reason = sizes.check(query, dict(zip(functions, signatures, strict=True)))
    return reason and f"54000: {reason}"


def _parsed(plpy: Any, view: str) -> str | None:
    """The tree of a view; None where it is too long."""
    text: str | None = _value(
        plpy,
        "SELECT CASE WHEN pg_catalog.int4le(pg_catalog.length(v.tree), "  # noqa: S608
        f"{MAX_PARSED_CHARACTERS}) THEN v.tree END FROM ml_rag._parsed($1) AS v (tree)",
        *("text", view),
    )
    return text


def _value(plpy: Any, statement: str, *arguments: Any) -> Any:
    """The one value of a statement. ``arguments``: of each parameter its type and value."""
    types, values = list(arguments[0::2]), list(arguments[1::2])
    (value,) = plpy.execute(plpy.prepare(statement, types), values)[0].values()
    return value


def _run(plpy: Any, max_rows: int, outcome: Outcome) -> None:
    for name, value in _SETTINGS.items():
        plpy.execute(f"SELECT pg_catalog.set_config('{name}', '{value}', true)")
    plpy.execute("SELECT ml_rag._limit_temporary_files()")
    # OFFSET 0: each value is computed once. In SQL, as conversions of PL/Python take many times the memory of a value,
    # where it has no limit, and are not cancelled.
    statement = (
        "SELECT CASE WHEN ml_rag._fits(pg_catalog.octet_length(j.row)) THEN j.row END AS row"  # noqa: S608
        f" FROM (SELECT {_value(plpy, 'SELECT ml_rag._statement_row()')} AS row"
        " FROM (SELECT * FROM pg_temp.ml_rag_statement OFFSET 0) AS r OFFSET 0) AS j LIMIT $1"
    )
    rows: list[str] = []
    size = values = 0
    _value(plpy, "SELECT ml_rag._fits(0)")  # compiled while there is memory
    plan = plpy.prepare("SELECT * FROM ml_rag._next_row($1, $2, $3)", ["refcursor", "text", "int8"])
    portal = None
    with _MemoryLimit(MEMORY_BYTES) as limit:
        while (found := plpy.execute(plan, [portal, statement, max_rows + 1])[0])["is_there"]:
            portal, row = found["portal"], found["value"]
            if row is not None:
                size += len(row)
                values += sum(map(row.count, ",[{"))
            if row is None or len(rows) == max_rows or size > RESULT_BYTES or values > RESULT_VALUES:
                outcome.has_more = True
                break
            rows.append(row)
            limit.begin()
    outcome.rows = rows


def fits(size: int | None) -> bool:
    """Whether a row of so many bytes may come to Python; from now on until the next one memory has no limit.

    PL/Python ends the process where it lacks the memory for a value, which would end every session of the server.
    """
    if _MemoryLimit.current is not None:
        _MemoryLimit.current.lift()
    return size is not None and size <= RESULT_BYTES


class _MemoryLimit:
    """What the statement takes is bounded by the operating system: PostgreSQL then fails with "out of memory".

    Stack and shared memory are not counted, so that neither can be what fails.
    """

    current: _MemoryLimit | None = None

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> _MemoryLimit:
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        with open("/proc/self/status") as status:
            used = next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:")), 0)
        bounds = [bound for bound in self._before if bound != resource.RLIM_INFINITY]
        self._limit = min([used + self._size, *bounds])
        _MemoryLimit.current = self
        self.begin()
        return self

    def begin(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self._limit, self._before[1]))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)

    def __exit__(self, *error: object) -> None:
        _MemoryLimit.current = None
        self.lift()


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 64),
    )


class _Time(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns"))


class _Deadline:
    """Cancels what runs after ``SECONDS``, unless there is a statement_timeout: setting one now would have no effect on
    the statement that the caller has begun. A timer of the operating system sends what pg_cancel_backend sends."""

    def __init__(self, plpy: Any) -> None:
        self._plpy = plpy
        self._timer: ctypes.c_void_p | None = None
        self._ends = 0.0

    @property
    def is_over(self) -> bool:
        return 0 < self._ends <= time.monotonic()

    def __enter__(self) -> None:
        if _value(self._plpy, "SELECT pg_catalog.current_setting('statement_timeout')") != "0":
            return
        libc = ctypes.CDLL(None, use_errno=True)
        timer = ctypes.c_void_p()
        event = _Event(None, signal.SIGINT, 0, b"")
        if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) != 0:
            raise OSError(ctypes.get_errno(), "timer_create")
        self._timer = timer
        self._ends = time.monotonic() + SECONDS
        libc.timer_settime(timer, 0, ctypes.byref(_Time(0, 0, SECONDS, 0)), None)

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            ctypes.CDLL(None).timer_delete(self._timer)
            if error[0] is None:
                # a signal that came in the last moment is taken here
                self._plpy.execute("SELECT 1")
