"""pg_dump and pg_restore of a store with node groups: only what has changed is made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cluster import Cluster, Connection, Database
from support.models_server import ModelsServer, models
from support.nodes import create, nodes, refresh
from support.programs import dump, restore
from support.stores import create_store, fake_embedding, search

__all__ = ["models"]

TEXTS = {(1, 1): "Herons wait for fish. Grebes dive.", (2, 1): "Loons call at night. Terns hover."}
IN_SENTENCES = {"arms": [{"search": "keyword", "in": "sentences"}], "return": "node"}


@pytest.mark.parametrize("how", ["plain", "custom"])
def test_node_groups_go_on_where_they_are_restored(
    cluster: Cluster, db: Database, owner: Connection, models: ModelsServer, tmp_path: Path, how: str
) -> None:
    rows = [(f"d{d}", d, n, text, fake_embedding(text)) for (d, n), text in TEXTS.items()]
    create_store(owner, "docs", rows, type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    owner.execute(
        "CREATE FUNCTION public.synonyms(t text) RETURNS SETOF text LANGUAGE sql IMMUTABLE"
        " AS $$SELECT 'ardeidae' WHERE t ~ 'Herons'$$"
    )
    create(owner, "sentences", transform="sentence")
    create(owner, "words", transform="public.synonyms", embed=False, keyword_search=False, merge=True)
    # one waits while it is dumped
    owner.execute("UPDATE docs SET segment = 'Swans are heavy. Ducks swim.' WHERE document_id = 2")
    query = "SELECT name, transform, rows, pending, failed FROM ml_rag.node_group ORDER BY name"
    before = owner.execute(query).fetchall()
    assert before == [("sentences", "sentence", 4, 1, 0), ("words", "public.synonyms", 1, 1, 0)]
    dump(db, how, tmp_path / "dump")
    with cluster.database("template0") as target:
        restore(target, how, tmp_path / "dump")
        restored = target.connect()
        assert restored.execute(query).fetchall() == before
        assert [row[5] for row in search(restored, "grebes", IN_SENTENCES)] == ["Grebes dive."]
        assert [row[3] for row in search(restored, "ardeidae", {"arms": [{"search": "keyword"}]})] == [1]
        models.requests.clear()
        assert refresh(restored)["parents"] == 2
        assert sorted(models.embedded("fake-embed")) == ["Ducks swim.", "Swans are heavy."]
        assert nodes(restored, "sentences")[2, 1] == ["Swans are heavy.", "Ducks swim."]
        assert refresh(restored)["parents"] == 0
        restored.execute("DELETE FROM docs WHERE document_id = 1")
        assert set(nodes(restored, "sentences")) == {(2, 1)}
        restored.execute("SELECT ml_rag.drop_node_group('docs', 'words'), ml_rag.drop_node_group('docs', 'sentences')")
        assert restored.execute("SELECT to_regclass('docs_sentences')").fetchone() == (None,)
