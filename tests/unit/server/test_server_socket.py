"""The model server's sockets: who may connect, how many, what takes the place of a socket's file."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from ml_rag.server.sockets import CannotListen, bind_tcp
from support.model_server_process import client, metric
from support.processes import wait_until
from support.servers import RunningServer, running_server


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
            wait_until(lambda: http.post("/v1/embeddings", json=body).status_code == 429)
            error = http.post("/v1/embeddings", json=body).json()["error"]
            assert (error["code"], "max_pending_bytes" in error["hint"]) == ("queue_full", True)
            first.close()
            wait_until(lambda: http.post("/v1/embeddings", json=body).status_code == 200)


def test_a_socket_that_is_made_again_holds_no_descriptor_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with running_server(socket=path) as running:
        descriptors = Path(f"/proc/{running.process.pid}/fd")
        with client(path) as http:
            http.get("/healthz")
        before = len(list(descriptors.iterdir()))
        for _ in range(2):
            path.unlink()
            wait_until(path.exists, 20)
            with client(path) as http:
                wait_until(lambda http=http: http.get("/healthz").status_code == 200)
        wait_until(lambda: len(list(descriptors.iterdir())) <= before)


@pytest.mark.parametrize("listen", ["8600", ":8600", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999"])
def test_an_address_that_is_none_says_how_one_is_written(listen: str) -> None:
    """A port past 65535 would count from 0 again."""
    with pytest.raises(CannotListen) as caught:
        bind_tcp(listen)
    assert "HOST:PORT" in str(caught.value.hint)


@pytest.mark.parametrize(("found", "family"), [(["::1"], socket.AF_INET6), (["::1", "127.0.0.1"], socket.AF_INET)])
def test_a_name_is_listened_on_whichever_addresses_it_has(
    monkeypatch: pytest.MonkeyPatch, found: list[str], family: socket.AddressFamily
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        assert host == "models.test"
        return [info for address in found for info in resolve(address, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with closing(bind_tcp("models.test:0")) as listener:
        assert listener.family == family
        monkeypatch.undo()
        socket.create_connection(listener.getsockname()[:2], 5).close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".test", "a..b"])
def test_a_host_that_is_not_known_cannot_be_listened_on(host: str) -> None:
    with pytest.raises(CannotListen) as caught:
        bind_tcp(f"{host}:0")
    assert host in str(caught.value)
