"""ground/schema: what a caller sees of an error: the fields that it was raised with, and one line of context."""

from __future__ import annotations

import re

import psycopg
import pytest

from support import programs
from support.cluster import Connection, Database, noticed
from support.stores import ROWS, create_store, create_text_store

BAD_OPTION = "SELECT * FROM ml_rag.option lists the options with their ranges and defaults."
OF_NL_SQL = (
    "embed_model_id, examples, execute, include_comments, max_rows, model_id, n_tables, schemas, tables, use_retry"
)
DIFFER = "the query embedding and the vector store differ in dimensions"

#: statement, SQLSTATE, message, and how detail and hint begin, where there is one
CASES: list[tuple[str, str, str, str | None, str | None]] = [
    ("CALL ml_rag('q', '{\"n\": 1}')", "22023", 'unknown option "n"', "Options of ml_rag: abstain, ", "Leave it out."),
    (
        "CALL ml_rag('q', '{\"n_citations\": \"x\"}')",
        *("22023", 'invalid value for option "n_citations"', 'Got "x"; allowed: an integer from 0 to 100.', BAD_OPTION),
    ),
    (
        "CALL ml_rag('q', '{\"vector_store\": [\"public.nowhere\"]}')",
        *(
            "P0002",
            "no vector store found",
            "Only stores of embedding model fake-embed ",
            'A name is "schema.table" or ',
        ),
    ),
    (
        'SELECT ml_rag_answer(\'q\', \'{"query_embedding": [1,2], "vector_store": ["public.docs"]}\')',
        *("22000", DIFFER, "The query embedding has 2 dimensions, ", "Name the store's own model "),
    ),
    (
        'SELECT * FROM ml_rag_search(\'q\', \'{"query_embedding": [1,2], "vector_store": ["public.docs"]}\')',
        *("22000", DIFFER, "The query embedding has 2 dimensions, ", "Name the store's own model "),
    ),
    (
        "SELECT * FROM ml_rag_search('q', '{\"embed_model_id\": \"none\"}')",
        *("22023", "model 'none' does not exist", "models that are there for the task embed: fake-embed", ""),
    ),
    ("SELECT ml_rag_chat('q', '{\"no\": 1}')", "22023", 'unknown option "no"', "Options of ml_rag: abstain, ", ""),
    ("CALL heatwave_chat('')", "22023", "the question is empty", None, "Ask a question: "),
    ("SELECT ml_embed_row('q', '{\"embed_model_id\": \"none\"}')", "22023", "model 'none' does not exist", "", ""),
    ("SELECT ml_generate('q', '{\"model_id\": \"none\"}')", "22023", "model 'none' does not exist", "", ""),
    ("SELECT ml_rank('q', '{}')", "22023", "the records are not an array", "Got object.", "Records are a JSON array "),
    ("CALL nl_sql('q', NULL, '{\"no\": 1}')", "22023", 'unknown option "no"', f"Options of ml_nl_sql: {OF_NL_SQL}", ""),
    ("SELECT ml_nl_sql('q', '{\"no\": 1}')", "22023", 'unknown option "no"', f"Options of ml_nl_sql: {OF_NL_SQL}", ""),
    ("SELECT ml_rag_evaluate('', '{\"no\": 1}')", "22023", 'unknown option "no"', "Options of ml_rag_evaluate: ", ""),
    (
        "SELECT * FROM ml_rag_compare_runs(1, 2)",
        *("22023", "evaluation run does not exist", "Run 1, 2.", "SELECT run_id, name, started_at FROM "),
    ),
    (
        "CALL ml_rag_table('public.nowhere.q', 'public.nowhere.a')",
        *("42P01", 'relation "public.nowhere" does not exist', None, None),
    ),
    (
        "CALL ml_embed_table('x', 'y')",
        *("22023", "invalid input_table_column", "Got 'x'; expected 'schema.table.column'.", None),
    ),
    (
        "SELECT ml_rag.create_store('public.s', '{\"no\": 1}')",
        *("22023", 'unknown option "no"', "Options of create_store: ", "Leave it out."),
    ),
    (
        "CALL ml_rag.run_vectorizer('public.texts', '{\"no\": 1}')",
        *("22023", 'unknown option "no"', "Options of run_vectorizer: ", "Leave it out."),
    ),
    (
        "CALL ml_rag.add_embedding('public.texts', 'x', '{\"no\": 1}')",
        *("22023", 'unknown option "no"', "Options of add_embedding: ", "Leave it out."),
    ),
    (
        "CALL ml_rag.create_node_group('public.texts', 'x', '{\"no\": 1}')",
        *("22023", 'unknown option "no"', "Options of create_node_group: ", "Leave it out."),
    ),
    (
        "SELECT ml_rag.load_document('public.texts', 'a', 'b', '{\"no\": 1}')",
        *("22023", 'unknown option "no"', "Options of load_documents: ", "Leave it out."),
    ),
    (
        "CALL vector_store_load('file:///nowhere', '{\"no\": 1}')",
        *("22023", 'unknown option "no"', "Options of vector_store_load: ", "Leave it out."),
    ),
]


