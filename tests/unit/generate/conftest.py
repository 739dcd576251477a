"""A model server with the fake models, on a TCP port of its own, for as long as a test module runs; other fixtures."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from ml_rag.server.app import create_app
from ml_rag.server.catalogue import load_catalogue
from ml_rag.server.registry import Registry
from support.remote_endpoint import engine_for, remote

__all__ = ["engine_for", "remote"]


class Served:
    def __init__(self, registry: Registry, url: str) -> None:
        self.registry = registry
        self.url = url

    def waits_until_idle(self, seconds: float) -> bool:
        """Whether no request is left in the server within so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if all(model.leases == 0 for model in self.registry._models.values()):
                return True
            time.sleep(0.005)
        return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("models")
    config = folder / "ml_rag.toml"
    config.write_text(
        '[models.tiny-context]\ntask = "generate"\nengine = "fake"\ncontext_tokens = 100\n'
        '[models.very-slow]\ntask = "generate"\nengine = "fake"\ncontext_tokens = 4096\n'
        'fake_mode = "slow"\nfake_delay_seconds = 0.02\n'
    )
    registry = Registry(load_catalogue(config, fake_models=True), folder)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(registry), log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield Served(registry, f"http://127.0.0.1:{listener.getsockname()[1]}")
    server.should_exit = True
    thread.join(10)
    listener.close()
