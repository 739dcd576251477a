"""BM25 over the keyword indexes (sql/03_postings.sql): postings are read and added up with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml_rag.backend.runs import RUN_ROWS, Ints, Postings, Statements, as_postings, bits, postings_of, slots_of, unpack

Floats = NDArray[np.float64]
Candidate = tuple[list[str], float]

_STATEMENTS = {
    "runs": (
        "SELECT origin, run, rows, total, gone_rows, gone_total, first_id, last_id, gone"
        " FROM ml_rag.keyword_whole_run WHERE store = $1 ORDER BY run",
        "oid",
    ),
    "lengths": (
        "SELECT run, lengths FROM ml_rag.keyword_whole_run WHERE store = $1 AND run = ANY ($2)",
        "oid",
        "int8[]",
    ),
    "ids": ("SELECT run, ids FROM ml_rag.keyword_whole_run WHERE store = $1 AND run = ANY ($2)", "oid", "int8[]"),
    "id": (
        "SELECT c.place, substring(r.ids FROM 1 FOR 1) AS width, substring(r.ids FROM c.slot * 8 + 9 FOR 8) AS wide,"
        " substring(r.ids FROM c.slot * 4 + 9 FOR 4) AS narrow"
        " FROM unnest($2, $3) WITH ORDINALITY AS c (run, slot, place)"
        " JOIN ml_rag.keyword_whole_run AS r ON r.store = $1 AND r.run = c.run",
        *("oid", "int8[]", "int4[]"),
    ),
    "postings": (
        "SELECT term, run, postings FROM ml_rag.keyword_whole_posting WHERE store = $1 AND term = ANY ($2)"
        " ORDER BY term, run",
        *("oid", "text[]"),
    ),
    "gone": ("SELECT id, length FROM ml_rag.keyword_whole_gone WHERE store = $1", "oid"),
    "new": (
        "SELECT id, length, ARRAY(SELECT coalesce((n.tokens ->> t)::integer, 0) FROM unnest($2) AS t) AS counts"
        " FROM ml_rag.keyword_whole_new AS n WHERE store = $1 AND n.tokens ?| $2",
        *("oid", "text[]"),
    ),
    "whole keys": ("SELECT id, key FROM ml_rag.keyword_whole_row WHERE store = $1 AND id = ANY ($2)", "oid", "int8[]"),
    "visible keys": (
        "SELECT id, key FROM ml_rag.keyword_visible_row WHERE store = $1 AND id = ANY ($2)",
        *("oid", "int8[]"),
    ),
    "total": ("SELECT rows, total FROM ml_rag.keyword_total WHERE store = $1", "oid"),
    "ask": ("SELECT set_config('ml_rag.keyword_terms', $1::text, true)", "text[]"),
    "terms": ("SELECT term, rows FROM ml_rag.keyword_term WHERE store = $1", "oid"),
    "visible": (
        "SELECT run, term, hits, id, length, n FROM ml_rag.keyword_visible WHERE store = $1 AND term = ANY ($2)",
        *("oid", "text[]"),
    ),
}
_run = Statements(_STATEMENTS)


# -- what the views of sql/03_postings.sql call: pure functions -------------------------------------------------------


def visible_slots(ids: bytes, first_id: int, visible: bytes) -> bytes:
    """A byte for each slot of a run: 1 where its id is among ``visible`` (8 bytes each, big-endian)."""
    own = unpack(ids)
    slots = np.zeros(len(own), np.uint8)
    slots[slots_of(own, first_id, np.frombuffer(visible, ">i8").astype(np.int64))] = 1
    return slots.tobytes()


def visible_rows(slots: bytes, ids: bytes, first_id: int, lengths: bytes) -> bytes | None:
    """Slot, id and length of each visible row: three arrays of 8-byte integers; None where there is none."""
    shown = np.flatnonzero(np.frombuffer(slots, np.uint8))
    if not len(shown):
        return None
    return np.concatenate([shown, unpack(ids)[shown].astype(np.int64) + first_id, unpack(lengths)[shown]]).astype(
        "<i8"
    ).tobytes()  # fmt: skip


def visible_postings(slots: bytes, postings: bytes) -> bytes | None:
    """The postings whose slots are visible; None where none is."""
    own, counts = postings_of(postings)
    shown = np.frombuffer(slots, np.uint8)[own].astype(np.bool_)
    return as_postings(own[shown], counts[shown]) if shown.any() else None


def live_rows(postings: bytes, gone: bytes | None, ids: bytes | None, first_id: int, gone_ids: list[int] | None) -> int:
    """How many of the postings are of rows that are neither noted as deleted (``gone``) nor among ``gone_ids``."""
    slots, _ = postings_of(postings)
    if gone is None and ids is None:
        return len(slots)
    dead = bits(gone, RUN_ROWS)
    if ids is not None and gone_ids:
        dead[slots_of(unpack(ids), first_id, np.array(gone_ids, np.int64))] = True
    return len(slots) - int(np.count_nonzero(dead[slots]))


# -- scores -----------------------------------------------------------------------------------------------------------


class Scorer:
    """Lucene's BM25, as bm25s computes it with method 'lucene'."""

    def __init__(self, k1: float, b: float, rows: int, total: int) -> None:
        self._rows = rows
        # without any token there is nothing to score
        self._floor = k1 * (1 - b)
        self._slope = k1 * b * rows / total if total else 0.0

    def __call__(self, df: int, weight: int, counts: NDArray[Any], lengths: NDArray[Any]) -> Floats:
        """Scores of one term in the segments that hold it; ``weight`` is how often the query says it."""
        idf = float(np.log(1 + (self._rows - df + 0.5) / (df + 0.5)))
        frequency = counts.astype(np.float64)
        scores: Floats = weight * idf * (frequency / (frequency + (self._floor + self._slope * lengths)))
        return scores


