"""pipeline/condition: as many rows as there are whatever the index; indexes that serve conditions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import sql

from support.cluster import Connection, Database
from support.searching import INDEXES, ids
from support.stores import create_store


def create_indexed(owner: Connection, index: str | None) -> None:
    """5 000 rows: one of them "one", ten "ten", every other one "half"."""
    create_store(owner)
    owner.execute(
        "INSERT INTO docs SELECT 'd', jsonb_build_object('n', i, 'share', CASE WHEN i = 2500 THEN '\"one\"'"
        " WHEN i % 500 = 7 THEN '\"ten\"' ELSE to_jsonb(CASE i % 2 WHEN 0 THEN 'half' ELSE 'rest' END) END), i, 1, 's',"
        " ARRAY[sin(i), cos(i * 1.7), sin(i * 0.3)]::vector FROM generate_series(1, 5000) AS i"
    )
    if index is not None:
        owner.execute(f"CREATE INDEX docs_embedding ON docs USING {index}")
    owner.execute("ANALYZE docs")


@pytest.mark.parametrize("index", [None, *INDEXES], ids=["none", "hnsw", "ivfflat"])
def test_k_come_back_whatever_the_index_and_the_share(owner: Connection, db: Database, index: str | None) -> None:
    create_indexed(owner, index)
    asker = db.connect("asker")

    def exact(condition: str, query: str, n: int) -> list[int]:
        rows = owner.execute(
            f"SELECT document_id FROM docs WHERE {condition} ORDER BY (segment_embedding <=> '{query}') + 0 LIMIT {n}"
        )
        return sorted(i for (i,) in rows)

    def check(and_: str = "") -> None:
        found = wanted = 0
        for query in ("[0.3,-0.2,0.9]", "[-1,0.1,0.1]", "[0.2,0.9,-0.4]"):
            options = {"query_embedding": query, "distance_metric": "COSINE"}
            for share in ("one", "ten"):
                expected = exact(f"metadata ->> 'share' = '{share}'{and_}", query, 100)
                assert ids(asker, {"share": share}, **options) == expected
            for filters, condition in (
                ({"share": "half"}, "metadata ->> 'share' = 'half'"),
                ({"n": {"gt": 2500}}, "document_id > 2500"),
                ({"document_id": {"lte": 2500}}, "document_id <= 2500"),
            ):
                expected = exact(condition + and_, query, 20)
                got = ids(asker, filters, n_citations=20, **options)
                assert len(got) == 20
                assert owner.execute(
                    f"SELECT bool_and({condition + and_}) FROM docs WHERE document_id = ANY ('{set(got)}')"
                ).fetchone() == (True,)
                found += len({*got} & {*expected})
                wanted += 20
        # ivfflat reads the nearest lists only, as without a filter
        assert found / wanted >= (0.95 if index != INDEXES[1] else 0.5), found / wanted

    check()
    owner.execute(
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY;"
        f"CREATE POLICY a ON docs TO {db.role('asker')} USING (document_id % 5 <> 2)"
    )
    check(" AND document_id % 5 <> 2")
    owner.execute("DROP POLICY a ON docs; CREATE POLICY a ON docs USING (document_id % 500 = 7)")
    assert ids(asker, {"share": "ten"}) == [7 + 500 * i for i in range(10)]
    assert ids(asker, {"share": "half"}) == []


@pytest.fixture(scope="module")
def many(module_owner: Connection) -> Connection:
    """Store `docs` with 12 rows of each of 500 authors."""
    create_store(module_owner)
    module_owner.execute("ALTER TABLE docs ADD year integer, ADD tags text[]")
    module_owner.execute(
        "INSERT INTO docs SELECT 'd' || i % 500, jsonb_build_object('author', 'a' || i % 500, 'year', i % 500), i, 1,"
        " 's', ARRAY[sin(i), cos(i * 1.7), sin(i * 0.3)]::vector, i % 500, ARRAY['t' || i % 500]"
        " FROM generate_series(1, 6000) AS i"
    )
    module_owner.execute("CREATE INDEX docs_embedding ON docs USING hnsw (segment_embedding vector_cosine_ops)")
    return module_owner


@pytest.mark.parametrize(
    ("index", "filters"),
    [
        ("btree (year)", {"year": 7}),
        ("btree (year)", {"year": [7, 8]}),
        ("btree (year)", {"year": {"between": [7, 8]}}),
        ("btree (document_name)", {"document_name": "d7"}),
        ("gin (tags)", {"tags": "t7"}),
        ("gin (metadata jsonb_path_ops)", {"author": "a7"}),
        ("gin (metadata)", {"author": "a7"}),
        ("gin (metadata jsonb_path_ops)", {"author": ["a7", "a8"]}),
        ("gin (metadata jsonb_path_ops)", {"/year": 7}),
    ],
    ids=str,
)
def test_an_index_of_the_users_serves_the_condition(
    many: Connection, module_asker: Connection, index: str, filters: Any
) -> None:
    many.execute(f"DROP INDEX IF EXISTS of_the_user; CREATE INDEX of_the_user ON docs USING {index}")
    many.execute("ANALYZE docs")
    row = module_asker.execute(
        "SELECT f.condition, f.arguments::text FROM ml_rag.discover(ARRAY['docs']) AS s, ml_rag.filter(s, %s) AS f",
        (json.dumps({"filters": filters}),),
    ).fetchone()
    assert row is not None
    arguments = sql.SQL("({}::text[])").format(sql.Literal(row[1])).as_string(module_asker)
    condition = row[0].replace("$3", arguments)
    rows = module_asker.execute(f"EXPLAIN (COSTS OFF) SELECT t.ctid FROM docs AS t WHERE true{condition}".encode())
    plan = "\n".join(line for (line,) in rows)
    assert "of_the_user" in plan, plan
    wanted = next(iter(filters.values()))
    assert len(ids(module_asker, filters)) == (24 if isinstance(wanted, list | dict) else 12)
