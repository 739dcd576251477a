"""Targets of the coverage-guided fuzzing: each takes bytes, and raises where the code does what it must not.

They run in two ways: under libFuzzer (``support.guided``), which looks for bytes that reach new code, and on the
inputs that it has found so far (``tests/fuzz/corpus``), in the ordinary suite.
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ml_rag import files
from ml_rag.abc import Block, Document
from ml_rag.backend import embed, generate, rerank
from ml_rag.backend.client import ModelServer
from ml_rag.backend.load import Loader, Rows
from ml_rag.backend.sockets import InterruptibleSocket
from ml_rag.errors import DocumentError, InvalidRequest, MlRagError
from ml_rag.ingest import parse, split, units
from ml_rag.server.chat import citations, prompt
from ml_rag.server.engines.text_stream import TextStream

Target = Callable[[bytes], None]


class Input:
    """Values out of bytes: what is left of them is the text."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, most: int) -> int:
        """0 to ``most``; 0 where the bytes are at an end."""
        self._at += 1
        return self._data[self._at - 1] % (most + 1) if self._at <= len(self._data) else 0

    def rest(self) -> bytes:
        return self._data[self._at :]

    def text(self) -> str:
        """Any text that UTF-8 can hold, whatever the bytes are."""
        return self.rest().decode("utf-8", "replace")


# -- the backend: what a model server may answer ----------------------------------------------------------------------


class _Socket:
    """The end of a connection on which the reply stands already."""

    def __init__(self, reply: bytes) -> None:
        self._reply = io.BytesIO(reply)

    def sendall(self, data: bytes) -> None:
        pass

    def recv_into(self, buffer: memoryview) -> int:
        return self._reply.readinto1(buffer)

    def close(self) -> None:
        pass


class _Server(ModelServer):
    """A model server that answers every request by these bytes."""

    def __init__(self, reply: bytes) -> None:
        super().__init__("unix:/nowhere", lambda: None)
        self._reply_bytes = reply

    def _connect(self) -> InterruptibleSocket:
        return _Socket(self._reply_bytes)  # type: ignore[return-value]


class _Store:
    """Takes what a load writes, if PostgreSQL could."""

    def states(self, names: list[str]) -> dict[str, tuple[str | None, str | None]]:
        return {}

    def write(self, name: str, chunks: Iterator[Rows]) -> None:
        for rows in chunks:
            for text in itertools.chain(rows.segments, rows.metadata, rows.vectors):
                assert "\0" not in text
                assert text.encode()
            assert len(rows.segments) == len(rows.metadata) == len(rows.vectors)
            for metadata in rows.metadata:
                assert "\\u0000" not in metadata
                assert isinstance(json.loads(metadata), dict)
            embed.check(rows.vectors)

    def commit(self) -> None:
        pass


def _load(server: ModelServer) -> None:
    job = {"request": {}, "dimensions": None, "made_with": "x", "refresh": True}
    Loader(job, server, _Store()).load([("a", lambda: files.File(b"one")), ("b", lambda: files.File(b"two"))])


_CALLS: list[Callable[[ModelServer], Any]] = [
    lambda server: server.call("GET", "/v1/models"),
    lambda server: embed.embed(server, ["one", "two"], "m", "query"),
    lambda server: rerank.rerank(server, "one", ["two", "three"], "m"),
    lambda server: generate.generate(
        server, {"prompt": "one", "documents": [{"text": "two"}], "options": {}, "citations": 1}
    ),
    _load,
]


def reply(data: bytes) -> None:
    """Whatever stands in a reply: a value, or an error of ours with a text that PostgreSQL can hold."""
    given = Input(data)
    call = _CALLS[given.number(len(_CALLS) - 1)]
    is_raw = given.number(1)
    body = given.rest()
    status = b"200 OK" if is_raw or not body.startswith(b'{"error"') else b"400 Bad Request"
    framed = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
    try:
        call(_Server(body if is_raw else framed))
    except MlRagError as error:
        texts = (error.message, error.detail or "", error.hint or "")
        if not error.message or not all(isinstance(text, str) for text in texts):
            raise AssertionError("an error without a text") from error


# -- texts --------------------------------------------------------------------------------------------------------


def split_text(data: bytes) -> None:
    """No segment over the limit, nothing empty, nothing lost but white space."""
    given = Input(data)
    how = split.Chunking(split.SPLIT_BY[given.number(4)], 16 + given.number(63), given.number(15))
    pages = given.text().split("\f")
    document = Document("text", [Block(page, {"page": n}) for n, page in enumerate(pages)])
    segments = split.split(document, how, units.Counter())
    for segment in segments:
        assert segment.text.strip()
        assert 1 <= segment.tokens <= how.segment_tokens
        assert "\0" not in segment.text
    if how.overlap_tokens == 0:
        # tables repeat their header, so it is looked for and not compared
        found = iter("".join("".join(segment.text.split()) for segment in segments))
        wanted = "".join("".join(units.clean(page).split()) for page in pages)
        assert all(character in found for character in wanted), "text is lost"


