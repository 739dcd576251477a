"""The model server as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ml_rag import __version__
from ml_rag.errors import InvalidRequest, MlRagError
from ml_rag.ingest.confinement import find_missing
from ml_rag.server.boundary import Boundary, error_response, json_response
from ml_rag.server.registry import Registry
from ml_rag.server.routes import invalid, router

#: modules beside this one whose ``router`` belongs to the application
_ROUTER_MODULES = ("ml_rag.server.chat", "ml_rag.server.documents", "ml_rag.server.openapi")


def create_app(registry: Registry) -> FastAPI:
    """The application. ``app.state``: ``registry``, ``config`` (``ServerConfig``), ``started`` (monotonic seconds),
    ``parsers_miss`` (what the kernel refuses of their confinement, None while that is not known).
    """

    async def look_at_parsers(app: FastAPI) -> None:
        app.state.parsers_miss = await find_missing()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        work = (registry.preload(), registry.unload_idle_forever(), look_at_parsers(app))
        tasks = [asyncio.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()
        registry.close()

    # no interactive documentation: its pages load scripts from elsewhere; server/openapi.py has the description
    app = FastAPI(
        title="ml_rag", version=__version__, lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None
    )
    app.state.registry = registry
    app.state.config = registry.catalogue.server
    app.state.started = time.monotonic()
    app.state.parsers_miss = None
    app.include_router(router)
    for name in _ROUTER_MODULES:
        if importlib.util.find_spec(name) is not None:
            app.include_router(importlib.import_module(name).router)
    app.add_middleware(Boundary, registry=registry)

    @app.exception_handler(MlRagError)
    async def known(request: Request, error: MlRagError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        return error_response(invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        body = InvalidRequest(str(error.detail).lower(), detail=f"{request.method} {request.url.path[:200]}").to_json()
        response = json_response(body, error.status_code)
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    return app
