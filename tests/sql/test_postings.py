"""keyword/tables: nobody learns from a keyword index what the table itself would not show; dumps carry the indexes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from support.cluster import Cluster, Connection, Database, noticed
from support.keywords import (
    SCORES,
    add,
    assert_exact,
    by_hand,
    documents,
    enable,
    keyword_store,
    runs,
    search,
    tokens,
)
from support.programs import dump, restore
from support.stores import create_store, error, insert

PUBLIC = "common words of both tenants"
SECRET = "zanzibar quicksilver"


def tenants(db: Database, owner: Connection, statistics: str = "all", merged: bool = True, n: int = 6) -> None:
    """A store of which each of two roles sees its own rows; those of tenant hold the secret words."""
    create_store(owner)
    enable(owner, options=json.dumps({"statistics": statistics, "language": "simple"}))
    for who, number in (("asker", 1), ("tenant", 2)):
        text = PUBLIC if who == "asker" else f"{PUBLIC} {SECRET}"
        insert(owner, "docs", [(f"{who}.txt", number, i, f"{text} {who}{i}", (1, i, 0)) for i in range(n)])
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    for who in ("asker", "tenant"):
        owner.execute(f"CREATE POLICY {who} ON docs TO {db.role(who)} USING (document_name = '{who}.txt')")
    if merged:
        owner.execute("SELECT ml_rag.merge_keyword_index('docs')")


#: what a reader of the rows of tenant alone may know
HIDDEN = ("zanzibar", "quicksilver", "tenant0", "{2,0}", "{2,3}")

RELATIONS = """
    SELECT c.oid::regclass::text, c.relkind FROM pg_class AS c
    WHERE c.relnamespace IN ('ml_rag'::regnamespace, 'ml_rag_internal'::regnamespace) AND c.relkind IN ('r', 'v', 'S')
