"""Citation markers held against the citations: what is one, what is none, and that the rest of the text stays."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_rag.server.chat.citations import Verified, verify

#: with three citations
CASES = {
    # right ones stay
    "Paris [1]. Rome [3].": None,
    "Paris [1][2], Rome [1, 3], Bonn [1-3], Oslo [2 and 3].": None,
    "Paris 【1】 [Document 1] [source #2] [doc. no. 3] [01] [ 2 ] ［3］ [3-1] [^1]": None,
    # one that points nowhere goes, with the blank before it
    "Paris [4] is large.": "Paris is large.",
    "Paris is large [4].": "Paris is large.",
    "Paris is large [0].": "Paris is large.",
    "Paris is large.[4]": "Paris is large.",
    "Paris[4] is large.": "Paris is large.",
    "Paris is large [999].": "Paris is large.",
    "PostgreSQL[4]; vitamin C[4]": "PostgreSQL; vitamin C",
    "Paris\u00a0[4]  [5].": "Paris.",
    "[4] Paris is large.": "Paris is large.",
    "[4]": "",
    "Paris.\n[4]\nRome.": "Paris.\nRome.",
    "Paris.\n\n  [4]": "Paris.\n",
    "x =\n[4]": "x =",
    "Paris [1].\n\n[1]: a.pdf\n[4]: b.pdf": "Paris [1].\n\n[1]: a.pdf\nb.pdf",
    "- [4] Paris": "- Paris",
    "Paris ([4]) is large ( [1] ).": "Paris is large ( [1] ).",
    "Paris<sup>[4]</sup> is large [[5]].": "Paris is large.",
    "巴黎是首都[4]。罗马【5】。": "巴黎是首都。罗马。",
    # other forms of it
    "Paris 【4】, Rome ［5］, Bonn [Document 6].": "Paris, Rome, Bonn.",
    "Oslo [doc 1234], Bern [sources 7 & 8].": "Oslo, Bern.",
    "Paris [^9], Rome [#4], Bonn [文档 5].": "Paris, Rome, Bonn.",
    "**Paris** [4] and C++ [5] are <b>large</b> [6].": "**Paris** and C++ are <b>large</b>.",
    'x [document number="4"] y [Document: 5] z [SOURCE 6]': "x y z",
    "Paris 【4†a.pdf】 and 【1†b.pdf】": "Paris 【1†b.pdf】",
    # of a list the right ones stay
    "Paris [1, 4].": "Paris [1].",
    "Paris [4,2; 5].": "Paris [2].",
    "Paris [2-5], Rome [3–9], Oslo [5-7], Bonn [7-2].": "Paris [2-3], Rome [3], Oslo, Bonn [2-3].",
    "Paris [Documents 1 and 4].": "Paris [Documents 1].",
    "Paris [1][4][2].": "Paris [1][2].",
    "Paris [1], [4], and [2].": "Paris [1], and [2].",
    "Paris [4], [5], and [2].": "Paris [2].",
    "Paris [4] and [5].": "Paris.",
    "Paris [4] [5].": "Paris.",
    # what is no marker stays
    "In [2019] and [1999-2005], a [b], [], [ ], [4a], [-4], [1.5], [4": None,
    "between [0, 1] and [0-9], or [0; 4]": None,
    "`a[4]` and ``b[5]``\n```\nx[6] [7]\n```\n~~~\n[8]\n~~~": None,
    "```python\n[4]": None,
    "a[4] = b_c[5] + d.e[6] + $f[7] + g->h[8] + i::j[9] + f(x)[10] + k[0][11]": None,
    "buffer[4] = 1; text[5]++; x = [4, 5]; char name[6];\nf([7]) items[8].size() rows[9](1)": None,
    "[Paris][4] [4](https://example.org/a) ![4] \\[4\\]": None,
    "(4) {5} <6> 7] Document 8": None,
}


@pytest.mark.parametrize(("text", "expected"), CASES.items(), ids=ascii)
def test_markers(text: str, expected: str | None) -> None:
    assert verify(text, 3) == (text if expected is None else expected)


def test_without_citations_no_marker_is_right() -> None:
    assert verify("Paris [1], Rome 【2】.", 0) == "Paris, Rome."


sentences = st.text(st.sampled_from("abc é城\n.,'()é"), max_size=12)
numbers = st.integers(0, 12)


@given(st.lists(st.tuples(sentences.filter(lambda s: not s.isspace() and s), numbers), max_size=6), st.integers(0, 12))
def test_single_markers_stay_exactly_where_they_point_to_a_citation(parts: list[tuple[str, int]], n: int) -> None:
    text = "".join(f"word {sentence}word [{number}]. " for sentence, number in parts)
    expected = "".join(f"word {s}word{f' [{number}]' if 1 <= number <= n else ''}. " for s, number in parts)
    assert verify(text, n) == expected


WHOLE = ["12", "2024", " and ", "```", "Doc ", "document ", "word", "[7]", "[1]", "[1, 7]"]
pieces = st.sampled_from([*"[]【】1290,- \n()`=a.;†", *WHOLE])


@given(st.lists(pieces, max_size=30).map("".join), st.integers(0, 9))
def test_what_comes_out_has_no_marker_that_points_nowhere(text: str, n: int) -> None:
    once = verify(text, n)
    assert verify(once, n) == once
    assert len(once) <= len(text)
    # nothing is written that was not there, but for the border of a range and the comma of a list
    assert not (set(once) - set(text) - set("0123456789-, "))


@given(st.lists(pieces, max_size=30).map("".join))
def test_a_text_whose_numbers_are_all_citations_is_left_as_it_is(text: str) -> None:
    text = re.sub(r"\d+", lambda number: str(int(number[0]) % 9 + 1), text)
    assert verify(text, 10**12) == text


@given(st.text(), st.integers(0, 3))
def test_a_text_without_brackets_is_left_as_it_is(text: str, n: int) -> None:
    text = re.sub(r"[\[【［]", "", text)
    assert verify(text, n) == text


def in_pieces(text: str, n: int, sizes: list[int]) -> list[str]:
    held, found, at = Verified(n), [], 0
    while at < len(text):
        size = sizes[len(found) % len(sizes)]
        found.append(held.add(text[at : at + size]))
        at += size
    return [*found, held.end()]


@pytest.mark.parametrize(("text", "expected"), CASES.items(), ids=ascii)
def test_markers_of_a_text_that_comes_letter_by_letter(text: str, expected: str | None) -> None:
    assert "".join(in_pieces(text, 3, [1])) == (text if expected is None else expected)


#: what comes after markers, and between them
AFTER = [" and so on until the end", "\n\n", "<sup>", "</sup>", "~~~", "Berlin", "; ", "http://x", "("]


@given(
    st.lists(st.sampled_from([*"[]【】190,- \n()`=a.;†:", *WHOLE, *AFTER]), max_size=30).map("".join),
    st.integers(0, 9),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_a_text_in_pieces_is_what_it_is_as_a_whole(text: str, n: int, sizes: list[int]) -> None:
    assert "".join(in_pieces(text, n, sizes)) == verify(text, n)


def test_what_is_certain_is_passed_on_at_once() -> None:
    text = "It is 180 euros [1]. The rest of it is said on page four, and [9] nowhere else than there."
    found = in_pieces(text, 3, [1])
    assert "".join(found[: len("It is 180 euros")]) == "It is 180 euros"
    assert "".join(found[: text.index(" said")]) == "It is 180 euros [1]. The rest of it is"
    assert "".join(found[: len(text)]) == text.replace(" and [9]", " and")


LONG = ["[", "[1", "[1,", "[7]", "[1, 7]", "`", "``", "```", "[7 ", "a[", "[ ", "[Document 7, ", "([", "(\n", "[7]\n"]


@pytest.mark.parametrize("piece", LONG)
def test_no_text_takes_long(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    began = time.process_time()
    whole = verify(text, 3)
    assert time.process_time() - began < 3
    began = time.process_time()
    assert "".join(in_pieces(text, 3, [40])) == whole
    assert time.process_time() - began < 4
