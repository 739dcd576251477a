"""BM25 over the keyword indexes (sql/keyword/tables.sql): postings are read and added up with numpy."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ml_rag.backend.indexes import readable
from ml_rag.backend.rights import as_owner
from ml_rag.backend.runs import bits, postings_of, slots_of, unpack
from ml_rag.backend.statements import Statements
from ml_rag.backend.tokens import any_of, counts_of
from ml_rag.errors import MlRagError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ml_rag.backend.tokens import Ints

    Floats = NDArray[np.float64]
#: keys, each the text of a text[], and scores
Candidates = tuple[list[str], list[float]]
#: keys of rows, as the text of a text[], and how many
Portion = tuple[str, int]
#: of an index: rows, tokens of all of them, and in how many rows each of the terms stands
Corpus = tuple[int, int, list[int]]

#: rows that are as good as the last one wanted and come with it: that many at most, or a store of equal segments would
#: cost everybody seconds
TIES = 1000

#: what makes an index another one
_IDENTITY = ("segment", "key", "configuration", "beside", "statistics")

#: that many are looked for in the tokens of a row by PostgreSQL, whose time grows with their number
FEW_TERMS = 32
#: rows of one fetch, each of which may hold the tokens of a segment, or 330 kB of postings
_ROWS, _POSTINGS = 200, 50
#: rows that are scored at a time, so that what is worked with stays in the processor's cache
_SCORED = 10_000

_STATEMENTS = {
    # only while its key is unique: of rows with the same key, a search would find each by the words of the others
    "index": (
        "SELECT i.segment, i.key, i.configuration, i.k1, i.b, i.statistics, i.beside"
        " FROM ml_rag_internal.keyword_store AS i WHERE i.store = $1 AND ml_rag._is_key(i.store, i.key)",
        "oid",
    ),
    "visible keys": (
        "SELECT k.keys, k.n FROM ml_rag._visible_keys($1::oid, $2::name[], $3, $4, $5, $6) AS k",
        *("oid", "text[]", "text", "text", "text[]", "int4"),
    ),
    # ids of 8 bytes each, big-endian
    "visible ids": (
        "SELECT string_agg(int8send(r.id), '') AS ids FROM unnest($2::text[]) AS k (key)"
        " JOIN ml_rag_internal.keyword_row AS r ON r.store = $1 AND r.key = k.key",
        *("oid", "text"),
    ),
    # tokens: null for rows that have none of the terms in $2, unless $2 is null. Of a long text only the terms in $3
    "visible rows": (
        "SELECT r.id, r.length, CASE WHEN $2 IS NULL OR r.tokens ?| $2 THEN CASE WHEN pg_column_size(r.tokens) < 100000"
        " THEN r.tokens ELSE (SELECT jsonb_object_agg(e.key, e.value) FROM jsonb_each(r.tokens) AS e"
        ' JOIN unnest($3) AS u (term) ON u.term = e.key COLLATE "C") END::text END AS tokens'
        " FROM unnest($4::text[]) AS k (key) JOIN ml_rag_internal.keyword_row AS r ON r.store = $1 AND r.key = k.key",
        *("oid", "text[]", "text[]", "text"),
    ),
    # the runs; what waits; what is deleted
    "parts": (
        "SELECT * FROM (SELECT min(u.tableoid) AS origin, array_agg(u.run) AS runs, array_agg(u.rows) AS rows,"
        " array_agg(u.first_id) AS first_ids, array_agg(u.last_id) AS last_ids, array_agg(u.gone) AS gone_slots,"
        " coalesce(sum(u.rows - u.gone_rows), 0) AS kept, coalesce(sum(u.total - u.gone_total), 0)::int8 AS kept_total"
        " FROM (SELECT tableoid, * FROM ml_rag_internal.keyword_run WHERE store = $1 ORDER BY run) AS u) AS r"
        " CROSS JOIN (SELECT count(*) AS waiting, coalesce(sum(length), 0) AS waiting_total"
        " FROM ml_rag_internal.keyword_new WHERE store = $1) AS w"
        " CROSS JOIN (SELECT coalesce(array_agg(id ORDER BY id), '{}') AS gone, coalesce(sum(length), 0) AS gone_total"
        " FROM ml_rag_internal.keyword_gone WHERE store = $1) AS g",
        "oid",
    ),
    "lengths": (
        "SELECT run, lengths FROM ml_rag_internal.keyword_run WHERE store = $1 AND run = ANY ($2)",
        "oid",
        "int8[]",
    ),
    "ids": (
        "SELECT run, ids FROM ml_rag_internal.keyword_run WHERE store = $1 AND run = ANY ($2)",
        *("oid", "int8[]"),
    ),
    "postings": (
        "SELECT term, run, postings FROM ml_rag_internal.keyword_posting WHERE store = $1 AND term = ANY ($2)"
        " ORDER BY term, run",
        *("oid", "text[]"),
    ),
    "new": (
        "SELECT id, length, coalesce(words::text, tokens::text) AS tokens FROM ml_rag_internal.keyword_new"
        " WHERE store = $1 AND ($2 IS NULL OR CASE WHEN words IS NULL THEN tokens ?| $2 ELSE words @@ $3 END)",
        *("oid", "text[]", "tsquery"),
    ),
    "keys": (
        # one by one: before it has statistics of the table, the planner would read all rows of the store
        "SELECT r.id, r.key FROM unnest($2) AS i (id) CROSS JOIN LATERAL ("
        "SELECT k.id, k.key FROM ml_rag_internal.keyword_row AS k WHERE k.store = $1 AND k.id = i.id OFFSET 0) AS r",
        *("oid", "int8[]"),
    ),
}
_run = Statements(_STATEMENTS)


class OtherIndex(Exception):
    """The index was dropped, or rebuilt with other options."""


class TooMany(Exception):
    """More rows pass a filter than are looked up one by one."""


class HiddenRows(MlRagError):
    """How many rows hold a word is asked for by a role that does not see all of them."""

    sqlstate = "55000"

    def __init__(self) -> None:
        super().__init__(
            "the statistics of the keyword index are of hidden rows too",
            detail="Row-level security applies to the role.",
            hint='The owner can rebuild the index with the option "statistics": "visible", on all shards.',
        )


# -- the search --------------------------------------------------------------------------------------------------------


def find(
    plpy: Any,
    index: dict[str, Any],
    terms: list[str],
    weights: list[int],
    n: int,
    row_keys: str | None = None,
    corpus: Corpus | None = None,
    passing: tuple[str, list[str], int] | None = None,
) -> Candidates:
    """Keys and scores of the ``n`` best rows that the caller can see, and of up to ``TIES`` as good as the last.

    ``index``: one that ``indexes.readable`` has given. ``row_keys``: of few rows that pass a filter, as the text of a
    tid[]; None = all rows. ``corpus``: the statistics to score by, where the rows are a part of those of a store; None
    = their own. ``passing``: condition and arguments of a filter, and how many rows may pass it. Raises OtherIndex,
    TooMany.
    """
    store, key = index["store"], index["key"]
    secured, reads_nodes = index["secured"], index["reads_nodes"]
    keys: list[Portion] | None = None
    if secured or row_keys is not None or passing is not None:
        condition, arguments, most = passing or (None, None, None)
        found = _run(plpy, "visible keys", store, key, row_keys, condition, arguments, most and most + 1)
        keys = [(row["keys"], row["n"]) for row in found]
        if most is not None and sum(n for _, n in keys) > most:
            raise TooMany

    def work() -> Candidates:
        found = _run(plpy, "index", store)
        if not len(found) or any(found[0][name] != index[name] for name in _IDENTITY if name in index):
            raise OtherIndex
        if found[0]["beside"] is not None and not reads_nodes:
            raise OtherIndex
        k1, b = found[0]["k1"], found[0]["b"]
        if secured and keys is not None and found[0]["statistics"] == "visible":
            ids, scores = _scores_of_visible(plpy, store, terms, weights, k1, b, n, keys, corpus)
        else:
            ids, scores = _scores(plpy, store, terms, weights, k1, b, n, keys, corpus)
        keys_of = {row["id"]: row["key"] for row in _run.rows(plpy, "keys", store, ids, most=len(ids))}
        found_rows = [(keys_of[i], score) for i, score in zip(ids, scores, strict=True) if i in keys_of]
        return [key for key, _ in found_rows], [score for _, score in found_rows]

    return as_owner(plpy, work)


def statistics(plpy: Any, store: int, segment: str, key: list[str], terms: list[str]) -> Corpus:
    """What the scores of an index depend on: of all its rows, or of those that the caller can see where it is made so.

    Nothing is counted where the caller may not search it.
    """
    nothing = 0, 0, [0] * len(terms)
    own = readable(plpy, [{"store": store, "segment": segment, "key": key}])
    if not own:
        return nothing
    secured, reads_nodes = own[0]["secured"], own[0]["reads_nodes"]
    keys = [(row["keys"], row["n"]) for row in _run(plpy, "visible keys", store, key, *[None] * 4)] if secured else []

    def work() -> Corpus:
        found = _run(plpy, "index", store)
        if not len(found) or found[0]["segment"] != segment or found[0]["key"] != key:
            return nothing
        if found[0]["beside"] is not None and not reads_nodes:
            return nothing
        if secured and found[0]["statistics"] != "visible":
            raise HiddenRows
        if secured:
            rows, total, matches = _visible_matches(plpy, store, terms, keys)
            return rows, total, matches.df.tolist()
        parts = Parts(_run(plpy, "parts", store)[0])
        df = _new(plpy, store, terms, parts).df
        dead = _dead(plpy, store, parts)
        for place, at, _ in _postings(plpy, store, terms, parts, dead):
            df[place] += len(at)
        return parts.count, parts.total, df.tolist()

    return as_owner(plpy, work)


# -- scores -----------------------------------------------------------------------------------------------------------


class Scorer:
    """Lucene's BM25, as bm25s computes it with method 'lucene'."""

    def __init__(self, k1: float, b: float, rows: int, total: int) -> None:
        self._rows = rows
        # without any token there is nothing to score
        self._floor = k1 * (1 - b)
        self._slope = k1 * b * rows / total if total else 0.0

    def factor(self, df: int, weight: int) -> float:
        """What a term counts that so many rows hold and the query says so often."""
        return weight * float(np.log(1 + (self._rows - df + 0.5) / (df + 0.5)))

    def share(self, counts: NDArray[Any], lengths: NDArray[Any]) -> Floats:
        """How far segments of these lengths speak of a term that they hold so often: 0-1."""
        shares: Floats = counts.astype(np.float64)
        # frequency / (frequency + (floor + slope * length)), in place
        rest = self._slope * lengths
        rest += self._floor
        rest += shares
        shares /= rest
        return shares


