"""vectorizer/vectorizer, vectorizer/queue, vectorizer/text, vectorizer/error, vectorizer/status: kept searchable."""

from __future__ import annotations

import functools
import random
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from support.cluster import Connection, Database, noticed, value_of
from support.embeddings import triggers
from support.loading import rows
from support.models_server import ModelsServer
from support.processes import Background
from support.stores import answer, error, search, warnings_of
from support.vectorizers import ITEMS, assert_in_step, create, failures, pending, run


def texts(connection: Connection, relation: str = "items") -> list[Any]:
    return [text for (text,) in connection.execute(f"SELECT segment FROM {relation} ORDER BY 1").fetchall()]


def test_a_table_is_found_by_meaning_and_by_words(items: Connection) -> None:
    assert_in_step(items)
    found = search(items, "lamp: of red glass", {"n_citations": 1})
    assert (found[0][2], found[0][5], float(found[0][6])) == ("public.items/1", "lamp: of red glass", 0)
    found = search(items, "tent", {"semantic_search": False, "keyword_search": True})
    assert [row[2] for row in found] == ["public.items/2"]


def test_the_view_of_vectorizers_stands_beside_a_parallel_plan(items: Connection) -> None:
    """It sets lock_timeout, which no part of one may."""
    items.execute("CREATE TABLE large AS SELECT FROM generate_series(1, 10000); ANALYZE large")
    items.execute(
        "SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0;"
        "SET max_parallel_workers_per_gather = 2"
    )
    assert rows(items, "SELECT (SELECT count(*) FROM ml_rag.vectorizer), count(*) FROM large") == [(1, 10000)]


@pytest.mark.parametrize("destination", ["column", "table"])
@pytest.mark.parametrize("keyword", [False, True])
def test_hits_carry_the_key_of_their_row(
    owner: Connection, asker: Connection, models: ModelsServer, destination: str, keyword: bool
) -> None:
    owner.execute(
        "CREATE TABLE one (number bigint PRIMARY KEY, name text);"
        " CREATE TABLE two (sku text, shop integer, name text, PRIMARY KEY (sku, shop));"
        ' CREATE TABLE three ("the code" uuid PRIMARY KEY, name text)'
    )
    owner.execute(
        "INSERT INTO one VALUES (7, 'lamp'); INSERT INTO two VALUES ('a\"b', 2, 'lamp');"
        " INSERT INTO three VALUES ('00000000-0000-0000-0000-000000000001', 'lamp')"
    )
    wanted = {
        "one": (7, {}),
        "two": (None, {"sku": 'a"b', "shop": 2}),
        "three": (None, {"the code": "00000000-0000-0000-0000-000000000001"}),
    }
    for name, (number, key) in wanted.items():
        create(owner, name, "name", destination=destination, metadata=[])
        run(owner, name)
        store = name if destination == "column" else f"{name}_segments"
        owner.execute(f"GRANT SELECT ON {name}, {store} TO ml_rag_user")
        options = {"vector_store": [store], "keyword_search": keyword}
        ((*_, document_id, _, _, _, metadata, _, _, _),) = search(asker, "lamp", options)
        if number is not None:
            assert document_id == number
        if destination == "column" and name == "three":
            key = None  # a name with a blank cannot stand in a marker
        assert {name: value for name, value in (metadata or {}).items() if name != "page"} == (key or {})
        # current as of the call, and in citations too
        told = answer(asker, "lamp", {**options, "skip_generate": True, "citation_fields": ["document_id", "metadata"]})
        if number is not None:
            assert told["citations"][0]["document_id"] == number
        assert told["citations"][0]["metadata"] == metadata
        if name == "two" and destination == "column":
            owner.execute("UPDATE two SET shop = 3")
            (row,) = search(asker, "lamp", options)
            assert row[7]["shop"] == 3


def test_a_key_that_the_caller_may_not_read_is_not_told(
    owner: Connection, asker: Connection, models: ModelsServer
) -> None:
    owner.execute("CREATE TABLE two (sku text, shop integer, name text, PRIMARY KEY (sku, shop))")
    owner.execute("INSERT INTO two VALUES ('a', 2, 'lamp')")
    create(owner, "two", "name")
    run(owner, "two")
    owner.execute("GRANT SELECT (sku, segment, document_name, segment_embedding) ON two TO ml_rag_user")
    (row,) = search(asker, "lamp")
    assert row[7] == {"sku": "a"}


def test_it_keeps_one_embedding(items: Connection) -> None:
    with error("55000", "vectorizer", "drop_vectorizer('public.items')"):
        items.execute("CALL ml_rag.add_embedding('items', 'more')")


def test_a_text_of_letters_is_not_blank(items: Connection) -> None:
    items.execute("INSERT INTO items VALUES (4, 'v', NULL, 1)")
    items.execute("SELECT ml_rag.drop_vectorizer('public.items')")
    create(items, columns="name")
    run(items)
    assert "v" in texts(items)
    items.execute(r"INSERT INTO items VALUES (5, E'\x0b \t\n', NULL, 1)")
    assert texts(items).count(None) == 1


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("name", "lamp"),
        ("{name}", "lamp"),
        (["name", "notes"], "lamp\nof red glass"),
        ("{{{name}}}, {price}", "{lamp}, 5"),
        ("it's {notes} {notes}", "it's of red glass of red glass"),
    ],
)
def test_columns_or_a_template(owner: Connection, models: ModelsServer, columns: Any, expected: str) -> None:
    owner.execute(ITEMS)
    owner.execute("INSERT INTO items VALUES (1, 'lamp', 'of red glass', 5)")
    create(owner, columns=columns)
    run(owner)
    assert texts(owner) == [expected]
    assert_in_step(owner)


