"""A coordinator of Citus and its workers, as private clusters."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg

from support.private_cluster import PG_CONFIG, PrivateCluster, private_cluster

_CONF = """
shared_preload_libraries = 'citus'
citus.shard_count = 8
citus.local_hostname = '{sockets}'
max_prepared_transactions = 100
max_wal_senders = 20
max_replication_slots = 20
max_logical_replication_workers = 20
max_worker_processes = 40
"""


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


@contextlib.contextmanager
def citus(place: Path, model_server: str, workers: int) -> Iterator[list[PrivateCluster]]:
    """The coordinator, whose ml_rag Citus creates on the workers too, and these. Roles: loader, asker, stranger."""
    with clusters(place, 1 + workers) as nodes:
        for node in nodes:
            with psycopg.connect(node.dsn, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION citus")
        with psycopg.connect(nodes[0].dsn, autocommit=True) as owner:
            port = owner.info.port
            owner.execute("SELECT citus_set_coordinator_host(%s, %s)", (str(nodes[0].sockets), port))
            for node in nodes[1:]:
                owner.execute("SELECT citus_add_node(%s, %s)", (str(node.sockets), port))
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
