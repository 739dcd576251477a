"""Documents to segments in a vector store: the model server parses, splits and embeds, this inserts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from base64 import b64decode
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from struct import unpack_from
from typing import Any, Protocol

from ml_rag.backend.client import ModelServer
from ml_rag.errors import (
    DimensionMismatch,
    DocumentError,
    EngineFailed,
    InvalidRequest,
    MlRagError,
    UnknownModel,
    from_json,
    reasons,
)
from ml_rag.files import BATCH_BYTES, File, Given, batches, is_storable, storable
from ml_rag.protocol import LOAD_KEYS

#: a commit after so many documents, or the first one after so long
COMMIT_DOCUMENTS = 16
COMMIT_SECONDS = 2.0
#: segments of one INSERT, if they have no more than BATCH_BYTES of text and metadata
INSERT_SEGMENTS = 500

#: what the model server says of a document that the option ``formats`` leaves out
NOT_ACCEPTED = "document format is not accepted"

#: a segment of a function is looked for so many characters behind the one before, for the page that it is of
_PAGE_WINDOW = 100_000
#: the longest name that is sent to the model server, in characters
_SENT_NAME = 255


class Store(Protocol):
    """The vector store, as sql/store/store.sql offers it."""

    def states(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """The metadata of a segment of those of the documents that the store has."""

    def write(self, name: str, chunks: Iterator[Rows]) -> dict[str, list[str]] | None:
        """Replace a document by these rows, or leave it as it was and raise DocumentError.

        Keeps metadata and columns that the owner has added; returns the names of those that are lost, by kind.
        """

    def label(self, name: str, given: dict[str, Any]) -> None:
        """Add to the metadata of a document."""

    def commit(self) -> None:
        """Keep what has been written, where the caller's transaction allows it."""


