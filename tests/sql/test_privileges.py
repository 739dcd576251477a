"""privileges: who may call what, cell by cell; and objects that a hostile user puts in the way.

tests/sql/golden_catalog.txt is the whole surface. After a change that is meant: ML_RAG_UPDATE_GOLDEN=1 pytest FILE.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

import ml_rag
from support.cluster import Cluster, Connection, Database
from support.stores import answer, create_store, error, retrieve, search

GOLDEN = Path(__file__).with_name("golden_catalog.txt")
PACKAGE = Path(ml_rag.__file__).parent


def dependent(oid: str) -> str:
    """Of a type: that it comes and goes with a relation or another type; an extension's member on 17, not on 15."""
    return f"""EXISTS (
    SELECT FROM pg_type AS y LEFT JOIN pg_class AS r ON r.oid = y.typrelid LEFT JOIN pg_type AS e ON e.typarray = y.oid
    WHERE y.oid = {oid} AND (r.relkind <> 'c' OR e.oid IS NOT NULL))"""


CATALOG = rf"""
WITH member AS (
  SELECT d.classid, d.objid FROM pg_depend AS d
  WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
    AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ml_rag')
), object AS (
  SELECT CASE p.prokind WHEN 'p' THEN 'procedure' WHEN 'a' THEN 'aggregate' ELSE 'function' END AS kind,
    p.oid::regprocedure::text AS name,
    p.proowner AS owner, coalesce(p.proacl, acldefault('f', p.proowner)) AS acl,
    concat_ws(' ', CASE p.provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable' ELSE 'volatile' END,
      CASE p.proparallel WHEN 's' THEN 'parallel-safe' WHEN 'r' THEN 'parallel-restricted' ELSE 'parallel-unsafe' END,
      CASE WHEN p.prosecdef THEN 'SECURITY-DEFINER' END,
      (SELECT lanname FROM pg_language AS l WHERE l.oid = p.prolang)) AS facts
  FROM pg_proc AS p JOIN member ON classid = 'pg_proc'::regclass AND objid = p.oid
  UNION ALL
  SELECT CASE c.relkind WHEN 'v' THEN 'view' WHEN 'r' THEN 'table' WHEN 'c' THEN 'row type' WHEN 'S' THEN 'sequence'
    WHEN 'm' THEN 'materialized view' ELSE c.relkind::text END, c.oid::regclass::text, c.relowner,
    CASE WHEN c.relkind <> 'c' THEN
      coalesce(c.relacl, acldefault(CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", c.relowner)) END,
    concat_ws(' ', array_to_string(c.reloptions, ' '), CASE WHEN c.relrowsecurity THEN 'row-level-security: ' || (
      SELECT string_agg(format('%s using %s', p.polname,
        regexp_replace(pg_get_expr(p.polqual, p.polrelid), '\s+', ' ', 'g')), ', ' ORDER BY p.polname)
      FROM pg_policy AS p WHERE p.polrelid = c.oid) END)
  FROM pg_class AS c JOIN member ON classid = 'pg_class'::regclass AND objid = c.oid
  UNION ALL
  SELECT 'column', format('%s.%s', a.attrelid::regclass, a.attname), c.relowner, a.attacl, ''
  FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
  JOIN member ON classid = 'pg_class'::regclass AND objid = c.oid
  WHERE a.attacl IS NOT NULL
  UNION ALL
  SELECT 'event trigger', e.evtname, e.evtowner, NULL, format('%s %s', e.evtevent, e.evtfoid::regprocedure)
  FROM pg_event_trigger AS e JOIN member ON classid = 'pg_event_trigger'::regclass AND objid = e.oid
  UNION ALL
  SELECT 'operator', o.oid::regoperator::text, o.oprowner, NULL, o.oprcode::text
  FROM pg_operator AS o JOIN member ON classid = 'pg_operator'::regclass AND objid = o.oid
  UNION ALL
  -- PUBLIC may use any type, and has nothing of it
  SELECT 'type', t.oid::regtype::text, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner)), ''
  FROM pg_type AS t JOIN member ON classid = 'pg_type'::regclass AND objid = t.oid
  WHERE NOT {dependent("t.oid")}
  UNION ALL
  SELECT 'schema', n.nspname, n.nspowner, coalesce(n.nspacl, acldefault('n', n.nspowner)), ''
  FROM pg_namespace AS n JOIN member ON classid = 'pg_namespace'::regclass AND objid = n.oid
)
SELECT concat_ws(' | ', kind, name, nullif(facts, ''),
  'owner ' || nullif(o.owner, (SELECT e.extowner FROM pg_extension AS e WHERE e.extname = 'ml_rag'))::regrole,
  coalesce((
  SELECT string_agg(DISTINCT format('%s: %s', who, what), ', ' ORDER BY format('%s: %s', who, what)) FROM (
    SELECT CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE g.grantee::regrole::text END AS who,
      string_agg(lower(g.privilege_type) || CASE WHEN g.is_grantable THEN '*' ELSE '' END, '+'
        ORDER BY g.privilege_type) AS what
    FROM aclexplode(o.acl) AS g WHERE g.grantee <> o.owner GROUP BY g.grantee) AS s), 'owner only'))
FROM object AS o
ORDER BY kind COLLATE "C", name COLLATE "C"
"""


