"""watch/watch: calls in flight, and what was done. Progress: test_progress.py; who sees what: test_watch_roles.py."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database, noticed, waits_for_a_lock
from support.hostile_server import hostile, reply, silent
from support.processes import Background, wait_until
from support.stores import create_store, error
from support.watching import counted, errors_of, gate, held, shown, stats

# what was called in a database is counted, by sessions that are told apart
pytestmark = pytest.mark.fresh

E1 = [1.0, *[0.0] * 15]


@pytest.fixture
def store(owner: Connection) -> None:
    create_store(owner, rows=[("a", 1, i, f"copper {i}", E1) for i in range(4)], type="vector(16)")


# -- in flight --------------------------------------------------------------------------------------------------------

HELD: dict[str, tuple[str, str, Any, str, str | None, str]] = {
    # what is closed, statement, options, routine, stage, model
    "embed": ("embeddings", "CALL ml_rag('q', %s)", {}, "ml_rag", "embed", "fake-embed"),
    "rerank": ("rerank", "CALL ml_rag('q', %s)", {"rerank": {}}, "ml_rag", "rerank", "fake-rerank"),
    "generate": ("chat/completions", "SELECT ml_rag_answer('q', %s)", {}, "ml_rag", "generate", "fake-generate"),
    "another model": (
        "chat/completions",
        "SELECT ml_rag_answer('q', %s)",
        {"model_options": {"model_id": "other"}},
        "ml_rag",
        "generate",
        "other",
    ),
    "ml_rag_search": ("embeddings", "SELECT * FROM ml_rag_search('q', %s)", {}, "ml_rag_search", "embed", "fake-embed"),
    "ml_generate": ("chat/completions", "SELECT ml_generate('q', %s)", {}, "ml_generate", "generate", "fake-generate"),
    "ml_embed_row": ("embeddings", "SELECT ml_embed_row('q', %s)", {}, "ml_embed_row", "embed", "fake-embed"),
    "ml_rank": (
        "rerank",
        """SELECT ml_rank('q', '[{"id": "1", "content": "c"}]', %s)""",
        {"model": "fake-rerank"},
        "ml_rank",
        "rerank",
        "fake-rerank",
    ),
    "ml_rank_rows": (
        "rerank",
        "SELECT * FROM ml_rank_rows('q', '{1}', '{c}', %s)",
        {"model": "fake-rerank"},
        "ml_rank_rows",
        "rerank",
        "fake-rerank",
    ),
    "a stage by itself": ("embeddings", "SELECT ml_rag.embed('q'), %s", {}, "ml_rag.embed", "embed", "fake-embed"),
    "hybrid ranking": (
        "embeddings",
        "SELECT * FROM ml_rank_rows('q', '{1}', '{c}', %s)",
        {"model": "hybrid"},
        "ml_rank_rows",
        "rerank",
        "hybrid",
    ),
}


@pytest.mark.parametrize("case", HELD.values(), ids=HELD.keys())
def test_a_call_shows_where_it_is(
    db: Database, owner: Connection, asker: Connection, store: None, local_sockets: Path, case: Any
) -> None:
    closed, statement, options, routine, stage, model = case
    with gate(owner, local_sockets, closed) as server:
        with held(server, asker, statement, json.dumps(options)) as call:
            (row,) = shown(owner)
        call.result()
        assert shown(owner) == []
        figures = counted(owner)
    assert figures[routine, "total"] == (1, 0)
    assert figures[routine, stage] == (1, 0)
    assert row.pop("started") is not None
    assert timedelta() <= row.pop("stage_age") <= row.pop("age") < timedelta(seconds=30)
    assert row == {
        "pid": asker.info.backend_pid,
        "datname": db.name,
        "usename": owner.info.user,
        "role": db.role("asker"),
        "routine": routine,
        "stage": stage,
        "model": model,
    }


def search_can_be_locked(owner: Connection) -> None:
    """By an advisory lock: what locks the table is waited for before the question is embedded."""
    owner.execute(
        "CREATE FUNCTION wait() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN true; END $$"
    )
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    owner.execute("CREATE POLICY wait ON docs USING (wait())")


@pytest.mark.parametrize("prepared", [False, True], ids=["the first call", "a later call"])
def test_a_question_that_waits_in_the_search_is_at_that_stage(
    db: Database, owner: Connection, asker: Connection, store: None, prepared: bool
) -> None:
    search_can_be_locked(owner)
    if prepared:
        asker.execute("CALL ml_rag('q', '{\"skip_generate\": true}')")
    other = db.connect(autocommit=False)
    other.execute("SELECT pg_advisory_xact_lock(7)")
    call = Background(lambda: asker.execute("CALL ml_rag('q', '{\"skip_generate\": true}')"))
    wait_until(lambda: [(row["stage"], row["model"]) for row in shown(owner)] == [("search", None)])
    other.rollback()
    call.result()
    assert shown(owner) == []


def test_a_question_that_asks_no_model_is_told_of_at_its_end(
    db: Database, owner: Connection, asker: Connection, store: None
) -> None:
    options = json.dumps({"query_embedding": E1, "skip_generate": True})
    asker.execute("CALL ml_rag('q', %s)", (options,))
    other = db.connect(autocommit=False)
    other.execute("LOCK TABLE docs")
    call = Background(lambda: asker.execute("CALL ml_rag('q', %s)", (options,)))
    wait_until(lambda: waits_for_a_lock(owner, asker))
    assert shown(owner) == []
    other.rollback()
    call.result()
    figures = counted(owner)
    assert figures["ml_rag", "total"] == figures["ml_rag", "search"] == (2, 0)
    assert ("ml_rag", "embed") not in figures


def test_a_call_inside_another_shows_the_outer_routine_and_the_inner_stage(
    owner: Connection, asker: Connection, store: None, local_sockets: Path
) -> None:
    owner.execute(
        "CREATE TABLE questions (id integer PRIMARY KEY, question text); INSERT INTO questions VALUES (1, 'q');"
        "GRANT SELECT ON questions TO ml_rag_user; GRANT CREATE ON SCHEMA public TO ml_rag_user"
    )
    statement = "CALL ml_rag_table('public.questions.question', 'public.answers.answer')"
    with gate(owner, local_sockets, "chat/completions") as server:
        with held(server, asker, statement) as call:
            (row,) = shown(owner)
        call.result()
        figures = counted(owner)
    assert (row["routine"], row["stage"], row["model"]) == ("ml_rag_table", "generate", "fake-generate")
    stages = ("total", "discover", "embed", "search", "generate")
    assert figures == {("ml_rag_table", "total"): (1, 0), **{("ml_rag", stage): (1, 0) for stage in stages}}


def test_an_error_that_the_caller_catches_ends_the_call(owner: Connection, asker: Connection, store: None) -> None:
    asker.execute(
        """
        DO $$
        BEGIN
          BEGIN
            PERFORM ml_rag_answer('q', '{"n_citations": 101}');
          EXCEPTION WHEN data_exception THEN
            NULL;
          END;
          PERFORM ml_rag_answer('q');
        END $$
        """
    )
    assert counted(owner)["ml_rag", "total"] == (2, 1)
    assert errors_of(owner, "ml_rag") == {"22023": 1}


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_cancelled_call_is_counted(owner: Connection, asker: Connection, store: None, local_sockets: Path) -> None:
    with gate(owner, local_sockets, "embeddings") as server, held(server, asker, "CALL ml_rag('q')") as call:
        owner.execute("SELECT pg_cancel_backend(%s::integer)", (asker.info.backend_pid,))
        with error("57014"):
            call.result()
        assert shown(owner) == []
        assert counted(owner) == {("ml_rag", "total"): (1, 1), ("ml_rag", "embed"): (1, 1)}
        assert errors_of(owner, "ml_rag") == {"57014": 1}


@pytest.mark.parametrize(("options", "stages"), [({"query_embedding": E1}, ()), ({}, ("search",))])
def test_a_cancelled_search_is_counted(
    db: Database, owner: Connection, asker: Connection, store: None, options: Any, stages: tuple[str, ...]
) -> None:
    """By its stage too where a model was asked before; where none was, nothing tells of the stage."""
    search_can_be_locked(owner)
    asker.execute("CALL ml_rag('q')")
    owner.execute("SELECT ml_rag.reset_stats()")
    other = db.connect(autocommit=False)
    other.execute("SELECT pg_advisory_xact_lock(7)")
    asker.execute("SET statement_timeout = '500ms'")
    with error("57014", ours=False):
        asker.execute("CALL ml_rag('q', %s)", (json.dumps(options),))
    other.rollback()
    assert counted(owner) == {("ml_rag", stage): (1, 1) for stage in ("total", *stages)}
    assert errors_of(owner, "ml_rag") == {"57014": 1}


def test_a_backend_that_is_terminated_is_counted(
    db: Database, owner: Connection, asker: Connection, store: None, local_sockets: Path
) -> None:
    pid = asker.info.backend_pid
    with gate(owner, local_sockets, "embeddings") as server, held(server, asker, "CALL ml_rag('q')") as call:
        wait_until(lambda: shown(owner))  # what a call reports is not waited for
        owner.execute("SELECT pg_terminate_backend(%s::integer)", (pid,))
        with pytest.raises(psycopg.OperationalError):
            call.result()
        wait_until(lambda: not owner.execute("SELECT FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchall())
        wait_until(lambda: counted(owner))
        for _ in range(2):
            assert shown(owner) == []
            assert counted(owner) == {("ml_rag", "total"): (1, 1), ("ml_rag", "embed"): (1, 1)}
            assert errors_of(owner, "ml_rag") == {"terminated": 1}


BAD = {
    "ml_rag": "SELECT ml_rag_answer('q', '{\"nonsense\": 1}')",
    "ml_rag_search": "SELECT * FROM ml_rag_search('q', '{\"nonsense\": 1}')",
    "ml_generate": "SELECT ml_generate('q', '{\"nonsense\": 1}')",
    "ml_embed_row": "SELECT ml_embed_row('q', '{\"nonsense\": 1}')",
    "ml_rank": "SELECT ml_rank('q', '[]', '{\"nonsense\": 1}')",
    "ml_rank_rows": "SELECT ml_rank_rows('q', '{}', '{}', '{\"nonsense\": 1}')",
    "ml_rag_table": "CALL ml_rag_table('a.b.c', 'a.b.d', '{\"nonsense\": 1}')",
    "ml_generate_table": "CALL ml_generate_table('a.b.c', 'a.b.d', '{\"nonsense\": 1}')",
    "ml_embed_table": "CALL ml_embed_table('a.b.c', 'a.b.d', '{\"nonsense\": 1}')",
    "ml_rag_evaluate": "SELECT ml_rag_evaluate('questions'::text, '{\"nonsense\": 1}')",
    "ml_rag.why_not": "SELECT * FROM ml_rag.why_not('a', '{\"nonsense\": 1}', 'a')",
    "ml_rag.calibrate": "SELECT * FROM ml_rag.calibrate('questions', '{\"nonsense\": 1}')",
    "ml_rag.tune_index": "SELECT * FROM ml_rag.tune_index('pg_class', '{\"nonsense\": 1}')",
    "vector_store_load": "CALL vector_store_load('file:///nowhere/', '{\"nonsense\": 1}')",
    "ml_rag.load_documents": "SELECT ml_rag.load_documents('pg_class', '{a}', '{a}', '{\"nonsense\": 1}')",
    "ml_rag.enable_keyword_search": "SELECT ml_rag.enable_keyword_search('mine', '{\"nonsense\": 1}')",
}


@pytest.mark.parametrize("routine", BAD)
def test_each_routine_counts_its_errors(owner: Connection, routine: str) -> None:
    owner.execute("CREATE TABLE mine (id integer PRIMARY KEY, segment text)")
    with error("22023"):
        owner.execute(BAD[routine])
    assert counted(owner)[routine, "total"] == (1, 1)
    assert errors_of(owner, routine) == {"22023": 1}
    assert shown(owner) == []


def test_an_error_comes_out_as_it_was(owner: Connection, store: None) -> None:
    """Message, detail, hint and context, also by way of the block that counts it."""
    told = {}
    for value in ("on", "off"):
        owner.execute("SELECT ml_rag.configure('track', %s)", (value,))
        with error("22023") as caught:
            owner.execute("SELECT ml_rag_answer('q', '{\"n_citations\": -1}')")
        told[value] = (caught.message, caught.detail, caught.hint)
    assert told["on"] == told["off"]
    assert "n_citations" in told["on"][0]


# -- what was done ----------------------------------------------------------------------------------------------------


def test_the_figures_of_a_stage_fit_together(owner: Connection, asker: Connection, store: None) -> None:
    for _ in range(20):
        asker.execute("CALL ml_rag('q')")
    rows = {row["stage"]: row for row in stats(asker)}
    assert set(rows) == {"total", "discover", "embed", "search", "generate"}
    for row in rows.values():
        assert row["calls"] == 20
        assert row["errors"] == 0
        assert row["errors_by_sqlstate"] is None
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["max_ms"] <= row["total_ms"]
        assert row["mean_ms"] == pytest.approx(row["total_ms"] / 20)
        assert row["mean_ms"] <= row["max_ms"]
    stages = sum(row["total_ms"] for stage, row in rows.items() if stage != "total")
    assert stages <= rows["total"]["total_ms"] + 0.001 * 20 * len(rows)
    assert rows["generate"]["prompt_tokens"] > 20
    # "fake answer to: q [documents: 3]"
    assert rows["generate"]["generated_tokens"] == 20 * 6


def test_what_sessions_counted_adds_up_and_outlives_them(db: Database, owner: Connection, store: None) -> None:
    for round_ in range(3):
        sessions = [db.connect("asker") for _ in range(4)]
        for session in sessions:
            for _ in range(round_ + 1):
                session.execute("SELECT ml_rag_search('q')")
        for session in sessions:
            session.close()
    assert counted(owner)["ml_rag_search", "total"] == (4 * (1 + 2 + 3), 0)


def test_every_stage_of_a_call_is_counted(owner: Connection, asker: Connection, store: None) -> None:
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    owner.execute("SELECT ml_rag.reset_stats()")
    options = {"keyword_search": True, "rerank": {}, "retrieval_options": {"segment_overlap": 1}}
    asker.execute("CALL ml_rag('copper', %s)", (json.dumps(options),))
    stages = ("discover", "embed", "search", "keyword", "rerank", "expand", "generate")
    assert counted(owner) == {("ml_rag", stage): (1, 0) for stage in ("total", *stages)}


def test_the_times_of_stages_are_those_of_explain(owner: Connection, asker: Connection, store: None) -> None:
    for _ in range(2):  # the first call of a session is told of in another way
        owner.execute("SELECT ml_rag.reset_stats()")
        (answer,) = asker.execute("SELECT ml_rag_answer('copper', '{\"explain\": true}')").fetchone() or (None,)
        told = answer["explain"]["milliseconds"]
        rows = {row["stage"]: row["total_ms"] for row in stats(asker)}
        assert rows["total"] >= told["total"] - 0.002
        for stage in rows.keys() - {"total", "discover", "search"}:  # those hold the beginning, and looking up plans
            assert rows[stage] == pytest.approx(told[stage], abs=0.002)


def test_stages_by_themselves_are_calls_of_their_own(asker: Connection) -> None:
    asker.execute("SELECT ml_rag.embed('x'), ml_rag.generate('x')")
    with error("22023"):
        asker.execute("SELECT ml_rag.embed('x', 'fake-generate')")
    assert counted(asker) == {
        ("ml_rag.embed", "total"): (2, 1),
        ("ml_rag.embed", "embed"): (2, 1),
        ("ml_rag.generate", "total"): (1, 0),
        ("ml_rag.generate", "generate"): (1, 0),
    }


def test_reset_is_for_the_owner_and_counts_anew(owner: Connection, asker: Connection, tenant: Connection) -> None:
    asker.execute("SELECT ml_embed_row('x')")
    tenant.execute("SELECT ml_embed_row('x')")
    with error("42501", ours=False):
        asker.execute("SELECT ml_rag.reset_stats()")
    assert counted(owner)["ml_embed_row", "total"] == (2, 0)
    (since,) = owner.execute("SELECT ml_rag.reset_stats()").fetchone() or (None,)
    assert counted(owner) == {}
    asker.execute("SELECT ml_embed_row('x')")
    assert counted(owner)["ml_embed_row", "total"] == (1, 0)
    assert {row["since"] for row in stats(owner)} == {since}
    owner.execute("SELECT ml_embed_row('x')")
    (later,) = owner.execute("SELECT ml_rag.reset_stats()").fetchone() or (None,)
    assert later > since
    assert counted(owner) == {}


def test_the_right_to_reset_can_be_granted(db: Database, owner: Connection, tenant: Connection) -> None:
    owner.execute(f"GRANT EXECUTE ON FUNCTION ml_rag.reset_stats(), ml_rag._reset_stats() TO {db.role('tenant')}")
    tenant.execute("SELECT ml_embed_row('x')")
    tenant.execute("SELECT ml_rag.reset_stats()")
    assert counted(tenant) == {}


# -- without the model server -----------------------------------------------------------------------------------------


def test_where_the_model_server_is_gone_that_is_said_and_the_views_are_empty(
    db: Database, owner: Connection, asker: Connection
) -> None:
    asker.execute("SELECT ml_embed_row('x')")
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/nowhere/ml_rag.sock')")
    session = db.connect("asker")
    told = noticed(session, lambda d: f"{d.message_primary} / {d.message_detail} / {d.message_hint}")
    for view, what in ("activity", "calls in flight"), ("progress", "calls in flight"), ("stats", "statistics"):
        assert session.execute(f"SELECT * FROM ml_rag.{view}").fetchall() == []
        warning = told.pop()
        assert warning.startswith(f"{what} cannot be shown / the model server cannot be reached: unix:/nowhere")
        assert "ml-rag serve" in warning
    assert told == []
    with error("08006"):
        owner.execute("SELECT ml_rag.reset_stats()")


@pytest.mark.parametrize(
    "body", [b"7", b"{}", b'{"since": 0, "activity": 7, "stats": []}', b'{"since": 1.5, "activity": [], "stats": [7]}']
)
def test_of_a_model_server_that_answers_nonsense_that_is_said(
    owner: Connection, asker: Connection, local_sockets: Path, body: bytes
) -> None:
    told = noticed(asker, lambda d: d.message_detail)
    with hostile(local_sockets, silent) as server:
        server.show_calls = reply(body)
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (server.address,))
        assert asker.execute("SELECT * FROM ml_rag.stats").fetchall() == []
    assert len(told) == 1
    assert "unexpected reply from the model server" in str(told)


def test_reading_the_views_can_be_cancelled(owner: Connection, asker: Connection, local_sockets: Path) -> None:
    with hostile(local_sockets, silent) as server:
        server.show_calls = silent
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (server.address,))
        asker.execute("SET statement_timeout = '300ms'")
        for view in ("activity", "progress", "stats"):
            with error("57014", "statement timeout", ours=False):
                asker.execute(f"SELECT * FROM ml_rag.{view}")


def test_errors_of_an_outage_are_counted_when_the_session_tells_again(
    owner: Connection, asker: Connection, store: None, local_sockets: Path
) -> None:
    (address,) = owner.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone() or ("",)
    with hostile(local_sockets, silent, owner=owner):
        pass  # gone again
    for _ in range(3):
        with error("08006"):
            asker.execute("CALL ml_rag('q')")
    owner.execute("SELECT ml_rag.configure('model_server', %s)", (address,))
    wait_until(lambda: asker.execute("SELECT ml_embed_row('x')") and counted(owner))
    assert errors_of(owner, "ml_rag") == {"08006": 3}
