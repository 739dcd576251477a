"""store/reembed: another embedding model for a store that stays in use: what is filled, and what it follows."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.cluster import Connection, Database
from support.keywords import assert_exact
from support.models_server import ModelsServer, embedding, models
from support.stores import create_store, error, fake_embedding, ident, mark, names, search

__all__ = ["models"]

TEXTS = ["red house", "green tree", "blue sea", "old stone wall", "white snow", "black cat", "brown dog"]


def rows(texts: list[str], first: int = 1) -> list[Any]:
    return [(f"d{i}", i, 1, text, fake_embedding(text)) for i, text in enumerate(texts, first)]


def reembed(connection: Connection, model: str, store: str = "docs", **options: Any) -> dict[str, Any]:
    row = connection.execute("CALL ml_rag.reembed(%s, %s, %s)", (store, model, json.dumps(options))).fetchone()
    assert row is not None
    result: dict[str, Any] = row[0]
    return result


def vectors(connection: Connection, store: str = "docs", column: str = "segment_embedding") -> dict[str, Any]:
    statement = sql.SQL("SELECT segment, {}::real[] FROM {}").format(sql.Identifier(column), ident(store))
    return dict(connection.execute(statement).fetchall())


def assert_embedded(connection: Connection, model: str, store: str = "docs", column: str = "segment_embedding") -> None:
    """That every row holds the model's embedding of the text it has."""
    found = vectors(connection, store, column)
    assert found
    for text, vector in found.items():
        assert vector == pytest.approx(embedding(text, model), abs=1e-6), text


def columns(connection: Connection, store: str = "docs") -> list[str]:
    return [
        name
        for (name,) in connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
            " ORDER BY attnum",
            (store,),
        )
    ]


def marker_of(connection: Connection, store: str = "docs", column: str = "segment_embedding") -> str | None:
    row = connection.execute(
        "SELECT col_description(attrelid, attnum) FROM pg_attribute WHERE attrelid = %s::regclass AND attname = %s",
        (store, column),
    ).fetchone()
    assert row is not None
    comment: str | None = row[0]
    return comment


def triggers(connection: Connection, store: str = "docs") -> list[str]:
    statement = "SELECT tgname FROM pg_trigger WHERE tgrelid = %s::regclass AND NOT tgisinternal ORDER BY 1"
    return [name for (name,) in connection.execute(statement, (store,))]


def definition(connection: Connection, store: str = "docs") -> Any:
    """All that the catalog says about a table's columns but the model and the dimensions of its embeddings."""
    return connection.execute(
        "SELECT attname, atttypid::regtype::text, attnotnull, attstorage, attstattarget, attacl::text,"
        " (SELECT array_agg(conname ORDER BY 1) FROM pg_constraint WHERE conrelid = attrelid AND contype <> 'n')"
        " FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attname",
        (store,),
    ).fetchall()


@pytest.fixture
def store(owner: Connection, models: ModelsServer) -> Connection:
    """The owner's connection; the store docs, of fake-embed."""
    create_store(owner, rows=rows(TEXTS), type="vector(16)")
    owner.execute("ALTER TABLE docs ALTER segment_embedding SET NOT NULL")
    owner.execute("SELECT ml_rag.index_store('docs')")
    return owner


@pytest.mark.parametrize("model", ["narrow", "other"])
def test_every_row_gets_an_embedding_of_the_new_model(store: Connection, models: ModelsServer, model: str) -> None:
    before = definition(store)
    result = reembed(store, model, batch_size=3)
    assert result.pop("seconds") >= 0
    assert result == {
        "vector_store": "public.docs",
        "embed_model_id": model,
        "former_embed_model_id": "fake-embed",
        "segments": 7,
        "failed": 0,
        "first_error": None,
        "switched": True,
    }
    assert_embedded(store, model)
    assert sorted(models.embedded(model)) == sorted(TEXTS)
    assert max(len(texts) for asked, texts in models.requests if asked == model) == 3
    # but for the type's dimensions the table is what it was
    assert definition(store) == before
    assert triggers(store) == []
    assert marker_of(store) == f"GENAI_OPTIONS=EMBED_MODEL_ID={model},REEMBEDDED_FROM=fake-embed"


def test_searches_find_the_store_by_its_new_model(store: Connection) -> None:
    reembed(store, "narrow")
    assert names(store, embed_model_id="narrow") == ["public.docs"]
    assert names(store, embed_model_id="fake-embed") == []
    found = search(store, "green tree", {"embed_model_id": "narrow", "n_citations": 1})
    assert found[0][5] == "green tree"
    assert found[0][6] == 0


