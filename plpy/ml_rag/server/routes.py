"""The routes of ``docs/protocol.md`` that need no prompt and no parser: models, embeddings, rerank, health, metrics."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel, Field, StrictBool, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ml_rag import __version__
from ml_rag.errors import InvalidRequest, UnknownModel
from ml_rag.server import replies
from ml_rag.server.boundary import check_values, json_response
from ml_rag.server.calls import Calls, Cluster, Oid
from ml_rag.server.cancellation import watch_disconnect
from ml_rag.server.registry import Registry
from ml_rag.server.replies import Embeddings, EmbeddingUsage, Health, Models, Ranked, Ranking, Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

Body = TypeVar("Body", bound=BaseModel)

#: texts in one request: each costs a row of the reply, however short it is
MAX_TEXTS = 16_384
#: texts a cross-encoder scores before it lets other requests for the model through
RERANK_CHUNK = 32


class EmbeddingsBody(BaseModel):
    """``POST /v1/embeddings``. Keys that are not listed are ignored, as other clients send them.

    Lists fail fast, with one error: one for each value would take seconds.
    """

    model: str
    input: str | Annotated[list[str], Field(fail_fast=True)]
    #: text is ours: the vector as JSON in a string, which is pgvector's text form too
    encoding_format: Literal["float", "base64", "text"] = "float"
    #: cut the vectors, as ``ID@N`` in ``model`` does
    dimensions: int | None = None
    #: ours: put the model's prefix for queries or documents before each text
    input_type: Literal["query", "document"] | None = None
    #: ours: false = a text beyond the model's limit is an error, not cut
    truncate: StrictBool = True
    #: ours: tell how many texts were cut, in ``usage.truncated_texts``
    count_truncated: StrictBool = False


class TokensBody(BaseModel):
    """``POST /v1/tokens``."""

    model: str
    input: list[str] = Field(fail_fast=True)


class RerankDocument(BaseModel):
    text: str


class RerankBody(BaseModel):
    """``POST /v1/rerank``."""

    model: str
    query: str
    documents: list[str | RerankDocument] = Field(fail_fast=True)
    top_n: int | None = Field(default=None, ge=0)
    return_documents: StrictBool = False


class CallsBody(BaseModel):
    """``POST /v1/calls``. A cluster is called what its sessions call it."""

    cluster: Cluster
    database: Oid
    #: number and ``session`` of processes that are gone
    gone: list[tuple[int, int]] = Field(default=[], fail_fast=True)
    #: count anew
    reset: StrictBool = False


async def read_body(request: Request, cls: type[Body]) -> Body:
    """The request's JSON body as ``cls``. Raises ``InvalidRequest`` that names the key."""
    body = await request.body()
    check_values(body)
    try:
        return cls.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error.errors(include_input=False, include_url=False)) from None


def invalid(findings: Any) -> InvalidRequest:
    """The first finding of a validation as an error in our form; values are not repeated."""
    finding = findings[0]
    key = next((str(part) for part in finding["loc"] if part != "body"), "")
    return InvalidRequest(
        f"invalid value of {key}" if key else "the request's body is not valid",
        detail=finding["msg"],
    )


def registry_of(request: Request) -> Registry:
    """The server's registry."""
    registry: Registry = request.app.state.registry
    return registry


def _bound(texts: list[str], key: str) -> None:
    if len(texts) > MAX_TEXTS:
        raise InvalidRequest(
            f"invalid value of {key}",
            detail=f"it has {len(texts)} texts, a request may have {MAX_TEXTS}",
            hint="Send them in several requests.",
        )


