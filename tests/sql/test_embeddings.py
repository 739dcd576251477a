"""store/embeddings, store/follow: several embeddings of the texts of a store: what follows, what is searched."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
from psycopg import sql

from support.cluster import Connection, Database, noticed
from support.embeddings import (
    INSERT,
    TEXTS,
    add,
    assert_embedded,
    columns,
    comment_on,
    default,
    definition,
    drop,
    listed,
    rows,
    store,
    triggers,
    use,
    vectors,
)
from support.keywords import assert_exact
from support.models_server import ModelsServer, embedding
from support.stores import answer, as_text, create_store, error, fake_embedding, mark, names, search, warnings_of

__all__ = ["store"]


@pytest.mark.parametrize("model", ["narrow", "other"])
def test_every_row_gets_an_embedding_of_the_new_model(store: Connection, models: ModelsServer, model: str) -> None:
    result = add(store, "more", model, batch_size=3)
    assert result.pop("seconds") >= 0
    assert result == {
        "vector_store": "public.docs",
        "embedding": "more",
        "embed_model_id": model,
        "segments": 7,
        "failed": 0,
        "first_error": None,
        "pending": 0,
    }
    assert_embedded(store, model)
    assert_embedded(store, "fake-embed", column="segment_embedding")
    assert sorted(models.embedded(model)) == sorted(TEXTS)
    assert max(len(texts) for asked, texts in models.requests if asked == model) == 3
    assert comment_on(store, column="segment_embedding_more") == f"GENAI_OPTIONS=EMBED_MODEL_ID={model},EMBEDDING=more"


def test_the_list_of_embeddings(store: Connection) -> None:
    assert listed(store) == {
        "fake-embed": {
            "column_name": "segment_embedding",
            "embed_model_id": "fake-embed",
            "type": "vector",
            "dimensions": 16,
            "indexes": ["docs_segment_embedding_idx"],
            "segments": 7,
            "pending": 0,
            "is_default": True,
        }
    }
    add(store, type="halfvec", index={"type": "none"})
    store.execute(INSERT, (30, "late frost"))
    store.execute(INSERT, (31, " "))
    found = listed(store)
    assert list(found) == ["fake-embed", "more"]
    assert (found["fake-embed"]["segments"], found["fake-embed"]["pending"]) == (7, 1)
    assert found["more"] == {
        "column_name": "segment_embedding_more",
        "embed_model_id": "narrow",
        "type": "halfvec",
        "dimensions": 8,
        "indexes": [],
        "segments": 7,
        "pending": 1,
        "is_default": False,
    }


def test_the_list_shows_what_the_caller_may_read(db: Database, store: Connection) -> None:
    add(store)
    asker, stranger = db.connect("asker"), db.connect("stranger")
    assert list(listed(asker)) == ["fake-embed", "more"]
    store.execute(
        "REVOKE ALL ON docs FROM ml_rag_user; GRANT SELECT (segment, segment_embedding) ON docs TO ml_rag_user"
    )
    assert list(listed(asker)) == ["fake-embed"]
    store.execute("REVOKE ALL (segment, segment_embedding) ON docs FROM ml_rag_user")
    assert listed(asker) == {}
    with error("42501", ours=False):
        listed(stranger)


def test_the_list_counts_the_rows_that_the_caller_sees(db: Database, store: Connection) -> None:
    add(store)
    store.execute("UPDATE docs SET segment = segment || 's' WHERE document_id IN (1, 7)")
    store.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY two ON docs USING (document_id < 3)")
    found = listed(db.connect("asker"))["more"]
    assert (found["segments"], found["pending"]) == (1, 1)


# -- the default one ---------------------------------------------------------------------------------------------------


def test_another_default(db: Database, store: Connection) -> None:
    asker = db.connect("asker")
    add(store)
    assert names(asker, embed_model_id="fake-embed") == ["public.docs"]
    assert names(asker) == ["public.docs"]
    assert use(store, "more") == "fake-embed"
    assert search(asker, "green tree", {"vector_store": ["docs"], "n_citations": 1})[0][5:7] == ("green tree", 0)
    with error("P0002", "no vector store found"):
        search(asker, "green tree")  # calls that name neither are for the default model
    found = search(asker, "green tree", {"embed_model_id": "narrow", "n_citations": 1})
    assert found[0][5:7] == ("green tree", 0)
    assert default(store) == "more"
    # and the former one is there for whoever names its column
    mapped = {"vector_store_columns": {"segment_embedding": "segment_embedding"}, "n_citations": 1}
    assert search(asker, "blue sea", mapped)[0][5:7] == ("blue sea", 0)
    assert use(store, "fake-embed") == "more"
    assert search(asker, "blue sea", {"n_citations": 1})[0][5:7] == ("blue sea", 0)
    assert use(store, "fake-embed") == "fake-embed"
    for column, name in (("segment_embedding", "fake-embed"), ("segment_embedding_more", "more")):
        assert str(comment_on(store, column=column)).endswith(f",EMBEDDING={name}")


def test_the_callers_are_told_when_the_default_model_is_another(store: Connection) -> None:
    add(store)
    notices = noticed(store, lambda notice: f"{notice.message_primary} {notice.message_hint}")
    use(store, "more")
    assert any("configure('embed_model_id', 'narrow')" in notice for notice in notices)
    notices.clear()
    use(store, "fake-embed")
    assert notices == []


def test_a_store_changes_its_model_for_good(store: Connection, models: ModelsServer) -> None:
    add(store)
    with error("55000", 'embedding "fake-embed" is the default one of "public.docs"', "use_embedding"):
        drop(store, "fake-embed")
    use(store, "more")
    drop(store, "fake-embed")
    assert "segment_embedding" not in columns(store)
    assert triggers(store) == []
    assert list(listed(store)) == ["more"]
    assert names(store, embed_model_id="narrow") == ["public.docs"]
    store.execute("SELECT ml_rag.load_document('docs', 'fresh', 'fresh fish')")
    assert_embedded(store)
    store.execute("SELECT ml_rag.index_store('docs')")
    assert listed(store)["more"]["indexes"] == ["docs_segment_embedding_more_idx"]


def test_a_node_group_is_searched_with_the_model_that_made_it(store: Connection, models: ModelsServer) -> None:
    store.execute(
        "CREATE FUNCTION public.words(t text) RETURNS SETOF text LANGUAGE sql"
        " AS 'SELECT regexp_split_to_table(t, '' '')'"
    )
    store.execute("CALL ml_rag.create_node_group('docs', 'words', '{\"transform\": \"public.words\"}')")
    add(store, "more", "narrow")
    with warnings_of(store) as told:
        use(store, "more")
    assert [message for severity, _, message in told if severity == "WARNING"] == []
    asked = {"vector_store": ["docs"], "arms": [{"search": "semantic", "in": "words"}], "skip_generate": True}
    asked |= {"citation_fields": ["node", "node_distance", "score"], "n_citations": 1}
    models.requests.clear()
    (citation,) = answer(store, "tree", asked)["citations"]
    assert sorted(models.requests) == [("fake-embed", ["tree"]), ("narrow", ["tree"])]
    assert (citation["segment"], citation["node"]) == ("green tree", "tree")
    assert citation["score"] == pytest.approx(0)
    # distances of two models cannot be compared: thresholds look at that of the store's default embedding
    far = 1 - sum(a * b for a, b in zip(embedding("tree", "narrow"), embedding("green tree", "narrow"), strict=True))
    assert (citation["distance"], citation["node_distance"]) == (pytest.approx(far, abs=1e-4), None)
    # a group that is made now is of the new model, and both are searched in one call
    store.execute("CALL ml_rag.create_node_group('docs', 'new', '{\"transform\": \"public.words\"}')")
    both = [{"search": "semantic", "in": "words"}, {"search": "semantic", "in": "new"}]
    assert answer(store, "tree", {**asked, "arms": both})["citations"][0]["node"] == "tree"


# -- several in one search ---------------------------------------------------------------------------------------------


def nearest(query: str, model: str) -> list[str]:
    """The texts, nearest first."""
    vector = embedding(query, model)

    def distance(text: str) -> float:
        return round(1 - sum(a * b for a, b in zip(vector, embedding(text, model), strict=True)), 4)

    return sorted(TEXTS, key=lambda text: (distance(text), TEXTS.index(text)))


@pytest.mark.parametrize("type", ["vector", "halfvec"])
@pytest.mark.parametrize("model", ["narrow", "other"])
def test_an_arm_searches_the_embedding_that_it_names(
    store: Connection, models: ModelsServer, model: str, type: str
) -> None:
    add(store, "further-one", model, type=type)
    models.requests.clear()
    for also in ({}, {"filters": {"document_id": {"gt": 0}}}, {"index_options": {"exact": True}}, {"explain": True}):
        arms = [{"search": "semantic", "embedding": "further-one"}]
        hits = search(store, "red dog", {"arms": arms, "n_citations": 7, **also})
        assert [row[5] for row in hits] == nearest("red dog", model)
    assert [row[6] for row in hits] == [
        round(
            Decimal(1 - sum(a * b for a, b in zip(fake_embedding("red dog"), fake_embedding(row[5]), strict=True))), 4
        )
        for row in hits
    ]
    assert sorted(models.requests[:2]) == sorted([("fake-embed", ["red dog"]), (model, ["red dog"])])
    # its limit is one of its own distances
    arms = [{"search": "semantic", "embedding": "further-one", "max_distance": 0.05, "query": {"text": TEXTS[2]}}]
    assert [row[5] for row in search(store, "red dog", {"arms": arms})] == [TEXTS[2]]


def test_two_embeddings_are_fused(store: Connection) -> None:
    add(store, "more", "other")
    arms: list[Any] = [
        {"search": "semantic", "weight": 0.3},
        {"search": "semantic", "embedding": "more", "weight": 0.7},
    ]
    hits = search(store, "red dog", {"arms": arms, "n_citations": 7})
    near, further = dict(similarities("red dog", "fake-embed")), dict(similarities("red dog", "other"))
    best, low = max(further.values()), min(further.values())
    for row in hits:
        share = (further[row[5]] - low) / (best - low)
        assert row[9] == pytest.approx(0.3 * near[row[5]] / max(near.values()) + 0.7 * share, abs=1e-3)
    assert [row[9] for row in hits] == sorted((row[9] for row in hits), reverse=True)
    for how in ({}, {"hybrid_options": {"fusion": "rrf"}}):
        plain = [{k: v for k, v in arm.items() if k != "weight"} for arm in arms]
        assert len(search(store, "red dog", {"arms": plain, "n_citations": 7, **how})) == 7


def similarities(query: str, model: str) -> list[tuple[str, float]]:
    vector = embedding(query, model)
    return [(text, max(0.0, sum(a * b for a, b in zip(vector, embedding(text, model), strict=True)))) for text in TEXTS]


def test_stores_whose_embedding_of_a_name_is_of_other_models(store: Connection, models: ModelsServer) -> None:
    add(store, "more", "narrow")
    create_store(store, "docs2", rows(TEXTS), type="vector(16)")
    add(store, "more", "other", store="docs2")
    models.requests.clear()
    hits = search(store, "red dog", {"arms": [{"search": "semantic", "embedding": "more"}], "n_citations": 14})
    for name, model in (("public.docs", "narrow"), ("public.docs2", "other")):
        assert [row[5] for row in hits if row[1] == name] == nearest("red dog", model)
    assert sorted(models.requests) == [(model, ["red dog"]) for model in ("fake-embed", "narrow", "other")]


def test_a_store_without_the_embedding_is_left_out(store: Connection) -> None:
    arms = {"arms": [{"search": "semantic", "embedding": "more"}], "n_citations": 20}
    with error("55000", 'no vector store has an embedding "more" to search', "ml_rag.add_embedding"):
        search(store, "red dog", arms)
    create_store(store, "docs2", rows(TEXTS), type="vector(16)")
    add(store, "more", "narrow")
    with warnings_of(store) as told:
        hits = search(store, "red dog", arms)
    assert {row[1] for row in hits} == {"public.docs"}
    assert told == [("WARNING", "01000", '1 vector stores have no embedding "more" to search; left out')]


def test_a_model_that_is_named_searches_the_embedding_of_it(db: Database, store: Connection) -> None:
    asker = db.connect("asker")
    add(store, "more", "narrow")
    for given in ({}, {"vector_store": ["docs"]}, {"vector_store": ["public.docs"]}):
        hits = search(asker, "red dog", {"embed_model_id": "narrow", "n_citations": 7, **given})
        assert [row[5] for row in hits] == nearest("red dog", "narrow")
        vector = embedding("red dog", "narrow")
        assert float(hits[0][6]) == pytest.approx(
            1 - sum(a * b for a, b in zip(vector, embedding(hits[0][5], "narrow"), strict=True)), abs=1e-4
        )
    assert names(asker, embed_model_id="narrow") == ["public.docs"]
    assert names(asker, embed_model_id="other") == []
    with error("P0002", "no vector store found") as caught:
        search(asker, "red dog", {"embed_model_id": "other"})
    assert "It holds vectors of models fake-embed, narrow, and the call is for other" in caught.detail
    assert 'Leave "embed_model_id" out' in caught.hint
    # one that the caller may not read is none
    store.execute("REVOKE SELECT ON docs FROM ml_rag_user")
    store.execute(
        "GRANT SELECT (document_name, document_id, segment_number, segment, metadata, segment_embedding)"
        " ON docs TO ml_rag_user"
    )
    assert names(asker, embed_model_id="narrow") == []
    with error("55000", "no vector store has an embedding"):
        search(asker, "red dog", {"arms": [{"search": "semantic", "embedding": "more"}]})


def test_a_former_default_model_is_searched_where_it_is_named(db: Database, store: Connection) -> None:
    asker = db.connect("asker")
    add(store, "more", "narrow")
    use(store, "more")
    for given in ({}, {"vector_store": ["docs"]}):
        hits = search(asker, "red dog", {"embed_model_id": "fake-embed", "n_citations": 7, **given})
        assert [row[5] for row in hits] == nearest("red dog", "fake-embed")
    with error("P0002", "no vector store found") as caught:
        search(asker, "red dog", {"embed_model_id": "other"})
    assert "It holds vectors of models narrow, fake-embed, and the call is for other" in caught.detail


def test_a_vector_of_other_dimensions_than_the_embedding_has(store: Connection) -> None:
    add(store, "more", "narrow")
    arm = {"search": "semantic", "embedding": "more", "query_embedding": [1] * 16}
    with error("22000", "dimensions") as caught:
        search(store, "q", {"vector_store": ["docs"], "arms": [arm]})
    assert {"8", "16"} <= set(re.findall("[0-9]+", caught.detail))
    arm["query_embedding"] = embedding("red dog", "narrow")
    assert [row[5] for row in search(store, "q", {"arms": [arm], "n_citations": 7})] == nearest("red dog", "narrow")


def test_rows_without_the_embedding_stop_the_switch(store: Connection) -> None:
    add(store)
    store.execute(INSERT, (30, "late frost"))
    with error(
        "55000", '1 rows of "public.docs" have no embedding "more"', "CALL ml_rag.add_embedding('public.docs', 'more')"
    ):
        use(store, "more")
    assert default(store) == "fake-embed"
    store.execute("SELECT ml_rag.use_embedding('docs', 'more', allow_pending => true)")
    assert default(store) == "more"
    assert add(store, model=None)["segments"] == 1
    assert_embedded(store)


def test_a_name_that_is_none(store: Connection) -> None:
    for call in (use, drop):
        with error("42704", '"public.docs" has no embedding "nothing"', "It has: fake-embed."):
            call(store, "nothing")


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a;b", "a\nb", "x" * 41, None])
def test_names_that_cannot_stand_in_a_marker(store: Connection, name: Any) -> None:
    with error("22023", "invalid name of an embedding"):
        add(store, name)


def test_names_that_need_quotes(store: Connection) -> None:
    name = """É"'\\%s$1"""
    add(store, name)
    assert_embedded(store, column=f"segment_embedding_{name}")
    use(store, name)
    store.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    assert listed(store)[name]["pending"] == 1
    add(store, "fake-embed", None)
    use(store, "fake-embed")
    drop(store, name)
    assert columns(store)[-1] == "segment_embedding"


