"""store/shards, store/serve, pipeline/shards: what whoever may create beside a store, or a shard itself, cannot do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ml_rag import __version__
from support.cluster import Connection, Database, noticed
from support.exchange import exchange
from support.loading import loader_role, rows
from support.partitions import CALLS, fill, send
from support.processes import Background, wait_until
from support.schemas import renamed
from support.shards import Shard, attach, empty, make_shard, map_roles, shards
from support.stores import answer, as_text, error, fake_embedding, search, warnings_of

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
    """Its functions would run with the rights of whoever attaches the shard or asks."""
    with shard.connect() as other:
        other.execute("GRANT CREATE ON SCHEMA public TO asker")
    opens = "SELECT {}ml_rag._open_shard('b'::regclass){} AS store"
    view = f"CREATE VIEW b_shard AS {opens.format('', '')}"
    planted = [
        "CREATE TABLE b_shard (store oid)",
        "CREATE VIEW b_shard AS SELECT 'b'::regclass::oid AS store",
        view,
    ]
    # by the owner, or by whom the owner has let: not the one that is made
    changed = [
        view + "; CREATE RULE more AS ON INSERT TO b_shard DO INSTEAD NOTHING",
        view + " FROM b",
        view + " WHERE run()",
        f"CREATE VIEW b_shard AS {opens.format('coalesce(', ', NULL)')}",
        "CREATE VIEW b_shard AS SELECT _open_shard('b'::regclass) AS store",
        view.replace("'b'", "'c'"),
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
            " CREATE FUNCTION _open_shard(regclass) RETURNS oid LANGUAGE sql AS 'SELECT $1::oid'"
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
    name = '\nremote SQL command: "'
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
        with error("55000", "has shards", "four_s0 is a shard", "four_s0_calls"):
            connection.execute("ALTER TABLE four ENABLE ROW LEVEL SECURITY")
    assert answer(asker, "birch", WORDS)["citations"]
    # other tables may have them
    four.execute("CREATE TABLE mine (i integer) PARTITION BY LIST (i); ALTER TABLE mine ENABLE ROW LEVEL SECURITY")
    four.execute("SELECT ml_rag.detach_shard('four', 0); ALTER TABLE four ENABLE ROW LEVEL SECURITY")


def test_roles_without_privileges_alter_their_tables(db: Database, owner: Connection) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    stranger = db.connect("stranger")
    stranger.execute("CREATE TABLE own (i integer) PARTITION BY LIST (i); ALTER TABLE own ENABLE ROW LEVEL SECURITY")


#: tables that are not of the owner of the store, or not on the server of its shard
OTHERS = {
    "a table": "CREATE TABLE mine_calls (store oid)",
    "a foreign table": "CREATE FOREIGN TABLE mine_calls (store oid) SERVER server0",
    "one of another server": "CREATE SERVER other FOREIGN DATA WRAPPER postgres_fdw;"
    "CREATE FOREIGN TABLE mine_calls (store oid) SERVER other",
}


@pytest.fixture(params=OTHERS)
def planted(db: Database, four: Connection, owner: Connection, request: pytest.FixtureRequest) -> Connection:
    """By its name the shard of ``four`` has a table of the superuser, who maintains the store, for a table of calls."""
    owner.execute(
        "CREATE USER MAPPING FOR CURRENT_USER SERVER server0 OPTIONS (user 'loader', password_required 'false')"
    )
    owner.execute(OTHERS[request.param])
    if request.param == "one of another server":
        owner.execute(f'ALTER FOREIGN TABLE mine_calls OWNER TO "{loader_role(db)}"'.encode())
    four.execute("DROP FOREIGN TABLE four_s0_calls; ALTER FOREIGN TABLE four_s0 RENAME TO mine")
    return owner


def test_a_partition_with_a_trigger_does_not_move(
    db: Database, four: Connection, owner: Connection, shard: Shard
) -> None:
    """It would be lost with the partition, and run as who moves that: an administrator, say."""
    four.execute(
        "CREATE TABLE ran (who name); GRANT INSERT ON ran TO PUBLIC;"
        "CREATE FUNCTION run() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO public.ran SELECT current_user; RETURN OLD; END $$;"
        "CREATE TRIGGER evil BEFORE DELETE ON four_p1 FOR EACH ROW EXECUTE FUNCTION run()"
    )
    owner.execute(
        "CREATE USER MAPPING FOR CURRENT_USER SERVER server0 OPTIONS (user 'loader', password_required 'false')"
    )
    make_shard(shard, "b")
    with error("55000", "cannot have shards", "trigger", "evil"):
        attach(owner, "four", 1, shard, "b")
    four.execute("CREATE TRIGGER evil BEFORE DELETE ON four_s0 FOR EACH ROW EXECUTE FUNCTION run()")
    with error("55000", "cannot have shards", "trigger", "evil"):
        owner.execute("SELECT ml_rag.detach_shard('four', 0)")
    assert rows(owner, "TABLE ran") == []
    four.execute("DROP TRIGGER evil ON four_s0; DROP TRIGGER evil ON four_p1")
    owner.execute("SELECT ml_rag.detach_shard('four', 0)")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (
            "CREATE TABLE mark (d bigint, n integer, FOREIGN KEY (d, n) REFERENCES four_p1 ON DELETE CASCADE);"
            "INSERT INTO mark SELECT document_id, segment_number FROM four_p1;"
            "CREATE FUNCTION run() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE WARNING 'ran'; RETURN OLD; END $$;"
            "CREATE TRIGGER evil AFTER DELETE ON mark FOR EACH ROW EXECUTE FUNCTION run()",
            "Another table",
        ),
        (
            "CREATE FUNCTION run() RETURNS boolean LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE WARNING 'ran'; RETURN true; END $$;"
            "CREATE RULE evil AS ON DELETE TO four_p1 DO ALSO SELECT run()",
            "has a rule",
        ),
        (
            "CREATE FUNCTION run() RETURNS boolean LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE WARNING 'ran'; RETURN true; END $$;"
            "CREATE TRIGGER evil AFTER DELETE ON four_p1 FOR EACH ROW WHEN (run())"
            " EXECUTE FUNCTION ml_rag._keep_keywords('{}')",
            "has trigger evil",
        ),
    ],
)
def test_a_partition_with_a_rule_or_with_what_refers_to_it_does_not_move(
    four: Connection, owner: Connection, shard: Shard, made: str, why: str
) -> None:
    """Rules, conditions of triggers, and triggers of a table whose rows go with those of a partition, run as who moves
    it."""
    four.execute(made.encode())
    owner.execute(
        "CREATE USER MAPPING FOR CURRENT_USER SERVER server0 OPTIONS (user 'loader', password_required 'false')"
    )
    make_shard(shard, "b")
    with warnings_of(owner) as said, error("55000", "cannot have shards", why):
        attach(owner, "four", 1, shard, "b")
    assert [message for _, _, message in said if message == "ran"] == []


@pytest.mark.parametrize(
    "made",
    [
        "ALTER TABLE four ADD CHECK (run(document_id) > 0)",
        "CREATE INDEX ON four_p1 (run(document_id))",
        "CREATE DOMAIN word AS text CHECK (run(length(VALUE)) > 0); ALTER TABLE four ADD word word",
    ],
    ids=["constraint", "index", "type"],
)
def test_what_a_store_is_made_of_runs_as_nobody_who_does_not_trust_its_owner(
    four: Connection, owner: Connection, shard: Shard, made: str
) -> None:
    """Rows that come back from a shard are inserted: an administrator leaves that to the owner."""
    four.execute(
        "CREATE FUNCTION run(bigint) RETURNS bigint IMMUTABLE LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN 1 + abs($1); END $$"
    )
    four.execute(made.encode())
    owner.execute(
        "CREATE USER MAPPING FOR CURRENT_USER SERVER server0 OPTIONS (user 'loader', password_required 'false')"
    )
    with warnings_of(owner) as said, error("55000", "cannot have shards", "a role that you do not trust"):
        owner.execute("SELECT ml_rag.detach_shard('four', 0)")
    assert [message for _, _, message in said if message.startswith("ran")] == []


KEYS = "SELECT document_id, segment_number FROM four ORDER BY 1, 2"
GRANTED = "SELECT has_table_privilege('ml_rag_user', 'mine_calls', 'SELECT')"


def test_no_table_is_one_of_calls_by_its_name_alone(
    planted: Connection, four: Connection, asker: Connection, shard: Shard
) -> None:
    expected = rows(four, KEYS)
    # what could not be searched in shards may have policies
    with four.transaction(force_rollback=True):
        four.execute("ALTER TABLE four ENABLE ROW LEVEL SECURITY")
    # nor does it go with the shard
    with planted.transaction(force_rollback=True):
        planted.execute("SELECT ml_rag.detach_shard('four', 0)")
        assert rows(planted, GRANTED) == [(False,)]
        assert rows(planted, KEYS) == expected
    make_shard(shard, "b")
    with error("55000", 'mine" has no table of calls'):
        answer(asker, "birch", WORDS)
    assert attach(planted, "four", 1, shard, "b") == "four_s0"
    assert rows(planted, GRANTED) == [(False,)]
    # and the other goes to another place
    make_shard(shard, "c")
    assert attach(planted, "four", 0, shard, "c") == "four_s1"
    assert rows(planted, GRANTED) == [(False,)]
    assert rows(planted, KEYS) == expected


HIT = {
    "document_name": "d",
    "document_id": 1,
    "document_key": "1",
    "segment_number": 1,
    "segment": "birch",
    "distance": 0.5,
    "metadata": {},
    "keyword_score": 1.5,
    "score": None,
}
ANSWERS = [
    *("null", '"x"', "[]", '{"hits": null}', '{"hits": {}}', '{"hits": [1]}', '{"hits": [[]]}', '{"hits": [null]}'),
    *(
        json.dumps({"hits": [{**HIT, name: value}]})
        for name, values in {
            "document_name": [1],
            "document_id": ["x", 2**63, 0.5, 2],
            "document_key": ["x"],
            "segment_number": [[1], 2**31, -(2**63)],
            "segment": [None, 1],
            "distance": ["NaN", 10**301, -1],
            "keyword_score": [True, 10**301],
            "score": [{}],
        }.items()
        for value in values
    ),
    *(json.dumps({"hits": [{key: HIT[key] for key in HIT if key != name}]}) for name in ("segment", "score")),
    json.dumps({"hits": [HIT] * 2000}),
    json.dumps({"hits": [HIT]}).replace("1.5", "1e-400"),
]
STATISTICS = [
    *("null", "{}", "[1]", "[1, 1, []]", "[1, 1, [0.5]]", '[1, 1, ["x"]]', "[-1000, 1, [1]]", '{"0": 1}'),
    "[1, 1, [99999999999999999999]]",
    "[1, 1, [2]]",
]


@pytest.fixture
def liar(shard: Shard) -> Iterator[Shard]:
    """The shard of somebody who has put another function in the place of what answers."""
    with shard.connect() as other:
        other.execute("ALTER AGGREGATE ml_rag._shard_answer(oid, jsonb) RENAME TO answer_honestly")
        yield shard
        other.execute(
            "DROP FUNCTION ml_rag._shard_answer(oid, jsonb);"
            "ALTER AGGREGATE ml_rag.answer_honestly(oid, jsonb) RENAME TO _shard_answer"
        )


def lie(shard: Shard, call: str, told: str, answers: int = 1) -> None:
    """A call is answered with that, so many times."""
    good = '{"statistics": [1, 1, [1]], "hits": []}'
    with shard.connect() as other:
        other.execute(
            "CREATE OR REPLACE FUNCTION ml_rag._shard_answer(store oid, request jsonb) RETURNS SETOF jsonb LANGUAGE sql"
            f" AS $$ SELECT CASE WHEN request ->> 'call' = '{call}' THEN {told}::jsonb ELSE '{good}' END"
            f" FROM generate_series(1, {answers}) $$"
        )


@pytest.mark.parametrize("call", ["keyword", "semantic"])
def test_an_answer_that_is_none_is_refused(four: Connection, asker: Connection, liar: Shard, call: str) -> None:
    options = {**WORDS, "n_citations": 10, "keyword_search": call == "keyword", "semantic_search": call == "semantic"}
    options["filters"] = {"document_id": {"gt": 0}}
    for told in ANSWERS:
        lie(liar, call, f"'{told}'")
        with error("55000", "unexpected answer of shard", "four_s0"):
            answer(asker, "birch", options)
    options |= {"n_citations": 100, "retrieval_options": {"segment_overlap": 0}}
    for change in (
        {},
        {"distance": None},
        {"document_name": None, "document_id": None, "document_key": None, "metadata": None},
    ):
        lie(liar, call, f"'{json.dumps({'hits': [{**HIT, **change, 'vector_store': 'x', 'row_key': '(0,1)'}]})}'")
        found = answer(asker, "birch", options)
        assert "birch" in [citation["segment"] for citation in found["citations"]]


@pytest.mark.parametrize(
    "metadata",
    ['{"a": ' * 3000 + "1" + "}" * 3000, f'{{"n": {"9" * 5000}}}', '{"m": 12345678901234567890.125, "n": 1.10}'],
    ids=["deep", "long", "digits"],
)
def test_metadata_of_a_shard_is_cited_as_it_is(four: Connection, asker: Connection, metadata: str) -> None:
    """What Python cannot read of it fails no call, and no digit is lost."""
    four.execute("UPDATE four SET metadata = %s", (metadata,))
    call = "SELECT DISTINCT s.metadata::text FROM ml_rag_search('birch', %s) AS s"
    for more in (CALLS["words"], {**CALLS["hybrid"], "explain": True}, {"n_citations": 60}, CALLS["document"]):
        options = json.dumps({"vector_store": ["public.four"], **more})
        assert asker.execute(call, (options,)).fetchall() == [(metadata,)], more


def test_facts_of_a_shard_that_are_none_fail_no_call(four: Connection, asker: Connection, liar: Shard) -> None:
    for facts, told in {
        '{"a": ' * 3000 + "1" + "}" * 3000: None,
        f"[{', 1' * 20_000}]".replace("[, ", "["): None,
        '{"candidates": 3}': {"candidates": 3},
        f'{{"candidates": {"9" * 5000}}}': {"candidates": None},
        f'{{"candidates": {"9" * 400}.5}}': {"candidates": None},
        "1": 1,
    }.items():
        lie(liar, "keyword", f"""'{{"hits": [], "facts": {facts}}}'""")
        found = answer(asker, "birch", {**WORDS, "n_citations": 10, "explain": True})
        (store,) = found["explain"]["stores"]
        assert store["keyword"]["shards"] == {"public.four_s0": told}
        assert store["keyword"]["plan"] == "shards"
        assert store["keyword"]["words"] == ["birch"]


def test_statistics_that_are_none_are_refused(four: Connection, asker: Connection, liar: Shard) -> None:
    for told in STATISTICS:
        lie(liar, "statistics", f"""'{{"statistics": {told}}}'""")
        with error("55000", "unexpected answer of shard", "four_s0"):
            answer(asker, "birch", {**WORDS, "n_citations": 10})


def test_no_answer_and_several_are_refused(four: Connection, asker: Connection, liar: Shard) -> None:
    make_shard(liar, "b")
    # PostgreSQL reads a hundred rows at once else, of up to 256 MB each
    calls = "SELECT DISTINCT ftoptions FROM pg_foreign_table WHERE ftrelid::regclass::text LIKE '%_calls'"
    assert all("fetch_size=1" in options for (options,) in four.execute(calls).fetchall())
    for call in ("statistics", "keyword"):
        lie(liar, call, "NULL")
        with error("55000", "unexpected answer of shard", "four_s0"):
            answer(asker, "birch", WORDS)
    for answers in (0, 2, 10000):
        lie(liar, "keyword", """'{"hits": []}'""", answers)
        with error("55000", "unexpected answer of shard", "four_s0"):
            answer(asker, "birch", WORDS)
        with error("55000", "unexpected answer of shard", "four_s1"):
            attach(four, "four", 1, liar, "b")


#: what would end a call here, be taken for a mistake of the caller's, or not be caught
STATES = ["57014", "57P01", "40001", "40P01", "22023", "P0004", "P0001", "42501", "XX000"]
LIE = (
    "CREATE OR REPLACE FUNCTION public.fail() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
    " IF {} THEN RAISE EXCEPTION USING ERRCODE = '{}',"
    ' MESSAGE = \'invalid value for option "filters": server "server9"\'; END IF; RETURN true; END $$'
)


@pytest.fixture
def unnamed(four: Connection, loader: Connection, owner: Connection, liar: Shard) -> Iterator[Shard]:
    """``a`` is a shard and a foreign table of trusted roles, beside ``plain``, and fails as its server says."""
    loader.execute("SELECT ml_rag.create_store('public.plain'); GRANT SELECT ON plain TO ml_rag_user")
    send(loader, "plain", {"p": "birch"})
    owner.execute(
        "CREATE FOREIGN TABLE other (segment text, segment_number integer, document_name text,"
        " segment_embedding vector(16)) SERVER server0 OPTIONS (table_name 'a'); GRANT SELECT ON other TO ml_rag_user;"
        "COMMENT ON COLUMN other.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'"
    )
    with liar.connect() as other:
        other.execute(LIE.format("false", "P0001"))
        other.execute(
            "ALTER TABLE a RENAME TO rows_of_a; CREATE VIEW a AS SELECT * FROM rows_of_a WHERE fail();"
            "GRANT SELECT ON a TO PUBLIC;"
            "CREATE FUNCTION ml_rag._shard_answer(store oid, request jsonb) RETURNS jsonb LANGUAGE sql AS"
            ' $$ SELECT \'{"statistics": [1, 1, [1]], "hits": []}\'::jsonb WHERE public.fail() $$'
        )
        yield liar
        other.execute("DROP VIEW a; ALTER TABLE rows_of_a RENAME TO a; DROP FUNCTION fail() CASCADE")


@pytest.mark.parametrize("call", ["words", "meaning", "filters", "neighbours", "partial"])
def test_a_server_cannot_end_calls_that_do_not_name_its_stores(unnamed: Shard, asker: Connection, call: str) -> None:
    options: dict[str, Any] = {"skip_generate": True, "n_citations": 100}
    options |= {"partial": True} if call == "partial" else CALLS[call]
    if call == "filters":
        options["filters"] = {"document_id": {"gt": 0}}
    fails = "true"
    if call == "neighbours":  # read by a statement of their own, which alone fails
        options |= {"rerank": {"candidates": 30}, "n_citations": 30}
        fails = "EXISTS (SELECT FROM pg_cursors WHERE statement ~ 'segment_number = ANY')"
    for state in STATES:
        with unnamed.connect() as other:
            other.execute(LIE.format(fails, state))
        with warnings_of(asker) as told:
            found = answer(asker, "birch", options)
        assert "p" in [citation["document_name"] for citation in found["citations"]], state
        assert any("neighbours" in text for *_, text in told) == (call == "neighbours"), state


@pytest.mark.parametrize(("what", "state"), [("no user mapping", "42704"), ("a lock", "57014"), ("no server", "08006")])
def test_a_shard_that_cannot_be_looked_at_ends_no_call_that_does_not_name_its_store(
    db: Database, unnamed: Shard, four: Connection, owner: Connection, what: str, state: str
) -> None:
    """With "partial", shards are looked at before the search."""
    owner.execute("DROP FOREIGN TABLE other")
    if what == "no server":
        four.execute("ALTER TABLE four DETACH PARTITION four_p1")
        owner.execute("ALTER SERVER server0 OPTIONS (SET port '1')")
    caller = db.connect("tenant" if what == "no user mapping" else "asker")
    caller.execute("SET statement_timeout = '5s'")
    options: dict[str, Any] = {"skip_generate": True, "n_citations": 100, "partial": True}
    with four.transaction(force_rollback=True):
        if what == "a lock":
            four.execute("ALTER FOREIGN TABLE four_s0 OPTIONS (ADD updatable 'true')")
        for more in ({}, CALLS["words"]):
            with warnings_of(caller) as told:
                assert [own["document_name"] for own in answer(caller, "birch", {**options, **more})["citations"]] == [
                    "p"
                ]
            assert any(text == '"public.four" cannot be searched; ignored' for *_, text in told)
            assert rows(caller, "SHOW lock_timeout") == [("0",)]
        with error(state, ours=False):
            answer(caller, "birch", {**options, "vector_store": ["public.four"]})


#: what has stores read beside the search: for hints, names of documents, keys to filter by, rows without a vector
BESIDE: dict[str, dict[str, Any]] = {
    "hint": {"filters": {"colour": {"ne": "x"}}},
    "hint, in part": {"filters": {"colour": {"ne": "x"}}, "partial": True},
    "names": {"query_options": {"document_names": True}},
    "keys": {"query_options": {"filters": True}},
    "missing": {"explain": True},
    "nothing": {"filters": {"colour": "x"}},
}


@pytest.mark.parametrize("call", BESIDE)
def test_nor_by_an_error_of_what_is_read_beside_the_search(
    unnamed: Shard, four: Connection, asker: Connection, call: str
) -> None:
    four.execute("ALTER TABLE four ALTER segment_embedding DROP NOT NULL")
    options = {"skip_generate": True, "n_citations": 100, **BESIDE[call]}
    statement = "statement !~ 'segment_embedding' OR statement ~ 'segment_embedding IS NULL'"
    for state in STATES:
        for fails in ("true", f"EXISTS (SELECT FROM pg_cursors WHERE {statement})"):
            with unnamed.connect() as other:
                other.execute(LIE.format(fails, state))
            if call == "nothing":
                with error("P0002", "no segment found"):
                    answer(asker, "birch", options)
                continue
            names = [citation["document_name"] for citation in answer(asker, "birch", options)["citations"]]
            assert "p" in names, state
            assert "d7" in names or "partial" in options or fails == "true", state


def test_nor_an_evaluation(unnamed: Shard, asker: Connection) -> None:
    query = "SELECT 'birch' AS question, ARRAY['p', 'unknown'] AS documents"
    options = json.dumps({"generate": False, "keep": False})
    for state in STATES:
        with unnamed.connect() as other:
            other.execute(LIE.format("EXISTS (SELECT FROM pg_cursors WHERE statement !~ 'segment_embedding')", state))
        ((found,),) = rows(asker, "SELECT ml_rag_evaluate(%s, %s)", query, options)
        assert found["questions"] == 1, state


def test_a_cancel_is_one_beside_the_search(unnamed: Shard, asker: Connection) -> None:
    with unnamed.connect() as other:
        other.execute(
            "CREATE OR REPLACE FUNCTION public.fail() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
            " IF EXISTS (SELECT FROM pg_cursors WHERE statement !~ 'segment_embedding') THEN PERFORM pg_sleep(20);"
            " END IF; RETURN true; END $$"
        )
    asker.execute("SET statement_timeout = '1s'")
    for call in ("hint", "names", "keys", "nothing"):
        with error("57014", ours=False):
            answer(asker, "birch", {"skip_generate": True, **BESIDE[call]})
    asker.execute("RESET statement_timeout")


def test_requests_wait_for_nobody_once_their_call_is_cancelled(
    four: Connection, asker: Connection, liar: Shard
) -> None:
    lie(liar, "keyword", "to_jsonb(concat(pg_sleep(60)))")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(answer, asker, "birch", WORDS)
        time.sleep(1)
        began = time.monotonic()
        asker.cancel()
        with error("57014", ours=False):
            asking.result(10)
        assert time.monotonic() - began < 1


def test_a_request_is_answered_for_the_store_of_its_view_only(
    four: Connection, shard: Shard, owner: Connection
) -> None:
    """Many roles here can be one on the shard: what each may look at is said here, by its tables of calls."""
    with shard.connect("loader") as other:
        other.execute("SELECT ml_rag.create_store('public.b', '{\"shard\": true}')")
        (b,) = other.execute("SELECT 'b'::regclass::oid").fetchone() or (None,)
    request = json.dumps({"call": "describe", "version": __version__})

    def ask(store: object, table: str) -> str:
        return f"SELECT ml_rag._shard_answer({store}, '{request}') FROM {table}"

    assert "columns" in rows(four, ask("c.store", "four_s0_calls AS c"))[0][0]
    for statement in (
        ask(b, "four_s0_calls AS c"),
        ask(f"CASE WHEN c.store > 0 THEN {b}::oid END", "four_s0_calls AS c"),
        ask(b, "four_s0 AS c"),
        ask("NULL", "four_s0_calls AS c"),
        # here, not there
        ask("c.store", "(SELECT * FROM four_s0_calls OFFSET 0) AS c"),
        ask("'four'::regclass", "four LIMIT 1"),
    ):
        with error("42501", "permission denied for this request", ours=False):
            four.execute(statement.encode())


def test_a_request_names_no_function(four: Connection, asker: Connection, shard: Shard) -> None:
    """It would be written into a statement there, which reads what it likes with the rights of a shared role."""
    with shard.connect("loader") as other:
        other.execute("CREATE TABLE hidden AS SELECT 'x' AS word; GRANT SELECT ON hidden TO asker")
    arm = {"search": "function", "function": "(SELECT ascii(word) FROM public.hidden) + strpos", "form": "text"}
    request = {
        "call": "semantic",
        "version": __version__,
        "request": {"question": "birch", "distance_metric": "COSINE", "query_embedding": None},
        "arm": {**arm, "query": None, "query_embedding": None, "candidates": 5},
    }
    statement = f"SELECT ml_rag._shard_answer(c.store, '{json.dumps(request)}') FROM four_s0_calls AS c"
    ((found,),) = rows(asker, statement)
    assert found["hits"] == []
    # t.row_to_json is row_to_json(t)
    arm = {"search": "semantic", "query": None, "query_embedding": str([1] * 16), "candidates": 5}
    request |= {"arm": arm, "metadata_key": ["row_to_json"]}
    statement = f"SELECT ml_rag._shard_answer(c.store, '{json.dumps(request)}') FROM four_s0_calls AS c"
    ((found,),) = rows(asker, statement)
    assert found["hits"]
    assert found["hits"]
    assert "row_to_json" not in json.dumps(found)


def test_no_name_of_a_request_is_written_into_a_statement(four: Connection, asker: Connection, shard: Shard) -> None:
    """Whatever stands between a name and the next time it is written could be a text, and the name a statement."""
    with shard.connect("loader") as other:
        other.execute("CREATE TABLE hidden AS SELECT 'x' AS word; GRANT SELECT ON hidden TO asker")
    read = (
        "d AS (SELECT word FROM public.hidden), hit AS (SELECT |AS s1, |AS s2, |AS s3, |AS s4, 1 AS place)"
        " SELECT (SELECT json_agg(json_build_object('segment', word))::text FROM d) AS hits, 1 AS n, "
        '|AS threshold, false AS is_percentage, NULL AS nearest, NULL AS "limit", ARRAY[NULL]::text[] AS checks --'
    )
    first, *others = read.replace(" ", "\n").split("|")
    name = first + "".join(f"$t{i}${part}" for i, part in enumerate(others))
    near = {"question": None, "distance_metric": "COSINE", "query_embedding": str([1] * 16)}

    def ask(name: str) -> Any:
        arm = {"search": "semantic", "name": name, "query": None, "query_embedding": None, "candidates": 5}
        request = json.dumps({"call": "semantic", "version": __version__, "request": near, "arm": arm})
        asked = "SELECT ml_rag._shard_answer(c.store, %s) FROM four_s0_calls AS c"
        return asker.execute(asked, (request,)).fetchall()

    expected = ask("semantic")
    assert expected[0][0]["hits"]
    for hostile in (name, "'", '"', "$$", "a b"):
        assert ask(hostile) == expected


def test_what_was_noted_of_one_request_lets_no_other_through(four: Connection, shard: Shard) -> None:
    request = json.dumps({"call": "describe", "version": __version__})
    ((b,),) = rows(four, "SELECT c.store FROM four_s0_calls AS c")
    with four.transaction():
        asked = f"SELECT ml_rag._shard_answer(c.store, '{request}') FROM four_s0_calls AS c"
        assert "columns" in rows(four, asked)[0][0]
        with error("42501", "permission denied for this request", ours=False), four.transaction():
            four.execute(f"SELECT ml_rag._shard_answer({b}::oid, '{request}') FROM four_s0".encode())


def test_a_table_whose_name_reads_like_that_of_a_shard_is_not_read(
    four: Connection, asker: Connection, shard: Shard
) -> None:
    options = {**WORDS, "filters": {"document_id": {"gt": 0}}, "keyword_search": True, "semantic_search": True}
    expected = answer(asker, "birch", options)
    with shard.connect() as other:
        other.execute("CREATE SCHEMA aaa; GRANT USAGE ON SCHEMA aaa TO PUBLIC")
        other.execute('CREATE TABLE aaa."public.a" AS TABLE public.a; UPDATE aaa."public.a" SET segment = \'planted\'')
        other.execute('GRANT SELECT ON aaa."public.a" TO PUBLIC')
    try:
        assert answer(asker, "birch", options) == expected
    finally:
        with shard.connect() as other:
            other.execute("DROP SCHEMA aaa CASCADE")


def test_a_shard_is_told_no_more_of_a_question_than_it_needs(four: Connection, asker: Connection, liar: Shard) -> None:
    with liar.connect() as other:
        other.execute(
            "CREATE TABLE told (request jsonb); GRANT INSERT ON told TO PUBLIC;"
            "CREATE OR REPLACE FUNCTION ml_rag._shard_answer(store oid, request jsonb) RETURNS jsonb LANGUAGE sql AS"
            " $$ INSERT INTO public.told VALUES (request); SELECT '{\"hits\": []}'::jsonb $$"
        )
    options = {"vector_store": ["public.four"], "skip_generate": True, "filters": {"document_id": {"gt": 0}}}
    try:
        answer(asker, "birch secret", options)
        with liar.connect() as other:
            ((told,),) = rows(other, "SELECT request::text FROM told")
        assert "secret" not in told
    finally:
        with liar.connect() as other:
            other.execute("DROP TABLE told")


def test_a_server_that_does_not_name_ml_rag_is_not_asked(
    four: Connection, asker: Connection, owner: Connection
) -> None:
    """The aggregate would run here, over what the shard's view shows."""
    owner.execute("ALTER SERVER server0 OPTIONS (SET extensions 'vector')")
    meaning = {"vector_store": ["public.four"], "skip_generate": True}
    assert answer(asker, "birch", meaning)["citations"]
    for options in (WORDS, {**meaning, "filters": {"document_id": {"gt": 0}}}):
        with error("55000", "four_s0", "cannot be asked") as caught:
            answer(asker, "birch", options)
        assert "ALTER SERVER server0" in caught.hint


