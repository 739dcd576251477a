"""backend/highlights: the passages of citations that answer a question."""

from __future__ import annotations

import tracemalloc
from collections.abc import Collection

import pytest

from ml_rag.backend.highlights import highlights

TEXTS = ["Hotels are paid. The hotel limit is 180 euros.", "# Trains\n\nThey are free. Ask first.", "Rain falls."]


def stops(words: Collection[str]) -> set[str]:
    return {"the", "is", "are", "what", "they", "how", "much", "do"} & set(words)


def passages(question: str) -> list[list[str]]:
    found = highlights(question, TEXTS, stops, lambda: None)
    return [[text[h["start"] : h["end"]] for h in spans] for text, spans in zip(TEXTS, found, strict=True)]


def test_the_best_sentences_of_each_text() -> None:
    assert passages("What is the hotel limit?") == [["The hotel limit is 180 euros."], [], []]


def test_what_follows_a_heading_answers_it() -> None:
    assert passages("How much are trains?") == [[], ["They are free."], []]


def test_without_a_common_word_there_are_none() -> None:
    assert passages("Who is Ann?") == [[], [], []]
    assert highlights("?", [], stops, lambda: None) == []


TABLE = "# Travel\n\n| City | Hotel limit |\n|---|---|\n| London | 180 euros |\n| Paris | 170 euros |\n\nAsk us."


@pytest.mark.parametrize(
    ("question", "row"),
    [("What is the hotel limit in Paris?", "| Paris | 170 euros |"), ("travel, London", "| London | 180 euros |")],
)
def test_the_rows_of_a_table_have_the_words_of_its_header(question: str, row: str) -> None:
    (found,) = highlights(question, [TABLE], stops, lambda: None)
    assert TABLE[found[0]["start"] : found[0]["end"]] == row
    assert "City" not in "".join(TABLE[h["start"] : h["end"]] for h in found)


def test_the_first_row_of_a_table_without_a_header() -> None:
    table = "| Contact | Anna Smith |\n|---|---|\n| Manager | Bob Jones |"
    for question, row in (("the contact?", "| Contact | Anna Smith |"), ("the manager?", "| Manager | Bob Jones |")):
        (found,) = highlights(question, [table], stops, lambda: None)
        assert table[found[0]["start"] : found[0]["end"]] == row


def test_the_rows_of_a_table_share_the_words_above_them() -> None:
    question = " ".join(f"w{n}" for n in range(2000))
    text = f"# {question}\n\n| a |\n|---|\n" + "| b |\n" * 2000
    tracemalloc.start()
    try:
        (found,) = highlights(question, [text], stops, lambda: None)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert found[0] == {"start": text.index("| b"), "end": text.index("| b") + 5, "score": 1.0}
