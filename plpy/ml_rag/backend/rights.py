"""Run a piece of this package with the rights of ml_rag_internal, the role of the keyword indexes.

The tables of the keyword indexes are closed to all others. What reads them for a caller cannot be a view: EXPLAIN
shows how many rows its scans had, with conditions of the caller's pushed into them. Nor can it be a function with
arguments that is SECURITY DEFINER: there ``current_user`` is its owner, so that it cannot tell what its caller may see.

So the checks and all that reads or writes a caller's own tables run in a function of the caller's rights, and only what
touches the index tables is handed over, as a Python function. Statements cannot make one up: only code of this package
puts something here, and it is taken away before it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ml_rag.backend.statements import close_cursors, open_cursors
from ml_rag.errors import PrivilegeError

R = TypeVar("R")

_plans: dict[str, Any] = {}
_handed: Callable[[], None] | None = None


def as_owner(plpy: Any, work: Callable[[], R], *, writes: bool = False) -> R:
    """What ``work`` returns or raises, run with the rights of ``ml_rag_internal``.

    It must run no code of the caller's: no statement on tables but those of the extension, no cursor that the caller
    opened. Where it does not write, its statements see what the statement of the caller sees, else each its own moment.
    """
    return _hand(plpy, "ml_rag._write_as_owner" if writes else "ml_rag._read_as_owner", work)


def at_one_moment(plpy: Any, work: Callable[[], R]) -> R:
    """What ``work`` returns or raises, run as the caller; all of its statements see the same."""
    return _hand(plpy, "ml_rag._at_one_moment", work)


def now(plpy: Any, work: Callable[[], R]) -> R:
    """What ``work`` returns or raises, run as the caller; each of its statements sees its own moment, also within
    ``at_one_moment``."""
    return _hand(plpy, "ml_rag._now", work)


def _hand(plpy: Any, name: str, work: Callable[[], R]) -> R:
    global _handed
    if name not in _plans:
        _plans[name] = plpy.prepare(f"SELECT {name}()")
    results: list[R] = []
    errors: list[BaseException] = []
    kept = open_cursors()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as e:  # noqa: BLE001 - through SQL it would lose its class
            errors.append(e)
        finally:
            # the error keeps alive what it came through: its cursors would be the caller's to fetch from
            close_cursors(kept)

    _handed = run
    try:
        plpy.execute(_plans[name])
    finally:
        _handed = None
    if errors:
        raise errors[0]
    return results[0]


def run_handed() -> None:
    """Run what was handed over, if anything was; for the functions named above alone."""
    global _handed
    work, _handed = _handed, None
    if work is not None:
        work()


def commit(plpy: Any) -> bool:
    """Commit; whether that was allowed: it is not inside a transaction block or a function.

    Raises PrivilegeError if the role of the call was set for the transaction only (SET LOCAL ROLE): the rest of it
    would run as the role before, and so would the triggers of the tables.
    """
    if "role" not in _plans:
        _plans["role"] = plpy.prepare(
            "SELECT pg_catalog.to_regrole(pg_catalog.quote_ident(CURRENT_USER))::pg_catalog.oid AS role"
        )
    before = plpy.execute(_plans["role"])[0]["role"]
    try:
        plpy.commit()
    except plpy.spiexceptions.InvalidTransactionTermination:
        return False
    if plpy.execute(_plans["role"])[0]["role"] != before:
        raise PrivilegeError(
            "the role of the call has ended with its transaction",
            detail="The call commits after each step, and does not continue as another role. Completed steps are kept.",
            hint="Take the role by SET ROLE, not by SET LOCAL ROLE or set_config(…, true).",
        )
    return True
