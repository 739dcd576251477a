"""The application: its addresses, and what is wrong with its roles."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial

from psycopg import sql
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ml_rag.errors import MlRagError
from ml_rag.integrations.gateway.chat import completions
from ml_rag.integrations.gateway.config import Config
from ml_rag.integrations.gateway.gate import Gate
from ml_rag.integrations.gateway.refused import Refused

_IS_SUPERUSER = sql.SQL("SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.rolname = current_user")


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

    async def models(request: Request) -> Response:
        gate.asker(request)
        names = [{"id": name, "object": "model", "created": began, "owned_by": "ml_rag"} for name in config.models]
        return JSONResponse({"object": "list", "data": names})

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return JSONResponse(error.body, error.status, error.headers)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", partial(completions, gate), methods=["POST"]),
        ],
        exception_handlers={Refused: refused},
        lifespan=lifespan,
    )
