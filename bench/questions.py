"""The question's side, measured: conversations, named documents, conditions, other words.

What needs a capable model is served from recorded completions (``bench.recorded``).
"""

from __future__ import annotations

import csv
import datetime
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb
from rich.table import Table

from bench.recorded import MODEL, read_lines
from ml_rag.client.evaluation import Arm, Evaluation

_HYBRID = {"keyword_search": True}


def _advanced(**query: Any) -> dict[str, Any]:
    return {**_HYBRID, "query_options": {**query, "model_id": MODEL}}


#: one line an option, over hybrid search
LINES = [
    Arm("semantic", {}),
    Arm("keyword", {"semantic_search": False, "keyword_search": True}),
    Arm("hybrid", _HYBRID),
    Arm("hybrid, semantic_weight 0.4", {**_HYBRID, "hybrid_options": {"semantic_weight": 0.4}}),
    Arm("+ synonyms", _advanced(synonyms=True)),
    Arm("+ hypothetical_document", _advanced(hypothetical_document=True)),
    Arm("+ sub_questions", _advanced(sub_questions=3)),
    Arm("+ synonyms, hypothetical_document", _advanced(synonyms=True, hypothetical_document=True)),
    Arm("+ all three", _advanced(synonyms=True, hypothetical_document=True, sub_questions=3)),
    Arm(
        "passage and synonyms in place of the question",
        {
            "query_options": {"synonyms": True, "hypothetical_document": True, "model_id": MODEL},
            "arms": [
                {"search": "semantic", "query": "hypothetical_document", "weight": 0.7},
                {"search": "keyword", "query": "synonyms", "weight": 0.3},
            ],
        },
    ),
    Arm("hybrid, abstain", {**_HYBRID, "abstain": True}),
    Arm("+ synonyms, abstain", {**_advanced(synonyms=True), "abstain": True}),
]
_SIMPLE = ("semantic", "keyword", "hybrid", "hybrid, semantic_weight 0.4", "hybrid, abstain")


@dataclass(frozen=True, slots=True)
class Line:
    """A way to search the Northwind questions. ``milliseconds``: median of the retrieval, recorded model included.

    ``match``: share of the questions of which a citation is right. ``p_value``: of its difference to hybrid search,
    which abstains where the line does; null where they do not differ.
    """

    title: str
    ndcg_10: float
    recall_3: float
    match: float
    p_value: float | None
    milliseconds: float


def lines(
    connection: psycopg.Connection[Any], evaluation: Evaluation, progress: Callable[[int, int], None]
) -> dict[str, Line]:
    """Simple against Advanced over the questions that ``evaluation`` asks."""
    query = "SELECT p_value FROM ml_rag_compare_runs(%s, %s) WHERE measure = 'citation_match'"
    found: dict[str, Line] = {}
    runs: dict[str, int] = {}
    for arm in LINES:
        run = evaluation.run(arm, {"k": [3, 10]}, progress)
        if run["errors"]:
            raise RuntimeError(f"{arm.title}: {run['errors']}")
        measures = run["measures"]
        runs[arm.title] = run["run_id"]
        simple = runs.get("hybrid, abstain" if "abstain" in arm.options else "hybrid")
        row = connection.execute(query, (simple, run["run_id"])).fetchone() if simple else None
        found[arm.title] = Line(
            arm.title,
            measures["ndcg@10"],
            measures["recall@3"],
            measures["citation_match"],
            row and row[0],
            run["latency"]["retrieval"]["p50"],
        )
    return found


def gain(found: Mapping[str, Line]) -> float:
    """nDCG@10 of the best advanced line over hybrid search."""
    return max(line.ndcg_10 for title, line in found.items() if title not in _SIMPLE) - found["hybrid"].ndcg_10


