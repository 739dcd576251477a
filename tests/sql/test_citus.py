"""docs/scale.md, "Citus": what a store that Citus distributes by document can do, and what it refuses.

Skipped where Citus is not installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from support.cluster import Connection
from support.loading import rows
from support.partitions import CALLS, both, fill, send
from support.private_cluster import PG_CONFIG, PrivateCluster, private_cluster
from support.stores import answer, error

WORDS = {"words", "hybrid", "rrf", "two arms"}
MEANING = {
    **{name: options for name, options in CALLS.items() if name not in WORDS},
    "required keywords": {"required_keywords": ["birch"], "n_citations": 9},
    "manhattan": {"distance_metric": "MANHATTAN", "n_citations": 9},
    "two semantic arms": {
        "arms": [{"search": "semantic"}, {"search": "semantic", "query": {"text": "yew"}}],
        "n_citations": 9,
    },
}
NODES = 3


def has_citus() -> bool:
    config = os.environ.get(PG_CONFIG)
    if not config:
        return False
    folder = subprocess.run([config, "--pkglibdir"], capture_output=True, text=True, check=False).stdout.strip()
    return (Path(folder) / "citus.so").exists()


pytestmark = pytest.mark.skipif(not has_citus(), reason="Citus is not installed")


@pytest.fixture(scope="module")
def nodes(place: Path, model_server: str) -> Iterator[list[PrivateCluster]]:
    """A coordinator, whose ml_rag Citus has made on two workers too."""
    with contextlib.ExitStack() as stack:
        found = []
        for i in range(NODES):
            folder = place / f"citus{i}"
            folder.mkdir(mode=0o711)
            node = stack.enter_context(private_cluster(folder, durable=False))
            node.configure(
                "shared_preload_libraries = 'citus'\ncitus.shard_count = 8\nmax_prepared_transactions = 100\n"
                f"citus.local_hostname = '{node.sockets}'"
            )
            node.stop("fast")
            node.start()
            with psycopg.connect(node.dsn, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION citus")
            found.append(node)
        with psycopg.connect(found[0].dsn, autocommit=True) as owner:
            port = owner.info.port
            owner.execute("SELECT citus_set_coordinator_host(%s, %s)", (str(found[0].sockets), port))
            for node in found[1:]:
                owner.execute("SELECT citus_add_node(%s, %s)", (str(node.sockets), port))
            owner.execute("CREATE EXTENSION vector; CREATE EXTENSION plpython3u; CREATE EXTENSION ml_rag")
            owner.execute("SELECT ml_rag.configure('model_server', %s)", (model_server,))
            for kind in ("embed", "generate", "rerank"):
                owner.execute("SELECT ml_rag.configure(%s, %s)", (f"{kind}_model_id", f"fake-{kind}"))
            owner.execute(
                "CREATE ROLE loader LOGIN IN ROLE ml_rag_loader, ml_rag_publisher;"
                "CREATE ROLE asker LOGIN IN ROLE ml_rag_user"
            )
            owner.execute("GRANT CREATE ON SCHEMA public TO loader")
        yield found


def connect(nodes: list[PrivateCluster], role: str) -> Connection:
    return psycopg.connect(make_conninfo(nodes[0].dsn, user=role), autocommit=True)


@pytest.fixture(scope="module")
def loader(nodes: list[PrivateCluster]) -> Iterator[Connection]:
    """``one``, a table, and ``four``, of the same rows, distributed."""
    with connect(nodes, "loader") as connection:
        connection.execute("SELECT ml_rag.create_store('public.one')")
        fill(connection, "one")
        connection.execute('SELECT ml_rag.create_store(\'public.four\', \'{"index": {"type": "none"}}\')')
        connection.execute("SELECT ml_rag.disable_keyword_search('four')")
        connection.execute("SELECT create_distributed_table('four', 'document_id')")
        connection.execute("INSERT INTO four SELECT * FROM one")
        connection.execute("GRANT SELECT ON one, four TO ml_rag_user")
        yield connection


@pytest.fixture
def asker(nodes: list[PrivateCluster], loader: Connection) -> Iterator[Connection]:
    with connect(nodes, "asker") as connection:
        yield connection


@pytest.mark.parametrize("call", MEANING)
@pytest.mark.parametrize("query", ["birch oak", "maple maple yew willow", "larch"])
def test_answers_are_those_of_one_table(asker: Connection, call: str, query: str) -> None:
    one, four = both(asker, query, MEANING[call])
    assert four == one
    assert json.loads(one)["citations"]


@pytest.mark.parametrize("call", sorted(WORDS))
def test_words_are_not_searched(asker: Connection, call: str) -> None:
    options = {"vector_store": ["public.four"], "skip_generate": True, **CALLS[call]}
    with error("55000"):
        answer(asker, "birch", options)


def test_rows_are_on_the_workers(loader: Connection, nodes: list[PrivateCluster]) -> None:
    places = rows(loader, "SELECT DISTINCT nodename FROM citus_shards WHERE table_name = 'four'::regclass")
    assert {place for (place,) in places} == {str(node.sockets) for node in nodes[1:]}


def test_an_index_of_each_shard(loader: Connection, asker: Connection) -> None:
    loader.execute("SELECT ml_rag.index_store('four', 'COSINE', '{\"type\": \"hnsw\"}')")
    try:
        for query in ("birch oak", "larch"):
            one, four = both(asker, query, CALLS["meaning"])
            # so few rows are all found
            assert four == one
    finally:
        ((index,),) = rows(
            loader,
            "SELECT x.indexrelid::regclass::text FROM pg_index AS x JOIN pg_class AS c ON c.oid = x.indexrelid"
            " JOIN pg_am AS a ON a.oid = c.relam AND a.amname = 'hnsw' WHERE x.indrelid = 'four'::regclass",
        )
        loader.execute(f"DROP INDEX {index}".encode())


def test_policies_apply_on_the_workers(loader: Connection, asker: Connection) -> None:
    for name in ("one", "four"):
        # Citus takes one statement at a time
        loader.execute(f"CREATE POLICY even ON {name} USING (document_id % 2 = 0)".encode())
        loader.execute(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY".encode())
    try:
        for call in ("meaning", "neighbours", "filters", "document"):
            options = {**CALLS[call], "citation_fields": ["document_id", "segment_number"]}
            one, four = both(asker, "birch oak", options)
            assert four == one
            if call != "document":
                assert {c["document_id"] % 2 for c in json.loads(one)["citations"]} == {0}
    finally:
        for name in ("one", "four"):
            loader.execute(f"DROP POLICY even ON {name}".encode())
            loader.execute(f"ALTER TABLE {name} DISABLE ROW LEVEL SECURITY".encode())


REFUSED: dict[str, Any] = {
    "words": "SELECT ml_rag.enable_keyword_search('four')",
    "loads": "SELECT ml_rag.load_documents('four', ARRAY['x'], ARRAY['birch'::bytea])",
    "embeddings": "CALL ml_rag.add_embedding('four', 'fake-embed')",
    "vectorizers": "SELECT ml_rag.create_vectorizer('four', '{\"columns\": [\"segment\"]}')",
    "node groups": "CALL ml_rag.create_node_group('four', 'sentences', '{\"transform\": \"sentence\"}')",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(loader: Connection, what: str) -> None:
    with error("55000"):
        loader.execute(REFUSED[what])


def test_rows_come_and_go(loader: Connection, asker: Connection) -> None:
    send(loader, "one", {"new": "zebra zebra"})
    loader.execute("INSERT INTO four SELECT * FROM one WHERE document_name = 'new'")
    try:
        one, four = both(asker, "zebra", CALLS["meaning"])
        assert four == one
        assert "zebra" in one
    finally:
        for name in ("one", "four"):
            removed = rows(loader, f"SELECT ml_rag.remove_documents('{name}', ARRAY['new'])")
            assert removed
    one, four = both(asker, "zebra", CALLS["meaning"])
    assert four == one
    assert "zebra" not in one


def test_it_is_found_unasked_where_its_owner_is_trusted(asker: Connection) -> None:
    found = [("public.four", "trusted"), ("public.one", "trusted")]
    assert rows(asker, "SELECT vector_store, found FROM ml_rag.discover() ORDER BY 1") == found


def test_a_search_ends_with_its_statement_timeout(asker: Connection) -> None:
    asker.execute("SET statement_timeout = '1ms'")
    with error("57014", ours=False):
        answer(asker, "birch", {"vector_store": ["public.four"], "skip_generate": True})
