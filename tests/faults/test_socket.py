"""The model server's socket removed, replaced or out of reach while everything runs; its file descriptors used up."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.loading import counts, rows
from support.processes import wait_until
from support.site import Site
from support.stores import error
from support.supervised_server import SupervisedServer, supervised_server

ASK = "SELECT count(*) FROM ml_rag_search('topic3')"


@pytest.fixture
def server(place: Path) -> Iterator[SupervisedServer]:
    """One whose socket may be taken away, in a folder of its own."""
    with supervised_server(place, socket_folder="run") as running:
        yield running


def remove_file(path: Path) -> None:
    path.unlink()


def remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def rename(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))


def answers(server: SupervisedServer) -> bool:
    with socket.socket(socket.AF_UNIX) as client:  # httpx leaves a socket open that cannot connect
        try:
            client.connect(str(server.socket))
        except OSError:
            return False
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return client.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "how",
    [remove_file, pytest.param(remove_folder, marks=pytest.mark.slow), pytest.param(rename, marks=pytest.mark.slow)],
)
def test_a_socket_that_is_removed_comes_back(site: Site, how: object) -> None:
    before = site.loaded()
    pid = site.server.pid
    assert callable(how)
    how(site.server.socket)
    # who is connected notices nothing
    assert rows(before, ASK) == [(3,)]
    wait_until(lambda: answers(site.server))
    if how is remove_folder:  # made for its own user; the administrator lets others in again
        site.server.socket.parent.chmod(0o711)
    assert rows(site.connect(), ASK) == [(3,)]
    assert rows(before, ASK) == [(3,)]
    assert site.server.pid == pid
    assert "had been removed or replaced" in site.server.log()
    site.verify()
    # a second time
    site.server.socket.unlink()
    wait_until(lambda: answers(site.server))
    assert rows(site.connect(), ASK) == [(3,)]


def test_what_takes_the_sockets_place_is_left_alone_and_said(site: Site) -> None:
    session = site.loaded()
    path = site.server.socket
    path.unlink()
    path.write_text("somebody's")
    path.chmod(0o666)
    wait_until(lambda: "cannot be put back" in site.server.log())
    assert path.read_text() == "somebody's"
    assert rows(session, ASK) == [(3,)]
    with error("08006", "cannot be reached"):
        site.connect().execute(ASK)
    path.unlink()
    wait_until(lambda: answers(site.server))
    assert rows(site.connect(), ASK) == [(3,)]
    site.verify()


@pytest.mark.slow
def test_a_living_server_in_the_sockets_place_is_left_alone(site: Site) -> None:
    session = site.loaded()
    path = site.server.socket
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        wait_until(lambda: "another server answers on" in site.server.log())
        assert rows(session, ASK) == [(3,)]
        inode = path.stat().st_ino
    # it ended and left its file
    wait_until(lambda: path.exists() and path.stat().st_ino != inode, 20)
    assert rows(site.connect(), ASK) == [(3,)]
    site.verify()


@pytest.mark.skipif(os.getuid() != 0, reason="the cluster's user and the model server's are one")
@pytest.mark.parametrize("what", ["socket", pytest.param("folder", marks=pytest.mark.slow)])
def test_a_socket_that_may_not_be_opened(site: Site, what: str) -> None:
    before = site.loaded()
    path = site.server.socket if what == "socket" else site.server.socket.parent
    mode = path.stat().st_mode & 0o777
    path.chmod(0o600)
    session = site.connect()
    for call in (ASK, "SELECT ml_generate('why?')", "SELECT ml_rag.create_store('public.other')"):
        with error("08006", "may not be reached", "socket_group"):
            session.execute(call)
    assert rows(before, ASK) == [(3,)]
    path.chmod(mode)
    assert rows(session, ASK) == [(3,)]
    site.verify()


@pytest.mark.slow
def test_a_port_that_nobody_listens_on(site: Site) -> None:
    session = site.loaded()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        session.execute("SELECT ml_rag.configure('model_server', %s)", (f"http://127.0.0.1:{port}",))
        with error("08006", "cannot be reached", f"127.0.0.1:{port}", "ml-rag serve"):
            session.execute(ASK)
    session.execute("SELECT ml_rag.configure('model_server', %s)", (site.server.address,))
    assert rows(session, ASK) == [(3,)]
    site.verify()


def test_descriptors_used_up(site: Site) -> None:
    """Connections leave some for everything else: whoever is too many is told, and a load still has its files."""
    site.server.prefix = ["prlimit", "--nofile=128:128", "--"]
    site.server.kill()
    session = site.loaded()
    pid = site.server.pid
    assert "128 files" in site.server.log()
    with contextlib.ExitStack() as stack:

        def occupy(n: int) -> None:
            for _ in range(n):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.connect(str(site.server.socket))
                with contextlib.suppress(BrokenPipeError):  # one too many
                    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")  # a head that does not end yet

        occupy(75)
        session.execute("TRUNCATE docs")
        assert counts(site.load(session)) == {"loaded": 40}
        occupy(60)
        with error("53300", "too many connections", "max_connections"):
            site.connect().execute(ASK)
    wait_until(lambda: answers(site.server))
    assert site.server.pid == pid
    assert rows(site.connect(), ASK) == [(3,)]
    site.verify()
