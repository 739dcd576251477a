"""A chat completion's request as a question with options of ``ml_rag``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ml_rag.integrations.database import PLACE
from ml_rag.integrations.gateway.citations import without_list
from ml_rag.integrations.gateway.refused import Refused

#: bytes of a request, and seconds in which they come
BODY, SECONDS = 1024 * 1024, 60.0
#: earlier messages that ml_rag takes
HISTORY = 1000
#: no parameter takes such a number
_LARGEST = 1e100
#: of the answer to a task, unless the program says
TASK_TOKENS = 512

#: parts of a message that are text -> their key
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
#: options of every call, and of that for a task, whatever settings of the database say
_ALWAYS: dict[str, Any] = {"return_usage": True, "skip_generate": False}
_TASK: dict[str, Any] = {
    **_ALWAYS,
    "n_citations": 0,
    "grounding": None,
    "min_support": None,
    "remove_unsupported": None,
}
#: modes of tool_choice in which a model may answer without a tool
_NO_TOOL = ("none", "auto", None)


@dataclass(frozen=True)
class _Parameter:
    """A number among the parameters of a chat completion, and what it is as an option of ml_generate."""

    option: str
    least: float
    most: float
    is_whole: bool = False
    #: what is beyond is brought to the nearest number that the option takes, as OpenAI's range is wider
    is_clamped: bool = False

    def read(self, name: str, value: Any) -> float:
        """Raises Refused."""
        # a whole number can be larger than any of floating point
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
        if not is_number or (self.is_whole and value != int(value)):
            raise Refused(400, f'"{name}" must be a {"whole " if self.is_whole else ""}number', param=name)
        if self.is_clamped:
            value = min(max(value, self.least), self.most)
        elif not self.least <= value <= self.most:
            raise Refused(400, f'"{name}" must be from {self.least:g} to {self.most:g}', param=name)
        return int(value) if self.is_whole else value


_LENGTH = _Parameter("max_tokens", 1, 1_000_000, is_whole=True)
_PENALTY = 0, 1
_PARAMETERS = {
    "temperature": _Parameter("temperature", 0, 100),
    "top_p": _Parameter("top_p", 0, 1),
    "frequency_penalty": _Parameter("frequency_penalty", *_PENALTY, is_clamped=True),
    "presence_penalty": _Parameter("presence_penalty", *_PENALTY, is_clamped=True),
    "seed": _Parameter("seed", -(2**63), 2**64, is_whole=True),
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
}


@dataclass(frozen=True)
class Question:
    """The last message of a request, and the options of ``ml_rag`` for it."""

    text: str
    options: dict[str, Any]
    #: it is a program's own, for a title, tags and the like
    is_task: bool = False
    #: tokens that the client allows for the answer, where the preset does not say
    length: int | None = None

    @property
    def is_json(self) -> bool:
        """Whether the client asked for JSON, or the preset does."""
        return keys(self.options, "model_options").get("json_schema") is not None


def keys(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The keys of an object among options; none of null, which stands for what is built in."""
    found: Mapping[str, Any] = options.get(name) or {}
    return found


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object that was sent. Raises Refused."""
    content = bytearray()
    try:
        async with asyncio.timeout(SECONDS):
            async for chunk in request.stream():
                content += chunk
                if len(content) > BODY:
                    raise Refused(413, f"a request has at most {BODY} bytes")
    except (ClientDisconnect, TimeoutError):
        raise Refused(400, "the request broke off") from None
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise Refused(400, "the request is not JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, "the request is not a JSON object")
    return body


def question(body: Mapping[str, Any], preset: Mapping[str, Any], tasks: Sequence[str] = ()) -> Question:
    """The question of a request; options of the preset count more than the client's. Raises Refused.

    ``tasks``: how prompts begin that are a program's own. The model answers those alone.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Refused(400, '"messages" must be a list of messages', param="messages")
    if not messages or messages[-1].get("role") != "user":
        raise Refused(400, "the last message must be the user's", param="messages")
    if body.get("n") not in (None, 1):
        raise Refused(400, "there is one answer to a question: n must be 1", param="n")
    _refuse_demanded_tool(body)
    text = _text(messages[-1])
    if not text.strip():
        raise Refused(400, "the last message is empty", param="messages")
    history, instructions = [], []
    for message in messages[:-1]:
        role, said = message.get("role"), _text(message)
        if role in ("system", "developer"):
            instructions.append(said)
        elif role in ("user", "assistant"):
            said = without_list(said) if role == "assistant" else said
            if said.strip():  # a call of a tool has no text
                history.append({"role": role, "content": said})
        elif role not in ("tool", "function"):
            raise Refused(400, "messages are of the roles system, developer, user and assistant", param="messages")
    wanted = _model_options(body, preset)
    model_options = {**wanted, **keys(preset, "model_options")}
    # what comes with documents of its own is a question about them
    if any(text.startswith(beginning) for beginning in tasks) and "</context>" not in text:
        options = {**_TASK, "model_options": {"max_tokens": TASK_TOKENS, **model_options}}
        return Question(text, options, is_task=True)
    options = {"citation_fields": PLACE, **preset, **_ALWAYS}
    if model_options:
        options["model_options"] = model_options
    if history:
        options["query_options"] = {**keys(preset, "query_options"), "history": history[-HISTORY:]}
    if instructions:
        options["prompt"] = {"system": "\n".join(instructions), **keys(preset, "prompt")}
    length = wanted.get("max_tokens") if "max_tokens" not in keys(preset, "model_options") else None
    return Question(text, options, length=length)


