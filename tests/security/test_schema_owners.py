"""The owner of a schema decides what a name in it means: no code of that role runs as the owner of a table in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from support.cluster import Cluster, Connection, Database, waits_for_a_lock
from support.models_server import ModelsServer
from support.processes import Background, over_and_over, wait_until
from support.stores import create_store, error, fake_embedding, search
from support.vectorizers import create


@pytest.fixture
def attacker(db: Database, owner: Connection) -> Iterator[Connection]:
    """The owner of schema hers, in which others may create tables."""
    role = sql.Identifier(db.role("tenant"))
    owner.execute(sql.SQL("CREATE SCHEMA hers AUTHORIZATION {0}; GRANT ALL ON SCHEMA hers TO PUBLIC").format(role))
    owner.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(sql.Identifier(db.name), role))
    yield db.connect("tenant")
    owner.execute("DROP SCHEMA IF EXISTS hers, hers_fake, hers_away CASCADE")


@pytest.fixture(params=["superuser", "asker"])
def victim(db: Database, request: pytest.FixtureRequest) -> Connection:
    """The owner of a table in that schema."""
    return db.connect(None if request.param == "superuser" else "asker")


ITEMS = "CREATE TABLE hers.items (id integer PRIMARY KEY, name text); INSERT INTO hers.items VALUES (1, 'lamp')"
#: code, and the roles that it has run as
EVIL = (
    "CREATE TABLE hers.ran (who name); GRANT INSERT ON hers.ran TO PUBLIC;"
    "CREATE FUNCTION hers.evil() RETURNS trigger LANGUAGE plpgsql AS"
    " $$BEGIN INSERT INTO hers.ran SELECT current_user; RETURN NEW; END$$"
)


def make_shared(owner: Connection, options: str) -> None:
    """A table of the owner's, with a vectorizer, in a schema of the owner's that others may use."""
    owner.execute("CREATE SCHEMA shared; GRANT USAGE ON SCHEMA shared TO PUBLIC")
    owner.execute("CREATE TABLE shared.items (id integer PRIMARY KEY, name text)")
    owner.execute(f"SELECT ml_rag.create_vectorizer('shared.items', '{{\"columns\": \"name\", {options}}}')")


def make_store(connection: Connection, name: str = "hers.docs") -> None:
    create_store(connection, name, [("d", 1, 1, "text", fake_embedding("text"))], "vector(16)")


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT ml_rag.create_vectorizer('hers.items', '{\"columns\": \"name\"}')",
        "CALL ml_rag.create_node_group('hers.docs', 'sentences', '{\"transform\": \"sentence\"}')",
        "CALL ml_rag.add_embedding('hers.docs', 'second')",
        "SELECT ml_rag.enable_keyword_search('hers.docs')",
    ],
)
def test_what_would_find_the_table_by_its_name_later_is_refused(
    attacker: Connection, victim: Connection, statement: str
) -> None:
    victim.execute(ITEMS)
    make_store(victim)
    with error("42501", "is in a schema of a role that its owner does not trust", "schema hers", "SET SCHEMA"):
        victim.execute(statement)


@pytest.fixture
def given_away(db: Database, owner: Connection, attacker: Connection, victim: Connection) -> Connection:
    """What the victim made in a schema of its own; the schema is the attacker's since."""
    owner.execute("DROP SCHEMA hers")
    (name,) = victim.execute("SELECT current_user").fetchone() or ("",)
    owner.execute(sql.SQL("CREATE SCHEMA hers AUTHORIZATION {}").format(sql.Identifier(name)))
    victim.execute(ITEMS)
    victim.execute("SELECT ml_rag.create_vectorizer('hers.items', '{\"columns\": \"name\"}')")
    for table, options in (("now", '"mode": "immediate"'), ("long", '"destination": "table"')):
        victim.execute(f"CREATE TABLE hers.{table} (id integer PRIMARY KEY, name text)")
        victim.execute(f"SELECT ml_rag.create_vectorizer('hers.{table}', '{{\"columns\": \"name\", {options}}}')")
    make_store(victim)
    victim.execute("CALL ml_rag.create_node_group('hers.docs', 'sentences', '{\"transform\": \"sentence\"}')")
    owner.execute(sql.SQL("ALTER SCHEMA hers OWNER TO {}").format(sql.Identifier(db.role("tenant"))))
    owner.execute("GRANT USAGE ON SCHEMA hers TO PUBLIC")
    return victim


