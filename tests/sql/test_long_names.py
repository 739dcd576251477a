"""What ml_rag makes beside a table has its name, as far as 63 bytes have room for it and what is added."""

from __future__ import annotations

import json

import pytest

from support.cluster import Connection, value_of
from support.models_server import ModelsServer
from support.stores import error
from support.vectorizers import create, run

#: of 62 and 63 bytes: PostgreSQL cuts a longer name to that of the table itself
NAMES = ["é" * 31, "é" * 31 + "x", "x" * 63, "x" + "é" * 31]


@pytest.mark.parametrize("name", NAMES)
def test_a_table_of_segments(owner: Connection, models: ModelsServer, name: str) -> None:
    relation = f'public."{name}"'
    owner.execute(f'CREATE TABLE {relation} ("{name}" text PRIMARY KEY); INSERT INTO {relation} VALUES (1)')
    create(owner, relation, [name], destination="table", mode="immediate")
    owner.execute(f"INSERT INTO {relation} VALUES (2)")
    assert run(owner, relation)["embedded"] == 1
    with error("42710"):
        create(owner, relation, [name], destination="table")
    made = owner.execute("SELECT relname FROM pg_class WHERE relname LIKE '%\\_segments' AND relkind = 'r'").fetchall()
    assert len(made) == 1
    assert name.startswith(made[0][0].removesuffix("_segments"))


@pytest.mark.parametrize("name", NAMES)
def test_node_groups_and_shards(owner: Connection, models: ModelsServer, name: str) -> None:
    options = '{"shard": true}'
    if len(name.encode()) == 63:
        with error("22023", "shard", "63 bytes"):
            owner.execute("SELECT ml_rag.create_store(%s, %s)", (f"public.{name}", options))
        options = "{}"
    owner.execute("SELECT ml_rag.create_store(%s, %s)", (f"public.{name}", options))
    owner.execute(
        "SELECT ml_rag.load_documents(%s, '{a.txt}', ARRAY['One sentence. Another one.'::bytea])", (f"public.{name}",)
    )
    for group in ("s1", "s2"):
        result = value_of(
            owner,
            "CALL ml_rag.create_node_group(%s::regclass, %s, %s)",
            (f'public."{name}"', group, json.dumps({"transform": "sentence"})),
        )
        assert result["failed"] == 0
        assert result["parents"] == 1
