"""PgBouncer in transaction mode: calls of many clients on few connections of the server."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from support.borrowed_role import role_set_by_the_owner
from support.cluster import Connection, Database, value_of
from support.private_cluster import cluster_user
from support.processes import wait_until
from support.stores import create_text_store, error

PGBOUNCER = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
pytestmark = pytest.mark.skipif(not Path(PGBOUNCER).exists(), reason="pgbouncer is not installed")
_PORT = 54332  # names the socket file only


@pytest.fixture
def pooled(db: Database, owner: Connection, reachable_dir: Path) -> Iterator[dict[str, str]]:
    """Role -> DSN through a pool of two connections for each role."""
    info = conninfo_to_dict(db.dsn)
    folder = Path(tempfile.mkdtemp(dir=reachable_dir))
    roles = {name: f"{db.name}_{name}" for name in ("reader", "loader")}
    for name, group in (("reader", "ml_rag_user"), ("loader", "ml_rag_loader")):
        owner.execute(sql.SQL(f"CREATE ROLE {{}} LOGIN IN ROLE {group}").format(sql.Identifier(roles[name])))
    owner.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(sql.Identifier(roles["loader"])))
    users = {**roles, "superuser": info["user"]}
    (folder / "users.txt").write_text("".join(f'"{role}" ""\n' for role in users.values()))
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n{db.name} = host={info['host']} port={info['port']} dbname={db.name}\n"
        f"[pgbouncer]\nunix_socket_dir = {folder}\nlisten_addr =\nlisten_port = {_PORT}\nauth_type = trust\n"
        f"auth_file = {folder}/users.txt\npool_mode = transaction\ndefault_pool_size = 2\nmax_client_conn = 50\n"
    )
    for path in (folder, *folder.iterdir()):
        shutil.chown(path, cluster_user())
    process = subprocess.Popen(
        [PGBOUNCER, folder / "pgbouncer.ini"], user=cluster_user(), cwd="/", stderr=subprocess.DEVNULL
    )
    dsns = {name: f"host={folder} port={_PORT} dbname={db.name} user={role}" for name, role in users.items()}
    try:

        def answers() -> bool:
            try:
                psycopg.connect(dsns["reader"]).close()
            except psycopg.OperationalError:
                return False
            return True

        wait_until(answers, 30)
        yield dsns
    finally:
        process.terminate()
        process.wait()
        for role in roles.values():
            owner.execute(sql.SQL("DROP OWNED BY {0} CASCADE; DROP ROLE {0}").format(sql.Identifier(role)))


def call(dsn: str, statement: str, *arguments: Any) -> Any:
    # prepared statements of the client would be of a connection that the next transaction does not have
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
        cursor = connection.execute(statement, arguments or None)
        row = cursor.fetchone() if cursor.description else None
        return row and row[0]


def test_many_clients_share_two_connections(owner: Connection, pooled: dict[str, str]) -> None:
    create_text_store(owner)
    owner.execute("SELECT ml_rag.enable_keyword_search('texts')")
    calls: list[dict[str, Any]] = [{}, {"keyword_search": True}, {"semantic_search": False, "keyword_search": True}]

    def ask(i: int) -> Any:
        options = json.dumps({"skip_generate": True, "n_citations": 3, **calls[i % 3]})
        return call(pooled["reader"], "SELECT ml_rag_answer('dogs chase cats', %s)", options)

    expected = [ask(i) for i in range(3)]
    assert [e["citations"][0]["segment"] for e in expected] == ["dogs chase cats"] * 3
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(36))) == [expected[i % 3] for i in range(36)]
    role = psycopg.conninfo.conninfo_to_dict(pooled["reader"])["user"]
    assert 1 <= value_of(owner, "SELECT count(*) FROM pg_stat_activity WHERE usename = %s", (role,)) <= 2


def test_loads_and_batches_commit_as_they_go(owner: Connection, pooled: dict[str, str]) -> None:
    loader = pooled["loader"]
    assert call(loader, "SELECT ml_rag.create_store('public.docs')::text") == "docs"
    loaded = call(loader, "SELECT ml_rag.load_documents('docs', '{a,b}', ARRAY['alpha'::bytea, 'beta'::bytea])")
    assert loaded["documents"]["loaded"] == 2
    call(loader, "CREATE TABLE q AS SELECT 1 AS id, 'alpha'::text AS question")
    call(loader, "ALTER TABLE q ADD PRIMARY KEY (id), ADD answer jsonb")
    result = call(loader, "CALL ml_rag_table('public.q.question', 'public.q.answer', '{\"skip_generate\": true}')")
    assert (result["rows"], result["failed"]) == (1, 0)
    result = call(loader, "CALL ml_rag.add_embedding('docs', 'second', '{\"embed_model_id\": \"fake-embed\"}')")
    assert result["segments"] == 2
    # no lock is left behind for the next client
    locks = owner.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone()
    assert locks == (0,)


def test_the_adapters_and_the_gateway_prepare_no_statement_of_others(pooled: dict[str, str]) -> None:
    pytest.importorskip("psycopg_pool")
    from ml_rag.integrations import database

    def ask(n: int) -> set[int]:
        client = database.Database(pooled["reader"], name="ml_rag test")
        try:
            query = sql.SQL("SELECT %(n)s::integer + {} AS n").format(100 * n)
            return {client.rows(query, {"n": n})[0]["n"] for _ in range(20)}
        finally:
            client.close()

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == [{101 * n} for n in range(6)]


def test_the_adapters_take_no_session_that_has_another_role_by_then(
    db: Database, owner: Connection, pooled: dict[str, str]
) -> None:
    """The pooler opens sessions while a program runs, and the owner of the database can set their role."""
    database = pytest.importorskip("ml_rag.integrations.database")
    query = sql.SQL("SELECT current_user::text AS role")

    async def run() -> None:
        reader = database.Reader(pooled["superuser"], name="test", connections=1)
        async with reader.opened():
            assert await reader.rows(query) == application.rows(query)
            # what is there is taken, so that the pooler opens another session
            with role_set_by_the_owner(db, owner), psycopg.connect(pooled["superuser"]) as other:
                other.execute("SELECT 1")
                with pytest.raises(database.Refused, match="has another role"):
                    application.rows(query)
                with pytest.raises(database.Refused, match="has another role"):
                    await reader.rows(query)

    application = database.Database(pooled["superuser"], name="test")
    try:
        asyncio.run(run())
    finally:
        application.close()


def test_ml_rag_load_prepares_no_statement_of_others(owner: Connection, pooled: dict[str, str], tmp_path: Path) -> None:
    def load(name: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        for n in range(120):  # several calls
            (folder / f"{n}.txt").write_text(f"{name} {n}")
        command = [sys.executable, "-m", "ml_rag.cli", "load", str(folder), "--store", f"public.{name}"]
        done = subprocess.run([*command, "--dsn", pooled["loader"]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(load, ("red", "green", "blue")))
    for name in ("red", "green", "blue"):
        query = f"SELECT count(*), count(*) FILTER (WHERE segment LIKE '{name} %') FROM {name}"
        assert owner.execute(query).fetchone() == (120, 120)


def test_what_one_client_sets_for_a_transaction_is_not_the_next_ones(owner: Connection, pooled: dict[str, str]) -> None:
    create_text_store(owner)
    with psycopg.connect(pooled["reader"], prepare_threshold=None) as connection:
        connection.execute("SET LOCAL statement_timeout = 1")
        with error("57014", ours=False):
            connection.execute(
                "SELECT ml_rag_answer('cats', '{\"skip_generate\": true}') FROM generate_series(1, 1000)"
            )
    for _ in range(4):
        assert call(pooled["reader"], "SELECT ml_rag_answer('cats', '{\"skip_generate\": true}')")["citations"]