def test_a_schema_that_was_given_away_keeps_what_runs_unasked_out(owner: Connection, given_away: Connection) -> None:
    assert given_away.execute("SELECT pending FROM ml_rag.vectorizer").fetchall() == [(None,)] * 3
    assert given_away.execute("SELECT rows, pending FROM ml_rag.node_group").fetchall() == [(None, None)]
    assert given_away.execute("SELECT * FROM ml_rag.discover()").fetchall() == []
    for statement in (
        "CALL ml_rag.run_vectorizer('hers.items')",
        "CALL ml_rag.refresh_node_groups('hers.docs')",
        # triggers of immediate vectorizers and of those with a table of segments, which have their owner's rights
        "INSERT INTO hers.now VALUES (1, 'lamp')",
        "INSERT INTO hers.long VALUES (1, 'lamp')",
    ):
        with error("42501", "is in a schema of a role that its owner does not trust"):
            given_away.execute(statement)
    assert search(given_away, "text", {"vector_store": ["hers.docs"]})[0][5] == "text"
    (name,) = given_away.execute("SELECT current_user").fetchone() or ("",)
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(name)))
    for table in ("items", "now", "long", "long_segments"):
        owner.execute(f"ALTER TABLE hers.{table} SET SCHEMA own")
    given_away.execute("INSERT INTO own.now VALUES (1, 'lamp'); INSERT INTO own.long VALUES (1, 'lamp')")
    given_away.execute("CALL ml_rag.run_vectorizer('own.items')")
    pending = given_away.execute("SELECT relation::text, pending FROM ml_rag.vectorizer ORDER BY 1").fetchall()
    assert pending == [("own.items", 0), ("own.long", 1), ("own.now", 0)]


@pytest.mark.parametrize("look", ["SELECT count(*) FROM ml_rag.vectorizer", "SELECT count(*) FROM ml_rag.node_group"])
def test_schemas_that_are_exchanged_again_and_again_run_no_code(
    db: Database, attacker: Connection, given_away: Connection, look: str
) -> None:
    attacker.execute(
        "CREATE SCHEMA hers_fake; GRANT USAGE ON SCHEMA hers_fake TO PUBLIC; CREATE TABLE hers_fake.ran (who name);"
        "GRANT INSERT ON hers_fake.ran TO PUBLIC;"
        "CREATE FUNCTION hers_fake.evil() RETURNS boolean LANGUAGE plpgsql AS"
        " $$BEGIN INSERT INTO ran SELECT current_user; RETURN true; END$$;"
        "CREATE VIEW hers_fake.items AS SELECT 1 AS id, 'x'::text AS segment, NULL::vector AS segment_embedding"
        " WHERE hers_fake.evil();"
        "CREATE VIEW hers_fake.docs AS SELECT 1::bigint AS document_id, 1 AS segment_number, 'x'::text AS segment"
        " WHERE hers_fake.evil();"
        "CREATE VIEW hers_fake.docs_sentences AS SELECT 1 AS node_number, NULL::jsonb AS error WHERE hers_fake.evil();"
        "ALTER FUNCTION hers_fake.evil() SET search_path = hers_fake, hers, hers_away;"
        "GRANT SELECT ON ALL TABLES IN SCHEMA hers_fake TO PUBLIC"
    )
    swaps: list[int] = []

    def swap() -> None:
        for statements in (
            "ALTER SCHEMA hers RENAME TO hers_away; ALTER SCHEMA hers_fake RENAME TO hers",
            "ALTER SCHEMA hers RENAME TO hers_fake; ALTER SCHEMA hers_away RENAME TO hers",
        ):
            attacker.execute(statements)
        swaps.append(1)

    with over_and_over(swap):
        looks = 0
        while looks < 60 or len(swaps) < 10:
            looks += 1
            try:
                given_away.execute(look)
            except psycopg.Error as e:
                assert e.sqlstate in ("42P01", "3F000", "XX000"), e  # noqa: PT017
    assert attacker.execute("SELECT * FROM hers_fake.ran").fetchall() == []


def test_a_function_makes_no_nodes_where_the_owner_of_its_schema_could_put_another_in_its_place(
    db: Database, owner: Connection, attacker: Connection, victim: Connection
) -> None:
    """By two schemas whose names are exchanged, amid a run."""
    (name,) = victim.execute("SELECT current_user").fetchone() or ("",)
    owner.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(sql.Identifier(name)))
    make_store(victim, "own.docs")
    for schema in ("own", "hers"):
        victim.execute(
            f"CREATE FUNCTION {schema}.split(text) RETURNS SETOF text LANGUAGE sql AS $$SELECT $1$$".encode()
        )
    call = "CALL ml_rag.create_node_group('own.docs', 'parts', '{\"transform\": \"%s.split\"}')"
    with error("42501", "hers.split(text) is in a schema of a role that is not trusted", "schema hers", "SET SCHEMA"):
        victim.execute((call % "hers").encode())
    victim.execute((call % "own").encode())
    owner.execute(sql.SQL("ALTER SCHEMA own OWNER TO {}").format(sql.Identifier(db.role("tenant"))))
    owner.execute("CREATE SCHEMA others; GRANT USAGE ON SCHEMA others TO PUBLIC")
    owner.execute(sql.SQL("ALTER SCHEMA others OWNER TO {}").format(sql.Identifier(name)))
    for table in ("docs", "docs_parts"):
        owner.execute(f"ALTER TABLE own.{table} SET SCHEMA others".encode())
    owner.execute("GRANT USAGE ON SCHEMA own TO PUBLIC")
    victim.execute("UPDATE others.docs SET segment = 'other'")
    with error("42501", "own.split(text) is in a schema of a role that is not trusted"):
        victim.execute("CALL ml_rag.refresh_node_groups('others.docs')")


