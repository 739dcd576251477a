"""store/store: loading from the client's side: create_store, load_documents, and the command ml-rag load."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql

from ml_rag.cli import main
from support.cluster import Connection, Database, noticed
from support.documents_server import DocumentsServer
from support.loading import counts, loader_role, rows, segments, write
from support.processes import wait_until
from support.stores import error, fake_embedding


@pytest.fixture
def store(db: Database, owner: Connection, loader: Connection, server: DocumentsServer) -> Connection:
    """A loader without any privilege on files, and its empty store public.docs."""
    role = sql.Identifier(loader_role(db))
    owner.execute(sql.SQL("REVOKE pg_read_server_files FROM {}").format(role))
    loader.execute("SELECT ml_rag.create_store('public.docs', '{\"description\": \"notes\"}')")
    return loader


def send(connection: Connection, documents: dict[str, str | bytes], options: Any = None) -> dict[str, Any]:
    contents = [text.encode() if isinstance(text, str) else text for text in documents.values()]
    query = "SELECT ml_rag.load_documents('docs', %s, %b, %s)"
    return dict(rows(connection, query, list(documents), contents, options and json.dumps(options))[0][0])


def test_documents_that_the_client_sends_are_loaded(store: Connection, server: DocumentsServer) -> None:
    result = send(store, {"a": "alpha\n\nmore", "b": "!fail", "c": "gamma"})
    assert counts(result) == {"loaded": 2, "failed": 1}
    assert segments(store) == {"a": ["alpha", "more"], "c": ["gamma"]}
    vector = rows(store, "SELECT segment_embedding::real[] FROM docs WHERE segment = 'gamma'")[0][0]
    assert vector == pytest.approx(fake_embedding("gamma"), abs=1e-7)
    assert rows(store, "SELECT obj_description('docs'::regclass)") == [("notes",)]
    store.execute("SELECT ml_rag.load_document('docs', 'd', 'delta')")
    assert segments(store)["d"] == ["delta"]


def test_what_is_sent_has_the_dates_that_are_sent_with_it(store: Connection) -> None:
    dates = [{"last_modified_date": "2026-11-22T09:30:00+01:00", "creation_date": "2026-11-01"}, {}]
    send(store, {"folder/a.txt": "alpha", "b": "beta"}, {"file_dates": dates})
    keys = "ARRAY['source', 'format', 'page']"
    assert rows(store, f"SELECT metadata - {keys} FROM docs ORDER BY document_id") == [
        ({"file_name": "a.txt", "file_size": 5, **dates[0]},),
        ({"file_name": "b", "file_size": 4},),
    ]
    assert counts(send(store, {"b": "beta"}, {"file_dates": [{"creation_date": "2026-11-01"}]})) == {"unchanged": 1}


@pytest.mark.parametrize(
    ("dates", "option"),
    [
        ([], "file_dates"),
        ([{}, {}], "file_dates"),
        (["2026"], "file_dates"),
        ([{"creation_date": "yesterday"}], "creation_date"),
        ([{"creation_date": "2026-02-30"}], "creation_date"),
        ([{"creation_date": "2026-02-28 10:00"}], "creation_date"),
        ([{"last_accessed_date": 7}], "last_accessed_date"),
        ([{"modified": "2026-02-28"}], "modified"),
    ],
)
def test_dates_are_iso_8601_and_as_many_as_names(store: Connection, dates: Any, option: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        send(store, {"a": "alpha"}, {"file_dates": dates})
    assert f'option "{option}"' in str(caught.value.diag.message_primary)
    assert segments(store) == {}


def test_sent_again_only_what_changed_is_embedded(store: Connection, server: DocumentsServer) -> None:
    send(store, {"a": "alpha", "b": "beta"})
    assert counts(send(store, {"a": "alpha", "b": "beta"})) == {"unchanged": 2}
    assert counts(send(store, {"a": "alpha", "b": "new"})) == {"unchanged": 1, "changed": 1}
    assert counts(send(store, {"a": "newer", "c": "gamma"}, {"refresh": False})) == {"unchanged": 1, "loaded": 1}
    assert server.documents == ["a", "b", "b", "c"]
    assert rows(store, "SELECT document_name, document_id FROM docs ORDER BY 2") == [("a", 1), ("b", 2), ("c", 3)]


def test_a_document_that_fails_in_mid_call_leaves_no_half_of_it(store: Connection) -> None:
    store.execute("ALTER TABLE docs ADD CHECK (segment <> 'bad')")
    assert counts(send(store, {"a": "good\n\nbad", "b": "fine"})) == {"loaded": 1, "failed": 1}
    assert segments(store) == {"b": ["fine"]}


def test_text_that_postgresql_cannot_hold_is_cleaned(store: Connection) -> None:
    assert counts(send(store, {"a": "nul \0 within"})) == {"loaded": 1}
    assert segments(store)["a"] == ["nul  within"]


@pytest.mark.parametrize(
    ("names", "contents"),
    [
        (["a"], []),
        (["a", "b"], [b"x"]),
        (["a", "a"], [b"x", b"y"]),
        (["a", None], [b"x", b"y"]),
        (["a"], [None]),
        ([""], [b"x"]),
        (None, [b"x"]),
        (["a"], None),
    ],
)
def test_names_and_contents_that_do_not_fit_together_are_22023(store: Connection, names: Any, contents: Any) -> None:
    with error("22023", "do not match"):
        store.execute("SELECT ml_rag.load_documents('docs', %s::text[], %s::bytea[])", (names, contents))


def test_no_documents_are_no_error(store: Connection, server: DocumentsServer) -> None:
    assert counts(send(store, {})) == {}
    assert server.batches == []


def test_bad_options_are_22023(store: Connection) -> None:
    for options in ({"schema_name": "public"}, {"refresh": 1}, {"chunking": {"overlap": 1}}):
        with error("22023"):
            send(store, {"a": "alpha"}, options)
    for name in ("docs", "a.b.c", "", "nowhere.docs", None):
        with error("22023"):
            store.execute("SELECT ml_rag.create_store(%s)", (name,))
    with error("22023", "of another model"):
        store.execute("SELECT ml_rag.create_store('public.docs', '{\"embed_model_id\": \"fake-other\"}')")
    with error("22023", "not a vector store"):
        store.execute("SELECT ml_rag.load_document('ml_rag.setting_value', 'a', 'alpha')")


def test_documents_are_removed_by_name_but_not_rows_of_other_origin(store: Connection) -> None:
    send(store, {"d/a": "alpha\n\nmore", "d/b": "beta", "e/c": "gamma"})
    # as LangChain writes them, the name of a document is also its source
    for n, metadata in enumerate(("{}", '{"source": "d/x"}', '{"source": {"url": "d/x"}}')):
        query = "INSERT INTO docs SELECT 'd/x', %s, 9, %s, 'x', segment_embedding FROM docs LIMIT 1"
        store.execute(query, (metadata, n))
    assert sorted(row[0] for row in rows(store, "SELECT ml_rag.documents_below('docs', 'd/')")) == ["d/a", "d/b", "d/x"]
    assert rows(store, "SELECT ml_rag.remove_documents('docs', '{d/a,d/x,nothing}')") == [(1,)]
    assert {name: len(found) for name, found in segments(store).items()} == {"b": 1, "c": 1, "x": 3}


@pytest.mark.parametrize("store", ["NULL", "0", "4294967295"])
def test_index_store_needs_a_store(owner: Connection, store: str) -> None:
    # ANALYZE without a name would be that of the whole database
    with error("42P01"):
        owner.execute(f"SELECT ml_rag.index_store({store}::oid::regclass)")


@pytest.mark.parametrize("index", ["hnsw", "", "{", "[" * 10000, '{"type": "hnsw"', "\\u0000"])
def test_index_store_with_a_bare_word(store: Connection, index: str) -> None:
    with error("22023", '"index"') as caught:
        store.execute(f"SELECT ml_rag.index_store('docs', 'COSINE', '{index}')")
    assert "allowed: a JSON object" in caught.detail
    assert '{"type": "hnsw"}' in caught.hint


def test_index_store_takes_json_of_either_type(store: Connection) -> None:
    for index in ('\'{"type": "hnsw"}\'', '\'{"type": "hnsw"}\'::text', '\'{"type": "hnsw"}\'::jsonb', "NULL"):
        store.execute(f"SELECT ml_rag.index_store('docs', 'COSINE', {index})")
    indexes = "SELECT count(*) FROM pg_indexes WHERE tablename = 'docs' AND indexdef LIKE '%USING hnsw%'"
    assert store.execute(indexes).fetchone() == (1,)
    for index, said in (("'\"hnsw\"'", '"hnsw"'), ('\'{"type": "flat"}\'', "hnsw, ivfflat, none")):
        with error("22023", said):
            store.execute(f"SELECT ml_rag.index_store('docs', 'COSINE', {index})")


def test_index_store_builds_one_index_a_metric(store: Connection) -> None:
    send(store, {"a": "alpha"})
    for metric in (None, None, "COSINE", "dot", "DOT"):
        store.execute("SELECT ml_rag.index_store('docs', %s)", (metric,))
    indexes = " ".join(row[0] for row in rows(store, "SELECT indexdef FROM pg_indexes WHERE tablename = 'docs'"))
    assert (indexes.count("vector_cosine_ops"), indexes.count("vector_ip_ops"), indexes.count("hnsw")) == (1, 1, 2)
    with error("22023"):
        store.execute("SELECT ml_rag.index_store('docs', 'CHEBYSHEV')")


def test_a_column_too_wide_for_an_index_gets_none_and_says_so(store: Connection) -> None:
    store.execute("ALTER TABLE docs ALTER segment_embedding TYPE vector(2001)")
    notices = noticed(store)
    store.execute("SELECT ml_rag.index_store('docs')")
    assert notices == ['"public.docs" gets no index']


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["load", *arguments])


def run(db: Database, role: str, *arguments: str) -> Result:
    """``ml-rag load`` as that role."""
    return command(*arguments, "--dsn", f"{db.dsn} dbname={db.name} options='-c role={role}'")


def test_the_command_loads_files_and_folders(
    db: Database, store: Connection, server: DocumentsServer, folder: Path
) -> None:
    (folder / "sub").mkdir()
    write(folder, a="alpha", b="beta")
    write(folder / "sub", c="gamma")
    role = loader_role(db)
    result = run(db, role, str(folder), "--store", "new", "--segment-tokens", "64", "--split-by", "paragraph")
    assert result.exit_code == 0, result.output
    assert "3 loaded" in result.output
    assert segments(store, "new") == {"a.txt": ["alpha"], "b.txt": ["beta"], "c.txt": ["gamma"]}
    assert server.options[0]["chunking"] == {"split_by": "paragraph", "segment_tokens": 64, "overlap_tokens": 0}
    indexes = rows(store, "SELECT FROM pg_indexes WHERE tablename = 'new' AND indexdef LIKE '%hnsw%'")
    assert len(indexes) == 1


def test_a_terminal_obeys_no_name_of_a_file(
    db: Database, store: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha")
    name = "\x1b]0;title\x07\x9b2J\n.txt"
    (folder / name).symlink_to(name)
    (folder / os.fsdecode(b"\xff\x1b.txt")).write_text("no UTF-8")
    result = run(db, loader_role(db), str(folder), "--store", "new")
    assert result.exit_code == 1
    assert "\\x1b]0;title\\x07\\x9b2J\\n.txt: the file cannot be read" in result.output
    assert "\\udcff\\x1b.txt: the file name is not valid text" in result.output
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\udc80-\udcff]", result.output)
    result = run(db, loader_role(db), str(folder), "--store", "a\x1b.b\x9b")
    assert result.exit_code == 1
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", result.output)


@pytest.mark.parametrize(
    ("index", "method"),
    [
        ("none", None),
        ("ivfflat", "ivfflat"),
        ('{"type": "hnsw", "m": 5}', "m='5'"),
        ('{"quantization": "halfvec"}', "halfvec"),
    ],
)
def test_the_command_takes_the_options_of_the_call(
    db: Database, store: Connection, server: DocumentsServer, folder: Path, index: str, method: str | None
) -> None:
    write(folder, a="alpha")
    result = run(db, loader_role(db), str(folder), "--store", "new", "--context", "headings", "--index", index)
    assert result.exit_code == 0, result.output
    assert server.options[0]["chunking"]["context"] == "headings"
    made = rows(
        store, "SELECT indexdef FROM pg_indexes WHERE tablename = 'new' AND indexdef LIKE '%segment_embedding%'"
    )
    assert [method in definition for (definition,) in made] == ([True] if method else [])


def test_the_command_gives_metadata_and_says_what_is_lost(
    db: Database, store: Connection, server: DocumentsServer, folder: Path, tmp_path: Path
) -> None:
    write(folder, a="alpha one\n\nalpha two", b="beta")
    (tmp_path / "by-name.json").write_text('{"b.txt": {"kind": "B"}, "c.txt": {}}')
    arguments = (str(folder), "--store", "new", "--metadata", '{"year": 2024}')
    result = run(db, loader_role(db), *arguments, "--document-metadata", f"@{tmp_path}/by-name.json")
    assert (result.exit_code, "unmatched: c.txt" in result.output) == (0, True), result.output
    query = "SELECT DISTINCT right(document_name, 5), metadata ->> 'year', metadata ->> 'kind' FROM new ORDER BY 1"
    assert rows(store, query) == [("a.txt", "2024", None), ("b.txt", "2024", "B")]
    assert "2 unchanged" in run(db, loader_role(db), *arguments).output
    store.execute("ALTER TABLE new ADD price int; UPDATE new SET price = segment_number")
    write(folder, a="alpha one\n\nalpha three")
    assert f"lost: {folder}/a.txt: columns price: differed" in run(db, loader_role(db), *arguments).output
    assert rows(store, query) == [("a.txt", "2024", None), ("b.txt", "2024", "B")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metadata", "{"), "is not a JSON object"),
        (("--metadata", "[1]"), "is not a JSON object"),
        (("--document-metadata", "@/nowhere"), "is not a JSON object"),
        (("--document-metadata", '{"a": 1}'), "document_metadata.a"),
        (("--index", "btree"), "type"),
        (("--index", '{"type": '), "is not a JSON object"),
        (("--index", '{"kind": "hnsw"}'), "kind"),
        (("--context", "title"), "context"),
    ],
)
def test_options_of_the_command_that_are_wrong(
    db: Database, store: Connection, server: DocumentsServer, folder: Path, arguments: tuple[str, str], message: str
) -> None:
    write(folder, a="alpha")
    result = run(db, loader_role(db), str(folder), "--store", "new", *arguments)
    assert result.exit_code != 0
    assert message in result.output


def test_the_command_sends_only_what_changed_and_removes_what_is_gone(
    db: Database, store: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha", b="beta", c="gamma")
    arguments = (loader_role(db), str(folder), "--store", "public.docs")
    assert run(db, *arguments).exit_code == 0
    write(folder, a="new", d="delta")
    (folder / "b.txt").unlink()
    server.documents.clear()
    result = run(db, *arguments, "--no-refresh")
    assert "3 unchanged" not in result.output
    assert "1 loaded" in result.output
    assert set(segments(store)) == {"a.txt", "b.txt", "c.txt", "d.txt"}
    result = run(db, *arguments)
    assert "1 changed" in result.output
    assert "1 removed" in result.output
    assert [os.path.basename(name) for name in server.documents] == ["d.txt", "a.txt"]
    assert set(segments(store)) == {"a.txt", "c.txt", "d.txt"}


def test_the_command_loads_by_several_connections(
    db: Database, store: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, **{f"n{n}": f"text {n}" for n in range(40)})  # three calls
    # the first request is not answered before the second has come
    server.before_batch[0] = lambda: wait_until(lambda: len(server.options) == 2, seconds=30)
    result = run(db, loader_role(db), str(folder), "--store", "docs", "--jobs", "2")
    assert result.exit_code == 0, result.output
    assert "40 loaded; 40 segments" in result.output
    assert segments(store) == {f"n{n}.txt": [f"text {n}"] for n in range(40)}
    assert rows(store, "SELECT count(DISTINCT document_id) FROM docs") == [(40,)]


def test_an_error_of_one_connection_ends_the_others(
    db: Database, store: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, **{f"n{n:02}": "!hang" if n == 0 else f"text {n}" for n in range(40)})
    (folder / "n39.txt").write_text("!queue")
    # the first request is not answered before the second has come
    server.before_batch[0] = lambda: wait_until(lambda: len(server.options) == 2, seconds=30)
    result = run(db, loader_role(db), str(folder), "--store", "docs", "--jobs", "2")
    assert result.exit_code == 1
    assert "no good" in result.output
    wait_until(lambda: server.hung_up, seconds=30)


def test_the_command_reports_what_failed_and_exits_with_1(
    db: Database, store: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha", b="!fail")
    result = run(db, loader_role(db), str(folder), "--store", "docs")
    assert result.exit_code == 1
    assert f"failed: {folder}/b.txt: no good; it said so" in result.stderr
    assert set(segments(store)) == {"a.txt"}


def test_the_command_without_recursion_stays_in_the_folder(
    db: Database, store: Connection, server: DocumentsServer, folder: Path
) -> None:
    (folder / "sub").mkdir()
    write(folder, a="alpha")
    write(folder / "sub", c="gamma")
    assert run(db, loader_role(db), str(folder), "--store", "docs", "--no-recursive").exit_code == 0
    assert set(segments(store)) == {"a.txt"}


def test_the_command_says_what_is_wrong_with_the_database(db: Database, loader: Connection, folder: Path) -> None:
    write(folder, a="alpha")
    result = run(db, f"{db.prefix}_asker", str(folder), "--store", "public.docs")
    assert result.exit_code == 1
    assert "permission denied" in result.output
    assert "GRANT ml_rag_loader" in result.output
    result = command(str(folder), "--store", "docs", "--dsn", f"host={folder} dbname=none")
    assert (result.exit_code, "Check --dsn" in result.output) == (1, True)
    result = command(str(folder), "--store", "docs", "--dsn", "postgresql://localhost/none?speed=high")
    assert (result.exit_code, "does not know" in " ".join(result.output.split())) == (2, True)
    result = command(str(folder), "--store", "docs", "--dsn", f"{db.dsn} dbname=template1")
    assert "CREATE EXTENSION ml_rag" in result.output


DROPPED = {
    "check": "SELECT ml_rag._check_store(%s, NULL)",
    "states": "SELECT ml_rag._document_states(%s, '{a}')",
    "key": "SELECT ml_rag._store_key(%s::oid)",
    "replace": "SELECT ml_rag._replace_document(%s, 'a', '{}')",
    "insert": "SELECT ml_rag._insert_segments(%s, 'a', 1, '{}', 1, ARRAY['{}'::jsonb], '{a}', '{e}', '{{[1]}}')",
    "index": "SELECT ml_rag.index_store(%s)",
    "below": "SELECT ml_rag.documents_below(%s, 'a')",
    "remove": "SELECT ml_rag.remove_documents(%s, '{a}')",
    "unchanged": "SELECT ml_rag.unchanged_documents(%s, '{a}', '{b}')",
    "load": "SELECT ml_rag.load_document(%s, 'a', 'b')",
}


@pytest.mark.parametrize("statement", DROPPED.values(), ids=DROPPED.keys())
def test_a_store_that_was_dropped_is_42p01_at_every_step(store: Connection, statement: str) -> None:
    ((oid,),) = rows(store, "SELECT 'docs'::regclass::oid")
    store.execute("DROP TABLE docs")
    with error("42P01", "exist") as caught:
        store.execute(statement, (oid,))
    assert caught.hint


def test_a_name_of_digits_is_a_name(store: Connection) -> None:
    store.execute('ALTER TABLE docs RENAME TO "123"')
    store.execute("SELECT ml_rag.load_document('\"123\"', 'a', 'alpha')")
    assert rows(store, "SELECT ml_rag.documents_below('\"123\"', '')") == [("a",)]


@pytest.fixture
def shared_store(db: Database, owner: Connection, server: DocumentsServer) -> Iterator[Callable[..., list[Connection]]]:
    """Two loaders of one store in which each sees nothing but the rows of its own."""

    def make(id_type: str, more: str = "") -> list[Connection]:
        owner.execute(
            f"CREATE TABLE docs (document_name text, metadata jsonb, document_id {id_type}, segment_number integer,"
            "  segment text, segment_embedding vector(16), tenant text DEFAULT current_user,"
            f"  PRIMARY KEY (document_id, segment_number){more});"
            "COMMENT ON COLUMN docs.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed';"
            "ALTER TABLE docs ENABLE ROW LEVEL SECURITY;"
            "CREATE POLICY own ON docs USING (tenant = current_user);"
            "GRANT SELECT, INSERT, DELETE ON docs TO ml_rag_user"
        )
        return [db.connect("asker"), db.connect("tenant")]

    roles = [sql.Identifier(db.role(name)) for name in ("asker", "tenant")]
    for role in roles:
        owner.execute(sql.SQL("GRANT ml_rag_loader TO {}").format(role))
    yield make
    for role in roles:
        owner.execute(sql.SQL("REVOKE ml_rag_loader FROM {}").format(role))


@pytest.mark.parametrize("id_type", ["bigint", "integer", "numeric"])
def test_loaders_who_do_not_see_each_others_rows_get_ids_of_their_own(
    owner: Connection, shared_store: Callable[..., list[Connection]], id_type: str
) -> None:
    loaders = shared_store(id_type)
    texts = {name: f"{name}\n\nmore" for name in "abcde"}
    for one in loaders:
        # the same ids are drawn for both
        one.execute("SELECT setseed(0.5)")
        assert counts(send(one, texts)) == {"loaded": 5}
        assert counts(send(one, {**texts, "a": "other"})) == {"changed": 1, "unchanged": 4}
    found = rows(owner, "SELECT tenant, document_id::bigint, count(*) FROM docs GROUP BY 1, 2")
    assert len({number for _, number, _ in found}) == len(found) == 10
    assert all(0 < number < 2 ** (31 if id_type == "integer" else 53) for _, number, _ in found)
    assert sorted(n for _, _, n in found) == [1, 1, *[2] * 8]


def test_an_id_is_not_drawn_for_ever(owner: Connection, shared_store: Callable[..., list[Connection]]) -> None:
    first, second = shared_store("bigint", ", UNIQUE (document_name)")
    assert counts(send(first, {"a": "alpha"})) == {"loaded": 1}
    result = send(second, {"a": "alpha", "b": "beta"})
    assert counts(result) == {"loaded": 1, "failed": 1}
    assert "23505" in result["failed"][0]["detail"]


def test_ids_go_up_by_one_where_the_loader_sees_all_rows(store: Connection) -> None:
    send(store, {"a": "alpha", "b": "beta"})
    send(store, {"c": "gamma"})
    assert rows(store, "SELECT document_id FROM docs ORDER BY document_name") == [(1,), (2,), (3,)]
