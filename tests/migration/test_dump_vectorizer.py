"""pg_dump and pg_restore of tables with a vectorizer: it goes on, and nothing is embedded again."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cluster import Cluster, Connection, Database
from support.models_server import ModelsServer, models
from support.programs import dump, restore
from support.vectorizers import assert_in_step, assert_segments_in_step, create, run

__all__ = ["models"]


@pytest.mark.parametrize("how", ["plain", "custom"])
def test_a_vectorizer_goes_on_where_it_is_restored(
    cluster: Cluster, db: Database, owner: Connection, models: ModelsServer, tmp_path: Path, how: str
) -> None:
    for table, destination in (("beside", "column"), ("apart", "table")):
        owner.execute(f"CREATE TABLE {table} (id integer PRIMARY KEY, name text, price numeric)")
        owner.execute(f"INSERT INTO {table} VALUES (1, E'lamp\n\nred', 1), (2, 'tent', 2), (3, ' ', 3)")
        create(owner, table, "name", destination=destination)
        assert run(owner, table)["embedded"] == 2
        # one waits while it is dumped
        owner.execute(f"INSERT INTO {table} VALUES (4, 'hat', 4)")
    dump(db, how, tmp_path / "dump")
    with cluster.database("template0") as target:
        restore(target, how, tmp_path / "dump")
        restored = target.connect()
        models.requests.clear()
        for table in ("beside", "apart"):
            assert run(restored, table)["embedded"] == 1
        assert models.embedded("fake-embed") == ["hat", "hat"]
        restored.execute("UPDATE beside SET name = 'cap' WHERE id = 4; UPDATE apart SET name = 'cap' WHERE id = 4")
        restored.execute("DELETE FROM beside WHERE id = 3; DELETE FROM apart WHERE id = 3")
        run(restored, "beside")
        run(restored, "apart")
        assert_in_step(restored, "beside")
        assert_segments_in_step(restored, "apart")
        restored.execute("SELECT ml_rag.drop_vectorizer('beside'), ml_rag.drop_vectorizer('apart')")
