"""docs/embeddings.md: its examples, one after the other, in a fresh database."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Connection
from support.hostile_server import hostile
from support.models_server import ModelsServer
from support.stores import fake_embedding

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "embeddings.md").read_text(encoding="utf-8")


class Models(ModelsServer):
    """The models of the page, with as many dimensions as these have."""

    def vectors(self, texts: list[str], model: str) -> list[list[float]]:
        return [fake_embedding(text, int(model.partition("@")[2] or 384)) for text in texts]


@pytest.fixture
def models(owner: Connection, local_sockets: Path) -> Iterator[None]:
    with hostile(local_sockets, Models(), owner=owner):
        owner.execute("SELECT ml_rag.configure('embed_model_id', 'all_minilm_l6_v2')")
        yield


@pytest.mark.usefixtures("models")
def test_the_examples(owner: Connection) -> None:
    results: list[tuple[str, Any]] = []
    for example, shown in re.findall(r"```sql\n(.*?)```(?:\s+```\n(.*?)\n```)?", PAGE, re.DOTALL):
        # each statement by itself, since procedures commit
        for statement in filter(str.strip, re.split(r";(?: *--.*)?\n", example)):
            cursor = owner.execute(statement)
            results.append((statement.strip(), cursor.fetchall() if cursor.description else None))
        if shown:
            said = [tuple(cell.strip() for cell in line.split("|")) for line in shown.splitlines()[2:]]
            assert said == [
                tuple(str(cell)[0].lower() if isinstance(cell, bool) else str(cell) for cell in row)
                for row in results[-1][1]
            ]

    def of(beginning: str) -> list[Any]:
        return [found for statement, found in results if statement.startswith(beginning)]

    assert of("SELECT document_name FROM ml_rag_search('What if I lose")[0] == [("chapter 2",)]
    assert len(of("SELECT document_name FROM ml_rag_search('Wer darf")[0]) == 1
    assert of("SELECT ml_rag.use_embedding") == [[("all_minilm_l6_v2",)]]
    ((made,),) = of("CALL ml_rag.add_embedding('handbook', 'half'")[0]
    assert (made["segments"], made["failed"], made["pending"]) == (2, 0, 0)
    row = owner.execute(
        "SELECT vector_dims(ml_embed_row('a', '{\"embed_model_id\": \"nomic-embed-text-v1.5@256\"}'))"
    ).fetchone()
    assert row == (256,)
    assert all(len(found) > 0 for found in of("SELECT * FROM ml_rag.tune_index"))
    listed = owner.execute("SELECT name, is_default FROM ml_rag.embeddings('handbook') ORDER BY name").fetchall()
    assert listed == [("half", False), ("multilingual", True)]
