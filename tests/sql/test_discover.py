"""pipeline/discover: which relations are vector stores; docs/loading.md, sentence by sentence."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from support.citus import without_citus
from support.cluster import Connection, Database
from support.stores import (
    answer,
    create_store,
    error,
    fake_embedding,
    grant,
    ident,
    insert,
    mark,
    names,
    retrieve,
    warnings_of,
)

ROW = [("a", 1, 1, "s", (1, 0, 0))]


@pytest.mark.parametrize(
    ("comment", "model"),
    [
        ("GENAI_OPTIONS=EMBED_MODEL_ID=m", "m"),
        ("GENAI_OPTIONS=EMBED_MODEL_ID=m and more", "m"),
        ("text before GENAI_OPTIONS=EMBED_MODEL_ID=a/b-c.d:1 text after", "a/b-c.d:1"),
        ("GENAI_OPTIONS=OTHER=1,EMBED_MODEL_ID=m,MORE=2", "m"),
        ("GENAI_OPTIONS=EMBED_MODEL_ID=m;X=1", "m"),
        ("line\nGENAI_OPTIONS=EMBED_MODEL_ID=m ", "m"),
        ("GENAI_OPTIONS= EMBED_MODEL_ID=m", None),
        ("GENAI_OPTIONS=OTHER=1 EMBED_MODEL_ID=m", None),
        ("GENAI_OPTIONS=OTHER=1 GENAI_OPTIONS=EMBED_MODEL_ID=m", "m"),
        ("GENAI_OPTIONS=EMBED_MODEL_ID=m,EMBED_MODEL_ID=n", "m"),
        ("made by hand\nGENAI_OPTIONS=EMBED_MODEL_ID=m\nby me", "m"),
        ("EMBED_MODEL_ID=m", None),
        ("GENAI_OPTIONS=EMBED_MODEL_ID=", None),
        ("genai_options=embed_model_id=m", None),
        ("", None),
    ],
    ids=str,
)
def test_the_marker_may_stand_anywhere_in_the_comment(
    owner: Connection, asker: Connection, comment: str, model: str | None
) -> None:
    create_store(owner, model=None)
    mark(owner, "docs", comment)
    found = asker.execute("SELECT vector_store, embed_model_id FROM ml_rag.discover()").fetchall()
    assert found == ([("public.docs", model)] if model else [])


def test_what_discovery_tells_of_a_store(owner: Connection, asker: Connection) -> None:
    create_store(owner, type="halfvec(5)")
    row = asker.execute("SELECT * FROM ml_rag.discover()").fetchone()
    assert row == (
        "public.docs",
        "docs",
        "fake-embed",
        "segment_embedding",
        "segment",
        "document_name",
        "document_id",
        "segment_number",
        "metadata",
        "halfvec",
        5,
        "bigint",
        "integer",
        "trusted",
        True,
        None,
    )


@pytest.mark.parametrize("comment_on", ["TABLE docs", "COLUMN docs.segment"])
def test_a_marker_elsewhere_does_not_count(owner: Connection, asker: Connection, comment_on: str) -> None:
    create_store(owner, model=None)
    owner.execute(f"COMMENT ON {comment_on} IS 'GENAI_OPTIONS=EMBED_MODEL_ID=m'")
    assert names(asker) == []


def test_the_column_must_be_a_vector(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE a (segment text, segment_embedding float8[])")
    owner.execute("CREATE TABLE b (segment text, segment_embedding sparsevec(3))")
    owner.execute("CREATE TABLE c (segment text, segment_embedding vector(3)[])")
    owner.execute("CREATE TABLE d (segment text, segment_embedding vector(3))")
    for name in "abcd":
        mark(owner, name)
        grant(owner, name)
    assert names(asker) == ["public.d"]


def test_a_dropped_column_is_gone(owner: Connection, asker: Connection) -> None:
    create_store(owner)
    owner.execute("ALTER TABLE docs DROP COLUMN segment_embedding")
    assert names(asker) == []
    owner.execute("ALTER TABLE docs ADD COLUMN segment_embedding vector(4)")
    assert names(asker) == []
    mark(owner, "docs")
    assert names(asker) == ["public.docs"]
    owner.execute("ALTER TABLE docs DROP COLUMN segment")
    assert names(asker) == []


def test_renaming_and_moving_a_store_keeps_it_one(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROW)
    owner.execute("CREATE SCHEMA other; GRANT USAGE ON SCHEMA other TO ml_rag_user")
    owner.execute("ALTER TABLE docs RENAME TO papers; ALTER TABLE papers SET SCHEMA other")
    assert names(asker) == ["other.papers"]
    assert retrieve(asker, (1, 0, 0))["vector_store"] == ["other.papers"]


# -- privileges -------------------------------------------------------------------------------------------------------


def test_a_table_without_select_is_not_seen(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROW)
    owner.execute("REVOKE SELECT ON docs FROM ml_rag_user")
    assert names(asker) == []
    with error("P0002"):
        retrieve(asker, (1, 0, 0))
    with warnings_of(asker) as caught, error("P0002"):
        retrieve(asker, (1, 0, 0), vector_store=["docs"])
    assert len(caught) == 1
    owner.execute("GRANT INSERT, UPDATE ON docs TO ml_rag_user")
    assert names(asker) == []


def test_column_privileges_decide_column_by_column(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROW)
    owner.execute("REVOKE SELECT ON docs FROM ml_rag_user; GRANT SELECT (segment) ON docs TO ml_rag_user")
    assert names(asker) == []
    owner.execute("GRANT SELECT (segment_embedding) ON docs TO ml_rag_user")
    document = retrieve(asker, (1, 0, 0), retrieval_options={})
    # the name may not be read: the relation's own takes its place
    assert document["citations"] == [{"segment": "s", "distance": 0, "document_name": "public.docs"}]
    owner.execute("REVOKE SELECT (segment) ON docs FROM ml_rag_user")
    assert names(asker) == []


def test_what_a_session_found_is_of_its_role(db: Database, owner: Connection) -> None:
    create_store(owner)
    asker = sql.Identifier(db.role("asker"))
    owner.execute(sql.SQL("REVOKE SELECT ON docs FROM ml_rag_user; GRANT SELECT ON docs TO {}").format(asker))
    session = db.connect()
    found = []
    for role in ("asker", "tenant", "asker"):  # nothing is committed in between
        session.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(db.role(role))))
        found.append(names(session))
    assert found == [["public.docs"], [], ["public.docs"]]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_what_a_session_found_ends_with_what_is_done_meanwhile(
    db: Database, owner: Connection, asker: Connection, level: str
) -> None:
    create_store(owner)
    assert names(owner) == names(asker) == ["public.docs"]
    with owner.transaction():
        owner.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert names(owner) == ["public.docs"]
        mark(owner, "docs", "")
        assert names(owner) == []
        assert names(asker) == ["public.docs"]
        raise psycopg.Rollback
    assert names(owner) == names(asker) == ["public.docs"]
    owner.execute("REVOKE SELECT ON docs FROM ml_rag_user")
    assert names(asker) == []


def test_a_schema_without_usage_is_not_seen(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE SCHEMA hidden")
    create_store(owner, "hidden.docs", ROW)
    assert names(asker) == []
    owner.execute("GRANT USAGE ON SCHEMA hidden TO ml_rag_user")
    assert names(asker) == ["hidden.docs"]


def test_a_view_shows_what_its_owner_may_read(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROW)
    owner.execute("REVOKE SELECT ON docs FROM ml_rag_user; CREATE VIEW seen AS SELECT * FROM docs")
    mark(owner, "seen")
    grant(owner, "seen")
    assert retrieve(asker, (1, 0, 0))["vector_store"] == ["public.seen"]


def test_temporary_stores_are_for_their_own_session(db: Database, owner: Connection) -> None:
    mine, other = db.connect(), db.connect()
    create_store(mine, "pg_temp.docs", ROW)
    (name,) = names(mine)
    assert name.startswith("pg_temp")
    assert retrieve(mine, (1, 0, 0))["citations"][0]["segment"] == "s"
    assert retrieve(mine, (1, 0, 0), retrieval_options={})["citations"][0]["segment"] == "s"
    assert names(other) == []
    with error("P0002"):
        retrieve(other, (1, 0, 0))


# -- what the caller names --------------------------------------------------------------------------------------------


def test_named_stores(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE SCHEMA other; GRANT USAGE ON SCHEMA other TO ml_rag_user")
    for name in ("one", "two", "other.one"):
        create_store(owner, name, ROW)
    assert names(asker) == ["other.one", "public.one", "public.two"]
    assert names(asker, vector_store=["one"]) == ["other.one", "public.one"]
    assert names(asker, vector_store=["public.one", "two"]) == ["public.one", "public.two"]
    assert names(asker, vector_store=[]) == []
    assert names(asker, exclude_vector_store=["one", "nonsense"]) == ["public.two"]
    assert names(asker, exclude_vector_store=["public.one"]) == ["other.one", "public.two"]
    assert names(asker, schema=["other", "nonsense"]) == ["other.one"]
    assert names(asker, vector_store=["one"], exclude_vector_store=["other.one"]) == ["public.one"]
    assert names(asker, vector_store=["two"], schema=["other"]) == []
    for option in ("vector_store", "exclude_vector_store", "schema"):
        given = {"vector_store": ["other.one"], "exclude_vector_store": ["public.one", "two"], "schema": ["other"]}
        assert retrieve(asker, (1, 0, 0), **{option: given[option]})["vector_store"] == ["other.one"]


@pytest.mark.parametrize("schema", ["public", "a.b", '"', '"' * 63])
def test_a_store_is_found_by_every_form_of_its_name(owner: Connection, asker: Connection, schema: str) -> None:
    """Whatever dots and quotes are in it; names of 63 quotes are the longest there are."""
    grants = "CREATE SCHEMA IF NOT EXISTS {0}; GRANT USAGE ON SCHEMA {0} TO ml_rag_user"
    owner.execute(sql.SQL(grants).format(sql.Identifier(schema)))
    create_store(owner, "other")
    for table in ("x", "a.b", ".", "x.", '"', '""', '"a"', 'a"."b', "Ä b", '"' * 63):
        name = sql.Identifier(schema, table)
        create_store(owner, name)
        grant(owner, name)
        relation = owner.execute("SELECT %s::regclass::oid", (name.as_string(owner),)).fetchone()
        quoted = owner.execute("SELECT format('%%I.%%I', %s::text, %s::text), quote_ident(%s)", (schema, table, table))
        for form in (f"{schema}.{table}", table, *(quoted.fetchone() or ())):
            found = asker.execute("SELECT relation::oid FROM ml_rag.discover(ARRAY[%s])", (form,)).fetchall()
            assert found == [relation], form
        assert names(asker, vector_store=[f"{table}y", f"y{table}"]) == []
        owner.execute(sql.SQL("DROP TABLE {}").format(name))


def test_names_that_lead_nowhere_are_ignored_with_a_warning(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROW)
    owner.execute("CREATE TABLE plain (x integer); GRANT SELECT ON plain TO ml_rag_user")
    nowhere = ["plain", "public.missing", "missing.docs", "other_db.public.docs", "", " docs", "DOCS", "a'b\"c%s"]
    with warnings_of(asker) as caught:
        document = retrieve(asker, (1, 0, 0), vector_store=["docs", *nowhere])
    assert document["vector_store"] == ["public.docs"]
    assert [w[:2] for w in caught] == [("WARNING", "01000")] * len(nowhere)
    for name, warning in zip(nowhere, caught, strict=True):
        assert f'"{name}"' in warning[2]
    with warnings_of(asker) as caught:
        retrieve(asker, (1, 0, 0), vector_store=["docs"], exclude_vector_store=["missing"])
    assert caught == []


def test_stores_named_that_disagree_on_the_model(owner: Connection, asker: Connection) -> None:
    create_store(owner, "one", ROW, model="m1")
    create_store(owner, "two", ROW, model="m2")
    with error("22023", "m1", "m2"):
        retrieve(asker, (1, 0, 0), vector_store=["one", "two"])
    assert retrieve(asker, (1, 0, 0), vector_store=["one"])["vector_store"] == ["public.one"]
    with warnings_of(asker) as caught:
        document = retrieve(asker, (1, 0, 0), vector_store=["one", "two"], embed_model_id="m2")
    assert document["vector_store"] == ["public.two"]
    assert len(caught) == 1
    # nothing is of the default model
    with error("P0002", "fake-embed"):
        retrieve(asker, (1, 0, 0))


def test_dimension_mismatch_names_store_and_both_dimensions(owner: Connection, asker: Connection) -> None:
    create_store(owner, "fits", ROW)
    create_store(owner, "wide", type="vector(7)")
    with error("22000", "public.wide", "7", "3"):
        retrieve(asker, (1, 0, 0))
    assert retrieve(asker, (1, 0, 0), exclude_vector_store=["wide"])["citations"]


# -- other columns ----------------------------------------------------------------------------------------------------

MAPPING = {"segment": "body", "segment_embedding": "v", "document_name": "title"}


def create_mapped(owner: Connection, name: str = "articles", comment: str | None = None) -> None:
    owner.execute(f"CREATE TABLE {name} (title text, body text, v vector(3), page integer)")
    owner.execute(f"INSERT INTO {name} VALUES ('t', 'one', '[1,0,0]', 1), ('t', 'two', '[1,1,0]', 2)")
    if comment is not None:
        mark(owner, name, comment, column="v")
    grant(owner, name)


def test_mapped_columns_select_the_relations_that_have_them(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROW)
    create_mapped(owner, comment="GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed")
    document = retrieve(asker, (1, 0, 0), vector_store_columns={**MAPPING, "segment_number": "page"})
    assert document["vector_store"] == ["public.articles"]
    assert document["citations"][0] == {"segment": "one", "distance": 0, "document_name": "t"}
    assert names(asker) == ["public.docs"]
    assert names(asker, vector_store_columns=MAPPING) == ["public.articles"]
    assert names(asker, vector_store_columns={**MAPPING, "document_id": "missing"}) == []
    assert names(asker, vector_store_columns={**MAPPING, "metadata": "missing"}) == []
    # an order needs whole numbers
    assert names(asker, vector_store_columns={**MAPPING, "segment_number": "title"}) == []
    assert names(asker, vector_store_columns={"document_name": "document_name"}) == ["public.docs"]


def test_overlap_by_mapped_columns(owner: Connection, asker: Connection) -> None:
    create_mapped(owner, comment="GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed")
    document = retrieve(
        asker,
        (1, 0, 0),
        n_citations=1,
        vector_store_columns={**MAPPING, "segment_number": "page"},
        retrieval_options={},
    )
    assert document["citations"][0]["segment"] == "one\ntwo"


def test_an_unmarked_relation_must_be_named_with_columns_and_embedding_or_model(
    owner: Connection, asker: Connection
) -> None:
    create_mapped(owner)
    columns = {"vector_store_columns": MAPPING}
    named = {"vector_store": ["public.articles"]}
    query = {"query_embedding": [1, 0, 0], "skip_generate": True}
    assert answer(asker, "q", {**query, **columns, **named})["vector_store"] == ["public.articles"]
    for incomplete in ({**query, **columns}, {**columns, **named, "skip_generate": True}):
        with error("P0002"):
            answer(asker, "q", incomplete)
    create_mapped(owner, "sixteen")
    owner.execute("ALTER TABLE sixteen ALTER v TYPE vector(16) USING array_fill(1, ARRAY[16])::vector")
    by_model = {**columns, "vector_store": ["sixteen"], "embed_model_id": "fake-embed", "skip_generate": True}
    assert answer(asker, "q", by_model)["vector_store"] == ["public.sixteen"]
    # without a mapping the default names would do, but the contract asks for one
    create_store(owner, "unmarked", ROW, model=None)
    with error("P0002"):
        answer(asker, "q", {**query, "vector_store": ["unmarked"]})


def test_a_marked_store_of_another_model_is_not_searched_as_if_unmarked(owner: Connection, asker: Connection) -> None:
    create_mapped(owner, comment="GENAI_OPTIONS=EMBED_MODEL_ID=another")
    with error("P0002"):
        answer(
            asker,
            "q",
            {
                "vector_store": ["articles"],
                "vector_store_columns": MAPPING,
                "embed_model_id": "fake-embed",
                "query_embedding": [1, 0, 0],
            },
        )


def test_a_thousand_tables_of_which_a_hundred_are_stores(owner: Connection, asker: Connection) -> None:
    owner.execute("""
        DO $$
        BEGIN
          FOR i IN 1..1000 LOOP
            IF i % 10 = 0 THEN
              EXECUTE format('CREATE TABLE t%s (segment text, segment_embedding vector(3))', i);
              EXECUTE format('COMMENT ON COLUMN t%s.segment_embedding IS %L', i,
                'GENAI_OPTIONS=EMBED_MODEL_ID=' || CASE i % 20 WHEN 0 THEN 'fake-embed' ELSE 'other' END);
            ELSE
              EXECUTE format('CREATE TABLE t%s (a integer, b text)', i);
            END IF;
          END LOOP;
          GRANT SELECT ON ALL TABLES IN SCHEMA public TO ml_rag_user;
        END
        $$""")
    assert len(names(asker)) == 100
    assert names(asker, embed_model_id="fake-embed") == sorted(f"public.t{i}" for i in range(20, 1001, 20))
    owner.execute("INSERT INTO t20 VALUES ('here', '[1,0,0]'), ('there', '[0,1,0]')")
    document = retrieve(asker, (1, 0, 0))
    assert [c["segment"] for c in document["citations"]] == ["here", "there"]
    assert len(document["vector_store"]) == 50


def test_a_partition_with_a_comment_of_its_own_is_a_store_of_its_own(owner: Connection, asker: Connection) -> None:
    create_store(owner, suffix=" PARTITION BY RANGE (document_id)")
    owner.execute("CREATE TABLE part PARTITION OF docs DEFAULT")
    insert(owner, ident("docs"), ROW)
    assert names(asker) == ["public.docs"]
    mark(owner, "part")
    grant(owner, "part")
    assert names(asker) == ["public.docs", "public.part"]


def test_a_planted_view_is_searched_only_where_it_is_named(owner: Connection, db: Database) -> None:
    create_store(owner, "good", [("g", 1, 1, "good", (1, 0, 0))])
    mallory = db.role("stranger")
    owner.execute(f"CREATE SCHEMA mallory; GRANT ALL ON SCHEMA mallory TO {mallory}; GRANT SELECT ON good TO PUBLIC")
    planter = db.connect("stranger")
    planter.execute("CREATE TABLE mallory.ran (who text)")
    planter.execute(
        "CREATE FUNCTION mallory.run() RETURNS text LANGUAGE plpgsql AS "
        "$$BEGIN INSERT INTO mallory.ran VALUES (current_user); RETURN 'planted'; END$$"
    )
    planter.execute(
        "CREATE VIEW mallory.store AS SELECT mallory.run() AS segment, '[1,0,0]'::vector(3) AS segment_embedding"
    )
    planter.execute("COMMENT ON COLUMN mallory.store.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    planter.execute("GRANT USAGE ON SCHEMA mallory TO PUBLIC; GRANT SELECT ON mallory.store TO PUBLIC")
    assert names(owner) == ["public.good"]
    assert [c["segment"] for c in retrieve(owner, (1, 0, 0))["citations"]] == ["good"]
    assert owner.execute("SELECT count(*) FROM mallory.ran").fetchone() == (0,)
    assert names(owner, ["mallory.store"]) == ["mallory.store"]


def test_a_table_of_another_role_is_found_by_its_name_and_its_owner(owner: Connection, db: Database) -> None:
    app = db.role("tenant")
    owner.execute(f"CREATE SCHEMA app; GRANT ALL ON SCHEMA app TO {app}; GRANT USAGE ON SCHEMA app TO PUBLIC")
    creator = db.connect("tenant")
    create_store(creator, "app.plain", [("p", 1, 1, "plain", (1, 0, 0))])
    asker = db.connect("asker")
    assert names(asker) == []
    assert names(asker, ["app.plain"]) == ["app.plain"]
    assert names(asker, ["plain"]) == []
    assert names(creator) == ["app.plain"]


def test_a_store_with_a_wrong_marker_does_not_break_calls_that_never_named_it(
    owner: Connection, asker: Connection
) -> None:
    create_store(owner, "good", [("g", 1, 1, "good", fake_embedding("good"))], type="vector(16)")
    create_store(owner, "odd", [("o", 1, 1, "odd", (1, 0))], type="vector(2)")
    with warnings_of(asker) as seen:
        document = answer(asker, "good", {"skip_generate": True})
    assert [c["segment"] for c in document["citations"]] == ["good"]
    assert ["public.odd" in message for _, _, message in seen] == [True]
    with error("22000", "public.odd"):
        answer(asker, "good", {"vector_store": ["odd", "good"]})
    owner.execute("DROP TABLE good")
    with error("22000", "public.odd"):
        answer(asker, "good")


def test_a_model_of_the_wrong_task_is_said_where_no_store_is_found(asker: Connection) -> None:
    with error("22023", "fake-generate"):
        asker.execute("""SELECT ml_rag_answer('q', '{"embed_model_id": "fake-generate"}')""")
    with error("22023", "no-such"):
        asker.execute("""SELECT ml_rag_answer('q', '{"embed_model_id": "no-such"}')""")


@without_citus
def test_a_table_of_citus_is_not_read_by_ctid(loader: Connection, owner: Connection, asker: Connection) -> None:
    """Rows of several of its shards have the same one; here Citus has no more than its list of tables."""
    for name in ("mine", "docs"):
        loader.execute("SELECT ml_rag.create_store(%s)", (f"public.{name}",))
        loader.execute(f"GRANT SELECT ON {name} TO ml_rag_user")
    insert(loader, "docs", [("a", 1, i, f"one {i}", fake_embedding(f"one {i}")) for i in range(3)])
    loader.execute("SELECT ml_rag.disable_keyword_search('docs')")
    is_table = "SELECT is_table FROM ml_rag.discover('{public.docs}')"
    options = {
        "query_embedding": fake_embedding("one 1"),
        "filters": {"segment_number": {"gt": 0}},
        "skip_generate": True,
    }
    assert asker.execute(is_table).fetchone() == (True,)
    before = answer(asker, "q", {"vector_store": ["public.docs"], **options})
    owner.execute(
        "SET allow_system_table_mods = on;"
        'CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass, partmethod "char", partkey text,'
        " colocationid integer);"
        "CREATE FUNCTION pg_catalog.column_to_column_name(regclass, text) RETURNS text LANGUAGE sql RETURN NULL;"
    )
    owner.execute("INSERT INTO pg_dist_partition VALUES ('docs', 'n'); GRANT SELECT ON pg_dist_partition TO public")

    assert asker.execute(is_table).fetchone() == (False,)
    assert asker.execute("SELECT is_table FROM ml_rag.discover('{public.mine}')").fetchone() == (True,)
    assert answer(asker, "q", {"vector_store": ["public.docs"], **options}) == before
    explained = answer(asker, "q", {"vector_store": ["public.docs"], "explain": True, **options})
    assert explained["explain"]["stores"][0]["semantic"]["plan"] == "distributed"
    with error("55000", "cannot have a keyword index", "does not distribute its rows by a column"):
        loader.execute("SELECT ml_rag.enable_keyword_search('docs')")
    for call, message in {
        "CALL ml_rag.add_embedding('docs', 'second')": ("embeddings of", "no table of calls"),
        "SELECT ml_rag.create_vectorizer('docs', '{\"columns\": \"{segment}\"}')": (
            "embeddings of",
            "no table of calls",
        ),
        "SELECT ml_rag.load_documents('docs', '{a}', '{x}')": ("cannot be loaded", "distributed by Citus"),
    }.items():
        with error("55000", *message):
            loader.execute(call)
