"""``ml-rag load``: documents of this machine into a vector store, for files the database server cannot see."""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString, NamedTuple

import click
import psycopg
from psycopg.types.json import Jsonb
from rich.console import Console

from ml_rag import files, zstd
from ml_rag.client import remote
from ml_rag.client.dsn import dsn_option
from ml_rag.errors import DocumentError, MlRagError, reasons
from ml_rag.search_path import refuse_borrowed_role
from ml_rag.terminal import printable
from ml_rag.work import Task, Work

zstd.install()

#: schemes of addresses of files of this machine: fsspec would follow every link there, and wait at a FIFO
_LOCAL = re.compile("(?:file|local):", re.IGNORECASE)
#: documents and bytes of one call: as large as a bar that moves allows
CALL = (16, 2 * 1024 * 1024)

# These statements have no operators and no names without a schema: they do not depend on the search_path, which stays
# as it is, since a pooler may give the session to others.
_PARTS = "SELECT pg_catalog.cardinality(pg_catalog.parse_ident(%(store)s))"
# A name without a schema means the first schema of the connection's search_path, as in CREATE TABLE.
_FIRST = "SELECT pg_catalog.format('%%I.%%s', pg_catalog.current_schema(), %(store)s::pg_catalog.text)"
_CREATE = "SELECT ml_rag.create_store(%(store)s, %(options)s)::pg_catalog.oid"
# … and not a table there that somebody else has made
_CHECK = "SELECT ml_rag._refuse_untrusted(%(oid)s)"

_KEPT = (
    "SELECT pg_catalog.jsonb_build_array(s.document_name,"
    " pg_catalog.jsonb_extract_path_text(s.metadata, 'source', 'sha256'),"
    " pg_catalog.jsonb_extract_path_text(s.metadata, 'file_size'),"
    " pg_catalog.jsonb_extract_path_text(s.metadata, 'last_modified_date'))"
    " FROM ml_rag._document_states(%s, %s) AS s"
)


@dataclass
class Tally:
    """What has become of the documents so far."""

    counts: Counter[str] = field(default_factory=Counter)
    segments: int = 0
    failed: list[dict[str, Any]] = field(default_factory=list)
    incomplete: list[dict[str, Any]] = field(default_factory=list)
    lost: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.segments += other.segments
        self.failed += other.failed
        self.incomplete += other.incomplete
        self.lost += other.lost

    def fail(self, path: str, error: MlRagError) -> None:
        self.counts["failed"] += 1
        failure = {"document_name": path, "error": error.message, "detail": error.detail, "hint": error.hint}
        self.failed.append(failure)


def _check_name(name: str) -> None:
    """Raises DocumentError."""
    if not files.is_storable(name):
        raise DocumentError("the file name is not valid text", detail="Not valid UTF-8.")


class Folder:
    """Files of this machine."""

    def __init__(self, location: files.Location) -> None:
        self._location = location
        self._base = None if location.file else location.base
        self.prefix = location.prefix if location.is_folder else None
        self.found: set[str] = set()
        self._known = files.Listings()

    def find(self, tally: Tally) -> dict[str, int]:
        """Names, each with its size."""
        self.found = set(found := files.find(self._location, lambda: None, tally.fail))
        return dict(files.sizes(found, lambda: None))

    def unread(self, client: Client, batch: Sequence[str]) -> set[str]:
        return set()

    def read(self, path: str, reading: files.Reading, interrupt: files.Interrupt) -> files.File:
        _check_name(path)
        return reading.read(path, self._base, files.MAX_DOCUMENT_BYTES, interrupt)

    def interrupt(self) -> None:
        """Nothing waits for files of this machine."""

    def is_gone(self, name: str) -> bool:
        return (
            name not in self.found and self._location.matches(name) and files.is_gone(name, lambda: None, self._known)
        )


class Remote:
    """Documents behind an address."""

    def __init__(self, text: str, taken: dict[str, dict[str, int]]) -> None:
        self._address = remote.Address(text, taken)

    @property
    def prefix(self) -> str | None:
        return self._address.prefix

    def find(self, tally: Tally) -> dict[str, int]:
        return {name: one.size for name, one in self._address.find().items()}

    def unread(self, client: Client, batch: Sequence[str]) -> set[str]:
        """Those that need not be fetched: the store has them, of the size and time that are listed."""
        listed = {name: self._address.found[name] for name in batch if files.is_storable(name)}
        kept = client.kept(list(listed))
        same = {
            name: sha256
            for name, (sha256, size, changed) in kept.items()
            if sha256 is not None and size == str(listed[name].size) and changed == listed[name].changed is not None
        }
        return client.unchanged(same)

    def read(self, name: str, reading: files.Reading, interrupt: files.Interrupt) -> files.File:
        _check_name(name)
        return self._address.read(name, files.MAX_DOCUMENT_BYTES, interrupt)

    def interrupt(self) -> None:
        """End what other threads read."""
        remote.interrupt()

    def is_gone(self, name: str) -> bool:
        return self._address.is_gone(name)


