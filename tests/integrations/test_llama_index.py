"""LlamaIndex: what its own tests of vector stores try, and nodes, filters, rights and the retriever of ml_rag."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.schema import BaseNode, ImageNode, IndexNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llama_index.core.vector_stores.utils import node_to_metadata_dict
from psycopg.types.json import Jsonb

from ml_rag.errors import MlRagError
from ml_rag.integrations.llama_index import MlRagRetriever, MlRagVectorStore
from support.cluster import Connection, Database
from support.embeddings import assert_embedded
from support.models_server import ModelsServer
from support.processes import Background, wait_until
from support.stores import create_store, error, fake_embedding

TEXTS = {
    "a": ("red boat", "doc-1", {"year": 2001, "tags": ["sea", "sail"], "file_name": "boats.pdf"}),
    "b": ("blue boat", "doc-1", {"year": 2005, "tags": ["sea"]}),
    "c": ("green boat", "doc-2", {"year": 2010, "city": "Rome 100%"}),
    "d": ("house", "doc-3", {"year": 2010, "city": "Paris", "tags": []}),
}


def node(key: str, text: str, document: str, metadata: dict[str, Any]) -> TextNode:
    source = RelatedNodeInfo(node_id=document)
    return TextNode(
        id_=key,
        text=text,
        metadata=metadata,
        embedding=fake_embedding(text),
        relationships={NodeRelationship.SOURCE: source},
    )


def nodes() -> list[TextNode]:
    made = [node(key, *rest) for key, rest in TEXTS.items()]
    made[0].relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id="b", metadata={"x": 1})
    made[1].relationships[NodeRelationship.PREVIOUS] = RelatedNodeInfo(node_id="a")
    return made


@pytest.fixture(params=[None, 16], ids=["database embeds", "client embeds"])
def store(request: pytest.FixtureRequest, asker_dsn: str) -> Iterator[MlRagVectorStore]:
    store = MlRagVectorStore(asker_dsn, "public.nodes", request.param)
    assert store.add(nodes()) == list(TEXTS)
    yield store
    store.close()


def asked(text: str, count: int = 10, **kwargs: Any) -> VectorStoreQuery:
    return VectorStoreQuery(query_str=text, query_embedding=fake_embedding(text), similarity_top_k=count, **kwargs)


def ids(store: MlRagVectorStore, text: str = "boat", **kwargs: Any) -> set[str]:
    return set(store.query(asked(text, **kwargs)).ids or [])


def one(key: str, value: Any, operator: FilterOperator = FilterOperator.EQ) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key=key, value=value, operator=operator)])


def test_vectors_are_of_the_model_that_the_table_has_by_now(
    owner: Connection, models: ModelsServer, asker_dsn: str
) -> None:
    """Of a table that was dropped and created again; a write that waits for that fails."""
    store = MlRagVectorStore(asker_dsn, "public.nodes")
    store.add(nodes())
    with psycopg.connect(asker_dsn) as other:
        other.execute("DROP TABLE nodes")
        other.execute("SELECT ml_rag.create_store('public.nodes', '{\"embed_model_id\": \"other\"}')")
        other.execute("ALTER TABLE nodes ADD id text UNIQUE")
        adding = Background(lambda: store.add(nodes()))
        wait_until(lambda: owner.execute("SELECT FROM pg_locks WHERE NOT granted").fetchone() is not None)
        other.commit()
        with error("42P01", 'table "public.nodes" does not exist any more', "Try again"):
            adding.result()
    store.add(nodes())
    assert_embedded(owner, "other", "nodes", "segment_embedding")
    store.close()


def test_a_row_with_the_last_number_keeps_no_node_out(db: Database, store: MlRagVectorStore) -> None:
    """Anybody who may write a row can have it."""
    db.connect().execute(
        "INSERT INTO nodes SELECT document_name, metadata, document_id, 2147483647, segment, segment_embedding, 'x'"
        " FROM nodes WHERE id = 'a'"
    )
    store.add([node("a", "red boat", "doc-1", {}), node("e", "grey boat", "doc-1", {})])
    assert ids(store) == {*TEXTS, "e", "x"}


def test_the_nearest_comes_first(store: MlRagVectorStore) -> None:
    result = store.query(asked("blue boat", 2))
    assert result.ids is not None
    assert result.nodes is not None
    assert result.similarities is not None
    assert (len(result.ids), result.ids[0]) == (2, "b")
    assert result.nodes[0].get_content() == "blue boat"
    assert result.similarities[0] == pytest.approx(1, abs=1e-4)
    assert result.similarities[0] > result.similarities[1]
    assert store.query(asked("blue boat", 0)).ids == []


def test_nodes_come_back_with_their_relationships(store: MlRagVectorStore) -> None:
    first, second = store.get_nodes(["a", "b"])
    assert first.metadata == TEXTS["a"][2]
    assert first.ref_doc_id == "doc-1"
    assert first.next_node is not None
    assert (first.next_node.node_id, first.next_node.metadata) == ("b", {"x": 1})
    assert second.prev_node is not None
    assert second.prev_node.node_id == "a"
    (found,) = store.query(asked("red boat", 1)).nodes or []
    assert found.relationships == first.relationships


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (one("year", 2005), {"b"}),
        (one("year", 2005, FilterOperator.NE), {"a", "c", "d"}),
        (one("year", 2005, FilterOperator.GT), {"c", "d"}),
        (one("year", 2005, FilterOperator.GTE), {"b", "c", "d"}),
        (one("year", 2005, FilterOperator.LT), {"a"}),
        (one("year", 2005, FilterOperator.LTE), {"a", "b"}),
        (one("year", [2001, 2005], FilterOperator.IN), {"a", "b"}),
        (one("year", [2001, 2005], FilterOperator.NIN), {"c", "d"}),
        (one("tags", "sail", FilterOperator.CONTAINS), {"a"}),
        (one("tags", ["sail", "air"], FilterOperator.ANY), {"a"}),
        (one("tags", ["sea", "sail"], FilterOperator.ALL), {"a"}),
        (one("city", "Rom", FilterOperator.TEXT_MATCH), {"c"}),
        (one("city", "rom", FilterOperator.TEXT_MATCH), set()),
        (one("city", "rom", FilterOperator.TEXT_MATCH_INSENSITIVE), {"c"}),
        (one("city", "0%", FilterOperator.TEXT_MATCH), {"c"}),
        (one("city", "P_r", FilterOperator.TEXT_MATCH), set()),
        (one("city", None, FilterOperator.IS_EMPTY), {"a", "b"}),
        (one("' OR true --", "x"), set()),
        (
            MetadataFilters(filters=[*one("year", 2010).filters, *one("city", "Paris").filters]),
            {"d"},
        ),
        (
            MetadataFilters(
                filters=[*one("year", 2001).filters, *one("city", "Paris").filters], condition=FilterCondition.OR
            ),
            {"a", "d"},
        ),
        (
            MetadataFilters(
                filters=[*one("year", 2001).filters, *one("city", "Paris").filters], condition=FilterCondition.NOT
            ),
            {"b", "c"},
        ),
        (MetadataFilters(filters=[one("year", 2010), one("city", "Paris")]), {"d"}),
        (MetadataFilters(filters=[]), {"a", "b", "c", "d"}),
    ],
)
def test_filters(asker_dsn: str, filters: MetadataFilters, found: set[str]) -> None:
    store = MlRagVectorStore(asker_dsn, "public.nodes")
    store.add(nodes())
    assert ids(store, filters=filters) == found
    store.close()


def test_a_query_is_limited_to_documents_and_nodes(store: MlRagVectorStore) -> None:
    assert ids(store, doc_ids=["doc-1"]) == {"a", "b"}
    assert ids(store, node_ids=["b", "c", "x"]) == {"b", "c"}
    assert ids(store, doc_ids=["doc-1"], node_ids=["b", "c"], filters=one("year", 2005)) == {"b"}
    assert ids(store, doc_ids=[], node_ids=[]) == set(TEXTS)


def test_modes(store: MlRagVectorStore) -> None:
    assert ids(store, "Rome house", mode=VectorStoreQueryMode.TEXT_SEARCH) == {"d"}
    assert ids(store, "Rome house", mode=VectorStoreQueryMode.SPARSE) == {"d"}
    for alpha in (None, 0.0, 1.0):
        result = store.query(asked("house", 4, mode=VectorStoreQueryMode.HYBRID, alpha=alpha))
        assert (result.ids or [""])[0] == "d"
        assert all(0 <= score <= 1 for score in result.similarities or [-1])
    with pytest.raises(ValueError, match="mode 'mmr'"):
        store.query(asked("boat", mode=VectorStoreQueryMode.MMR))


def test_adding_again_replaces(store: MlRagVectorStore) -> None:
    store.add([node("a", "grey boat", "doc-1", {"year": 1})])
    assert len(ids(store)) == 4
    (found,) = store.query(asked("grey boat", 1)).nodes or []
    assert (found.node_id, found.get_content(), found.metadata) == ("a", "grey boat", {"year": 1})
    assert store.add([]) == []


def test_a_node_that_is_added_again_is_of_the_document_that_it_has_now(store: MlRagVectorStore) -> None:
    store.add([node("a", "grey boat", "doc-2", {}), node("b", "blue boat", "doc-1", {})])
    assert ids(store, "grey", mode=VectorStoreQueryMode.TEXT_SEARCH) == {"a"}
    store.delete("doc-1")
    assert ids(store) == {"a", "c", "d"}
    store.delete("doc-2")
    assert ids(store) == {"d"}
    assert ids(store, "grey", mode=VectorStoreQueryMode.TEXT_SEARCH) == set()
    # one without a document stays where it is
    store.add([TextNode(id_="d", text="house", embedding=fake_embedding("house"))])
    store.delete("doc-3")
    assert ids(store) == set()


@pytest.mark.parametrize("dimensions", [None, 16])
def test_several_processes_make_one_store_and_add_to_one_document(asker_dsn: str, dimensions: int | None) -> None:
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: MlRagVectorStore(asker_dsn, "public.shared", dimensions), range(6)))
        added = [[node(f"{n} {k}", "boat", "doc", {}) for k in range(5)] for n in range(6)]
        list(pool.map(MlRagVectorStore.add, stores, added))
    # the nodes of each call are neighbours
    found = [one.node_id for one in stores[0].get_nodes()]
    assert len(found) == 30
    assert all(found[n : n + 5] == [one.node_id for one in added[int(found[n][0])]] for n in range(0, 30, 5))
    for one in stores:
        one.close()


def test_deleting(store: MlRagVectorStore) -> None:
    store.delete("doc-1")
    store.delete("no such document")
    assert ids(store) == {"c", "d"}
    store.delete_nodes()
    store.delete_nodes(filters=MetadataFilters(filters=[]))
    with pytest.raises(ValueError, match="has no filter"):
        store.delete_nodes(filters=MetadataFilters(filters=[MetadataFilters(filters=[])]))
    assert ids(store) == {"c", "d"}
    store.delete_nodes(["c", "x"], filters=one("year", 2001))
    assert ids(store) == {"c", "d"}
    store.delete_nodes(("c",), filters=MetadataFilters(filters=[]))
    # not those without the key, nor all
    for wrong in (one("owner", None), MetadataFilters(filters=[MetadataFilters(filters=[one("owner", None)])])):
        with pytest.raises(ValueError, match="IS_EMPTY"):
            store.delete_nodes(filters=wrong)
    # nor all of them when a list happens to be empty
    for wrong in (one("owner", [], FilterOperator.ALL), one("year", [], FilterOperator.NIN)):
        with pytest.raises(ValueError, match="has no value"):
            store.delete_nodes(filters=wrong)
    with pytest.raises(ValueError, match="matches any text"):
        store.delete_nodes(filters=one("city", "", FilterOperator.TEXT_MATCH))
    assert ids(store) == {"d"}
    store.delete_nodes(filters=one("city", "Paris"))
    assert ids(store) == set()


def test_what_is_no_list_of_ids_deletes_nothing(store: MlRagVectorStore) -> None:
    everything, boats = ids(store), one("year", 2001)
    for call, said in (
        (lambda: store.delete_nodes("ab"), "expected a list of texts, got the text 'ab'"),
        (lambda: store.get_nodes("ab"), "expected a list of texts"),
        (lambda: store.delete_nodes(["a"], filter=boats), "delete_nodes has no argument 'filter'; did you mean 'filt"),
        (lambda: store.delete("doc-1", filters=boats), "delete has no argument 'filters'; there are ref_doc_id"),
        (lambda: store.query(asked("boat"), filters=boats), "query has no argument 'filters'"),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert said in str(caught.value)
    assert ids(store) == everything


def test_filters_of_the_store_hold_for_all_methods(store: MlRagVectorStore, asker_dsn: str) -> None:
    options = {"filters": {"year": {"gte": 2005}}}
    late = MlRagVectorStore(asker_dsn, "public.nodes", store.embed_dim, options)
    assert {n.node_id for n in late.get_nodes()} == {"b", "c", "d"}
    assert [n.node_id for n in late.get_nodes(["c", "a"])] == ["c"]
    nested = MetadataFilters(filters=[one("year", 2010), one("city", "Paris")])
    assert [n.node_id for n in late.get_nodes(filters=nested)] == ["d"]
    with pytest.raises(MlRagError, match="1 of 1 texts have the ids"):
        late.add([node("a", "theirs", "doc-1", {"year": 2020})])
    late.delete("doc-1")
    late.delete_nodes(["a"])
    assert ids(store) == {"a", "c", "d"}
    late.delete_nodes(filters=nested)
    assert ids(store) == {"a", "c"}
    late.clear()
    assert ids(store) == {"a"}
    late.close()


def test_tenants_of_one_table_have_documents_of_one_name(db: Database, asker_dsn: str, tenant_dsn: str) -> None:
    """Kept apart by policies, none sees that another one has a document of the name, nor keeps it from having one."""
    db.connect().execute(
        "SELECT ml_rag.create_store('public.papers'); ALTER TABLE papers ADD id text UNIQUE,"
        " ADD tenant name NOT NULL DEFAULT current_user; ALTER TABLE papers ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY tenant ON papers USING (tenant = current_user);"
        "GRANT SELECT, INSERT, UPDATE, DELETE ON papers TO ml_rag_user"
    )
    first, second = (MlRagVectorStore(dsn, "public.papers") for dsn in (asker_dsn, tenant_dsn))
    for store, name in ((first, "a"), (second, "b"), (first, "c"), (second, "d")):
        store.add([node(f"{name}{n}", f"{name} {n}", "handbook.pdf", {}) for n in range(2)])
    assert [n.node_id for n in first.get_nodes()] == ["a0", "a1", "c0", "c1"]
    assert [n.node_id for n in second.get_nodes()] == ["b0", "b1", "d0", "d1"]
    second.delete("handbook.pdf")
    assert len(first.get_nodes()) == 4
    assert second.get_nodes() == []
    first.close()
    second.close()


def test_getting_and_clearing(store: MlRagVectorStore) -> None:
    assert [n.node_id for n in store.get_nodes(["c", "x", "a"])] == ["c", "a"]
    assert {n.node_id for n in store.get_nodes(filters=one("tags", "sea", FilterOperator.CONTAINS))} == {"a", "b"}
    assert {n.node_id for n in store.get_nodes()} == set(TEXTS)
    store.clear()
    assert store.get_nodes() == []


async def test_async(store: MlRagVectorStore) -> None:
    await store.async_add([node("e", "grey boat", "doc-5", {})])
    results = await asyncio.gather(*(store.aquery(asked(f"{color} boat", 1)) for color in ("red", "blue", "grey") * 3))
    assert [result.ids for result in results] == [["a"], ["b"], ["e"]] * 3
    assert [n.node_id for n in await store.aget_nodes(["e"])] == ["e"]
    await store.adelete("doc-5")
    await store.adelete_nodes(["a"])
    assert {n.node_id for n in await store.aget_nodes()} == {"b", "c", "d"}
    await store.aclear()
    assert await store.aget_nodes() == []


async def test_a_task_that_is_cancelled_gives_its_connection_back(
    store: MlRagVectorStore, asker_dsn: str, cancel: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    retriever = MlRagRetriever(asker_dsn, {"vector_store": ["public.nodes"]} if store.embed_dim is None else {})
    calls = (
        lambda: store.aquery(asked("red boat")),
        lambda: store.async_add([node("e", "raft", "doc-5", {})]),
        lambda: store.adelete("doc-1"),
        lambda: store.adelete_nodes(["a"]),
    )
    await cancel("nodes", *calls)
    await cancel("nodes", store.aget_nodes, store.aclear)
    if store.embed_dim is None:
        await cancel("nodes", *[lambda: retriever.aretrieve("red boat")] * 4)
    assert {one.node_id for one in await store.aget_nodes()} == set(TEXTS)
    retriever.close()


def test_nodes_of_a_document_are_neighbours(asker_dsn: str) -> None:
    store = MlRagVectorStore(asker_dsn, "public.nodes")
    store.add(nodes())
    retriever = MlRagRetriever(asker_dsn, {"n_citations": 1, "retrieval_options": {"segment_overlap": 1}})
    (found,) = retriever.retrieve("blue boat")
    assert found.node.get_content().split() == ["red", "boat", "blue", "boat"]
    assert found.score == pytest.approx(1, abs=1e-4)
    retriever.close()
    store.close()


def test_a_document_that_is_read_from_end_to_end_has_no_score(asker_dsn: str) -> None:
    options = {"vector_store": ["public.nodes"], "document_name": ["doc-1"]}
    store = MlRagVectorStore(asker_dsn, "public.nodes", options={"document_name": ["doc-1"]})
    store.add(nodes())
    retriever = MlRagRetriever(asker_dsn, options)
    assert [hit.score for hit in retriever.retrieve("Summarize the document.")] == [0]
    result = store.query(VectorStoreQuery(query_str="Summarize the document.", similarity_top_k=5))
    assert result.similarities == [0]
    retriever.close()
    store.close()


def test_an_index_of_llama_index(asker_dsn: str) -> None:
    store = MlRagVectorStore(asker_dsn, "public.nodes", 8)
    index = VectorStoreIndex.from_vector_store(store, embed_model=MockEmbedding(embed_dim=8))
    made = nodes()
    for one_of_them in made:
        one_of_them.embedding = None
    index.insert_nodes(made)
    assert {hit.node_id for hit in index.as_retriever(similarity_top_k=10).retrieve("boat")} == set(TEXTS)
    index.delete_ref_doc("doc-1")
    assert {hit.node_id for hit in index.as_retriever(similarity_top_k=10).retrieve("boat")} == {"c", "d"}
    store.close()


def test_where_the_database_embeds_queries_are_texts(asker_dsn: str) -> None:
    store = MlRagVectorStore(asker_dsn, "public.nodes")
    store.add(nodes())
    index = VectorStoreIndex.from_vector_store(store, embed_model=MockEmbedding(embed_dim=1))
    (hit,) = index.as_retriever(similarity_top_k=1).retrieve("blue boat")
    assert (hit.node_id, hit.score) == ("b", pytest.approx(1, abs=1e-4))
    store.close()


def test_rights_are_those_of_the_role(asker_dsn: str, tenant_dsn: str) -> None:
    store = MlRagVectorStore(asker_dsn, "public.nodes")
    store.add(nodes())
    store.close()
    with psycopg.connect(asker_dsn, autocommit=True) as owner, psycopg.connect(tenant_dsn) as other:
        owner.execute("GRANT SELECT ON nodes TO ml_rag_user")
        owner.execute("ALTER TABLE nodes ENABLE ROW LEVEL SECURITY")
        owner.execute(f"CREATE POLICY seen ON nodes TO {other.info.user} USING (id <> 'a')")
    theirs = MlRagVectorStore(tenant_dsn, "public.nodes")
    assert ids(theirs, "red boat") == {"b", "c", "d"}
    assert {n.node_id for n in theirs.get_nodes()} == {"b", "c", "d"}
    with error("42501", ours=False):
        theirs.add([node("e", "x", "doc-9", {})])
    with error("42501", ours=False):
        theirs.delete("doc-1")
    assert tenant_dsn not in repr(theirs)
    theirs.close()


def test_an_argument_that_there_is_not_is_refused(asker_dsn: str) -> None:
    with pytest.raises(TypeError, match="MlRagRetriever has no argument 'option'; did you mean 'options'"):
        MlRagRetriever(asker_dsn, option={})
    with pytest.raises(TypeError, match="MlRagVectorStore has no argument 'embed_dims'; did you mean 'embed_dim'"):
        MlRagVectorStore(asker_dsn, "public.nodes", embed_dims=16)
    MlRagRetriever(asker_dsn, verbose=False).close()


@pytest.mark.parametrize(("key", "expected"), [("id", {"document_id": 1}), ("id, shop", {"id": 1, "shop": 2})])
def test_a_hit_of_a_table_carries_the_key_of_its_row(
    db: Database, asker_dsn: str, key: str, expected: dict[str, int]
) -> None:
    owner = db.connect()
    owner.execute(f"CREATE TABLE items (id integer, shop integer, title text, PRIMARY KEY ({key}))")
    owner.execute("INSERT INTO items VALUES (1, 2, 'red boat')")
    options = '{"columns": ["title"], "embed_model_id": "fake-embed"}'
    owner.execute("SELECT ml_rag.create_vectorizer('items', %s)", (options,))
    owner.execute("CALL ml_rag.run_vectorizer('items')")
    owner.execute("GRANT SELECT ON items TO ml_rag_user")
    retriever = MlRagRetriever(asker_dsn, {"vector_store": ["public.items"]})
    (hit,) = retriever.retrieve("red boat")
    assert expected.items() <= hit.node.metadata.items()
    retriever.close()


def test_the_retriever_takes_options_and_only_reads(asker_dsn: str) -> None:
    store = MlRagVectorStore(asker_dsn, "public.nodes")
    store.add(nodes())
    named = {"vector_store": ["public.nodes"], "filters": {"/year": {"gte": 2010}}, "n_citations": 5}
    retriever = MlRagRetriever(asker_dsn, named)
    hits = retriever.retrieve("green boat")
    assert [hit.node.get_content() for hit in hits] == ["green boat", "house"]
    assert hits[0].node.metadata["vector_store"] == "public.nodes"
    assert hits[0].node.ref_doc_id == "doc-2"
    nothing = MlRagRetriever(asker_dsn, {"filters": {"/year": 1}})
    assert nothing.retrieve("boat") == []
    wrong = MlRagRetriever(asker_dsn, {"no_such_option": 1})
    with error("22023", "no_such_option"):
        wrong.retrieve("boat")
    with retriever._database.transaction() as connection, error("25006", ours=False):
        connection.execute("CREATE TABLE x ()")
    for one_of_them in (store, retriever, nothing, wrong):
        one_of_them.close()


def test_a_document_that_was_loaded_has_its_title_its_page_and_its_name(db: Database, asker_dsn: str) -> None:
    rows = [("/srv/a.pdf", 7, 1, "red boat", fake_embedding("red boat"))]
    create_store(db.connect(), "public.loaded", rows, "vector(16)")
    made = '{"page": 3, "title": "Boats", "source": {"sha256": "00", "made_with": "11"}}'
    db.connect().execute("UPDATE loaded SET metadata = %s", (made,))
    store, retriever = MlRagVectorStore(asker_dsn, "public.loaded"), MlRagRetriever(asker_dsn)
    (found,) = retriever.retrieve("red boat")
    for node in (found.node, *(store.query(asked("red boat", 1)).nodes or ())):
        assert {**node.metadata, "title": "Boats", "page": 3, "source": "/srv/a.pdf"} == node.metadata
    store.close()
    retriever.close()


def test_rows_that_were_loaded_beside_nodes_have_the_keys_of_segments_as_ids(
    owner: Connection, asker_dsn: str, model_server: str
) -> None:
    store = MlRagVectorStore(asker_dsn, "public.nodes")
    store.add(nodes())
    owner.execute("SELECT ml_rag.load_document('nodes', 'more.md', 'red boat of wood')")
    ((key,),) = owner.execute("SELECT concat(document_id, ':', segment_number) FROM nodes WHERE id IS NULL").fetchall()
    assert set(store.query(asked("boat")).ids or ()) == {*TEXTS, key}
    assert {node.node_id for node in store.get_nodes()} == {*TEXTS, key}
    assert [node.get_content() for node in store.get_nodes([key, "a"])] == ["red boat of wood", "red boat"]
    document = key.partition(":")[0]
    others = [f"{document}:2147483648", f"0{key}", f"{document}:", f"{2**63}:1", f"{document}:2"]
    for wanted in ([key, "b"], [key], ["b"]):
        assert ids(store, node_ids=[*wanted, *others]) == set(wanted)
    assert ids(store, node_ids=others) == set()
    store.delete_nodes([key, "b"])
    assert {node.node_id for node in store.get_nodes()} == TEXTS.keys() - {"b"}
    store.close()


def test_a_query_finds_nodes_of_a_store_without_column_id_by_the_ids_that_it_gives(
    db: Database, asker_dsn: str
) -> None:
    rows = [(f"{n}.txt", n, 1, "red boat", fake_embedding("red boat")) for n in (7, 8)]
    create_store(db.connect(), "public.loaded", rows, "vector(16)")
    db.connect().execute("""UPDATE loaded SET metadata = '{"id": "7:1"}' WHERE document_id = 8""")
    store = MlRagVectorStore(asker_dsn, "public.loaded")
    assert ids(store) == {"7:1", "8:1"}
    assert ids(store, node_ids=["7:1", "x"]) == {"7:1"}
    assert ids(store, node_ids=["x"]) == set()
    store.close()


@pytest.mark.parametrize(
    ("kind", "value"), [("bigint", "5"), ("uuid", "53a31e27-2f42-45a9-8403-8b26db8c278d"), (None, "")]
)
def test_a_query_finds_rows_by_their_keys_beside_ids_of_each_type(
    db: Database, asker_dsn: str, kind: str | None, value: str
) -> None:
    rows = [(f"{n}.txt", n, 1, "red boat", fake_embedding("red boat")) for n in (7, 8)]
    create_store(db.connect(), "public.loaded", rows, "vector(16)")
    wanted = {"7:1"}
    if kind is not None:
        db.connect().execute(f"ALTER TABLE loaded ADD id {kind}")
        db.connect().execute(f"UPDATE loaded SET id = '{value}' WHERE document_id = 8")
        wanted.add(value)
    store = MlRagVectorStore(asker_dsn, "public.loaded")
    assert ids(store, node_ids=list(wanted)) == wanted
    assert ids(store, node_ids=["7:1", "9:1"]) == {"7:1"}
    many = [f"{document}:1" for document in range(100, 1200)]
    assert ids(store, node_ids=[*many, *wanted]) == wanted
    store.close()


@pytest.mark.parametrize("content", ["text", "image", "not JSON"])
def test_a_store_that_was_not_named_gives_texts(db: Database, asker_dsn: str, content: str) -> None:
    """Metadata of anybody's store can say that it is a node: an image, a link, one that fails."""
    planted: BaseNode = TextNode(id_="x", text="planted")
    if content == "image":
        planted = ImageNode(id_="x", image_path="/etc/passwd", image_url="http://127.0.0.1/")
    metadata = {**node_to_metadata_dict(planted, remove_text=True), "year": 2020}
    if content == "not JSON":
        metadata["_node_content"] = content
    create_store(
        db.connect(), "public.planted", [("p.txt", 1, 1, "red boat", fake_embedding("red boat"))], "vector(16)"
    )
    db.connect().execute("UPDATE planted SET metadata = %s", (Jsonb(metadata),))
    retriever = MlRagRetriever(asker_dsn)
    (found,) = retriever.retrieve("red boat")
    retriever.close()
    assert type(found.node) is TextNode
    assert found.node.text == "red boat"
    assert found.node.node_id != "x"
    assert found.node.metadata["year"] == 2020
    assert not any(name.startswith("_node") for name in found.node.metadata)


