"""vectorizer/former: what DROP EXTENSION leaves of a vectorizer, and how create_vectorizer takes it back."""

from __future__ import annotations

from typing import Any

import pytest

from ml_rag.client import doctor
from support.cluster import Connection, Database
from support.models_server import ModelsServer
from support.processes import wait_until
from support.stores import error, search
from support.vectorizers import assert_in_step, assert_segments_in_step, create, run

LONG = "first paragraph\n\nsecond of glass"
SETTINGS = "SELECT name, value FROM ml_rag.setting WHERE name IN ('model_server', 'embed_model_id')"


def drop(connection: Connection) -> list[Any]:
    """Drop the extension; returns the settings that a new one needs.

    Rows that were written after the oldest transaction of the cluster began count as changed: those of others, such as
    of autovacuum, must be over.
    """
    others = (
        "SELECT FROM pg_stat_activity WHERE backend_xid IS NOT NULL"
        " AND (datname IS DISTINCT FROM current_database() OR backend_type <> 'client backend')"
    )
    wait_until(lambda: connection.execute(others).fetchone() is None)
    settings = connection.execute(SETTINGS).fetchall()
    connection.execute("DROP EXTENSION ml_rag CASCADE")
    return settings


def recreate(connection: Connection, settings: list[Any]) -> None:
    connection.execute("CREATE EXTENSION ml_rag")
    for setting in settings:
        connection.execute("SELECT ml_rag.configure(%s, %s)", setting)


@pytest.fixture
def notes(owner: Connection, models: ModelsServer) -> Connection:
    """A table whose segments are in a table of their own."""
    owner.execute("CREATE TABLE notes (id integer PRIMARY KEY, title text, body text)")
    owner.execute("INSERT INTO notes VALUES (1, 'one', %s), (2, 'two', 'a tent'), (3, 'three', 'a hat')", (LONG,))
    create(owner, "notes", "{body}", document_name="{title}", destination="table")
    assert run(owner, "notes")["embedded"] == 3
    models.requests.clear()
    return owner


def test_only_what_has_changed_is_embedded_again(items: Connection, models: ModelsServer) -> None:
    settings = drop(items)
    items.execute("UPDATE items SET name = 'hat' WHERE id = 1; INSERT INTO items VALUES (4, 'boat', NULL)")
    recreate(items, settings)
    items.execute("UPDATE items SET name = 'coat' WHERE id = 2")
    create(items)
    assert run(items)["embedded"] == 3
    assert sorted(models.embedded("fake-embed")) == ["boat: ", "coat: for two", "hat: of red glass"]
    assert_in_step(items)
    # it is one like any other
    items.execute("UPDATE items SET name = 'net' WHERE id = 3")
    assert run(items)["embedded"] == 1
    assert_in_step(items)
    assert search(items, "net: ", {"n_citations": 1})[0][5] == "net: "
    indexes = "SELECT count(*) FROM pg_indexes WHERE tablename = 'items' AND indexdef LIKE '%embedding%'"
    assert items.execute(indexes).fetchone() == (2,)
    assert items.execute("SELECT count(*) FROM pg_constraint WHERE conname LIKE 'ml_rag%'").fetchone() == (0,)
    marker = "SELECT col_description('items'::regclass, attnum) FROM pg_attribute WHERE attname = 'segment_embedding'"
    assert "KEPT_UNTIL" not in str(items.execute(marker).fetchall())


def test_a_transaction_that_began_before_and_wrote_after(db: Database, items: Connection) -> None:
    items.execute("CREATE TABLE other (n integer)")
    writer = db.connect()
    writer.execute("BEGIN; INSERT INTO other VALUES (1)")  # has its number
    settings = drop(items)
    writer.execute("UPDATE items SET name = 'hat' WHERE id = 1")
    writer.execute("SAVEPOINT s; UPDATE items SET name = 'coat' WHERE id = 2; COMMIT")
    recreate(items, settings)
    create(items)
    assert run(items)["embedded"] == 2
    assert_in_step(items)


@pytest.mark.parametrize(
    "change",
    [
        # without a mark, with that of another database, with one of a number that is yet to come
        "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed",
        "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,KEPT_UNTIL=1.1.1",
        "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,KEPT_UNTIL={system}.{database}.999999999",
        "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,KEPT_UNTIL={system}.{database}.x",
    ],
)
def test_what_cannot_be_trusted_is_embedded_again(items: Connection, change: str) -> None:
    row = items.execute(
        "SELECT system_identifier, (SELECT oid FROM pg_database WHERE datname = current_database())"
        " FROM pg_control_system()"
    ).fetchone()
    assert row is not None
    settings = drop(items)
    comment = change.format(system=row[0], database=row[1])
    items.execute(f"COMMENT ON COLUMN items.segment_embedding IS '{comment}'")
    recreate(items, settings)
    create(items)
    assert run(items)["embedded"] == 3
    assert_in_step(items)


