"""Node groups of a store: making them, and what is in them."""

from __future__ import annotations

import json
from typing import Any

from support.cluster import Connection, value_of


def create(connection: Connection, name: str, store: str = "docs", **options: Any) -> dict[str, Any]:
    """``ml_rag.create_node_group``'s result."""
    query = "CALL ml_rag.create_node_group(%s, %s, %s)"
    result: dict[str, Any] = value_of(connection, query, (store, name, json.dumps(options)))
    return result


def refresh(connection: Connection, store: str = "docs", **options: Any) -> dict[str, Any]:
    """``ml_rag.refresh_node_groups``'s result."""
    result: dict[str, Any] = value_of(
        connection, "CALL ml_rag.refresh_node_groups(%s, %s)", (store, json.dumps(options))
    )
    return result


def nodes(connection: Connection, name: str, store: str = "docs") -> dict[tuple[int, int], list[str]]:
    """Key of each segment -> its nodes in order."""
    found: dict[tuple[int, int], list[str]] = {}
    query = (
        f"SELECT document_id, segment_number, node FROM {store}_{name} WHERE node_number > 0 ORDER BY 1, 2, node_number"
    )
    for document_id, segment_number, node in connection.execute(query):
        found.setdefault((document_id, segment_number), []).append(node)
    return found
