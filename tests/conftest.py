"""Fixtures of all tests. Whatever needs PostgreSQL finds it through ML_RAG_TEST_DSN, a superuser's DSN.

ML_RAG_TEST_MODEL_SERVER names the model server (with its fake models) as the database shall address it, where the
database is on another machine; without it, one is started here on a unix socket.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.cluster import Cluster, Connection, Database


@pytest.fixture(scope="session")
def reachable_dir() -> Iterator[Path]:
    """A directory for sockets that PostgreSQL's operating system user can enter, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="ml_rag_test_"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def model_server(reachable_dir: Path) -> Iterator[str]:
    """The address of a model server that offers the fake models."""
    if address := os.environ.get("ML_RAG_TEST_MODEL_SERVER"):
        yield address
        return
    from ml_rag.testing import running_server

    # the server checks its peer's uid; the socket itself is open, since only the test knows who PostgreSQL runs as
    # and the real models are not there, also where ML_RAG_MODELS says where they are
    with running_server(
        socket=reachable_dir / "fake.sock",
        config='[server]\nsocket_mode = "0666"\n',
        models_dir=reachable_dir / "no-models",
    ) as server:
        yield f"unix:{server.socket}"


@pytest.fixture(scope="session")
def cluster(model_server: str) -> Iterator[Cluster]:
    """The server, with the test roles and a template database that has the extension."""
    from support.cluster import Cluster

    dsn = os.environ.get("ML_RAG_TEST_DSN")
    if not dsn:
        pytest.fail("ML_RAG_TEST_DSN is not set: `make test` sets it, or name a superuser's DSN")
    cluster = Cluster(dsn)
    try:
        template = cluster.create(template="template0", name=cluster.template)
        with template.connect() as connection:
            connection.execute("CREATE EXTENSION ml_rag CASCADE")
            for setting, value in {
                "model_server": model_server,
                "embed_model_id": "fake-embed",
                "generate_model_id": "fake-generate",
                "rerank_model_id": "fake-rerank",
            }.items():
                connection.execute("SELECT ml_rag.configure(%s, %s)", (setting, value))
        cluster.create_roles()
        yield cluster
    finally:
        cluster.drop()


@pytest.fixture
def db(cluster: Cluster) -> Iterator[Database]:
    """A database of this test's own: what it commits is real, and gone afterwards."""
    with cluster.database() as database:
        yield database


@pytest.fixture
def owner(db: Database) -> Connection:
    """A connection as the owner of the extension, a superuser."""
    return db.connect()


@pytest.fixture
def asker(db: Database) -> Connection:
    """A connection as a role that is a member of ml_rag_user and nothing else."""
    return db.connect("asker")


@pytest.fixture
def tenant(db: Database) -> Connection:
    """A connection as another member of ml_rag_user."""
    return db.connect("tenant")


@pytest.fixture
def stranger(db: Database) -> Connection:
    """A connection as a role without any privilege."""
    return db.connect("stranger")


@pytest.fixture
def local_sockets(reachable_dir: Path) -> Path:
    """Where a test may open a unix socket for the database to connect to."""
    if os.environ.get("ML_RAG_TEST_MODEL_SERVER"):
        pytest.skip("the database is on another machine, which cannot reach a socket of this one")
    return reachable_dir


@pytest.fixture(scope="module")
def module_db(cluster: Cluster) -> Iterator[Database]:
    """A database for all tests of a module, where they only read or leave things as they were."""
    with cluster.database() as database:
        yield database


@pytest.fixture(scope="module")
def module_owner(module_db: Database) -> Connection:
    return module_db.connect()


@pytest.fixture(scope="module")
def module_asker(module_db: Database) -> Connection:
    return module_db.connect("asker")
