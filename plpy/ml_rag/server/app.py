"""The model server as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ml_rag.errors import InvalidRequest, MlRagError
from ml_rag.ingest.sandbox import Limits, Sandbox
from ml_rag.server import openapi, routes
from ml_rag.server.boundary import Boundary, error_response, json_response
from ml_rag.server.calls import Calls
from ml_rag.server.chat.endpoint import chat_completions
from ml_rag.server.documents import documents
from ml_rag.server.inbox import Inbox
from ml_rag.server.pictures import Kept
from ml_rag.server.registry import Registry
from ml_rag.server.sockets import allowed_uids

_ROUTES = [
    Route("/healthz", routes.healthz),
    Route("/metrics", routes.metrics),
    Route("/openapi.json", openapi.openapi),
    Route("/v1/models", routes.list_models),
    Route("/v1/models/{model_id:path}", routes.retrieve_model),
    Route("/v1/embeddings", routes.embeddings, methods=["POST"]),
    Route("/v1/tokens", routes.tokens, methods=["POST"]),
    Route("/v1/rerank", routes.rerank, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/documents", documents, methods=["POST"]),
    Route("/v1/calls", routes.read_calls, methods=["POST"]),
]
for _route in _ROUTES:
    assert _route.methods is not None
    _route.methods.discard("HEAD")  # which comes with GET unasked; /openapi.json does not have it


def create_app(registry: Registry) -> Starlette:
    """The application. ``app.state``: ``registry``, ``config`` (``ServerConfig``), ``started`` (monotonic seconds),
    ``parsers_miss`` (what the kernel refuses of their confinement, None while that is not known), ``calls`` (what
    PostgreSQL's sessions tell of theirs), ``inbox``, where that comes in, ``sandbox``, whose processes start when a
    document comes, and ``pictures``, the descriptions that are kept.
    """
    calls = Calls(registry.metrics)

    async def look_at_parsers(app: Starlette) -> None:
        app.state.parsers_miss = await app.state.sandbox.find_missing()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        work = (registry.preload(), registry.unload_idle_forever(), look_at_parsers(app))
        tasks = [asyncio.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()
        app.state.sandbox.close()
        app.state.pictures.close()
        registry.close()

    app = Starlette(
        routes=_ROUTES,
        middleware=[Middleware(Boundary, registry=registry, calls=calls)],
        exception_handlers={MlRagError: _known, HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.registry = registry
    config = app.state.config = registry.catalogue.server
    seconds, memory = config.document_timeout_seconds, config.document_memory_bytes
    # of the processor half of what the clock gives: on a busy machine a parser also waits
    app.state.sandbox = Sandbox(Limits(cpu_seconds=seconds / 2, wall_seconds=seconds, memory_bytes=memory))
    app.state.pictures = Kept(registry.models_dir)
    app.state.started = time.monotonic()
    app.state.parsers_miss = None
    app.state.calls = calls
    app.state.inbox = Inbox(calls.receive, allowed_uids(config), registry.metrics.refused_peers.inc)
    return app


async def _known(_: Request, error: Exception) -> Response:
    assert isinstance(error, MlRagError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = InvalidRequest(str(error.detail).lower(), detail=f"{request.method} {request.url.path[:200]}").to_json()
    response = json_response(body, error.status_code)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response
