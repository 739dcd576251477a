"""LangChain: filters, names, options, rights and conversations, beyond LangChain's own suites."""

from __future__ import annotations

import asyncio
import datetime
import math
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from ml_rag.errors import MlRagError
from ml_rag.integrations.langchain import MlRagChatMessageHistory, MlRagRetriever, MlRagVectorStore, filters
from support.cluster import Connection, Database, value_of
from support.embeddings import add, assert_embedded, use, vectors
from support.models_server import ModelsServer
from support.processes import wait_until
from support.stores import as_text, create_store, error, fake_embedding

BOATS = [
    Document("red boat", metadata={"year": 2001, "tags": ["sea", "sail"], "source": "boats.pdf"}, id="a"),
    Document("blue boat", metadata={"year": 2005, "tags": ["sea"], "a/b": {"~": 1}}, id="b"),
    Document("green boat", metadata={"year": "2005", "owner": "O'Hara; DROP TABLE x"}, id="c"),
    Document("house", metadata={"city": "Rome", "year": 2010}, id="d"),
]


@pytest.fixture
def boats(asker_dsn: str) -> Iterator[MlRagVectorStore]:
    store = MlRagVectorStore(asker_dsn, "public.boats")
    store.add_documents(BOATS)
    yield store
    store.close()


def found(store: MlRagVectorStore, filter: Any, **kwargs: Any) -> set[str | None]:
    return {document.id for document in store.similarity_search("boat", 10, filter=filter, **kwargs)}


@pytest.mark.parametrize(
    ("filter", "ids"),
    [
        (None, {"a", "b", "c", "d"}),
        ({}, {"a", "b", "c", "d"}),
        ({"year": 2005}, {"b"}),
        ({"year": {"$eq": 2005}}, {"b"}),
        ({"year": {"$ne": 2005}}, {"a", "c", "d"}),
        ({"year": {"$in": [2001, 2010]}}, {"a", "d"}),
        ({"year": {"$nin": [2001, 2010]}}, {"b", "c"}),
        ({"year": {"$lt": 2005}}, {"a"}),
        ({"year": {"$lte": 2005}}, {"a", "b"}),
        ({"year": {"$gt": 2005}}, {"d"}),
        ({"year": {"$gte": 2005}}, {"b", "d"}),
        ({"year": {"$gt": 2001, "$lt": 2010}}, {"b"}),
        ({"year": {"$between": [2001, 2005]}}, {"a", "b"}),
        ({"city": {"$like": "R%"}}, {"d"}),
        ({"city": {"$like": "r%"}}, set()),
        ({"city": {"$ilike": "r%"}}, {"d"}),
        ({"city": {"$exists": True}}, {"d"}),
        ({"city": {"$exists": False}}, {"a", "b", "c"}),
        ({"tags": "sail"}, {"a"}),
        ({"tags": "sea", "year": 2005}, {"b"}),
        ({"$and": [{"tags": "sea"}, {"year": 2005}]}, {"b"}),
        ({"$or": [{"city": "Rome"}, {"year": 2001}]}, {"a", "d"}),
        ({"$not": {"tags": "sea"}}, {"c", "d"}),
        ({"$not": [{"tags": "sea"}, {"year": 2005}]}, {"a", "c", "d"}),
        ({"$and": [{"$or": [{"year": 2001}, {"year": 2005}]}, {"$not": {"tags": "sail"}}]}, {"b"}),
        ({"owner": "O'Hara; DROP TABLE x"}, {"c"}),
        ({"a/b": {"$exists": True}}, {"b"}),
        ({"id": "a"}, set()),  # a column is not a key of the metadata
        ({"' OR true --": "x"}, set()),
    ],
)
def test_filters_of_langchain_postgres(boats: MlRagVectorStore, filter: Any, ids: set[str]) -> None:
    assert found(boats, filter) == ids


def test_a_filter_of_a_search_is_added_to_that_of_the_store(boats: MlRagVectorStore, asker_dsn: str) -> None:
    """An application that keeps tenants apart by it passes on what a user asks for."""
    store = MlRagVectorStore(asker_dsn, "public.boats", options={"filters": {"year": {"gte": 2005}}})
    everything = {"year": {"$gte": 0}}
    assert found(store, None) == found(store, everything) == found(boats, {"year": {"$gte": 2005}})
    assert found(store, {"tags": "sea"}) == {"b"}
    assert found(store, everything, options={"filters": {"year": 2001}}) == {"a"}
    store.close()


def test_a_filter_of_a_search_is_added_to_that_of_a_preset_and_of_the_settings(
    db: Database, boats: MlRagVectorStore, asker_dsn: str
) -> None:
    owner = db.connect()
    kept = '{"filters": {"and": [{"year": {"gte": 2005}}]}}'
    owner.execute("SELECT ml_rag.create_preset('kept', %s)", (kept,))
    store = MlRagVectorStore(asker_dsn, "public.boats", options={"preset": "kept"})
    assert found(store, None) == found(store, {"year": {"$gte": 0}}) == {"b", "d"}
    owner.execute("SELECT ml_rag.configure('default_options', %s)", (kept,))
    assert found(boats, {"year": {"$gte": 0}}) == {"b", "d"}
    # a key that the store's options give anew is that of the store, with a filter as without one
    owner.execute("SELECT ml_rag.configure('default_options', %s)", ('{"filters": {"year": 2001}}',))
    own = MlRagVectorStore(asker_dsn, "public.boats", options={"filters": {"year": 2005}})
    assert found(own, None) == found(own, {"tags": "sea"}) == {"b"}
    for wrong in ([], 1, {"and": None}):
        with error("22023", 'option "filters"'):
            found(boats, {"year": 1}, options={"filters": wrong})
    store.close()
    own.close()


