"""The backend's client of the model server without PostgreSQL; import the fixtures by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ml_rag.backend.client import ModelServer
from support.hostile_server import HostileServer, hostile


class Interrupted(Exception):
    """What PostgreSQL raises when a statement is to end."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HostileServer]]:
    with contextlib.ExitStack() as stack:
        yield lambda handler, name=None: stack.enter_context(hostile(tmp_path, handler, name))


_open: list[ModelServer] = []


def connect(address: str, interrupt: Callable[[], object]) -> ModelServer:
    _open.append(ModelServer(address, interrupt))
    return _open[-1]


@pytest.fixture(autouse=True)
def close_connections() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def never() -> None:
    """No interrupt."""


def after(seconds: float) -> Callable[[], None]:
    end = time.monotonic() + seconds

    def interrupt() -> None:
        if time.monotonic() > end:
            raise Interrupted

    return interrupt
