"""What a JSON schema may ask for, looked at before anything is made of it.

A grammar unrolls repetitions: ``{"maxLength": n}`` is n groups within one another, which llama.cpp reads by recursion.
Measured with llama.cpp of llama-cpp-python 0.3.36 and a vocabulary of 49 000 tokens: 2000 groups within one another are
refused by it, 30 000 end its process, 10^9 take 23 GB before that. Each alternative is tried with each token: 2000
values of an ``enum`` cost 1 s a token. What repeats a group that may be empty, as ``(a?){0,500}``, takes minutes a
token. Such answers would not fit a model's context anyway. What passes here is bounded once more where the grammar is
made (``engines/llama_grammar.py``) and where it is used (``engines/worker.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from ml_rag.errors import InvalidRequest

#: of the schema as JSON
MAX_BYTES = 64 * 1024
#: objects and arrays within one another
MAX_DEPTH = 64
#: subschemas, properties, values of ``enum``, and all other values together
MAX_VALUES = 1000
#: of one ``minLength``, ``maxLength``, ``minItems``, ``maxItems``, ``minProperties``, ``maxProperties``, ``{m,n}``
MAX_REPETITIONS = 1000
#: of all of these in one schema together
MAX_REPETITIONS_TOGETHER = 10_000
#: of those within one another, multiplied
MAX_REPETITIONS_NESTED = 1_000_000
#: characters of a ``pattern`` with its repetitions written out
MAX_PATTERN = 2000

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def check_size(schema: dict[str, Any]) -> None:
    """Bounds on the schema as it stands, for models of every engine.

    Raises ``InvalidRequest``: it is larger than the limit that the detail names, or has a number that JSON has not.
    """
    depth, values, level = 0, 0, [schema]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _refused(f"its objects and arrays go deeper than {MAX_DEPTH} levels")
        below: list[Any] = []
        for value in level:
            for inner in value.values() if isinstance(value, dict) else value:
                values += 1
                if isinstance(inner, dict | list):
                    below.append(inner)
                elif isinstance(inner, float) and not math.isfinite(inner):
                    raise _refused("it has a number that is not finite")
        if values > MAX_VALUES:
            raise _refused(f"it has more than {MAX_VALUES} values")
        level = below
    size = len(json.dumps(schema, ensure_ascii=False).encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise _refused(f"it has {size} bytes, and may have {MAX_BYTES}")


def check_repetitions(schema: dict[str, Any]) -> None:
    """Bounds on what a grammar for the schema unrolls. ``check_size`` comes first.

    Raises ``InvalidRequest``: it asks for more than the limit that the detail names.
    """
    together = 0
    for node in _objects(schema):
        for key in _COUNTS:
            # a property may be called so
            if key not in node or isinstance(node[key], dict | list):
                continue
            count = node[key]
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise _refused(f"{key} is not a whole number from 0 to {MAX_REPETITIONS}")
            if count > MAX_REPETITIONS:
                raise _refused(f"{key} is {_short(count)}, and may be {MAX_REPETITIONS}")
            together += count
        if isinstance(node.get("pattern"), str):
            together += _pattern_length(node["pattern"])
    if together > MAX_REPETITIONS_TOGETHER:
        raise _refused(f"its repetitions are {together} together, and may be {MAX_REPETITIONS_TOGETHER}")
    try:
        nested = _Nesting(schema).of(schema)
    except RecursionError:
        raise _refused("its references lead through too many schemas") from None
    if nested > MAX_REPETITIONS_NESTED:
        raise _refused(
            f"its repetitions within one another are {_short(nested)}, multiplied, and may be {MAX_REPETITIONS_NESTED}"
        )


def _refused(detail: str) -> InvalidRequest:
    hint = "Leave parts of it out, or lower its lengths, counts and repetitions."
    return InvalidRequest("json_schema is too complex", detail=detail, hint=hint)


def _short(number: int) -> str:
    return str(number) if number < 10**12 else "more than 10^12"


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)


class _Nesting:
    """The largest product of repetitions within one another, references followed; one to itself counts once.

    Each object is looked at once, however many references lead to it: the event loop waits for this.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        #: by the identity of an object; 1 while it is looked at
        self._known: dict[int, int] = {}

    def of(self, value: Any) -> int:
        if isinstance(value, list):
            return max(map(self.of, value), default=1)
        if not isinstance(value, dict):
            return 1
        if id(value) not in self._known:
            self._known[id(value)] = 1
            largest = max(map(self.of, value.values()), default=1)
            if isinstance(reference := value.get("$ref"), str):
                largest = max(largest, self.of(self._target(reference)))
            own = max((count for key in _COUNTS if isinstance(count := value.get(key), int)), default=1)
            self._known[id(value)] = largest * max(1, own)
        return self._known[id(value)]

    def _target(self, reference: str) -> Any:
        target: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            target = target.get(part) if isinstance(target, dict) else None
        return target


