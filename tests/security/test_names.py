"""ml_rag looks names up in pg_catalog and ml_rag only: what others create in pgvector's schema never runs.

The owner of a database, a role without privileges otherwise, plants overloads of every operator and function that the
SQL of ml_rag uses, each for other types than those of pg_catalog, in ``public``, where pgvector is too.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from support.borrowed_role import role_set_by_the_owner
from support.cluster import Cluster, Connection, Database
from support.extension import MADE_UP, install, update
from support.planted_names import configure, planted, ran
from support.processes import wait_until


@pytest.fixture(scope="module")
def owned(cluster: Cluster) -> Iterator[Database]:
    with planted(cluster) as database:
        yield database


def foreign_dependencies(owned: Database) -> list[str]:
    """Objects of ml_rag that need one that belongs neither to PostgreSQL nor to ml_rag nor to what it requires."""
    admin = owned.connect()
    admin.execute("SET search_path = pg_catalog")
    return [
        row[0]
        for row in admin.execute("""
            WITH RECURSIVE member AS (
              SELECT d.classid, d.objid FROM pg_depend AS d JOIN pg_extension AS e ON e.oid = d.refobjid
              WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
                AND e.extname IN ('ml_rag', 'vector', 'plpython3u', 'plpgsql')
              UNION
              SELECT d.classid, d.objid FROM member AS m JOIN pg_depend AS d
                ON d.refclassid = m.classid AND d.refobjid = m.objid AND d.deptype IN ('i', 'a'))
            SELECT format('%s needs %s', pg_describe_object(d.classid, d.objid, d.objsubid),
              pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid))
            FROM member AS m JOIN pg_depend AS d USING (classid, objid)
            WHERE d.refobjid >= 16384 AND d.refclassid NOT IN ('pg_extension'::regclass, 'pg_namespace'::regclass)
              AND NOT EXISTS (SELECT FROM member AS o WHERE o.classid = d.refclassid AND o.objid = d.refobjid)""")
    ]


def test_installing_runs_and_keeps_nothing_that_others_made(owned: Database) -> None:
    admin = owned.connect()
    admin.execute("CREATE EXTENSION ml_rag")
    try:
        assert not ran(admin)
        assert foreign_dependencies(owned) == []
    finally:
        admin.execute("DROP EXTENSION ml_rag CASCADE")


def test_an_upgrade_runs_and_keeps_nothing_that_others_made(owned: Database) -> None:
    admin = owned.connect()
    install(admin, MADE_UP)
    try:
        assert not ran(admin)
        update(admin)
        assert not ran(admin)
        assert foreign_dependencies(owned) == []
    finally:
        admin.execute("DROP EXTENSION ml_rag CASCADE")


#: every public routine and view as an administrator calls them, in this order
STATEMENTS = Path(__file__).with_name("public_calls.sql").read_text().splitlines()[1:]
#: statements that end with an error, since what they need is not here
FAILING = (
    "attach_shard(",
    "detach_shard(",
    "distribute_store(",
    "vector_store_load(",
    "'app.x'",
    "[1, 0]",
    "drop_embedding(",
)


def test_nothing_that_an_administrator_calls_runs_what_others_made(owned: Database, model_server: str) -> None:
    admin = owned.connect()
    configure(admin, model_server)
    with owned.connect(prepare_threshold=None) as catalog:
        catalog.execute("SET search_path = pg_catalog")
        names = {
            row[0]
            for row in catalog.execute(
                "SELECT p.proname FROM pg_proc AS p JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass"
                " AND d.objid = p.oid AND d.deptype = 'e' JOIN pg_extension AS e ON e.oid = d.refobjid"
                " WHERE e.extname = 'ml_rag' AND p.proname !~ '^_'"
            )
        }
        relations = [
            row[0]
            for row in catalog.execute(
                "SELECT c.oid::regclass::text FROM pg_class AS c WHERE c.relnamespace::regnamespace::text ~ '^ml_rag'"
                " AND c.relkind IN ('r', 'v', 'm') AND c.relname !~ '^_'"
            )
        ]
    assert len(relations) > 20
    called = set(re.findall(r"\b([a-z_]+)\(|ml_rag\.([a-z_]+)\(", "\n".join(STATEMENTS)))
    assert names - {name for pair in called for name in pair} == set()
    failed = []
    for statement in [*STATEMENTS, *(f"TABLE {relation}" for relation in relations)]:
        try:
            admin.execute(statement)
        except psycopg.Error as e:
            if "planted" in str(e) or not any(text in statement for text in FAILING):
                failed.append(f"{statement}: {e}")
        assert not ran(admin), statement
    assert not failed, "\n".join(failed)
    assert foreign_dependencies(owned) == []


def test_no_command_runs_what_others_made(owned: Database, model_server: str, tmp_path: Path) -> None:
    """Under a search_path in which pg_catalog is last: planted objects come before its own of the same types."""
    admin = owned.connect()
    planter = owned.connect("stranger")
    for operator, type_ in itertools.product(("=", "<>", "<", ">"), ("integer", "bigint", "oid", "name", "text")):
        planter.execute(
            f"CREATE OPERATOR public.{operator} (LEFTARG = {type_}, RIGHTARG = {type_}, FUNCTION = public.planted)"
        )
    admin.execute("DROP EXTENSION IF EXISTS ml_rag CASCADE")
    configure(admin, model_server)
    admin.execute(
        "CREATE SCHEMA own; CREATE TABLE own.items (id bigint PRIMARY KEY, text text);"
        "INSERT INTO own.items VALUES (1, 'one'), (2, 'two')"
    )
    admin.execute("SELECT ml_rag.create_vectorizer('own.items', '{\"columns\": \"text\"}')")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "corpus.jsonl").write_text(json.dumps({"_id": "d", "title": "", "text": "apples"}))
    (tmp_path / "set" / "questions.jsonl").write_text(json.dumps({"_id": "q", "text": "apples"}))
    (tmp_path / "set" / "qrels.tsv").write_text("q\td\t1\n")
    (tmp_path / "a.txt").write_text("apples")
    (tmp_path / "gateway.toml").write_text(f'[tokens.a]\nsha256 = "{"0" * 64}"\nrole = "{owned.role("stranger")}"\n')
    dsn = make_conninfo(owned.dsn, dbname=owned.name, options="-csearch_path=own,public,pg_catalog")
    failed = []
    for words in (
        ["load", str(tmp_path / "a.txt"), "--store", "notes"],
        ["load", str(tmp_path / "a.txt"), "--store", "own.notes"],
        ["eval", str(tmp_path / "set")],
        ["worker", "--once"],
        ["doctor"],
        ["gateway", "--config", str(tmp_path / "gateway.toml")],
    ):
        command = [sys.executable, "-m", "ml_rag.cli", words[0], "--dsn", dsn, *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        # the model server is another one's, and the role of the token may not ask
        if done.returncode and words[0] not in ("doctor", "gateway"):
            failed.append(f"{words}: {done.stderr}")
        assert not ran(admin), words
    assert not failed, "\n".join(failed)
    assert admin.execute("SELECT pending FROM ml_rag.vectorizer").fetchall() == [(0,)]
    assert admin.execute("SELECT count(*) FROM own.notes").fetchone() == (1,)


def test_no_command_of_a_superuser_has_the_role_that_the_owner_of_a_database_has_set(
    db: Database, owner: Connection, tmp_path: Path
) -> None:
    """What it runs could leave that role: the superuser's rights would be the owner's."""
    owner.execute(f"CREATE SCHEMA theirs AUTHORIZATION {db.role('tenant')}")
    tenant = db.connect("tenant")
    tenant.execute(
        "CREATE TABLE theirs.items (id integer PRIMARY KEY, name text); INSERT INTO theirs.items VALUES (1, 'lamp');"
        "CREATE TABLE theirs.ran (who name); GRANT INSERT ON theirs.ran TO PUBLIC;"
        "CREATE FUNCTION theirs.spy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " SET ROLE NONE; INSERT INTO theirs.ran VALUES (current_user); RETURN NEW; END $$;"
        "CREATE TRIGGER spy BEFORE UPDATE ON theirs.items FOR EACH ROW EXECUTE FUNCTION theirs.spy()"
    )
    tenant.execute("SELECT ml_rag.create_vectorizer('theirs.items', '{\"columns\": \"name\"}')")
    dsn = make_conninfo(db.dsn, dbname=db.name)

    def run(*words: str, options: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ml_rag.cli", *words, "--dsn", f"{dsn} options='{options}'"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    (tmp_path / "corpus.jsonl").write_text(json.dumps({"_id": "d", "title": "", "text": "apples"}))
    (tmp_path / "questions.jsonl").write_text(json.dumps({"_id": "q", "text": "apples"}))
    (tmp_path / "qrels.tsv").write_text("q\td\t1\n")
    document = str(tmp_path / "corpus.jsonl")
    try:
        with role_set_by_the_owner(db, owner):
            for words in (
                ["worker", "--once"], ["doctor"], ["eval", str(tmp_path)], ["load", document, "--store", "items"],
            ):  # fmt: skip
                done = run(*words)
                assert done.returncode, (words, done)
                assert "has another role here" in done.stdout + done.stderr, (words, done)
            assert owner.execute("TABLE theirs.ran").fetchall() == []
            # a role that the caller names is the caller's choice; once a trigger has left it, nothing more is run
            done = run("worker", "--once", options=f"-c role={db.role('tenant')}")
            assert done.returncode == 1
            assert "is not trusted any more" in done.stderr
            assert owner.execute("SELECT count(segment_embedding) FROM theirs.items").fetchone() == (1,)
    finally:
        owner.execute("DROP SCHEMA theirs CASCADE")


def test_no_command_takes_a_schema_for_that_of_the_extension(cluster: Cluster, tmp_path: Path) -> None:
    """Where that is not installed, or was dropped while a worker runs, the owner of the database can make one."""
    database = cluster.create(template="template0")
    try:
        admin, stranger = database.connect(), database.connect("stranger")
        admin.execute("CREATE EXTENSION plpython3u; CREATE EXTENSION vector; CREATE EXTENSION ml_rag")
        cluster.execute("ALTER DATABASE {} OWNER TO {}", database.name, database.role("stranger"))
        dsn = make_conninfo(database.dsn, dbname=database.name)
        command = [sys.executable, "-m", "ml_rag.cli"]
        with subprocess.Popen(
            [*command, "worker", "--dsn", dsn, "--idle", "1"], stderr=subprocess.PIPE, text=True
        ) as worker:
            looked = (
                "SELECT FROM pg_stat_activity WHERE application_name = 'ml-rag worker' AND query LIKE '%%vectorizer%%'"
            )
            wait_until(lambda: admin.execute(looked).rowcount == 1)
            with admin.transaction():
                admin.execute(
                    "DROP EXTENSION ml_rag CASCADE; CREATE TABLE ran (who text); GRANT INSERT ON ran TO PUBLIC"
                )
            stranger.execute(
                "CREATE SCHEMA ml_rag; CREATE FUNCTION ml_rag.spy() RETURNS boolean LANGUAGE sql"
                " BEGIN ATOMIC INSERT INTO public.ran VALUES (current_user) RETURNING true; END;"
                "CREATE VIEW ml_rag.vectorizer AS"
                " SELECT 1::oid AS relation, 0 AS pending, 0 AS failed WHERE ml_rag.spy();"
                "CREATE FUNCTION ml_rag.parse_options(text, jsonb) RETURNS boolean LANGUAGE sql RETURN ml_rag.spy();"
                "CREATE FUNCTION ml_rag.version() RETURNS boolean LANGUAGE sql RETURN ml_rag.spy();"
            )
            try:
                worker.communicate(timeout=20)
            finally:
                worker.kill()
                assert admin.execute("TABLE ran").fetchall() == []
        (tmp_path / "corpus.jsonl").write_text(json.dumps({"_id": "d", "title": "", "text": "apples"}))
        (tmp_path / "questions.jsonl").write_text(json.dumps({"_id": "q", "text": "apples"}))
        (tmp_path / "qrels.tsv").write_text("q\td\t1\n")
        said = []
        for words in (
            ["worker", "--once"], ["doctor"], ["eval", str(tmp_path)],
            ["load", str(tmp_path / "corpus.jsonl"), "--store", "public.notes"],
        ):  # fmt: skip
            done = subprocess.run([*command, *words, "--dsn", dsn], capture_output=True, text=True, timeout=60)
            assert done.returncode, (words, done)
            said.append(done.stdout + done.stderr)
        assert admin.execute("TABLE ran").fetchall() == []
        assert all("schema ml_rag is not that of the extension" in line for line in said), said
    finally:
        database.close()
        cluster.execute("DROP DATABASE {} WITH (FORCE)", database.name)


#: functions that open a session in which nobody's role counts: it is closed at once, ends another, is one of whose
#: superuser the first session has been looked at, or is one of a pool, each of whose transactions looks
UNCHECKED = {
    *("mcp.py:mcp", "explore.py:explore", "doctor.py:count_as_owner", "doctor.py:_terminate"),
    "database.py:__init__",
}


def test_whatever_opens_a_session_refuses_the_role_that_the_owner_of_a_database_has_set() -> None:
    opens = re.compile(r"\b(?:psycopg\.connect|AsyncConnection\.connect|(?:Async)?ConnectionPool)\(")
    found, unchecked = 0, set()
    for file in sorted((Path(__file__).parents[2] / "plpy").rglob("*.py")):
        source = file.read_text()
        for node in ast.parse(source).body:
            parts = [node] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else getattr(node, "body", [])
            for part in parts:
                text = ast.get_source_segment(source, part) or ""
                found += len(opens.findall(text))
                if opens.search(text) and "refuse_borrowed_role" not in text:
                    unchecked.add(f"{file.name}:{getattr(part, 'name', '')}")
    assert found >= 16
    assert unchecked == UNCHECKED
