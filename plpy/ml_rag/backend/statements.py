"""Statements that are prepared once in a session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ml_rag.backend.retrieval import sqltext

#: rows of one fetch, unless told otherwise
PORTION = 5000

#: cursors that are being read
_open: list[Any] = []


def open_cursors() -> int:
    """How many cursors are being read."""
    return len(_open)


def close_cursors(kept: int) -> None:
    """Close cursors that an error has left open, but for the first: a statement could still read one by its name."""
    while len(_open) > kept:
        # what an error of SQL has ended is closed already
        with contextlib.suppress(Exception):
            _open.pop().close()


class Statements:
    """Statements by name, each prepared once in a session: SQL, then the types of its parameters."""

    def __init__(self, statements: dict[str, tuple[str, ...]]) -> None:
        self._statements = statements
        self._plans: dict[str, Any] = {}

    def _plan(self, plpy: Any, name: str) -> Any:
        if name not in self._plans:
            statement, *types = self._statements[name]
            self._plans[name] = plpy.prepare(statement, [f"pg_catalog.{type_name}" for type_name in types])
        return self._plans[name]

    def __call__(self, plpy: Any, name: str, *arguments: Any) -> Any:
        """All rows."""
        return plpy.execute(self._plan(plpy, name), list(arguments))

    def rows(
        self, plpy: Any, name: str, *arguments: Any, portion: int = PORTION, most: int | None = None
    ) -> Iterator[Any]:
        """The rows, a portion at a time. ``most``: as many as there can be; where a portion has them all, no cursor is
        opened, which would take longer."""
        if most is not None and most <= portion:
            yield from self(plpy, name, *arguments)
        else:
            yield from _in_portions(plpy.cursor(self._plan(plpy, name), list(arguments)), portion)

    def rows_with(self, plpy: Any, name: str, literal: str, *arguments: Any, portion: int = PORTION) -> Iterator[Any]:
        """The same where the planner is to know the text that is the last parameter; planned each time."""
        statement, *types = self._statements[name]
        statement = statement.replace(f"${len(types)}", sqltext.literal(literal))
        plan = plpy.prepare(statement, [f"pg_catalog.{type_name}" for type_name in types[:-1]])
        yield from _in_portions(plpy.cursor(plan, list(arguments)), portion)


def _in_portions(cursor: Any, portion: int) -> Iterator[Any]:
    _open.append(cursor)
    while rows := cursor.fetch(portion):
        yield from rows
    _open.remove(cursor)
    cursor.close()
