"""Splitting: limits, coverage, whole words, overlap, tables, headings, other scripts."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from ml_rag.abc import Block, Document, Segment
from ml_rag.errors import InvalidRequest
from ml_rag.ingest.split import SPLIT_BY, Chunking, chunking, split
from ml_rag.ingest.units import HEADING_CHARACTERS, Counter


def letters_tokenizer() -> Tokenizer:
    """Tokens are pairs of letters, as if every word were unknown; two special tokens around each text."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(_pairs(), "isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $0 [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    return tokenizer


def _pairs() -> Any:
    from tokenizers import Regex

    return Regex(r".{1,2}")


def spaces_tokenizer() -> Tokenizer:
    """Byte-level: white space is tokens too, so that the words of a text do not add up to the text's tokens."""
    tokenizer = Tokenizer(
        models.BPE({char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


COUNTERS = {
    "one a word": Counter(None),
    "pairs of letters": Counter(letters_tokenizer()),
    "bytes and blanks": Counter(spaces_tokenizer()),
    "with a prefix": Counter(letters_tokenizer(), "passage: "),
}

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Z")), min_size=1, max_size=9)
BREAKS = st.sampled_from(
    [" ", " ", " ", " ", "\n", "\n\n", ". ", "! ", "\n- ", "\n| ", " |", "\n# ", "\n\n## ", "\n### "]
)


@st.composite
def texts(draw: st.DrawFn) -> str:
    parts = draw(st.lists(st.tuples(WORDS, BREAKS), max_size=80))
    return "".join(word + gap for word, gap in parts)


def one(text: str, how: Chunking, counter: Counter | None = None, **metadata: Any) -> list[Segment]:
    return split(Document("text", [Block(text, metadata)]), how, counter or COUNTERS["one a word"])


def plain(text: str) -> str:
    return re.sub(r"\s+", "", text.replace("\0", ""))


@pytest.mark.parametrize("name", COUNTERS)
@settings(max_examples=120, deadline=None)
@given(text=texts(), tokens=st.integers(16, 60), split_by=st.sampled_from(SPLIT_BY))
def test_no_segment_is_too_long_and_every_character_is_in_one(name: str, text: str, tokens: int, split_by: Any) -> None:
    counter = COUNTERS[name]
    segments = one(text, Chunking(split_by, tokens, 0), counter)
    for segment in segments:
        assert segment.text.strip() == segment.text != ""
        assert segment.tokens <= tokens
        assert [segment.tokens] == counter.count([segment.text])
    # the header of a table, where there is one, is extra: the text is what is left when it is taken out
    whole, rest = plain(text), "".join(plain(segment.text) for segment in segments)
    assert rest == whole if "|" not in text else _is_subsequence(whole, rest)


def _is_subsequence(needle: str, haystack: str) -> bool:
    characters = iter(haystack)
    return all(char in characters for char in needle)


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.text("abcdefgh.,-'/äß", min_size=1, max_size=7), min_size=1, max_size=120),
    tokens=st.integers(16, 60),
    split_by=st.sampled_from(SPLIT_BY),
)
def test_no_word_is_cut(words: list[str], tokens: int, split_by: Any) -> None:
    segments = one(" ".join(words), Chunking(split_by, tokens, 0), COUNTERS["pairs of letters"])
    assert [word for segment in segments for word in segment.text.split()] == words


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.text("abcde.", min_size=1, max_size=6), min_size=1, max_size=120),
    tokens=st.integers(16, 40),
    overlap=st.integers(0, 20),
    split_by=st.sampled_from(SPLIT_BY),
)
def test_overlap_is_the_end_of_one_and_the_beginning_of_the_next(
    words: list[str], tokens: int, overlap: int, split_by: Any
) -> None:
    # numbered, so that every shared run of words can only be the one that was meant
    words = [f"{word}{number}" for number, word in enumerate(words)]
    overlap = min(overlap, tokens // 2)
    counter = COUNTERS["one a word"]
    segments = one(" ".join(words), Chunking(split_by, tokens, overlap), counter)
    again = segments[0].text.split() if segments else []
    for before, after in pairwise(segments):
        assert after.tokens <= tokens
        old, new = before.text.split(), after.text.split()
        shared = max(n for n in range(min(len(old), len(new)) + 1) if old[len(old) - n :] == new[:n])
        assert counter.count([" ".join(new[:shared])])[0] <= overlap
        if shared:
            text = after.text[: len(" ".join(new[:shared]))]
            assert before.text.endswith(text)
            assert after.text.startswith(text)
        again += new[shared:]
    assert again == words


def test_overlap_repeats_as_much_as_it_may() -> None:
    words = [f"w{number}" for number in range(100)]
    segments = one(" ".join(words), Chunking("tokens", 20, 5))
    assert segments[0].text.split() == words[:20]
    assert segments[1].text.split() == words[15:35]
    assert len(segments) == 7
    assert segments[-1].text.split()[-1] == "w99"


def test_a_word_longer_than_a_segment_is_cut() -> None:
    word = "x" * 1000
    segments = one(f"before {word} after", Chunking("auto", 16, 0), COUNTERS["pairs of letters"])
    assert "".join(segment.text.replace(" ", "") for segment in segments) == f"before{word}after"
    assert max(segment.tokens for segment in segments) <= 16
    assert len(segments) < 100


def test_a_word_that_is_one_token_however_long_is_cut_where_the_model_stops_reading() -> None:
    segments = one("y" * 100_000, Chunking("auto", 256, 0), COUNTERS["one a word"])
    assert max(len(segment.text) for segment in segments) <= 256 * 64
    assert sum(len(segment.text) for segment in segments) == 100_000


def test_headings_become_a_path_and_start_segments() -> None:
    filler = " ".join(f"word{n}" for n in range(30))
    text = f"# A\n\n{filler}\n\n## B\n\n{filler}\n\n### C #\n\n{filler}\n\n## D\n\n{filler}\n\n# E\n\n{filler}"
    segments = one(text, Chunking("auto", 40, 0))
    assert [segment.metadata["headings"] for segment in segments] == [
        ["A"],
        ["A", "B"],
        ["A", "B", "C"],
        ["A", "D"],
        ["E"],
    ]
    assert [segment.text.split("\n")[0] for segment in segments] == ["# A", "## B", "### C #", "## D", "# E"]


def with_context(text: str, tokens: int, title: object, counter: Counter | None = None) -> list[Segment]:
    document = Document("text", [Block(text, {})], {"title": title})
    return split(document, Chunking("auto", tokens, 0, "headings"), counter or COUNTERS["one a word"])


def test_title_and_headings_are_the_context_and_not_the_text() -> None:
    filler = " ".join(f"word{n}" for n in range(30))
    text = f"Before.\n\n# A\n\n{filler}\n\n## B\n\n{filler}\n\n# C\n\n{filler}"
    segments = with_context(text, 44, " The \n title ")
    assert [segment.context for segment in segments] == [
        "The title",
        "The title > A",
        "The title > A > B",
        "The title > C",
    ]
    assert plain("".join(segment.text for segment in segments)) == plain(text)
    assert segments[1].embedded_text() == f"The title > A\n\n{segments[1].text}"
    assert [segment.tokens for segment in segments] == COUNTERS["one a word"].count(
        [segment.embedded_text() for segment in segments]
    )
    without = split(Document("text", [Block(text, {})], {"title": "The title"}), Chunking("auto", 44, 0), Counter())
    assert {segment.context for segment in without} == {""}
    assert [segment.embedded_text() for segment in without] == [segment.text for segment in without]


@pytest.mark.parametrize("title", [None, 3, "", " \n", "A"])
def test_a_title_that_is_none_or_the_first_heading_is_not_repeated(title: object) -> None:
    assert [segment.context for segment in with_context("# A\n\nSome text.\n\n## B\n\nMore.", 16, title)] == ["A"]


def test_of_a_long_context_the_last_headings_that_fit_a_quarter_are_kept() -> None:
    (segment,) = with_context("# one two three four five six\n\n## seven\n\ntext", 40, "a title of five words")
    assert segment.context == "one two three four five six > seven"
    (segment,) = with_context("# one two three four five six\n\n## seven\n\ntext", 24, "a title of five words")
    assert segment.context == "seven"
    (segment,) = with_context("# one two three four five six\n\ntext", 16, None)
    assert segment.context == ""


@pytest.mark.parametrize("name", COUNTERS)
@settings(max_examples=120, deadline=None)
@given(text=texts(), title=WORDS, tokens=st.integers(16, 60))
def test_a_segment_and_its_context_fit_together_and_every_character_is_in_one(
    name: str, text: str, title: str, tokens: int
) -> None:
    counter = COUNTERS[name]
    segments = with_context(text, tokens, title, counter)
    for segment in segments:
        assert segment.tokens <= tokens
        assert [segment.tokens] == counter.count([segment.embedded_text()])
    whole, rest = plain(text), "".join(plain(segment.text) for segment in segments)
    assert rest == whole if "|" not in text else _is_subsequence(whole, rest)


def test_a_heading_goes_with_what_follows_it() -> None:
    filler = " ".join(f"word{n}" for n in range(30))
    segments = one(f"{filler}\n\n# Title\n\n## Part\n\n{filler}", Chunking("auto", 40, 0))
    assert [segment.text for segment in segments] == [filler, f"# Title\n\n## Part\n\n{filler}"]
    assert [segment.metadata for segment in segments] == [{}, {"headings": ["Title", "Part"]}]


def test_small_parts_under_one_heading_are_joined_but_not_over_the_limit() -> None:
    text = "# A\n\none two\n\n## B\n\nthree four\n\n## C\n\nfive six\n\n# D\n\nseven eight"
    assert [(s.text.split()[-1], s.metadata["headings"]) for s in one(text, Chunking("auto", 40, 0))] == [
        ("six", ["A"]),
        ("eight", ["D"]),
    ]


def test_a_sign_in_a_fenced_block_is_no_heading() -> None:
    segments = one("# A\n\n```sh\n# install it\nmake\n```\n", Chunking("auto", 40, 0))
    assert [segment.metadata for segment in segments] == [{"headings": ["A"]}]


def test_the_heading_path_goes_on_over_pages_and_pages_stay_apart() -> None:
    blocks = [Block("# A\n\nfirst", {"page": 1}), Block("second", {"page": 2}), Block("third", {"page": 2})]
    segments = split(Document("pdf", blocks), Chunking("auto", 40, 0), COUNTERS["one a word"])
    assert [(s.text, s.metadata) for s in segments] == [
        ("# A\n\nfirst", {"page": 1, "headings": ["A"]}),
        ("second\n\nthird", {"page": 2, "headings": ["A"]}),
    ]


def test_a_table_repeats_its_header_and_cuts_between_rows() -> None:
    header = "| name | amount |\n| --- | ---: |"
    rows = [f"| row{n} | {n} dollars |" for n in range(40)]
    segments = one("\n".join(["Intro to it.", "", header, *rows]), Chunking("auto", 60, 10))
    assert len(segments) > 2
    assert segments[0].text.startswith("Intro to it.\n\n" + header)
    for segment in segments[1:]:
        assert segment.text.startswith(header + "\n| row")
        assert segment.tokens <= 60
    seen = [line for segment in segments for line in segment.text.splitlines() if "row" in line]
    assert seen == rows


def test_segments_tell_the_number_and_caption_of_their_table() -> None:
    table = "| name | amount |\n| --- | --- |\n| a | 1 |\n| b | 2 |"
    cases = {
        f"Table 3: Who owes what.\n\n{table}": {"number": 1, "caption": "Table 3: Who owes what."},
        f"# H\n\n{table}\n\nTable 1. Debts": {"number": 1, "caption": "Table 1. Debts"},
        f"Debts by name\n\n{table}": {"number": 1, "caption": "Debts by name"},
        f"This sentence is none.\n\n{table}": {"number": 1},
        f"Two lines\nof text\n\n{table}": {"number": 1},
        f"# H\n\n{table}": {"number": 1},
        "# H\n\nno table": None,
    }
    for text, expected in cases.items():
        assert [segment.metadata.get("table") for segment in one(text, Chunking("auto", 200, 0))] == [expected], text


def test_tables_are_counted_over_pages_and_one_that_goes_on_is_the_same() -> None:
    header = "| name | amount |\n| --- | --- |\n"
    blocks = [
        Block(f"Table 1: Debts\n\n{header}| a | 1 |", {"page": 1}),
        Block(f"{header}| b | 2 |\n\nOther\n\n| x | y |\n| --- | --- |\n| c | 3 |", {"page": 2}),
        Block(f"Table 7: More debts\n\n{header}| d | 4 |", {"page": 3}),
    ]
    segments = split(Document("pdf", blocks), Chunking("paragraph", 40, 0), COUNTERS["one a word"])
    found = [segment.metadata["table"] for segment in segments if "|" in segment.text]
    assert found == [
        {"number": 1, "caption": "Table 1: Debts"}, {"number": 1, "caption": "Table 1: Debts"},
        {"number": 2, "caption": "Other"}, {"number": 3, "caption": "Table 7: More debts"},
    ]  # fmt: skip


def test_a_table_that_fits_into_a_segment_is_not_cut_and_a_row_never_where_it_fits() -> None:
    text = "word " * 30 + "end.\n\n" + "| name | amount |\n| --- | --- |\n" + "| one two three | four five |\n" * 6
    before, table = one(text, Chunking("auto", 70, 0))
    assert before.text == ("word " * 30 + "end.").strip()
    assert table.text.count("\n") == 7
    rows = ["| r" + " and. So" * n + f" | {n} |" for n in range(1, 14)]
    segments = one("| name | amount |\n| --- | --- |\n" + "\n".join(rows), Chunking("auto", 48, 0))
    assert [line for segment in segments for line in segment.text.splitlines() if line.startswith("| r")] == rows


def test_a_table_header_too_long_to_repeat_is_not_repeated() -> None:
    header = "| " + " | ".join(f"column{n}" for n in range(12)) + " |\n|" + " --- |" * 12
    rows = ["| " + " | ".join(f"r{n}c{c}" for c in range(12)) + " |" for n in range(10)]
    segments = one("\n".join([header, *rows]), Chunking("auto", 40, 0))
    assert sum("column0" in segment.text for segment in segments) == 1
    assert max(segment.tokens for segment in segments) <= 40


def test_paragraphs_sentences_and_pages() -> None:
    text = "# T\n\nOne is here. Two is here.\n\nThree came, e.g. by train."
    blocks = [Block(text, {"page": 1}), Block("Next.", {"page": 1})]

    def cut(split_by: Any) -> list[str]:
        document = Document("text", blocks)
        return [segment.text for segment in split(document, Chunking(split_by, 40, 0), COUNTERS["one a word"])]

    assert cut("paragraph") == [
        "# T\n\nOne is here. Two is here.",
        "Three came, e.g. by train.",
        "Next.",
    ]
    assert cut("sentence") == ["# T\n\nOne is here.", "Two is here.", "Three came, e.g. by train.", "Next."]
    assert cut("page") == [text, "Next."]


def test_sentences_are_preferred_to_words() -> None:
    sentence = "This sentence has exactly seven words here."
    segments = one(" ".join([sentence] * 20), Chunking("auto", 32, 0))
    assert {segment.text[-1] for segment in segments} == {"."}
    assert [segment.tokens for segment in segments] == [28] * 5


def test_chinese_is_cut_after_its_punctuation_and_loses_nothing() -> None:
    text = "数据库可以存储向量。「检索」需要索引，查询才会很快！模型回答问题？" * 12
    segments = one(text, Chunking("auto", 40, 0))
    assert "".join(segment.text for segment in segments) == text
    assert all(segment.tokens <= 40 for segment in segments)
    assert all(segment.text[-1] in "。！？" for segment in segments)


def test_chinese_without_punctuation_and_mixed_with_latin_words() -> None:
    text = "PostgreSQL数据库版本eighteen向量" * 30
    segments = one(text, Chunking("auto", 20, 5))
    assert all(segment.tokens <= 20 for segment in segments)
    assert all(not re.search(r"(?<![A-Za-z])(ostgreSQL|ighteen)", segment.text) for segment in segments)


def test_what_postgresql_cannot_hold_is_left_out() -> None:
    assert [segment.text for segment in one("a\0b \ud800c", Chunking("auto", 16, 0))] == ["ab ?c"]


@pytest.mark.parametrize("text", ["", " \n\n\t", "\0"])
def test_nothing_gives_no_segment(text: str) -> None:
    assert one(text, Chunking("auto", 16, 0)) == []


def test_metadata_of_blocks_are_not_shared() -> None:
    segments = one("\n\n".join(["word " * 10] * 6), Chunking("paragraph", 16, 0), page=1)
    segments[0].metadata["page"] = 2
    assert segments[1].metadata == {"page": 1}


def test_splitting_a_long_text_takes_time_in_proportion() -> None:
    import time

    counter = COUNTERS["pairs of letters"]
    began = time.process_time()
    text = "Word and another one, then more. " * 30_000
    segments = one(text, Chunking("auto", 256, 0), counter)
    assert time.process_time() - began < 20
    assert " ".join(segment.text for segment in segments) == text.strip()
    assert all(segment.text.startswith("Word") for segment in segments)


def test_defaults() -> None:
    assert chunking(None, 512) == chunking({}, 512) == Chunking("auto", 256, 0)
    assert chunking({"split_by": None, "segment_tokens": None, "overlap_tokens": None}, 128) == Chunking("auto", 128, 0)
    assert chunking({"segment_tokens": 16, "overlap_tokens": 8}, 256) == Chunking("auto", 16, 8)
    assert chunking({"segment_tokens": 256.0, "split_by": "page"}, 256) == Chunking("page", 256, 0)


@pytest.mark.parametrize(
    ("options", "name", "value", "allowed"),
    [
        ({"split_by": "chapter"}, "split_by", "chapter", "auto, paragraph, sentence, page, tokens"),
        ({"split_by": ["auto"]}, "split_by", "auto", "auto"),
        ({"segment_tokens": 15}, "segment_tokens", "15", "from 16 to 256"),
        ({"segment_tokens": 257}, "segment_tokens", "257", "from 16 to 256"),
        ({"segment_tokens": "many"}, "segment_tokens", "many", "from 16 to 256"),
        ({"segment_tokens": True}, "segment_tokens", "True", "from 16 to 256"),
        ({"overlap_tokens": -1}, "overlap_tokens", "-1", "from 0 to 128"),
        ({"overlap_tokens": 129}, "overlap_tokens", "129", "from 0 to 128"),
        ({"segment_tokens": 17, "overlap_tokens": 9}, "overlap_tokens", "9", "from 0 to 8"),
        ({"size": 3}, "chunking", "size", "split_by, segment_tokens, overlap_tokens"),
        ([1], "chunking", "1", "split_by"),
    ],
)
def test_bad_options_are_named(options: Any, name: str, value: str, allowed: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^invalid value of {name}$") as caught:
        chunking(options, 256)
    assert value in str(caught.value.detail)
    assert allowed in str(caught.value.detail)


def test_a_long_heading_is_repeated_in_part_only() -> None:
    heading = "x" * 10_000
    segments = one(f"# {heading}\n\n{'some words ' * 500}", Chunking("auto", 64, 0))
    assert len(segments) > 10
    assert all(segment.metadata["headings"] == ["x" * HEADING_CHARACTERS] for segment in segments)
    assert "".join("".join(segment.text.split()) for segment in segments).count("x") == len(heading)
