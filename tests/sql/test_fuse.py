"""Hybrid search: what two arms find as one list, against an implementation in Python."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from support.cluster import Connection, Database
from support.fusing import Hit, expected
from support.metrics import METRICS
from support.stores import create_store, error, mark, search

WORDS = ["heron", "grebe", "loon", "tern", "gull", "swan", "duck", "coot", "rail", "snipe"]


@pytest.fixture(scope="module")
def birds(module_db: Database) -> Connection:
    """A connection as a user to 150 documents with random vectors and texts."""
    rng = random.Random(1)
    rows = [
        (
            f"d{i:03}", i, 1, " ".join(rng.choices(WORDS, weights=range(10, 0, -1), k=rng.randint(1, 12))),
            tuple(rng.uniform(-1, 1) for _ in range(3)),
        )
        for i in range(150)
    ]  # fmt: skip
    owner = module_db.connect()
    create_store(owner, rows=rows)
    owner.execute("SELECT ml_rag.enable_keyword_search('docs'); ANALYZE docs")
    return module_db.connect("asker")


def fuse(connection: Connection, question: str, **options: Any) -> list[tuple[str, float, float | None, float]]:
    """Document, distance, keyword score and score of each hit, best first."""
    options = {"vector_store": ["docs"], "query_embedding": [1, 0, 0], "n_citations": 100, **options}
    rows = search(connection, question, {"keyword_search": True, **options})
    return [(row[2], None if row[6] is None else float(row[6]), row[8], row[9]) for row in rows]


def create(owner: Connection, rows: list[tuple[str, str, float]]) -> None:
    """Documents with their texts, at these distances from [1,0,0]."""
    create_store(
        owner,
        rows=[(name, i, 1, text, (1 - d, math.sqrt(1 - (1 - d) ** 2), 0)) for i, (name, text, d) in enumerate(rows)],
    )
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")


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
def test_fused_lists_are_as_an_independent_implementation_has_them(
    birds: Connection, metric: str, options: dict[str, Any]
) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        question = " ".join(rng.sample(WORDS, rng.choice([1, 2, 3])))
        candidates = rng.choice([1, 5, 40, 100])
        given: dict[str, Any] = {"query_embedding": [rng.uniform(-1, 1) for _ in range(3)], "distance_metric": metric}
        given["n_citations"] = candidates
        semantic: list[Hit] = [(hit[0], hit[1], None) for hit in fuse(birds, question, **given, keyword_search=False)]
        keyword: list[Hit] = [hit[:3] for hit in fuse(birds, question, **given, semantic_search=False)]
        want = expected(semantic, keyword, options, metric)[:candidates]
        got = fuse(birds, question, **given, hybrid_options={**options, "candidates": candidates})
        # in double precision scores that are equal may differ in their last digit
        assert [hit[3] for hit in got] == sorted((hit[3] for hit in got), reverse=True)
        got.sort(key=lambda hit: (-round(hit[3], 12), hit[1], hit[0]))
        assert [hit[:3] for hit in got] == [hit[:3] for hit in want], seed
        assert [hit[3] for hit in got] == pytest.approx([hit[3] for hit in want], abs=1e-9)
        assert all(0 <= hit[3] <= 1 + 1e-12 for hit in got)


def test_an_arm_without_hits_leaves_the_order_of_the_other(owner: Connection, asker: Connection) -> None:
    create(owner, [("a", "heron", 0.2), ("b", "heron gull gull", 0.3), ("c", "heron heron", 0.4)])
    for options in ({}, {"semantic_weight": 0.5}, {"fusion": "rrf"}):
        assert [hit[0] for hit in fuse(asker, "nothing", hybrid_options=options)] == ["a", "b", "c"]
    owner.execute("UPDATE docs SET segment_embedding = NULL")
    for options in ({}, {"semantic_weight": 0.5}, {"fusion": "rrf"}):
        assert [hit[0] for hit in fuse(asker, "heron", hybrid_options=options)] == ["c", "a", "b"]
        with error("P0002", "no segment found"):
            fuse(asker, "nothing", hybrid_options=options)


def test_by_default_an_arm_that_tells_nothing_apart_yields_to_the_other(owner: Connection, asker: Connection) -> None:
    rows = [(f"d{i:02}", "gull", 0.5 + i * 0.0001) for i in range(59)]
    create(owner, [*rows, ("d59", "heron", 0.5059)])
    best, *others = fuse(asker, "heron")
    assert best[0] == "d59"
    assert all(score < 0.3 for *_, score in others)
    owner.execute("DROP TABLE docs")
    create(owner, [(f"d{i:02}", "heron", 0.1 if i == 40 else 0.8) for i in range(60)])
    best, *others = fuse(asker, "heron")
    assert (best[0], best[3]) == ("d40", pytest.approx(1))
    assert [score for *_, score in others] == pytest.approx([0.2 / 0.9] * 59, abs=1e-3)


def test_rows_that_are_the_same_in_everything_stay_as_many_as_they_are(owner: Connection, asker: Connection) -> None:
    create(owner, [("a", "heron", 0.2), ("b", "gull", 0.3)])
    owner.execute(
        "CREATE VIEW twice AS TABLE docs UNION ALL SELECT * FROM docs WHERE document_name = 'a';"
        "GRANT SELECT ON twice TO ml_rag_user"
    )
    mark(owner, "twice")
    arms = [{"search": "semantic"}, {"search": "semantic", "query_embedding": [1, 1, 0]}]
    options = {"vector_store": ["twice"], "query_embedding": [1, 0, 0], "arms": arms}
    assert [row[2] for row in search(asker, "q", options)] == ["a", "a", "b"]


def test_an_option_out_of_range_is_refused(module_asker: Connection) -> None:
    for routine in ("ml_rag_search", "ml_rag_answer"):
        with error("22023", 'a number from 0 to 1, or "auto"'):
            module_asker.execute(f"SELECT {routine}('q', %s)", (Jsonb({"hybrid_options": {"semantic_weight": 2}}),))


@pytest.mark.parametrize(
    "options", [{"semantic_weight": "auto"}, {"semantic_weight": None}, {"rrf_k": 1}, {"rrf_k": 1000000}]
)
def test_options_at_their_limits_are_taken(birds: Connection, options: dict[str, Any]) -> None:
    assert len(fuse(birds, "heron", hybrid_options=options)) == 100
