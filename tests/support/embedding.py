"""Embeddings of texts, by a model server that may misbehave; import the fixtures by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from support import hostile_server
from support.cluster import Connection, Database, value_of
from support.hostile_server import HostileServer, hostile

UNIT = [1.0, 0.0, 0.0]


def embed(connection: Connection, text: str | None = "hello", **options: Any) -> list[float]:
    """``ml_embed_row``'s vector."""
    found = value_of(connection, "SELECT ml_embed_row(%s, %s)::text", (text, Jsonb(options) if options else None))
    return [float(x) for x in found.strip("[]").split(",")]


@pytest.fixture
def behave(module_owner: Connection, local_sockets: Path) -> Iterator[Callable[..., HostileServer]]:
    """``behave(handler)``: the database's model server is now one that answers like that."""
    (before,) = module_owner.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone() or ("",)
    with contextlib.ExitStack() as stack:

        def start(handler: hostile_server.Handler, name: str | None = None) -> HostileServer:
            return stack.enter_context(hostile(local_sockets, handler, name, owner=module_owner))

        yield start
    module_owner.execute("SELECT ml_rag.configure('model_server', %s)", (before,))


@pytest.fixture
def session(module_db: Database) -> Iterator[Connection]:
    """A session of its own, which keeps its connection to the model server."""
    connection = module_db.connect("asker")
    # an upper bound: no misbehaviour may hang the test
    connection.execute("SET statement_timeout = '20s'")
    yield connection
    connection.close()
