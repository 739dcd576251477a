"""LlamaIndex: a vector store and a retriever. Needs ``pip install ".[llama-index]"``.

A node is a segment; the nodes of one source document are one document of the store, in the order in which they came.
Async methods run the others in threads, each on a connection of its own; a task that is cancelled ends its statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, Node, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from ml_rag.integrations.database import Database, asked, citation_id, in_thread, is_loaded, keys_of, with_source
from ml_rag.integrations.names import refuse_unknown
from ml_rag.integrations.store import NO_WORDS, Row, Store, narrowed, number, path

#: how each mode of a query is searched
_MODES: dict[VectorStoreQueryMode, dict[str, Any]] = {
    VectorStoreQueryMode.DEFAULT: {},
    VectorStoreQueryMode.HYBRID: {"keyword_search": True},
    VectorStoreQueryMode.SPARSE: {"semantic_search": False, "keyword_search": True},
    VectorStoreQueryMode.TEXT_SEARCH: {"semantic_search": False, "keyword_search": True},
}
#: operators that option filters has under another name
_OPERATORS = {
    FilterOperator.EQ: "eq", FilterOperator.NE: "ne", FilterOperator.GT: "gt", FilterOperator.GTE: "gte",
    FilterOperator.LT: "lt", FilterOperator.LTE: "lte", FilterOperator.IN: "in", FilterOperator.NIN: "nin",
    FilterOperator.ANY: "in", FilterOperator.CONTAINS: "eq",
}  # fmt: skip
#: keys of the metadata that hold a node's name in citations, the first that is there
_NAMES = ("file_path", "file_name", "source", "url")
#: arguments of LlamaIndex's retrievers, beside the first two of ours
_RETRIEVER = ("dsn", "options", "callback_manager", "object_map", "objects", "verbose")
#: of a hit, what stands in the metadata of its node: an integer key of a row is its document_id
_OF_ROW = ("vector_store", "document_name", "document_id")
#: keys of the metadata that hold a whole node
_OF_NODES = ("_node_content", "_node_type")
#: characters that template and separator put between the metadata of a node where it is shown
_MOST_BETWEEN = 1_000_000


def filters(given: MetadataFilters) -> dict[str, Any]:
    """Metadata filters as option ``filters``. Raises ValueError where an operator has no counterpart."""
    parts = [filters(one) if isinstance(one, MetadataFilters) else _condition(one) for one in given.filters]
    condition = given.condition or FilterCondition.AND
    if condition == FilterCondition.NOT:
        return {"not": {"or": parts}}
    return {condition.value: parts}


def _conditions(given: MetadataFilters | None) -> list[dict[str, Any]]:
    """The conditions of option ``filters`` that metadata filters are; none where these have none."""
    return [filters(given)] if given is not None and given.filters else []


def _refuse_open(given: MetadataFilters) -> None:
    """Raise ValueError for what many nodes pass that a caller may not mean: an empty group, list or text to match, a
    value that is None."""
    for one in given.filters:
        if isinstance(one, MetadataFilters):
            if not one.filters:
                raise ValueError("a group of filters within another one has no filter")
            _refuse_open(one)
        elif one.operator in (FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE) and one.value == "":
            raise ValueError(f"the filter of {one.key!r} matches any text")
        elif one.value in (None, []) and one.operator != FilterOperator.IS_EMPTY:
            raise ValueError(f"the filter of {one.key!r} has no value; operator IS_EMPTY finds nodes without that key")


def _condition(one: MetadataFilter) -> dict[str, Any]:
    key = path(one.key)
    if one.operator in _OPERATORS:
        return {key: {_OPERATORS[one.operator]: one.value}}
    if one.operator == FilterOperator.ALL and isinstance(one.value, list):
        return {"and": [{key: {"exists": True}}, *({key: value} for value in one.value)]}
    if one.operator == FilterOperator.IS_EMPTY:
        return {"or": [{key: {"exists": False}}, {key: ""}]}
    if one.operator in (FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE) and isinstance(
        one.value, str
    ):
        text = one.value.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        return {key: {"like" if one.operator == FilterOperator.TEXT_MATCH else "ilike": f"%{text}%"}}
    raise ValueError(f"operator {one.operator.value!r} with {one.value!r} has no counterpart in ml_rag")


class MlRagVectorStore(BasePydanticVectorStore):
    """A vector store of ml_rag: ``MlRagVectorStore(dsn, "schema.table")``, made where it is not there.

    ``embed_dim``: dimensions of the vectors that LlamaIndex makes; without it the database embeds, and the vectors of
    nodes and queries are not looked at. ``options``: of ``ml_rag``, for each query; those that leave rows out, such as
    ``filters``, count for the other methods, too.
    """

    stores_text: bool = True
    flat_metadata: bool = False
    store: str
    embed_dim: int | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - a field, which pydantic copies
    _database: Database = PrivateAttr()
    _store: Store = PrivateAttr()

    def __init__(
        self,
        dsn: str,
        store: str,
        embed_dim: int | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_unknown(kwargs, type(self).model_fields, type(self).__name__)
        super().__init__(
            store=store,
            embed_dim=embed_dim,
            options=dict(options or {}),
            is_embedding_query=embed_dim is not None,
            **kwargs,
        )
        self._database = Database(dsn, name="ml_rag llama-index")
        self._store = Store(self._database, store, embed_dim)

    @classmethod
    def class_name(cls) -> str:
        """The name under which LlamaIndex knows it."""
        return "MlRagVectorStore"

    @property
    def client(self) -> Database:
        """The database."""
        return self._database

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes, or replace those whose ids are there; their ids."""
        if nodes:
            self._store.write(self.options, [self._row(node) for node in nodes])
        return [node.node_id for node in nodes]

    def _row(self, node: BaseNode) -> Row:
        names = (node.metadata[key] for key in _NAMES if node.metadata.get(key))
        return Row(
            id=node.node_id,
            name=str(next(names, node.ref_doc_id or node.node_id)),
            text=node.get_content(MetadataMode.NONE),
            metadata=node_to_metadata_dict(node, remove_text=True, flat_metadata=self.flat_metadata),
            document=None if node.ref_doc_id is None else number(node.ref_doc_id),
            vector=None if self.embed_dim is None else node.get_embedding(),
        )

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of a source document. What ``options`` leave out stays, here and below."""
        refuse_unknown(delete_kwargs, ("ref_doc_id",), "delete")
        self._store.delete(self.options, documents=[number(ref_doc_id)])

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes by their ids, by filters or by both; nothing without either. Filters without one are none."""
        refuse_unknown(delete_kwargs, ("node_ids", "filters"), "delete_nodes")
        conditions = _conditions(filters)
        if filters is not None:
            _refuse_open(filters)
        if node_ids is not None or conditions:
            self._store.delete(narrowed(self.options, conditions), ids=node_ids)

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Nodes by their ids, by filters or by both; all without either."""
        return [_stored(row) for row in self._store.rows(narrowed(self.options, _conditions(filters)), node_ids)]

    def clear(self) -> None:
        """Delete all nodes."""
        self._store.delete(self.options)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes that fit best. Modes: default, hybrid, sparse and text_search; ``alpha`` is the semantic weight."""
        refuse_unknown(kwargs, ("query",), "query")
        if query.mode not in _MODES:
            raise ValueError(f"mode {query.mode.value!r} is not one of {', '.join(mode.value for mode in _MODES)}")
        count = query.similarity_top_k
        if query.mode == VectorStoreQueryMode.HYBRID and query.hybrid_top_k is not None:
            count = query.hybrid_top_k
        elif query.mode in (VectorStoreQueryMode.SPARSE, VectorStoreQueryMode.TEXT_SEARCH):
            count = query.sparse_top_k or count
        options = {**self.options, **_MODES[query.mode], "n_citations": count}
        if query.mode == VectorStoreQueryMode.HYBRID and query.alpha is not None:
            options["hybrid_options"] = {**(options.get("hybrid_options") or {}), "semantic_weight": query.alpha}
        conditions = _conditions(query.filters)
        # an index that was made from a store gives an empty list for no limit
        if query.doc_ids:
            conditions.append({"/ref_doc_id": {"in": query.doc_ids}})
        if query.node_ids:
            conditions.append(self._store.among(query.node_ids))
        options = narrowed(options, conditions)
        vector = query.query_embedding if self.embed_dim is not None else None
        rows = self._store.search(query.query_str or NO_WORDS, options, vector) if count else []
        return VectorStoreQueryResult(
            nodes=[_stored(row) for row in rows],
            similarities=[_similarity(row) for row in rows],
            ids=[r["id"] for r in rows],
        )

    async_add, adelete, adelete_nodes = in_thread(add), in_thread(delete), in_thread(delete_nodes)
    aget_nodes, aclear, aquery = in_thread(get_nodes), in_thread(clear), in_thread(query)

    def create_index(self) -> None:
        """Build the approximate index (hnsw) unless it is there: after the first large load."""
        self._store.index(str(self.options.get("distance_metric", "COSINE")))

    def close(self) -> None:
        """End the connections."""
        self._database.close()


