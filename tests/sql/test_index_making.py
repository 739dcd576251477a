"""keyword/index: keyword indexes are made, made anew and dropped: by whom, on what, with which options."""

from __future__ import annotations

import json
import random
import re
import string
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.cluster import Connection, Database, noticed
from support.keywords import add, assert_exact, enable, found, keyword_store, rows, runs, search, tokens, waiting
from support.stores import COLUMNS, create_store, error, mark

BY_WORDS = '{"semantic_search": false, "keyword_search": true}'


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


@pytest.mark.parametrize("is_there", [False, True])
def test_nothing_is_written_past_an_index_that_is_younger_than_the_snapshot(
    owner: Connection, db: Database, is_there: bool
) -> None:
    create_store(owner, rows=rows(["fox", "dog"]))
    if is_there:
        enable(owner)
    with owner.transaction(force_rollback=True):
        enable(owner)  # is not one
    older, other = db.connect(), db.connect()
    for connection in (older, other):
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM docs")
    add(other, ["fox"], 3)
    other.execute("COMMIT; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM docs")
    enable(owner, options='{"statistics": "visible"}')
    with error("40001", "keyword index", ours=False):
        older.execute("DELETE FROM docs WHERE document_id = 1")
    with error("40001", "keyword index", ours=False):
        add(other, ["fox"], 4)
    for connection in (older, other):
        connection.execute("ROLLBACK; BEGIN ISOLATION LEVEL REPEATABLE READ")
    older.execute("DELETE FROM docs WHERE document_id = 1; COMMIT")
    add(other, ["fox"], 4)
    other.execute("COMMIT")
    assert found(owner) == [3, 4]
    assert_exact(owner, "fox dog")


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
    statement = f"SELECT segment FROM ml_rag_search('fox', '{BY_WORDS}')"
    assert owner.execute(statement).fetchall() == [("FOX",)]
    assert owner.execute("SELECT key FROM ml_rag_internal.keyword_row").fetchall() == [("{C}",)]
    owner.execute("DELETE FROM docs WHERE id = 'c'")
    with error("P0002", "no segment found"):
        owner.execute(statement)


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
        assert owner.execute(f"SELECT count(*) FROM ml_rag_internal.keyword_{name}").fetchone() == (0,), name


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
    with error("55000", "no longer matches its columns", "enable_keyword_search('public.docs')"):
        owner.execute("DELETE FROM docs")
    enable(owner)
    owner.execute("UPDATE docs SET segment = 'dog'")


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_column_whose_values_triggers_do_not_see(owner: Connection, is_indexed: bool) -> None:
    if owner.info.server_version < 180000:
        pytest.skip("virtual generated columns are there from PostgreSQL 18 on")
    keyword_store(owner, ["fox"])
    if not is_indexed:
        owner.execute("SELECT ml_rag.disable_keyword_search('docs')")
    owner.execute("ALTER TABLE docs RENAME segment TO body")
    owner.execute("ALTER TABLE docs ADD segment text GENERATED ALWAYS AS (body)")
    if is_indexed:
        with error("55000", "no longer matches its columns"):
            owner.execute("UPDATE docs SET body = 'dog'")
    with error("55000", "virtual generated column", "STORED"):
        owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    owner.execute("ALTER TABLE docs DROP segment; ALTER TABLE docs ADD segment text GENERATED ALWAYS AS (body) STORED")
    enable(owner)
    owner.execute("UPDATE docs SET body = 'dog'")
    assert found(owner, "dog") == [1]


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
    for call in ("enable_keyword_search('docs')", "disable_keyword_search('docs')", "merge_keyword_index('docs')"):
        with error("42501", 'must be owner of table "public.docs"'):
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
    asker.execute("SELECT ml_rag.merge_keyword_index('own.docs')")
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
        ("TABLE x (id integer, segment text) PARTITION BY RANGE (id)", "no key"),
        (
            "TABLE y (id integer PRIMARY KEY, segment text) PARTITION BY RANGE (id);"
            " CREATE TABLE x PARTITION OF y DEFAULT",
            "a partition",
        ),
        ("VIEW x AS SELECT 1 AS id, 'a'::text AS segment", "not an ordinary table"),
        ("MATERIALIZED VIEW x AS SELECT 1 AS id, 'a'::text AS segment", "not an ordinary table"),
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
    statement = f"SELECT segment FROM ml_rag_search('fox dog', '{BY_WORDS}') ORDER BY 1"
    assert owner.execute(statement).fetchall() == [("dog",), ("fox",)]


