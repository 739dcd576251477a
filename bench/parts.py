"""Nodes as hits, several embeddings in one search, and reranking by stored vectors, measured."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from bench import nodes
from ml_rag.client.datasets import Dataset, Question
from ml_rag.client.evaluation import Arm, Evaluation

#: the second embedding of the store of two languages
MULTILINGUAL = "multilingual-e5-small-q4"
DEFAULT, FURTHER = {"search": "semantic"}, {"search": "semantic", "embedding": "multilingual"}
#: one line a way to search a store of two embeddings; weights by how clear each arm is
EMBEDDINGS = {
    "default": [DEFAULT],
    MULTILINGUAL: [FURTHER],
    "both": [{**DEFAULT, "weight": "auto"}, {**FURTHER, "weight": "auto"}],
}
_RERANK = {"rerank": {"model_id": "hybrid", "candidates": 50}}
#: questions of which the time of the stage is taken
_TIMED = 50


def two_languages(one: Dataset, other: Dataset) -> Dataset:
    """Both sets as one, whose documents have names of their own."""

    def own(dataset: Dataset) -> Dataset:
        def name(document: str) -> str:
            return f"{dataset.name}_{document}"

        questions = [
            replace(q, id=name(q.id), documents=[{**d, "document": name(d["document"])} for d in q.documents])
            for q in dataset.questions
        ]
        return replace(dataset, documents={name(n): text for n, text in dataset.documents.items()}, questions=questions)

    a, b = own(one), own(other)
    return Dataset(f"{one.name} and {other.name}", {**a.documents, **b.documents}, a.questions + b.questions)


def add_embedding(connection: psycopg.Connection[Any], store: str) -> None:
    """The second embedding of a store, unless it is there."""
    options = Jsonb({"embed_model_id": MULTILINGUAL})
    connection.execute("CALL ml_rag.add_embedding(%s, 'multilingual', %s)", (store, options))


def embeddings(evaluation: Evaluation, of: str) -> Iterator[tuple[str, float]]:
    """nDCG@10 of the questions of one language, one line a way to search."""
    evaluation.ask([q for q in evaluation.dataset.questions if q.documents and q.id.startswith(of)])
    for title, arms in EMBEDDINGS.items():
        run = evaluation.run(Arm(title, {"arms": arms}), {"k": [10]}, lambda *_: None)
        yield title, run["measures"]["ndcg@10"]


def reranked(connection: psycopg.Connection[Any], evaluation: Evaluation) -> tuple[float, float, float]:
    """nDCG@10 of hybrid search, of the same reranked by the model hybrid, and the milliseconds of that."""
    questions = [q for q in evaluation.dataset.questions if q.documents]
    evaluation.ask(questions)
    plain, ranked = (
        evaluation.run(Arm(title, {"keyword_search": True, **more}), {"k": [10]}, lambda *_: None)["measures"][
            "ndcg@10"
        ]
        for title, more in (("hybrid", {}), ("hybrid, reranked by hybrid", _RERANK))
    )
    options = {"vector_store": [evaluation.store], "keyword_search": True, "n_citations": 10, "explain": True}
    query = "SELECT (ml_rag_answer(%s, %s) #>> '{explain,milliseconds,rerank}')::float8"
    asked = Jsonb({**options, "skip_generate": True, **_RERANK})
    times = [connection.execute(query, (q.text, asked)).fetchone() for q in questions[:_TIMED]]
    return plain, ranked, statistics.median(row[0] for row in times if row is not None)


def _stands(question: Question, texts: Sequence[str]) -> bool:
    text = " ".join(" ".join(texts).split()).lower()
    return any(" ".join(answer.split()).lower() in text for answer in question.answers)


def _tokens(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def answers_in_nodes(connection: psycopg.Connection[Any], evaluation: Evaluation, n: int = 3) -> tuple[float, float]:
    """How often an answer stands in the n best sentences, and in as many tokens of the best segments."""
    questions = [q for q in evaluation.dataset.questions if q.documents and q.answers][::4]
    query = "SELECT segment FROM ml_rag_search(%s, %s)"
    words = {"search": "keyword", "weight": "auto"}
    options = {"vector_store": [evaluation.store], "n_citations": n}
    in_nodes = in_segments = 0
    with nodes.group(connection, evaluation.store, "sentences", transform="sentence"):
        arm = {"search": "semantic", "in": "sentences", "weight": "auto"}
        for question in questions:
            asked = {**options, "return": "node", "arms": [arm, {**words, "in": "sentences"}]}
            found = [row[0] for row in connection.execute(query, (question.text, Jsonb(asked)))]
            in_nodes += _stands(question, found)
            left, cut = sum(map(_tokens, found)), []
            asked = {**options, "keyword_search": True}
            for row in connection.execute(query, (question.text, Jsonb(asked))):
                pieces = re.findall(r"\s*(?:\w+|[^\w\s])", row[0])[:left]
                cut.append("".join(pieces))
                left -= len(pieces)
            in_segments += _stands(question, cut)
    return in_nodes / len(questions), in_segments / len(questions)
