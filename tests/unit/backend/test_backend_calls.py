"""backend/calls.py without PostgreSQL: what is told, when, and what becomes of that which cannot be told."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ml_rag.backend import calls
from ml_rag.protocol import DATAGRAM_SUFFIX
from ml_rag.server.calls import Calls
from ml_rag.server.metrics import Metrics
from ml_rag.server.replies import CallStatistics

NOW = 1000.5


class Plpy:
    """As much of plpy as calls touches: one database, one role."""

    class SPIError(Exception):
        sqlstate = "57014"

    def __init__(self, path: Path) -> None:
        self.settings = {"track": "on", "model_server": f"unix:{path}"}
        self.error: str | None = None
        self.now = NOW
        self.may_be_again = True
        self.statements: list[str] = []

    def prepare(self, statement: str) -> str:
        return statement

    def execute(self, statement: str) -> list[dict[str, Any]]:
        self.statements.append(statement)
        if self.error is not None:
            error = self.SPIError("canceling statement")
            error.sqlstate = self.error
            raise error
        if statement == calls._SETTINGS:
            return [{"name": name, "value": value} for name, value in self.settings.items()]
        if statement == calls._NOW:
            return [{"role": 10, "statement": self.now, "name": "asker", "may_be_again": self.may_be_again}]
        if "progress_seconds" in statement:
            return [{"statement": NOW, "seconds": None}]
        return [{"oid": 5, "system_identifier": 7}]


class Listener:
    """The datagram socket of a model server, and what one makes of what comes."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"{path}{DATAGRAM_SUFFIX}")
        self.socket.setblocking(False)
        self.calls = Calls(Metrics())

    def receive(self) -> list[Any]:
        """Each datagram: its counts without the role; routine and stage of the call in flight, None where there is
        none."""
        told: list[Any] = []
        while True:
            try:
                data = self.socket.recv(65536)
            except BlockingIOError:
                return told
            found = self.calls.receive(data)
            assert found is not None, data
            flight = found.in_flight
            counts = [(c.routine, c.stage, c.sqlstate) for c in found.counts]
            told.append((counts, None if flight is None else (flight.routine, flight.stage)))

    def counted(self) -> list[CallStatistics]:
        """The statistics of the one cluster and database that has told."""
        ((cluster, database),) = self.calls._databases
        return self.calls.stats(cluster, database)[1]

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def plpy(path: Path) -> Iterator[Plpy]:
    calls.session.__init__()  # type: ignore[misc]
    calls._plans.clear()
    yield Plpy(path)
    if calls.session.socket is not None:
        calls.session.socket.close()
    calls.session.__init__()  # type: ignore[misc]
    calls._plans.clear()


@pytest.fixture
def listener(path: Path) -> Iterator[Listener]:
    listener = Listener(path)
    yield listener
    listener.close()


def begin(plpy: Plpy, routine: str = "vector_store_load", stage: str = "") -> int:
    call, error = calls.report(plpy, "begin", 0, routine, stage, "[]", 0)
    assert error is None
    assert isinstance(call, int)
    return call


def stage(plpy: Plpy, call: int, name: str, model: str = "") -> None:
    assert calls.report(plpy, "stage", call, name, model, "[]", 0) == (None, None)


def end(plpy: Plpy, call: int, sqlstate: str = "00000", trace: str = "[]", began: float = 0) -> None:
    assert calls.report(plpy, "end", call, sqlstate, "", trace, began) == (None, None)


def end_question(plpy: Plpy, call: int, began: float, *trace: tuple[str, float]) -> None:
    """``trace``: stages, and when each ended, in seconds from ``began`` on."""
    steps = [
        {"stage": stage, "ended": datetime.fromtimestamp(began + after, UTC).isoformat(), "facts": None}
        for stage, after in (("begin", 0.0), *trace)
    ]
    end(plpy, call, "00000", json.dumps(steps), began)


def test_a_routine_that_lasts_tells_of_each_step(plpy: Plpy, listener: Listener) -> None:
    call = begin(plpy)
    stage(plpy, call, "load", "m")
    calls.progress(plpy, call, "a.b", "loading", 1, -1, 0)
    stage(plpy, call, "index")
    end(plpy, call)
    name = "vector_store_load"
    assert listener.receive() == [
        ([], (name, "")),
        ([], (name, "load")),
        ([], (name, "load")),
        ([(name, "load", "00000")], (name, "index")),
        ([(name, "index", "00000"), (name, "total", "00000")], None),
    ]


def test_a_question_is_one_datagram(plpy: Plpy, listener: Listener) -> None:
    began = time.time() - 0.5
    end_question(plpy, -1, began, ("discover", 0.1), ("embed", 0.1), ("search", 0.3))
    stages = ("discover", "search", "total")
    assert listener.receive() == [([("ml_rag", stage, "00000") for stage in stages], None)]
    times = {row["stage"]: row["total_ms"] for row in listener.counted()}
    assert set(times) == {"discover", "search", "total"}
    assert times["discover"] == pytest.approx(100, abs=1)
    assert times["search"] == pytest.approx(200, abs=1)
    assert 500 <= times["total"] < 1500


