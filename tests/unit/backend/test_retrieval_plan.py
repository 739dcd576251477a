"""What statement a request becomes, without a database: golden_statements.sql beside this file has it.

After a change that is meant: ML_RAG_UPDATE_GOLDEN=1 pytest FILE.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ml_rag.backend.retrieval.plan import Arm, Read, Shape, Source, Statement, Values, plan
from ml_rag.backend.retrieval.sqltext import identifier, literal
from ml_rag.backend.retrieval.stores import KeywordIndex, Metric, Store

GOLDEN = Path(__file__).with_name("golden_statements.sql")

COSINE = Metric("COSINE", "<=>", 0, is_complement=True)
EUCLIDEAN = Metric("EUCLIDEAN", "<->", 0, is_complement=False)
STORE = Store(
    vector_store="public.handbook",
    relation=1,
    table="public.handbook",
    embed_model_id="m",
    segment_embedding="segment_embedding",
    segment="segment",
    document_name="document_name",
    document_id="document_id",
    segment_number="segment_number",
    metadata="metadata",
    embedding_type="vector",
    dimensions=3,
    document_id_type="bigint",
    segment_number_type="integer",
    found="named",
    is_table=True,
    is_small=True,
    is_secured=False,
    names=frozenset({"handbook"}),
)
#: a table of somebody else's making
OTHER = replace(
    STORE,
    vector_store="kb.it's",
    table='kb."it\'s"',
    segment_embedding='em"bedding',
    document_name=None,
    document_id="key",
    document_id_type="uuid",
    segment_number=None,
    embedding_type="halfvec",
)
INDEX = KeywordIndex(("document_id", "segment_number"), ("bigint", "integer"))
SEMANTIC, KEYWORD = Arm("semantic", 100), Arm("keyword", 100)

HANDBOOK = Source(STORE, Read.first(3))
HYBRID = Source(STORE, Read.first(100), INDEX)
SHAPES: dict[str, tuple[Shape, tuple[Source, ...]]] = {
    "by meaning, as rows": (Shape((Arm("semantic", 3),), 3, COSINE, has_vector=True), (HANDBOOK,)),
    "by meaning, a limit, as citations with fields": (
        Shape(
            (Arm("semantic", 3),), 3, EUCLIDEAN, has_vector=True, has_max_distance=True, has_percentage=True,
            form="citations", fields=("document_id", "rank"),
        ),
        (HANDBOOK,),
    ),
    "by meaning, two stores, one read without its index, hits": (
        Shape((Arm("semantic", 3),), 3, COSINE, has_vector=True, form="hits"),
        (HANDBOOK, Source(OTHER, Read("total", 3))),
    ),
    "by meaning, by an index of smaller vectors": (
        Shape((Arm("semantic", 3),), 3, COSINE, has_vector=True, form="hits"),
        (replace(HANDBOOK, quantization="binary"),),
    ),
    "by meaning, widened, citations": (
        Shape(
            (Arm("semantic", 3),), 3, COSINE, has_vector=True, overlap=1, form="citations", fields=("segment_range",)
        ),
        (HANDBOOK, Source(OTHER, Read.first(3))),
    ),
    "by words, without a vector": (
        Shape((Arm("keyword", 3, has_limit=True),), 3, COSINE, has_vector=False, form="hits"),
        (Source(STORE, None, INDEX),),
    ),
    "hybrid, weighted by how clear the arms are": (
        Shape((SEMANTIC, KEYWORD), 3, COSINE, has_vector=True, fusion="auto", form="citations"),
        (HYBRID,),
    ),
    "hybrid, weighted": (
        Shape((SEMANTIC, KEYWORD), 3, EUCLIDEAN, has_vector=True, form="citations"),
        (HYBRID,),
    ),
    "hybrid, by ranks, widened": (
        Shape((SEMANTIC, KEYWORD), 3, COSINE, has_vector=True, fusion="rrf", overlap=2), (HYBRID,)
    ),
}  # fmt: skip


def made(name: str) -> Statement:
    shape, sources = SHAPES[name]
    return plan(shape, sources, "public")


def test_the_statements_are_the_golden_ones() -> None:
    found = "\n\n".join(
        f"-- {name}\n-- {', '.join(f'${i} {slot}' for i, slot in enumerate(made(name).slots, 1))}\n{made(name).text};"
        for name in SHAPES
    )
    if os.environ.get("ML_RAG_UPDATE_GOLDEN"):
        GOLDEN.write_text(found + "\n")
    assert found + "\n" == GOLDEN.read_text()


@pytest.mark.parametrize("name", SHAPES)
def test_each_parameter_stands_in_the_text(name: str) -> None:
    statement = made(name)
    numbers = {int(n) for n in re.findall(r"\$(\d+)", statement.text)}
    assert numbers == set(range(1, len(statement.slots) + 1))


@pytest.mark.parametrize("name", SHAPES)
def test_values_stand_in_the_text_once(name: str) -> None:
    shape, sources = SHAPES[name]
    values = {
        "vector": "[1,2,3]", "keys_1": ["{1,2}"], "scores_1": [0.5], "keyword_limit": "0.1", "max_distance": "0.6",
        "percentage_distance": "20", "near_weight": 0.5, "words_weight": 0.5, "rrf_k": 60, "candidates_1": 100,
    }  # fmt: skip
    statement = plan(shape, sources, "public", Values(values))
    assert "$" not in statement.text
    assert statement.text.count("'[1,2,3]'") == (1 if shape.has_vector else 0)


def test_texts_of_rows_are_read_last_where_arms_bring_many() -> None:
    body = made("hybrid, weighted").text
    assert body.index('t."segment"::text') > body.index("cited AS")


def test_more_is_fetched_until_all_is_sorted() -> None:
    read, limits = Read.first(3), []
    while read.sort != "total":
        limits.append(read.limit)
        read = read.further(3)
    assert limits == [4, 16, 64, 256, 1024]
    assert read.limit == 3


def test_an_exact_read_stays_exact() -> None:
    assert Read("exact", 4).further(3) == Read("exact", 16)


@pytest.mark.parametrize(
    ("text", "written"), [("a", "'a'"), ("it's", "'it''s'"), ("a\\b", " E'a\\\\b'"), ("a\\'", " E'a\\\\'''")]
)
def test_texts_are_quoted(text: str, written: str) -> None:
    assert literal(text) == written


def test_names_are_quoted() -> None:
    assert identifier('a "b"') == '"a ""b"""'
