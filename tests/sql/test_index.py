"""84_index: keyword indexes follow their tables, in every way a table can change; making, dropping, folding them."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.cluster import Connection, Database
from support.keywords import add, assert_exact, enable, keyword_store, rows, runs, search, tokens, waiting
from support.stores import COLUMNS, create_store, error, mark

WORDS = [f"word{i}" for i in range(30)]


def found(connection: Connection, query: str = "fox", **kwargs: Any) -> list[int]:
    return sorted(row[0] for row in search(connection, query, 100_000, **kwargs))


# -- every way to change a table --------------------------------------------------------------------------------------


def test_inserts_updates_and_deletes_show_at_once(owner: Connection) -> None:
    keyword_store(owner, ["fox", "dog", "cat"])
    add(owner, ["fox cub"], 4)
    assert found(owner) == [1, 4]
    owner.execute("UPDATE docs SET segment = 'fox and dog' WHERE document_id = 2")
    assert found(owner) == [1, 2, 4]
    owner.execute("UPDATE docs SET segment = 'bird' WHERE document_id = 1")
    assert found(owner) == [2, 4]
    owner.execute("DELETE FROM docs WHERE document_id = 4")
    assert found(owner) == [2]
    owner.execute("UPDATE docs SET document_id = 20 WHERE document_id = 2")
    assert found(owner) == [20]
    owner.execute("UPDATE docs SET segment = NULL WHERE document_id = 20")
    assert found(owner) == []
    owner.execute("UPDATE docs SET segment = 'fox' WHERE document_id = 20")
    assert found(owner) == [20]
    assert_exact(owner, "fox dog cat bird")


def test_an_update_of_other_columns_leaves_the_index_alone(owner: Connection) -> None:
    keyword_store(owner, ["fox", "dog", None])
    before = owner.execute("SELECT xmin, * FROM ml_rag.keyword_row ORDER BY id").fetchall()
    owner.execute("UPDATE docs SET metadata = '{}', segment = segment, segment_embedding = '[1,1,1]'")
    assert owner.execute("SELECT xmin, * FROM ml_rag.keyword_row ORDER BY id").fetchall() == before
    assert waiting(owner) == (0, 0)


def test_keys_that_change_places_in_one_statement(owner: Connection) -> None:
    owner.execute(f"CREATE TABLE docs ({COLUMNS.format(type='vector(3)')})".replace(
        "PRIMARY KEY (document_id, segment_number)", "UNIQUE (document_id, segment_number)"))  # fmt: skip
    mark(owner, "docs")
    add(owner, ["fox", "dog"], 1)
    enable(owner)
    owner.execute("UPDATE docs SET segment = CASE document_id WHEN 1 THEN 'dog' ELSE 'fox' END")
    assert found(owner) == [2]
    assert_exact(owner, "fox dog")


def test_copy_merge_and_on_conflict(owner: Connection) -> None:
    keyword_store(owner, ["fox", "dog"])
    with owner.cursor().copy(
        "COPY docs (document_name, metadata, document_id, segment_number, segment) FROM STDIN"
    ) as c:
        for i in range(3, 6):
            c.write_row((f"d{i}", "{}", i, 1, "fox"))
    assert found(owner) == [1, 3, 4, 5]
    insert = "INSERT INTO docs SELECT 'd' || i, '{}', i, 1, 'wolf' FROM generate_series(5, 6) AS i ON CONFLICT "
    owner.execute(insert + "DO NOTHING")
    assert (found(owner), found(owner, "wolf")) == ([1, 3, 4, 5], [6])
    owner.execute(insert + "(document_id, segment_number) DO UPDATE SET segment = excluded.segment")
    assert (found(owner), found(owner, "wolf")) == ([1, 3, 4], [5, 6])
    owner.execute(
        "MERGE INTO docs AS t USING (VALUES (1, 'wolf'), (3, NULL), (9, 'fox')) AS s (id, segment)"
        " ON t.document_id = s.id"
        " WHEN MATCHED AND s.segment IS NULL THEN DELETE WHEN MATCHED THEN UPDATE SET segment = s.segment"
        " WHEN NOT MATCHED THEN INSERT VALUES ('d' || s.id, '{}', s.id, 1, s.segment)"
    )
    assert (found(owner), found(owner, "wolf")) == ([4, 9], [1, 5, 6])
    assert_exact(owner, "fox wolf dog")


def test_truncate(owner: Connection) -> None:
    keyword_store(owner, ["fox"] * 3)
    add(owner, ["fox"], 4)
    owner.execute("BEGIN; TRUNCATE docs")
    assert found(owner) == []
    owner.execute("ROLLBACK")
    assert found(owner) == [1, 2, 3, 4]
    owner.execute("TRUNCATE docs")
    assert found(owner) == []
    assert runs(owner) == []
    assert waiting(owner) == (0, 0)
    add(owner, ["fox"], 5)
    assert_exact(owner, "fox")


def test_rollback_and_savepoints(owner: Connection) -> None:
    keyword_store(owner, ["fox", "dog"])
    owner.execute("BEGIN")
    add(owner, ["fox"], 3)
    owner.execute("SAVEPOINT a")
    owner.execute("DELETE FROM docs WHERE document_id = 1")
    add(owner, ["fox fox"], 4)
    assert found(owner) == [3, 4]
    owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
    assert found(owner) == [3, 4]
    assert_exact(owner, "fox dog")
    owner.execute("ROLLBACK TO a")
    assert found(owner) == [1, 3]
    assert_exact(owner, "fox dog")
    owner.execute("ROLLBACK")
    assert found(owner) == [1]
    assert_exact(owner, "fox dog")


def test_many_random_changes_keep_the_index_exact(owner: Connection) -> None:
    """Whatever happens, what the index answers is BM25 over the table as it is, own uncommitted changes included."""
    generator = random.Random(3)
    keyword_store(owner, options='{"language": "simple"}')

    def text() -> str:
        return " ".join(generator.choices(WORDS, weights=range(30, 0, -1), k=generator.randrange(12)))

    def insert(n: int) -> None:
        first = generator.randrange(10**9)
        owner.execute(
            "INSERT INTO docs SELECT 'd' || ($1 + place), '{}', $1 + place, 1, t"
            " FROM unnest($2::text[]) WITH ORDINALITY AS u (t, place)".replace("$1", "%s::bigint").replace("$2", "%s"),
            (first, first, [text() for _ in range(n)]),
        )  # fmt: skip

    for step in range(60):
        match generator.randrange(9):
            case 0:
                insert(generator.choice([1, 5, 300, 1200]))
            case 1 | 2:
                insert(generator.randrange(1, 40))
            case 3:
                owner.execute("DELETE FROM docs WHERE document_id %% 5 = %s", (generator.randrange(5),))
            case 4:
                owner.execute(
                    "UPDATE docs SET segment = %s WHERE document_id %% 7 = %s", (text(), generator.randrange(7))
                )
            case 5:
                owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
            case 6 if owner.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                owner.execute("BEGIN")
            case 7:
                owner.execute("ROLLBACK" if generator.random() < 0.5 else "COMMIT")
            case 8 if step % 3 == 0:
                owner.execute("TRUNCATE docs")
        assert_exact(owner, " ".join(generator.sample(WORDS, 4)), configuration="simple")
    owner.execute("ROLLBACK")


# -- folding ----------------------------------------------------------------------------------------------------------


def fill(connection: Connection, n: int, first: int = 1, text: str = "'fox ' || i") -> None:
    connection.execute(
        f"INSERT INTO docs SELECT 'd' || i, '{{}}', i, 1, {text} FROM generate_series({first}, {first + n - 1}) AS i"
    )


def test_a_large_statement_folds_its_own_rows(owner: Connection) -> None:
    keyword_store(owner)
    fill(owner, 999)
    assert (waiting(owner), runs(owner)) == ((999, 0), [])
    fill(owner, 1000, 1000)
    assert waiting(owner)[0] == 0
    assert sum(n for n, _ in runs(owner)) == 1999
    assert found(owner) == list(range(1, 2000))


def test_what_waits_stays_bounded_with_small_statements(owner: Connection) -> None:
    keyword_store(owner)
    for first in range(1, 6000, 20):
        fill(owner, 20, first)
    assert waiting(owner)[0] < 2000
    assert found(owner) == list(range(1, 6001))
    owner.execute("DELETE FROM docs WHERE document_id % 2 = 0")
    assert waiting(owner) == (0, 0)
    assert found(owner) == list(range(1, 6001, 2))
    assert_exact(owner, "fox 17")


def test_runs_are_merged(owner: Connection) -> None:
    keyword_store(owner)
    for first in range(1, 20_000, 1000):
        fill(owner, 1000, first)
    assert len(runs(owner)) <= 10
    owner.execute("DELETE FROM docs WHERE document_id <= 12000")
    owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
    assert runs(owner) == [(8000, 0)]
    assert found(owner) == list(range(12_001, 20_001))
    assert_exact(owner, "fox 12345")
    owner.execute("DELETE FROM docs")
    owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
    assert (runs(owner), waiting(owner)) == ([], (0, 0))
    assert owner.execute("SELECT count(*) FROM ml_rag.keyword_posting").fetchone() == (0,)


def test_runs_end_at_65536_rows(owner: Connection) -> None:
    keyword_store(owner)
    fill(owner, 70_000, text="CASE WHEN i % 1000 = 0 THEN 'fox' ELSE 'dog' END")
    assert runs(owner) == [(65_536, 0), (4464, 0)]
    assert found(owner) == list(range(1000, 70_001, 1000))
    owner.execute("DELETE FROM docs WHERE document_id IN (1000, 66000, 70000)")
    assert found(owner) == [i for i in range(2000, 70_000, 1000) if i != 66_000]


def test_words_that_stand_there_hundreds_of_times(owner: Connection) -> None:
    keyword_store(owner, ["fox " * 255, "fox " * 256, "fox " * 20_000, "fox", "dog"])
    assert_exact(owner, "fox dog")
    add(owner, ["fox " * 300, "dog"], 6)
    owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
    assert runs(owner) == [(7, 0)]
    assert_exact(owner, "fox dog")


def test_nothing_is_folded_under_repeatable_read(owner: Connection, db: Database) -> None:
    """What others have folded since the snapshot must not make the transaction fail."""
    keyword_store(owner)
    fill(owner, 900)
    other = db.connect()
    other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    assert len(found(other)) == 900
    fill(owner, 5000, 1001)
    owner.execute("DELETE FROM docs WHERE document_id <= 10")
    owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
    assert found(other) == list(range(1, 901))
    for first in range(20_000, 21_000, 100):
        fill(other, 100, first)
    fill(other, 1500, 30_000)
    other.execute("DELETE FROM docs WHERE document_id BETWEEN 11 AND 20 OR document_id BETWEEN 30000 AND 30100")
    other.execute("UPDATE docs SET segment = 'fox again' WHERE document_id BETWEEN 21 AND 30")
    expected = [*range(21, 901), *range(20_000, 21_000), *range(30_101, 31_500)]
    assert found(other) == [*range(1, 11), *expected]
    other.execute("COMMIT")
    assert found(owner) == sorted([*expected, *range(1001, 6001)])
    owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
    assert found(owner) == sorted([*expected, *range(1001, 6001)])
    assert_exact(owner, "fox again 21")


# -- several at once --------------------------------------------------------------------------------------------------


def test_two_writers_do_not_wait_for_each_other(owner: Connection, db: Database) -> None:
    keyword_store(owner, ["fox"] * 10)
    one, two = db.connect(), db.connect()
    for connection in (one, two):
        connection.execute("SET lock_timeout = '2s'; BEGIN")
    add(one, ["fox new"], 11)
    add(two, ["fox new"], 12)
    one.execute("DELETE FROM docs WHERE document_id = 1")
    two.execute("DELETE FROM docs WHERE document_id = 2")
    fill(one, 1000, 1000)
    fill(two, 1000, 2000)
    # one folds all that waits; two deletes what is being folded
    one.execute("SELECT ml_rag.fold_keyword_index('docs')")
    two.execute("DELETE FROM docs WHERE document_id = 3")
    two.execute("UPDATE docs SET segment = 'dog' WHERE document_id = 4")
    fill(two, 1000, 3000)
    mine = [*range(5, 11)]
    assert found(one) == [2, 3, 4, *mine, 11, *range(1000, 2000)]
    assert found(two) == [1, *mine, 12, *range(2000, 4000)]
    two.execute("COMMIT")
    assert found(one) == [*mine, 11, 12, *range(1000, 4000)]
    one.execute("COMMIT")
    assert found(owner) == [*mine, 11, 12, *range(1000, 4000)]
    assert_exact(owner, "fox new dog 1500")
    owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
    assert waiting(owner) == (0, 0)
    assert_exact(owner, "fox new dog 1500")


def test_many_sessions_at_once(owner: Connection, db: Database) -> None:
    keyword_store(owner)
    problems: list[Exception] = []

    def work(number: int) -> None:
        try:
            generator = random.Random(number)
            with psycopg.connect(db.connect().info.dsn, dbname=db.name, autocommit=True) as connection:
                connection.execute("SET lock_timeout = '20s'")
                for i in range(12):
                    first = number * 1_000_000 + i * 1000
                    connection.execute("BEGIN")
                    fill(connection, generator.choice([1, 30, 400, 1000]), first)
                    connection.execute(
                        "DELETE FROM docs WHERE document_id BETWEEN %s AND %s AND document_id %% 3 = 0",
                        (first - 1000, first),
                    )
                    connection.execute("COMMIT" if generator.random() < 0.8 else "ROLLBACK")
                    if i % 4 == 0:
                        connection.execute("SELECT ml_rag.fold_keyword_index('docs')")
                    seen = search(connection, "fox", 5)
                    assert all(score > 0 for _, _, score in seen)
        except (AssertionError, psycopg.Error) as e:
            problems.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert_exact(owner, "fox 1001001")
    owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
    assert_exact(owner, "fox 1001001")


def test_a_reader_keeps_its_snapshot_while_runs_are_replaced(owner: Connection, db: Database) -> None:
    keyword_store(owner)
    for first in range(1, 8000, 1000):
        fill(owner, 1000, first)
    reader = db.connect()
    reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    before = search(reader, "fox 77", 100_000)
    owner.execute("DELETE FROM docs WHERE document_id % 2 = 0")
    owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
    fill(owner, 3000, 10_000)
    owner.execute("SELECT ml_rag.fold_keyword_index('docs')")
    assert search(reader, "fox 77", 100_000) == before
    reader.execute("COMMIT")
    assert search(reader, "fox 77", 100_000) == search(owner, "fox 77", 100_000)


def test_only_owners_can_hold_up_who_empties_an_index(owner: Connection, asker: Connection) -> None:
    keyword_store(owner, ["fox"])
    with error("42501", ours=False):
        asker.execute("SELECT ml_rag._fold_keywords('docs'::regclass, 0, true)")
    asker.execute("BEGIN")
    assert asker.execute("UPDATE ml_rag.keyword_own_store SET folding = 0").rowcount == 0
    owner.execute("SET lock_timeout = '2s'; TRUNCATE docs")
    asker.execute("COMMIT")


def test_emptying_waits_for_who_folds(owner: Connection, db: Database) -> None:
    keyword_store(owner, ["fox"])
    add(owner, ["fox"], 2)
    folding = db.connect()
    folding.execute("BEGIN; SELECT ml_rag.fold_keyword_index('docs')")
    owner.execute("SET lock_timeout = '200ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        owner.execute("TRUNCATE docs")
    fill(owner, 1500, 10)
    assert len(found(owner)) == 1502
    folding.execute("COMMIT")
    owner.execute("TRUNCATE docs")
    assert (runs(owner), waiting(owner)) == ([], (0, 0))


# -- making and dropping ----------------------------------------------------------------------------------------------


def test_the_index_of_a_filled_table(owner: Connection) -> None:
    create_store(owner, rows=rows(["fox", None, "dog", "fox dog"]))
    enable(owner)
    assert_exact(owner, "fox dog")
    assert waiting(owner) == (0, 0)


def test_made_anew_with_other_options(owner: Connection) -> None:
    keyword_store(owner, ["running", "runs"], options='{"language": "simple", "k1": 2}')
    assert found(owner, "run") == []
    enable(owner, options='{"language": "en"}')
    assert found(owner, "run") == [1, 2]
    assert owner.execute("SELECT configuration, k1, b, statistics FROM ml_rag.keyword_index").fetchall() == [
        ("pg_catalog.english", 1.2, 0.75, "all")
    ]
    assert len(runs(owner)) == 1
    add(owner, ["running"], 3)
    assert_exact(owner, "run")


def test_readers_go_on_while_an_index_is_made(owner: Connection, db: Database) -> None:
    keyword_store(owner, ["fox"])
    reader, writer = db.connect(), db.connect()
    for connection in (reader, writer):
        connection.execute("SET lock_timeout = '200ms'")
    owner.execute("BEGIN; SELECT ml_rag.enable_keyword_search('docs', '{\"k1\": 0}')")
    assert found(reader) == [1]
    with pytest.raises(psycopg.errors.LockNotAvailable):
        add(writer, ["fox"], 2)
    owner.execute("COMMIT")
    add(writer, ["fox"], 2)
    assert_exact(reader, "fox", k1=0)


def test_an_index_is_not_made_from_an_old_snapshot(owner: Connection, db: Database) -> None:
    create_store(owner, rows=rows(["fox"]))
    owner.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM docs")
    add(db.connect(), ["fox"], 2)
    with error("55000", "isolation level", "READ COMMITTED"):
        enable(owner)
    owner.execute("ROLLBACK")
    # a store that the transaction itself has made has no rows of others
    owner.execute("BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT ml_rag.create_store('public.made'); COMMIT")
    assert owner.execute("SELECT store::text FROM ml_rag.keyword_index").fetchall() == [("made",)]


def test_text_that_changes_in_its_case_only_under_a_collation_that_ignores_it(owner: Connection) -> None:
    owner.execute(
        "CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"
        "CREATE TABLE docs (id text COLLATE any_case PRIMARY KEY, segment text COLLATE any_case,"
        " segment_embedding vector(3))"
    )
    mark(owner, "docs")
    owner.execute("INSERT INTO docs VALUES ('a', 'i'), ('b', 'dog')")
    enable(owner, options='{"language": "simple"}')
    owner.execute("INSERT INTO docs VALUES ('c', 'fox')")
    owner.execute("DELETE FROM docs WHERE id <> 'c'; UPDATE docs SET id = 'C', segment = 'FOX'")
    statement = "SELECT document_key, segment FROM ml_rag.keyword({}, 'fox', 9)".format(
        "(SELECT array_agg(s) FROM ml_rag.discover() AS s)"
    )
    assert {row[1] for row in owner.execute(statement)} == {"FOX"}
    assert owner.execute("SELECT key FROM ml_rag.keyword_row").fetchall() == [(["C"],)]
    owner.execute("DELETE FROM docs WHERE id = 'c'")
    assert owner.execute(statement).fetchall() == []


def test_dropped_it_leaves_nothing(owner: Connection) -> None:
    keyword_store(owner, ["fox"] * 5)
    add(owner, ["fox"], 6)
    owner.execute("DELETE FROM docs WHERE document_id = 1")
    owner.execute("SELECT ml_rag.disable_keyword_search('docs')")
    owner.execute("SELECT ml_rag.disable_keyword_search('docs')")
    assert_nothing_left(owner)
    assert owner.execute("SELECT count(*) FROM pg_trigger WHERE tgrelid = 'docs'::regclass").fetchone() == (0,)
    add(owner, ["fox"], 7)
    with error("55000"):
        search(owner, "fox")


def assert_nothing_left(owner: Connection) -> None:
    for name in ("store", "row", "new", "gone", "run", "posting"):
        assert owner.execute(f"SELECT count(*) FROM ml_rag.keyword_{name}").fetchone() == (0,), name


@pytest.mark.parametrize("how", ["DROP TABLE s.docs", "DROP SCHEMA s CASCADE"])
def test_a_table_that_is_dropped_takes_its_index_along(owner: Connection, how: str) -> None:
    owner.execute("CREATE SCHEMA s")
    keyword_store(owner, ["fox"], "s.docs")
    owner.execute("BEGIN")
    owner.execute(how)
    assert_nothing_left(owner)
    owner.execute("ROLLBACK")
    assert found(owner, name="s.docs") == [1]
    owner.execute(how)
    assert_nothing_left(owner)


def test_a_table_that_is_renamed_or_moved_keeps_its_index(owner: Connection) -> None:
    keyword_store(owner, ["fox"])
    owner.execute("CREATE SCHEMA s; ALTER TABLE docs SET SCHEMA s; ALTER TABLE s.docs RENAME TO other")
    add(owner, ["fox"], 2, "s.other")
    assert found(owner, name="s.other") == [1, 2]


def test_a_column_that_is_renamed_asks_for_the_index_to_be_made_anew(owner: Connection) -> None:
    keyword_store(owner, ["fox"])
    owner.execute("ALTER TABLE docs RENAME document_id TO id")
    with error("55000", "does not fit its columns", "enable_keyword_search('docs')"):
        owner.execute("DELETE FROM docs")
    enable(owner)
    owner.execute("UPDATE docs SET segment = 'dog'")


def test_drop_and_create_extension(owner: Connection) -> None:
    keyword_store(owner, ["fox"])
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        owner.execute("DROP EXTENSION ml_rag")
    owner.execute("DROP EXTENSION ml_rag CASCADE; CREATE EXTENSION ml_rag")
    with error("55000"):
        search(owner, "fox")
    enable(owner)
    assert found(owner) == [1]


# -- who, and what ----------------------------------------------------------------------------------------------------


def test_only_the_owner_makes_and_drops(owner: Connection, asker: Connection, db: Database) -> None:
    keyword_store(owner, ["fox"])
    for call in ("enable_keyword_search('docs')", "disable_keyword_search('docs')", "fold_keyword_index('docs')"):
        with error("42501", 'must be owner of table "docs"'):
            asker.execute(f"SELECT ml_rag.{call}")
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(db.role("asker"))))
    create = COLUMNS.format(type="public.vector(3)")
    asker.execute(f"CREATE TABLE own.docs ({create})")
    mark(asker, "own.docs")
    add(asker, ["fox"] * 3, 1, "own.docs")
    enable(asker, "own.docs")
    add(asker, ["fox"], 4, "own.docs")
    fill_own = "INSERT INTO own.docs SELECT 'd', '{}', i, 1, 'fox' FROM generate_series(10, 2000) AS i"
    asker.execute(fill_own)
    assert len(found(asker, name="own.docs")) == 1995
    asker.execute("SELECT ml_rag.fold_keyword_index('own.docs')")
    asker.execute("SELECT ml_rag.disable_keyword_search('own.docs')")


def test_whoever_may_write_the_table_need_not_own_it(owner: Connection, asker: Connection) -> None:
    keyword_store(owner, ["fox"])
    owner.execute("GRANT INSERT, UPDATE, DELETE ON docs TO ml_rag_user")
    add(asker, ["fox"], 2)
    asker.execute("UPDATE docs SET segment = 'dog' WHERE document_id = 1")
    assert (found(asker), found(asker, "dog")) == ([2], [1])
    asker.execute("DELETE FROM docs")
    assert found(asker) == []


@pytest.mark.parametrize(
    ("create", "words"),
    [
        ("TABLE x (id integer, segment text)", "no key"),
        ("TABLE x (id integer UNIQUE, segment text)", "no key"),
        ("TABLE x (id integer PRIMARY KEY DEFERRABLE, segment text)", "no key"),
        ("TABLE x (id timestamptz PRIMARY KEY, segment text)", "no key"),
        ("TABLE x (id integer PRIMARY KEY, segment text) PARTITION BY RANGE (id)", "partitioned"),
        ("VIEW x AS SELECT 1 AS id, 'a'::text AS segment", "no ordinary table"),
        ("MATERIALIZED VIEW x AS SELECT 1 AS id, 'a'::text AS segment", "no ordinary table"),
        ("TABLE x (id integer PRIMARY KEY, segment text); CREATE TABLE y () INHERITS (x)", "inheritance"),
        ("TABLE y (id integer, segment text); CREATE TABLE x (PRIMARY KEY (id)) INHERITS (y)", "inheritance"),
        ("TEMP TABLE x (id integer PRIMARY KEY, segment text)", "temporary"),
    ],
)
def test_relations_that_can_have_none_are_55000(owner: Connection, create: str, words: str) -> None:
    owner.execute(f"CREATE {create}")
    with error("55000", words) as caught:
        enable(owner, "x")
    assert caught.hint


@pytest.mark.parametrize("type_", ["smallint", "integer", "bigint", "numeric", "text", "varchar(20)", "uuid"])
def test_keys_of_each_type(owner: Connection, type_: str) -> None:
    owner.execute(f"CREATE TABLE docs (id {type_} PRIMARY KEY, segment text, segment_embedding vector(3))")
    mark(owner, "docs")
    value = "00000000-0000-0000-0000-00000000000{}" if type_ == "uuid" else "{}"
    owner.execute(f"INSERT INTO docs VALUES ('{value.format(1)}', 'fox'), ('{value.format(2)}', 'dog')")
    enable(owner)
    owner.execute(f"INSERT INTO docs VALUES ('{value.format(3)}', 'fox')")
    owner.execute(f"DELETE FROM docs WHERE id = '{value.format(1)}'")
    statement = "SELECT segment FROM ml_rag.keyword((SELECT array_agg(s) FROM ml_rag.discover() AS s), 'fox dog', 9)"
    assert sorted(owner.execute(statement).fetchall()) == [("dog",), ("fox",)]


def test_keys_of_awkward_text_and_columns_of_awkward_names(owner: Connection) -> None:
    owner.execute(
        'CREATE TABLE "My ""Docs" ("a ""key""" text, "b,{}" numeric, "T%ext" varchar, segment_embedding vector(3),'
        ' PRIMARY KEY ("a ""key""", "b,{}"))'
    )
    keys = ["", "NULL", "null", '"', "{}", "a,b", "\\", "'", " ", "é中", "$1", "%s"]
    enable(owner, '"My ""Docs"', '{"segment": "T%ext"}')
    for key in keys:
        owner.execute('INSERT INTO "My ""Docs" VALUES (%s, 1.50, %s)', (key, f"fox {key}"))
    owner.execute('SELECT ml_rag.fold_keyword_index(\'"My ""Docs"\')')
    assert owner.execute("SELECT count(*), count(DISTINCT key) FROM ml_rag.keyword_row").fetchone() == (12, 12)
    owner.execute('UPDATE "My ""Docs" SET "T%ext" = \'dog\'')
    owner.execute('DELETE FROM "My ""Docs" WHERE "a ""key""" <> \'\\\'')
    assert owner.execute("SELECT key FROM ml_rag.keyword_row").fetchall() == [(["\\", "1.50"],)]


