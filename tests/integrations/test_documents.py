"""Documents of stores as the page and the MCP server read them."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import sql

from ml_rag.integrations import documents, mcp
from ml_rag.integrations.database import Reader
from support.cluster import Connection, Database
from support.stores import create_store, fake_embedding

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
