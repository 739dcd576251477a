"""``POST /v1/documents``: documents in, their segments with embeddings out, lines of JSON for each document.

Documents are parsed and split in child processes while those before them are embedded. Segments of several documents
are embedded together, and a document's lines go out, one after the other, as soon as the last of its segments is done.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ml_rag.errors import DocumentError, EngineFailed, InvalidRequest, MlRagError
from ml_rag.ingest.formats import FORMATS
from ml_rag.ingest.formats.common import MAX_VALUE
from ml_rag.ingest.parse import accepted_formats
from ml_rag.ingest.sandbox import Job, ModelTokenizer, Parsed, Sandbox
from ml_rag.ingest.split import NONE, Chunking, chunking
from ml_rag.server.admission import current_caller
from ml_rag.server.boundary import LeasedStream
from ml_rag.server.cancellation import Cancellation, ClientGone, watch_disconnect
from ml_rag.server.models import Lease
from ml_rag.server.pictures import Described, Describer, check_takes_images
from ml_rag.server.registry import Registry
from ml_rag.server.routes import invalid, registry_of
from ml_rag.server.unexpected import unexpected

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: most documents of one request
MAX_DOCUMENTS = 10_000
#: segments embedded at once: enough for full batches of like length, few enough for a steady flow of lines
GROUP_SEGMENTS = 128
#: segments of one line
LINE_SEGMENTS = 1000
#: documents being parsed, and segments waiting to be embedded, ahead of those being embedded
PARSED_AHEAD = 2
SEGMENTS_AHEAD = 4 * GROUP_SEGMENTS


class DocumentsOptions(BaseModel):
    """The field ``options``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    embed_model_id: str
    chunking: Any = None
    formats: list[str] | None = None
    language: str | None = None
    ocr: bool | None = None
    #: the model that describes pictures
    describe_images: str | None = None


async def documents(request: Request) -> Response:
    """Parse, split and embed. What concerns all documents is an ordinary error reply; what concerns one is in its line.

    Raises what ``Registry.lease`` raises, and ``InvalidRequest``.
    """
    registry, state = registry_of(request), request.app.state
    async with AsyncExitStack() as stack:
        form = await _form(request)
        stack.push_async_callback(_close, form)
        options = _options(form)
        files = [part for name, part in form.multi_items() if name == "file" and isinstance(part, UploadFile)]
        accepted_formats(options.formats)
        cancelled = await stack.enter_async_context(watch_disconnect(request))
        lease = await stack.enter_async_context(registry.lease(options.embed_model_id, "embed", cancelled))
        how = chunking(options.chunking, lease.engine.max_tokens)
        describer = None
        if (model := options.describe_images) is not None:
            check_takes_images(registry, model)
            await stack.enter_async_context(registry.lease(model, "generate", cancelled))  # one that is there
            describer = Describer(registry, state.pictures, model, options.language, cancelled)
        tokenizer = await _tokenizer(lease)
        dimensions = lease.dimensions or lease.engine.dimensions
        numbered = iter(enumerate(files))
        work = _Work(registry, options, how, numbered, dimensions, state.sandbox, tokenizer, describer, cancelled)
        lines = work.lines()
        stack.push_async_callback(lines.aclose)
        return LeasedStream(lines, stack.pop_all(), "application/x-ndjson")


async def _form(request: Request) -> FormData:
    kind, parameters = parse_options_header(request.headers.get("content-type", ""))
    if kind.lower() != b"multipart/form-data":
        raise InvalidRequest("the request is not multipart/form-data", hint="Send the documents as parts named file.")
    if parameters.get(b"charset", b"utf-8").lower() != b"utf-8":
        # Python's codecs are taken by that name: to decode 1 MB as punycode takes minutes, in the event loop
        raise InvalidRequest("the request's multipart body is not in UTF-8", hint="Leave charset out.")
    try:
        return await request.form(max_files=MAX_DOCUMENTS, max_fields=16)
    except HTTPException as error:
        raise InvalidRequest("the request's multipart body is not valid", detail=str(error.detail)) from None


async def _close(form: FormData) -> None:
    """Empty the files, too: a parser that a document has taken over may keep them open, and so on the disk."""
    for _, part in form.multi_items():
        if isinstance(part, UploadFile):
            await run_in_threadpool(part.file.truncate, 0)
    await form.close()


def _options(form: FormData) -> DocumentsOptions:
    options = form.get("options")
    if isinstance(options, UploadFile) or options is None:
        raise InvalidRequest("the field options is missing", hint="It is JSON, with embed_model_id at least.")
    for name, part in form.multi_items():
        if name not in ("options", "file") or (name == "file" and not isinstance(part, UploadFile)):
            raise InvalidRequest(
                "unknown part of the request", detail=f"name {name[:200]!r}", hint="A document is a part named file."
            )
    try:
        return DocumentsOptions.model_validate_json(options)
    except ValidationError as error:
        raise invalid(error.errors(include_input=False, include_url=False)) from None


