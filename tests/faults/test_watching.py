"""What calls tell of themselves: through kill -9, restarts, on a hot standby, with no room or no folder to write to."""

from __future__ import annotations

import shutil
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from support.private_cluster import PrivateCluster, cluster_user
from support.processes import wait_until
from support.site import Site
from support.small_disk import SmallDisk, small_disk
from support.watching import counted, errors_of, gate, held, shown

EMBED = "SELECT vector_dims(ml_embed_row('a text'))"


def embed(connection: psycopg.Connection, times: int = 1) -> None:
    for _ in range(times):
        assert connection.execute(EMBED).fetchone() == (16,)


def test_a_backend_that_is_killed_in_a_call(site: Site, local_sockets: Path) -> None:
    """PostgreSQL ends all sessions and recovers; the figures are those of before, and the call counts as an error."""
    owner, session = site.connect(), site.connect()
    embed(session, 5)
    with gate(owner, local_sockets, "chat/completions") as server:
        with held(server, session, "SELECT ml_generate('q')") as call:
            (row,) = shown(owner)
            assert row["pid"] == session.info.backend_pid
            site.private.kill_backend(row["pid"])
            with pytest.raises(psycopg.OperationalError):
                call.result()
        owner = site.connect()
        assert shown(owner) == []
        expected = {
            **{("ml_embed_row", stage): (5, 0) for stage in ("total", "embed")},
            **{("ml_generate", stage): (1, 1) for stage in ("total", "generate")},
        }
        assert counted(owner) == expected
        assert errors_of(owner, "ml_generate") == {"terminated": 1}
    # the slots are taken again, and what was counted in them goes on
    owner.execute("SELECT ml_rag.configure('model_server', %s)", (site.server.address,))
    sessions = [site.connect() for _ in range(3)]
    for connection in sessions:
        embed(connection)
    assert counted(owner) == {**expected, **{("ml_embed_row", stage): (8, 0) for stage in ("total", "embed")}}


@pytest.mark.parametrize("how", ["fast", "kill"])
def test_figures_outlive_the_server(site: Site, how: str) -> None:
    embed(site.connect(), 3)
    (since,) = site.connect().execute("SELECT min(since) FROM ml_rag.stats").fetchone() or (None,)
    if how == "fast":
        site.private.stop("fast")
        site.private.start()
    else:
        site.kill_cluster()
    owner = site.connect()
    assert counted(owner)["ml_embed_row", "total"] == (3, 0)
    embed(owner)
    assert owner.execute("SELECT calls, since FROM ml_rag.stats WHERE stage = 'total'").fetchall() == [(4, since)]


def test_a_hot_standby_tells_of_its_own_calls(site: Site, private: PrivateCluster, local_sockets: Path) -> None:
    owner = site.connect()
    embed(owner, 3)
    with gate(owner, local_sockets, "embeddings") as server, private.standby("watched") as standby:
        private.caught_up(standby)
        dsn = make_conninfo(standby.dsn, dbname=site.database.name)
        with psycopg.connect(dsn, autocommit=True) as session, psycopg.connect(dsn, autocommit=True) as watcher:
            with held(server, session, "SELECT ml_embed_row('x')") as call:
                (row,) = shown(watcher)
                assert (row["pid"], row["routine"], row["stage"]) == (
                    session.info.backend_pid,
                    "ml_embed_row",
                    "embed",
                )
                assert shown(owner) == []
            call.result()
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                session.execute("SELECT ml_rag_answer('q', '{\"nonsense\": 1}')")
            # not what the primary had counted when the standby was made of it
            assert counted(watcher)["ml_embed_row", "total"] == (1, 0)
            assert counted(watcher)["ml_rag", "total"] == (1, 1)
            watcher.execute("SELECT ml_rag.reset_stats()")
            assert counted(watcher) == {}
        assert counted(owner)["ml_embed_row", "total"] == (3, 0)


def test_no_room_for_figures(site: Site) -> None:
    """The folder of statistics is a file system of its own, and full."""
    site.private.stop("fast")
    with small_disk(site.private.data / "pg_stat_tmp", 64) as disk:
        owned_by_cluster(disk)
        site.private.start()
        ballast = disk.fill()
        sessions = [site.connect() for _ in range(3)]
        for session in sessions:
            embed(session, 3)
            assert shown(session) == []
            session.execute("SELECT * FROM ml_rag.stats")
        ballast.unlink()
        # the session tries again after a while, which may be over in the middle of a call: that is counted in part only
        wait_until(lambda: embed(sessions[0]) or ("ml_embed_row", "total") in counted(sessions[0]), 20)
        # full again, in the middle
        disk.fill()
        before = counted(sessions[0])["ml_embed_row", "total"][0]
        for session in sessions:
            embed(session, 3)
        # there is room in the pages that are there
        assert counted(sessions[0])["ml_embed_row", "total"][0] >= before
        site.database.close()
        site.private.stop("fast")
    site.private.start()
    embed(site.connect())


def owned_by_cluster(disk: SmallDisk) -> None:
    shutil.chown(disk.path, cluster_user())
    disk.path.chmod(0o700)


def test_no_folder_for_figures(site: Site) -> None:
    folder = site.private.data / "pg_stat_tmp"
    session = site.connect()
    embed(session)
    folder.rename(folder.with_name("away"))
    try:
        for connection in (session, site.connect()):
            embed(connection, 3)
            assert shown(connection) == []
            assert connection.execute("SELECT * FROM ml_rag.stats").fetchall() == []
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="cannot be reset"):
            site.connect().execute("SELECT ml_rag.reset_stats()")
    finally:
        folder.with_name("away").rename(folder)
    wait_until(lambda: embed(session) or counted(session), 20)
