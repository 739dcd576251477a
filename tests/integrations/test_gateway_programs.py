"""`ml-rag gateway` by programs that check its answers by schemas of their own: mk/chat_programs.sh installs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ml_rag.integrations.gateway import Config, digest
from support.cluster import Database
from support.served import gateway_of
from support.stores import create_store, fake_embedding

HERE = Path(__file__).parent / "programs"
NODE = Path(__file__).resolve().parents[2] / ".build" / "chat-programs"
PYTHONS = {"litellm_library.py": "litellm", "litellm_proxy.py": "litellm", "langchain_openai_chat.py": "chat-programs"}


def commands() -> dict[str, list[str]]:
    """Those of the programs that are installed."""
    found = {}
    for script, environment in PYTHONS.items():
        python = Path(sys.prefix) / environment / "bin" / "python"
        if python.exists():
            found[script] = [str(python), str(HERE / script)]
    if (NODE / "wanted").exists() and (node := shutil.which("node")):
        found["ai_sdk.mjs"] = [node, str(HERE / "ai_sdk.mjs"), str(NODE)]
    return found


@pytest.mark.parametrize("command", commands().values(), ids=commands().keys())
def test_a_program(db: Database, asker_dsn: str, command: list[str]) -> None:
    for name, document in (("pages", "https://example.org/boats"), ("files", "/srv/boats.pdf")):
        row = (document, 1, 1, "blue boat", fake_embedding("blue boat"))
        create_store(db.connect(), f"public.{name}", [row], "vector(16)")
    models: dict[str, Any] = {name: {"vector_store": [f"public.{name}"]} for name in ("pages", "files")}
    models["strict"] = {**models["pages"], "retrieval_options": {"max_distance": 0}, "abstain": False}
    with gateway_of(asker_dsn, Config({digest("token"): db.role("asker")}, models)) as url:
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(
            [*command, url, "token"], capture_output=True, text=True, timeout=300, check=False, env=environment
        )
    assert done.stdout.splitlines()[-1:] == ["well"], done.stdout[-2000:] + done.stderr[-3000:]
