"""docs/chat.md: every example runs."""

from __future__ import annotations

import re
from pathlib import Path

from support.cluster import Connection
from support.stores import create_store, fake_embedding

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


def test_every_example_runs(owner: Connection) -> None:
    create_store(owner, "docs", [("a.pdf", 1, 1, "perks", fake_embedding("perks"))], "vector(16)")
    variables: dict[str, str] = {}
    statements = re.split(r"(;|\\gset)[^\n]*\n", "".join(EXAMPLES))
    assert len(statements) >= 23
    for statement, end in zip(statements[::2], statements[1::2], strict=False):
        for name, value in variables.items():
            statement = statement.replace(f":'{name}'", f"'{value}'")
        cursor = owner.execute(statement.encode())
        if end == r"\gset":
            assert cursor.description is not None
            variables[cursor.description[0].name] = (cursor.fetchone() or [""])[0]
    assert owner.execute("SELECT count(*) FROM ml_rag.message").fetchone() == (0,)
