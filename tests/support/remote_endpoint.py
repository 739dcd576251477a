"""An OpenAI-compatible endpoint whose every reply a test scripts, and the engine ``openai`` that asks it.

Import the fixtures by name.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ml_rag.abc import Sampling
from ml_rag.server.catalogue import ModelEntry
from ml_rag.server.engines import openai_endpoint as endpoint_module
from ml_rag.server.engines.openai import load

KEY = "sk-very-secret-0123456789"
QUESTION = [{"role": "user", "content": "What is AutoML?"}]


def never() -> bool:
    return False


class RemoteEndpoint:
    """An endpoint whose behaviour each test scripts: one reply a request, the last one for all that follow."""

    def __init__(self) -> None:
        self.replies: list[Callable[[BaseHTTPRequestHandler], None]] = []
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.headers: list[Message] = []
        self.broken_pipes = 0
        remote = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                remote.requests.append({"path": self.path, **body})
                remote.keys.append(self.headers["Authorization"])
                remote.headers.append(self.headers)
                reply = remote.replies.pop(0) if len(remote.replies) > 1 else remote.replies[0]
                self.close_connection = True
                try:
                    reply(self)
                except (BrokenPipeError, ConnectionResetError):
                    remote.broken_pipes += 1

            def log_message(self, *arguments) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


def replies(status: int, body: object, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        # said as well as done, or the client may reuse the connection in the moment before it is closed
        for name, value in {"Content-Length": str(len(data)), "Connection": "close", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return reply


def streams(*chunks: object, pause: float = 0.0) -> Callable[[BaseHTTPRequestHandler], None]:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        for chunk in chunks:
            data = chunk if isinstance(chunk, str) else json.dumps(chunk)
            handler.wfile.write(f"data: {data}\n\n".encode())
            handler.wfile.flush()
            time.sleep(pause)

    return reply


def piece(text: str, finish: str | None = None) -> dict:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


def endless(start: bytes, piece: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """As much as the client takes, up to 1 GiB."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(start)
        for _ in range((1 << 30) // len(piece)):
            handler.wfile.write(piece)
        raise AssertionError("the client has taken all of it")

    return reply


@pytest.fixture
def remote() -> Iterator[RemoteEndpoint]:
    made = RemoteEndpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def engine_for(monkeypatch) -> Iterator[Callable]:
    monkeypatch.setenv("TEST_REMOTE_KEY", KEY)
    monkeypatch.setattr(endpoint_module, "_backoff", lambda state: 0.01)
    made = []

    def make(url: str, task: str, **fields):
        entry = ModelEntry.model_validate(
            {"id": "m", "task": task, "engine": "openai", "base_url": url, "api_key_env": "TEST_REMOTE_KEY", **fields}
        )
        made.append(load(entry, Path()))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def text_of(engine, sampling: Sampling = Sampling()) -> str:  # noqa: B008
    return "".join(delta.text for delta in engine.generate(QUESTION, sampling, never))