class Matches:
    """The rows that have one of the terms, of rows that come one by one with their tokens; nothing else is kept."""

    def __init__(self, terms: list[str]) -> None:
        self._places = {term: i for i, term in enumerate(terms)}
        self._ids, self._lengths = array("q"), array("q")
        self._sizes, self._terms, self._counts = array("i"), array("i"), array("i")

    def add(self, id_: int, length: int, tokens_text: str) -> None:
        """A row; ``tokens_text``: see ``tokens.counts_of``."""
        # by place, so that sums are the same down to the last bit as those of the same words in a run
        if found := counts_of(tokens_text, self._places):
            self._ids.append(id_)
            self._lengths.append(length)
            self._sizes.append(len(found))
            self._terms.extend([self._places[term] for term in found])
            self._counts.extend(found.values())

    @property
    def ids(self) -> Ints:
        return np.array(self._ids, np.int64)

    @property
    def df(self) -> Ints:
        """In how many rows each of the terms stands."""
        found: Ints = np.bincount(np.array(self._terms, np.int64), minlength=len(self._places))
        return found

    def scores(self, score: Scorer, factors: Floats) -> Floats:
        """Of each row, given what each of the terms counts."""
        scores = np.zeros(len(self._ids))
        sizes = np.array(self._sizes, np.int64)
        lengths = np.array(self._lengths, np.int64)
        start, first = 0, 0
        for last in range(_SCORED, len(sizes) + _SCORED, _SCORED):
            own = slice(first, last)
            row = np.repeat(np.arange(len(sizes[own])), sizes[own])
            end = start + len(row)
            terms, counts = np.array(self._terms[start:end]), np.array(self._counts[start:end])
            parts = factors[terms] * score.share(counts, lengths[own][row])
            scores[own] = np.bincount(row, parts, len(sizes[own]))
            start, first = end, last
        return scores