def test_dropping_leaves_nothing_behind(store: Connection) -> None:
    before = definition(store)
    add(store, "one")
    add(store, "two", "other")
    drop(store, "one")
    assert triggers(store) == ["~ml_rag_segment_embedding", "~ml_rag_segment_embedding_two"]
    drop(store, "two")
    assert triggers(store) == []
    # but that a row can be without an embedding
    store.execute("ALTER TABLE docs ALTER segment_embedding SET NOT NULL")
    assert definition(store) == before


# -- a column and its index --------------------------------------------------------------------------------------------


def index_of(connection: Connection, name: str = "more") -> list[str]:
    (indexes,) = [one["indexes"] for key, one in listed(connection).items() if key == name]
    statement = "SELECT regexp_replace(pg_get_indexdef(%s::regclass), '.* USING ', '')"
    return [(connection.execute(statement, (index,)).fetchone() or ("",))[0] for index in indexes]


@pytest.mark.parametrize(
    ("options", "index"),
    [
        ({}, ["hnsw (segment_embedding_more vector_cosine_ops)"]),
        ({"type": "halfvec", "distance_metric": "dot"}, ["hnsw (segment_embedding_more halfvec_ip_ops)"]),
        ({"index": {"type": "none"}}, []),
        (
            {"index": {"m": 5, "ef_construction": 20}, "distance_metric": "MANHATTAN"},
            ["hnsw (segment_embedding_more vector_l1_ops) WITH (ef_construction='20', m='5')"],
        ),
        (
            {"index": {"type": "IVFFLAT", "lists": 2}, "distance_metric": "euclidean"},
            ["ivfflat (segment_embedding_more) WITH (lists='2')"],
        ),
    ],
)
def test_the_index(store: Connection, options: dict[str, Any], index: list[str]) -> None:
    add(store, **options)
    assert index_of(store) == index
    # called again it finds it there, and nobody who has one gets another unasked
    add(store, **options)
    if index:
        add(store)
    assert index_of(store) == index


