"""store/load: metadata and columns of a store that files do not have, and what becomes of them on the next load."""

from __future__ import annotations

import hashlib
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ml_rag.files import Given, Location
from support.cluster import Connection
from support.documents_server import DocumentsServer
from support.loading import counts, load, rows, write
from support.stores import error


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


@pytest.mark.parametrize("type", ["integer", "text"])
def test_a_column_may_be_called_like_a_name_of_ours(store: Connection, folder: Path, type: str) -> None:
    store.execute(f"ALTER TABLE docs ADD n {type}".encode())
    assert counts(load(store, f"{folder}/")) == {"unchanged": 2}
    store.execute(f"UPDATE docs SET n = {'1' if type == 'integer' else 'document_name'}".encode())
    write(folder, b="beta", c="gamma")
    assert counts(load(store, f"{folder}/", {"refresh": False})) == {"unchanged": 2, "loaded": 1}
    assert counts(load(store, f"{folder}/")) == {"unchanged": 2, "changed": 1}


def test_what_is_kept_is_the_value_and_not_its_text(store: Connection, folder: Path) -> None:
    store.execute("ALTER TABLE docs ADD published timestamptz, ADD weight float8; SET TimeZone = 'Asia/Kolkata'")
    store.execute("UPDATE docs SET published = '2026-01-01 00:00Z', weight = 0.1::float8 + 0.2::float8")
    store.execute("SET DateStyle = 'SQL'; SET extra_float_digits = 0")
    write(folder, a="changed")
    load(store, f"{folder}/", {"table_name": "docs"})
    changed = (
        "SELECT published = '2026-01-01 00:00Z', weight = 0.1::float8 + 0.2::float8 FROM docs WHERE segment = 'changed'"
    )
    assert rows(store, changed) == [(True, True)]


def test_metadata_of_very_many_strings_are_kept_in_a_moment(store: Connection, folder: Path) -> None:
    """One call of jsonb_object_agg takes the square of their number, and is not cancelled."""
    store.execute(
        "UPDATE docs SET metadata = metadata || m.own FROM (SELECT jsonb_build_object('own', jsonb_object_agg(i, 'x'))"
        " AS own FROM generate_series(1, 500000) AS i) AS m WHERE document_name ~ 'b.txt'"
    )
    write(folder, b="beta")
    store.execute("SET statement_timeout = '6s'")
    assert counts(load(store, f"{folder}/")) == {"changed": 1, "unchanged": 1}
    ((kept,),) = rows(store, "SELECT metadata -> 'own' ->> '500000' FROM docs WHERE document_name ~ 'b.txt'")
    assert kept == "x"


def test_metadata_of_very_many_keys_are_kept_in_a_moment(store: Connection, folder: Path) -> None:
    """All metadata were unpacked again for each key."""
    store.execute(
        "UPDATE docs SET metadata = metadata || m.own FROM (SELECT jsonb_object_agg('a key of a long name ' || i, i)"
        " AS own FROM generate_series(1, 40000) AS i) AS m WHERE document_name ~ 'b.txt'"
    )
    # those of one segment came from the file
    store.execute(
        "UPDATE docs SET metadata = jsonb_set(metadata, '{source,keys}', k.keys) FROM"
        " (SELECT '[\"page\"]' || jsonb_agg('a key of a long name ' || i) AS keys"
        " FROM generate_series(10001, 40000) AS i) AS k"
        " WHERE document_name ~ 'b.txt' AND segment_number = 1"
    )
    write(folder, b="beta")
    store.execute("SET statement_timeout = '6s'")
    result = load(store, f"{folder}/")
    assert counts(result) == {"changed": 1, "unchanged": 1}
    assert len(result["lost"][0]["metadata"]) == 30_000
    query = "SELECT count(*) FROM docs AS d, jsonb_object_keys(d.metadata) AS k WHERE k LIKE 'a key %'"
    assert rows(store, query) == [(10_000,)]


@pytest.mark.parametrize("keys", ["5", '"author"', '{"author": 1}', "null", "[5, null]"])
def test_a_list_of_keys_that_is_none_is_read_as_missing(store: Connection, folder: Path, keys: str) -> None:
    own = '{"author": "D", "page": 7, "null": 1}'
    store.execute("UPDATE docs SET metadata = jsonb_set(metadata, '{source,keys}', %s) || %s", (keys, own))
    write(folder, a="alpha", b="beta")
    result = load(store, f"{folder}/")
    assert (counts(result), result["lost"]) == ({"changed": 2}, [])
    kept = rows(store, "SELECT DISTINCT metadata ->> 'author', metadata ->> 'null' FROM docs")
    assert kept == [("D", "1")]


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


GIVEN = {
    "metadata": {"department": "HR"},
    "document_metadata": {"*.txt": {"kind": "note"}, "a.txt": {"kind": "A"}},
}


def labels(connection: Connection) -> list[tuple[Any, ...]]:
    query = "SELECT DISTINCT right(document_name, 5), metadata - %s::text[] FROM docs ORDER BY 1"
    dates = ["creation_date", "last_modified_date", "last_accessed_date"]
    written = ["format", "file_name", "file_size", "source", "page", *dates]
    return rows(connection, query, written)