def table(found: Mapping[str, Line]) -> Table:
    """The lines, as they are shown."""
    shown = Table(title="northwind: simple against advanced (recorded model)", title_justify="left", box=None)
    shown.add_column("")
    for name in ("ndcg@10", "recall@3", "citation match", "p against hybrid", "ms p50"):
        shown.add_column(name, justify="right")
    for line in found.values():
        p = "" if line.p_value is None else f"{line.p_value:.3f}"
        shares = (f"{share:.3f}" for share in (line.ndcg_10, line.recall_3, line.match))
        shown.add_row(line.title, *shares, p, f"{line.milliseconds:.1f}")
    return shown


def pages(connection: psycopg.Connection[Any], store: str, question: str, options: Mapping[str, Any]) -> list[str]:
    """The first pages found, each once: ``a.pdf#page=7``."""
    given = Jsonb({**options, "vector_store": [store], "n_citations": 10})
    rows = connection.execute("SELECT document_name, metadata ->> 'page' FROM ml_rag_search(%s, %s)", (question, given))
    return list(dict.fromkeys(f"{name}#page={page}" for name, page in rows))


_CHANGES = re.compile(r"(ok, different|leaving|thanks\. now|new topic|moving on)", re.IGNORECASE)


def chats(connection: psycopg.Connection[Any], store: str, data: Path) -> dict[str, tuple[float, float]]:
    """How often the right page is among the first three: over all conversations, and where the topic changes."""
    conversations = read_lines(data / "northwind" / "chats.jsonl")
    changed = [c for c in conversations if c["question"] == c["standalone"] or _CHANGES.match(c["question"])]

    def share(of: list[dict[str, Any]], query: Callable[[dict[str, Any]], dict[str, Any]]) -> float:
        return statistics.mean(
            bool(
                {f"{p['file']}#page={p['page']}" for p in c["citations"]}
                & set(pages(connection, store, c["question"], {**_HYBRID, **query(c)})[:3])
            )
            for c in of
        )

    ways: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "as asked": lambda c: {},
        "no model": lambda c: {"query_options": {"history": c["history"]}},
        "recorded rewriting": lambda c: {"query_options": {"history": c["history"], "model_id": MODEL}},
    }
    return {name: (share(conversations, query), share(changed, query)) for name, query in ways.items()}


#: questions about Northwind that name documents in their own words, misspell them, or only seem to name one
NAMED = Path(__file__).with_name("named_documents.jsonl")


def named(connection: psycopg.Connection[Any], store: str, questions: Path) -> tuple[float, float]:
    """Shares of the questions that name documents whose documents are found, and of the others left alone."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    options = Jsonb({"vector_store": [store], "query_options": {"document_names": True}, "skip_generate": True})
    for line in read_lines(questions):
        query = "SELECT ml_rag_answer(%s, %s) #> '{retrieval_info,query,document_names}'"
        row = connection.execute(query, (line["question"], options)).fetchone()
        right[bool(line["documents"])].append(sorted((row and row[0]) or []) == sorted(line["documents"]))
    return statistics.mean(right[True]), statistics.mean(right[False])


# -- shop --------------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "id integer PRIMARY KEY, type text, brand text, name text, segment text, price numeric, rating numeric,"
    " in_stock boolean, weight_grams integer, colors text[], added_on date, segment_embedding vector(384)"
)
_DESCRIBED = ["brand", "name", "price", "rating", "in_stock", "weight_grams", "colors", "added_on", "type"]


def products(data: Path) -> list[dict[str, Any]]:
    """The rows of the shop, in types of Python."""
    with (data / "shop" / "products.csv").open(encoding="utf-8", newline="") as file:
        return [
            {
                **row,
                "id": int(row["id"]),
                "segment": f"{row['name']}\n{row['type']}\n{row['description']}",
                "price": Decimal(row["price"]),
                "rating": Decimal(row["rating"]) if row["rating"] else None,
                "in_stock": row["in_stock"] == "true",
                "weight_grams": int(row["weight_grams"]) if row["weight_grams"] else None,
                "colors": row["colors"].split(";") if row["colors"] else [],
                "added_on": datetime.date.fromisoformat(row["added_on"]),
            }
            for row in csv.DictReader(file)
        ]


def load_shop(connection: psycopg.Connection[Any], data: Path, schema: str) -> str:
    """An ordinary table of products, embedded; its name."""
    table = sql.Identifier(schema, "shop")
    connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table))
    connection.execute(sql.SQL("CREATE TABLE {} (" + _COLUMNS + ")").format(table))
    names = ["id", "segment", *_DESCRIBED]
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    with connection.cursor().copy(sql.SQL("COPY {} ({}) FROM STDIN").format(table, columns)) as copy:
        for row in products(data):
            copy.write_row([row[name] for name in names])
    connection.execute("CALL ml_embed_table(%s, %s)", (f"{schema}.shop.segment", f"{schema}.shop.segment_embedding"))
    connection.execute("SELECT ml_rag.enable_keyword_search(%s::regclass)", (f"{schema}.shop",))
    connection.execute(sql.SQL("ANALYZE {}").format(table))
    return f"{schema}.shop"


def holds(filters: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a product holds to conditions, evaluated from their documentation alone."""
    for key, value in filters.items():
        if key in ("and", "or"):
            if not (all if key == "and" else any)(holds(part, row) for part in value):
                return False
        elif key == "not":
            if holds(value, row):
                return False
        elif not all(_compares(name, given, row[key]) for name, given in _operators(value)):
            return False
    return True


