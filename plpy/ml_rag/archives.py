"""Compressed files, and archives as if they were folders.

In the backend, in the client and in the parsers of documents. Standard library only. Whatever a file claims, no more
is unpacked than the bounds below, and no more memory taken than a few chunks.
"""

from __future__ import annotations

import bz2
import io
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from ml_rag.errors import DocumentError

#: files of an archive, and bytes of all of them
MAX_FILES = 10_000
MAX_UNPACKED = 1024**3
#: text packs about 10 to 1, an empty spreadsheet 100 to 1, a bomb 1000 to 1; below ``SMALL`` bytes that does no harm
MAX_RATIO = 300
SMALL = 16 * 1024**2
#: memory that a dictionary of xz or Zstandard may take
DICTIONARY_BYTES = 128 * 1024**2
_CHUNK = 64 * 1024
#: what unpacks Zstandard (zstd.py); None in the database's process, which loads no library
zstd: Callable[[IO[bytes]], Iterator[bytes]] | None = None
#: longest header of a member of a tar file, the names and attributes before it, and directory of a zip file
_MAX_HEADER = 128 * 1024
_MAX_DIRECTORY = 16 * 1024**2
#: bytes of an entry there, before its name
_ENTRY = 46
#: of the upper byte of its flags; without it, its name is in code page 437, which has all bytes
_IS_UTF8 = 0x08
#: of the directory, the fields beside the names, which ``zipfile`` copies for each of their parts; 100 bytes a file do
_MAX_EXTRA = 2 * 1024**2
#: bytes of the names of an archive's files, which compress well, and of which each file has a path; 400 bytes a file
_MAX_NAMES = 4 * 1024**2
#: all headers of a member of a tar file, a map of its holes among them, of which ``tarfile`` makes ten times as much
_MAX_HEADERS = 4 * _MAX_HEADER
#: how files of a zip file may be packed: of others ``zipfile`` unpacks all that 64 kB hold, which can be many gigabytes
ZIP_METHODS = frozenset((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))

