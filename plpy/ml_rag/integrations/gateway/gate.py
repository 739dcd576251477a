"""Who asks, and the way of a question to the database and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg import sql
from starlette.requests import Request

from ml_rag.errors import MlRagError
from ml_rag.integrations.database import LAYERED, Query, Reader, asked, layered
from ml_rag.integrations.gateway.answer import Answer, Pieces
from ml_rag.integrations.gateway.config import Config
from ml_rag.integrations.gateway.question import Question, keys
from ml_rag.integrations.gateway.refused import Refused
from ml_rag.integrations.gateway.share import Shares
from ml_rag.integrations.waiting import waited_for
from ml_rag.integrations.written import Writer

#: seconds for which what the catalogue says of a model is kept
KNOWN = 60.0
#: seconds after which a stream without an answer yet shows that it is alive
ALIVE = 10.0
#: tokens of an answer that every model has room for
SHORT = 256
#: what shows that
COMMENT = ": the answer is being written\n\n"

Got = TypeVar("Got")

_MODEL = """SELECT m.max_tokens AS context,
  ml_rag._cannot_write(m.model_id, 'answer') IS NOT NULL AS is_small
FROM {}() AS m WHERE m.task = 'generate' AND m.model_id =
  pg_catalog.split_part(coalesce(%(model)s, ml_rag._default_model()), '@', 1)"""


@dataclass(frozen=True)
class Asker:
    """A token, by its hash, and its role."""

    token: str
    role: str


@dataclass(frozen=True)
class Model:
    """What the catalogue says of a generation model; nothing of one that is not in it."""

    #: tokens
    context: int | None = None
    #: it cannot do what a program asks for, such as a title
    is_small: bool = False


class Gate:
    """What all addresses of the gateway share."""

    def __init__(self, dsn: str, config: Config, connections: int) -> None:
        self.config = config
        self.reader = Reader(dsn, name="ml-rag gateway", connections=connections)
        self._shares = Shares(config.tokens, connections)
        self._writer = Writer(config.model_server)
        self._known: dict[str | None, tuple[float, Model]] = {}

    def asker(self, request: Request) -> Asker:
        """Who sent a request. Raises Refused (401)."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        found = self.config.find(token.strip()) if scheme.lower() == "bearer" else None
        if found is None:
            raise Refused(401, "a token of this gateway is needed: Authorization: Bearer …", "invalid_api_key")
        return Asker(*found)

    def options(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options of the model that a request names. Raises Refused (404)."""
        name = body.get("model")
        preset = self.config.models.get(name) if isinstance(name, str) else None
        if preset is None:
            raise Refused(404, f"there are the models {', '.join(self.config.models)}", "model_not_found", "model")
        return preset

    async def preset(self, asker: Asker, request: Request, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same over those of a preset of the database that they name, and of its settings. Raises Refused."""
        work = self.rows(asker, LAYERED, layered(self.options(body)))
        (row,) = await waited_for(request, await self.start(asker, work))
        return {name: value for name, value in row["options"].items() if name != "preset"}

    async def rows(self, asker: Asker, query: Query, parameters: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """The rows of a statement as the asker's role. Raises Refused."""
        try:
            return await self.reader.rows(query, parameters, asker.role)
        except psycopg.Error as error:
            raise Refused.of(error) from None

    async def start(self, asker: Asker, work: Coroutine[Any, Any, Got]) -> asyncio.Task[Got]:
        """Begin work on one of the asker's connections, as soon as there is one. Raises Refused (429)."""
        try:
            give_back = await self._shares.take(asker.token)
        except BaseException:
            work.close()
            raise
        task = asyncio.create_task(_guarded(work))
        task.add_done_callback(lambda _: give_back())
        return task

    async def _model(self, asker: Asker, options: Mapping[str, Any]) -> Model:
        """The model that will answer, as the catalogue has it. Raises Refused."""
        name = keys(options, "model_options").get("model_id")
        since, known = self._known.get(name, (-KNOWN, Model()))
        if time.monotonic() - since >= KNOWN:
            query = sql.SQL(_MODEL).format(self.reader.schemas.routine("ml_supported_models"))
            rows = await self.rows(asker, query, {"model": name})
            known = Model(**rows[0]) if rows else Model()
            self._known[name] = time.monotonic(), known
        return known

    async def answer(self, asker: Asker, question: Question, pieces: Pieces | None = None) -> Answer:
        """The answer to a question; ``pieces`` gets its text as it is written. Raises Refused."""
        if question.is_task and not question.is_json and (await self._model(asker, question.options)).is_small:
            return Answer.nothing()
        if question.length is not None and question.length > SHORT:
            # at least half the context is for the documents and the conversation
            most = ((await self._model(asker, question.options)).context or 2 * question.length) // 2
            question.options["model_options"]["max_tokens"] = min(question.length, most)
        schemas, parameters = self.reader.schemas, asked(question.text, question.options)
        if pieces is None or question.is_json:
            (row,) = await self.rows(asker, schemas.answer, parameters)
            return Answer.of(question, row["answer"], self.config)
        try:
            document = await self._writer.answer(partial(self.rows, asker), schemas, parameters, pieces.add)
        except MlRagError as error:
            raise Refused.of(error) from None
        return Answer.of(question, document, self.config)


async def _guarded(work: Coroutine[Any, Any, Got]) -> Got:
    """What nothing foresaw is an error that the client gets, in a stream too."""
    try:
        return await work
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001 - it is logged
        raise Refused.of(error) from None


async def coming(work: asyncio.Task[Any], pieces: Pieces) -> AsyncIterator[str]:
    """The pieces of an answer until the work is done; an empty one where nothing has come for a while."""
    getting = asyncio.ensure_future(pieces.queue.get())
    try:
        while not (work.done() and pieces.queue.empty() and not getting.done()):
            await asyncio.wait({work, getting}, timeout=ALIVE, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                piece, getting = getting.result(), asyncio.ensure_future(pieces.queue.get())
                yield piece
            elif not work.done():
                yield ""  # one that comes meanwhile is for the next round
    finally:
        getting.cancel()
