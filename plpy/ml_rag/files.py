"""Finding and reading the files that a URI or a path names, and cutting them into requests.

In the backend, as PostgreSQL's operating system user, and in the client. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pwd
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from ml_rag import archives
from ml_rag.archives import system
from ml_rag.errors import DocumentError, InvalidRequest

_T = TypeVar("_T")

#: documents and bytes of one request to the model server; one document may be larger than that by itself.
#: Each request begins with a model that waits for the first parsed document, so there should be few.
BATCH_DOCUMENTS = 128
BATCH_BYTES = 8 * 1024 * 1024
#: the model server's own default for a request, less room for the rest of it
MAX_DOCUMENT_BYTES = 255 * 1024 * 1024
#: longest table name PostgreSQL keeps, in bytes
_MAX_NAME_BYTES = 63
_READ_BYTES = 1 << 20
#: characters of a name that is held against patterns: any user may have written it
LONGEST_MATCHED = 20_000
_SLASH = re.compile("/")
#: times that a file is read which somebody writes to meanwhile
_READ_ATTEMPTS = 3
#: bytes of the paths of all files in archives: each is held in memory several times
_MAX_NAMES = 64 * 1024**2
#: entries of a folder between two looks at interrupts
_ENTRIES = 1000
_HINT = "Name files as the server sees them: 'file:///srv/docs/' (a folder), '/srv/docs/*.pdf', '/srv/docs/a.pdf'."
_PACK = "Pack the archive again, from the folder that all its files are in."

Interrupt = Callable[[], object]
#: takes a folder whose files are left out, or a link, and why
LeftOut = Callable[[str, DocumentError], object]


@dataclass(frozen=True)
class File:
    """A document as it was read. ``dates``: those of the file, by their keys in the metadata, as ISO 8601."""

    content: bytes
    dates: dict[str, str] = field(default_factory=dict)


class Listings(dict[str, "dict[str, int] | None"]):
    """Archives that were looked through, each with the sizes of its files; None where it cannot be read."""

    #: bytes of names that further ones may have
    left = _MAX_NAMES


@dataclass(frozen=True)
class Location:
    """What a URI names: ``base``, a folder without wild cards, and one pattern for each path component below it.

    No patterns: every file below the folder. A backslash in a pattern takes the meaning from the character after it.
    """

    base: str
    patterns: tuple[str, ...]

    @property
    def file(self) -> str | None:
        """The path where it is one file, named as it is."""
        if len(self.patterns) == 1 and not _is_wild(self.patterns[0]):
            return os.path.join(self.base, _literal(self.patterns[0]))
        return None

    @property
    def prefix(self) -> str:
        """What the paths of all files it could name begin with."""
        return self.base.rstrip("/") + "/"

    @property
    def is_folder(self) -> bool:
        """Whether it may name several files, so that deleted ones can be found."""
        return self.file is None or archives.is_archive(self.file)

    def matches(self, path: str) -> bool:
        """Whether a path is one this location could name, or that of a file in an archive that it could name."""
        if not path.startswith(self.prefix):
            return False
        if not self.patterns:
            return True
        if len(path) > LONGEST_MATCHED:
            return False
        expression = re.compile("/".join(map(_expression, self.patterns)), re.DOTALL)
        parts = path[len(self.prefix) :].split("/")
        return any(
            expression.fullmatch("/".join(parts[:end])) is not None
            for end in range(1, len(parts) + 1)
            if end == len(parts) or archives.is_archive(parts[end - 1])
        )


def exactly(path: str) -> Location:
    """The location of one file; the path is absolute and means what it says."""
    folder, name = os.path.split(path)
    return Location(folder, (_escape(name),))


def _escape(text: str) -> str:
    return re.sub(r"([\\?*])", r"\\\1", text)


def _is_wild(pattern: str) -> bool:
    return re.search(r"[?*]", re.sub(r"\\.", "", pattern, flags=re.DOTALL)) is not None


def _literal(pattern: str) -> str:
    return re.sub(r"\\(.)", r"\1", pattern, flags=re.DOTALL)


def _expression(pattern: str) -> str:
    """The pattern of one path component as a regular expression, in which no * but the last one is tried twice."""
    pieces = re.findall(r"\\.|.", pattern, flags=re.DOTALL)
    parts = [""]  # between stars
    for piece in pieces:
        if piece == "*":
            parts.append("")
        else:
            parts[-1] += "[^/]" if piece == "?" else re.escape(piece[-1])
    if len(parts) == 1:
        return parts[0]
    # what stands between two stars may as well be taken where it comes first
    between = "".join(f"(?>[^/]*?{part})" for part in parts[1:-1])
    return f"{parts[0]}{between}[^/]*{parts[-1]}"


class Given:
    """Metadata that the caller gives to documents: to all of them, and to some by name.

    A key of ``named`` is a document's whole name, the end of its path, or a pattern of one of these. The longer one
    goes before the shorter, and a name before a pattern. ``unused``: keys that no document had so far.
    """

    def __init__(self, shared: dict[str, Any] | None, named: dict[str, dict[str, Any]] | None) -> None:
        self._shared = shared or {}
        self._named = named or {}
        self.unused = set(self._named)
        self._longest = min(max(map(len, self._named), default=0), LONGEST_MATCHED)
        self._patterns = [
            (re.compile("(?:.*/)?" + "/".join(map(_expression, pattern.split("/"))), re.DOTALL), pattern)
            for pattern in sorted(self._named, key=lambda pattern: (len(pattern), pattern))
            if _is_wild(pattern)
        ]

    def of(self, name: str) -> dict[str, Any]:
        """What is given to this document."""
        patterns = self._patterns if len(name) <= LONGEST_MATCHED else []
        keys = [pattern for expression, pattern in patterns if expression.fullmatch(name)]
        # the shortest first; no end that is longer than all keys is looked up
        ends = [match.end() for match in _SLASH.finditer(name, max(0, len(name) - self._longest - 1))]
        names = (name[end:] for end in [*reversed(ends), 0])
        found = dict(self._shared)
        for key in [*keys, *(end for end in names if end in self._named)]:
            self.unused.discard(key)
            found |= self._named[key]
        return found


def parse(uri: str) -> Location:
    """The location of ``file://…`` or of an absolute path. Raises InvalidRequest."""
    path = uri
    decode: Callable[[str], str] = str
    if match := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", uri):
        if match[1].lower() != "file":
            hint = (
                f"ml-rag load --store … {uri[:200]} loads it, as a client." if uri[match.end() :][:2] == "//" else _HINT
            )
            raise InvalidRequest("only files can be loaded", detail=f"Got scheme {match[1]!r}.", hint=hint)
        path, decode = uri[match.end() :], _decode
        if path.startswith("//"):
            host, slash, path = path[2:].partition("/")
            if host not in ("", "localhost"):
                raise InvalidRequest("only files of the server can be loaded", detail=f"Host {host!r}.", hint=_HINT)
            path = slash + path
    if not path.startswith("/"):
        raise InvalidRequest("the path is not absolute", detail=f"Got {uri[:200]!r}.", hint=_HINT)
    pieces = re.split(r"([?*])", path)
    pieces[::2] = [_escape(decode(piece)) for piece in pieces[::2]]
    return _locate("".join(pieces))