#: arguments of a trigger that makes a table look like a shard of Citus
ARGUMENTS = ["", "{", "[]", '{"segment": 1}', '{"segment": "id"}', '{"text_search_configuration": "x"}', '{"k1": -1}']


def test_a_table_that_looks_like_a_shard_runs_nothing_of_its_owners(
    loader: Connection, asker: Connection, owner: Connection
) -> None:
    """Whoever alters it indexes it: an index has nothing but its key and text, read without anybody's code."""
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC; CREATE TABLE ran (by text); GRANT INSERT ON ran TO PUBLIC")
    asker.execute(
        "CREATE FUNCTION run() RETURNS boolean LANGUAGE plpgsql AS"
        " $$BEGIN INSERT INTO ran VALUES (current_user); RETURN true; END$$;"
        "CREATE TABLE looks (id integer PRIMARY KEY, segment text); INSERT INTO looks VALUES (1, 'zebra');"
        "CREATE POLICY p ON looks USING (run());"
        "ALTER TABLE looks ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"
    )
    for argument in ARGUMENTS:
        asker.execute(
            "CREATE TRIGGER t AFTER INSERT ON looks FOR EACH ROW EXECUTE FUNCTION"
            f" ml_rag._keep_keywords('{argument}')".encode()
        )
        for caller in (asker, owner):
            caller.execute("ALTER TABLE looks ENABLE REPLICA TRIGGER t")
        assert rows(owner, "SELECT count(*) FROM ml_rag_internal.keyword_store") == [(0,)]
        asker.execute("DROP TRIGGER t ON looks")
    asker.execute(
        "CREATE TRIGGER t AFTER INSERT ON looks FOR EACH ROW EXECUTE FUNCTION"
        ' ml_rag._keep_keywords(\'{"segment": "segment"}\'); ALTER TABLE looks ENABLE REPLICA TRIGGER t'
    )
    assert rows(owner, "SELECT count(*) FROM ml_rag_internal.keyword_store") == [(0,)]  # policies hide rows from asker
    # nor does another role read it for its index: its name could be another relation's by then
    owner.execute("ALTER TABLE looks ALTER segment SET STATISTICS 10")
    assert rows(owner, "SELECT count(*) FROM ml_rag_internal.keyword_store") == [(0,)]
    asker.execute("ALTER TABLE looks NO FORCE ROW LEVEL SECURITY")
    assert rows(owner, "SELECT count(*) FROM ml_rag_internal.keyword_row") == [(1,)]
    assert rows(owner, "SELECT count(*) FROM ran") == [(0,)]


