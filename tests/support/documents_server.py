"""A model server of a test's own: /v1/embeddings and /v1/documents by hand, counting what it embeds.

A document is UTF-8 text; its paragraphs are its segments, embedded as the shipped fake model does. Its first line may
be an order: ``!fail`` (this document fails), ``!empty`` (no segment), ``!nan``, ``!short`` (a vector too few),
``!wide`` (other dimensions), ``!hang`` (no answer until the client goes), ``!die`` (the connection breaks),
``!queue`` (an error that every document would get).
"""

from __future__ import annotations

import json
import socket
import struct
from base64 import b64encode
from collections.abc import Callable
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from support.hostile_server import embeddings, head, silent
from support.stores import fake_embedding


class DocumentsServer:
    """A handler for ``hostile``; ``documents`` holds the names it parsed, ``segments`` counts what it embedded."""

    def __init__(self) -> None:
        self.documents: list[str] = []
        self.batches: list[list[str]] = []
        self.options: list[dict[str, Any]] = []
        self.segments = 0
        #: of each document that is answered
        self.metadata: dict[str, Any] = {}
        #: number of a batch, from 0 -> what to do before it is answered
        self.before_batch: dict[int, Callable[[], object]] = {}
        #: a client went while it waited for a ``!hang``
        self.hung_up = False

    def __call__(self, client: socket.socket, request: bytes) -> None:
        start, _, body = request.partition(b"\r\n\r\n")
        if b"/v1/embeddings" in start.split(b"\r\n")[0]:
            asked = json.loads(body)
            data = json.dumps(embeddings(*self.vectors(asked["input"], asked["model"]))).encode()
            client.sendall(head(len(data)) + data)
            return
        if start.startswith(b"GET "):  # such as the catalogue, which ml_rag.configure looks into
            client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        _, _, fields = start.partition(b"\r\n")
        message = BytesParser(policy=HTTP).parsebytes(fields + b"\r\n\r\n" + body)
        options, *parts = message.iter_parts()
        self.options.append(json.loads(options.get_payload(decode=True)))
        files = [(part.get_filename() or "", part.get_payload(decode=True)) for part in parts]
        self.before_batch.pop(len(self.batches), lambda: None)()
        self.batches.append([name for name, _ in files])
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index, (name, content) in enumerate(files):
            self.documents.append(name)
            text = content.decode("utf-8-sig")
            order = text.split("\n")[0]
            if order == "!hang":
                silent(client, request)
                self.hung_up = True
                return
            if order == "!die":
                client.shutdown(socket.SHUT_RDWR)
                return
            line = json.dumps(self._document(index, name, text, order)).encode() + b"\n"
            client.sendall(b"%x\r\n%s\r\n" % (len(line), line))
        client.sendall(b"0\r\n\r\n")

    def vectors(self, texts: list[str], model: str) -> list[list[float]]:
        """The embeddings of texts; every model answers the same."""
        return [fake_embedding(text) for text in texts]

    def _document(self, index: int, name: str, text: str, order: str) -> dict[str, Any]:
        reply: dict[str, Any] = {"index": index, "name": name, "format": "text", "error": None}
        reply["metadata"] = self.metadata
        if order in ("!fail", "!queue"):
            code = {"!fail": "document_failed", "!queue": "queue_full"}[order]
            error = {"message": "no good", "type": "server_error", "code": code, "detail": "it said so", "hint": None}
            return {**reply, "error": error, "segments": []}
        paragraphs = [] if order == "!empty" else [p for p in text.split("\n\n") if p.strip()]
        vectors = self.vectors(paragraphs, self.options[-1]["embed_model_id"])
        self.segments += len(paragraphs)
        if order == "!nan":
            vectors[0] = [float("nan")] * len(vectors[0])
        if order == "!wide":
            vectors = [[*v, 1.0] for v in vectors]
        width = len(vectors[0]) if vectors else 16
        if order == "!short":
            vectors.pop()
        data = b"".join(struct.pack(f"<{len(v)}f", *v) for v in vectors)
        segments = [{"text": p, "tokens": len(p.split()), "metadata": {"page": i}} for i, p in enumerate(paragraphs, 1)]
        return {**reply, "segments": segments, "dimensions": width, "embeddings": b64encode(data).decode()}