@pytest.mark.parametrize(
    ("key", "values", "name"),
    [
        ("bigint", "(10000000000)", "public.k/10000000000"),
        ("text", "('a, \"b\"')", 'public.k/a, "b"'),
        ("uuid", "('00000000-0000-0000-0000-000000000001')", "public.k/00000000-0000-0000-0000-000000000001"),
    ],
)
def test_any_primary_key(owner: Connection, models: ModelsServer, key: str, values: str, name: str) -> None:
    owner.execute(f"CREATE TABLE k (id {key} PRIMARY KEY, t text DEFAULT 'lamp'); INSERT INTO k VALUES {values}")
    create(owner, "k", "t")
    assert run(owner, "k", batch_size=1)["embedded"] == 1
    assert search(owner, "lamp", {"n_citations": 1})[0][2] == name


def test_a_key_of_several_columns(owner: Connection, models: ModelsServer) -> None:
    owner.execute("CREATE TABLE k (a text, b integer, t text, PRIMARY KEY (a, b))")
    owner.execute(
        "INSERT INTO k SELECT 'a' || i / 4, i, CASE WHEN i % 3 > 0 THEN 'text ' || i END"
        " FROM generate_series(1, 20) AS i"
    )
    create(owner, "k", "t", document_name="{table} {a}-{b}: {key}")
    assert run(owner, "k", batch_size=2) == {
        "relation": "public.k",
        "embedded": 14,
        "failed": 6,
        "pending": 0,
        "seconds": pytest.approx(5, abs=5),
    }
    assert failures(owner)[0] == ("{a0,3}", 1, "22023", "the text is empty", True)
    assert sorted(models.embedded("fake-embed")) == sorted(f"text {i}" for i in range(1, 21) if i % 3)
    assert search(owner, "text 5", {"n_citations": 1})[0][2] == "k a1-5: a1/5"
    assert_in_step(owner, "k")


# -- changes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "embedded"),
    [
        ("INSERT INTO items VALUES (4, 'hat', 'of straw')", ["hat: of straw"]),
        ("UPDATE items SET name = 'lantern' WHERE id = 1", ["lantern: of red glass"]),
        ("UPDATE items SET price = price + 1", []),
        ("UPDATE items SET name = name, notes = notes", []),
        ("UPDATE items SET id = id + 10", []),
        ("DELETE FROM items WHERE id = 1", []),
        ("TRUNCATE items", []),
        ("BEGIN; UPDATE items SET name = 'no'; ROLLBACK", []),
        (
            "BEGIN; SAVEPOINT s; UPDATE items SET name = 'no'; ROLLBACK TO s; INSERT INTO items VALUES (5, 'a', 'b');"
            "COMMIT",
            ["a: b"],
        ),
        (
            "INSERT INTO items VALUES (1, 'x', 'y') ON CONFLICT (id) DO UPDATE SET name = excluded.name",
            ["x: of red glass"],
        ),
        ("INSERT INTO items VALUES (1, 'x', 'y') ON CONFLICT DO NOTHING", []),
        ("UPDATE items SET name = 'a' WHERE id = 1; UPDATE items SET name = 'b' WHERE id = 1", ["b: of red glass"]),
        # back to the text that it had: the embedding was emptied meanwhile
        (
            "UPDATE items SET name = 'a' WHERE id = 1; UPDATE items SET name = 'lamp' WHERE id = 1",
            ["lamp: of red glass"],
        ),
    ],
)
def test_a_change_is_followed_and_nothing_else_is_embedded(
    items: Connection, models: ModelsServer, change: str, embedded: list[str]
) -> None:
    items.execute(change)
    assert pending(items) == len(embedded)
    assert run(items)["embedded"] == len(embedded)
    assert models.embedded("fake-embed") == embedded
    assert_in_step(items)


def test_copy(items: Connection, models: ModelsServer) -> None:
    with items.cursor() as cursor, cursor.copy("COPY items (id, name, notes) FROM STDIN") as copy:
        for i in range(10, 30):
            copy.write_row((i, f"name {i}", "new"))
    assert run(items, batch_size=7)["embedded"] == 20
    assert_in_step(items)


def test_a_row_that_is_out_of_date_is_found_by_its_words_only(items: Connection) -> None:
    items.execute("UPDATE items SET name = 'kettle', notes = 'of copper' WHERE id = 1")
    by_meaning = search(items, "lamp: of red glass", {"n_citations": 10})
    assert {row[2] for row in by_meaning} == {"public.items/2", "public.items/3"}
    by_words = search(items, "kettle", {"semantic_search": False, "keyword_search": True})
    assert [row[5] for row in by_words] == ["kettle: of copper"]
    both = search(items, "kettle: of copper", {"keyword_search": True})
    assert both[0][5] == "kettle: of copper"
    run(items)
    assert search(items, "kettle: of copper", {"n_citations": 1})[0][5] == "kettle: of copper"


def test_other_triggers_of_the_table(items: Connection, models: ModelsServer) -> None:
    items.execute(
        "CREATE FUNCTION loud() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN NEW.name := upper(NEW.name); RETURN NEW; END $$;"
        "CREATE TRIGGER loud BEFORE INSERT OR UPDATE ON items FOR EACH ROW EXECUTE FUNCTION loud()"
    )
    items.execute("UPDATE items SET price = 1 WHERE id = 1")
    run(items)
    assert "LAMP: of red glass" in texts(items)
    assert_in_step(items)


