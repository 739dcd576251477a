"""chat/tables, evaluate/evaluate, vectorizer/error, store/policy: nobody waits for locks of roles that may only ask."""

from __future__ import annotations

import contextlib
import threading
import time

import psycopg
from psycopg import sql

from support.cluster import Connection, Database
from support.processes import over_and_over
from support.stores import create_store, error

TABLES = [
    "conversation",
    "message",
    "evaluation_run",
    "evaluation_question",
    "vectorizer_error",
    "vectorizer_truncated",
]
#: what DROP SCHEMA and the like have marked
MARKED = (
    "SELECT c.oid::regclass::text FROM pg_class AS c, pg_description AS d WHERE d.objoid = c.oid"
    " AND right(d.description, 1000) ~ 'KEPT_UNTIL'"
)


def test_nobody_locks_a_table_of_ml_rag(db: Database, owner: Connection, loader: Connection) -> None:
    """Whoever may DELETE from a table, or UPDATE all of it, may lock it, whatever its policies."""
    relations = [
        name
        for (name,) in owner.execute(
            "SELECT c.oid::regclass::text FROM pg_class AS c WHERE c.relnamespace::regnamespace::text ~ '^ml_rag'"
            " AND c.relkind IN ('r', 'p', 'v', 'f') ORDER BY 1"
        )
    ]
    assert {f"ml_rag.{table}" for table in TABLES} < set(relations)
    for connection in (db.connect("asker"), loader):
        assert connection.execute("SELECT pg_has_role(current_user, 'ml_rag_user', 'USAGE')").fetchone() == (True,)
        for relation in relations:
            for mode in ("SHARE UPDATE EXCLUSIVE", "SHARE", "SHARE ROW EXCLUSIVE", "EXCLUSIVE", "ACCESS EXCLUSIVE"):
                with error("42501", ours=False):
                    connection.execute(f"BEGIN; LOCK TABLE {relation} IN {mode} MODE".encode())
                connection.execute("ROLLBACK")
    # nor does any other role that there is, but for the one that nobody can take
    granted = owner.execute(
        "SELECT c.relname, a.grantee::regrole::text, a.privilege_type"
        " FROM pg_class AS c CROSS JOIN aclexplode(c.relacl) AS a WHERE c.relnamespace::regnamespace::text ~ '^ml_rag'"
        " AND a.grantee NOT IN (c.relowner, 'ml_rag_internal'::regrole)"
        " AND a.privilege_type NOT IN ('SELECT', 'INSERT', 'USAGE')"
    ).fetchall()
    assert granted == []


def test_each_role_forgets_its_own(db: Database, owner: Connection, tenant: Connection) -> None:
    asker = db.connect("asker")
    for connection in (owner, tenant, asker):
        connection.execute("INSERT INTO ml_rag.conversation DEFAULT VALUES")
        connection.execute(
            "INSERT INTO ml_rag.message"
            " (message_id, conversation_id, turn, created_at, query, question, citations, options)"
            " SELECT gen_random_uuid(), c.conversation_id, 1, now(), 'q', 'q', '[]', '{}' FROM ml_rag.conversation AS c"
            " WHERE c.role = current_user"
        )
        connection.execute(
            "INSERT INTO ml_rag.evaluation_run"
            " (started_at, seconds, source, questions, options, stores, models, versions, measures,"
            " counted, latency, errors)"
            " SELECT now(), 1, '', 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}'"
        )
        connection.execute(
            "INSERT INTO ml_rag.evaluation_question (run_id, question_id, citations, measures, latency)"
            " SELECT r.run_id, '1', '[]', '{}', '{}' FROM ml_rag.evaluation_run AS r WHERE r.role = current_user"
        )
    tables = ("conversation", "message", "evaluation_run", "evaluation_question")
    left = "SELECT " + ", ".join(f"ARRAY(SELECT role FROM ml_rag.{table} ORDER BY 1)" for table in tables)
    ids = owner.execute(
        "SELECT (SELECT array_agg(conversation_id) FROM ml_rag.conversation),"
        " (SELECT array_agg(run_id) FROM ml_rag.evaluation_run)"
    ).fetchone()
    everything = owner.execute(left).fetchone()
    (superuser,) = owner.execute("SELECT current_user").fetchone() or ("",)
    assert everything is not None
    assert ids is not None
    assert [len(roles) for roles in everything] == [3, 3, 3, 3]
    # rows of others are neither found nor changed, whoever the session's user is
    owner.execute(f"SET ROLE {db.role('asker')}")
    for connection in (owner, asker):
        with error("42501", ours=False):
            connection.execute("UPDATE ml_rag.message SET role = 'x'")
        for table in tables:
            with error("42501", ours=False):
                connection.execute(f"DELETE FROM ml_rag.{table}".encode())
    owner.execute(f"SET ROLE {db.role('tenant')}")
    assert owner.execute(
        "SELECT array_agg(ml_rag.forget_conversation(i)) FROM unnest(%s::uuid[]) AS i", (ids[0],)
    ).fetchone() == ([i == 1 for i in range(3)],)
    assert owner.execute(
        "SELECT array_agg(ml_rag.forget_evaluation(i)) FROM unnest(%s::bigint[]) AS i", (ids[1],)
    ).fetchone() == ([i == 1 for i in range(3)],)
    owner.execute("RESET ROLE")
    assert owner.execute(left).fetchone() == tuple([r for r in roles if r != db.role("tenant")] for roles in everything)
    assert asker.execute("UPDATE ml_rag.conversation SET changed_at = '-infinity'").rowcount == 1
    assert asker.execute("UPDATE ml_rag.evaluation_run SET questions = 0").rowcount == 1
    assert owner.execute(left).fetchone() == tuple([superuser] for _ in tables)
    # of roles that were dropped
    owner.execute("UPDATE ml_rag.conversation SET role = 'gone'; UPDATE ml_rag.message SET role = 'gone'")
    owner.execute("DELETE FROM ml_rag.conversation; DELETE FROM ml_rag.evaluation_run")
    assert owner.execute(left).fetchone() == ([], [], [], [])


