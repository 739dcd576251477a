"""A store in partitions beside the same rows in one table."""

from __future__ import annotations

import json
import random
from typing import Any

from support.cluster import Connection
from support.loading import rows
from support.stores import answer

WORDS = ["alder", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "willow", "yew"]
#: a call of each kind; the same in one table and in its partitions
CALLS: dict[str, dict[str, Any]] = {
    "meaning": {"n_citations": 10},
    "words": {"semantic_search": False, "keyword_search": True, "n_citations": 20},
    "hybrid": {"keyword_search": True, "n_citations": 20},
    "rrf": {"keyword_search": True, "hybrid_options": {"fusion": "rrf"}, "n_citations": 20},
    "neighbours": {"retrieval_options": {"segment_overlap": 2}, "n_citations": 9},
    "threshold": {"retrieval_options": {"max_distance": 0.7}},
    "percentage": {"retrieval_options": {"percentage_distance": 30}},
    "document": {"document_name": ["d7", "d12", "d31"], "n_citations": 50},
    "not these": {"exclude_document_name": ["d7", "d12"], "n_citations": 50},
    "filters": {"filters": {"document_id": {"gt": 20}, "file_size": {"gte": 30}}, "n_citations": 50},
    "euclidean": {"distance_metric": "EUCLIDEAN", "n_citations": 20},
    "two arms": {
        "arms": [{"search": "semantic"}, {"search": "keyword", "query": {"text": "birch"}, "min_score": 0.2}],
        "n_citations": 30,
    },
    "fields": {"citation_fields": ["document_id", "segment_number", "metadata", "score", "rank"], "n_citations": 7},
    "reranked": {"rerank": {"candidates": 30}, "n_citations": 6},
}


def fill(connection: Connection, name: str) -> None:
    """Forty documents of 1 to 6 segments, some of them equal; two are loaded again, one goes."""
    draw = random.Random(4)
    documents = {f"d{i}": "\n\n".join(" ".join(draw.choices(WORDS, k=4)) for _ in range(1 + i % 6)) for i in range(40)}
    documents["d40"], documents["d41"] = documents["d5"], "oak oak oak"
    send(connection, name, documents)
    send(connection, name, {"d5": "birch birch\n\nfir hazel", "d9": "yew"})
    connection.execute(f"SELECT ml_rag.remove_documents('{name}', ARRAY['d11'])")


def send(connection: Connection, name: str, documents: dict[str, str]) -> dict[str, Any]:
    contents = [text.encode() for text in documents.values()]
    found = rows(connection, f"SELECT ml_rag.load_documents('{name}', %s, %b)", list(documents), contents)
    return dict(found[0][0])


def both(connection: Connection, query: str, options: dict[str, Any]) -> tuple[str, str]:
    """The answers of the two stores, as text."""
    found = [
        json.dumps(answer(connection, query, {"vector_store": [f"public.{name}"], "skip_generate": True, **options}))
        for name in ("one", "four")
    ]
    return found[0], found[1].replace("public.four", "public.one")


def words(connection: Connection, query: str = "birch") -> tuple[str, str]:
    return both(connection, query, {"n_citations": 100, **CALLS["words"]})