def test_a_trigger_that_changes_the_text_with_the_embedding(owner: Connection, models: ModelsServer) -> None:
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text, p text)")
    create(owner, columns="{name}")
    owner.execute(
        "CREATE FUNCTION changes() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN NEW.name := 'changed'; RETURN NEW; END $$;"
        "CREATE TRIGGER changes BEFORE UPDATE ON items FOR EACH ROW EXECUTE FUNCTION changes();"
        "INSERT INTO items VALUES (1, 'lamp', '(9,9)')"
    )
    run(owner)
    run(owner)
    assert_in_step(owner)
    assert value_of(owner, "SELECT segment FROM items") == "changed"


def test_a_column_of_the_primary_key_is_renamed(items: Connection) -> None:
    run(items)
    with error("55000", "keyword index", "enable_keyword_search"), items.transaction():
        items.execute("ALTER TABLE items RENAME id TO number")
        items.execute("UPDATE items SET name = 'lantern' WHERE number = 1")
    with items.transaction():
        items.execute("ALTER TABLE items RENAME id TO number")
        items.execute("SELECT ml_rag.enable_keyword_search('items')")
    items.execute("UPDATE items SET name = 'lantern' WHERE number = 1")
    assert run(items)["embedded"] == 1
    assert_in_step(items)
    options = {"vector_store": ["items"], "keyword_search": True}
    found = items.execute("SELECT document_name FROM ml_rag_search('lantern', %s)", [Jsonb(options)]).fetchall()
    assert found[0] == ("public.items/1",)


def test_columns_that_are_renamed_dropped_or_of_another_type(items: Connection) -> None:
    items.execute("ALTER TABLE items RENAME name TO title; ALTER TABLE items RENAME TO goods")
    items.execute("UPDATE goods SET title = 'lantern' WHERE id = 1")
    assert run(items, "goods")["embedded"] == 1
    assert_in_step(items, "goods")
    with error("2BP01", ours=False):
        items.execute("ALTER TABLE goods DROP title")
    with error("0A000", ours=False):
        items.execute("ALTER TABLE goods ALTER title TYPE varchar(20)")
    items.execute("ALTER TABLE goods DROP segment_embedding CASCADE")
    with error("55000", "lacks its columns", "drop_vectorizer"):
        run(items, "goods")
    items.execute("SELECT ml_rag.drop_vectorizer('goods')")
    create(items, "goods", "{title}: {notes}")
    assert run(items, "goods")["embedded"] == 3


def test_a_failure_is_known_in_any_style_of_dates(owner: Connection, models: ModelsServer) -> None:
    owner.execute("CREATE TABLE items (day date PRIMARY KEY, name text); INSERT INTO items VALUES ('2026-01-02', ' ')")
    create(owner, "items", "name", document_name="name", keyword_search=False)
    owner.execute("SET DateStyle = 'SQL, DMY'")
    assert run(owner)["failed"] == 1
    assert owner.execute("SELECT pending, failed FROM ml_rag.vectorizer").fetchall() == [(0, 1)]
    assert run(owner)["failed"] == 0


def test_a_dropped_table_takes_its_failures_along(items: Connection) -> None:
    items.execute("INSERT INTO items VALUES (4, '', NULL)")
    run(items)
    assert len(failures(items)) == 1
    items.execute("DROP TABLE items")
    assert failures(items) == []
    assert items.execute("SELECT * FROM ml_rag.vectorizer").fetchall() == []


def test_a_partitioned_table(owner: Connection, models: ModelsServer) -> None:
    owner.execute("CREATE TABLE p (id integer PRIMARY KEY, t text) PARTITION BY RANGE (id)")
    owner.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)")
    owner.execute("CREATE TABLE p2 PARTITION OF p DEFAULT")
    create(owner, "p", "t")
    owner.execute(
        "INSERT INTO p SELECT i, 'text ' || i FROM generate_series(1, 20) AS i; INSERT INTO p VALUES (0, ' ')"
    )
    assert run(owner, "p", batch_size=6)["embedded"] == 20
    owner.execute("UPDATE p SET id = 30 WHERE id = 1; UPDATE p2 SET t = 'fox' WHERE id = 15")
    models.requests.clear()
    run(owner, "p")
    assert models.embedded("fake-embed") == ["fox"]
    assert_in_step(owner, "p")
    found = owner.execute(
        "SELECT segment FROM ml_rag_search('fox 7', '{\"semantic_search\": false, \"keyword_search\": true}')"
        " ORDER BY 1"
    )
    assert found.fetchall() == [("fox",), ("text 7",)]
    owner.execute("SELECT ml_rag.drop_vectorizer('p')")
    assert triggers(owner, "p2") == []


# -- failures ----------------------------------------------------------------------------------------------------------


def test_one_row_is_spoken_of_as_one(items: Connection) -> None:
    items.execute("INSERT INTO items VALUES (10, NULL)")
    told = noticed(items)
    assert run(items)["failed"] == 1
    assert told == ['a row of "public.items" could not be embedded']