def context(error: psycopg.Error) -> list[str]:
    return (error.diag.context or "").splitlines()


def raised(session: Connection, statement: str) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as error:
        session.execute(statement)
    return error.value


def test_an_error_has_its_fields_and_one_line_of_context(owner: Connection) -> None:
    create_text_store(owner)
    create_store(owner, rows=ROWS)
    for statement, state, message, detail, hint in CASES:
        error = raised(owner, statement)
        diag = error.diag
        assert (diag.sqlstate, diag.message_primary) == (state, message), statement
        for text, begins in ((diag.message_detail, detail), (diag.message_hint, hint)):
            assert text is None if begins is None else (text or "").startswith(begins), (statement, text)
            assert text != "", statement
        fields = diag.schema_name, diag.table_name, diag.column_name, diag.constraint_name, diag.datatype_name
        assert fields == (None,) * 5, statement
        (line,) = context(error)
        routine = statement.split("(")[0].split()[-1].split(".")[-1]
        assert f"{routine}(" in line, (statement, line)
        assert line.endswith(" at RAISE"), (statement, line)


def test_every_routine_does_so(module_owner: Connection) -> None:
    """But for those that parallel workers may run: they can have no subtransaction."""
    rows = module_owner.execute(
        "SELECT p.oid::regprocedure::text FROM pg_proc AS p JOIN pg_depend AS d ON d.objid = p.oid AND d.deptype = 'e'"
        " WHERE d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ml_rag')"
        " AND p.proname NOT LIKE '\\_%' AND p.proparallel <> 's' AND p.prosrc NOT LIKE '%ml_rag.\\_fields_of_error(%'"
    ).fetchall()
    assert rows == []


def test_what_psql_shows(db: Database, owner: Connection) -> None:
    create_text_store(owner)
    shown = programs.run("psql", db, "-X", "-q", input="CALL ml_rag('q', '{\"n_citations\": \"x\"}');\n").stderr
    assert re.sub(r"line \d+", "line N", shown) == (
        'ERROR:  invalid value for option "n_citations"\n'
        'DETAIL:  Got "x"; allowed: an integer from 0 to 100.\n'
        f"HINT:  {BAD_OPTION}\n"
        "CONTEXT:  PL/pgSQL function public.ml_rag(text,jsonb,jsonb) line N at RAISE\n"
    )


def test_debug1_has_the_context(owner: Connection) -> None:
    told = noticed(owner, lambda d: f"{d.message_primary}: {d.message_detail}")
    owner.execute("SET client_min_messages = debug1")
    raised(owner, "CALL ml_rag('q', '{\"n\": 1}')")
    owner.execute("RESET client_min_messages")
    detail, *_ = [t for t in told if t.startswith("the context of an error in ml_rag: ")]
    assert "_compiled(" in detail


def test_a_cancelled_call_is_cancelled(db: Database, owner: Connection) -> None:
    """Also where who called it catches OTHERS, which a cancelled statement is not one of."""
    create_text_store(owner)
    with db.connect() as other, other.transaction():
        other.execute("LOCK TABLE public.texts")
        owner.execute("SET statement_timeout = 300")
        call = "PERFORM * FROM ml_rag_search('cats', '{\"vector_store\": [\"public.texts\"]}')"
        error = raised(owner, f"DO $$ BEGIN {call}; EXCEPTION WHEN OTHERS THEN NULL; END $$")
    assert (error.sqlstate, error.diag.message_primary) == ("57014", "canceling statement due to statement timeout")
    inside, statement, block = context(error)
    assert inside.startswith("PL/pgSQL function public.ml_rag_search(text,jsonb) line ")
    assert statement.startswith("SQL statement ")
    assert block.startswith("PL/pgSQL function inline_code_block")


