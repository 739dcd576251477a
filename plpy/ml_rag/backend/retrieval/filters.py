"""Which rows of a store pass the options that leave rows out, and how that is used."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from ml_rag.backend.retrieval.request import KEPT, LONGEST
from ml_rag.backend.retrieval.shape import Source
from ml_rag.backend.retrieval.sqltext import identifier
from ml_rag.backend.retrieval.stores import Store, record
from ml_rag.backend.statements import Statements

#: what a filter can depend on of the columns of a relation
_COLUMNS = (
    "SELECT md5(string_agg(format('%I %s %s', a.attname, a.atttypid, has_column_privilege(a.attrelid, a.attnum,"
    " 'SELECT')), ',' ORDER BY a.attnum)) FROM pg_attribute AS a WHERE a.attrelid = "
)

_run = Statements(
    {
        "columns": (f"SELECT ({_COLUMNS} $1) AS columns", "oid"),
        "filter": (
            f"SELECT f.condition, f.arguments, ({_COLUMNS} s.relation) AS columns"
            " FROM jsonb_populate_record(NULL::ml_rag.store, $1) AS s, ml_rag.filter(s, $2, $3) AS f",
            *("jsonb", "jsonb", "text"),
        ),
        "rows": ("SELECT greatest(0, c.reltuples)::float8 AS n FROM pg_class AS c WHERE c.oid = $1", "oid"),
        "estimated": (
            "SELECT e.n, e.is_scanned, e.cost"
            " FROM ml_rag._estimated_rows(jsonb_populate_record(NULL::ml_rag.store, $1), $2, $3) AS e",
            *("jsonb", "text", "text[]"),
        ),
        "passing": (
            "SELECT p.keys::text AS row_keys, cardinality(p.keys) AS n"
            " FROM ml_rag._passing_rows(jsonb_populate_record(NULL::ml_rag.store, $1), $2, $3) AS p (keys)",
            *("jsonb", "text", "text[]"),
        ),
        "warn": (
            "SELECT ml_rag._warn_of_unknown_columns("
            "ARRAY(SELECT s FROM jsonb_populate_recordset(NULL::ml_rag.store, $1) AS s), $2 -> 'filters')"
            " WHERE $2 ? 'filters'",
            *("jsonb", "jsonb"),
        ),
        "warn of keys": (
            "SELECT ml_rag._warn_of_unknown_keys(s, $2 -> 'filters')"
            " FROM jsonb_populate_recordset(NULL::ml_rag.store, $1) AS s WHERE $2 ? 'filters'",
            *("jsonb", "jsonb"),
        ),
    }
)
#: the planner's cost of reading rows that pass a filter, up to which they are not counted first: they are 1,000 or
#: fewer, even if its estimate of their number is wrong
_CHEAP = 100
#: characters of the values of a filter up to which it is estimated how many rows of a partitioned table pass: EXPLAIN
#: writes them once for each partition
_LONGEST_EXPLAINED = 10_000
#: rows that an index is asked for where all are wanted
_ALL = 2_147_483_647
#: rows that pass, the keys of which are looked up in an index by words: more take longer than scores of all
_MOST = 10_000


class Filtered(NamedTuple):
    """What was found out of a store."""

    condition: str
    arguments: list[str]
    #: of all
    rows: float
    #: the most rows that are compared one by one
    compared: int
    #: how many pass, by an estimate if partitions are read in no time; None = too many, or not known
    n: int | None = None
    #: the text of a tid[]; None = too many pass, or the rows have no row keys
    row_keys: str | None = None
    #: how many of the best rows by words probably include enough that pass
    likely: int | None = None
    #: whether an arm by words finds out itself which pass, and how many
    is_uncounted: bool = False

    @property
    def is_narrow(self) -> bool:
        """Whether the rows that pass are so few that they are compared one by one.

        That is exact, and an index has to go through as many times more rows as the filter leaves out."""
        return self.n is not None and self.n <= self.compared


class Lookup(NamedTuple):
    """What an index by words is asked for."""

    candidates: int
    #: the rows that alone are scored, the text of a tid[]; None = all
    row_keys: str | None = None
    #: whether the number is an estimate that may fall short
    is_likely: bool = False
    #: where only rows that pass the filter are scored, though no row keys tell which these are: how many at most
    most: int | None = None


#: conditions and arguments of short options, as applications repeat them: (store, options, parameter) ->
_kept: dict[tuple[Store, str, str], tuple[str, list[str]]] = {}


class Filters:
    """The options of a call that leave rows out, as conditions on the rows of its stores."""

    def __init__(self, plpy: Any, options: str) -> None:
        self._plpy, self._options = plpy, options
        self._made: dict[tuple[str | None, ...], tuple[str, list[str]]] = {}

    def compiled(self, store: Store, parameter: str) -> tuple[str, list[str]]:
        """Condition and arguments of ml_rag.filter, made once for stores with the same columns."""
        key = store, self._options, parameter
        if key in _kept:
            return _kept[key]
        # without that column the name of the store can stand for it
        name = store.vector_store if 'document_name"' in self._options else None
        roles = store.segment, store.document_name, store.document_id, store.segment_number, store.metadata
        columns = _run(self._plpy, "columns", store.relation)[0]["columns"] if self._made else None
        same = parameter, name, store.segment_embedding, *roles
        if (*same, columns) not in self._made:
            found = _run(self._plpy, "filter", json.dumps(record(store)), self._options, parameter)[0]
            columns = found["columns"]
            self._made[*same, columns] = found["condition"], found["arguments"]
        made = self._made[*same, columns]
        if len(self._options) <= LONGEST:
            if len(_kept) >= KEPT:
                _kept.clear()
            _kept[key] = made
        return made


def of_store(
    plpy: Any, store: Store, filters: Filters, stage: str, n: int, *, is_estimated: bool, rows: float | None
) -> Filtered:
    """``stage``: search, or keyword where all arms are by words; ``n``: candidates; ``is_estimated``: whether it may be
    estimated how many pass; ``rows``: of a partitioned store, none of whose rows is on another server."""
    condition, arguments = filters.compiled(store, "$3")
    is_counted = store.is_table or rows is not None
    if rows is None:
        rows = rows_of(plpy, store)
    made = Filtered(condition, arguments, rows, _compared_rows(rows, n))
    if not is_counted or not made.condition:
        return made
    estimated = None
    if is_estimated and (store.is_table or sum(map(len, arguments)) <= _LONGEST_EXPLAINED):
        counted = made.condition
        if stage == "search":  # a search by words finds rows without a vector, too
            counted = f" AND t.{identifier(store.segment_embedding)} IS NOT NULL{counted}"
        row = _run(plpy, "estimated", json.dumps(record(store)), counted, made.arguments)[0]
        estimated = row["n"]
        if not store.is_table and row["cost"] <= _CHEAP:
            return made._replace(n=round(estimated))
        if stage == "keyword" and estimated is not None:
            finding = min(0.5 * rows, math.inf if row["is_scanned"] else 18 * estimated)
            made = made._replace(likely=_likely_rows(rows, n, estimated, finding))
    if stage == "keyword":  # the rows that pass are read once, with their keys in the index
        return made._replace(is_uncounted=made.likely is None)
    # counted where few pass, or it is not known
    if not (stage == "search" and estimated is not None and estimated > made.compared):
        row = _run(plpy, "passing", json.dumps(record(store)), made.condition, made.arguments)[0]
        made = made._replace(n=row["n"], row_keys=row["row_keys"] if store.is_table else None)
    return made


def rows_of(plpy: Any, store: Store) -> float:
    """How many rows the table of a store has, by its last ANALYZE; 0 = not known."""
    return float(_run(plpy, "rows", store.relation)[0]["n"])


def _compared_rows(rows: float, n: int) -> int:
    """Up to how many rows that pass a filter are compared one by one for the ``n`` nearest of them, and not found by an
    approximate index.

    Measured over 100 000 rows of 384 dimensions: comparing takes 4 us a row, and an index 31 us for each row that it
    goes past, which are (n + 8) / (the share of rows that pass). Below that number an index would also miss some: 5 %
    of ten where 2 % pass. ``rows``: of the table; 0 = not known.
    """
    return min(10_000, round(math.sqrt(8 * (n + 8) * rows))) if rows > 0 else 10_000


def _likely_rows(rows: float, n: int, passing: float, finding: float) -> int | None:
    """Among how many of the best rows by words there probably are ``n`` that pass a filter, with a reserve; None where
    it takes less to look up all that pass. ``passing``: how many of all ``rows`` do; ``finding``: microseconds to find
    these, 0 = they are known. Else their number is an estimate, which is rather too low and needs less of a reserve.

    Measured: 15 us for one of the best rows, 9 for one that passes, and to find those 0.5 for each row that is read, or
    18 for each that an index of the filter's column finds.
    """
    if rows <= 0:
        return None
    reserve = (1 if finding else 3) * math.sqrt(n)
    likely = 50 + (n + reserve) * rows / max(passing, 1)
    return round(likely) if 15 * likely < 9 * passing + finding else None


def warn(plpy: Any, sources: list[Source], options: str) -> None:
    """Say which keys of filters may be misspelt."""
    records = json.dumps([record(source.store) for source in sources])
    # what ml_rag._filter_node makes of a key that names nothing, and of little else
    if any(re.search(r"\((true|false)\)", source.condition) for source in sources):
        _run(plpy, "warn", records, options)
    if re.search('"(ne|nin|not|exists)"|null', options):
        _run(plpy, "warn of keys", records, options)


def first_lookup(store: Store, filtered: Filtered | None, n: int) -> Lookup:
    """How many rows an index by words is asked for: those beyond n may not pass the filters."""
    if filtered is None or not filtered.condition:
        return Lookup(n)
    likely = filtered.likely
    if filtered.n is not None and not store.is_secured:
        # where many rows pass, n of them are among the best of all, and looking up all that pass would take longer
        likely = _likely_rows(filtered.rows, n, filtered.n, 0)
    if likely is not None:
        return Lookup(likely, is_likely=True)
    if filtered.is_uncounted:
        return _passing(store, n, _MOST if store.is_secured else _looked_up(filtered.rows, n))
    return Lookup(4 * n + 100) if filtered.n is None else _among(store, filtered, n)


def lookup_beyond(filtered: Filtered, lookup: Lookup, n: int) -> Lookup:
    """Where more rows pass than are looked up."""
    likely = None
    if lookup.most is not None and lookup.most < _MOST:
        likely = _likely_rows(filtered.rows, n, lookup.most + 1, 0)
    return Lookup(4 * n + 100) if likely is None else Lookup(likely, is_likely=True)


def further_lookup(store: Store, filtered: Filtered | None, lookup: Lookup, n: int) -> Lookup | None:
    """Where too few of them pass; None = a further look would find no more."""
    if filtered is None or not filtered.condition:
        # candidates that are not in the table: it was written to with triggers off, and a second look is enough
        return lookup._replace(candidates=4 * n + 100) if lookup.candidates <= n else None
    if lookup.is_likely:
        return _among(store, filtered, n)
    return lookup._replace(candidates=10 * lookup.candidates if lookup.candidates < 10_000 else _ALL)


def _looked_up(rows: float, n: int) -> int:
    """Up to how many rows that pass are looked up; of more, it takes less to look at the best rows. It is the
    inequality of ``_likely_rows``, solved for ``passing``."""
    if rows <= 0:
        return _MOST
    return min(_MOST, int((750 + math.sqrt(750**2 + 540 * (n + 3 * math.sqrt(n)) * rows)) / 18))


def _among(store: Store, filtered: Filtered, n: int) -> Lookup:
    """Of rows that all pass, the best n are enough; of rows that are secured, statistics may be of those that are seen,
    and then all are scored."""
    if filtered.row_keys is None:
        return _passing(store, n, _MOST)
    return Lookup(4 * n + 100 if store.is_secured else n, filtered.row_keys)


def _passing(store: Store, n: int, most: int) -> Lookup:
    return Lookup(4 * n + 100 if store.is_secured else n, most=most)
