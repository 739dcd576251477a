"""`ml-rag doctor` against a real server."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
from click.testing import CliRunner
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ml_rag import __version__
from ml_rag.cli import main
from ml_rag.client import doctor
from ml_rag.errors import MlRagError
from support.cluster import Connection, Database
from support.exchange import exchange
from support.hostile_server import HostileServer
from support.stores import create_store, fake_embedding


def findings(db: Database, role: str | None = None) -> tuple[int, dict[str, dict[str, object]]]:
    dsn = make_conninfo(db.dsn, dbname=db.name, **({"options": f"-c role={db.role(role)}"} if role else {}))
    result = CliRunner().invoke(main, ["doctor", "--json", "--dsn", dsn])
    return result.exit_code, {finding["check"]: finding for finding in json.loads(result.stdout)}


def test_a_working_chain_is_found_in_order(owner: Connection, db: Database) -> None:
    create_store(owner, "store", [("d", 1, 1, "a", fake_embedding("a"))], type="vector(16)")
    status, found = findings(db)
    assert [name for name, finding in found.items() if not finding["ok"]] == []
    assert status == 0
    assert found["retrieval"]["found"] == "1 vector stores, 1 segment found"
    assert found["embedding"]["found"].startswith("16 dimensions")  # type: ignore[attr-defined]
    assert str(found["keyword search"]["found"]).startswith("numpy ")
    assert found["document parsers"]["ok"]


def test_parsers_that_are_less_confined_are_told_and_are_no_error() -> None:
    missing = {"view of the file system": "no Landlock: Function not implemented"}
    finding = doctor.parsers({"parsers": {"confined": False, "missing": missing}})
    assert (finding.ok, finding.found) == (True, "no view of the file system (no Landlock: Function not implemented)")
    assert "docs/operations.md" in finding.hint
    assert doctor.parsers({"parsers": {"confined": True, "missing": {}}}).found == "confined"
    assert "not known" in doctor.parsers({"parsers": {"confined": None, "missing": {}}}).found


@pytest.mark.fresh
def test_a_server_without_numpy_is_told_what_to_install(db: Database) -> None:
    connection = db.connect()
    connection.execute("DO LANGUAGE plpython3u $$ import sys; sys.modules['numpy'] = None $$")
    (finding,) = doctor.check_keyword(connection)
    assert not finding.ok
    assert "python3-numpy" in finding.hint


def test_a_database_without_stores_is_told_how_to_load(db: Database) -> None:
    _, found = findings(db)
    assert not found["retrieval"]["ok"]
    assert "vector_store_load" in str(found["retrieval"]["hint"])


def test_stores_of_another_model_than_the_default_one_are_told_how_to_make_it_that(
    owner: Connection, db: Database
) -> None:
    create_store(owner, model="another")
    _, found = findings(db)
    assert str(found["retrieval"]["found"]).startswith("1 vector store")
    assert "ml_rag.configure('embed_model_id'" in str(found["retrieval"]["hint"])


def test_rows_without_an_embedding_are_counted(owner: Connection, db: Database) -> None:
    create_store(owner, "docs", [("a", 1, 1, "text", fake_embedding("text"))], type="vector(16)")
    owner.execute("ALTER TABLE docs ALTER segment_embedding DROP NOT NULL")
    _, found = findings(db)
    assert found["rows without an embedding"] == {
        "check": "rows without an embedding", "ok": True, "found": "no row of 1 vector stores lacks its embedding",
        "hint": "",
    }  # fmt: skip
    owner.execute("INSERT INTO docs SELECT 'b', '{}', 2, i, left('word', i), NULL FROM generate_series(0, 3) AS i")
    status, found = findings(db)
    assert status == 1
    assert str(found["rows without an embedding"]["found"]).endswith(": 3 of public.docs")
    assert "run_vectorizer" in str(found["rows without an embedding"]["hint"])


def test_rows_of_others_are_counted_for_a_superuser(owner: Connection, db: Database) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    other, mallory = db.connect("asker"), db.connect("tenant")
    create_store(other, "theirs", [("a", 1, 1, "text", fake_embedding("text"))], type="vector(16)")
    other.execute("ALTER TABLE theirs ALTER segment_embedding DROP NOT NULL")
    other.execute("INSERT INTO theirs SELECT 'b', '{}', 2, i, 'word', NULL FROM generate_series(0, 297) AS i")
    create_store(mallory, "trap", [("a", 1, 1, "text", fake_embedding("text"))], type="vector(16)")
    mallory.execute("ALTER TABLE trap ALTER segment_embedding DROP NOT NULL; UPDATE trap SET segment_embedding = NULL")
    mallory.execute("CREATE TABLE seen (role text); GRANT ALL ON seen TO PUBLIC")
    mallory.execute(
        "CREATE FUNCTION spy() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM set_config('role', 'none', false); RAISE EXCEPTION 'I was %', current_user; END $$;"
        "CREATE POLICY spy ON trap USING (spy()); ALTER TABLE trap ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"
    )
    status, found = findings(db)
    assert status == 1
    (told,) = [finding for name, finding in found.items() if name == "rows without an embedding"]
    why = 'cannot set parameter "role" within security-definer function'
    assert told["found"] == (
        "rows that searches by meaning do not find: 298 of public.theirs; "
        f"1 not looked at: public.trap of {db.role('tenant')} ({why})"
    )
    assert "as their owner" in str(told["hint"])
    assert "Leave that to the owner of a table of another role" in str(told["hint"])
    assert "2 not looked at" in str(found["languages"]["found"])
    # nothing of it stays
    assert owner.execute("SELECT count(*) FROM pg_proc WHERE proname = 'ml_rag_count'").fetchone() == (0,)


def test_nobody_is_told_to_run_triggers_of_others(owner: Connection, db: Database) -> None:
    """Any role can make a table look like one whose vectorizer is gone; to take it back writes its rows."""
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    planted = (
        "CREATE TABLE {0} (id integer PRIMARY KEY, segment text GENERATED ALWAYS AS ('x') STORED,"
        " document_name text GENERATED ALWAYS AS ('x') STORED, segment_embedding vector(16));"
        "COMMENT ON COLUMN {0}.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed';"
        "CREATE INDEX ON {0} (id) WHERE segment_embedding IS NULL"
    )
    owner.execute(planted.format("mine"))
    (mine,) = doctor.check_vectorizers(owner)
    assert "public.mine" in mine.found
    assert "another role" not in mine.hint
    db.connect("asker").execute(planted.format("theirs"))
    (both,) = doctor.check_vectorizers(owner)
    assert both.found.endswith(f": public.mine, public.theirs of {db.role('asker')}")
    assert "Leave that to the owner of a table of another role" in both.hint


def test_no_owner_can_make_it_wait(owner: Connection, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a policy can catch what a timeout raises, again and again."""
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    tenant = db.connect("tenant")
    tenant.execute(
        "CREATE FUNCTION endless() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
        " FOR i IN 1..600 LOOP BEGIN PERFORM pg_sleep(0.1); EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP;"
        " RETURN true; END $$"
    )
    for name in ("trap_1", "trap_2", "trap_3"):
        create_store(tenant, name, [("a", 1, 1, "text", fake_embedding("text"))], type="vector(16)")
        tenant.execute(
            f"ALTER TABLE {name} ALTER segment_embedding DROP NOT NULL; UPDATE {name} SET segment_embedding = NULL;"
            f"CREATE POLICY endless ON {name} USING (endless());"
            f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"
        )
    create_store(db.connect("asker"), "z", [("a", 1, 1, "text", fake_embedding("text"))], type="vector(16)")
    db.connect("asker").execute("ALTER TABLE z ALTER segment_embedding DROP NOT NULL")
    monkeypatch.setattr("ml_rag.client.doctor.COUNT_SECONDS", 0.3)
    _, found = findings(db)
    told = str(found["rows without an embedding"]["found"])
    tenant_role = db.role("tenant")
    assert told.startswith(
        "no row of 1 vector stores lacks its embedding; "
        f"3 not looked at: public.trap_1 of {tenant_role} (terminating connection"
    )
    # nor by many of them
    for name in ("trap_2", "trap_3"):
        assert f"public.{name} of {tenant_role} (its owner's stores took 0.3 s)" in told