#: the session is cancelled just before the next search by words warns of a store without an index
CANCEL = """
DO LANGUAGE plpython3u $$
import os, signal
from ml_rag.backend.retrieval import reasons
listed = reasons._listed
def cancel(stores):
    reasons._listed = listed
    os.kill(os.getpid(), signal.SIGINT)
    return listed(stores)
reasons._listed = cancel
$$"""


def test_so_is_one_that_warns_in_that_moment(owner: Connection) -> None:
    """PostgreSQL looks for a cancel after each warning, and PL/Python has another class for what comes of that."""
    create_store(owner, rows=ROWS)
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    create_store(owner, "plain", rows=ROWS)
    owner.execute("CREATE TABLE asked (id integer PRIMARY KEY, q text)")
    owner.execute("INSERT INTO asked VALUES (1, 'two'), (2, 'five')")
    owner.execute("CREATE TABLE answers (id integer PRIMARY KEY, a jsonb)")
    options = '{"keyword_search": true, "semantic_search": false, "skip_generate": true}'
    search = f"SELECT * FROM ml_rag_search('two', '{options}')"
    owner.execute(search)
    for call in (search, f"CALL ml_rag_table('public.asked.q', 'public.answers.a', '{options}')"):
        owner.execute(CANCEL)
        error = raised(owner, call)
        assert (error.sqlstate, error.diag.message_primary) == ("57014", "canceling statement due to user request")
    assert owner.execute("SELECT FROM answers").fetchall() == []


def test_an_error_of_a_function_of_others_keeps_its_context(owner: Connection) -> None:
    """Its owner looks for it."""
    owner.execute(
        "CREATE TABLE public.asked (id integer PRIMARY KEY, q text); INSERT INTO public.asked VALUES (1, 'cats')"
    )
    owner.execute("CREATE TABLE public.answers (id integer PRIMARY KEY, a jsonb)")
    owner.execute(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION USING ERRCODE = '53100', MESSAGE = 'no room', HINT = 'a hint', TABLE = 'birds';"
        " END $$"
    )
    owner.execute("CREATE TRIGGER t BEFORE INSERT ON public.answers FOR EACH ROW EXECUTE FUNCTION public.refuse()")
    error = raised(owner, "CALL ml_generate_table('public.asked.q', 'public.answers.a')")
    diag = error.diag
    assert (diag.sqlstate, diag.message_primary, diag.message_hint) == ("53100", "no room", "a hint")
    assert (diag.table_name, diag.message_detail) == ("birds", None)
    assert context(error)[0] == "PL/pgSQL function public.refuse() line 1 at RAISE"


def test_so_does_one_of_a_policy(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=ROWS)
    owner.execute(
        "CREATE FUNCTION public.may_see(id bigint) RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN RETURN 1 / (id - id) > 0; END $$"
    )
    owner.execute("ALTER TABLE public.docs ENABLE ROW LEVEL SECURITY")
    owner.execute("CREATE POLICY p ON public.docs USING (public.may_see(document_id))")
    options = '{"query_embedding": [1,0,0], "vector_store": ["public.docs"]}'
    error = raised(asker, f"SELECT * FROM ml_rag_search('q', '{options}')")
    assert (error.sqlstate, error.diag.message_primary) == ("22012", "division by zero")
    assert "PL/pgSQL function public.may_see(bigint) line 1 at RETURN" in (error.diag.message_detail or "")


def test_an_error_at_commit_has_its_fields(owner: Connection) -> None:
    owner.execute("CREATE TABLE public.known (id integer PRIMARY KEY)")
    owner.execute(
        "CREATE TABLE public.asked (id integer PRIMARY KEY, q text, a jsonb, n integer DEFAULT 5"
        " CONSTRAINT is_known REFERENCES public.known DEFERRABLE INITIALLY DEFERRED)"
    )
    owner.execute(
        "CREATE TABLE public.answers (id integer PRIMARY KEY, a jsonb, n integer DEFAULT 5"
        " CONSTRAINT is_known_too REFERENCES public.known DEFERRABLE INITIALLY DEFERRED)"
    )
    owner.execute("INSERT INTO public.asked (id, q, n) VALUES (1, 'cats', NULL)")
    error = raised(owner, "CALL ml_generate_table('public.asked.q', 'public.answers.a')")
    diag = error.diag
    assert (diag.sqlstate, diag.message_primary, diag.message_detail) == (
        "23503",
        'insert or update on table "answers" violates foreign key constraint "is_known_too"',
        'Key (n)=(5) is not present in table "known".',
    )
    assert (diag.schema_name, diag.table_name, diag.constraint_name) == ("public", "answers", "is_known_too")
    assert len(context(error)) == 1