@dataclass
class Rows:
    """Segments to insert: number of the first, and one list a column."""

    first: int
    metadata: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    vectors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Upload:
    """A document to send: a name, its content, its SHA-256, whether the store has another version of it, its dates.

    ``given``: metadata from the caller.
    """

    name: str
    content: bytes
    sha256: str
    known: bool
    dates: dict[str, str] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a load has done so far; ``result`` is the JSON a caller sees."""

    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("loaded", "changed", "unchanged", "removed", "skipped", "failed"), 0)
    )
    segments: int = 0
    failed: list[dict[str, Any]] = field(default_factory=list)
    #: documents that were loaded without a part of theirs
    incomplete: list[dict[str, Any]] = field(default_factory=list)
    #: metadata and columns of the owner's that differed between the segments of a document that has changed
    lost: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def fail(self, name: str, error: MlRagError, *, known: bool) -> None:
        self.counts["failed"] += 1
        entry: dict[str, Any] = {"document_name": storable(name), "error": error.message}
        if error.detail:
            entry["detail"] = error.detail
        if error.hint:
            entry["hint"] = error.hint
        if known:
            entry["kept"] = "the segments of its former version"
        self.failed.append(entry)

    def result(self) -> dict[str, Any]:
        return {
            "documents": self.counts,
            "segments": self.segments,
            "failed": _clean(self.failed),
            "incomplete": _clean(self.incomplete),
            "lost": self.lost,
            "seconds": round(time.monotonic() - self.started, 3),
        }


#: reasons that are warned of, each by itself
MOST_REASONS = 20


def warn(plpy: Any, found: list[dict[str, Any]]) -> None:
    """Of each reason. A warning goes to the log, so it has nothing of a parser, which can quote the document."""
    for reason in found[:MOST_REASONS]:
        n, example = reason["documents"], f"{reason['example']}: {reason['error']}"
        plpy.warning(
            example if n == 1 else f"{n} documents failed, such as {example}",
            detail='See "failed" in the result.',
            hint=reason.get("hint", "Load again when that is fixed; the other documents are loaded."),
            sqlstate="01000",
        )
    if len(found) > MOST_REASONS:
        message = f"documents failed for {len(found) - MOST_REASONS} more reasons"
        plpy.warning(message, hint='The result lists all of them under "reasons".', sqlstate="01000")


def joined(former: dict[str, Any] | None, result: dict[str, Any]) -> dict[str, Any]:
    """The result of a load, with that of the loads before and the reasons of all failures."""
    if former is not None:
        counts = {name: n + former["documents"][name] for name, n in result["documents"].items()}
        unmatched = sorted(set(result.pop("unmatched", ())).intersection(former.get("unmatched", ())))
        sums = {name: former[name] + result[name] for name in ("segments", "failed", "incomplete", "lost", "seconds")}
        result |= sums | {"documents": counts} | ({"unmatched": unmatched} if unmatched else {})
    return result | {"reasons": reasons(result["failed"])}


class Loader:
    """Loads documents into one store, batch by batch."""

    def __init__(
        self,
        job: dict[str, Any],
        server: ModelServer,
        store: Store,
        tell: Callable[[int, int, int], None] = lambda *_: None,
        split: Callable[[str], list[str]] | None = None,
        embed: Callable[[list[str], str], list[str]] | None = None,
    ) -> None:
        """``tell`` is called with the number of documents that are done with, how many of them failed, and segments.

        ``split``, a text to segments, and ``embed``, texts and a model to vectors: where a function of the caller's
        splits the documents.
        """
        self._split = split
        self._embed = embed
        self._tell = tell
        self._server = server
        self._store = store
        self._request = job["request"]
        self._dimensions: int | None = job["dimensions"]
        self._made_with: str = job["made_with"]
        self._refresh: bool = job["refresh"]
        self.given = Given(job.get("metadata"), job.get("document_metadata"))
        self._uncommitted = 0
        self._committed_at = time.monotonic()
        self.outcome = Outcome()

    def result(self) -> dict[str, Any]:
        """What the caller of SQL sees."""
        unmatched = {"unmatched": sorted(self.given.unused)} if self.given.unused else {}
        return self.outcome.result() | unmatched

    def load(self, batch: Sequence[tuple[str, Callable[[], File]]]) -> None:
        """Load the documents of a batch (name, how to read it) that the store lacks or has another version of."""
        for uploads in self._select(batch):
            self._tell_counts()
            if uploads:
                self._receive(uploads)
                self._commit()

    def _tell_counts(self, written: int = 0) -> None:
        """``written``: segments of the document that is being written."""
        counts = self.outcome.counts
        self._tell(sum(counts.values()) - counts["removed"], counts["failed"], self.outcome.segments + written)

    def _select(self, batch: Sequence[tuple[str, Callable[[], File]]]) -> Iterator[list[Upload]]:
        """In portions: a file can be longer than it was, or than the archive says that it is in."""
        names = [name for name, _ in batch if is_storable(name)]
        states = self._store.states(names)
        uploads: list[Upload] = []
        length = 0
        for name, read in batch:
            known = name in states
            if known and not self._refresh:
                self.outcome.counts["unchanged"] += 1
                continue
            try:
                if not is_storable(name):
                    raise DocumentError("the file name is not valid text", detail="Not valid UTF-8.")
                file = read()
            except DocumentError as e:
                self.outcome.fail(name, e, known=known)
                continue
            sha256 = hashlib.sha256(file.content).hexdigest()
            given = _clean(self.given.of(name))
            if not known or not is_made_of(states[name], sha256, self._made_with):
                if uploads and length + len(file.content) > BATCH_BYTES:
                    yield uploads
                    uploads, length = [], 0
                uploads.append(Upload(name, file.content, sha256, known, file.dates, given))
                length += len(file.content)
            elif has_all(states[name], given):
                self.outcome.counts["unchanged"] += 1
            else:
                self._store.label(name, given)
                self.outcome.counts["changed"] += 1
        yield uploads

    def _receive(self, uploads: list[Upload]) -> None:
        body, content_type = multipart(self._request, uploads)
        waiting = dict(enumerate(uploads))
        with contextlib.closing(self._server.stream("/v1/documents", body, content_type)) as lines:
            for index, reply in documents(lines, waiting):
                upload = waiting.pop(index)
                try:
                    self._write(upload, reply)
                except DocumentError as e:
                    self.outcome.fail(upload.name, e, known=upload.known)
                for _ in reply:
                    pass  # what is left of one that failed
                self._tell_counts()
        if waiting:
            raise nonsense(f"{len(waiting)} of {len(uploads)} documents are missing")

    def _write(self, upload: Upload, reply: Iterator[dict[str, Any]]) -> None:
        head = next(reply)
        if (failure := head.get("error")) is not None:
            error = from_json({"error": failure}, DocumentError.status)
            if error.message == NOT_ACCEPTED:
                self.outcome.counts["skipped"] += 1
                return
            if not isinstance(error, DocumentError | EngineFailed):
                raise error  # the next document would fail in the same way
            raise DocumentError(error.message, detail=error.detail, hint=error.hint)
        of_file = head.get("metadata") or {}
        if not isinstance(of_file, dict):
            raise EngineFailed("unexpected reply from the model server", detail="Metadata are not a JSON object.")
        shared = {
            **of_file,
            "format": head.get("format"),
            "file_name": os.path.basename(upload.name) or upload.name,
            "file_size": len(upload.content),
            **upload.dates,
            "source": {
                "sha256": upload.sha256,
                # one that lacks something that may be had later counts as changed in the next load
                "made_with": "" if head.get("again") else self._made_with,
                "keys": sorted(of_file.keys() - LOAD_KEYS),
            },
        }
        portions = self._rows(map(self._check, chain([head], reply)), _clean(shared), upload.given)
        written = 0

        def counted() -> Iterator[Rows]:
            nonlocal written
            for portion in portions:
                written += len(portion.segments)
                self._tell_counts(written)
                yield portion

        lost = self._store.write(upload.name, counted())
        self.outcome.counts["changed" if upload.known else "loaded"] += 1
        self.outcome.segments += written
        if left_out := shared.get("left_out"):
            self.outcome.incomplete.append({"document_name": upload.name, "left_out": left_out})
        if lost:
            self.outcome.lost.append({"document_name": upload.name, **lost})
        self._uncommitted += 1
        if self._uncommitted >= COMMIT_DOCUMENTS or time.monotonic() - self._committed_at > COMMIT_SECONDS:
            self._commit()

    def _rows(
        self, lines: Iterator[tuple[list[dict[str, Any]], bytes]], shared: dict[str, Any], given: dict[str, Any]
    ) -> Iterator[Rows]:
        if self._split is None:
            return _rows_of_lines(lines, shared, given)
        assert self._embed is not None
        # here, as an error of the caller's function is none of the store's
        segments = own_segments([page for pages, _ in lines for page in pages], self._split)
        if not segments:
            raise DocumentError("the document has no text")
        texts = [segment["text"] for segment in segments]
        return _rows(segments, embed_segments(self._embed, texts, self._request["embed_model_id"]), shared, given)

    def _commit(self) -> None:
        self._store.commit()
        self._uncommitted = 0
        self._committed_at = time.monotonic()

    def _check(self, reply: dict[str, Any]) -> tuple[list[dict[str, Any]], bytes]:
        segments, vectors, dimensions = segments_and_vectors(reply, has_vectors=self._split is None)
        if not segments:
            raise DocumentError("the document has no text")
        if self._dimensions is not None and dimensions != self._dimensions:
            raise DimensionMismatch(
                "the model's embeddings do not fit the vector store",
                detail=f"The model returns {dimensions} dimensions, the store has {self._dimensions}.",
                hint="Load into another table: the model has changed since this one was made.",
            )
        return segments, vectors


def documents(lines: Iterator[Any], asked: Container[int]) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
    """The index of each document in a reply of /v1/documents, and its lines, which must be read before the next one.

    Raises EngineFailed for a line of a document that was not ``asked`` for, or whose lines are not together.
    """
    for line in lines:
        if not isinstance(line, dict) or not isinstance(line.get("index"), int) or line["index"] not in asked:
            raise nonsense(f"No document was asked for by {str(line)[:100]}")
        yield line["index"], _lines_of(line, lines)


def _lines_of(line: dict[str, Any], lines: Iterator[Any]) -> Iterator[dict[str, Any]]:
    index = line["index"]
    yield line
    while line.get("more"):
        following = next(lines, None)
        if not isinstance(following, dict) or following.get("index") != index or following.get("error") is not None:
            raise nonsense(f"A document breaks off before {str(following)[:100]}")
        yield (line := following)


def embed_segments(embed: Callable[[list[str], str], list[str]], texts: Sequence[str], model: str) -> Iterator[str]:
    """The vectors of a document's segments that the model server has not made; what it refuses is the document's error.

    They may be of any length, as a function of the caller's makes them.
    """
    for batch in batches([(text, len(text.encode())) for text in texts], INSERT_SEGMENTS):
        try:
            yield from embed(batch, model)
        except EngineFailed as e:
            raise DocumentError(e.message, detail=e.detail, hint=e.hint) from None
        except UnknownModel:
            raise  # the next document would fail in the same way
        except InvalidRequest as e:
            detail = f"{e.message[:1].upper()}{e.message[1:]}: {e.detail}" if e.detail else e.message
            raise DocumentError("the document's segments cannot be embedded", detail=detail, hint=e.hint) from None


def segments_and_vectors(reply: dict[str, Any], *, has_vectors: bool = True) -> tuple[list[dict[str, Any]], bytes, int]:
    """Segments, vectors and dimensions of a reply. A wrong vector in a table is worse than an error."""
    try:
        segments, dimensions = reply["segments"], reply["dimensions"]
        vectors = b64decode(reply["embeddings"], validate=True)
        texts = [segment["text"] for segment in segments]
        expected = 4 * dimensions * len(segments) if has_vectors else 0
        if not all(text.strip() for text in texts) or len(vectors) != expected:
            raise ValueError(f"{len(vectors)} bytes of embeddings for {len(segments)} segments")
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise nonsense(f"No document: {e!r}") from None
    return segments, vectors, dimensions


def _rows_of_lines(
    lines: Iterable[tuple[list[dict[str, Any]], bytes]], shared: dict[str, Any], given: dict[str, Any]
) -> Iterator[Rows]:
    first = 1
    for segments, vectors in lines:
        yield from rows(segments, vectors, shared, first, given)
        first += len(segments)


def rows(
    segments: Sequence[dict[str, Any]],
    vectors: bytes,
    shared: dict[str, Any],
    first: int = 1,
    given: dict[str, Any] | None = None,
) -> Iterator[Rows]:
    """Rows to insert, in portions. ``vectors``: float32, little endian, one row a segment; ``shared``: metadata, over
    which that of the segment is laid, and ``given``; ``first``: the number of the first segment.

    Raises EngineFailed where a number is not finite.
    """
    width = len(vectors) // len(segments)
    layout = f"<{width // 4}f"
    # 9 digits are what a float32 needs to come back as it was
    template = "[" + ",".join(["%.9g"] * (width // 4)) + "]"
    texts = (template % unpack_from(layout, vectors, at * width) for at in range(len(segments)))
    return _rows(segments, texts, shared, given or {}, first)


def _rows(
    segments: Sequence[dict[str, Any]],
    vectors: Iterable[str],
    shared: dict[str, Any],
    given: dict[str, Any],
    first: int = 1,
) -> Iterator[Rows]:
    def sized() -> Iterator[tuple[tuple[str, str, str], int]]:
        for segment, vector in zip(segments, vectors, strict=True):
            if "n" in vector:  # nan, inf
                raise EngineFailed("the embedding model failed", detail="An embedding holds NaN or infinity.")
            text = storable(segment["text"])
            metadata = json.dumps(_metadata(shared, _clean(segment.get("metadata") or {}), given))
            yield (metadata, text, vector), len(metadata) + len(text)

    for portion in batches(sized(), INSERT_SEGMENTS):
        metadata, texts, own = map(list, zip(*portion, strict=True))
        yield Rows(first, metadata, texts, own)
        first += len(portion)


def _metadata(shared: dict[str, Any], of_segment: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    metadata = {**shared, **of_segment, **given}
    if source := shared.get("source"):
        metadata["source"] = {**source, "keys": sorted({*source["keys"], *of_segment} - given.keys())}
    return metadata


def is_made_of(metadata: dict[str, Any], sha256: str, made_with: str) -> bool:
    """Whether the document of this metadata has this content and was loaded with these options."""
    source = metadata.get("source")
    return isinstance(source, dict) and (source.get("sha256"), source.get("made_with")) == (sha256, made_with)


def has_all(metadata: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether the metadata says this already; true and 1 differ."""
    return json.dumps({**metadata, **given}, sort_keys=True) == json.dumps(metadata, sort_keys=True)


