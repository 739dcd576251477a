"""Calls of the ranking routines."""

from __future__ import annotations

import json
from typing import Any

from psycopg.types.json import Jsonb

from support.cluster import Connection, value_of


def rank(connection: Connection, query: str | None, records: Any, options: Any = None) -> Any:
    """``ml_rank``'s document."""
    records = records if isinstance(records, str) or records is None else json.dumps(records)
    return value_of(
        connection, "SELECT ml_rank(%s, %s, %s)", (query, records, None if options is None else Jsonb(options))
    )


def rows(connection: Connection, query: str | None, ids: Any, texts: Any, options: Any = None) -> list[Any]:
    """``ml_rank_rows``' rows."""
    return connection.execute(
        "SELECT * FROM ml_rank_rows(%s, %s::text[], %s::text[], %s)",
        (query, ids, texts, None if options is None else Jsonb(options)),
    ).fetchall()
