"""A model server that something starts again whenever it ends, as systemd and Docker do."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from support.processes import children, command, wait_until
from support.servers import RunningServer, running_server

#: models whose answer does not come, and one whose answer takes its time
CONFIG = """
[server]
socket_mode = "0666"
[models.held-embed]
task = "embed"
engine = "fake"
dimensions = 16
max_tokens = 256
fake_mode = "slow"
fake_delay_seconds = {delay}
[models.held-rerank]
task = "rerank"
engine = "fake"
max_tokens = 512
fake_mode = "slow"
fake_delay_seconds = {delay}
[models.held-generate]
task = "generate"
engine = "fake"
context_tokens = 4096
fake_mode = "slow"
fake_delay_seconds = {delay}
"""
FOREVER = 600.0


class SupervisedServer:
    """``kill`` ends the process; another one stands in its place soon after. ``config`` counts from the next start."""

    def __init__(self, folder: Path, *, delay: float = FOREVER, more: str = "", socket_folder: str = ".") -> None:
        self.folder = folder
        self.socket = folder / socket_folder / "server.sock"
        self.socket.parent.mkdir(mode=0o711, exist_ok=True)
        self.address = f"unix:{self.socket}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(mode=0o700)
        self.more = more
        self.delay = delay
        self.arguments: Sequence[str] = ()
        #: put before the command, such as a program that sets limits
        self.prefix: Sequence[str] = ()
        self.environment: dict[str, str] = {"TMPDIR": str(self.temporary)}
        self.starts = 0
        self.logs: list[str] = []
        self._running: RunningServer | None = None
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._held = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()
        self.wait_ready(1)

    @property
    def config(self) -> str:
        head, rest = CONFIG.format(delay=self.delay), self.more
        if rest.startswith("[server]"):  # a table can stand in a file once only
            rest = rest.removeprefix("[server]")
            server, bracket, models = rest.partition("\n[")
            head = head.replace("[server]", f"[server]{server}", 1)
            rest = bracket + models
        return head + rest

    def _keep(self) -> None:
        try:
            while not self._closing.is_set():
                if self._held.is_set():
                    self._closing.wait(0.02)
                    continue
                with running_server(
                    socket=self.socket,
                    config=self.config,
                    models_dir=self.folder / "models",
                    arguments=self.arguments,
                    environment=self.environment,
                    prefix=self.prefix,
                ) as running:
                    self._running = running
                    self.starts += 1
                    while running.process.poll() is None and not self._closing.wait(0.02):
                        pass
                    self.logs.append(running.log())
                    self._running = None
        except BaseException as e:  # noqa: BLE001 - told by wait_ready
            self._failure = e

    @property
    def pid(self) -> int:
        assert self._running is not None, "it is not running"
        return self._running.process.pid

    def log(self) -> str:
        """What all of its processes have logged."""
        return "".join([*self.logs, self._running.log() if self._running else ""])

    def wait_ready(self, starts: int) -> None:
        """Until it has been started so many times, and answers."""

        def is_ready() -> bool:
            if self._failure is not None:
                raise self._failure
            return self.starts >= starts and self._running is not None

        wait_until(is_ready, 60)

    def kill(self, *, wait: bool = True) -> None:
        """End it as kill -9 does; with ``wait``, until the next one answers."""
        starts = self.starts
        assert self._running is not None
        self._running.process.kill()
        wait_until(lambda: self.starts > starts or self._running is None or self._failure)
        if wait:
            self.wait_ready(starts + 1)

    def hold(self) -> None:
        """Kill it, and do not start it again before ``release``."""
        self._held.set()
        self.kill(wait=False)
        wait_until(lambda: self._running is None)

    def release(self) -> None:
        self._held.clear()
        self.wait_ready(self.starts + 1)

    def parsers(self) -> list[int]:
        """Its child processes that parse documents."""
        return [pid for pid in children(self.pid) if "sandbox_worker" in command(pid)]

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://server", timeout=10)

    def metric(self, line: str) -> float:
        """The value of a line of /metrics that begins so; 0 where there is none."""
        with self.client() as http:
            rows = http.get("/metrics").text.splitlines()
        return next((float(row.split()[-1]) for row in rows if row.startswith(line)), 0)

    def is_at_work(self, model: str) -> bool:
        """Whether the model is computing something."""
        return self.metric(f'ml_rag_running{{model="{model}"}}') > 0

    def close(self) -> None:
        self._closing.set()
        self._thread.join(30)


@contextlib.contextmanager
def supervised_server(folder: Path, **options: Any) -> Iterator[SupervisedServer]:
    """In a new folder below ``folder``, which PostgreSQL's user must be able to enter; options of the class."""
    own = folder / f"server{os.urandom(4).hex()}"
    own.mkdir(mode=0o711)
    server = SupervisedServer(own, **options)
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(own, ignore_errors=True)
