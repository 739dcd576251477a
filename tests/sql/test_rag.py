"""pipeline/rag: the public routines, their options and their output, as docs/answers.md has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.cluster import Connection, Database
from support.stores import ROWS, answer, create_store, create_text_store, error, fake_embedding, retrieve, search


def test_answer_has_exactly_the_documented_keys_in_their_order(owner: Connection, asker: Connection) -> None:
    create_text_store(owner)
    document = answer(asker, "cats chase mice")
    assert list(document) == ["text", "citations", "vector_store", "retrieval_info"]
    assert document["text"] == "fake answer to: cats chase mice [documents: 3]"
    assert len(document["citations"]) == 3
    for citation in document["citations"]:
        assert list(citation) == ["segment", "distance", "document_name"]
        assert isinstance(citation["segment"], str)
        assert isinstance(citation["distance"], float | int)
        assert citation["document_name"] == "d.txt"
    assert document["citations"][0]["segment"] == "cats chase mice"
    assert document["citations"][0]["distance"] == 0
    # two words of three shared: 1 - 2/3
    assert document["citations"][1] == {"segment": "dogs chase cats", "distance": 0.3333, "document_name": "d.txt"}
    assert document["vector_store"] == ["public.texts"]
    assert list(document["retrieval_info"]) == ["method", "threshold"]
    assert document["retrieval_info"] == {"method": "n_citations", "threshold": document["citations"][-1]["distance"]}


def test_json_text_of_the_answer_keeps_the_order_too(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    text = asker.execute(
        """SELECT ml_rag_answer('q', '{"query_embedding": [1,0,0], "n_citations": 1}')::text"""
    ).fetchone()
    assert text == (
        '{"text": "fake answer to: q [documents: 1]", "citations": [{"segment": "one two", "distance": 0.0000, '
        '"document_name": "a.txt"}], "vector_store": ["public.docs"], "retrieval_info": {"method": "n_citations", '
        '"threshold": 0.0000}}',
    )


@pytest.mark.parametrize(
    ("options", "method", "threshold"),
    [
        ({}, "n_citations", 0.2929),
        ({"retrieval_options": {"max_distance": 0.5, "segment_overlap": 0}}, "max_distance", 0.5),
        ({"retrieval_options": {"percentage_distance": 10, "segment_overlap": 0}}, "percentage_distance", 0),
    ],
)
def test_skip_generate_leaves_the_text_out_and_nothing_else(
    owner: Connection, asker: Connection, options: dict[str, object], method: str, threshold: float
) -> None:
    create_store(owner, rows=ROWS[:2])
    document = retrieve(asker, (1, 0, 0), **options)
    assert list(document) == ["citations", "vector_store", "retrieval_info"]
    assert document["retrieval_info"] == {"method": method, "threshold": threshold}


def test_no_citations_asked_for_is_no_retrieval_at_all(asker: Connection) -> None:
    # there is no store in this database: retrieval would have failed
    assert answer(asker, "what?", {"n_citations": 0}) == {
        "text": "fake answer to: what? [documents: 0]",
        "citations": [],
        "vector_store": [],
        "retrieval_info": {"method": "n_citations", "threshold": None},
    }


def test_no_citations_and_no_generation_is_an_empty_document(asker: Connection) -> None:
    assert list(answer(asker, "what?", {"n_citations": 0, "skip_generate": True})) == [
        "citations",
        "vector_store",
        "retrieval_info",
    ]


def test_default_is_three_citations_and_ten_with_a_limit(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[(f"{i}", i, 1, f"s{i}", (1, i, 0)) for i in range(30)])
    assert len(retrieve(asker, (1, 0, 0))["citations"]) == 3
    for limit in (
        {"max_distance": 5},
        {"percentage_distance": 900000},
        {"max_distance": 5, "percentage_distance": 9e5},
    ):
        options = {"retrieval_options": {**limit, "segment_overlap": 0}}
        assert len(retrieve(asker, (2, 1, 0), **options)["citations"]) == 10
        assert len(retrieve(asker, (2, 1, 0), **options, n_citations=2)["citations"]) == 2
    assert len(retrieve(asker, (1, 0, 0), retrieval_options={"segment_overlap": 0})["citations"]) == 3
    assert len(retrieve(asker, (1, 0, 0), n_citations=None)["citations"]) == 3
    options = {"retrieval_options": {"max_distance": None, "segment_overlap": 0}}
    assert len(retrieve(asker, (1, 0, 0), **options)["citations"]) == 3


@pytest.mark.parametrize("n", [1, 100])
def test_n_citations_at_its_limits(owner: Connection, asker: Connection, n: int) -> None:
    create_store(owner, rows=[(f"{i}", i, 1, f"s{i}", (1, i, 0)) for i in range(120)])
    assert len(retrieve(asker, (1, 0, 0), n_citations=n)["citations"]) == n


def test_call_returns_the_document_in_output(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    options = json.dumps({"query_embedding": [1, 0, 0], "n_citations": 1})
    (output,) = asker.execute("CALL ml_rag('q', %s)", (options,)).fetchone()
    assert output == answer(asker, "q", options)
    (output,) = asker.execute("CALL ml_rag(query => 'q', options => %s)", (options,)).fetchone()
    assert output["text"] == "fake answer to: q [documents: 1]"


def test_call_with_mysqls_order_of_arguments(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    options = json.dumps({"query_embedding": [1, 0, 0], "skip_generate": True})
    (output,) = asker.execute(f"CALL ml_rag('q', NULL, '{options}')").fetchone()
    assert "text" not in output
    # options win where both are given, and what output held is not looked at
    (output,) = asker.execute(f"CALL ml_rag('q', '{options}', '{{\"nonsense\": 1}}')").fetchone()
    assert "text" not in output
    with error("22023", '"nonsense"'):
        asker.execute("CALL ml_rag('q', NULL, '{\"nonsense\": 1}')")


def test_call_by_simple_protocol_with_literals_only(owner: Connection, db: Database) -> None:
    create_text_store(owner)
    connection = db.connect("asker")
    result = connection.pgconn.exec_(b"CALL ml_rag('cats')")
    output = result.get_value(0, 0)
    assert output is not None
    assert list(json.loads(output)) == ["text", "citations", "vector_store", "retrieval_info"]


def test_call_from_plpgsql_fills_a_variable(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    asker.execute("""
        DO $$
        DECLARE
          _answer jsonb;
        BEGIN
          CALL ml_rag('q', '{"query_embedding": [1,0,0], "skip_generate": true}', _answer);
          ASSERT _answer -> 'citations' -> 0 ->> 'segment' = 'one two', _answer::text;
        END
        $$""")


def test_prepared_statement_with_parameters(owner: Connection, asker: Connection) -> None:
    create_text_store(owner)
    for query in ("cats chase mice", "fish swim deep", "birds fly south") * 3:
        row = asker.execute(
            "SELECT segment FROM ml_rag_search($1, $2)".replace("$1", "%s").replace("$2", "%s"),
            (query, json.dumps({"n_citations": 1})),
            prepare=True,
        ).fetchone()
        assert row == (query,)


def test_selectable_routines_work_in_a_read_only_transaction(owner: Connection, asker: Connection) -> None:
    create_text_store(owner)
    asker.execute("SET default_transaction_read_only = on")
    options = {"retrieval_options": {"max_distance": "auto"}}
    assert answer(asker, "cats chase mice", options)["citations"]
    assert search(asker, "cats chase mice", options)
    (output,) = asker.execute("CALL ml_rag('cats')").fetchone()
    assert output["text"]
    assert asker.execute("SELECT ml_generate('hello')").fetchone() == (
        {"text": "fake answer to: hello [documents: 0]", "error": None},
    )
    assert asker.execute("SELECT vector_dims(ml_embed_row('hello'))").fetchone() == (16,)
    assert asker.execute("SELECT count(*) > 3 FROM ml_supported_models()").fetchone() == (True,)


def test_search_returns_one_typed_row_a_citation(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    cursor = asker.execute("""SELECT * FROM ml_rag_search('q', '{"query_embedding": [1,0,0], "n_citations": 2}')""")
    assert cursor.description is not None
    assert [c.name for c in cursor.description] == [
        "rank",
        "vector_store",
        "document_name",
        "document_id",
        "segment_number",
        "segment",
        "distance",
        "metadata",
        "keyword_score",
        "score",
        "rerank_score",
    ]
    assert [c.type_display for c in cursor.description] == [
        "int4",
        "text",
        "text",
        "int8",
        "int4",
        "text",
        "numeric",
        "jsonb",
        "float8",
        "float8",
        "float8",
    ]
    first, second = cursor.fetchall()
    assert first[:6] == (1, "public.docs", "a.txt", 1, 1, "one two")
    assert str(first[6]) == "0.0000"
    assert first[7] == {"n": 1}
    assert second[:6] == (2, "public.docs", "a.txt", 1, 2, "two three")
    assert str(second[6]) == "0.2929"
    assert first[8:] == second[8:] == (None, None, None)


def test_search_and_answer_agree(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    options = {"query_embedding": [1, 2, 3], "n_citations": 4, "retrieval_options": {}, "skip_generate": True}
    rows = search(asker, "q", options)
    assert [{"segment": r[5], "distance": float(r[6]), "document_name": r[2]} for r in rows] == answer(
        asker, "q", options
    )["citations"]


@pytest.mark.parametrize("query", ["", " ", "\t\n\r ", None])
def test_empty_query_is_refused(asker: Connection, query: str | None) -> None:
    for options in (None, {"n_citations": 0}, {"query_embedding": [1]}):
        with error("22023", "empty"):
            answer(asker, query, options)
        with error("22023", "empty"):
            search(asker, query, options)


@pytest.mark.parametrize(
    "query",
    [
        "x" * 1_000_000,
        "word " * 200_000,
        "😀 emoji 🏳️‍🌈 and more",
        "bell \x07 escape \x1b[31m delete \x7f c1 \x80",
        "right to left \u202e and zero width \u200b and bom \ufeff",
        "'; DROP TABLE docs; --",
        '%s %I {} $1 \\ " </document>',
        "\U0010ffff\ufffe\uffff",
        "ａ" * 1000,
    ],
    ids=lambda query: ascii(query[:12]),
)
def test_odd_and_huge_queries_are_answered(owner: Connection, asker: Connection, query: str) -> None:
    create_text_store(owner)
    assert len(search(asker, query)) == 3
    if len(query) < 10_000:
        document = answer(asker, query)
        assert document["text"].startswith("fake answer to: ")
    else:
        # the fake model's context holds 4,096 words, and nothing of more than 64 characters each
        with_text = {"n_citations": 1}
        if query.count(" ") > 4096 or len(query) > 64 * 4096:
            with error("22023"):
                answer(asker, query, with_text)
        else:
            assert answer(asker, query, with_text)["text"]


def test_model_options_reach_the_model(owner: Connection, asker: Connection) -> None:
    create_text_store(owner)
    document = answer(asker, "cats chase mice", {"model_options": {"max_tokens": 2}})
    assert document["text"] == "fake answer"
    with error("22023", "no-such-model"):
        answer(asker, "cats", {"model_options": {"model_id": "no-such-model"}})
    with error("22023", "fake-embed"):
        answer(asker, "cats", {"model_options": {"model_id": "fake-embed"}})


def test_an_answer_says_what_it_took_and_why_it_ended(owner: Connection, asker: Connection) -> None:
    create_text_store(owner)
    usage = answer(asker, "cats chase mice", {"return_usage": True})["usage"]
    assert usage.keys() == {"prompt_tokens", "generated_tokens", "finish_reason"}
    assert usage["prompt_tokens"] > 10
    assert usage["finish_reason"] == "stop"
    usage = answer(asker, "cats chase mice", {"return_usage": True, "model_options": {"max_tokens": 2}})["usage"]
    assert (usage["generated_tokens"], usage["finish_reason"]) == (2, "length")
    nothing = {"return_usage": True, "abstain": True, "filters": {"n": 99}}
    assert answer(asker, "cats", nothing)["usage"] == dict.fromkeys(usage)
    assert "usage" not in answer(asker, "cats chase mice")
    assert "usage" not in answer(asker, "cats chase mice", {"return_usage": True, "skip_generate": True})


def test_routines_live_in_the_schema_named_at_create_extension(owner: Connection) -> None:
    owner.execute("DROP EXTENSION ml_rag; CREATE SCHEMA sys; CREATE EXTENSION ml_rag SCHEMA sys")
    with error("22023", "empty"):
        owner.execute("CALL sys.ml_rag('')")
    schemas = owner.execute(
        "SELECT DISTINCT pronamespace::regnamespace::text FROM pg_proc JOIN pg_depend ON objid = pg_proc.oid"
        " WHERE deptype = 'e' AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ml_rag') ORDER BY 1"
    ).fetchall()
    assert schemas == [("ml_rag",), ("sys",)]


def test_call_inside_a_transaction_block_and_a_savepoint(owner: Connection, asker: Connection) -> None:
    create_text_store(owner)
    with asker.transaction():
        with error("22023"), asker.transaction():
            answer(asker, "cats", {"n_citations": 101})
        assert answer(asker, "cats")["citations"]


def shown(connection: Connection, query: str, **options: object) -> list[str]:
    return [line for (line,) in connection.execute("SELECT ml_rag_show(%s, %s)", (query, json.dumps(options)))]


def test_an_answer_is_shown_in_lines(owner: Connection, asker: Connection) -> None:
    text = "Cats sleep. Dogs chase cats,\n at night. " + "They run. " * 40
    vector = [1, 0, 0]
    create_store(owner, rows=[("a.pdf", 1, 1, text, vector), ("b.txt", 2, 1, "mice", [0, 1, 0])])
    owner.execute("""UPDATE docs SET metadata = '{"page": 7, "title": "Animals"}' WHERE document_id = 1""")
    lines = shown(asker, "who do dogs chase?", query_embedding=vector)
    assert lines[:3] == [
        "fake answer to: who do dogs chase? [documents: 2]",
        "",
        "[1] Animals, a.pdf, page 7, distance 0.0000: Dogs chase cats, at night.",
    ]
    assert lines[3:] == ["[2] b.txt, distance 1.0000: mice"]
    # without highlights the beginning of the segment, of 240 characters
    (first,) = shown(asker, "who?", query_embedding=vector, skip_generate=True, n_citations=1, citation_fields=["rank"])
    passage = first.removeprefix("[1] a.pdf, distance 0.0000: ")
    assert passage.startswith("Cats sleep. Dogs chase cats, at night. They run.")
    assert passage.endswith("…")
    assert len(passage) == 240


def test_an_answer_without_citations_is_its_text_alone(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    far = {"query_embedding": [-1, -1, -1], "retrieval_options": {"max_distance": 0.1}}
    assert shown(asker, "q", **far) == ["I do not know: nothing relevant was found in the documents."]
    with error("P0002"):
        shown(asker, "q", **far, skip_generate=True)
    with error("22023", "n_citation"):
        shown(asker, "q", n_citation=1)


def test_row_level_security_holds_for_what_is_shown(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "mine", [1, 0, 0]), ("b", 2, 1, "theirs", [1, 0, 0])])
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (document_id = 1)")
    assert shown(asker, "q", query_embedding=[1, 0, 0])[2:] == ["[1] a, distance 0.0000: mine"]


@pytest.mark.parametrize(
    "options",
    [
        {"citation_fields": ["metadata", "metadata.a", "rank"]},
        {"rerank": {"model_id": "hybrid"}},
        {"skip_generate": False, "model_options": {"model_id": "extractive"}, "prompt": {"metadata": True}},
    ],
    ids=["citations", "reranked", "documents"],
)
def test_metadata_of_very_many_strings_are_no_trouble(
    owner: Connection, asker: Connection, options: dict[str, Any]
) -> None:
    """One call of jsonb_agg takes the square of their number, and is not cancelled: 400,000 took 7 s."""
    create_store(owner, "docs", [("d", 1, 1, "the grebe eats fish", fake_embedding("grebe"))], "vector(16)")
    owner.execute(
        "UPDATE docs SET metadata = m.many || jsonb_build_object('a', m.many) FROM"
        " (SELECT jsonb_object_agg(i, 'x') AS many FROM generate_series(1, 500000) AS i) AS m"
    )
    asker.execute("SET statement_timeout = '8s'")
    found = answer(asker, "what does the grebe eat", {"skip_generate": True, **options})
    assert found["citations"][0]["segment"] == "the grebe eats fish"
    if "citation_fields" in options:
        assert len(found["citations"][0]["a"]) == 500_000
        assert len(found["citations"][0]["metadata"]) == 500_001
    if "prompt" in options:  # without the metadata, which a request has no room for
        assert found["text"] == "the grebe eats fish"
