"""pipeline/explain: how an answer came about, and that it tells nothing the caller may not see."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.cluster import Connection, Database, noticed
from support.searching import INDEXES, create_large_store
from support.stores import answer, create_store, error, mark, marker, search

E1 = [1.0, 0.0, 0.0]


def explain(connection: Connection, embedding: list[float] | None = None, **options: Any) -> Any:
    """The object of a call with a given embedding and without generation."""
    options = {"skip_generate": True, "query_embedding": embedding or E1, **options}
    return answer(connection, "copper", {**options, "explain": True})["explain"]


def stores(explained: Any) -> dict[str, Any]:
    return {store.pop("vector_store"): store for store in explained["stores"]}


def notices(connection: Connection) -> list[tuple[Any, Any, Any]]:
    """Severity, message and detail of what the connection is told from now on."""
    return noticed(connection, lambda d: (d.severity_nonlocalized, d.message_primary, d.message_detail))


@pytest.fixture
def docs(owner: Connection) -> None:
    create_store(owner, rows=[("a", 1, i, f"copper {i}", (1, i, 0)) for i in range(6)])


# -- what it says -----------------------------------------------------------------------------------------------------


def test_an_answer_has_it_where_it_is_asked_for(asker: Connection, docs: None) -> None:
    options = {"query_embedding": E1, "skip_generate": True}
    plain = answer(asker, "q", options)
    assert set(plain) == {"citations", "vector_store", "retrieval_info"}
    assert answer(asker, "q", {**options, "explain": False}) == plain
    explained = answer(asker, "q", {**options, "explain": True})
    assert set(explained.pop("explain")) == {
        "stores",
        "candidates",
        "thresholds",
        "options",
        "statement",
        "tokens",
        "milliseconds",
    }
    assert explained == plain


def test_no_such_value(asker: Connection) -> None:
    with error("22023", "explain", "true or false"):
        answer(asker, "q", {"explain": "yes"})


def test_a_store_without_an_index_is_read_exactly(asker: Connection, docs: None) -> None:
    explained = explain(asker)
    semantic = {"plan": "exact", "indexes": [], "sort": "index", "reads": 1, "limit": 4, "candidates": 4}
    assert stores(explained) == {
        "public.docs": {"searched": True, "embed_model_id": "fake-embed", "semantic": semantic}
    }
    assert explained["candidates"] == {"semantic": 3, "within_threshold": 3, "citations": 3}
    assert explained["thresholds"] == {
        "method": "n_citations",
        "n_citations": 3,
        "nearest_distance": 0.0,
        "threshold": 0.5528,
    }
    assert explained["tokens"] is None


@pytest.mark.parametrize("index", INDEXES)
def test_an_index_and_its_scan(owner: Connection, asker: Connection, index: str) -> None:
    create_large_store(owner, index)
    asker.execute("SET enable_seqscan = off")
    semantic = stores(explain(asker))["public.docs"]["semantic"]
    method = index.split()[0]
    assert semantic["plan"] == method
    assert semantic["indexes"] == [{"index": "docs_embedding", "method": method}]
    assert semantic["iterative_scan"] == "relaxed_order"
    assert semantic.get("ef_search") == (40 if method == "hnsw" else None)
    assert semantic["sort"] == "index"


@pytest.fixture(scope="module")
def large(module_owner: Connection) -> Connection:
    """The owner of a store of more rows than are searched as those of small tables are."""
    create_large_store(module_owner, INDEXES[0], rows=20_001)
    module_owner.execute("CREATE INDEX ON docs (document_id); ANALYZE docs")
    return module_owner


@pytest.mark.usefixtures("large")
def test_ef_search_of_a_large_table(module_asker: Connection) -> None:
    assert stores(explain(module_asker))["public.docs"]["semantic"]["ef_search"] == 200


def test_ef_search_is_the_callers(owner: Connection, asker: Connection) -> None:
    create_large_store(owner, INDEXES[0])
    asker.execute("SET hnsw.ef_search = 60; SET enable_seqscan = off")
    assert stores(explain(asker))["public.docs"]["semantic"]["ef_search"] == 60
    assert asker.execute("SHOW hnsw.ef_search").fetchone() == ("60",)


def test_an_index_of_another_metric_is_of_no_use(owner: Connection, asker: Connection) -> None:
    create_large_store(owner, INDEXES[0])
    semantic = stores(explain(asker, distance_metric="EUCLIDEAN"))["public.docs"]["semantic"]
    assert (semantic["plan"], semantic["indexes"]) == ("exact", [])
    assert "iterative_scan" not in semantic


def test_an_index_of_the_filter(owner: Connection, asker: Connection) -> None:
    create_large_store(owner, INDEXES[0])
    owner.execute("CREATE INDEX docs_name ON docs (document_name); ANALYZE docs")
    semantic = stores(explain(asker, document_name=["rare"]))["public.docs"]["semantic"]
    assert semantic["plan"] == "exact"
    assert semantic["indexes"] == [{"index": "docs_name", "method": "btree"}]
    assert semantic["candidates"] == 10


@pytest.mark.parametrize(("passing", "sort"), [(10, "exact"), (1_200, "exact"), (1_500, "index"), (9_000, "index")])
@pytest.mark.parametrize("secured", [False, True])
def test_few_rows_that_pass_are_compared_and_many_looked_for(
    large: Connection, module_asker: Connection, passing: int, sort: str, secured: bool
) -> None:
    """sqrt(8 * (3 + 8) * 20 001) is 1 327."""
    large.execute("DROP POLICY IF EXISTS p ON docs; ALTER TABLE docs DISABLE ROW LEVEL SECURITY")
    if secured:
        large.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (document_id > 0)")
    (least,) = large.execute("SELECT min(document_id) FROM docs").fetchone() or (None,)
    options = {"filters": {"document_id": {"lt": least + passing}}, "n_citations": 3}
    semantic = stores(explain(module_asker, **options))["public.docs"]["semantic"]
    assert semantic["sort"] == sort
    assert semantic["candidates"] >= 3


def test_an_index_that_ends_too_early_is_left_for_a_sort(owner: Connection, asker: Connection) -> None:
    create_large_store(owner, INDEXES[0])
    # a policy: under a filter so few rows are sorted at once
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (document_name = 'rare')")
    asker.execute("SET hnsw.ef_search = 10; SET hnsw.max_scan_tuples = 1; SET enable_seqscan = off")
    semantic = stores(explain(asker, n_citations=10))["public.docs"]["semantic"]
    assert (semantic["plan"], semantic["sort"], semantic["reads"]) == ("exact", "exact", 2)
    assert semantic["candidates"] == 10


def test_indexes_of_partitions(owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs", suffix=" PARTITION BY LIST (document_id)")
    owner.execute(
        "CREATE TABLE one PARTITION OF docs FOR VALUES IN (1); CREATE TABLE two PARTITION OF docs FOR VALUES IN (2);"
        "INSERT INTO docs SELECT 'd', '{}', 1 + i % 2, i, 's' || i, ARRAY[sin(i), cos(i * 1.7), sin(i * 0.3)]::vector"
        " FROM generate_series(1, 3000) AS i;"
        "CREATE INDEX ON docs USING hnsw (segment_embedding vector_cosine_ops); ANALYZE docs"
    )
    asker.execute("SET enable_seqscan = off")
    semantic = stores(explain(asker))["public.docs"]["semantic"]
    assert semantic["plan"] == "hnsw"
    assert {i["index"] for i in semantic["indexes"]} == {"one_segment_embedding_idx", "two_segment_embedding_idx"}


def test_both_arms(owner: Connection, asker: Connection, docs: None) -> None:
    owner.execute("SELECT ml_rag.enable_keyword_search('docs', '{\"language\": \"en\"}')")
    explained = explain(asker, keyword_search=True, hybrid_options={"candidates": 4})
    store = stores(explained)["public.docs"]
    assert store["keyword"] == {
        "configuration": "pg_catalog.english",
        "words": ["copper"],
        "limit": 4,
        "candidates": 4,
    }
    assert store["semantic"]["candidates"] >= 4
    candidates = explained["candidates"]
    assert (candidates["semantic"], candidates["keyword"]) == (4, 4)
    assert 4 <= candidates["fused"] <= 8
    assert set(explained["milliseconds"]) == {
        *("discover", "search", "keyword", "fuse", "threshold", "explain", "total")
    }


def test_one_arm(owner: Connection, asker: Connection, docs: None) -> None:
    owner.execute("SELECT ml_rag.enable_keyword_search('docs', '{\"language\": \"en\"}')")
    explained = explain(asker, keyword_search=True, semantic_search=False, n_citations=2)
    assert set(stores(explained)["public.docs"]) == {"searched", "embed_model_id", "keyword"}
    assert explained["candidates"] == {"keyword": 6, "within_threshold": 6, "citations": 2}


def test_texts_of_another_type(owner: Connection, asker: Connection, docs: None) -> None:
    owner.execute(
        "ALTER TABLE docs ALTER segment_embedding DROP NOT NULL, ALTER segment TYPE bytea USING segment::bytea"
    )
    assert stores(explain(asker))["public.docs"]["semantic"]["candidates"] == 4


def test_thresholds_and_reranking(asker: Connection, docs: None) -> None:
    explained = explain(
        asker,
        retrieval_options={"max_distance": 0.6, "percentage_distance": "auto", "segment_overlap": 0},
        rerank={"candidates": 2, "min_score": 0.1},
        n_citations=1,
    )
    assert explained["candidates"] == {"semantic": 2, "within_threshold": 1, "reranked": 1, "citations": 1}
    thresholds = explained["thresholds"]
    assert {key: thresholds[key] for key in ("method", "threshold", "max_distance", "percentage_distance")} == {
        "method": "percentage_distance",
        "threshold": 0.0,
        "max_distance": 0.6,
        "percentage_distance": 20,
    }
    assert (thresholds["min_score"], thresholds["best_score"]) == (0.1, 1)


def test_tokens_are_those_of_the_model_server(asker: Connection, docs: None) -> None:
    document = answer(asker, "copper", {"query_embedding": E1, "explain": True})
    assert document["explain"]["tokens"]["generated"] == len(document["text"].split())
    assert document["explain"]["tokens"]["prompt"] > 3


def test_the_times_of_the_stages_fit_into_that_of_the_call(asker: Connection, owner: Connection) -> None:
    create_store(owner, rows=[("a", 1, i, f"copper {i}", [1.0, *[0.0] * 15]) for i in range(6)], type="vector(16)")
    options = {"explain": True, "rerank": {}, "retrieval_options": {"segment_overlap": 1}}
    times = answer(asker, "copper", options)["explain"]["milliseconds"]
    stages = {"discover", "embed", "search", "threshold", "rerank", "expand", "generate"}
    assert set(times) == {*stages, "explain", "total"}
    assert all(time >= 0 for time in times.values())
    assert sum(times[stage] for stage in stages) <= times["total"] + 0.1
    # what did not run has no time
    assert "embed" not in explain(asker, [1.0, *[0.0] * 15])["milliseconds"]


def test_where_nothing_is_near_enough(asker: Connection, docs: None) -> None:
    options = {"query_embedding": [0, 0, 1], "explain": True, "retrieval_options": {"max_distance": 0.5}}
    document = answer(asker, "q", options)
    assert document["citations"] == []
    assert document["explain"]["candidates"] == {"semantic": 6, "within_threshold": 0, "citations": 0}
    assert document["explain"]["thresholds"]["nearest_distance"] == 1
    assert document["explain"]["tokens"] is None


@pytest.mark.parametrize("more", [{"skip_generate": True}, {"abstain": False}], ids=json.dumps)
def test_where_nothing_is_found_it_is_in_the_detail_of_the_error(
    owner: Connection, asker: Connection, docs: None, more: dict[str, Any]
) -> None:
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    limits = {"retrieval_options": {"max_distance": 0}, "keyword_search": True, "explain": True, **more}
    limits["query_embedding"] = [0, 0, 1]
    with error("P0002", "no segment within the distance threshold") as caught:
        answer(asker, "zanzibar seven", {**limits, "query_options": {"history": [], "document_names": True}})
    said, last = caught.detail.split("\n")
    assert said.startswith("The nearest distance is ")
    told = json.loads(last.removeprefix("explain: "))
    assert told["thresholds"]["max_distance"] == 0
    assert told["candidates"]["within_threshold"] == told["candidates"]["citations"] == 0
    assert told["candidates"]["semantic"] > 0
    assert [store["vector_store"] for store in told["stores"] if store["searched"]] == ["public.docs"]
    assert told["milliseconds"]["total"] > 0
    # a detail is written into the log of the server
    assert "zanzibar" not in caught.detail
    with error("P0002") as without:
        answer(asker, "zanzibar seven", {**limits, "explain": False})
    assert "explain" not in without.detail


def test_without_retrieval(asker: Connection, docs: None) -> None:
    explained = answer(asker, "q", {"n_citations": 0, "explain": True})["explain"]
    assert explained["stores"] == []
    assert explained["candidates"] == {"citations": 0}
    assert set(explained["milliseconds"]) == {"generate", "total"}


def test_rows_have_no_place_for_it_so_it_comes_as_a_notice(asker: Connection, docs: None) -> None:
    told = notices(asker)
    assert len(search(asker, "q", {"query_embedding": E1, "explain": True})) == 3
    ((severity, message, detail),) = told
    assert (severity, message) == ("NOTICE", "explain")
    assert json.loads(detail)["candidates"]["citations"] == 3


def test_each_answer_of_a_batch_has_its_own(owner: Connection, docs: None) -> None:
    owner.execute("CREATE TABLE q (id integer PRIMARY KEY, q text); INSERT INTO q VALUES (1, 'x'), (2, 'y')")
    options = json.dumps({"query_embedding": E1, "explain": True})
    owner.execute("CALL ml_rag_table('public.q.q', 'public.a.a', %s)", (options,))
    rows = owner.execute("SELECT a -> 'explain' -> 'candidates' ->> 'citations' FROM a").fetchall()
    assert rows == [("3",), ("3",)]


# -- stores that were not searched ------------------------------------------------------------------------------------


def test_stores_that_nobody_named_and_why_they_were_left_out(
    db: Database, owner: Connection, asker: Connection, docs: None
) -> None:
    rows = [("a", 1, 1, "s", (1, 0, 0))]
    create_store(owner, "excluded", rows)
    create_store(owner, "other_model", rows, model="another")
    owner.execute("CREATE MATERIALIZED VIEW empty AS SELECT * FROM docs WITH NO DATA; GRANT SELECT ON empty TO PUBLIC")
    mark(owner, "empty")
    owner.execute(
        "CREATE TABLE textless (segment_embedding vector(3)); GRANT SELECT ON textless TO PUBLIC;"
        "CREATE TABLE hidden_text (segment text, segment_embedding vector(3));"
        "GRANT SELECT (segment_embedding) ON hidden_text TO PUBLIC;"
    )
    owner.execute(f"CREATE VIEW risky AS TABLE docs; ALTER VIEW risky OWNER TO {db.role('tenant')}")
    owner.execute("GRANT SELECT ON risky TO PUBLIC")
    for name in ("textless", "hidden_text", "risky"):
        mark(owner, name)
    found = stores(explain(asker, embed_model_id="fake-embed", exclude_vector_store=["excluded"]))
    assert {name: store["reason"] for name, store in found.items() if not store["searched"]} == {
        "public.empty": "It is a materialized view without data.",
        "public.excluded": 'It is listed in "exclude_vector_store".',
        "public.hidden_text": "The caller may not SELECT segment.",
        "public.other_model": "It holds vectors of model another, and the call is for fake-embed.",
        "public.risky": f"It belongs to role {db.role('tenant')}, which you do not trust.",
        "public.textless": "It has no column segment.",
    }
    assert [name for name, store in found.items() if store["searched"]] == ["public.docs"]


@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "failing"])
def test_a_store_that_nobody_named_and_that_cannot_be_read_fails_and_holds_up_no_call(
    db: Database, owner: Connection, asker: Connection, docs: None, is_locked: bool
) -> None:
    """Rows without an embedding are counted in what was found, though it was left out of the search."""
    create_store(owner, "more", [("a", 1, 1, "s", (1, 0, 0)), ("a", 1, 2, "s", None)])
    asker.execute("SET statement_timeout = '20s'")
    if not is_locked:
        owner.execute(
            "CREATE FUNCTION fails() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;"
            "ALTER TABLE more ENABLE ROW LEVEL SECURITY; CREATE POLICY fails ON more USING (fails())"
        )
    other = db.connect()
    with other.transaction():
        if is_locked:
            other.execute("LOCK TABLE more")
        found = stores(explain(asker))
    why = "55P03: canceling statement due to lock timeout." if is_locked else "P0001: no."
    assert found["public.more"]["semantic"] == {"skipped": why}
    assert found["public.docs"]["semantic"]["candidates"] > 0
    assert asker.execute("SELECT current_setting('lock_timeout')").fetchone() == ("0",)
    if not is_locked:
        with error("P0001", "no", ours=False):
            explain(asker, vector_store=["public.more"])


def test_the_model_that_counts_without_one_being_named(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "s", [1.0, *[0.0] * 15])], type="vector(16)")
    create_store(owner, "other", model="another")
    explained = answer(asker, "q", {"skip_generate": True, "explain": True})["explain"]
    assert stores(explained)["public.other"] == {
        "searched": False,
        "reason": "It holds vectors of model another, and the call is for fake-embed.",
    }


def test_stores_of_other_schemas(owner: Connection, asker: Connection, docs: None) -> None:
    owner.execute("CREATE SCHEMA more; GRANT USAGE ON SCHEMA more TO PUBLIC")
    create_store(owner, "more.docs")
    found = stores(explain(asker, schema=["public"]))
    assert found["more.docs"]["reason"] == 'It is in schema more, which is not listed in "schema".'


def test_names_that_led_nowhere(owner: Connection, asker: Connection, docs: None) -> None:
    create_store(owner, "unmarked", model=None)
    create_store(owner, "unnamed")
    told = notices(asker)
    found = stores(explain(asker, vector_store=["docs", "nowhere", "unmarked"]))
    assert set(found) == {"public.docs", "nowhere", "unmarked"}
    assert found["nowhere"]["reason"].startswith("No table or view of that name exists")
    assert [found[n]["reason"] for n in ("nowhere", "unmarked")] == [detail for _, _, detail in told]


def test_a_store_of_other_dimensions_is_skipped_by_the_search(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "s", [1.0, *[0.0] * 15])], type="vector(16)")
    create_store(owner, "small", rows=[("a", 1, 1, "s", (1, 0, 0))])
    found = answer(asker, "q", {"skip_generate": True, "explain": True})
    assert stores(found["explain"])["public.small"]["semantic"] == {
        "skipped": "It has 3 dimensions, the query embedding 16."
    }
    assert found["vector_store"] == ["public.docs"]


def test_a_store_without_a_keyword_index_is_skipped_by_that_arm(
    owner: Connection, asker: Connection, docs: None
) -> None:
    create_store(owner, "indexed", rows=[("a", 1, 1, "copper", (1, 0, 0))])
    owner.execute("SELECT ml_rag.enable_keyword_search('indexed')")
    found = stores(explain(asker, keyword_search=True))
    assert found["public.docs"]["keyword"] == {"skipped": "It has no keyword index."}
    assert found["public.indexed"]["keyword"]["candidates"] == 1


# -- what it must not say ---------------------------------------------------------------------------------------------


def test_stores_that_the_caller_may_not_read_are_not_told_of(owner: Connection, asker: Connection, docs: None) -> None:
    owner.execute("CREATE SCHEMA closed")
    for name in ("private_table", "closed.granted_table"):
        create_store(owner, name, [("a", 1, 1, "s", (1, 0, 0))])
    owner.execute("REVOKE ALL ON private_table FROM ml_rag_user")
    owner.execute("CREATE VIEW private_view AS TABLE docs")
    mark(owner, "private_view")
    for options in ({}, {"exclude_vector_store": ["private_table"]}, {"schema": ["public", "closed"]}):
        explained = explain(asker, **options)
        del explained["options"]  # what the call itself says
        text = json.dumps(explained)
        assert "docs" in text
        assert "private" not in text
        assert "granted_table" not in text


def test_of_a_schema_that_the_caller_may_not_use_a_name_finds_nothing(
    owner: Connection, asker: Connection, docs: None
) -> None:
    owner.execute("CREATE SCHEMA closed")
    create_store(owner, "closed.there")
    found = stores(explain(asker, vector_store=["docs", "closed.there", "closed.missing"]))
    assert found["closed.there"] == found["closed.missing"]


def test_nothing_of_rows_that_row_level_security_hides(db: Database, owner: Connection) -> None:
    rows = [("asker.txt", 1, i, f"copper {i}", (1, 1, i)) for i in range(3)]
    rows += [("tenant.txt", 2, i, f"copper secret {i}", (1, 0.001 * i, 0)) for i in range(50)]
    create_store(owner, rows=rows)
    owner.execute("CREATE INDEX ON docs USING hnsw (segment_embedding vector_cosine_ops)")
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    for who in ("asker", "tenant"):
        owner.execute(f"CREATE POLICY {who} ON docs TO {db.role(who)} USING (document_name = '{who}.txt')")
    owner.execute('SELECT ml_rag.enable_keyword_search(\'docs\', \'{"language": "en", "statistics": "visible"}\')')
    asker = db.connect("asker")
    for options in (
        {"n_citations": 100},
        {"n_citations": 100, "keyword_search": True},
        {"n_citations": 5, "keyword_search": True, "semantic_search": False},
        {"retrieval_options": {"percentage_distance": 1000, "segment_overlap": 2}},
    ):
        for plan in ("on", "off"):
            asker.execute(f"SET enable_seqscan = {plan}")
            explained = explain(asker, **options)  # type: ignore[arg-type]
            text = json.dumps(explained)
            assert "tenant" not in text
            assert "secret" not in text
            counts = explained["candidates"]
            assert all(n <= 3 for n in counts.values()), counts
            store = stores(explained)["public.docs"]
            assert all(arm["candidates"] <= 3 for name, arm in store.items() if name in ("semantic", "keyword"))
            nearest = explained["thresholds"].get("nearest_distance")
            # 1 - 1/sqrt(2): of the nearest of its own rows; the others are at 0.0000
            assert nearest is None or nearest == pytest.approx(0.2929, abs=1e-4)


def test_what_lies_behind_a_view_is_not_told(db: Database, owner: Connection, asker: Connection) -> None:
    create_large_store(owner, INDEXES[0])
    owner.execute("ALTER TABLE docs RENAME TO behind; ALTER INDEX docs_embedding RENAME TO behind_embedding")
    owner.execute("REVOKE ALL ON behind FROM ml_rag_user")
    owner.execute("CREATE VIEW docs AS SELECT * FROM behind WHERE document_name <> 'a secret condition'")
    owner.execute("GRANT SELECT ON docs TO ml_rag_user")
    mark(owner, "docs")
    for named in ({}, {"vector_store": ["docs"]}):
        explained = explain(asker, **named)
        text = json.dumps(explained)
        assert "behind" not in text
        assert "secret" not in text
        semantic = stores(explained)["public.docs"]["semantic"]
        assert semantic["plan"] == "view"
        assert "indexes" not in semantic


def test_indexes_that_a_policy_uses_are_not_told(db: Database, owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, i, f"s{i}", (1, i, 0)) for i in range(6)])
    owner.execute(
        "CREATE TABLE members (name text PRIMARY KEY, document text); GRANT SELECT ON members TO PUBLIC;"
        "INSERT INTO members SELECT 'm' || i, 'a' FROM generate_series(1, 5000) AS i;"
        "INSERT INTO members VALUES (current_user, 'a'); ANALYZE members;"
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY own ON docs USING (EXISTS (SELECT FROM members AS m"
        " WHERE m.name = 'm7' AND m.document = docs.document_name))"
    )
    semantic = stores(explain(asker, vector_store=["docs"]))["public.docs"]["semantic"]
    assert semantic["indexes"] == []
    assert semantic["candidates"] == 4


def test_a_plan_runs_nobodys_code_with_the_rights_of_another(
    db: Database, owner: Connection, asker: Connection, docs: None
) -> None:
    """Of a table that another role has prepared nothing is planned, unless it was named."""
    tenant = db.role("tenant")
    owner.execute(f"CREATE SCHEMA trap AUTHORIZATION {tenant}; GRANT USAGE ON SCHEMA trap TO PUBLIC")
    setter = db.connect("tenant")
    setter.execute(
        "CREATE FUNCTION trap.spy(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
        f" $$ BEGIN IF current_user <> '{tenant}' THEN RAISE 'sprung by %', current_user; END IF; RETURN true; END $$;"
        "CREATE TABLE trap.docs AS SELECT 'a'::text AS segment, '[1,0,0]'::public.vector(3) AS segment_embedding;"
        "CREATE INDEX ON trap.docs (segment) WHERE trap.spy('x'); GRANT SELECT ON trap.docs TO PUBLIC;"
        f"COMMENT ON COLUMN trap.docs.segment_embedding IS '{marker()}'"
    )
    with error("P0001", "sprung", ours=False):
        explain(asker, vector_store=["trap.docs"])
    found = stores(explain(asker))
    assert found["trap.docs"]["reason"] == f"It belongs to role {db.role('tenant')}, which you do not trust."
