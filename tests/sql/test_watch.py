"""05_watch: calls in flight, and what was done; who sees what of others. Progress: see test_progress.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database
from support.processes import Background, wait_until
from support.stores import create_store, error
from support.watching import counted, errors_of, gate, held, shown

E1 = [1.0, *[0.0] * 15]


@pytest.fixture
def store(owner: Connection) -> None:
    create_store(owner, rows=[("a", 1, i, f"copper {i}", E1) for i in range(4)], type="vector(16)")


@pytest.fixture
def watcher(db: Database, owner: Connection) -> Iterator[Connection]:
    """A connection as a role that may watch the whole server, and nothing else."""
    role = f"{db.name}_watcher"
    owner.execute(f"CREATE ROLE {role}; GRANT pg_monitor TO {role}")
    connection = db.connect()
    connection.execute(f"SET SESSION AUTHORIZATION {role}")
    yield connection
    connection.close()
    owner.execute(f"DROP ROLE {role}")


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
    assert shown(owner) == []
    assert counted(owner)[routine, "total"] == (1, 0)
    assert counted(owner)[routine, stage] == (1, 0)


def test_a_call_that_waits_for_a_table_is_at_the_search(
    db: Database, owner: Connection, asker: Connection, store: None
) -> None:
    other = db.connect(autocommit=False)
    other.execute("LOCK TABLE docs")
    options = json.dumps({"query_embedding": E1, "skip_generate": True})
    call = Background(lambda: asker.execute("CALL ml_rag('q', %s)", (options,)))
    wait_until(lambda: [row["stage"] for row in shown(owner)] == ["search"])
    other.rollback()
    call.result()
    assert shown(owner) == []


def test_a_call_inside_another_shows_the_outer_routine_and_the_inner_stage(
    owner: Connection, asker: Connection, store: None, local_sockets: Path
) -> None:
    owner.execute(
        "CREATE TABLE questions (id integer PRIMARY KEY, question text); INSERT INTO questions VALUES (1, 'q');"
        "GRANT SELECT ON questions TO ml_rag_user; GRANT CREATE ON SCHEMA public TO ml_rag_user"
    )
    statement = "CALL ml_rag_table('public.questions.question', 'public.answers.answer')"
    with gate(owner, local_sockets, "chat/completions") as server, held(server, asker, statement):
        (row,) = shown(owner)
    assert (row["routine"], row["stage"], row["model"]) == ("ml_rag_table", "generate", "fake-generate")
    assert counted(owner) == {
        ("ml_rag_table", "total"): (1, 0),
        **{("ml_rag", stage): (1, 0) for stage in ("total", "discover", "embed", "search", "generate")},
    }


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
        owner.execute("SELECT pg_cancel_backend(%s)", (asker.info.backend_pid,))
        with error("57014"):
            call.result()
        assert shown(owner) == []
    assert counted(owner) == {
        ("ml_rag", "total"): (1, 1),
        ("ml_rag", "discover"): (1, 0),
        ("ml_rag", "embed"): (1, 1),
    }
    assert errors_of(owner, "ml_rag") == {"57014": 1}


def test_a_cancelled_search_is_counted(db: Database, owner: Connection, asker: Connection, store: None) -> None:
    other = db.connect(autocommit=False)
    other.execute("LOCK TABLE docs")
    asker.execute("SET statement_timeout = '300ms'")
    with error("57014", ours=False):
        asker.execute("CALL ml_rag('q', %s)", (json.dumps({"query_embedding": E1}),))
    other.rollback()
    assert counted(owner)["ml_rag", "search"] == (1, 1)
    assert errors_of(owner, "ml_rag") == {"57014": 1}


def test_a_backend_that_is_terminated_is_counted(
    db: Database, owner: Connection, asker: Connection, store: None, local_sockets: Path
) -> None:
    pid = asker.info.backend_pid
    with gate(owner, local_sockets, "embeddings") as server, held(server, asker, "CALL ml_rag('q')") as call:
        owner.execute("SELECT pg_terminate_backend(%s)", (pid,))
        with pytest.raises(psycopg.OperationalError):
            call.result()
        wait_until(lambda: not owner.execute("SELECT FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchall())
    assert shown(owner) == []
    assert counted(owner) == {("ml_rag", "total"): (1, 1), ("ml_rag", "embed"): (1, 1)}
    assert errors_of(owner, "ml_rag") == {"terminated": 1}
    # whoever has the slot next keeps it
    db.connect("asker").execute("SELECT ml_embed_row(NULL), ml_rag._begin('ml_rag')")
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


def stats(connection: Connection) -> list[dict[str, Any]]:
    cursor = connection.execute("SELECT * FROM ml_rag.stats")
    names = [column.name for column in cursor.description or []]
    return [dict(zip(names, row, strict=True)) for row in cursor]


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
    stages = ("total", "discover", "embed", "search", "keyword", "rerank", "expand", "generate")
    assert counted(owner) == {("ml_rag", stage): (1, 0) for stage in stages}


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


# -- who sees what ----------------------------------------------------------------------------------------------------


def test_of_the_calls_of_others_nothing_is_told(
    db: Database,
    owner: Connection,
    asker: Connection,
    tenant: Connection,
    watcher: Connection,
    store: None,
    local_sockets: Path,
) -> None:
    same = db.connect("asker")
    with gate(owner, local_sockets, "embeddings") as server, held(server, asker, "CALL ml_rag('a secret')"):
        (hidden,) = shown(tenant)
        for connection in (same, owner, watcher):
            (row,) = shown(connection, columns="routine, stage, model, role")
            assert row == {
                "routine": "ml_rag",
                "stage": "embed",
                "model": "fake-embed",
                "role": db.role("asker"),
            }
        everything = [*shown(owner), *shown(owner, "progress")]
    known = {"pid": asker.info.backend_pid, "datname": db.name, "usename": owner.info.user}
    assert hidden == {**dict.fromkeys(hidden), **known}
    assert "secret" not in str(everything)


def test_of_the_figures_of_others_nothing_is_told(
    db: Database, owner: Connection, asker: Connection, tenant: Connection, watcher: Connection
) -> None:
    for connection in (asker, tenant, tenant):
        connection.execute("SELECT ml_embed_row('x')")
    assert counted(asker)["ml_embed_row", "total"] == (1, 0)
    assert counted(tenant)["ml_embed_row", "total"] == (2, 0)
    for connection in (owner, watcher):
        assert counted(connection)["ml_embed_row", "total"] == (3, 0)
        assert {row["role"] for row in stats(connection)} == {db.role("asker"), db.role("tenant")}


def test_a_member_of_a_role_sees_what_the_role_did(db: Database, owner: Connection, asker: Connection) -> None:
    asker.execute("SELECT ml_embed_row('x')")
    owner.execute(f"CREATE ROLE {db.name}_boss IN ROLE {db.role('asker')}")
    boss = db.connect()
    boss.execute(f"SET SESSION AUTHORIZATION {db.name}_boss")
    assert {row["role"] for row in stats(boss)} == {db.role("asker")}
    boss.close()
    owner.execute(f"DROP ROLE {db.name}_boss")


def test_what_a_dropped_role_did_still_counts(db: Database, owner: Connection, asker: Connection) -> None:
    asker.execute("SELECT ml_embed_row('x')")
    owner.execute(f"CREATE ROLE {db.name}_gone IN ROLE ml_rag_user")
    gone = db.connect()
    gone.execute(f"SET SESSION AUTHORIZATION {db.name}_gone")
    gone.execute("SELECT ml_embed_row('x')")
    gone.close()
    owner.execute(f"DROP ROLE {db.name}_gone")
    assert {row["role"] for row in stats(owner)} == {db.role("asker"), None}
    assert counted(owner)["ml_embed_row", "total"] == (2, 0)
    assert counted(asker)["ml_embed_row", "total"] == (1, 0)


def test_a_role_without_privileges_sees_nothing(stranger: Connection) -> None:
    for relation in ("activity", "progress", "stats"):
        with error("42501", ours=False):
            stranger.execute(f"SELECT * FROM ml_rag.{relation}")


def test_one_who_may_watch_may_not_ask(watcher: Connection) -> None:
    for statement in ("SELECT ml_embed_row('x')", "SELECT ml_rag.reset_stats()", "SELECT * FROM ml_rag.setting"):
        with error("42501", ours=False):
            watcher.execute(statement)
    assert shown(watcher) == []


def test_calls_of_other_databases_are_shown_too(
    cluster: Any, db: Database, owner: Connection, asker: Connection, store: None, local_sockets: Path
) -> None:
    with cluster.database() as other:
        elsewhere = other.connect()
        with gate(owner, local_sockets, "embeddings") as server, held(server, asker, "CALL ml_rag('q')"):
            rows = elsewhere.execute("SELECT pid FROM ml_rag.activity WHERE datname = %s", (db.name,)).fetchall()
        assert rows == [(asker.info.backend_pid,)]
        assert counted(elsewhere) == {}


def test_calls_in_a_read_only_transaction_are_told(owner: Connection, asker: Connection, store: None) -> None:
    asker.execute("SET default_transaction_read_only = on")
    asker.execute("SELECT ml_rag_search('q')")
    assert counted(asker)["ml_rag_search", "total"] == (1, 0)