def test_the_owner_of_the_database_is_trusted_by_all_but_superusers(db: Database, owner: Connection) -> None:
    """Whose schema public is, since PostgreSQL 15."""
    tenant, asker = db.connect("tenant"), db.connect("asker")
    (former, public) = owner.execute(
        "SELECT pg_get_userbyid(d.datdba), pg_get_userbyid(n.nspowner) FROM pg_database AS d, pg_namespace AS n"
        " WHERE d.datname = current_database() AND n.nspname = 'public'"
    ).fetchone() or ("", "")
    database, schema = sql.Identifier(db.name), sql.SQL("ALTER SCHEMA public OWNER TO {}")
    owner.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, sql.Identifier(db.role("tenant"))))
    owner.execute(schema.format(sql.Identifier("pg_database_owner")))
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    try:
        make_store(tenant, "public.docs")
        assert [row[0] for row in asker.execute("SELECT vector_store FROM ml_rag.discover()")] == ["public.docs"]
        assert owner.execute("SELECT vector_store FROM ml_rag.discover()").fetchall() == []
        create = "SELECT ml_rag.create_vectorizer('public.items', '{\"columns\": \"name\"}')"
        for connection in (asker, owner):
            connection.execute(ITEMS.replace("hers.", "public."))
            if connection is asker:
                connection.execute(create)
                connection.execute("DROP TABLE items")
            else:
                with error("42501", "is in a schema of a role that its owner does not trust"):
                    connection.execute(create)
    finally:
        owner.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, sql.Identifier(former)))
        owner.execute(schema.format(sql.Identifier(public)))
        owner.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")


def test_the_schemas_of_ml_rag_and_pgvector_keep_their_names(db: Database, owner: Connection) -> None:
    """Functions have them in them: what is in another schema of that name would run with the rights of whoever asks."""
    database, tenant = sql.Identifier(db.name), db.connect("tenant")
    (former, public) = owner.execute(
        "SELECT pg_get_userbyid(d.datdba), pg_get_userbyid(n.nspowner) FROM pg_database AS d, pg_namespace AS n"
        " WHERE d.datname = current_database() AND n.nspname = 'public'"
    ).fetchone() or ("", "")
    owner.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, sql.Identifier(db.role("tenant"))))
    owner.execute("ALTER SCHEMA public OWNER TO pg_database_owner; CREATE SCHEMA other")
    try:
        with error("55000", "cannot be in a schema of another name"):
            tenant.execute("ALTER SCHEMA public RENAME TO former")
        tenant.execute("CREATE SCHEMA mine; ALTER SCHEMA mine RENAME TO yours; DROP SCHEMA yours")
        with error("55000", "cannot be in a schema of another name"):
            owner.execute("ALTER EXTENSION vector SET SCHEMA other")
    finally:
        owner.execute(sql.SQL("ALTER SCHEMA public OWNER TO {}").format(sql.Identifier(public)))
        owner.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, sql.Identifier(former)))


def test_who_owns_their_schema_does_not_drop_ml_rag(db: Database, owner: Connection) -> None:
    """Whoever waits for one of its tables would find what has the name by then, a superuser too."""
    database, role, tenant = sql.Identifier(db.name), db.role("tenant"), db.connect("tenant")
    (former, public) = owner.execute(
        "SELECT pg_get_userbyid(d.datdba), pg_get_userbyid(n.nspowner) FROM pg_database AS d, pg_namespace AS n"
        " WHERE d.datname = current_database() AND n.nspname = 'public'"
    ).fetchone() or ("", "")
    set_owner = sql.SQL("ALTER SCHEMA public OWNER TO {}")
    owner.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, sql.Identifier(role)))
    try:
        for holder in ("pg_database_owner", role):
            owner.execute(set_owner.format(sql.Identifier(holder)))
            tenant.execute("SET ml_rag.may_drop = 'true'")
            with error("55006", "is being used by active queries in this session", ours=False):
                tenant.execute("DROP SCHEMA public CASCADE")
            # what is theirs they drop, also several times in a transaction
            with tenant.transaction():
                for _ in range(2):
                    tenant.execute("CREATE SCHEMA mine; CREATE TABLE mine.t (id integer); DROP SCHEMA mine CASCADE")
            assert tenant.execute("SELECT FROM pg_cursors").fetchall() == []
        with error("55006", "is being used by active queries in this session", ours=False):
            tenant.execute("DROP OWNED BY CURRENT_USER CASCADE")
        with owner.transaction(force_rollback=True):
            owner.execute("DROP SCHEMA public CASCADE")
            assert owner.execute("SELECT FROM pg_extension WHERE extname IN ('vector', 'ml_rag')").fetchall() == []
    finally:
        owner.execute(set_owner.format(sql.Identifier(public)))
        owner.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, sql.Identifier(former)))


def test_a_snapshot_from_before_the_extension_gives_nobody_its_schemas(cluster: Cluster) -> None:
    with cluster.database("template0") as database:
        admin, tenant = database.connect(), database.connect("tenant")
        cluster.execute("ALTER DATABASE {} OWNER TO {}", database.name, database.role("tenant"))
        tenant.execute("SET ml_rag.may_drop = 'true'; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM pg_class")
        admin.execute("CREATE EXTENSION plpython3u; CREATE EXTENSION vector; CREATE EXTENSION ml_rag")
        with error("55000", "cannot be in a schema of another name"), tenant.transaction():
            tenant.execute("ALTER SCHEMA public RENAME TO former")
        with error("55006", "is being used by active queries in this session", ours=False), tenant.transaction():
            tenant.execute("DROP SCHEMA public CASCADE")
        tenant.execute("CREATE SCHEMA mine; ALTER SCHEMA mine RENAME TO yours; COMMIT")