async def _tokenizer(lease: Lease) -> ModelTokenizer:
    """The model's tokenizer as the children take it; kept with the engine, since writing it out takes a while."""
    engine, prefix = lease.engine, lease.entry.document_prefix
    cached: ModelTokenizer | None = getattr(engine, "_sandbox_tokenizer", None)
    if cached is None or cached.prefix != prefix:
        text = await lease.run(_tokenizer_json, engine)  # some engines ask their process for it
        digest = hashlib.sha256(f"{prefix}\0{text}".encode()).hexdigest()
        cached = ModelTokenizer(f"{lease.entry.id} {digest}", text, prefix)
        engine._sandbox_tokenizer = cached
    return cached


def _tokenizer_json(engine: Any) -> str | None:
    tokenizer = engine.tokenizer()
    return None if tokenizer is None else tokenizer.to_str()


@dataclass(eq=False)
class _Document:
    """A parsed document: segments before ``taken`` are with the model or done, ``missing`` of all are not done."""

    index: int
    name: str
    parsed: Parsed
    vectors: NDArray[np.float32]
    missing: int
    taken: int = 0
    error: MlRagError | None = None


@dataclass(frozen=True, slots=True)
class _Portion:
    """Some neighbouring segments of a document, by their places."""

    document: _Document
    first: int
    end: int

    def texts(self) -> list[str]:
        return [segment.embedded_text() for segment in self.document.parsed.segments[self.first : self.end]]


