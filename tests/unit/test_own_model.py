"""mk/own_model.sh: the entry of a language model of the user's, for the demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ml_rag.server.catalogue import load_catalogue

SCRIPT = Path(__file__).resolve().parents[2] / "mk" / "own_model.sh"
OTHER = '[models.mine]\ntask = "generate"\nengine = "openai"\nbase_url = "http://a/v1"\nremote_model = "x"\n'


class Ollama(BaseHTTPRequestHandler):
    """Says which models there are."""

    def do_GET(self) -> None:
        body = json.dumps({"models": [{"name": "llama3.1:8b"}, {"name": "qwen3:4b"}]}).encode()
        self.send_response(200 if self.path == "/api/tags" else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def ollama() -> Iterator[str]:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed, by which the demo asks an Ollama")
    with HTTPServer(("127.0.0.1", 0), Ollama) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def own_model(state: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    shown = {"OLLAMA_HOST": "127.0.0.1:1", **environment, "ML_RAG_STATE": str(state)}
    return subprocess.run(
        ["bash", str(SCRIPT), command], env={**os.environ, **shown}, capture_output=True, text=True, timeout=60
    )


def entry(state: Path, name: str = "house-llm") -> tuple[str | None, str | None]:
    """Address and model of an entry, as the model server reads it."""
    found = load_catalogue(state / "models.toml").get(name)
    assert found is not None
    return found.base_url, found.remote_model


def test_a_model_of_ollama(tmp_path: Path, ollama: str) -> None:
    done = own_model(tmp_path / "state", "write", OLLAMA="llama3.1:8b", OLLAMA_HOST=ollama)
    assert done.returncode == 0, done.stderr
    assert entry(tmp_path / "state") == (f"http://{ollama}/v1", "llama3.1:8b")


def test_other_entries_stay_and_the_last_model_counts(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "models.toml").write_text(OTHER)
    for model in ("first", "second"):
        assert own_model(state, "write", ENDPOINT="https://gpu.example:8000/v1", MODEL=model).returncode == 0
    assert entry(state) == ("https://gpu.example:8000/v1", "second")
    assert entry(state, "mine") == ("http://a/v1", "x")


def test_nothing_named_is_nothing_written(tmp_path: Path) -> None:
    assert own_model(tmp_path / "state", "write").returncode == 0
    assert not (tmp_path / "state" / "models.toml").exists()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"ENDPOINT": "http://a"}, "ENDPOINT needs MODEL"),
        ({"ENDPOINT": "ftp://a", "MODEL": "m"}, "begins with http"),
        ({"ENDPOINT": "http://a", "MODEL": 'm"\n[server]\nlisten = "0.0.0.0:1"\n#'}, "quotation mark"),
        ({"OLLAMA": "m"}, "no Ollama answers"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(tmp_path: Path, environment: dict[str, str], words: str) -> None:
    done = own_model(tmp_path / "state", "write", **environment)
    assert done.returncode == 3
    assert words in done.stderr
    assert not (tmp_path / "state" / "models.toml").exists()


def test_an_ollama_that_is_there_is_told_with_the_line_that_takes_it(tmp_path: Path, ollama: str) -> None:
    done = own_model(tmp_path / "state", "found", OLLAMA_HOST=ollama)
    assert "llama3.1:8b, qwen3:4b" in done.stdout
    assert done.stdout.splitlines()[-1] == "  make demo OLLAMA=llama3.1:8b"
    done = own_model(tmp_path / "state", "found")
    assert (done.returncode, done.stdout) == (0, "")
