"""Texts of the rows of a table to segments with their embeddings: the model server splits and embeds."""

from __future__ import annotations

import contextlib
import itertools
import re
from codecs import BOM_UTF8
from typing import Any

from ml_rag.backend.client import ModelServer
from ml_rag.backend.load import Upload, documents, multipart, nonsense, rows, segments_and_vectors
from ml_rag.errors import DocumentError, EngineFailed, MlRagError, from_json

#: before a line that front matter can begin with; some of that is left out where a document is read
_BEFORE_RULE = re.compile(r"\A[^-\w]*(?=---)")


def embed(server: ModelServer, texts: list[str], request: dict[str, Any]) -> dict[str, list[Any]]:
    """The fields of ml_rag._segments: segments in the order of the texts, and what is wrong with each text.

    Raises what every text would get: no model, no server, a reply that is none.
    """
    # as Markdown in UTF-8, whatever it begins with: after a blank, front matter is text
    contents = [BOM_UTF8 + _BEFORE_RULE.sub(r"\g<0> ", text).encode() for text in texts]
    uploads = [Upload(f"{i}.md", content, "", known=False) for i, content in enumerate(contents)]
    body, content_type = multipart(request, uploads)
    waiting = set(range(len(texts)))
    found: dict[int, list[tuple[int, str, str, str]]] = {}
    errors: list[dict[str, Any] | None] = [None] * len(texts)
    with contextlib.closing(server.stream("/v1/documents", body, content_type)) as stream:
        for i, reply in documents(stream, waiting):
            waiting.remove(i)
            lines = list(reply)
            try:
                found[i] = _segments(lines)
            except (DocumentError, EngineFailed) as e:
                errors[i] = {"sqlstate": e.sqlstate, "message": e.message, "detail": e.detail}
    if waiting:
        raise nonsense(f"{len(waiting)} of {len(texts)} texts are missing")
    all_found = [(i + 1, *segment) for i in sorted(found) for segment in found[i]]
    keys = ("texts", "numbers", "segments", "metadata", "vectors")
    return {key: [one[place] for one in all_found] for place, key in enumerate(keys)} | {"errors": errors}


def _segments(lines: list[dict[str, Any]]) -> list[tuple[int, str, str, str]]:
    """Number, text, metadata and vector of each segment."""
    if (failure := lines[0].get("error")) is not None:
        error: MlRagError = from_json({"error": failure}, DocumentError.status)
        raise error
    found: list[tuple[int, str, str, str]] = []
    for line in lines:
        segments, vectors, _ = segments_and_vectors(line)
        if not segments:
            raise DocumentError("the text is empty")
        for portion in rows(segments, vectors, {}, len(found) + 1):
            found += zip(
                itertools.count(portion.first), portion.segments, portion.metadata, portion.vectors, strict=False
            )
    return found