@pytest.mark.parametrize("kind", ["image", "link"])
def test_a_document_that_was_loaded_is_a_text_whatever_it_says_of_itself(
    owner: Connection, asker_dsn: str, model_server: str, kind: str
) -> None:
    """Its front matter can say that it is an image, which would be fetched, or a link to another text."""
    planted: BaseNode = IndexNode(id_="x", index_id="any", obj="planted")
    if kind == "image":
        planted = ImageNode(id_="x", image_path="/etc/passwd", image_url="http://127.0.0.1/")
    own = ("id_", "index_id", "obj", "image_path", "image_url")
    says = json.dumps({name: value for name, value in planted.dict().items() if name in own})
    front = f"_node_type: {planted.class_name()}\n_node_content: '{says}'\nyear: 2020"
    owner.execute("SELECT ml_rag.create_store('public.loaded'); GRANT SELECT ON loaded TO ml_rag_user")
    owner.execute("SELECT ml_rag.load_document('loaded', 'planted.md', %s)", (f"---\n{front}\n---\nred boat".encode(),))
    retriever = MlRagRetriever(asker_dsn, {"vector_store": ["public.loaded"]})
    store = MlRagVectorStore(asker_dsn, "public.loaded")
    found = [hit.node for hit in retriever.retrieve("red boat")]
    found += [*(store.query(asked("red boat", 1)).nodes or ()), *store.get_nodes()]
    retriever.close()
    store.close()
    assert [(type(node), node.get_content(), node.metadata["year"]) for node in found] == [
        (TextNode, "red boat", 2020)
    ] * 3
    assert not any(node.node_id == "x" or name.startswith("_node") for node in found for name in node.metadata)


