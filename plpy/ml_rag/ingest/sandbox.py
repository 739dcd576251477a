"""Parses and splits documents in child processes with bounds on time and memory.

A document that loops, eats memory or crashes its parser fails alone: the child is ended and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from base64 import b64decode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any

import orjson

from ml_rag.abc import Segment
from ml_rag.errors import DocumentError, EngineFailed, MlRagError, from_json
from ml_rag.ingest.child import cause, start
from ml_rag.ingest.confinement import environment, log_missing
from ml_rag.ingest.sandbox_worker import receive, send
from ml_rag.ingest.split import Chunking
from ml_rag.protocol import MAX_SEGMENTS
from ml_rag.scratch import Scratch

log = logging.getLogger("ml_rag.server")

#: of the folders that parsers write to, in the folder for temporary files
FOLDER_PREFIX = "ml_rag_parser_"
DEFAULT_PARSER = "ml_rag.ingest.parse:parse"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one document. ``wall_seconds`` also bounds the start of a child."""

    cpu_seconds: float = 60.0
    wall_seconds: float = 120.0
    #: address space of the child, the parser libraries included
    memory_bytes: int = 2 * 1024**3
    #: its segments as JSON; reading them takes several times that much memory of this process
    reply_bytes: int = 256 * 1024**2
    #: its segments, and the bytes of their embeddings
    segments: int = MAX_SEGMENTS
    embedding_bytes: int = 256 * 1024**2
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


class _Lost(Exception):
    """The child is gone, or (``late``) did not answer in time."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.late = late


class _Child:
    """One child process. Its methods block, except ``kill``."""

    def __init__(self, parser: str, limits: Limits) -> None:
        #: the only place it may write to, and gone with it
        self._folder = Scratch(tempfile.gettempdir(), FOLDER_PREFIX)
        try:
            self._start(parser, limits, environment() | {"TMPDIR": str(self._folder.path)})
        except BaseException:
            self._folder.remove()
            raise

    def _start(self, parser: str, limits: Limits, environment: dict[str, str]) -> None:
        self._connection, self.process = start(
            "ml_rag.ingest.sandbox_worker", parser, str(limits.memory_bytes), environment=environment
        )
        self._reply_bytes = limits.reply_bytes
        self._known: set[str] = set()
        self.documents = 0
        #: not to be used again
        self.spent = False
        self._kill_lock = threading.Lock()
        try:
            refused = orjson.loads(self._receive(time.monotonic() + limits.wall_seconds))
        except _Lost:
            status = self.close()
            raise EngineFailed(
                "the document parser cannot be started", detail=f"its process ended with status {status}"
            ) from None
        for what, why in refused.items():
            log_missing(what, why)

    def ask(self, message: dict[str, Any], deadline: float, content: IO[bytes] | bytes | None = None) -> bytearray:
        """Send a request and wait for the reply. Raises ``_Lost``."""
        body = json.dumps(message).encode()
        head = len(body).to_bytes(8, "big")
        try:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            if content is None:
                send(self._connection, body)
            else:
                with contextlib.ExitStack() as stack:
                    socket.send_fds(self._connection, [head], [_descriptor(content, stack)])
                self._connection.sendall(body)
        except OSError as error:
            raise _Lost(late=isinstance(error, TimeoutError)) from error
        return self._receive(deadline)

    def teach(self, tokenizer: ModelTokenizer, deadline: float) -> None:
        """Give it a model's tokenizer, unless it has it."""
        if tokenizer.key not in self._known:
            message = {"model": tokenizer.key, "tokenizer": tokenizer.json, "prefix": tokenizer.prefix}
            answer = orjson.loads(self.ask(message, deadline))
            if "error" in answer:
                raise EngineFailed("the model's tokenizer cannot be used", detail=answer["error"]["detail"])
            self._known.add(tokenizer.key)

    def _receive(self, deadline: float) -> bytearray:
        try:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            head = receive(self._connection, 8)
            length = -1 if head is None else int.from_bytes(head, "big")
            if not 0 <= length <= self._reply_bytes:
                raise _Lost
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            body = receive(self._connection, length)
        except OSError as error:
            raise _Lost(late=isinstance(error, TimeoutError)) from error
        if body is None:
            raise _Lost
        return body

    def kill(self) -> None:
        """End it and whatever it has started; from any thread."""
        with self._kill_lock:
            if self.process.returncode is None:  # otherwise the id may be another's by now
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> int:
        """End it if need be. Its exit status, minus the signal that ended it."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # a child that ends by itself tells why; one that is stuck does not see that its socket is closed
            self.process.wait(0.5)
        self.kill()
        with self._kill_lock:
            status = self.process.wait()
        self._folder.remove()
        return status


def _descriptor(content: IO[bytes] | bytes, stack: contextlib.ExitStack) -> int:
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
    with open(descriptor, "wb", closefd=False) as memory:
        memory.write(content)
    return descriptor


class _Run:
    """The way of one job through a thread of the pool; can be cancelled from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self.cancelled = False

    def use(self, child: _Child | None) -> None:
        with self._lock:
            self._child = child
            if child is not None and self.cancelled:
                child.kill()

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._child is not None:
                self._child.kill()


