"""Searches of foreign and partitioned tables, views; columns of other types and names."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import sql

from support.cluster import Connection, Database, value_of
from support.searching import INDEXES, create_large_store, create_partitioned, plan_of
from support.stores import (
    answer,
    create_store,
    error,
    fake_embedding,
    grant,
    insert,
    mark,
    marker,
    names,
    retrieve,
    search,
)


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
    assert "document_name = ANY (" in next(p for p in plan.splitlines() if "Remote SQL" in p), plan


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


def test_partitioned_table(owner: Connection, asker: Connection) -> None:
    create_partitioned(owner)
    insert(owner, "docs", [("a", 1, 1, "first", (1, 0, 0)), ("b", 2000, 1, "second", (1, 1, 0))])
    document = retrieve(asker, (1, 0, 0))
    assert document["vector_store"] == ["public.docs"]
    assert [c["segment"] for c in document["citations"]] == ["first", "second"]


@pytest.mark.parametrize(
    "given",
    [{"query_embedding": fake_embedding("zebra")}, {}, {"semantic_search": False, "keyword_search": True}],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_partition_in_a_schema_that_the_caller_may_not_use(
    owner: Connection, asker: Connection, is_named: bool, given: dict[str, Any]
) -> None:
    create_store(owner, "parted", suffix=" PARTITION BY HASH (document_id)", type="vector(16)")
    owner.execute(
        "CREATE SCHEMA closed;CREATE TABLE closed.part PARTITION OF parted FOR VALUES WITH (MODULUS 1, REMAINDER 0)"
    )
    insert(owner, "parted", [("a", 1, 1, "zebra", fake_embedding("zebra"))])
    if "keyword_search" in given:
        owner.execute("SELECT ml_rag.enable_keyword_search('parted')")
    options = given | ({"vector_store": ["public.parted"]} if is_named else {})
    asker.execute("BEGIN READ ONLY")
    assert [row[5] for row in search(asker, "zebra", options)] == ["zebra"]
    whole = {"document_name": ["a"], "model_options": {"task": "summarization", "model_id": "extractive"}}
    assert answer(asker, "zebra", options | whole)["text"]


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


@pytest.mark.parametrize("number", [2**31, -(2**63), 2**63 - 1])
def test_numbers_of_segments_may_exceed_an_integer(owner: Connection, asker: Connection, number: int) -> None:
    """Citations have them; the column of ml_rag_search is an integer."""
    create_from(
        owner,
        "document_name text, segment_number bigint, segment text",
        f"'a', {number}, 'far', '[1,0,0]'",
        "'a', 1, 'near', '[1,1,0]'",
    )
    options = {"retrieval_options": {"segment_overlap": 2}, "citation_fields": ["segment_number"]}
    cited = retrieve(asker, (1, 0, 0), **options)["citations"]
    assert [(c["segment"], c["segment_number"]) for c in cited] == [("far", number), ("near", 1)]
    for explain in (False, True):
        rows = search(asker, "q", {"query_embedding": [1, 0, 0], "explain": explain})
        assert [r[4:6] for r in rows] == [(None, "far"), (1, "near")]


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


@pytest.mark.parametrize("metadata", [r'{"source": "\u0000"}', r'{"\ud800": 1}', '{"page": 1e999999}'])
def test_a_row_whose_json_is_no_jsonb_comes_without_metadata(
    owner: Connection, asker: Connection, metadata: str
) -> None:
    """Anybody who may write a row could have the search of all others fail."""
    create_from(owner, "metadata json, segment text", """'{"source": "a.txt"}', 'one', '[1,0,0]'""")
    owner.execute("INSERT INTO odd VALUES (%s, 'two', '[1,0,0]')", (metadata,))
    for options in ({}, {"vector_store": ["public.odd"], "rerank": {}}, {"filters": {"source": {"ne": "b.txt"}}}):
        rows = search(asker, "q", {"query_embedding": [1, 0, 0], **options})
        assert sorted((r[5], r[2], r[7]) for r in rows) == [
            ("one", "a.txt", {"source": "a.txt"}),
            ("two", "public.odd", None),
        ]
    whole = {"document_name": ["public.odd", "a.txt"], "model_options": {"task": "summarization"}}
    assert {c["segment"] for c in answer(asker, "q", whole)["citations"]} == {"one", "two"}
    assert value_of(owner, "SELECT ml_rag._list_documents(ARRAY(SELECT ml_rag.discover()), true)") == [
        ["a.txt", []],
        ["public.odd", []],
    ]


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
    quoted = value_of(owner, "SELECT format('%%I.%%I', %s::text, %s::text)", (schema, table))
    for spelled in (f"{schema}.{table}", table, quoted):
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
        assert document["vector_store"] == [quoted if "." in schema else f"{schema}.{table}"]


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
