"""ground/trust, pipeline/isolate: a store that a call does not name, and what its owner can do."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from support.cluster import Connection, Database
from support.hostile_server import embeddings, hostile, reply
from support.planting import COLUMNS, QUESTION, ROW, ask, publish, texts, warnings
from support.processes import over_and_over
from support.stores import as_text, create_store, error, fake_embedding, mark, search

#: made by another role in its own schema, readable by everybody
PLANTS: dict[str, str] = {
    "a plain table": "",
    "a column without dimensions": (
        "ALTER TABLE evil.kb ALTER segment_embedding TYPE vector; UPDATE evil.kb SET segment_embedding = '[1,2,3]'"
    ),
    "a policy that takes seconds": (
        "ALTER TABLE evil.kb ENABLE ROW LEVEL SECURITY; "
        "CREATE POLICY p ON evil.kb USING (length(repeat('x', 90000000)) > 0"
        " AND length(upper(repeat('y', 90000000))) > segment_number AND length(upper(repeat(segment, 900000))) > 0)"
    ),
    "a view that fails": (
        "ALTER TABLE evil.kb RENAME TO t; CREATE VIEW evil.kb AS SELECT document_name, metadata, document_id,"
        " 1 / (segment_number - 1) AS segment_number, segment, segment_embedding FROM evil.t"
    ),
    "a segment of 50 MB": "UPDATE evil.kb SET segment = repeat('contract notice ', 3200000)",
    "a document of another one's name": "UPDATE evil.kb SET document_name = 'g'",
    "columns of other types": (
        "ALTER TABLE evil.kb ALTER document_id TYPE xml USING '<a/>',"
        ' ALTER metadata TYPE json USING \'{"a": "\\u0000"}\','
        " ALTER document_name TYPE point USING '(1,1)'"
    ),
    "a filtered column of another type": "ALTER TABLE evil.kb ADD topic point",
    "a keyword index that is nonsense": (
        "ALTER TABLE evil.kb ADD PRIMARY KEY (document_id); SELECT ml_rag.enable_keyword_search('evil.kb');"
        "ALTER TABLE evil.kb ALTER document_id TYPE text"
    ),
    "a comment of 5 MB": (
        "DO $$BEGIN EXECUTE format('COMMENT ON COLUMN evil.kb.segment_embedding IS %L',"
        " repeat('GENAI_OPTIONS=', 350000)); END$$"
    ),
    "a comment of 100 MB": (
        "DO $$BEGIN EXECUTE format('COMMENT ON COLUMN evil.kb.segment_embedding IS %L',"
        " 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed ' || repeat('x', 100000000)); END$$"
    ),
    "system columns": (
        "COMMENT ON COLUMN evil.kb.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,"
        "SEGMENT=ctid,DOCUMENT_NAME=xmin,DOCUMENT_ID=tableoid,METADATA=ctid'"
    ),
    "node groups that are none": (
        "ALTER TABLE evil.kb ADD PRIMARY KEY (document_id, segment_number);"
        + "".join(
            f"CREATE TABLE evil.n{n} (document_id bigint, segment_number integer, node_number integer, node text,"
            " node_embedding vector(16), text_hash bigint,"
            " FOREIGN KEY (document_id, segment_number) REFERENCES evil.kb);"
            f"COMMENT ON TABLE evil.n{n} IS 'ML_RAG_NODE_GROUP={comment}';"
            for n, comment in enumerate(
                [
                    *("7", "[1]", '{"name": "sentences", "merge": 3, "embed_model_id": "fake-embed"}', "{"),
                    '{"name": "sentences", "merge": false, "embed_model_id": "fake-embed", "document": {"a": 1}}',
                ]
            )
        )
        + "CREATE TABLE evil.deep (document_id bigint, segment_number integer,"
        " FOREIGN KEY (document_id, segment_number) REFERENCES evil.kb);"
        " DO $$BEGIN EXECUTE format('COMMENT ON TABLE evil.deep IS %L',"
        " 'ML_RAG_NODE_GROUP=' || repeat('[', 1000000)); END$$;"
        "COMMENT ON COLUMN evil.kb.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'"
    ),
}

PATHS: dict[str, dict[str, Any]] = {
    "semantic": {},
    "euclidean": {"distance_metric": "EUCLIDEAN"},
    "keyword": {"semantic_search": False, "keyword_search": True},
    "hybrid": {"keyword_search": True},
    "filters": {"filters": {"topic": "law"}},
    "filters that deny": {"filters": {"topic": {"ne": "sports"}}},
    "keywords": {"required_keywords": ["contract"]},
    "overlap": {"retrieval_options": {"segment_overlap": 1}},
    "reranked": {"rerank": {"model_id": "hybrid"}},
    "documents that the question names": {"query_options": {"document_names": True}},
    "names of no document": {"document_name": ["g", *(f"{i:09d}" for i in range(10))]},
    "nodes": {"arms": [{"search": "semantic"}, {"search": "keyword", "in": "sentences"}]},
    "a whole document": {"document_name": ["g"], "model_options": {"task": "summarization"}},
}


@pytest.fixture(scope="module")
def prepared(module_db: Database) -> Database:
    """A store of a superuser, with a keyword index; the tenant has a schema of its own."""
    owner = module_db.connect()
    create_store(owner, "good", type="vector(16)")
    for i, text in enumerate(("contract notice", "contract period of notice", "period")):
        owner.execute(
            "INSERT INTO good VALUES ('g', '{\"topic\": \"law\"}', 1, %s, %s, %s)",
            (10 * i, text, as_text(fake_embedding(text))),
        )
    owner.execute("ALTER TABLE good ADD topic text NOT NULL DEFAULT 'law'; SELECT ml_rag.enable_keyword_search('good')")
    owner.execute("CALL ml_rag.create_node_group('good', 'sentences', '{\"transform\": \"sentence\"}')")
    owner.execute("CREATE TABLE questions (id integer PRIMARY KEY, question text, documents jsonb, answer jsonb)")
    owner.execute("INSERT INTO questions VALUES (1, %s, '[\"g\"]')", (QUESTION,))
    owner.execute("GRANT SELECT, UPDATE ON questions TO PUBLIC")
    owner.execute(f"GRANT CREATE ON DATABASE {module_db.name} TO {module_db.role('tenant')}")
    module_db.release()
    return module_db


@pytest.fixture
def good(prepared: Database) -> Iterator[Database]:
    yield prepared
    prepared.release()


@pytest.fixture
def attacker(good: Database) -> Iterator[Connection]:
    connection = good.connect("tenant")
    connection.execute("CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC")
    connection.execute(f"CREATE TABLE evil.kb ({COLUMNS}); INSERT INTO evil.kb VALUES {ROW}")
    yield connection
    connection.execute("DROP SCHEMA evil CASCADE")


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_store_leaves_the_calls_of_others_as_they_are(
    good: Database, attacker: Connection, plant: str
) -> None:
    asker = good.connect("asker")
    before = {path: ask(asker, **options) for path, options in PATHS.items()}
    assert all(texts(document) for document, _ in before.values())
    publish(attacker, PLANTS[plant])
    for path, options in PATHS.items():
        said = warnings(asker)
        document, seconds = ask(asker, **options)
        assert document == before[path][0], (path, said)
        assert seconds < before[path][1] * 10 + 2, path
        assert all(message.startswith("no document is named") for message, _ in said), said


def test_planted_comments_cost_others_little(good: Database, attacker: Connection) -> None:
    asker, superuser = good.connect("asker"), good.connect()

    def discovering(most: float) -> None:
        began = time.monotonic()
        for _ in range(5):
            asker.execute("SELECT * FROM ml_rag.discover()")
            superuser.execute("SELECT * FROM ml_rag.node_group WHERE store = 'good'::regclass")
        assert time.monotonic() - began < most

    publish(attacker, PLANTS["node groups that are none"])
    discovering(2)
    publish(attacker, PLANTS["a comment of 100 MB"])
    discovering(2)


# -- stores of trusted owners -----------------------------------------------------------------------------------------


@pytest.fixture
def publisher(attacker: Connection, grants: Callable[[str], None]) -> Connection:
    """The attacker, whom everybody trusts now, and whose stores may still fail."""
    grants("GRANT ml_rag_publisher TO {tenant}")
    return attacker


@pytest.mark.parametrize("plant", ["a plain table", "a column without dimensions", "columns of other types"])
def test_batches_and_evaluations_go_on_too(good: Database, publisher: Connection, plant: str) -> None:
    publish(publisher, PLANTS[plant])
    asker = good.connect("asker")
    rows = search(asker, QUESTION, {"n_citations": 5})
    assert "contract notice" in [r[5] for r in rows if r[1] == "public.good"]
    report: Any = asker.execute(
        "CALL ml_rag_table('public.questions.question', 'public.questions.answer', '{\"skip_generate\": true}')"
    ).fetchone()
    assert (report[0]["rows"], report[0]["failed"]) == (1, 0)
    report = asker.execute("SELECT ml_rag_evaluate('public.questions'::regclass, '{\"keep\": false}')").fetchone()
    assert report[0]["errors"] in ({}, None)
    good.connect().execute("UPDATE questions SET answer = NULL")


def test_what_was_left_out_is_said(good: Database, publisher: Connection) -> None:
    publish(publisher, PLANTS["a column without dimensions"])
    asker = good.connect("asker")
    said = warnings(asker)
    document, _ = ask(asker, explain=True)
    assert document["vector_store"] == ["public.good"]
    ((message, detail),) = said
    assert message == '"evil.kb" cannot be searched; ignored'
    assert detail == "22000: different vector dimensions 3 and 16."
    (store,) = [s for s in document["explain"]["stores"] if s["vector_store"] == "evil.kb"]
    assert store["semantic"] == {"skipped": "22000: different vector dimensions 3 and 16."}
    # who names it gets its error
    with error("22000", ours=False):
        ask(asker, vector_store=["evil.kb"])
    with error("22000", ours=False):
        ask(asker, vector_store=["evil.kb", "public.good"])
    # and so does who has no other one
    with error("22000", ours=False):
        ask(asker, exclude_vector_store=["good"])


def test_node_groups_that_are_none_are_left_out(good: Database, publisher: Connection) -> None:
    publish(publisher, PLANTS["node groups that are none"])
    document, _ = ask(good.connect("asker"), arms=[{"search": "semantic", "in": "sentences"}])
    assert texts(document)


@pytest.mark.parametrize("model", ["nosuch", "fake-generate"])
@pytest.mark.parametrize("what", ["node group", "embedding"])
def test_a_model_that_cannot_embed_is_left_out(good: Database, publisher: Connection, model: str, what: str) -> None:
    """It was taken away from the model server, say."""
    owner, asker = good.connect(), good.connect("asker")
    if what == "node group":
        options = {"name": "sentences", "merge": False, "embed_model_id": model}
        publish(
            publisher,
            "ALTER TABLE evil.kb ADD PRIMARY KEY (document_id, segment_number);"
            "CREATE TABLE evil.n (document_id bigint, segment_number integer, node_number integer, node text,"
            " node_embedding vector(16), text_hash bigint,"
            " FOREIGN KEY (document_id, segment_number) REFERENCES evil.kb);"
            f"COMMENT ON TABLE evil.n IS 'ML_RAG_NODE_GROUP={json.dumps(options)}';"
            "COMMENT ON COLUMN evil.kb.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'",
        )
        arm = {"search": "semantic", "in": "sentences"}
    else:
        owner.execute("CALL ml_rag.add_embedding('good', 'more', '{\"embed_model_id\": \"fake-embed\"}')")
        publish(
            publisher,
            "ALTER TABLE evil.kb ADD more vector(16);"
            f"COMMENT ON COLUMN evil.kb.more IS 'GENAI_OPTIONS=EMBED_MODEL_ID={model},EMBEDDING=more';"
            "COMMENT ON COLUMN evil.kb.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'",
        )
        arm = {"search": "semantic", "embedding": "more"}
    said = warnings(asker)
    try:
        document, _ = ask(asker, arms=[arm])
        assert texts(document)
        assert any(model in message and "left out" in message for message, _ in said)
        # who names the store gets its error, and so does who has no other one
        for options in ({"vector_store": ["evil.kb", "public.good"]}, {"exclude_vector_store": ["good"]}):
            with error("22023", model):
                ask(asker, arms=[arm], **options)
    finally:
        if what == "embedding":
            owner.execute("SELECT ml_rag.drop_embedding('good', 'more')")


@pytest.mark.parametrize("path", ["semantic", "hybrid", "overlap", "documents that the question names"])
def test_a_locked_table_is_waited_for_a_second(good: Database, publisher: Connection, path: str) -> None:
    publish(publisher)
    asker = good.connect("asker")
    expected = texts(ask(asker, **PATHS[path], exclude_vector_store=["evil.kb"])[0])
    with publisher.transaction():
        publisher.execute("LOCK TABLE evil.kb IN ACCESS EXCLUSIVE MODE")
        said = warnings(asker)
        document, seconds = ask(asker, **PATHS[path])
    assert texts(document) == expected
    assert 1 < seconds < 8
    assert ('"evil.kb" cannot be searched; ignored', "55P03") in [(m, d[:5]) for m, d in said]


def test_a_hint_waits_for_a_locked_table_no_longer(good: Database, publisher: Connection) -> None:
    """Why no document is found that is read as a whole is looked for in the metadata of all stores."""
    publish(publisher)
    asker = good.connect("asker")
    asker.execute("SET statement_timeout = '10s'")
    whole = {"document_name": ["none"], "filters": {"colour": "x"}, "model_options": {"task": "summarization"}}
    with publisher.transaction():
        publisher.execute("LOCK TABLE evil.kb IN ACCESS EXCLUSIVE MODE")
        with error("P0002", "no segment found"):
            ask(asker, **whole)


CHANGES: dict[str, str] = {
    "dropped": "DROP TABLE evil.kb",
    "renamed": "ALTER TABLE evil.kb RENAME TO other",
    "a column less": "ALTER TABLE evil.kb DROP segment",
    "a policy": (
        "ALTER TABLE evil.kb ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON evil.kb USING (1 / (segment_number - 1) = 1)"
    ),
}


@pytest.mark.parametrize("kind", ["table", "partitioned"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_store_that_changes_between_discovery_and_search_is_left_out(
    good: Database, publisher: Connection, change: str, kind: str
) -> None:
    if kind == "partitioned":
        publisher.execute(
            f"DROP TABLE evil.kb; CREATE TABLE evil.kb ({COLUMNS}) PARTITION BY LIST (document_id);"
            f"CREATE TABLE evil.kb_1 PARTITION OF evil.kb DEFAULT; INSERT INTO evil.kb VALUES {ROW}"
        )
    publish(publisher)
    asker = good.connect("asker")
    assert "evil.kb" in ask(asker)[0]["vector_store"]
    said = warnings(asker)
    publisher.execute("BEGIN")
    publisher.execute(CHANGES[change])
    # the call has found the store by then, and waits for its lock
    commit = threading.Timer(0.4, publisher.execute, ["COMMIT"])
    commit.start()
    document, seconds = ask(asker)
    commit.join()
    assert seconds > 0.1
    assert "contract notice" in texts(document)
    assert "evil.kb" not in document["vector_store"]
    assert [message for message, _ in said] == ['"evil.kb" cannot be searched; ignored']


@pytest.mark.parametrize("change", CHANGES)
def test_a_store_stays_as_it_is_while_the_question_is_embedded(
    good: Database, publisher: Connection, model_server: str, local_sockets: Path, change: str
) -> None:
    publish(publisher)
    publisher.execute("SET lock_timeout = '100ms'")
    refused: list[str | None] = []

    def handler(client: socket.socket, request: bytes) -> None:
        # the stores are known by then
        try:
            publisher.execute(CHANGES[change])
        except psycopg.Error as e:
            refused.append(e.sqlstate)
        reply(embeddings(fake_embedding(QUESTION)))(client, request)

    asker, owner = good.connect("asker"), good.connect()
    said = warnings(asker)
    with hostile(local_sockets, handler, owner=owner):
        try:
            document, _ = ask(asker)
        finally:
            owner.execute("SELECT ml_rag.configure('model_server', %s)", (model_server,))
    assert set(refused) == {"55P03"}
    assert "evil.kb" in document["vector_store"]
    assert said == []


def test_a_cancelled_call_is_cancelled(good: Database, publisher: Connection) -> None:
    """Errors are caught a store; a cancellation is not such an error."""
    publish(publisher)
    asker = good.connect("asker")
    asker.execute("SET statement_timeout = '50ms'")
    with publisher.transaction():
        publisher.execute("LOCK TABLE evil.kb IN ACCESS EXCLUSIVE MODE")
        with error("57014", ours=False):
            ask(asker)


def test_a_filter_that_is_wrong_for_every_store_is_an_error(good: Database, publisher: Connection) -> None:
    publish(publisher)
    for options in ({}, {"semantic_search": False, "keyword_search": True}):
        with error("22023", "unknown operator"):
            ask(good.connect("asker"), filters={"topic": {"equals": 1}}, **options)


def test_many_stores_are_warned_of_in_few_words(good: Database, publisher: Connection) -> None:
    for i in range(25):
        publisher.execute(f"CREATE TABLE evil.t{i} (LIKE evil.kb)")
        publish(publisher, table=f"evil.t{i}")
    asker = good.connect("asker")
    said = warnings(asker)
    ask(asker, semantic_search=False, keyword_search=True)
    ((message, detail),) = said
    assert message == "25 vector stores have no keyword index; keyword search ignores them"
    assert "evil.t0, evil.t1, " in detail
    assert detail.endswith(", ….")
    for i in range(25):
        publisher.execute(f"ALTER TABLE evil.t{i} ALTER segment_embedding TYPE vector(3)")
    said = warnings(asker)
    ask(asker)
    assert len(said) == 21
    assert said[-1][0] == "5 more vector stores cannot be searched; ignored"


def test_the_best_of_many_stores_are_cited(good: Database, publisher: Connection) -> None:
    """Of each store's hits only those are kept that can still be cited."""
    publisher.execute("ALTER TABLE evil.kb ADD PRIMARY KEY (document_id, segment_number)")
    publisher.execute("SELECT ml_rag.enable_keyword_search('evil.kb')")
    for i in range(12):
        publisher.execute(f"CREATE TABLE evil.t{i} (LIKE evil.kb INCLUDING ALL)")
        publisher.execute(f"SELECT ml_rag.enable_keyword_search('evil.t{i}')")
        for j in range(4):
            text = "contract notice period " + "other " * ((7 * i + 5 * j) % 23)
            publisher.execute(
                f"INSERT INTO evil.t{i} VALUES ('planted', '{{}}', {j}, 1, %s, %s)",
                (text, as_text(fake_embedding(text))),
            )
        publish(publisher, table=f"evil.t{i}")
    asker = good.connect("asker")
    for options in ({}, {"semantic_search": False, "keyword_search": True}):
        best: Any = ask(asker, **options, n_citations=100)[0]["citations"]
        assert ask(asker, **options, n_citations=5)[0]["citations"] == best[:5]


