"""An upgrade of a server that is in use: calls under way, and versions that meet for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import ml_rag
from support.cluster import Cluster, Database, value_of, waits_for_a_lock
from support.documents_server import DocumentsServer
from support.extension import VERSIONS, install, update
from support.hostile_server import hostile
from support.loading import counts, folder, load, write
from support.processes import Background, wait_until
from support.stores import create_store, fake_embedding, search

__all__ = ["folder"]


@pytest.fixture(params=VERSIONS)
def old(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Database]:
    """A database as a release made it."""
    with cluster.database("template0") as database:
        install(database.connect(), request.param)
        yield database


def test_a_database_that_waits_for_its_update_works_with_the_new_model_server(old: Database, model_server: str) -> None:
    owner = old.connect()
    for name, value in (("model_server", model_server), ("embed_model_id", "fake-embed")):
        owner.execute("SELECT ml_rag.configure(%s, %s)", (name, value))
    owner.execute("SELECT ml_rag.configure('generate_model_id', 'fake-generate')")
    owner.execute("SELECT ml_rag.configure('rerank_model_id', 'fake-rerank')")
    owner.execute("SELECT ml_rag.create_store('public.docs')")
    loaded = value_of(owner, "SELECT ml_rag.load_document('docs', 'a.txt', 'the sea is blue')")
    assert counts(loaded) == {"loaded": 1}
    document = value_of(owner, """SELECT ml_rag_answer('is the sea blue?', '{"rerank": {}}')""")
    assert document["text"].startswith("fake answer to: is the sea blue?")
    assert document["citations"][0]["segment"] == "the sea is blue"
    assert owner.execute("SELECT count(*) > 0 FROM ml_supported_models()").fetchone() == (True,)
    assert owner.execute("SELECT ml_generate('one') ->> 'text'").fetchone() != (None,)


def test_calls_under_way_end_before_the_update(old: Database, local_sockets: Path) -> None:
    """Nobody gets half of one version and half of the other."""
    owner, asker, updater, watcher = (old.connect() for _ in range(4))
    create_store(owner, rows=[("d", 1, 1, "green tree", fake_embedding("green tree"))], type="vector(16)")
    handler = DocumentsServer()
    original = handler.vectors
    running: list[Background] = []

    def vectors(texts: list[str], model: str) -> list[list[float]]:
        if not running:
            running.append(Background(lambda: update(updater)))
            wait_until(lambda: waits_for_a_lock(watcher, updater))
        return original(texts, model)

    handler.vectors = vectors  # type: ignore[method-assign]
    with hostile(local_sockets, handler, owner=owner):
        owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed')")
        assert search(asker, "green tree", {"n_citations": 1})[0][5:7] == ("green tree", 0)
        running[0].result()
        assert search(asker, "green tree", {"n_citations": 1})[0][5:7] == ("green tree", 0)
    assert asker.execute("SELECT ml_rag.version()").fetchone() == (ml_rag.__version__,)


def test_a_load_that_is_under_way_goes_on_or_is_called_again(old: Database, local_sockets: Path, folder: Path) -> None:
    """It commits now and then, so the update may come in between."""
    owner, loader, updater, watcher = (old.connect() for _ in range(4))
    write(folder, **{f"d{i:03}": f"document {i}" for i in range(300)})
    handler = DocumentsServer()
    running: list[Background] = []

    def start() -> None:
        running.append(Background(lambda: update(updater)))
        wait_until(lambda: running[0].ended or waits_for_a_lock(watcher, updater))

    handler.before_batch = {1: start}
    with hostile(local_sockets, handler, owner=owner):
        owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed')")
        options = {"table_name": "docs"}
        # a function of the old version that the new one has not
        with contextlib.suppress(psycopg.errors.UndefinedFunction):
            load(loader, f"{folder}/", options)
        running[0].result()
        found = loader.execute("SELECT count(*), count(DISTINCT document_name) FROM docs").fetchone()
        assert found is not None
        assert found[0] == found[1] > 128
        assert sum(counts(load(loader, f"{folder}/", options)).values()) == 300
    assert loader.execute("SELECT count(*), count(DISTINCT document_name) FROM docs").fetchone() == (300, 300)
    assert loader.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)
