"""batch and vectorizer: a table that is exchanged, or gets a child, while a model is asked about its rows."""

from __future__ import annotations

import contextlib
import json
from typing import Any, LiteralString

import psycopg
import pytest

from support.cluster import Connection, Database, is_waiting, noticed, value_of
from support.models_server import ModelsServer
from support.processes import Background, wait_until
from support.schema import SqlModel
from support.schemas import owners, renamed, taken
from support.stores import create_store, error, fake_embedding, search
from support.vectorizers import create, run

#: what another role puts in the place of a table: its columns, as SELECT has them
PLANTS = {
    "a table": "CREATE TABLE {name} AS SELECT {columns};"
    "CREATE TRIGGER t BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {name}"
    " FOR EACH STATEMENT EXECUTE FUNCTION own.evil()",
    "a view": "CREATE VIEW {name} AS SELECT {columns} WHERE own.evil(1)",
}
#: columns of a table with a vectorizer, and of one of segments
ITEMS = "1 AS id, 'x' AS name, 'x' AS segment, NULL::public.vector(16) AS segment_embedding"
SEGMENTS = (
    "1 AS source_id, 1::bigint AS document_id, 'd' AS document_name, '{}'::jsonb AS metadata, 1 AS segment_number,"
    " 'x' AS segment, 1::bigint AS text_hash, NULL::public.vector(16) AS segment_embedding"
)
#: triggers and other code of the owner of a child or partition
OF_PART = (
    "CREATE TRIGGER t BEFORE UPDATE ON own.part FOR EACH ROW EXECUTE FUNCTION own.evil();"
    "ALTER TABLE own.part ADD CHECK (own.evil(1));"
    "CREATE STATISTICS own.s ON (own.evil(1) AND segment = 'x'), segment FROM own.part"
)


@pytest.fixture
def taker(db: Database, owner: Connection) -> Connection:
    """May create schemas, and has one; the tables of the owner are in schema kb."""
    tenant = db.role("tenant")
    owner.execute(f"GRANT CREATE ON DATABASE {db.name} TO {tenant}; CREATE SCHEMA own AUTHORIZATION {tenant}")
    owner.execute("CREATE SCHEMA kb; GRANT USAGE ON SCHEMA kb TO PUBLIC")
    connection = db.connect("tenant")
    connection.execute(
        "GRANT USAGE ON SCHEMA own TO PUBLIC;"
        "CREATE FUNCTION own.evil(integer) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$;"
        "CREATE FUNCTION own.evil() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN NEW; END $$"
    )
    return connection


def exchange(owner: Connection, taker: Connection, what: str, **relations: str) -> bool:
    """False where a call holds the name of the schema."""
    if not renamed(owner, "kb", "former"):
        return False
    taker.execute("CREATE SCHEMA kb; GRANT USAGE ON SCHEMA kb TO PUBLIC")
    for name, columns in relations.items():
        taker.execute(PLANTS[what].format(name=f"kb.{name}", columns=columns).encode())
        taker.execute(f"GRANT ALL ON kb.{name} TO PUBLIC".encode())
    return True


def refused(is_exchanged: bool) -> contextlib.AbstractContextManager[Any]:
    return error("42P01", "does not exist any more") if is_exchanged else contextlib.nullcontext()


def give_part(db: Database, owner: Connection, taker: Connection) -> None:
    owner.execute(f"ALTER TABLE own.part OWNER TO {db.role('tenant')}")
    taker.execute(OF_PART)


def make_items(owner: Connection, **options: Any) -> None:
    owner.execute("CREATE TABLE kb.items (id integer PRIMARY KEY, name text); INSERT INTO kb.items VALUES (1, 'lamp')")
    create(owner, "kb.items", "name", **options)
    run(owner, "kb.items")
    owner.execute("GRANT INSERT ON kb.items TO PUBLIC")


