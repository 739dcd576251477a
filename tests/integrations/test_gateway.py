"""`ml-rag gateway` by OpenAI's own client, and by what is not."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import openai
import psycopg
import pytest
from openai import OpenAI
from psycopg import sql
from psycopg.conninfo import make_conninfo
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ml_rag.errors import MlRagError
from ml_rag.integrations import connections, gateway
from ml_rag.integrations.database import Reader, worded
from ml_rag.integrations.gateway import Config, digest, share
from ml_rag.integrations.gateway.answer import Answer, Pieces
from ml_rag.integrations.gateway.citations import renumbered, sources, titles, url_citations, without_list
from ml_rag.integrations.gateway.gate import coming
from ml_rag.integrations.gateway.question import BODY, question
from ml_rag.integrations.gateway.refused import Refused
from ml_rag.integrations.waiting import Stream
from support.cluster import Database
from support.forward import by_tcp
from support.processes import free_port, wait_for_port, wait_until
from support.served import gateway_of, served
from support.servers import running_server
from support.stores import create_store, fake_embedding

ML_RAG = [sys.executable, "-c", "import sys; sys.argv[0] = 'ml-rag'; from ml_rag.cli import main; main()"]
ASK = {"model": "one", "messages": [{"role": "user", "content": "blue boat"}]}


@dataclass
class Gateway:
    url: str
    dsn: str
    config: Config

    def client(self, token: str = "token of asker") -> OpenAI:
        return OpenAI(base_url=self.url, api_key=token, max_retries=0, timeout=60)

    @contextlib.contextmanager
    def other(self, models: dict[str, Any] | None = None, **config: Any) -> Iterator[OpenAI]:
        """The client of a gateway with other settings."""
        given = Config(self.config.tokens, self.config.models if models is None else models, **config)
        with gateway_of(self.dsn, given) as url, replace(self, url=url).client() as client:
            yield client

    def post(self, content: Any, token: str = "token of asker", path: str = "/chat/completions") -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        data = content if isinstance(content, str | bytes) else json.dumps(content)
        return httpx.post(f"{self.url}{path}", content=data, headers=headers, timeout=60)


def ask(client: OpenAI, content: Any = "blue boat", model: str = "one", **more: Any) -> Any:
    """The answer to one message, or to several."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return client.chat.completions.create(model=model, messages=messages, **more)


def told(answer: Any) -> dict[str, Any]:
    """What an answer has beside OpenAI's own fields."""
    found: dict[str, Any] = answer.model_extra["ml_rag"]
    return found


@pytest.fixture
def gate(db: Database) -> Iterator[str]:
    """A DSN as a role that may be asker and tenant, and nothing else."""
    owner, name = db.connect(), sql.Identifier(db.role("stranger"))
    roles = sql.SQL(", ").join([sql.Identifier(db.role("asker")), sql.Identifier(db.role("tenant"))])
    owner.execute(sql.SQL("ALTER ROLE {} LOGIN NOINHERIT PASSWORD 'made for a test'").format(name))
    owner.execute(sql.SQL("GRANT {} TO {}").format(roles, name))
    try:
        yield make_conninfo(db.dsn, dbname=db.name, user=db.role("stranger"), password="made for a test")
    finally:
        owner.execute(sql.SQL("REVOKE {} FROM {}").format(roles, name))
        owner.execute(sql.SQL("ALTER ROLE {} NOLOGIN INHERIT").format(name))


@pytest.fixture
def boats(db: Database, gate: str) -> Iterator[Gateway]:
    texts = ["red boat", "blue boat", "green boat"]
    rows = [("https://example.org/boats", 1, n, text, fake_embedding(text)) for n, text in enumerate(texts, 1)]
    create_store(
        db.connect(), "public.boats", [*rows, ("/srv/house.pdf", 2, 1, "house", fake_embedding("house"))], "vector(16)"
    )
    tokens = {digest(f"token of {role}"): db.role(role) for role in ("asker", "tenant")}
    models = {
        "one": {"n_citations": 1},
        "houses": {"n_citations": 1, "filters": {"document_name": "/srv/house.pdf"}},
        "wrong": {"no_such_option": 1},
        "strict": {"retrieval_options": {"max_distance": 0}, "abstain": False, "filters": {"n": 99}},
        "bounded": {"n_citations": 1, "model_options": {"max_tokens": 2}},
    }
    config = Config(tokens, models)
    with gateway_of(gate, config) as url:
        yield Gateway(url, gate, config)


def test_an_answer_with_its_citations(boats: Gateway) -> None:
    answer = ask(boats.client())
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert answer.model == "one"
    (annotation,) = choice.message.annotations or []
    end = len(choice.message.content)
    assert annotation.type == "url_citation"
    assert annotation.url_citation.url == "https://example.org/boats"
    assert (annotation.url_citation.start_index, annotation.url_citation.end_index) == (end, end)
    assert [c["segment"] for c in told(answer)["citations"]] == ["blue boat"]


def test_what_somebody_writes_into_a_row_fails_no_answer(db: Database, boats: Gateway) -> None:
    owner = db.connect()
    for page, shown in [
        ("9" * 400 + ".5", "9" * 400 + ".5"),
        ("[" * 970 + "]" * 970, ANY),
        ("[" * 3000 + "]" * 3000, ANY),
    ]:
        owner.execute("UPDATE boats SET metadata = %s::jsonb", (f'{{"page": {page}}}',))
        (citation,) = told(ask(boats.client()))["citations"]
        assert citation["page"] == shown
        said = boats.post({**ASK, "stream": True}).text
        assert '"error"' not in said
        assert "Infinity" not in said
        assert boats.post({"model": "one", "input": "blue boat"}, path="/responses").status_code == 200


def test_a_name_without_end_holds_up_nobody(db: Database, boats: Gateway) -> None:
    db.connect().execute("UPDATE boats SET document_name = 'https://example.org/' || repeat('[ ', 2000000)")
    content = boats.post(ASK).content
    assert len(content) < 100_000
    began = time.process_time()
    (source,), _ = sources([{"document_name": "https://example.org/" + "[ " * 2_000_000}], None)
    assert time.process_time() - began < 0.5
    assert source.url
    assert source.url.startswith("https://example.org/%5B%20")


def test_a_model_is_a_preset(boats: Gateway) -> None:
    client = boats.client()
    assert [model.id for model in client.models.list()] == ["one", "houses", "wrong", "strict", "bounded"]
    with pytest.raises(openai.NotFoundError, match="there are the models one, houses"):
        ask(client, model="gpt")