def best(scores: Floats, n: int, sample: NDArray[Any] | None = None) -> Ints:
    """Places of the ``n`` highest scores above 0, and of up to ``TIES`` that equal the last of them; best first.

    ``sample``: places that are likely to have high scores; they give a bound that spares sorting the rest.
    """
    bound = 0.0
    if sample is not None and len(sample) > n:
        bound = float(np.partition(scores[sample], len(sample) - n)[len(sample) - n])
    places = np.flatnonzero(scores >= bound) if bound > 0 else np.flatnonzero(scores)
    if len(places) > n:
        found = scores[places]
        places = places[found >= np.partition(found, len(found) - n)[len(found) - n]]
    return places[np.argsort(-scores[places], kind="stable")][: n + TIES]


#: columns of the runs of a store, which never change: (name, store) -> (origin and runs, a number for each row of them)
_columns: dict[tuple[str, int], tuple[Any, NDArray[Any]]] = {}
_BYTES_KEPT = 16_000_000
#: the most rows of a store whose ids a session keeps; of a larger store, the runs with hits are read each time
_IDS_KEPT = 2_000_000


def _column(plpy: Any, name: str, store: int, parts: Parts) -> NDArray[Any]:
    """The column ``lengths`` or ``ids`` of all runs; kept for the next query."""
    version, numbers = _columns.get((name, store), (None, None))
    if numbers is None or version != parts.version:
        found = {row["run"]: unpack(row[name]) for row in _run(plpy, name, store, parts.runs)}
        numbers = np.concatenate([found[run] for run in parts.runs] or [np.empty(0, "<u4")])
        _keep(name, store, parts.version, numbers)
    return numbers