@pytest.mark.parametrize("trace", ["7", "[7, 8]", '[{"stage": "search"}]', "[" * 5000, '[{"stage": 7, "ended": ""}]'])
def test_a_trace_that_is_none_is_not_told(plpy: Plpy, listener: Listener, trace: str) -> None:
    end(plpy, -1, "00000", trace, time.time())
    assert listener.receive() == [([("ml_rag", "total", "00000")], None)]


@pytest.mark.parametrize("began", [float("nan"), float("inf"), -1.0, 1e300])
def test_times_that_are_none_are_not_told(plpy: Plpy, listener: Listener, began: float) -> None:
    """Any role may call what ends a call."""
    end(plpy, -1, "00000", '[{"stage": "begin"}]', began)
    assert listener.receive() == [([("ml_rag", "total", "00000")], None)]
    assert [row["stage"] for row in listener.counted()] == ["total"]


def test_a_question_that_asks_a_model_says_so_in_the_request(plpy: Plpy, listener: Listener) -> None:
    assert calls.header() == ""
    stage(plpy, -2, "embed", "m")
    with calls.waiting(plpy, "ml_rag.embed", "embed", "m"):
        told = listener.calls.receive(calls.header().encode())
        assert told is not None
        assert told.in_flight is not None
        assert told.in_flight[:1] + told.in_flight[1:2] == (10, "ml_rag_search")
        assert (told.in_flight.stage, told.in_flight.model, told.in_flight.following) == ("embed", "m", "search")
    assert json.loads(calls.header())[5][3] == "search"
    end_question(plpy, -2, time.time() - 2, ("discover", 1), ("embed", 2))
    listener.receive()
    assert {row["stage"]: row["total_ms"] for row in listener.counted()} == {
        "discover": 1000,
        "embed": 1000,
        "total": pytest.approx(2000, rel=0.5),
    }
    assert calls.header() == ""


def test_an_error_counts_for_the_stage_it_came_in_where_that_is_known(plpy: Plpy, listener: Listener) -> None:
    end(plpy, -1, "57014")
    assert listener.receive() == [([("ml_rag", "total", "57014")], None)]
    stage(plpy, -1, "generate", "m")
    end(plpy, -1, "38000")
    assert listener.receive() == [([("ml_rag", "generate", "38000"), ("ml_rag", "total", "38000")], None)]


def test_calls_inside_calls(plpy: Plpy, listener: Listener) -> None:
    outer = begin(plpy, "ml_rag_table")
    stage(plpy, -1, "generate", "m")
    inner = begin(plpy, "ml_generate", "generate")
    assert json.loads(calls.header())[5][1:4:2] == ["ml_rag_table", "generate"]
    end(plpy, inner)
    end_question(plpy, -1, time.time())
    calls.progress(plpy, outer, "a.b", "answering", 1, 2, 0)
    end(plpy, outer)
    told = listener.receive()
    assert [flight for _, flight in told] == [("ml_rag_table", ""), ("ml_rag_table", "generate")] + [
        ("ml_rag_table", "")
    ] * 2 + [None]
    assert [routine for counts, _ in told for routine, stage, _ in counts if stage == "total"] == [
        *("ml_generate", "ml_rag", "ml_rag_table")
    ]


def test_progress_of_a_call_inside_is_not_told(plpy: Plpy, listener: Listener) -> None:
    outer, inner = begin(plpy, "ml_rag_evaluate"), begin(plpy, "ml_rag_table")
    calls.progress(plpy, outer, "a.b", "asking", 1, 2, 0)
    before = len(listener.receive())
    calls.progress(plpy, inner, "c.d", "answering", 1, 2, 0)
    assert before
    assert listener.receive() == []


def test_rows_that_are_done_are_told(plpy: Plpy, listener: Listener) -> None:
    call = begin(plpy)
    calls.progress(plpy, call, "a.b", "indexing", 0, 1000, 0)
    listener.receive()
    for rows in (200, 300):
        calls.advance(plpy, call, rows)
    assert len(listener.receive()) == 2
    (row,) = listener.calls.activity(next(iter(listener.calls._in_flight))[0])
    assert row["done"] == 500


def test_a_stage_by_itself_is_a_call(plpy: Plpy, listener: Listener) -> None:
    with calls.waiting(plpy, "ml_rag.embed", "embed", "m"):
        assert json.loads(calls.header())[5][1] == "ml_rag.embed"
    with pytest.raises(ValueError, match="x"), calls.waiting(plpy, "ml_rag.embed", "embed", "m"):
        raise ValueError("x")
    counts = [told for told, _ in listener.receive()]
    assert counts == [[("ml_rag.embed", stage, state) for stage in ("embed", "total")] for state in ("00000", "other")]


