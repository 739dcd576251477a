"""Documents of stores as the page and the MCP server read them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import anyio
import psycopg
import pytest
from psycopg import sql

from ml_rag.integrations import documents, mcp
from ml_rag.integrations.database import Reader
from support.cluster import Connection, Database
from support.exchange import exchange
from support.forward import by_tcp
from support.planting import BROKEN
from support.stores import create_store, fake_embedding, mark

WANTED = {"document": "d", "first": 0, "most": 10, "characters": 1000}


@pytest.fixture
def evil(db: Database, tenant: Connection) -> Connection:
    owner = db.connect()
    owner.execute(sql.SQL("CREATE SCHEMA evil AUTHORIZATION {}").format(sql.Identifier(db.role("tenant"))))
    create_store(tenant, "evil.kb", [("d", 1, 1, "planted", fake_embedding("planted"))], "vector(16)")
    tenant.execute("GRANT USAGE ON SCHEMA evil TO PUBLIC; GRANT SELECT ON evil.kb TO PUBLIC")
    return tenant


async def read(dsn: str) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]]:
    reader = Reader(dsn, name="test", connections=1)
    async with reader.opened():
        return await documents.read(reader, "evil.kb", WANTED)


async def test_documents_are_read_of_stores_of_trusted_owners(db: Database, evil: Connection, asker_dsn: str) -> None:
    assert await read(asker_dsn) == ({}, [], [])
    owner, tenant = db.connect(), sql.Identifier(db.role("tenant"))
    owner.execute(sql.SQL("GRANT ml_rag_publisher TO {}").format(tenant))
    try:
        _, _, rows = await read(asker_dsn)
        assert [row["segment"] for row in rows] == ["planted"]
    finally:
        owner.execute(sql.SQL("REVOKE ml_rag_publisher FROM {}").format(tenant))


async def test_what_a_view_reads_may_be_in_a_schema_that_its_readers_may_not_use(db: Database, asker_dsn: str) -> None:
    owner = db.connect()
    owner.execute("CREATE SCHEMA private")
    create_store(owner, "private.notes", [("d", 1, 1, "the plan", fake_embedding("the plan"))], "vector(16)")
    owner.execute("CREATE VIEW notes AS SELECT * FROM private.notes; GRANT SELECT ON notes TO PUBLIC")
    mark(owner, "public.notes")
    reader = Reader(asker_dsn, name="test", connections=1)
    async with reader.opened():
        _, _, rows = await documents.read(reader, "public.notes", WANTED)
        assert [row["segment"] for row in rows] == ["the plan"]


async def test_a_name_that_is_no_text_keeps_none_from_the_others(db: Database, asker_dsn: str) -> None:
    owner = db.connect()
    create_store(owner, "notes", [("folder/d", 1, 1, "the plan", fake_embedding("the plan"))], "vector(16)")
    owner.execute(BROKEN)
    owner.execute(
        "INSERT INTO notes (document_name, metadata, segment, document_id, segment_number)"
        " VALUES (split_part(pg_temp.broken(), chr(34), 2), '{}', 'x', 2, 1)"
    )
    reader = Reader(asker_dsn, name="test", connections=1)
    async with reader.opened():
        _, alike, rows = await documents.read(reader, "public.notes", WANTED)
        assert (alike, [row["segment"] for row in rows]) == (["folder/d"], ["the plan"])


async def test_no_operator_of_another_role_runs(db: Database, tenant: Connection, asker_dsn: str) -> None:
    """pg_catalog compares an oid with a regclass by a cast, and an operator on the path needs none."""
    owner = db.connect()
    create_store(owner, "public.notes", [("d", 1, 1, "the plan", fake_embedding("the plan"))], "vector(16)")
    owner.execute("GRANT SELECT ON notes TO PUBLIC; GRANT CREATE ON SCHEMA public TO PUBLIC")
    tenant.execute(
        "CREATE FUNCTION public.planted(oid, regclass) RETURNS boolean LANGUAGE plpgsql"
        " AS $$BEGIN RAISE 'ran as %', current_user; END$$;"
        "CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.planted)"
    )
    reader = Reader(asker_dsn, name="test", connections=1)
    async with reader.opened():
        _, _, rows = await documents.read(reader, "public.notes", WANTED)
        assert [row["segment"] for row in rows] == ["the plan"]
        async with reader.transaction() as statements:
            assert len(await statements(mcp._STORES)) == 1


def test_what_takes_the_name_of_a_store_that_is_waited_for_runs_no_code(db: Database, asker_dsn: str) -> None:
    """Any role that may create in its schema can have it waited for, until it has planted what it wants."""
    owner, holder, queue, attacker = db.connect(), *(db.connect("tenant") for _ in range(3))
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    create_store(owner, "docs", [("d", 1, 1, "text", fake_embedding("text"))], "vector(16)")
    said: list[str] = []

    async def call() -> None:
        reader = Reader(asker_dsn, name="test", connections=1)
        async with reader.opened():
            async with reader._pool.connection() as connection:
                connection.add_notice_handler(lambda d: said.append(d.message_primary or ""))
                await connection.execute("SET statement_timeout = '10s'")
            for _ in range(2):
                with contextlib.suppress(psycopg.Error):
                    await documents.read(reader, "public.docs", WANTED)

    plant = (
        "SELECT 'd' AS document_name, '{}'::jsonb AS metadata, 1::bigint AS document_id, 1 AS segment_number,"
        " 'planted' AS segment, NULL::vector(16) AS segment_embedding FROM generate_series(1, 3) WHERE public.evil();"
        "GRANT SELECT ON docs TO PUBLIC"
    )
    exchange(owner, "docs", plant, holder, queue, attacker, lambda: asyncio.run(call()))
    assert not any("ran as" in message for message in said), said


async def test_what_anyio_cancels_ends_in_the_database(db: Database, asker_dsn: str) -> None:
    """Starlette ends a stream by it, and MCP a call: it cancels again while psycopg asks the server to."""
    running = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'cancelled' AND state = 'active'"
    with by_tcp(asker_dsn) as dsn:
        reader = Reader(dsn, name="cancelled", connections=1)
        async with reader.opened():
            with anyio.move_on_after(0.5) as scope:
                await reader.rows(sql.SQL("SELECT pg_catalog.pg_sleep(60)"))
            assert scope.cancelled_caught
            assert db.connect().execute(running).fetchone() == (0,)
            assert await reader.rows(sql.SQL("SELECT 1 AS one")) == [{"one": 1}]