def test_a_publisher_s_schema_is_trusted_by_all_but_superusers(
    db: Database, owner: Connection, attacker: Connection
) -> None:
    asker, role = db.connect("asker"), sql.Identifier(db.role("tenant"))
    create = "SELECT ml_rag.create_vectorizer('hers.items', '{\"columns\": \"name\"}')"
    owner.execute(sql.SQL("GRANT ml_rag_publisher TO {}").format(role))
    try:
        asker.execute(ITEMS)
        asker.execute(create)
        asker.execute("DROP TABLE hers.items")
        owner.execute(ITEMS)
        with error("42501", "is in a schema of a role that its owner does not trust"):
            owner.execute(create)
    finally:
        owner.execute(sql.SQL("REVOKE ml_rag_publisher FROM {}").format(role))


# -- tables that were given away ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_meanwhile", [True, False])
@pytest.mark.parametrize("job", ["a run", "another embedding"])
def test_a_part_of_a_role_that_is_not_trusted_is_not_filled(
    db: Database, owner: Connection, models: ModelsServer, job: str, is_meanwhile: bool
) -> None:
    """Its triggers would run with the rights of whoever fills the table, be it given away between two batches."""
    other, attacker, role = db.connect(), db.connect("tenant"), sql.Identifier(db.role("tenant"))
    owner.execute(sql.SQL("CREATE SCHEMA theirs AUTHORIZATION {}").format(role))
    attacker.execute(
        "CREATE TABLE theirs.ran (who name); CREATE FUNCTION theirs.spy() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO theirs.ran VALUES (current_user); RETURN NEW; END $$"
    )
    owner.execute(
        "CREATE TABLE items (id integer PRIMARY KEY, q text) PARTITION BY RANGE (id);"
        "CREATE TABLE first PARTITION OF items FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE part PARTITION OF items DEFAULT;"
        "INSERT INTO items SELECT i, 'text ' || i FROM generate_series(1, 30) AS i"
    )
    if job == "a run":
        create(owner, columns="q")
        call = "CALL ml_rag.run_vectorizer('items', '{\"batch_size\": 5}')"
    else:
        owner.execute("CALL ml_embed_table('public.items.q', 'public.items.v')")
        columns = '{"vector_store_columns": {"segment": "q", "segment_embedding": "v"}, "batch_size": 5}'
        call = f"CALL ml_rag.add_embedding('items', 'more', '{columns}')"

    def give() -> None:
        other.execute(sql.SQL("ALTER TABLE part OWNER TO {}").format(role))
        spy = "CREATE TRIGGER spy BEFORE UPDATE ON part FOR EACH ROW EXECUTE FUNCTION theirs.spy()"
        attacker.execute(f"SET search_path = public; {spy}".encode())

    if is_meanwhile:
        # at the third batch, which is the second of that part
        models.before[len(models.requests) + (2 if job == "a run" else 3)] = give
    else:
        give()
    with error("42501", 'part "public.part" of table "public.items" belongs to a role that you do not trust'):
        owner.execute(call.encode())
    assert attacker.execute("SELECT * FROM theirs.ran").fetchall() == []


@pytest.mark.parametrize("options", ['"mode": "immediate"', '"destination": "table"'])
def test_a_table_that_was_given_away_runs_no_code_as_its_former_owner(
    db: Database, owner: Connection, attacker: Connection, options: str
) -> None:
    """ALTER TABLE … OWNER TO leaves the trigger function, with its owner's rights, behind."""
    make_shared(owner, options)
    tables = owner.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'shared'").fetchall()
    attacker.execute(EVIL)
    role = sql.Identifier(db.role("tenant"))
    for (table,) in tables:
        owner.execute(sql.SQL("ALTER TABLE {} OWNER TO {}").format(sql.Identifier("shared", table), role))
        attacker.execute(
            sql.SQL(
                "CREATE TRIGGER evil BEFORE INSERT OR UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION hers.evil()"
            ).format(sql.Identifier("shared", table))
        )
    with error("42501", "does not trust the owner of the table", "rights of that role", "ALTER FUNCTION"):
        attacker.execute("INSERT INTO shared.items VALUES (1, 'lamp')")
    functions = owner.execute(
        "SELECT p.oid::regprocedure::text FROM pg_proc AS p"
        " WHERE p.pronamespace = 'shared'::regnamespace AND p.prosecdef"
    ).fetchall()
    for (function,) in functions:
        owner.execute(sql.SQL("ALTER FUNCTION {} OWNER TO {}").format(sql.SQL(function), role))
    attacker.execute("INSERT INTO shared.items VALUES (1, 'lamp')")
    assert set(attacker.execute("SELECT who FROM hers.ran").fetchall()) == {(db.role("tenant"),)}


