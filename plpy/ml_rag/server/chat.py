"""``POST /v1/chat/completions``: OpenAI's chat, and answers from documents (see docs/protocol.md)."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from starlette.types import Receive, Scope, Send

from ml_rag import prompt
from ml_rag.abc import Cancelled, Delta, GenerateEngine, Sampling
from ml_rag.errors import EngineFailed, InvalidRequest, MlRagError
from ml_rag.server.boundary import check_values, unexpected
from ml_rag.server.cancellation import ClientGone, watch_disconnect
from ml_rag.server.json_schema import check_repetitions, check_size

router = APIRouter()

#: of a prompt, for each token of the context: what is longer cannot fit, and is not made into messages. To defuse 60 MB
#: of angle brackets takes seconds in which no other thread of the server runs
CHARACTERS_PER_TOKEN = 64


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


def _plain_text(content: Any) -> Any:
    """OpenAI's content parts as one text; a missing content as an empty one."""
    if content is None:
        return ""
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise ValueError("only parts of the type text are taken")
        return "".join(part["text"] for part in content)
    return content


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": _PART_SCHEMA}]}


class ChatMessage(_Model):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_plain_text), WithJsonSchema(_CONTENT_SCHEMA)] = ""


class ChatDocument(_Model):
    document_name: str = ""
    text: str


class _JsonSchema(_Model):
    name: str = "answer"
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    def schema_of_answer(self) -> dict[str, Any] | None:
        if self.type == "json_object":
            return {"type": "object"}
        return self.json_schema.schema_ if self.json_schema is not None and self.type == "json_schema" else None


class StreamOptions(_Model):
    include_usage: bool = False


def _stop_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "null"},
        {"type": "array", "items": {"type": "string"}, "maxItems": 64},
    ]
}


