"""keyword/tables, keyword/index: what a role with tables of its own can try against the keyword indexes of others."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg import sql

from ml_rag.backend.keyword import TIES
from support.cluster import Connection, Database, noticed, value_of
from support.keywords import SCORES, enable, keyword_store, runs, search, waiting
from support.processes import wait_until
from support.stores import error, mark

SPY = """
CREATE TABLE own.who (name text);
CREATE FUNCTION own.note() RETURNS integer LANGUAGE plpgsql AS
  $$ BEGIN INSERT INTO own.who VALUES (current_user); RETURN 1; END $$;
CREATE TYPE own.mood AS ENUM ('fox', 'dog');
CREATE FUNCTION own.as_text(own.mood) RETURNS text LANGUAGE plpgsql AS
  $$ BEGIN PERFORM own.note(); RETURN 'fox'; END $$;
CREATE CAST (own.mood AS text) WITH FUNCTION own.as_text(own.mood) AS IMPLICIT;
CREATE FUNCTION own.as_oid(own.mood) RETURNS oid LANGUAGE plpgsql AS $$ BEGIN RETURN own.note(); END $$;
CREATE CAST (own.mood AS oid) WITH FUNCTION own.as_oid(own.mood) AS IMPLICIT;
CREATE TABLE own.t (id integer PRIMARY KEY, segment text, segment_embedding vector(3));
"""


@pytest.fixture
def attacker(db: Database, owner: Connection) -> Connection:
    """A member of ml_rag_user with a schema of its own, where functions note whose rights they run with."""
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(db.role("asker"))))
    connection = db.connect("asker")
    connection.execute("SET search_path = own, public")
    connection.execute(SPY)
    connection.execute("INSERT INTO own.t VALUES (1, 'fox')")
    return connection


def ran_as(attacker: Connection) -> set[str]:
    return {row[0] for row in attacker.execute("SELECT name FROM own.who").fetchall()}


# -- rights -----------------------------------------------------------------------------------------------------------


def test_a_trigger_of_ones_own_cannot_empty_the_index_of_another(owner: Connection, attacker: Connection) -> None:
    keyword_store(owner, ["fox"])
    for type_, value in (("oid", "'docs'::regclass"), ("own.mood", "'fox'")):
        attacker.execute(f"CREATE TABLE own.bait AS SELECT ({value})::{type_} AS store")
        with error("42501", ours=False):
            attacker.execute("CREATE TRIGGER x AFTER DELETE ON own.bait FOR EACH ROW EXECUTE FUNCTION ml_rag._forget()")
        # nor where somebody was given the right to
        owner.execute("CREATE TRIGGER x AFTER DELETE ON own.bait FOR EACH ROW"
                      " EXECUTE FUNCTION ml_rag._forget()")  # fmt: skip
        attacker.execute("DELETE FROM own.bait")
        attacker.execute("DROP TABLE own.bait")
    assert ran_as(attacker) == set()
    assert [row[0] for row in search(owner, "fox")] == [1]


#: functions that a call would prefer to those of pg_catalog: for just these types, or for a text
OVERLOADS = {
    "nextval(text)": "bigint",
    "concat(integer)": "text",
    "concat(text)": "text",
    "cardinality(name[])": "integer",
    "format(text, name)": "text",
    "format(text, name, name)": "text",
    "count(text)": "bigint",
    "int8send(oid)": "bytea",
    "octet_length(name)": "integer",
    "row_security_active(regclass)": "boolean",
    "has_column_privilege(oid, regclass, smallint, text)": "boolean",
    "pg_has_role(oid, oid, text)": "boolean",
}
TYPES = "oid regclass regconfig text name text[] name[] bigint integer smallint jsonb boolean".split()  # noqa: SIM905


def test_no_index_goes_with_a_trigger_of_somebody_else(db: Database, owner: Connection, attacker: Connection) -> None:
    """Which has the name of that by which a shard of Citus is indexed, and goes with its function."""
    keyword_store(owner, ["fox"])
    owner.execute(sql.SQL("GRANT TRIGGER ON docs TO {}").format(sql.Identifier(db.role("asker"))))
    attacker.execute(
        "CREATE FUNCTION own.nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER ml_rag_keywords_written AFTER INSERT ON public.docs"
        " FOR EACH ROW EXECUTE FUNCTION own.nothing()"
    )
    attacker.execute("DROP SCHEMA own CASCADE")
    assert [row[0] for row in search(owner, "fox")] == [1]


def test_objects_in_the_schema_of_pgvector_run_with_nobody_elses_rights(
    db: Database, owner: Connection, attacker: Connection
) -> None:
    """An operator for just these types is taken before one of pg_catalog for any."""
    owner.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(sql.Identifier(db.role("asker"))))
    attacker.execute(
        "CREATE FUNCTION own.check() RETURNS void LANGUAGE plpgsql AS $$ BEGIN IF current_user <> session_user THEN"
        " RAISE EXCEPTION 'runs as %', current_user; END IF; END $$"
    )
    for name, type_ in OVERLOADS.items():
        attacker.execute(
            f"CREATE FUNCTION public.{name} RETURNS {type_} LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM own.check(); RETURN NULL; END $$"
        )
    for left in TYPES:
        for right in TYPES:
            names = attacker.execute(
                "SELECT array_agg(o.oprname) FROM pg_operator AS o WHERE o.oprleft = %s::regtype"
                " AND o.oprright = %s::regtype AND o.oprnamespace = 'pg_catalog'::regnamespace",
                (left, right),
            ).fetchone()
            for operator, result in {
                "=": "boolean",
                "<>": "boolean",
                "||": "text",
                "->>": "text",
                "?": "boolean",
            }.items():
                if operator in ((names and names[0]) or ()):
                    continue
                function = f"public.f{TYPES.index(left)}_{TYPES.index(right)}_{result}"
                attacker.execute(
                    f"CREATE OR REPLACE FUNCTION {function}({left}, {right}) RETURNS {result} LANGUAGE plpgsql AS"
                    " $$ BEGIN PERFORM own.check(); RETURN NULL; END $$"
                )
                attacker.execute(
                    f"CREATE OPERATOR public.{operator} (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = {function})"
                )
    owner.execute("SET search_path = pg_catalog")
    enable(attacker, "own.t")
    attacker.execute("INSERT INTO own.t SELECT i, 'fox' FROM generate_series(2, 1500) AS i")
    attacker.execute("UPDATE own.t SET segment = 'dog' WHERE id < 9; DELETE FROM own.t WHERE id = 1")
    attacker.execute("SELECT ml_rag.merge_keyword_index('own.t')")
    assert owner.execute("SELECT count(*) > 0 FROM ml_rag_internal.keyword_run").fetchone() == (True,)
    owner.execute("GRANT USAGE ON SCHEMA own TO PUBLIC")
    owner.execute(SCORES)
    for connection in (attacker, owner):
        connection.execute(
            "SELECT * FROM public.keyword_scores('own.t'::regclass, 'segment', '{id}', '{fox}', '{1}', 3)"
        )
    attacker.execute(
        "TRUNCATE own.t; INSERT INTO own.t VALUES (1, 'fox'); SELECT ml_rag.disable_keyword_search('own.t')"
    )
    enable(attacker, "own.t")
    attacker.execute("DROP TABLE own.t")
    attacker.execute(
        "INSERT INTO ml_rag.evaluation_run (name, started_at, seconds, source, questions, options, stores, models,"
        " versions, measures, counted, latency, errors)"
        " SELECT 'x', now(), 1, 'x', 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}'"
    )
    attacker.execute("SELECT ml_rag.forget_evaluation(run_id) FROM ml_rag.evaluation_run")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", "(SELECT jsonb_agg('k' || i) FROM generate_series(1, 33) AS i)"),
        ("key", "'[]'"),
        ("configuration", "to_jsonb(repeat('x', 301))"),
    ],
)
def test_what_everybody_reads_of_an_index_is_bounded(
    owner: Connection, attacker: Connection, field: str, value: str
) -> None:
    """The function that makes an index takes what it is told."""
    index = {"segment": "segment", "key": ["id"], "configuration": "simple", "k1": 1.2, "b": 0.75, "statistics": "all"}
    found = attacker.execute(
        "SELECT error ->> 'sqlstate' FROM ml_rag._call_python('build_keyword_index', jsonb_build_array("
        f"jsonb_set(%s::jsonb || jsonb_build_object('store', 'own.t'::regclass::oid::bigint), '{{{field}}}', {value}),"
        " NULL))",
        (json.dumps(index),),
    ).fetchone()
    assert found == ("23514",)
    assert owner.execute("SELECT FROM ml_rag_internal.keyword_store").fetchall() == []


def test_an_index_is_written_with_the_rights_of_no_superuser(
    db: Database, owner: Connection, attacker: Connection
) -> None:
    """Whatever a hole would let run there has the rights of a role that has nothing but the tables of the indexes."""
    owner.execute("CREATE SCHEMA noted; GRANT USAGE ON SCHEMA noted TO PUBLIC; CREATE TABLE noted.role (name text)")
    owner.execute("CREATE FUNCTION noted.note() RETURNS trigger LANGUAGE plpgsql SECURITY INVOKER AS"
                  " $$ BEGIN INSERT INTO noted.role VALUES (current_user); RETURN NULL; END $$")  # fmt: skip
    owner.execute("GRANT INSERT ON noted.role TO PUBLIC")
    for name in ("store", "row", "new", "gone", "owed", "run", "posting"):
        owner.execute("CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON ml_rag_internal."
                      f"keyword_{name} FOR EACH STATEMENT EXECUTE FUNCTION noted.note()")  # fmt: skip
    enable(attacker, "own.t")
    attacker.execute("INSERT INTO own.t VALUES (2, 'dog')")
    attacker.execute("INSERT INTO own.t SELECT i, 'word' FROM generate_series(3, 3000) AS i")
    attacker.execute("WITH gone AS (DELETE FROM own.t WHERE id = 2) UPDATE own.t SET segment = 'x' WHERE id < 5")
    attacker.execute("SELECT ml_rag.merge_keyword_index('own.t')")
    attacker.execute("TRUNCATE own.t")
    assert owner.execute("SELECT DISTINCT name FROM noted.role").fetchall() == [("ml_rag_internal",)]


def test_that_role_is_nobody_elses(db: Database, owner: Connection) -> None:
    role = sql.Identifier(db.role("asker"))
    owner.execute("DROP EXTENSION ml_rag CASCADE")
    for undo, do in (
        (sql.SQL("REVOKE ml_rag_internal FROM {}").format(role), sql.SQL("GRANT ml_rag_internal TO {}").format(role)),
        *(
            (sql.SQL(f"ALTER ROLE ml_rag_internal NO{name}"), sql.SQL(f"ALTER ROLE ml_rag_internal {name}"))
            for name in ("LOGIN", "SUPERUSER", "CREATEROLE", "BYPASSRLS", "REPLICATION")
        ),
    ):
        owner.execute(do)  # roles are of the cluster
        try:
            with error("55000", 'role "ml_rag_internal" is in use'):
                owner.execute("CREATE EXTENSION ml_rag")
        finally:
            owner.execute(undo)
    owner.execute("CREATE EXTENSION ml_rag")


@pytest.mark.parametrize("change", ["SECURITY INVOKER", "SET search_path = own", "STABLE", "SET SCHEMA own"])
def test_that_role_alters_none_of_its_functions(owner: Connection, attacker: Connection, change: str) -> None:
    """What runs there could have one run with the rights of whoever writes a table, and another search_path."""
    attacker.execute("GRANT CREATE, USAGE ON SCHEMA own TO PUBLIC")
    owner.execute("SET ROLE ml_rag_internal")
    with error("42501", "must be owner of extension ml_rag"):
        owner.execute(f"ALTER FUNCTION ml_rag._keep_keywords() {change}".encode())
    owner.execute("RESET ROLE")
    owner.execute("ALTER FUNCTION ml_rag._keep_keywords() COST 100")
    attacker.execute("CREATE FUNCTION own.one() RETURNS integer LANGUAGE sql AS 'SELECT 1'")
    attacker.execute("ALTER FUNCTION own.one() IMMUTABLE")


def test_a_configuration_of_a_schema_that_only_the_owner_may_use_indexes_what_others_write(
    db: Database, owner: Connection, attacker: Connection
) -> None:
    attacker.execute('CREATE TEXT SEARCH CONFIGURATION own."o\'wn" (COPY = pg_catalog.english)')
    enable(attacker, "own.t", json.dumps({"text_search_configuration": 'own."o\'wn"'}))
    attacker.execute("INSERT INTO own.t VALUES (2, 'dogs')")
    indexed = "SELECT DISTINCT coalesce(tokens::text, words::text) FROM ml_rag_internal.keyword_new"
    assert owner.execute(indexed).fetchall() == [("'dog':1",)]
    attacker.execute("SELECT ml_rag.merge_keyword_index('own.t')")
    attacker.execute("INSERT INTO own.t SELECT i, 'foxes' FROM generate_series(3, 1100) AS i")
    terms = owner.execute("SELECT term FROM ml_rag_internal.keyword_posting WHERE store = 'own.t'::regclass")
    assert {term for (term,) in terms} == {"fox", "dog"}
    attacker.execute('DROP TEXT SEARCH CONFIGURATION own."o\'wn"')
    with error("42704", "does not exist"):
        attacker.execute("INSERT INTO own.t VALUES (2000, 'dogs')")


@pytest.mark.parametrize("event", ["INSERT", "UPDATE", "DELETE"])
def test_no_view_takes_the_place_of_the_rows_of_a_statement(attacker: Connection, event: str) -> None:
    enable(attacker, "own.t")
    attacker.execute(f"DROP TRIGGER ml_rag_keywords_{event.lower()} ON own.t")
    attacker.execute(f"CREATE TRIGGER x AFTER {event} ON own.t EXECUTE FUNCTION ml_rag._keep_keywords()")
    statement = {
        "INSERT": "INSERT INTO own.t VALUES (2, 'fox')",
        "UPDATE": "UPDATE own.t SET segment = 'dog'",
        "DELETE": "DELETE FROM own.t",
    }[event]
    for name in ("ml_rag_new", "ml_rag_old"):
        attacker.execute(f"CREATE TEMP VIEW {name} AS SELECT own.note() AS id, 'x'::text AS segment")
    with error("55000", "cannot be updated"):
        attacker.execute(statement)
    attacker.execute("DROP VIEW ml_rag_new")
    with error("55000", "cannot be updated"):
        attacker.execute(statement)
    attacker.execute("DROP VIEW ml_rag_old")
    with error("42P01", ours=False):  # there is no such relation
        attacker.execute(statement)
    attacker.execute("DROP TRIGGER x ON own.t")
    attacker.execute(f"CREATE TRIGGER x AFTER {event} ON own.t FOR EACH ROW EXECUTE FUNCTION ml_rag._keep_keywords()")
    with error("55000", "cannot be updated"):
        attacker.execute(statement)
    assert ran_as(attacker) == set()


@pytest.mark.parametrize("key", ["id", "document_id, segment_number"])
def test_a_type_that_changes_behind_a_snapshot_runs_no_cast(
    db: Database, owner: Connection, attacker: Connection, key: str
) -> None:
    """Under repeatable read the catalog shows the column as it was, while the rows are of the type it has now."""
    attacker.execute("ALTER TABLE own.t DROP CONSTRAINT t_pkey, ADD document_id integer NOT NULL DEFAULT 1")
    attacker.execute("ALTER TABLE own.t ADD segment_number integer NOT NULL DEFAULT 1")
    attacker.execute(f"ALTER TABLE own.t ADD PRIMARY KEY ({key})".encode())
    enable(attacker, "own.t")
    with db.connect("asker").transaction() as transaction:
        late = transaction.connection
        late.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        late.execute("SELECT count(*) FROM pg_attribute")
        attacker.execute("ALTER TABLE own.t ALTER segment TYPE own.mood USING 'fox'::own.mood")
        for statement in (
            "INSERT INTO own.t (id, segment, document_id) VALUES (2, 'dog', 2)",
            "UPDATE own.t SET segment = 'fox'",
            "DELETE FROM own.t",
        ):
            with error("40001", "columns of"), late.transaction():
                late.execute(statement.encode())
    assert ran_as(attacker) == set()


def test_a_column_that_is_gone_behind_a_snapshot_is_no_function(
    db: Database, owner: Connection, attacker: Connection
) -> None:
    """r.to_jsonb would be to_jsonb(r) then, which runs casts of the other columns."""
    attacker.execute("CREATE FUNCTION own.as_json(own.mood) RETURNS json LANGUAGE plpgsql AS"
                     " $$ BEGIN PERFORM own.note(); RETURN '1'; END $$")  # fmt: skip
    attacker.execute("CREATE CAST (own.mood AS json) WITH FUNCTION own.as_json(own.mood)")
    attacker.execute("CREATE TABLE own.parent (id integer PRIMARY KEY, to_jsonb text) PARTITION BY RANGE (id)")
    attacker.execute("CREATE TABLE own.part (id integer, mood own.mood) PARTITION BY RANGE (id)")
    attacker.execute("CREATE TABLE own.leaf PARTITION OF own.part FOR VALUES FROM (0) TO (9)")
    enable(attacker, "own.parent", '{"segment": "to_jsonb"}')
    attacker.execute("CREATE TRIGGER x AFTER INSERT ON own.leaf REFERENCING NEW TABLE AS ml_rag_new"
                     " FOR EACH STATEMENT EXECUTE FUNCTION ml_rag._keep_keywords()")  # fmt: skip
    with db.connect("asker").transaction() as transaction:
        late = transaction.connection
        late.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        late.execute("SELECT count(*) FROM pg_attribute")
        attacker.execute("ALTER TABLE own.parent DROP to_jsonb, ADD mood own.mood")
        attacker.execute("ALTER TABLE own.part ALTER id SET NOT NULL, ADD PRIMARY KEY (id)")
        attacker.execute("ALTER TABLE own.parent ATTACH PARTITION own.part FOR VALUES FROM (0) TO (9)")
        for table in ("parent", "leaf"):
            with error("40001", "columns of"), late.transaction():
                late.execute(f"INSERT INTO own.{table} VALUES (2, 'fox')".encode())
    assert ran_as(attacker) == set()


def test_a_column_that_goes_while_its_index_is_waited_for_is_no_function(
    owner: Connection, attacker: Connection
) -> None:
    attacker.execute("CREATE FUNCTION own.as_json(own.mood) RETURNS json LANGUAGE plpgsql AS"
                     " $$ BEGIN PERFORM own.note(); RETURN '1'; END $$")  # fmt: skip
    attacker.execute("CREATE CAST (own.mood AS json) WITH FUNCTION own.as_json(own.mood)")
    attacker.execute("CREATE TABLE own.moods (id integer PRIMARY KEY, to_jsonb text, mood own.mood);"
                     "INSERT INTO own.moods VALUES (1, 'x', 'fox')")  # fmt: skip

    def index() -> None:
        with error("22023", "text column"):
            enable(owner, "own.moods", '{"segment": "to_jsonb"}')

    with ThreadPoolExecutor(1) as pool:
        with attacker.transaction():
            attacker.execute("LOCK TABLE own.moods")
            indexing = pool.submit(index)
            waiting = "SELECT FROM pg_locks WHERE relation = 'own.moods'::regclass AND NOT granted"
            wait_until(lambda: attacker.execute(waiting).rowcount == 1)
            attacker.execute("ALTER TABLE own.moods DROP to_jsonb")
        indexing.result(30)
    assert ran_as(attacker) == set()


TABLES = ("store", "row", "new", "gone", "run", "posting")


def test_nobody_writes_the_tables_by_statements_of_ones_own(owner: Connection, attacker: Connection) -> None:
    """Not the owner of an indexed table either: rows that it made up would cost everybody's searches."""
    enable(attacker, "own.t")
    for statement in (
        "INSERT INTO ml_rag_internal.keyword_store VALUES ('own.t', 'segment', '{id}', 'simple', 1, 1, 'all')",
        "INSERT INTO ml_rag_internal.keyword_row VALUES (1, 'own.t', 1, '{1}')",
        "INSERT INTO ml_rag_internal.keyword_new VALUES ('own.t', 1, 1, '{\"spam\": 9}')",
        "UPDATE ml_rag_internal.keyword_store SET k1 = 0",
        "SELECT nextval('ml_rag_internal.keyword_number')",
        *(f"{how} ml_rag_internal.keyword_{table}" for how in ("DELETE FROM", "TRUNCATE") for table in TABLES),
    ):
        with error("42501", ours=False):
            attacker.execute(statement)
    granted = owner.execute(
        "SELECT c.relname, a.grantee::regrole::text FROM pg_class AS c, aclexplode(c.relacl) AS a"
        " WHERE c.relnamespace = 'ml_rag_internal'::regnamespace AND c.relname LIKE 'keyword\\_%'"
        " AND c.relname <> 'keyword_index' AND a.grantee NOT IN (c.relowner, 'ml_rag_internal'::regrole)"
    ).fetchall()
    assert granted == []


