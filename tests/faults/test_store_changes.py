"""A store dropped, emptied, altered or taken away in the middle of a search, a load, a batch routine, a rebuild."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from support.cluster import waits_for_a_lock
from support.faulty_proxy import FaultyProxy
from support.invariants import documents_of, orphans
from support.loading import counts, rows
from support.processes import Background, wait_until
from support.site import STORE, Gate, Site
from support.stores import error

Make = Callable[..., Gate]


class Change:
    """A statement of somebody else, which waits until the call in the middle lets go of the table."""

    def __init__(self, site: Site, statement: str) -> None:
        self._connection = site.connect()
        self.call = site.background(lambda: self._connection.execute(statement))
        with site.connect() as watcher:
            wait_until(lambda: waits_for_a_lock(watcher, self._connection) or self.call.ended)


# -- a search ---------------------------------------------------------------------------------------------------------


#: what somebody wants to do between discovery and the search, while the question is embedded
SEARCHES: dict[str, str] = {
    "dropped": "DROP TABLE docs",
    "truncated": "TRUNCATE docs",
    "without its column": "ALTER TABLE docs DROP COLUMN segment",
    "with another name of a column": "ALTER TABLE docs RENAME segment_embedding TO e",
    "with other dimensions": "TRUNCATE docs; ALTER TABLE docs ALTER segment_embedding TYPE vector(3)",
    "renamed": "ALTER TABLE docs RENAME TO docs2",
    "moved": "CREATE SCHEMA elsewhere; ALTER TABLE docs SET SCHEMA elsewhere",
    "without its keyword index": "SELECT ml_rag.disable_keyword_search('docs')",
}


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=() if w in ("dropped", "truncated") else (pytest.mark.slow,)) for w in SEARCHES]
)
@pytest.mark.parametrize("keyword", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_store_is_found_and_then(site: Site, proxy: FaultyProxy, what: str, keyword: bool) -> None:
    """A store that was found is held until the call has answered: the change waits for it."""
    session = site.loaded()
    options = f'{{"keyword_search": {str(keyword).lower()}}}'
    ask = f"SELECT document_name, segment_number, distance FROM ml_rag_search('topic3', '{options}')"
    before = rows(session, ask)
    asked, go_on = threading.Event(), threading.Event()

    def wait(client: Any, request: bytes, reply: bytes) -> None:
        asked.set()
        go_on.wait(20)
        client.sendall(reply)

    proxy.arm("/v1/embeddings", wait)
    call = site.background(lambda: rows(session, ask))
    assert asked.wait(20)
    change = Change(site, SEARCHES[what])
    assert not change.call.ended
    go_on.set()
    assert call.result() == before
    change.call.result()
    proxy.disarm()
    other = site.connect()
    other.execute("DROP TABLE IF EXISTS docs, docs2, elsewhere.docs")
    with error("P0002", "no vector store found"):
        rows(session, ask)
    assert orphans(other) == 0
    assert counts(site.load(session)) == {"loaded": 40}
    assert rows(session, ask) == before
    site.verify()


# -- a load -----------------------------------------------------------------------------------------------------------

DEADLOCK = "40P01"
#: statement -> SQLSTATE of the load, or None; where both want what the other has, PostgreSQL ends one of them
LOADS: dict[str, str | None] = {
    "DROP TABLE docs": "42P01",
    "TRUNCATE docs": None,
    "DELETE FROM docs": None,
    "ALTER TABLE docs DROP COLUMN metadata": "42703",
    "ALTER TABLE docs RENAME segment TO s": "42703",
    "ALTER TABLE docs RENAME TO docs2": None,
    "ALTER TABLE docs ADD CHECK (segment NOT LIKE '%only33%')": None,
    "SELECT ml_rag.disable_keyword_search('docs')": None,
    "SELECT ml_rag.enable_keyword_search('docs', '{\"language\": \"en\"}')": None,
    "REINDEX TABLE docs": None,
    "VACUUM FULL docs": None,
    "DROP EXTENSION ml_rag CASCADE": "42883",
}
LASTING = ("DROP TABLE docs", "TRUNCATE docs")
MAY_DEADLOCK = ("REINDEX TABLE docs", "VACUUM FULL docs", "DROP EXTENSION ml_rag CASCADE")


def outcome_of(call: Background) -> tuple[str | None, Any]:
    """SQLSTATE and error, or None and the result."""
    try:
        return None, call.result(60)
    except psycopg.Error as e:
        return e.diag.sqlstate, e


@pytest.mark.parametrize(
    "statement", [pytest.param(s, marks=() if s in LASTING else (pytest.mark.slow,)) for s in LOADS]
)
def test_in_the_middle_of_a_load(site: Site, gate: Make, statement: str) -> None:
    sqlstate = LOADS[statement]
    session = site.connect()
    session.execute("SELECT ml_rag.create_store(%s)", (STORE,))
    # nothing to change in the table itself: the gate is a trigger there
    held = gate("docs", "NEW.document_name LIKE '%d005.txt' AND NEW.segment_number = 1")
    call = site.background(lambda: site.load(session))
    held.wait()
    change = Change(site, statement)
    held.open()
    after = site.connect()
    ended, outcome = outcome_of(call)
    # a statement that has the former name waits for the table, and then finds none of that name
    allowed = {sqlstate, DEADLOCK} | ({"42P01"} if "RENAME TO" in statement else set())
    if "RENAME segment" in statement:
        allowed.add("55000")  # where the keyword index is the first to miss its column
    if "EXTENSION" in statement:
        allowed.add("XX000")  # PostgreSQL's own, where it looks up a function that has just gone
    assert ended in allowed, outcome
    result = {} if ended else counts(outcome)
    assert ended or sum(result.values()) == 40
    changed, why = outcome_of(change.call)
    assert changed in (None, DEADLOCK), why
    assert DEADLOCK not in (ended, changed) or statement in MAY_DEADLOCK
    if changed == DEADLOCK:
        after.execute(statement)
    if "EXTENSION" in statement:
        after.execute("DROP TABLE docs; CREATE EXTENSION ml_rag CASCADE")
        for name, value in (("model_server", site.server.address), ("embed_model_id", "fake-embed")):
            after.execute("SELECT ml_rag.configure(%s, %s)", (name, value))
        after.execute("SELECT ml_rag.configure('generate_model_id', 'fake-generate')")
        site.database.close()
        after = site.connect()
    else:
        if rows(after, "SELECT to_regclass('docs')") != [(None,)]:
            after.execute("DROP TRIGGER IF EXISTS gate ON docs")
        assert orphans(after) == 0
    if "CHECK" in statement:
        assert result["failed"] == 1  # one document, said and left out; the others are there
        after.execute("ALTER TABLE docs DROP CONSTRAINT docs_segment_check")
    elif sqlstate == "42703":
        # what no longer is a store is said to be none
        with error("22023", "not a vector store"):
            site.load(after)
        after.execute("DROP TABLE docs")
    elif "RENAME TO" in statement:
        there = documents_of(after, "public.docs2")
        assert there.items() <= site.undisturbed.documents.items()
        assert ended or len(there) == 40
        after.execute("DROP TABLE docs2")
    elif "disable" in statement:
        after.execute("SELECT ml_rag.enable_keyword_search('docs')")
    final = counts(site.load(after))
    assert sum(final.values()) == 40
    assert "failed" not in final
    site.verify()


# -- a batch routine --------------------------------------------------------------------------------------------------

BATCHES: dict[str, str | None] = {
    "DROP TABLE questions": "42P01",
    "TRUNCATE questions": None,
    "ALTER TABLE questions DROP COLUMN question": "42703",
    "ALTER TABLE questions DROP COLUMN answer": "42703",
    "DELETE FROM questions WHERE id > 20": None,
    "DROP TABLE docs": None,
}


@pytest.mark.parametrize(
    "statement", [pytest.param(s, marks=() if s == "DROP TABLE questions" else (pytest.mark.slow,)) for s in BATCHES]
)
def test_in_the_middle_of_a_batch_routine(site: Site, gate: Make, statement: str) -> None:
    sqlstate = BATCHES[statement]
    session = site.loaded()
    make = "CREATE TABLE questions (id integer PRIMARY KEY, question text, answer jsonb)"
    fill = "INSERT INTO questions SELECT i, 'topic' || i % 13 FROM generate_series(1, 30) AS i"
    session.execute(f"{make}; {fill}")
    held = gate("questions", "NEW.id = 13", "UPDATE")
    statement_of_call = (
        "CALL ml_rag_table('public.questions.question', 'public.questions.answer', '{\"batch_size\": 5}')"
    )
    call = site.background(lambda: rows(session, statement_of_call))
    held.wait()
    change = Change(site, statement)
    held.open()
    if sqlstate is not None:
        with pytest.raises(psycopg.Error) as caught:
            call.result(60)
        assert caught.value.diag.sqlstate == sqlstate, caught.value
    else:
        result = call.result(60)[0][0]
        assert result["succeeded"] + result["failed"] == result["rows"]
        if "docs" in statement:  # there is no store any more: an error of each row
            assert result["failed"] > 0
            assert "P0002" in result["first_error"] or "42P01" in result["first_error"]
        else:
            assert result["failed"] == 0
    change.call.result(60)
    after = site.connect()
    after.execute("DROP TABLE IF EXISTS questions")
    if "docs" in statement:
        site.load(after)
    after.execute(f"{make}; {fill}")
    assert rows(after, statement_of_call)[0][0]["succeeded"] == 30
    after.execute("DROP TABLE questions")
    site.verify()


# -- a keyword index that is folded or made anew ----------------------------------------------------------------------

REBUILDS = ["SELECT ml_rag.enable_keyword_search('docs')", "SELECT ml_rag.merge_keyword_index('docs')"]
MEANWHILE = [
    "DROP TABLE docs",
    "TRUNCATE docs",
    "DELETE FROM docs WHERE document_name LIKE '%d01%'",
    "SELECT ml_rag.disable_keyword_search('docs')",
    "SELECT ml_rag.enable_keyword_search('docs', '{\"k1\": 1.5}')",
    "SELECT ml_rag.merge_keyword_index('docs')",
]


@pytest.mark.parametrize("rebuild", REBUILDS)
@pytest.mark.parametrize(
    "statement", [pytest.param(s, marks=() if s == "TRUNCATE docs" else (pytest.mark.slow,)) for s in MEANWHILE]
)
def test_in_the_middle_of_a_rebuild(site: Site, gate: Make, rebuild: str, statement: str) -> None:
    session = site.loaded()
    session.execute("UPDATE docs SET segment = segment || ' more'")
    session.execute("UPDATE docs SET segment = replace(segment, ' more', '')")
    held = gate("ml_rag_internal.keyword_posting", "true")
    call = site.background(lambda: session.execute(rebuild))
    held.wait()
    change = Change(site, statement)
    held.open()
    call.result(60)
    change.call.result(60)
    after = site.connect()
    held.remove(after)
    assert orphans(after) == 0
    if "disable" in statement or "enable" in statement:
        after.execute("SELECT ml_rag.enable_keyword_search('docs')")
    assert sum(counts(site.load(after)).values()) == 40
    site.verify()


def test_a_keyword_search_while_its_runs_are_replaced(site: Site, gate: Make) -> None:
    """Readers see the index as it was, or as it is; never between."""
    session, reader = site.connect(), site.connect()
    site.load(session)
    session.execute("UPDATE docs SET segment = segment || ' more'")
    ask = "SELECT document_name, keyword_score FROM ml_rag_search('only7 topic7 shared', %s)"
    options = '{"keyword_search": true, "semantic_search": false, "n_citations": 40}'
    before = rows(reader, ask, options)
    held = gate("ml_rag_internal.keyword_posting", "true")
    call: Background = site.background(lambda: session.execute("SELECT ml_rag.merge_keyword_index('docs')"))
    held.wait()
    assert rows(reader, ask, options) == before
    held.open()
    call.result()
    assert rows(reader, ask, options) == before
    held.remove(session)
    session.execute("UPDATE docs SET segment = replace(segment, ' more', '')")
    site.verify()