def test_what_takes_the_name_of_a_store_that_is_waited_for_runs_no_code_as_its_owner(
    owner: Connection, db: Database
) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    asker, attacker = db.connect("asker"), db.connect("tenant")
    create_store(asker, "docs", [("a", 1, 1, "text", fake_embedding("text"))], type="vector(16)")
    asker.execute("ALTER TABLE docs ALTER segment_embedding DROP NOT NULL")
    (store,) = doctor.unread_stores(owner)
    assert (store.nullable, store.is_trusted_by_owner) == (True, True)
    # what it is called with is rolled back, but for a sequence
    attacker.execute(
        "CREATE SEQUENCE ran; GRANT ALL ON SEQUENCE ran TO PUBLIC;"
        "CREATE FUNCTION run() RETURNS boolean LANGUAGE sql AS $$ SELECT nextval('public.ran') > 0 $$"
    )
    planted = (
        "SELECT NULL::vector(16) AS segment_embedding, 'x' AS segment FROM generate_series(1, 3) WHERE public.run();"
        "GRANT ALL ON docs TO PUBLIC"
    )
    holder, queue = db.connect("tenant"), db.connect("tenant")
    dsn = make_conninfo(db.dsn, dbname=db.name)
    exchange(asker, "docs", planted, holder, queue, attacker, lambda: doctor.count_as_owner(dsn, store, 10.0))
    assert owner.execute("SELECT is_called FROM ran").fetchone() == (False,)