@pytest.mark.parametrize(
    "options",
    [
        {"k1": -1}, {"k1": 101}, {"b": -0.1}, {"b": 1.1}, {"k1": "x"}, {"statistics": "none"}, {"segment": "nothing"},
        {"segment": "metadata"}, {"segment": ""}, {"text_search_configuration": "nothing"}, {"language": 5},
        {"text_search_configuration": "a.b.c.d"}, {"text_search_configuration": "no.english"}, {"lang": "en"},
        {"text_search_configuration": "'; DROP"}, [],
    ],
)  # fmt: skip
def test_bad_options_are_22023(owner: Connection, options: Any) -> None:
    create_store(owner)
    with error("22023"):
        enable(owner, options=json.dumps(options))
    assert_nothing_left(owner)


def test_options_at_their_limits(owner: Connection) -> None:
    create_store(owner, rows=rows(["fox", "fox fox dog"]))
    for k1, b in ((0, 0), (100, 1)):
        enable(
            owner, options=f'{{"k1": {k1}, "b": {b}, "statistics": "VISIBLE", "text_search_configuration": "english"}}'
        )
        assert_exact(owner, "fox", k1=k1, b=b)


@pytest.mark.parametrize(
    ("language", "configuration"),
    [
        ("en", "english"), ("de", "german"), ("EN", "english"), ("en-GB", "english"), ("pt_BR", "portuguese"),
        ("german", "german"), ("zh", "simple"), ("ja", "simple"), ("ko", "simple"), ("xx", "simple"),
        ("no", "norwegian"),        ("", "simple"), ("'", "simple"), ("pg_catalog", "simple"),
    ],
)  # fmt: skip
def test_configurations_of_languages(module_owner: Connection, language: str, configuration: str) -> None:
    found = module_owner.execute("SELECT ml_rag.text_search_configuration(%s)", (language,)).fetchone()
    assert found == (f"pg_catalog.{configuration}",)


