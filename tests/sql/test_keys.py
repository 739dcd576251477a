"""pipeline/keys: filters that a model chooses, whatever it answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database
from support.scripted import MODEL, Script, scripted_model
from support.scripted import module_script as script
from support.stores import answer, create_store, error, grant, mark, search, warnings_of

__all__ = ["script"]

COLUMNS = ["price", "brand", "colors", "added_on", "in_stock"]
PRODUCTS = [
    (1, "tent", 100.0, "Halvgard", ["red", "blue"], "2024-01-05", True, {"season": 3}),
    (2, "stove", 20.0, "Tarnfell", ["black"], "2025-03-01", False, {"season": 4}),
    (3, "mug", 8.5, "Tarnfell", [], "2026-06-30", True, {}),
    (4, "boots", 250.0, None, ["red"], None, None, {"season": "4"}),
]


@pytest.fixture(scope="module")
def shop(module_db: Database, script: Script) -> Connection:
    """A user's connection to a table of four products."""
    owner = module_db.connect()
    owner.execute(
        "CREATE TABLE shop (document_id integer PRIMARY KEY, segment text, price numeric, brand text, colors text[],"
        " added_on date, in_stock boolean, metadata jsonb, secret text, segment_embedding vector(3))"
    )
    for row in PRODUCTS:
        values = (*row[:-1], json.dumps(row[-1]))
        owner.execute("INSERT INTO shop VALUES (%s, %s, %s, %s, %s, %s, %s, %s, 'hush', '[1,0,0]')", values)
    mark(owner, "shop")
    owner.execute(
        "GRANT SELECT (document_id, segment, price, brand, colors, added_on, in_stock, metadata, segment_embedding)"
        " ON shop TO ml_rag_user; ANALYZE shop"
    )
    return module_db.connect("asker")


def options(filters: Any = COLUMNS, **more: Any) -> dict[str, Any]:
    query = {"filters": filters, "model_id": MODEL}
    return {"query_embedding": [1, 0, 0], "n_citations": 50, "query_options": query, **more}


def ids(connection: Connection, filters: Any = COLUMNS, **more: Any) -> list[int]:
    """document_id of what is found, if anything."""
    try:
        return sorted(row[3] for row in search(connection, "q", options(filters, **more)))
    except psycopg.errors.NoDataFound:
        return []


def ids_with(connection: Connection, callers: Any) -> list[int]:
    """The same with filters of the call."""
    try:
        return sorted(row[3] for row in search(connection, "q", {**options(), "filters": callers}))
    except psycopg.errors.NoDataFound:
        return []


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ([], [1, 2, 3, 4]),
        ([{"key": "price", "operator": "lt", "value": 50}], [2, 3]),
        ([{"key": "price", "operator": "lt", "value": 50}, {"key": "in_stock", "operator": "eq", "value": True}], [3]),
        ([{"key": "brand", "operator": "in", "value": ["Tarnfell", "x"]}], [2, 3]),
        ([{"key": "brand", "operator": "ne", "value": "Tarnfell"}], [1, 4]),
        ([{"key": "colors", "operator": "eq", "value": "red"}], [1, 4]),
        ([{"key": "added_on", "operator": "between", "value": ["2025-01-01", "2026-12-31"]}], [2, 3]),
        ([{"key": "brand", "operator": "exists", "value": False}], [4]),
        (
            [{"any_of": [[{"key": "price", "operator": "gt", "value": 200}],
                         [{"key": "brand", "operator": "eq", "value": "Halvgard"}]]}],
            [1, 4],
        ),
        # as a caller writes them
        ({"price": {"lt": 50}}, [2, 3]),
        ({}, [1, 2, 3, 4]),
        ({"or": [{"price": {"lt": 10}}, {"brand": "Halvgard"}]}, [1, 3]),
        ({"not": {"colors": "black"}, "price": {"lte": 100}}, [1, 3]),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_model_chooses_is_searched_with(
    shop: Connection, script: Script, chosen: Any, found: list[int]
) -> None:
    script.answer = {"filters": chosen}
    with warnings_of(shop) as told:
        assert ids(shop) == found
    assert told == []


def test_the_filters_are_told_and_the_callers_stay(shop: Connection, script: Script) -> None:
    script.answer = {"filters": [{"key": "price", "operator": "lt", "value": 150}]}
    told = answer(shop, "q", {**options(), "skip_generate": True})["retrieval_info"]["query"]
    assert told == {"question": "q", "filters": {"price": {"lt": 150}}}
    for callers, found in (
        ({"in_stock": True}, [1, 3]),
        ({"or": [{"in_stock": True}, {"price": 250}]}, [1, 3]),
        ({"and": [{"brand": "Tarnfell"}], "in_stock": False}, [2]),
        ({"price": {"gt": 150}}, []),
    ):
        assert ids_with(shop, callers) == found