def _stored(row: Mapping[str, Any]) -> BaseNode:
    """A row of the store as a node with its id: its metadata could name another row's."""
    node = _node(row)
    node.id_ = row["id"]
    return node


def _node(row: Mapping[str, Any]) -> BaseNode:
    """A row as a node: that of its metadata, if these hold one. A document that was loaded can say so of itself, and
    would be an image to fetch, or another text."""
    metadata = keys_of(row["metadata"])
    if is_loaded(metadata):
        metadata = with_source(_without_node(metadata), row["document_name"])
    if "_node_content" in metadata:
        try:
            return _usable(metadata_dict_to_node(metadata, text=row["segment"]))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            metadata = _without_node(metadata)
    return TextNode(id_=row["id"], text=row["segment"], metadata=metadata)


def _usable(node: BaseNode) -> BaseNode:
    """The node. Raises ValueError if LlamaIndex could not show it or its relations, or only with memory without end."""
    templates = [(node.metadata_template, {"key", "value"})]
    if isinstance(node, TextNode | Node):
        templates.append((node.text_template, {"metadata_str", "content"}))
    for template, known in templates:
        for _, name, spec, conversion in Formatter().parse(template):
            if name is not None and (name not in known or spec or conversion):
                raise ValueError(f"the template has a field {name!r} that nothing fills in")
            known.discard(name or "")
    if (len(node.metadata_template) + len(node.metadata_separator)) * len(node.metadata) > _MOST_BETWEEN:
        raise ValueError("the template and the separator of the metadata are too long for its keys")
    _ = (node.source_node, node.prev_node, node.next_node, node.parent_node, node.child_nodes)
    return node


