"""docs/own-tables.md: its examples, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.cluster import Connection, Database
from support.models_server import ModelsServer
from support.scripted import MODEL, scripted_model

#: asks a capable model, which the next test has
ASKED = "What tents do you have"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-tables.md"


def test_the_examples(owner: Connection, models: ModelsServer) -> None:
    """Values are those of a model server whose embeddings mean nothing: what is asserted is rows, states and names."""
    owner.execute("SELECT ml_rag.configure('embed_model_id', 'all_minilm_l6_v2')")
    results = []
    for example in re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL):
        # each statement by itself, since procedures commit
        for statement in re.split(r";(?: *--.*)?\n", example):
            if statement.strip() and ASKED not in statement:
                cursor = owner.execute(statement)
                results.append((statement.strip(), cursor.fetchall() if cursor.description else None))
    found = [rows for statement, rows in results if '"price": {"lt"' in statement and "items" in str(rows)]
    along = [rows for statement, rows in results if "SELECT document_name, metadata" in statement]
    assert along == [[("public.products/1", {"brand": "Zenith", "price": 89})]]
    joined = [rows or [] for statement, rows in results if " JOIN " in statement and "ml_rag_search" in statement]
    assert sorted(name for name, *_ in joined[0]) == ["Creek", "Ember", "Fjord"]
    assert [pieces for pieces, _ in joined[1]] == [3]
    assert found == [[("public.items/1", "Name: Fjord Description: Waterproof jacket with taped seams Type: jacket")]]
    (states,) = [rows for statement, rows in results if "pending, failed, rows FROM ml_rag.vectorizer" in statement]
    assert states is not None
    assert states[0][1:3] == (1, 0)
    (failures,) = [rows for statement, rows in results if "FROM ml_rag.vectorizer_error" in statement]
    assert failures == [("{4}", 1, "22023", "the text is empty")]
    runs = [rows[0][0]["embedded"] for statement, rows in results if "run_vectorizer" in statement and rows]
    assert runs == [3, 1, 3, 1, 3, 1, 2]
    assert [rows for statement, rows in results if statement.startswith("SELECT pending FROM")] == [[(0,)]]
    (segments,) = [rows for statement, rows in results if "manuals_segments" in statement]
    assert segments is not None
    assert sorted(segments)[-1] == ("Tent", 2, "Dry it before it is packed.")
    *_, (_, jackets) = results
    assert jackets is not None
    assert sorted(name for (name,) in jackets) == ["Ember", "Fjord", "Mystery"]


def test_the_shop_is_asked(db: Database, owner: Connection, reachable_dir: Path) -> None:
    """The model reads the price where it stands: in the prompt."""
    examples = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (at,) = (i for i, example in enumerate(examples) if ASKED in example)

    def model(body: dict[str, Any]) -> Any:
        if "response_format" in body:
            keys = body["messages"][-1]["content"]
            assert '"price": number' in keys
            assert '"brand": text; values such as ["Zenith"]' in keys
            conditions = [("brand", "eq", "Zenith"), ("price", "lt", 100)]
            return {"filters": [{"key": key, "operator": how, "value": value} for key, how, value in conditions]}
        return "They cost " + ", ".join(re.findall(r"^price: (\d+)$", body["messages"][-1]["content"], re.MULTILINE))

    with scripted_model(db, reachable_dir) as script:
        owner.execute("SELECT ml_rag.configure('generate_model_id', %s)", (MODEL,))
        script.answer = model
        for statement in re.split(r";(?: *--.*)?\n", examples[at - 1]):
            if statement.strip() and not statement.startswith("--"):
                owner.execute(statement)
        row = owner.execute(examples[at]).fetchone()
    assert row is not None
    assert row[0]["text"] == "They cost 89"
    assert [citation["metadata"] for citation in row[0]["citations"]] == [{"brand": "Zenith", "price": 89}]
