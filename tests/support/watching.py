"""Calls that are held where they are, to be looked at."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.cluster import Connection
from support.hostile_server import completion, embeddings, hostile, reply
from support.processes import Background, wait_until
from support.stores import fake_embedding


class Gate:
    """A model server that answers nothing of what ``closed`` names until it is opened: embeddings, chat/completions,
    rerank. ``failing``: it then answers with this status."""

    def __init__(self, *closed: str) -> None:
        self.closed = set(closed)
        self.waiting = 0
        self.opened = threading.Event()

    def __call__(self, client: socket.socket, request: bytes) -> None:
        path = request.split(b" ", 2)[1].decode().removeprefix("/v1/")
        if path in self.closed:
            self.waiting += 1
            self.opened.wait(30)
        body = json.loads(request.partition(b"\r\n\r\n")[2] or b"{}")
        reply(self._answer(path, body))(client, request)

    @staticmethod
    def _answer(path: str, body: Any) -> Any:
        if path == "embeddings":
            return embeddings(*map(fake_embedding, body["input"]))
        if path == "rerank":
            return {"results": [{"index": i, "relevance_score": 0.5} for i in range(len(body["documents"]))]}
        return completion("an answer", usage={"prompt_tokens": 12, "completion_tokens": 3})


@contextmanager
def gate(owner: Connection, directory: Path, *closed: str) -> Iterator[Gate]:
    """The database's model server is now a ``Gate``."""
    handler = Gate(*closed)
    with hostile(directory, handler, owner=owner):
        try:
            yield handler
        finally:
            handler.opened.set()


@contextmanager
def held(gate: Gate, connection: Connection, statement: str, *arguments: Any) -> Iterator[Background]:
    """A statement that waits at the gate meanwhile; afterwards it has come back."""
    call = Background(lambda: connection.execute(statement, arguments or None).fetchall())
    wait_until(lambda: gate.waiting)
    try:
        yield call
    finally:
        gate.opened.set()
        call.join()


def shown(connection: Connection, relation: str = "activity", columns: str = "*") -> list[dict[str, Any]]:
    """The rows of one of the views, of this database."""
    cursor = connection.execute(f"SELECT {columns} FROM ml_rag.{relation} WHERE datname = current_database()")
    names = [column.name for column in cursor.description or []]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def counted(connection: Connection) -> dict[tuple[str, str], tuple[int, int]]:
    """(routine, stage) -> calls, errors; over all roles that the connection sees."""
    rows = connection.execute(
        "SELECT routine, stage, sum(calls)::int, sum(errors)::int FROM ml_rag.stats GROUP BY 1, 2"
    ).fetchall()
    return {(routine, stage): (calls, errors) for routine, stage, calls, errors in rows}


def errors_of(connection: Connection, routine: str) -> dict[str, int]:
    """SQLSTATE -> errors of a routine, of all roles that the connection sees together."""
    rows = connection.execute(
        "SELECT e.key, sum(e.value::int)::int FROM ml_rag.stats, jsonb_each_text(errors_by_sqlstate) AS e"
        " WHERE routine = %s AND stage = 'total' GROUP BY 1",
        (routine,),
    ).fetchall()
    return dict(rows)


def stats(connection: Connection) -> list[dict[str, Any]]:
    """The rows of ml_rag.stats that the connection sees."""
    cursor = connection.execute("SELECT * FROM ml_rag.stats")
    names = [column.name for column in cursor.description or []]
    return [dict(zip(names, row, strict=True)) for row in cursor]
