"""A corpus of any size with the word frequencies of real text, and real questions about such text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
WORDS_A_SEGMENT = 100
#: the share of a segment's words that are rare ones (names, numbers), which the small samples have too few of
RARE, RARE_VOCABULARY = 0.04, 500_000


def texts(folder: str, file: str) -> list[str]:
    """The texts of a BEIR-form file; of this project's own documentation where the evaluation data is not there."""
    path = DATA / folder / file
    if not path.exists():
        return [text for page in sorted(ROOT.glob("**/*.md")) for text in re.split(r"\n\n+", page.read_text())]
    with path.open() as lines:
        return [" ".join(filter(None, (row.get("title"), row["text"]))) for row in map(json.loads, lines)]


def claims() -> list[str]:
    """Claims and the passages that they should stand on; none where the evaluation data is not there."""
    return [
        text
        for path in sorted((DATA / "grounding").glob("*.jsonl"))
        for row in map(json.loads, path.read_text().splitlines())
        for text in (row["answer"], *row["facts"])
    ]


def segments(rows: int, seed: int = 7, words: int = WORDS_A_SEGMENT) -> Iterator[str]:
    """``rows`` texts of about so many words, by the frequencies of squad2 and vaswani_npl, and a tail of rare words."""
    known = " ".join(text for name in ("squad2", "vaswani_npl") for text in texts(name, "corpus.jsonl"))
    counts = Counter(re.findall(r"\w+", known))
    vocabulary = np.array(list(counts), dtype=object)
    shares = np.array(list(counts.values()), dtype=float)
    random = np.random.default_rng(seed)
    shares /= shares.sum()
    for first in range(0, rows, 10_000):
        n = min(10_000, rows - first)
        lengths = np.maximum(5, random.normal(words, 0.3 * words, n)).astype(int)
        drawn = vocabulary[random.choice(len(vocabulary), lengths.sum(), p=shares)]
        rare = np.flatnonzero(random.random(len(drawn)) < RARE)
        # ranks by Zipf's law
        ranks = np.exp(random.random(len(rare)) * np.log(RARE_VOCABULARY)).astype(int)
        drawn[rare] = [f"x{rank}" for rank in ranks]
        ends = np.cumsum(lengths)
        for start, end in zip(ends - lengths, ends, strict=True):
            yield " ".join(drawn[start:end])


def questions() -> list[str]:
    """Questions of squad2, as people ask them."""
    return texts("squad2", "questions.jsonl")
