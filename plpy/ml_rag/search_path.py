"""Guards against settings that the owner of a database can make for the sessions of others.

search_path: a role that can create in one of its schemas can add an operator or a function that fits better than that
of pg_catalog, and that runs with the rights of the connection's role. Names that a user gives without a schema are
looked up before it is set.

role: code of that role can leave it again, and has the rights of a superuser if the session is a superuser's.

And against a schema ml_rag that another role has made in a database without the extension, as after it was dropped.
"""

from __future__ import annotations

import re
from typing import Any, LiteralString

import psycopg
from psycopg.rows import tuple_row

from ml_rag.errors import MlRagError

#: of a session that no pooler shares
PIN = "SET search_path = pg_catalog, pg_temp"
#: of a transaction
PIN_TRANSACTION = "SET LOCAL search_path = pg_catalog, pg_temp"

#: The role of a superuser's session, if it is not a superuser and was not set for that superuser: the setting of the
#: database does not count, as its owner can reset it at once. Whether a schema ml_rag is not the extension's: while
#: that is there, so is its schema. The schemas of the extensions.
_LOOK = """
SELECT (SELECT c.rolname::text FROM pg_roles AS s JOIN pg_roles AS c ON c.rolname = current_user AND NOT c.rolsuper
  WHERE s.rolname = session_user AND s.rolsuper AND NOT EXISTS (
    SELECT FROM pg_db_role_setting AS d WHERE d.setrole = s.oid AND 'role=' || c.rolname = ANY (d.setconfig))),
  EXISTS (SELECT FROM pg_namespace AS n WHERE n.nspname = 'ml_rag')
    AND NOT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'ml_rag'),
  ARRAY(SELECT ARRAY[e.extname::text, n.nspname::text] FROM pg_extension AS e
    JOIN pg_namespace AS n ON n.oid = e.extnamespace WHERE e.extname IN ('ml_rag', 'vector') ORDER BY 1)
"""


class ForeignSchema(MlRagError):
    """The schema ml_rag is not that of the extension."""

    sqlstate = "42501"


class BorrowedRole(MlRagError):
    """A superuser's session has the role of somebody else, whose code could take the superuser's rights."""

    sqlstate = "42501"


def refuse_borrowed_role(connection: psycopg.Connection[Any], pin: LiteralString = PIN_TRANSACTION) -> dict[str, str]:
    """Set the search_path by ``pin``. The schemas of the extensions ml_rag and vector, by their names.

    Raises BorrowedRole, and ForeignSchema.
    """
    return _schemas(connection.info, *pinned(connection, pin, _LOOK))


async def refuse_borrowed_role_async(connection: psycopg.AsyncConnection[Any]) -> dict[str, str]:
    """The same, of a transaction."""
    return _schemas(connection.info, *await pinned_async(connection, _LOOK))


def pinned(connection: psycopg.Connection[Any], pin: LiteralString, query: str) -> list[tuple[Any, ...]]:
    """The rows of a query without parameters, in the round trip that sets the search_path."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(f"{pin};{query}", prepare=False).nextset()
        return cursor.fetchall()


async def pinned_async(connection: psycopg.AsyncConnection[Any], query: str) -> list[tuple[Any, ...]]:
    """The same, of a transaction."""
    async with connection.cursor(row_factory=tuple_row) as cursor:
        (await cursor.execute(f"{PIN_TRANSACTION};{query}", prepare=False)).nextset()
        return await cursor.fetchall()


def _schemas(info: psycopg.ConnectionInfo, found: tuple[Any, ...]) -> dict[str, str]:
    borrowed, is_foreign, schemas = found
    if is_foreign:
        raise ForeignSchema(
            "schema ml_rag is not that of the extension",
            detail="The extension is not installed here; what the schema has would run with the rights of the session.",
            hint="DROP SCHEMA ml_rag, then CREATE EXTENSION ml_rag CASCADE; or name another database.",
        )
    # the program may have been told which role to have
    if borrowed and not re.search(r"(^|\s)-(c\s*|-)role\s*=", info.get_parameters().get("options", "")):
        raise BorrowedRole(
            "the session of a superuser has another role here",
            detail="The owner of the database can set it (ALTER DATABASE … SET role), and run code that leaves it.",
            hint="Connect as that role, or name it: options='-c role=…'. Or ALTER DATABASE … RESET role.",
        )
    return dict(schemas)