"""


def relations(owner: Connection) -> list[str]:
    return [row[0] for row in owner.execute(RELATIONS).fetchall() if row[1] != "S"]


def everything(connection: Connection, relation: str) -> str:
    """All a role can read of a relation, as one text; what packed bytes hold too."""
    try:
        found = connection.execute(sql.SQL("SELECT * FROM {}").format(sql.SQL(relation))).fetchall()
    except psycopg.errors.InsufficientPrivilege as e:
        return str(e)
    return " ".join(str(value) for row in found for value in row)


# -- who may read what ------------------------------------------------------------------------------------------------


def test_nobody_reads_the_tables_themselves(owner: Connection, asker: Connection, stranger: Connection) -> None:
    keyword_store(owner, ["fox"])
    tables = [name for name, kind in owner.execute(RELATIONS) if kind == "r" and "keyword_" in name]
    assert len(tables) == 7
    for connection in (asker, stranger):
        for table in tables:
            for statement in ("SELECT * FROM {}", "DELETE FROM {}", "TRUNCATE {}"):
                with error("42501", ours=False):
                    connection.execute(sql.SQL(statement).format(sql.SQL(f"{table}")))


def test_who_may_not_read_the_table_sees_nothing_of_its_index(owner: Connection, asker: Connection) -> None:
    keyword_store(owner, ["zanzibar"])
    add(owner, ["quicksilver"], 2)
    owner.execute("DELETE FROM docs WHERE document_id = 1")
    owner.execute("REVOKE ALL ON docs FROM ml_rag_user")
    index = [relation for relation in relations(owner) if ".keyword_" in relation]
    assert index
    for relation in index:
        found = everything(asker, relation)
        assert found == "" or "permission denied" in found, relation


def test_one_who_may_read_the_text_column_only_may_search(owner: Connection, asker: Connection) -> None:
    keyword_store(owner, ["zanzibar"])
    owner.execute("REVOKE ALL ON docs FROM ml_rag_user; GRANT SELECT (document_id) ON docs TO ml_rag_user")
    assert everything(asker, "ml_rag.keyword_index") == ""
    columns = "document_name, metadata, document_id, segment_number, segment, segment_embedding"
    owner.execute(f"GRANT SELECT ({columns}) ON docs TO ml_rag_user; ALTER TABLE docs ADD more text")
    assert [row[0] for row in search(asker, "zanzibar")] == [1]


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("statistics", ["all", "visible"])
def test_two_tenants_find_their_own_rows_only(db: Database, owner: Connection, statistics: str, merged: bool) -> None:
    tenants(db, owner, statistics, merged)
    for who, number in (("asker", 1), ("tenant", 2)):
        connection = db.connect(who)
        assert {row[0] for row in search(connection, "common words")} == {number}
        assert len(search(connection, "common words", 100)) == 6
        assert len(search(connection, "zanzibar", 100)) == (6 if who == "tenant" else 0)
        assert search(connection, "asker1" if who == "tenant" else "tenant1") == []


@pytest.mark.parametrize("merged", [True, False])
def test_scores_under_row_level_security(db: Database, owner: Connection, merged: bool) -> None:
    """Statistics over all rows by default, over the visible ones where the store says so; a filter changes no score."""
    queries = ["common asker1", "words asker2 asker3 asker3", "zanzibar common"]
    for statistics in ("all", "visible"):
        tenants(db, owner, statistics, merged)
        owner.execute("DELETE FROM docs WHERE segment_number = 5")
        owner.execute("UPDATE docs SET segment = 'common' WHERE segment_number = 4")
        asker = db.connect("asker")
        known = documents(owner if statistics == "all" else asker, configuration="simple")
        for query in queries:
            expected = by_hand(known, tokens(owner, query, "simple"))
            for least in (0, 2):
                options = {"filters": {"segment_number": {"gte": least}}} if least else {}
                found = {(d, s): score for d, s, score in search(asker, query, 100, **options)}
                scores = {(d, s): score for (d, s), score in expected.items() if d == 1 and s >= least}
                assert found == pytest.approx(scores)
        asker.close()
        owner.execute("DROP TABLE docs")


def test_keys_of_visible_rows_come_in_portions(owner: Connection) -> None:
    """Of few rows, such as those that pass a filter, in one."""
    create_store(owner)
    owner.execute("INSERT INTO docs SELECT 'd', '{}', i, 1 FROM generate_series(1, 50001) AS i")
    call = "SELECT k.n FROM ml_rag._visible_keys('docs', '{document_id,segment_number}', %s, %s, %s, %s) AS k"
    for of_few, portions in (
        ((None, None, None, None), [1, 50000]),
        (("{}", None, None, None), []),
        ((None, " AND t.document_id > $3[1]::bigint", ["0"], 10_001), [10_001]),
        ((None, " AND t.document_id > $3[1]::bigint", ["50000"], 10_001), [1]),
    ):
        assert sorted(row[0] for row in owner.execute(call, of_few)) == portions


def test_words_of_long_texts_under_row_level_security(db: Database, owner: Connection) -> None:
    """Of which those that are asked for come out of the database alone."""
    tenants(db, owner, "visible")
    asker = db.connect("asker")
    long = " ".join(f"word{i} common" for i in range(12_000))
    insert(owner, "docs", [("asker.txt", 1, 20, long, (1, 0, 0)), ("asker.txt", 1, 21, "word1", (1, 0, 0))])
    known = documents(asker, configuration="simple")
    for query in ("common word1", "word11999", "none", " ".join(f"word{i * i}" for i in range(100))):
        found = {(d, s): score for d, s, score in search(asker, query, 100)}
        assert found == pytest.approx(by_hand(known, tokens(owner, query, "simple")))


def test_a_session_follows_other_statistics_of_an_index(db: Database, owner: Connection) -> None:
    """It keeps what it knows of an index; under a filter scores are by all rows that are visible, not by those that
    pass."""
    tenants(db, owner, "all")
    asker = db.connect("asker")
    options = {"filters": {"segment_number": {"lt": 3}}}
    search(asker, "common words", 100, **options)
    enable(owner, options=json.dumps({"statistics": "visible", "language": "simple"}))
    found = search(asker, "common words", 100, **options)
    assert found == search(db.connect("asker"), "common words", 100, **options)
    assert len(found) == 3


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("statistics", ["all", "visible"])
@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE docs DROP CONSTRAINT docs_pkey",
        "ALTER TABLE docs DROP CONSTRAINT docs_pkey, ADD PRIMARY KEY (document_name, document_id, segment_number)",
        "ALTER TABLE docs DROP CONSTRAINT docs_pkey, ADD PRIMARY KEY (document_id, segment_number)"
        " DEFERRABLE INITIALLY DEFERRED",
        "ALTER TABLE docs DROP CONSTRAINT docs_pkey;"
        " CREATE UNIQUE INDEX ON docs (document_id, segment_number) WHERE document_name <> 'asker.txt'",
    ],
)
def test_a_key_that_is_none_any_more_shows_no_words_of_others(
    db: Database, owner: Connection, statistics: str, merged: bool, change: str
) -> None:
    """A role could write a row of the key of a hidden one, and see which words that one has."""
    tenants(db, owner, statistics, merged)
    asker = db.connect("asker")
    assert len(search(asker, "common", 100)) == 6
    owner.execute(f"{change}; GRANT INSERT ON docs TO ml_rag_user")
    asker.execute("BEGIN")
    insert(asker, "docs", [("asker.txt", 2, i, "mine", (1, i, 0)) for i in range(6)])
    for connection in (asker, owner):
        with error("55000", "has a keyword index"), connection.transaction():
            search(connection, "zanzibar", 100)
    asker.execute("ROLLBACK")
    owner.execute("ALTER TABLE docs DROP CONSTRAINT IF EXISTS docs_pkey, ADD PRIMARY KEY (document_id, segment_number)")
    assert len(search(asker, "common", 100)) == 6
    assert search(asker, "zanzibar", 100) == []


def test_one_whom_row_level_security_does_not_bind_sees_all(db: Database, owner: Connection) -> None:
    tenants(db, owner, "visible")
    assert len(search(owner, "zanzibar", 100)) == 6
    assert_exact(owner, "common asker1 zanzibar", configuration="simple")
    owner.execute(sql.SQL("GRANT ml_rag_user TO {}").format(sql.Identifier(db.role("stranger"))))
    try:
        owner.execute(sql.SQL("ALTER ROLE {} BYPASSRLS").format(sql.Identifier(db.role("stranger"))))
        stranger = db.connect("stranger")
        assert len(search(stranger, "zanzibar", 100)) == 6
        # that attribute alone is no right to read a table
        owner.execute("REVOKE SELECT ON docs FROM ml_rag_user")
        for relation in relations(owner):
            if relation.startswith("ml_rag.keyword_"):
                assert "zanzibar" not in everything(stranger, relation)
    finally:
        owner.execute(sql.SQL("ALTER ROLE {} NOBYPASSRLS").format(sql.Identifier(db.role("stranger"))))
        owner.execute(sql.SQL("REVOKE ml_rag_user FROM {}").format(sql.Identifier(db.role("stranger"))))


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("statistics", ["all", "visible"])
def test_no_relation_shows_a_tenant_the_others_words_or_keys(
    db: Database, owner: Connection, statistics: str, merged: bool
) -> None:
    tenants(db, owner, statistics, merged)
    asker = db.connect("asker")
    for relation in relations(owner):
        found = everything(asker, relation)
        for hidden in HIDDEN:
            assert hidden not in found.replace("'", "").replace(", ", ","), (relation, hidden)
    assert "docs" in everything(asker, "ml_rag.keyword_index")


def test_a_cheap_function_of_the_callers_sees_nothing_hidden(db: Database, owner: Connection) -> None:
    """The classic attack on views: a function so cheap that the planner would rather run it first."""
    tenants(db, owner)
    keyword_store(owner, ["fox"], "hidden")
    owner.execute("REVOKE ALL ON hidden FROM ml_rag_user")
    owner.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(sql.Identifier(db.role("asker"))))
    asker = db.connect("asker")
    seen = noticed(asker)
    asker.execute(
        "CREATE FUNCTION public.peek(r anyelement) RETURNS boolean LANGUAGE plpgsql COST 0.0000001"
        " AS $$ BEGIN RAISE NOTICE '%', r; RETURN true; END $$"
    )
    for condition in ("public.peek(v)", "public.peek(v) AND v.store = 'docs'::regclass", "public.peek(v) OR false"):
        asker.execute("SELECT count(*) FROM ml_rag.keyword_index AS v WHERE " + condition)
    assert any("docs" in text for text in seen)
    assert not any("hidden" in text for text in seen)


def test_plans_show_no_words(db: Database, owner: Connection) -> None:
    tenants(db, owner, "visible")
    asker = db.connect("asker")
    for relation in relations(owner):
        if not relation.startswith("ml_rag.keyword_"):
            continue
        for explain in ("EXPLAIN (VERBOSE)", "EXPLAIN (ANALYZE, VERBOSE)"):
            try:
                plan = str(asker.execute(sql.SQL(f"{explain} SELECT * FROM {relation}")).fetchall())
            except psycopg.errors.InsufficientPrivilege:
                continue
            assert not any(hidden in plan for hidden in HIDDEN), relation
    # the planner's own statistics on the tables
    for table in ("row", "new", "posting"):
        owner.execute(f"ANALYZE ml_rag_internal.keyword_{table}")
    statement = "SELECT count(*) FROM pg_stats WHERE schemaname = 'ml_rag_internal' AND tablename LIKE 'keyword%'"
    assert asker.execute(statement).fetchone() == (0,)
    assert (owner.execute(statement).fetchone() or (0,))[0] > 0


def scores(store: str, segment: str = "segment", key: str = "{document_id,segment_number}") -> str:
    arguments = f"'{store}'::regclass, '{segment}', '{key}', '{{zanzibar}}', '{{1}}', 10"
    return f"SELECT cardinality(keys) FROM public.keyword_scores({arguments})"


def test_errors_and_inner_functions_show_no_words(db: Database, owner: Connection) -> None:
    tenants(db, owner)
    keyword_store(owner, ["zanzibar quicksilver"], "closed")
    owner.execute("REVOKE ALL ON closed FROM ml_rag_user")
    asker = db.connect("asker")
    for attempt in (
        "SELECT ml_rag._visible_keys('docs', '{segment}')",
        "SELECT ml_rag._visible_keys('closed', '{segment}')",
        "SELECT ml_rag._call_python('merge_keywords', jsonb_build_array('docs'::regclass::oid::int8, true))",
        "SELECT ml_rag._call_python('index_cursor', jsonb_build_array('docs'::regclass::oid::int8, 'c'))",
        "SELECT ml_rag._call_python('merge_own_keywords', jsonb_build_array('docs'::regclass::oid::int8))",
        "SELECT ml_rag._call_python('drop_keyword_index', jsonb_build_array('docs'::regclass::oid::int8))",
        "SELECT * FROM ml_rag._keyword_index('closed'::regclass)",
        "SELECT ml_rag._read_as_owner(), ml_rag._write_as_owner()",
    ):
        try:
            found = str(asker.execute(attempt).fetchall())
        except psycopg.Error as e:
            found = str(e)
        assert not any(hidden in found for hidden in ("zanzibar", "quicksilver", "tenant0")), attempt
        if "merge" in attempt or "drop" in attempt:
            assert "42501" in found, found
    # other columns than those of the index are no way in, nor is a store that one may not read
    owner.execute(SCORES)
    for attempt in (
        scores("docs"),
        scores("closed"),
        scores("docs", "document_name"),
        scores("docs", key="{document_id}"),
    ):
        assert asker.execute(attempt).fetchall() == [(0,)], attempt
    assert owner.execute(scores("docs", key="{segment_number,document_id}")).fetchall() == [(0,)]
    assert owner.execute(scores("docs")).fetchall() == [(6,)]


def test_the_trigger_functions_cannot_be_turned_against_their_owner(db: Database, owner: Connection) -> None:
    """They run with the rights of ml_rag_internal: no code of the table's owner may run inside."""
    asker = db.connect("asker")
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(db.role("asker"))))
    asker.execute("SET search_path = own, public")
    asker.execute(
        "CREATE TABLE who (name text);"
        "CREATE TABLE t (id integer PRIMARY KEY, segment text, segment_embedding vector(3));"
        "CREATE TYPE own.mood AS ENUM ('fox', 'dog');"
        "CREATE FUNCTION own.spy(own.mood) RETURNS text LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO own.who VALUES (current_user); RETURN 'fox'; END $$;"
        "CREATE CAST (own.mood AS text) WITH FUNCTION own.spy(own.mood);"
    )
    enable(asker, "own.t")
    asker.execute("INSERT INTO t VALUES (1, 'fox')")
    # a column whose conversion to text is the attacker's own
    asker.execute("ALTER TABLE t ALTER segment TYPE own.mood USING segment::own.mood")
    with error("55000", "no longer matches its columns"):
        asker.execute("INSERT INTO t VALUES (2, 'dog')")
    # an operator and a function in the way
    asker.execute("ALTER TABLE t ALTER segment TYPE text USING 'fox'; TRUNCATE who;")
    asker.execute(
        "CREATE FUNCTION own.spy2(text, text) RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO own.who VALUES (current_user); RETURN true; END $$;"
        "CREATE OPERATOR own.= (LEFTARG = text, RIGHTARG = text, FUNCTION = own.spy2);"
        "CREATE FUNCTION own.spy3(integer) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS"
        " $$ BEGIN INSERT INTO own.who VALUES (current_user); RETURN $1; END $$;"
    )
    # an index whose expression the planner would compute when it plans a query on the table
    asker.execute("INSERT INTO t VALUES (3, 'fox'); UPDATE t SET segment = 'dog'; DELETE FROM t WHERE id = 3")
    who = {row[0] for row in asker.execute("SELECT name FROM who").fetchall()}
    assert who <= {db.role("asker")}
    with error("0A000", ours=False):
        asker.execute("SELECT ml_rag._keep_keywords()")


