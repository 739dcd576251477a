"""The passages of citations that answer a question: the sentences with most of its words, each weighted by rarity.

The words part of the model ``extractive`` (0.75 of its first sentences hold a right answer, 0.79 with embeddings: see
docs/answers.md), without a model server. The sentence after a heading or a question gets what that one has, and each
row of a table what the heading and the header above it have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ml_rag.backend.grounding import LONGEST, Pause, Stops, words_of
from ml_rag.sentences import LEADS_IN, with_headers

#: of each text; further ones have at least this share of the best score of all
_MOST, _LEAST_SHARE = 3, 0.6


def highlights(question: str, texts: Sequence[str], stops: Stops, pause: Pause) -> list[list[dict[str, Any]]]:
    """Of each text the passages, best first: {"start", "end" (exclusive, characters), "score" (0-1)}."""
    words = words_of(question, pause)
    unwanted = stops({word.text for word in words})
    asked = {word.stem for word in words if word.text not in unwanted} or {word.stem for word in words}
    # each with its words, and those above it: the rows of a table have one set of these, which can be of any size
    found: list[list[tuple[int, int, set[str], set[str]]]] = []
    left = LONGEST
    for whole in texts:
        text, left = whole[:left], max(0, left - len(whole))
        found.append([])
        lead: set[str] = set()
        above: set[str] = set()
        for start, end, header in with_headers(text, pause):
            stems = {word.stem for word in words_of(text[start:end], pause)}
            if header is None:
                above = above and set()
            elif start < header[1]:
                above, lead = (lead if start == header[0] else above) | (stems & asked), set()
                continue
            if LEADS_IN.fullmatch(text, start, end) or stems <= asked:
                lead |= stems & asked
                continue
            found[-1].append((start, end, ((stems & asked) | lead) - above, above))
            lead = set()
    sentences = [passage[2:] for passages in found for passage in passages]
    counts: Counter[str] = Counter()
    shared = {id(above): above for _, above in sentences}
    rows = Counter(id(above) for _, above in sentences)
    for stems, _ in sentences:
        pause()
        counts.update(stems)
    for key, above in shared.items():
        pause()
        counts.update(dict.fromkeys(above, rows[key]))
    weights = {stem: math.log(1 + (len(sentences) - n + 0.5) / (n + 0.5)) for stem, n in counts.items()}
    total = sum(weights.values()) or 1
    sums = {key: sum(weights[s] for s in above) for key, above in shared.items()}

    def score_of(stems: set[str], above: set[str]) -> float:
        # the same of the same words, in whatever order they were added up
        return round((sum(weights[s] for s in stems) + sums[id(above)]) / total, 9)

    scored = [[(score_of(stems, above), start, end) for start, end, stems, above in passages] for passages in found]
    least = _LEAST_SHARE * max((score for passages in scored for score, _, _ in passages), default=0)
    return [
        [
            {"start": start, "end": end, "score": round(score, 4)}
            for score, start, end in sorted(passages, key=lambda p: (-p[0], p[1]))[:_MOST]
            if score > 0 and score >= least
        ]
        for passages in scored
    ]
