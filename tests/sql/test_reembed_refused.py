"""store/reembed: who may re-embed a store, and what cannot be re-embedded."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import sql
from test_reembed import assert_embedded, columns, definition, reembed, store

from support.cluster import Connection, Database
from support.models_server import ModelsServer, models
from support.stores import error, search

__all__ = ["models", "store"]


def test_the_owner_of_the_table_calls_it(db: Database, store: Connection) -> None:
    asker = db.connect("asker")
    store.execute("GRANT ALL ON docs TO PUBLIC")
    for statement in ("CALL ml_rag.reembed('docs', 'narrow')", "SELECT ml_rag.abandon_reembed('docs')"):
        with error("42501", "must be owner"):
            asker.execute(statement)
    store.execute(sql.SQL("ALTER TABLE docs OWNER TO {}").format(sql.Identifier(db.role("asker"))))
    with error("42501", ours=False):  # the new index needs CREATE in the schema
        reembed(asker, "narrow")
    store.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    assert reembed(asker, "narrow")["switched"] is True
    assert_embedded(store, "narrow")


def test_row_level_security_of_others_is_untouched(db: Database, store: Connection) -> None:
    store.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    store.execute("CREATE POLICY two ON docs USING (document_id < 3)")
    reembed(store, "narrow")
    assert_embedded(store, "narrow")
    asker = db.connect("asker")
    assert len(search(asker, "q", {"embed_model_id": "narrow", "n_citations": 10})) == 2
    store.execute("GRANT CREATE ON SCHEMA public TO PUBLIC; ALTER TABLE docs FORCE ROW LEVEL SECURITY")
    store.execute(sql.SQL("ALTER TABLE docs OWNER TO {}").format(sql.Identifier(db.role("asker"))))
    with error("55000", "Row-level security hides rows of it from its owner"):
        reembed(asker, "other")


@pytest.mark.parametrize(
    ("setup", "state", "detail"),
    [
        ("CREATE VIEW v AS SELECT segment_embedding FROM docs", "2BP01", "view v"),
        ("CREATE INDEX ON docs USING hnsw ((segment_embedding::halfvec(16)) halfvec_l2_ops)", "2BP01", "index docs"),
        ("ALTER TABLE docs ADD CHECK (vector_dims(segment_embedding) = 16)", "2BP01", "constraint"),
        (
            "ALTER TABLE docs ADD norm float8 GENERATED ALWAYS AS (vector_norm(segment_embedding)) STORED",
            "2BP01",
            "norm",
        ),
        (
            "ALTER TABLE docs ALTER segment_embedding SET DEFAULT '[1,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]'",
            "2BP01",
            "default",
        ),
        ("CREATE TABLE c () INHERITS (docs)", "55000", "inheritance"),
        ("COMMENT ON COLUMN docs.segment_embedding IS NULL", "22023", ""),
        ("ALTER TABLE docs ADD segment_embedding_next integer", "42701", ""),
        ("ALTER TABLE docs RENAME segment TO body", "22023", "segment text"),
    ],
)
def test_what_it_cannot_do_it_says_before_anything_is_changed(
    store: Connection, models: ModelsServer, setup: str, state: str, detail: str
) -> None:
    store.execute(setup)
    before = definition(store)
    with error(state) as caught:
        reembed(store, "narrow")
    assert detail in caught.detail
    assert definition(store) == before
    assert [texts for _, texts in models.requests] in ([], [["dimensions"]])


@pytest.mark.parametrize(
    ("make", "state"),
    [
        ("CREATE VIEW other AS SELECT * FROM docs", "55000"),
        ("CREATE MATERIALIZED VIEW other AS SELECT * FROM docs", "55000"),
        ("CREATE TABLE other (segment text, segment_embedding vector(16)) PARTITION BY HASH (segment)", "55000"),
        (
            "CREATE TABLE other (x text, segment text GENERATED ALWAYS AS (x) STORED, segment_embedding vector(16))",
            "55000",
        ),
    ],
)
def test_other_kinds_of_relations(store: Connection, make: str, state: str) -> None:
    store.execute(make)
    with error(state, "cannot be re-embedded"):
        reembed(store, "narrow", "other")


def test_not_inside_a_transaction(store: Connection) -> None:
    with error("25001"), store.transaction():
        reembed(store, "narrow")
    assert columns(store)[-1] == "segment_embedding"


@pytest.mark.parametrize("model", ["", "a b", "a,b", "a;b", None])
def test_model_ids_that_cannot_be_a_marker(store: Connection, model: Any) -> None:
    with error("22023", "model id"):
        reembed(store, model)


def test_bad_arguments(store: Connection) -> None:
    with error("42P01"):
        store.execute("CALL ml_rag.reembed(NULL, 'narrow')")
    with error("22023", "batch_size"):
        reembed(store, "narrow", batch_size=0)
    with error("22023", "unknown option"):
        reembed(store, "narrow", speed=9)
