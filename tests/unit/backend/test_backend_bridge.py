"""backend/bridge.py, embed.py, generate.py with a stand-in for plpy."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_rag.backend import bridge
from ml_rag.backend import embed as backend_embed
from ml_rag.backend import generate as backend_generate
from ml_rag.errors import EngineFailed, MlRagError, ModelUnavailable, from_json


class FakePlpy:
    """As much of plpy as the bridge touches."""

    class SPIError(Exception):
        sqlstate = "57014"

    class Error(Exception):
        sqlstate = "57014"

    @staticmethod
    def execute(_: str) -> list[dict[str, str]]:
        """The encoding of the database."""
        return [{"name": "UTF8"}]


class FakeServer:
    def __init__(self, reply: Any) -> None:
        self.reply = reply
        self.sent: Any = None

    def call(self, method: str, path: str, payload: Any = None) -> Any:
        self.sent = payload
        return self.reply


def outcome_of(error: Exception) -> Any:
    @bridge.outcome
    def fail(plpy: Any) -> None:
        raise error

    result, text = fail(FakePlpy)
    assert result is None
    assert text is not None
    return json.loads(text)


def test_an_error_of_ours_becomes_a_value() -> None:
    assert outcome_of(ModelUnavailable("m", detail="d", hint="h")) == {
        "sqlstate": "55000",
        "message": "m",
        "detail": "d",
        "hint": "h",
    }


@pytest.mark.parametrize("raised", [FakePlpy.SPIError, FakePlpy.Error])
def test_postgresqls_own_error_keeps_its_sqlstate(raised: type[Exception]) -> None:
    assert outcome_of(raised("canceling")) == {"sqlstate": "57014", "message": "canceling"}


def test_a_defect_is_not_xx000() -> None:
    error = outcome_of(ZeroDivisionError("oops"))
    assert error["sqlstate"] == "38000"
    assert re.fullmatch(r"ZeroDivisionError, test_backend_bridge\.py line \d+\.", error["detail"])


def test_a_result_comes_through() -> None:
    assert bridge.outcome(lambda plpy, x: x + 1)(FakePlpy, 1) == (2, None)


@given(st.text(st.characters()), st.text(st.sampled_from("\\u0\x00a\ud800\ude00")))
def test_every_text_becomes_one_that_postgresql_takes(a: str, b: str) -> None:
    for text in (a, b, a + b):
        written = bridge.as_jsonb({text: [text]})
        written.encode("utf-8")
        parsed = json.loads(written)
        expected = text.replace("\x00", "").encode("utf-8", "replace").decode()
        assert parsed == {expected: [expected]}


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], {"a": math.nan}])
def test_numbers_that_json_has_not(value: Any) -> None:
    with pytest.raises(EngineFailed):
        bridge.as_jsonb(value)


def test_embeddings_come_in_the_order_of_the_texts() -> None:
    data = [{"index": 2, "embedding": "[3]"}, {"index": 0, "embedding": "[1]"}]
    server = FakeServer({"data": [*data, {"index": 1, "embedding": "[2]"}]})
    assert backend_embed.embed(server, ["a", "b", "c"], "m") == ["[1]", "[2]", "[3]"]  # type: ignore[arg-type]
    sent = {"model": "m", "input": ["a", "b", "c"], "encoding_format": "text"}
    assert {key: value for key, value in server.sent.items() if value is not None} == sent


@pytest.mark.parametrize("indexes", [[0, 0], [0, 2], [1, 2], [0], [0, 1, 2], [0, 1, 1], [0, "1"], [0, None]])
def test_one_embedding_for_each_text(indexes: list[Any]) -> None:
    server = FakeServer({"data": [{"index": i, "embedding": "[1]"} for i in indexes]})
    with pytest.raises(EngineFailed):
        backend_embed.embed(server, ["a", "b"], "m")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "vectors",
    [
        [None],
        [[0.5]],
        [""],
        ["[]"],
        ["[1,2]", "[1]"],
        ["[nan]"],
        ["[1,inf]"],
        ["[NaN]"],
        ["[null]"],
        ["[1]]"],
        ["[1]\n"],
        ["[1_0]"],
        ["[0x1]"],
        ["[\u0661]"],
        ["[\ud800]"],
        ["[" + ",".join(["0.5"] * 16001) + "]"],
    ],
    ids=lambda vectors: str(vectors)[:20],
)
def test_vectors_that_are_none(vectors: Any) -> None:
    with pytest.raises(EngineFailed):
        backend_embed.check(vectors)


def test_the_largest_vector_passes() -> None:
    backend_embed.check(["[" + ",".join(["0.5"] * 16000) + "]"] * 2)
    backend_embed.check([])


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_every_vector_that_the_server_writes_passes_and_is_exact(numbers: list[float]) -> None:
    text = orjson.dumps(np.array(numbers, np.float32), option=orjson.OPT_SERIALIZE_NUMPY).decode()
    backend_embed.check([text])
    # as pgvector reads it: each number as the float32 nearest to its text
    assert np.array(text.strip("[]").split(","), np.float32).tolist() == numbers


def test_generation_request() -> None:
    server = FakeServer({"choices": [{"message": {"content": "text"}}], "ml_rag": {"documents_given": 2}})
    request = {"prompt": "p", "documents": [{"text": "x"}], "options": {"model_id": "m", "stop_sequences": ["s"]}}
    assert backend_generate.generate(server, request) == {  # type: ignore[arg-type]
        "text": "text",
        "documents_given": 2,
        "documents_used": None,
        "support": None,
        "min_support": None,
        "prompt_tokens": None,
        "generated_tokens": None,
        "finish_reason": None,
        "prompt": None,
    }
    assert server.sent == {
        "model": "m",
        "stop": ["s"],
        "messages": [{"role": "user", "content": "p"}],
        "documents": [{"text": "x"}],
    }


@pytest.mark.parametrize(
    "counts", [{"documents_used": "1"}, {"documents_used": 2**31}, {"documents_given": -1}, {"support": "1"}, [1]]
)
def test_counts_that_are_none(counts: Any) -> None:
    server = FakeServer({"choices": [{"message": {"content": "text"}}], "ml_rag": counts})
    with pytest.raises(EngineFailed):
        backend_generate.generate(server, {"prompt": "p", "options": {}})  # type: ignore[arg-type]


def test_every_error_survives_the_way_over_http() -> None:
    def classes(cls: type[MlRagError]) -> list[type[MlRagError]]:
        return [cls, *(c for sub in cls.__subclasses__() for c in classes(sub))]

    for cls in classes(MlRagError):
        if not cls.__module__.startswith("ml_rag.errors"):
            continue
        error = from_json(cls("message", detail="d", hint="h").to_json(), cls.status)
        assert error.sqlstate == cls.sqlstate
        assert (error.message, error.detail, error.hint) == ("message", "d", "h")
