"""The loop: read what waits, make, write, commit after each, until nothing waits any more.

A job is a generator. It yields statements, which sql/batch/work.sql executes as the caller, and gets what they
return; where it yields COMMIT, the procedure that the client has called commits, and says whether it could.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ml_rag.backend import calls
from ml_rag.backend.client import ModelServer
from ml_rag.backend.retrieval.sqltext import identifier
from ml_rag.errors import InvalidRequest, MlRagError

R = TypeVar("R")
Batch = dict[str, Any]


@dataclass(frozen=True)
class Statement:
    """SQL of one JSON value. ``given``, JSON text, is its parameter $1; ``vectors``, in pgvector's text form, $2."""

    text: str
    given: str = "null"
    vectors: list[str | None] | None = None
    #: by an index, or by blocks: some rows at a time, in their order
    by_index: bool = False
    #: of ml_rag._filled_parts, where it runs; None: here
    shard: dict[str, Any] | None = None


COMMIT = Statement("")
#: bytes of the texts and keys of a batch, but for those of its last row
MOST_BYTES = 4_000_000
Steps = Generator[Statement, Any, R]


def run(
    text: str, /, by_index: bool = False, vectors: list[str | None] | None = None, on: dict[str, Any] | None = None,
    **given: Any,
) -> Steps[Any]:  # fmt: skip
    """What a statement returns; the keys of its parameter $1 are those of ``given``. ``on``: the shard."""
    return (yield Statement(text, json.dumps(given), vectors, by_index, on))


def function(signature: str) -> str:
    """SQL of a call of ml_rag.<signature>, whose arguments are the elements of the parameter $1."""
    name, _, types = signature.rstrip(")").partition("(")
    arguments = (
        f"nullif(($1 -> {i})::jsonb, 'null')" if kind == "jsonb" else f"($1 ->> {i})::{kind}"
        for i, kind in enumerate(types.split(", "))
    )
    return f"SELECT to_json(r) FROM ml_rag.{name}({', '.join(arguments)}) AS r"


def call(signature: str, *values: Any) -> Steps[Any]:
    """What a function returns; ``signature``: its name, and the types of its arguments."""
    return (yield Statement(function(signature), json.dumps(values)))


def later(alias: str, key: Sequence[str], types: Sequence[str]) -> str:
    """SQL of the condition that a key comes after parameter ``after``, a key as text.

    The order of an extension's type has no operator here; records go by it, without the index.
    """
    values = [f"(($1 ->> 'after')::text[])[{i}]::{kind}" for i, kind in enumerate(types, 1)]
    columns = [f"{alias}.{identifier(name)}" for name in key]
    if not any("." in kind for kind in types):
        return f"ROW({', '.join(columns)}) > ROW({', '.join(values)})"
    columns = [f"{column}::{kind}" for column, kind in zip(columns, types, strict=True)]
    # none is null: of these, a value has the collation of its column
    values = [f"coalesce({value}, {column})" for value, column in zip(values, columns, strict=True)]
    return f"ROW({', '.join(columns)})::record > ROW({', '.join(values)})::record"


def array(name: str, type_name: str = "text") -> str:
    """SQL of the array of that name in a statement's parameter."""
    return (
        f"ARRAY(SELECT j.value::{type_name} FROM json_array_elements_text($1 -> '{name}')"
        " WITH ORDINALITY AS j (value, n) ORDER BY j.n)"
    )


class CreatedAgain(MlRagError):
    """What is filled was dropped, and created again for another model, or another way to make it."""

    sqlstate = "55000"


class InTransactionBlock(MlRagError):
    """A routine that commits was called where it cannot."""

    sqlstate = "25001"


@dataclass
class Session:
    """What a job has of the session: ``schema`` is pgvector's, as it is written; ``call`` as calls.begin has it."""

    plpy: Any
    server: Callable[[], ModelServer]
    schema: str
    routine: str
    given: str
    call: int | None
    #: result, store: what the call is about is done, and its result is this, whatever becomes of node groups
    fallback: dict[str, Any] | None = None

    def stage(self, name: str, model: str = "") -> None:
        """Tell that the call enters a stage."""
        if self.call is not None:
            calls.stage(self.plpy, self.call, name, model)


