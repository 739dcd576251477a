"""backend/measures: how an answer agrees with those that are expected."""

from __future__ import annotations

import collections
import re
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ml_rag.backend.measures import of_answer


def squad_normalise(text: str) -> str:
    """normalize_answer of SQuAD's evaluate-v2.0.py."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(re.compile(r"\b(a|an|the)\b"), " ", text).split())


def squad_f1(gold: str, answer: str) -> float:
    """compute_f1 of SQuAD's evaluate-v2.0.py."""
    gold_words, words = squad_normalise(gold).split(), squad_normalise(answer).split()
    common = collections.Counter(gold_words) & collections.Counter(words)
    if not gold_words or not words:
        return float(gold_words == words)
    same = sum(common.values())
    if same == 0:
        return 0
    precision, recall = same / len(words), same / len(gold_words)
    return 2 * precision * recall / (precision + recall)


TEXT = st.text(st.sampled_from("abcdefinty theTHE.,'-!$%0123 \n"), max_size=30)


@settings(max_examples=150, deadline=None)
@given(TEXT, st.lists(TEXT, min_size=1, max_size=3))
@example("The Normans, in France.", ["normans in France", "A France"])
@example("the", ["a", "b"])
@example("", [""])
def test_answers_match_as_in_squad(answer: str, expected: list[str]) -> None:
    found = of_answer(answer, expected)
    exact = max(float(squad_normalise(e) == squad_normalise(answer)) for e in expected)
    assert found["answer_exact"] == exact
    assert found["answer_f1"] == pytest.approx(max(squad_f1(e, answer) for e in expected))
    assert 0 <= exact <= found["answer_contains"] <= 1


def test_an_answer_that_contains_the_right_words() -> None:
    found = of_answer("It is in France, of course [2].", ["France", "Rollo"])
    assert found == {"answer_exact": 0, "answer_f1": pytest.approx(2 / 7), "answer_contains": 1}
    assert of_answer("It is in Frances.", ["France"])["answer_contains"] == 0
    assert of_answer(None, ["France"]) == {
        "answer_exact": 0,
        "answer_f1": 0,
        "answer_contains": 0,
    }


def test_chinese_answers_are_compared_by_character() -> None:
    assert of_answer("《踢爆》。", ["踢爆"])["answer_exact"] == 1
    assert of_answer("即为一踢爆", ["踢爆"]) == {
        "answer_exact": 0,
        "answer_f1": pytest.approx(2 * 2 / 7),
        "answer_contains": 1,
    }


def test_a_citation_marker_is_no_part_of_an_answer() -> None:
    assert of_answer("10th century [1][2]", ["10th century"])["answer_exact"] == 1
