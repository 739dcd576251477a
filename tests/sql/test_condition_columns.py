"""pipeline/condition: option filters on columns: each type, what a type does not take, mapped ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.cluster import Connection, Database
from support.searching import TYPED_COLUMNS, create_rows, create_typed, ids
from support.stores import error, grant, retrieve


@pytest.fixture(scope="module")
def typed(module_db: Database) -> Connection:
    create_typed(module_db.connect())
    return module_db.connect("asker")


@pytest.mark.parametrize("name", TYPED_COLUMNS)
def test_columns_of_each_type(typed: Connection, name: str) -> None:
    type_, one, two = TYPED_COLUMNS[name]
    number = type_ in ("smallint", "integer", "bigint", "numeric(6,2)", "positive")
    low, high = (json.loads(v) if number else v for v in (one, two))
    values = [low, high]
    for filters, expected in (
        (low, [1]),
        ([high], [2]),
        (values, [1, 2]),
        ([low, None], [1, 3]),
        (None, [3]),
        ({"ne": low}, [2, 3]),
        ({"nin": values}, [3]),
        ({"nin": [*values, None]}, []),
        ({"lt": high}, [1]),
        ({"lte": high}, [1, 2]),
        ({"gt": low}, [2]),
        ({"gte": low}, [1, 2]),
        ({"between": values}, [1, 2]),
        ({"between": [high, high]}, [2]),
        ({"exists": True}, [1, 2]),
        ({"exists": False}, [3]),
    ):
        if name == "vch" and isinstance(filters, dict) and filters.keys() & {"lt", "lte", "gt", "gte", "between"}:
            continue  # 'Bcd' comes before 'abc' or after it, as the collation has it
        assert ids(typed, {name: filters}, vector_store=["typed"]) == expected, filters


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"i4": 1.5}, []),
        ({"i4": {"gt": 1.5}}, [2]),
        ({"i2": {"lt": 1e30}}, [1, 2]),
        ({"i2": {"in": [70000, 1]}}, [1]),
        ({"i8": "9007199254740993"}, [2]),
        ({"i4": "1"}, [1]),
        ({"num": 1.5}, [1]),
        ({"f4": 0.1}, [1]),
        ({"f8": {"gt": 0.1}}, [2]),
        ({"txt": 1}, [1]),
        ({"txt": {"like": "it'_"}}, [2]),
        ({"vch": {"ilike": "b%"}}, [2]),
        ({"chr": {"like": "b"}}, [2]),
        ({"chr": "ab   "}, [1]),
        ({"nam": {"like": "b%"}}, [2]),
        ({"dom": {"ilike": "%C"}}, [1]),
        ({"boo": True}, [2]),
        ({"boo": [False, "true"]}, [1, 2]),
        ({"dat": {"gte": "2024-03-01"}}, [2]),
        ({"tz": "2024-09-30T22:00:00Z"}, [2]),
        ({"ip": "10.0.0.2/32"}, [2]),
        ({"mood": "sad"}, [1]),
        ({"mood": ["happy", "no such label"]}, [2]),
        ({"mood": {"ne": "sad"}}, [2, 3]),
        ({"mood": {"ilike": "HAP%"}}, [2]),
        ({"feel": "happy"}, [2]),
        ({"ai": 2}, [1, 2]),
        ({"ai": [1, 7]}, [1]),
        ({"ai": {"ne": 1}}, [2, 3]),
        ({"ai": {"gt": 2}}, [2]),
        ({"at": "a"}, [1]),
        ({"at": {"ilike": "b"}}, [1, 2]),
        ({"at": {"like": "b"}}, [1]),
        ({"at": None}, [3]),
        ({"av": ["a", "c"]}, [1, 2]),
        ({"ad": {"between": ["2024-05-01", "2024-07-01"]}}, [2]),
        ({"js": "x"}, [1]),
        ({"js": {"gt": 1}}, [2]),
        ({"js": {"exists": False}}, [3]),
        ({"pair": {"exists": True}}, [1, 2]),
        ({"moods": None}, [3]),
        ({"k": 1}, [1]),
        ({"/i4": 9}, [2]),
        # a system column and a column of a name too long are keys of the metadata
        ({"ctid": "(0,1)"}, []),
        ({"x" * 100: None}, [1, 2, 3]),
    ],
    ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else "",
)
def test_columns(typed: Connection, filters: Any, expected: list[int]) -> None:
    assert ids(typed, filters, vector_store=["typed"]) == expected


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"i4": "abc"}, ['"i4"', '"abc"', "integer"]),
        ({"i4": True}, ['"i4"', '"true"', "integer"]),
        ({"f8": "1e400"}, ['"f8"', "1e400", "double precision"]),
        ({"boo": 7}, ['"boo"', "boolean"]),
        ({"dat": {"lt": "29.02.2023 o'clock"}}, ['"dat"', "o'clock", "date"]),
        ({"dat": "2023-02-29"}, ['"dat"', "2023-02-29", "date"]),
        ({"tz": ["2024-01-01", "never"]}, ['"tz"', "never", "timestamp with time zone"]),
        ({"uid": {"ne": "x"}}, ['"uid"', '"x"', "uuid"]),
        ({"ip": "10.0.0.256"}, ['"ip"', "inet"]),
        ({"ai": 1e30}, ['"ai"', "integer[]"]),
        ({"doi": "x"}, ['"doi"', "integer"]),
        ({"i4": {"like": "1%"}}, ["column i4", "integer", '"like"']),
        ({"dat": {"ilike": "2024%"}}, ["column dat", "date", '"ilike"']),
        ({"mood": {"gt": "sad"}}, ["column mood", "mood", '"gt"']),
        ({"pair": "(1,2)"}, ["column pair"]),
        ({"xml": "a"}, ["column xml", "tsvector"]),
        ({"moods": "sad"}, ["column moods"]),
        ({"segment_embedding": "[1,0,0]"}, ["column segment_embedding", "vector"]),
        ({"not": {"or": [{"i4": {"nin": ["x"]}}]}}, ['"i4"', '"x"', "integer"]),
    ],
    ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else "",
)
def test_what_a_column_does_not_take(typed: Connection, filters: Any, words: list[str]) -> None:
    with error("22023") as caught:
        retrieve(typed, (1, 0, 0), filters=filters, vector_store=["typed"])
    everything = (caught.message + " " + caught.detail).lower()
    for word in words:
        assert word.lower() in everything


def test_a_refused_value_is_not_repeated_whole(typed: Connection) -> None:
    """It may be anything, and errors are written into the log: docs/security.md."""
    with error("22023", "integer") as caught:
        retrieve(typed, (1, 0, 0), filters={"i4": "private words " * 100}, vector_store=["typed"])
    assert len(caught.detail) < 600


def test_mapped_columns_go_by_their_logical_names_and_by_their_own(owner: Connection, asker: Connection) -> None:
    owner.execute(
        "CREATE TABLE books (title text, document_name text, body text, v vector(3), props jsonb, id integer);"
        """INSERT INTO books VALUES ('t1', 'other', 'one', '[1,0,0]', '{"k": 1}', 1),"""
        " ('t2', 't1', 'two', '[1,0,0]', '{}', 2)"
    )
    grant(owner, "books")
    columns = {"segment": "body", "segment_embedding": "v", "document_name": "title", "metadata": "props"}
    options = {
        "vector_store": ["books"],
        "vector_store_columns": {**columns, "document_id": "id"},
        "embed_model_id": "fake-embed",
    }
    for filters, expected in (
        ({"document_name": "t1"}, [1]),
        ({"title": "t2"}, [2]),
        ({"segment": {"like": "t%"}}, [2]),
        ({"body": "one", "id": 1}, [1]),
        ({"k": 1}, [1]),
    ):
        assert ids(asker, filters, **options) == expected


def test_a_column_that_the_caller_may_not_select_is_no_column(owner: Connection, asker: Connection) -> None:
    create_rows(owner, [{"secret": "in the metadata"}, {}])
    owner.execute("ALTER TABLE docs ADD secret text DEFAULT 'hidden'")
    assert ids(asker, {"secret": "hidden"}) == [1, 2]
    owner.execute(
        "REVOKE SELECT ON docs FROM ml_rag_user; GRANT SELECT (document_name, metadata, document_id, segment_number,"
        " segment, segment_embedding) ON docs TO ml_rag_user"
    )
    assert ids(asker, {"secret": "hidden"}) == []
    assert ids(asker, {"secret": "in the metadata"}) == [1]


@pytest.mark.parametrize(
    ("filters", "hint"),
    [
        ({"mood": {"gte": "sad"}}, "Enums do not support ranges."),
        ({"n": {"like": "1%"}}, '"like" requires a column of text.'),
        ({"place": "(1,2)"}, 'A column of this type supports only "exists".'),
    ],
)
def test_the_hint_says_what_the_column_supports(
    owner: Connection, asker: Connection, filters: dict[str, Any], hint: str
) -> None:
    create_rows(owner, [{}])
    owner.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    owner.execute("ALTER TABLE docs ADD mood mood, ADD n int, ADD place point")
    with error("22023", "operator is not supported") as caught:
        ids(asker, filters)
    assert caught.hint == hint


# -- other people's code ----------------------------------------------------------------------------------------------


def test_casts_and_operators_of_other_roles_do_not_run(db: Database, owner: Connection, asker: Connection) -> None:
    owner.execute(
        "CREATE SCHEMA planted; CREATE TYPE planted.mood AS ENUM ('sad', 'happy');"
        "CREATE DOMAIN planted.dom AS text;"
        "CREATE FUNCTION planted.capture(planted.mood) RETURNS text LANGUAGE plpgsql"
        " AS $$ BEGIN RAISE 'captured'; END $$;"
        "CREATE FUNCTION planted.back(text) RETURNS planted.mood LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured'; END $$;"
        "CREATE CAST (planted.mood AS text) WITH FUNCTION planted.capture(planted.mood) AS IMPLICIT;"
        "CREATE CAST (text AS planted.mood) WITH FUNCTION planted.back(text) AS IMPLICIT;"
    )
    # in the schema of pgvector, where others may be allowed to create
    for type_ in ("planted.mood", "planted.dom"):
        owner.execute(
            f"CREATE FUNCTION public.capture({type_}, {type_}) RETURNS boolean LANGUAGE plpgsql"
            " AS $$ BEGIN RAISE 'captured'; END $$;"
            f"CREATE FUNCTION public.capture({type_}, text) RETURNS boolean LANGUAGE plpgsql"
            " AS $$ BEGIN RAISE 'captured'; END $$"
        )
        for operator in ("=", ">=", "~~"):
            for right in (type_, "text"):
                owner.execute(
                    f"CREATE OPERATOR public.{operator} (LEFTARG = {type_}, RIGHTARG = {right},"
                    " FUNCTION = public.capture)"
                )
    create_rows(owner, [{}, {}])
    owner.execute("ALTER TABLE docs ADD mood planted.mood DEFAULT 'sad', ADD dom planted.dom DEFAULT 'x'")
    for filters in (
        {"mood": "sad"},
        {"mood": ["sad", "x"]},
        {"mood": {"like": "s%"}},
        {"dom": "x"},
        {"dom": {"gte": "x"}},
        {"dom": {"like": "x"}},
        {"dom": ["x", "y"]},
    ):
        assert ids(asker, filters, vector_store=["docs"]) == [1, 2]