def test_the_callers_are_told_when_the_default_model_is_another(store: Connection) -> None:
    notices: list[str] = []
    store.add_notice_handler(lambda notice: notices.append(f"{notice.message_primary} {notice.message_hint}"))
    reembed(store, "narrow")
    assert any("configure('embed_model_id', 'narrow')" in notice for notice in notices)
    notices.clear()
    reembed(store, "fake-embed")
    assert not any("configure" in notice for notice in notices)


def test_indexes_keep_their_names_and_what_they_are(store: Connection) -> None:
    store.execute(
        "CREATE INDEX by_l2 ON docs USING hnsw (segment_embedding vector_l2_ops) WITH (m = 5, ef_construction = 20)"
    )
    store.execute(
        "CREATE INDEX by_part ON docs USING ivfflat (segment_embedding) WITH (lists = 1) WHERE document_id > 2"
    )
    store.execute("CREATE INDEX by_text ON docs (segment)")
    statement = "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'docs' ORDER BY 1"
    before = store.execute(statement).fetchall()
    reembed(store, "narrow")
    assert store.execute(statement).fetchall() == before
    assert store.execute(
        "SELECT count(*) FROM pg_index WHERE indrelid = 'docs'::regclass AND NOT indisvalid"
    ).fetchone() == (0,)


def test_an_index_that_was_built_by_hand_is_taken(store: Connection) -> None:
    assert reembed(store, "narrow", switch=False)["switched"] is False
    store.execute("CREATE INDEX CONCURRENTLY by_hand ON docs USING hnsw (segment_embedding_next vector_cosine_ops)")
    oid = store.execute("SELECT 'by_hand'::regclass::oid").fetchone()
    assert reembed(store, "narrow")["segments"] == 0
    assert store.execute("SELECT 'docs_segment_embedding_idx'::regclass::oid").fetchone() == oid


def test_a_model_of_more_dimensions_than_an_index_can_have(store: Connection) -> None:
    assert reembed(store, "wide")["switched"] is True
    assert_embedded(store, "wide")
    assert store.execute("SELECT count(*) FROM pg_indexes WHERE indexdef LIKE '%hnsw%'").fetchone() == (0,)


def test_half_vectors_stay_half_vectors(owner: Connection, models: ModelsServer) -> None:
    create_store(owner, rows=rows(TEXTS), type="halfvec(16)")
    reembed(owner, "narrow")
    assert owner.execute("SELECT DISTINCT pg_typeof(segment_embedding)::text FROM docs").fetchone() == ("halfvec",)
    assert vectors(owner)["blue sea"] == pytest.approx(embedding("blue sea", "narrow"), abs=1e-3)


def test_columns_of_other_names(owner: Connection, models: ModelsServer) -> None:
    owner.execute('CREATE TABLE "My Texts" (id integer PRIMARY KEY, "The Text" varchar(80), "E 1" vector(16))')
    owner.execute(
        """COMMENT ON COLUMN "My Texts"."E 1" IS 'kept GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed;X=1 kept too'"""
    )
    owner.execute('INSERT INTO "My Texts" SELECT i, %s || i, NULL FROM generate_series(1, 5) AS i', ("word",))
    mapped = {"segment": "The Text", "segment_embedding": "E 1"}
    with error("22023", "Columns missing or of another type: segment text, segment_embedding vector"):
        reembed(owner, "narrow", '"My Texts"')
    reembed(owner, "narrow", '"My Texts"', vector_store_columns=mapped)
    for text, vector in owner.execute('SELECT "The Text", "E 1"::real[] FROM "My Texts"'):
        assert vector == pytest.approx(embedding(text, "narrow"), abs=1e-6)
    assert marker_of(owner, '"My Texts"', "E 1") == (
        "kept GENAI_OPTIONS=EMBED_MODEL_ID=narrow,REEMBEDDED_FROM=fake-embed;X=1 kept too"
    )


