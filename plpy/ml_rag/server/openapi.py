"""The OpenAPI description of the HTTP surface, at ``/openapi.json``: requests as they are checked, replies as they are.

``docs/protocol.md`` is the reference for people. The fuzz tests hold the server to this description.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from ml_rag import __version__
from ml_rag.server import replies
from ml_rag.server.boundary import json_response
from ml_rag.server.chat.request import ChatRequest
from ml_rag.server.documents import DocumentsOptions
from ml_rag.server.replies import Calls, Completion, Embeddings, Error, Health, Model, Models, Ranking, Tokens
from ml_rag.server.routes import CallsBody, EmbeddingsBody, RerankBody, TokensBody

_REF = "#/components/schemas/{model}"


_REQUESTS: list[type] = [EmbeddingsBody, TokensBody, RerankBody, ChatRequest, DocumentsOptions, CallsBody]
_REPLIES: list[type] = [Error, Health, Model, Models, Embeddings, Tokens, Ranking, Completion, Calls]


def _named(model: type) -> dict[str, Any]:
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


def _json(model: type) -> dict[str, Any]:
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
        "/v1/tokens": {"post": _operation("tokens", "Count tokens", _json(Tokens), body=_json(TokensBody))},
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
        "/v1/calls": {
            "post": _operation("calls", "What sessions of PostgreSQL do and did", _json(Calls), body=_json(CallsBody))
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
    described: list[tuple[type, Literal["validation"], TypeAdapter[Any]]] = [
        (model, "validation", TypeAdapter(model)) for model in (*_REQUESTS, *_REPLIES)
    ]
    _, schemas = TypeAdapter.json_schemas(described, ref_template=_REF)
    for name, schema in schemas["$defs"].items():
        if hasattr(replies, name):  # which have no other keys; requests may
            schema["additionalProperties"] = False
    return {
        "openapi": "3.1.0",
        "info": {"title": "ml_rag model server", "version": __version__},
        "paths": _paths(),
        "components": {"schemas": schemas["$defs"]},
    }


async def openapi(request: Request) -> Response:
    """The description of the HTTP surface."""
    return json_response(description())
