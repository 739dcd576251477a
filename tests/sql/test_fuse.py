"""pipeline/fuse: two ranked lists as one, against an implementation in Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from support.cluster import Connection
from support.fusing import Hit, expected
from support.metrics import METRICS
from support.stores import error

AS_HITS = """ARRAY(SELECT ROW('s', u.d, 1, u.d, 1, 'text of ' || u.d, u.distance, '{}', u.score, NULL, NULL,
  NULL, NULL, NULL)::ml_rag.hit
FROM unnest(%s::text[], %s::numeric[], %s::float8[]) WITH ORDINALITY AS u (d, distance, score, i) ORDER BY u.i)"""


def fuse(
    connection: Connection,
    semantic: list[Hit],
    keyword: list[Hit],
    options: dict[str, Any] | None = None,
    metric: str = "COSINE",
) -> list[tuple[str, float, float | None, float]]:
    """Document, distance, keyword score and score of each hit, in the order of the stage."""
    arms = [[list(column) for column in zip(*arm, strict=True)] if arm else [[], [], []] for arm in (semantic, keyword)]
    return connection.execute(
        "SELECT f.document_name, f.distance::float8, f.keyword_score, f.score"
        f" FROM ml_rag.fuse({AS_HITS}, {AS_HITS}, %s, %s) AS f",
        (*arms[0], *arms[1], None if options is None else Jsonb(options), metric),
    ).fetchall()


def arms(seed: int, metric: str) -> tuple[list[Hit], list[Hit]]:
    """Random lists as the arms make them: the true distance in both, nearest first and best first."""
    rng = random.Random(seed)
    farthest = 2.0 if metric == "COSINE" else 4.0
    names = [f"d{i:03}" for i in range(rng.choice([1, 5, 60, 150]))]
    distances = {name: round(rng.uniform(-1 if metric == "DOT" else 0, farthest), 4) for name in names}
    by_distance = sorted(names, key=lambda n: (distances[n], n))[: rng.choice([1, 40, 100])]
    matching = rng.sample(names, rng.randint(0, len(names)))
    scores = {name: round(rng.expovariate(0.3), 6) for name in matching}
    by_score = sorted(matching, key=lambda n: (-scores[n], n))[: rng.choice([1, 40, 100])]
    return [(n, distances[n], None) for n in by_distance], [(n, distances[n], scores[n]) for n in by_score]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"semantic_weight": 0.3},
        {"semantic_weight": 0},
        {"semantic_weight": 1},
        {"fusion": "rrf"},
        {"rrf_k": 1, "fusion": "rrf"},
    ],
    ids=str,
)
def test_random_lists_come_out_as_an_independent_implementation_has_them(
    module_asker: Connection, metric: str, options: dict[str, Any]
) -> None:
    for seed in range(12):
        semantic, keyword = arms(seed, metric)
        got = fuse(module_asker, semantic, keyword, options, metric)
        want = expected(semantic, keyword, options, metric)
        assert [hit[:3] for hit in got] == [hit[:3] for hit in want], seed
        assert [hit[3] for hit in got] == pytest.approx([hit[3] for hit in want], abs=1e-9)
        assert all(0 <= hit[3] <= 1 + 1e-12 for hit in got)


def test_an_arm_without_hits_leaves_the_order_of_the_other(module_asker: Connection) -> None:
    semantic: list[Hit] = [("a", 0.2, None), ("b", 0.3, None), ("c", 0.4, None)]
    keyword: list[Hit] = [("c", 0.4, 7.0), ("a", 0.2, 5.0), ("b", 0.3, 1.0)]
    for options in ({}, {"semantic_weight": 0.5}, {"fusion": "rrf"}):
        assert [hit[0] for hit in fuse(module_asker, semantic, [], options)] == ["a", "b", "c"]
        assert [hit[0] for hit in fuse(module_asker, [], keyword, options)] == ["c", "a", "b"]
        assert fuse(module_asker, [], [], options) == []


def test_by_default_an_arm_that_tells_nothing_apart_yields_to_the_other(module_asker: Connection) -> None:
    flat: list[Hit] = [(f"d{i:02}", 0.5 + i * 0.0001, None) for i in range(60)]
    sharp: list[Hit] = [("d59", 0.5059, 30.0), ("d30", 0.503, 2.0), *((f"d{i:02}", 0.5, 1.0) for i in range(10))]
    assert fuse(module_asker, flat, sharp)[0][0] == "d59"
    same: list[Hit] = [(f"d{i:02}", 0.5 + i * 0.0001, 3.0) for i in range(60)]
    near: list[Hit] = [("d40", 0.1, None), *((f"d{i:02}", 0.8, None) for i in range(40))]
    assert fuse(module_asker, near, same)[0][0] == "d40"


def test_rows_that_are_the_same_in_everything_stay_as_many_as_they_are(module_asker: Connection) -> None:
    twice: list[Hit] = [("a", 0.2, None), ("a", 0.2, None), ("b", 0.3, None)]
    keyword: list[Hit] = [("a", 0.2, 5.0), ("a", 0.2, 5.0)]
    assert [hit[0] for hit in fuse(module_asker, twice, keyword)] == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"semantic_weight": -0.01}, "a number from 0 to 1"),
        ({"semantic_weight": 1.01}, "a number from 0 to 1"),
        ({"semantic_weight": "much"}, 'a number from 0 to 1, or "auto"'),
        ({"rrf_k": 0}, "an integer from 1 to 1000000"),
        ({"rrf_k": 1000001}, "an integer from 1 to 1000000"),
        ({"candidates": 0}, "an integer from 1 to 10000"),
        ({"candidates": 10001}, "an integer from 1 to 10000"),
        ({"fusion": "sum"}, "weighted, rrf"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(module_asker: Connection, options: dict[str, Any], allowed: str) -> None:
    with error("22023") as e:
        fuse(module_asker, [("a", 0.1, None)], [], options)
    assert allowed in (e.detail or "")
    for routine in ("ml_rag_search", "ml_rag_answer"):
        with error("22023"):
            module_asker.execute(f"SELECT {routine}('q', %s)", (Jsonb({"hybrid_options": options}),))


@pytest.mark.parametrize(
    "options", [{"semantic_weight": "auto"}, {"semantic_weight": None}, {"rrf_k": 1}, {"rrf_k": 1000000}]
)
def test_options_at_their_limits_are_taken(module_asker: Connection, options: dict[str, Any]) -> None:
    assert [hit[0] for hit in fuse(module_asker, [("a", 0.1, None)], [("a", 0.1, 1.0)], options)] == ["a"]
