"""backend/segments: texts of rows to segments with their embeddings."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from ml_rag.backend import segments
from ml_rag.errors import EngineFailed


def line(index: int, texts: list[str], *, more: bool = False, number: float = 1.0) -> dict[str, Any]:
    """A line of a reply of /v1/documents, with vectors of 2 dimensions."""
    vectors = struct.pack(f"<{2 * len(texts)}f", *[number] * (2 * len(texts)))
    found = {"segments": [{"text": text} for text in texts], "dimensions": 2, "embeddings": b64encode(vectors).decode()}
    return {"index": index, "more": more, **found}


class Server:
    def __init__(self, *lines: Any) -> None:
        self.lines, self.sent = lines, 0

    def stream(self, *_: object) -> Iterator[Any]:
        for one in self.lines:
            self.sent += 1
            yield one


def embed(server: Server, n: int) -> tuple[list[list[segments.Line]], list[dict[str, Any] | None]]:
    return segments.embed(server, ["text"] * n, {"embed_model_id": "m"})  # type: ignore[arg-type]


def test_all_lines_of_each_text_in_any_order() -> None:
    found, errors = embed(Server(line(1, ["c"]), line(0, ["a"], more=True), line(0, ["b"])), 2)
    assert errors == [None, None]
    assert [[one[:2] for one in segments.numbered(lines)] for lines in found] == [[(1, "a"), (2, "b")], [(1, "c")]]


def test_no_more_than_enough_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_BYTES", 2500)
    server = Server(*(line(i, ["a", "b"]) for i in (0, 1, 2, 3)))
    found, errors = embed(server, 4)
    assert (len(found), len(errors), server.sent) == (2, 2, 2)
    # the first one is among them, whatever the order
    server = Server(*(line(i, ["a", "b"]) for i in (2, 1, 0, 3)))
    assert len(embed(server, 4)[0]) == 3
    server = Server(*(line(i, ["a", "b"]) for i in (3, 2, 0, 1)))
    assert (len(embed(server, 4)[0]), server.sent) == (1, 3)


def test_a_wrong_line_is_the_error_of_its_text() -> None:
    lines = [line(0, ["a"], more=True), line(0, ["b"], more=True, number=float("nan")), line(0, ["c"]), line(1, ["d"])]
    found, errors = embed(Server(*lines), 2)
    assert errors[0] == {
        "sqlstate": "38000", "message": "the embedding model failed", "detail": "An embedding holds NaN or infinity.",
    }  # fmt: skip
    assert (found[0], errors[1], len(found[1])) == ([], None, 1)


def test_a_text_that_is_missing_is_no_reply() -> None:
    with pytest.raises(EngineFailed):
        embed(Server(line(0, ["a"])), 2)
