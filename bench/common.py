"""What every measurement needs: a database of its own, what the machine is, a table of figures."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

import psycopg
from rich.console import Console
from rich.table import Table

from bench.measure import Figure

DATABASE = "ml_rag_bench"


def own_database(dsn: str, database: str = DATABASE) -> str:
    """The DSN of a database of the benchmark's own, with the address of the model server taken over from ``dsn``."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone()
        assert row is not None
        exists = connection.execute("SELECT FROM pg_database WHERE datname = %s", (database,)).fetchone()
        if exists is None:
            connection.execute(f"CREATE DATABASE {database}")
    own = psycopg.conninfo.make_conninfo(dsn, dbname=database)
    with psycopg.connect(own, autocommit=True) as connection:
        connection.execute("DROP EXTENSION IF EXISTS ml_rag CASCADE")
        connection.execute("CREATE EXTENSION ml_rag CASCADE")
        connection.execute("SELECT ml_rag.configure('model_server', %s)", row)
    return own


def machine() -> dict[str, str]:
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": str(os.cpu_count()),
        "system": platform.platform(),
        **{name: version(name) for name in ("torch", "sentence-transformers", "onnxruntime", "llama-cpp-python")},
    }


def print_table(figures: list[Figure], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("figure", "unit", "value", "floor", "value of floor", "ratio", "must reach", "reached"):
        table.add_column(
            name, justify="left" if name in ("figure", "unit", "floor", "must reach", "reached") else "right"
        )
    for f in figures:
        floor, ratio = ("" if x is None else f"{x:.2f}" for x in (f.floor, f.ratio))
        table.add_row(f.name, f.unit, f"{f.value:.2f}", f.floor_name, floor, ratio, f.limit, "yes" if f.met else "NO")
    console.print(table)