def catalog(connection: Connection) -> list[str]:
    connection.execute("SET search_path = ''")
    rows = connection.execute(CATALOG).fetchall()
    connection.execute("RESET search_path")
    return [row[0] for row in rows]


def test_the_catalog_is_the_golden_one(module_owner: Connection) -> None:
    found = "\n".join(catalog(module_owner)) + "\n"
    if os.environ.get("ML_RAG_UPDATE_GOLDEN"):
        GOLDEN.write_text(found)
    assert found.splitlines() == GOLDEN.read_text().splitlines()


def test_every_object_of_the_extension_is_in_the_golden_catalog(module_owner: Connection) -> None:
    """So that a new kind of object cannot slip past it."""
    found = Counter(line.split(" | ")[0] for line in catalog(module_owner) if not line.startswith("column"))
    members = module_owner.execute(
        "SELECT replace(i.type, 'composite', 'row'), count(*) FROM pg_depend AS d, pg_extension AS e,"
        " pg_identify_object(d.classid, d.objid, 0) AS i WHERE d.refclassid = 'pg_extension'::regclass"
        " AND d.refobjid = e.oid AND d.deptype = 'e' AND e.extname = 'ml_rag'"
        f" AND NOT (d.classid = 'pg_type'::regclass AND {dependent('d.objid')}) GROUP BY 1"
    ).fetchall()
    assert found == Counter(dict(members))


@pytest.mark.parametrize("grantee", ["PUBLIC", "ml_rag_user", "reader"])
def test_default_privileges_open_nothing(cluster: Cluster, grantee: str) -> None:
    """Whoever creates the extension may have set some long ago, for tables of an application."""
    with cluster.database("template0") as database:
        owner = database.connect()
        role = sql.SQL("PUBLIC") if grantee == "PUBLIC" else sql.Identifier(database.role("asker"))
        role = sql.Identifier(grantee) if grantee == "ml_rag_user" else role
        kinds = ("TABLES", "SEQUENCES", "ROUTINES", "SCHEMAS")
        for kind in kinds:
            owner.execute(sql.SQL("ALTER DEFAULT PRIVILEGES GRANT ALL ON {} TO {}").format(sql.SQL(kind), role))
        try:
            owner.execute("CREATE EXTENSION ml_rag CASCADE")
            assert catalog(owner) == GOLDEN.read_text().splitlines()
        finally:
            for kind in kinds:
                owner.execute(sql.SQL("ALTER DEFAULT PRIVILEGES REVOKE ALL ON {} FROM {}").format(sql.SQL(kind), role))


def test_nothing_is_granted_to_public(module_owner: Connection) -> None:
    assert [line for line in catalog(module_owner) if "PUBLIC" in line and not line.startswith("type")] == []