def test_options_of_a_search_are_laid_over_those_of_the_store(boats: MlRagVectorStore, asker_dsn: str) -> None:
    """Objects key by key, as the database lays its levels: another filter takes the place of none."""
    kept = {"filters": {"year": {"gte": 2005}, "not": {"city": "Rome"}}}
    store = MlRagVectorStore(asker_dsn, "public.boats", options=kept)
    retriever = MlRagRetriever(dsn=asker_dsn, k=10, options={"vector_store": ["public.boats"], **kept})
    for own, ids in (
        ({}, {"b"}),
        ({"n_citations": 1}, {"b"}),
        ({"tags": {"exists": True}}, {"b"}),
        ({"not": {"tags": "sea"}}, set()),
        ({"year": 2001}, {"a"}),
    ):
        options = own if "n_citations" in own else {"filters": own}
        assert found(store, None, options=options) == ids
        texts = {document.page_content for document in retriever.invoke("boat", k=10, options=options)}
        assert texts == {boat.page_content for boat in BOATS if boat.id in ids}
    assert len(found(store, None, options={"filters": None})) == 4
    store.close()
    retriever.close()


@pytest.mark.parametrize(
    "filter",
    [{"$xor": []}, {"year": {"$equals": 1}}, {"year": {}}, {"$and": {"year": 1}}, {"a": {"b": 1}}, {"$not": None}, [1]],
)
def test_a_filter_that_is_none_is_no_search(boats: MlRagVectorStore, filter: Any) -> None:
    with pytest.raises(ValueError, match=r"\$|operator|is a dict"):
        found(boats, filter)


def test_what_the_database_refuses_has_its_sqlstate(boats: MlRagVectorStore) -> None:
    with error("22023", "between"):
        found(boats, {"year": {"$between": [1]}})
    assert len(boats.similarity_search("boat", 100)) == 4
    assert boats.similarity_search("boat", 0) == []


def test_a_count_out_of_range_is_named_as_langchain_does(boats: MlRagVectorStore, asker_dsn: str) -> None:
    for k in (-1, 101):
        with pytest.raises(ValueError, match=f"^k must be from 0 to 100, not {k}$"):
            boats.similarity_search("boat", k)
        with pytest.raises(ValueError, match=f"^fetch_k must be from 0 to 100, not {k}$"):
            boats.max_marginal_relevance_search("boat", 1, fetch_k=k)
    assert len(boats.max_marginal_relevance_search("boat", 1, fetch_k=100)) == 1
    retriever = MlRagRetriever(dsn=asker_dsn)
    for k in (0, 101):
        with pytest.raises(ValueError, match=f"^k must be from 1 to 100, not {k}$"):
            retriever.invoke("boat", k=k)
    assert [len(retriever.invoke("boat", k=k)) for k in (1, 100)] == [1, 4]
    retriever.close()


def test_a_document_does_not_give_itself_a_score(db: Database, asker_dsn: str) -> None:
    rows = [("a", 7, 1, "red boat", fake_embedding("red boat"))]
    create_store(db.connect(), "public.loaded", rows, "vector(16)")
    forged = '{"distance": -9, "keyword_score": 9, "score": 9, "rerank_score": 9, "page": 3}'
    db.connect().execute("UPDATE loaded SET metadata = %s", (forged,))
    retriever = MlRagRetriever(dsn=asker_dsn)
    (found,) = retriever.invoke("red boat")
    retriever.close()
    measured = {"distance", "keyword_score", "score", "rerank_score", "page"} & found.metadata.keys()
    assert {name: found.metadata[name] for name in measured} == {"distance": 0, "page": 3}


def test_the_source_of_a_document_that_was_loaded_is_its_name(db: Database, asker_dsn: str) -> None:
    rows = [("/srv/a.pdf", 7, 1, "red boat", fake_embedding("red boat")), ("b", 8, 1, "house", fake_embedding("house"))]
    create_store(db.connect(), "public.loaded", rows, "vector(16)")
    owner = db.connect()
    made = '{"page": 3, "title": "Boats", "source": {"sha256": "00", "made_with": "11"}}'
    owner.execute("UPDATE loaded SET metadata = %s WHERE document_id = 7", (made,))
    owner.execute("""UPDATE loaded SET metadata = '{"source": {"shelf": 4}}' WHERE document_id = 8""")
    store, retriever = MlRagVectorStore(asker_dsn, "public.loaded"), MlRagRetriever(dsn=asker_dsn, k=2)
    wanted = {"red boat": "/srv/a.pdf", "house": {"shelf": 4}}
    for found in (store.similarity_search("red boat"), retriever.invoke("red boat"), store.get_by_ids(["7:1", "8:1"])):
        assert {d.page_content: d.metadata["source"] for d in found} == wanted
        places = [(d.metadata["title"], d.metadata["page"]) for d in found if d.page_content == "red boat"]
        assert places == [("Boats", 3)]
    store.close()
    retriever.close()


def test_a_value_that_json_has_not_is_no_filter() -> None:
    day = datetime.date(2026, 1, 1)
    assert filters({"day": {"$gte": day.isoformat()}}) == {"/day": {"gte": "2026-01-01"}}
    assert filters({"a~b/c": 1}) == {"/a~0b~1c": 1}


@pytest.mark.parametrize("embedding", [None, DeterministicFakeEmbedding(size=6)])
@pytest.mark.parametrize("name", ['public."Odd ""name"" 100%"', 'public."x; DROP TABLE y"'])
def test_names_are_quoted(asker_dsn: str, name: str, embedding: Embeddings | None) -> None:
    store = MlRagVectorStore(asker_dsn, name, embedding)
    store.add_texts(["red boat"], ids=["'; DELETE"])
    assert [d.id for d in store.similarity_search("boat", 1)] == ["'; DELETE"]
    store.delete(["'; DELETE"])
    assert store.similarity_search("boat", 1) == []
    store.close()