def test_what_a_role_does_not_look_at_is_named(owner: Connection, db: Database) -> None:
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    tenant = db.connect("tenant")
    for n in range(12):
        create_store(tenant, f"store_{n:02}", [("a", 1, 1, "text", fake_embedding("text"))], type="vector(16)")
        tenant.execute(f"ALTER TABLE store_{n:02} ALTER segment_embedding DROP NOT NULL")
        tenant.execute(f"GRANT SELECT ON store_{n:02} TO PUBLIC")
    _, found = findings(db, "asker")
    told = found["rows without an embedding"]
    assert told["ok"]
    assert str(told["found"]).startswith(
        f"no row of 0 vector stores lacks its embedding; 12 not looked at: public.store_00 of {db.role('tenant')} "
    )
    assert str(told["found"]).endswith(" and 2 more")
    assert told["hint"] == "To have those looked at, run ml-rag doctor as their owner."
    told = found["retrieval"]
    assert not told["ok"]
    assert "must name what to search, such as public.store_00 (" in str(told["found"])
    assert "vector_store" in str(told["hint"])
    _, found = findings(db, "tenant")
    assert found["rows without an embedding"]["found"] == "no row of 12 vector stores lacks its embedding"


def test_texts_that_were_cut_are_a_note(owner: Connection, db: Database) -> None:
    check = "texts longer than the model takes in"
    owner.execute("CREATE TABLE notes (id integer PRIMARY KEY, body text)")
    owner.execute("SELECT ml_rag.create_vectorizer('notes', '{\"columns\": \"body\"}')")
    owner.execute("INSERT INTO notes VALUES (1, repeat('word ', 256))")
    owner.execute("CALL ml_rag.run_vectorizer('notes')")
    _, found = findings(db)
    assert found[check] == {"check": check, "ok": True, "found": "no vectorizer's model has cut a text", "hint": ""}
    owner.execute("INSERT INTO notes VALUES (2, repeat('word ', 257))")
    owner.execute("CALL ml_rag.run_vectorizer('notes')")
    _, found = findings(db)
    assert (found[check]["ok"], found[check]["found"]) == (True, "cut when they were embedded: 1 of public.notes")
    assert "destination" in str(found[check]["hint"])


def test_a_role_that_may_not_ask_is_told_which_grant_it_lacks(db: Database) -> None:
    status, found = findings(db, "stranger")
    assert status == 1
    assert "GRANT ml_rag_user" in str(found["extension ml_rag"]["hint"])


