"""The model server as a process: its socket, its peers, its end."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ml_rag.catalogue import DEFAULT_MODELS, load_catalogue
from ml_rag.testing import RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(tcp=True) as running:
        yield running


def client(path: Path, **options) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server", **options)


def metric(path: Path, line: str) -> float:
    with client(path) as http:
        return next(
            (float(row.split()[-1]) for row in http.get("/metrics").text.splitlines() if row.startswith(line)), 0
        )


def eventually(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def test_the_socket_is_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "s.sock"
    with running_server(socket=path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


def test_the_sockets_mode_is_configured(tmp_path: Path) -> None:
    with running_server(socket=tmp_path / "s.sock", config='[server]\nsocket_mode = "0660"\n') as running:
        assert stat.S_IMODE(running.socket.stat().st_mode) == 0o660


def test_unix_socket_and_tcp_give_the_same(server: RunningServer) -> None:
    assert server.url is not None
    body = {"model": "fake-embed", "input": "a b"}
    with client(server.socket) as over_unix:
        first = over_unix.post("/v1/embeddings", json=body).json()
    assert httpx.post(f"{server.url}/v1/embeddings", json=body).json() == first


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with running_server(socket=path) as first:
        with pytest.raises(RuntimeError, match="another server answers on"), running_server(socket=path):
            pass
        with client(path) as http:
            assert http.get("/healthz").status_code == 200
        first.kill()
        assert path.exists()
        with running_server(socket=path), client(path) as http:
            assert http.get("/healthz").status_code == 200


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(RuntimeError, match="is not a socket"), running_server(socket=path):
        pass
    assert path.read_text() == "data"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("allowed", [True, False])
def test_the_peers_uid_is_checked(tmp_path: Path, allowed: bool) -> None:
    stranger = 54321
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o001)
    users = f"[{stranger}]" if allowed else "[]"
    config = f'[server]\nsocket_mode = "0666"\nallowed_users = {users}\n'
    ask = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(b'GET /healthz HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n');"
        "data = b''.join(iter(lambda: s.recv(65536), b'')); sys.stdout.write(data.decode())"
    )
    with running_server(socket=tmp_path / "s.sock", config=config) as running:
        done = subprocess.run(
            ["/usr/bin/env", "python3", "-c", ask, str(running.socket)],
            user=stranger,
            group=stranger,
            extra_groups=[],
            capture_output=True,
            text=True,
            cwd="/",
            check=True,
        )
        head, _, body = done.stdout.partition("\n\n")  # text mode makes \r\n one character
        if allowed:
            assert head.startswith("HTTP/1.1 200")
            assert json.loads(body)["status"] == "ok"
        else:
            assert head.startswith("HTTP/1.1 403")
            assert json.loads(body)["error"]["code"] == "forbidden"
            assert f"refused a connection of uid {stranger}" in running.log()
            assert metric(running.socket, "ml_rag_refused_peers_total") == 1


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
        eventually(lambda: metric(running.socket, 'ml_rag_model_loaded{model="fake-embed-slow"}') == 1)
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
    eventually(lambda: metric(server.socket, loaded) == 1)
    raw.close()
    gone = 'ml_rag_requests_total{model="fake-embed-slow",route="/v1/embeddings",status="499"}'
    eventually(lambda: metric(server.socket, gone) == 1, 1.0)
    with client(server.socket, timeout=4) as http:  # 2 s a text: the 50 of before are not in the way
        assert http.post("/v1/embeddings", json={"model": "fake-embed-slow", "input": "a"}).status_code == 200


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
    with client(server.socket, timeout=0.3) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/chat/completions", json=CHAT)
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
            next(reply.iter_lines())
    with client(server.socket, timeout=5) as http:
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


def test_a_head_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    config = "[server]\nheader_timeout_seconds = 0.3\nbody_timeout_seconds = 0.3\n"
    with running_server(socket=tmp_path / "s.sock", config=config) as running:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(5)
            raw.connect(str(running.socket))
            raw.sendall(b"GET /healthz HTTP/1.1\r\nHost:")
            assert raw.recv(100) == b""
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(5)
            raw.connect(str(running.socket))
            raw.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert b"400 Bad Request" in raw.recv(1000)
        with client(running.socket) as http:
            assert http.get("/healthz").status_code == 200
            time.sleep(0.5)  # an idle connection is not a slow head
            assert http.get("/healthz").status_code == 200


def opened(path: Path, data: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(str(path))
    connection.sendall(data)
    return connection


def test_connections_are_bounded_and_idle_ones_make_room(tmp_path: Path) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    with running_server(socket=tmp_path / "s.sock", config="[server]\nmax_connections = 3\n") as running:
        busy = [opened(running.socket, head) for _ in range(3)]
        with client(running.socket) as http:
            reply = http.get("/healthz")
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "queue_full"
        assert "max_connections" in reply.json()["error"]["hint"]
        for connection in busy:
            connection.sendall(b"\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        # all three are idle now: each newcomer takes the place of one
        for _ in range(3):
            with client(running.socket) as http:
                assert http.get("/healthz").status_code == 200
        for connection in busy:
            connection.close()


def test_bytes_on_their_way_in_are_bounded(tmp_path: Path) -> None:
    def head(length: int) -> bytes:
        fields = f"Host: x\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: {length}\r\n\r\n"
        return b"POST /v1/documents HTTP/1.1\r\n" + fields.encode()

    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    with running_server(socket=tmp_path / "s.sock", config="[server]\nmax_pending_bytes = 100000\n") as running:
        first = opened(running.socket, head(90_000) + part + b"x" * 80_000)
        body = {"model": "fake-embed", "input": "x" * 30_000}
        with client(running.socket) as http:
            eventually(lambda: http.post("/v1/embeddings", json=body).status_code == 429)
            error = http.post("/v1/embeddings", json=body).json()["error"]
            assert (error["code"], "max_pending_bytes" in error["hint"]) == ("queue_full", True)
            first.close()
            eventually(lambda: http.post("/v1/embeddings", json=body).status_code == 200)


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


def test_a_socket_that_is_made_again_holds_no_descriptor_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with running_server(socket=path) as running:
        descriptors = Path(f"/proc/{running.process.pid}/fd")
        with client(path) as http:
            http.get("/healthz")
        before = len(list(descriptors.iterdir()))
        for _ in range(2):
            path.unlink()
            eventually(path.exists, 20)
            with client(path) as http:
                eventually(lambda http=http: http.get("/healthz").status_code == 200)
        eventually(lambda: len(list(descriptors.iterdir())) <= before)


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
        assert line.endswith(f"get it with: ml-rag models pull {model_id}")


def test_the_default_models_are_those_of_a_new_database() -> None:
    text = (Path(__file__).resolve().parents[3] / "sql" / "00_schema.sql").read_text()
    assert tuple(re.findall(r"'(?:embed|generate|rerank)_model_id', '([^']+)'", text)) == DEFAULT_MODELS


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
