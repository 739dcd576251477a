"""The runs of a keyword index (sql/keyword/tables.sql): their packed form, and folding rows into them.

This and ``keyword`` need numpy, alone in the backend; ``bridge`` imports them when they are first used.

A run is up to ``RUN_ROWS`` rows, each with a slot. Its ids and lengths by slot are little-endian integers behind a
header of 8 bytes, whose first is their width (4 or 8). The postings of a term in a run are slots (2 bytes each) and
then how often it stands there (1 or 4 bytes each), behind a header of 2 bytes, whose first is that width.
"""

from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml_rag.backend.indexes import check_owner
from ml_rag.backend.rights import as_owner
from ml_rag.backend.statements import Statements

Ints = NDArray[np.int64]
Postings = tuple[NDArray[np.uint16], NDArray[Any]]

RUN_ROWS = 65536
#: a run has fewer rows where these have more tokens than that, and ends where their JSON text has so many characters:
#: the memory that it takes to make one grows with both
_RUN_CHARACTERS = 32_000_000
_RUN_TOKENS = 4_000_000
#: terms of one INSERT
_PORTION = 5000
#: rows of one fetch, each of which holds the tokens of a segment, or up to 330 kB of postings
_ROWS, _POSTINGS = 200, 200
#: runs of fewer rows than these are merged once there are ``_MERGE`` of them: small ones by whoever comes by, larger
#: ones only where somebody has asked for it, since that takes seconds
_SMALL, _LARGE = 4096, 32768
_MERGE = 8

_STATEMENTS = {
    "add index": (
        "INSERT INTO ml_rag.keyword_store SELECT (jsonb_populate_record(NULL::ml_rag.keyword_store, $1)).*",
        "jsonb",
    ),
    "drop index": ("DELETE FROM ml_rag.keyword_store WHERE store = $1", "oid"),
    # As the caller: the SQL that gives the rows of its table.
    "source": (
        "SELECT ml_rag._keyword_rows(jsonb_populate_record(NULL::ml_rag.keyword_store, $1), $2) AS source",
        *("jsonb", "int4"),
    ),
    "numbers": ("SELECT nextval('ml_rag.keyword_number') AS id FROM generate_series(1, $1)", "int4"),
    "add rows": (
        "INSERT INTO ml_rag.keyword_row (id, store, length, key, tokens)"
        " SELECT u.id, $1, u.length, u.key, u.tokens::jsonb"
        " FROM unnest($2, $3, $4, $5) AS u (id, length, key, tokens)",
        *("oid", "int8[]", "int4[]", "text[]", "text[]"),
    ),
    "lock": ("SELECT FROM ml_rag.keyword_store WHERE store = $1 FOR UPDATE SKIP LOCKED", "oid"),
    "batch": (
        "SELECT id, length, tokens FROM ml_rag.keyword_new WHERE store = $1 AND batch = $2 ORDER BY id",
        *("oid", "int8"),
    ),
    "drop batch": ("DELETE FROM ml_rag.keyword_new WHERE store = $1 AND batch = $2", "oid", "int8"),
    "drop new": ("DELETE FROM ml_rag.keyword_new WHERE store = $1 AND batch = 0 AND id = ANY ($2)", "oid", "int8[]"),
    "all gone": ("SELECT id, length FROM ml_rag.keyword_gone WHERE store = $1", "oid"),
    "drop gone": ("DELETE FROM ml_rag.keyword_gone WHERE store = $1 AND id = ANY ($2)", "oid", "int8[]"),
    "all runs": (
        "SELECT run, rows, total, gone_rows, gone_total, first_id, last_id, gone"
        " FROM ml_rag.keyword_run WHERE store = $1 ORDER BY run",
        "oid",
    ),
    "run": ("SELECT first_id, ids, lengths, gone FROM ml_rag.keyword_run WHERE run = $1", "int8"),
    "note gone": (
        "UPDATE ml_rag.keyword_run SET gone = $2, gone_rows = $3, gone_total = $4 WHERE run = $1",
        *("int8", "bytea", "int4", "int8"),
    ),
    "add run": (
        "INSERT INTO ml_rag.keyword_run (run, store, rows, total, first_id, last_id, ids, lengths)"
        " VALUES (nextval('ml_rag.keyword_number'), $1, $2, $3, $4, $5, $6, $7) RETURNING run",
        *("oid", "int4", "int8", "int8", "int8", "bytea", "bytea"),
    ),
    "add postings": (
        "INSERT INTO ml_rag.keyword_posting (run, store, term, postings)"
        " SELECT $1, $2, u.term, u.postings FROM unnest($3, $4) AS u (term, postings)",
        *("int8", "oid", "text[]", "bytea[]"),
    ),
    "run postings": ("SELECT term, run, postings FROM ml_rag.keyword_posting WHERE run = ANY ($1)", "int8[]"),
    "drop postings": ("DELETE FROM ml_rag.keyword_posting WHERE run = ANY ($1)", "int8[]"),
    "drop runs": ("DELETE FROM ml_rag.keyword_run WHERE run = ANY ($1)", "int8[]"),
}


