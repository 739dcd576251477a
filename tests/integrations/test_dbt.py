"""dbt as docs/stack.md has it: `make programs-test` installs it, else there is nothing to run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from support.cluster import Database
from support.stores import create_store, fake_embedding

#: in an environment of its own (mk/large_programs.sh)
DBT = Path(sys.prefix) / "dbt" / "bin" / "dbt"
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "stack.md").read_text()


@pytest.mark.parametrize("materialized", ["table", "view"])
def test_the_recipe(db: Database, asker_dsn: str, tmp_path: Path, materialized: str) -> None:
    owner = db.connect()
    create_store(owner, "public.boats", [("boats.pdf", 1, 1, "blue boat", fake_embedding("blue boat"))], "vector(16)")
    owner.execute("CREATE SCHEMA app")
    owner.execute("CREATE TABLE app.questions (id integer, question text)")
    owner.execute("INSERT INTO app.questions VALUES (1, 'blue boat'), (2, '100%% {{ house }}')")
    owner.execute("GRANT USAGE ON SCHEMA app TO PUBLIC; GRANT SELECT ON app.questions TO PUBLIC")
    known = conninfo_to_dict(asker_dsn)
    output = {
        "type": "postgres", "schema": "public", "threads": 1, "host": known["host"], "port": int(str(known["port"])),
        "user": known["user"], "password": known["password"], "dbname": known["dbname"],
    }  # fmt: skip
    source = {"name": "app", "schema": "app", "tables": [{"name": "questions"}]}
    files = {  # JSON is YAML too
        "dbt_project.yml": {"name": "app", "profile": "app", "models": {"app": {"materialized": materialized}}},
        "profiles.yml": {"app": {"target": "test", "outputs": {"test": output}}},
        "models/sources.yml": {"version": 2, "sources": [source]},
    }
    (tmp_path / "models").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    recipe = re.search(r"<!-- dbt -->\s+```sql\n(.*?)```", PAGE, re.DOTALL)
    assert recipe is not None
    (tmp_path / "models" / "cited.sql").write_text(recipe[1])
    command = [DBT, "--no-send-anonymous-usage-stats", "run", "--profiles-dir", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    rows = owner.execute("SELECT id, document_name, segment FROM public.cited ORDER BY 1").fetchall()
    assert rows == [(1, "boats.pdf", "blue boat"), (2, "boats.pdf", "blue boat")]
