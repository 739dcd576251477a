"""store/load: which files a URI stands for, and which table they go to."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest

from support.cluster import Connection
from support.documents_server import DocumentsServer
from support.loading import counts, load, rows, segments, write
from support.stores import error


@pytest.mark.parametrize(
    "name",
    [
        "with blank.txt",
        "ünïcödé 文書.txt",
        'it\'s "quoted".txt',
        "100%.txt",
        "back\\slash.txt",
        "a;b,c.txt",
        "x[1].txt",
    ],
)
def test_any_file_name_will_do(loader: Connection, server: DocumentsServer, folder: Path, name: str) -> None:
    (folder / name).write_text("alpha")
    store = {"table_name": "docs"}
    for uri in (f"{folder}/{name}", f"file://{quote(str(folder / name))}", f"{folder}/", f"{folder}/*"):
        assert counts(load(loader, uri, store)) in ({"loaded": 1}, {"unchanged": 1})
    assert rows(loader, "SELECT document_name FROM docs") == [(f"{folder}/{name}",)]


def test_a_file_name_that_is_no_text_fails_alone(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="alpha")
    with open(os.fsencode(folder) + b"/\xff.txt", "w") as file:
        file.write("beta")
    result = load(loader, f"{folder}/")
    assert counts(result) == {"loaded": 1, "failed": 1}
    assert "UTF-8" in result["failed"][0]["detail"]


def test_globs_match_what_a_shell_would(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    for path in ("a1.txt", "a2.txt", "b1.md", "x/a3.txt", "x/y/a4.txt", ".a5.txt", "*.txt"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    for uri, expected in (
        ("a?.txt", {"a1.txt", "a2.txt"}),
        ("?1.*", {"a1.txt", "b1.md"}),
        ("*/*.txt", {"a3.txt"}),
        ("*/*/*.txt", {"a4.txt"}),
        (".*", {".a5.txt"}),
    ):
        load(loader, f"{folder}/{uri}", {"table_name": "g"})
        assert set(segments(loader, "g")) == expected, uri
        loader.execute("DROP TABLE g")
    load(loader, f"file://{folder}/%2A.txt", {"table_name": "g"})
    assert set(segments(loader, "g")) == {"*.txt"}


def test_hidden_files_and_links_out_of_the_folder_are_left_out(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder.parent, secret="secret")
    write(folder, a="alpha")
    (folder / ".hidden").mkdir()
    write(folder / ".hidden", b="beta")
    (folder / "out.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "outdir").symlink_to(folder.parent)
    (folder / "dangling.txt").symlink_to(folder / "nothing")
    (folder / "twin.txt").symlink_to("a.txt")
    (folder / "seen.txt").symlink_to(".hidden/b.txt")
    os.mkfifo(folder / "pipe.txt")
    for uri in (f"{folder}/", f"{folder}/*.txt", f"{folder}/../docs/"):
        load(loader, uri, {"table_name": "docs"})
        assert segments(loader) == {"a.txt": ["alpha"], "seen.txt": ["beta"]}
    assert {row[0] for row in rows(loader, "SELECT document_name FROM docs")} == {
        f"{folder}/a.txt",
        f"{folder}/seen.txt",
    }


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("docs/a.txt", "not absolute"),
        ("", "not absolute"),
        ("https://example.org/a", "only files can be loaded"),
        ("file://elsewhere/a", "only files of the server"),
        ("file:///a%zz", "not well formed"),
        ("file:///a%00", "not well formed"),
        ("file:///a%ff", "not well formed"),
        ("{folder}/nothing.txt", "file does not exist"),
        ("{folder}/nothing/", "cannot be read"),
        ("{folder}/", "no file to load"),
        ("{folder}/*.txt", "no file to load"),
        ("{folder}/*/../x", "a glob names files"),
        ("{folder}/*/", "a glob names files"),
        ("/dev/null", "not a regular file"),
    ],
)
def test_a_uri_that_names_no_file_is_22023(
    loader: Connection, server: DocumentsServer, folder: Path, uri: str, message: str
) -> None:
    with error("22023", message):
        load(loader, uri.format(folder=folder))


def test_a_null_uri_is_22023(loader: Connection) -> None:
    with error("22023", "URI is missing"):
        loader.execute("CALL vector_store_load(NULL)")


@pytest.mark.parametrize(
    ("path", "table"),
    [("Report 2024 (final).txt", "report_2024_final"), ("---.txt", "documents"), ("Übersicht.txt", "übersicht")],
)
def test_the_default_name_comes_from_the_path(
    loader: Connection, server: DocumentsServer, folder: Path, path: str, table: str
) -> None:
    (folder / path).write_text("alpha")
    assert load(loader, folder / path)["vector_store"] == f"public.{table}"


def test_the_default_schema_is_the_first_that_will_take_the_table(
    loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha")
    owner.execute("CREATE SCHEMA closed; CREATE SCHEMA opened; GRANT USAGE ON SCHEMA closed TO PUBLIC")
    owner.execute("GRANT ALL ON SCHEMA opened TO ml_rag_loader")
    loader.execute("SET search_path = nowhere, closed, opened, public")
    assert load(loader, f"{folder}/")["vector_store"] == "opened.docs"
    loader.execute("SET search_path = closed")
    with error("42501", "no schema") as caught:
        loader.execute("CALL public.vector_store_load(%s)", (f"{folder}/",))
    assert "GRANT CREATE ON SCHEMA closed TO " in caught.hint


def test_hostile_objects_in_the_callers_search_path_are_not_used(
    loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha")
    owner.execute("CREATE SCHEMA evil; GRANT ALL ON SCHEMA evil TO PUBLIC")
    for function in ("current_schemas(boolean) RETURNS name[]", "jsonb_build_object(text, jsonb) RETURNS jsonb"):
        owner.execute(f"CREATE FUNCTION evil.{function} LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$")
    owner.execute("CREATE DOMAIN evil.text AS pg_catalog.text CHECK (false)")
    owner.execute("CREATE DOMAIN evil.jsonb AS pg_catalog.jsonb CHECK (false)")
    owner.execute("CREATE DOMAIN evil.oid AS pg_catalog.oid CHECK (false)")
    loader.execute("SET search_path = evil, pg_catalog, public")
    loader.execute("CALL public.vector_store_load(%s::pg_catalog.text)", (f"{folder}/",))
    assert len(rows(loader, "TABLE evil.docs")) == 1


def test_a_name_with_a_dot_needs_its_schema_said(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="alpha")
    with error("22023", "public.docs", "schema_name"):
        load(loader, f"{folder}/", {"table_name": "public.docs"})
    load(loader, f"{folder}/", {"schema_name": "public", "table_name": "v1.0"})
    assert counts(load(loader, f"{folder}/", {"table_name": "v1.0"})) == {"unchanged": 1}
