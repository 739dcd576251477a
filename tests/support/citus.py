"""A coordinator of Citus and its workers, as private clusters."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support.cluster import Cluster, Connection
from support.private_cluster import PG_CONFIG, PrivateCluster, private_cluster

_CONF = """
shared_preload_libraries = 'citus'
citus.shard_count = 8
citus.local_hostname = '{sockets}'
max_prepared_transactions = 100
max_wal_senders = 20
max_replication_slots = 20
max_logical_replication_workers = 20
# each database has its maintenance daemon
max_worker_processes = 100
"""

#: what is told, or tried, where Citus is not there
without_citus = pytest.mark.skipif("ML_RAG_TEST_CITUS" in os.environ, reason="Citus is there")


def has_citus() -> bool:
    config = os.environ.get(PG_CONFIG)
    if not config:
        return False
    folder = subprocess.run([config, "--pkglibdir"], capture_output=True, text=True, check=False).stdout.strip()
    return (Path(folder) / "citus.so").exists()


@contextlib.contextmanager
def clusters(place: Path, n: int) -> Iterator[list[PrivateCluster]]:
    """Clusters that Citus can be created in."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for i in range(n):
            folder = place / f"citus{i}"
            folder.mkdir(mode=0o711)
            nodes.append(stack.enter_context(private_cluster(folder, durable=False)))
            nodes[-1].configure(_CONF.format(sockets=nodes[-1].sockets))
            nodes[-1].stop("fast")
            nodes[-1].start()
        yield nodes


def add_workers(coordinator: Connection, workers: list[str]) -> None:
    """Make the server of ``coordinator`` one, of the servers of these DSNs; the database has Citus on each."""
    for dsn, add in [
        (coordinator.info.dsn, "SELECT citus_set_coordinator_host(%s, %s)"),
        *((dsn, "SELECT citus_add_node(%s, %s)") for dsn in workers),
    ]:
        server = conninfo_to_dict(dsn)
        coordinator.execute(add, (server["host"], int(server["port"])))


class Coordinator(Cluster):
    """Each database has Citus, and a database of its name on each worker: what tests of one server find beside it."""

    def __init__(self, nodes: list[str]) -> None:
        super().__init__(nodes[0])
        self._nodes = [psycopg.connect(node, autocommit=True) for node in nodes]

    def execute(self, statement: str, *names: str) -> None:
        # databases and roles
        for node in self._nodes:
            node.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def fill_template(self, connection: Connection) -> None:
        workers = [make_conninfo(node.info.dsn, dbname=self.template) for node in self._nodes[1:]]
        connection.execute("CREATE EXTENSION citus")
        for dsn in workers:
            with psycopg.connect(dsn, autocommit=True) as worker:
                worker.execute("CREATE EXTENSION citus")
        add_workers(connection, workers)
        super().fill_template(connection)

    def prepare(self, model_server: str) -> None:
        super().prepare(model_server)
        # no database is copied while somebody uses it, and a daemon comes with the next session
        self.execute("ALTER DATABASE {} ALLOW_CONNECTIONS false", self.template)
        for node in self._nodes:
            node.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", (self.template,)
            )

    def drop(self) -> None:
        super().drop()
        for node in self._nodes:
            node.close()


@contextlib.contextmanager
def citus(place: Path, model_server: str, workers: int) -> Iterator[list[PrivateCluster]]:
    """The coordinator, whose ml_rag Citus creates on the workers too, and these. Roles: loader, asker, stranger."""
    with clusters(place, 1 + workers) as nodes:
        for node in nodes:
            with psycopg.connect(node.dsn, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION citus")
        with psycopg.connect(nodes[0].dsn, autocommit=True) as owner:
            add_workers(owner, [node.dsn for node in nodes[1:]])
            owner.execute("CREATE EXTENSION vector; CREATE EXTENSION plpython3u; CREATE EXTENSION ml_rag")
            owner.execute("SELECT ml_rag.configure('model_server', %s)", (model_server,))
            for kind in ("embed", "generate", "rerank"):
                owner.execute("SELECT ml_rag.configure(%s, %s)", (f"{kind}_model_id", f"fake-{kind}"))
            owner.execute(
                "CREATE ROLE loader LOGIN IN ROLE ml_rag_loader, ml_rag_publisher;"
                "CREATE ROLE asker LOGIN IN ROLE ml_rag_user; CREATE ROLE stranger LOGIN IN ROLE ml_rag_user"
            )
            owner.execute("GRANT CREATE ON SCHEMA public TO loader")
        yield nodes
