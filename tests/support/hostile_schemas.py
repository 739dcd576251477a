"""JSON schemas that are meant to hurt whoever makes a grammar of them, each refused by a limit."""

from __future__ import annotations

from typing import Any


def _levels(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _string(**keys: Any) -> dict[str, Any]:
    return {"type": "string", **keys}


HOSTILE: dict[str, dict[str, Any]] = {
    "a long string": _string(maxLength=30_000),
    "a longer string": _string(maxLength=10_000_000),
    "more than the memory": _string(minLength=10**9, maxLength=2 * 10**9),
    "no number": _string(maxLength=10**300),
    "below zero": _string(minLength=-1),
    "many items": {"type": "array", "items": {"type": "string"}, "maxItems": 30_000},
    "at least many items": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "a long pattern": _string(pattern="^a{30000}$"),
    "at most a long pattern": _string(pattern="^[a-z]{0,30000}$"),
    "patterns within one another": _string(pattern="^((a{100}){100}){100}$"),
    "an ambiguous pattern": _string(pattern="^(a?){0,500}$"),
    "a pattern without end": _string(pattern="^(a*)*$"),
    "many long strings": {"type": "object", "properties": {f"p{i}": _string(maxLength=1000) for i in range(11)}},
    "deep": _levels(70),
    "wide": {"enum": list(range(5000))},
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1000)}},
    "long names": {"type": "object", "properties": {"n" * 70_000: {"type": "null"}}},
    "arrays within arrays": {
        "type": "array",
        "minItems": 1000,
        "maxItems": 1000,
        "items": {"type": "array", "minItems": 1000, "maxItems": 1000, "items": _string(minLength=1000)},
    },
}
#: as these, but found out by making the grammar, or by choosing a token by it: only an engine of its own can tell
LATE: dict[str, dict[str, Any]] = {
    "references that double": {
        "properties": {"first": {"$ref": "#/$defs/a/dot"}},
        "$defs": {
            name: {"dot": {"properties": {k: {"$ref": f"#/$defs/{below}/dot"} for k in "xy"}, "required": ["x", "y"]}}
            for name, below in zip("abcdefghijklmnopqrstuvwx", "bcdefghijklmnopqrstuvwxy", strict=True)
        }
        | {"y": {"dot": {"type": "null"}}},
    },
    "a long grammar": {
        "type": "object",
        "properties": {"n" * 3000: {"type": "array", "maxItems": 1000, "items": {"type": "array", "items": {}}}},
    },
    "too many ways": _string(pattern="^" + ".?" * 900 + "$"),
}
