"""/v1/embeddings and /v1/rerank: the models of the database's model server, without documents of its stores."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ml_rag.integrations.database import Query
from ml_rag.integrations.gateway.gate import Asker, Gate
from ml_rag.integrations.gateway.question import read_body, storable
from ml_rag.integrations.gateway.refused import Refused
from ml_rag.integrations.waiting import waited_for

#: texts of a request, which are those that OpenAI takes, and those that ml_rank_rows takes
INPUTS = 2048
DOCUMENTS = 200

_EMBED = """SELECT {}(t.text, %(options)s)::pg_catalog.text AS embedding
FROM pg_catalog.unnest(%(texts)s::pg_catalog.text[]) WITH ORDINALITY AS t (text, place) ORDER BY t.place"""
_RANK = """SELECT r.id::pg_catalog.int4 AS index, r.score
FROM {}(%(query)s, %(ids)s::pg_catalog.text[], %(texts)s::pg_catalog.text[], %(options)s) AS r ORDER BY r.rank"""
_NAMES = """SELECT m.model_id FROM {}() AS m WHERE m.task = %(task)s AND m.available ORDER BY m.is_default DESC, 1"""
#: a client counts tokens by it, and ml_rag does not count those of texts that are embedded or ranked
_USAGE = {"prompt_tokens": 0, "total_tokens": 0}


async def embeddings(gate: Gate, request: Request) -> Response:
    """The vectors of texts."""
    asker = gate.asker(request)
    body = await read_body(request)
    given = body.get("input")
    texts = _texts([given] if isinstance(given, str) else given, "input", INPUTS)
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise Refused(400, '"encoding_format" must be "float" or "base64"', param="encoding_format")
    options: dict[str, Any] = {"embed_model_id": _model(body)}
    if (dimensions := _count(body, "dimensions")) is not None:
        options["dimensions"] = dimensions
    query = sql.SQL(_EMBED).format(gate.reader.schemas.routine("ml_embed_row"))
    rows = await _rows(gate, asker, request, query, {"texts": texts, "options": Jsonb(options)}, "embed")

    def made() -> Response:
        vectors = [json.loads(row["embedding"]) for row in rows]
        if form == "base64":
            vectors = [base64.b64encode(struct.pack(f"<{len(one)}f", *one)).decode() for one in vectors]
        data = [{"object": "embedding", "index": n, "embedding": vector} for n, vector in enumerate(vectors)]
        return JSONResponse({"object": "list", "model": body["model"], "data": data, "usage": _USAGE})

    # millions of numbers take a second, in which others are answered
    return await asyncio.to_thread(made)


async def rerank(gate: Gate, request: Request) -> Response:
    """Texts by their relevance to a query, in the form of Jina and Cohere."""
    asker = gate.asker(request)
    body = await read_body(request)
    given = body.get("documents")
    if isinstance(given, list):
        given = [one.get("text") if isinstance(one, dict) else one for one in given]
    texts = _texts(given, "documents", DOCUMENTS)
    (question,) = _texts([body.get("query")], "query", 1)
    options: dict[str, Any] = {"model": _model(body)}
    if (most := _count(body, "top_n")) is not None:
        options["top_n"] = most
    query = sql.SQL(_RANK).format(gate.reader.schemas.routine("ml_rank_rows"))
    ids = [str(n) for n in range(len(texts))]
    parameters = {"query": question, "ids": ids, "texts": texts, "options": Jsonb(options)}
    rows = await _rows(gate, asker, request, query, parameters, "rerank")
    results = [{"index": row["index"], "relevance_score": row["score"]} for row in rows]
    if body.get("return_documents"):
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    return JSONResponse({"model": body["model"], "results": results, "usage": _USAGE})


async def _rows(
    gate: Gate, asker: Asker, request: Request, query: Query, parameters: dict[str, Any], task: str
) -> list[dict[str, Any]]:
    try:
        return await waited_for(request, await gate.start(asker, gate.rows(asker, query, parameters)))
    except Refused as error:
        if error.code != "22023":
            raise
    known = sql.SQL(_NAMES).format(gate.reader.schemas.routine("ml_supported_models"))
    names = await waited_for(request, await gate.start(asker, gate.rows(asker, known, {"task": task})))
    there = ", ".join(row["model_id"] for row in names)
    raise Refused(400, f"the model does not take this; there are the models {there}", "22023", "model")


def _model(body: dict[str, Any]) -> str:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise Refused(400, '"model" must name a model', param="model")
    return storable(name, '"model"', "model")


def _texts(given: Any, name: str, most: int) -> list[str]:
    if not isinstance(given, list) or not given or not all(isinstance(one, str) and one.strip() for one in given):
        raise Refused(400, f'"{name}" must be text that is not empty; tokens are not read', param=name)
    if len(given) > most:
        raise Refused(400, f'"{name}" has at most {most} texts', param=name)
    return [storable(one, f'"{name}"', name) for one in given]


def _count(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise Refused(400, f'"{name}" must be a whole number from 1', param=name)
    return value
