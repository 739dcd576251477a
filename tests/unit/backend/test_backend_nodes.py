"""ml_rag.backend.nodes: long texts in parts, and how often a model is asked about one."""

from __future__ import annotations

import time

import pytest

from ml_rag.backend.nodes import PART, asked, calls, parts


@pytest.mark.parametrize("unit", ["ä", "ab ", "ab cd\n\n", "\n", " "])
@pytest.mark.parametrize("n", [0, 1, 10, 11, 333, 1000, 1001, 5000])
def test_parts_of_a_long_text_are_the_text(unit: str, n: int) -> None:
    found = parts(unit * n, 10)
    assert "".join(found) == unit * n
    assert max(map(len, found)) <= 10
    assert len(found) <= max(1, -(-len(unit * n) // 5))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("one two three", ["one two ", "three"]),
        ("abcd ef\n\ngh ij", ["abcd ef\n\n", "gh ij"]),
        ("abcd ef\n \ngh", ["abcd ef\n \n", "gh"]),
        ("a\n\nbcdefgh ijkl", ["a\n\n", "bcdefgh ", "ijkl"]),
        ("abcdefghijklmn", ["abcdefghij", "klmn"]),
        ("abcdef\n\n\n\nghijkl", ["abcdef\n\n\n\n", "ghijkl"]),
    ],
)
def test_where_a_text_is_cut(text: str, found: list[str]) -> None:
    assert parts(text, 10) == found


@pytest.mark.parametrize("text", ["\n" * 1_000_000, " " * 1_000_000, "a\n" * 500_000, "x" * 1_000_000])
def test_no_text_takes_long_to_cut(text: str) -> None:
    began = time.monotonic()
    assert "".join(parts(text)) == text
    assert time.monotonic() - began < 5


def test_a_model_is_asked_once_a_part() -> None:
    long = "word " * PART
    n = len(parts(long))
    assert n == 5
    assert [calls(t, long) for t in ("sentence", "keyphrases", "summary")] == [0, n, n + 1]
    assert [calls("summary", text) for text in (None, " ", "short")] == [0, 0, 1]
    told: list[str] = []
    assert asked(lambda part: told.append(part) or ["same"], "keyphrases", long) == ["same"]  # type: ignore[func-returns-value]
    assert told == parts(long)
    assert asked(lambda part: [part[:1]], "summary", long) == ["w"]
    assert asked(lambda _: ["It is about birds."], "context", "Herons.") == ["It is about birds.\n\nHerons."]