class Sandbox:
    """A pool of child processes. Started on demand, kept warm; ``close`` ends them."""

    def __init__(self, limits: Limits | None = None, *, workers: int = 2, parser: str = DEFAULT_PARSER) -> None:
        self.limits = limits or Limits()
        self.workers = workers
        self._parser = parser
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        # last in, first out: a single stream of documents keeps a single child
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._runs: set[_Run] = set()
        self._is_closed = False

    async def run(self, job: Job) -> Parsed:
        """Parse and split a document; cancelling the task kills the child.

        Raises ``DocumentError`` for a document that cannot be read within the limits, ``EngineFailed`` where no child
        can be started.
        """
        run = _Run()
        future = self._threads.submit(self._in_thread, run, job)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            run.cancel()
            raise

    def close(self) -> None:
        """End all children, those at work too; their documents fail."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for run in list(self._runs):
            run.cancel()
        self._threads.shutdown(wait=True)
        while not self._idle.empty():
            child = self._idle.get_nowait()
            child.kill()
            child.close()

    def _in_thread(self, run: _Run, job: Job) -> Parsed:
        child: _Child | None = None
        self._runs.add(run)
        try:
            child = self._take()
            run.use(child)
            return self._ask(child, job)
        except _Lost as lost:
            assert child is not None
            child.spent = True
            raise self._lost(child.close(), lost.late, run.cancelled) from None
        finally:
            run.use(None)
            self._runs.discard(run)
            if child is not None:
                child.documents += 1
                worn = child.spent or child.documents >= self.limits.documents_per_worker
                if not worn and not run.cancelled and not self._is_closed:
                    self._idle.put(child)
                else:
                    child.close()

    def _take(self) -> _Child:
        while True:
            try:
                child = self._idle.get_nowait()
            except queue.Empty:
                return _Child(self._parser, self.limits)
            if child.process.poll() is None:
                return child
            child.close()

    def _ask(self, child: _Child, job: Job) -> Parsed:
        deadline = time.monotonic() + self.limits.wall_seconds
        child.teach(job.tokenizer, deadline)
        how = job.chunking
        message = {
            "name": job.name,
            "formats": list(job.formats) if job.formats is not None else None,
            "language": job.language, "ocr": job.ocr,
            "describe_images": job.describe_images, "described": job.described,
            "model": job.tokenizer.key,
            "chunking": [how.split_by, how.segment_tokens, how.overlap_tokens, how.context],
            "cpu_seconds": self.limits.cpu_seconds, "reply_bytes": self.limits.reply_bytes,
            "segments": min(self.limits.segments, self.limits.embedding_bytes // (4 * job.dimensions)),
        }  # fmt: skip
        answer = orjson.loads(child.ask(message, deadline, job.content))
        if "error" in answer:
            child.spent = answer.get("spent", False)
            raise from_json(answer, DocumentError.status)
        if "pictures" in answer:
            pictures = [(number, b64decode(jpeg)) for number, jpeg in answer["pictures"]]
            return Parsed("", {}, [], pictures, answer["left_out"])
        return Parsed(answer["format"], answer["metadata"], [Segment(**row) for row in answer["segments"]])

    def _lost(self, status: int, late: bool, cancelled: bool) -> MlRagError:
        """Why there is no answer, by how the child ended; ``late``: by our own doing."""
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