def _operators(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    else:
        yield ("in", value) if isinstance(value, list) else ("eq", value)


def _compares(operator: str, given: Any, value: Any) -> bool:
    if operator in ("ne", "nin"):
        return not _compares({"ne": "eq", "nin": "in"}[operator], given, value)
    if operator == "exists":
        return (value is not None) == given
    if isinstance(value, list):
        return any(_compares(operator, given, element) for element in value)
    if value is None:
        return given is None
    if operator in ("in", "between"):
        if operator == "in":
            return any(_compares("eq", one, value) for one in given)
        return _compares("gte", given[0], value) and _compares("lte", given[1], value)
    if operator in ("like", "ilike"):
        pattern = re.escape(given).replace("%", ".*").replace("_", ".")
        return re.fullmatch(pattern, value, re.IGNORECASE if operator == "ilike" else 0) is not None
    if isinstance(value, datetime.date):
        given = datetime.date.fromisoformat(given)
    elif isinstance(value, Decimal):
        given = Decimal(str(given))
    found: bool = {
        "eq": lambda: value == given,
        "lt": lambda: value < given,
        "lte": lambda: value <= given,
        "gt": lambda: value > given,
        "gte": lambda: value >= given,
    }[operator]()
    return found


def shop(
    connection: psycopg.Connection[Any], store: str, data: Path, filters: Sequence[str] | bool = _DESCRIBED
) -> tuple[int, float]:
    """Rows returned that break a recorded condition; share of the expected rows among the first 20.

    ``filters``: the columns that the model may choose conditions on; true: those without a description, too."""
    rows = {row["id"]: row for row in products(data)}
    options = {
        **_HYBRID,
        "vector_store": [store],
        "n_citations": 20,
        "vector_store_columns": {"document_id": "id"},
        "query_options": {"rewrite": True, "filters": filters, "model_id": MODEL},
    }
    broken, shares = 0, []
    for line in read_lines(data / "shop" / "questions.jsonl"):
        if not line["filters"]:
            continue
        query = "SELECT document_id FROM ml_rag_search(%s, %s)"
        found = [row[0] for row in connection.execute(query, (line["question"], Jsonb(options)))]
        broken += sum(not holds(line["filters"], rows[number]) for number in found)
        shares.append(len(set(found) & set(line["expected_ids"])) / len(line["expected_ids"]))
    return broken, statistics.mean(shares)
