"""backend/grounding: which sentences of an answer its facts support."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from ml_rag.backend.grounding import Claim, check, report, supported
from ml_rag.backend.highlights import highlights
from ml_rag.sentences import spans

STOPS = {"the", "is", "a", "in", "of", "to", "for", "are", "it", "not", "no", "at", "was", "by", "what", "and", "as"}
TRAVEL = (
    "# Travel\n\nHotels are paid in full. The limit is 140 euros in Germany, 180 euros in London. Trains are free."
    " Dogs are not allowed in the office. Alice founded the company in three weeks."
)


def stops(words: Collection[str]) -> set[str]:
    return STOPS & set(words)


def pause() -> None:
    pass


def score(answer: str, *facts: str, question: str = "") -> float | None:
    (claim,) = check(answer, facts or (TRAVEL,), question, stops, pause)
    return claim.score


@pytest.mark.parametrize(
    ("answer", "is_supported"),
    [
        ("Trains are free.", True),
        ("The hotel limit is 180 euros in London.", True),
        ("The limit in Germany is 140 euros.", True),
        # the number of another clause, one that is nowhere, a name that is nowhere
        ("The hotel limit is 180 euros in Germany.", False),
        ("The limit is 140 euros in London.", False),
        ("The limit is 190 euros in London.", False),
        ("The company was founded by Bob.", False),
        # digits for words
        ("The company was founded in 3 weeks by Alice.", True),
        # denied
        ("Dogs are not allowed in the office.", True),
        ("Dogs are allowed in the office.", False),
        ("Trains are not free.", False),
        ("Breakfast is served at seven.", False),
    ],
)
def test_a_claim_is_supported_only_if_all_of_it_is(answer: str, is_supported: bool) -> None:
    found = score(answer)
    assert found is not None
    assert (found >= 0.6) == is_supported


@pytest.mark.parametrize(
    ("answer", "question", "is_supported"),
    [
        ("180 euros", "What is the hotel limit in London?", True),
        ("140 euros", "What is the hotel limit in London?", False),
        ("140 euros", "What is the hotel limit in Germany?", True),
        ("Alice", "Who founded the company?", True),
        ("Germany", "Who founded the company?", False),
    ],
)
def test_a_short_answer_is_held_against_its_question(answer: str, question: str, is_supported: bool) -> None:
    found = score(answer, question=question)
    assert found is not None
    assert (found >= 0.6) == is_supported
    # the same where the question is part of the answer
    claims = check(f"{question} {answer}", [TRAVEL], "", stops, pause)
    assert [claim.score for claim in claims] == [None, found]


def test_a_short_sentence_stands_by_itself() -> None:
    # no word of the question is near it, or there at all
    assert score("Trains are free.", question="How do I get to London?") == 1
    assert score("Trains free.", question="Who is Zoe?") == 1


def test_numbers_in_the_other_order() -> None:
    fact = "Between 1402 and 1405 the expedition conquered the islands."
    assert score(fact, fact) == 1
    assert (score("Between 1405 and 1402 the expedition conquered the islands.", fact) or 0) < 0.6
    # thousands with and without a comma are one number
    assert score("It cost 1,200 euros.", "It cost 1200 euros.") == 1


def test_words_of_scripts_without_blanks() -> None:
    assert score("北京是中国的首都。", "北京是中国的首都,人口2100万。") == 1
    assert (score("上海是法国的首都。", "北京是中国的首都,人口2100万。") or 0) < 0.6


@pytest.mark.parametrize(
    "text", ["Hello!", "Here is what I found:", "What is the limit?", "# Travel", "I hope this helps."]
)
def test_what_states_nothing_needs_no_check(text: str) -> None:
    stops_and_i = lambda words: (STOPS | {"i", "this"}) & set(words)  # noqa: E731
    claims = check(text, [TRAVEL], "", stops_and_i, pause)
    assert [claim.score for claim in claims] == [None]
    assert report(claims, [TRAVEL], 0.6, with_claims=False) == {"support_score": 0, "cited_chunks": []}


def test_the_reply() -> None:
    answer = "Hello! Trains are free. [2] Breakfast is served at seven. [1]"
    facts = ["Hotels are paid in full.", "All trains are free."]
    claims = check(answer, facts, "", stops, pause)
    found = report(claims, facts, 0.6, with_claims=True)
    assert found == {
        "support_score": 0.5,
        "cited_chunks": [{"chunk_text": facts[1], "source": 1, "index": 0}],
        "claims": [
            {
                "start_pos": 0,
                "end_pos": 6,
                "claim_text": "Hello!",
                "citation_indices": [],
                "grounding_check_required": False,
                "score": None,
            },
            {
                "start_pos": 7,
                "end_pos": 27,
                "claim_text": "Trains are free. [2]",
                "citation_indices": [0],
                "grounding_check_required": True,
                "score": 1,
            },
            {
                "start_pos": 28,
                "end_pos": 61,
                "claim_text": "Breakfast is served at seven. [1]",
                "citation_indices": [],
                "grounding_check_required": True,
                "score": 0,
            },
        ],
    }
    for claim in found["claims"]:
        assert answer[claim["start_pos"] : claim["end_pos"]] == claim["claim_text"]


def test_a_claim_may_need_several_facts() -> None:
    facts = ["Ann lives in Rome.", "Ann works as a baker.", "Rain falls."]
    (claim,) = check("Ann lives in Rome and works as a baker.", facts, "", stops, pause)
    assert (claim.score, claim.facts) == (1, [0, 1])


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        (
            "Trains are free. Breakfast is served at seven. Hotels are paid in full.",
            "Trains are free. Hotels are paid in full.",
        ),
        ("Breakfast is served at seven. [1]\n\nTrains are free. [2]", "Trains are free. [2]"),
        ("Trains are free.", "Trains are free."),
        ("Here you go: Breakfast is served at seven.", ""),
        ("Hello!", "Hello!"),
    ],
)
def test_what_is_left_without_unsupported_claims(answer: str, left: str) -> None:
    assert supported(answer, check(answer, [TRAVEL], "", stops, pause), 0.6) == left


def test_without_facts_nothing_is_supported() -> None:
    assert score("Trains are free.", "") == 0
    claims = check("Trains are free.", [], "Are trains free?", stops, pause)
    assert report(claims, [], 0.6, with_claims=False) == {"support_score": 0, "cited_chunks": []}


def test_long_texts_can_be_interrupted() -> None:
    class Cancelled(Exception):
        pass

    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 1000:
            raise Cancelled

    fact = " ".join(f"In {year} the town had {year * 3} houses." for year in range(2000))
    with pytest.raises(Cancelled):
        check(fact, [fact], "", stops, interrupt)


@pytest.mark.parametrize("entry", ["{}", "unit {} ", "unit {}, ", "x{} {}, "])
def test_lists_of_numbers_take_time_that_grows_with_them(entry: str) -> None:
    def steps(n: int) -> int:
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1

        listed = " ".join(entry.format(i, 7 * i) for i in range(n))
        check(listed, [listed], "", stops, step)
        return steps

    assert steps(400) < 3 * steps(200)


@pytest.mark.parametrize("text", ["\n" * 1000, ". " * 1000, "\r\n" * 1000, "# \n" * 1000], ids=repr)
def test_what_is_no_sentence_can_be_cancelled_too(text: str) -> None:
    paused = 0

    def step() -> None:
        nonlocal paused
        paused += 1

    assert check(text, [text], "", stops, step) == []
    assert paused >= 2000
    assert highlights("trains", [text], stops, step) == [[]]
    assert paused >= 3000


@pytest.mark.parametrize("text", ["a\n" * 5000, "a. B\n" * 5000], ids=["lines", "abbreviations"])
def test_a_paragraph_of_many_lines_can_be_cancelled(text: str) -> None:
    """Before its first sentence is known: its lines are counted first, and what could end a sentence."""
    paused = 0

    def step() -> None:
        nonlocal paused
        paused += 1

    assert next(spans(text, step), None) is not None
    assert paused >= 5


def test_a_report_takes_time_that_grows_with_the_claims() -> None:
    class Score(float):
        compared = 0

        def __ge__(self, other: float) -> bool:
            Score.compared += 1
            return float.__ge__(self, other)

        def __eq__(self, other: object) -> bool:
            Score.compared += 1
            return float.__eq__(self, other)

        __hash__ = float.__hash__

    many = [Claim(0, 1, "a", Score(1.0), [0]) for _ in range(500)]
    assert [claim["citation_indices"] for claim in report(many, ["a"], 0.6, with_claims=True)["claims"]] == [[0]] * 500
    assert Score.compared < 2000