# -- whose stores ------------------------------------------------------------------------------------------------------


VIEW = "ALTER TABLE evil.kb RENAME TO t; CREATE VIEW evil.kb AS SELECT * FROM evil.t"


def found(connection: Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT vector_store, found FROM ml_rag.discover()").fetchall())


@pytest.fixture
def grants(good: Database) -> Iterator[Callable[[str], None]]:
    owner = good.connect()
    roles = {name: sql.Identifier(good.role(name)) for name in ("asker", "tenant", "stranger")}
    undo: list[sql.Composable] = []

    def run(statement: str) -> None:
        owner.execute(sql.SQL(statement).format(**roles))
        if statement.startswith("GRANT"):
            revoke = statement.replace("GRANT", "REVOKE").replace(" TO ", " FROM ").removesuffix(" WITH ADMIN OPTION")
            undo.append(sql.SQL(revoke + " CASCADE").format(**roles))

    yield run
    for statement in reversed(undo):
        owner.execute(statement)


def test_a_publisher_s_view_is_searched_unasked(
    good: Database, attacker: Connection, grants: Callable[[str], None]
) -> None:
    publish(attacker, VIEW)
    asker = good.connect("asker")
    assert found(asker) == {"public.good": "trusted"}
    grants("GRANT ml_rag_publisher TO {tenant}")
    assert found(asker) == {"evil.kb": "trusted", "public.good": "trusted"}
    # code of one who is no superuser never runs as one
    assert found(good.connect()) == {"public.good": "trusted"}


@pytest.mark.parametrize(
    "named",
    [
        {"vector_store": ["evil.kb"]},
        {"vector_store": ["public.good", '"evil"."kb"']},
        {"vector_store": ["evil.later"]},
        {"arms": [{"search": "function", "function": "evil.score"}]},
        {"rerank": {"function": "evil.score"}},
    ],
)
def test_no_preset_names_for_a_superuser_what_a_publisher_made(
    good: Database, attacker: Connection, grants: Callable[[str], None], named: dict[str, Any]
) -> None:
    publish(attacker, VIEW)
    superuser, asker = good.connect(), good.connect("asker")
    grants("GRANT ml_rag_publisher TO {tenant}")
    superuser.execute("SELECT ml_rag.create_preset('kb', '{\"vector_store\": [\"public.good\"]}')")
    assert ask(superuser, preset="kb")[0]["vector_store"] == ["public.good"]
    # the function behind ml_rag.create_preset checks nothing
    attacker.execute("SELECT ml_rag._write_preset('kb', %s, NULL)", [Jsonb(named)])
    with error("42501", 'preset "kb" names what you do not trust', "does not trust", "in a call of ml_rag"):
        # options that are objects are laid over key by key
        ask(superuser, preset="kb", **({"rerank": {"candidates": 20}} if "rerank" in named else {}))
    if named == {"vector_store": ["evil.kb"]}:
        assert ask(asker, preset="kb")[0]["vector_store"] == ["evil.kb"]
        # the call's own counts
        assert ask(superuser, preset="kb", vector_store=["public.good"])[0]["vector_store"] == ["public.good"]
        assert ask(superuser, preset="kb", vector_store=["evil.kb"])[0]["vector_store"] == ["evil.kb"]


def test_no_setting_of_a_session_names_for_another_role_what_it_does_not_trust(
    good: Database, attacker: Connection, grants: Callable[[str], None]
) -> None:
    """One that was left in a pooled connection, or that the caller of a function with its owner's rights has made."""
    publish(attacker, VIEW)
    asker, superuser = good.connect("asker"), good.connect()
    roles = [sql.Identifier(good.role(role)) for role in ("asker", "tenant")]
    superuser.execute(sql.SQL("GRANT USAGE, CREATE ON SCHEMA public TO {}").format(roles[0]))
    asker.execute(
        "CREATE FUNCTION public.asked() RETURNS text[] LANGUAGE sql SECURITY DEFINER AS"
        " $$ SELECT array_agg(DISTINCT s.vector_store) FROM ml_rag_search('contract') AS s $$;"
        "CREATE PROCEDURE public.chatted() LANGUAGE plpgsql SECURITY DEFINER AS"
        " $$ DECLARE out jsonb; BEGIN CALL heatwave_chat('contract', out); END $$"
    )
    options = '{"vector_store": ["evil.kb"]}'
    chat = '{"tables": [{"schema_name": "evil", "table_name": "kb"}]}'
    for connection in (attacker, superuser):
        connection.execute(sql.SQL("SET ml_rag.options = {}; SET ml_rag.chat_options = {}").format(options, chat))
    superuser.execute(sql.SQL("SET ROLE {}").format(roles[0]))
    with error("42501", "setting ml_rag.options names what you do not trust", '"evil.kb"', "in a call of ml_rag"):
        superuser.execute("SELECT * FROM ml_rag_search('contract')")
    assert attacker.execute("SELECT public.asked()").fetchone() == (["public.good"],)
    for connection, chat_it in ((attacker, "CALL public.chatted()"), (superuser, "CALL heatwave_chat('contract')")):
        connection.execute("RESET ml_rag.options")
        with error("42501", "setting ml_rag.chat_options names what you do not trust", '"evil.kb"'):
            connection.execute(chat_it.encode())
    # what the role trusts, and what it sets itself
    superuser.execute('SET ml_rag.options = \'{"vector_store": ["public.good"]}\'')
    assert superuser.execute("SELECT count(*) > 0 FROM ml_rag_search('contract')").fetchone() == (True,)
    asker.execute(sql.SQL("SET ml_rag.options = {}").format(options))
    assert asker.execute("SELECT public.asked()").fetchone() == (["evil.kb"],)
    # what a superuser has set for all who connect
    name = sql.Identifier(good.name)
    superuser.execute(sql.SQL("RESET ROLE; ALTER DATABASE {} SET ml_rag.options = {}").format(name, options))
    try:
        with psycopg.connect(good.dsn, dbname=good.name) as session:
            session.execute(sql.SQL("SET ROLE {}").format(roles[0]))
            assert session.execute("SELECT count(*) > 0 FROM ml_rag_search('contract')").fetchone() == (True,)
    finally:
        superuser.execute(sql.SQL("ALTER DATABASE {} RESET ml_rag.options").format(name))
    # and what for the caller of the function alone
    tenant = sql.Identifier(good.role("tenant"))
    superuser.execute(sql.SQL("ALTER ROLE {} SET ml_rag.options = {}").format(tenant, options))
    try:
        attacker.execute(sql.SQL("SET ml_rag.options = {}").format(options))
        assert attacker.execute("SELECT public.asked()").fetchone() == (["public.good"],)
        superuser.execute(sql.SQL("ALTER ROLE {} SET ml_rag.options = {}").format(roles[0], options))
        assert attacker.execute("SELECT public.asked()").fetchone() == (["evil.kb"],)
    finally:
        for role in (tenant, roles[0]):
            superuser.execute(sql.SQL("ALTER ROLE {} RESET ml_rag.options").format(role))


def test_what_a_session_keeps_of_options_is_none_of_a_setting_that_was_there(
    good: Database, attacker: Connection
) -> None:
    """Whoever calls an inner function, which lays no levels below the options, leaves nothing for the next role."""
    publish(attacker, VIEW)
    asker, superuser = good.connect("asker"), good.connect()
    asker_role, tenant = (sql.Identifier(good.role(role)) for role in ("asker", "tenant"))
    superuser.execute(sql.SQL("GRANT USAGE, CREATE ON SCHEMA public TO {}").format(asker_role))
    asker.execute(
        "CREATE FUNCTION public.kept() RETURNS text[] LANGUAGE sql SECURITY DEFINER AS"
        " $$ SELECT array_agg(DISTINCT s.vector_store) FROM (SELECT * FROM ml_rag_search('contract')"
        " UNION ALL SELECT * FROM ml_rag_search('contract', '{\"filters\": {\"and\": []}}')) AS s $$"
    )
    superuser.execute(sql.SQL("SET ROLE {}").format(tenant))
    for connection in (attacker, superuser):
        connection.execute('SET ml_rag.options = \'{"vector_store": ["evil.kb"]}\'')
        for form in ("rows", "citations"):
            for options in ("{}", '{"skip_generate": true}', '{"filters": {}}', '{"filters": {"or": [{}]}}'):
                connection.execute(
                    "SELECT ml_rag._compile_question('contract', %s, NULL, %s, NULL, ml_rag._session_settings())",
                    (options, form),
                )
        connection.execute("RESET ml_rag.options")
    superuser.execute("RESET ROLE")
    assert attacker.execute("SELECT public.kept()").fetchone() == (["public.good"],)
    assert {row[1] for row in search(superuser, "contract")} == {"public.good"}
    assert ask(superuser)[0]["vector_store"] == ["public.good"]


@pytest.mark.parametrize(
    "options",
    [
        {"vector_store_columns": {"segment": "topic"}},
        {"citation_fields": ["metadata"]},
        {"return": "document"},
        {"retrieval_options": {"segment_overlap": 5}},
        {"explain": True},
        {"exclude_vector_store": ["public.good"]},
        {"n_citations": "?"},
    ],
    ids=str,
)
def test_a_function_with_its_owners_rights_shows_no_more_by_a_setting_of_its_caller(
    good: Database, options: dict[str, Any]
) -> None:
    """Neither other columns nor rows that its own filters leave out."""
    owner, caller = good.connect(), good.connect("tenant")
    owner.execute(
        "CREATE FUNCTION shown() RETURNS jsonb LANGUAGE sql SECURITY DEFINER AS $$ SELECT ml_rag_answer('contract', '"
        '{"vector_store": ["public.good"], "filters": {"segment_number": 0}, "skip_generate": true}'
        "') $$; REVOKE SELECT ON good FROM ml_rag_user"
    )
    try:
        (before,) = caller.execute("SELECT shown()").fetchone() or ()
        assert texts(before) == ["contract notice"]
        caller.execute("SELECT set_config('ml_rag.options', %s, false)", (json.dumps(options),))
        assert caller.execute("SELECT shown()").fetchone() == (before,)
        assert before["citations"][0].keys() == {"segment", "distance", "document_name"}
    finally:
        owner.execute("DROP FUNCTION shown(); GRANT SELECT ON good TO ml_rag_user")


def test_a_chat_with_its_owners_rights_shows_no_column_that_its_caller_names(good: Database) -> None:
    owner, caller = good.connect(), good.connect("tenant")
    owner.execute(
        "CREATE PROCEDURE told() LANGUAGE plpgsql SECURITY DEFINER AS"
        " $$ DECLARE out jsonb; BEGIN CALL heatwave_chat('contract', out); END $$"
    )
    chat = "SELECT set_config('ml_rag.chat_options', '{\"skip_generate\": true%s}', false)"
    try:
        caller.execute((chat % ', "table_metadata": {"segment": "topic"}').encode())
        with error("42501", "setting ml_rag.chat_options names columns", "any column shown", "Call ml_rag_chat"):
            caller.execute("CALL told()")
        caller.execute("CALL heatwave_chat('contract')")
        caller.execute((chat % "").encode())
        caller.execute("CALL told()")
    finally:
        owner.execute("DROP PROCEDURE told()")


def test_a_function_with_the_rights_of_the_session_counts_no_setting_of_a_role_that_it_has_taken(
    good: Database, attacker: Connection
) -> None:
    """SET ROLE leaves the session its user, whose function has that role for its caller."""
    publish(attacker, VIEW)
    owner = good.connect()
    owner.execute(
        "CREATE FUNCTION asked_as_user() RETURNS text[] LANGUAGE sql SECURITY DEFINER AS"
        " $$ SELECT array_agg(DISTINCT s.vector_store) FROM ml_rag_search('contract') AS s $$;"
        "CREATE PROCEDURE chatted_as_user() LANGUAGE plpgsql SECURITY DEFINER AS"
        " $$ DECLARE out jsonb; BEGIN CALL heatwave_chat('contract', out); END $$"
    )
    owner.execute('SET ml_rag.options = \'{"vector_store": ["evil.kb"]}\'')
    chat = "SELECT set_config('ml_rag.chat_options', '{\"skip_generate\": true%s}', false)"
    role = sql.SQL("SET ROLE {}").format(sql.Identifier(good.role("tenant")))
    try:
        assert owner.execute("SELECT asked_as_user()").fetchone() == (["evil.kb"],)
        owner.execute(role)
        assert owner.execute("SELECT asked_as_user()").fetchone() == (["public.good"],)
        owner.execute((chat % ', "tables": [{"schema_name": "evil", "table_name": "kb"}]').encode())
        with error("42501", "setting ml_rag.chat_options names what you do not trust", '"evil.kb"'):
            owner.execute("CALL chatted_as_user()")
        owner.execute((chat % ', "table_metadata": {"segment": "topic"}').encode())
        with error("42501", "setting ml_rag.chat_options names columns", "any column shown", "Call ml_rag_chat"):
            owner.execute("CALL chatted_as_user()")
        owner.execute((chat % "").encode())
        owner.execute("CALL chatted_as_user()")
        (kept,) = owner.execute("SELECT current_setting('ml_rag.chat_options')").fetchone() or ()
        assert not {"documents", "prompt"} & json.loads(kept).keys()
    finally:
        owner.execute("RESET ROLE; DROP FUNCTION asked_as_user(); DROP PROCEDURE chatted_as_user()")


def test_a_chat_with_its_owners_rights_leaves_its_caller_no_texts_of_documents(good: Database) -> None:
    """Of a function that shows the answer alone: the setting is its caller's."""
    owner, caller = good.connect(), good.connect("tenant")
    owner.execute(
        "CREATE FUNCTION said() RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS"
        " $$ DECLARE out jsonb; BEGIN CALL heatwave_chat('contract', out); RETURN out ->> 'response'; END $$;"
        "REVOKE SELECT ON good FROM ml_rag_user"
    )
    setting = "SELECT current_setting('ml_rag.chat_options')"
    try:
        caller.execute('SET ml_rag.chat_options = \'{"retrieve_top_k": 100, "return_prompt": true}\'')
        said = caller.execute("SELECT said()").fetchone()
        (kept,) = caller.execute(setting).fetchone() or ()
        assert "contract notice" not in kept
        assert not {"documents", "prompt"} & json.loads(kept).keys()
        assert (json.loads(kept)["response"],) == said
        caller.execute("SELECT said()")
        (kept,) = caller.execute(setting).fetchone() or ()
        assert len(json.loads(kept)["chat_history"]) == 2  # the conversation goes on
        # who has taken a role by SET ROLE has the setting, too
        owner.execute("GRANT SELECT ON good TO ml_rag_user")
        session = good.connect()
        session.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(good.role("tenant"))))
        session.execute("CALL heatwave_chat('contract')")
        (kept,) = session.execute(setting).fetchone() or ()
        assert "contract notice" in kept
    finally:
        owner.execute("DROP FUNCTION said(); GRANT SELECT ON good TO ml_rag_user")


