"""Which rows of a store pass the options that leave rows out, and how that is used."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from ml_rag.backend.retrieval.request import KEPT, LONGEST
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
    #: whether only rows that pass the filter are scored, though no row keys tell which these are
    is_passing: bool = False


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
    """``stage``: search or keyword; ``n``: candidates; ``is_estimated``: whether it may be estimated how many pass;
    ``rows``: of a partitioned store, none of whose rows is on another server."""
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
    # counted where few pass, or it is not known
    if made.likely is None and not (stage == "search" and estimated is not None and estimated > made.compared):
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


def warn(plpy: Any, stores: list[Store], options: str) -> None:
    """Say which keys of filters may be misspelt."""
    records = json.dumps([record(store) for store in stores])
    if not all(store.has_json for store in stores):
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
    if filtered.n is not None and not store.is_table:
        return _passing(store, n)
    return _among(store, filtered.row_keys, n)


def further_lookup(plpy: Any, store: Store, filtered: Filtered | None, lookup: Lookup, n: int) -> Lookup | None:
    """Where too few of them pass; None = a further look would find no more."""
    if filtered is None or not filtered.condition:
        # candidates that are not in the table: it was written to with triggers off, and a second look is enough
        return lookup._replace(candidates=4 * n + 100) if lookup.candidates <= n else None
    if lookup.is_likely and not store.is_table:
        return _passing(store, n)
    if lookup.is_likely:
        row_keys = filtered.row_keys
        if row_keys is None:
            row_keys = passing(plpy, store, filtered)
        return _among(store, row_keys, n)
    return lookup._replace(candidates=10 * lookup.candidates if lookup.candidates < 10_000 else _ALL)


def _among(store: Store, row_keys: str | None, n: int) -> Lookup:
    """Of rows that all pass, the best n are enough; of rows that are secured, statistics may be of those that are seen,
    and then all are scored."""
    return Lookup(n if row_keys is not None and not store.is_secured else 4 * n + 100, row_keys)


def _passing(store: Store, n: int) -> Lookup:
    return Lookup(4 * n + 100 if store.is_secured else n, is_passing=True)


def passing(plpy: Any, store: Store, filtered: Filtered) -> str | None:
    """The row keys of rows that pass; None = too many."""
    found = _run(plpy, "passing", json.dumps(record(store)), filtered.condition, filtered.arguments)
    keys: str | None = found[0]["row_keys"]
    return keys