@pytest.mark.parametrize("name", ["boats", "a.b.c"])
def test_a_name_has_its_schema(asker_dsn: str, name: str) -> None:
    with pytest.raises(MlRagError, match="invalid name of a vector store"):
        MlRagVectorStore(asker_dsn, name)


def test_the_nearest_comes_first_with_its_distance(boats: MlRagVectorStore) -> None:
    (first, distance), (_, other) = boats.similarity_search_with_score("blue boat", 2)
    assert (first.id, first.metadata) == ("b", BOATS[1].metadata)
    assert distance == pytest.approx(0, abs=1e-4)
    assert other > 0.1
    (_, relevance), *_ = boats.similarity_search_with_relevance_scores("blue boat", 1)
    assert relevance == pytest.approx(1, abs=1e-4)


def test_relevance_is_by_the_metric_of_the_options(asker_dsn: str, boats: MlRagVectorStore) -> None:
    store = MlRagVectorStore(asker_dsn, "public.boats", options={"distance_metric": "EUCLIDEAN"})
    (_, distance), *_ = store.similarity_search_with_score("red house", 1)
    (_, relevance), *_ = store.similarity_search_with_relevance_scores("red house", 1)
    assert relevance == pytest.approx(1 / (1 + distance))
    store.close()


def test_a_hit_without_a_distance(owner: Connection, boats: MlRagVectorStore) -> None:
    """Found by its words alone, or of a vector of zeros, such as anybody may have who writes to the store."""
    words = {"semantic_search": False, "keyword_search": True}
    by_words = boats.similarity_search_with_score("blue boat", 4, options=words)
    assert [(document.id, distance) for document, distance in by_words][:1] == [("b", math.inf)]
    owner.execute("UPDATE boats SET segment_embedding = array_fill(0, '{16}')::vector WHERE id = 'c'")
    found = boats.similarity_search_with_score("green boat", 4, options={"keyword_search": True})
    assert {document.id: distance for document, distance in found}["c"] == math.inf
    assert [d.id for d in boats.max_marginal_relevance_search("Rome green house", 4, options=words)] == ["d"]
    assert boats.max_marginal_relevance_search("green", 4, options=words) == []


def test_each_embedding_gets_vectors_of_its_own_model(owner: Connection, models: ModelsServer, asker_dsn: str) -> None:
    """Whichever is the default one, and was when the object was made; a search is by the default one."""
    former = MlRagVectorStore(asker_dsn, "public.boats")
    former.add_texts(["red boat", "house"], ids=["a", "b"])
    for name, model in (("more", "other"), ("small", "narrow")):
        add(owner, name, model, "boats")
    use(owner, "small", "boats")
    later = MlRagVectorStore(asker_dsn, "public.boats")
    for store, ids in ((former, ["a", "c"]), (later, ["b", "d"])):
        store.add_texts([f"blue boat {id}" for id in ids], ids=ids)
        (found, *_) = store.similarity_search_with_score("blue boat d" if store is later else "blue boat c", 1)
        assert (found[0].id, found[1]) == (ids[1], pytest.approx(0, abs=1e-4))
        assert [d.id for d in store.max_marginal_relevance_search(f"blue boat {ids[0]}", 1)] == [ids[0]]
        store.close()
    for column, model in (("", "fake-embed"), ("_more", "other"), ("_small", "narrow")):
        assert_embedded(owner, model, "boats", f"segment_embedding{column}")


def test_own_vectors_beside_another_embedding(owner: Connection, models: ModelsServer, asker_dsn: str) -> None:
    embeds = DeterministicFakeEmbedding(size=16)
    owner.execute("SELECT ml_rag.create_store('public.boats'); ALTER TABLE boats ADD id text UNIQUE")
    owner.execute("GRANT SELECT, INSERT, UPDATE ON boats TO ml_rag_user")
    store = MlRagVectorStore(asker_dsn, "public.boats", embeds)
    store.add_texts(["red boat"])
    add(owner, "more", "narrow", "boats")
    store.add_texts(["blue boat"])
    own = dict(zip(("red boat", "blue boat"), embeds.embed_documents(["red boat", "blue boat"]), strict=True))
    assert vectors(owner, "boats") == {text: pytest.approx(vector, abs=1e-6) for text, vector in own.items()}
    assert_embedded(owner, "narrow", "boats")
    store.close()


def test_search_by_a_vector(boats: MlRagVectorStore) -> None:
    assert [d.id for d in boats.similarity_search_by_vector(fake_embedding("green boat"), 1)] == ["c"]


def test_options_of_ml_rag_reach_the_search(boats: MlRagVectorStore) -> None:
    words = {"semantic_search": False, "keyword_search": True}
    assert [d.id for d in boats.similarity_search("Rome house", 10, options=words)] == ["d"]
    retriever = boats.as_retriever(search_kwargs={"k": 1, "filter": {"year": 2001}})
    assert [d.id for d in retriever.invoke("house")] == ["a"]


