"""evaluate/questions: what ml_rag_evaluate takes as questions, and as options."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database, noticed, value_of
from support.stores import create_store, error, fake_embedding

STORE = [("a.txt", 1, 1, "apples are red", None), ("b.txt", 2, 1, "the sky is blue", None)]


@pytest.fixture
def asker_with_store(owner: Connection, asker: Connection) -> Connection:
    create_store(owner, rows=[(*row[:4], fake_embedding(row[3] or "")) for row in STORE], type="vector(16)")
    return asker


def evaluate(connection: Connection, questions: str, **options: Any) -> Any:
    return value_of(connection, "SELECT ml_rag_evaluate(%s, %s)", (questions, json.dumps(options)))


def asked(connection: Connection, run: Any) -> list[tuple[str, str]]:
    return connection.execute(
        "SELECT question_id, question FROM ml_rag.evaluation_question WHERE run_id = %s ORDER BY 1", (run["run_id"],)
    ).fetchall()


@pytest.mark.parametrize(
    "questions",
    [
        "questions",
        "pg_temp.questions",
        ' "questions" ',
        "TABLE questions",
        "SELECT * FROM questions ORDER BY id;",
        "-- a comment\nSELECT * FROM questions -- another",
        "WITH q AS (SELECT * FROM questions) SELECT * FROM q",
        "VALUES ('1', 'apples'), ('2', 'sky')",
        "(SELECT id, question FROM questions)",
    ],
)
def test_questions_come_from_a_table_or_a_query(asker_with_store: Connection, questions: str) -> None:
    asker_with_store.execute("CREATE TEMP TABLE questions AS VALUES (1, 'apples'), (2, 'sky')")
    asker_with_store.execute(
        "ALTER TABLE questions RENAME column1 TO id; ALTER TABLE questions RENAME column2 TO question"
    )
    columns = {"id": "column1", "question": "column2"} if questions.startswith("VALUES") else {}
    run = evaluate(asker_with_store, questions, columns=columns)
    assert asked(asker_with_store, run) == [("1", "apples"), ("2", "sky")]


def test_questions_come_from_a_regclass(asker_with_store: Connection) -> None:
    asker_with_store.execute("CREATE TEMP TABLE \"My Questions\" AS SELECT 'apples' AS question")
    query = "SELECT ml_rag_evaluate('pg_temp.\"My Questions\"'::regclass)"
    (run,) = asker_with_store.execute(query).fetchone() or (None,)
    assert asked(asker_with_store, run) == [("1", "apples")]
    with error("42P01"):
        asker_with_store.execute("SELECT ml_rag_evaluate(4294967295::oid::regclass)")


def test_names_mean_what_they_mean_to_the_caller(owner: Connection, asker_with_store: Connection, db: Database) -> None:
    owner.execute(
        "CREATE SCHEMA one; CREATE SCHEMA two; GRANT USAGE ON SCHEMA one, two TO ml_rag_user;"
        "CREATE TABLE one.questions AS SELECT 'apples' AS question;"
        "CREATE TABLE two.questions AS SELECT 'sky' AS question;"
        "GRANT SELECT ON ALL TABLES IN SCHEMA one, two TO ml_rag_user"
    )
    for path, question in (("one, two, public", "apples"), ("two, one, public", "sky")):
        asker_with_store.execute(f"SET search_path = {path}")
        for source in ("questions", "SELECT * FROM questions"):
            assert asked(asker_with_store, evaluate(asker_with_store, source)) == [("1", question)]


@pytest.mark.parametrize(
    ("questions", "sqlstate"),
    [
        ("SELECT 'x' AS question; DROP TABLE victim", "42601"),
        ("SELECT 'x' AS question) AS x; DROP TABLE victim; --", "42601"),
        ("DROP TABLE victim", "42601"),
        ("DELETE FROM victim RETURNING 'x' AS question", "42601"),
        ("WITH gone AS (DELETE FROM victim RETURNING 1) SELECT 'x' AS question", "0A000"),
        ("SELECT spoil() AS question", "25006"),
        ("SELECT question FROM nowhere", "42P01"),
        ("nowhere", "42P01"),
        ("pg_authid", "42501"),
        ("", "42601"),
        ("not a query", "42601"),
    ],
)
def test_a_query_only_reads(owner: Connection, asker_with_store: Connection, questions: str, sqlstate: str) -> None:
    owner.execute(
        "CREATE TABLE victim AS SELECT 1 AS n; GRANT ALL ON victim TO ml_rag_user;"
        "CREATE FUNCTION spoil() RETURNS text LANGUAGE sql AS $$ DELETE FROM victim RETURNING 'x' $$;"
        "GRANT EXECUTE ON FUNCTION spoil() TO ml_rag_user"
    )
    with error(sqlstate, ours=False):
        evaluate(asker_with_store, questions)
    assert asker_with_store.execute("SELECT n FROM victim").fetchall() == [(1,)]
    assert asker_with_store.execute("SHOW transaction_read_only").fetchone() == ("off",)


def test_what_a_query_did_to_temporary_tables_is_rolled_back(owner: Connection, asker_with_store: Connection) -> None:
    owner.execute(
        "CREATE FUNCTION note() RETURNS text LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO pg_temp.notes VALUES (1); RETURN 'sky'; END $$"
    )
    asker_with_store.execute("CREATE TEMP TABLE notes (n integer)")
    assert evaluate(asker_with_store, "SELECT note() AS question")["questions"] == 1
    assert asker_with_store.execute("SELECT count(*) FROM notes").fetchone() == (0,)


def test_the_query_runs_as_the_caller(owner: Connection, asker_with_store: Connection, db: Database) -> None:
    owner.execute(
        "CREATE TABLE guarded AS SELECT * FROM (VALUES ('apples', 'tenant'), ('sky', 'asker')) AS v (question, who);"
        "ALTER TABLE guarded ENABLE ROW LEVEL SECURITY; GRANT SELECT ON guarded TO ml_rag_user;"
        "CREATE POLICY own ON guarded USING (current_user LIKE '%\\_' || who)"
    )
    assert asked(asker_with_store, evaluate(asker_with_store, "guarded")) == [("1", "sky")]
    tenant = db.connect("tenant")
    assert asked(tenant, evaluate(tenant, "guarded")) == [("1", "apples")]


def test_operators_of_the_caller_capture_nothing(asker_with_store: Connection, owner: Connection) -> None:
    owner.execute(
        "CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC;"
        "CREATE FUNCTION evil.capture(text, text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;"
        "CREATE OPERATOR evil.|| (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.capture);"
        "CREATE FUNCTION evil.to_jsonb(anyelement) RETURNS jsonb LANGUAGE plpgsql"
        " AS $$ BEGIN RAISE 'captured'; END $$;"
        "CREATE FUNCTION evil.format(text, text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;"
        "CREATE TYPE evil.regclass AS (a integer);"
    )
    asker_with_store.execute("SET search_path = evil, pg_catalog, public")
    asker_with_store.execute("CREATE TEMP TABLE questions AS SELECT 'sky' AS question")
    for source in ("questions", "SELECT * FROM questions"):
        assert evaluate(asker_with_store, source)["questions"] == 1


def test_columns_have_any_names(asker_with_store: Connection) -> None:
    query = "SELECT 'q7' AS _id, 'the sky is blue' AS text, ARRAY['b.txt'] AS docs"
    run = evaluate(asker_with_store, query, columns={"id": "_id", "question": "text", "documents": "docs"})
    assert asked(asker_with_store, run) == [("q7", "the sky is blue")]
    assert run["measures"]["recall@1"] == 1


@pytest.mark.parametrize(
    ("query", "options", "sqlstate", "words"),
    [
        ("SELECT 1 AS q", {}, "42703", ["question"]),
        ("SELECT 'x' AS question", {"columns": {"documents": "docs"}}, "42703", ["docs"]),
        ("SELECT 'x' AS question WHERE false", {}, "22023", ["no questions"]),
        ("SELECT 'x' AS question, 1 AS id FROM generate_series(1, 2)", {}, "22023", ["one id"]),
        ("SELECT 'x' AS question, true AS documents", {}, "22023", ["expected documents"]),
        ("SELECT 'x' AS question", {"k": []}, "22023", ['"k"']),
        ("SELECT 'x' AS question", {"k": [0]}, "22023", ['"k"']),
        ("SELECT 'x' AS question", {"k": [101]}, "22023", ['"k"']),
        ("SELECT 'x' AS question", {"k": [1.5]}, "22023", ['"k"']),
        ("SELECT 'x' AS question", {"k": ["1"]}, "22023", ['"k"']),
        ("SELECT 'x' AS question", {"k": list(range(1, 22))}, "22023", ['"k"']),
        ("SELECT 'x' AS question", {"seed": -1}, "22023", ["seed"]),
        ("SELECT 'x' AS question", {"refusal_pattern": "("}, "22023", ["refusal_pattern"]),
        ("SELECT 'x' AS question", {"options": {"n_citation": 3}}, "22023", ["n_citations"]),
        ("SELECT 'x' AS question", {"options": {"query_embedding": [1]}}, "22023", ["query_embedding"]),
        ("SELECT 'x' AS question", {"n_citations": 3}, "22023", ["n_citations"]),
        ("SELECT 'x' AS question", {"columns": {"questions": "x"}}, "22023", ['"question"']),
    ],
)
def test_what_is_wrong_is_said(
    asker_with_store: Connection, query: str, options: dict[str, Any], sqlstate: str, words: list[str]
) -> None:
    with error(sqlstate, *words):
        evaluate(asker_with_store, query, **options)


def test_no_questions_at_all(asker_with_store: Connection) -> None:
    with error("22023", "no questions"):
        asker_with_store.execute("SELECT ml_rag_evaluate(NULL::text)")


def test_limit_takes_the_first_and_seed_draws(asker_with_store: Connection) -> None:
    query = "SELECT n AS id, 'sky' AS question FROM generate_series(1, 40) AS n"

    def ids(**options: Any) -> set[str]:
        return {row[0] for row in asked(asker_with_store, evaluate(asker_with_store, query, **options))}

    assert ids(limit=5) == {"1", "2", "3", "4", "5"}
    assert len(ids(limit=100)) == 40
    drawn = ids(limit=5, seed=1)
    assert len(drawn) == 5
    assert drawn == ids(limit=5, seed=1)
    assert any(ids(limit=5, seed=seed) != drawn for seed in (2, 3))


def test_each_option_at_its_limits(asker_with_store: Connection) -> None:
    query = "SELECT 'the sky is blue' AS question, 'b.txt' AS documents"
    for options in (
        {"k": [1]},
        {"k": [100, 1, 100]},
        {"k": list(range(1, 21))},
        {"limit": 1},
        {"limit": 1000000},
        {"seed": 0},
        {"seed": 2**32 - 1},
        {"name": None, "k": None, "match": None, "keep": None, "limit": None, "columns": None, "options": None},
    ):
        run = evaluate(asker_with_store, query, **options)
        assert run["measures"]["recall@1"] == 1, options
        cutoffs = {int(m.split("@")[1]) for m in run["measures"] if m.startswith("ndcg@")}
        assert cutoffs == set(options.get("k") or [1, 3, 5, 10])


def test_strangers_may_not(db: Database) -> None:
    for call in ("ml_rag_evaluate('SELECT 1')", "ml_rag_compare_runs(1, 2)"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.connect("stranger").execute(f"SELECT * FROM {call}")


def warned(connection: Connection, questions: str, **options: Any) -> list[str]:
    """The warnings of a run, each with its detail and hint in one line."""
    told = noticed(connection, lambda d: f"{d.message_primary} | {d.message_detail} | {d.message_hint}")
    evaluate(connection, questions, **options)
    return told


def test_expected_documents_that_no_store_has_are_told(owner: Connection, asker: Connection) -> None:
    names = ["/srv/handbook/travel policy.pdf", "/srv/handbook/leave.pdf", "plans.pdf"]
    create_store(owner, rows=[(n, i, 1, n, fake_embedding(n)) for i, n in enumerate(names, 1)], type="vector(16)")
    known = """SELECT 'q' AS question, '["travel policy.pdf", "handbook/leave.pdf", "plans.pdf"]'::jsonb AS documents"""
    assert warned(asker, known) == []
    assert warned(asker, "SELECT 'q' AS question, 2 AS documents", match="document_id") == []
    wrong = """SELECT 'q' AS question, '["plans.pdf", "travel polcy.pdf", "zzz"]'::jsonb AS documents"""
    (warning,) = warned(asker, wrong)
    assert warning.startswith("2 of 3 expected documents are in none of the vector stores | ")
    assert 'The first: "travel polcy.pdf". Searched: public.docs.' in warning
    assert 'Did you mean "/srv/handbook/travel policy.pdf"' in warning
    (warning,) = warned(asker, known, match="document_name")
    assert warning.startswith("2 of 3 expected documents")
    assert 'The first: "handbook/leave.pdf"' in warning
    (warning,) = warned(asker, "SELECT 'q' AS question, 9 AS documents", match="document_id")
    assert 'The first: "9"' in warning
    # nothing is like it
    (warning,) = warned(asker, "SELECT 'q' AS question, 'xyz' AS documents")
    assert "Did you mean" not in warning


def test_without_expected_documents_no_names_are_read(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "red", fake_embedding("red"))], type="vector(16)")
    assert warned(asker, "SELECT 'q' AS question") == []
    assert warned(asker, "SELECT 'q' AS question, '[]'::jsonb AS documents") == []
