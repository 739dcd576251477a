"""The OpenAPI description of the HTTP surface, at ``/openapi.json``: requests as they are checked, replies as they are.

``docs/protocol.md`` is the reference for people. The fuzz tests hold the server to this description.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from ml_rag import __version__
from ml_rag.errors import BY_CODE
from ml_rag.server.boundary import json_response
from ml_rag.server.chat import ChatRequest
from ml_rag.server.documents import DocumentsOptions
from ml_rag.server.routes import EmbeddingsBody, RerankBody

router = APIRouter()

_REF = "#/components/schemas/{model}"


class _Reply(BaseModel):
    """Exactly these keys."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorObject(_Reply):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    code: Literal[tuple(sorted(BY_CODE))]  # type: ignore[valid-type]
    detail: str | None
    hint: str | None


class Error(_Reply):
    error: ErrorObject


class Parsers(_Reply):
    confined: bool | None
    missing: dict[str, str]


class Health(_Reply):
    status: Literal["ok"]
    version: str
    uptime_seconds: float
    models: dict[str, Literal["loaded", "idle", "unavailable"]]
    parsers: Parsers


class Model(_Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: Literal["embed", "generate", "rerank"]
    engine: str
    dimensions: int | None
    max_tokens: int | None
    available: bool
    reason: str | None
    pull: str | None


class Models(_Reply):
    object: Literal["list"]
    data: list[Model]


class Embedding(_Reply):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(_Reply):
    prompt_tokens: int
    total_tokens: int


class Embeddings(_Reply):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RankedText(_Reply):
    text: str


class Ranked(BaseModel):
    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(_Reply):
    model: str
    results: list[Ranked]


class Message(_Reply):
    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(_Reply):
    index: Literal[0]
    message: Message
    finish_reason: Literal["stop", "length"]
    logprobs: None


class Usage(_Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class DocumentsUsed(_Reply):
    documents_given: int
    documents_used: int


class Completion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    ml_rag: DocumentsUsed | None = None


_REQUESTS: list[type[BaseModel]] = [EmbeddingsBody, RerankBody, ChatRequest, DocumentsOptions]
_REPLIES: list[type[BaseModel]] = [Error, Health, Model, Models, Embeddings, Ranking, Completion]


def _named(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model.__name__)}


def _content(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}


def _operation(name: str, summary: str, *replies: dict[str, Any], body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One method of a path; ``replies``: what may come with status 200."""
    media: dict[str, Any] = {}
    for reply in replies:
        media |= reply["content"]
    error = _content("application/json", _named(Error))
    statuses = {"400": "not valid", "403": "forbidden", "404": "no such model", "429": "queue full", "500": "failed"}
    statuses |= {"502": "unreachable", "503": "model not available", "507": "disk full"} if body else {}
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "done", "content": media},
            **{status: {"description": text, **error} for status, text in statuses.items()},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, **body}
    return operation


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return _content("application/json", _named(model))


def _paths() -> dict[str, Any]:
    text = {"type": "string"}
    event = {
        "type": "object",
        "properties": {
            "data": {"type": "string", "description": "JSON of a chat.completion.chunk or of an error; at last [DONE]"}
        },
        "required": ["data"],
    }
    form = {
        "type": "object",
        "properties": {
            "options": _named(DocumentsOptions),
            "file": {"type": "array", "items": {"type": "string", "format": "binary"}},
        },
        "required": ["options"],
    }
    documents = _content("multipart/form-data", form)
    documents["content"]["multipart/form-data"]["encoding"] = {"options": {"contentType": "application/json"}}
    one_model = _operation("retrieve_model", "One model", _json(Model))
    one_model["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": text}]
    return {
        "/healthz": {"get": _operation("healthz", "Whether the server is up", _json(Health))},
        "/metrics": {"get": _operation("metrics", "Prometheus' text format", _content("text/plain", text))},
        "/openapi.json": {
            "get": _operation("openapi", "This description", _content("application/json", {"type": "object"}))
        },
        "/v1/models": {"get": _operation("list_models", "All models", _json(Models))},
        "/v1/models/{model_id}": {"get": one_model},
        "/v1/embeddings": {
            "post": _operation("embeddings", "Embed texts", _json(Embeddings), body=_json(EmbeddingsBody))
        },
        "/v1/rerank": {"post": _operation("rerank", "Score texts", _json(Ranking), body=_json(RerankBody))},
        "/v1/chat/completions": {
            "post": _operation(
                "chat_completions",
                "Answer, in one piece or as server-sent events",
                _json(Completion),
                _content("text/event-stream", event),
                body=_json(ChatRequest),
            )
        },
        "/v1/documents": {
            "post": _operation(
                "documents", "Parse, split and embed", _content("application/x-ndjson", text), body=documents
            )
        },
    }


@functools.cache
def description() -> dict[str, Any]:
    """The whole of it, OpenAPI 3.1."""
    _, schemas = models_json_schema([(m, "validation") for m in (*_REQUESTS, *_REPLIES)], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ml_rag model server", "version": __version__},
        "paths": _paths(),
        "components": {"schemas": schemas["$defs"]},
    }


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """The description of the HTTP surface."""
    return json_response(description())