@pytest.mark.parametrize("what", PLANTS)
@pytest.mark.parametrize("destination", ["column", "table"])
def test_of_an_immediate_vectorizer(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer, destination: str, what: str
) -> None:
    make_items(owner, mode="immediate", destination=destination)
    writer = db.connect("asker")
    said = noticed(writer)
    models.before[len(models.requests)] = lambda: exchange(owner, taker, what, items=ITEMS, items_segments=SEGMENTS)
    writer.execute("INSERT INTO kb.items (id, name) VALUES (2, 'tent')")
    assert said == []
    table = "items" if destination == "column" else "items_segments"
    assert owner.execute(
        f"SELECT segment, segment_embedding IS NULL FROM {owners(owner)}.{table} ORDER BY 1".encode()
    ).fetchall() == [
        ("lamp", False),
        ("tent", False),
    ]


def test_segments_while_their_trigger_waits_for_a_catalog(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer
) -> None:
    make_items(owner, destination="table")
    taker.execute("CREATE SCHEMA planted; GRANT USAGE ON SCHEMA planted TO PUBLIC")
    taker.execute(PLANTS["a table"].format(name="planted.items_segments", columns=SEGMENTS).encode())
    taker.execute("GRANT ALL ON planted.items_segments TO PUBLIC")
    writer, locker = db.connect("asker"), db.connect()
    said = noticed(writer)
    writer.execute("INSERT INTO kb.items (id, name) VALUES (2, 'tent')")
    locker.execute("BEGIN; LOCK TABLE pg_description IN ACCESS EXCLUSIVE MODE")
    written = Background(lambda: writer.execute("INSERT INTO kb.items (id, name) VALUES (3, 'rope')"))
    wait_until(lambda: is_waiting(db, writer))
    taken(owner, taker)
    locker.execute("ROLLBACK")
    written.result()
    assert said == []
    assert owner.execute(f"SELECT segment FROM {owners(owner)}.items_segments ORDER BY 1".encode()).fetchall() == [
        ("lamp",),
        ("rope",),
        ("tent",),
    ]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE kb.items SET name = 'other' WHERE id = 1", "UPDATE kb.items SET id = 7 WHERE id = 1",
        "DELETE FROM kb.items WHERE id = 1",
        "INSERT INTO kb.items VALUES (1, 'other') ON CONFLICT (id) DO UPDATE SET name = 'other'",
        "TRUNCATE kb.items",
    ],
)  # fmt: skip
def test_segments_while_their_trigger_waits_for_a_row(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer, change: LiteralString
) -> None:
    """Its other statements follow that one."""
    make_items(owner, destination="table")
    owner.execute("GRANT ALL ON kb.items TO PUBLIC")
    writer, locker = db.connect("asker"), db.connect()
    said = noticed(writer)
    locker.execute("BEGIN; SELECT FROM kb.items_segments FOR UPDATE")
    written = Background(lambda: writer.execute(change))
    wait_until(lambda: is_waiting(db, writer))
    is_exchanged = exchange(owner, taker, "a table", items_segments=SEGMENTS, items=ITEMS)
    locker.execute("ROLLBACK")
    with refused(is_exchanged):
        written.result()
    assert said == []
    if is_exchanged:
        assert owner.execute("SELECT source_id, segment FROM former.items_segments").fetchall() == [(1, "lamp")]


@pytest.mark.parametrize("mode", ["deferred", "immediate"])
def test_segments_of_which_one_is_waited_for(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer, mode: str
) -> None:
    """The others are written by statements of their own."""
    make_items(owner, destination="table", mode=mode)
    owner.execute("GRANT ALL ON kb.items TO PUBLIC; REVOKE TRIGGER, REFERENCES ON kb.items FROM PUBLIC")
    change: LiteralString = "UPDATE kb.items SET name = E'a\n\nb\n\nc' WHERE id = 1"
    if mode == "deferred":
        owner.execute(change)
        change = "CALL ml_rag.run_vectorizer('kb.items')"
    caller, locker = db.connect("asker" if mode == "immediate" else None), db.connect()
    said = noticed(caller)
    columns = "document_id, document_name, metadata, 2, segment, text_hash, segment_embedding"
    locker.execute(f"BEGIN; INSERT INTO kb.items_segments SELECT source_id, {columns} FROM kb.items_segments".encode())
    written = Background(lambda: caller.execute(change))
    wait_until(lambda: is_waiting(db, caller))
    is_exchanged = exchange(owner, taker, "a table", items_segments=SEGMENTS, items=ITEMS)
    locker.execute("ROLLBACK")
    with refused(is_exchanged):
        written.result()
    assert said == []
    rows = owner.execute(f"SELECT count(*) FROM {owners(owner)}.items_segments".encode()).fetchone()
    assert rows == (1 if is_exchanged else 3,)


