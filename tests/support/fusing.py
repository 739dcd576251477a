"""What fusing two ranked lists makes of them, written down once more in Python."""

from __future__ import annotations

from typing import Any

from support.metrics import METRICS

#: a hit for the tests: name of the document, distance, keyword score
Hit = tuple[str, float, float | None]


def decisiveness(scores: list[float], nothing: float) -> float:
    if not scores or max(scores) <= nothing:
        return 0.0
    best = sorted(((s - nothing) / (max(scores) - nothing) for s in scores), reverse=True)[:30]
    return 1 - sum(best) / 30


def expected(
    semantic: list[Hit], keyword: list[Hit], options: dict[str, Any], metric: str, read: float = 1
) -> list[tuple[str, float, float | None, float]]:
    """What docs say: each arm divided by its largest; the weight given, or by how decisive each arm is.

    ``read``: the share of each text that the embedding model has read."""
    similarities = [METRICS[metric].similarity(d) for _, d, _ in semantic]
    keyword_scores = {name: score or 0.0 for name, _, score in keyword}
    distances = {name: d for name, d, _ in [*semantic, *keyword]}
    weight = options.get("semantic_weight")
    if weight is None:
        a = decisiveness(similarities, min(similarities, default=0)) * read**3
        b = decisiveness(list(keyword_scores.values()), 0)
        weight = a / (a + b) if a + b else 0.5
    k = options.get("rrf_k", 60)
    places = [[name for name, _, _ in arm] for arm in (semantic, keyword)]
    result = []
    for name, distance in distances.items():
        if options.get("fusion") == "rrf":
            score = sum(1 / (k + arm.index(name) + 1) for arm in places if name in arm) * (k + 1) / 2
        else:
            score = 0.0
            if similarities and max(similarities) > 0:
                score += weight * min(1, max(0, METRICS[metric].similarity(distance)) / max(similarities))
            if keyword_scores and max(keyword_scores.values()) > 0:
                score += (1 - weight) * keyword_scores.get(name, 0) / max(keyword_scores.values())
        result.append((name, distance, keyword_scores.get(name), score))
    return sorted(result, key=lambda hit: (-round(hit[3], 12), hit[1], hit[0]))
