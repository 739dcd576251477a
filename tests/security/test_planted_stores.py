"""A role with a schema of its own plants "vector stores" that run its code with the rights of whoever asks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import sql

from support.cluster import Connection, Database, noticed, value_of
from support.schema import SqlModel
from support.stores import answer, as_text, create_store, error, fake_embedding, marker, names, retrieve

STORE = "(segment text, segment_embedding vector(3), document_name text, document_id bigint, segment_number integer)"

#: how code gets into the table own.docs; own.evil(integer) is immutable and tells whose rights it runs with
PLANTS = {
    "policy, a function": "CREATE POLICY p ON own.docs USING (own.evil(1))",
    "policy, a domain": (
        "CREATE DOMAIN own.d AS text CHECK (own.evil(length(VALUE)));"
        "CREATE POLICY p ON own.docs USING ((segment::own.d) IS NOT NULL)"
    ),
    "policy, a built-in that runs SQL": (
        "CREATE POLICY p ON own.docs USING (query_to_xml('SELECT own.evil(1)', true, false, '') IS NOT NULL)"
    ),
    "policy, a built-in that reads a view": (
        "CREATE VIEW own.v AS SELECT own.evil(1) AS x; GRANT SELECT ON own.v TO PUBLIC;"
        "CREATE POLICY p ON own.docs USING (table_to_xml('own.v', true, false, '') IS NOT NULL)"
    ),
    "policy, a subquery": (
        "CREATE VIEW own.v AS SELECT own.evil(1) AS x; GRANT SELECT ON own.v TO PUBLIC;"
        "CREATE POLICY p ON own.docs USING (EXISTS (SELECT FROM own.v WHERE x))"
    ),
    "policy, an operator": (
        "CREATE FUNCTION own.less(integer, integer) RETURNS boolean LANGUAGE sql AS 'SELECT own.evil($1)';"
        "CREATE OPERATOR own.< (LEFTARG = integer, RIGHTARG = integer, FUNCTION = own.less);"
        "CREATE POLICY p ON own.docs USING (segment_number OPERATOR(own.<) 9)"
    ),
    "index, its predicate": "CREATE INDEX ON own.docs (segment) WHERE own.evil(1)",
    "index, its expression": "CREATE INDEX ON own.docs ((own.evil(1)), segment)",
    "statistics": "CREATE STATISTICS own.s ON (own.evil(1) AND segment = 'x'), segment FROM own.docs",
    "check constraint of a child": "CREATE TABLE own.child (CHECK (own.evil(1))) INHERITS (own.docs)",
    "index of a grandchild": (
        "CREATE TABLE own.child () INHERITS (own.docs); CREATE TABLE own.grandchild () INHERITS (own.child);"
        "CREATE INDEX ON own.grandchild (segment) WHERE own.evil(1)"
    ),
    "partition key": (
        f"DROP TABLE own.docs; CREATE TABLE own.docs {STORE} PARTITION BY LIST ((own.evil(1) AND segment = 'x'));"
        "CREATE TABLE own.part PARTITION OF own.docs DEFAULT; INSERT INTO own.docs VALUES ('x', '[1,0,0]')"
    ),
    "partition of a table with such a key": (
        f"DROP TABLE own.docs; CREATE TABLE own.whole {STORE} PARTITION BY LIST ((own.evil(1) AND segment = 'x'));"
        "CREATE TABLE own.docs PARTITION OF own.whole FOR VALUES IN (true, false);"
        "INSERT INTO own.docs VALUES ('x', '[1,0,0]')"
    ),
    "view": (
        "ALTER TABLE own.docs RENAME TO t; CREATE VIEW own.docs AS SELECT * FROM own.t WHERE own.evil(segment_number)"
    ),
}  # fmt: skip


@pytest.fixture
def attacker(db: Database, owner: Connection) -> Connection:
    """A member of ml_rag_user with a schema of its own, and in it a store that everybody may read."""
    create_store(owner, "good", [("g", 1, 1, "good", (1, 0, 0))])
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(db.role("tenant"))))
    connection = db.connect("tenant")
    connection.execute(
        "GRANT USAGE ON SCHEMA own TO PUBLIC;"
        "CREATE FUNCTION own.evil(integer) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$"
    )
    connection.execute(f"CREATE TABLE own.docs {STORE}")
    connection.execute("INSERT INTO own.docs VALUES ('planted', '[1,0,0]', 'x', 1, 1)")
    return connection


def plant(attacker: Connection, statements: str) -> None:
    attacker.execute(statements)
    attacker.execute(
        "COMMENT ON COLUMN own.docs.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed';"
        "GRANT SELECT ON ALL TABLES IN SCHEMA own TO PUBLIC"
    )
    if "CREATE POLICY" in statements:
        attacker.execute("ALTER TABLE own.docs ENABLE ROW LEVEL SECURITY")


def ran_as(connection: Connection) -> list[str]:
    """What is said by own.evil on this connection, from now on."""
    return noticed(connection)


@pytest.mark.parametrize("how", PLANTS)
def test_code_in_a_store_runs_for_nobody_who_did_not_name_it(
    db: Database, owner: Connection, attacker: Connection, how: str
) -> None:
    plant(attacker, PLANTS[how])
    for connection, who in ((db.connect("asker"), db.role("asker")), (db.connect(), "")):
        if how.startswith("partition of"):
            connection.execute("SET constraint_exclusion = on")
        said = ran_as(connection)
        document = retrieve(connection, (1, 0, 0))
        assert (document["vector_store"], [c["segment"] for c in document["citations"]]) == (["public.good"], ["good"])
        assert names(connection) == ["public.good"]
        assert said == []
        # the plant is alive: one who names the store has read it knowingly, as with any SELECT
        retrieve(connection, (1, 0, 0), vector_store=["own.docs"], n_citations=1)
        # a superuser is not bound by policies
        assert who or "polic" in how or said
        if who:
            assert set(said) == {f"ran as {who}"}


@pytest.mark.parametrize("table", ["good", "public.good"])
def test_a_table_that_is_called_like_another_runs_no_code(
    db: Database, owner: Connection, attacker: Connection, table: str
) -> None:
    """A name without its schema, or one that two pairs of schema and table spell alike, is no word of trust."""
    plant(attacker, PLANTS["view"])
    attacker.execute(sql.SQL("ALTER VIEW own.docs RENAME TO {}").format(sql.Identifier(table)))
    plant_name = attacker.execute("SELECT format('own.%%I', %s::text)", (table,)).fetchone()[0]
    for connection in (db.connect("asker"), db.connect()):
        said = ran_as(connection)
        document = retrieve(connection, (1, 0, 0), vector_store=[table])
        assert (document["vector_store"], [c["segment"] for c in document["citations"]]) == (["public.good"], ["good"])
        with error("P0002", "no vector store found"):
            retrieve(connection, (1, 0, 0), vector_store=[table], schema=["own"])
        assert any("is not a vector store that this call can search" in line for line in said)
        assert not any("ran as" in line for line in said)
        # it can be named all the same
        assert retrieve(connection, (1, 0, 0), vector_store=[plant_name])["citations"][0]["segment"] == "planted"
        assert any("ran as" in line for line in said)


def test_a_quoted_name_is_that_of_one_relation(db: Database, owner: Connection, attacker: Connection) -> None:
    """A schema and a table whose names have quotes in them spell the quoted name of another table."""
    owner.execute('CREATE SCHEMA "My docs"')
    create_store(owner, sql.Identifier("My docs", "good"), [("g", 1, 1, "good", (1, 0, 0))])
    plant(attacker, PLANTS["view"])
    attacker.execute("ALTER VIEW own.docs RENAME TO good")
    owner.execute(sql.SQL("ALTER SCHEMA own RENAME TO {}").format(sql.Identifier('"My docs"')))
    said = ran_as(owner)
    document = retrieve(owner, (1, 0, 0), vector_store=['"My docs".good'])
    assert [c["segment"] for c in document["citations"]] == ["good"]
    assert said == []


@pytest.fixture
def quoted(db: Database, owner: Connection, model: SqlModel) -> Connection:
    """Store "Kb".docs; somebody else has made a view docs in a schema whose name has the quotes."""
    create_store(owner, "docs", [("g", 1, 1, "good", fake_embedding("good"))], "vector(16)")
    owner.execute('CREATE SCHEMA "Kb"; ALTER TABLE docs SET SCHEMA "Kb"; GRANT USAGE ON SCHEMA "Kb" TO PUBLIC')
    owner.execute(f"GRANT CREATE ON DATABASE {db.name} TO {db.role('tenant')}")
    tenant = db.connect("tenant")
    tenant.execute(
        'CREATE SCHEMA """Kb"""; SET search_path = """Kb""", pg_catalog; GRANT USAGE ON SCHEMA """Kb""" TO PUBLIC;'
        "CREATE FUNCTION evil() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$;"
        'CREATE VIEW docs AS SELECT 666 AS id, \'planted\' AS segment WHERE """Kb""".evil();'
        "GRANT SELECT ON docs TO PUBLIC; COMMENT ON VIEW docs IS 'all docs: how many docs are there?'"
    )
    return tenant


@pytest.mark.parametrize("table", ['"Kb".docs', {"schema_name": "Kb", "table_name": "docs"}])
@pytest.mark.parametrize("role", [None, "asker"])
def test_a_question_about_a_table_whose_name_needs_quotes_is_answered_from_that_one(
    db: Database, quoted: Connection, model: SqlModel, role: str | None, table: Any
) -> None:
    caller = db.connect(role)
    said = noticed(caller)
    model.writes("SELECT count(*) FROM docs")
    options = {"tables": [table], "execute": True, "model_id": "fake-generate"}
    found = value_of(caller, "SELECT ml_nl_sql('How many docs are there?', %s)", [json.dumps(options)])
    assert found["tables"] == ['"Kb".docs']
    assert not any("ran as" in message for message in said), said


@pytest.mark.parametrize("role", [None, "asker"])
def test_a_store_whose_name_needs_quotes_waits_for_no_other_one(
    db: Database, owner: Connection, quoted: Connection, role: str | None
) -> None:
    owner.execute("CREATE TABLE questions AS SELECT 'good'::text AS question, true AS answerable, 1 AS id")
    owner.execute("ALTER TABLE questions ADD PRIMARY KEY (id); GRANT SELECT ON questions TO PUBLIC")
    owner.execute(f"CREATE SCHEMA results; GRANT ALL ON SCHEMA results TO {db.role('asker')}")
    options = json.dumps({"vector_store": ['"Kb".docs'], "skip_generate": True})
    owner.execute("SELECT ml_rag.create_preset('kept', %s)", [options])
    caller = db.connect(role)
    caller.execute("SET statement_timeout = '5s'")
    with quoted.transaction():
        quoted.execute("LOCK TABLE docs IN ACCESS EXCLUSIVE MODE")
        caller.execute(
            "SELECT ml_rag_evaluate('SELECT id, question FROM questions', %s)", [f'{{"options": {options}}}']
        )
        caller.execute("SELECT ml_rag_answer('good', '{\"preset\": \"kept\"}')")
        caller.execute("CALL ml_rag_table('public.questions.question', 'results.answers.answer', %s)", [options])
    assert value_of(caller, "SELECT answer #>> '{citations,0,segment}' FROM results.answers") == "good"


def test_an_ordinary_table_of_another_role_must_be_named(db: Database, attacker: Connection) -> None:
    plant(attacker, "")
    asker = db.connect("asker")
    assert names(asker) == ["public.good"]
    document = retrieve(asker, (1, 0, 0), explain=True)
    assert document["vector_store"] == ["public.good"]
    (told,) = [s for s in document["explain"]["stores"] if s["vector_store"] == "own.docs"]
    assert told["reason"] == f"It belongs to role {db.role('tenant')}, which you do not trust."
    assert retrieve(asker, (1, 0, 0), vector_store=["own.docs"])["vector_store"] == ["own.docs"]


def test_a_superuser_names_what_other_roles_made(db: Database, owner: Connection, attacker: Connection) -> None:
    plant(attacker, "")
    assert names(owner) == ["public.good"]
    with error("P0002", "Name it with its schema"):
        retrieve(owner, (1, 0, 0), exclude_vector_store=["good"])
    assert retrieve(owner, (1, 0, 0), vector_store=["own.docs"])["citations"][0]["segment"] == "planted"
    owner.execute("ALTER TABLE own.docs OWNER TO CURRENT_USER")
    assert names(owner) == ["public.good"]  # the schema is still another role's
    owner.execute("ALTER SCHEMA own OWNER TO CURRENT_USER")
    assert names(owner) == ["own.docs", "public.good"]


@pytest.mark.parametrize(
    ("name", "options"), [("items_embed", {"mode": "immediate"}), ("items_segments", {"destination": "table"})]
)
def test_the_function_of_a_vectorizer_is_nobody_elses(
    db: Database, owner: Connection, tenant: Connection, name: str, options: dict[str, str]
) -> None:
    """It has its owner's rights, and whoever may execute it can have it run on a table with triggers of his own."""
    owner.execute("CREATE SCHEMA shared; CREATE TABLE shared.items (id integer PRIMARY KEY, name text)")
    owner.execute("GRANT USAGE, CREATE ON SCHEMA shared TO PUBLIC")
    tenant.execute(
        f"CREATE FUNCTION shared.{name}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        f"GRANT EXECUTE ON FUNCTION shared.{name}() TO ml_rag_user"
    )
    make = "SELECT ml_rag.create_vectorizer('shared.items', %s)"
    owner.execute(make, (json.dumps({"columns": "name", **options}),))
    allowed = "SELECT has_function_privilege('ml_rag_user', %s, 'EXECUTE')"
    run = "SELECT DISTINCT tgfoid::regproc::text FROM pg_trigger WHERE tgfoid::regproc::text ~ '^shared'"
    assert owner.execute(run).fetchall() == [(f"shared.{name}1",)]
    assert owner.execute(allowed, (f"shared.{name}1()",)).fetchone() == (False,)
    # nor is a function of somebody else's dropped with it
    owner.execute("GRANT TRIGGER ON shared.items TO PUBLIC")
    tenant.execute(
        "CREATE FUNCTION shared.other() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        'CREATE TRIGGER "~ml_rag_immediate_z" AFTER DELETE ON shared.items EXECUTE FUNCTION shared.other();'
        "CREATE TRIGGER ml_rag_segments_z AFTER DELETE ON shared.items EXECUTE FUNCTION shared.other()"
    )
    owner.execute("SELECT ml_rag.drop_vectorizer('shared.items')")
    assert owner.execute("SELECT to_regprocedure('shared.other()') IS NOT NULL").fetchone() == (True,)
    assert owner.execute("SELECT to_regprocedure(%s)", (f"shared.{name}1()",)).fetchone() == (None,)