def _keep(name: str, store: int, version: Any, numbers: NDArray[Any]) -> None:
    """Remember a column within the bound; of a store that is larger only the lengths, which each query needs."""

    def are_too_many() -> bool:
        return numbers.nbytes + sum(kept.nbytes for _, kept in _columns.values()) > _BYTES_KEPT

    _columns.pop((name, store), None)
    if are_too_many():
        for other in [kept for kept in _columns if kept[1] != store]:
            del _columns[other]
    if name == "lengths" and are_too_many():
        _columns.pop(("ids", store), None)
    if name == "lengths" or not are_too_many():
        _columns[name, store] = version, numbers


def _filtering(terms: list[str]) -> list[str] | None:
    """The terms where PostgreSQL is to leave out the rows that have none of them, else None."""
    return terms if len(terms) <= FEW_TERMS else None


def _factors(score: Scorer, df: Ints, weights: list[int]) -> Floats:
    return np.array([score.factor(n, weight) for n, weight in zip(df.tolist(), weights, strict=True)], np.float64)


class Parts:
    """What an index is made of besides postings: runs, one after another; rows that wait; rows that are deleted."""

    def __init__(self, row: Any) -> None:
        """``row``: of the statement."""
        self.runs: list[int] = row["runs"] or []
        #: what runs are known by in a session
        self.version = row["origin"], tuple(self.runs)
        self.rows: list[int] = row["rows"] or []
        #: where the rows of each run begin, and where all of them end
        self.starts: list[int] = list(itertools.accumulate(self.rows, initial=0))
        self.first_ids: list[int] = row["first_ids"] or []
        self.last_ids: list[int] = row["last_ids"] or []
        #: of each run, packed; None where none is deleted
        self.gone_slots: list[bytes | None] = row["gone_slots"] or []
        self.waiting: int = row["waiting"]
        #: ids of deleted rows that are in a run or wait
        self.gone: list[int] = row["gone"]
        #: rows, and tokens of all of them
        self.count: int = row["kept"] + row["waiting"] - len(self.gone)
        self.total: int = row["kept_total"] + row["waiting_total"] - row["gone_total"]


