"""batch: a table that is exchanged while a model is asked about its rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.cluster import Connection, Database, noticed
from support.schema import SqlModel
from support.stores import create_store, error, fake_embedding

#: what another role puts in the place of a table: its columns, as SELECT has them
PLANTS = {
    "a table": "CREATE TABLE {name} AS SELECT {columns};"
    "CREATE TRIGGER t BEFORE INSERT OR UPDATE OR DELETE ON {name} FOR EACH STATEMENT EXECUTE FUNCTION own.evil()",
    "a view": "CREATE VIEW {name} AS SELECT {columns} WHERE own.evil(1)",
}


@pytest.fixture
def taker(db: Database, owner: Connection) -> Connection:
    """May create schemas, and has one; the tables of the owner are in schema kb."""
    tenant = db.role("tenant")
    owner.execute(f"GRANT CREATE ON DATABASE {db.name} TO {tenant}; CREATE SCHEMA own AUTHORIZATION {tenant}")
    owner.execute("CREATE SCHEMA kb; GRANT USAGE ON SCHEMA kb TO PUBLIC")
    connection = db.connect("tenant")
    connection.execute(
        "GRANT USAGE ON SCHEMA own TO PUBLIC;"
        "CREATE FUNCTION own.evil(integer) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$;"
        "CREATE FUNCTION own.evil() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN NEW; END $$"
    )
    return connection


def exchange(owner: Connection, taker: Connection, what: str, **relations: str) -> None:
    owner.execute("ALTER SCHEMA kb RENAME TO former")
    taker.execute("CREATE SCHEMA kb; GRANT USAGE ON SCHEMA kb TO PUBLIC")
    for name, columns in relations.items():
        taker.execute(PLANTS[what].format(name=f"kb.{name}", columns=columns).encode())
        taker.execute(f"GRANT ALL ON kb.{name} TO PUBLIC".encode())


@pytest.mark.parametrize("what", PLANTS)
@pytest.mark.parametrize("routine", ["ml_generate_table", "ml_rag_table"])
@pytest.mark.parametrize("role", ["asker", None])
def test_of_a_batch_routine(
    db: Database, owner: Connection, taker: Connection, model: SqlModel, role: str | None, routine: str, what: str
) -> None:
    create_store(owner, "docs", [("d", 1, 1, "zebra", fake_embedding("zebra"))], "vector(16)")
    owner.execute(
        "CREATE TABLE kb.asked (id integer PRIMARY KEY, question text, answer jsonb); GRANT ALL ON kb.asked TO PUBLIC;"
        "INSERT INTO kb.asked VALUES (1, 'zebra'), (2, 'zebra')"
    )
    answers = iter(["first", "second"])

    def answer(_: Any) -> str:
        if (text := next(answers)) == "second":
            exchange(owner, taker, what, asked="2 AS id, 'zebra' AS question, NULL::jsonb AS answer")
        return text

    model.answers = [answer]
    options = {"model_id": "fake-generate"}
    if routine == "ml_rag_table":
        options = {"vector_store": ["public.docs"], "model_options": options}
    caller = db.connect(role)
    said = noticed(caller)
    with error("42P01", 'table "kb.asked" does not exist any more'):
        caller.execute(f"CALL {routine}('kb.asked.question', 'kb.asked.answer', %s)", (json.dumps(options),))
    assert said == []
    assert what == "a view" or taker.execute("SELECT answer FROM kb.asked").fetchall() == [(None,)]