def test_an_index_that_was_built_by_hand_is_taken(store: Connection) -> None:
    add(store, index={"type": "none"})
    store.execute("CREATE INDEX CONCURRENTLY by_hand ON docs USING hnsw (segment_embedding_more vector_cosine_ops)")
    add(store)
    assert listed(store)["more"]["indexes"] == ["by_hand"]


@pytest.mark.parametrize(
    ("options", "state", "word"),
    [
        ({"index": {"quantization": "binary"}, "distance_metric": "EUCLIDEAN"}, "22023", "quantization"),
        ({"index": {"lists": 5}}, "22023", '"lists"'),
        ({"index": {"type": "ivfflat", "m": 5}}, "22023", '"m"'),
        ({"index": {"type": "none", "lists": 5}}, "22023", '"lists"'),
        ({"index": {"ef_construction": 31}}, "22023", "twice"),
        ({"index": {"type": "ivfflat"}, "distance_metric": "MANHATTAN"}, "22023", "a metric of ivfflat"),
        ({"batch_size": 0}, "22023", "batch_size"),
    ],
)
def test_options_that_are_refused(
    store: Connection, models: ModelsServer, options: dict[str, Any], state: str, word: str
) -> None:
    with error(state, word):
        add(store, **options)
    assert columns(store)[-1] == "segment_embedding"
    assert models.requests == []