def test_only_a_superuser_can_make_others_trust_a_role(
    good: Database, attacker: Connection, grants: Callable[[str], None]
) -> None:
    """Whoever has the admin option of a role may make anybody a member of it, who need not know."""
    publish(attacker, VIEW)
    asker = good.connect("asker")
    grants("GRANT {tenant} TO {stranger} WITH ADMIN OPTION")
    me, victim = (sql.Identifier(good.role(r)) for r in ("tenant", "asker"))
    lead = good.connect("stranger")
    lead.execute(sql.SQL("GRANT {} TO {}").format(me, victim))
    assert asker.execute("SELECT pg_has_role(%s, 'MEMBER')", (good.role("tenant"),)).fetchone() == (True,)
    assert found(asker) == {"public.good": "trusted"}
    lead.execute(sql.SQL("REVOKE {} FROM {}").format(me, victim))
    grants("GRANT {tenant} TO {asker}")
    assert found(asker) == {"evil.kb": "trusted", "public.good": "trusted"}


def test_nobody_trusts_a_role_for_having_made_it(good: Database) -> None:
    """From PostgreSQL 16 on it is a member of it, by a grant of the first superuser."""
    owner, asker = good.connect(), good.connect("asker")
    name = good.role("asker") + "_made"
    creator, made = sql.Identifier(good.role("asker")), sql.Identifier(name)
    owner.execute(sql.SQL("ALTER ROLE {} CREATEROLE").format(creator))
    try:
        asker.execute(sql.SQL("CREATE ROLE {}").format(made))
        assert asker.execute("SELECT ml_rag._trusts(to_regrole(%s))", (name,)).fetchone() == (False,)
    finally:
        owner.execute(sql.SQL("DROP ROLE {}; ALTER ROLE {} NOCREATEROLE").format(made, creator))


