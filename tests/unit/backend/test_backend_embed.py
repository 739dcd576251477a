"""backend/embed.py with a stand-in for the model server: numbers of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from ml_rag.backend.embed import count_tokens
from ml_rag.errors import EngineFailed


class Fixed:
    """Always gives the same reply."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    def call(self, method: str, path: str, payload: Any = None) -> Any:
        assert (method, path, payload) == ("POST", "/v1/tokens", {"model": "m", "input": ["a", "b"]})
        return self._reply


@pytest.mark.parametrize("tokens", [[3, None], [0, 1], None])
def test_numbers_of_tokens(tokens: Any) -> None:
    server: Any = Fixed({"model": "m", "tokens": tokens})
    assert count_tokens(server, ["a", "b"], "m") == tokens


@pytest.mark.parametrize(
    "reply", [{"tokens": [1]}, {"tokens": [1, -1]}, {"tokens": [1, "2"]}, {"tokens": [True, 1]}, [1]]
)
def test_nonsense_is_an_error(reply: Any) -> None:
    server: Any = Fixed(reply)
    with pytest.raises(EngineFailed, match="unexpected reply"):
        count_tokens(server, ["a", "b"], "m")
