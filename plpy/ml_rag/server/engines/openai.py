"""Engine ``openai``: any OpenAI-compatible endpoint (Ollama, vLLM, llama-server, hosted ones), for embed and generate;
for rerank the address ``/rerank`` of Jina, Cohere, vLLM, llama-server and Text Embeddings Inference.

Address and key come from the catalogue only; neither is ever part of an error. Requests run in an event loop of the
engine's own thread, so that one that waits can be given up, and its connection closed, once the caller has gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ml_rag.abc import Cancelled, Delta, Sampling
from ml_rag.errors import EngineFailed
from ml_rag.server.chat.prompt import estimate_tokens, without_control_tokens
from ml_rag.server.engines.openai_endpoint import CallerGone, Endpoint, Refused, nonsense

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ml_rag.abc import Engine
    from ml_rag.server.catalogue import ModelEntry

#: context assumed where the catalogue gives no ``context_tokens``
DEFAULT_CONTEXT_TOKENS = 8192
#: texts in one request for embeddings
BATCH_TEXTS = 64
#: of an event stream: at its beginning and end, and for each token of the answer, which is an event of its own
STREAM_BYTES = 1024 * 1024
TOKEN_BYTES = 4096
MAX_STREAM_BYTES = 256 * 1024 * 1024
#: of tokens
MAX_COUNT = 2**31


def load(entry: ModelEntry, models_dir: Path) -> Engine:
    """The catalogue's remote model. Raises ``ModelUnavailable``."""
    remote = Endpoint(entry)
    try:
        if entry.task == "embed":
            return OpenAIEmbed(entry, remote)
        return (OpenAIGenerate if entry.task == "generate" else OpenAIRerank)(entry, remote)
    except BaseException:
        remote.close()
        raise


class _Remote:
    def __init__(self, remote: Endpoint, max_tokens: int | None) -> None:
        self._remote = remote
        self.max_tokens = max_tokens or DEFAULT_CONTEXT_TOKENS

    def close(self) -> None:
        """Close the connections."""
        self._remote.close()


