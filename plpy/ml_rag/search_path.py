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

from ml_rag.errors import MlRagError

#: of a session that no pooler shares
PIN = "SET search_path = pg_catalog, pg_temp"
#: of a transaction
PIN_TRANSACTION = "SET LOCAL search_path = pg_catalog, pg_temp"

#: The role of a superuser's session, if it is not a superuser and was not set for that superuser. The setting of the
#: database does not count: its owner can reset it at once.
_BORROWED = """
SELECT c.rolname FROM pg_roles AS s JOIN pg_roles AS c ON c.rolname = current_user AND NOT c.rolsuper
WHERE s.rolname = session_user AND s.rolsuper AND NOT EXISTS (
  SELECT FROM pg_db_role_setting AS d WHERE d.setrole = s.oid AND 'role=' || c.rolname = ANY (d.setconfig))
"""


#: A schema ml_rag that is not the extension's: while that is there, so is its schema.
_FOREIGN = """
SELECT FROM pg_namespace AS n WHERE n.nspname = 'ml_rag'
AND NOT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'ml_rag')
"""


class ForeignSchema(MlRagError):
    """The schema ml_rag is not that of the extension."""

    sqlstate = "42501"


class BorrowedRole(MlRagError):
    """A superuser's session has the role of somebody else, whose code could take the superuser's rights."""

    sqlstate = "42501"


def refuse_foreign_schema(connection: psycopg.Connection[Any]) -> None:
    """Raises ForeignSchema. The search_path must be one of those above."""
    _refuse_foreign(connection.execute(_FOREIGN).rowcount)


def refuse_borrowed_role(connection: psycopg.Connection[Any], pin: LiteralString = PIN_TRANSACTION) -> None:
    """Raises BorrowedRole, and ForeignSchema. ``pin``: what sets the search_path before."""
    connection.execute(pin)
    refuse_foreign_schema(connection)
    if not _is_chosen(connection.info):
        _refuse(connection.execute(_BORROWED).rowcount)


async def refuse_borrowed_role_async(connection: psycopg.AsyncConnection[Any]) -> None:
    """The same, of a transaction."""
    await connection.execute(PIN_TRANSACTION)
    _refuse_foreign((await connection.execute(_FOREIGN)).rowcount)
    if not _is_chosen(connection.info):
        _refuse((await connection.execute(_BORROWED)).rowcount)


def _is_chosen(info: psycopg.ConnectionInfo) -> bool:
    """Whether the program was told which role to have."""
    return re.search(r"(^|\s)-(c\s*|-)role\s*=", info.get_parameters().get("options", "")) is not None


def _refuse_foreign(found: int) -> None:
    if found:
        raise ForeignSchema(
            "schema ml_rag is not that of the extension",
            detail="The extension is not installed here; what the schema has would run with the rights of the session.",
            hint="DROP SCHEMA ml_rag, then CREATE EXTENSION ml_rag CASCADE; or name another database.",
        )


def _refuse(found: int) -> None:
    if found:
        raise BorrowedRole(
            "the session of a superuser has another role here",
            detail="The owner of the database can set it (ALTER DATABASE … SET role), and run code that leaves it.",
            hint="Connect as that role, or name it: options='-c role=…'. Or ALTER DATABASE … RESET role.",
        )
