"""The extension as releases had it, and its upgrade."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import ml_rag
from support.cluster import Connection

ROOT = Path(__file__).parents[2]
MIGRATIONS = ROOT / "migrations"


def sealed(migrations: Path = MIGRATIONS) -> dict[str, str]:
    """Name -> SHA-256 of each file that no release may change any more."""
    path = migrations / "SHA256SUMS"
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: digest for digest, name in (line.split() for line in lines)}


def releases(migrations: Path = MIGRATIONS) -> list[str]:
    """Versions of the archives."""
    names = [name for name in sealed(migrations) if name.endswith(".tar.gz")]
    return [name.removeprefix("ml_rag--").removesuffix(".tar.gz") for name in names]


#: of mk/made_up_release.sh: this version but for tests/migration/made_up/older.sql
MADE_UP = "0.0.0"
RELEASES = [version for version in releases() if version != ml_rag.__version__]
#: that databases are upgraded from
VERSIONS = [MADE_UP, *RELEASES]

HOW = "PG_CONFIG=… bash mk/install.sh released, or mk/made_up_release.sh install"

#: what users have written; no upgrade may lose or change a row of it
DATA = [
    "ml_rag.setting_value",
    "ml_rag.evaluation_run",
    "ml_rag.evaluation_question",
    *(f"ml_rag_internal.keyword_{name}" for name in ("store", "row", "new", "gone", "run", "posting")),
]


def install(owner: Connection, version: str, schema: str = "public") -> None:
    """The extension as a release had it."""
    known = owner.execute(
        "SELECT FROM pg_available_extension_versions WHERE name = 'ml_rag' AND version = %s", (version,)
    ).fetchone()
    if known is None:
        pytest.skip(f"the server lacks the script of {version}: {HOW}")
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
        pytest.fail(f"the upgrade itself fails: {str(e)[:1000]}\nmigrations/README.md says what its script must do")


def data(owner: Connection) -> dict[str, Any]:
    return {
        name: sorted(row for (row,) in owner.execute(sql.SQL("SELECT t::text FROM {} AS t").format(table)))
        for name, table in ((name, sql.Identifier(*name.split("."))) for name in DATA)
    }