def test_a_model_server_that_is_down_is_said_with_what_to_do(owner: Connection, db: Database) -> None:
    owner.execute("SELECT ml_rag.configure('model_server', 'unix:/nowhere/at.all')")
    status, found = findings(db)
    assert status == 1
    assert not found["model server"]["ok"]
    assert "ml-rag serve" in str(found["model server, from the database"]["hint"])
    assert "embedding" not in found


def test_the_hint_names_what_starts_the_server_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ML_RAG_START_SERVER", raising=False)
    for start in ("ml-rag serve", "make start"):
        (finding,) = doctor.check_server("unix:/nowhere/at.all")
        assert (finding.ok, finding.hint.partition(",")[0]) == (False, f'Start it with "{start}"')
        monkeypatch.setenv("ML_RAG_START_SERVER", "make start")


def test_a_default_model_that_the_server_does_not_know(owner: Connection, db: Database) -> None:
    owner.execute("SELECT ml_rag.configure('embed_model_id', 'no-such-model')")
    _, found = findings(db)
    assert "does not know" in str(found["default models"]["found"])
    assert "ml_rag.configure" in str(found["default models"]["hint"])


def test_a_message_and_its_detail_are_told_apart(owner: Connection, db: Database) -> None:
    owner.execute("SELECT ml_rag.configure('generate_model_id', 'no-such-model')")
    _, found = findings(db)
    told = "model 'no-such-model' does not exist; models that are there for the task generate: "
    assert str(found["generation"]["found"]).startswith(told)
    error = MlRagError("it failed", detail="It is full.")

    def fail() -> str:
        raise error

    assert doctor.run("x", fail).found == "it failed. It is full."


def test_a_database_without_the_extension(owner: Connection, db: Database) -> None:
    owner.execute("DROP EXTENSION ml_rag")
    status, found = findings(db)
    assert status == 1
    assert "CREATE EXTENSION ml_rag CASCADE" in str(found["extension ml_rag"]["hint"])


def test_a_database_that_cannot_be_reached(tmp_path: Path) -> None:
    dsn = f"host={tmp_path} port=1 user=nobody"
    result = CliRunner().invoke(main, ["doctor", "--json", "--dsn", dsn])
    assert result.exit_code == 1
    last = json.loads(result.stdout)[-1]
    assert last["check"] == "database"
    assert not last["ok"]
    assert last["hint"]


def test_a_default_model_whose_files_are_missing(owner: Connection, db: Database) -> None:
    owner.execute("SELECT ml_rag.configure('embed_model_id', NULL)")
    status, found = findings(db)
    assert status == 1
    assert "files are missing" in str(found["default models"]["found"])
    assert "ml-rag models pull all_minilm_l6_v2 --models-dir /" in str(found["default models"]["hint"])


def test_a_tiny_model_for_answers_is_told_with_the_command_for_a_usable_one(owner: Connection, db: Database) -> None:
    create_store(owner, "store", [("d", 1, 1, "a", fake_embedding("a"))], type="vector(16)")
    assert "answers" not in findings(db)[1]
    owner.execute("SELECT ml_rag.configure('generate_model_id', 'smollm2-135m-instruct')")
    _, found = findings(db)
    assert found["answers"]["ok"]
    assert "to try things out" in str(found["answers"]["found"])
    assert "ml-rag models pull qwen2.5-1.5b-instruct --models-dir /" in str(found["answers"]["hint"])


def test_without_a_language_model_it_tells_how_to_get_one(owner: Connection, db: Database) -> None:
    owner.execute("SELECT ml_rag.configure('generate_model_id', 'extractive')")
    _, found = findings(db)
    assert found["answers"]["ok"]
    assert "no capable language model is there" in str(found["answers"]["found"])
    assert "ml-rag models pull qwen2.5-1.5b-instruct --models-dir /" in str(found["answers"]["hint"])
    assert found["generation"]["ok"], found["generation"]


