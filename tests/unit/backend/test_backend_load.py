"""backend/load.py: batches, the request, what of a reply is taken and what is not."""

from __future__ import annotations

import hashlib
import json
import struct
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from email.parser import BytesParser
from email.policy import HTTP
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_rag.backend import load
from ml_rag.backend.load import INSERT_SEGMENTS, Loader, Rows, Upload, multipart, rows
from ml_rag.errors import DocumentError, EngineFailed, InvalidRequest, QueueFull, UnknownModel
from ml_rag.files import BATCH_BYTES, File

DATES = {"last_modified_date": "2026-11-22T09:30:00Z"}


class FakeStore:
    """Keeps rows in a dictionary; ``refuses`` names a document it will not take."""

    def __init__(self, states: dict[str, tuple[str | None, str | None]] | None = None) -> None:
        self.known = states or {}
        self.written: dict[str, list[Rows]] = {}
        self.refuses: str | None = None
        self.commits: list[int] = []

    def states(self, names: list[str]) -> dict[str, dict[str, Any]]:
        return {
            name: {"source": dict(zip(("sha256", "made_with"), self.known[name], strict=True))}
            for name in names
            if name in self.known
        }

    def label(self, name: str, given: dict[str, Any]) -> None:
        raise AssertionError(name)

    def write(self, name: str, portions: Iterable[Rows]) -> None:
        taken = list(portions)
        if name == self.refuses:
            raise DocumentError("refused")
        self.written[name] = taken

    def commit(self) -> None:
        self.commits.append(len(self.written))


class FakeServer:
    """Answers each request with the lines given; ``bodies`` holds the requests."""

    def __init__(self, *lines: Any) -> None:
        self.lines = lines
        self.bodies: list[bytes] = []
        #: replies that were not read to their end
        self.closed = 0

    def stream(self, path: str, body: bytes, content_type: str) -> Iterator[Any]:
        assert path == "/v1/documents"
        self.bodies.append(body)
        try:
            yield from self.lines
        except GeneratorExit:
            self.closed += 1
            raise


def job(**more: Any) -> dict[str, Any]:
    return {"request": {"embed_model_id": "m"}, "dimensions": 2, "made_with": "o", "refresh": True, **more}


def line(index: int, texts: list[str], vectors: list[list[float]] | None = None, **more: Any) -> dict[str, Any]:
    vectors = [[1.0, 0.5]] * len(texts) if vectors is None else vectors
    data = b"".join(struct.pack(f"<{len(v)}f", *v) for v in vectors)
    return {
        "index": index,
        "format": "text",
        "error": None,
        "metadata": {"title": "T"},
        "segments": [{"text": text, "tokens": 1, "metadata": {"page": 7}} for text in texts],
        "dimensions": 2,
        "embeddings": b64encode(data).decode(),
        **more,
    }


def run(store: FakeStore, server: FakeServer, *names: str, **more: Any) -> Loader:
    loader = Loader(job(**more), server, store)  # type: ignore[arg-type]
    loader.load([(name, lambda n=name: File(f"content of {n}".encode(), DATES)) for name in names])  # type: ignore[misc]
    return loader


def test_a_reply_becomes_rows_with_their_metadata() -> None:
    store = FakeStore()
    loader = run(store, FakeServer(line(0, ["one", "two"], [[1.0, 0.1], [-0.25, 3e-8]])), "a")
    (portion,) = store.written["a"]
    assert (portion.first, portion.segments) == (1, ["one", "two"])
    assert [[struct.unpack("<f", struct.pack("<f", x))[0] for x in json.loads(v)] for v in portion.vectors] == [
        list(struct.unpack("<2f", struct.pack("<2f", *v))) for v in ([1.0, 0.1], [-0.25, 3e-8])
    ]
    sha256 = hashlib.sha256(b"content of a").hexdigest()
    assert json.loads(portion.metadata[1]) == {
        "title": "T",
        "format": "text",
        "file_name": "a",
        "file_size": 12,
        **DATES,
        "page": 7,
        "source": {"sha256": sha256, "made_with": "o", "keys": ["page", "title"]},
    }
    assert loader.outcome.counts["loaded"] == 1
    assert loader.outcome.segments == 2


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_vectors_keep_every_bit(numbers: list[float]) -> None:
    data = struct.pack(f"<{len(numbers)}f", *numbers)
    (portion,) = rows([{"text": "t"}], data, {})
    assert struct.pack(f"<{len(numbers)}f", *map(float, portion.vectors[0][1:-1].split(","))) == data


