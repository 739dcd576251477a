"""``POST /v1/chat/completions``: OpenAI's chat, and answers from documents (see docs/protocol.md)."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ml_rag.abc import Cancelled, Delta, GenerateEngine
from ml_rag.errors import EngineFailed, InvalidRequest, MlRagError
from ml_rag.protocol import CANCELLED, SUCCESS
from ml_rag.server.boundary import LeasedStream
from ml_rag.server.calls import Calls, Counted
from ml_rag.server.cancellation import ClientGone, watch_disconnect
from ml_rag.server.chat import extract, prompt
from ml_rag.server.chat.citations import Verified, verify
from ml_rag.server.chat.request import ChatDocument, ChatRequest, parse
from ml_rag.server.engines.extractive import Extract
from ml_rag.server.json_schema import check_repetitions, check_size
from ml_rag.server.replies import Choice, Completion, Usage, Used
from ml_rag.server.unexpected import unexpected

#: of a prompt, for each token of the context: what is longer cannot fit, and is not made into messages. To defuse 60 MB
#: of angle brackets takes seconds in which no other thread of the server runs
CHARACTERS_PER_TOKEN = 64


def fit_prompt(body: ChatRequest, engine: GenerateEngine, cancelled: Cancelled | None = None) -> prompt.FittedPrompt:
    """The messages for the model, with as many documents as its context has room for.

    Raises ``InvalidRequest``: not even the question fits, or the language is none.
    """
    documents = list(_documents_with_room(body.documents or (), CHARACTERS_PER_TOKEN * engine.max_tokens))
    *earlier, question = body.messages
    instructions = "\n\n".join(m.content for m in earlier if m.is_system)
    history = [{"role": m.role, "content": m.content} for m in earlier if not m.is_system]

    def build(used: int, turns: Sequence[prompt.Message]) -> list[prompt.Message]:
        return prompt.build(
            question.content,
            documents[:used],
            turns=turns,
            task=body.task or "generation",
            language=body.language,
            instructions=instructions,
            history=history,
            brief=engine.brief,
            length=body.answer_length,
            citation_style=body.citation_style or "none",
            order=body.document_order or "best_last",
        )

    _, turns = fit_history(body, engine, build(0, ()), cancelled)
    count = partial(engine.count_tokens, cancelled=cancelled)
    room = engine.max_tokens - body.sampling().max_tokens
    fitted = prompt.fit(documents, room, count, lambda used: build(used, turns))
    fitted = replace(fitted, turns_used=len(turns))
    if body.documents and not fitted.documents_used and body.task == "summarization":
        # There would be nothing left to summarise but the question itself.
        raise InvalidRequest(
            "no document fits the model's context",
            detail=f"The context has {engine.max_tokens} tokens, max_tokens is {body.sampling().max_tokens}.",
            hint="Give shorter documents, lower max_tokens, or take a model with a larger context.",
        )
    return fitted


def _documents_with_room(documents: Sequence[ChatDocument], characters: int) -> Iterator[prompt.PromptDocument]:
    """Those, from the first on, that have no more than so many characters together."""
    for document in documents:
        text = prompt.labelled(document.text, document.metadata or {})
        characters -= len(document.document_name) + len(text)
        if characters < 0:
            return
        yield prompt.PromptDocument(document.document_name, text)


def _history_budget(body: ChatRequest, engine: GenerateEngine) -> int:
    budget = engine.max_tokens // 4 if body.history_tokens is None else body.history_tokens
    return min(budget, engine.max_tokens - body.sampling().max_tokens)


def _turns_with_room(body: ChatRequest, engine: GenerateEngine) -> list[prompt.Message]:
    """The newest turns that may fit, oldest first."""
    turns: list[prompt.Message] = []
    characters = CHARACTERS_PER_TOKEN * max(_history_budget(body, engine), 0)
    for turn in reversed(body.history or ()):
        characters -= len(turn.content)
        if characters < 0:
            break
        turns.insert(0, {"role": turn.role, "content": turn.content})
    return turns


def fit_history(
    body: ChatRequest, engine: GenerateEngine, messages: list[prompt.Message], cancelled: Cancelled | None = None
) -> tuple[list[prompt.Message], list[prompt.Message]]:
    """Messages with as many of the newest turns as fit history_tokens (a quarter of the context), and these turns."""
    turns = _turns_with_room(body, engine)
    if not turns:
        return messages, []
    count = partial(engine.count_tokens, cancelled=cancelled)
    fitted, used = prompt.fit_history(messages, turns, _history_budget(body, engine), count)
    return fitted, turns[len(turns) - used :]


def _check_length(body: ChatRequest, engine: GenerateEngine) -> None:
    """Raises InvalidRequest where the messages are far longer than the context."""
    length = sum(len(message.content) for message in body.messages)
    if length > (most := CHARACTERS_PER_TOKEN * engine.max_tokens):
        raise InvalidRequest(
            "the prompt does not fit the model's context",
            detail=f"The prompt has {length} characters; {most} at most make the context's {engine.max_tokens} tokens.",
            hint="Ask a shorter question, or take a model with a larger context.",
        )


def _work(
    engine: GenerateEngine, body: ChatRequest, cancelled: Cancelled
) -> Iterator[prompt.FittedPrompt | int | Delta]:
    """Everything that needs the model, in its thread: the prompt where the server writes it, or how many turns of the
    history are in it, then the answer."""
    _check_length(body, engine)
    messages, sampling = body.plain_messages(), body.sampling()
    if body.history is not None and not body.writes_prompt:
        messages, turns = fit_history(body, engine, messages, cancelled)
        yield len(turns)
    elif body.writes_prompt:
        fitted = fit_prompt(body, engine, cancelled)
        yield fitted
        messages = fitted.messages
        if body.documents and sampling.json_schema is None:
            # Endpoints that follow OpenAI take four stop sequences; the caller's go first.
            ours = [sequence for sequence in prompt.RUN_ON if sequence not in sampling.stop]
            sampling = replace(sampling, stop=(*sampling.stop, *ours[: max(0, 4 - len(sampling.stop))]))
            yield from prompt.without_fences(engine.generate(messages, sampling, cancelled))
            return
    yield from engine.generate(messages, sampling, cancelled)


class _Answer:
    """One answer in the making: identity, and what is known when it ends."""

    def __init__(self, body: ChatRequest) -> None:
        self._body = body
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._head = {"id": self._id, "created": self._created, "model": body.model}
        self._fitted: prompt.FittedPrompt | None = None
        self._turns_used = 0
        self._extract: Extract | None = None
        self._last = Delta("")

    async def deltas(self, items: AsyncIterator[prompt.FittedPrompt | Extract | int | Delta]) -> AsyncIterator[Delta]:
        """The pieces of text. Raises ``EngineFailed`` when the engine ends without saying why."""
        async for item in items:
            match item:
                case prompt.FittedPrompt():
                    self._fitted, self._turns_used = item, item.turns_used
                case Extract():
                    self._extract = item
                case int():
                    self._turns_used = item
                case _:
                    self._last = item
                    yield item
        if self._last.finish_reason is None:
            raise EngineFailed("the answer of the model is incomplete", detail="It has no end.")

    async def counted(self, deltas: AsyncIterator[Delta], calls: Calls) -> AsyncIterator[Delta]:
        """The same; at their end they are counted for the call of a session that another program generates for."""
        began, sqlstate = time.monotonic(), CANCELLED
        try:
            async for delta in deltas:
                yield delta
            sqlstate = SUCCESS
        except MlRagError as error:
            sqlstate = error.sqlstate
            raise
        finally:
            if self._body.counted_as is not None:
                cluster, database, role, routine = self._body.counted_as
                took, usage = int((time.monotonic() - began) * 1e6), self._usage
                tokens = usage["prompt_tokens"], usage["completion_tokens"]
                calls.count(cluster, database, Counted(role, routine, "generate", took, sqlstate, *tokens))

    @property
    def _usage(self) -> Usage:
        asked, answered = self._last.prompt_tokens or 0, self._last.completion_tokens or 0
        return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}

    @property
    def _used(self) -> Used:
        used: Used = {}
        if self._body.documents is not None and self._fitted is not None:
            used |= {"documents_given": len(self._body.documents), "documents_used": self._fitted.documents_used}
        if self._body.history is not None:
            used |= {"turns_given": len(self._body.history), "turns_used": self._turns_used}
        if self._body.return_prompt and self._fitted is not None:
            used |= {"prompt": self._fitted.messages}
        if (found := self._extract) is not None and self._body.task != "summarization":
            least = found.min_support if self._body.min_support is None else self._body.min_support
            used |= {"support": round(found.support, 4), "min_support": least}
        return used

    @property
    def _citations(self) -> int | None:
        """How many the text may point to; None: it stays as it is, such as JSON and sentences of documents."""
        body, fitted = self._body, self._fitted
        is_verbatim = self._extract is not None or body.sampling().json_schema is not None
        if body.citations is None or fitted is None or is_verbatim:
            return None
        # documents that did not fit are the last ones, so the numbers of the others are the first
        return min(body.citations, fitted.documents_used)

    def cited(self, text: str) -> str:
        """The text with markers of citations only that the answer has."""
        return text if self._citations is None else verify(text, self._citations)

    async def _texts(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[str]:
        """The same in pieces."""
        held: Verified | None = None
        async for delta in deltas:
            if held is None and self._citations is not None:
                held = Verified(self._citations)
            if held is None:
                yield delta.text
            elif held.takes_long(delta.text):
                yield await asyncio.to_thread(held.add, delta.text)
            else:
                yield held.add(delta.text)
        if held is not None:
            yield await asyncio.to_thread(held.end) if held.takes_long() else held.end()

    def completion(self, text: str) -> Completion:
        """The reply to a request without ``stream``."""
        assert self._last.finish_reason is not None
        choice: Choice = {
            "index": 0, "message": {"role": "assistant", "content": text, "refusal": None},
            "finish_reason": self._last.finish_reason, "logprobs": None,
        }  # fmt: skip
        reply: Completion = {
            "id": self._id, "created": self._created, "model": self._body.model,
            "object": "chat.completion", "choices": [choice], "usage": self._usage,
        }  # fmt: skip
        if used := self._used:
            reply["ml_rag"] = used
        return reply

    async def events(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[bytes, None]:
        """The reply to a request with ``stream``: server-sent events, closed by ``[DONE]`` or by one error event."""
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        extra: dict[str, Any] = {"usage": None} if with_usage else {}
        try:
            yield self._chunk({"role": "assistant", "content": ""}, None, extra)
            async for text in self._texts(deltas):
                if text:
                    yield self._chunk({"content": text}, None, extra)
            yield self._chunk({}, self._last.finish_reason, extra | ({"ml_rag": used} if (used := self._used) else {}))
            if with_usage:
                yield _event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage})
            yield b"data: [DONE]\n\n"
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - the reply has begun; this is the only way left to tell it
            yield _event((error if isinstance(error, MlRagError) else unexpected(error)).to_json())

    def _chunk(self, delta: dict[str, str], finish_reason: str | None, extra: dict[str, Any]) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return _event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **extra})


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


async def _after(first: Delta, rest: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    yield first
    async for delta in rest:
        yield delta


async def chat_completions(request: Request) -> Response:
    """Answer in one piece or, with ``stream``, as server-sent events.

    What is wrong before the first token is an ordinary error reply, in both cases.
    """
    body = parse(await request.body())
    answer = _Answer(body)
    registry = request.app.state.registry
    if (schema := body.sampling().json_schema) is not None:
        check_size(schema)
        # what makes its grammar elsewhere bounds it there
        if not registry.entry(body.model, "generate").kind.is_remote:
            check_repetitions(schema)
    async with AsyncExitStack() as stack:
        cancelled = await stack.enter_async_context(watch_disconnect(request))
        lease = await stack.enter_async_context(registry.lease(body.model, "generate", cancelled))
        if lease.entry.kind.is_extractive:
            embed = extract.embedder(registry, lease.engine, body.embed_model, lease.cancelled)
            items = lease.stream(extract.work, lease.engine, body, embed, lease.cancelled)
        else:
            items = lease.stream(_work, lease.engine, body, lease.cancelled)
        await stack.enter_async_context(aclosing(items))
        deltas = answer.counted(answer.deltas(items), request.app.state.calls)
        first = await anext(deltas)
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            events = answer.events(_after(first, deltas))
            return LeasedStream(events, stack.pop_all(), "text/event-stream", **headers)
        text = first.text + "".join([delta.text async for delta in deltas])
    return JSONResponse(answer.completion(await asyncio.to_thread(answer.cited, text)))
