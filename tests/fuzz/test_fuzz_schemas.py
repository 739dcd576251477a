"""JSON schemas that are meant to hurt: refused in time with the documented error, or a grammar that a model follows."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ml_rag.abc import Sampling
from ml_rag.errors import InvalidRequest
from ml_rag.server.catalogue import load_catalogue, models_dir
from ml_rag.server.engines.llama_grammar import MAX_CHARACTERS, json_grammar
from ml_rag.server.engines.process import EngineProcess
from ml_rag.server.json_schema import check_repetitions, check_size
from support import fuzzing
from support.hostile_schemas import HOSTILE, LATE
from support.real_model import MODEL, model_path, never

__all__ = ["model_path"]

FULL, SHORT = 20_000, 500
FULL_MODEL, SHORT_MODEL = 1_000, 8
#: for a schema to be looked at and, where it passes, made a grammar of; measured 0.1 s and less
SECONDS = 5.0

NUMBERS = (
    0,
    1,
    2,
    3,
    9,
    99,
    999,
    1000,
    1001,
    2000,
    30_000,
    10**9,
    2**63,
    10**300,
    -1,
    1.5,
    1e300,
    True,
    None,
    "7",
    [3],
)
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minimum", "maximum")
_USUAL = ("string", "integer", "number", "boolean", "null", "array", "object") * 10
TYPES = (*_USUAL, "nonsense", ["string", "null"], 7, None)
UNITS = ("a", ".", "[a-z]", r"\d", r"\(", "[^\\]]", "é", '"', "🙂", "^", "$", "-")
QUANTIFIERS = (
    "",
    "",
    "?",
    "*",
    "+",
    "{2}",
    "{0,3}",
    "{999}",
    "{1000}",
    "{1001}",
    "{0,1000}",
    "{,5}",
    "{5,}",
    "{x}",
    "{",
)
FORMATS = ("date", "time", "date-time", "uuid", "nonsense", 7)


class Schemas:
    """Schemas from one seed."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def schema(self, depth: int = 0) -> Any:
        chance = self._chance
        if depth == 0 and chance.random() < 0.1:
            return self._damaged(chance.choice([*HOSTILE.values(), *LATE.values()]))
        if depth > 4 or chance.random() < 0.1:
            return chance.choice([{}, True, {"type": chance.choice(TYPES)}, {"$ref": "#"}, {"$ref": self._reference()}])
        made: dict[str, Any] = {}
        if chance.random() < 0.8:
            made["type"] = chance.choice(TYPES)
        for _ in range(chance.choice((0, 1, 1, 2))):
            made[chance.choice(COUNTS)] = chance.choice(NUMBERS)
        for _ in range(chance.choice((1, 1, 2, 3))):
            self._add(made, depth)
        if depth == 0:
            made["$defs"] = {name: self.schema(1) for name in ("a", "dot", "root")}
        return made

    def _add(self, made: dict[str, Any], depth: int) -> None:
        chance = self._chance
        kind = chance.choice(("items", "properties", "any", "pattern", "enum", "format", "prefixItems", "$ref", "more"))
        if kind == "items":
            made["items"] = self.schema(depth + 1)
        elif kind == "properties":
            names = [
                chance.choice(("p", "é", '"', "n" * 300, "dot", "")) + str(i) for i in range(chance.choice((1, 3, 40)))
            ]
            one = self.schema(depth + 1)
            made["properties"] = {name: one if len(names) > 3 else self.schema(depth + 1) for name in names}
            made["required"] = [name for name in names if chance.random() < 0.5]
        elif kind == "any":
            key = chance.choice(("anyOf", "oneOf", "allOf"))
            made[key] = [self.schema(depth + 1) for _ in range(chance.choice((0, 1, 2, 5)))]
        elif kind == "pattern":
            made["type"] = "string"
            made["pattern"] = chance.choice(("^{}$", "^{}$", "^{}$", "{}")).format(self._pattern(0))
        elif kind == "enum":
            made["enum"] = [chance.choice(NUMBERS) for _ in range(chance.choice((0, 1, 5, 900, 1200)))]
        elif kind == "format":
            made["format"] = chance.choice(FORMATS)
        elif kind == "prefixItems":
            made["prefixItems"] = [self.schema(depth + 1) for _ in range(chance.choice((0, 2, 5)))]
        elif kind == "$ref":
            made["$ref"] = self._reference()
        else:
            made["additionalProperties"] = chance.choice((True, False, {}, self.schema(depth + 1)))

    def _reference(self) -> Any:
        return self._chance.choice(
            (
                "#/$defs/a",
                "#/$defs/dot",
                "#/$defs/root",
                "#/$defs/a",
                "#/$defs/root",
                "#/nowhere",
                "https://127.0.0.1:1/x",
                7,
            )
        )

    def _pattern(self, depth: int) -> str:
        chance = self._chance
        found = ""
        for _ in range(chance.choice((1, 2, 5, 30))):
            unit = f"({self._pattern(depth + 1)})" if depth < 4 and chance.random() < 0.2 else chance.choice(UNITS)
            found += unit + chance.choice(QUANTIFIERS) + chance.choice(("", "", "", "|"))
            if len(found) > 2000:
                break
        return found

    def _damaged(self, schema: dict[str, Any]) -> Any:
        text = json.dumps(schema)[:200_000]
        for number in {"1000", "30000", "500"}:
            if self._chance.random() < 0.5:
                text = text.replace(number, json.dumps(self._chance.choice(NUMBERS)))
        try:
            return json.loads(text)
        except ValueError:
            return schema