def test_a_node_has_the_id_of_its_row(db: Database, store: MlRagVectorStore) -> None:
    """Whatever its content says: a role that may write rows could write another row's."""
    db.connect().execute(
        "UPDATE nodes SET metadata = (SELECT o.metadata FROM nodes AS o WHERE o.id = 'a') WHERE id IN ('b', 'c')"
    )
    assert {n.node_id: n.get_content() for n in store.get_nodes()} == {key: text for key, (text, *_) in TEXTS.items()}
    result = store.query(asked("boat"))
    assert [n.node_id for n in result.nodes or ()] == result.ids


#: what a node can say of itself that fails only when it is shown, or takes memory without end
UNUSABLE = (
    '{"text_template": "{nope}"}', '{"text_template": "{content:>999999999}"}', '{"text_template": "{"}',
    '{"text_template": "{content}{content}"}', '{"metadata_template": "{key.x}"}', '{"metadata_template": "{value!a}"}',
    '{"relationships": {"1": [{"node_id": "x"}]}}', '{"relationships": {"5": {"node_id": "x"}}}',
    *(
        pytest.param(json.dumps({"metadata": {str(n): n for n in range(1000)}, name: text}), id=name)
        for name, text in {"metadata_seperator": "x" * 1000, "metadata_template": "x" * 1000 + "{value}"}.items()
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "content", ["no JSON", "[1]", '{"embedding": "x"}', "null", 7, {"id_": "x"}, "[" * 100_000, *UNUSABLE]
)
def test_a_node_that_cannot_be_read_is_a_text(db: Database, asker_dsn: str, content: Any) -> None:
    store = MlRagVectorStore(asker_dsn, "public.nodes")
    store.add(nodes())
    owner = db.connect()
    owner.execute(
        "UPDATE nodes SET metadata = metadata || jsonb_build_object('_node_content', %s::jsonb) WHERE id = 'a'",
        (Jsonb(content),),
    )
    owner.execute("UPDATE nodes SET metadata = '[1]' WHERE id = 'b'")
    found = {node.node_id: node for node in store.get_nodes()}
    assert set(found) == set(TEXTS)
    assert (found["a"].get_content(), found["a"].metadata["year"]) == ("red boat", 2001)
    assert not any(name.startswith("_node") for name in found["a"].metadata)
    assert found["b"].metadata == {}
    assert set(store.query(asked("boat", 4)).ids) == set(TEXTS)
    assert {node.node_id for node in store.get_nodes(filters=one("year", 2001, FilterOperator.NE))} >= {"b"}
    store.close()