@pytest.mark.parametrize("group", ["ml_rag_user", "ml_rag_loader", "pg_monitor"])
def test_nobody_trusts_a_role_that_only_grants_privileges(
    good: Database, attacker: Connection, grants: Callable[[str], None], group: str
) -> None:
    """Whoever is a member of it can give it a view, which belongs to its owner whatever functions it calls."""
    publish(attacker, VIEW)
    for role in ("{tenant}", "{asker}") if group != "ml_rag_user" else ():  # of that they are members
        grants(f"GRANT {group} TO {role}")
    attacker.execute(f"GRANT ALL ON SCHEMA evil TO {group}; ALTER TABLE evil.t OWNER TO {group}")
    attacker.execute(f"ALTER VIEW evil.kb OWNER TO {group}; ALTER SCHEMA evil OWNER TO {group}")
    searched = found(good.connect("asker"))
    attacker.execute("ALTER SCHEMA evil OWNER TO CURRENT_USER")  # whose schema it is when it is dropped
    assert searched == {"public.good": "trusted"}


def test_an_administrator_says_whose_stores_are_searched(
    good: Database, attacker: Connection, grants: Callable[[str], None]
) -> None:
    publish(attacker)
    owner, asker = good.connect(), good.connect("asker")
    superuser: Any = owner.execute("SELECT current_user").fetchone()
    grants("GRANT ml_rag_publisher TO {tenant}")
    both = {"evil.kb": "trusted", "public.good": "trusted"}
    assert found(asker) == both
    try:
        for value, expected in {
            f'"{superuser[0]}"': {"public.good"},
            good.role("tenant"): {"evil.kb"},
            f'"{superuser[0]}" , {good.role("tenant")}': {"evil.kb", "public.good"},
            good.role("stranger"): set[str](),
            '"$user"': set[str](),
        }.items():
            owner.execute("SELECT ml_rag.configure('searched_owners', %s)", (value,))
            assert set(found(asker)) == expected, value
        assert found(good.connect("tenant")) == {"evil.kb": "trusted"}
        owner.execute("SELECT ml_rag.configure('searched_owners', %s)", (good.role("stranger"),))
        said = warnings(asker)
        with error("P0002"):
            ask(asker, vector_store=["kb"])
        assert "searched_owners" in said[0][1]
        assert ask(asker, vector_store=["evil.kb"])[0]["citations"]
        # members count
        grants("GRANT {stranger} TO {tenant}")
        assert found(asker) == {"evil.kb": "trusted"}
        for wrong in ("", " ", "no_such_role", f"{superuser[0]},", "a b", f'"{superuser[0]}', "'x'"):
            with error("22023"):
                owner.execute("SELECT ml_rag.configure('searched_owners', %s)", (wrong,))
        with error("42501", ours=False):
            asker.execute("SELECT ml_rag.configure('searched_owners', NULL)")
    finally:
        owner.execute("SELECT ml_rag.configure('searched_owners', NULL)")
    assert found(asker) == both