def test_who_may_read_and_write_all_data_reads_and_writes_no_words(
    db: Database, owner: Connection, attacker: Connection
) -> None:
    """pg_read_all_data has SELECT on all tables, but policies hold for it: those of the indexed tables, too."""
    enable(attacker, "own.t", json.dumps({"statistics": "visible"}))
    attacker.execute("INSERT INTO own.t SELECT i, 'zanzibar' FROM generate_series(2, 1100) AS i")
    attacker.execute("INSERT INTO own.t VALUES (2000, 'wolf'); DELETE FROM own.t WHERE id = 2")
    attacker.execute("ALTER TABLE own.t ENABLE ROW LEVEL SECURITY")
    stranger = db.connect("stranger")
    name = sql.Identifier(db.role("stranger"))
    owner.execute(sql.SQL("GRANT pg_read_all_data, pg_write_all_data TO {}").format(name))
    try:
        for table in TABLES:
            everything = f"SELECT FROM ml_rag_internal.keyword_{table}"
            assert owner.execute(everything).rowcount > 0, table
            assert stranger.execute(everything).rowcount == 0, table
            assert stranger.execute(f"UPDATE ml_rag_internal.keyword_{table} SET store = store").rowcount == 0, table
            assert stranger.execute(f"DELETE FROM ml_rag_internal.keyword_{table}").rowcount == 0, table
            with error("42501", ours=False):
                stranger.execute(f"INSERT INTO ml_rag_internal.keyword_{table} (store) VALUES ('own.t'::regclass)")
    finally:
        owner.execute(sql.SQL("REVOKE pg_read_all_data, pg_write_all_data FROM {}").format(name))  # of the cluster


