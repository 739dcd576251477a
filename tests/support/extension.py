"""The extension as releases had it, and its upgrade."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.cluster import Connection

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "migrations" / "released"
VERSIONS = sorted(
    (path.stem.removeprefix("ml_rag--") for path in RELEASED.glob("ml_rag--*.sql")),
    key=lambda version: [int(part) for part in version.split(".")],
)

#: what users have written; no upgrade may lose or change a row of it
DATA = [
    "setting_value",
    "evaluation_run",
    "evaluation_question",
    *(f"keyword_{name}" for name in ("store", "row", "new", "gone", "run", "posting")),
]


def install(owner: Connection, version: str, schema: str = "public") -> None:
    """The extension as a release had it."""
    known = owner.execute(
        "SELECT FROM pg_available_extension_versions WHERE name = 'ml_rag' AND version = %s", (version,)
    ).fetchone()
    if known is None:
        pytest.skip(f"the server lacks the script of {version}: PG_CONFIG=… bash mk/install.sh released")
    owner.execute("CREATE EXTENSION IF NOT EXISTS vector; CREATE EXTENSION IF NOT EXISTS plpython3u")
    owner.execute(
        sql.SQL("CREATE EXTENSION ml_rag SCHEMA {} VERSION {}").format(sql.Identifier(schema), sql.Literal(version))
    )


def update(connection: Connection) -> None:
    try:
        connection.execute("ALTER EXTENSION ml_rag UPDATE")
    except psycopg.Error as e:
        if e.sqlstate == "42501":
            raise
        pytest.fail(
            f"the upgrade itself fails: {str(e)[:1000]}\nA migration must drop or alter first what CREATE OR"
            " REPLACE cannot change: migrations/README.md says how"
        )


def data(owner: Connection) -> dict[str, Any]:
    return {
        name: sorted(row for (row,) in owner.execute(sql.SQL("SELECT t::text FROM ml_rag.{} AS t").format(table)))
        for name, table in ((name, sql.Identifier(name)) for name in DATA)
    }
