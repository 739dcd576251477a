"""store/lock: loads, batch routines and re-embeddings keep out of each other's way."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from test_reembed import assert_embedded, reembed
from test_switch import phase, store, waits

from support.cluster import Connection, Database
from support.loading import folder, load, write
from support.models_server import ModelsServer, models
from support.processes import Background, wait_until
from support.stores import error

__all__ = ["folder", "models", "store"]


def test_who_holds_a_lock_of_ours_is_named(db: Database, store: Connection) -> None:
    """Any role can take an advisory lock, so that the administrator must be able to see which session it is."""
    stranger = db.connect("stranger")
    pid = str(stranger.info.backend_pid)
    row = store.execute("SELECT ml_rag._reembed_key('docs'::regclass), ml_rag._model_key('docs'::regclass)").fetchone()
    assert row is not None
    stranger.execute("SELECT pg_advisory_lock(%s)", row[:1])
    with error("55006", f"session {pid}"):
        reembed(store, "narrow")
    stranger.execute("SELECT pg_advisory_unlock_all(), pg_advisory_lock_shared(%s)", row[1:])
    store.execute("SET lock_timeout = '300ms'")
    with error("55P03", "what loads into", pid):
        reembed(store, "narrow")
    stranger.execute("SELECT pg_advisory_unlock_all()")
    result = reembed(store, "narrow")
    assert (result["segments"], result["switched"]) == (0, True)


def test_a_load_that_is_under_way_ends_with_the_model_it_began_with(
    db: Database, store: Connection, models: ModelsServer, folder: Path
) -> None:
    loader, watcher = db.connect(), db.connect()
    reembed(store, "narrow", switch=False)
    write(folder, a="first fish", b="second fish")
    running: list[Background] = []

    def start() -> None:
        running.append(Background(lambda: reembed(store, "narrow")))
        wait_until(lambda: phase(watcher) == "waiting for loads")

    models.before_batch = {0: start}
    load(loader, f"{folder}/", {"table_name": "docs"})
    assert running[0].result()["switched"] is True
    assert_embedded(store, "narrow")
    assert "first fish" in models.embedded("narrow")
    assert "first fish" in models.embedded("fake-embed")


def test_a_load_that_begins_during_the_switch_waits_and_uses_the_new_model(
    db: Database, store: Connection, models: ModelsServer
) -> None:
    reader, loader, watcher = db.connect(autocommit=False), db.connect(), db.connect()
    reembed(store, "other", switch=False)
    reader.execute("SELECT count(*) FROM docs")
    running = Background(lambda: reembed(store, "other"))
    wait_until(lambda: phase(watcher) == "waiting for a lock")
    loading = Background(lambda: loader.execute("SELECT ml_rag.load_document('docs', 'fresh', 'fresh fish')"))
    wait_until(lambda: waits(watcher, loader) or loading.ended)
    reader.rollback()
    loading.result()
    assert running.result()["switched"] is True
    assert_embedded(store, "other")


def test_nobody_who_holds_the_table_waits_for_the_model(db: Database, store: Connection) -> None:
    """It would be a deadlock: the switch holds the model and waits for the table."""
    other, loader, watcher = db.connect(), db.connect(), db.connect()
    key = "SELECT pg_advisory_{}lock(ml_rag._model_key('docs'::regclass))"
    call = "SELECT ml_rag.load_document('docs', 'fresh', 'fresh fish')"
    other.execute(key.format(""))
    with error("55006", 'the embedding model of "docs" is just being changed'), loader.transaction():
        loader.execute("SELECT count(*) FROM docs")
        loader.execute(call)
    waiting = Background(lambda: loader.execute(call))
    wait_until(lambda: waits(watcher, loader))
    other.execute(key.format("un"))
    waiting.result()
    assert_embedded(store, "fake-embed")


def test_a_batch_routine_does_not_mix_models(db: Database, owner: Connection, models: ModelsServer) -> None:
    other, watcher = db.connect(), db.connect()
    owner.execute("CREATE TABLE texts (id integer PRIMARY KEY, segment text)")
    owner.execute("INSERT INTO texts SELECT i, 'word ' || i FROM generate_series(1, 6) AS i")
    call = "CALL ml_embed_table('public.texts.segment', 'public.texts.segment_embedding', '{\"batch_size\": 1}')"
    owner.execute(call)
    owner.execute("UPDATE texts SET segment_embedding = NULL WHERE id > 3")
    reembed(other, "other", "texts", switch=False)
    running: list[Background] = []

    def start() -> None:
        running.append(Background(lambda: reembed(other, "other", "texts")))
        wait_until(lambda: phase(watcher) == "waiting for loads")

    # after the probe of the dimensions, the first of three batches
    models.before = {len(models.requests) + 1: start}
    with error("22023", "holds vectors of another model by now"):
        owner.execute(call)
    assert running[0].result()["switched"] is True
    assert_embedded(owner, "other", "texts")


def test_only_one_session_at_a_time(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    states: list[str | None] = []

    def try_too() -> None:
        for statement in ("CALL ml_rag.reembed('docs', 'narrow')", "SELECT ml_rag.abandon_reembed('docs')"):
            with pytest.raises(psycopg.Error) as caught:
                other.execute(statement)
            states.append(caught.value.sqlstate)

    models.before = {3: try_too}
    reembed(store, "narrow", batch_size=1)
    assert states == ["55006", "55006"]
    assert_embedded(store, "narrow")
