"""Parses and splits documents in child processes with bounds on time and memory.

A document that loops, eats memory or crashes its parser fails alone: the child is ended and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Annotated, Any

import orjson
from pydantic import Base64Bytes, Field, StrictInt, TypeAdapter

from ml_rag import priority
from ml_rag.abc import Segment
from ml_rag.errors import DocumentError, EngineFailed, MlRagError, from_json
from ml_rag.ingest.child import Child, Lost, Useless, cause, inherited
from ml_rag.ingest.formats.pictures import MAX_BYTES, MAX_PICTURES
from ml_rag.ingest.split import NONE, Chunking
from ml_rag.protocol import MAX_REPLY_VALUES, MAX_SEGMENTS, has_more_values

log = logging.getLogger("ml_rag.server")

DEFAULT_PARSER = "ml_rag.ingest.parse:parse"
WORKER = "ml_rag.ingest.sandbox_worker"
#: how long a child may take to end once its socket is closed
END_SECONDS = 0.5
#: of message, detail and hint of an error that a child tells
_ERROR_CHARACTERS = 2000
#: what of the server's environment a parser may see: no keys of remote models
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TESSDATA_PREFIX", priority.VARIABLE)
#: the models want the other cores
_SINGLE = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one document. ``wall_seconds`` also bounds the start of a child."""

    cpu_seconds: float = 60.0
    wall_seconds: float = 120.0
    #: address space of the child, the parser libraries included
    memory_bytes: int = 2 * 1024**3
    #: its segments as JSON; reading them takes several times that much memory of this process
    reply_bytes: int = 256 * 1024**2
    #: in that JSON: a segment has some 10, and a line of the model server's reply adds fewer than 64
    values: int = MAX_REPLY_VALUES - 64
    #: metadata of the document, or of a segment, as JSON: each row of a store has them; parsers write less than half
    metadata_bytes: int = 64 * 1024
    #: its segments, and the bytes of their embeddings
    segments: int = MAX_SEGMENTS
    embedding_bytes: int = 256 * 1024**2
    #: of a segment and its context: twice what a model that reads 32,768 tokens gets, and of white space the rest
    segment_characters: int = 4_000_000
    #: a child is replaced after so many documents, so that what parsers leak does not add up
    documents_per_worker: int = 200


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """How an embedding model counts. ``json``: ``tokenizers.Tokenizer.to_str()``, or None for one token a word."""

    key: str
    json: str | None = field(repr=False)
    #: what the model puts before each document
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """A document to parse and split. ``content``: a file, read from its beginning, or the bytes."""

    name: str
    content: IO[bytes] | bytes
    tokenizer: ModelTokenizer
    chunking: Chunking
    #: of the embeddings that its segments get
    dimensions: int
    formats: Sequence[str] | None = None
    language: str | None = None
    ocr: bool = False
    #: the model that describes its pictures, and what it said of them by number; without that they are collected
    describe_images: str | None = None
    described: dict[int, str] | None = None
    #: whose it is: a child that has read it reads no document of others
    role: object = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A document's format as found in its content, its metadata, its segments.

    Of one whose pictures were collected only these: number and JPEG of each, and why others are left out.
    """

    format: str
    metadata: dict[str, Any]
    segments: list[Segment]
    pictures: list[tuple[int, bytes]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    #: whether another load may find more in it
    is_passing: bool = False


_PARSED = TypeAdapter(Parsed)
_COLLECTED = TypeAdapter(
    tuple[Annotated[list[tuple[StrictInt, Base64Bytes]], Field(max_length=MAX_PICTURES)], dict[str, StrictInt]]
)


@functools.cache
def log_missing(what: str, why: str) -> None:
    """Once for the life of the server, not for each child."""
    log.warning("document parsers run without a %s: %s", what, why)


class _Late(Exception):
    """The child did not answer in time, or no caller waits for the answer any more."""


class _Patience:
    """Called while a child is waited for. Raises ``_Late``."""

    def __init__(self, seconds: float, is_cancelled: Callable[[], bool]) -> None:
        self._until, self._is_cancelled = time.monotonic() + seconds, is_cancelled
        self.is_late = False

    def __call__(self) -> None:
        self.is_late = time.monotonic() > self._until
        if self.is_late or self._is_cancelled():
            raise _Late


class _Child(Child):
    """One child process."""

    def __init__(self, parser: str, limits: Limits, go_on: Callable[[], None]) -> None:
        self._known: set[str] = set()
        self.documents = 0
        #: whose documents it reads
        self.role: object = None
        #: not to be used again
        self.spent = False
        self._values = limits.values
        environment = inherited(_ENVIRONMENT) | _SINGLE
        super().__init__(WORKER, parser, str(limits.memory_bytes), environment=environment, most=limits.reply_bytes)
        try:
            #: what the kernel refuses of ``confine`` -> why
            self.refused: dict[str, str] = self._reply(go_on)
        except (Lost, Useless, _Late):
            detail = f"its process ended with status {self.end(END_SECONDS)}"
            raise EngineFailed("the document parser cannot be started", detail=detail) from None
        for what, why in self.refused.items():
            log_missing(what, why)

    def ask(self, request: dict[str, Any], go_on: Callable[[], None], descriptor: int | None = None) -> dict[str, Any]:
        """Send a request and wait for the reply."""
        self.tell(json.dumps(request).encode(), go_on, descriptor)
        return self._reply(go_on)

    def _reply(self, go_on: Callable[[], None]) -> dict[str, Any]:
        """The next message. Raises ``Useless`` if it is not a JSON object: a document can have taken over the child."""
        message = self.message(go_on)
        if has_more_values(message, self._values):
            raise Useless("sent an unexpected reply", f"its JSON has more than {self._values} values")
        # it has no garbage yet, and other threads would wait four times as long while the collector looks for some
        gc.disable()
        try:
            reply = orjson.loads(message)
        except ValueError:
            reply = None
        finally:
            gc.enable()
        if not isinstance(reply, dict):
            raise Useless("sent an unexpected reply", "no JSON object")
        return reply

    def teach(self, tokenizer: ModelTokenizer, go_on: Callable[[], None]) -> None:
        """Give it a model's tokenizer, unless it has it."""
        if tokenizer.key not in self._known:
            message = {"model": tokenizer.key, "tokenizer": tokenizer.json, "prefix": tokenizer.prefix}
            answer = self.ask(message, go_on)
            if "error" in answer:
                detail = from_json(answer, EngineFailed.status).detail
                raise EngineFailed("the model's tokenizer cannot be used", detail=detail)
            self._known.add(tokenizer.key)