def test_a_stream(boats: Gateway) -> None:
    whole = ask(boats.client())
    chunks = list(ask(boats.client(), stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 3
    assert len({chunk.id for chunk in chunks}) == 1
    noted = [chunk for chunk in chunks if chunk.choices[0].delta.model_extra]
    assert noted[0].choices[0].delta.model_extra == {
        "annotations": [annotation.to_dict() for annotation in whole.choices[0].message.annotations or []]
    }


SLOW = {"model_options": {"model_id": "fake-generate-slow", "max_tokens": 30}}


@dataclass
class Streamed:
    """A stream as it came: when each piece of text did, seconds from the beginning, and what was said at the end."""

    pieces: list[tuple[float, str]]
    finish: str | None
    usage: Any
    rest: Any

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in self.pieces)


def streamed(client: OpenAI, question: str, model: str = "one") -> Streamed:
    began, found = time.monotonic(), Streamed([], None, None, None)
    for chunk in ask(client, question, model, stream=True, stream_options={"include_usage": True}):
        found.usage = chunk.usage or found.usage
        found.rest = (chunk.model_extra or {}).get("ml_rag") or found.rest
        for choice in chunk.choices:
            found.finish = choice.finish_reason or found.finish
            if choice.delta.content:
                found.pieces.append((time.monotonic() - began, choice.delta.content))
    return found


def writing(boats: Gateway, **config: Any) -> AbstractContextManager[OpenAI]:
    """The client of a gateway whose model takes 50 ms a token."""
    models = {
        "one": {"n_citations": 4, **SLOW, "prompt": {"citation_style": "numbered"}},
        "checked": {"n_citations": 4, **SLOW, "grounding": {}},
    }
    return boats.other(models, **config)


def running(model_server: str) -> bool:
    """Whether the slow model is at work."""
    transport = httpx.HTTPTransport(uds=model_server.removeprefix("unix:"))
    with httpx.Client(transport=transport) as client:
        return 'ml_rag_running{model="fake-generate-slow"} 1.0' in client.get("http://models/metrics").text


def test_a_text_comes_as_the_model_writes_it(boats: Gateway) -> None:
    question = "which boat [1], [2], [3], [4] and [9] is it?"
    with writing(boats, document_url="https://files.example.org/{file_name}") as client:
        whole, found = ask(client, question), streamed(client, question)
    assert found.text == whole.choices[0].message.content
    # the four segments are of two documents, and there is no ninth
    assert {"[1]", "[2]"} == set(re.findall(r"\[\d\]", found.text))
    assert len(found.pieces) > 6
    assert found.pieces[0][0] < found.pieces[-1][0] - 0.5
    assert found.finish == whole.choices[0].finish_reason == "length"
    assert found.usage.to_dict() == whole.usage.to_dict()
    assert found.usage.completion_tokens == 30
    assert found.rest == told(whole)


def test_the_text_of_a_stream_is_counted_with_its_tokens(boats: Gateway) -> None:
    def counted() -> tuple[int, int]:
        query = (
            "SELECT coalesce(sum(calls), 0)::int, coalesce(sum(generated_tokens), 0)::int FROM ml_rag.stats"
            " WHERE routine = 'ml_rag' AND stage = 'generate'"
        )
        role = boats.config.tokens[digest("token of asker")]
        with psycopg.connect(boats.dsn, options=f"-c role={role}") as connection:
            return connection.execute(query).fetchone() or (0, 0)

    with writing(boats) as client:
        calls, tokens = counted()
        assert streamed(client, "boat").usage.completion_tokens == 30
    assert counted() == (calls + 1, tokens + 30)


@pytest.mark.parametrize("server", ["none", "unix:/no/such.sock", "http://127.0.0.1:1"])
def test_a_text_comes_in_one_piece_where_the_model_server_is_out_of_reach(boats: Gateway, server: str) -> None:
    with writing(boats, model_server=server) as client:
        for _ in range(2):
            found = streamed(client, "blue boat")
            assert len(found.pieces) == 1
            assert found.usage.completion_tokens == 30


def test_a_text_that_is_checked_comes_in_one_piece(boats: Gateway) -> None:
    with writing(boats) as client:
        found = streamed(client, "blue boat", "checked")
        assert len(found.pieces) == 1
        assert "grounding" in found.rest["retrieval_info"]


def test_what_is_passed_on_was_found_as_the_role_of_the_token(db: Database, boats: Gateway) -> None:
    owner = db.connect()
    owner.execute("ALTER TABLE boats ENABLE ROW LEVEL SECURITY")
    policy = sql.SQL("CREATE POLICY p ON boats USING (current_user <> {} OR segment = 'red boat')")
    owner.execute(policy.format(sql.Literal(db.role("tenant"))))
    with writing(boats) as client:
        assert "documents: 4" in streamed(client, "boat").text
        found = streamed(client.with_options(api_key="token of tenant"), "boat")
        assert "documents: 1" in found.text
        assert [citation["segment"] for citation in found.rest["citations"]] == ["red boat"]
        with pytest.raises(openai.AuthenticationError):
            streamed(client.with_options(api_key="token of nobody"), "boat")
    owner.execute("REVOKE SELECT ON boats FROM ml_rag_user")
    with writing(boats) as client, pytest.raises(openai.APIError):
        streamed(client, "boat")


def test_a_client_that_goes_away_stops_the_model(boats: Gateway, model_server: str) -> None:
    body = {"model": "one", "messages": [{"role": "user", "content": "boat"}], "stream": True}
    took = []
    with writing(boats) as client:
        for _ in range(3):  # a busy machine may hold up one of them
            headers = {"authorization": "Bearer token of asker"}
            with httpx.stream(
                "POST", f"{client.base_url}chat/completions", json=body, headers=headers, timeout=60
            ) as reply:
                lines = reply.iter_lines()
                while '"content": "fake' not in next(lines):
                    pass
                assert running(model_server)
            gone = time.monotonic()
            while running(model_server):
                assert time.monotonic() - gone < 5, "the model still writes"
                time.sleep(0.02)
            took.append(time.monotonic() - gone)
        # what it took is given back
        assert streamed(client, "boat").text
    assert min(took) < 0.2


def test_a_text_takes_no_longer_than_statement_timeout(boats: Gateway) -> None:
    bounded = replace(boats, dsn=make_conninfo(boats.dsn, options="-c statement_timeout=700"))
    with writing(bounded) as client, pytest.raises(openai.APIError, match="took too long"):
        streamed(client, "boat")


def test_an_error_of_the_model_ends_the_stream(boats: Gateway) -> None:
    failing = {"one": {"model_options": {"model_id": "fake-generate-error"}}}
    with boats.other(failing) as client, pytest.raises(openai.APIError, match="the model failed"):
        streamed(client, "boat")


def test_a_response_comes_as_the_model_writes_it(boats: Gateway) -> None:
    with writing(boats) as client:
        events = list(client.responses.create(model="one", input="boat", stream=True))
    kinds = [event.type for event in events]
    assert kinds.count("response.output_text.delta") > 10
    assert kinds[2:5] == ["response.output_item.added", "response.content_part.added", "response.output_text.delta"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text
    assert events[-1].response.usage.output_tokens == 30
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_a_stream_shows_that_it_is_alive(boats: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ml_rag.integrations.gateway.gate.ALIVE", 0.001)
    lines = boats.post({**ASK, "stream": True}).text
    assert ": the answer is being written\n\n" in lines
    assert lines.endswith("data: [DONE]\n\n")


def test_an_error_in_a_stream(boats: Gateway) -> None:
    stream = ask(boats.client(), model="wrong", stream=True)
    with pytest.raises(openai.APIError, match=r"cannot be served.*\(error [0-9a-f]{8}\)") as caught:
        list(stream)
    assert caught.value.code == "22023"


def test_earlier_messages_are_the_history(boats: Gateway) -> None:
    messages = [
        {"role": "system", "content": "Answer formally."},
        {"role": "user", "content": "house"},
        {"role": "assistant", "content": "There is one."},
        {"role": "user", "content": [{"type": "text", "text": "blue boat"}]},
    ]
    asked = question({"messages": messages, "temperature": 0.5, "stop": "x", "max_tokens": 5}, {"n_citations": 1})
    assert asked.text == "blue boat"
    assert asked.options == {
        "citation_fields": ["metadata.page", "metadata.title"],
        "n_citations": 1,
        "return_usage": True,
        "skip_generate": False,
        "model_options": {"temperature": 0.5, "stop_sequences": ["x"], "max_tokens": 5},
        "query_options": {
            "history": [{"role": "user", "content": "house"}, {"role": "assistant", "content": "There is one."}]
        },
        "prompt": {"system": "Answer formally."},
    }
    assert "query" in told(ask(boats.client(), messages))["retrieval_info"]


def test_the_preset_counts_more_than_the_client() -> None:
    preset = {"model_options": {"max_tokens": 2}, "prompt": {"system": "ours"}, "query_options": {"rewrite": False}}
    messages = [
        {"role": "developer", "content": "theirs"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    options = question({"messages": messages, "max_completion_tokens": 9, "seed": 1}, preset).options
    assert options["model_options"] == {"max_tokens": 2, "seed": 1}
    assert options["prompt"] == {"system": "ours"}
    assert options["query_options"] == {"rewrite": False, "history": [{"role": "user", "content": "a"}]}
    assert preset["query_options"] == {"rewrite": False}


def test_one_annotation_a_document_stands_where_its_marker_does() -> None:
    names = ["/a/1.pdf", "https://example.org/2", "/a/1.pdf", "/b/1.pdf"]
    citations = [{"document_name": name} for name in names]
    found, numbers = sources(citations, "https://files/{document_name}?x={file_name}")
    assert [(one.number, one.title) for one in found] == [(1, "a/1.pdf"), (2, "https://example.org/2"), (3, "b/1.pdf")]
    assert found[0].url == "https://files/a/1.pdf?x=1.pdf"
    assert numbers == [1, 2, 1, 3]
    text = renumbered("One [1], both [3, 2], [9] and [3, 1].", numbers)
    assert text == "One [1], both [1, 2], [9] and [1]."
    places = [(one["title"], one["start_index"], one["end_index"]) for one in url_citations(text, found)]
    assert places == [("a/1.pdf", 4, 7), ("https://example.org/2", 14, 20), ("b/1.pdf", len(text), len(text))]
    # those without an address come last, so that the numbers of the others are the places of their annotations
    found, numbers = sources(citations, None)
    assert [(one.title, one.url is None) for one in found] == [
        ("https://example.org/2", False), ("a/1.pdf", True), ("b/1.pdf", True),
    ]  # fmt: skip
    assert numbers == [2, 1, 2, 3]
    assert sources([], None) == ([], [])


def test_pages_are_told_with_their_documents() -> None:
    named = [("/a/1.pdf", 3), ("/a/1.pdf", None), ("/a/1.pdf", 2), ("/a/3", "7"), ("/a/3", True)]
    named.append(("https://example.org/2", 7))
    citations = [{"document_name": name, "page": page} for name, page in named]
    found, _ = sources(citations, None)
    assert [(one.label, one.pages) for one in found] == [
        ("https://example.org/2, page 7", [7]), ("1.pdf, pages 2, 3", [2, 3]), ("3", []),
    ]  # fmt: skip
    assert found[0].line == "- [1] https://example.org/2, page 7"
    assert url_citations("", found)[0]["title"] == "https://example.org/2, page 7"


def test_documents_are_called_by_their_titles() -> None:
    named = {"/a/1.pdf": "Leave [of]\n <absence>", "https://example.org/2": "Hotels", "/a/3": " ", "/a/4": 7}
    citations = [{"document_name": name, "title": title, "page": 2} for name, title in named.items()]
    found, _ = sources(citations, "https://files/{file_name}")
    assert [one.line for one in found] == [
        "- [1] Leave (of) (absence) (1.pdf), page 2: https://files/1.pdf",
        "- [2] Hotels, page 2: https://example.org/2",
        "- [3] 3, page 2: https://files/3",
        "- [4] 4, page 2: https://files/4",
    ]
    assert url_citations("", found)[0]["title"] == "Leave (of) (absence) (1.pdf), page 2"
    assert sources(citations, None)[0][1].line == "- [2] Leave (of) (absence) (1.pdf), page 2"
    (long,), _ = sources([{"document_name": "a", "title": "x" * 1000}], None)
    assert long.document_title == "x" * 200


def test_a_name_that_begins_as_an_address_is_nothing_else() -> None:
    (found,), _ = sources([{"document_name": "https://x/a b\n![c](https://evil/d)<e>`f`"}], None)
    assert found.url == "https://x/a%20b%0A!%5Bc%5D(https://evil/d)%3Ce%3E%60f%60"
    assert found.line == f"- [1] https://x/a b !(c)(https://evil/d)(e)'f': {found.url}"


def test_documents_are_called_by_what_tells_them_apart() -> None:
    names = ["/x/a/1.pdf", "/y/a/1.pdf", "C:\\docs\\2.pdf", "https://example.org/a/b", "3.pdf", "/", ""]
    assert titles(names) == dict(
        zip(names, ["x/a/1.pdf", "y/a/1.pdf", "2.pdf", names[3], "3.pdf", "document", "document"], strict=True)
    )
    # nothing in a name becomes a link, a picture or a line of its own
    assert titles(["/a/![x](y)\n- <b>`"]) == {"/a/![x](y)\n- <b>`": "!(x)(y) - (b)'"}


def test_names_of_very_many_folders_hold_up_nobody() -> None:
    began = time.monotonic()
    names = [f"{first}/{'a/' * 500_000}d" for first in "xyz"]
    assert titles(names) == dict(zip(names, names, strict=True))
    assert time.monotonic() - began < 10


async def test_a_marker_without_end_holds_up_nobody() -> None:
    document = {
        "citations": [{"document_name": "a"}, {"document_name": "b"}], "retrieval_info": {"citation_style": "numbered"},
    }  # fmt: skip
    pieces = Pieces(Config({}))
    pieces.queue = asyncio.Queue()
    text = f"[{'1, ' * 100_000}1] [{'1, ' * 99}2]"
    began = time.monotonic()
    for piece in re.findall(".{1,3}", text):
        await pieces.add(document, piece)
    assert time.monotonic() - began < 10
    # what was passed on is the beginning of what there is at the end
    _, numbers = sources(document["citations"], None)
    assert renumbered(text, numbers).startswith(pieces.text)
    assert pieces.text.endswith("1] [1, 2]")


async def test_a_piece_that_comes_while_a_client_is_slow_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ml_rag.integrations.gateway.gate.ALIVE", 0.01)
    pieces, said = Pieces(Config({})), []
    written = asyncio.Event()
    async for piece in coming(asyncio.create_task(written.wait()), pieces):
        said.append(piece)
        if not piece and not written.is_set():
            for text in ("one", "two"):
                await pieces.queue.put(text)
                await asyncio.sleep(0)
            written.set()
    assert [piece for piece in said if piece] == ["one", "two"]


def test_a_document_without_an_address_is_named_under_the_answer(boats: Gateway) -> None:
    answer = ask(boats.client(), "boat", "houses")
    text = answer.choices[0].message.content or ""
    assert text.endswith("\n\nSources:\n- [1] house.pdf")
    assert answer.choices[0].message.annotations == []
    # and comes back as the model wrote it
    assert without_list(text) == text.removesuffix("\n\nSources:\n- [1] house.pdf")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}, *ASK["messages"]]
    history = question({"messages": messages}, {}).options["query_options"]["history"]
    assert history[1]["content"] == without_list(text)
    more = told(answer)
    assert more["sources"] == [
        {"number": 1, "title": "house.pdf", "url": None, "pages": [], "document_title": None}
    ]  # fmt: skip
    assert [(one["document_name"], one["source"]) for one in more["citations"]] == [("house.pdf", 1)]
    assert "/srv" not in answer.to_json()


@pytest.mark.parametrize(
    ("settings", "model", "listed", "url"),
    [
        ({"document_url": "https://files/{document_name}"}, "houses", "", "https://files/srv/house.pdf"),
        ({"document_url": "https://files/{file_name}", "citations": "text"}, "houses",
         "- [1] house.pdf: https://files/house.pdf", "https://files/house.pdf"),
        ({"citations": "text"}, "one", "- [1] https://example.org/boats", "https://example.org/boats"),
        ({"citations": "annotations"}, "houses", "", None),
    ],
)  # fmt: skip
def test_how_citations_are_shown_is_a_setting(
    boats: Gateway, settings: dict[str, Any], model: str, listed: str, url: str | None
) -> None:
    with boats.other(**settings) as client:
        message = ask(client, "boat", model).choices[0].message
    assert (message.content or "").partition("\n\nSources:\n")[2] == listed
    assert [one.url_citation.url for one in message.annotations or []] == ([url] if url else [])


@pytest.mark.parametrize(
    "choice", [None, "none", "auto", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}]
)
def test_tools_that_nothing_demands_are_left_aside(boats: Gateway, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    answer = ask(boats.client(), tools=tools, **({} if choice is None else {"tool_choice": choice}))
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_a_history_with_calls_of_tools(boats: Gateway) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "house"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "assistant", "content": "There is one."},
        {"role": "user", "content": "boat"},
    ]
    history = question({"messages": messages}, {}).options["query_options"]["history"]
    assert [turn["content"] for turn in history] == ["house", "There is one."]
    assert ask(boats.client(), messages)


OPEN_WEBUI = "### Task:\nSuggest a title.\n### Chat History:\n<chat_history>\nblue boat\n</chat_history>"


def test_a_task_of_a_program_is_no_question(boats: Gateway) -> None:
    answer = ask(boats.client(), OPEN_WEBUI)
    # the model alone
    assert (answer.choices[0].message.content or "").startswith("fake answer to: ### Task:")
    assert answer.choices[0].message.annotations == []
    assert told(answer)["vector_store"] == []
    # what brings documents of its own is a question about them
    own = "### Task:\nAnswer.\n<context>boat</context>\nWhich boat?"
    assert ask(boats.client(), own).choices[0].message.annotations
    with boats.other(tasks=[]) as client:
        assert ask(client, OPEN_WEBUI).choices[0].message.annotations


#: the fake models, of which one is as small as the default model
SMALL = """
[models.small]
task = "generate"
engine = "fake"
context_tokens = 4096
brief = true

[models.narrow]
task = "generate"
engine = "fake"
context_tokens = 1000
"""


def test_what_only_quotes_is_not_asked_for_a_title(boats: Gateway) -> None:
    models = {"quotes": {"n_citations": 1, "model_options": {"model_id": "extractive"}}}
    with boats.other(models) as client:
        asked = [{"role": "system", "content": "Be short."}, *ASK["messages"]]
        assert ask(client, OPEN_WEBUI, "quotes").choices[0].message.content == "{}"
        wanted = {"temperature": 0.5, "stop": "x", "seed": 1, "max_tokens": 900}
        assert ask(client, asked, "quotes", **wanted).choices[0].message.content == "blue boat"
        # a format is obeyed or refused, for a task too
        for messages in (OPEN_WEBUI, asked):
            with pytest.raises(openai.BadRequestError):
                ask(client, messages, "quotes", response_format={"type": "json_object"})


def test_settings_of_the_database_leave_an_answer_and_a_task(db: Database, boats: Gateway) -> None:
    settings = {"skip_generate": True, "min_support": 1, "abstain": True, "retrieval_options": {"max_distance": 2}}
    db.connect().execute("SELECT ml_rag.configure('default_options', %s)", (json.dumps(settings),))
    titled, answer = ask(boats.client(), OPEN_WEBUI), ask(boats.client())
    assert (titled.choices[0].message.content or "").startswith("fake answer to: ### Task:")
    # the model echoes the question, which the citation does not support
    assert (answer.choices[0].message.content or "").startswith("I do not know")
    assert told(answer)["retrieval_info"]["grounding"].keys() == {"support_score"}


def test_null_of_a_preset_or_a_setting_is_what_is_built_in(db: Database, boats: Gateway) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        *({"role": r, "content": "a"} for r in ("user", "assistant")),
    ]
    nulls = {"model_options": None, "prompt": None, "query_options": None}
    owner = db.connect()
    owner.execute("SELECT ml_rag.configure('default_options', %s)", (json.dumps(nulls),))
    plain = {"model_options": {"json_schema": None}}
    owner.execute("SELECT ml_rag.create_preset('plain', %s)", (json.dumps(plain),))
    with boats.other({"one": {"n_citations": 1}, "plain": {"preset": "plain", "n_citations": 1}}) as client:
        for model in ("one", "plain"):
            assert ask(client, model=model).choices[0].message.content.startswith("fake answer to:")
            said = ask(client, [*messages, *ASK["messages"]], model, max_tokens=2).choices[0].message  # type: ignore[misc]
            assert (said.content, said.refusal) == ("fake answer", None)
        schema = {"type": "json_object"}
        assert ask(client, model="plain", response_format=schema).choices[0].finish_reason == "stop"