@pytest.mark.parametrize(("language", "warned"), [("englsh", True), ("zh", False), ("yue-HK", False), ("", True)])
def test_a_language_that_is_none_is_warned_of(owner: Connection, language: str, warned: bool) -> None:
    warnings: list[str | None] = []
    owner.add_notice_handler(lambda d: warnings.append(d.message_primary))
    owner.execute("SELECT ml_rag.text_search_configuration(%s)", (language,))
    assert warnings == [f'the language "{language}" is not known'] * warned


def test_without_a_language_the_databases_default_holds(owner: Connection) -> None:
    owner.execute("SET default_text_search_config = 'pg_catalog.french'")
    keyword_store(owner, ["les chevaux"])
    owner.execute("SET default_text_search_config = 'pg_catalog.english'")
    assert found(owner, "cheval") == [1]
    add(owner, ["le cheval"], 2)
    assert found(owner, "chevaux") == [1, 2]


def test_a_configuration_of_the_users_own(owner: Connection) -> None:
    owner.execute('CREATE SCHEMA s; CREATE TEXT SEARCH CONFIGURATION s."My Own" (COPY = simple)')
    keyword_store(owner, ["running"], options='{"text_search_configuration": "s.\\"My Own\\""}')
    assert found(owner, "running") == [1]
    assert tokens(owner, "running", 's."My Own"') == {"running": 1}