def test_row_security_off_disturbs_neither_writes_nor_searches(attacker: Connection) -> None:
    """As pg_restore sets it for the session that writes the rows."""
    attacker.execute("SET row_security = off")
    enable(attacker, "own.t")
    attacker.execute("INSERT INTO own.t SELECT i, 'wolf' FROM generate_series(2, 1100) AS i")
    attacker.execute("WITH gone AS (DELETE FROM own.t WHERE id = 3) UPDATE own.t SET segment = 'cat' WHERE id = 4")
    attacker.execute("SELECT ml_rag.merge_keyword_index('own.t')")
    mark(attacker, "own.t")
    options = '{"vector_store": ["own.t"], "semantic_search": false, "keyword_search": true}'
    found = attacker.execute("SELECT segment FROM ml_rag_search('cat', %s)", (options,)).fetchall()
    assert found == [("cat",)]
    attacker.execute("SELECT ml_rag.disable_keyword_search('own.t')")


def test_an_index_is_made_of_the_rows_of_the_table_alone(attacker: Connection) -> None:
    """Its owner can ask for it with columns of its choice, but says no rows."""
    described = {"store": 0, "segment": "segment", "key": ["id"], "configuration": "simple", "k1": 1, "b": 1,
                 "statistics": "all"}  # fmt: skip
    oid = attacker.execute("SELECT 'own.t'::regclass::oid").fetchone() or (0,)
    arguments = "jsonb_build_array(%s::jsonb, NULL)"
    call = f"SELECT error ->> 'sqlstate' FROM ml_rag._call_python('build_keyword_index', {arguments})"
    for change in (
        {"configuration": "simple', (SELECT 1)) --"},
        {"segment": 'segment", 1) --'},
        {"key": ["id) --"]},
        {"k1": 1e9},
        {"statistics": "some"},
        {"store": "ml_rag.setting_value"},
        {"store": None},
    ):
        found = value_of(attacker, call, (json.dumps({**described, "store": oid[0], **change}),))
        assert found is not None, change
    assert attacker.execute("SELECT count(*) FROM ml_rag.keyword_index").fetchone() == (0,)


