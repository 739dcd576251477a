"""backend/rerank.py with a stand-in for the model server."""

from __future__ import annotations

from typing import Any

import pytest

from ml_rag.backend import rerank as module
from ml_rag.errors import EngineFailed


class FakeServer:
    """Scores a text by its first two digits, best first."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def call(self, method: str, path: str, payload: Any = None) -> Any:
        assert (method, path) == ("POST", "/v1/rerank")
        self.sent.append(payload)
        scores = [float(text[:2]) / 100 for text in payload["documents"]]
        results = [{"index": i, "relevance_score": s} for i, s in enumerate(scores)]
        return {"results": sorted(results, key=lambda r: -r["relevance_score"])}


def test_scores_are_in_the_order_of_the_texts() -> None:
    server: Any = FakeServer()
    assert module.rerank(server, "q", ["20", "90", "50"], "m") == [0.2, 0.9, 0.5]
    assert server.sent == [{"model": "m", "query": "q", "documents": ["20", "90", "50"]}]
    assert module.rerank(server, "q", [], "m") == []
    assert len(server.sent) == 1


def test_what_one_request_cannot_hold_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_TEXTS", 3)
    monkeypatch.setattr(module, "REQUEST_CHARACTERS", 20)
    server: Any = FakeServer()
    texts = ["10", "20", "30", "40" + "x" * 17, "50", "60" + "x" * 100, "70"]
    assert module.rerank(server, "q", texts, "m") == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert [len(sent["documents"]) for sent in server.sent] == [3, 1, 1, 1, 1]


def test_nonsense_is_an_error() -> None:
    class Short:
        def call(self, method: str, path: str, payload: Any = None) -> Any:
            return {"results": [{"index": 0, "relevance_score": 0.5}]}

    server: Any = Short()
    with pytest.raises(EngineFailed) as caught:
        module.rerank(server, "q", ["a", "b"], "m")
    assert "1 scores for 2 texts" in str(caught.value.detail)
