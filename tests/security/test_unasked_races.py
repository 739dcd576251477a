"""pipeline/changes, pipeline/isolate: what an owner changes while others read, locks, or makes large of little."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from security.test_unasked_stores import COLUMNS, NEAR, ROW, ask, publish, texts, warnings
from support.cluster import Connection, Database
from support.stores import as_text, create_store, error, fake_embedding

WORDS = {"keyword_search": True, "semantic_search": False}

#: by the owner of evil.kb: code that tells who runs it
CODE = """
CREATE TABLE evil.ran (role name); GRANT INSERT ON evil.ran TO PUBLIC;
CREATE FUNCTION evil.f() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO evil.ran VALUES (current_user);
  RETURN true;
END$$;
CREATE FUNCTION evil.g(integer) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
  RAISE WARNING 'code of the owner runs as %', current_user;
  RETURN 1;
END$$"""

#: how it gets into the table
PUT_IN = {
    "a policy": "ALTER TABLE evil.kb ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON evil.kb USING (evil.f())",
    "an index": "CREATE INDEX ON evil.kb ((segment_number + evil.g(1)))",
    "statistics": "CREATE STATISTICS evil.s ON (segment_number + evil.g(1)), segment FROM evil.kb",
    "a child": "CREATE TABLE evil.child (CHECK (segment_number > evil.g(1))) INHERITS (evil.kb)",
}


@pytest.fixture(scope="module")
def prepared(module_db: Database) -> Database:
    """A store of a superuser, with a keyword index; the tenant may make schemas."""
    owner = module_db.connect()
    create_store(owner, "good", type="vector(16)")
    for i, text in enumerate(("contract notice", "contract period of notice", "period")):
        embedding = as_text(fake_embedding(text))
        owner.execute("INSERT INTO good VALUES ('g', '{}', 1, %s, %s, %s)", (10 * i, text, embedding))
    owner.execute("SELECT ml_rag.enable_keyword_search('good')")
    owner.execute(f"GRANT CREATE ON DATABASE {module_db.name} TO {module_db.role('tenant')}")
    module_db.close()
    return module_db


@pytest.fixture
def good(prepared: Database) -> Iterator[Database]:
    yield prepared
    prepared.close()


@pytest.fixture
def attacker(good: Database) -> Iterator[Connection]:
    connection = good.connect("tenant")
    connection.execute("CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC")
    connection.execute(f"CREATE TABLE evil.kb ({COLUMNS}, PRIMARY KEY (document_id)); INSERT INTO evil.kb VALUES {ROW}")
    yield connection
    # whatever a test that failed has left open and locked
    good.close()
    good.connect("tenant").execute("DROP SCHEMA evil CASCADE")


@pytest.fixture
def asker(good: Database) -> Connection:
    return good.connect("asker")


# -- what it is, and what it was --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE", "SERIALIZABLE READ ONLY DEFERRABLE"])
@pytest.mark.parametrize("change", PUT_IN)
def test_the_catalog_of_an_old_snapshot_is_not_believed(
    attacker: Connection, asker: Connection, level: str, change: str
) -> None:
    attacker.execute(CODE)
    publish(attacker, "SELECT ml_rag.enable_keyword_search('evil.kb')")
    said = warnings(asker)
    asker.execute(f"BEGIN ISOLATION LEVEL {level}")
    asker.execute("SELECT 1 FROM good")
    attacker.execute(PUT_IN[change])
    for options in ({}, WORDS, {"query_embedding": NEAR}):
        document, _ = ask(asker, **options)
        assert document["vector_store"] == ["public.good"]
        assert texts(document)
    # a name without its schema is not enough either, and it is said why
    ask(asker, vector_store=["kb", "good"])
    asker.execute("COMMIT")
    assert ["isolation level" in detail for _, detail in said] == [True]
    assert attacker.execute("SELECT * FROM evil.ran").fetchall() == []


def test_writers_of_a_planted_table_fail_no_serializable_transaction(
    good: Database, attacker: Connection, asker: Connection
) -> None:
    """A pivot of the owner's making: it read what another one changed, and writes what the asker reads."""
    publish(attacker, "CREATE TABLE evil.other AS SELECT 1 AS a")
    second = good.connect("tenant")
    with asker.transaction():
        asker.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        asker.execute("SELECT count(*) FROM good")
        attacker.execute("BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT * FROM evil.other")
        second.execute("BEGIN ISOLATION LEVEL SERIALIZABLE; UPDATE evil.other SET a = 2; COMMIT")
        attacker.execute("UPDATE evil.kb SET segment = segment || '.'; COMMIT")
        assert texts(ask(asker)[0])


