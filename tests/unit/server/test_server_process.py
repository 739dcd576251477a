"""The model server as a process: its start, its end, work that is given up, its environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from ml_rag.server.catalogue import DEFAULT_MODELS, load_catalogue
from support.model_server_process import client, metric
from support.processes import children, command, wait_until
from support.servers import RunningServer, running_server


def service_manager(address: str) -> socket.socket:
    """The socket on which systemd would hear from the server."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(address.replace("@", "\0", 1))
    manager.settimeout(10)
    return manager


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_a_service_manager_hears_when_it_answers_and_when_it_ends(tmp_path: Path, kind: str) -> None:
    address = str(tmp_path / "notify") if kind == "path" else f"@ml_rag_test_{os.getpid()}"
    with (
        service_manager(address) as manager,
        running_server(socket=tmp_path / "s.sock", environment={"NOTIFY_SOCKET": address}) as running,
    ):
        assert manager.recv(4096).decode() == f"READY=1\nSTATUS=ready on unix:{running.socket}"
        assert running.stop() == 0
        assert manager.recv(4096).decode() == "STOPPING=1"


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "vsock:2:1234"])
def test_a_service_manager_that_does_not_listen_stops_nothing(tmp_path: Path, address: str) -> None:
    with running_server(socket=tmp_path / "s.sock", environment={"NOTIFY_SOCKET": address}) as running:
        assert running.stop() == 0
        assert "Traceback" not in running.log()


def test_sigterm_ends_it_quickly_even_in_mid_work(tmp_path: Path) -> None:
    with running_server(socket=tmp_path / "s.sock") as running:
        replies = []

        def ask() -> None:
            with client(running.socket, timeout=30) as http:
                replies.append(http.post("/v1/embeddings", json={"model": "fake-embed-slow", "input": ["a"] * 100}))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: metric(running.socket, 'ml_rag_model_loaded{model="fake-embed-slow"}') == 1)
        began = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - began < 2
        thread.join(5)
        assert replies[0].json()["error"]["code"] == "server_unreachable"
        assert not running.socket.exists()


def test_work_stops_when_the_client_goes_away(server: RunningServer) -> None:
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(str(server.socket))
    body = json.dumps({"model": "fake-embed-slow", "input": ["a"] * 50}).encode()
    raw.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    loaded = 'ml_rag_model_loaded{model="fake-embed-slow"}'
    wait_until(lambda: metric(server.socket, loaded) == 1)
    raw.close()
    gone = 'ml_rag_requests_total{model="fake-embed-slow",route="/v1/embeddings",status="499"}'
    wait_until(lambda: metric(server.socket, gone) == 1, 1.0)
    with client(server.socket, timeout=4) as http:  # 2 s a text: the 50 of before are not in the way
        assert http.post("/v1/embeddings", json={"model": "fake-embed-slow", "input": "a"}).status_code == 200


def test_a_second_request_of_a_connection_ends_the_work_for_the_first(tmp_path: Path) -> None:
    body = b'{"model": "fake-embed-slow", "input": ["a", "b"]}'
    sent = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with running_server(socket=tmp_path / "s.sock") as running, socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(str(running.socket))
        peer.sendall(sent)
        wait_until(lambda: metric(running.socket, 'ml_rag_model_loaded{model="fake-embed-slow"}') == 1)
        peer.sendall(sent)
        assert peer.recv(13) == b"HTTP/1.1 400 "
        gone = 'ml_rag_requests_total{model="fake-embed-slow",route="/v1/embeddings",status="499"}'
        wait_until(lambda: metric(running.socket, gone) == 1, 1.0)


CHAT = {"model": "fake-generate-slow", "max_tokens": 1000, "messages": [{"role": "user", "content": "why?"}]}


def test_a_client_that_hangs_up_before_its_replies_is_no_failure(tmp_path: Path) -> None:
    body = b'{"model": "fake-embed", "input": "one"}'
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    with running_server(socket=tmp_path / "s.sock") as running:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(10)
                peer.connect(str(running.socket))
                # two requests in one go, and the end: uvicorn closes while the first is being answered
                peer.sendall(head + body + b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):
                    pass
        with client(running.socket) as http:
            assert http.get("/healthz").status_code == 200
        assert "unexpected" not in running.log(), running.log()
        assert "Traceback" not in running.log(), running.log()


def test_generation_stops_when_the_client_goes_away(server: RunningServer) -> None:
    """1 000 tokens take 50 s; whoever comes next would wait as long."""
    with client(server.socket, timeout=0.3) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=CHAT)
    with client(server.socket, timeout=5) as http:
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
            next(reply.iter_lines())
        began = time.monotonic()
        reply = http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2})
        assert reply.json()["usage"]["completion_tokens"] == 2
        assert time.monotonic() - began < 2
    assert metric(server.socket, 'ml_rag_queue_depth{model="fake-generate-slow"}') == 0
    assert metric(server.socket, 'ml_rag_tokens_total{direction="out",model="fake-generate-slow"}') == 2


