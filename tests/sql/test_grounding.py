"""pipeline/grounding: ml_check_grounding, and options grounding, min_support and remove_unsupported of ml_rag."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from support.cluster import Connection
from support.stores import answer, create_store, error, fake_embedding, warnings_of

FACTS = [
    "Hotels are paid in full.",
    {"fact_text": "The hotel limit is 180 euros in London.", "attributes": {"page": 3}},
]
SCHEMA = {"remove_unsupported": True, "model_options": {"json_schema": {"type": "object"}}}
SEGMENTS = ["Hotels are paid in full. The hotel limit is 180 euros in London.", "Trains are free."]


def grounding(connection: Connection, text: Any, facts: Any = FACTS, **options: Any) -> Any:
    arguments = (text, json.dumps(facts), json.dumps(options))
    return connection.execute("SELECT ml_check_grounding(%s, %s, %s)", arguments).fetchone()[0]


def test_the_reply(asker: Connection) -> None:
    text = "The hotel limit is 180 euros in London. Dinner is free."
    found = grounding(asker, text)
    assert found["support_score"] == 0.5
    assert found["cited_chunks"] == [{"chunk_text": "The hotel limit is 180 euros in London.", "source": 1, "index": 0}]
    limit, dinner = found["claims"]
    assert (limit["start_pos"], limit["end_pos"], limit["citation_indices"]) == (0, 39, [0])
    assert (dinner["claim_text"], dinner["score"], dinner["citation_indices"]) == ("Dinner is free.", 0, [])


def test_positions_are_characters(asker: Connection) -> None:
    text = "Größe 😀. Hotels are paid in full."
    claim = grounding(asker, text)["claims"][1]
    assert text[claim["start_pos"] : claim["end_pos"]] == "Hotels are paid in full."


def test_the_options(asker: Connection) -> None:
    text = "The limit is 180 euros in Paris."
    (claim,) = grounding(asker, text)["claims"]
    assert 0 < claim["score"] < 0.6
    assert claim["citation_indices"] == []
    (claim,) = grounding(asker, text, citation_threshold=0.3)["claims"]
    assert claim["citation_indices"] == [0]
    assert grounding(asker, text, claims=False).keys() == {"support_score", "cited_chunks"}
    # "der" and "ist" are stop words of German
    german = grounding(asker, "Der Zug ist frei.", ["Zug frei"], language="de")
    assert german["support_score"] == 1
    assert grounding(asker, "Der Zug ist frei.", ["Zug frei"], language="en")["support_score"] < 1


def test_a_cross_encoder_and_a_judge(asker: Connection) -> None:
    found = grounding(asker, "Hotels are paid in full. Hello!", model="fake-rerank")
    claim, greeting = found["claims"]
    assert 0 <= claim["score"] <= 1
    assert greeting["score"] is None
    (claim, _) = grounding(asker, "Hotels are paid in full. Hello!", model="fake-generate")["claims"]
    assert claim["score"] in (0, 0.25, 0.5, 0.75, 1)


@pytest.mark.parametrize(
    ("text", "facts", "options", "detail"),
    [
        (" ", FACTS, {}, None),
        (None, FACTS, {}, None),
        ("a", [], {}, "Got 0 facts."),
        ("a", ["b"] * 201, {}, "Got 201 facts."),
        ("a", {"fact_text": "b"}, {}, "Got object."),
        ("a", ["b", 3], {}, "A fact is a text"),
        ("a", [{"fact_text": 1}], {}, "A fact is a text"),
        ("a", [{"attributes": {}}], {}, "A fact is a text"),
        ("a", [{"fact_text": "b", "attributes": []}], {}, "A fact is a text"),
        ("a", [{"fact_text": "b", "text": "c"}], {}, "A fact is a text"),
        ("a", ["b" * 1_000_000], {}, "1000001 characters"),
        ("a", ["b"], {"citation_threshold": 1.1}, "citation_threshold"),
        ("a", ["b"], {"model": "none"}, None),
        ("a", ["b"], {"model": "fake-embed"}, None),
    ],
)
def test_errors(asker: Connection, text: Any, facts: Any, options: Any, detail: str | None) -> None:
    arguments = (text, json.dumps(facts), json.dumps(options))
    with error("22023", *[detail] * bool(detail)):
        asker.execute("SELECT ml_check_grounding(%s, %s, %s)", arguments)
    assert grounding(asker, "a", ["b"] * 200)["support_score"] == 0


def test_it_needs_no_model_server_and_no_writing(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('model_server', 'http://127.0.0.1:1')")
    with asker.transaction():
        asker.execute("SET TRANSACTION READ ONLY")
        assert grounding(asker, "Hotels are paid in full.")["support_score"] == 1


def test_it_can_be_cancelled(asker: Connection) -> None:
    text = " ".join(f"In {year} the town had {year * 3} houses." for year in range(12_000))
    asker.execute("SET statement_timeout = '300ms'")
    began = time.monotonic()
    with error("57014", ours=False):
        grounding(asker, text, [text])
    assert time.monotonic() - began < 2


@pytest.fixture
def store(owner: Connection) -> None:
    rows = [("travel.md", 1, place, text, fake_embedding(text)) for place, text in enumerate(SEGMENTS, start=1)]
    create_store(owner, "handbook", rows, type="vector(16)")


def rag(connection: Connection, **options: Any) -> Any:
    model = {"model_id": "extractive", "max_sentences": 1}
    return answer(connection, "the hotel limit in London", {"model_options": model, "n_citations": 2, **options})


@pytest.mark.usefixtures("store")
def test_an_answer_is_checked_by_its_citations(asker: Connection) -> None:
    assert "grounding" not in rag(asker)["retrieval_info"]
    found = rag(asker, grounding={})["retrieval_info"]["grounding"]
    assert found["support_score"] == 1
    assert found["claims"][0]["claim_text"] == "The hotel limit is 180 euros in London."
    assert "supported_text" not in found
    assert "claims" not in rag(asker, grounding={"claims": False})["retrieval_info"]["grounding"]
    # a check that is asked for by what it is used for
    assert rag(asker, min_support=0.5)["retrieval_info"]["grounding"]["support_score"] == 1
    assert "text" not in rag(asker, grounding={}, skip_generate=True)


@pytest.mark.usefixtures("store")
def test_an_answer_without_citations_has_no_support(asker: Connection) -> None:
    options = {"n_citations": 0, "model_options": {"model_id": "fake-generate"}, "grounding": {}}
    found = answer(asker, "Trains are free.", options)
    assert found["text"].startswith("fake answer to: Trains are free.")
    assert [claim["citation_indices"] for claim in found["retrieval_info"]["grounding"]["claims"]] == [[], []]


@pytest.mark.usefixtures("store")
def test_too_little_support(asker: Connection) -> None:
    # the model echoes the prompt's instructions, which no citation has
    options = {"model_options": {"model_id": "fake-generate"}, "n_citations": 2}
    query = "the hotel limit in London"
    found = answer(asker, query, {**options, "grounding": {}})
    support = found["retrieval_info"]["grounding"]["support_score"]
    assert support < 1
    with warnings_of(asker) as warnings:
        assert answer(asker, query, {**options, "min_support": 1})["citations"]
    assert warnings == [("WARNING", "01000", "the citations do not support the answer well")]
    limits = {"retrieval_options": {"max_distance": 2}, "abstain": True, "abstain_text": "No idea."}
    found = answer(asker, query, {**options, **limits, "min_support": 1})
    assert (found["text"], found["citations"]) == ("No idea.", [])
    assert found["retrieval_info"]["grounding"]["support_score"] == support


@pytest.mark.usefixtures("store")
def test_errors_of_the_options(asker: Connection) -> None:
    for options in ({"min_support": 2}, SCHEMA):
        with error("22023"):
            answer(asker, "q", options)


@pytest.mark.usefixtures("store")
def test_highlights(asker: Connection) -> None:
    for skip_generate in (True, False):
        citations = rag(asker, citation_fields=["highlights", "rank"], skip_generate=skip_generate)["citations"]
        for citation in citations:
            passages = [citation["segment"][h["start"] : h["end"]] for h in citation["highlights"]]
            is_travel = citation["segment"] == SEGMENTS[0]
            assert passages == (["The hotel limit is 180 euros in London."] if is_travel else [])
            assert [h["score"] for h in citation["highlights"]] == [1] * is_travel
        assert [citation["rank"] for citation in citations] == [1, 2]


def test_stop_words_of_highlights_are_those_of_the_store(owner: Connection, asker: Connection) -> None:
    vector = [1, 0, 0]
    text = "Was ist das für ein Haus? Das ist es. Der Platz kostet 35 Euro."
    create_store(owner, rows=[("a.txt", 1, 1, text, vector)])
    options = {"query_embedding": vector, "skip_generate": True, "citation_fields": ["highlights"]}

    def best() -> str:
        found = answer(asker, "Was ist das für ein Platz?", options)["citations"][0]["highlights"][0]
        return text[found["start"] : found["end"]]

    assert best() == "Das ist es."
    owner.execute("""SELECT ml_rag.enable_keyword_search('docs', '{"language": "de"}')""")
    assert best() == "Der Platz kostet 35 Euro."
    owner.execute("CREATE SCHEMA hidden; CREATE TEXT SEARCH CONFIGURATION hidden.own (COPY = german)")
    owner.execute("""SELECT ml_rag.enable_keyword_search('docs', '{"text_search_configuration": "hidden.own"}')""")
    assert best() == "Das ist es."  # who asks may not use it
    owner.execute("DROP TEXT SEARCH CONFIGURATION hidden.own")
    assert best() == "Das ist es."


def test_keys_of_the_metadata(owner: Connection, asker: Connection) -> None:
    rows = [("travel.md", 1, place, text, fake_embedding(text)) for place, text in enumerate(SEGMENTS, start=1)]
    create_store(owner, "handbook", rows, type="vector(16)")
    owner.execute(
        """UPDATE handbook SET metadata = '{"page": 7, "author": {"name": "Ann"}}' WHERE segment_number = 1"""
    )
    fields = ["metadata.page", "metadata.author.name", "segment_number"]
    citations = rag(asker, citation_fields=fields, skip_generate=True)["citations"]
    found = {c["segment_number"]: (c["page"], c["name"]) for c in citations}
    assert found == {1: (7, "Ann"), 2: (None, None)}
    assert "metadata" not in citations[0]
    for wrong in (
        ["metadata."],
        ["meta.page"],
        ["metadata.distance"],
        ["metadata.a.page", "metadata.page"],
        ["metadata.rank"],
    ):
        with error("22023", "citation_fields"):
            rag(asker, citation_fields=wrong)