@pytest.mark.parametrize("options", ['"mode": "immediate"', '"mode": "immediate", "destination": "table"'])
def test_who_may_make_triggers_on_a_table_runs_no_code_as_its_owner(
    db: Database, owner: Connection, attacker: Connection, options: str
) -> None:
    make_shared(owner, options)
    attacker.execute(EVIL)
    role = sql.Identifier(db.role("tenant"))
    for (table,) in owner.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'shared'").fetchall():
        owner.execute(
            sql.SQL("GRANT INSERT, TRIGGER ON {} TO {}").format(sql.Identifier("shared", table), role),
        )
        attacker.execute(
            sql.SQL("CREATE TRIGGER evil BEFORE UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION hers.evil()").format(
                sql.Identifier("shared", table)
            )
        )
    with error("42501", 'trigger "evil"', "a role that you do not trust", "Drop the trigger"):
        attacker.execute("INSERT INTO shared.items VALUES (1, 'lamp')")
    assert attacker.execute("SELECT count(*) FROM hers.ran").fetchone() == (0,)


@pytest.mark.parametrize("options", ['"mode": "immediate"', '"destination": "table"'])
def test_no_view_takes_the_place_of_the_rows_of_a_statement_as_the_owner(
    db: Database, owner: Connection, attacker: Connection, options: str
) -> None:
    """By default privileges a role may execute the functions, and make triggers of them that have no such rows."""
    role = sql.Identifier(db.role("tenant"))
    owner.execute(sql.SQL("CREATE SCHEMA app; GRANT USAGE ON SCHEMA app TO {}").format(role))
    for kind in ("TABLES", "FUNCTIONS"):
        given = "ALTER DEFAULT PRIVILEGES IN SCHEMA app GRANT ALL ON {} TO {}"
        owner.execute(sql.SQL(given).format(sql.SQL(kind), role))
    owner.execute("CREATE TABLE app.items (id integer PRIMARY KEY, name text)")
    made = f'{{"columns": "name", "keyword_search": false, {options}}}'
    owner.execute("SELECT ml_rag.create_vectorizer('app.items', %s)", (made,))
    attacker.execute(
        "CREATE TABLE hers.ran (who name); GRANT INSERT ON hers.ran TO PUBLIC;"
        "CREATE FUNCTION hers.evil() RETURNS boolean LANGUAGE plpgsql AS"
        " $$BEGIN INSERT INTO hers.ran SELECT current_user; RETURN true; END$$;"
        "CREATE VIEW pg_temp.ml_rag_new AS SELECT 1 AS id, ''::text AS segment, NULL::text AS segment_embedding"
        " WHERE hers.evil(); GRANT SELECT ON pg_temp.ml_rag_new TO PUBLIC"
    )
    ((function,),) = owner.execute("SELECT proname FROM pg_proc WHERE prorettype = 'trigger'::regtype"
                                   " AND pronamespace = 'app'::regnamespace")  # fmt: skip
    create_trigger = "CREATE TRIGGER evil AFTER INSERT ON app.items EXECUTE FUNCTION {}()"
    attacker.execute(sql.SQL(create_trigger).format(sql.Identifier("app", function)))
    with error("55000", 'rows of "app.items" cannot be written', "Drop or rename that relation"):
        attacker.execute("INSERT INTO app.items VALUES (1, 'lamp')")
    assert attacker.execute("SELECT count(*) FROM hers.ran").fetchone() == (0,)


@pytest.mark.parametrize(
    ("trigger", "condition"),
    [
        ("evil", "hers.evil()"),
        ("evil", "pg_catalog.query_to_xml('SELECT hers.evil()', true, true, '') IS NOT NULL"),
        ("evil", "(OLD.id > 0 AND pg_catalog.table_to_xml('hers.evil', true, true, '') IS NOT NULL)"),
        ("evil", "pg_catalog.set_config('search_path', 'hers, pg_catalog', false) IS NOT NULL"),
        ("~ml_rag_segment_embedding", "hers.evil()"),
        ("evil", "OLD.name OPERATOR(hers.<~>) NEW.name"),
        ("evil", "OLD.name::hers.checked IS NOT NULL"),
        ("evil", "record_in('(x)', '{row}', -1) IS NOT NULL"),
        ("evil", "domain_in('x', '{checked}', -1) IS NOT NULL"),
        ("evil", "array_in('{x}', '{checked}', -1) IS NOT NULL"),
        (
            "evil",
            "ml_rag._passing_rows(jsonb_populate_record(NULL::ml_rag.store,"
            """ '{"relation": "shared.items", "segment": "name"}'), ' AND hers.evil()', '{}') IS NOT NULL""",
        ),
    ],
)
def test_who_may_make_triggers_on_a_table_runs_no_code_as_its_owner_by_a_condition(
    db: Database, owner: Connection, attacker: Connection, trigger: str, condition: str
) -> None:
    """Any function does as the one of the trigger, and a condition can run a text as a statement."""
    make_shared(owner, '"mode": "immediate"')
    role = sql.Identifier(db.role("tenant"))
    owner.execute(sql.SQL("GRANT INSERT, TRIGGER ON shared.items TO {}").format(role))
    attacker.execute(
        "CREATE TABLE hers.ran (who name); GRANT INSERT ON hers.ran TO PUBLIC;"
        "CREATE FUNCTION hers.evil() RETURNS boolean LANGUAGE plpgsql AS"
        " $$BEGIN INSERT INTO hers.ran SELECT current_user; RETURN true; END$$;"
        "CREATE FUNCTION hers.evil(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT hers.evil()';"
        "CREATE VIEW hers.evil AS SELECT hers.evil() AS it; GRANT SELECT ON hers.evil TO PUBLIC;"
        "CREATE OPERATOR hers.<~> (LEFTARG = text, RIGHTARG = text, FUNCTION = hers.evil);"
        "CREATE DOMAIN hers.checked AS text CHECK (hers.evil());"
        "CREATE TYPE hers.row AS (x hers.checked)"
    )
    # by their OIDs, on which nothing depends
    for name in ("checked", "row"):
        ((oid,),) = attacker.execute(f"SELECT 'hers.{name}'::regtype::oid".encode()).fetchall()
        condition = condition.replace(f"{{{name}}}", str(oid))
    attacker.execute(
        f'CREATE OR REPLACE TRIGGER "{trigger}" BEFORE UPDATE ON shared.items FOR EACH ROW WHEN ({condition})'
        " EXECUTE FUNCTION suppress_redundant_updates_trigger()".encode()
    )
    for _ in range(2):
        with error("42501", f'trigger "{trigger}"', "a role that you do not trust", "Drop the trigger"):
            attacker.execute("INSERT INTO shared.items VALUES (1, 'lamp')")
        # a trigger stays when the right to make some goes
        owner.execute(sql.SQL("REVOKE TRIGGER ON shared.items FROM {}").format(role))
    with error("42501", f'trigger "{trigger}"'):
        # a new session, in which strings of functions have not been read yet
        db.connect("tenant", options="-c standard_conforming_strings=off").execute(
            "INSERT INTO shared.items VALUES (2, 'lamp')"
        )
    assert attacker.execute("SELECT count(*) FROM hers.ran").fetchone() == (0,)