def test_only_the_known_functions_run_with_their_owners_rights(module_owner: Connection) -> None:
    definers = [line.split(" | ")[1] for line in catalog(module_owner) if "SECURITY-DEFINER" in line]
    # those of the keyword indexes take nothing from their caller but which table
    assert definers == [
        # looks at the statistics of two tables of the keyword indexes
        "ml_rag._analyze_keywords(integer,integer)",
        "ml_rag._forget()",
        "ml_rag._forget_dropped()",
        "ml_rag._keep_keywords()",
        # opens a cursor without rows
        "ml_rag._keep_tables()",
        # lowers a setting of the session that only superusers change
        "ml_rag._limit_temporary_files()",
        "ml_rag._python_path()",
        # run what Python code of the extension has handed over, and nothing else
        "ml_rag._read_as_owner()",
        # reads the catalog for whoever alters a table
        "ml_rag._refuse_policies()",
        "ml_rag._settle_keywords()",
        "ml_rag._write_as_owner()",
        # granted to those who may publish: rows of one table
        "ml_rag._write_preset(text,jsonb,text)",
    ]


def test_what_callers_enter_pins_its_search_path(module_owner: Connection) -> None:
    """And functions with their owner's rights, and triggers. But for a one-line SQL function that names every schema,
    since only without SET can it be inlined, and for procedures that commit, which PostgreSQL refuses with SET, and
    ml_rag_evaluate, calibrate and tune_index, which have to know the caller's path: those name every schema, or call
    what does. Inner functions run under the path of those: one that is called elsewhere pins it. What each call tells
    of itself costs little without, and names every schema."""
    routines = module_owner.execute(
        "SELECT p.proname, p.prosrc, coalesce(p.proconfig::text LIKE '%search\\_path=%', false),"
        " p.proname !~ '^_' OR p.prosecdef OR p.prorettype IN ('trigger'::regtype, 'event_trigger'::regtype)"
        " FROM pg_proc AS p JOIN pg_depend AS d ON d.objid = p.oid AND d.deptype = 'e'"
        " WHERE d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ml_rag')"
        " AND p.prokind <> 'a'"  # its functions do
    ).fetchall()
    commit = {
        "add_embedding",
        "run_vectorizer",
        "create_node_group",
        "refresh_node_groups",
        "_commit",
        "_load_files",
        "ml_rag_table",
        "ml_embed_table",
        "ml_generate_table",
    }
    track = {"_report", "_begin", "_stage", "_end", "_progress", "_session_settings", "_as_jsonb"}
    entered = {"version", "vector_store_load", "ml_rag_evaluate", "calibrate", "tune_index"} | commit
    assert {name for name, _, pinned, enters in routines if enters and not pinned} <= entered
    views = module_owner.execute(
        "SELECT pg_get_viewdef(c.oid) FROM pg_class AS c"
        " WHERE c.relkind = 'v' AND c.relnamespace = 'ml_rag'::regnamespace"
        " UNION ALL SELECT concat(pg_get_expr(p.polqual, p.polrelid), pg_get_expr(p.polwithcheck, p.polrelid))"
        " FROM pg_policy AS p"
        " UNION ALL SELECT pg_get_constraintdef(c.oid) FROM pg_constraint AS c WHERE c.contype = 'c'"
    ).fetchall()
    programs = [
        path.read_text() for part in ("client", "server", "integrations") for path in (PACKAGE / part).rglob("*.py")
    ]
    elsewhere = [
        *(source for name, source, pinned, _ in routines if name in entered | track and not pinned),
        *(definition for (definition,) in views),
        *programs,
    ]
    called = {name for text in elsewhere for name in re.findall(r"\bml_rag\.(_\w+)\(", text)}
    assert {name for name, _, pinned, _ in routines if name in called and not pinned} <= commit | track
    for (path,) in module_owner.execute(
        "SELECT DISTINCT c FROM pg_proc AS p, unnest(p.proconfig) AS c WHERE p.pronamespace = 'ml_rag'::regnamespace"
        # runs functions of the caller's, which look for pgvector's operators
        " AND c LIKE 'search\\_path=%' AND p.proname <> '_run_function'"
    ):
        parts = [part.strip() for part in path.partition("=")[2].split(",")]
        assert parts[0] == "pg_catalog"
        assert parts[1] in ("ml_rag", "pg_temp")
        assert parts[-1] == "pg_temp"


