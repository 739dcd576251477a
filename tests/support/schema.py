"""A small schema to ask questions about, and a model server that answers as a test says."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Connection, value_of
from support.hostile_server import completion, embeddings, hostile, reply
from support.stores import fake_embedding

SCHEMA = """
CREATE SCHEMA shop;
CREATE TYPE shop.size AS ENUM ('small', 'large');
CREATE TABLE shop.customers (id integer PRIMARY KEY, name text NOT NULL, city text, born date);
CREATE TABLE shop.orders (
  id integer PRIMARY KEY, customer_id integer NOT NULL REFERENCES shop.customers, ordered_at timestamptz NOT NULL,
  amount numeric(10,2), status text NOT NULL, size shop.size, tags text[], facts jsonb);
CREATE TABLE shop.secrets (id integer PRIMARY KEY, word text);
COMMENT ON TABLE shop.customers IS 'people who buy';
COMMENT ON TABLE shop.orders IS 'what they bought';
COMMENT ON COLUMN shop.orders.amount IS 'euros';
INSERT INTO shop.customers SELECT i, 'name ' || i, (ARRAY['Graz', 'Halle'])[1 + i % 2], date '2000-01-01' + i
FROM generate_series(1, 20) AS i;
INSERT INTO shop.orders SELECT i, 1 + i % 20, timestamptz '2026-05-01 12:00Z' + i * interval '1 hour', i * 1.25,
  (ARRAY['new', 'paid', 'sent'])[1 + i % 3], 'small', ARRAY['a', 'b'], '{"n": [1, null]}'
FROM generate_series(1, 100) AS i;
INSERT INTO shop.secrets VALUES (1, 'canary');
ANALYZE shop.customers, shop.orders, shop.secrets;
GRANT USAGE ON SCHEMA shop TO ml_rag_user;
GRANT SELECT ON shop.customers, shop.orders TO ml_rag_user;
"""


def statement(sql: str) -> dict[str, Any]:
    """What a model answers that knows how."""
    return {"answerable": True, "sql": sql}


#: a model of the catalogue that is not there yet
LARGE = {
    "id": "large",
    "task": "generate",
    "engine": "llama-cpp",
    "brief": False,
    "available": False,
    "pull": "get large",
}


class SqlModel:
    """A model server: embeds as ``fake-embed`` does, ranks all texts the same, and answers by ``answers``: objects as
    JSON, texts as they are.

    One answer a request, the last one for all that follow. ``asked``: the requests for an answer.
    """

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.embedded: list[str] = []
        #: before texts are embedded or ranked
        self.meanwhile: Callable[[], None] | None = None

    def __call__(self, client: socket.socket, request: bytes) -> None:
        if request.startswith(b"GET "):
            models = [{"id": "tiny", "brief": True}, {"id": "extractive", "engine": "extractive"}, LARGE]
            reply({"object": "list", "data": models})(client, request)
            return
        body = json.loads(request.partition(b"\r\n\r\n")[2])
        if "/v1/embeddings" in request.split(b"\r\n")[0].decode():
            self.embedded += body["input"]
            if self.meanwhile is not None:
                self.meanwhile()
            reply(embeddings(*map(fake_embedding, body["input"])))(client, request)
            return
        if "/v1/rerank" in request.split(b"\r\n")[0].decode():
            if self.meanwhile is not None:
                self.meanwhile()
            scores = [{"index": i, "relevance_score": 0.5} for i in range(len(body["documents"]))]
            reply({"results": scores})(client, request)
            return
        self.asked.append(body)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(body)
        if isinstance(answer, tuple):  # an error: its body and status
            reply(*answer)(client, request)
            return
        text = answer if isinstance(answer, str) else json.dumps(answer)
        reply(completion(text, usage={"prompt_tokens": 7, "completion_tokens": 3}))(client, request)

    def writes(self, *statements: str) -> None:
        """Answer with these statements, one after the other."""
        self.answers = [statement(sql) for sql in statements]


@pytest.fixture
def model(owner: Connection, local_sockets: Path) -> Iterator[SqlModel]:
    """The model server of the database."""
    handler = SqlModel()
    with hostile(local_sockets, handler, owner=owner):
        yield handler


@pytest.fixture
def shop(owner: Connection) -> Connection:
    """The owner of the database, in which there is schema shop; members of ml_rag_user may read all but its secrets."""
    owner.execute(SCHEMA)
    return owner


def metadata(connection: Connection, question: str = "what", **options: Any) -> str:
    """Calls ml_retrieve_schema_metadata."""
    found = value_of(connection, "SELECT ml_retrieve_schema_metadata(%s, %s)", (question, json.dumps(options)))
    assert isinstance(found, str)
    return found


def ask(connection: Connection, question: str = "what", **options: Any) -> dict[str, Any]:
    """Calls ml_nl_sql."""
    found: dict[str, Any] = value_of(connection, "SELECT ml_nl_sql(%s, %s)", (question, json.dumps(options)))
    return found