def own_segments(pages: Sequence[dict[str, Any]], split: Callable[[str], list[str]]) -> list[dict[str, Any]]:
    """The segments of a document of which ``pages`` are the text and metadata, as ``split`` makes them of the whole.

    A segment that stands in the text as it is, behind the one before it, has the metadata of the page it begins on.
    """
    texts = [storable(page["text"]) for page in pages]
    text = "\n\n".join(texts)
    starts = list(accumulate((len(page) + 2 for page in texts), initial=0))[:-1]
    segments = []
    at = 0
    for segment in split(text):
        found = text.find(segment, at, at + len(segment) + _PAGE_WINDOW)
        page = bisect_right(starts, found) - 1 if found >= 0 else 0
        known = found >= 0 or len(pages) == 1
        segments.append({"text": segment, "metadata": pages[page].get("metadata") if known else None})
        at = max(at, found)
    return segments


def multipart(request: dict[str, Any], uploads: Sequence[Upload]) -> tuple[bytes, str]:
    """Body and content type of a request to /v1/documents (RFC 7578; names as browsers escape them).

    Of a name the end of its last part only, which tells the format: a header is bounded, and one long name, such as an
    archive can have, would have the whole request refused.
    """
    boundary = uuid.uuid4().hex
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="'
    pieces = [f'{head}options"\r\n\r\n{json.dumps(request)}\r\n'.encode()]
    for upload in uploads:
        name = os.path.basename(upload.name)[-_SENT_NAME:]
        for character, escaped in (("\\", "%5C"), ('"', "%22"), ("\r", "%0D"), ("\n", "%0A")):
            name = name.replace(character, escaped)
        pieces.append(f'{head}file"; filename="{name}"\r\nContent-Type: application/octet-stream\r\n\r\n'.encode())
        pieces.append(upload.content)
        pieces.append(b"\r\n")
    pieces.append(f"--{boundary}--\r\n".encode())
    return b"".join(pieces), f"multipart/form-data; boundary={boundary}"


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {storable(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value


def nonsense(detail: str) -> EngineFailed:
    """The error about a reply that is none."""
    return EngineFailed("unexpected reply from the model server", detail=f"{detail}.")
