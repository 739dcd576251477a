"""For tests: a model server in a process of its own, and an endpoint that answers as it is told.

``with running_server(fake_models=True) as server: …``, ``with scripted_endpoint(answer) as url: …``
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ml_rag


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A model server that answers. ``url`` is set when it listens on TCP (``http://127.0.0.1:port``)."""

    socket: Path
    url: str | None
    process: subprocess.Popen[str]
    log_path: Path

    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text()

    def stop(self, seconds: float = 10.0) -> int:
        """SIGTERM, and its exit status. Raises ``subprocess.TimeoutExpired``."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running_server(
    *,
    fake_models: bool = True,
    tcp: bool = False,
    config: str | None = None,
    models_dir: Path | None = None,
    socket: Path | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    ready_seconds: float = 60.0,
    prefix: Sequence[str] = (),
) -> Iterator[RunningServer]:
    """Start ``ml-rag serve`` and wait for its ready line; stop it at the end of the block.

    ``config``: content of its TOML file. ``socket``: its path (default: in a temporary folder of its own); a socket
    given here can be used again after a stop. ``prefix``: words before the command, such as a program that sets limits
    and then becomes what it is told. Raises ``RuntimeError`` with the log when it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="ml_rag_") as folder:
        path = socket or Path(folder) / "ml_rag.sock"
        log_path = Path(folder) / "server.log"
        config_path = Path(folder) / "ml_rag.toml"
        config_path.write_text(config or "")
        command = [sys.executable, "-m", "ml_rag.cli", "serve", "--socket", str(path), "--config", str(config_path)]
        command += ["--models-dir", str(models_dir)] if models_dir else []
        command += ["--fake-models"] if fake_models else []
        command += ["--listen", "127.0.0.1:0"] if tcp else []
        package_root = str(Path(ml_rag.__file__).resolve().parents[1])
        inherited = {name: value for name, value in os.environ.items() if name != "ML_RAG_FAKE_MODELS"}
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [*prefix, *command, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**inherited, **(environment or {})},
            )
        assert process.stdout is not None
        try:
            line = _ready_line(process, ready_seconds)
            if " ready on " not in line:
                process.kill()
                process.wait()
                raise RuntimeError(f"the model server did not start: {line}{log_path.read_text()}")
            url = next((word for word in line.split() if word.startswith("http://")), None)
            yield RunningServer(path, url, process, log_path)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            process.stdout.close()


def _ready_line(process: subprocess.Popen[str], seconds: float) -> str:
    end = time.monotonic() + seconds
    assert process.stdout is not None
    while time.monotonic() < end:
        if select.select([process.stdout], [], [], 0.1)[0]:
            return process.stdout.readline()
        if process.poll() is not None:
            break
    return ""


@contextlib.contextmanager
def scripted_endpoint(answer: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """The base URL of an OpenAI-compatible endpoint on a free port; ``answer`` gives the text of each chat completion.

    It is called with the body of the request, in a thread of the request's own. Tokens are counted as words.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = answer(body)
            asked = sum(len(_text(message["content"]).split()) for message in body["messages"])
            usage = {"prompt_tokens": asked, "completion_tokens": len(text.split())}
            events = [
                {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]},
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
                {"choices": [], "usage": usage},
            ]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for event in events:
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def remote_model(id_: str, url: str, **settings: Any) -> str:
    """The part of a server's TOML file that makes an endpoint a generation model. ``settings``: values as in JSON."""
    more = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    return f'[models.{id_}]\ntask = "generate"\nengine = "openai"\nbase_url = "{url}"\n{more}'
