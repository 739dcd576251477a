"""``make eval`` of ordinary tables: the shop with a vectorizer, against conditions and the same rows as documents."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from bench.questions import holds, products, read_lines

_COLUMNS = (
    "id integer PRIMARY KEY, type text, brand text, name text, description text, price numeric, rating numeric,"
    " in_stock boolean, weight_grams integer, colors text[], added_on date"
)
_NAMES = [column.split()[0] for column in _COLUMNS.split(", ")]
_TEXT = "{name}\n{type}\n{description}"
_HYBRID = {"keyword_search": True, "n_citations": 20}


def vectorize(connection: psycopg.Connection[Any], data: Path, table: sql.Identifier, **options: str) -> None:
    """The products in a table whose vectorizer has embedded them."""
    connection.execute(sql.SQL("CREATE TABLE {} ({})").format(table, sql.SQL(_COLUMNS)))
    columns = sql.SQL(", ").join(map(sql.Identifier, _NAMES))
    with connection.cursor().copy(sql.SQL("COPY {} ({}) FROM STDIN").format(table, columns)) as copy:
        for row in products(data):
            copy.write_row([row[name] for name in _NAMES])
    name = table.as_string(connection)
    given = {"columns": _TEXT, "document_name": "{id}.md", "language": "en", **options}
    connection.execute("SELECT ml_rag.create_vectorizer(%s::regclass, %s)", (name, Jsonb(given)))
    connection.execute("CALL ml_rag.run_vectorizer(%s::regclass)", (name,))


def load(connection: psycopg.Connection[Any], data: Path, store: str) -> None:
    """The same texts loaded as documents, one a product."""
    connection.execute("SELECT ml_rag.create_store(%s, %s)", (store, Jsonb({"language": "en"})))
    texts = {f"{row['id']}.md": _TEXT.format(**row).encode() for row in products(data)}
    connection.execute("SELECT ml_rag.load_documents(%s::regclass, %s, %s)", (store, list(texts), list(texts.values())))
    connection.execute("SELECT ml_rag.index_store(%s::regclass)", (store,))


def measure(connection: psycopg.Connection[Any], data: Path, schema: str) -> dict[str, float]:
    """``broken``: rows that break a condition given; ``found``: share of the expected rows among the first 20;
    ``column``, ``table``: by destination, share of questions whose first 20 rows are those of the documents, in their
    order."""
    names = {name: sql.Identifier(schema, f"rows_{name}") for name in ("column", "table", "documents")}
    stores = {name: f"{schema}.rows_{name}" for name in names} | {"table": f"{schema}.rows_table_segments"}
    connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
    connection.execute(
        sql.SQL("DROP TABLE IF EXISTS {} CASCADE").format(
            sql.SQL(", ").join([*names.values(), sql.Identifier(schema, "rows_table_segments")])
        )
    )
    for destination in ("column", "table"):
        vectorize(connection, data, names[destination], destination=destination)
    load(connection, data, stores["documents"])
    rows = {row["id"]: row for row in products(data)}
    broken, shares = 0, []
    same: dict[str, list[bool]] = {"column": [], "table": []}

    def found(question: str, store: str, **options: Any) -> list[int]:
        query = "SELECT document_name FROM ml_rag_search(%s, %s)"
        given = Jsonb({**_HYBRID, "vector_store": [store], **options})
        return [int(name.removesuffix(".md")) for (name,) in connection.execute(query, (question, given))]

    for line in read_lines(data / "shop" / "questions.jsonl"):
        if line["filters"]:
            ids = found(line["question"], stores["column"], filters=line["filters"])
            broken += sum(not holds(line["filters"], rows[number]) for number in ids)
            shares.append(len(set(ids) & set(line["expected_ids"])) / len(line["expected_ids"]))
        expected = found(line["question"], stores["documents"])
        for destination, equal in same.items():
            equal.append(found(line["question"], stores[destination]) == expected)
    return {"broken": broken, "found": statistics.mean(shares), **{key: statistics.mean(e) for key, e in same.items()}}