def _decode(piece: str) -> str:
    """Undo percent-encoding."""
    malformed = "the URI is not well formed"
    if re.search(r"%(?![0-9A-Fa-f]{2})", piece):
        detail = f"Got {piece[:200]!r}."
        raise InvalidRequest(malformed, detail=detail, hint="Write % as %25, or give a plain path without file://.")
    try:
        decoded = unquote_to_bytes(piece).decode()
    except UnicodeDecodeError as e:
        raise InvalidRequest(malformed, detail=f"No UTF-8: {e}.") from None
    if "\0" in decoded:
        raise InvalidRequest(malformed, detail="A path cannot contain NUL.")
    return decoded


def _locate(pattern: str) -> Location:
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    wild = next((i for i, part in enumerate(parts) if _is_wild(part)), len(parts))
    fixed, patterns = [_literal(part) for part in parts[:wild]], parts[wild:]
    if patterns and (".." in patterns or pattern.endswith("/")):
        detail = f"Got {pattern[:200]!r}; after a wild card there is neither '..' nor a folder."
        raise InvalidRequest("a glob names files", detail=detail, hint=_HINT)
    if ".." in fixed:
        # one file, one name: what lies before the last ".." is made canonical, links included
        last = len(fixed) - fixed[::-1].index("..")
        try:
            real = _real("/" + "/".join(fixed[:last]))
        except OSError as e:
            raise InvalidRequest("the folder cannot be read", detail=f"{e.strerror}.", hint=_HINT) from None
        fixed = [part for part in real.split("/") if part] + fixed[last:]
    base = "/" + "/".join(fixed)
    if not patterns and not pattern.endswith("/") and fixed and not os.path.isdir(system(base)):
        return exactly(base)
    return Location(base, tuple(patterns))


