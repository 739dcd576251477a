"""The runs of a keyword index (sql/keyword/tables.sql): their packed form, and merging rows into them.

This, ``keyword`` and ``tokens`` need numpy, alone in the backend; ``bridge`` imports them when they are first used.

A run is up to ``RUN_ROWS`` rows, each with a slot. Its ids and lengths by slot are little-endian integers behind a
header of 8 bytes, whose first is their width (2, 4 or 8). The postings of a term in a run are slots (2 bytes each) and
then how often it stands there (1 or 4 bytes each), behind a header of 2 bytes, whose first is that width.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ml_rag.backend import calls, tokens
from ml_rag.backend.indexes import check_owner
from ml_rag.backend.retrieval.sqltext import identifier
from ml_rag.backend.rights import as_owner
from ml_rag.backend.statements import Statements

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ml_rag.backend.tokens import Ints, Tokens

    Postings = tuple[NDArray[np.uint16], NDArray[Any]]

RUN_ROWS = 65536
#: a run has fewer rows where these have more different tokens than that, and ends where its terms have so many
#: characters: the memory that it takes to make one grows with both
_RUN_TOKENS = 4_000_000
_RUN_CHARACTERS = 16_000_000
#: terms of one INSERT
_PORTION = 5000
#: texts whose tokens are looked for at once, at most, and their characters
_TEXTS, _CHARACTERS = 4096, 4_000_000
#: rows of one fetch, each of which holds a segment or its tokens, which may be long, or up to 330 kB of postings
_ROWS, _POSTINGS = 16, 200
#: runs of fewer rows than these are merged once there are ``_MERGE`` of them: small ones by any session, larger ones
#: only on request, since that takes seconds
_SMALL, _LARGE = 4096, 32768
_MERGE = 8
#: a run of fewer rows is found fast enough without statistics
_MANY_ROWS = 256

_STATEMENTS = {
    "add index": (
        "INSERT INTO ml_rag_internal.keyword_store"
        " SELECT (jsonb_populate_record(NULL::ml_rag_internal.keyword_store, $1)).*",
        "jsonb",
    ),
    # and those that its partitions have from when they were none: their triggers are those of the table now
    "drop index": (
        "DELETE FROM ml_rag_internal.keyword_store WHERE store = $1"
        " OR store IN (SELECT p.relid FROM pg_partition_tree($1::regclass) AS p)",
        "oid",
    ),
    # what one that was dropped above READ COMMITTED has left: rows that others had written meanwhile
    "empty": ("SELECT ml_rag._empty_keywords($1)", "oid"),
    # As the caller: SQL of key, text and its hash of each row of its table that has one; those of a table of Citus are
    # in the indexes of its shards.
    "source": (
        "SELECT pg_catalog.format('SELECT s.key AS key, s.segment AS segment,"
        " pg_catalog.hashtextextended(s.segment, 0) AS text_hash FROM (SELECT %s FROM %s AS t)"
        " AS s (key, segment) WHERE s.segment IS NOT NULL%s', ml_rag._key_and_segment('t', i),"
        " ml_rag._indexed_rows(i.store), CASE WHEN ml_rag._is_distributed(i.store) THEN ' AND false' END) AS source"
        " FROM pg_catalog.jsonb_populate_record(NULL::ml_rag_internal.keyword_store, $1) AS i",
        "jsonb",
    ),
    # by its OID, as by its name it is found only where its schema may be used
    "index": (
        "SELECT ml_rag._configuration(configuration)::oid::text AS configuration, statistics"
        " FROM ml_rag_internal.keyword_store WHERE store = $1",
        "oid",
    ),
    # their ids, 8 bytes each, big-endian
    "add rows": (
        "WITH added AS (INSERT INTO ml_rag_internal.keyword_row (id, store, length, key, tokens, text_hash)"
        " SELECT nextval('ml_rag_internal.keyword_number'), $1, u.length, u.key, u.tokens::jsonb, u.text_hash"
        " FROM unnest($2, $3, $4, $5) AS u (length, key, tokens, text_hash) RETURNING id)"
        " SELECT string_agg(int8send(a.id), '') AS ids FROM added AS a",
        *("oid", "int4[]", "text[]", "text[]", "int8[]"),
    ),
    "lock": ("SELECT FROM ml_rag_internal.keyword_store WHERE store = $1 FOR UPDATE SKIP LOCKED", "oid"),
    "new": (
        "SELECT id, coalesce(words::text, tokens::text) AS tokens FROM ml_rag_internal.keyword_new"
        " WHERE store = $1 ORDER BY id",
        "oid",
    ),
    # IS TRUE: a hash; of a table that ANALYZE has seen empty one row is expected, which all ids would be compared with
    "drop new": (
        "DELETE FROM ml_rag_internal.keyword_new WHERE store = $1 AND (id IN (SELECT unnest($2))) IS TRUE",
        *("oid", "int8[]"),
    ),
    "all gone": ("SELECT id, length FROM ml_rag_internal.keyword_gone WHERE store = $1", "oid"),
    "drop gone": (
        "DELETE FROM ml_rag_internal.keyword_gone WHERE store = $1 AND (id IN (SELECT unnest($2))) IS TRUE",
        *("oid", "int8[]"),
    ),
    "all runs": (
        "SELECT run, rows, total, gone_rows, gone_total, first_id, last_id, gone"
        " FROM ml_rag_internal.keyword_run WHERE store = $1 ORDER BY run",
        "oid",
    ),
    "run": ("SELECT first_id, ids, lengths, gone FROM ml_rag_internal.keyword_run WHERE run = $1", "int8"),
    "note gone": (
        "UPDATE ml_rag_internal.keyword_run SET gone = $2, gone_rows = $3, gone_total = $4 WHERE run = $1",
        *("int8", "bytea", "int4", "int8"),
    ),
    "add run": (
        "INSERT INTO ml_rag_internal.keyword_run (run, store, rows, total, first_id, last_id, ids, lengths)"
        " VALUES (nextval('ml_rag_internal.keyword_number'), $1, $2, $3, $4, $5, $6, $7) RETURNING run",
        *("oid", "int4", "int8", "int8", "int8", "bytea", "bytea"),
    ),
    "add postings": (
        "INSERT INTO ml_rag_internal.keyword_posting (run, store, term, postings)"
        " SELECT $1, $2, u.term, u.postings FROM unnest($3, $4) AS u (term, postings)",
        *("int8", "oid", "text[]", "bytea[]"),
    ),
    "run postings": ("SELECT term, run, postings FROM ml_rag_internal.keyword_posting WHERE run = ANY ($1)", "int8[]"),
    "drop postings": ("DELETE FROM ml_rag_internal.keyword_posting WHERE run = ANY ($1)", "int8[]"),
    "drop runs": ("DELETE FROM ml_rag_internal.keyword_run WHERE run = ANY ($1)", "int8[]"),
    "analyze": ("SELECT ml_rag._analyze_keywords($1, $2)", "int4", "int4"),
}


_run = Statements(_STATEMENTS)


# -- the packed forms -------------------------------------------------------------------------------------------------


def pack(values: Ints) -> bytes:
    """Integers of at least 0, as the columns ``ids`` and ``lengths`` hold them."""
    most = int(values.max(initial=0))
    width = 2 if most < 2**16 else 4 if most < 2**32 else 8
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


class _Postings:
    """The postings of a run that is being made, 8 bytes each, in any order: sorted as numbers they are in theirs."""

    # term << 24 | slot << 8 | how often, where that is less than 255
    _MANY = 255

    def __init__(self) -> None:
        self._vocabulary = tokens.Vocabulary()
        self._parts: list[NDArray[np.uint64]] = []
        self._many: dict[int, int] = {}
        #: of the terms, and of the postings
        self.characters, self.size = 0, 0

    def add(self, found: Tokens, slot: int) -> None:
        """The tokens of texts, of which the first has that slot."""
        known = len(self._vocabulary.numbers)
        places = self._vocabulary.numbers_of(found)
        self.characters += sum(map(len, itertools.islice(self._vocabulary.numbers, known, None)))
        self._add(places, slot + found.rows, found.counts)

    def add_terms(self, terms: list[str], sizes: list[int], slots: NDArray[Any], counts: NDArray[Any]) -> None:
        """Terms, in how many slots each stands, these slots (-1 = none), and how often it stands in each."""
        places = np.repeat([self._vocabulary.numbers[term] for term in terms], sizes)
        kept = slots >= 0
        self._add(places[kept], slots[kept], counts[kept])

    def _add(self, places: Ints, slots: NDArray[Any], counts: NDArray[Any]) -> None:
        owners = places << 16 | slots.astype(np.int64)
        many = np.flatnonzero(counts >= self._MANY)
        self._many.update(zip(owners[many].tolist(), counts[many].tolist(), strict=True))
        self._parts.append((owners << 8 | np.minimum(counts, self._MANY).astype(np.int64)).astype(np.uint64))
        self.size += len(places)

    def packed(self) -> tuple[list[str], list[bytes]]:
        """The terms, and the postings of each as ``postings_of`` reads them; nothing is kept."""
        keys = np.concatenate(self._parts or [np.empty(0, np.uint64)])
        self._parts.clear()
        keys.sort()
        slots, counts = (keys >> np.uint64(8)).astype(np.uint16).astype("<u2"), keys.astype(np.uint8)
        keys >>= np.uint64(24)
        starts = np.flatnonzero(np.diff(keys, prepend=np.uint64(2**40)))
        bounds = [*starts.tolist(), len(keys)]
        names = list(self._vocabulary.numbers)
        places = keys[starts].astype(np.int64).tolist()
        slot_bytes, count_bytes = slots.tobytes(), counts.tobytes()
        values = [
            b"\x01\x00" + slot_bytes[2 * start : 2 * end] + count_bytes[start:end]
            for start, end in itertools.pairwise(bounds)
        ]
        if self._many:
            of_term = {place: i for i, place in enumerate(places)}
            for place in {owner >> 16 for owner in self._many}:
                own, few = postings_of(values[of_term[place]])
                wide = [self._many.get(place << 16 | slot, 0) for slot in own.tolist()]
                values[of_term[place]] = as_postings(own, np.maximum(few, np.array(wide, np.int64)))
        return [names[place] for place in places], values


def _write_run(plpy: Any, store: int, ids: Ints, lengths: Ints, postings: _Postings) -> None:
    """A run of these rows."""
    total, first, last = int(lengths.sum()), int(ids[0]), int(ids[-1])
    run = _run(plpy, "add run", store, len(ids), total, first, last, pack(ids - first), pack(lengths))[0]["run"]
    names, values = postings.packed()
    for start in range(0, len(names), _PORTION):
        chosen = slice(start, start + _PORTION)
        _run(plpy, "add postings", run, store, names[chosen], values[chosen])
    if len(ids) >= _MANY_ROWS:
        _run(plpy, "analyze", len(ids), len(names))


class RunWriter:
    """Makes runs of new rows, which come by ascending id."""

    def __init__(self, plpy: Any, store: int) -> None:
        self._plpy = plpy
        self._store = store
        self._clear()

    def _clear(self) -> None:
        self._ids: list[Ints] = []
        self._lengths: list[Ints] = []
        self._rows = 0
        self._postings = _Postings()

    def add(self, ids: Ints, found: Tokens) -> None:
        """At most ``RUN_ROWS`` rows more."""
        if self._rows + len(ids) > RUN_ROWS or self._postings.size + len(found.rows) > _RUN_TOKENS:
            self.write()
        self._postings.add(found, self._rows)
        self._ids.append(ids)
        self._lengths.append(found.lengths(len(ids)))
        self._rows += len(ids)
        if self._postings.characters > _RUN_CHARACTERS:
            self.write()

    def write(self) -> None:
        """What is not yet written; to be called after the last row."""
        if self._rows:
            ids, lengths = np.concatenate(self._ids), np.concatenate(self._lengths)
            _write_run(self._plpy, self._store, ids, lengths, self._postings)
            self._clear()


class _Indexer:
    """Puts rows of texts into an index: their numbers and keys, and runs of their tokens."""

    def __init__(self, plpy: Any, store: int, configuration: str, statistics: str) -> None:
        self._plpy = plpy
        self._store = store
        self._configuration = configuration
        self._keeps_tokens = statistics == "visible"
        self._writer = RunWriter(plpy, store)

    def add(self, rows: list[Any]) -> Callable[[], None]:
        """Find the tokens of rows (key, segment, text_hash), with the caller's rights; what then writes them, with
        those of ``ml_rag_internal``."""
        keys, segments = [row["key"] for row in rows], [row["segment"] for row in rows]
        hashes = [row["text_hash"] for row in rows]
        if self._keeps_tokens:
            kept = tokens.find(self._plpy, self._configuration, segments, as_json=True)
            found = tokens.of_json(kept)
        else:
            kept, found = None, tokens.read(self._plpy, self._configuration, segments)

        def write() -> None:
            lengths = found.lengths(len(keys)).tolist()
            packed = _run(self._plpy, "add rows", self._store, lengths, keys, kept, hashes)[0]["ids"]
            self._writer.add(np.frombuffer(packed, ">i8").astype(np.int64), found)

        return write

    def end(self) -> None:
        """Write what is left; with the rights of ``ml_rag_internal``."""
        self._writer.write()


def _portions(fetch: Callable[[int], Sequence[Any]]) -> Iterator[list[Any]]:
    """The rows (key, segment, text_hash) that ``fetch`` gives, given how many, in portions of bounded memory."""
    rows: list[Any] = []
    characters = 0
    while found := fetch(_ROWS):
        size = sum(len(row["segment"]) for row in found)
        if rows and (len(rows) + len(found) > _TEXTS or characters + size > _CHARACTERS):
            yield rows
            rows, characters = [], 0
        rows += found
        characters += size
    if rows:
        yield rows


# -- made and dropped by the owner of a table -------------------------------------------------------------------------


def build(plpy: Any, index: dict[str, Any], call: int | None) -> None:
    """Make the index of a table of the caller's (a row of ml_rag_internal.keyword_store), in place of the one there is.

    The caller reads its table, and what comes of that is written with those of ``ml_rag_internal``.
    """
    store = check_owner(plpy, index["store"])
    description = json.dumps(index)

    def begin() -> None:
        _run(plpy, "drop index", store)
        _run(plpy, "empty", store)
        _run(plpy, "add index", description)

    as_owner(plpy, begin, writes=True)
    indexer = _Indexer(plpy, store, index["configuration"], index["statistics"])
    cursor = plpy.cursor(_run(plpy, "source", description)[0]["source"])
    for rows in _portions(lambda n: list(cursor.fetch(n))):
        as_owner(plpy, indexer.add(rows), writes=True)
        calls.advance(plpy, call, len(rows))
    cursor.close()
    as_owner(plpy, indexer.end, writes=True)


def drop(plpy: Any, store: int) -> None:
    """Drop the index of a table of the caller's."""
    check_owner(plpy, store)
    as_owner(plpy, lambda: _run(plpy, "drop index", store), writes=True)


