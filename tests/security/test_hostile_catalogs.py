"""What others put into the catalog costs those who ask about tables nothing that grows with it."""

from __future__ import annotations

import psycopg
import pytest

from support.cluster import Connection, Database
from support.schema import SqlModel, ask, metadata, model, shop
from support.stores import answer, create_store, error, fake_embedding

__all__ = ["model", "shop"]

N = 3000
#: of a role without a membership, on its way to every type, function and operator that an asker could name
PLANTED = {
    "temporary domains": "CREATE DOMAIN pg_temp.d{i} AS integer CHECK (VALUE > 0)",
    "domains": "CREATE DOMAIN planted.d{i} AS integer",
    "functions": "CREATE FUNCTION planted.f{i}(planted.number) RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    "composite types": "CREATE TYPE planted.c{i} AS (n planted.number)",
}


def reads(connection: Connection, statement: str) -> int:
    """Tuples of the types, functions, operators, attributes and ranges of the catalog that a statement reads."""
    count = (
        "SELECT sum(pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid))::bigint"
        " FROM pg_class AS c"
        " WHERE c.oid IN ('pg_type'::regclass, 'pg_proc'::regclass, 'pg_operator'::regclass, 'pg_range'::regclass)"
        " OR c.relname IN ('pg_type_oid_index', 'pg_type_typname_nsp_index', 'pg_proc_proname_args_nsp_index')"
    )
    with connection.transaction():
        before = (connection.execute(count).fetchone() or (0,))[0]
        connection.execute(statement)
        return (connection.execute(count).fetchone() or (0,))[0] - before


@pytest.mark.parametrize("kind", PLANTED)
def test_types_of_others_are_not_read(model: SqlModel, shop: Connection, db: Database, kind: str) -> None:
    """3000 temporary domains, made in a second, had every statement of every role checked for 13 seconds."""
    shop.execute(f"CREATE SCHEMA planted AUTHORIZATION {db.role('stranger')}")
    stranger, asker = db.connect("stranger"), db.connect("asker")
    stranger.execute("CREATE DOMAIN planted.number AS integer; GRANT USAGE ON SCHEMA planted TO PUBLIC")
    check = "SELECT ml_rag._type_that_runs_code('SELECT count(*) FROM shop.orders', '{shop}')"
    asker.execute(check)
    before = reads(asker, check)
    text = PLANTED[kind].replace("'", "''").replace("{i}", "%s")
    stranger.execute(f"DO $$BEGIN FOR i IN 1..{N} LOOP EXECUTE format('{text}', i); END LOOP; END$$")
    assert reads(asker, check) < before + 300
    # and all the same what the statement names is found
    shop.execute(f"GRANT ml_rag_user TO {db.role('asker')}")
    named = "SELECT ml_rag._type_that_runs_code(%s, '{shop}')"
    assert asker.execute(named, ("SELECT '{1}'::planted.number[]",)).fetchone() == ("type planted.number",)
    model.writes("SELECT count(*) FROM shop.orders")
    assert ask(asker)["rows"] == [[100]]


def test_a_type_of_too_many_parts_is_not_looked_through(shop: Connection, db: Database, asker: Connection) -> None:
    shop.execute(f"CREATE SCHEMA planted AUTHORIZATION {db.role('stranger')}; GRANT USAGE ON SCHEMA planted TO PUBLIC")
    stranger = db.connect("stranger")
    stranger.execute(
        "DO $$BEGIN FOR i IN 1..1001 LOOP EXECUTE format('CREATE DOMAIN planted.d%s AS integer', i); END LOOP;"
        " EXECUTE (SELECT format('CREATE TYPE planted.wide AS (%s)', string_agg(format('c%s planted.d%s', i, i), ','))"
        " FROM generate_series(1, 1001) AS i); END$$"
    )
    check = "SELECT ml_rag._type_that_runs_code('SELECT NULL::planted.wide', '{}')"
    assert asker.execute(check).fetchone() == ("more than 1000 types",)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT '{1}'::planted.number[]",
        "SELECT '{1}'::PLANTED.Number[]",
        'SELECT \'{1}\'::"planted"."number"[]',
        "SELECT '{1}'::planted/**/.number[]",
        "SELECT $a$x$a$planted.number",
        'SELECT \'"\', \'{1}\'::planted."quo""ted"[]',
        'SELECT /*"*/ \'{1}\'::planted."""quoted"[]',
        'SELECT 1 --"\n, \'{1}\'::planted."""quoted"[]',
        "SELECT '{1}' OPERATOR(planted.=!=)1",
        "SELECT planted.nested('{}')",
        "SELECT NULL::planted.row",
        "SELECT NULL::planted.multispan",
        "SELECT U&\"pl\\0061nted\".number '1'",
        f"SELECT NULL::planted.{'long' * 20}",
    ],
)
def test_whatever_way_a_type_is_named(shop: Connection, db: Database, asker: Connection, statement: str) -> None:
    shop.execute(f"CREATE SCHEMA planted AUTHORIZATION {db.role('stranger')}; GRANT USAGE ON SCHEMA planted TO PUBLIC")
    db.connect("stranger").execute(
        'CREATE DOMAIN planted.number AS integer; CREATE DOMAIN planted."quo""ted" AS integer;'
        f'CREATE DOMAIN planted."""quoted" AS integer; CREATE DOMAIN planted.{"long" * 15} AS integer;'
        f"CREATE DOMAIN planted.{'long' * 20} AS integer;"
        "CREATE FUNCTION planted.differ(planted.number[], integer) RETURNS integer LANGUAGE sql AS 'SELECT 1';"
        "CREATE OPERATOR planted.=!= (FUNCTION = planted.differ, LEFTARG = planted.number[], RIGHTARG = integer);"
        "CREATE TYPE planted.inner AS (n planted.number); CREATE TYPE planted.row AS (a planted.inner[]);"
        "CREATE TYPE planted.span AS RANGE (subtype = planted.number, multirange_type_name = planted.multispan);"
        "CREATE FUNCTION planted.nested(planted.row[]) RETURNS integer LANGUAGE sql AS 'SELECT 1'"
    )
    query = "SELECT ml_rag._type_that_runs_code(%s, '{shop}')"
    (found,) = asker.execute(query, (statement,)).fetchone() or (None,)
    assert found is not None
    assert asker.execute(query, ("SELECT count(*) FROM shop.orders",)).fetchone() == (None,)


