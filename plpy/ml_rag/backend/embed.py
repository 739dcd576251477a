"""Texts to vectors, through the model server."""

from __future__ import annotations

from typing import Any

from ml_rag.backend.client import ModelServer
from ml_rag.errors import EngineFailed

#: pgvector's limit of its type vector
MAX_DIMENSIONS = 16000
#: the characters of numbers and what parts them
_NUMBERS = b"0123456789.,-+e"


#: how many tokens a model takes in, as its replies say
_limits: dict[str, int] = {}
#: bytes that a token stands for, about
_BYTES = 4.5


def read_bytes(model_id: str | None) -> float | None:
    """How much of a text a model takes in that has embedded something in this session; None where that is not known."""
    limit = _limits.get(model_id or "")
    return None if limit is None else limit * _BYTES


def embed_counted(server: ModelServer, texts: list[str], model_id: str) -> tuple[list[str], int]:
    """As ``embed``, of documents, and how many of the texts were cut: 0 where the model server cannot know."""
    reply = _ask(server, {"model": model_id, "input": texts, "input_type": "document", "count_truncated": True})
    vectors = _vectors(reply, texts)
    n = reply["usage"].get("truncated_texts") if isinstance(reply.get("usage"), dict) else None
    return vectors, n if isinstance(n, int) and 0 <= n <= len(texts) else 0


def embed(
    server: ModelServer, texts: list[str], model_id: str, input_type: str | None = None, truncate: bool = True
) -> list[str]:
    """Embeddings of the texts in pgvector's text form, in their order, all of one dimension and finite.

    They are requested in that form and passed on as they are: making it here took longer than all else with a reply.
    ``input_type``: query, document or None; some models put a prefix before the one or the other. ``truncate``:
    false = a text beyond the model's limit is InvalidRequest; else it is cut.

    Raises EngineFailed where the reply is anything else: a wrong vector in a table is worse than an error.
    """
    request: dict[str, Any] = {"model": model_id, "input": texts, "input_type": input_type}
    if not truncate:
        request["truncate"] = False
    reply = _ask(server, request)
    vectors = _vectors(reply, texts)
    limit = reply["usage"].get("max_tokens") if isinstance(reply.get("usage"), dict) else None
    if isinstance(limit, int) and limit > 0:
        _limits[model_id] = limit
    return vectors


def count_tokens(server: ModelServer, texts: list[str], model_id: str) -> list[int | None] | None:
    """The tokens of each text as the model reads it; None for one far too long, and where the server cannot know.

    Raises EngineFailed where the reply is anything else.
    """
    reply = server.call("POST", "/v1/tokens", {"model": model_id, "input": texts})
    counts = reply.get("tokens") if isinstance(reply, dict) else reply
    if counts is None:
        return None
    if not isinstance(counts, list) or len(counts) != len(texts):
        raise EngineFailed("unexpected reply from the model server", detail="Not a number of tokens for each text.")
    if not all(count is None or (type(count) is int and count >= 0) for count in counts):
        raise EngineFailed("unexpected reply from the model server", detail="A number of tokens is none.")
    return counts


def _ask(server: ModelServer, request: dict[str, Any]) -> Any:
    return server.call("POST", "/v1/embeddings", {**request, "encoding_format": "text"})


def _vectors(reply: Any, texts: list[str]) -> list[str]:
    """The vectors of a reply, in the order of the texts."""
    try:
        embeddings = {item["index"]: item["embedding"] for item in reply["data"]}
    except (KeyError, TypeError, AttributeError) as e:
        raise EngineFailed("unexpected reply from the model server", detail=f"No embeddings: {e!r}.") from None
    if len(reply["data"]) != len(texts) or embeddings.keys() != set(range(len(texts))):
        detail = f"{len(reply['data'])} embeddings for {len(texts)} texts, or not one for each."
        raise EngineFailed("unexpected reply from the model server", detail=detail)
    vectors = [embeddings[index] for index in range(len(texts))]
    check(vectors)
    return vectors


def check(vectors: list[str]) -> None:
    """All lists of numbers in pgvector's text form, of one dimension, 1 to 16000.

    Raises EngineFailed. NaN and infinity have letters of their own; a number with two points, say, is left to pgvector,
    which reads every one of them anyway (22P02; 22003 if it is not a float32).
    """
    for vector in vectors:
        is_text = isinstance(vector, str) and vector.isascii() and vector != "[]"
        if not is_text or vector.encode().translate(None, _NUMBERS) != b"[]":
            detail = f"No embedding: {str(vector)[:100]!r}."
            raise EngineFailed("unexpected reply from the model server", detail=detail)
    dimensions = {vector.count(",") + 1 for vector in vectors}
    if len(dimensions) > 1:
        raise EngineFailed("unexpected reply from the model server", detail="Embeddings of different dimensions.")
    if vectors and max(dimensions) > MAX_DIMENSIONS:
        detail = f"{max(dimensions)} dimensions; a vector has at most {MAX_DIMENSIONS}."
        raise EngineFailed("the embedding model has too many dimensions", detail=detail)