@pytest.mark.parametrize(
    "statement",
    [
        "CALL ml_rag('q')",
        "SELECT ml_rag_answer('q')",
        "SELECT * FROM ml_rag_search('q')",
        "SELECT ml_generate('q')",
        "SELECT ml_embed_row('q')",
        "SELECT * FROM ml_supported_models()",
        "SELECT * FROM ml_rag.discover()",
        "SELECT ml_rag.embed('q')",
        "SELECT * FROM ml_rag.setting",
        "SELECT * FROM ml_rag.setting_value",
        "SELECT * FROM ml_rag.option",
        "SELECT ml_rag.configure('embed_model_id', 'x')",
        "SELECT ml_rag.version()",
        "SELECT ml_rag._python_path()",
        "SELECT ml_rag._load_backend()",
        "SELECT ml_rag._python('get', '[\"/healthz\"]')",
    ],
)
def test_a_role_without_privileges_is_refused(module_db: Database, statement: str) -> None:
    with module_db.connect("stranger") as stranger, error("42501", ours=False):
        stranger.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT ml_rag.configure('embed_model_id', 'x')",
        "CREATE TABLE ml_rag.mine (x integer)",
        "CREATE FUNCTION ml_rag.mine() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "CREATE OR REPLACE FUNCTION ml_rag.version() RETURNS text LANGUAGE sql AS 'SELECT 1::text'",
        "DROP FUNCTION ml_rag.version()",
    ],
)
def test_what_one_who_may_ask_may_not(module_asker: Connection, statement: str) -> None:
    with error("42501", ours=False):
        module_asker.execute(statement)


def test_one_who_may_load_may_also_ask(owner: Connection) -> None:
    assert owner.execute("SELECT pg_has_role('ml_rag_loader', 'ml_rag_user', 'USAGE')").fetchone() == (True,)
    assert owner.execute("SELECT pg_has_role('ml_rag_user', 'ml_rag_loader', 'USAGE')").fetchone() == (False,)


def test_a_missing_membership_shows_in_no_store(owner: Connection, stranger: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "secret", (1, 0, 0))])
    with error("42501", ours=False) as caught:
        retrieve(stranger, (1, 0, 0))
    assert "secret" not in caught.message + caught.detail


# -- row-level security -----------------------------------------------------------------------------------------------


def create_tenants(db: Database, owner: Connection) -> None:
    rows = [
        (f"{who}.txt", 1 if who == "asker" else 2, i, f"{who} {i}", (1, i, 0))
        for who in ("asker", "tenant")
        for i in range(6)
    ]
    create_store(owner, rows=rows)
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    for who in ("asker", "tenant"):
        owner.execute(f"CREATE POLICY {who} ON docs TO {db.role(who)} USING (document_name = '{who}.txt')")


def test_two_tenants_see_their_own_rows_only(db: Database, owner: Connection) -> None:
    create_tenants(db, owner)
    for who, other in (("asker", "tenant"), ("tenant", "asker")):
        connection = db.connect(who)
        options = {"query_embedding": [1, 0, 0], "n_citations": 100, "retrieval_options": {"segment_overlap": 5}}
        for document in (answer(connection, "q", options), answer(connection, "q", {**options, "skip_generate": True})):
            assert other not in str(document["citations"])
            assert who in str(document["citations"])
        assert {r[2] for r in search(connection, "q", options)} == {f"{who}.txt"}


def test_errors_show_nothing_of_the_other_tenants_rows(db: Database, owner: Connection) -> None:
    create_tenants(db, owner)
    owner.execute("UPDATE docs SET segment_embedding = '[0,0,1]' WHERE document_name = 'asker.txt'")
    connection = db.connect("asker")
    # the other tenant's segment at distance 0 does not decide which is the nearest
    with error("P0002", "1.0000") as caught:
        retrieve(connection, (1, 0, 0), retrieval_options={"max_distance": 0.5})
    assert "tenant" not in caught.message + caught.detail + caught.hint
    with error("P0002") as caught:
        retrieve(connection, (1, 0, 0), document_name=["tenant.txt"])
    with error("P0002") as same:
        retrieve(connection, (1, 0, 0), document_name=["no such file"])
    assert (caught.message, caught.detail) == (same.message, same.detail)


def test_forced_row_level_security_binds_the_owner_of_the_table_too(db: Database, owner: Connection) -> None:
    create_tenants(db, owner)
    owner.execute(f"ALTER TABLE docs OWNER TO {db.role('asker')}; ALTER TABLE docs FORCE ROW LEVEL SECURITY")
    rows = search(db.connect("asker"), "q", {"query_embedding": [1, 0, 0], "n_citations": 100})
    assert {r[2] for r in rows} == {"asker.txt"}


