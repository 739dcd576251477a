"""ground/metric: the nearest segments, against brute force; plans; kinds of relations and columns."""

from __future__ import annotations

import random

import pytest
from psycopg import sql

from support import reference
from support.cluster import Connection, Database, value_of
from support.metrics import METRICS
from support.searching import INDEXES, create_large_store, create_partitioned, load, plan_of, random_segments
from support.stores import as_text, create_store, error, retrieve, search


def test_each_metric_is_tested(module_asker: Connection) -> None:
    assert {name for (name,) in module_asker.execute("SELECT name FROM ml_rag.metric")} == set(METRICS)


@pytest.mark.parametrize("type", ["vector(3)", "vector", "halfvec(3)"])
@pytest.mark.parametrize("metric", METRICS)
def test_nearest_segments_and_their_order_are_those_of_brute_force(
    owner: Connection, asker: Connection, metric: str, type: str
) -> None:
    generator = random.Random(f"{metric} {type}")
    segments = random_segments(generator, ["public.a", "public.b", "public.c"], 64)
    load(owner, segments, type)
    for _ in range(12):
        query = [generator.randint(-2, 2) or 1 for _ in range(3)]
        n = generator.choice((1, 2, 3, 7, 20, 100))
        expected = reference.nearest(segments, query, metric, n)
        options = {"query_embedding": query, "distance_metric": metric.lower(), "n_citations": n}
        rows = search(asker, "q", options)
        assert [r[0] for r in rows] == list(range(1, len(rows) + 1))
        assert [(r[1], r[2], r[3], r[4], r[5], r[6]) for r in rows] == [
            (h.segment.vector_store, h.segment.document_name, h.segment.document, h.segment.number, h.text, h.distance)
            for h in expected
        ]


@pytest.mark.parametrize("metric", METRICS)
def test_ties_across_the_limit_go_by_name_whatever_the_order_of_insertion(
    owner: Connection, asker: Connection, metric: str
) -> None:
    generator = random.Random(7)
    rows = [(f"d{i % 10}", i, 1, f"s{i}", (1, 1, 0)) for i in range(300)]
    generator.shuffle(rows)
    create_store(owner, rows=[*rows, ("near", 999, 1, "near", (1, 0, 0))])
    expected = sorted(((r[0], r[1]) for r in rows), key=lambda r: (r[0], r[1]))
    got = search(asker, "q", {"query_embedding": [1, 0, 0], "n_citations": 20, "distance_metric": metric})
    ties = [(r[2], r[3]) for r in got if r[2] != "near"]
    assert ties == expected[: len(ties)]
    assert len(got) == 20


@pytest.mark.fresh
@pytest.mark.parametrize("metric", METRICS)
def test_very_many_ties_go_by_name_and_are_not_all_fetched(owner: Connection, asker: Connection, metric: str) -> None:
    create_store(owner, "docs", [("near", 1, 0, "near", (1, 0, 0))])
    owner.execute(
        "INSERT INTO docs (document_name, document_id, segment_number, segment, metadata, segment_embedding) "
        "SELECT 'd' || i % 7, 10 + i % 7, i, repeat('same ', 80), '{}', '[0.6,0.8,0]' "
        "FROM generate_series(60000, 1, -1) AS i"
    )
    options = {"query_embedding": [1, 0, 0], "n_citations": 4, "distance_metric": metric}
    search(asker, "q", {**options, "n_citations": 1})

    def peak_kilobytes() -> int:
        return int(
            value_of(
                owner,
                "SELECT substring(pg_read_file(format('/proc/%%s/status', %s::int)) FROM 'VmHWM:\\s+(\\d+)')::integer",
                (asker.info.backend_pid,),
            )
        )

    before = peak_kilobytes()
    rows = search(asker, "q", options)
    assert [(r[2], r[4]) for r in rows] == [("near", 0), ("d0", 7), ("d0", 14), ("d0", 21)]
    # pages of table and index that lie in shared memory are counted, too
    assert peak_kilobytes() - before < 75_000


def test_ties_of_the_rounded_distance_are_ties(owner: Connection, asker: Connection) -> None:
    # 0.00001 apart: nearer by the raw distance, later by name
    create_store(owner, rows=[("b", 1, 1, "nearer", (1.00001, 0, 0)), ("a", 2, 1, "farther", (1.00002, 0, 0))])
    rows = search(asker, "q", {"query_embedding": [1, 0, 0], "n_citations": 1, "distance_metric": "EUCLIDEAN"})
    assert [(r[2], str(r[6])) for r in rows] == [("a", "0.0000")]


