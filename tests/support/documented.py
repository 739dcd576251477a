"""What the COMMENT of a routine says about its errors."""

from __future__ import annotations

import re
from dataclasses import dataclass

import psycopg

from support.cluster import Connection

_STATE = re.compile(r"\b(?=[0-9A-Z]*[0-9])[0-9A-Z]{5}\b")
_ERRORS = re.compile(r"\berrors:\s*(.*)", re.DOTALL | re.IGNORECASE)
_OTHERS = re.compile(r"\b(?:as|see|those of)\s+((?:ml_rag\.)?[a-z_]+)")


@dataclass(frozen=True)
class Routine:
    """A public function or procedure; ``arguments``: name -> type of those that go in."""

    name: str
    signature: str
    is_procedure: bool
    arguments: dict[str, str]
    comment: str

    def __str__(self) -> str:
        return self.signature


def routines(connection: Connection) -> list[Routine]:
    """The routines of the extension that are for callers, those with a leading ``_`` left out."""
    rows = connection.execute(
        """
        SELECT CASE n.nspname WHEN 'ml_rag' THEN 'ml_rag.' ELSE '' END || p.proname, p.oid::regprocedure::text,
          p.prokind = 'p', p.proargnames, p.proargmodes::text[], array(
            SELECT format_type(t, NULL) FROM unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]))
              WITH ORDINALITY AS u (t, i) ORDER BY i), coalesce(obj_description(p.oid, 'pg_proc'), '')
        FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
        JOIN pg_depend AS d ON d.objid = p.oid AND d.classid = 'pg_proc'::regclass
        JOIN pg_extension AS e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
        WHERE e.extname = 'ml_rag' AND p.proname !~ '^_' AND p.prorettype <> 'trigger'::regtype ORDER BY 2
        """
    ).fetchall()
    found = []
    for name, signature, is_procedure, names, modes, types, comment in rows:
        inward = [m in ("i", "b") for m in modes or "i" * len(types)]
        arguments = {n: t for n, t, i in zip(names or (), types, inward, strict=False) if i}
        found.append(Routine(name, signature, is_procedure, arguments, comment))
    return found


def states(routine: Routine, all_routines: list[Routine]) -> set[str]:
    """The SQLSTATEs in the comment of a routine, with those of the routines it refers to for errors."""
    comments: dict[str, str] = {}
    for one in all_routines:
        comments[one.name] = f"{one.comment}\n{comments.get(one.name, '')}"
    return _states(routine.name, comments, set())


def _is_state(text: str) -> bool:
    """Whether it is an SQLSTATE, and not a number that looks like one."""
    try:
        psycopg.errors.lookup(text)
    except KeyError:
        return False
    return True


def _states(name: str, comments: dict[str, str], seen: set[str]) -> set[str]:
    if name in seen or name not in comments:
        return set()
    seen.add(name)
    if (errors := _ERRORS.search(comments[name])) is None:
        return set()
    found = {state for state in _STATE.findall(errors[1]) if _is_state(state)}
    for other in _OTHERS.findall(errors[1]):
        found |= _states(other.rstrip("."), comments, seen)
    return found