def merge_own(plpy: Any, store: int) -> None:
    """Merge all of the index of a table of the caller's."""
    check_owner(plpy, store)
    as_owner(plpy, lambda: merge(plpy, store, True), writes=True)


# -- merging ----------------------------------------------------------------------------------------------------------


def add_from_cursor(plpy: Any, store: int, cursor: str) -> int:
    """Put the rows (key, segment, text_hash) of an open cursor into an index, as ``ml_rag_internal``; how many."""
    index = _run(plpy, "index", store)[0]
    indexer = _Indexer(plpy, store, index["configuration"], index["statistics"])
    name = identifier(cursor)
    n = 0
    for rows in _portions(lambda n: list(plpy.execute(f"FETCH {n} FROM {name}"))):
        indexer.add(rows)()
        n += len(rows)
    indexer.end()
    return n


def merge(plpy: Any, store: int, thorough: bool) -> None:
    """Fold what waits into runs, deletions too; then merge runs.

    ``thorough``: merge large runs too. Nothing happens if another session is doing it.
    """
    # each of the next statements has its own snapshot, and sees what the last holder of the lock has done
    if not len(_run(plpy, "lock", store)):
        return
    gone = {row["id"]: row["length"] for row in _run(plpy, "all gone", store)}
    ids: list[int] = []
    writer = RunWriter(plpy, store)
    waiting = _run.rows(plpy, "new", store, portion=_ROWS)
    while rows := list(itertools.islice(waiting, _ROWS)):
        ids += [row["id"] for row in rows]
        kept = [row for row in rows if row["id"] not in gone]
        found, _ = tokens.of_vectors([row["tokens"] for row in kept])
        writer.add(np.array([row["id"] for row in kept], np.int64), found)
    writer.write()
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
    alive: list[NDArray[np.bool_]] = []
    for number in runs:
        row = _run(plpy, "run", number)[0]
        own = row["first_id"] + unpack(row["ids"]).astype(np.int64)
        alive.append(~bits(row["gone"], len(own)))
        ids.append(own[alive[-1]])
        lengths.append(unpack(row["lengths"])[alive[-1]].astype(np.int64))
    all_ids = np.concatenate(ids)
    order = np.argsort(all_ids)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    # of the slots of all runs, one after another: the new slot; -1 = deleted
    moved = np.full(sum(map(len, alive)), -1)
    moved[np.concatenate(alive)] = place
    starts = dict(zip(runs, itertools.accumulate(map(len, alive), initial=0), strict=False))
    postings = _Postings()
    found = _run.rows(plpy, "run postings", runs, portion=_POSTINGS)
    while rows := list(itertools.islice(found, _POSTINGS)):
        parts = [postings_of(row["postings"]) for row in rows]
        slots = np.concatenate(
            [starts[row["run"]] + own.astype(np.int64) for row, (own, _) in zip(rows, parts, strict=True)]
        )
        counts = np.concatenate([counts for _, counts in parts])
        postings.add_terms([row["term"] for row in rows], [len(own) for own, _ in parts], moved[slots], counts)
    _run(plpy, "drop postings", runs)
    _run(plpy, "drop runs", runs)
    if len(all_ids):
        _write_run(plpy, store, all_ids[order], np.concatenate(lengths)[order], postings)