def test_what_forgets_is_of_no_use_on_other_tables(db: Database, owner: Connection) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker = db.connect("asker")
    asker.execute("CREATE TABLE mine (role text, conversation_id uuid, run_id bigint)")
    with error("42501", ours=False):
        asker.execute("CREATE TRIGGER t AFTER UPDATE ON mine FOR EACH ROW EXECUTE FUNCTION ml_rag._forget()")
    # nor where the owner of the extension makes such a trigger
    owner.execute("INSERT INTO ml_rag.conversation DEFAULT VALUES")
    owner.execute("CREATE TABLE theirs AS SELECT role, conversation_id FROM ml_rag.conversation")
    owner.execute("CREATE TRIGGER t AFTER UPDATE ON theirs FOR EACH ROW EXECUTE FUNCTION ml_rag._forget()")
    owner.execute("UPDATE theirs SET role = role")
    assert owner.execute("SELECT count(*) FROM ml_rag.conversation").fetchone() == (1,)


def test_nobody_locks_the_tables_of_failures(db: Database, owner: Connection) -> None:
    """Whoever may DELETE from a table may lock it; then runs, writes and every DROP TABLE would wait.

    INSERT gives ROW EXCLUSIVE, and from PostgreSQL 16 on ROW SHARE, which is less.
    """
    asker = db.connect("asker")
    for table in ("vectorizer_error", "vectorizer_truncated"):
        for mode in ("SHARE UPDATE EXCLUSIVE", "SHARE", "EXCLUSIVE", "ACCESS EXCLUSIVE"):
            with error("42501", ours=False):
                asker.execute(f"BEGIN; LOCK TABLE ml_rag.{table} IN {mode} MODE")
            asker.execute("ROLLBACK")
        # what is left holds up neither
        asker.execute(f"BEGIN; LOCK TABLE ml_rag.{table} IN ROW EXCLUSIVE MODE")
    owner.execute("SET lock_timeout = '5s'; CREATE TABLE items (id integer PRIMARY KEY, note text)")
    options = '{"columns": "note", "embed_model_id": "fake-embed", "mode": "immediate"}'
    owner.execute("SELECT ml_rag.create_vectorizer('items', %s)", (options,))
    owner.execute("INSERT INTO items VALUES (1, ''), (2, 'x'), (3, '')")
    owner.execute("INSERT INTO ml_rag.vectorizer_truncated VALUES ('items', 1)")
    found = (
        "SELECT (SELECT array_agg(key) FROM ml_rag.vectorizer_error),"
        " (SELECT sum(texts) FROM ml_rag.vectorizer_truncated)"
    )
    assert owner.execute(found).fetchone() == (["{1}", "{3}"], 1)
    assert db.connect("tenant").execute(found).fetchone() == (None, None)
    owner.execute("UPDATE items SET note = 'mended' WHERE id = 1; DELETE FROM items WHERE id = 3")
    assert owner.execute(found).fetchone() == (["{3}"], 1)
    owner.execute("CALL ml_rag.run_vectorizer('items')")
    assert owner.execute(found).fetchone() == (None, 1)
    owner.execute("UPDATE items SET note = '' WHERE id = 1")
    owner.execute("SELECT ml_rag.drop_vectorizer('items')")
    assert owner.execute(found).fetchone() == (None, None)
    owner.execute("DROP TABLE items")


