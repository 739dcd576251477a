"""Schemas whose names others take during a call."""

from __future__ import annotations

import psycopg
from psycopg import sql

from support.cluster import Connection, Database, value_of


def renamed(connection: Connection, schema: str, name: str) -> bool:
    """Rename a schema; False where a call holds its name, as minor releases of PostgreSQL of 2026 let it."""
    connection.execute("SET lock_timeout = '300ms'")
    try:
        connection.execute(sql.SQL("ALTER SCHEMA {} RENAME TO {}").format(sql.Identifier(schema), sql.Identifier(name)))
    except psycopg.errors.LockNotAvailable:
        return False
    finally:
        connection.execute("RESET lock_timeout")
    return True


def taken(owner: Connection, taker: Connection) -> bool:
    """Schema kb of the owner is named former, and planted of the taker kb; False where a call holds the name."""
    if not renamed(owner, "kb", "former"):
        return False
    taker.execute("ALTER SCHEMA planted RENAME TO kb")
    return True


def locks_schemas(db: Database) -> bool:
    """Whether this release of PostgreSQL locks a schema that it renames."""
    holder, owner = db.connect(), db.connect()
    with holder.transaction():
        holder.execute("CREATE SCHEMA held")
    with holder.transaction():
        holder.execute("SELECT pg_get_object_address('schema', '{held}', '{}')")
        return not renamed(owner, "held", "kept")


def owners(owner: Connection) -> str:
    """The name that schema kb of the owner has after that."""
    name: str = value_of(owner, "SELECT CASE WHEN to_regnamespace('former') IS NULL THEN 'kb' ELSE 'former' END")
    return name
