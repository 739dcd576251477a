"""store/store, store/load, store/adopt: nothing is loaded or shown by what somebody else has made under that name."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ml_rag.cli import main
from ml_rag.client.evaluation import Evaluation
from support.cluster import Connection, Database, noticed
from support.documents_server import DocumentsServer
from support.loading import connect_as_loader, loader_role, rows, write
from support.processes import wait_until
from support.stores import error

TABLE = (
    "(document_name text NOT NULL, metadata jsonb NOT NULL, document_id bigint NOT NULL,"
    " segment_number integer NOT NULL, segment text NOT NULL, segment_embedding vector(16) NOT NULL,"
    " PRIMARY KEY (document_id, segment_number))"
)
PLANT = (
    f"CREATE TABLE public.secrets {TABLE};"
    "COMMENT ON COLUMN public.secrets.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed';"
    "GRANT ALL ON public.secrets TO PUBLIC;"
    "CREATE FUNCTION public.evil() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE WARNING 'ran as %', current_user; RETURN NEW; END $$;"
    "CREATE TRIGGER evil BEFORE INSERT ON public.secrets FOR EACH ROW EXECUTE FUNCTION public.evil()"
)


@pytest.fixture
def attacker(db: Database, owner: Connection, loader: Connection, folder: Path) -> Connection:
    """May create in public, as many may; and a file that somebody will load by the name of its folder."""
    owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    secrets = folder / "secrets"
    secrets.mkdir()
    (secrets / "a.txt").write_text("the plan")
    return db.connect("tenant")


@pytest.mark.parametrize("named", [False, True])
def test_documents_go_to_no_table_of_somebody_else(
    db: Database, owner: Connection, loader: Connection, attacker: Connection, folder: Path, named: bool
) -> None:
    attacker.execute(PLANT)
    call = f"CALL vector_store_load('file://{folder}/secrets/', %s)"
    options = {"table_name": "secrets"} if named else {}
    for connection in (loader, owner):
        with error("42501", "secrets", "not trusted") as caught:
            connection.execute(call, (json.dumps(options),))
        assert "its schema, which is public" in caught.hint
    assert rows(attacker, "SELECT count(*) FROM public.secrets") == [(0,)]
    # whose schema is named is meant
    loader.execute(call, (json.dumps({**options, "table_name": "secrets", "schema_name": "public"}),))
    assert rows(attacker, "SELECT segment FROM public.secrets") == [("the plan",)]
    # where there is another schema on the path the store is made there
    role = loader_role(db)
    owner.execute(f'CREATE SCHEMA "{role}" AUTHORIZATION "{role}"')
    result = loader.execute(call, (json.dumps(options),)).fetchone()[0]
    assert result["vector_store"] == f"{role}.secrets"
    owner.execute(f'DROP SCHEMA "{role}" CASCADE')


@pytest.mark.parametrize("planted", ["schema", "partition"])
def test_nor_to_one_in_a_schema_or_with_a_partition_of_somebody_else(
    db: Database, owner: Connection, loader: Connection, attacker: Connection, folder: Path, planted: str
) -> None:
    """The owner of a schema can drop what is in it and make another of that name; a partition has its own triggers."""
    role, tenant = loader_role(db), db.role("tenant")
    whole = PLANT.split(";")[0]
    owner.execute(whole + (" PARTITION BY RANGE (document_id)" if planted == "partition" else ""))
    owner.execute(PLANT.split(";")[1])
    owner.execute(f'ALTER TABLE public.secrets OWNER TO "{role}"')
    if planted == "schema":
        owner.execute(f'CREATE SCHEMA theirs AUTHORIZATION "{tenant}"; ALTER TABLE secrets SET SCHEMA theirs')
        attacker.execute("GRANT ALL ON SCHEMA theirs TO PUBLIC")
        loader.execute("SET search_path = theirs, public")
    else:
        owner.execute("CREATE TABLE part PARTITION OF secrets DEFAULT")
        owner.execute(f'ALTER TABLE part OWNER TO "{tenant}"')

    def load(**options: str) -> object:
        call = f"CALL vector_store_load('file://{folder}/secrets/', %s)"
        return (loader.execute(call, (json.dumps(options),)).fetchone() or [{}])[0]["vector_store"]

    if planted == "schema":
        assert load(table_name="secrets") == "public.secrets"
        assert load(table_name="secrets", schema_name="theirs") == "theirs.secrets"
    else:
        with error("42501", "secrets", "not trusted", f"role {tenant}, which you do not trust"):
            load(table_name="secrets")


@pytest.mark.parametrize("by", ["a call", "a command"])
def test_nor_to_one_of_a_role_that_is_not_trusted_any_more(
    db: Database,
    owner: Connection,
    server: DocumentsServer,
    loader: Connection,
    attacker: Connection,
    folder: Path,
    by: str,
) -> None:
    role, tenant = loader_role(db), db.role("tenant")
    attacker.execute(PLANT.split(";")[0])
    attacker.execute(PLANT.split(";")[1])
    attacker.execute("GRANT ALL ON secrets TO PUBLIC")
    write(folder, **{f"d{i}": "the plan" for i in range(40)})

    def distrust() -> None:
        owner.execute(f'REVOKE ml_rag_publisher FROM "{tenant}"')
        if by == "a call":
            attacker.execute(PLANT.partition("PUBLIC;")[2])

    owner.execute(f'GRANT ml_rag_publisher TO "{tenant}"')
    said = noticed(loader)
    try:
        server.before_batch[0] = distrust
        if by == "a call":
            with error("42501", "secrets", "not trusted"):
                loader.execute(f"CALL vector_store_load('file://{folder}/', '{{\"table_name\": \"secrets\"}}')")
        else:
            dsn = f"{db.dsn} dbname={db.name} options='-c role={role}'"
            refused = CliRunner().invoke(main, ["load", str(folder), "--store", "secrets", "--dsn", dsn])
            assert refused.exit_code == 1
            assert 'table "public.secrets" is not trusted' in refused.output
    finally:
        owner.execute(f'REVOKE ml_rag_publisher FROM "{tenant}"')
    # those of the request that was under way
    assert rows(attacker, "SELECT count(*) FROM secrets") == [(0 if by == "a call" else 16,)]
    assert not any("ran as" in message for message in said), said


def evaluation(db: Database, owner: Connection, folder: Path, documents: int) -> Result:
    """What ``ml-rag eval`` of the loader says of a table of the tenant's, who is a publisher when it begins."""
    role, tenant, secrets = loader_role(db), db.role("tenant"), folder / "secrets"
    lines = [json.dumps({"_id": f"d{i}", "text": f"plan {i}"}) for i in range(documents)]
    (secrets / "corpus.jsonl").write_text("\n".join(lines))
    (secrets / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "plan 0"}))
    (secrets / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\td0\t1\n")
    owner.execute(f'GRANT ml_rag_publisher TO "{tenant}"')
    try:
        dsn = f"{db.dsn} dbname={db.name} options='-c role={role}'"
        return CliRunner().invoke(main, ["eval", str(secrets), "--schema", "public", "--dsn", dsn])
    finally:
        owner.execute(f'REVOKE ml_rag_publisher FROM "{tenant}"')


EVALUATED = PLANT.partition("CREATE FUNCTION")[0] + "COMMENT ON TABLE secrets IS 'made by ml-rag eval'"


def test_nor_by_an_evaluation_to_one_of_a_role_that_is_not_trusted_any_more(
    db: Database, owner: Connection, server: DocumentsServer, attacker: Connection, folder: Path
) -> None:
    attacker.execute(EVALUATED)
    server.before_batch[0] = lambda: owner.execute(f'REVOKE ml_rag_publisher FROM "{db.role("tenant")}"')
    refused = evaluation(db, owner, folder, 80)
    assert refused.exit_code == 1
    assert 'table "public.secrets" is not trusted' in refused.output
    # those of the request that was under way
    assert rows(attacker, "SELECT count(*) FROM secrets") == [(64,)]


def test_nor_does_an_evaluation_read_what_takes_the_place_of_its_table(
    db: Database, owner: Connection, server: DocumentsServer, attacker: Connection, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    attacker.execute(EVALUATED)
    attacker.execute(
        "CREATE TABLE ran (who name); GRANT INSERT ON ran TO PUBLIC; CREATE FUNCTION evil() RETURNS boolean"
        " LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.ran VALUES (current_user); RETURN true; END $$"
    )
    attacker.execute("SELECT ml_rag.enable_keyword_search('secrets')")

    def exchange(evaluation: Evaluation) -> None:
        owner.execute(f'REVOKE ml_rag_publisher FROM "{db.role("tenant")}"')
        attacker.execute(
            "ALTER TABLE secrets RENAME TO former; CREATE VIEW secrets AS SELECT * FROM former WHERE evil();"
            "GRANT SELECT ON secrets TO PUBLIC"
        )

    monkeypatch.setattr(Evaluation, "_index_keywords", exchange)
    refused = evaluation(db, owner, folder, 1)
    assert refused.exit_code == 1
    assert "is not trusted" in refused.output
    assert rows(attacker, "SELECT who FROM ran") == []


def test_nor_to_one_that_is_made_while_a_lock_is_waited_for(
    db: Database, owner: Connection, loader: Connection, attacker: Connection, folder: Path
) -> None:
    """Anybody can take the advisory lock of a store that is to be."""
    (key,) = owner.execute("SELECT ml_rag._store_key('public', 'secrets')").fetchone() or (0,)
    attacker.execute("SELECT pg_advisory_lock(%s)", (key,))
    other = connect_as_loader(db)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(other.execute, f"CALL vector_store_load('file://{folder}/secrets/')")
        waits = (
            f"SELECT count(*) FROM pg_stat_activity WHERE pid = {other.info.backend_pid} AND wait_event = 'advisory'"
        )
        wait_until(lambda: rows(owner, waits) == [(1,)])
        attacker.execute(PLANT)
        attacker.execute("SELECT pg_advisory_unlock(%s)", (key,))
        with error("42501", "secrets", "not trusted"):
            loading.result(30)
    assert rows(attacker, "SELECT count(*) FROM public.secrets") == [(0,)]


def test_a_collection_takes_no_view_of_somebody_else(
    db: Database, owner: Connection, loader: Connection, attacker: Connection
) -> None:
    """A view that is replaced keeps its owner, who could change it afterwards."""
    owner.execute(
        "CREATE TABLE langchain_pg_collection (uuid uuid PRIMARY KEY, name varchar NOT NULL UNIQUE, cmetadata json);"
        "CREATE TABLE langchain_pg_embedding (id varchar PRIMARY KEY, collection_id uuid, embedding vector,"
        " document varchar, cmetadata jsonb);"
        "INSERT INTO langchain_pg_collection VALUES ('00000000-0000-0000-0000-000000000001', 'birds')"
    )
    plant = (
        "CREATE VIEW birds AS SELECT NULL::varchar AS id, NULL::varchar AS document, NULL::jsonb AS cmetadata,"
        " NULL::vector AS embedding"
    )
    attacker.execute(plant)
    call = "SELECT ml_rag.adopt('langchain_pg_embedding', %s)"
    options = {"embed_model_id": "fake-embed", "collection": "birds", "sample": 0}
    with error("42P07", "birds", "already exists"):
        owner.execute(call, (json.dumps(options),))
    # nor one that the transaction does not see yet
    attacker.execute("DROP VIEW birds")
    with error("55000", "at this isolation level"), owner.transaction():
        owner.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        owner.execute("SELECT FROM pg_class LIMIT 1")
        attacker.execute(plant)
        owner.execute(call, (json.dumps(options),))
    owner.execute(call, (json.dumps({**options, "view": "fowl"}),))
    owner.execute(call, (json.dumps({**options, "view": "fowl"}),))


def test_nor_by_a_command(
    db: Database, owner: Connection, loader: Connection, attacker: Connection, folder: Path, tmp_path: Path
) -> None:
    attacker.execute(PLANT)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--dsn", f"{db.dsn} dbname={db.name} options='-c role={role}'"])

    role = loader_role(db)
    refused = run("load", str(folder), "--store", "secrets")
    assert refused.exit_code == 1
    assert 'table "public.secrets" is not trusted' in refused.output
    assert rows(attacker, "SELECT count(*) FROM public.secrets") == [(0,)]
    assert run("load", str(folder), "--store", "public.secrets").exit_code == 0
    assert rows(attacker, "SELECT segment FROM public.secrets") == [("the plan",)]
    # the table of an evaluation, in a schema that somebody else has made
    owner.execute(f'CREATE SCHEMA ml_rag_eval AUTHORIZATION "{db.role("tenant")}"')
    attacker.execute("DELETE FROM secrets; ALTER TABLE secrets SET SCHEMA ml_rag_eval")
    attacker.execute("GRANT ALL ON SCHEMA ml_rag_eval TO PUBLIC")
    attacker.execute("COMMENT ON TABLE ml_rag_eval.secrets IS 'made by ml-rag eval'")
    questions = tmp_path / "secrets"
    questions.mkdir()
    (questions / "corpus.jsonl").write_text('{"_id": "d", "title": "", "text": "the plan"}\n')
    (questions / "questions.jsonl").write_text('{"_id": "q", "text": "plan", "answers": [], "answerable": true}\n')
    (questions / "qrels.tsv").write_text("q\td\t1\n")
    as_superuser = ["--dsn", f"{db.dsn} dbname={db.name}"]
    for refused in (
        run("eval", str(questions), "--arms", "vector"),
        CliRunner().invoke(main, ["eval", str(questions), "--arms", "vector", "--drop", *as_superuser]),
    ):
        assert refused.exit_code == 1
        assert "is not trusted" in refused.output
    assert rows(attacker, "SELECT count(*) FROM ml_rag_eval.secrets") == [(0,)]


def test_loading_and_evaluating_from_the_command_line_run_no_functions_of_others(
    db: Database, attacker: Connection, folder: Path, tmp_path: Path
) -> None:
    """Functions in schema public that fit the arguments better than those of pg_catalog."""
    attacker.execute("CREATE TABLE public.ran (what text); GRANT INSERT ON public.ran TO PUBLIC")
    for signature, result in {
        "parse_ident(text)": "text[]",
        "format(text, name, text)": "text",
        "format(text, text, text)": "text",
    }.items():
        attacker.execute(
            f"CREATE FUNCTION public.{signature} RETURNS {result} LANGUAGE plpgsql AS"
            f" $$BEGIN INSERT INTO public.ran VALUES ('{signature}'); RETURN '{{public,x}}'; END$$"
        )
    dsn = f"{db.dsn} dbname={db.name}"
    loaded = CliRunner().invoke(main, ["load", str(folder), "--store", "own", "--dsn", dsn])
    assert loaded.exit_code == 0, loaded.output
    questions = tmp_path / "questions"
    questions.mkdir()
    (questions / "corpus.jsonl").write_text('{"_id": "d", "title": "", "text": "the plan"}\n')
    (questions / "questions.jsonl").write_text('{"_id": "q", "text": "plan", "answers": [], "answerable": true}\n')
    (questions / "qrels.tsv").write_text("q\td\t1\n")
    CliRunner().invoke(main, ["eval", str(questions), "--arms", "vector", "--dsn", dsn])
    assert rows(attacker, "SELECT DISTINCT what FROM public.ran") == []
