"""What a call names keeps its name, whatever the call waits for, and types of keys are not named by their domains.

The owner of a schema, a table or a domain renames it during the call; another role, which may create there, takes the
name, and what has it then runs code with the rights of whoever reads it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database, is_waiting, noticed, value_of
from support.models_server import ModelsServer
from support.processes import Background, wait_until
from support.schema import SqlModel, ask
from support.schemas import locks_schemas, owners, renamed, taken
from support.stores import create_store, error, fake_embedding, search
from support.vectorizers import create

GENERATE = "CALL ml_generate_table('kb.asked.question', 'kb.asked.answer', '{\"model_id\": \"fake-generate\"}')"
CALLS: dict[str, str] = {
    "ml_generate_table": GENERATE,
    "run_vectorizer": "CALL ml_rag.run_vectorizer('kb.items', '{\"batch_size\": 1}')",
    "an immediate vectorizer": "INSERT INTO kb.items (id, question) SELECT i, 'x' || i FROM generate_series(5, 600) i",
    "create_node_group": "CALL ml_rag.create_node_group('kb.docs', 'p', '{\"transform\": \"sentence\"}')",
    "a new table": "CALL ml_embed_table('kb.asked.question', 'kb.made.v', '{\"embed_model_id\": \"fake-embed\"}')",
}


@pytest.fixture
def taker(db: Database, owner: Connection) -> Connection:
    """May create schemas and in public, and has a schema; the tables of the owner are in schema kb."""
    tenant = db.role("tenant")
    owner.execute(f"GRANT CREATE ON DATABASE {db.name} TO {tenant}; CREATE SCHEMA own AUTHORIZATION {tenant}")
    owner.execute(f"CREATE SCHEMA kb; GRANT USAGE ON SCHEMA kb TO PUBLIC; GRANT CREATE ON SCHEMA public TO {tenant}")
    connection = db.connect("tenant")
    connection.execute(
        "GRANT USAGE ON SCHEMA own TO PUBLIC; CREATE SCHEMA planted; GRANT USAGE ON SCHEMA planted TO PUBLIC;"
        "CREATE FUNCTION own.evil(integer) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$;"
        "CREATE FUNCTION own.evil() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN NEW; END $$"
    )
    return connection


def plant_store(taker: Connection) -> None:
    create_store(taker, "planted.base", [("e", 1, 1, "false", fake_embedding("zebra"))], "vector(16)")
    taker.execute(
        "CREATE VIEW planted.docs AS SELECT * FROM planted.base WHERE own.evil(1); GRANT ALL ON planted.docs TO PUBLIC;"
        "COMMENT ON COLUMN planted.docs.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'"
    )


def runs_no_code(said: list[str], call: Callable[[], Any]) -> None:
    """Whatever else comes of the call."""
    with contextlib.suppress(psycopg.errors.UndefinedTable):
        call()
    assert not any("ran as" in message for message in said), said


@pytest.mark.parametrize("what", ["its schema", "the domain"])
@pytest.mark.parametrize("how", CALLS)
def test_a_domain_of_a_key_is_another_s_by_now(
    db: Database, owner: Connection, taker: Connection, model: SqlModel, how: str, what: str
) -> None:
    owner.execute(
        "CREATE SCHEMA types; GRANT USAGE ON SCHEMA types TO PUBLIC; CREATE DOMAIN types.d AS integer;"
        "CREATE DOMAIN public.d AS integer"
    )
    type_name = "types.d" if what == "its schema" else "public.d"
    for name in ("asked", "items", "docs"):
        owner.execute(
            f"CREATE TABLE kb.{name} (id {type_name} PRIMARY KEY, question text, answer jsonb);"
            f"INSERT INTO kb.{name} VALUES (1, 'lamp'), (2, 'tent'); GRANT ALL ON kb.{name} TO PUBLIC;"
            f"REVOKE TRIGGER, REFERENCES ON kb.{name} FROM PUBLIC".encode()
        )
    owner.execute(
        "ALTER TABLE kb.docs RENAME question TO segment; ALTER TABLE kb.docs ADD segment_embedding vector(16)"
    )
    owner.execute("COMMENT ON COLUMN kb.docs.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    create(owner, "kb.items", "question", mode="immediate" if "immediate" in how else "deferred", keyword_search=False)
    done: list[None] = []

    def exchange(_: Any = None) -> str:
        if not done:
            done.append(None)
            if what == "its schema" and renamed(owner, "types", "former"):
                taker.execute("CREATE SCHEMA types; GRANT USAGE ON SCHEMA types TO PUBLIC")
                taker.execute("CREATE DOMAIN types.d AS integer CHECK (own.evil(VALUE))")
            elif what == "the domain":
                owner.execute("ALTER DOMAIN public.d RENAME TO former")
                taker.execute("CREATE DOMAIN public.d AS integer CHECK (own.evil(VALUE))")
        return "x"

    model.meanwhile = lambda: exchange()
    model.answers = [exchange]
    caller = db.connect("asker" if "immediate" in how else None)
    said = noticed(caller)
    runs_no_code(said, lambda: caller.execute(CALLS[how].encode()))
    assert done


WORDS = {"vector_store": ["kb.docs"], "semantic_search": False, "model_options": {"model_id": "fake-generate"}}
EVALUATE = json.dumps({"options": WORDS | {"keyword_search": True}, "keep": False, "generate": True})
SEARCHES: dict[str, str] = {
    "words of several questions": f"SELECT ml_rag_evaluate('SELECT id, question FROM asked', '{EVALUATE}')",
    "make_questions": "SELECT * FROM ml_rag.make_questions('kb.docs',"
    ' \'{"n": 0, "unanswerable": 1, "model_id": "fake-generate"}\')',
    "tune_index": "SELECT * FROM ml_rag.tune_index('kb.docs',"
    " '{\"keep\": false, \"questions\": \"SELECT ''zebra'' AS question\"}')",
    "why_not": "SELECT * FROM ml_rag.why_not('zebra', '{\"vector_store\": [\"kb.docs\"]}', 'd')",
    "ml_rag_table": "CALL ml_rag_table('public.asked.question', 'public.asked.answer',"
    ' \'{"vector_store": ["kb.docs"], "model_options": {"model_id": "fake-generate"}}\')',
}


@pytest.mark.parametrize("role", ["asker", None])
@pytest.mark.parametrize("how", SEARCHES)
def test_a_store_that_is_searched_several_times(
    db: Database, owner: Connection, taker: Connection, model: SqlModel, how: str, role: str | None
) -> None:
    create_store(owner, "kb.docs", [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    plant_store(taker)
    owner.execute(
        "SELECT ml_rag.index_store('kb.docs'); SELECT ml_rag.enable_keyword_search('kb.docs');"
        "CREATE TABLE asked (id integer PRIMARY KEY, question text, answer jsonb);"
        "INSERT INTO asked VALUES (1, 'zebra'), (2, 'zebra'); GRANT ALL ON asked TO PUBLIC"
    )
    done: list[bool] = []

    def exchange(_: Any = None) -> str:
        if not done:
            done.append(taken(owner, taker))
        return json.dumps({"question": "what zebra?", "answer": "zebra", "is_answered": False})

    model.meanwhile = lambda: exchange()
    model.answers = [exchange]
    caller = db.connect(role)
    said = noticed(caller)
    runs_no_code(said, lambda: caller.execute(SEARCHES[how].encode()))
    assert done == [not locks_schemas(db)]


@pytest.mark.parametrize("name", ["public.docs", "public.Docs"])
@pytest.mark.parametrize("role", ["asker", None])
def test_a_named_store_that_is_another_table_after_a_commit(
    db: Database, owner: Connection, taker: Connection, model: SqlModel, role: str | None, name: str
) -> None:
    table = {"public.docs": "public.docs", "public.Docs": 'public."Docs"'}[name]
    create_store(owner, name, [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    plant_store(taker)
    owner.execute(
        "CREATE TABLE asked (id integer PRIMARY KEY, question text, answer jsonb); GRANT ALL ON asked TO PUBLIC;"
        "INSERT INTO asked SELECT i, 'zebra' FROM generate_series(1, 6) AS i"
    )
    exchanged: list[Background] = []

    def exchange(_: Any = None) -> str:
        if not exchanged:  # which waits for the end of a batch
            exchanged.append(
                Background(
                    lambda: (
                        owner.execute(f"ALTER TABLE {table} RENAME TO former".encode()),
                        taker.execute(f"CREATE VIEW {table} AS SELECT * FROM planted.docs".encode()),
                    )
                )
            )
            wait_until(lambda: is_waiting(db, owner))
        return "an answer"

    model.answers = [exchange]
    options = {"vector_store": [name], "batch_size": 1, "model_options": {"model_id": "fake-generate"}}
    caller = db.connect(role)
    said = noticed(caller)
    with error("42P01", "does not exist"):
        caller.execute("CALL ml_rag_table('public.asked.question', 'public.asked.answer', %s)", (json.dumps(options),))
    exchanged[0].result()
    assert not any("ran as" in message for message in said), said
    (answered,) = owner.execute("SELECT count(answer) FROM asked").fetchone() or (0,)
    assert 0 < answered < 6


@pytest.mark.parametrize("role", ["asker", None])
def test_the_table_of_the_results(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer, role: str | None
) -> None:
    """It was looked up after the model was asked how many dimensions its vectors have."""
    results = (
        "(id integer PRIMARY KEY, v public.vector(16)); COMMENT ON COLUMN {0}.results.v IS"
        " 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'; GRANT ALL ON {0}.results TO PUBLIC"
    )
    owner.execute(
        "CREATE TABLE asked (id integer PRIMARY KEY, question text); INSERT INTO asked VALUES (1, 'secret');"
        f"GRANT ALL ON asked TO PUBLIC; CREATE TABLE kb.results {results.format('kb')}".encode()
    )
    taker.execute(f"CREATE TABLE planted.results {results.format('planted')}".encode())
    taker.execute("CREATE TRIGGER t BEFORE INSERT ON planted.results EXECUTE FUNCTION own.evil()")
    caller = db.connect(role)
    said = noticed(caller)
    models.before[len(models.requests)] = lambda: taken(owner, taker)
    embed = "CALL ml_embed_table('public.asked.question', 'kb.results.v', '{\"embed_model_id\": \"fake-embed\"}')"
    runs_no_code(said, lambda: caller.execute(embed))
    assert taker.execute("SELECT FROM planted.results").fetchall() == [] or owners(owner) == "former"


@pytest.mark.parametrize("change", ["an empty text", "another text"])
def test_statements_that_follow_the_writing_of_a_batch(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer, change: str
) -> None:
    """A trigger of the table waits meanwhile."""
    owner.execute(
        "CREATE TABLE kb.items (id integer PRIMARY KEY, name text); INSERT INTO kb.items VALUES (1, 'lamp'), (2, '');"
        "CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.segment_embedding IS NOT NULL THEN PERFORM pg_advisory_xact_lock_shared(4711);"
        f" {'' if change == 'an empty text' else 'NEW.name := $a$other$a$;'} END IF; RETURN NEW; END $$".encode()
    )
    create(owner, "kb.items", "name", keyword_search=False)
    when = "AFTER" if change == "an empty text" else "BEFORE"
    owner.execute(f"CREATE TRIGGER a {when} UPDATE ON kb.items FOR EACH ROW EXECUTE FUNCTION public.wait()".encode())
    columns = "1 AS id, ''::text AS name, ''::text AS segment, 'd' AS document_name"
    taker.execute(
        f"CREATE TABLE planted.items AS SELECT {columns}, NULL::public.vector(16) AS segment_embedding;"
        "CREATE TRIGGER t BEFORE UPDATE ON planted.items FOR EACH STATEMENT EXECUTE FUNCTION own.evil();"
        "GRANT ALL ON planted.items TO PUBLIC".encode()
    )
    caller, locker = db.connect(), db.connect()
    said = noticed(caller)
    locker.execute("SELECT pg_advisory_lock(4711)")
    call = Background(lambda: caller.execute("CALL ml_rag.run_vectorizer('kb.items')"))
    wait_until(lambda: is_waiting(db, caller))
    taken(owner, taker)
    locker.execute("SELECT pg_advisory_unlock(4711)")
    runs_no_code(said, call.result)
    stale = f"SELECT FROM {owners(owner)}.items WHERE segment = 'other' AND segment_embedding IS NOT NULL"
    assert owner.execute(stale.encode()).fetchall() == []


def test_temporary_tables(owner: Connection, model: SqlModel) -> None:
    """Their schema has another name for the session than in the catalog."""
    create_store(owner, "pg_temp.docs", [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    owner.execute(
        "CREATE TEMP TABLE asked (id integer PRIMARY KEY, question text, answer jsonb, v vector(16));"
        "INSERT INTO asked VALUES (1, 'zebra')"
    )
    model.answers = ["an answer"]
    name = value_of(owner, "SELECT pg_my_temp_schema()::regnamespace::text || '.docs'")
    assert [row[5] for row in search(owner, "zebra", {"vector_store": [name]})] == ["zebra"]
    assert [row[5] for row in search(owner, "zebra")] == ["zebra"]
    owner.execute("SELECT ml_rag.index_store('docs')")
    generate = "CALL ml_generate_table('asked.question', 'asked.answer', '{\"model_id\": \"fake-generate\"}')"
    owner.execute(generate.replace("asked.", "pg_temp.asked."))
    assert owner.execute("SELECT answer ->> 'text' FROM asked").fetchone() == ("an answer",)


def test_a_schema_that_is_locked_is_waited_for_once(db: Database, owner: Connection, taker: Connection) -> None:
    """Not for each of the stores in it, which the call does not name; and not for all stores that have vectors."""
    for name in ("kb.a", "kb.b", "kb.c", "kb.d", "docs"):
        create_store(owner, name, [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    locker, asker = db.connect(), db.connect("asker")
    locker.execute("BEGIN; ALTER SCHEMA kb RENAME TO former")
    left_out = noticed(asker)
    search(asker, "zebra")  # the locks of a first search
    del left_out[:]
    asker.execute("SET statement_timeout = '3s'")
    assert [row[5] for row in search(asker, "zebra")] == ["zebra"]
    assert len(left_out) == (4 if locks_schemas(db) else 0)
    locker.execute("ROLLBACK; BEGIN; ALTER SCHEMA public OWNER TO CURRENT_USER")
    assert len(search(asker, "zebra", {"vector_store": ["kb.a", "kb.b"]})) == 2


def test_a_table_that_was_being_renamed_when_the_call_began(
    db: Database, owner: Connection, taker: Connection, model: SqlModel
) -> None:
    """The call waits for its schema, then for itself."""
    asked = "(id integer PRIMARY KEY, question text, answer jsonb); INSERT INTO {0}.asked VALUES (1, 'x')"
    owner.execute(f"CREATE TABLE kb.asked {asked.format('kb')}".encode())
    taker.execute(
        f"CREATE TABLE planted.asked {asked.format('planted')}; GRANT ALL ON planted.asked TO PUBLIC;"
        "CREATE TRIGGER t BEFORE UPDATE ON planted.asked EXECUTE FUNCTION own.evil()".encode()
    )
    model.answers = ["an answer"]
    caller, renamer, locker = db.connect(), db.connect(), db.connect()
    said = noticed(caller)
    locker.execute("BEGIN; LOCK TABLE kb.asked IN ACCESS EXCLUSIVE MODE")
    renamer.execute("BEGIN; ALTER SCHEMA kb RENAME TO former")
    call = Background(lambda: caller.execute(GENERATE.encode()))
    wait_until(lambda: is_waiting(db, caller))
    renamer.execute("COMMIT")
    taker.execute("ALTER SCHEMA planted RENAME TO kb")
    locker.execute("ROLLBACK")
    runs_no_code(said, call.result)


@pytest.mark.parametrize("how", ["make_questions", "tune_index"])
def test_a_store_that_was_being_renamed_when_the_call_began(
    db: Database, owner: Connection, taker: Connection, model: SqlModel, how: str
) -> None:
    create_store(owner, "kb.docs", [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    owner.execute("SELECT ml_rag.index_store('kb.docs')")
    plant_store(taker)
    caller, renamer = db.connect(), db.connect()
    said = noticed(caller)
    renamer.execute("BEGIN; ALTER SCHEMA kb RENAME TO former")
    call = Background(lambda: caller.execute(SEARCHES[how].encode()))
    wait_until(lambda: is_waiting(db, caller) or call.ended)
    renamer.execute("COMMIT")
    model.answers = [json.dumps({"question": "what zebra?", "answer": "zebra", "is_answered": False})]

    def take() -> None:
        if value_of(owner, "SELECT to_regnamespace('kb') IS NULL"):
            taker.execute("ALTER SCHEMA planted RENAME TO kb")

    model.meanwhile = take
    runs_no_code(said, call.result)


def test_a_preset_of_a_superuser_that_names_a_store(db: Database, owner: Connection, taker: Connection) -> None:
    """What is judged is what is searched: another store is waited for between the two."""
    owner.execute("CREATE SCHEMA aaa")
    for name in ("kb.docs", "aaa.docs"):
        create_store(owner, name, [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    owner.execute('SELECT ml_rag.create_preset(\'p\', \'{"vector_store": ["kb.docs", "aaa.docs"]}\')')
    plant_store(taker)
    caller, renamer, locker = db.connect(), db.connect(), db.connect()
    said = noticed(caller)
    renamer.execute("BEGIN; ALTER SCHEMA kb RENAME TO former")
    locker.execute("BEGIN; LOCK TABLE aaa.docs IN ACCESS EXCLUSIVE MODE")
    call = Background(lambda: search(caller, "zebra", {"preset": "p"}))
    wait_until(lambda: is_waiting(db, caller))
    renamer.execute("COMMIT")
    wait_until(lambda: is_waiting(db, caller) or call.ended)
    taker.execute("ALTER SCHEMA planted RENAME TO kb")
    locker.execute("ROLLBACK")
    with contextlib.suppress(psycopg.Error):
        assert "false" not in str(call.result())
    assert not any("ran as" in message for message in said), said


@pytest.mark.parametrize("held", ["DELETE FROM kb.docs", "SELECT FROM kb.docs FOR UPDATE"])
def test_a_document_whose_rows_are_waited_for(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer, held: str
) -> None:
    create_store(owner, "kb.docs", [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    plant_store(taker)
    caller, locker = db.connect(), db.connect()
    said = noticed(caller)
    locker.execute(f"BEGIN; {held}".encode())
    call = Background(lambda: caller.execute("SELECT ml_rag.load_document('kb.docs', 'd', 'a lamp'::bytea)"))
    wait_until(lambda: is_waiting(db, caller))
    taken(owner, taker)
    locker.execute("COMMIT")
    runs_no_code(said, call.result)


def test_the_second_uri_goes_into_the_store_of_the_first(owner: Connection, taker: Connection, folder: Path) -> None:
    """Whatever has its name by now."""
    (folder / "one.txt").write_text("a lamp")
    for name in ("docs", "other"):
        create_store(owner, f"kb.{name}", [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    store = value_of(owner, "SELECT 'kb.other'::regclass::oid::bigint")
    begin = 'SELECT ml_rag._begin_load(%s, \'{"schema_name": "kb", "table_name": "docs"}\', \'{kb}\', %s)'
    job = value_of(owner, begin, (f"file://{folder}/one.txt", json.dumps({"store": store})))
    assert job["store"] == store


def test_a_domain_that_is_made_while_a_statement_waits_for_its_tables(
    db: Database, owner: Connection, taker: Connection, model: SqlModel, shop: Connection
) -> None:
    """To parse a constant runs the CHECK of its domain. Any role can make a table be waited for."""
    holder, queue = db.connect("tenant"), db.connect("tenant")
    holder.execute("CREATE VIEW own.held AS SELECT FROM shop.orders")

    def answer(_: Any) -> dict[str, Any]:
        holder.execute("BEGIN; PREPARE h AS SELECT FROM own.held")
        waiting.append(Background(lambda: queue.execute("CREATE RULE r AS ON INSERT TO shop.orders DO NOTHING")))
        wait_until(lambda: is_waiting(db, queue))
        return {"answerable": True, "sql": "SELECT count(*) FROM shop.orders WHERE id = ANY ('{5}'::own.d[])"}

    waiting: list[Background] = []
    model.answers = [answer]
    caller = db.connect()
    said = noticed(caller)
    asked = Background(lambda: ask(caller, use_retry=False))
    wait_until(lambda: is_waiting(db, caller))
    taker.execute("CREATE DOMAIN own.d AS integer CHECK (own.evil(VALUE))")
    holder.execute("ROLLBACK")
    assert "runs code of an untrusted owner" in asked.result()["reason"]
    assert not any("ran as" in message for message in said), said


@pytest.mark.parametrize("table", ["shop.ORDERS", 'shop."or""ders"'])
def test_a_statement_waits_for_its_tables(
    db: Database, owner: Connection, model: SqlModel, shop: Connection, table: str
) -> None:
    """However it writes their names, and for no others."""
    if '"' in table:
        owner.execute('ALTER TABLE shop.orders RENAME TO "or""ders"')
    owner.execute('CREATE TABLE shop."order" (id integer)')
    model.writes(f"SELECT count(*) FROM {table}")
    caller, locker, other = db.connect(), db.connect(), db.connect()
    other.execute('BEGIN; LOCK TABLE shop."order" IN ACCESS EXCLUSIVE MODE')
    locker.execute(f"BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
    asked = Background(lambda: ask(caller, use_retry=False))
    wait_until(lambda: is_waiting(db, caller))
    asked.join(2)
    assert not asked.ended
    if '"' in table:
        other.execute("ROLLBACK")
    locker.execute("ROLLBACK")
    assert asked.result()["rows"] == [[100]]


@pytest.mark.parametrize(
    "call",
    [
        "SELECT ml_rag.drop_node_group('kb.docs', 'p')", "SELECT ml_rag.index_store('kb.docs')",
        "SELECT ml_rag.drop_vectorizer('kb.items')",
    ],
)  # fmt: skip
def test_what_is_dropped_or_built_is_of_the_table_that_was_meant(
    db: Database, owner: Connection, taker: Connection, models: ModelsServer, call: str
) -> None:
    create_store(owner, "kb.docs", [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    owner.execute("CALL ml_rag.create_node_group('kb.docs', 'p', '{\"transform\": \"sentence\"}')")
    owner.execute("CREATE TABLE kb.items (id integer PRIMARY KEY, name text)")
    create(owner, "kb.items", "name", keyword_search=False)
    taker.execute("CREATE TABLE planted.items (id integer, segment text); CREATE TABLE planted.docs_p (x integer)")
    create_store(taker, "planted.docs", [("e", 1, 1, "false", fake_embedding("zebra"))], "vector(16)")
    columns = (
        "SELECT count(*) FROM pg_attribute WHERE attnum > 0 AND NOT attisdropped"
        " AND attrelid IN ('{0}.items'::regclass, '{0}.docs_p'::regclass)"
    )
    indexes = "SELECT count(*) FROM pg_indexes WHERE tablename = 'docs' AND indexdef ~ 'hnsw' AND schemaname = '{}'"
    caller, locker = db.connect(), db.connect()
    locker.execute("BEGIN; LOCK TABLE kb.docs, kb.items IN ROW EXCLUSIVE MODE; SELECT FROM kb.docs_p")
    done = Background(lambda: caller.execute(call.encode()))
    wait_until(lambda: is_waiting(db, caller))
    exchanged = taken(owner, taker)
    locker.execute("ROLLBACK")
    with error("42P01", "does not exist any more") if exchanged else contextlib.nullcontext():
        done.result()
    name = "kb" if exchanged else "planted"
    assert owner.execute(columns.format(name).encode()).fetchone() == (3,)
    assert owner.execute(indexes.format(name).encode()).fetchone() == (0,)
