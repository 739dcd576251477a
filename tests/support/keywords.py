"""Keyword search in tests: calls, and BM25 by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.cluster import Connection
from support.stores import create_store, ident, insert
from support.stores import search as search_rows

#: option n_citations
MOST_CITED = 100


#: what a role gets of the word index of a table, whatever it says of the index and asks for: public.keyword_scores
SCORES = """
CREATE FUNCTION public.keyword_scores(store oid, segment name, key name[], terms text[], weights integer[], n integer,
  row_keys text DEFAULT NULL, OUT keys text[], OUT scores float8[])
LANGUAGE plpython3u STABLE SET search_path = pg_catalog, ml_rag, pg_temp SET plan_cache_mode = force_generic_plan AS $$
plpy.execute("SELECT ml_rag._load_backend()")
words = GD["ml_rag"].keyword()
own = words.readable(plpy, [{"store": store, "segment": segment, "key": key}])
try:
    return words.find(plpy, own[0], terms, weights, n, row_keys) if own else ([], [])
except words.OtherIndex:
    return [], []
$$
"""


def keyword_store(
    owner: Connection, texts: Iterable[str | None] = (), name: str = "docs", options: str | None = None
) -> None:
    """A store with a keyword index; text i is segment 1 of document i + 1."""
    create_store(owner, name, rows=rows(texts))
    enable(owner, name, options)


def rows(texts: Iterable[str | None], first: int = 1) -> list[Any]:
    return [(f"d{i}", i, 1, text, (1.0, 0.0, 0.0)) for i, text in enumerate(texts, first)]


def add(connection: Connection, texts: Iterable[str | None], first: int, name: str = "docs") -> None:
    insert(connection, name, rows(texts, first))


def enable(connection: Connection, name: str = "docs", options: str | None = None) -> None:
    connection.execute("SELECT ml_rag.enable_keyword_search(%s, %s)", (name, options))


def search(connection: Connection, query: str, n: int = 10, name: str | None = "docs", **options: Any) -> list[Any]:
    """(document_id, segment_number, keyword_score) of the hits, best first. None = all stores."""
    options |= {"semantic_search": False, "keyword_search": True}
    if name is not None:
        options["vector_store"] = [name]
    if n <= MOST_CITED:
        try:
            with connection.transaction():
                found = search_rows(connection, query, {"n_citations": n, **options})
        except psycopg.errors.NoDataFound as e:
            if "no segment found" not in str(e):
                raise
            return []
        return [(row[3], row[4], row[8]) for row in found]
    # more than a call cites
    return connection.execute(
        "SELECT h.document_id, h.segment_number, h.keyword_score"
        " FROM ml_rag._request(%s, ml_rag._parse_rag_options(%s)) AS r, jsonb_populate_record(r, jsonb_build_object("
        "'n_citations', 1000000, 'arms', ARRAY[to_jsonb(r.arms[1]) || '{\"candidates\": 1000000}']"
        ")) AS more, LATERAL (SELECT (ml_rag._retrieve(more)).retrieval) AS f, unnest((f.retrieval).hits) AS h"
        " LIMIT %s",
        (query, json.dumps(options), n),
    ).fetchall()


def found(connection: Connection, query: str = "fox", **kwargs: Any) -> list[int]:
    """The documents that have a word of the query."""
    return sorted(row[0] for row in search(connection, query, 100_000, **kwargs))


def tokens(connection: Connection, text: str, configuration: str = "english") -> dict[str, int]:
    found = connection.execute("SELECT * FROM ml_rag.keyword_tokens(%s, %s)", (configuration, text)).fetchall()
    return dict(found)


def by_hand(
    documents: dict[Any, Counter[str]], query: dict[str, int], k1: float = 1.2, b: float = 0.75
) -> dict[Any, float]:
    """Lucene's BM25 of every document that has one of the words."""
    lengths = {key: document.total() for key, document in documents.items()}
    average = sum(lengths.values()) / max(len(documents), 1)
    scores: dict[Any, float] = {}
    for term, weight in query.items():
        df = sum(term in document for document in documents.values())
        idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
        for key, document in documents.items():
            if tf := document[term]:
                scores[key] = scores.get(key, 0) + weight * idf * tf / (tf + k1 * (1 - b + b * lengths[key] / average))
    return scores


#: configuration and text -> its tokens, of configurations that no test alters: many tests read the same texts
_known: dict[tuple[str, str], Counter[str]] = {}
_BUILT_IN = ("english", "simple", "german", "french")


def documents(connection: Connection, name: str = "docs", configuration: str = "english") -> dict[Any, Counter[str]]:
    """The tokens of every row that the connection can see, straight from the table."""
    known = _known if configuration in _BUILT_IN else {}
    rows = connection.execute(
        sql.SQL("SELECT document_id, segment_number, segment::text FROM {} WHERE segment IS NOT NULL").format(
            ident(name)
        )
    ).fetchall()
    new = list({text for _, _, text in rows if (configuration, text) not in known})
    known.update({(configuration, text): Counter() for text in new})
    for place, token, n in connection.execute(
        "SELECT t.place, k.token, k.n FROM unnest(%s::text[]) WITH ORDINALITY AS t (text, place),"
        " LATERAL ml_rag.keyword_tokens(%s, t.text) AS k",
        (new, configuration),
    ):
        known[configuration, new[place - 1]][token] = n
    return {(document_id, number): known[configuration, text] for document_id, number, text in rows}


def assert_exact(
    connection: Connection, query: str, name: str = "docs", configuration: str = "english", **how: float
) -> None:
    """That the index answers what BM25 over the table as it is now says, down to the last row, ties by name."""
    found = assert_scores(connection, query, name, configuration, **how)
    assert found == sorted(found, key=lambda row: (-row[2], f"d{row[0]}", row[0], row[1]))


def assert_scores(
    connection: Connection, query: str, name: str = "docs", configuration: str = "english", **how: float
) -> list[Any]:
    """The same whatever the documents are called; what was found."""
    expected = by_hand(documents(connection, name, configuration), tokens(connection, query, configuration), **how)
    found = search(connection, query, 1_000_000, name)
    assert {(d, s): pytest.approx(score, rel=1e-9, abs=1e-12) for d, s, score in found} == expected
    return found


def runs(owner: Connection, name: str = "docs") -> list[tuple[int, int]]:
    """(rows, deleted rows) of each run, the largest first."""
    return owner.execute(
        "SELECT rows, gone_rows FROM ml_rag_internal.keyword_run WHERE store = %s::regclass ORDER BY 1 DESC, 2", (name,)
    ).fetchall()


def waiting(owner: Connection, name: str = "docs") -> tuple[int, int]:
    """How many new and how many deleted rows wait to be folded."""
    row = owner.execute(
        "SELECT (SELECT count(*) FROM ml_rag_internal.keyword_new WHERE store = %s::regclass),"
        " (SELECT count(*) FROM ml_rag_internal.keyword_gone WHERE store = %s::regclass)",
        (name, name),
    ).fetchone()
    assert row is not None
    return row[0], row[1]