def _scores(
    plpy: Any,
    store: int,
    terms: list[str],
    weights: list[int],
    k1: float,
    b: float,
    n: int,
    keys: list[Portion] | None,
    corpus: Corpus | None = None,
) -> tuple[list[int], list[float]]:
    """Ids and scores of the ``n`` best rows; where ``keys`` says which are visible, of those alone.

    The statistics are those of all rows, or the ``corpus``.
    """
    parts = Parts(_run(plpy, "parts", store)[0])
    score = Scorer(k1, b, *((parts.count, parts.total) if corpus is None else corpus[:2]))
    size = parts.starts[-1]
    dead = _dead(plpy, store, parts)
    lengths = _column(plpy, "lengths", store, parts)
    new = _new(plpy, store, terms, parts)
    new_ids = new.ids
    seen = None if keys is None else _visible(plpy, store, parts, keys, new_ids)

    df = new.df if corpus is None else np.array(corpus[2], np.int64)
    scores = np.zeros(size + len(new_ids))
    rarest: NDArray[np.uint32] | None = None
    for place, at, numbers in _postings(plpy, store, terms, parts, dead):
        if corpus is None:
            df[place] += len(at)
        if seen is not None:
            shown = seen[at]
            at, numbers = at[shown], numbers[shown]
        factor = score.factor(int(df[place]), weights[place])
        for start in range(0, len(at), _SCORED):
            own = at[start : start + _SCORED].astype(np.intp)
            shares = score.share(numbers[start : start + _SCORED], lengths[own])
            shares *= factor
            scores[own] += shares
        if len(at) > n and (rarest is None or len(at) < len(rarest)):
            rarest = at
    if len(new_ids):
        scores[size:] = new.scores(score, _factors(score, df, weights))
        if seen is not None:
            scores[size:][~seen[size:]] = 0
    found = best(scores, n, rarest)
    return _ids(plpy, store, parts, found, new_ids), scores[found].tolist()


def _new(plpy: Any, store: int, terms: list[str], parts: Parts) -> Matches:
    """The rows with one of the terms that are pending."""
    new = Matches(terms)
    if not parts.waiting:
        return new
    gone = set(parts.gone)
    few = _filtering(terms)
    any_few = any_of(few) if few else None
    for row in _run.rows(plpy, "new", store, few, any_few, portion=_ROWS):
        if row["id"] not in gone:
            new.add(row["id"], row["length"], row["tokens"])
    return new


def _postings(
    plpy: Any, store: int, terms: list[str], parts: Parts, dead: NDArray[np.bool_] | None
) -> Iterator[tuple[int, NDArray[np.uint32], NDArray[Any]]]:
    """Of each term that some run holds: its place, those of the rows that have it, and how often each of them does."""
    places = {term: i for i, term in enumerate(terms)}
    starts = dict(zip(parts.runs, parts.starts, strict=False))
    most = len(terms) * len(parts.runs)
    rows = _run.rows(plpy, "postings", store, terms, portion=_POSTINGS, most=most)
    for term, group in itertools.groupby(rows, operator.itemgetter("term")):
        own = [(starts[row["run"]], *postings_of(row["postings"])) for row in group]
        at = np.concatenate([np.add(slots, start, dtype=np.uint32) for start, slots, _ in own])
        numbers = np.concatenate([counts for _, _, counts in own])
        if dead is not None:
            alive = ~dead[at]
            at, numbers = at[alive], numbers[alive]
        yield places[term], at, numbers


#: as many keys are looked up one by one; for more the planner has to know how many there are
FEW_KEYS = 10_000


def _visible_rows(plpy: Any, name: str, store: int, keys: list[Portion], *arguments: Any) -> Iterator[Any]:
    """What a statement on a store ($1), the arguments and keys (the last one) gives of the rows that have them."""
    for portion, n in keys:
        if n <= FEW_KEYS:
            yield from _run.rows(plpy, name, store, *arguments, portion, portion=_ROWS)
        else:
            yield from _run.rows_with(plpy, name, portion, store, *arguments, portion=_ROWS)