def made(number: int) -> dict[str, Any]:
    schema = Schemas(random.Random(f"{fuzzing.SEED} {number}")).schema()
    return schema if isinstance(schema, dict) else {"const": schema}


def checked(schema: dict[str, Any]) -> str | None:
    """The grammar; None where the schema is refused."""
    try:
        check_size(schema)
        check_repetitions(schema)
        return json_grammar(schema)
    except InvalidRequest:
        return None


def test_schemas_are_refused_or_make_a_grammar_in_time() -> None:
    ends: Counter[str] = Counter()
    with fuzzing.target("JSON schemas", full=FULL, short=SHORT) as account:
        for number in range(account.wanted):
            if not account.next():
                break
            schema = made(number)
            began = time.process_time()
            grammar = checked(schema)
            assert time.process_time() - began < SECONDS, (number, schema)
            assert grammar is None or len(grammar) < 2 * MAX_CHARACTERS, (number, schema)
            ends["refused" if grammar is None else "made"] += 1
        account.coverage = fuzzing.counted(ends)
    assert min(ends["refused"], ends["made"]) > account.cases / 20, ends


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[EngineProcess]:
    entry = load_catalogue().get(MODEL)
    assert entry is not None
    made = EngineProcess(
        entry.model_copy(update={"context_tokens": 256}),
        models_dir(load_catalogue()),
        "ml_rag.server.engines.llama_cpp",
    )
    yield made
    made.close()


@pytest.mark.models
def test_what_passes_does_not_crash_the_engine(engine: EngineProcess) -> None:
    """Its process may be ended over a grammar that takes too long, never by a crash."""
    ends: Counter[str] = Counter()
    messages = [{"role": "user", "content": "hi"}]
    with fuzzing.target("JSON schemas, followed by a model", full=FULL_MODEL, short=SHORT_MODEL) as account:
        number = -1
        while account.cases < account.wanted:
            number += 1
            schema = made(number)
            if checked(schema) is None:
                continue
            if not account.next():
                break
            try:
                list(
                    engine.generate(
                        messages, Sampling(max_tokens=4, json_schema=schema, temperature=1.0, seed=1), never
                    )
                )
                ends["followed"] += 1
            except InvalidRequest as error:
                ends[error.message] += 1
            # anything else, such as the end of its process, is a finding
        account.coverage = fuzzing.counted(ends)
    assert ends["followed"] > account.cases / 10, ends
