"""Thresholds: docs/search.md (Thresholds), against brute force and by hand."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest

from support import reference
from support.cluster import Connection
from support.metrics import METRICS
from support.searching import load, random_segments
from support.stores import create_store, error, retrieve


def limit(value: Any, auto: str) -> Decimal | None:
    return None if value is None else Decimal(auto if value == "auto" else str(value))


@pytest.mark.parametrize(
    ("distances", "largest", "percentage", "kept", "method", "limit"),
    [
        (["0.1", "0.2", "0.3"], None, None, 3, "n_citations", "0.3"),
        (["0.1", "0.2", "0.3"], "0.2", None, 2, "max_distance", "0.2"),
        (["0.1", "0.2", "0.3"], "0.1999", None, 1, "max_distance", "0.1999"),
        (["0.1", "0.2", "0.3"], "0", None, 0, "max_distance", "0"),
        (["0.0000", "0.2"], "0", None, 1, "max_distance", "0"),
        (["0.1", "0.12", "0.1201"], None, "20", 2, "percentage_distance", "0.12"),
        (["0.1", "0.2", "0.2001"], None, "100", 2, "percentage_distance", "0.2"),
        (["0.1", "0.1", "0.1001"], None, "0", 2, "percentage_distance", "0.1"),
        # |d_min|: the threshold of a negative nearest distance lies above it
        (["-2", "-1.8", "-1.5"], None, "20", 2, "percentage_distance", "-1.6"),
        (["-2", "-1.6", "-1.5"], None, "20", 2, "percentage_distance", "-1.6"),
        (["0", "0.0001"], None, "999999.9999", 1, "percentage_distance", "0"),
        # both: the smaller one is in force
        (["0.1", "0.2", "0.3"], "0.25", "50", 1, "percentage_distance", "0.15"),
        (["0.1", "0.2", "0.3"], "0.14", "50", 1, "max_distance", "0.14"),
        (["0.5", "0.6"], "0.4", "10", 0, "max_distance", "0.4"),
    ],
)
def test_thresholds_by_hand(
    owner: Connection,
    asker: Connection,
    distances: list[str],
    largest: str | None,
    percentage: str | None,
    kept: int,
    method: str,
    limit: str,
) -> None:
    is_negative = distances[0].startswith("-")
    at = [(1 - float(d) if is_negative else 1 + float(d), 0, 0) for d in distances]
    create_store(owner, rows=[("a", 1, i, d, at[i]) for i, d in enumerate(distances)])
    limits = {"max_distance": largest, "percentage_distance": percentage}
    options = {
        "distance_metric": "DOT" if is_negative else "EUCLIDEAN",
        "n_citations": 100,
        "retrieval_options": {name: value and float(value) for name, value in limits.items()} | {"segment_overlap": 0},
    }
    if kept == 0:
        with error("P0002", "no segment within the distance threshold", limit):
            retrieve(asker, (1, 0, 0), **options)
        return
    found = retrieve(asker, (1, 0, 0), **options)
    assert [c["segment"] for c in found["citations"]] == distances[:kept]
    assert found["retrieval_info"] == {"method": method, "threshold": float(limit)}


@pytest.mark.parametrize("metric", METRICS)
def test_thresholds_against_brute_force(owner: Connection, asker: Connection, metric: str) -> None:
    generator = random.Random(f"threshold {metric}")
    segments = random_segments(generator, ["public.a", "public.b"], 80)
    load(owner, segments)
    outcomes = set()
    for _ in range(40):
        query = [generator.randint(-2, 2) or 1 for _ in range(3)]
        largest = generator.choice((None, None, "auto", 0, 0.2929, 0.5, 1, 1.4142, 2.5))
        percentage = generator.choice((None, None, "auto", 0, 10, 33.3333, 100, 300))
        n = generator.choice((None, None, 1, 5, 50))
        retrieval: dict[str, Any] = {"max_distance": largest, "percentage_distance": percentage, "segment_overlap": 0}
        try:
            expected = reference.retrieve(
                segments,
                query,
                metric=metric,
                n=n,
                max_distance=limit(largest, auto="0.6"),
                percentage_distance=limit(percentage, auto="20"),
            )
        except reference.NothingFound:
            nearest = reference.nearest(segments, query, metric, 1)[0].distance
            outcomes.add("nothing")
            with error("P0002", str(nearest)):
                retrieve(asker, query, distance_metric=metric, n_citations=n, retrieval_options=retrieval)
            continue
        got = retrieve(asker, query, distance_metric=metric, n_citations=n, retrieval_options=retrieval)
        assert got["citations"] == expected["citations"]
        assert got["retrieval_info"] == expected["retrieval_info"]
        outcomes.add(got["retrieval_info"]["method"])
    assert {"n_citations", "max_distance", "percentage_distance"} <= outcomes


def test_the_rounded_distance_decides(owner: Connection, asker: Connection) -> None:
    # 0.50004 rounds to 0.5000, 0.50006 to 0.5001
    create_store(owner, rows=[("a", 1, 1, "in", (1.50004, 0, 0)), ("a", 1, 5, "out", (1.50006, 0, 0))])
    options = {"distance_metric": "EUCLIDEAN", "retrieval_options": {"max_distance": 0.5, "segment_overlap": 0}}
    document = retrieve(asker, (1, 0, 0), **options)
    assert [(c["segment"], c["distance"]) for c in document["citations"]] == [("in", 0.5)]
    options["retrieval_options"] = {"max_distance": 0.5001, "segment_overlap": 0}
    assert [c["distance"] for c in retrieve(asker, (1, 0, 0), **options)["citations"]] == [0.5, 0.5001]


@pytest.mark.parametrize("word", ["auto", "AUTO"])
def test_auto_is_six_tenths_and_twenty_per_cent(owner: Connection, asker: Connection, word: str) -> None:
    rows = [("a", 1, i * 10, f"{d}", (1 + d, 0, 0)) for i, d in enumerate((0.5, 0.5999, 0.6, 0.6001))]
    create_store(owner, rows=rows)
    options: dict[str, Any] = {"distance_metric": "EUCLIDEAN", "n_citations": 10}
    document = retrieve(asker, (1, 0, 0), **options, retrieval_options={"max_distance": word})
    assert [c["segment"] for c in document["citations"]] == ["0.5", "0.5999", "0.6"]
    assert document["retrieval_info"] == {"method": "max_distance", "threshold": 0.6}
    document = retrieve(asker, (1, 0, 0), **options, retrieval_options={"percentage_distance": word})
    assert [c["segment"] for c in document["citations"]] == ["0.5", "0.5999", "0.6"]
    assert document["retrieval_info"] == {"method": "percentage_distance", "threshold": 0.6}


def test_nothing_within_says_how_near_the_nearest_was(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "far", (0, 1, 0))])
    with error("P0002", "1.0000", "0.25") as caught:
        retrieve(asker, (1, 0, 0), retrieval_options={"max_distance": 0.25})
    assert "1.0000" in caught.detail
    assert "0.25" in caught.detail