def test_tables_are_altered_by_roles_without_any_privilege(owner: Connection, asker: Connection) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC; CREATE ROLE nobody_here")
    try:
        with owner.transaction():
            owner.execute("SET LOCAL ROLE nobody_here; CREATE TABLE plain (a integer)")
            owner.execute("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
            owner.execute("CREATE TRIGGER t BEFORE INSERT ON plain FOR EACH ROW EXECUTE FUNCTION f('{}')")
            owner.execute("ALTER TABLE plain ENABLE REPLICA TRIGGER t, ADD b text")
    finally:
        owner.execute("DROP TABLE IF EXISTS plain; DROP OWNED BY nobody_here; DROP ROLE nobody_here")


def test_what_takes_the_name_of_a_table_of_calls_that_is_waited_for_runs_no_code(
    db: Database, owner: Connection, four: Connection
) -> None:
    """It is found by its OID, and read by its name."""
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    plant = (
        "SELECT 1::oid AS store FROM generate_series(1, 3) WHERE public.evil(); GRANT SELECT ON four_s0_calls TO PUBLIC"
    )
    caller = db.connect()
    caller.execute(f'SET SESSION AUTHORIZATION "{loader_role(db)}"'.encode())
    said = noticed(caller)
    others = [db.connect("tenant") for _ in range(3)]
    for connection in (caller, *others):
        connection.execute("SET statement_timeout = '10s'")
    exchange(
        *(four, "four_s0_calls", plant, *others),
        lambda: caller.execute("SELECT ml_rag_answer('text', %s)", [json.dumps(WORDS)]),
    )
    assert not any("ran as" in message for message in said), said


@pytest.mark.parametrize(
    ("options", "locked"),
    [
        (CALLS["words"], "ml_rag_internal.keyword_posting, ml_rag_internal.keyword_store, ml_rag_internal.keyword_new"),
        ({"query_embedding": fake_embedding("birch"), "n_citations": 3}, "a"),
    ],
)
def test_names_that_lead_elsewhere_once_a_shard_has_answered_are_not_read(
    db: Database, owner: Connection, loader: Connection, shard: Shard, options: dict[str, Any], locked: str
) -> None:
    role = loader_role(db)
    owner.execute(f"CREATE SCHEMA kb AUTHORIZATION {role}; GRANT USAGE ON SCHEMA kb TO PUBLIC")
    owner.execute(f"GRANT CREATE ON DATABASE {db.name} TO {db.role('tenant')}")
    loader.execute("SELECT ml_rag.create_store('kb.four', '{\"partitions\": 2}')")
    # all alike: the statement is run again to settle the ties
    send(loader, "kb.four", {f"d{i}": "birch oak" for i in range(10)})
    loader.execute("GRANT SELECT ON kb.four TO ml_rag_user")
    make_shard(shard, "a")
    given = {"partition": 0, "schema_name": "public", "table_name": "a"}
    loader.execute("SELECT ml_rag.attach_shard('kb.four', %s, %s)", (shard.server, json.dumps(given)))
    caller, taker = db.connect("asker"), db.connect("tenant")
    said = noticed(caller)
    options = {"vector_store": ["kb.four"], **options}
    waits = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'asker' AND wait_event_type = 'Lock'"
    with shard.connect() as gate, shard.connect() as watcher:
        gate.execute(f"BEGIN; LOCK TABLE {locked} IN ACCESS EXCLUSIVE MODE".encode())
        call = Background(lambda: search(caller, "birch", options))
        wait_until(lambda: watcher.execute(waits).fetchone() == (1,) or call.ended)
        if renamed(owner, "kb", "former"):
            taker.execute(
                "CREATE SCHEMA kb; GRANT USAGE ON SCHEMA kb TO PUBLIC; CREATE FUNCTION kb.evil() RETURNS boolean"
                " LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN true; END $$"
            )
            for name in ("four", "four_s0", "four_p1"):
                taker.execute(
                    f"CREATE VIEW kb.{name} AS SELECT 'planted' AS document_name, '{{}}'::jsonb AS metadata,"
                    " 1::bigint AS document_id, 1 AS segment_number, 'planted' AS segment,"
                    f" '{as_text(fake_embedding('birch'))}'::public.vector(16) AS segment_embedding,"
                    f" '(0,1)'::tid AS ctid WHERE kb.evil(); GRANT SELECT ON kb.{name} TO PUBLIC".encode()
                )
        gate.execute("COMMIT")
        found = call.result()
    assert {row[5] for row in found} == {"birch oak"}
    assert not any("ran as" in message for message in said), said
