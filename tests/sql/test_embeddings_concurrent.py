"""store/embeddings, store/lock: while others read, write, load, ask and hold locks."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Connection, Database
from support.embeddings import (
    add,
    assert_embedded,
    columns,
    default,
    drop,
    listed,
    rows,
    store,
    use,
    vectors,
)
from support.loading import counts, load, write
from support.models_server import ModelsServer
from support.processes import Background, wait_until
from support.stores import create_store, error, search

__all__ = ["store"]

WRITE = "UPDATE docs SET metadata = '{}' WHERE document_id = 1"


def phase(watcher: Connection) -> Any:
    row = watcher.execute("SELECT phase FROM ml_rag.progress WHERE command = 'ml_rag.add_embedding'").fetchone()
    return row and row[0]


# -- locks of the table ------------------------------------------------------------------------------------------------


@pytest.mark.fresh  # a session learns within a second which model server shows its calls
@pytest.mark.fresh  # a session learns within a second which model server shows its calls
def test_it_begins_without_holding_others_up(db: Database, store: Connection) -> None:
    watcher, reader, other = db.connect(), db.connect(autocommit=False), db.connect()
    reader.execute("SELECT count(*) FROM docs")
    running = Background(lambda: add(store))
    wait_until(lambda: phase(watcher) == "waiting for a lock")
    assert search(other, "green tree", {"n_citations": 1})[0][5] == "green tree"
    other.execute(WRITE)
    reader.rollback()
    assert running.result()["segments"] == 7
    assert_embedded(store)


@pytest.mark.fresh  # a session learns within a second which model server shows its calls
def test_an_index_is_built_without_holding_others_up_before(db: Database, store: Connection) -> None:
    watcher, writer, other = db.connect(), db.connect(autocommit=False), db.connect()
    add(store, index={"type": "none"})
    writer.execute(WRITE)
    running = Background(lambda: add(store))
    wait_until(lambda: phase(watcher) == "waiting for a lock")
    other.execute("UPDATE docs SET metadata = '{}' WHERE document_id = 2")
    writer.rollback()
    running.result()
    assert listed(store)["more"]["indexes"] == ["docs_segment_embedding_more_idx"]


def test_who_reads_and_goes_on_to_write_is_in_no_deadlock_with_it(db: Database, store: Connection) -> None:
    watcher, reader = db.connect(), db.connect(autocommit=False)
    reader.execute("SELECT count(*) FROM docs")
    running = Background(lambda: add(store))
    waiting = "SELECT FROM pg_locks WHERE relation = 'docs'::regclass AND NOT granted"
    wait_until(lambda: watcher.execute(waiting).fetchall())
    reader.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    reader.commit()
    running.result()
    assert_embedded(store)


def test_a_deadlock_with_who_has_read_and_waits_to_write_ends(db: Database, store: Connection) -> None:
    """Of a call that keeps writers out first, and then readers, as that which moves a partition to a shard."""
    watcher, writer = db.connect(), db.connect(autocommit=False)
    with error("40P01", 'could not lock table "docs"', ours=False), store.transaction():
        store.execute("LOCK TABLE docs IN SHARE ROW EXCLUSIVE MODE")
        writer.execute("SELECT count(*) FROM docs")
        writing = Background(lambda: writer.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1"))
        waiting = "SELECT FROM pg_locks WHERE relation = 'docs'::regclass AND NOT granted"
        wait_until(lambda: watcher.execute(waiting).fetchall())
        store.execute("SELECT ml_rag._lock_table('docs', 'ACCESS EXCLUSIVE')")
    writing.result()
    writer.commit()


def test_the_callers_lock_timeout_ends_the_waiting(db: Database, store: Connection) -> None:
    reader = db.connect(autocommit=False)
    pid = str(reader.info.backend_pid)
    store.execute("SET lock_timeout = '700ms'")
    reader.execute("SELECT count(*) FROM docs")
    with error("55P03", "could not lock table", "lock_timeout is 700ms", pid):
        add(store)
    assert columns(store)[-1] == "segment_embedding"
    reader.rollback()
    add(store)
    reader.execute("SELECT count(*) FROM docs")
    with error("55P03", 'could not lock table "public.docs"', pid):
        drop(store, "more")
    # nobody is held up afterwards, and the caller's own setting is what it was
    reader.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    reader.commit()
    assert store.execute("SELECT current_setting('lock_timeout')").fetchone() == ("700ms",)
    assert add(store)["segments"] == 1
    drop(store, "more")


@pytest.mark.fresh  # a session learns within a second which model server shows its calls
@pytest.mark.fresh  # a session learns within a second which model server shows its calls
def test_a_call_that_waits_for_a_lock_can_be_cancelled(db: Database, store: Connection) -> None:
    watcher, reader = db.connect(), db.connect(autocommit=False)
    reader.execute("SELECT count(*) FROM docs")
    running = Background(lambda: add(store))
    wait_until(lambda: phase(watcher) == "waiting for a lock")
    watcher.execute("SELECT pg_cancel_backend(%s::integer)", (store.info.backend_pid,))
    with error("57014", ours=False):
        running.result()
    assert watcher.execute("SELECT count(*) FROM ml_rag.progress").fetchone() == (0,)


def test_the_switch_waits_for_nobody(db: Database, store: Connection) -> None:
    reader, writer = db.connect(autocommit=False), db.connect(autocommit=False)
    add(store)
    reader.execute("SELECT count(*) FROM docs")
    writer.execute(WRITE)
    store.execute("SET lock_timeout = '100ms'")
    use(store, "more")
    with store.transaction():
        use(store, "fake-embed")
        # and nobody for it
        search(reader, "green tree", {"vector_store": ["docs"], "n_citations": 1})
        writer.execute("UPDATE docs SET metadata = '{}' WHERE document_id = 2")
    assert default(store) == "fake-embed"


def test_two_switches_at_once_leave_one_default(db: Database, store: Connection) -> None:
    other, watcher = db.connect(), db.connect()
    add(store, "one")
    add(store, "two", "other")
    with store.transaction():
        use(store, "one")
        running = Background(lambda: use(other, "two"))
        wait_until(lambda: watcher.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())
    assert running.result() == "one"
    assert default(store) == "two"
    found = store.execute("SELECT vector_store, embed_model_id FROM ml_rag.discover()").fetchall()
    assert found == [("public.docs", "other")]


MAKES = {
    "add_embedding": "CALL ml_rag.add_embedding('docs', 'one', '{\"embed_model_id\": \"other\"}')",
    "ml_embed_table": "CALL ml_embed_table('public.docs.segment', 'public.docs.segment_embedding',"
    ' \'{"embed_model_id": "fake-embed"}\')',
    "a column that is renamed": "ALTER TABLE docs RENAME segment_embedding_two TO renamed",
}


@pytest.mark.parametrize("makes", MAKES)
def test_no_changed_text_keeps_an_embedding_that_its_snapshot_does_not_show(
    db: Database, store: Connection, makes: str
) -> None:
    writer = db.connect()
    # a row without words, which the calls do not write
    store.execute(
        "ALTER TABLE docs ALTER segment_embedding DROP NOT NULL;"
        "INSERT INTO docs SELECT document_name, metadata, 100, 1, ' ', segment_embedding FROM docs LIMIT 1"
    )
    change = "UPDATE docs SET segment = 'changed' WHERE document_id = 100"
    if makes == "a column that is renamed":
        add(store, "two", "other")
        store.execute("UPDATE docs SET segment_embedding_two = segment_embedding WHERE document_id = 100")
    with writer.transaction(force_rollback=True):
        writer.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        store.execute(MAKES[makes].encode())
        with error("40001", "since the transaction began", "Try again", ours=False), writer.transaction():
            writer.execute(change.encode())
        writer.execute("UPDATE docs SET metadata = '{\"x\": 1}' WHERE document_id = 100")
    with writer.transaction():
        writer.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        writer.execute(change.encode())
    column = "renamed" if makes == "a column that is renamed" else "segment_embedding"
    assert store.execute(f"SELECT document_id FROM docs WHERE {column} IS NULL".encode()).fetchall() == [(100,)]


# -- questions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_a_question_that_is_being_embedded_is_searched_with_its_model(
    db: Database, store: Connection, models: ModelsServer, isolation: str
) -> None:
    """Of the same dimensions: the vectors of the other model would find something else without any error."""
    asker = db.connect()
    asker.execute(f"SET default_transaction_isolation = '{isolation}'")
    add(store, "more", "other")
    changed = (search(asker, "green tree", {"vector_store": ["docs"], "n_citations": 7}), use(store, "more"))[0]
    use(store, "fake-embed")
    models.before = {len(models.requests): lambda: use(store, "more")}
    found = search(asker, "green tree", {"vector_store": ["docs"], "n_citations": 7})
    assert models.requests[-1][0] == "fake-embed"
    assert found == changed
    found = search(asker, "green tree", {"vector_store": ["docs"], "n_citations": 7})
    assert models.requests[-1][0] == "other"
    assert found[0][5:7] == ("green tree", 0)


@pytest.mark.parametrize(
    "call",
    [
        "SELECT ml_rag.tune_index('docs')",
        "SELECT ml_rag.calibrate('SELECT segment AS question, segment ~ ''house'' AS answerable FROM docs',"
        ' \'{"vector_store": ["docs"], "keep": true}\')',
        'SELECT ml_rag.adopt(\'docs\', \'{"vector_store_columns": {"segment_embedding": "segment_embedding_more"}}\')',
        "SELECT ml_rag.describe_filter('docs', 'year', 'of what it is about')",
        "SELECT ml_rag.index_store('docs', NULL, '{\"type\": \"none\"}'::jsonb)",
    ],
)
def test_what_is_kept_in_a_comment_meanwhile_is_not_undone(
    db: Database, store: Connection, models: ModelsServer, call: str
) -> None:
    other, watcher = db.connect(), db.connect()
    store.execute("SELECT ml_rag.describe_filter('docs', 'place', 'where it is')")
    add(store)
    use(store, "more")
    with store.transaction():
        use(store, "fake-embed")
        store.execute("SELECT ml_rag.describe_filter('docs', 'place', NULL)")
        running = Background(lambda: other.execute(call))
        waiting = "SELECT FROM pg_locks WHERE relation = 'docs'::regclass AND NOT granted"
        wait_until(lambda: watcher.execute(waiting).fetchall())
    running.result()
    assert default(store) == "fake-embed"
    comments = (
        "SELECT string_agg(col_description(attrelid, attnum), ' ') FROM pg_attribute WHERE attrelid = %s::regclass"
    )
    (kept,) = watcher.execute(comments, ("docs",)).fetchone() or ("",)
    assert "where it is" not in kept
    assert "DEFAULT" not in kept
    assert re.search("EF_SEARCH|MAX_DISTANCE|SEGMENT=|FILTER_KEYS|INDEX=none", kept)


def test_a_comment_waits_for_no_part(db: Database, owner: Connection) -> None:
    """As for one that is vacuumed."""
    owner.execute("SELECT ml_rag.create_store('public.parts', '{\"partitions\": 2}')")
    (part,) = owner.execute("SELECT inhrelid::regclass::text FROM pg_inherits LIMIT 1").fetchone() or ("",)
    other = db.connect()
    with other.transaction():
        other.execute(f"LOCK TABLE {part} IN SHARE UPDATE EXCLUSIVE MODE".encode())
        owner.execute("SET lock_timeout = '2s'")
        owner.execute("SELECT ml_rag.describe_filter('parts', 'year', 'of what it is about')")


@pytest.mark.parametrize(
    ("call", "request_of"),
    [
        ('SELECT ml_rag_evaluate(\'TABLE asked\', \'{"options": {"vector_store": ["docs"]}}\')', 3),
        ('SELECT ml_rag.calibrate(\'TABLE asked\', \'{"vector_store": ["docs"], "keep": true}\')', 3),
        ("SELECT ml_rag.tune_index('docs', '{\"questions\": \"TABLE asked\"}')", 0),
    ],
)
def test_what_is_measured_is_of_one_embedding(
    db: Database, store: Connection, models: ModelsServer, call: str, request_of: int
) -> None:
    other = db.connect()
    add(store, "more", "other")
    store.execute("CREATE TABLE asked AS SELECT segment AS question, segment ~ 'house' AS answerable FROM docs")
    models.before = {len(models.requests) + request_of: lambda: use(other, "more")}
    with error("55000", "another embedding was made the default of public.docs during the call"):
        store.execute(call)
    assert default(store) == "more"
    assert store.execute("SELECT count(*) FROM ml_rag.evaluation_run").fetchone() == (0,)
    store.execute(call)


# -- loads -------------------------------------------------------------------------------------------------------------


def test_a_load_fills_every_embedding(db: Database, store: Connection, models: ModelsServer, folder: Path) -> None:
    add(store, "narrow")
    add(store, "other", "other", type="halfvec")
    write(folder, a="first fish\n\nsecond fish", b="third fish")
    assert counts(load(store, f"{folder}/", {"table_name": "docs"})) == {"loaded": 2}
    assert_embedded(store, column="segment_embedding_narrow")
    assert_embedded(store, "fake-embed", column="segment_embedding")
    assert listed(store)["other"]["pending"] == 0
    use(store, "narrow")
    store.execute("SELECT ml_rag.load_document('docs', 'late', 'late frost')")
    assert_embedded(store, column="segment_embedding_narrow")
    assert_embedded(store, "fake-embed", column="segment_embedding")
    with error("22023", "holds vectors of another model", "It holds vectors of narrow"):
        store.execute("SELECT ml_rag.load_document('docs', 'b', 'frost', '{\"embed_model_id\": \"fake-embed\"}')")


def test_a_document_whose_further_embedding_fails_is_not_loaded(
    store: Connection, models: ModelsServer, folder: Path
) -> None:
    add(store)
    write(folder, a="good fish\n\na !nan b", b="good dog")

    # the documents come with good vectors, and then the further ones are asked for
    real = models.vectors
    models.vectors = lambda texts, model: real([t.replace("!", "") if model != "narrow" else t for t in texts], model)  # type: ignore[method-assign]
    result = load(store, f"{folder}/", {"table_name": "docs"})
    assert counts(result) == {"loaded": 1, "failed": 1}
    assert result["failed"][0]["error"] == "unexpected reply from the model server"
    assert "good fish" not in vectors(store)
    assert_embedded(store)


def test_a_model_server_that_goes_while_a_load_embeds_ends_it(
    store: Connection, models: ModelsServer, folder: Path
) -> None:
    add(store)
    write(folder, a="first fish", b="second fish")
    number = len(models.requests)

    def die(texts: list[str]) -> None:
        if len(models.requests) > number + 1 and models.requests[-1][0] == "narrow":
            raise OSError

    models.always = die
    with error("08006"):
        load(store, f"{folder}/", {"table_name": "docs"})
    models.always = lambda _: None
    load(store, f"{folder}/", {"table_name": "docs"})
    assert_embedded(store)
    assert_embedded(store, "fake-embed", column="segment_embedding")


def test_who_may_not_write_an_embedding_loads_without_it(db: Database, store: Connection, models: ModelsServer) -> None:
    add(store)
    role = db.role("tenant")
    try:
        store.execute(f"GRANT ml_rag_loader TO {role}; GRANT SELECT, DELETE ON docs TO {role}")
        store.execute(
            "GRANT INSERT (document_name, metadata, document_id, segment_number, segment, segment_embedding)"
            f" ON docs TO {role}"
        )
        db.connect("tenant").execute("SELECT ml_rag.load_document('docs', 'late', 'late frost')")
    finally:
        store.execute(f"REVOKE ml_rag_loader FROM {role}")
    assert listed(store)["more"]["pending"] == 1
    assert add(store)["segments"] == 1
    assert_embedded(store)


@pytest.mark.fresh  # a session learns within a second which model server shows its calls
def test_an_embedding_that_is_added_while_a_load_is_under_way(
    db: Database, store: Connection, models: ModelsServer, folder: Path
) -> None:
    """No row is left out: neither what the load had written before, nor what it writes afterwards."""
    other, watcher = db.connect(), db.connect()
    write(folder, **{f"f{i:02}": f"fish number {i}" for i in range(40)})
    running: list[Background] = []

    def start(texts: list[str]) -> None:
        if any("number 20" in text for text in texts) and not running:
            running.append(Background(lambda: add(other)))
            wait_until(lambda: phase(watcher) == "waiting for a lock")

    models.always = start
    assert counts(load(store, f"{folder}/", {"table_name": "docs"})) == {"loaded": 40}
    assert running[0].result()["failed"] == 0
    assert_embedded(store)
    assert_embedded(store, "fake-embed", column="segment_embedding")


def test_a_switch_while_a_load_is_under_way(
    db: Database, store: Connection, models: ModelsServer, folder: Path
) -> None:
    other = db.connect()
    add(store, "more", "other")
    write(folder, a="first fish", b="second fish")
    models.before_batch = {0: lambda: use(other, "more")}
    load(store, f"{folder}/", {"table_name": "docs"})
    assert default(store) == "more"
    assert_embedded(store, "other")
    assert_embedded(store, "fake-embed", column="segment_embedding")


def test_loading_again_after_a_switch_embeds_nothing_twice(
    owner: Connection, models: ModelsServer, folder: Path
) -> None:
    owner.execute("CREATE SCHEMA s; SET search_path = s, public")
    write(folder, a="first fish", b="second fish")
    options: Any = {"embed_model_id": "fake-embed", "chunking": {"segment_tokens": 100}}
    assert counts(load(owner, f"{folder}/", options)) == {"loaded": 2}
    del options["embed_model_id"]
    former = "fake-embed"
    for model in ("narrow", "other"):
        add(owner, model, model)
        use(owner, model)
        drop(owner, former)
        former = model
        models.requests.clear()
        assert counts(load(owner, f"{folder}/", options)) == {"unchanged": 2}
        unchanged = owner.execute(
            "SELECT count(*) FROM ml_rag.unchanged_documents('docs', ARRAY(SELECT DISTINCT document_name FROM docs"
            " ORDER BY 1), ARRAY(SELECT metadata #>> '{source,sha256}' FROM docs ORDER BY document_name),"
            ' \'{"chunking": {"segment_tokens": 100}}\')'
        ).fetchone()
        assert unchanged == (2,)
        assert models.requests == []
    # other options, another document
    write(folder, c="third fish")
    assert counts(load(owner, f"{folder}/", options)) == {"loaded": 1, "unchanged": 2}
    assert counts(load(owner, f"{folder}/")) == {"changed": 3}
    assert_embedded(owner, "other", column="segment_embedding_other")


# -- all at once -------------------------------------------------------------------------------------------------------


def test_several_sessions_share_a_store(db: Database, owner: Connection, models: ModelsServer) -> None:
    # four rows a block
    texts = [f"text {i} {'x' * 1600}" for i in range(400)]
    create_store(owner, rows=rows(texts), type="vector(16)")
    other, results = db.connect(), []

    # request 0 asks for the dimensions
    models.before = {1: lambda: results.append(add(other, batch_size=10))}
    results.append(add(owner, batch_size=10))
    # the first session has the first 64 blocks
    assert [result["segments"] > 50 for result in results] == [True, True]
    assert (results[0]["pending"], results[1]["pending"]) == (400 - results[0]["segments"], 0)
    assert sorted(models.embedded("narrow")) == sorted(texts)
    assert len(listed(owner)["more"]["indexes"]) == 1
    assert_embedded(owner)


def test_what_others_have_claimed_is_left_out(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    results = []

    def add_too() -> None:
        results.append(add(other, batch_size=1, index={"type": "none"}))
        # another embedding of the same rows is another column
        results.append(add(other, "two", "other", index={"type": "none"}))

    models.before = {3: add_too}
    assert add(store, batch_size=1)["segments"] == 7
    assert [(result["segments"], result["pending"]) for result in results] == [(0, 5), (7, 0)]
    assert_embedded(store)


def test_an_embedding_that_is_made_anew_while_it_is_filled(
    db: Database, store: Connection, models: ModelsServer
) -> None:
    other = db.connect()

    def make_anew() -> None:
        drop(other, "more")
        add(other, "more", "other")

    models.before = {3: make_anew}
    with error("55000", "were dropped and created again during the call", "of model other"):
        add(store, batch_size=1)
    assert_embedded(store, "other")


def test_an_embedding_that_is_dropped_while_it_is_filled(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    models.before = {3: lambda: drop(other, "more")}
    with error("42704", '"public.docs" has no embedding "more"'):
        add(store, batch_size=1)
    assert columns(store)[-1] == "segment_embedding"


def test_a_column_that_is_renamed_while_it_is_filled(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    models.before = {3: lambda: other.execute("ALTER TABLE docs RENAME segment_embedding_more TO mine")}
    assert add(store, batch_size=1)["segments"] == 7
    assert_embedded(store, column="mine")


@pytest.mark.parametrize("options", [{"vector_store": ["docs"]}, {}])
def test_a_search_that_waited_for_a_change_goes_by_what_that_has_left(
    db: Database, store: Connection, options: dict[str, Any]
) -> None:
    add(store)
    other, watcher = db.connect(autocommit=False), db.connect()
    other.execute("SELECT ml_rag.use_embedding('docs', 'more', true)")
    drop(other, "fake-embed")
    searching = db.connect()
    asked = Background(lambda: search(searching, "green tree", options | {"n_citations": 1}))
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'docs'::regclass"
    wait_until(lambda: watcher.execute(waiting).fetchone() == (1,))
    other.commit()
    if options:
        assert asked.result()[0][5] == "green tree"
    else:  # it is of another model than a call searches that names no store
        with error("P0002"):
            asked.result()


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
    former = "fake-embed"
    try:
        for name, model in (("a", "narrow"), ("b", "other"), ("c", "fake-embed")):
            add(owner, name, model, batch_size=50)
            owner.execute("SELECT ml_rag.use_embedding('docs', %s, true)", (name,))
            if former != "fake-embed":
                drop(owner, former)
            former = name
    finally:
        finished.set()
    assert all(other.result() > 0 for other in others)
    add(owner, "c", "fake-embed")
    assert_embedded(owner, "fake-embed", column="segment_embedding_c")


def test_one_that_is_dropped_while_it_waits_takes_no_ones_place(db: Database, store: Connection) -> None:
    add(store)
    add(store, "other")
    use(store, "other")
    dropper, user = db.connect(autocommit=False), db.connect()
    dropper.execute("SELECT ml_rag.drop_embedding('docs', 'more')")
    using = Background(lambda: user.execute("SELECT ml_rag.use_embedding('docs', 'more', true)"))
    wait_until(lambda: store.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())
    dropper.commit()
    with error("42704", "more"):
        using.result()
    assert default(store) == "other"
