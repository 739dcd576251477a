"""pipeline/condition: option filters, on metadata and on columns; its errors; k rows whatever the index; plans."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import psycopg
import pytest

from support import filtering
from support.cluster import Connection, Database
from support.searching import create_rows, ids
from support.shared_data import SHARED
from support.stores import create_store, error, grant, mark, retrieve

ELASTIC = SHARED / "elastic_workplace/workplace-documents.json"


# -- metadata ---------------------------------------------------------------------------------------------------------

METADATA = [
    {"author": "A", "year": 2001, "tags": ["x", "y"], "ok": True},  # 1
    {"author": "B", "year": 2002.0, "tags": [], "ok": False},  # 2
    {"author": "a", "year": 2004.5, "tags": "x", "ok": "true"},  # 3
    {"author": None, "year": "2003", "tags": [["x"]], "ok": None},  # 4
    {"year": -5, "tags": [1, None], "when": "2024-02-29"},  # 5
    {"author": ["A", "C"], "year": [1999, 2003], "when": "2024-10-01T00:00:00"},  # 6
    {"author": {"name": "A"}, "year": 1e30, "when": "2023"},  # 7
    {"author": "100% _sure_\\", "a.b": 1, "": 2, "and": 3, "/": 4, "~": 5, "document_id": "id"},  # 8
    {"a": {"b": [{"c": 1}, {"c": "2"}], "~1": "t"}, "and": {"or": 6}},  # 9
    [{"author": "A"}],  # 10
    "author",  # 11
    {},  # 12
]
ALL = set(range(1, 13))

CASES: list[tuple[Any, set[int]]] = [
    ({}, ALL),
    ({"author": "A"}, {1, 6, 10}),
    ({"author": {"eq": "A"}}, {1, 6, 10}),
    ({"author": ["B", "C"]}, {2, 6}),
    ({"author": {"in": ["B", "a"]}}, {2, 3}),
    ({"author": []}, set()),
    ({"author": {"nin": []}}, ALL),
    ({"author": {"ne": "A"}}, ALL - {1, 6, 10}),
    ({"author": {"nin": ["A", "B"]}}, ALL - {1, 2, 6, 10}),
    # null: absent, or null
    ({"author": None}, {4, 5, 9, 11, 12}),
    ({"author": ["B", None]}, {2, 4, 5, 9, 11, 12}),
    ({"author": {"ne": None}}, {1, 2, 3, 6, 7, 8, 10}),
    ({"author": {"nin": ["B", None]}}, {1, 3, 6, 7, 8, 10}),
    ({"author": {"exists": True}}, {1, 2, 3, 6, 7, 8, 10}),
    ({"author": {"exists": False}}, {4, 5, 9, 11, 12}),
    ({"tags": {"exists": True}}, {1, 2, 3, 4, 5}),
    # numbers with numbers, whole or not; texts with texts
    ({"year": 2002}, {2}),
    ({"year": "2003"}, {4}),
    ({"year": 2003}, {6}),
    ({"year": -5}, {5}),
    ({"year": 1000000000000000000000000000000}, {7}),
    ({"year": {"gt": 2002}}, {3, 6, 7}),
    ({"year": {"gte": 2002}}, {2, 3, 6, 7}),
    ({"year": {"lt": 2001}}, {5, 6}),
    ({"year": {"lte": 2001}}, {1, 5, 6}),
    ({"year": {"lte": "2003"}}, {4}),
    ({"year": {"gt": "2003"}}, set()),
    ({"year": {"between": [2002, 2004.5]}}, {2, 3, 6}),
    ({"year": {"between": [2000, 1998]}}, set()),
    ({"year": {"between": ["2", "3"]}}, {4}),
    ({"year": {"gte": 2002, "lt": 2004}}, {2, 6}),
    ({"year": {"gt": 1999, "lt": 2003}}, {1, 2, 6}),  # of 6 one element each
    ({"year": {"between": [2000, 2002]}}, {1, 2}),  # and the same one for both ends
    ({"when": {"gte": "2024-01-01", "lt": "2024-10-02"}}, {5, 6}),
    ({"ok": True}, {1}),
    ({"ok": [False, "true"]}, {2, 3}),
    # an array has what it holds, and not what its own arrays hold
    ({"tags": "x"}, {1, 3}),
    ({"tags": ["y", 1]}, {1, 5}),
    ({"tags": {"ne": "x"}}, ALL - {1, 3}),
    ({"tags": {"like": "_"}}, {1, 3}),
    ({"author": {"like": "_"}}, {1, 2, 3, 6, 10}),
    ({"author": {"like": "a"}}, {3}),
    ({"author": {"ilike": "a"}}, {1, 3, 6, 10}),
    ({"author": {"like": "100\\% \\_%\\\\"}}, {8}),
    ({"author": {"like": "%"}}, {1, 2, 3, 6, 8, 10}),
    ({"author": {"like": ""}}, set()),
    # keys are what they are; paths begin with a slash
    ({"a.b": 1}, {8}),
    ({"/a.b": 1}, {8}),
    ({"": 2}, {8}),
    ({"/": 2}, {8}),
    ({"/and": 3}, {8}),
    ({"/and/or": 6}, {9}),
    ({"/~1": 4}, {8}),
    ({"/~0": 5}, {8}),
    ({"~": 5}, {8}),
    ({"/a/b/c": 1}, {9}),
    ({"/a/b/c": {"gte": "2"}}, {9}),
    ({"/a/b/c": [3, "2"]}, {9}),
    ({"/a/~01": "t"}, {9}),
    ({"/a/b": {"exists": True}}, {9}),
    ({"/a/b/d": None}, ALL),
    ({"/author/name": "A"}, {7}),
    ({"/document_id": "id"}, {8}),
    # several of them, and the three that join
    ({"author": "A", "year": 2001}, {1}),
    ({"or": [{"author": "B"}, {"year": -5}]}, {2, 5}),
    ({"or": [{"author": "B", "year": 0}, {}]}, ALL),
    ({"or": []}, set()),
    ({"and": []}, ALL),
    ({"and": [{"author": "A"}, {"tags": "y"}]}, {1}),
    ({"not": {"author": "A"}}, ALL - {1, 6, 10}),
    ({"not": {"not": {"author": "A"}}}, {1, 6, 10}),
    ({"not": {"year": {"gt": 0}}}, {4, 5, 8, 9, 10, 11, 12}),
    ({"not": {}}, set()),
    ({"not": {"or": [{"author": {"exists": True}}, {"year": {"exists": True}}]}}, {9, 11, 12}),
    # columns
    ({"document_id": 3}, {3}),
    ({"document_id": {"gt": 10.5}}, {11, 12}),
    ({"document_id": [1, 2.5, 1e30, 3]}, {1, 3}),
    ({"document_id": "4", "document_name": "d", "segment_number": 1}, {4}),
    ({"document_name": None}, set()),
    ({"segment": {"ilike": "S"}, "document_id": {"between": [2, 3]}}, {2, 3}),
    ({"segment_embedding": {"exists": True}}, ALL),
    # the column metadata itself is an object
    ({"metadata": {"exists": True}}, ALL),
    ({"metadata": "author"}, {11}),
]


def shown(value: Any) -> str:
    """A filter as part of the name of a test."""
    return json.dumps(value)[:60] if isinstance(value, dict) else ""


@pytest.fixture(scope="module")
def rows(module_db: Database) -> Connection:
    create_rows(module_db.connect(), METADATA)
    return module_db.connect("asker")


@pytest.mark.parametrize(
    ("filters", "expected"), CASES, ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else ""
)
def test_conditions(rows: Connection, filters: Any, expected: set[int]) -> None:
    assert ids(rows, filters) == sorted(expected)


def test_the_oracle_of_the_fuzz_tests_agrees_with_the_cases() -> None:
    for filters, expected in CASES:
        if not {"document_id", "document_name", "segment", "segment_embedding", "metadata"} & filters.keys():
            wanted, rows = (filtering.parse(json.dumps(v)) for v in (filters, METADATA))
            found = {i for i, m in enumerate(rows, 1) if filtering.matches(wanted, m)}
            assert found == expected, filters


def test_lists_of_any_length(rows: Connection) -> None:
    for n in (1, 15, 16, 17, 1000, 9990):
        filler = [*range(10_000, 10_000 + n // 2), *(f"f{i}" for i in range(n - n // 2 - 1))]
        assert ids(rows, {"author": [*filler, "B"]}) == [2]
        assert ids(rows, {"author": {"nin": [*filler, "B", None]}}) == [1, 3, 6, 7, 8, 10]
        assert ids(rows, {"year": [*filler, 2002, -5]}) == [2, 5]
        assert ids(rows, {"document_id": [*range(10_000, 10_000 + n), 7]}) == [7]


def test_filters_and_names_of_documents_hold_together(rows: Connection) -> None:
    assert ids(rows, {"author": "A"}, document_name=["x", "d"], exclude_document_name=["y"]) == [1, 6, 10]
    assert ids(rows, {"author": "A"}, document_name=["x"]) == []
    assert ids(rows, {"author": "A"}, exclude_document_name=["d"]) == []


def test_metadata_of_type_json_and_rows_that_jsonb_cannot_hold(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE docs (document_id integer, metadata json, segment text, segment_embedding vector(3))")
    owner.execute(
        r"""INSERT INTO docs SELECT i, m::json, 's', '[1,0,0]' FROM unnest(ARRAY['{"a": 1}', '{"a": "\u0000"}',"""
        r""" '{"a": 1e999999}', '{"a": "\ud800"}', NULL]) WITH ORDINALITY AS x (m, i)"""
    )
    mark(owner, "docs")
    grant(owner, "docs")
    statement = "SELECT (f.condition, f.arguments) FROM ml_rag.discover() AS s, ml_rag.filter(s, %s) AS f"
    for filters, expected in (({"a": 1}, [1]), ({"a": {"ne": 1}}, [2, 3, 4, 5]), ({"a": None}, [2, 3, 4, 5])):
        row = asker.execute(statement.replace("(f.condition, f.arguments)", "f.*"), (json.dumps({"filters": filters}),))
        condition, arguments = row.fetchone() or ("", None)
        found = psycopg.ClientCursor(asker).execute(
            "SELECT document_id FROM docs AS t WHERE true" + condition.replace("$3", "(%(a)s::text[])"),
            {"a": arguments},
        )
        assert sorted(i for (i,) in found) == expected
    assert ids(asker, {"a": 1}) == [1]


@pytest.mark.parametrize(
    "filters",
    [
        {"author": None},
        {"author": ["A", None]},
        {"author": {"gt": "A"}, "year": 2002},
        {"or": [{"year": 2002}, {"author": {"exists": False}}]},
        {"not": {"author": "A"}},
        {"not": {"or": [{"and": [{"year": 1}, {"not": {"/author": {"ne": "A"}}}]}]}},
    ],
    ids=str,
)
def test_a_key_that_names_nothing_is_told_wherever_it_stands(owner: Connection, filters: Any) -> None:
    owner.execute(
        "CREATE TABLE bare (document_id integer, segment text, segment_embedding vector(3), year integer);"
        "INSERT INTO bare VALUES (101, 's', '[1,0,0]', 2002)"
    )
    mark(owner, "bare")
    notices: list[str | None] = []
    owner.add_notice_handler(lambda n: notices.append(n.message_primary))
    with contextlib.suppress(psycopg.errors.NoDataFound):
        retrieve(owner, (1, 0, 0), filters=filters, vector_store=["public.bare"])
    assert [notice for notice in notices if notice and "has neither a column" in notice]


def test_a_store_that_has_no_such_thing_has_no_match_and_says_so(owner: Connection, asker: Connection) -> None:
    create_rows(owner, [{"author": "A"}, {"author": "B"}])
    owner.execute(
        "CREATE TABLE bare (document_id integer, segment text, segment_embedding vector(3), year integer);"
        "INSERT INTO bare VALUES (101, 's', '[1,0,0]', 2002)"
    )
    mark(owner, "bare")
    grant(owner, "bare")
    notices: list[str] = []
    details: list[str | None] = []
    asker.add_notice_handler(lambda n: notices.append(f"{n.severity} {n.message_primary}"))
    asker.add_notice_handler(lambda n: details.append(n.message_detail))
    assert ids(asker, {"author": "A"}) == [1]
    assert details == ['Of its rows only those pass whose condition holds without a value, such as "ne" and "nin".']
    assert notices == ['WARNING "public.bare" has neither a column "author" nor metadata; none of its rows has a value']
    owner.execute("CREATE TABLE bare2 (LIKE bare)")
    mark(owner, "bare2")
    grant(owner, "bare2")
    notices.clear()
    assert ids(asker, {"author": "A"}) == [1]
    assert notices == [
        'WARNING 2 of 3 vector stores have neither a column "author" nor metadata; none of their rows has a value'
    ]
    owner.execute("DROP TABLE bare2")
    assert ids(asker, {"author": {"ne": "A"}}) == [2, 101]
    assert ids(asker, {"author": None}) == [101]
    assert ids(asker, {"/author": {"like": "%"}}) == [1, 2]
    notices.clear()
    assert ids(asker, {"year": 2002}) == [101]
    assert notices == []
    with error("P0002", "No row passed the filters"):
        retrieve(asker, (1, 0, 0), filters={"author": "A"}, vector_store=["bare"])


# -- what is refused --------------------------------------------------------------------------------------------------


def nested(levels: int) -> Any:
    filters: Any = {"author": "A"}
    for i in range(levels - 1):
        filters = {"not": filters} if i % 2 else {"and": [filters]}
    return filters


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"year": {"gtt": 1}}, ['"gtt"', '"year"', 'Did you mean "gt"?']),
        ({"year": {"$gte": 1}}, ['"$gte"', 'Did you mean "gte"?']),
        ({"year": {"GTE": 1}}, ['"GTE"', 'Did you mean "gte"?']),
        ({"year": {">=": 1}}, ['">="', 'That is "gte" here.']),
        ({"year": {"ge": 1}}, ['"ge"', 'That is "gte" here.']),
        ({"year": {"betwen": [1, 2]}}, ['Did you mean "between"?']),
        ({"address": {"city": "Rome"}}, ['"city"', '"address"', "/address/city"]),
        ({"year": {"gte": 1, "not": {"eq": 2}}}, ['"not"', '"year"']),
        ({"year": {}}, ['"year"']),
        ({"year": {"eq": [1]}}, ['"eq"', "[1]"]),
        ({"year": {"ne": {"a": 1}}}, ['"ne"']),
        ({"year": {"in": 1}}, ['"in"']),
        ({"year": {"in": [[1]]}}, ['"in"']),
        ({"year": {"nin": [{"a": 1}]}}, ['"nin"']),
        ({"year": [[1]]}, ['"in"']),
        ({"year": {"gt": None}}, ['"gt"']),
        ({"year": {"lte": True}}, ['"lte"']),
        ({"year": {"gte": [1]}}, ['"gte"']),
        ({"year": {"between": 1}}, ['"between"']),
        ({"year": {"between": [1]}}, ['"between"']),
        ({"year": {"between": [1, 2, 3]}}, ['"between"']),
        ({"year": {"between": [1, "2"]}}, ['"between"']),
        ({"year": {"between": [None, None]}}, ['"between"']),
        ({"year": {"between": [True, False]}}, ['"between"']),
        ({"year": {"like": 1}}, ['"like"']),
        ({"year": {"like": "a\\"}}, ['"like"', "escape"]),
        ({"author": {"like": "%a" * 200 + "b"}}, ["at most 400 characters"]),
        ({"not": {"/author": {"ilike": "a" * 401}}}, ["at most 400 characters"]),
        ({"year": {"ilike": "\\\\\\"}}, ['"ilike"', "escape"]),
        ({"year": {"exists": "yes"}}, ['"exists"']),
        ({"year": {"exists": None}}, ['"exists"']),
        ({"and": {"a": 1}}, ['"and"', '"/and"']),
        ({"or": "x"}, ['"or"', '"/or"']),
        ({"or": [1]}, ["object"]),
        ({"and": [None]}, ["object"]),
        ({"not": [{"a": 1}]}, ["object"]),
        ({"not": None}, ["object"]),
        ({"/a~b": 1}, ["~1", "/a~b"]),
        ({"/~": 1}, ["~0"]),
        (nested(9), ["8 levels"]),
        ({"or": [{"a": 1}] * 1001}, ["1000 conditions"]),
        ({"a": list(range(10_001))}, ["10000 values"]),
        ({"or": [{}] * 30_000}, ["10000 values"]),
        ([{"a": 1}], ["an object"]),
        ("a = 1", ["an object", "docs/search.md#filters-and-keywords"]),
        ({"a": {"lt": [1]}}, ["a number or a text", "docs/search.md#filters-and-keywords"]),
    ],
    ids=shown,
)
def test_mistakes_are_reported_before_anything_is_searched(rows: Connection, filters: Any, words: list[str]) -> None:
    for options in ({}, {"n_citations": 0}):
        with error("22023", *words):
            retrieve(rows, (1, 0, 0), filters=filters, **options)


def test_thousands_of_keys_are_refused_at_once(rows: Connection) -> None:
    # the parts are collected in linear time: it took 39 s when each was added to a jsonb of those before
    rows.execute("SET statement_timeout = '8s'")
    keys = {f"k{i}": i for i in range(9_000)}
    for filters in (keys, {"not": keys}):
        with error("22023", "1000 conditions"):
            retrieve(rows, (1, 0, 0), filters=filters)
    rows.execute("RESET statement_timeout")


def test_the_largest_filters(rows: Connection) -> None:
    assert ids(rows, nested(8)) == ids(rows, {"author": "A"} if 7 // 2 % 2 == 0 else {"not": {"author": "A"}})
    assert ids(rows, {"or": [{"year": i} for i in range(1500, 2500)]}) == [1, 2, 6]
    assert ids(rows, {"year": list(range(-5000, 5000))}) == [1, 2, 5, 6]


def test_very_deep_json_is_refused_like_any_other(rows: Connection) -> None:
    with error("22023", "8 levels"):
        retrieve(rows, (1, 0, 0), filters=json.loads('{"not":' * 400 + "{}" + "}" * 400))
    with error("22023"):
        retrieve(rows, (1, 0, 0), filters={"a": {"eq": json.loads("[" * 400 + "]" * 400)}})


# -- data of others ---------------------------------------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.skipif(not ELASTIC.exists(), reason="needs ../shared/data/elastic_workplace")
def test_workplace_documents(owner: Connection, asker: Connection) -> None:
    documents = json.loads(ELASTIC.read_text())
    create_store(owner, "workplace")
    generator = random.Random(1)
    with owner.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO workplace VALUES (%s, %s, %s, 1, %s, %s)",
            [
                (
                    d["name"],
                    json.dumps({k: v for k, v in d.items() if k != "content"}),
                    i,
                    d["content"],
                    str([generator.random() for _ in range(3)]),
                )
                for i, d in enumerate(documents, 1)
            ],
        )
    for filters in (
        {"category": "sharepoint"},
        {"category": ["github", "teams"]},
        {"rolePermissions": "demo"},
        {"rolePermissions": {"ne": "demo"}},
        {"restricted": True},
        {"created_on": {"gte": "2020-01-01", "lt": "2022-01-01"}},
        {"or": [{"category": "github"}, {"rolePermissions": ["demo"], "name": {"ilike": "%policy%"}}]},
        {"summary": {"ilike": "%employee%"}, "not": {"category": "teams"}},
        {"updated_at": {"exists": True}},
    ):
        expected = [i for i, d in enumerate(documents, 1) if filtering.matches(filters, d)]
        assert ids(asker, filters) == expected, filters
    assert 0 < len(ids(asker, {"category": "sharepoint"})) < len(documents)
    assert 0 < len(ids(asker, {"rolePermissions": "demo"})) < len(documents)


def shop(owner: Connection) -> None:
    """Two stores, one with a column that has no metadata, one with metadata."""
    create_rows(owner, [{"price": "cheap"}])
    owner.execute(
        "CREATE TABLE shop (document_id integer PRIMARY KEY, segment text, segment_embedding vector(3), price numeric);"
        "INSERT INTO shop VALUES (101, 'one word', '[1,0,0]', 20)"
    )
    mark(owner, "shop")
    grant(owner, "shop")


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_value_that_a_column_does_not_take_is_an_error(owner: Connection, asker: Connection, hybrid: bool) -> None:
    """Other stores would answer, as if the one with the column were not there."""
    shop(owner)
    owner.execute("SELECT ml_rag.enable_keyword_search('shop')")
    with error("22023", "filters", "numeric", "public.shop"):
        retrieve(asker, (1, 0, 0), filters={"price": {"lt": "cheap"}}, keyword_search=hybrid)
    assert ids(asker, {"price": {"lt": 30}}) == [101]
    # where it is left out the others answer
    assert ids(asker, {"price": "cheap"}, exclude_vector_store=["shop"]) == [1]


def test_the_nearest_column_is_told(owner: Connection, asker: Connection) -> None:
    shop(owner)
    for key in ("Price", "prise"):
        with error("P0002", 'Did you mean column "price"?'):
            retrieve(asker, (1, 0, 0), filters={key: 20})
        hints: list[str] = []
        asker.add_notice_handler(lambda n, hints=hints: hints.append(n.message_hint))
        with error("P0002"):
            retrieve(asker, (1, 0, 0), filters={key: 20}, vector_store=["shop"])
        assert hints == ['Did you mean "price"?']
    # a column that the caller may not see is not
    owner.execute(
        "REVOKE SELECT ON shop FROM ml_rag_user;"
        "GRANT SELECT (document_id, segment, segment_embedding) ON shop TO ml_rag_user"
    )
    with error("P0002") as caught:
        retrieve(asker, (1, 0, 0), filters={"prise": 20})
    assert "column" not in caught.hint
