"""No call of a non-superuser opens an address, a file or a model that the administrator did not list.

Every option, setting and URI gets every bait of tests/support/canary.py: addresses that count their visitors, files
that tell who opens them and hold a word that would show. What the calls answer, errors mostly, does not matter here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ml_rag.errors import InvalidRequest
from support.canary import WORD, Canaries
from support.cluster import Connection, Database
from support.documents_server import DocumentsServer
from support.keywords import keyword_store
from support.loading import connect_as_loader, write
from support.stores import create_store, error, mark

#: how the options of each routine, or of each object among them, get into a call; {o} stands for one option's object
CALLS = {
    "ml_rag": ("CALL ml_rag('fox', %s::jsonb)", "{o}"),
    "retrieval_options": ("CALL ml_rag('fox', %s::jsonb)", '{"retrieval_options": {o}}'),
    "query_options": ("CALL ml_rag('fox', %s::jsonb)", '{"query_options": {o}}'),
    "query_prompts": ("CALL ml_rag('fox', %s::jsonb)", '{"query_options": {"prompts": {o}}}'),
    "hybrid_options": ("CALL ml_rag('fox', %s::jsonb)", '{"keyword_search": true, "hybrid_options": {o}}'),
    "rerank": ("CALL ml_rag('fox', %s::jsonb)", '{"rerank": {o}}'),
    "prompt": ("CALL ml_rag('fox', %s::jsonb)", '{"prompt": {o}}'),
    "vector_store_columns": ("CALL ml_rag('fox', %s::jsonb)", '{"vector_store_columns": {o}}'),
    "ml_generate": ("SELECT ml_generate('fox', %s::jsonb)", "{o}"),
    "ml_embed_row": ("SELECT ml_embed_row('fox', %s::jsonb)", "{o}"),
    "ml_rank": ("SELECT ml_rank('fox', '[{\"id\": \"1\", \"content\": \"fox\"}]', %s::jsonb)", "{o}"),
    "ml_check_grounding": ("SELECT ml_check_grounding('fox', '[\"fox\"]', %s::jsonb)", "{o}"),
    "ml_rag_table": ("CALL ml_rag_table('public.q.question', 'public.a1.answer', %s::jsonb)", "{o}"),
    "ml_generate_table": ("CALL ml_generate_table('public.q.question', 'public.a2.answer', %s::jsonb)", "{o}"),
    "ml_embed_table": ("CALL ml_embed_table('public.q.question', 'public.a3.answer', %s::jsonb)", "{o}"),
    "ml_retrieve_schema_metadata": ("SELECT ml_retrieve_schema_metadata('fox', %s)", "{o}"),
    "ml_nl_sql": ("SELECT ml_nl_sql('fox', %s)", "{o}"),
    "nl_sql_example": ("SELECT ml_nl_sql('fox', %s)", '{"examples": [{o}]}'),
    "ml_rag_evaluate": ("SELECT ml_rag_evaluate('q', %s::jsonb)", "{o}"),
    "evaluation_columns": ("SELECT ml_rag_evaluate('q', %s::jsonb)", '{"columns": {o}}'),
    "enable_keyword_search": ("SELECT ml_rag.enable_keyword_search('mine', %s::jsonb)", "{o}"),
    "create_store": ("SELECT ml_rag.create_store('public.made', %s::jsonb)", "{o}"),
    "attach_shard": ("SELECT ml_rag.attach_shard('mine', 'nowhere', %s::jsonb)", "{o}"),
    "distribute_store": ("SELECT ml_rag.distribute_store('mine', %s::jsonb)", "{o}"),
    "load_documents": ("SELECT ml_rag.load_documents('mine', '{a.txt}', ARRAY['fox'::bytea], %s::jsonb)", "{o}"),
    "file_dates": (
        "SELECT ml_rag.load_documents('mine', '{a.txt}', ARRAY['fox'::bytea], %s::jsonb)", '{"file_dates": [{o}]}'
    ),
    "adopt": ("SELECT ml_rag.adopt('mine', %s::jsonb)", "{o}"),
    "index_options": ("SELECT ml_rag_answer('fox', %s::jsonb)", '{"skip_generate": true, "index_options": {o}}'),
    "arm": ("SELECT ml_rag_answer('fox', %s::jsonb)", '{"skip_generate": true, "arms": [{o}]}'),
    "chunking": ("SELECT ml_rag.load_document('mine', 'a.txt', 'fox'::bytea, %s::jsonb)", '{"chunking": {o}}'),
    "vector_store_load": ("CALL vector_store_load('{folder}', %s::jsonb)", "{o}"),
    "tune_index": ("SELECT * FROM ml_rag.tune_index('mine', %s::jsonb)", "{o}"),
    "make_questions": ("SELECT * FROM ml_rag.make_questions('mine', %s::jsonb)", "{o}"),
    "add_embedding": ("CALL ml_rag.add_embedding('mine', 'more', %s::jsonb)", "{o}"),
    "create_vectorizer": ("SELECT ml_rag.create_vectorizer('q', %s::jsonb)", "{o}"),
    "run_vectorizer": ("CALL ml_rag.run_vectorizer('q', %s::jsonb)", "{o}"),
    "drop_vectorizer": ("SELECT ml_rag.drop_vectorizer('q', %s::jsonb)", "{o}"),
    "create_node_group": ("CALL ml_rag.create_node_group('mine', 'group', %s::jsonb)", "{o}"),
    "refresh_node_groups": ("CALL ml_rag.refresh_node_groups('mine', %s::jsonb)", "{o}"),
    "index": ("CALL ml_rag.add_embedding('mine', 'more', %s::jsonb)", '{"index": {o}}'),
    "ml_rag_chat": ("SELECT ml_rag_chat('fox', %s::jsonb)", "{o}"),
    "heatwave_chat": ("SELECT set_config('ml_rag.chat_options', %s, false)", "{o}"),
    "chat_table": ("SELECT set_config('ml_rag.chat_options', %s, false)", '{"tables": [{o}]}'),
    "chat_turn": ("SELECT set_config('ml_rag.chat_options', %s, false)", '{"chat_history": [{o}]}'),
}  # fmt: skip
#: the call that reads what the statement above has set
CALLED_NEXT = dict.fromkeys(("heatwave_chat", "chat_table", "chat_turn"), "CALL heatwave_chat('fox')")


def routines(owner: Connection) -> list[str]:
    return [name for (name,) in owner.execute("SELECT DISTINCT routine FROM ml_rag.option ORDER BY 1").fetchall()]


def test_every_routine_with_options_is_tried(module_owner: Connection) -> None:
    assert set(routines(module_owner)) <= set(CALLS)


@pytest.fixture
def ready(owner: Connection, loader: Connection, folder: Path) -> Connection:
    """A role that may do whatever can be granted to one that is no superuser, and something to do it to."""
    keyword_store(owner, ["fox"])
    write(folder, a="fox")
    loader.execute("CREATE TABLE q (id integer PRIMARY KEY, question text); INSERT INTO q VALUES (1, 'fox')")
    create_store(loader, "mine", type="vector(16)")
    loader.execute("CREATE INDEX ON mine USING hnsw (segment_embedding vector_cosine_ops)")
    return loader


def run(connection: Connection, statement: Any, arguments: Any = None) -> str:
    """All that comes back, rows, warnings or the error."""
    told: list[str] = []

    def note(d: psycopg.errors.Diagnostic) -> None:
        told.append(repr((d.message_primary, d.message_detail, d.message_hint, d.context)))

    connection.add_notice_handler(note)
    try:
        told.append(repr(connection.execute(statement, arguments).fetchall()))
    except psycopg.Error as e:
        d = e.diag
        told.append(repr((str(e), d.message_detail, d.message_hint, d.context)))
    finally:
        connection.remove_notice_handler(note)
    return "".join(told)


@pytest.mark.fuzz
def test_no_option_leads_anywhere(owner: Connection, ready: Connection, folder: Path, canaries: Canaries) -> None:
    tried = 0
    for routine, name in owner.execute("SELECT routine, name FROM ml_rag.option ORDER BY 1, 2").fetchall():
        statement, form = CALLS[routine]
        for bait in canaries.baits():
            # as it is, in a list, in an object: whichever the option takes
            for value in (bait, [bait], {"model_id": bait, "segment": bait, "a": bait, "gte": bait}):
                given = form.replace("{o}", json.dumps({name: value}))
                told = run(ready, statement.replace("{folder}", f"{folder}/"), (given.replace("\\u0000", ""),))
                if routine in CALLED_NEXT:
                    told = run(ready, CALLED_NEXT[routine])
                assert WORD not in told, (routine, name, value)
                tried += 1
        assert canaries.touched() == [], (routine, name)
    assert tried > 5000
    rows = owner.execute("SELECT string_agg(t::text, '') FROM mine AS t").fetchone()
    assert rows is None or WORD not in str(rows)


def test_the_canaries_sing(canaries: Canaries) -> None:
    """So that the other tests can fail."""
    assert canaries.touched() == []
    httpx.get(canaries.url)
    canaries.secret.read_text()
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(canaries.socket))) as client:
        client.get("http://x/")
    (canaries.folder / "new").touch()
    touched = canaries.touched()
    assert [what.partition(":")[0] for what in touched[:2]] == ["connection", "connection"]
    assert any("secret.txt" in what for what in touched)
    assert any("new" in what for what in touched)


def test_no_argument_leads_anywhere(ready: Connection, canaries: Canaries) -> None:
    """Model ids, prompts, questions, records, names of stores and of columns."""
    calls = (
        "SELECT ml_rag.embed('fox', %s)",
        "SELECT ml_embed_row(%s)",
        "SELECT ml_generate(%s)",
        "SELECT ml_rag.generate(%s, NULL, NULL, NULL)",
        "SELECT ml_rag_answer(%s)",
        "SELECT * FROM ml_rag_search(%s)",
        "SELECT ml_rank_rows('fox', ARRAY['1'], ARRAY[%s])",
        "SELECT ml_rag._python('rerank', jsonb_build_array('fox', ARRAY['fox'], %s::text))",
        "SELECT ml_rag._embed(ARRAY['fox'], %s, 'query')",
        "SELECT ml_rag._python('get', jsonb_build_array(%s::text))",
        "SELECT ml_rag._import_backend(%s)",
        "SELECT ml_rag.discover(ARRAY[%s])",
        "SELECT ml_rag.create_store(%s)",
        "SELECT ml_rag.documents_below('mine', %s)",
        "SELECT ml_rag.load_document('mine', %s, 'fox'::bytea)",
        "SELECT ml_rag.remove_documents('mine', ARRAY[%s])",
        "CALL ml_rag_table(%s, %s)",
        "SELECT ml_rag_evaluate(%s)",
        "SELECT * FROM ml_rag.calibrate(%s)",
        "SELECT * FROM ml_rag.tune_index('mine', jsonb_build_object('questions', %s::text))",
        "SELECT * FROM ml_rag.why_not(%s, '{}', 'fox')",
        "SELECT * FROM ml_rag.why_not('fox', '{}', %s)",
        "SELECT ml_rag.text_search_configuration(%s)",
        "SELECT ml_rag._judge(%s, 'fox', 'fox', NULL)",
    )
    for call in calls:
        for bait in canaries.baits():
            given = (bait if isinstance(bait, str) else json.dumps(bait)).replace("\0", "")
            assert WORD not in run(ready, call, (given,) * call.count("%s"))
        assert canaries.touched() == [], call
    # and requests as the inner functions take them, with fields that no option has
    for bait in canaries.baits():
        value = bait.replace("\0", "") if isinstance(bait, str) else bait
        options = {
            "model_id": "fake-generate",
            "base_url": value,
            "api_key": value,
            "model_path": value,
            "tools": value,
        }
        request = {"prompt": "fox", "documents": None, "options": options}
        assert WORD not in run(ready, "SELECT ml_rag._python('generate', %s)", (json.dumps([request]),))
    assert canaries.touched() == []


def test_no_marker_leads_anywhere(ready: Connection, canaries: Canaries) -> None:
    """Whoever owns a table writes its comment, and the model id in it goes to the model server."""
    for bait in canaries.baits():
        if isinstance(bait, str):
            mark(ready, "mine", f"GENAI_OPTIONS=EMBED_MODEL_ID={bait}".replace("\0", ""))
            for statement in (
                "SELECT ml_rag_answer('fox', '{\"vector_store\": [\"mine\"]}')",
                "SELECT ml_rag.load_document('mine', 'a.txt', 'fox'::bytea)",
            ):
                assert WORD not in run(ready, statement)
    assert canaries.touched() == []


# -- settings ---------------------------------------------------------------------------------------------------------


def test_no_setting_of_a_session_leads_anywhere(
    db: Database, owner: Connection, ready: Connection, canaries: Canaries
) -> None:
    """SET, set_config, PGOPTIONS, ALTER ROLE … SET: any session may set what begins with ml_rag."""
    names = [name for (name,) in owner.execute("SELECT name FROM ml_rag.setting").fetchall()]
    role = sql.Identifier(ready.execute("SELECT current_user").fetchone()[0])  # type: ignore[index]
    for name in (*names, "keyword_terms", "socket", "base_url", "update_noted"):
        for bait in (canaries.url.removesuffix("/x"), f"unix:{canaries.socket}"):
            ready.execute("SELECT set_config(%s, %s, false)", (f"ml_rag.{name}", bait))
            assert ready.execute("SELECT vector_dims(ml_embed_row('fox'))").fetchone() == (16,)
            run(ready, "SELECT ml_rag_answer('fox', '{\"keyword_search\": true}')")
            ready.execute(sql.SQL("RESET {}").format(sql.Identifier("ml_rag", name)))
            with owner.transaction(force_rollback=True):
                owner.execute(sql.SQL("ALTER ROLE {} SET {} = {}").format(role, sql.Identifier("ml_rag", name), bait))
            option = f"-c ml_rag.{name}={bait.replace(' ', '')}"
            with psycopg.connect(make_conninfo(db.dsn, dbname=db.name, options=option), autocommit=True) as session:
                session.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(role))
                assert session.execute("SELECT vector_dims(ml_embed_row('fox'))").fetchone() == (16,)
    assert canaries.touched() == []


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT ml_rag.configure('model_server', %s)",
        "INSERT INTO ml_rag.setting_value VALUES ('model_server', %s)",
        "UPDATE ml_rag.setting_value SET value = %s WHERE name = 'model_server'",
        "UPDATE ml_rag.setting SET value = %s WHERE name = 'model_server'",
        "DELETE FROM ml_rag.setting_value WHERE name <> %s",
        "CREATE OR REPLACE VIEW ml_rag.setting AS SELECT 'model_server', %s, 'a', 'b'",
        "ALTER SYSTEM SET ml_rag.model_server = %s",
    ],
)
def test_nobody_but_the_owner_changes_where_the_model_server_is(
    ready: Connection, canaries: Canaries, statement: str
) -> None:
    before = ready.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone()
    bound = psycopg.ClientCursor(ready)
    with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.ObjectNotInPrerequisiteState)):
        bound.execute(statement, (f"unix:{canaries.socket}",))
    assert ready.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone() == before
    run(ready, "SELECT ml_embed_row('fox')")
    assert canaries.touched() == []


# -- files ------------------------------------------------------------------------------------------------------------


def test_without_the_right_to_read_files_none_is_looked_at(
    db: Database, owner: Connection, ready: Connection, server: DocumentsServer, folder: Path, canaries: Canaries
) -> None:
    owner.execute(sql.SQL("REVOKE pg_read_server_files FROM {}").format(sql.Identifier(f"{db.name}_loader")))
    one = connect_as_loader(db)
    path = canaries.secret
    for uri in (path, f"file://{path}", f"{path.parent}/", f"{path.parent}/*.txt", f"{path.parent}/none", "/", "~/"):
        for statement in (
            "CALL vector_store_load(%s)",
            "SELECT ml_rag._python('find_files', jsonb_build_array(%s::text))",
        ):
            assert "42501" in run(one, statement, (str(uri),)) or "permission denied" in run(
                one, statement, (str(uri),)
            )
    job = {"store": 1, "dimensions": 16, "refresh": True, "request": {}, "made_with": "x", "base": str(path.parent)}
    job |= {"patterns": [], "files": [str(path).encode().hex()], "index": None}
    assert "permission denied" in run(one, "CALL ml_rag._load_files(%s)", (json.dumps(job),))
    assert canaries.touched() == []
    assert server.documents == []


URIS = [
    "http://127.0.0.1:{port}/a.pdf",
    "HTTP://127.0.0.1:{port}/a.pdf",
    "https://127.0.0.1:{port}/a.pdf",
    "ftp://127.0.0.1:{port}/a.pdf",
    "s3://127.0.0.1:{port}/a.pdf",
    "jdbc:http://127.0.0.1:{port}/",
    "//127.0.0.1:{port}/share/a.pdf",
    "file://127.0.0.1:{port}/a.pdf",
    "file://canary.example/{path}",
    "{path}\nhttp://127.0.0.1:{port}/",
    "data:text/plain,x",
    "|cat {path}",
    "unix:{socket}",
]


@pytest.mark.parametrize("uri", URIS)
def test_no_uri_but_of_a_file_is_followed(
    ready: Connection, server: DocumentsServer, canaries: Canaries, uri: str
) -> None:
    told = run(ready, "CALL vector_store_load(%s)", (
        uri.format(port=canaries.port, path=canaries.secret, socket=canaries.socket),
    ))  # fmt: skip
    assert WORD not in told
    assert "documents" not in told
    assert canaries.touched() == []
    assert server.documents == []


def test_a_folder_holds_its_links_in(
    ready: Connection, server: DocumentsServer, folder: Path, canaries: Canaries
) -> None:
    """Links out of it, of files and of folders, relative, absolute, in a chain, and one that changes in between."""
    (folder / "a.txt").write_text("fox")
    (folder / "absolute.txt").symlink_to(canaries.secret)
    (folder / "relative.txt").symlink_to(os.path.relpath(canaries.secret, folder))
    (folder / "chain.txt").symlink_to(folder / "absolute.txt")
    (folder / "folder").symlink_to(canaries.folder)
    (folder / "up").symlink_to("..")
    (folder / "proc").symlink_to("/proc/self/environ")
    os.mkfifo(folder / "pipe.txt")
    for uri in (f"{folder}/", f"{folder}/*", f"{folder}/*/*", f"file://{folder}/?*.txt"):
        assert WORD not in run(ready, 'CALL vector_store_load(%s, \'{"table_name": "t"}\')', (uri,))
    assert canaries.touched() == []
    assert set(server.documents) == {"a.txt"}


# -- schemas of answers -----------------------------------------------------------------------------------------------


def test_references_in_a_schema_are_not_fetched(canaries: Canaries) -> None:
    """The converter to a grammar could, if it were allowed to."""
    from ml_rag.server.engines.llama_grammar import json_grammar

    path = canaries.secret
    for reference in (canaries.url, canaries.url.replace("http", "https"), f"file://{path}", str(path), f"{path}#/a"):
        for schema in ({"$ref": reference}, {"type": "object", "properties": {"a": {"$ref": f"{reference}#/b"}}}):
            with pytest.raises(InvalidRequest) as caught:
                json_grammar(schema)
            assert WORD not in f"{caught.value} {caught.value.detail}"
    assert canaries.touched() == []
    assert "root" in json_grammar({"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a"})


def test_a_connection_of_a_stranger_reaches_no_model(db: Database) -> None:
    with error("42501", ours=False):
        db.connect("stranger").execute("SELECT ml_rag._python('get', '[\"/v1/models\"]')")
