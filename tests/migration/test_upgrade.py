"""ALTER EXTENSION ml_rag UPDATE from every release, and a made-up one: equals a fresh install, answers as before.

A test that fails here for a release after a change of sql/ asks for a line in its upgrade script: migrations/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

import ml_rag
from support import content, objects
from support.cluster import Cluster, Connection, Database, noticed, value_of
from support.extension import MADE_UP, RELEASES, VERSIONS, data, install, update
from support.keywords import assert_exact

NO_RELEASE = pytest.param(
    "", id="no release", marks=pytest.mark.skip(reason="no release is tagged yet: migrations/ has no archive of one")
)


def python_version(connection: Connection) -> str:
    """The version of the Python that this session runs."""
    notices = noticed(connection)
    connection.execute("""DO $$ plpy.notice("python " + GD["ml_rag"].VERSION) $$ LANGUAGE plpython3u""")
    return notices[-1].removeprefix("python ")


def ask_both_sides(connection: Connection) -> tuple[str, str]:
    """The versions of SQL and Python, after a call that needs both."""
    with pytest.raises(psycopg.errors.ConnectionFailure), connection.transaction():
        connection.execute("SELECT * FROM ml_supported_models()")
    return value_of(connection, "SELECT ml_rag.version()"), python_version(connection)


@pytest.fixture(scope="module")
def fresh(cluster: Cluster) -> objects.Objects:
    with cluster.database() as database:
        return objects.objects(database.connect())


@dataclass
class Upgraded:
    """A database that a release made, filled, and that was upgraded while a session was open."""

    database: Database
    owner: Connection
    roles: dict[str, str]
    session: Connection
    answers: dict[str, Any]
    data: dict[str, Any]


@pytest.fixture(scope="module", params=VERSIONS)
def upgraded(request: pytest.FixtureRequest, cluster: Cluster, model_server: str) -> Iterator[Upgraded]:
    with cluster.database("template0") as database:
        owner = database.connect()
        install(owner, request.param)
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (model_server,))
        roles = content.create_roles(owner, database.name)
        try:
            content.make(owner, roles)
            session = database.connect()
            found = Upgraded(database, owner, roles, session, content.answers(session, roles), data(owner))
            assert python_version(session) == request.param
            update(owner)
            yield found
        finally:
            content.drop_roles(owner, roles)


@pytest.mark.parametrize("upgraded", [MADE_UP, *(RELEASES or [NO_RELEASE])], indirect=True, scope="module")
def test_an_upgraded_database_equals_a_fresh_one(upgraded: Upgraded, fresh: objects.Objects) -> None:
    problems = objects.differences(fresh, objects.objects(upgraded.owner))
    assert not problems, "\n".join(problems)


def test_what_users_have_written_stays(upgraded: Upgraded) -> None:
    assert all(upgraded.data.values()), "the content of the test must reach every table"
    assert data(upgraded.owner) == upgraded.data


def test_answers_are_those_of_before(upgraded: Upgraded) -> None:
    problems = content.differences(upgraded.answers, content.answers(upgraded.database.connect(), upgraded.roles))
    assert not problems, "\n".join(problems)


def test_a_session_that_was_open_goes_on_with_the_new_version(upgraded: Upgraded) -> None:
    problems = content.differences(upgraded.answers, content.answers(upgraded.session, upgraded.roles))
    assert not problems, "\n".join(problems)
    assert upgraded.session.execute("SELECT ml_rag.version()").fetchone() == (ml_rag.__version__,)
    assert python_version(upgraded.session) == ml_rag.__version__


def test_keyword_indexes_follow_their_tables_on(upgraded: Upgraded) -> None:
    session = upgraded.session
    with session.transaction(force_rollback=True):
        session.execute("DELETE FROM docs WHERE document_id = 9")
        session.execute("UPDATE docs SET segment = 'violin of copper' WHERE document_id = 10")
        content.insert(session, "docs", content.rows(30, 5000))
        assert_exact(session, "copper violin number5007")
        session.execute("SELECT ml_rag.merge_keyword_index('docs')")
        assert_exact(session, "copper violin number5007")
        session.execute("DROP TABLE docs CASCADE")
        assert session.execute("SELECT count(*) FROM ml_rag_internal.keyword_store").fetchone() == (2,)


def test_numbers_go_on(upgraded: Upgraded) -> None:
    with upgraded.session.transaction(force_rollback=True):
        run = upgraded.session.execute("SELECT max(run_id) FROM ml_rag.evaluation_run").fetchone()
        options = {"options": content.MEASURED}
        again = upgraded.session.execute(
            "SELECT (ml_rag_evaluate('questions', %s) ->> 'run_id')::bigint", (psycopg.types.json.Jsonb(options),)
        ).fetchone()
        assert run is not None
        assert again is not None
        assert again[0] > run[0]
        assert upgraded.session.execute(
            "SELECT nextval('ml_rag_internal.keyword_number') > (SELECT max(id) FROM ml_rag_internal.keyword_row)"
        ).fetchone() == (True,)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_update_that_is_rolled_back_leaves_the_old_version(cluster: Cluster, version: str) -> None:
    with cluster.database("template0") as database:
        owner = database.connect()
        install(owner, version)
        before = objects.objects(owner)
        owner.execute("SELECT ml_rag.configure('model_server', 'unix:/nowhere')")
        for _ in range(2):
            with owner.transaction(force_rollback=True):
                owner.execute("SAVEPOINT a")
                update(owner)
                assert ask_both_sides(owner) == (ml_rag.__version__, ml_rag.__version__)
            assert objects.objects(owner) == before
            assert ask_both_sides(owner) == (version, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_extension_may_lie_in_any_schema(cluster: Cluster, version: str) -> None:
    found = []
    for how in ("fresh", "upgraded"):
        with cluster.database("template0") as database:
            owner = database.connect()
            owner.execute('CREATE SCHEMA "My Rag"; CREATE SCHEMA vec; CREATE EXTENSION vector SCHEMA vec')
            if how == "fresh":
                install(owner, ml_rag.__version__, "My Rag")
            else:
                install(owner, version, "My Rag")
                update(owner)
            found.append(objects.objects(owner))
            with pytest.raises(psycopg.errors.InvalidParameterValue, match="n_citations"):
                owner.execute("""CALL "My Rag".ml_rag('q', '{"n_citations": 101}')""")
    assert objects.differences(*found) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_only_a_superuser_may_update(cluster: Cluster, version: str) -> None:
    with cluster.database("template0") as database:
        owner = database.connect()
        install(owner, version)
        with database.connect("asker") as asker, pytest.raises(psycopg.errors.InsufficientPrivilege):
            update(asker)
        assert owner.execute("SELECT ml_rag.version()").fetchone() == (version,)


# -- the comparison sees what it must ----------------------------------------------------------------------------------


def test_without_its_upgrade_each_difference_of_the_made_up_release_is_named(
    cluster: Cluster, fresh: objects.Objects
) -> None:
    with cluster.database("template0") as database:
        owner = database.connect()
        install(owner, MADE_UP)
        problems = "\n".join(objects.differences(fresh, objects.objects(owner)))
    for problem in (
        "function ml_rag._former(): sql/ no longer has it",
        "view ml_rag.former: sql/ no longer has it",
        "function ml_rag.model_server(): result differs",
        "function ml_rag.model_server(): privileges differs",
        "function ml_rag.model_server(): comment differs",
        "function ml_rag._forget_dropped(): the upgrade does not make it",
        "table ml_rag.evaluation_run: triggers differs",
        "table ml_rag.evaluation_question: constraints differs",
        "table ml_rag_internal.keyword_row: indexes differs",
        "table ml_rag_internal.keyword_run: columns differs",
        "view ml_rag.setting: comment differs",
        "function ml_rag.version(): source differs",
        "option ml_rank.top_n: maximum differs",
        "option ml_rank.language: the upgrade does not make it",
        "option ml_rank.former: sql/ no longer has it",
    ):
        assert problem in problems


@pytest.fixture(scope="module")
def equal(module_owner: Connection, fresh: objects.Objects) -> Connection:
    """A database in which the comparison sees nothing."""
    assert objects.differences(fresh, objects.objects(module_owner)) == []
    return module_owner


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ("CREATE FUNCTION ml_rag.more() RETURNS integer LANGUAGE sql AS 'SELECT 1'", "sql/ no longer has it"),
        ("ALTER FUNCTION ml_rag.version() VOLATILE", "volatility"),
        ("ALTER FUNCTION ml_rag.version() PARALLEL UNSAFE", "parallel"),
        ("ALTER FUNCTION ml_rag.version() SECURITY DEFINER", "security definer"),
        ("ALTER FUNCTION ml_rag.version() SET work_mem = '1MB'", "settings"),
        ("ALTER FUNCTION ml_rag.version() OWNER TO ml_rag_user", "owner"),
        ("CREATE OR REPLACE FUNCTION ml_rag.version() RETURNS text LANGUAGE sql AS 'SELECT 1::text'", "source"),
        ("GRANT EXECUTE ON FUNCTION ml_rag.version() TO PUBLIC", "privileges"),
        ("COMMENT ON FUNCTION ml_rag.version() IS 'x'", "comment"),
        ("ALTER EXTENSION ml_rag DROP FUNCTION ml_rag.version()", "member"),
        ("ALTER VIEW ml_rag.keyword_index RESET (security_barrier)", "options"),
        ("CREATE OR REPLACE VIEW ml_rag.keyword_index AS SELECT * FROM ml_rag._keyword_index(0::oid)", "definition"),
        ("ALTER TABLE ml_rag_internal.keyword_row ADD COLUMN x integer", "columns"),
        ("ALTER TABLE ml_rag_internal.keyword_row ALTER COLUMN length DROP NOT NULL", "columns"),
        ("ALTER TABLE ml_rag_internal.keyword_run ALTER COLUMN ids SET STORAGE EXTENDED", "columns"),
        ("ALTER TABLE ml_rag_internal.keyword_store DROP CONSTRAINT keyword_store_b_check", "constraints"),
        ("CREATE INDEX ON ml_rag_internal.keyword_row (length)", "indexes"),
        ("ALTER TABLE ml_rag_internal.keyword_store DISABLE TRIGGER forget", "triggers"),
        ("DROP POLICY own ON ml_rag.evaluation_run", "policies"),
        ("ALTER TABLE ml_rag.evaluation_run DISABLE ROW LEVEL SECURITY", "row-level security"),
        ("ALTER TABLE ml_rag_internal.keyword_new RESET (toast_tuple_target)", "options"),
        ("COMMENT ON COLUMN ml_rag_internal.keyword_new.tokens IS 'x'", "column comments"),
        ("GRANT SELECT (tokens) ON ml_rag_internal.keyword_new TO ml_rag_user", "columns"),
        ("ALTER SEQUENCE ml_rag_internal.keyword_number CACHE 7", "sequence"),
        ("ALTER TYPE ml_rag.hit ADD ATTRIBUTE x integer", "columns"),
        ("ALTER EVENT TRIGGER ml_rag_forget_dropped DISABLE", "enabled"),
        ("GRANT CREATE ON SCHEMA ml_rag TO ml_rag_user", "privileges"),
        ("UPDATE pg_extension SET extconfig = NULL, extcondition = NULL WHERE extname = 'ml_rag'", "dumped"),
        ("CREATE TYPE ml_rag.mood AS ENUM ('a')", "sql/ no longer has it"),
        ("UPDATE ml_rag.option SET description = 'x' WHERE name = 'top_n'", "description"),
    ],
)
def test_the_comparison_sees(equal: Connection, fresh: objects.Objects, change: str, fact: str) -> None:
    with equal.transaction(force_rollback=True):
        equal.execute("SET LOCAL allow_system_table_mods = on")
        equal.execute(change)
        assert any(fact in problem for problem in objects.differences(fresh, objects.objects(equal)))