def test_nodes_while_their_rows_are_waited_for(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer
) -> None:
    make_items(owner)
    owner.execute("CALL ml_rag.create_node_group('kb.items', 'parts', '{\"transform\": \"sentence\"}')")
    owner.execute("UPDATE kb.items SET name = 'tent'")
    columns = value_of(
        owner,
        "SELECT string_agg(format('NULL::%s AS %I', format_type(a.atttypid, a.atttypmod), a.attname), ', ')"
        " FROM pg_attribute AS a WHERE a.attrelid = 'kb.items_parts'::regclass AND a.attnum > 0",
    )
    caller, locker = db.connect(), db.connect()
    said = noticed(caller)
    locker.execute("BEGIN; SELECT FROM kb.items_parts FOR UPDATE")
    filled = Background(lambda: caller.execute("CALL ml_rag.refresh_node_groups('kb.items')"))
    wait_until(lambda: is_waiting(db, caller))
    is_exchanged = exchange(owner, taker, "a table", items_parts=columns, items=ITEMS)
    locker.execute("ROLLBACK")
    with refused(is_exchanged):
        filled.result()
    assert said == []


@pytest.mark.parametrize("role", ["asker", None])
def test_a_store_while_another_one_is_searched_by_itself(
    db: Database, owner: Connection, taker: Connection, role: str | None
) -> None:
    """After an error of the statement, to find out whose it is."""
    vector = fake_embedding("zebra")
    owner.execute("CREATE SCHEMA aaa; GRANT USAGE ON SCHEMA aaa TO PUBLIC")
    for name in ("aaa.base", "kb.docs"):
        create_store(owner, name, [("d", 1, 1, "zebra", vector)], "vector(16)")
    owner.execute(
        "CREATE SEQUENCE aaa.s; GRANT ALL ON aaa.s TO PUBLIC; COMMENT ON COLUMN aaa.base.segment_embedding IS NULL;"
        "CREATE FUNCTION aaa.wait() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
        " IF nextval('aaa.s') > 1 THEN PERFORM pg_advisory_xact_lock(4711); END IF; RAISE EXCEPTION 'not now'; END $$;"
        "CREATE VIEW aaa.slow AS SELECT * FROM aaa.base WHERE aaa.wait();"
        "COMMENT ON COLUMN aaa.slow.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed';"
        "GRANT SELECT ON aaa.slow, kb.docs TO PUBLIC"
    )
    taker.execute("CREATE SCHEMA planted; GRANT USAGE ON SCHEMA planted TO PUBLIC")
    create_store(taker, "planted.docs", [("e", 1, 1, "false", vector)], "vector(16)")
    taker.execute(
        "GRANT SELECT ON planted.docs TO PUBLIC; ALTER TABLE planted.docs ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY p ON planted.docs USING (own.evil(1)); CREATE INDEX ON planted.docs ((own.evil(3)))"
    )
    asker, locker = db.connect(role), db.connect()
    said = noticed(asker)
    locker.execute("SELECT pg_advisory_lock(4711)")
    found = Background(lambda: search(asker, "zebra", {"query_embedding": vector}))
    wait_until(lambda: is_waiting(db, asker))
    taken(owner, taker)
    locker.execute("SELECT pg_advisory_unlock(4711)")
    assert [row[5] for row in found.result()] == ["zebra"]
    assert [one for one in said if "ran as" in str(one)] == []


SEARCHES: dict[str, dict[str, Any]] = {
    "words": {"keyword_search": True, "semantic_search": False},
    "hybrid": {"keyword_search": True},
    "filters": {"filters": {"document_id": {"gt": 0}}},
    "filters and words": {"filters": {"document_id": {"gt": 0}}, "keyword_search": True},
    "required": {"required_keywords": ["zebra"]},
    "explain": {"explain": True},
    "explain words": {"explain": True, "keyword_search": True},
    "nothing": {"filters": {"a": 5}},
    "nodes": {"arms": [{"search": "semantic", "in": "parts"}]},
}


