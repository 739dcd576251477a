"""server/calls.py and inbox.py: what is made of datagrams, who may send them, what bounds them."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from ml_rag.protocol import ROUTINES, datagram_address
from ml_rag.server import calls as server_calls
from ml_rag.server.calls import Calls, Figures, error_class
from ml_rag.server.inbox import beside
from ml_rag.server.metrics import Metrics
from support.model_server_process import client, metric
from support.processes import wait_until
from support.servers import RunningServer, running_server

CLUSTER = "6f-1-2-3"


@pytest.fixture
def calls() -> Calls:
    return Calls(Metrics())


def count(routine: str = "ml_rag", stage: str = "total", ms: float = 1.0, **other: Any) -> list[Any]:
    given = {"role": 10, "sqlstate": "00000", "prompt": 0, "generated": 0, **other}
    return [given["role"], routine, stage, int(ms * 1000), given["sqlstate"], given["prompt"], given["generated"]]


def in_flight(stage: str = "embed", **other: Any) -> list[Any]:
    now = time.time()
    given = {"role": 10, "routine": "ml_rag", "model": "m", "following": "", "progress": None, **other}
    return [
        *(given["role"], given["routine"], now, stage, now, given["model"], given["following"], now),
        given["progress"],
    ]


def datagram(*counts: Any, call: Any = None, **other: Any) -> bytes:
    given = {"cluster": CLUSTER, "database": 5, "pid": 100, "session": 1, **other}
    return json.dumps([given["cluster"], given["database"], given["pid"], given["session"], counts, call]).encode()


def figures(calls: Calls, database: int = 5) -> dict[tuple[int, str, str], tuple[int, int]]:
    """(role, routine, stage) -> calls, errors."""
    _, rows = calls.stats(CLUSTER, database)
    return {(row["role"], row["routine"], row["stage"]): (row["calls"], row["errors"]) for row in rows}


def test_counts_add_up_by_role_routine_and_stage(calls: Calls) -> None:
    calls.receive(datagram(count(ms=3), count(stage="search", ms=2)))
    calls.receive(datagram(count(ms=5), count(role=11), count("ml_generate", prompt=7, generated=2)))
    assert figures(calls) == {
        (10, "ml_rag", "total"): (2, 0),
        (10, "ml_rag", "search"): (1, 0),
        (11, "ml_rag", "total"): (1, 0),
        (10, "ml_generate", "total"): (1, 0),
    }
    _, rows = calls.stats(CLUSTER, 5)
    assert (rows[0]["total_ms"], rows[0]["mean_ms"], rows[0]["max_ms"]) == (8, 4, 5)
    assert (rows[-1]["prompt_tokens"], rows[-1]["generated_tokens"]) == (7, 2)
    assert calls.stats(CLUSTER, 6)[1] == calls.stats("6f-1-2-4", 5)[1] == []


def test_errors_are_counted_by_sqlstate_and_have_no_times(calls: Calls) -> None:
    for sqlstate in ("22023", "22P02", "57014", "XX000", "ZZZZZ"):
        calls.receive(datagram(count(sqlstate=sqlstate, ms=9), count(stage="search", sqlstate=sqlstate)))
    _, rows = calls.stats(CLUSTER, 5)
    total, search = rows
    assert total["errors_by_sqlstate"] == {"22023": 1, "22xxx": 1, "57014": 1, "XXxxx": 1, "other": 1}
    assert search["errors_by_sqlstate"] is None
    assert (total["calls"], total["errors"], total["total_ms"], total["p95_ms"]) == (5, 5, 0, None)


@pytest.mark.parametrize(
    ("sqlstate", "counted"),
    [("42501", "42501"), ("42P07", "42xxx"), ("40001", "40xxx"), ("08006", "08006"), ("08001", "other"), ("", "other")],
)
def test_what_an_error_is_counted_as(sqlstate: str, counted: str) -> None:
    assert error_class(sqlstate) == counted


def test_percentiles_are_right_to_a_class_of_durations() -> None:
    draw = random.Random(1)
    for _ in range(50):
        durations = sorted(int(draw.lognormvariate(draw.uniform(3, 16), draw.uniform(0.1, 2))) for _ in range(500))
        found = Figures()
        for duration in durations:
            found.add(duration)
        for share in (0.5, 0.95, 0.99):
            exact, told = durations[int(share * 500) - 1] / 1000, found.percentile(share)
            assert told is not None
            assert told <= exact * 2**0.5 + 0.142
            assert told >= exact / 2**0.5 - 0.142
            assert told <= durations[-1] / 1000
    assert Figures().percentile(0.5) is None


# -- in flight --


def test_what_is_told_last_is_shown(calls: Calls) -> None:
    calls.receive(datagram(call=in_flight("embed")))
    calls.receive(datagram(call=in_flight("generate", progress=["ml_rag_table", "a.b", "answering", 3, -1, 1, 5.0])))
    calls.receive(datagram(pid=101, cluster="6f-1-2-4", call=in_flight()))
    (row,) = calls.activity(CLUSTER)
    assert (row["pid"], row["stage"], row["model"]) == (100, "generate", "m")
    assert (row["command"], row["done"], row["total"], row["failed"]) == ("ml_rag_table", 3, -1, 1)
    calls.receive(datagram(count()))
    assert calls.activity(CLUSTER) == []


def test_a_request_that_is_answered_leads_to_the_stage_that_follows(calls: Calls) -> None:
    told = calls.receive(datagram(call=in_flight("embed", following="search")))
    assert told is not None
    calls.answered(told)
    (row,) = calls.activity(CLUSTER)
    assert (row["stage"], row["model"]) == ("search", "")
    calls.answered(told)
    calls.receive(datagram(call=in_flight("generate")))
    calls.answered(told)  # the session has got on meanwhile
    assert calls.activity(CLUSTER)[0]["stage"] == "generate"


def test_a_process_that_is_gone_has_terminated_its_call(calls: Calls) -> None:
    calls.receive(datagram(call=in_flight("embed")))
    calls.end(CLUSTER, 100, 2)  # another process of that number
    calls.end(CLUSTER, 101, 1)
    assert len(calls.activity(CLUSTER)) == 1
    for _ in range(2):
        calls.end(CLUSTER, 100, 1)
    assert figures(calls) == {(10, "ml_rag", "total"): (1, 1), (10, "ml_rag", "embed"): (1, 1)}
    assert calls.stats(CLUSTER, 5)[1][0]["errors_by_sqlstate"] == {"terminated": 1}
    # or its number is another's
    calls.receive(datagram(call=in_flight("")))
    calls.receive(datagram(session=2))
    assert figures(calls)[10, "ml_rag", "total"] == (2, 2)


def test_a_reset_counts_anew_for_one_database(calls: Calls) -> None:
    began, _ = calls.stats(CLUSTER, 5)
    for database in (5, 6):
        calls.receive(datagram(count(), database=database))
    calls.reset(CLUSTER, 5)
    first, _ = calls.stats(CLUSTER, 5)
    calls.reset(CLUSTER, 5)
    second, _ = calls.stats(CLUSTER, 5)
    assert began < first < second
    assert figures(calls) == {}
    assert figures(calls, 6) == {(10, "ml_rag", "total"): (1, 0)}
    assert calls.stats(CLUSTER, 6)[0] == began


# -- bounds --

GOOD = [CLUSTER, 5, 100, 1, [count()], in_flight(progress=["ml_rag", "a.b", "p", 1, 2, 3, 4.0])]


def places(value: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Where the values of a nested list are."""
    here = [path] if path else []
    if isinstance(value, list):
        for i, item in enumerate(value):
            here += places(item, (*path, i))
    return here


