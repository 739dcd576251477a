"""`ml-rag mcp` by the client of the official SDK, in process, over stdin and stdout, and over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import httpx
import psycopg
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import TextContent

from ml_rag.integrations import mcp
from support.cluster import Database, value_of
from support.processes import free_port, wait_for_port, wait_until
from support.stores import create_store, fake_embedding

MAIN = "import sys; sys.argv[0] = 'ml-rag'; from ml_rag.cli import main; main()"
ML_RAG = [sys.executable, "-c", MAIN]
#: with less patience for connections that send no request
IMPATIENT = "from ml_rag.integrations import connections as c; c.PATIENCE = 0.2; c.BODY_PATIENCE = 0.4; " + MAIN


@pytest.fixture
def boats(db: Database, asker_dsn: str) -> str:
    owner = db.connect()
    texts = ["red boat", "blue boat", "green boat"]
    rows = [("boats.pdf", 1, n, text, fake_embedding(text)) for n, text in enumerate(texts, 1)]
    create_store(owner, "public.boats", [*rows, ("house.pdf", 2, 1, "house", fake_embedding("house"))], "vector(16)")
    owner.execute("COMMENT ON TABLE boats IS 'all that swims'")
    owner.execute("ANALYZE boats")
    return asker_dsn


async def call(client: Client, name: str, **arguments: Any) -> Any:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def refusal(client: Client, name: str, **arguments: Any) -> str:
    result = await client.call_tool(name, arguments)
    assert result.is_error
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


async def test_the_tools_say_that_they_only_read(boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools.keys() == {"search", "answer", "list_stores", "list_options", "read_document"}
        assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools.values())
        assert all(tool.description for tool in tools.values())


async def test_search(boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        found = (await call(client, "search", query="blue boat", limit=2))["results"]
        assert [row["rank"] for row in found] == [1, 2]
        assert (found[0]["segment"], found[0]["document_name"]) == ("blue boat", "boats.pdf")
        assert found[0]["distance"] == pytest.approx(0, abs=1e-4)
        filtered = {"filters": {"document_name": "house.pdf"}}
        (only,) = (await call(client, "search", query="boat", stores=["public.boats"], options=filtered))["results"]
        assert only["segment"] == "house"
        assert await call(client, "search", query="boat", options={"filters": {"n": 99}}) == {"results": []}


@pytest.mark.parametrize(
    "page", ["9" * 400 + ".5", "[" * 600 + "]" * 600, '{"a":' * 975 + "1" + "}" * 975, "[" * 3000 + "]" * 3000]
)
async def test_metadata_of_somebody_else_fails_no_tool(db: Database, boats: str, page: str) -> None:
    db.connect().execute("UPDATE boats SET metadata = %s::jsonb", (f'{{"n": 1, "page": {page}}}',))
    async with Client(mcp.server(boats)) as client:
        for row in (await call(client, "search", query="blue boat"))["results"]:
            assert row["metadata"]["n"] == 1
        assert (await call(client, "answer", query="blue boat"))["text"]
        result = await client.call_tool("read_document", {"store": "public.boats", "document_name": "boats.pdf"})
        (content,) = result.content
        assert isinstance(content, TextContent)
        assert len(json.loads(content.text, parse_constant=pytest.fail)["segments"]) == 3


SLOW = {"model_options": {"model_id": "fake-generate-slow", "max_tokens": 12}}


async def test_the_text_of_an_answer_comes_as_it_is_written(boats: str) -> None:
    told: list[tuple[float, str | None]] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        told.append((done, message))

    for address in (None, "none"):
        async with Client(mcp.server(boats, model_server=address)) as client:
            arguments = {"query": "blue boat", "limit": 2, "options": {**SLOW, "return_usage": True}}
            result = await client.call_tool("answer", arguments, progress_callback=progress)
        document = result.structured_content
        assert document is not None
        assert document["usage"] == {"prompt_tokens": ANY, "generated_tokens": 12, "finish_reason": "length"}
        assert len(document["citations"]) == 2
        if address is None:
            assert "".join(message or "" for _, message in told) == document["text"]
            assert [done for done, _ in told] == list(range(1, len(told) + 1))
            assert len(told) > 4
            told.clear()
    assert told == []


async def test_an_error_of_the_model_while_it_writes(boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        options = {"model_options": {"model_id": "fake-generate-error"}}
        assert "(SQLSTATE 38000)" in await refusal(client, "answer", query="blue boat", options=options)


async def test_an_argument_that_there_is_not_is_refused(boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        refused = await refusal(client, "search", query="boat", store=["public.none"])
        assert refused.endswith("search has no argument 'store'; did you mean 'stores'? (SQLSTATE 22023)")
        refused = await refusal(client, "answer", query="boat", zzzz=1)
        assert "there are query, stores, limit, options" in refused
        assert "did you mean 'query'" in await refusal(client, "search", querry="boat")
        for tool in (await client.list_tools()).tools:
            assert tool.input_schema["additionalProperties"] is False


async def test_answer(boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        answer = await call(client, "answer", query="blue boat", limit=1)
        assert answer["text"]
        assert [citation["segment"] for citation in answer["citations"]] == ["blue boat"]
        nothing = await call(client, "answer", query="boat", options={"filters": {"n": 99}})
        assert nothing == {"text": None, "citations": []}


async def test_stores_and_documents(db: Database, boats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Client(mcp.server(boats)) as client:
        (store,) = (await call(client, "list_stores"))["stores"]
        assert store == {
            "vector_store": "public.boats",
            "embed_model_id": "fake-embed",
            "description": "all that swims",
            "segments": 4,
        }
        # an estimate that there is not is not 0
        db.connect().execute("CREATE TABLE fresh (LIKE boats INCLUDING COMMENTS); GRANT SELECT ON fresh TO ml_rag_user")
        stores = (await call(client, "list_stores"))["stores"]
        assert {"vector_store": "public.fresh", "embed_model_id": "fake-embed"} in stores
        document = {"store": "public.boats", "document_name": "boats.pdf"}
        whole = await call(client, "read_document", **document)
        assert [s["segment"] for s in whole["segments"]] == ["red boat", "blue boat", "green boat"]
        assert (whole["total"], whole["next"]) == (3, None)
        monkeypatch.setattr(mcp, "SEGMENTS", 2)
        part = await call(client, "read_document", **document)
        assert (len(part["segments"]), part["total"], part["next"]) == (2, 3, 3)
        rest = await call(client, "read_document", **document, first=3)
        assert ([s["segment"] for s in rest["segments"]], rest["next"]) == (["green boat"], None)
        monkeypatch.setattr(mcp, "CHARACTERS", len("red boat") + len("blue boat") - 1)
        assert (await call(client, "read_document", **document))["next"] == 2
        assert "P0002" in await refusal(client, "read_document", **document, first=4)


async def test_a_document_is_read_by_its_name_without_folders(db: Database, boats: str) -> None:
    names = ["/srv/new/a.pdf", "/srv/old/b.pdf", "/srv/new/b.pdf", r"C:\c.pdf", "d.pdf", "/srv/d.pdf", "/srv/100%.pdf"]
    rows = [(name, n, 1, name, fake_embedding(name)) for n, name in enumerate(names, 1)]
    owner = db.connect()
    create_store(owner, "public.foldered", rows, "vector(16)")
    store = {"store": "public.foldered"}
    async with Client(mcp.server(boats)) as client:
        for short, full in (("a.pdf", names[0]), ("c.pdf", names[3]), ("d.pdf", "d.pdf"), ("100%.pdf", names[6])):
            for name in (short, full):
                read = await call(client, "read_document", **store, document_name=name)
                assert (read["document_name"], [s["segment"] for s in read["segments"]]) == (full, [full])
        # of two documents neither is meant
        refused = await refusal(client, "read_document", **store, document_name="b.pdf")
        assert refused.splitlines()[1:] == ["Did you mean '/srv/new/b.pdf' or '/srv/old/b.pdf'?"]
        for name in (".pdf", "new/a.pdf", "A.pdf", "_.pdf"):
            refused = await refusal(client, "read_document", **store, document_name=name)
            assert "P0002" in refused
            assert "Did you mean" not in refused
        # one that exists is meant, also beyond its end
        for name in ("a.pdf", "d.pdf"):
            assert "P0002" in await refusal(client, "read_document", **store, document_name=name, first=2)
        # a name whose rows are hidden is none
        owner.execute("ALTER TABLE foldered ENABLE ROW LEVEL SECURITY")
        owner.execute("CREATE POLICY seen ON foldered USING (document_name NOT LIKE '/srv/new/%')")
        assert (await call(client, "read_document", **store, document_name="b.pdf"))["document_name"] == names[1]
        assert "new" not in await refusal(client, "read_document", **store, document_name="a.pdf")


async def test_what_a_document_returns_is_bounded_in_the_database(db: Database, boats: str) -> None:
    owner = db.connect()
    owner.execute("UPDATE boats SET segment = repeat('x', 30000000) WHERE segment_number = 2")
    owner.execute("UPDATE boats SET metadata = jsonb_build_object('x', repeat('x', 30000000)) WHERE segment_number = 3")
    owner.execute("COMMENT ON TABLE boats IS %s" % ("'" + "x" * 5000 + "'"))
    async with Client(mcp.server(boats)) as client:
        document = {"store": "public.boats", "document_name": "boats.pdf"}
        assert [s["segment"] for s in (await call(client, "read_document", **document))["segments"]] == ["red boat"]
        (second,) = (await call(client, "read_document", **document, first=2))["segments"]
        assert (second["segment"], second["cut"]) == ("x" * mcp.CHARACTERS, True)
        (third,) = (await call(client, "read_document", **document, first=3))["segments"]
        assert third == {"segment": "green boat", "metadata": None}
        (store,) = (await call(client, "list_stores"))["stores"]
        assert store["description"] == "x" * 1000


@pytest.mark.parametrize("name", ["public.none", "pg_catalog.pg_authid", "public.boats; DROP TABLE boats", "boats", ""])
async def test_only_stores_are_read(boats: str, name: str) -> None:
    async with Client(mcp.server(boats)) as client:
        assert "42P01" in await refusal(client, "read_document", store=name, document_name="boats.pdf")


async def test_names_are_quoted(db: Database, boats: str) -> None:
    from psycopg import sql

    owner, name = db.connect(), 'x"; DROP TABLE boats; -- x'
    row = ("'; DROP TABLE boats", 1, 1, "odd", fake_embedding("odd"))
    create_store(owner, sql.Identifier("public", name), [row], "vector(16)")
    async with Client(mcp.server(boats)) as client:
        read = await call(client, "read_document", store=f"public.{name}", document_name="'; DROP TABLE boats")
        assert [s["segment"] for s in read["segments"]] == ["odd"]
        assert len((await call(client, "list_stores"))["stores"]) == 2


async def test_errors_have_their_sqlstate(boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        assert "(SQLSTATE 22023)" in await refusal(client, "search", query="boat", options={"no_such_option": 1})
        assert "(SQLSTATE P0002)" in await refusal(client, "search", query="boat", stores=["public.none"])
        assert "(SQLSTATE 22023)" in await refusal(client, "search", query="")
        assert "limit" in await refusal(client, "search", query="boat", limit=101)
        assert len((await call(client, "search", query="boat", limit=100))["results"]) == 4


async def test_of_many_wrong_values_one_is_told(boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        for tool in ("search", "answer"):
            refused = await refusal(client, tool, query="boat", stores=[1] * 1000)
            assert "1 validation error" in refused
            assert len(refused) < 1000


async def test_errors_name_the_arguments_of_the_tool(db: Database, boats: str) -> None:
    create_store(db.connect(), "public.others", [("a", 1, 1, "a", fake_embedding("a"))], "vector(16)", "other-embed")
    async with Client(mcp.server(boats)) as client:
        for tool in ("search", "answer"):
            refused = await refusal(client, tool, query="boat", stores=["public.none"])
            assert 'argument "stores"' in refused
            assert "list_stores lists" in refused
            assert "vector_store" not in refused
            assert "discover" not in refused
            refused = await refusal(client, tool, query="boat", options={"n_citation": 5})
            assert 'Did you mean argument "limit"?' in refused
            # what was given as an option is called as it was, and so is an option in JSON
            refused = await refusal(client, tool, query="boat", options={"vector_store": 5})
            assert 'invalid value for option "vector_store"' in refused
            refused = await refusal(client, tool, query="boat", options={"semantic_search": False})
            assert '"n_citations": 0' in refused
            refused = await refusal(client, tool, query="boat", stores=["public.boats", "public.others"])
            assert 'stores of one model in argument "stores"' in refused
            # a value of the caller's is none of an option
            refused = await refusal(client, tool, query="boat", options={"arms": [{"search": "vector_store"}]})
            assert 'Got "vector_store"' in refused
        assert "list_stores" in await refusal(client, "read_document", store="boats", document_name="boats.pdf")


async def test_an_argument_and_an_option_that_set_the_same_are_refused(boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        for tool in ("search", "answer"):
            options = {"vector_store": ["public.none"]}
            refused = await refusal(client, tool, query="boat", stores=["public.boats"], options=options)
            assert refused.removeprefix(f"Error executing tool {tool}: ").splitlines() == [
                'argument "stores" and option "vector_store" are given together (SQLSTATE 22023)',
                "They set the same: leave one out.",
            ]
            refused = await refusal(client, tool, query="boat", limit=1, options={"n_citations": 1})
            assert 'argument "limit" and option "n_citations"' in refused
        # null is the same as absent
        nothing = {"vector_store": None, "n_citations": None}
        one = {"query": "boat", "stores": ["public.boats"], "limit": 1}
        assert len((await call(client, "search", **one, options=nothing))["results"]) == 1
        # a default of the tool counts less than an option
        assert len((await call(client, "search", query="boat", options={"n_citations": 2}))["results"]) == 2


async def test_presets_and_settings_count_more_than_defaults_of_tools(db: Database, boats: str) -> None:
    owner, options = db.connect(), {"n_citations": 1, "citation_fields": ["rank"]}
    owner.execute("SELECT ml_rag.create_preset('one', %s, 'the best')", (json.dumps(options),))
    async with Client(mcp.server(boats)) as client:
        assert (await call(client, "list_options"))["presets"] == [
            {"name": "one", "description": "the best", "options": options}
        ]
        preset = {"preset": "one"}
        assert len((await call(client, "search", query="boat", options=preset))["results"]) == 1
        assert len((await call(client, "search", query="boat", options=preset, limit=2))["results"]) == 2
        (cited,) = (await call(client, "answer", query="boat", options=preset))["citations"]
        assert cited["rank"] == 1
        for tool in ("search", "answer"):
            refused = await refusal(client, tool, query="boat", options={"preset": "none"})
            assert 'preset "none" does not exist' in refused
            assert "list_options lists the presets" in refused
            assert "create_preset" not in refused
        owner.execute("""SELECT ml_rag.configure('default_options', '{"n_citations": 2}')""")
        assert len((await call(client, "search", query="boat"))["results"]) == 2


async def test_answers_have_titles_pages_and_what_sentences_stand_on(db: Database, boats: str) -> None:
    made = '{"page": 7, "title": "Boats", "source": {"sha256": "00", "made_with": "11"}}'
    db.connect().execute("UPDATE boats SET metadata = %s WHERE segment = 'blue boat'", (made,))
    async with Client(mcp.server(boats)) as client:
        options = {"grounding": {}, "model_options": {"model_id": "extractive"}}
        answer = await call(client, "answer", query="blue boat", limit=1, options=options)
        assert [(one["title"], one["page"]) for one in answer["citations"]] == [("Boats", 7)]
        (claim,) = answer["retrieval_info"]["grounding"]["claims"]
        assert answer["text"][claim["start_pos"] : claim["end_pos"]] == "blue boat"
        assert claim["citation_indices"] == [0]
        (found, _) = (await call(client, "search", query="blue boat", limit=2))["results"]
        assert found["metadata"] == {"page": 7, "title": "Boats", "source": found["document_name"]}


async def test_options_are_listed_for_an_agent(db: Database, boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        listed = {option["name"]: option for option in (await call(client, "list_options"))["options"]}
        assert listed["retrieval_options.max_distance"]["type"] == "number"
        assert listed["explain"]["default"] == "false"
        assert listed["arms[].search"]["choices"] == ["semantic", "keyword", "function"]
        top = value_of(db.connect(), "SELECT array_agg(name) FROM ml_rag.option WHERE routine = 'ml_rag'")
        assert set(top) <= listed.keys()
        assert all(option["description"] for option in listed.values())


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"query": "boat", "options": {"n_citations": 101}}, "list_options lists the options"),
        ({"query": "boat", "options": {"arms": [{"search": "boat"}]}}, "list_options lists the options"),
        ({"query": " "}, 'Ask a question: {"query": "What is AutoML?"}.'),
        ({"query": "boat", "stores": ["public.none"]}, "list_stores lists"),
        ({"query": "boat", "options": {"exclude_vector_store": ["public.boats"]}}, "list_stores lists"),
    ],
)
async def test_a_hint_is_what_an_agent_can_follow(boats: str, arguments: dict[str, Any], hint: str) -> None:
    async with Client(mcp.server(boats)) as client:
        for tool in ("search", "answer"):
            refused = await refusal(client, tool, **arguments)
            assert hint in refused
            assert "SELECT " not in refused.replace("has SELECT ", "")
            assert "CALL" not in refused


async def test_other_words_for_an_argument_are_understood(boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        found = (await call(client, "search", question="blue boat", stores="public.boats", limit=1))["results"]
        assert [row["segment"] for row in found] == ["blue boat"]
        assert (await call(client, "answer", question="blue boat", limit=1))["text"]
        assert "'question'" in await refusal(client, "search", query="boat", question="boat")


async def test_what_postgresql_cannot_hold_is_said(boats: str) -> None:
    async with Client(mcp.server(boats)) as client:
        for arguments in ({"query": "bo\0at"}, {"query": "boat", "stores": ["public.\0"]}):
            refused = await refusal(client, "search", **arguments)
            assert "cannot be reached" not in refused
            assert "(SQLSTATE 22" in refused
        refused = await refusal(client, "read_document", store="public.boats", document_name="\0")
        assert "a text has a NUL character" in refused


async def test_the_role_sees_what_it_may(db: Database, boats: str, tenant_dsn: str) -> None:
    owner = db.connect()
    owner.execute("ALTER TABLE boats ENABLE ROW LEVEL SECURITY")
    owner.execute(f"CREATE POLICY seen ON boats TO {db.role('tenant')} USING (segment <> 'red boat')")
    async with Client(mcp.server(tenant_dsn)) as client:
        found = (await call(client, "search", query="red boat", limit=10, stores=["public.boats"]))["results"]
        assert {row["segment"] for row in found} == {"blue boat", "green boat", "house"}
        read = await call(client, "read_document", store="public.boats", document_name="boats.pdf")
        assert read["total"] == 2
        owner.execute("REVOKE SELECT ON boats FROM ml_rag_user")
        assert await call(client, "list_stores") == {"stores": []}
        assert "42P01" in await refusal(client, "read_document", store="public.boats", document_name="boats.pdf")


async def test_every_statement_is_read_only(boats: str, trap: psycopg.Connection) -> None:
    async with Client(mcp.server(boats)) as client:
        assert "25006" in await refusal(client, "search", query="boat", stores=["public.trap"])
    assert trap.execute("SELECT count(*) FROM written").fetchone() == (0,)


async def test_over_stdin_and_stdout(boats: str) -> None:
    command = StdioServerParameters(
        command=ML_RAG[0], args=[*ML_RAG[1:], "mcp"], env={**os.environ, "ML_RAG_DSN": boats}
    )
    async with Client(command) as client:
        assert len((await call(client, "search", query="boat", limit=4))["results"]) == 4


@contextlib.contextmanager
def listening(dsn: str, main: str = MAIN) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-c", main, "mcp", "--http", "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, "ML_RAG_DSN": dsn}, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        _, logged = process.communicate(timeout=30)
    assert "made for a test" not in logged


async def test_over_http(boats: str) -> None:
    with listening(boats) as url:
        async with Client(url) as client:
            assert len((await call(client, "search", query="boat", limit=4))["results"]) == 4
            assert "22023" in await refusal(client, "search", query="boat", options={"no_such_option": 1})
            told: list[str | None] = []

            async def progress(done: float, total: float | None, message: str | None) -> None:
                told.append(message)

            result = await client.call_tool(
                "answer", {"query": "blue boat", "options": SLOW}, progress_callback=progress
            )
            assert result.structured_content is not None
            assert "".join(message or "" for message in told) == result.structured_content["text"]
            assert len(told) > 4


#: of a request whose body is yet to come
HEAD = (
    b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Accept: application/json, text/event-stream\r\nContent-Length: 100\r\n\r\n"
)


async def test_a_connection_that_sends_no_request_is_closed(boats: str) -> None:
    with listening(boats, IMPATIENT) as url:
        address = "127.0.0.1", int(url.split(":")[2].split("/")[0])
        for sent in (b"", b"POST /mcp HTTP/1.1\r\nHost: x\r\n", HEAD, HEAD + b"{"):
            with socket.create_connection(address, 10) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(sent)
                assert connection.recv(1) == b""
        # a stream that nothing is ever written to
        refused = httpx.get(url, headers={"accept": "text/event-stream"}, timeout=10)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        async with Client(url) as client:
            assert len((await call(client, "search", query="boat", limit=1))["results"]) == 1


def test_a_second_request_of_a_connection_ends_the_statement_of_the_first(db: Database, boats: str) -> None:
    running = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ml-rag mcp' AND state = 'active'"
        " AND wait_event_type = 'Lock'"
    )
    owner, locking = db.connect(), db.connect()
    call = {"name": "search", "arguments": {"query": "boat", "stores": ["public.boats"]}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}).encode()
    with listening(boats) as url:
        address = "127.0.0.1", int(url.split(":")[2].split("/")[0])
        locking.execute("BEGIN; LOCK TABLE boats IN ACCESS EXCLUSIVE MODE")
        with socket.create_connection(address, 10) as connection:
            request = HEAD.replace(b"127.0.0.1", b"%s:%d" % (b"127.0.0.1", address[1]))
            request = request.replace(b"Length: 100", b"Length: %d" % len(body)) + body
            connection.sendall(request)
            wait_until(lambda: owner.execute(running).fetchone() == (1,))
            connection.sendall(request)
            wait_until(lambda: owner.execute(running).fetchone() == (0,))
        locking.execute("ROLLBACK")


def test_a_long_request_does_not_fill_the_memory(boats: str) -> None:
    """What a request has is held as Python has it while it waits for a connection to the database."""
    headers = {"accept": "application/json, text/event-stream"}

    def asked(value: Any) -> httpx.Response:
        call = {"name": "search", "arguments": {"query": "boat", "options": {"filters": {"a": value}}}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        return httpx.post(url, json=body, headers=headers, timeout=60)

    with listening(boats) as url:
        for value in (["x" * 2_000_000], [[]] * 70_000):
            refused = asked(value)
            assert (refused.status_code, refused.text[:26]) == (413, "A request has at most 1048")
        assert asked(["x" * 900_000]).status_code == 200


def test_a_port_that_is_taken_is_named(boats: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*ML_RAG, "mcp", "--http", "--port", port, "--dsn", boats]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_a_page_from_elsewhere_cannot_ask(boats: str) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    headers = {"accept": "application/json, text/event-stream"}
    with listening(boats) as url:
        # DNS rebinding: a name of somebody else's for this address
        assert httpx.post(url, json=body, headers={**headers, "host": "evil.example"}).status_code in (403, 421)
        assert httpx.post(url, json=body, headers={**headers, "origin": "http://evil.example"}).status_code == 403


def test_a_wrong_dsn_ends_the_command_without_its_password() -> None:
    dsn = "host=/nowhere password=secret-of-mine"
    done = subprocess.run([*ML_RAG, "mcp", "--dsn", dsn], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "secret-of-mine" not in done.stderr + done.stdout
