"""Questions about tables: the rows of ``ml_nl_sql`` against those of a right statement, and the choice of tables.

The statements that a large model wrote once are served as a model serves them; the small model that comes with the
product writes its own.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg

from bench.measure import Figure, in_turn, medians
from bench.retrieval import QUESTIONS
from ml_rag.server.catalogue import load_catalogue, models_dir
from support.servers import remote_model, running_server, scripted_endpoint

SCHEMA = "hr_shop"
#: the model of the recorded statements
RECORDED = "recorded"
SMALL = "smollm2-135m-instruct"

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Question:
    """``sql`` is None where the tables cannot answer."""

    id: str
    text: str
    sql: str | None
    tables: tuple[str, ...]
    is_ordered: bool


def read(folder: Path) -> list[Question]:
    lines = map(json.loads, (folder / "questions.jsonl").read_text().splitlines())
    return [Question(q["id"], q["question"], q["sql"], tuple(q["tables"]), q["ordered"]) for q in lines]


def load(connection: psycopg.Connection[Any], folder: Path) -> None:
    """The tables, anew."""
    connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    for name in ("schema.sql", "data.sql"):
        connection.execute((folder / name).read_text().encode())
    connection.execute("RESET search_path; ANALYZE")


def completion(body: Mapping[str, Any], statements: Mapping[str, str | None]) -> str:
    """The recorded answer to the question in a request; nothing where there is none, which is not a model's answer."""
    asked = re.search(r"^Question: (.*)\Z", body["messages"][-1]["content"], re.MULTILINE)
    if asked is None or asked[1] not in statements:
        return ""
    sql = statements[asked[1]]
    return json.dumps({"answerable": sql is not None, "sql": sql or ""})


@contextmanager
def recorded_server(questions: Sequence[Question]) -> Iterator[str]:
    """The address of a model server with the real models, and what was recorded as model ``recorded``."""
    statements = {question.text: question.sql for question in questions}
    with tempfile.TemporaryDirectory() as folder, scripted_endpoint(lambda body: completion(body, statements)) as url:
        Path(folder).chmod(0o711)
        socket = Path(folder) / "recorded.sock"
        config = f'[server]\nsocket_mode = "0666"\n{remote_model(RECORDED, url)}'
        with running_server(fake_models=False, config=config, models_dir=models_dir(load_catalogue()), socket=socket):
            yield f"unix:{socket}"


def _comparable(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float | Decimal):
        return Decimal(str(value)).normalize()
    return value.isoformat(*([" "] if isinstance(value, datetime) else [])) if isinstance(value, date) else str(value)


def rows_of(values: Sequence[Sequence[Any]], question: Question) -> Rows:
    """Rows in a form in which equal ones are equal, in an order of their own where the question asks for none."""
    rows = [tuple(map(_comparable, row)) for row in values]
    return rows if question.is_ordered else sorted(rows, key=repr)


def outcome(connection: psycopg.Connection[Any], question: Question, model_id: str, **more: Any) -> str:
    """``right``: the expected rows, or the model says that there are none; ``refused``: no statement, or none that is
    valid; ``wrong``: other rows; ``error``: the call failed."""
    options = json.dumps({"schemas": [SCHEMA], "model_id": model_id, **more})
    try:
        row = connection.execute("SELECT ml_nl_sql(%s, %s)::text", (question.text, options)).fetchone()
    except psycopg.Error as e:
        return f"error {e.sqlstate}"
    assert row is not None
    found = json.loads(row[0], parse_float=Decimal)
    if not found["is_sql_valid"]:
        return "right" if question.sql is None and "cannot answer" in found["reason"] else "refused"
    if question.sql is None:
        return "wrong"
    expected = connection.execute(question.sql.encode()).fetchall()
    return "right" if rows_of(found["rows"], question) == rows_of(expected, question) else "wrong"


def outcomes(
    connection: psycopg.Connection[Any], questions: Sequence[Question], model_id: str, **more: Any
) -> dict[str, str]:
    return {question.id: outcome(connection, question, model_id, **more) for question in questions}


def share_of_tables(connection: psycopg.Connection[Any], questions: Sequence[Question], n: int = 8) -> float:
    """How many of the tables that the statements need are among the first ``n`` that are chosen."""
    found = needed = 0
    for question in questions:
        options = json.dumps({"schemas": [SCHEMA], "n_tables": n})
        row = connection.execute("SELECT ml_retrieve_schema_metadata(%s, %s)", (question.text, options)).fetchone()
        assert row is not None
        chosen = set(re.findall(rf"^CREATE TABLE {SCHEMA}\.(\w+) ", row[0], re.M))
        found += len(chosen & set(question.tables))
        needed += len(question.tables)
    return found / needed


def share(model: Mapping[str, str], questions: Sequence[Question], outcomes_: set[str], *, answerable: bool) -> float:
    """Of those that can be answered, or that cannot, the share with one of these outcomes."""
    those = [q for q in questions if (q.sql is not None) == answerable]
    return sum(model[q.id] in outcomes_ for q in those) / len(those)


@dataclass(frozen=True, slots=True)
class Measured:
    """Outcomes by question, with recorded statements and by the small model; the share of the needed tables."""

    recorded: dict[str, str]
    small: dict[str, str]
    tables: float


def measure(connection: psycopg.Connection[Any], folder: Path) -> tuple[list[Question], Measured]:
    """``connection``: its role may change the settings of ml_rag; the model server's address is put back."""
    questions = read(folder)
    load(connection, folder)
    before = connection.execute("SELECT value FROM ml_rag.setting_value WHERE name = 'model_server'").fetchone()
    with recorded_server(questions) as address:
        connection.execute("SELECT ml_rag.configure('model_server', %s)", (address,))
        try:
            measured = Measured(
                outcomes(connection, questions, RECORDED),
                outcomes(connection, questions, SMALL),
                share_of_tables(connection, questions),
            )
        finally:
            connection.execute("SELECT ml_rag.configure('model_server', %s)", (before[0] if before else None,))
    return questions, measured


def thousand_tables(dsn: str) -> Figure:
    """The choice among 1,000 tables of ten columns, all embedded already."""
    things = ("orders", "invoices", "visits", "plants", "cars", "rooms", "users", "books")
    columns = "id integer PRIMARY KEY, name text, made_on date, amount numeric, city text, street text, status text"
    with psycopg.connect(dsn, autocommit=True) as connection:
        if connection.execute("SELECT to_regnamespace('bench_many')").fetchone() == (None,):
            with connection.transaction():
                connection.execute("CREATE SCHEMA bench_many")
                for i in range(1000):
                    table = f"bench_many.{things[i % len(things)]}_{i}"
                    connection.execute(f"CREATE TABLE {table} ({columns}, a_{i} integer, b_{i} text, c_{i} date)")
                    connection.execute(f"COMMENT ON TABLE {table} IS 'number {i} of the {things[i % len(things)]}'")
            connection.execute("ANALYZE")

        def call(i: int) -> object:
            options = '{"schemas": ["bench_many"]}'
            return connection.execute(
                "SELECT ml_retrieve_schema_metadata(%s, %s)", (QUESTIONS[i % len(QUESTIONS)], options)
            ).fetchone()

        value = medians(in_turn({"ours": call}, rounds=50, warmup=5))["ours"]
    return Figure("ml_retrieve_schema_metadata, 1000 tables, warm", "ms", value, "", None, "≤ 50", value <= 50)