@pytest.mark.parametrize("action", ["DELETE CASCADE", "DELETE SET NULL", "DELETE CASCADE ON UPDATE CASCADE"])
def test_who_may_make_foreign_keys_on_segments_runs_no_code_as_their_owner(
    db: Database, owner: Connection, attacker: Connection, action: str
) -> None:
    """A foreign key changes rows as the owner of its table; but AFTER triggers come later, as another role."""
    make_shared(owner, '"destination": "table"')
    role = sql.Identifier(db.role("tenant"))
    owner.execute(sql.SQL("GRANT ALL ON shared.items TO {}").format(role))
    owner.execute(sql.SQL("GRANT SELECT, REFERENCES ON shared.items_segments TO {}").format(role))
    attacker.execute("INSERT INTO shared.items VALUES (1, 'lamp'), (2, 'chair')")
    # a table that refers to one of the owner's, which refers to the segments
    key = f"FOREIGN KEY (id, n) REFERENCES shared.items_segments ON {action}"
    owner.execute(f"CREATE TABLE shared.marks (id integer, n integer UNIQUE, {key})".encode())
    owner.execute(
        sql.SQL("INSERT INTO shared.marks VALUES (2, 1); GRANT REFERENCES ON shared.marks TO {}").format(role)
    )
    attacker.execute(EVIL)
    other = f"FOREIGN KEY (n) REFERENCES shared.marks (n) ON {action}"
    for table, made, value in (("a", key, "1, 1"), ("b", other, "2, 1")):
        attacker.execute(f"CREATE TABLE hers.{table} (id integer, n integer, {made})".encode())
        attacker.execute(
            f"INSERT INTO hers.{table} VALUES ({value}); CREATE TRIGGER evil AFTER UPDATE OR DELETE ON hers.{table}"
            " FOR EACH ROW EXECUTE FUNCTION hers.evil()".encode()
        )
    for table in ("a", "b"):
        for statement in ("UPDATE shared.items SET name = 'red'", "UPDATE shared.items SET id = id + 5"):
            with error("42501", f'rows of "hers.{table}" refer to "shared.items_segments"', "REVOKE REFERENCES"):
                attacker.execute(statement)
        attacker.execute(f"DROP TABLE hers.{table}".encode())
    # of roles that are trusted: the owner's own table
    attacker.execute("UPDATE shared.items SET name = 'red'")
    assert attacker.execute("SELECT count(*) FROM hers.ran").fetchone() == (0,)
    attacker.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    try:
        with error("55000", "may create triggers or foreign keys", "REVOKE TRIGGER, REFERENCES"):
            attacker.execute("INSERT INTO shared.items VALUES (3, 'lamp')")
    finally:
        attacker.execute("ROLLBACK")


