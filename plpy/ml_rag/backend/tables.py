"""Which tables matter for a question: embeddings of their descriptions, each made once for all sessions and roles.

The cache goes by what was embedded and not by the table, so that it is never out of date, and tells a caller nothing
but how near a text is that the caller has. It is closed to all but this code (``rights``).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ml_rag.backend import embed, rights
from ml_rag.backend.client import ModelServer
from ml_rag.backend.statements import Statements
from ml_rag.errors import EngineFailed

#: descriptions in one request
_BATCH = 64

# {s}: the schema of pgvector, which callers may use; what runs with other rights than theirs names none
_STATEMENTS: dict[str, tuple[str, ...]] = {
    "near": (
        # the vector is read once: a cast of a parameter is made anew for each row
        "WITH q AS MATERIALIZED (SELECT (jsonb_populate_record(NULL::ml_rag_internal.table_embedding,"
        " jsonb_build_object('embedding', $3))).embedding AS vector)"
        # one by one: before it has statistics of the table, the planner would compare each digest with all of them
        " SELECT d.place::int4 AS place, min(e.embedding OPERATOR(ml_rag_internal.<=>) q.vector)::float8 AS distance"
        " FROM q, unnest($1) WITH ORDINALITY AS d (digest, place) CROSS JOIN LATERAL (SELECT t.embedding"
        " FROM ml_rag_internal.table_embedding AS t WHERE t.digest = d.digest AND t.model_id = $2 OFFSET 0) AS e"
        # by another model of that name one can have other dimensions
        " WHERE (OPERATOR(ml_rag_internal.#) e.embedding) = (OPERATOR(ml_rag_internal.#) q.vector) GROUP BY 1",
        *("bytea[]", "text", "text"),
    ),
    "distances": (
        "WITH q AS MATERIALIZED (SELECT $2::{s}.vector AS vector)"
        " SELECT (v.embedding::{s}.vector OPERATOR({s}.<=>) q.vector)::float8 AS distance"
        " FROM unnest($1) WITH ORDINALITY AS v (embedding, place), q ORDER BY v.place",
        *("text[]", "text"),
    ),
    "keep": (
        "INSERT INTO ml_rag_internal.table_embedding (model_id, digest, embedding) SELECT n.model_id, n.digest,"
        " n.embedding FROM jsonb_populate_recordset(NULL::ml_rag_internal.table_embedding, $1) AS n",
        "jsonb",
    ),
    # those of tables that are gone; the others are made again
    "forget": (
        "DELETE FROM ml_rag_internal.table_embedding WHERE ctid = ANY (ARRAY("
        "SELECT e.ctid FROM ml_rag_internal.table_embedding AS e"
        " WHERE e.made_at < now() - interval '90 days' LIMIT 1000 FOR UPDATE SKIP LOCKED))",
    ),
    "is read-only": ("SELECT current_setting('transaction_read_only')::boolean AS it",),
}

#: by the schema of pgvector, which may have been made again in another one
_prepared: dict[str, Statements] = {}


def _statements(plpy: Any, name: str, *arguments: Any) -> Any:
    query = (
        "SELECT pg_catalog.quote_ident(n.nspname) AS schema FROM pg_catalog.pg_extension AS e"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"
    )
    schema = plpy.execute(query)[0]["schema"]
    if schema not in _prepared:
        _prepared[schema] = Statements(
            {key: (text.replace("{s}", schema), *types) for key, (text, *types) in _STATEMENTS.items()}
        )
    return _prepared[schema](plpy, name, *arguments)


def distances(plpy: Any, server: ModelServer, query: str, texts: list[str], model_id: str) -> list[float]:
    """Cosine distance of each text from the query. Texts are embedded once, and kept where rows can be written."""
    (vector,) = embed.embed(server, [query], model_id, "query")
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    rows = rights.as_owner(plpy, lambda: list(_statements(plpy, "near", digests, model_id, vector)))
    found: dict[int, float] = {row["place"] - 1: row["distance"] for row in rows}
    missing = [place for place in range(len(texts)) if place not in found]
    for start in range(0, len(missing), _BATCH):
        places = missing[start : start + _BATCH]
        made = embed.embed(server, [texts[place] for place in places], model_id, "document")
        if made[0].count(",") != vector.count(","):
            raise EngineFailed("unexpected reply from the model server", detail="Embeddings of different dimensions.")
        for place, row in zip(places, _statements(plpy, "distances", made, vector), strict=True):
            found[place] = row["distance"]
        _keep(plpy, model_id, [digests[place] for place in places], made)
    return [found[place] for place in range(len(texts))]


def _keep(plpy: Any, model_id: str, digests: list[bytes], vectors: list[str]) -> None:
    if _statements(plpy, "is read-only")[0]["it"]:
        return

    rows = [
        {"model_id": model_id, "digest": f"\\x{digest.hex()}", "embedding": made}
        for digest, made in zip(digests, vectors, strict=True)
    ]

    def write() -> None:
        _statements(plpy, "forget")
        _statements(plpy, "keep", json.dumps(rows))

    rights.as_owner(plpy, write, writes=True)
