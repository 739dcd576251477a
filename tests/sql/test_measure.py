"""evaluate/measure: the measures of the ruler, against trec_eval and SciPy."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import pytrec_eval

from support.cluster import Connection, value_of
from support.stores import error

CUTOFFS = [1, 3, 5, 10, 100]

HITS = """SELECT array_agg(ROW('s', h.name, h.id, coalesce(h.id::text, h.name), h.place, 'x', 0.5, h.metadata, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL)::ml_rag.hit ORDER BY h.place)
  FROM jsonb_to_recordset(%s) AS h (name text, id bigint, place bigint, metadata jsonb)"""


def grade(connection: Connection, hits: list[dict[str, Any]], expected: Any, match: str = "path_end") -> Any:
    """gains, items, relevant and the measures at CUTOFFS."""
    row = connection.execute(
        f"SELECT g.gains, g.items, g.relevant, ml_rag._ranking_measures(g.gains, g.items, e, %s)"
        f" FROM ml_rag._expected_documents(%s) AS e,"
        f" ml_rag._grade_hits(coalesce(({HITS}), '{{}}'), e, %s) AS g",
        (CUTOFFS, json.dumps(expected), json.dumps([{**hit, "place": i} for i, hit in enumerate(hits)]), match),
    ).fetchone()
    assert row is not None
    return row


def hits(*names: str) -> list[dict[str, Any]]:
    return [{"name": name} for name in names]


@pytest.mark.parametrize("seed", range(30))
def test_ranking_measures_are_those_of_trec_eval(module_owner: Connection, seed: int) -> None:
    rng = random.Random(seed)
    documents = [f"d{i}" for i in range(40)]
    qrels = {d: rng.choice([0, 1, 1, 2, 3]) for d in rng.sample(documents, rng.randint(1, 30))}
    if not any(qrels.values()):
        qrels["d0"] = 1
    segments = [rng.choice(documents) for _ in range(rng.randint(0, 60))]
    ranking = list(dict.fromkeys(segments))  # a document counts at its best segment
    names = {"recall": "recall", "ndcg": "ndcg_cut"}
    evaluator = pytrec_eval.RelevanceEvaluator(
        {"q": qrels}, {"recip_rank", *(f"{name}.{k}" for name in names.values() for k in CUTOFFS)}
    )
    # trec_eval leaves a query without a result out: a document that is not judged stands for it
    run = {d: float(-i) for i, d in enumerate(ranking)} or {"nothing": 0.0}
    oracle = evaluator.evaluate({"q": run})["q"]
    _, _, relevant, measures = grade(module_owner, hits(*segments), qrels)
    expected = {"mrr": oracle["recip_rank"]}
    expected |= {f"{ours}@{k}": oracle[f"{theirs}_{k}"] for ours, theirs in names.items() for k in CUTOFFS}
    assert measures == pytest.approx(expected, abs=1e-9)
    assert relevant == [qrels.get(d, 0) > 0 for d in segments]


def test_segments_are_counted_where_segments_are_expected(module_owner: Connection) -> None:
    found = [{"name": "/srv/docs/a.pdf"}, {"name": "/srv/docs/a.pdf"}, {"name": "/srv/docs/b.pdf"}]
    gains, count, relevant, _ = grade(module_owner, found, [{"document": "a.pdf", "segment_number": 1}])
    assert (gains, count, relevant) == ([0, 1, 0], [0, 1, 0], [False, True, False])
    # a key of the metadata counts more
    found[0]["metadata"] = {"segment_number": 1}
    assert grade(module_owner, found, [{"document": "a.pdf", "segment_number": 1}])[2] == [True, True, False]


def test_pages_are_counted_where_pages_are_expected(module_owner: Connection) -> None:
    found = [
        {"name": "/srv/docs/a.pdf", "metadata": {"page": 3}},
        {"name": "/srv/docs/a.pdf", "metadata": {"page": 3}},
        {"name": "/srv/docs/b.pdf", "metadata": {"page": 7}},
        {"name": "/srv/docs/a.pdf", "metadata": {"page": "7"}},
    ]
    gains, count, relevant, measures = grade(module_owner, found, [{"document": "a.pdf", "page": 7, "grade": 2}])
    assert gains == [0, 0, 2]  # two segments of page 3 are one place
    assert count == [0, 0, 1]
    assert relevant == [False, False, False, True]
    assert measures["recall@1"] == 0
    assert measures["recall@3"] == 1
    assert measures["mrr"] == pytest.approx(1 / 3)
    assert measures["ndcg@3"] == pytest.approx(1 / math.log2(4))
    gains, *_ = grade(module_owner, found, ["a.pdf", "b.pdf"])
    assert gains == [1, 1]


@pytest.mark.parametrize(
    ("match", "expected", "relevant"),
    [
        ("path_end", "a.txt", [True, True, False]),
        ("path_end", "x/a.txt", [False, True, False]),
        ("document_name", "a.txt", [True, False, False]),
        ("document_name", "/s/x/a.txt", [False, True, False]),
        ("document_id", "2", [False, True, False]),
        ("document_id", 3, [False, False, True]),
        ("path_end", "A.TXT", [False, False, False]),
        ("path_end", "a%", [False, False, False]),
    ],
)
def test_documents_match(module_owner: Connection, match: str, expected: Any, relevant: list[bool]) -> None:
    found = [{"name": n, "id": i} for i, n in enumerate(["a.txt", "/s/x/a.txt", "/s/ba.txt"], start=1)]
    gains, count, is_relevant, _ = grade(module_owner, found, expected, match)
    assert is_relevant == relevant
    # what was expected once is found once
    assert sum(count) == sum(gains) == min(1, sum(relevant))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", [("a", 1, {})]),
        (7, [("7", 1, {})]),
        (["b", "a", "a"], [("a", 1, {}), ("b", 1, {})]),
        ({"a": 2, "b": 0, "c": -1, "d": 0.5}, [("a", 2, {}), ("d", 0.5, {})]),
        ({"document": "a", "page": 3}, [("a", 1, {"page": 3})]),
        ([{"document": "a", "grade": 3}, {"document": "a", "grade": None}, "b"], [("a", 3, {}), ("b", 1, {})]),
        ([], []),
        ({}, []),
    ],
)
def test_forms_of_expected_documents(module_owner: Connection, value: Any, expected: list[Any]) -> None:
    row = module_owner.execute("SELECT ml_rag._expected_documents(%s)", (json.dumps(value),)).fetchone()
    assert row == ([{"document": d, "grade": g, "metadata": m} for d, g, m in expected],)


def test_nothing_said_about_documents_is_null(module_owner: Connection) -> None:
    query = "SELECT ml_rag._expected_documents(NULL) IS NULL, ml_rag._expected_documents('null') IS NULL"
    assert module_owner.execute(query).fetchone() == (True, True)


@pytest.mark.parametrize(
    "value", [True, [True], [["a"]], [{"grade": 1}], {"a": "x"}, [{"document": "a", "grade": "2"}]]
)
def test_malformed_expected_documents(module_owner: Connection, value: Any) -> None:
    with error("22023", "invalid expected documents"):
        module_owner.execute("SELECT ml_rag._expected_documents(%s)", (json.dumps(value),))


# -- significance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 10, 29, 100, 101, 2804, 30001])
@pytest.mark.parametrize("t", [0.0, 1e-9, 0.1, -0.5, 1.0, 1.96, -2.7, 5.0, 12.0, 1e9])
def test_p_values_are_those_of_student(module_owner: Connection, degrees: int, t: float) -> None:
    found = value_of(module_owner, "SELECT ml_rag._student_p(%s, %s)", (t, degrees))
    from scipy import stats  # here, where it is used: every process that runs tests imports this file

    assert found == pytest.approx(2 * stats.t.sf(abs(t), degrees), abs=1e-9)
