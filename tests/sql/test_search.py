"""30_search: the nearest segments, against brute force; plans; kinds of relations and columns."""

from __future__ import annotations

import random

import pytest
from psycopg import sql

from support import reference
from support.cluster import Connection, Database
from support.searching import INDEXES, create_large_store, load, plan_of, random_segments
from support.stores import as_text, create_store, error, grant, insert, mark, marker, names, retrieve, search

METRICS = ["COSINE", "DOT", "EUCLIDEAN"]


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


@pytest.mark.parametrize("metric", ["COSINE", "DOT", "EUCLIDEAN"])
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
        row = owner.execute(
            "SELECT substring(pg_read_file(format('/proc/%%s/status', %s::int)) FROM 'VmHWM:\\s+(\\d+)')::integer",
            (asker.info.backend_pid,),
        ).fetchone()
        assert row is not None
        return int(row[0])

    before = peak_kilobytes()
    rows = search(asker, "q", options)
    assert [(r[2], r[4]) for r in rows] == [("near", 0), ("d0", 7), ("d0", 14), ("d0", 21)]
    assert peak_kilobytes() - before < 50_000


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


@pytest.mark.parametrize(
    ("metric", "opclass"),
    [("COSINE", "vector_cosine_ops"), ("DOT", "vector_ip_ops"), ("EUCLIDEAN", "vector_l2_ops")],
)
def test_the_statement_uses_the_index_of_its_metric(
    owner: Connection, asker: Connection, metric: str, opclass: str
) -> None:
    create_large_store(owner, f"hnsw (segment_embedding {opclass})")
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


# -- foreign tables ---------------------------------------------------------------------------------------------------


def create_foreign_store(db: Database, owner: Connection) -> None:
    """`public.docs` moves to schema `shard`, and `public.remote` is the foreign table over it."""
    info = owner.info
    owner.execute("CREATE SCHEMA shard; ALTER TABLE docs SET SCHEMA shard")
    owner.execute("COMMENT ON COLUMN shard.docs.segment_embedding IS NULL")
    owner.execute("CREATE EXTENSION postgres_fdw")
    owner.execute(
        sql.SQL(
            "CREATE SERVER loopback FOREIGN DATA WRAPPER postgres_fdw"
            " OPTIONS (host {}, port {}, dbname {}, extensions 'vector')"
        ).format(*(sql.Literal(v) for v in (info.host, str(info.port), db.name)))
    )
    owner.execute(
        sql.SQL(
            "CREATE USER MAPPING FOR {} SERVER loopback OPTIONS (user {}, password {}, password_required 'false')"
        ).format(sql.Identifier(db.role("asker")), sql.Literal(info.user), sql.Literal(info.password or "x"))
    )
    owner.execute(
        "CREATE FOREIGN TABLE remote (document_name text, metadata jsonb, document_id bigint, segment_number integer,"
        " segment text, segment_embedding vector(3)) SERVER loopback OPTIONS (schema_name 'shard', table_name 'docs')"
    )
    mark(owner, "remote")
    grant(owner, "remote")


def test_a_foreign_table_is_searched_on_its_shard(db: Database, owner: Connection, asker: Connection) -> None:
    create_large_store(owner, INDEXES[0])
    create_foreign_store(db, owner)
    document = retrieve(asker, (1, 0, 0))
    assert document["vector_store"] == ["public.remote"]
    assert len(document["citations"]) == 3
    plan = plan_of(asker, "remote")
    remote = next(line for line in plan.splitlines() if "Remote SQL" in line)
    assert "ORDER BY" in remote, plan
    assert "LIMIT" in remote, plan
    plan = plan_of(asker, "remote", options={"document_name": ["rare", "x"]})
    assert "document_name = ANY ('{rare,x}'::text[])" in next(p for p in plan.splitlines() if "Remote SQL" in p), plan


