"""backend/slots.py and track.py: whatever befalls the file costs figures and no call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml_rag.backend import locks, records, session, slots, track, watch
from support.backend_track import DATABASE, Plpy, begin, count, data_directory, fresh, in_process, totals

__all__ = ["data_directory"]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def look_at_everything() -> None:
    watch.stats(Plpy())
    watch.activity(Plpy())


def spoil_nothing(path: Path) -> None:
    pass


def spoil_by_removing(path: Path) -> None:
    path.unlink()


def spoil_by_truncating(path: Path) -> None:
    os.truncate(path, 0)


def spoil_the_first_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 100)


def spoil_half_of_it(path: Path) -> None:
    os.truncate(path, records.PAGE + 100)


def spoil_everything(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))


def spoil_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def spoil_by_a_link(path: Path) -> None:
    path.unlink()
    (path.parent.parent / "precious").write_text("precious")
    path.symlink_to("../precious")


def spoil_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def spoil_by_emptying_the_folder(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()


def spoil_by_growing(path: Path) -> None:
    os.truncate(path, 2**40)


SPOILS = [value for name, value in list(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("when", ["before", "during", "between"])
def test_a_spoilt_file_costs_figures_and_no_call(
    data_directory: Path, spoil: Callable[[Path], None], when: str
) -> None:
    path = data_directory / slots.path_of(DATABASE)
    plpy = Plpy()
    if when == "before":
        in_process(lambda: count(Plpy(), 3))
        spoil(path)
    for i in range(20):
        session.state.check_at = session.state.retry_at = 0.0
        call = begin(plpy, "ml_rag", "embed")
        if i == 5 and when == "during":
            spoil(path)
        if call is not None:
            track.stage(call, "search", "m")
            track.progress(call, "a.b", "p", 1, 2, 0)
            track.advance(call)
            track.tokens(1, 1)
            track.end(call, track.SUCCESS)
        look_at_everything()
        if i == 5 and when == "between":
            spoil(path)
    look_at_everything()
    if path.is_file() and not path.is_symlink():
        # it is in use again, and adds up
        before = totals().get("ml_rag", (0, 0))[0]
        count(plpy, 10)
        assert totals()["ml_rag"] == (before + 10, 0)
    if (precious := data_directory / "precious").exists():
        assert precious.read_text() == "precious"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ENOLCK, errno.EMFILE])
@pytest.mark.parametrize("function", ["pwrite", "pread", "open", "fstat", "fcntl"])
def test_a_system_call_that_fails_costs_figures_and_no_call(
    monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    plpy = Plpy()
    count(plpy, 3)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    for opened in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(locks.fcntl if function == "fcntl" else slots.os, function, fail)
            if not opened:
                fresh()
            for _ in range(5):
                session.state.check_at = session.state.retry_at = 0.0
                call = begin(plpy, "ml_rag", "embed")
                if call is not None:
                    track.stage(call, "search", "m")
                    track.progress(call, "a.b", "p", 1, 2, 0)
                    track.end(call, "57014")
                look_at_everything()
        session.state.check_at = session.state.retry_at = 0.0
        count(plpy, 3)  # and when the trouble is over it goes on
        assert totals()["ml_rag"][0] >= 3


def test_after_a_failure_the_file_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def fail(*arguments: Any) -> Any:
        opened.append(arguments)
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(slots.os, "open", fail)
    for _ in range(100):
        assert begin(Plpy()) is None
    assert len(opened) == 1
