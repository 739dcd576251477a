"""work: a line every ten seconds where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from ml_rag.work import Work


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_lines_every_ten_seconds(clock: Clock) -> None:
    out = io.StringIO()
    with Work(Console(file=out), clock) as work, work.task("files") as task:
        for i in range(26):
            clock.now = float(i)
            task.tell(i, 100, failed=i // 10, segments=3 * i)
    assert out.getvalue().splitlines() == [
        "files: 10 of 100, 1 failed, 30 segments, 3 a second, about 90 s left",
        "files: 20 of 100, 2 failed, 60 segments, 3 a second, about 80 s left",
    ]


def test_a_notice_of_a_long_call_is_a_line_and_nothing_that_a_terminal_obeys(clock: Clock) -> None:
    out = io.StringIO()
    with Work(Console(file=out), clock) as work, work.task("files") as task:
        task.heard(SimpleNamespace(message_primary="public.docs: 0 of 1, 500 segments\x1b[2J"))  # type: ignore[arg-type]
        clock.now = 9
        task.tell(1, 2)
    assert out.getvalue() == "public.docs: 0 of 1, 500 segments\\x1b[2J\n"


def test_a_bar_on_a_terminal(clock: Clock) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Work(console, clock) as work, work.task("files") as task:
        clock.now = 20
        task.tell(50, 100, segments=7)
        work.progress.refresh()
    assert "50%" in out.getvalue()
    assert "7 segments" in out.getvalue()
    assert "files: 50 of 100" not in out.getvalue()