_run = Statements(_STATEMENTS)


# -- the packed forms -------------------------------------------------------------------------------------------------


def pack(values: Ints) -> bytes:
    """Integers of at least 0, as the columns ``ids`` and ``lengths`` hold them."""
    width = 4 if not len(values) or values.max() < 2**32 else 8
    return bytes([width] + [0] * 7) + values.astype(f"<u{width}").tobytes()


def unpack(packed: bytes) -> NDArray[Any]:
    """What ``pack`` was given; unsigned."""
    return np.frombuffer(packed, f"<u{packed[0]}", offset=8)


def postings_of(packed: bytes) -> Postings:
    """Slots and counts of a term in a run."""
    width = packed[0]
    n = (len(packed) - 2) // (2 + width)
    return np.frombuffer(packed, "<u2", n, 2), np.frombuffer(packed, f"<u{width}", n, 2 + 2 * n)


def as_postings(slots: NDArray[Any], counts: NDArray[Any]) -> bytes:
    """The packed form of ``postings_of``."""
    width = 1 if not len(counts) or counts.max() < 256 else 4
    return bytes([width, 0]) + slots.astype("<u2").tobytes() + counts.astype(f"<u{width}").tobytes()


def slots_of(ids: NDArray[Any], first_id: int, wanted: Ints) -> Ints:
    """Slots of those of the wanted ids that the run has."""
    found = np.searchsorted(ids, np.maximum(wanted - first_id, 0))
    found[found == len(ids)] = 0
    slots: Ints = found[ids[found].astype(np.int64) == wanted - first_id]
    return slots


def bits(gone: bytes | None, rows: int) -> NDArray[np.bool_]:
    """Which slots of a run are deleted."""
    if gone is None:
        return np.zeros(rows, np.bool_)
    return np.unpackbits(np.frombuffer(gone, np.uint8), count=rows).astype(np.bool_)


# -- writing ----------------------------------------------------------------------------------------------------------


def _write_run(
    plpy: Any,
    store: int,
    ids: Ints,
    lengths: Ints,
    terms: list[str],
    term: NDArray[Any],
    slot: NDArray[Any],
    count: NDArray[Any],
) -> None:
    """A run of these rows. ``term`` (a place in ``terms``), ``slot`` and ``count`` are the postings, in any order."""
    order = np.argsort(term.astype(np.int64) * RUN_ROWS + slot, kind="stable")
    term, slots, counts = term[order], slot[order].astype("<u2"), count[order]
    total, first, last = int(lengths.sum()), int(ids[0]), int(ids[-1])
    run = _run(plpy, "add run", store, len(ids), total, first, last, pack(ids - first), pack(lengths))[0]["run"]
    ends = np.cumsum(np.bincount(term, minlength=len(terms)))
    slot_bytes, count_bytes = slots.tobytes(), np.minimum(counts, 255).astype(np.uint8).tobytes()
    wide = set(term[counts > 255].tolist())
    names: list[str] = []
    values: list[bytes] = []
    start = 0
    for i, end in enumerate(ends.tolist()):
        if end > start:
            names.append(terms[i])
            values.append(
                as_postings(slots[start:end], counts[start:end])
                if i in wide
                else b"\x01\x00" + slot_bytes[2 * start : 2 * end] + count_bytes[start:end]
            )
        start = end
    for first in range(0, len(names), _PORTION):
        chosen = slice(first, first + _PORTION)
        _run(plpy, "add postings", run, store, names[chosen], values[chosen])


