"""pg_upgrade from one major version of PostgreSQL to another: what is there before answers the same afterwards.

Needs two of them on one machine, each with pgvector, PL/Python and ml_rag: `make upgrade-test` makes an image that has.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import ml_rag
from support import content, objects
from support.cluster import value_of
from support.extension import HOW, VERSIONS
from support.installations import Installation, installations
from support.keywords import assert_exact
from support.private_cluster import PrivateCluster, cluster_user
from support.stores import as_text


def two_versions() -> tuple[Installation, Installation]:
    """The oldest and the newest."""
    found = installations()
    complete = [i for i in found if not i.missing()]
    if len({i.major for i in complete}) < 2:
        told = ", ".join(f"{i.major}{' without ' if i.missing() else ''}{' '.join(i.missing())}" for i in found)
        reason = f"needs two major versions of PostgreSQL with ml_rag; here: {told or 'none'}"
        pytest.skip(reason, allow_module_level=True)
    return complete[0], complete[-1]


OLDER, NEWER = two_versions()


def database_name(version: str) -> str:
    return f"v{version.replace('.', '_')}"


@dataclass
class Database:
    """A database of the old server, made by one version of ml_rag."""

    version: str
    roles: dict[str, str]
    answers: dict[str, Any]
    data: dict[str, Any]


@dataclass
class Upgraded:
    cluster: PrivateCluster
    databases: dict[str, Database]
    log: str

    def connect(self, version: str = ml_rag.__version__) -> psycopg.Connection[Any]:
        return connect(self.cluster, database_name(version))


def rows(owner: psycopg.Connection[Any]) -> dict[str, Any]:
    """All rows of the extension's tables that a dump would keep."""
    tables = owner.execute(
        "SELECT c.oid::regclass::text FROM pg_extension AS e, pg_class AS c"
        " WHERE e.extname = 'ml_rag' AND c.oid = ANY (e.extconfig) AND c.relkind = 'r' ORDER BY 1"
    ).fetchall()
    return {name: sorted(row for (row,) in owner.execute(f"SELECT t::text FROM {name} AS t")) for (name,) in tables}


def connect(cluster: PrivateCluster, database: str = "postgres") -> psycopg.Connection[Any]:
    return psycopg.connect(make_conninfo(cluster.dsn, dbname=database), autocommit=True)


def fill(cluster: PrivateCluster, version: str) -> Database:
    with connect(cluster) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database_name(version))))
    with connect(cluster, database_name(version)) as owner:
        owner.execute("CREATE EXTENSION vector; CREATE EXTENSION plpython3u")
        try:
            owner.execute("DO $$ import numpy $$ LANGUAGE plpython3u")
        except psycopg.Error as error:
            pytest.skip(f"the Python of PostgreSQL {OLDER.major} has no numpy: {error}")
        owner.execute(sql.SQL("CREATE EXTENSION ml_rag VERSION {}").format(sql.Literal(version)))
        roles = content.create_roles(owner, database_name(version))
        content.make(owner, roles)
        return Database(version, roles, content.answers(owner, roles), rows(owner))


@pytest.fixture(scope="module")
def upgraded() -> Iterator[Upgraded]:
    user = cluster_user()
    with tempfile.TemporaryDirectory(prefix="ml_rag_upgrade_") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o711)
        more = os.environ.get("ML_RAG_OLD_PYTHONPATH")
        old = PrivateCluster(folder / "old", OLDER.bindir, user, {"PYTHONPATH": more} if more else {})
        new = PrivateCluster(folder / "new", NEWER.bindir, user)
        for cluster in (old, new):
            cluster.folder.mkdir(mode=0o711)
            cluster.initialise()
            stack.callback(cluster.stop)
        old.start()
        versions = [v for v in VERSIONS if OLDER.has_release(v)] + [ml_rag.__version__]
        databases = {version: fill(old, version) for version in versions}
        old.stop("fast")
        log = upgrade(old, new, folder, user)
        new.start()
        yield Upgraded(new, databases, log)