# -- under the former name of a trusted store -------------------------------------------------------------------------

#: options, and what takes the place of kb.docs: a table with a policy, or a view whose code the planner runs
FORMER: dict[str, tuple[dict[str, Any], str]] = {
    "by meaning": ({"query_embedding": fake_embedding("text")}, "a table"),
    "by words": ({"semantic_search": False, "keyword_search": True}, "a table"),
    "by the model": ({}, "a table"),
    "by the model, of a view": ({}, "a view"),
    "in a schema of that name": ({"query_embedding": fake_embedding("text")}, "a schema"),
}


@pytest.mark.parametrize("how", FORMER)
def test_what_takes_the_former_name_of_a_store_runs_no_code_in_a_transaction_with_an_older_snapshot(
    db: Database, owner: Connection, attacker: Connection, how: str
) -> None:
    options, what = FORMER[how]
    tenant = sql.Identifier(db.role("tenant"))
    owner.execute("DROP TABLE good; CREATE SCHEMA kb; GRANT USAGE ON SCHEMA kb TO PUBLIC")
    owner.execute(sql.SQL("GRANT CREATE ON SCHEMA kb TO {}").format(tenant))
    owner.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(sql.Identifier(db.name), tenant))
    create_store(owner, "kb.docs", [("d", 1, 1, "text", fake_embedding("text"))], "vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('kb.docs')")
    asker = db.connect("asker")
    said = ran_as(asker)
    expected = answer(asker, "text", {**options, "skip_generate": True})
    with asker.transaction():
        asker.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        asker.execute("SELECT FROM pg_class LIMIT 1")
        if what == "a schema":
            owner.execute("ALTER SCHEMA kb RENAME TO kb_former")
            attacker.execute("CREATE SCHEMA kb; GRANT USAGE ON SCHEMA kb TO PUBLIC")
        else:
            owner.execute("ALTER TABLE kb.docs RENAME TO former")
        row = (
            "SELECT 'x' AS document_name, '{}'::jsonb AS metadata, 1::bigint AS document_id, 1 AS segment_number,"
            f" 'planted' AS segment, '{as_text(fake_embedding('text'))}'::vector(16) AS segment_embedding"
        )
        if what == "a view":
            attacker.execute(f"CREATE VIEW kb.docs AS {row} FROM generate_series(1, 3) WHERE own.evil(1)")
        else:
            attacker.execute(f"CREATE TABLE kb.docs AS {row}; ALTER TABLE kb.docs ENABLE ROW LEVEL SECURITY")
            attacker.execute("CREATE POLICY p ON kb.docs USING (own.evil(1))")
        attacker.execute("GRANT SELECT ON kb.docs TO PUBLIC")
        found = answer(asker, "text", {**options, "skip_generate": True, "vector_store": ["kb.docs"]})
        # it may have been given away as well
        with error("P0002", "no vector store found"), asker.transaction():
            answer(asker, "text", {**options, "skip_generate": True})
    assert found == expected
    assert not any("ran as" in message for message in said), said


