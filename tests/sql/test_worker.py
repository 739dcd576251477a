"""``ml-rag worker``, as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from ml_rag.client.metrics_server import MOST
from ml_rag.client.worker import LISTED, LOOKING, Worker
from support.cluster import Connection, Database, value_of
from support.models_server import ModelsServer
from support.processes import free_port, over_and_over, wait_until
from support.vectorizers import ITEMS, assert_in_step, create, failures, pending, run


@contextmanager
def worker(db: Database, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "ml_rag.cli", "worker", *options]
    process = subprocess.Popen(
        command,
        env=os.environ | {"ML_RAG_DSN": make_conninfo(db.dsn, dbname=db.name)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def is_listening(connection: Connection, n: int = 1) -> bool:
    """Whether so many workers have nothing to do."""
    statement = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ml-rag worker' AND state = 'idle'"
        # it has looked for what waits, and sleeps
        " AND datname = current_database() AND query ~ 'ml_rag\\._vectorize'"
    )
    return connection.execute(statement).fetchone() == (n,)


def test_it_embeds_what_is_written_and_ends_at_sigterm(db: Database, items: Connection) -> None:
    with worker(db, "--idle", "3600") as process:
        wait_until(lambda: is_listening(items))
        items.execute("INSERT INTO items VALUES (10, 'hat', 'of straw')")
        wait_until(lambda: pending(items) == 0)
        items.execute("UPDATE items SET name = 'cap' WHERE id = 10")
        wait_until(lambda: pending(items) == 0)
        wait_until(lambda: is_listening(items))
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=10)
    assert process.returncode == 0
    # in one run or in two
    assert sum(map(int, re.findall(r"public\.items: (\d+) embedded, 0 failed", said))) == 2
    assert "Warning" not in said
    assert said.endswith("ended\n")
    assert_in_step(items)


def test_sigterm_in_the_middle_of_a_batch(db: Database, items: Connection, models: ModelsServer) -> None:
    items.execute("INSERT INTO items VALUES (10, 'hat', 'of straw')")
    with worker(db) as process:
        models.before[0] = lambda: (process.send_signal(signal.SIGTERM), process.wait(timeout=10))
        process.wait(timeout=20)
    assert process.returncode == 0
    assert pending(items) == 1
    locks = (
        "SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
        " WHERE l.locktype = 'advisory' AND d.datname = current_database()"
    )
    wait_until(lambda: items.execute(locks).fetchone() == (0,))


def test_several_are_fair_to_tables_and_share_the_rows(db: Database, items: Connection, models: ModelsServer) -> None:
    items.execute(ITEMS.replace("items", "small"))
    create(items, "small")
    items.execute("INSERT INTO items SELECT i, 'name ' || i FROM generate_series(10, 1500) AS i")
    items.execute("INSERT INTO small VALUES (1, 'little', 'one')")
    models.requests.clear()
    with worker(db, "--once", "--batches", "1") as one, worker(db, "--once", "--batches", "1") as two:
        assert (one.wait(60), two.wait(60)) == (0, 0)
    assert_in_step(items)
    assert_in_step(items, "small")
    embedded = models.embedded("fake-embed")
    assert len(embedded) == len(set(embedded)) == 1492
    # the small table does not wait for the large one
    assert embedded.index("little: one") < 1000


def test_a_table_that_fails_is_tried_again_and_holds_up_no_other(
    db: Database, items: Connection, models: ModelsServer
) -> None:
    items.execute(ITEMS.replace("items", "later"))
    create(items, "later")
    items.execute("INSERT INTO items VALUES (11, 'hat', ''); INSERT INTO later VALUES (1, 'x', 'y')")
    items.execute(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$;"
        "CREATE TRIGGER fail BEFORE UPDATE ON items FOR EACH ROW EXECUTE FUNCTION fail()"
    )
    with worker(db, "--idle", "0.2") as process:
        wait_until(lambda: pending(items, "later") == 0)
        items.execute("DROP TRIGGER fail ON items")
        wait_until(lambda: pending(items) == 0)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=10)
    assert "items: again in 1 s: not now (P0001)" in said
    assert process.returncode == 0
    assert_in_step(items)


def test_a_table_that_somebody_locks_holds_up_no_other(db: Database, items: Connection) -> None:
    """Whoever may write to a table can lock it for as long as they like."""
    items.execute(ITEMS.replace("items", "later"))
    create(items, "later")
    items.execute(f"GRANT UPDATE ON items TO {db.role('tenant')}; INSERT INTO later VALUES (1, 'x', 'y')")
    holder = db.connect("tenant")
    holder.execute("BEGIN; LOCK TABLE items IN ACCESS EXCLUSIVE MODE")
    found = items.execute("SELECT relation::text, pending, reason FROM ml_rag.vectorizer ORDER BY 1").fetchall()
    assert found == [("items", None, "canceling statement due to lock timeout"), ("later", 1, None)]
    assert items.execute("SHOW lock_timeout").fetchone() == ("0",)
    with worker(db, "--idle", "0.2"):
        wait_until(lambda: items.execute("SELECT count(segment_embedding) FROM later").fetchone() == (1,))
    holder.execute("ROLLBACK")


def test_a_lost_connection_is_made_again(db: Database, items: Connection) -> None:
    with worker(db, "--idle", "3600") as process:
        wait_until(lambda: is_listening(items))
        items.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'ml-rag worker'")
        items.execute("INSERT INTO items VALUES (10, 'hat', 'of straw')")
        wait_until(lambda: pending(items) == 0, 60)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=10)
    assert "the database is not to be reached; again in 1 s" in said
    assert process.returncode == 0


def test_metrics(db: Database, items: Connection) -> None:
    port = free_port()

    def metrics() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    items.execute("INSERT INTO items VALUES (10, 'hat', 'of straw'), (11, '', NULL)")
    with worker(db, "--idle", "0.2", "--metrics-port", str(port)):
        wait_until(lambda: is_listening(items))
        wait_until(lambda: metrics().get('ml_rag_worker_failed_rows{relation="public.items"}') == 1)
        found = metrics()
        assert found['ml_rag_worker_rows_total{outcome="embedded",relation="public.items"}'] == 1
        assert found['ml_rag_worker_rows_total{outcome="failed",relation="public.items"}'] == 1
        assert found['ml_rag_worker_pending_rows{relation="public.items"}'] == 0
        assert found['ml_rag_worker_turn_seconds_count{relation="public.items"}'] >= 1
        looked = found["ml_rag_worker_looked_timestamp_seconds"]
        items.execute(
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$;"
            "CREATE TRIGGER fail BEFORE UPDATE ON items FOR EACH ROW EXECUTE FUNCTION fail();"
            "INSERT INTO items VALUES (12, 'cap', '')"
        )
        error = 'ml_rag_worker_errors_total{relation="public.items",sqlstate="P0001"}'
        wait_until(lambda: metrics().get(error, 0) > 0)
        items.execute("DROP TABLE items")
        wait_until(lambda: 'ml_rag_worker_pending_rows{relation="public.items"}' not in metrics())
        assert metrics()["ml_rag_worker_looked_timestamp_seconds"] > looked


def test_connections_that_send_no_request_keep_nobody_from_the_metrics(db: Database, items: Connection) -> None:
    """Nor the worker from connections of its own: they have threads and descriptors of its process."""
    port = free_port()
    with worker(db, "--metrics-port", str(port)) as process, ExitStack() as stack:
        wait_until(lambda: is_listening(items))
        for _ in range(3 * MOST):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            assert b"ml_rag_worker_pending_rows" in reply.read()
        wait_until(lambda: len(os.listdir(f"/proc/{process.pid}/task")) < MOST + 8)


def test_metrics_of_an_address_that_is_taken() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        process = subprocess.run(
            [sys.executable, "-m", "ml_rag.cli", "worker", "--metrics-port", str(one.getsockname()[1])],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert process.returncode == 1
    assert "metrics cannot be served" in process.stderr


def test_a_database_that_is_not_there(db: Database) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "ml_rag.cli", "worker", "--dsn", "host=/nowhere dbname=x"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 1
    assert "Traceback" not in process.stderr


def test_notifications_without_end_keep_it_from_nothing_but_sleep(db: Database, owner: Connection) -> None:
    """Anybody may send them: a look at all tables is not taken for each."""
    looks: list[float] = []
    opened: list[Connection] = []

    class Looking(Worker):
        def connect(self) -> Connection:
            connection = super().connect()
            opened.append(connection)
            return connection

        def turn(self, connection: Connection, *, once: bool) -> bool:
            looks.append(time.monotonic())
            time.sleep(0.02)
            if len(looks) == 6:
                raise KeyboardInterrupt
            return False

    stranger = db.connect("stranger")
    try:
        with over_and_over(lambda: stranger.execute("NOTIFY ml_rag_vectorizer")), pytest.raises(KeyboardInterrupt):
            Looking(make_conninfo(db.dsn, dbname=db.name), 10, 30).run(once=False)
    finally:
        for connection in opened:
            connection.close()
    assert looks[-1] - looks[0] > 5 * 0.02 / LOOKING * 0.9


def test_notifications_do_not_fill_its_memory(db: Database, items: Connection) -> None:
    """Any role may send them, while it sleeps and while it waits for a reply."""
    stranger, gate = db.connect("stranger"), db.connect()
    items.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN NEW; END $$;"
        "CREATE TRIGGER slow BEFORE UPDATE ON items FOR EACH ROW EXECUTE FUNCTION slow()"
    )

    def notify() -> None:
        each = "SELECT pg_notify('ml_rag_vectorizer', n || repeat('x', 7900)) FROM generate_series(1, 10000) AS n"
        stranger.execute(f"SELECT count(*) FROM ({each}) AS s".encode())

    with worker(db, "--idle", "3600") as process:

        def most() -> int:
            """The megabytes of memory that it has had."""
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024

        wait_until(lambda: is_listening(items))
        before = most()
        notify()
        gate.execute("SELECT pg_advisory_lock(42)")
        items.execute("INSERT INTO items VALUES (10, 'hat', 'of straw')")
        waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 42 AND NOT granted"
        wait_until(lambda: items.execute(waiting).fetchone() is not None)
        notify()
        gate.execute("SELECT pg_advisory_unlock(42)")
        wait_until(lambda: pending(items) == 0)
        items.execute("INSERT INTO items VALUES (11, 'cap', 'of wool')")
        wait_until(lambda: pending(items) == 0)
        assert most() < before + 32


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("ASSERT false", ""),
        ("RAISE 'not now' USING ERRCODE = '57014'", "shop.first: again in 1 s: not now (57014)"),
        ("PERFORM pg_terminate_backend(pg_backend_pid())", "the database is not to be reached; again in 1 s"),
    ],
    ids=["assert", "canceled", "terminated"],
)
def test_a_table_that_cannot_be_looked_at_holds_up_no_other(
    db: Database, owner: Connection, models: ModelsServer, statement: str, said: str
) -> None:
    name = f"{db.name}_shop"
    owner.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'made for a test'; CREATE SCHEMA shop AUTHORIZATION {name}")
    try:
        owner.execute(f"GRANT ml_rag_user TO {name}; SET ROLE {name}")
        for table in ("first", "second"):
            owner.execute(f"CREATE TABLE shop.{table} (id integer PRIMARY KEY, name text)")
            create(owner, f"shop.{table}", "name")
        owner.execute(
            "CREATE FUNCTION shop.fail() RETURNS boolean LANGUAGE plpgsql AS"
            f" $$ BEGIN {statement}; RETURN true; END $$;"
            "ALTER TABLE shop.first ENABLE ROW LEVEL SECURITY; ALTER TABLE shop.first FORCE ROW LEVEL SECURITY;"
            "CREATE POLICY p ON shop.first USING (shop.fail()) WITH CHECK (true); RESET ROLE"
        )
        owner.execute("INSERT INTO shop.first VALUES (1, 'x'); INSERT INTO shop.second VALUES (1, 'y')")
        dsn = make_conninfo(db.dsn, dbname=db.name, user=name, password="made for a test")
        with worker(db, "--idle", "0.2", "--dsn", dsn) as process:
            embedded = "SELECT count(segment_embedding) FROM shop.second"
            wait_until(lambda: owner.execute(embedded).fetchone() == (1,))
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=10)
        assert process.returncode == 0
        assert said in log, log
    finally:
        owner.execute("RESET ROLE; DROP SCHEMA shop CASCADE")
        owner.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


def test_a_worker_for_each_owner_gives_none_the_rights_of_another(
    db: Database, owner: Connection, models: ModelsServer
) -> None:
    """As docs/own-tables.md recommends it: a role that is a member of one owner only."""
    owners = {name: f"{db.name}_{name}" for name in ("shop", "crm")}
    for name, role in owners.items():
        owner.execute(
            f"CREATE ROLE {role} LOGIN; CREATE SCHEMA {name} AUTHORIZATION {role}; GRANT ml_rag_user TO {role}"
        )
        owner.execute(f"CREATE ROLE {role}_worker LOGIN PASSWORD 'made for a test'; GRANT {role} TO {role}_worker")
    try:
        for name, role in owners.items():
            owner.execute(f"SET ROLE {role}; CREATE TABLE {name}.items (id integer PRIMARY KEY, name text)")
            owner.execute(f"INSERT INTO {name}.items VALUES (1, 'lamp'); CREATE TABLE {name}.seen (what text)")
            create(owner, f"{name}.items", "name")
            # a trigger of one owner's tries the other's table with whatever rights the worker has
            (other,) = owners.keys() - {name}
            owner.execute(
                f"CREATE FUNCTION {name}.spy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                f" INSERT INTO {name}.seen SELECT o.name FROM {other}.items AS o; RETURN NEW;"
                f" EXCEPTION WHEN insufficient_privilege THEN INSERT INTO {name}.seen VALUES (SQLERRM); RETURN NEW;"
                f" END $$; CREATE TRIGGER spy BEFORE UPDATE ON {name}.items FOR EACH ROW EXECUTE FUNCTION {name}.spy();"
                " RESET ROLE"
            )
        for role in owners.values():
            dsn = make_conninfo(db.dsn, dbname=db.name, user=f"{role}_worker", password="made for a test")
            with worker(db, "--once", "--dsn", dsn) as process:
                assert process.wait(60) == 0
        for name in owners:
            (other,) = owners.keys() - {name}
            assert owner.execute(f"SELECT count(segment_embedding) FROM {name}.items").fetchone() == (1,)
            assert owner.execute(f"SELECT what FROM {name}.seen").fetchall() == [
                (f"permission denied for schema {other}",)
            ]
    finally:
        owner.execute("RESET ROLE; DROP SCHEMA shop, crm CASCADE")
        for role in owners.values():
            owner.execute(f"DROP OWNED BY {role}, {role}_worker CASCADE; DROP ROLE {role}, {role}_worker")


def test_a_worker_of_a_superuser_leaves_the_tables_of_others_alone(
    db: Database, owner: Connection, models: ModelsServer
) -> None:
    """Their triggers and policies would run with its rights."""
    tenant, role = db.connect("tenant"), db.role("tenant")
    owner.execute(f'CREATE SCHEMA theirs AUTHORIZATION "{role}"; CREATE TABLE own (id integer PRIMARY KEY, name text)')
    tenant.execute("CREATE TABLE theirs.items (id integer PRIMARY KEY, name text)")
    tenant.execute("CREATE TABLE theirs.ran (who name); GRANT INSERT ON theirs.ran TO PUBLIC")
    tenant.execute(
        "CREATE FUNCTION theirs.spy() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO theirs.ran VALUES (current_user); RETURN NEW; END $$;"
        "CREATE TRIGGER spy BEFORE UPDATE ON theirs.items FOR EACH ROW EXECUTE FUNCTION theirs.spy()"
    )
    for connection, table in ((owner, "own"), (tenant, "theirs.items")):
        connection.execute(f"INSERT INTO {table} VALUES (1, 'lamp')")
        create(connection, table, "name")
    with worker(db, "--once") as process:
        assert process.wait(60) == 0
    assert owner.execute("SELECT count(segment_embedding) FROM own").fetchone() == (1,)
    assert tenant.execute("SELECT count(segment_embedding) FROM theirs.items").fetchone() == (0,)
    assert tenant.execute("SELECT * FROM theirs.ran").fetchall() == []
    tenant.execute("CALL ml_rag.run_vectorizer('theirs.items')")
    assert tenant.execute("SELECT * FROM theirs.ran").fetchall() == [(role,)]


def test_a_worker_leaves_a_table_alone_that_was_given_away_since_it_looked(
    db: Database, owner: Connection, models: ModelsServer
) -> None:
    """A turn at the table before it can take long."""
    tenant, gate, role = db.connect("tenant"), db.connect(), db.role("tenant")
    owner.execute(
        f'GRANT CREATE ON SCHEMA public TO "{role}";'
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN NEW; END $$".encode()
    )
    for table in ("first", "second"):
        owner.execute(
            f"CREATE TABLE {table} (id integer PRIMARY KEY, name text);INSERT INTO {table} VALUES (1, 'lamp')".encode()
        )
        create(owner, table, "name")
    owner.execute("CREATE TRIGGER slow BEFORE UPDATE ON first FOR EACH ROW EXECUTE FUNCTION slow()")
    gate.execute("SELECT pg_advisory_lock(42)")
    with worker(db, "--once") as process:
        waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 42 AND NOT granted"
        wait_until(lambda: owner.execute(waiting).fetchone() is not None)
        owner.execute(f'ALTER TABLE second OWNER TO "{role}"'.encode())
        tenant.execute(
            "CREATE TABLE ran (who name); GRANT INSERT ON ran TO PUBLIC;"
            "CREATE FUNCTION spy() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN INSERT INTO public.ran VALUES (current_user); RETURN NEW; END $$;"
            "CREATE TRIGGER spy BEFORE UPDATE ON second FOR EACH ROW EXECUTE FUNCTION spy()"
        )
        gate.execute("SELECT pg_advisory_unlock(42)")
        assert process.wait(60) == 0
    assert tenant.execute("SELECT * FROM ran").fetchall() == []
    assert tenant.execute("SELECT count(segment_embedding) FROM second").fetchone() == (0,)
    assert owner.execute("SELECT count(segment_embedding) FROM first").fetchone() == (1,)


def test_a_worker_leaves_a_table_alone_that_is_given_away_before_its_run_begins(
    db: Database, owner: Connection, models: ModelsServer
) -> None:
    """Any role can make it wait between its look at the owner and the run, for pg_inherits."""
    tenant, gate, role = db.connect("tenant"), db.connect(), db.role("tenant")
    owner.execute(f'GRANT CREATE ON SCHEMA public TO "{role}"')
    owner.execute("CREATE TABLE gift (id integer PRIMARY KEY, name text); INSERT INTO gift VALUES (1, 'lamp')")
    create(owner, "gift", "name")
    gate.execute("BEGIN")
    gate.execute("LOCK TABLE pg_inherits IN EXCLUSIVE MODE")
    waiting = db.connect(autocommit=False)
    # what CREATE RULE takes, and waits for
    queue = threading.Thread(target=waiting.execute, args=("LOCK TABLE pg_inherits IN ACCESS EXCLUSIVE MODE",))
    queue.start()
    with worker(db, "--once") as process:
        is_waiting = (
            "SELECT FROM pg_stat_activity WHERE application_name = 'ml-rag worker' AND wait_event_type = 'Lock'"
            " AND query ~ 'run_vectorizer'"
        )
        wait_until(lambda: owner.execute(is_waiting).fetchone() is not None)
        owner.execute(f'ALTER TABLE gift OWNER TO "{role}"'.encode())
        tenant.execute(
            "CREATE TABLE ran (who name); GRANT INSERT ON ran TO PUBLIC;"
            "CREATE FUNCTION spy() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN INSERT INTO public.ran VALUES (current_user); RETURN NEW; END $$;"
            "CREATE TRIGGER spy BEFORE UPDATE ON gift FOR EACH ROW EXECUTE FUNCTION spy()"
        )
        gate.execute("ROLLBACK")
        queue.join()
        waiting.rollback()
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert "has another owner by now" in process.stderr.read()
    assert tenant.execute("SELECT * FROM ran").fetchall() == []


def test_a_worker_leaves_a_table_alone_whose_owner_is_not_trusted_any_more(
    db: Database, owner: Connection, models: ModelsServer
) -> None:
    tenant, role = db.connect("tenant"), db.role("tenant")
    owner.execute(f'GRANT CREATE ON SCHEMA public TO "{role}"')
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text)")
    owner.execute("INSERT INTO items SELECT i, 'lamp ' || i FROM generate_series(1, 600) AS i")
    create(owner, "items", "name")
    owner.execute(f'ALTER TABLE items OWNER TO "{role}"')
    owner.execute(f'ALTER ROLE "{role}" SUPERUSER')
    models.requests.clear()

    def distrust() -> None:
        owner.execute(f'ALTER ROLE "{role}" NOSUPERUSER')
        tenant.execute(
            "CREATE TABLE ran (who name); GRANT INSERT ON ran TO PUBLIC;"
            "CREATE FUNCTION spy() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN INSERT INTO public.ran VALUES (current_user); RETURN NEW; END $$;"
            "CREATE TRIGGER spy BEFORE UPDATE ON items FOR EACH ROW EXECUTE FUNCTION spy()"
        )

    models.before[1] = distrust
    try:
        with worker(db, "--once") as process:
            assert process.wait(60) == 1
            assert process.stderr is not None
            assert 'table "public.items" is not trusted any more' in process.stderr.read()
    finally:
        owner.execute(f'ALTER ROLE "{role}" NOSUPERUSER')
    assert tenant.execute("SELECT * FROM ran").fetchall() == []


def test_nodes_that_another_session_kept_it_from_are_made_later(db: Database, items: Connection) -> None:
    run(items)
    items.execute("CALL ml_rag.create_node_group('items', 'parts', '{\"transform\": \"sentence\"}')")
    waiting = "SELECT pending FROM ml_rag.node_group"
    other = db.connect()
    with worker(db, "--idle", "1") as process:
        with other.transaction():
            other.execute("SELECT ml_rag._lock_nodes('items'::regclass, 'parts')")
            items.execute("INSERT INTO items (id, name) VALUES (77, 'A red boat. A blue one.')")
            wait_until(lambda: pending(items) == 0)
            assert items.execute(waiting).fetchone() == (1,)
        wait_until(lambda: items.execute(waiting).fetchone() == (0,))
        # as a worker leaves them that is killed between the two
        process.kill()
        process.wait()
    alive = "SELECT FROM pg_stat_activity WHERE application_name = 'ml-rag worker' AND datname = current_database()"
    wait_until(lambda: items.execute(alive).fetchone() is None)
    items.execute("UPDATE items SET name = 'A green boat.' WHERE id = 77")
    with other.transaction():
        other.execute("SELECT ml_rag._lock_nodes('items'::regclass, 'parts')")
        run(items)
    assert items.execute(waiting).fetchone() == (1,)
    with worker(db, "--once") as process:
        assert process.wait(60) == 0
    assert items.execute(waiting).fetchone() == (0,)


@pytest.mark.parametrize("how", ["waits too long", "is ended"])
def test_nodes_whose_filling_fails_are_made_later(
    db: Database, items: Connection, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run(items)
    items.execute("CALL ml_rag.create_node_group('items', 'parts', '{\"transform\": \"sentence\"}')")
    if how == "waits too long":
        monkeypatch.setenv("PGOPTIONS", "-c lock_timeout=500ms")
    waiting = "SELECT pending FROM ml_rag.node_group"
    other = db.connect()
    of_worker = "application_name = 'ml-rag worker' AND datname = current_database() AND wait_event_type = 'Lock'"
    with worker(db, "--idle", "1") as process:
        with other.transaction():
            other.execute("LOCK TABLE items_parts IN SHARE MODE")
            items.execute("INSERT INTO items (id, name) VALUES (77, 'A red boat. A blue one.')")
            wait_until(lambda: pending(items) == 0)
            wait_until(lambda: items.execute(f"SELECT FROM pg_stat_activity WHERE {of_worker}").fetchone() is not None)
            if how == "is ended":
                items.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {of_worker}")
            else:
                time.sleep(1)
        wait_until(lambda: items.execute(waiting).fetchone() == (0,))
        assert process.poll() is None


def test_rows_that_do_not_wait_get_nodes_and_failures_of_rows_that_are_gone_go(
    db: Database, owner: Connection, models: ModelsServer
) -> None:
    owner.execute(ITEMS)
    create(owner, mode="immediate")
    owner.execute("CALL ml_rag.create_node_group('items', 'parts', '{\"transform\": \"sentence\"}')")
    owner.execute(ITEMS.replace("items", "others"))
    create(owner, "others", mode="immediate", columns="{name}")
    waiting = "SELECT pending FROM ml_rag.node_group"
    with worker(db, "--idle", "0.5"):
        wait_until(lambda: is_listening(owner))
        owner.execute("INSERT INTO items VALUES (1, 'A red boat. A blue one.', 'x')")
        owner.execute("INSERT INTO others VALUES (1, ''), (2, '')")
        assert (pending(owner), len(failures(owner))) == (0, 2)
        wait_until(lambda: owner.execute(waiting).fetchone() == (0,))
        assert value_of(owner, "SELECT count(*) FROM items_parts WHERE node_number > 0") > 0
        owner.execute("DELETE FROM others WHERE id = 1")
        wait_until(lambda: [key for key, *_ in failures(owner)] == ["{2}"])


def test_tables_of_others_that_look_like_it_are_not_looked_at(db: Database, items: Connection) -> None:
    role = db.role("tenant")
    items.execute(f'GRANT CREATE ON SCHEMA public TO "{role}"')
    db.connect("tenant").execute(
        "CREATE TABLE looks (id int, segment text, segment_embedding int);"
        "CREATE TRIGGER ml_rag_vectorizer AFTER INSERT ON looks FOR EACH STATEMENT"
        " EXECUTE FUNCTION ml_rag._wake_workers(); ALTER TABLE looks ENABLE ALWAYS TRIGGER ml_rag_vectorizer"
    )
    assert items.execute("SELECT relation::text FROM ml_rag.vectorizer ORDER BY 1").fetchall() == [
        ("items",), ("looks",),
    ]  # fmt: skip
    assert items.execute(LISTED).fetchall() == [(value_of(items, "SELECT 'items'::regclass::oid"), "items", None)]


def test_where_no_server_answers_the_dsn_is_named() -> None:
    from click.testing import CliRunner

    from ml_rag.cli import main

    done = CliRunner().invoke(main, ["worker", "--once"], env={"ML_RAG_DSN": None, "PGHOST": "/nowhere"})
    assert done.exit_code == 1
    assert "Check --dsn (or ML_RAG_DSN, PGHOST, PGPORT, PGUSER, PGDATABASE)" in done.output
