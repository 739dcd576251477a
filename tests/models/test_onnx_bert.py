"""The graphs that are written without torch, held against the library's own answers: encoders with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ml_rag.errors import ModelUnavailable
from ml_rag.server.catalogue import ModelEntry
from ml_rag.server.engines import load_engine, onnx_bert, onnx_export
from ml_rag.server.engines import sentence_transformers as engine_module
from ml_rag.server.engines.onnx_embedder import OnnxEmbedder

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

WORDS = ["<s>", "<pad>", "</s>", "<unk>", "sea", "house", "red", "where", "is", "the", "a"]
TEXTS = ["where is the sea", "", "a red house " * 30, "house", "unknown words here"]


def make(folder: Path, *, pooling: str = "mean", normalize: bool = True, **changes: Any) -> Path:
    """A sentence encoder of two layers, as sentence-transformers saves one."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    settings = {
        "model_type": "bert",
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "type_vocab_size": 2,
        "pad_token_id": 1,
        "initializer_range": 0.4,
    } | changes
    torch.manual_seed(7)
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    inner = folder / "inner"
    AutoModel.from_config(AutoConfig.for_model(**settings)).eval().save_pretrained(inner)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(inner)
    modules = [Transformer(str(inner), max_seq_length=24), Pooling(32, pooling_mode=pooling)]
    model = SentenceTransformer(modules=[*modules, Normalize()] if normalize else modules, device="cpu")
    model.save(str(folder / "encoder"))
    return folder / "encoder"


def original(place: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(place), device="cpu", local_files_only=True).encode(TEXTS)


def entry(**changes: Any) -> ModelEntry:
    return ModelEntry.model_validate(
        {"id": "encoder", "task": "embed", "engine": "sentence-transformers", "dimensions": 32} | changes
    )


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"pooling": "cls"},
        {"normalize": False},
        {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "model_type": "xlm-roberta"},
        {"type_vocab_size": 1, "model_type": "roberta", "pooling": "cls", "pad_token_id": 1},
    ],
    ids=str,
)
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, kind: dict[str, Any]) -> None:
    place = make(tmp_path, **kind)
    facts = onnx_export.export(place, tmp_path, None)
    assert facts == {"max_tokens": 24, "pad_id": 1}  # without a cosine: it was not torch
    engine = OnnxEmbedder(tmp_path / "model.onnx", place / "tokenizer.json", **facts)
    expected = original(place)
    assert np.allclose(engine.embed(TEXTS, lambda: False), expected, atol=1e-5)
    alone = np.concatenate([engine.embed([text], lambda: False) for text in TEXTS])
    assert np.allclose(alone, expected, atol=1e-5)
    assert np.abs(expected[0] - expected[3]).max() > 0.05  # the texts differ
    engine.close()


def test_a_longest_text_of_the_catalogue(tmp_path: Path) -> None:
    make(tmp_path)
    assert onnx_export.export(tmp_path / "encoder", tmp_path, 12)["max_tokens"] == 12


DISTILBERT = {"model_type": "distilbert", "dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48}


@pytest.mark.parametrize("kind", [{"pooling": "max"}, {"hidden_act": "relu"}, DISTILBERT], ids=str)
def test_what_it_does_not_know_is_said(tmp_path: Path, kind: dict[str, Any]) -> None:
    place = make(tmp_path, **kind)
    with pytest.raises(onnx_bert.Unsupported):
        onnx_bert.read(place)


def test_another_encoder_is_exported_by_torch(tmp_path: Path) -> None:
    place = make(tmp_path, **DISTILBERT)
    engine = engine_module.load(entry(), tmp_path)
    assert isinstance(engine, OnnxEmbedder)
    assert np.allclose(engine.embed(TEXTS, lambda: False), original(place), atol=1e-4)
    engine.close()


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written here works, what only torch can do names the extra, and is done once torch is there."""
    make(tmp_path)
    hidden = tmp_path / "hidden"
    for package in ("torch", "sentence_transformers", "transformers"):
        (hidden / package).mkdir(parents=True)
        (hidden / package / "__init__.py").write_text(
            f"raise ModuleNotFoundError('No module named {package}', name='{package}')"
        )
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{hidden}:{Path(engine_module.__file__).parents[3]}")
        for name in [name for name in sys.modules if name.partition(".")[0] == "sentence_transformers"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "sentence_transformers", None)
        load_engine(entry(), tmp_path).close()
        config = tmp_path / "encoder" / "1_Pooling" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pooling_mode": "max"}))
        with pytest.raises(ModelUnavailable) as caught:
            load_engine(entry(), tmp_path)
        assert caught.value.detail == "the package that engine sentence-transformers needs is not installed"
        assert "Install what runs such models: pip install 'ml-rag[server,torch]'" in (caught.value.hint or "")
        reranker = ModelEntry.model_validate({"id": "encoder", "task": "rerank", "engine": "sentence-transformers"})
        with pytest.raises(ModelUnavailable):
            load_engine(reranker, tmp_path)
    assert np.allclose(
        load_engine(entry(), tmp_path).embed(TEXTS, lambda: False), original(tmp_path / "encoder"), atol=1e-4
    )


def test_the_writer_imports_no_torch() -> None:
    code = "import sys; from ml_rag.server.engines import onnx_bert, onnx_export; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("damage", ["no weights", "a layer is missing"])
def test_weights_that_do_not_fit(tmp_path: Path, damage: str) -> None:
    place = make(tmp_path)
    encoder = onnx_bert.read(place)
    if damage == "no weights":
        (place / "model.safetensors").unlink()
    else:
        encoder.config["num_hidden_layers"] = 3
    with pytest.raises(onnx_bert.Unsupported):
        onnx_bert.write(place, encoder)
