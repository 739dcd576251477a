"""Documents of stores as the page and the MCP server read them."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import sql

from ml_rag.integrations import documents
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
