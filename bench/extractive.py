"""Answers of the model ``extractive``: how many hold the right answer, what they cost, and that they invent nothing.

Weights and rules were chosen on the first ``HALF`` answerable questions of squad2, shuffled; the next are reported.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from bench import nodes
from ml_rag.client.datasets import Question
from ml_rag.client.evaluation import Evaluation
from ml_rag.sentences import spans

HALF, VERBATIM, BESIDE, TIMED = 300, 1000, 40, 50
MODEL = "extractive"
#: what it is held against, and what embeds texts that are not English
SMALL_MODEL, MULTILINGUAL = "smollm2-135m-instruct", "multilingual-e5-small-q4"


@dataclass(frozen=True, slots=True)
class Measured:
    """Shares of questions. ``invented``: sentences that stand in no citation, of ``answers`` answers."""

    one: float
    two: float
    wrongly_refused: float
    refused: float | None
    milliseconds: float
    answers: int
    invented: int


def shuffled(questions: Sequence[Question], *, answerable: bool) -> list[Question]:
    """The questions that have an answer, or those that have none, in an order that is always the same."""
    found = [
        q for q in questions if bool(q.answerable) == answerable and (q.answers or not answerable) and q.text.strip()
    ]
    random.Random(7).shuffle(found)
    return found


def _options(store: str, sentences: int, **options: Any) -> Jsonb:
    return Jsonb(
        {
            "vector_store": [store],
            "keyword_search": True,
            "n_citations": 3,
            "model_options": {"model_id": MODEL, "max_sentences": sentences},
            **options,
        }
    )


def measure(
    connection: psycopg.Connection[Any], evaluation: Evaluation, progress: Callable[[int, int], None]
) -> Measured:
    """Asks through ``ml_rag_answer``, hybrid, 3 citations."""
    questions, store = evaluation.dataset.questions, evaluation.store
    answerable, unanswerable = (shuffled(questions, answerable=known) for known in (True, False))
    # a set without another half is reported whole
    reported = answerable[HALF : 2 * HALF] if len(answerable) >= 2 * HALF else answerable[:HALF]
    done = texts = invented = 0
    costs: list[float] = []
    hits: dict[int, list[bool]] = {1: [], 2: []}

    def ask(question: Question, options: Jsonb) -> tuple[dict[str, Any], float]:
        nonlocal done, texts, invented
        answer, milliseconds = _ask(connection, question, options)
        if answer.get("text") and answer["citations"]:
            texts += 1
            invented += sum(not _stands(sentence, answer["citations"]) for sentence in _sentences(answer["text"]))
        done += 1
        progress(min(done, total), total)
        return answer, milliseconds

    total = 4 * len(reported) + min(HALF, len(unanswerable))
    for question in reported:
        for sentences, held in hits.items():
            answer, milliseconds = ask(question, _options(store, sentences))
            held.append(any(right.casefold() in answer["text"].casefold() for right in question.answers))
        # the search is asked next to the answer, so that both find the same caches
        costs.append(milliseconds - ask(question, _options(store, 2, skip_generate=True))[1])
    abstaining = {"abstain": True, "retrieval_options": {"max_distance": 2}}
    refusals = [
        [not ask(question, _options(store, 2, **abstaining))[0]["citations"] for question in asked]
        for asked in (reported, unanswerable[:HALF])
    ]
    more = answerable[: max(0, VERBATIM - texts)]
    total += len(more)
    for question in more:
        ask(question, _options(store, 2))
    return Measured(
        one=statistics.mean(hits[1]),
        two=statistics.mean(hits[2]),
        wrongly_refused=statistics.mean(refusals[0]),
        refused=statistics.mean(refusals[1]) if refusals[1] else None,
        milliseconds=statistics.median(costs),
        answers=texts,
        invented=invented,
    )


def _ask(connection: psycopg.Connection[Any], question: Question, options: Jsonb) -> tuple[dict[str, Any], float]:
    """The answer, and the milliseconds of the call."""
    began = time.perf_counter()
    row = connection.execute("SELECT public.ml_rag_answer(%s, %s)", (question.text, options)).fetchone()
    assert row is not None
    return row[0], (time.perf_counter() - began) * 1000


def milliseconds_stored(connection: psycopg.Connection[Any], evaluation: Evaluation) -> float:
    """Of an answer beyond its search, where a node group has the sentences of the store."""
    questions, store = shuffled(evaluation.dataset.questions, answerable=True)[:TIMED], evaluation.store
    with nodes.group(connection, store, "sentences", transform="sentence", keyword_search=False):
        return statistics.median(
            _ask(connection, q, _options(store, 2))[1] - _ask(connection, q, _options(store, 2, skip_generate=True))[1]
            for q in questions
        )


def beside(connection: psycopg.Connection[Any], evaluation: Evaluation) -> dict[str, tuple[float, float]]:
    """By model, over the same few questions: the share whose right answer stands in the text, and seconds of a call."""
    asked = shuffled(evaluation.dataset.questions, answerable=True)[HALF : HALF + BESIDE]
    found = {}
    for model in (SMALL_MODEL, MODEL):
        held, seconds = [], []
        options = _options(evaluation.store, 2, model_options={"model_id": model})
        for question in asked:
            began = time.perf_counter()
            row = connection.execute("SELECT public.ml_rag_answer(%s, %s)", (question.text, options)).fetchone()
            seconds.append(time.perf_counter() - began)
            held.append(any(right.casefold() in row[0]["text"].casefold() for right in question.answers))  # type: ignore[index]
        found[model] = statistics.mean(held), statistics.median(seconds)
    return found


def is_here(connection: psycopg.Connection[Any], model_id: str) -> bool:
    """Whether the model server has the files of a model."""
    query = "SELECT available FROM public.ml_supported_models() WHERE model_id = %s"
    row = connection.execute(query, (model_id,)).fetchone()
    return row is not None and bool(row[0])


def _sentences(text: str) -> Iterator[str]:
    for start, end in spans(text):
        yield text[start:end]


def _stands(sentence: str, citations: Sequence[dict[str, Any]]) -> bool:
    return any(sentence in citation["segment"] for citation in citations)
