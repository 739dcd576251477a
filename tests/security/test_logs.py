"""No log holds the text of a question, a document, a segment, an answer, or a secret, unless somebody asked for that.

The model server's log is read as it is. Of PostgreSQL's, what ml_rag writes into it are errors and warnings: message,
detail, hint and context as a client gets them, so they are looked at there, and once more in the log itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from click.testing import CliRunner
from psycopg.types.json import Jsonb

from ml_rag.cli import main
from support.cluster import Connection, Database, noticed, value_of
from support.documents_server import DocumentsServer
from support.hostile_server import hostile, reply
from support.keywords import keyword_store
from support.loading import load, write
from support.office import docx, text_pdf, xlsx, zipped
from support.servers import running_server
from support.stores import create_store

#: stands in every text that is sent; a word no program would write by itself
WORD = "Quetzalcoatlus"
KEY = "sk-quetzal-0123456789"


# -- the model server -------------------------------------------------------------------------------------------------

CONFIG = f"""
[models.far]
task = "generate"
engine = "openai"
base_url = "http://far-user:{KEY}@127.0.0.1:9/v1"
api_key_file = "key"
timeout_seconds = 0.5

[models.gone]
task = "embed"
engine = "openai"
base_url = "http://127.0.0.1:9/v1"
api_key_env = "FAR_KEY"
timeout_seconds = 0.5

