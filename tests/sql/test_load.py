"""store/load: server files to vector stores. The model server is one of the test's own."""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from support.cluster import Cluster, Connection, Database, noticed
from support.documents_server import DocumentsServer
from support.loading import connect_as_loader, counts, load, loader_role, rows, segments, write
from support.processes import Background, wait_until
from support.stores import error, fake_embedding


def test_a_folder_becomes_a_vector_store(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="alpha one\n\nalpha two", b="beta")
    (folder / "sub").mkdir()
    write(folder / "sub", c="gamma")
    result = load(loader, f"file://{folder}/", {"description": "what we know"})
    assert counts(result) == {"loaded": 3}
    assert result["vector_store"] == "public.docs"
    assert (result["segments"], result["failed"]) == (4, [])
    assert segments(loader) == {"a.txt": ["alpha one", "alpha two"], "b.txt": ["beta"], "c.txt": ["gamma"]}
    names = rows(loader, "SELECT DISTINCT document_name, document_id FROM docs ORDER BY document_id")
    assert names == [(f"{folder}/a.txt", 1), (f"{folder}/b.txt", 2), (f"{folder}/sub/c.txt", 3)]
    assert rows(loader, "SELECT segment_number FROM docs WHERE document_id = 1 ORDER BY 1") == [(1,), (2,)]
    (metadata, vector) = rows(
        loader, "SELECT metadata, segment_embedding::real[] FROM docs WHERE segment = 'alpha two'"
    )[0]
    assert (metadata["page"], metadata["format"]) == (2, "text")
    assert vector == pytest.approx(fake_embedding("alpha two"), abs=1e-7)
    assert rows(loader, "SELECT obj_description('docs'::regclass)") == [("what we know",)]
    assert rows(loader, "SELECT vector_store, dimensions FROM ml_rag.discover()") == [("public.docs", 16)]
    found = rows(loader, "SELECT segment FROM ml_rag_search('beta', '{\"n_citations\": 1}')")
    assert found == [("beta",)]


