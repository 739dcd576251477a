"""An OpenAI-compatible endpoint whose answers come from ``ml_rag``. Needs ``pip install ".[gateway]"``.

A token stands for a role of the database: each statement is in a read-only transaction that has taken this role
(PostgREST's way), so a connection has no role of an earlier request. A model is a preset of options.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import time
import tomllib
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import psycopg
from psycopg import sql
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ml_rag.errors import InvalidRequest, MlRagError
from ml_rag.integrations.database import Reader, asked, worded

#: bytes of a request
BODY = 1024 * 1024
#: seconds after which a stream without an answer yet shows that it is alive
ALIVE = 10.0
#: seconds between two looks at whether the client is still there
LOOK = 0.5

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
#: SQLSTATE -> status; all others are 500
_STATUS = {
    "22023": 400,
    "22P02": 400,
    "22P05": 400,
    "42501": 403,
    "P0002": 404,
    "53300": 429,
    "38000": 502,
    "08006": 503,
    "55000": 503,
    "57014": 504,
}
_MARKER = re.compile(r"\[(\d{1,3}(?:, ?\d{1,3})*)\]")
_IS_SUPERUSER = sql.SQL("SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.rolname = current_user")


@dataclass(frozen=True)
class Config:
    """The file of the gateway: ``tokens`` (SHA-256 in hex -> role) and ``models`` (name -> options of ml_rag)."""

    tokens: Mapping[str, str]
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"ml_rag": {"abstain": True}})

    @classmethod
    def read(cls, path: Path) -> Config:
        """Raises MlRagError where the file is not as it should be, without repeating what stands in it."""
        try:
            content = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidRequest(f"cannot read {path}", detail=str(error)) from None
        if unknown := content.keys() - {"tokens", "models"}:
            raise InvalidRequest(
                f"unknown keys in {path}", detail=f"{', '.join(sorted(unknown))}; there are tokens, models."
            )
        tokens = {}
        for name, token in content.get("tokens", {}).items():
            if not isinstance(token, dict) or token.keys() != {"sha256", "role"}:
                raise InvalidRequest(f'token "{name}" in {path} must have "sha256" and "role"')
            # "none" would stand for the role of the DSN
            if (
                not isinstance(token["role"], str)
                or token["role"] in ("", "none")
                or not re.fullmatch("[0-9a-f]{64}", str(token["sha256"]))
            ):
                raise InvalidRequest(f'token "{name}" in {path} is not 64 hexadecimal digits with the name of a role')
            tokens[token["sha256"]] = token["role"]
        if not tokens:
            raise InvalidRequest(f"no tokens in {path}", hint="ml-rag gateway --new-token ROLE makes one.")
        models = content.get("models")
        if models is None:
            return cls(tokens)
        if not models or not all(isinstance(options, dict) for options in models.values()):
            raise InvalidRequest(f"models in {path} are not tables of options")
        return cls(tokens, models)

    def role(self, token: str) -> str | None:
        """The role of a token. It takes as long whichever it is, or none."""
        given, found = digest(token), None
        for sha256, role in self.tokens.items():
            if hmac.compare_digest(given, sha256):
                found = role
        return found


def digest(token: str) -> str:
    """What is kept of a token. It is random, so a fast hash will do."""
    return hashlib.sha256(token.encode()).hexdigest()


class _Refused(Exception):
    """What the client gets in place of an answer."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": "invalid_request_error" if status < 500 else "server_error",
                "param": None,
                "code": code,
            }
        }

    @classmethod
    def of(cls, error: psycopg.Error) -> _Refused:
        state = error.sqlstate or "08006"
        return cls(_STATUS.get(state, 500), worded(error), state)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise _Refused(400, "only text is understood in a message")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise _Refused(400, "the content of a message must be text")
    # PostgreSQL has no such characters
    if content and ("\0" in content or any("\ud800" <= character <= "\udfff" for character in content)):
        raise _Refused(400, "the content of a message has characters that text cannot hold")
    return content or ""


