"""Query and texts to relevance, through the model server."""

from __future__ import annotations

from collections.abc import Iterator

from ml_rag.backend.client import ModelServer
from ml_rag.errors import EngineFailed

#: what one request holds: as JSON a character takes 6 bytes at most, and the server takes 64 MiB unless told otherwise
REQUEST_TEXTS = 1024
REQUEST_CHARACTERS = 8 * 1024 * 1024


def rerank(server: ModelServer, query: str, texts: list[str], model_id: str) -> list[float]:
    """The relevance of each text to the query, 0-1, in the order of the texts.

    Raises EngineFailed where the reply is anything else.
    """
    scores: list[float] = []
    for part in _parts(texts, len(query)):
        reply = server.call("POST", "/v1/rerank", {"model": model_id, "query": query, "documents": part})
        try:
            found = {item["index"]: item["relevance_score"] for item in reply["results"]}
            if len(reply["results"]) != len(part) or found.keys() != set(range(len(part))):
                raise ValueError(f"{len(reply['results'])} scores for {len(part)} texts, or not one for each")
            ordered = [found[index] for index in range(len(part))]
            if not all(type(score) in (int, float) and 0 <= score <= 1 for score in ordered):
                raise ValueError("a score is not a number from 0 to 1")
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise EngineFailed("unexpected reply from the model server", detail=f"No scores: {e!r}.") from None
        scores += map(float, ordered)
    return scores


def _parts(texts: list[str], query_characters: int) -> Iterator[list[str]]:
    """The texts in runs that one request can hold; each score depends on its own text alone."""
    part: list[str] = []
    characters = query_characters
    for text in texts:
        if part and (len(part) == REQUEST_TEXTS or characters + len(text) > REQUEST_CHARACTERS):
            yield part
            part, characters = [], query_characters
        part.append(text)
        characters += len(text)
    if part:
        yield part