def test_poison_rows_hold_nobody_up(items: Connection, models: ModelsServer) -> None:
    items.execute(
        "INSERT INTO items SELECT i, CASE i WHEN 10 THEN NULL WHEN 11 THEN ' ' WHEN 12 THEN repeat('x', 1000001)"
        " WHEN 13 THEN '!nan' WHEN 40 THEN '!nan' ELSE 'name ' || i END FROM generate_series(10, 60) AS i"
    )
    told = noticed(items, lambda d: (d.message_primary, d.message_hint))
    result = run(items)
    assert (result["embedded"], result["failed"], result["pending"]) == (46, 5, 0)
    ((message, hint),) = told
    assert message == '5 rows of "public.items" could not be embedded'
    assert "FROM ml_rag.vectorizer_error WHERE relation = 'public.items'::regclass" in (hint or "")
    assert failures(items) == [
        ("{10}", 1, "22023", "the text is empty", True),
        ("{11}", 1, "22023", "the text is empty", True),
        ("{12}", 1, "54000", "the text is too long", True),
        ("{13}", 1, "38000", "unexpected reply from the model server", False),
        ("{40}", 1, "38000", "unexpected reply from the model server", False),
    ]
    assert_in_step(items)
    # they are left alone until it is time
    models.requests.clear()
    assert run(items)["failed"] == 0
    assert models.requests == []
    # another text is tried at once, whatever the former had
    items.execute("UPDATE items SET name = 'fine' WHERE id IN (10, 13); UPDATE items SET price = 1 WHERE id = 40")
    items.execute("DELETE FROM items WHERE id = 11")
    assert pending(items) == 2
    run(items)
    assert [failure[0] for failure in failures(items)] == ["{12}", "{40}"]
    assert models.embedded("fake-embed") == ["fine: ", "fine: "]


@pytest.mark.parametrize("destination", ["column", "table"])
def test_a_text_that_is_far_too_long_is_not_read(
    db: Database, owner: Connection, models: ModelsServer, destination: str
) -> None:
    """Whoever may write it would fill the memory of whoever runs the vectorizer: as JSON it has six times the bytes."""
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text)")
    create(owner, columns="name", destination=destination, keyword_search=False)
    owner.execute("INSERT INTO items VALUES (1, repeat(chr(1), 60000000)), (2, 'tent')")
    with psycopg.connect(make_conninfo(db.dsn, dbname=db.name), autocommit=True) as session:
        result = run(session)
        assert (result["embedded"], result["failed"], result["pending"]) == (1, 1, 0)
        assert peak(session) < 1e6
    assert failures(owner) == [("{1}", 1, "54000", "the text is too long", True)]
    # nor tried again
    assert run(owner)["failed"] == 0


def peak(session: Connection) -> int:
    """The most memory that a session has had, in kB."""
    read = f"SELECT substring(pg_read_file('/proc/{session.info.backend_pid}/status') FROM 'VmHWM:\\s+(\\d+)')::integer"
    n: int = value_of(session, read.encode())
    return n


def test_a_key_that_the_index_of_failures_has_no_room_for(owner: Connection, models: ModelsServer) -> None:
    """That of the table has, as there is no name of a table beside it."""
    owner.execute("CREATE TABLE items (key text PRIMARY KEY, name text)")
    create(owner, columns="name", keyword_search=False)
    rng = random.Random(1)
    for _ in range(2):
        key = "".join(chr(rng.randrange(48, 91)) for _ in range(2688))
        owner.execute("INSERT INTO items VALUES (%s, ' ')", (key,))
    owner.execute("INSERT INTO items VALUES ('z', 'lamp')")
    result = run(owner)
    assert (result["embedded"], result["failed"], result["pending"]) == (1, 2, 0)
    assert len(failures(owner)) == 2
    # nor tried again before another text is there
    assert run(owner)["failed"] == 0
    owner.execute("UPDATE items SET name = 'fine' WHERE key <> 'z'")
    assert run(owner)["embedded"] == 2
    assert failures(owner) == []


def test_attempts_become_rare(items: Connection) -> None:
    items.execute("INSERT INTO items VALUES (4, '!nan', '')")
    waits = []
    for _ in range(14):
        run(items)
        found = value_of(
            items, "SELECT extract(epoch FROM next_attempt - failed_at) / 60, attempts FROM ml_rag.vectorizer_error"
        )
        waits.append(int(found))
        assert items.execute("SELECT ml_rag.retry_vectorizer('items')").fetchone() == (1,)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1440, 1440, 1440]
    items.execute("UPDATE items SET name = '!nan again' WHERE id = 4")
    run(items)
    assert failures(items) == [("{4}", 1, "38000", "unexpected reply from the model server", False)]


def test_a_lost_model_server_ends_the_run_and_no_row_is_blamed(items: Connection, models: ModelsServer) -> None:
    items.execute("INSERT INTO items VALUES (4, 'hat', '')")
    address = items.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone()
    items.execute("SELECT ml_rag.configure('model_server', 'unix:/nowhere.sock')")
    with error("08006"):
        run(items)
    assert failures(items) == []
    assert items.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)
    items.execute("SELECT ml_rag.configure('model_server', %s)", address)
    assert run(items)["embedded"] == 1


@pytest.mark.parametrize("mode", ["deferred", "immediate"])
def test_rows_that_failed_are_not_read_for_each_other(owner: Connection, db: Database, mode: str) -> None:
    """One role's INSERT of many would hold up the worker, and whoever writes the table."""
    n = 2000
    owner.execute("GRANT CREATE ON SCHEMA public TO ml_rag_user")
    asker = db.connect("asker")  # to whom policies apply
    asker.execute("CREATE TABLE empty (id integer PRIMARY KEY, body text)")
    create(asker, "empty", "body", mode=mode)

    def read() -> int:
        asker.execute("SELECT pg_stat_force_next_flush()")
        rows: int = value_of(
            owner,
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_all_tables"
            " WHERE relid = 'ml_rag.vectorizer_error'::regclass",
        )
        return rows

    asker.execute("INSERT INTO empty SELECT i, ' ' FROM generate_series(1, %s) AS i", (n,))
    asker.execute("INSERT INTO empty VALUES (0, 'good')")
    run(asker, "empty")
    assert (pending(asker, "empty"), len(failures(asker))) == (0, n)
    assert read() < 50 * n
    asker.execute("DELETE FROM empty WHERE id > 0")
    before = read()
    run(asker, "empty")
    assert failures(asker) == []
    assert read() - before < 10 * n


