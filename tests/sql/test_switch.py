"""store/switch: the moment in which a store changes its model: locks, loads, calls under way, what comes after."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from test_reembed import TEXTS, assert_embedded, columns, marker_of, reembed, rows

from support.cluster import Connection, Database
from support.loading import counts, folder, load, write
from support.models_server import ModelsServer, models
from support.processes import Background, wait_until
from support.stores import create_store, error, fake_embedding, search

__all__ = ["folder", "models"]


@pytest.fixture
def store(owner: Connection, models: ModelsServer) -> Connection:
    """The owner's connection; the store docs, of fake-embed."""
    create_store(owner, rows=rows(TEXTS), type="vector(16)")
    owner.execute("ALTER TABLE docs ALTER segment_embedding SET NOT NULL")
    return owner


def phase(watcher: Connection) -> Any:
    row = watcher.execute("SELECT phase FROM ml_rag.progress WHERE command = 'ml_rag.reembed'").fetchone()
    return row and row[0]


def waits(watcher: Connection, connection: Connection) -> bool:
    """Whether a session waits for a lock."""
    row = watcher.execute(
        "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", (connection.info.backend_pid,)
    ).fetchone()
    return row == (True,)


def test_a_reader_that_takes_its_time_is_waited_for(db: Database, store: Connection) -> None:
    watcher, reader, other = db.connect(), db.connect(autocommit=False), db.connect()
    reembed(store, "narrow", switch=False)
    assert reader.execute("SELECT count(*) FROM docs").fetchone() == (7,)
    running = Background(lambda: reembed(store, "narrow"))
    wait_until(lambda: phase(watcher) == "waiting for a lock")
    # others are let through between two attempts, and what they write comes along
    assert search(other, "green tree", {"n_citations": 1})[0][5] == "green tree"
    other.execute("INSERT INTO docs VALUES ('d', '{}', 30, 1, 'late frost', %s)", (fake_embedding("late frost"),))
    reader.rollback()
    assert running.result()["switched"] is True
    assert_embedded(store, "narrow")
    assert store.execute("SELECT count(*) FROM docs").fetchone() == (8,)


def lock_is_waited_for(watcher: Connection, mode: str) -> bool:
    """Whether somebody waits for a lock of the store, of that mode."""
    statement = "SELECT FROM pg_locks WHERE relation = 'docs'::regclass AND mode = %s AND NOT granted"
    return bool(watcher.execute(statement, (mode,)).fetchall())


def test_readers_go_on_while_the_last_rows_are_embedded(db: Database, store: Connection, models: ModelsServer) -> None:
    """Also one that goes on to write: it must wait, and not be ended as the victim of a deadlock."""
    reader, writer, other, watcher = (
        db.connect(autocommit=False),
        db.connect(autocommit=False),
        db.connect(),
        db.connect(),
    )
    reembed(store, "narrow", switch=False)
    reader.execute("SELECT count(*) FROM docs")  # so that it cannot switch
    other.execute("SET lock_timeout = '5s'")
    seen: list[Any] = []
    late: list[Background] = []
    looked: list[str] = []
    held = "SELECT FROM pg_locks WHERE relation = 'docs'::regclass AND mode = 'ShareRowExclusiveLock' AND granted"
    insert = "INSERT INTO docs VALUES ('d', '{}', %s, 1, %s, %s)"

    def look(texts: list[str]) -> None:
        if not late and any("frost" in text for text in texts) and watcher.execute(held).fetchall():
            seen.append(search(other, "green tree", {"n_citations": 1})[0][5])
            row = (200, "last fish", fake_embedding("last fish"))
            late.append(Background(lambda: reader.execute(insert, row)))
            wait_until(lambda: waits(other, reader))
        looked.extend(texts)

    models.always = look
    running = Background(lambda: reembed(store, "narrow", lock_seconds=0.5))
    wait_until(lambda: lock_is_waited_for(watcher, "AccessExclusiveLock"))  # its indexes are built
    for i in range(30, 60):
        # it must have come in when the lock is taken, and not before
        text = f"frost {i}"
        writer.execute(insert, (i, text, fake_embedding(text)))
        wait_until(lambda: lock_is_waited_for(other, "ShareRowExclusiveLock"))
        writer.commit()
        wait_until(lambda text=text: text in looked)  # type: ignore[misc]
        if late:
            break
    assert seen == ["green tree"]
    late[0].result()
    reader.commit()
    assert running.result()["switched"] is True
    assert_embedded(store, "narrow")
    assert "last fish" in models.embedded("narrow")