def test_a_relation_in_the_schema_of_another_role_must_be_named(good: Database, attacker: Connection) -> None:
    """It is found by OID and read by name, and that role could put a relation of its own in the place."""
    owner, asker = good.connect(), good.connect("asker")
    owner.execute("CREATE VIEW evil.seen AS SELECT * FROM good; CREATE TABLE evil.copy AS TABLE good")
    for relation in ("seen", "copy"):
        publish(owner, table=f"evil.{relation}")
        assert found(asker) == {"public.good": "trusted"}
        document, _ = ask(asker, explain=True)
        (told,) = [s for s in document["explain"]["stores"] if s["vector_store"] == f"evil.{relation}"]
        assert told["reason"] == (
            f"It is in schema evil, which belongs to role {good.role('tenant')}, which you do not trust."
        )
        assert ask(asker, vector_store=[f"evil.{relation}"])[0]["vector_store"] == [f"evil.{relation}"]
    attacker.execute("ALTER SCHEMA evil RENAME TO elsewhere")
    attacker.execute("ALTER SCHEMA elsewhere RENAME TO evil")


#: of a superuser, and with a relation of the attacker's that is read with it
MIXED: dict[str, str] = {
    "a partition": (
        "CREATE TABLE mixed (LIKE evil.kb) PARTITION BY HASH (document_id);"
        "ALTER TABLE mixed ATTACH PARTITION evil.kb FOR VALUES WITH (MODULUS 1, REMAINDER 0)"
    ),
    "a child": "CREATE TABLE mixed (LIKE evil.kb); ALTER TABLE evil.kb INHERIT mixed",
    "a view": "CREATE VIEW mixed AS SELECT * FROM evil.kb",
    "a view of a view of a child": (
        "CREATE TABLE parent (LIKE evil.kb); ALTER TABLE evil.kb INHERIT parent;"
        "CREATE VIEW between AS SELECT * FROM good UNION ALL SELECT *, 'law' FROM parent;"
        "CREATE VIEW mixed AS SELECT * FROM between"
    ),
    "a policy": (
        "CREATE TABLE mixed AS SELECT * FROM evil.kb; ALTER TABLE mixed ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY own ON mixed USING (EXISTS (SELECT FROM evil.kb AS k WHERE k.document_id = mixed.document_id))"
    ),
}


