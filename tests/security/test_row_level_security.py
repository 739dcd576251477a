"""Row-level security on every path: what a tenant gets is what it would get if the other's rows did not exist.

The store shared.docs holds the rows of two tenants, alone.docs the same ones without those of the other; names apart,
each call must give the same over both: rows, scores, distances, thresholds, warnings, errors with detail and hint. The
other tenant's rows are those that would show: nearest of all, in the middle of the tenant's own documents, with every
word that is asked for.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from support.cluster import Connection, Database
from support.keywords import SCORES
from support.stores import as_text, error, fake_embedding, mark

#: stands in everything the other tenant has: segments, names, metadata
SECRET = "zanzibar"
WORDS = ["heron", "otter", "pine", "river", "stone", "moss"]
COLUMNS = (
    "document_name text, metadata jsonb, document_id bigint, segment_number integer, segment text,"
    " segment_embedding vector(16), tenant name, PRIMARY KEY (document_id, segment_number)"
)
QUERY = "heron by the river"
NEAR = {"query_embedding": fake_embedding(QUERY)}


def rows(db: Database) -> list[tuple[Any, ...]]:
    """The tenant's rows and, in the gaps of its documents and beside them, those of the other."""
    found = []
    for document in range(1, 9):
        for number in range(1, 11):
            is_own = number % 3 != 0 and document != 8
            word, other = WORDS[(document + number) % 6], WORDS[(document * number) % 6]
            text = f"{word} {other} text{document * number}" if is_own else f"{QUERY} {SECRET}"
            name = f"doc {document}" if is_own else f"{SECRET} {document}"
            year: Any = 2000 + number if is_own else SECRET
            metadata = {"year": year, "tags": [word] if is_own else [SECRET, "heron"]}
            who = db.role("asker" if is_own else "tenant")
            found.append((name, Jsonb(metadata), document, number, text, as_text(fake_embedding(text)), who))
    return found


@pytest.fixture(scope="module")
def stores(module_db: Database, module_owner: Connection) -> Connection:
    """Both tables with their policies, keyword indexes, views; a connection as the tenant."""
    owner = module_owner
    owner.execute(SCORES)
    for schema in ("shared", "alone"):
        owner.execute(f"CREATE SCHEMA {schema}; GRANT USAGE ON SCHEMA {schema} TO ml_rag_user")
        owner.execute(f"CREATE TABLE {schema}.docs ({COLUMNS})")
        for row in rows(module_db):
            if schema == "shared" or row[-1] == module_db.role("asker"):
                owner.execute(f"INSERT INTO {schema}.docs VALUES (%s, %s, %s, %s, %s, %s, %s)", row)
        owner.execute(
            f"""SELECT ml_rag.enable_keyword_search('{schema}.docs', '{{"statistics": "visible"}}');"""
            f"ALTER TABLE {schema}.docs ENABLE ROW LEVEL SECURITY;"
            f"CREATE POLICY tenants ON {schema}.docs USING (tenant = current_user);"
            f"CREATE VIEW {schema}.seen WITH (security_invoker) AS SELECT * FROM {schema}.docs;"
            f"CREATE TABLE {schema}.questions (id integer PRIMARY KEY, question text, documents jsonb, tenant name);"
            f"INSERT INTO {schema}.questions VALUES (1, 'heron', '[\"doc 1\"]', '{module_db.role('asker')}'),"
            f" (2, 'otter moss', '[\"doc 2\", \"{SECRET} 8\"]', '{module_db.role('asker')}');"
            f"ALTER TABLE {schema}.questions ENABLE ROW LEVEL SECURITY;"
            f"CREATE POLICY tenants ON {schema}.questions USING (tenant = current_user);"
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO ml_rag_user;"
            f"GRANT CREATE ON SCHEMA {schema} TO ml_rag_user"
        )
        mark(owner, f"{schema}.docs")
        mark(owner, f"{schema}.seen")
    owner.execute(
        "INSERT INTO shared.questions VALUES (3, %s, '[]', %s)", (f"{SECRET} heron", module_db.role("tenant"))
    )
    # the settings of a search depend on whether a table is known to be small, which autovacuum may find out of one
    owner.execute("ANALYZE shared.docs; ANALYZE alone.docs")
    return module_db.connect("asker")


