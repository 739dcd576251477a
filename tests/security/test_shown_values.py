"""debug_print_plan, debug_print_parse and debug_print_rewritten, which anybody may turn on, show a client the values of
statements: those that run with others' rights, or on the way to an answer, keep them off."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from psycopg import sql

from support.cluster import Connection, Database
from support.keywords import enable
from support.models_server import ModelsServer
from support.scripted import MODEL, Script
from support.stores import create_text_store
from support.vectorizers import create
from support.watching import gate, held, stats

SHOW = (
    "SET client_min_messages = log; SET debug_print_plan = on; SET debug_print_parse = on;"
    " SET debug_print_rewritten = on; SET debug_pretty_print = off; SET plan_cache_mode = force_custom_plan"
)


class Shown:
    """What a session is shown, the values of constants decoded."""

    def __init__(self, connection: Connection) -> None:
        self._texts: list[str] = []
        connection.add_notice_handler(lambda d: self._texts.append(f"{d.message_primary} {d.message_detail}"))
        connection.execute(SHOW)

    def __contains__(self, words: str) -> bool:
        return any(words in text or words in _decoded(text) for text in self._texts)


def _decoded(text: str) -> str:
    values = re.findall(r":constvalue\s+\d+\s+\[\s*([-\d\s]+)\]", text)
    return " ".join(bytes(int(byte) % 256 for byte in value.split()).decode("utf-8", "replace") for value in values)


def test_a_session_that_shows_plans_is_shown_its_own_values(asker: Connection) -> None:
    shown = Shown(asker)
    asker.execute("SELECT count(*) FROM pg_class WHERE relname = 'hyacinth'")
    assert "hyacinth" in shown


def test_routines_that_others_can_call_show_none(owner: Connection) -> None:
    names = ("parse", "rewritten", "plan")
    without = owner.execute(
        "SELECT p.oid::regprocedure::text FROM pg_proc AS p JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass"
        " AND d.objid = p.oid AND d.deptype = 'e' JOIN pg_extension AS e ON e.oid = d.refobjid"
        " WHERE e.extname = 'ml_rag' AND (p.prosecdef OR p.proname !~ '^_'"
        # those that commit have no settings
        " AND array_to_string(p.proconfig, ' ') ~ 'search_path=pg_catalog, ml_rag')"
        " AND NOT coalesce(p.proconfig, '{}') @> %s",
        ([f"debug_print_{name}=off" for name in names],),
    ).fetchall()
    assert without == []


@pytest.mark.parametrize("statistics", ["all", "visible"])
@pytest.mark.parametrize("change", ["INSERT", "DELETE"])
def test_words_of_hidden_rows_in_a_merge_of_the_keyword_index(
    db: Database, owner: Connection, asker: Connection, statistics: str, change: str
) -> None:
    owner.execute(
        "CREATE TABLE docs (id bigint PRIMARY KEY, tenant name DEFAULT current_user, segment text);"
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY own ON docs USING (tenant = current_user);"
        "GRANT SELECT, INSERT, DELETE ON docs TO ml_rag_user"
    )
    enable(owner, "docs", json.dumps({"statistics": statistics}))
    owner.execute("INSERT INTO docs SELECT i, 'nobody', 'xylophone zebracrossing' || i FROM generate_series(1, 5) AS i")
    write = "INSERT INTO docs (id, segment) SELECT i, 'ordinary' || i FROM generate_series(1001, 3000) AS i"
    if change == "DELETE":
        asker.execute(write)
        write = "DELETE FROM docs"
    shown = Shown(asker)
    asker.execute(write)
    asker.execute("INSERT INTO docs (id, segment) SELECT i, 'more' || i FROM generate_series(3001, 5000) AS i")
    assert asker.execute("SELECT count(*) FROM docs WHERE id < 10").fetchone() == (0,)
    for word in ("xylophon", "zebracross"):
        assert word not in shown


@pytest.mark.parametrize("options", [{"mode": "immediate"}, {"mode": "immediate", "destination": "table"}])
def test_columns_that_a_writer_may_not_read_in_triggers_of_a_vectorizer(
    owner: Connection, asker: Connection, models: ModelsServer, options: dict[str, str]
) -> None:
    owner.execute("CREATE TABLE items (id integer, part text, secret text, note text, PRIMARY KEY (id, part))")
    create(owner, columns="{secret}: {note}", **options)
    owner.execute("INSERT INTO items VALUES (1, 'keyspecial', 'thecodeis4711', 'n')")
    owner.execute("GRANT SELECT (id, note), UPDATE (id, note) ON items TO ml_rag_user")
    shown = Shown(asker)
    asker.execute("UPDATE items SET note = 'other'")
    asker.execute("UPDATE items SET id = 7")
    assert owner.execute("SELECT id, note FROM items").fetchall() == [(7, "other")]
    for words in ("thecodeis4711", "keyspecial"):
        assert words not in shown


@pytest.mark.parametrize(
    "call",
    [
        "RETURN left(ml_rag_answer(q) ->> 'text', 3);",
        "RETURN (SELECT count(*) FROM ml_rag_search(q));",
        "RETURN (SELECT count(*) FROM ml_rag_show(q));",
        "CALL ml_rag(q, NULL, found); RETURN found ->> 'x';",
        "CALL heatwave_chat(q, found); RETURN left(found ->> 'response', 3);",
        "RETURN left(ml_rag_chat(q) ->> 'text', 3);",
    ],
)
def test_documents_that_a_function_of_an_application_asks_for_its_caller(
    owner: Connection, stranger: Connection, script: Script, call: str
) -> None:
    script.answer = "It is so."
    owner.execute("SELECT ml_rag.configure('generate_model_id', %s)", (MODEL,))
    create_text_store(owner)
    owner.execute("REVOKE ALL ON texts FROM ml_rag_user")
    owner.execute(
        sql.SQL(
            "CREATE FUNCTION asked(q text) RETURNS text LANGUAGE plpgsql SECURITY DEFINER"
            " SET search_path = pg_catalog, public, pg_temp AS {}"
        ).format(sql.Literal(f"DECLARE found jsonb; BEGIN {call} END"))
    )
    shown = Shown(stranger)
    stranger.execute("SELECT asked('cats')")
    assert "chase mice" not in shown


@pytest.mark.fresh
def test_calls_of_others_in_the_reports(
    owner: Connection, asker: Connection, tenant: Connection, local_sockets: Path
) -> None:
    owner.execute("SELECT ml_rag.configure('embed_model_id', %s)", ("nightshade-embed",))
    shown = Shown(tenant)
    with gate(owner, local_sockets, "embeddings") as server, held(server, asker, "SELECT ml_embed_row('x')"):
        for report in ("activity", "progress"):
            tenant.execute(f"SELECT * FROM ml_rag.{report}".encode())
    assert stats(tenant) == []
    assert "nightshade" not in shown