@pytest.mark.parametrize("change", PUT_IN)
def test_a_table_that_is_being_changed_is_left_out(attacker: Connection, asker: Connection, change: str) -> None:
    """Not read as it was: the change could be committed just before the planner looks."""
    publish(attacker, CODE)
    for options in ({}, {"query_embedding": NEAR}):
        assert "evil.kb" in ask(asker, **options)[0]["vector_store"]
        said = warnings(asker)
        attacker.execute("BEGIN")
        attacker.execute(PUT_IN[change])
        document, _ = ask(asker, **options)
        attacker.execute("ROLLBACK")
        assert document["vector_store"] == ["public.good"]
        assert ["55P03" in detail for _, detail in said] == [True]


def test_who_writes_a_table_or_reads_it_holds_up_nobody(
    good: Database, attacker: Connection, asker: Connection
) -> None:
    publish(attacker, "SELECT ml_rag.enable_keyword_search('evil.kb')")
    attacker.execute("BEGIN")
    attacker.execute("INSERT INTO evil.kb SELECT 'x', '{}', 2, 1, 'planted', segment_embedding FROM evil.kb")
    other = good.connect("asker", autocommit=False)
    for options in ({}, WORDS, {"retrieval_options": {"segment_overlap": 1}}):
        for connection in (other, asker):
            assert "evil.kb" in ask(connection, **options)[0]["vector_store"]
    # of the locks under which it was read, none is left but that of any reader
    locks = other.execute("SELECT DISTINCT mode FROM pg_locks WHERE relation = 'evil.kb'::regclass AND pid ="
                          " pg_backend_pid()").fetchall()  # fmt: skip
    assert locks in ([("AccessShareLock",)], [])
    other.rollback()
    attacker.execute("ROLLBACK")


WAITS = {
    **{what: statements for what, statements in PUT_IN.items() if what != "a policy"},
    "a condition of an index": "CREATE INDEX ON evil.kb (document_id) WHERE segment_number > evil.g(1)",
    "an older table as a child": "ALTER TABLE evil.other INHERIT evil.kb",
    "a child in a new schema": "CREATE SCHEMA evil2 CREATE TABLE a (CHECK (evil.g(1) < 9)) INHERITS (evil.kb)",
    "a partition": "ALTER TABLE evil.t ATTACH PARTITION evil.other FOR VALUES IN (1)",
    "an index of a partition": "CREATE INDEX ON evil.t2 ((segment_number + evil.g(1)))",
    "a constraint of a partition": "ALTER TABLE evil.t2 ADD CHECK (segment_number > evil.g(1))",
    "its schema's name": "ALTER SCHEMA evil RENAME TO evil2",
    "its name": "ALTER TABLE evil.kb RENAME TO other2",
}
DOES_NOT_WAIT = (
    "CREATE INDEX ON evil.kb (segment_number)",
    "CREATE STATISTICS evil.s ON segment_number, segment FROM evil.kb",
    "CREATE INDEX ON evil.t (segment_number)",
    "CREATE INDEX ON evil.plain ((id + evil.g(1)))",
    "CREATE TABLE evil.child () INHERITS (evil.plain)",
    "COMMENT ON TABLE evil.kb IS 'x'",
)