def test_keys_of_awkward_text_and_columns_of_awkward_names(owner: Connection) -> None:
    owner.execute(
        'CREATE TABLE "My ""Docs" ("a ""key""" text, "b,{}" numeric, "T%ext" varchar, segment_embedding vector(3),'
        ' PRIMARY KEY ("a ""key""", "b,{}"))'
    )
    keys = ["", "NULL", "null", '"', "{}", "a,b", "\\", "'", " ", "é中", "$1", "%s"]
    enable(owner, '"My ""Docs"', '{"segment": "T%ext"}')
    for key in keys:
        owner.execute('INSERT INTO "My ""Docs" VALUES (%s, 1.50, %s)', (key, f"fox {key}"))
    owner.execute('SELECT ml_rag.merge_keyword_index(\'"My ""Docs"\')')
    assert owner.execute("SELECT count(*), count(DISTINCT key) FROM ml_rag_internal.keyword_row").fetchone() == (12, 12)
    owner.execute('UPDATE "My ""Docs" SET "T%ext" = \'dog\'')
    owner.execute('DELETE FROM "My ""Docs" WHERE "a ""key""" <> \'\\\'')
    assert owner.execute("SELECT key FROM ml_rag_internal.keyword_row").fetchall() == [(r'{"\\",1.50}',)]


def test_a_key_that_is_too_long_is_named(owner: Connection) -> None:
    """An index of PostgreSQL takes 2704 bytes of it and of what stands next to it."""
    owner.execute("CREATE TABLE docs (id text PRIMARY KEY, segment text, segment_embedding vector(3))")
    owner.execute("INSERT INTO docs SELECT i || repeat('x', 100000), 'fox' FROM generate_series(1, 9) AS i")
    enable(owner)  # these are compressed
    owner.execute("SELECT ml_rag.disable_keyword_search('docs')")
    long = "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=2680))
    owner.execute("INSERT INTO docs VALUES (%s, 'fox')", (long,))
    with error("54000", 'docs" is too long for an index') as caught:
        enable(owner)
    assert caught.detail == f"Key (id) of a row has 2680 bytes and begins with {long[:40]}."
    owner.execute("DELETE FROM docs WHERE id = %s", (long,))
    enable(owner)