def _without_node(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name not in _OF_NODES}


def _similarity(row: Mapping[str, Any]) -> float:
    """The score of the last stage that made one: reranking, fusing, keyword search, or 1 - distance.

    0 of what was not searched for: a document that is read from end to end."""
    for score in ("rerank_score", "score", "keyword_score"):
        if row[score] is not None:
            return float(row[score])
    return 0.0 if row["distance"] is None else 1.0 - float(row["distance"])


class MlRagRetriever(BaseRetriever):
    """What ``ml_rag_search`` finds, in a read-only transaction. ``options``: all of ``ml_rag``."""

    def __init__(self, dsn: str, options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        refuse_unknown(kwargs, _RETRIEVER, type(self).__name__)
        self._options = dict(options or {})
        self._database = Database(dsn, name="ml_rag llama-index", read_only=True)
        super().__init__(**kwargs)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query = asked(query_bundle.query_str, self._options)
        return [
            NodeWithScore(node=_found(row, self._options.get("vector_store") or ()), score=_similarity(row))
            for row in self._database.found(self._database.schemas.search, query)
        ]

    _aretrieve = in_thread(_retrieve)

    def close(self) -> None:
        """End the connections."""
        self._database.close()


def _found(row: Mapping[str, Any], named: Sequence[str]) -> BaseNode:
    """A row as a node: of a named store the one that LlamaIndex wrote; in others any role may have written it.

    A node can be an image, a link to another one, or an object that a retriever continues with.
    """
    metadata = keys_of(row["metadata"])
    if row["vector_store"] not in named:
        metadata = _without_node(metadata)
    node = _node({**row, "id": citation_id(row), "metadata": metadata})
    node.metadata.update({name: row[name] for name in _OF_ROW if row[name] is not None})
    return node