def test_a_question_of_nothing_but_conditions_stays_as_it_was_asked(shop: Connection, script: Script) -> None:
    script.answer = {"question": " ", "filters": [{"key": "price", "operator": "lt", "value": 50}]}
    query = {"rewrite": True, "filters": COLUMNS, "model_id": MODEL}
    told = answer(shop, "all below 50", {**options(), "query_options": query, "skip_generate": True})
    assert told["retrieval_info"]["query"] == {"question": "all below 50", "filters": {"price": {"lt": 50}}}
    assert len(told["citations"]) == 2
    script.answer = {"question": " ", "filters": []}
    with warnings_of(shop) as warned:
        ids(shop, query_options=query)
    assert len(warned) == 1


def test_the_model_is_shown_types_meanings_and_values(module_db: Database, shop: Connection, script: Script) -> None:
    owner = module_db.connect()
    owner.execute("SELECT ml_rag.describe_filter('shop', 'price', 'price in dollars')")
    owner.execute("SELECT ml_rag.describe_filter('shop', 'season', 'seasons it is made for')")
    script.answer = {"filters": []}
    try:
        ids(shop)
        lines = script.prompt.splitlines()
        assert '  "price": number; price in dollars' in lines
        assert '  "brand": text; values such as ["Tarnfell"]' in lines
        assert any(line.startswith('  "colors": list of text') for line in lines)
        assert '  "added_on": date, YYYY-MM-DD' in lines
        assert '  "in_stock": true or false' in lines
        # true: what a condition can be about, and what is described
        ids(shop, True)
        shown = [line for line in script.prompt.splitlines() if line.startswith('  "')]
        assert [line.partition(":")[0].strip(' "') for line in shown] == [*COLUMNS, "season"]
        assert '  "price": number; price in dollars' in shown
        assert '  "season": text or number; seasons it is made for' in shown
        keys = script.asked["filters"]["items"]["anyOf"]
        assert [k["properties"]["key"]["enum"][0] for k in keys[:-1]] == [*COLUMNS, "season"]
        script.answer = {"filters": [{"key": "season", "operator": "gte", "value": 4}]}
        assert ids(shop, True) == [2]
    finally:
        owner.execute("SELECT ml_rag.describe_filter('shop', key, NULL) FROM (VALUES ('price'), ('season')) AS k (key)")
    # nothing is described: the key is one that most rows have
    script.answer = {"filters": [{"key": "season", "operator": "gte", "value": 4}]}
    assert ids(shop, True) == [2]


def test_conditions_on_what_nobody_has_described(
    owner: Connection, asker: Connection, db: Database, reachable_dir: Path
) -> None:
    owner.execute(
        "CREATE TABLE goods (id integer PRIMARY KEY, segment text, label text, kind text, notes text, size integer,"
        " made timestamptz, place point, code uuid, segment_embedding vector(3), metadata jsonb)"
    )
    owner.execute(
        "INSERT INTO goods SELECT i, 'text', 'label ' || i, 'kind ' || i % 3, repeat('long ', 50), i, now(), '(1,2)',"
        " NULL, '[1,0,0]', CASE WHEN i % 3 = 0 THEN '{\"rare\": 1}' ELSE '{}'::jsonb END || '{\"tags\": [1]}'"
        " || jsonb_build_object('page', i) FROM generate_series(1, 30) AS i"
    )
    mark(owner, "goods")
    grant(owner, "goods")
    with scripted_model(db, reachable_dir) as script:
        script.answer = {"filters": []}

        def shown() -> set[str]:
            search(asker, "q", options(True))
            return {line.partition(":")[0].strip(' "') for line in script.prompt.splitlines() if line.startswith('  "')}

        # texts are known to be short once there are statistics
        assert shown() == {"size", "made", "page"}
        owner.execute("ANALYZE goods")
        assert shown() == {"label", "kind", "size", "made", "page"}
        assert '"kind": text; values such as ["kind 0", "kind 1", "kind 2"]' in script.prompt
        # statistics are of rows that the caller may not see, too
        owner.execute("ALTER TABLE goods ENABLE ROW LEVEL SECURITY; CREATE POLICY none ON goods USING (id < 3)")
        assert shown() == {"size", "made", "page"}
        owner.execute("ALTER TABLE goods DISABLE ROW LEVEL SECURITY")
        script.answer = {
            "filters": [
                {"key": "kind", "operator": "eq", "value": "kind 1"},
                {"key": "size", "operator": "gt", "value": 20},
            ]
        }
        assert sorted(row[7]["page"] for row in search(asker, "q", options(True))) == [22, 25, 28]


