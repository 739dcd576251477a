"""/v1/responses in its plain form: text in, text and citations out. Nothing is kept."""

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

#: parameters that a chat completion has under the same name
_SAME = ("model", "temperature", "top_p", "tool_choice")
#: what would need an earlier response, or one that is worked at after the request
_KEPT = ("previous_response_id", "conversation", "background")

#: a text before any of it is there
_EMPTY = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


async def responses(gate: Gate, request: Request) -> Response:
    """A response, in one piece or as a stream."""
    asker = gate.asker(request)
    body = await read_body(request)
    asked = question(_as_chat(body), await gate.preset(asker, request, body), gate.config.tasks)
    about = {
        "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": body["model"],
        "instructions": body.get("instructions"), "metadata": body.get("metadata") or {}, "tools": [],
        "tool_choice": "none", "parallel_tool_calls": False, "temperature": body.get("temperature"),
        "top_p": body.get("top_p"), "max_output_tokens": body.get("max_output_tokens"), "store": False,
    }  # fmt: skip
    pieces = Pieces(gate.config) if body.get("stream") else None
    work = await gate.start(asker, gate.answer(asker, asked, pieces))
    if pieces is not None:
        return Stream(_stream(about, work, pieces), "text/event-stream", [work])
    answer = await waited_for(request, work)
    return JSONResponse({**about, **_done(answer, _message(answer, _new_message()))})


def _as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request as one for a chat completion. Raises Refused."""
    for name in _KEPT:
        if body.get(name):
            raise Refused(400, f'no response is kept here: leave "{name}" out', param=name)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Refused(400, '"input" must be text or a list of messages', param="input")
    # calls of tools and the thoughts of models are not messages
    messages = [item for item in items if item.get("type", "message") == "message"]
    if body.get("instructions") is not None:
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    made = {name: body[name] for name in _SAME if body.get(name) is not None}
    form = body.get("text")
    form = form.get("format") if isinstance(form, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return {**made, "messages": messages, "max_tokens": body.get("max_output_tokens"), "response_format": form}


def _new_message() -> dict[str, Any]:
    return {
        "type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": "in_progress", "content": [],
    }  # fmt: skip


def _message(answer: Answer, begun: Mapping[str, Any]) -> dict[str, Any]:
    content = (
        {"type": "refusal", "refusal": answer.text}
        if answer.is_refusal
        else {"type": "output_text", "text": answer.text, "annotations": answer.annotations, "logprobs": []}
    )
    state = "incomplete" if answer.finish_reason == "length" else "completed"
    return {**begun, "status": state, "content": [content]}


def _done(answer: Answer, message: dict[str, Any]) -> dict[str, Any]:
    """What a response has when its answer is there."""
    return {
        "status": message["status"],
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if message["status"] == "incomplete" else None,
        "output": [message],
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.generated_tokens,
        },
        "ml_rag": answer.rest,
    }


async def _stream(about: Mapping[str, Any], work: asyncio.Task[Answer], pieces: Pieces) -> AsyncIterator[str]:
    """The answer as events: what there is of it before all of it, and then the rest."""
    count = 0

    def event(kind: str, **more: Any) -> str:
        nonlocal count
        content = {"type": kind, "sequence_number": count, **more}
        count += 1
        return f"event: {kind}\ndata: {json.dumps(content)}\n\n"

    unfinished: dict[str, Any] = {
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    for kind in ("response.created", "response.in_progress"):
        yield event(kind, response={**about, **unfinished})
    begun = _new_message()
    item, place = {"output_index": 0}, {"output_index": 0, "content_index": 0, "item_id": begun["id"]}
    is_open = False

    def opening(part: Mapping[str, Any]) -> list[str]:
        added = event("response.output_item.added", **item, item=begun)
        return [added, event("response.content_part.added", **place, part=part)]

    async for piece in coming(work, pieces):
        if not piece:
            yield COMMENT
            continue
        for one in [] if is_open else opening(_EMPTY):
            yield one
        is_open = True
        yield event("response.output_text.delta", **place, delta=piece, logprobs=[])
    try:
        answer = await work
    except Refused as error:
        said = error.body["error"]
        failed = {"status": "failed", "error": {"code": said["code"] or said["type"], "message": said["message"]}}
        yield event("response.failed", response={**about, **unfinished, **failed})
        return
    message = _message(answer, begun)
    (part,) = message["content"]
    for one in [] if is_open else opening({**part, "refusal": ""} if part["type"] == "refusal" else _EMPTY):
        yield one
    if part["type"] == "refusal":
        yield event("response.refusal.delta", **place, delta=answer.text)
        yield event("response.refusal.done", **place, refusal=answer.text)
    else:
        if rest := answer.text[len(pieces.text) :]:
            yield event("response.output_text.delta", **place, delta=rest, logprobs=[])
        for number, annotation in enumerate(answer.annotations):
            kind = "response.output_text.annotation.added"
            yield event(kind, **place, annotation_index=number, annotation=annotation)
        yield event("response.output_text.done", **place, text=answer.text, logprobs=[])
    yield event("response.content_part.done", **place, part=part)
    yield event("response.output_item.done", **item, item=message)
    yield event(f"response.{message['status']}", response={**about, **_done(answer, message)})