@pytest.mark.parametrize(
    ("comment", "afterwards"),
    [
        (
            "{}EMBED_MODEL_ID=fake-embed,EMBED_MODEL_ID=x",
            "{}EMBED_MODEL_ID=narrow,REEMBEDDED_FROM=fake-embed,EMBED_MODEL_ID=x",
        ),
        ("{}A {}EMBED_MODEL_ID=fake-embed", "{}A {}EMBED_MODEL_ID=narrow,REEMBEDDED_FROM=fake-embed"),
        (
            "{}EMBED_MODEL_ID=, {}EMBED_MODEL_ID=fake-embed;B",
            "{}EMBED_MODEL_ID=, {}EMBED_MODEL_ID=narrow,REEMBEDDED_FROM=fake-embed;B",
        ),
        (
            "by hand\n{}EMBED_MODEL_ID=fake-embed\nby me",
            "by hand\n{}EMBED_MODEL_ID=narrow,REEMBEDDED_FROM=fake-embed\nby me",
        ),
    ],
)
def test_it_changes_the_model_that_all_others_read(store: Connection, comment: str, afterwards: str) -> None:
    mark(store, "docs", comment.replace("{}", "GENAI_OPTIONS="))
    loaded = "SELECT ml_rag.load_document('docs', 'a', 'some words') -> 'documents'"
    assert (store.execute(loaded).fetchone() or ({},))[0]["loaded"] == 1
    assert reembed(store, "narrow")["switched"]
    assert marker_of(store) == afterwards.replace("{}", "GENAI_OPTIONS=")
    assert store.execute("SELECT embed_model_id FROM ml_rag.discover()").fetchall() == [("narrow",)]
    # the documents have not changed, only their model
    assert (store.execute(loaded).fetchone() or ({},))[0]["unchanged"] == 1


def test_there_and_back_again(store: Connection) -> None:
    for model in ("narrow", "other", "fake-embed"):
        reembed(store, model)
        assert_embedded(store, model)
    assert marker_of(store) == "GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,REEMBEDDED_FROM=other,REEMBEDDED_FROM=narrow"


def test_the_model_it_has_already(store: Connection, models: ModelsServer) -> None:
    notices: list[str] = []
    store.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    result = reembed(store, "fake-embed")
    assert (result["segments"], result["switched"]) == (0, False)
    assert notices == ['"docs" holds vectors of fake-embed already']
    assert models.requests == []
    assert columns(store)[-1] == "segment_embedding"


def test_a_table_without_rows(owner: Connection, models: ModelsServer) -> None:
    create_store(owner, type="vector(16)")
    assert reembed(owner, "narrow")["switched"] is True
    assert owner.execute(
        "SELECT atttypmod FROM pg_attribute WHERE attrelid = 'docs'::regclass AND attname ~ '^segment_e'"
    ).fetchone() == (8,)


def test_column_privileges_are_kept(db: Database, store: Connection) -> None:
    store.execute("REVOKE ALL ON docs FROM ml_rag_user")
    store.execute("GRANT SELECT (segment, segment_embedding) ON docs TO ml_rag_user WITH GRANT OPTION")
    before = definition(store)
    reembed(store, "narrow")
    assert definition(store) == before
    assert names(db.connect("asker"), embed_model_id="narrow") == ["public.docs"]


# -- what happens meanwhile --------------------------------------------------------------------------------------------


def test_it_follows_every_change_of_the_table(db: Database, store: Connection, models: ModelsServer) -> None:
    writer = db.connect()
    store.execute("SELECT ml_rag.enable_keyword_search('docs')")

    def change() -> None:
        writer.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")  # embedded already
        writer.execute("UPDATE docs SET segment = 'blue lake' WHERE document_id = 3")  # being embedded
        writer.execute("UPDATE docs SET segment = 'brown bear' WHERE document_id = 7")  # to be embedded
        writer.execute("UPDATE docs SET metadata = '{}' WHERE document_id = 2")
        writer.execute("DELETE FROM docs WHERE document_id IN (4, 5)")
        for i, text in enumerate(("new one", "new two", "new three"), 10):
            writer.execute("INSERT INTO docs VALUES ('new', '{}', %s, 1, %s, %s)", (i, text, fake_embedding(text)))

    # request 0 is the probe of the dimensions; one row to a batch
    models.before = {3: change}
    reembed(store, "narrow", batch_size=1)
    assert_embedded(store, "narrow")
    assert set(vectors(store)) == {
        *("red hut", "green tree", "blue lake", "black cat", "brown bear", "new one", "new two", "new three"),
    }
    # once each
    assert {text for text in vectors(store) if models.embedded("narrow").count(text) != 1} == set()
    assert_exact(store, "bear lake new hut")


