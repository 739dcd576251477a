"""The application: its addresses, and what is wrong with its roles."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from psycopg import sql
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ml_rag.errors import MlRagError
from ml_rag.integrations.gateway.chat import completions
from ml_rag.integrations.gateway.config import Config
from ml_rag.integrations.gateway.gate import Gate
from ml_rag.integrations.gateway.refused import Refused
from ml_rag.integrations.gateway.responses import responses
from ml_rag.integrations.gateway.vectors import embeddings, rerank

_IS_SUPERUSER = sql.SQL("SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.rolname = current_user")


class _Pages(CORSMiddleware):
    """CORS whose refusals are error objects of OpenAI's, too."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        refused = Refused(answer.status_code, "pages of this origin may not ask, or not in this way")
        headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return JSONResponse(refused.body, refused.status, headers)


def app(dsn: str, config: Config, connections: int = 8) -> Starlette:
    """The application, which connects when it starts."""
    gate = Gate(dsn, config, connections)
    began = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with gate.reader.opened():
            # what is wrong with a role is said now, and not to its user
            for role in sorted(set(config.tokens.values())):
                if (await gate.reader.rows(_IS_SUPERUSER, role=role))[0]["rolsuper"]:
                    raise MlRagError(
                        f'a token is bound to the superuser "{role}"', hint="Bind it to a role that only asks."
                    )
            yield

    def about(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": began, "owned_by": "ml_rag"}

    async def models(request: Request) -> Response:
        gate.asker(request)
        return JSONResponse({"object": "list", "data": [about(name) for name in config.models]})

    async def model(request: Request) -> Response:
        gate.asker(request)
        name = request.path_params["model"]
        gate.options({"model": name})
        return JSONResponse(about(name))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            unknown = Refused(
                error.status_code, f"{request.method} {request.url.path} is not served here", "unknown_url"
            )
            return JSONResponse(unknown.body, unknown.status, error.headers)
        if not isinstance(error, Refused):
            error = Refused.of(error)
        return JSONResponse(error.body, error.status, error.headers)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/chat/completions", partial(completions, gate), methods=["POST"]),
            Route("/v1/responses", partial(responses, gate), methods=["POST"]),
            Route("/v1/embeddings", partial(embeddings, gate), methods=["POST"]),
            Route("/v1/rerank", partial(rerank, gate), methods=["POST"]),
        ],
        exception_handlers={Refused: refused, HTTPException: refused, Exception: refused},
        middleware=[
            Middleware(_Pages, allow_origins=config.origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        ]
        if config.origins
        else None,
        lifespan=lifespan,
    )
