"""The search_path under which programs that connect to the database run their statements.

In any other schema of a path, whoever may create there can have an operator or a function that fits better than that of
pg_catalog, and that runs with the rights of the connection's role. Names that a user gives without a schema are looked
up before.
"""

from __future__ import annotations

#: of a session that no pooler shares
PIN = "SET search_path = pg_catalog, pg_temp"
#: of a transaction
PIN_TRANSACTION = "SET LOCAL search_path = pg_catalog, pg_temp"
