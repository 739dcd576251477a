"""Documents behind addresses: https://, s3://, gs://, az://, oci:// and whatever else fsspec has a file system for.

Keys and regions are those that the library of each file system finds, such as AWS_ACCESS_KEY_ID.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from ml_rag import files
from ml_rag.errors import DocumentError, InvalidRequest

#: scheme -> the extra of this package that brings its file system
EXTRAS = {
    "https": "https", "http": "https", "s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "oci": "oci",
}  # fmt: skip
#: what fsspec calls the time of the last change, by file system
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "timeModified", "time_modified", "created")
#: a name and a password in an address of the web
_USER = re.compile(r"\b(https?://)[^/\s?#]*@", re.IGNORECASE)
#: a part of a path that begins with a dot, and is more than one or two of them
_HIDDEN = re.compile(r"/\.(?!\.?(?:/|\Z))")
#: in a name: that of ``_own_name``, and what asks for something else than a document below a folder
_NUMBER = re.compile(r"\?(\d{1,9})(?=(?:\.[^./]*)?\Z)")
_ELSEWHERE = re.compile(r"[?#]|(?:[/\\]|%2f|%5c)(?:\.|%2e){1,2}(?:[/\\]|%2f|%5c|\Z)", re.IGNORECASE)
#: bytes of a page of the web that lists a folder: each link takes many times its length
_MOST_PAGE = 8 * 1024**2
#: seconds that a document of the web may take
_MOST_SECONDS = 3600


def is_address(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


@dataclass(frozen=True)
class Found:
    """A document as its file system lists it. ``changed``: ISO 8601; None = it does not say."""

    path: str
    size: int
    changed: str | None


@dataclass
class Address:
    """A file, a folder (all below it), or a glob."""

    text: str
    #: of all addresses of the web of one load: names, each with the documents that would have it and their numbers
    taken: dict[str, dict[str, int]] = field(default_factory=dict)
    found: dict[str, Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scheme = self.text.partition(":")[0].lower()
        self._is_web = scheme in ("http", "https")
        try:
            import fsspec

            self._files, self._path = fsspec.core.url_to_fs(
                self.text, **({"get_client": _client} if self._is_web else {})
            )
        except ImportError as e:
            extra = EXTRAS.get(scheme)
            hint = f'pip install "ml-rag[{extra}]" brings it.' if extra else "Install the package that fsspec names."
            raise InvalidRequest(
                f"the file system of {scheme}:// is not installed", detail=f"{e}.", hint=hint
            ) from None
        except ValueError as e:
            raise InvalidRequest(f"the file system of {scheme}:// is unknown", detail=f"{e}.", hint=_HINT) from None
        _have_told(self._files)
        #: in an address of the web a question mark begins the query
        self._is_glob = "*" in self._path or (not self._is_web and "?" in self._path)

    def find(self) -> dict[str, Found]:
        """Names of the documents, each with what its file system lists. Raises InvalidRequest."""
        try:
            listed = self._listed()
        except Exception as e:  # noqa: BLE001 - each library has errors of its own
            detail = f"{self._shown}: {_said(e)}"
            raise InvalidRequest("the address cannot be read", detail=detail, hint=_HINT) from None
        if not listed:
            raise InvalidRequest("no file to load", detail=f"Nothing is at {self._shown}.", hint=_HINT)
        self.found = {
            self._own_name(path): Found(path, int(info.get("size") or 0), _changed(info))
            for path, info in sorted(listed.items())
            if path == self._path or not self._is_hidden(path.removeprefix(self._base))
        }
        return self.found

    def _is_hidden(self, path: str) -> bool:
        """Whether a file is, or a folder that it is in; ``path``: below what was asked for."""
        # nor what sorts the list of a folder of the web
        return _HIDDEN.search(path) is not None or (self._is_web and "/?" in path)

    def _listed(self) -> dict[str, dict[str, Any]]:
        if self._is_glob:
            found = self._files.glob(self._path, detail=True)
        elif self.text.endswith("/"):
            found = self._files.find(self._path, detail=True)
        else:
            info = self._files.info(self._path)
            found = {self._path: info} if info["type"] == "file" else self._files.find(self._path, detail=True)
        return {path: info for path, info in found.items() if info.get("type") != "directory"}

    def _name(self, path: str) -> str:
        """The address of a document without what may be a signature, or a password."""
        name: str = self._files.unstrip_protocol(path)
        return re.sub(r"[?#].*", "", _USER.sub(r"\1", name), flags=re.DOTALL) if self._is_web else name

    def _own_name(self, path: str) -> str:
        """The same, with a number where another document of this load has it: one that differs in the query."""
        name = self._name(path)
        if not self._is_web:
            return name
        same = self.taken.setdefault(name, {})
        number = same.setdefault(_USER.sub(r"\1", path.partition("#")[0]), len(same) + 1)
        stem, ending = posixpath.splitext(name)  # which can say what format it is in
        return name if number == 1 else f"{stem}?{number}{ending}"

    @property
    def _shown(self) -> str:
        return _USER.sub(r"\1", self.text)

    @property
    def prefix(self) -> str | None:
        """What the names of all documents begin with that it could find; None = it is one document."""
        if len(self.found) == 1 and not self._is_glob and not self.text.endswith("/"):
            return None
        return self._name(self._base).rstrip("/") + "/"

    @property
    def _base(self) -> str:
        """The folder that all documents are in which it could find."""
        if self._is_glob:
            return re.split(r"[*?]", self._path, maxsplit=1)[0].rpartition("/")[0]
        # most file systems leave out the last slash
        return self._path.rstrip("/")

    @cached_property
    def _as_stream(self) -> dict[str, Any]:
        """Of the web: in one reply, since not all servers give a part of a document, or its size, as it is."""
        if not self._is_web:
            return {}
        import aiohttp

        return {"block_size": 0, "size": 1, "timeout": aiohttp.ClientTimeout(_MOST_SECONDS, sock_read=300)}

    @cached_property
    def _files_now(self) -> Any:
        """The file system, which does not answer from the listing of the beginning any more."""
        self._files.invalidate_cache()
        return self._files

    def is_gone(self, name: str) -> bool:
        """Whether a document of a name that begins with the prefix is gone; not, while that is not known."""
        if name in self.found or len(name) > files.LONGEST_MATCHED:
            return False
        if self._is_glob and not _could_name(self._name(self._path), name):
            return False
        base, rest = self._base, name.removeprefix(self._name(self._base))
        if self._is_web:
            base = re.sub(r"[?#].*", "", base, flags=re.DOTALL)
            if number := _NUMBER.search(rest):
                rest = rest.replace(number[0], "", 1)
                if same := self.taken.get(self._name(base) + rest):
                    return int(number[1]) > len(same)
            if _ELSEWHERE.search(rest):  # no load gives such a name, but a row can have it
                return True
        # it can be hidden, have no link, or be there only since the listing
        try:
            info = self._files_now.info(base + rest)
        except FileNotFoundError as error:
            # of the web it stands for each error
            return not self._is_web or getattr(error.__cause__, "status", None) in (404, 410)
        except Exception:  # noqa: BLE001 - each library has errors of its own
            return False
        return bool(info.get("type") == "directory")

    def read(self, name: str, most: int, interrupt: Callable[[], object]) -> files.File:
        """A document. Raises DocumentError."""
        one = self.found[name]
        if one.size > most:
            raise DocumentError("the file is too large", detail=f"The limit is {most} bytes.")
        pieces, total = [], 0
        try:
            with self._files.open(one.path, "rb", **self._as_stream) as file:
                while piece := file.read(1 << 20):
                    pieces.append(piece)
                    total += len(piece)
                    if total > most:
                        break
                    interrupt()
        except Exception as e:  # noqa: BLE001
            raise DocumentError("the file cannot be read", detail=_said(e)) from None
        if total > most:
            raise DocumentError("the file is too large", detail=f"The limit is {most} bytes.")
        interrupt()  # what it ended looks like the end of the document
        return files.File(b"".join(pieces), {} if one.changed is None else {"last_modified_date": one.changed})


def _could_name(glob: str, name: str) -> bool:
    """Whether a glob names it, as in fsspec, whose own expression takes the cube of the length of a name and more."""
    groups: list[list[str]] = [[]]
    for part in glob.split("/"):
        if part == "**":
            groups.append([])
        else:
            groups[-1].append(part)
    parts, place = name.split("/"), 0
    for group in groups:
        end = len(parts) - len(group)
        if end < place:
            return False
        # what stands between two ** may as well be taken where it comes first
        places = range(end if group is groups[-1] else place, (0 if group is groups[0] else end) + 1)
        found = next((i for i in places if all(map(fnmatchcase, parts[i : i + len(group)], group))), None)
        if found is None:
            return False
        place = found + len(group)
    return True


def interrupt() -> None:
    """End what other threads wait for, which fsspec does in a thread of its own. To them it looks like an empty reply.

    A file system that is not asynchronous waits as long as its library does.
    """
    from fsspec.asyn import loop

    def end_all() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    if loop[0] is not None:
        loop[0].call_soon_threadsafe(end_all)


_HINT = "Such as https://example.com/handbook.pdf, s3://bucket/handbook/ (all below it) or gs://bucket/*.pdf."


def _have_told(file_system: Any) -> None:
    """Have a folder that cannot be listed end the listing: for fsspec it is an empty one, whose documents are gone."""
    name = "_ls" if file_system.async_impl else "ls"
    listed = getattr(file_system, name)

    @contextlib.contextmanager
    def told(path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise RuntimeError(f"{path}: {str(error) or type(error).__name__}") from error

    def ls(path: str, *arguments: Any, **named: Any) -> Any:
        with told(path):
            return listed(path, *arguments, **named)

    async def later(path: str, *arguments: Any, **named: Any) -> Any:
        with told(path):
            return await listed(path, *arguments, **named)

    setattr(file_system, name, later if file_system.async_impl else ls)


def _changed(info: dict[str, Any]) -> str | None:
    value: Any = next((info[key] for key in _TIMES if info.get(key)), None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value) if value[:1].isdigit() else parsedate_to_datetime(value)
        except ValueError:
            return None
    if isinstance(value, int | float):
        value = datetime.fromtimestamp(value, UTC)
    if not isinstance(value, datetime):
        return None
    changed = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return changed.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def _client(**settings: Any) -> Any:
    """A client of the web that reads no page without end, and follows no redirect into a network."""
    import aiohttp

    class Bounded(aiohttp.ClientResponse):
        _body: bytes | None

        async def read(self) -> bytes:
            if self._body is None:
                found = bytearray()
                async for piece in self.content.iter_any():
                    found += piece
                    if len(found) > _MOST_PAGE:
                        self.close()
                        raise ValueError(f"a page has more than {_MOST_PAGE} bytes")
                self._body = bytes(found)
            return self._body

        async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
            # fsspec's own expression takes the cube of the length of what looks like a link
            text = re.sub(r"\s{5,}", " ", await super().text(encoding, errors))
            return re.sub(r"<(?![aA]\s[^<>]{1,4000}>)", " ", text)

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_redirect)
    return aiohttp.ClientSession(response_class=Bounded, trace_configs=[trace], **settings)


async def _refuse_redirect(_: object, __: object, redirect: Any) -> None:
    """Raise PermissionError if it leads further into a network: from a page of the web to a service of this machine."""
    here = redirect.response.url
    there = here.join(type(here)(redirect.response.headers.get("Location", "")))
    if await _depth(there.host) > await _depth(here.host):
        raise PermissionError(f"{here.host} redirects to {there.host}, which is an internal address")


async def _depth(host: str | None) -> int:
    """0: of the internet, 1: of a private network, 2: of this machine or its link, as the metadata of a cloud are."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None)
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    addresses = [getattr(one, "ipv4_mapped", None) or one for one in addresses]
    if any(one.is_loopback or one.is_link_local or one.is_unspecified for one in addresses):
        return 2
    return int(not all(one.is_global for one in addresses))


def _said(error: BaseException) -> str:
    if isinstance(error.__cause__, PermissionError):  # fsspec says the address alone
        error = error.__cause__
    text = _USER.sub(r"\1", str(error)) or type(error).__name__
    return re.sub(r"\?\S*", "?…", text)[:500].rstrip(".") + "."