def test_a_reader_that_goes_on_to_write_while_it_is_waited_for(db: Database, store: Connection) -> None:
    reader, watcher = db.connect(autocommit=False), db.connect()
    reembed(store, "narrow", switch=False)
    reader.execute("SELECT count(*) FROM docs")
    running = Background(lambda: reembed(store, "narrow"))
    wait_until(lambda: lock_is_waited_for(watcher, "AccessExclusiveLock"))
    reader.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    reader.commit()
    assert running.result()["switched"] is True
    assert_embedded(store, "narrow")


def test_the_callers_lock_timeout_ends_the_waiting(db: Database, store: Connection, models: ModelsServer) -> None:
    reader = db.connect(autocommit=False)
    pid = str(reader.info.backend_pid)
    store.execute("SET lock_timeout = '700ms'")
    reader.execute("SELECT count(*) FROM docs")
    with error("55P03", "lock_timeout is 700 ms", pid, "goes on"):
        reembed(store, "narrow")
    assert columns(store)[-1] == "segment_embedding"
    reader.rollback()
    reembed(store, "narrow", switch=False)
    reader.execute("SELECT count(*) FROM docs")
    with error("55P03", 'the lock of table "docs"', pid):
        reembed(store, "narrow")
    # nobody is held up afterwards, and what was done is kept
    reader.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    reader.commit()
    assert store.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)
    result = reembed(store, "narrow")
    assert (result["segments"], result["switched"]) == (1, True)
    assert_embedded(store, "narrow")


def test_it_begins_without_holding_others_up(db: Database, store: Connection) -> None:
    watcher, reader, other = db.connect(), db.connect(autocommit=False), db.connect()
    reader.execute("SELECT count(*) FROM docs")
    running = Background(lambda: reembed(store, "narrow"))
    wait_until(lambda: phase(watcher) == "waiting for a lock")
    assert search(other, "green tree", {"n_citations": 1})[0][5] == "green tree"
    reader.rollback()
    assert running.result()["switched"] is True
    assert_embedded(store, "narrow")


def test_who_writes_to_the_table_for_long_is_waited_for(db: Database, store: Connection) -> None:
    writer, watcher, other = db.connect(autocommit=False), db.connect(), db.connect()
    reembed(store, "narrow", switch=False)
    writer.execute("DELETE FROM docs WHERE document_id = 1")
    running = Background(lambda: reembed(store, "narrow"))
    wait_until(lambda: phase(watcher) == "waiting for a lock")
    other.execute("DELETE FROM docs WHERE document_id = 2")
    writer.commit()
    assert running.result()["switched"] is True
    assert_embedded(store, "narrow")


def test_loading_again_after_the_switch_embeds_nothing_twice(
    db: Database, owner: Connection, models: ModelsServer, folder: Path
) -> None:
    owner.execute("CREATE SCHEMA s; SET search_path = s, public")
    write(folder, a="first fish", b="second fish")
    options = {"embed_model_id": "fake-embed", "chunking": {"segment_tokens": 100}}
    assert counts(load(owner, f"{folder}/", options)) == {"loaded": 2}
    for model in ("narrow", "other"):
        reembed(owner, model)
        models.requests.clear()
        assert counts(load(owner, f"{folder}/", {"chunking": options["chunking"]})) == {"unchanged": 2}
        names = [f"{folder}/{name}.txt" for name in "ab"]
        unchanged = owner.execute(
            "SELECT count(*) FROM ml_rag.unchanged_documents('docs', %s, ARRAY(SELECT DISTINCT"
            " metadata #>> '{source,sha256}' FROM docs), '{\"chunking\": {\"segment_tokens\": 100}}')",
            (names,),
        ).fetchone()
        assert unchanged is not None
        assert models.requests == []
    # other options, another document
    write(folder, c="third fish")
    assert counts(load(owner, f"{folder}/", {"chunking": options["chunking"]})) == {"loaded": 1, "unchanged": 2}
    assert counts(load(owner, f"{folder}/")) == {"changed": 3}
    assert_embedded(owner, "other")


def test_a_question_that_is_being_embedded_is_searched_with_its_model(
    db: Database, store: Connection, models: ModelsServer
) -> None:
    asker, watcher = db.connect(), db.connect()
    reembed(store, "other", switch=False)
    running: list[Background] = []

    def start() -> None:
        running.append(Background(lambda: reembed(store, "other")))
        wait_until(lambda: phase(watcher) == "waiting for a lock")

    models.before = {len(models.requests): start}
    # it would find something else, or an error, if the store changed its model just then
    found = search(asker, "green tree", {"vector_store": ["docs"], "n_citations": 1})
    assert found[0][5:7] == ("green tree", 0)
    assert running[0].result()["switched"] is True
    assert search(asker, "green tree", {"vector_store": ["docs"], "n_citations": 1})[0][5:7] == ("green tree", 0)


