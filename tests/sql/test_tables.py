"""batch/run, batch/work: the batch routines."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database, noticed, value_of, waits_for_a_lock
from support.hostile_server import embeddings, hostile, reply, silent
from support.models_server import ModelsServer, embedding
from support.processes import Background, wait_until
from support.stores import error, fake_embedding, mark, marker, names, warnings_of
from support.tables import ROUTINES, call, column, make_texts


@pytest.fixture
def texts(owner: Connection) -> Connection:
    return make_texts(owner)


def test_embed_table_adds_a_marked_column_and_makes_the_table_a_store(texts: Connection) -> None:
    result = call(texts, "ml_embed_table", "public.texts.q", "public.texts.segment_embedding")
    assert {key: result[key] for key in ("rows", "succeeded", "failed")} == {"rows": 4, "succeeded": 3, "failed": 1}
    assert "empty" in result["first_error"]
    vectors = dict(texts.execute("SELECT id, segment_embedding::real[] FROM texts WHERE segment_embedding IS NOT NULL"))
    assert vectors.keys() == {1, 3, 5}
    for number, text in ((1, "one two"), (3, "three"), (5, "five six")):
        assert vectors[number] == pytest.approx(fake_embedding(text), abs=1e-6)
    texts.execute("ALTER TABLE texts RENAME q TO segment")
    assert "public.texts" in names(texts)


def test_embed_table_notices_changed_texts_when_further_embeddings_were_dropped(texts: Connection) -> None:
    texts.execute("ALTER TABLE texts RENAME q TO segment")
    call(texts, "ml_embed_table", "public.texts.segment", "public.texts.segment_embedding")
    changed = "UPDATE texts SET segment = segment || '!' WHERE id = 1"
    texts.execute("CALL ml_rag.add_embedding('texts', 'more')")
    texts.execute("SELECT ml_rag.drop_embedding('texts', 'more')")
    texts.execute(changed)
    assert column(texts, "SELECT segment_embedding IS NULL FROM texts WHERE id = 1") == [True]
    texts.execute("CALL ml_rag.add_embedding('texts', 'more')")
    ((first,),) = texts.execute("SELECT ml_rag.use_embedding('texts', 'more')").fetchall()
    texts.execute("SELECT ml_rag.drop_embedding('texts', %s)", (first,))
    texts.execute(changed)
    assert column(texts, "SELECT segment_embedding_more IS NULL FROM texts WHERE id = 1") == [True]


@pytest.mark.parametrize("generated", [False, True])
def test_embed_table_notices_changed_texts(texts: Connection, generated: bool) -> None:
    segment = "q"
    if generated:
        texts.execute(
            "ALTER TABLE texts ADD n text, ADD segment text GENERATED ALWAYS AS (q || coalesce(n, '')) STORED"
        )
        segment = "segment"
    call(texts, "ml_embed_table", f"public.texts.{segment}", "public.texts.vector")
    texts.execute("UPDATE texts SET q = 'changed' WHERE id = 1; UPDATE texts SET id = 30 WHERE id = 3")
    texts.execute("DELETE FROM texts WHERE id IN (2, 4)")
    assert column(texts, "SELECT id FROM texts WHERE vector IS NULL") == [1]
    if generated:
        texts.execute("UPDATE texts SET n = '!' WHERE id = 5")
        assert column(texts, "SELECT id FROM texts WHERE vector IS NULL ORDER BY 1") == [1, 5]
    result = call(texts, "ml_embed_table", f"public.texts.{segment}", "public.texts.vector")
    assert (result["rows"], result["succeeded"]) == ((2, 2) if generated else (1, 1))
    (vector,) = column(texts, "SELECT vector::real[] FROM texts WHERE id = 1")
    assert vector == pytest.approx(fake_embedding("changed"), abs=1e-6)
    assert call(texts, "ml_embed_table", f"public.texts.{segment}", "public.texts.vector")["rows"] == 0


def test_embed_table_tells_where_it_cannot_notice_changed_texts(db: Database, texts: Connection) -> None:
    texts.execute(
        "ALTER TABLE texts ADD vector vector(16); COMMENT ON COLUMN texts.vector IS"
        " 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'; GRANT SELECT, UPDATE ON texts TO PUBLIC"
    )
    asker = db.connect("asker")
    told = noticed(asker)
    assert call(asker, "ml_embed_table", "public.texts.q", "public.texts.vector")["succeeded"] == 3
    assert told[0] == 'changed texts of "public.texts" will keep their embedding'
    told.clear()
    texts.add_notice_handler(lambda d: told.append(d.message_primary or ""))
    texts.execute("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$")
    texts.execute('CREATE TRIGGER "~z" BEFORE UPDATE ON texts FOR EACH ROW EXECUTE FUNCTION f()')
    texts.execute("UPDATE texts SET vector = NULL WHERE id = 1")
    assert call(texts, "ml_embed_table", "public.texts.q", "public.texts.vector")["succeeded"] == 1
    assert told[0] == 'changed texts of "public.texts" will keep their embedding'


def test_a_text_that_changes_while_it_is_embedded_keeps_no_old_embedding(
    db: Database, texts: Connection, local_sockets: Path
) -> None:
    server = ModelsServer()
    with hostile(local_sockets, server, owner=texts):
        other = db.connect()
        server.before[1] = lambda: other.execute("UPDATE texts SET q = 'changed' WHERE id = 1")
        call(texts, "ml_embed_table", "public.texts.q", "public.texts.vector")
        assert column(texts, "SELECT id FROM texts WHERE vector IS NULL AND q = 'changed'") == [1]
        call(texts, "ml_embed_table", "public.texts.q", "public.texts.vector")
        assert "changed" in server.embedded("fake-embed")


def test_rag_table_writes_the_answer_document_of_each_row(texts: Connection) -> None:
    result = call(texts, "ml_rag_table", "public.texts.q", "public.texts.answer", {"n_citations": 1, "batch_size": 2})
    assert (result["rows"], result["succeeded"], result["failed"]) == (4, 3, 1)
    answers = dict(texts.execute("SELECT id, answer FROM texts"))
    assert answers[2] is None
    assert list(answers[4]) == ["error"]
    assert "22023" in answers[4]["error"]
    for number, text in ((1, "one two"), (3, "three"), (5, "five six")):
        assert answers[number] == value_of(texts, "SELECT ml_rag_answer(%s, '{\"n_citations\": 1}')", (text,))


def test_rows_that_have_a_result_are_left_alone_and_failed_ones_tried_again(texts: Connection) -> None:
    call(texts, "ml_rag_table", "public.texts.q", "public.out.answer")
    texts.execute("UPDATE texts SET q = 'three' WHERE id = 4")
    texts.execute("UPDATE out SET answer = '{\"mine\": 1}' WHERE id = 1")
    result = call(texts, "ml_rag_table", "public.texts.q", "public.out.answer")
    assert (result["rows"], result["succeeded"], result["failed"]) == (1, 1, 0)
    assert column(texts, "SELECT answer FROM out WHERE id = 1") == [{"mine": 1}]
    assert column(texts, "SELECT answer ->> 'text' FROM out WHERE id = 4") == ["fake answer to: three [documents: 3]"]
    assert column(texts, "SELECT count(*) FROM out") == [4]


def test_one_bad_text_does_not_cost_the_rest_of_an_embedding_batch(texts: Connection) -> None:
    texts.execute("UPDATE texts SET q = '' WHERE id = 3")
    result = call(texts, "ml_embed_table", "public.texts.q", "public.texts.e")
    assert (result["succeeded"], result["failed"]) == (2, 2)
    assert column(texts, "SELECT id FROM texts WHERE e IS NOT NULL ORDER BY id") == [1, 5]


@pytest.mark.parametrize("routine", ROUTINES)
def test_long_texts_of_others_fill_nobody_s_memory(texts: Connection, routine: str) -> None:
    """As JSON it would be more than PostgreSQL can hold; and texts that are long come in several batches."""
    texts.execute(
        "INSERT INTO texts VALUES (0, repeat(chr(1), 180000000));"
        "INSERT INTO texts SELECT i, 'one' || repeat(' ', 3000000) FROM generate_series(6, 9) AS i"
    )
    result = call(texts, routine, "public.texts.q", "public.out.v")
    assert result["rows"] == 9
    assert result["first_error"] == (
        "row {0}: the text is too long (54000): It has 180000000 bytes, and may have 10000000."
    )
    if routine == "ml_embed_table":
        assert result["failed"] == 2
        assert column(texts, "SELECT id FROM out ORDER BY 1") == [1, 3, 5, 6, 7, 8, 9]


def test_each_row_of_a_failing_generation_model_holds_its_error(texts: Connection) -> None:
    options = {"model_id": "fake-generate-error"}
    result = call(texts, "ml_generate_table", "public.texts.q", "public.texts.g", options)
    assert (result["rows"], result["failed"]) == (4, 4)
    documents = column(texts, "SELECT g FROM texts WHERE g IS NOT NULL")
    assert [list(d) for d in documents] == [["text", "error"]] * 4
    assert all(d["text"] is None and d["error"] for d in documents)


@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize("size", [1, 2, 10000])
def test_every_row_once_whatever_the_batch_size(texts: Connection, routine: str, size: int) -> None:
    texts.execute("DELETE FROM texts WHERE id = 4")
    result = call(texts, routine, "public.texts.q", "public.out.o", {"batch_size": size})
    assert (result["rows"], result["succeeded"]) == (3, 3)
    assert column(texts, "SELECT id FROM out ORDER BY 1") == [1, 3, 5]


def test_long_keys_of_others_fill_nobody_s_memory(texts: Connection, local_sockets: Path) -> None:
    texts.execute(
        "CREATE TABLE keyed (id text PRIMARY KEY, q text);"
        "INSERT INTO keyed SELECT repeat('x', 100000) || lpad(i::text, 3, '0'), 'one' FROM generate_series(1, 90) AS i"
    )

    def each(client: socket.socket, request: bytes) -> None:
        inputs = json.loads(request.partition(b"\r\n\r\n")[2])["input"]
        reply(embeddings(*([1.0, 0.0] for _ in inputs)))(client, request)

    with hostile(local_sockets, each, owner=texts) as server:
        result = call(texts, "ml_embed_table", "public.keyed.q", "public.keyed.e", {"batch_size": 100})
        assert (result["succeeded"], result["failed"]) == (90, 0)
        # 9 MB of keys, of which 4 MB are read at once
        assert len(server.requests) == 1 + 3  # the first asks for the dimensions


def test_inside_a_transaction_block_nothing_is_committed(texts: Connection, db: Database) -> None:
    other = db.connect()
    other.autocommit = False
    call(other, "ml_generate_table", "public.texts.q", "public.texts.g", {"batch_size": 1})
    other.rollback()
    assert column(texts, "SELECT count(*) FROM pg_attribute WHERE attrelid = 'texts'::regclass AND attname = 'g'") == [
        0
    ]


def test_batches_are_committed_as_they_end_and_the_next_call_goes_on(texts: Connection, db: Database) -> None:
    texts.execute("INSERT INTO texts SELECT i, 'text ' || i FROM generate_series(10, 40) AS i")
    worker = db.connect()
    options = {"batch_size": 1, "model_id": "fake-generate-slow", "max_tokens": 6}
    working = Background(lambda: call(worker, "ml_generate_table", "public.texts.q", "public.texts.g", options))
    deadline = time.monotonic() + 30
    done = 0
    while done < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        if column(texts, "SELECT count(*) FROM pg_attribute WHERE attrelid = 'texts'::regclass AND attname = 'g'") == [
            1
        ]:
            done = column(texts, "SELECT count(*) FROM texts WHERE g IS NOT NULL")[0]
    worker.cancel()
    with pytest.raises(psycopg.errors.QueryCanceled):
        working.result()
    left = column(texts, "SELECT count(*) FROM texts WHERE q IS NOT NULL AND g IS NULL")[0]
    assert done >= 2
    assert 0 < left < 35
    result = call(texts, "ml_generate_table", "public.texts.q", "public.texts.g", {"max_tokens": 2})
    assert result["rows"] in (left, left + 1)  # the row of blanks, had its turn come, is tried again


@pytest.mark.parametrize("routine", ["ml_generate_table", "ml_embed_table"])
def test_two_calls_at_once_leave_an_answer_and_no_error(texts: Connection, db: Database, routine: str) -> None:
    texts.execute("INSERT INTO texts SELECT i, 'text ' || i FROM generate_series(10, 300) AS i")
    texts.execute("DELETE FROM texts WHERE q !~ '\\S'")
    call(texts, routine, "public.texts.q", "public.results.r")
    texts.execute("DELETE FROM results")
    # both have found the rows without a result, and each has inserted what the other is about to
    first, second = db.connect(), db.connect()
    first.execute("BEGIN")
    assert call(first, routine, "public.texts.q", "public.results.r")["failed"] == 0
    running = Background(lambda: call(second, routine, "public.texts.q", "public.results.r"))
    wait_until(lambda: waits_for_a_lock(texts, second), 30)
    first.execute("COMMIT")
    assert running.result(60)["failed"] == 0
    assert column(texts, "SELECT count(*) FROM results WHERE r IS NOT NULL") == [294]
    if routine == "ml_generate_table":
        assert column(texts, "SELECT count(*) FROM results WHERE r ->> 'error' IS NOT NULL") == [0]


@pytest.mark.parametrize("target", ["public.results.r", "public.texts.r"])
@pytest.mark.parametrize("routine", ["ml_rag_table", "ml_generate_table"])
def test_the_later_of_two_calls_fails_and_leaves_the_results_of_the_other(
    texts: Connection, db: Database, target: str, routine: str
) -> None:
    table = target.rpartition(".")[0]
    texts.execute("UPDATE texts SET q = 'ok' WHERE id = 4")
    call(texts, routine, "public.texts.q", target)
    texts.execute(
        "DELETE FROM results WHERE id <> 5" if "results" in target else "UPDATE texts SET r = NULL WHERE id <> 5"
    )
    first, second = db.connect(), db.connect()
    first.execute("BEGIN")
    assert call(first, routine, "public.texts.q", target)["succeeded"] == 3
    # the second has found the rows without a result, fails at each, and waits for the first to say so
    second.execute("BEGIN")
    second.execute("UPDATE ml_rag.setting_value SET value = 'fake-generate-error' WHERE name = 'generate_model_id'")
    running = Background(lambda: call(second, routine, "public.texts.q", target))
    wait_until(lambda: running.ended or waits_for_a_lock(texts, second), 30)
    first.execute("COMMIT")
    result = running.result(60)
    second.execute("COMMIT")
    assert column(texts, f"SELECT count(*) FROM {table} WHERE r IS NOT NULL AND r ->> 'error' IS NULL") == [4]
    assert (result["rows"], result["failed"]) == (3, 0)


def test_blank_texts_are_tried_again_and_null_ones_left_out(texts: Connection) -> None:
    for _ in range(2):
        result = call(texts, "ml_generate_table", "public.texts.q", "public.texts.g")
        assert result["failed"] == 1
    assert result["rows"] == 1
    texts.execute("UPDATE texts SET q = NULL, g = NULL WHERE id = 4")
    assert call(texts, "ml_generate_table", "public.texts.q", "public.texts.g")["rows"] == 0


@pytest.mark.parametrize("target", ["public.results.r", "public.texts.r"])
def test_a_row_that_goes_away_while_it_fails_is_counted_and_stops_nothing(
    texts: Connection, db: Database, target: str
) -> None:
    call(texts, "ml_generate_table", "public.texts.q", target)
    table = target.rpartition(".")[0]
    texts.execute(f"UPDATE {table} SET r = NULL")
    texts.execute(
        f"CREATE FUNCTION leave_out() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        f"CREATE TRIGGER t BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION leave_out()"
    )
    result = call(texts, "ml_generate_table", "public.texts.q", target, {"model_id": "fake-generate-error"})
    assert (result["rows"], result["failed"]) == (4, 4)


def test_a_result_that_the_output_table_does_not_take_is_an_error(texts: Connection) -> None:
    texts.execute("CREATE TABLE results (id integer PRIMARY KEY, r vector(16), mark integer DEFAULT 1 UNIQUE)")
    result = call(texts, "ml_embed_table", "public.texts.q", "public.results.r")
    assert result["succeeded"] == 1
    assert "23505" in result["first_error"]
    assert result["failed"] == 3
    assert column(texts, "SELECT count(*) FROM results") == [1]


def test_a_lost_model_server_ends_the_call_and_keeps_what_was_computed(texts: Connection, reachable_dir: Path) -> None:
    call(texts, "ml_generate_table", "public.texts.q", "public.texts.g")
    texts.execute("UPDATE texts SET g = NULL WHERE id > 1")
    texts.execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{reachable_dir}/nobody",))
    with error("08006"):
        call(texts, "ml_generate_table", "public.texts.q", "public.texts.g")
    assert column(texts, "SELECT id FROM texts WHERE g IS NOT NULL") == [1]


def test_a_timeout_ends_a_batch_that_is_being_embedded(texts: Connection, local_sockets: Path) -> None:
    """The statement is cancelled once: the rows must not be tried one by one after that."""

    def one_at_a_time_only(client: socket.socket, request: bytes) -> None:
        inputs = json.loads(request.partition(b"\r\n\r\n")[2])["input"]
        (silent if len(inputs) > 1 else reply(embeddings([1.0, 0.0])))(client, request)

    # a session's first call may take longer than the timeout: it loads modules
    call(texts, "ml_embed_table", "public.texts.q", "public.texts.e")
    texts.execute("ALTER TABLE texts DROP COLUMN e CASCADE")
    with hostile(local_sockets, one_at_a_time_only, owner=texts) as server:
        texts.execute("SET statement_timeout = '1s'")
        with error("57014", "statement timeout"):
            call(texts, "ml_embed_table", "public.texts.q", "public.texts.e")
        texts.execute("RESET statement_timeout")
        assert len(server.requests) == 2


def test_a_hostile_search_path_captures_nothing(texts: Connection, db: Database) -> None:
    texts.execute("CREATE SCHEMA evil; GRANT ALL ON SCHEMA evil TO PUBLIC")
    texts.execute(
        "CREATE FUNCTION evil.steal(text, text) RETURNS boolean LANGUAGE plpgsql AS "
        "$$BEGIN RAISE 'captured'; END$$; "
        "CREATE OPERATOR evil.= (FUNCTION = evil.steal, LEFTARG = text, RIGHTARG = text)"
    )
    connection = db.connect()
    connection.execute("SET search_path = evil, public, pg_catalog")
    assert call(connection, "ml_embed_table", "public.texts.q", "public.texts.e")["succeeded"] == 3


def test_two_calls_for_one_column_that_has_no_model_yet(db: Database, texts: Connection, models: ModelsServer) -> None:
    """The second one waits for the lock, and finds the model of the first."""
    other, watcher = db.connect(), db.connect()
    texts.execute("ALTER TABLE texts ADD v vector(16)")
    with texts.transaction():
        call(texts, "ml_embed_table", "public.texts.q", "public.texts.v")
        options = {"embed_model_id": "other"}
        second = Background(lambda: call(other, "ml_embed_table", "public.texts.q", "public.texts.v", options))
        wait_until(lambda: waits_for_a_lock(watcher, other))
    with error("22023", "holds vectors of another model", "It holds vectors of fake-embed; the call is for other"):
        second.result()


@pytest.mark.parametrize("routine", ["ml_embed_table", "ml_rag_table"])
def test_a_column_of_vectors_that_is_created_again_during_a_call(
    db: Database, texts: Connection, models: ModelsServer, routine: str
) -> None:
    """Its vectors are of another model, and are neither overwritten nor searched with."""
    other, watcher = db.connect(), db.connect()
    texts.execute("DELETE FROM texts WHERE id IN (2, 4); ALTER TABLE texts ADD v vector(16)")
    texts.execute("COMMENT ON COLUMN texts.v IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    target, options = "public.texts.v", {"embed_model_id": "fake-embed", "batch_size": 1}
    if routine == "ml_rag_table":
        call(texts, "ml_embed_table", "public.texts.q", target)
        target, options = "public.texts.a", {"embed_column": "v", "skip_generate": True, "batch_size": 1}

    def again() -> None:
        with other.transaction():
            other.execute("ALTER TABLE texts DROP COLUMN v CASCADE")
            call(other, "ml_embed_table", "public.texts.q", "public.texts.v", {"embed_model_id": "other"})

    holder = db.connect(autocommit=False)
    holder.execute("SELECT FROM texts WHERE id = 3 FOR UPDATE")
    calling = Background(lambda: call(texts, routine, "public.texts.q", target, options))
    wait_until(lambda: waits_for_a_lock(watcher, texts))
    creating = Background(again)
    wait_until(lambda: waits_for_a_lock(watcher, other))
    holder.rollback()
    with error(
        "55000", 'column "v" of vectors was dropped, created again or marked', "It was of fake-embed, and is of other"
    ):
        calling.result()
    creating.result()
    found = texts.execute("SELECT q, v::real[] FROM texts").fetchall()
    assert dict(found) == {text: pytest.approx(embedding(text, "other"), abs=1e-6) for text, _ in found}


# -- columns beside that of the input ----------------------------------------------------------------------------------


def test_questions_may_bring_their_embeddings(texts: Connection) -> None:
    call(texts, "ml_embed_table", "public.texts.q", "public.texts.v")
    # the question of the first row is searched with what is the embedding of another
    texts.execute("UPDATE texts SET v = (SELECT v FROM texts WHERE id = 3) WHERE id = 1")
    texts.execute("UPDATE texts SET v = NULL WHERE id = 5")
    options = {"embed_column": "v", "n_citations": 1, "skip_generate": True}
    result = call(texts, "ml_rag_table", "public.texts.q", "public.texts.answer", options)
    assert (result["rows"], result["succeeded"], result["failed"]) == (4, 3, 1)
    segments = dict(texts.execute("SELECT id, answer #>> '{citations,0,segment}' FROM texts WHERE id IN (1, 3, 5)"))
    assert segments == {1: "three", 3: "three", 5: "five six"}


def test_the_model_of_the_embeddings_selects_the_stores(texts: Connection) -> None:
    """It stands in the comment of their column."""
    call(texts, "ml_embed_table", "public.texts.q", "public.texts.v")
    mark(texts, "texts", marker("fake-embed-slow"), "v")
    result = call(
        texts, "ml_rag_table", "public.texts.q", "public.texts.a", {"embed_column": "v", "skip_generate": True}
    )
    assert result["failed"] == 4
    assert "P0002" in column(texts, "SELECT a ->> 'error' FROM texts WHERE id = 1")[0]


@pytest.mark.parametrize(
    ("options", "state", "words"),
    [
        ({"embed_column": "w"}, "42703", ("w", "Its columns: id, q, v", 'Did you mean "q"?')),
        ({"embed_column": "q"}, "22023", ("vector or halfvec", "ml_embed_table")),
        ({"embed_column": "v", "query_embedding": [1.0] * 16}, "22023", ("query_embedding",)),
        ({"fail_on_embedding_error": "x"}, "22023", ("fail_on_embedding_error",)),
    ],
)
def test_an_embedding_column_that_is_none(texts: Connection, options: Any, state: str, words: tuple[str, ...]) -> None:
    texts.execute("ALTER TABLE texts ADD COLUMN v vector(16)")
    with error(state, *words):
        call(texts, "ml_rag_table", "public.texts.q", "public.texts.answer", options)
    assert column(
        texts, "SELECT count(*) FROM pg_attribute WHERE attrelid = 'texts'::regclass AND attname = 'answer'"
    ) == [0]


def test_a_question_that_cannot_be_embedded_ends_the_call_where_that_is_asked_for(texts: Connection) -> None:
    options = {"skip_generate": True, "batch_size": 1, "fail_on_embedding_error": True}
    with error("22023", "the text to embed is empty"):
        call(texts, "ml_rag_table", "public.texts.q", "public.texts.answer", options)
    # finished batches are kept
    assert column(texts, "SELECT id FROM texts WHERE answer IS NOT NULL ORDER BY id") == [1, 3]
    # other errors are those of their rows
    texts.execute("UPDATE texts SET q = 'four' WHERE id = 4")
    options = {**options, "skip_generate": False, "model_options": {"model_id": "fake-generate-error"}}
    result = call(texts, "ml_rag_table", "public.texts.q", "public.texts.answer", options)
    assert (result["succeeded"], result["failed"]) == (0, 2)


def test_each_row_may_have_its_context(texts: Connection) -> None:
    texts.execute("ALTER TABLE texts ADD COLUMN about text; UPDATE texts SET about = 'all about ' || q WHERE id = 1")
    call(texts, "ml_generate_table", "public.texts.q", "public.texts.answer", {"context_column": "about"})
    answers = dict(texts.execute("SELECT id, answer ->> 'text' FROM texts WHERE id IN (1, 3)"))
    with_context = texts.execute("SELECT ml_generate('one two', '{\"context\": \"all about one two\"}') ->> 'text'")
    assert answers[1] == with_context.fetchall()[0][0]
    assert answers[3] == texts.execute("SELECT ml_generate('three') ->> 'text'").fetchall()[0][0]
    with error("42703", 'Did you mean "about"?'):
        call(texts, "ml_generate_table", "public.texts.q", "public.texts.b", {"context_column": "abuot"})
    with error("22023", "context_column"):
        call(
            texts, "ml_generate_table", "public.texts.q", "public.texts.b", {"context_column": "about", "context": "x"}
        )


@pytest.mark.parametrize("target", ["texts", "out"])
def test_the_errors_of_rows_that_are_not_embedded(texts: Connection, target: str) -> None:
    long = " ".join(["a"] * 257)
    texts.execute("INSERT INTO texts VALUES (6, %s)", (long,))
    options = {"truncate": False, "details_column": "details"}
    result = call(texts, "ml_embed_table", "public.texts.q", f"public.{target}.v", options)
    assert (result["rows"], result["succeeded"], result["failed"]) == (5, 3, 2)
    rows = dict(texts.execute(f"SELECT id, details FROM {target} WHERE details IS NOT NULL"))
    assert set(rows) == {4, 6}
    assert rows[4].startswith("the text to embed is empty (22023)")
    assert "257 tokens; the model takes in 256" in rows[6]
    assert sorted(column(texts, f"SELECT id FROM {target} WHERE v IS NOT NULL")) == [1, 3, 5]
    # a row that succeeds has none any more
    texts.execute("UPDATE texts SET q = 'four' WHERE id = 4")
    with warnings_of(texts) as caught:
        call(texts, "ml_embed_table", "public.texts.q", f"public.{target}.v", {**options, "truncate": True})
    assert ("WARNING", "01000", "the model cut the texts of 1 rows") in caught
    assert column(texts, f"SELECT count(*) FROM {target} WHERE details IS NOT NULL") == [0]
    assert sorted(column(texts, f"SELECT id FROM {target} WHERE v IS NOT NULL")) == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["v", "id", "q", "number"])
def test_a_details_column_that_is_none(texts: Connection, name: str) -> None:
    texts.execute("ALTER TABLE texts ADD COLUMN number integer")
    with error("22023", "details_column"):
        call(texts, "ml_embed_table", "public.texts.q", "public.texts.v", {"details_column": name})


@pytest.mark.fresh
@pytest.mark.parametrize("kind", ["citext", 'citext COLLATE "C"', "email"])
def test_every_row_once_by_a_key_of_an_extension_s_type(texts: Connection, kind: str) -> None:
    """Its order is not that of its text."""
    texts.execute("CREATE SCHEMA apart; CREATE EXTENSION citext SCHEMA apart; CREATE DOMAIN email AS apart.citext")
    type_name = kind.replace("citext", "apart.citext")
    texts.execute(f'CREATE TABLE users (id {type_name} PRIMARY KEY, "a % b" text)'.encode())
    texts.execute("INSERT INTO users SELECT c, 'text' FROM unnest(ARRAY['A', 'b', 'C', 'd', 'E']) AS c")
    texts.execute("CALL ml_embed_table('public.users.\"a % b\"', 'public.users.v', '{\"batch_size\": 2}')")
    assert texts.execute("SELECT FROM users WHERE v IS NULL").fetchall() == []


@pytest.mark.parametrize(
    ("kind", "value", "settings"),
    [
        # CST is the United States' where it is read
        ("timestamptz", "'2026-01-01 00:00Z'::timestamptz + i * interval '30 min'", "DateStyle = 'Postgres'"),
        ("timestamptz", "'2026-01-01 00:00Z'::timestamptz + i * interval '30 min'", "DateStyle = 'SQL'"),
        ("float8", "i * 0.1::float8", "extra_float_digits = 0"),
    ],
)
def test_every_row_by_its_key_whatever_the_session_writes_it_like(
    texts: Connection, kind: str, value: str, settings: str
) -> None:
    texts.execute(f"CREATE TABLE events (at {kind} PRIMARY KEY, note text); SET TimeZone = 'Asia/Shanghai'")
    texts.execute(f"INSERT INTO events SELECT {value}, 'note ' || i FROM generate_series(1, 40) AS i")
    texts.execute(f"SET {settings}")
    call(texts, "ml_generate_table", "public.events.note", "public.notes.answer", {"batch_size": 7})
    found = texts.execute("SELECT note, answer ->> 'text' FROM events LEFT JOIN notes USING (at)").fetchall()
    assert len(found) == 40
    for note, answer in found:
        assert note in answer
    call(texts, "ml_embed_table", "public.events.note", "public.events.v", {"batch_size": 7})
    assert texts.execute("SELECT FROM events WHERE v IS NULL").fetchall() == []
