"""backend/client.py without PostgreSQL: waits that can be interrupted, kept connections."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml_rag.backend import calls, sockets
from ml_rag.backend.client import MAX_REPLY_VALUES
from ml_rag.errors import EngineFailed, QueueFull, ServerUnreachable, retry_after
from support.backend_client import Interrupted, after, close_connections, connect, never, start
from support.hostile_server import HostileServer, head, reply, send, silent

__all__ = ["close_connections", "start"]


def test_nothing_but_the_standard_library_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules); import ml_rag.backend.bridge;"
        "print(sorted({m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    )
    assert output.stdout.strip() == "['ml_rag']"


def test_a_question_imports_nothing_slow() -> None:
    # records are NamedTuples: a dataclass compiles its methods as it is defined, and brings inspect with it
    code = (
        "import sys, ml_rag.backend.bridge, ml_rag.backend.retrieval.run;"
        "print(sorted({'dataclasses', 'inspect', 'numpy', 'http', 'asyncio'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    )
    assert output.stdout.strip() == "[]"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "plpy")}


def test_the_connection_is_kept(start: Callable[..., HostileServer]) -> None:
    server = start(reply({"n": 1}))
    client = connect(server.address, never)
    assert [client.call("GET", "/healthz") for _ in range(3)] == [{"n": 1}] * 3
    assert server.connections == 1
    assert server.requests[0].startswith(b"GET /healthz HTTP/1.1\r\n")


def test_a_stream_that_is_being_read_leaves_room_for_another_request(start: Callable[..., HostileServer]) -> None:
    lines_of_two = b"1\n" + b" " * 200_000 + b"2\n"  # more than is received at once

    def answer(sock: socket.socket, request: bytes) -> None:
        reply({"n": 1} if request.startswith(b"GET") else lines_of_two)(sock, request)

    server = start(answer)
    client = connect(server.address, never)
    for _ in range(3):
        lines = client.stream("/", b"", "")
        assert next(lines) == 1
        assert client.call("GET", "/healthz") == {"n": 1}
        inner = client.stream("/", b"", "")
        assert [next(inner), list(lines), list(inner)] == [1, [2], [2]]
        assert [list(client.stream("/", b"", "")), client.call("GET", "/healthz")] == [[1, 2], {"n": 1}]
    assert server.connections <= 7  # one is kept
    client.close()


def test_a_stream_that_is_closed_early_closes_its_connection(start: Callable[..., HostileServer]) -> None:
    server = start(reply(b"1\n2\n"))
    lines = connect(server.address, never).stream("/", b"", "")
    assert next(lines) == 1
    lines.close()
    assert server.gone.wait(10)


def test_a_name_that_is_no_text_is_sent_as_it_is(start: Callable[..., HostileServer]) -> None:
    server = start(reply({}))
    for name in ("\u00fc\N{GRINNING FACE}\x01", "\u00fc\udc80"):
        connect(server.address, never).call("POST", "/x", {"name": name})
        assert json.loads(server.requests[-1].partition(b"\r\n\r\n")[2]) == {"name": name}


def test_names_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, Any]] = []
    look_up = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, **kwargs: Any) -> Any:
        asked.append((host, kwargs.get("flags", 0) & socket.AI_NUMERICHOST))
        return look_up(host, port, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(ServerUnreachable):
        connect("http://some.host.example:1", never).call("GET", "/")
    assert asked == [("some.host.example", socket.AI_NUMERICHOST)]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_tcp_addresses(host: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = listener.accept()
        client.recv(65536)
        reply({"ok": True})(client, b"")
        client.close()

    threading.Thread(target=serve, daemon=True).start()
    assert connect(f"http://{host}:{listener.getsockname()[1]}/", never).call("GET", "/") == {"ok": True}
    listener.close()


def test_an_interrupt_ends_the_wait_for_an_answer(start: Callable[..., HostileServer]) -> None:
    server = start(silent)
    client = connect(server.address, after(0.2))
    began = time.monotonic()
    with pytest.raises(Interrupted):
        client.call("POST", "/v1/embeddings", {})
    assert time.monotonic() - began < 0.5
    assert server.gone.wait(1)


@pytest.mark.parametrize("has_poll", [True, False], ids=["poll(2)", "without ctypes"])
def test_a_signal_ends_the_wait_for_an_answer(
    start: Callable[..., HostileServer], monkeypatch: pytest.MonkeyPatch, has_poll: bool
) -> None:
    """PostgreSQL cancels by one: its handler only notes it, as this one does."""
    noted = threading.Event()
    if has_poll:
        monkeypatch.setattr("ml_rag.backend.sockets.POLL_SECONDS", 300.0)
    else:
        monkeypatch.setattr("ml_rag.backend.sockets._poll", None)

    def interrupt() -> None:
        if noted.is_set():
            raise Interrupted

    def cancel(client: socket.socket, request: bytes) -> None:
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        silent(client, request)

    former = signal.signal(signal.SIGUSR1, lambda *_: noted.set())
    try:
        with pytest.raises(Interrupted):
            connect(start(cancel).address, interrupt).call("POST", "/v1/embeddings", {})
    finally:
        signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize("first", [b"", head(10**12)], ids=["100 Continue", "body"])
def test_an_interrupt_ends_a_flood(start: Callable[..., HostileServer], first: bytes) -> None:
    def flood(client: socket.socket, request: bytes) -> None:
        client.sendall(first)
        while True:
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)

    server = start(flood)
    client = connect(server.address, after(0.2))
    began = time.monotonic()
    with pytest.raises(Interrupted):
        client.call("GET", "/")
    assert time.monotonic() - began < 1
    assert server.gone.wait(1)


def test_an_interrupt_ends_a_trickle(start: Callable[..., HostileServer]) -> None:
    def trickle(client: socket.socket, request: bytes) -> None:
        client.sendall(head(10**6))
        while True:
            time.sleep(0.01)
            client.sendall(b" ")

    client = connect(start(trickle).address, after(0.2))
    began = time.monotonic()
    with pytest.raises(Interrupted):
        client.call("GET", "/")
    assert time.monotonic() - began < 0.5


def test_an_interrupt_ends_the_wait_to_send(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "deaf.sock"))
    listener.listen()
    client = connect(f"unix:{tmp_path / 'deaf.sock'}", after(0.2))
    with pytest.raises(Interrupted):
        client.call("POST", "/", "x" * 10_000_000)
    listener.close()


def test_an_interrupt_ends_the_wait_for_a_place_in_the_backlog(tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(0)
    waiting = []
    for _ in range(3):
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        sock.connect_ex(str(path))
        waiting.append(sock)
    with pytest.raises(Interrupted):
        connect(f"unix:{path}", after(0.2)).call("GET", "/")
    for sock in (*waiting, listener):
        sock.close()


def test_a_restarted_server_is_found_again(start: Callable[..., HostileServer]) -> None:
    server = start(reply({"n": 1}), "same.sock")
    client = connect(server.address, never)
    assert client.call("GET", "/") == {"n": 1}
    server.close()
    with pytest.raises(ServerUnreachable, match="cannot be reached"):
        client.call("GET", "/")
    start(reply({"n": 2}), "same.sock")
    assert client.call("GET", "/") == {"n": 2}


@pytest.mark.parametrize("is_clean", [False, True], ids=["refused", "no socket"])
def test_a_server_that_is_being_restarted_is_waited_for(
    start: Callable[..., HostileServer], tmp_path: Path, is_clean: bool
) -> None:
    path = away(tmp_path, is_clean=is_clean)
    client = connect(f"unix:{path}", never)
    with pytest.raises(ServerUnreachable, match="cannot be reached"):
        client.reach()

    def restart() -> None:
        time.sleep(0.5)
        start(reply({"n": 3}), "new.sock")
        (tmp_path / "new.sock").rename(path)

    restarting = threading.Thread(target=restart)
    restarting.start()
    try:
        assert client.call("GET", "/") == {"n": 3}
    finally:
        restarting.join()


def away(folder: Path, *, is_clean: bool) -> Path:
    """The socket of a server that has ended: after a clean end it is gone, else it refuses connections."""
    path = folder / "server.sock"
    if not is_clean:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    return path


@pytest.mark.parametrize("is_clean", [False, True], ids=["refused", "no socket"])
def test_a_server_that_stays_away_is_waited_for_two_seconds_and_the_wait_can_be_cancelled(
    tmp_path: Path, is_clean: bool
) -> None:
    path = away(tmp_path, is_clean=is_clean)
    began = time.monotonic()
    with pytest.raises(ServerUnreachable, match="cannot be reached") as caught:
        connect(f"unix:{path}", never).call("GET", "/")
    assert 2.0 <= time.monotonic() - began < 4.0
    assert str(path) in str(caught.value.detail)
    began = time.monotonic()
    with pytest.raises(Interrupted):
        connect(f"unix:{path}", after(0.3)).call("GET", "/")
    assert 0.3 <= time.monotonic() - began < 0.5


def test_a_socket_in_a_folder_that_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'wrong' / 'server.sock'}"
    began = time.monotonic()
    with pytest.raises(ServerUnreachable, match="cannot be reached") as caught:
        connect(address, never).call("GET", "/")
    assert time.monotonic() - began < 1.0
    assert "configure('model_server'" in str(caught.value.hint)
    assert address in str(caught.value.detail)


def test_the_hint_names_what_starts_the_server_here() -> None:
    code = "from ml_rag.backend import client; print(client._HINT, client._ENDED)"
    environment = {**_environment(), "ML_RAG_START_SERVER": "docker compose up -d server"}
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert output.stdout.count('Start it with "docker compose up -d server"') == 2


@pytest.mark.parametrize("says_so", [True, False])
def test_a_connection_that_is_closed_after_a_reply_is_opened_again(
    start: Callable[..., HostileServer], says_so: bool
) -> None:
    def once(client: socket.socket, request: bytes) -> None:
        field = b"Connection: close\r\n" if says_so else b""
        client.sendall(b"HTTP/1.1 200 OK\r\n" + field + b"Content-Length: 2\r\n\r\n{}")
        client.shutdown(socket.SHUT_RDWR)

    server = start(once)
    client = connect(server.address, never)
    for n in range(1, 4):
        assert client.call("GET", "/") == {}
        assert (len(server.requests), server.connections) == (n, n)
        if (kept := client._sock) is not None:
            select.select([kept], [], [])  # the end is there


def test_a_request_that_was_read_is_not_sent_twice(start: Callable[..., HostileServer]) -> None:
    server = start(reply({}))
    client = connect(server.address, never)
    client.call("GET", "/")
    server.handler = send(b"", close=True)
    with pytest.raises(ServerUnreachable, match="was lost"):
        client.call("GET", "/")
    assert (len(server.requests), server.connections) == (2, 1)


def test_a_refusal_is_heard_also_where_the_server_hangs_up_at_once(tmp_path: Path) -> None:
    """It closes before it has the request, which then cannot be sent."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        refusal = json.dumps({"error": {"message": "full", "code": "queue_full"}}).encode()

        def refuse() -> None:
            client, _ = listener.accept()
            client.sendall(head(len(refusal), "429 Too Many Requests") + refusal)
            client.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(QueueFull, match="full"):
            connect(f"unix:{tmp_path / 's'}", never).call("POST", "/", "x" * 10_000_000)
        thread.join()