def test_many_tenants_at_some_size(db: Database, owner: Connection) -> None:
    """Runs of several sizes, deletions noted and waiting: the same scores as by hand, for the rows one sees."""
    create_store(owner)
    enable(owner, options='{"language": "simple"}')
    owner.execute(
        "INSERT INTO docs SELECT 'd' || i % 10, '{}', i, 1, 'w' || i % 7 || ' w' || i % 11 || ' w' || i % 13"
        " FROM generate_series(1, 3000) AS i"
    )
    owner.execute("DELETE FROM docs WHERE document_id % 17 = 0")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    owner.execute("DELETE FROM docs WHERE document_id % 19 = 0")
    owner.execute("INSERT INTO docs SELECT 'd' || i % 10, '{}', i, 1, 'w1 w1 w2' FROM generate_series(4001, 4100) AS i")
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    owner.execute(f"CREATE POLICY p ON docs TO {db.role('asker')} USING (document_name IN ('d1', 'd2'))")
    asker = db.connect("asker")
    assert len(runs(owner)) >= 1
    whole = by_hand(documents(owner, configuration="simple"), Counter(w1=1, w12=2, w5=1))
    mine = {key: score for key, score in whole.items() if key[0] % 10 in (1, 2)}
    assert {(d, s): x for d, s, x in search(asker, "w1 w12 w12 w5", 10_000)} == pytest.approx(mine)
    assert [x for *_, x in search(asker, "w1 w12 w12 w5", 10)] == pytest.approx(
        sorted(mine.values(), reverse=True)[:10]
    )