def test_what_takes_the_former_name_of_a_type_runs_no_code(
    db: Database, owner: Connection, attacker: Connection
) -> None:
    owner.execute("CREATE SCHEMA kb; GRANT USAGE ON SCHEMA kb TO PUBLIC")
    owner.execute(sql.SQL("GRANT CREATE ON SCHEMA kb TO {}").format(sql.Identifier(db.role("tenant"))))
    owner.execute(
        "CREATE DOMAIN kb.id AS text; DROP TABLE good;"
        "CREATE TABLE docs (document_id kb.id, segment_number integer, segment text, segment_embedding vector(3));"
        f"COMMENT ON COLUMN docs.segment_embedding IS '{marker()}'; GRANT SELECT ON docs TO PUBLIC;"
        "INSERT INTO docs SELECT 'd', i, 'text ' || i, '[1,0,0]' FROM generate_series(1, 5) AS i"
    )
    asker = db.connect("asker")
    said = ran_as(asker)
    for overlap in (1, 2):  # two statements, whose plans are made before and after
        found = retrieve(asker, (1, 0, 0), n_citations=1, retrieval_options={"segment_overlap": overlap})
        assert found["citations"][0]["segment"] == "\n".join(f"text {i}" for i in range(1, 2 + overlap))
        if overlap == 1:
            owner.execute("ALTER DOMAIN kb.id RENAME TO former")
            attacker.execute("CREATE DOMAIN kb.id AS text CHECK (own.evil(length(VALUE)))")
    assert not any("ran as" in message for message in said), said


def test_stores_of_a_role_that_is_not_trusted_cost_others_little(
    db: Database, owner: Connection, attacker: Connection
) -> None:
    """Once the session knows the role, their columns are not even read."""
    for i in range(200):
        attacker.execute(f"CREATE TABLE own.t{i} {STORE}")
        attacker.execute(f"COMMENT ON COLUMN own.t{i}.segment_embedding IS '{marker()}'")
    attacker.execute("GRANT SELECT ON ALL TABLES IN SCHEMA own TO PUBLIC")
    asker = db.connect("asker")

    def columns_read() -> int:
        return value_of(asker, "SELECT pg_stat_get_xact_tuples_fetched('pg_attribute_relid_attnum_index'::regclass)")

    read = 0
    for _ in range(2):
        with asker.transaction():
            before = columns_read()
            assert retrieve(asker, (1, 0, 0))["vector_store"] == ["public.good"]
            read = columns_read() - before
    assert read < 100
