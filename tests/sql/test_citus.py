"""store/citus: docs/scale.md, "Citus": what a store that Citus distributes by document can do, and what it refuses.

Skipped where Citus is not installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support.citus import citus, clusters, has_citus
from support.cluster import Connection
from support.loading import rows
from support.partitions import CALLS, both, fill, send, words
from support.private_cluster import PrivateCluster, programs
from support.stores import answer, error, fake_embedding, mark, warnings_of
from support.vectorizers import create as create_vectorizer
from support.vectorizers import pending as waiting
from support.vectorizers import run

SAME: dict[str, dict[str, Any]] = {
    **CALLS,
    "required keywords": {"required_keywords": ["birch"], "n_citations": 9},
    "manhattan": {"distance_metric": "MANHATTAN", "n_citations": 9},
    "two semantic arms": {
        "arms": [{"search": "semantic"}, {"search": "semantic", "query": {"text": "yew"}}],
        "n_citations": 9,
    },
    "hybrid, filters": {**CALLS["filters"], "keyword_search": True},
    "hybrid, neighbours": {**CALLS["neighbours"], "keyword_search": True},
    "exact": {"index_options": {"exact": True}, "n_citations": 9},
    "threshold of words": {"arms": [{"search": "keyword", "min_score": 0.1}], "n_citations": 9},
}
QUERIES = ("birch oak", "maple maple yew willow", "larch")

pytestmark = pytest.mark.skipif(not has_citus(), reason="Citus is not installed")


@pytest.fixture(scope="module")
def nodes(place: Path, model_server: str) -> Iterator[list[PrivateCluster]]:
    with citus(place, model_server, 2) as found:
        yield found


def connect(nodes: list[PrivateCluster], role: str) -> Connection:
    return psycopg.connect(make_conninfo(nodes[0].dsn, user=role), autocommit=True)


def distribute(connection: Connection, name: str, options: str = "{}") -> None:
    connection.execute("SELECT ml_rag.distribute_store(%s, %s)", (name, options))


@pytest.fixture(scope="module")
def loader(nodes: list[PrivateCluster]) -> Iterator[Connection]:
    """``one``, a table, and ``four``, of the same rows, distributed."""
    with connect(nodes, "loader") as connection:
        for name in ("one", "four"):
            connection.execute(f"SELECT ml_rag.create_store('public.{name}')".encode())
            connection.execute(f"GRANT SELECT ON {name} TO asker".encode())
        fill(connection, "one")
        connection.execute("INSERT INTO four SELECT * FROM one")
        distribute(connection, "four")
        yield connection


@pytest.fixture
def asker(nodes: list[PrivateCluster], loader: Connection) -> Iterator[Connection]:
    with connect(nodes, "asker") as connection:
        yield connection


@pytest.mark.parametrize("call", SAME)
def test_answers_are_those_of_one_table(asker: Connection, call: str) -> None:
    for query in QUERIES:
        one, four = both(asker, query, SAME[call])
        assert four == one
        assert json.loads(one)["citations"]


def test_rows_are_on_the_workers(loader: Connection, nodes: list[PrivateCluster]) -> None:
    places = rows(loader, "SELECT DISTINCT nodename FROM citus_shards WHERE table_name = 'four'::regclass")
    assert {place for (place,) in places} == {str(node.sockets) for node in nodes[1:]}
    assert rows(loader, "SELECT count(*) FROM four") == rows(loader, "SELECT count(*) FROM one")


def test_loads_updates_and_removals_are_found(loader: Connection, asker: Connection) -> None:
    for name in ("one", "four"):
        send(loader, name, {"new": "zebra zebra\n\nzebra giraffe", "d5": "zebra yew", "d7": "okapi"})
        loader.execute(f"UPDATE {name} SET segment = 'gnu ' || segment WHERE document_name = 'd8'".encode())
        loader.execute(f"UPDATE {name} SET metadata = '{{}}' WHERE document_name = 'd10'".encode())
        loader.execute(f"DELETE FROM {name} WHERE document_name = 'd9'".encode())
        vector = json.dumps([float(number) for number in fake_embedding("ibex")])
        with loader.cursor().copy(f"COPY {name} FROM STDIN".encode()) as copy:
            for i in range(3):
                copy.write_row(("copied", "{}", 500 + i, 1, "ibex " * (1 + i), vector))
    for query in ("zebra", "okapi zebra", "gnu", "yew", "ibex"):
        for call in ("words", "hybrid", "meaning"):
            one, four = both(asker, query, CALLS[call])
            assert four == one
    assert len(json.loads(words(asker, "zebra")[1])["citations"]) == 2
    # the same text again changes nothing
    assert send(loader, "four", {"new": "zebra zebra\n\nzebra giraffe"})["documents"]["unchanged"] == 1
    for name in ("one", "four"):
        assert rows(loader, f"SELECT ml_rag.remove_documents('{name}', ARRAY['new', 'd5'])") == [(2,)]
    assert words(asker, "yew")[0] == words(asker, "yew")[1]
    assert "zebra" not in words(asker, "yew zebra")[1]


def test_a_transaction_finds_what_it_has_written(nodes: list[PrivateCluster], loader: Connection) -> None:
    with connect(nodes, "loader") as other, other.transaction(force_rollback=True):
        other.execute("UPDATE four SET segment = 'quagga' WHERE document_name = 'd12'")
        found = answer(other, "quagga", {"vector_store": ["public.four"], "skip_generate": True, **CALLS["words"]})
        assert {c["document_name"] for c in found["citations"]} == {"d12"}
    with error("P0002"):
        answer(loader, "quagga", {"vector_store": ["public.four"], "skip_generate": True, **CALLS["words"]})


def test_a_whole_table_goes(loader: Connection) -> None:
    loader.execute("SELECT ml_rag.create_store('public.emptied')")
    send(loader, "emptied", {"a": "zebra", "b": "yew", "d": "zebra oak"})
    distribute(loader, "emptied")
    loader.execute("TRUNCATE emptied")
    send(loader, "emptied", {"c": "zebra okapi"})
    found = answer(loader, "zebra", {"vector_store": ["public.emptied"], "skip_generate": True, **CALLS["words"]})
    assert [c["document_name"] for c in found["citations"]] == ["c"]
    loader.execute("DROP TABLE emptied, emptied_calls")


def test_an_index_of_each_shard(loader: Connection, asker: Connection) -> None:
    loader.execute("SELECT ml_rag.index_store('four', 'COSINE', '{\"type\": \"hnsw\"}')")
    try:
        for query in QUERIES:
            # so few rows are all found
            for options in (CALLS["meaning"], {"n_citations": 9, "index_options": {"ef_search": 100}}):
                one, four = both(asker, query, options)
                assert four == one
    finally:
        ((index,),) = rows(
            loader,
            "SELECT x.indexrelid::regclass::text FROM pg_index AS x JOIN pg_class AS c ON c.oid = x.indexrelid"
            " JOIN pg_am AS a ON a.oid = c.relam AND a.amname = 'hnsw' WHERE x.indrelid = 'four'::regclass",
        )
        loader.execute(f"DROP INDEX {index}".encode())


def test_what_an_index_is_asked_reaches_the_workers(loader: Connection, asker: Connection) -> None:
    options = {"vector_store": ["public.four"], "skip_generate": True, "explain": True, **CALLS["hybrid"]}
    told = answer(asker, "birch oak", options)["explain"]["stores"][0]
    for arm in ("keyword", "semantic"):
        assert told[arm]["plan"] == "shards"
        assert len(told[arm]["shards"]) == 8
        assert all(shard["limit"] for shard in told[arm]["shards"].values())


def test_the_keyword_index_is_made_anew(loader: Connection, asker: Connection) -> None:
    try:
        for name in ("one", "four"):
            loader.execute(f"SELECT ml_rag.enable_keyword_search('{name}', '{{\"k1\": 2, \"b\": 0.1}}')".encode())
        for query in QUERIES:
            one, four = words(asker, query)
            assert four == one
        loader.execute("SELECT ml_rag.disable_keyword_search('four')")
        with error("55000"):
            answer(asker, "birch", {"vector_store": ["public.four"], "skip_generate": True, **CALLS["words"]})
        left = rows(
            loader,
            "SELECT result FROM run_command_on_shards('four',"
            " $$SELECT count(*) FROM ml_rag._keyword_index('%s'::regclass)$$)",
        )
        assert {row for (row,) in left} == {"0"}
    finally:
        for name in ("one", "four"):
            loader.execute(f"SELECT ml_rag.enable_keyword_search('{name}')".encode())
    assert words(asker)[0] == words(asker)[1]


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
        # statistics of all rows would tell of hidden ones
        with error("55000"):
            words(asker, "birch")
        for name in ("one", "four"):
            loader.execute(f"SELECT ml_rag.enable_keyword_search('{name}', '{{\"statistics\": \"visible\"}}')".encode())
        for query in QUERIES:
            options = {**CALLS["hybrid"], "citation_fields": ["document_id", "score"]}
            one, four = both(asker, query, options)
            assert four == one
            assert {c["document_id"] % 2 for c in json.loads(one)["citations"]} == {0}
    finally:
        for name in ("one", "four"):
            loader.execute(f"DROP POLICY even ON {name}".encode())
            loader.execute(f"ALTER TABLE {name} DISABLE ROW LEVEL SECURITY".encode())
            loader.execute(f"SELECT ml_rag.enable_keyword_search('{name}')".encode())


def test_a_role_without_rights_reads_nothing(nodes: list[PrivateCluster], loader: Connection) -> None:
    with connect(nodes, "stranger") as stranger:
        for call in ("words", "meaning"):
            with error("P0002"):
                answer(stranger, "birch", {"vector_store": ["public.four"], "skip_generate": True, **CALLS[call]})
        # the table of calls is open, and what is sent by way of it is answered as to the role that sends it
        for call in ("statistics", "keyword", "semantic"):
            with pytest.raises(psycopg.Error) as e:
                stranger.execute(
                    "SELECT ml_rag._answer_on_worker('public.four_' || shard, %s) FROM four_calls",
                    (json.dumps({"call": call, "version": rows(stranger, "SELECT ml_rag.version()")[0][0]}),),
                )
            assert e.value.sqlstate in ("42501", "55000")
        with error("42501", ours=False):
            stranger.execute("SELECT count(*) FROM four")
        with error("42501"):
            distribute(stranger, "one")
        with error("42501"):
            distribute(stranger, "four")


MODES = ("auto", "block_writes", "force_logical", "auto")
SHARDS = "SELECT shardid, nodename, nodeport FROM citus_shards WHERE table_name = 'four'::regclass ORDER BY shardid"


def move(owner: Connection, nodes: list[PrivateCluster], shard: tuple[Any, ...], mode: str) -> None:
    number, name, port = shard
    other = next(str(node.sockets) for node in nodes[1:] if str(node.sockets) != name)
    owner.execute("SELECT citus_move_shard_placement(%s, %s, %s, %s, %s, %s)", (number, name, port, other, port, mode))


def test_shards_move_while_they_are_searched_and_written(
    nodes: list[PrivateCluster], loader: Connection, asker: Connection
) -> None:
    stop, wrong, failed = threading.Event(), [], []

    def found(connection: Connection, query: str, place: int) -> list[str]:
        # what is written changes the scores
        answers = both(connection, query, {**CALLS["words"], "n_citations": 100})
        return sorted(c["segment"] for c in json.loads(answers[place])["citations"])

    expected = {query: found(asker, query, 0) for query in QUERIES}

    def search() -> None:
        with connect(nodes, "asker") as other:
            while not stop.is_set():
                try:
                    wrong.extend(query for query in QUERIES if found(other, query, 1) != expected[query])
                except psycopg.Error as e:
                    # of one whose shard has just gone
                    failed.append(e.sqlstate)

    def write() -> None:
        with connect(nodes, "loader") as other:
            i = 0
            while not stop.is_set():
                i += 1
                other.execute(
                    "INSERT INTO four SELECT 'w', metadata, 1000 + %s, 1, 'written ' || %s, segment_embedding"
                    " FROM four WHERE document_name = 'd1' LIMIT 1",
                    (i, i % 3),
                )

    threads = [threading.Thread(target=work) for work in (search, write)]
    shards = rows(loader, SHARDS)
    with psycopg.connect(nodes[0].dsn, autocommit=True) as owner:
        for thread in threads:
            thread.start()
        try:
            for i, shard in enumerate(shards[:4]):
                move(owner, nodes, shard, MODES[i])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert not wrong
    assert len(failed) <= 4, failed
    loader.execute("INSERT INTO one SELECT * FROM four WHERE document_name = 'w'")
    try:
        assert rows(loader, "SELECT count(*) > 3 FROM one WHERE document_name = 'w'") == [(True,)]
        for query in ("written 1", "written 2", *QUERIES):
            one, four = words(asker, query)
            assert four == one
    finally:
        for name in ("one", "four"):
            loader.execute(f"DELETE FROM {name} WHERE document_name = 'w'".encode())


def test_shards_are_split(nodes: list[PrivateCluster], loader: Connection, asker: Connection) -> None:
    with psycopg.connect(nodes[0].dsn, autocommit=True) as owner:
        ((shard, first, last, node),) = rows(
            owner,
            "SELECT s.shardid, s.shardminvalue::int, s.shardmaxvalue::int, n.nodeid FROM pg_dist_shard AS s"
            " JOIN pg_dist_placement AS p USING (shardid) JOIN pg_dist_node AS n USING (groupid)"
            " WHERE s.logicalrelid = 'four'::regclass ORDER BY s.shardid LIMIT 1",
        )
        owner.execute(
            "SELECT citus_split_shard_by_split_points(%s, ARRAY[%s], ARRAY[%s, %s], 'block_writes')",
            (shard, str((first + last) // 2), node, node),
        )
    with error("55000"):
        words(asker)
    distribute(loader, "four")
    for query in QUERIES:
        one, four = words(asker, query)
        assert four == one


@pytest.fixture(scope="module")
def wide(loader: Connection) -> None:
    """A further embedding of ``one`` and ``four``, of another model."""
    for name in ("one", "four"):
        loader.execute(
            f"CALL ml_rag.add_embedding('{name}', 'wide', '{{\"embed_model_id\": \"fake-embed-matryoshka\"}}')".encode()
        )


def pending(connection: Connection, name: str = "four") -> dict[str, int]:
    return dict(rows(connection, f"SELECT name, pending FROM ml_rag.embeddings('{name}')"))


WIDE: dict[str, dict[str, Any]] = {
    "alone": {"arms": [{"search": "semantic", "embedding": "wide"}], "n_citations": 9},
    "of this model": {"embed_model_id": "fake-embed-matryoshka", "n_citations": 9},
    "both, with words": {
        "arms": [{"search": "semantic"}, {"search": "semantic", "embedding": "wide"}, {"search": "keyword"}],
        "n_citations": 20,
    },
    "filters, its own text": {
        "arms": [{"search": "semantic", "embedding": "wide", "query": {"text": "yew"}}],
        "filters": {"document_id": {"gt": 20}},
        "n_citations": 9,
    },
}


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("call", WIDE)
def test_a_further_embedding_answers_as_that_of_one_table(asker: Connection, call: str) -> None:
    for query in QUERIES:
        one, four = both(asker, query, WIDE[call])
        assert four == one
        assert json.loads(one)["citations"]


@pytest.mark.usefixtures("wide")
def test_its_arm_runs_on_the_shards(loader: Connection) -> None:
    options = {"vector_store": ["public.four"], "skip_generate": True, "explain": True, **WIDE["alone"]}
    (told,) = answer(loader, "birch oak", options)["explain"]["stores"]
    assert told["semantic"]["plan"] == "shards"


@pytest.mark.usefixtures("wide")
def test_what_is_written_loses_or_gets_its_further_embedding(
    nodes: list[PrivateCluster], loader: Connection, asker: Connection
) -> None:
    assert pending(loader)["wide"] == 0
    for name in ("one", "four"):
        send(loader, name, {"d13": "zebra yew\n\nokapi", "fresh": "ibex"})
        assert pending(loader, name)["wide"] == 0
        loader.execute(f"UPDATE {name} SET segment = 'gnu ' || segment WHERE document_name = 'd8'".encode())
    changed = rows(loader, "SELECT count(*) FROM four WHERE document_name = 'd8'")[0][0]
    assert pending(loader)["wide"] == changed > 0
    # a shard that is moved takes the trigger along
    with psycopg.connect(nodes[0].dsn, autocommit=True) as owner:
        ((document,),) = rows(owner, "SELECT DISTINCT document_id FROM four WHERE document_name = 'd14'")
        ((shard,),) = rows(owner, "SELECT get_shard_id_for_distribution_column('four'::regclass, %s)", document)
        move(owner, nodes, next(found for found in rows(owner, SHARDS) if found[0] == shard), "block_writes")
    for name in ("one", "four"):
        loader.execute(f"UPDATE {name} SET segment = 'kudu ' || segment WHERE document_name = 'd14'".encode())
    assert pending(loader)["wide"] > changed
    for name in ("one", "four"):
        for embedding in ("fake-embed", "wide"):
            result = rows(loader, f"CALL ml_rag.add_embedding('{name}', '{embedding}')")[0][0]
            assert result["pending"] == result["failed"] == 0
    for query in ("zebra okapi", "gnu", "kudu", "ibex"):
        for call in WIDE.values():
            one, four = both(asker, query, call)
            assert four == one


@pytest.mark.usefixtures("wide")
def test_policies_apply_to_a_further_embedding(loader: Connection, asker: Connection) -> None:
    for name in ("one", "four"):
        loader.execute(f"CREATE POLICY even ON {name} USING (document_id % 2 = 0)".encode())
        loader.execute(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY".encode())
    try:
        one, four = both(asker, "birch oak", {**WIDE["alone"], "citation_fields": ["document_id"]})
        assert four == one
        assert {c["document_id"] % 2 for c in json.loads(one)["citations"]} == {0}
        # its owner fills it for all rows
        loader.execute("UPDATE four SET segment_embedding_wide = NULL")
        assert rows(loader, "CALL ml_rag.add_embedding('four', 'wide')")[0][0]["pending"] == 0
    finally:
        for name in ("one", "four"):
            loader.execute(f"DROP POLICY even ON {name}".encode())
            loader.execute(f"ALTER TABLE {name} DISABLE ROW LEVEL SECURITY".encode())
    assert pending(loader)["wide"] == 0


@pytest.mark.usefixtures("wide")
def test_shards_move_while_a_further_embedding_is_filled(
    nodes: list[PrivateCluster], loader: Connection, asker: Connection
) -> None:
    stop, results = threading.Event(), []

    def fill_again() -> None:
        with connect(nodes, "loader") as other:
            while not stop.is_set():
                other.execute("UPDATE four SET segment_embedding_wide = NULL WHERE document_id % 3 = 0")
                call = "CALL ml_rag.add_embedding('four', 'wide', '{\"batch_size\": 5}')"
                results.append(rows(other, call)[0][0])

    thread = threading.Thread(target=fill_again)
    thread.start()
    try:
        with psycopg.connect(nodes[0].dsn, autocommit=True) as owner:
            for mode in MODES[:2]:
                move(owner, nodes, rows(owner, SHARDS)[0], mode)
    finally:
        stop.set()
        thread.join()
    assert {(result["pending"], result["failed"]) for result in results} == {(0, 0)}
    assert pending(loader)["wide"] == 0
    for query in QUERIES:
        one, four = both(asker, query, WIDE["alone"])
        assert four == one


def test_a_further_embedding_is_indexed_used_and_dropped(nodes: list[PrivateCluster], loader: Connection) -> None:
    loader.execute("SELECT ml_rag.create_store('public.several')")
    fill(loader, "several")
    loader.execute("CALL ml_rag.add_embedding('several', 'before')")
    distribute(loader, "several")
    result = rows(loader, "CALL ml_rag.add_embedding('several', 'after', '{\"index\": {\"type\": \"hnsw\"}}')")[0][0]
    assert (result["pending"], result["failed"]) == (0, 0)
    assert result["segments"] == rows(loader, "SELECT count(*) FROM several")[0][0]
    told = rows(loader, "SELECT name, indexes <> '{}' FROM ml_rag.embeddings('several') ORDER BY 1")
    assert told == [("after", True), ("before", True), ("fake-embed", False)]
    call = {"vector_store": ["public.several"], "skip_generate": True, "n_citations": 9}
    expected = answer(loader, "birch oak", call)
    assert rows(loader, "SELECT ml_rag.use_embedding('several', 'after')") == [("fake-embed",)]
    assert answer(loader, "birch oak", call) == expected
    for name in ("before", "fake-embed"):
        loader.execute("SELECT ml_rag.drop_embedding('several', %s)", (name,))
    assert answer(loader, "birch oak", call) == expected
    with connect(nodes, "stranger") as stranger, error("42501"):
        stranger.execute("CALL ml_rag.add_embedding('several', 'more')")
    loader.execute("DROP TABLE several, several_calls")


@pytest.fixture(scope="module")
def items(loader: Connection) -> None:
    """``plain``, a table with a vectorizer, and the same distributed: ``late`` afterwards, ``early`` before."""
    for name in ITEMS:
        loader.execute(f"CREATE TABLE {name} (id integer PRIMARY KEY, name text, notes text)".encode())
        loader.execute(
            f"INSERT INTO {name} SELECT i, 'item ' || i, (ARRAY['birch oak', 'yew', 'larch fir', ''])[1 + i % 4]"
            " FROM generate_series(1, 60) AS i".encode()
        )
        loader.execute(f"GRANT SELECT ON {name} TO asker".encode())
    loader.execute("SELECT create_distributed_table('early', 'id')")
    for name in ITEMS:
        options = {"metadata": ["notes"], "document_name": "{name}", "keyword_search": True}
        create_vectorizer(loader, name, "{name}: {notes}", **options)
    distribute(loader, "late")
    for name in ITEMS:
        assert run(loader, name)["embedded"] == 60


ITEMS = ("plain", "late", "early")
ITEM_CALLS: dict[str, dict[str, Any]] = {
    **{name: CALLS[name] for name in ("meaning", "words", "hybrid", "rrf", "threshold", "two arms")},
    "metadata": {"citation_fields": ["metadata", "document_id", "score"], "n_citations": 9},
    "metadata, with words": {
        "arms": [{"search": "keyword"}, {"search": "semantic"}],
        "citation_fields": ["metadata", "document_id", "score"],
        "n_citations": 9,
    },
    "filters": {"filters": {"notes": "yew", "id": {"gt": 20}}, "n_citations": 50},
    "document": {"document_name": ["item 7", "item 12"], "n_citations": 50},
}


def of_items(connection: Connection, query: str, options: dict[str, Any]) -> list[str]:
    found = []
    for name in ITEMS:
        call = {"vector_store": [f"public.{name}"], "skip_generate": True, **options}
        found.append(json.dumps(answer(connection, query, call)).replace(f"public.{name}", "public.plain"))
    return found


def assert_items_are_the_same(connection: Connection, *queries: str) -> None:
    for query in queries:
        for call in ("meaning", "words", "hybrid", "metadata", "metadata, with words"):
            plain, *others = of_items(connection, query, ITEM_CALLS[call])
            assert others == [plain, plain]


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize("call", ITEM_CALLS)
def test_tables_with_a_vectorizer_answer_as_one(asker: Connection, call: str) -> None:
    for query in ("birch oak", "item 7", "yew"):
        plain, *others = of_items(asker, query, ITEM_CALLS[call])
        assert others == [plain, plain]
        assert json.loads(plain)["citations"]


@pytest.mark.usefixtures("items")
def test_changed_rows_wait_and_are_embedded_again(
    nodes: list[PrivateCluster], loader: Connection, asker: Connection
) -> None:
    for name in ITEMS:
        loader.execute(f"INSERT INTO {name} VALUES (100, 'zebra', 'okapi'), (101, 'gnu', NULL)".encode())
        loader.execute(f"UPDATE {name} SET notes = 'kudu' WHERE id IN (3, 9)".encode())
        loader.execute(f"UPDATE {name} SET notes = notes WHERE id > 40".encode())
        loader.execute(f"DELETE FROM {name} WHERE id = 5".encode())
        assert waiting(loader, name) == 4
    # a shard that is moved takes triggers and index along
    with psycopg.connect(nodes[0].dsn, autocommit=True) as owner:
        for shard, mode in zip(rows(owner, SHARDS.replace("four", "late")), MODES, strict=False):
            move(owner, nodes, shard, mode)
    for name in ITEMS:
        loader.execute(f"UPDATE {name} SET notes = 'ibex' WHERE id BETWEEN 20 AND 30".encode())
        result = run(loader, name)
        assert (result["embedded"], result["failed"], result["pending"]) == (15, 0, 0)
    assert_items_are_the_same(asker, "zebra okapi", "kudu", "ibex", "gnu")


@pytest.mark.usefixtures("items")
def test_rows_that_fail_are_noted_and_tried_later(loader: Connection, asker: Connection) -> None:
    failed = "SELECT key, sqlstate FROM ml_rag.vectorizer_error WHERE relation = %s::regclass"
    for name in ITEMS:
        loader.execute(f"INSERT INTO {name} VALUES (200, 'long', repeat('x', 1000001)), (201, 'short', 'x')".encode())
        assert (run(loader, name)["embedded"], run(loader, name)["failed"]) == (1, 0)
        assert rows(loader, failed, name) == [("{200}", "54000")]
        assert waiting(loader, name) == 0
        loader.execute(f"UPDATE {name} SET notes = 'y' WHERE id = 200".encode())
        assert run(loader, name)["embedded"] == 1
        assert not rows(loader, failed, name)
    assert_items_are_the_same(asker, "long", "short x")


@pytest.mark.usefixtures("items")
def test_policies_apply_to_tables_with_a_vectorizer(loader: Connection, asker: Connection) -> None:
    for name in ITEMS:
        loader.execute(f"CREATE POLICY even ON {name} USING (id % 2 = 0)".encode())
        loader.execute(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY".encode())
    try:
        plain, *others = of_items(asker, "birch oak", {**CALLS["meaning"], "citation_fields": ["document_id"]})
        assert others == [plain, plain]
        assert {c["document_id"] % 2 for c in json.loads(plain)["citations"]} == {0}
    finally:
        for name in ITEMS:
            loader.execute(f"DROP POLICY even ON {name}".encode())
            loader.execute(f"ALTER TABLE {name} DISABLE ROW LEVEL SECURITY".encode())


@pytest.mark.usefixtures("items")
def test_several_runs_share_the_shards_while_they_move(
    nodes: list[PrivateCluster], loader: Connection, asker: Connection
) -> None:
    stop, results = threading.Event(), []

    def embed() -> None:
        with connect(nodes, "loader") as other:
            while not stop.is_set():
                results.append(run(other, "late", batch_size=3))

    for name in ITEMS:
        loader.execute(f"UPDATE {name} SET notes = notes || ' more'".encode())
    threads = [threading.Thread(target=embed) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with psycopg.connect(nodes[0].dsn, autocommit=True) as owner:
            for shard, mode in zip(rows(owner, SHARDS.replace("four", "late")), MODES, strict=False):
                move(owner, nodes, shard, mode)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for name in ITEMS:
        run(loader, name)
        assert waiting(loader, name) == 0
    assert results
    assert not any(result["failed"] for result in results)
    assert_items_are_the_same(asker, "birch oak more")


def test_a_table_with_another_key_and_the_worker(nodes: list[PrivateCluster], loader: Connection) -> None:
    loader.execute("CREATE TABLE keyed (part uuid, name text, notes text, PRIMARY KEY (part, name))")
    loader.execute(
        "INSERT INTO keyed SELECT md5(i::text)::uuid, 'k' || i, 'note ' || i FROM generate_series(1, 20) AS i"
    )
    create_vectorizer(loader, "keyed", "notes")
    distribute(loader, "keyed")
    environment = {**os.environ, "ML_RAG_DSN": make_conninfo(nodes[0].dsn, user="loader")}
    command = [sys.executable, "-m", "ml_rag.cli", "worker", "--once"]
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert waiting(loader, "keyed") == 0
    found = answer(loader, "note 7", {"vector_store": ["public.keyed"], "skip_generate": True, "n_citations": 50})
    assert {c["segment"] for c in found["citations"]} == {f"note {i}" for i in range(1, 21)}
    loader.execute("SELECT ml_rag.drop_vectorizer('keyed')")
    assert rows(loader, "SELECT count(*) FROM information_schema.columns WHERE table_name = 'keyed'") == [(3,)]
    loader.execute("DROP TABLE keyed, keyed_calls")


def test_a_shard_of_another_server_warns_of_nothing(loader: Connection) -> None:
    with warnings_of(loader) as warnings:
        loader.execute("SELECT ml_rag.create_store('public.served', '{\"shard\": true}')")
    assert [warning for warning in warnings if warning[0] == "WARNING"] == []
    loader.execute("DROP TABLE served CASCADE")


@pytest.mark.parametrize("options", [{"destination": "table"}, {"mode": "immediate"}])
def test_a_table_that_stays_here_has_its_functions_here(
    nodes: list[PrivateCluster], loader: Connection, options: dict[str, str]
) -> None:
    loader.execute("CREATE TABLE here (id integer PRIMARY KEY, notes text)")
    with warnings_of(loader) as warnings:
        create_vectorizer(loader, "here", "notes", **options)
    of_it = "SELECT count(*) FROM pg_proc WHERE proname LIKE 'here%'"
    assert rows(loader, of_it) != [(0,)]
    for node in nodes[1:]:
        with psycopg.connect(node.dsn) as worker:
            assert rows(worker, of_it) == [(0,)]
    with warnings_of(loader) as more:
        loader.execute("SELECT ml_rag.drop_vectorizer('here')")
    assert [warning for warning in [*warnings, *more] if warning[0] == "WARNING"] == []
    loader.execute("DROP TABLE IF EXISTS here, here_segments")


@pytest.mark.parametrize("options", [{"destination": "table"}, {"mode": "immediate"}])
def test_vectorizers_that_cannot_be(loader: Connection, options: dict[str, str]) -> None:
    loader.execute("CREATE TABLE odd (id integer PRIMARY KEY, notes text)")
    try:
        create_vectorizer(loader, "odd", "notes", **options)
        with error("55000"):
            distribute(loader, "odd")
        loader.execute("SELECT ml_rag.drop_vectorizer('odd')")
        loader.execute("SELECT create_distributed_table('odd', 'id')")
        with error("55000"):
            create_vectorizer(loader, "odd", "notes", **options)
        assert rows(loader, "SELECT to_regclass('odd_calls')") == [(None,)]
    finally:
        loader.execute("DROP TABLE odd")


REFUSED: dict[str, Any] = {
    "node groups": "CALL ml_rag.create_node_group('four', 'sentences', '{\"transform\": \"sentence\"}')",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(loader: Connection, what: str) -> None:
    with error("55000"):
        loader.execute(REFUSED[what])


#: what a store has that no distributed one can have
UNFIT = {
    "partitions": ("SELECT ml_rag.create_store('public.unfit', '{\"partitions\": 4}')",),
    "a node group": (
        "SELECT ml_rag.create_store('public.unfit')",
        "CALL ml_rag.create_node_group('unfit', 'sentences', '{\"transform\": \"sentence\"}')",
    ),
    "a key without document_id": (
        "SELECT ml_rag.create_store('public.unfit')",
        "CREATE UNIQUE INDEX ON unfit (document_name, segment_number)",
    ),
    "a table that has the name": (
        "SELECT ml_rag.create_store('public.unfit')",
        "CREATE TABLE unfit_calls (a integer)",
    ),
}


@pytest.mark.parametrize("why", UNFIT)
def test_a_store_that_cannot_be_distributed_stays_as_it_is(loader: Connection, why: str) -> None:
    for statement in UNFIT[why]:
        loader.execute(statement.encode())
    try:
        send(loader, "unfit", {"a": "zebra", "b": "yew"})
        with error("42P07" if why == "a table that has the name" else "55000", ours=why != "a table that has the name"):
            distribute(loader, "unfit")
        assert rows(loader, "SELECT count(*) FROM pg_dist_partition WHERE logicalrelid = 'unfit'::regclass") == [(0,)]
        send(loader, "unfit", {"c": "zebra zebra"})
        found = answer(loader, "zebra", {"vector_store": ["public.unfit"], "skip_generate": True, **CALLS["words"]})
        assert {c["document_name"] for c in found["citations"]} == {"a", "c"}
    finally:
        loader.execute("DROP TABLE IF EXISTS unfit, unfit_calls CASCADE")


def test_a_table_that_somebody_distributed(loader: Connection) -> None:
    loader.execute("SELECT ml_rag.create_store('public.bare')")
    loader.execute("SELECT ml_rag.disable_keyword_search('bare')")
    loader.execute("SELECT create_distributed_table('bare', 'document_id')")
    with error("55000"):
        send(loader, "bare", {"a": "zebra"})
    loader.execute("SELECT ml_rag.enable_keyword_search('bare', '{\"language\": \"en\"}')")
    with error("55000") as e:
        answer(loader, "zebra", {"vector_store": ["public.bare"], "skip_generate": True, **CALLS["words"]})
    assert "distribute_store" in e.hint
    distribute(loader, "bare")
    send(loader, "bare", {"a": "zebras", "b": "yew"})
    found = answer(loader, "zebra", {"vector_store": ["public.bare"], "skip_generate": True, **CALLS["words"]})
    assert [c["document_name"] for c in found["citations"]] == ["a"]
    loader.execute("DROP TABLE bare, bare_calls")


@pytest.mark.parametrize(
    "made",
    [
        "CREATE RULE evil AS ON DELETE TO hostile_calls DO ALSO SELECT run()",
        "CREATE TRIGGER evil AFTER TRUNCATE ON hostile FOR EACH STATEMENT WHEN (run())"
        " EXECUTE FUNCTION ml_rag._wake_workers()",
    ],
    ids=["again", "at first"],
)
def test_who_does_not_trust_its_owner_distributes_no_table(
    nodes: list[PrivateCluster], loader: Connection, made: str
) -> None:
    """Rules and triggers, of its table of calls too, would run with the rights of that role."""
    loader.execute("SELECT ml_rag.create_store('public.hostile')")
    loader.execute(
        "CREATE FUNCTION run() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$"
    )
    try:
        if "hostile_calls" in made:
            distribute(loader, "hostile")
        loader.execute(made.encode())
        with (
            psycopg.connect(nodes[0].dsn, autocommit=True) as administrator,
            warnings_of(administrator) as said,
            error("42501", "is not trusted", "belongs to role loader"),
        ):
            distribute(administrator, "hostile")
        assert [message for _, _, message in said if message.startswith("ran")] == []
    finally:
        loader.execute("DROP TABLE IF EXISTS hostile, hostile_calls; DROP FUNCTION run()")


def test_a_reference_table_is_not_one(loader: Connection) -> None:
    loader.execute("SELECT ml_rag.create_store('public.everywhere')")
    loader.execute("SELECT ml_rag.disable_keyword_search('everywhere')")
    loader.execute("SELECT create_reference_table('everywhere')")
    for name in ("enable_keyword_search", "distribute_store"):
        with error("55000"):
            loader.execute(f"SELECT ml_rag.{name}('everywhere')".encode())
    loader.execute("DROP TABLE everywhere")


def test_it_is_made_one_table_again(loader: Connection) -> None:
    loader.execute("SELECT ml_rag.create_store('public.back')")
    send(loader, "back", {"a": "zebra", "b": "yew"})
    distribute(loader, "back")
    loader.execute("SELECT undistribute_table('back')")
    mark(loader, "back")  # Citus makes a table without comments
    send(loader, "back", {"c": "zebra zebra"})
    found = answer(loader, "zebra", {"vector_store": ["public.back"], "skip_generate": True, **CALLS["words"]})
    assert {c["document_name"] for c in found["citations"]} == {"a", "c"}
    loader.execute("DROP TABLE back, back_calls")


def test_from_one_server_by_the_page(place: Path, model_server: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text().split("\n## Citus\n")[1]
    folder = place / "page"
    folder.mkdir(mode=0o711)
    with clusters(folder, 3) as nodes:
        command, text = re.findall("```(?:sh|sql)\n(.*?)```", page, re.DOTALL)[:2]
        port = str(conninfo_to_dict(nodes[0].dsn)["port"])
        for name, node in zip(("here", "a", "b"), nodes, strict=True):
            text = text.replace(f"'{name}.internal', 5432", f"'{node.sockets}', {port}")
            command = command.replace(f"{name}.internal", str(node.sockets))
        on_workers, on_coordinator, as_owner = (
            [statement for statement in re.sub("--.*", "", block).split(";") if statement.strip()]
            for block in re.split("-- on the server.*|-- as the owner.*", text)
        )
        assert [len(block) for block in (on_workers, on_coordinator, as_owner)] == [1, 4, 1]
        with psycopg.connect(nodes[0].dsn, autocommit=True) as owner:
            owner.execute("CREATE DATABASE library")
        here, *workers = (make_conninfo(node.dsn, dbname="library") for node in nodes)
        with psycopg.connect(here, autocommit=True) as owner:
            owner.execute("CREATE EXTENSION ml_rag CASCADE")
            owner.execute("SELECT ml_rag.configure('model_server', %s)", (model_server,))
            owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed')")
            owner.execute("CREATE ROLE loader LOGIN IN ROLE ml_rag_loader, ml_rag_publisher; CREATE ROLE readers")
            owner.execute("CREATE ROLE asker LOGIN IN ROLE ml_rag_user, readers")
            owner.execute("GRANT CREATE ON SCHEMA public TO loader")
        with psycopg.connect(here, user="loader", autocommit=True) as loader:
            loader.execute("SELECT ml_rag.create_store('public.handbook')")
            fill(loader, "handbook")
            loader.execute("GRANT SELECT ON handbook TO readers")
        before = answers(here)
        environment = {**os.environ, "PATH": f"{programs()}:{os.environ['PATH']}", "PGUSER": "postgres"}
        subprocess.run(["bash", "-c", command], env={**environment, "PGPORT": port}, check=True, capture_output=True)
        for worker in workers:
            with psycopg.connect(worker, autocommit=True) as owner:
                for statement in on_workers:
                    owner.execute(statement.encode())
        with psycopg.connect(here, autocommit=True) as owner:
            for statement in on_coordinator:
                owner.execute(statement.encode())
        with psycopg.connect(here, user="loader", autocommit=True) as loader:
            for statement in as_owner:
                loader.execute(statement.encode())
            assert rows(loader, "SELECT count(*) FROM citus_shards WHERE table_name = 'handbook'::regclass") == [(8,)]
        assert answers(here) == before
        # from a database without Citus, which would do it everywhere
        with psycopg.connect(nodes[1].dsn, autocommit=True) as owner:
            owner.execute("ALTER ROLE asker NOLOGIN")
        with pytest.raises(psycopg.Error) as e:
            answers(here)
        assert e.value.sqlstate == "08006"
        assert str(e.value.diag.message_hint).endswith("If it does not know this role, create it there.")


def answers(dsn: str) -> list[Any]:
    with psycopg.connect(dsn, user="asker", autocommit=True) as asker:
        return [
            answer(asker, query, {"vector_store": ["public.handbook"], "skip_generate": True, **CALLS[call]})
            for call in ("meaning", "words", "hybrid", "neighbours", "filters")
            for query in QUERIES
        ]


def test_it_is_found_unasked_where_its_owner_is_trusted(asker: Connection) -> None:
    found = [("public.four", "trusted"), ("public.one", "trusted")]
    told = rows(asker, "SELECT vector_store, found FROM ml_rag.discover() ORDER BY 1")
    assert [one for one in told if one[0] in dict(found)] == found


@pytest.mark.parametrize("call", ["meaning", "words"])
def test_a_search_ends_with_its_statement_timeout(asker: Connection, call: str) -> None:
    asker.execute("SET statement_timeout = '1ms'")
    with error("57014", ours=False):
        answer(asker, "birch", {"vector_store": ["public.four"], "skip_generate": True, **CALLS[call]})


@pytest.mark.usefixtures("wide", "items")
@pytest.mark.parametrize("call", ["ml_rag.add_embedding('four', 'wide')", "ml_rag.run_vectorizer('late')"])
def test_filling_ends_with_its_statement_timeout_and_goes_on(loader: Connection, call: str) -> None:
    loader.execute("UPDATE four SET segment_embedding_wide = NULL WHERE document_id < 9")
    loader.execute("UPDATE late SET notes = 'again' WHERE id < 9")
    loader.execute("SET statement_timeout = '30ms'")
    try:
        with error("57014"):
            loader.execute(f"CALL {call}".encode())
    finally:
        loader.execute("RESET statement_timeout")
    for own in ("ml_rag.add_embedding('four', 'wide')", "ml_rag.run_vectorizer('late')"):
        assert rows(loader, f"CALL {own}")[0][0]["pending"] == 0


def test_a_worker_goes_and_comes_back(nodes: list[PrivateCluster], loader: Connection) -> None:
    with connect(nodes, "asker") as old:
        words(old)
        nodes[2].stop("fast")
        try:
            with connect(nodes, "loader") as loader, error("08006"):
                loader.execute("CALL ml_rag.add_embedding('four', 'fake-embed')")
            # a session that has connections to it, and a new one
            with connect(nodes, "asker") as new:
                for asker in (old, new):
                    for call in ("words", "meaning", "hybrid"):
                        with error("08006"):
                            answer(
                                asker, "birch", {"vector_store": ["public.four"], "skip_generate": True, **CALLS[call]}
                            )
        finally:
            nodes[2].start()
        with connect(nodes, "asker") as new:
            for asker in (old, new):
                assert words(asker)[0] == words(asker)[1]
