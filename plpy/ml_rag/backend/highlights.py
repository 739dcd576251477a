"""The passages of citations that answer a question: the sentences with most of its words, each weighted by rarity.

The words part of the model ``extractive`` (0.76 of its first sentences hold a right answer, 0.78 with embeddings: see
docs/answers.md), without a model server. The sentence after a heading or a question gets what that one has, and each
row of a table what the heading and the header above it have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ml_rag.backend.grounding import LONGEST, Pause, Stops, words_of
from ml_rag.sentences import LEADS_IN, first_cell, with_headers

#: of each text; further ones have at least this share of the best score of all
_MOST, _LEAST_SHARE = 3, 0.6


def highlights(question: str, texts: Sequence[str], stops: Stops, pause: Pause) -> list[list[dict[str, Any]]]:
    """Of each text the passages, best first: {"start", "end" (exclusive, characters), "score" (0-1)}."""
    words = words_of(question, pause)
    unwanted = stops({word.text for word in words})
    asked = {word.stem for word in words if word.text not in unwanted} or {word.stem for word in words}
    found: list[list[tuple[int, int, set[str], int]]] = []
    # the words above the rows of each table, kept once, as they can be many; the first set is for other sentences
    above: list[set[str]] = [set()]
    left = LONGEST
    for whole in texts:
        text, left = whole[:left], max(0, left - len(whole))
        found.append([])
        lead: set[str] = set()
        for start, end, header in with_headers(text, pause):
            stems = {word.stem for word in words_of(text[start:end], pause)}
            own, leads_in = stems & asked, stems <= asked or LEADS_IN.fullmatch(text, start, end)
            if header and start < header[1]:
                above.append(lead | own)
                lead = set()
                first = {word.stem for word in words_of(first_cell(text[start:end]), pause)}
                if leads_in or not own or not own <= first:
                    continue
            elif leads_in:
                lead |= own
                continue
            table = len(above) - 1 if header else 0
            found[-1].append((start, end, (own | lead) - above[table], table))
            lead = set()
    sentences = [passage for passages in found for passage in passages]
    counts: Counter[str] = Counter()
    for _, _, own, _ in sentences:
        pause()
        counts.update(own)
    for table, n in Counter(table for *_, table in sentences).items():
        pause()
        counts.update(dict.fromkeys(above[table], n))
    weights = {stem: math.log(1 + (len(sentences) - n + 0.5) / (n + 0.5)) for stem, n in counts.items()}
    total = sum(weights.values()) or 1
    sums = [sum(weights.get(stem, 0) for stem in stems) for stems in above]

    def score_of(own: set[str], table: int) -> float:
        # the same of the same words, in whatever order they were added up
        return round((sum(weights[stem] for stem in own) + sums[table]) / total, 9)

    scored = [[(score_of(own, table), start, end) for start, end, own, table in passages] for passages in found]
    least = _LEAST_SHARE * max((score for passages in scored for score, _, _ in passages), default=0)
    return [
        [
            {"start": start, "end": end, "score": round(score, 4)}
            for score, start, end in sorted(passages, key=lambda p: (-p[0], p[1]))[:_MOST]
            if score > 0 and score >= least
        ]
        for passages in scored
    ]