def test_rows_that_others_are_changing_are_not_waited_for(
    db: Database, store: Connection, models: ModelsServer
) -> None:
    """So nobody who changes many rows gets into a deadlock with it."""
    writer = db.connect(autocommit=False)
    # request 0 is the probe of the dimensions
    models.before = {1: lambda: writer.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")}
    assert reembed(store, "narrow", switch=False)["segments"] == 6
    writer.commit()
    assert reembed(store, "narrow")["segments"] == 1
    assert_embedded(store, "narrow")


def test_searches_and_loads_use_the_old_model_until_the_switch(
    db: Database, store: Connection, models: ModelsServer
) -> None:
    other = db.connect()
    seen: list[Any] = []

    def use() -> None:
        seen.append(search(other, "green tree", {"n_citations": 1})[0][5])
        seen.append(names(other))
        other.execute("SELECT ml_rag.load_document('docs', 'fresh', 'fresh fish')")
        seen.append(search(other, "fresh fish", {"n_citations": 1})[0][5:7])

    models.before = {2: use}
    reembed(store, "narrow", batch_size=2)
    assert seen == ["green tree", ["public.docs"], ("fresh fish", 0)]
    assert_embedded(store, "narrow")
    other.execute("SELECT ml_rag.load_document('docs', 'later', 'late frost')")
    assert_embedded(store, "narrow")


def test_a_call_that_is_cancelled_goes_on_where_it_was(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    models.before = {4: lambda: other.execute("SELECT pg_cancel_backend(%s)", (store.info.backend_pid,))}
    with error("57014", ours=False):
        reembed(store, "narrow", batch_size=1)
    assert columns(store)[-1] == "segment_embedding_next"
    done = [v for v in vectors(store, column="segment_embedding_next").values() if v is not None]
    assert len(done) == 3
    # the old vectors are in use, and what changes is followed though nobody is at it
    assert search(store, "green tree", {"n_citations": 1})[0][6] == 0
    store.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    models.requests.clear()
    result = reembed(store, "narrow")
    assert result["segments"] == 5
    assert len(models.embedded("narrow")) == 5
    assert_embedded(store, "narrow")


def test_a_backend_that_is_killed_leaves_no_lock_behind(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    models.before = {4: lambda: other.execute("SELECT pg_terminate_backend(%s)", (store.info.backend_pid,))}
    with pytest.raises(psycopg.OperationalError):
        reembed(store, "narrow", batch_size=1)
    assert reembed(other, "narrow")["segments"] == 4
    assert_embedded(other, "narrow")


def test_the_model_server_goes_and_comes_back(store: Connection, models: ModelsServer) -> None:
    def fail() -> None:
        raise OSError

    models.before = {3: fail}
    with error("08006"):
        reembed(store, "narrow", batch_size=1)
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    assert store.execute(held).fetchone() == (0,)
    assert reembed(store, "narrow")["segments"] == 5
    assert_embedded(store, "narrow")


def test_another_model_must_wait_until_the_first_is_abandoned(store: Connection) -> None:
    reembed(store, "narrow", switch=False)
    with error("55000", "Column segment_embedding_next is filled with vectors of narrow"):
        reembed(store, "other")
    with error("55000", "is being re-embedded with another model"):
        reembed(store, "fake-embed")
    assert store.execute("SELECT ml_rag.abandon_reembed('docs')").fetchone() == (True,)
    assert store.execute("SELECT ml_rag.abandon_reembed('docs')").fetchone() == (False,)
    assert columns(store)[-1] == "segment_embedding"
    assert triggers(store) == []
    assert_embedded(store, "fake-embed")
    reembed(store, "other")
    assert_embedded(store, "other")


def test_without_its_trigger_it_begins_anew(store: Connection) -> None:
    for forget in ("DISABLE TRIGGER USER", "ENABLE TRIGGER USER"):
        reembed(store, "narrow", switch=False)
        store.execute(f"ALTER TABLE docs {forget}")
        store.execute("UPDATE docs SET segment = segment || 's'")
    reembed(store, "narrow")
    assert_embedded(store, "narrow")


def test_progress_is_shown(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    seen: list[Any] = []
    statement = "SELECT command, relation, phase, done, failed FROM ml_rag.progress WHERE pid = %s"
    models.always = lambda _: seen.extend(other.execute(statement, (store.info.backend_pid,)))
    store.execute("ANALYZE docs")
    reembed(store, "narrow", batch_size=3)
    # the last time is before the third batch
    assert seen == [("ml_rag.reembed", "public.docs", "embedding", done, 0) for done in (0, 3, 6)]
    assert other.execute("SELECT count(*) FROM ml_rag.progress").fetchone() == (0,)


def test_rows_without_text_have_no_embedding(store: Connection) -> None:
    store.execute("INSERT INTO docs VALUES ('blank', '{}', 20, 1, ' ', %s)", (fake_embedding("blank"),))
    result = reembed(store, "narrow")
    assert (result["failed"], result["switched"]) == (1, False)
    assert "ALTER COLUMN segment_embedding DROP NOT NULL" in result["first_error"]
    store.execute("ALTER TABLE docs ALTER COLUMN segment_embedding DROP NOT NULL")
    assert reembed(store, "narrow")["switched"] is True
    assert store.execute("SELECT segment FROM docs WHERE segment_embedding IS NULL").fetchall() == [(" ",)]