@pytest.mark.parametrize("how", SEARCHES)
def test_a_store_while_another_one_is_read(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer, how: str
) -> None:
    """At each of its rows that is read: before the statement, in it and after it."""
    vector = fake_embedding("zebra")
    owner.execute(
        "CREATE SCHEMA aaa; GRANT USAGE ON SCHEMA aaa TO PUBLIC; CREATE SEQUENCE aaa.s; GRANT ALL ON aaa.s TO PUBLIC"
    )
    for name in ("aaa.slow", "kb.docs"):
        create_store(owner, name, [("d", 1, 1, "zebra stripes", vector)], "vector(16)")
        owner.execute(f"SELECT ml_rag.enable_keyword_search('{name}')".encode())
    owner.execute("CALL ml_rag.create_node_group('kb.docs', 'parts', '{\"transform\": \"sentence\"}')")
    owner.execute("CALL ml_rag.create_node_group('aaa.slow', 'parts', '{\"transform\": \"sentence\"}')")
    owner.execute(
        "CREATE FUNCTION aaa.wait() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
        " IF nextval('aaa.s') = current_setting('test.at')::bigint THEN PERFORM pg_advisory_xact_lock(4711); END IF;"
        " RETURN true; END $$;"
        "CREATE POLICY p ON aaa.slow USING (aaa.wait()); ALTER TABLE aaa.slow ENABLE ROW LEVEL SECURITY;"
        "GRANT SELECT ON ALL TABLES IN SCHEMA aaa TO PUBLIC; GRANT SELECT ON ALL TABLES IN SCHEMA kb TO PUBLIC"
    )
    columns = (
        "'e' AS document_name, '{}'::jsonb AS metadata, 1::bigint AS document_id, 1 AS segment_number,"
        f" 'zebra FALSE' AS segment, '{json.dumps(vector)}'::public.vector(16) AS segment_embedding"
    )
    taker.execute("CREATE SCHEMA planted; GRANT USAGE ON SCHEMA planted TO PUBLIC")
    taker.execute(
        f"CREATE TABLE planted.docs AS SELECT {columns}; GRANT ALL ON planted.docs TO PUBLIC;"
        "ALTER TABLE planted.docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON planted.docs USING (own.evil(2));"
        "CREATE INDEX ON planted.docs ((own.evil(3)))".encode()
    )
    locker = db.connect()
    for at in range(1, 20):
        asker = db.connect("asker")
        asker.execute(f"SET test.at = {at}".encode())
        owner.execute("SELECT setval('aaa.s', 1, false)")
        said = noticed(asker)
        locker.execute("SELECT pg_advisory_lock(4711)")
        found = Background(lambda: search(asker, "zebra", {"query_embedding": vector, **SEARCHES[how]}))  # noqa: B023
        wait_until(lambda: found.ended or is_waiting(db, asker))  # noqa: B023
        if not (has_ended := found.ended):
            is_taken = taken(owner, taker)
        locker.execute("SELECT pg_advisory_unlock(4711)")
        with contextlib.suppress(psycopg.Error):
            assert "FALSE" not in str(found.result())
        assert [one for one in said if "ran as" in str(one)] == []
        if has_ended:
            break
        if is_taken:
            taker.execute("ALTER SCHEMA kb RENAME TO planted")
            owner.execute("ALTER SCHEMA former RENAME TO kb")
        asker.close()
    assert at > 1


