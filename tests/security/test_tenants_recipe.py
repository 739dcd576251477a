"""The recipe for several tenants in one store, as docs/security.md has it."""

from __future__ import annotations

import re
from pathlib import Path

from psycopg.types.json import Jsonb

from support.cluster import Connection, Database
from support.stores import as_text, fake_embedding

DOCS = Path(__file__).parents[2] / "docs/security.md"


def test_each_tenant_finds_its_own(db: Database, owner: Connection) -> None:
    section = DOCS.read_text().split("## Several tenants in one store")[1]
    recipe = section.split("```sql")[1].split("```")[0]
    owner.execute(re.sub("tenant_a", db.role("asker"), re.sub("tenant_b", db.role("tenant"), recipe)))
    texts = {"asker": "amber is ours", "tenant": "beryl is ours"}
    for number, (role, text) in enumerate(texts.items()):
        db.connect(role).execute(
            "INSERT INTO shared.papers VALUES (%s, '{}', %s, 1, %s, %s::vector)",
            (role, number, text, as_text(fake_embedding(text))),
        )
    owner.execute("SELECT ml_rag.index_store('shared.papers')")
    for role, text in texts.items():
        for options in ({}, {"keyword_search": True}, {"keyword_search": True, "semantic_search": False}):
            rows = db.connect(role).execute(
                "SELECT document_name, segment FROM ml_rag_search('amber or beryl, ours', %s)", (Jsonb(options),)
            )
            assert rows.fetchall() == [(role, text)]