def test_k_come_back_from_a_foreign_table_with_an_approximate_index(
    db: Database, owner: Connection, asker: Connection
) -> None:
    # the shard's own settings apply there: 40 candidates of its HNSW index, whatever the limit
    create_large_store(owner, INDEXES[0])
    create_foreign_store(db, owner)
    assert len(retrieve(asker, (1, 0, 0), n_citations=100)["citations"]) == 100
    rare = retrieve(asker, (-0.3, 0.2, 0.9), n_citations=10, document_name=["rare"])["citations"]
    assert [c["document_name"] for c in rare] == ["rare"] * 10


def test_overlap_through_a_foreign_table(db: Database, owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, i, f"s{i}", (1, i, 0)) for i in range(6)])
    create_foreign_store(db, owner)
    citations = retrieve(asker, (1, 0, 0), n_citations=1, retrieval_options={"segment_overlap": 2})["citations"]
    assert citations == [{"segment": "s0\ns1\ns2", "distance": 0, "document_name": "a"}]


# -- other kinds of relations and columns -----------------------------------------------------------------------------


def create_partitioned(owner: Connection) -> None:
    create_store(owner, suffix=" PARTITION BY RANGE (document_id)")
    owner.execute(
        "CREATE TABLE docs_1 PARTITION OF docs FOR VALUES FROM (0) TO (1000);"
        "CREATE TABLE docs_2 PARTITION OF docs FOR VALUES FROM (1000) TO (1000000)"
    )


def test_partitioned_table(owner: Connection, asker: Connection) -> None:
    create_partitioned(owner)
    insert(owner, "docs", [("a", 1, 1, "first", (1, 0, 0)), ("b", 2000, 1, "second", (1, 1, 0))])
    document = retrieve(asker, (1, 0, 0))
    assert document["vector_store"] == ["public.docs"]
    assert [c["segment"] for c in document["citations"]] == ["first", "second"]


@pytest.mark.parametrize("kind", ["VIEW", "MATERIALIZED VIEW"])
def test_view_with_a_comment_of_its_own(owner: Connection, asker: Connection, kind: str) -> None:
    create_store(owner, "docs", [("a", 1, i, f"s{i}", (1, i, 0)) for i in range(4)])
    owner.execute(f"CREATE {kind} seen AS SELECT * FROM docs WHERE segment_number > 1")
    grant(owner, "seen")
    assert names(asker) == ["public.docs"]
    owner.execute(sql.SQL("COMMENT ON COLUMN seen.segment_embedding IS {}").format(sql.Literal(marker())))
    assert names(asker) == ["public.docs", "public.seen"]
    document = retrieve(asker, (1, 0, 0), vector_store=["seen"], n_citations=1, retrieval_options={})
    assert document["citations"] == [{"segment": "s2\ns3", "distance": 0.5528, "document_name": "a"}]


def test_view_over_an_indexed_table_gives_k(owner: Connection, asker: Connection) -> None:
    create_large_store(owner, INDEXES[0])
    owner.execute("CREATE VIEW rare AS SELECT * FROM docs WHERE document_name = 'rare'")
    mark(owner, "rare")
    grant(owner, "rare")
    assert len(retrieve(asker, (1, 0, 0), vector_store=["rare"], n_citations=10)["citations"]) == 10