def test_a_request_that_was_not_read_is_sent_again(tmp_path: Path) -> None:
    """The server closed an idle connection at the moment in which the request was on its way."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client = connect(f"unix:{tmp_path / 's'}", never)
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

        def serve() -> None:
            first, _ = listener.accept()
            first.recv(65536)
            first.sendall(answer)
            select.select([first], [], [])  # the next request is there
            first.close()
            second, _ = listener.accept()
            with second:
                second.recv(65536)
                second.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert client.call("GET", "/") == {}
        assert client.call("GET", "/") == {}
        thread.join()


def test_an_error_keeps_its_class_and_words(start: Callable[..., HostileServer]) -> None:
    error = {"error": {"message": "full", "code": "queue_full", "detail": "d", "hint": "h"}}
    server = start(reply(error, "429 Too Many Requests"))
    client = connect(server.address, never)
    with pytest.raises(QueueFull, match="full") as caught:
        client.call("GET", "/")
    assert (caught.value.detail, caught.value.hint) == ("d", "h")
    server.handler = reply({})
    assert client.call("GET", "/") == {}


@pytest.fixture
def bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fills a table, in this session."""
    monkeypatch.setattr(calls.session, "calls", [calls.Call(1, "ml_rag_table", "", 10)])


def full(seconds: int) -> dict[str, Any]:
    return {"error": {"message": "full", "code": "queue_full", "hint": f"Try again in {seconds} s. Or not."}}


