"""docs/ranking.md: its examples, one after the other, in a fresh database."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.cluster import Connection

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ranking.md").read_text(encoding="utf-8")


def test_the_examples(owner: Connection) -> None:
    results: list[Any] = []
    for example in re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL):
        for statement in filter(str.strip, re.split(r";(?: *--.*)?\n", re.sub(r" +--.*", "", example))):
            # a cross-encoder, which the page says that one has to download
            model = "fake-rerank" if '"candidates": 30' in statement else None
            owner.execute("SELECT ml_rag.configure('rerank_model_id', %s)", (model,))
            cursor = owner.execute(statement)
            results.append(cursor.fetchall() if cursor.description else None)
    _, *loaded, ranked, by_hybrid, records, _, _, rows = results
    assert [found[0][0]["segments"] for found in loaded] == [1, 1]
    for found in (ranked, by_hybrid):
        assert found[0][0] == "leave"
        assert 0 < found[0][2] <= 1
    (document,) = records[0]
    assert document["model"] == "hybrid"
    assert [record["id"] for record in document["records"]] == ["2"]
    assert [(rank, question) for rank, question, _ in rows] == [
        (1, "How do I reset my password?"),
        (2, "Where is the canteen?"),
    ]
