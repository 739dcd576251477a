"""A store whose partitions are on other clusters, each with the extension, and the roles that are mapped to theirs."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support.cluster import Connection, Database, value_of
from support.private_cluster import PrivateCluster, private_cluster
from support.reuse import reset

#: of every shard; those of the coordinator are mapped to them
ROLES = {"loader": "ml_rag_loader", "asker": "ml_rag_user"}


@dataclass
class Shard:
    """One cluster, with a database in which the extension is."""

    cluster: PrivateCluster
    server: str
    name: str = "postgres"
    _idle: list[Connection] = field(default_factory=list)

    @property
    def dsn(self) -> str:
        return make_conninfo(self.cluster.dsn, dbname=self.name)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    @contextlib.contextmanager
    def connect(self, role: str | None = None) -> Iterator[Connection]:
        """A session that others may have used: each loads Python and plans what it calls."""
        while self._idle:
            connection = self._idle.pop()
            with contextlib.suppress(psycopg.OperationalError):  # the cluster was ended meanwhile
                connection.execute("SELECT 1")
                break
            connection.close()
        else:
            connection = psycopg.connect(self.dsn, autocommit=True)
        if role is not None:
            connection.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(sql.Identifier(role)))
        try:
            yield connection
        finally:
            reused = None if connection.closed else reset(connection)
            if reused is None:
                connection.close()
            else:
                self._idle.append(reused)


@contextlib.contextmanager
def shards(place: Path, model_server: str, n: int) -> Iterator[list[Shard]]:
    """Clusters, in folders that no other test has."""
    with contextlib.ExitStack() as stack:
        found = []
        for i in range(n):
            folder = Path(tempfile.mkdtemp(prefix="shard", dir=place))
            folder.chmod(0o711)
            shard = Shard(stack.enter_context(private_cluster(folder, durable=False)), f"server{i}")
            stack.callback(shard.close)
            with shard.connect() as owner:
                owner.execute("CREATE EXTENSION ml_rag CASCADE")
                owner.execute("SELECT ml_rag.configure('model_server', %s)", (model_server,))
                owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed')")
                for role, group in ROLES.items():
                    owner.execute(f"CREATE ROLE {role} LOGIN IN ROLE {group}")
                owner.execute("GRANT CREATE ON SCHEMA public TO loader")
                owner.execute("CREATE DATABASE empty TEMPLATE template1")
            found.append(shard)
        yield found


def empty(shard: Shard) -> None:
    """Drop what tests have made."""
    with shard.connect() as owner:
        owner.execute("DROP OWNED BY loader CASCADE; GRANT CREATE ON SCHEMA public TO loader")


def map_roles(db: Database, owner: Connection, shards: list[Shard], mapped: dict[str, str], **options: str) -> None:
    """Foreign servers of the shards; ``mapped``: a role here, and the one it has there."""
    owner.execute("CREATE EXTENSION IF NOT EXISTS postgres_fdw")
    for shard in shards:
        info = conninfo_to_dict(shard.dsn)
        values = {"host": str(info["host"]), "port": str(info["port"]), "dbname": str(info["dbname"])}
        values |= {"extensions": "vector, ml_rag", **options}
        listed = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.SQL(key), sql.Literal(value)) for key, value in values.items()
        )
        name = sql.Identifier(shard.server)
        owner.execute(sql.SQL("CREATE SERVER {} FOREIGN DATA WRAPPER postgres_fdw OPTIONS ({})").format(name, listed))
        for role, other in mapped.items():
            owner.execute(
                sql.SQL("CREATE USER MAPPING FOR {} SERVER {} OPTIONS (user {}, password_required 'false')").format(
                    sql.Identifier(role), name, sql.Literal(other)
                )
            )
        owner.execute(
            sql.SQL("GRANT USAGE ON FOREIGN SERVER {} TO {}").format(name, sql.Identifier(next(iter(mapped))))
        )


def make_shard(shard: Shard, *names: str) -> None:
    """Empty stores that can be attached, open to ml_rag_user."""
    with shard.connect("loader") as loader:
        for name in names:
            create = "SELECT ml_rag.create_store(%s, %s)"
            loader.execute(create, (f"public.{name}", '{"index": {"type": "none"}, "shard": true}'))
            loader.execute(f"GRANT SELECT ON {name} TO ml_rag_user")
            loader.execute(create, (f"public.{name}", '{"shard": true}'))


def attach(connection: Connection, store: str, partition: int, shard: Shard, name: str | None = None) -> str:
    """Move a partition; the foreign table."""
    options = {"partition": partition, "table_name": name or store}
    return str(
        value_of(connection, "SELECT ml_rag.attach_shard(%s, %s, %s)::text", (store, shard.server, json.dumps(options)))
    )
