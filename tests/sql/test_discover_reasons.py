"""pipeline/discover: why a name in vector_store leads nowhere, as the warning tells it."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, noticed
from support.stores import create_store, retrieve

ROW = [("a", 1, 1, "s", (1, 0, 0))]

WHY = {
    "a name of nothing": ("SELECT 1", {}, "No table or view of that name exists", "ml_rag.discover()"),
    "a schema out of reach": (
        "CREATE SCHEMA hidden; ALTER TABLE x SET SCHEMA hidden",
        {},
        "No table or view of that name exists",
        "ml_rag.discover()",
    ),
    "left out": ("", {"exclude_vector_store": ["public.x"]}, '"exclude_vector_store"', "ml_rag.discover()"),
    "another schema": ("", {"schema": ["pg_temp", "s"]}, "in schema public", "ml_rag.discover()"),
    "no embedding": (
        "ALTER TABLE x DROP segment_embedding",
        {},
        "no column segment_embedding",
        "SELECT ml_rag.create_vectorizer('public.x'",
    ),
    "no segment": (
        "ALTER TABLE x RENAME segment TO b",
        {},
        "no column segment.",
        """SELECT ml_rag.adopt('public.x', '{"embed_model_id": "…"}'). For one call, map them""",
    ),
    "no embedding in a view": (
        "ALTER TABLE x RENAME TO y; CREATE VIEW x AS SELECT segment FROM y",
        {},
        "no column segment_embedding",
        "let it show those of the table behind it",
    ),
    "no mapped column": (
        "",
        {"vector_store_columns": {"metadata": "Meta"}},
        'no column "Meta"',
        'Map the columns it has with "vector_store_columns".',
    ),
    "no vector": (
        "ALTER TABLE x ALTER segment_embedding TYPE real[] USING NULL",
        {},
        "segment_embedding is of type real[]",
        "ml_rag.discover()",
    ),
    "no privilege": (
        "REVOKE SELECT ON x FROM ml_rag_user",
        {},
        "may not SELECT segment, segment_embedding",
        "GRANT SELECT",
    ),
    "half a privilege": (
        "REVOKE SELECT ON x FROM ml_rag_user; GRANT SELECT (segment) ON x TO ml_rag_user",
        {},
        "may not SELECT segment_embedding.",
        "GRANT SELECT",
    ),
    "no marker": (
        "COMMENT ON COLUMN x.segment_embedding IS 'vectors'",
        {},
        "does not name an embedding model",
        "COMMENT ON",
    ),
    "another model": ("", {"embed_model_id": "fake-embed-slow"}, "model fake-embed, and the call", '"embed_model_id"'),
    "no data": (
        "ALTER TABLE x RENAME TO y; CREATE MATERIALIZED VIEW x AS TABLE y WITH NO DATA",
        {},
        "without data",
        "REFRESH MATERIALIZED VIEW public.x",
    ),
    "a number of no integers": (
        "ALTER TABLE x ALTER segment_number TYPE text",
        {"vector_store_columns": {"segment_number": "segment_number"}},
        "wrong type",
        "ml_rag.discover()",
    ),
}


@pytest.mark.parametrize(("change", "options", "reason", "hint"), WHY.values(), ids=WHY.keys())
def test_the_warning_says_why_a_name_leads_nowhere(
    owner: Connection, asker: Connection, change: str, options: dict[str, Any], reason: str, hint: str
) -> None:
    create_store(owner, rows=ROW)
    name = "no such" if change == "SELECT 1" else "x"
    create_store(owner, "x", ROW)
    if change:
        owner.execute(change)
    told = noticed(asker, lambda n: (n.message_primary, n.message_detail, n.message_hint))
    # the embedding is what makes another model's store and an unknown one no error
    with contextlib.suppress(psycopg.Error):
        retrieve(asker, (1, 0, 0), vector_store=["docs", name], **options)
    ((message, detail, advice),) = [t for t in told if t[0].startswith(f'"{name}" is not a vector store')]
    assert message.endswith("that this call can search; ignored")
    assert reason in detail
    assert hint in advice


def test_the_error_says_why_what_was_named_is_no_store_and_names_nothing_that_the_caller_may_not_read(
    owner: Connection, asker: Connection
) -> None:
    create_store(owner, rows=ROW)
    create_store(owner, "secret", ROW)
    owner.execute("REVOKE ALL ON secret FROM ml_rag_user; CREATE TABLE plain (id integer PRIMARY KEY, title text)")
    owner.execute("GRANT SELECT ON plain TO PUBLIC")
    with pytest.raises(psycopg.errors.NoDataFound) as caught:
        retrieve(asker, (1, 0, 0), vector_store=["public.plain"])
    detail = caught.value.diag.message_detail or ""
    assert "Left out: public.plain (It has no column segment), public.docs (It is not listed" in detail
    assert "secret" not in detail
    hint = caught.value.diag.message_hint or ""
    assert "SELECT ml_rag.create_vectorizer('public.plain'" in hint
    with pytest.raises(psycopg.errors.NoDataFound) as caught:
        retrieve(asker, (1, 0, 0), vector_store=["public.secret"])
    assert "public.secret (The caller may not SELECT" in (caught.value.diag.message_detail or "")


def test_a_store_that_was_not_named_is_not_said_to_be_broken(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROW)
    with pytest.raises(psycopg.errors.NoDataFound, match="no vector store found") as caught:
        retrieve(asker, (1, 0, 0), vector_store=["public.dosc"])
    assert (caught.value.diag.message_detail or "").endswith(
        "Left out: public.dosc (No table or view of that name exists in a schema that the caller may use),"
        ' public.docs (It is not listed in "vector_store").'
    )
    assert caught.value.diag.message_hint == 'Did you mean "public.docs"?'
    with pytest.raises(psycopg.errors.NoDataFound) as caught:
        retrieve(asker, (1, 0, 0), vector_store=["dosc"])
    assert caught.value.diag.message_hint == 'Did you mean "public.docs"?'
    with pytest.raises(psycopg.errors.NoDataFound) as caught:
        retrieve(asker, (1, 0, 0), vector_store=["invoices"])
    assert 'It is not listed in "vector_store"' in (caught.value.diag.message_detail or "")
    assert "ml_rag.discover()" in (caught.value.diag.message_hint or "")
