"""ground/options: records of the options; those of the contract are as it has them.

An option that the contract does not name needs no line here: tests/sql/test_parse.py tries each record at its limits.
"""

from __future__ import annotations

import contextlib
import math
import time
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from support.cluster import Connection
from support.metrics import METRICS
from support.stores import create_store

INF = math.inf

#: what auto means where the option is then decided by the call
LEFT_OUT = "left out"

#: what callers rely on, written down once more: routine, option -> type, least, most, default, what auto means
CONTRACT: dict[tuple[str, str], tuple[Any, ...]] = {
    ("ml_rag", "vector_store"): ("text[]",),
    ("ml_rag", "exclude_vector_store"): ("text[]",),
    ("ml_rag", "schema"): ("text[]",),
    ("ml_rag", "document_name"): ("text[]",),
    ("ml_rag", "exclude_document_name"): ("text[]",),
    ("ml_rag", "filters"): ("object",),
    ("ml_rag", "required_keywords"): ("text[]",),
    ("ml_rag", "excluded_keywords"): ("text[]",),
    ("ml_rag", "n_citations"): ("integer", 0, 100),
    ("ml_rag", "distance_metric"): ("choice", sorted(METRICS), None, "COSINE"),
    ("ml_rag", "skip_generate"): ("boolean", None, None, False),
    ("ml_rag", "model_options"): ("object",),
    ("ml_rag", "retrieval_options"): ("object",),
    ("ml_rag", "vector_store_columns"): ("object",),
    ("ml_rag", "embed_model_id"): ("text",),
    ("ml_rag", "query_embedding"): ("vector",),
    ("ml_rag", "rerank"): ("object",),
    ("rerank", "model_id"): ("text",),
    ("rerank", "candidates"): ("integer", 1, 1000, 50),
    ("rerank", "min_score"): ("number", 0, 1),
    ("ml_rank", "top_n"): ("integer", 1, 2**31 - 1),
    ("ml_rank", "ignore_record_details_in_response"): ("boolean", None, None, False),
    ("ml_rank", "model"): ("text",),
    ("ml_rank", "language"): ("text",),
    ("ml_rag", "semantic_search"): ("boolean", None, None, True),
    ("ml_rag", "keyword_search"): ("boolean", None, None, False),
    ("ml_rag", "hybrid_options"): ("object",),
    ("ml_rag", "arms"): ("array",),
    ("ml_rag", "citation_fields"): ("text[]",),
    ("arm", "search"): ("choice", ["semantic", "keyword", "function"]),
    ("arm", "in"): ("text", None, None, "segment"),
    ("arm", "query"): ("any", None, None, "question"),
    ("arm", "query_embedding"): ("vector",),
    ("arm", "weight"): ("number", 0, 1, None, LEFT_OUT),
    ("arm", "candidates"): ("integer", 1, 10_000, 100),
    ("arm", "max_distance"): ("number", 0, 999999.9999),
    ("arm", "min_score"): ("number", -1e9, INF),
    ("hybrid_options", "fusion"): ("choice", ["weighted", "rrf"], None, "weighted"),
    ("hybrid_options", "semantic_weight"): ("number", 0, 1, None, LEFT_OUT),
    ("hybrid_options", "rrf_k"): ("integer", 1, 1_000_000, 60),
    ("hybrid_options", "candidates"): ("integer", 1, 10_000, 100),
    ("ml_rag", "abstain"): ("boolean",),
    ("ml_rag", "abstain_text"): ("text",),
    ("ml_rag", "prompt"): ("object",),
    ("ml_rag", "explain"): ("boolean", None, None, False),
    ("prompt", "system"): ("text",),
    ("prompt", "length"): ("choice", ["short", "medium", "long"]),
    ("prompt", "citation_style"): ("choice", ["none", "numbered"], None, "none"),
    ("prompt", "order"): ("choice", ["best_first", "best_last"], None, "best_last"),
    ("retrieval_options", "max_distance"): ("number", 0, 999999.9999, None, 0.6),
    ("retrieval_options", "percentage_distance"): ("number", 0, 999999.9999, None, 20),
    ("retrieval_options", "segment_overlap"): ("integer", 0, 5, 1, 1),
    ("vector_store_columns", "segment"): ("text", None, None, "segment"),
    ("vector_store_columns", "segment_embedding"): ("text", None, None, "segment_embedding"),
    ("vector_store_columns", "document_name"): ("text", None, None, "document_name"),
    ("vector_store_columns", "document_id"): ("text", None, None, "document_id"),
    ("vector_store_columns", "segment_number"): ("text", None, None, "segment_number"),
    ("vector_store_columns", "metadata"): ("text", None, None, "metadata"),
    ("ml_generate", "task"): ("choice", ["generation", "summarization"], None, "generation"),
    ("ml_generate", "model_id"): ("text",),
    ("ml_generate", "context"): ("text",),
    ("ml_generate", "language"): ("text",),
    ("ml_generate", "temperature"): ("number", 0, INF, 0),
    ("ml_generate", "max_tokens"): ("integer", 1, 1_000_000, 256),
    ("ml_generate", "top_k"): ("integer", 0, 32000),
    ("ml_generate", "top_p"): ("number", 0, 1),
    ("ml_generate", "repeat_penalty"): ("number", 0, 2),
    ("ml_generate", "frequency_penalty"): ("number", 0, 1),
    ("ml_generate", "presence_penalty"): ("number", 0, 1),
    ("ml_generate", "stop_sequences"): ("text[]",),
    ("ml_generate", "speculative_decoding"): ("boolean",),
    ("ml_generate", "seed"): ("integer", 0, 2**32 - 1),
    ("ml_generate", "json_schema"): ("object",),
    ("ml_embed_row", "embed_model_id"): ("text",),
}