class Store(NamedTuple):
    oid: int
    #: whether its schema is not named, so that its owner must be trusted each time
    is_judged: bool


class Client:
    """A vector store, and how documents get into it by one connection."""

    def __init__(
        self, connection: psycopg.Connection[Any], store: Store, options: dict[str, Any], given: files.Given
    ) -> None:
        self._connection = connection
        self._store, self._is_judged = store
        self._options = options
        self._given = given
        self._reading = files.Reading()
        self._is_over = threading.Event()

    def _check(self) -> None:
        if self._is_over.is_set():
            raise CancelledError

    def _values(self, query: str, *arguments: Any) -> list[Any]:
        self._check()
        with self._connection.transaction():
            if self._is_judged:
                self._connection.execute(_CHECK, {"oid": self._store})
            return [row[0] for row in self._connection.execute(query, (self._store, *arguments)).fetchall()]

    def unchanged(self, hashes: dict[str, str]) -> set[str]:
        """Which documents the store has as they are. ``hashes``: names, each with the hash of its content."""
        if not hashes:
            return set()
        query = "SELECT ml_rag.unchanged_documents(%s, %s, %s, %s)"
        return set(self._values(query, list(hashes), list(hashes.values()), Jsonb(self._options_of(hashes))))

    def kept(self, names: Sequence[str]) -> dict[str, list[str | None]]:
        """Of documents that the store has, as rows of it say, which a load need not have written: the hash of their
        content, its size, and when the file was last changed."""
        return {name: row for name, *row in self._values(_KEPT, list(names))}

    def _options_of(self, names: Iterable[str]) -> dict[str, Any]:
        return {**self._options, "document_metadata": {name: self._given.of(name) for name in names}}

    def load(self, batch: Sequence[str], source: Folder | Remote) -> Tally:
        """Send the files of a batch that the store lacks or has another version of."""
        tally = Tally()
        unread = source.unread(self, batch)
        tally.counts["unchanged"] += len(unread)
        found: dict[str, files.File] = {}
        length = 0
        for path in batch:
            self._check()
            if path in unread:
                continue
            try:
                file = source.read(path, self._reading, self._check)
            except DocumentError as e:
                tally.fail(path, e)
                continue
            # a file can be longer than it was, or than the archive says that it is in
            if found and length + len(file.content) > CALL[1]:
                tally.add(self._send(found))
                found, length = {}, 0
            found[path] = file
            length += len(file.content)
        tally.add(self._send(found))
        return tally

    def _send(self, found: dict[str, files.File]) -> Tally:
        tally = Tally()
        for name in self.unchanged({name: hashlib.sha256(file.content).hexdigest() for name, file in found.items()}):
            del found[name]
            tally.counts["unchanged"] += 1
        if found:
            options = {**self._options_of(found), "file_dates": [file.dates for file in found.values()]}
            contents = [file.content for file in found.values()]
            query = "SELECT ml_rag.load_documents(%s, %s, %b, %s)"
            result = self._values(query, list(found), contents, Jsonb(options))[0]
            told = (result[key] for key in ("segments", "failed", "incomplete", "lost"))
            tally.add(Tally(Counter(result["documents"]), *told))
        return tally

    def remove(self, source: Folder | Remote) -> int:
        """Remove what was loaded from there and exists no more; the number of documents."""
        names = self._values("SELECT ml_rag.documents_below(%s, %s)", source.prefix)
        gone = [name for name in names if source.is_gone(name)]
        return self._values("SELECT ml_rag.remove_documents(%s, %s)", gone)[0] if gone else 0

    def finish(self, distance_metric: str | None, index: dict[str, Any] | None) -> None:
        """Build the index where there is none."""
        self._values("SELECT ml_rag.index_store(%s, %s, %s)", distance_metric, Jsonb(index) if index else None)

    @contextlib.contextmanager
    def hears(self, task: Task) -> Iterator[None]:
        """Show the notices of a call that takes long."""
        self._connection.add_notice_handler(task.heard)
        try:
            yield
        finally:
            self._connection.remove_notice_handler(task.heard)

    def interrupt(self) -> None:
        """End what another thread does, and the statement that it has sent."""
        self._is_over.set()
        self._connection.cancel_safe(timeout=5)


