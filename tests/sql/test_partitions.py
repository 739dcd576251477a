"""store/store, keyword/index: a partitioned store answers as one table of the same rows does, byte for byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Connection, Database
from support.keywords import add, assert_exact, enable
from support.loading import counts, loader_role, rows
from support.nodes import create
from support.partitions import CALLS, both, fill, send, words
from support.stores import COLUMNS, answer, create_store, error, fake_embedding, insert, mark
from support.stores import search as search_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stores(owner: Connection, loader: Connection) -> Connection:
    """``one`` and ``four``, of the same rows; ``four`` has four partitions. Both belong to a loader."""
    loader.execute(
        "SELECT ml_rag.create_store('public.one'); SELECT ml_rag.create_store('public.four', '{\"partitions\": 4}')"
    )
    fill(loader, "four")
    # documents that are loaded together get their ids in any order
    loader.execute("INSERT INTO one SELECT * FROM four")
    loader.execute("SELECT ml_rag.index_store(s) FROM unnest('{one,four}'::regclass[]) AS s")
    loader.execute("GRANT SELECT ON one, four TO ml_rag_user")
    return loader


def test_answers_are_those_of_one_table(stores: Connection, asker: Connection) -> None:
    assert len(rows(stores, "SELECT tableoid, count(*) FROM four GROUP BY 1")) == 4
    assert rows(stores, "TABLE one ORDER BY 3, 4") == rows(stores, "TABLE four ORDER BY 3, 4")
    for call, options in CALLS.items():
        for query in ("birch oak", "larch", "maple maple yew willow"):
            one, four = both(asker, query, options)
            assert four == one, (call, query)
            assert json.loads(one)["citations"], (call, query)


def test_it_is_one_store_and_is_found_unasked(stores: Connection, asker: Connection) -> None:
    found = rows(asker, "SELECT vector_store, found FROM ml_rag.discover() ORDER BY 1")
    assert found == [("public.four", "trusted"), ("public.one", "trusted")]
    names = answer(asker, "birch", {"skip_generate": True, "n_citations": 4})["vector_store"]
    assert names == ["public.four", "public.one"]


def test_row_level_security_is_that_of_the_table(stores: Connection, asker: Connection) -> None:
    for name in ("one", "four"):
        stores.execute(
            f"CREATE POLICY even ON {name} USING (document_id % 2 = 0); ALTER TABLE {name} ENABLE ROW LEVEL SECURITY"
        )
    for options in ({}, {"keyword_search": True, "retrieval_options": {"segment_overlap": 1}}):
        one, four = both(asker, "birch oak", {"n_citations": 100, "citation_fields": ["document_id"], **options})
        assert four == one
        assert {c["document_id"] % 2 for c in json.loads(one)["citations"]} == {0}


def test_a_changed_partition_is_a_changed_store(stores: Connection, asker: Connection) -> None:
    parts = [
        part for (part,) in rows(stores, "SELECT relid::regclass::text FROM pg_partition_tree('four') WHERE isleaf")
    ]
    assert parts == ["four_p0", "four_p1", "four_p2", "four_p3"]
    (part,), *_ = rows(stores, "SELECT tableoid::regclass::text FROM four WHERE document_name = 'd3'")
    # by the name of the partition, by that of the table, and from one partition to another
    for name, own in (("one", "one"), ("four", part)):
        stores.execute(
            f"UPDATE {own} SET segment = 'birch birch birch' WHERE document_name = 'd3' AND segment_number = 1"
        )
        stores.execute(f"UPDATE {name} SET segment = 'birch' WHERE document_name = 'd20' AND segment_number = 1")
        stores.execute(f"DELETE FROM {own} WHERE document_name = 'd3' AND segment_number = 2")
        stores.execute(f"UPDATE {name} SET document_id = document_id + 100 WHERE document_name = 'd30'")
    one, four = words(asker)
    assert four == one
    assert "birch birch birch" in one
    # a partition is not truncated by itself: the index could not tell its rows
    with error("55000", "cannot be truncated by itself") as caught:
        stores.execute(f"TRUNCATE {part}")
    assert f"DELETE FROM public.{part}" in caught.hint
    stores.execute("TRUNCATE one; TRUNCATE four")
    for name in ("one", "four"):
        assert counts(send(stores, name, {"x": "birch", "y": "oak"})) == {"loaded": 2}
    one, four = words(asker)
    assert four == one
    assert len(json.loads(one)["citations"]) == 1


def test_an_index_that_is_made_later_has_all_partitions(
    stores: Connection, owner: Connection, asker: Connection
) -> None:
    before = words(asker)
    stores.execute("SELECT ml_rag.disable_keyword_search('four')")
    triggers = (
        "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'ml_rag_keywords_%' AND tgrelid::regclass::text LIKE 'four%'"
    )
    assert rows(owner, triggers) == [(0,)]
    with error("55000", "no vector store has a keyword index") as caught:
        words(asker)
    assert "enable_keyword_search('public.four')" in caught.hint
    stores.execute("SELECT ml_rag.enable_keyword_search('public.four')")
    assert rows(owner, triggers) == [(20,)]  # four events, of the table and its four partitions
    assert words(asker) == before
    stores.execute("DROP TABLE four")
    assert rows(owner, "SELECT count(*) FROM ml_rag_internal.keyword_store") == [(1,)]


def test_a_key_may_be_one_of_each_partition(owner: Connection) -> None:
    """As where others are on other servers, if rows of one key are in one partition."""
    owner.execute(f"CREATE TABLE docs ({COLUMNS.format(type='vector(3)')}) PARTITION BY RANGE (document_id)")
    owner.execute("CREATE TABLE part PARTITION OF docs DEFAULT PARTITION BY HASH (segment_number)")
    owner.execute("CREATE TABLE leaf PARTITION OF part FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
    mark(owner, "docs")
    enable(owner)
    add(owner, ["fox"], 1)
    owner.execute("ALTER TABLE docs DROP CONSTRAINT docs_pkey")
    with error("55000", "has a keyword index"):
        assert_exact(owner, "fox dog")
    owner.execute("ALTER TABLE leaf ADD PRIMARY KEY (document_id, segment_number)")
    assert_exact(owner, "fox dog")
    owner.execute(
        "ALTER TABLE part DETACH PARTITION leaf; DROP TABLE part;"
        "CREATE TABLE part PARTITION OF docs DEFAULT PARTITION BY HASH (document_name);"
        "ALTER TABLE part ATTACH PARTITION leaf FOR VALUES WITH (MODULUS 1, REMAINDER 0)"
    )
    with error("55000", "has a keyword index"):
        assert_exact(owner, "fox dog")


def test_a_partition_that_had_an_index_of_its_own(owner: Connection) -> None:
    """It would go on following what is written to the partition by its name, in place of that of the whole table."""
    owner.execute(f"CREATE TABLE docs ({COLUMNS.format(type='vector(3)')}) PARTITION BY RANGE (document_id)")
    owner.execute(f"CREATE TABLE part ({COLUMNS.format(type='vector(3)')})")
    mark(owner, "docs")
    for name in ("part", "docs"):
        enable(owner, name)
    add(owner, ["fox"], 1, "part")
    owner.execute("ALTER TABLE docs ATTACH PARTITION part DEFAULT")
    enable(owner)
    add(owner, ["fox", "dog"], 2, "part")
    owner.execute("DELETE FROM part WHERE document_id = 1")
    assert_exact(owner, "fox dog")
    owner.execute("SELECT ml_rag.disable_keyword_search('docs')")
    assert owner.execute("SELECT FROM ml_rag_internal.keyword_store").fetchall() == []


def test_a_further_embedding_has_all_partitions(stores: Connection, asker: Connection) -> None:
    for name in ("one", "four"):
        result = rows(
            stores, f"CALL ml_rag.add_embedding('{name}', 'second', '{{\"embed_model_id\": \"fake-embed\"}}')"
        )
        assert result[0][0]["pending"] == 0
        stores.execute(f"SELECT ml_rag.use_embedding('{name}', 'second')")
    one, four = both(asker, "birch oak", {"n_citations": 30})
    assert four == one


@pytest.mark.parametrize("other", [{"search": "keyword", "in": "sentences"}, {"search": "keyword"}])
def test_a_node_that_two_arms_find_is_one_hit(owner: Connection, other: dict[str, Any]) -> None:
    """The best node of a segment by meaning need not be the best by words."""
    text = "Oak yew fir. Oak oak oak pine. Yew birch."
    for name, suffix in (("one", ""), ("four", " PARTITION BY HASH (document_id)")):
        create_store(owner, name, type="vector(16)", suffix=suffix)
        if suffix:
            owner.execute("CREATE TABLE part PARTITION OF four FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
        insert(owner, name, [("d", 1, 1, text, fake_embedding(text))])
        enable(owner, name)
        create(owner, "sentences", store=name, transform="sentence")
    arms = [{"search": "semantic", "in": "sentences"}, other]
    one, four = both(owner, "oak yew", {"arms": arms, "return": "node", "citation_fields": ["node", "score"]})
    assert four == one
    assert len(json.loads(four)["citations"]) == 3


@pytest.mark.parametrize("n", [1, 256])
def test_how_many_partitions_there_are(loader: Connection, n: int) -> None:
    name = "n" * 63
    loader.execute("SELECT ml_rag.create_store(%s, %s)", (f"public.{name}", json.dumps({"partitions": n})))
    assert rows(loader, f"SELECT count(*) FROM pg_partition_tree('{name}') WHERE isleaf") == [(n,)]
    assert counts(send(loader, name, {"a": "oak"})) == {"loaded": 1}


@pytest.mark.parametrize("n", [0, 257, 1.5, "four"])
def test_a_number_of_partitions_that_cannot_be(loader: Connection, n: Any) -> None:
    with error("22023", "partitions"):
        loader.execute("SELECT ml_rag.create_store('public.x', %s)", (json.dumps({"partitions": n}),))


def test_partitions_are_no_stores_of_their_own(db: Database, stores: Connection, owner: Connection) -> None:
    with error("55000", "cannot have a keyword index", "a partition"):
        stores.execute("SELECT ml_rag.enable_keyword_search('four_p1')")
    # who has no privilege on a partition finds its rows through the table alone
    assert rows(owner, f"SELECT has_table_privilege('{db.role('asker')}', 'four_p0', 'SELECT')") == [(False,)]
    assert rows(owner, "SELECT relowner::regrole::text FROM pg_class WHERE relname = 'four_p3'") == [(loader_role(db),)]


def semantic_plan(connection: Connection, **options: Any) -> Any:
    options = {"vector_store": ["public.four"], "skip_generate": True, "explain": True, "n_citations": 3, **options}
    (store,) = answer(connection, "birch", options)["explain"]["stores"]
    return store["semantic"]


def test_small_partitions_are_searched_by_their_indexes(
    stores: Connection, owner: Connection, asker: Connection
) -> None:
    """Not sorted as a whole, and with as many candidates as the largest of them needs."""
    stores.execute("ANALYZE four")
    found = semantic_plan(asker)
    assert (found["plan"], found["ef_search"]) == ("hnsw", 40)
    # a partition that was read otherwise has none
    parts = rows(
        stores,
        "SELECT i.indrelid::regclass::text FROM pg_index AS i WHERE i.indexrelid = ANY (%s::regclass[])",
        [index["index"] for index in found["indexes"]],
    )
    assert sorted(parts) == [(f"four_p{i}",) for i in range(4)]
    # a condition leaves rows out: the planner decides
    assert semantic_plan(asker, document_name=["d7"])["plan"] == "exact"
    for tuples, expected in ((20000, 40), (20001, 200), (-1, 200)):
        owner.execute("UPDATE pg_class SET reltuples = %s WHERE oid = 'four_p2'::regclass", (tuples,))
        assert semantic_plan(asker)["ef_search"] == expected, tuples


@pytest.mark.parametrize("search", [{}, {"keyword_search": True}, {"keyword_search": True, "semantic_search": False}])
def test_partitions_that_a_filter_leaves_out_are_not_opened(owner: Connection, search: dict[str, Any]) -> None:
    """A search of one tenant of a thousand would else take a hundred times as long as its bare statement."""
    owner.execute(
        "CREATE TABLE tenants (document_name text, document_id bigint, segment_number integer, tenant integer,"
        " segment text, segment_embedding vector(3), PRIMARY KEY (tenant, document_id, segment_number))"
        " PARTITION BY LIST (tenant);"
        "COMMENT ON COLUMN tenants.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=all_minilm_l6_v2'"
    )
    for i in range(30):
        owner.execute(f"CREATE TABLE tenant_{i} PARTITION OF tenants FOR VALUES IN ({i})")
    owner.execute(
        "INSERT INTO tenants SELECT 'd', i, 0, i % 30, 'birch ' || i, '[1,0,0]' FROM generate_series(1, 300) AS i;"
        "SELECT ml_rag.enable_keyword_search('tenants'), ml_rag.index_store('tenants'); ANALYZE tenants"
    )
    for tenant in (3, 4):
        options = {"vector_store": ["public.tenants"], "filters": {"tenant": {"eq": tenant}}, **search}
        with owner.transaction():
            found = search_rows(owner, "birch", {"query_embedding": [1, 0, 0], **options})
            opened = rows(
                owner,
                "SELECT DISTINCT c.relname FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation"
                " WHERE c.relname ~ '^tenant_[0-9]+$' AND l.pid = pg_backend_pid()",
            )
        assert {row[3] % 30 for row in found} == {tenant}
        assert opened == [(f"tenant_{tenant}",)]


def test_few_rows_that_pass_are_looked_up_one_by_one(owner: Connection) -> None:
    """All that have the words, which everybody has, would be read to find those of one tenant."""
    columns = (
        "document_name text, document_id bigint, segment_number integer, tenant integer, metadata jsonb,"
        " segment text, segment_embedding vector(3), PRIMARY KEY (tenant, document_id, segment_number)"
    )
    owner.execute(f"CREATE TABLE one ({columns}); CREATE TABLE four ({columns}) PARTITION BY LIST (tenant)")
    for i in range(4):
        owner.execute(f"CREATE TABLE four_{i} PARTITION OF four FOR VALUES IN ({i})")
    owner.execute(
        "INSERT INTO one SELECT 'd' || i, i, 0, CASE WHEN i <= 30 THEN 0 ELSE 1 + i % 3 END,"
        " jsonb_build_object('kind', 'a', 'n', i), concat('birch ', CASE WHEN i % 40 = 0 THEN 'oak' END),"
        " format('[%s,1,0]', i % 11)::vector FROM generate_series(1, 10100) AS i; INSERT INTO four TABLE one"
    )
    for name in ("one", "four"):
        mark(owner, name)
        owner.execute(f"SELECT ml_rag.enable_keyword_search('{name}')")

    def looked_up() -> int:
        found = rows(owner, "SELECT idx_tup_fetch FROM pg_stat_xact_all_tables WHERE relname = 'keyword_row'")
        return int(found[0][0] or 0)

    for state in ("", "ANALYZE one, four"):
        owner.execute(state)
        for call in ("meaning", "words", "hybrid"):
            for kept in ({"tenant": 0}, {"tenant": [0, 2]}, {"kind": "a"}, {"n": {"lt": 8}}):
                options = {**CALLS[call], "filters": kept, "query_embedding": [1, 0, 0], "n_citations": 6}
                one, four = both(owner, "birch oak", options)
                assert four == one, (state, call, kept)
            options = {**options, "vector_store": ["public.four"], "skip_generate": True}
            with error("P0002", "no segment found"):
                answer(owner, "birch", {**options, "filters": {"kind": "b", "tenant": 1}})
            if call == "meaning":
                continue
            with owner.transaction():
                before = looked_up()
                assert len(answer(owner, "birch oak", {**options, "filters": {"tenant": 0}})["citations"]) == 6
                assert looked_up() - before <= 60, (state, call)
    # rows that are few are compared one by one, and not looked for in the index of the embeddings
    owner.execute("SELECT ml_rag.index_store('four')")
    for kept in ({"tenant": 0}, {"n": {"lt": 8}}):
        assert semantic_plan(owner, query_embedding=[1, 0, 0], filters=kept)["plan"] == "exact", kept


def test_long_lists_of_values_are_not_explained(stores: Connection, owner: Connection) -> None:
    """EXPLAIN writes them once for each partition: a gigabyte, for which there is no room, of a thousand."""
    owner.execute("SET track_functions = pl")

    def explained() -> int:
        name = "ml_rag._estimated_rows(ml_rag.store, text, text[])"
        return int(rows(owner, f"SELECT coalesce(pg_stat_get_xact_function_calls('{name}'::regprocedure), 0)")[0][0])

    for n, calls in ((90, 1), (110, 0)):
        with owner.transaction():
            before = explained()
            options = {
                "vector_store": ["public.four"],
                "skip_generate": True,
                "document_name": ["d7", *["x" * 100] * n],
            }
            assert answer(owner, "birch", options)["citations"]
            assert explained() - before == calls, n


def test_the_layouts_of_tenants_in_the_documentation(loader: Connection, asker: Connection) -> None:
    part = (ROOT / "docs" / "scale.md").read_text().split("## Tenants")[1].split("\n## ")[0]
    (statements,) = re.findall(r"```sql\n(.*?)```", part, re.DOTALL)
    loader.execute("SET app.tenant = 7")
    loader.execute(statements.replace("all_minilm_l6_v2", "fake-embed").replace("vector(384)", "vector(16)").encode())
    for store in ("all_of_them", "by_tenant"):
        loader.execute(f"GRANT SELECT ON {store} TO ml_rag_user")
        assert counts(send(loader, store, {"x": "birch", "y": "oak"})) == {"loaded": 2}
        for call in ({}, CALLS["words"], {"keyword_search": True}):
            options = {"vector_store": [f"public.{store}"], "skip_generate": True, **call}
            assert len(answer(asker, "birch oak", {**options, "filters": {"tenant": 7}})["citations"]) == 2
            with error("P0002", "no segment found"):
                answer(asker, "birch oak", {**options, "filters": {"tenant": 8}})
