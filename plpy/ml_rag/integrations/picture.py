"""What a vector store holds: documents, segments and pages, how long they are, what lacks an embedding, duplicates.

All of it is read as the role of the page, of at most ``MOST`` rows; tokens are counted in a sample of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

from ml_rag.integrations.database import Reader
from ml_rag.integrations.documents import column, held, quoted, relation

#: segments that are counted, documents that are listed, pairs that are alike
MOST, LISTED, PAIRS = 100_000, 100, 10
#: bars of a histogram
BARS = 12
#: distances that are computed in search of duplicates, and segments whose nearest one is looked for
_DISTANCES, _SAMPLE = 1_000_000, 500

#: segments whose tokens are counted, and characters of each
_COUNTED, _CHARACTERS = 1000, 20_000

_TOKENS = sql.SQL("SELECT ml_rag._python('count_tokens', jsonb_build_array(%(texts)s::text[], %(model)s::text)) AS n")
_MAY_LOAD = sql.SQL(
    """SELECT c.relkind IN ('r', 'p') AND has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'DELETE')
      AND has_function_privilege('ml_rag.load_document(regclass, text, bytea, jsonb)', 'EXECUTE') AS may_load
    FROM pg_class AS c WHERE c.oid = %(oid)s"""
)


async def read(reader: Reader, store: str) -> dict[str, Any]:
    """The picture of a store; empty where discovery does not find it. Raises psycopg.Error."""
    async with reader.transaction() as rows:
        columns = await held(rows, store)
        if not columns:
            return {}
        (found,) = await rows(_counts(columns), {"most": MOST, "listed": LISTED})
        found |= {name: _bars(found[name]) for name in ("by_document", "by_length")}
        found |= columns | (await rows(_MAY_LOAD, columns))[0] | {"pairs": []}
        embedded = found["segments"] - found["missing"]
        # of a larger store without an index each search would read all of it
        if embedded and found["segments"] < MOST and columns["document_name"] and columns["segment_number"]:
            found["sample"] = min(embedded, _SAMPLE, max(20, _DISTANCES // embedded))
            wanted = {"sample": found["sample"], "pairs": PAIRS}
            found["pairs"] = await rows(_alike(columns, reader.schemas.vector), wanted)
        texts = [row["text"] for row in await rows(_texts(columns), {"most": MOST, "counted": _COUNTED})]
    found |= await _by_tokens(reader, texts, columns["embed_model_id"])
    return found


async def _by_tokens(reader: Reader, texts: list[str], model: str | None) -> dict[str, Any]:
    """``by_tokens``: the histogram of their tokens, where the model server can count them; ``counted``: how many."""
    nothing: dict[str, Any] = {"by_tokens": None}
    if not texts or model is None:
        return nothing
    try:
        counts = (await reader.rows(_TOKENS, {"texts": texts, "model": model}))[0]["n"]
    except psycopg.Error:  # it is not there: words are counted
        return nothing
    known = [count for count in counts or () if count is not None]
    return {"by_tokens": _bars(known), "counted": len(known)} if known else nothing


def _bars(values: Sequence[int]) -> list[tuple[int, int, int]]:
    """Bars of one width: from, to, how many."""
    if not values:
        return []
    width = max(1, -(-max(values) // BARS))
    bars = Counter((max(value, 1) - 1) // width for value in values)
    return [(1 + bar * width, (bar + 1) * width, bars[bar]) for bar in range(max(bars) + 1)]


def _counts(store: Mapping[str, Any]) -> sql.Composed:
    # words: blanks and line breaks between them, which costs a fraction of a regular expression
    return sql.SQL(
        """WITH r AS MATERIALIZED (
          SELECT t.name, t.text, t.page, t.title, t.has_none,
            1 + length(t.text) - length(translate(t.text, E' \\n\\t', '')) AS words
          FROM (
            SELECT {name}::text AS name, {segment}::text AS text, {metadata} ->> 'page' AS page,
              left({metadata} ->> 'title', 200) AS title, {embedding} IS NULL AS has_none
            FROM {relation} LIMIT %(most)s
          ) AS t
        ), d AS MATERIALIZED (
          SELECT r.name, min(r.title) AS title, count(*) AS n, count(DISTINCT r.page) AS pages, sum(r.words) AS words,
            count(*) FILTER (WHERE r.has_none) AS missing FROM r GROUP BY r.name
        )
        SELECT c.*, (SELECT count(*) - count(DISTINCT md5(r.text)) FROM r) AS repeated,
          ARRAY(SELECT d.n FROM d ORDER BY 1) AS by_document,
          ARRAY(SELECT r.words FROM r WHERE r.words IS NOT NULL ORDER BY 1) AS by_length,
          (SELECT coalesce(jsonb_agg(to_jsonb(l) ORDER BY l.n DESC, l.name COLLATE "C"), '[]')
           FROM (SELECT d.* FROM d ORDER BY d.n DESC, d.name COLLATE "C" LIMIT %(listed)s) AS l) AS listed
        FROM (SELECT count(*) AS documents, coalesce(sum(d.n), 0)::bigint AS segments, coalesce(sum(d.pages), 0)::bigint
                AS pages, coalesce(sum(d.missing), 0)::bigint AS missing FROM d) AS c"""
    ).format(
        name=column(store["document_name"]),
        segment=quoted(store["segment"]),
        metadata=_metadata(store["metadata"]),
        embedding=quoted(store["segment_embedding"]),
        relation=relation(store),
    )


def _metadata(name: str | None) -> sql.Composable:
    return sql.SQL("NULL::jsonb") if name is None else sql.SQL("ml_rag._as_jsonb({})").format(column(name))


def _texts(store: Mapping[str, Any]) -> sql.Composed:
    """Some of the segments, in no order."""
    return sql.SQL(
        """SELECT r.text FROM (
          SELECT left({segment}::text, {characters}) AS text FROM {relation} LIMIT %(most)s
        ) AS r WHERE r.text <> '' ORDER BY random() LIMIT %(counted)s"""
    ).format(segment=quoted(store["segment"]), characters=sql.Literal(_CHARACTERS), relation=relation(store))


def _alike(store: Mapping[str, Any], vector: str) -> sql.Composed:
    """Of some segments the nearest other one, the most alike first, each pair once."""
    return sql.SQL(
        """SELECT p.* FROM (
          SELECT DISTINCT ON (least(s.id, o.id), greatest(s.id, o.id)) s.name, s.number, s.text, o.name AS other_name,
            o.number AS other_number, o.distance
          FROM (SELECT {name}::text AS name, {number}::text AS number, left({segment}::text, 500) AS text,
                  {embedding} AS embedding, concat({name}, ' ', {number}) AS id
                FROM {relation} WHERE {embedding} IS NOT NULL LIMIT %(sample)s) AS s
          CROSS JOIN LATERAL (
            SELECT n.* FROM (
              SELECT {name}::text AS name, {number}::text AS number, concat({name}, ' ', {number}) AS id,
                {embedding} OPERATOR({vector}.<=>) s.embedding AS distance
              FROM {relation} ORDER BY {embedding} OPERATOR({vector}.<=>) s.embedding LIMIT 2
            ) AS n WHERE n.id <> s.id ORDER BY n.distance LIMIT 1
          ) AS o
          ORDER BY least(s.id, o.id), greatest(s.id, o.id), o.distance
        ) AS p WHERE p.distance < 'NaN' ORDER BY p.distance, p.name COLLATE "C", p.number LIMIT %(pairs)s"""
    ).format(
        name=quoted(store["document_name"]),
        number=quoted(store["segment_number"]),
        segment=quoted(store["segment"]),
        embedding=quoted(store["segment_embedding"]),
        relation=relation(store),
        vector=quoted(vector),
    )
