"""Tables of vectors as other programs make and change them, with the programs themselves: ``writers.py KIND URL STEP``.

It runs in an environment of its own (mk/programs.txt), since these programs need other versions of what they share with
ml_rag. URL: postgresql://…; STEP: make (the texts of ``TEXTS``) or go on (add, change and delete).
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Callable
from typing import Any

DIMENSIONS = 16
TEXTS = {"a": "heron by the river", "b": "otter in the stone", "c": "moss on the pine"}
ADDED, CHANGED = "snipe on the marsh", "rail under the reed"


def vector(text: str) -> list[float]:
    """What the model fake-embed makes of a text."""
    found = [0.0] * DIMENSIONS
    for word in re.findall(r"\w+", text.lower()):
        found[zlib.crc32(word.encode()) % DIMENSIONS] += 1
    length = sum(x * x for x in found) ** 0.5
    return [x / length for x in found]


def _embeddings() -> Any:
    from langchain_core.embeddings import Embeddings

    class Fake(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [vector(text) for text in texts]

        def embed_query(self, text: str) -> list[float]:
            return vector(text)

    return Fake()


def pgvector(url: str, step: str) -> None:
    from langchain_postgres import PGVector

    def collection(name: str) -> Any:
        return PGVector(embeddings=_embeddings(), collection_name=name, connection=url, use_jsonb=True)

    store = collection("birds")
    if step == "make":
        store.add_texts(list(TEXTS.values()), [{"source": f"{id_}.txt"} for id_ in TEXTS], list(TEXTS))
        collection("others").add_texts(["badger"], [{"source": "other.txt"}], ["z"])
    else:
        store.add_texts([ADDED, CHANGED], [{"source": "d.txt"}, {"source": "b.txt"}], ["d", "b"])
        store.delete(["c"])


def pgvectorstore(url: str, step: str) -> None:
    from langchain_postgres import PGEngine, PGVectorStore

    ids = {name: f"00000000-0000-0000-0000-00000000000{name}" for name in "abcd"}
    engine = PGEngine.from_connection_string(url)
    if step == "make":
        engine.init_vectorstore_table("texts", DIMENSIONS)
    store = PGVectorStore.create_sync(engine, _embeddings(), "texts")
    if step == "make":
        store.add_texts(list(TEXTS.values()), [{"source": f"{id_}.txt"} for id_ in TEXTS], [ids[id_] for id_ in TEXTS])
    else:
        store.add_texts([ADDED, CHANGED], [{"source": "d.txt"}, {"source": "b.txt"}], [ids["d"], ids["b"]])
        store.delete([ids["c"]])


def llama_index(url: str, step: str) -> None:
    from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
    from llama_index.vector_stores.postgres import PGVectorStore

    def node(id_: str, text: str) -> Any:
        source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc {id_}")}
        metadata = {"file_name": f"{id_}.txt"}
        return TextNode(id_=id_, text=text, metadata=metadata, embedding=vector(text), relationships=source)

    store = PGVectorStore.from_params(
        connection_string=url, async_connection_string=url, table_name="texts", embed_dim=DIMENSIONS
    )
    if step == "make":
        store.add([node(id_, text) for id_, text in TEXTS.items()])
    else:
        store.delete("doc b")
        store.delete("doc c")
        store.add([node("d", ADDED), node("b", CHANGED)])


def haystack(url: str, step: str) -> None:
    from haystack import Document
    from haystack.document_stores.types import DuplicatePolicy
    from haystack.utils import Secret
    from haystack_integrations.document_stores.pgvector import PgvectorDocumentStore

    store = PgvectorDocumentStore(
        connection_string=Secret.from_token(url), embedding_dimension=DIMENSIONS, create_extension=False
    )

    def document(id_: str, text: str) -> Any:
        return Document(id=id_, content=text, embedding=vector(text), meta={"file_path": f"{id_}.txt"})

    if step == "make":
        store.write_documents([document(id_, text) for id_, text in TEXTS.items()])
    else:
        store.write_documents([document("d", ADDED), document("b", CHANGED)], DuplicatePolicy.OVERWRITE)
        store.delete_documents(["c"])


def pgai(url: str, step: str) -> None:
    """The table is made by pgai; its worker, which asks a service for the embeddings, writes rows like these."""
    import pgai
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        if step == "make":
            pgai.install(url)
            connection.execute("CREATE TABLE blog (id text PRIMARY KEY, body text)")
            connection.execute(
                "SELECT ai.create_vectorizer('blog'::regclass, loading => ai.loading_column('body'),"
                f" embedding => ai.embedding_ollama('none', {DIMENSIONS}), chunking => ai.chunking_none())"
            )
        else:
            connection.execute("DELETE FROM blog_embedding_store WHERE id IN ('b', 'c')")
        for id_, text in (TEXTS if step == "make" else {"d": ADDED, "b": CHANGED}).items():
            connection.execute(
                "INSERT INTO blog VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET body = %s", (id_, text, text)
            )
            connection.execute(
                "INSERT INTO blog_embedding_store (id, chunk_seq, chunk, embedding) VALUES (%s, 0, %s, %s)",
                (id_, text, json.dumps(vector(text))),
            )


KINDS: dict[str, Callable[[str, str], None]] = {
    "pgvector": pgvector,
    "pgvectorstore": pgvectorstore,
    "llama_index": llama_index,
    "haystack": haystack,
    "pgai": pgai,
}

if __name__ == "__main__":
    kind, url, step = sys.argv[1:]
    if kind in ("pgvector", "pgvectorstore", "llama_index"):
        url = url.replace("postgresql://", "postgresql+psycopg://")
    KINDS[kind](url, step)