def test_a_model_takes_a_preset_of_the_database(db: Database, boats: Gateway) -> None:
    options = {"n_citations": 2, "citation_fields": ["rank"], "model_options": {"max_tokens": 2}}
    owner = db.connect()
    owner.execute("SELECT ml_rag.create_preset('short', %s)", (json.dumps(options),))
    models = {"short": {"preset": "short"}, "one": {"preset": "short", "n_citations": 1}, "none": {"preset": "none"}}
    with boats.other(models) as client:
        for model, count in (("short", 2), ("one", 1)):
            # what it says counts more than the client
            answer = ask(client, model=model, max_tokens=50)
            assert answer.choices[0].message.content == "fake answer"
            assert [one["rank"] for one in told(answer)["citations"]] == list(range(1, count + 1))
        assert client.responses.create(model="one", input="boat").output_text == "fake answer"
        with pytest.raises(openai.BadRequestError, match="cannot be served"):
            ask(client, model="none")
        owner.execute("SELECT ml_rag.create_preset('short', '{}')")
        assert client.responses.create(model="short", input="boat").output_text.startswith("fake answer to: boat")


def test_what_each_sentence_stands_on(db: Database, boats: Gateway) -> None:
    texts = {
        "https://example.org/hotels": "Hotels are free for staff.",
        "/srv/trains.pdf": "Trains are free for staff.",
    }
    rows = [(name, n, 1, text, fake_embedding(text)) for n, (name, text) in enumerate(texts.items(), 1)]
    owner = db.connect()
    create_store(owner, "public.travel", rows, "vector(16)")
    owner.execute("""UPDATE public.travel SET metadata = '{"page": 7, "title": "All trains"}' WHERE document_id = 2""")
    sentences = {"model_options": {"model_id": "extractive", "max_sentences": 10}}
    options: Any = {"vector_store": ["public.travel"], "n_citations": 2, "grounding": {}, **sentences}
    models = {"plain": options, "numbered": {**options, "prompt": {"citation_style": "numbered"}}}
    with boats.other(models) as client:
        for model in models:
            answer = ask(client, "What is free for staff?", model)
            text, more = answer.choices[0].message.content, told(answer)
            assert text.endswith("\n\nSources:\n- [2] All trains (trains.pdf), page 7")
            assert [one["title"] for one in more["citations"] if one["page"]] == ["All trains"]
            assert {one["document_name"]: one["page"] for one in more["citations"]} == {
                "https://example.org/hotels": None, "trains.pdf": 7,
            }  # fmt: skip
            grounding = more["retrieval_info"]["grounding"]
            assert grounding["support_score"] == 1
            said = {text[one["start_pos"] : one["end_pos"]]: one["sources"] for one in grounding["claims"]}
            marked = model == "numbered"
            assert said == {f"{texts[name]}{f' [{n}]' if marked else ''}": [n] for n, name in enumerate(texts, 1)}
            assert all(one["claim_text"] in said for one in grounding["claims"])
            # the document is cited where its marker is, else at the sentence that it supports
            (annotation,) = answer.choices[0].message.annotations or []
            place = annotation.url_citation
            cited = "[1]" if marked else "Hotels are free for staff."
            assert text[place.start_index : place.end_index] == cited


