"""nlsql/question, nlsql/statement, nlsql/functions: a question becomes a statement and rows, or is refused."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database, noticed, value_of
from support.schema import SqlModel, ask, metadata
from support.stores import error, warnings_of

STATEMENTS = Path(__file__).parents[1] / "security" / "statements.json"
UNANSWERABLE = {"answerable": False, "sql": ""}


def test_a_question_becomes_a_statement_and_its_rows(model: SqlModel, shop: Connection, asker: Connection) -> None:
    sql = "SELECT status, count(*) FROM shop.orders GROUP BY status ORDER BY status"
    model.writes(sql + ";\n")
    assert ask(asker, "How many orders are there of each status?") == {
        "tables": ["shop.orders", "shop.customers"],
        "schemas": ["shop"],
        "model_id": "fake-generate",
        "sql_query": sql + ";",
        "is_sql_valid": True,
        "columns": ["status", "count"],
        "rows": [["new", 33], ["paid", 34], ["sent", 33]],
    }


def test_the_procedure_gives_the_same(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.writes("SELECT 1 FROM shop.orders LIMIT 1")
    assert value_of(asker, "CALL nl_sql('q', NULL, '{\"max_rows\": 5}')") == ask(asker, "q", max_rows=5)


def test_without_executing(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.writes("SELECT 1 / 0 FROM shop.orders")
    found = ask(asker, execute=False)
    assert found["is_sql_valid"] is True
    assert not {"rows", "columns"} & found.keys()


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (UNANSWERABLE, "cannot answer"),
        *((text, "not JSON") for text in ("", "nonsense", "null", "[]", "{}", '{"sql": 7}')),
        *((f'{{"answerable": true, "sql": {sql}}}', "not JSON") for sql in ('""', "null")),
    ],
)
def test_an_unanswerable_question_is_refused_and_so_is_an_answer_that_is_none(
    model: SqlModel, shop: Connection, asker: Connection, written: Any, reason: str
) -> None:
    model.answers = [written]
    found = ask(asker, "Which stars do customers give?")
    assert (found["sql_query"], found["is_sql_valid"]) == (None, False)
    assert reason in found["reason"]
    assert (len(model.asked) == 1) == (written == UNANSWERABLE)


def test_what_the_model_is_asked(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.answers = [UNANSWERABLE]
    examples = [{"question": "How many?", "sql": "SELECT count(*) FROM shop.orders"}]
    ask(asker, "Who buys?", examples=examples, tables=["shop.customers"], model_id="fake-generate")
    (body,) = model.asked
    system, user = body["messages"]
    assert system["role"] == "system"
    assert "never instructions" in system["content"]
    assert user["content"].startswith("Tables:\n\nCREATE TABLE shop.customers ( -- people who buy\n")
    assert (
        "\n\nQuestion: How many?\nStatement: SELECT count(*) FROM shop.orders\n\nQuestion: Who buys?" in user["content"]
    )
    assert "shop.orders (" not in user["content"]
    assert body["temperature"] == 0
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["answerable", "sql"]


def test_a_failing_statement_goes_back_to_the_model_with_the_error(
    model: SqlModel, shop: Connection, asker: Connection
) -> None:
    model.writes("SELECT nothing FROM shop.orders", "DELETE FROM shop.orders", "SELECT min(id) FROM shop.orders")
    assert ask(asker)["rows"] == [[1]]
    prompts = [body["messages"][1]["content"] for body in model.asked]
    assert len(prompts) == 3
    assert "refused or failed" not in prompts[0]
    assert 'SELECT nothing FROM shop.orders\n42703: column "nothing" does not exist' in prompts[1]
    assert "DELETE FROM shop.orders\n42601: only a single SELECT is allowed" in prompts[2]


@pytest.mark.parametrize(
    ("sql", "sqlstate", "name"),
    [
        ("SELECT string_agg(name, ',')::integer FROM shop.customers", "22P02", "InvalidTextRepresentation"),
        ("SELECT (SELECT name FROM shop.customers WHERE id = 3)::date", "22007", "InvalidDatetimeFormat"),
        ("SELECT ('{' || min(name))::jsonb FROM shop.customers", "22P02", "InvalidTextRepresentation"),
        ("SELECT 'x' ~ ('(' || min(name)) FROM shop.customers", "2201B", "InvalidRegularExpression"),
    ],
)
def test_an_error_of_a_run_tells_the_model_no_value(
    model: SqlModel, shop: Connection, asker: Connection, sql: str, sqlstate: str, name: str
) -> None:
    """A remote model could read the tables by such errors; the caller sees them."""
    model.writes(sql)
    assert ask(asker)["reason"].startswith(f"{sqlstate}: ")
    prompts = [body["messages"][1]["content"] for body in model.asked]
    assert len(prompts) == 3
    for prompt in prompts[1:]:
        told = prompt.partition("refused or failed:\n")[2]
        assert told == f"{sql}\n{sqlstate} ({name}) when it was run\nWrite one that works."


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        *(
            (sql, "only a single SELECT is allowed")
            for sql in (
                "DELETE FROM shop.orders",
                "INSERT INTO shop.orders SELECT * FROM shop.orders",
                "UPDATE shop.orders SET amount = 0",
                "MERGE INTO shop.orders AS o USING shop.customers AS c ON o.id = c.id WHEN MATCHED THEN DELETE",
                "DROP TABLE shop.orders",
                "TRUNCATE shop.orders",
                "WITH x AS (DELETE FROM shop.orders RETURNING *) SELECT * FROM x",
                "WITH x AS (SELECT 1) DELETE FROM shop.orders",
                "SELECT 1 INTO TEMP made",
                "SELECT 1; SELECT 2",
                "EXPLAIN SELECT 1",
            )
        ),
        (f"SELECT 1{' ' * 20_000}+1", "longer than 20000"),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_not_a_select_is_told_so(
    model: SqlModel, shop: Connection, asker: Connection, sql: str, reason: str
) -> None:
    model.writes(sql)
    assert reason in ask(asker, use_retry=False)["reason"]


def test_after_three_attempts_it_is_not_valid(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.writes("SELECT nothing FROM shop.orders")
    found = ask(asker)
    assert found["is_sql_valid"] is False
    assert found["reason"].startswith("42703: ")
    assert "rows" not in found
    assert len(model.asked) == 3
    ask(asker, use_retry=False)
    assert len(model.asked) == 4


def test_the_fake_model_refuses(shop: Connection, asker: Connection) -> None:
    assert ask(asker)["is_sql_valid"] is False


def test_the_smallest_models_are_not_asked(model: SqlModel, shop: Connection, asker: Connection) -> None:
    found = ask(asker, model_id="tiny")
    assert (found["sql_query"], found["is_sql_valid"], found["model_id"]) == (None, False, "tiny")
    assert found["reason"] == (
        'model tiny is too small to write SQL. Name a larger one in "model_id", such as large, after "get large".'
    )
    assert ask(asker, model_id="extractive")["reason"] == (
        "model extractive only takes sentences out of documents, and cannot write SQL."
        ' Name a language model in "model_id", such as large, after "get large".'
    )
    assert model.asked == []


def test_an_error_of_the_model_is_the_calls_error(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.answers = [({"error": {"message": "the model failed", "code": "engine_failed"}}, "500 x")]
    with error("38000", "the model failed"):
        ask(asker)


def test_verbose(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.writes("SELECT nothing", "SELECT 1")
    for verbose, expected in ((0, []), (1, ["attempt 1: 42703", "attempt 2: valid"]), (2, ["prompt of attempt 1"])):
        model.writes("SELECT nothing", "SELECT 1")
        with warnings_of(asker) as caught:
            ask(asker, verbose=verbose)
        told = [w[2] for w in caught]
        assert len(told) == 2 * verbose
        for start in expected:
            assert any(line.startswith(start) for line in told), (start, told)


def test_max_rows(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.writes("SELECT id FROM shop.orders ORDER BY id")
    for limit, n in ((100, 100), (1000, 100), (99, 99), (1, 1)):
        with warnings_of(asker) as caught:
            assert ask(asker, max_rows=limit)["rows"] == [[i] for i in range(1, n + 1)]
        assert [w[:2] for w in caught] == ([] if n == 100 else [("WARNING", "01000")])


def test_rows_of_many_megabytes_are_cut(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.writes("SELECT repeat('x', 1000000) FROM shop.orders")
    with warnings_of(asker) as caught:
        assert len(ask(asker)["rows"]) == 16
    assert "only the first 16 rows" in caught[0][2]


def test_forms_of_values(model: SqlModel, shop: Connection, asker: Connection) -> None:
    asker.execute("SET timezone = 'UTC'; SET datestyle = 'German'; SET intervalstyle = 'iso_8601'")
    values = {
        "1": 1,
        "12345678901234567890123.5000": 12345678901234567890123.5,
        "'NaN'::numeric": "NaN",
        "1.5::float8": 1.5,
        "'Infinity'::float8": "Infinity",
        "true": True,
        "NULL::int": None,
        "'a \"b\" \\ ü 😀'": 'a "b" \\ ü 😀',
        "date '2026-05-01'": "2026-05-01",
        "timestamptz '2026-05-01 12:00Z'": "2026-05-01 12:00:00+00",
        "interval '1 day 2 hours'": "1 day 02:00:00",
        "'{\"a\": [1, null]}'::jsonb": {"a": [1, None]},
        "ARRAY[1, NULL]": [1, None],
        "ARRAY['a']": ["a"],
        "decode('00ff', 'hex')": "\\x00ff",
        "'small'::shop.size": "small",
        "'{}'::int[]": [],
    }
    model.writes("SELECT " + ", ".join(values))
    assert ask(asker)["rows"] == [list(values.values())]
    row = asker.execute("SELECT ml_nl_sql('q') #>> '{rows,0,1}'").fetchone()
    assert row == ("12345678901234567890123.5000",)


def test_json_that_jsonb_cannot_hold_is_text(model: SqlModel, shop: Connection, asker: Connection) -> None:
    """Whoever writes one row could have every answer fail that has it."""
    shop.execute("CREATE TABLE shop.notes (id serial, note json); GRANT SELECT ON shop.notes TO ml_rag_user")
    insert = "INSERT INTO shop.notes (note) VALUES (%s::text::json)"
    low, high = 1, 100_000
    while high - low > 1:  # as deep as can be stored
        middle = (low + high) // 2
        try:
            shop.execute(insert, ("[" * middle + "]" * middle,))
            low = middle
        except psycopg.errors.StatementTooComplex:
            high = middle
    shop.execute("TRUNCATE shop.notes")
    notes = ['{"a": "\\ud800"}', '"\\u0000"', '{"n": 1e999999}', "[" * low + "]" * low]
    for note in ['{"a": 1.10}', *notes]:
        shop.execute(insert, (note,))
    model.writes("SELECT note FROM shop.notes ORDER BY id")
    assert ask(asker, use_retry=False)["rows"] == [[{"a": 1.1}], *([note] for note in notes)]
    model.writes("SELECT ARRAY[note] FROM shop.notes ORDER BY id")
    assert ask(asker, use_retry=False)["rows"] == [[[{"a": 1.1}]], *([[note]] for note in notes)]


def test_names_of_columns_and_order_are_kept(model: SqlModel, shop: Connection, asker: Connection) -> None:
    columns = 'id, id, count(*), count(*), 7, \'x\' AS "a ""b"" {c} \\ (d)", 8 AS "ü"'
    model.writes(f"SELECT {columns} FROM shop.orders GROUP BY 1 LIMIT 0")
    found = ask(asker)
    assert found["columns"] == ["id", "id", "count", "count", "?column?", 'a "b" {c} \\ (d)', "ü"]
    assert found["rows"] == []
    model.writes("SELECT id FROM shop.orders ORDER BY amount DESC")
    assert [row[0] for row in ask(asker)["rows"]] == list(range(100, 0, -1))


@pytest.mark.parametrize("sql", json.loads(STATEMENTS.read_text())["needed"])
def test_what_questions_need(model: SqlModel, shop: Connection, asker: Connection, sql: str) -> None:
    model.writes(sql)
    found = ask(asker, use_retry=False)
    assert "reason" not in found


def test_extensions_operators_are_found(model: SqlModel, shop: Connection, asker: Connection) -> None:
    shop.execute("CREATE TABLE shop.points (id integer, place vector(2)); GRANT SELECT ON shop.points TO ml_rag_user")
    shop.execute("INSERT INTO shop.points VALUES (1, '[0,1]'), (2, '[3,5]')")
    model.writes("SELECT id FROM shop.points ORDER BY place <-> '[3,4]'")
    assert ask(asker)["rows"] == [[2], [1]]


def test_row_level_security_holds(model: SqlModel, shop: Connection, asker: Connection) -> None:
    shop.execute("ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY")
    shop.execute("CREATE POLICY own ON shop.orders TO ml_rag_user USING (customer_id = 7)")
    model.writes("SELECT DISTINCT customer_id FROM shop.orders")
    assert ask(asker)["rows"] == [[7]]


def test_privileges_are_the_callers(model: SqlModel, shop: Connection, asker: Connection) -> None:
    shop.execute("REVOKE SELECT ON shop.customers FROM ml_rag_user; GRANT SELECT (id) ON shop.customers TO ml_rag_user")
    model.writes("SELECT name FROM shop.customers")
    assert ask(asker)["reason"].startswith("42501: permission denied")
    model.writes("SELECT word FROM shop.secrets")
    found = ask(asker)
    assert "canary" not in json.dumps(found)
    assert "none of the tables" in found["reason"]


def test_tables_that_the_call_excludes_are_not_read(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.writes("SELECT count(*) FROM shop.orders")
    assert "shop.orders, which is none of the tables" in ask(asker, tables=["shop.customers"])["reason"]
    assert ask(asker, n_tables=1, tables=["shop.orders"])["rows"] == [[100]]
    # shown are the n_tables most relevant ones; the others may be read too
    assert ask(asker, "people who buy customers", n_tables=1)["rows"] == [[100]]


def test_where_no_temporary_table_can_be_made_no_model_is_asked(
    model: SqlModel, shop: Connection, asker: Connection, db: Database
) -> None:
    shop.execute(f"REVOKE TEMP ON DATABASE {db.name} FROM PUBLIC")
    with error("42501", "temporary") as caught:
        ask(asker)
    assert "GRANT TEMP" in caught.hint
    asker.execute("SET default_transaction_read_only = on")
    with error("25006", "read-only"):
        ask(asker)
    assert model.asked == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_rows": 0}, ["max_rows"]),
        ({"examples": [{"question": "q"}]}, ["examples"]),
        ({"examples": [{"question": "q", "sql": "s", "x": 1}]}, ['"x"']),
        ({"examples": ["q"]}, ["nl_sql_example"]),
        ({"examples": [{"question": "q", "sql": "s"}] * 21}, ["examples"]),
        ({"examples": [{"question": "q", "sql": "s" * 20_000}]}, ["examples"]),
        ({"schemas": ["shop"], "tables": ["shop.orders"]}, ["exclude each other"]),
        ({"model_id": "no-such-model"}, ["no-such-model"]),
    ],
)
def test_bad_options(shop: Connection, asker: Connection, options: dict[str, Any], words: list[str]) -> None:
    with error("22023", *words):
        ask(asker, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((f"SELECT ml_nl_sql({question})", ["empty"]) for question in ("''", "' '", "NULL")),
        ("CALL nl_sql('q', '{\"execute\": false}')", ["second argument of nl_sql", "NULL, options"]),
    ],
)
def test_an_empty_question_and_options_in_the_place_of_the_output(
    shop: Connection, asker: Connection, call: str, words: list[str]
) -> None:
    with error("22023", *words):
        asker.execute(call)


# -- limits -----------------------------------------------------------------------------------------------------------

ENDLESS = "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n FROM r) SELECT count(*) FROM r"


@pytest.mark.slow
def test_thirty_seconds_where_no_timeout_is_set(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.writes(ENDLESS)
    began = time.monotonic()
    found = ask(asker, use_retry=False)
    assert found["reason"] == "it took longer than 30 seconds"
    assert time.monotonic() - began > 29
    # nothing of the cancellation is left
    model.writes("SELECT 1")
    assert ask(asker)["rows"] == [[1]]


def test_the_timeout_of_the_caller_ends_the_call(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.writes(ENDLESS)
    asker.execute("SET statement_timeout = 1000")
    with error("57014"):
        ask(asker)


def test_a_cancelled_call_is_cancelled(model: SqlModel, shop: Connection, asker: Connection) -> None:
    model.writes(ENDLESS)
    timer = threading.Timer(1, asker.cancel)
    timer.start()
    with error("57014"):
        ask(asker)
    timer.join()
    assert len(model.asked) == 1
    model.writes("SELECT 1")
    assert ask(asker)["rows"] == [[1]]


@pytest.mark.fresh
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT repeat('x', 1000000000)",
        "SELECT array_agg(repeat('x', 1000000) || n) FROM generate_series(1, 1000) AS n",
        "SELECT string_agg(repeat('x', 1000000), '') FROM generate_series(1, 2000)",
    ],
)
def test_memory_is_bounded(model: SqlModel, shop: Connection, asker: Connection, sql: str) -> None:
    model.writes(sql)
    asker.execute("SET work_mem = '64MB'")
    assert ask(asker, use_retry=False)["reason"].startswith(("53200", "54000"))
    assert _peak(asker) < 900 * 1024
    model.writes("SELECT 1")
    assert ask(asker)["rows"] == [[1]]


@pytest.mark.fresh
@pytest.mark.parametrize("made", ["string_agg(repeat('é', 500000), '')", "string_agg(repeat('x', 1000000), '')"])
def test_an_error_as_large_as_the_memory_leaves_the_session_as_it_is(
    model: SqlModel, shop: Connection, asker: Connection, made: str
) -> None:
    """An error that PL/Python has no memory to take jumps over Python's frames, and ends the process sooner or later,
    and with it all sessions of the server."""
    told = noticed(asker)
    for megabytes in range(8, 44, 2):
        model.writes(f"SELECT ({made})::date FROM generate_series(1, {megabytes})")
        reason = ask(asker, use_retry=False)["reason"]
        assert reason.startswith(("22007", "53200", "54000")), (megabytes, reason[:100])
        assert len(reason) < 2000
    assert told == []
    model.writes("SELECT 1")
    assert ask(asker)["rows"] == [[1]]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT repeat('x', 110000000)",
        "SELECT repeat('x', 120000000)",
        "SELECT repeat('x', 128000000)",
        "SELECT array_agg(n + 1000) FROM generate_series(1, 9000000) AS n",
        "SELECT repeat('x', 15000000), repeat('y', 60000000) < 'a' FROM shop.orders",
    ],
)
def test_a_value_that_python_has_no_memory_for_ends_no_session(
    model: SqlModel, shop: Connection, asker: Connection, sql: str
) -> None:
    began = shop.execute("SELECT pg_postmaster_start_time(), pg_backend_pid()").fetchone()
    model.writes(sql)
    ask(asker, use_retry=False)
    model.writes("SELECT 1")
    assert ask(asker)["rows"] == [[1]]
    assert shop.execute("SELECT pg_postmaster_start_time(), pg_backend_pid()").fetchone() == began


def test_arrays_of_many_values_are_cut(model: SqlModel, shop: Connection, asker: Connection) -> None:
    """100 000 in an array, a million in all rows."""
    for n, rows in ((100_000, [[list(range(1, 100_001))]]), (100_001, [])):
        model.writes(f"SELECT array_agg(n) FROM generate_series(1, {n}) AS n")
        with warnings_of(asker) as caught:
            assert ask(asker, use_retry=False)["rows"] == rows
        assert len(caught) == (not rows)
    model.writes("SELECT ARRAY(SELECT 0 FROM generate_series(1, 90000)) FROM shop.orders")
    with warnings_of(asker) as caught:
        assert len(ask(asker, use_retry=False)["rows"]) == 11
    assert "only the first 11 rows" in caught[0][2]


@pytest.mark.fresh
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT ARRAY(SELECT 0::numeric FROM generate_series(1, 8000000))",
        "SELECT array_agg(ARRAY[n]) FROM generate_series(1, 200000) AS n",
        "SELECT repeat('\u0001', 1000000), repeat('\U0001f600', 100000) FROM shop.orders",
        "SELECT ('[' || repeat('1,', 400000) || '1]')::jsonb FROM shop.orders",
        # what is parsed grows with the square of the number of joins
        "SELECT 1 FROM shop.orders" + "".join(f" CROSS JOIN shop.orders AS o{i}" for i in range(450)),
        "SELECT * FROM (" * 500 + "TABLE shop.wide" + ") AS a" * 500,
    ],
)
def test_what_python_is_given_is_bounded(model: SqlModel, shop: Connection, asker: Connection, sql: str) -> None:
    columns = ", ".join(f"c{i} integer" for i in range(1500))
    shop.execute(f"CREATE TABLE shop.wide ({columns}); GRANT SELECT ON shop.wide TO ml_rag_user".encode())
    model.writes("SELECT 1")
    ask(asker)
    before = _peak(asker)
    model.writes(sql)
    ask(asker, use_retry=False)
    assert _peak(asker) - before < 500 * 1024


def _peak(session: Connection) -> int:
    """kB of memory at most so far."""
    with open(f"/proc/{session.info.backend_pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def test_temporary_files_are_bounded(model: SqlModel, shop: Connection, asker: Connection) -> None:
    limit = "current_setting('temp_file_limit')"
    found = asker.execute(f"SELECT {limit}, ml_rag._limit_temporary_files()::text, {limit}").fetchone()
    assert found == ("-1", "", "2GB")
    assert asker.execute(f"SELECT {limit}").fetchone() == ("-1",)
    shop.execute("SET temp_file_limit = '1GB'")
    assert shop.execute(f"SELECT ml_rag._limit_temporary_files()::text, {limit}").fetchone() == ("", "1GB")
    # and in a statement: 33 MB are more than 1 MB
    shop.execute("SET temp_file_limit = '1MB'; SET work_mem = '64kB'")
    model.writes("SELECT n FROM generate_series(1, 2000000) AS n ORDER BY n DESC LIMIT 1")
    assert ask(shop, use_retry=False)["reason"].startswith("53400: temporary file size exceeds")
    shop.execute("RESET temp_file_limit; RESET work_mem")


def test_values_of_types_of_others_are_made_text_by_no_cast(
    model: SqlModel, shop: Connection, asker: Connection
) -> None:
    shop.execute(
        "CREATE FUNCTION shop.told(shop.size) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT ''cast'' ';"
        "CREATE FUNCTION shop.told_json(shop.size) RETURNS json LANGUAGE sql IMMUTABLE AS 'SELECT ''7''::json';"
        "CREATE CAST (shop.size AS text) WITH FUNCTION shop.told;"
        "CREATE CAST (shop.size AS json) WITH FUNCTION shop.told_json;"
        "CREATE TYPE shop.pair AS (a shop.size, b integer); CREATE DOMAIN shop.whole AS integer;"
        "CREATE DOMAIN shop.list AS integer[];"
        "CREATE TABLE shop.odd AS SELECT 'small'::shop.size AS s, '{small,large}'::shop.size[] AS t, "
        " ROW('small', 1)::shop.pair AS p,"
        " 7::shop.whole AS w, '{7,8}'::shop.list AS l, '{{1,2},{3,4}}'::integer[] AS m, '[0:1]={5,6}'::integer[] AS o,"
        " '{2026-05-01}'::date[] AS d, ROW(NULL, NULL)::shop.pair AS n, '{\"(1,1),(0,0)\"}'::box[] AS b,"
        " '1 2'::int2vector AS v;"
        "GRANT SELECT ON shop.odd TO ml_rag_user"
    )
    model.writes("SELECT * FROM shop.odd")
    (row,) = ask(asker, use_retry=False)["rows"]
    assert row == [
        "small", ["small", "large"], "(small,1)", 7, [7, 8], [[1, 2], [3, 4]], [5, 6], ["2026-05-01"], "(,)",
        "{(1,1),(0,0)}", [1, 2],
    ]  # fmt: skip


def test_settings_are_as_before(model: SqlModel, shop: Connection, asker: Connection) -> None:
    names = ("transaction_read_only", "search_path", "jit", "datestyle", "max_parallel_workers_per_gather")

    def settings() -> list[Any]:
        return [asker.execute("SELECT current_setting(%s)", (name,)).fetchone() for name in names]

    before = settings()
    model.writes("SELECT 1")
    with asker.transaction():
        ask(asker)
        assert settings() == before
        asker.execute("CREATE TABLE pg_temp.still_writable (id integer)")
    # and memory is bounded no more
    assert asker.execute("SELECT octet_length(repeat('x', 700000000))").fetchone() == (700_000_000,)


def test_concurrent_callers_do_not_wait_for_each_other(model: SqlModel, shop: Connection, db: Database) -> None:
    model.writes("SELECT count(*) FROM shop.orders")
    first, second = db.connect("asker", autocommit=False), db.connect("tenant")
    assert ask(first)["rows"] == [[100]]
    second.execute("SET lock_timeout = 1000")
    assert ask(second)["rows"] == [[100]]
    with psycopg.connect(db.dsn, dbname=db.name, autocommit=True) as other:
        other.execute("SET lock_timeout = 5000")
        first.commit()
        other.execute("ALTER TABLE shop.orders ADD more integer")


@pytest.mark.fresh
def test_calls_are_counted(shop: Connection, asker: Connection) -> None:
    ask(asker)
    metadata(asker)
    rows = asker.execute("SELECT routine, stage, calls, errors FROM ml_rag.stats").fetchall()
    assert {("ml_nl_sql", "total", 1, 0), ("ml_nl_sql", "generate", 1, 0)} <= set(rows)
    assert ("ml_retrieve_schema_metadata", "total", 1, 0) in rows
