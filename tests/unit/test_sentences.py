"""ml_rag.sentences: where sentences begin and end."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_rag.sentences import spans, with_headers


def sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("Dr. J. Smith of St. Paul paid 3.50 euros, e.g. Monday.", None),
        ("It was about U.S. Grant. He won.", ["It was about U.S. Grant.", "He won."]),
        ("The yacht is at pier 4. Bring boots.", ["The yacht is at pier 4.", "Bring boots."]),
        ("1. Take gate 12. Wait there.", ["1. Take gate 12.", "Wait there."]),
        ("Der 2. Versuch im 19. Jahrhundert, am 3. Tag.", None),
        ("Montag, 21. Juni. Er kam.", ["Montag, 21. Juni.", "Er kam."]),
        ("一句话。第二句！第三句？", ["一句话。", "第二句！", "第三句？"]),
        ("「はい。」彼は言った。終わり", ["「はい。」", "彼は言った。", "終わり"]),
        ("هل هذا سؤال؟ نعم.", ["هل هذا سؤال؟", "نعم."]),
        ("यह एक वाक्य है। यह दूसरा है।", ["यह एक वाक्य है।", "यह दूसरा है।"]),
        ("# Title\nA line\nthat goes on. Next.", ["# Title", "A line\nthat goes on.", "Next."]),
        ("- one\n- two\n  goes on\n1. three", ["- one", "- two\n  goes on", "1. three"]),
        ("| a | b |\n|---|---|\n| 1 | 2 |\nafter", ["| a | b |", "| 1 | 2 |", "after"]),
        ("| Why? | It is so. Yes |\n| No |", ["| Why? | It is so. Yes |", "| No |"]),
        ("Room\n\n:   Costs 4 euros. Book it.", ["Room", "Costs 4 euros.", "Book it."]),
        (
            "Call Mr. Huber, ext. 311. It costs ca. 35 euros (Tel. 0911). See Art. 5. The max. Is 3.",
            ["Call Mr. Huber, ext. 311.", "It costs ca. 35 euros (Tel. 0911).", "See Art. 5.", "The max.", "Is 3."],
        ),
        ("one\n\ntwo\n \nthree", ["one", "two", "three"]),
        (" \n…\n---\n", []),
        ("", []),
    ],
)
def test_sentences_of_a_text(text: str, expected: list[str] | None) -> None:
    assert sentences(text) == ([text] if expected is None else expected)


@pytest.mark.parametrize(
    ("first", "is_header"),
    [
        ("| Hotel limit | 180 euros |", False),
        ("| Hotel limit | €180 |", False),
        ("| Begin | 2024-05-01 |", False),
        ("| Country | 2022 | 2023 |", True),
        ("| Region | Q1 2024 |", True),
    ],
)
def test_a_row_of_values_is_no_header(first: str, is_header: bool) -> None:
    """Many tables have none, and Markdown makes one of their first row."""
    text = f"{first}\n|---|---|\n| Rail limit | 90 euros |"
    assert all((header is not None) == is_header for _, _, header in with_headers(text))


def test_rows_of_tables_know_their_header() -> None:
    text = "a\n| A | B |\n|:--|--:|\n| 1 | 2. No 3 |\n| C |\nb\n\n| x |\n| y |\n  | D |\r\n  |---|\r\n  | 4 |"
    found = [(text[start:end], header and text[slice(*header)]) for start, end, header in with_headers(text)]
    assert found == [
        ("a", None),
        *[(row, "| A | B |") for row in ("| A | B |", "| 1 | 2. No 3 |", "| C |")],
        *[("b", None), ("| x |", None), ("| y |", None)],
        *[("| D |", "| D |\r"), ("| 4 |", "| D |\r")],
    ]


def test_a_text_without_full_stops_is_cut_at_blanks() -> None:
    found = sentences("word " * 500)
    assert " ".join(found).split() == ["word"] * 500
    assert max(map(len, found)) <= 1000
    assert [len(piece) for piece in sentences("x" * 2500)] == [1000, 1000, 500]


@given(st.text(st.sampled_from('aB1 .!?。\n#-|\t"”'), max_size=80))
def test_sentences_are_in_order_and_only_marks_and_blanks_are_between_them(text: str) -> None:
    at = 0
    for start, end in spans(text):
        assert at <= start < end
        assert text[start:end] == text[start:end].strip()
        assert not any(character.isalnum() for character in text[at:start])
        at = end
    assert not any(character.isalnum() for character in text[at:])


@pytest.mark.parametrize(
    "text",
    [
        "." * 200_000,
        "a\n" * 100_000,
        "# " * 100_000,
        "| a |\n" * 50_000,
        "A. " * 60_000,
        "|-\n" * 50_000,
        "|a\n|" + "-" * 200_000 + "x",
    ],
)
def test_time_is_in_step_with_the_length(text: str) -> None:
    began = time.perf_counter()
    for _ in with_headers(text):
        pass
    assert time.perf_counter() - began < 5
