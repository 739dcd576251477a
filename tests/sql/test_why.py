"""pipeline/why: what became of one segment in a call, and which option lets it in."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from support.cluster import Connection, Database
from support.stores import Row, as_text, create_store, error, fake_embedding, grant, search

WORDS = ["heron", "grebe", "loon", "tern", "gull", "swan", "duck", "coot", "rail", "snipe"]


def segment(document: int, number: int, text: str) -> Row:
    return f"d{document:02}", document, number, text, fake_embedding(text)


@pytest.fixture(scope="module")
def birds(module_db: Database) -> Connection:
    """A connection as a user to 40 documents of 5 segments of 3 to 12 words."""
    rng = random.Random(6)
    owner = module_db.connect()
    rows = [segment(d, n, " ".join(rng.choices(WORDS, k=rng.randint(3, 12)))) for d in range(40) for n in range(5)]
    create_store(owner, "birds", rows, type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('birds')")
    owner.execute(
        "CREATE FUNCTION public.shortness(query text, segment text) RETURNS float8 LANGUAGE sql IMMUTABLE"
        " AS 'SELECT CASE WHEN segment !~ ''duck'' THEN -length(segment) END'"
    )
    return module_db.connect("asker")


Step = tuple[str, str | None, bool, int | None, Any, float | None, str, str | None]


def why(
    connection: Connection, query: str, options: dict[str, Any], document: str, number: int | None = None
) -> list[Step]:
    """stage, arm, is_kept, rank, distance, score, detail, hint"""
    return connection.execute(
        "SELECT * FROM ml_rag.why_not(%s, %s, %s, %s)", (query, Jsonb(options), document, number)
    ).fetchall()  # type: ignore[return-value]


def cited(connection: Connection, query: str, options: dict[str, Any]) -> list[tuple[str, int]]:
    try:
        return [(row[2], row[4]) for row in search(connection, query, options)]
    except psycopg.errors.NoDataFound:
        return []


OWN = {"search": "function", "function": "public.shortness", "candidates": 30, "min_score": -40}
ARMS = [{"search": "semantic", "candidates": 20}, {"search": "keyword", "candidates": 20, "min_score": 0.5}]
CALLS: dict[str, dict[str, Any]] = {
    "by meaning": {},
    "by words": {"semantic_search": False, "keyword_search": True, "n_citations": 5},
    "hybrid": {"keyword_search": True, "hybrid_options": {"candidates": 30}},
    "a threshold": {"retrieval_options": {"max_distance": 0.2, "segment_overlap": 0}, "n_citations": 40},
    "a percentage": {"retrieval_options": {"percentage_distance": 40, "segment_overlap": 0}, "n_citations": 20},
    "arms": {"arms": ARMS, "n_citations": 10},
    "a limit of the arm": {"arms": [{"search": "semantic", "max_distance": 0.25}], "n_citations": 100},
    "a function": {"arms": [OWN, {"search": "keyword", "candidates": 5}], "n_citations": 12},
    "reranked": {"rerank": {"candidates": 20}, "n_citations": 4},
    "a score": {"rerank": {"candidates": 20, "min_score": 0.5}, "n_citations": 20},
    "filters": {"filters": {"n": {"gt": 2}}, "n_citations": 20},
    "keywords": {"required_keywords": ["heron"], "excluded_keywords": ["loon"], "n_citations": 20},
}


@pytest.mark.parametrize("name", CALLS)
def test_it_agrees_with_the_search(birds: Connection, name: str) -> None:
    options = CALLS[name]
    query = "heron heron tern loon"
    found = cited(birds, query, {"retrieval_options": {"segment_overlap": 0}, **options})
    dropped = 0
    for document, number in [*found[:6], *[(f"d{d:02}", d % 5) for d in range(0, 40, 3)]]:
        steps = why(birds, query, {"retrieval_options": {"segment_overlap": 0}, **options}, document, number)
        assert steps[-1][2] is ((document, number) in found), (document, number, steps)
        if steps[-1][2]:
            assert steps[-1][0] == "citations"
            assert steps[-1][3] == found.index((document, number)) + 1
            assert steps[-1][7] is None
        else:
            dropped += 1
            assert any(step[7] for step in steps if not step[2])
        # an arm may drop what another one keeps; of the other stages only the last one may
        assert all(step[2] for step in steps[:-1] if step[1] is None)
    assert dropped


def test_the_hint_lets_it_in(birds: Connection) -> None:
    """Followed again and again, hints lead to a citation."""
    query = "tern coot"
    tried = 0
    for name in ("by meaning", "a threshold", "a percentage", "reranked", "a score"):
        for document in ("d01", "d17", "d29"):
            options = json.loads(json.dumps({"retrieval_options": {"segment_overlap": 0}, **CALLS[name]}))
            for _ in range(5):
                steps = why(birds, query, options, document, 2)
                if steps[-1][2]:
                    break
                tried += 1
                hint = next(step[7] for step in reversed(steps) if not step[2])
                assert hint is not None
                if given := re.match(r"(\{.*\}) lets it", hint):
                    for key, value in json.loads(given[1]).items():
                        options[key] = {**options[key], **value} if isinstance(value, dict) else value
                elif given := re.match(r'"n_citations" of at least (\d+) lets it in', hint):
                    options["n_citations"] = min(100, int(given[1]))
                    if int(given[1]) > 100:
                        break
                elif given := re.match(r'"candidates" of rerank of at least (\d+) lets it in', hint):
                    options["rerank"]["candidates"] = int(given[1])
                elif hint.startswith("Rerank the candidates"):
                    break
                else:
                    pytest.fail(hint)
            else:
                pytest.fail(f"{name}, {document}: {steps}")
    assert tried > 5


def test_each_stage_says_what_it_did(birds: Connection) -> None:
    options = {"keyword_search": True, "hybrid_options": {"candidates": 3}, "rerank": {"candidates": 4}}
    best = cited(birds, "heron", {**options, "retrieval_options": {"segment_overlap": 0}})[0]
    steps = why(birds, "heron", {**options, "filters": {"n": {"gte": 0}}}, *best)
    stages = [step[0] for step in steps]
    assert stages == ["filter", "search", "keyword", "fuse", "rerank", "citations"]
    assert [step[1] for step in steps] == [None, "semantic", "keyword", None, None, None]
    assert steps[-1][3] == 1
    assert "of 4 candidates" in next(step[6] for step in steps if step[1] is not None and step[2])
    own = why(birds, "heron", CALLS["a function"], *next(
        (d, n) for d, n, text in birds.execute("SELECT document_name, segment_number, segment FROM birds ORDER BY 1, 2")
        if "duck" in text
    ))  # fmt: skip
    assert own[0][:2] == ("function", "function")
    assert own[0][6].startswith("The function public.shortness gives it no score")
    # an arm that did not bring it says at which place it would have
    far = why(birds, "heron", {"arms": [{"search": "semantic", "candidates": 3}], "n_citations": 3}, "d39", 4)
    everything = cited(
        birds, "heron", {"n_citations": 100, "retrieval_options": {"segment_overlap": 0}, "document_name": ["d39"]}
    )
    assert far[-1][:3] == ("search", "semantic", False)
    assert far[-1][3] is not None
    assert far[-1][3] > 3
    assert f'"candidates" of the arm of at least {far[-1][3]}' in str(far[-1][7])
    assert ("d39", 4) in everything


def test_without_a_number_the_best_segment_of_the_document_is_followed(birds: Connection) -> None:
    best = cited(birds, "snipe", {"retrieval_options": {"segment_overlap": 0}})[0]
    assert why(birds, "snipe", {}, best[0])[-1][3] == 1
    assert why(birds, "snipe", {}, best[0])[-1][2] is True


def test_a_neighbour_is_cited_with_the_segment_beside_it(birds: Connection) -> None:
    options: dict[str, Any] = {"n_citations": 1, "retrieval_options": {"segment_overlap": 0}}
    document, number = cited(birds, "gull gull swan", options)[0]
    beside = number + 1 if number < 4 else number - 1
    assert why(birds, "gull gull swan", options, document, beside)[-1][:3] == ("search", "semantic", False)
    options["retrieval_options"] = {"segment_overlap": 1}
    steps = why(birds, "gull gull swan", options, document, beside)
    assert [step[:3] for step in steps] == [("search", "semantic", False), ("expand", None, True)]
    assert f"neighbour of segment {number}" in steps[-1][6]
    # neighbours are read whatever the filters say of them
    steps = why(birds, "gull gull swan", {**options, "filters": {"n": number}}, document, beside)
    assert [step[:3] for step in steps] == [("filter", None, False), ("expand", None, True)]


def test_what_filters_leave_out_is_named(birds: Connection) -> None:
    def left_out(**options: Any) -> tuple[str, str]:
        step = why(birds, "heron", options, "d05", 1)[-1]
        assert step[:3] == ("filter", None, False)
        return step[6], str(step[7])

    assert left_out(filters={"n": {"gt": 3}}) == (
        'It does not pass "filters".',
        'Leave "filters" out, or change what it asks for.',
    )
    assert '"document_name"' in left_out(document_name=["d06"])[0]
    assert '"exclude_document_name"' in left_out(exclude_document_name=["d05"])[0]
    detail, hint = left_out(required_keywords=["ostrich"], filters={"n": 7})
    assert detail == 'It does not pass "filters" and "required_keywords".'
    assert "required_keywords" in hint


def test_a_segment_that_is_not_there(birds: Connection) -> None:
    step = why(birds, "heron", {}, "D05.pdf")[-1]
    assert step[:3] == ("discover", None, False)
    assert "public.birds" in step[6]
    assert step[7] == 'Did you mean "d05"?'
    step = why(birds, "heron", {}, "d05", 77)[-1]
    assert step[6] == "The document has no segment of that number; its segments are 0 to 4."
    assert "explain" in str(why(birds, "heron", {}, "something else altogether")[-1][7])


def test_a_name_without_its_folders(owner: Connection, asker: Connection) -> None:
    names = ["/srv/new/a.pdf", "/srv/old/b.pdf", "/srv/new/b.pdf", "C:\\\\c.pdf", "d.pdf", "/srv/d.pdf"]
    rows = [(name, n, 1, f"heron {n}", fake_embedding(f"heron {n}")) for n, name in enumerate(names, 1)]
    create_store(owner, "foldered", rows, type="vector(16)")
    options = {"n_citations": 6, "vector_store": ["public.foldered"]}

    def last(document: str, number: int | None = None) -> Step:
        return why(asker, "heron", options, document, number)[-1]

    for short, full in (("a.pdf", names[0]), ("c.pdf", names[3]), ("d.pdf", "d.pdf")):
        assert last(short)[:3] == ("citations", None, True)
        assert why(asker, "heron", options, short) == why(asker, "heron", options, full)
    # of two documents neither is meant
    assert last("b.pdf")[0] == "discover"
    assert str(last("b.pdf")[7]).startswith('Did you mean "/srv/new/b.pdf" or "/srv/old/b.pdf"')
    # the same ending counts more than the same name without it
    owner.execute("UPDATE foldered SET document_name = '/a/b.md' WHERE document_id = 1")
    assert str(last("b.pdf")[7]).startswith('Did you mean "/srv/new/b.pdf" or "/srv/old/b.pdf" or "/a/b.md"')
    owner.execute("UPDATE foldered SET document_name = '/srv/new/a.pdf' WHERE document_id = 1")
    assert last("a.pdf", 2)[6] == "The document has no segment of that number; its segments are 1 to 1."
    # a name whose rows are hidden is none
    owner.execute("ALTER TABLE foldered ENABLE ROW LEVEL SECURITY")
    owner.execute("CREATE POLICY seen ON foldered USING (document_name NOT LIKE '/srv/new/%')")
    assert last("a.pdf")[0] == "discover"
    assert last("b.pdf")[:3] == ("citations", None, True)
    assert why(asker, "heron", options, "b.pdf") == why(asker, "heron", options, names[1])


def test_segments_without_numbers(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE plain (name text, body text, vec vector(16))")
    owner.execute("INSERT INTO plain VALUES ('a.pdf', 'heron', %s::vector)", (as_text(fake_embedding("heron")),))
    owner.execute("GRANT SELECT ON plain TO ml_rag_user")
    options = {
        "vector_store": ["public.plain"], "embed_model_id": "fake-embed",
        "vector_store_columns": {"segment": "body", "segment_embedding": "vec", "document_name": "name"},
    }  # fmt: skip
    step = why(asker, "heron", options, "a.pdf", 1)[-1]
    assert step[6] == "The segments of the document have no numbers."
    assert step[7] == 'Leave "segment_number" out, and the best segment of the document is followed.'
    assert why(asker, "heron", options, "a.pdf")[-1][:3] == ("citations", None, True)


def test_a_page_of_a_document(owner: Connection, asker: Connection) -> None:
    rows = [
        ("a.pdf", 1, n, text, fake_embedding(text))
        for n, text in enumerate(["heron", "heron gull", "tern", "tern swan"], 1)
    ]
    create_store(owner, "paged", rows, type="vector(16)")
    owner.execute("UPDATE paged SET metadata = jsonb_build_object('page', (segment_number + 1) / 2)")

    def follow(page: int, number: int | None = None, **options: Any) -> Step:
        return asker.execute(
            "SELECT * FROM ml_rag.why_not('heron', %s, 'a.pdf', %s, page => %s)", (Jsonb(options), number, page)
        ).fetchall()[-1]  # type: ignore[return-value]

    # the best segment of the page
    assert follow(1, n_citations=4)[:4] == ("citations", None, True, 1)
    assert follow(2, n_citations=4)[:4] == ("citations", None, True, 3)
    assert follow(1, 2, n_citations=4)[:4] == ("citations", None, True, 2)
    assert follow(2, n_citations=1)[:3] == ("search", "semantic", False)
    assert follow(2, filters={"page": 1})[6] == 'It does not pass "filters".'
    for page, number in ((3, None), (1, 3), (2147483647, None)):
        step = follow(page, number)
        assert step[:3] == ("discover", None, False)
        assert step[6] == f"The document has no such segment of page {page}."


def test_rows_that_an_arm_cannot_find(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[segment(1, 1, "heron"), ("d02", 2, 1, "grebe", None)], type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    steps = why(asker, "heron", {"keyword_search": True}, "d02", 1)
    assert [step[:3] for step in steps] == [
        ("search", "semantic", False), ("keyword", "keyword", False), ("fuse", None, False)
    ]  # fmt: skip
    assert steps[0][6] == "It has no embedding yet."
    assert steps[1][6] == 'It has none of the words that the arm searches for: "heron".'
    # what is on already is not proposed
    assert str(steps[1][7]).startswith("Give the arm other words")
    assert steps[2][7] == "See the hints of the arms."


def test_hidden_rows_are_as_rows_that_are_not_there(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[segment(1, 1, "heron"), segment(2, 1, "heron heron")], type="vector(16)")
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    owner.execute("CREATE POLICY p ON docs USING (document_id = 1)")
    hidden, absent = (why(asker, "heron", {}, name) for name in ("d02", "d03"))
    assert [step[:6] for step in hidden] == [step[:6] for step in absent]
    assert [step[6:] for step in hidden] == [step[6:] for step in absent]
    owner.execute("REVOKE SELECT ON docs FROM ml_rag_user")
    with error("P0002", "no vector store found"):
        why(asker, "heron", {}, "d01")
    grant(owner, "docs")


def test_whole_documents(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[segment(1, 1, "heron")], type="vector(16)")
    steps = why(asker, "Summarize d01", {"document_name": ["d01"]}, "d01", 1)
    assert [step[0] for step in steps] == ["filter", "read"]
    assert steps[-1][2] is True


def test_checks_of_assignments_that_the_session_asks_for_hold(birds: Connection) -> None:
    with birds.transaction():
        birds.execute("SET LOCAL plpgsql.extra_errors = 'strict_multi_assignment'")
        assert why(birds, "heron", {}, "d01")


def test_what_is_asked_wrongly(birds: Connection) -> None:
    with error("22023", "name of the document is empty"):
        why(birds, "heron", {}, " ")
    with error("22023", "n_citations"):
        why(birds, "heron", {"n_citations": 0}, "d01")
    with error("22023", "the question is empty"):
        why(birds, "", {}, "d01")
    with error("22023", "unknown option"):
        why(birds, "heron", {"nonsense": 1}, "d01")
