"""A process that is a backend to backend/track.py, in a data directory of its own; as much of plpy as that touches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ml_rag.backend import session, track, watch
from ml_rag.backend.slots import FOLDER

DATABASE = 5
TIMEOUT = 20
#: a backend is a fork too, of the postmaster
fork = multiprocessing.get_context("fork")


class Plpy:
    """As much of plpy as track and watch touch: one database, one role."""

    class SPIError(Exception):
        sqlstate = "57014"

    def __init__(self, role: int = 10) -> None:
        self.role = role
        self.error: str | None = None
        self.databases = [DATABASE]

    def prepare(self, statement: str, types: list[str] | None = None) -> str:
        return statement

    def execute(self, statement: str, arguments: list[Any] | None = None) -> list[dict[str, Any]]:
        if self.error is not None:
            error = self.SPIError("canceling statement")
            error.sqlstate = self.error
            raise error
        if "'off'" in statement:
            return []
        if "pg_stat_activity" in statement:
            return []
        if "pg_roles" in statement:
            return [{"oid": self.role, "rolname": "r", "is_open": True}]
        if statement == session._DROPPED:
            assert arguments is not None
            return [{"oid": oid} for oid in arguments[0] if oid not in self.databases]
        return [
            {
                "oid": self.role if "quote_ident" in statement else DATABASE,
                "name": str(self.role),
                "role": str(self.role),
                "may_be_again": True,
                "statement": 1000.0,
                "database": DATABASE,
                "encoding": "UTF8",
                "pid": 1,
                "sees_all": True,
            }
        ]


@pytest.fixture(autouse=True)
def data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The process is a backend: it works in a data directory, and has told of nothing yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir()
    fresh()
    yield tmp_path
    track.close()
    fresh()


def fresh() -> None:
    """As in a session that has just begun."""
    track.close()
    session.state.__init__()  # type: ignore[misc]
    session._plans.clear()


def begin(plpy: Plpy, routine: str = "ml_rag", stage: str = "", statement: float = 1000.0) -> int | None:
    return track.begin(plpy, routine, stage, str(plpy.role), statement)


def count(plpy: Plpy, n: int = 1, routine: str = "ml_rag", sqlstate: str = track.SUCCESS) -> None:
    for _ in range(n):
        call = begin(plpy, routine, "search")
        assert call is not None
        track.end(call, sqlstate)


def totals() -> dict[str, tuple[int, int]]:
    """Routine -> calls, errors."""
    return {row[1]: row[3:5] for row in watch.stats(Plpy()) if row[2] == "total"}


def in_process(call: Callable[[], object]) -> None:
    """In a process of its own, which must come to a good end."""
    process = fork.Process(target=lambda: (fresh(), call()))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 0
