"""jobs/loop: the jobs of a session."""

from __future__ import annotations

from typing import Any

from ml_rag.backend.jobs import loop


class Job(loop.Derived):
    """One that has nothing to do."""

    def __init__(self, is_outer: bool) -> None:
        super().__init__(loop.Session(None, lambda: None, "public", "", "", None))  # type: ignore[arg-type, return-value]
        self.must_commit = is_outer
        self.is_stopped = False

    def begin(self) -> loop.Steps[None]:
        yield loop.Statement("SELECT")

    def read(self) -> loop.Steps[Any]:
        yield from ()
        return None

    def end(self) -> loop.Steps[dict[str, Any]]:
        yield from ()
        return {}

    def stop(self) -> None:
        self.is_stopped = True


def test_a_job_that_may_commit_ends_those_that_were_left() -> None:
    left, nested, following = Job(is_outer=True), Job(is_outer=False), Job(is_outer=True)
    number = loop.begin(left)
    assert loop.advance(number, None, None) is loop.COMMIT
    assert isinstance(loop.advance(number, True, None), loop.Statement)
    inner = loop.begin(nested)
    loop.advance(inner, None, None)
    assert not left.is_stopped
    last = loop.begin(following)
    loop.advance(last, None, None)
    assert not left.is_stopped
    loop.advance(last, True, None)
    assert (left.is_stopped, nested.is_stopped, following.is_stopped) == (True, True, False)
    loop.stop(last)
    assert following.is_stopped
