"""ground/trust: a table of a trusted role that is given to another role during a call that has found it by itself."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.cluster import Connection, Database, is_waiting, noticed
from support.processes import Background, over_and_over, wait_until
from support.schema import SqlModel, ask, statement
from support.schemas import renamed
from support.stores import as_text, create_store, error, fake_embedding, search

#: what the role that got the table does to it; some wait for its lock before they ask whose it is
PLANTS = {
    "a child": "CREATE TABLE own.child (CHECK (own.evil(1))) INHERITS ({table})",
    "statistics": "CREATE STATISTICS own.s ON (own.evil(1) AND segment = 'x'), segment FROM {table}",
    "a policy": "ALTER TABLE {table} ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON {table} USING (own.evil(1))",
}
NEAR = fake_embedding("zebra")


@pytest.fixture
def getter(db: Database, owner: Connection) -> Connection:
    """Gets table docs; the store beside it is kept."""
    tenant = sql.Identifier(db.role("tenant"))
    for name in ("docs", "kept"):
        create_store(owner, name, [(name, 1, 1, "zebra", NEAR)], "vector(16)")
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(tenant))
    owner.execute(sql.SQL("GRANT USAGE, CREATE ON SCHEMA public TO {}").format(tenant))
    connection = db.connect("tenant")
    connection.execute(
        "SET lock_timeout = '5s'; GRANT USAGE ON SCHEMA own TO PUBLIC;"
        "CREATE FUNCTION own.evil(integer) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$"
    )
    return connection


def given(db: Database, table: str = "docs") -> sql.Composed:
    return sql.SQL("ALTER TABLE {} OWNER TO {}").format(
        sql.Identifier(*table.split(".")), sql.Identifier(db.role("tenant"))
    )


def plant(getter: Connection, what: str, table: str = "docs") -> None:
    getter.execute(PLANTS[what].format(table=table).encode())


@pytest.mark.parametrize("options", [{"query_embedding": NEAR}, {}, {"semantic_search": False, "keyword_search": True}])
@pytest.mark.parametrize("what", ["a child", "statistics"])
@pytest.mark.parametrize("role", ["asker", None])
def test_while_its_lock_is_waited_for(
    db: Database, owner: Connection, getter: Connection, role: str | None, what: str, options: dict[str, Any]
) -> None:
    if "keyword_search" in options:
        owner.execute("SELECT ml_rag.enable_keyword_search(t) FROM unnest(ARRAY['docs', 'kept']) AS t")
    caller = db.connect(role)
    assert len(search(caller, "zebra", options)) == 2
    said = noticed(caller)
    owner.execute("BEGIN")
    owner.execute(given(db))
    first = Background(lambda: plant(getter, what))
    wait_until(lambda: is_waiting(db, getter))
    second = Background(lambda: search(caller, "zebra", options))
    wait_until(lambda: is_waiting(db, caller))
    owner.execute("COMMIT")
    first.join()
    found = second.result()
    assert not any("ran as" in message for message in said), said
    assert [row[1] for row in found] == ["public.kept"]
    assert any('"public.docs" cannot be searched' in message for message in said), said


@pytest.mark.parametrize(
    "options",
    [
        {"filters": True},
        {"hypothetical_document": True},
        {"history": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ],
)
@pytest.mark.parametrize("what", ["a child", "a policy"])
@pytest.mark.parametrize("role", ["asker", None])
def test_while_a_model_writes_another_question(
    db: Database,
    owner: Connection,
    getter: Connection,
    model: SqlModel,
    role: str | None,
    what: str,
    options: dict[str, Any],
) -> None:
    owner.execute("ALTER TABLE docs ADD year integer; ALTER TABLE kept ADD year integer; SET lock_timeout = '3s'")
    written = json.dumps({"question": "zebra", "filters": {}, "text": "zebra", "answer": "zebra"})

    has_given: list[bool] = []

    def give(_: Any) -> str:
        if not has_given:
            has_given.append(True)
            with contextlib.suppress(psycopg.errors.LockNotAvailable):  # it is held by what the question was read with
                owner.execute(given(db))
                plant(getter, what)
        return written

    model.answers = [give]
    caller = db.connect(role)
    said = noticed(caller)
    options = {"query_options": {**options, "model_id": "fake-generate"}}
    found = search(caller, "zebra", options)
    assert not any("ran as" in message for message in said), said
    assert "public.kept" in [row[1] for row in found]


@pytest.mark.parametrize("what", ["a child", "a policy"])
@pytest.mark.parametrize("role", ["asker", None])
def test_while_a_model_writes_a_statement(
    db: Database, owner: Connection, getter: Connection, model: SqlModel, shop: Connection, role: str | None, what: str
) -> None:
    owner.execute(f"GRANT USAGE, CREATE ON SCHEMA shop TO {db.role('tenant')}")

    def give(_: Any) -> dict[str, Any]:
        owner.execute(given(db, "shop.orders"))
        plant(getter, what, "shop.orders")
        return statement("SELECT count(*) FROM shop.orders WHERE id > 0")

    model.answers = [give]
    caller = db.connect(role)
    said = noticed(caller)
    found = ask(caller, use_retry=False)
    assert not any("ran as" in message for message in said), said
    assert "none of the tables that may be queried" in found["reason"]


@pytest.mark.parametrize("role", ["asker", None])
@pytest.mark.parametrize("what", ["a child", "a policy"])
def test_a_transaction_with_an_older_snapshot(
    db: Database, owner: Connection, getter: Connection, role: str | None, what: str
) -> None:
    caller = db.connect(role)
    said = noticed(caller)
    assert len(search(caller, "zebra", {"query_embedding": NEAR})) == 2
    caller.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM pg_class LIMIT 1")
    owner.execute(given(db))
    plant(getter, what)
    assert [row[1] for row in search(caller, "zebra", {"query_embedding": NEAR})] == ["public.kept"]
    assert '"public.docs" cannot be searched; ignored' in said
    with error("P0002", "no vector store found") as caught:
        search(caller, "zebra", {"query_embedding": NEAR, "vector_store": ["docs"]})
    assert "changed after your transaction began" in str(caught.detail)
    assert not any("ran as" in message for message in said), said


#: what makes a role trusted, and what ends it
LOST = {
    "a publisher": ("GRANT ml_rag_publisher TO {tenant}", "REVOKE ml_rag_publisher FROM {tenant}"),
    "a superuser": ("ALTER ROLE {tenant} SUPERUSER", "ALTER ROLE {tenant} NOSUPERUSER"),
    "the owner of the database": ("ALTER DATABASE {name} OWNER TO {tenant}", "ALTER DATABASE {name} OWNER TO {me}"),
    "whom superusers do not trust": ("GRANT ml_rag_publisher TO {tenant}", "ALTER ROLE {asker} SUPERUSER"),
}


@pytest.mark.parametrize("why", LOST)
def test_a_role_that_is_not_trusted_any_more_in_such_a_transaction(
    db: Database, owner: Connection, getter: Connection, why: str
) -> None:
    roles = {name: sql.Identifier(db.role(name)) for name in ("tenant", "asker")}
    names = {**roles, "name": sql.Identifier(db.name), "me": sql.Identifier(owner.info.user)}
    begin, end = (sql.SQL(statement).format(**names) for statement in LOST[why])
    owner.execute(begin)
    try:
        getter.execute("CREATE FUNCTION own.other() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RETURN true; END $$")
        getter.execute(
            "CREATE VIEW own.seen AS SELECT * FROM kept WHERE own.other(); GRANT SELECT ON own.seen TO PUBLIC"
        )
        getter.execute("COMMENT ON COLUMN own.seen.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
        asker = db.connect("asker")
        said = noticed(asker)
        assert len(search(asker, "zebra", {"query_embedding": NEAR})) == 3
        asker.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM pg_class LIMIT 1")
        owner.execute(end)
        trusts = "SELECT ml_rag._trusts(%s::regrole), ml_rag._trusts(%s::regrole)"
        given = (db.role("tenant"), db.role("stranger"))
        assert asker.execute(trusts, given).fetchone() == (False, False)
        getter.execute(
            "CREATE OR REPLACE FUNCTION own.other() RETURNS boolean LANGUAGE plpgsql AS"
            " $$ BEGIN RETURN own.evil(1); END $$"
        )
        with contextlib.suppress(psycopg.errors.NoDataFound):  # with the database goes the owner of schema public
            assert "own.seen" not in {row[1] for row in search(asker, "zebra", {"query_embedding": NEAR})}
        assert not any("ran as" in message for message in said), said
    finally:
        for statement in (
            "ALTER ROLE {tenant} NOSUPERUSER",
            "ALTER ROLE {asker} NOSUPERUSER",
            "REVOKE ml_rag_publisher FROM {tenant}",
            "ALTER DATABASE {name} OWNER TO {me}",
        ):
            owner.execute(sql.SQL(statement).format(**names))


@pytest.mark.parametrize("role", ["asker", None])
def test_a_part_that_is_attached_while_the_question_is_embedded(
    db: Database, owner: Connection, getter: Connection, model: SqlModel, role: str | None
) -> None:
    owner.execute(
        "CREATE TABLE child () INHERITS (docs); CREATE VIEW seen AS SELECT * FROM docs; GRANT SELECT ON seen TO PUBLIC;"
        "COMMENT ON COLUMN seen.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'; SET lock_timeout = '3s'"
    )
    caller = db.connect(role)
    search(caller, "zebra")
    said = noticed(caller)

    def attach() -> None:
        model.meanwhile = None
        owner.execute("CREATE TABLE own.part () INHERITS (docs)")
        owner.execute(given(db, "own.part"))
        getter.execute("ALTER TABLE own.part ADD CHECK (own.evil(1))")

    model.meanwhile = attach
    search(caller, "zebra horse")
    assert not any("ran as" in message for message in said), said


#: what makes store seen, and the table that is given away: what seen reads has children
READ_WITH = {
    "a view": ("CREATE TABLE child () INHERITS (docs); CREATE VIEW seen AS SELECT * FROM docs", "child"),
    "a view of a view": (
        "CREATE TABLE child () INHERITS (docs); CREATE VIEW inner_view AS SELECT * FROM docs;"
        "CREATE VIEW seen AS SELECT * FROM inner_view",
        "child",
    ),
    "a policy": (
        "CREATE TABLE allowed (x integer); CREATE TABLE child () INHERITS (allowed); INSERT INTO child VALUES (1);"
        "GRANT SELECT ON allowed TO PUBLIC; CREATE TABLE seen AS TABLE docs;"
        "ALTER TABLE seen ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY p ON seen USING (EXISTS (SELECT FROM allowed WHERE x > 0))",
        "child",
    ),
    "a view, in a schema that the caller may not use": (
        "CREATE SCHEMA closed; CREATE TABLE closed.child () INHERITS (docs); CREATE VIEW seen AS SELECT * FROM docs",
        "closed.child",
    ),
}
#: holds the lock until it has done the rest: a call that waits for it does not come first
PLANT_BELOW = (
    "CREATE RULE waits AS ON UPDATE TO {table} DO INSTEAD NOTHING;"
    "CREATE TABLE own.grandchild (CHECK (own.evil(1))) INHERITS ({table})"
)


@pytest.mark.parametrize("what", READ_WITH)
@pytest.mark.parametrize("role", ["asker", None])
def test_a_child_of_what_a_store_reads_while_its_lock_is_waited_for(
    db: Database, owner: Connection, getter: Connection, role: str | None, what: str
) -> None:
    made, table = READ_WITH[what]
    owner.execute(f"{made}; COMMENT ON COLUMN docs.segment_embedding IS NULL; GRANT SELECT ON seen TO PUBLIC")
    owner.execute("COMMENT ON COLUMN seen.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    if "." in table:
        owner.execute(f"GRANT USAGE ON SCHEMA closed TO {db.role('tenant')}")
    caller = db.connect(role)
    assert [row[1] for row in search(caller, "zebra", {"query_embedding": NEAR})] == ["public.kept", "public.seen"]
    said = noticed(caller)
    owner.execute("BEGIN")
    owner.execute(given(db, table))
    first = Background(lambda: getter.execute(PLANT_BELOW.format(table=table).encode()))
    wait_until(lambda: is_waiting(db, getter))
    second = Background(lambda: search(caller, "zebra", {"query_embedding": NEAR}))
    wait_until(lambda: is_waiting(db, caller) or second.ended)
    owner.execute("COMMIT")
    first.result()
    found = second.result()
    assert not any("ran as" in message for message in said), said
    if role is not None or what != "a policy":  # policies do not apply to superusers
        assert [row[1] for row in found] == ["public.kept"]


@pytest.mark.parametrize("role", ["asker", None])
def test_a_child_of_what_a_statement_of_a_model_reads_while_its_lock_is_waited_for(
    db: Database, owner: Connection, getter: Connection, model: SqlModel, shop: Connection, role: str | None
) -> None:
    owner.execute(f"GRANT USAGE, CREATE ON SCHEMA shop TO {db.role('tenant')}")
    owner.execute("CREATE TABLE shop.part () INHERITS (shop.orders)")
    model.writes("SELECT count(*) FROM shop.orders WHERE id > 0")
    caller = db.connect(role)
    assert ask(caller, use_retry=False)["rows"] == [[100]]
    said = noticed(caller)
    owner.execute("BEGIN")
    owner.execute(given(db, "shop.part"))
    first = Background(lambda: getter.execute(PLANT_BELOW.format(table="shop.part").encode()))
    wait_until(lambda: is_waiting(db, getter))
    second = Background(lambda: ask(caller, use_retry=False))
    wait_until(lambda: is_waiting(db, caller) or second.ended)
    owner.execute("COMMIT")
    first.result()
    found = second.result()
    assert not any("ran as" in message for message in said), said
    assert "none of the tables that may be queried" in found["reason"]


def exchange(db: Database, owner: Connection, getter: Connection, table: str) -> None:
    """Schema kb of a store gets another name, and a role that may create schemas takes the former one."""
    if not renamed(owner, "kb", "kb_former"):
        return  # the call holds its name
    getter.execute(
        "CREATE SCHEMA kb; GRANT USAGE ON SCHEMA kb TO PUBLIC; CREATE VIEW kb.docs AS"
        " SELECT 'planted' AS document_name, '{}'::jsonb AS metadata, 1::bigint AS document_id, 1 AS segment_number,"
        f" 'planted' AS segment, '{as_text(NEAR)}'::vector(16) AS segment_embedding, '(0,1)'::tid AS ctid"
        " WHERE own.evil(1); GRANT SELECT ON kb.docs TO PUBLIC".encode()
    )


def attach(db: Database, owner: Connection, getter: Connection, table: str) -> None:
    """A table gets another child, which is given away at once."""
    owner.execute(f"CREATE TABLE own.part () INHERITS ({table})")
    owner.execute(given(db, "own.part"))
    getter.execute("ALTER TABLE own.part ADD CHECK (own.evil(1))")


def make_store(db: Database, owner: Connection) -> None:
    """Store kb.docs, which has a child, for those beside it."""
    owner.execute("DROP TABLE kept; CREATE SCHEMA kb; ALTER TABLE docs SET SCHEMA kb; SET lock_timeout = '3s'")
    owner.execute("CREATE TABLE kb.child () INHERITS (kb.docs); GRANT USAGE ON SCHEMA kb TO PUBLIC")
    owner.execute(f"GRANT CREATE ON DATABASE {db.name} TO {db.role('tenant')}")


@pytest.mark.parametrize("change", [exchange, attach])
@pytest.mark.parametrize("role", ["asker", None])
def test_neighbours_that_are_read_after_a_reranker(
    db: Database, owner: Connection, getter: Connection, model: SqlModel, role: str | None, change: Any
) -> None:
    make_store(db, owner)
    caller = db.connect(role)
    said = noticed(caller)
    model.meanwhile = lambda: change(db, owner, getter, "kb.docs")
    options = {"query_embedding": NEAR, "rerank": {"model_id": "fake-rerank"}}
    found = search(caller, "zebra", options | {"retrieval_options": {"segment_overlap": 1}})
    assert [row[5] for row in found] == ["zebra"]
    assert not any("ran as" in message for message in said), said
    assert ("the neighbours of segments cannot be read" in said) == (change is attach)


@pytest.mark.parametrize("change", [exchange, attach])
@pytest.mark.parametrize("others", [[], [{"search": "semantic"}]])
@pytest.mark.parametrize("role", ["asker", None])
def test_a_statement_that_follows_a_function_of_the_caller(
    db: Database, owner: Connection, getter: Connection, role: str | None, others: list[Any], change: Any
) -> None:
    make_store(db, owner)
    owner.execute(
        "CREATE FUNCTION slow(q text, t text) RETURNS float8 LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN 1.0; END $$"
    )
    caller, gate = db.connect(role), db.connect()
    said = noticed(caller)
    gate.execute("SELECT pg_advisory_lock(42)")
    options = {"query_embedding": NEAR, "arms": [{"search": "function", "function": "public.slow"}, *others]}
    call = Background(lambda: search(caller, "zebra", options))
    wait_until(lambda: is_waiting(db, caller))
    change(db, owner, getter, "kb.docs")
    gate.execute("SELECT pg_advisory_unlock(42)")
    if change is exchange:
        assert [row[5] for row in call.result()] == ["zebra"]
    else:
        with error("P0002", "no vector store found"):
            call.result()
    assert not any("ran as" in message for message in said), said


@pytest.mark.parametrize("role", ["asker", None])
def test_a_store_that_is_named_while_a_model_writes_another_question(
    db: Database, owner: Connection, getter: Connection, model: SqlModel, role: str | None
) -> None:
    make_store(db, owner)
    owner.execute("ALTER TABLE kb.docs ADD year integer")

    def give(_: Any) -> str:
        exchange(db, owner, getter, "kb.docs")
        return json.dumps({"question": "zebra", "filters": {}})

    model.answers = [give]
    caller = db.connect(role)
    said = noticed(caller)
    options = {"query_options": {"filters": True, "model_id": "fake-generate"}, "query_embedding": NEAR}
    found = search(caller, "zebra", options | {"vector_store": ["kb.docs"]})
    assert [row[5] for row in found] == ["zebra"]
    assert not any("ran as" in message for message in said), said


@pytest.mark.parametrize("what", ["SCHEMA public", "docs"])
def test_grants_that_change_nothing_leave_no_store_out(
    db: Database, owner: Connection, getter: Connection, what: str
) -> None:
    grant = f"GRANT {'USAGE' if what.startswith('SCHEMA') else 'SELECT'} ON {what} TO PUBLIC".encode()
    caller = db.connect("asker")
    with over_and_over(lambda: getter.execute(grant)):
        for _ in range(150):
            assert len(search(caller, "zebra", {"query_embedding": NEAR})) == 2


@pytest.mark.parametrize("options", [{"query_embedding": NEAR}, {}])
def test_stores_that_are_all_locked_are_waited_for_once(
    db: Database, owner: Connection, getter: Connection, model: SqlModel, options: dict[str, Any]
) -> None:
    caller = db.connect("asker")
    caller.execute("SET lock_timeout = '50ms'")
    assert len(search(caller, "zebra", options)) == 2
    owner.execute("BEGIN; LOCK TABLE docs, kept IN ACCESS EXCLUSIVE MODE")
    with error("55P03", "canceling statement due to lock timeout"):
        search(caller, "zebra", options)
    owner.execute("COMMIT")
    assert len(search(caller, "zebra", options)) == 2


MADE = {
    "a store": ("CREATE TABLE child () INHERITS (docs)", "docs"),
    "what a view reads": (
        "CREATE TABLE child () INHERITS (docs); COMMENT ON COLUMN docs.segment_embedding IS NULL;"
        "CREATE VIEW seen AS SELECT * FROM docs; GRANT SELECT ON seen TO PUBLIC;"
        "COMMENT ON COLUMN seen.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'",
        "docs",
    ),
    "what a policy reads": (
        "CREATE TABLE allowed (x integer); CREATE TABLE child () INHERITS (allowed); INSERT INTO allowed VALUES (1);"
        "GRANT SELECT ON allowed TO PUBLIC; ALTER TABLE docs ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY p ON docs USING (EXISTS (SELECT FROM allowed WHERE x > 0))",
        "allowed",
    ),
    "a table of statements": ("CREATE TABLE child () INHERITS (shop.orders)", "shop.orders"),
}


@pytest.mark.parametrize("what", MADE)
@pytest.mark.parametrize("role", ["asker", None])
def test_a_child_that_comes_while_another_is_waited_for(
    db: Database, owner: Connection, getter: Connection, model: SqlModel, shop: Connection, role: str | None, what: str
) -> None:
    made, parent = MADE[what]
    owner.execute(f"DROP TABLE kept; {made}".encode())
    model.writes("SELECT count(*) FROM shop.orders WHERE id > 0")
    caller, gate = db.connect(role), db.connect()

    def call() -> Any:
        if parent == "shop.orders":
            return ask(caller, use_retry=False).get("rows")
        return search(caller, "zebra", {"query_embedding": NEAR})

    assert len(call()) == 1
    said = noticed(caller)
    gate.execute("BEGIN; LOCK TABLE ONLY child IN ACCESS EXCLUSIVE MODE")
    second = Background(call)
    wait_until(lambda: is_waiting(db, caller) or second.ended)
    owner.execute(f"CREATE TABLE late () INHERITS ({parent})".encode())
    owner.execute("BEGIN")
    owner.execute(given(db, "late"))
    first = Background(lambda: getter.execute(PLANT_BELOW.format(table="late").encode()))
    wait_until(lambda: is_waiting(db, getter))
    gate.execute("COMMIT")
    wait_until(lambda: is_waiting_for(db, caller, "late") or second.ended)
    owner.execute("COMMIT")
    first.join()
    with contextlib.suppress(psycopg.errors.NoDataFound):
        second.result()
    assert not any("ran as" in message for message in said), said


def is_waiting_for(db: Database, connection: Connection, table: str) -> bool:
    query = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = %s AND relation = %s::regclass AND NOT granted)"
    with db.connect() as watcher:
        return watcher.execute(query, (connection.info.backend_pid, table)).fetchone() == (True,)