def test_a_trigger_that_was_off_is_not_trusted(items: Connection) -> None:
    items.execute('ALTER TABLE items DISABLE TRIGGER "~ml_rag_segment_embedding"')
    items.execute("UPDATE items SET name = 'hat' WHERE id = 1")
    recreate(items, drop(items))
    create(items)
    assert run(items)["embedded"] == 3
    assert_in_step(items)


def test_kept_columns_are_taken_back_and_nothing_is_embedded(items: Connection) -> None:
    items.execute("""SELECT ml_rag.drop_vectorizer('items', '{"keep_columns": true}')""")
    items.execute("UPDATE items SET name = 'hat' WHERE id = 1; UPDATE items SET price = 3")
    create(items)
    assert run(items)["embedded"] == 1
    assert_in_step(items)


def test_kept_columns_of_other_options_are_not_taken_back(items: Connection) -> None:
    items.execute("""SELECT ml_rag.drop_vectorizer('items', '{"keep_columns": true}')""")
    with error("42701", "segment is ", "drop columns segment, document_name and segment_embedding of public.items"):
        create(items, columns="name")


def test_partitions_are_taken_back(owner: Connection, models: ModelsServer) -> None:
    owner.execute("CREATE TABLE parts (id integer PRIMARY KEY, name text) PARTITION BY RANGE (id)")
    owner.execute("CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    owner.execute("CREATE TABLE high PARTITION OF parts FOR VALUES FROM (10) TO (20)")
    owner.execute("INSERT INTO parts VALUES (1, 'lamp'), (11, 'tent')")
    create(owner, "parts", "name")
    assert run(owner, "parts")["embedded"] == 2
    settings = drop(owner)
    owner.execute("UPDATE high SET name = 'hat'")
    recreate(owner, settings)
    create(owner, "parts", "name")
    assert run(owner, "parts")["embedded"] == 1
    assert_in_step(owner, "parts")


def test_rows_embedded_at_once(owner: Connection, models: ModelsServer) -> None:
    owner.execute("CREATE TABLE at_once (id integer PRIMARY KEY, name text)")
    create(owner, "at_once", "name", mode="immediate")
    owner.execute("INSERT INTO at_once VALUES (1, 'lamp')")
    settings = drop(owner)
    owner.execute("INSERT INTO at_once VALUES (2, 'tent'); UPDATE at_once SET name = 'hat' WHERE id = 1")
    recreate(owner, settings)
    create(owner, "at_once", "name", mode="immediate")
    owner.execute("INSERT INTO at_once VALUES (3, 'boat')")
    assert run(owner, "at_once")["embedded"] == 2
    assert_in_step(owner, "at_once")


def test_the_owner_of_a_table_takes_it_back(db: Database, owner: Connection, models: ModelsServer) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker = db.connect("asker")
    tables: dict[str, dict[str, Any]] = {"words": {}, "texts": {"destination": "table"}}
    for relation, options in tables.items():
        asker.execute(f"CREATE TABLE {relation} (id integer PRIMARY KEY, name text)")
        asker.execute(f"INSERT INTO {relation} VALUES (1, 'lamp'), (2, 'tent')")
        create(asker, relation, "name", **options)
        assert run(asker, relation)["embedded"] == 2
    settings = drop(owner)
    asker.execute("UPDATE words SET name = 'hat' WHERE id = 1; UPDATE texts SET name = 'hat' WHERE id = 1")
    recreate(owner, settings)
    for relation, options in tables.items():
        create(asker, relation, "name", **options)
        models.requests.clear()
        assert run(asker, relation)["embedded"] == 1
        assert models.embedded("fake-embed") == ["hat"]


def test_segments_are_taken_back(notes: Connection, models: ModelsServer) -> None:
    settings = drop(notes)
    notes.execute("UPDATE notes SET body = 'changed', title = 'uno' WHERE id = 1; DELETE FROM notes WHERE id = 2")
    notes.execute("UPDATE notes SET title = 'tre' WHERE id = 3; INSERT INTO notes VALUES (4, 'four', 'new')")
    recreate(notes, settings)
    create(notes, "notes", "{body}", document_name="{title}", destination="table")
    assert run(notes, "notes")["embedded"] == 2
    assert sorted(models.embedded("fake-embed")) == ["changed", "new"]
    assert_segments_in_step(notes, "notes")
    names = notes.execute("SELECT document_name FROM notes_segments ORDER BY source_id").fetchall()
    assert names == [("uno",), ("tre",), ("four",)]
    notes.execute("UPDATE notes SET body = 'again' WHERE id = 4")
    assert run(notes, "notes")["embedded"] == 1
    assert_segments_in_step(notes, "notes")


def test_segments_that_were_split_in_another_way_are_made_anew(notes: Connection, models: ModelsServer) -> None:
    recreate(notes, drop(notes))
    create(notes, "notes", "{body}", document_name="{title}", destination="table", chunking={"segment_tokens": 100})
    assert run(notes, "notes")["embedded"] == 3
    assert_segments_in_step(notes, "notes")


PARAGRAPHS, TOKENS = {"split_by": "paragraph"}, {"split_by": "tokens", "segment_tokens": 50}


def exchange(connection: Connection, chunking: dict[str, Any]) -> None:
    """Another way to split texts."""
    connection.execute("SELECT ml_rag.drop_vectorizer('notes', '{\"keep_columns\": true}')")
    create(connection, "notes", "{body}", document_name="{title}", destination="table", chunking=chunking)


def test_segments_are_those_of_the_last_way_to_split_texts(notes: Connection) -> None:
    for chunking in (PARAGRAPHS, TOKENS, {}):
        for embedded in (3, 0):
            exchange(notes, chunking)
            assert run(notes, "notes")["embedded"] == embedded
    assert_segments_in_step(notes, "notes")


def test_a_run_ends_if_texts_are_split_in_another_way_meanwhile(
    db: Database, notes: Connection, models: ModelsServer
) -> None:
    exchange(notes, TOKENS)
    other = db.connect()
    models.before = {len(models.requests) + 1: lambda: exchange(other, PARAGRAPHS)}
    with error("55000", "were dropped and created again during the call", "split in another way"):
        run(notes, "notes")
    assert run(notes, "notes")["embedded"] == 3


@pytest.mark.parametrize(
    ("options", "detail"),
    [
        ({"columns": "name"}, "segment is "),
        ({"document_name": "{name}"}, "document_name is "),
        ({"embed_model_id": "fake-embed-2"}, "vector(16) of model fake-embed"),
        ({"destination": "table"}, "the embeddings are in the table"),
    ],
)
def test_a_vectorizer_of_other_options_takes_nothing_back(
    items: Connection, options: dict[str, Any], detail: str
) -> None:
    recreate(items, drop(items))
    with error("42701", "columns of a former vectorizer", detail) as caught:
        create(items, **options)
    assert "drop_vectorizer" in str(caught.hint)
    items.execute("SELECT ml_rag.drop_vectorizer('items')")
    create(items, **options)
    assert run(items)["embedded"] == 3


def test_doctor_names_the_tables(items: Connection, notes: Connection) -> None:
    def told() -> tuple[bool, str]:
        (finding,) = doctor.check_vectorizers(items)
        return finding.ok, finding.found

    assert told() == (True, "none is gone")
    recreate(items, drop(items))
    tables = "public.items, public.notes"
    assert told() == (False, f"gone, so that changed rows keep the embedding of their former text: {tables}")
    create(items)
    items.execute("SELECT ml_rag.drop_vectorizer('notes')")
    assert told() == (True, "none is gone")


def test_a_table_of_segments_is_not_a_column(notes: Connection) -> None:
    recreate(notes, drop(notes))
    with error("42701", "the segments are in table public.notes_segments"):
        create(notes, "notes", "{body}", document_name="{title}")
    notes.execute("SELECT ml_rag.drop_vectorizer('notes')")
    create(notes, "notes", "{body}", document_name="{title}")
    assert run(notes, "notes")["embedded"] == 3
    assert_in_step(notes, "notes")


def test_another_extension_that_goes_marks_nothing(items: Connection) -> None:
    items.execute("CREATE SCHEMA mine; DROP SCHEMA mine")
    with pytest.raises(Exception, match="does not exist"):
        items.execute("DROP EXTENSION ml_rag_of_another_name")
    marker = "SELECT col_description('items'::regclass, attnum) FROM pg_attribute WHERE attname = 'segment_embedding'"
    assert "KEPT_UNTIL" not in str(items.execute(marker).fetchall())


def test_a_role_that_drops_its_own_schema_marks_nothing(db: Database, items: Connection) -> None:
    asker = db.connect("asker")
    items.execute(f"CREATE SCHEMA ml_rag_of_mine AUTHORIZATION {db.role('asker')}")
    asker.execute("DROP SCHEMA ml_rag_of_mine")
    marker = "SELECT col_description('items'::regclass, attnum) FROM pg_attribute WHERE attname = 'segment_embedding'"
    assert "KEPT_UNTIL" not in str(items.execute(marker).fetchall())
