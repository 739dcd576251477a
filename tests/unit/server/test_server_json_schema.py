"""server/json_schema.py: each limit of a JSON schema, and just past it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

import httpx
import pytest

from ml_rag.errors import InvalidRequest
from ml_rag.server.json_schema import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_PATTERN,
    MAX_REPETITIONS,
    MAX_REPETITIONS_NESTED,
    MAX_REPETITIONS_TOGETHER,
    MAX_VALUES,
    check_repetitions,
    check_size,
)
from support.servers import running_server


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def arrays(*most: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for count in most:
        schema = {"type": "array", "items": schema, "maxItems": count}
    return schema


def strings(number: int, most: int) -> dict[str, Any]:
    return {"properties": {f"p{i}": {"type": "string", "maxLength": most} for i in range(number)}}


def chain(links: int) -> dict[str, Any]:
    """Definitions that each repeat the next one ten times."""
    definitions: dict[str, Any] = {f"d{i}": arrays(10) | {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{links}": {"type": "integer"}}}


def text(length: int) -> dict[str, Any]:
    return {"const": "x" * (length - len(json.dumps({"const": ""})))}


@pytest.mark.parametrize(
    ("fits", "exceeds", "limit"),
    [
        (text(MAX_BYTES), text(MAX_BYTES + 1), MAX_BYTES),
        (deep(MAX_DEPTH), deep(MAX_DEPTH + 1), MAX_DEPTH),
        ({"enum": list(range(MAX_VALUES - 1))}, {"enum": list(range(MAX_VALUES))}, MAX_VALUES),
        (
            {"properties": {f"p{i}": True for i in range(MAX_VALUES - 1)}},
            {"properties": {f"p{i}": True for i in range(MAX_VALUES)}},
            MAX_VALUES,
        ),
        ({"anyOf": [{}] * (MAX_VALUES - 1)}, {"anyOf": [{}] * MAX_VALUES}, MAX_VALUES),
    ],
)
def test_the_size(fits: dict[str, Any], exceeds: dict[str, Any], limit: int) -> None:
    check_size(fits)
    with pytest.raises(InvalidRequest, match="json_schema is too complex") as caught:
        check_size(exceeds)
    assert str(limit) in str(caught.value.detail)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_json_has_not(number: float) -> None:
    with pytest.raises(InvalidRequest, match="too complex"):
        check_size({"properties": {"a": {"minimum": number}}})


_MOST = MAX_REPETITIONS


@pytest.mark.parametrize(
    ("fits", "exceeds", "limit"),
    [
        *(
            ({key: _MOST}, {key: _MOST + 1}, _MOST)
            for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
        ),
        ({"maxLength": 0}, {"maxLength": -1}, _MOST),
        ({"maxLength": 3}, {"maxLength": 3.5}, _MOST),
        ({"maxLength": 3}, {"maxLength": True}, _MOST),
        ({"maxLength": 3}, {"maxLength": "3"}, _MOST),
        ({"maxLength": 3}, {"maxLength": None}, _MOST),
        ({"maxLength": 3}, {"maxLength": 10**1000}, _MOST),
        ({"properties": {"maxLength": {"maxLength": 3}}}, {"properties": {"maxLength": {"maxLength": 9999}}}, _MOST),
        (strings(10, _MOST), strings(11, _MOST), MAX_REPETITIONS_TOGETHER),
        (arrays(100, 100, 100), arrays(100, 100, 101), MAX_REPETITIONS_NESTED),
        (chain(6), chain(7), MAX_REPETITIONS_NESTED),
        ({"pattern": f"^x{{{_MOST}}}$"}, {"pattern": f"^x{{{_MOST + 1}}}$"}, _MOST),
        ({"pattern": f"^x{{0,{_MOST}}}$"}, {"pattern": f"^x{{0,{_MOST + 1}}}$"}, _MOST),
        ({"pattern": f"^x{{{_MOST},}}$"}, {"pattern": f"^x{{{_MOST + 1},}}$"}, _MOST),
        ({"pattern": "^x{1}$"}, {"pattern": "^x{99999999999999999999}$"}, _MOST),
        ({"pattern": "^([a-z]{44}){45}$"}, {"pattern": "^([a-z]{45}){45}$"}, MAX_PATTERN),
        ({"pattern": "^(a|b{998})|c{998}$"}, {"pattern": "^(a|b{1000})|c{1000}$"}, MAX_PATTERN),
        ({"pattern": "^((x{10}y){10}z){10}$"}, {"pattern": "^((x{20}y){10}z){10}$"}, MAX_PATTERN),
        ({"pattern": r"^\({9}[)(]{9}$"}, {"pattern": r"^(\({45}[)(]{9}){45}$"}, MAX_PATTERN),
    ],
)
def test_repetitions(fits: dict[str, Any], exceeds: dict[str, Any], limit: int) -> None:
    check_repetitions(fits)
    with pytest.raises(InvalidRequest, match="json_schema is too complex") as caught:
        check_repetitions(exceeds)
    assert str(limit) in str(caught.value.detail)
    assert len(str(caught.value.detail)) < 200


@pytest.mark.parametrize(
    "pattern",
    [
        "^(a?){2}$",
        "^(a*)*$",
        "^(a*)+$",
        "^(a?b?){0,9}$",
        "^(ab|c?)*$",
        "^(|a)*$",
        "^(a{0,9}){0,9}$",
        "^(()a?)*$",
        "^x?*$",
    ],
)
def test_what_may_be_empty_is_not_repeated(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_repetitions({"pattern": pattern})
    assert "may be empty" in str(caught.value.detail)


@pytest.mark.parametrize(
    "pattern",
    ["^(a?b)*$", "^(a*)$", "^(a*)?$", "^[a?]*$", r"^(\?)*$", "^(a+){2}$", "^(a|b)*$", "^[0-9]{3}-[0-9]{4}$", ""],
)
def test_ordinary_patterns(pattern: str) -> None:
    check_repetitions({"pattern": pattern})


@pytest.mark.parametrize("quantifier", ["{}", "{a}", "{1;2}", "{-1}", "{1.5}", "{²}", "{"])
def test_what_is_no_repetition(quantifier: str) -> None:
    with pytest.raises(InvalidRequest):
        check_repetitions({"pattern": f"^a{quantifier}$"})


def test_references_to_themselves_and_to_nothing() -> None:
    node: dict[str, Any] = {"items": {"$ref": "#/$defs/node"}, "maxItems": 1000}
    check_repetitions({"$ref": "#/$defs/node", "$defs": {"node": node}})
    check_repetitions({"$ref": "#/nowhere"})
    check_repetitions({"$ref": "#"})


def test_a_long_way_of_references() -> None:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(480)}
    schema = {"$ref": "#/$defs/d0", "$defs": definitions}
    check_size(schema)
    check_repetitions(schema)
    definitions["d480"] = arrays(1000, 1000, 2)
    with pytest.raises(InvalidRequest, match="json_schema is too complex") as caught:
        check_repetitions(schema)
    assert "2000000" in str(caught.value.detail)


def test_references_too_deep_to_follow() -> None:
    schema: dict[str, Any] = {"$ref": "#/$defs/d0", "$defs": {}}
    for i in range(14):
        schema["$defs"][f"d{i}"] = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(58):
            schema["$defs"][f"d{i}"] = {"items": schema["$defs"][f"d{i}"]}
    check_size(schema)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(800)
    try:
        with pytest.raises(InvalidRequest, match="json_schema is too complex") as caught:
            check_repetitions(schema)
    finally:
        sys.setrecursionlimit(before)
    assert "references" in str(caught.value.detail)


def test_each_object_is_looked_at_once_however_many_references_lead_to_it() -> None:
    looks = 0

    class Counted(dict[str, Any]):
        def values(self) -> Any:
            nonlocal looks
            looks += 1
            return super().values()

    # each of them means the whole schema
    references = {f"p{i}": Counted({"$ref": f"r{i}"}) for i in range(200)}
    check_repetitions(Counted({"properties": Counted(references)}))
    assert looks < 3 * len(references)


def test_a_pattern_is_looked_at_in_little_time() -> None:
    began = time.process_time()
    for pattern in ("a" + "{1000}" * 10_000, "(" * 60_000, "a|" * 30_000, "[" * 60_000, "(a){2}" * 10_000):
        with contextlib.suppress(InvalidRequest):
            check_repetitions({"pattern": pattern})
    assert time.process_time() - began < 2


def test_a_model_elsewhere_bounds_its_grammars_itself() -> None:
    """Only the size of the schema is bounded then."""
    config = '[models.remote]\ntask = "generate"\nengine = "openai"\nbase_url = "http://127.0.0.1:1/v1"\n'

    def ask(client: httpx.Client, model: str, schema: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        }
        answer = client.post("/v1/chat/completions", json=body).json()
        error: dict[str, Any] = answer["error"]
        return error

    with (
        running_server(config=config, tcp=True) as server,
        httpx.Client(base_url=server.url or "", timeout=30) as client,
    ):
        assert ask(client, "fake-generate", {"maxLength": 30_000})["code"] == "invalid_request"
        assert ask(client, "remote", {"maxLength": 30_000})["code"] == "engine_failed"
        for model in ("remote", "fake-generate"):
            assert ask(client, model, {"enum": list(range(2000))})["code"] == "invalid_request"
