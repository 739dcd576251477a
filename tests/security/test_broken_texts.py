"""Texts that are not valid in the encoding of the database, and errors with such: PL/Python cannot decode them, and
would crash, and end all sessions of the server with its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from ml_rag.backend import door
from ml_rag.client.doctor import unread_stores
from support.cluster import Cluster, Connection, Database, noticed
from support.hostile_server import hostile
from support.planting import BROKEN, COLUMNS, NEAR, QUESTION, ask, publish, warnings
from support.schema import SqlModel, model, shop
from support.schema import ask as ask_tables
from support.stores import answer, create_store, error, fake_embedding, search
from support.vectorizers import create, run

__all__ = ["model", "shop"]

#: cuts a value amid a character
FAILS = "to_date('aaé' || left(segment, 0), 'YYY')::text"


@pytest.fixture
def writer(db: Database, owner: Connection) -> Connection:
    """A role that may write rows into ``kb``, which everybody searches."""
    create_store(owner, "kb", [("good", 1, 1, f"{QUESTION} good", fake_embedding(QUESTION))], "vector(16)")
    owner.execute("GRANT SELECT, INSERT ON kb TO ml_rag_user")
    writer = db.connect("tenant")
    writer.execute(BROKEN)
    return writer


@pytest.fixture
def stranger(db: Database, owner: Connection) -> Iterator[Connection]:
    """A role whose stores all calls search, with a schema evil."""
    role = db.role("stranger")
    owner.execute(f"GRANT ml_rag_publisher TO {role}; CREATE SCHEMA evil AUTHORIZATION {role}".encode())
    yield db.connect("stranger")
    owner.execute(f"REVOKE ml_rag_publisher FROM {role}".encode())  # roles are of the cluster


@pytest.mark.parametrize("column", ["segment", "document_name", "metadata"])
def test_a_text_that_is_broken_ends_no_session(
    writer: Connection, asker: Connection, owner: Connection, column: str
) -> None:
    values = {"document_name": "'bad'", "metadata": "'{}'::jsonb", "segment": f"'{QUESTION}'"}
    values[column] = {
        "metadata": "jsonb_build_object(pg_temp.broken(), pg_temp.broken())",
        "segment": f"concat('{QUESTION} ', pg_temp.broken())",
        "document_name": "pg_temp.broken()",
    }[column]
    writer.execute(
        "INSERT INTO kb (document_name, metadata, segment, document_id, segment_number, segment_embedding)"
        f" VALUES ({values['document_name']}, {values['metadata']}, {values['segment']}, 2, 1, '{NEAR}')".encode()
    )
    options = {"citation_fields": ["metadata"], "retrieval_options": {"segment_overlap": 1}}
    for _ in range(3):
        found, _ = ask(asker, **options)
        assert len(found["citations"]) == 2
        assert 'invalid value "aa?" for "YYY"' in str(found["citations"])
        assert len(search(asker, QUESTION, {})) == 2
    assert owner.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.usefixtures("writer")
def test_an_error_that_is_broken_is_one(stranger: Connection, asker: Connection) -> None:
    columns = f"document_name, metadata, document_id, segment_number, {FAILS} AS segment, segment_embedding"
    publish(
        stranger,
        f"CREATE TABLE evil.t ({COLUMNS}); INSERT INTO evil.t VALUES ('d', '{{}}', 1, 1, 'x', '{NEAR}');"
        f"CREATE VIEW evil.kb AS SELECT {columns} FROM evil.t; GRANT USAGE ON SCHEMA evil TO PUBLIC",
    )
    said = warnings(asker)
    for times in range(1, 4):
        assert [one["document_name"] for one in ask(asker)[0]["citations"]] == ["good"]
        assert len([text for text, detail in said if "evil.kb" in text and 'invalid value "aa?"' in detail]) == times
        with error("22007", 'invalid value "aa?"', ours=False):
            ask(asker, vector_store=["evil.kb"])


def test_a_statement_of_a_model_with_such_an_error_is_refused(
    model: SqlModel, shop: Connection, asker: Connection
) -> None:
    for _ in range(3):
        model.writes("SELECT to_date('aaé', 'YYY')")
        assert ask_tables(asker, use_retry=False)["reason"] == '22007: invalid value "aa?" for "YYY"'
    model.writes("SELECT 1")
    assert ask_tables(asker)["rows"] == [[1]]


def test_a_name_that_is_broken_is_none_of_a_document(writer: Connection, owner: Connection) -> None:
    """A client cannot read it: `ml-rag load` of a folder would end there."""
    writer.execute(
        "INSERT INTO kb (document_name, metadata, segment, document_id, segment_number, segment_embedding)"
        f" VALUES ('go' || pg_temp.broken(), '{{}}', 'x', 2, 1, '{NEAR}')".encode()
    )
    assert owner.execute("SELECT ml_rag.documents_below('kb', 'go')").fetchall() == [("good",)]


@pytest.mark.parametrize("column", ["document_name", "title", "headings"])
def test_a_name_that_is_broken_fails_no_call_that_looks_for_names(
    writer: Connection, asker: Connection, column: str
) -> None:
    name = "'bad.txt'"
    if column == "document_name":
        name = "'bad.tx' || split_part(pg_temp.broken(), chr(34), 2)"
    metadata = "jsonb_build_object('{}', jsonb_build_array(split_part(pg_temp.broken(), chr(34), 2)))"
    if column == "title":
        metadata = "jsonb_build_object('{}', split_part(pg_temp.broken(), chr(34), 2))"
    writer.execute(
        "INSERT INTO kb (document_name, metadata, segment, document_id, segment_number, segment_embedding)"
        f" VALUES ({name}, {metadata.format(column)}, 'x', 2, 1, '{NEAR}'),"
        f" ('r.txt', '{{}}', 'x', 3, 1, '{NEAR}')".encode()
    )
    found = answer(asker, "what does r.txt say", {"skip_generate": True, "query_options": {"document_names": True}})
    assert [one["document_name"] for one in found["citations"]] == ["r.txt"]
    found, _ = ask(asker, document_name=["good", "goot"])
    assert [one["document_name"] for one in found["citations"]] == ["good"]


def test_a_value_that_is_broken_is_none_of_a_filter(writer: Connection, owner: Connection, asker: Connection) -> None:
    owner.execute("ALTER TABLE kb ADD category text; GRANT SELECT, INSERT ON kb TO ml_rag_user")
    writer.execute(
        "INSERT INTO kb (document_name, metadata, segment, document_id, segment_number, segment_embedding, category)"
        f" SELECT 'x', '{{}}', 'x', 2, i, '{NEAR}', split_part(pg_temp.broken(), chr(34), 2)"
        " FROM generate_series(1, 50) AS i".encode()
    )
    owner.execute("ANALYZE kb")
    asker.execute("SELECT ml_rag._filter_keys(ml_rag._discover('{\"vector_store\": [\"public.kb\"]}'), 'true')")


@pytest.mark.parametrize("destination", ["column", "table"])
def test_a_key_that_is_broken_keeps_no_run_of_a_vectorizer_going(
    writer: Connection, owner: Connection, destination: str
) -> None:
    """Read by PL/Python it is another one, by which its row came up again and again."""
    owner.execute("CREATE TABLE items (id text PRIMARY KEY, name text); GRANT INSERT ON items TO ml_rag_user")
    create(owner, columns="name", destination=destination, keyword_search=False)
    writer.execute("INSERT INTO items VALUES (pg_temp.broken(), 'lamp'), ('z', 'chair'), ('a', 'table')")
    owner.execute("SET statement_timeout = '20s'")
    ((result,),) = owner.execute("CALL ml_rag.run_vectorizer('items')").fetchall()
    assert (result["embedded"], result["pending"]) == (2, 0)


@pytest.mark.parametrize("destination", ["column", "table"])
def test_a_text_that_is_broken_fails_alone_in_a_run_of_a_vectorizer(
    writer: Connection, owner: Connection, destination: str
) -> None:
    """Read by PL/Python it is another one, whose embedding was not its own: each run embedded it again."""
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text); GRANT INSERT ON items TO ml_rag_user")
    create(owner, columns="name", destination=destination, keyword_search=False)
    writer.execute("INSERT INTO items VALUES (1, 'a ' || pg_temp.broken()), (2, 'chair')")
    ((result,),) = owner.execute("CALL ml_rag.run_vectorizer('items')").fetchall()
    assert (result["embedded"], result["failed"], result["pending"]) == (1, 1, 0)
    failed = owner.execute("SELECT key, sqlstate, next_attempt::text FROM ml_rag.vectorizer_error").fetchall()
    assert failed == [("{1}", "22021", "infinity")]
    owner.execute("UPDATE items SET name = 'lamp' WHERE id = 1")
    ((result,),) = owner.execute("CALL ml_rag.run_vectorizer('items')").fetchall()
    assert (result["embedded"], result["failed"], result["pending"]) == (1, 0, 0)
    assert owner.execute("SELECT FROM ml_rag.vectorizer_error").rowcount == 0


@pytest.mark.parametrize("parent", ["segment", "document"])
def test_nor_one_that_makes_nodes(writer: Connection, owner: Connection, parent: str) -> None:
    owner.execute(
        "CREATE TABLE texts (id text PRIMARY KEY, document_id integer, segment text);"
        "GRANT INSERT ON texts TO ml_rag_user; INSERT INTO texts VALUES ('a', 1, 'One. Two.')"
    )
    writer.execute("INSERT INTO texts VALUES (pg_temp.broken(), 2, 'Three. Four.')")
    owner.execute("SET statement_timeout = '20s'")
    options = json.dumps({"transform": "sentence", "parent": parent, "embed": False})
    ((result,),) = owner.execute("CALL ml_rag.create_node_group('texts', 'sentences', %s)", (options,)).fetchall()
    assert (result["parents"], result["nodes"]) == (1, 2)


#: an SQL statement in which <b> stands for bytes that are not a character, as any role can write them into the catalog
WITH_BROKEN = (
    "DO $$ DECLARE b text; BEGIN BEGIN PERFORM to_date('aaé', 'YYY');"
    " EXCEPTION WHEN OTHERS THEN b := split_part(SQLERRM, chr(34), 2); END; EXECUTE replace({}, '<b>', b); END $$"
)


def with_broken(connection: Connection, *statements: str) -> None:
    for statement in statements:
        connection.execute(sql.SQL(WITH_BROKEN).format(sql.Literal(statement)))


@pytest.fixture
def planter(db: Database, owner: Connection) -> Iterator[Connection]:
    """A role whose stores nobody searches unasked, with a schema evil that all roles may use."""
    role = db.role("tenant")
    owner.execute(f"CREATE SCHEMA evil AUTHORIZATION {role}; GRANT USAGE ON SCHEMA evil TO PUBLIC".encode())
    yield db.connect("tenant")
    owner.execute("DROP SCHEMA evil CASCADE")  # a client cannot read its names


MARKER = "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed"


@pytest.mark.parametrize("comment", ["<b>", "made by ml_rag: <b>", "made by ml_ra<b>"])
def test_a_broken_comment_of_a_function_fails_no_drop(db: Database, owner: Connection, comment: str) -> None:
    planter = db.connect("stranger")  # of no group
    function = "pg_temp.t_1_visible()"
    planter.execute(f"CREATE FUNCTION {function} RETURNS integer LANGUAGE sql AS 'SELECT 1'".encode())
    with_broken(planter, f"COMMENT ON FUNCTION {function} IS '{comment}'")
    owner.execute("CREATE TABLE other (); DROP TABLE other; CREATE SCHEMA other; DROP SCHEMA other")


@pytest.mark.parametrize("comment", [f"<b> {MARKER}", f"{MARKER}<b>", f"{MARKER}<b>,SEGMENT=<b>x,EMBEDDING=<b>"])
def test_a_broken_marker_fails_no_call_of_others(
    planter: Connection, owner: Connection, asker: Connection, db: Database, comment: str
) -> None:
    create_store(owner, "kb", [("good", 1, 1, QUESTION, fake_embedding(QUESTION))], "vector(16)")
    owner.execute("GRANT SELECT ON kb TO PUBLIC")
    planter.execute("CREATE TABLE evil.kb (id integer PRIMARY KEY, name text)")
    create(planter, "evil.kb", columns="name", keyword_search=False)
    planter.execute(f"CREATE TABLE evil.docs ({COLUMNS}); GRANT SELECT ON evil.kb, evil.docs TO PUBLIC".encode())
    for table in ("kb", "docs"):
        with_broken(planter, f"COMMENT ON COLUMN evil.{table}.segment_embedding IS '{comment}'")
    for connection in (asker, owner):
        for options in ({}, {"vector_store": ["kb"]}, {"explain": True}):
            assert [one["document_name"] for one in ask(connection, **options)[0]["citations"]] == ["good"], options
        for name in ("docs", "kb_2", "public.docs"):
            with error("P0002"):
                ask(connection, vector_store=[name])
    assert unread_stores(db.connect()) is not None
    owner.execute("CREATE SCHEMA other; DROP SCHEMA other -- ml_rag")
    owner.execute("BEGIN; DROP EXTENSION ml_rag CASCADE; ROLLBACK")


def test_broken_names_fail_no_call_of_others(planter: Connection, owner: Connection, asker: Connection) -> None:
    create_store(owner, "kb", [("good", 1, 1, QUESTION, fake_embedding(QUESTION))], "vector(16)")
    owner.execute("GRANT SELECT ON kb TO PUBLIC")
    for table, column in (('"<b>"', "segment_embedding"), ("t2", '"<b>"'), ('"k<b>"', "segment_embedding")):
        columns = COLUMNS.replace("segment_embedding", column)
        marker = MARKER if column == "segment_embedding" else f"{MARKER},SEGMENT=segment"
        with_broken(
            planter,
            f"CREATE TABLE evil.{table} ({columns})",
            f"GRANT SELECT ON evil.{table} TO PUBLIC",
            f"COMMENT ON COLUMN evil.{table}.{column} IS '{marker}'",
        )
    for connection in (asker, owner):
        for options in ({}, {"vector_store": ["kb"]}, {"explain": True}):
            assert [one["document_name"] for one in ask(connection, **options)[0]["citations"]] == ["good"], options
        for options in ({"vector_store": ["kc"]}, {"embed_model_id": "fake-embed-slow"}):
            with error("P0002"):
                ask(connection, **options)


@pytest.mark.parametrize(
    "statement",
    [
        "COMMENT ON TABLE {} IS '<b>'",
        "COMMENT ON TABLE {} IS 'ML_RAG_NODE_GROU<b>'",
        'ALTER TABLE {} ADD "<b>" text',
        'ALTER TABLE {} RENAME TO "item<b>"',
    ],
)
@pytest.mark.parametrize("table", ["evil.items", "pg_temp.items"])
def test_what_is_broken_in_the_catalog_fails_no_question_about_tables(
    model: SqlModel, shop: Connection, planter: Connection, asker: Connection, statement: str, table: str
) -> None:
    planter.execute(f"CREATE TABLE {table} (id integer)".encode())
    if table == "evil.items":
        planter.execute("GRANT SELECT ON evil.items TO PUBLIC")
    with_broken(planter, statement.format(table))
    model.writes("SELECT 1")
    for connection in (shop, asker):
        assert ask_tables(connection)["rows"] == [[1]]
        assert connection.execute("SELECT ml_retrieve_schema_metadata('how many?')").fetchone() != (None,)
        with error("42P01"):
            ask_tables(connection, tables=["itemx"])


def test_what_is_broken_of_trusted_roles_fails_none_either(
    model: SqlModel, shop: Connection, stranger: Connection, asker: Connection
) -> None:
    stranger.execute(
        "CREATE TABLE evil.items (id integer); GRANT SELECT ON evil.items TO PUBLIC;"
        " GRANT USAGE ON SCHEMA evil TO PUBLIC"
    )
    with_broken(
        stranger,
        "COMMENT ON TABLE evil.items IS '<b>'",
        'ALTER TABLE evil.items ADD "<b>" text',
        "COMMENT ON COLUMN evil.items.id IS '<b>'",
    )
    with_broken(stranger, "INSERT INTO evil.items SELECT 1, '<b>' FROM generate_series(1, 100)")
    stranger.execute("ANALYZE evil.items")
    model.writes("SELECT 1")
    assert ask_tables(asker)["rows"] == [[1]]


@contextlib.contextmanager
def encoded(cluster: Cluster, encoding: str) -> Iterator[Database]:
    """A database of that encoding."""
    name = f"{cluster.prefix}_{encoding.lower()}"
    cluster.execute(f"CREATE DATABASE {{}} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'", name)
    database = Database(cluster.dsn, name, cluster.prefix)
    try:
        yield database
    finally:
        database.close()
        cluster.execute("DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture(params=["LATIN1"])
def latin(cluster: Cluster, model_server: str, request: pytest.FixtureRequest) -> Iterator[Database]:
    with encoded(cluster, request.param) as database:
        owner = database.connect()
        owner.execute("SET client_encoding = 'UTF8'; CREATE EXTENSION ml_rag CASCADE")
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (model_server,))
        owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed')")
        yield database


def test_errors_are_read_where_the_database_is_not_utf8(latin: Database) -> None:
    owner = latin.connect()
    owner.execute("SET client_encoding = 'UTF8'")
    create_store(owner, "kb", [("good", 1, 1, f"{QUESTION} é", fake_embedding(QUESTION))], "vector(16)")
    owner.execute("ALTER TABLE kb ADD day date")
    for _ in range(3):
        with error("22023", "invalid input syntax for type date"):
            ask(owner, vector_store=["public.kb"], filters={"day": "é"})
        assert [one["segment"] for one in ask(owner)[0]["citations"]] == [f"{QUESTION} é"]


def test_a_name_with_an_accent_is_no_other_where_the_database_is_not_utf8(latin: Database) -> None:
    """PL/Python gives statements to PostgreSQL in UTF-8, in which it has the name of another relation."""
    owner, attacker, asker = latin.connect(), latin.connect("tenant"), latin.connect("asker")
    for connection in (owner, attacker, asker):
        connection.execute("SET client_encoding = 'UTF8'")
    create_store(owner, "ké", [("good", 1, 1, QUESTION, fake_embedding(QUESTION))], "vector(16)")
    owner.execute('GRANT SELECT ON "ké" TO PUBLIC; GRANT CREATE ON SCHEMA public TO PUBLIC')
    attacker.execute(
        "CREATE FUNCTION run() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$;"
        "CREATE VIEW \"kÃ©\" AS SELECT '(0,1)'::tid AS ctid, 'd'::text AS document_name, '{}'::jsonb AS metadata,"
        " 1::bigint AS document_id, 1 AS segment_number, 'planted'::text AS segment,"
        f" '{NEAR}'::vector(16) AS segment_embedding WHERE run(); GRANT SELECT ON \"kÃ©\" TO PUBLIC".encode()
    )
    said = [noticed(connection) for connection in (owner, asker)]
    owner.execute("SELECT ml_rag.enable_keyword_search('\"ké\"')")
    words = {"semantic_search": False, "keyword_search": True}
    near: dict[str, Any] = {"filters": {"document_id": 1}, "retrieval_options": {"segment_overlap": 1}}
    for connection in (owner, asker):
        for options in ({}, words, near, {**near, **words}, {"explain": True}, {"vector_store": ["public.ké"]}):
            assert [one["document_name"] for one in ask(connection, **options)[0]["citations"]] == ["good"], options
        ((statement,),) = connection.execute("SELECT ml_rag.statement(%s)", (QUESTION,)).fetchall()
        assert len(connection.execute(statement).fetchall()) == 1
    assert not any("ran as" in text for told in said for text in told)


ACCENTS = json.dumps(
    {
        "embed_model_id": "fake-embed",
        "sample": 0,
        "vector_store_columns": {
            "segment": "größe",
            "segment_embedding": "véc",
            "document_name": "näme",
            "document_id": "clé",
            "segment_number": "nö",
            "metadata": "metä",
        },
    }
)


@pytest.fixture
def accents(latin: Database) -> Connection:
    """The owner, with a store "schö"."tü" whose columns and key type have accents, too."""
    owner = latin.connect()
    owner.execute("SET client_encoding = 'UTF8'")
    owner.execute(
        'CREATE SCHEMA "schö"; GRANT USAGE ON SCHEMA "schö" TO PUBLIC; CREATE EXTENSION citext SCHEMA "schö";'
        'CREATE TABLE "schö"."tü" ("clé" "schö".citext, "nö" integer, "näme" text, "größe" text, "metä" jsonb,'
        ' "véc" vector(16), "schlüssel" text PRIMARY KEY);'
        f"INSERT INTO \"schö\".\"tü\" SELECT 'ä', i, 'dök', '{QUESTION} é' || i, '{{}}', '{NEAR}', 'ö' || i"
        ' FROM generate_series(1, 3) AS i; GRANT SELECT ON "schö"."tü" TO PUBLIC'
    )
    owner.execute('SELECT ml_rag.adopt(\'"schö"."tü"\', %s)', (ACCENTS,))
    owner.execute('SELECT ml_rag.enable_keyword_search(\'"schö"."tü"\', \'{"segment": "größe"}\')')
    return owner


def plant(latin: Database, owner: Connection, domain: str) -> None:
    """A role makes a schema of the name which "schö" has in UTF-8, with a domain whose CHECK runs its code."""
    owner.execute(f"GRANT CREATE ON DATABASE {latin.name} TO {latin.role('tenant')}".encode())
    attacker = latin.connect("tenant")
    attacker.execute("SET client_encoding = 'UTF8'")
    name = "schö".encode().decode("latin-1")
    attacker.execute(
        f'CREATE SCHEMA "{name}"; GRANT USAGE ON SCHEMA "{name}" TO PUBLIC;'
        f'CREATE FUNCTION "{name}".run(x text) RETURNS boolean LANGUAGE plpgsql AS'
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$;"
        f'CREATE DOMAIN "{name}".{domain} AS text CHECK ("{name}".run(VALUE))'.encode()
    )


def test_accents_are_found_where_the_database_is_not_utf8(latin: Database, accents: Connection) -> None:
    plant(latin, accents, "citext")
    asker = latin.connect("asker")
    asker.execute("SET client_encoding = 'UTF8'")
    words = {"semantic_search": False, "keyword_search": True}
    name = {"vector_store": ["schö.tü"]}
    said = [noticed(connection) for connection in (accents, asker)]
    for connection in (accents, asker):
        for options in (
            {},
            words,
            name,
            {"filters": {"näme": "dök"}},
            {"filters": {"schlüssel": ["ö1", "ö3"]}, **words},
            {"document_name": ["dök"]},
            {"retrieval_options": {"segment_overlap": 1}, "explain": True},
            {"arms": [{"search": "keyword"}, {"search": "semantic"}], **name},
        ):
            document, _ = ask(connection, **options)
            assert {one["document_name"] for one in document["citations"]} == {"dök"}, options
            assert document["vector_store"] == ["schö.tü"]
        found = connection.execute("SELECT DISTINCT vector_store FROM ml_rag_search(%s)", (QUESTION,)).fetchall()
        assert found == [("schö.tü",)]
        ((statement,),) = connection.execute("SELECT ml_rag.statement(%s)", (QUESTION,)).fetchall()
        assert len(connection.execute(statement).fetchall()) == 3
    assert not any("ran as" in text for told in said for text in told)


def test_jobs_read_accents_where_the_database_is_not_utf8(latin: Database, accents: Connection) -> None:
    accents.execute(
        'CREATE TABLE "schö"."vü" ("schlüssel" text PRIMARY KEY, "nämé" text);'
        "INSERT INTO \"schö\".\"vü\" VALUES ('ä', 'lamp ä'), ('ö', 'rope ö')"
    )
    create(accents, '"schö"."vü"', columns="nämé", destination="table", document_name="{schlüssel}")
    assert run(accents, '"schö"."vü"')["embedded"] == 2
    accents.execute(
        'CALL ml_rag.create_node_group(\'"schö"."vü_segments"\', \'sentences\', \'{"transform": "sentence"}\')'
    )
    options = {"vector_store": ["schö.vü_segments"], "arms": [{"search": "semantic", "in": "sentences"}]}
    found = accents.execute("SELECT document_name, segment FROM ml_rag_search('rope ö', %s)", (json.dumps(options),))
    assert found.fetchall()[0] == ("ö", "rope ö")
    accents.execute('CALL ml_embed_table(\'"schö"."vü"."nämé"\', \'"schö"."vü"."wéctor"\')')
    assert accents.execute('SELECT count("wéctor") FROM "schö"."vü"').fetchone() == (2,)


def test_a_model_names_tables_of_a_schema_with_an_accent_where_the_database_is_not_utf8(
    latin: Database, local_sockets: Path, accents: Connection
) -> None:
    accents.execute(
        "CREATE TYPE \"schö\".kind AS ENUM ('red', 'blue');"
        'CREATE TABLE "schö".items (id integer, kind "schö".kind, name text);'
        "INSERT INTO \"schö\".items VALUES (1, 'red', 'Zoé'); GRANT SELECT ON \"schö\".items TO PUBLIC"
    )
    plant(latin, accents, "kind")
    asker = latin.connect("asker")
    asker.execute("SET client_encoding = 'UTF8'")
    said = [noticed(connection) for connection in (accents, asker)]
    accents.execute("SELECT ml_rag.configure('generate_model_id', 'fake-generate')")
    model = SqlModel()
    with hostile(local_sockets, model, owner=accents):
        for connection in (accents, asker):
            for statement in (
                "SELECT name FROM items",
                "SELECT name FROM items WHERE kind = ANY ('{red,blue}'::kind[])",
                "SELECT name FROM items WHERE 'red' = ANY ('{red}'::kind[]::text[])",
            ):
                model.writes(statement)
                found = ask_tables(connection, tables=["schö.items"], use_retry=False)
                assert found.get("rows") == [["Zoé"]], (statement, found)
    assert not any("ran as" in text for told in said for text in told)


def test_the_extension_is_refused_where_texts_have_no_encoding(cluster: Cluster) -> None:
    with encoded(cluster, "SQL_ASCII") as database:
        owner = database.connect()
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="encoding SQL_ASCII"):
            owner.execute("CREATE EXTENSION ml_rag CASCADE")


@pytest.mark.parametrize("latin", ["WIN1252"], indirect=True)
def test_names_that_cannot_be_converted_fail_no_call_of_others(latin: Database) -> None:
    """0x81 is no character of this encoding, and a client that has it, too, writes it."""
    owner, asker = latin.connect(), latin.connect("asker")
    for connection in (owner, asker):
        connection.execute("SET client_encoding = 'UTF8'")
    create_store(owner, "kb", [("good", 1, 1, f"{QUESTION} é", fake_embedding(QUESTION))], "vector(16)")
    owner.execute(f"GRANT SELECT ON kb TO PUBLIC; GRANT CREATE ON DATABASE {latin.name} TO PUBLIC".encode())
    attacker = latin.connect("tenant")
    attacker.execute("SET client_encoding = 'WIN1252'")
    schema = b'"t\x81"'
    attacker.execute(b"CREATE SCHEMA " + schema + b"; GRANT USAGE ON SCHEMA " + schema + b" TO PUBLIC")
    for table, column in ((b"kb", b'"\x81"'), (b'"k\x81"', b"segment_embedding")):
        table = schema + b"." + table
        columns = COLUMNS.encode().replace(b"segment_embedding", column)
        attacker.execute(b"CREATE TABLE " + table + b" (" + columns + b"); GRANT SELECT ON " + table + b" TO PUBLIC")
        marker = f"{MARKER},SEGMENT=segment".encode() + b",DOCUMENT_NAME=\x81"
        attacker.execute(b"COMMENT ON COLUMN " + table + b"." + column + b" IS '" + marker + b"'")
    for connection in (owner, asker):
        for options in (
            {},
            {"vector_store": ["kb"]},
            {"vector_store": ["public.kb"]},
        ):
            assert [one["document_name"] for one in ask(connection, **options)[0]["citations"]] == ["good"], options
        assert connection.execute("SELECT vector_store FROM ml_rag.discover()").fetchall() == [("public.kb",)]


def test_others_decode_as_ever() -> None:
    assert door.VERSION
    with pytest.raises(UnicodeDecodeError):
        b"\xc3".decode()
    with pytest.raises(UnicodeDecodeError):
        json.loads(b'"\xc3"')
    with pytest.raises(UnicodeEncodeError):
        "\udcc3".encode()
    here = {"__name__": "x", "b": b"aa\xc3"}
    exec(compile("decoded = b.decode()", f"{door._HERE}any.py", "exec"), here)  # as PL/Python does for it
    assert here["decoded"] == "aa?"
