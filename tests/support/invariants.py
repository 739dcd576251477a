"""What must hold after every fault: nothing lost, nothing twice, nothing half there, nothing left behind."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from psycopg import sql

from ml_rag.backend import runs
from support.cluster import Connection, value_of
from support.keywords import assert_scores, documents
from support.processes import wait_until
from support.stores import answer, ident
from support.supervised_server import SupervisedServer

#: questions with the options they are asked with: each way to search, with and without generation
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("alpha topic3 shared", {"n_citations": 5}),
    ("topic7 word5", {"n_citations": 5, "skip_generate": True, "retrieval_options": {"segment_overlap": 1}}),
    ("topic11 item2", {"n_citations": 5, "keyword_search": True, "semantic_search": False, "skip_generate": True}),
    ("topic2 shared item3", {"n_citations": 7, "keyword_search": True}),
]


@dataclass(frozen=True)
class Answers:
    """What a store answers while nothing is wrong, and the segments it holds."""

    #: document -> its segments in order
    documents: dict[str, list[str]]
    answers: list[Any]


def ask_all(connection: Connection, store: str) -> list[Any]:
    """The answers to all questions, from one store alone."""
    return [answer(connection, query, {**options, "vector_store": [store]}) for query, options in QUESTIONS]


def documents_of(connection: Connection, store: str) -> dict[str, list[str]]:
    """Segments by document, in their order. Fails where an order is not 1 … n or a document has two ids."""
    query = sql.SQL(
        "SELECT document_name, array_agg(segment ORDER BY segment_number), array_agg(segment_number ORDER BY"
        " segment_number), count(DISTINCT document_id), count(DISTINCT metadata #>> '{{source,sha256}}')"
        " FROM {} GROUP BY document_name"
    ).format(ident(store))
    found = {}
    for name, segments, numbers, ids, versions in connection.execute(query):
        assert numbers == list(range(1, len(numbers) + 1)), f"{name} has the segments {numbers}"
        assert (ids, versions) == (1, 1), f"{name} has {ids} ids, is of {versions} versions"
        found[name] = segments
    twice = sql.SQL("SELECT count(DISTINCT document_name) = count(DISTINCT document_id) FROM {}").format(ident(store))
    assert connection.execute(twice).fetchone() == (True,), "two documents have one id"
    return found


def snapshot(connection: Connection, store: str = "public.docs") -> Answers:
    return Answers(documents_of(connection, store), ask_all(connection, store))


def assert_documents(connection: Connection, folder: Path, store: str = "public.docs") -> None:
    """The store has each file of the folder, as it is now, and nothing else."""
    query = sql.SQL("SELECT DISTINCT document_name, metadata #>> '{{source,sha256}}' FROM {}").format(ident(store))
    expected = {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}
    assert dict(connection.execute(query).fetchall()) == expected


def assert_keyword_index(connection: Connection, store: str = "public.docs") -> None:
    """The keyword index has the rows of its table, no more; counts and scores are those of one that is made anew."""
    one = "SELECT count(*), count(DISTINCT key) FROM ml_rag_internal.keyword_row WHERE store = %s::regclass"
    own = sql.SQL("SELECT count(*), count(*) FROM {} WHERE segment IS NOT NULL").format(ident(store))
    assert connection.execute(one, (store,)).fetchone() == connection.execute(own).fetchone()
    assert orphans(connection) == 0
    for query, _ in QUESTIONS:
        assert_scores(connection, query, store, _configuration(connection, store))
    terms = set().union(*documents(connection, store, _configuration(connection, store)).values())
    assert _counts(connection, store, terms) == _fresh_counts(connection, store, terms)


def orphans(connection: Connection) -> int:
    """Rows of keyword indexes whose store has none, or is no table."""
    tables = ("row", "new", "gone", "run", "posting")
    one = "SELECT count(*) AS n FROM ml_rag_internal.keyword_{} AS i WHERE NOT EXISTS ("
    one += "SELECT FROM ml_rag_internal.keyword_store AS s"
    one += " JOIN pg_class AS c ON c.oid = s.store WHERE s.store = i.store)"
    query = "SELECT sum(n) FROM (" + " UNION ALL ".join(one.format(t) for t in tables) + ") AS u"
    return int(value_of(connection, query))


def _configuration(connection: Connection, store: str) -> str:
    query = "SELECT configuration FROM ml_rag_internal.keyword_store WHERE store = %s::regclass"
    row = connection.execute(query, (store,)).fetchone()
    assert row is not None, "the keyword index is gone"
    return str(row[0]).removeprefix("pg_catalog.")


def _counts(connection: Connection, store: str, terms: set[str]) -> dict[str, Any]:
    """Rows, tokens, and in how many rows each term is: in runs less what is noted or waits as deleted, and waiting."""
    where = "WHERE store = %s::regclass"
    gone = {
        row[0]: row[1]
        for row in connection.execute(f"SELECT id, length FROM ml_rag_internal.keyword_gone {where}", (store,))
    }
    new = connection.execute(
        "SELECT id, length, coalesce(tsvector_to_array(words), ARRAY(SELECT jsonb_object_keys(tokens)))"
        f" FROM ml_rag_internal.keyword_new {where}",
        (store,),
    ).fetchall()
    rows = len(new) - len(gone)
    total = sum(length for _, length, _ in new) - sum(gone.values())
    df: Counter[str] = Counter(term for id_, _, tokens in new if id_ not in gone for term in tokens)
    found = connection.execute(
        "SELECT run, rows - gone_rows, total - gone_total, first_id, ids, gone, rows"
        f" FROM ml_rag_internal.keyword_run {where}",
        (store,),
    ).fetchall()
    alive: dict[int, Any] = {}
    for run, own_rows, own_total, first, ids, noted, size in found:
        rows, total = rows + own_rows, total + own_total
        dead = runs.bits(noted, size)
        dead[runs.slots_of(runs.unpack(ids), first, np.array(sorted(gone), np.int64))] = True
        alive[run] = ~dead
    for run, term, postings in connection.execute(
        f"SELECT run, term, postings FROM ml_rag_internal.keyword_posting {where}", (store,)
    ):
        df[term] += int(np.count_nonzero(alive[run][runs.postings_of(postings)[0]]))
    return {"": (rows, total)} | {term: n for term, n in df.items() if n and term in terms}


def _fresh_counts(connection: Connection, store: str, terms: set[str]) -> dict[str, Any]:
    names = {"old": ident(store), "new": sql.Identifier("fresh_copy")}
    connection.execute(sql.SQL("CREATE TABLE {new} (LIKE {old} INCLUDING ALL)").format(**names))
    connection.execute(sql.SQL("INSERT INTO {new} SELECT * FROM {old}").format(**names))
    options = json.dumps({"text_search_configuration": _configuration(connection, store)})
    connection.execute("SELECT ml_rag.enable_keyword_search('fresh_copy', %s)", (options,))
    counts = _counts(connection, "fresh_copy", terms)
    connection.execute("DROP TABLE fresh_copy")
    return counts


def assert_files_are_sound(connection: Connection, store: str = "public.docs") -> None:
    """What amcheck says of the store and the keyword tables, heap and b-tree indexes; the hnsw index finds all rows."""
    connection.execute("CREATE EXTENSION IF NOT EXISTS amcheck")
    relations = "SELECT c.oid::regclass::text, c.relkind FROM pg_class AS c LEFT JOIN pg_index AS x ON c.oid ="
    relations += " x.indexrelid JOIN pg_am AS m ON m.oid = c.relam WHERE coalesce(x.indrelid, c.oid) IN (SELECT"
    relations += (
        " %s::regclass UNION SELECT t.oid FROM pg_class AS t WHERE t.relnamespace::regnamespace::text ~ '^ml_rag'"
    )
    relations += " AND t.relkind = 'r') AND m.amname IN ('heap', 'btree')"
    for name, kind in connection.execute(relations, (store,)).fetchall():
        if kind == "r":
            assert connection.execute("SELECT * FROM verify_heapam(%s)", (name,)).fetchall() == []
        else:
            connection.execute("SELECT bt_index_check(%s, true)", (name,))
    connection.execute(
        "SET enable_seqscan = off; SET hnsw.ef_search = 1000; SET hnsw.iterative_scan = strict_order;"
        " SET hnsw.max_scan_tuples = 1000000"
    )
    near = sql.SQL(
        "SELECT count(*) FROM (SELECT FROM {t} AS s ORDER BY s.segment_embedding <=> (SELECT e.segment_embedding FROM"
        " {t} AS e ORDER BY document_id, segment_number LIMIT 1) LIMIT 1000000) AS n"
    ).format(t=ident(store))
    plan = "\n".join(line for (line,) in connection.execute(sql.SQL("EXPLAIN ") + near))
    through_index = connection.execute(near).fetchone()
    connection.execute(
        "RESET enable_seqscan; RESET hnsw.ef_search; RESET hnsw.iterative_scan; RESET hnsw.max_scan_tuples"
    )
    assert "segment_embedding_idx" in plan, plan
    assert connection.execute(sql.SQL("SELECT count(*) FROM {}").format(ident(store))).fetchone() == through_index


def assert_nothing_left(connection: Connection, server: SupervisedServer | None = None) -> None:
    """No session but this one and idle ones, no advisory lock, no temporary file; the model server has no work."""
    sessions = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend' AND state NOT IN ('idle', 'disabled')"
    )
    wait_until(lambda: connection.execute(sessions).fetchone() == (0,))
    assert connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)
    assert connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (0,)
    own = "SELECT count(*) FROM ml_rag.activity WHERE datname = current_database()"
    wait_until(lambda: connection.execute(own).fetchone() == (0,))
    files = "SELECT coalesce(sum(n), 0) FROM pg_tablespace AS t CROSS JOIN LATERAL (SELECT count(*) AS n FROM"
    files += " pg_ls_tmpdir(t.oid)) AS f WHERE t.spcname <> 'pg_global'"
    assert connection.execute(files).fetchone() == (0,)
    if server is not None:
        busy = ("ml_rag_queue_depth", "ml_rag_running")

        def has_work() -> bool:
            with server.client() as http:
                rows = http.get("/metrics").text.splitlines()
            return any(float(row.split()[-1]) for row in rows if row.startswith(busy))

        wait_until(lambda: not has_work())
        assert len(server.parsers()) <= 2
        assert list(server.temporary.rglob("*")) == []