def test_a_model_of_more_dimensions_than_an_index_can_have(store: Connection) -> None:
    notices = noticed(store)
    add(store, "more", "wide")
    assert notices == ['embedding "more" of "public.docs" gets no index']
    assert_embedded(store, "wide")
    assert listed(store)["more"]["indexes"] == []


def test_the_type_is_that_of_the_default_one(owner: Connection, models: ModelsServer) -> None:
    create_store(owner, rows=rows(TEXTS), type="halfvec(16)")
    add(owner)
    assert listed(owner)["more"]["type"] == "halfvec"
    assert vectors(owner, column="segment_embedding_more")["blue sea"] == pytest.approx(
        embedding("blue sea", "narrow"), abs=1e-3
    )


def test_whoever_may_read_the_default_one_may_read_the_new_one(db: Database, store: Connection) -> None:
    store.execute("ALTER TABLE docs ALTER segment_embedding SET STORAGE MAIN; REVOKE ALL ON docs FROM ml_rag_user")
    store.execute("GRANT SELECT (segment, segment_embedding) ON docs TO ml_rag_user WITH GRANT OPTION")
    add(store)
    found = {row[0]: row for row in definition(store)}
    assert found["segment_embedding_more"][1:] == found["segment_embedding"][1:]
    use(store, "more")
    assert names(db.connect("asker"), embed_model_id="narrow") == ["public.docs"]


