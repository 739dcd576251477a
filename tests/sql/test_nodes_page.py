"""docs/nodes.md: its examples, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.cluster import Connection, Database
from support.scripted import MODEL, scripted_model

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "nodes.md").read_text(encoding="utf-8")
TEXTS = ["Remote work is fine. Ask your manager first.", "Badges open doors. A lost badge is blocked."]


def written(body: dict[str, Any]) -> Any:
    (asked,) = body["response_format"]["json_schema"]["schema"]["properties"]
    is_remote = "Remote" in body["messages"][-1]["content"]
    return {asked: "about remote work" if is_remote else "about badges"}


def test_the_examples(db: Database, owner: Connection, local_sockets: Path) -> None:
    results = []
    with scripted_model(db, local_sockets) as script:
        script.answer = written
        owner.execute("SELECT ml_rag.configure('generate_model_id', %s)", (MODEL,))
        for example in re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL):
            # each statement by itself, since procedures commit
            for statement in filter(str.strip, re.split(r";\n", example)):
                cursor = owner.execute(statement)
                results.append(cursor.fetchall() if cursor.description else None)
    assert results[4] == [("chapter 1", TEXTS[0])]
    assert results[5] == [(TEXTS[0], "Remote work is fine.")]
    assert results[6][0] == ("Remote work is fine.",)
    assert len(results[6]) == 3
    assert results[13] == [
        ("sentences", "sentence", "segment", 4, 0, 0),
        ("document_summary", "summary", "document", 2, 0, 0),
        ("sentence", "sentence", "segment", 4, 0, 0),
        ("block_summary", "summary", "segment", 2, 0, 0),
        ("keyword", "keyphrases", "segment", 2, 0, 0),
        ("sentence_length", "public.length_of", "sentence", 4, 0, 0),
    ]
    for name, *_ in results[13]:
        assert re.search(rf"^ {name} +\|.*\| +[24] \| +0 \| +0$", PAGE, re.MULTILINE), name
    searches = [[row[0] for row in found] for found in results[14:20]]
    assert [found[0] for found in searches] == [
        *(TEXTS[0], TEXTS[0], "Remote work is fine.", TEXTS[0], "about remote work", TEXTS[1]),
    ]
    assert [len(found) for found in searches] == [2, 2, 3, 2, 1, 1]
    assert results[20][0][0] == TEXTS[0]
    assert results[21][0][0]["parents"] == 0