def entry(*spec: Any) -> tuple[Any, Any, Any, Any, Any]:
    kind, least, most, default, auto = (*spec, *[None] * (5 - len(spec)))
    return kind, least, most, default, auto


def test_the_options_of_the_contract_are_as_it_has_them(module_asker: Connection) -> None:
    rows = module_asker.execute(
        "SELECT routine, name, type, minimum, maximum, choices, default_value, auto_value FROM ml_rag.option"
    ).fetchall()
    found = {(r[0], r[1]): r[2:] for r in rows}
    assert set(CONTRACT) - set(found) == set()
    for key, spec in CONTRACT.items():
        kind, least, most, default, auto = entry(*spec)
        type_, minimum, maximum, choices, default_value, auto_value = found[key]
        assert type_ == kind, key
        assert default_value == default, key
        assert auto_value == (None if auto is LEFT_OUT else auto), key
        if kind == "choice":
            assert choices == least, key
        else:
            assert choices is None, key
            assert (None if minimum is None else float(minimum)) == least, key
            expected = None if most == INF or most is None else Decimal(str(most))
            assert maximum == expected, key


def test_every_option_belongs_to_a_routine_or_to_an_object_among_options(module_owner: Connection) -> None:
    lost = module_owner.execute(
        "SELECT DISTINCT o.routine FROM ml_rag.option AS o"
        " WHERE NOT EXISTS (SELECT FROM pg_proc AS p JOIN pg_depend AS d"
        " ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e' WHERE p.proname = o.routine)"
        " AND NOT EXISTS (SELECT FROM ml_rag.option AS k WHERE k.keys_of = o.routine)"
    ).fetchall()
    assert lost == []
    keys = module_owner.execute(
        "SELECT k.keys_of FROM ml_rag.option AS k WHERE k.keys_of NOT IN (SELECT o.routine FROM ml_rag.option AS o)"
    ).fetchall()
    assert keys == []


@pytest.mark.parametrize(
    "record",
    [
        "n_citations | integer 0..1 | none | there is one",
        "x | integer 0.. | none | no maximum",
        "x | number ..1 | none | no minimum",
        "x | text 0..1 | none | limits of a text",
        "x | choice | none | no choices",
        "x | text a,b | none | choices of a text",
        "x | words | none | no such type",
        "x | text of rerank | none | keys of a text",
        "x | text | none",
        "x | text | none | a | b",
        "x | text privat | none | misspelt",
        "x | integer 0..9 auto = 3 | none | blanks",
    ],
)
def test_a_record_that_lacks_what_it_needs_is_refused(module_owner: Connection, record: str) -> None:
    with pytest.raises((psycopg.IntegrityError, psycopg.errors.InvalidParameterValue)):
        module_owner.execute("SELECT ml_rag._add_options('ml_rag', %s)", (record,))


@pytest.mark.parametrize(
    "call",
    [
        "SELECT ml_rag_search('q', jsonb_build_object('vector_store', {many}))",
        "SELECT ml_rag_chat('q', jsonb_build_object('document_name', {many}))",
        "SELECT ml_rag_answer('q', jsonb_build_object('document_name', {many}, 'explain', true))",
        "SELECT ml_rag_evaluate('SELECT 1 AS id, ''q'' AS question, {many} AS documents')",
    ],
)
def test_hundreds_of_thousands_of_texts_keep_no_cancel_waiting(owner: Connection, call: str) -> None:
    """jsonb_agg and jsonb_object_agg take a time that grows with the square of the texts in a value, uncancelled."""
    create_store(owner, "docs", [("a", 1, 1, "s", (1, 0, 0))])
    many = "(SELECT array_to_json(array_agg(concat($$x$$, g)))::jsonb FROM generate_series(1, 400000) AS g)"
    owner.execute("SET statement_timeout = '1s'")
    began = time.monotonic()
    with pytest.raises(psycopg.Error):
        owner.execute(call.format(many=many).encode())
    assert time.monotonic() - began < 8


@pytest.mark.parametrize(
    "call",
    [
        "SELECT ml_rag_chat('q', {keys})",
        "SELECT ml_rag._begin_table('ml_generate_table', 'public.docs.segment', 'public.docs.out', {keys})",
        "SELECT ml_rag._lay_over_filters({keys}, jsonb_build_object('and', '[]'))",
    ],
)
def test_a_hundred_thousand_keys_keep_no_cancel_waiting(owner: Connection, call: str) -> None:
    """They are not taken away from options by "-", which compares each key with each, uncancelled."""
    create_store(owner, "docs")
    keys = "(SELECT json_object_agg(concat($$x$$, g), 1)::jsonb FROM generate_series(1, 100000) AS g)"
    owner.execute("SET statement_timeout = '1s'")
    began = time.monotonic()
    with contextlib.suppress(psycopg.errors.InvalidParameterValue, psycopg.errors.QueryCanceled):
        owner.execute(call.format(keys=keys).encode())
    assert time.monotonic() - began < 8