class Derived:
    """What is derived: how it is read, made and written."""

    #: whether it makes no sense without commits
    must_commit = True

    def __init__(self, session: Session) -> None:
        self.session = session
        #: as ml_rag.progress has it: schema.table, and rows
        self.relation = ""
        self.done = self.failed = 0
        self.total: int | None = None

    def begin(self) -> Steps[None]:
        """Check everything before anything is made."""
        raise NotImplementedError

    def enter(self, step: str) -> Steps[None]:
        """What each transaction begins with; ``step``: what comes: read, make, write, finish."""
        yield from ()

    def read(self) -> Steps[Batch | None]:
        """The next rows that wait, claimed where others could be at them; {}: none just here; None: none any more."""
        raise NotImplementedError

    def make(self, batch: Batch) -> Steps[Any]:
        """What is derived of them. No table is touched while a model is asked."""
        raise NotImplementedError

    def write(self, batch: Batch, made: Any) -> Steps[None]:
        """Where it goes, and the errors of single rows."""
        raise NotImplementedError

    def finish(self) -> Steps[None]:
        """What is to be done when all is made."""
        yield from ()

    def end(self) -> Steps[dict[str, Any]]:
        """The result, and warnings of what the caller has to know."""
        raise NotImplementedError

    def followed_by(self, result: dict[str, Any]) -> Derived | None:
        """What is derived of this in turn; it cannot fail the call."""
        return None

    def stop(self) -> None:
        """Give back what the session holds."""

    def tell(self, phase: str, done: int | None = None, failed: int | None = None) -> None:
        """Say how far the call is. Rows can have come since they were counted."""
        done = self.done if done is None else done
        total = -1 if self.total is None else max(done, self.total)
        failed = self.failed if failed is None else failed
        calls.progress(self.session.plpy, self.session.call, self.relation, phase, done, total, failed)

    def warn(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        """A warning of PostgreSQL's."""
        fields = {key: text for key, text in (("detail", detail), ("hint", hint)) if text is not None}
        self.session.plpy.warning(message, sqlstate="01000", **fields)


def loop(derived: Derived) -> Steps[dict[str, Any]]:
    """Make all that waits; the result."""
    try:
        if derived.must_commit and not (yield COMMIT):
            raise InTransactionBlock(
                f"{derived.session.routine} cannot run inside a transaction block",
                detail="It commits after each batch.",
                hint="CALL it by itself, with autocommit on.",
            )
        if derived.must_commit:
            # those that a cancel has ended between two of their steps: one that commits is the only one
            for job in [job for job, (session, _, _) in _jobs.items() if session is not derived.session]:
                stop(job)
        yield from derived.begin()
        while True:
            yield COMMIT
            yield from derived.enter("read")
            batch = yield from derived.read()
            if batch is None:
                break
            if batch:
                yield COMMIT
                yield from derived.enter("make")
                made = yield from derived.make(batch)
                yield COMMIT
                yield from derived.enter("write")
                yield from derived.write(batch, made)
        yield COMMIT
        yield from derived.enter("finish")
        yield from derived.finish()
        yield COMMIT
        result = yield from derived.end()
    finally:
        derived.stop()
    if (following := derived.followed_by(result)) is not None:
        yield from loop(following)
    return result


#: each with the statement that it waits for
_jobs: dict[int, tuple[Session, Steps[dict[str, Any]], Statement | None]] = {}


def begin(derived: Derived) -> int:
    """A new job: its number, a random one, as a trigger of somebody else's table could continue a job that it knows."""
    job = secrets.randbits(62)
    _jobs[job] = derived.session, loop(derived), None
    return job


def advance(job: int, committed: bool | None, found: str | None) -> Statement | dict[str, Any]:
    """The next statement of a job, or its result. ``found``: what the last one has returned, as JSON text."""
    if job not in _jobs:
        raise InvalidRequest("the job does not exist")
    session, steps, last = _jobs[job]
    try:
        sent = None if last is None else committed if last is COMMIT else json.loads(found or "null")
        following = steps.send(sent)
    except StopIteration as e:
        del _jobs[job]
        result: dict[str, Any] = e.value
        return result
    _jobs[job] = session, steps, following
    return following


def fallback(job: int) -> dict[str, Any] | None:
    """The result of a job if continuing it fails."""
    return _jobs[job][0].fallback if job in _jobs else None


def stop(job: int | None) -> None:
    """Forget a job."""
    if job in _jobs:
        _, steps, _ = _jobs.pop(job)
        steps.close()
