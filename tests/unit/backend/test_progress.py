"""backend/progress: what a long call tells the client, and when, by a clock of the test's."""

from __future__ import annotations

from typing import Any

import pytest

from ml_rag.backend.progress import Pace
from ml_rag.progress import State, duration, line


class Session:
    """PostgreSQL as far as it is asked: when the statement began, and the setting."""

    def __init__(self) -> None:
        self.now, self.statement, self.setting = 100.0, 1.0, None
        self.notices: list[str] = []
        self.pace = Pace(lambda: self.now)

    def prepare(self, statement: str) -> str:
        return statement

    def execute(self, plan: str) -> list[dict[str, Any]]:
        return [{"statement": self.statement, "seconds": self.setting}]

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def report(self, seconds: float, *state: Any) -> None:
        self.now += seconds
        self.pace.report(self, State("public.items", "embedding", *state))


def test_the_first_ten_seconds_are_silent_and_then_each_ten() -> None:
    session = Session()
    for i in range(31):
        session.report(1 if i else 0, 2 * i, 100)
    assert session.notices == [
        "public.items: embedding: 20 of 100, 2 a second, about 40 s left",
        "public.items: embedding: 40 of 100, 2 a second, about 30 s left",
        "public.items: embedding: 60 of 100, 2 a second, about 20 s left",
    ]


def test_the_next_statement_begins_anew() -> None:
    session = Session()
    session.report(0, 0, 10)
    session.report(9, 3, 10)
    session.statement = 2.0
    session.report(9, 4, 10)
    session.report(9, 5, 10)
    assert session.notices == []
    session.report(1, 6, 10)
    assert session.notices == ["public.items: embedding: 6 of 10, 0.2 a second, about 20 s left"]


def test_a_statement_that_waits_says_the_same_again_and_the_next_one_does_not() -> None:
    session = Session()
    session.report(0, 3, 10)
    for seconds in (9, 1, 1, 9):
        session.now += seconds
        session.pace.repeat(session)
    assert session.notices == 2 * ["public.items: embedding: 3 of 10"]
    session.now, session.statement = session.now + 10, 2.0
    session.pace.repeat(session)
    assert len(session.notices) == 2


def test_a_phase_has_a_rate_of_its_own() -> None:
    session = Session()
    session.report(0, 0, 10)
    session.report(10, 10, 10)
    session.now += 10
    session.pace.report(session, State("public.items", "building index", 10, 10))
    assert session.notices == [
        "public.items: embedding: 10 of 10, 1 a second",
        "public.items: building index: 10 of 10",
    ]


def test_the_rate_is_that_of_the_last_minute() -> None:
    session = Session()
    session.report(0, 0, 10_000)
    session.report(10, 9_000, 10_000)  # unchanged documents cost nothing
    for i in range(1, 8):
        session.report(10, 9_000 + 10 * i, 10_000)
    assert session.notices[-1] == "public.items: embedding: 9070 of 10000, 1 a second, about 16 min left"


@pytest.mark.parametrize(("setting", "notices"), [("0", 0), ("-1", 0), ("0.5", 2), ("", 0), ("soon", 0), ("nan", 0)])
def test_a_session_sets_the_seconds(setting: str, notices: int) -> None:
    session = Session()
    session.setting = setting
    for i in range(3):
        session.report(1 if i else 0, i, 10)
    assert len(session.notices) == notices


def test_rows_that_are_added_count() -> None:
    session = Session()
    session.report(0, 0, 1000)
    for _ in range(2):
        session.now += 5
        session.pace.advance(session, 300)
    assert session.notices == ["public.items: embedding: 600 of 1000, 60 a second, about 7 s left"]


def test_one_large_document_moves() -> None:
    session = Session()
    session.report(0, 0, 1, 0, 0)
    session.report(10, 0, 1, 0, 500)
    session.report(10, 0, 1, 0, 1000)
    assert session.notices == [
        "public.items: embedding: 0 of 1, 500 segments, 50 a second",
        "public.items: embedding: 0 of 1, 1000 segments, 50 a second",
    ]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (State("", "summarizing", 1, 4), "summarizing: 1 of 4, 0.1 a second, about 30 s left"),
        (State("a.b", "embedding", 5, -1, 2), "a.b: embedding: 5 done, 2 failed, 0.5 a second"),
        (State("a.b", "waiting for a lock"), "a.b: waiting for a lock"),
        (State("a.b", "embedding", 12, 10), "a.b: embedding: 12 of 12, 1.2 a second"),
    ],
)
def test_a_line(state: State, told: str) -> None:
    assert line(state, 10, state._replace(done=0)) == told


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (12600, "3.5 h")]
)
def test_a_duration(seconds: float, told: str) -> None:
    assert duration(seconds) == told
