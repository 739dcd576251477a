"""Questions, filters and stored texts of any characters and any length; and bytes that are no text at all."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import Dumper
from psycopg.pq import Format

from support import fuzzing
from support.cluster import Connection, Database, value_of
from support.documented import Routine, routines, states
from support.option_cases import ODD_TEXTS, pick
from support.stores import create_store, fake_embedding

FULL, SHORT = 2_000, 120
FULL_BYTES, SHORT_BYTES = 1_000, 80

WILD = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60),
    st.text(st.characters(categories=["Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Co", "Cn"], exclude_characters="\0")),
    st.text("ab \t\n.,'\"\\%_$()[]{}<>&|!*?:;-+=/#@^~`", max_size=40),
    st.lists(st.sampled_from(["one", "two", "AND", "OR", "NOT", "<->", ":*", "&", "|", "!", "(", ")", "'"])).map(
        " ".join
    ),
    pick(ODD_TEXTS),
)
LARGE = {
    "one long word": "x" * 1_000_000,
    "many words": " ".join(str(n) for n in range(100_000)),
    "one word again and again": "one " * 250_000,
    "combining characters": "e" + "\u0301" * 200_000,
    "brackets": "(" * 300_000,
    "quotes": "'\"" * 200_000,
    "four bytes each": "😀" * 250_000,
    "blanks": " " * 1_000_000 + "one",
    "lines": "\n" * 500_000 + "one",
    "Chinese": "我喜欢机器学习" * 50_000,
    "signs between letters": "a-b_c.d/" * 100_000,
}
KINDS: dict[str, dict[str, Any]] = {
    "semantic": {},
    "keyword": {"semantic_search": False, "keyword_search": True},
    "hybrid": {"keyword_search": True},
    "reranked": {"rerank": {}},
    "abstaining": {"retrieval_options": {"max_distance": 0.01}},
}


@pytest.fixture(scope="module")
def asked(module_db: Database, module_owner: Connection) -> Connection:
    rows = [("a", 1, i, text, fake_embedding(text)) for i, text in enumerate(["one two three", "two", "four", "x y"])]
    create_store(module_owner, "words", rows, type="vector(16)")
    module_owner.execute("SELECT ml_rag.enable_keyword_search('words')")
    asker = module_db.connect("asker")
    asker.execute("SET statement_timeout = '30s'; SET client_min_messages = error")
    return asker


def documented(connection: Connection, name: str) -> set[str]:
    everything = routines(connection)
    return set().union(*(states(r, everything) for r in everything if r.name == name))


def ask(connection: Connection, query: str, options: dict[str, Any], allowed: set[str]) -> str:
    """How the call ended."""
    try:
        row = connection.execute("SELECT ml_rag_answer(%s, %s)", (query, json.dumps(options))).fetchone()
    except psycopg.Error as error:
        if error.diag.sqlstate not in allowed:
            pytest.fail(f"{error.diag.sqlstate} {error} for {query[:200]!r} with {options}")
        return str(error.diag.sqlstate)
    assert row is not None
    assert row[0]["citations"] or "abstain" in str(options) or row[0]["text"]
    return "ok"


def test_questions_of_any_characters(asked: Connection) -> None:
    allowed = documented(asked, "ml_rag_answer")
    ended: set[tuple[str, str]] = set()
    with fuzzing.target("questions", full=FULL, short=SHORT) as account:

        @fuzzing.examples(account.wanted)
        @given(query=WILD, kind=st.sampled_from(sorted(KINDS)), word=WILD)
        def run(query: str, kind: str, word: str) -> None:
            if not account.next():
                return
            ended.add((kind, ask(asked, query, KINDS[kind], allowed)))
            listed = {"required_keywords": [word], "excluded_keywords": [query], "document_name": ["a", word]}
            ask(asked, "one", {**KINDS[kind], **listed}, allowed)

        run()
        account.coverage = f"{len(ended)} endings of {len(KINDS)} kinds of search"


@pytest.mark.parametrize("kind", KINDS if fuzzing.FULL else ["hybrid"])
@pytest.mark.parametrize("name", LARGE)
def test_a_very_long_question(asked: Connection, name: str, kind: str) -> None:
    assert ask(asked, LARGE[name], KINDS[kind], documented(asked, "ml_rag_answer")) in ("ok", "22023", "54000", "P0002")


def test_what_is_stored_is_what_is_cited_and_what_filters_find(module_owner: Connection, asked: Connection) -> None:
    create_store(module_owner, "wild", type="vector(16)")
    with fuzzing.target("stored texts", full=FULL, short=SHORT) as account:

        @fuzzing.examples(account.wanted)
        @given(segment=WILD, name=WILD.filter(bool), key=WILD.filter(bool), value=WILD)
        def run(segment: str, name: str, key: str, value: str) -> None:
            if not account.next():
                return
            # a column of that name would be meant, and a path where it begins with a slash
            key = f"k{key}"
            module_owner.execute("TRUNCATE wild")
            module_owner.execute(
                "INSERT INTO wild VALUES (%s, %s, 1, 1, %s, %s)",
                (name, json.dumps({key: value}), segment, str([1.0] * 16)),
            )
            options = {
                "vector_store": ["wild"],
                "document_name": [name],
                "filters": {key: value},
                "skip_generate": True,
            }
            options["query_embedding"] = [1.0] * 16
            found = value_of(asked, "SELECT ml_rag_answer('q', %s)", (json.dumps(options),))
            assert found["citations"] == [{"segment": segment, "distance": 0, "document_name": name}]

        run()
        account.coverage = "segments, names, keys and values come back as they were"


class _Bytes(bytes):
    """Bytes that are sent as if they were text."""


class _BytesDumper(Dumper):
    format = Format.TEXT

    def dump(self, obj: _Bytes) -> bytes:
        return bytes(obj)


#: what PostgreSQL itself says of text or JSON that is none, before any routine sees it
NO_TEXT = {"22021", "22P02", "22P05", "54001"}


def test_bytes_that_are_no_text_or_no_json(asked: Connection) -> None:
    asked.adapters.register_dumper(_Bytes, _BytesDumper)
    everything = routines(asked)
    called: list[Routine] = [r for r in everything if r.name in ("ml_rag_answer", "ml_rag_search", "ml_generate")]
    ended: set[str] = set()
    odd = [b"\0", b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\\u0000", b"\\ud800", b"\\udfff\\ud800"]
    pieces = st.one_of(st.sampled_from([*odd, b'"', b"{", b"}", b'"n_citations": 1', b'{"filters": {"a": "', b'"}}']))
    with fuzzing.target("bytes as text", full=FULL_BYTES, short=SHORT_BYTES) as account:

        @fuzzing.examples(account.wanted)
        @given(
            routine=st.sampled_from(called),
            query=st.lists(st.one_of(pieces, st.binary(max_size=8)), max_size=4).map(b"".join),
            options=st.one_of(
                st.just(b"{}"),
                st.lists(st.one_of(pieces, st.binary(max_size=4)), max_size=5).map(b"".join),
                pieces.map(lambda piece: b'{"document_name": ["' + piece + b'"]}'),
                pieces.map(lambda piece: b'{"' + piece + b'": 1}'),
            ),
        )
        def run(routine: Routine, query: bytes, options: bytes) -> None:
            if not account.next():
                return
            try:
                asked.execute(f"SELECT {routine.name}(%s::text, %s::jsonb)", (_Bytes(query), _Bytes(options)))
                ended.add("ok")
            except psycopg.Error as error:
                if error.diag.sqlstate not in NO_TEXT | states(routine, everything):
                    pytest.fail(f"{error} for {query!r} {options!r}")
                ended.add(str(error.diag.sqlstate))
            assert asked.execute("SELECT 1").fetchone() == (1,)

        run()
        account.coverage = f"endings {', '.join(sorted(ended))}"