@pytest.mark.parametrize("embedding", [None, DeterministicFakeEmbedding(size=6)])
def test_filters_of_the_store_hold_for_ids_and_deleting(
    owner: Connection, asker_dsn: str, embedding: Embeddings | None
) -> None:
    whole = MlRagVectorStore(asker_dsn, 'public."100% boats"', embedding)
    whole.add_documents(BOATS)
    # a text of a filter is no pattern and no parameter, whatever it has
    whole.add_texts(["raft"], [{"tags": "sea", "100%": "%s"}], ids=["e"])
    sea = {"and": [{"tags": "sea"}, {"year": {"ne": 2001}}]}
    theirs = MlRagVectorStore(asker_dsn, 'public."100% boats"', embedding, options={"filters": sea})
    assert [d.id for d in theirs.get_by_ids(["d", "b", "a", "e", "x"])] == ["b", "e"]
    odd = MlRagVectorStore(asker_dsn, 'public."100% boats"', embedding, options={"filters": {"100%": "%s"}})
    assert [d.id for d in odd.get_by_ids(["e", "b"])] == ["e"]
    with pytest.raises(MlRagError, match="1 of 2 texts have the ids of rows that the options leave out"):
        theirs.add_texts(["theirs", "new"], ids=["a", "new"])
    assert [d.page_content for d in whole.get_by_ids(["a", "new"])] == ["red boat"]
    owner.execute("UPDATE \"100% boats\" SET id = NULL, document_id = 7, segment_number = 1 WHERE id = 'a'")
    with pytest.raises(MlRagError, match="1 of 1 texts have the ids of rows that the options leave out"):
        theirs.add_texts(["theirs"], ids=["7:1"])
    assert [d.page_content for d in whole.get_by_ids(["7:1"])] == ["red boat"]
    owner.execute("UPDATE \"100% boats\" SET id = 'a' WHERE document_id = 7")
    theirs.add_texts(["yacht"], [{"tags": "sea"}], ids=["e"])
    assert [d.page_content for d in whole.get_by_ids(["e"])] == ["yacht"]
    theirs.delete(("a", "b"))
    assert [d.id for d in whole.get_by_ids(["a", "b", "c", "d", "e"])] == ["a", "c", "d", "e"]
    theirs.delete()
    assert [d.id for d in whole.get_by_ids(["a", "b", "c", "d", "e"])] == ["a", "c", "d"]
    with error("22023", ours=False):
        MlRagVectorStore(asker_dsn, 'public."100% boats"', embedding, options={"filters": []}).delete()
    assert len(whole.get_by_ids(["a", "c", "d"])) == 3
    for store in (whole, theirs, odd):
        store.close()


def test_marginal_relevance_takes_what_differs(asker_dsn: str) -> None:
    store = MlRagVectorStore(asker_dsn, "public.twins")
    store.add_texts(["red boat", "red boat", "red house"], ids=["1", "2", "3"])
    assert [d.id for d in store.similarity_search("red boat", 2)] in (["1", "2"], ["2", "1"])
    assert [d.id for d in store.max_marginal_relevance_search("red boat", 2, lambda_mult=0.1)][1] == "3"
    by_vector = store.max_marginal_relevance_search_by_vector(fake_embedding("red boat"), 2, lambda_mult=0.1)
    assert by_vector[1].id == "3"
    store.close()


def test_a_store_is_made_once_and_found_again(asker_dsn: str, boats: MlRagVectorStore) -> None:
    again = MlRagVectorStore.from_texts(["white boat"], ids=["e"], dsn=asker_dsn, store="public.boats")
    assert {d.id for d in again.similarity_search("boat", 10)} == {"a", "b", "c", "d", "e"}
    again.create_index()
    with psycopg.connect(asker_dsn) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_indexes WHERE tablename = 'boats' AND indexdef LIKE '%USING hnsw%'"
        ).fetchone()
        assert row == (1,)
        # ml_rag itself finds it without a name, and cites the source
        row = connection.execute(
            "SELECT document_name FROM ml_rag_search('red boat', '{\"n_citations\": 1}')"
        ).fetchone()
        assert row == ("boats.pdf",)
    again.delete()
    assert again.similarity_search("boat") == []
    again.close()


def test_a_row_that_was_loaded_is_replaced_by_the_id_that_it_was_read_with(
    db: Database, owner: Connection, boats: MlRagVectorStore
) -> None:
    text = "Kayaks are narrow."
    owner.execute(
        "INSERT INTO boats (document_name, metadata, document_id, segment_number, segment, segment_embedding)"
        " SELECT 'k.txt', '{}', 7, n, %s, b.segment_embedding"
        " FROM (SELECT segment_embedding FROM boats LIMIT 1) AS b, generate_series(1, 2) AS n",
        (text,),
    )
    (document,) = boats.get_by_ids(["7:1"])
    document.page_content = "Kayaks are long."
    boats.add_documents([document])
    assert [found.page_content for found in boats.get_by_ids(["7:1", "7:2"])] == ["Kayaks are long.", text]
    assert value_of(owner, "SELECT count(*) FROM boats WHERE segment LIKE 'Kayaks%'") == 2
    boats.delete(["7:1"])
    assert [found.id for found in boats.get_by_ids(["7:1", "7:2"])] == ["7:2"]


def test_a_store_that_was_loaded_is_read_and_not_written(db: Database, asker_dsn: str) -> None:
    create_store(db.connect(), "public.loaded", [("a.pdf", 7, 1, "red boat", fake_embedding("red boat"))], "vector(16)")
    store = MlRagVectorStore(asker_dsn, "public.loaded")
    assert [d.id for d in store.similarity_search("boat")] == ["7:1"]
    assert [d.page_content for d in store.get_by_ids(["7:1"])] == ["red boat"]
    with pytest.raises(MlRagError, match="has no column for ids") as caught:
        store.add_texts(["x"])
    # the text itself, as a traceback and a notebook show nothing else
    assert 'MlRagRetriever with options={"vector_store": ["public.loaded"]}' in str(caught.value)
    assert "ALTER TABLE public.loaded ADD id text UNIQUE" in str(caught.value)
    store.close()


def test_a_row_without_a_text_is_left_out(db: Database, asker_dsn: str) -> None:
    rows = [("a.pdf", 7, n, text, fake_embedding(text)) for n, text in enumerate(("red boat", "blue boat"), 1)]
    create_store(db.connect(), "public.loaded", rows, "vector(16)")
    db.connect().execute(
        "ALTER TABLE loaded ALTER segment DROP NOT NULL; UPDATE loaded SET segment = NULL WHERE segment_number = 1"
    )
    store = MlRagVectorStore(asker_dsn, "public.loaded")
    assert (
        [d.id for d in store.get_by_ids(["7:1", "7:2"])] == [d.id for d in store.similarity_search("boat")] == ["7:2"]
    )
    store.close()


