"""engines/llama_encoder.py and llama_tokenizer.py: GGUF models embed and rerank as the library that they come from."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ml_rag.errors import ModelUnavailable
from ml_rag.server.catalogue import ModelEntry
from ml_rag.server.engines import load_engine
from ml_rag.server.engines.llama_encoder import BATCH_TOKENS, batches
from ml_rag.server.engines.process import EngineProcess
from support import tiny_bert
from support.real_model import never

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

TEXTS = ["a b c", "", "z", "h e l l o w o r l d", "a b c d e f g h " * 12]


@pytest.fixture(scope="module")
def original() -> Any:
    return tiny_bert.make()


@pytest.fixture(scope="module")
def path(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_bert.write(original, found)
    return found


def load(path: Path, task: str, **keys: Any) -> Any:
    entry = {"id": "tiny", "engine": "llama-cpp", "sources": [{"path": str(path)}], "task": task, "threads": 1}
    return load_engine(ModelEntry.model_validate({**entry, "max_tokens": 32, **keys}), Path("/"))


@pytest.fixture(scope="module")
def embedder(path: Path) -> Iterator[EngineProcess]:
    engine = load(path, "embed")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reranker(path: Path) -> Iterator[EngineProcess]:
    engine = load(path, "rerank")
    yield engine
    engine.close()


def tokens(text: str) -> list[int]:
    return [tiny_bert.BEGIN, *tiny_bert.ids(text)[:30], tiny_bert.END]


def hidden(model: Any, row: list[int]) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return model.bert(torch.tensor([row]))[0][0].numpy()


@pytest.mark.parametrize("pooling", [None, "mean", "cls", "last"])
def test_vectors_are_those_of_torch(path: Path, original: Any, pooling: str | None) -> None:
    engine = load(path, "embed", pooling=pooling)
    found = engine.embed(TEXTS, never)
    engine.close()
    states = [hidden(original, tokens(text)) for text in TEXTS]
    pooled = {"cls": lambda state: state[0], "last": lambda state: state[-1]}.get(pooling, lambda state: state.mean(0))
    expected = np.stack([pooled(state) / np.linalg.norm(pooled(state)) for state in states])
    assert found.dtype == np.float32
    assert (found * expected).sum(axis=1).min() > 0.999
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_texts_are_cut_at_the_limit_and_their_end_is_kept(embedder: EngineProcess) -> None:
    just, past, far = (" ".join("a" * length) for length in (30, 31, 3000))
    vectors = embedder.embed([just, past, far], never)
    assert embedder.last_token_counts == [32, 32, 32]
    assert np.allclose(vectors[0], vectors[1], atol=1e-3)
    assert np.allclose(vectors[0], vectors[2], atol=1e-3)
    assert (embedder.max_tokens, embedder.dimensions) == (32, 64)


def test_a_text_has_the_same_vector_alone_and_among_others(embedder: EngineProcess) -> None:
    texts = [TEXTS[number % len(TEXTS)] for number in range(70)]
    together = embedder.embed(texts, never)
    alone = np.concatenate([embedder.embed([text], never) for text in TEXTS])
    assert np.allclose(together, alone[[number % len(TEXTS) for number in range(70)]], atol=2e-3)
    assert embedder.embed([], never).shape == (0, 64)


def test_its_tokenizer_counts_as_it_does(embedder: EngineProcess) -> None:
    tokenizer = embedder.tokenizer()
    embedder.embed(TEXTS[:4], never)
    assert [len(tokenizer.encode(text).ids) for text in TEXTS[:4]] == embedder.last_token_counts == [5, 2, 3, 12]
    assert tokenizer.encode("a b").ids == tokens("a b")
    assert embedder.tokenizer() is tokenizer


def test_a_cancelled_call_ends_and_its_process_goes_on(embedder: EngineProcess) -> None:
    pid, cancelled = embedder.pid, threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    began = time.monotonic()
    vectors = embedder.embed(["a b c d e f g h " * 12] * 3000, cancelled.is_set)
    assert not vectors[-1].any()
    assert time.monotonic() - began < 60
    assert embedder.embed(["a"], never).any()
    assert embedder.pid == pid


def test_scores_are_those_of_torch(reranker: EngineProcess, original: Any) -> None:
    import torch

    texts = ["a b c", "q", "x y z a"]
    found = reranker.rerank("q u e", texts, never)
    query = [tiny_bert.BEGIN, *tiny_bert.ids("q u e"), tiny_bert.END, tiny_bert.END]
    with torch.inference_mode():
        rows = [torch.tensor([[*query, *tiny_bert.ids(text), tiny_bert.END]]) for text in texts]
        expected = [torch.sigmoid(original(row).logits)[0, 0].item() for row in rows]
    assert np.allclose(found, expected, atol=2e-3)
    assert reranker.rerank("q", [], never).shape == (0,)


@pytest.mark.parametrize(
    ("query", "text", "kept"),
    [
        (14, 14, (14, 14)),
        (14, 15, (14, 14)),
        (20, 20, (14, 14)),
        (40, 3, (25, 3)),
        (3, 40, (3, 25)),
        (40, 40, (14, 14)),
    ],
)
def test_of_a_pair_the_longer_is_cut_first(
    reranker: EngineProcess, query: int, text: int, kept: tuple[int, int]
) -> None:
    assert np.allclose(
        reranker.rerank(" ".join("q" * query), [" ".join("t" * text)], never),
        reranker.rerank(" ".join("q" * kept[0]), [" ".join("t" * kept[1])], never),
        atol=2e-3,
    )


def test_another_model_than_the_catalogue_says_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        load(path, "embed", dimensions=65)
    assert caught.value.detail == "it has 64 dimensions, the catalogue says 65"
    three = tmp_path / "three.gguf"
    tiny_bert.write(tiny_bert.make(labels=3), three)
    with pytest.raises(ModelUnavailable, match="cannot rerank") as caught:
        load(three, "rerank")
    assert caught.value.detail == "it has 3 outputs instead of one"
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelUnavailable):
        load(damaged, "embed")


def test_batches_hold_so_many_tokens_or_one_text() -> None:
    counts = [BATCH_TOKENS, BATCH_TOKENS + 1, 1, 2, BATCH_TOKENS - 3]
    assert batches(counts) == [[1], [0], [4, 3, 2]]
    assert [len(batch) for batch in batches([1] * 70)] == [32, 32, 6]
    assert batches([]) == []
