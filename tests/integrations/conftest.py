"""The integrations with other packages: `make integrations-test` installs these, and runs the tests; without them there
is nothing to run."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from support.cluster import Database
from support.models_server import models
from support.processes import wait_until

__all__ = ["models"]

MISSING = [name for name in ("langchain_tests", "mcp", "llama_index", "asyncpg", "psycopg_pool") if not find_spec(name)]
collect_ignore_glob = ["test_[!o]*.py"] if MISSING else []
#: in environments of their own (mk/programs.sh, mk/large_programs.sh)
collect_ignore = [
    f"test_{name}.py"
    for name, environment in {
        "other_programs": "programs", "open_webui": "open-webui", "superset": "superset", "dbt": "dbt",
    }.items()
    if not (Path(sys.prefix) / environment / "wanted").exists()
]  # fmt: skip


def pytest_report_header() -> str:
    missing = f"left out, as there is no {', '.join(MISSING)}: make integrations-test" if MISSING else "on"
    return f"integrations: {missing}"


def pytest_configure(config: pytest.Config) -> None:
    for name in ("benchmark", "vcr"):
        config.addinivalue_line("markers", f"{name}: of a plugin that the suites of LangChain name")


@contextlib.contextmanager
def login(db: Database, role: str) -> Iterator[str]:
    """A DSN as one of the roles of the tests, which may load meanwhile, and make tables in schema public."""
    name, owner = sql.Identifier(db.role(role)), db.connect()
    owner.execute(sql.SQL("ALTER ROLE {} LOGIN PASSWORD 'made for a test'").format(name))
    owner.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(name))
    owner.execute(sql.SQL("GRANT ml_rag_loader, ml_rag_publisher TO {}").format(name))
    try:
        yield make_conninfo(db.dsn, dbname=db.name, user=db.role(role), password="made for a test")
    finally:
        # roles are the cluster's, and other tests have the same ones
        owner.execute(sql.SQL("REVOKE ml_rag_loader, ml_rag_publisher FROM {}").format(name))
        owner.execute(sql.SQL("ALTER ROLE {} NOLOGIN").format(name))


@pytest.fixture
def asker_dsn(db: Database) -> Iterator[str]:
    with login(db, "asker") as dsn:
        yield dsn


@pytest.fixture
def tenant_dsn(db: Database) -> Iterator[str]:
    with login(db, "tenant") as dsn:
        yield dsn


#: has calls wait for a table, and cancels them
Cancel = Callable[..., Coroutine[Any, Any, None]]


@pytest.fixture
def cancel(db: Database) -> Cancel:
    """Cancel calls that wait for a table, once they all do: their statements end while it is still locked."""
    holder, watcher = db.connect(), db.connect()
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND application_name IN ('ml_rag langchain', 'ml_rag llama-index')"
    )

    def waiting(count: int) -> None:
        wait_until(lambda: watcher.execute(query).fetchone() == (count,))

    async def cancel(table: str, *calls: Callable[[], Coroutine[Any, Any, Any]], schema: str = "public") -> None:
        with holder.transaction():
            holder.execute(sql.SQL("LOCK TABLE {}").format(sql.Identifier(schema, table)))
            tasks = [asyncio.create_task(call()) for call in calls]
            await asyncio.to_thread(waiting, len(calls))
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [asyncio.CancelledError] * len(calls)
            await asyncio.to_thread(waiting, 0)

    return cancel


@pytest.fixture
def trap(boats: str) -> Iterator[psycopg.Connection]:
    """A view, public.trap, that writes where it is read: it runs with the rights of who made it."""
    with psycopg.connect(boats, autocommit=True) as connection:
        connection.execute("CREATE TABLE written (n integer)")
        connection.execute(
            "CREATE FUNCTION writes() RETURNS text LANGUAGE sql VOLATILE"
            " AS $$ INSERT INTO public.written VALUES (1); SELECT 'written' $$"
        )
        connection.execute("CREATE VIEW trap AS SELECT writes() AS segment, b.segment_embedding FROM boats AS b")
        connection.execute("COMMENT ON COLUMN trap.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
        yield connection