def _visible(plpy: Any, store: int, parts: Parts, keys: list[Portion], new_ids: Ints) -> NDArray[np.bool_]:
    """Which rows of all runs, one after another, and then of the new ones have one of the keys."""
    packed = [row["ids"] for row in _visible_rows(plpy, "visible ids", store, keys)]
    ids = np.frombuffer(b"".join(part for part in packed if part), ">i8").astype(np.int64)
    size = parts.starts[-1]
    seen = np.zeros(size + len(new_ids), np.bool_)
    for i, of_run in _ids_of(plpy, store, parts, range(len(parts.runs))):
        seen[parts.starts[i] + slots_of(of_run, parts.first_ids[i], ids)] = True
    seen[size:] = np.isin(new_ids, ids)
    return seen


def _visible_matches(plpy: Any, store: int, terms: list[str], keys: list[Portion]) -> tuple[int, int, Matches]:
    """How many rows have one of the keys, how many tokens they have, and those with one of the terms."""
    rows, total = 0, 0
    found = Matches(terms)
    for row in _visible_rows(plpy, "visible rows", store, keys, _filtering(terms), terms):
        rows, total = rows + 1, total + row["length"]
        if row["tokens"] is not None:
            found.add(row["id"], row["length"], row["tokens"])
    return rows, total, found


def _scores_of_visible(
    plpy: Any,
    store: int,
    terms: list[str],
    weights: list[int],
    k1: float,
    b: float,
    n: int,
    keys: list[Portion],
    corpus: Corpus | None = None,
) -> tuple[list[int], list[float]]:
    """The same where statistics are of the visible rows: nothing is read but the tokens of these."""
    rows, total, found = _visible_matches(plpy, store, terms, keys)
    score = Scorer(k1, b, *((rows, total) if corpus is None else corpus[:2]))
    scores = found.scores(score, _factors(score, found.df if corpus is None else np.array(corpus[2]), weights))
    ids = found.ids
    order = np.argsort(ids, kind="stable")
    places = order[best(scores[order], n)]
    return ids[places].tolist(), scores[places].tolist()


def _dead(plpy: Any, store: int, parts: Parts) -> NDArray[np.bool_] | None:
    """Which rows of all runs, one after another, are deleted; None where none is."""
    if not parts.gone and not any(parts.gone_slots):
        return None
    dead = np.concatenate([bits(None, 0), *map(bits, parts.gone_slots, parts.rows)])
    if parts.gone:
        ids = np.array(parts.gone, np.int64)
        touched = [
            i
            for i, (first, last) in enumerate(zip(parts.first_ids, parts.last_ids, strict=True))
            if np.any((ids >= first) & (ids <= last))
        ]  # fmt: skip
        for i, of_run in _ids_of(plpy, store, parts, touched):
            dead[parts.starts[i] + slots_of(of_run, parts.first_ids[i], ids)] = True
    return dead


def _ids_of(plpy: Any, store: int, parts: Parts, places: Sequence[int]) -> Iterator[tuple[int, NDArray[Any]]]:
    """The column ``ids`` of the runs at these places."""
    if not places:
        return
    if parts.starts[-1] <= _IDS_KEPT:
        of_runs = _column(plpy, "ids", store, parts)
        for i in places:
            yield i, of_runs[parts.starts[i] : parts.starts[i + 1]]
    else:
        of_run = {parts.runs[i]: i for i in places}
        for row in _run.rows(plpy, "ids", store, list(of_run), portion=_POSTINGS):
            yield of_run[row["run"]], unpack(row["ids"])


def _ids(plpy: Any, store: int, parts: Parts, found: Ints, new_ids: Ints) -> list[int]:
    """Ids of the rows at the places found: in the runs one after another, then among the new ones."""
    which = np.searchsorted(parts.starts[1:], found, side="right")
    n = len(parts.runs)
    ids = np.array([*parts.first_ids, 0], np.int64)[which]
    for i, of_run in _ids_of(plpy, store, parts, sorted(set(which.tolist()) - {n})):
        own = which == i
        ids[own] += of_run[found[own] - parts.starts[i]].astype(np.int64)
    if len(new_ids):
        own = which == n
        ids[own] = new_ids[found[own] - parts.starts[-1]]
    found_ids: list[int] = ids.tolist()
    return found_ids
