"""store/reembed: the column that a re-embedding fills, and the trigger that keeps it true to the text."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import sql
from test_reembed import TEXTS, assert_embedded, columns, marker_of, reembed, rows, triggers

from support.cluster import Connection, Database
from support.models_server import ModelsServer, models
from support.stores import create_store, error

__all__ = ["models"]


@pytest.fixture
def store(owner: Connection, models: ModelsServer) -> Connection:
    """The owner's connection; the store docs, of fake-embed."""
    create_store(owner, rows=rows(TEXTS), type="vector(16)")
    return owner


def make_trigger(connection: Connection, name: str) -> None:
    """A trigger that takes the text out of the metadata: also where a statement does not touch the text."""
    connection.execute(
        "CREATE OR REPLACE FUNCTION take_text() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " NEW.segment := coalesce(NEW.metadata ->> 'text', NEW.segment); RETURN NEW; END $$"
    )
    connection.execute(
        sql.SQL("CREATE TRIGGER {} BEFORE UPDATE ON docs FOR EACH ROW EXECUTE FUNCTION take_text()").format(
            sql.Identifier(name)
        )
    )


# before ours by its name, after it, after all letters, and so long that little room is left
@pytest.mark.parametrize("name", ["a_rule", "zzz_rule", "~rule", "étage", "zzz" + "é" * 14])
@pytest.mark.parametrize("disabled", [False, True])
def test_whatever_a_trigger_makes_of_the_text_is_embedded(
    db: Database, store: Connection, models: ModelsServer, name: str, disabled: bool
) -> None:
    make_trigger(store, name)
    if disabled:
        store.execute(sql.SQL("ALTER TABLE docs DISABLE TRIGGER {}").format(sql.Identifier(name)))
    writer = db.connect()

    def change() -> None:
        if disabled:
            writer.execute(sql.SQL("ALTER TABLE docs ENABLE TRIGGER {}").format(sql.Identifier(name)))
        writer.execute('UPDATE docs SET metadata = \'{"text": "red hut"}\' WHERE document_id = 1')  # embedded already
        writer.execute('UPDATE docs SET metadata = \'{"text": "blue lake"}\' WHERE document_id = 3')  # being embedded
        writer.execute('UPDATE docs SET metadata = \'{"text": "brown bear"}\' WHERE document_id = 7')  # to be embedded

    # request 0 is the probe of the dimensions; one row to a batch
    models.before = {3: change}
    assert reembed(store, "narrow", batch_size=1)["switched"] is True
    assert_embedded(store, "narrow")
    found = {text for (text,) in store.execute("SELECT segment FROM docs WHERE document_id IN (1, 3, 7)")}
    assert found == {"red hut", "blue lake", "brown bear"}
    assert triggers(store) == [name]


def test_a_trigger_that_is_made_meanwhile_and_runs_after_ours(
    db: Database, store: Connection, models: ModelsServer
) -> None:
    other = db.connect()

    def change() -> None:
        make_trigger(other, "zzz_rule")
        other.execute('UPDATE docs SET metadata = \'{"text": "red hut"}\' WHERE document_id = 1')

    models.before = {4: change}
    with error("55000", "runs after ours", "zzz_rule", "starts from the beginning"):
        reembed(store, "narrow", batch_size=1)
    assert marker_of(store) == "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed"
    assert reembed(store, "narrow")["segments"] == 7
    assert_embedded(store, "narrow")
    assert triggers(store) == ["zzz_rule"]


def test_a_trigger_of_another_kind_may_run_after_ours(store: Connection) -> None:
    reembed(store, "narrow", switch=False)
    store.execute("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
    store.execute("CREATE TRIGGER zzz_1 AFTER UPDATE ON docs FOR EACH ROW EXECUTE FUNCTION nothing()")
    store.execute("CREATE TRIGGER zzz_2 BEFORE UPDATE ON docs FOR EACH STATEMENT EXECUTE FUNCTION nothing()")
    store.execute("CREATE TRIGGER zzz_3 BEFORE INSERT OR DELETE ON docs FOR EACH ROW EXECUTE FUNCTION nothing()")
    assert reembed(store, "narrow")["segments"] == 0
    assert_embedded(store, "narrow")


def test_a_trigger_after_which_no_name_comes(store: Connection, models: ModelsServer) -> None:
    make_trigger(store, "z" * 63)
    with error("55000", "z" * 63, "RENAME TO"):
        reembed(store, "narrow")
    assert columns(store)[-1] == "segment_embedding"
    assert triggers(store) == ["z" * 63]


def test_giving_up_drops_a_trigger_of_any_name(store: Connection) -> None:
    make_trigger(store, "zzz_rule")
    reembed(store, "narrow", switch=False)
    made: Any = triggers(store)
    assert len(made) == 2
    assert made[0] == "zzz_rule"
    store.execute("SELECT ml_rag.abandon_reembed('docs')")
    assert triggers(store) == ["zzz_rule"]
