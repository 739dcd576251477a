"""The engine ``openai`` for models of task rerank: the /rerank of Jina, Cohere, vLLM, llama-server, and of TEI."""

from __future__ import annotations

import numpy as np
import pytest

from ml_rag.errors import EngineFailed
from support.remote_endpoint import KEY, never, replies

#: what it says of another form (Text Embeddings Inference 1.9)
MISSING = "Failed to deserialize the JSON body into the target type: missing field `texts` at line 1 column 60"


def results(*scores: tuple[int, float]) -> dict:
    return {"model": "m", "results": [{"index": i, "relevance_score": s, "document": {"text": "t"}} for i, s in scores]}


def test_ranks_through_our_own_server(served, engine_for):
    engine = engine_for(f"{served.url}/v1", "rerank", remote_model="fake-rerank")
    scores = engine.rerank("red blue", ["grass", "red", "blue and red"], never)
    assert (scores.dtype, scores.tolist()) == (np.float32, [0.0, 0.5, 1.0])


def test_the_form_of_jina_cohere_and_vllm(remote, engine_for):
    remote.replies = [replies(200, results((2, 0.9), (0, 0.5), (1, 0.0)))]
    engine = engine_for(remote.url, "rerank", remote_model="jina-reranker-v2-base-multilingual")
    assert engine.rerank("q", ["a", "b", "c"], never).tolist() == pytest.approx([0.5, 0.0, 0.9])
    asked = {"model": "jina-reranker-v2-base-multilingual", "query": "q", "documents": ["a", "b", "c"], "top_n": 3}
    assert remote.requests == [{"path": "/v1/rerank", **asked}]
    assert remote.keys == [f"Bearer {KEY}"]


def test_the_form_of_text_embeddings_inference_is_found_out_once(remote, engine_for):
    remote.replies = [
        replies(422, MISSING.encode()),
        replies(200, [{"index": 1, "score": 0.75}, {"index": 0, "score": 0.25}]),
    ]
    engine = engine_for(remote.url, "rerank")
    for _ in range(2):
        assert engine.rerank("q", ["a", "b"], never).tolist() == [0.25, 0.75]
    assert [sorted(request) for request in remote.requests] == [
        ["documents", "model", "path", "query", "top_n"],
        ["path", "query", "texts", "truncate"],
        ["path", "query", "texts", "truncate"],
    ]


def test_logits_become_scores(remote, engine_for):
    remote.replies = [replies(200, results((0, 2.0), (1, -1000.0))), replies(200, results((0, 0.5), (1, 0.0)))]
    engine = engine_for(remote.url, "rerank")
    assert engine.rerank("q", ["a", "b"], never).tolist() == pytest.approx([1 / (1 + np.exp(-2)), 0])
    assert engine.rerank("q", ["a", "b"], never).tolist() == pytest.approx([1 / (1 + np.exp(-0.5)), 0.5])


@pytest.mark.parametrize(
    "reply",
    [
        {}, [], None, 7, {"results": None}, results((0, 0.5)), results((0, 0.5), (0, 0.5)), results((0, 0.5), (2, 0.5)),
        results((0, 0.5), (True, 0.5)), results((0, "0.5"), (1, 0.5)), results((0, True), (1, False)),
        results((0, None), (1, 0.5)), {"results": [{"index": 0}, {"index": 1}]}, {"results": ["a", "b"]},
        results((0, 0.1), (1, 0.2), (2, 0.3)), results((0, 10**400), (1, 0)),
    ],
    ids=repr,
)  # fmt: skip
def test_anything_else_is_nonsense(remote, engine_for, reply):
    remote.replies = [replies(200, reply)]
    with pytest.raises(EngineFailed, match="unexpected reply from the remote model"):
        engine_for(remote.url, "rerank").rerank("q", ["a", "b"], never)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
def test_numbers_that_are_none(remote, engine_for, number):
    rows = b'{"results": [{"index": 0, "relevance_score": ' + number + b'}, {"index": 1, "relevance_score": 0}]}'
    remote.replies = [replies(200, rows)]
    with pytest.raises(EngineFailed, match="unexpected reply"):
        engine_for(remote.url, "rerank").rerank("q", ["a", "b"], never)


def test_a_refusal_is_that_error_and_what_passes_is_tried_again(remote, engine_for):
    engine = engine_for(remote.url, "rerank")
    remote.replies = [replies(503, {"error": "busy"}), replies(200, results((0, 0.5)))]
    assert engine.rerank("q", ["a"], never).tolist() == [0.5]
    remote.replies = [replies(422, {"detail": "no such model"})]
    with pytest.raises(EngineFailed) as caught:
        engine.rerank("q", ["a"], never)
    assert "no such model" in (caught.value.detail or "")
    assert engine.rerank("q", ["a", "b"], lambda: True).tolist() == [0, 0]
