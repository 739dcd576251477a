"""Fixtures and calls of the tests that load documents; import the fixtures by name."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from support.cluster import Connection, Database, value_of
from support.documents_server import DocumentsServer
from support.hostile_server import hostile


@pytest.fixture
def server(owner: Connection, local_sockets: Path) -> Iterator[DocumentsServer]:
    """The model server of the database: one that counts, and takes orders from documents."""
    handler = DocumentsServer()
    with hostile(local_sockets, handler, owner=owner):
        yield handler


@pytest.fixture
def folder(local_sockets: Path) -> Iterator[Path]:
    """A folder that PostgreSQL's operating system user can read."""
    folder = Path(tempfile.mkdtemp(dir=local_sockets)) / "docs"
    folder.mkdir()
    folder.parent.chmod(0o755)
    yield folder
    shutil.rmtree(folder.parent)


@pytest.fixture
def loader(db: Database, owner: Connection) -> Iterator[Connection]:
    """A connection as a role that may load: ml_rag_loader, server files, tables in public; not a superuser.

    It is a publisher: what it loads is searched by calls that do not name it.
    """
    role = sql.Identifier(loader_role(db))
    owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
    owner.execute(sql.SQL("GRANT ml_rag_loader, ml_rag_publisher, pg_read_server_files TO {}").format(role))
    owner.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(role))
    connection = connect_as_loader(db)
    yield connection
    if not connection.closed:
        connection.rollback()  # its locks
    owner.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(role))
    owner.execute(sql.SQL("DROP ROLE {}").format(role))


def loader_role(db: Database) -> str:
    return f"{db.name}_loader"


def connect_as_loader(db: Database) -> Connection:
    """One more connection of the role behind the fixture ``loader``."""
    connection = db.connect()
    connection.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(sql.Identifier(loader_role(db))))
    return connection


def write(folder: Path, **files: str) -> None:
    """Text files, by name without ``.txt``."""
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)


def load(connection: Connection, uri: Any, options: Any = None) -> dict[str, Any]:
    """``vector_store_load``'s result."""
    result: dict[str, Any] = value_of(
        connection, "CALL vector_store_load(%s, %s)", (str(uri), None if options is None else json.dumps(options))
    )
    return result


def counts(result: dict[str, Any]) -> dict[str, int]:
    """The counts of a result that are not 0."""
    return {name: n for name, n in result["documents"].items() if n}


def rows(connection: Connection, query: str = "TABLE docs", *arguments: Any) -> list[tuple[Any, ...]]:
    return connection.execute(query, arguments or None).fetchall()


def segments(connection: Connection, table: str = "docs") -> dict[str, list[str]]:
    """Base name of each document -> its segments in order."""
    found: dict[str, list[str]] = {}
    query = sql.SQL("SELECT document_name, segment FROM {} ORDER BY document_id, segment_number")
    for name, segment in connection.execute(query.format(sql.Identifier(table))):
        found.setdefault(os.path.basename(name), []).append(segment)
    return found