def best(scores: Floats, n: int, sample: Ints | None = None) -> Ints:
    """Places of the ``n`` highest scores above 0, and of those that equal the last of them; best first.

    ``sample``: places that are likely to have high scores; they give a bound that spares sorting the rest.
    """
    bound = 0.0
    if sample is not None and len(sample) > n:
        bound = float(np.partition(scores[sample], len(sample) - n)[len(sample) - n])
    places = np.flatnonzero(scores >= bound) if bound > 0 else np.flatnonzero(scores)
    if len(places) > n:
        found = scores[places]
        places = places[found >= np.partition(found, len(found) - n)[len(found) - n]]
    return places[np.argsort(-scores[places], kind="stable")]


#: lengths of the rows of a store, which its runs never change: store -> (origin and runs, lengths run after run)
_lengths: dict[int, tuple[Any, NDArray[Any]]] = {}
_LENGTHS_KEPT = 4_000_000


def _lengths_of(plpy: Any, store: int, runs: list[Any]) -> NDArray[Any]:
    version = tuple((run["origin"], run["run"]) for run in runs)
    kept = _lengths.get(store)
    if kept is None or kept[0] != version:
        found = {row["run"]: unpack(row["lengths"]) for row in _run(plpy, "lengths", store, [r["run"] for r in runs])}
        kept = version, np.concatenate([found[run["run"]] for run in runs] or [np.empty(0, "<u4")])
        if sum(len(lengths) for _, lengths in _lengths.values()) > _LENGTHS_KEPT:
            _lengths.clear()
        _lengths[store] = kept
    return kept[1]


def candidates(plpy: Any, statement: str, store: int, ids: list[int], scores: list[float]) -> list[Candidate]:
    """Keys and scores, in the order given; a row that the caller may not see has none."""
    keys = {row["id"]: row["key"] for row in _run(plpy, statement, store, ids)}
    return [(keys[id_], score) for id_, score in zip(ids, scores, strict=True) if id_ in keys]


def whole_scores(
    plpy: Any, store: int, terms: list[str], weights: list[int], k1: float, b: float, n: int
) -> list[Candidate]:
    """Keys and scores of the ``n`` best rows, and of those as good as the last; for callers who may read all rows."""
    runs = list(_run(plpy, "runs", store))
    gone = list(_run(plpy, "gone", store))
    total = _run(plpy, "total", store)[0]
    score = Scorer(k1, b, total["rows"], total["total"])
    starts = dict(zip((run["run"] for run in runs), np.cumsum([0] + [run["rows"] for run in runs]), strict=False))
    size = sum(run["rows"] for run in runs)
    dead = _dead(plpy, store, runs, gone)
    lengths = _lengths_of(plpy, store, runs)
    gone_ids = {row["id"] for row in gone}
    new = [row for row in _run(plpy, "new", store, terms) if row["id"] not in gone_ids]
    new_counts = np.array([row["counts"] for row in new], np.int64).reshape(len(new), len(terms))
    new_lengths = np.array([row["length"] for row in new], np.int64)

    places: dict[str, list[Ints]] = {}
    counts: dict[str, list[NDArray[Any]]] = {}
    for row in _run(plpy, "postings", store, terms):
        slots, numbers = postings_of(row["postings"])
        places.setdefault(row["term"], []).append(slots + starts[row["run"]])
        counts.setdefault(row["term"], []).append(numbers)
    scores = np.zeros(size + len(new))
    rarest: Ints | None = None
    for i, (term, weight) in enumerate(zip(terms, weights, strict=True)):
        waiting = np.flatnonzero(new_counts[:, i])
        if term in places:
            at, numbers = np.concatenate(places[term]), np.concatenate(counts[term])
            if dead is not None:
                alive = ~dead[at]
                at, numbers = at[alive], numbers[alive]
        else:
            at, numbers = np.empty(0, np.int64), np.empty(0, np.int64)
        df = len(at) + len(waiting)
        if df == 0:
            continue
        scores[at] += score(df, weight, numbers, lengths[at])
        scores[size + waiting] += score(df, weight, new_counts[waiting, i], new_lengths[waiting])
        if len(at) > n and (rarest is None or len(at) < len(rarest)):
            rarest = at
    found = best(scores, n, rarest)
    ids_found = _ids(plpy, store, runs, starts, found, size, [row["id"] for row in new])
    return candidates(plpy, "whole keys", store, ids_found, scores[found].tolist())