@pytest.mark.parametrize("column", ["text", "bigint UNIQUE", "uuid UNIQUE"])
def test_a_store_whose_ids_are_others_is_read_and_not_written(db: Database, asker_dsn: str, column: str) -> None:
    owner = db.connect()
    rows = [("a.pdf", 7, n, text, fake_embedding(text)) for n, text in enumerate(("red boat", "blue boat"), 1)]
    create_store(owner, "public.loaded", rows, "vector(16)")
    owner.execute(f"ALTER TABLE loaded ADD id {column}; GRANT SELECT, INSERT, UPDATE, DELETE ON loaded TO ml_rag_user")
    key = str(uuid.UUID(int=1)) if "uuid" in column else "1"
    owner.execute("UPDATE loaded SET id = %s WHERE segment_number = 1", (key,))
    store = MlRagVectorStore(asker_dsn, "public.loaded")
    assert {d.id for d in store.similarity_search("boat")} == {key, "7:2"}
    assert [d.page_content for d in store.get_by_ids(["7:2", key])] == ["blue boat", "red boat"]
    with pytest.raises(MlRagError, match=r"column id of public\.loaded cannot hold the ids of texts"):
        store.add_texts(["x"], ids=[key])
    store.delete([key])
    assert [d.id for d in store.get_by_ids(["7:2", key])] == ["7:2"]
    store.close()


def test_a_table_of_ones_own_is_for_the_retriever(db: Database, asker_dsn: str) -> None:
    owner = db.connect()
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, title text)")
    owner.execute("INSERT INTO items VALUES (1, 'red boat')")
    options = '{"columns": ["title"], "embed_model_id": "fake-embed"}'
    owner.execute("SELECT ml_rag.create_vectorizer('items', %s)", (options,))
    owner.execute("CALL ml_rag.run_vectorizer('items')")
    owner.execute("GRANT SELECT ON items TO ml_rag_user")
    with pytest.raises(MlRagError, match=r"table public\.items does not have the columns") as caught:
        MlRagVectorStore(asker_dsn, "public.items")
    assert "It lacks metadata, document_id, segment_number." in str(caught.value.detail)
    assert "It lacks metadata, document_id, segment_number." in str(caught.value)
    assert 'MlRagRetriever with options={"vector_store": ["public.items"]}' in str(caught.value)
    retriever = MlRagRetriever(dsn=asker_dsn, options={"vector_store": ["public.items"]})
    (found,) = retriever.invoke("red boat")
    assert "red boat" in found.page_content
    # the key of the row, to join it by
    assert found.metadata["document_id"] == 1
    retriever.close()


def test_a_table_of_several_tenants_numbers_is_for_the_retriever(db: Database, asker_dsn: str) -> None:
    """What a search finds would be joined with another tenant's rows of the same numbers."""
    owner = db.connect()
    owner.execute(
        "CREATE TABLE by_tenant (document_name text, metadata jsonb, document_id bigint, segment_number integer,"
        " tenant integer, segment text, segment_embedding vector(16), id text, PRIMARY KEY (tenant, document_id,"
        " segment_number)) PARTITION BY LIST (tenant); CREATE TABLE rest PARTITION OF by_tenant DEFAULT;"
        "COMMENT ON COLUMN by_tenant.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed';"
        "GRANT SELECT ON by_tenant TO ml_rag_user"
    )
    for tenant in (7, 8):
        vector = as_text(fake_embedding("boat"))
        owner.execute(
            "INSERT INTO by_tenant VALUES ('d', '{}', 1, 1, %s, 'boat', %s, %s)", (tenant, vector, f"{tenant}")
        )
    with pytest.raises(MlRagError, match=r"do not tell the rows of public\.by_tenant apart"):
        MlRagVectorStore(asker_dsn, "public.by_tenant")
    retriever = MlRagRetriever(dsn=asker_dsn, options={"vector_store": ["public.by_tenant"], "filters": {"tenant": 7}})
    assert len(retriever.invoke("boat")) == 1
    retriever.close()
    owner.execute("SELECT ml_rag.create_store('public.four', '{\"partitions\": 4}'); GRANT ALL ON four TO ml_rag_user")
    MlRagVectorStore(asker_dsn, "public.four").close()


def test_a_key_of_several_columns_is_in_the_metadata(db: Database, asker_dsn: str) -> None:
    owner = db.connect()
    owner.execute("CREATE TABLE stock (sku text, shop integer, title text, PRIMARY KEY (sku, shop))")
    owner.execute("INSERT INTO stock VALUES ('a', 2, 'red boat')")
    options = '{"columns": ["title"], "embed_model_id": "fake-embed"}'
    owner.execute("SELECT ml_rag.create_vectorizer('stock', %s)", (options,))
    owner.execute("CALL ml_rag.run_vectorizer('stock')")
    owner.execute("GRANT SELECT ON stock TO ml_rag_user")
    retriever = MlRagRetriever(dsn=asker_dsn, options={"vector_store": ["public.stock"]})
    (found,) = retriever.invoke("red boat")
    assert (found.metadata["sku"], found.metadata["shop"]) == ("a", 2)
    retriever.close()