def test_it_ends_with_what_waits_for_a_language_model(owner: Connection, db: Database) -> None:
    assert not {"answers", "rewriting", "conditions", "SQL"} & set(findings(db)[1])
    owner.execute("SELECT ml_rag.configure('generate_model_id', 'extractive')")
    _, found = findings(db)
    assert list(found)[-4:] == ["answers", "rewriting", "conditions", "SQL"]
    for check, setting in (("rewriting", "query"), ("conditions", "query"), ("SQL", "generate")):
        hint = str(found[check]["hint"])
        assert hint.startswith("ml-rag models pull qwen2.5-7b-instruct --models-dir /")
        assert hint.endswith(f"then SELECT ml_rag.configure('{setting}_model_id', 'qwen2.5-7b-instruct').")
    owner.execute("SELECT ml_rag.configure('query_model_id', 'fake-generate')")
    assert list(findings(db)[1])[-2:] == ["answers", "SQL"]


def test_a_store_in_another_script_than_its_models_is_told(owner: Connection, db: Database) -> None:
    english, chinese = "MiniLM is for English, e.g. naïve café", "臺北市是中華民國的首都 (Taipei)"
    none = [0.0] * 383 + [1.0]
    create_store(owner, "en", [("d", 1, 1, english, none)], model="all_minilm_l6_v2", type="vector(384)")
    _, found = findings(db)
    assert found["languages"]["ok"]
    create_store(owner, "zh", [("d", 1, 1, chinese, none)], model="all_minilm_l6_v2", type="vector(384)")
    create_store(owner, "many", [("d", 1, 1, chinese, none)], model="multilingual-e5-small-q4", type="vector(384)")
    create_store(owner, "unknown", [("d", 1, 1, chinese, none)], model="another", type="vector(384)")
    status, found = findings(db)
    assert status == 1
    assert not found["languages"]["ok"]
    assert "public.zh (65% of the letters)" in str(found["languages"]["found"])
    assert "public.en" not in str(found["languages"]["found"])
    assert "public.many" not in str(found["languages"]["found"])
    assert "public.unknown" not in str(found["languages"]["found"])
    assert "ml-rag models pull multilingual-e5-small-q4 --models-dir /" in str(found["languages"]["hint"])


def test_letters_of_other_scripts_are_counted() -> None:
    assert doctor.foreign_share([]) == 0
    assert doctor.foreign_share(["123 €", ""]) == 0
    assert doctor.foreign_share(["naïve ＡＢ"]) == 0
    assert doctor.foreign_share(["ab", "лг"]) == 0.5
    assert doctor.foreign_share(["中文"]) == 1


def test_nothing_runs_that_the_owner_of_the_database_made(owner: Connection, db: Database) -> None:
    """Who owns schema public, too, in which the public routines are: what fits arguments better is taken."""
    role = sql.Identifier(db.role("tenant"))
    owner.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(sql.Identifier(db.name), role))
    owner.execute(sql.SQL("GRANT ALL ON SCHEMA public TO {}").format(role))
    owner.execute("CREATE SCHEMA superusers")
    create_store(owner, "superusers.store", [("d", 1, 1, "a", fake_embedding("a"))], type="vector(16)")
    tenant = db.connect("tenant")
    tenant.execute("CREATE TABLE public.ran (what text); GRANT INSERT ON public.ran TO PUBLIC")
    for signature in (
        "format(text, name, name)",
        "ml_embed_row(text)",
        "ml_generate(text)",
        "ml_generate(text, text)",
        "ml_rag_search(text, text)",
    ):
        tenant.execute(
            f"CREATE FUNCTION public.{signature} RETURNS text LANGUAGE plpgsql AS"
            f" $$BEGIN INSERT INTO public.ran VALUES ('{signature}'); RETURN 'x'; END$$"
        )
    status, found = findings(db)
    assert (status, [name for name, finding in found.items() if not finding["ok"]]) == (0, [])
    assert tenant.execute("SELECT * FROM public.ran").fetchall() == []


