"""store/shards, store/serve, pipeline/shards: a store on several clusters answers as one table."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import ml_rag
from support.citus import without_citus
from support.cluster import Connection, Database, noticed, value_of, waits_for_a_lock
from support.loading import loader_role, rows
from support.partitions import CALLS, both, fill, send, words
from support.processes import Background, wait_until
from support.shards import Shard, attach, empty, make_shard, map_roles, shards
from support.stores import answer, error, warnings_of


@pytest.fixture(scope="module")
def clusters(place: Path, model_server: str) -> Iterator[list[Shard]]:
    with shards(place, model_server, 2) as found:
        yield found


@pytest.fixture
def shard(db: Database, owner: Connection, loader: Connection, clusters: list[Shard]) -> Iterator[list[Shard]]:
    """Two empty clusters whose servers the roles here can use."""
    map_roles(db, owner, clusters, {loader_role(db): "loader", db.role("asker"): "asker"})
    yield clusters
    for cluster in clusters:
        empty(cluster)


@pytest.fixture
def stores(shard: list[Shard], loader: Connection) -> Connection:
    """``one``, a table, and ``four``, of the same rows in four partitions, which are all here."""
    loader.execute(
        "SELECT ml_rag.create_store('public.one'); SELECT ml_rag.create_store('public.four', '{\"partitions\": 4}')"
    )
    fill(loader, "four")
    loader.execute("INSERT INTO one SELECT * FROM four")
    loader.execute("GRANT SELECT ON one, four TO ml_rag_user")
    for cluster in shard:
        make_shard(cluster, "a", "b", "c")
    return loader


@pytest.fixture
def sharded(stores: Connection, shard: list[Shard]) -> Connection:
    """``four`` with all its partitions on two clusters."""
    for i in range(4):
        attach(stores, "four", i, shard[i % 2], "ab"[i // 2])
    return stores


def compare(connection: Connection, *calls: str) -> None:
    """Both stores answer all calls, or those named, alike."""
    for call, options in CALLS.items():
        for query in ("birch oak", "maple maple yew willow") if not calls or call in calls else ():
            one, four = both(connection, query, options)
            assert four == one, (call, query)
            assert json.loads(one)["citations"], (call, query)


FEW = ("meaning", "words", "hybrid", "neighbours", "filters")


def test_answers_are_those_of_one_table_while_its_partitions_move(
    stores: Connection, asker: Connection, shard: list[Shard]
) -> None:
    for i in range(4):
        assert attach(stores, "four", i, shard[i % 2], "ab"[i // 2]) == f"four_s{i}"
        if i == 0:
            # some here, some there; by the name of the table, and by that of a partition
            for name, part in (("one", "one"), ("four", "four_p1")):
                stores.execute(
                    f"UPDATE {name} SET segment = 'birch birch' WHERE document_id % 5 = 0 AND segment_number = 1;"
                    f"DELETE FROM {name} WHERE document_id % 9 = 0;"
                    f"DELETE FROM {part} WHERE document_id IN (SELECT min(document_id) FROM four_p1);"
                )
            compare(asker, *FEW)
    compare(asker)
    kinds = "SELECT DISTINCT c.relkind FROM pg_partition_tree('four') AS p JOIN pg_class AS c ON c.oid = p.relid"
    assert rows(stores, f"{kinds} WHERE isleaf") == [("f",)]
    # a shard moves to another place, and all come back
    assert attach(stores, "four", 0, shard[1], "c") == "four_s4"
    compare(asker, *FEW)
    for i in range(4):
        stores.execute("SELECT ml_rag.detach_shard('four', %s)", (i,))
    compare(asker, *FEW)
    assert rows(stores, "TABLE one ORDER BY 3, 4") == rows(stores, "TABLE four ORDER BY 3, 4")
    # as it was before: a key, and triggers for each statement
    assert rows(stores, "SELECT indisprimary FROM pg_index WHERE indrelid = 'four'::regclass AND indisprimary") == [
        (True,)
    ]
    levels = "SELECT tgtype & 1, count(*) FROM pg_trigger WHERE tgrelid::regclass::text ~ '^four' GROUP BY 1"
    assert rows(stores, levels) == [(0, 20)]


def test_rows_that_are_as_good_as_the_last(sharded: Connection, asker: Connection) -> None:
    for name in ("one", "four"):
        sharded.execute(
            f"INSERT INTO {name} SELECT 'd', '{{}}', 1000 + i, 1, 'alder', v FROM generate_series(1, 900) AS i,"
            " (SELECT segment_embedding FROM one LIMIT 1) AS e (v)".encode()
        )
    one, four = both(asker, "alder", {"keyword_search": True, "semantic_search": False, "n_citations": 2})
    assert four == one
    assert len(json.loads(one)["citations"]) == 2


def test_searches_go_on_while_shards_come_and_move(
    db: Database, stores: Connection, asker: Connection, shard: list[Shard]
) -> None:
    options = {"keyword_search": True, "n_citations": 20}
    expected = both(asker, "birch oak", options)
    other = db.connect("asker")
    done = threading.Event()

    def ask() -> int:
        n = 0
        while not done.is_set():
            assert both(other, "birch oak", options) == expected
            n += 1
        return n

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            for i, name in ((0, "a"), (1, "b"), (0, "c")):
                attach(stores, "four", i, shard[i % 2], name)
            with shard[0].connect() as there:
                there.execute("TRUNCATE a")
            attach(stores, "four", 2, shard[0], "a")
        finally:
            done.set()
        assert asking.result() > 0


def remote(owner: Connection, options: dict[str, Any]) -> list[str]:
    """What a search of a superuser sends to the shards, and how it is planned."""
    for server in ("server0", "server1"):
        owner.execute(
            f"CREATE USER MAPPING IF NOT EXISTS FOR CURRENT_USER SERVER {server} OPTIONS (user 'postgres')".encode()
        )
    owner.execute(
        "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on;"
        "SET auto_explain.log_verbose = on; SET client_min_messages = log"
    )
    plans = noticed(owner)
    found = answer(owner, "birch", {"vector_store": ["public.four"], "skip_generate": True, **options})
    assert all(citation["distance"] is not None for citation in found["citations"])
    return [line.strip() for plan in plans for line in plan.split("\n")]


@pytest.mark.parametrize("call", ["hybrid", "filters"])
def test_shards_run_an_arm_side_by_side(sharded: Connection, owner: Connection, call: str) -> None:
    lines = remote(owner, CALLS[call])
    rounds = {"hybrid": 3, "filters": 1}[call]
    assert sum("Async Foreign Scan" in line for line in lines) == 4 * rounds
    # nothing else is read, and no vectors come as text
    sent = [line for line in lines if "Remote SQL" in line]
    assert len([line for line in sent if "ml_rag._shard_answer(store" in line]) == 4 * rounds
    assert [line for line in sent if "_shard_answer" not in line] == []
    # nor other options than those that say which rows count
    given = [line.split('"options": ')[1] for line in sent if '"options": ' in line]
    assert given
    for text in given:
        assert list(json.JSONDecoder().raw_decode(text)[0]) == [name for name in CALLS[call] if name == "filters"]


def test_the_nearest_are_sorted_and_limited_on_the_shards_side_by_side(sharded: Connection, owner: Connection) -> None:
    lines = remote(owner, {"n_citations": 6, "retrieval_options": {"segment_overlap": 0}})
    assert sum("Async Foreign Scan on public.four_s" in line for line in lines) == 4
    sent = [line for line in lines if "Remote SQL" in line]
    assert len(sent) == 4
    for line in sent:
        assert "ORDER BY (segment_embedding OPERATOR(public.<=>)" in line
        assert line.endswith("LIMIT 7::bigint")


def test_an_index_of_a_shard_serves_its_part(sharded: Connection, asker: Connection, shard: list[Shard]) -> None:
    for cluster in shard:
        with cluster.connect("loader") as other:
            for name in ("a", "b"):
                other.execute(f"SELECT ml_rag.index_store('{name}', 'COSINE', '{{\"type\": \"hnsw\"}}')")
    options = {"vector_store": ["public.four"], "skip_generate": True, "explain": True, "n_citations": 3}
    filters = {"filters": {"document_id": {"gt": 0}}}
    for more, plan, ef_search in (
        ({"index_options": {"ef_search": 77}}, "hnsw", 77),
        ({"index_options": {"ef_search": 77, "exact": True}}, "exact", None),
        (filters, "exact", None),
    ):
        (store,) = answer(asker, "birch oak", {**options, **more})["explain"]["stores"]
        assert (store["semantic"]["plan"], store["semantic"]["candidates"]) == ("shards", 3)
        facts = store["semantic"]["shards"]
        assert sorted(facts) == [f"public.four_s{n}" for n in range(4)]
        assert {(f["plan"], f.get("ef_search")) for f in facts.values()} == {(plan, ef_search)}


def test_who_may_not_read_the_partitions_gets_the_same(sharded: Connection, asker: Connection) -> None:
    """Or an error, where words are asked for."""
    sharded.execute("REVOKE SELECT ON four_s2 FROM ml_rag_user")
    compare(asker, "meaning", "neighbours", "filters", "words")
    sharded.execute("REVOKE SELECT ON four_s2_calls FROM ml_rag_user")
    compare(asker, "meaning", "neighbours", "filters")
    partial = {"vector_store": ["public.four"], "skip_generate": True, "partial": True}
    assert "missing_shards" not in answer(asker, "birch", partial)["retrieval_info"]
    sharded.execute("GRANT SELECT ON four_s2 TO ml_rag_user")
    compare(asker, "meaning", "neighbours", "filters")
    for call in ("words", "hybrid"):
        with error("42501", "four_s2_calls", ours=False):
            answer(asker, "birch", {"vector_store": ["public.four"], "skip_generate": True, **CALLS[call]})


def test_times_in_filters_are_read_as_in_the_callers_session(
    stores: Connection, asker: Connection, shard: list[Shard]
) -> None:
    for name in ("one", "four"):
        stores.execute(f"ALTER TABLE {name} ADD created timestamptz")
        stores.execute(
            f"UPDATE {name} SET created = '2026-02-01 00:00+00'::timestamptz + document_id * interval '1 hour'"
        )
    with shard[0].connect("loader") as other:
        other.execute("ALTER TABLE a ADD created timestamptz")
    attach(stores, "four", 0, shard[0], "a")
    # the same with postgres_fdw's own
    asker.execute("SET TimeZone = 'America/New_York'; SET DateStyle = 'SQL, DMY'")
    options = {"filters": {"created": {"gte": "01/02/2026 12:00"}}, "n_citations": 100}
    for more in ({}, CALLS["words"], CALLS["hybrid"]):
        one, four = both(asker, "birch oak", {**more, **options, "n_citations": 100})
        assert four == one
        assert json.loads(one)["citations"]


def test_who_may_not_read_a_partition_that_is_here(stores: Connection, asker: Connection, shard: list[Shard]) -> None:
    attach(stores, "four", 0, shard[0], "a")
    stores.execute("REVOKE SELECT ON four_p1 FROM ml_rag_user")
    compare(asker, "meaning", "neighbours", "filters")
    with error("42501", "four_p1", ours=False):
        answer(asker, "birch", {"vector_store": ["public.four"], "skip_generate": True, **CALLS["words"]})


def test_documents_go_to_their_shard(sharded: Connection, asker: Connection, shard: list[Shard]) -> None:
    texts = {f"n{i}": f"zebra number {i}" for i in range(12)}
    assert send(sharded, "four", texts)["documents"]["loaded"] == 12
    assert send(sharded, "four", {"n3": "quagga", "n4": texts["n4"]})["documents"] == {
        "loaded": 0, "changed": 1, "unchanged": 1, "removed": 0, "skipped": 0, "failed": 0,
    }  # fmt: skip
    parts = rows(sharded, "SELECT DISTINCT tableoid::regclass::text FROM four WHERE document_name ~ '^n' ORDER BY 1")
    assert len(parts) > 1
    wrong = (
        "SELECT count(*) FROM (SELECT document_id FROM four_s{0} OFFSET 0) AS t"
        " WHERE NOT satisfies_hash_partition('four'::regclass, 4, {0}, document_id)"
    )
    assert [rows(sharded, wrong.format(i)) for i in range(4)] == [[(0,)]] * 4
    found = answer(asker, "zebra quagga", {"vector_store": ["public.four"], "skip_generate": True, **CALLS["words"]})
    assert sorted(c["document_name"] for c in found["citations"]) == sorted(texts)
    assert rows(sharded, "SELECT ml_rag.remove_documents('four', ARRAY['n3', 'n5'])") == [(2,)]
    assert rows(sharded, "SELECT count(*) FROM four WHERE document_name ~ '^n'") == [(10,)]


VISIBLE = '{"statistics": "visible"}'


def test_policies_of_the_shards_apply(stores: Connection, asker: Connection, shard: list[Shard]) -> None:
    stores.execute("SELECT ml_rag.enable_keyword_search(s, %s) FROM unnest('{one,four}'::regclass[]) AS s", (VISIBLE,))
    stores.execute("CREATE POLICY even ON one USING (document_id % 2 = 0); ALTER TABLE one ENABLE ROW LEVEL SECURITY")
    for i, other in enumerate(shard):
        with other.connect("loader") as owner:
            for name in "ab":
                owner.execute("SELECT ml_rag.enable_keyword_search(%s, %s)", (name, VISIBLE))
        attach(stores, "four", i, other, "a")
        attach(stores, "four", i + 2, other, "b")
        with other.connect("loader") as owner:
            for name in "ab":
                owner.execute(f"CREATE POLICY even ON {name} USING (document_id % 2 = 0)")
                owner.execute(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY")
    compare(asker, *FEW)
    compare(stores, "words")
    found = answer(asker, "birch oak", {"vector_store": ["public.four"], "skip_generate": True, **CALLS["fields"]})
    assert {c["document_id"] % 2 for c in found["citations"]} == {0}


def test_partitions_are_nobody_s_to_read_once_the_last_shard_is_back(
    sharded: Connection, asker: Connection, owner: Connection
) -> None:
    """From then on the store can have policies, which a partition that is read by its name has not."""
    for i in range(4):
        assert rows(asker, "SELECT count(*) > 0 FROM four") == [(True,)]
        sharded.execute("SELECT ml_rag.detach_shard('four', %s)", (i,))
    parts = [
        name for (name,) in rows(owner, "SELECT relid::regclass::text FROM pg_partition_tree('four') WHERE isleaf")
    ]
    assert len(parts) == 4
    sharded.execute("ALTER TABLE four ENABLE ROW LEVEL SECURITY")
    for name in ("four", *parts):
        assert rows(owner, f"SELECT has_table_privilege('ml_rag_user', '{name}', 'SELECT')") == [(name == "four",)]
    assert rows(asker, "SELECT count(*) FROM four") == [(0,)]


def test_how_often_words_stand_in_hidden_rows_is_not_told(
    sharded: Connection, asker: Connection, shard: list[Shard]
) -> None:
    with shard[0].connect("loader") as owner:
        owner.execute("CREATE POLICY even ON a USING (document_id % 2 = 0); ALTER TABLE a ENABLE ROW LEVEL SECURITY")
    with error("55000", "of hidden rows too", ours=False):
        words(asker)


def test_words_of_shards_have_their_indexes_there(sharded: Connection) -> None:
    with error("55000", "cannot have a keyword index") as caught:
        sharded.execute("SELECT ml_rag.enable_keyword_search('four')")
    assert "call it there" in caught.hint


def test_a_shard_that_does_not_answer(sharded: Connection, asker: Connection, shard: list[Shard]) -> None:
    options = {"vector_store": ["public.four"], "skip_generate": True, "n_citations": 50}
    everything = answer(asker, "birch oak", {**options, "partial": True})
    assert "missing_shards" not in everything["retrieval_info"]
    # in order: what is committed is not yet on disk in these clusters
    shard[1].cluster.stop("fast")
    try:
        for more in ({}, CALLS["words"], {"keyword_search": True}):
            with error("08006", "server1", '"public.four" does not answer') as caught:
                answer(asker, "birch oak", {**options, **more})
            assert "partial" in caught.hint
            # what libpq says
            assert 'could not connect to server "server1": connection to server' in caught.detail
            assert "\n" not in caught.detail
            with warnings_of(asker) as told:
                found = answer(asker, "birch oak", {**options, **more, "partial": True})
            assert found["retrieval_info"]["missing_shards"] == ["public.four_s1", "public.four_s3"]
            assert [(level, state) for level, state, _ in told] == [("WARNING", "01000")] * 2
            assert '"public.four_s1" of "public.four" does not answer' in told[0][2]
            assert found["citations"]
        names = {c["document_name"] for c in everything["citations"]}
        assert {c["document_name"] for c in found["citations"]} < names
        overlap = {"retrieval_options": {"segment_overlap": 1}, "partial": True}
        assert answer(asker, "birch oak", {**options, **overlap})["citations"]
        shard[0].cluster.stop("fast")
        with error("08006", 'no shard of "public.four" answers'):
            answer(asker, "birch oak", {**options, "partial": True})
    finally:
        for one in shard:
            one.cluster.stop("fast")
            one.cluster.start()
    assert answer(asker, "birch oak", options)["citations"] == everything["citations"]
    compare(asker, "words")


def test_stores_of_other_servers_than_a_silent_one_are_searched(
    sharded: Connection, asker: Connection, shard: list[Shard]
) -> None:
    for name, server in (("here", shard[0]), ("there", shard[1])):
        sharded.execute(f"SELECT ml_rag.create_store('public.{name}', '{{\"partitions\": 1}}')".encode())
        sharded.execute(f"GRANT SELECT ON {name} TO ml_rag_user".encode())
        make_shard(server, "d")
        attach(sharded, name, 0, server, "d")
        send(sharded, name, {name: "birch"})
    calls: tuple[dict[str, Any], ...] = ({}, {"keyword_search": True}, {"filters": {"document_id": {"gt": 0}}})
    options = {"skip_generate": True, "n_citations": 100, "exclude_vector_store": ["public.one"]}
    shard[1].cluster.stop("fast")
    try:
        for call in calls:
            with warnings_of(asker) as told:
                found = answer(asker, "birch", {**options, **call})
            assert [c["document_name"] for c in found["citations"]] == ["here"]
            assert [text.split('"')[1] for *_, text in told] == ["public.four", "public.there"]
    finally:
        shard[1].cluster.start()


def test_a_slow_shard_is_given_up(
    sharded: Connection, asker: Connection, owner: Connection, shard: list[Shard]
) -> None:
    options = {"vector_store": ["public.four"], "skip_generate": True}
    for call in ({}, CALLS["words"]):
        answer(asker, "birch", {**options, **call})
        with shard[1].connect() as other:
            other.execute("BEGIN; LOCK TABLE a, b IN ACCESS EXCLUSIVE MODE")
            asker.execute("SET statement_timeout = '1s'")
            began = time.monotonic()
            with error("57014", ours=False):
                answer(asker, "birch", {**options, **call})
            assert time.monotonic() - began < 1.5
            asker.execute("RESET statement_timeout")
    # where the server has a limit of its own, the shard counts as silent
    limits = "-c lock_timeout=1000 -c statement_timeout=300", "-c lock_timeout=300"
    owner.execute(f"ALTER SERVER server1 OPTIONS (ADD options '{limits[0]}')".encode())
    with shard[1].connect() as other:
        other.execute("BEGIN; LOCK TABLE a, b IN ACCESS EXCLUSIVE MODE")
        for limit, why in zip(limits, ("statement timeout", "lock timeout"), strict=True):
            owner.execute(f"ALTER SERVER server1 OPTIONS (SET options '{limit}')".encode())
            for call in ({}, CALLS["words"], CALLS["filters"]):
                with error("08006", "server1", why):
                    answer(asker, "birch", {**options, **call})
        found = answer(asker, "birch", {**options, "partial": True})
        assert found["retrieval_info"]["missing_shards"] == ["public.four_s1", "public.four_s3"]
    assert answer(asker, "birch", options)["citations"]


VERSION = "CREATE OR REPLACE FUNCTION ml_rag.version() RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT ''{}''::text'"


WRITTEN = (
    "INSERT INTO four (document_name, metadata, document_id, segment_number, segment, segment_embedding)"
    " SELECT 'w', '{}', i, 1, 'text', array_fill(1, '{16}')::vector FROM generate_series(1000, 1019) AS i"
)


def test_rows_that_are_written_while_a_partition_waits_to_be_moved_move_too(
    db: Database, stores: Connection, owner: Connection, shard: list[Shard]
) -> None:
    """Also from one table of a server to another one, which reads as of its first statement."""
    values = "OPTIONS (user 'loader', password_required 'false')"
    owner.execute(f"CREATE USER MAPPING FOR CURRENT_USER SERVER server0 {values}".encode())
    writer = db.connect()
    count = "SELECT count(*) FROM four"
    ((n,),) = rows(stores, count)

    def move(run: Callable[[], object]) -> None:
        writer.execute("DELETE FROM four WHERE document_name = 'w'")
        with writer.transaction():
            writer.execute(WRITTEN)
            moving = Background(run)
            wait_until(lambda: waits_for_a_lock(owner, stores) or moving.ended)
        moving.result()
        assert rows(stores, count) == [(n + 20,)]

    move(lambda: attach(stores, "four", 0, shard[0], "a"))
    move(lambda: attach(stores, "four", 0, shard[0], "b"))
    move(lambda: stores.execute("SELECT ml_rag.detach_shard('four', 0)"))


@pytest.mark.parametrize("call", ["words", "hybrid", "filters", "meaning"])
def test_a_search_that_waits_while_a_partition_comes_back_finds_its_rows(
    db: Database, sharded: Connection, owner: Connection, call: str
) -> None:
    options = {"vector_store": ["public.four"], "skip_generate": True, **CALLS[call], "n_citations": 100}
    asker = db.connect("asker")
    expected = answer(asker, "birch", options)["citations"]
    with sharded.transaction():
        sharded.execute("SELECT ml_rag.detach_shard('four', 0)")
        asking = Background(lambda: answer(asker, "birch", options)["citations"])
        wait_until(lambda: asking.ended or waits_for_a_lock(owner, asker))
    assert asking.result() == expected


def test_what_is_moved_away_from_a_server_stays_there(sharded: Connection, shard: list[Shard]) -> None:
    """That server commits first: a crash between both would lose what is deleted there."""
    expected = rows(sharded, "SELECT count(*) FROM four")
    notices = noticed(sharded, lambda notice: (notice.message_primary, notice.message_hint))
    hint = "Delete them there once this transaction is committed."
    with shard[0].connect() as other:
        there = rows(other, "SELECT document_id, segment_number FROM a ORDER BY 1, 2")
        sharded.execute("SELECT ml_rag.detach_shard('four', 0)")
        assert notices.pop() == (f"the rows stay in table public.a of server {shard[0].server}", hint)
        assert rows(sharded, "SELECT document_id, segment_number FROM four_p0 ORDER BY 1, 2") == there != []
        assert rows(other, "SELECT document_id, segment_number FROM a ORDER BY 1, 2") == there
        with error("55000", "the shard has rows already"):
            attach(sharded, "four", 0, shard[0], "a")
        other.execute("TRUNCATE a")
    attach(sharded, "four", 0, shard[0], "a")
    assert attach(sharded, "four", 1, shard[0], "c") == "four_s4"
    assert notices.pop() == (f"the rows stay in table public.a of server {shard[1].server}", hint)
    assert rows(sharded, "SELECT count(*) FROM four") == expected


def test_no_row_is_lost_that_a_policy_of_a_partition_hides_from_its_owner(
    stores: Connection, shard: list[Shard]
) -> None:
    before = rows(stores, "SELECT count(*) FROM four")
    stores.execute("ALTER TABLE four_p0 ENABLE ROW LEVEL SECURITY; ALTER TABLE four_p0 FORCE ROW LEVEL SECURITY")
    with error("55000", 'four" cannot have shards', "or a partition has row-level security"):
        attach(stores, "four", 0, shard[0], "a")
    assert rows(stores, "SELECT count(*) FROM four") == before
    stores.execute("ALTER TABLE four_p0 DISABLE ROW LEVEL SECURITY")
    attach(stores, "four", 0, shard[0], "a")
    assert rows(stores, "SELECT count(*) FROM four") == before


def test_no_row_is_lost_that_a_policy_of_a_shard_hides_from_its_owner(
    sharded: Connection, owner: Connection, shard: list[Shard]
) -> None:
    """Also where no table of calls is left to ask it by."""
    policy = "CREATE POLICY even ON {0} USING (document_id % 2 = 0); ALTER TABLE {0} {1} ROW LEVEL SECURITY".format
    before = rows(sharded, "SELECT * FROM four ORDER BY document_id, segment_number")
    foreign = rows(owner, "SELECT ftrelid::regclass::text FROM pg_foreign_table ORDER BY 1")
    with shard[0].connect("loader") as other:
        other.execute(policy("a", "FORCE").encode())
        other.execute("ALTER TABLE a ENABLE ROW LEVEL SECURITY")
    refused = "55000", "row-level security of shard", "applies to you", "would be lost"
    for move in (
        lambda: sharded.execute("SELECT ml_rag.detach_shard('four', 0)"),
        lambda: attach(sharded, "four", 0, shard[1], "c"),
    ):
        with error(*refused):
            move()
        sharded.execute("ALTER FOREIGN TABLE four_s0_calls RENAME TO another")
        sharded.execute("CREATE VIEW four_s0_calls AS SELECT 0::oid AS store")
        with error(*refused):
            move()
        sharded.execute("DROP VIEW four_s0_calls; ALTER FOREIGN TABLE another RENAME TO four_s0_calls")
    # nor do rows go where they would be hidden
    with shard[0].connect("loader") as other:
        other.execute(policy("c", "FORCE").encode())
        other.execute("ALTER TABLE c ENABLE ROW LEVEL SECURITY")
    with error("55000", "applies to you"):
        attach(sharded, "four", 1, shard[0], "c")
    with shard[0].connect("loader") as other:
        other.execute("ALTER TABLE a NO FORCE ROW LEVEL SECURITY; ALTER TABLE c NO FORCE ROW LEVEL SECURITY")
    assert rows(owner, "SELECT ftrelid::regclass::text FROM pg_foreign_table ORDER BY 1") == foreign
    sharded.execute("SELECT ml_rag.detach_shard('four', 0)")
    assert rows(sharded, "SELECT * FROM four ORDER BY document_id, segment_number") == before


def test_no_row_is_lost_that_a_trigger_of_a_shard_leaves_out(stores: Connection, shard: list[Shard]) -> None:
    before = rows(stores, "SELECT * FROM four ORDER BY document_id, segment_number")
    loses = {
        "BEFORE": "IF NEW.document_id % 2 = 0 THEN RETURN NULL; END IF;",
        "AFTER": "DELETE FROM public.a WHERE document_id % 2 = 0;",
    }
    for timing, body in loses.items():
        with shard[0].connect("loader") as other:
            other.execute(
                "CREATE OR REPLACE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS"
                f" $$ BEGIN {body} RETURN NEW; END $$;"
                f"CREATE TRIGGER lose {timing} INSERT ON a FOR EACH ROW EXECUTE FUNCTION lose()".encode()
            )
        with error("55000", "has got", "four_p0", "leave rows out"):
            attach(stores, "four", 0, shard[0], "a")
        with shard[0].connect("loader") as other:
            other.execute("DROP TRIGGER lose ON a")
    assert rows(stores, "SELECT * FROM four ORDER BY document_id, segment_number") == before
    attach(stores, "four", 0, shard[0], "a")
    assert rows(stores, "SELECT * FROM four ORDER BY document_id, segment_number") == before


def test_a_partition_that_comes_back_takes_a_free_name(
    sharded: Connection, owner: Connection, asker: Connection
) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker.execute("CREATE TYPE four_p0 AS ()")
    before = rows(sharded, "SELECT count(*) FROM four")
    assert rows(sharded, "SELECT ml_rag.detach_shard('four', 0)::text") == [("four_p1",)]
    assert rows(sharded, "SELECT ml_rag.detach_shard('four', 1)::text") == [("four_p2",)]
    assert rows(sharded, "SELECT count(*) FROM four") == before


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_no_partition_is_moved_as_an_older_snapshot_shows_it(
    sharded: Connection, shard: list[Shard], level: str
) -> None:
    """It would be dropped with the rows that the snapshot does not show."""
    sharded.execute(f"SET default_transaction_isolation = '{level}'".encode())
    with error("55000", "cannot be moved at this isolation level", level.lower(), "would be missed"):
        attach(sharded, "four", 0, shard[0], "c")
    with error("55000", "cannot be moved at this isolation level"):
        sharded.execute("SELECT ml_rag.detach_shard('four', 0)")


@pytest.mark.parametrize("before", ["SELECT FROM four LIMIT 1", "SELECT FROM four_s0_calls", "TABLE beside"])
def test_no_partition_is_moved_by_a_transaction_that_has_read_its_server(
    sharded: Connection, loader: Connection, shard: list[Shard], before: str
) -> None:
    """It reads there as of its first statement: what others have written since would not move."""
    with shard[0].connect("loader") as other:
        other.execute("CREATE TABLE beside ()")
    loader.execute(f"CREATE FOREIGN TABLE beside () SERVER {shard[0].server}".encode())
    told = "cannot be moved in this transaction", "would be lost"
    for move in (
        lambda: sharded.execute("SELECT ml_rag.detach_shard('four', 0)"),
        lambda: attach(sharded, "four", 0, shard[0], "c"),
        lambda: attach(sharded, "four", 3, shard[0], "c"),
    ):
        with sharded.transaction():
            sharded.execute(before.encode())
            with error("55000", *told), sharded.transaction():
                move()
    # its own reads count as well: another partition, or another store, could have been written to since
    with sharded.transaction():
        sharded.execute("SELECT ml_rag.detach_shard('four', 0)")
        with error("55000", *told), sharded.transaction():
            sharded.execute("SELECT ml_rag.detach_shard('four', 1)")
    sharded.execute("DROP FOREIGN TABLE beside")


def test_a_table_is_one_shard_only(shard: list[Shard], loader: Connection, owner: Connection) -> None:
    """Of an empty store nothing else tells: its rows would be found twice."""
    loader.execute("SELECT ml_rag.create_store('public.four', '{\"partitions\": 4}')")
    make_shard(shard[0], "a", "b")
    attach(loader, "four", 0, shard[0], "a")
    for partition in (0, 1):
        with error("55000", f'server "{shard[0].server}" is a shard of "public.four" already', '"table_name"'):
            attach(loader, "four", partition, shard[0], "a")
    # another server of the same address is the same one
    role = value_of(loader, "SELECT quote_ident(current_user)")
    (options,) = owner.execute(
        "SELECT string_agg(format('%%I %%L', o.option_name, o.option_value), ', ') FROM pg_foreign_server AS s,"
        " pg_options_to_table(s.srvoptions) AS o WHERE s.srvname = %s",
        (shard[0].server,),
    ).fetchone() or ("",)
    owner.execute(
        f"CREATE SERVER twin FOREIGN DATA WRAPPER postgres_fdw OPTIONS ({options});"
        f"GRANT USAGE ON FOREIGN SERVER twin TO {role}".encode()
    )
    with error("55000", 'server "twin" is a shard of "public.four" already'):
        loader.execute("SELECT ml_rag.attach_shard('four', 'twin', '{\"partition\": 1, \"table_name\": \"a\"}')")
    assert attach(loader, "four", 1, shard[0], "b") == "four_s1"


def test_two_sessions_make_no_table_two_shards(
    db: Database, shard: list[Shard], loader: Connection, owner: Connection
) -> None:
    loader.execute("SELECT ml_rag.create_store('public.four', '{\"partitions\": 4}')")
    make_shard(shard[0], "a")
    other = db.connect()
    other.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(sql.Identifier(loader_role(db))))
    with owner.transaction():
        owner.execute("LOCK TABLE four IN ROW EXCLUSIVE MODE")
        calls = [
            Background(functools.partial(attach, connection, "four", partition, shard[0], "a"))
            for partition, connection in enumerate((loader, other))
        ]
        witness = db.connect()
        for call, connection in zip(calls, (loader, other), strict=True):
            wait_until(lambda one=connection, call=call: call.ended or waits_for_a_lock(witness, one))
    refused = []
    for call in calls:
        try:
            call.result()
        except psycopg.errors.ObjectNotInPrerequisiteState as e:
            refused.append(e.diag.message_primary)
    assert refused == [f'table public.a of server "{shard[0].server}" is a shard of "public.four" already']


def test_a_shard_that_is_lost_is_made_anew(sharded: Connection, asker: Connection, shard: list[Shard]) -> None:
    """What a server at the same address, without its rows, is to the store."""
    (lost,) = rows(sharded, "SELECT count(*) FROM four_s0")[0]
    with shard[0].connect("loader") as other:
        other.execute("DROP TABLE a CASCADE")
    make_shard(shard[0], "a")
    assert lost > 0
    assert rows(sharded, "SELECT count(*) FROM four_s0") == [(0,)]
    kept = "SELECT * FROM one AS o WHERE NOT EXISTS (SELECT FROM four AS f WHERE f.document_id = o.document_id)"
    assert json.loads(both(asker, "birch oak", CALLS["hybrid"])[1])["citations"]
    sharded.execute(f"INSERT INTO four {kept}".encode())
    assert rows(sharded, "SELECT count(*) FROM four_s0") == [(lost,)]
    compare(asker, *FEW)


def test_another_version_is_refused(sharded: Connection, asker: Connection, shard: list[Shard]) -> None:
    with shard[1].connect() as other:
        other.execute(VERSION.format("0.0.9"))
    try:
        with error("55000", "another version", "0.0.9", ours=False):
            words(asker)
        with error("55000", "another version", ours=False):
            attach(sharded, "four", 0, shard[1], "c")
        compare(asker, "meaning")
    finally:
        with shard[1].connect() as other:
            other.execute(VERSION.format(ml_rag.__version__))
    compare(asker, "words")


def test_words_are_searched_in_a_read_only_transaction(sharded: Connection, asker: Connection) -> None:
    asker.execute("SET default_transaction_read_only = on")
    compare(asker, *FEW)


def test_what_can_be_no_shard(
    db: Database, stores: Connection, asker: Connection, owner: Connection, shard: list[Shard]
) -> None:
    def refused(
        sqlstate: str, *words: str, store: str = "four", server: str = "server0", ours: bool = True, **options: Any
    ) -> None:
        with error(sqlstate, *words, ours=ours):
            stores.execute("SELECT ml_rag.attach_shard(%s, %s, %s)", (store, server, json.dumps(options)))
        assert rows(stores, "SELECT count(*) FROM pg_foreign_table") == [(0,)]

    refused("42704", "no hash partition 4", partition=4)
    refused("42704", "no hash partition 0", store="one")
    refused("22023", "partition", partition=-1)
    refused("22023", "partition", partition=256)
    refused("42704", 'server "nowhere" does not exist', server="nowhere")
    refused("42P01", ours=False, table_name="nothing")
    owner.execute(
        "CREATE SERVER plain FOREIGN DATA WRAPPER postgres_fdw;"
        "CREATE FOREIGN DATA WRAPPER other; CREATE SERVER others FOREIGN DATA WRAPPER other"
    )
    refused("42501", "permission denied for foreign server", server="plain")
    role = loader_role(db)
    for server in ("plain", "others"):
        owner.execute(f'GRANT USAGE ON FOREIGN SERVER {server} TO "{role}"')
    for extensions in ("ADD extensions 'vector'", "SET extensions 'ml_rag'", "SET extensions 'vector2,ml_rag'"):
        refused("22023", "does not name pgvector and ml_rag", server="plain")
        owner.execute(f"ALTER SERVER plain OPTIONS ({extensions})".encode())
    refused("22023", "does not name pgvector and ml_rag", server="plain")
    refused("22023", "not one of postgres_fdw", server="others")
    # nobody else may move partitions
    with error("42501", ours=False):
        asker.execute("SELECT ml_rag.attach_shard('four', 'server0')")
    # another store than that of the shard
    with shard[0].connect("loader") as other:
        other.execute("ALTER TABLE a ADD COLUMN more integer")
        other.execute("SELECT ml_rag.enable_keyword_search('b', '{\"b\": 0.5}')")
    refused("55000", "differs", "in columns", table_name="a")
    refused("55000", "differs", "in keyword index", table_name="b")
    # rows of other partitions, or of both
    with shard[0].connect("loader") as other:
        other.execute(
            "INSERT INTO c SELECT 'x', '{}', i, 1, 'x', array_fill(1, '{16}')::vector FROM generate_series(1, 9) AS i"
        )
    refused("55000", "the shard has rows already", table_name="c")
    stores.execute("SELECT ml_rag.create_store('public.filled', '{\"partitions\": 2}')")
    refused("55000", "rows of other partitions than 1", store="filled", table_name="c", partition=1)
    stores.execute("CREATE POLICY p ON four; ALTER TABLE four ENABLE ROW LEVEL SECURITY")
    refused("55000", "policies belong on the shards", table_name="c")
    with error("55000", "is not on another server"):
        stores.execute("SELECT ml_rag.detach_shard('four', 1)")


def test_a_store_that_is_open_to_nobody(stores: Connection, asker: Connection, shard: list[Shard]) -> None:
    stores.execute("SELECT ml_rag.create_store('public.own', '{\"partitions\": 1}')")
    assert attach(stores, "own", 0, shard[0], "c") == "own_s0"
    send(stores, "own", {"x": "zebra"})
    found = answer(stores, "zebra", {"vector_store": ["public.own"], "skip_generate": True, **CALLS["words"]})
    assert [c["document_name"] for c in found["citations"]] == ["x"]
    with error("P0002"):
        answer(asker, "zebra", {"vector_store": ["public.own"], "skip_generate": True})


def test_a_store_with_shards_is_searched_unasked_if_its_owner_is_trusted(
    db: Database, sharded: Connection, owner: Connection, asker: Connection
) -> None:
    assert rows(asker, "SELECT vector_store FROM ml_rag.discover()") == [("public.four",), ("public.one",)]
    owner.execute(f'REVOKE ml_rag_publisher FROM "{loader_role(db)}"')
    assert rows(asker, "SELECT vector_store FROM ml_rag.discover()") == []
    assert rows(asker, "SELECT vector_store, found FROM ml_rag.discover('{public.four}')") == [("public.four", "named")]
    assert rows(asker, "SELECT vector_store FROM ml_rag.discover('{four}')") == []


def test_who_has_no_mapping_reads_no_shard(sharded: Connection, tenant: Connection, owner: Connection) -> None:
    with error("42704", "user mapping not found", ours=False):
        answer(tenant, "birch", {"vector_store": ["public.four"], "skip_generate": True})


def test_a_request_gets_what_its_role_may_read(sharded: Connection, asker: Connection, shard: list[Shard]) -> None:
    def ask(**request: Any) -> Any:
        given = json.dumps({"version": ml_rag.__version__, **request})
        return rows(asker, "SELECT ml_rag._shard_answer(c.store, %s) FROM four_s0_calls AS c", given)[0][0]

    index = ask(call="describe")["keyword index"]
    with error("22023", "unknown request", ours=False):
        ask(call="drop", **index)
    near = {"question": "birch", "distance_metric": "COSINE", "query_embedding": str([1] * 16)}
    arm = {"search": "semantic", "candidates": 5}
    assert ask(call="semantic", request={**near, "options": {}}, arm=arm)["hits"]
    for request in (
        {"call": "semantic", "request": {**near, "options": {"index_options": "x"}}, "arm": arm},
        {"call": "statistics", "terms": 1, **index},
    ):
        with error("22023", "invalid request to a shard", ours=False):
            ask(**request)
    with shard[0].connect("loader") as other:
        other.execute("REVOKE SELECT ON a FROM ml_rag_user")
    with error("55000", "none that its role may search", ours=False):
        ask(call="statistics", terms=["birch"], **index)


def test_a_table_of_somebody_else_takes_no_calls(
    db: Database, sharded: Connection, owner: Connection, asker: Connection
) -> None:
    """Whoever may create beside a store could take the name of a table of calls that goes, with a function."""
    options = '{"keyword_search": true, "semantic_search": false, "vector_store": ["public.four"]}'
    assert answer(sharded, "birch", options)["citations"]
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    sharded.execute("ALTER FOREIGN TABLE four_s0_calls RENAME TO other")
    asker.execute(
        "CREATE FUNCTION catch() RETURNS oid LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'caught'; RETURN 0; END $$;"
        " CREATE VIEW four_s0_calls AS SELECT catch() AS store; GRANT ALL ON four_s0_calls TO PUBLIC"
    )
    with warnings_of(sharded) as told, error("55000", "has no table of calls"):
        answer(sharded, "birch", options)
    assert not told


def test_no_row_is_indexed_that_is_not_written(stores: Connection, shard: list[Shard]) -> None:
    """A trigger before each row of a partition is run for what is no row of it, too."""
    attach(stores, "four", 0, shard[0], "a")
    stores.execute(
        "CREATE TRIGGER early BEFORE INSERT ON four_p1 FOR EACH ROW EXECUTE FUNCTION ml_rag._keep_keywords()"
    )
    with error("55000", "four_p1", "cannot be updated"):
        stores.execute(
            "INSERT INTO four_p1 SELECT * FROM one WHERE satisfies_hash_partition('four'::regclass, 4, 2, document_id)"
        )


@without_citus
def test_without_citus_no_store_is_distributed(loader: Connection) -> None:
    loader.execute("SELECT ml_rag.create_store('public.alone')")
    with error("0A000", "Citus is not installed"):
        loader.execute("SELECT ml_rag.distribute_store('alone')")
    with error("22023", "shard_count"):
        loader.execute("SELECT ml_rag.distribute_store('alone', '{\"shard_count\": 0}')")