def test_what_an_error_has_left_on_the_stack_is_counted_with_the_next_statement(plpy: Plpy, listener: Listener) -> None:
    begin(plpy, "ml_rank")
    plpy.now = NOW + 1
    end(plpy, begin(plpy, "ml_generate", "generate"))
    counts = [count for told, _ in listener.receive() for count in told]
    assert ("ml_rank", "total", "other") in counts
    assert ("ml_generate", "total", "00000") in counts


# -- where it cannot be told --


def test_what_is_counted_waits_for_a_listener(plpy: Plpy, path: Path) -> None:
    for _ in range(3):
        end(plpy, -1, "08006")
    listener = Listener(path)
    assert listener.receive() == []
    end(plpy, -1)
    assert listener.receive() == [([("ml_rag", "total", state) for state in ("08006",) * 3 + ("00000",)], None)]
    listener.close()
    os.unlink(f"{path}{DATAGRAM_SUFFIX}")
    end(plpy, -1, "08006")
    other = Listener(path)  # one that was started again
    end(plpy, -1)
    assert other.receive() == [([("ml_rag", "total", "08006"), ("ml_rag", "total", "00000")], None)]
    other.close()


def test_a_listener_that_reads_nothing_costs_no_time_and_bounded_memory(plpy: Plpy, listener: Listener) -> None:
    began = time.monotonic()
    for _ in range(20_000):
        end(plpy, -1)
    assert len(calls.session.counts) <= calls.MAX_COUNTS
    assert time.monotonic() - began < 20
    listener.receive()
    end(plpy, -1)
    ((counts, _),) = listener.receive()
    assert len(counts) > 100


def test_what_waits_fits_the_datagram_that_gets_through(plpy: Plpy, listener: Listener) -> None:
    began, trace = time.time(), [("search", i / 1000) for i in range(100)]
    for _ in range(200):
        end_question(plpy, -1, began, *trace)
    listener.receive()
    call = begin(plpy, "ml_generate", "generate")
    for _ in range(calls.MAX_COUNTS):
        stage(plpy, call, "generate")
    end_question(plpy, -1, began, *trace)
    assert sum(len(counts) for counts, _ in listener.receive()) > calls.MAX_COUNTS


def test_stages_without_end_are_bounded(plpy: Plpy, path: Path) -> None:
    call = begin(plpy, "ml_generate", "generate")
    for _ in range(5000):
        stage(plpy, call, "generate")
    assert len(calls.session.counts) <= calls.MAX_COUNTS + 1
    for _ in range(5000):
        calls.begin(plpy, "ml_rank", "")
    assert len(calls.session.calls) <= calls.MAX_DEPTH


def test_an_address_that_is_none_is_not_told(plpy: Plpy) -> None:
    for address in ("http://model-server:80", "http://[::1", "unix:/" + "x" * 200, "http://127.0.0.1:1"):
        plpy.settings["model_server"] = address
        calls.session.check_at = 0
        end(plpy, -1)
        assert calls.begin(plpy, "ml_rank", "") != -1


def test_off_is_noticed_and_so_is_on(plpy: Plpy, listener: Listener) -> None:
    call = begin(plpy)
    for value, told in (("off", 0), ("on", 1)):
        plpy.settings["track"] = value
        calls.session.check_at = 0
        end(plpy, -1)
        assert len(listener.receive()) == told + (value == "off")  # the beginning of the first call
    end(plpy, call)
    assert listener.receive() == []


def test_settings_are_read_once_a_second(plpy: Plpy, listener: Listener) -> None:
    for _ in range(100):
        end(plpy, -1)
    assert plpy.statements.count(calls._SETTINGS) <= 3


# -- roles and errors --


@pytest.mark.parametrize(
    ("role", "may_be_again", "asked"), [("asker", True, 1), ("asker", False, 3), ("other", True, 3)]
)
def test_a_role_that_the_session_was_and_can_be_again_is_not_asked_for_again(
    plpy: Plpy, listener: Listener, role: str, may_be_again: bool, asked: int
) -> None:
    plpy.may_be_again = may_be_again
    for _ in range(3):
        calls.end(plpy, -1, "00000", (), 0, role)
    assert plpy.statements.count(calls._NOW) == asked
    assert len(listener.receive()) == 3
    assert {row["role"] for row in listener.counted()} == {10}


def test_a_statement_that_is_to_end_does_end(plpy: Plpy, listener: Listener) -> None:
    plpy.error = "57014"
    for event, call, name in ("begin", 0, "ml_rank"), ("stage", -1, "embed"), ("end", -1, "00000"):
        calls.session.check_at = 0
        number, error = calls.report(plpy, event, call, name, "", "[]", 0)
        assert number is None
        assert json.loads(error) == {"sqlstate": "57014", "message": "canceling statement"}
    plpy.error = "53200"  # another one costs figures
    calls.session.check_at = 0
    assert calls.begin(plpy, "ml_rank", "") is None
    end(plpy, -1)
    plpy.error = None
    calls.session.check_at = 0
    assert calls.begin(plpy, "ml_rank", "") is not None
