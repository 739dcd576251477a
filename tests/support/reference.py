"""Retrieval by brute force, written from docs/search.md (Thresholds) and docs/answers.md and from nothing else.

Distances are computed in double precision, which is exact enough for the small whole numbers the tests use as
vectors: nothing comes near the middle between two numbers of four decimals unless it lies right there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

from support.metrics import distance

FOUR_DECIMALS = Decimal("0.0001")


@dataclass(frozen=True)
class Segment:
    """A row of a vector store."""

    vector_store: str
    document_name: str | None
    document: Any
    number: int | None
    text: str | None
    embedding: tuple[float, ...] | None


@dataclass(frozen=True)
class Hit:
    segment: Segment
    distance: Decimal
    text: str


class NothingFound(Exception):
    """Nothing is left; P0002."""


def rounded(distance: float) -> Decimal:
    """To 4 decimals, halves away from zero, from the 15 digits that a double is sure of."""
    return Context(prec=15).create_decimal(repr(distance)).quantize(FOUR_DECIMALS, ROUND_HALF_UP) + 0


def nearest(
    segments: Iterable[Segment],
    query: Sequence[float],
    metric: str = "COSINE",
    n: int = 3,
    document_name: Sequence[str] | None = None,
    exclude_document_name: Sequence[str] | None = None,
) -> list[Hit]:
    """The n nearest, ties in the order of (vector_store, document_name, document_id, segment_number)."""
    hits = []
    for s in segments:
        if s.text is None or s.embedding is None:
            continue
        if document_name is not None and s.document_name not in document_name:
            continue
        if exclude_document_name is not None and s.document_name in exclude_document_name:
            continue
        if (d := distance(metric, query, s.embedding)) is not None:
            hits.append(Hit(s, rounded(d), s.text))
    hits.sort(key=_order)
    return hits[:n]


def _order(hit: Hit) -> tuple[Any, ...]:
    s = hit.segment
    name = (s.document_name is None, (s.document_name or "").encode())
    number = (s.number is None, s.number or 0)
    return hit.distance, s.vector_store.encode(), name, s.document, number


def within(
    hits: list[Hit], max_distance: Decimal | None, percentage_distance: Decimal | None
) -> tuple[list[Hit], str, Decimal]:
    """What is near enough, the method, the threshold in force (rounded)."""
    limits = []
    if max_distance is not None:
        limits.append((max_distance, "max_distance"))
    if percentage_distance is not None:
        limits.append((hits[0].distance + percentage_distance / 100 * abs(hits[0].distance), "percentage_distance"))
    if not limits:
        return hits, "n_citations", hits[-1].distance
    threshold, method = min(limits, key=lambda limit: limit[0])
    kept = [hit for hit in hits if hit.distance <= threshold]
    if not kept:
        raise NothingFound
    return kept, method, threshold.quantize(FOUR_DECIMALS, ROUND_HALF_UP)


def joined(a: str, b: str) -> str:
    """Two neighbours as one text: the longest run of whole words that ends a and starts b is written once."""
    a, b = a.rstrip(" \t\r\n"), b.lstrip(" \t\r\n")

    def whole(text: str, at: int) -> bool:
        return not (0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum())

    for length in range(min(len(a), len(b)), 0, -1):
        if a.endswith(b[:length]) and whole(a, len(a) - length) and whole(b, length):
            return a + b[length:]
    return f"{a}\n{b}"


def expanded(
    segments: Iterable[Segment], hits: list[Hit], overlap: int, join: Callable[[str, str], str] = joined
) -> list[Hit]:
    """Each hit with `overlap` segments of its document on either side; ranges that touch are one."""
    if overlap == 0:
        return hits
    documents: dict[tuple[str, Any], dict[int, str]] = {}
    for s in segments:
        if s.number is not None and s.text is not None:
            documents.setdefault((s.vector_store, s.document), {})[s.number] = s.text
    wanted: dict[tuple[str, Any], set[int]] = {}
    result = [hit for hit in hits if hit.segment.number is None]
    for hit in hits:
        if (n := hit.segment.number) is not None:
            key = (hit.segment.vector_store, hit.segment.document)
            wanted.setdefault(key, set()).update(range(n - overlap, n + overlap + 1))
    for key, numbers in wanted.items():
        islands: list[list[int]] = []
        for number in sorted(numbers):
            if islands and islands[-1][-1] == number - 1:
                islands[-1].append(number)
            else:
                islands.append([number])
        for island in islands:
            inside = [
                h for h in hits if (h.segment.vector_store, h.segment.document) == key and h.segment.number in island
            ]
            best = min(inside, key=_order)
            text = ""
            for number in island:
                if (piece := documents[key].get(number)) is not None:
                    text = join(text, piece) if text else piece
            result.append(replace(best, text=text))
    return sorted(result, key=_order)


def retrieve(
    segments: Sequence[Segment],
    query: Sequence[float],
    *,
    metric: str = "COSINE",
    n: int | None = None,
    max_distance: Decimal | None = None,
    percentage_distance: Decimal | None = None,
    overlap: int = 0,
    **filters: Any,
) -> dict[str, Any]:
    """``citations`` and ``retrieval_info`` as ml_rag answers them. Raises NothingFound."""
    if n is None:
        n = 3 if max_distance is None and percentage_distance is None else 10
    hits = nearest(segments, query, metric, n, **filters)
    if not hits:
        raise NothingFound
    hits, method, threshold = within(hits, max_distance, percentage_distance)
    return {
        "citations": [
            {"segment": h.text, "distance": float(h.distance), "document_name": h.segment.document_name}
            for h in expanded(segments, hits, overlap)
        ],
        "retrieval_info": {"method": method, "threshold": float(threshold)},
    }