[models.broken]
task = "generate"
engine = "llama-cpp"
sources = [{{ path = "{WORD}.gguf" }}]
"""


def requests(http: httpx.Client) -> Iterator[httpx.Response]:
    """Requests of all kinds, those that fail among them, with the word wherever there is a text."""
    chat = {"model": "fake-generate", "messages": [{"role": "user", "content": WORD}]}
    documents = [{"document_name": WORD, "text": WORD}]
    for body in (
        {**chat, "documents": documents},
        {**chat, "documents": documents, "stream": True},
        {**chat, "model": "fake-generate-error"},
        {**chat, "model": "far"},
        {**chat, "model": "broken"},
        {**chat, "model": WORD},
        {**chat, "temperature": -1},
        {**chat, "language": f"{WORD} and then some"},
        {**chat, "messages": [{"role": WORD, "content": WORD}]},
        {**chat, "documents": [{"text": [WORD]}]},
        {**chat, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": WORD}}}},
        {**chat, "messages": [{"role": "user", "content": f"{WORD} " * 5000}]},
        [WORD],
    ):
        yield http.post("/v1/chat/completions", json=body)
    for model in ("fake-embed", "fake-embed-nan", "fake-embed-short", "gone", WORD):
        yield http.post("/v1/embeddings", json={"model": model, "input": [WORD, f"{WORD} two"]})
        yield http.post("/v1/rerank", json={"model": model, "query": WORD, "documents": [WORD]})
    yield http.post("/v1/rerank", json={"model": "fake-rerank", "query": WORD, "documents": [WORD]})
    yield http.post("/v1/embeddings", content=f'{{"model": "{WORD}'.encode())
    yield http.post("/v1/embeddings", json={"model": "fake-embed", "input": {"a": WORD}})
    yield http.get(f"/{WORD}?q={WORD}", headers={"X": WORD})
    yield http.post(f"/v1/models/{WORD}")
    bad = {
        "a.txt": WORD.encode(),
        f"{WORD}.pdf": b"%PDF-1.4 " + WORD.encode(),
        "a.docx": docx(f"<w:p><w:r><w:t>{WORD}</w:t></w:p>"),
        "a.json": f'{{"a": "{WORD}", '.encode(),
        "a.xlsx": zipped({"[Content_Types].xml": WORD, "xl/workbook.xml": f"<a>{WORD}"}),
        "a.zip": zipped({WORD: WORD}),
        "b.pdf": text_pdf([WORD]),
        "b.xlsx": xlsx({WORD: [[WORD]]}),
        "a.eml": f"From: {WORD}\nContent-Type: text/html; charset={WORD}\n\n<p>{WORD}".encode(),
    }
    for name, content in bad.items():
        for model in ("fake-embed", "fake-embed-nan"):
            options = json.dumps({"embed_model_id": model, "language": "en"})
            yield http.post("/v1/documents", data={"options": options}, files={"file": (name, content)})
    yield http.post("/v1/documents", data={"options": f'{{"embed_model_id": "{WORD}"'}, files={"file": ("a", b"a")})
    yield http.post("/v1/documents", data={WORD: WORD}, files={WORD: (WORD, WORD.encode())})
    yield http.post("/v1/documents", content=WORD.encode(), headers={"content-type": f"multipart/form-data; b={WORD}"})


@pytest.mark.parametrize("level", ["info", "debug"])
def test_the_model_servers_log_holds_no_text_and_no_secret(tmp_path: Path, level: str) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + os.urandom(100))
    config = CONFIG.replace('"key"', f'"{tmp_path}/key"').replace(f"{WORD}.gguf", f"{tmp_path}/bad.gguf")
    with running_server(
        socket=tmp_path / "s.sock", config=config, arguments=["--log-level", level], environment={"FAR_KEY": KEY}
    ) as running:
        transport = httpx.HTTPTransport(uds=str(running.socket))
        told = ""
        with httpx.Client(transport=transport, base_url="http://server", timeout=60) as http:
            statuses = []
            for response in requests(http):
                statuses.append(response.status_code)
                told += response.text
                assert "Traceback" not in response.text
                assert 'File "' not in response.text
            told += http.get("/v1/models").text + http.get("/metrics").text + http.get("/healthz").text
        log = running.log()
    assert {200, 400, 404, 500} <= set(statuses)
    assert WORD not in log
    assert "fake-generate-error" in log
    for secret in (KEY, KEY[:12], "far-user"):
        assert secret not in log
        assert secret not in told


def test_an_error_that_nobody_foresaw_holds_no_text_either(tmp_path: Path) -> None:
    """Exceptions like to quote: their words go neither to the log nor, as a detail, to PostgreSQL and into its log."""
    code = (
        "import ml_rag.server.engines.fake as fake, ml_rag.cli\n"
        "def fail(self, *a, **k): raise ValueError(repr((a, k)))\n"
        "for name in ('embed', 'generate', 'rerank'):\n"
        "    for c in [c for c in vars(fake).values() if isinstance(c, type)]:\n"
        "        if hasattr(c, name): setattr(c, name, fail)\n"
        f"ml_rag.cli.main(['serve', '--fake-models', '--socket', {str(tmp_path / 's.sock')!r}])"
    )
    root = Path(__file__).parents[2]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root / "plpy"), "ML_RAG_CONFIG": os.devnull},
        )
        try:
            assert process.stdout is not None
            assert "ready on" in process.stdout.readline()
            transport = httpx.HTTPTransport(uds=str(tmp_path / "s.sock"))
            with httpx.Client(transport=transport, base_url="http://server", timeout=30) as http:
                replies = [
                    http.post("/v1/embeddings", json={"model": "fake-embed", "input": WORD}),
                    http.post("/v1/rerank", json={"model": "fake-rerank", "query": WORD, "documents": [WORD]}),
                    http.post(
                        "/v1/chat/completions",
                        json={"model": "fake-generate", "messages": [{"role": "user", "content": WORD}]},
                    ),
                ]
        finally:
            process.terminate()
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()
    for response in replies:
        assert response.status_code == 500
        assert WORD not in response.text
        assert "ValueError" in response.text
    written = (tmp_path / "log").read_text()
    assert WORD not in written
    assert "unexpected ValueError" in written


# -- PostgreSQL's log -------------------------------------------------------------------------------------------------


def texts(d: Any) -> dict[str, str]:
    names = {"message": "message_primary", "detail": "message_detail", "hint": "message_hint", "context": "context"}
    return {name: getattr(d, attribute) or "" for name, attribute in names.items()}


ASK, GENERATE = "SELECT ml_rag_answer(%s, %s)", "SELECT ml_generate(%s, %s)"
LOAD = "SELECT ml_rag.load_document(%s, 'a', %s)"
WORDS_ONLY = {"keyword_search": True, "semantic_search": False}
RECORD = '[{"id": "1", "content": "a"}]'
TWICE = "SELECT ml_rag_evaluate('SELECT 1 AS id, question FROM q UNION ALL SELECT 1, question FROM q')"
#: statements with the word among their bound parameters or in what they read; each ends in an error or a warning
FAILING: dict[str, tuple[Any, ...]] = {
    "an empty store": (ASK, WORD, {"vector_store": ["empty"]}),
    "no such store": (ASK, WORD, {"vector_store": ["none"]}),
    "nothing near": (ASK, f"{WORD} x y", {"retrieval_options": {"max_distance": 0}, "abstain": False}),
    "nothing by words": (ASK, f"z{WORD}", WORDS_ONLY),
    "a bad score": (ASK, WORD, {"rerank": {"min_score": 1}, "abstain": False}),
    "a failing model": (ASK, WORD, {"model_options": {"model_id": "fake-generate-error"}}),
    "an unknown model": (ASK, WORD, {"model_options": {"model_id": "none"}}),
    "a model of another task": ("SELECT ml_embed_row(%s, %s)", WORD, {"embed_model_id": "fake-generate"}),
    "a context": (ASK, "q", {"model_options": {"context": WORD}}),
    "an abstain text that is blank": (ASK, WORD, {"abstain_text": "  "}),
    "a prompt too long": (GENERATE, f"{WORD} " * 5000, {}),
    "a context too long": (GENERATE, "q", {"context": f"{WORD} " * 90000, "max_tokens": 4090}),
    "a system that is none": (ASK, WORD, {"prompt": {"system": [WORD]}}),
    "a keyword too long": (ASK, "q", {"required_keywords": [WORD * 50]}),
    "keywords that are none": (ASK, "q", {"excluded_keywords": WORD}),
    "stops that are none": (GENERATE, "q", {"stop_sequences": WORD}),
    "too many stops": (GENERATE, "q", {"stop_sequences": [WORD] * 99}),
    "a record without a title": ("SELECT ml_rank(%s, %s)", WORD, [{"id": "1"}]),
    "a record that is none": ("SELECT ml_rank('q', %s)", [{"id": "1", "content": [WORD]}]),
    "no reranker": (f"SELECT ml_rank(%s, '{RECORD}', %s)", WORD, {"model": "none"}),
    "no model to measure": ("SELECT ml_rag_evaluate('q', %s)", {"options": {"embed_model_id": "none"}}),
    "questions of one id": (TWICE,),
    "questions of one kind": ("SELECT * FROM ml_rag.calibrate(%s)", "q"),
    "a batch": (
        "CALL ml_rag_table('public.q.question', 'public.a.answer', %s)",
        {"model_options": {"model_id": "fake-generate-error"}},
    ),
    "a batch that a check refuses": ("CALL ml_generate_table('public.q.question', 'public.checked.answer')",),
    "embedding a batch": (
        "CALL ml_embed_table('public.q.question', 'public.e.v', %s)",
        {"embed_model_id": "fake-embed-nan"},
    ),
    "a document that a check refuses": (LOAD, "strict", WORD.encode()),
    "a document of other dimensions": (LOAD, "empty", WORD.encode()),
    "a damaged document": ("SELECT ml_rag.load_document(%s, 'a.json', %s)", "strict", f'{{"a": "{WORD}"'.encode()),
    "a judge that fails": ("SELECT ml_rag_evaluate('q', %s)", {"judge_model_id": "fake-generate-error", "keep": False}),
}
#: what fails in them is part of the result
SILENT = ("a judge that fails", "a document that a check refuses", "a damaged document")


def attempt(connection: Connection, how: str) -> Any:
    """Run one of them; the error it ends in."""
    statement, *given = FAILING[how]
    try:
        connection.execute(statement, [Jsonb(one) if isinstance(one, dict | list) else one for one in given])
    except psycopg.Error as e:
        return e.diag
    return None


@pytest.fixture
def ready(owner: Connection, loader: Connection) -> Connection:
    """A loader with stores, questions and tables that refuse what they get, all full of the word."""
    keyword_store(owner, [f"{WORD} one", f"{WORD} two"])
    owner.execute("GRANT SELECT ON docs TO ml_rag_user")
    create_store(owner, "empty", type="vector(3)")
    loader.execute(
        "CREATE TABLE q (id text PRIMARY KEY, question text);"
        "CREATE TABLE checked (id text PRIMARY KEY, answer jsonb CHECK (answer IS NULL OR answer ->> 'text' IS NULL))"
    )
    loader.execute("INSERT INTO q VALUES (%s, %s), (%s, %s)", (f"{WORD} 1", WORD, f"{WORD} 2", f"{WORD} x"))
    create_store(loader, "strict", type="vector(16)")
    loader.execute("ALTER TABLE strict ADD CHECK (segment = 'nothing else')")
    return loader


@pytest.mark.parametrize("how", FAILING)
def test_errors_and_warnings_hold_no_text(ready: Connection, how: str) -> None:
    told = noticed(ready, texts)
    if (error := attempt(ready, how)) is not None:
        told.append(texts(error))
    for one in told:
        assert WORD not in str(one), one
    assert told or how in SILENT


def test_a_load_warns_without_quoting_what_it_read(loader: Connection, server: DocumentsServer, folder: Path) -> None:
    """A parser's words quote a document; the result has them, and who called reads it."""
    write(folder, a=f"!fail\n\n{WORD}", b="beta")
    told = noticed(loader, texts)
    result = load(loader, f"{folder}/")
    assert [one["detail"] for one in told] == ['See "failed" in the result.']
    assert result["failed"][0]["detail"] == "it said so"


