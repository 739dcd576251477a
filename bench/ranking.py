"""The weight of ranking model "hybrid": nDCG@10 by weight, where it ranks what two searches found.

For each question the 50 nearest segments by embedding and the 50 best by BM25 are ranked, with the words weighed by the
SQL functions that ml_rank calls. Folders are in BEIR's form (corpus.jsonl, questions.jsonl, qrels.tsv), or hold PDFs
below pdf/ and questions with "citations" by file and page, whose segments are then those of the model server.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import psycopg

POOL, SLICE = 50, 128
WEIGHTS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 1.0)

#: texts of the segments, questions, and for each question the relevant segments with their grade
Task = tuple[list[str], list[str], list[dict[int, int]]]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def beir(folder: Path) -> Task:
    corpus, questions = lines(folder / "corpus.jsonl"), lines(folder / "questions.jsonl")
    place = {document["_id"]: i for i, document in enumerate(corpus)}
    relevant: dict[str, dict[int, int]] = {}
    for line in (folder / "qrels.tsv").read_text().splitlines()[1:]:
        question, document, grade = line.split("\t")
        if int(grade) > 0:
            relevant.setdefault(question, {})[place[document]] = int(grade)
    asked = [q for q in questions if q.get("answerable", True) and q["_id"] in relevant]
    texts = [f"{document.get('title', '')}\n{document['text']}".strip() for document in corpus]
    return texts, [q["text"] for q in asked], [relevant[q["_id"]] for q in asked]


def cited(folder: Path, address: str) -> Task:
    transport = httpx.HTTPTransport(uds=address.removeprefix("unix:"))
    with httpx.Client(transport=transport, base_url="http://server", timeout=1800) as client:
        files = [("file", (path.name, path.read_bytes())) for path in sorted((folder / "pdf").glob("*.pdf"))]
        reply = client.post("/v1/documents", data={"options": '{"embed_model_id": "all_minilm_l6_v2"}'}, files=files)
    segments = [
        (document["name"], segment["metadata"].get("page"), segment["text"])
        for document in map(json.loads, reply.raise_for_status().text.splitlines())
        for segment in document["segments"]
    ]
    texts, relevant = [], []
    for question in lines(folder / "questions.jsonl"):
        pages = {(citation["file"], citation["page"]) for citation in question.get("citations", ())}
        if found := {i: 1 for i, segment in enumerate(segments) if segment[:2] in pages}:
            texts.append(question["text"])
            relevant.append(found)
    return [segment[2] for segment in segments], texts, relevant


def embed(connection: psycopg.Connection[Any], texts: list[str], input_type: str) -> Any:
    """Unit vectors, shape (len(texts), dimensions)."""
    vectors: list[Any] = []
    for start in range(0, len(texts), SLICE):
        statement = "SELECT o.vectors::text[], o.error FROM ml_rag._embed(%s, 'all_minilm_l6_v2', %s) AS o"
        row = connection.execute(statement, (texts[start : start + SLICE], input_type)).fetchone()
        assert row is not None
        assert row[1] is None, row[1]
        vectors += [json.loads(vector) for vector in row[0]]
    array = np.array(vectors, np.float32)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def word_scores(connection: psycopg.Connection[Any], query: str, texts: list[str], configuration: str) -> Any:
    statement = "SELECT ml_rag._word_scores(%s, %s, %s::regconfig)"
    row = connection.execute(statement, (query, [text[:8192] for text in texts], configuration)).fetchone()
    assert row is not None
    return np.zeros(len(texts)) if row[0] is None else np.array(row[0])


class Bm25:
    """BM25 over all segments, for the pool: Lucene's variant, k1 1.2, b 0.75."""

    def __init__(self, read: list[list[str]]) -> None:
        self._postings: dict[str, dict[int, int]] = {}
        for i, words in enumerate(read):
            for word in words:
                of_word = self._postings.setdefault(word, {})
                of_word[i] = of_word.get(i, 0) + 1
        lengths = np.array([len(words) for words in read], float)
        self._norms = 1.2 * (0.25 + 0.75 * lengths / lengths.mean())

    def best(self, words: list[str]) -> list[int]:
        scores = np.zeros(len(self._norms))
        for word in words:
            found = self._postings.get(word, {})
            weight = math.log(1 + (len(scores) - len(found) + 0.5) / (len(found) + 0.5))
            for i, times in found.items():
                scores[i] += weight * times / (times + self._norms[i])
        return [int(i) for i in np.argsort(-scores, kind="stable")[:POOL] if scores[i] > 0]


def ndcg(ranked: list[int], relevant: dict[int, int]) -> float:
    def gain(grades: list[int]) -> float:
        return sum(grade / math.log2(place + 2) for place, grade in enumerate(grades[:10]))

    return gain([relevant.get(i, 0) for i in ranked]) / gain(sorted(relevant.values(), reverse=True))


def measure(connection: psycopg.Connection[Any], task: Task, configuration: str, most: int) -> list[float]:
    """Mean nDCG@10 for each of WEIGHTS, over at most so many questions."""
    texts, questions, relevant = task
    step = max(1, len(questions) // most)
    questions, relevant = questions[::step], relevant[::step]
    statement = """SELECT array_agg(t.token)
                   FROM ml_rag.keyword_tokens(%s::regconfig, %s) AS t, generate_series(1, t.n)"""
    read = [connection.execute(statement, (configuration, text)).fetchone() for text in (*texts, *questions)]
    words = [row[0] or [] for row in read if row is not None]
    bm25 = Bm25(words[: len(texts)])
    similarities = embed(connection, questions, "query") @ embed(connection, texts, "document").T
    sums = np.zeros(len(WEIGHTS))
    for question, grades, similarity, asked in zip(questions, relevant, similarities, words[len(texts) :], strict=True):
        nearest = [int(i) for i in np.argsort(-similarity, kind="stable")[:POOL]]
        pool = list(dict.fromkeys(nearest + bm25.best(asked)))
        by_words = word_scores(connection, question, [texts[i] for i in pool], configuration)
        by_meaning = np.maximum(similarity[pool], 0)
        for n, weight in enumerate(WEIGHTS):
            order = np.argsort(-(weight * by_meaning + (1 - weight) * by_words), kind="stable")
            sums[n] += ndcg([pool[i] for i in order], grades)
    return list(sums / len(questions))


@click.command(help=__doc__)
@click.option("--dsn", envvar=["ML_RAG_BENCH_DSN", "ML_RAG_TEST_DSN"], required=True)
@click.option("--configuration", default="english", show_default=True, help="Text search configuration.")
@click.option("--questions", default=400, show_default=True, help="About how many, spread over those of the folder.")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(dsn: str, configuration: str, questions: int, folders: tuple[Path, ...]) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone()
        assert row is not None
        click.echo("weight of the embedding".ljust(28) + " ".join(f"{weight:6}" for weight in WEIGHTS))
        for folder in folders:
            task = cited(folder, row[0]) if (folder / "pdf").is_dir() else beir(folder)
            found = measure(connection, task, configuration, questions)
            click.echo(f"{folder.name} {configuration}".ljust(28) + " ".join(f"{value:.4f}" for value in found))


if __name__ == "__main__":
    main()
