"""Calls ended from outside: statement_timeout, lock_timeout, sessions that are terminated, cancelled, or left idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.cluster import Connection
from support.invariants import assert_nothing_left, documents_of
from support.loading import counts, rows
from support.processes import wait_until
from support.site import MODEL_CALLS, STORE, Gate, Site, options
from support.stores import error
from support.supervised_server import SupervisedServer, supervised_server

Make = Callable[..., Gate]


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[SupervisedServer]:
    """One whose models hold whoever asks."""
    with supervised_server(place) as running:
        yield running


#: each routine in the middle of its model's work -> statement, model
CALLS: dict[str, tuple[str, str]] = {
    **MODEL_CALLS,
    "ml_rag_table": (
        "CALL ml_rag_table('public.questions.question', 'public.questions.answer',"
        f" '{options(model_options={'model_id': 'held-generate'})}')",
        "held-generate",
    ),
    "ml_generate_table": (
        f"CALL ml_generate_table('public.questions.question', 'public.o.a', '{options(model_id='held-generate')}')",
        "held-generate",
    ),
    "ml_embed_table": (
        f"CALL ml_embed_table('public.questions.question', 'public.o.v', '{options(embed_model_id='held-embed')}')",
        "held-embed",
    ),
    "create_store": (
        f"SELECT ml_rag.create_store('public.other', '{options(embed_model_id='held-embed')}')",
        "held-embed",
    ),
}
LASTING = {("ml_rag", "terminated"), ("ml_rag_table", "cancelled"), ("ml_embed_table", "timed out")}


def cancelled(session: Connection, by: Connection) -> str:
    by.execute("SELECT pg_cancel_backend(%s::integer)", (session.info.backend_pid,))
    return "57014"


def terminated(session: Connection, by: Connection) -> str:
    by.execute("SELECT pg_terminate_backend(%s::integer)", (session.info.backend_pid,))
    return "57P01"


WAYS: dict[str, Callable[[Connection, Connection], str]] = {"cancelled": cancelled, "terminated": terminated}


@pytest.mark.parametrize(
    ("routine", "way"),
    [
        pytest.param(r, w, marks=() if (r, w) in LASTING else (pytest.mark.slow,), id=f"{r}-{w}")
        for r in CALLS
        for w in ("cancelled", "terminated", "timed out")
    ],
)
def test_a_call_in_the_middle_of_a_models_work(site: Site, routine: str, way: str) -> None:
    statement, model = CALLS[routine]
    session, other = site.connect(), site.loaded()
    other.execute("CREATE TABLE questions (id integer PRIMARY KEY, question text, answer jsonb)")
    other.execute("INSERT INTO questions SELECT i, 'topic' || i FROM generate_series(1, 5) AS i")
    if way == "timed out":
        session.execute("SET statement_timeout = '700ms'")
    call = site.background(lambda: session.execute(statement))
    if way == "timed out":
        expected = "57014"
    else:
        wait_until(lambda: site.server.is_at_work(model))
        expected = WAYS[way](session, other)
    with pytest.raises(psycopg.Error) as caught:
        call.result()
    assert caught.value.diag.sqlstate == expected
    # the model server stops working for somebody who is gone, the session leaves nothing
    assert_nothing_left(other, site.server)
    assert rows(other, "SELECT count(*) FROM questions WHERE answer IS NOT NULL") == [(0,)]
    assert rows(other, "SELECT to_regclass('public.other')") == [(None,)]
    if way != "terminated":
        session.execute("RESET statement_timeout")
        assert len(rows(session, "SELECT * FROM ml_rag_search('topic3')")) == 3
    else:
        assert session.closed
    other.execute("DROP TABLE questions; DROP TABLE IF EXISTS o")
    site.verify()


#: what writes, held in the middle of it -> the gate's table and condition, statement
WRITES: dict[str, tuple[str, str, str]] = {
    "vector_store_load": ("docs", "NEW.document_name LIKE '%d030.txt'", "load"),
    "load_document": ("docs", "NEW.segment_number = 2 AND NEW.document_name = 'a'", "document"),
    "merge_keyword_index": ("ml_rag_internal.keyword_posting", "true", "SELECT ml_rag.merge_keyword_index('docs')"),
    "enable_keyword_search": ("ml_rag_internal.keyword_posting", "true", "SELECT ml_rag.enable_keyword_search('docs')"),
}


@pytest.mark.parametrize("way", ["cancelled", "terminated"])
@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=() if w == "vector_store_load" else (pytest.mark.slow,)) for w in WRITES]
)
def test_a_call_in_the_middle_of_writing(site: Site, gate: Make, what: str, way: str) -> None:
    table, condition, statement = WRITES[what]
    session, other = site.connect(), site.connect()
    if statement == "load":
        other.execute("SELECT ml_rag.create_store(%s)", (STORE,))
    else:
        site.load(other)
        other.execute("UPDATE docs SET segment = segment || ' more'")
        other.execute("UPDATE docs SET segment = replace(segment, ' more', '')")
    before = documents_of(other, STORE)
    held = gate(table, condition)

    def run() -> Any:
        if statement == "load":
            return site.load(session)
        if statement == "document":
            text = b"one paragraph\n\nanother paragraph\n\na third"
            chunking = options(chunking={"split_by": "paragraph", "segment_tokens": 16})
            return session.execute("SELECT ml_rag.load_document('docs', 'a', %s, %s)", (text, chunking))
        return session.execute(statement)

    call = site.background(run)
    held.wait()
    expected = WAYS[way](session, other)
    with pytest.raises(psycopg.Error) as caught:
        call.result()
    assert caught.value.diag.sqlstate == expected
    held.open()
    held.remove(other)
    kept = documents_of(other, STORE)
    assert before.items() <= kept.items() <= site.undisturbed.documents.items()
    assert sum(counts(site.load(other)).values()) == 40
    site.verify()


def test_a_load_that_waits_for_another_gives_up_by_lock_timeout(site: Site, gate: Make) -> None:
    first, second = site.connect(), site.connect()
    first.execute("SELECT ml_rag.create_store(%s)", (STORE,))
    held = gate("docs", "NEW.document_name LIKE '%d030.txt'")
    call = site.background(lambda: site.load(first))
    held.wait()
    second.execute("SET lock_timeout = '300ms'")
    with error("55P03", "lock timeout", ours=False):
        site.load(second)
    with error("55P03", "lock timeout", ours=False):
        second.execute("SELECT ml_rag.load_document('docs', 'a', 'text')")
    # who reads does not wait
    assert len(rows(second, "SELECT * FROM ml_rag_search('topic3')")) == 3
    held.open()
    assert counts(call.result(60)) == {"loaded": 40}
    held.remove(first)
    assert counts(site.load(second)) == {"unchanged": 40}
    site.verify()


@pytest.mark.slow
def test_sessions_that_are_left_idle(site: Site) -> None:
    """What ends idle sessions ends their connection to the model server too; who asks again connects again."""
    session, other = site.connect(), site.loaded()

    def opened() -> int:
        return len(list(Path(f"/proc/{site.server.pid}/fd").iterdir()))

    settled = opened()
    sessions = [site.connect() for _ in range(8)]
    session.execute("BEGIN")
    for each in (*sessions, session):
        rows(each, "SELECT ml_embed_row('a')")
    assert opened() == settled + 9
    for each in sessions:
        each.execute("SET idle_session_timeout = '100ms'")
    session.execute("SET idle_in_transaction_session_timeout = '100ms'")
    wait_until(
        lambda: rows(other, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()") == [(1,)]
    )
    wait_until(lambda: opened() <= settled)
    for each, state in (*((s, "57P05") for s in sessions), (session, "25P03")):
        with pytest.raises(psycopg.Error) as caught:
            each.execute("SELECT 1")
        assert caught.value.diag.sqlstate in (state, None)
    site.verify()


@pytest.mark.slow
def test_a_transaction_left_open_after_a_load_keeps_nobody_from_the_store_for_ever(site: Site) -> None:
    """Inside a transaction the load is the caller's; when that session is ended, nothing of it is there."""
    session, other = site.connect(), site.connect()
    session.execute("SET idle_in_transaction_session_timeout = '1s'; BEGIN")
    assert counts(site.load(session)) == {"loaded": 40}
    # waits for the one in the transaction, which is ended for its idleness
    assert counts(site.load(other)) == {"loaded": 40}
    with pytest.raises(psycopg.Error):
        session.execute("COMMIT")
    site.verify()
