"""ground/options: the options there are, each as SPEC.md section 2 and 3 has it."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest

from support.cluster import Connection

INF = math.inf

#: what auto means where the option is then decided by the call
LEFT_OUT = "left out"

#: SPEC.md, written down once more: routine, option -> type, least, most, default, what auto means
SPEC: dict[tuple[str, str], tuple[Any, ...]] = {
    ("ml_rag", "vector_store"): ("text[]",),
    ("ml_rag", "exclude_vector_store"): ("text[]",),
    ("ml_rag", "schema"): ("text[]",),
    ("ml_rag", "document_name"): ("text[]",),
    ("ml_rag", "exclude_document_name"): ("text[]",),
    ("ml_rag", "filters"): ("object",),
    ("ml_rag", "required_keywords"): ("text[]",),
    ("ml_rag", "excluded_keywords"): ("text[]",),
    ("ml_rag", "n_citations"): ("integer", 0, 100),
    ("ml_rag", "distance_metric"): ("choice", ["COSINE", "DOT", "EUCLIDEAN", "MANHATTAN"], None, "COSINE"),
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
    ("hybrid_options", "fusion"): ("choice", ["weighted", "rrf"], None, "weighted"),
    ("hybrid_options", "semantic_weight"): ("number", 0, 1, None, LEFT_OUT),
    ("hybrid_options", "rrf_k"): ("integer", 1, 1_000_000, 60),
    ("hybrid_options", "candidates"): ("integer", 1, 10_000, 100),
    ("ml_rag", "abstain"): ("boolean",),
    ("ml_rag", "abstain_text"): ("text",),
    ("ml_rag", "prompt"): ("object",),
    ("ml_rag", "explain"): ("boolean", None, None, False),
    ("prompt", "system"): ("text",),
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
ROUTINES = sorted({routine for routine, _ in SPEC})
#: a value of each type
SAMPLES: dict[str, Any] = {
    "text[]": ["a", "b.c"],
    "integer": 1,
    "number": 0.5,
    "boolean": True,
    "object": {},
    "text": "x",
    "vector": [1, 2, 3],
}
KIND = {"text[]": "array", "integer": "number", "number": "number", "boolean": "boolean", "object": "object"}

CASES = [pytest.param(routine, name, *entry, id=f"{routine}.{name}") for (routine, name), entry in SPEC.items()]
NUMBERS = [c for c in CASES if c.values[2] in ("integer", "number")]


def entry(*spec: Any) -> tuple[Any, Any, Any, Any, Any]:
    kind, least, most, default, auto = (*spec, *[None] * (5 - len(spec)))
    return kind, least, most, default, auto


def test_the_view_of_options_says_what_the_contract_says(module_asker: Connection) -> None:
    rows = module_asker.execute(
        "SELECT routine, name, type, minimum, maximum, choices, default_value, auto_value, description"
        " FROM ml_rag.option WHERE routine = ANY (%s)",
        (ROUTINES,),
    ).fetchall()
    found = {(r[0], r[1]): r[2:] for r in rows}
    assert set(found) == set(SPEC)
    for key, spec in SPEC.items():
        kind, least, most, default, auto = entry(*spec)
        type_, minimum, maximum, choices, default_value, auto_value, description = found[key]
        assert type_ == kind, key
        assert description, key
        assert default_value == default, key
        assert auto_value == (None if auto is LEFT_OUT else auto), key
        if kind == "choice":
            assert choices == least, key
        else:
            assert choices is None, key
            assert (None if minimum is None else float(minimum)) == least, key
            expected = None if most == INF or most is None else Decimal(str(most))
            assert maximum == expected, key


def test_every_option_of_every_routine_has_a_description_and_a_known_type(module_asker: Connection) -> None:
    odd = module_asker.execute(
        "SELECT routine, name FROM ml_rag.option WHERE coalesce(description, '') = ''"
        " OR type NOT IN ('text', 'text[]', 'integer', 'number', 'boolean', 'object', 'array', 'choice', 'vector')"
        " OR (type = 'choice') <> (choices IS NOT NULL) OR type IN ('integer', 'number') AND minimum IS NULL"
        " OR type = 'integer' AND maximum IS NULL"
    ).fetchall()
    assert odd == []
