"""LangChain's own suites for vector stores and retrievers, whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from ml_rag.integrations.langchain import MlRagRetriever, MlRagVectorStore


class _Suite(VectorStoreIntegrationTests):
    embedding: Embeddings | None

    @pytest.fixture
    def vectorstore(self, asker_dsn: str) -> Iterator[VectorStore]:  # type: ignore[override]
        store = MlRagVectorStore(asker_dsn, "public.made_by_langchain", self.embedding)
        yield store
        store.close()


class TestEmbeddedByTheClient(_Suite):
    embedding = VectorStoreIntegrationTests.get_embeddings()


class TestEmbeddedByTheDatabase(_Suite):
    embedding = None


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _store(self, asker_dsn: str) -> Iterator[None]:
        self.dsn = asker_dsn
        store = MlRagVectorStore(asker_dsn, "public.made_by_langchain")
        store.add_documents([Document(page_content=f"chapter {n} about boats") for n in range(5)])
        yield
        store.close()

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return MlRagRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"dsn": self.dsn, "k": 2}

    @property
    def retriever_query_example(self) -> str:
        return "boats"