def test_a_number_of_a_document_is_no_marker(db: Database, boats: Gateway) -> None:
    said = "Whales sing at night [2]."
    texts = {"https://example.org/a": said, "https://example.org/b": "Seals are whales' neighbours."}
    rows = [(name, n, 1, text, fake_embedding(text)) for n, (name, text) in enumerate(texts.items(), 1)]
    create_store(db.connect(), "public.sea", rows, "vector(16)")
    options: Any = {
        "vector_store": ["public.sea"], "n_citations": 2, "model_options": {"model_id": "extractive"}, "grounding": {},
    }  # fmt: skip
    with boats.other({"sea": options}) as client:
        message = ask(client, "When do whales sing at night?", "sea").choices[0].message
    assert message.content == said
    places = {one.url_citation.url: one.url_citation for one in message.annotations or []}
    first, second = (places[name] for name in texts)
    assert said[first.start_index : first.end_index] == said
    assert second.start_index == len(said)


def test_numbers_in_json_are_not_markers() -> None:
    asked = question({"messages": ASK["messages"], "response_format": {"type": "json_object"}}, {})
    names = ("/a/1.pdf", "https://example.org/2")
    document = {
        "text": '{"color": [1]}', "citations": [{"document_name": name} for name in names], "retrieval_info": {},
    }  # fmt: skip
    answer = Answer.of(asked, document, Config({digest("x"): "a"}))
    assert answer.text == '{"color": [1]}'
    assert [(one["start_index"], one["end_index"]) for one in answer.annotations] == [(14, 14)]