@pytest.mark.parametrize("kept", ["NULL", "OLD"])
def test_a_trigger_that_keeps_rows_as_they_are(items: Connection, models: ModelsServer, kept: str) -> None:
    items.execute(
        f"CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN {kept}; END $$;"
        "CREATE TRIGGER never BEFORE UPDATE ON items FOR EACH ROW WHEN (OLD.id = 4) EXECUTE FUNCTION never();"
        "INSERT INTO items VALUES (4, 'hat', '')"
    )
    assert run(items)["failed"] == 1
    assert failures(items) == [("{4}", 1, "55000", "a trigger of the table keeps the row as it is", False)]


# -- several at once ---------------------------------------------------------------------------------------------------


def test_two_runs_share_the_rows(db: Database, items: Connection, models: ModelsServer) -> None:
    items.execute("INSERT INTO items SELECT i, 'name ' || i FROM generate_series(10, 200) AS i")
    running = [Background(functools.partial(run, db.connect(), batch_size=5)) for _ in range(3)]
    assert sum(one.result()["embedded"] for one in running) == 191
    assert sorted(models.embedded("fake-embed")) == sorted(f"name {i}: " for i in range(10, 201))
    assert_in_step(items)


def test_nobody_waits_for_the_model(db: Database, items: Connection, models: ModelsServer) -> None:
    writer = db.connect()
    writer.execute("SET lock_timeout = '2s'")
    items.execute("UPDATE items SET name = 'a' WHERE id = 1")

    def change() -> None:
        search(writer, "tent", {"query_embedding": [1] * 16})
        writer.execute("UPDATE items SET name = 'b' WHERE id = 1")
        writer.execute("ALTER TABLE items ADD color text")
        writer.execute("UPDATE items SET name = 'c' WHERE id = 2")

    models.before[0] = change
    assert run(items)["embedded"] == 2
    assert models.embedded("fake-embed") == ["a: of red glass", "c: for two", "b: of red glass"]
    assert_in_step(items)


@pytest.mark.parametrize("end", ["pg_cancel_backend", "pg_terminate_backend"])
def test_a_run_that_is_ended_leaves_nothing_behind(
    db: Database, items: Connection, models: ModelsServer, end: str
) -> None:
    items.execute("INSERT INTO items SELECT i, 'name ' || i FROM generate_series(10, 19) AS i")
    other = db.connect()
    models.before[1] = lambda: items.execute(f"SELECT {end}(%s::integer)", (other.info.backend_pid,))
    with pytest.raises(Exception):  # noqa: B017, PT011 - cancelled, or the connection is gone
        run(other, batch_size=4)
    assert pending(items) == 6
    assert items.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)
    assert run(items)["embedded"] == 6
    assert_in_step(items)


def test_a_run_that_is_cancelled_while_it_commits_leaves_nothing_behind(items: Connection) -> None:
    """PostgreSQL ends the statement after the commit: between two steps, where no handler is."""
    items.execute("INSERT INTO items SELECT i, 'name ' || i FROM generate_series(10, 19) AS i")
    items.execute(
        "CREATE FUNCTION cancel() RETURNS trigger LANGUAGE plpython3u"
        " AS 'import os, signal; os.kill(os.getpid(), signal.SIGINT)';"
        "CREATE CONSTRAINT TRIGGER cancel AFTER UPDATE ON items DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW WHEN (NEW.id = 10) EXECUTE FUNCTION cancel()"
    )
    with error("57014", ours=False):
        run(items, batch_size=4)
    assert pending(items) == 6
    assert items.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)
    assert run(items)["embedded"] == 6


def test_texts_that_the_model_cuts_are_told_and_counted(owner: Connection) -> None:
    """fake-embed takes in 256 words."""

    def cut() -> int:
        n: int = value_of(owner, "SELECT truncated FROM ml_rag.vectorizer WHERE relation = 'items'::regclass")
        return n

    owner.execute(ITEMS)
    create(owner, columns="notes")
    owner.execute("INSERT INTO items (id, notes) SELECT i, repeat('word ', i) FROM generate_series(255, 260) AS i")
    owner.execute("INSERT INTO items (id, notes) VALUES (1, repeat('x', 64 * 256 + 1))")
    with warnings_of(owner) as told:
        assert run(owner, batch_size=2)["embedded"] == 7
    ((*_, message),) = told
    assert message == 'the model cut the texts of 5 rows of "public.items"'
    assert cut() == 5
    owner.execute("UPDATE items SET notes = 'short' WHERE id > 256; UPDATE items SET notes = notes || 'x' WHERE id = 1")
    with warnings_of(owner) as told:
        run(owner)
    assert [message for *_, message in told] == ['the model cut the texts of 1 rows of "public.items"']
    assert cut() == 6
    with warnings_of(owner) as told:
        run(owner)
    assert told == []
    owner.execute("SELECT ml_rag.drop_vectorizer('public.items')")
    create(owner, columns="notes", mode="immediate")
    assert cut() == 0
    with warnings_of(owner) as told:
        owner.execute("UPDATE items SET notes = repeat('word ', 257) WHERE id = 255")
    assert [message for *_, message in told] == ['the model cut the texts of 1 rows of "public.items"']
    owner.execute("DROP TABLE items")
    assert owner.execute("SELECT count(*) FROM ml_rag.vectorizer_truncated").fetchone() == (0,)