# -- objects in the way -----------------------------------------------------------------------------------------------

HOSTILE = """
CREATE FUNCTION {s}.ml_rag_answer(text, jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;
CREATE FUNCTION {s}.format(text, name, text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;
CREATE FUNCTION {s}.coalesce_(text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;
CREATE FUNCTION {s}.lower(text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;
CREATE FUNCTION {s}.vector_dims(public.vector) RETURNS integer LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;
CREATE FUNCTION {s}.jsonb_typeof(jsonb) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;
CREATE FUNCTION {s}.discover() RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;
CREATE FUNCTION {s}.capture(public.vector, public.vector) RETURNS float8 LANGUAGE plpgsql
  AS $$ BEGIN RAISE 'captured'; END $$;
CREATE OPERATOR {s}.<=> (LEFTARG = public.vector, RIGHTARG = public.vector, FUNCTION = {s}.capture);
CREATE FUNCTION {s}.capture(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;
CREATE OPERATOR {s}.= (LEFTARG = text, RIGHTARG = text, FUNCTION = {s}.capture);
CREATE FUNCTION {s}.capture(numeric, numeric) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;
CREATE OPERATOR {s}.<= (LEFTARG = numeric, RIGHTARG = numeric, FUNCTION = {s}.capture);
CREATE TYPE {s}.hit AS (a integer);
CREATE TYPE {s}.store AS (a integer);
CREATE TABLE {s}.setting (name text, value text);
INSERT INTO {s}.setting VALUES ('model_server', 'unix:/tmp/evil.sock');
CREATE TABLE {s}.option (routine text, name text);
CREATE TABLE {s}.pg_class (oid oid, relname text);
CREATE TABLE {s}.pg_depend (x integer);
CREATE TABLE {s}.pg_attribute (x integer);
"""


@pytest.mark.parametrize("schema", ["pg_temp", "evil"])
def test_objects_of_our_names_do_not_capture_calls(owner: Connection, db: Database, schema: str) -> None:
    create_store(owner, rows=[("a", 1, i, f"s{i}", (1, i, 0)) for i in range(4)])
    connection = db.connect("asker")
    if schema == "evil":
        owner.execute("CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC")
        owner.execute(HOSTILE.format(s="evil"))
        owner.execute("GRANT SELECT ON ALL TABLES IN SCHEMA evil TO PUBLIC")
    else:
        connection.execute(HOSTILE.format(s="pg_temp"))
    if schema == "evil":
        connection.execute("SET search_path = evil, pg_catalog, public")
    else:
        # pg_temp is searched for relations first even where no path names it
        connection.execute("SET search_path = pg_temp, pg_catalog, public")
    options = (
        """'{"query_embedding": [1,0,0], "n_citations": 2, "document_name": ["a"],"""
        """ "retrieval_options": {"max_distance": 0.5, "percentage_distance": 5000}}'"""
    )
    rows = connection.execute(f"SELECT document_name, segment FROM public.ml_rag_search('q', {options})").fetchall()
    assert rows == [("a", "s0\ns1")]
    (document,) = connection.execute(f"SELECT public.ml_rag_answer('q', {options}::jsonb)").fetchone() or (None,)
    assert document["text"] == "fake answer to: q [documents: 1]"
    (output,) = connection.execute(f"CALL public.ml_rag('q', {options})").fetchone() or (None,)
    assert output == document
    assert connection.execute("SELECT public.vector_dims(public.ml_embed_row('x'))").fetchone() == (16,)
    assert connection.execute("SELECT count(*) > 0 FROM public.ml_supported_models()").fetchone() == (True,)


