"""watch/track, watch/watch: how far loads and batch routines are, while they run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database
from support.documents_server import DocumentsServer
from support.loading import loader_role, write
from support.processes import Background, wait_until
from support.stores import create_store, error
from support.watching import gate, held, shown

# what was called in a database is counted, by sessions that are told apart
pytestmark = pytest.mark.fresh


def told(connection: Connection) -> tuple[Any, ...]:
    """Of the one routine in flight: command, relation, phase, done, total, failed."""
    (row,) = shown(connection, "progress")
    assert isinstance(row["started"], datetime)
    return tuple(row[name] for name in ("command", "relation", "phase", "done", "total", "failed"))


def texts(owner: Connection, n: int, name: str = "texts") -> None:
    owner.execute(
        f"CREATE TABLE {name} (id integer PRIMARY KEY, text text);"
        f"INSERT INTO {name} SELECT i, 'text ' || i FROM generate_series(1, {n}) AS i"
    )


# -- loads ------------------------------------------------------------------------------------------------------------


def test_a_load(db: Database, owner: Connection, loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, f00="text", f01="text", f02="!fail", f03="text", f04="text", f05="!hang", f06="more")
    call = Background(lambda: loader.execute("CALL vector_store_load(%s)", (f"{folder}/",)))
    wait_until(lambda: len(server.documents) == 6)
    wait_until(lambda: told(owner)[3] == 5)
    assert told(owner) == ("vector_store_load", "public.docs", "loading documents", 5, 7, 1)
    (row,) = shown(owner)
    assert (row["routine"], row["stage"], row["model"]) == ("vector_store_load", "load", "fake-embed")
    owner.execute("SELECT pg_cancel_backend(%s::integer)", (loader.info.backend_pid,))
    with error("57014"):
        call.result()
    assert shown(owner, "progress") == []


def test_a_load_that_finds_most_of_it_there(
    owner: Connection, loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, **{f"f{i:02}": f"text {i}" for i in range(5)})
    loader.execute("CALL vector_store_load(%s)", (f"{folder}/",))
    write(folder, f09="!hang")
    call = Background(lambda: loader.execute("CALL vector_store_load(%s)", (f"{folder}/",)))
    wait_until(lambda: len(server.documents) == 6)
    assert told(owner)[3:] == (5, 6, 0)
    owner.execute("SELECT pg_cancel_backend(%s::integer)", (loader.info.backend_pid,))
    with error("57014"):
        call.result()


def test_a_load_that_waits_for_another(
    db: Database, owner: Connection, loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="text")
    loader.execute("CALL vector_store_load(%s)", (f"{folder}/",))
    other = db.connect(autocommit=False)
    other.execute("SELECT pg_advisory_xact_lock(ml_rag._store_key('docs'::regclass))")
    write(folder, b="text")
    call = Background(lambda: loader.execute("CALL vector_store_load(%s)", (f"{folder}/",)))
    wait_until(lambda: [row["routine"] for row in shown(owner)] == ["vector_store_load"])
    assert loader_role(db) == shown(owner)[0]["role"]
    other.rollback()
    call.result()


def test_documents_that_a_client_sends(db: Database, owner: Connection, server: DocumentsServer) -> None:
    owner.execute("SELECT ml_rag.create_store('public.docs')")
    contents = [b"text", b"!fail", b"!hang", b"text"]
    call = Background(
        lambda: owner.execute("SELECT ml_rag.load_documents('docs', '{a,b,c,d}', %s)", (contents,)).fetchone()
    )
    wait_until(lambda: len(server.documents) == 3)
    watcher = db.connect()
    wait_until(lambda: told(watcher)[3] == 2)
    assert told(watcher) == ("ml_rag.load_documents", "public.docs", "loading documents", 2, 4, 1)
    watcher.execute("SELECT pg_cancel_backend(%s::integer)", (owner.info.backend_pid,))
    with error("57014"):
        call.result()


# -- batch routines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routine", "closed", "phase", "result"),
    [
        ("ml_rag_table", "chat/completions", "answering", "'{}'::jsonb"),
        ("ml_generate_table", "chat/completions", "generating", "'{}'::jsonb"),
        ("ml_embed_table", "embeddings", "embedding", f"'{[1.0] * 16}'::vector(16)"),
    ],
)
def test_a_batch_routine(
    db: Database, owner: Connection, local_sockets: Path, routine: str, closed: str, phase: str, result: str
) -> None:
    create_store(owner, rows=[("a", 1, 1, "copper", [1.0, *[0.0] * 15])], type="vector(16)")
    texts(owner, 7)
    session = db.connect()
    statement = f"CALL {routine}('public.texts.text', 'public.results.result', '{{\"batch_size\": 3}}')"
    with gate(owner, local_sockets) as server:
        # the first three are there already
        session.execute(f"CREATE TABLE results AS SELECT id, result FROM texts, (SELECT {result}) AS r (result)")
        session.execute("DELETE FROM results WHERE id > 3; ALTER TABLE results ADD PRIMARY KEY (id)")
        server.closed.add(closed)
        with held(server, session, statement) as call:
            if routine == "ml_embed_table":
                # held at the first text, which tells the dimensions
                assert [row["routine"] for row in shown(owner)] == [routine]
                server.waiting = 0
                first, server.opened = server.opened, type(server.opened)()
                first.set()
                wait_until(lambda: server.waiting)
            assert told(owner) == (routine, "public.results", phase, 0, 4, 0)
            (row,) = shown(owner)
            assert row["routine"] == routine
        call.result()
    assert shown(owner, "progress") == []
    assert owner.execute("SELECT count(*) FROM results WHERE result IS NOT NULL").fetchone() == (7,)


def test_rows_that_failed_are_told_of(db: Database, owner: Connection, local_sockets: Path) -> None:
    texts(owner, 4)
    owner.execute("UPDATE texts SET text = ' ' WHERE id < 3")  # blank: an error of the row
    session = db.connect()
    with gate(owner, local_sockets, "chat/completions") as server:
        with held(server, session, "CALL ml_generate_table('public.texts.text', 'public.r.r')") as call:
            assert told(owner) == ("ml_generate_table", "public.r", "generating", 2, 4, 2)
        call.result()


def test_progress_goes_on_over_batches(db: Database, owner: Connection, local_sockets: Path) -> None:
    """Each row that is computed looks at the progress itself, through a trigger of the table it goes to."""
    texts(owner, 10)
    owner.execute(
        "CREATE TABLE r (id integer PRIMARY KEY, r jsonb); CREATE TABLE seen (id integer, done bigint, total bigint);"
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO public.seen SELECT NEW.id, p.done, p.total FROM ml_rag.progress AS p"
        " WHERE p.pid = pg_backend_pid();"
        " RETURN NEW; END $$; CREATE TRIGGER see AFTER INSERT ON r FOR EACH ROW EXECUTE FUNCTION see()"
    )
    owner.execute("CALL ml_generate_table('public.texts.text', 'public.r.r', '{\"batch_size\": 4}')")
    assert owner.execute("SELECT id, done, total FROM seen ORDER BY id").fetchall() == [
        (i, i - 1, 10) for i in range(1, 11)
    ]
    assert shown(owner, "progress") == []


def test_an_error_between_two_commits_ends_it(owner: Connection) -> None:
    texts(owner, 3)
    owner.execute(
        "CREATE TABLE r (id integer PRIMARY KEY, r jsonb, UNIQUE (id, r));"
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;"
        "CREATE CONSTRAINT TRIGGER no AFTER INSERT ON r DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION no()"
    )
    with error("P0001", ours=False):
        owner.execute("CALL ml_generate_table('public.texts.text', 'public.r.r')")
    assert shown(owner) == []
    assert shown(owner, "progress") == []
    owner.execute("SELECT ml_embed_row('x')")
    rows = owner.execute("SELECT calls, errors FROM ml_rag.stats WHERE routine = 'ml_generate_table'").fetchall()
    assert rows == [(1, 1)]


# -- others -----------------------------------------------------------------------------------------------------------


def test_an_evaluation(db: Database, owner: Connection, local_sockets: Path) -> None:
    create_store(owner, rows=[("a", 1, 1, "copper", [1.0, *[0.0] * 15])], type="vector(16)")
    owner.execute("CREATE TABLE questions (id integer PRIMARY KEY, question text)")
    owner.execute("INSERT INTO questions VALUES (1, ' '), (2, 'a'), (3, 'b'), (4, 'a')")
    session = db.connect()
    for source, relation in (("questions", "questions"), ("SELECT * FROM questions WHERE id > 0", None)):
        with gate(owner, local_sockets, "embeddings") as server:
            statement = "SELECT ml_rag_evaluate(%s::text, '{\"keep\": false}')"
            with held(server, session, statement, source) as call:
                assert told(owner) == ("ml_rag_evaluate", relation, "asking questions", 1, 4, 1)
            call.result()


def test_a_calibration(db: Database, owner: Connection, local_sockets: Path) -> None:
    create_store(owner, rows=[("a", 1, 1, "copper", [1.0, *[0.0] * 15])], type="vector(16)")
    owner.execute("CREATE TABLE questions AS SELECT 'a' AS question, false AS answerable UNION ALL SELECT 'b', true")
    session = db.connect()
    with gate(owner, local_sockets, "embeddings") as server:
        with held(server, session, "SELECT * FROM ml_rag.calibrate(%s::text)", "questions") as call:
            assert told(owner) == ("ml_rag.calibrate", "questions", "asking questions", 0, 2, 0)
        call.result()


def test_a_keyword_index(owner: Connection, db: Database) -> None:
    texts(owner, 1000)
    owner.execute("ANALYZE texts")
    other = db.connect(autocommit=False)
    other.execute("LOCK TABLE texts IN ROW EXCLUSIVE MODE")
    session = db.connect()
    call = Background(
        lambda: session.execute("SELECT ml_rag.enable_keyword_search('texts', '{\"segment\": \"text\"}')")
    )
    wait_until(lambda: shown(owner, "progress"))
    assert told(owner) == ("ml_rag.enable_keyword_search", "public.texts", "waiting for writers", 0, None, 0)
    other.rollback()
    call.result()
    assert shown(owner, "progress") == []


def test_who_may_not_see_the_call_does_not_see_its_progress(
    db: Database, owner: Connection, tenant: Connection, local_sockets: Path
) -> None:
    texts(owner, 2)
    session = db.connect()
    statement = "CALL ml_generate_table('public.texts.text', 'public.secret.r')"
    with gate(owner, local_sockets, "chat/completions") as server, held(server, session, statement):
        assert told(owner)[1] == "public.secret"
        assert shown(tenant, "progress") == []
        (row,) = shown(tenant)
        assert row["pid"] == session.info.backend_pid
        assert row["routine"] is None


# -- notices ----------------------------------------------------------------------------------------------------------


@contextmanager
def noticed(connection: Connection, seconds: str = "0.000001") -> Iterator[list[str]]:
    """The notices of what runs meanwhile, in a session that has set how often."""
    notices: list[str] = []

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "NOTICE":
            notices.append(diagnostic.message_primary or "")

    connection.execute("SELECT set_config('ml_rag.progress_seconds', %s, false)", (seconds,))
    connection.add_notice_handler(note)
    try:
        yield notices
    finally:
        connection.remove_notice_handler(note)
        connection.execute("RESET ml_rag.progress_seconds")


def vectorized(owner: Connection, n: int) -> None:
    texts(owner, n, "items")
    owner.execute("""SELECT ml_rag.create_vectorizer('items', '{"columns": "text"}')""")


def test_a_vectorizer_knows_how_much_waits(db: Database, owner: Connection, local_sockets: Path) -> None:
    vectorized(owner, 7)
    session = db.connect()
    with gate(owner, local_sockets, "embeddings") as server:
        with held(server, session, """CALL ml_rag.run_vectorizer('items', '{"batch_size": 3}')""") as call:
            assert told(owner) == ("ml_rag.run_vectorizer", "public.items", "embedding", 0, 7, 0)
        call.result()
    owner.execute("UPDATE items SET text = text || '!' ")
    with gate(owner, local_sockets, "embeddings") as server:
        with held(
            server, session, """CALL ml_rag.run_vectorizer('items', '{"batch_size": 3, "batches": 1}')"""
        ) as call:
            assert told(owner)[3:] == (0, 3, 0)
        call.result()


def test_who_waits_for_a_batch_hears_the_same_again(db: Database, owner: Connection, local_sockets: Path) -> None:
    vectorized(owner, 7)
    session = db.connect()
    with noticed(session, "0.1") as notices, gate(owner, local_sockets, "embeddings") as server:
        with held(server, session, """CALL ml_rag.run_vectorizer('items', '{"batch_size": 3}')""") as call:
            wait_until(lambda: len(notices) >= 2)
        call.result()
    assert notices[:2] == 2 * ["public.items: embedding: 0 of 7"]


@pytest.mark.parametrize("track", ["on", "off"])
def test_long_work_reports_to_its_client(owner: Connection, track: str) -> None:
    owner.execute("SELECT ml_rag.configure('track', %s)", (track,))
    vectorized(owner, 6)
    texts(owner, 5)
    create_store(owner, rows=[("a", i, 1, f"copper {i}", [1.0, *[0.0] * 15]) for i in range(6)], type="vector(16)")
    rest = ".* a second, about .* left"
    calls = {
        "CALL ml_rag.run_vectorizer('items', '{\"batch_size\": 2}')": f"public.items: embedding: 4 of 6, {rest}",
        "CALL ml_generate_table('public.texts.text', 'public.r.r')": f"public.r: generating: 3 of 5, {rest}",
        "CALL ml_embed_table('public.texts.text', 'public.v.v')": "public.v: embedding: 5 of 5, .* a second",
        "CALL ml_rag.add_embedding('docs', 'b', '{\"embed_model_id\": \"fake-embed\"}')": (
            "public.docs: building index: 6 of 6"
        ),
        "CALL ml_rag.create_node_group('docs', 's', '{\"transform\": \"sentence\"}')": (
            "public.docs: building index: 6 of 6"
        ),
        "SELECT ml_rag.enable_keyword_search('docs')": "public.docs: indexing segments: 6 .*",
    }
    for statement, expected in calls.items():
        with noticed(owner) as notices:
            owner.execute(statement)
        assert any(re.fullmatch(f"{expected}.*", line) for line in notices), (statement, notices)


def test_a_load_reports_documents_and_segments(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    write(folder, f00="text", f01="!fail", f02="text")
    with noticed(loader) as notices:
        loader.execute("CALL vector_store_load(%s)", (f"{folder}/",))
    assert any(
        re.match(r"public.docs: loading documents: [23] of 3, 1 failed, \d segments, .* a second", n) for n in notices
    )
    assert notices[-1].startswith("public.docs: indexing: 3 of 3, 1 failed, ")


def test_a_short_call_reports_nothing(owner: Connection) -> None:
    vectorized(owner, 6)
    for seconds in ("10", "0", "", "nonsense"):
        owner.execute("UPDATE items SET text = text || '!'")
        with noticed(owner, seconds) as notices:
            owner.execute("""CALL ml_rag.run_vectorizer('items', '{"batch_size": 2}')""")
        assert notices == []


def test_who_asks_many_questions_hears_of_them_once(owner: Connection) -> None:
    """What is called by a call that reports does not report itself."""
    create_store(owner, rows=[("a", 1, 1, "copper", [1.0, *[0.0] * 15])], type="vector(16)")
    texts(owner, 3)
    with noticed(owner) as notices:
        owner.execute("CALL ml_rag_table('public.texts.text', 'public.r.r')")
    assert {line.split(": ")[1] for line in notices} <= {"counting rows", "answering"}


def test_the_index_of_a_large_table_is_announced(owner: Connection) -> None:
    """PostgreSQL lets no notice through while it builds one."""
    create_store(owner, rows=[("a", 1, 1, "copper", [1.0, 0.0, 0.0])])
    with noticed(owner, "0") as notices:
        owner.execute("SELECT ml_rag.index_store('docs')")
        assert notices == []
        owner.execute("DROP INDEX docs_segment_embedding_idx; ALTER TABLE docs ALTER segment SET STORAGE EXTERNAL")
        owner.execute("UPDATE docs SET segment = repeat('copper ', 10000000)")
        owner.execute("SELECT ml_rag.index_store('docs')")
    (notice,) = notices
    assert re.fullmatch(r'building an index of "public.docs", which has 6\d MB', notice)