def upgrade(old: PrivateCluster, new: PrivateCluster, folder: Path, user: str) -> str:
    """What pg_upgrade says, of its check and of its work."""
    work = folder / "work"
    work.mkdir()
    shutil.chown(work, user)
    command: list[str | Path] = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]
    command = command if os.getuid() == 0 else []
    command += [NEWER.bindir / "pg_upgrade", "--username", "postgres", "--socketdir", work, "--jobs", "2"]
    for way, installation, cluster in (("old", OLDER, old), ("new", NEWER, new)):
        command += [f"--{way}-bindir", installation.bindir, f"--{way}-datadir", cluster.data]
    said = ""
    for more in (["--check"], []):
        # a file: the servers that it starts would hold a pipe open
        with (folder / "said").open("w+") as output:
            done = subprocess.run(
                [*command, *more], cwd=work, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            output.seek(0)
            said += output.read()
        logs = "".join(path.read_text() for path in new.data.glob("pg_upgrade_output.d/**/*.txt"))
        assert done.returncode == 0, said + logs
    return said


@pytest.fixture(scope="module")
def fresh(upgraded: Upgraded) -> objects.Objects:
    """The extension, newly made in the new server."""
    with connect(upgraded.cluster) as connection:
        connection.execute("CREATE DATABASE fresh")
    with connect(upgraded.cluster, "fresh") as owner:
        owner.execute("CREATE EXTENSION ml_rag CASCADE")
        return facts(owner)


def facts(owner: psycopg.Connection[Any]) -> objects.Objects:
    """As ``objects.objects``, without two differences that mean nothing.

    Versions before 16 name the columns of a UNION's later parts, which nobody reads. What pg_upgrade restores has no
    note of its initial privileges where those are its owner's alone, which is what the absence of a note means.
    """
    unnamed = re.compile(r" AS (bytea|text)(?=\)|,?\n)")
    found = objects.objects(owner)
    for told in found.values():
        if "definition" in told:
            told["definition"] = unnamed.sub("", told["definition"])
        if re.fullmatch(r"0: (, |postgres=\w+ by postgres)+", str(told.get("initial privileges"))):
            del told["initial privileges"]
    return found


@pytest.fixture(params=[*VERSIONS, ml_rag.__version__])
def database(request: pytest.FixtureRequest, upgraded: Upgraded) -> Database:
    if request.param not in upgraded.databases:
        pytest.skip(f"the older PostgreSQL lacks the script of {request.param}: {HOW}")
    return upgraded.databases[request.param]


def test_only_extensions_of_older_versions_are_left_to_do(upgraded: Upgraded) -> None:
    """pg_upgrade writes a script for each thing that is left, such as indexes to rebuild."""
    assert "Clusters are compatible" in upgraded.log
    scripts = re.findall(r"\S+\.sql\b", upgraded.log)
    old = [version for version in upgraded.databases if version != ml_rag.__version__]
    assert scripts == (["update_extensions.sql"] if old else []), upgraded.log


def test_what_users_have_written_stays(upgraded: Upgraded, database: Database) -> None:
    assert all(database.data.values()), "the content of the test must reach every table"
    with upgraded.connect(database.version) as owner:
        assert rows(owner) == database.data


def test_answers_are_those_of_before(upgraded: Upgraded, database: Database) -> None:
    """A release needs its own Python on the new server, or the update of the next test."""
    if not NEWER.has_release(database.version):
        pytest.skip(f"the newer PostgreSQL lacks ml_rag {database.version}")
    with upgraded.connect(database.version) as owner:
        problems = content.differences(database.answers, content.answers(owner, database.roles))
    assert not problems, "\n".join(problems)


def test_objects_equal_those_of_a_fresh_install(upgraded: Upgraded, fresh: objects.Objects) -> None:
    with upgraded.connect() as owner:
        problems = objects.differences(fresh, facts(owner))
        assert not problems, "\n".join(problems)


def test_no_index_is_damaged(upgraded: Upgraded, database: Database) -> None:
    with upgraded.connect(database.version) as owner:
        owner.execute("CREATE EXTENSION IF NOT EXISTS amcheck")
        checked = value_of(
            owner,
            "SELECT count(bt_index_check(i.indexrelid, true))"
            " FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid"
            " WHERE c.relam = (SELECT oid FROM pg_am WHERE amname = 'btree') AND c.relkind = 'i' AND i.indisvalid",
        )
        assert checked > 100


def test_the_approximate_index_is_used_and_finds_what_a_scan_finds(upgraded: Upgraded, database: Database) -> None:
    nearest = "SELECT segment_embedding <=> %s::vector FROM docs ORDER BY segment_embedding <=> %s::vector LIMIT 5"
    embedding = as_text(content.fake_embedding("copper ladder in the meadow"))
    with upgraded.connect(database.version) as owner:
        owner.execute("ANALYZE docs; SET enable_seqscan = off; SET hnsw.ef_search = 400")
        plan = "\n".join(line for (line,) in owner.execute("EXPLAIN (COSTS off) " + nearest, (embedding, embedding)))
        assert "Index Scan using" in plan, plan
        by_index = owner.execute(nearest, (embedding, embedding)).fetchall()
        owner.execute("SET enable_seqscan = on; SET enable_indexscan = off")
        assert by_index == owner.execute(nearest, (embedding, embedding)).fetchall()


def test_keyword_indexes_follow_their_tables_on(upgraded: Upgraded) -> None:
    with upgraded.connect() as owner, owner.transaction(force_rollback=True):
        owner.execute("DELETE FROM docs WHERE document_id = 9")
        owner.execute("UPDATE docs SET segment = 'violin of copper' WHERE document_id = 10")
        content.insert(owner, "docs", content.rows(30, 5000))
        assert_exact(owner, "copper violin number5007")
        owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
        assert_exact(owner, "copper violin number5007")
        owner.execute("DROP TABLE docs CASCADE")
        assert owner.execute("SELECT count(*) FROM ml_rag_internal.keyword_store").fetchone() == (2,)


@pytest.mark.parametrize("version", VERSIONS)
def test_both_are_upgraded_one_after_the_other(upgraded: Upgraded, fresh: objects.Objects, version: str) -> None:
    """First PostgreSQL, then ml_rag; last in this file, as it changes the database."""
    database = upgraded.databases.get(version)
    if database is None:
        pytest.skip(f"the older PostgreSQL lacks the script of {version}")
    with upgraded.connect(version) as owner:
        owner.execute("ALTER EXTENSION ml_rag UPDATE")
        assert owner.execute("SELECT ml_rag.version()").fetchone() == (ml_rag.__version__,)
        problems = content.differences(database.answers, content.answers(owner, database.roles))
        assert not problems, "\n".join(problems)
        problems = objects.differences(fresh, facts(owner))
        assert not problems, "\n".join(problems)