def test_columns_of_other_names(db: Database, owner: Connection, models: ModelsServer) -> None:
    owner.execute('CREATE TABLE "My Texts" (id integer PRIMARY KEY, "The Text" varchar(80), "E 1" vector(16))')
    comment = "kept GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed;X=1 kept too"
    owner.execute(sql.SQL('COMMENT ON COLUMN "My Texts"."E 1" IS {}').format(sql.Literal(comment)))
    owner.execute('INSERT INTO "My Texts" SELECT i, %s || i, NULL FROM generate_series(1, 5) AS i', ("word",))
    mapped = {"segment": "The Text", "segment_embedding": "E 1"}
    with error("22023", "Columns missing or of another type: segment text, segment_embedding vector"):
        add(owner, store='"My Texts"')
    add(owner, store='"My Texts"', vector_store_columns=mapped)
    for text, vector in owner.execute('SELECT "The Text", segment_embedding_more::real[] FROM "My Texts"'):
        assert vector == pytest.approx(embedding(text, "narrow"), abs=1e-6)
    assert comment_on(owner, '"My Texts"', "E 1") == (
        "kept GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,X=1,EMBEDDING=fake-embed,DEFAULT=true kept too"
    )
    # from then on the table itself says what is what
    assert listed(owner, '"My Texts"')["fake-embed"]["pending"] == 5
    assert add(owner, "fake-embed", None, '"My Texts"')["segments"] == 5
    assert use(owner, "more", '"My Texts"') == "fake-embed"
    owner.execute('UPDATE "My Texts" SET "The Text" = %s WHERE id = 1', ("new",))
    assert listed(owner, '"My Texts"')["more"]["pending"] == 1
    assert add(owner, "more", None, '"My Texts"')["segments"] == 1
    assert names(owner, None, None, None, {"segment": "The Text"}, "narrow") == ["public.My Texts"]