def _rows(vectors: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """The vectors one by one, as orjson takes them."""
    return list(np.ascontiguousarray(vectors))


async def list_models(request: Request) -> Response:
    """Every model of the catalogue, whether its files are there or not."""
    reply: Models = {"object": "list", "data": registry_of(request).models()}
    return json_response(reply)


async def retrieve_model(request: Request) -> Response:
    """One model."""
    return json_response(registry_of(request).info(request.path_params["model_id"]))


async def embeddings(request: Request) -> Response:
    """Embed texts; concurrent requests share batches."""
    registry = registry_of(request)
    body = await read_body(request, EmbeddingsBody)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        raise InvalidRequest("invalid value of input", detail="there must be at least one text")
    _bound(texts, "input")
    model = body.model if body.dimensions is None else f"{body.model}@{body.dimensions}"
    async with watch_disconnect(request) as cancelled:
        vectors, tokens = await registry.embed(model, texts, cancelled, body.input_type, truncate=body.truncate)
        usage: EmbeddingUsage = {"prompt_tokens": tokens, "total_tokens": tokens}
        if body.count_truncated:
            usage["truncated_texts"] = await registry.count_truncated(model, texts, cancelled, body.input_type)
        if body.encoding_format == "text":
            usage["max_tokens"] = registry.info(model).max_tokens
    data: list[Any]
    if body.encoding_format == "base64":
        little_endian = vectors.astype("<f4", copy=False)
        data = [base64.b64encode(vector.tobytes()).decode("ascii") for vector in little_endian]
    elif body.encoding_format == "text":
        data = [orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY).decode() for vector in _rows(vectors)]
    else:
        data = _rows(vectors)
    reply: Embeddings = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": embedding} for index, embedding in enumerate(data)
        ],
        "model": body.model,
        "usage": usage,
    }
    return json_response(reply)


async def tokens(request: Request) -> Response:
    """Count the tokens of texts."""
    body = await read_body(request, TokensBody)
    _bound(body.input, "input")
    async with watch_disconnect(request) as cancelled:
        counts = await registry_of(request).count_tokens(body.model, body.input, cancelled)
    reply: Tokens = {"model": body.model, "tokens": counts}
    return json_response(reply)


async def rerank(request: Request) -> Response:
    """Score documents against a query, best first."""
    registry = registry_of(request)
    body = await read_body(request, RerankBody)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    _bound(texts, "documents")
    if body.model == "hybrid" and not any(model.id == "hybrid" for model in registry.models()):
        raise UnknownModel(
            "the ranking model hybrid is in the database, not here",
            detail="Its words are those of PostgreSQL's text search configurations.",
            hint="Ask /v1/rerank of ml-rag gateway, or ml_rank in SQL; here, name a cross-encoder.",
        )
    async with watch_disconnect(request) as cancelled:
        scores = await registry.rerank(body.model, body.query, texts, cancelled, chunk=RERANK_CHUNK)
    order = np.argsort(-scores, kind="stable")[: body.top_n]
    results: list[Ranked] = []
    for index in order.tolist():
        # float32 as it is: the shortest digits that tell it from its neighbours
        result: Ranked = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            result["document"] = {"text": texts[index]}
        results.append(result)
    reply: Ranking = {"model": body.model, "results": results}
    return json_response(reply)


async def read_calls(request: Request) -> Response:
    """The calls in progress in a cluster, and what was done in a database of it."""
    body = await read_body(request, CallsBody)
    request.app.state.inbox.drain()  # the session that asks has reported before
    calls: Calls = request.app.state.calls
    for pid, session in body.gone:
        calls.end(body.cluster, pid, session)
    if body.reset:
        calls.reset(body.cluster, body.database)
    since, rows = calls.stats(body.cluster, body.database)
    reply: replies.Calls = {"since": since, "activity": calls.activity(body.cluster), "stats": rows}
    return json_response(reply)


async def healthz(request: Request) -> Response:
    """Whether the server is up, which models are in memory, whether the parsers of documents are confined."""
    state = request.app.state
    uptime = time.monotonic() - state.started
    missing: dict[str, str] | None = state.parsers_miss
    reply: Health = {
        "status": "ok",
        "version": __version__,
        "uptime_seconds": round(uptime, 3),
        "models": registry_of(request).states(),
        "parsers": {"confined": None if missing is None else not missing, "missing": missing or {}},
    }
    return json_response(reply)


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(registry_of(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