@dataclass
class _Work:
    """One request: what is being parsed, what waits, what is being embedded."""

    registry: Registry
    options: DocumentsOptions
    how: Chunking
    files: Iterator[tuple[int, UploadFile]]
    #: of the vectors
    dimensions: int
    sandbox: Sandbox
    tokenizer: ModelTokenizer
    describer: Describer | None
    cancelled: Cancellation
    all_begun: bool = False
    parsing: dict[asyncio.Task[Parsed], tuple[int, str]] = field(default_factory=dict)
    waiting: deque[_Document] = field(default_factory=deque)
    embedding: dict[asyncio.Task[tuple[NDArray[np.float32], int]], list[_Portion]] = field(default_factory=dict)
    #: portions of a batch that failed, to be tried one by one
    alone: deque[_Portion] = field(default_factory=deque)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The reply's lines. Raises ``ClientGone``."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()

        def mark() -> None:
            if not gone.done():
                gone.set_result(None)

        def leave() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(mark)

        try:
            with self.cancelled.on_set(leave):
                while True:
                    self._begin_parsing()
                    self._begin_embedding()
                    if not self.parsing and not self.embedding:
                        return
                    tasks: list[asyncio.Future[Any]] = [gone, *self.parsing, *self.embedding]
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    if gone.done():
                        raise ClientGone
                    for parsed in [task for task in self.parsing if task.done()]:
                        for line in self._parsed(parsed):
                            yield line
                    self._begin_embedding()  # before the lines are written, so that the model does not wait for them
                    for embedded in [task for task in self.embedding if task.done()]:
                        for document in self._embedded(embedded):
                            for line in self._lines_of(document):
                                yield line
        finally:
            left: list[asyncio.Task[Any]] = [*self.parsing, *self.embedding]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _segments_waiting(self) -> int:
        return sum(len(document.parsed.segments) - document.taken for document in self.waiting)

    def _begin_parsing(self) -> None:
        while not self.all_begun and len(self.parsing) < PARSED_AHEAD and self._segments_waiting() < SEGMENTS_AHEAD:
            index, file = next(self.files, (-1, None))
            if file is None:
                self.all_begun = True
                return
            name, options, caller = file.filename or "", self.options, current_caller.get()
            wanted = options.formats, options.language, bool(options.ocr), options.describe_images
            role = None if caller is None else caller.role
            job = Job(name, file.file, self.tokenizer, self.how, self.dimensions, *wanted, role=role)
            self.parsing[asyncio.create_task(self._parse(job))] = (index, name)

    async def _parse(self, job: Job) -> Parsed:
        """A document; where a model describes its pictures, they are collected first, and put in their places then."""
        if self.describer is None:
            return await self.sandbox.run(job)
        try:
            collected = await self.sandbox.run(job)
        except DocumentError as error:  # a picture can be too much for the parser, which then goes without
            described, left_out = Described(), f"pictures ({error.message})"
        else:
            described = await self.describer.describe(collected.pictures)
            reasons = Counter(collected.left_out) + described.failures
            left_out = "; ".join(f"{n} picture{'s' * (n > 1)} ({reason})" for reason, n in reasons.items())
            if len(left_out) > MAX_VALUE:  # an endpoint can give another reason for each
                left_out = left_out[: MAX_VALUE - 1] + "…"
        try:
            parsed = await self.sandbox.run(replace(job, described=described.texts))
        except DocumentError as error:
            if left_out and error.message == "document has no text":
                raise DocumentError(error.message, detail=f"not described: {left_out}") from error
            raise
        if left_out:
            told = parsed.metadata.get("left_out")
            parsed.metadata["left_out"] = f"{told}; {left_out}" if told else left_out
        return replace(parsed, is_passing=described.is_passing)

    def _parsed(self, task: asyncio.Task[Parsed]) -> Iterator[bytes]:
        """Put a document in the queue for the model; the lines of one that failed, or that is not to be embedded."""
        index, name = self.parsing.pop(task)
        try:
            parsed = task.result()
            if not parsed.segments:
                raise DocumentError("the document has no text", detail=f"its format is {parsed.format}")
        except Exception as error:  # noqa: BLE001 - told in the document's line
            failure = error if isinstance(error, MlRagError) else unexpected(error)
            yield self._error_line(index, name, None, failure)
            return
        if self.how.split_by == NONE:  # it is embedded where it is split
            yield from self._lines_of(_Document(index, name, parsed, np.empty((0, self.dimensions), "<f4"), 0))
            return
        count = len(parsed.segments)
        vectors = np.empty((count, self.dimensions), "<f4")
        self.waiting.append(_Document(index, name, parsed, vectors, count))

    def _begin_embedding(self) -> None:
        """Keep the model busy: at once where it is idle, with a full batch in reserve where it is not."""
        while self.alone and len(self.embedding) < 2:
            self._embed([self.alone.popleft()])
        while self.waiting and len(self.embedding) < 2:
            all_parsed = self.all_begun and not self.parsing
            if self.embedding and not all_parsed and self._segments_waiting() < GROUP_SEGMENTS:
                return
            portions: list[_Portion] = []
            room = GROUP_SEGMENTS
            while self.waiting and room:
                document = self.waiting[0]
                end = min(len(document.parsed.segments), document.taken + room)
                portions.append(_Portion(document, document.taken, end))
                room -= end - document.taken
                document.taken = end
                if end == len(document.parsed.segments):
                    self.waiting.popleft()
            self._embed(portions)

    def _embed(self, portions: list[_Portion]) -> None:
        texts = [text for portion in portions for text in portion.texts()]
        work = self.registry.embed(self.options.embed_model_id, texts, self.cancelled, "document")
        self.embedding[asyncio.create_task(work)] = portions

    def _embedded(self, task: asyncio.Task[tuple[NDArray[np.float32], int]]) -> list[_Document]:
        """Hand out the vectors; the documents that have all of theirs now, or an error."""
        portions = self.embedding.pop(task)
        error = task.exception()
        if isinstance(error, EngineFailed) and len({portion.document for portion in portions}) > 1:
            self.alone.extend(portions)  # so that only the document that it lies in fails
            return []
        if error is not None and not isinstance(error, MlRagError):
            if isinstance(error, ClientGone):
                raise error
            error = unexpected(error)
        finished = []
        start = 0
        for portion in portions:
            document, count = portion.document, portion.end - portion.first
            if error is None:
                document.vectors[portion.first : portion.end] = task.result()[0][start : start + count]
            else:
                document.error = document.error or error
            start += count
            document.missing -= count
            if document.missing == 0:
                finished.append(document)
        return finished

    def _lines_of(self, document: _Document) -> Iterator[bytes]:
        parsed = document.parsed
        if document.error is not None:
            yield self._error_line(document.index, document.name, parsed.format, document.error)
            return
        known = FORMATS.get(parsed.format)
        metadata = ({"file_type": known.media_type} if known else {}) | parsed.metadata
        for first in range(0, len(parsed.segments), LINE_SEGMENTS):
            end = first + LINE_SEGMENTS
            yield self._line(
                document.index, document.name, parsed.format,
                metadata={} if first else metadata,
                segments=[
                    {"text": segment.text, "tokens": segment.tokens, "metadata": segment.metadata}
                    for segment in parsed.segments[first:end]
                ],
                embeddings=base64.b64encode(document.vectors[first:end].data).decode("ascii"),
                **({"again": True} if parsed.is_passing and not first else {}),
                more=end < len(parsed.segments),
            )  # fmt: skip

    def _error_line(self, index: int, name: str, found: str | None, error: MlRagError) -> bytes:
        nothing: dict[str, Any] = {"metadata": {}, "segments": [], "embeddings": "", "more": False}
        return self._line(index, name, found, error=error.to_json()["error"], **nothing)

    def _line(self, index: int, name: str, found: str | None, **rest: Any) -> bytes:
        line = {"index": index, "name": name, "format": found, "error": None, "dimensions": self.dimensions, **rest}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