@pytest.mark.parametrize(
    "options",
    [
        {"k1": -1}, {"segment": "nothing"}, {"segment": "metadata"}, {"text_search_configuration": "nothing"},
        {"text_search_configuration": "a.b.c.d"}, {"text_search_configuration": "no.english"},
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
    warnings = noticed(owner)
    owner.execute("SELECT ml_rag.text_search_configuration(%s)", (language,))
    assert warnings == [f'unknown language "{language}"'] * warned


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


@pytest.mark.fresh
def test_without_numpy_keyword_search_is_55000_with_what_to_install(owner: Connection, db: Database) -> None:
    keyword_store(owner, ["fox"])
    connection = without_numpy(db)
    for statement in (
        "SELECT ml_rag.enable_keyword_search('docs')",
        "SELECT ml_rag.merge_keyword_index('docs')",
        f"SELECT ml_rag_search('fox', '{BY_WORDS}')",
    ):
        with error("55000", "needs numpy", "python3-numpy"):
            connection.execute(statement)
    # what it does not need: to write a row
    add(connection, ["fox"], 2)
    assert found(owner) == [1, 2]


@pytest.mark.fresh
def test_numpy_of_another_python_is_told_from_none(owner: Connection, db: Database) -> None:
    """As Debian 13 leaves PostgreSQL 15 of Debian 12: the package is there, its compiled part is another Python's."""
    keyword_store(owner, ["fox"])
    text = "Error importing numpy: you should not try to import numpy from\nits source directory"
    with db.connect() as connection:
        connection.execute(
            "DO LANGUAGE plpython3u $$"
            "\nimport sys"
            "\nclass Broken:"
            "\n    def find_spec(self, name, path=None, target=None):"
            f"\n        if name == 'numpy': raise ImportError({text!r})"
            "\nsys.meta_path.insert(0, Broken())"
            "\n$$"
        )
        with error("55000", "needs numpy", "for another Python") as caught:
            connection.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert re.fullmatch(
        r"PL/Python here is Python 3\.\d+: Error importing numpy: you should not try to import numpy from\.",
        caught.detail,
    )


@pytest.mark.fresh
def test_without_numpy_a_store_is_made_without_an_index(owner: Connection, db: Database) -> None:
    connection = without_numpy(db)
    warnings = noticed(connection, lambda d: (d.message_primary, d.message_hint))
    connection.execute("SELECT ml_rag.create_store('public.made')")
    ((message, hint),) = warnings
    assert "public.made gets no keyword index: keyword search needs numpy" in (message or "")
    assert "python3-numpy" in (hint or "")
    connection.execute("SELECT ml_rag.index_store('made')")
    assert_nothing_left(owner)


@pytest.mark.parametrize("store", ["NULL", "0", "4294967295"])
@pytest.mark.parametrize(
    "routine", ["enable_keyword_search", "disable_keyword_search", "merge_keyword_index", "fold_keyword_index"]
)
def test_a_table_that_is_not_there_is_42P01(owner: Connection, routine: str, store: str) -> None:
    with error("42P01"):
        owner.execute(f"SELECT ml_rag.{routine}({store}::oid::regclass)")


# -- many texts at once -----------------------------------------------------------------------------------------------

#: what a tsvector's text says in other ways than words between blanks, or does not hold
AWKWARD = [
    "fox " * 254,
    "fox " * 255,
    "fox " * 300 + "dog",
    " ".join(f"w{i}" for i in range(16_400)) + " fox",
    "it's o'clock 'fox'",
    'http://fox.example/a\'b,c?d="{e}" C:\\fox\\dog a,b 1,5',
    "AX-4411 2024-01-31 -7 --8 a-b-9",
    "東京都 fox 京都",
    "Füchse und Hünde, ｆｏｘ",
    "{fox} {",
    "",
    " \n",
    "the of and",
    "x" * 3000 + " fox",
]


@pytest.mark.parametrize("statistics", ["all", "visible"])
@pytest.mark.parametrize("how", ["made", "inserted", "updated"])
def test_many_texts_have_the_tokens_of_each(owner: Connection, how: str, statistics: str) -> None:
    texts = [*AWKWARD, *(f"fox number{i}" for i in range(len(AWKWARD), 1100))]
    options = json.dumps({"statistics": statistics, "language": "en"})
    if how == "made":
        create_store(owner, rows=rows(texts))
        enable(owner, options=options)
    else:
        keyword_store(owner, ["dog"] * len(texts) if how == "updated" else [], options=options)
        if how == "updated":
            owner.execute(
                "UPDATE docs SET segment = s.segment FROM unnest(%s::text[]) WITH ORDINALITY AS s (segment, n)"
                " WHERE document_id = n",
                (texts,),
            )
        else:
            owner.execute(
                "INSERT INTO docs (document_name, metadata, document_id, segment_number, segment)"
                " SELECT 'd' || n, '{}', n, 1, s.segment FROM unnest(%s::text[]) WITH ORDINALITY AS s (segment, n)",
                (texts,),
            )
    assert waiting(owner)[0] == 0
    assert sum(n for n, _ in runs(owner)) >= len(texts)
    assert_exact(owner, "fox dog clock o'clock 4411 2024 31 7 9 東京都 füchs c d e w16399 w3 1,5 number700")


def test_rows_without_any_word(owner: Connection) -> None:
    create_store(owner, rows=rows(["", "the of"]))
    enable(owner)
    assert (runs(owner), found(owner)) == ([(2, 0)], [])
    add(owner, ["fox"], 3)
    assert found(owner) == [3]


def test_words_are_looked_for_by_parallel_workers(owner: Connection) -> None:
    plans: list[str] = []
    create_store(owner, rows=rows(["fox", "dog"]))
    owner.execute(
        "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on;"
        "SET client_min_messages = log; SET max_parallel_workers_per_gather = 2"
    )
    owner.add_notice_handler(lambda d: plans.append(d.message_primary or ""))
    enable(owner)
    (plan,) = [plan for plan in plans if "Parallel Append" in plan]
    assert "Workers Planned: 2" in plan
    # in as many parts, and the texts are no part of the plan
    assert plan.count("->  Result") == 8
    assert "fox" not in plan
    plans.clear()
    owner.execute(
        "INSERT INTO docs (document_name, metadata, document_id, segment_number, segment)"
        " SELECT 'd', '{}', i, 1, 'fox' FROM generate_series(10, 1200) AS i"
    )
    assert len([plan for plan in plans if "Workers Planned: 2" in plan]) == 1


def test_without_parallel_workers_an_index_is_the_same(owner: Connection) -> None:
    create_store(owner, rows=rows(["fox", "dog", "fox dog", "東京 fox"]))
    owner.execute("SET max_parallel_workers_per_gather = 0")
    enable(owner)
    assert_exact(owner, "fox dog 東京")


def test_an_error_in_a_worker_is_the_callers(owner: Connection) -> None:
    """Nothing of the index is left, nor a cursor on the rows."""
    keyword_store(owner)
    owner.execute("CREATE SCHEMA s; CREATE TEXT SEARCH CONFIGURATION s.c (COPY = simple)")
    enable(owner, options='{"text_search_configuration": "s.c"}')
    owner.execute("DROP TEXT SEARCH CONFIGURATION s.c")
    owner.execute("BEGIN; SAVEPOINT a")
    with error("42704", ours=False):
        owner.execute("INSERT INTO docs SELECT 'd', '{}', i, 1, 'fox' FROM generate_series(1, 1200) AS i")
    owner.execute("ROLLBACK TO a")
    assert owner.execute("SELECT name FROM pg_cursors WHERE name LIKE '<%'").fetchall() == []
    owner.execute("ROLLBACK")


def test_postings_are_read_and_long_texts_cut_without_compiling(owner: Connection) -> None:
    """However dear the planner thinks it is: its estimate grows with the index and the cuts, what is read does not."""
    plans: list[str] = []
    create_store(owner, rows=rows(["fox", "dog"]))
    enable(owner)
    owner.execute(
        "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on;"
        "SET auto_explain.log_analyze = on; SET client_min_messages = log; SET jit_above_cost = 0"
    )
    owner.add_notice_handler(lambda d: plans.append(d.message_primary or ""))
    assert found(owner, "fox") == [1]
    read = [plan for plan in plans if re.search("FROM ml_rag_internal.keyword_(posting|run|row)", plan)]
    assert len(read) >= 3
    assert not [plan for plan in read if "JIT:" in plan]
    # it says nothing of its plans
    (settings,) = owner.execute("SELECT p.proconfig FROM pg_proc AS p WHERE p.proname = '_lexemes'").fetchone() or ([],)
    assert "jit=off" in settings
