"""What surrounds every request: bounds on its body, the error form, the version header, the log line, the metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from ml_rag import __version__
from ml_rag.errors import InvalidRequest, MlRagError, PrivilegeError, QueueFull, ServerUnreachable, retry_after
from ml_rag.protocol import CALL_HEADER, has_more_values
from ml_rag.server.admission import Caller, current_caller
from ml_rag.server.cancellation import ClientGone
from ml_rag.server.metrics import current_model
from ml_rag.server.unexpected import unexpected

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ml_rag.server.calls import Calls
    from ml_rag.server.registry import Registry

log = logging.getLogger("ml_rag.server")

DOCUMENTS_PATH = "/v1/documents"
#: bytes a second that a body has to come in with, beside one body_timeout_seconds for all of it: a trickle holds a
#: connection for as long as its sender likes otherwise
MIN_BODY_RATE = 1024
#: values, of a body's JSON: it is parsed in the thread that all requests share
MAX_VALUES = 64 * 1024
#: nginx's status for a client that did not wait; only the log and the metrics ever see it
CLIENT_GONE_STATUS = 499


def json_response(content: Any, status: int = 200) -> Response:
    """A JSON reply; numpy arrays in ``content`` are written as they are."""
    return Response(
        orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status_code=status, media_type="application/json"
    )


def check_values(body: bytes) -> None:
    """A bound on the values in a body of JSON, which a body within its bound on bytes may have millions of.

    Raises ``InvalidRequest``: there are more than ``MAX_VALUES``.
    """
    if has_more_values(body, MAX_VALUES):
        raise InvalidRequest(
            "the request has too many values",
            detail=f"its JSON may have {MAX_VALUES}",
            hint="Send less at once; if it has a json_schema, leave parts of that out.",
        )


def error_response(error: MlRagError) -> Response:
    """An error in OpenAI's form, with its status."""
    response = json_response(error.to_json(), error.status)
    if (seconds := retry_after(error.hint)) is not None:
        response.headers["Retry-After"] = str(seconds)
    return response


class LeasedStream(StreamingResponse):
    """A reply that is sent as it comes; whatever its request holds is given back, also when its client goes at once."""

    def __init__(
        self, content: AsyncGenerator[bytes, None], resources: AsyncExitStack, media_type: str, **headers: str
    ) -> None:
        super().__init__(content, media_type=media_type, headers=headers)
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._resources.aclose()