class RunWriter:
    """Makes runs of new rows, which come by ascending id."""

    def __init__(self, plpy: Any, store: int) -> None:
        self._plpy = plpy
        self._store = store
        self._clear()

    def _clear(self) -> None:
        self._ids, self._lengths, self._sizes, self._terms, self._counts = (array(code) for code in "qqiii")
        self._vocabulary: dict[str, int] = {}
        self._characters = 0

    def add(self, id_: int, length: int, tokens_text: str) -> None:
        """One row more; ``tokens_text``: {token: how often} as JSON text."""
        self._characters += len(tokens_text)
        if self._ids and self._characters > _RUN_CHARACTERS:
            self.write()
            self._characters = len(tokens_text)
        tokens: dict[str, int] = json.loads(tokens_text)
        self._ids.append(id_)
        self._lengths.append(length)
        self._sizes.append(len(tokens))
        for token in tokens:
            self._terms.append(self._vocabulary.setdefault(token, len(self._vocabulary)))
        self._counts.extend(tokens.values())
        if len(self._ids) == RUN_ROWS:
            self.write()

    def write(self) -> None:
        """What is not yet written; to be called after the last row."""
        if not self._ids:
            return
        slot = np.repeat(np.arange(len(self._ids), dtype=np.int32), np.array(self._sizes))
        _write_run(
            self._plpy, self._store, np.array(self._ids), np.array(self._lengths), list(self._vocabulary),
            np.array(self._terms), slot, np.array(self._counts),
        )  # fmt: skip
        self._clear()


def _write_rows(plpy: Any, store: int, rows: Iterable[Any]) -> None:
    writer = RunWriter(plpy, store)
    for row in rows:
        writer.add(row["id"], row["length"], row["tokens"])
    writer.write()


# -- made and dropped by the owner of a table -------------------------------------------------------------------------


def build(plpy: Any, index: dict[str, Any], call: int | None) -> None:
    """Make the index of a table of the caller's (a row of ml_rag.keyword_store), in place of the one there is.

    The caller reads its table, and what comes of that is written with the rights of the extension's owner.
    """
    store = check_owner(plpy, index["store"])
    description = json.dumps(index)
    keeps_tokens = index["statistics"] == "visible"

    def begin() -> None:
        _run(plpy, "drop index", store)
        _run(plpy, "add index", description)

    as_owner(plpy, begin, writes=True)
    writer = RunWriter(plpy, store)

    def add(rows: list[Any]) -> None:
        ids = [row["id"] for row in _run(plpy, "numbers", len(rows))]
        tokens = [row["tokens"] if keeps_tokens else None for row in rows]
        _run(
            plpy, "add rows", store, ids, [row["length"] for row in rows], [row["key"] for row in rows], tokens
        )  # fmt: skip
        for id_, row in zip(ids, rows, strict=True):
            writer.add(id_, row["length"], row["tokens"])

    cursor = plpy.cursor(_run(plpy, "source", description, call)[0]["source"])
    while rows := list(cursor.fetch(_ROWS)):
        as_owner(plpy, functools.partial(add, rows), writes=True)
    cursor.close()
    as_owner(plpy, writer.write, writes=True)


def drop(plpy: Any, store: int) -> None:
    """Drop the index of a table of the caller's."""
    check_owner(plpy, store)
    as_owner(plpy, lambda: _run(plpy, "drop index", store), writes=True)


def fold_own(plpy: Any, store: int) -> None:
    """Fold and merge all of the index of a table of the caller's."""
    check_owner(plpy, store)
    as_owner(plpy, lambda: fold(plpy, store, 0, True), writes=True)


# -- folding ----------------------------------------------------------------------------------------------------------


def fold(plpy: Any, store: int, batch: int, thorough: bool) -> None:
    """Fold what waits into runs: the rows of a batch, or (0) all that waits, deletions too; then merge runs.

    ``thorough``: merge large runs too. Nothing happens where somebody else is at it (but for a batch, which is the
    caller's alone).
    """
    if batch:
        _write_rows(plpy, store, _run.rows(plpy, "batch", store, batch, portion=_ROWS))
        _run(plpy, "drop batch", store, batch)
        return
    # the statements that follow see what whoever had the lock has done, each having a snapshot of its own
    if not len(_run(plpy, "lock", store)):
        return
    gone = {row["id"]: row["length"] for row in _run(plpy, "all gone", store)}
    ids: list[int] = []

    def alive() -> Iterator[Any]:
        for row in _run.rows(plpy, "batch", store, 0, portion=_ROWS):
            ids.append(row["id"])
            if row["id"] not in gone:
                yield row

    _write_rows(plpy, store, alive())
    _run(plpy, "drop new", store, ids)
    _run(plpy, "drop gone", store, list(gone))
    for id_ in ids:
        gone.pop(id_, None)
    if gone:
        _note_gone(plpy, store, gone)
    _merge(plpy, store, thorough)