def _descriptor(content: IO[bytes] | bytes, stack: contextlib.ExitStack) -> int:
    """A descriptor of a file with the content, to read: a parser that is taken over could make the file larger."""
    descriptor = os.open(f"/proc/self/fd/{_file(content, stack)}", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _file(content: IO[bytes] | bytes, stack: contextlib.ExitStack) -> int:
    """The descriptor of a file with the content. Large uploads lie in one already."""
    if not isinstance(content, bytes):
        # a SpooledTemporaryFile that is still in memory would be written to disk by fileno()
        if getattr(content, "_rolled", True):
            with contextlib.suppress(OSError, AttributeError):
                content.flush()
                return content.fileno()
        content.seek(0)
        content = content.read()
    descriptor = os.memfd_create("document", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    stack.callback(os.ftruncate, descriptor, 0)  # a parser may keep it open
    with open(descriptor, "wb", closefd=False) as memory:
        memory.write(content)
    return descriptor


class Sandbox:
    """A pool of child processes. Started on demand, kept warm; ``close`` ends them."""

    def __init__(self, limits: Limits | None = None, *, workers: int = 2, parser: str = DEFAULT_PARSER) -> None:
        self.limits = limits or Limits()
        self.workers = workers
        self._parser = parser
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        #: the last one is taken first: a single stream of documents keeps a single child
        self._idle: list[_Child] = []
        #: threads at work, each with a child
        self._busy = 0
        self._choosing = threading.Lock()
        self._is_closed = False

    async def run(self, job: Job) -> Parsed:
        """Parse and split a document; cancelling the task kills the child.

        Raises ``DocumentError`` for a document that cannot be read within the limits, and for all that its parser
        reports; ``EngineFailed`` where no child can be started.
        """
        cancelled = threading.Event()
        future = self._threads.submit(self._in_thread, job, cancelled)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def close(self) -> None:
        """End all children, those at work too; their documents fail."""
        self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        while self._idle:
            self._idle.pop().end()

    async def find_missing(self) -> dict[str, str] | None:
        """What the kernel refuses of ``confine`` -> why, by a child that starts and ends; logged.

        None where that cannot be found out now, as where no process can be started.
        """
        try:
            missing = await asyncio.wrap_future(self._threads.submit(self._refused))
        except (EngineFailed, OSError, RuntimeError, ValueError):  # no thread can be started; it said something else
            return None
        if not missing:
            log.info("document parsers are confined: no network, no files but libraries, no privilege")
        return missing

    def _refused(self) -> dict[str, str]:
        child = _Child(self._parser, self.limits, _Patience(self.limits.wall_seconds, lambda: self._is_closed))
        child.end(END_SECONDS)
        return child.refused

    def _in_thread(self, job: Job, cancelled: threading.Event) -> Parsed:
        with self._choosing:
            self._busy += 1
        try:
            return self._by_a_child(job, cancelled)
        finally:
            with self._choosing:
                self._busy -= 1

    def _by_a_child(self, job: Job, cancelled: threading.Event) -> Parsed:
        def is_cancelled() -> bool:
            return cancelled.is_set() or self._is_closed

        child = self._take(job.role, _Patience(self.limits.wall_seconds, is_cancelled))
        patience = _Patience(self.limits.wall_seconds, is_cancelled)
        try:
            return self._ask(child, job, patience)
        except MlRagError:  # what the child has answered
            raise
        except Useless as error:
            child.spent = True
            what, detail = error.args
            log.warning("a parser of documents %s: %s", what, detail)
            raise DocumentError(
                f"the document's parser {what}",
                detail=detail,
                hint="No ordinary document makes it do that: leave it out.",
            ) from None
        except (Lost, _Late):
            child.spent = True
            # one that ends by itself tells why; one that is stuck does not see that its socket is closed
            raise self._lost(child.end(END_SECONDS), patience.is_late, is_cancelled()) from None
        except BaseException:
            child.spent = True  # a part of its answer may be yet to come
            raise
        finally:
            child.documents += 1
            if child.spent or child.documents >= self.limits.documents_per_worker or is_cancelled():
                child.end(END_SECONDS)
            else:
                self._idle.append(child)

    def _take(self, role: object, go_on: Callable[[], None]) -> _Child:
        """A child that has read no document of another role. Where there are enough, a new one replaces an idle one."""
        with self._choosing:
            is_full = self._idle and len(self._idle) + self._busy > self.workers
            mine = (child for child in reversed(self._idle) if child.role == role)
            if (child := next(mine, self._idle[0] if is_full else None)) is not None:
                self._idle.remove(child)
        if child is not None:
            if child.role == role and child.is_alive:
                return child
            child.end()
        child = _Child(self._parser, self.limits, go_on)
        child.role = role
        return child

    def _ask(self, child: _Child, job: Job, go_on: Callable[[], None]) -> Parsed:
        child.teach(job.tokenizer, go_on)
        how = job.chunking
        most = min(self.limits.segments, self.limits.embedding_bytes // (4 * job.dimensions))
        message = {
            "name": job.name,
            "formats": list(job.formats) if job.formats is not None else None,
            "language": job.language, "ocr": job.ocr,
            "describe_images": job.describe_images, "described": job.described,
            "model": job.tokenizer.key,
            "chunking": [how.split_by, how.segment_tokens, how.overlap_tokens, how.context],
            "cpu_seconds": self.limits.cpu_seconds, "reply_bytes": self.limits.reply_bytes,
            "segments": most,
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            answer = child.ask(message, go_on, _descriptor(job.content, stack))
        try:
            if "error" in answer:
                child.spent = answer.get("spent", False)
                # whatever it is: a document that has taken over the parser ends no request by it
                told = from_json(answer, DocumentError.status)
                detail, hint = ((text or "")[:_ERROR_CHARACTERS] or None for text in (told.detail, told.hint))
                raise DocumentError(told.message[:_ERROR_CHARACTERS], detail=detail, hint=hint)
            if "pictures" in answer:
                pictures, left_out = _COLLECTED.validate_python((answer["pictures"], answer["left_out"]))
                if sum(len(jpeg) for _, jpeg in pictures) > MAX_BYTES:
                    raise ValueError("more bytes of pictures than there may be")
                self._check_metadata(left_out)
                return Parsed("", {}, [], pictures, left_out)
            parsed = _PARSED.validate_python(answer)
            if len(parsed.segments) > most or not all(s.text.replace("\0", "").strip() for s in parsed.segments):
                raise ValueError("more segments than there may be, or one without text")
            longest = max((len(segment.text) + len(segment.context) for segment in parsed.segments), default=0)
            if longest > self.limits.segment_characters and how.split_by != NONE:  # which gives pages as they are
                detail = f"a segment of {longest} characters, limit {self.limits.segment_characters}"
                raise Useless("sent an unexpected reply", detail)
            orjson.dumps(parsed)  # which metadata that are nested too deep would prevent in the midst of others' lines
            for metadata in (parsed.metadata, parsed.format, *(segment.metadata for segment in parsed.segments)):
                self._check_metadata(metadata)
            return parsed
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Useless("sent an unexpected reply", "no document") from None

    def _check_metadata(self, metadata: Any) -> None:
        if (size := len(orjson.dumps(metadata))) > self.limits.metadata_bytes:
            detail = f"metadata of {size} bytes, limit {self.limits.metadata_bytes}"
            raise Useless("sent an unexpected reply", detail)

    def _lost(self, status: int, late: bool, cancelled: bool) -> MlRagError:
        """Why the answer is missing, by how the child ended; ``late``: by our own doing."""
        if cancelled:
            return DocumentError("reading the document was cancelled")
        limits = self.limits
        if late or status == -signal.SIGXCPU:
            return DocumentError(
                "the document takes too long to read",
                detail=f"it may take {limits.cpu_seconds:g} s of processor time, {limits.wall_seconds:g} s in all",
                hint="Split the document, or raise document_timeout_seconds in the model server's configuration.",
            )
        if status == -signal.SIGKILL:
            log.warning("a parser of documents was killed")
            return DocumentError(
                "the document's parser was killed",
                detail="it got signal 9 (SIGKILL), which the kernel sends when memory runs out",
                hint="Load the document again; give the model server's machine or container more memory.",
            )
        log.warning("a document ended its parser: %s", cause(status))
        return DocumentError(
            "the document crashed its parser",
            detail=f"the parser ended with {cause(status)}",
            hint="It may be damaged: open it in the program it comes from and save it again.",
        )
