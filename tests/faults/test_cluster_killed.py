"""kill -9 of one backend, or of the whole cluster, in the middle of what writes; it recovers, and the call goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from support.cluster import Connection
from support.invariants import assert_keyword_index, documents_of
from support.loading import counts, rows
from support.site import STORE, Gate, Site

Make = Callable[..., Gate]


def ends(*quick: str) -> pytest.MarkDecorator:
    """What ends: the one process, or all of them. Those not named here are left out of the short run."""
    marks = {what: () if what in quick else (pytest.mark.slow,) for what in ("backend", "cluster")}
    return pytest.mark.parametrize("what", [pytest.param(what, marks=mark) for what, mark in marks.items()])


def ended(site: Site, what: str, held: Gate, call: Callable[[Connection], Any]) -> Connection:
    """End it where the gate holds a call; a connection after that."""
    session = site.connect()
    running = site.background(lambda: call(session))
    pid = held.wait()
    if what == "backend":
        site.private.kill_backend(pid)
    else:
        site.kill_cluster()
    # the caller sees a connection that broke, and no result
    with pytest.raises(psycopg.OperationalError):
        running.result()
    return site.connect()


def prepare(site: Site) -> Connection:
    connection = site.connect()
    connection.execute("SELECT ml_rag.create_store(%s)", (STORE,))
    return connection


def table_of_questions(connection: Connection) -> None:
    connection.execute("CREATE TABLE questions (id integer PRIMARY KEY, question text)")
    connection.execute("INSERT INTO questions SELECT i, 'topic' || i % 13 || ' item1' FROM generate_series(1, 30) AS i")


@ends("backend", "cluster")
def test_in_the_middle_of_a_load(site: Site, gate: Make, what: str) -> None:
    prepare(site)
    held = gate("docs", "NEW.document_name LIKE '%d030.txt' AND NEW.segment_number = 2")
    after = ended(site, what, held, site.load)
    kept = documents_of(after, STORE)
    # a commit each 16 documents, or after 2 seconds: whole documents only
    assert 16 <= len(kept) < 40
    assert kept.items() <= site.undisturbed.documents.items()
    held.remove(after)
    assert counts(site.load()) == {"unchanged": len(kept), "loaded": 40 - len(kept)}
    site.verify()


@ends()
def test_at_the_end_of_a_load_where_the_index_is_made(site: Site, gate: Make, what: str) -> None:
    prepare(site)
    held = gate("ml_rag_internal.keyword_posting", "true")
    after = ended(site, what, held, site.load)
    indexes = "SELECT FROM pg_indexes WHERE tablename = 'docs' AND indexdef LIKE '%hnsw%'"
    assert rows(after, indexes) == []
    held.remove(after)
    assert counts(site.load()) == {"unchanged": 40}
    assert len(rows(after, indexes)) == 1
    site.verify()


@ends()
def test_while_a_document_is_replaced(site: Site, gate: Make, what: str) -> None:
    """The former version stays, whole, until the new one is."""
    session = site.loaded()
    before = documents_of(session, STORE)
    name = min(before)
    held = gate("docs", "NEW.segment_number = 2")
    content = b"one new paragraph\n\n" * 3
    statement = "SELECT ml_rag.load_document('docs', %s, %s, %s)"
    values = (name, content, '{"chunking": {"split_by": "paragraph", "segment_tokens": 16}}')
    after = ended(site, what, held, lambda session: session.execute(statement, values))
    assert documents_of(after, STORE) == before
    held.remove(after)
    site.verify()


ROUTINES: list[tuple[str, str, str]] = [
    ("ml_rag_table", "jsonb", '{"batch_size": 5, "n_citations": 2}'),
    ("ml_generate_table", "jsonb", '{"batch_size": 5}'),
    ("ml_embed_table", "vector(16)", '{"batch_size": 5}'),
]


@pytest.mark.parametrize(
    ("what", "routine", "type_", "options"),
    [
        pytest.param(
            what, *how, marks=() if (what, how[0]) == ("cluster", "ml_rag_table") else (pytest.mark.slow,),
            id=f"{how[0]}-{what}",
        )
        for what in ("backend", "cluster") for how in ROUTINES
    ],
)  # fmt: skip
def test_in_the_middle_of_a_batch_routine(
    site: Site, gate: Make, what: str, routine: str, type_: str, options: str
) -> None:
    connection = site.loaded()
    table_of_questions(connection)
    connection.execute(f"ALTER TABLE questions ADD COLUMN answer {type_}")
    held = gate("questions", "NEW.id = 13", "UPDATE")
    call_statement = f"CALL {routine}('public.questions.question', 'public.questions.answer', '{options}')"
    after = ended(site, what, held, lambda session: session.execute(call_statement))
    written = "SELECT id, xmin::text, answer::text FROM questions WHERE answer IS NOT NULL ORDER BY id"
    kept = rows(after, written)
    assert [row[0] for row in kept] == list(range(1, 11))
    held.remove(after)
    result = rows(after, call_statement)[0][0]
    assert result == {"rows": 20, "succeeded": 20, "failed": 0, "first_error": None}
    all_of_them = rows(after, written)
    assert [row[0] for row in all_of_them] == list(range(1, 31))
    assert all_of_them[:10] == kept  # not computed again
    by_question: dict[str, set[Any]] = {}
    for question, answer in rows(after, "SELECT question, answer::text FROM questions"):
        by_question.setdefault(question, set()).add(answer)
    assert all(len(answers) == 1 for answers in by_question.values())
    after.execute("DROP TABLE questions")
    site.verify()


@ends("backend")
def test_in_the_middle_of_folding(site: Site, gate: Make, what: str) -> None:
    connection = site.loaded()
    connection.execute("DELETE FROM docs WHERE document_name LIKE '%d00%'")
    connection.execute("UPDATE docs SET segment = segment || ' changed' WHERE document_name LIKE '%d01%'")
    held = gate("ml_rag_internal.keyword_posting", "true")
    after = ended(site, what, held, lambda session: session.execute("SELECT ml_rag.merge_keyword_index('docs')"))
    held.remove(after)
    assert_keyword_index(after)
    after.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert rows(after, "SELECT count(*) FROM ml_rag_internal.keyword_new") == [(0,)]
    assert_keyword_index(after)
    site.load(refresh=True)
    after.execute("UPDATE docs SET segment = replace(segment, ' changed', '')")
    site.verify()


@ends()
def test_while_a_large_statement_folds_its_own_rows(site: Site, gate: Make, what: str) -> None:
    site.load()
    held = gate("ml_rag_internal.keyword_posting", "true")
    many = (
        "INSERT INTO docs SELECT 'more' || i, '{}', 1000 + i, 1, 'topic3 number ' || i,"
        # distinct ones: pgvector's graph falls apart over very many that are equal (docs/faults.md)
        " (SELECT array_agg(abs(sin(i * 1.7 + d * d * 0.9))) FROM generate_series(1, 16) AS d)::vector"
        " FROM generate_series(1, 1500) AS i"
    )
    after = ended(site, what, held, lambda session: session.execute(many))
    held.remove(after)
    site.verify()


@ends()
def test_while_a_keyword_index_is_made_anew(site: Site, gate: Make, what: str) -> None:
    site.load()
    held = gate("ml_rag_internal.keyword_posting", "true")
    statement = "SELECT ml_rag.enable_keyword_search('docs', '{\"language\": \"de\"}')"
    after = ended(site, what, held, lambda session: session.execute(statement))
    held.remove(after)
    site.verify()  # the former one, as it was
