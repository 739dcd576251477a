"""Which keyword indexes there are for a caller (sql/keyword/tables.sql): those it may search, those it owns."""

from __future__ import annotations

from typing import Any

from ml_rag.backend.rights import as_owner
from ml_rag.backend.statements import Statements
from ml_rag.errors import PrivilegeError

_STATEMENTS = {
    "indexes": (
        "SELECT store::oid, segment, key, configuration, k1, b, statistics, beside"
        " FROM ml_rag_internal.keyword_store WHERE $1 IS NULL OR store = $1",
        "oid",
    ),
    # As the caller: which of these tables it may read in these columns, the text of a name[].
    "readable": (
        "SELECT u.place, row_security_active(u.store) AS secured, EXISTS (SELECT FROM pg_attribute AS a"
        " WHERE a.attrelid = u.store AND a.attname = 'segment_nodes' AND NOT a.attisdropped"
        " AND has_column_privilege(a.attrelid, a.attnum, 'SELECT')) AS reads_nodes,"
        " ARRAY(SELECT ml_rag._type_name(a.atttypid) FROM unnest(u.columns::name[]) WITH ORDINALITY AS k (name, place)"
        " JOIN pg_attribute AS a ON a.attrelid = u.store AND a.attname = k.name AND NOT a.attisdropped"
        " ORDER BY k.place) AS types"
        " FROM unnest($1, $2) WITH ORDINALITY AS u (store, columns, place)"
        " JOIN pg_class AS c ON c.oid = u.store"
        " WHERE c.relkind IN ('r', 'p') AND has_schema_privilege(c.relnamespace, 'USAGE')"
        " AND cardinality(u.columns::name[]) = ("
        " SELECT count(*) FROM pg_attribute AS a"
        " WHERE a.attrelid = u.store AND a.attname = ANY (u.columns::name[]) AND NOT a.attisdropped"
        " AND has_column_privilege(a.attrelid, a.attnum, 'SELECT')"
        # comparing or converting values of these types runs no role's code
        " AND a.atttypid = ANY ('{smallint,integer,bigint,numeric,oid,text,character varying,uuid}'::regtype[]))"
        " ORDER BY u.place",
        *("oid[]", "text[]"),
    ),
    "columns": ("SELECT array_append($1::name[], $2::name)::text AS columns", "text[]", "text"),
    "is owner": ("SELECT pg_has_role(c.relowner, 'USAGE') AS answer FROM pg_class AS c WHERE c.oid = $1", "oid"),
}
_run = Statements(_STATEMENTS)


def readable(plpy: Any, indexes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the indexes (store, segment, key) whose columns the caller may read.

    Each gets ``secured``: whether row-level security applies to the caller; ``reads_nodes``: whether the caller may
    read the nodes that are merged into the texts, where there are some; and ``key_types``: of the columns of the key.
    """
    if not indexes:
        return []
    columns = [_run(plpy, "columns", index["key"], index["segment"])[0]["columns"] for index in indexes]
    found = _run(plpy, "readable", [index["store"] for index in indexes], columns)
    return [
        indexes[row["place"] - 1]
        | {"secured": row["secured"], "reads_nodes": row["reads_nodes"], "key_types": row["types"][:-1]}
        for row in found
    ]


def of_caller(plpy: Any, store: int | None) -> list[dict[str, Any]]:
    """The indexes that the caller may search, or the one of a table."""
    found = readable(plpy, as_owner(plpy, lambda: [dict(row) for row in _run(plpy, "indexes", store)]))
    return [index for index in found if index["beside"] is None or index["reads_nodes"]]


def check_owner(plpy: Any, store: int) -> int:
    """``store``; raises PrivilegeError (42501) unless the caller owns that table."""
    if not any(row["answer"] for row in _run(plpy, "is owner", store)):
        raise PrivilegeError(
            "must be owner of the table", hint="The owner of the table calls this, or a member of that role."
        )
    return store
