"""The examples of docs/nl_sql.md run, and return what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.cluster import Connection, value_of
from support.schema import SqlModel

TEXT = (Path(__file__).parents[2] / "docs" / "nl_sql.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_examples_run(model: SqlModel, shop: Connection, asker: Connection) -> None:
    (document,) = map(json.loads, blocks("json"))
    model.writes(document["sql_query"])
    first, procedure, examples, tables = blocks("sql")
    for statement in (first, procedure):
        assert {**value_of(asker, statement), "model_id": "…"} == document
    assert (asker.execute(examples).fetchone() or [{}])[0]["is_sql_valid"] is True
    assert "born >= DATE '2026-01-01'" in model.asked[-1]["messages"][1]["content"]
    text = (asker.execute(tables).fetchone() or [""])[0]
    assert text.startswith("CREATE TABLE shop.orders ( -- what they bought\n  id integer NOT NULL,\n")