@pytest.fixture
def read(good: Database, attacker: Connection, asker: Connection) -> Iterator[Connection]:
    """The attacker, who does not wait for locks, while a transaction is open that has searched its tables."""
    attacker.execute(CODE)
    attacker.execute(
        f"CREATE TABLE evil.other (LIKE evil.kb); CREATE TABLE evil.t ({COLUMNS}) PARTITION BY LIST (document_id);"
        "CREATE TABLE evil.t2 PARTITION OF evil.t FOR VALUES IN (2);"
        "CREATE TABLE evil.plain (id integer, segment text)"
    )
    publish(attacker)
    publish(attacker, table="evil.t")
    attacker.execute("SET lock_timeout = '50ms'")
    with asker.transaction():
        assert ask(asker, query_embedding=NEAR)[0]["vector_store"] == ["evil.kb", "evil.t", "public.good"]
        yield attacker


@pytest.mark.parametrize("change", WAITS)
def test_what_puts_code_into_a_table_waits_for_its_readers(read: Connection, change: str) -> None:
    with error("55P03", ours=False):
        read.execute(WAITS[change])


@pytest.mark.parametrize("statement", DOES_NOT_WAIT)
def test_what_holds_no_code_waits_for_nobody(read: Connection, statement: str) -> None:
    read.execute(statement)


def test_owners_whom_everybody_trusts_are_left_alone(good: Database, asker: Connection) -> None:
    owner = good.connect()
    owner.execute("SET lock_timeout = '50ms'")
    with asker.transaction():
        assert ask(asker, query_embedding=NEAR)[0]["vector_store"] == ["public.good"]
        owner.execute("CREATE INDEX of_lower ON good (lower(segment))")
    owner.execute("DROP INDEX of_lower")


def test_a_view_in_the_schema_of_another_role_must_be_named(
    good: Database, attacker: Connection, asker: Connection
) -> None:
    """That role could put a view of its own in the place, and a view is locked by nothing but its name."""
    owner = good.connect()
    owner.execute("CREATE VIEW evil.seen AS SELECT * FROM good; GRANT SELECT ON evil.seen TO PUBLIC")
    owner.execute("COMMENT ON COLUMN evil.seen.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    assert ask(asker)[0]["vector_store"] == ["public.good"]
    assert ask(asker, vector_store=["evil.seen"])[0]["vector_store"] == ["evil.seen"]


@pytest.mark.parametrize("change", ["an index", "statistics", "a child", "a table in its place"])
def test_code_that_comes_and_goes_as_fast_as_can_be_runs_for_nobody(
    attacker: Connection, asker: Connection, change: str
) -> None:
    attacker.execute(CODE)
    publish(attacker, "CREATE TABLE evil.child (LIKE evil.kb, CHECK (segment_number > evil.g(1)))")
    statements = {
        "an index": "CREATE INDEX i ON evil.kb ((segment_number + evil.g(1))); DROP INDEX evil.i",
        "statistics": PUT_IN["statistics"] + "; DROP STATISTICS evil.s",
        "a child": "ALTER TABLE evil.child INHERIT evil.kb; ALTER TABLE evil.child NO INHERIT evil.kb",
        "a table in its place": (
            "BEGIN; ALTER SCHEMA evil RENAME TO evil3; ALTER SCHEMA evil2 RENAME TO evil;"
            " ALTER SCHEMA evil3 RENAME TO evil2; COMMIT"
        ),
    }[change].split(";")
    if change == "a table in its place":
        attacker.execute(
            "CREATE SCHEMA evil2; GRANT USAGE ON SCHEMA evil2 TO PUBLIC; CREATE TABLE evil2.kb (LIKE evil.kb);"
            "CREATE INDEX ON evil2.kb ((segment_number + evil.g(1))); GRANT SELECT ON evil2.kb TO PUBLIC"
        )
    stop = threading.Event()

    def change_it() -> None:
        while not stop.is_set():
            for statement in statements:
                attacker.execute(statement)

    thread = threading.Thread(target=change_it)
    thread.start()
    said = warnings(asker)
    try:
        for _ in range(100):
            assert texts(ask(asker, query_embedding=NEAR)[0])
    finally:
        stop.set()
        thread.join()
        attacker.execute("DROP SCHEMA IF EXISTS evil2 CASCADE; CREATE SCHEMA IF NOT EXISTS evil")
    assert not [message for message, _ in said if "code of the owner" in message]