def test_metadata_is_given_at_load(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    server.metadata = {"title": "T"}
    write(folder, a="alpha one\n\nalpha two", b="beta")
    assert "unmatched" not in load(loader, f"{folder}/", GIVEN)
    a = ("a.txt", {"title": "T", "department": "HR", "kind": "A"})
    b = ("b.txt", {"title": "T", "department": "HR", "kind": "note"})
    assert labels(loader) == [a, b]
    server.documents.clear()
    assert counts(load(loader, f"{folder}/", GIVEN)) == {"unchanged": 2}
    # it stays where a later load does not give it, and other values cost no embedding
    write(folder, a="alpha")
    assert counts(load(loader, f"{folder}/")) == {"changed": 1, "unchanged": 1}
    assert labels(loader) == [a, b]
    server.documents.clear()
    result = load(loader, f"{folder}/", {"document_metadata": {"docs/b.txt": {"title": "U", "n": [1]}, "c.txt": {}}})
    assert (counts(result), result["unmatched"]) == ({"changed": 1, "unchanged": 1}, ["c.txt"])
    assert labels(loader) == [a, ("b.txt", {**b[1], "title": "U", "n": [1]})]
    assert server.documents == []
    write(folder, b="beta new")
    load(loader, f"{folder}/")
    assert labels(loader)[1] == ("b.txt", {**b[1], "n": [1]})  # the file has a title of its own


def test_metadata_is_given_with_documents_that_are_sent(loader: Connection, server: DocumentsServer) -> None:
    loader.execute("SELECT ml_rag.create_store('public.docs')")
    send = "SELECT ml_rag.load_document('docs', 'x/a.txt', 'alpha', %s)"
    assert rows(loader, send, json.dumps(GIVEN))[0][0]["documents"]["loaded"] == 1
    assert labels(loader) == [("a.txt", {"department": "HR", "kind": "A"})]
    sha256 = hashlib.sha256(b"alpha").hexdigest()
    same = "SELECT ml_rag.unchanged_documents('docs', '{x/a.txt}', %s, %s)"
    assert rows(loader, same, [sha256], json.dumps(GIVEN)) == [("x/a.txt",)]
    other = json.dumps({"metadata": {"department": "IT"}})
    assert rows(loader, same, [sha256], other) == []
    assert counts(rows(loader, send, other)[0][0]) == {"changed": 1}
    assert counts(rows(loader, send, other)[0][0]) == {"unchanged": 1}
    assert labels(loader) == [("a.txt", {"department": "IT", "kind": "A"})]
    assert len(server.documents) == 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"metadata": {"source": "x"}}, "metadata"),
        ({"metadata": {"file_name": "x"}}, "metadata"),
        ({"metadata": {"x": "y" * 65536}}, "metadata"),
        ({"metadata": [1]}, "metadata"),
        ({"document_metadata": {"a.txt": 1}}, "document_metadata.a.txt"),
        ({"document_metadata": {"a.txt": {"source": 1}}}, "document_metadata.a.txt"),
        ({"document_metadata": {f"{i}*": {} for i in range(1001)}}, "document_metadata"),
    ],
)
def test_metadata_that_loads_write_themselves_is_refused(
    loader: Connection, server: DocumentsServer, folder: Path, options: dict[str, Any], name: str
) -> None:
    write(folder, a="alpha")
    with error("22023", f'"{name}"'):
        load(loader, f"{folder}/", options)
    assert rows(loader, "SELECT to_regclass('docs')") == [(None,)]
    load(loader, f"{folder}/", {"metadata": {"x": "y" * 65500}})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/srv/docs/a.md", {"k": "whole"}),
        ("/srv/docs/b.md", {"k": "docs/*.md", "n": 1}),
        ("/srv/c.md", {"k": "*.md", "n": 1}),
        ("/srv/docs/sub/c.txt", {"k": "all", "n": 1}),
        ("x/docs/a[1].txt", {"k": "end", "n": 1}),
    ],
)
def test_the_longest_name_goes_before(name: str, expected: dict[str, Any]) -> None:
    named = {
        "*.md": {"k": "*.md"},
        "docs/*.md": {"k": "docs/*.md"},
        "/srv/docs/a.md": {"k": "whole"},
        "a[1].txt": {"k": "end"},
        "srv/*": {},
    }
    found = Given({"k": "all", "n": 1}, named).of(name)
    assert {key: found[key] for key in expected} == expected


def test_a_document_whose_name_is_very_long_takes_little() -> None:
    """Anybody who may load can give a document any name; nothing can cancel what looks at it."""
    named = {"*.md": {"k": 1}, "b/" * 40_000: {"k": 2}, "a": {"k": 3}}
    given = Given(None, named)
    name = "/" * 1_000_000 + "a"
    tracemalloc.start()
    began = time.process_time()
    try:
        assert given.of(name) == {"k": 3}
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 5
    assert given.of("b/" * 40_000) == {"k": 2}
    assert not Location("/srv", ("*.md",)).matches("/srv/" + "a.zip/" * 20_000 + "a.md")
    given = Given(None, {f"{i}*": {} for i in range(1000)})
    assert given.of("7.md") == {}
    assert "7*" not in given.unused