def test_an_argument_that_there_is_not_is_refused(boats: MlRagVectorStore, asker_dsn: str) -> None:
    for call, arguments, said in (
        (boats.similarity_search, {"filters": {"year": 2001}}, "similarity_search has no argument 'filters'; did you"),
        (boats.similarity_search, {"filters": {"year": 2001}}, "did you mean 'filter'?"),
        (boats.similarity_search_with_score, {"option": {}}, "did you mean 'options'?"),
        (boats.max_marginal_relevance_search, {"fetchk": 1}, "did you mean 'fetch_k'?"),
        (boats.similarity_search, {"zzz": 1}, "there are k, filter, options"),
        (boats.as_retriever(search_kwargs={"filters": {}}).invoke, {}, "did you mean 'filter'?"),
    ):
        with pytest.raises(TypeError) as caught:
            call("boat", **arguments)
        assert said in str(caught.value)
    with pytest.raises(TypeError, match="MlRagRetriever has no argument 'option'; did you mean 'options'"):
        MlRagRetriever(dsn=asker_dsn, option={"keyword_search": True})
    retriever = MlRagRetriever(dsn=asker_dsn, k=1, tags=["mine"])
    with pytest.raises(TypeError, match="invoke has no argument 'opts'; did you mean 'options'"):
        retriever.invoke("boat", opts={})
    assert len(retriever.invoke("boat", k=2)) == 2
    retriever.close()


def test_what_is_no_list_of_ids_deletes_nothing(boats: MlRagVectorStore) -> None:
    """Without ids all are deleted, as LangChain has it: an argument that is ignored would be all."""
    for given, said in (
        ({"filter": {"year": 2001}}, "delete has no argument 'filter'; there are ids"),
        ({"where": "x"}, "delete has no argument 'where'"),
        ({"ids": "ab"}, "expected a list of texts, got the text 'ab'"),
    ):
        with pytest.raises(TypeError) as caught:
            boats.delete(**given)
        assert said in str(caught.value)
    for call, arguments in (
        (boats.get_by_ids, {}),
        (boats.add_texts, {}),
        (lambda text: boats.add_texts(["x", "y"], ids=text), {}),
        (lambda text: boats.add_texts(["x"], **text), {"metadata": [{}]}),
    ):
        with pytest.raises(TypeError):
            call(arguments or "ab")
    assert found(boats, None) == {"a", "b", "c", "d"}
    assert boats.delete([]) is True
    assert found(boats, None) == {"a", "b", "c", "d"}
    assert boats.delete() is True
    assert found(boats, None) == set()


def test_threads_that_add_the_same_new_ids_wait_for_each_other(asker_dsn: str) -> None:
    store = MlRagVectorStore(asker_dsn, "public.shared", DeterministicFakeEmbedding(size=6))
    ids = [f"{n:04}" for n in range(2000)]
    with ThreadPoolExecutor(4) as pool:
        added = pool.map(lambda own: store.add_texts(own, ids=own), [ids, ids[::-1]] * 2)
        assert [len(one) for one in added] == [2000] * 4
    assert [d.page_content for d in store.get_by_ids(ids)] == ids
    store.close()


def test_threads_that_add_loaded_rows_wait_for_each_other(owner: Connection, asker_dsn: str) -> None:
    store = MlRagVectorStore(asker_dsn, "public.shared", DeterministicFakeEmbedding(size=6))
    store.add_texts(["kayak"])
    owner.execute(
        "INSERT INTO shared (document_name, metadata, document_id, segment_number, segment, segment_embedding)"
        " SELECT 'k.txt', '{}', n, 1, 'kayak', s.segment_embedding FROM shared AS s, generate_series(1, 60) AS n"
    )
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = value_of(owner, deadlocks)
    ids = [f"{n}:1" for n in range(1, 61)]

    def add(seed: int) -> None:
        own = MlRagVectorStore(asker_dsn, "public.shared", DeterministicFakeEmbedding(size=6))
        sampled = random.Random(seed)
        for _ in range(8):
            listed = sampled.sample(ids, 40)
            own.add_texts(listed, ids=listed)
        own.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, range(6)))
    assert [d.page_content for d in store.get_by_ids(ids)] == ids
    assert value_of(owner, deadlocks) == before
    store.close()


def test_a_deletion_that_a_writer_is_in_the_way_of_is_made_again(owner: Connection, boats: MlRagVectorStore) -> None:
    """Both would wait for each other for ever; PostgreSQL ends the one that looks first."""
    with ThreadPoolExecutor(1) as pool, owner.transaction():
        owner.execute("SET LOCAL deadlock_timeout = '60s'")
        owner.execute("UPDATE public.boats SET segment = segment WHERE id = 'b'")
        deleted = pool.submit(boats.delete, ["a", "b"])
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()"
        wait_until(lambda: value_of(owner, waiting) > 0)
        owner.execute("UPDATE public.boats SET segment = segment WHERE id = 'a'")
        assert not deleted.done()
    assert deleted.result() is True
    assert found(boats, None) == {"c", "d"}


def test_an_empty_id_is_one(boats: MlRagVectorStore) -> None:
    for text in ("raft", "yacht"):
        assert boats.add_texts([text], ids=[""], batch_size=100) == [""]
    assert [d.page_content for d in boats.get_by_ids([""])] == ["yacht"]


def test_a_table_without_a_model_needs_an_embedding(asker_dsn: str) -> None:
    MlRagVectorStore(asker_dsn, "public.mine", DeterministicFakeEmbedding(size=6)).close()
    with pytest.raises(MlRagError, match="embedding model is known"):
        MlRagVectorStore(asker_dsn, "public.mine")


def test_rights_are_those_of_the_role(boats: MlRagVectorStore, asker_dsn: str, tenant_dsn: str) -> None:
    with pytest.raises(MlRagError, match="embedding model is known"):
        MlRagVectorStore(tenant_dsn, "public.boats")
    with psycopg.connect(asker_dsn, autocommit=True) as owner, psycopg.connect(tenant_dsn) as other:
        owner.execute("GRANT SELECT ON boats TO ml_rag_user")
        owner.execute("ALTER TABLE boats ENABLE ROW LEVEL SECURITY")
        owner.execute(f"CREATE POLICY seen ON boats TO {other.info.user} USING (id <> 'a')")
    store = MlRagVectorStore(tenant_dsn, "public.boats")
    assert found(store, None) == {"b", "c", "d"}
    assert [d.id for d in store.get_by_ids(["a", "b"])] == ["b"]
    with error("42501", ours=False):
        store.add_texts(["x"])
    with error("42501", ours=False):
        store.delete(["a"])
    store.close()
    retriever = MlRagRetriever(dsn=tenant_dsn, options={"vector_store": ["public.boats"]}, k=10)
    assert "red boat" not in {d.page_content for d in retriever.invoke("red boat")}
    retriever.close()


