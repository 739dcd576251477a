"""The model server where llama-cpp-python is not installed, as while it is being compiled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ml_rag.errors import ModelUnavailable
from ml_rag.server.catalogue import load_catalogue
from ml_rag.server.registry import Registry

CONFIG = """
[models.small]
task = "generate"
engine = "llama-cpp"
sources = [{ path = "small.gguf" }]
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    for name in [name for name in sys.modules if name.startswith(("llama_cpp", "ml_rag.server.engines.llama_"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    (tmp_path / "ml_rag.toml").write_text(CONFIG)
    return Registry(load_catalogue(tmp_path / "ml_rag.toml", fake_models=True), tmp_path)


async def test_a_model_says_what_is_missing_and_the_others_answer(registry: Registry) -> None:
    try:
        with pytest.raises(ModelUnavailable) as caught:
            async with registry.lease("small", "generate", lambda: False):
                pass
        error = caught.value
        assert (error.sqlstate, error.detail) == ("55000", "the package that engine llama-cpp needs is not installed")
        assert "pip install 'ml-rag[server,llama]'" in (error.hint or "")
        assert not registry.info("small").available
        assert len((await registry.embed("fake-embed", ["a"], lambda: False))[0]) == 1
    finally:
        registry.close()
