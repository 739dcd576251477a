"""`ml-rag gateway` behind Open WebUI, in its page: `make programs-test` installs it, else there is nothing to run."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ml_rag.integrations.gateway import Config, digest
from support.cluster import Database
from support.served import gateway_of
from support.stores import create_store, fake_embedding

playwright = pytest.importorskip("playwright.sync_api")

#: in an environment of its own (mk/large_programs.sh)
OPEN_WEBUI = Path(sys.prefix) / "open-webui" / "bin" / "open-webui"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: mk/setup.sh integrations")


@pytest.fixture
def page_of(tmp_path: Path, db: Database, asker_dsn: str) -> Iterator[str]:
    """The address of a fresh installation, whose models are those of a gateway."""
    rows = [
        ("/srv/boats.pdf", 1, 1, "blue boat", fake_embedding("blue boat")),
        ("https://example.org/house", 2, 1, "red house", fake_embedding("red house")),
    ]
    create_store(db.connect(), "public.boats", rows, "vector(16)")
    config = Config({digest("token"): db.role("asker")}, {"handbook": {"n_citations": 1}})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with gateway_of(asker_dsn, config) as url, (tmp_path / "log").open("w") as log:
        settings = {
            "DATA_DIR": str(tmp_path / "data"), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "made for a test" * 4,
            "OPENAI_API_BASE_URL": url, "OPENAI_API_KEY": "token", "ENABLE_OLLAMA_API": "False",
            "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai",
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


def test_a_first_chat(page_of: str, caplog: pytest.LogCaptureFixture) -> None:
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
    assert [record.getMessage() for record in caplog.records if record.name == "ml_rag.gateway"] == []
