"""evaluate/calibrate: thresholds for one's own documents, and what each of them would refuse and answer."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from support.cluster import Connection, Database, noticed
from support.scripted import MODEL, scripted_model
from support.stores import answer, create_store, error, fake_embedding

DOCUMENTS = ["apples oranges pears", "violin trumpet drum", "mountain river valley", "copper silver gold"]
#: question -> whether the documents answer it
QUESTIONS = {
    "apples oranges pears": True,
    "violin and drum": True,
    "river": True,
    "which gold": True,
    "river boats for rent today": False,
    "apples in the winter night sky": False,
    "quantum chromodynamics": False,
}


@pytest.fixture
def ready(owner: Connection, asker: Connection) -> Connection:
    rows = [(f"{i}.txt", i, 1, text, fake_embedding(text)) for i, text in enumerate(DOCUMENTS)]
    create_store(owner, "docs", rows, type="vector(16)")
    owner.execute(
        "CREATE TABLE questions (question text, answerable boolean); GRANT SELECT ON questions TO ml_rag_user"
    )
    owner.cursor().executemany("INSERT INTO questions VALUES (%s, %s)", list(QUESTIONS.items()))
    return asker


def calibrate(connection: Connection, source: str = "questions", **options: Any) -> list[Any]:
    statement = (
        "SELECT option, threshold::float8, refused_wrongly, answered_wrongly, answerable, unanswerable, is_proposed"
    )
    return connection.execute(f"{statement} FROM ml_rag.calibrate(%s, %s)", (source, json.dumps(options))).fetchall()


def nearest(question: str) -> float:
    """The distance of the nearest document, computed by hand."""
    vectors = np.array([fake_embedding(text) for text in DOCUMENTS])
    return round(float(1 - (vectors @ np.array(fake_embedding(question))).max()), 4)


def rates(threshold: float, measured: dict[str, float]) -> tuple[float, float]:
    refused = [measured[q] > threshold for q, answerable in QUESTIONS.items() if answerable]
    answered = [measured[q] <= threshold for q, answerable in QUESTIONS.items() if not answerable]
    return float(np.mean(refused)), float(np.mean(answered))


def test_each_threshold_has_the_rates_that_it_would_have(ready: Connection) -> None:
    measured = {question: nearest(question) for question in QUESTIONS}
    rows = calibrate(ready)
    assert len(rows) == len(set(measured.values()))
    for option, threshold, refused, answered, answerable, unanswerable, _ in rows:
        assert (option, answerable, unanswerable) == ("max_distance", 4, 3)
        assert (refused, answered) == pytest.approx(rates(threshold, measured))
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)
    (proposed,) = [row for row in rows if row[-1]]
    assert proposed[2] + proposed[3] == min(row[2] + row[3] for row in rows)


def test_what_is_proposed_refuses_and_answers_as_told(ready: Connection) -> None:
    (proposed,) = [row for row in calibrate(ready) if row[-1]]
    texts = {q: answer(ready, q, {"retrieval_options": {"max_distance": proposed[1]}})["citations"] for q in QUESTIONS}
    assert proposed[2] == pytest.approx(np.mean([not texts[q] for q, a in QUESTIONS.items() if a]))
    assert proposed[3] == pytest.approx(np.mean([bool(texts[q]) for q, a in QUESTIONS.items() if not a]))


def test_a_threshold_that_was_given_is_measured_too(ready: Connection) -> None:
    measured = {question: nearest(question) for question in QUESTIONS}
    for given in ("auto", 0.0123):
        rows = {row[1]: row for row in calibrate(ready, retrieval_options={"max_distance": given})}
        threshold = 0.6 if given == "auto" else given
        assert rows[threshold][2:4] == pytest.approx(rates(threshold, measured))
        # and changes nothing else
        assert len(rows) == len(set(measured.values()) | {threshold})
        assert not rows[threshold][-1]


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_scores_of_a_ranker(ready: Connection, owner: Connection, hybrid: bool) -> None:
    if hybrid:
        owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    options = {"rerank": {"model_id": "fake-rerank"}, "keyword_search": hybrid}
    rows = calibrate(ready, **options)
    assert {row[0] for row in rows} == {"max_distance", "min_score"}
    assert [row[0] for row in rows if row[-1]] == ["max_distance", "min_score"]
    scores = [row for row in rows if row[0] == "min_score"]
    for row in scores:
        given = {**options, "rerank": {"model_id": "fake-rerank", "min_score": row[1]}}
        found = {q: bool(answer(ready, q, given)["citations"]) for q in QUESTIONS}
        assert row[2] == pytest.approx(np.mean([not found[q] for q, a in QUESTIONS.items() if a]))
        assert row[3] == pytest.approx(np.mean([found[q] for q, a in QUESTIONS.items() if not a]))
    # the words of each answerable question are mostly those of its document
    (proposed,) = [row for row in scores if row[-1]]
    assert proposed[2:4] == (0, 0)
    (given,) = [
        row
        for row in calibrate(ready, rerank={"model_id": "fake-rerank", "min_score": 0.3333})
        if row[1] == pytest.approx(0.3333)
    ]
    assert given[0] == "min_score"


def test_thresholds_lie_half_way_and_keep_what_they_must(owner: Connection) -> None:
    def thresholds(measured: list[Any], answerable: list[bool], given: Any = None) -> list[Any]:
        statement = "SELECT * FROM ml_rag._thresholds(%s::numeric[], %s::boolean[], %s::numeric)"
        return [(float(r[0]), *r[1:]) for r in owner.execute(statement, (measured, answerable, given)).fetchall()]

    assert thresholds([0.2, 0.5], [True, False]) == [(0.35, 0, 0, True), (0.5, 0, 1, False)]
    # as near as distances can be: the lower one itself
    assert thresholds([0.3, 0.3001], [True, False])[0] == (0.3, 0, 0, True)
    assert thresholds([0.30001, 0.30002], [True, False])[0] == (0.30001, 0, 0, True)
    # nothing tells them apart: nothing is refused
    assert thresholds([0.2, 0.5], [False, True])[-1] == (0.5, 0, 1, True)
    # where nothing was found, no threshold helps
    assert thresholds([None, 0.5, 0.7], [True, True, False]) == [(0.6, 0.5, 0, True), (0.7, 0.5, 1, False)]
    assert thresholds([None, None], [True, False]) == []
    # one that was given is proposed only where it is better than those between
    assert thresholds([0.2, 0.5], [True, False], 0.4) == [(0.35, 0, 0, True), (0.4, 0, 0, False), (0.5, 0, 1, False)]
    assert thresholds([0.2, 0.5], [True, False], 0.35)[0] == (0.35, 0, 0, True)
    # scores, with their sign turned
    assert thresholds([-0.9, -0.2], [True, False])[0] == (-0.55, 0, 0, True)


def test_what_is_not_marked_is_answerable_and_a_query_will_do(ready: Connection) -> None:
    rows = calibrate(ready, "SELECT question, CASE WHEN NOT answerable THEN false END AS answerable FROM questions")
    assert rows == calibrate(ready)
    assert rows[0][4:6] == (4, 3)


def test_a_follow_up_is_measured_as_it_is_rewritten(ready: Connection, db: Database, local_sockets: Path) -> None:
    turn = [{"role": "user", "content": "Which metals?"}, {"role": "assistant", "content": "silver and gold"}]
    query = (
        f"SELECT 'and that one' AS question, true AS answerable, '{json.dumps(turn)}'::jsonb AS history"
        " UNION ALL SELECT 'quantum chromodynamics', false, NULL"
    )
    with scripted_model(db, local_sockets) as script:
        script.answer = {"question": "copper silver gold"}
        (row,) = calibrate(ready, query, query_options={"rewrite": True, "model_id": MODEL})
        assert len(script.requests) == 2
        assert "quantum" in script.prompt
    # both questions were rewritten to a document's own words
    assert row[1:4] == (0, 0, 1)


def test_errors(ready: Connection, owner: Connection) -> None:
    for source, kind in (
        ("SELECT question FROM questions", "not answer"),
        ("SELECT question, false AS answerable FROM questions", "the documents answer"),
    ):
        with error("22023", "questions that the documents", "answerable") as caught:
            calibrate(ready, source)
        assert kind in caught.message
    with error("22023", "questions"):
        calibrate(ready, "SELECT * FROM questions WHERE false")
    with error("42703", "lack a column") as caught:
        calibrate(ready, "SELECT 1 AS a")
    assert caught.hint.startswith("Give a query that names them so")  # it has no option for that
    owner.execute("CREATE SEQUENCE s; GRANT ALL ON s TO ml_rag_user")
    with error("25006", ours=False):
        calibrate(ready, "SELECT nextval('s') AS question")
    with error("22023", "n_citations"):
        calibrate(ready, n_citations=0)
    with error("22023", "query_embedding"):
        calibrate(ready, query_embedding=[1.0] * 16)
    with error("22023", "nonsense"):
        calibrate(ready, nonsense=1)
    with error("P0002", "no vector store found"):
        calibrate(ready, schema=["nowhere"])
    # an error of a question is none of its distance
    with error("22023", "history"):
        calibrate(ready, "SELECT question, answerable, '1'::jsonb AS history FROM questions")
    with error("38000"):
        calibrate(ready, query_options={"synonyms": True, "model_id": "fake-generate-error", "fallback": False})


def test_a_cancelled_call_ends(ready: Connection) -> None:
    threading.Timer(0.7, ready.cancel).start()
    began = time.monotonic()
    with error("57014", ours=False):
        calibrate(ready, rerank={"model_id": "fake-rerank-slow"})
    assert time.monotonic() - began < 5


def test_a_warning_is_given_once_for_all_questions(ready: Connection) -> None:
    told = noticed(ready)
    calibrate(ready, vector_store=["docs", "nowhere"])
    assert len(told) == 1
    assert "nowhere" in told[0]


def test_it_sees_what_the_caller_sees(ready: Connection, owner: Connection, db: Database) -> None:
    seen = [row[1] for row in calibrate(ready)]
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    with error("P0002", "nothing was found for any question"):
        calibrate(ready)
    owner.execute("CREATE POLICY one ON docs USING (document_id = 0)")
    assert [row[1] for row in calibrate(ready)] != seen
    with error("42501", ours=False):
        calibrate(db.connect("stranger"))
    owner.execute("REVOKE SELECT ON questions FROM ml_rag_user")
    with error("42501", ours=False):
        calibrate(ready)


def kept(owner: Connection) -> str | None:
    row = owner.execute(
        "SELECT substring(col_description('docs'::regclass, attnum) FROM 'MAX_DISTANCE=([0-9.]+)') FROM pg_attribute"
        " WHERE attrelid = 'docs'::regclass AND attname = 'segment_embedding'"
    ).fetchone()
    return row[0] if row else None


def threshold(connection: Connection, question: str = "river", **options: Any) -> float:
    """The limit that "auto" stands for."""
    given = {"retrieval_options": {"max_distance": "auto"}, "skip_generate": True, **options}
    try:
        return float(answer(connection, question, given)["retrieval_info"]["threshold"])
    except psycopg.errors.NoDataFound as e:
        return float(re.findall(r"the threshold ([0-9.]+)\.", e.diag.message_detail or "")[0])


def test_a_limit_that_is_kept_is_what_auto_stands_for(ready: Connection, owner: Connection) -> None:
    assert threshold(ready) == 0.6
    rows = calibrate(owner, keep=True)
    (proposed,) = [row for row in rows if row[-1]]
    assert proposed[2] <= 0.1
    assert proposed[3] == min(row[3] for row in rows if row[2] <= 0.1)
    assert float(kept(owner) or 0) == proposed[1] != 0.6
    assert threshold(ready) == proposed[1]
    again = calibrate(ready, retrieval_options={"max_distance": "auto"})
    assert proposed[1] in [row[1] for row in again]
    assert 0.6 not in [row[1] for row in again]
    # a limit of the call's own counts, and another metric has other distances
    assert threshold(ready, retrieval_options={"max_distance": 0.6}) == 0.6
    assert threshold(ready, distance_metric="EUCLIDEAN") == 0.6
    explained = answer(ready, "river", {"abstain": True, "explain": True, "model_options": {"model_id": "extractive"}})
    assert explained["explain"]["thresholds"]["max_distance"] == proposed[1]
    assert (
        f"{proposed[1]:.4f}"
        in ready.execute("SELECT ml_rag.statement('river', %s)", (json.dumps({"abstain": True}),)).fetchone()[0]
    )  # type: ignore[index]
    # the marker is still one, and what else it says stays
    owner.execute("SELECT ml_rag.index_store('docs', index => '{\"type\": \"none\"}')")
    assert threshold(ready) == proposed[1]


def test_abstaining_refuses_by_the_limit_that_is_kept(ready: Connection, owner: Connection) -> None:
    calibrate(owner, keep=0.3)
    limit = float(kept(owner) or 0)
    for question in QUESTIONS:
        options = {"abstain": True, "model_options": {"model_id": "extractive"}}
        assert (answer(ready, question, options)["citations"] == []) == (nearest(question) > limit)


def test_the_smallest_limit_of_several_stores_counts(ready: Connection, owner: Connection) -> None:
    rows = [("near.txt", 1, 1, "harp and river", fake_embedding("harp and river"))]
    create_store(owner, "notes", rows, type="vector(16)")
    calibrate(owner, keep=True, vector_store=["docs"])
    one = float(kept(owner) or 0)
    assert threshold(ready) == one
    owner.execute(
        "COMMENT ON COLUMN notes.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,MAX_DISTANCE=0.0001'"
    )
    assert threshold(ready) == 0.0001
    assert threshold(ready, vector_store=["docs"]) == one


@pytest.mark.parametrize("value", ["", "-1", "x", "1e3", "0.12345", "NaN"])
def test_a_limit_in_a_marker_that_is_none_is_left_out(ready: Connection, owner: Connection, value: str) -> None:
    marker = f"GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,MAX_DISTANCE={value}"
    owner.execute(f"COMMENT ON COLUMN docs.segment_embedding IS '{marker}'")
    assert threshold(ready) == 0.6


def test_only_the_owner_keeps_a_limit(ready: Connection, owner: Connection) -> None:
    with error("42501", "must be owner of public.docs"):
        calibrate(ready, keep=True)
    for value, allowed in (("yes", "true, false"), (1.01, "0 to 1"), (-0.01, "0 to 1"), ([], "true, false")):
        with error("22023", "keep", allowed):
            calibrate(owner, keep=value)
    with error("22023", "distance_metric", "COSINE"):
        calibrate(owner, keep=True, distance_metric="DOT")
    calibrate(ready, keep=False)
    calibrate(ready, keep=None)
    assert kept(owner) is None


def test_a_store_without_a_marker_keeps_no_limit(ready: Connection, owner: Connection) -> None:
    owner.execute("COMMENT ON COLUMN docs.segment_embedding IS NULL")
    with error("55000", "marker"):
        calibrate(
            owner,
            keep=True,
            vector_store=["docs"],
            embed_model_id="fake-embed",
            vector_store_columns={"segment": "segment"},
        )
