"""ground/trust: a table of a trusted role that is given to another role during a call that has found it by itself."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.cluster import Connection, Database, noticed
from support.processes import Background, over_and_over, wait_until
from support.schema import SqlModel, ask, statement
from support.stores import create_store, error, fake_embedding, search

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


def is_waiting(db: Database, connection: Connection) -> bool:
    query = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
    with db.connect() as watcher:
        return watcher.execute(query, (connection.info.backend_pid,)).fetchone() == (True,)


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


def test_a_publisher_that_is_none_any_more_in_such_a_transaction(
    db: Database, owner: Connection, getter: Connection
) -> None:
    tenant = sql.Identifier(db.role("tenant"))
    owner.execute(sql.SQL("GRANT ml_rag_publisher TO {}").format(tenant))
    owner.execute(given(db))
    asker = db.connect("asker")
    said = noticed(asker)
    assert len(search(asker, "zebra", {"query_embedding": NEAR})) == 2
    asker.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM pg_class LIMIT 1")
    owner.execute(sql.SQL("REVOKE ml_rag_publisher FROM {}").format(tenant))
    plant(getter, "a policy")
    assert [row[1] for row in search(asker, "zebra", {"query_embedding": NEAR})] == ["public.kept"]
    assert not any("ran as" in message for message in said), said


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


@pytest.mark.parametrize("what", ["SCHEMA public", "docs"])
def test_grants_that_change_nothing_leave_no_store_out(
    db: Database, owner: Connection, getter: Connection, what: str
) -> None:
    grant = f"GRANT {'USAGE' if what.startswith('SCHEMA') else 'SELECT'} ON {what} TO PUBLIC".encode()
    caller = db.connect("asker")
    with over_and_over(lambda: getter.execute(grant)):
        for _ in range(150):
            assert len(search(caller, "zebra", {"query_embedding": NEAR})) == 2
