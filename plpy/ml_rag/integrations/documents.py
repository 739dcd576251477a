"""Documents of vector stores, read segment by segment. Only what discovery finds is read: another relation could run
code of its owner's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg import sql

from ml_rag.integrations.database import Reader

#: the columns of the store named ``%(store)s``
_FIND = sql.SQL(
    """SELECT d.relation::pg_catalog.oid AS oid, d.segment::text, d.document_name::text, d.segment_number::text,
      d.document_id::text, d.metadata::text
    FROM ml_rag.discover() AS d WHERE d.vector_store = %(store)s"""
)
#: no other relation takes its name from here on; what was not trusted any more once that was sure is not read
_HOLD = sql.SQL("SELECT ml_rag._hold_trusted(ml_rag._read_with(%(oid)s)) AS is_held")
_NAME = sql.SQL(
    """SELECT n.nspname::text AS schema, c.relname::text AS relation
    FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = %(oid)s"""
)


async def read(
    reader: Reader, store: str, parameters: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]]:
    """The columns of a store, names of documents, and the rows of ``reading``; none where discovery does not find it.

    ``%(document)s`` may lack the folders. The names are that of the document which was read; where no segment was, at
    most three that are the same without folders. Raises psycopg.Error.
    """
    async with reader.transaction() as rows:
        found = await rows(_FIND, {"store": store})
        if not found or found[0]["document_name"] is None:
            return (found[0] if found else {}), [], []
        if not (await rows(_HOLD, found[0]))[0]["is_held"]:
            return {}, [], []
        columns, names = found[0] | (await rows(_NAME, found[0]))[0], [str(parameters["document"])]
        segments = await rows(reading(columns), parameters)
        if not segments:
            alike = [row["name"] for row in await rows(_alike(columns), parameters)]
            if len(alike) == 1 and alike != names:
                segments = await rows(reading(columns), {**parameters, "document": alike[0]})
            names = names if names[0] in alike else alike
        return columns, names, segments


def _alike(store: Mapping[str, str | None]) -> sql.Composed:
    """Names of documents that are ``%(document)s`` without their folders."""
    return sql.SQL(
        r"""SELECT d.name FROM (
          SELECT DISTINCT pg_catalog.left({name}::pg_catalog.text, 1000) AS name FROM {relation}
        ) AS d WHERE pg_catalog.regexp_replace(d.name, '^.*[/\\]', '') = %(document)s ORDER BY 1 LIMIT 3"""
    ).format(name=_quoted(str(store["document_name"])), relation=_relation(store))


def reading(store: Mapping[str, str | None]) -> sql.Composed:
    """The segments of the document ``%(document)s`` of a store in their order, and how many there are.

    ``store``: rows of ``_FIND`` and ``_NAME``, whose ``document_name`` is not null. ``%(first)s``: segments left out,
    ``%(most)s``: read at most, as long as they and their metadata have ``%(characters)s`` together; ``is_cut``: a
    longer first one.
    """
    order = [_quoted(column) for column in (store["document_id"], store["segment_number"]) if column is not None]
    # bounded here: what comes is held in the memory of this process
    return sql.SQL(
        """SELECT pg_catalog.left(r.segment, %(characters)s) AS segment, r.segments, r.segment_number,
          r.length > %(characters)s AS is_cut, CASE WHEN r.more <= %(characters)s THEN r.metadata END AS metadata
        FROM (
          SELECT q.*, pg_catalog.sum(q.length + q.more) OVER (ORDER BY q.place) AS characters
          FROM (
            SELECT p.*, coalesce(pg_catalog.length(p.segment), 0) AS length,
              coalesce(pg_catalog.length(p.metadata::pg_catalog.text), 0) AS more
            FROM (
              SELECT {segment}::pg_catalog.text AS segment, {metadata} AS metadata, {number} AS segment_number,
                pg_catalog.count(*) OVER () AS segments, pg_catalog.row_number() OVER (ORDER BY {order}) AS place
              FROM {relation} WHERE {name}::pg_catalog.text = %(document)s
              ORDER BY place OFFSET %(first)s LIMIT %(most)s
            ) AS p
          ) AS q
        ) AS r WHERE r.characters <= %(characters)s OR r.place = %(first)s + 1 ORDER BY r.place"""
    ).format(
        segment=_quoted(str(store["segment"])),
        metadata=_column(store["metadata"]),
        number=_column(store["segment_number"]),
        relation=_relation(store),
        name=_quoted(str(store["document_name"])),
        order=sql.SQL(", ").join(order or [_quoted(str(store["segment"]))]),
    )


def _relation(store: Mapping[str, str | None]) -> sql.Composable:
    return _quoted(str(store["schema"]), str(store["relation"]))


def _column(name: str | None) -> sql.Composable:
    return sql.SQL("NULL") if name is None else _quoted(name)


def _quoted(*names: str) -> sql.Composable:
    """An identifier in a statement with parameters, where a % begins one."""
    return sql.SQL(sql.Identifier(*names).as_string().replace("%", "%%"))