def test_matview_without_data_does_not_break_the_search_of_the_others(owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs", [("a", 1, 1, "s", (1, 0, 0))])
    owner.execute("CREATE MATERIALIZED VIEW empty AS SELECT * FROM docs WITH NO DATA")
    mark(owner, "empty")
    grant(owner, "empty")
    assert retrieve(asker, (1, 0, 0))["vector_store"] == ["public.docs"]


def create_from(owner: Connection, columns: str, *rows: str, name: str = "odd") -> None:
    owner.execute(f"CREATE TABLE {name} ({columns}, segment_embedding vector(3))")
    for row in rows:
        owner.execute(f"INSERT INTO {name} VALUES ({row})")
    mark(owner, name)
    grant(owner, name)


@pytest.mark.parametrize(
    ("type", "one", "two"),
    [
        ("uuid", "'5f0c8bd6-6ba3-4a0a-8d0e-6c1f3a6f1d11'", "'6f0c8bd6-6ba3-4a0a-8d0e-6c1f3a6f1d11'"),
        ("text", "'x%s'", "'y'''"),
        ("varchar(10)", "'x'", "'y'"),
        ("smallint", "1", "2"),
        ("integer", "1", "2"),
        ("numeric", "1.50", "2"),
        ("timestamptz", "'2020-01-01'", "'2021-01-01'"),
    ],
)
def test_document_ids_of_other_types(owner: Connection, asker: Connection, type: str, one: str, two: str) -> None:
    create_from(
        owner,
        f"document_id {type}, segment_number integer, segment text",
        *(f"{d}, {n}, 's{i}{n}', '[1,{n},{i}]'" for i, d in enumerate((one, two)) for n in (1, 2, 3)),
    )
    options = {"query_embedding": [1, 2, 0], "n_citations": 2, "retrieval_options": {}}
    rows = search(asker, "q", options)
    assert [r[5] for r in rows] == ["s01\ns02\ns03"]
    assert rows[0][2] == "public.odd"
    assert (rows[0][3] is not None) == (type in ("smallint", "integer"))
    rows = search(asker, "q", {"query_embedding": [1, 1, 1], "n_citations": 1, "retrieval_options": {}})
    assert [r[5] for r in rows] == ["s11\ns12"]


def test_only_segment_and_embedding_are_indispensable(owner: Connection, asker: Connection) -> None:
    create_from(owner, "segment text", "'one', '[1,0,0]'", "'two', '[1,1,0]'")
    rows = search(asker, "q", {"query_embedding": [1, 0, 0], "retrieval_options": {"segment_overlap": 5}})
    assert [tuple(r[1:6]) for r in rows] == [
        ("public.odd", "public.odd", None, None, "one"),
        ("public.odd", "public.odd", None, None, "two"),
    ]
    assert rows[0][7] is None
    assert retrieve(asker, (1, 0, 0), document_name=["public.odd"])["citations"]
    with error("P0002"):
        retrieve(asker, (1, 0, 0), exclude_document_name=["public.odd"])


def test_null_document_names_ids_and_numbers(owner: Connection, asker: Connection) -> None:
    create_from(
        owner,
        "document_name text, document_id integer, segment_number integer, segment text",
        "NULL, 1, 1, 'no name', '[1,0,0]'",
        "'n', NULL, 1, 'no id', '[1,1,0]'",
        "'n', 2, NULL, 'no number', '[0,1,0]'",
    )
    got = retrieve(asker, (1, 0, 0), retrieval_options={})["citations"]
    assert [(c["segment"], c["document_name"]) for c in got] == [("no name", None), ("no id", "n"), ("no number", "n")]
    others = retrieve(asker, (1, 0, 0), exclude_document_name=["n"])["citations"]
    assert [c["segment"] for c in others] == ["no name"]


def test_documents_told_apart_by_name_where_there_is_no_id(owner: Connection, asker: Connection) -> None:
    create_from(
        owner,
        "document_name varchar(20), segment_number smallint, segment text",
        *(f"'{d}', {n}, '{d}{n}', '[1,{n},{i}]'" for i, d in enumerate("ab") for n in (1, 2, 3)),
    )
    rows = search(asker, "q", {"query_embedding": [1, 1, 1], "n_citations": 1, "retrieval_options": {}})
    assert [r[5] for r in rows] == ["b1\nb2"]


def test_metadata_of_json_type_comes_as_jsonb(owner: Connection, asker: Connection) -> None:
    create_from(owner, "metadata json, segment text", """'{"page": 3}', 'one', '[1,0,0]'""")
    assert search(asker, "q", {"query_embedding": [1, 0, 0]})[0][7] == {"page": 3}


@pytest.mark.parametrize(
    ("schema", "table"),
    [
        ("public", 'odd "name"'),
        ("Mixed Case", "Table.With.Dots"),
        ("dotted.schema", "Table.With.Dots"),
        ("percent%s", "per%Icent$1"),
        ("schéma", "表"),
        ("quote'd", "it's"),
        ("public", "select"),
        ("back\\slash", "a\\b"),
    ],
)
def test_names_that_need_quoting(owner: Connection, asker: Connection, schema: str, table: str) -> None:
    if schema != "public":
        owner.execute(sql.SQL("CREATE SCHEMA {0}; GRANT USAGE ON SCHEMA {0} TO PUBLIC").format(sql.Identifier(schema)))
    columns = ['do"c', "n %s", "te'xt.", "vec tor", "Ïd"]
    relation = sql.Identifier(schema, table)
    name, number, text, vector, id_ = map(sql.Identifier, columns)
    owner.execute(
        sql.SQL(
            "CREATE TABLE {} ({} text, {} integer, {} text, {} vector(3), {} uuid DEFAULT '{{{{{}}}}}')".replace(
                "{{{{{}}}}}", "5f0c8bd6-6ba3-4a0a-8d0e-6c1f3a6f1d11"
            )
        ).format(relation, name, number, text, vector, id_)
    )
    owner.execute(
        sql.SQL("INSERT INTO {} VALUES ('it''s', 1, 'one', '[1,0,0]'), ('it''s', 2, 'two', '[1,1,0]')").format(relation)
    )
    mark(owner, relation, column="vec tor")
    grant(owner, relation)
    mapping = {
        "document_name": columns[0],
        "segment_number": columns[1],
        "segment": columns[2],
        "segment_embedding": columns[3],
        "document_id": columns[4],
    }
    quoted = owner.execute("SELECT format('%%I.%%I', %s::text, %s::text)", (schema, table)).fetchone()
    assert quoted is not None
    for spelled in (f"{schema}.{table}", table, quoted[0]):
        document = retrieve(
            asker,
            (1, 0, 0),
            vector_store=[spelled],
            vector_store_columns=mapping,
            n_citations=1,
            document_name=["it's"],
            retrieval_options={},
        )
        assert document["citations"] == [{"segment": "one\ntwo", "distance": 0, "document_name": "it's"}]
        assert document["vector_store"] == [quoted[0] if "." in schema else f"{schema}.{table}"]


def test_two_stores_whose_names_read_the_same_are_kept_apart(owner: Connection, asker: Connection) -> None:
    for schema, table, text in (("a.b", "c", "first"), ("a", "b.c", "second")):
        owner.execute(sql.SQL("CREATE SCHEMA {0}; GRANT USAGE ON SCHEMA {0} TO PUBLIC").format(sql.Identifier(schema)))
        rows = [("d", 1, i, f"{text} {i}", (1, i, 0)) for i in range(3)]
        create_store(owner, sql.Identifier(schema, table), rows)
    document = retrieve(asker, (1, 0, 0), n_citations=1, retrieval_options={})
    assert document["vector_store"] == ['"a.b".c', "a.b.c"]
    assert [c["segment"] for c in document["citations"]] == ["first 0\nfirst 1"]


def test_sixteen_thousand_dimensions(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE wide (segment text, segment_embedding vector(16000))")
    owner.execute("ALTER TABLE wide ALTER segment_embedding SET STORAGE EXTERNAL")
    owner.execute(
        "INSERT INTO wide SELECT 'w', array_agg(i %% 7)::vector FROM generate_series(1, 16000) AS i".replace("%%", "%")
    )
    mark(owner, "wide")
    grant(owner, "wide")
    assert retrieve(asker, [float(i % 7) for i in range(1, 16001)])["citations"][0]["distance"] == 0


def test_no_stores_have_no_segments(asker: Connection) -> None:
    for stores in ("NULL", "'{}'"):
        assert asker.execute(f"SELECT * FROM ml_rag.search({stores}, '[1,0,0]')").fetchall() == []
        assert asker.execute(f"SELECT * FROM ml_rag.expand({stores}, '{{}}')").fetchall() == []
