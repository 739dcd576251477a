"""An arm of a store with shards. Each shard runs it by itself, as it runs those of its own searches, and so do the
partitions that are here; the best of all are what the arm finds. Words are scored by what all parts have together."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from ml_rag.backend.retrieval import request as requests
from ml_rag.backend.retrieval.shape import Arm, Source
from ml_rag.backend.retrieval.stores import record
from ml_rag.backend.statements import Statements

_run = Statements(
    {
        "asked": (
            "SELECT to_jsonb(ml_rag._asked_shards(jsonb_populate_record(NULL::ml_rag.store, $1), $2))::text AS shards",
            *("jsonb", "bool"),
        ),
        "here": (
            "SELECT to_jsonb(ARRAY(SELECT ml_rag._relation_name(l)"
            " FROM unnest(ml_rag._leaves(jsonb_populate_record(NULL::ml_rag.store, $1))) AS l))::text AS leaves",
            "jsonb",
        ),
        "settings": (
            "SELECT jsonb_object_agg(k, current_setting(k))::text AS settings"
            " FROM unnest('{TimeZone,DateStyle,IntervalStyle}'::text[]) AS k",
        ),
        "count": (
            "SELECT a.answers[1]::text AS statistics, a.failure::text AS failure"
            " FROM ml_rag._ask_arm(jsonb_populate_record(NULL::ml_rag.store, $1),"
            " ARRAY(SELECT s::regclass FROM jsonb_array_elements_text($2) AS s), $3, $4, $5) AS a",
            *("jsonb", "jsonb", "jsonb", "int4", "jsonb"),
        ),
        "ask": (
            # any role may have written the hits: they stay a text, however deep, with all digits of their numbers
            "SELECT a.failure::text AS failure, a.shards,"
            " (SELECT bool_or(x.answer ? 'version') FROM unnest(a.answers) AS x (answer)) AS is_other,"
            # of all shards as many as the arm brings, and those that are as good as the last of them
            " (SELECT coalesce(to_jsonb(array_agg(b.hit || '{\"row_key\": null}' ORDER BY b.shard, b.place)), '[]')"
            "::text FROM ("
            "SELECT h.hit, x.place AS shard, h.place, rank() OVER (ORDER BY $7 * (h.hit ->> $6)::float8) AS rank"
            " FROM unnest(a.answers) WITH ORDINALITY AS x (answer, place), jsonb_array_elements("
            "CASE jsonb_typeof(x.answer -> 'hits') WHEN 'array' THEN x.answer -> 'hits' END)"
            " WITH ORDINALITY AS h (hit, place)) AS b WHERE b.rank <= $4) AS hits,"
            " ARRAY(SELECT (x.answer -> 'facts')::text FROM unnest(a.answers) AS x (answer)) AS facts"
            " FROM ml_rag._ask_arm(jsonb_populate_record(NULL::ml_rag.store, $1),"
            " ARRAY(SELECT s::regclass FROM jsonb_array_elements_text($2) AS s), "
            # of the options those that say which rows count, and settings of an index
            "jsonb_set($3, '{request,options}',"
            " $5 - ARRAY(SELECT k FROM jsonb_object_keys($5) AS k WHERE k <> ALL ($8))),"
            " $4) AS a",
            *("jsonb", "jsonb", "jsonb", "int4", "jsonb", "text", "int4", "text[]"),
        ),
    }
)
_COLUMNS = ("segment_embedding", "segment", "document_name", "document_id", "segment_number", "metadata")
_INDEX = ("segment", "key", "configuration", "k1", "b", "statistics")

#: characters of the facts of a shard, and objects and lists in them
_MOST_FACTS, _MOST_VALUES = 20_000, 100


class Silent(Exception):
    """A shard does not answer. Its one argument is the failure of the store."""


class Asking:
    """One arm in one store. ``search``: the Search that this is a part of."""

    def __init__(
        self, search: Any, context: Any, source: Source, missing: list[str] | None, arm: Arm, asked: requests.AskedArm
    ) -> None:
        self._search, self._context, self._plpy = search, context, context.plpy
        self._source, self._arm, self._asked = source, arm, asked
        self._store, self._missing = record(source.store) | {"missing": missing}, missing or []

    def hits(
        self, question: str, vector: str | None, own: str | None, column: str | None, *, is_keyword: bool
    ) -> str | None:
        """The best hits of all parts as JSON text; None = the store is read as a whole. ``own``, ``column``: what the
        arm compares, where that is not the vector of the question and the store's own."""
        plpy, search = self._plpy, self._search
        # as it is now: the shards have that of now
        index = search.index(self._source.store, is_fresh=True) if is_keyword else None
        shards = _run(plpy, "asked", json.dumps(self._store), is_keyword)[0]["shards"]
        if shards is None:
            return None
        here = self._store | {"missing": self._missing + json.loads(shards)}
        leaves = json.loads(_run(plpy, "here", json.dumps(here))[0]["leaves"])
        arm = json.loads(self._asked.record) | {"query_embedding": own, "candidates": self._arm.candidates}
        if not is_keyword:
            arm["query"] = None
        request: dict[str, Any] = {  # no more of the question than the arm needs
            "columns": {name: self._store[name] for name in _COLUMNS if self._store[name] is not None},
            "settings": json.loads(_run(plpy, "settings")[0]["settings"]),
            "request": {
                "question": question if is_keyword else None,
                "distance_metric": search.shape.metric.name,
                "query_embedding": vector,
                "explain": search.request.explains,
            },
            "arm": arm,
            "embedding": column,
            "metadata_key": self._source.store.key,
        }
        corpus = None
        if index is not None:
            terms, _ = search.tokens(index, self._asked.text(question))
            if not terms:
                return "[]"
            request |= {name: index[name] for name in _INDEX} | {"terms": terms}
            corpus = self._statistics(index, terms, leaves, shards, request)
            request["corpus"] = corpus
            self._context.after_pause()
        hits = "[]"
        facts: dict[str, Any] = {}
        if leaves:
            inner = self._source._replace(leaves=tuple(leaves))
            hits, facts = search.here(inner, self._arm, self._asked, corpus)
        unit = self._arm.unit
        value = {"score": "keyword_score", "own": "score"}.get(unit.column, unit.column)
        request |= {"call": "keyword" if is_keyword else "semantic"}
        found = _run(
            *(plpy, "ask", json.dumps(self._store), shards, json.dumps(request), self._arm.candidates),
            *(search.request.options, value, -1 if unit.is_descending else 1, [*requests.FILTERS, "index_options"]),
        )[0]
        if found["failure"] is not None:
            raise Silent(json.loads(found["failure"]))
        if found["is_other"]:
            return None  # a shard has another version: its rows are sorted there, and read here
        told = {name: _facts(text) for name, text in zip(found["shards"], found["facts"], strict=True)}
        facts |= {"shards": told, "plan": "shards", "limit": self._arm.candidates}
        search._tell(self._arm, self._source.store, **facts)
        return f"[{', '.join(text[1:-1] for text in (hits, found['hits']) if text != '[]')}]"

    def _statistics(
        self, index: dict[str, Any], terms: list[str], leaves: list[str], shards: str, request: dict[str, Any]
    ) -> Any:
        """Rows, tokens, and in how many rows each word stands, of all parts."""
        here = None
        if leaves:
            own = self._context.keyword().statistics(self._plpy, index["store"], index["segment"], index["key"], terms)
            here = json.dumps(own)
        found = _run(
            *(self._plpy, "count", json.dumps(self._store), shards),
            *(json.dumps(request | {"call": "statistics"}), len(terms), here),
        )
        if found[0]["failure"] is not None:
            raise Silent(json.loads(found[0]["failure"]))
        return json.loads(found[0]["statistics"])


def _facts(text: str | None) -> Any:
    """What a shard says of its search for option explain; nothing of what no search says."""
    if text is None or len(text) > _MOST_FACTS or text.count("{") + text.count("[") > _MOST_VALUES:
        return None
    return json.loads(
        text,
        parse_int=lambda digits: int(digits) if len(digits) < 20 else None,
        parse_float=lambda digits: float(digits) if isfinite(float(digits)) else None,
    )