def test_so_many_batches_and_no_more(items: Connection) -> None:
    items.execute("INSERT INTO items SELECT i, 'name ' || i FROM generate_series(10, 19) AS i")
    result = run(items, batch_size=3, batches=2)
    assert (result["embedded"], result["pending"]) == (6, 4)
    assert items.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)


# -- who may -----------------------------------------------------------------------------------------------------------


def test_the_tables_owner_may_and_nobody_else(db: Database, owner: Connection, models: ModelsServer) -> None:
    asker, tenant, stranger = db.connect("asker"), db.connect("tenant"), db.connect("stranger")
    owner.execute("GRANT CREATE, USAGE ON SCHEMA public TO PUBLIC")
    asker.execute(ITEMS)
    asker.execute("INSERT INTO items VALUES (1, 'lamp', ''), (2, '', '')")
    asker.execute("GRANT ALL ON items TO PUBLIC")
    with error("42501", "must be owner"):
        create(tenant)
    create(asker)
    assert run(asker)["embedded"] == 1
    for statement in (
        "CALL ml_rag.run_vectorizer('items')",
        "SELECT ml_rag.retry_vectorizer('items')",
        "SELECT ml_rag.drop_vectorizer('public.items')",
    ):
        with error("42501", "must be owner"):
            tenant.execute(statement)
    assert failures(tenant) == []
    assert tenant.execute("SELECT * FROM ml_rag.vectorizer").fetchall() == []
    assert len(failures(asker)) == 1
    assert asker.execute("SELECT pending, failed FROM ml_rag.vectorizer").fetchall() == [(0, 1)]
    # who writes needs no privilege on ml_rag
    stranger.execute("SET search_path = pg_catalog")
    stranger.execute("UPDATE public.items SET name = 'hat' WHERE id = 1; INSERT INTO public.items VALUES (3, 'x', 'y')")
    assert run(asker)["embedded"] == 2
    # a superuser is told that there is one, and reads nothing of a table that it does not trust
    reason = f"It belongs to role {db.role('asker')}, which you do not trust."
    columns = "relation::text, options, pending, failed, truncated, reason"
    assert owner.execute(f"SELECT {columns} FROM ml_rag.vectorizer").fetchall() == [("items", None, None, 1, 0, reason)]


def test_row_level_security_of_the_table_holds(db: Database, items: Connection) -> None:
    items.execute("GRANT SELECT ON items TO PUBLIC; ALTER TABLE items ENABLE ROW LEVEL SECURITY")
    items.execute("CREATE POLICY cheap ON items USING (price < 10); UPDATE items SET name = 'tente' WHERE id = 2")
    run(items)
    asker = db.connect("asker")
    found = search(asker, "tent", {"vector_store": ["public.items"], "n_citations": 9, "keyword_search": True})
    assert {row[2] for row in found} == {"public.items/1", "public.items/3"}
    assert asker.execute("SELECT * FROM ml_rag.vectorizer_error").fetchall() == []


@pytest.mark.parametrize(("destination", "store"), [("column", "items"), ("table", "items_segments")])
def test_a_search_that_finds_nothing_says_that_rows_wait(
    db: Database, owner: Connection, models: ModelsServer, destination: str, store: str
) -> None:
    owner.execute(ITEMS + "; INSERT INTO items VALUES (1, 'lamp', 'red', 5)")
    create(owner, destination=destination)
    owner.execute(f"GRANT SELECT ON items, {store} TO PUBLIC")
    named = {"vector_store": [f"public.{store}"]}
    call = "To embed them: CALL ml_rag.run_vectorizer('public.items'), or ml-rag worker."
    waiting = f'Rows of "public.{store}" wait for their embedding.'
    with error("P0002", f"Vector stores searched: 1. No row that you may see has an embedding. {waiting}") as caught:
        search(owner, "lamp", named)
    assert caught.hint == call
    with error("P0002", f"No row passed the filters. {waiting}") as caught:
        search(owner, "lamp", {**named, "document_name": ["x"]})
    assert caught.hint.endswith(f"and whether the stores have rows. {call}")
    abstaining = {**named, "abstain": True}
    notices = noticed(owner, lambda d: (d.severity, d.message_primary, d.message_hint))
    assert answer(owner, "lamp", abstaining)["citations"] == []
    assert notices == [("WARNING", "no segment found, and rows wait for their embedding", call)]
    asker = db.connect("asker")
    with error("P0002", waiting) as caught:
        search(asker, "lamp", named)
    assert caught.hint == "Ask the owner of the table to call ml_rag.run_vectorizer, or to run ml-rag worker."
    owner.execute("ALTER TABLE items ENABLE ROW LEVEL SECURITY")
    with error("P0002", "None has a row that you may see.", "row-level security"):
        search(asker, "lamp", named)
    with warnings_of(asker) as warnings:
        answer(asker, "lamp", abstaining)
    assert warnings == []


def test_rows_that_are_hidden_from_the_owner(db: Database, owner: Connection, models: ModelsServer) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker = db.connect("asker")
    asker.execute(ITEMS)
    create(asker)
    asker.execute("ALTER TABLE items ENABLE ROW LEVEL SECURITY; ALTER TABLE items FORCE ROW LEVEL SECURITY")
    with error("55000", "hides rows"):
        run(asker)


