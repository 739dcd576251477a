"""An OpenAI-compatible endpoint over HTTP, as engine ``openai`` asks it: retries, cancelling, bounds on its answers.

The administrator chose it, and still it may be broken or hostile: no reply is read further than what was asked for
could be long, none is unpacked, no redirect is followed.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Coroutine
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from ml_rag.abc import Cancelled
from ml_rag.errors import EngineFailed, ModelUnavailable

if TYPE_CHECKING:
    from ml_rag.server.catalogue import ModelEntry

T = TypeVar("T")

ATTEMPTS = 4
LONGEST_BACKOFF = 20.0
#: seconds that a request waits between its attempts, all together, where the endpoint says how long (Retry-After)
LONGEST_WAIT = 60.0
CANCEL_POLL = 0.05
#: of a reply in one piece: the vectors of a batch of texts take a third of it at 16 000 dimensions
MAX_REPLY_BYTES = 64 * 1024 * 1024
#: lists and objects in it, and values: two of each text of a batch, and the numbers
MAX_REPLY_LISTS, MAX_REPLY_VALUES = 4096, 2 * 1024 * 1024
#: of an event: an answer can come in one
MAX_EVENT_BYTES = 4 * 1024 * 1024
#: of a refusal
MAX_REFUSAL_BYTES = 64 * 1024
#: what may pass, of a request that may be carried out twice
_PASSING_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504})
_CONNECT_SECONDS = 10.0
#: what breaks before anything of a request is sent
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class _Passing(Exception):
    """A failure that may be gone at the next attempt."""

    def __init__(self, failure: EngineFailed, retry_after: float | None = None) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.retry_after = retry_after


def _was_refused(status: int, retry_after: float | None) -> bool:
    """Whether the endpoint says that it did nothing about the request.

    Any other failure may be that of an endpoint, or of a proxy before it, whose model was at work when it broke.
    """
    return status == HTTPStatus.TOO_MANY_REQUESTS or (
        status == HTTPStatus.SERVICE_UNAVAILABLE and retry_after is not None
    )


class Refused(EngineFailed):
    """The endpoint's refusal, with its HTTP status."""

    http_status: int | None = None


class CallerGone(Exception):
    """``cancelled()`` became true while waiting."""