def _refuse_demanded_tool(body: Mapping[str, Any]) -> None:
    """Tools that nothing demands are left aside, as a model may do with them."""
    for name in ("tool_choice", "function_call"):
        choice = body.get(name)
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools")
            choice = choice.get("mode") or (allowed.get("mode") if isinstance(allowed, dict) else allowed)
        if choice not in _NO_TOOL:
            raise Refused(400, f'tools are not called here: "{name}" must be "auto" or "none"', param=name)


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message; its parts are lines. Raises Refused."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part) for part in content)
    if not isinstance(content, str | None):
        raise Refused(400, "the content of a message must be text", param="messages")
    return storable(content or "", "the content of a message", "messages")


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXTS.get(kind, "")) if isinstance(kind, str) else None
    if not isinstance(text, str):
        what = {"image_url": "an image", "input_image": "an image", "input_audio": "audio", "file": "a file"}
        named = what.get(kind) if isinstance(kind, str) else None
        raise Refused(400, f"a message has {named or 'a part that is not text'}; only text is read", param="messages")
    return text


def storable(text: str, what: str, param: str) -> str:
    """The text, if PostgreSQL can hold it. Raises Refused."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise Refused(400, f"{what} has characters that text cannot hold", param=param)
    return text


def _model_options(body: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    for name, parameter in _PARAMETERS.items():
        if body.get(name) is not None:
            wanted[parameter.option] = parameter.read(name, body[name])
    if "seed" in wanted:
        wanted["seed"] %= 2**32
    stop = body.get("stop")
    if stop is not None:
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(one, str) for one in stop):
            raise Refused(400, '"stop" must be a text or a list of texts', param="stop")
        if stop := [storable(one, '"stop"', "stop") for one in stop if one]:
            wanted["stop_sequences"] = stop
    if (schema := _schema(body.get("response_format"))) is not None:
        if keys(preset, "model_options").get("json_schema") is not None:
            raise Refused(400, "this model answers in a format of its own", param="response_format")
        wanted["json_schema"] = schema
    return wanted


def _schema(wanted: Any) -> dict[str, Any] | None:
    """The JSON schema that a ``response_format`` stands for; None: text."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = wanted.get("json_schema") if kind == "json_schema" else None
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        message = '"response_format" must be of the type text, json_object or json_schema, the last one with a schema'
        raise Refused(400, message, param="response_format")
    return schema