def test_a_table_whose_policy_asserts_hides_no_other_from_the_view(
    db: Database, owner: Connection, models: ModelsServer
) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker = db.connect("asker")
    for name in ("items", "others"):
        asker.execute(ITEMS.replace("items", name))
        create(asker, name)
    asker.execute("INSERT INTO items VALUES (1, 'lamp')")
    asker.execute(
        "CREATE FUNCTION fail() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN ASSERT false; END';"
        "CREATE POLICY p ON items USING (public.fail());"
        "ALTER TABLE items ENABLE ROW LEVEL SECURITY; ALTER TABLE items FORCE ROW LEVEL SECURITY"
    )
    assert asker.execute("SELECT relation::text, pending, reason FROM ml_rag.vectorizer ORDER BY 1").fetchall() == [
        ("items", None, "assertion failed"),
        ("others", 0, None),
    ]


def test_a_trigger_of_anybody_with_any_argument_does_not_break_the_views(db: Database, items: Connection) -> None:
    items.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker = db.connect("asker")
    asker.execute(
        "CREATE TABLE mine (id integer);"
        " CREATE TRIGGER ml_rag_vectorizer AFTER INSERT ON mine EXECUTE FUNCTION ml_rag._wake_workers('{broken');"
        " ALTER TABLE mine ENABLE ALWAYS TRIGGER ml_rag_vectorizer"
    )
    assert asker.execute(
        "SELECT relation::text, options, pending, failed, reason FROM ml_rag.vectorizer"
    ).fetchall() == [("mine", None, None, 0, 'the vectorizer of "public.mine" lacks its columns')]
    assert {row[0] for row in items.execute("SELECT relation::text FROM ml_rag.vectorizer")} == {"items", "mine"}


#: what a role that may make triggers can do to a table
PLANTED = {
    "another": "CREATE TRIGGER a AFTER INSERT ON items EXECUTE FUNCTION ml_rag._wake_workers('boo')",
    "none": "CREATE TRIGGER ml_rag_vectorizer AFTER INSERT ON items EXECUTE FUNCTION ml_rag._wake_workers()",
    "broken": "CREATE OR REPLACE TRIGGER ml_rag_vectorizer AFTER INSERT ON items"
    " EXECUTE FUNCTION ml_rag._wake_workers('boo')",
    "options": "CREATE OR REPLACE TRIGGER ml_rag_vectorizer AFTER INSERT ON items"
    " EXECUTE FUNCTION ml_rag._wake_workers('{}')",
}


@pytest.fixture
def planter(db: Database, items: Connection) -> Connection:
    items.execute("GRANT TRIGGER ON items TO ml_rag_user")
    return db.connect("asker")


def test_another_trigger_of_our_function_is_no_vectorizer(items: Connection, planter: Connection) -> None:
    planter.execute(PLANTED["another"])
    items.execute("INSERT INTO items VALUES (7, 'mug', NULL, 1)")
    assert rows(items, "SELECT relation::text, pending, reason FROM ml_rag.vectorizer") == [("items", 1, None)]
    run(items)
    assert_in_step(items)
    items.execute("SELECT ml_rag.drop_vectorizer('items')")
    create(items)


def test_a_vectorizer_whose_trigger_was_replaced_is_made_anew(items: Connection, planter: Connection) -> None:
    planter.execute(PLANTED["broken"])
    with error("55000", "lacks its options", "was replaced", "drop_vectorizer('public.items')"):
        run(items)
    with error("42710", "has a vectorizer already"):
        create(items)
    items.execute("SELECT ml_rag.drop_vectorizer('items')")
    create(items)
    run(items)
    assert_in_step(items)


@pytest.mark.parametrize("planted", ["none", "broken", "options"])
def test_a_planted_trigger_makes_no_vectorizer(items: Connection, planter: Connection, planted: str) -> None:
    items.execute("SELECT ml_rag.drop_vectorizer('items'); ALTER TABLE items ADD segment_embedding text")
    planter.execute(PLANTED[planted])
    assert rows(items, "SELECT relation FROM ml_rag.vectorizer") == []
    for statement in ("SELECT ml_rag.drop_vectorizer('items')", "CALL ml_rag.run_vectorizer('items')"):
        with error("42704", "has no vectorizer"):
            items.execute(statement)
    items.execute("ALTER TABLE items DROP segment_embedding")
    create(items)
    run(items)
    assert_in_step(items)


def test_a_vectorizer_whose_trigger_was_off_for_a_while(items: Connection) -> None:
    items.execute("ALTER TABLE items DISABLE TRIGGER ml_rag_vectorizer")
    assert rows(items, "SELECT pending FROM ml_rag.vectorizer") == [(0,)]
    items.execute("ALTER TABLE items ENABLE TRIGGER ml_rag_vectorizer; INSERT INTO items VALUES (7, 'mug', NULL, 1)")
    assert rows(items, "SELECT pending FROM ml_rag.vectorizer") == [(1,)]
    run(items)
    assert_in_step(items)