def test_a_long_document_is_inserted_in_portions() -> None:
    n = 2 * INSERT_SEGMENTS + 1
    portions = list(rows([{"text": str(i)} for i in range(n)], struct.pack(f"<{n}f", *range(n)), {}))
    assert [p.first for p in portions] == [1, INSERT_SEGMENTS + 1, 2 * INSERT_SEGMENTS + 1]
    assert [v for p in portions for v in p.vectors] == [f"[{i}]" for i in range(n)]


def test_a_document_may_come_in_several_lines() -> None:
    store = FakeStore()
    first, second = line(1, ["a", "b"], more=True), line(1, ["c"], metadata={})
    loader = run(store, FakeServer(line(0, ["x"]), first, second, line(2, ["y"])), "a", "b", "c")
    assert [(p.first, p.segments) for p in store.written["b"]] == [(1, ["a", "b"]), (3, ["c"])]
    assert all(json.loads(m)["title"] == "T" for p in store.written["b"] for m in p.metadata)
    assert (loader.outcome.counts["loaded"], loader.outcome.segments) == (3, 5)


def test_the_lines_of_a_document_that_is_refused_are_read_to_their_end() -> None:
    class Impatient(FakeStore):
        def write(self, name: str, portions: Iterable[Rows]) -> None:
            if name == self.refuses:
                next(iter(portions))
                raise DocumentError("refused")
            super().write(name, portions)

    store = Impatient()
    store.refuses = "a"
    server = FakeServer(line(0, ["a"], more=True), line(0, ["b"], more=True), line(0, ["c"]), line(1, ["d"]))
    loader = run(store, server, "a", "b")
    assert [entry["document_name"] for entry in loader.outcome.failed] == ["a"]
    assert list(store.written) == ["b"]
    assert server.closed == 0


@pytest.mark.parametrize("second", [None, line(1, ["b"]), {"index": 0, "error": {"message": "no"}}, 7])
def test_a_document_whose_lines_break_off(second: Any) -> None:
    server = FakeServer(line(0, ["a"], more=True), *([] if second is None else [second]))
    with pytest.raises(EngineFailed, match="unexpected reply"):
        run(FakeStore(), server, "a", "b")
    assert server.closed == (second is not None)


def test_segments_of_any_length_are_embedded_in_requests_of_some_size() -> None:
    asked: list[list[str]] = []

    def embed(texts: list[str], model: str) -> list[str]:
        asked.append(texts)
        return [f"[{len(text)}]" for text in texts]

    texts = ["é" * 1_500_000] * 4 + ["x"] * 600 + ["y" * 9_000_000]
    assert list(load.embed_segments(embed, texts, "m")) == [f"[{len(text)}]" for text in texts]
    assert [len(batch) for batch in asked] == [2, 500, 102, 1]


def test_what_the_model_server_refuses_to_embed_is_the_documents_error() -> None:
    def embed(error: Exception) -> Callable[[list[str], str], list[str]]:
        def raise_it(texts: list[str], model: str) -> list[str]:
            raise error

        return raise_it

    with pytest.raises(DocumentError, match="the document's segments cannot be embedded") as caught:
        list(load.embed_segments(embed(InvalidRequest("the request is too long", detail="64 MB.")), ["a"], "m"))
    assert caught.value.detail == "The request is too long: 64 MB."
    with pytest.raises(DocumentError, match="out of order"):
        list(load.embed_segments(embed(EngineFailed("out of order")), ["a"], "m"))
    for error in (UnknownModel("unknown model"), QueueFull("full")):
        with pytest.raises(type(error)):
            list(load.embed_segments(embed(error), ["a"], "m"))