class Boundary:
    """ASGI middleware. The errors of ``ml_rag.errors`` that reach it become replies."""

    def __init__(self, app: ASGIApp, registry: Registry, calls: Calls) -> None:
        self._app = app
        self._registry = registry
        self._calls = calls
        self._server = registry.catalogue.server
        #: bytes of the bodies that requests in progress have sent; documents are on disk by then
        self._pending = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        holder = [""]
        token = current_model.set(holder)
        status = 0

        async def send_with_version(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-ML-RAG-Version"] = __version__
            try:
                await send(message)
            except RuntimeError as error:
                # uvloop's word for a connection that the protocol has closed already, over bytes that are not HTTP
                if "handler is closed" not in str(error):
                    raise
                raise ClientGone from None

        call = Headers(scope=scope).get(CALL_HEADER)
        told = self._calls.receive(call.encode()) if call else None
        caller = current_caller.set(Caller.of(told))
        body = [0]
        reserved = [0]
        bounded = self._bounded(scope, receive, body, reserved)
        try:
            reserved[0] += self._check_head(scope)
            await self._app(scope, bounded, send_with_version)
        except (ClientGone, ClientDisconnect):
            if status == 0 and self._registry.closing():
                await error_response(ServerUnreachable("the model server is shutting down"))(
                    scope, receive, send_with_version
                )
            status = status or CLIENT_GONE_STATUS
        except Exception as error:  # noqa: BLE001 - the last one that can turn it into a reply
            failure = error if isinstance(error, MlRagError) else unexpected(error)
            if status:
                # the reply has begun: breaking the connection is the only way left to tell
                raise ConnectionAbortedError("a reply broke off") from None
            await error_response(failure)(scope, receive, send_with_version)
        finally:
            if told is not None:
                self._calls.answered(told)
            self._pending -= body[0]
            self._registry.memory.release(reserved[0])
            current_model.reset(token)
            current_caller.reset(caller)
            seconds = time.perf_counter() - began
            # an unknown path is one label, however many there are
            route = getattr(scope.get("route"), "path", "unknown")
            metrics = self._registry.metrics
            metrics.requests.labels(route, holder[0], str(status)).inc()
            metrics.seconds.labels(route, holder[0]).observe(seconds)
            level = logging.DEBUG if status < 400 else logging.INFO
            log.log(level, "%s %s %s %s %.1f ms", scope["method"], route, holder[0] or "-", status, seconds * 1000)

    def _limit(self, scope: Scope) -> int:
        server = self._server
        return server.max_document_body_bytes if scope["path"] == DOCUMENTS_PATH else server.max_body_bytes

    def _check_head(self, scope: Scope) -> int:
        """What the head says is wrong; the memory set aside for the body that it announces."""
        headers = Headers(scope=scope)
        if "origin" in headers:
            # Browsers send it with every POST, programs do not. On 127.0.0.1 any page that somebody looks at could ask.
            raise PrivilegeError(
                "web pages may not use the model server",
                detail="the request has the header Origin",
                hint="Ask from a program, or through a server of your own.",
            )
        length = headers.get("content-length")
        if length is not None and length.isdigit() and int(length) > self._limit(scope):
            raise self._too_long(scope)
        if length is None or not length.isdigit() or scope["path"] == DOCUMENTS_PATH:
            return 0  # documents go to the disk
        return self._registry.memory.reserve(int(length))

    def _too_long(self, scope: Scope) -> MlRagError:
        name = "max_document_body_bytes" if scope["path"] == DOCUMENTS_PATH else "max_body_bytes"
        return InvalidRequest(
            "the request is too long",
            detail=f"its body may have {self._limit(scope)} bytes",
            hint=f"Send less at once, or raise {name} in the model server's configuration.",
        )

    def _bounded(self, scope: Scope, receive: Receive, body: list[int], reserved: list[int]) -> Receive:
        """``receive`` that bounds the body's size, the memory for it, and the wait for its next piece.

        ``body[0]`` counts its bytes, ``reserved[0]`` the memory set aside for it.
        """
        memory = self._registry.memory
        on_disk = scope["path"] == DOCUMENTS_PATH
        announced = "content-length" in Headers(scope=scope)  # then it is all set aside at the head
        complete = False
        limit = self._limit(scope)
        patience = self._server.body_timeout_seconds
        began: float | None = None

        async def bounded() -> Message:
            nonlocal complete, began
            if complete:
                return await receive()
            loop = asyncio.get_running_loop()
            began = began if began is not None else loop.time()
            left = began + patience + body[0] / MIN_BODY_RATE - loop.time()
            try:
                async with asyncio.timeout(max(0, min(patience, left))):
                    message = await receive()
            except TimeoutError:
                raise InvalidRequest(
                    "the request's body did not arrive",
                    detail=f"nothing came for {patience:g} seconds"
                    if left >= patience
                    else f"it came with less than {MIN_BODY_RATE} bytes a second",
                ) from None
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                body[0] += size
                self._pending += size
                complete = not message.get("more_body", False)
                if body[0] > limit:
                    raise self._too_long(scope)
                if self._pending > self._server.max_pending_bytes:
                    raise QueueFull(
                        "too much is being sent to the model server at once",
                        detail=f"the requests in progress may have {self._server.max_pending_bytes} bytes together",
                        hint="Try again, or raise max_pending_bytes in the model server's configuration.",
                    )
                if on_disk:
                    memory.release(memory.reserve(size))
                elif not announced:
                    reserved[0] += memory.reserve(size, body[0] - size)
            return message

        return bounded