def test_columns_that_the_caller_may_not_read_are_not_shown(shop: Connection, script: Script) -> None:
    script.answer = {"filters": [{"key": "secret", "operator": "eq", "value": "hush"}]}
    with warnings_of(shop):
        assert ids(shop, ["secret", "price"]) == [1, 2, 3, 4]
    assert "secret" not in script.prompt


def test_values_are_not_shown_under_row_level_security(
    owner: Connection, asker: Connection, reachable_dir: Path, db: Database
) -> None:
    create_store(owner, "docs", [(f"d{i}", i, 1, "text", [1, 0, 0]) for i in range(40)])
    owner.execute(
        "ALTER TABLE docs ADD owner_name text DEFAULT 'somebody-else'; ALTER TABLE docs ADD kind text DEFAULT 'memo'"
    )
    owner.execute("ANALYZE docs")
    with scripted_model(db, reachable_dir) as script:
        script.answer = {"filters": []}
        ids(asker, ["owner_name", "kind"])
        assert "somebody-else" in script.prompt
        owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON docs USING (document_id < 3)")
        ids(asker, ["owner_name", "kind"])
        assert '"owner_name": text' in script.prompt
        assert "somebody-else" not in script.prompt


# -- hostile answers ---------------------------------------------------------------------------------------------------

EVIL = [
    "'; DROP TABLE shop; --", "1 OR 1=1", "$3[1]", "') OR true --", "secret", "segment_embedding", "ctid", "tableoid",
    "/../price", "and", "or", "not", "metadata", "%", "%\\", "\x00", "\ud800", "", "x" * 5000, "price", "brand", "NaN",
    "Infinity", "2026-13-45", "{}", "[]", "null", "pg_catalog.pg_class", "price::text", "1e400", "-0", "true",
]  # fmt: skip
OPERATORS = [
    "eq",
    "ne",
    "in",
    "nin",
    "lt",
    "lte",
    "gt",
    "gte",
    "between",
    "like",
    "ilike",
    "exists",
    "=",
    "OR",
    "",
    "$where",
]


def hostile(rng: random.Random) -> str:
    """What a model that was talked into anything may answer."""

    def value(depth: int = 0) -> Any:
        kind = rng.randrange(9 if depth < 4 else 6)
        if kind < 3:
            return rng.choice(EVIL)
        if kind == 3:
            return rng.choice([0, -1, 50, 1e308, 10**40, 0.1])
        if kind == 4:
            return rng.choice([True, False, None])
        if kind == 5:
            return rng.choice(["Tarnfell", "red", "2025-01-01"])
        if kind == 6:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice([*EVIL, *OPERATORS, *COLUMNS]): value(depth + 1) for _ in range(rng.randrange(3))}

    def condition(depth: int = 0) -> Any:
        kind = rng.randrange(6)
        if kind == 0 and depth < 12:
            return {"any_of": [[condition(depth + 1)] for _ in range(rng.randrange(3))]}
        if kind == 1 and depth < 12:
            return {rng.choice(["and", "or"]): [condition(depth + 1) for _ in range(rng.randrange(3))]}
        if kind == 2 and depth < 12:
            return {"not": condition(depth + 1)}
        if kind == 3:
            return value()
        key = rng.choice([*COLUMNS, *COLUMNS, *EVIL])
        return {"key": key, "operator": rng.choice(OPERATORS), "value": value()}

    whole: Any = [condition() for _ in range(rng.choice([1, 1, 2, 3, 80]))]
    if rng.random() < 0.2:
        whole = value()
    text = json.dumps({"filters": whole})
    if rng.random() < 0.05:
        text = text[: rng.randrange(len(text))]
    if rng.random() < 0.03:
        text = '{"filters": ' + "[" * 3000 + "]" * 3000 + "}"
    if rng.random() < 0.03:
        text = '{"filters": {"price": ' + rng.choice(["1e400", "NaN", "Infinity", "9" * 6000, "-1e-400"]) + "}}"
    return text


