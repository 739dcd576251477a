"""The integrations refuse a superuser's session that has the role which the owner of a database has set.

The same of the other commands is in tests/security/test_names.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from psycopg.conninfo import make_conninfo

from ml_rag.integrations.database import Database as Application
from ml_rag.search_path import BorrowedRole
from support.borrowed_role import role_set_by_the_owner
from support.cluster import Connection, Database


def test_a_superuser_has_no_role_that_the_owner_of_a_database_has_set(db: Database, owner: Connection) -> None:
    dsn = make_conninfo(db.dsn, dbname=db.name)
    with role_set_by_the_owner(db, owner):
        with pytest.raises(BorrowedRole):
            Application(dsn, name="test")
        command = [sys.executable, "-m", "ml_rag.cli", "mcp", "--dsn", dsn]
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
        assert done.returncode, done
        assert "has another role here" in done.stderr, done
        # a role that the caller names is the caller's choice
        Application(f"{dsn} options='-c role={db.role('tenant')}'", name="test").close()