def test_a_folder_that_cannot_be_read_is_reported_and_does_not_stop_the_others(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    """A path of 60 kB, of which the kernel takes 4."""
    write(folder, a="alpha")
    descriptor = os.open(folder, os.O_DIRECTORY)
    for _ in range(250):
        os.mkdir("x" * 240, dir_fd=descriptor)
        child = os.open("x" * 240, os.O_DIRECTORY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = child
    with open("deep.txt", "w", opener=lambda name, flags: os.open(name, flags, dir_fd=descriptor)) as file:
        file.write("beta")
    os.close(descriptor)
    messages = noticed(loader)
    result = load(loader, f"{folder}/")
    assert counts(result) == {"loaded": 1, "failed": 1}
    (failed,) = result["failed"]
    assert failed.pop("document_name").startswith(f"{folder}/xxx")
    assert failed == {"error": "the folder cannot be read", "detail": "File name too long."}
    assert len(messages) == 1


def test_a_trigger_of_the_store_may_ask_a_model(
    owner: Connection, loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    """While the reply to the load is still being read."""
    loader.execute("SELECT ml_rag.create_store('public.docs', '{\"embed_model_id\": \"fake-embed\"}')")
    loader.execute(
        "CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM public.ml_embed_row(NEW.segment, NULL); RETURN NEW; END $$;"
        "CREATE TRIGGER note BEFORE INSERT ON docs FOR EACH ROW EXECUTE FUNCTION public.note()"
    )
    write(folder, a="alpha one\n\nalpha two", b="beta", c="gamma")
    assert counts(load(loader, f"{folder}/")) == {"loaded": 3}


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1"])
def test_names_whatever_the_locale_and_the_encoding_of_the_database(
    cluster: Cluster, model_server: str, folder: Path, encoding: str
) -> None:
    """One that cannot be stored fails alone. In locale C Python takes names of files for ASCII."""
    name = f"{cluster.prefix}_{encoding}"
    cluster.execute(f"CREATE DATABASE {{}} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'", name)
    database = Database(cluster.dsn, name, cluster.prefix)
    try:
        owner = database.connect()
        owner.execute("SET client_encoding = 'UTF8'; CREATE EXTENSION ml_rag CASCADE")
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (model_server,))
        owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed')")
        (folder / "ü").mkdir()
        write(folder / "ü", a="alpha", é="beta", 你好="gamma", c="你好")
        with zipfile.ZipFile(folder / "ü" / "ö.zip", "w") as archive:
            archive.writestr("ä.txt", "delta")
        (folder / "ü" / "link.txt").symlink_to("é.txt")
        messages = noticed(owner)
        options = {"schema_name": "public", "table_name": "docs"}
        result = load(owner, f"{folder}/ü/*", options)
        kept = {"a.txt", "é.txt", "ä.txt"}
        if encoding == "UTF8":
            assert counts(result) == {"loaded": 5}
            kept |= {"你好.txt", "c.txt"}
        else:
            assert counts(result) == {"loaded": 3, "failed": 2}
            assert {one["document_name"]: one["error"] for one in result["failed"]} == {
                f"{folder}/?/??.txt": "the file name is not valid text",
                f"{folder}/ü/c.txt": "the document cannot be stored",
            }
            assert len(messages) == 2
        assert set(segments(owner)) == kept
        (folder / "ü" / "é.txt").unlink()
        assert counts(load(owner, f"{folder}/ü/*", options))["removed"] == 1
        assert set(segments(owner)) == kept - {"é.txt"}
    finally:
        database.close()
        cluster.execute("DROP DATABASE {} WITH (FORCE)", name)


def test_a_document_of_too_many_segments_fails_alone(loader: Connection, folder: Path) -> None:
    """Nine bytes of it are a segment. The model server is the shipped one."""
    write(folder, a="alpha", c="gamma")
    (folder / "b.md").write_text("".join(f"# {i:x}\nb\n" for i in range(100_001)))
    result = load(loader, f"{folder}/")
    assert counts(result) == {"loaded": 2, "failed": 1}
    (failed,) = result["failed"]
    assert failed["document_name"] == f"{folder}/b.md"
    assert failed["error"] == "the document has too many segments"
    assert failed["detail"] == "it may have 100000 with this embedding model"
    assert segments(loader) == {"a.txt": ["alpha"], "c.txt": ["gamma"]}


def test_columns_key_index_and_statistics_are_those_of_the_contract(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha")
    load(loader, f"{folder}/")
    columns = rows(
        loader,
        "SELECT attname::text, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute"
        " WHERE attrelid = 'docs'::regclass AND attnum > 0 ORDER BY attnum",
    )
    assert columns == [
        ("document_name", "text", True),
        ("metadata", "jsonb", True),
        ("document_id", "bigint", True),
        ("segment_number", "integer", True),
        ("segment", "text", True),
        ("segment_embedding", "vector(16)", True),
    ]
    indexes = " ".join(row[0] for row in rows(loader, "SELECT indexdef FROM pg_indexes WHERE tablename = 'docs'"))
    assert "btree (document_id, segment_number)" in indexes
    assert "hnsw (segment_embedding vector_cosine_ops)" in indexes
    assert rows(loader, "SELECT reltuples FROM pg_class WHERE oid = 'docs'::regclass") == [(1.0,)]


@pytest.mark.parametrize(
    ("metric", "operators"), [("DOT", "vector_ip_ops"), ("euclidean", "vector_l2_ops"), (None, "vector_cosine_ops")]
)
def test_the_index_is_built_for_the_metric(
    loader: Connection, server: DocumentsServer, folder: Path, metric: str | None, operators: str
) -> None:
    write(folder, a="alpha")
    load(loader, f"{folder}/", {"distance_metric": metric})
    write(folder, b="beta")
    load(loader, f"{folder}/")  # names no metric: the index that is there will do
    indexes = rows(loader, "SELECT indexdef FROM pg_indexes WHERE tablename = 'docs' AND indexdef LIKE '%hnsw%'")
    assert len(indexes) == 1
    assert operators in indexes[0][0]


def test_unchanged_files_cost_no_parsing_and_no_embedding(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha", b="beta")
    load(loader, f"{folder}/")
    before = (rows(loader), len(server.documents), server.segments)
    result = load(loader, f"{folder}/")
    assert counts(result) == {"unchanged": 2}
    assert result["segments"] == 0
    assert (rows(loader), len(server.documents), server.segments) == before


def test_refresh_embeds_what_changed_adds_what_is_new_and_removes_what_is_gone(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha", b="beta\n\nbeta two", c="gamma")
    load(loader, f"{folder}/")
    write(folder, b="beta new", d="delta")
    (folder / "c.txt").unlink()
    server.documents.clear()
    result = load(loader, f"{folder}/")
    assert counts(result) == {"changed": 1, "loaded": 1, "unchanged": 1, "removed": 1}
    assert sorted(map(os.path.basename, server.documents)) == ["b.txt", "d.txt"]
    assert segments(loader) == {"a.txt": ["alpha"], "b.txt": ["beta new"], "d.txt": ["delta"]}
    ids = dict(rows(loader, "SELECT right(document_name, 5), document_id FROM docs"))
    assert (ids["a.txt"], ids["b.txt"]) == (1, 2)


def test_archives_are_loaded_as_folders_and_kept_in_step(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    def pack(**texts: str) -> None:
        with zipfile.ZipFile(folder / "a.zip", "w") as archive:
            for name, text in texts.items():
                archive.writestr(f"sub/{name}.txt", text)

    pack(a="alpha", b="beta", c="gamma")
    write(folder, d="delta")
    (folder / "broken.tar.gz").write_bytes(b"\x1f\x8b\x08 no more")
    result = load(loader, f"{folder}/")
    assert counts(result) == {"loaded": 4, "failed": 1}
    assert result["failed"][0]["document_name"] == f"{folder}/broken.tar.gz"
    names = rows(loader, "SELECT DISTINCT document_name FROM docs ORDER BY 1")
    assert names == [(f"{folder}/a.zip/sub/{name}.txt",) for name in "abc"] + [(f"{folder}/d.txt",)]
    pack(a="alpha", b="beta new")
    (folder / "broken.tar.gz").unlink()
    assert counts(load(loader, f"{folder}/")) == {"unchanged": 2, "changed": 1, "removed": 1}
    (folder / "a.zip").write_bytes(b"PK\x03\x04 no more")  # which proves nothing about what it holds
    assert counts(load(loader, f"{folder}/")) == {"unchanged": 1, "failed": 1}
    assert segments(loader) == {"a.txt": ["alpha"], "b.txt": ["beta new"], "d.txt": ["delta"]}


def test_a_file_of_an_archive_that_does_not_open_fails_alone(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("one.txt", "alpha")
        archive.writestr("two.txt", "beta")
    content = (folder / "a.zip").read_bytes()
    (folder / "a.zip").write_bytes(content.replace(b"one.txt", b"who.txt", 1))  # in its header, not in the directory
    write(folder, d="delta")
    result = load(loader, f"{folder}/")
    assert counts(result) == {"loaded": 2, "failed": 1}
    assert result["failed"][0]["document_name"] == f"{folder}/a.zip/one.txt"
    assert segments(loader) == {"two.txt": ["beta"], "d.txt": ["delta"]}


def test_without_refresh_only_new_files_are_added(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="alpha", b="beta")
    load(loader, f"{folder}/")
    write(folder, a="changed", c="gamma")
    (folder / "b.txt").unlink()
    assert counts(load(loader, f"{folder}/", {"refresh": False})) == {"unchanged": 1, "loaded": 1}
    assert segments(loader) == {"a.txt": ["alpha"], "b.txt": ["beta"], "c.txt": ["gamma"]}


def test_other_options_count_as_a_change(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="alpha")
    load(loader, f"{folder}/")
    options = {"chunking": {"segment_tokens": 64}}
    assert counts(load(loader, f"{folder}/", options)) == {"changed": 1}
    assert counts(load(loader, f"{folder}/", options)) == {"unchanged": 1}
    assert server.options[-1]["chunking"]["segment_tokens"] == 64


def test_a_context_counts_as_a_change_and_none_is_what_was_before(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha")
    load(loader, f"{folder}/")
    assert counts(load(loader, f"{folder}/", {"chunking": {"context": "none"}})) == {"unchanged": 1}
    assert counts(load(loader, f"{folder}/", {"chunking": {"context": "Headings"}})) == {"changed": 1}
    assert server.options[-1]["chunking"]["context"] == "headings"
    assert counts(load(loader, f"{folder}/", {"chunking": {"context": "headings"}})) == {"unchanged": 1}
    assert counts(load(loader, f"{folder}/")) == {"changed": 1}
    assert "context" not in server.options[-1]["chunking"]


def test_documents_from_elsewhere_are_never_removed(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    other = folder.parent / "docs2"
    other.mkdir()
    write(folder, a="alpha", b="beta")
    write(other, c="gamma")
    (folder / "x.md").write_text("not matched by the glob")
    store = {"table_name": "docs"}
    load(loader, f"{folder}/", store)
    load(loader, f"{other}/", store)
    loader.execute(
        "INSERT INTO docs SELECT %s, '{}', 99, 1, 'by hand', segment_embedding FROM docs LIMIT 1",
        (f"{folder}/by-hand.txt",),
    )
    for path in (folder / "b.txt", folder / "x.md", other / "c.txt"):
        path.unlink()
    result = load(loader, f"{folder}/*.txt", store)
    assert counts(result) == {"unchanged": 1, "removed": 1}
    assert set(segments(loader)) == {"a.txt", "x.md", "c.txt", "by-hand.txt"}


def test_a_document_that_fails_is_reported_and_does_not_stop_the_others(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha", b="!fail", c="gamma", d="!empty", e="epsilon")
    (folder / "f.txt").write_text("secret")
    (folder / "f.txt").chmod(0)
    notices: list[str | None] = []
    hints: list[str | None] = []
    loader.add_notice_handler(lambda notice: notices.append(notice.severity))
    loader.add_notice_handler(lambda notice: hints.append(notice.message_hint))
    result = load(loader, f"{folder}/")
    assert counts(result) == {"loaded": 3, "failed": 3}
    assert all(hints)
    failed = {os.path.basename(failure.pop("document_name")): failure for failure in result["failed"]}
    assert failed["b.txt"] == {"error": "no good", "detail": "it said so"}
    assert failed["d.txt"] == {"error": "the document has no text"}
    assert (failed["f.txt"]["error"], failed["f.txt"]["detail"]) == ("the file cannot be read", "Permission denied.")
    assert "the right to read it" in failed["f.txt"]["hint"]
    assert set(segments(loader)) == {"a.txt", "c.txt", "e.txt"}
    assert notices == ["WARNING"] * 3


def test_failed_documents_are_grouped_by_reason(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    (folder / "sub").mkdir()
    write(folder, a="alpha", b="!fail", c="!fail", d="!empty")
    write(folder / "sub", e="!fail")
    notices = noticed(loader)
    same = {"error": "no good", "detail": "it said so", "example": f"{folder}/b.txt"}
    empty = {"error": "the document has no text", "documents": 1, "example": f"{folder}/d.txt"}
    assert load(loader, f"{folder}/")["reasons"] == [{**same, "documents": 3}, empty]
    assert notices == [
        f"3 documents failed, such as {folder}/b.txt: no good",
        f"{folder}/d.txt: the document has no text",
    ]
    result = load(loader, json.dumps([f"{folder}/*.txt", f"{folder}/sub/"]))
    assert result["reasons"] == [{**same, "documents": 3}, empty]
    (folder / "b.txt").unlink()
    (folder / "c.txt").unlink()
    (folder / "d.txt").unlink()
    (folder / "sub/e.txt").unlink()
    assert load(loader, f"{folder}/")["reasons"] == []


def test_a_changed_document_that_fails_keeps_its_segments(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha\n\nmore", b="beta")
    load(loader, f"{folder}/")
    write(folder, a="!fail")
    result = load(loader, f"{folder}/")
    assert counts(result) == {"unchanged": 1, "failed": 1}
    assert result["failed"][0]["kept"] == "the segments of its former version"
    assert segments(loader)["a.txt"] == ["alpha", "more"]


def test_a_document_the_table_refuses_fails_alone(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="alpha")
    load(loader, f"{folder}/")
    loader.execute("ALTER TABLE docs ADD CHECK (segment <> 'forbidden')")
    write(folder, b="allowed\n\nforbidden", c="gamma")
    result = load(loader, f"{folder}/")
    assert counts(result) == {"unchanged": 1, "loaded": 1, "failed": 1}
    assert "23514" in result["failed"][0]["detail"]
    assert set(segments(loader)) == {"a.txt", "c.txt"}


@pytest.mark.parametrize("order", ["!nan", "!short"])
def test_nonsense_from_the_model_server_ends_the_load_with_38000(
    loader: Connection, server: DocumentsServer, folder: Path, order: str
) -> None:
    write(folder, a="alpha", b=f"{order}\n\nbeta")
    with error("38000"):
        load(loader, f"{folder}/")
    assert rows(loader, "SELECT to_regclass('docs')") == [(None,)]


def test_other_dimensions_than_the_store_has_are_22000(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="!wide\n\nalpha")
    with error("22000", "do not fit the vector store"):
        load(loader, f"{folder}/")


def test_a_queue_that_is_full_ends_the_load(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="!queue")
    with error("53300", "no good"):
        load(loader, f"{folder}/")


@pytest.mark.parametrize(
    "options",
    [
        {"unknown": 1},
        {"schema_name": "nowhere"},
        {"table_name": "x" * 64},
        {"table_name": "public.docs"},
        {"chunking": {"segment_tokens": 15}},
        {"chunking": {"segment_tokens": 100, "overlap_tokens": 51}},
        {"chunking": {"split_by": "word"}},
    ],
)
def test_bad_options_are_22023(
    loader: Connection, server: DocumentsServer, folder: Path, options: dict[str, Any]
) -> None:
    write(folder, a="alpha")
    with error("22023"):
        load(loader, f"{folder}/", options)
    assert server.documents == []


def test_a_table_that_is_no_store_is_refused(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="alpha")
    loader.execute("CREATE TABLE docs (document_name text, segment_embedding real[])")
    with error("22023", "is not a vector store", 'In "table_name", name a table that does not exist yet'):
        load(loader, f"{folder}/")
    loader.execute("DROP TABLE docs; CREATE TABLE docs (id integer PRIMARY KEY, body text)")
    loader.execute("""SELECT ml_rag.create_vectorizer('docs', '{"columns": "body"}')""")
    with error("22023", "is not a vector store", "INSERT rows and CALL ml_rag.run_vectorizer('public.docs')"):
        load(loader, f"{folder}/")
    loader.execute("DROP TABLE docs; CREATE VIEW docs AS SELECT 1")
    with error("22023", "is not a table"):
        load(loader, f"{folder}/")


def test_another_model_than_the_stores_own_is_refused(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha")
    load(loader, f"{folder}/")
    with error("22023", "of another model"):
        load(loader, f"{folder}/", {"embed_model_id": "fake-other"})
    loader.execute("COMMENT ON COLUMN docs.segment_embedding IS NULL")
    with error("22023", "names its embedding model"):
        load(loader, f"{folder}/")


def test_the_stores_own_model_is_used_where_the_default_has_changed(
    loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha")
    load(loader, f"{folder}/")
    owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-other')")
    write(folder, b="beta")
    load(loader, f"{folder}/")
    assert [options["embed_model_id"] for options in server.options] == ["fake-embed"] * 2


@pytest.mark.parametrize(
    ("type", "last"), [("bigint", str(2**63 - 1)), ("integer", str(2**31 - 1)), ("numeric", "1e30"), ("numeric", "NaN")]
)
def test_a_row_with_the_last_id_keeps_no_document_out(
    loader: Connection, server: DocumentsServer, folder: Path, type: str, last: str
) -> None:
    """Anybody who may write a row can have it."""
    write(folder, a="alpha")
    load(loader, f"{folder}/")
    loader.execute(f"ALTER TABLE docs ALTER document_id TYPE {type}")
    loader.execute("INSERT INTO docs SELECT 'x', '{}', %s, 1, 'x', segment_embedding FROM docs", (last,))
    write(folder, b="beta", c="gamma")
    assert counts(load(loader, f"{folder}/")) == {"unchanged": 1, "loaded": 2}
    ids = [n for (n,) in rows(loader, "SELECT DISTINCT document_id FROM docs WHERE document_name <> 'x' ORDER BY 1")]
    assert len(ids) == 3
    assert ids[0] == 1
    assert ids[-1] < 2**53


@pytest.mark.parametrize("metadata", ['{"n": 1e5000}', '{"n": ' * 3000 + "1" + "}" * 3000])
def test_metadata_that_python_cannot_read_stop_no_load(
    loader: Connection, server: DocumentsServer, folder: Path, metadata: str
) -> None:
    """Anybody who may write a row can have written them, by the name of a document that is to be loaded."""
    write(folder, a="alpha")
    load(loader, f"{folder}/")
    write(folder, b="beta", c="gamma")
    name = str(folder / "b.txt")
    loader.execute("INSERT INTO docs SELECT %s, %s, 77, 1, 'x', segment_embedding FROM docs", (name, metadata))
    assert rows(loader, "SELECT ml_rag.unchanged_documents('docs', %s, '{x}')", [name]) == []
    assert counts(load(loader, f"{folder}/")) == {"unchanged": 1, "changed": 1, "loaded": 1}
    assert set(segments(loader)) == {"a.txt", "b.txt", "c.txt"}


def test_a_store_of_half_vectors_is_filled_too(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="alpha")
    loader.execute(
        "CREATE TABLE docs (document_name text NOT NULL, metadata jsonb NOT NULL, document_id bigint, segment_number"
        " integer, segment text, segment_embedding halfvec(16), PRIMARY KEY (document_id, segment_number))"
    )
    loader.execute("COMMENT ON COLUMN docs.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    load(loader, f"{folder}/")
    indexes = " ".join(row[0] for row in rows(loader, "SELECT indexdef FROM pg_indexes WHERE tablename = 'docs'"))
    assert "halfvec_cosine_ops" in indexes


def test_privileges(db: Database, owner: Connection, loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, a="alpha")
    for role in ("asker", "stranger"):
        with error("42501"):
            load(db.connect(role), f"{folder}/")
    asker = db.connect("asker")
    for call in (
        "SELECT ml_rag._python('find_files', '[\"/etc/passwd\"]')",
        "CALL ml_rag._load_files('{}')",
        "SELECT ml_rag.create_store('public.x')",
        "SELECT ml_rag.load_document('pg_class', 'a', 'x')",
        "SELECT ml_rag.index_store('pg_class')",
    ):
        with error("42501"):
            asker.execute(call)
    role = sql.Identifier(loader_role(db))
    owner.execute(sql.SQL("REVOKE pg_read_server_files FROM {}").format(role))
    with error("42501", "files of the server"):
        load(loader, f"{folder}/")
    with error("42501", "files of the server"):
        loader.execute("SELECT ml_rag._python('find_files', '[\"/etc/passwd\"]')")
    job = json.dumps({"store": 0, "files": [b"/etc/passwd".hex()], "base": "/etc", "patterns": []})
    row = loader.execute("CALL ml_rag._load_files(%s)", (job,)).fetchone()
    assert row is not None
    assert row[1]["sqlstate"] == "42501"
    assert server.documents == []
    # what needs no files still works
    loader.execute("SELECT ml_rag.create_store('public.mine')")
    loader.execute("SELECT ml_rag.load_document('public.mine', 'a', 'alpha')")
    assert segments(loader, "mine") == {"a": ["alpha"]}


def test_a_store_one_may_not_write_to_is_42501(
    owner: Connection, loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha")
    load(owner, f"{folder}/")
    with error("42501"):
        load(loader, f"{folder}/")
    owner.execute("GRANT SELECT, INSERT, DELETE ON docs TO ml_rag_loader")
    write(folder, b="beta")
    assert counts(load(loader, f"{folder}/")) == {"unchanged": 1, "loaded": 1}


def test_the_model_server_down_makes_nothing(owner: Connection, loader: Connection, folder: Path) -> None:
    write(folder, a="alpha")
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/nowhere.sock')")
    with error("08006", "cannot be reached"):
        load(loader, f"{folder}/")
    assert rows(loader, "SELECT to_regclass('docs')") == [(None,)]


def test_several_uris_go_into_one_store(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
    write(folder / "one", a="alpha")
    write(folder / "two", b="beta", c="gamma !unreadable")
    write(folder, d="delta")
    uris = json.dumps([f"file://{folder}/one/", f"{folder}/two/", f"{folder}/d.txt"])
    result = load(loader, uris, {"schema_name": "public"})
    assert result["vector_store"] == "public.one"
    assert (result["documents"]["loaded"], result["documents"]["failed"]) == (4, 0)
    assert result["segments"] == 4
    assert rows(loader, "SELECT document_name FROM one ORDER BY 1") == [
        (f"{folder}/{name}",) for name in ("d.txt", "one/a.txt", "two/b.txt", "two/c.txt")
    ]
    # what is gone below one of them is removed, and nothing else is
    (folder / "two" / "b.txt").unlink()
    assert counts(load(loader, uris)) == {"unchanged": 3, "removed": 1}
    (again,) = rows(loader, "SELECT count(*) FROM one")
    assert again == (3,)


@pytest.mark.parametrize("uris", ["[", "[]", "[1]", '["/a", null]', json.dumps(["/a"] * 101), '{"a": 1}['])
def test_what_is_no_array_of_uris_is_22023(
    loader: Connection, server: DocumentsServer, folder: Path, uris: str
) -> None:
    with error("22023"):
        load(loader, uris)


def test_of_several_uris_a_wrong_one_is_noticed_first(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha")
    with error("22023", "nowhere"):
        load(loader, json.dumps([f"{folder}/", f"{folder}/nowhere.txt"]))
    assert rows(loader, "SELECT to_regclass('public.docs')") == [(None,)]


def test_an_embedding_that_is_made_anew_meanwhile_has_vectors_of_its_model(
    db: Database, owner: Connection, loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    def vectors(texts: list[str], model: str) -> list[list[float]]:
        found = [fake_embedding(text) for text in texts]
        return [vector[::-1] for vector in found] if model == "other" else found

    document, other, changing = server._document, connect_as_loader(db), []

    def change() -> None:
        wait_until(lambda: rows(other, "SELECT FROM pg_class WHERE relname = 'docs'") != [])
        other.execute("ALTER TABLE docs DROP segment_embedding, ADD segment_embedding vector(16)")
        other.execute("COMMENT ON COLUMN docs.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=other'")

    def answer(index: int, *given: Any) -> dict[str, Any]:
        if index == 17:
            # after a commit
            changing.append(Background(change))
        time.sleep(0.02)
        return document(index, *given)

    server.vectors = vectors  # type: ignore[method-assign]
    server._document = answer  # type: ignore[method-assign]
    write(folder, **{f"d{i}": f"text {i}" for i in range(60)})
    assert counts(load(loader, f"{folder}/", {"table_name": "docs", "embed_model_id": "fake-embed"})) == {"loaded": 60}
    found = dict(rows(owner, "SELECT segment, segment_embedding::real[] FROM docs WHERE segment_embedding IS NOT NULL"))
    changing[0].result()
    assert 0 < len(found) < 60
    for segment, vector in found.items():
        assert vector == pytest.approx(fake_embedding(segment)[::-1])