_ZIP = (".zip",)
_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz", ".tar.zst", ".tzst")
#: what a file of each compression begins with, and how its names end
_OPENINGS = {"gzip": b"\x1f\x8b\x08", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0", "zstd": b"\x28\xb5\x2f\xfd"}
_ENDINGS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_UNFINISHED = "the file is truncated or damaged"

Interrupt = Callable[[], object]


def compression(content: bytes) -> str | None:
    """``gzip``, ``bzip2``, ``xz`` or ``zstd`` by the first bytes."""
    found = next((kind for kind, opening in _OPENINGS.items() if content.startswith(opening)), None)
    return found if found != "bzip2" or (content[3:4] in b"123456789" and content[4:10] in _BZIP2_STARTS) else None


#: a block, or the end where there is none
_BZIP2_STARTS = (b"1AY&SY", b"\x17rE8P\x90")


def plain_name(name: str) -> str:
    """The name without the ending of a compression."""
    stem, ending = os.path.splitext(name)
    return stem if ending.lower() in _ENDINGS else name


def unpacked(content: bytes, most: int = MAX_UNPACKED) -> bytes:
    """What compressed bytes hold. Raises DocumentError for damaged ones, and for more than the bounds allow."""
    stream = _Unpacked(io.BytesIO(content), compression(content), len(content), most=most)
    pieces = []
    while piece := stream.read(_MAX_HEADER):
        pieces.append(piece)
    return b"".join(pieces)


class _Unpacked:
    """A stream of what a file holds, forwards only, as ``tarfile`` reads one."""

    def __init__(
        self,
        file: IO[bytes],
        kind: str | None,
        size: int,
        interrupt: Interrupt = lambda: None,
        most: int = MAX_UNPACKED,
    ) -> None:
        self._interrupt = interrupt
        self._left = self._most = min(most, max(SMALL, MAX_RATIO * size)) if kind else most
        self._pieces = _pieces(file, kind)
        self._rest = b""
        self._at = 0
        #: bytes of headers that may still be read; None: no header is read
        self.headers: int | None = None

    def read(self, count: int) -> bytes:
        """Up to so many bytes, fewer at the end only."""
        if self.headers is not None:
            self.headers -= count
        if count > _MAX_HEADER or (self.headers is not None and self.headers < 0):
            detail = f"A header of more than {_MAX_HEADER if count > _MAX_HEADER else _MAX_HEADERS} bytes."
            raise DocumentError(_UNFINISHED, detail=detail, hint="Copy the file again.")
        return self._read(count)

    def _read(self, count: int) -> bytes:
        found = bytearray(self._rest[:count])
        self._rest = self._rest[count:]
        while len(found) < count and (piece := next(self._pieces, None)) is not None:
            self._interrupt()
            self._left -= len(piece)
            if self._left < 0:
                raise too_much(f"It holds more than {self._most} bytes.")
            missing = count - len(found)
            found += piece[:missing]
            self._rest = piece[missing:]
        self._at += len(found)
        return bytes(found)

    def tell(self) -> int:
        return self._at

    def seek(self, place: int) -> int:
        """Forwards; past the end there is nothing to read."""
        if place < self._at:
            raise OSError("the archive goes back")
        while self._at < place and self._read(min(place - self._at, _MAX_HEADER)):
            pass
        return self._at


def _pieces(file: IO[bytes], kind: str | None) -> Iterator[bytes]:
    try:
        if kind is None:
            while data := file.read(_CHUNK):
                yield data
        elif kind == "zstd":
            if zstd is None:
                raise no_zstd()
            yield from zstd(file)
        else:
            yield from _stdlib(file, kind)
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
        raise DocumentError(_UNFINISHED, detail=f"{kind}: {error}", hint="Copy the file again.") from None


def _stdlib(file: IO[bytes], kind: str) -> Iterator[bytes]:
    data = b""
    while data or (data := file.read(_CHUNK)):
        if kind == "gzip":
            gzip = zlib.decompressobj(wbits=31)
            while not gzip.eof:
                yield gzip.decompress(_more(gzip.unconsumed_tail or data, file), _CHUNK * 16)
                data = b""
            data = gzip.unused_data
        else:
            make = bz2.BZ2Decompressor if kind == "bzip2" else lambda: lzma.LZMADecompressor(memlimit=DICTIONARY_BYTES)
            other: Any = make()
            while not other.eof:
                yield other.decompress(_more(data, file) if other.needs_input else b"", _CHUNK * 16)
                data = b""
            data = other.unused_data
        data = data.lstrip(b"\0")  # padding between the members of a file
        if data and not data.startswith(_OPENINGS[kind][: len(data)]):
            return  # what somebody appended


def _more(data: bytes, file: IO[bytes]) -> bytes:
    if not data and not (data := file.read(_CHUNK)):
        raise EOFError("it ends in the middle")
    return data


def no_zstd() -> DocumentError:
    """The error of Zstandard where nothing unpacks it."""
    return DocumentError(
        "Zstandard is not available here",
        hint="Unpack the archive, pack it with gzip or xz, or load it by the command ml-rag load.",
    )


def too_much(detail: str) -> DocumentError:
    """The error of a bomb."""
    return DocumentError("the file unpacks to too much data", detail=detail, hint="Unpack it, and load what it holds.")


# ---- archives --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """A file of an archive: its path there, its size in bytes, when it was written to (Unix time)."""

    path: str
    size: int
    modified: float | None = None


def length(path: str) -> int:
    """The bytes of a path."""
    return len(path.encode(errors="surrogatepass"))


def is_archive(name: str) -> bool:
    """Whether a file is taken for a folder, by its name."""
    return name.lower().endswith((*_ZIP, *_TAR))


def inside(path: str) -> tuple[str, str] | None:
    """Of ``/a/b.zip/c/d.txt`` the archive and the path in it; None where no part but the last is called like one."""
    parts = path.split("/")
    for i in range(1, len(parts)):
        if is_archive(parts[i - 1]) and _is_file(archive := "/".join(parts[:i])):
            return archive, "/".join(parts[i:])
    return None


def system(path: str) -> bytes:
    """A path as the system takes it: in UTF-8, whatever encoding the locale of a database has Python take for paths."""
    return path.encode("utf-8", "surrogateescape")


def _is_file(path: str) -> bool:
    try:
        return os.path.isfile(system(path))
    except UnicodeEncodeError:
        return False


def members(file: IO[bytes], name: str, interrupt: Interrupt) -> list[Member]:
    """The files of an archive, in the order in which they are read, hidden ones left out. Raises DocumentError."""
    found: dict[str, Member] = {}
    for member, _ in _members(file, name, interrupt):
        found.pop(member.path, None)  # its place is that of the last one, which counts
        found[member.path] = member
    return list(found.values())


class Reader:
    """Reads the files of an archive, best in its order: of a tar file, going back begins anew."""

    def __init__(self, file: IO[bytes], name: str, interrupt: Interrupt) -> None:
        self._file, self._name, self._interrupt = file, name, interrupt
        # of a path that is there twice, as tar -u makes it, the last one counts
        self._places = {member.path: place for place, (member, _) in self._begin()}
        self._members = self._begin()

    def _begin(self) -> Iterator[tuple[int, tuple[Member, Callable[[], IO[bytes]]]]]:
        self._file.seek(0)
        return enumerate(_members(self._file, self._name, self._interrupt))

    def read(self, path: str, most: int) -> tuple[Member, bytes]:
        """Raises DocumentError where it is not there, or has more than ``most`` bytes."""
        for _ in range(2):
            for place, (member, open_it) in self._members:
                if place == self._places.get(path):
                    if member.size > most:
                        raise DocumentError("the file is too large", detail=f"The limit is {most} bytes.")
                    return member, self._whole(open_it, member)
            self._members = self._begin()
        raise DocumentError("the file cannot be read", detail="It is no longer in the archive.")

    def _whole(self, open_it: Callable[[], IO[bytes]], member: Member) -> bytes:
        pieces = []
        try:
            stream = open_it()
            while piece := stream.read(_CHUNK):
                self._interrupt()
                pieces.append(piece)
        except _DAMAGE as error:
            raise _damaged(error) from None
        content = b"".join(pieces)
        if len(content) != member.size:
            raise _damaged(f"it has {len(content)} of {member.size} bytes")
        return content


_DAMAGE = (
    zipfile.BadZipFile, tarfile.TarError, NotImplementedError, ValueError, EOFError, OSError, zlib.error,
    lzma.LZMAError, RecursionError, IndexError,
)  # fmt: skip


def _members(file: IO[bytes], name: str, interrupt: Interrupt) -> Iterator[tuple[Member, Callable[[], IO[bytes]]]]:
    left = _MAX_NAMES
    try:
        for member, open_it in (_zip if name.lower().endswith(_ZIP) else _tar)(file, interrupt):
            left -= length(member.path)
            if left < 0:
                raise too_much(f"The names of its files have more than {_MAX_NAMES} bytes.")
            yield member, open_it
    except _DAMAGE as error:
        raise _damaged(error) from None


def _damaged(error: object) -> DocumentError:
    return DocumentError("the archive is truncated or damaged", detail=str(error)[:300], hint="Copy the file again.")


class _Zip:
    """A file whose directory ``zipfile`` reads and parses at once, which nothing can interrupt: so it is bounded."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, count: int = -1) -> bytes:
        if count > _MAX_DIRECTORY:
            raise too_much(f"Its directory has more than {_MAX_DIRECTORY} bytes.")
        found = self._file.read(count)
        # folders count, too
        if found.count(b"PK\1\2") > 2 * MAX_FILES:
            raise too_much(f"It holds more than {MAX_FILES} files.")
        return _checked(found) if found.startswith(b"PK\1\2") else found


def _checked(directory: bytes) -> bytes:
    """The directory, whose entries are gone through as ``zipfile`` does, with names that it can decode."""
    found = bytearray(directory)
    at = extra = 0
    while at + _ENTRY <= len(found):
        lengths = struct.unpack_from("<HHH", found, at + 28)  # of name, extra field and comment
        extra += lengths[1]
        if extra > _MAX_EXTRA:
            raise too_much(f"Its directory has more than {_MAX_EXTRA} bytes beside the names.")
        try:
            found[at + _ENTRY : at + _ENTRY + lengths[0]].decode()
        except UnicodeDecodeError:
            found[at + 9] &= ~_IS_UTF8 & 0xFF
        at += _ENTRY + sum(lengths)
    return bytes(found)


def _zip(file: IO[bytes], interrupt: Interrupt) -> Iterator[tuple[Member, Callable[[], IO[bytes]]]]:
    bounded: Any = _Zip(file)
    with zipfile.ZipFile(bounded) as archive:
        listed = [one for one in archive.infolist() if not one.is_dir()]
        size = file.seek(0, os.SEEK_END)
        _check(len(listed), sum(one.file_size for one in listed), max(SMALL, MAX_RATIO * size))
        for one in listed:
            interrupt()
            if (path := _visible(one.filename)) is None:
                continue
            if one.flag_bits & 1:
                raise DocumentError(
                    "the archive is encrypted", detail=one.filename, hint="Remove the password and load it again."
                )

            def open_it(one: zipfile.ZipInfo = one) -> IO[bytes]:
                if one.compress_type not in ZIP_METHODS:
                    raise DocumentError(
                        "the file is packed in a way that is not read",
                        detail=f"Its method in the archive is {one.compress_type}; 0 and 8 (Deflate) are read.",
                        hint="Pack the archive again with Deflate, which is the usual method.",
                    )
                # no more than the size that was checked is read of it
                return archive.open(one)

            yield Member(path, one.file_size), open_it


def _tar(file: IO[bytes], interrupt: Interrupt) -> Iterator[tuple[Member, Callable[[], IO[bytes]]]]:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    kind = compression(file.read(16))
    file.seek(0)
    count = total = 0
    stream: Any = _Unpacked(file, kind, size, interrupt)
    stream.headers = _MAX_HEADERS
    archive: Any
    with tarfile.open(fileobj=stream, mode="r:", errorlevel=1) as archive:
        while (one := archive.next()) is not None:
            stream.headers = None
            interrupt()
            archive.members.clear()  # with all their attributes, which can be long
            archive.pax_headers.clear()
            count += 1
            total += one.size
            _check(count, total, max(SMALL, MAX_RATIO * size) if kind else MAX_UNPACKED)
            if one.isreg() and not one.issparse() and (path := _visible(one.name)) is not None:

                def open_it(one: tarfile.TarInfo = one) -> IO[bytes]:
                    found: IO[bytes] | None = archive.extractfile(one)
                    assert found is not None
                    return found

                yield Member(path, one.size, one.mtime), open_it
            stream.headers = _MAX_HEADERS


def _check(count: int, total: int, most: int) -> None:
    if count > MAX_FILES:
        raise too_much(f"It holds more than {MAX_FILES} files.")
    if total > min(most, MAX_UNPACKED):
        raise too_much(f"Its files have more than {min(most, MAX_UNPACKED)} bytes.")


def _visible(path: str) -> str | None:
    """The path without empty parts and "."; None if a part is hidden or of the system that packed it."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    is_hidden = any(part == "__MACOSX" or (part.startswith(".") and part != "..") for part in parts)
    return None if is_hidden or "\0" in path else "/".join(parts) or None
