"""The application: its addresses, and how a question is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import psycopg
from psycopg import sql
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ml_rag.errors import MlRagError
from ml_rag.integrations.database import Reader, asked
from ml_rag.integrations.gateway.citations import annotated
from ml_rag.integrations.gateway.config import Config
from ml_rag.integrations.gateway.question import question, read_body
from ml_rag.integrations.gateway.refused import Refused
from ml_rag.integrations.gateway.share import Shares

#: seconds after which a stream without an answer yet shows that it is alive
ALIVE = 10.0
#: seconds between two looks at whether the client is still there
LOOK = 0.5

_IS_SUPERUSER = sql.SQL("SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.rolname = current_user")


def app(dsn: str, config: Config, connections: int = 8) -> Starlette:
    """The application, which connects when it starts."""
    reader = Reader(dsn, name="ml-rag gateway", connections=connections)
    shares = Shares(config.tokens, connections)
    began = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with reader.opened():
            # what is wrong with a role is said now, and not to its user
            for role in sorted(set(config.tokens.values())):
                if (await reader.rows(_IS_SUPERUSER, role=role))[0]["rolsuper"]:
                    raise MlRagError(
                        f'a token is bound to the superuser "{role}"', hint="Bind it to a role that only asks."
                    )
            yield

    def asker_of(request: Request) -> tuple[str, str]:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        found = config.find(token.strip()) if scheme.lower() == "bearer" else None
        if found is None:
            raise Refused(401, "a token of this gateway is needed: Authorization: Bearer …", "invalid_api_key")
        return found

    async def answered(query: str, options: Mapping[str, Any], role: str) -> dict[str, Any]:
        try:
            rows = await reader.rows(reader.schemas.answer, asked(query, options), role)
        except psycopg.Error as error:
            raise Refused.of(error) from None
        document: dict[str, Any] = rows[0]["answer"]
        return document

    async def models(request: Request) -> Response:
        asker_of(request)
        names = [{"id": name, "object": "model", "created": began, "owned_by": "ml_rag"} for name in config.models]
        return JSONResponse({"object": "list", "data": names})

    async def completions(request: Request) -> Response:
        token, role = asker_of(request)
        body = await read_body(request)
        preset = config.models.get(str(body.get("model")))
        if preset is None:
            raise Refused(404, f"there are the models {', '.join(config.models)}", "model_not_found")
        query, options = question(body, preset)
        about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body["model"]}
        give_back = await shares.take(token)
        work = asyncio.create_task(answered(query, options, role))
        work.add_done_callback(lambda _: give_back())
        if body.get("stream"):
            return StreamingResponse(_stream(about, work), media_type="text/event-stream")
        try:
            while not (await asyncio.wait({work}, timeout=LOOK))[0]:
                if await request.is_disconnected():
                    return Response(status_code=499)
            answer = await work
        finally:
            await _end(work)
        message = {"role": "assistant", "content": answer["text"], "annotations": annotated(answer)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({**about, "object": "chat.completion", "choices": [choice], "ml_rag": _rest(answer)})

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return JSONResponse(error.body, error.status, error.headers)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", completions, methods=["POST"]),
        ],
        exception_handlers={Refused: refused},
        lifespan=lifespan,
    )


async def _stream(about: Mapping[str, Any], work: asyncio.Task[dict[str, Any]]) -> AsyncIterator[str]:
    """The answer as events; the database has it in one piece, so that it comes in one."""

    def event(delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return _event({**about, "object": "chat.completion.chunk", "choices": [choice], **more})

    try:
        yield event({"role": "assistant", "content": ""})
        while not (await asyncio.wait({work}, timeout=ALIVE))[0]:
            yield ": the answer is being written\n\n"
        try:
            answer = await work
        except Refused as error:
            yield _event(error.body)
            return
        yield event({"content": answer["text"], "annotations": annotated(answer)})
        yield event({}, "stop", ml_rag=_rest(answer))
        yield "data: [DONE]\n\n"
    finally:
        await _end(work)


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _end(work: asyncio.Task[dict[str, Any]]) -> None:
    """Cancel its statement where it still runs."""
    if not work.done():
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


def _rest(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "text"}