def _dead(plpy: Any, store: int, runs: list[Any], gone: list[Any]) -> NDArray[np.bool_] | None:
    """Which rows of all runs, one after another, are deleted; None where none is."""
    if not gone and all(run["gone"] is None for run in runs):
        return None
    parts = [bits(run["gone"], run["rows"]) for run in runs]
    if gone:
        ids = np.array([row["id"] for row in gone], np.int64)
        touched = {
            run["run"]: i
            for i, run in enumerate(runs)
            if np.any((ids >= run["first_id"]) & (ids <= run["last_id"]))
        }  # fmt: skip
        for row in _run(plpy, "ids", store, list(touched)) if touched else ():
            i = touched[row["run"]]
            parts[i][slots_of(unpack(row["ids"]), runs[i]["first_id"], ids)] = True
    return np.concatenate(parts) if parts else None


def _ids(
    plpy: Any, store: int, runs: list[Any], starts: dict[int, int], found: Ints, size: int, new_ids: list[int]
) -> list[int]:
    """Ids of the rows at the places found: in the runs one after another, then among the new ones."""
    ids = np.zeros(len(found), np.int64)
    for i in np.flatnonzero(found >= size).tolist():
        ids[i] = new_ids[found[i] - size]
    in_runs = np.flatnonzero(found < size)
    if not len(in_runs):
        return ids.tolist()
    ends = np.cumsum([run["rows"] for run in runs])
    which = np.searchsorted(ends, found[in_runs], side="right")
    slots = found[in_runs] - np.array([starts[run["run"]] for run in runs])[which]
    first = np.array([run["first_id"] for run in runs])
    if len(in_runs) <= 2000:
        for row in _run(plpy, "id", store, [runs[j]["run"] for j in which], slots.tolist()):
            i = row["place"] - 1
            packed = row["wide"] if row["width"] == b"\x08" else row["narrow"]
            ids[in_runs[i]] = first[which[i]] + int.from_bytes(packed, "little")
    else:
        for row in _run(plpy, "ids", store, [runs[j]["run"] for j in np.unique(which)]):
            i = next(j for j, own in enumerate(runs) if own["run"] == row["run"])
            ids[in_runs[which == i]] = unpack(row["ids"])[slots[which == i]].astype(np.int64) + first[i]
    return ids.tolist()


def visible_scores(
    plpy: Any, store: int, terms: list[str], weights: list[int], k1: float, b: float, n: int, *, own_statistics: bool
) -> list[Candidate]:
    """The same for a caller to whom row-level security applies: of the rows that the caller can see.

    ``own_statistics``: the number of rows, their lengths and those of a term are those of the visible rows only.
    """
    ids: list[Ints] = []
    lengths: list[Ints] = []
    starts: dict[int, tuple[int, Ints]] = {}
    postings: dict[str, list[tuple[int, Postings]]] = {}
    new: dict[int, dict[str, int]] = {}
    new_lengths: dict[int, int] = {}
    size = 0
    _run(plpy, "ask", terms)
    for row in _run(plpy, "visible", store, ["", *terms]):
        if row["run"] == 0:
            new_lengths[row["id"]] = row["length"]
            if row["term"]:
                new.setdefault(row["id"], {})[row["term"]] = row["n"]
        elif row["term"]:
            postings.setdefault(row["term"], []).append((row["run"], postings_of(row["hits"])))
        else:
            slots, own_ids, own_lengths = np.frombuffer(row["hits"], "<i8").reshape(3, -1)
            place = np.zeros(RUN_ROWS, np.int64)
            place[slots] = np.arange(size, size + len(slots))
            starts[row["run"]] = size, place
            ids.append(own_ids)
            lengths.append(own_lengths)
            size += len(slots)
    order = sorted(new_lengths)
    all_ids = np.concatenate([*ids, np.array(order, np.int64)])
    all_lengths = np.concatenate([*lengths, np.array([new_lengths[i] for i in order], np.int64)])
    if own_statistics:
        rows, total, df = len(all_ids), int(all_lengths.sum()), {}
    else:
        whole = _run(plpy, "total", store)
        rows, total = (whole[0]["rows"], whole[0]["total"]) if len(whole) else (0, 0)
        df = {row["term"]: row["rows"] for row in _run(plpy, "terms", store)}
    score = Scorer(k1, b, rows, total)
    scores = np.zeros(len(all_ids))
    for term, weight in zip(terms, weights, strict=True):
        waiting = [(size + i, new[id_][term]) for i, id_ in enumerate(order) if term in new.get(id_, ())]
        hits = postings.get(term, [])
        at = np.concatenate(
            [starts[run][1][slots] for run, (slots, _) in hits] + [np.array([i for i, _ in waiting], int)]
        )
        numbers = np.concatenate([counts for _, (_, counts) in hits] + [np.array([c for _, c in waiting], int)])
        if len(at):
            scores[at] += score(len(at) if own_statistics else df[term], weight, numbers, all_lengths[at])
    found = best(scores, n)
    return candidates(plpy, "visible keys", store, all_ids[found].tolist(), scores[found].tolist())