@pytest.mark.parametrize("nested", ["", "PERFORM ml_rag.discover();"])
def test_a_store_while_a_function_of_an_arm_runs_that_calls_ml_rag(
    db: Database, owner: Connection, taker: Connection, nested: str
) -> None:
    rows: Any = [("d", 1, 1, "zebra", fake_embedding("zebra"))]
    create_store(owner, "kb.docs", rows, "vector(16)")
    create_store(owner, "public.more", rows, "vector(16)")
    owner.execute(
        "CREATE FUNCTION scored(question text, segment text) RETURNS float8 LANGUAGE plpgsql AS"
        f" $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711); {nested} RETURN 1; END $$".encode()
    )
    taker.execute("CREATE SCHEMA planted; GRANT USAGE ON SCHEMA planted TO PUBLIC")
    create_store(taker, "planted.docs", [("e", 1, 1, "false", fake_embedding("zebra"))], "vector(16)")
    taker.execute(
        "GRANT SELECT ON planted.docs TO PUBLIC; ALTER TABLE planted.docs ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY p ON planted.docs USING (own.evil(1))"
    )
    asker, locker = db.connect("asker"), db.connect()
    said = noticed(asker)
    locker.execute("BEGIN; SELECT pg_advisory_xact_lock(4711)")
    options = {
        "query_embedding": fake_embedding("zebra"),
        "arms": [{"search": "function", "function": "public.scored"}],
    }
    found = Background(lambda: search(asker, "zebra", options))
    wait_until(lambda: is_waiting(db, asker))
    taken(owner, taker)
    locker.execute("ROLLBACK")
    assert {"zebra"} == {value for row in found.result() for value in row if value in ("zebra", "false")}
    assert said == []


@pytest.mark.parametrize("destination", ["column", "table"])
def test_a_child_for_an_immediate_vectorizer(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer, destination: str
) -> None:
    make_items(owner, mode="immediate", destination=destination)
    table = "items" if destination == "column" else "items_segments"

    def attach() -> None:
        owner.execute(f"CREATE TABLE own.part () INHERITS (kb.{table})")
        owner.execute(
            "INSERT INTO own.part (id, name) VALUES (2, 'tent')"
            if destination == "column"
            else "INSERT INTO own.part SELECT * FROM ONLY kb.items_segments"
        )
        give_part(db, owner, taker)

    writer = db.connect("asker")
    said = noticed(writer)
    models.before[len(models.requests)] = attach
    with error("42501", "does not trust the owner of the table"):
        writer.execute("INSERT INTO kb.items (id, name) VALUES (2, 'tent')")
    assert said == []


def test_a_child_of_a_table_of_segments(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer
) -> None:
    make_items(owner, destination="table")
    owner.execute("INSERT INTO kb.items (id, name) VALUES (2, 'tent')")
    owner.execute("CREATE TABLE own.part () INHERITS (kb.items_segments)")
    owner.execute("INSERT INTO own.part SELECT * FROM ONLY kb.items_segments WHERE source_id = 2")
    give_part(db, owner, taker)
    said = noticed(owner)
    with error("55000", 'the embeddings of "kb.items_segments" cannot be changed'):
        run(owner, "kb.items")
    with error("42501", "does not trust the owner of the table"):
        owner.execute("UPDATE kb.items SET name = 'net' WHERE id = 2")
    assert said == []


def test_a_partition_is_refused_before_it_is_read(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer
) -> None:
    owner.execute(
        "CREATE TABLE kb.items (id integer PRIMARY KEY, name text) PARTITION BY LIST (id);"
        "CREATE TABLE kb.first PARTITION OF kb.items FOR VALUES IN (1);"
        "CREATE TABLE own.part PARTITION OF kb.items FOR VALUES IN (2); INSERT INTO kb.items VALUES (1, 'a'), (2, 'b')"
    )
    create(owner, "kb.items", "name")
    give_part(db, owner, taker)
    said = noticed(owner)
    with error("42501", 'part "own.part" of table "kb.items" belongs to a role that you do not trust'):
        run(owner, "kb.items")
    assert said == []