def test_documents_may_come_back_in_any_order() -> None:
    store = FakeStore()
    run(store, FakeServer(line(1, ["second"]), line(0, ["first"])), "a", "b")
    assert {name: portions[0].segments for name, portions in store.written.items()} == {"b": ["second"], "a": ["first"]}


def test_without_refresh_known_documents_are_not_even_read() -> None:
    def read() -> File:
        raise AssertionError("read")

    loader = Loader(job(refresh=False), FakeServer(), FakeStore({"a": (None, None)}))  # type: ignore[arg-type]
    loader.load([("a", read)])
    assert loader.outcome.counts["unchanged"] == 1


@pytest.mark.parametrize(
    "reply",
    [
        {"index": 5},
        {},
        None,
        "x",
        line(0, ["one"], []),
        line(0, ["one"], [[1.0]]),
        line(0, ["one"], embeddings="*"),
        line(0, ["one"], embeddings=None),
        line(0, ["one"], dimensions="2"),
        line(0, ["one"], dimensions=0),
        line(0, [" \n"]),
        line(0, ["one"], segments=[{"text": None}]),
        line(0, ["one"], segments=None),
        line(0, ["one"], [[float("nan"), 0.0]]),
        line(0, ["one"], [[float("inf"), 0.0]]),
        line(0, ["one"], metadata="T"),
    ],
)
def test_nonsense_is_an_error_of_the_whole_load_and_closes_the_connection(reply: Any) -> None:
    store, server = FakeStore(), FakeServer(reply)
    with pytest.raises(EngineFailed):
        run(store, server, "a")
    assert store.written == {}
    assert server.closed == 1


def test_a_missing_document_is_an_error() -> None:
    with pytest.raises(EngineFailed, match="unexpected reply"):
        run(FakeStore(), FakeServer(line(0, ["one"])), "a", "b")


def failure(index: int, code: str, message: str = "no good") -> dict[str, Any]:
    return line(index, [], error={"message": message, "code": code, "detail": "why", "hint": "what to do"})


def test_what_was_left_out_of_a_document_is_reported() -> None:
    left_out = {"left_out": "page 2"}
    loader = run(FakeStore(), FakeServer(line(0, ["a"], metadata=left_out), line(1, ["b"])), "a", "b")
    result = loader.outcome.result()
    assert result["incomplete"] == [{"document_name": "a", **left_out}]
    assert (result["documents"]["loaded"], result["failed"]) == (2, [])


@pytest.mark.parametrize(("code", "cls"), [("queue_full", QueueFull), ("invalid_request", InvalidRequest)])
def test_an_error_that_every_document_would_get_ends_the_load(code: str, cls: type[Exception]) -> None:
    server = FakeServer(failure(0, code))
    with pytest.raises(cls):
        run(FakeStore(), server, "a")
    assert server.closed == 1


def test_a_document_of_a_format_that_is_not_wanted_is_skipped() -> None:
    loader = run(FakeStore(), FakeServer(failure(0, "document_failed", load.NOT_ACCEPTED)), "a")
    assert (loader.outcome.counts["skipped"], loader.outcome.failed) == (1, [])


def test_the_model_server_says_what_this_takes_for_skipped() -> None:
    from ml_rag.ingest.parse import parse

    with pytest.raises(DocumentError, match=f"^{load.NOT_ACCEPTED}$"):
        parse("a.txt", b"some text", formats=["pdf"])


def test_a_document_that_cannot_be_read_fails_alone() -> None:
    def read() -> bytes:
        raise DocumentError("gone")

    store = FakeStore()
    loader = Loader(job(), FakeServer(line(0, ["b"])), store)  # type: ignore[arg-type]
    loader.load([("a", read), ("b", lambda: File(b"b")), ("\udcff", lambda: File(b"c"))])
    assert set(store.written) == {"b"}
    assert [entry["document_name"] for entry in loader.outcome.failed] == ["a", "?"]


