"""Grammars of JSON schemas: what is made of large ones, and what is refused while it is made."""

from __future__ import annotations

from typing import Any

import pytest

from ml_rag.errors import InvalidRequest
from ml_rag.server.engines.llama_grammar import MAX_CHARACTERS, MAX_VISITS, json_grammar
from support.hostile_schemas import LATE


def referring(times: int) -> dict[str, Any]:
    """Names of the converter's own rules are visited again at each reference."""
    return {
        "properties": {f"p{i}": {"$ref": "#/$defs/dot"} for i in range(times)},
        "required": [f"p{i}" for i in range(times)],
        "$defs": {"dot": {"properties": {str(i): {"type": "null"} for i in range(99)}}},
    }


def test_references_are_followed_so_often() -> None:
    assert json_grammar(referring(90))
    for schema in (referring(100), LATE["references that double"]):
        with pytest.raises(InvalidRequest) as caught:
            json_grammar(schema)
        assert str(MAX_VISITS) in str(caught.value.detail)


def named(length: int) -> dict[str, Any]:
    return {"properties": {"n" * length: {"type": "array", "items": {"enum": [1]}, "maxItems": 500}}}


def test_a_grammar_may_have_so_many_characters() -> None:
    assert 0.8 * MAX_CHARACTERS < len(json_grammar(named(1900))) < MAX_CHARACTERS
    with pytest.raises(InvalidRequest) as caught:
        json_grammar(named(2200))
    assert str(MAX_CHARACTERS) in str(caught.value.detail)


def test_many_optional_properties() -> None:
    assert json_grammar({"properties": {f"p{i}": {"type": "integer"} for i in range(200)}})
