"""LangChain: a vector store, a retriever and a chat history. Needs ``pip install ".[langchain]"``.

Async methods run the others in threads, each on a connection of its own; a task that is cancelled ends its statement.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance
from psycopg import sql
from psycopg.types.json import Jsonb
from pydantic import Field, PrivateAttr, model_validator

from ml_rag.errors import MlRagError
from ml_rag.integrations.database import Database, asked, citation_id, in_thread, keys_of, with_source
from ml_rag.integrations.names import refuse_unknown
from ml_rag.integrations.store import NO_WORDS, Row, Store, listed, narrowed, path

#: operators of langchain-postgres, as option filters has them
_OPERATORS = ("eq", "ne", "lt", "lte", "gt", "gte", "in", "nin", "between", "exists", "like", "ilike")
#: citations of a call
_MOST = 100
#: what a search measures, null in rows where it does not
_MEASURED = ("distance", "keyword_score", "score", "rerank_score")
#: arguments of searches
_SEARCH = ("k", "filter", "options")
_MARGINAL = (*_SEARCH, "fetch_k", "lambda_mult")
#: those of adding; the last one is given by LangChain's indexing
_ADD = ("metadatas", "ids", "batch_size")


def filters(given: Mapping[str, Any]) -> dict[str, Any]:
    """A filter as langchain-postgres has it as option ``filters``. Keys are those of the metadata.

    Raises ValueError where a key or an operator is none of its.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"a filter is a dict, not {given!r}")
    conditions: list[dict[str, Any]] = []
    for key, value in given.items():
        if key in ("$and", "$or"):
            if not isinstance(value, list):
                raise ValueError(f"{key} takes a list of filters")
            conditions.append({key[1:]: [filters(one) for one in value]})
        elif key == "$not":
            conditions.append(
                {"not": {"and": [filters(one) for one in value]} if isinstance(value, list) else filters(value)}
            )
        elif key.startswith("$"):
            raise ValueError(f"unknown operator {key}; there are $and, $or and $not between conditions")
        else:
            conditions.append({path(key): _operators(key, value)})
    return conditions[0] if len(conditions) == 1 else {"and": conditions}


