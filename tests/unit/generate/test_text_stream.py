"""From token bytes to text: whole characters, stop sequences across pieces, no blank space at the beginning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_rag.server.engines.text_stream import TextStream


def run(pieces: list[bytes], stop: list[str]) -> list[str]:
    stream = TextStream(stop)
    given_out = []
    for piece in pieces:
        given_out.append(stream.feed(piece))
        if stream.stopped:
            return given_out
    return [*given_out, stream.finish()]


@given(st.text(), st.integers(1, 5))
def test_any_cut_of_the_bytes_gives_the_text(text, size):
    data = text.encode()
    pieces = run([data[i : i + size] for i in range(0, len(data), size)], [])
    assert "".join(pieces) == text.lstrip()
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_a_character_comes_out_when_it_is_whole():
    assert run([b"\xf0\x9f", b"\x99\x82", b"!"], []) == ["", "🙂", "!", ""]


def test_an_unfinished_character_at_the_end_is_left_out():
    assert run([b"a\xf0\x9f"], []) == ["a", ""]
    assert run([b"a\xff", b"\xf0\x9f"], []) == ["a\ufffd", "", ""]


@given(st.text("ab\nc", max_size=30), st.lists(st.text("ab\nc", min_size=1, max_size=4), max_size=3), st.integers(1, 4))
def test_text_ends_before_the_first_stop_sequence(text, stop, size):
    data = text.encode()
    result = "".join(run([data[i : i + size] for i in range(0, len(data), size)], stop))
    whole = text.lstrip()
    ends = [at for sequence in stop if (at := whole.find(sequence)) >= 0]
    if size == 1 and len(stop) == 1:
        assert result == (whole[: ends[0]] if ends else whole)
    assert not any(sequence in result for sequence in stop)
    assert whole.startswith(result)
    assert ends or result == whole


def test_what_may_become_a_stop_sequence_is_held_back():
    assert run([b"yes\nQ", b"ueue"], ["\nQuestion"]) == ["yes", "\nQueue", ""]
    assert run([b"yes\nQ", b"uestion: more"], ["\nQuestion"]) == ["yes", ""]


@pytest.mark.parametrize("stop", [[], [""]])
def test_no_stop_sequence(stop):
    assert "".join(run([b" hello"], stop)) == "hello"