@pytest.mark.fuzz
def test_a_thousand_hostile_answers_never_widen_and_never_fail(
    module_db: Database, shop: Connection, script: Script
) -> None:
    owner = module_db.connect()
    content = "SELECT md5(string_agg(s::text, ',' ORDER BY document_id)) FROM shop AS s"
    before = owner.execute(content).fetchone()
    rng = random.Random(20)
    shop.execute("SET client_min_messages = error")
    callers = [({"price": {"lt": 150}}, {1, 2, 3}), ({"or": [{"in_stock": True}, {"brand": None}]}, {1, 3, 4})]
    narrowed = 0
    for _ in range(1000):
        script.answer = hostile(rng)
        filters, allowed = rng.choice(callers)
        found = set(ids_with(shop, filters))
        assert found <= allowed, script.answer
        narrowed += found < allowed
    assert 50 < narrowed < 950  # some of them are valid, and count
    shop.execute("RESET client_min_messages")
    assert before == owner.execute(content).fetchone()


@pytest.mark.parametrize(
    "dropped",
    [
        {"key": "secret", "operator": "eq", "value": "hush"},
        {"key": "price", "operator": "lt", "value": "cheap"},
        {"key": "price", "operator": "below", "value": 3},
        {"key": "brand", "operator": "like", "value": "a\\"},
        {"key": "colors", "operator": "between", "value": [1]},
        "price < 50",
        {},
        {"and": []},
        None,
        {"secret": "hush"},
        {"not": {"secret": "hush"}},
    ],
    ids=str,
)
def test_what_does_not_check_is_dropped_with_a_warning(shop: Connection, script: Script, dropped: Any) -> None:
    script.answer = {"filters": [dropped, {"key": "price", "operator": "lt", "value": 50}]}
    with warnings_of(shop) as told:
        assert ids(shop) == [2, 3]
    assert [message for *_, message in told] == ["1 of 2 conditions that the model has chosen are not used"]


def test_a_filter_of_the_call_at_its_limits_is_not_broken_by_the_models(shop: Connection, script: Script) -> None:
    script.answer = {"filters": [{"key": "price", "operator": "lt", "value": 50}] * 60}
    deep: Any = {"price": {"gt": 1}}
    for _ in range(7):
        deep = {"and": [deep]}
    assert ids_with(shop, deep) == [2, 3]
    wide = {"or": [{"price": {"gt": n}} for n in range(1000)]}
    with warnings_of(shop) as told:
        assert ids_with(shop, wide) == [1, 2, 3, 4]
    assert len(told) == 1


# -- describe_filter ---------------------------------------------------------------------------------------------------


def test_descriptions_are_comments_and_only_the_owner_makes_them(owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs")
    owner.execute("COMMENT ON COLUMN docs.metadata IS 'anything'")
    for key, text in (("a key", 'it\'s a "key"'), ("year", "year of print"), ("document_id", "number")):
        owner.execute("SELECT ml_rag.describe_filter('docs', %s, %s)", (key, text))

    def comment(column: str) -> Any:
        query = "SELECT col_description(attrelid, attnum) FROM pg_attribute WHERE attrelid = 'docs'::regclass"
        row = owner.execute(f"{query} AND attname = %s", (column,)).fetchone()
        return row and row[0]

    assert comment("document_id") == "number"
    assert comment("metadata").startswith("anything FILTER_KEYS={")
    owner.execute("SELECT ml_rag.describe_filter('docs', 'year', NULL)")
    assert comment("metadata") == 'anything FILTER_KEYS={"a key": "it\'s a \\"key\\""}'
    owner.execute("SELECT ml_rag.describe_filter('docs', 'a key', '')")
    assert comment("metadata") == "anything"
    owner.execute("SELECT ml_rag.describe_filter('docs', 'document_id', NULL)")
    assert comment("document_id") is None
    with error("42501", ours=False):
        asker.execute("SELECT ml_rag.describe_filter('docs', 'year', 'x')")
    with error("22023", "embeddings"):
        owner.execute("SELECT ml_rag.describe_filter('docs', 'segment_embedding', 'x')")
    with error("22023"):
        owner.execute("SELECT ml_rag.describe_filter('docs', '', 'x')")
    with error("22023", "1000"):
        owner.execute("SELECT ml_rag.describe_filter('docs', 'year', repeat('x', 1001))")
    owner.execute("CREATE TABLE plain (segment text, segment_embedding vector(3))")
    mark(owner, "plain")
    grant(owner, "plain")
    with error("42703", "year"):
        owner.execute("SELECT ml_rag.describe_filter('plain', 'year', 'x')")


@pytest.mark.parametrize("filters", [1, "price", {"price": 1}, [1], [""], [["price"]]], ids=str)
def test_a_bad_option_is_refused(shop: Connection, filters: Any) -> None:
    with error("22023", '"filters"'):
        ids(shop, filters)
