"""Texts to vectors, with the errors of those at fault; and where the vectors of rows are written."""

from __future__ import annotations

from typing import Any

from ml_rag.backend import calls, embed
from ml_rag.backend.jobs.loop import Session, Steps, run
from ml_rag.backend.sqlstate import sqlstate
from ml_rag.errors import EngineFailed, MlRagError

#: SQLSTATEs that can lie in a text; what every text would get is another: no model, no server, no memory
_OF_A_TEXT = ("38000", "22000", "22023")
#: texts tried by themselves, before an error is that of all
_TRIED = 11
_plans: dict[str, Any] = {}


def _embed(session: Session, texts: list[str], model: str) -> tuple[list[str], int]:
    plpy = session.plpy
    with calls.waiting(plpy, "ml_rag.embed", "embed", model):
        vectors, truncated = embed.embed_counted(session.server(), texts, model)
    if session.schema not in _plans:
        _plans[session.schema] = plpy.prepare(f"SELECT cardinality($1::{session.schema}.vector[])", ["text[]"])
    try:
        plpy.execute(_plans[session.schema], [vectors])
    except plpy.SPIError as e:
        if not sqlstate(e).startswith("22"):
            raise
        # numbers that are none: pgvector is the first to read them
        raise EngineFailed("unexpected reply from the model server", detail=str(e)[:200]) from None
    return vectors, truncated


def error_of(error: MlRagError) -> dict[str, Any]:
    """An error as ml_rag._note_failures takes it."""
    return {"sqlstate": error.sqlstate, "message": error.message, "detail": error.detail, "hint": error.hint}


def embed_apart(
    session: Session, texts: list[str], model: str
) -> tuple[list[str | None], list[MlRagError | None], int]:
    """Vectors, errors, and how many of the texts the model has cut.

    Where it fails each half is tried by itself, down to those at fault, which get their error.
    """
    if not texts:
        return [], [], 0
    try:
        vectors, truncated = _embed(session, texts, model)
    except MlRagError as e:
        if e.sqlstate not in _OF_A_TEXT:
            raise
        if len(texts) == 1:
            return [None], [e], 0
        half = len(texts) // 2
        first = embed_apart(session, texts[:half], model)
        rest = embed_apart(session, texts[half:], model)
        return first[0] + rest[0], first[1] + rest[1], first[2] + rest[2]
    return [*vectors], [None] * len(texts), truncated


def embed_all(session: Session, texts: list[str], model: str) -> tuple[list[str | None], list[MlRagError | None], int]:
    """The same, but where the first eleven of more texts fail, the error of the first is raised."""
    try:
        vectors, truncated = _embed(session, texts, model)
        return [*vectors], [None] * len(texts), truncated
    except MlRagError as e:
        if e.sqlstate not in _OF_A_TEXT:
            raise
    first = embed_apart(session, texts[:_TRIED], model)
    if len(texts) > _TRIED and first[1][0] is not None and None not in first[1]:
        raise first[1][0]
    rest = embed_apart(session, texts[_TRIED:], model)
    return first[0] + rest[0], first[1] + rest[1], first[2] + rest[2]


def write_vectors(
    relation: str, shard: dict[str, Any] | None, column: str, segment: str, type_name: str, places: list[str],
    texts: list[str], vectors: list[str | None],
) -> Steps[tuple[int, list[int]]]:  # fmt: skip
    """Write the vectors of rows that still have that text and that no other transaction is changing; others come again.

    It waits for no row, so it takes part in no deadlock with a transaction that changes many. Returns how many it has
    written, and which ones a trigger of the table has kept as they are. The names are quoted. ``shard``: where it is.
    """
    schema = type_name.rpartition(".")[0]
    found = yield from run(
        f"""
        WITH free AS MATERIALIZED (
          SELECT t.ctid AS place, u.text, u.vector, u.n FROM ROWS FROM (json_array_elements_text($1 -> 'places'),
            json_array_elements_text($1 -> 'texts'), unnest($2::{schema}.vector[]))
            WITH ORDINALITY AS u (place, text, vector, n)
          JOIN ONLY {relation} AS t ON t.ctid = u.place::tid
          WHERE u.vector IS NOT NULL AND t.{column} IS NULL AND t.{segment}::text COLLATE "C" = u.text
          FOR NO KEY UPDATE OF t SKIP LOCKED
        ), written AS (
          UPDATE ONLY {relation} AS t SET {column} = f.vector::{type_name} FROM free AS f WHERE t.ctid = f.place
          RETURNING f.n, t.ctid AS place, t.{segment}::text COLLATE "C" = f.text AS is_same,
            t.{column} IS NOT NULL AS is_written
        )
        SELECT json_build_object('written', count(*) FILTER (WHERE w.is_written AND w.is_same),
          'kept', json_agg(f.n - 1 ORDER BY f.n) FILTER (WHERE w.is_written IS NOT TRUE),
          'changed', json_agg(w.place ORDER BY w.place) FILTER (WHERE w.is_written AND w.is_same IS NOT TRUE))
        FROM free AS f LEFT JOIN written AS w ON w.n = f.n""",
        vectors=vectors, on=shard, places=places, texts=texts,
    )  # fmt: skip
    if found["changed"]:
        # a trigger of the table has taken the chance to change the text
        yield from run(
            f"WITH changed AS (UPDATE ONLY {relation} AS t SET {column} = NULL WHERE t.ctid IN ("
            "SELECT p.place::tid FROM json_array_elements_text($1 -> 'places') AS p (place)) RETURNING 1)"
            " SELECT count(*) FROM changed",
            on=shard,
            places=found["changed"],
        )
    return found["written"], found["kept"] or []