def test_rows_deleted_behind_the_back_of_an_index_cost_others_little(
    owner: Connection, tenant: Connection, attacker: Connection
) -> None:
    """Its owner can have triggers off: then the index has candidates by the thousand that no row stands behind."""
    keyword_store(owner, ["fox"])
    attacker.execute(
        "CREATE TABLE own.kb (id integer PRIMARY KEY, segment text, segment_embedding vector(3));"
        "COMMENT ON COLUMN own.kb.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed';"
        "INSERT INTO own.kb SELECT i, 'fox' FROM generate_series(1, 12000) AS i;"
        "GRANT USAGE ON SCHEMA own TO ml_rag_user; GRANT SELECT ON own.kb TO ml_rag_user"
    )
    enable(attacker, "own.kb")
    attacker.execute("ALTER TABLE own.kb DISABLE TRIGGER USER; DELETE FROM own.kb")
    assert [row[0] for row in search(tenant, "fox", 3, name=None)] == [1]
    owner.execute(SCORES)
    # two looks at what is there: the n best with those as good, then fifty times as many
    assert candidates(tenant, "own.kb", 3) == 3 + TIES
    assert candidates(tenant, "own.kb", 150) == 150 + TIES


def candidates(connection: Connection, store: str, n: int) -> int:
    arguments = f"'{store}'::regclass, 'segment', '{{id}}', '{{fox}}', '{{1}}', {n}"
    found = connection.execute(f"SELECT cardinality(keys) FROM public.keyword_scores({arguments})").fetchone()
    return int((found or (-1,))[0])