# -- dumps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "custom"])
def test_a_dump_brings_the_indexes_along(
    owner: Connection, cluster: Cluster, db: Database, tmp_path: Path, form: str
) -> None:
    owner.execute("CREATE SCHEMA s")
    keyword_store(owner, ["fox", "dog", "fox dog"], "s.docs", '{"language": "en", "k1": 1.5}')
    add(owner, ["a foxy dog"], 4, "s.docs")
    owner.execute("DELETE FROM s.docs WHERE document_id = 1")
    before = search(owner, "foxes dogs", name="s.docs")
    dump(db, form, tmp_path / "dump")
    with cluster.database("template0") as restored:
        restore(restored, form, tmp_path / "dump")
        connection = restored.connect()
        assert search(connection, "foxes dogs", name="s.docs") == before
        add(connection, ["fox fox"], 9, "s.docs")
        connection.execute("DELETE FROM s.docs WHERE document_id = 2")
        connection.execute("SELECT ml_rag.merge_keyword_index('s.docs')")
        assert_exact(connection, "foxes dogs", "s.docs", k1=1.5)


def test_ids_are_the_same_read_one_by_one_and_all_at_once(owner: Connection) -> None:
    """Few ids of a large run are read as pieces of it, many with the whole run."""
    keyword_store(owner, (f"heron {'grebe ' * (i % 7)}" for i in range(4000)))
    owner.execute("DELETE FROM docs WHERE document_id % 5 = 0")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert runs(owner)[0][0] > 2500
    few, many = search(owner, "heron grebe", 5), search(owner, "heron grebe", 1500)
    assert few == many[:5]
    assert len({row[0] for row in many}) == 1500
    assert all(row[0] % 5 for row in many)
    # a filter that few rows pass reads the ids of all runs, and keeps them as long as the runs are the same
    filtered = {"document_id": {"in": [many[-1][0], few[0][0]]}}
    for _ in range(2):
        assert [row[0] for row in search(owner, "heron grebe", 5, filters=filtered)] == [few[0][0], many[-1][0]]
        assert search(owner, "heron grebe", 1500) == many
    owner.execute("DELETE FROM docs WHERE document_id % 2 = 0")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert_exact(owner, "heron grebe")
    left = [row[0] for row in (few[0], many[-1]) if row[0] % 2]
    assert [row[0] for row in search(owner, "heron grebe", 5, filters=filtered)] == left