class OpenAIEmbed(_Remote):
    """Embeddings of a remote model. Without ``dimensions`` in the catalogue, loading asks for one to count them."""

    def __init__(self, entry: ModelEntry, remote: Endpoint) -> None:
        super().__init__(remote, entry.max_tokens)
        self.dimensions = entry.dimensions or 0
        #: other models than those whose vectors can be cut refuse the key
        self._cut = {"dimensions": self.dimensions} if entry.min_dimensions is not None else {}
        if not self.dimensions:
            self.dimensions = int(self.embed(["dimensions"], lambda: False).shape[1])

    def tokenizer(self) -> Any:
        """None: the tokenizer is at the other end. A text that is too long is for the endpoint to cut or refuse."""
        return None

    def embed(self, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        """Embeddings, shape (len(texts), dimensions), as the endpoint gives them. Zeros for what was cancelled.

        Raises ``EngineFailed``: the endpoint failed or sent vectors of another number or shape, or with NaN or
        infinity.
        """
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        for start in range(0, len(texts), BATCH_TEXTS):
            batch = list(texts[start : start + BATCH_TEXTS])
            body = {"model": self._remote.model, "input": batch, "encoding_format": "float", **self._cut}
            try:
                reply = self._remote.wait(self._remote.json("embeddings", body), cancelled)
            except CallerGone:
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
                raise nonsense(f"{len(rows)} vectors for {count} texts")
            numbers = np.array([row["embedding"] for row in rows])
            if numbers.dtype.kind not in "iuf":  # texts and truth values would become numbers
                raise TypeError
            with np.errstate(over="ignore"):
                found = numbers.astype(np.float32)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            raise nonsense("no list of vectors of one length") from None
        if found.ndim != 2 or (self.dimensions and found.shape[1] != self.dimensions) or not found.shape[1]:
            raise nonsense(f"of the shape {found.shape}, expected {(count, self.dimensions or 'any')}")
        if not np.isfinite(found).all():
            raise nonsense("a vector with NaN or infinity")
        return found


class OpenAIRerank(_Remote):
    """Scores of a remote cross-encoder."""

    def __init__(self, entry: ModelEntry, remote: Endpoint) -> None:
        super().__init__(remote, entry.max_tokens)
        #: whether it wants "texts", as Text Embeddings Inference does, where all others want "documents"
        self._wants_texts = False
        #: whether its scores are logits, as llama-server's
        self._are_logits = False

    def rerank(self, query: str, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        """Relevance 0-1 of each text, shape (len(texts),). Zeros for what was cancelled.

        Raises ``EngineFailed``: the endpoint failed, or did not give one finite score for each text.
        """
        try:
            reply = self._ask(query, list(texts), cancelled)
        except CallerGone:
            return np.zeros(len(texts), np.float32)
        scores = _scores(reply, len(texts))
        self._are_logits = self._are_logits or bool(scores.min() < 0 or scores.max() > 1)
        if self._are_logits:
            scores = 1 / (1 + np.exp(-np.clip(scores, -80, 80)))
        return scores.astype(np.float32)

    def _ask(self, query: str, texts: list[str], cancelled: Cancelled) -> Any:
        if not self._wants_texts:
            body = {"model": self._remote.model, "query": query, "documents": texts, "top_n": len(texts)}
            try:
                return self._remote.wait(self._remote.json("rerank", body), cancelled)
            except Refused as refused:
                if refused.http_status != HTTPStatus.UNPROCESSABLE_ENTITY or "texts" not in (refused.detail or ""):
                    raise
        reply = self._remote.wait(
            self._remote.json("rerank", {"query": query, "texts": texts, "truncate": True}), cancelled
        )
        self._wants_texts = True
        return reply


def _scores(reply: Any, count: int) -> NDArray[np.float64]:
    """The scores by the place of their texts."""
    try:
        rows = reply if isinstance(reply, list) else reply["results"]
        found = {row["index"]: row["score"] if "score" in row else row["relevance_score"] for row in rows}
        if len(rows) != count or set(found) != set(range(count)) or any(type(index) is not int for index in found):
            raise nonsense(f"{len(rows)} scores for {count} texts")
        scores = np.array([found[index] for index in range(count)])
        if scores.dtype.kind not in "iuf":  # texts and truth values would become numbers
            raise TypeError
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise nonsense("no list of scores") from None
    if not np.isfinite(scores).all():
        raise nonsense("a score that is NaN or infinite")
    return scores.astype(np.float64)


class OpenAIGenerate(_Remote):
    """Text of a remote model."""

    def __init__(self, entry: ModelEntry, remote: Endpoint) -> None:
        super().__init__(remote, entry.context_tokens)
        self.brief = entry.brief

    def count_tokens(self, messages: Sequence[dict[str, str]], cancelled: Cancelled | None = None) -> int:
        """An upper estimate (``ml_rag.server.chat.prompt.estimate_tokens``): the tokenizer is at the other end."""
        return estimate_tokens(messages)

    def generate(self, messages: Sequence[dict[str, Any]], sampling: Sampling, cancelled: Cancelled) -> Iterator[Delta]:
        """The answer as the endpoint streams it; counts where it reports them. A content may be a list of parts, texts
        and images.

        ``speculative_decoding`` is the endpoint's own affair. Once ``cancelled()`` is true the connection is closed
        and the answer ends without a last piece.

        Raises ``EngineFailed``: the endpoint failed, or broke off.
        """
        body = self._body(messages, sampling)
        most = min(STREAM_BYTES + TOKEN_BYTES * sampling.max_tokens, MAX_STREAM_BYTES)
        events = self._remote.events("chat/completions", body, most)
        finish: Literal["stop", "length"] | None = None
        usage: dict[str, Any] = {}
        held = ""  # what stands for half a character at the end of a text that is cut
        try:
            while (event := self._remote.wait(_next(events), cancelled)) is not None:
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    reason = choice.get("finish_reason")
                    finish = ("length" if reason == "length" else "stop") if reason else finish
                    if text := (choice.get("delta") or {}).get("content"):
                        text = held + _said(text)
                        said = text.rstrip("\ufffd")
                        held = text[len(said) :]
                        if said:
                            yield Delta(said)
        except CallerGone:
            return
        except (AttributeError, TypeError):
            raise nonsense("no chat completion") from None
        finally:
            self._remote.wait(_close(events), lambda: False)
        if finish is None:
            raise EngineFailed("the answer of the remote model is incomplete", detail="It has no finish_reason.")
        yield Delta(
            "" if finish == "length" else held,
            finish,
            _count(usage, "prompt_tokens"),
            _count(usage, "completion_tokens"),
        )

    def _body(self, messages: Sequence[dict[str, Any]], sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._remote.model,
            "messages": [{**message, "content": _content(message["content"])} for message in messages],
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


def _content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return without_control_tokens(content)
    return [{**part, "text": without_control_tokens(part["text"])} if "text" in part else part for part in content]


async def _next(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(events, None)


async def _close(events: Any) -> None:
    await events.aclose()


def _said(text: Any) -> str:
    if not isinstance(text, str):
        raise nonsense("an answer that is not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise nonsense("a text with half of a surrogate pair") from None
    return text


def _count(usage: Any, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, dict) else None
    if not isinstance(value, int):
        return None
    if not 0 <= value < MAX_COUNT:
        raise nonsense("a number of tokens that cannot be")
    return value