@pytest.mark.parametrize("role", [None, "asker"])
@pytest.mark.parametrize("mixed", MIXED)
def test_what_is_read_with_a_relation_must_be_trusted_too(
    good: Database, attacker: Connection, mixed: str, role: str | None
) -> None:
    """An expression of an index is computed while a statement is planned."""
    attacker.execute(
        "CREATE FUNCTION evil.code(n integer) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS"
        " $$BEGIN RAISE WARNING 'ran as %', current_user; RETURN n; END$$;"
        "CREATE INDEX ON evil.kb ((evil.code(1) + segment_number))"
    )
    owner, asker = good.connect(), good.connect(role)
    try:
        owner.execute(MIXED[mixed])
        publish(owner, table="mixed")
        owner.execute("GRANT SELECT ON mixed TO PUBLIC")
        said = warnings(asker)
        if mixed == "a policy" and role is None:  # which does not apply to a superuser
            assert found(asker) == {"public.good": "trusted", "public.mixed": "trusted"}
            assert set(ask(asker)[0]["vector_store"]) == {"public.good", "public.mixed"}
            assert said == []
            return
        assert found(asker) == {"public.good": "trusted"}
        document, _ = ask(asker, explain=True)
        assert said == []
        (told,) = [s for s in document["explain"]["stores"] if s["vector_store"] == "public.mixed"]
        assert told["reason"] == (
            f"A relation that is read with it belongs to role {good.role('tenant')}, which you do not trust."
        )
        assert ask(asker, vector_store=["public.mixed"])[0]["vector_store"] == ["public.mixed"]
    finally:
        owner.execute("DROP TABLE IF EXISTS parent CASCADE; DROP SCHEMA evil CASCADE")
        owner.execute(
            "DO $$BEGIN IF (SELECT relkind <> 'v' FROM pg_class WHERE oid = to_regclass('mixed'))"
            " THEN DROP TABLE mixed; END IF; END$$"
        )
        attacker.execute("CREATE SCHEMA evil")


