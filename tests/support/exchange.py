"""A table that is renamed while a call waits for it, and what another role puts in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
from psycopg import sql

from support.cluster import Connection
from support.loading import rows
from support.processes import wait_until


def exchange(
    owner: Connection,
    name: str,
    plant: str,
    holder: Connection,
    queue: Connection,
    attacker: Connection,
    call: Callable[[], object],
) -> None:
    """``call`` waits for the table ``name`` while its owner renames it; a view of ``plant`` is there when it goes on.

    ``holder``, ``queue`` and ``attacker`` have no privilege but to create in the schema. The view can call
    ``public.evil()``, which warns of the role that it runs as.
    """
    attacker.execute(
        "CREATE FUNCTION evil() RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$;"
        "CREATE FUNCTION evil_trigger() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN NULL; END $$"
    )
    for connection in (holder, queue, attacker):
        connection.execute("SET statement_timeout = '10s'")
    table = sql.Identifier(name)
    holder.execute(sql.SQL("CREATE VIEW held AS SELECT FROM {}").format(table))

    def waiting() -> int:
        locks = "SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
        ((n,),) = rows(owner, f"{locks} WHERE NOT l.granted AND d.datname = current_database()")
        return int(n)

    def later(pool: ThreadPoolExecutor, run: Callable[[], object]) -> Any:
        before = waiting()

        def tried() -> None:
            with contextlib.suppress(psycopg.Error):
                run()

        running = pool.submit(tried)
        wait_until(lambda: running.done() or waiting() > before)
        return running

    with ThreadPoolExecutor(3) as pool:
        with owner.transaction():
            owner.execute(sql.SQL("ALTER TABLE {} RENAME TO former").format(table))
            # a lock by OID, which needs no privilege, and one that waits for it, which all others wait for
            holding = later(pool, lambda: holder.execute("BEGIN; PREPARE held AS SELECT FROM held"))
            rule = sql.SQL("CREATE RULE r AS ON INSERT TO {} DO NOTHING").format(table)
            queued = later(pool, lambda: queue.execute(rule))
            calling = later(pool, call)
            assert not calling.done()
        holding.result(30)
        attacker.execute(f"CREATE VIEW {name} AS {plant}".encode())
        holder.execute("ROLLBACK")
        calling.result(30)
        queued.result(30)
