"""JSON of a schema by the real model."""

from __future__ import annotations

import json

import pytest

from ml_rag.abc import Sampling
from ml_rag.errors import InvalidRequest
from support.real_model import SCHEMAS, engine, model_path, never, question, text_of

__all__ = ["engine", "model_path"]

pytestmark = pytest.mark.models


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_of_a_schema(engine, schema, temperature):
    sampling = Sampling(max_tokens=150, temperature=temperature, seed=1, json_schema=schema)
    deltas = list(engine.generate(question("How many vacation days?"), sampling, never))
    text = "".join(delta.text for delta in deltas)
    assert deltas[-1].finish_reason == "stop"
    value = json.loads(text)
    if "enum" in schema:
        assert value in schema["enum"]
    elif schema["type"] == "array":
        assert 2 <= len(value) <= 3
        assert set(value) <= {"tea", "coffee"}
    else:
        assert set(schema.get("required", ())) <= set(value)
        types = {"string": str, "integer": int, "boolean": bool}
        for key, rule in schema["properties"].items():
            assert key not in value or type(value[key]) is types[rule["type"]]


def test_json_that_max_tokens_cuts_says_so(engine):
    sampling = Sampling(max_tokens=3, json_schema={"type": "array", "items": {"type": "integer"}, "minItems": 50})
    assert list(engine.generate(question("Count."), sampling, never))[-1].finish_reason == "length"


def test_strings_of_json_have_no_raw_line_breaks():
    from ml_rag.server.engines.llama_grammar import json_grammar

    rule = next(line for line in json_grammar({"type": "string"}).splitlines() if line.startswith("char ::="))
    assert r"\x00-\x1F" in rule


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "https://example.invalid/x"}, {"$ref": "#/definitions/none"}, {"type": "nonsense"}, {"pattern": 5}],
)
def test_a_schema_that_cannot_be_a_grammar(engine, schema):
    with pytest.raises(InvalidRequest, match="json_schema"):
        text_of(engine, question("x"), Sampling(json_schema=schema))


@pytest.mark.parametrize("text", ["\\ud83d\\ude42", '\\\\🙂"\\', "\ud7ff\ue000🙂🙃"])
def test_constants_of_a_schema_come_out_as_they_are(engine, text):
    assert json.loads(text_of(engine, question("x"), Sampling(max_tokens=120, json_schema={"const": text}))) == text