@pytest.mark.parametrize("statistics", ["visible", "all"])
def test_a_query_of_thousands_of_words_is_answered(
    db: Database, owner: Connection, tenant: Connection, statistics: str
) -> None:
    """Rows times words were more than one value of PostgreSQL holds: the call ended, whatever other stores it had."""
    keyword_store(owner, ["fox"] * 4500, options=json.dumps({"statistics": statistics}))
    if statistics == "visible":
        owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (true)")
    else:  # rows that wait: nothing is merged in such a transaction
        owner.execute("TRUNCATE docs")
        with db.connect().transaction() as transaction:
            transaction.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            for first in range(1, 4500, 900):
                transaction.connection.execute(
                    "INSERT INTO docs"
                    " (document_name, metadata, document_id, segment_number, segment, segment_embedding)"
                    " SELECT 'd' || i, '{}', i, 1, 'fox', '[1,0,0]' FROM generate_series(%s, %s + 899) AS i",
                    (first, first),
                )
        assert waiting(owner) == (4500, 0)
    tenant.execute("SET statement_timeout = '10s'")
    few = search(tenant, "fox", 3)
    assert len(few) == 3
    assert search(tenant, "fox " + " ".join(f"word{i}" for i in range(8000)), 3) == few


def test_a_run_of_large_rows_has_fewer_of_them(owner: Connection) -> None:
    """What makes a run is in memory as a whole: 65536 rows of large segments would be gigabytes."""
    keyword_store(owner, options='{"language": "simple"}')
    owner.execute(
        "INSERT INTO docs (document_name, metadata, document_id, segment_number, segment, segment_embedding)"
        " SELECT 'd', '{}', 1, i, (SELECT string_agg(repeat('w', 1900) || (i * 20 + j), ' ')"
        " FROM generate_series(1, 20) AS j), '[1,0,0]' FROM generate_series(1, 1000) AS i"
    )
    own = runs(owner)
    assert len(own) == 3
    assert sum(rows for rows, _ in own) == 1000
    assert [row[1] for row in search(owner, "w" * 1900 + "19990", 3)] == [999]


