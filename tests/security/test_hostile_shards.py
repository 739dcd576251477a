"""store/shards, store/serve, pipeline/shards: what whoever may create beside a store, or a shard itself, cannot do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.cluster import Connection, Database
from support.loading import loader, loader_role
from support.partitions import CALLS, fill, send
from support.shards import Shard, attach, empty, make_shard, map_roles, shards
from support.stores import answer, error

__all__ = ["loader"]
WORDS = {"vector_store": ["public.four"], "skip_generate": True, **CALLS["words"]}


@pytest.fixture(scope="module")
def one(place: Path, model_server: str) -> Iterator[Shard]:
    with shards(place, model_server, 1) as found:
        yield found[0]


@pytest.fixture
def shard(db: Database, owner: Connection, loader: Connection, one: Shard) -> Iterator[Shard]:
    map_roles(db, owner, [one], {loader_role(db): "loader", db.role("asker"): "asker"})
    yield one
    empty(one)
    with one.connect() as other:
        other.execute("DROP OWNED BY asker CASCADE; REVOKE CREATE ON SCHEMA public FROM asker")


@pytest.fixture
def four(shard: Shard, loader: Connection) -> Connection:
    """``four``, a store in two partitions, the first of which is on the shard, as ``a``."""
    loader.execute("SELECT ml_rag.create_store('public.four', '{\"partitions\": 2}')")
    fill(loader, "four")
    loader.execute("GRANT SELECT ON four TO ml_rag_user")
    make_shard(shard, "a")
    attach(loader, "four", 0, shard, "a")
    return loader


def test_no_view_of_somebody_else_takes_the_requests(shard: Shard) -> None:
    """Its triggers would run with the rights of whoever attaches the shard or asks."""
    with shard.connect() as other:
        other.execute("GRANT CREATE ON SCHEMA public TO asker")
    answers = "SELECT NULL::jsonb AS request, {}ml_rag._answer_request('b'::regclass){} AS answer"
    trigger = "CREATE TRIGGER {} INSTEAD OF UPDATE ON b_shard FOR EACH ROW EXECUTE FUNCTION {}"
    ours = "; " + trigger.format("ml_rag_request", "ml_rag._take_request()")
    view = f"CREATE VIEW b_shard AS {answers.format('', '')}"
    planted = [
        "CREATE TABLE b_shard (request jsonb, answer jsonb)",
        "CREATE VIEW b_shard AS SELECT NULL::jsonb AS request, NULL::jsonb AS answer",
        "CREATE VIEW b_shard AS SELECT NULL::jsonb AS request, NULL::jsonb AS answer FROM b WHERE false" + ours,
        view + ours,
    ]
    # by the owner, or by whom the owner has let: not the one that is made
    changed = [
        view,
        view + "; " + trigger.format("ml_rag_request", "lie()"),
        view + ours + "; " + trigger.format("more", "lie()"),
        view + ours + "; CREATE RULE more AS ON INSERT TO b_shard DO INSTEAD NOTHING",
        view + " FROM b" + ours,
        view + " WHERE run()" + ours,
        f"CREATE VIEW b_shard AS {answers.format('coalesce(', ', NULL)')}" + ours,
        "CREATE VIEW b_shard AS SELECT NULL::jsonb AS request, _answer_request('b'::regclass) AS answer" + ours,
        view.replace("'b'", "'c'") + ours,
    ]
    with shard.connect("loader") as owner, shard.connect("asker") as asker, shard.connect() as superuser:
        owner.execute("SELECT ml_rag.create_store('public.b')")
        for statement in planted:
            asker.execute(statement)
            for caller in (owner, superuser):
                with error("42P07", "b_shard", "already exists"):
                    caller.execute("SELECT ml_rag.create_store('public.b', '{\"shard\": true}')")
            asker.execute(f"DROP {statement.split()[1]} b_shard")
        owner.execute(
            "CREATE TABLE c (); CREATE FUNCTION run() RETURNS boolean LANGUAGE sql AS 'SELECT true';"
            " CREATE FUNCTION _answer_request(regclass) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';"
            " CREATE FUNCTION lie() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'"
        )
        for statement in changed:
            owner.execute(statement)
            with error("42P07", "b_shard", "already exists"):
                owner.execute("SELECT ml_rag.create_store('public.b', '{\"shard\": true}')")
            owner.execute("DROP VIEW b_shard")
        for _ in range(2):
            owner.execute("SELECT ml_rag.create_store('public.b', '{\"shard\": true}')")


@pytest.mark.parametrize(
    "planted", ["TABLE four_s0_calls ()", "TABLE four_s0 ()", "DOMAIN four_s0 AS text", "TYPE four_s0_calls AS ()"]
)
def test_a_taken_name_keeps_no_shard_away(
    shard: Shard, loader: Connection, owner: Connection, asker: Connection, planted: str
) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker.execute(f"CREATE {planted}")
    loader.execute("SELECT ml_rag.create_store('public.four', '{\"partitions\": 2}')")
    make_shard(shard, "a")
    assert attach(loader, "four", 0, shard, "a") == "four_s1"


def test_a_cancel_is_one_whatever_things_are_called(
    shard: Shard, loader: Connection, asker: Connection, owner: Connection
) -> None:
    name = 'remote SQL command: "'
    quoted = '"' + name.replace('"', '""') + '"'
    loader.execute("SELECT ml_rag.create_store(%s, '{\"partitions\": 1}')", (f"public.{quoted}",))
    loader.execute(f"GRANT SELECT ON {quoted} TO ml_rag_user")
    make_shard(shard, "a")
    attach(loader, quoted, 0, shard, "a")
    options = {"vector_store": [f"public.{quoted}"], "skip_generate": True, "partial": True}
    send(loader, quoted, {"x": "birch"})
    assert answer(asker, "birch", options)["citations"]
    for more in ({}, CALLS["words"]):
        with shard.connect() as other:
            other.execute("BEGIN; LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
            asker.execute("SET statement_timeout = '500ms'")
            began = time.monotonic()
            with error("57014", ours=False):
                answer(asker, "birch", {**options, **more})
            assert time.monotonic() - began < 1.5
            asker.execute("RESET statement_timeout")


def test_a_store_with_shards_gets_no_policies(four: Connection, asker: Connection, owner: Connection) -> None:
    """Its readers may SELECT the partitions, where they would not apply."""
    for connection in (four, owner):
        with error("55000", "has shards"):
            connection.execute("ALTER TABLE four ENABLE ROW LEVEL SECURITY")
    assert answer(asker, "birch", WORDS)["citations"]
    # other tables may have them
    four.execute("CREATE TABLE mine (i integer) PARTITION BY LIST (i); ALTER TABLE mine ENABLE ROW LEVEL SECURITY")
    four.execute("SELECT ml_rag.detach_shard('four', 0); ALTER TABLE four ENABLE ROW LEVEL SECURITY")


def test_roles_without_privileges_alter_their_tables(db: Database, owner: Connection) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    stranger = db.connect("stranger")
    stranger.execute("CREATE TABLE own (i integer) PARTITION BY LIST (i); ALTER TABLE own ENABLE ROW LEVEL SECURITY")


ANSWERS = [
    ("scores", "null"),
    ("scores", '"x"'),
    ("scores", "[]"),
    ("scores", '{"keys": ["{1,1}"]}'),
    ("scores", '{"keys": ["{1,1}"], "scores": []}'),
    ("scores", '{"keys": [null], "scores": [1]}'),
    ("scores", '{"keys": ["{1,1,1}"], "scores": [1]}'),
    ("scores", '{"keys": ["{1,1}"], "scores": [null]}'),
    ("scores", '{"keys": ["{1,1}"], "scores": ["NaN"]}'),
    ("scores", '{"keys": ["{1,1}"], "scores": [1e301]}'),
    ("scores", '{"keys": ' + json.dumps(["{1,1}"] * 2000) + ', "scores": ' + json.dumps([1] * 2000) + "}"),
]
BROKEN = [
    ("scores", '{"keys": ["x"], "scores": [1]}'),
    ("scores", '{"keys": ["{x,y}"], "scores": [1]}'),
    ("statistics", "null"),
    ("statistics", "{}"),
    ("statistics", '{"statistics": [1]}'),
    ("statistics", '{"statistics": [-1000, 1, [1]]}'),
    ("statistics", '{"statistics": [1, 1, [99999999999999999999]]}'),
    ("statistics", '{"statistics": {"0": 1}}'),
]


def lie(shard: Shard, call: str, told: str, rows: str = "") -> None:
    """The view answers a call with that."""
    good = '{"statistics": [1, 1, [1]], "keys": [], "scores": []}'
    with shard.connect() as other:
        other.execute(
            "CREATE OR REPLACE VIEW a_shard AS SELECT NULL::jsonb AS request, CASE"
            " WHEN current_setting(concat('ml_rag.request_', 'a'::regclass::oid), true)"
            f" ~ 'call\": \"{call}' THEN {told}::jsonb ELSE '{good}' END AS answer {rows}"
        )


def test_an_answer_that_is_none_is_refused(four: Connection, asker: Connection, shard: Shard) -> None:
    for call, told in ANSWERS:
        lie(shard, call, f"'{told}'")
        with error("55000", "unexpected answer of shard", "four_s0"):
            answer(asker, "birch", {**WORDS, "n_citations": 10})
    for call, told in BROKEN:
        lie(shard, call, f"'{told}'")
        with error("55000", "cannot be used"):
            answer(asker, "birch", {**WORDS, "n_citations": 10})
    lie(shard, "scores", """'{"keys": ["{1,1}"], "scores": [1]}'""")
    answer(asker, "birch", WORDS)


def test_no_answer_and_several_are_refused(four: Connection, asker: Connection, shard: Shard) -> None:
    for call in ("statistics", "scores"):
        lie(shard, call, "NULL")
        with error("55000", "unexpected answer of shard", "four_s0"):
            answer(asker, "birch", WORDS)
    for rows in ("WHERE false", "FROM generate_series(1, 2)", "FROM generate_series(1, 10000)"):
        lie(shard, "scores", """'{"keys": [], "scores": []}'""", rows)
        with error("55000", "unexpected answer of shard", "four_s0"):
            answer(asker, "birch", WORDS)
        with error("55000", "unexpected answer of shard", "four_s1"):
            attach(four, "four", 1, shard, "a")


def test_requests_wait_for_nobody_once_their_call_is_cancelled(
    four: Connection, asker: Connection, shard: Shard
) -> None:
    for slow in (
        "CREATE OR REPLACE VIEW a_shard AS SELECT NULL::jsonb AS request, CASE WHEN current_setting("
        "concat('ml_rag.request_', 'a'::regclass::oid), true) <> '' THEN to_jsonb(concat(pg_sleep(60))) END AS answer",
        "CREATE OR REPLACE TRIGGER ml_rag_request INSTEAD OF UPDATE ON a_shard FOR EACH ROW EXECUTE FUNCTION lie()",
    ):
        with shard.connect() as other:
            other.execute(
                "CREATE OR REPLACE FUNCTION public.lie() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN PERFORM pg_sleep(60); RETURN NEW; END $$"
            )
            other.execute(slow)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(answer, asker, "birch", WORDS)
            time.sleep(1)
            began = time.monotonic()
            asker.cancel()
            with error("57014", ours=False):
                asking.result(10)
            assert time.monotonic() - began < 1
