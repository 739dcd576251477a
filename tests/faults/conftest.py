"""What the faults happen to: a cluster of their own that may be killed, a model server that is started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cluster import Cluster, Database
from support.faulty_proxy import FaultyProxy, faulty_proxy
from support.invariants import Answers, snapshot
from support.loading import load
from support.private_cluster import PrivateCluster, private_cluster
from support.site import CHUNKING, Gate, Site, write_corpus
from support.supervised_server import SupervisedServer, supervised_server


@pytest.fixture(scope="session")
def private(place: Path) -> Iterator[PrivateCluster]:
    with private_cluster(place) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster(private: PrivateCluster, model_server: str) -> Iterator[Cluster]:
    """The cluster of these tests, in place of the one all others share."""
    cluster = Cluster(private.dsn, ahead=False)
    cluster.prepare(model_server)
    yield cluster
    cluster.drop()


@pytest.fixture
def local_sockets(place: Path) -> Path:
    return place


@pytest.fixture(scope="session")
def corpus(place: Path) -> Path:
    """A folder of documents that no test changes."""
    folder = place / "corpus"
    folder.mkdir(mode=0o755)
    write_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, corpus: Path) -> Answers:
    """The corpus, loaded while nothing happens."""
    with cluster.database() as database:
        connection = database.connect()
        load(connection, f"{corpus}/", {"table_name": "docs", **CHUNKING})
        return snapshot(connection)


@pytest.fixture(scope="session")
def server(place: Path) -> Iterator[SupervisedServer]:
    """One for all tests that leave it alone; those that do not have one of their own under the same name."""
    with supervised_server(place) as running:
        yield running


@pytest.fixture
def site(
    private: PrivateCluster, db: Database, server: SupervisedServer, corpus: Path, undisturbed: Answers
) -> Iterator[Site]:
    """All of it, the corpus not yet loaded."""
    with db.connect() as connection:
        connection.execute("SELECT ml_rag.configure('model_server', %s)", (server.address,))
    site = Site(private, db, server, corpus, undisturbed)
    yield site
    if not private.answers():
        private.restart()
    db.close()
    site.end()


@pytest.fixture
def gate(site: Site) -> Callable[..., Gate]:
    def make(table: str, condition: str, event: str = "INSERT") -> Gate:
        return Gate(site, table, condition, event)

    return make


@pytest.fixture
def proxy(site: Site, place: Path) -> Iterator[FaultyProxy]:
    with faulty_proxy(place, site.server.socket) as (running, proxy):
        with site.connect() as connection:
            connection.execute("SELECT ml_rag.configure('model_server', %s)", (running.address,))
        yield proxy