class _Group:
    """A group of a pattern while it is read: lengths, and whether it may be empty, of its alternatives so far."""

    def __init__(self) -> None:
        self.length = 0
        self.may_be_empty = False  # one of the alternatives before
        self._alternative_may_be_empty = True
        #: length of the last unit, whether it may be empty
        self.last: tuple[int, bool] | None = None

    def add(self, length: int, may_be_empty: bool) -> None:
        self.flush()
        self.last = length, may_be_empty

    def flush(self) -> None:
        if self.last is not None:
            self.length += self.last[0]
            self._alternative_may_be_empty &= self.last[1]
            self.last = None

    def next_alternative(self) -> None:
        self.flush()
        self.may_be_empty |= self._alternative_may_be_empty
        self._alternative_may_be_empty = True

    def end(self) -> tuple[int, bool]:
        self.next_alternative()
        return max(1, self.length), self.may_be_empty


def _pattern_length(pattern: str) -> int:
    """Characters of a pattern with its repetitions written out.

    Raises ``InvalidRequest``: more than ``MAX_PATTERN``; a repetition of more than ``MAX_REPETITIONS``, or of what
    may be empty, which a grammar can follow in too many ways.
    """
    groups = [_Group()]
    at = 0
    while at < len(pattern):
        character, group = pattern[at], groups[-1]
        at += 1
        if character == "\\":
            at += 1
            group.add(1, False)
        elif character == "[":
            while at < len(pattern) and pattern[at] != "]":
                at += 2 if pattern[at] == "\\" else 1
            at += 1
            group.add(1, False)
        elif character == "(":
            groups.append(_Group())
        elif character == ")" and len(groups) > 1:
            groups.pop()
            groups[-1].add(*group.end())
        elif character == "|":
            group.next_alternative()
        elif character in "?*+{":
            least, most = {"?": (0, 1), "*": (0, 2), "+": (1, 2)}.get(character, (0, 0))
            if character == "{":
                end = pattern.find("}", at)
                end = len(pattern) if end < 0 else end
                least, most = _quantifier(pattern[at:end])
                at = end + 1
            length, may_be_empty = group.last or (1, False)
            if may_be_empty and most > 1:
                raise _refused("its pattern repeats a group that may be empty")
            length *= max(1, most if character == "{" else 1)
            group.last = min(length, MAX_PATTERN + 1), may_be_empty or least == 0
        else:
            group.add(1, character in "^$")
    length = sum(group.end()[0] for group in groups)
    if length > MAX_PATTERN:
        raise _refused(f"its pattern has more than {MAX_PATTERN} characters when repetitions are written out")
    return length


def _quantifier(text: str) -> tuple[int, int]:
    """Least and most times of ``m``, ``m,`` and ``m,n``."""
    first, comma, second = (part.strip() for part in text.partition(","))
    numbers = [part for part in (first, second) if part]
    if not all(part.isascii() and part.isdigit() for part in numbers) or (not numbers and not comma):
        raise _refused("its pattern has a repetition that is not {m}, {m,}, {,n} or {m,n}")
    for part in numbers:
        if len(part) > 9 or int(part) > MAX_REPETITIONS:
            raise _refused(f"its pattern repeats {part[:12]} times, and may {MAX_REPETITIONS} times")
    least = int(first or 0)
    most = int(second) if second else least if not comma else max(2, least)
    return least, most