def test_rows_without_numbers_of_segments_have_ids_of_their_own(db: Database, asker_dsn: str) -> None:
    owner = db.connect()
    owner.execute(
        "CREATE TABLE items (document_name text, segment text, segment_embedding vector(16));"
        "COMMENT ON COLUMN items.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'"
    )
    for name in ("red boat", "blue boat"):
        owner.execute("INSERT INTO items VALUES ('items', %s, %s)", (name, as_text(fake_embedding(name))))
    owner.execute("GRANT SELECT ON items TO ml_rag_user")
    retriever = MlRagRetriever(dsn=asker_dsn, options={"vector_store": ["public.items"]}, k=2)
    first, second = (d.id for d in retriever.invoke("boat"))
    assert first != second
    assert {first, second} == {d.id for d in retriever.invoke("red boat")}
    retriever.close()


def test_the_retriever_takes_options_and_only_reads(boats: MlRagVectorStore, asker_dsn: str) -> None:
    retriever = MlRagRetriever(dsn=asker_dsn, options={"n_citations": 2, "filters": {"year": {"lte": 2005}}})
    first, _ = retriever.invoke("blue boat")
    assert first.page_content == "blue boat"
    assert first.metadata["vector_store"] == "public.boats"
    assert first.metadata["distance"] == pytest.approx(0, abs=1e-4)
    assert retriever.invoke("boat", options={"filters": {"city": "Rome"}}) == []
    elsewhere = {"filters": {"city": "Rome", "year": {"lte": 2010}}}
    assert [d.page_content for d in retriever.invoke("boat", options=elsewhere)] == ["house"]
    assert retriever.invoke("boat", options={"filters": {"city": "Paris"}}) == []
    with error("22023", "no_such_option"):
        retriever.invoke("boat", options={"no_such_option": 1})
    with pytest.raises(psycopg.errors.NoDataFound, match="no vector store found"):
        retriever.invoke("boat", options={"vector_store": ["public.nothing"]})
    with retriever._database.transaction() as connection, error("25006", ours=False):
        connection.execute("CREATE TABLE x ()")
    for shown in (repr(retriever), str(retriever.model_dump()), retriever.model_dump_json(), dumps(retriever)):
        assert "made for a test" not in shown
    assert retriever.model_copy().dsn == asker_dsn
    retriever.close()


@pytest.mark.parametrize("metadata", ["[1]", '"text"', "7"])
def test_metadata_that_are_no_object_fail_no_search(db: Database, asker_dsn: str, metadata: str) -> None:
    owner = db.connect()
    create_store(owner, "public.planted", [("p.txt", 1, 1, "red boat", fake_embedding("red boat"))], "vector(16)")
    owner.execute("UPDATE planted SET metadata = %s", (metadata,))
    owner.execute("GRANT SELECT ON planted TO PUBLIC")
    retriever = MlRagRetriever(dsn=asker_dsn)
    (found,) = retriever.invoke("red boat")
    assert (found.page_content, found.metadata["document_name"]) == ("red boat", "p.txt")
    retriever.close()
    store = MlRagVectorStore(asker_dsn, "public.planted")
    assert [found.metadata for found in store.similarity_search("red boat")] == [{}]
    store.close()


async def test_searches_run_side_by_side(boats: MlRagVectorStore) -> None:
    results = await asyncio.gather(*(boats.asimilarity_search(color, 1) for color in ("red", "blue", "green") * 5))
    assert [documents[0].id for documents in results] == ["a", "b", "c"] * 5