def test_failures_of_others_are_not_forgotten(db: Database, owner: Connection) -> None:
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, note text); INSERT INTO items VALUES (1, ''), (2, 'x')")
    options = '{"columns": "note", "embed_model_id": "fake-embed"}'
    owner.execute("SELECT ml_rag.create_vectorizer('items', %s)", (options,))
    owner.execute("CALL ml_rag.run_vectorizer('items')")
    asker = db.connect("asker")
    assert asker.execute("UPDATE ml_rag.vectorizer_error SET attempts = 0").rowcount == 0
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker.execute("CREATE TABLE mine (relation regclass, key text, attempts integer)")
    with error("42501", ours=False):
        asker.execute("CREATE TRIGGER t AFTER UPDATE ON mine FOR EACH ROW EXECUTE FUNCTION ml_rag._forget()")
    assert owner.execute("SELECT key FROM ml_rag.vectorizer_error").fetchall() == [("{1}",)]


def test_no_drop_waits_for_functions_that_look_like_those_of_policies(db: Database, owner: Connection) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker = db.connect("asker")
    for i in range(3):
        asker.execute(f"CREATE FUNCTION x{i}_1_visible() RETURNS integer LANGUAGE sql RETURN 1")
        asker.execute(f"COMMENT ON FUNCTION x{i}_1_visible() IS 'made by ml_rag: who sees a row of x'")
    create_store(owner)
    owner.execute("SELECT ml_rag._make_visible('docs', '{}', 'true')")
    made = "SELECT p.proname ~ '^docs' FROM pg_proc AS p WHERE p.proname ~ '_[0-9]+_visible$' ORDER BY 1"
    assert owner.execute(made).fetchall() == [(False,)] * 3 + [(True,)]
    asker.execute("BEGIN")
    for i in range(3):
        asker.execute(f"COMMENT ON FUNCTION x{i}_1_visible() IS 'made by ml_rag: still'")
    owner.execute("SET lock_timeout = '5s'; CREATE TABLE other ()")
    owner.execute("DROP TABLE other")
    assert owner.execute("SHOW lock_timeout").fetchone() == ("5s",)
    # one's own came first
    assert owner.execute(made).fetchall() == [(False,)] * 3
    asker.execute("ROLLBACK")
    owner.execute("CREATE TABLE other (); DROP TABLE other")
    assert owner.execute(made).fetchall() == []


def test_no_drop_fails_by_such_functions_that_go_meanwhile(db: Database, owner: Connection) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker = db.connect("asker")

    def change() -> None:
        with asker.transaction():
            for i in range(30):
                asker.execute(f"CREATE OR REPLACE FUNCTION x_{i}_visible() RETURNS integer LANGUAGE sql RETURN 1")
                asker.execute(f"COMMENT ON FUNCTION x_{i}_visible() IS 'made by ml_rag: x'")
        for i in range(30):
            # PostgreSQL's own race, where the owner's drop takes the function in the middle of this one
            with contextlib.suppress(psycopg.errors.InternalError_):
                asker.execute(f"DROP FUNCTION IF EXISTS x_{i}_visible()")

    with over_and_over(change):
        for _ in range(100):
            owner.execute("CREATE TABLE other ()")
            owner.execute("DROP TABLE other")


def test_no_drop_fails_by_what_looks_like_such_functions(db: Database, owner: Connection) -> None:
    """A procedure or an aggregate is dropped by another statement, and one that changes meanwhile by none."""
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(db.role("stranger"))))
    stranger = db.connect("stranger")
    stranger.execute("CREATE PROCEDURE own.x_1_visible() LANGUAGE sql BEGIN ATOMIC SELECT 1; END")
    stranger.execute("CREATE AGGREGATE own.x_2_visible(integer) (SFUNC = int4pl, STYPE = integer)")
    stranger.execute("CREATE FUNCTION own.x_3_visible() RETURNS integer LANGUAGE sql RETURN 1")
    for kind, name in (("PROCEDURE", "1_visible()"), ("AGGREGATE", "2_visible(integer)"), ("FUNCTION", "3_visible()")):
        stranger.execute(f"COMMENT ON {kind} own.x_{name} IS 'made by ml_rag: who sees a row of x'")
    stranger.execute("BEGIN; ALTER FUNCTION own.x_3_visible() COST 2")
    owner.execute("CREATE TABLE other (); DROP TABLE other")
    committed = threading.Timer(0.05, stranger.execute, ("COMMIT",))
    owner.execute("CREATE TABLE other ()")
    committed.start()
    owner.execute("DROP TABLE other")
    committed.join()
    owner.execute("DROP SCHEMA own CASCADE")