# -- what is shown ----------------------------------------------------------------------------------------------------


def shown(connection: Connection, store: str) -> str:
    """What a role gets of an index by every way there is: its description, and the keys of rows with a word."""
    found = connection.execute("SELECT * FROM ml_rag.keyword_index").fetchall()
    found += connection.execute("SELECT * FROM ml_rag._keyword_index()").fetchall()
    found += connection.execute(
        "SELECT keys, scores FROM public.keyword_scores(%s::oid, 'segment', '{id}', '{zanzibar}', '{1}', 10)", (store,)
    ).fetchall()
    return str(found)


@pytest.mark.parametrize("merged", [True, False])
def test_a_table_in_a_schema_that_one_may_not_use_shows_nothing(
    owner: Connection, tenant: Connection, merged: bool
) -> None:
    owner.execute("CREATE SCHEMA closed; CREATE TABLE closed.t (id text PRIMARY KEY, segment text);")
    owner.execute("INSERT INTO closed.t VALUES ('numberplate', 'zanzibar'); GRANT SELECT ON closed.t TO ml_rag_user")
    enable(owner, "closed.t", '{"language": "simple"}')
    owner.execute(SCORES)
    store = str((owner.execute("SELECT 'closed.t'::regclass::oid").fetchone() or (0,))[0])
    if not merged:
        owner.execute("UPDATE closed.t SET segment = 'zanzibar again'")
    assert not any(word in shown(tenant, store) for word in ("numberplate", "zanzibar", "closed"))
    owner.execute("GRANT USAGE ON SCHEMA closed TO ml_rag_user")
    assert all(word in shown(tenant, store) for word in ("numberplate", "closed"))