def table_name(location: Location) -> str:
    """The default name of a store: the stem of the file, or the name of the folder, fit for an SQL name."""
    name = os.path.splitext(os.path.basename(location.file))[0] if location.file else os.path.basename(location.base)
    name = re.sub(r"\W+", "_", name.lower()).strip("_")
    return name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore") or "documents"


def find(location: Location, interrupt: Interrupt, left_out: LeftOut = lambda *_: None) -> list[str]:
    """Paths of the regular files, sorted. Hidden ones are left out unless their pattern says so; ``left_out`` is called
    with each folder and archive below that cannot be read, and each link that the system follows no further.

    An archive is a folder: the files in it have its path before theirs, in the order they have there.

    A symbolic link counts where it leads to a regular file that lies below the folder and is not found by itself.
    Raises InvalidRequest where there is none, or the folder cannot be read.
    """
    if location.file is not None:
        try:
            regular = stat.S_ISREG(os.stat(system(location.file)).st_mode)
        except OSError as e:
            detail = f"{location.file}: {e.strerror}."
            raise InvalidRequest("file does not exist", detail=detail, hint=_remedy(e) or _HINT) from None
        if not regular:
            raise InvalidRequest("not a regular file", detail=location.file, hint=_HINT)
        return _expanded([location.file], None, interrupt, left_out)
    try:
        os.scandir(system(location.base)).close()
    except OSError as e:
        detail = f"{location.base}: {e.strerror}."
        raise InvalidRequest("the folder cannot be read", detail=detail, hint=_remedy(e) or _HINT) from None
    real_base = _real(location.base).rstrip("/") + "/"
    files: list[str] = []
    links: list[str] = []
    unread = 0

    def leave_out(folder: str, error: DocumentError) -> None:
        nonlocal unread
        unread += 1
        left_out(folder, error)

    for path, entry in _walk(location.base, location.patterns, interrupt, leave_out):
        with contextlib.suppress(OSError):
            if entry.is_file(follow_symlinks=False):
                files.append(path)
            elif entry.is_symlink():
                links.append(path)
    # no link lies between the folder and a file that was found by itself
    found = {real_base + path[len(location.prefix) :] for path in files}
    for path in sorted(links):
        interrupt()
        try:
            real = _real_file(path)
        except OSError as e:
            if e.errno == errno.ELOOP:
                left_out(path, DocumentError("the file cannot be read", detail=f"{e.strerror}."))
            continue
        if real is not None and real.startswith(real_base) and real not in found:
            found.add(real)
            files.append(path)
    if not files:
        detail = f"Nothing below {location.base} {'matches' if location.patterns else 'is a regular file'}"
        if unread:
            detail += f"; {unread} {'folder' if unread == 1 else 'folders'} cannot be read"
        raise InvalidRequest("no file to load", detail=f"{detail}.", hint=_HINT)
    return _expanded(sorted(files), location.base, interrupt, left_out)


def _expanded(paths: list[str], base: str | None, interrupt: Interrupt, left_out: LeftOut) -> list[str]:
    """The files, with those of archives in their place."""
    found = []
    left = _MAX_NAMES
    for path in paths:
        if not archives.is_archive(path):
            found.append(path)
            continue
        try:
            with _open(path, base) as file:
                names = [member.path for member in archives.members(file, path, interrupt)]
        except OSError as e:
            left_out(path, DocumentError("the file cannot be read", detail=f"{e.strerror}.", hint=_remedy(e)))
        except DocumentError as e:
            left_out(path, e)
        else:
            # a document of an office program by another name
            is_document = "[Content_Types].xml" in names or "mimetype" in names
            inside = [path] if is_document else [f"{path}/{name}" for name in names]
            length = sum(map(archives.length, inside))
            if length > left:
                detail = f"With it the paths of files in archives have more than {_MAX_NAMES} bytes."
                left_out(path, archives.too_much(detail))
                continue
            left -= length
            for one in inside:
                if ".." in one.removeprefix(path).split("/"):
                    left_out(one, DocumentError("the name in the archive has a part ..", hint=_PACK))
                else:
                    found.append(one)
    return found


def _descriptor(path: str, base: str | None) -> int:
    """Of a file below a folder, or anywhere. Raises OSError and DocumentError."""
    return os.open(system(path), os.O_RDONLY | os.O_NONBLOCK) if base is None else _open_below(base, path)


def _open(path: str, base: str | None) -> io.BufferedReader:
    return os.fdopen(_descriptor(path, base), "rb")