def test_a_hint_compares_few_names(shop: Connection, db: Database, asker: Connection) -> None:
    """3000 tables open to everybody had one hint take a second."""
    shop.execute(f"CREATE SCHEMA planted AUTHORIZATION {db.role('stranger')}; SET track_functions = 'all'")
    stranger = db.connect("stranger")
    stranger.execute(
        f"GRANT USAGE ON SCHEMA planted TO PUBLIC; DO $$BEGIN FOR i IN 1..{N} LOOP"
        " EXECUTE format('CREATE TABLE planted.order%s (id integer)', i); END LOOP; END$$;"
        "GRANT SELECT ON ALL TABLES IN SCHEMA planted TO PUBLIC"
    )
    calls = "SELECT pg_stat_get_xact_function_calls('ml_rag._distance_of_words(text, text)'::regprocedure)"
    shop.execute("BEGIN")
    assert shop.execute("SELECT ml_rag._nearest_table('shop.ordres')").fetchone() == ("shop.orders",)
    (compared,) = shop.execute(calls).fetchone() or (0,)
    shop.execute("ROLLBACK; RESET track_functions")
    assert 1 <= compared <= 100
    with error("42P01") as caught:
        metadata(asker, tables=["ordres"])
    assert caught.hint == 'Did you mean "shop.orders"?'


def test_vectors_of_others_take_no_look_each(owner: Connection, db: Database, asker: Connection) -> None:
    """Temporary tables of many vectors, which anybody may make, held up each call that names no store."""
    create_store(owner)
    count = (
        "SELECT sum(pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid))::bigint"
        " FROM pg_class AS c WHERE c.relname IN ('pg_description', 'pg_description_o_c_o_index')"
    )

    def read() -> int:
        owner.execute("SELECT pg_current_xact_id()")  # what was found at another moment is looked for again
        with asker.transaction():
            before = (asker.execute(count).fetchone() or (0,))[0]
            assert asker.execute("SELECT count(*) FROM ml_rag.discover()").fetchone() == (1,)
            return int((asker.execute(count).fetchone() or (0,))[0] - before)

    read()
    usual = read()
    stranger = db.connect("stranger")
    stranger.execute(
        "DO $$BEGIN EXECUTE (SELECT format('CREATE TEMP TABLE wide (%s)',"
        " string_agg(format('c%s public.vector(3)', i), ',')) FROM generate_series(1, 500) AS i);"
        " FOR i IN 1..500 LOOP EXECUTE format("
        "'COMMENT ON COLUMN pg_temp.wide.c%s IS ''GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed''', i); END LOOP; END$$"
    )
    read()  # whose table it is, is remembered from here on
    assert read() <= usual + 10


@pytest.mark.parametrize(("columns", "told"), [(500, ["public.docs", "evil.wide"]), (1100, ["public.docs"])])
def test_what_is_told_of_stores_that_are_not_searched_is_bounded(
    owner: Connection, db: Database, asker: Connection, columns: int, told: list[str]
) -> None:
    """For each column option explain read all comments of its table, for half a minute and more."""
    create_store(owner, "docs", [("d", 1, 1, "text", fake_embedding("text"))], "vector(16)")
    owner.execute(f"CREATE SCHEMA evil AUTHORIZATION {db.role('stranger')}; GRANT USAGE ON SCHEMA evil TO ml_rag_user")
    db.connect("stranger").execute(
        "DO $$BEGIN EXECUTE (SELECT format('CREATE TABLE evil.wide (segment text, %s)',"
        f" string_agg(format('c%s public.vector(3)', i), ',')) FROM generate_series(1, {columns}) AS i);"
        f" FOR i IN 1..{columns} LOOP EXECUTE format('COMMENT ON COLUMN evil.wide.c%s IS %L', i,"
        " CASE i WHEN 1 THEN 'GENAI_OPTIONS=EMBED_MODEL_ID=other,SEGMENT=segment'"
        " ELSE repeat('GENAI_OPTIONS=', 100) END); END LOOP; END$$; GRANT SELECT ON evil.wide TO PUBLIC"
    )
    count = (
        "SELECT sum(pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid))::bigint"
        " FROM pg_class AS c WHERE c.relname IN ('pg_description', 'pg_description_o_c_o_index')"
    )
    with asker.transaction():
        explained = answer(asker, "text", {"skip_generate": True, "explain": True})["explain"]
        assert [store["vector_store"] for store in explained["stores"]] == told
        assert (asker.execute(count).fetchone() or (0,))[0] < 50 * columns
    with pytest.raises(psycopg.errors.NoDataFound) as raised:
        answer(asker, "text", {"filters": {"document_name": "none"}})
    assert ("evil.wide" in str(raised.value.diag.message_detail)) == ("evil.wide" in told)
