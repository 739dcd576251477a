"""Option filters and the keyword options, evaluated in Python, from their documentation and from nothing else."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any


def parse(text: str) -> Any:
    """JSON with its numbers as they are written."""
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


def matches(filters: Mapping[str, Any], metadata: Any) -> bool:
    """Whether a row with that metadata, and no column of a key's name, holds to the filters."""
    return all(_holds(key, value, metadata) for key, value in filters.items())


def _holds(key: str, value: Any, metadata: Any) -> bool:
    if key == "and":
        return all(matches(member, metadata) for member in value)
    if key == "or":
        return any(matches(member, metadata) for member in value)
    if key == "not":
        return not matches(value, metadata)
    values = list(_values(metadata, key))
    if isinstance(value, list):
        return _one_of(values, value)
    if isinstance(value, dict):
        return all(_operator(name, values, given) for name, given in value.items())
    return _one_of(values, [value])


def _operator(name: str, values: list[Any], given: Any) -> bool:
    if name in ("eq", "ne"):
        return _one_of(values, [given]) == (name == "eq")
    if name in ("in", "nin"):
        return _one_of(values, given) == (name == "in")
    if name == "exists":
        return _one_of(values, [None]) != bool(given)
    return any(_compares(name, element, given) for element in _elements(values))


def _compares(name: str, element: Any, given: Any) -> bool:
    if name in ("like", "ilike"):
        return isinstance(element, str) and like(element, given, name == "ilike")
    low, high = given if name == "between" else (given, given)
    if _kind(element) != _kind(low):
        return False
    return bool(
        {
            "lt": element < low,
            "lte": element <= low,
            "gt": element > low,
            "gte": element >= low,
            "between": low <= element <= high,
        }[name]
    )


def _one_of(values: list[Any], given: Iterable[Any]) -> bool:
    elements = list(_elements(values))
    return any(
        all(v is None for v in values)
        if wanted is None
        else any(_kind(e) == _kind(wanted) and e == wanted for e in elements)
        for wanted in given
    )


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float | Decimal):
        return "number"
    return "text" if isinstance(value, str) else "other"


def _elements(values: Iterable[Any]) -> Iterable[Any]:
    """What is compared: a value, or each element of an array."""
    for value in values:
        for element in value if isinstance(value, list) else [value]:
            if _kind(element) != "other":
                yield element


def _values(metadata: Any, key: str) -> Iterable[Any]:
    """What the metadata has under a key, or at the end of a path."""
    steps = [key]
    if key.startswith("/"):
        steps = [step.replace("~1", "/").replace("~0", "~") for step in key[1:].split("/")]
    found = [metadata]
    for step in steps:
        found = [
            holder[step]
            for value in found
            for holder in (value if isinstance(value, list) else [value])
            if isinstance(holder, dict) and step in holder
        ]
    return found


def like(text: str, pattern: str, any_case: bool = False) -> bool:
    """SQL's LIKE."""
    if any_case:
        text, pattern = text.lower(), pattern.lower()
    expression = ""
    characters = iter(pattern)
    for c in characters:
        if c == "\\":
            expression += re.escape(next(characters))
        else:
            expression += {"%": ".*", "_": "."}.get(c, re.escape(c))
    return re.fullmatch(expression, text, re.DOTALL) is not None


def has_keyword(text: str, keyword: str) -> bool:
    """Whether a text has the keyword, as whole words and in any case."""
    text, keyword = (re.sub(r"[\s\xa0]+", " ", _folded(s)) for s in (text, keyword))
    keyword = keyword.strip()
    at = text.find(keyword)
    while at >= 0:
        end = at + len(keyword)
        if not (at > 0 and _word(keyword[0]) and _word(text[at - 1])) and not (
            end < len(text) and _word(keyword[-1]) and _word(text[end])
        ):
            return True
        at = text.find(keyword, at + 1)
    return False


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text).lower().replace("ς", "σ")


def _word(c: str) -> bool:
    """Whether the character joins with its neighbour to a word: a letter or digit of a script written with blanks."""
    without_blanks = (
        "\u0e00" <= c <= "\u0eff" or "\u1000" <= c <= "\u109f" or "\u1780" <= c <= "\u17ff" or c >= "\u2e80"
    )
    return (c.isalnum() or c == "_" or "\u0300" <= c <= "\u036f") and not without_blanks