def test_an_error_of_the_model_server_that_quotes_is_for_the_caller(
    owner: Connection, asker: Connection, local_sockets: Path
) -> None:
    """What a remote model answers is passed on as the detail, cut: docs/security.md says so, and how to keep it out."""
    error = {"error": {"message": "the remote model failed", "code": "engine_failed", "detail": f"it said {WORD}"}}
    failing = reply(error, "500 Internal Server Error")
    with hostile(local_sockets, failing, owner=owner), pytest.raises(psycopg.Error) as caught:
        asker.execute("SELECT ml_embed_row('x')")
    diag = caught.value.diag
    assert WORD in (diag.message_detail or "")
    assert WORD not in f"{diag.message_primary} {diag.message_hint} {diag.context}"


def test_the_log_itself_holds_no_text(ready: Connection, owner: Connection) -> None:
    """With PostgreSQL's defaults but one: log_parameter_max_length_on_error is 0, so bound values are not written."""
    found = value_of(owner, "SELECT pg_backend_pid()")
    try:
        path = Path(os.readlink(f"/proc/{found}/fd/2"))
        path.open().close()
    except OSError as e:
        pytest.skip(f"the log of this server cannot be read from here: {e}")
    if not path.is_file():
        pytest.skip(f"the log of this server is no file: {path}")
    start = path.stat().st_size
    for how in FAILING:
        attempt(ready, how)
    marker = "the end of the test of logs"
    with contextlib.suppress(psycopg.Error):
        owner.execute(f"DO $$ BEGIN RAISE EXCEPTION '{marker}'; END $$")
    with path.open("rb") as log:
        log.seek(start)
        written = log.read().decode("utf-8", "replace")
    assert marker in written
    assert written.count("ERROR:") > 15
    assert WORD not in written