def _load_side_by_side(
    clients: Sequence[Client], batches: Sequence[list[str]], source: Folder | Remote
) -> Generator[tuple[list[str], Tally]]:
    """Each batch by a client that is free, as it is done; the first error ends the others."""
    free: queue.SimpleQueue[Client] = queue.SimpleQueue()
    for client in clients:
        free.put(client)

    def load(batch: list[str]) -> Tally:
        client = free.get()
        try:
            return client.load(batch, source)
        finally:
            free.put(client)

    with ThreadPoolExecutor(len(clients)) as pool:
        futures = {pool.submit(load, batch): batch for batch in batches}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            # again and again: one that is between two statements or reads has none that could be ended
            while running := [future for future in futures if future.running()]:
                for client in clients:
                    with contextlib.suppress(psycopg.Error):
                        client.interrupt()
                source.interrupt()
                wait(running, timeout=0.2)
            raise


def _create(connection: psycopg.Connection[Any], store: str, options: Jsonb) -> Store:
    """The store of this name, which is made unless it is there."""

    def value(query: LiteralString, **parameters: Any) -> Any:
        row = connection.execute(query, parameters).fetchone()
        return row[0] if row else None

    if value(_PARTS, store=store) != 1:
        return Store(int(value(_CREATE, store=store, options=options)), is_judged=False)
    oid = int(value(_CREATE, store=value(_FIRST, store=store), options=options))
    value(_CHECK, oid=oid)
    return Store(oid, is_judged=True)


def _sources(paths: Sequence[Path | str], recursive: bool) -> Iterator[Folder | Remote]:
    taken: dict[str, dict[str, int]] = {}
    for path in paths:
        if isinstance(path, str):
            if (scheme := _LOCAL.match(path)) is None:
                yield Remote(path, taken)
                continue
            location = files.parse(f"file:{path[scheme.end() :]}")
        elif path.absolute().is_dir():
            location = files.Location(str(path.absolute()), ())
        else:
            location = files.exactly(str(path.absolute()))
        is_folder = location.file is None and not location.patterns
        yield Folder(files.Location(location.base, ("*",)) if is_folder and not recursive else location)


