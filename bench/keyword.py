"""Keyword search: queries beside bm25s in memory and ts_rank_cd over GIN, and what keeping the index current costs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import bm25s
import psycopg
from psycopg import sql

from bench import corpus
from bench.measure import Figure, in_turn, medians, milliseconds

#: beyond this the token lists that bm25s is built from take more than 10 GB
ROWS_IN_MEMORY = 1_000_000
QUERIES = 100
COLUMNS = (
    "document_name text NOT NULL, document_id bigint, segment_number integer, segment text NOT NULL,"
    " share integer NOT NULL, segment_embedding vector(3), PRIMARY KEY (document_id, segment_number)"
)
COPY = "COPY {} (document_name, document_id, segment_number, segment, share) FROM STDIN"
#: five- to seven-word questions, of the words the index knows
SEARCH = (
    """SELECT document_id, segment_number, keyword_score FROM ml_rag_search(%s, '{"vector_store": ["bench_keyword"],"""
    """ "semantic_search": false, "keyword_search": true, "n_citations": 10}')"""
)
#: of a thousand rows ten pass the filter
FILTERED = SEARCH.replace("10}", """10, "filters": {"share": {"lt": 10}}}""")
#: by words alone, as an application calls it
CALL = (
    """CALL ml_rag(%s, '{"skip_generate": true, "vector_store": ["bench_keyword"], "semantic_search": false,"""
    """ "keyword_search": true}')"""
)
RANK = (
    "SELECT document_id, segment_number, ts_rank_cd(words, query) AS rank FROM bench_plain,"
    " CAST(replace(plainto_tsquery('english', %s)::text, '&', '|') AS tsquery) AS query"
    " WHERE words @@ query ORDER BY rank DESC LIMIT 10"
)


