"""backend/tokens.py, and how backend/runs.py gathers what it reads: tsvectors as PostgreSQL writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ml_rag.backend import runs, tokens

words = st.text("ab,:'\\ é3{", min_size=1, max_size=10)
#: word -> how often
rows = st.lists(st.dictionaries(words, st.integers(1, 254), max_size=4), max_size=6)


def vector(counts: dict[str, int], first: int = 1) -> str:
    """As tsvectorout has it."""
    return " ".join(
        "'{}':{}".format(
            word.replace("\\", "\\\\").replace("'", "''"), ",".join(str(first + i) for i in range(counts[word]))
        )
        for word in counts
    )


def as_rows(found: tokens.Tokens, n: int) -> list[dict[str, int]]:
    read: list[dict[str, int]] = [{} for _ in range(n)]
    vocabulary = tokens.Vocabulary()
    numbers = vocabulary.numbers_of(found).tolist()
    # once more, now that the table has them
    assert vocabulary.numbers_of(found).tolist() == numbers
    terms = list(vocabulary.numbers)
    for row, number, count in zip(found.rows.tolist(), numbers, found.counts.tolist(), strict=True):
        read[row][terms[number]] = count
    return read


@given(rows, st.lists(st.booleans(), min_size=6, max_size=6))
def test_vectors_and_json_are_read_alike(expected: list[dict[str, int]], is_json: list[bool]) -> None:
    texts = [json.dumps(row) if js else vector(row) for row, js in zip(expected, is_json, strict=False)]
    found, unclear = tokens.of_vectors(texts)
    difficult = [
        i for i, row in enumerate(expected) if not is_json[i] and any("'" in word or "\\" in word for word in row)
    ]
    assert unclear == difficult
    expected = [{} if i in unclear else row for i, row in enumerate(expected)]
    assert as_rows(found, len(texts)) == expected
    assert found.lengths(len(texts)).tolist() == [sum(row.values()) for row in expected]


@given(
    st.dictionaries(st.text("ab: 1", min_size=1, max_size=4), st.integers(1, 3), max_size=6),
    st.lists(st.text("ab: 1',", min_size=1, max_size=4), max_size=6, unique=True),
    st.booleans(),
)
def test_terms_are_counted_in_a_text_that_waits(row: dict[str, int], others: list[str], is_json: bool) -> None:
    # what stands between two words looks like a term, too
    terms = [*others, *(term for term in row if term not in others), *([":1 "] if ":1 " not in [*others, *row] else [])]
    for asked in (terms, terms + [f"term {i}" for i in range(40)]):
        found = tokens.counts_of(json.dumps(row) if is_json else vector(row), asked)
        assert list(found.items()) == [(term, row[term]) for term in asked if term in row]


def test_a_vector_that_may_have_been_cut_is_asked_for_again() -> None:
    texts = [vector({"a": 254}), vector({"a": 255}), vector({"a": 1}, 16383), vector({"a": 1}, 16382), ""]
    found, unclear = tokens.of_vectors(texts)
    assert unclear == [1, 2]
    assert as_rows(found, 5) == [{"a": 254}, {}, {}, {"a": 1}, {}]


def test_json_of_some_rows() -> None:
    found = tokens.of_json(['{"a": 1, "b": 2}', "{}", '{"a": 3}'], [5, 7, 9])
    assert as_rows(found, 10) == [*[{}] * 5, {"a": 1, "b": 2}, *[{}] * 3, {"a": 3}]
    assert tokens.of_json([]).lengths(2).tolist() == [0, 0]


def test_terms_that_share_a_place_of_the_table_are_told_apart() -> None:
    # so many that some share one
    texts = [vector({f"{place}w{i}": 1 for i in range(100)}) for place in range(100)]
    found, _ = tokens.of_vectors(texts)
    assert as_rows(found, 100) == [{f"{place}w{i}": 1 for i in range(100)} for place in range(100)]


postings = st.dictionaries(
    st.sampled_from("abcd"),
    st.dictionaries(
        st.integers(0, runs.RUN_ROWS - 1), st.sampled_from([1, 2, 254, 255, 256, 2**31]), min_size=1, max_size=4
    ),
    max_size=4,
)


@given(postings)
def test_postings_are_put_in_order(expected: dict[str, dict[int, int]]) -> None:
    made = runs._Postings()
    entries = sorted((slot, term, n) for term, own in expected.items() for slot, n in own.items())
    rows, terms, counts = map(list, zip(*entries, strict=True)) if entries else ([], [], [])
    keys = np.zeros(len(terms), np.uint64)
    made.add(tokens.Tokens(np.array(rows, int), np.array(counts, int), keys, terms), 0)
    names, values = made.packed()
    found = {}
    for name, packed in zip(names, values, strict=True):
        slots, counts = runs.postings_of(packed)
        assert slots.tolist() == sorted(slots.tolist())
        found[name] = dict(zip(slots.tolist(), counts.tolist(), strict=True))
    assert found == expected


def test_how_many_texts_are_taken_at_once() -> None:
    def portions(sizes: list[int]) -> list[int]:
        left: Iterator[Any] = iter([{"segment": "x" * size} for size in sizes])
        return [len(p) for p in runs._portions(lambda n: [row for _, row in zip(range(n), left, strict=False)])]

    # of short texts so many that a run ends with one, of long ones four million characters
    assert portions([1] * 20_000) == [4096, 4096, 4096, 4096, 3616]
    assert portions([50_000] * 256 + [10] * 256) == [80, 80, 80, 272]
    assert portions([]) == []