def outcome(connection: Connection, statement: str, arguments: tuple[Any, ...]) -> str:
    """All that a client gets of a statement, as text, whichever of the two stores it was about."""
    told: list[Any] = []

    def note(d: psycopg.errors.Diagnostic) -> None:
        told.append((d.severity, d.sqlstate, d.message_primary, d.message_detail, d.message_hint, d.context))

    connection.add_notice_handler(note)
    try:
        found: Any = connection.execute(statement, arguments).fetchall()
    except psycopg.Error as e:
        d = e.diag
        found = (d.sqlstate, d.message_primary, d.message_detail, d.message_hint, d.context, d.table_name)
    finally:
        connection.remove_notice_handler(note)
    return repr((found, told)).replace("shared.", "alone.")


def same(connection: Connection, statement: str, *arguments: Any, echo: str = "") -> str:
    """The outcome, the same over both stores; ``{s}`` in the statement and in texts stands for the schema.

    ``echo``: what the caller has said itself and may be told.
    """
    both, own = (
        outcome(
            connection,
            statement.replace("{s}", schema),
            tuple(json.loads(json.dumps(a).replace("{s}", schema)) for a in arguments),
        )
        for schema in ("shared", "alone")
    )
    assert both == own
    assert SECRET not in (both.replace(echo, "") if echo else both)
    return both


def options(**more: Any) -> str:
    return json.dumps({"vector_store": ["{s}.docs"], "skip_generate": True, "n_citations": 12, **more})


# -- asking -----------------------------------------------------------------------------------------------------------

