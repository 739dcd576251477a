"""watch/watch: who sees what of the calls of others, and of what they did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Connection, Database, noticed
from support.stores import create_store, error
from support.watching import counted, gate, held, shown, stats

# what was called in a database is counted, by sessions that are told apart
pytestmark = pytest.mark.fresh

E1 = [1.0, *[0.0] * 15]


@pytest.fixture
def store(owner: Connection) -> None:
    create_store(owner, rows=[("a", 1, i, f"copper {i}", E1) for i in range(4)], type="vector(16)")


@pytest.fixture
def watcher(db: Database, owner: Connection) -> Iterator[Connection]:
    """A connection as a role that may watch the whole server, and nothing else."""
    role = f"{db.name}_watcher"
    owner.execute(f"CREATE ROLE {role}; GRANT pg_monitor TO {role}")
    connection = db.connect()
    connection.execute(f"SET SESSION AUTHORIZATION {role}")
    yield connection
    connection.close()
    owner.execute(f"DROP ROLE {role}")


def test_of_the_calls_of_others_nothing_is_told(
    db: Database,
    owner: Connection,
    asker: Connection,
    tenant: Connection,
    watcher: Connection,
    store: None,
    local_sockets: Path,
) -> None:
    same = db.connect("asker")
    with gate(owner, local_sockets, "embeddings") as server, held(server, asker, "CALL ml_rag('a secret')"):
        (hidden,) = shown(tenant)
        for connection in (same, owner, watcher):
            (row,) = shown(connection, columns="routine, stage, model, role")
            assert row == {
                "routine": "ml_rag",
                "stage": "embed",
                "model": "fake-embed",
                "role": db.role("asker"),
            }
        everything = [*shown(owner), *shown(owner, "progress")]
    known = {"pid": asker.info.backend_pid, "datname": db.name, "usename": owner.info.user}
    assert hidden == {**dict.fromkeys(hidden), **known}
    assert "secret" not in str(everything)


def test_of_the_figures_of_others_nothing_is_told(
    db: Database, owner: Connection, asker: Connection, tenant: Connection, watcher: Connection
) -> None:
    for connection in (asker, tenant, tenant):
        connection.execute("SELECT ml_embed_row('x')")
    assert counted(asker)["ml_embed_row", "total"] == (1, 0)
    assert counted(tenant)["ml_embed_row", "total"] == (2, 0)
    for connection in (owner, watcher):
        assert counted(connection)["ml_embed_row", "total"] == (3, 0)
        assert {row["role"] for row in stats(connection)} == {db.role("asker"), db.role("tenant")}


def test_a_member_of_a_role_sees_what_the_role_did(db: Database, owner: Connection, asker: Connection) -> None:
    asker.execute("SELECT ml_embed_row('x')")
    owner.execute(f"CREATE ROLE {db.name}_boss IN ROLE {db.role('asker')}")
    boss = db.connect()
    boss.execute(f"SET SESSION AUTHORIZATION {db.name}_boss")
    assert {row["role"] for row in stats(boss)} == {db.role("asker")}
    boss.close()
    owner.execute(f"DROP ROLE {db.name}_boss")


def test_what_a_dropped_role_did_still_counts(db: Database, owner: Connection, asker: Connection) -> None:
    asker.execute("SELECT ml_embed_row('x')")
    owner.execute(f"CREATE ROLE {db.name}_gone IN ROLE ml_rag_user")
    gone = db.connect()
    gone.execute(f"SET SESSION AUTHORIZATION {db.name}_gone")
    gone.execute("SELECT ml_embed_row('x')")
    gone.close()
    owner.execute(f"DROP ROLE {db.name}_gone")
    assert {row["role"] for row in stats(owner)} == {db.role("asker"), None}
    assert counted(owner)["ml_embed_row", "total"] == (2, 0)
    assert counted(asker)["ml_embed_row", "total"] == (1, 0)


def test_a_role_without_privileges_sees_nothing(stranger: Connection) -> None:
    for relation in ("activity", "progress", "stats"):
        with error("42501", ours=False):
            stranger.execute(f"SELECT * FROM ml_rag.{relation}")


def test_one_who_may_watch_may_not_ask(watcher: Connection) -> None:
    for statement in ("SELECT ml_embed_row('x')", "SELECT ml_rag.reset_stats()", "SELECT * FROM ml_rag.setting"):
        with error("42501", ours=False):
            watcher.execute(statement)
    assert shown(watcher) == []


def test_calls_of_other_databases_are_shown_too(
    cluster: Any, db: Database, owner: Connection, asker: Connection, store: None, local_sockets: Path
) -> None:
    with cluster.database() as other:
        elsewhere = other.connect()
        query = "SELECT pid FROM ml_rag.activity WHERE datname = %s"
        with gate(owner, local_sockets, "embeddings") as server, held(server, asker, "CALL ml_rag('q')"):
            # this one has another model server
            assert elsewhere.execute(query, (db.name,)).fetchall() == []
            (address,) = owner.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone() or (
                "",
            )
            elsewhere.execute("SELECT ml_rag.configure('model_server', %s)", (address,))
            assert elsewhere.execute(query, (db.name,)).fetchall() == [(asker.info.backend_pid,)]
            assert counted(elsewhere) == {}


def test_calls_in_a_read_only_transaction_are_told(owner: Connection, asker: Connection, store: None) -> None:
    asker.execute("SET default_transaction_read_only = on")
    asker.execute("SELECT ml_rag_search('q')")
    assert counted(asker)["ml_rag_search", "total"] == (1, 0)


def test_where_the_python_side_is_missing_that_is_said_and_the_views_are_empty(db: Database, owner: Connection) -> None:
    owner.execute("CREATE OR REPLACE FUNCTION ml_rag._python_path() RETURNS text LANGUAGE sql AS $$SELECT '/nowhere'$$")
    session = db.connect()
    told = noticed(session, lambda d: f"{d.message_primary} / {d.message_detail} / {d.message_hint}")
    for view, what in ("activity", "calls in flight"), ("stats", "statistics"):
        assert session.execute(f"SELECT * FROM ml_rag.{view}").fetchall() == []
        assert told.pop().startswith(f"{what} cannot be shown / the Python side of ml_rag cannot be imported: Module")
    with error("55000", "cannot be imported", "/nowhere", "make install"):
        session.execute("SELECT ml_rag.reset_stats()")
