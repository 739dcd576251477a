"""Which rows of a store pass the options that leave rows out, and how that is used."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from ml_rag.backend.retrieval.stores import Store, record
from ml_rag.backend.statements import Statements

_run = Statements(
    {
        "filter": (
            "SELECT f.condition, f.arguments, f.row_keys::text AS row_keys, cardinality(f.row_keys) AS n, f.likely,"
            " ml_rag._compared_rows((s.store).relation, $4) AS compared"
            " FROM (SELECT jsonb_populate_record(NULL::ml_rag.store, $1) AS store) AS s"
            " CROSS JOIN LATERAL ml_rag._row_filter(s.store, $2, $3, $4, $5) AS f",
            *("jsonb", "jsonb", "text", "int4", "bool"),
        ),
        "condition": (
            "SELECT f.condition FROM ml_rag.filter(jsonb_populate_record(NULL::ml_rag.store, $1), $2, $3) AS f",
            *("jsonb", "jsonb", "text"),
        ),
        "likely": ("SELECT ml_rag._likely_rows($1, $2, $3, true) AS n", "oid", "int4", "float8"),
        "passing": (
            "SELECT ml_rag._passing_rows(jsonb_populate_record(NULL::ml_rag.store, $1), $2, $3)::text AS row_keys",
            *("jsonb", "text", "text[]"),
        ),
        "warn": (
            "SELECT ml_rag._warn_of_filters("
            "ARRAY(SELECT s FROM jsonb_populate_recordset(NULL::ml_rag.store, $1) AS s), $2)",
            *("jsonb", "jsonb"),
        ),
    }
)
#: rows that an index is asked for where all are wanted
_ALL = 2_147_483_647


@dataclass(slots=True)
class Filtered:
    """What ml_rag._row_filter has found out of a store."""

    condition: str
    arguments: list[str]
    #: the text of a tid[]; None = too many pass
    row_keys: str | None
    n: int | None
    #: how many of the best rows by words probably include enough that pass
    likely: int | None
    #: the most rows that are compared one by one
    compared: int

    @property
    def is_narrow(self) -> bool:
        """Whether the rows that pass are so few that they are compared one by one.

        That is exact, and an index has to go through as many times more rows as the filter leaves out."""
        return self.n is not None and self.n <= self.compared


@dataclass(frozen=True, slots=True)
class Lookup:
    """What an index by words is asked for."""

    candidates: int
    #: the rows that alone are scored, the text of a tid[]; None = all
    row_keys: str | None = None
    #: whether the number is an estimate that may fall short
    is_likely: bool = False


def of_store(plpy: Any, store: Store, options: str, stage: str, n: int, *, is_estimated: bool) -> Filtered:
    """``stage``: search or keyword; ``n``: candidates; ``is_estimated``: whether a sample may say how many pass."""
    return Filtered(**_run(plpy, "filter", json.dumps(record(store)), options, stage, n, is_estimated)[0])


def condition(plpy: Any, store: Store, options: str, parameter: str) -> str:
    """The condition in terms of another parameter."""
    found: str = _run(plpy, "condition", json.dumps(record(store)), options, parameter)[0]["condition"]
    return found


def warn(plpy: Any, stores: list[Store], options: str) -> None:
    """Say which keys of filters may be misspelt."""
    _run(plpy, "warn", json.dumps([record(store) for store in stores]), options)


def first_lookup(plpy: Any, store: Store, filtered: Filtered | None, n: int) -> Lookup:
    """How many rows an index by words is asked for: those beyond n may not pass the filters."""
    if filtered is None or not filtered.condition:
        return Lookup(n)
    likely = filtered.likely
    if filtered.n is not None and not store.is_secured:
        # where many rows pass, n of them are among the best of all, and looking up all that pass would take longer
        likely = _run(plpy, "likely", store.relation, n, filtered.n)[0]["n"]
    if likely is not None:
        return Lookup(likely, is_likely=True)
    return _among(store, filtered.row_keys, n)


def further_lookup(plpy: Any, store: Store, filtered: Filtered | None, lookup: Lookup, n: int) -> Lookup | None:
    """Where too few of them pass; None = a further look would find no more."""
    if filtered is None or not filtered.condition:
        # candidates that are not in the table: it was written to with triggers off, and a second look is enough
        return replace(lookup, candidates=4 * n + 100) if lookup.candidates <= n else None
    if lookup.is_likely:
        row_keys = filtered.row_keys
        if row_keys is None and store.is_table:
            row_keys = passing(plpy, store, filtered)
        return _among(store, row_keys, n)
    return replace(lookup, candidates=10 * lookup.candidates if lookup.candidates < 10_000 else _ALL)


def _among(store: Store, row_keys: str | None, n: int) -> Lookup:
    """Of rows that all pass, the best n are enough; of rows that are secured, statistics may be of those that are seen,
    and then all are scored."""
    return Lookup(n if row_keys is not None and not store.is_secured else 4 * n + 100, row_keys)


def passing(plpy: Any, store: Store, filtered: Filtered) -> str | None:
    """The row keys of rows that pass; None = too many."""
    found = _run(plpy, "passing", json.dumps(record(store)), filtered.condition, filtered.arguments)
    keys: str | None = found[0]["row_keys"]
    return keys
