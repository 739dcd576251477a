"""`ml-rag gateway` behind Open WebUI, in its page: `make programs-test` installs it, else there is nothing to run."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ml_rag.integrations.gateway import Config, chat, digest
from ml_rag.integrations.gateway.refused import Refused
from support.cluster import Database
from support.processes import free_port, wait_until
from support.served import gateway_of
from support.servers import running_server
from support.stores import create_store, fake_embedding

playwright = pytest.importorskip("playwright.sync_api")

#: in an environment of its own (mk/large_programs.sh)
OPEN_WEBUI = Path(sys.prefix) / "open-webui" / "bin" / "open-webui"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: mk/setup.sh integrations")


#: the fake models, and one that is as small as the default model
MODELS = """
[server]
socket_mode = "0666"

[models.small]
task = "generate"
engine = "fake"
context_tokens = 4096
brief = true
"""


@pytest.fixture
def page_of(tmp_path: Path, db: Database, asker_dsn: str, reachable_dir: Path) -> Iterator[str]:
    """The address of a fresh installation, whose models are those of a gateway."""
    rows = [
        ("/srv/boats.pdf", 1, 1, "blue boat", fake_embedding("blue boat")),
        ("https://example.org/house", 2, 1, "red house", fake_embedding("red house")),
    ]
    create_store(db.connect(), "public.boats", rows, "vector(16)")
    models: dict[str, Any] = {"handbook": {"n_citations": 1}, "titles": {"model_options": {"model_id": "small"}}}
    config = Config({digest("token"): db.role("asker")}, models)
    server = reachable_dir / "open-webui.sock"
    db.connect().execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{server}",))
    port = free_port()
    with (
        running_server(socket=server, config=MODELS),
        gateway_of(asker_dsn, config) as url,
        (tmp_path / "log").open("w") as log,
    ):
        settings = {
            "DATA_DIR": str(tmp_path / "data"), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "made for a test" * 4,
            "OPENAI_API_BASE_URL": url, "OPENAI_API_KEY": "token", "ENABLE_OLLAMA_API": "False",
            "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai",
            "DEFAULT_MODELS": "handbook", "TASK_MODEL_EXTERNAL": "titles",
        }  # fmt: skip
        command = [str(OPEN_WEBUI), "serve", "--host", "127.0.0.1", "--port", str(port)]
        environment = {**os.environ, **settings}
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
        try:
            address, until = f"http://127.0.0.1:{port}", time.monotonic() + 300
            while True:
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                assert time.monotonic() < until
                try:
                    httpx.get(f"{address}/health", timeout=5).raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Model and task of each request to the gateway; no task of a question."""
    found = []
    question = chat.question

    def noted(body: Any, *others: Any) -> Any:
        result = question(body, *others)
        keys = [key for key in ("title", "tags", "follow_ups") if f'"{key}":' in result.text]
        found.append((body["model"], keys[0] if result.is_task else None))
        return result

    monkeypatch.setattr(chat, "question", noted)
    return found


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the gateway refused."""
    found = []
    made = Refused.__init__

    def noted(self: Refused, *arguments: Any) -> None:
        found.append(arguments)
        made(self, *arguments)

    monkeypatch.setattr(Refused, "__init__", noted)
    return found


def test_a_first_chat(
    asked: list[tuple[str, str | None]],
    refused: list[Any],
    page_of: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO), playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(page_of)
        page.get_by_role("button", name="Okay, Let's Go!").click()

        def ask(question: str) -> None:
            page.locator("#chat-input").click()
            page.keyboard.type(question)
            page.keyboard.press("Enter")

        ask("blue boat")
        page.get_by_text("fake answer to: blue boat").first.wait_for()
        page.get_by_text("[1] boats.pdf").first.wait_for()
        # its own prompts are answered by the model of the recipe, with nothing to show: the question is the title
        wait_until(lambda: len(asked) == 4, 60)
        tasks = [("titles", "follow_ups"), ("titles", "tags"), ("titles", "title")]
        assert sorted(asked) == [("handbook", None), *tasks]
        page.wait_for_function("document.title.startsWith('blue boat')")
        # a source with an address is a button below the answer
        ask("red house")
        page.get_by_text("fake answer to: red house").first.wait_for()
        page.get_by_role("button", name="1 Source").first.wait_for()
        page.get_by_role("button", name="Regenerate").last.click()
        page.get_by_text("Try Again").click()
        # the second of two answers
        page.get_by_text("2/2").first.wait_for()
        page.get_by_role("button", name="1 Source").first.wait_for()
        browser.close()
    assert refused == []
    assert [record.getMessage() for record in caplog.records if record.name == "ml_rag.gateway"] == []
    assert " ERROR " not in (tmp_path / "log").read_text()
