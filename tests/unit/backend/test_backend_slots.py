"""backend/slots.py: processes that count in one file, each in a slot of its own."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ml_rag.backend import locks, records, session, slots, watch
from ml_rag.backend.slots import SlotFile
from support.backend_track import DATABASE, TIMEOUT, Plpy, begin, count, data_directory, fork, fresh, in_process, totals

__all__ = ["data_directory"]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


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