BAD_VALUES = [None, -7, 2**80, 1e300, "\0", "\ud800", "x" * 201, [], {}, True, "DROP TABLE"]


@pytest.mark.parametrize("place", places(GOOD), ids=str)
def test_a_datagram_with_a_bad_value_is_nothing_or_shown_safely(calls: Calls, place: tuple[int, ...]) -> None:
    for bad in BAD_VALUES:
        changed = json.loads(json.dumps(GOOD))
        part = changed
        for i in place[:-1]:
            part = part[i]
        part[place[-1]] = bad
        calls.receive(json.dumps(changed).encode())
    for (_, routine, _), (n, errors) in figures(calls).items():
        assert routine in ROUTINES
        assert 0 <= errors <= n
    text = json.dumps([calls.activity(CLUSTER), calls.stats(CLUSTER, 5)], allow_nan=False)
    assert "\\u0000" not in text
    assert "\\ud800" not in text
    assert "x" * 201 not in text


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 5000, b"1" * 5000, b'["a"]'])
def test_what_is_no_datagram_is_nothing(calls: Calls, data: bytes) -> None:
    assert calls.receive(data) is None


def test_what_is_kept_is_bounded(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_calls, "MAX_CALLS", 20)
    monkeypatch.setattr(server_calls, "MAX_DATABASES", 10)
    monkeypatch.setattr(server_calls, "MAX_PAIRS", 30)
    for i in range(1, 100):
        calls.receive(datagram(*(count(role=i, routine=name) for name in ROUTINES), database=i % 30, pid=i))
        calls.receive(datagram(pid=i, call=in_flight()))
    assert len(calls.activity(CLUSTER)) == 20
    assert len(calls._databases) == 10
    pairs = [pair for database in calls._databases.values() for pair in database.pairs]
    assert calls._pairs == len(pairs)
    assert sum(role != server_calls.NO_ROLE for role, _ in pairs) <= 30
    # further roles count, for nobody
    calls.receive(datagram(count(role=1000), database=1000))
    assert figures(calls, 1000) == {(server_calls.NO_ROLE, "ml_rag", "total"): (1, 0)}
    calls.reset(CLUSTER, 1000)
    assert calls._pairs == len([pair for database in calls._databases.values() for pair in database.pairs])