def test_a_small_model_is_not_asked_for_a_title(db: Database, boats: Gateway, reachable_dir: Path) -> None:
    socket_ = reachable_dir / "small.sock"
    config = '[server]\nsocket_mode = "0666"\n' + SMALL
    with running_server(fake_models=True, socket=socket_, config=config):
        db.connect().execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{socket_}",))
        models = {name: {"n_citations": 1, "model_options": {"model_id": name}} for name in ("small", "narrow")}
        with boats.other(models) as client:

            def said(model: str, content: str, **more: Any) -> Any:
                return ask(client, content, model, **more).choices[0].message.content

            assert said("small", OPEN_WEBUI) == "{}"
            assert said("narrow", OPEN_WEBUI).startswith("fake answer to: ### Task:")
            assert said("small", "boat").startswith("fake answer to: boat")
            # more than the whole context
            assert said("narrow", "boat", max_tokens=4000).startswith("fake answer to: boat")


SCHEMA = {
    "type": "object",
    "properties": {"color": {"type": "string", "minLength": 2}},
    "required": ["color"],
    "additionalProperties": False,
}


def test_a_format_that_is_asked_for(boats: Gateway) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "boat", "strict": True, "schema": SCHEMA}}

    def said(client: OpenAI, model: str, wanted: Any) -> Any:
        return ask(client, "boat", model, response_format=wanted).choices[0].message

    assert json.loads(said(boats.client(), "houses", wanted).content) == {"color": "xx"}
    assert json.loads(said(boats.client(), "houses", {"type": "json_object"}).content) == {}
    assert "fake answer" in said(boats.client(), "one", {"type": "text"}).content
    # an abstention, which no schema describes
    nothing = {**boats.config.models, "none": {"abstain": True, "abstain_text": "Unknown.", "filters": {"n": 99}}}
    with boats.other(nothing) as client:
        message = said(client, "none", {"type": "json_object"})
        assert (message.content, message.refusal) == (None, "Unknown.")
        assert ask(client, model="none").usage.total_tokens == 0


def test_what_an_answer_took_and_why_it_ended(boats: Gateway) -> None:
    client = boats.client()
    answer = ask(client)
    assert answer.usage.prompt_tokens > 10
    assert answer.usage.completion_tokens == len(answer.choices[0].message.content.split())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    short = ask(client, model="bounded")
    assert (short.choices[0].finish_reason, short.choices[0].message.content) == ("length", "fake answer")
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert (chunks[-1].choices, chunks[-1].usage) == ([], answer.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in ask(client, stream=True))