def _key(entry: ModelEntry) -> str | None:
    if entry.api_key_env:
        key = os.environ.get(entry.api_key_env, "").strip()
        source = f"environment variable {entry.api_key_env}"
    elif entry.api_key_file:
        source = f"file {entry.api_key_file}"
        try:
            key = Path(entry.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelUnavailable("the key of the model cannot be read", detail=type(error).__name__) from None
    else:
        return None
    if not key or not key.isascii() or not key.isprintable():
        raise ModelUnavailable("the key of the model is empty or no key", detail=f"It comes from the {source}.")
    return key


class Endpoint:
    """The endpoint: one connection pool, one event loop, used from the engine's thread."""

    def __init__(self, entry: ModelEntry) -> None:
        self._secret = _key(entry)
        self.model = entry.remote_model or entry.id
        self._runner = asyncio.Runner()
        connect = min(_CONNECT_SECONDS, entry.timeout_seconds)
        #: until a reply begins; informational ones (1xx) that come before it do not put it off
        self._begin_seconds = connect + entry.timeout_seconds
        headers = {"Accept-Encoding": "identity"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        self._client = httpx.AsyncClient(
            base_url=(entry.base_url or "").rstrip("/") + "/",
            headers=headers,
            timeout=httpx.Timeout(entry.timeout_seconds, connect=connect),
        )

    def close(self) -> None:
        if not self._client.is_closed:
            self._runner.run(self._client.aclose())
            self._runner.close()

    def wait(self, work: Coroutine[Any, Any, T], cancelled: Cancelled) -> T:
        """The result of ``work``; it is cancelled, and its connection closed, once ``cancelled()`` is true.

        Raises ``CallerGone``: ``cancelled()`` became true first.
        """

        if cancelled():
            work.close()
            raise CallerGone

        async def guarded() -> T:
            task = asyncio.ensure_future(work)
            try:
                while not (await asyncio.wait({task}, timeout=CANCEL_POLL))[0]:
                    if cancelled():
                        raise CallerGone
                return task.result()
            finally:
                if task.cancel():
                    await asyncio.wait({task})

        return self._runner.run(guarded())

    async def open(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The reply to a POST, its body yet to be read.

        Texts to embed or rank are sent again after a failure that may pass. A prompt is sent again only if the endpoint
        did not take it or says that nothing was done: an answer costs, and a prompt that the endpoint died of would
        kill it again.

        Raises ``EngineFailed``: the endpoint refused, or cannot be reached; the detail has its own words.
        """
        attempts = AsyncRetrying(stop=_is_enough, wait=_pause, retry=retry_if_exception_type(_Passing), reraise=True)
        try:
            async for attempt in attempts:
                with attempt:
                    return await self._open_once(path, body)
        except _Passing as passing:
            raise passing.failure from None
        raise AssertionError("tenacity neither returned nor raised")

    async def _open_once(self, path: str, body: dict[str, Any]) -> httpx.Response:
        repeatable = path in ("embeddings", "rerank")
        request = self._client.build_request("POST", path, json=body)
        try:
            async with asyncio.timeout(self._begin_seconds):
                response = await self._client.send(request, stream=True)
        except TimeoutError:
            raise nonsense(f"none after {self._begin_seconds:g} seconds of other messages") from None
        except httpx.TransportError as error:
            failure = self.failure(error)
            if isinstance(error, _NOT_SENT) or (repeatable and not isinstance(error, httpx.ReadTimeout)):
                raise _Passing(failure) from None
            raise failure from None
        if response.is_success:
            return response
        content = b""
        try:
            async for piece in _pieces(response, MAX_REFUSAL_BYTES):
                content += piece
        except (httpx.TransportError, EngineFailed):
            pass  # what came of it has to do
        finally:
            await response.aclose()
        failure = self.refusal(response.status_code, content)
        retry_after = _seconds(response.headers.get("retry-after"))
        passing = repeatable and response.status_code in _PASSING_STATUS
        if passing or _was_refused(response.status_code, retry_after):
            raise _Passing(failure, retry_after)
        raise failure

    def failure(self, error: httpx.TransportError) -> EngineFailed:
        """What a broken connection is to the caller; the address is left out."""
        return EngineFailed(
            "the remote model cannot be reached",
            detail=f"{self.model}: {type(error).__name__}",
            hint="Check base_url and timeout_seconds of the model in the model server's catalogue.",
        )

    def refusal(self, status: int | None, content: bytes) -> EngineFailed:
        """The endpoint's own message, as far as it has one, without the key."""
        text = content.decode("utf-8", "replace").strip()
        try:
            body: Any = json.loads(text)
        except ValueError:
            body = None
        except RecursionError:
            return nonsense("a refusal that is nested too deeply")
        error = body.get("error", body) if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        told = message if isinstance(message, str) and message else text
        if self._secret:
            told = told.replace(self._secret, "***")
        hint = "Check the model's api_key in the model server's catalogue." if status in (401, 403) else None
        told = told.encode("utf-8", "replace").decode()  # a text can have half of a surrogate pair
        where = "" if status is None else f"HTTP status {status}: "
        refused = Refused("the remote model failed", detail=f"{where}{told[:1000]}", hint=hint)
        refused.http_status = status
        return refused

    async def json(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON reply to a POST. Raises ``EngineFailed``."""
        response = await self.open(path, body)
        try:
            content = b"".join([piece async for piece in _pieces(response, MAX_REPLY_BYTES)])
        except httpx.TransportError as error:
            raise self.failure(error) from None
        finally:
            await response.aclose()
        # millions of values take seconds, in which nothing else of this process runs, and a gigabyte
        if content.count(b"[") + content.count(b"{") > MAX_REPLY_LISTS or content.count(b",") > MAX_REPLY_VALUES:
            raise nonsense("of more values than were asked for")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise nonsense("no JSON") from None

    async def events(self, path: str, body: dict[str, Any], most: int) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of an event stream of at most ``most`` bytes, up to ``[DONE]`` or its end.

        Raises ``EngineFailed``.
        """
        response = await self.open(path, body)
        try:
            async for line in _lines(_pieces(response, most)):
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                try:
                    event = json.loads(data)
                except (ValueError, RecursionError):
                    raise nonsense("an event that is not JSON") from None
                if not isinstance(event, dict):
                    raise nonsense("an event that is not an object")
                if event.get("error"):
                    raise self.refusal(None, data.encode())
                yield event
        except httpx.TransportError as error:
            raise self.failure(error) from None
        finally:
            await response.aclose()


async def _pieces(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises ``EngineFailed`` past ``most`` bytes."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise nonsense("compressed, which was not asked for")
    async for piece in response.aiter_raw():
        most -= len(piece)
        if most < 0:
            raise nonsense("longer than anything that was asked for")
        yield piece


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    # of the line that is not complete; put together once, as pieces can be single bytes
    begun: list[bytes] = []
    length = 0
    async for piece in pieces:
        begun.append(piece)
        length += len(piece)
        if b"\n" in piece:
            *lines, rest = b"".join(begun).split(b"\n")
            for line in lines:
                yield line.decode("utf-8", "replace").rstrip("\r")
            begun, length = [rest], len(rest)
        if length > MAX_EVENT_BYTES:
            raise nonsense("an event that is too long")
    yield b"".join(begun).decode("utf-8", "replace")


def nonsense(what: str) -> EngineFailed:
    return EngineFailed("unexpected reply from the remote model", detail=f"The reply is {what}.")


def _seconds(header: str | None) -> float | None:
    """Retry-After, a number of seconds or a date. None where there is none, or no sense in it."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return None if math.isnan(seconds) else max(0.0, seconds)


_backoff = wait_random_exponential(multiplier=0.5, max=LONGEST_BACKOFF)


def _asked(state: RetryCallState) -> float | None:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after if isinstance(error, _Passing) else None


def _pause(state: RetryCallState) -> float:
    asked = _asked(state)
    return _backoff(state) if asked is None else asked


def _is_enough(state: RetryCallState) -> bool:
    """Asking again before the endpoint wants it would be in vain."""
    return state.attempt_number >= ATTEMPTS or state.idle_for + (_asked(state) or 0.0) > LONGEST_WAIT