def test_documents_that_are_longer_than_their_files_were_go_in_requests_of_their_own() -> None:
    """A file grows, and an archive can say that one of 200 MB is empty."""
    bodies = []

    class Server(FakeServer):
        def stream(self, path: str, body: bytes, content_type: str) -> Iterator[Any]:
            bodies.append(len(body))
            yield from [line(0, ["a"])] if len(bodies) < 3 else [line(0, ["a"]), line(1, ["a"])]

    store = FakeStore()
    contents = {"a": 5, "b": 5, "c": 5, "d": 2}
    loader = Loader(job(), Server(), store)  # type: ignore[arg-type]
    loader.load([(name, lambda n=n: File(bytes(n * 1024**2))) for name, n in contents.items()])  # type: ignore[misc]
    assert set(store.written) == contents.keys()
    assert [length // 1024**2 for length in bodies] == [5, 5, 7]


def test_commits_come_every_so_many_documents_and_at_the_end() -> None:
    store = FakeStore()
    n = 2 * load.COMMIT_DOCUMENTS + 3
    run(store, FakeServer(*(line(i, ["t"]) for i in range(n))), *(f"d{i}" for i in range(n)))
    assert store.commits == [load.COMMIT_DOCUMENTS, 2 * load.COMMIT_DOCUMENTS, n]


def test_nul_and_lone_surrogates_never_reach_postgresql() -> None:
    store = FakeStore()
    reply = line(0, ["a\0b\ud800c"], metadata={"ti\0tle": "x\0y", "n": [1, {"k": "\udfff"}]})
    run(store, FakeServer(reply), "a")
    (portion,) = store.written["a"]
    assert portion.segments == ["ab?c"]
    metadata = json.loads(portion.metadata[0])
    assert (metadata["title"], metadata["n"]) == ("xy", [1, {"k": "?"}])
    assert "\\u0000" not in portion.metadata[0]


@pytest.mark.parametrize("name", ["a.txt", 'say "hi".txt', "文書 ü.txt", "back\\slash", "new\r\nline", "x; filename=y"])
def test_the_request_is_proper_multipart(name: str) -> None:
    content = b"\r\n--boundary\r\n\0\xff"
    body, content_type = multipart({"embed_model_id": "m"}, [Upload(name, content, "", False)] * 2)
    message = BytesParser(policy=HTTP).parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    options, *parts = message.iter_parts()
    assert json.loads(options.get_payload(decode=True)) == {"embed_model_id": "m"}  # type: ignore[arg-type]
    assert [part.get_payload(decode=True) for part in parts] == [content] * 2
    for part in parts:
        assert part.get_param("name", header="content-disposition") == "file"


def test_rows_of_large_metadata_come_in_smaller_portions() -> None:
    """They are held in memory several times, and a cancel is heeded between two portions."""
    segments = [{"text": "a" * 10, "metadata": {"b": "c" * 60_000}}] * INSERT_SEGMENTS
    portions = list(rows(segments, struct.pack("<f", 1.0) * len(segments), {"d": "e" * 60_000}, 7))
    sizes = [sum(map(len, portion.metadata + portion.segments)) for portion in portions]
    assert len(sizes) == 8
    assert BATCH_BYTES - 130_000 < sizes[0] <= BATCH_BYTES
    firsts = accumulate((len(portion.segments) for portion in portions), initial=7)
    assert [portion.first for portion in portions] == list(firsts)[:-1]
    assert sum(len(portion.vectors) for portion in portions) == INSERT_SEGMENTS


def test_a_long_path_does_not_have_the_request_refused() -> None:
    """A header of a part may have 4096 bytes, and three are sent for each quote."""
    folders = "".join("/" + quotes for quotes in ['"' * 250] * 8)
    uploads = [Upload(f"{folders}/{name}", b"x", "", False) for name in ("a.txt", '"' * 250 + ".md")]
    body, content_type = multipart({}, uploads)
    assert len(body) < 4096
    message = BytesParser(policy=HTTP).parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    _, *parts = message.iter_parts()
    assert [part.get_filename() for part in parts] == ["a.txt", "%22" * 250 + ".md"]


def test_a_long_name_does_not_have_the_request_refused() -> None:
    """Of a file in an archive it is as long as whoever packed that likes."""
    body, _ = multipart({}, [Upload("\N{GRINNING FACE}" * 5000 + ".md", b"x", "", False)])
    assert len(body) < 4096
    assert b'.md"\r\n' in body