def test_a_policy_that_does_not_apply_to_the_owner_keeps_no_store_from_it(good: Database, attacker: Connection) -> None:
    superuser, asker = good.connect(), good.connect("asker")
    publish(attacker)
    superuser.execute(f"CREATE SCHEMA own AUTHORIZATION {good.role('asker')}")
    try:
        asker.execute("CREATE TABLE own.docs AS SELECT * FROM evil.kb; ALTER TABLE own.docs ENABLE ROW LEVEL SECURITY")
        asker.execute("CREATE POLICY own ON own.docs USING (EXISTS (SELECT FROM evil.kb))")
        mark(asker, "own.docs")
        assert found(asker) == {"own.docs": "trusted", "public.good": "trusted"}
        asker.execute("ALTER TABLE own.docs FORCE ROW LEVEL SECURITY")
        assert found(asker) == {"public.good": "trusted"}
    finally:
        superuser.execute("DROP SCHEMA own CASCADE")


def test_tables_with_policies_of_a_role_that_is_not_trusted_take_no_time(good: Database, attacker: Connection) -> None:
    """What a policy reads was looked for in each: 5 ms a table of whoever first searches in a session."""
    attacker.execute(
        "DO $$BEGIN FOR i IN 1..1000 LOOP EXECUTE format('CREATE TABLE evil.%1$I (LIKE evil.kb); COMMENT ON COLUMN"
        " evil.%1$I.segment_embedding IS ''GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed''; ALTER TABLE evil.%1$I"
        " ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON evil.%1$I USING (EXISTS (SELECT FROM evil.kb))', 't' || i);"
        " END LOOP; END$$"
    )
    publish(attacker)
    asker = good.connect("asker")
    asker.execute("SET statement_timeout = '2s'")
    assert found(asker) == {"public.good": "trusted"}