async def test_a_task_that_is_cancelled_gives_its_connection_back(
    boats: MlRagVectorStore, asker_dsn: str, cancel: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    """There are four of them."""
    retriever, history = MlRagRetriever(dsn=asker_dsn, k=1), MlRagChatMessageHistory(asker_dsn)
    vector = fake_embedding("red boat")
    await cancel(
        "boats",
        lambda: boats.asimilarity_search("red boat"),
        lambda: boats.asimilarity_search_with_relevance_scores("red boat"),
        lambda: boats.asimilarity_search_by_vector(vector),
        lambda: boats.aget_by_ids(["a"]),
    )
    await cancel(
        "boats",
        lambda: boats.amax_marginal_relevance_search("red boat"),
        lambda: boats.amax_marginal_relevance_search_by_vector(vector),
        lambda: boats.aadd_documents([Document("raft", id="e")]),
        lambda: boats.adelete(["a"]),
    )
    await cancel(
        "boats", lambda: MlRagVectorStore.afrom_texts(["raft"], ids=["e"], dsn=asker_dsn, store="public.boats")
    )
    await cancel("boats", *[lambda: retriever.ainvoke("red boat")] * 4)
    await cancel(
        "conversation", lambda: history.aadd_messages([HumanMessage("hello")]), history.aclear, schema="ml_rag"
    )
    await cancel("message", history.aget_messages, schema="ml_rag")
    assert [d.id for d in await boats.aget_by_ids(["a", "e"])] == ["a"]
    assert [d.page_content for d in await retriever.ainvoke("red boat")] == ["red boat"]
    await history.aadd_messages([HumanMessage("hello")])
    assert len(await history.aget_messages()) == 1
    for one in (retriever, history):
        one.close()


async def test_a_task_that_is_cancelled_while_its_transaction_is_committed_ends_in_the_database(
    owner: Connection, boats: MlRagVectorStore, cancel: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    """By a deferred trigger, say, or a standby that does not answer."""
    owner.execute(
        "CREATE TABLE gate (); GRANT SELECT ON gate TO PUBLIC;"
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN PERFORM FROM public.gate; RETURN NULL; END$$;"
        "CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON boats DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    await cancel("gate", *[lambda: boats.aadd_texts(["raft"], ids=["e"])])
    assert await boats.aget_by_ids(["e"]) == []


class Exhausted(DeterministicFakeEmbedding):
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise StopIteration(7)


async def test_an_embedding_that_ends_an_iteration_is_an_error(asker_dsn: str) -> None:
    store = MlRagVectorStore(asker_dsn, "public.exhausted", Exhausted(size=6))
    with pytest.raises(RuntimeError, match=r"StopIteration\(7\)"):
        await store.aadd_texts(["x"])
    store.close()


def test_a_lost_connection_is_opened_again(db: Database, boats: MlRagVectorStore) -> None:
    boats.similarity_search("boat", 1)
    ended = db.connect().execute(
        "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
        " WHERE application_name = 'ml_rag langchain'"
    )
    assert ended.fetchone() != (0,)
    assert len(boats.similarity_search("boat", 1)) == 1


#: as a web server does that has loaded its application: each process looks up an id of its own, again and again
FORKED = """
import os, sys
from ml_rag.integrations.langchain import MlRagVectorStore
store = MlRagVectorStore(sys.argv[1], "public.boats")
children = []
for wanted in "abcd":
    if (child := os.fork()) == 0:
        found = [[document.id for document in store.get_by_ids([wanted])] for _ in range(20)]
        os._exit(found != [[wanted]] * 20)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
"""


def test_processes_that_are_forked_share_no_connection(boats: MlRagVectorStore, asker_dsn: str) -> None:
    subprocess.run([sys.executable, "-c", FORKED, asker_dsn], check=True, timeout=60)


def test_a_wrong_dsn_says_so_without_its_password(asker_dsn: str) -> None:
    with pytest.raises(psycopg.OperationalError) as caught:
        MlRagVectorStore(f"{asker_dsn} dbname=there_is_none", "public.boats")
    assert "made for a test" not in str(caught.value)


def test_a_conversation(boats: MlRagVectorStore, asker_dsn: str, tenant_dsn: str) -> None:
    history = MlRagChatMessageHistory(asker_dsn)
    assert history.messages == []
    history.add_messages([HumanMessage("what is red?"), AIMessage("a boat")])
    history.add_user_message("and blue?")
    assert [m.content for m in history.messages] == ["what is red?", "a boat", "and blue?"]
    history.add_ai_message("another boat")
    assert [type(m) for m in history.messages] == [HumanMessage, AIMessage] * 2
    with pytest.raises(MlRagError, match="no question"):
        history.add_ai_message("a third")
    with pytest.raises(MlRagError, match="questions and answers"):
        history.add_messages([HumanMessage("lost with what follows"), SystemMessage("x")])
    with psycopg.connect(asker_dsn) as connection:
        options = f'{{"conversation_id": "{history.conversation_id}", "n_citations": 1}}'
        connection.execute("SELECT ml_rag_chat('and green?', %s)", (options,))
    same = MlRagChatMessageHistory(asker_dsn, history.conversation_id)
    assert [m.content for m in same.messages][:5] == [
        "what is red?",
        "a boat",
        "and blue?",
        "another boat",
        "and green?",
    ]
    (citation,) = same.messages[5].additional_kwargs["citations"]
    assert citation["segment"] in {document.page_content for document in BOATS}
    others = MlRagChatMessageHistory(tenant_dsn, history.conversation_id)
    assert others.messages == []
    others.clear()
    assert len(history.messages) == 6
    history.clear()
    assert same.messages == []
    for one in (history, same, others):
        one.close()


def test_an_answer_is_that_to_the_question_of_the_same_object(asker_dsn: str) -> None:
    first = MlRagChatMessageHistory(asker_dsn)
    second, third = (MlRagChatMessageHistory(asker_dsn, first.conversation_id) for _ in range(2))
    first.add_user_message("what is red?")
    second.add_user_message("what is blue?")
    first.add_ai_message("a boat")
    second.add_ai_message("the sea")
    assert [m.content for m in third.messages] == ["what is red?", "a boat", "what is blue?", "the sea"]
    first.add_user_message("and green?")
    third.add_ai_message("a tree")
    with pytest.raises(MlRagError, match="no question"):
        first.add_ai_message("another tree")
    first.clear()
    second.add_user_message("again?")
    first.add_ai_message("yes")
    assert [m.content for m in third.messages] == ["again?", "yes"]
    for one in (first, second, third):
        one.close()


def test_messages_are_added_to_a_conversation_that_is_deleted_meanwhile(owner: Connection, asker_dsn: str) -> None:
    history = MlRagChatMessageHistory(asker_dsn)
    history.add_messages([HumanMessage("what is red?"), AIMessage("a boat")])
    watch = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(asker_dsn) as other:
        other.execute("SELECT FROM ml_rag.conversation FOR UPDATE")
        added = pool.submit(history.add_messages, [HumanMessage("and blue?")])
        wait_until(lambda: owner.execute(watch).fetchone() == (1,))
        other.execute("SELECT ml_rag.forget_conversation(%s)", (history.conversation_id,))
        other.commit()
        added.result(10)
    assert [m.content for m in history.messages] == ["and blue?"]
    history.close()


def test_a_conversation_has_a_uuid(asker_dsn: str) -> None:
    with pytest.raises(ValueError, match=r"^conversation_id must be a UUID, .*, not '1'$"):
        MlRagChatMessageHistory(asker_dsn, "1")