def test_a_trigger_with_a_condition_that_the_owner_answers_for(
    db: Database, owner: Connection, attacker: Connection
) -> None:
    make_shared(owner, '"mode": "immediate"')
    owner.execute(
        "CREATE TRIGGER own BEFORE UPDATE ON shared.items FOR EACH ROW"
        " WHEN (OLD.id = NEW.id AND abs(OLD.id) >= 0 AND pg_trigger_depth() >= 0)"
        " EXECUTE FUNCTION suppress_redundant_updates_trigger()"
    )
    owner.execute("GRANT INSERT ON shared.items TO ml_rag_user")
    attacker.execute("INSERT INTO shared.items VALUES (1, 'lamp')")
    owner.execute("GRANT TRIGGER ON shared.items TO ml_rag_user")
    with error("42501", 'trigger "own"', "ml_rag_user", "ENABLE ALWAYS TRIGGER"):
        attacker.execute("INSERT INTO shared.items VALUES (2, 'lamp')")
    owner.execute("ALTER TABLE shared.items ENABLE ALWAYS TRIGGER own")
    attacker.execute("INSERT INTO shared.items VALUES (2, 'lamp')")
    attacker.execute(
        "CREATE OR REPLACE TRIGGER own BEFORE UPDATE ON shared.items FOR EACH ROW WHEN (OLD.id = NEW.id)"
        " EXECUTE FUNCTION suppress_redundant_updates_trigger()"
    )
    with error("42501", 'trigger "own"'):
        attacker.execute("INSERT INTO shared.items VALUES (3, 'lamp')")


@pytest.mark.parametrize("options", ['"mode": "immediate"', '"destination": "table"'])
@pytest.mark.parametrize("granted", ["before", "after"])
def test_a_trigger_that_is_younger_than_the_snapshot_of_a_transaction_runs_no_code(
    db: Database, owner: Connection, attacker: Connection, options: str, granted: str
) -> None:
    make_shared(owner, options)
    role = sql.Identifier(db.role("tenant"))
    grant = sql.SQL("GRANT INSERT, TRIGGER ON ALL TABLES IN SCHEMA shared TO {}").format(role)
    if granted == "before":
        owner.execute(grant)
    attacker.execute(EVIL)
    other = db.connect("tenant")
    for level in ("REPEATABLE READ", "SERIALIZABLE"):
        attacker.execute(f"BEGIN ISOLATION LEVEL {level}".encode())
        attacker.execute("SELECT count(*) FROM hers.ran")
        owner.execute(grant)
        for table, event in (("items", "UPDATE"), ("items_segments", "INSERT")):
            if "table" in options or table == "items":
                made = f"CREATE TRIGGER evil BEFORE {event} ON shared.{table} FOR EACH ROW"
                other.execute(f"{made} EXECUTE FUNCTION hers.evil()".encode())
        try:
            with error("55000", "cannot be checked at this isolation level", "may create triggers", "READ COMMITTED"):
                attacker.execute("INSERT INTO shared.items VALUES (1, 'lamp')")
        finally:
            attacker.execute("ROLLBACK")
        owner.execute("DROP TRIGGER evil ON shared.items")
        if "table" in options:
            owner.execute("DROP TRIGGER evil ON shared.items_segments")
        if granted == "after":
            owner.execute(sql.SQL("REVOKE ALL ON ALL TABLES IN SCHEMA shared FROM {}").format(role))
    assert attacker.execute("SELECT count(*) FROM hers.ran").fetchone() == (0,)