def test_a_store_that_switches_after_discovery_is_discovered_again(
    db: Database, store: Connection, models: ModelsServer
) -> None:
    before = store.execute("SELECT array_agg(s) FROM ml_rag.discover() AS s").fetchone()
    assert before is not None
    assert store.execute("SELECT ml_rag._hold_models(%s::ml_rag.store[])", before).fetchone() == (True,)
    reembed(store, "other")
    assert store.execute("SELECT ml_rag._hold_models(%s::ml_rag.store[])", before).fetchone() == (False,)
    with error("P0002", "no vector store found"):
        search(store, "green tree", {})


def test_not_null_is_there_again_and_no_row_was_left_out(store: Connection) -> None:
    reembed(store, "narrow")
    with error("23502", ours=False):
        store.execute("INSERT INTO docs VALUES ('d', '{}', 30, 1, 'x')")
    assert store.execute("SELECT count(*) FROM pg_constraint WHERE conname ~ 'ml_rag'").fetchone() == (0,)


def test_what_a_crash_after_the_switch_has_left_is_finished_by_the_next_call(db: Database, store: Connection) -> None:
    watcher = db.connect()
    # it ends between two steps that come after the switch
    store.execute(
        "CREATE FUNCTION die() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF EXISTS (SELECT FROM pg_constraint WHERE conname = 'ml_rag_reembed_not_null' AND convalidated) THEN"
        " PERFORM pg_cancel_backend(pg_backend_pid()); PERFORM pg_sleep(10); END IF; END $$"
    )
    store.execute("CREATE EVENT TRIGGER die ON ddl_command_end WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION die()")
    with error("57014", ours=False):
        reembed(store, "narrow")
    store.execute("DROP EVENT TRIGGER die")
    # switched, and the rows are checked by a constraint instead
    assert_embedded(watcher, "narrow")
    with error("23514", ours=False):
        watcher.execute("INSERT INTO docs VALUES ('d', '{}', 30, 1, 'x')")
    assert reembed(store, "narrow")["switched"] is False
    with error("23502", ours=False):
        store.execute("INSERT INTO docs VALUES ('d', '{}', 30, 1, 'x')")
    assert store.execute("SELECT count(*) FROM pg_constraint WHERE conname ~ 'ml_rag'").fetchone() == (0,)


def test_an_index_that_is_added_meanwhile_is_kept(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    index = "CREATE INDEX by_l1 ON public.docs USING hnsw (segment_embedding vector_l1_ops)"
    models.before = {2: lambda: other.execute(index)}
    reembed(store, "narrow", batch_size=2)
    assert store.execute("SELECT indexdef FROM pg_indexes WHERE indexname = 'by_l1'").fetchone() == (index,)


def test_a_view_that_is_added_meanwhile_stops_the_switch(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    models.before = {2: lambda: other.execute("CREATE VIEW v AS SELECT segment_embedding FROM docs")}
    with error("2BP01", "view v"):
        reembed(store, "narrow", batch_size=2)
    assert marker_of(store) == "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed"
    store.execute("DROP VIEW v")
    assert reembed(store, "narrow")["segments"] == 0
    assert_embedded(store, "narrow")
    assert columns(store)[-1] == "segment_embedding"


def test_while_others_write_and_search_nothing_is_lost_and_nothing_fails(
    db: Database, owner: Connection, models: ModelsServer
) -> None:
    words = ["red", "green", "blue", "old", "stone", "white", "black", "cat", "dog", "fish", "frost", "lake"]
    texts = [" ".join(words[(i * k + k) % 12] for k in (1, 5, 7)) + f" n{i}" for i in range(400)]
    create_store(owner, rows=rows(texts), type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs'); SELECT ml_rag.index_store('docs')")
    finished = threading.Event()

    def write(first: int) -> int:
        connection, done = db.connect(), 0
        while not finished.is_set():
            n = first + done
            connection.execute("SELECT ml_rag.load_document('docs', %s, %s)", (f"l{n}", f"loaded {texts[n % 400]}"))
            with connection.transaction():
                for i in (n * 7 % 400, n * 3 % 400):
                    connection.execute("UPDATE docs SET segment = segment || ' x' WHERE document_id = %s", (i,))
            connection.execute("DELETE FROM docs WHERE document_id = %s", (n * 11 % 400,))
            done += 1
        return done

    def ask() -> int:
        connection, done = db.connect(), 0
        options = {"vector_store": ["docs"], "n_citations": 1}
        while not finished.is_set():
            assert len(search(connection, texts[done % 400], options)) == 1
            done += 1
        return done

    others = [Background(lambda: write(1000)), Background(ask)]
    try:
        for model in ("narrow", "other", "fake-embed"):
            assert reembed(owner, model, batch_size=50)["switched"] is True
    finally:
        finished.set()
    assert all(other.result() > 0 for other in others)
    reembed(owner, "other")
    assert_embedded(owner, "other")