def test_bulk_work_that_is_refused_comes_back(start: Callable[..., HostileServer], bulk: None) -> None:
    server = start(reply(full(1), "429 Too Many Requests"))
    client = connect(server.address, never)
    timer = threading.Timer(0.5, lambda: setattr(server, "handler", reply({"n": 1})))
    timer.start()
    began = time.monotonic()
    assert client.call("POST", "/", {}) == {"n": 1}
    assert 1 <= time.monotonic() - began < 3
    assert len(server.requests) == 2


def test_bulk_work_that_waits_can_be_cancelled(start: Callable[..., HostileServer], bulk: None) -> None:
    client = connect(start(reply(full(100), "429 Too Many Requests")).address, after(0.3))
    began = time.monotonic()
    with pytest.raises(Interrupted):
        client.call("POST", "/", {})
    assert time.monotonic() - began < 0.5


def test_a_question_that_is_refused_fails_at_once(
    start: Callable[..., HostileServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(start(reply(full(100), "429 Too Many Requests")).address, never)
    for routines in ((), ("ml_rag",), ("ml_rag", "ml_rag_table")):
        own = [calls.Call(n, 10, routine, "") for n, routine in enumerate(routines)]
        monkeypatch.setattr(calls.session, "calls", own)
        with pytest.raises(QueueFull) as caught:
            client.call("POST", "/", {})
        assert retry_after(caught.value.hint) == 100


def test_an_answer_that_is_too_short_is_a_broken_connection(start: Callable[..., HostileServer]) -> None:
    server = start(send(head(100) + b"{}", close=True))
    with pytest.raises(ServerUnreachable, match="was lost") as broken:
        connect(server.address, never).call("GET", "/")
    assert "log" in str(broken.value.hint)


def test_an_answer_of_announced_length_zero_is_nonsense(start: Callable[..., HostileServer]) -> None:
    server = start(send(head(0)))
    with pytest.raises(EngineFailed, match="unexpected reply"):
        connect(server.address, never).call("GET", "/")


def test_an_answer_that_is_too_long(start: Callable[..., HostileServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ml_rag.backend.client.MAX_REPLY_BYTES", 1000)
    server = start(reply(b" " * 1000 + b"{}"))
    with pytest.raises(EngineFailed, match="too long"):
        connect(server.address, never).call("GET", "/")


@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request"])
def test_an_answer_of_millions_of_values_is_not_parsed(
    start: Callable[..., HostileServer], monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Nothing cancels that, and it takes thirty times as much memory."""
    monkeypatch.setattr("ml_rag.backend.client.json.loads", lambda _: pytest.fail("it was parsed"))
    body = b"[" + b"[]," * MAX_REPLY_VALUES + b"[]]"
    server = start(reply(body, status))
    with pytest.raises(EngineFailed):
        connect(server.address, never).call("GET", "/")
    with pytest.raises(EngineFailed):
        list(connect(server.address, never).stream("/", b"", ""))


def test_an_answer_of_many_numbers_in_texts_is_parsed(start: Callable[..., HostileServer]) -> None:
    told = ["[" + "1," * MAX_REPLY_VALUES + "1]", '"']
    assert connect(start(reply(told)).address, never).call("GET", "/") == told


def test_every_unreachable_says_how_to_start_the_server(tmp_path: Path) -> None:
    for address in (f"unix:{tmp_path}/none", "http://127.0.0.1:1", "http://nonsense", "unix:" + "x" * 300, "x"):
        with pytest.raises(ServerUnreachable) as caught:
            connect(address, never).call("GET", "/")
        assert "ml-rag serve" in str(caught.value.hint)
        assert address in str(caught.value.detail)


def test_closing_twice_is_fine(start: Callable[..., HostileServer]) -> None:
    client: Any = connect(start(reply({})).address, never)
    client.close()
    client.call("GET", "/")
    client.close()
    client.close()
    assert client.call("GET", "/") == {}


def test_a_machine_that_is_gone_without_a_word_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = sockets.connect(f"http://127.0.0.1:{listener.getsockname()[1]}", never)
        with sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
