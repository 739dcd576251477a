"""The sentence-transformers engine with the real default embedding model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ml_rag.errors import ModelUnavailable
from ml_rag.server.catalogue import ModelEntry, load_catalogue, models_dir
from ml_rag.server.engines import load_engine, onnx_embedder
from ml_rag.server.engines import sentence_transformers as engine_module
from ml_rag.server.engines.onnx_embedder import OnnxEmbedder, batches_by_length
from ml_rag.server.pins import check_pins
from support.processes import wait_until
from support.real_model import need_models, never
from support.servers import running_server

pytestmark = [
    pytest.mark.models,
    # what these libraries warn of among themselves is not ours to mend
    pytest.mark.filterwarnings("ignore"),
]

MODEL = "all_minilm_l6_v2"
TEXTS = [
    "What is AutoML?",
    "",
    "  Grüße aus Zürich — naïve façade, 東京, русский  ",
    "word " * 1000,
    "The nearest segments of each vector store are merged.",
    "a" * 5000,
    "x\ty\nz " * 40,
]


@pytest.fixture(scope="module")
def entry() -> ModelEntry:
    need_models(MODEL)
    found = load_catalogue().get(MODEL)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(entry: ModelEntry) -> Path:
    return models_dir(load_catalogue())


@pytest.fixture(scope="module")
def engine(entry: ModelEntry, folder: Path) -> Iterator[OnnxEmbedder]:
    loaded = engine_module.load(entry, folder)
    assert isinstance(loaded, OnnxEmbedder)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def original(entry: ModelEntry, folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(entry.location(folder)), device="cpu", local_files_only=True)


def test_vectors_are_those_of_sentence_transformers(engine: OnnxEmbedder, original: Any) -> None:
    expected = original.encode(TEXTS)
    found = engine.embed(TEXTS, never)
    assert found.shape == (len(TEXTS), 384)
    assert found.dtype == np.float32
    assert (found * expected).sum(axis=1).min() >= 0.9999
    assert np.abs(found - expected).max() < 1e-3
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_a_texts_vector_does_not_depend_on_its_company(engine: OnnxEmbedder) -> None:
    together = engine.embed(TEXTS, never)
    alone = np.concatenate([engine.embed([text], never) for text in TEXTS])
    assert (together * alone).sum(axis=1).min() >= 0.99999


def test_a_model_too_large_to_be_in_memory_twice(
    entry: ModelEntry, folder: Path, engine: OnnxEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_embedder, "SMALL_GRAPH", 0)
    large = engine_module.load(entry, folder)
    assert isinstance(large, OnnxEmbedder)
    assert np.abs(large.embed(TEXTS, never) - engine.embed(TEXTS, never)).max() < 1e-5
    large.close()


@pytest.mark.parametrize("crowded", [False, True])
def test_a_text_alone_gets_several_threads_where_cores_are_free(
    engine: OnnxEmbedder, monkeypatch: pytest.MonkeyPatch, crowded: bool
) -> None:
    if engine._single is None:
        pytest.skip("this machine has one core")
    before = engine.embed(["What is AutoML?"], never)
    used = []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda session, rows: (used.append(session), run(session, rows))[1])
    cores = os.cpu_count() or 1
    monkeypatch.setattr(onnx_embedder, "others_running", lambda: cores // 2 + crowded)
    assert np.allclose(engine.embed(["What is AutoML?"], never), before, atol=1e-6)
    assert used == [engine._single if crowded else engine._session]


def test_threads_of_others_are_counted() -> None:
    """This one is not; one that spins is."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        try:
            wait_until(lambda: onnx_embedder.others_running() >= 1)  # it may be held back now and then
        finally:
            busy.kill()


def test_nearness_makes_sense(engine: OnnxEmbedder) -> None:
    question, answer, other = engine.embed(
        ["How many vacation days do I get?", "Employees receive 25 days of annual leave.", "The printer is broken."],
        never,
    )
    assert question @ answer > question @ other + 0.2


def test_tokens_are_counted_and_cut(engine: OnnxEmbedder) -> None:
    engine.embed(["hello world", "word " * 1000], never)
    assert engine.last_token_counts == [4, 256]
    assert engine.max_tokens == 256
    tokenizer = engine.tokenizer()
    assert len(tokenizer.encode("hello world").ids) == 4
    assert len(tokenizer.encode("word " * 1000).ids) == 1002


def test_a_megabyte_costs_little_more_than_a_full_text(engine: OnnxEmbedder) -> None:
    def seconds(text: str) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            engine.embed([text], never)
            times.append(time.perf_counter() - began)
        return min(times)

    assert seconds("many words " * 100_000) < 3 * seconds("many words " * 200) + 0.05


def test_cancellation_is_seen_between_batches(engine: OnnxEmbedder) -> None:
    asked = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) > 2

    vectors = engine.embed(["word " * 300] * 64, cancelled)
    assert 0 < np.count_nonzero(np.linalg.norm(vectors, axis=1)) < 64


def test_batches_hold_like_lengths_within_the_bound() -> None:
    counts = [3, 256, 4, 200, 5, 2000]
    batches = batches_by_length(counts, 600)
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert batches[0] == [5]
    for batch in batches[1:]:
        assert len(batch) * max(counts[index] for index in batch) <= 600


