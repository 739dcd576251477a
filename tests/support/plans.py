"""Plans as EXPLAIN shows them, without what differs by itself."""

from __future__ import annotations

import re
from typing import Any

from psycopg import sql

from support.cluster import Connection, value_of

#: what differs from one time to the next by itself, such as the pages of the catalogue and hints in them (WAL)
NOISE = re.compile(r"Time|WAL|Blocks|Planning|Triggers|Sort Space|Memory|Heap Fetches")


def plan(connection: Connection, statement: Any, *, pages: bool = False) -> Any:
    """A plan as EXPLAIN gives it with every option; ``pages``: only how many pages it took from the cache."""
    if pages:
        # others' DDL makes a session read pages of the catalogue again, which are counted too
        tops = [_explained(connection, statement)["Plan"] for _ in range(3)]
        return min(top["Shared Hit Blocks"] + top["Shared Read Blocks"] for top in tops)

    def without_noise(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: without_noise(value) for key, value in node.items() if not NOISE.search(key)}
        return [without_noise(value) for value in node] if isinstance(node, list) else node

    return [without_noise(_explained(connection, statement))]


def _explained(connection: Connection, statement: Any) -> Any:
    options = "ANALYZE, VERBOSE, COSTS, SETTINGS, BUFFERS, WAL, TIMING OFF, SUMMARY OFF, FORMAT JSON"
    return value_of(connection, sql.SQL(f"EXPLAIN ({options}) {{}}").format(sql.SQL(statement)))[0]
