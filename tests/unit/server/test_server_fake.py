from __future__ import annotations

import json
import math
import zlib

import numpy as np
import pytest

from ml_rag.abc import Sampling
from ml_rag.errors import EngineFailed
from ml_rag.server.catalogue import ModelEntry
from ml_rag.server.engines.fake import FakeEmbed, FakeGenerate, FakeRerank, smallest_instance


def entry(task: str, **keys) -> ModelEntry:
    return ModelEntry.model_validate({"id": "f", "task": task, "engine": "fake", "dimensions": 16, **keys})


def never() -> bool:
    return False


def test_embedding_by_hand() -> None:
    vectors = FakeEmbed(entry("embed")).embed(["Red red blue", "!?"], never)
    expected = np.zeros(16)
    expected[zlib.crc32(b"red") % 16] += 2
    expected[zlib.crc32(b"blue") % 16] += 1
    assert vectors.dtype == np.float32
    assert np.allclose(vectors[0], expected / math.sqrt((expected**2).sum()))
    assert vectors[1].tolist() == [1.0] + [0.0] * 15


def test_words_past_the_limit_are_cut() -> None:
    engine = FakeEmbed(entry("embed", max_tokens=2))
    assert (engine.embed(["a b c"], never) == engine.embed(["a b"], never)).all()


def say(text: str, sampling: Sampling | None = None, **keys) -> tuple[str, str | None, int | None]:
    deltas = list(
        FakeGenerate(entry("generate", **keys)).generate(
            [{"role": "user", "content": text}], sampling or Sampling(), never
        )
    )
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return "".join(delta.text for delta in deltas), deltas[-1].finish_reason, deltas[-1].completion_tokens


def test_generation_by_hand() -> None:
    assert say("why?") == ("fake answer to: why? [documents: 0]", "stop", 6)
    fenced = '<document number="1" name="a">\nx\n</document>\n\n<document number="2" name="b">\ny\n</document>\n\n'
    for shortly in ("", "shortly "):
        asked = f"{fenced}Answer this question, from the documents above: why?\nAnswer {shortly}in German."
        assert say(asked)[0] == "fake answer to: why? [documents: 2]"


def test_generation_obeys_max_tokens_and_stop() -> None:
    assert say("why?", Sampling(max_tokens=2)) == ("fake answer", "length", 2)
    assert say("why?", Sampling(stop=(" why",))) == ("fake answer to:", "stop", 3)


def test_slow_generation_fills_max_tokens() -> None:
    text, reason, count = say("a", Sampling(max_tokens=20), fake_mode="slow", fake_delay_seconds=0.001)
    assert (len(text.split()), reason, count) == (20, "length", 20)
    assert text.startswith("fake answer to: a [documents: 0] fake answer")


def test_cancelled_generation_stops_within_a_token() -> None:
    given = []
    engine = FakeGenerate(entry("generate", fake_mode="slow", fake_delay_seconds=0.001))
    messages = [{"role": "user", "content": "a"}]
    for delta in engine.generate(messages, Sampling(), lambda: len(given) >= 3):
        given.append(delta)
    assert len(given) == 3


def test_failing_models_fail() -> None:
    assert np.isnan(FakeEmbed(entry("embed", fake_mode="nan")).embed(["a"], never)).all()
    assert FakeEmbed(entry("embed", fake_mode="short")).embed(["a"], never).shape == (1, 15)
    with pytest.raises(EngineFailed):
        say("why?", fake_mode="error")


def test_json_schema_gets_its_smallest_instance() -> None:
    schema = {
        "type": "object",
        "required": ["name", "kind", "count", "tags", "inner"],
        "properties": {
            "name": {"type": "string", "minLength": 2},
            "kind": {"enum": ["a", "b"]},
            "count": {"type": "integer", "minimum": 3},
            "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
            "inner": {"$ref": "#/$defs/inner"},
            "left_out": {"type": "string"},
        },
        "$defs": {"inner": {"anyOf": [{"const": 7}, {"type": "null"}]}},
    }
    expected = {"name": "xx", "kind": "a", "count": 3, "tags": [False], "inner": 7}
    assert smallest_instance(schema, schema) == expected
    assert json.loads(say("x", Sampling(json_schema=schema))[0]) == expected


def test_rerank_is_the_share_of_query_words() -> None:
    scores = FakeRerank(entry("rerank")).rerank("Red blue", ["red", "blue, RED", "green"], never)
    assert scores.tolist() == [0.5, 1.0, 0.0]
