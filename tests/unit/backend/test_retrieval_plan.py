"""What statement a request becomes, without a database: golden_statements.sql beside this file has it.

After a change that is meant: ML_RAG_UPDATE_GOLDEN=1 pytest FILE.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from ml_rag.backend.retrieval.plan import plan, scored_rows, widening
from ml_rag.backend.retrieval.run import corpus
from ml_rag.backend.retrieval.shape import GIVEN, Arm, Near, Nodes, Shape, Slots, Source, Statement, Values, Words
from ml_rag.backend.retrieval.sqltext import identifier, in_ascii, literal
from ml_rag.backend.retrieval.stores import Embedding, Metric, Store
from ml_rag.errors import InvalidRequest

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
    is_shared=False,
    names=frozenset({"handbook"}),
)
#: a table of somebody else's making
OTHER = STORE._replace(
    vector_store="kb.it's",
    table='kb."it\'s"',
    segment_embedding='em"bedding',
    document_name=None,
    document_id="key",
    document_id_type="uuid",
    segment_number=None,
    embedding_type="halfvec",
)
#: a view: no ctid tells its rows apart
VIEW = STORE._replace(vector_store="public.seen", table="public.seen", is_table=False)

#: arms as calls without option "arms" have them
SEMANTIC, KEYWORD = Arm("semantic", 100, "semantic"), Arm("keyword", 100, "keyword")
#: of option "arms"
OTHER_QUESTION = Arm("semantic", 100, "arm 2", has_own_vector=True)
FUNCTION = Arm("function", 20, "arm 3", has_limit=True, is_descending=False)
FEW = SEMANTIC._replace(candidates=3)
NEAR, MANY = Near.first(3), Near.first(100)
WORDS = Words(("document_id", "segment_number"), ("bigint", "integer"), "ONLY public.handbook")
VIEWED = Words(("id",), ("uuid",), "public.kept")
QUESTIONS = Nodes(
    "public.handbook_nodes", ("document_id", "segment_number"), ("document_id", "segment_number"), None, "vector"
)
SUMMARIES = QUESTIONS._replace(table="public.summaries", document="document_id", embedding_type=None)
FURTHER = MANY._replace(embedding=Embedding("m", "e2", "halfvec", 8), slot="vector_3")
PASSES = ' AND t."document_id" = ANY ($3::bigint[])'

HANDBOOK = Source(STORE, (NEAR,))
HYBRID = Source(STORE, (MANY, WORDS))
SHAPES: dict[str, tuple[Shape, tuple[Source, ...]]] = {
    "by meaning, as rows": (Shape((FEW,), 3, COSINE, has_vector=True), (HANDBOOK,)),
    "by meaning, a limit, as citations with fields": (
        Shape(
            (FEW,), 3, EUCLIDEAN, has_vector=True, has_max_distance=True, has_percentage=True,
            form="citations", fields=("document_id", "rank"),
        ),
        (HANDBOOK,),
    ),
    "by meaning, two stores, one read without its index, hits": (
        Shape((FEW,), 3, COSINE, has_vector=True, form="hits"),
        (HANDBOOK, Source(OTHER, (Near("total", 3),))),
    ),
    "by meaning, by an index of smaller vectors": (
        Shape((FEW,), 3, COSINE, has_vector=True, form="hits"),
        (Source(STORE, (NEAR._replace(quantization="binary"),)),),
    ),
    "by meaning, widened, citations": (
        Shape((FEW,), 3, COSINE, has_vector=True, overlap=1, form="citations", fields=("segment_range",)),
        (HANDBOOK, Source(OTHER, (NEAR,))),
    ),
    "by meaning, filtered, one store by few rows that pass": (
        Shape((FEW,), 3, COSINE, has_vector=True, form="hits"),
        (
            Source(STORE, (Near.filtered(3, is_narrow=False),), condition=PASSES),
            Source(OTHER, (Near.filtered(3, is_narrow=True),), condition=PASSES, is_narrow=True),
        ),
    ),
    "by words, without a vector": (
        Shape((Arm("keyword", 3, "keyword", has_limit=True),), 3, COSINE, has_vector=False, form="hits"),
        (Source(STORE, (WORDS,)),),
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
    "three arms, weighted, one by a question of its own": (
        Shape((SEMANTIC, OTHER_QUESTION, KEYWORD._replace(name="arm 3")), 3, COSINE, has_vector=True, form="hits"),
        (Source(STORE, (MANY, MANY._replace(slot="vector_2"), WORDS)),),
    ),
    "three arms, by ranks, one by a function": (
        Shape((SEMANTIC, KEYWORD._replace(name="arm 2"), FUNCTION), 3, COSINE, has_vector=True, fusion="rrf"),
        (Source(STORE, (MANY, WORDS, GIVEN)),),
    ),
    "two parts with shares, each weighted by how clear its arms are": (
        Shape(
            (
                SEMANTIC._replace(name="part 1 semantic"), KEYWORD._replace(name="part 1 keyword"),
                OTHER_QUESTION._replace(name="part 2 semantic", part=2),
                KEYWORD._replace(name="part 2 keyword", part=2),
            ),
            3, COSINE, has_vector=True, fusion="auto", form="citations",
        ),
        (Source(STORE, (MANY, WORDS, MANY._replace(slot="vector_3"), WORDS)),),
    ),
    "hybrid, a table beside a view": (
        Shape((SEMANTIC, KEYWORD), 3, COSINE, has_vector=True, fusion="auto", overlap=1, form="citations"),
        (HYBRID, Source(VIEW, (MANY, VIEWED))),
    ),
    "hybrid, partitions read one by one, one of other dimensions": (
        Shape((SEMANTIC, KEYWORD), 3, COSINE, has_vector=True, form="hits"),
        (
            Source(VIEW, (MANY, None), leaves=("public.seen_1", "public.seen_2"), columns=("segment", "document_id")),
            Source(STORE, (None, WORDS), is_measured=False),
        ),
    ),
    "hits of shards, beside a table": (
        Shape((SEMANTIC, KEYWORD), 3, COSINE, has_vector=True, form="hits"),
        (HYBRID, Source(VIEW, (GIVEN, GIVEN))),
    ),
    "nodes, of segments and of documents": (
        Shape(
            (
                SEMANTIC._replace(name="arm 1", in_nodes=True), KEYWORD._replace(name="arm 2", in_nodes=True),
            ),
            3, COSINE, has_vector=True, form="hits",
        ),
        (Source(STORE, (QUESTIONS, SUMMARIES)),),
    ),
    "nodes as hits, beside segments": (
        Shape(
            (
                SEMANTIC._replace(name="arm 1", in_nodes=True), KEYWORD._replace(name="arm 2", in_nodes=True),
                SEMANTIC._replace(name="arm 3", has_own_vector=True, has_embedding=True),
            ),
            3, COSINE, has_vector=True, returns_nodes=True, form="citations", fields=("node", "node_distance"),
            fusion="auto",
        ),
        (Source(STORE, (QUESTIONS, SUMMARIES, FURTHER)),),
    ),
    "keys of nodes": (Shape((FEW,), 3, COSINE, has_vector=True, form="keys"), (HANDBOOK,)),
    "told what each arm has found": (
        Shape((SEMANTIC, KEYWORD), 3, COSINE, has_vector=True, has_max_distance=True, form="hits", told="all"),
        (HYBRID,),
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
    assert numbers == {i for i, slot in enumerate(statement.slots, 1) if slot != "nothing"}


def conditions(sources: tuple[Source, ...], slots: type[Slots]) -> tuple[Source, ...]:
    """Sources whose filters are in terms of these parameters."""
    return tuple(s._replace(condition=s.condition.replace("$3", slots.filter(s.filter))) for s in sources)


class SomeValues(dict[str, object]):
    """Some value of each parameter."""

    def __missing__(self, name: str) -> object:
        return ["{1,2}"] if name.startswith("keys_") else [0.5] if name.startswith("scores_") else "0.5"


@pytest.mark.parametrize("name", [name for name in SHAPES if "keys" not in name])
def test_values_stand_in_the_text_once(name: str) -> None:
    shape, sources = SHAPES[name]
    values = SomeValues(vector="[1,2,3]", nothing=None, filter=["x"])
    statement = plan(shape, conditions(sources, Values), "public", Values(values))
    assert "$" not in statement.text
    assert statement.text.count("'[1,2,3]'") == (1 if shape.has_vector else 0)


@pytest.mark.parametrize("name", SHAPES)
def test_arms_of_all_stores_count_in_the_checks(name: str) -> None:
    shape, sources = SHAPES[name]
    searched = sum(search is not None for source in sources for search in source.searches)
    if shape.form != "rows":
        checks = (
            made(name).text.removesuffix("::text[] AS checks").rpartition("::text[] AS checks")[0].rpartition("\n")[2]
        )
        many = re.findall(r"unnest\(ARRAY\[([0-9, ]+)\]", checks)
        assert sum(len(numbers.split(",")) for numbers in many) + checks.count("ARRAY[(SELECT") == searched


def test_hits_that_were_reranked_are_widened() -> None:
    shape = Shape((FEW,), 3, COSINE, has_vector=True, overlap=1, form="hits")
    statement = widening(shape, (HANDBOOK, Source(OTHER, (NEAR,))), "public", Slots())
    assert list(statement.slots) == ["hits"]
    assert "c.rerank_score" in statement.text
    assert "'rerank_score', h.rerank_score" in statement.text


def test_a_function_scores_what_passes() -> None:
    shape = Shape((FUNCTION,), 3, COSINE, has_vector=True)
    source = Source(STORE, condition=PASSES)
    by_text = scored_rows(shape, source, "public", 1, takes_vectors=False)
    assert list(by_text.slots) == ["vector", "nothing", "filter"]
    assert PASSES in by_text.text
    assert 't."segment"::text AS input' in by_text.text
    few = scored_rows(shape, source._replace(is_narrow=True), "public", 1, takes_vectors=True)
    assert "t.ctid = ANY ($4::tid[])" in few.text
    assert PASSES not in few.text
    assert 't."segment_embedding"::public.vector::text AS input' in few.text


def test_texts_of_rows_are_read_last_where_arms_bring_many() -> None:
    body = made("hybrid, weighted").text
    assert body.index('t."segment"::text') > body.index("cited AS")


def test_more_is_fetched_until_all_is_sorted() -> None:
    read, limits = Near.first(3), []
    while read.sort != "total":
        limits.append(read.limit)
        read = read.further(3)
    assert limits == [4, 16, 64, 256, 1024]
    assert read.limit == 3


def test_an_exact_read_stays_exact() -> None:
    assert Near("exact", 4).further(3) == Near("exact", 16)


@pytest.mark.parametrize(
    ("text", "written"), [("a", "'a'"), ("it's", "'it''s'"), ("a\\b", " E'a\\\\b'"), ("a\\'", " E'a\\\\'''")]
)
def test_texts_are_quoted(text: str, written: str) -> None:
    assert literal(text) == written


def test_names_are_quoted() -> None:
    assert identifier('a "b"') == '"a ""b"""'