def question(body: Mapping[str, Any], preset: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The last message and the options of ``ml_rag`` for it; those of the preset count more than the client's."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _Refused(400, '"messages" must be a list of messages')
    if not messages or messages[-1].get("role") != "user":
        raise _Refused(400, "the last message must be the user's")
    if body.get("n") not in (None, 1):
        raise _Refused(400, "there is one answer to a question: n must be 1")
    if body.get("tools") or body.get("functions"):
        raise _Refused(400, "tools are not called here")
    history, instructions = [], []
    for message in messages[:-1]:
        if message.get("role") in ("system", "developer"):
            instructions.append(_text(message))
        elif message.get("role") in ("user", "assistant"):
            history.append({"role": message["role"], "content": _text(message)})
        else:
            raise _Refused(400, "messages are of the roles system, developer, user and assistant")
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


def cited(text: str, citations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where the text refers to each citation, else at its end: web pages are url_citation, others file_citation."""
    places: dict[int, list[tuple[int, int]]] = {}
    for marker in _MARKER.finditer(text):
        for number in marker[1].split(","):
            places.setdefault(int(number), []).append(marker.span())
    found = []
    for number, citation in enumerate(citations, 1):
        name = citation.get("document_name") or ""
        for start, end in places.get(number, [(len(text), len(text))]):
            place = {"start_index": start, "end_index": end}
            if name.startswith(("https://", "http://")):
                found.append({"type": "url_citation", "url_citation": {**place, "url": name, "title": name}})
            else:
                file = {"file_id": name, "filename": PurePosixPath(name).name, "quote": citation["segment"]}
                found.append({"type": "file_citation", "file_citation": {**place, **file}})
    return found


def app(dsn: str, config: Config, connections: int = 8) -> Starlette:
    """The application, which connects when it starts."""
    reader = Reader(dsn, name="ml-rag gateway", connections=connections)
    began = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with reader.opened():
            # what is wrong with a role is said now, and not to its user
            for role in sorted(set(config.tokens.values())):
                if (await reader.rows(_IS_SUPERUSER, role=role))[0]["rolsuper"]:
                    raise MlRagError(
                        f'a token is bound to the superuser "{role}"', hint="Bind it to a role that only asks."
                    )
            yield

    def role_of(request: Request) -> str:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        role = config.role(token.strip()) if scheme.lower() == "bearer" else None
        if role is None:
            raise _Refused(401, "a token of this gateway is needed: Authorization: Bearer …", "invalid_api_key")
        return role

    async def answered(query: str, options: Mapping[str, Any], role: str) -> dict[str, Any]:
        try:
            rows = await reader.rows(reader.schemas.answer, asked(query, options), role)
        except psycopg.Error as error:
            raise _Refused.of(error) from None
        document: dict[str, Any] = rows[0]["answer"]
        return document

    async def models(request: Request) -> Response:
        role_of(request)
        names = [{"id": name, "object": "model", "created": began, "owned_by": "ml_rag"} for name in config.models]
        return JSONResponse({"object": "list", "data": names})

    async def completions(request: Request) -> Response:
        role = role_of(request)
        body = await _body(request)
        preset = config.models.get(str(body.get("model")))
        if preset is None:
            raise _Refused(404, f"there are the models {', '.join(config.models)}", "model_not_found")
        query, options = question(body, preset)
        about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body["model"]}
        work = asyncio.create_task(answered(query, options, role))
        if body.get("stream"):
            return StreamingResponse(_stream(about, work), media_type="text/event-stream")
        try:
            while not (await asyncio.wait({work}, timeout=LOOK))[0]:
                if await request.is_disconnected():
                    return Response(status_code=499)
            answer = await work
        finally:
            await _end(work)
        message = {"role": "assistant", "content": answer["text"], "annotations": _cited(answer)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({**about, "object": "chat.completion", "choices": [choice], "ml_rag": _rest(answer)})

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, _Refused)
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
        return JSONResponse(error.body, error.status, headers)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", completions, methods=["POST"]),
        ],
        exception_handlers={_Refused: refused},
        lifespan=lifespan,
    )


async def _body(request: Request) -> dict[str, Any]:
    content = bytearray()
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > BODY:
                raise _Refused(413, f"a request has at most {BODY} bytes")
    except ClientDisconnect:
        raise _Refused(400, "the request broke off") from None
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise _Refused(400, "the request is not JSON") from None
    if not isinstance(body, dict):
        raise _Refused(400, "the request is not a JSON object")
    return body


async def _stream(about: Mapping[str, Any], work: asyncio.Task[dict[str, Any]]) -> AsyncIterator[str]:
    """The answer as events; the database has it in one piece, so that it comes in one."""

    def event(delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return _event({**about, "object": "chat.completion.chunk", "choices": [choice], **more})

    try:
        yield event({"role": "assistant", "content": ""})
        while not (await asyncio.wait({work}, timeout=ALIVE))[0]:
            yield ": the answer is being written\n\n"
        try:
            answer = await work
        except _Refused as error:
            yield _event(error.body)
            return
        yield event({"content": answer["text"], "annotations": _cited(answer)})
        yield event({}, "stop", ml_rag=_rest(answer))
        yield "data: [DONE]\n\n"
    finally:
        await _end(work)


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _end(work: asyncio.Task[dict[str, Any]]) -> None:
    """Cancel its statement where it still runs."""
    if not work.done():
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


def _cited(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    return cited(answer["text"] or "", answer.get("citations") or [])


def _rest(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "text"}