def test_a_column_that_others_have_marked_is_none_of_the_store(store: Connection) -> None:
    """``ml_embed_table`` marks columns, and of what text they are nobody knows."""
    store.execute("ALTER TABLE docs ADD title vector(16)")
    mark(store, "docs", column="title")
    assert list(listed(store)) == ["fake-embed"]
    store.execute("SELECT ml_rag.load_document('docs', 'fresh', 'fresh fish')")
    assert vectors(store, column="title")["fresh fish"] is None


def test_a_name_by_hand(store: Connection) -> None:
    store.execute("ALTER TABLE docs ADD e vector(16)")
    mark(store, "docs", "GENAI_OPTIONS=EMBEDDING=mine,EMBED_MODEL_ID=other", "e")
    assert list(listed(store)) == ["fake-embed", "mine"]
    assert add(store, "mine", None)["segments"] == 7
    assert_embedded(store, "other", column="e")
    use(store, "mine")
    assert comment_on(store, column="e") == "GENAI_OPTIONS=EMBED_MODEL_ID=other,EMBEDDING=mine,DEFAULT=true"


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
            writer.execute(INSERT, (i, text))

    # request 0 is the probe of the dimensions; one row to a batch
    models.before = {3: change}
    add(store, batch_size=1)
    assert_embedded(store)
    assert set(vectors(store)) == {
        *("red hut", "green tree", "blue lake", "black cat", "brown bear", "new one", "new two", "new three"),
    }
    # once each
    assert {text for text in vectors(store) if models.embedded("narrow").count(text) != 1} == set()
    assert_exact(store, "bear lake new hut")


