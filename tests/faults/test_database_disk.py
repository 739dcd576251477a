"""PostgreSQL's disk full: that of the tables in the middle of a load, that of its write-ahead log."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from support.invariants import documents_of
from support.loading import counts, rows
from support.private_cluster import PrivateCluster, cluster_user
from support.site import STORE, Site
from support.small_disk import SmallDisk, small_disk
from support.stores import error


@pytest.fixture
def disk(place: Path) -> Iterator[SmallDisk]:
    with small_disk(place / f"disk{os.urandom(4).hex()}", 20_000) as disk:
        shutil.chown(disk.path, cluster_user())
        yield disk


@pytest.fixture
def on_disk(site: Site, disk: SmallDisk) -> Iterator[SmallDisk]:
    """The tables and indexes that the test makes lie there, as do the keyword index and temporary files."""
    connection = site.connect()
    connection.execute(f"CREATE TABLESPACE small LOCATION '{disk.path}'")
    connection.execute(f"ALTER DATABASE {site.database.name} SET default_tablespace = small")
    connection.execute(f"ALTER DATABASE {site.database.name} SET temp_tablespaces = small")
    moved = connection.execute(
        "SELECT c.oid::regclass::text FROM pg_class AS c WHERE c.relnamespace::regnamespace::text ~ '^ml_rag'"
        " AND c.relname LIKE 'keyword\\_%' AND c.relkind = 'r'"
    ).fetchall()
    for (name,) in moved:
        connection.execute(f"ALTER TABLE {name} SET TABLESPACE small")
    connection.close()
    yield disk
    site.database.close()
    with psycopg.connect(site.private.dsn, autocommit=True) as maintenance:
        maintenance.execute(f"ALTER DATABASE {site.database.name} RESET ALL")
    with psycopg.connect(site.private.dsn, dbname=site.database.name, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE; DROP SCHEMA IF EXISTS ml_rag CASCADE")
        connection.execute("CHECKPOINT")
        connection.execute("DROP TABLESPACE small")


def test_no_room_for_the_tables_in_the_middle_of_a_load(site: Site, on_disk: SmallDisk) -> None:
    session = site.connect()
    session.execute("SELECT ml_rag.create_store(%s)", (STORE,))
    # some documents fit, not all of them
    ballast = on_disk.fill(leave=150_000)
    with error("53100", "No space left on device", ours=False):
        site.load(session)
    kept = documents_of(session, STORE)
    assert 0 < len(kept) < 40
    assert kept.items() <= site.undisturbed.documents.items()
    # what is there can be searched meanwhile
    assert len(rows(session, "SELECT * FROM ml_rag_search('alpha')")) == 3
    ballast.unlink()
    assert counts(site.load(session)) == {"unchanged": len(kept), "loaded": 40 - len(kept)}
    site.verify()


@pytest.mark.slow
def test_no_room_for_a_batch_routine(site: Site, on_disk: SmallDisk) -> None:
    session = site.loaded()
    session.execute("CREATE TABLE questions (id integer PRIMARY KEY, question text)")
    session.execute(
        "INSERT INTO questions SELECT i, 'topic' || i || repeat(' word' || i, 200) FROM generate_series(1, 200) AS i"
    )
    call = "CALL ml_generate_table('public.questions.question', 'public.answers.answer', '{\"batch_size\": 10}')"
    ballast = on_disk.fill(leave=100_000)
    with error("53100", "No space left on device", ours=False):
        session.execute(call)
    kept = rows(session, "SELECT id, xmin::text FROM answers ORDER BY id")
    assert len(kept) % 10 == 0
    assert kept
    ballast.unlink()
    left = 200 - len(kept)
    assert rows(session, call) == [({"rows": left, "succeeded": left, "failed": 0, "first_error": None},)]
    everything = rows(session, "SELECT id, xmin::text FROM answers ORDER BY id")
    assert [row[0] for row in everything] == list(range(1, 201))
    assert everything[: len(kept)] == kept
    session.execute("DROP TABLE answers; DROP TABLE questions")
    site.verify()


@pytest.mark.slow
def test_no_room_for_folding(site: Site, on_disk: SmallDisk) -> None:
    session = site.loaded()
    session.execute("UPDATE docs SET segment = segment || ' changed'")
    session.execute("UPDATE docs SET segment = replace(segment, ' changed', '')")
    ballast = on_disk.fill()
    with error("53100", "No space left on device", ours=False):
        session.execute("SELECT ml_rag.enable_keyword_search('docs')")
    ballast.unlink()
    session.execute("SELECT ml_rag.merge_keyword_index('docs')")
    site.verify()


@pytest.fixture
def walled(private: PrivateCluster, disk: SmallDisk) -> Iterator[SmallDisk]:
    """The write-ahead log of the cluster lies there."""
    disk.grow(500_000)
    log, moved = private.data / "pg_wal", disk.path / "pg_wal"
    private.stop("fast")
    shutil.copytree(log, moved)
    shutil.rmtree(log)
    log.symlink_to(moved)
    for path in (moved, *moved.rglob("*")):
        shutil.chown(path, cluster_user(), cluster_user())
    moved.chmod(0o700)
    private.start()
    yield disk
    private.stop("fast")
    log.unlink()
    shutil.copytree(moved, log)
    for path in (log, *log.rglob("*")):
        shutil.chown(path, cluster_user(), cluster_user())
    log.chmod(0o700)
    private.start()


@pytest.mark.slow
def test_no_room_for_the_write_ahead_log(walled: SmallDisk, site: Site) -> None:
    """PostgreSQL ends all sessions and recovers as soon as there is room."""
    session = site.connect()
    session.execute("SELECT ml_rag.create_store(%s)", (STORE,))
    ballast = walled.fill()
    session.execute("CREATE TABLE filler (t text)")
    with pytest.raises(psycopg.OperationalError):  # noqa: PT012 - whichever statement it is
        site.load(session)
        for _ in range(200):
            session.execute("INSERT INTO filler SELECT repeat(md5(i::text), 60) FROM generate_series(1, 2000) AS i")
    ballast.unlink()
    site.private.stop()
    site.private.start()
    after = site.connect()
    kept = documents_of(after, STORE)
    assert kept.items() <= site.undisturbed.documents.items()
    site.load()
    after.execute("DROP TABLE IF EXISTS filler")
    site.verify()