# -- made and dropped --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "options", "state", "words"),
    [
        ("", {"columns": None}, "22023", ["columns"]),
        ("", {"columns": "{nme}"}, "22023", ["no column nme", "name"]),
        ("", {"columns": "{name"}, "22023", ["template"]),
        ("", {"columns": []}, "22023", ["template"]),
        ("", {"columns": [1]}, "22023", ["template"]),
        ("", {"columns": "{key}"}, "22023", ["no column key"]),
        ("", {"document_name": "{nme}"}, "22023", ["no column nme"]),
        ("", {"destination": "elsewhere"}, "22023", ["column"]),
        ("", {"embed_model_id": "a b"}, "22023", ["without blanks"]),
        ("", {"embed_model_id": "a,b"}, "22023", ["without blanks"]),
        ("ALTER TABLE items ADD day date", {"columns": "{day}"}, "22023", ["cannot be part of a text", "trigger"]),
        ("ALTER TABLE items ADD up text GENERATED ALWAYS AS (name) STORED", {"columns": "up"}, "22023", ["generated"]),
        ("ALTER TABLE items ADD segment text", {}, "42701", ["segment", "RENAME"]),
        ("ALTER TABLE items DROP CONSTRAINT items_pkey", {}, "55000", ["no primary key", "ADD PRIMARY KEY"]),
        ("CREATE TABLE c () INHERITS (items)", {}, "55000", ["inherits"]),
        ("SET default_transaction_read_only = on", {}, "25006", ["read-only"]),
        (
            "ALTER TABLE items RENAME TO below; CREATE VIEW items AS SELECT * FROM below",
            {},
            "55000",
            ["not a table", "Name the table below it"],
        ),
    ],
)
def test_what_it_cannot_do_it_says_and_changes_nothing(
    owner: Connection, models: ModelsServer, setup: str, options: dict[str, Any], state: str, words: list[str]
) -> None:
    owner.execute(ITEMS)
    if setup:
        owner.execute(setup)
    before = owner.execute("SELECT attname FROM pg_attribute WHERE attrelid = 'items'::regclass").fetchall()
    with error(state, *words):
        create(owner, **{"columns": "{name}: {notes}", **options})
    assert owner.execute("SELECT attname FROM pg_attribute WHERE attrelid = 'items'::regclass").fetchall() == before
    assert triggers(owner, "items") == []


def test_one_vectorizer_a_table(items: Connection) -> None:
    with error("42710", "has a vectorizer already", "drop_vectorizer"):
        create(items)


def test_a_dropped_vectorizer_leaves_the_table_as_it_was(items: Connection) -> None:
    items.execute("SELECT ml_rag.drop_vectorizer('public.items')")
    columns = items.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'items'::regclass AND attnum > 0 AND NOT attisdropped"
    ).fetchall()
    assert [name for (name,) in columns] == ["id", "name", "notes", "price"]
    assert triggers(items, "items") == []
    indexes = items.execute("SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'items'::regclass")
    assert indexes.fetchall() == [("items_pkey",)]
    for statement in ("SELECT ml_rag.drop_vectorizer('public.items')", "CALL ml_rag.run_vectorizer('items')"):
        with error("42704", "has no vectorizer"):
            items.execute(statement)


def test_a_dropped_vectorizer_that_leaves_its_columns(items: Connection) -> None:
    items.execute("""SELECT ml_rag.drop_vectorizer('items', '{"keep_columns": true}')""")
    items.execute("UPDATE items SET name = 'hat' WHERE id = 1")
    found = search(items, "lamp: of red glass", {"n_citations": 9, "keyword_search": True})
    assert {row[5] for row in found} >= {"tent: for two", "rope: "}
    assert not any("lamp" in row[5] for row in found)
    assert items.execute("SELECT count(segment_embedding) FROM items").fetchone() == (2,)


def test_not_inside_a_transaction(items: Connection) -> None:
    with error("25001", "transaction block"), items.transaction():
        run(items)


def test_the_index_is_made_by_the_first_run_that_has_embedded_all(items: Connection) -> None:
    definition = "SELECT indexdef FROM pg_indexes WHERE tablename = 'items' AND indexdef ~ 'USING (hnsw|ivfflat)'"
    assert "hnsw (segment_embedding vector_cosine_ops)" in items.execute(definition).fetchall()[0][0]
    items.execute("SELECT ml_rag.drop_vectorizer('public.items')")
    create(items, index={"type": "none"})
    run(items)
    assert items.execute(definition).fetchall() == []


def test_explain_counts_rows_without_an_embedding(items: Connection) -> None:
    def stores() -> Any:
        return answer(items, "lamp", {"skip_generate": True, "explain": True})["explain"]["stores"]

    assert "without_embedding" not in stores()[0]
    items.execute("UPDATE items SET name = 'new' WHERE id IN (1, 2); INSERT INTO items VALUES (9, '', NULL)")
    assert (stores()[0]["vector_store"], stores()[0]["without_embedding"]) == ("public.items", 2)


def test_since_when_rows_wait_is_told_where_the_server_keeps_the_times_of_commits(items: Connection) -> None:
    items.execute("INSERT INTO items VALUES (9, 'hat', NULL)")
    row = items.execute(
        "SELECT pending, oldest_pending, current_setting('track_commit_timestamp') FROM ml_rag.vectorizer"
    ).fetchone()
    assert row is not None
    assert row[0] == 1
    assert (row[1] is not None) == (row[2] == "on")


def test_a_disabled_trigger_is_reported(items: Connection) -> None:
    told = noticed(items)
    items.execute('ALTER TABLE items DISABLE TRIGGER "~ml_rag_segment_embedding"')
    run(items)
    assert told == ['a trigger of "public.items" was dropped or disabled']


def test_writers_go_on_where_the_embedding_has_another_name(items: Connection) -> None:
    items.execute("ALTER TABLE items RENAME segment_embedding TO meaning")
    items.execute("UPDATE items SET name = 'hat' WHERE id = 1")
    assert items.execute("SELECT id FROM items WHERE meaning IS NULL").fetchall() == [(1,)]
    with error("55000", "lacks its columns"):
        run(items)
    items.execute("ALTER TABLE items RENAME meaning TO segment_embedding")
    assert run(items)["embedded"] == 1
    assert_in_step(items)
