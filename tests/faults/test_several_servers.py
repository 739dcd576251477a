"""Several model servers behind HAProxy, as in docs/scale.md: least busy first, one dies, none is left, one is back."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.cluster import Connection, Database
from support.model_server_process import client, metric
from support.processes import Background, wait_until
from support.servers import RunningServer, running_server
from support.stores import error

ROOT = Path(__file__).parents[2]
HELD = """
[models.held]
task = "generate"
engine = "fake"
context_tokens = 4096
fake_mode = "slow"
fake_delay_seconds = 600

[models.plain]
task = "embed"
engine = "fake"
dimensions = 8
"""

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="there is no haproxy here")


def configuration(address: Path, servers: list[Path]) -> str:
    """The one of the page, with other paths."""
    text = (ROOT / "docs" / "scale.md").read_text()
    block = re.search(r"```\n(global\n.*?)```", text, re.DOTALL)
    assert block
    kept = [line for line in block[1].splitlines() if not re.match(r"  (bind|server) ", line)]
    kept.append(f"  bind unix@{address} mode 666")
    kept += [f"  server s{n} unix@{path}" for n, path in enumerate(servers)]
    return "\n".join(kept) + "\n"


class Servers:
    def __init__(self, folder: Path) -> None:
        self.paths = [folder / "a.sock", folder / "b.sock"]
        self.address = folder / "all.sock"
        self._stacks = [ExitStack(), ExitStack()]
        self.running: list[RunningServer | None] = [None, None]

    def start(self, n: int) -> None:
        self.running[n] = self._stacks[n].enter_context(running_server(socket=self.paths[n], config=HELD))

    def kill(self, n: int) -> None:
        running = self.running[n]
        assert running is not None
        running.kill()
        self.running[n] = None
        self._stacks[n].close()

    def works_on(self, n: int) -> int:
        return int(metric(self.paths[n], 'ml_rag_running{model="held"}'))

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


@contextmanager
def balancer(folder: Path, servers: Servers) -> Iterator[None]:
    path = folder / "haproxy.cfg"
    path.write_text(configuration(servers.address, servers.paths))
    process = subprocess.Popen(["haproxy", "-db", "-f", str(path)], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: servers.address.exists() or process.poll() is not None)
        assert process.poll() is None, process.stderr and process.stderr.read()
        yield
    finally:
        process.terminate()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture
def servers(place: Path, tmp_path: Path) -> Iterator[Servers]:
    folder = place / f"servers{time.monotonic_ns()}"
    folder.mkdir(mode=0o755)
    servers = Servers(folder)
    try:
        servers.start(0)
        servers.start(1)
        with balancer(tmp_path, servers):
            wait_until(lambda: answers(servers))
            yield servers
    finally:
        servers.close()


def answers(servers: Servers) -> bool:
    with client(servers.address) as http:
        return http.get("/healthz").status_code == 200


@pytest.fixture
def session(db: Database, servers: Servers) -> Connection:
    owner = db.connect()
    owner.execute("SELECT ml_rag.configure('model_server', %s)", [f"unix:{servers.address}"])
    return owner


def has_embedded(session: Connection, server: Path) -> bool:
    """Whether of two more calls one has come to that server."""
    session.execute(EMBED)
    session.execute(EMBED)
    return metric(server, "ml_rag_embed_batch_texts_count") > 0


EMBED = """SELECT cardinality(ml_embed_row('a text', '{"embed_model_id": "plain"}')::real[])"""
GENERATE = """SELECT ml_generate('why?', '{"model_id": "held", "max_tokens": 500}')"""


def test_calls_go_to_the_server_with_the_fewest_in_work(db: Database, session: Connection, servers: Servers) -> None:
    calls = []
    for n in (1, 2):
        other = db.connect()
        calls.append((other, Background(lambda connection=other: connection.execute(GENERATE))))
        wait_until(lambda n=n: servers.works_on(0) + servers.works_on(1) == n, 20)
    assert [servers.works_on(0), servers.works_on(1)] == [1, 1]
    for other, call in calls:
        other.cancel()
        with error("57014"):
            call.result()
    # the servers have heard of it, too
    wait_until(lambda: servers.works_on(0) + servers.works_on(1) == 0, 20)


def test_one_dies_in_the_middle_of_a_call(db: Database, session: Connection, servers: Servers) -> None:
    other = db.connect()
    call = Background(lambda: other.execute(GENERATE))
    wait_until(lambda: servers.works_on(0) + servers.works_on(1) == 1, 20)
    busy = 0 if servers.works_on(0) else 1
    servers.kill(busy)
    with error("08006"):
        call.result()
    # nobody notices that it is away
    for _ in range(8):
        assert session.execute(EMBED).fetchone() == (8,)
    servers.start(busy)
    wait_until(lambda: has_embedded(session, servers.paths[busy]), 20)


def test_none_is_left(session: Connection, servers: Servers) -> None:
    assert session.execute(EMBED).fetchone() == (8,)
    servers.kill(0)
    servers.kill(1)
    with error("08006", "model server", "ml-rag serve"):
        session.execute(EMBED)
    servers.start(1)
    wait_until(lambda: answers(servers), 20)
    assert session.execute(EMBED).fetchone() == (8,)
