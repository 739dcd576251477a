"""store/reembed and store/switch where the table, or the session, is not as they would like it."""

from __future__ import annotations

from typing import Any

import pytest
from test_reembed import TEXTS, assert_embedded, columns, marker_of, reembed, rows, triggers

from support.cluster import Connection, Database
from support.models_server import ModelsServer, models
from support.stores import create_store, error, search

__all__ = ["models"]


@pytest.fixture
def store(owner: Connection, models: ModelsServer) -> Connection:
    """The owner's connection; the store docs, of fake-embed."""
    create_store(owner, rows=rows(TEXTS), type="vector(16)")
    return owner


def make_trigger(connection: Connection, body: str, name: str = "a_rule") -> None:
    connection.execute(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$")
    connection.execute(f"CREATE TRIGGER {name} BEFORE UPDATE ON docs FOR EACH ROW EXECUTE FUNCTION {name}()")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_an_isolation_level_that_would_not_see_what_others_write(
    store: Connection, models: ModelsServer, level: str
) -> None:
    store.execute(f"SET default_transaction_isolation = '{level}'")
    with error("55000", level, "read committed"):
        reembed(store, "narrow")
    assert models.requests == []
    assert columns(store)[-1] == "segment_embedding"
    store.execute("SET default_transaction_isolation = 'read committed'")
    assert reembed(store, "narrow")["switched"] is True


def test_where_nothing_can_be_written_no_model_is_asked(store: Connection, models: ModelsServer) -> None:
    store.execute("SET default_transaction_read_only = on")
    with error("25006", "read-only"):
        reembed(store, "narrow")
    assert models.requests == []


def test_two_indexes_that_are_the_same(store: Connection) -> None:
    for name in ("one", "two"):
        store.execute(f"CREATE INDEX {name} ON docs USING hnsw (segment_embedding vector_l2_ops)")
    statement = "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'docs' ORDER BY 1"
    before = store.execute(statement).fetchall()
    assert reembed(store, "narrow")["switched"] is True
    assert store.execute(statement).fetchall() == before
    assert_embedded(store, "narrow")


# a trigger that keeps a row as it is, by either way there is
@pytest.mark.parametrize("kept", ["NULL", "OLD"])
@pytest.mark.parametrize("last", [0, 6])
def test_rows_that_a_trigger_keeps_as_they_are(store: Connection, models: ModelsServer, kept: str, last: int) -> None:
    make_trigger(store, f"IF OLD.document_id > {last} THEN RETURN {kept}; END IF; RETURN NEW;")

    def stop(_: list[str]) -> None:
        if len(models.requests) > 100:
            raise OSError

    models.always = stop
    result = reembed(store, "narrow")
    assert (result["segments"], result["failed"], result["switched"]) == (last, 7 - last, False)
    assert "trigger" in result["first_error"]
    assert_embedded(store, "fake-embed")
    store.execute("DROP FUNCTION a_rule CASCADE")
    assert reembed(store, "narrow")["switched"] is True
    assert_embedded(store, "narrow")


def test_a_trigger_that_was_off_while_the_table_was_filled(
    db: Database, store: Connection, models: ModelsServer
) -> None:
    other = db.connect()

    def change() -> None:
        other.execute("ALTER TABLE docs DISABLE TRIGGER USER")
        other.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
        other.execute("ALTER TABLE docs ENABLE TRIGGER USER")

    models.before = {4: change}
    with error("55000", "switched off"):
        reembed(store, "narrow", batch_size=1)
    assert marker_of(store) == "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed"
    assert reembed(store, "narrow")["switched"] is True
    assert_embedded(store, "narrow")


def test_a_copy_that_was_dumped_half_done(store: Connection) -> None:
    """A dump keeps the name of the index of what is left to do, which has the number of the table it was of."""
    reembed(store, "narrow", switch=False)
    store.execute("CREATE INDEX ml_rag_reembed_1 ON docs ((1)) WHERE segment_embedding_next IS NULL")
    reembed(store, "narrow")
    assert store.execute("SELECT count(*) FROM pg_indexes WHERE indexname ~ '^ml_rag'").fetchone() == (0,)
    assert triggers(store) == []
    assert reembed(store, "other")["switched"] is True


COMMENTS = {
    "two markers": "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed GENAI_OPTIONS=EMBED_MODEL_ID=never",
    "two in one": "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,EMBED_MODEL_ID=never",
    "a line break": "of the handbook\nGENAI_OPTIONS=EMBED_MODEL_ID=fake-embed\nkept",
    "a tab": "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed\tkept",
}


@pytest.mark.parametrize("comment", COMMENTS.values(), ids=list(COMMENTS))
def test_the_marker_is_read_as_everywhere_else(store: Connection, models: ModelsServer, comment: str) -> None:
    store.execute(f"COMMENT ON COLUMN docs.segment_embedding IS '{comment}'")
    found: Any = store.execute("SELECT ml_rag._hold_models(array_agg(s)) FROM ml_rag.discover() AS s").fetchone()
    assert found == (True,)
    assert reembed(store, "narrow")["former_embed_model_id"] == "fake-embed"
    assert marker_of(store) == comment.replace("=fake-embed", "=narrow,REEMBEDDED_FROM=fake-embed")
    assert search(store, "green tree", {"embed_model_id": "narrow", "n_citations": 1})[0][5:7] == ("green tree", 0)
    assert reembed(store, "fake-embed")["former_embed_model_id"] == "narrow"
    assert_embedded(store, "fake-embed")


@pytest.mark.parametrize("comment", COMMENTS.values(), ids=list(COMMENTS))
def test_a_batch_routine_reads_the_marker_as_everywhere_else(
    owner: Connection, models: ModelsServer, comment: str
) -> None:
    owner.execute("CREATE TABLE texts (id integer PRIMARY KEY, segment text, segment_embedding vector(16))")
    owner.execute(f"COMMENT ON COLUMN texts.segment_embedding IS '{comment}'")
    owner.execute("INSERT INTO texts VALUES (1, 'red house')")
    row = owner.execute(
        "CALL ml_embed_table('public.texts.segment', 'public.texts.segment_embedding',"
        ' \'{"embed_model_id": "fake-embed"}\')'
    ).fetchone()
    assert row is not None
    assert row[0]["succeeded"] == 1


def test_rows_that_fail_keep_the_store_from_switching(store: Connection, models: ModelsServer) -> None:
    store.execute("UPDATE docs SET segment = 'a !nan b' WHERE document_id = 3")
    warnings: list[str] = []
    store.add_notice_handler(lambda notice: warnings.append(notice.message_primary or ""))
    result = reembed(store, "narrow")
    assert (result["segments"], result["failed"], result["switched"]) == (6, 1, False)
    assert result["first_error"].endswith("(38000): a !nan b")
    assert warnings == ['1 rows have no new embedding, so "docs" goes on with its old ones']
    assert marker_of(store) == "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed"
    store.execute("UPDATE docs SET segment = 'mended' WHERE document_id = 3")
    result = reembed(store, "narrow")
    assert (result["segments"], result["failed"], result["switched"]) == (1, 0, True)
    assert_embedded(store, "narrow")


def test_a_model_that_fails_for_all_ends_the_call(owner: Connection, models: ModelsServer) -> None:
    create_store(owner, rows=rows([f"!nan {i}" for i in range(40)]), type="vector(16)")
    with error("38000"):
        reembed(owner, "narrow")
    assert len(models.requests) < 20
