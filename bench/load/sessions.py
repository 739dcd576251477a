"""What the sessions do, in processes of their own: one kind of call each, with a pause after each of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import psycopg

from bench.load import database

#: kind -> its part of the sessions
KINDS = {
    "semantic search": 18,
    "hybrid search": 12,
    "keyword search": 10,
    "embed a text": 4,
    "answer": 6,
    "load documents": 4,
    "load server files": 2,
    "cancel": 8,
}
LOADING = ("load documents", "load server files")
#: SQLSTATE of a full queue: an application tries again
QUEUE_FULL = "53300"
CANCELLED = "57014"
#: how a statement is made to end
WAYS = ("libpq's cancel request", "pg_cancel_backend", "statement_timeout")
#: the same of a statement that does nothing: how late the machine itself is, with so many sessions on its processors
CANCEL_FLOOR = "floor: cancel of pg_sleep"
#: most seconds that one call may take before it counts as hanging
HANGS_SECONDS = 300
N_CITATIONS = 5
ANSWER_TOKENS = 16
#: after so many a session has read the catalog, the modules and the caches that it keeps
WARM_CALLS = 5
#: for the calls that run when the time is over
LAST_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Call:
    """One call that has ended. ``error``: None, or an unexpected error."""

    kind: str
    began: float
    seconds: float
    error: str | None = None
    #: times that the queue was full before
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process is to do: its sessions (kind and number), until when.

    ``until``: a shared number, of ``time.monotonic``; 0 = they are to connect and wait.
    """

    dsn: str
    sessions: list[tuple[str, int]]
    until: Any
    #: mean seconds between two calls of a session
    pause: float
    folder: Path
    questions: list[str]
    paragraphs: list[str]


