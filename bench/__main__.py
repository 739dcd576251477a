"""``make bench``: prints the table and writes bench/out/bench.json.

Needs a server with the extension and a model server with the real models; ``make bench`` starts the private ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click
import psycopg
from rich.console import Console

from bench import corpus, keyword, keyword_build, models, nlsql, retrieval, search, vectorizer
from bench.common import machine, own_database, print_table
from bench.measure import Figure

HERE = Path(__file__).parent


@click.command(help=__doc__)
@click.option("--dsn", envvar=["ML_RAG_BENCH_DSN", "ML_RAG_TEST_DSN"], required=True)
@click.option("--models-dir", type=click.Path(path_type=Path, exists=True), envvar="ML_RAG_MODELS", required=True)
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Documents that vector_store_load loads.")
@click.option("--output", type=click.Path(path_type=Path), default=HERE / "out" / "bench.json", show_default=True)
@click.option(
    "--keyword-rows", type=click.IntRange(1000), default=100_000, show_default=True, envvar="ML_RAG_BENCH_KEYWORD_ROWS",
    help="Segments that keyword search is measured over; 1000000 takes a quarter of an hour.",
)  # fmt: skip
@click.option(
    "--vectorizer-rows", type=click.IntRange(1000), default=vectorizer.ROWS, show_default=True,
    help="Rows that a bulk load is measured with; 100000 of 100 words take an hour.",
)  # fmt: skip
@click.option(
    "--vectorizer-words", type=click.IntRange(5), default=corpus.WORDS_A_SEGMENT, show_default=True,
    help="Words of each of these rows, on average.",
)  # fmt: skip
@click.option("--only", metavar="TEXT", help="Only measurements whose name contains this.")
def main(
    dsn: str, models_dir: Path, folder: Path | None, output: Path, keyword_rows: int, vectorizer_rows: int,
    vectorizer_words: int, only: str | None,
) -> None:  # fmt: skip
    northwind = HERE.parent.parent / "shared" / "data" / "northwind" / "pdf"
    folder = folder or (northwind if northwind.is_dir() else HERE.parent / "docs" / "samples")
    dsn = own_database(dsn)
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone()
        assert row is not None
        address = row[0]
    sentence_model = models_dir / "all_minilm_l6_v2"
    gguf = next((models_dir / "smollm2-135m-instruct").glob("*.gguf"))
    console = Console(width=220)

    measurements: list[tuple[str, Callable[[], Figure | list[Figure]]]] = [
        ("first call", lambda: retrieval.first_call(dsn)),
        ("warm calls", lambda: retrieval.warm_calls(dsn, address)),
        ("query embedding", lambda: models.query_embedding(address, sentence_model)),
        ("backend memory", lambda: retrieval.backend_memory(dsn)),
        ("load", lambda: models.load_folder(dsn, folder, sentence_model)),
        ("vectorizer", lambda: vectorizer.bulk(dsn, sentence_model, vectorizer_rows, vectorizer_words)),
        ("writes to a table with a vectorizer", lambda: vectorizer.write(dsn)),
        ("generation", lambda: models.generation(dsn, gguf)),
        ("many sessions", lambda: retrieval.many_sessions(dsn)),
        ("keyword search", lambda: keyword.measure(dsn, keyword_rows)),
        ("making keyword indexes", lambda: keyword_build.measure(dsn, min(keyword_rows, 100_000))),
        ("choice of tables", lambda: nlsql.thousand_tables(dsn)),
        ("searches", lambda: search.measure(dsn, address)),
    ]
    console.print(f"preparing a table of {retrieval.ROWS} vectors with an HNSW index (once) …")
    retrieval.prepare(dsn)
    figures: list[Figure] = []
    for name, measure in measurements:
        if only is not None and only not in name:
            continue
        console.print(f"measuring: {name} …")
        result = measure()
        found = result if isinstance(result, list) else [result]
        for f in found:
            floor = "" if f.floor is None else f", {f.floor_name} {f.floor:.2f}"
            console.print(f"    {f.name}: {f.value:.2f} {f.unit}{floor}", highlight=False)
        figures += found
    print_table(figures, console)
    output.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "figures": [{**asdict(f), "ratio": f.ratio} for f in figures],
    }
    output.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"written: {output}")


if __name__ == "__main__":
    main()