def test_forced_row_level_security_must_not_hide_rows_from_the_index(
    owner: Connection, asker: Connection, db: Database
) -> None:
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(db.role("asker"))))
    asker.execute(f"CREATE TABLE own.docs ({COLUMNS.format(type='public.vector(3)')})")
    asker.execute("ALTER TABLE own.docs ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
    with error("55000", "NO FORCE ROW LEVEL SECURITY"):
        enable(asker, "own.docs")


def without_numpy(db: Database) -> Connection:
    connection = db.connect()
    connection.execute("DO LANGUAGE plpython3u $$ import sys; sys.modules['numpy'] = None $$")
    return connection


def test_without_numpy_keyword_search_is_55000_with_what_to_install(owner: Connection, db: Database) -> None:
    keyword_store(owner, ["fox"])
    connection = without_numpy(db)
    for statement in (
        "SELECT ml_rag.enable_keyword_search('docs')",
        "SELECT ml_rag.fold_keyword_index('docs')",
        "SELECT * FROM ml_rag.keyword((SELECT array_agg(s) FROM ml_rag.discover() AS s), 'fox')",
    ):
        with error("55000", "needs numpy", "python3-numpy"):
            connection.execute(statement)
    # what it does not need: to write a row
    add(connection, ["fox"], 2)
    assert found(owner) == [1, 2]


def test_without_numpy_a_store_is_made_without_an_index(owner: Connection, db: Database) -> None:
    connection = without_numpy(db)
    warnings: list[tuple[str | None, str | None]] = []
    connection.add_notice_handler(lambda d: warnings.append((d.message_primary, d.message_hint)))
    connection.execute("SELECT ml_rag.create_store('public.made')")
    ((message, hint),) = warnings
    assert "public.made gets no keyword index: keyword search needs numpy" in (message or "")
    assert "python3-numpy" in (hint or "")
    connection.execute("SELECT ml_rag.index_store('made')")
    assert_nothing_left(owner)


@pytest.mark.parametrize("store", ["NULL", "0", "4294967295"])
@pytest.mark.parametrize("routine", ["enable_keyword_search", "disable_keyword_search", "fold_keyword_index"])
def test_a_table_that_is_not_there_is_42P01(owner: Connection, routine: str, store: str) -> None:
    with error("42P01"):
        owner.execute(f"SELECT ml_rag.{routine}({store}::oid::regclass)")
