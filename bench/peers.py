"""``python -m bench.peers DSN``: searches beside those of langchain-postgres, over the same table in the same run, with
query vectors given, so that no model takes part.

It needs the package langchain-postgres, whose requirements are older than ours: an environment of its own, with
pgvector upgraded after it (``pip install --no-deps -U pgvector``), and click and rich. PYTHONPATH has plpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import psycopg
from pgvector.psycopg import register_vector
from psycopg.conninfo import conninfo_to_dict
from rich.console import Console
from rich.table import Table

from bench import search
from bench.measure import in_turn, medians

if TYPE_CHECKING:
    from collections.abc import Callable

CITATIONS, EF_SEARCH, CANDIDATES = 10, 200, 100
QUESTIONS = 40


def _peers(dsn: str, vectors: list[list[float]], questions: list[str]) -> dict[str, Callable[[int], list[Any]]]:
    """Searches by meaning and hybrid ones; words by an expression index of PostgreSQL's text search."""
    from langchain_core.embeddings import Embeddings
    from langchain_postgres import PGEngine, PGVectorStore
    from langchain_postgres.v2.hybrid_search_config import HybridSearchConfig, reciprocal_rank_fusion
    from langchain_postgres.v2.indexes import DistanceStrategy, HNSWQueryOptions

    class Given(Embeddings):
        def embed_query(self, text: str) -> list[float]:
            return vectors[questions.index(text)]

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [self.embed_query(text) for text in texts]

    own = conninfo_to_dict(dsn)
    address = f"postgresql+psycopg://{own.pop('user', 'postgres')}@/{own.pop('dbname')}?"
    engine = PGEngine.from_connection_string(address + "&".join(f"{key}={value}" for key, value in own.items()))
    options: dict[str, Any] = {
        "engine": engine, "embedding_service": Given(), "table_name": "bench_segments", "id_column": "document_id",
        "content_column": "segment", "embedding_column": "segment_embedding", "metadata_columns": ["document_name"],
        "metadata_json_column": "metadata", "distance_strategy": DistanceStrategy.COSINE_DISTANCE,
        "index_query_options": HNSWQueryOptions(ef_search=EF_SEARCH),
    }  # fmt: skip
    hybrid = HybridSearchConfig(
        tsv_column="", tsv_lang="pg_catalog.english", fusion_function=reciprocal_rank_fusion,
        primary_top_k=CANDIDATES, secondary_top_k=CANDIDATES, fusion_function_parameters={"fetch_top_k": CITATIONS},
    )  # fmt: skip
    near = PGVectorStore.create_sync(**options)
    both = PGVectorStore.create_sync(**options, hybrid_search_config=hybrid)
    return {
        "by meaning": lambda i: near.similarity_search_by_vector(vectors[i % QUESTIONS], k=CITATIONS),
        "hybrid": lambda i: both.similarity_search(questions[i % QUESTIONS], k=CITATIONS),
    }


@click.command(help=__doc__)
@click.argument("dsn")
def main(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS ml_rag CASCADE")
        search.prepare(dsn)
        connection.execute("CREATE INDEX IF NOT EXISTS bench_segments_gin ON bench_segments"
                           " USING gin (to_tsvector('english', segment))")  # fmt: skip
        register_vector(connection)
        calls = search._Calls(connection, "bench_segments")
        peers = _peers(dsn, [v.to_list() for v in calls.vectors[:QUESTIONS]], calls.questions[:QUESTIONS])
        ours: dict[str, Callable[[int], Any]] = {
            "by meaning": lambda i: calls.search(i % QUESTIONS, n_citations=CITATIONS),
            "hybrid": lambda i: calls.search(i % QUESTIONS, n_citations=CITATIONS, keyword_search=True),
        }
        exact = [
            connection.execute(
                "SELECT document_name FROM bench_segments ORDER BY (segment_embedding <=> %s) + 0 LIMIT %s",
                (vector, CITATIONS),
            ).fetchall()
            for vector in calls.vectors[:QUESTIONS]
        ]
        found = [{hit.metadata["document_name"] for hit in peers["by meaning"](i)} for i in range(QUESTIONS)]
        own = [{hit["document_name"] for hit in ours["by meaning"](i)["citations"]} for i in range(QUESTIONS)]
        recall = [
            sum(len(names & {name for (name,) in best}) for names, best in zip(all_names, exact, strict=True))
            / (CITATIONS * QUESTIONS)
            for all_names in (found, own)
        ]
        took = medians(in_turn({
            "bare": lambda i: calls.bare(i, CITATIONS),
            **{f"langchain-postgres, {name}": call for name, call in peers.items()},
            **{f"ml_rag, {name}": call for name, call in ours.items()},
        }, rounds=120, warmup=10, block=5))  # fmt: skip
    table = Table("", "ms", "of langchain-postgres")
    for name, value in took.items():
        peer = took.get(name.replace("ml_rag", "langchain-postgres"))
        table.add_row(name, f"{value:.1f}", f"{value / peer:.2f}" if peer and name.startswith("ml_rag") else "")
    console = Console()
    console.print(table)
    console.print(f"recall@{CITATIONS} by meaning: langchain-postgres {recall[0]:.3f}, ml_rag {recall[1]:.3f}")


if __name__ == "__main__":
    main()
