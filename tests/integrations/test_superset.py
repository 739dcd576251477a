"""Superset as docs/stack.md has it: `make programs-test` installs it, else there is nothing to run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from psycopg.conninfo import conninfo_to_dict

from support.cluster import Database
from support.processes import free_port
from support.stores import create_store, fake_embedding

#: in an environment of its own (mk/large_programs.sh)
SUPERSET = Path(sys.prefix) / "superset" / "bin" / "superset"
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "stack.md").read_text()
CONFIG = """
SECRET_KEY = "made for a test, and long enough to be taken"
SQLALCHEMY_DATABASE_URI = "sqlite:///{folder}/superset.db"
WTF_CSRF_ENABLED = False
TALISMAN_ENABLED = False
"""
ADMIN = ["--username", "admin", "--firstname", "a", "--lastname", "b", "--email", "a@example.org", "--password", "made"]


class Superset:
    """What its pages ask of it."""

    def __init__(self, client: httpx.Client, uri: str) -> None:
        self.client = client
        login = {"username": "admin", "password": "made", "provider": "db"}
        client.headers["authorization"] = f"Bearer {self.post('security/login', login)['access_token']}"
        self.database = self.post("database/", {"database_name": "app", "sqlalchemy_uri": uri})["id"]

    def post(self, path: str, content: dict[str, Any]) -> Any:
        answer = self.client.post(f"/api/v1/{path}", json=content)
        assert answer.is_success, answer.text
        return answer.json()

    def sql_lab(self, statement: str) -> httpx.Response:
        content = {"database_id": self.database, "sql": statement, "client_id": uuid.uuid4().hex[:10]}
        return self.client.post("/api/v1/sqllab/execute/", json={**content, "schema": "public", "runAsync": False})

    def rows(self, statement: str) -> list[dict[str, Any]]:
        answer = self.sql_lab(statement)
        assert answer.is_success, answer.text
        rows: list[dict[str, Any]] = answer.json()["data"]
        return rows

    def dataset(self, schema: str, name: str, **more: str) -> int:
        made = self.post("dataset/", {"database": self.database, "schema": schema, "table_name": name, **more})
        number: int = made["id"]
        return number

    def chart(self, dataset: int, **query: Any) -> list[dict[str, Any]]:
        content = {"datasource": {"id": dataset, "type": "table"}, "queries": [query], "result_type": "full"}
        (result,) = self.post("chart/data", content)["result"]
        assert result["error"] is None
        rows: list[dict[str, Any]] = result["data"]
        return rows


@pytest.fixture
def superset(tmp_path: Path, db: Database, asker_dsn: str) -> Iterator[Superset]:
    """A fresh installation that knows the database of the test, as a role that may ask."""
    row = ("boats.pdf", 1, 1, "blue boat", fake_embedding("blue boat"))
    create_store(db.connect(), "public.handbook", [row], "vector(16)")
    known = conninfo_to_dict(asker_dsn)
    place = "&".join(f"{name}={str(known[name]).replace(' ', '%20')}" for name in ("host", "port", "password"))
    (tmp_path / "config.py").write_text(CONFIG.format(folder=tmp_path))
    environment = {**os.environ, "SUPERSET_CONFIG_PATH": str(tmp_path / "config.py"), "SUPERSET_HOME": str(tmp_path)}
    environment["FLASK_APP"] = "superset"
    port = str(free_port())
    with (tmp_path / "log").open("w") as log:
        for command in (["db", "upgrade"], ["fab", "create-admin", *ADMIN], ["init"]):
            done = subprocess.run([SUPERSET, *command], env=environment, stdout=log, stderr=log, check=False)
            assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
        process = subprocess.Popen(
            [SUPERSET, "run", "--host", "127.0.0.1", "--port", port], env=environment, stdout=log, stderr=log
        )
        try:
            address, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
            while True:
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                assert time.monotonic() < until
                try:
                    httpx.get(f"{address}/health", timeout=5).raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.2)
            with httpx.Client(base_url=address, timeout=120) as client:
                yield Superset(client, f"postgresql+psycopg2://{known['user']}@/{known['dbname']}?{place}")
        finally:
            process.terminate()
            process.wait(60)


def test_sql_lab_and_charts(db: Database, superset: Superset) -> None:
    owner = db.connect()
    # SQL Lab
    (row,) = superset.rows("SELECT document_name, distance::float8 FROM ml_rag_search('blue boat')")
    assert (row["document_name"], row["distance"]) == ("boats.pdf", pytest.approx(0, abs=1e-4))
    (row,) = superset.rows("SELECT ml_rag_answer('blue boat', '{\"abstain\": true}') ->> 'text' AS answer")
    assert row["answer"].startswith("fake answer to: blue boat")
    refused = superset.sql_lab("SELECT ml_rag_answer('blue boat', '{\"n_citation\": 2}')")
    assert "unknown option" in refused.text
    assert "Did you mean" in refused.text
    # every relation of schema ml_rag that it lists is one of which a chart can be made
    path = f"/api/v1/database/{superset.database}/tables/"
    listed = superset.client.get(path, params={"q": "(force:!t,schema_name:ml_rag)"}).json()["result"]
    datasets = {one["value"]: superset.dataset("ml_rag", one["value"]) for one in listed}
    assert {"option", "stats", "activity"} <= datasets.keys()
    count = {"expressionType": "SQL", "sqlExpression": "count(*)", "label": "n"}
    for dataset in datasets.values():
        assert len(superset.chart(dataset, metrics=[count], columns=[])) == 1
    found = superset.chart(datasets["option"], columns=["routine"], metrics=[count])
    expected = owner.execute("SELECT routine, count(*)::integer FROM ml_rag.option GROUP BY 1").fetchall()
    assert {row["routine"]: row["n"] for row in found} == dict(expected)
    # the recipe of the page: a virtual dataset, filtered by its question
    owner.execute("CREATE SCHEMA app")
    owner.execute("CREATE TABLE app.questions (question text)")
    owner.execute("INSERT INTO app.questions VALUES ('blue boat'), ('boat''s %s {{ 1 }}')")
    owner.execute("GRANT USAGE ON SCHEMA app TO PUBLIC; GRANT SELECT ON app.questions TO PUBLIC")
    recipe = re.search(r"<!-- superset -->\s+```sql\n(.*?)```", PAGE, re.DOTALL)
    assert recipe is not None
    distance = {"expressionType": "SQL", "sqlExpression": "max(distance)", "label": "distance"}
    only = {"col": "question", "op": "==", "val": "blue boat"}
    found = superset.chart(
        superset.dataset("public", "found", sql=recipe[1]),
        columns=["question", "document_name"], metrics=[distance], filters=[only],
    )  # fmt: skip
    assert found == [{"question": "blue boat", "document_name": "boats.pdf", "distance": pytest.approx(0, abs=1e-4)}]
