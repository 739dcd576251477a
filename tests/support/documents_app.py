"""The application in a thread, for tests of ``POST /v1/documents``; import the fixture by name."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from ml_rag.ingest.sandbox import Limits, Sandbox
from ml_rag.server.app import create_app
from ml_rag.server.catalogue import load_catalogue
from ml_rag.server.engines.fake import FakeEmbed
from ml_rag.server.registry import Registry
from support.sandboxing import TESTS

#: ``unlucky`` fails for a batch with the word "unlucky" in it; see ``server``
CONFIG = """
[server]
max_document_body_bytes = 2000000
[models.nan]
task = "embed"
engine = "fake"
fake_mode = "nan"
[models.broken]
task = "embed"
engine = "fake"
fake_mode = "error"
[models.slow]
task = "embed"
engine = "fake"
fake_mode = "slow"
fake_delay_seconds = 0.05
[models.vision]
task = "generate"
engine = "openai"
base_url = "http://127.0.0.1:9/v1"
input = ["text", "image"]
[models.prefixed]
task = "embed"
engine = "fake"
dimensions = 64
max_tokens = 32
document_prefix = "passage: "
"""


class Server:
    """The application in a thread, under uvicorn, its parser replaced by tests/support/parsers.py."""

    def __init__(self, folder: Path) -> None:
        config = folder / "ml_rag.toml"
        config.write_text(CONFIG)
        self.registry = Registry(load_catalogue(config, fake_models=True), folder)
        self.app = create_app(self.registry)
        self.sandbox = Sandbox(Limits(cpu_seconds=20, wall_seconds=40), parser="support.parsers:parse")
        self.app.state.sandbox = self.sandbox
        self.socket = folder / "s"
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, uds=str(self.socket), log_config=None, lifespan="on", ws="none")
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        end = time.monotonic() + 20
        while not self._server.started and time.monotonic() < end:
            time.sleep(0.01)
        assert self._server.started

    def stop(self) -> None:
        self.registry.unload_unused()
        self.registry._models["vision"].worker.submit(int).result(10)  # its connections are closed
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def client(self, seconds: float = 60.0) -> httpx.Client:
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://server", timeout=seconds
        )

    def post(self, files: Sequence[tuple[str, bytes]], **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/documents", **request(files, **options))


def request(files: Sequence[tuple[str, bytes]], **options: Any) -> dict[str, Any]:
    fields = {"options": json.dumps({"embed_model_id": "fake-embed", **options})}
    return {"data": fields, "files": [("file", file) for file in files]}


def lines(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text.splitlines()]


def by_index(reply: httpx.Response) -> list[dict[str, Any]]:
    """One line for each document, made of its lines, which are together."""
    found: list[dict[str, Any]] = []
    is_open = False
    for line in lines(reply):
        more = line.pop("more")
        if is_open:
            assert (line["index"], line["metadata"], line["error"]) == (found[-1]["index"], {}, None)
            found[-1]["segments"] += line["segments"]
            data = (base64.b64decode(one["embeddings"], validate=True) for one in (found[-1], line))
            found[-1]["embeddings"] = base64.b64encode(b"".join(data)).decode()
        else:
            found.append(line)
        is_open = more
    assert not is_open
    found.sort(key=lambda line: line["index"])
    assert [line["index"] for line in found] == list(range(len(found)))
    return found


def vectors(line: dict[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(line["embeddings"], validate=True), "<f4")
    return flat.reshape(len(line["segments"]), line["dimensions"])


def expected(server: Server, model: str, texts: list[str]) -> np.ndarray:
    entry = server.registry.entry(model)
    return FakeEmbed(entry).embed([entry.document_prefix + text for text in texts], lambda: False)


def assert_error(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == code
    return error


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", TESTS)
        server = Server(tmp_path_factory.mktemp("documents"))
        server.start()
        yield server
        server.stop()
