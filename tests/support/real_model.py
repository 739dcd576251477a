"""The real models: what tests need of them, and the default one that generates; import the fixtures by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ml_rag.abc import Sampling
from ml_rag.server.catalogue import UNPINNED, ModelEntry, load_catalogue, models_dir
from ml_rag.server.chat import prompt

MODEL = "smollm2-135m-instruct"


DOCUMENTS = [
    prompt.PromptDocument("handbook.docx", "Employees at Northwind get 25 vacation days a year."),
    prompt.PromptDocument("it.md", "Laptops are replaced every four years. The model server listens on a unix socket."),
]
SCHEMAS = [
    {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}}},
    {"type": "array", "items": {"type": "string", "enum": ["tea", "coffee"]}, "minItems": 2, "maxItems": 3},
    {"enum": ["yes", "no"]},
    {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False},
]


def never() -> bool:
    return False


def need_models(*model_ids: str) -> Path:
    """The folder of models that has these; skips the test where it lacks one."""
    catalogue = load_catalogue()
    folder = models_dir(catalogue)
    for model_id in model_ids:
        entry = catalogue.get(model_id)
        assert entry is not None
        if reason := entry.missing(folder):
            pytest.skip(f"{reason}; get it with: {entry.pull_command}")
    return folder


def need_own_machine() -> None:
    """Skip the test where a model server of its own could not be reached by the database."""
    if os.environ.get("ML_RAG_TEST_MODEL_SERVER"):
        pytest.skip("the database is on another machine, which cannot reach a socket of this one")


@pytest.fixture(scope="module")
def model_path() -> Path:
    folder = need_models(MODEL)
    entry = load_catalogue().get(MODEL)
    assert entry is not None
    return entry.location(folder)


def engine_of(path: Path, **settings: Any) -> Any:
    """The engine of a GGUF file, with these settings of the catalogue."""
    from ml_rag.server.engines.llama_cpp import LlamaCppEngine

    files = {path.name: UNPINNED}
    return LlamaCppEngine(ModelEntry(id="m", task="generate", engine="llama-cpp", files=files, **settings), path)


@pytest.fixture(scope="module")
def engine(model_path):
    made = engine_of(model_path, context_tokens=4096)
    yield made
    made.close()


def question(text: str, documents=DOCUMENTS) -> list[dict[str, str]]:
    return prompt.build(text, documents)


def text_of(engine, messages, sampling: Sampling | None = None) -> str:
    return "".join(delta.text for delta in engine.generate(messages, sampling or Sampling(max_tokens=64), never))