def shares(sessions: int) -> dict[str, int]:
    """How many sessions of each kind: at least one, the largest kind takes what is over."""
    total = sum(KINDS.values())
    counts = {kind: max(1, sessions * part // total) for kind, part in KINDS.items()}
    largest = max(counts, key=lambda kind: counts[kind])
    counts[largest] = max(1, counts[largest] + sessions - sum(counts.values()))
    return counts


@contextlib.contextmanager
def readable_folder(loading: int) -> Iterator[Path]:
    """A folder for files that the database server's user can read: one below it for each session that loads."""
    with tempfile.TemporaryDirectory(prefix="ml_rag_load_") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for n in range(loading):
            (folder / f"{n}").mkdir(mode=0o755)
        yield folder


class WrongAnswer(Exception):
    """A call that ended well and gave what cannot be."""


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise WrongAnswer(what)


class Session:
    """One connection that makes calls of one kind."""

    def __init__(self, plan: Plan, kind: str, number: int, pipe: Pipe) -> None:
        self._plan, self._kind, self._number, self._pipe = plan, kind, number, pipe
        self._random = random.Random(f"{kind} {number}")
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._calls = itertools.count()
        self._stopping = False
        self._ended = 0
        self.results: list[Call] = []

    async def stop(self) -> None:
        """End the call that runs; it is not counted."""
        self._stopping = True
        if self._connection is not None:
            await self._connection.cancel_safe(timeout=HANGS_SECONDS)

    async def run(self) -> None:
        """Call after call until it is time."""
        call: Callable[[], Awaitable[None]] = getattr(self, f"_{self._kind.replace(' ', '_')}")
        await self._connect()
        self._pipe.send(("ready",))
        while not self._plan.until.value:
            await asyncio.sleep(0.05)
        if self._kind == "cancel":
            await self._read_what_is_kept()
        while time.monotonic() < self._plan.until.value:
            if self._connection is None:
                await self._connect()
            if self._kind == "cancel":
                ended = await self._cancel()
                self.results += ended
                self._warm()
                continue
            began = time.monotonic()
            error, refused = None, 0
            while True:
                try:
                    async with asyncio.timeout(HANGS_SECONDS):
                        await call()
                    break
                except psycopg.Error as failure:
                    if self._stopping:
                        return
                    if failure.diag.sqlstate == QUEUE_FULL:
                        refused += 1
                        await asyncio.sleep(self._random.uniform(0.05, 0.5))
                        continue
                    error = f"{failure.diag.sqlstate}: {failure}"
                except (WrongAnswer, TimeoutError) as failure:
                    error = f"{type(failure).__name__.strip('_')}: {failure}"
                await self._leave_if_broken()
                break
            self.results.append(Call(self._kind, began, time.monotonic() - began, error, refused))
            self._warm()
            await asyncio.sleep(min(self._random.expovariate(1 / self._plan.pause), 10) if self._plan.pause else 0)
        await self.close()

    async def close(self) -> None:
        """Leave the database."""
        if self._connection is not None:
            await self._connection.close()

    async def _connect(self) -> None:
        self._connection = await psycopg.AsyncConnection.connect(self._plan.dsn, autocommit=True)
        role = database.LOADER if self._kind in LOADING else database.ASKER
        await self._connection.execute(f"SET SESSION AUTHORIZATION {role}")
        await self._connection.execute("SET client_min_messages = error")
        self._pipe.send(("backend", self._connection.info.backend_pid, self._kind))

    def _warm(self) -> None:
        """Say so once this session has made the calls that read what it keeps from then on."""
        self._ended += 1
        if self._ended == (1 if self._kind == "answer" else WARM_CALLS):
            self._pipe.send(("warm",))

    async def _leave_if_broken(self) -> None:
        assert self._connection is not None
        status = self._connection.info.transaction_status
        if self._connection.closed or status != psycopg.pq.TransactionStatus.IDLE:
            await self._connection.close()
            self._connection = None

    async def _all(self, statement: str, *values: Any) -> list[Any]:
        assert self._connection is not None
        cursor = await self._connection.execute(statement, values)
        return await cursor.fetchall()

    def _question(self) -> str:
        return self._random.choice(self._plan.questions)

    def _document(self) -> bytes:
        """A text of 200 to 600 words that was never there before."""
        parts = self._random.sample(self._plan.paragraphs, self._random.randint(2, 6))
        return "\n\n".join([f"Document {self._random.random()}", *parts]).encode()

    # -- the kinds of calls --------------------------------------------------------------------------------------

    async def _search(self, **options: Any) -> None:
        n = next(self._calls)
        options = {"n_citations": N_CITATIONS, **options}
        # every fifth call finds the stores by itself, those that are being loaded among them
        if n % 5:
            options["vector_store"] = ["segments"]
        if n % 3 == 0:
            options["filters"] = {"part": n % 7} if n % 5 else {"part": {"exists": True}}
        rows = await self._all("SELECT * FROM ml_rag_search(%s, %s)", self._question(), json.dumps(options))
        _expect(0 < len(rows) <= N_CITATIONS, f"{len(rows)} citations with {options}")

    async def _semantic_search(self) -> None:
        await self._search()

    async def _hybrid_search(self) -> None:
        await self._search(keyword_search=True)

    async def _keyword_search(self) -> None:
        options = {"semantic_search": False, "keyword_search": True, "vector_store": ["segments"]}
        word = self._random.choice(["the", "of", "time", "system"])
        await self._all("SELECT * FROM ml_rag_search(%s, %s)", f"{word} {self._question()}", json.dumps(options))

    async def _embed_a_text(self) -> None:
        rows = await self._all("SELECT vector_dims(ml_embed_row(%s))", self._question())
        _expect(rows == [(database.DIMENSIONS,)], f"{rows} dimensions")

    def _answer_call(self, tokens: int) -> tuple[str, str, str]:
        options = {"vector_store": ["public.samples"], "n_citations": 1, "model_options": {"max_tokens": tokens}}
        return "SELECT ml_rag_answer(%s, %s)", self._question(), json.dumps(options)

    async def _answer(self) -> None:
        rows = await self._all(*self._answer_call(ANSWER_TOKENS))
        _expect(len(rows[0][0]["citations"]) == 1, "not one citation")
        _expect(isinstance(rows[0][0]["text"], str), "no text")

    async def _load_documents(self) -> None:
        # 12 names in turn: the store stays as small as it is, its documents are replaced
        names = [f"{(4 * next(self._calls) + i) % 12}.txt" for i in range(4)]
        contents = [self._document() for _ in names]
        rows = await self._all(f"SELECT ml_rag.load_documents('loaded_{self._number}', %s, %s)", names, contents)
        _expect(rows[0][0]["documents"]["failed"] == 0, str(rows[0][0])[:500])

    async def _load_server_files(self) -> None:
        folder = self._plan.folder / f"{self._number}"
        n = next(self._calls)
        for i in range(8) if n == 0 else (n % 8, (n + 3) % 8):
            # as those do who replace a file that others read
            new = folder / f".{i}"
            new.write_bytes(self._document())
            new.rename(folder / f"{i}.txt")
        options = json.dumps({"schema_name": "public", "table_name": f"files_{self._number}"})
        rows = await self._all("CALL vector_store_load(%s, %s)", f"file://{folder}/", options)
        _expect(rows[0][0]["documents"]["failed"] == 0, str(rows[0][0])[:500])

    # -- cancelling ----------------------------------------------------------------------------------------------

    async def _cancel(self) -> list[Call]:
        """One call that is ended while it runs: how long from the request to a session that is free again."""
        assert self._connection is not None
        n = next(self._calls)
        way = WAYS[n % len(WAYS)]
        # a long wait in the queue of the model, or for its tokens; a short statement of much work
        statement = self._answer_call(256) if n % 4 else self._long_search()
        wait = self._random.uniform(0.02, 0.8) if n % 4 else self._random.uniform(0.0, 0.1)
        kind = f"cancel: {way}"
        if n % 8 == 7:
            kind, statement = CANCEL_FLOOR, ("SELECT pg_sleep(%s)", HANGS_SECONDS)
        if way == "statement_timeout":
            await self._connection.execute(f"SET statement_timeout = {max(1, round(wait * 1000))}")
        began = time.monotonic()
        due = began + wait
        running = asyncio.create_task(self._all(*statement))
        try:
            if way != "statement_timeout":
                await asyncio.wait([running], timeout=wait)
                due = time.monotonic()
                if not running.done():
                    await self._request(way)
            async with asyncio.timeout(HANGS_SECONDS):
                await running
        except psycopg.errors.QueryCanceled:
            free = time.monotonic()
            return [Call(kind, began, free - due)]
        except psycopg.Error as failure:
            if failure.diag.sqlstate == QUEUE_FULL:
                await asyncio.sleep(0.1)
                return []
            await self._leave_if_broken()
            return [Call(kind, began, 0.0, f"{failure.diag.sqlstate}: {failure}")]
        except TimeoutError:
            self._connection = None
            return [Call(kind, began, 0.0, "it did not end")]
        finally:
            await self._reset_timeout()
        return []  # it was done before

    async def _reset_timeout(self) -> None:
        while self._connection is not None:
            # under a timeout of some milliseconds this statement itself may meet it
            with contextlib.suppress(psycopg.errors.QueryCanceled):
                await self._connection.execute("RESET statement_timeout")
                return

    async def _read_what_is_kept(self) -> None:
        """One call of each kind to its end: those that are cancelled may load a module for the first time late."""
        for statement in (self._long_search(), self._answer_call(1)):
            while True:
                try:
                    await self._all(*statement)
                    break
                except psycopg.Error as failure:
                    if failure.diag.sqlstate != QUEUE_FULL:
                        raise
                    await asyncio.sleep(0.1)

    def _long_search(self) -> tuple[str, str, str]:
        options = {"keyword_search": True, "hybrid_options": {"candidates": 5000}, "n_citations": 100}
        question = " ".join(self._question() for _ in range(8))
        return "SELECT * FROM ml_rag_search(%s, %s)", question, json.dumps(options)

    async def _request(self, way: str) -> None:
        assert self._connection is not None
        if way == WAYS[0]:
            await self._connection.cancel_safe(timeout=HANGS_SECONDS)
            return
        async with self._control_lock:
            control = await self._control()
            await control.execute("SELECT pg_cancel_backend(%s::integer)", (self._connection.info.backend_pid,))

    _control_lock = asyncio.Lock()
    _control_connection: psycopg.AsyncConnection[Any] | None = None

    async def _control(self) -> psycopg.AsyncConnection[Any]:
        """A connection that all sessions of a process share to cancel others."""
        if Session._control_connection is None:
            Session._control_connection = await psycopg.AsyncConnection.connect(self._plan.dsn, autocommit=True)
        return Session._control_connection


def hurry() -> None:
    """Go before others, where the system lets us: clients have other machines than the database as a rule."""
    with contextlib.suppress(OSError):
        os.nice(-10)


def work(plan: Plan, pipe: Pipe) -> None:
    """The body of a process: all its sessions, and every second what they have done since."""
    hurry()
    asyncio.run(_work(plan, pipe))
    pipe.send(("done",))
    pipe.close()


async def _work(plan: Plan, pipe: Pipe) -> None:
    sessions = [Session(plan, kind, number, pipe) for kind, number in plan.sessions]
    running = [asyncio.create_task(session.run()) for session in sessions]
    while True:
        done, waiting = await asyncio.wait(running, timeout=1)
        results = [call for session in sessions for call in session.results]
        for session in sessions:
            session.results = []
        pipe.send(("calls", results))
        for task in done:
            task.result()
        if not waiting:
            return
        if plan.until.value and time.monotonic() > plan.until.value + LAST_SECONDS:
            for session, task in zip(sessions, running, strict=True):
                if not task.done():
                    await session.stop()
