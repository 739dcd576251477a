"""Node groups, measured: enrichment merged into the words of Northwind's pages; sentences searched, segments cited.

What a model writes is served from recorded completions (``bench.recorded``), which are by page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb
from rich.table import Table

from bench.recorded import MODEL, read_lines
from ml_rag.client.evaluation import Arm, Evaluation

_HYBRID = {"keyword_search": True}
_MERGED = ("keyphrases", "questions", "entities")
_SENTENCES = {"search": "semantic", "in": "sentences"}
_WINDOWS = {"search": "semantic", "in": "windows"}
#: one line a way to search pages
_PAGES = [
    Arm("dense, best window", {"arms": [_WINDOWS]}),
    Arm("text only", {"arms": [{"search": "keyword"}]}),
    Arm("hybrid", {"arms": [{**_WINDOWS, "weight": 0.5}, {"search": "keyword", "weight": 0.5}]}),
    Arm("hybrid, auto", {"arms": [{**_WINDOWS, "weight": "auto"}, {"search": "keyword", "weight": "auto"}]}),
]
#: the same with one vector a page, which the model has made of its beginning
_WHOLE = [Arm("beginnings, dense", {}), Arm("beginnings, hybrid", {"keyword_search": True})]
#: one line a way to search, without and with sentences
_SEGMENTS_OR_SENTENCES = [
    Arm("segments searched", {}),
    Arm("sentences searched, segments cited", {"arms": [_SENTENCES]}),
    Arm("hybrid, segments searched", _HYBRID),
    Arm(
        "hybrid, sentences searched, segments cited",
        {"arms": [{**_SENTENCES, "weight": "auto"}, {"search": "keyword", "weight": "auto"}]},
    ),
    Arm(
        "hybrid, sentences and segments",
        {
            "arms": [
                {"search": "semantic", "weight": 0.25},
                {**_SENTENCES, "weight": 0.25},
                {"search": "keyword", "weight": 0.5},
            ]
        },
    ),
]


def make_pages(connection: psycopg.Connection[Any], store: str) -> str:
    """A store of whole pages made of a store of segments, which a form feed keeps apart, with their node group windows.

    A page is longer than what the embedding model takes in: its vector is that of its beginning, and its windows have
    vectors of their own.
    """
    schema, name = store.split(".")
    target = f"{schema}.{name}_pages"
    pages, segments = sql.Identifier(schema, f"{name}_pages"), sql.Identifier(schema, name)
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {} CASCADE").format(pages))
    connection.execute("SELECT ml_rag.create_store(%s, %s)", (target, Jsonb({"language": "en"})))
    connection.execute(
        sql.SQL(
            "INSERT INTO {} SELECT document_name, jsonb_build_object('page', (metadata ->> 'page')::integer),"
            " document_id, (metadata ->> 'page')::integer, string_agg(segment, E'\\f' ORDER BY segment_number),"
            " public.ml_embed_row(string_agg(segment, E'\\f' ORDER BY segment_number))"
            " FROM {} GROUP BY 1, 2, 3, 4"
        ).format(pages, segments)
    )
    connection.execute(
        "CREATE OR REPLACE FUNCTION public.windows(t text) RETURNS SETOF text LANGUAGE sql"
        " AS $$SELECT string_to_table(t, E'\\f')$$"
    )
    options = {"transform": "public.windows", "keyword_search": False}
    connection.execute("CALL ml_rag.create_node_group(%s, 'windows', %s)", (target, Jsonb(options)))
    return target


def enrichments(connection: psycopg.Connection[Any], store: str, data: Path) -> dict[str, Mapping[str, Any]]:
    """Text of each page of a store of pages -> what the model has written for it."""
    pages = {(row["file"], row["page"]): row for row in read_lines(data / "recorded" / "northwind_pages.jsonl")}
    query = sql.SQL("SELECT document_name, segment_number, segment FROM {}")
    rows = connection.execute(query.format(sql.Identifier(*store.split("."))))
    return {segment: pages[name, page] for name, page, segment in rows if (name, page) in pages}


@contextmanager
def group(connection: psycopg.Connection[Any], store: str, name: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Meanwhile the store has that node group; the result of its making."""
    query = "CALL ml_rag.create_node_group(%s, %s, %s)"
    made = connection.execute(query, (store, name, Jsonb(options))).fetchone()
    try:
        yield made[0] if made else {}
    finally:
        connection.execute("SELECT ml_rag.drop_node_group(%s, %s)", (store, name))


Measures = dict[str, tuple[float, float]]


def _run(evaluation: Evaluation, arm: Arm, progress: Callable[[int, int], None]) -> tuple[float, float]:
    run = evaluation.run(arm, {"k": [3, 10]}, progress)
    if run["errors"]:
        raise RuntimeError(f"{arm.title}: {run['errors']}")
    return run["measures"]["ndcg@10"], run["measures"]["recall@3"]


def merged(
    connection: psycopg.Connection[Any], evaluation: Evaluation, store: str, progress: Callable[[int, int], None]
) -> Measures:
    """nDCG@10 and recall@3 on a store of pages, without and with enrichment merged into their words."""
    former, evaluation.store = evaluation.store, store
    options = {"embed": False, "keyword_search": False, "merge": True, "model_id": MODEL}
    first, second, third = _MERGED
    try:
        found = {arm.title: _run(evaluation, arm, progress) for arm in _PAGES + _WHOLE}
        with (
            group(connection, store, first, transform=first, **options),
            group(connection, store, second, transform=second, **options),
            group(connection, store, third, transform=third, **options),
        ):
            return found | {f"{arm.title}, merged enrichment": _run(evaluation, arm, progress) for arm in _PAGES[1:]}
    finally:
        evaluation.store = former


def sentences(
    connection: psycopg.Connection[Any], evaluation: Evaluation, progress: Callable[[int, int], None]
) -> Measures:
    """nDCG@10 and recall@3 of segments searched against sentences searched and their segments cited."""
    with group(connection, evaluation.store, "sentences", transform="sentence", keyword_search=False):
        return {arm.title: _run(evaluation, arm, progress) for arm in _SEGMENTS_OR_SENTENCES}


def table(title: str, found: Measures) -> Table:
    """The lines, as they are shown."""
    shown = Table(title=title, title_justify="left", box=None)
    for name in ("", "ndcg@10", "recall@3"):
        shown.add_column(name, justify="right" if name else "left")
    for line, (ndcg_10, recall_3) in found.items():
        shown.add_row(line, f"{ndcg_10:.3f}", f"{recall_3:.3f}")
    return shown