def _load(connection: psycopg.Connection, table: str, rows: int) -> float:
    """Seconds to COPY the corpus into a new table."""

    def copy() -> None:
        with connection.cursor().copy(sql.SQL(COPY).format(sql.Identifier(table))) as copy:
            for i, text in enumerate(prepared):
                copy.write_row((f"document {i // 10}", i // 10, i % 10, text, i * 7919 % 1000))

    prepared = list(corpus.segments(rows))
    connection.execute(sql.SQL("CREATE TABLE {} (" + COLUMNS + ")").format(sql.Identifier(table)))
    if table == "bench_keyword":
        connection.execute("COMMENT ON COLUMN bench_keyword.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=none'")
        connection.execute("SELECT ml_rag.enable_keyword_search('bench_keyword', '{\"language\": \"en\"}')")
    return milliseconds(copy) / 1000


@contextmanager
def _tables(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS bench_keyword, bench_plain")
        yield connection
        connection.execute("DROP TABLE bench_keyword, bench_plain")


def _queries(connection: psycopg.Connection) -> list[str]:
    counts = "SELECT count(*) FROM ml_rag.keyword_tokens('english', %s)"
    fitting = (q for q in corpus.questions() if 5 <= (connection.execute(counts, (q,)).fetchone() or (0,))[0] <= 7)
    return list(itertools.islice(fitting, QUERIES))


def _in_memory(rows: int) -> Callable[[str], object] | None:
    if rows > ROWS_IN_MEMORY:
        return None
    retriever = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    retriever.index(bm25s.tokenize(list(corpus.segments(rows)), show_progress=False), show_progress=False)

    def query(text: str) -> object:
        tokens = bm25s.tokenize([text], return_ids=False, show_progress=False)
        return retriever.retrieve(tokens, k=10, show_progress=False)

    return query


def _p50(connection: psycopg.Connection, queries: list[str]) -> float:
    for query in queries[:10]:
        connection.execute(SEARCH, (query,))
    return statistics.median(milliseconds(lambda q=q: connection.execute(SEARCH, (q,)).fetchall()) for q in queries)  # type: ignore[misc]


def measure(dsn: str, rows: int) -> list[Figure]:
    """All figures over ``rows`` segments of about 100 words."""
    limit = 5 if rows <= 100_000 else 40
    with _tables(dsn) as connection:
        plain = _load(connection, "bench_plain", rows)
        indexed = _load(connection, "bench_keyword", rows)
        connection.execute("ALTER TABLE bench_plain ADD words tsvector")
        connection.execute("UPDATE bench_plain SET words = to_tsvector('english', segment)")
        connection.execute("CREATE INDEX ON bench_plain USING gin (words)")
        connection.execute("CREATE INDEX ON bench_keyword (share)")
        connection.execute("VACUUM ANALYZE bench_plain")
        connection.execute("VACUUM ANALYZE bench_keyword")
        for table in ("row", "new", "run", "posting"):
            connection.execute(sql.SQL("VACUUM ANALYZE ml_rag_internal.{}").format(sql.Identifier(f"keyword_{table}")))
        queries = _queries(connection)
        calls: dict[str, Callable[[int], object]] = {
            "ours": lambda i: connection.execute(SEARCH, (queries[i % len(queries)],)).fetchall(),
            "call": lambda i: connection.execute(CALL, (queries[i % len(queries)],)).fetchall(),
            "filtered": lambda i: connection.execute(FILTERED, (queries[i % len(queries)],)).fetchall(),
            "ts_rank_cd": lambda i: connection.execute(RANK, (queries[i % len(queries)],)).fetchall(),
        }
        if memory := _in_memory(rows):
            calls["bm25s"] = lambda i: memory(queries[i % len(queries)])
        times = in_turn(calls, len(queries), warmup=20, block=10)
        p50 = {name: statistics.median(values) for name, values in times.items()}
        over = f"over {rows:,} segments"
        figures = [
            Figure(f"keyword query, p50, {over}", "ms", p50["ours"], "bm25s in memory", p50.get("bm25s"),
                   f"≤ {limit} ms", p50["ours"] <= limit),
            Figure(f"keyword query, p50, {over}", "ms", p50["ours"], "ts_rank_cd over GIN", p50["ts_rank_cd"],
                   f"≤ {limit} ms", p50["ours"] <= limit),
            Figure(f"ml_rag by words alone, p50, {over}", "ms", p50["call"], "bm25s in memory", p50.get("bm25s"),
                   f"≤ {limit} ms", p50["call"] <= limit),
            Figure(f"keyword query, p50, {over}, 1 % pass a filter with an index", "ms", p50["filtered"],
                   "without the filter", p50["ours"], "≤ 3 ×", p50["filtered"] <= 3 * p50["ours"]),
            Figure(f"keyword query, p95, {over}", "ms", statistics.quantiles(times["ours"], n=20)[-1],
                   "bm25s in memory", statistics.quantiles(times["bm25s"], n=20)[-1] if "bm25s" in times else None,
                   "none", True),
            Figure(f"COPY of {rows:,} segments with keyword index", "s", indexed, "without", plain, "none", True),
        ]  # fmt: skip
        return [*figures, _first(dsn, queries, over), *_changes(connection, rows, queries, limit)]


def _first(dsn: str, queries: list[str], over: str) -> Figure:
    """What a session's first call by words takes; most of it is Python's."""

    def of_new_session(statement: str, *arguments: object) -> float:
        with psycopg.connect(dsn, autocommit=True) as connection:
            return milliseconds(lambda: connection.execute(statement, arguments or None))

    pairs = [(of_new_session(CALL, q), of_new_session("DO LANGUAGE plpython3u 'import numpy'")) for q in queries[:9]]
    call, numpy = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Figure(f"a session's first call of ml_rag, by words alone, {over}", "ms", call, "import numpy in PL/Python",
                  numpy, "≤ 3 x", call <= 3 * numpy)  # fmt: skip


def _changes(connection: psycopg.Connection, rows: int, queries: list[str], limit: int) -> list[Figure]:
    text = next(corpus.segments(1))
    numbers = itertools.count(rows)

    def insert(table: str) -> Callable[[int], object]:
        statement = sql.SQL("INSERT INTO {} VALUES ('new', %s, 0, %s, 0)").format(sql.Identifier(table))
        return lambda i: connection.execute(statement, (next(numbers), text))

    def update(table: str) -> Callable[[int], object]:
        statement = sql.SQL("UPDATE {} SET share = share + 1 WHERE document_id = %s AND segment_number = 0").format(
            sql.Identifier(table)
        )
        return lambda i: connection.execute(statement, (i % (rows // 10),))

    updates = medians(in_turn({"indexed": update("bench_keyword"), "plain": update("bench_plain")}, 900, block=50))
    inserts = in_turn({"indexed": insert("bench_keyword"), "plain": insert("bench_plain")}, 900, block=50)
    after_inserts = _p50(connection, queries)
    # the mean: now and then one of them folds what waits
    inserted = {name: statistics.mean(times) for name, times in inserts.items()}
    deleted = {
        table: milliseconds(
            lambda table=table: connection.execute(  # type: ignore[misc]
                sql.SQL("DELETE FROM {} WHERE document_id % 10 = 3").format(sql.Identifier(table))
            )
        )
        / 1000
        for table in ("bench_keyword", "bench_plain")
    }
    after_delete = _p50(connection, queries)
    return [
        Figure("inserting one segment with keyword index", "ms", inserted["indexed"], "without", inserted["plain"],
               "none", True),
        Figure("updating a column that is not indexed, with keyword index", "ms", updates["indexed"], "without",
               updates["plain"], "≤ the floor + 0.3 ms", updates["indexed"] <= updates["plain"] + 0.3),
        Figure("keyword query, p50, with 900 more that wait", "ms", after_inserts, "", None, f"≤ {limit} ms",
               after_inserts <= limit),
        Figure("deleting a tenth with keyword index", "s", deleted["bench_keyword"], "without",
               deleted["bench_plain"], "none", True),
        Figure("keyword query, p50, after that", "ms", after_delete, "", None, f"≤ {limit} ms",
               after_delete <= limit),
    ]  # fmt: skip
