"""Engine ``openai``: any OpenAI-compatible endpoint (Ollama, vLLM, llama-server, hosted ones), for embed and generate.

Address and key come from the catalogue only; neither is ever part of an error. Requests run in an event loop of the
engine's own thread, so that one that waits can be given up, and its connection closed, once the caller has gone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import httpx
import numpy as np
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from ml_rag.abc import Cancelled, Delta, Sampling
from ml_rag.errors import EngineFailed, ModelUnavailable
from ml_rag.prompt import estimate_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ml_rag.catalogue import ModelEntry

T = TypeVar("T")

#: context assumed where the catalogue gives no ``context_tokens``
DEFAULT_CONTEXT_TOKENS = 8192
#: texts in one request for embeddings
BATCH_TEXTS = 64
ATTEMPTS = 4
LONGEST_WAIT = 20.0
CANCEL_POLL = 0.05
_RETRIED_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504})
_CONNECT_SECONDS = 10.0


class _Passing(Exception):
    """A failure that may be gone at the next attempt."""

    def __init__(self, failure: EngineFailed, retry_after: float | None = None) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.retry_after = retry_after


class _CallerGone(Exception):
    """``cancelled()`` became true while waiting."""


def load(entry: ModelEntry, models_dir: Path) -> OpenAIEmbed | OpenAIGenerate:
    """The catalogue's remote model. Raises ``ModelUnavailable``."""
    remote = _Remote(entry)
    try:
        if entry.task == "embed":
            return OpenAIEmbed(entry, remote)
        if entry.task == "generate":
            return OpenAIGenerate(entry, remote)
        raise ModelUnavailable(f"the engine openai has no task {entry.task}")
    except BaseException:
        remote.close()
        raise


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