def test_keys_that_one_may_not_read_are_not_shown(owner: Connection, tenant: Connection) -> None:
    owner.execute("CREATE TABLE t (id text PRIMARY KEY, segment text)")
    owner.execute("INSERT INTO t VALUES ('numberplate', 'zanzibar'); GRANT SELECT (segment) ON t TO ml_rag_user")
    enable(owner, "t", '{"language": "simple"}')
    owner.execute(SCORES)
    store = str((owner.execute("SELECT 't'::regclass::oid").fetchone() or (0,))[0])
    assert "numberplate" not in shown(tenant, store)
    owner.execute("GRANT SELECT (id) ON t TO ml_rag_user")
    assert "numberplate" in shown(tenant, store)


# -- an index that its owner has broken -------------------------------------------------------------------------------

BREAK: dict[str, Any] = {
    "the configuration is dropped": "DROP TEXT SEARCH CONFIGURATION own.c",
    "the key has another type": "ALTER TABLE own.t2 ALTER id TYPE integer",
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_index_does_not_stop_those_who_search_others(
    owner: Connection, tenant: Connection, attacker: Connection, how: str
) -> None:
    keyword_store(owner, ["fox"])
    (name,) = attacker.execute("SELECT current_user").fetchone() or ("",)
    owner.execute(sql.SQL("GRANT ml_rag_publisher TO {}").format(sql.Identifier(name)))
    attacker.execute(
        "CREATE TEXT SEARCH CONFIGURATION own.c (COPY = english);"
        "CREATE TABLE own.t2 (id numeric PRIMARY KEY, segment text, segment_embedding vector(3), document_id integer);"
        "COMMENT ON COLUMN own.t2.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed';"
        "INSERT INTO own.t2 VALUES (1.50, 'fox', '[1,0,0]', 7);"
        "GRANT USAGE ON SCHEMA own TO ml_rag_user; GRANT SELECT ON own.t2 TO ml_rag_user"
    )
    enable(attacker, "own.t2", '{"text_search_configuration": "own.c"}')
    assert len(search(tenant, "fox", name=None)) == 2
    attacker.execute(BREAK[how])
    notices = noticed(tenant)
    assert [row[0] for row in search(tenant, "fox", name=None)] == [1]
    assert notices == ['the keyword index of "own.t2" cannot be used; ignored']
    with error("55000", "cannot be used"):
        search(tenant, "fox", name="own.t2")
    enable(attacker, "own.t2", '{"language": "en"}')
    assert len(search(tenant, "fox", name=None)) == 2
    owner.execute(sql.SQL("REVOKE ml_rag_publisher FROM {}").format(sql.Identifier(name)))
