"""Documents of stores as the page and the MCP server read them, while the owner of the table has other plans."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from psycopg import sql

from ml_rag.integrations import documents
from ml_rag.integrations.database import Reader
from support.cluster import Connection, Database
from support.stores import create_store, fake_embedding

WANTED = {"document": "d", "first": 0, "most": 10, "characters": 1000}
CODE = """CREATE FUNCTION evil.code() RETURNS boolean LANGUAGE plpgsql
AS $$ BEGIN RAISE EXCEPTION 'code of another ran as %', current_user; END $$"""
POLICY = "CREATE POLICY p ON evil.kb USING (evil.code()); ALTER TABLE evil.kb ENABLE ROW LEVEL SECURITY"
#: statements of the owner, in one transaction, and whether the document is read then
CHANGES = {
    "policy": POLICY,
    "view": "ALTER TABLE evil.kb RENAME TO other; CREATE VIEW evil.kb AS SELECT * FROM evil.other WHERE evil.code();"
    " GRANT SELECT ON evil.kb TO PUBLIC",
    "schema": "ALTER SCHEMA evil RENAME TO old; CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC;"
    " CREATE VIEW evil.kb AS SELECT * FROM old.kb WHERE old.code(); GRANT SELECT ON evil.kb TO PUBLIC",
}


@pytest.fixture
def evil(db: Database, tenant: Connection) -> Connection:
    owner = db.connect()
    owner.execute(sql.SQL("CREATE SCHEMA evil AUTHORIZATION {}").format(sql.Identifier(db.role("tenant"))))
    owner.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(
        sql.Identifier(owner.info.dbname), sql.Identifier(db.role("tenant"))))  # fmt: skip
    create_store(tenant, "evil.kb", [("d", 1, 1, "planted", fake_embedding("planted"))], "vector(16)")
    tenant.execute("GRANT USAGE ON SCHEMA evil TO PUBLIC; GRANT SELECT ON evil.kb TO PUBLIC")
    tenant.execute(CODE)
    return tenant


async def read(dsn: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    reader = Reader(dsn, name="test", connections=1)
    async with reader.opened():
        return await documents.read(reader, "evil.kb", WANTED)


async def test_a_plain_table_of_another_is_read(evil: Connection, asker_dsn: str) -> None:
    _, rows = await read(asker_dsn)
    assert [row["segment"] for row in rows] == ["planted"]
    evil.execute(POLICY)
    assert await read(asker_dsn) == ({}, [])


@pytest.mark.parametrize("change", CHANGES)
async def test_its_owner_puts_no_code_into_it_meanwhile(
    db: Database, evil: Connection, asker_dsn: str, change: str
) -> None:
    """The change is there, and is committed as soon as somebody waits for the table."""
    watcher = db.connect()
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'test' AND wait_event_type = 'Lock'"
    with evil.transaction():
        evil.execute(CHANGES[change])
        task = asyncio.create_task(read(asker_dsn))
        for _ in range(100):
            await asyncio.sleep(0.02)
            if task.done() or watcher.execute(waiting).fetchone() != (0,):
                break
    (found,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(found, psycopg.Error):
        assert found.sqlstate in ("55000", "55P03", "42P01"), found
    else:
        assert found[1] == []


async def test_a_locked_table_is_not_waited_for(evil: Connection, asker_dsn: str) -> None:
    with evil.transaction():
        evil.execute("LOCK TABLE evil.kb")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await asyncio.wait_for(read(asker_dsn), 5)
