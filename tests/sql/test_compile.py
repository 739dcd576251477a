"""pipeline/compile: a retrieval as one statement: its forms agree, its plan is kept, callers can have it.

The answer document of a call that only retrieves is made by the statement. With "explain" the statement gives hits, and
candidates are counted. ml_rag_search makes rows of hits, and ml_rag.statement says what gives them.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from support.cluster import Connection, Database, value_of
from support.stores import answer, create_store, error, fake_embedding, marker, search, warnings_of

WORDS = ["heron", "grebe", "loon", "tern", "gull", "swan", "duck", "coot", "rail", "snipe"]


def texts(seed: int, n: int) -> list[str]:
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=source.randint(2, 6))) for _ in range(n)]


@pytest.fixture(scope="module")
def birds(module_db: Database) -> Connection:
    """A connection as a user to two stores of few words, so that many distances and scores are equal."""
    owner = module_db.connect()
    for seed, name in enumerate(("docs", "more")):
        rows = [(f"d{i % 40:02}", i // 3, i % 3, text, fake_embedding(text)) for i, text in enumerate(texts(seed, 240))]
        create_store(owner, name, rows, type="vector(16)")  # type: ignore[arg-type]
        owner.execute(f"CREATE INDEX ON {name} USING hnsw (segment_embedding vector_cosine_ops)")
        owner.execute("SELECT ml_rag.enable_keyword_search(%s)", (name,))
    owner.execute("ANALYZE")
    return module_db.connect("asker")


def role(connection: Connection) -> str:
    """The role of a connection, as it is written into a statement."""
    return value_of(connection, "SELECT quote_ident(current_user)")


def either(connection: Connection, query: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """The answer documents without and with "explain", or their errors."""

    def document(more: dict[str, Any]) -> Any:
        try:
            found = answer(connection, query, {**options, "skip_generate": True, **more})
        except psycopg.Error as e:
            return e.sqlstate, e.diag.message_primary
        found.pop("explain", None)
        return found

    return document({}), document({"explain": True})


FILTERS: list[dict[str, Any]] = [
    {"filters": {"document_id": {"lt": 4}}},
    {"filters": {"document_id": {"gte": 0}}},
    {"filters": {"n": [0, 2], "document_id": {"between": [10, 70]}}},
    {"filters": {"n": 99}},
    {"document_name": ["d01", "d17", "nowhere"]},
    {"exclude_document_name": ["d01"]},
    {"required_keywords": ["heron"], "excluded_keywords": ["loon", "gull"]},
]


def options_of(source: random.Random) -> dict[str, Any]:
    """Options of a call that only retrieves."""
    n = source.choice([1, 2, 3, 10, 60])
    options: dict[str, Any] = {"n_citations": n, "distance_metric": source.choice(["COSINE", "DOT", "EUCLIDEAN"])}
    options["vector_store"] = source.choice([["docs"], ["docs", "more"], ["public.more"]])
    kind = source.choice(["meaning", "words", "hybrid", "arms"])
    if kind == "words":
        options |= {"semantic_search": False, "keyword_search": True}
    elif kind == "hybrid":
        options["keyword_search"] = True
        hybrid = {
            "fusion": source.choice(["weighted", "rrf"]), "rrf_k": source.choice([1, 60]),
            "semantic_weight": source.choice(["auto", 0, 0.3, 1]), "candidates": source.choice([1, 5, 100]),
        }  # fmt: skip
        options["hybrid_options"] = {key: hybrid[key] for key in source.sample(list(hybrid), source.randint(0, 4))}
    elif kind == "arms":
        arms: list[dict[str, Any]] = [{"search": "semantic"}, {"search": "keyword"}]
        source.shuffle(arms)
        weight = source.choice(["auto", "numbers", None])
        for arm in arms:
            if weight is not None:
                arm["weight"] = "auto" if weight == "auto" else source.choice([0.1, 0.5, 1])
            if source.random() < 0.3:
                limit = {"max_distance": 0.4} if arm["search"] == "semantic" else {"min_score": 0.5}
                arm |= limit
            arm["candidates"] = source.choice([1, 4, 100])
        options["arms"] = arms[: source.randint(1, 2)]
    limits = {
        "max_distance": source.choice(["auto", 0.05, 0.3, 5]), "percentage_distance": source.choice(["auto", 0, 300])
    }  # fmt: skip
    if source.random() < 0.4:
        chosen = source.sample(list(limits), source.randint(1, 2))
        options["retrieval_options"] = {key: limits[key] for key in chosen} | {
            "segment_overlap": source.choice([0, 1, 3])
        }
    if source.random() < 0.4:
        fields = ["document_id", "segment_number", "vector_store", "metadata", "score", "keyword_score", "rank"]
        options["citation_fields"] = [*source.sample(fields, 3), "segment_range", "rerank_score"]
    if source.random() < 0.2:
        options["return"] = "document"
    if source.random() < 0.5:
        options |= source.choice(FILTERS)
    if source.random() < 0.2:
        options["index_options"] = source.choice([{"exact": True}, {"ef_search": 100}])
    return options


@pytest.mark.parametrize("seed", range(160))
def test_the_forms_of_a_retrieval_agree(birds: Connection, seed: int) -> None:
    source = random.Random(seed)
    question = " ".join(source.sample(WORDS, source.randint(1, 4)))
    options = options_of(source)
    if source.random() < 0.7:
        options["query_embedding"] = fake_embedding(question)
    plain, explained = either(birds, question, options)
    assert plain == explained, options
    if not isinstance(plain, dict):
        with error(plain[0]):
            search(birds, question, options)
        with error(plain[0]):
            statement(birds, question, options)
        return
    rows = search(birds, question, options)
    cited = [(row[5], None if row[6] is None else float(row[6]), row[2]) for row in rows]
    assert cited == [(c["segment"], c["distance"], c["document_name"]) for c in plain["citations"]], options
    assert rows == birds.execute(statement(birds, question, options).encode()).fetchall(), options


FIT: list[dict[str, Any]] = [
    {},
    {"keyword_search": True},
    {"semantic_search": False, "keyword_search": True},
    {"retrieval_options": {"max_distance": 1.9, "segment_overlap": 0}},
    {"retrieval_options": {"segment_overlap": 2}, "citation_fields": ["segment_range"]},
    {"return": "document", "keyword_search": True},
    {"citation_fields": ["rank"]},
    {"arms": [{"search": "keyword"}, {"search": "semantic"}]},
    {"vector_store": ["docs"], "keyword_search": True, "hybrid_options": {"fusion": "rrf"}},
    {"vector_store": ["docs"], "keyword_search": True, "hybrid_options": {"semantic_weight": 0.5}},
    {"vector_store": ["docs"], "distance_metric": "EUCLIDEAN", "keyword_search": True},
]


def make(owner: Connection, name: str = "docs", *names: str) -> None:
    """Small stores with a keyword index."""
    for store in (name, *names):
        rows = [
            (f"{store} {i}", i, 0, text, fake_embedding(text)) for i, text in enumerate(["heron", "loon heron", "gull"])
        ]
        create_store(owner, store, rows, type="vector(16)")  # type: ignore[arg-type]
        owner.execute("SELECT ml_rag.enable_keyword_search(%s)", (store,))


def cited(connection: Connection, **options: Any) -> list[str]:
    """Names of the documents that a search by meaning for "heron" cites, nearest first."""
    found = answer(connection, "heron", {"skip_generate": True, "query_embedding": fake_embedding("heron"), **options})
    return [citation["document_name"] for citation in found["citations"]]


# -- plans that are kept ----------------------------------------------------------------------------------------------


def test_a_kept_plan_follows_policies_and_roles(owner: Connection, asker: Connection, db: Database) -> None:
    make(owner)
    owner.execute("CREATE POLICY own ON docs USING (document_name = current_user || ' 0' OR document_id = 1)")
    connection = db.connect()  # a superuser, who may become anybody
    for hybrid in ({}, {"keyword_search": True}):
        owner.execute("ALTER TABLE docs DISABLE ROW LEVEL SECURITY")
        connection.execute(f"SET ROLE {role(asker)}")
        assert cited(connection, **hybrid) == ["docs 0", "docs 1", "docs 2"]
        owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
        assert cited(connection, **hybrid) == ["docs 1"]
        connection.execute("RESET ROLE")
        assert cited(connection, **hybrid) == ["docs 0", "docs 1", "docs 2"]
        connection.execute(f"SET ROLE {role(asker)}")
        assert cited(connection, **hybrid) == ["docs 1"]
        connection.execute("RESET ROLE")


def test_a_privilege_that_is_taken_away_counts_at_once(owner: Connection, asker: Connection) -> None:
    make(owner)
    assert cited(asker, n_citations=1) == ["docs 0"]
    owner.execute("REVOKE SELECT ON docs FROM ml_rag_user")
    with error("P0002", "no vector store found"):
        cited(asker, n_citations=1)
    owner.execute("GRANT SELECT (segment, segment_embedding, document_name) ON docs TO ml_rag_user")
    assert cited(asker, n_citations=1) == ["docs 0"]


@pytest.mark.parametrize("is_one_transaction", [False, True])
def test_what_changes_in_the_catalog_counts_at_once(owner: Connection, is_one_transaction: bool) -> None:
    make(owner, "docs", "more")
    options = {"n_citations": 2}
    if is_one_transaction:
        owner.execute("BEGIN")
    assert cited(owner, **options) == ["docs 0", "more 0"]
    owner.execute("COMMENT ON COLUMN more.segment_embedding IS NULL")
    assert cited(owner, **options) == ["docs 0", "docs 1"]
    owner.execute(f"COMMENT ON COLUMN more.segment_embedding IS '{marker('other')}'")
    assert cited(owner, **options, vector_store=["docs", "more"], embed_model_id="other") == ["more 0", "more 1"]
    owner.execute(f"COMMENT ON COLUMN more.segment_embedding IS '{marker()}'")
    assert cited(owner, **options) == ["docs 0", "more 0"]
    owner.execute("ALTER TABLE more RENAME TO others")
    assert answer(owner, "heron", {"skip_generate": True, "query_embedding": fake_embedding("heron")})[
        "vector_store"
    ] == [
        "public.docs",
        "public.others",
    ]
    owner.execute("ALTER TABLE docs RENAME document_name TO title")
    assert cited(owner, n_citations=1, vector_store=["docs"]) == ["public.docs"]
    owner.execute("ALTER TABLE docs RENAME title TO document_name")
    assert cited(owner, n_citations=1, vector_store=["docs"]) == ["docs 0"]
    owner.execute("ALTER TABLE docs ALTER segment_embedding TYPE halfvec(16)")
    assert cited(owner, n_citations=1, vector_store=["docs"]) == ["docs 0"]
    owner.execute("ALTER TABLE docs DROP COLUMN document_name")
    assert cited(owner, n_citations=1, vector_store=["docs"]) == ["public.docs"]
    owner.execute("DROP TABLE others")
    assert cited(owner, n_citations=4) == ["public.docs"] * 3
    if is_one_transaction:
        owner.execute("ROLLBACK")


def test_a_role_that_is_not_trusted_any_more_is_not_searched_unasked(
    owner: Connection, asker: Connection, db: Database
) -> None:
    make(owner)
    superuser = db.connect()
    superuser.execute(
        "CREATE SCHEMA theirs; ALTER TABLE docs SET SCHEMA theirs; GRANT USAGE ON SCHEMA theirs TO ml_rag_user"
    )
    assert cited(asker, n_citations=1) == ["docs 0"]
    superuser.execute("CREATE ROLE stranger; ALTER SCHEMA theirs OWNER TO stranger")
    try:
        with error("P0002", "no vector store found"):
            cited(asker, n_citations=1)
        assert cited(asker, n_citations=1, vector_store=["theirs.docs"]) == ["docs 0"]
    finally:
        superuser.execute("DROP SCHEMA theirs CASCADE; DROP ROLE stranger")


def test_a_store_that_fails_is_left_out_where_nobody_named_it(owner: Connection, asker: Connection) -> None:
    make(owner, "docs", "more")
    owner.execute("CREATE FUNCTION fails() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$")
    owner.execute("ALTER TABLE more ENABLE ROW LEVEL SECURITY; CREATE POLICY fails ON more USING (fails())")
    with warnings_of(asker) as warned:
        assert cited(asker, n_citations=1) == ["docs 0"]
    assert any('"public.more" cannot be searched' in str(message) for message in warned)
    with error("P0001", "no", ours=False):
        cited(asker, n_citations=1, vector_store=["public.more"])


def test_a_store_that_is_locked_is_left_out_where_nobody_named_it(
    owner: Connection, asker: Connection, db: Database
) -> None:
    make(owner, "docs", "more")
    other = db.connect()
    with other.transaction():
        other.execute("LOCK TABLE more")
        with warnings_of(asker) as warned:
            assert cited(asker, n_citations=1) == ["docs 0"]
    assert warned
    row = asker.execute("SELECT current_setting('lock_timeout'), current_setting('enable_seqscan')").fetchone()
    assert row == ("0", "on")


def test_it_is_cancelled(owner: Connection, asker: Connection) -> None:
    make(owner)
    owner.execute("CREATE FUNCTION waits() RETURNS boolean LANGUAGE sql AS 'SELECT pg_sleep(60) IS NOT NULL'")
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY waits ON docs USING (waits())")
    threading.Timer(0.5, asker.cancel).start()
    began = time.monotonic()
    with error("57014", "canceling statement due to user request", ours=False):
        cited(asker, n_citations=1)
    assert time.monotonic() - began < 5
    assert asker.execute("SELECT current_setting('hnsw.iterative_scan', true)").fetchone() in [("off",), ("",), (None,)]


def test_settings_of_the_session_are_as_before(birds: Connection) -> None:
    birds.execute("SET hnsw.ef_search = 77")
    cited(birds, keyword_search=True)
    row = birds.execute(
        "SELECT current_setting('hnsw.ef_search'), current_setting('jit'), current_setting('plan_cache_mode')"
    ).fetchone()
    birds.execute("RESET hnsw.ef_search")
    assert row == ("77", "on", "auto")


@pytest.mark.fresh
def test_long_options_are_not_kept(owner: Connection, db: Database) -> None:
    make(owner)
    asker = db.connect("asker", application_name="measured")

    def used() -> int:
        found = value_of(asker, "SELECT pg_backend_pid()")
        return int(Path(f"/proc/{found}/statm").read_text().split()[1]) * 4096

    def ask(n: int) -> None:
        for i in range(n):
            for option, name in (
                ("vector_store", "public.docs"), ("exclude_vector_store", "public.more"), ("schema", "public")
            ):  # fmt: skip
                cited(asker, **{option: [f"{i}{'x' * 250_000}", name]})

    ask(20)
    grown = []
    for _ in range(3):  # what is kept grows each time; what the allocator holds back does not
        before = used()
        ask(30)
        grown.append(used() - before)
    assert min(grown) < 10_000_000, grown  # of 22 MB of names each


#: each after the ones before it, whose other options are the same
OTHER_FILTERS: list[Any] = [
    {"document_id": {"gte": 40}},
    {"document_id": {"gte": 41, "lt": 60}},
    {"document_name": ["d03", "d04"], "or": [{"segment_number": 0}, {"segment_number": 2}]},
    {"n": {"lx": 1}},
    {"document_id": "x"},
    {},
    [],
    "x",
    None,
    {"document_id": [7, 8, 7]},
]


@pytest.mark.parametrize("default", [None, '{"filters": {"segment_number": 1}}'])
def test_other_filters_than_those_of_a_call_before(birds: Connection, module_db: Database, default: str | None) -> None:
    options = {"keyword_search": True, "query_embedding": fake_embedding("heron"), "vector_store": ["docs"]}
    with module_db.connect() as owner:
        owner.execute("SELECT ml_rag.configure('default_options', %s)", (default,))
        try:
            for filters in OTHER_FILTERS:
                # what is explained is read each time
                own, explained = either(birds, "heron tern", {**options, "filters": filters})
                assert own == explained, filters
        finally:
            owner.execute("SELECT ml_rag.configure('default_options', NULL)")


def test_other_options_that_hold_the_word_filters(birds: Connection) -> None:
    options = {"keyword_search": True, "excluded_keywords": ["filters"], "query_embedding": fake_embedding("heron")}
    for filters in ({"filters": {"document_id": 3}}, {}):
        own, explained = either(birds, "heron tern", {**options, "vector_store": ["docs"], **filters})
        assert own == explained
        assert own["citations"]


@pytest.mark.fresh
def test_options_are_read_once_where_filters_differ(owner: Connection) -> None:
    make(owner)
    cited(owner, filters={"document_id": 0})
    owner.execute(
        """
        DO LANGUAGE plpython3u $$
        from ml_rag.backend.retrieval import request
        class Told:
            own, names = request._run, []
            def __call__(self, plpy, name, *arguments):
                self.names.append(name)
                return self.own(plpy, name, *arguments)
        GD["told"] = request._run = Told()
        $$"""
    )
    for i in range(3):
        assert cited(owner, filters={"document_id": {"lte": i}})
    for option in ({"n_citations": 2}, {"citation_fields": ["filters"]}):
        with contextlib.suppress(psycopg.Error):
            cited(owner, filters={"document_id": 0}, **option)
    owner.execute(
        """DO LANGUAGE plpython3u $$ plpy.execute(f"SET test.told = '{' '.join(GD['told'].names)}'") $$""",
    )
    told = value_of(owner, "SELECT current_setting('test.told')")
    assert told == "filters filters filters filters read options without filters filters read"


# -- numbers that Python or double precision do not take --------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        '{"keyword_search": true, "hybrid_options": {"semantic_weight": 1e-400}}',
        '{"arms": [{"search": "semantic"}, {"search": "keyword", "weight": 1e-400}]}',
        '{"retrieval_options": {"max_distance": 1e-5000, "percentage_distance": 1e-400}}',
        '{"model_options": {"json_schema": {"n": 1e5000}}}',
        f'{{"model_options": {{"json_schema": {{"n": {"[" * 3000 + "]" * 3000}}}}}}}',
    ],
    ids=["weight", "weight of an arm", "limits", "digits", "depth"],
)
def test_numbers_of_many_digits_and_deep_arrays(asker: Connection, owner: Connection, options: str) -> None:
    make(owner)
    more = json.dumps({"query_embedding": fake_embedding("heron"), "skip_generate": True})
    found = value_of(asker, "SELECT ml_rag_answer('heron', %s::jsonb || %s::jsonb)", (options, more))
    assert found["citations"][0]["document_name"] == "docs 0"


def test_filters_with_numbers_of_many_digits(asker: Connection, owner: Connection) -> None:
    make(owner)
    for number in ("1e5000", "9" * 6000):
        with error("P0002", "no segment found"):
            answer(asker, "heron", f'{{"filters": {{"n": {number}}}, "skip_generate": true}}')


@pytest.mark.parametrize("arm", ['"semantic", "weight": 1e-400', '"keyword", "min_score": 1e400'])
def test_a_number_out_of_range_is_an_option_that_is_wrong(asker: Connection, owner: Connection, arm: str) -> None:
    make(owner)
    with error("22023", "invalid value for option"):
        answer(asker, "heron", f'{{"arms": [{{"search": {arm}}}]}}')


def test_a_schema_nested_too_deeply_is_an_option_that_is_wrong(asker: Connection) -> None:
    for depth in (3000, 990, 970, 940):
        with error("22023"):
            asker.execute("SELECT ml_generate('q', %s)", (f'{{"json_schema": {{"n": {"[" * depth + "]" * depth}}}}}',))


# -- ml_rag.statement -------------------------------------------------------------------------------------------------


def statement(connection: Connection, query: str, options: dict[str, Any]) -> str:
    return value_of(connection, "SELECT ml_rag.statement(%s, %s)", (query, json.dumps(options)))


@pytest.mark.parametrize("options", [*FIT, *FILTERS[:2], *FILTERS[4:]], ids=json.dumps)
def test_the_statement_gives_the_rows_of_the_search(birds: Connection, options: dict[str, Any]) -> None:
    options = {**options, "query_embedding": fake_embedding("heron loon"), "n_citations": 20}
    text = statement(birds, "heron loon", options)
    assert birds.execute(text.encode()).fetchall() == search(birds, "heron loon", options)
    assert birds.execute(b"EXPLAIN " + text[text.index("WITH") :].encode()).fetchall()


def test_explain_has_the_statement(birds: Connection) -> None:
    options: dict[str, Any] = {"query_embedding": [0.5] * 16, "keyword_search": True, "skip_generate": True}
    explained = answer(birds, "heron", {**options, "explain": True})["explain"]
    assert explained["statement"].replace(", ", ",") == statement(birds, "heron", options).replace(", ", ",")
    del options["keyword_search"]
    # of the only arm no more candidates are read than are cited, unless they are to be told
    options["arms"] = [{"search": "semantic", "query_embedding": [0.5, 1] * 8, "candidates": 3}]
    explained = answer(birds, "heron", {**options, "explain": True})["explain"]
    assert explained["statement"].replace(", ", ",") == statement(birds, "heron", options).replace(", ", ",")


def test_the_statement_shows_nothing_of_policies(owner: Connection, asker: Connection) -> None:
    make(owner)
    owner.execute(
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (document_name <> 'docs 0')"
    )
    text = statement(
        asker, "heron", {"query_embedding": fake_embedding("heron"), "keyword_search": True, "n_citations": 5}
    )
    assert "docs 0" not in text
    assert [row[2] for row in asker.execute(text.encode())] == ["docs 1", "docs 2"]
    # of the words of hidden rows neither key nor score
    assert "{0,0}" not in text
    assert "{1,0}" in text


def test_a_filter_that_is_wrong_is_an_error(birds: Connection) -> None:
    for filters, words in (({"document_id": "x"}, 'option "filters"'), ({"n": {"lx": 1}}, 'unknown operator "lx"')):
        with error("22023", words):
            cited(birds, filters=filters)


def test_a_key_that_no_row_has_is_warned_of_once(birds: Connection) -> None:
    with warnings_of(birds) as warned:
        cited(birds, vector_store=["docs"], filters={"N": {"ne": 1}})
    assert len(warned) == 1
    assert "N" in str(warned[0])


def test_a_call_that_is_not_one_statement_is_said_to_be_none(birds: Connection) -> None:
    for options in ({"n_citations": 0}, {"query_options": {"synonyms": True}}):
        with error("0A000", "the call cannot be answered by one statement"):
            statement(birds, "heron", {"query_embedding": fake_embedding("heron"), **options})
    with error("22023", 'unknown option "n_citation"'):
        statement(birds, "heron", {"n_citation": 1})
    with error("22023", "the question is empty"):
        statement(birds, " ", {})


def test_a_table_with_names_to_quote(owner: Connection, asker: Connection) -> None:
    owner.execute('CREATE SCHEMA "s.\'"; GRANT USAGE ON SCHEMA "s.\'" TO ml_rag_user')
    name = '"s.\'"."t ""\\x"'
    owner.execute(
        f'CREATE TABLE {name} ("seg""ment\\" text, "em\'b" vector(16), "k" uuid DEFAULT gen_random_uuid() PRIMARY KEY)'
    )
    owner.execute(f"COMMENT ON COLUMN {name}.\"em'b\" IS '{marker()}'")
    owner.execute(f"INSERT INTO {name} VALUES ('heron', %s)", (json.dumps(fake_embedding("heron")),))
    owner.execute(f"GRANT SELECT ON {name} TO ml_rag_user")
    columns = {"segment": 'seg"ment\\', "segment_embedding": "em'b", "document_id": "k"}
    options = {"vector_store": [name], "vector_store_columns": columns, "skip_generate": True}
    plain, explained = either(asker, "q", {**options, "query_embedding": fake_embedding("heron")})
    assert plain == explained
    assert plain["citations"][0]["document_name"] == name


@pytest.mark.parametrize("schema", ["h", "math", "r.h."])
def test_names_that_read_like_sql_of_the_statement(owner: Connection, schema: str) -> None:
    column = "a AS segment, b AS metadata"
    owner.execute(
        f'CREATE SCHEMA "{schema}"; CREATE TABLE "{schema}"."h.kb" (document_name text, document_id bigint,'
        f' segment_number integer, "{column}" text, segment_embedding vector(16));'
        f'COMMENT ON COLUMN "{schema}"."h.kb".segment_embedding IS \'{marker()}\''
    )
    values = "d", 1, 1, "heron", str([float(x) for x in fake_embedding("heron")])
    owner.execute(f'INSERT INTO "{schema}"."h.kb" VALUES (%s, %s, %s, %s, %s)', values)
    options = {"vector_store_columns": {"segment": column}, "embed_model_id": "fake-embed"}
    assert search(owner, "heron", options | {"arms": [{"search": "semantic"}] * 2})[0][5] == "heron"
    found = owner.execute("SELECT w.stage, w.rank FROM ml_rag.why_not('heron', %s, 'd') AS w", [Jsonb(options)])
    assert found.fetchone() == ("search", 1)


def test_reranked_hits_that_passed_a_filter_get_their_neighbours(owner: Connection) -> None:
    rows = [("d", 1, n, text, fake_embedding(text)) for n, text in enumerate(("one", "heron", "three"), 1)]
    create_store(owner, rows=rows, type="vector(16)")
    options = {"filters": {"segment_number": 2}, "rerank": {}, "retrieval_options": {"segment_overlap": 1}}
    assert [row[5] for row in search(owner, "heron", options)] == ["one\nheron\nthree"]
