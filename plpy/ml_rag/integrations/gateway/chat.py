"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ml_rag.integrations.gateway.answer import Answer, Pieces
from ml_rag.integrations.gateway.gate import COMMENT, Gate, coming
from ml_rag.integrations.gateway.question import question, read_body
from ml_rag.integrations.gateway.refused import Refused
from ml_rag.integrations.waiting import Stream, waited_for


async def completions(gate: Gate, request: Request) -> Response:
    """A chat completion, in one piece or as a stream."""
    asker = gate.asker(request)
    body = await read_body(request)
    asked = question(body, await gate.preset(asker, request, body), gate.config.tasks)
    about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body["model"]}
    pieces = Pieces(gate.config) if body.get("stream") else None
    work = await gate.start(asker, gate.answer(asker, asked, pieces))
    if pieces is not None:
        wanted = body.get("stream_options")
        with_usage = isinstance(wanted, dict) and bool(wanted.get("include_usage"))
        return Stream(_stream(about, work, pieces, with_usage), "text/event-stream", [work])
    answer = await waited_for(request, work)
    message = {"role": "assistant", "refusal": None, **_said(answer)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
    whole = {**about, "object": "chat.completion", "choices": [choice], "usage": _usage(answer), "ml_rag": answer.rest}
    return JSONResponse(whole)


def _said(answer: Answer) -> dict[str, Any]:
    nested = [
        {"type": one["type"], "url_citation": {name: value for name, value in one.items() if name != "type"}}
        for one in answer.annotations
    ]
    said = {"content": None, "refusal": answer.text} if answer.is_refusal else {"content": answer.text}
    return {**said, "annotations": nested}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.generated_tokens,
        "total_tokens": answer.prompt_tokens + answer.generated_tokens,
    }


async def _stream(
    about: Mapping[str, Any], work: asyncio.Task[Answer], pieces: Pieces, with_usage: bool
) -> AsyncIterator[str]:
    """The answer as events: what there is of it before all of it, and then the rest."""

    def event(delta: Mapping[str, Any] | None, reason: str | None = None, **more: Any) -> str:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        usage = {"usage": None} if with_usage else {}
        return _event({**about, "object": "chat.completion.chunk", "choices": choices, **usage, **more})

    yield event({"role": "assistant", "content": ""})
    async for piece in coming(work, pieces):
        yield event({"content": piece}) if piece else COMMENT
    try:
        answer = await work
    except Refused as error:
        yield _event(error.body)
        return
    said = _said(answer)
    if pieces.text:
        said["content"] = answer.text[len(pieces.text) :]
    yield event(said)
    yield event({}, answer.finish_reason, ml_rag=answer.rest)
    if with_usage:
        yield event(None, usage=_usage(answer))
    yield "data: [DONE]\n\n"


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