def test_sigterm_ends_a_stream(tmp_path: Path) -> None:
    with (
        running_server(socket=tmp_path / "s.sock") as running,
        client(running.socket, timeout=10) as http,
        http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        began = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - began < 2
        assert "data: [DONE]" not in list(lines)


def test_a_full_queue_answers_429(tmp_path: Path) -> None:
    config = "[models.fake-embed-slow]\nmax_queue = 1\nfake_delay_seconds = 0.4\n"
    with running_server(socket=tmp_path / "s.sock", config=config) as running:
        replies: list[httpx.Response] = []

        def ask() -> None:
            with client(running.socket, timeout=30) as http:
                replies.append(http.post("/v1/embeddings", json={"model": "fake-embed-slow", "input": "a"}))

        ask()  # loaded from here on
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        refused = [reply.json()["error"]["code"] for reply in replies if reply.status_code == 429]
        assert set(refused) == {"queue_full"}
        assert len(refused) >= 2
        assert len(refused) < 6


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is not installed")
def test_it_starts_and_answers_where_no_folder_has_room_for_temporary_files(tmp_path: Path) -> None:
    """Questions need none; a document that is too large for memory is told."""
    chunking = {"split_by": "auto", "segment_tokens": 64, "overlap_tokens": 0}
    options = {"embed_model_id": "fake-embed", "chunking": chunking}
    with (
        running_server(socket=tmp_path / "s.sock", prefix=["prlimit", "--fsize=0", "--"]) as running,
        client(running.socket, timeout=30) as http,
    ):
        assert http.post("/v1/embeddings", json={"model": "fake-embed", "input": "one"}).status_code == 200
        reply = http.post(
            "/v1/documents",
            data={"options": json.dumps(options)},
            files={"file": ("a.txt", b"word " * 1_000_000)},
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (507, "disk_full")


@pytest.mark.parametrize(("config", "stands_back"), [("", 10), ("[server]\nbackground_nice = 0\n", 0)])
def test_a_load_stands_back_behind_searches(tmp_path: Path, config: str, stands_back: int) -> None:
    chunking = {"split_by": "auto", "segment_tokens": 64, "overlap_tokens": 0}
    options = json.dumps({"embed_model_id": "fake-embed", "chunking": chunking})
    with running_server(socket=tmp_path / "s.sock", config=config) as running, client(running.socket) as http:
        reply = http.post("/v1/documents", data={"options": options}, files={"file": ("a.txt", b"text")})
        reply.raise_for_status()

        def parsers() -> list[int]:
            return [pid for pid in children(running.process.pid) if "sandbox_worker" in command(pid)]

        # one more while the server finds out how far a parser is confined
        wait_until(lambda: len(parsers()) == 1)
        assert os.getpriority(os.PRIO_PROCESS, parsers()[0]) == os.getpriority(os.PRIO_PROCESS, 0) + stands_back


def test_the_servers_environment_is_hidden_from_processes_of_its_user() -> None:
    code = (
        "import ctypes, ml_rag.server.serve as s, ml_rag.cli;"
        "s.serve = lambda *a: print('dumpable', ctypes.CDLL(None).prctl(3, 0, 0, 0, 0));"
        "s.exit_now = lambda: None; ml_rag.cli.main(['serve'])"
    )
    environment = {**os.environ, "PYTHONPATH": "plpy"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False, timeout=60
    )
    assert "dumpable 0" in done.stdout, done.stderr


def test_default_models_that_are_missing_are_a_line_each_in_the_log(tmp_path: Path) -> None:
    present = tmp_path / "models" / "all_minilm_l6_v2"
    present.mkdir(parents=True)
    entry = load_catalogue(None).get("all_minilm_l6_v2")
    assert entry is not None
    for path in entry.file_paths(tmp_path / "models"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    with running_server(socket=tmp_path / "s.sock", models_dir=tmp_path / "models") as running:
        lines = [line for line in running.log().splitlines() if "default model" in line]
    assert [line.partition("default model ")[2].partition(":")[0] for line in lines] == list(DEFAULT_MODELS[1:])
    for line, model_id in zip(lines, DEFAULT_MODELS[1:], strict=True):
        assert line.endswith(f"get it with: ml-rag models pull {model_id} --models-dir {tmp_path / 'models'}")


def test_the_default_models_are_those_of_a_new_database() -> None:
    text = (Path(__file__).resolve().parents[3] / "sql" / "ground/settings.sql").read_text()
    # which generates is not set: the first capable one that is there
    assert tuple(re.findall(r"'(?:embed|generate|rerank)_model_id', '([^']+)'", text)) == DEFAULT_MODELS[::2]


def test_a_bad_configuration_is_one_clear_error(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[server]\nsockets = 1\n")
    command = [sys.executable, "-m", "ml_rag.cli", "serve", "--config", str(config)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "plpy"}, check=False
    )
    assert done.returncode == 1
    assert f"unknown key server.sockets in {config}" in done.stderr
    assert "Did you mean 'socket'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_starts_without_the_model_libraries() -> None:
    code = (
        "import sys, ml_rag.cli, ml_rag.server.serve, ml_rag.server.engines.fake;"
        "print([name for name in ('torch', 'transformers', 'onnxruntime', 'llama_cpp') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "plpy"},
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["by default", "its own", "a policy"],
)
def test_threads_that_wait_for_one_another_soon_sleep(given: dict[str, str], spins: str | None) -> None:
    inherited = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    # as the library sees it that is loaded next
    program = "import ctypes, ml_rag.server.engines; c = ctypes.CDLL(None); c.getenv.restype = ctypes.c_char_p; "
    program += "print((c.getenv(b'GOMP_SPINCOUNT') or b'none').decode())"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**inherited, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (spins or "none")