def test_who_drops_or_writes_tables_runs_no_code_of_the_schema_of_pgvector(owner: Connection, db: Database) -> None:
    """An operator for just these types is taken before one of pg_catalog for any."""
    attacker = db.connect("tenant")
    owner.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(sql.Identifier(db.role("tenant"))))
    attacker.execute("CREATE FUNCTION public.f(oid, regclass) RETURNS boolean LANGUAGE plpgsql"
                     " AS $$ BEGIN RAISE 'code of another role runs as %', current_user; END $$;"
                     "CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.f)")  # fmt: skip
    owner.execute("CREATE SCHEMA mine; SET search_path = pg_catalog; CREATE TABLE mine.t (id integer PRIMARY KEY);"
                  "CREATE TABLE mine.u (id integer REFERENCES mine.t)")  # fmt: skip
    owner.execute("DROP TABLE mine.t CASCADE")
    attacker.execute("DROP OPERATOR public.= (oid, regclass)")
    owner.execute("CREATE TABLE mine.v (segment text, vectors public.vector(2));"
                  "INSERT INTO mine.v VALUES ('a', '[1,2]');"
                  "SELECT ml_rag._follow_texts('mine.v', 'vectors', 'segment')")  # fmt: skip
    attacker.execute("CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.f)")
    owner.execute("UPDATE mine.v SET segment = 'b'")
    assert owner.execute("SELECT vectors FROM mine.v").fetchone() == (None,)


def test_a_function_in_the_way_inside_a_view_runs_with_the_callers_rights_only(owner: Connection, db: Database) -> None:
    """Whoever makes a store can make its reader run code, as with any view; it must not be the extension's owner."""
    owner.execute(
        "CREATE FUNCTION who() RETURNS text LANGUAGE sql AS 'SELECT current_user::text';"
        "CREATE TABLE base (segment_embedding vector(3)); INSERT INTO base VALUES ('[1,0,0]');"
        "CREATE VIEW v AS SELECT who() AS segment, segment_embedding FROM base;"
        "COMMENT ON COLUMN v.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed';"
        "GRANT SELECT ON v TO ml_rag_user"
    )
    connection = db.connect("asker")
    assert retrieve(connection, (1, 0, 0))["citations"][0]["segment"] == db.role("asker")


def test_sql_in_names_and_values_is_no_sql(owner: Connection, asker: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "s", (1, 0, 0))])
    attack = "docs; DROP TABLE docs; --"
    for options in (
        {"vector_store": [attack, "docs"]},
        {"document_name": [attack, "a"]},
        {"schema": [attack, "public"]},
        {"exclude_vector_store": [attack]},
    ):
        assert retrieve(asker, (1, 0, 0), **options)["citations"]
    for column in ('segment"; DROP TABLE docs; --', "segment::text, (SELECT 1)"):
        with error("P0002"):
            retrieve(asker, (1, 0, 0), vector_store_columns={"segment": column})
    assert owner.execute("SELECT count(*) FROM docs").fetchone() == (1,)


def test_a_plain_role_can_be_given_the_right_to_ask(db: Database, owner: Connection) -> None:
    create_store(owner, rows=[("a", 1, 1, "s", (1, 0, 0))])
    stranger = db.connect("stranger")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        stranger.execute("SELECT ml_embed_row('x')")
    try:
        owner.execute(f"GRANT ml_rag_user TO {db.role('stranger')}")
        assert retrieve(stranger, (1, 0, 0))["citations"]
    finally:
        owner.execute(f"REVOKE ml_rag_user FROM {db.role('stranger')}")


def test_what_runs_as_the_owner_looks_in_no_schema_of_others(db: Database) -> None:
    """pgvector's can be one in which others create operators."""
    rows = db.connect().execute(
        "SELECT p.oid::regprocedure::text FROM pg_proc AS p"
        " WHERE p.prosecdef AND p.pronamespace = 'ml_rag'::regnamespace"
        " AND NOT coalesce('search_path=pg_catalog, ml_rag, pg_temp' = ANY (p.proconfig), false)"
    )
    assert rows.fetchall() == []


def test_dropping_a_table_runs_no_operator_of_others_as_the_owner(db: Database) -> None:
    owner, mallory = db.connect(), db.connect("asker")
    owner.execute(f"GRANT CREATE ON SCHEMA public TO {db.role('asker')}")
    mallory.execute("CREATE TABLE pg_temp.ran (who text)")
    mallory.execute(
        "CREATE FUNCTION public.grab(oid, regclass) RETURNS boolean LANGUAGE plpgsql AS"
        " $$BEGIN RAISE 'it runs as %', current_user; END$$"
    )
    mallory.execute("CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.grab)")
    mallory.execute("DROP TABLE pg_temp.ran")
