"""A database whose owner, role tenant, has set a role for the sessions of all others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from psycopg import sql

from support.cluster import Connection, Database


@contextlib.contextmanager
def role_set_by_the_owner(db: Database, admin: Connection) -> Iterator[None]:
    """The tenant owns the database, and has set its own role there; afterwards neither is so."""
    role, database = sql.Identifier(db.role("tenant")), sql.Identifier(db.name)
    (former,) = admin.execute(
        "SELECT pg_get_userbyid(d.datdba) FROM pg_database AS d WHERE d.datname = current_database()"
    ).fetchone() or ("",)
    admin.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, role))
    try:
        db.connect("tenant").execute(sql.SQL("ALTER DATABASE {} SET role = {}").format(database, role))
        yield
    finally:
        admin.execute(sql.SQL("ALTER DATABASE {} RESET role").format(database))
        admin.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, sql.Identifier(former)))
