"""Types that PL/pgSQL looks up once a session: whoever calls a function first does not decide what later callers run.

A domain can have the name of a type of pg_catalog; its check runs code of its owner whenever a variable gets a value.
"""

from __future__ import annotations

import re

import pytest
from psycopg import sql

from support.cluster import Connection, Database
from support.stores import create_store, search

#: names of types that are keywords of SQL, which mean those of pg_catalog whatever the path is
_KEYWORDS = {"bigint", "boolean", "double", "float", "integer", "numeric", "smallint"}


@pytest.fixture
def planter(db: Database, owner: Connection) -> Connection:
    """A role whose session has called inner functions while its own domains were in the way."""
    owner.execute("CREATE TABLE ran (who name, what text); GRANT INSERT, SELECT ON ran TO PUBLIC")
    planter = db.connect("asker")
    planter.execute(
        "CREATE FUNCTION pg_temp.evil(what pg_catalog.text) RETURNS boolean LANGUAGE plpgsql AS"
        " $$BEGIN INSERT INTO public.ran VALUES (current_user, what); RETURN true; END$$"
    )
    for name in ("text", "name"):
        planter.execute(f"CREATE DOMAIN pg_temp.{name} AS pg_catalog.{name} CHECK (pg_temp.evil(VALUE))")
    planter.execute("SET search_path = pg_temp, pg_catalog")
    planter.execute("SELECT ml_rag._hold('{}'), ml_rag._tokens('pg_catalog.simple', 'x')")
    planter.execute("SELECT ml_rag._tokens('pg_catalog.simple', 'x' COLLATE pg_catalog.\"C\")")
    planter.execute("RESET search_path")
    return planter


def test_triggers_run_no_code_of_whoever_writes(owner: Connection, planter: Connection) -> None:
    create_store(owner)
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text)")
    owner.execute('SELECT ml_rag.create_vectorizer(\'items\', \'{"columns": "name", "mode": "immediate"}\')')
    owner.execute("GRANT INSERT ON docs, items TO ml_rag_user")
    planter.execute("INSERT INTO docs VALUES ('d', '{}', 1, 1, 'größe', NULL); INSERT INTO items VALUES (1, 'lamp')")
    assert owner.execute("SELECT segment_embedding IS NOT NULL FROM items").fetchone() == (True,)
    assert owner.execute("SELECT DISTINCT who FROM ran").fetchall() == []


def test_the_next_role_of_a_connection_runs_no_code_of_the_last(
    db: Database, owner: Connection, planter: Connection
) -> None:
    create_store(owner, rows=[("d", 1, 1, "größe", (1, 0, 0))])
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    owner.execute(sql.SQL("GRANT {} TO {}").format(*(sql.Identifier(db.role(r)) for r in ("tenant", "asker"))))
    try:
        planter.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(db.role("tenant"))))
        assert len(search(planter, "größe", {"semantic_search": False, "keyword_search": True})) == 1
    finally:
        owner.execute(sql.SQL("REVOKE {} FROM {}").format(*(sql.Identifier(db.role(r)) for r in ("tenant", "asker"))))
    assert owner.execute("SELECT DISTINCT who FROM ran").fetchall() == []


def test_types_of_variables_have_their_schema(owner: Connection) -> None:
    found = owner.execute(
        "SELECT p.proname, p.prosrc FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang"
        " WHERE p.pronamespace = 'ml_rag'::regnamespace AND l.lanname = 'plpgsql'"
    ).fetchall()
    declared = [
        (name, line)
        for name, source in found
        for section in re.findall(r"^ *DECLARE\n(.*?)^ *BEGIN$", source, re.DOTALL | re.MULTILINE)
        for line in re.findall(r"^ +\w+ (?:CONSTANT )?([\w.\"]+)(?=\[\]|;| :=)", section, re.MULTILINE)
    ]
    assert len(declared) > 900
    assert [one for one in declared if "." not in one[1] and one[1] not in _KEYWORDS] == []
    assert [name for name, source in found if re.search(r"DECLARE +\w", source)] == []