def test_parameters_are_brought_to_what_the_engine_takes() -> None:
    wanted = {"frequency_penalty": -2, "presence_penalty": 2.0, "seed": -1, "max_tokens": 7.0, "stop": []}
    options = question({"messages": ASK["messages"], "top_p": None, **wanted}, {}).options
    expected = {"frequency_penalty": 0, "presence_penalty": 1, "seed": 2**32 - 1, "max_tokens": 7}
    assert options["model_options"] == expected


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic token of asker", "token of asker"])
def test_no_answer_without_a_token(boats: Gateway, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    for answer in (
        httpx.post(f"{boats.url}/chat/completions", json=ASK, headers=headers),
        httpx.get(f"{boats.url}/models", headers=headers),
    ):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    # nor is the hash one
    sha256 = next(iter(boats.config.tokens))
    assert boats.post(b"{}", sha256).status_code == 401


def test_each_token_has_the_rights_of_its_role(db: Database, boats: Gateway) -> None:
    owner = db.connect()
    owner.execute("ALTER TABLE boats ENABLE ROW LEVEL SECURITY")
    for role, text in {"asker": "red boat", "tenant": "green boat"}.items():
        name = sql.Identifier(db.role(role))
        owner.execute(
            sql.SQL("CREATE POLICY {0} ON boats TO {0} USING (segment = {1})").format(name, sql.Literal(text))
        )
    # side by side on the same connections, and again
    for _ in range(2):
        for role, text in {"asker": "red boat", "tenant": "green boat"}.items():
            assert [c["segment"] for c in told(ask(boats.client(f"token of {role}")))["citations"]] == [text]
    owner.execute("REVOKE SELECT ON boats FROM ml_rag_user")
    with pytest.raises(openai.UnprocessableEntityError, match="nothing was found"):
        ask(boats.client())


@pytest.mark.parametrize(("model", "status", "state"), [("wrong", 400, "22023"), ("strict", 422, "P0002")])
def test_errors_have_their_sqlstate_and_the_log_the_rest(
    boats: Gateway, model: str, status: int, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(boats.client(), model=model)
    assert (caught.value.status_code, caught.value.code) == (status, state)
    number = re.search(r"\(error ([0-9a-f]{8})\)", caught.value.message)
    assert number is not None
    # nothing of options, stores and roles
    assert "no_such_option" not in caught.value.message
    assert "public." not in caught.value.message
    (logged,) = [record.getMessage() for record in caplog.records if record.name == "ml_rag.gateway"]
    assert logged.startswith(f"error {number[1]}: ")
    assert f"(SQLSTATE {state})" in logged


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "boat"},
        {"messages": ["boat"]},
        {"messages": [{"role": "assistant", "content": "boat"}]},
        {"messages": [{"role": "other", "content": "x"}, {"role": "user", "content": "boat"}]},
        {"messages": [{"role": "user", "content": "boat"}, {"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": ""}]},
        {**ASK, "n": 2},
        {**ASK, "tool_choice": "required"},
        {**ASK, "tool_choice": {"type": "function", "function": {"name": "look"}}},
        {**ASK, "function_call": {"name": "look"}},
        {**ASK, "temperature": -1},
        {**ASK, "temperature": True},
        {**ASK, "temperature": 10**400},
        {**ASK, "tool_choice": {"type": "allowed_tools", "allowed_tools": "all"}},
        {**ASK, "top_p": 1.1},
        {**ASK, "max_tokens": "many"},
        {**ASK, "max_tokens": 0},
        {**ASK, "max_tokens": 1.5},
        {**ASK, "stop": [1]},
        {**ASK, "response_format": "json"},
        {**ASK, "response_format": {"type": "json_schema"}},
        {**ASK, "response_format": {"type": "grammar"}},
        # not JSON
        b"", b"{", b"[]", b"\xff", b"[" * 100_000,
        # more of a request that PostgreSQL cannot hold
        r'"messages": [{"role": "user", "content": "a\u0000b"}]',
        r'"messages": [{"role": "user", "content": "a\ud800b"}]',
        r'"messages": [{"role": "user", "content": "a\ud800b"}, {"role": "user", "content": "boat"}]',
        r'"stop": "\u0000"',
        r'"stop": "\ud800"',
        '"temperature": NaN',
        '"seed": 1e999',
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused(boats: Gateway, body: dict[str, Any] | str | bytes) -> None:
    if isinstance(body, str):
        body = f'{{"model": "one", "messages": [{{"role": "user", "content": "boat"}}], {body}}}'.encode()
    answer = boats.post(body if isinstance(body, bytes) else {"model": "one", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:x"}}], "an image"),
        ([{"type": "input_audio", "input_audio": {}}], "audio"),
        ([{"type": ["x"]}], "a part that is not text"),
    ],
)
def test_what_is_not_text_is_refused_as_what_it_is(boats: Gateway, content: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"a message has {words}; only text is read") as caught:
        ask(boats.client(), [{"role": "user", "content": content}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/models", 405),
        ("DELETE", "/v1/models/one", 405),
        ("POST", "/v1/audio/speech", 404),
    ],
)
def test_every_error_is_an_object_of_openai(boats: Gateway, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, boats.url.removesuffix("/v1") + path, headers={"origin": "https://evil.example"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] == f"{method} {path} is not served here"
    assert ("allow" in answer.headers) == (status == 405)
    assert "access-control-allow-origin" not in answer.headers


def test_what_nothing_foresaw_is_said_with_an_id(
    boats: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ml_rag.integrations.gateway.gate.asked", lambda *_: 1 / 0)
    answer = boats.post(ASK)
    assert answer.status_code == 500
    assert re.fullmatch(r"the answer failed \(error [0-9a-f]{8}\)", answer.json()["error"]["message"])
    assert "ZeroDivisionError" in caplog.text
    # in a stream too
    assert "the answer failed (error " in boats.post({**ASK, "stream": True}).text


def test_one_model_and_health(boats: Gateway) -> None:
    assert boats.client().models.retrieve("one").id == "one"
    with pytest.raises(openai.NotFoundError):
        boats.client().models.retrieve("none")
    assert httpx.get(f"{boats.url}/models/one").status_code == 401
    assert httpx.get(boats.url.removesuffix("/v1") + "/health").json() == {"status": "ok"}


def test_a_page_asks_from_a_listed_origin(boats: Gateway) -> None:
    config = Config(boats.config.tokens, boats.config.models, origins=["https://chat.example.org"])
    with gateway_of(boats.dsn, config) as url:
        for origin, allowed in (("https://chat.example.org", True), ("https://evil.example", False)):
            asking = {"origin": origin, "access-control-request-method": "POST"}
            asking["access-control-request-headers"] = "authorization, content-type, x-stainless-os"
            before = httpx.options(f"{url}/chat/completions", headers=asking)
            headers = {"authorization": "Bearer token of asker", "origin": origin}
            answer = httpx.post(f"{url}/chat/completions", json=ASK, headers=headers, timeout=60)
            assert answer.status_code == 200
            for response in (before, answer):
                assert response.headers.get("access-control-allow-origin") == (origin if allowed else None)
            assert before.is_success == allowed
            if not allowed:
                assert before.json()["error"]["type"] == "invalid_request_error"
                assert before.headers["content-type"] == "application/json"


def test_embeddings(boats: Gateway) -> None:
    client, texts = boats.client(), ["blue boat", "house"]
    for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        made = client.embeddings.create(model="fake-embed", input=texts, **form)  # type: ignore[arg-type]
        assert [one.index for one in made.data] == [0, 1]
        for one, text in zip(made.data, texts, strict=True):
            vector = one.embedding
            if isinstance(vector, str):  # asked for, and not decoded by the client
                vector = list(struct.unpack("<16f", base64.b64decode(vector)))
            assert vector == pytest.approx(fake_embedding(text))
    assert len(client.embeddings.create(model="fake-embed", input="one").data) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": "no-such", "input": "x"}, "there are the models fake-embed"),
        ({"model": "fake-generate", "input": "x"}, "there are the models fake-embed"),
        ({"input": "x"}, "must name a model"),
        ({"model": "fake-embed"}, "must be text that is not empty"),
        ({"model": "fake-embed", "input": []}, "must be text that is not empty"),
        ({"model": "fake-embed", "input": ["x", " "]}, "must be text that is not empty"),
        ({"model": "fake-embed", "input": [1, 2]}, "tokens are not read"),
        ({"model": "fake-embed", "input": ["x"] * 2049}, "at most 2048 texts"),
        ({"model": "fake-embed", "input": "x\0"}, "characters that text cannot hold"),
        ({"model": "fake-embed\0", "input": "x"}, "characters that text cannot hold"),
        ({"model": "fake-embed", "input": "x", "dimensions": 0}, "a whole number from 1"),
        ({"model": "fake-embed", "input": "x", "dimensions": 8}, "does not take this"),
        ({"model": "fake-embed", "input": "x", "encoding_format": "int8"}, '"float" or "base64"'),
    ],
)
def test_embeddings_that_are_refused(boats: Gateway, body: dict[str, Any], words: str) -> None:
    answer = boats.post(body, path="/embeddings")
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_rerank(boats: Gateway) -> None:
    body = {"model": "fake-rerank", "query": "blue boat", "documents": ["house", {"text": "blue boat"}, "red boat"]}

    def ranked(**more: Any) -> httpx.Response:
        return boats.post({**body, **more}, path="/rerank")

    results = ranked().json()["results"]
    assert [(one["index"], one["relevance_score"]) for one in results] == [(1, 1.0), (2, 0.5), (0, 0.0)]
    (best,) = ranked(top_n=1, return_documents=True).json()["results"]
    assert best["document"] == {"text": "blue boat"}
    by_words_too = ranked(model="hybrid").json()["results"]
    assert [one["index"] for one in by_words_too] == [1, 2, 0]
    for wrong in ({"query": ""}, {"documents": []}, {"documents": ["x"] * 201}, {"top_n": 0}, {"model": "fake-embed"}):
        refused = ranked(**wrong)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["type"] == "invalid_request_error"


def test_responses(boats: Gateway) -> None:
    client = boats.client()
    made = client.responses.create(model="one", input="blue boat", instructions="Be short.")
    assert made.status == "completed"
    assert made.output_text
    (annotation,) = made.output[0].content[0].annotations  # type: ignore[union-attr]
    assert (annotation.type, annotation.url) == ("url_citation", "https://example.org/boats")
    assert made.usage is not None
    assert made.usage.output_tokens == len(made.output_text.split())
    messages: Any = [
        {"role": "user", "content": "house"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "There is one."}]},
        {"type": "reasoning", "summary": []},
        {"role": "user", "content": [{"type": "input_text", "text": "blue boat"}]},
    ]
    with client.responses.stream(model="one", input=messages) as stream:
        events = [event.type for event in stream]
        whole = stream.get_final_response()
    assert events[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert events.count("response.output_text.annotation.added") == 1
    assert events[-1] == "response.completed"
    assert whole.output_text
    bounded = client.responses.create(model="bounded", input="boat")
    assert bounded.status == "incomplete"
    assert bounded.incomplete_details is not None
    assert bounded.incomplete_details.reason == "max_output_tokens"
    wanted: Any = {"format": {"type": "json_schema", "name": "boat", "schema": SCHEMA, "strict": True}}
    assert json.loads(client.responses.create(model="one", input="boat", text=wanted).output_text) == {"color": "xx"}
    for wrong in ({"input": 1}, {"previous_response_id": "resp_1"}, {"tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="one", **{"input": "x", **wrong})  # type: ignore[call-overload]
    with client.responses.create(model="wrong", input="x", stream=True) as failing:
        last = list(failing)[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "cannot be served" in last.response.error.message


def test_a_request_is_bounded(boats: Gateway) -> None:
    def padded(size: int) -> bytes:
        body = b'{"model": "one", "messages": [{"role": "user", "content": "boat"}]}'
        return body + b" " * (size - len(body))

    assert boats.post(padded(BODY)).status_code == 200
    assert boats.post(padded(BODY + 1)).status_code == 413
    # without a token not even the body is read
    assert boats.post(padded(BODY + 1), "wrong").status_code == 401


@pytest.mark.parametrize("is_tcp", [False, True])
def test_a_client_that_goes_away_ends_the_statement(db: Database, boats: Gateway, *, is_tcp: bool) -> None:
    """By TCP the request to cancel a statement takes a while, in which it must not be given up."""
    owner = db.connect()
    running = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ml-rag gateway' AND state = 'active'"
    locking = db.connect()  # of its own: in a transaction pg_stat_activity stands still
    locking.execute("BEGIN")
    locking.execute("LOCK TABLE boats IN ACCESS EXCLUSIVE MODE")
    stores = Config(boats.config.tokens, {"one": {"vector_store": ["public.boats"]}})
    with by_tcp(boats.dsn) if is_tcp else contextlib.nullcontext(boats.dsn) as dsn, gateway_of(dsn, stores) as url:
        for stream in (False, True):
            headers = {"authorization": "Bearer token of asker"}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/chat/completions", json={**ASK, "stream": stream}, headers=headers, timeout=1.5)
            wait_until(lambda: owner.execute(running).fetchone() == (0,), 20)
    locking.execute("ROLLBACK")


def test_one_token_leaves_connections_to_the_others(
    db: Database, boats: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "PATIENCE", 1.0)
    create_store(db.connect(), "public.others", [("a.txt", 1, 1, "a", fake_embedding("a"))], "vector(16)")
    models = {"slow": {"vector_store": ["public.boats"]}, "fast": {"vector_store": ["public.others"]}}
    locking = db.connect()
    locking.execute("BEGIN")
    locking.execute("LOCK TABLE boats IN ACCESS EXCLUSIVE MODE")
    with gateway_of(boats.dsn, Config(boats.config.tokens, models), connections=4) as url, ThreadPoolExecutor() as pool:

        def asked(model: str, token: str) -> httpx.Response:
            return replace(boats, url=url).post({**ASK, "model": model}, f"token of {token}")

        asking = [pool.submit(asked, "slow", "asker") for _ in range(5)]
        for refused in [done.result() for done in itertools.islice(as_completed(asking), 3)]:
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5"), refused.text
            assert "this token has 2 questions being answered" in refused.json()["error"]["message"]
        assert asked("fast", "tenant").status_code == 200
        locking.execute("ROLLBACK")
        assert sorted(one.result().status_code for one in asking) == [200, 200, 429, 429, 429]
        assert asked("slow", "asker").status_code == 200


def test_a_client_is_told_when_to_come_back(db: Database) -> None:
    connection = db.connect()
    for hint, seconds in ((", HINT = 'Try again in 73 s. Or raise max_queue.'", "73"), ("", "5")):
        with pytest.raises(psycopg.Error) as caught:
            connection.execute(f"DO $$ BEGIN RAISE EXCEPTION 'full' USING ERRCODE = '53300'{hint}; END $$")
        refused = Refused.of(caught.value)
        assert (refused.status, refused.headers) == (429, {"retry-after": seconds})


async def test_requests_of_a_token_that_wait_are_bounded(
    db: Database, boats: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "WAITING", 1)
    shares = share.Shares(["a", "b"], 2)
    give_back = await shares.take("a")
    waiting = asyncio.ensure_future(shares.take("a"))
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="this token has 1 questions"):
        await shares.take("a")
    (await shares.take("b"))()
    give_back()
    (await waiting)()
    (await shares.take("a"))()


def ended(connection: socket.socket) -> bool:
    """Whether the gateway closes a connection within some seconds."""
    connection.settimeout(5)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_connections_that_send_no_request_keep_nobody_out(boats: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is needed for them: the oldest makes room for the next, and none stays for long."""
    monkeypatch.setattr(connections, "MOST", 8)
    with gateway_of(boats.dsn, boats.config) as url, contextlib.ExitStack() as stack:
        ((host, port),) = re.findall(r"//(.*):(\d+)/", url)

        def begun(content: bytes) -> socket.socket:
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            connection.sendall(content)
            return connection

        half = [begun(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n") for _ in range(20)]
        assert httpx.post(f"{url}/chat/completions", json=ASK, timeout=60).status_code == 401
        assert ended(half[0])
        monkeypatch.setattr(connections, "PATIENCE", 0.2)
        late = begun(b"GET /health HTTP/1.1\r\n")
        used = begun(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert used.recv(17) == b"HTTP/1.1 200 OK\r\n"
        used.sendall(b"GET /health HTTP/1.1\r\n")
        assert ended(late)
        assert ended(used)
        long = begun(b"GET /health HTTP/1.1\r\nX: ")
        with contextlib.suppress(OSError):
            for _ in range(1000):
                long.sendall(b"a" * 65536)
        assert ended(long)


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def _long(request: Request) -> Response:
    return Response(b"x" * 20_000_000)


def test_connections_that_read_no_answer_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those that have read theirs, and stay."""
    monkeypatch.setattr(connections, "MOST", 8)
    lost = []

    class Watched(connections.protocol()):  # type: ignore[misc]
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.append(self.client)

    app = Starlette(routes=[Route("/health", _heard), Route("/long", _long)])
    with served(lambda _: app, Watched) as port, contextlib.ExitStack() as stack:

        def begun(path: bytes) -> socket.socket:
            """A connection that has read the first bytes of its answer."""
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(5)
            connection.connect(("127.0.0.1", port))
            connection.sendall(GET.replace(b"/health", path))
            assert connection.recv(17) == b"HTTP/1.1 200 OK\r\n"
            return connection

        for path in (b"/health", b"/long"):
            for _ in range(8):
                begun(path)
            assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
        monkeypatch.setattr(connections, "PATIENCE", 0.2)
        monkeypatch.setattr(connections, "BODY_PATIENCE", 0.2)
        late = begun(b"/long")
        wait_until(lambda: late.getsockname() in lost, 5)


def test_a_connection_has_one_request_at_a_time(db: Database, boats: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """Of several, uvicorn would tell only the last that its client has gone, and the statements would go on."""
    running = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ml-rag gateway' AND state = 'active'"
        " AND wait_event_type = 'Lock'"
    )
    owner, locking = db.connect(), db.connect()
    stores = Config(boats.config.tokens, {"one": {"vector_store": ["public.boats"]}})
    with gateway_of(boats.dsn, stores, connections=4) as url, contextlib.ExitStack() as stack:
        ((host, port),) = re.findall(r"//(.*):(\d+)/", url)
        locking.execute("BEGIN; LOCK TABLE boats IN ACCESS EXCLUSIVE MODE")
        for path, asked in [("chat/completions", ASK), ("responses", {"model": "one", "input": "blue boat"})]:
            body = json.dumps({**asked, "stream": True}).encode()
            request = (
                f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token of asker\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            ).encode() + body
            held = [stack.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(2)]
            for connection in held:
                connection.sendall(request)
            wait_until(lambda: owner.execute(running).fetchone() == (2,))
            both = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            both.sendall(request * 2)
            for connection in held:
                connection.sendall(request)
            for connection in (*held, both):
                assert ended(connection)
            wait_until(lambda: owner.execute(running).fetchone() == (0,))
        locking.execute("ROLLBACK")
        for _ in range(4):
            assert replace(boats, url=url).post(ASK).status_code == 200
        both = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        both.sendall(GET * 2)
        assert both.recv(12) == b"HTTP/1.1 400"
        assert ended(both)
    assert "Exception in ASGI application" not in caplog.text


@pytest.mark.parametrize("begun", [0, 1])
async def test_the_work_for_a_reply_ends_with_it(begun: int) -> None:
    """Also where the client has gone before any of it is sent."""
    work = [asyncio.create_task(asyncio.sleep(60)) for _ in range(2)]
    sent = []

    async def pieces() -> AsyncIterator[str]:
        yield "a"
        yield "b"

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        if len(sent) == begun:
            raise RuntimeError("the handler is closed")
        sent.append(message)

    with pytest.raises(RuntimeError, match="the handler is closed"):
        await Stream(pieces(), "text/plain", work)({"type": "http"}, receive, send)
    assert [one.cancelled() for one in work] == [True, True]


async def _heard(request: Request) -> Response:
    await asyncio.sleep(3 if await request.body() == b"wait" else 0)
    return Response()


@pytest.mark.parametrize(
    ("begun", "again"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"),
        (b"Transfer-Encoding: chunked\r\n\r\n1;", b"a"),
        (b"Content-Length: 4\r\n\r\nwaitGET / HTTP/1.1\r\n", b"A: b\r\n"),
    ],
    ids=["trailers", "a chunk", "the head of another"],
)
def test_what_never_becomes_a_request_does_not_fill_the_memory(begun: bytes, again: bytes) -> None:
    heard = Starlette(routes=[Route("/", _heard, methods=["POST"])])
    with served(lambda _: heard, connections.protocol()) as port, socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n" + begun)
        with pytest.raises(ConnectionError):
            one.sendall(again * 10_000_000)
        body = b"x" * 10 * connections.HEAD
        assert httpx.post(f"http://127.0.0.1:{port}/", content=iter([body, body])).status_code == 200


def test_bodies_that_never_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest are given up for others, whose connections may be older."""
    monkeypatch.setattr(connections, "BODIES", 1_000_000)
    heard = Starlette(routes=[Route("/", _heard, methods=["POST"])])
    with (
        served(lambda _: heard, connections.protocol()) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as kept,
        contextlib.ExitStack() as stack,
    ):
        assert kept.post("/", content=b"x").status_code == 200
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(3)]
        for connection, length in zip(opened, (300_000, 500_000, 199_999), strict=True):
            connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 600000\r\n\r\n" + b"x" * length)
        time.sleep(0.2)
        assert kept.post("/", content=b"x" * 1000).status_code == 200
        with contextlib.suppress(ConnectionError):
            assert opened[1].recv(1) == b""
        for _ in range(4):  # what has come as a whole does not count
            assert kept.post("/", content=b"x" * 150_000).status_code == 200
        for connection, length in ((opened[0], 300_000), (opened[2], 400_001)):
            connection.sendall(b"x" * length)
            assert connection.recv(17) == b"HTTP/1.1 200 OK\r\n"


async def test_a_reader_says_that_its_connections_are_in_use(asker_dsn: str) -> None:
    reader = Reader(asker_dsn, name="a test", connections=1, patience=1)
    async with reader.opened(), reader.transaction():
        with pytest.raises(psycopg.OperationalError) as caught:
            await reader.rows(sql.SQL("SELECT 1"))
    assert worded(caught.value) == "all 1 connections to the database are in use (SQLSTATE 53300)"
    # not if they are not
    reader = Reader(make_conninfo(asker_dsn, port=1), name="a test", connections=1, patience=1)
    with pytest.raises(psycopg.OperationalError) as caught:
        async with reader._pool:
            await reader.rows(sql.SQL("SELECT 1"))
    assert "cannot be reached" in worded(caught.value)


TOKEN = f'[tokens.right]\nsha256 = "{digest("x")}"\nrole = "a"\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TOKEN + "[models.search]\nskip_generate = true", 'model "search" has "skip_generate"'),
        ("tokens", "cannot read"),
        ("", "no tokens"),
        ('document_url = "files/{document_name}"\n' + TOKEN, "document_url is not the address"),
        ('document_url = "https://files/"\n' + TOKEN, "document_url is not the address"),
        ('citations = "none"\n' + TOKEN, "citations is unknown"),
        ('model_server = "localhost"\n' + TOKEN, "model_server is not an address"),
        ("[other]", "unknown keys"),
        ('[tokens.a]\nsha256 = "x"\nrole = "a"', "64 hexadecimal digits"),
        (f'[tokens.a]\nsha256 = "{"a" * 64}"\nrole = "none"', "name of a role"),
        (f'[tokens.a]\nsha256 = "{"a" * 64}"', 'must have "sha256" and "role"'),
        (f'[tokens.a]\nsha256 = "{"a" * 64}"\nrole = "a"\n[models]\nx = 1', "tables of options"),
    ],
)
def test_a_wrong_file_says_so(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "gateway.toml").write_text(content)
    with pytest.raises(MlRagError, match=message):
        Config.read(tmp_path / "gateway.toml")


def gateway_command(file: Path, dsn: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`ml-rag gateway`, which ends by itself."""
    command = [*ML_RAG, "gateway", "--config", str(file), *more]
    environment = {**os.environ, "ML_RAG_DSN": dsn}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_roles_are_tried_at_the_start(db: Database, gate: str) -> None:
    owner = db.connect()
    superuser = owner.info.user
    for dsn, role in ((gate, "no_such_role"), (gate, superuser), (make_conninfo(db.dsn, dbname=db.name), superuser)):
        application = gateway.app(dsn, Config({digest("x"): role}))

        async def started(application: Any = application) -> None:
            async with application.router.lifespan_context(application):
                pass

        with pytest.raises(Exception, match=r"role|superuser"):
            asyncio.run(started())


def test_the_command_says_what_is_wrong_with_a_role(db: Database, gate: str, asker_dsn: str, tmp_path: Path) -> None:
    tenant, stranger, superuser = db.role("tenant"), db.role("stranger"), db.connect().info.user
    file = tmp_path / "gateway.toml"
    for dsn, role, words in (
        (asker_dsn, tenant, [f'the role "{tenant}" of a token cannot be taken', "permission denied",
                             f'GRANT "{tenant}" TO ']),
        (asker_dsn, "no_such_role", ['the role "no_such_role" of a token cannot be taken', "does not exist"]),
        (asker_dsn, superuser, [f'bound to the superuser "{superuser}"']),
        (gate, stranger, [f'the role "{stranger}" of a token may not ask', "permission denied",
                          f'GRANT ml_rag_user TO "{stranger}";']),
    ):  # fmt: skip
        file.write_text(f'[tokens.a]\nsha256 = "{digest("x")}"\nrole = "{role}"\n')
        done = gateway_command(file, "", "--dsn", dsn, "--port", "1")
        assert done.returncode == 1
        assert all(part in done.stderr for part in words), done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("keyword_serch = true", ['"keyword_serch"', 'Did you mean "keyword_search"?']),
        ("n_citations = 101", ["n_citations", "0 to 100"]),
        ("rerank = {modl = 1}", ['"modl"']),
        ("model_options = 1", ["model_options", "an object"]),
        ("retrieval_options = {max_distance = inf}", ["Infinity"]),
        ("filters = {day = 2026-01-01}", ["date"]),
        ('preset = "none"', ['preset "none" does not exist']),
        ("semantic_search = false", ["semantic_search"]),
    ],
)
def test_a_wrong_preset_is_said_at_the_start(
    db: Database, gate: str, tmp_path: Path, preset: str, words: list[str]
) -> None:
    file = tmp_path / "gateway.toml"
    tokens = f'[tokens.a]\nsha256 = "{digest("x")}"\nrole = "{db.role("asker")}"\n'
    file.write_text(f'{tokens}[models.right]\nn_citations = 100\n[models."my handbook"]\n{preset}\n')
    done = gateway_command(file, gate, "--port", "1")
    assert done.returncode == 1
    assert all(part in done.stderr for part in ['model "my handbook"', *words]), done.stderr
    assert "Traceback" not in done.stderr
    assert "listening on" not in done.stderr


def test_the_command(db: Database, boats: Gateway, tmp_path: Path) -> None:
    made = subprocess.run(
        [*ML_RAG, "gateway", "--new-token", db.role("asker")], capture_output=True, text=True, check=True, timeout=60
    )
    token, note = made.stderr.splitlines()
    assert note == "The token is shown this once: the file has only its hash."
    assert digest(token) in made.stdout
    assert token not in made.stdout
    file = tmp_path / "gateway.toml"
    file.write_text(made.stdout)
    port = free_port()
    command = [*ML_RAG, "gateway", "--config", str(file), "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, "ML_RAG_DSN": boats.dsn}, stderr=subprocess.PIPE, text=True)
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=token, timeout=60)
        wait_for_port(port, process)
        assert ask(client, "boat", "ml_rag").choices[0].message.content
        with pytest.raises(openai.NotFoundError):
            ask(client, "boat", "x")
    finally:
        process.terminate()
        _, logged = process.communicate(timeout=30)
    assert logged.splitlines()[0] == f"listening on http://127.0.0.1:{port}/v1, models: ml_rag"
    assert token not in logged
    assert "made for a test" not in logged


def test_it_says_that_it_listens_when_it_does(boats: Gateway, tmp_path: Path) -> None:
    role = next(iter(boats.config.tokens.values()))
    (tmp_path / "gateway.toml").write_text(f'[tokens.a]\nsha256 = "{digest("x")}"\nrole = "{role}"\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = gateway_command(tmp_path / "gateway.toml", boats.dsn, "--port", str(taken.getsockname()[1]))
    assert done.returncode != 0
    assert "listening on" not in done.stderr
    assert "address already in use" in done.stderr