_ENDINGS = ("txt", "md", "adoc", "rst", "csv", "tsv", "json", "jsonl", "xml", "html", "vtt", "srt", "eml", "rtf", "py")


def parse_text(data: bytes) -> None:
    """A document that can go into the database, or an error that is about the document."""
    given = Input(data)
    name = f"a.{_ENDINGS[given.number(len(_ENDINGS) - 1)]}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            document = parse.parse(name, given.rest())
    except (DocumentError, InvalidRequest) as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, RecursionError | MemoryError):
            trace = cause.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            # what a library raises over a broken document is about the document; what our own code does is not
            where = "" if trace is None else trace.tb_frame.f_code.co_filename
            if "/ml_rag/ingest/" in where and not isinstance(cause, UnicodeError | ValueError):
                raise AssertionError(f"{type(cause).__name__} in {where}") from cause
        return
    assert document.blocks
    for block in document.blocks:
        assert "\0" not in block.text
        assert block.text.encode()
        assert unicodedata.is_normalized("NFC", block.text)


def verify_citations(data: bytes) -> None:
    """Done once is done for good; what comes back is the text without some of it."""
    given = Input(data)
    count = given.number(5)
    text = given.text()
    verified = citations.verify(text, count)
    # each pass takes a bracket; what needs more of them is done in part
    if len(re.findall(r"[\[【［]", text)) <= citations.PASSES:
        assert citations.verify(verified, count) == verified
    if not re.search(r"\d", text):
        assert verified == text


def build_prompt(data: bytes) -> None:
    """Documents stay in their fences, and each comes whole or not at all."""
    given = Input(data)
    count = given.number(4)
    order: prompt.DocumentOrder = "best_last" if given.number(1) else "best_first"
    budget = 8 * given.number(255)
    parts = given.text().split("\x1e")
    documents = [prompt.PromptDocument(part[:20], part) for part in parts[:count]]
    language = parts[count] if len(parts) > count else None

    def build(used: int) -> list[prompt.Message]:
        return prompt.build("one?", documents[:used], language=language, order=order, citation_style="numbered")

    try:
        fitted = prompt.fit(documents, budget, prompt.estimate_tokens, build)
    except InvalidRequest:
        return
    assert 0 <= fitted.documents_used <= len(documents)
    assert fitted.prompt_tokens <= budget
    asked = fitted.messages[-1]["content"]
    fences = asked.split("Answer this question")[0]
    assert len(re.findall(r"<\s*document", fences, re.IGNORECASE)) == fitted.documents_used
    assert len(re.findall(r"<\s*/\s*document", fences, re.IGNORECASE)) == fitted.documents_used


def stream_text(data: bytes) -> None:
    """However an answer comes in pieces: no stop sequence in it, and without one all of it."""
    given = Input(data)
    stop = [given.text()[n : n + 1 + given.number(3)] for n in range(given.number(3))]
    sizes = [1 + given.number(7) for _ in range(4)]
    answer = given.rest()
    stream, guarded = TextStream(stop), TextStream(stop, loop_guard=True)
    pieces, of_guarded, at = [], [], 0
    for size in itertools.cycle(sizes):
        if at >= len(answer):
            break
        pieces.append(stream.feed(answer[at : at + size]))
        of_guarded.append(guarded.feed(answer[at : at + size]))
        at += size
    shown = "".join([*pieces, stream.finish()])
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(answer).lstrip()  # half a character is none
    assert whole.startswith(shown)
    assert not any(sequence in shown for sequence in stop if sequence)
    if not any(sequence in whole for sequence in stop if sequence):
        assert shown == whole
    assert shown.startswith("".join([*of_guarded, guarded.finish()]))


def locate_files(data: bytes) -> None:
    """A URI names a place below the root, or is refused."""
    uri = data.decode("utf-8", "replace").replace("\0", "")  # which no text of PostgreSQL holds
    try:
        location = files.parse(uri)
    except InvalidRequest:
        return
    assert location.base.startswith("/")
    assert not any(part in ("..", ".") for part in location.base.split("/"))
    if location.file is not None:
        assert location.matches(location.file)
    assert isinstance(files.table_name(location), str | None)
    exact = files.exactly("/srv/" + uri.replace("/", "_"))
    assert exact.file is None or exact.matches(exact.file)


TARGETS: dict[str, Target] = {
    "reply": reply,
    "split": split_text,
    "parse": parse_text,
    "citations": verify_citations,
    "prompt": build_prompt,
    "stream": stream_text,
    "files": locate_files,
}
