"""pipeline/embed: a wait for the model that is ended: by a timeout, a cancel, the end of the backend."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support import hostile_server, interrupts
from support.cluster import Connection, Database
from support.embedding import UNIT, embed
from support.hostile_server import HostileServer, embeddings, endless, head, reply, silent
from support.stores import error

WAITS: dict[str, hostile_server.Handler] = {
    "never answers": silent,
    "endless body": endless(head(10**12), b" " * 65536),
    "endless 100": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("handler", WAITS.values(), ids=WAITS.keys())
def test_statement_timeout_ends_the_wait(
    behave: Callable[..., HostileServer], session: Connection, handler: hostile_server.Handler
) -> None:
    server = behave(handler)
    embed_once(session)
    session.execute("SET statement_timeout = '300ms'")
    began = time.monotonic()
    with error("57014", "statement timeout", ours=False):
        embed(session)
    took = time.monotonic() - began
    assert 0.25 < took < 1.3, took
    assert server.gone.wait(30), "the server was not told"
    session.execute("SET statement_timeout = '20s'")
    server.handler = reply(embeddings(UNIT))
    assert embed(session) == UNIT


def embed_once(session: Connection) -> None:
    """Load the Python side, so that only the wait is timed."""
    session.execute("DO $$ BEGIN PERFORM ml_rag._load_backend(); END $$")


def cancel_soon(session: Connection, seconds: float = 0.3) -> threading.Timer:
    timer = threading.Timer(seconds, session.cancel)
    timer.start()
    return timer


def test_pg_cancel_backend_ends_the_wait(behave: Callable[..., HostileServer], session: Connection) -> None:
    server = behave(silent)
    embed_once(session)
    began = time.monotonic()
    cancel_soon(session)
    with error("57014", ours=False):
        embed(session)
    assert time.monotonic() - began < 1.3
    assert server.gone.wait(30), "the server was not told"
    server.handler = reply(embeddings(UNIT))
    assert embed(session) == UNIT


def test_a_cancelled_request_does_not_answer_the_next_one(
    behave: Callable[..., HostileServer], session: Connection
) -> None:
    def slow(client: socket.socket, request: bytes) -> None:
        time.sleep(0.6 if b"first" in request else 0)
        reply(embeddings([1.0] if b"first" in request else [2.0]))(client, request)

    behave(slow)
    embed_once(session)
    session.execute("SET statement_timeout = '200ms'")
    with error("57014", ours=False):
        embed(session, "first")
    session.execute("SET statement_timeout = '20s'")
    time.sleep(0.6)
    assert embed(session, "second") == [2.0]


def test_terminating_the_backend_tells_the_server(
    behave: Callable[..., HostileServer], module_owner: Connection, session: Connection
) -> None:
    server = behave(silent)
    embed_once(session)
    pid = session.info.backend_pid
    threading.Timer(0.3, lambda: module_owner.execute("SELECT pg_terminate_backend(%s::integer)", (pid,))).start()
    with pytest.raises(psycopg.OperationalError):
        embed(session)
    assert server.gone.wait(30)


@pytest.mark.parametrize("way", interrupts.WAYS)
def test_embedding_is_interrupted_at_once_and_the_session_goes_on(
    module_owner: Connection, module_db: Database, way: str
) -> None:
    session = module_db.connect("asker")
    embed_once(session)
    late = interrupts.seconds_late(session, module_owner, way, lambda: embed(session, embed_model_id="fake-embed-slow"))
    assert late < interrupts.GRACE_SECONDS
    assert len(embed(session)) == 16


def test_a_huge_text_travels(behave: Callable[..., HostileServer], session: Connection) -> None:
    server = behave(reply(embeddings(UNIT)))
    assert embed(session, "x" * 5_000_000) == UNIT
    assert len(server.requests[0]) > 5_000_000


def test_a_server_that_does_not_read_can_be_cancelled(module_db: Database, behave: Any, local_sockets: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    path = local_sockets / "deaf.sock"
    listener.bind(str(path))
    path.chmod(0o666)
    listener.listen(0)
    behave(silent)
    module_db.connect().execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{path}",))
    session = module_db.connect("asker")
    embed_once(session)
    session.execute("SET statement_timeout = '300ms'")
    began = time.monotonic()
    with error("57014", ours=False):
        embed(session, "x" * 5_000_000)
    assert time.monotonic() - began < 1.3
    listener.close()
