"""docs/questions.md: every example runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from support.cluster import Connection, Database
from support.scripted import scripted_model
from support.stores import create_store, fake_embedding

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "questions.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
WRITTEN = {"question": "perks", "synonyms": ["fitness"], "hypothetical_document": "A passage.", "filters": []}


def written(body: dict[str, Any]) -> Any:
    asked = body.get("response_format", {}).get("json_schema", {}).get("schema", {}).get("properties", {})
    return {name: WRITTEN[name] for name in asked} if asked else "a summary"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


def test_every_example_runs(db: Database, owner: Connection, reachable_dir: Path) -> None:
    names = ["PerksPlus.pdf", "/srv/docs/plan.pdf"]
    create_store(
        owner, "docs", [(n, i, 1, "perks", fake_embedding("perks")) for i, n in enumerate(names)], "vector(16)"
    )
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    owner.execute("CREATE SCHEMA shop")
    create_store(owner, "shop.products", [("tent", 1, 1, "a tent", fake_embedding("a tent"))], "vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('shop.products')")
    owner.execute("ALTER TABLE shop.products ADD price numeric DEFAULT 20")
    with scripted_model(db, reachable_dir, model="house-llm") as script:
        script.answer = written
        for example in EXAMPLES:
            owner.execute(example)
        assert script.requests


def test_what_it_says_that_rewrite_gives(owner: Connection) -> None:
    (call,) = (example for example in EXAMPLES if example.startswith("SELECT ml_rag.rewrite("))
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert owner.execute(call).fetchall() == [(json.loads(shown),)]