OVERLAP = {"segment_overlap": 5}
WORDS_ONLY = {"keyword_search": True, "semantic_search": False}
PATHS: dict[str, dict[str, Any]] = {
    "kNN": NEAR,
    "kNN, DOT": {**NEAR, "distance_metric": "DOT"},
    "kNN, EUCLIDEAN": {**NEAR, "distance_metric": "EUCLIDEAN"},
    "kNN, embedded question": {},
    "kNN, all": {**NEAR, "n_citations": 100},
    "kNN, the nearest": {**NEAR, "n_citations": 1},
    "overlap": {**NEAR, "retrieval_options": OVERLAP},
    "overlap, one hit": {**NEAR, "n_citations": 1, "retrieval_options": OVERLAP},
    "max_distance": {**NEAR, "retrieval_options": {"max_distance": 0.5}},
    "max_distance, auto": {**NEAR, "retrieval_options": {"max_distance": "auto"}},
    "max_distance, nothing is near": {**NEAR, "retrieval_options": {"max_distance": 0.01}, "abstain": False},
    "max_distance, nothing is near, abstaining": {
        **NEAR, "retrieval_options": {"max_distance": 0.01}, "skip_generate": False,
    },
    "percentage_distance": {**NEAR, "retrieval_options": {"percentage_distance": 10}},
    "percentage_distance, auto": {**NEAR, "retrieval_options": {"percentage_distance": "auto"}},
    "both thresholds": {**NEAR, "retrieval_options": {"max_distance": 0.6, "percentage_distance": 50}},
    "words": WORDS_ONLY,
    "words with distances": {**WORDS_ONLY, **NEAR, "retrieval_options": {"max_distance": 0.9}},
    "hybrid": {"keyword_search": True, **NEAR},
    "hybrid, few candidates": {"keyword_search": True, **NEAR, "hybrid_options": {"candidates": 12}},
    "hybrid, rrf": {"keyword_search": True, **NEAR, "hybrid_options": {"fusion": "rrf"}},
    "hybrid, overlap": {"keyword_search": True, **NEAR, "retrieval_options": OVERLAP},
    "rerank": {**NEAR, "rerank": {"candidates": 30}},
    "rerank, hybrid": {**NEAR, "rerank": {"model_id": "hybrid"}},
    "rerank, min_score": {**NEAR, "rerank": {"min_score": 0.99}, "abstain": False},
    "everything": {
        "keyword_search": True, **NEAR, "rerank": {"candidates": 20}, "n_citations": 5,
        "retrieval_options": {"max_distance": 0.95, "percentage_distance": 900, "segment_overlap": 2},
    },
    "the other's document": {**NEAR, "document_name": [f"{'zanzi'}bar 8"], "abstain": False},
    "without the other's documents": {**NEAR, "exclude_document_name": ["doc 1"]},
    "a range, where the other has a text": {**NEAR, "filters": {"year": {"gte": 2004}}},
    "a pattern": {**NEAR, "filters": {"tags": {"like": "h%"}}},
    "what is not": {**NEAR, "filters": {"not": {"year": {"lt": 2004}}}},
    "a column": {**NEAR, "filters": {"segment_number": {"between": [2, 6]}}},
    "the policy's column": {**NEAR, "filters": {"tenant": {"like": "%tenant"}}, "abstain": False},
    "a required word": {**NEAR, "required_keywords": ["heron"]},
    "an excluded word": {**NEAR, "excluded_keywords": ["heron"]},
    "a view with its caller's rights": {**NEAR, "vector_store": ["{s}.seen"], "retrieval_options": OVERLAP},
    "all stores of the schema": {**NEAR, "vector_store": None, "schema": ["{s}"], "exclude_vector_store": ["seen"]},
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_is_what_it_were_without_the_others_rows(stores: Connection, path: str) -> None:
    # its name is the caller's own guess, told to be none's in either case
    echo = f"{SECRET} 8" if path == "the other's document" else ""
    document = same(stores, "SELECT ml_rag_answer(%s, %s::jsonb)", QUERY, options(**PATHS[path]), echo=echo)
    same(stores, "SELECT * FROM ml_rag_search(%s, %s::jsonb)", QUERY, options(**PATHS[path]), echo=echo)
    asked = options(**{**PATHS[path], "skip_generate": False})
    generated = same(stores, "CALL ml_rag(%s, %s::jsonb)", QUERY, asked, echo=echo)
    if path not in ("the other's document", "the policy's column", "max_distance, nothing is near"):
        assert "citations" in document or "min_score" in path
        assert "fake answer to" in generated or "abstaining" in path or "min_score" in path


@pytest.mark.parametrize("become", ["SET ROLE", "SET SESSION AUTHORIZATION"])
def test_plans_that_a_session_keeps_show_no_role_what_another_sees(
    stores: Connection, module_db: Database, become: str
) -> None:
    """Many roles on one connection, as behind a pool; a plan is kept from its sixth run on at the latest."""
    session = module_db.connect()
    roles = [sql.SQL("DEFAULT"), sql.Identifier(module_db.role("tenant")), sql.Identifier(module_db.role("asker"))]
    if become == "SET ROLE":
        roles[0] = sql.SQL("NONE")
    statement = "SELECT * FROM ml_rag_search(%s, %s::jsonb)"
    differing = 0
    for path in PATHS:
        asked = (QUERY, options(**PATHS[path]).replace("{s}", "shared"))
        expected = outcome(stores, statement, asked)
        seen = set()
        for _ in range(7 if path in ("kNN", "hybrid, overlap") else 1):
            for role in roles:
                session.execute(sql.SQL("{} {}").format(sql.SQL(become), role))
                found = outcome(session, statement, asked)
                seen.add(found)
            assert found == expected, path
        differing += len(seen) > 1
    assert differing > len(PATHS) / 2


def test_the_rows_are_worth_hiding(stores: Connection, module_db: Database) -> None:
    """To whom they belong they are what each of those calls finds first; so the other tests can fail."""
    given = json.dumps({"vector_store": ["shared.docs"], "keyword_search": True, "n_citations": 100, **NEAR})
    call = "SELECT min(distance), string_agg(segment, '') FROM ml_rag_search(%s, %s)"
    theirs = module_db.connect("tenant").execute(call, (QUERY, given)).fetchone()
    mine = stores.execute(call, (QUERY, given)).fetchone()
    assert theirs is not None
    assert mine is not None
    assert theirs[0] < mine[0]
    assert SECRET in theirs[1]


def test_words_of_the_others_are_found_by_nobody_else(stores: Connection) -> None:
    """With statistics over all rows, which is the default for an index, the scores may say something, rows nothing."""
    rank = "SELECT array_agg((document_id, segment_number)) FROM ml_rag_search(%s, %s::jsonb)"
    for query in (SECRET, f"{SECRET} heron"):
        both = outcome(stores, rank, (query, options(**WORDS_ONLY).replace("{s}", "shared")))
        own = outcome(stores, rank, (query, options(**WORDS_ONLY).replace("{s}", "alone")))
        assert both == own


@pytest.mark.parametrize("path", ["kNN", "hybrid", "both thresholds", "everything"])
def test_how_an_answer_came_about_tells_of_ones_own_rows(stores: Connection, path: str) -> None:
    """Option explain: plans, candidates, thresholds; all of it but the times."""
    call = "SELECT (ml_rag_answer(%s, %s::jsonb) -> 'explain') - 'milliseconds'"
    assert "candidates" in same(stores, call, QUERY, options(**PATHS[path], explain=True))


# -- stages, batches, measuring ---------------------------------------------------------------------------------------


def test_a_forged_store_shows_nothing_either(stores: Connection) -> None:
    """A store as discovery describes it is a value too; whatever it says is read with the caller's rights."""
    store = (
        "ROW('x', '{s}.docs', NULL, 'segment_embedding', 'metadata', 'tenant', 'document_id', 'segment_number', NULL,"
        " 'vector', NULL, 'bigint', 'integer', 'trusted', true)::ml_rag.store"
    )
    for given in ({"document_name": [f"{SECRET} 8"]}, {"filters": {"document_id": 8}}, {"filters": {"topics": 1}}):
        same(stores, f"SELECT * FROM ml_rag.filter({store}, %s::jsonb)", json.dumps(given), echo=f"{SECRET} 8")


BATCHES = ("ml_rag_table", "ml_generate_table", "ml_embed_table")


@pytest.mark.parametrize("routine", BATCHES)
def test_a_batch_reads_and_writes_ones_own_rows_only(stores: Connection, routine: str) -> None:
    given = json.dumps({"vector_store": ["{s}.docs"]}) if routine == "ml_rag_table" else None
    counted = same(
        stores,
        f"CALL {routine}('{{s}}.questions.question', '{{s}}.{routine}.answer', %s::jsonb)",
        given and json.loads(given) and given,
    )
    assert '"rows": 2' in counted or "'rows': 2" in counted
    assert "'failed': 0" in counted
    same(stores, f"SELECT id, answer::text FROM {{s}}.{routine} ORDER BY id")


@pytest.mark.parametrize(
    "more", [{}, {"generate": True}, {"judge_model_id": "fake-generate"}, {"match": "document_id"}]
)
def test_a_run_measures_ones_own_rows_only(stores: Connection, more: dict[str, Any]) -> None:
    measured = json.dumps({"options": {"vector_store": ["{s}.docs"], "n_citations": 20}, "keep": False, **more})
    found = same(
        stores,
        "SELECT r -> 'questions', r -> 'measures', r -> 'counted', r -> 'errors'"
        " FROM ml_rag_evaluate('{s}.questions', %s::jsonb) AS r",
        measured,
        # a guess of the caller's, told to be wrong whether or not another tenant has such a document
        echo=f'The first: "{SECRET} 8".',
    )
    assert "recall@10" in found


def test_thresholds_are_those_of_ones_own_rows(stores: Connection) -> None:
    found = same(
        stores,
        "SELECT c::text FROM ml_rag.calibrate('SELECT question, mod(id, 2) = 0 AS answerable FROM {s}.questions',"
        " %s::jsonb) AS c",
        json.dumps({"vector_store": ["{s}.docs"]}),
    )
    assert "max_distance" in found


def test_kept_runs_and_their_citations_are_ones_own(stores: Connection, module_db: Database) -> None:
    kept = json.dumps({"options": {"vector_store": ["shared.docs"], "n_citations": 20}, "generate": True})
    stores.execute("SELECT ml_rag_evaluate('shared.questions', %s)", (kept,))
    shown = str(stores.execute("SELECT q::text FROM ml_rag.evaluation_question AS q").fetchall())
    assert "doc 1" in shown
    assert SECRET not in shown
    other = module_db.connect("tenant")
    assert other.execute("SELECT count(*) FROM ml_rag.evaluation_question").fetchone() == (0,)
    with error("22023", "run does not exist"):
        other.execute("SELECT * FROM ml_rag_compare_runs(%s, %s)", (1, 1))


def test_loading_does_not_tell_what_another_has_loaded(db: Database, owner: Connection) -> None:
    """The same names, contents and prefixes, there already for the other tenant in one of the two stores."""
    roles = {name: sql.Identifier(db.role(name)) for name in ("asker", "tenant")}
    for schema in ("shared", "alone"):
        owner.execute(
            f"CREATE SCHEMA {schema}; GRANT USAGE ON SCHEMA {schema} TO ml_rag_user;"
            f"CREATE TABLE {schema}.docs ({COLUMNS.replace('tenant name', 'tenant name DEFAULT current_user')});"
            f"ALTER TABLE {schema}.docs ENABLE ROW LEVEL SECURITY;"
            f"CREATE POLICY tenants ON {schema}.docs USING (tenant = current_user);"
            f"GRANT SELECT, INSERT, DELETE ON {schema}.docs TO ml_rag_user"
        )
        mark(owner, f"{schema}.docs")
    for role in roles.values():
        owner.execute(sql.SQL("GRANT ml_rag_loader TO {}").format(role))
    try:
        names, contents = ["a.txt", "dir/b.txt"], [b"alpha", b"beta"]
        hashes = [hashlib.sha256(content).hexdigest() for content in contents]
        load = "SELECT r - 'seconds' FROM ml_rag.load_documents('{s}.docs', %s, %s, NULL) AS r"
        other = db.connect("tenant")
        other.execute(load.replace("{s}", "shared"), (names, contents))
        asker = db.connect("asker")
        unchanged = "SELECT ml_rag.unchanged_documents('{s}.docs', %s, %s, NULL)"
        for statement, arguments, expected in (
            (unchanged, (names, hashes), "([], [])"),
            ("SELECT ml_rag.documents_below('{s}.docs', %s)", ("",), "([], [])"),
            ("SELECT ml_rag.remove_documents('{s}.docs', %s)", (names,), "[(0,)]"),
            ("SELECT * FROM ml_rag._document_states('{s}.docs', %s)", (names,), "([], [])"),
            (load, (names, contents), "'loaded': 2"),
            (load, (names, contents), "'unchanged': 2"),
            (unchanged, (names, hashes), "dir/b.txt"),
            ("SELECT ml_rag.remove_documents('{s}.docs', %s)", (names[:1],), "[(1,)]"),
        ):
            shared, alone = (outcome(asker, statement.replace("{s}", s), arguments) for s in ("shared", "alone"))
            assert shared == alone
            assert expected in shared
        # and the other's are as they were
        assert len(other.execute(unchanged.replace("{s}", "shared"), (names, hashes)).fetchall()) == 2
    finally:
        for role in roles.values():
            owner.execute(sql.SQL("REVOKE ml_rag_loader FROM {}").format(role))


def test_discovery_and_the_word_index_tell_the_same(stores: Connection) -> None:
    same(stores, "SELECT d.* FROM ml_rag.discover(ARRAY['{s}.docs', '{s}.seen']) AS d")
    same(stores, "SELECT * FROM ml_rag.keyword_index AS v WHERE v.store = '{s}.docs'::regclass")
    for terms in ("{heron}", "{zanzibar}", "{heron,zanzibar,otter}"):
        same(
            stores,
            "SELECT keys, scores FROM public.keyword_scores('{s}.docs'::regclass, 'segment',"
            f" '{{{{document_id,segment_number}}}}', '{terms}', '{{1,1,1}}', 100)".replace("{{", "{").replace(
                "}}", "}"
            ),
        )
    # a forged row key brings no row
    every = "ARRAY(SELECT concat('(', b, ',', i, ')') FROM generate_series(0, 30) AS b, generate_series(1, 99) AS i)"
    same(
        stores,
        "SELECT keys, scores FROM public.keyword_scores('{s}.docs'::regclass, 'segment',"
        " '{document_id,segment_number}', '{heron,zanzibar}', '{1,1}', 100, " + every + ")",
    )


# -- other relations --------------------------------------------------------------------------------------------------


def test_a_view_without_its_callers_rights_shows_what_its_owner_sees(
    stores: Connection, module_owner: Connection
) -> None:
    """As everywhere in PostgreSQL: who makes such a view decides who sees what. docs/security.md says so."""
    module_owner.execute(
        "CREATE VIEW shared.open AS SELECT * FROM shared.docs; GRANT SELECT ON shared.open TO ml_rag_user"
    )
    mark(module_owner, "shared.open")
    try:
        found = outcome(stores, "SELECT ml_rag_answer(%s, %s)", (QUERY, options(**NEAR, vector_store=["shared.open"])))
        assert SECRET in found
    finally:
        module_owner.execute("DROP VIEW shared.open")


@pytest.mark.parametrize("index", ["hnsw", "ivfflat"])
@pytest.mark.parametrize("size", [3, 40])
def test_the_tenant_with_few_rows_gets_its_k_through_an_approximate_index(
    db: Database, owner: Connection, index: str, size: int
) -> None:
    """The others' thousands lie between the question and the tenant's rows."""
    with_lists = " WITH (lists = 40)" if index == "ivfflat" else ""
    owner.execute(f"CREATE TABLE docs ({COLUMNS.replace('16', '3')})")
    owner.execute(
        "INSERT INTO docs SELECT 'd', '{}', i, 1, 's' || i, ARRAY[cos(i * 0.001), sin(i * 0.001), 0.1]::vector,"
        " CASE WHEN i > 3000 - %s THEN %s ELSE %s END FROM generate_series(1, 3000) AS i",
        (size, db.role("asker"), db.role("tenant")),
    )
    owner.execute(
        f"CREATE INDEX ON docs USING {index} (segment_embedding vector_cosine_ops){with_lists}; ANALYZE docs;"
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (tenant = current_user);"
        "GRANT SELECT ON docs TO ml_rag_user"
    )
    mark(owner, "docs")
    asker = db.connect("asker")
    call = "SELECT document_id FROM ml_rag_search('q', %s)"
    for k in (2, size, size + 5):
        given = {"query_embedding": [1, 0, 0.1], "n_citations": k}
        found = [i for (i,) in asker.execute(call, (json.dumps(given),)).fetchall()]
        assert found == list(range(3001 - size, 3001))[:k]
        filtered = {**given, "filters": {"document_id": {"gt": 3000 - size // 2}}}
        found = [i for (i,) in asker.execute(call, (json.dumps(filtered),)).fetchall()]
        assert found == list(range(3001 - size // 2, 3001))[:k]


def test_partitions_and_children_are_read_by_the_policies_of_the_parent(db: Database, owner: Connection) -> None:
    owner.execute(
        f"CREATE TABLE docs ({COLUMNS.replace('16', '3')}) PARTITION BY RANGE (document_id);"
        "CREATE TABLE docs_1 PARTITION OF docs FOR VALUES FROM (0) TO (50);"
        "CREATE TABLE docs_2 PARTITION OF docs DEFAULT"
    )
    owner.execute(
        "INSERT INTO docs SELECT 'd', '{}', i, 1, 's' || i, '[1,0,0]', CASE WHEN i %% 2 = 0 THEN %s ELSE %s END"
        " FROM generate_series(1, 100) AS i",
        (db.role("asker"), db.role("tenant")),
    )
    owner.execute(
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (tenant = current_user);"
        "GRANT SELECT ON docs TO ml_rag_user"
    )
    mark(owner, "docs")
    found = (
        db.connect("asker")
        .execute("""SELECT document_id FROM ml_rag_search('q', '{"query_embedding": [1,0,0], "n_citations": 100}')""")
        .fetchall()
    )
    assert sorted(i for (i,) in found) == list(range(2, 101, 2))
