"""backend/highlights: the passages of citations that answer a question."""

from __future__ import annotations

from collections.abc import Collection

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
