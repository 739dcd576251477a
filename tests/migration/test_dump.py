"""pg_dump and pg_restore: a database with something of everything gives the same answers where it is restored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support import content, objects
from support.cluster import Cluster, Connection, Database
from support.extension import ROOT, VERSIONS, data, install
from support.keywords import assert_exact
from support.planting import BROKEN
from support.programs import dump, restore


@dataclass
class Source:
    """A filled database, and what it holds and answers."""

    database: Database
    owner: Connection
    roles: dict[str, str]
    answers: dict[str, Any]
    data: dict[str, Any]


@pytest.fixture(scope="module")
def source(cluster: Cluster) -> Iterator[Source]:
    with cluster.database() as database:
        owner = database.connect()
        roles = content.create_roles(owner, database.name)
        try:
            content.make(owner, roles)
            # by hand, and so in the dump
            owner.execute("REVOKE EXECUTE ON FUNCTION ml_generate(text, jsonb) FROM ml_rag_user")
            owner.execute(
                sql.SQL("GRANT EXECUTE ON FUNCTION ml_rag.configure(text, text) TO {}").format(
                    sql.Identifier(roles["tenant"])
                )
            )
            yield Source(database, owner, roles, content.answers(owner, roles), data(owner))
        finally:
            content.drop_roles(owner, roles)


@pytest.fixture
def target(cluster: Cluster, source: Source) -> Iterator[Database]:
    """An empty database, without the extension."""
    with cluster.database("template0") as database:
        yield database
        # the roles of the source own things here too
        owner = database.connect()
        for role in source.roles.values():
            owner.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.Identifier(role)))


def assert_same(source: Source, owner: Connection) -> None:
    assert data(owner) == source.data
    assert objects.differences(objects.objects(source.owner), objects.objects(owner)) == []
    problems = content.differences(source.answers, content.answers(owner, source.roles))
    assert not problems, "\n".join(problems)


def assert_lives_on(owner: Connection) -> None:
    """Indexes follow their tables, numbers go on."""
    owner.execute("DELETE FROM docs WHERE document_id = 9")
    content.insert(owner, "docs", content.rows(30, 5000))
    assert_exact(owner, "copper violin number5007")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert_exact(owner, "copper violin number5007")
    row = owner.execute("SELECT max(run_id) FROM ml_rag.evaluation_run").fetchone()
    again = owner.execute(
        "SELECT (ml_rag_evaluate('questions', %s) ->> 'run_id')::bigint",
        (psycopg.types.json.Jsonb({"options": content.MEASURED}),),
    ).fetchone()
    assert row is not None
    assert again is not None
    assert again[0] > row[0]


# custom dumps are restored below
@pytest.mark.parametrize("how", ["plain", "directory"])
def test_a_restored_database_gives_the_same_answers(source: Source, target: Database, how: str, tmp_path: Path) -> None:
    dump(source.database, how, tmp_path / "dump")
    restore(target, how, tmp_path / "dump")
    owner = target.connect()
    assert_same(source, owner)
    assert_lives_on(owner)


def test_a_dump_is_restored_over_what_is_there(source: Source, target: Database, tmp_path: Path) -> None:
    dump(source.database, "custom", tmp_path / "dump")
    restore(target, "custom", tmp_path / "dump")
    owner = target.connect()
    owner.execute("DELETE FROM docs WHERE document_id < 30; SELECT ml_rag.configure('abstain_text', NULL)")
    # pg_restore cannot drop the key of a partition, extension or not
    owner.execute("DROP TABLE parted")
    restore(target, "custom", tmp_path / "dump", "--clean", "--if-exists", "--single-transaction")
    assert_same(source, owner)
    assert_lives_on(owner)


def test_keyword_indexes_of_tables_that_are_not_dumped_stay_behind(
    source: Source, target: Database, tmp_path: Path
) -> None:
    """One row of such a table, which has no name where it is restored, would keep all others from being restored."""
    source.owner.execute("""
        CREATE TABLE given (id integer PRIMARY KEY, segment text);
        CREATE COLLATION words FROM "C";
        CREATE TABLE gone (id text NOT NULL, segment text) PARTITION BY LIST (id COLLATE words);
        CREATE TABLE gone_1 PARTITION OF gone DEFAULT;
        CREATE UNIQUE INDEX ON gone (id COLLATE words);
        SELECT ml_rag.enable_keyword_search('given'), ml_rag.enable_keyword_search('gone');
        INSERT INTO given VALUES (1, 'copper');
        INSERT INTO gone VALUES (1, 'copper');
        ALTER EXTENSION vector ADD TABLE given;
        DROP COLLATION words CASCADE;
        CREATE TEMPORARY TABLE passing (id integer, segment text);
        SELECT ml_rag._call_python('build_keyword_index', jsonb_build_array(jsonb_build_object(
          'store', c.oid::bigint, 'segment', 'segment', 'key', '{id}', 'configuration', 'pg_catalog.simple',
          'k1', 1, 'b', 0.5, 'statistics', 'all'), NULL))
        FROM pg_class AS c WHERE c.relname IN ('passing', 'given_pkey')""")
    stores = "SELECT store::text FROM ml_rag_internal.keyword_store ORDER BY 1"
    found = [name for (name,) in source.owner.execute(stores)]
    kept = {name for name in found if not name.isdigit() and name not in ("given", "given_pkey", "passing")}
    try:
        assert len(kept) == len(found) - 4
        dump(source.database, "custom", tmp_path / "dump")
        restore(target, "custom", tmp_path / "dump")
        owner = target.connect()
        assert {name for (name,) in owner.execute(stores)} == kept
        assert_lives_on(owner)
    finally:
        source.owner.execute("ALTER EXTENSION vector DROP TABLE given; DROP TABLE given, passing")
        source.owner.execute("DELETE FROM ml_rag_internal.keyword_store AS s WHERE s.store::text ~ '^[0-9]+$'")


#: an INSERT with a JSON value of the role's own, and one with a text
OWN_ROWS = {
    "message": (
        "INSERT INTO ml_rag.message (message_id, conversation_id, turn, query, question, citations, options)"
        " SELECT gen_random_uuid(), c.conversation_id, 1, repeat('x', %(size)s), '', '[]', %(json)s::jsonb"
        " FROM ml_rag.conversation AS c"
    ),
    "run": (
        "INSERT INTO ml_rag.evaluation_run (name, started_at, seconds, source, questions, options, stores, models,"
        " versions, measures, counted, latency, errors)"
        " VALUES ('', now(), 1, repeat('x', %(size)s), 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', %(json)s::jsonb)"
    ),
    "question": (
        "INSERT INTO ml_rag.evaluation_question (run_id, question_id, question, citations, measures, latency, reasons)"
        " SELECT r.run_id, '1', repeat('x', %(size)s), '[]', '{}', '{}', %(json)s::jsonb"
        " FROM ml_rag.evaluation_run AS r"
    ),
}


@pytest.mark.parametrize("name", OWN_ROWS)
def test_no_row_of_a_role_keeps_those_of_others_from_being_restored(db: Database, name: str) -> None:
    """COPY reads fewer levels of JSON than a parameter can have, and writes no row of 1 GB."""
    asker = db.connect("asker")
    asker.execute("INSERT INTO ml_rag.conversation DEFAULT VALUES")
    usual = {"size": 0, "json": "[" * 900 + "]" * 900}
    for one in OWN_ROWS if name == "question" else []:
        if one != name:
            asker.execute(OWN_ROWS[one], usual)
    for given in ({"json": "[" * 14000 + "]" * 14000}, {"json": "[" * 2001 + "]" * 2001}, {"size": 250_000_000}):
        with pytest.raises(psycopg.errors.CheckViolation, match="can_be_restored"):
            asker.execute(OWN_ROWS[name], usual | given)
    asker.execute(BROKEN)
    for text, document in (("pg_temp.broken()", "'{}'"), ("''", "jsonb_build_object('x', pg_temp.broken())")):
        broken = OWN_ROWS[name].replace("repeat('x', %(size)s)", text).replace("%(json)s::jsonb", document)
        with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
            asker.execute(broken.encode())
    asker.execute(OWN_ROWS[name], usual)


@pytest.mark.parametrize("statistics", ["all", "visible"])
def test_no_row_of_a_keyword_index_keeps_others_from_being_restored(cluster: Cluster, statistics: str) -> None:
    """In locale C words of such a text are none, either."""
    name = f"{cluster.prefix}_c"
    cluster.execute("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'", name)
    database = Database(cluster.dsn, name, cluster.prefix)
    try:
        writer = database.connect()
        writer.execute("CREATE EXTENSION ml_rag CASCADE")
        writer.execute(BROKEN)
        writer.execute("CREATE TABLE own (id text PRIMARY KEY, segment text)")
        writer.execute(
            "INSERT INTO own SELECT concat(i, pg_temp.broken()), pg_temp.broken() FROM generate_series(1, 3) AS i"
        )
        writer.execute("SELECT ml_rag.enable_keyword_search('own', %s)", (f'{{"statistics": "{statistics}"}}',))
        for row in ("pg_temp.broken(), 'copper'", "'a', pg_temp.broken()"):
            with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
                writer.execute(f"INSERT INTO own VALUES ({row})".encode())
        for table in ("row", "new", "posting"):
            with writer.cursor().copy(f"COPY ml_rag_internal.keyword_{table} TO STDOUT".encode()) as copy:
                b"".join(map(bytes, copy)).decode()
    finally:
        database.close()
        cluster.execute("DROP DATABASE {} WITH (FORCE)", name)


def test_a_dump_has_the_privileges_that_others_gave_and_none_of_the_extension(cluster: Cluster, tmp_path: Path) -> None:
    """Those that the script of an extension gives are its own, and with them all those of the same object."""
    with cluster.database("template0") as database:
        owner = database.connect()
        asker = database.role("asker")
        owner.execute(f"CREATE SCHEMA vec; GRANT USAGE ON SCHEMA vec TO {asker}".encode())
        owner.execute("CREATE EXTENSION vector SCHEMA vec; CREATE EXTENSION ml_rag CASCADE")
        dump(database, "plain", tmp_path / "dump")
    privileges = re.findall(r"^(?:GRANT|REVOKE) .*", (tmp_path / "dump").read_text(), re.MULTILINE)
    assert [line for line in privileges if "DATABASE" not in line] == [f"GRANT USAGE ON SCHEMA vec TO {asker};"]


@pytest.mark.parametrize("left_out", [("-N", "theirs"), ("-T", "theirs.docs")])
def test_a_dump_without_some_indexed_tables(
    db: Database, cluster: Cluster, left_out: tuple[str, str], tmp_path: Path
) -> None:
    (option,) = re.findall(r"`(--exclude-table-data=)'(.*?)'`", (ROOT / "docs/operations.md").read_text())
    owner = db.connect()
    owner.execute("CREATE SCHEMA theirs")
    for schema in ("public", "theirs"):
        owner.execute(f"CREATE TABLE {schema}.docs (id integer PRIMARY KEY, segment text)".encode())
        owner.execute("SELECT ml_rag.enable_keyword_search(%s)", (f"{schema}.docs",))
    dump(db, "custom", tmp_path / "dump", *left_out, "".join(option))
    with cluster.database("template0") as other:
        restore(other, "custom", tmp_path / "dump")
        restored = other.connect()
        restored.execute("SELECT ml_rag.enable_keyword_search('docs')")
        restored.execute("INSERT INTO docs VALUES (1, 'copper')")
        assert restored.execute("SELECT store::text FROM ml_rag.keyword_index").fetchall() == [("docs",)]


def test_schema_and_data_apart(source: Source, target: Database, tmp_path: Path) -> None:
    dump(source.database, "custom", tmp_path / "schema", "--schema-only")
    dump(source.database, "custom", tmp_path / "data", "--data-only")
    restore(target, "custom", tmp_path / "schema")
    owner = target.connect()
    assert objects.differences(objects.objects(source.owner), objects.objects(owner)) == []
    # the indexes' rows come with the data: triggers would make them a second time
    restore(target, "custom", tmp_path / "data", "--disable-triggers")
    owner.execute("REFRESH MATERIALIZED VIEW snapshot")
    assert_same(source, owner)
    assert_lives_on(owner)


def test_a_schema_without_data_works(source: Source, target: Database, tmp_path: Path) -> None:
    dump(source.database, "custom", tmp_path / "schema", "--schema-only")
    restore(target, "custom", tmp_path / "schema")
    owner = target.connect()
    content.insert(owner, "docs", content.rows(30))
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    assert_exact(owner, "copper violin")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_dump_of_an_older_version_is_restored_as_the_new_one(
    cluster: Cluster, source: Source, target: Database, version: str, tmp_path: Path
) -> None:
    with cluster.database("template0") as old:
        owner = old.connect()
        install(owner, version)
        roles = content.create_roles(owner, old.name)
        try:
            content.make(owner, roles)
            answers = content.answers(owner, roles)
            dump(old, "custom", tmp_path / "dump")
            restore(target, "custom", tmp_path / "dump")
            restored = target.connect()
            problems = content.differences(answers, content.answers(restored, roles))
            assert not problems, "\n".join(problems)
            assert data(restored) == data(owner)
        finally:
            target.connect().execute('DROP SCHEMA IF EXISTS public, "Odd schema" CASCADE')
            content.drop_roles(owner, roles)
