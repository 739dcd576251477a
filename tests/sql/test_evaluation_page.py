"""docs/evaluation.md: its examples, one after the other, in a fresh database."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.cluster import Connection, Database
from support.scripted import MODEL, scripted_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"


def model(body: dict[str, Any]) -> Any:
    """Asks for the first words of a text, and finds no answer to a question about the weather."""
    if "response_format" not in body:
        return "I do not know."
    asked = body["messages"][-1]["content"]
    properties = body["response_format"]["json_schema"]["schema"]["properties"]
    if "is_answered" in properties:
        return {"is_answered": False}
    text = asked.partition("\n")[2].partition("\n</document>")[0]
    if "answer" in properties:
        return {"question": f"{text[:-1]}?", "answer": text.split()[-2]}
    return {"question": f"What is the weather, {text.split()[-1]}?"}


def test_the_examples(db: Database, owner: Connection, reachable_dir: Path) -> None:
    results: list[tuple[str, Any]] = []
    with scripted_model(db, reachable_dir) as script:
        script.answer = model
        owner.execute("SELECT ml_rag.configure('generate_model_id', %s)", (MODEL,))
        for example in re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL):
            for statement in re.split(r";(?: *--.*)?\n", example):
                if statement.strip() and not statement.startswith("--"):
                    cursor = owner.execute(statement)
                    results.append((statement.strip(), cursor.fetchall() if cursor.description else None))

    def of(beginning: str) -> Any:
        return [found for statement, found in results if statement.startswith(beginning)]

    first, hybrid = of("SELECT ml_rag_evaluate('questions'")[:2]
    assert first[0][0]["recall@3"] == hybrid[0][0]["recall@3"] == 1
    (compared,) = of("SELECT * FROM ml_rag_compare_runs(1, 2)")
    assert "recall@1" in {row[0] for row in compared}
    assert [found for statement, found in results if "topic = " in statement] == [[(1,)]]
    (made,) = of("SELECT question, reference, document_name")
    answerable = [row for row in made if row[4]]
    assert len(answerable) == len({row[2] for row in answerable}) == 2
    assert all(reference in question for question, reference, *_ in answerable)
    assert [row[1:] for row in made if not row[4]] == [(None, None, None, False)]
    (own,) = [found for statement, found in results if "cited_documents}" in statement]
    assert 1 <= own[0][0] <= 3
    limits = of("SELECT option, threshold")
    assert [row[0] for row in limits[0]] == ["max_distance"]
    assert len(of("CALL ml_rag('Who won the match?'")) == 1
