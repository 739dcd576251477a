"""Texts of the rows of a table to segments with their embeddings: the model server splits and embeds."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from struct import unpack_from
from typing import Any

from ml_rag.backend.client import ModelServer
from ml_rag.backend.load import Upload, documents, multipart, nonsense, rows, segments_and_vectors
from ml_rag.errors import DocumentError, EngineFailed, MlRagError, from_json

#: segments of a text, as the server sends them, and their vectors: float32, little endian, one row a segment
Line = tuple[list[dict[str, Any]], bytes]

#: of the segments that are held at once, but for those of the last text; and what each takes beside its vector
MOST_BYTES, _SEGMENT_BYTES = 64 * 1024**2, 1000

#: before a line that front matter can begin with; some of that is left out where a document is read
_BEFORE_RULE = re.compile(r"\A[^-\w]*(?=---)")


def embed(
    server: ModelServer, texts: list[str], request: dict[str, Any]
) -> tuple[list[list[Line]], list[dict[str, Any] | None]]:
    """The lines of each text, none of one that failed, and what is wrong with each: of all texts, or of the first ones,
    at least one, where their segments are ``MOST_BYTES``.

    Raises what every text would get: no model, no server, a reply that is none.
    """
    # as Markdown in UTF-8, whatever it begins with: after a blank, front matter is text
    contents = [BOM_UTF8 + _BEFORE_RULE.sub(r"\g<0> ", text).encode() for text in texts]
    uploads = [Upload(f"{i}.md", content, "", known=False) for i, content in enumerate(contents)]
    body, content_type = multipart(request, uploads)
    waiting = set(range(len(texts)))
    found: list[list[Line]] = [[] for _ in texts]
    errors: list[dict[str, Any] | None] = [None] * len(texts)
    held = 0
    with contextlib.closing(server.stream("/v1/documents", body, content_type)) as stream:
        for i, reply in documents(stream, waiting):
            waiting.remove(i)
            try:
                for line in reply:
                    found[i].append(_checked(line))
            except (DocumentError, EngineFailed) as e:
                errors[i] = {"sqlstate": e.sqlstate, "message": e.message, "detail": e.detail}
                found[i] = []
            for _ in reply:
                pass  # what is left of one that failed
            held += sum(len(vectors) + _SEGMENT_BYTES * len(segments) for segments, vectors in found[i])
            if held > MOST_BYTES and 0 not in waiting:
                n = min(waiting, default=len(texts))
                return found[:n], errors[:n]
    if waiting:
        raise nonsense(f"{len(waiting)} of {len(texts)} texts are missing")
    return found, errors


def _checked(line: dict[str, Any]) -> Line:
    """The segments of a line and their vectors, or the error that it is."""
    if (failure := line.get("error")) is not None:
        error: MlRagError = from_json({"error": failure}, DocumentError.status)
        raise error
    segments, vectors, _ = segments_and_vectors(line)
    if not segments:
        raise DocumentError("the text is empty")
    if not math.isfinite(sum(unpack_from(f"<{len(vectors) // 4}f", vectors))):
        raise EngineFailed("the embedding model failed", detail="An embedding holds NaN or infinity.")
    return segments, vectors


def numbered(lines: list[Line]) -> Iterator[tuple[int, str, str, str]]:
    """Number, text, metadata and vector of each segment."""
    first = 1
    for segments, vectors in lines:
        for portion in rows(segments, vectors, {}, first):
            yield from zip(
                itertools.count(portion.first), portion.segments, portion.metadata, portion.vectors, strict=False
            )
        first += len(segments)
