"""docs/answers.md: its examples, one after the other."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.cluster import Connection
from support.stores import create_store, fake_embedding

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "answers.md").read_text(encoding="utf-8")
TEXTS = [
    "Hotels are paid in full. The hotel limit is 180 euros in London. Ask your manager first.",
    "Badges open doors. A lost badge is blocked.",
]


def test_the_examples(owner: Connection) -> None:
    rows = [(f"chapter {i}", i, 1, text, fake_embedding(text)) for i, text in enumerate(TEXTS, start=1)]
    create_store(owner, "handbook", rows, type="vector(16)")
    results = []
    for example, shown in re.findall(r"```sql\n(.*?)```(?:\s+```\n(.*?)\n```)?", PAGE, re.DOTALL):
        # each statement by itself, since procedures commit
        for statement in filter(str.strip, re.split(r";\n", example)):
            cursor = owner.execute(statement)
            results.append(cursor.fetchall()[0][0] if cursor.description else None)
        if shown:
            assert (results[-1] if isinstance(results[-1], str) else json.dumps(results[-1])) == shown
    assert "The hotel limit is 180 euros in London." in results[0]["text"]
    assert len(results[0]["citations"]) == 2
    assert results[3] == "Dinner costs up to 40 euros."
    assert results[4] == "The council agreed to build the new bridge over the river."
