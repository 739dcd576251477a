"""Checks of answers by their sources: area under the ROC curve on labelled sets, and what a check takes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from ml_rag.client.datasets import Dataset

Row = dict[str, Any]

#: set, the distinction, which rows count, which of these are the better ones, and the least area
FIGURES: list[tuple[str, str, Callable[[Row], bool], Callable[[Row], bool], float]] = [
    *(
        ("begin_dev", source, lambda row, s=source: row["id"].startswith(s), lambda row: row["supported"], least)
        for source, least in (("wow", 0.93), ("tc", 0.91), ("cmu", 0.95))
    ),
    ("wice_dev", "not supported, rest", lambda _: True, lambda row: row["label"] != "not_supported", 0.95),
    ("wice_dev", "supported, rest", lambda _: True, lambda row: row["label"] == "supported", 0.75),
    ("swaps", "exchanged numbers", lambda row: row["kind"] == "sentence", lambda row: row["supported"], 0.98),
    ("swaps", "another answer", lambda row: row["kind"] == "answer", lambda row: row["supported"], 0.75),
]


def area(better: list[float], worse: list[float]) -> float:
    """Under the ROC curve: how often a better one has the higher score; half where both have the same."""
    pairs = sum((b > w) + (b == w) / 2 for b in better for w in worse)
    return pairs / (len(better) * len(worse))


def measure(
    connection: psycopg.Connection[Any], folder: Path, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, str, float, float, float]]:
    """Set, the distinction, the area, that of the half that no rule was chosen on (odd numbers), the least area."""
    sets = {name: _read(folder / f"{name}.jsonl") for name in dict.fromkeys(figure[0] for figure in FIGURES)}
    total, done = sum(map(len, sets.values())), 0
    for rows in sets.values():
        for row in rows:
            row["score"] = check(connection, row["answer"], row["facts"])["support_score"]
            done += 1
            progress(done, total)
    for name, title, counts, is_better, least in FIGURES:
        rows = [row for row in sets[name] if counts(row)]
        both = []
        for half in (rows, [row for row in rows if int(row["id"].rsplit("-", 1)[1]) % 2]):
            scores: dict[bool, list[float]] = {True: [], False: []}
            for row in half:
                scores[bool(is_better(row))].append(row["score"])
            both.append(area(scores[True], scores[False]))
        yield name, title, both[0], both[1], least


def kept(connection: psycopg.Connection[Any], dataset: Dataset, store: str) -> tuple[float, float]:
    """Of answers that a large model wrote once, checked by what hybrid search cites for their questions: the share that
    keeps something if unsupported sentences are taken out, and the share of their sentences that stay."""
    answers: list[bool] = []
    sentences: list[bool] = []
    options = Jsonb({"vector_store": [store], "keyword_search": True, "n_citations": 5})
    for question in dataset.questions:
        if not question.answers:
            continue
        rows = connection.execute("SELECT segment FROM public.ml_rag_search(%s, %s)", (question.text, options))
        claims = check(connection, question.answers[0], [text for (text,) in rows])["claims"]
        stay = [bool(c["citation_indices"]) for c in claims if c["grounding_check_required"]]
        sentences += stay
        answers.append(any(stay) or not stay)
    return statistics.mean(answers), statistics.mean(sentences)


def check(connection: psycopg.Connection[Any], answer: str, facts: list[str]) -> Any:
    """The reply of ``ml_check_grounding``."""
    row = connection.execute("SELECT public.ml_check_grounding(%s, %s)", (answer, Jsonb(facts))).fetchone()
    assert row is not None
    return row[0]


def milliseconds(connection: psycopg.Connection[Any], texts: list[str]) -> float:
    """Of a check of 5 sentences by 3 texts of 256 words, taken from ``texts``."""
    words = " ".join(texts).split()
    facts = [" ".join(words[start : start + 256]) for start in range(0, 768, 256)]
    answer = " ".join(" ".join(words[start : start + 20]) + "." for start in range(0, 750, 150))
    taken = []
    for _ in range(20):
        began = time.perf_counter()
        check(connection, answer, facts)
        taken.append((time.perf_counter() - began) * 1000)
    return statistics.median(taken)


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