def test_the_server_embeds_without_torch(entry: ModelEntry, folder: Path, engine: OnnxEmbedder) -> None:
    with running_server(fake_models=False, models_dir=folder) as server:
        transport = httpx.HTTPTransport(uds=str(server.socket))
        with httpx.Client(transport=transport, base_url="http://server", timeout=60) as client:
            reply = client.post("/v1/embeddings", json={"model": MODEL, "input": TEXTS}).json()
        vectors = np.array([row["embedding"] for row in reply["data"]], np.float32)
        assert (vectors * engine.embed(TEXTS, never)).sum(axis=1).min() >= 0.99999
        assert reply["usage"]["prompt_tokens"] == sum(engine.last_token_counts)
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libonnxruntime" in maps or "onnxruntime_pybind" in maps
        assert "libtorch" not in maps


def test_a_second_load_finds_the_export(entry: ModelEntry, folder: Path, engine: OnnxEmbedder) -> None:
    code = (
        "import sys; from pathlib import Path; from ml_rag.server.catalogue import load_catalogue;"
        "from ml_rag.server.engines.sentence_transformers import load;"
        f"load(load_catalogue().get({MODEL!r}), Path(sys.argv[1])).embed(['a'], lambda: False);"
        "print('torch' in sys.modules)"
    )
    source = str(Path(engine_module.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def copied(entry: ModelEntry, folder: Path, target: Path) -> Path:
    shutil.copytree(entry.location(folder), target / MODEL)
    return target


def test_damaged_weights_are_refused(entry: ModelEntry, folder: Path, tmp_path: Path) -> None:
    models = copied(entry, folder, tmp_path)
    with (models / MODEL / "model.safetensors").open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"\xff")
    with pytest.raises(ModelUnavailable, match="not the one the catalogue names"):
        check_pins(entry, models)


def test_a_catalogue_that_is_wrong_about_dimensions(entry: ModelEntry, folder: Path, engine: OnnxEmbedder) -> None:
    wrong = entry.model_copy(update={"dimensions": 768})
    with pytest.raises(ModelUnavailable) as caught:
        load_engine(wrong, folder)
    assert "384" in str(caught.value.detail)


def test_a_model_that_cannot_be_exported_runs_in_torch(
    entry: ModelEntry, folder: Path, tmp_path: Path, original: Any
) -> None:
    models = copied(entry, folder, tmp_path)
    out = models / ".onnx" / engine_module.export_key(models / MODEL, models, entry.max_tokens)
    out.mkdir(parents=True)
    (out / "export.json").write_text(json.dumps({"failed": "it is only a test"}))
    engine = engine_module.load(entry, models)
    assert isinstance(engine, engine_module.TorchEmbedder)
    assert np.allclose(engine.embed(TEXTS, never), original.encode(TEXTS), atol=1e-4)
    assert (engine.max_tokens, engine.dimensions) == (256, 384)
    assert len(engine.tokenizer().encode("word " * 1000).ids) == 1002
    engine.embed(["hello world", "word " * 1000], never)
    assert engine.last_token_counts == [4, 256]


def test_a_gpu_that_is_not_there_is_said(entry: ModelEntry, folder: Path) -> None:
    with pytest.raises(ModelUnavailable, match="cannot run on cuda:99") as caught:
        engine_module.load(entry.model_copy(update={"device": "cuda:99"}), folder)
    assert "GPU" in str(caught.value.hint)


def test_vectors_of_a_gpu_are_those_of_the_processor(entry: ModelEntry, folder: Path, original: Any) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    engine = engine_module.load(entry.model_copy(update={"device": "cuda"}), folder)
    assert isinstance(engine, engine_module.TorchEmbedder)
    texts = TEXTS * 40
    assert np.abs(engine.embed(texts, never) - original.encode(texts)).max() < 1e-5
    engine.close()


def test_a_cross_encoder_scores_between_0_and_1(entry: ModelEntry, folder: Path, tmp_path: Path) -> None:
    """A tiny one with random weights: no real cross-encoder comes by pip. Compared with the library's own answer."""
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=1
    )
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.mul_(50)
    place = tmp_path / "tiny"
    model.save_pretrained(place)
    PreTrainedTokenizerFast(
        tokenizer_file=str(entry.location(folder) / "tokenizer.json"),
        unk_token="[UNK]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        mask_token="[MASK]",
        model_max_length=128,
    ).save_pretrained(place)
    tiny = ModelEntry.model_validate(
        {"id": "tiny", "task": "rerank", "engine": "sentence-transformers", "max_tokens": 64}
    )
    reranker = engine_module.load(tiny, tmp_path)
    assert isinstance(reranker, engine_module.TorchReranker)
    texts = ["a red house", "the sea", "x " * 2000, "", *[f"text {n}" for n in range(20)]]
    scores = reranker.rerank("where is the sea?", texts, never)
    reference = CrossEncoder(str(place), device="cpu", max_length=64)
    expected = reference.predict([("where is the sea?", text) for text in texts], activation_fn=torch.nn.Sigmoid())
    assert np.allclose(scores, expected, atol=1e-4)
    assert scores.min() >= 0
    assert scores.max() <= 1
    assert np.unique(scores).size > 5
    assert not reranker.rerank("q", texts, lambda: True).any()
