"""evaluate/make: questions made of segments; evaluate/evaluate: reasons, citations, metrics of the caller's."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from support.cluster import Connection, value_of
from support.loading import rows
from support.scripted import MODEL, Script
from support.stores import Row, create_store, error, fake_embedding, warnings_of

BIRDS = ["heron", "grebe", "loon", "tern", "gull", "swan", "duck", "coot", "rail", "crane"]
TEXTS = [
    f"The {bird} of segment {i} lives beside the long and quiet river, where it eats {i} fish a day"
    for i, bird in enumerate(BIRDS)
]


@pytest.fixture
def birds(owner: Connection, asker: Connection, script: Script) -> Connection:
    found: list[Row] = [(f"{bird}.txt", i, 7, TEXTS[i], fake_embedding(TEXTS[i])) for i, bird in enumerate(BIRDS)]
    create_store(owner, "docs", found, type="vector(16)")
    return asker


def writer(body: dict[str, Any]) -> Any:
    """Asks for what stands in the text, or for a weight, which stands nowhere."""
    asked = body["messages"][-1]["content"]
    properties = body["response_format"]["json_schema"]["schema"]["properties"]
    if "is_answered" in properties:
        assert asked.count("<document ") == 5
        return {"is_answered": "weigh" not in asked.rpartition("</document>")[2]}
    found = re.search(r"The (\w+) of segment (\d+)", asked)
    assert found is not None
    if "answer" in properties:
        return {"question": f"How many fish does the {found[1]} eat?", "answer": f"{found[2]} fish"}
    return {"question": f"What does the {found[1]} weigh?" if found[1] != "loon" else "How many fish does it eat?"}


def make(connection: Connection, **options: Any) -> list[Any]:
    return rows(
        connection, "SELECT * FROM ml_rag.make_questions('docs', %s)", json.dumps({"model_id": MODEL, **options})
    )


def test_filters_of_the_settings_hold(birds: Connection, owner: Connection, script: Script) -> None:
    """With filters of their own and without: calls would find no answer in other segments."""
    script.answer = writer
    options = json.dumps({"filters": {"document_name": ["tern.txt", "gull.txt"]}})
    owner.execute("SELECT ml_rag.configure('default_options', %s)", (options,))
    for own in ({}, {"filters": {"segment_number": 7}}):
        with warnings_of(birds):
            made = make(birds, n=3, unanswerable=0, **own)
        assert sorted(row[2] for row in made) == ["gull.txt", "tern.txt"]


def test_questions_are_made_of_segments(birds: Connection, script: Script) -> None:
    script.answer = writer
    made = make(birds, n=4, unanswerable=2)
    answerable = [row for row in made if row[4]]
    assert len(answerable) == 4
    for question, reference, document, number, _ in answerable:
        (name,) = re.findall("the (\\w+) eat", question)
        assert (reference, document, number) == (f"{BIRDS.index(name)} fish", f"{name}.txt", 7)
    others = [row for row in made if not row[4]]
    assert len(others) == 2
    assert all("weigh" in question and row[1:4] == (None, None, None) for question, *_ in others for row in others)
    assert len({row[0] for row in made}) == 6
    assert make(birds, n=4, unanswerable=2) == made
    assert make(birds, n=4, unanswerable=2, seed=1) != made
    # and what they are for
    options = json.dumps({"model_id": MODEL, "n": 3, "unanswerable": 1})
    run = value_of(
        birds,
        'SELECT ml_rag_evaluate(%s, \'{"columns": {"documents": "document_name", "answers": "reference"}}\')',
        (f"SELECT * FROM ml_rag.make_questions('docs', '{options}')",),
    )
    assert (run["counted"]["recall@3"], run["counted"]["refused_rightly"]) == (3, 1)


def test_questions_that_the_store_answers_are_not_called_unanswerable(birds: Connection, script: Script) -> None:
    def answers_all(body: dict[str, Any]) -> Any:
        properties = body["response_format"]["json_schema"]["schema"]["properties"]
        return {"is_answered": True} if "is_answered" in properties else writer(body)

    script.answer = answers_all
    with warnings_of(birds) as warnings:
        assert make(birds, n=0, unanswerable=2) == []
    assert [message for *_, message in warnings] == ["2 questions fewer than asked for"]


@pytest.mark.parametrize("nonsense", ["no JSON", {"question": " ", "answer": "x"}, {"question": "x", "answer": ""}, {}])
def test_what_the_model_writes_that_is_none_is_left_out(birds: Connection, script: Script, nonsense: Any) -> None:
    good = iter([True, False] * 100)
    script.answer = lambda body: writer(body) if next(good) else nonsense
    assert len(make(birds, n=3, unanswerable=0)) == 3


def test_only_segments_that_pass_and_that_the_caller_sees(birds: Connection, script: Script, owner: Connection) -> None:
    script.answer = writer
    made = make(birds, n=10, unanswerable=0, filters={"document_name": ["heron.txt", "coot.txt"]})
    assert {row[2] for row in made} == {"heron.txt", "coot.txt"}
    owner.execute(
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (document_name = 'gull.txt')"
    )
    assert [row[2] for row in make(birds, n=10, unanswerable=0)] == ["gull.txt"]
    assert "Its language: de." in (make(birds, n=1, unanswerable=0, language="de") and script.prompt)


@pytest.mark.parametrize(
    ("options", "sqlstate", "word"),
    [
        ({"n": -1}, "22023", "n"),
        ({"model_id": "extractive"}, "55000", "only takes sentences out of documents"),
        ({"model_id": "smollm2-135m-instruct"}, "55000", "too small"),
        ({"model_id": "nowhere"}, "22023", "nowhere"),
    ],
)
def test_what_is_wrong_is_said(birds: Connection, options: Any, sqlstate: str, word: str) -> None:
    with error(sqlstate, word):
        make(birds, **options)


def test_a_table_that_is_not_a_store(birds: Connection, owner: Connection) -> None:
    owner.execute("CREATE TABLE plain (a int); GRANT SELECT ON plain TO ml_rag_user")
    with error("P0002"):
        birds.execute("SELECT * FROM ml_rag.make_questions('plain', %s)", (json.dumps({"model_id": MODEL}),))
    with error("42P01"):
        birds.execute("SELECT * FROM ml_rag.make_questions(NULL)")


QUESTION = "SELECT 1 AS id, 'How many fish does the heron eat?' AS question, '0 fish' AS answers"


def evaluate(connection: Connection, query: str = QUESTION, **options: Any) -> Any:
    options = {"options": {"model_options": {"model_id": MODEL}}, **options}
    return value_of(connection, "SELECT ml_rag_evaluate(%s, %s)", (query, json.dumps(options)))


@pytest.mark.parametrize(
    ("text", "expected"), [("0 fish [1].", 1), ("0 fish.", 0), ("0 fish [7].", 0), ("[x] [] 0 fish", 0)]
)
def test_whether_an_answer_points_to_a_citation(birds: Connection, script: Script, text: str, expected: int) -> None:
    script.answer = text
    run = evaluate(birds, generate=True)
    assert (run["measures"]["has_citation"], run["counted"]["has_citation"]) == (expected, 1)


def test_the_judge_gives_its_reason(birds: Connection, script: Script) -> None:
    script.answer = lambda body: (
        {"reason": f"because of {'fish' if 'support' in body['messages'][-1]['content'] else 'herons'}", "score": 3}
        if "response_format" in body
        else "0 fish"
    )
    run = evaluate(birds, judge_model_id=MODEL)
    assert (run["measures"]["groundedness"], run["measures"]["relevance"]) == (0.75, 0.75)
    kept = rows(birds, "SELECT reasons FROM ml_rag.evaluation_question WHERE run_id = %s", run["run_id"])
    assert kept == [({"groundedness": "because of fish", "relevance": "because of herons"},)]


@pytest.fixture
def metrics(owner: Connection) -> None:
    owner.execute(
        "CREATE SCHEMA own; GRANT USAGE ON SCHEMA own TO ml_rag_user;"
        "CREATE FUNCTION own.n_found(question text, answer jsonb, reference text) RETURNS float8 LANGUAGE sql"
        " AS $$ SELECT jsonb_array_length(answer -> 'citations')::float8 $$;"
        "CREATE FUNCTION own.says_it(question text, answer jsonb, reference text) RETURNS float8 LANGUAGE sql"
        " AS $$ SELECT (strpos(answer ->> 'text', reference) > 0)::integer::float8 $$;"
        "CREATE FUNCTION own.fails(question text, answer jsonb, reference text) RETURNS float8 LANGUAGE sql"
        " AS $$ SELECT 1 / length(substr(question, 1, 0))::float8 $$;"
        "CREATE FUNCTION own.nothing(question text, answer jsonb, reference text) RETURNS float8 LANGUAGE sql"
        " AS $$ SELECT CASE question WHEN 'x' THEN 1.0 ELSE 'NaN' END::float8 $$;"
        "CREATE FUNCTION own.other(question text) RETURNS float8 LANGUAGE sql AS $$ SELECT 1.0::float8 $$;"
        'CREATE FUNCTION own."Two words"(question text, answer jsonb, reference text) RETURNS float8 LANGUAGE sql'
        " AS $$ SELECT 1.0::float8 $$;"
    )


def test_metrics_of_the_callers(birds: Connection, script: Script, metrics: None) -> None:
    script.answer = "It eats 0 fish."
    run = evaluate(birds, generate=True, metrics=["own.n_found", "own.says_it", "own.nothing"])
    assert (run["measures"]["n_found"], run["measures"]["says_it"]) == (3, 1)
    assert "nothing" not in run["measures"]
    # without an answer there is what was found
    run = evaluate(birds, metrics=["own.n_found", "own.says_it"])
    assert run["measures"]["n_found"] >= 3
    assert "says_it" not in run["measures"]
    assert "mrr" not in run["measures"]
    both = rows(birds, "SELECT measure FROM ml_rag_compare_runs(%s, %s)", run["run_id"], run["run_id"])
    assert ("n_found",) in both


@pytest.mark.parametrize(
    ("given", "sqlstate", "word"),
    [
        (["own.fails"], "22012", "zero"),
        (["own.other"], "42883", "other"),
        (["own.nowhere"], "42883", "nowhere"),
        (["nowhere"], "22023", "metrics"),
        (["own.n_found", "own.n_found"], "22023", "metrics"),
        (['own."Two words"'], "22023", "metrics"),
        (["pg_catalog.length"], "42883", "length"),
        ("own.n_found", "22023", "metrics"),
    ],
)
def test_metrics_that_cannot_be_used(
    birds: Connection, script: Script, metrics: None, given: Any, sqlstate: str, word: str
) -> None:
    script.answer = "yes"
    with error(sqlstate, word, ours=sqlstate != "22012"):
        evaluate(birds, generate=True, metrics=given)


def test_a_metric_needs_execute(birds: Connection, owner: Connection, metrics: None) -> None:
    owner.execute("REVOKE EXECUTE ON FUNCTION own.n_found FROM PUBLIC")
    with error("42501", "n_found"):
        evaluate(birds, metrics=["own.n_found"])
