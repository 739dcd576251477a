"""A chat completion's request as a question with options of ``ml_rag``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ml_rag.integrations.gateway.refused import Refused

#: bytes of a request
BODY = 1024 * 1024

#: parameters of chat completions -> options of ml_generate
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}


async def read_body(request: Request) -> dict[str, Any]:
    content = bytearray()
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > BODY:
                raise Refused(413, f"a request has at most {BODY} bytes")
    except ClientDisconnect:
        raise Refused(400, "the request broke off") from None
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise Refused(400, "the request is not JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, "the request is not a JSON object")
    return body


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused(400, "only text is understood in a message")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise Refused(400, "the content of a message must be text")
    # PostgreSQL has no such characters
    if content and ("\0" in content or any("\ud800" <= character <= "\udfff" for character in content)):
        raise Refused(400, "the content of a message has characters that text cannot hold")
    return content or ""


def question(body: Mapping[str, Any], preset: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The last message and the options of ``ml_rag`` for it; those of the preset count more than the client's."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Refused(400, '"messages" must be a list of messages')
    if not messages or messages[-1].get("role") != "user":
        raise Refused(400, "the last message must be the user's")
    if body.get("n") not in (None, 1):
        raise Refused(400, "there is one answer to a question: n must be 1")
    if body.get("tools") or body.get("functions"):
        raise Refused(400, "tools are not called here")
    history, instructions = [], []
    for message in messages[:-1]:
        if message.get("role") in ("system", "developer"):
            instructions.append(_text(message))
        elif message.get("role") in ("user", "assistant"):
            history.append({"role": message["role"], "content": _text(message)})
        else:
            raise Refused(400, "messages are of the roles system, developer, user and assistant")
    wanted = {option: body[name] for name, option in _PARAMETERS.items() if body.get(name) is not None}
    if (stop := body.get("stop")) is not None:
        wanted["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    options = dict(preset)
    if wanted:
        options["model_options"] = {**wanted, **preset.get("model_options", {})}
    if history:
        options["query_options"] = {**preset.get("query_options", {}), "history": history}
    if instructions:
        options["prompt"] = {"system": "\n".join(instructions), **preset.get("prompt", {})}
    return _text(messages[-1]), options