def _operators(key: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    unknown = [name for name in value if name not in {f"${operator}" for operator in _OPERATORS}]
    if unknown or not value:
        raise ValueError(f"unknown operator {unknown} for {key!r}; there are {', '.join(f'${o}' for o in _OPERATORS)}")
    return {name[1:]: operand for name, operand in value.items()}


class MlRagVectorStore(VectorStore):
    """A vector store of ml_rag.

    ``store``: ``"schema.table"``, made where it is not there. ``embedding``: embeds in this process; without one the
    database embeds. ``options``: of ``ml_rag``, for each search, such as ``{"keyword_search": True}``.
    """

    def __init__(
        self,
        dsn: str,
        store: str,
        embedding: Embeddings | None = None,
        *,
        distance_metric: str = "COSINE",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._embedding = embedding
        self._options = dict(options or {})
        self._distance_metric = str(self._options.get("distance_metric") or distance_metric)
        self._database = Database(dsn, name="ml_rag langchain")
        dimensions = None if embedding is None else len(embedding.embed_query("dimensions"))
        self._store = Store(self._database, store, dimensions)

    @property
    def embeddings(self) -> Embeddings | None:
        """What embeds in this process."""
        return self._embedding

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, or replace those whose ids are there; their ids."""
        refuse_unknown(kwargs, _ADD, "add_texts")
        texts = listed(texts) or []
        metadatas = metadatas or [{} for _ in texts]
        keys = [str(uuid.uuid4()) if key is None else key for key in (listed(ids) or [None] * len(texts))]
        if not len(texts) == len(metadatas) == len(keys):
            raise ValueError(f"{len(texts)} texts, {len(metadatas)} metadatas and {len(keys)} ids do not go together")
        vectors = [None] * len(texts) if self._embedding is None else self._embedding.embed_documents(texts)
        if texts:
            self._store.write(
                self._options,
                [
                    Row(key, str(metadata.get("source", key)), text, metadata, vector=vector)
                    for key, text, metadata, vector in zip(keys, texts, metadatas, vectors, strict=True)
                ],
            )
        return keys

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete the documents of these ids; None: all. What the store's options leave out stays."""
        refuse_unknown(kwargs, ("ids",), "delete")
        self._store.delete(self._options, ids=ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents of these ids that there are, in their order, but for what the store's options leave out."""
        return [_document(row) for row in self._store.rows(self._options, ids)]

    def _search(
        self,
        query: str,
        k: int,
        filter: Mapping[str, Any] | None,
        options: Mapping[str, Any] | None,
        vector: Sequence[float] | None = None,
        *,
        is_marginal: bool = False,
    ) -> list[dict[str, Any]]:
        _check_count("fetch_k" if is_marginal else "k", k, 0)
        if k == 0:
            return []
        if vector is None and self._embedding is not None:
            vector = self._embedding.embed_query(query)
        own = self._database.laid(self._options, options)
        wanted = {"distance_metric": self._distance_metric, **own, "n_citations": k}
        wanted = narrowed(wanted, [filters(filter)] if filter else [])
        return self._store.search(query, wanted, vector, with_embedding=is_marginal)

    def similarity_search(
        self,
        query: str,
        k: int = 4,
        filter: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """The ``k`` best documents. ``options``: of ``ml_rag``, over those of the store."""
        refuse_unknown(kwargs, _SEARCH, "similarity_search")
        return [_document(row) for row in self._search(query, k, filter, options)]

    def similarity_search_with_score(
        self,
        query: str,
        k: int = 4,
        filter: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[tuple[Document, float]]:
        """The same, each with its distance: the smaller, the nearer; infinite where it has none."""
        refuse_unknown(kwargs, _SEARCH, "similarity_search_with_score")
        return [(_document(row), _distance(row)) for row in self._search(query, k, filter, options)]

    def similarity_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        filter: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """The documents nearest to a vector."""
        refuse_unknown(kwargs, _SEARCH, "similarity_search_by_vector")
        return [_document(row) for row in self._search(NO_WORDS, k, filter, options, embedding)]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        if self._distance_metric in ("COSINE", "DOT"):
            return lambda distance: 1.0 - distance
        return lambda distance: 1.0 / (1.0 + distance)

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """``k`` of the ``fetch_k`` best documents that are near to the query and far from each other."""
        refuse_unknown(kwargs, _MARGINAL, "max_marginal_relevance_search")
        if self._embedding is None:
            vector = json.loads(self._store.embedded(query))
        else:
            vector = self._embedding.embed_query(query)
        rows = self._search(query, fetch_k, filter, options, vector, is_marginal=True)
        return _marginal(rows, vector, k, lambda_mult)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """The same by a vector."""
        refuse_unknown(kwargs, _MARGINAL, "max_marginal_relevance_search_by_vector")
        rows = self._search(NO_WORDS, fetch_k, filter, options, embedding, is_marginal=True)
        return _marginal(rows, embedding, k, lambda_mult)

    aadd_texts, adelete, aget_by_ids = in_thread(add_texts), in_thread(delete), in_thread(get_by_ids)
    asimilarity_search = in_thread(similarity_search)
    asimilarity_search_with_score = in_thread(similarity_search_with_score)
    asimilarity_search_by_vector = in_thread(similarity_search_by_vector)
    amax_marginal_relevance_search = in_thread(max_marginal_relevance_search)
    amax_marginal_relevance_search_by_vector = in_thread(max_marginal_relevance_search_by_vector)

    def create_index(self) -> None:
        """Build the approximate index (hnsw) unless it is there: after the first large load."""
        self._store.index(self._distance_metric)

    def close(self) -> None:
        """End the connections."""
        self._database.close()

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str | None] | None = None,
        dsn: str = "",
        store: str = "",
        **kwargs: Any,
    ) -> MlRagVectorStore:
        """A store with these texts; ``dsn`` and ``store`` must be given."""
        made = cls(dsn, store, embedding, **kwargs)
        made.add_texts(texts, metadatas, ids=ids)
        return made

    @classmethod
    async def afrom_texts(cls, *arguments: Any, **named: Any) -> MlRagVectorStore:
        """The same, in a thread."""
        made: MlRagVectorStore = await in_thread(cls.from_texts)(cls, *arguments, **named)
        return made


def _check_count(name: str, count: int, least: int) -> None:
    if not least <= count <= _MOST:
        raise ValueError(f"{name} must be from {least} to {_MOST}, not {count}")


def _document(row: Mapping[str, Any]) -> Document:
    metadata = with_source(keys_of(row["metadata"]), row["document_name"])
    return Document(id=row["id"], page_content=row["segment"], metadata=metadata)


def _distance(row: Mapping[str, Any]) -> float:
    """What was found by its words alone, or has a vector of zeros, has none."""
    return math.inf if row["distance"] is None else float(row["distance"])


def _marginal(rows: list[dict[str, Any]], vector: list[float], k: int, lambda_mult: float) -> list[Document]:
    # a vector of zeros is near to nothing, and where there are only such LangChain fails
    found = [(row, embedding) for row in rows if any(embedding := json.loads(row["embedding"] or "[]"))]
    chosen = maximal_marginal_relevance(np.array(vector), [embedding for _, embedding in found], lambda_mult, k)
    return [_document(found[place][0]) for place in chosen]


class MlRagRetriever(BaseRetriever):
    """What ``ml_rag_search`` finds, in a read-only transaction: ``MlRagRetriever(dsn=…, k=5, options={"rerank": {}})``.

    ``options``: all of ``ml_rag``. Both ``k`` and ``options`` can also be given to ``invoke``. The metadata of a
    document is that of its segment, with the other columns of ``ml_rag_search`` beside it.
    """

    #: it may hold a password
    dsn: str = Field(exclude=True, repr=False)
    k: int | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - a field, which pydantic copies
    _database: Database = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            refuse_unknown(given, cls.model_fields, cls.__name__)
        return given

    def model_post_init(self, context: Any, /) -> None:
        """Connect."""
        super().model_post_init(context)
        self._database = Database(self.dsn, name="ml_rag langchain", read_only=True)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        refuse_unknown(kwargs, ("k", "options"), "invoke")
        wanted = self._database.laid(self.options, options)
        count = k if k is not None else self.k
        if count is not None:
            _check_count("k", count, 1)
            wanted["n_citations"] = count
        rows = self._database.found(self._database.schemas.search, asked(query, wanted))
        return [_cited(row) for row in rows]

    _aget_relevant_documents = in_thread(_get_relevant_documents)

    def close(self) -> None:
        """End the connections."""
        self._database.close()


def _cited(row: dict[str, Any]) -> Document:
    key = citation_id(row)
    # a document could give itself the score that it does not have
    own = {name: value for name, value in keys_of(row.pop("metadata")).items() if name not in _MEASURED}
    row = {name: value for name, value in row.items() if value is not None}
    text = row.pop("segment")
    if "distance" in row:
        row["distance"] = float(row["distance"])
    return Document(id=key, page_content=text, metadata={**with_source(own, row.get("document_name")), **row})


_KEEP = """INSERT INTO ml_rag.conversation (conversation_id, role) VALUES (%(id)s, current_user)
ON CONFLICT (role, conversation_id) DO UPDATE SET changed_at = pg_catalog.clock_timestamp()"""
_ANSWER = """UPDATE ml_rag.message AS m
SET text = %(text)s, citations = %(citations)s, created_at = pg_catalog.clock_timestamp()
WHERE m.conversation_id = %(id)s AND m.role = current_user AND m.text IS NULL
  AND CASE WHEN %(asked)s::uuid IS NOT NULL THEN m.message_id = %(asked)s::uuid ELSE m.turn = (
    SELECT max(l.turn) FROM ml_rag.message AS l WHERE l.conversation_id = %(id)s AND l.role = current_user) END"""
_ASK = """INSERT INTO ml_rag.message
  (message_id, conversation_id, role, turn, created_at, query, question, citations, options)
SELECT pg_catalog.gen_random_uuid(), %(id)s, current_user, coalesce(max(m.turn), 0) + 1,
  pg_catalog.clock_timestamp(), %(query)s, %(query)s, '[]', '{}'
FROM ml_rag.message AS m WHERE m.conversation_id = %(id)s AND m.role = current_user
RETURNING message_id AS asked"""


class MlRagChatMessageHistory(BaseChatMessageHistory):
    """A conversation of ``ml_rag_chat``, of the role of the DSN; without an id a new one.

    Questions are its human messages and answers its ai messages; a turn has one of each, or no answer yet. An answer is
    that to the last question of this object, or if it has added none, of the conversation.
    """

    def __init__(self, dsn: str, conversation_id: str | None = None) -> None:
        try:
            self.conversation_id = str(uuid.UUID(conversation_id) if conversation_id else uuid.uuid4())
        except ValueError:
            raise ValueError(
                f"conversation_id must be a UUID, as ml_rag_chat and a new history give it, not {conversation_id!r}"
            ) from None
        self._database = Database(dsn, name="ml_rag langchain")
        self._asked: uuid.UUID | None = None

    @property
    def messages(self) -> list[BaseMessage]:
        """All messages, oldest first; an answer has its citations in ``additional_kwargs``."""
        return self._messages()

    def _messages(self) -> list[BaseMessage]:
        query = sql.SQL(
            "SELECT m.query, m.text, m.citations FROM ml_rag.message AS m"
            " WHERE m.conversation_id = %(id)s AND m.role = current_user ORDER BY m.turn"
        )
        found: list[BaseMessage] = []
        for turn in self._database.rows(query, {"id": self.conversation_id}):
            found.append(HumanMessage(turn["query"]))
            if turn["text"] is not None:
                found.append(AIMessage(turn["text"], additional_kwargs={"citations": turn["citations"]}))
        return found

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add questions and answers. Raises MlRagError for a message of another kind, and an answer to nothing."""
        asked = self._asked
        with self._database.transaction() as connection:
            # the row is locked until the end: one writer at a time
            connection.execute(_KEEP, {"id": self.conversation_id})
            for message in messages:
                turn: dict[str, Any] = {"id": self.conversation_id}
                if isinstance(message, HumanMessage):
                    (asked,) = (row["asked"] for row in connection.execute(_ASK, turn | {"query": str(message.text)}))
                elif isinstance(message, AIMessage):
                    citations = message.additional_kwargs.get("citations", [])
                    turn |= {"text": str(message.text), "citations": Jsonb(citations), "asked": asked}
                    if connection.execute(_ANSWER, turn).rowcount == 0:
                        raise MlRagError("the message answers no question")
                else:
                    raise MlRagError(
                        "conversations keep questions and answers", detail=f"Got a message of type {message.type}."
                    )
        self._asked = asked

    def clear(self) -> None:
        """Delete the conversation."""
        with self._database.transaction() as connection:
            connection.execute("SELECT ml_rag.forget_conversation(%s)", (self.conversation_id,))
        self._asked = None

    aget_messages, aadd_messages, aclear = in_thread(_messages), in_thread(add_messages), in_thread(clear)

    def close(self) -> None:
        """End the connections."""
        self._database.close()