def test_no_drop_reads_a_long_comment(db: Database, owner: Connection) -> None:
    """One of 270 MB could not be marked, and failed it."""
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(db.role("asker"))))
    owner.execute("CREATE SCHEMA ml_rag_eval")
    asker = db.connect("asker")
    for i in range(2):
        asker.execute(f"CREATE TABLE own.t{i} (id integer PRIMARY KEY, name text)")
        asker.execute(f"SELECT ml_rag.create_vectorizer('own.t{i}', '{{\"columns\": \"name\"}}')")
    asker.execute("""
        DO $$ BEGIN
          EXECUTE format('COMMENT ON COLUMN own.t0.segment_embedding IS %L',
            'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,' || repeat('x', 100000));
        END $$""")
    owner.execute("DROP SCHEMA ml_rag_eval")
    assert owner.execute(MARKED).fetchall() == [("own.t1",)]


def test_no_drop_waits_for_tables_with_a_vectorizer(db: Database, owner: Connection) -> None:
    """It could be one of the extension, and then they are marked."""
    asker = db.connect("asker")
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(db.role("asker"))))
    owner.execute("CREATE SCHEMA ml_rag_eval")
    for i in range(3):
        asker.execute(f"CREATE TABLE own.t{i} (id integer PRIMARY KEY, name text)")
        asker.execute(f"SELECT ml_rag.create_vectorizer('own.t{i}', '{{\"columns\": \"name\"}}')")
    asker.execute("BEGIN; LOCK TABLE own.t0, own.t1 IN ACCESS EXCLUSIVE MODE")
    began = time.monotonic()
    owner.execute("SET lock_timeout = '20s'; DROP SCHEMA ml_rag_eval CASCADE")
    assert time.monotonic() - began < 10
    assert owner.execute("SHOW lock_timeout").fetchone() == ("20s",)
    asker.execute("ROLLBACK")
    assert owner.execute(MARKED).fetchall() == [("own.t2",)]


def test_no_drop_fails_by_what_takes_the_name_of_such_a_table(db: Database, owner: Connection) -> None:
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(db.role("asker"))))
    owner.execute("CREATE SCHEMA ml_rag_eval")
    asker = db.connect("asker")
    asker.execute("CREATE TABLE own.items (id integer PRIMARY KEY, name text)")
    asker.execute("SELECT ml_rag.create_vectorizer('own.items', '{\"columns\": \"name\"}')")
    asker.execute("BEGIN; ALTER TABLE own.items RENAME TO former; CREATE INDEX items ON own.former (segment_embedding)")
    committed = threading.Timer(0.5, asker.execute, ("COMMIT",))
    committed.start()
    owner.execute("DROP SCHEMA ml_rag_eval CASCADE")
    committed.join()
    assert owner.execute(MARKED).fetchall() == []


def test_rows_of_others_are_not_locked(db: Database, owner: Connection, tenant: Connection) -> None:
    tenant.execute("INSERT INTO ml_rag.conversation DEFAULT VALUES")
    asker = db.connect("asker")
    for table in TABLES:
        for strength in ("UPDATE", "SHARE"):
            statement = f"SELECT * FROM ml_rag.{table} FOR {strength}"
            asker.execute("BEGIN")
            if table != "evaluation_question":
                assert asker.execute(statement).fetchall() == []
            else:
                with error("42501", ours=False):
                    asker.execute(statement)
            tenant.execute("SET lock_timeout = '1s'; UPDATE ml_rag.conversation SET changed_at = now()")
            asker.execute("ROLLBACK")
    for table in ("option", "setting_value", "stats", "keyword_index", "node_group", "vectorizer"):
        with error("42501", ours=False):
            asker.execute(f"BEGIN; LOCK TABLE ml_rag.{table} IN ROW SHARE MODE")
        asker.execute("ROLLBACK")
