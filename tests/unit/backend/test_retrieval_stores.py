"""When discovery reads the catalog anew, without a database."""

from __future__ import annotations

from typing import Any

import pytest

from ml_rag.backend.retrieval import stores
from ml_rag.backend.retrieval.stores import Moment, Wanted, discover, now


class Plpy:
    """As much of plpy as a discovery that finds nothing touches."""

    def __init__(self) -> None:
        self.moment: str | None = "10:10: asker"
        self.reads = 0

    def prepare(self, statement: str, types: list[str]) -> str:
        return statement

    def execute(self, statement: str, arguments: list[Any]) -> list[dict[str, Any]]:
        if "pg_current_snapshot" in statement:
            return [{"moment": self.moment}]
        self.reads += 1
        return []


@pytest.fixture
def plpy(monkeypatch: pytest.MonkeyPatch) -> Plpy:
    monkeypatch.setattr(stores, "_last", Moment(None))
    monkeypatch.setattr(stores, "_by_schema", {})
    return Plpy()


def reads(plpy: Plpy, *wanted: Wanted) -> int:
    before = plpy.reads
    for one in wanted:
        assert discover(plpy, "public", now(plpy, "public"), one) == []
    return plpy.reads - before


ALL, DOCS = Wanted(), Wanted(names=("docs",))


def test_what_was_found_holds_while_nobody_commits(plpy: Plpy) -> None:
    assert reads(plpy, ALL, DOCS, ALL, DOCS) == 2
    plpy.moment = "10:11: asker"
    assert reads(plpy, ALL, DOCS, ALL) == 2
    plpy.moment = "10:11: other"
    assert reads(plpy, ALL, ALL) == 1


def test_where_the_moment_is_not_known_all_is_read(plpy: Plpy) -> None:
    assert reads(plpy, ALL) == 1
    plpy.moment = None
    assert reads(plpy, ALL, ALL) == 2
    plpy.moment = "10:10: asker"
    assert reads(plpy, ALL, ALL) == 1


def test_what_is_kept_is_bounded(plpy: Plpy) -> None:
    many = [Wanted(names=(f"t{i}",)) for i in range(2 * stores._MOST_FOUND)]
    reads(plpy, *many, Wanted(names=("x" * stores._LONGEST_WANTED,)))
    assert len(now(plpy, "public").found) == stores._MOST_FOUND


def test_callers_get_lists_of_their_own(plpy: Plpy) -> None:
    moment = now(plpy, "public")
    first = discover(plpy, "public", moment, ALL)
    assert discover(plpy, "public", moment, ALL) is not first


def test_a_call_keeps_its_moment_while_another_within_it_looks_anew(plpy: Plpy) -> None:
    outer = now(plpy, "public")
    assert now(plpy, "public") is outer
    plpy.moment = "10:11: asker"
    inner = now(plpy, "public")
    assert inner is not outer
    assert now(plpy, "public") is inner