@pytest.mark.parametrize(
    "statement",
    ["SELECT * FROM ml_rag.vectorizer", "SELECT * FROM ml_rag.node_group", "CALL ml_rag.run_vectorizer('kb.items')"],
)
def test_a_partition_that_comes_while_its_table_is_waited_for(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer, statement: LiteralString
) -> None:
    owner.execute(
        "CREATE TABLE kb.items (id integer PRIMARY KEY, name text) PARTITION BY LIST (id);"
        "CREATE TABLE kb.first PARTITION OF kb.items FOR VALUES IN (1); INSERT INTO kb.items VALUES (1, 'lamp')"
    )
    create(owner, "kb.items", "name")
    run(owner, "kb.items")
    owner.execute("CALL ml_rag.create_node_group('kb.items', 's', '{\"transform\": \"sentence\"}')")
    owner.execute(
        "CREATE TABLE own.part (LIKE kb.items INCLUDING ALL); INSERT INTO own.part (id, name) VALUES (2, 'x')"
    )
    give_part(db, owner, taker)
    caller = db.connect()
    said = noticed(caller)
    owner.execute("BEGIN; LOCK TABLE kb.items IN ACCESS EXCLUSIVE MODE")
    call = Background(lambda: caller.execute(statement))
    wait_until(lambda: is_waiting(db, caller))
    owner.execute("ALTER TABLE kb.items ATTACH PARTITION own.part FOR VALUES IN (2); COMMIT")
    with error("42501", 'part "own.part"') if statement.startswith("CALL") else contextlib.nullcontext():
        call.result()
    assert not any("ran as" in message for message in said), said


def test_a_partition_that_comes_while_an_immediate_vectorizer_waits(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer
) -> None:
    owner.execute(
        "CREATE TABLE kb.items (id integer PRIMARY KEY, name text) PARTITION BY LIST (id);"
        "CREATE TABLE kb.first PARTITION OF kb.items FOR VALUES IN (1)"
    )
    create(owner, "kb.items", "name", mode="immediate")
    owner.execute("GRANT INSERT ON kb.items TO PUBLIC; CREATE TABLE kb.second (LIKE kb.items INCLUDING ALL)")
    owner.execute("CREATE TABLE own.part (LIKE kb.items INCLUDING ALL)")
    give_part(db, owner, taker)
    gate, writer = db.connect(), db.connect("asker")
    said = noticed(writer)

    def attach() -> None:
        owner.execute("ALTER TABLE kb.items ATTACH PARTITION kb.second FOR VALUES IN (2)")
        gate.execute("BEGIN; LOCK TABLE kb.second IN ACCESS EXCLUSIVE MODE")

    models.before[len(models.requests)] = attach
    call = Background(lambda: writer.execute("INSERT INTO kb.items (id, name) VALUES (1, 'tent')"))
    wait_until(lambda: is_waiting(db, writer))
    owner.execute("ALTER TABLE kb.items ATTACH PARTITION own.part FOR VALUES IN (3)")
    gate.execute("COMMIT")
    with error("42501", "does not trust the owner of the table"):
        call.result()
    assert not any("ran as" in message for message in said), said


@pytest.mark.parametrize("what", PLANTS)
@pytest.mark.parametrize("routine", ["ml_generate_table", "ml_rag_table"])
@pytest.mark.parametrize("role", ["asker", None])
def test_of_a_batch_routine(
    db: Database, owner: Connection, taker: Connection, model: SqlModel, role: str | None, routine: str, what: str
) -> None:
    create_store(owner, "docs", [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    owner.execute(
        "CREATE TABLE kb.asked (id integer PRIMARY KEY, question text, answer jsonb); GRANT ALL ON kb.asked TO PUBLIC;"
        "INSERT INTO kb.asked VALUES (1, 'zebra'), (2, 'zebra')"
    )
    answers = iter(["first", "second"])
    was_exchanged = []

    def answer(_: Any) -> str:
        if (text := next(answers)) == "second":
            columns = "2 AS id, 'zebra' AS question, NULL::jsonb AS answer"
            was_exchanged.append(exchange(owner, taker, what, asked=columns))
        return text

    model.answers = [answer]
    options = {"model_id": "fake-generate"}
    if routine == "ml_rag_table":
        options = {"vector_store": ["public.docs"], "model_options": options}
    caller = db.connect(role)
    said = noticed(caller)
    try:
        caller.execute(f"CALL {routine}('kb.asked.question', 'kb.asked.answer', %s)", (json.dumps(options),))
    except psycopg.errors.UndefinedTable:
        assert was_exchanged == [True]
        assert what == "a view" or taker.execute("SELECT answer FROM kb.asked").fetchall() == [(None,)]
    else:
        assert was_exchanged == [False]
    assert said == []