def test_where_nothing_is_found_the_error_says_whose_stores_were_left_out(good: Database, attacker: Connection) -> None:
    for i in range(12):
        attacker.execute(f"CREATE TABLE evil.t{i:02d} (LIKE evil.kb)")
        publish(attacker, table=f"evil.t{i:02d}")
    reason = f"It belongs to role {good.role('tenant')}, which you do not trust"
    with error("P0002", "no vector store found") as caught:
        ask(good.connect("asker"), schema=["evil"])
    assert caught.detail is not None
    assert caught.hint is not None
    assert caught.detail.count(reason) == 10
    assert f"evil.t00 ({reason}), evil.t01 ({reason})" in caught.detail
    assert 'Name it with its schema in "vector_store", "evil.t00"' in caught.hint
    assert "member of ml_rag_publisher" in caught.hint
    with error("P0002", "no vector store found") as caught:
        ask(good.connect(), schema=["evil"])
    assert caught.hint == 'Name it with its schema in "vector_store", "evil.t00", or give it to a superuser.'


@pytest.mark.parametrize("options", [{}, {"keyword_search": True}, {"explain": True, "skip_generate": True}])
def test_where_nothing_is_near_enough_the_error_says_so_too(
    good: Database, attacker: Connection, options: dict[str, Any]
) -> None:
    publish(attacker)
    superuser = good.connect()
    limits = {"query_embedding": [-1] * 16, "retrieval_options": {"max_distance": 0}, "abstain": False, **options}
    with error("P0002", "within the distance threshold") as caught:
        ask(superuser, **limits)
    assert caught.detail is not None
    assert caught.hint is not None
    assert f"Left out: evil.kb (It belongs to role {good.role('tenant')}, which you do not trust)." in caught.detail
    assert caught.hint.startswith(
        'Raise "max_distance", or leave it out. To search those left out: name it with its schema'
    )
    # a call that names its stores has left nothing out
    with error("P0002", "within the distance threshold") as caught:
        ask(superuser, vector_store=["public.good"], **limits)
    assert "Left out" not in (caught.detail or "")


def test_a_change_while_a_call_runs_fails_nobody(good: Database, publisher: Connection) -> None:
    """Dropped, filled with nonsense and made again, over and over."""
    publish(publisher)

    def change() -> None:
        publisher.execute(f"DROP TABLE evil.kb; CREATE TABLE evil.kb ({COLUMNS}); INSERT INTO evil.kb VALUES {ROW}")
        publish(publisher)

    with over_and_over(change):
        asker = good.connect("asker")
        for _ in range(60):
            assert "contract notice" in texts(ask(asker)[0])


def test_settings_are_listed(good: Database) -> None:
    rows = dict(good.connect("asker").execute("SELECT name, default_value FROM ml_rag.setting").fetchall())
    assert rows["searched_owners"] is None
    assert "untrusted_ms" not in rows


@pytest.fixture
def member(db: Database, owner: Connection) -> Iterator[None]:
    """Asker is a member of tenant; roles outlive the database."""
    roles = sql.Identifier(db.role("tenant")), sql.Identifier(db.role("asker"))
    owner.execute(sql.SQL("GRANT {} TO {}").format(*roles))
    yield
    owner.execute(sql.SQL("REVOKE {} FROM {}").format(*roles))


def test_views_of_jobs_read_no_table_whose_policy_reads_what_is_not_trusted(
    db: Database, owner: Connection, member: None
) -> None:
    """Of a table with FORCE ROW LEVEL SECURITY, whose owner the reader is a member of."""
    hers, others = (sql.Identifier(db.role(name)) for name in ("tenant", "stranger"))
    owner.execute(
        sql.SQL(
            "CREATE SCHEMA hers AUTHORIZATION {0}; CREATE SCHEMA others AUTHORIZATION {1};"
            "GRANT USAGE ON SCHEMA hers, others TO PUBLIC"
        ).format(hers, others)
    )
    db.connect("stranger").execute(
        "CREATE FUNCTION others.evil() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran'; RETURN true; END $$;"
        "CREATE VIEW others.v AS SELECT others.evil() AS it; GRANT SELECT ON others.v TO PUBLIC"
    )
    tenant, asker = db.connect("tenant"), db.connect("asker")
    tenant.execute(
        "CREATE TABLE hers.items (id integer PRIMARY KEY, name text); INSERT INTO hers.items VALUES (1, 'a')"
    )
    tenant.execute("SELECT ml_rag.create_vectorizer('hers.items', '{\"columns\": \"name\"}')")
    options = '{"transform": "sentence", "embed": false}'
    tenant.execute("CALL ml_rag.create_node_group('hers.items', 'sentences', %s)", (options,))
    tenant.execute("UPDATE hers.items_sentences SET error = '{}'")
    views = ("vectorizer", "node_group", "node_group_error")
    rows = {view: asker.execute(f"TABLE ml_rag.{view}".encode()).fetchall() for view in views}
    assert all(rows.values())
    for table in ("items", "items_sentences"):
        tenant.execute(
            f"ALTER TABLE hers.{table} ENABLE ROW LEVEL SECURITY;"
            f"CREATE POLICY p ON hers.{table} USING (EXISTS (SELECT FROM others.v WHERE it))".encode()
        )
    # the policies do not apply to the owner
    assert {view: asker.execute(f"TABLE ml_rag.{view}".encode()).fetchall() for view in views} == rows
    tenant.execute(
        "ALTER TABLE hers.items FORCE ROW LEVEL SECURITY; ALTER TABLE hers.items_sentences FORCE ROW LEVEL SECURITY"
    )
    said = warnings(asker)
    for view in views:
        asker.execute(f"TABLE ml_rag.{view}".encode())
    assert said == []
