"""An answer that repeats itself ends before the repetition; everything else comes out unchanged."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_rag.server.engines.loop_guard import LoopGuard

SENTENCE = "The document that is stored in segments is stored in segments."


def run(text: str, size: int = 4) -> tuple[str, bool]:
    guard, out = LoopGuard(), ""
    for start in range(0, len(text), size):
        out += guard.feed(text[start : start + size])
        if guard.looping:
            return out, True
    return out + guard.finish(), guard.looping


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("between", [" ", "\n", "\n\n"])
def test_a_sentence_said_again_ends_the_answer_with_the_sentence_before(size, between):
    text = between.join(["Overlap brings neighbours.", SENTENCE, SENTENCE, SENTENCE])
    assert run(text, size) == (f"Overlap brings neighbours.{between}{SENTENCE}", True)


FIRST, SECOND = "The first one says that a segment is near.", "The second one says that a segment is far."
QUOTED = 'It said: "the model server cannot be reached any more."'


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"{SENTENCE} {SENTENCE}", SENTENCE),
        (f"{FIRST} {SECOND} {FIRST} {SECOND}", f"{FIRST} {SECOND}"),
        (f"{QUOTED} {QUOTED.replace(' ', '  ')} More.", QUOTED),
    ],
    ids=["at the very end", "several sentences", "quotes and other blank space"],
)
def test_what_is_said_again_is_cut_off(text, kept):
    assert run(text) == (kept, True)


def test_words_that_go_round_without_an_end_of_sentence():
    text = "This is a story about " + "a post-processing of " * 40
    out, looping = run(text)
    assert looping
    assert text.startswith(out)
    assert len(out) < len("This is a story about " + "a post-processing of " * 10)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("unit", ["pay-", "</b>", "<p></p>", "haha", "-to-to", "支付"])
def test_characters_that_go_round_without_blank_space(unit, size):
    text = "The answer is " + unit * 100
    out, looping = run(text, size)
    assert looping
    assert text.startswith(out)
    assert out == run(text, 1)[0]
    assert 30 < len(out) - len("The answer is ") < 64


def test_a_tag_on_each_line():
    out, looping = run("The answer is\n" + "<br>\n" * 100)
    assert looping
    assert 22 < out.count("<br>") < 26


@pytest.mark.parametrize(
    "text",
    [
        "Yes. Yes. Yes. Yes. No. No. I do not know. I do not know.",
        "- Open the file.\n- Read it.\n- Open the file.\n- Read it.\n",
        "[" + ", ".join(["0"] * 200) + "]",
        "| key | is on | is off |\n| --- | --- | --- |\n" + "| the same row in each line | yes | no |\n" * 20,
        "| It is a whole sentence in a cell. |\n" * 6,
        "```sql\n" + "INSERT INTO employees (id, name) VALUES (1, 'a row of the table');\n" * 12 + "```\n",
        "```python\n" + "# Connect to the database and create one more table.\nrun()\n" * 6 + "```\nDone.",
        "\n".join(f"INSERT INTO employees (id, name, salary) VALUES ({n}, 'x', 0);" for n in range(30)),
        "1. 25 days\n2. 25 days\n3. 25 days\n",
        "yes no yes no yes no yes",
        "Twinkle, twinkle, little star,\nHow I wonder what you are!\nUp above the world so high.\n",
        " ".join(["ha"] * 100),
        # rules, numbers and code
        *("pay-" * 7, "-" * 200, "=-" * 100, "0.0," * 50, "A" * 100, "```\n" + "ab" * 50 + "\n```\n"),
        # a beginning in common, which comes out whole also where max_tokens cuts it
        f"{SENTENCE} The document that is stored in segments is found. The document",
        f"{SENTENCE} The document that is",
    ],
)
@pytest.mark.parametrize("size", [1, 5, 5000])
def test_what_repeats_for_good_reasons_is_left_alone(text, size):
    assert run(text, size) == (text, False)


@given(st.text("ab .\n`|", max_size=200), st.integers(1, 7))
def test_an_answer_that_does_not_loop_comes_out_as_it_is(text, size):
    out, looping = run(text, size)
    assert text.startswith(out)
    assert looping or out == text


@given(st.text("ab .\n", max_size=200), st.integers(1, 7))
def test_whether_it_loops_does_not_depend_on_the_pieces(text, size):
    whole = f"{text}\nOne sentence of quite a few words. {text} One sentence of quite a few words."
    out, looping = run(whole, size)
    assert looping == run(whole, 1)[1]
    assert out.rstrip() == run(whole, 1)[0].rstrip()


def test_it_costs_next_to_nothing():
    text = "".join(f"Sentence number {n} says something about segments and {n * 7}. " for n in range(500))
    began = time.process_time()
    assert run(text) == (text, False)
    tokens = len(text) / 4
    assert (time.process_time() - began) / tokens < 0.0002  # seconds; a token of the smallest model takes 0.005