def test_a_partition_of_another_role_is_not_read_as_the_owner_of_the_table(owner: Connection, db: Database) -> None:
    owner.execute("CREATE SCHEMA superusers")
    create_store(owner, "superusers.store", [("d", 1, 1, "a", fake_embedding("a"))], type="vector(16)")
    create_store(owner, "superusers.child", [("d", 2, 1, "a", None)], type="vector(16)", model=None)
    owner.execute("ALTER TABLE superusers.child INHERIT superusers.store")
    owner.execute(sql.SQL("ALTER TABLE superusers.child OWNER TO {}").format(sql.Identifier(db.role("tenant"))))
    _, found = findings(db)
    lacking = str(found["rows without an embedding"]["found"])
    assert f"1 not looked at: superusers.store of {owner.info.user} (A relation that is read with it" in lacking


def test_indexes_that_were_measured_and_those_that_were_not_are_listed(owner: Connection, db: Database) -> None:
    for name in ("small", "large", "tuned", "grown"):
        create_store(owner, name, [("a", 1, 1, "text", fake_embedding("text"))], type="vector(16)")
        owner.execute(f"CREATE INDEX ON {name} USING hnsw (segment_embedding vector_cosine_ops)")
    for name, rows in (("tuned", 60_000), ("grown", 30_000)):
        owner.execute(
            f"COMMENT ON COLUMN {name}.segment_embedding IS"
            f" 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed,EF_SEARCH=300,RECALL=0.9812,TUNED_ROWS={rows}'"
        )
    for name, rows in (("small", 20_000), ("large", 20_001), ("tuned", 119_999), ("grown", 60_000)):
        owner.execute("UPDATE pg_class SET reltuples = %s WHERE oid = %s::regclass", [rows, name])
    status, found = findings(db)
    assert found["approximate indexes"]["found"] == (
        "measured: public.tuned (98.1% of the nearest found); doubled since they were measured: public.grown"
        " (from 30000 to 60000 rows); never measured: public.large"
    )
    assert "ml_rag.tune_index" in str(found["approximate indexes"]["hint"])
    assert status == 0
    owner.execute("DROP TABLE large, grown")
    _, found = findings(db)
    assert found["approximate indexes"]["hint"] == ""


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
THIS = f'{{"version": "{__version__}", "uptime_seconds": '.encode()


def asked(tmp_path: Path, pieces: Iterable[bytes], seconds: float = 0.0) -> doctor.Finding:
    """What is found of a server that answers these pieces, one every so many seconds."""

    def answer(client: socket.socket, _: bytes) -> None:
        with contextlib.suppress(OSError):
            for piece in pieces:
                client.sendall(piece)
                time.sleep(seconds)
        client.close()

    server = HostileServer(tmp_path / "socket", answer)
    try:
        (finding,) = doctor.check_server(server.address)
    finally:
        server.close()
    return finding


@pytest.mark.parametrize(
    "reply",
    [
        b"Hello\r\n\r\n", OK, OK + b"[]", OK + b"null", OK + b"{}", OK + b'{"version": [1]}', OK + b"[" * 100_000,
        OK + THIS + b'"x"}', OK + THIS + b"1" + b"0" * 400 + b"}", OK + THIS + b'1, "parsers": [1]}',
        OK + THIS + b'1, "parsers": {"missing": "x"}}', b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n" + b" " * 10,
    ],
)  # fmt: skip
def test_something_else_at_the_address_is_said(tmp_path: Path, reply: bytes) -> None:
    finding = asked(tmp_path, [reply])
    assert not finding.ok
    assert "answers something else than an ml_rag model server" in finding.found
    assert "ml_rag.configure('model_server'" in finding.hint


@pytest.mark.parametrize("head", [OK, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"])
def test_a_reply_without_end_is_not_read_on(tmp_path: Path, head: bytes) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield head
        while sent < 64:
            sent += 1
            yield b" " * doctor.MOST_REPLY

    finding = asked(tmp_path, endless())
    assert (finding.ok, "more than 1048576 bytes" in finding.found) == (False, True)
    assert sent < 8


@pytest.mark.parametrize("head", [b"", OK])
def test_a_reply_that_drips_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.5)
    started = time.monotonic()
    finding = asked(tmp_path, chain([head], repeat(b" ", 200)), 0.05)
    assert (finding.ok, "timed out" in finding.found) == (False, True)
    assert time.monotonic() - started < 3
