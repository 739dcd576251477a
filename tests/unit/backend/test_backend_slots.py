"""backend/slots.py and track.py: processes that count in one file, and everything that can go wrong with it."""

from __future__ import annotations

import errno
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ml_rag.backend import locks, records, session, slots, track, watch
from ml_rag.backend.slots import FOLDER, SlotFile

DATABASE = 5
TIMEOUT = 20
#: a backend is a fork too, of the postmaster
fork = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


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


# -- many processes ---------------------------------------------------------------------------------------------------


def test_what_processes_count_adds_up() -> None:
    barrier = fork.Barrier(6)

    def work() -> None:
        fresh()
        count(Plpy(), 1)
        barrier.wait(TIMEOUT)
        count(Plpy(), 299)

    processes = [fork.Process(target=work) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
        assert process.exitcode == 0
    assert totals() == {"ml_rag": (1800, 0)}
    # all were there at once, so each had a slot of its own; the next ones take those
    file = SlotFile(slots.path_of(DATABASE), create=False)
    assert file.count() == 6
    for _ in range(3):
        in_process(lambda: count(Plpy(), 100))
    assert file.count() == 6
    file.close()
    assert totals() == {"ml_rag": (2100, 0)}


def test_a_reader_never_sees_half_of_a_page() -> None:
    """Each call takes 1 ms by a clock that stands still otherwise: whatever is read, the sum fits the number."""
    stop = fork.Event()

    def write() -> None:
        fresh()
        plpy = Plpy()
        call = begin(plpy)
        assert call is not None
        slot = session.own_slot()
        assert slot is not None
        record = slot.record(10, 0)
        while not stop.is_set():
            for stage in range(len(records.STAGES)):
                record.add(stage, 1000)
            slot.write(10, 0)
            slot.show()

    writer = fork.Process(target=write)
    writer.start()
    try:
        path = slots.path_of(DATABASE)
        deadline = time.monotonic() + TIMEOUT
        while not os.path.exists(path) or not watch._records(path)[1]:
            assert time.monotonic() < deadline
        seen = []
        for _ in range(500):
            _, found = watch._records(path)
            assert writer.is_alive()
            for record in found.values():
                sums = {record.stage(stage)[0] for stage in range(len(records.STAGES))}
                numbers = {sum(record.stage(stage)[3]) for stage in range(len(records.STAGES))}
                assert len(sums) == len(numbers) == 1
                assert sums == {1000 * n for n in numbers}
                seen += numbers
        assert sorted(seen) == seen
        assert len(set(seen)) > 10
    finally:
        stop.set()
        writer.join(TIMEOUT)


def test_a_process_that_is_killed_in_a_call_gives_up_its_slot_and_the_call_is_an_error() -> None:
    ready = fork.Event()

    def work() -> None:
        fresh()
        count(Plpy(), 5)
        begin(Plpy(), "ml_generate", "generate")
        ready.set()
        time.sleep(TIMEOUT)

    process = fork.Process(target=work)
    process.start()
    assert ready.wait(TIMEOUT)
    path = slots.path_of(DATABASE)
    assert [call.pid for call in watch._in_flight(path)] == [process.pid]
    assert totals() == {"ml_rag": (5, 0)}
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(TIMEOUT)
    assert list(watch._in_flight(path)) == []
    expected = {"ml_rag": (5, 0), "ml_generate": (1, 1)}
    assert totals() == expected
    in_process(lambda: count(Plpy(), 1))  # it takes over the slot, and what was counted there
    assert totals() == {**expected, "ml_rag": (6, 0)}
    (row,) = [row for row in watch.stats(Plpy()) if row[1:3] == ("ml_generate", "total")]
    assert row[5] == '{"terminated": 1}'


def test_looking_at_a_slot_does_not_take_it_away() -> None:
    call = begin(Plpy())
    assert call is not None
    path = slots.path_of(DATABASE)
    for _ in range(3):
        assert [c.pid for c in watch._in_flight(path)] == [os.getpid()]
        assert totals() == {}

    def look() -> None:
        assert [c.pid for c in watch._in_flight(path)] == [os.getppid()]
        count(Plpy(), 1)

    in_process(look)
    file = SlotFile(path, create=False)
    assert file.count() == 2


def test_a_process_without_a_slot_of_its_own_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_SLOTS", 1)
    count(Plpy())
    in_process(lambda: _assert(begin(Plpy()) is None))
    assert totals() == {"ml_rag": (1, 0)}


@pytest.mark.parametrize("kernel", ["open file", "POSIX", "POSIX, unknown to Python"])
def test_a_slot_belongs_to_one_process(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    if kernel == "POSIX, unknown to Python":
        monkeypatch.setattr(locks, "_OPEN_FILE", None)
    elif kernel == "POSIX":
        monkeypatch.setattr(locks, "_OPEN_FILE", -1)  # EINVAL, as of a kernel that is too old
    count(Plpy())
    path = slots.path_of(DATABASE)

    def other() -> None:
        file = SlotFile(path, create=True)
        assert file.is_owned(0)
        assert not file.is_owned(1)
        assert file.claim() == 1

    in_process(other)
    session.close()
    in_process(lambda: _assert(SlotFile(path, create=True).claim() == 0))


def test_a_slot_stays_its_owners_where_the_file_is_opened_once_more_and_closed() -> None:
    """As by pg_read_binary_file."""
    count(Plpy())
    path = slots.path_of(DATABASE)
    with open(path, "rb") as file:
        file.read()
    in_process(lambda: _assert(SlotFile(path, create=True).claim() == 1))
    call = begin(Plpy())
    in_process(lambda: _assert([found.pid for found in watch._in_flight(path)] == [os.getppid()]))
    assert call is not None


def _assert(condition: bool) -> None:
    assert condition


# -- a full slot ------------------------------------------------------------------------------------------------------


def test_of_too_many_roles_those_used_longest_ago_are_counted_as_none_in_particular() -> None:
    n = 3 * slots.RECORDS
    for role in range(1, n + 1):
        count(Plpy(role), role % 3 + 1, "ml_rag" if role % 2 else "ml_generate")
    assert session.own_slot() is not None
    calls = sum(role % 3 + 1 for role in range(1, n + 1))
    _, found = watch._records(slots.path_of(DATABASE))
    assert sum(sum(record.stage(0)[3]) for record in found.values()) == calls
    assert len(found) == slots.RECORDS
    assert {(n, "ml_rag" if n % 2 else "ml_generate")} <= {(r, records.ROUTINES[i]) for r, i in found}
    assert {(0, 0), (0, records.routine_number("ml_generate"))} <= set(found)


# -- a file that is not as it should be -------------------------------------------------------------------------------


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


def test_a_statement_that_is_to_end_does_end() -> None:
    plpy = Plpy()
    plpy.error = "57014"
    assert begin(plpy) == -1
    assert track.ending() == ("57014", "canceling statement")
    plpy.error = "53200"
    assert begin(plpy) is None
    plpy.error = None
    session.state.check_at = session.state.retry_at = 0.0
    assert begin(plpy) is not None


def test_files_of_databases_that_are_gone_are_removed(data_directory: Path) -> None:
    folder = data_directory / FOLDER
    gone, known, own = ("ml_rag.77.1", "ml_rag.77.9"), ("ml_rag.79.1", "ml_rag.79.9"), ("ml_rag.5.9",)
    others = ("pgss.77.1", "ml_rag.77", "ml_rag.77.1.old", "ml_rag.x.1", f"ml_rag.{2**32}.1")
    for name in (*gone, *known, *own, *others):
        (folder / name).write_bytes(b"")
    plpy = Plpy()
    plpy.databases += [79]
    count(plpy)
    assert {path.name for path in folder.iterdir()} == {*known, *own, *others, "ml_rag.5.1"}
    # not the first session of this database alone: any that is new
    (folder / gone[0]).write_bytes(b"")
    count(plpy)
    in_process(lambda: count(plpy))
    assert not (folder / gone[0]).exists()
    assert totals() == {"ml_rag": (3, 0)}


def test_the_file_is_nobody_elses_to_read(data_directory: Path) -> None:
    before = os.umask(0)
    try:
        count(Plpy())
    finally:
        os.umask(before)
    assert (data_directory / slots.path_of(DATABASE)).stat().st_mode & 0o777 == 0o600


def test_a_reset_reaches_the_processes_that_count() -> None:
    count(Plpy(), 3)
    since = watch.reset(Plpy())
    assert totals() == {}
    count(Plpy(), 2)
    assert totals() == {"ml_rag": (2, 0)}

    in_process(lambda: watch.reset(Plpy()))
    assert totals() == {}
    count(Plpy(), 4)
    assert totals() == {"ml_rag": (4, 0)}
    (row, *_) = watch.stats(Plpy())
    assert row[-1] > since


def test_calls_inside_calls_have_a_bound() -> None:
    plpy = Plpy()
    calls = [begin(plpy) for _ in range(track.MAX_DEPTH + 10)]
    assert calls[-1] is None
    assert calls[0] is not None
    track.end(calls[0], track.SUCCESS)
    assert totals() == {"ml_rag": (track.MAX_DEPTH, 0)}


def test_a_session_of_more_calls_than_an_integer_counts_goes_on() -> None:
    plpy = Plpy()
    count(plpy)
    session.state.last_call = track.MAX_CALL - 1
    assert begin(plpy) == track.MAX_CALL
    assert begin(plpy) == 1


def test_progress_of_a_call_inside_one_that_tells_of_its_own_is_not_shown() -> None:
    plpy = Plpy()
    outer, inner = begin(plpy, "vector_store_load"), begin(plpy, "ml_rag.enable_keyword_search")
    assert outer is not None
    assert inner is not None
    track.progress(outer, "public.docs", "loading documents", 3, 10, 1)
    track.progress(inner, "public.docs", "folding", 0, -1, 0)
    (call,) = watch._in_flight(slots.path_of(DATABASE))
    assert records.ROUTINES[call.command - 1] == "vector_store_load"
    assert call.texts[1:] == ("public.docs", "loading documents")
    assert (call.done, call.total, call.failed) == (3, 10, 1)
    track.end(inner, track.SUCCESS)
    track.advance(outer)
    track.progress(outer, "public.docs", "indexing", 10, 10, 1)
    (call,) = watch._in_flight(slots.path_of(DATABASE))
    assert call.texts[2] == "indexing"
    track.end(outer, track.SUCCESS)
    assert list(watch._in_flight(slots.path_of(DATABASE))) == []


def test_what_is_loaded_ahead_of_a_call_is_little() -> None:
    """A call that needs no model must not wait for what talks to models."""
    names = {f"ml_rag.backend.{name}" for name in ("track", "session", "slots", "locks", "records")}
    source = "".join(Path(importlib.import_module(name).__file__ or "").read_text() for name in names)
    for module in ("http", "socket", "json", "ssl", "bridge", "client"):
        assert f"import {module}" not in source