def _named(path: bytes) -> str:
    """A path of the system as text."""
    return path.decode("utf-8", "surrogateescape")


def _real(path: str) -> str:
    """The path without links. Raises OSError."""
    try:
        return _named(os.path.realpath(system(path)))
    except RecursionError:  # of Python's, which follows links one in another
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None


def _real_file(path: str) -> str | None:
    """Where a link leads; None where that is not a regular file. Raises OSError."""
    # the system bounds how many links it follows, Python does not
    return _real(path) if stat.S_ISREG(os.stat(system(path)).st_mode) else None


def _remedy(error: OSError) -> str | None:
    """What to do, if the name is not the cause. The process that opened the file knows whose rights counted."""
    if not isinstance(error, PermissionError):
        return None
    return f"Give the operating system user {_user()} the right to read it, and to enter the folders above it."


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _walk(
    folder: str, patterns: tuple[str, ...], interrupt: Interrupt, left_out: LeftOut
) -> Iterator[tuple[str, os.DirEntry[bytes]]]:
    """Paths, and what the system tells of them."""
    # no recursion: folders may lie deeper in one another than Python goes
    waiting = [(folder, patterns)]
    while waiting:
        interrupt()
        folder, patterns = waiting.pop()
        entries = []
        try:
            for entry in os.scandir(system(folder)):
                entries.append(entry)
                if len(entries) % _ENTRIES == 0:
                    interrupt()
        except (FileNotFoundError, NotADirectoryError):
            continue  # since its folder was read
        except OSError as e:  # what it holds is neither loaded nor taken for gone
            left_out(folder, DocumentError("the folder cannot be read", detail=f"{e.strerror}.", hint=_remedy(e)))
            continue
        expression = re.compile(_expression(patterns[0]), re.DOTALL) if patterns else None
        visible = bool(patterns) and patterns[0].startswith(".")
        for entry in entries:
            name = _named(entry.name)
            if (name.startswith(".") and not visible) or (expression and not expression.fullmatch(name)):
                continue
            if len(patterns) != 1 and entry.is_dir(follow_symlinks=False):
                waiting.append((_named(entry.path), patterns[1:]))
            elif len(patterns) < 2:
                yield _named(entry.path), entry


def sizes(paths: Sequence[str], interrupt: Interrupt) -> list[tuple[str, int]]:
    """Each path with its size in bytes, 0 if it is unknown."""
    known = Listings()
    found = []
    for path in paths:
        size = 0
        try:
            size = os.stat(system(path)).st_size
        except NotADirectoryError:
            if (parted := archives.inside(path)) is not None:
                size = (_listing(parted[0], interrupt, known) or {}).get(parted[1], 0)
        except (OSError, ValueError):
            pass
        found.append((path, size))
    return found


def _listing(archive: str, interrupt: Interrupt, known: Listings) -> dict[str, int] | None:
    """The sizes of its files, which are looked up once; None where it cannot be read."""
    if archive not in known:
        known[archive] = None
        with contextlib.suppress(OSError, DocumentError), _open(archive, None) as file:
            listing = {one.path: one.size for one in archives.members(file, archive, interrupt)}
            length = sum(map(archives.length, listing))
            if length <= known.left:
                known.left -= length
                known[archive] = listing
    return known[archive]


class Reading:
    """Reads files; the archive that it read last stays open until ``close``, or the end of a ``with`` block."""

    def __init__(self) -> None:
        self._archive: tuple[str, io.BufferedReader, os.stat_result, archives.Reader] | None = None

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._archive is not None:
            self._archive[1].close()
            self._archive = None

    def read(self, path: str, base: str | None, max_bytes: int, interrupt: Interrupt) -> File:
        """As ``read``, also of a file in an archive."""
        if (parted := archives.inside(path)) is None:
            return read(path, base, max_bytes, interrupt)
        name, member = parted
        try:
            if self._archive is None or self._archive[0] != name:
                self.close()
                file = _open(name, base)
                self._archive = (name, file, os.fstat(file.fileno()), archives.Reader(file, name, interrupt))
            _, file, before, reader = self._archive
            found, content = reader.read(member, max_bytes)
            if _has_changed(file, before):
                raise DocumentError("the file changed while it was read", hint="Load it again later.")
        except DocumentError:
            raise  # those after it can be read; to open it again for each takes the square of their number
        except OSError as e:
            self.close()
            raise DocumentError("the file cannot be read", detail=f"{e.strerror}.", hint=_remedy(e)) from None
        except BaseException:
            self.close()
            raise
        dates = _dates(before)
        if found.modified is not None:
            dates |= _dated({"last_modified_date": found.modified})
        return File(content, dates)


