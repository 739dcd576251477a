"""pipeline/condition: whatever a caller may come up with, against an implementation in Python."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support import filtering
from support.cluster import Connection, Database
from support.searching import ARRAY_COLUMNS, TYPED_COLUMNS, create_typed, ids, insert_rows
from support.stores import create_store, retrieve

ODD = [
    "'",
    '"',
    "\\",
    "\\'",
    "$3",
    "$3[1]",
    "$1",
    "%s",
    "%I",
    "%1$s",
    "'; DROP TABLE docs; --",
    "') OR true --",
    "a' OR '1'='1",
    '$."x"',
    "$.x ? (@ == 1)",
    '" ? (true) //',
    "@",
    "and",
    "or",
    "not",
    "eq",
    "in",
    "document_id",
    "t.metadata",
    "\\u0000",
    "\x01\x1f\x7f",
    "\n",
    "\t",
    "é",
    "e\u0301",
    "中文",
    "😀",
    "/",
    "/a",
    "/~1",
    "a.b",
    "",
    " ",
    "x" * 200,
    "\ufeff",
    "\u202e",
    "\u2028",
    "null",
    "true",
]
TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=8)
SOME_TEXT = st.one_of(st.sampled_from(ODD), st.sampled_from(["a", "b", "A", "ab"]), TEXT)
#: none that is a column of the store
KEY = st.one_of(st.sampled_from([*"abc", "/a", "/a/b", "/a/a", "/b"]), st.sampled_from(ODD), TEXT).filter(
    lambda k: k not in ("and", "or", "not", "document_id") and not (k.startswith("/") and "~" in k)
)
NUMBER = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([0.5, -2.5, 1e15, 10**40, -(10**25), 1.0]),
    st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 3)),
)
SCALAR = st.one_of(SOME_TEXT, NUMBER, st.booleans(), st.none())
VALUE = st.recursive(
    SCALAR,
    lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.sampled_from([*"ab"]), v, max_size=2)),
    max_leaves=5,
)
METADATA_VALUE = st.dictionaries(st.one_of(st.sampled_from([*"abc", *ODD]), TEXT), VALUE, max_size=5)
ORDERED = st.one_of(SOME_TEXT, NUMBER)
PATTERN = st.lists(
    st.one_of(st.sampled_from(["%", "_", "a", "B", "\\%", "\\\\", "é", "'", "$3", "."]), st.sampled_from("abAB")),
    max_size=4,
).map("".join)
OPERATORS = st.fixed_dictionaries(
    {},
    optional={
        "eq": SCALAR,
        "ne": SCALAR,
        "in": st.lists(SCALAR, max_size=20),
        "nin": st.lists(SCALAR, max_size=3),
        "lt": ORDERED,
        "lte": ORDERED,
        "gt": ORDERED,
        "gte": ORDERED,
        "between": st.one_of(st.lists(SOME_TEXT, min_size=2, max_size=2), st.lists(NUMBER, min_size=2, max_size=2)),
        "like": PATTERN,
        "ilike": PATTERN,
        "exists": st.booleans(),
    },
).filter(bool)
TERM = st.dictionaries(KEY, st.one_of(SCALAR, st.lists(SCALAR, max_size=3), OPERATORS), max_size=3)
FILTERS = st.recursive(
    TERM,
    lambda f: st.one_of(
        st.fixed_dictionaries({"and": st.lists(f, max_size=3)}),
        st.fixed_dictionaries({"or": st.lists(f, max_size=3)}),
        st.fixed_dictionaries({"not": f}),
        st.tuples(TERM, st.fixed_dictionaries({"not": f})).map(lambda p: {**p[0], **p[1]}),
    ),
    max_leaves=6,
).filter(lambda f: depth(f) <= 8)
pytestmark = pytest.mark.fuzz

RELAXED = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def depth(filters: Any) -> int:
    members = [filters["not"]] if "not" in filters else []
    members += filters.get("and", []) + filters.get("or", [])
    return 1 + max(map(depth, members), default=0)


@pytest.fixture(scope="module")
def fuzzed(module_db: Database) -> Connection:
    owner = module_db.connect()
    create_store(owner, "fuzzed")
    return owner


@RELAXED
@given(rows=st.lists(METADATA_VALUE, min_size=1, max_size=12), filters=st.lists(FILTERS, min_size=1, max_size=4))
@example(rows=[{"a": "x"}, {"a": ["x"]}, {}], filters=[{"a": {"ne": "x"}}, {"not": {"a": {"gt": 1}}}])
def test_random_filters_on_random_metadata_against_an_implementation_in_python(
    fuzzed: Connection, rows: list[Any], filters: list[Any]
) -> None:
    fuzzed.execute("TRUNCATE fuzzed")
    insert_rows(fuzzed, rows, "fuzzed")
    parsed = [filtering.parse(json.dumps(m)) for m in rows]
    for f in filters:
        wanted = filtering.parse(json.dumps(f))
        expected = [i for i, m in enumerate(parsed, 1) if filtering.matches(wanted, m)]
        assert ids(fuzzed, f, vector_store=["fuzzed"]) == expected, f


@pytest.fixture(scope="module")
def typed(module_db: Database) -> Connection:
    create_typed(module_db.connect())
    return module_db.connect("asker")


TYPED_KEY = st.sampled_from([*TYPED_COLUMNS, *ARRAY_COLUMNS, "mood", "pair", "js", *ODD])
TYPED_KEY = st.sampled_from([*TYPED_COLUMNS, *ARRAY_COLUMNS, "mood", "pair", "js", *ODD])
ANYTHING = st.recursive(
    SCALAR,
    lambda v: st.one_of(
        st.lists(v, max_size=3),
        st.dictionaries(
            st.one_of(
                st.sampled_from(["and", "or", "not", "eq", "in", "gte", "between", "like", "i4", "dat"]), SOME_TEXT
            ),
            v,
            max_size=3,
        ),
    ),
    max_leaves=8,
)


@RELAXED
@given(
    filters=st.one_of(
        ANYTHING,
        st.dictionaries(
            st.sampled_from([*TYPED_COLUMNS, *ARRAY_COLUMNS, "mood", "pair", "js", *ODD]),
            st.one_of(ANYTHING, OPERATORS),
        ),
    )
)
def test_whatever_is_given_only_documented_errors_come(typed: Connection, filters: Any) -> None:
    state = None
    try:
        retrieve(typed, (1, 0, 0), filters=filters, vector_store=["typed"])
    except psycopg.Error as e:
        state = e.diag.sqlstate
    assert state in (None, "22023", "P0002"), state
    assert typed.execute("SELECT count(*) FROM typed").fetchone() == (3,)