@pytest.mark.parametrize("options", ['"mode": "immediate"', '"destination": "table"'])
@pytest.mark.parametrize("change", ["GRANT TRIGGER ON {table} TO {role}", "ALTER TABLE {table} OWNER TO {role}"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_what_a_role_was_given_since_the_snapshot_of_anothers_transaction_runs_no_code(
    db: Database, owner: Connection, attacker: Connection, options: str, change: str, level: str
) -> None:
    """The catalog shows the writer, who may create no triggers, owners and grants of when its transaction began."""
    make_shared(owner, options)
    owner.execute(sql.SQL("GRANT INSERT ON shared.items TO {}").format(sql.Identifier(db.role("asker"))))
    attacker.execute(EVIL)
    writer = db.connect("asker")
    # one that has failed has changed nothing
    with contextlib.suppress(psycopg.Error):
        owner.execute("BEGIN; ALTER TABLE shared.items ADD x integer; ALTER TABLE shared.items DROP y; COMMIT")
    owner.execute("ROLLBACK")
    writer.execute(f"BEGIN ISOLATION LEVEL {level}; INSERT INTO shared.items VALUES (1, 'lamp'); COMMIT".encode())
    writer.execute(f"BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM pg_class".encode())
    tables = ("items", "items_segments") if "table" in options else ("items",)
    role = sql.Identifier(db.role("tenant"))
    for table in tables:
        owner.execute(sql.SQL(change).format(table=sql.Identifier("shared", table), role=role))
    event = "INSERT" if "table" in options else "UPDATE"
    made = f"CREATE TRIGGER evil BEFORE {event} ON shared.{tables[-1]} FOR EACH ROW EXECUTE FUNCTION hers.evil()"
    attacker.execute(made.encode())
    with error("40001", "has been changed since the transaction began", "new transaction"):
        writer.execute("INSERT INTO shared.items VALUES (2, 'lamp')")
    writer.execute("ROLLBACK")
    assert attacker.execute("SELECT count(*) FROM hers.ran").fetchone() == (0,)


def test_a_load_runs_no_operator_of_a_path_that_names_pg_catalog_later(
    owner: Connection, attacker: Connection, folder: Path
) -> None:
    """It commits as it goes, and so runs under the path of the session."""
    owner.execute("SELECT ml_rag.create_store('public.docs')")
    owner.execute("CALL ml_rag.add_embedding('public.docs', 'more', '{\"embed_model_id\": \"fake-embed\"}')")
    attacker.execute("CREATE TABLE hers.ran (who name); GRANT INSERT ON hers.ran TO PUBLIC")
    for kind, function in (("oid", "oideq"), ("name", "nameeq"), ("text", "texteq")):
        attacker.execute(
            f"CREATE FUNCTION hers.{function}({kind}, {kind}) RETURNS boolean LANGUAGE plpgsql AS"
            f" $$BEGIN INSERT INTO hers.ran VALUES (current_user); RETURN pg_catalog.{function}($1, $2); END$$;"
            f"CREATE OPERATOR hers.= (LEFTARG = {kind}, RIGHTARG = {kind}, FUNCTION = hers.{function})".encode()
        )
    (folder / "a.txt").write_text("a lamp of red glass")
    owner.execute("SET search_path = hers, pg_catalog")
    options = '{"schema_name": "public", "table_name": "docs"}'
    ((result,),) = owner.execute("CALL public.vector_store_load(%s, %s)", (f"file://{folder}/", options)).fetchall()
    owner.execute("SET search_path = pg_catalog")
    assert (result["segments"], owner.execute("SELECT count(*) FROM hers.ran").fetchall()) == (1, [(0,)])


def test_a_trigger_of_a_child_that_is_made_meanwhile_runs_no_code(
    db: Database, owner: Connection, attacker: Connection
) -> None:
    """A statement locks the table that it writes, and not a child that has a row of the same key, which waits."""
    make_shared(owner, '"mode": "immediate"')
    owner.execute("CREATE TABLE shared.child () INHERITS (shared.items)")
    owner.execute("INSERT INTO shared.child VALUES (1, 'lamp')")
    role = sql.Identifier(db.role("tenant"))
    owner.execute(sql.SQL("GRANT INSERT ON shared.items TO {0}; GRANT TRIGGER ON shared.child TO {0}").format(role))
    attacker.execute(EVIL)
    attacker.execute(
        "BEGIN; CREATE TRIGGER evil BEFORE UPDATE ON shared.child FOR EACH ROW EXECUTE FUNCTION hers.evil()"
    )
    other = db.connect("tenant")
    writing = Background(lambda: other.execute("INSERT INTO shared.items VALUES (1, 'lamp')"))
    wait_until(lambda: waits_for_a_lock(owner, other))
    attacker.execute("COMMIT")
    with error("42501"):
        writing.result(30)
    assert attacker.execute("SELECT count(*) FROM hers.ran").fetchone() == (0,)


TO_NODES = "CREATE TRIGGER evil {} DELETE ON shared.items_segments_nodes"
BEYOND_NODES = (
    "CREATE TABLE hers.t (id integer, s integer, n integer, FOREIGN KEY (id, s, n) REFERENCES"
    " shared.items_segments_nodes ON DELETE CASCADE); INSERT INTO hers.t VALUES (1, 1, 1);"
    "CREATE TRIGGER evil AFTER DELETE ON hers.t"
)


@pytest.mark.parametrize(
    ("privilege", "made"),
    [
        ("TRIGGER", TO_NODES.format("BEFORE")),
        ("TRIGGER", TO_NODES.format("AFTER")),
        ("REFERENCES", BEYOND_NODES),
        ("REFERENCES (source_id, segment_number, node_number)", BEYOND_NODES),
    ],
)
def test_a_trigger_that_goes_with_nodes_and_is_made_meanwhile_runs_no_code(
    db: Database, owner: Connection, attacker: Connection, privilege: str, made: str
) -> None:
    """Nodes go with their segments, whose lock tells nothing of a trigger on the nodes that is not yet committed."""
    owner.execute("CREATE SCHEMA shared; GRANT USAGE ON SCHEMA shared TO PUBLIC")
    owner.execute("CREATE TABLE shared.items (id integer PRIMARY KEY, name text)")
    owner.execute("INSERT INTO shared.items VALUES (1, 'lamp')")
    create(owner, "shared.items", columns="name", destination="table")
    owner.execute("CALL ml_rag.run_vectorizer('shared.items')")
    owner.execute("CALL ml_rag.create_node_group('shared.items_segments', 'nodes', '{\"transform\": \"sentence\"}')")
    role = sql.Identifier(db.role("tenant"))
    owner.execute(sql.SQL("GRANT SELECT, UPDATE ON shared.items TO {}").format(role))
    given = sql.SQL(privilege)
    owner.execute(sql.SQL("GRANT {} ON shared.items_segments_nodes TO {}").format(given, role))
    attacker.execute(
        "CREATE TABLE hers.ran (who name); GRANT INSERT ON hers.ran TO PUBLIC;"
        "CREATE FUNCTION hers.evil() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN INSERT INTO hers.ran SELECT current_user; RETURN OLD; END$$;"
        f"BEGIN; {made} FOR EACH ROW EXECUTE FUNCTION hers.evil()".encode()
    )
    other = db.connect("tenant")
    writing = Background(lambda: other.execute("UPDATE shared.items SET name = 'chair'"))
    wait_until(lambda: waits_for_a_lock(owner, other))
    attacker.execute("COMMIT")
    with error("42501"):
        writing.result(30)
    assert attacker.execute("SELECT count(*) FROM hers.ran").fetchone() == (0,)