class _Remote:
    """The endpoint: one connection pool, one event loop, used from the engine's thread."""

    def __init__(self, entry: ModelEntry) -> None:
        self._secret = _key(entry)
        self.model = entry.remote_model or entry.id
        self._loop = asyncio.new_event_loop()
        headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        self._client = httpx.AsyncClient(
            base_url=(entry.base_url or "").rstrip("/") + "/",
            headers=headers,
            timeout=httpx.Timeout(entry.timeout_seconds, connect=min(_CONNECT_SECONDS, entry.timeout_seconds)),
        )

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._client.aclose())
            self._loop.close()

    def wait(self, work: Coroutine[Any, Any, T], cancelled: Cancelled) -> T:
        """The result of ``work``; it is cancelled, and its connection closed, once ``cancelled()`` is true.

        Raises:
            _CallerGone: ``cancelled()`` became true first.
        """

        if cancelled():
            work.close()
            raise _CallerGone

        async def guarded() -> T:
            task = asyncio.ensure_future(work)
            try:
                while not (await asyncio.wait({task}, timeout=CANCEL_POLL))[0]:
                    if cancelled():
                        raise _CallerGone
                return task.result()
            finally:
                if task.cancel():
                    await asyncio.wait({task})

        return self._loop.run_until_complete(guarded())

    async def open(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The reply to a POST, its body yet to be read; tried again after a refusal that may pass.

        Raises:
            EngineFailed: the endpoint refused, or cannot be reached; the detail has its own words.
        """
        attempts = AsyncRetrying(
            stop=stop_after_attempt(ATTEMPTS), wait=_pause, retry=retry_if_exception_type(_Passing), reraise=True
        )
        try:
            async for attempt in attempts:
                with attempt:
                    return await self._open_once(path, body)
        except _Passing as passing:
            raise passing.failure from None
        raise AssertionError("tenacity neither returned nor raised")

    async def _open_once(self, path: str, body: dict[str, Any]) -> httpx.Response:
        request = self._client.build_request("POST", path, json=body)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            failure = self.failure(error)
            if isinstance(error, httpx.ReadTimeout):
                raise failure from None
            raise _Passing(failure) from None
        if response.is_success:
            return response
        try:
            content = await response.aread()
        except httpx.TransportError:
            content = b""
        finally:
            await response.aclose()
        failure = self.refusal(response.status_code, content)
        if response.status_code in _RETRIED_STATUS:
            raise _Passing(failure, _seconds(response.headers.get("retry-after")))
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
        error = body.get("error", body) if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        told = message if isinstance(message, str) and message else text
        if self._secret:
            told = told.replace(self._secret, "***")
        hint = "Check the model's api_key in the model server's catalogue." if status in (401, 403) else None
        where = "" if status is None else f"HTTP status {status}: "
        return EngineFailed("the remote model failed", detail=f"{where}{told[:1000]}", hint=hint)

    async def json(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON reply to a POST. Raises ``EngineFailed``."""
        response = await self.open(path, body)
        try:
            content = await response.aread()
        except httpx.TransportError as error:
            raise self.failure(error) from None
        finally:
            await response.aclose()
        try:
            return json.loads(content)
        except ValueError:
            raise _nonsense("no JSON") from None

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of an event stream, up to ``[DONE]`` or its end. Raises ``EngineFailed``."""
        response = await self.open(path, body)
        try:
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                try:
                    event = json.loads(data)
                except ValueError:
                    raise _nonsense("an event that is no JSON") from None
                if not isinstance(event, dict):
                    raise _nonsense("an event that is no object")
                if event.get("error"):
                    raise self.refusal(None, data.encode())
                yield event
        except httpx.TransportError as error:
            raise self.failure(error) from None
        finally:
            await response.aclose()


def _nonsense(what: str) -> EngineFailed:
    return EngineFailed("the remote model answered with nonsense", detail=f"The reply is {what}.")


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:  # a date, which hardly anybody sends
        return None


_backoff = wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT)


def _pause(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after if isinstance(error, _Passing) else None
    return min(asked, LONGEST_WAIT) if asked is not None else _backoff(state)


def _never() -> bool:
    return False


class OpenAIEmbed:
    """Embeddings of a remote model. Without ``dimensions`` in the catalogue, loading asks for one to count them."""

    def __init__(self, entry: ModelEntry, remote: _Remote) -> None:
        self._remote = remote
        self.max_tokens = entry.max_tokens or DEFAULT_CONTEXT_TOKENS
        self.dimensions = entry.dimensions or 0
        if not self.dimensions:
            self.dimensions = int(self.embed(["dimensions"], _never).shape[1])

    def close(self) -> None:
        """Close the connections."""
        self._remote.close()

    def tokenizer(self) -> Any:
        """None: the tokenizer is at the other end. A text that is too long is for the endpoint to cut or refuse."""
        return None

    def embed(self, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        """Embeddings, shape (len(texts), dimensions), as the endpoint gives them. Zeros for what was cancelled.

        Raises:
            EngineFailed: the endpoint failed or sent vectors of another number or shape, or with NaN or infinity.
        """
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        for start in range(0, len(texts), BATCH_TEXTS):
            batch = list(texts[start : start + BATCH_TEXTS])
            body = {"model": self._remote.model, "input": batch, "encoding_format": "float"}
            try:
                reply = self._remote.wait(self._remote.json("embeddings", body), cancelled)
            except _CallerGone:
                break
            found = self._vectors(reply, len(batch))
            if not self.dimensions:
                return found
            vectors[start : start + len(batch)] = found
        return vectors

    def _vectors(self, reply: Any, count: int) -> NDArray[np.float32]:
        try:
            rows = sorted(reply["data"], key=lambda row: row["index"])
            if [row["index"] for row in rows] != list(range(count)):
                raise _nonsense(f"{len(rows)} vectors for {count} texts")
            found = np.array([row["embedding"] for row in rows], dtype=np.float32)
        except (KeyError, TypeError, ValueError):
            raise _nonsense("no list of vectors of one length") from None
        if found.ndim != 2 or (self.dimensions and found.shape[1] != self.dimensions) or not found.shape[1]:
            raise _nonsense(f"of the shape {found.shape}, expected {(count, self.dimensions or 'any')}")
        if not np.isfinite(found).all():
            raise _nonsense("a vector with NaN or infinity")
        return found


class OpenAIGenerate:
    """Text of a remote model."""

    def __init__(self, entry: ModelEntry, remote: _Remote) -> None:
        self._remote = remote
        self.max_tokens = entry.context_tokens or DEFAULT_CONTEXT_TOKENS
        self.brief = entry.brief

    def close(self) -> None:
        """Close the connections."""
        self._remote.close()

    def count_tokens(self, messages: Sequence[dict[str, str]]) -> int:
        """An upper estimate (``ml_rag.prompt.estimate_tokens``): the tokenizer is at the other end."""
        return estimate_tokens(messages)

    def generate(self, messages: Sequence[dict[str, str]], sampling: Sampling, cancelled: Cancelled) -> Iterator[Delta]:
        """The answer as the endpoint streams it; counts where it reports them.

        ``speculative_decoding`` is the endpoint's own affair. Once ``cancelled()`` is true the connection is closed
        and the answer ends without a last piece.

        Raises:
            EngineFailed: the endpoint failed, or broke off.
        """
        body = self._body(messages, sampling)
        events = self._remote.events("chat/completions", body)
        finish: Literal["stop", "length"] | None = None
        usage: dict[str, Any] = {}
        try:
            while (event := self._remote.wait(_next(events), cancelled)) is not None:
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    reason = choice.get("finish_reason")
                    finish = ("length" if reason == "length" else "stop") if reason else finish
                    if text := (choice.get("delta") or {}).get("content"):
                        yield Delta(str(text))
        except _CallerGone:
            return
        except (AttributeError, TypeError):
            raise _nonsense("no chat completion") from None
        finally:
            self._remote.wait(_close(events), _never)
        if finish is None:
            raise EngineFailed("the remote model broke off", detail="Its answer has no finish_reason.")
        yield Delta("", finish, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))

    def _body(self, messages: Sequence[dict[str, str]], sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._remote.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        optional: dict[str, Any] = {
            "top_p": sampling.top_p,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
            # Not OpenAI's own. Most others have them; an endpoint that has not says so.
            "top_k": sampling.top_k,
            "repeat_penalty": sampling.repeat_penalty,
        }
        body.update({key: value for key, value in optional.items() if value is not None})
        if sampling.json_schema is not None:
            schema = {"name": "answer", "schema": sampling.json_schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body


async def _next(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(events, None)


async def _close(events: Any) -> None:
    await events.aclose()


def _count(usage: Any, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else None
