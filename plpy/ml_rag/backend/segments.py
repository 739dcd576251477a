"""Texts of the rows of a table to segments with their embeddings: the model server splits and embeds."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import Any

from ml_rag.backend.client import ModelServer
from ml_rag.backend.load import Upload, multipart, nonsense, rows, segments_and_vectors
from ml_rag.errors import DocumentError, EngineFailed, MlRagError, from_json


def embed(server: ModelServer, texts: list[str], request: dict[str, Any]) -> dict[str, list[Any]]:
    """The fields of ml_rag._segments: segments in the order of the texts, and what is wrong with each text.

    Raises what every text would get: no model, no server, a reply that is none.
    """
    # as Markdown in UTF-8, whatever it begins with
    uploads = [Upload(f"{i}.md", BOM_UTF8 + text.encode(), "", known=False) for i, text in enumerate(texts)]
    body, content_type = multipart(request, uploads)
    waiting = set(range(len(texts)))
    found: dict[int, list[tuple[int, str, str, str]]] = {}
    errors: list[dict[str, Any] | None] = [None] * len(texts)
    try:
        for reply in server.stream("/v1/documents", body, content_type):
            try:
                waiting.remove(i := reply["index"])
            except (KeyError, TypeError):
                raise nonsense(f"No document was asked for by {str(reply)[:100]}") from None
            try:
                found[i] = _segments(reply)
            except (DocumentError, EngineFailed) as e:
                errors[i] = {"sqlstate": e.sqlstate, "message": e.message, "detail": e.detail}
    finally:
        if waiting:
            server.close()  # which makes the model server stop
    if waiting:
        raise nonsense(f"{len(waiting)} of {len(texts)} texts are missing")
    lines = [(i + 1, *segment) for i in sorted(found) for segment in found[i]]
    keys = ("texts", "numbers", "segments", "metadata", "vectors")
    return {key: [line[place] for line in lines] for place, key in enumerate(keys)} | {"errors": errors}


def _segments(reply: dict[str, Any]) -> list[tuple[int, str, str, str]]:
    """Number, text, metadata and vector of each segment."""
    if (failure := reply.get("error")) is not None:
        error: MlRagError = from_json({"error": failure}, DocumentError.status)
        raise error
    segments, vectors, _ = segments_and_vectors(reply)
    if not segments:
        raise DocumentError("the text is empty")
    return [
        (number, *segment)
        for portion in rows(segments, vectors, {})
        for number, segment in enumerate(
            zip(portion.segments, portion.metadata, portion.vectors, strict=True), portion.first
        )
    ]
