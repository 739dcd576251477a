"""The child process that parses and splits one document at a time. Started by ``ml_rag.ingest.sandbox`` only.

``python -m ml_rag.ingest.sandbox_worker SOCKET_FD PARSER MEMORY_BYTES``. Messages are JSON; the first one tells what
the kernel refused of ``confine``. A request carries the descriptor of a file with the content. Knows no model and no
network.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import sys
from base64 import b64encode
from collections.abc import Callable
from typing import Any

from ml_rag.abc import Document
from ml_rag.errors import DocumentError, MlRagError
from ml_rag.ingest.child import receive_message, send_message
from ml_rag.ingest.confine import confine
from ml_rag.priority import yield_thread

_OUT_OF_MEMORY = "the document needs too much memory"


def _content(descriptor: int) -> bytes:
    """All of the file, wherever its position is; another process may share it."""
    try:
        pieces = []
        at = 0
        while piece := os.pread(descriptor, 1 << 24, at):
            pieces.append(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    finally:
        os.close(descriptor)


class _Worker:
    def __init__(self, parse: Callable[..., Document]) -> None:
        from ml_rag.ingest.formats.pictures import Pictures
        from ml_rag.ingest.split import Chunking, split
        from ml_rag.ingest.units import Counter

        self._parse = parse
        self._pictures = Pictures
        self._split, self._chunking, self._counter = split, Chunking, Counter
        self._counters: dict[str, Counter] = {}

    def learn(self, request: dict[str, Any]) -> None:
        """Keep the tokenizer of a model for the documents to come."""
        tokenizer = None
        if request["tokenizer"] is not None:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_str(request["tokenizer"])
        self._counters[request["model"]] = self._counter(tokenizer, request["prefix"])

    def document(self, request: dict[str, Any], descriptor: int) -> dict[str, Any]:
        """The document's segments, or first its pictures, where a model shall describe them."""
        content = _content(descriptor)
        options = {"formats": request["formats"], "language": request["language"], "ocr": request["ocr"]}
        if (model := request["describe_images"]) is not None:
            options["pictures"] = pictures = self._pictures(model, request["described"])
            if request["described"] is None:
                with contextlib.suppress(DocumentError):  # raised again where it still holds
                    self._parse(request["name"], content, **options | {"ocr": False})
                wanted = [(number, b64encode(jpeg).decode()) for number, jpeg in pictures.wanted]
                return {"pictures": wanted, "left_out": pictures.left_out}
        document = self._parse(request["name"], content, **options)
        how, counter = self._chunking(*request["chunking"]), self._counters[request["model"]]
        segments = self._split(document, how, counter, request["segments"])
        return {"format": document.format, "metadata": document.metadata, "segments": segments}


def _allow_cpu_seconds(seconds: float) -> None:
    """From now on; past it the kernel ends this process with SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def _out_of_memory() -> DocumentError:
    return DocumentError(
        _OUT_OF_MEMORY,
        detail=f"reading it may take {resource.getrlimit(resource.RLIMIT_AS)[0]} bytes",
        hint="Split the document, or raise document_memory_bytes in the model server's configuration.",
    )


def _failure(error: BaseException) -> MlRagError:
    """The error of one document; whatever a parser raised over it is about the document."""
    if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
        return _out_of_memory()
    if isinstance(error, MlRagError):
        return error
    return DocumentError("the document cannot be read", detail=f"{type(error).__name__}: {error}"[:2000])


def _reply(worker: _Worker, request: dict[str, Any], descriptor: int | None) -> bytes:
    import orjson

    try:
        if descriptor is None:
            worker.learn(request)
            return b"{}"
        _allow_cpu_seconds(request["cpu_seconds"])
        reply = orjson.dumps(worker.document(request, descriptor), default=str, option=orjson.OPT_NON_STR_KEYS)
        if len(reply) > (most := request["reply_bytes"]):
            raise DocumentError(
                "the document has too much text",
                detail=f"its segments have {len(reply)} bytes, and may have {most}",
                hint="Split the document.",
            )
        return reply
    except BaseException as error:  # noqa: BLE001 - told to the server, which decides
        failure = _failure(error)
        # memory that a document has asked for in vain may be left in pieces
        return orjson.dumps(failure.to_json() | {"spent": failure.message == _OUT_OF_MEMORY})


def main(arguments: list[str]) -> None:
    """Answer requests until the server closes the socket."""
    descriptor, parser, memory = int(arguments[0]), arguments[1], int(arguments[2])
    yield_thread()
    refused = confine()  # first: it needs a process with one thread
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    connection = socket.socket(fileno=descriptor)
    module, _, function = parser.partition(":")
    worker = _Worker(getattr(importlib.import_module(module), function))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    send_message(connection, json.dumps(refused).encode())
    while (received := receive_message(connection)) is not None:
        body, content = received
        send_message(connection, _reply(worker, json.loads(body), content))


if __name__ == "__main__":
    main(sys.argv[1:])
