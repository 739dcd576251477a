"""Documents of vector stores, read segment by segment. Only what discovery finds is read: another relation could run
code of its owner's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg import sql

from ml_rag.integrations.database import Reader, Rows

#: the columns of the store named ``%(store)s``
_FIND = sql.SQL(
    """SELECT d.relation::pg_catalog.oid AS oid, d.segment::text, d.document_name::text, d.segment_number::text,
      d.document_id::text, d.metadata::text, d.segment_embedding::text, d.embed_model_id, d.dimensions
    FROM ml_rag.discover() AS d WHERE d.vector_store = %(store)s"""
)
#: no other relation takes its name from here on; what was not trusted any more once that was sure is not read
_HOLD = sql.SQL("SELECT ml_rag._hold_trusted(ARRAY[%(oid)s::pg_catalog.oid]) AS is_held")
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
        columns = await held(rows, store)
        if columns.get("document_name") is None:
            return columns, [], []
        names = [str(parameters["document"])]
        segments = await rows(reading(columns), parameters)
        if not segments:
            alike = [row["name"] for row in await rows(_alike(columns), parameters)]
            if len(alike) == 1 and alike != names:
                segments = await rows(reading(columns), {**parameters, "document": alike[0]})
            names = names if names[0] in alike else alike
        return columns, names, segments


async def held(rows: Rows, store: str) -> dict[str, Any]:
    """The columns of a store, which nothing takes the place of in this transaction; empty where it is not found."""
    found = await rows(_FIND, {"store": store})
    if not found or not (await rows(_HOLD, found[0]))[0]["is_held"]:
        return {}
    return found[0] | (await rows(_NAME, found[0]))[0]


def _alike(store: Mapping[str, str | None]) -> sql.Composed:
    """Names of documents that are ``%(document)s`` without their folders."""
    # a regular expression reads bytes that are not characters, at which left would fail
    return sql.SQL(
        r"""SELECT d.name FROM (
          SELECT DISTINCT CASE WHEN pg_catalog.octet_length({name}::pg_catalog.text) <= 4000
            THEN (pg_catalog.regexp_match({name}::pg_catalog.text, '^.*$'))[1] END AS name FROM {relation}
        ) AS d WHERE pg_catalog.regexp_replace(d.name, '^.*[/\\]', '') = %(document)s ORDER BY 1 LIMIT 3"""
    ).format(name=quoted(str(store["document_name"])), relation=relation(store))


def reading(store: Mapping[str, str | None]) -> sql.Composed:
    """The segments of the document ``%(document)s`` of a store in their order, and how many there are.

    ``store``: rows of ``_FIND`` and ``_NAME``, whose ``document_name`` is not null. ``%(first)s``: segments left out,
    ``%(most)s``: read at most, as long as they and their metadata have ``%(characters)s`` together; ``is_cut``: a
    longer first one.
    """
    order = [quoted(name) for name in (store["document_id"], store["segment_number"]) if name is not None]
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
        segment=quoted(str(store["segment"])),
        metadata=column(store["metadata"]),
        number=column(store["segment_number"]),
        relation=relation(store),
        name=quoted(str(store["document_name"])),
        order=sql.SQL(", ").join(order or [quoted(str(store["segment"]))]),
    )


def relation(store: Mapping[str, str | None]) -> sql.Composable:
    return quoted(str(store["schema"]), str(store["relation"]))


def column(name: str | None) -> sql.Composable:
    return sql.SQL("NULL") if name is None else quoted(name)


def quoted(*names: str) -> sql.Composable:
    """An identifier in a statement with parameters, where a % begins one."""
    return sql.SQL(sql.Identifier(*names).as_string().replace("%", "%%"))
