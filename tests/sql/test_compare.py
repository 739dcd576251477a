"""evaluate/compare: two runs, question by question."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from support.cluster import Connection, value_of
from support.stores import error

COLUMNS = ("a", "b", "difference", "p_value", "n", "better", "worse")

NEW_RUN = """INSERT INTO ml_rag.evaluation_run (started_at, seconds, source, questions, options, stores, models,
    versions, measures, counted, latency, errors)
  VALUES (now(), 1, '', 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}') RETURNING run_id"""


def run(connection: Connection, measures: list[dict[str, float]], **changed: Any) -> int:
    """A run whose questions have these measures; ``changed`` replaces question_id, question or latency by number."""
    found = value_of(connection, NEW_RUN)
    for i, m in enumerate(measures):
        values = {"question_id": f"q{i}", "question": f"text {i}", "latency": {"retrieval": 5.0 + i}}
        values |= changed.get(f"q{i}", {})
        connection.execute(
            "INSERT INTO ml_rag.evaluation_question (run_id, question_id, question, citations, measures, latency)"
            " VALUES (%s, %s, %s, '[]', %s, %s)",
            (found, values["question_id"], values["question"], json.dumps(m), json.dumps(values["latency"])),
        )
    return int(found)


def compare(connection: Connection, a: int | None, b: int | None) -> dict[str, dict[str, Any]]:
    rows = connection.execute("SELECT * FROM ml_rag_compare_runs(%s, %s)", (a, b)).fetchall()
    return {r[0]: dict(zip(COLUMNS, r[1:], strict=True)) for r in rows}


@pytest.mark.parametrize("n", [2, 3, 40])
def test_differences_are_those_of_a_paired_t_test(asker: Connection, n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = rng.random(n), rng.random(n)
    found = compare(asker, run(asker, [{"mrr": x} for x in a]), run(asker, [{"mrr": x} for x in b]))["mrr"]
    assert found["a"] == round(a.mean(), 4)
    assert found["b"] == round(b.mean(), 4)
    assert found["difference"] == round(b.mean() - a.mean(), 4)
    from scipy import stats  # here, where it is used: every process that runs tests imports this file

    assert found["p_value"] == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=1e-6)
    assert found["n"] == n
    assert (found["better"], found["worse"]) == ((b > a).sum(), (b < a).sum())


def test_equal_runs_differ_in_nothing(asker: Connection) -> None:
    measures = [{"mrr": random.Random(i).random(), "recall@1": 1} for i in range(5)]
    first, second = run(asker, measures), run(asker, measures)
    found = compare(asker, first, second)
    assert list(found) == ["mrr", "recall@1", "retrieval_ms"]
    for row in found.values():
        assert (row["difference"], row["p_value"], row["better"], row["worse"]) == (0, None, 0, 0)
    assert compare(asker, first, first) == found


def test_the_same_difference_everywhere_has_no_p_value(asker: Connection) -> None:
    first = run(asker, [{"mrr": x / 10} for x in range(5)])
    second = run(asker, [{"mrr": x / 10 + 0.1} for x in range(5)])
    assert compare(asker, first, second)["mrr"]["p_value"] is None
    assert compare(asker, run(asker, [{"mrr": 0}]), run(asker, [{"mrr": 1}]))["mrr"]["p_value"] is None


def test_less_is_better_for_times_and_wrong_refusals(asker: Connection) -> None:
    first = run(asker, [{"refused_wrongly": 1, "refused_rightly": 0, "answer_length": 5}])
    second = run(
        asker,
        [{"refused_wrongly": 0, "refused_rightly": 1, "answer_length": 9}],
        q0={"latency": {"retrieval": 9}},
    )
    found = {m: (row["better"], row["worse"]) for m, row in compare(asker, first, second).items()}
    expected = {"refused_wrongly": (1, 0), "refused_rightly": (1, 0), "answer_length": (0, 0), "retrieval_ms": (0, 1)}
    assert found == expected


def test_measures_are_ordered_and_paired(asker: Connection) -> None:
    first = run(asker, [{"recall@10": 1, "recall@5": 1, "mrr": 1}, {"mrr": 1}])
    second = run(asker, [{"recall@10": 1, "recall@5": 1, "groundedness": 1}, {"mrr": 0.5}])
    found = compare(asker, first, second)
    assert list(found) == ["mrr", "recall@5", "recall@10", "retrieval_ms"]
    assert (found["mrr"]["a"], found["mrr"]["b"], found["mrr"]["n"]) == (1, 0.5, 1)


@pytest.mark.parametrize("changed", [{"question_id": "other"}, {"question": "another text"}])
def test_different_questions_cannot_be_compared(asker: Connection, changed: dict[str, str]) -> None:
    first = run(asker, [{"mrr": 1}] * 3)
    with error("22023", "different questions"):
        compare(asker, first, run(asker, [{"mrr": 1}] * 3, q1=changed))
    with error("22023", "different questions", "1 questions", "q2"):
        compare(asker, first, run(asker, [{"mrr": 1}] * 2))


def test_runs_of_others_are_none(asker: Connection, tenant: Connection) -> None:
    own, other = run(asker, [{"mrr": 1}]), run(tenant, [{"mrr": 1}])
    for a, b in ((own, other), (other, own), (own, None), (own, 10**9)):
        with error("22023", "run does not exist"):
            compare(asker, a, b)


def test_it_works_in_a_read_only_transaction(asker: Connection) -> None:
    first = run(asker, [{"mrr": 1}])
    asker.execute("SET default_transaction_read_only = on")
    assert compare(asker, first, first)["mrr"]["n"] == 1