class ChatRequest(_Model):
    """The body; fields that OpenAI has and this server does not need are ignored, those it cannot honour refused."""

    model: str = Field(min_length=1)
    # lists fail fast: see EmbeddingsBody
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=32000)
    repeat_penalty: float | None = Field(default=None, ge=0, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    stop: Annotated[list[str] | None, BeforeValidator(_stop_list), WithJsonSchema(_STOP_SCHEMA)] = Field(
        default=None, max_length=64
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    response_format: ResponseFormat | None = None
    speculative_decoding: bool | None = None
    language: str | None = None
    task: Literal["generation", "summarization"] | None = None
    documents: list[ChatDocument] | None = Field(default=None, fail_fast=True)
    citation_style: prompt.CitationStyle | None = None
    document_order: prompt.DocumentOrder | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    tools: Annotated[list[Any] | None, Field(max_length=0)] = None

    @model_validator(mode="after")
    def _question_comes_last(self) -> ChatRequest:
        if self.writes_prompt and self.messages[-1].role != "user":
            raise ValueError("with documents, task or language the last message must be the user's")
        return self

    @property
    def writes_prompt(self) -> bool:
        """Whether the server writes the prompt, rather than taking the messages as they are."""
        return self.documents is not None or self.task is not None or self.language is not None

    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_completion_tokens or self.max_tokens or 256,
            temperature=self.temperature or 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            repeat_penalty=self.repeat_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            stop=tuple(self.stop or ()),
            seed=self.seed,
            json_schema=self.response_format.schema_of_answer() if self.response_format else None,
            speculative_decoding=self.speculative_decoding,
        )

    def plain_messages(self) -> list[prompt.Message]:
        return [{"role": _role(message), "content": message.content} for message in self.messages]


def _role(message: ChatMessage) -> str:
    return "system" if message.role == "developer" else message.role


def parse(body: bytes) -> ChatRequest:
    """The request in ``body``.

    Raises:
        InvalidRequest: it is no JSON, has too many values, or a field is missing, of the wrong type or out of range;
            the detail names it.
    """
    check_values(body)
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the body"
        # texts are not repeated: an error's detail ends up in PostgreSQL's log
        given = f", not {first['input']}" if isinstance(first["input"], int | float) else ""
        raise InvalidRequest(
            f"invalid {field}" if first["type"] != "json_invalid" else "the request is not valid JSON",
            detail=f"{field}: {first['msg']}{given}",
        ) from None


def fit_prompt(body: ChatRequest, engine: GenerateEngine, cancelled: Cancelled | None = None) -> prompt.FittedPrompt:
    """The messages for the model, with as many documents as its context has room for.

    Raises:
        InvalidRequest: not even the question fits, or the language is none.
    """
    documents = list(_documents_with_room(body.documents or (), CHARACTERS_PER_TOKEN * engine.max_tokens))
    *earlier, question = body.messages
    instructions = "\n\n".join(m.content for m in earlier if _role(m) == "system")
    history = [{"role": m.role, "content": m.content} for m in earlier if _role(m) != "system"]

    def build(used: int) -> list[prompt.Message]:
        return prompt.build(
            question.content,
            documents[:used],
            task=body.task or "generation",
            language=body.language,
            instructions=instructions,
            history=history,
            brief=engine.brief,
            citation_style=body.citation_style or "none",
            order=body.document_order or "best_last",
        )

    count = partial(engine.count_tokens, cancelled=cancelled)
    fitted = prompt.fit(documents, engine.max_tokens - body.sampling().max_tokens, count, build)
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
        characters -= len(document.document_name) + len(document.text)
        if characters < 0:
            return
        yield prompt.PromptDocument(document.document_name, document.text)


def _check_length(body: ChatRequest, engine: GenerateEngine) -> None:
    """Raises InvalidRequest where the messages are far longer than the context."""
    length = sum(len(message.content) for message in body.messages)
    if length > (most := CHARACTERS_PER_TOKEN * engine.max_tokens):
        raise InvalidRequest(
            "the prompt does not fit the model's context",
            detail=f"The prompt has {length} characters; {most} at most make the context's {engine.max_tokens} tokens.",
            hint="Ask a shorter question, or take a model with a larger context.",
        )


def _work(engine: GenerateEngine, body: ChatRequest, cancelled: Cancelled) -> Iterator[prompt.FittedPrompt | Delta]:
    """Everything that needs the model, in its thread: the prompt where the server writes it, then the answer."""
    _check_length(body, engine)
    messages, sampling = body.plain_messages(), body.sampling()
    if body.writes_prompt:
        fitted = fit_prompt(body, engine, cancelled)
        yield fitted
        messages = fitted.messages
        if body.documents and sampling.json_schema is None:
            # Endpoints that follow OpenAI take four stop sequences; the caller's go first.
            ours = [sequence for sequence in prompt.RUN_ON if sequence not in sampling.stop]
            sampling = replace(sampling, stop=(*sampling.stop, *ours[: max(0, 4 - len(sampling.stop))]))
    yield from engine.generate(messages, sampling, cancelled)


class _Answer:
    """One answer in the making: identity, and what is known when it ends."""

    def __init__(self, body: ChatRequest) -> None:
        self._body = body
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        self._fitted: prompt.FittedPrompt | None = None
        self._last = Delta("")

    async def deltas(self, items: AsyncIterator[prompt.FittedPrompt | Delta]) -> AsyncIterator[Delta]:
        """The pieces of text. Raises ``EngineFailed`` when the engine ends without saying why."""
        async for item in items:
            if isinstance(item, prompt.FittedPrompt):
                self._fitted = item
                continue
            self._last = item
            yield item
        if self._last.finish_reason is None:
            raise EngineFailed("the model broke off", detail="Its answer has no end.")

    @property
    def _usage(self) -> dict[str, int]:
        asked, answered = self._last.prompt_tokens or 0, self._last.completion_tokens or 0
        return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}

    @property
    def _documents(self) -> dict[str, Any]:
        if self._body.documents is None or self._fitted is None:
            return {}
        used = self._fitted.documents_used
        return {"ml_rag": {"documents_given": len(self._body.documents), "documents_used": used}}

    def completion(self, text: str) -> dict[str, Any]:
        """The reply to a request without ``stream``."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": self._last.finish_reason, "logprobs": None}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._usage,
            **self._documents,
        }

    async def events(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[bytes, None]:
        """The reply to a request with ``stream``: server-sent events, closed by ``[DONE]`` or by one error event."""
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        extra: dict[str, Any] = {"usage": None} if with_usage else {}
        try:
            yield self._chunk({"role": "assistant", "content": ""}, None, extra)
            async for delta in deltas:
                if delta.text:
                    yield self._chunk({"content": delta.text}, None, extra)
            yield self._chunk({}, self._last.finish_reason, {**extra, **self._documents})
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


class _EventStream(StreamingResponse):
    """Server-sent events; model and queue are given back also when the client goes before the first of them."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], resources: AsyncExitStack) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._resources.aclose()


@router.post("/v1/chat/completions")
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
        if registry.entry(body.model).engine != "openai":
            check_repetitions(schema)
    async with AsyncExitStack() as stack:
        cancelled = await stack.enter_async_context(watch_disconnect(request))
        lease = await stack.enter_async_context(registry.lease(body.model, "generate", cancelled))
        items = lease.stream(_work, lease.engine, body, lease.cancelled)
        await stack.enter_async_context(aclosing(items))
        deltas = answer.deltas(items)
        first = await anext(deltas)
        if body.stream:
            return _EventStream(answer.events(_after(first, deltas)), stack.pop_all())
        text = first.text + "".join([delta.text async for delta in deltas])
        return JSONResponse(answer.completion(text))