@pytest.mark.parametrize("way", ["built", "filled"])
def test_an_index_that_follows_another_is_not_read_whole(owner: Connection, way: str) -> None:
    """Where all indexes were dropped, VACUUM has PostgreSQL take their tables for empty, whatever follows."""
    keyword_store(owner, (f"heron{i % 50} grebe{i}" for i in range(6000)))
    owner.execute("SELECT ml_rag.disable_keyword_search('docs')")
    for table in ("row", "posting", "run", "new", "gone"):
        owner.execute(f"VACUUM (ANALYZE, TRUNCATE false) ml_rag_internal.keyword_{table}")
    if way == "built":
        enable(owner)
    else:
        owner.execute("CREATE TABLE texts AS SELECT * FROM docs; TRUNCATE docs")
        enable(owner)
        owner.execute("INSERT INTO docs SELECT * FROM texts")

    def rows_read() -> int:
        found = owner.execute(
            "SELECT coalesce(sum(seq_tup_read + idx_tup_fetch), 0) FROM pg_stat_xact_all_tables"
            " WHERE relname IN ('keyword_row', 'keyword_posting')"
        ).fetchone()
        return int(found[0]) if found else 0

    with owner.transaction():
        before = rows_read()
        assert len(search(owner, "heron7 heron8", 50)) == 50
        # one by one, what is asked for
        assert rows_read() - before < 500
