"""Fixtures of all tests. Whatever needs PostgreSQL finds it through ML_RAG_TEST_DSN, a superuser's DSN; without it, a
cluster is made of the PostgreSQL whose pg_config ML_RAG_TEST_PG_CONFIG names. With ML_RAG_TEST_CITUS it coordinates two
workers of Citus.

ML_RAG_TEST_MODEL_SERVER names the model server (with its fake models) as the database shall address it, where the
database is on another machine; without it, one is started here on a unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.cluster import Cluster, Connection, Database


#: folders whose files take long: first, so that no process of tests ends long after the others
_LONG = {"faults", "fuzz", "models"}
#: folders whose tests are marked with their names
_MARKED = {"faults", "fuzz", "integrations"}
#: bytes of memory that clusters are kept in, where there are so many
_ROOM = 2 * 1024**3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in _MARKED:
            item.add_marker(item.path.parent.name)
    items.sort(key=lambda item: _LONG.isdisjoint(item.path.parts))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, each in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """No test changes the environment of others."""
    from support.environment import unchanged

    with unchanged():
        yield


@pytest.fixture(scope="session")
def reachable_dir() -> Iterator[Path]:
    """A directory for sockets that PostgreSQL's operating system user can enter, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="ml_rag_test_"))
    directory.chmod(0o711)
    yield directory
    if scripted := sys.modules.get("support.scripted"):
        scripted.stop_scripted_servers()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def model_server(reachable_dir: Path) -> Iterator[str]:
    """The address of a model server that offers the fake models."""
    if address := os.environ.get("ML_RAG_TEST_MODEL_SERVER"):
        yield address
        return
    from support.servers import running_server

    # the server checks its peer's uid; the socket itself is open, since only the test knows who PostgreSQL runs as
    # and the real models are not there, also where ML_RAG_MODELS says where they are
    with running_server(
        socket=reachable_dir / "fake.sock",
        config='[server]\nsocket_mode = "0666"\n',
        models_dir=reachable_dir / "no-models",
    ) as server:
        yield f"unix:{server.socket}"


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """Where clusters lie: PostgreSQL's operating system user must be able to enter.

    In memory where there is room: each test has a database of its own, which is made there in a seventh of the time.
    Faults lose nothing by it: a process that is killed loses nothing the kernel has, on no file system.
    """
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM
    with tempfile.TemporaryDirectory(prefix="ml_rag_test_", dir=memory if has_room else None) as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


@pytest.fixture(scope="session")
def servers(place: Path) -> Iterator[list[str]]:
    """The server: the one that is named, else a cluster of this process's own; with Citus, two workers follow."""
    if dsn := os.environ.get("ML_RAG_TEST_DSN"):
        yield [dsn]
        return
    from support.citus import clusters
    from support.private_cluster import PG_CONFIG, private_cluster

    if not os.environ.get(PG_CONFIG):
        pytest.fail(f"neither ML_RAG_TEST_DSN nor {PG_CONFIG} is set: `make test` sets it, or name a superuser's DSN")
    folder = place / "shared"
    folder.mkdir(mode=0o711)
    with contextlib.ExitStack() as stack:
        try:
            if os.environ.get("ML_RAG_TEST_CITUS"):
                found = stack.enter_context(clusters(folder, 3))
            else:
                found = [stack.enter_context(private_cluster(folder, durable=False))]
        except pytest.skip.Exception as e:
            pytest.fail(str(e))  # else nearly all tests were skipped
        yield [cluster.dsn for cluster in found]


@pytest.fixture(scope="session")
def cluster(servers: list[str], model_server: str) -> Iterator[Cluster]:
    """The server, with the test roles and a template database that has the extension."""
    from support.citus import Coordinator
    from support.cluster import Cluster

    cluster = Coordinator(servers) if len(servers) > 1 else Cluster(servers[0])
    try:
        cluster.prepare(model_server)
        yield cluster
    finally:
        cluster.drop()


@pytest.fixture
def db(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database of this test's own: what it commits is real, and gone afterwards."""
    with cluster.database(fresh=request.node.get_closest_marker("fresh") is not None) as database:
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
def module_db(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database for all tests of a module, where they only read or leave things as they were."""
    with cluster.database(fresh=request.node.get_closest_marker("fresh") is not None) as database:
        yield database


@pytest.fixture(scope="module")
def module_owner(module_db: Database) -> Connection:
    return module_db.connect()


@pytest.fixture(scope="module")
def module_asker(module_db: Database) -> Connection:
    return module_db.connect("asker")
