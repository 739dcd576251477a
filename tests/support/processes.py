"""Processes of this machine, threads that wait for a call, and waiting for what must happen."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Background:
    """A call in a thread; ``result`` waits for what it returned, or raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._error: list[BaseException] = []

        def run() -> None:
            try:
                self._outcome.append(call())
            except BaseException as e:  # noqa: BLE001 - handed on to the test
                self._error.append(e)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, seconds: float = 20) -> None:
        """Wait for its end, however that is."""
        self._thread.join(seconds)

    def result(self, seconds: float = 20) -> Any:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "it did not come back"
        if self._error:
            raise self._error[0]
        return self._outcome[0]


@contextlib.contextmanager
def over_and_over(step: Callable[[], Any]) -> Iterator[None]:
    """Calls it again and again meanwhile, in a thread."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            step()

    running = Background(run)
    try:
        yield
    finally:
        stop.set()
        running.join()
    running.result()


def wait_until(condition: Callable[[], Any], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def wait_for_port(port: int, process: subprocess.Popen[Any]) -> None:
    """Until somebody listens at it, which comes before the process ends."""

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        return False

    wait_until(listens, 30)


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(line.split(":", 1) for line in lines)


def gone(pid: int) -> bool:
    """Whether the process has ended, if only as a zombie that nobody has asked about."""
    return _status(pid).get("State", "Z").strip().startswith(("Z", "X"))


def exists(pid: int) -> bool:
    """Whether the process is there, if only as a zombie; a program that looks for its id would find it."""
    return Path(f"/proc/{pid}").exists()


def children(pid: int) -> list[int]:
    """Its child processes."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _status(int(folder.name)).get("PPid", "").strip() == str(pid):
            found.append(int(folder.name))
    return found


def command(pid: int) -> str:
    """Its command line; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def cpu_seconds(pid: int) -> float:
    """Processor time it has used, its threads' together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
