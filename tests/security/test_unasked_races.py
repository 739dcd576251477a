"""pipeline/changes, pipeline/isolate: what an owner changes while others read, locks, or makes large of little."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster import Connection, Database
from support.planting import COLUMNS, NEAR, ROW, ask, publish, texts, warnings
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
    connection.execute(f"CREATE TABLE evil.kb ({COLUMNS}, PRIMARY KEY (document_id)); INSERT INTO evil.kb VALUES {ROW}")
    yield connection
    # whatever a test that failed has left open and locked
    good.release()
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


#: of whoever changes the table
SETTINGS = [
    "quote_all_identifiers = on", "standard_conforming_strings = off", "transform_null_equals = on",
    "array_nulls = off", "row_security = off", "search_path = evil", "bytea_output = escape",
    "default_transaction_isolation = 'serializable'",
    "enable_indexscan = off; SET enable_seqscan = off; SET enable_bitmapscan = off", "DateStyle = 'German'",
]  # fmt: skip


@pytest.mark.parametrize("change", WAITS)
def test_no_setting_of_the_owner_ends_the_waiting(read: Connection, change: str) -> None:
    for setting in SETTINGS:
        read.execute(f"SET {setting}")
        with error("55P03", ours=False):
            read.execute(WAITS[change])
        read.execute("RESET ALL; SET lock_timeout = '50ms'")


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


@pytest.mark.fuzz
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


# -- small things that are large --------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["document_name", "document_id", "metadata", "segment"])
def test_a_short_value_that_is_a_long_text_is_not_read(attacker: Connection, asker: Connection, column: str) -> None:
    """An array of a hundred numbers of 131 072 digits each: 1.2 kB stored, 13 MB as text."""
    attacker.execute(
        f"ALTER TABLE evil.kb DROP CONSTRAINT kb_pkey, ALTER {column} DROP NOT NULL, ALTER {column} TYPE numeric[]"
        " USING array_fill('1e131071'::numeric, ARRAY[100])"
    )
    publish(attacker)
    said = warnings(asker)
    for options in ({}, {"retrieval_options": {"segment_overlap": 1}}):
        assert ask(asker, **options)[0]["vector_store"] == ["public.good"]
    assert [column in detail and "55000" in detail for _, detail in said] == [True, True]


@pytest.mark.parametrize("number", ["1e131071", "-1e400", "1e-16000"])
@pytest.mark.parametrize("type", ["json", "jsonb"])
def test_numbers_of_thousands_of_digits_in_metadata_are_not_shown(
    attacker: Connection, asker: Connection, type: str, number: str
) -> None:
    attacker.execute(f"ALTER TABLE evil.kb ALTER metadata TYPE {type} USING metadata::{type}")
    attacker.execute(f'UPDATE evil.kb SET metadata = \'{{"a": [{{"b": {number}}}]}}\'')
    attacker.execute(f"INSERT INTO evil.kb SELECT 'x', '{{\"a\": [1e9, 0.5, 0]}}', 2, 1, 'planted', '{NEAR}'")
    publish(attacker)
    found = asker.execute(
        "SELECT metadata FROM ml_rag_search('contract notice period', '{\"n_citations\": 9}')"
        " WHERE vector_store = 'evil.kb' ORDER BY document_id"
    ).fetchall()
    assert found == [(None,), ({"a": [1e9, 0.5, 0]},)]


@pytest.mark.parametrize(
    ("type", "large", "small"),
    [
        ("text", "repeat('law', 100000)", "'law'"),
        ("jsonb", "to_jsonb(repeat('law', 100000))", "'\"law\"'"),
        ("text[]", "ARRAY[repeat('law', 100000), 'law']", "'{law}'"),
    ],
)
@pytest.mark.parametrize("path", [{}, WORDS])
def test_large_values_are_not_compared_either(
    attacker: Connection, asker: Connection, path: dict[str, Any], type: str, large: str, small: str
) -> None:
    attacker.execute(f"ALTER TABLE evil.kb ADD topic {type} DEFAULT {small}")
    attacker.execute(f"INSERT INTO evil.kb SELECT 'x', '{{}}', 2, 1, 'contract planted', '{NEAR}', {large}")
    attacker.execute("UPDATE evil.kb SET segment = 'contract'")
    publish(attacker, "SELECT ml_rag.enable_keyword_search('evil.kb')" if path else "")
    document, _ = ask(asker, **path, filters={"topic": {"like": "law%"}}, exclude_vector_store=["good"],
                      citation_fields=["document_id"])  # fmt: skip
    assert [c["document_id"] for c in document["citations"]] == [1]


def test_many_partitions_or_indexes_are_too_many(attacker: Connection, asker: Connection) -> None:
    """Each that is opened costs the session time, a lock and memory that it does not give back."""
    attacker.execute(f"CREATE TABLE evil.t ({COLUMNS}) PARTITION BY LIST (document_id)")
    attacker.execute(
        "DO $$BEGIN FOR i IN 1..127 LOOP EXECUTE format("
        "'CREATE TABLE evil.t%s PARTITION OF evil.t (UNIQUE (document_id)) FOR VALUES IN (%1$s)', i); END LOOP; END$$"
    )
    publish(attacker)
    publish(attacker, table="evil.t")
    # 128 tables, 127 indexes
    assert "evil.t" in ask(asker)[0]["vector_store"]
    attacker.execute("CREATE INDEX ON evil.t1 (segment_number); CREATE INDEX ON evil.t2 (segment_number)")
    assert ask(asker)[0]["vector_store"] == ["evil.kb", "public.good"]
    for i in range(254):
        attacker.execute(f"CREATE INDEX ON evil.kb (segment_number, document_id) WITH (fillfactor = {50 + i % 50})")
    assert ask(asker)[0]["vector_store"] == ["evil.kb", "public.good"]
    attacker.execute("CREATE INDEX ON evil.kb (segment_number)")
    assert ask(asker)[0]["vector_store"] == ["public.good"]


def test_the_wait_for_locks_is_shared_by_partitions(attacker: Connection, asker: Connection) -> None:
    """Their owner can release one lock after the other, each at the last moment."""
    attacker.execute(f"CREATE TABLE evil.t ({COLUMNS}) PARTITION BY LIST (document_id)")
    for i in range(29):
        attacker.execute(f"CREATE TABLE evil.t{i} PARTITION OF evil.t FOR VALUES IN ({i})")
    for relation, expected in (("evil.kb", "100ms"), ("evil.t", "33ms")):
        with asker.transaction():
            asker.execute("SELECT ml_rag._limit_wait(100, %s::regclass)", (relation,))
            assert asker.execute("SHOW lock_timeout").fetchone() == (expected,)


# -- time -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hurried(good: Database) -> Iterator[None]:
    good.connect().execute("SELECT ml_rag.configure('untrusted_ms', '10')")
    yield
    good.connect().execute("SELECT ml_rag.configure('untrusted_ms', NULL)")


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("column", ["segment", "segment_embedding"])
def test_rows_that_cannot_be_found_meet_the_clock_too(attacker: Connection, asker: Connection, column: str) -> None:
    publish(attacker)
    for _ in range(3):  # the first call of a session takes the time by itself
        ask(asker)
    attacker.execute(
        "INSERT INTO evil.kb (document_id, {}) SELECT i, '{}' FROM generate_series(2, 300000) AS i".format(
            *(("segment_embedding", NEAR) if column == "segment" else ("segment", "planted"))
        )
    )
    said = warnings(asker)
    assert ask(asker)[0]["vector_store"] == ["public.good"]
    assert ["54000" in detail for _, detail in said] == [True]


@pytest.mark.usefixtures("hurried")
def test_rows_without_a_name_meet_the_clock_too(good: Database, attacker: Connection, asker: Connection) -> None:
    attacker.execute("INSERT INTO evil.kb (document_id) SELECT i FROM generate_series(2, 300000) AS i")
    publish(attacker)
    of = "SELECT ml_rag._documents_of(s, false, '{}', clock_timestamp() - interval '1 s', 10)"
    attacker.execute("DELETE FROM evil.kb WHERE document_name IS NOT NULL")
    with error("54000"):
        asker.execute(f"{of} FROM ml_rag.discover() AS s WHERE s.found = 'untrusted'")


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("path", [{}, WORDS])
def test_the_clock_is_read_as_it_was_set(attacker: Connection, asker: Connection, path: dict[str, Any]) -> None:
    """IST is India's as it is written and Israel's as it is read."""
    publish(attacker, "SELECT ml_rag.enable_keyword_search('evil.kb')" if path else "")
    # 900 rows of a statement wait, and are read one by one; nobody merges them here
    attacker.execute("SET default_transaction_isolation = 'repeatable read'")
    for first in range(2, 20000, 900):
        attacker.execute(
            f"INSERT INTO evil.kb SELECT 'x', '{{}}', i, 1, 'contract planted', '{NEAR}'"
            f" FROM generate_series({first}, {first} + 899) AS i"
        )
    for zone in ("Asia/Kolkata", "America/Havana", "Asia/Shanghai"):
        for style in ("ISO", "SQL", "German"):
            asker.execute(f"SET TimeZone = '{zone}'; SET DateStyle = '{style}'")
            said = warnings(asker)
            assert ask(asker, **path)[0]["vector_store"] == ["public.good"], (zone, style)
            assert ["54000" in detail for _, detail in said] == [True]


# -- many of them -----------------------------------------------------------------------------------------------------


def test_many_stores_are_warned_of_in_few_words(attacker: Connection, asker: Connection) -> None:
    for i in range(25):
        attacker.execute(f"CREATE TABLE evil.t{i} (LIKE evil.kb)")
        publish(attacker, table=f"evil.t{i}")
    said = warnings(asker)
    ask(asker, **WORDS)
    ((message, detail),) = said
    assert message == "25 vector stores have no keyword index; keyword search ignores them"
    assert "evil.t0, evil.t1, " in detail
    assert detail.endswith(", ….")
    attacker.execute("DROP TABLE evil.kb")
    for i in range(25):
        attacker.execute(f"ALTER TABLE evil.t{i} ALTER segment_embedding TYPE vector(3)")
    said = warnings(asker)
    ask(asker)
    assert len(said) == 21
    assert said[-1][0] == "5 more vector stores cannot be searched; ignored"


def test_the_best_of_many_stores_are_cited(owner: Connection, attacker: Connection, asker: Connection) -> None:
    """Of each store's hits only those are kept that can still be cited."""
    owner.execute("SELECT ml_rag.configure('untrusted_ms', '60000')")  # a busy machine searches fewer in its second
    attacker.execute("SELECT ml_rag.enable_keyword_search('evil.kb')")
    for i in range(12):
        attacker.execute(f"CREATE TABLE evil.t{i} (LIKE evil.kb INCLUDING ALL)")
        attacker.execute(f"SELECT ml_rag.enable_keyword_search('evil.t{i}')")
        for j in range(4):
            text = "contract notice period " + "other " * ((7 * i + 5 * j) % 23)
            attacker.execute(
                f"INSERT INTO evil.t{i} VALUES ('planted', '{{}}', {j}, 1, %s, %s)",
                (text, as_text(fake_embedding(text))),
            )
        publish(attacker, table=f"evil.t{i}")
    for options in ({}, WORDS):
        best: Any = ask(asker, **options, n_citations=100)[0]["citations"]
        assert ask(asker, **options, n_citations=5)[0]["citations"] == best[:5]
    owner.execute("SELECT ml_rag.configure('untrusted_ms', NULL)")