def test_names_that_are_none_make_no_figures(calls: Calls) -> None:
    for i in range(100):
        calls.receive(datagram(count(f"r{i}"), count(stage=f"s{i}"), call=in_flight(f"s{i}", routine=f"r{i}")))
    assert figures(calls) == {}
    assert calls.activity(CLUSTER) == []


# -- the sockets --


def send(path: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(data, str(beside(path)))


def read(http: httpx.Client, **fields: Any) -> Any:
    reply = http.post("/v1/calls", json={"cluster": CLUSTER, "database": 5, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def totals(answer: Any) -> Counter[str]:
    return Counter({row["routine"]: row["calls"] for row in answer["stats"] if row["stage"] == "total"})


def test_datagrams_are_counted_before_whoever_asks_next_is_answered(server: RunningServer) -> None:
    lines = (
        'ml_rag_calls_total{routine="ml_rag",sqlstate="00000"}',
        'ml_rag_calls_total{routine="ml_rag",sqlstate="terminated"}',
        'ml_rag_call_seconds_count{routine="ml_rag",stage="search"}',
    )
    before = [metric(server.socket, line) for line in lines]
    with client(server.socket) as http:
        for i in range(1, 50):
            send(server.socket, datagram(count(ms=0.2), count(stage="search", ms=0.1), call=in_flight()))
            answer = read(http)
            assert totals(answer) == {"ml_rag": i}
        assert [row["pid"] for row in answer["activity"]] == [100]
        answer = read(http, gone=[[100, 1]])
        assert answer["activity"] == []
        assert totals(answer) == {"ml_rag": 50}
        assert read(http, reset=True)["stats"] == []
    assert [metric(server.socket, line) - n for line, n in zip(lines, before, strict=True)] == [49, 1, 49]


def test_a_request_tells_of_its_call_by_a_header(server: RunningServer) -> None:
    with client(server.socket) as http:
        header = {"X-ML-RAG-Call": datagram(call=in_flight("embed", following="search")).decode()}
        body = {"model": "fake-embed", "input": "a b"}
        assert http.post("/v1/embeddings", json=body, headers=header).status_code == 200
        (row,) = read(http)["activity"]
        assert (row["stage"], row["model"]) == ("search", "")
        for bad in ("nonsense", "[1, 2", "x" * 5000):
            assert http.post("/v1/embeddings", json=body, headers={"X-ML-RAG-Call": bad}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_is_counted_for_the_call_that_another_program_asks_it_for(
    server: RunningServer, stream: bool
) -> None:
    body = {"model": "fake-generate", "messages": [{"role": "user", "content": "q"}], "stream": stream}
    with client(server.socket) as http:
        read(http, reset=True)
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        for routine in ("ml_rag", "nonsense"):
            counted_as = [CLUSTER, 5, 10, routine]
            assert http.post("/v1/chat/completions", json=body | {"counted_as": counted_as}).status_code == 200
        (row,) = read(http)["stats"]
        assert http.post("/v1/chat/completions", json=body | {"counted_as": ["x"]}).status_code == 400
    assert (row["role"], row["routine"], row["stage"], row["calls"], row["errors"]) == (10, "ml_rag", "generate", 1, 0)
    assert row["prompt_tokens"] > 0
    assert row["generated_tokens"] > 0
    assert row["total_ms"] > 0


def test_a_body_that_is_none_is_refused(server: RunningServer) -> None:
    with client(server.socket) as http:
        whole = {"cluster": CLUSTER, "database": 5}
        for body in ({}, whole | {"cluster": "x"}, whole | {"database": -1}, whole | {"reset": 0}, [1]):
            assert http.post("/v1/calls", json=body).status_code == 400


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("allowed", [True, False])
def test_the_senders_uid_is_checked(tmp_path: Path, allowed: bool) -> None:
    stranger = 54321
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055 if folder == tmp_path else folder.stat().st_mode | 0o001)
    users = f"[{stranger}]" if allowed else "[]"
    config = f'[server]\nsocket_mode = "0666"\nallowed_users = {users}\n'
    code = (
        "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), sys.argv[1])"
    )
    with running_server(socket=tmp_path / "s.sock", config=config) as running:
        command = ["/usr/bin/env", "python3", "-c", code, str(beside(running.socket)), datagram(count()).decode()]
        subprocess.run(command, user=stranger, group=stranger, extra_groups=[], cwd="/", check=True)
        with client(running.socket) as http:
            assert totals(read(http)) == ({"ml_rag": 1} if allowed else {})
        assert metric(running.socket, "ml_rag_refused_peers_total") == (0 if allowed else 1)


def test_the_socket_for_datagrams_is_as_private_as_the_other(tmp_path: Path) -> None:
    for config, mode in ((None, 0o600), ('[server]\nsocket_mode = "0660"\n', 0o660)):
        with running_server(socket=tmp_path / "s.sock", config=config) as running:
            assert stat.S_IMODE(beside(running.socket).stat().st_mode) == mode
        assert list(tmp_path.iterdir()) == []


def test_sockets_that_are_removed_or_left_over_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with running_server(socket=path) as running:
        running.kill()
    assert beside(path).exists()
    with running_server(socket=path) as running, client(path) as http:
        for gone in (beside(path), path):
            gone.unlink()
            wait_until(lambda: beside(path).exists() and path.exists(), 20)
            wait_until(lambda: tell_and_count(path) == {"ml_rag": 1})
            assert running.log().count("it was made again") >= 1
            read(http, reset=True)


def tell_and_count(path: Path) -> Counter[str]:
    with client(path) as http:
        read(http, reset=True)
        send(path, datagram(count()))
        return totals(read(http))


def test_something_else_in_its_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    beside(path).write_text("precious")
    with pytest.raises(RuntimeError, match="cannot listen on"), running_server(socket=path):
        pass
    assert beside(path).read_text() == "precious"


def test_over_tcp_they_come_by_udp(server: RunningServer) -> None:
    assert server.url is not None
    with client(server.socket) as http:
        read(http, reset=True)
        family, address = datagram_address(server.url)
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.sendto(datagram(count()), address)
        wait_until(lambda: totals(read(http)) == {"ml_rag": 1})


def test_a_flood_of_datagrams_does_not_keep_others_waiting(server: RunningServer) -> None:
    with client(server.socket) as http:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.connect(str(beside(server.socket)))
            end = time.monotonic() + 1.0
            sent = answered = 0
            while time.monotonic() < end:
                for _ in range(200):
                    try:
                        sender.send(b"[" * 1000)
                        sent += 1
                    except BlockingIOError:
                        break
                answered += http.get("/healthz").status_code == 200
        assert sent > 100
        assert answered > 5
