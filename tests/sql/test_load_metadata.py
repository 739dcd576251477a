"""store/load: metadata and columns of a store that files do not have, and what becomes of them on the next load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.cluster import Connection
from support.documents_server import DocumentsServer
from support.loading import counts, folder, load, loader, rows, server, write

__all__ = ["folder", "loader", "server"]


@pytest.fixture
def store(loader: Connection, server: DocumentsServer, folder: Path) -> Connection:
    """Two documents of two segments each, in a store whose owner has added columns."""
    write(folder, a="alpha one\n\nalpha two", b="beta one\n\nbeta two")
    load(loader, f"{folder}/")
    loader.execute(
        "ALTER TABLE docs ADD department text DEFAULT 'none', ADD price numeric(8,2), ADD seen point,"
        " ADD id bigserial UNIQUE, ADD code text UNIQUE"
    )
    return loader


def added(connection: Connection, document: str) -> list[tuple[Any, ...]]:
    return rows(
        connection,
        "SELECT DISTINCT metadata ->> 'author', metadata -> 'tags', department, price, seen::text FROM docs"
        " WHERE document_name ~ %s",
        document,
    )


def test_what_the_owner_added_is_kept_when_a_document_changes(store: Connection, folder: Path) -> None:
    store.execute(
        'UPDATE docs SET metadata = metadata || \'{"author": "D", "tags": ["x", 1.50], "none": null}\','
        " department = 'HR', price = 12.5, seen = '(1,2)' WHERE document_name ~ 'a.txt'"
    )
    write(folder, a="alpha one\n\nalpha two\n\nalpha three", b="beta")
    result = load(store, f"{folder}/")
    assert counts(result) == {"changed": 2}
    assert result["lost"] == []
    assert added(store, "a.txt") == [("D", ["x", 1.5], "HR", 12.5, "(1,2)")]
    assert rows(store, "SELECT count(*), count(DISTINCT id) FROM docs WHERE document_name ~ 'a.txt'") == [(3, 3)]
    assert rows(store, "SELECT count(*) FROM docs WHERE metadata ? 'none'") == [(3,)]
    assert added(store, "b.txt") == [(None, None, "none", None, None)]
    # and once more, by a load that sends the content
    store.execute("SELECT ml_rag.load_document('docs', %s, 'gamma')", (f"{folder}/a.txt",))
    assert added(store, "a.txt") == [("D", ["x", 1.5], "HR", 12.5, "(1,2)")]


def test_what_differs_between_segments_is_lost_and_said(store: Connection, folder: Path) -> None:
    store.execute("UPDATE docs SET code = 'c' || document_id WHERE segment_number = 1")
    store.execute(
        "UPDATE docs SET metadata = metadata || jsonb_build_object('checked', true, 'place', segment_number),"
        " price = segment_number WHERE document_name ~ 'a.txt'"
    )
    store.execute("UPDATE docs SET metadata = metadata || '{\"first\": 1}' WHERE segment_number = 1")
    write(folder, a="alpha one\n\nalpha three")
    result = load(store, f"{folder}/")
    name = f"{folder}/a.txt"
    assert result["lost"] == [{"document_name": name, "metadata": ["first", "place"], "columns": ["code", "price"]}]
    ((metadata, price, code),) = rows(
        store, "SELECT DISTINCT metadata - 'page', price, code FROM docs WHERE document_name ~ 'a.txt'"
    )
    assert (metadata["checked"], "place" in metadata, "first" in metadata, price, code) == (
        True,
        False,
        False,
        None,
        None,
    )


def test_what_the_file_says_goes_before_and_goes_with_the_file(
    store: Connection, server: DocumentsServer, folder: Path
) -> None:
    """A key of the owner's is taken over by a file that has it, and ends with it."""
    store.execute('UPDATE docs SET metadata = metadata || \'{"year": 1999, "title": "Mine"}\'')
    server.metadata = {"year": 2024, "title": "Theirs"}
    write(folder, a="alpha new")
    load(store, f"{folder}/")
    (metadata,) = rows(store, "SELECT metadata FROM docs WHERE document_name ~ 'a.txt'")[0]
    assert (metadata["year"], metadata["title"]) == (2024, "Theirs")
    server.metadata = {}
    write(folder, a="alpha newer")
    load(store, f"{folder}/")
    (metadata,) = rows(store, "SELECT metadata FROM docs WHERE document_name ~ 'a.txt'")[0]
    assert "year" not in metadata
    assert "title" not in metadata
    assert rows(store, "SELECT DISTINCT metadata -> 'year' FROM docs WHERE document_name ~ 'b.txt'") == [(1999,)]


def test_columns_that_the_loader_may_not_write_keep_their_defaults(
    store: Connection, owner: Connection, folder: Path, server: DocumentsServer
) -> None:
    owner.execute("ALTER TABLE docs OWNER TO CURRENT_USER")
    role = rows(store, "SELECT current_user::text")[0][0]
    owner.execute(f"REVOKE ALL ON docs FROM {role}")
    columns = "document_name, metadata, document_id, segment_number, segment, segment_embedding, price"
    owner.execute(f"GRANT DELETE, SELECT ({columns}), INSERT ({columns}) ON docs TO {role}")
    owner.execute(f"GRANT USAGE ON SEQUENCE docs_id_seq TO {role}")
    owner.execute("UPDATE docs SET department = 'HR', price = 7")
    content = "alpha\n\nbeta"
    result = rows(store, "SELECT ml_rag.load_document('docs', %s, %s::bytea)", f"{folder}/a.txt", content.encode())
    assert result[0][0]["documents"]["changed"] == 1
    found = rows(owner, "SELECT DISTINCT department, price FROM docs WHERE document_name ~ 'a.txt'")
    assert found == [("none", 7)]