class _Paths(click.Path):
    """A path of this machine, or an address."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and remote.is_address(value):
            return value
        return super().convert(value, param, ctx)


def _run(clients: Sequence[Client], sources: Sequence[Folder | Remote], refresh: bool, work: Work) -> Tally:
    tally = Tally()
    found = [source.find(tally) for source in sources]
    n = sum(map(len, found))
    done = 0
    with work.task("files") as task, contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(client.hears(task))
        for source, sizes in zip(sources, found, strict=True):
            batches = list(files.batches(list(sizes.items()), *CALL))
            # closed at once by an interrupt of this thread, too, which has its frame
            with contextlib.closing(_load_side_by_side(clients, batches, source)) as loaded:
                for batch, one in loaded:
                    tally.add(one)
                    done += len(batch)
                    task.tell(done, n, failed=tally.counts["failed"], segments=tally.segments)
            if refresh and source.prefix is not None:
                tally.counts["removed"] += clients[0].remove(source)
    return tally


def _report(tally: Tally, store: str, seconds: float) -> None:
    counts = ", ".join(f"{n} {name}" for name, n in tally.counts.items() if n)
    rate = f", {tally.segments / seconds:.0f} segments/s" if tally.segments else ""
    click.echo(f"{printable(store)}: {counts or 'nothing to do'}; {tally.segments} segments in {seconds:.1f} s{rate}")
    for reason in reasons(tally.failed):
        parts = (reason["error"], reason.get("detail"), reason.get("hint"))
        n, example = reason["documents"], reason["example"]
        which = example if n == 1 else f"{n} documents, such as {example}"
        click.echo(printable(f"failed: {which}: {'; '.join(filter(None, parts))}"), err=True)
    for one in tally.incomplete:
        click.echo(printable(f"incomplete: {one['document_name']}: {one['left_out']}"), err=True)
    for one in tally.lost:
        names = [f"{kind} {', '.join(one[kind])}" for kind in ("metadata", "columns") if kind in one]
        click.echo(printable(f"lost: {one['document_name']}: {'; '.join(names)}: differed between segments"), err=True)


def _object(_: click.Context, __: click.Parameter, value: str | None) -> dict[str, Any]:
    """A JSON object, or @ and the path of a file with one."""
    try:
        text = Path(value[1:]).read_text() if value and value.startswith("@") else value
        found = json.loads(text or "{}")
    except (OSError, ValueError) as e:
        raise click.BadParameter(f"{value!r} is not a JSON object: {e}.") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object.")
    return found


def _index(context: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, Any] | None:
    """Option ``index`` of vector_store_load: the type alone, or its JSON object."""
    if value is None or value.lstrip().startswith("{"):
        return _object(context, parameter, value) or None
    return {"type": value}


@click.command()
@click.argument("paths", nargs=-1, required=True, type=_Paths(exists=True, path_type=Path))
@click.option("--store", required=True, metavar="[SCHEMA.]TABLE", help="The vector store; made where there is none.")
@dsn_option
@click.option("--recursive/--no-recursive", default=True, show_default=True, help="Folders with all below them.")
@click.option("--refresh/--no-refresh", default=True, help="Changed files again, gone ones removed; or only new ones.")
@click.option(
    "--embed-model",
    "embed_model_id",
    metavar="ID",
    help="Embedding model.  [default: the store's, else the database's]",
)
@click.option("--formats", metavar="FORMAT,...", help="Only files of these formats, such as pdf,docx.")
@click.option("--language", metavar="CODE", help="Language of the documents, such as en.")
@click.option("--ocr", is_flag=True, help="Read text in pictures of scanned pages.")
@click.option("--describe-images", metavar="MODEL", help="Have a generation model describe pictures and scanned pages.")
@click.option("--split-by", metavar="UNIT", help="Where segments may end.")
@click.option("--segment-tokens", type=int, help="Longest segment, in tokens of the embedding model.")
@click.option("--overlap-tokens", type=int, help="Tokens that neighbouring segments share.")
@click.option("--context", metavar="CONTEXT", help="What is embedded before a segment's text: none or headings.")
@click.option("--metadata", callback=_object, metavar="JSON|@FILE", help="Further metadata of all documents.")
@click.option(
    "--document-metadata", callback=_object, metavar="JSON|@FILE",
    help="Further metadata of some: an object by name, end of a path or pattern.",
)  # fmt: skip
@click.option("--description", help="Comment of a table that is made.")
@click.option("--distance-metric", metavar="METRIC", help="Metric that the index is built for, such as COSINE.")
@click.option(
    "--index", callback=_index, metavar="TYPE|JSON",
    help='hnsw, ivfflat, none, or an object such as {"type": "hnsw", "m": 32, "quantization": "halfvec"}.',
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(1, 64), default=1, show_default=True,
    help="Connections that load side by side: one for each model server, or more where the files are small.",
)  # fmt: skip
def load(
    paths: tuple[Path | str, ...],
    store: str,
    dsn: str,
    recursive: bool,
    metadata: dict[str, Any],
    document_metadata: dict[str, Any],
    description: str | None,
    distance_metric: str | None,
    index: dict[str, Any] | None,
    jobs: int,
    **options: Any,
) -> None:
    """Load files and folders of this machine, and of addresses, into a vector store.

    Addresses: https://…, s3://…, gs://…, az://…, oci://…; one that ends in / means all below it.
    Files whose content the store has already are not sent. Exit status 1 when a document failed.
    """
    # the others are those of ml_rag.load_documents
    chunking = {name: options.pop(name) for name in ("split_by", "segment_tokens", "overlap_tokens", "context")}
    options["chunking"] = {name: value for name, value in chunking.items() if value is not None} or None
    options["formats"] = options["formats"].split(",") if options["formats"] else None
    given = files.Given(metadata, document_metadata)
    sources = list(_sources(paths, recursive))
    with contextlib.ExitStack() as stack:

        def connect() -> psycopg.Connection[Any]:
            made = stack.enter_context(
                # nor does it prepare statements: see above
                psycopg.connect(dsn, autocommit=True, application_name="ml-rag load", prepare_threshold=None)
            )
            with made.transaction():
                refuse_borrowed_role(made)
            return made

        connection = connect()
        # before the first file, though the index comes after the last
        connection.execute("SELECT ml_rag.parse_options('index', %s)", (Jsonb(index),))
        checked = Jsonb({"metadata": metadata, "document_metadata": document_metadata})
        connection.execute("SELECT ml_rag._parse_load_options('load_documents', %s)", (checked,))
        create = Jsonb({"description": description, **{n: options[n] for n in ("embed_model_id", "language")}})
        made = _create(connection, store, create)
        clients = [Client(one, made, options, given) for one in (connection, *(connect() for _ in range(1, jobs)))]
        started = time.monotonic()
        with Work(Console(stderr=True)) as work:
            tally = _run(clients, sources, options["refresh"], work)
            with work.task("building the index"):
                clients[0].finish(distance_metric, index)
        _report(tally, store, time.monotonic() - started)
        if given.unused:
            click.echo(printable(f"unmatched: {', '.join(sorted(given.unused))}"), err=True)
    sys.exit(1 if tally.failed else 0)
