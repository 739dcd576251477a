"""vectorizer/error, store/policy: nobody's DROP TABLE waits for locks of roles that may only ask."""

from __future__ import annotations

from support.cluster import Connection, Database
from support.stores import create_store, error

TABLES = [
    "conversation",
    "message",
    "evaluation_run",
    "evaluation_question",
    "vectorizer_error",
    "vectorizer_truncated",
]


def test_nobody_locks_the_tables_of_failures(db: Database, owner: Connection) -> None:
    """Whoever may DELETE from a table may lock it; then runs, writes and every DROP TABLE would wait."""
    asker = db.connect("asker")
    for table in ("vectorizer_error", "vectorizer_truncated"):
        for mode in ("ROW SHARE", "SHARE UPDATE EXCLUSIVE", "SHARE", "EXCLUSIVE", "ACCESS EXCLUSIVE"):
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
        asker.execute("CREATE TRIGGER t AFTER UPDATE ON mine FOR EACH ROW EXECUTE FUNCTION ml_rag._forget_failures()")
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


def test_rows_of_others_are_not_locked(db: Database, owner: Connection, tenant: Connection) -> None:
    tenant.execute("INSERT INTO ml_rag.conversation DEFAULT VALUES")
    asker = db.connect("asker")
    for table in TABLES:
        for strength in ("UPDATE", "SHARE"):
            statement = f"SELECT * FROM ml_rag.{table} FOR {strength}"
            asker.execute("BEGIN")
            if table in ("conversation", "vectorizer_error", "vectorizer_truncated"):
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
