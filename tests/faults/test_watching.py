"""What calls tell of themselves: through kill -9 of a backend, restarts of either server, on a hot standby."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from support.private_cluster import PrivateCluster
from support.processes import wait_until
from support.site import Site
from support.watching import counted, errors_of, gate, held, shown

EMBED = "SELECT vector_dims(ml_embed_row('a text'))"
#: asks no model
SEARCH = "SELECT count(*) FROM ml_rag_search('alpha', %s)"
BY_VECTOR = json.dumps({"query_embedding": [1.0, *[0.0] * 15], "vector_store": ["public.docs"]})


def embed(connection: psycopg.Connection, times: int = 1) -> None:
    for _ in range(times):
        assert connection.execute(EMBED).fetchone() == (16,)


def test_a_backend_that_is_killed_in_a_call(site: Site, local_sockets: Path) -> None:
    """PostgreSQL ends all sessions and recovers; the call counts as an error."""
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
        assert counted(owner) == {("ml_generate", stage): (1, 1) for stage in ("total", "generate")}
        assert errors_of(owner, "ml_generate") == {"terminated": 1}
    # what was told to another model server is there
    owner.execute("SELECT ml_rag.configure('model_server', %s)", (site.server.address,))
    assert counted(owner) == {("ml_embed_row", stage): (5, 0) for stage in ("total", "embed")}
    for connection in [site.connect() for _ in range(3)]:
        embed(connection)
    assert counted(owner) == {("ml_embed_row", stage): (8, 0) for stage in ("total", "embed")}


@pytest.mark.parametrize("how", ["fast", "kill"])
def test_figures_outlive_the_database_server(site: Site, how: str) -> None:
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


def test_figures_end_with_the_model_server(site: Site) -> None:
    owner, session = site.connect(), site.connect()
    embed(session, 3)
    (since,) = owner.execute("SELECT min(since) FROM ml_rag.stats").fetchone() or (None,)
    site.server.kill()
    assert counted(owner) == {}
    embed(session)
    rows = owner.execute("SELECT calls, since > %s FROM ml_rag.stats", (since,)).fetchall()
    assert rows == [(1, True), (1, True)]


def test_errors_while_the_model_server_is_down_are_counted_when_it_is_back(site: Site) -> None:
    owner, session = site.connect(), site.connect()
    embed(session)
    site.server.hold()
    for _ in range(3):
        with pytest.raises(psycopg.Error, match="cannot be reached"):
            session.execute(EMBED)
        assert owner.execute("SELECT * FROM ml_rag.stats").fetchall() == []
    site.server.release()
    assert counted(owner) == {}
    embed(session)
    assert counted(owner)["ml_embed_row", "total"] == (4, 3)
    assert errors_of(owner, "ml_embed_row") == {"08006": 3}


def test_nothing_waits_for_a_model_server_that_reads_nothing(site: Site) -> None:
    """What cannot be told is told later; with it, what was to be counted."""
    owner, session = site.connect(), site.connect()
    site.load(owner)
    session.execute(SEARCH, (BY_VECTOR,))
    os.kill(site.server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(50):
            session.execute(SEARCH, (BY_VECTOR,))
        assert time.monotonic() - began < 20
    finally:
        os.kill(site.server.pid, signal.SIGCONT)
    session.execute(SEARCH, (BY_VECTOR,))
    wait_until(lambda: session.execute(SEARCH, (BY_VECTOR,)) and counted(owner)["ml_rag_search", "total"][0] >= 53)
    calls, errors = counted(owner)["ml_rag_search", "total"]
    assert errors == 0
    session.execute(SEARCH, (BY_VECTOR,))
    assert counted(owner)["ml_rag_search", "total"] == (calls + 1, 0)


def test_who_asks_finds_all_calls_of_the_own_session(site: Site) -> None:
    """Also those that the model server had no room for until it read the others."""
    owner, session = site.connect(), site.connect()
    site.load(owner)
    session.execute(SEARCH, (BY_VECTOR,))
    os.kill(site.server.pid, signal.SIGSTOP)
    try:
        for _ in range(100):  # more than net.unix.max_dgram_qlen in a network namespace of its own, and in most others
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                session.execute(SEARCH, ('{"nonsense": 1}',))
    finally:
        os.kill(site.server.pid, signal.SIGCONT)
    assert counted(session)["ml_rag_search", "total"] == (101, 100)


def test_a_hot_standby_tells_of_its_own_calls(site: Site, private: PrivateCluster, local_sockets: Path) -> None:
    owner = site.connect()
    with gate(owner, local_sockets, "chat/completions") as server, private.standby("watched") as standby:
        embed(owner, 3)
        private.caught_up(standby)
        dsn = make_conninfo(standby.dsn, dbname=site.database.name)
        with psycopg.connect(dsn, autocommit=True) as session, psycopg.connect(dsn, autocommit=True) as watcher:
            with held(server, session, "SELECT ml_generate('x')") as call:
                (row,) = shown(watcher)
                told = (row["pid"], row["routine"], row["stage"])
                assert told == (session.info.backend_pid, "ml_generate", "generate")
                assert shown(owner) == []
            call.result()
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                session.execute("SELECT ml_rag_answer('q', '{\"nonsense\": 1}')")
            # not what the primary has counted
            assert counted(watcher)["ml_generate", "total"] == (1, 0)
            assert counted(watcher)["ml_rag", "total"] == (1, 1)
            assert ("ml_embed_row", "total") not in counted(watcher)
            watcher.execute("SELECT ml_rag.reset_stats()")
            assert counted(watcher) == {}
        assert counted(owner)["ml_embed_row", "total"] == (3, 0)
