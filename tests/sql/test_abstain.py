"""Where nothing relevant enough is found: one settable sentence and no model, or the error P0002."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Connection
from support.stores import answer, create_store, error, search

ROOT = Path(__file__).resolve().parents[2]
SENTENCE = "I do not know: nothing relevant was found in the documents."
ROWS = [("a", 1, 1, "near", (1, 0, 0)), ("a", 1, 2, "far", (0, 1, 0))]
#: the nearest of ROWS to it is at the distance 0.2929
BETWEEN = [1, 1, 0]
#: a model that fails whenever it is called
NO_MODEL = {"model_options": {"model_id": "fake-generate-error"}}


@pytest.fixture(scope="module")
def documents(module_owner: Connection, module_asker: Connection) -> Connection:
    create_store(module_owner, rows=ROWS)
    return module_asker


def ask(connection: Connection, max_distance: Any = 0.2928, **options: Any) -> Any:
    retrieval = {} if max_distance is None else {"max_distance": max_distance}
    return answer(connection, "q", {"query_embedding": BETWEEN, "retrieval_options": retrieval, **options})


def test_a_question_with_nothing_near_enough_gets_the_sentence_and_no_model(documents: Connection) -> None:
    document = ask(documents, **NO_MODEL)
    assert document == {
        "text": SENTENCE,
        "citations": [],
        "vector_store": ["public.docs"],
        "retrieval_info": {"method": "max_distance", "threshold": 0.2928},
    }
    assert list(document) == ["text", "citations", "vector_store", "retrieval_info"]
    with error("38000"):
        ask(documents, 1, **NO_MODEL)


def test_at_the_limit_there_is_an_answer(documents: Connection) -> None:
    assert ask(documents, 0.2929)["text"].startswith("fake answer to: q")


def test_the_procedure_and_a_table_of_questions_abstain_too(owner: Connection) -> None:
    create_store(owner, rows=ROWS)
    options = json.dumps({"query_embedding": BETWEEN, "retrieval_options": {"max_distance": 0}, **NO_MODEL})
    (output,) = owner.execute("CALL ml_rag('q', %s)", (options,)).fetchone() or ({},)
    assert output["text"] == SENTENCE
    owner.execute("CREATE TABLE questions (id int PRIMARY KEY, q text); INSERT INTO questions VALUES (1, 'q')")
    owner.execute("CALL ml_rag_table('public.questions.q', 'public.questions.a', %s)", (options,))
    kept = owner.execute("SELECT a ->> 'text', a -> 'citations', a ? 'error' FROM questions").fetchone()
    assert kept == (SENTENCE, [], False)


@pytest.mark.parametrize(
    "options", [{"abstain": False}, {"skip_generate": True}, {"skip_generate": True, "abstain": True}]
)
def test_without_it_and_without_a_text_nothing_near_enough_is_an_error(
    documents: Connection, options: dict[str, Any]
) -> None:
    with error("P0002", "distance threshold", "0.2929", "0.2928"):
        ask(documents, **options)


def test_a_search_has_no_text_to_abstain_in(documents: Connection) -> None:
    options = {"query_embedding": BETWEEN, "abstain": True, "retrieval_options": {"max_distance": 0}}
    with error("P0002", "distance threshold", "0.2929"):
        search(documents, "q", options)
    with error("P0002", "no segment found") as caught:
        search(documents, "q", {"query_embedding": BETWEEN, "abstain": True, "document_name": ["z"]})
    assert caught.hint == (
        'Check "document_name" (names as the stores hold them: a loaded file\'s whole path),'
        " and whether the stores have rows."
    )


@pytest.mark.parametrize(
    ("options", "default"),
    [
        ({}, False),
        ({"retrieval_options": {}}, False),
        ({"retrieval_options": {"max_distance": None}}, False),
        # the nearest segment always passes it
        ({"retrieval_options": {"percentage_distance": 0}}, False),
        ({"rerank": {}}, False),
        ({"rerank": {"min_score": None}}, False),
        ({"rerank": {"min_score": 0}}, True),
        ({"retrieval_options": {"max_distance": 999999.9999}}, True),
        ({"retrieval_options": {"max_distance": "auto"}}, True),
        ({"retrieval_options": {"max_distance": 1}, "abstain": None}, True),
        ({"retrieval_options": {"max_distance": 1}, "abstain": False}, False),
        ({"abstain": True}, True),
    ],
    ids=json.dumps,
)
def test_it_is_on_where_a_limit_says_what_is_relevant(
    documents: Connection, options: dict[str, Any], default: bool
) -> None:
    row = documents.execute("SELECT ml_rag._parse_rag_options(%s) -> 'abstain'", (json.dumps(options),)).fetchone()
    assert row == (default,)


@pytest.mark.parametrize(("least", "abstains"), [(0.5, False), (0.51, True)])
def test_a_reranker_that_finds_nothing_good_enough_is_a_reason_too(
    documents: Connection, least: float, abstains: bool
) -> None:
    # the fake reranker's score is the share of the query's words: one of two
    options = {"query_embedding": BETWEEN, "rerank": {"model_id": "fake-rerank", "min_score": least}}
    document = answer(documents, "near what", options)
    assert (document["text"] == SENTENCE) == abstains
    assert (document["citations"] == []) == abstains
    if abstains:
        assert document["retrieval_info"] == {"method": "n_citations", "threshold": None}
        with error("P0002", "score threshold", "0.5"):
            answer(documents, "near what", {**options, "abstain": False})
        with error("P0002", "score threshold", "0.5"):
            answer(documents, "near what", {**options, "skip_generate": True})


@pytest.mark.parametrize(
    "more", [{}, {"retrieval_options": {"percentage_distance": 0}}, {"rerank": {}}], ids=json.dumps
)
def test_to_abstain_without_a_limit_is_to_abstain_with_auto(documents: Connection, more: dict[str, Any]) -> None:
    far, near = {"query_embedding": [0, 0, 1], **more}, {"query_embedding": BETWEEN, **more}
    document = answer(documents, "q", {**far, "abstain": True, **NO_MODEL})
    assert (document["text"], document["citations"]) == (SENTENCE, [])
    assert document["retrieval_info"] == {"method": "max_distance", "threshold": 0.6}
    assert answer(documents, "q", {**near, "abstain": True})["citations"]
    for options in ({}, {"abstain": False}, {"abstain": None}):
        assert answer(documents, "q", {**far, **options})["text"].startswith("fake answer to: q")


def test_a_limit_of_the_call_is_the_only_one(documents: Connection) -> None:
    far = {"query_embedding": [0, 0, 1], "abstain": True}
    for limit in ({"retrieval_options": {"max_distance": 1}}, {"rerank": {"model_id": "fake-rerank", "min_score": 0}}):
        assert answer(documents, "q", {**far, **limit})["text"].startswith("fake answer to: q")


def test_the_limit_that_abstain_sets_is_all_that_it_sets(documents: Connection) -> None:
    given, set_by = ({"abstain": True, **o} for o in ({"retrieval_options": {"max_distance": "auto"}}, {}))
    rows = [
        documents.execute("SELECT ml_rag._parse_rag_options(%s)", (json.dumps(o),)).fetchone() for o in (given, set_by)
    ]
    (full,), (short,) = (row or ({},) for row in rows)
    assert (full["n_citations"], short["n_citations"]) == (10, 3)
    assert short["retrieval_options"] == {"max_distance": full["retrieval_options"]["max_distance"]}


def test_nothing_at_all_found_is_a_reason_too(documents: Connection) -> None:
    nothing = {"abstain": True, "document_name": ["no such document"], **NO_MODEL}
    assert ask(documents, None, **nothing)["text"] == SENTENCE
    assert ask(documents, 0.5, **nothing)["retrieval_info"] == {"method": "max_distance", "threshold": 0.5}
    with error("P0002", "no segment found"):
        ask(documents, None, document_name=["no such document"])


def test_no_store_at_all_is_always_an_error(owner: Connection, asker: Connection) -> None:
    with error("P0002", "no vector store found"):
        answer(asker, "q", {"abstain": True, "retrieval_options": {"max_distance": 0}})
    create_store(owner, rows=ROWS)
    with error("P0002", "no vector store found"):
        ask(asker, abstain=True, schema=["elsewhere"])


def test_no_retrieval_is_nothing_to_abstain_from(documents: Connection) -> None:
    assert ask(documents, n_citations=0, abstain=True)["text"] == "fake answer to: q [documents: 0]"


# -- the sentence -----------------------------------------------------------------------------------------------------


def test_the_option_beats_the_setting_and_the_setting_the_default(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    owner.execute("SELECT ml_rag.configure('abstain_text', 'Dazu steht hier nichts.')")
    assert ask(asker)["text"] == "Dazu steht hier nichts."
    assert ask(asker, abstain_text="这里没有。")["text"] == "这里没有。"
    assert ask(asker, abstain_text=None)["text"] == "Dazu steht hier nichts."
    owner.execute("SELECT ml_rag.configure('abstain_text', NULL)")
    assert ask(asker)["text"] == SENTENCE


@pytest.mark.parametrize("sentence", [".", " padded ", "Nothing [9] here.", '{"json": "too"}', "x" * 10_000, "%s \\ '"])
def test_the_sentence_is_said_as_it_is(documents: Connection, sentence: str) -> None:
    schema = {"model_options": {"json_schema": {"type": "object"}}}
    assert ask(documents, abstain_text=sentence)["text"] == sentence
    assert ask(documents, abstain_text=sentence, **schema)["text"] == sentence


def test_a_blank_setting_is_refused_and_only_the_owner_makes_one(owner: Connection, asker: Connection) -> None:
    for bad in ("", " ", "\n"):
        with error("22023", "blank"):
            owner.execute("SELECT ml_rag.configure('abstain_text', %s)", (bad,))
    with error("42501", ours=False):
        asker.execute("SELECT ml_rag.configure('abstain_text', 'x')")


def examples() -> list[tuple[str, dict[str, Any]]]:
    """Options of the documents that abstain: in SQL, and in the presets of a gateway."""
    found: list[tuple[str, dict[str, Any]]] = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        given = re.findall(r"'(\{[^']*\})'", text)
        found += [(page.name, json.loads(one)) for one in given if re.search(r'"abstain": *true', one)]
        for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
            presets = tomllib.loads(block).get("models", {}).values()
            found += [(page.name, preset) for preset in presets if preset.get("abstain")]
    return found


def test_each_example_that_abstains_does(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "the king of the castle", (1, 0, 0))])
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    for page, options in examples():
        options = {name: value for name, value in options.items() if name != "vector_store"}
        document = answer(asker, "who is the king of Spain?", {**options, "query_embedding": [0, 0, 1], **NO_MODEL})
        assert (document["text"], document["citations"]) == (SENTENCE, []), page
        assert answer(asker, "who is king?", {**options, "query_embedding": [1, 0, 0]})["citations"], page
    # the preset of the gateway, and Metabase
    assert [page for page, _ in examples()].count("stack.md") >= 2
