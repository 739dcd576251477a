"""Parsers of our own, over the inputs that libFuzzer found to reach something new (``corpus``), with some accidents."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support import fuzzing
from support.fuzz_targets import TARGETS
from support.mutate import mutated

CORPUS = Path(__file__).parent / "corpus"
FULL, SHORT = 2_000, 150
LONGEST_INPUT = 2048


def corpus(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_reached_something_new_and_accidents_to_them(name: str) -> None:
    inputs = corpus(name)
    assert inputs
    with fuzzing.target(f"corpus of {name}", full=FULL, short=SHORT) as account:
        for data in inputs:
            account.next()
            TARGETS[name](data)
        number = 0
        while account.cases < account.wanted and account.next():
            chance = random.Random(f"{fuzzing.SEED} {name} {number}")
            data = mutated(inputs[number % len(inputs)], chance, inputs)[:LONGEST_INPUT]
            try:
                TARGETS[name](data)
            except Exception as error:
                raise AssertionError(f"{name} over {data!r}") from error
            number += 1
        account.coverage = f"{len(inputs)} inputs kept"
