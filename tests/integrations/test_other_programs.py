"""Tables that other programs make: by the programs themselves, adopted with one call, searched, kept in step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from support import writers
from support.cluster import Connection, Database, value_of
from support.stores import search
from support.writers import ADDED, CHANGED, KINDS, TEXTS

#: mk/programs.sh makes it
PYTHON = Path(sys.prefix) / "programs" / "bin" / "python"

#: kind -> what adopt says, the table, the names of the documents
EXPECTED = {
    "pgvector": ("langchain-postgres PGVector", "langchain_pg_embedding", "{}.txt"),
    "pgvectorstore": ("langchain-postgres PGVectorStore", "texts", "{}.txt"),
    "llama_index": ("LlamaIndex", "data_texts", "{}.txt"),
    "haystack": ("Haystack", "haystack_documents", "{}.txt"),
    "pgai": ("pgai", "blog_embedding_store", "public.blog_embedding_store"),
}


def write(db: Database, kind: str, step: str) -> None:
    """As a superuser: some of them make extensions or schemas."""
    known = conninfo_to_dict(db.dsn)
    user = f"{known['user']}@" if "user" in known else ""
    place = "&".join(f"{key}={known[key]}" for key in ("host", "port", "password") if key in known)
    url = f"postgresql://{user}/{db.name}?{place}"
    done = subprocess.run(
        [PYTHON, writers.__file__, kind, url, step], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def adopt(owner: Connection, table: str, **options: Any) -> dict[str, Any]:
    options = {"embed_model_id": "fake-embed", **options}
    result: dict[str, Any] = value_of(owner, "SELECT ml_rag.adopt(%s::regclass, %s)", (table, json.dumps(options)))
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_adopted_with_one_call_and_kept_in_step(
    db: Database, owner: Connection, asker: Connection, kind: str
) -> None:
    made_by, table, name = EXPECTED[kind]
    write(db, kind, "make")
    # the collection apart from the other one, which is in the same table
    result = adopt(owner, table, **({"collection": "birds"} if kind == "pgvector" else {}))
    assert (result["made_by"], result["checked"], result["least_similarity"]) == (made_by, 3, 1)
    store = result["vector_store"]
    owner.execute(f"GRANT SELECT ON {table}, {store} TO ml_rag_user")

    def found(question: str) -> tuple[str, str]:
        row = search(asker, question)[0]
        return row[2], row[5]

    def called(id_: str) -> str:
        return store if kind == "pgai" else name.format(id_)

    assert found(TEXTS["b"]) == (called("b"), TEXTS["b"])
    assert len(search(asker, "q", {"n_citations": 9})) == 3
    if kind != "pgai":
        assert [row[5] for row in search(asker, "q", {"document_name": ["c.txt"]})] == [TEXTS["c"]]
    write(db, kind, "go on")
    assert found(ADDED) == (called("d"), ADDED)
    assert found(CHANGED) == (called("b"), CHANGED)
    texts = {row[5] for row in search(asker, "q", {"n_citations": 9})}
    assert texts == {TEXTS["a"], ADDED, CHANGED}
    # again: nothing but the rows has changed
    assert adopt(owner, store if kind == "pgvector" else table)["vector_store"] == store