# -- the command ------------------------------------------------------------------------------------------------------

PASSWORD = "correct horse battery"


def command(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ml_rag.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "plpy"), **environment},
        check=False,
        timeout=120,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "dsn",
    [
        f"host=127.0.0.1 port=9 dbname=x user=y password='{PASSWORD}'",
        f"postgresql://y:{PASSWORD.replace(' ', '%20')}@127.0.0.1:9/x",
        f"host=127.0.0.1 port=9 password={PASSWORD}",
        f"postgresql://y:{PASSWORD}@127.0.0.1:9/x",
    ],
)
@pytest.mark.parametrize("what", ["load", "doctor", "eval"])
def test_passwords_in_a_dsn_are_not_told(tmp_path: Path, what: str, dsn: str) -> None:
    """Also where the DSN is malformed and libpq would quote the piece it stumbled over."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text(WORD)
    (tmp_path / "questions.jsonl").write_text('{"_id": "1", "text": "a", "docs": ["a.txt"]}\n')
    arguments = {"load": [str(tmp_path), "--store", "x"], "doctor": [], "eval": [str(tmp_path)]}[what]
    done = CliRunner().invoke(main, [what, *arguments, "--dsn", dsn], env={"ML_RAG_CONFIG": os.devnull})
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit)  # any other would be shown with what caused it
    told = done.output
    assert "127.0.0.1" in told or "--dsn" in told
    for piece in (PASSWORD, PASSWORD.replace(" ", "%20"), *PASSWORD.split()):
        assert piece not in told, told


def test_loading_tells_names_and_counts_and_no_content(db: Database, ready: Connection, tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text(WORD)
    (tmp_path / "bad.json").write_text(f'{{"a": "{WORD}"')
    role = value_of(ready, "SELECT current_user")
    dsn = psycopg.conninfo.make_conninfo(db.dsn, dbname=db.name, options=f"-c role={role}")
    told = command("load", str(tmp_path), "--store", "public.strict", "--dsn", dsn)
    assert re.search(r"failed: 2 documents, such as \S+/(good\.txt|bad\.json): ", told), told
    assert WORD not in told


def test_a_bad_catalogue_is_told_without_its_secrets(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    for bad in (
        f'[models.a]\ntask = "generate"\nengine = "openai"\nbase_url = "ftp://u:{KEY}@host/v1"\n',
        f'[models.a]\ntask = "generate"\nengine = "openai"\nbase_url = "http://h/v1"\napi_key = "{KEY}"\n',
        f'[models.a]\ntask = "generate"\nengine = "openai"\nbase_url = "http://h/v1"\napi_key_env = "{KEY}"\nx = 1\n',
        f'[models.a]\nengine = "{KEY}"\n',
        f'[server]\nsocket_mode = "{KEY}"\n',
        f'[models.a]\nbase_url = "{KEY}\n',
    ):
        config.write_text(bad)
        told = command("models", "list", "--config", str(config))
        assert "Error" in told
        assert KEY not in told
    config.write_text(
        f'[models.a]\ntask = "generate"\nengine = "openai"\nbase_url = "http://u:{KEY}@h/v1"\napi_key_env = "A"\n'
    )
    told = command("models", "list", "--config", str(config), A=KEY)
    assert re.search(r"\ba\b", told)
    assert KEY not in told