def read(path: str, base: str | None, max_bytes: int, interrupt: Interrupt) -> File:
    """A regular file as it was at one moment. Raises DocumentError.

    With ``base``, nothing outside that folder is opened, whatever has become of the path since it was found.
    """
    for _ in range(_READ_ATTEMPTS):
        try:
            with os.fdopen(_descriptor(path, base), "rb", buffering=0) as file:
                dates = _dates(os.fstat(file.fileno()))
                content = _read_whole(file, max_bytes, interrupt)
        except OSError as e:
            raise DocumentError("the file cannot be read", detail=f"{e.strerror}.", hint=_remedy(e)) from None
        if content is not None:
            return File(content, dates)
    raise DocumentError(
        "the file changed while it was read",
        detail=f"It was read {_READ_ATTEMPTS} times, and written to each time.",
        hint="Load it again when no program writes to it.",
    )


def _dates(status: os.stat_result) -> dict[str, str]:
    """Linux does not tell when a file was created: there it is the earlier of when it was written to and changed."""
    created = getattr(status, "st_birthtime", None) or min(status.st_ctime, status.st_mtime)
    times = {
        "creation_date": created,
        "last_modified_date": status.st_mtime,
        "last_accessed_date": status.st_atime,
    }
    return _dated(times)


def _dated(times: dict[str, float]) -> dict[str, str]:
    dates = {}
    for key, seconds in times.items():
        with contextlib.suppress(ValueError, OverflowError, OSError):  # a year beyond 9999
            dates[key] = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return dates


def _read_whole(file: io.FileIO, max_bytes: int, interrupt: Interrupt) -> bytes | None:
    """All of it; None where it was written to meanwhile, so that it may be half of one version and half of another."""
    before = os.fstat(file.fileno())
    if not stat.S_ISREG(before.st_mode):
        raise DocumentError("the file is not a regular file")
    pieces, total = [], 0
    while piece := file.read(_READ_BYTES):
        pieces.append(piece)
        total += len(piece)
        if total > max_bytes:
            raise DocumentError("the file is too large", detail=f"The limit is {max_bytes} bytes.")
        if total > before.st_size and _has_changed(file, before):
            return None  # somebody writes at its end, and may do so for ever
        interrupt()
    return None if _has_changed(file, before) else b"".join(pieces)


def _has_changed(file: io.FileIO | io.BufferedReader, before: os.stat_result) -> bool:
    now = os.fstat(file.fileno())
    return (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)


def _open_below(base: str, path: str) -> int:
    try:
        return _open_without_links(base, path)
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
    os.stat(system(path))  # as in _real_file
    return _open_without_links(_real(base), _real(path))


def _open_without_links(base: str, path: str) -> int:
    """Opens a file below a folder by the names between them, none of which may be that of a link."""
    parts = os.path.relpath(path, base).split("/")
    if parts[0] == "..":
        raise DocumentError("the file lies outside of the folder", detail="A symbolic link leads there.")
    folder = os.open(system(base), os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            child = os.open(system(part), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = child
        return os.open(system(parts[-1]), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def is_gone(path: str, interrupt: Interrupt, known: Listings) -> bool:
    """Whether a file certainly does not exist any more; a folder or archive that cannot be read proves nothing.

    ``known``: what the archives hold, as far as calls before have looked that up.
    """
    try:
        os.lstat(system(path))
    except NotADirectoryError:
        if (parted := archives.inside(path)) is None:
            return True
        listing = _listing(parted[0], interrupt, known)
        return listing is not None and parted[1] not in listing
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return False


def batches(
    sized: Iterable[tuple[_T, int]], most: int = BATCH_DOCUMENTS, most_bytes: int = BATCH_BYTES
) -> Iterator[list[_T]]:
    """Names of documents, or what else has a size in bytes, in their order, grouped into requests."""
    batch: list[_T] = []
    total = 0
    for one, size in sized:
        if batch and (len(batch) == most or total + size > most_bytes):
            yield batch
            batch, total = [], 0
        batch.append(one)
        total += size
    if batch:
        yield batch


def is_storable(text: str) -> bool:
    """Whether PostgreSQL can hold the text as it is."""
    return storable(text) == text


def storable(text: str) -> str:
    """The text as PostgreSQL can hold it: without NUL and lone surrogates."""
    return text.replace("\0", "").encode(errors="replace").decode()