@pytest.mark.parametrize(
    ("statement", "written"),
    [
        ("SELECT '\\', \"a\"", "SELECT '\\', \"a\""),
        ("SELECT 'a', 'é' AS \"k\"", "SELECT 'a',  E'\\U000000e9' AS \"k\""),
        ("'\\é''é'", " E'\\\\\\U000000e9''\\U000000e9'"),
        ("E'\\'é\\\\' || '\\' || \"é\"", "E'\\'\\U000000e9\\\\' || '\\' || U&\"\\+0000e9\""),
        ('s."é""\\"', 's.U&"\\+0000e9""\\\\"'),
    ],
)
def test_a_statement_is_the_same_in_ascii(statement: str, written: str) -> None:
    assert in_ascii(statement) == written


@pytest.mark.parametrize("statement", ["SELECT é", "SELECT 'é", "SELECT 1 -- it's é"])
def test_what_cannot_be_written_in_ascii_is_not_run(statement: str) -> None:
    with pytest.raises(ValueError, match="not ASCII"):
        in_ascii(statement)


@pytest.mark.parametrize(
    "statistics", [[], [1, 1, []], [1, 1, ["x"]], [-1, 1, [1]], [1, 1, [1.5]], [1, 1, [True]], {}, [1, 1, [2**70]]]
)
def test_statistics_that_are_none_are_refused(statistics: Any) -> None:
    with pytest.raises(InvalidRequest, match="statistics of the keyword index"):
        corpus({"terms": ["birch"], "corpus": statistics})


def test_statistics_of_another_server() -> None:
    assert corpus({"terms": ["birch"], "corpus": [3, 9, [2]]}) == (3, 9, [2])
    assert corpus({}) is None
