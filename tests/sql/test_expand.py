"""pipeline/neighbours: segments beside those that were found, against brute force and by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support import reference
from support.cluster import Connection, Database, value_of
from support.metrics import METRICS
from support.searching import load, random_segments
from support.stores import create_store, grant, mark, retrieve, search


@pytest.mark.parametrize("metric", METRICS)
def test_overlap_against_brute_force(owner: Connection, asker: Connection, metric: str) -> None:
    generator = random.Random(f"expand {metric}")
    segments = random_segments(generator, ["public.a", "public.b"], 96)
    load(owner, segments)
    merged = 0
    for _ in range(24):
        query = [generator.randint(-2, 2) or 1 for _ in range(3)]
        overlap = generator.randint(0, 5)
        n = generator.choice((1, 3, 10, 25))
        expected = reference.retrieve(segments, query, metric=metric, n=n, overlap=overlap)
        got = retrieve(
            asker, query, distance_metric=metric, n_citations=n, retrieval_options={"segment_overlap": overlap}
        )
        assert got["citations"] == expected["citations"]
        merged += len(got["citations"]) < n
    assert merged > 5


ROWS = [("a", 1, i, f"s{i}", (1, i, 0)) for i in range(10)]


def test_overlap_is_one_where_retrieval_options_are_given_else_none(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)

    def texts(**options: Any) -> list[str]:
        citations = retrieve(asker, (1, 5, 0), n_citations=1, **options)["citations"]
        return [c["segment"] for c in citations]

    assert texts() == ["s5"]
    assert texts(retrieval_options=None) == ["s5"]
    assert texts(retrieval_options={}) == ["s4\ns5\ns6"]
    assert texts(retrieval_options={"segment_overlap": None}) == ["s4\ns5\ns6"]
    assert texts(retrieval_options={"segment_overlap": "auto"}) == ["s4\ns5\ns6"]
    assert texts(retrieval_options={"segment_overlap": 0}) == ["s5"]
    assert texts(retrieval_options={"segment_overlap": 5}) == ["\n".join(f"s{i}" for i in range(10))]


def test_ranges_that_touch_become_one_with_the_nearest_distance(owner: Connection, asker: Connection) -> None:
    # hits 0 and 3 with overlap 1: 0-1 and 2-4 touch; hits 0 and 4: 0-1 and 3-5 do not
    rows = [(*row[:4], (1, 0, 0) if row[2] == 0 else (1, 1, 0) if row[2] == 3 else (0, 0, 1)) for row in ROWS]
    create_store(owner, "docs", rows)
    options = {"n_citations": 2, "retrieval_options": {}}
    (citation,) = retrieve(asker, (1, 0, 0), **options)["citations"]
    assert citation == {"segment": "s0\ns1\ns2\ns3\ns4", "distance": 0, "document_name": "a"}
    owner.execute("UPDATE docs SET segment_embedding = '[0,0,1]' WHERE segment_number = 3")
    owner.execute("UPDATE docs SET segment_embedding = '[1,1,0]' WHERE segment_number = 4")
    citations = retrieve(asker, (1, 0, 0), **options)["citations"]
    assert [(c["segment"], c["distance"]) for c in citations] == [("s0\ns1", 0), ("s3\ns4\ns5", 0.2929)]


def test_merged_citations_are_ordered_by_their_nearest_distance(owner: Connection, asker: Connection) -> None:
    create_store(
        owner,
        rows=[
            ("x", 1, 1, "x1", (1, 0.3, 0)),
            ("x", 1, 2, "x2", (1, 0.1, 0)),
            ("y", 2, 1, "y1", (1, 0.2, 0)),
            ("y", 2, 2, "y2", (0, 0, 1)),
        ],
    )
    rows = search(asker, "q", {"query_embedding": [1, 0, 0], "retrieval_options": {}})
    assert [(r[0], r[5], r[4]) for r in rows] == [(1, "x1\nx2", 2), (2, "y1\ny2", 1)]
    assert rows[0][6] < rows[1][6]


def test_neighbours_come_from_the_hits_own_document_and_store(owner: Connection, asker: Connection) -> None:
    create_store(owner, "one", [("same", 1, i, f"one{i}", (1, i, 0)) for i in range(3)])
    create_store(owner, "two", [("same", 1, i, f"two{i}", (0, 0, 1)) for i in range(3)])
    options = {"n_citations": 1, "retrieval_options": {"segment_overlap": 5}}
    assert retrieve(asker, (1, 1, 0), **options)["citations"][0]["segment"] == "one0\none1\none2"


def test_gaps_in_the_numbers_are_no_neighbours(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, i, f"s{i}", (1, i, 0)) for i in (1, 2, 4, 10)])
    options = {"n_citations": 1, "retrieval_options": {"segment_overlap": 2}}
    assert retrieve(asker, (1, 2, 0), **options)["citations"][0]["segment"] == "s1\ns2\ns4"
    assert retrieve(asker, (1, 10, 0), **options)["citations"][0]["segment"] == "s10"


def test_neighbours_may_be_outside_the_filters_but_not_without_text(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[*ROWS[:3], ("a", 1, 3, None, (1, 3, 0)), ("a", 1, 4, "s4", None)])
    options = {"n_citations": 1, "retrieval_options": {"segment_overlap": 2}, "document_name": ["a"]}
    assert retrieve(asker, (1, 2, 0), **options)["citations"][0]["segment"] == "s0\ns1\ns2\ns4"


def test_row_level_security_hides_neighbours(db: Database, owner: Connection) -> None:
    create_store(owner, rows=ROWS)
    owner.execute(
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY;"
        f"CREATE POLICY even ON docs TO {db.role('asker')} USING (segment_number % 2 = 0);"
        f"CREATE POLICY every ON docs TO {db.role('tenant')} USING (true)"
    )
    options: dict[str, Any] = {"n_citations": 1, "retrieval_options": {"segment_overlap": 2}}
    assert retrieve(db.connect("asker"), (1, 4, 0), **options)["citations"][0]["segment"] == "s2\ns4\ns6"
    seen = retrieve(db.connect("tenant"), (1, 4, 0), **options)["citations"][0]["segment"]
    assert seen == "s2\ns3\ns4\ns5\ns6"


def test_largest_and_smallest_numbers_do_not_overflow(owner: Connection, asker: Connection) -> None:
    ends = (2**31 - 1, -(2**31))
    create_store(owner, rows=[("a", i, n, f"s{n}", (1, i, 0)) for i, n in enumerate(ends)])
    options = {"n_citations": 2, "retrieval_options": {"segment_overlap": 5}}
    assert {c["segment"] for c in retrieve(asker, (1, 0, 0), **options)["citations"]} == {f"s{n}" for n in ends}


def join(connection: Connection, a: str, b: str) -> str:
    return str(value_of(connection, "SELECT ml_rag._joined(ARRAY[%s, %s])", (a, b)))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("one two three", "two three four", "one two three four"),
        ("one two", "three", "one two\nthree"),
        ("|a|b|\n|-|-|\n|1|2|", "|a|b|\n|-|-|\n|3|4|", "|a|b|\n|-|-|\n|1|2|\n|3|4|"),
        ("|a|b|\n|-|-|\n|1|2|", "|c|b|\n|-|-|\n|3|4|", "|a|b|\n|-|-|\n|1|2|\n|c|b|\n|-|-|\n|3|4|"),
        ("|a|b|\n|-|-|\n|1|2|\n\ntext", "|a|b|\n|-|-|\n|3|4|", "|a|b|\n|-|-|\n|1|2|\n\ntext\n|a|b|\n|-|-|\n|3|4|"),
        ("same text", "same text", "same text"),
        ("a b", "b a b", "a b a b"),
        ("x y x", "x y x z", "x y x z"),
        # a letter in common is no text in common
        ("the cat", "table", "the cat\ntable"),
        ("the cat", "cats", "the cat\ncats"),
        ("bobcat", "cat food", "bobcat\ncat food"),
        ("end. ", "\n end. Next", "end. Next"),
        ("one, two.", "two. Three", "one, two. Three"),
        ("", "b", "\nb"),
        ("größe über alles", "über alles hinaus", "größe über alles hinaus"),
        ("ein Weg", "g und", "ein Weg\ng und"),
        ("100%", "100% sure", "100% sure"),
        ("a\\b", "a\\b c", "a\\b c"),
        ("東京タワーは高い", "は高いです", "東京タワーは高いです"),
        ("x" * 50 + " tail", "tail", "x" * 50 + " tail"),
        ("ends with a word", "word, and more", "ends with a word, and more"),
        ("a b", "b-c", "a b-c"),
        ("(x", "(x)", "(x)"),
        ("w" * 40, "w" * 40 + " z", "w" * 40 + " z"),
    ],
    ids=ascii,
)
def test_shared_text_is_written_once(module_asker: Connection, a: str, b: str, expected: str) -> None:
    assert join(module_asker, a, b) == expected


words = st.lists(st.sampled_from(["a", "b", "ab", "ba", "c.", "b,", "a-b"]), max_size=8).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(a=words, b=words, shared=words)
@example(a="", b="", shared="")
def test_joining_against_brute_force(module_asker: Connection, a: str, b: str, shared: str) -> None:
    first, second = f"{a} {shared}", f"{shared} {b}"
    assert join(module_asker, first, second) == reference.joined(first, second)


def test_joining_long_segments_is_quick(module_asker: Connection) -> None:
    module_asker.execute("SET statement_timeout = '5s'")
    text = "word " * 4000
    assert join(module_asker, text + "end", "word end of it").endswith("word end of it")
    module_asker.execute("RESET statement_timeout")


def test_a_table_over_several_segments_has_its_header_once(module_asker: Connection) -> None:
    segments = ["Rates:\n|a|b|\n|-|-|\n|1|2|", "|a|b|\n|-|-|\n|3|4|", "|a|b|\n|-|-|\n|5|6|\n", "\nThe end"]
    row = module_asker.execute("SELECT ml_rag._joined(%s)", (segments,)).fetchone()
    assert row == ("Rates:\n|a|b|\n|-|-|\n|1|2|\n|3|4|\n|5|6|\nThe end",)
    apart = ["|a|b|\n|-|-|\n|1|2|\n", "", None, "|3|4|", "|a|b|\n|-|-|\n|5|6|"]
    row = module_asker.execute("SELECT ml_rag._joined(%s)", (apart,)).fetchone()
    assert row == ("|a|b|\n|-|-|\n|1|2|\n|3|4|\n|5|6|",)


def test_many_segments_of_one_number_take_time_that_grows_with_them(owner: Connection, asker: Connection) -> None:
    columns = "document_name text, segment_number integer, segment text, segment_embedding vector(3)"
    owner.execute(f"CREATE TABLE docs (id serial PRIMARY KEY, {columns})")
    mark(owner, "docs")
    grant(owner, "docs")
    owner.execute(
        "INSERT INTO docs (document_name, segment_number, segment, segment_embedding) SELECT 'a.txt', 1, 'word ' || n"
        " || repeat(' and more of it', 100), '[1, 0, 0]' FROM generate_series(1, 2500) AS n"
    )
    asker.execute("SET statement_timeout = '60s'")  # a hundredth of it; minutes where each is added to all before
    found = retrieve(asker, (1, 0, 0), retrieval_options={"segment_overlap": 1})["citations"]
    assert len(found[0]["segment"]) > 2500 * 1400


def test_a_store_without_numbers_is_left_as_it_is(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    owner.execute("ALTER TABLE docs DROP COLUMN segment_number")
    citations = retrieve(asker, (1, 5, 0), n_citations=2, retrieval_options={"segment_overlap": 5})["citations"]
    assert {c["segment"] for c in citations} == {"s5", "s6"}