def _note_gone(plpy: Any, store: int, gone: dict[int, int]) -> None:
    ids = np.array(sorted(gone), np.int64)
    for run in _run(plpy, "all runs", store):
        inside = ids[(ids >= run["first_id"]) & (ids <= run["last_id"])]
        if not len(inside):
            continue
        own = _run(plpy, "run", run["run"])[0]
        slots = slots_of(unpack(own["ids"]), run["first_id"], inside)
        if len(slots):
            dead = bits(own["gone"], run["rows"])
            dead[slots] = True
            total = int(unpack(own["lengths"])[dead].astype(np.int64).sum())
            _run(plpy, "note gone", run["run"], np.packbits(dead).tobytes(), int(np.count_nonzero(dead)), total)


def _size(run: Any) -> int:
    """What a run takes of the room of another: the rows that are left, or more where these have many tokens."""
    rows: int = run["rows"] - run["gone_rows"]
    tokens: int = run["total"] - run["gone_total"]
    return max(rows, tokens * RUN_ROWS // _RUN_TOKENS)


def _merge(plpy: Any, store: int, thorough: bool) -> None:
    """Make one run of several small ones, and a new one of one that is mostly deleted rows."""
    while True:
        runs = [(_size(run), run) for run in _run(plpy, "all runs", store)]
        for limit in (_SMALL, _LARGE) if thorough else (_SMALL,):
            small = sorted(((size, run["run"]) for size, run in runs if size < limit))
            if len(small) >= (2 if thorough else _MERGE):
                break
        else:
            small = [
                (size, run["run"])
                for size, run in runs
                if 2 * run["gone_rows"] > run["rows"] and (thorough or run["rows"] < 2 * _SMALL)
            ][:1]
            if not small:
                return
        chosen: list[int] = []
        room = RUN_ROWS
        for size, run in small:
            if size <= room or not chosen:
                chosen.append(run)
                room -= size
        _merge_runs(plpy, store, chosen)


def _merge_runs(plpy: Any, store: int, runs: list[int]) -> None:
    ids: list[Ints] = []
    lengths: list[Ints] = []
    alive: dict[int, Ints] = {}
    for number in runs:
        row = _run(plpy, "run", number)[0]
        own = row["first_id"] + unpack(row["ids"]).astype(np.int64)
        alive[number] = np.flatnonzero(~bits(row["gone"], len(own)))
        ids.append(own[alive[number]])
        lengths.append(unpack(row["lengths"])[alive[number]].astype(np.int64))
    all_ids = np.concatenate(ids)
    order = np.argsort(all_ids)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    # of each run, slot to new slot; -1 = deleted
    moved: dict[int, Ints] = {}
    start = 0
    for number in runs:
        moved[number] = np.full(RUN_ROWS, -1)
        moved[number][alive[number]] = place[start : start + len(alive[number])]
        start += len(alive[number])
    vocabulary: dict[str, int] = {}
    parts: list[tuple[int, Ints, NDArray[Any]]] = []
    for row in _run.rows(plpy, "run postings", runs, portion=_POSTINGS):
        slots, counts = postings_of(row["postings"])
        new = moved[row["run"]][slots]
        kept = new >= 0
        parts.append((vocabulary.setdefault(row["term"], len(vocabulary)), new[kept], counts[kept].astype(np.int64)))
    _run(plpy, "drop postings", runs)
    _run(plpy, "drop runs", runs)
    if len(all_ids):
        _write_run(
            plpy, store, all_ids[order], np.concatenate(lengths)[order], list(vocabulary),
            np.repeat(np.array([term for term, _, _ in parts], np.int64), [len(slots) for _, slots, _ in parts]),
            np.concatenate([slots for _, slots, _ in parts] or [np.empty(0, np.int64)]),
            np.concatenate([counts for _, _, counts in parts] or [np.empty(0, np.int64)]),
        )  # fmt: skip