def test_dot_and_cosine_agree_on_normalised_vectors(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", i, 1, f"{i}", v) for i, v in enumerate([(0.6, 0.8, 0), (0, 1, 0), (0, 0.6, -0.8)])])
    for query in ((1, 0, 0), (0, 0.6, 0.8)):
        assert retrieve(asker, query, distance_metric="DOT") | {"retrieval_info": 0} == retrieve(
            asker, query, distance_metric="COSINE"
        ) | {"retrieval_info": 0}


def test_null_and_zero_rows_are_skipped(owner: Connection, asker: Connection) -> None:
    rows = [
        ("a", 1, 1, None, (1, 0, 0)),
        ("a", 1, 2, "no embedding", None),
        ("a", 1, 3, "zero", (0, 0, 0)),
        ("a", 1, 4, "good", (1, 1, 0)),
    ]
    create_store(owner, rows=rows)
    assert [c["segment"] for c in retrieve(asker, (1, 0, 0))["citations"]] == ["good"]
    # a zero vector has a distance by the other metrics
    assert len(retrieve(asker, (1, 0, 0), distance_metric="EUCLIDEAN")["citations"]) == 2
    with error("22023", "query_embedding"):
        retrieve(asker, (0, 0, 0))
    assert len(retrieve(asker, (0, 0, 0), distance_metric="EUCLIDEAN")["citations"]) == 2


# -- approximate indexes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", INDEXES, ids=["hnsw", "ivfflat"])
def test_k_come_back_through_an_approximate_index(owner: Connection, asker: Connection, index: str) -> None:
    create_large_store(owner, index)
    rare = retrieve(asker, (-0.3, 0.2, 0.9), n_citations=10, document_name=["rare"])["citations"]
    assert len(rare) == 10
    assert {c["document_name"] for c in rare} == {"rare"}
    exact = owner.execute(
        "SELECT segment FROM docs WHERE document_name = 'rare' ORDER BY segment_embedding <=> '[-0.3,0.2,0.9]'"
    ).fetchall()
    assert {c["segment"] for c in rare} == {s for (s,) in exact}
    assert len(retrieve(asker, (1, 1, 1), n_citations=100)["citations"]) == 100
    assert len(retrieve(asker, (1, 1, 1), n_citations=10, exclude_document_name=["common"])["citations"]) == 10


@pytest.mark.parametrize("index", INDEXES, ids=["hnsw", "ivfflat"])
def test_k_come_back_through_an_approximate_index_and_row_level_security(
    owner: Connection, db: Database, index: str
) -> None:
    create_large_store(owner, index)
    owner.execute(
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY;"
        f"CREATE POLICY a ON docs TO {db.role('asker')} USING (document_id % 250 = 0)"
    )
    rows = search(db.connect("asker"), "q", {"query_embedding": [0.5, -0.5, 0.1], "n_citations": 10})
    assert len(rows) == 10
    assert all(r[3] % 250 == 0 for r in rows)


def test_recall_of_the_index_scan_is_high(owner: Connection, asker: Connection) -> None:
    create_large_store(owner, INDEXES[0])
    found = wanted = 0
    for i in range(20):
        query = [0.1 * i - 1, 0.5, 0.3 - 0.05 * i]
        exact = owner.execute(
            "SELECT document_id FROM docs ORDER BY (segment_embedding <=> %s::vector) + 0 LIMIT 10", (as_text(query),)
        ).fetchall()
        rows = search(asker, "q", {"query_embedding": query, "n_citations": 10})
        found += len({r[3] for r in rows} & {e for (e,) in exact})
        wanted += 10
    assert found / wanted >= 0.95


@pytest.mark.parametrize("metric", METRICS)
def test_the_statement_uses_the_index_of_its_metric(owner: Connection, asker: Connection, metric: str) -> None:
    create_large_store(owner, f"hnsw (segment_embedding {METRICS[metric].operator_class})")
    for options in ({}, {"document_name": ["common"]}):
        plan = plan_of(asker, metric=metric, options=options)
        assert "Index Scan using docs_embedding" in plan, plan


def test_the_statement_uses_the_index_under_row_level_security(owner: Connection, asker: Connection) -> None:
    create_large_store(owner, INDEXES[0])
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (document_name <> 'x')")
    assert "Index Scan using docs_embedding" in plan_of(asker)


def test_the_statement_uses_the_indexes_of_partitions(owner: Connection, asker: Connection) -> None:
    create_partitioned(owner)
    owner.execute(
        "INSERT INTO docs SELECT 'd', '{}', i, 1, 's' || i, ARRAY[sin(i), cos(i), 1]::vector"
        " FROM generate_series(100, 3000) AS i; CREATE INDEX ON docs USING hnsw (segment_embedding vector_cosine_ops);"
        "ANALYZE docs"
    )
    plan = plan_of(asker)
    assert plan.count("Index Scan using") == 2, plan
    assert "Merge Append" in plan


@pytest.mark.parametrize("exact", [False, True])
def test_names_that_read_like_the_statement(owner: Connection, exact: bool) -> None:
    table, column = "t.segment_embedding <=> $1::vector", "x $1::y, 100%d %s"
    create_store(owner, "docs", [(f"d{i}", i, 1, f"text {i}", (1, i, 0)) for i in range(4)])
    owner.execute(
        sql.SQL("ALTER TABLE docs RENAME document_name TO {}; ALTER TABLE docs RENAME TO {}").format(
            sql.Identifier(column), sql.Identifier(table)
        )
    )
    options = {
        "query_embedding": [1, 0, 0],
        "index_options": {"exact": exact},
        "vector_store_columns": {"document_name": column},
        "n_citations": 3,
        "retrieval_options": {"segment_overlap": 0},
    }
    rows = search(owner, "q", options)
    assert [(row[1], row[2]) for row in rows] == [(f"public.{table}", f"d{i}") for i in range(3)]