def test_no_lock_is_held_while_a_model_is_asked(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    done: list[str] = []

    def lock_the_table(texts: list[str]) -> None:
        with other.transaction():
            other.execute("LOCK TABLE docs IN ACCESS EXCLUSIVE MODE NOWAIT")
        done.extend(texts)

    models.always = lock_the_table
    add(store, batch_size=3)
    assert sorted(done) == sorted(["dimensions", *TEXTS])
    assert_embedded(store)


def test_rows_that_others_are_changing_are_not_waited_for(
    db: Database, store: Connection, models: ModelsServer
) -> None:
    """So nobody who changes many rows gets into a deadlock with it."""
    writer = db.connect(autocommit=False)
    # request 0 is the probe of the dimensions
    models.before = {1: lambda: writer.execute("UPDATE docs SET metadata = '{}' WHERE document_id = 1")}
    result = add(store, index={"type": "none"})
    assert (result["segments"], result["pending"]) == (6, 1)
    writer.commit()
    result = add(store, index={"type": "none"})
    assert (result["segments"], result["pending"]) == (1, 0)
    assert_embedded(store)


def test_searches_and_loads_go_on_meanwhile(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    seen: list[Any] = []

    def use_it() -> None:
        seen.append(search(other, "green tree", {"n_citations": 1})[0][5])
        seen.append(names(other))
        other.execute("SELECT ml_rag.load_document('docs', 'fresh', 'fresh fish')")
        seen.append(search(other, "fresh fish", {"n_citations": 1})[0][5:7])

    models.before = {2: use_it}
    add(store, batch_size=2)
    assert seen == ["green tree", ["public.docs"], ("fresh fish", 0)]
    assert_embedded(store)


def test_a_text_that_changes_loses_the_embeddings_that_do_not_change_with_it(store: Connection) -> None:
    add(store)
    new = fake_embedding("red hut")
    store.execute("UPDATE docs SET segment = 'red hut', segment_embedding = %s WHERE document_id = 1", (as_text(new),))
    store.execute("UPDATE docs SET metadata = '{}', segment = segment WHERE document_id = 2")
    store.execute("UPDATE docs SET segment = 'blue lake' WHERE document_id = 3")
    found = vectors(store)
    assert found["red hut"] == pytest.approx(new)
    assert found["green tree"] is not None
    assert found["blue lake"] is None
    further = vectors(store, column="segment_embedding_more")
    assert {text for text, vector in further.items() if vector is None} == {"red hut", "blue lake"}
    # a stale vector is found by nobody; either embedding is filled when its name is called
    assert [row[5] for row in search(store, "blue sea", {"n_citations": 10})].count("blue lake") == 0
    assert add(store, "fake-embed", None)["segments"] == 1
    assert add(store)["segments"] == 2
    assert_embedded(store)
    assert_embedded(store, "fake-embed", column="segment_embedding")


def test_a_store_of_one_embedding_is_left_alone(store: Connection) -> None:
    store.execute("ALTER TABLE docs ALTER segment_embedding DROP NOT NULL")
    store.execute(INSERT, (30, "late frost"))
    before = definition(store)
    assert add(store, "fake-embed", None)["segments"] == 1
    assert definition(store) == before
    assert triggers(store) == []
    assert_embedded(store, "fake-embed", column="segment_embedding")


def test_another_column_name_by_hand(store: Connection) -> None:
    add(store)
    store.execute("ALTER TABLE docs RENAME segment_embedding_more TO mine; ALTER TABLE docs RENAME segment TO body")
    store.execute("UPDATE docs SET body = 'red hut' WHERE document_id = 1")
    assert listed(store)["more"]["pending"] == 1
    assert add(store)["segments"] == 1
    assert store.execute("SELECT mine::real[] FROM docs WHERE document_id = 1").fetchone() == (
        pytest.approx(embedding("red hut", "narrow")),
    )


# -- stopping and going on ---------------------------------------------------------------------------------------------


def test_a_call_that_is_cancelled_goes_on_where_it_was(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    models.before = {4: lambda: other.execute("SELECT pg_cancel_backend(%s::integer)", (store.info.backend_pid,))}
    with error("57014", ours=False):
        add(store, batch_size=1)
    assert listed(store)["more"]["segments"] == 3
    # what changes is followed though nobody is at it
    store.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    models.requests.clear()
    assert add(store)["segments"] == 5
    assert len(models.embedded("narrow")) == 5
    assert_embedded(store)


def test_a_backend_that_is_killed_leaves_no_lock_behind(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    models.before = {4: lambda: other.execute("SELECT pg_terminate_backend(%s::integer)", (store.info.backend_pid,))}
    with pytest.raises(Exception, match="terminating connection"):
        add(store, batch_size=1)
    assert add(other)["segments"] == 4
    assert_embedded(other)


def test_the_model_server_goes_and_comes_back(store: Connection, models: ModelsServer) -> None:
    def fail() -> None:
        raise OSError

    models.before = {3: fail}
    with error("08006"):
        add(store, batch_size=1)
    assert add(store)["segments"] == 5
    assert_embedded(store)


def test_another_model_or_type_needs_another_name(store: Connection) -> None:
    add(store)
    with error("22023", 'embedding "more" of "public.docs" exists already', "model narrow and type vector"):
        add(store, model="other")
    with error("22023", "exists already, with another model or type"):
        add(store, type="halfvec")
    assert add(store, "most", "other", type="halfvec")["segments"] == 7
    assert list(listed(store)) == ["fake-embed", "more", "most"]


def test_progress_is_shown(db: Database, store: Connection, models: ModelsServer) -> None:
    other = db.connect()
    seen: list[Any] = []
    statement = "SELECT command, relation, phase, done, total, failed FROM ml_rag.progress WHERE pid = %s"
    models.always = lambda _: seen.extend(other.execute(statement, (store.info.backend_pid,)))
    add(store, batch_size=3)
    assert seen == [("ml_rag.add_embedding", "public.docs", "embedding", done, 7, 0) for done in (0, 3, 6)]
    assert other.execute("SELECT count(*) FROM ml_rag.progress").fetchone() == (0,)


def test_a_store_of_more_than_a_few_blocks(owner: Connection, models: ModelsServer) -> None:
    texts = [f"{TEXTS[i % 7]} number {i} {'x' * 300}" for i in range(1000)]
    create_store(owner, rows=rows(texts), type="vector(16)")
    owner.execute("DELETE FROM docs WHERE document_id % 5 = 0")
    for size in (7, 1000):
        add(owner, f"e{size}", batch_size=size, index={"type": "none"})
        assert_embedded(owner, column=f"segment_embedding_e{size}")
    assert len(models.embedded("narrow")) == 2 * 800


# -- by name -----------------------------------------------------------------------------------------------------------


def named(connection: Connection, name: str | None, columns: str | None = None) -> Any:
    """Column, model, type and dimensions of the store with that embedding, as ``ml_rag._embedding`` gives it."""
    return connection.execute(
        "SELECT (e).segment_embedding, (e).embed_model_id, (e).embedding_type, (e).dimensions, (e).vector_store,"
        " e IS NULL"
        " FROM (SELECT ml_rag._embedding(s, %s) AS e FROM ml_rag.discover(vector_store_columns => %s) AS s) AS f",
        (name, columns),
    ).fetchone()


def test_a_store_with_one_of_its_embeddings(db: Database, store: Connection) -> None:
    add(store, "more", "narrow", type="halfvec")
    asker = db.connect("asker")
    usual = ("segment_embedding", "fake-embed", "vector", 16, "public.docs", False)
    more = ("segment_embedding_more", "narrow", "halfvec", 8, "public.docs", False)
    assert named(asker, None) == named(asker, "fake-embed") == usual
    assert named(asker, "more") == more
    assert named(asker, "nothing") == (None, None, None, None, None, True)
    mapped = '{"segment_embedding": "segment_embedding_more"}'
    assert named(asker, None, mapped) == more
    assert named(asker, "fake-embed", mapped) == usual
    use(store, "more")
    assert named(asker, None) == named(asker, "more") == more
    assert named(asker, "fake-embed") == usual
    # what the caller may not read is not there
    store.execute("REVOKE ALL ON docs FROM ml_rag_user")
    store.execute("GRANT SELECT (segment, segment_embedding_more) ON docs TO ml_rag_user")
    assert named(asker, None) == more
    assert named(asker, "fake-embed") == (None, None, None, None, None, True)


def test_a_default_one_that_the_caller_may_not_read(db: Database, store: Connection) -> None:
    add(store)
    use(store, "more")
    store.execute(
        "REVOKE ALL ON docs FROM ml_rag_user; GRANT SELECT (segment, segment_embedding) ON docs TO ml_rag_user"
    )
    assert names(db.connect("asker")) == []


def test_an_embedding_of_a_column_that_was_mapped(owner: Connection, models: ModelsServer) -> None:
    owner.execute(
        "CREATE TABLE texts (id integer PRIMARY KEY, body text, e vector(16)); INSERT INTO texts VALUES (1, 'x')"
    )
    mark(owner, "texts", column="e")
    columns = '{"segment": "body", "segment_embedding": "e"}'
    assert named(owner, "fake-embed", columns)[:2] == ("e", "fake-embed")
    assert named(owner, "narrow", columns)[0] is None
