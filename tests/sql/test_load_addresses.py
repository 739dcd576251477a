"""store/store: the command ml-rag load with documents behind addresses, through fsspec."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from click.testing import CliRunner, Result
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import glob_translate

from ml_rag import files
from ml_rag.cli import main
from ml_rag.client import remote
from ml_rag.errors import InvalidRequest
from support.cluster import Connection, Database
from support.documents_server import DocumentsServer
from support.loading import loader_role, segments
from support.stores import error


class Watched(MemoryFileSystem):
    """An object store; which documents were fetched is kept."""

    protocol = ("bucket",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fetched: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("bucket://").strip("/")

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode == "rb":
            self.fetched.append(path.rsplit("/", 1)[-1])
        return super()._open(path, mode, **more)


@pytest.fixture
def bucket(loader: Connection, server: DocumentsServer) -> Iterator[Watched]:
    fsspec.register_implementation("bucket", Watched, clobber=True)
    files = Watched()
    Watched.store.clear()
    Watched.fetched.clear()
    yield files
    Watched.store.clear()


def put(bucket: Watched, **texts: str) -> None:
    for name, text in texts.items():
        bucket.pipe_file(f"/docs/{name.replace('__', '/')}.txt", text.encode())


def run(db: Database, *arguments: str) -> Result:
    """``ml-rag load`` as a role that may."""
    dsn = f"{db.dsn} dbname={db.name} options='-c role={loader_role(db)}'"
    return CliRunner().invoke(main, ["load", *arguments, "--store", "new", "--dsn", dsn])


def names(owner: Connection) -> set[str]:
    return {row[0] for row in owner.execute("SELECT document_name FROM new")}


def test_a_folder_of_an_object_store(db: Database, owner: Connection, bucket: Watched) -> None:
    put(bucket, a="alpha", sub__b="beta", c="gamma")
    result = run(db, "bucket://docs/")
    assert result.exit_code == 0, result.output
    assert "3 loaded" in result.output
    assert names(owner) == {"bucket:///docs/a.txt", "bucket:///docs/sub/b.txt", "bucket:///docs/c.txt"}
    assert sorted(Watched.fetched) == ["a.txt", "b.txt", "c.txt"]
    (changed,) = owner.execute("SELECT DISTINCT metadata ->> 'last_modified_date' FROM new").fetchone() or ("",)
    assert changed.endswith("Z")
    # what has the size and the time that the store knows is not fetched
    Watched.fetched.clear()
    put(bucket, d="delta")
    bucket.rm("/docs/c.txt")
    Watched.store["/docs/a.txt"].created = Watched.store["/docs/a.txt"].created.replace(year=2001)
    result = run(db, "bucket://docs/")
    assert result.exit_code == 0, result.output
    assert {"1 loaded", "2 unchanged", "1 removed"} <= set(result.output.split(": ")[1].split(";")[0].split(", "))
    # the time is another one, the hash is not
    assert sorted(Watched.fetched) == ["a.txt", "d.txt"]
    assert names(owner) == {"bucket:///docs/a.txt", "bucket:///docs/sub/b.txt", "bucket:///docs/d.txt"}
    # other options make other segments
    Watched.fetched.clear()
    assert "3" in run(db, "bucket://docs/", "--segment-tokens", "64").output
    assert len(Watched.fetched) == 3


def test_a_row_that_no_load_wrote_does_not_count_as_loaded(db: Database, owner: Connection, bucket: Watched) -> None:
    put(bucket, a="alpha", b="beta")
    assert run(db, "bucket://docs/").exit_code == 0
    owner.execute("UPDATE new SET metadata = metadata || '{\"file_size\": \"4 bytes\"}' WHERE document_name ~ 'a.txt'")
    owner.execute("UPDATE new SET metadata = metadata #- '{source,sha256}' WHERE document_name ~ 'b.txt'")
    assert "1 unchanged, 1 changed" in run(db, "bucket://docs/").output


def test_what_is_hidden_is_left_out(db: Database, owner: Connection, bucket: Watched, site: tuple[str, Path]) -> None:
    put(bucket, a="alpha", _sub__b="beta")
    for name in (".git/config.txt", "sub/.keys/a.txt", ".env", "sub/...txt"):
        bucket.pipe_file(f"/docs/{name}", b"secret")
    for address in ("bucket://docs/", "bucket://docs/**"):
        assert run(db, address).exit_code == 0
        assert names(owner) == {"bucket:///docs/_sub/b.txt", "bucket:///docs/a.txt"}
    assert "1 loaded" in run(db, "bucket://docs/.git/").output
    url, folder = site
    (folder / "a.txt").write_text("alpha")
    (folder / "index.html").write_text('<a href="./a.txt">a</a> <a href="?C=N;O=D">by name</a> <a href=".a.txt">b</a>')
    assert "1 loaded" in run(db, f"{url}/").output


def test_a_glob_removes_nothing_but_what_it_could_name(db: Database, owner: Connection, bucket: Watched) -> None:
    put(bucket, a1="alpha", a2="beta", b1="gamma", sub__a3="delta")
    assert run(db, "bucket://docs/").exit_code == 0
    for name in ("a1", "b1"):
        bucket.rm(f"/docs/{name}.txt")
    result = run(db, "bucket://docs/a*.txt")
    assert "1 unchanged, 1 removed" in result.output
    assert names(owner) == {f"bucket:///docs/{name}.txt" for name in ("a2", "b1", "sub/a3")}


def test_what_a_folder_does_not_list_but_has_is_kept(
    db: Database, owner: Connection, bucket: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, a="alpha", b="beta", c="gamma", d="delta")
    bucket.pipe_file("/docs/.hidden.txt", b"hidden")
    for address in ("bucket://docs/", "bucket://docs/.hidden.txt"):
        assert run(db, address).exit_code == 0
    for name in "bc":
        bucket.rm(f"/docs/{name}.txt")
    bucket.pipe_file("/docs/b.txt/now_a_folder.txt", b"epsilon")
    bucket.rm("/docs/d.txt")
    listed, info = Watched.find, Watched.info

    def before_another_load(files: Watched, path: str, **more: Any) -> Any:
        found = listed(files, path, **more)
        put(bucket, d="delta")
        return found

    def failing(files: Watched, path: str, **more: Any) -> Any:
        if path == "/docs/c.txt":
            raise PermissionError(path)
        return info(files, path, **more)

    monkeypatch.setattr(Watched, "find", before_another_load)
    monkeypatch.setattr(Watched, "info", failing)
    assert "1 unchanged, 1 loaded, 1 removed" in run(db, "bucket://docs/").output
    there = {"a.txt", "b.txt/now_a_folder.txt", "c.txt", "d.txt", ".hidden.txt"}
    assert names(owner) == {f"bucket:///docs/{name}" for name in there}
    monkeypatch.undo()
    assert "3 unchanged, 1 removed" in run(db, "bucket://docs/").output
    assert names(owner) == {f"bucket:///docs/{name}" for name in there - {"c.txt"}}


def test_a_glob_names_what_it_does_in_fsspec() -> None:
    globs = ("*", "**", "a/*", "a*", "a/**", "a/**/b", "**/b*.txt", "a/**/b/**/*c", "**/a/**/a", "a/[bc]*", "a/?")
    for pattern in globs:
        for name in ("c", "a/b", "ab", "a/b/c", "a/b/b/c", "a/x/b", "a/x/b/y/zc", "b.txt", "x/b1.txt", "a/a", "a/d"):
            is_named = re.fullmatch(glob_translate(f"s3://x/{pattern}"), f"s3://x/{name}") is not None
            assert remote._could_name(f"s3://x/{pattern}", f"s3://x/{name}") == is_named, (pattern, name)


def test_a_long_name_is_compared_with_a_glob_in_a_moment(bucket: Watched) -> None:
    put(bucket, a="alpha")
    began = time.process_time()
    for glob in ("*a*a*a*.txt", "**/a*a/**/*a/**/a.txt"):
        address = remote.Address(f"bucket://docs/{glob}")
        for name in ("a" * 19_000, "a/" * 9000, "a" * 10**6):
            assert not address.is_gone(f"bucket:///docs/{name}")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("address", ["bucket://docs/", "bucket://docs"])
def test_a_folder_removes_nothing_of_those_beside_it(
    db: Database, owner: Connection, bucket: Watched, address: str
) -> None:
    put(bucket, a="alpha", b="beta", c="gamma")
    for name in ("other/a.txt", "docs2/a.txt", "a.txt"):
        bucket.pipe_file(f"/{name}", b"alpha")
        assert "1 loaded" in run(db, f"bucket://{name}").output
    assert run(db, address).exit_code == 0
    bucket.rm("/docs/c.txt")
    bucket.rm("/other/a.txt")
    assert "2 unchanged, 1 removed" in run(db, address).output
    there = ("a.txt", "docs/a.txt", "docs/b.txt", "docs2/a.txt", "other/a.txt")
    assert names(owner) == {f"bucket:///{name}" for name in there}


def test_one_document_and_one_that_is_not_there(db: Database, owner: Connection, bucket: Watched) -> None:
    put(bucket, a="alpha", b="beta")
    assert run(db, "bucket://docs/a.txt").exit_code == 0
    assert names(owner) == {"bucket:///docs/a.txt"}
    result = run(db, "bucket://docs/z.txt")
    assert result.exit_code == 1
    assert "the address cannot be read" in result.output
    result = run(db, "bucket://docs/z*")
    assert "no file to load" in result.output


@pytest.mark.parametrize("scheme", ["file", "LOCAL"])
def test_an_address_of_files_of_this_machine_is_a_path(
    db: Database, owner: Connection, loader: Connection, server: DocumentsServer, tmp_path: Path, scheme: str
) -> None:
    """Who may write into a folder has none of the files of whoever loads it put into the store."""
    folder = tmp_path / "a b"
    for name in ("a b/a.txt", "a b/.hidden/x.txt", "a b/sub/b.txt", "secret.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(folder / "fifo.txt")
    address = f"{scheme}://{tmp_path}/a%20b/"
    result = run(db, address, "--no-recursive")
    assert result.exit_code == 0, result.output
    assert names(owner) == {f"{folder}/a.txt"}
    assert run(db, address).exit_code == 0
    assert names(owner) == {f"{folder}/a.txt", f"{folder}/sub/b.txt"}
    (folder / "a.txt").unlink()
    assert "no file to load" in run(db, f"{address}*.txt").output
    (folder / "c.txt").write_text("c")
    assert run(db, f"{address}*.txt").exit_code == 0
    assert names(owner) == {f"{folder}/c.txt", f"{folder}/sub/b.txt"}


class Answering(BaseHTTPRequestHandler):
    """Has a document for each query, and a page with links to them."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        rows = ("rows.csv", "rows.csv?id=3", "rows.csv?id=4")
        links = ("get?id=1", "get?id=2", "get?id=2#end", *rows, "one.txt?key=secret")
        page = "".join(f'<a href="{link}">x</a>' for link in links)
        body = (page if self.path == "/docs/" else f"text of {self.path}").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path == "/docs/" else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return body

    def log_message(self, *arguments: Any) -> None:
        pass


def test_documents_whose_addresses_differ_in_the_query(
    db: Database, owner: Connection, loader: Connection, server: DocumentsServer
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://127.0.0.1:{made.server_address[1]}"
        known = url.replace("://", "://bob:secret@")
        queries = ("id=1", "id=2", "id=2#end", "id=1")
        result = run(db, *(f"{url}/get?{query}" for query in queries), f"{known}/get?id=2")
        assert result.exit_code == 0, result.output
        assert names(owner) == {f"{url}/get", f"{url}/get?2"}
        found = owner.execute("SELECT segment FROM new ORDER BY document_name").fetchall()
        assert [text.split("?")[1] for (text,) in found] == ["id=1", "id=2"]
        assert "6 loaded" in run(db, f"{url}/docs/").output
        documents = {"get", "get?2", "rows.csv", "rows?2.csv", "rows?3.csv", "one.txt"}
        assert names(owner) == {f"{url}/get", f"{url}/get?2"} | {f"{url}/docs/{name}" for name in documents}
        assert "6 unchanged" in run(db, f"{url}/docs/").output
        # without a link, and one of a name that has fewer documents than it had
        assert run(db, f"{url}/docs/extra?id=1", f"{url}/docs/extra?id=2").exit_code == 0
        assert run(db, *(f"{url}/docs/get?id={number}" for number in (1, 2, 3))).exit_code == 0
        assert "6 unchanged, 1 removed" in run(db, f"{url}/docs/").output
        documents |= {"extra", "extra?2"}
        assert names(owner) == {f"{url}/get", f"{url}/get?2"} | {f"{url}/docs/{name}" for name in documents}
        made.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def site(loader: Connection, server: DocumentsServer, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}", tmp_path
        made.shutdown()


def test_addresses_of_the_web(db: Database, owner: Connection, site: tuple[str, Path]) -> None:
    url, folder = site
    (folder / "a.txt").write_text("alpha")
    result = run(db, f"{url}/a.txt?signature=secret")
    assert result.exit_code == 0, result.output
    assert names(owner) == {f"{url}/a.txt"}  # a signature is not kept
    assert segments(owner, "new") == {"a.txt": ["alpha"]}
    assert "1 unchanged" in run(db, f"{url}/a.txt").output
    (folder / "a.txt").write_text("beta")
    assert "1" in run(db, f"{url}/a.txt").output
    assert segments(owner, "new") == {"a.txt": ["beta"]}
    result = run(db, f"{url}/missing.txt?signature=secret")
    assert result.exit_code == 1
    assert "secret" not in result.output.replace("missing.txt?signature=secret:", "")


def test_a_password_of_an_address_is_told_nobody(db: Database, owner: Connection, site: tuple[str, Path]) -> None:
    url, folder = site
    known = url.replace("://", "://bob:secret@")
    (folder / "docs").mkdir()
    for name in ("a", "b"):
        (folder / "docs" / f"{name}.txt").write_text(name)
    result = run(db, f"{known}/docs/")
    assert result.exit_code == 0, result.output
    assert names(owner) == {f"{url}/docs/a.txt", f"{url}/docs/b.txt"}
    (folder / "docs" / "a.txt").unlink()
    result = run(db, f"{known}/docs/*.txt")
    assert "1 unchanged, 1 removed" in result.output
    for missing in ("missing.txt", "missing*"):
        result = run(db, f"{known}/{missing}")
        assert result.exit_code == 1
        assert missing in result.output
        assert "secret" not in result.output


class Hostile(Quiet):
    """Lists a name that is no text, and itself in another order, as Apache does; answers without end."""

    def do_HEAD(self) -> None:
        self._begin(200, "Content-Length", "5")

    def do_GET(self) -> None:
        pages = {
            "/": b'<a href="?C=N;O=D">Name</a> <a href="good.txt">1</a> <a href="no\0text.txt">2</a>',
            "/good.txt": b"alpha",
        }
        if (page := pages.get(self.path.partition("?")[0])) is not None:
            self._begin(200, "Content-Length", str(len(page)))
            self.wfile.write(page)
            return
        self._begin(206, "Transfer-Encoding", "chunked")
        with contextlib.suppress(OSError):
            for _ in range(64):
                self.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")

    def _begin(self, status: int, name: str, value: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header(name, value)
        self.end_headers()


def test_a_hostile_site_is_read_in_bounds(
    db: Database, owner: Connection, loader: Connection, server: DocumentsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_MOST_PAGE", 1 << 20)
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 1 << 20)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://127.0.0.1:{made.server_address[1]}"
        result = run(db, f"{url}/")
        assert names(owner) == {f"{url}/good.txt"}
        assert "the file name is not valid text" in result.output
        assert "a page has more than 1048576 bytes" in run(db, f"{url}/endless/").output
        assert "the file is too large; The limit is 1048576 bytes" in run(db, f"{url}/endless.txt").output
        made.shutdown()


@pytest.mark.parametrize(
    "page", ["<a" + " " * 10**6, "<a x" * 10**6, f"<a{' ' * 3000}>" * 100, f"<a{' x' * 1990}>" * 100]
)
def test_a_page_that_looks_like_links_is_read_in_a_moment(site: tuple[str, Path], page: str) -> None:
    url, folder = site
    (folder / "index.html").write_text(f'{page}<p><a  class="x y"\n href="a  b.txt">1</a><A HREF=\'c.txt\'>')
    began = time.process_time()
    found = remote.Address(f"{url}/").find()
    assert time.process_time() - began < 5
    assert {f"{url}/a  b.txt", f"{url}/c.txt"} <= set(found)


class Packing(Quiet):
    """Gives a wrong size and no part of a document, and packs it for clients that take that."""

    text = b"grebe " * 2_000_000

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "9000000")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(gzip.compress(self.text))


def test_a_document_of_the_web_is_read_as_a_whole() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Packing) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://127.0.0.1:{made.server_address[1]}/a.txt"
        address = remote.Address(url)
        address.find()
        assert address.read(url, files.MAX_DOCUMENT_BYTES, lambda: None).content == Packing.text
        made.shutdown()


class Moved(Quiet):
    """Sends clients to where the path says."""

    def send_head(self) -> Any:
        if "/to/" not in self.path:
            return super().send_head()
        host = self.path.split("/to/")[1].split("/")[0]
        self.send_response(302)
        self.send_header("Location", f"http://{host}:{self.server.server_address[1]}/a.txt" if host else "/a.txt")
        self.end_headers()
        return None


def test_a_redirect_leads_no_further_into_a_network(
    db: Database,
    owner: Connection,
    loader: Connection,
    server: DocumentsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def depth(host: str | None) -> int:
        return int(host == "127.0.0.1")

    monkeypatch.setattr(remote, "_depth", depth)
    (tmp_path / "a.txt").write_text("alpha")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Moved, directory=str(tmp_path))) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        port = made.server_address[1]
        for host, there in (("localhost", ""), ("localhost", "localhost"), ("127.0.0.1", "localhost")):
            assert "1 loaded" in run(db, f"http://{host}:{port}/to/{there}/a.txt").output
        for path in ("to/127.0.0.1/a.txt", "to/127.0.0.1/"):
            result = run(db, f"http://localhost:{port}/{path}")
            assert result.exit_code == 1
            assert "localhost redirects to 127.0.0.1, which is an internal address" in result.output
        assert len(names(owner)) == 3
        made.shutdown()


@pytest.mark.parametrize(
    ("host", "depth"),
    [
        *(
            ("8.8.8.8", 0),
            ("2606:4700::1111", 0),
            ("10.0.0.1", 1),
            ("192.168.1.1", 1),
            ("fd00::1", 1),
            ("100.64.0.1", 1),
        ),
        *(
            ("127.0.0.1", 2),
            ("::1", 2),
            ("169.254.169.254", 2),
            ("::ffff:127.0.0.1", 2),
            ("fe80::1", 2),
            ("0.0.0.0", 2),
        ),
    ],
)
def test_how_far_in_a_network_an_address_is(host: str, depth: int) -> None:
    assert asyncio.run(remote._depth(host)) == depth


class Resetting(Quiet):
    """Ends the connection of whoever lists a folder below, once it is asked to."""

    is_asked: ClassVar[bool] = False

    def do_GET(self) -> None:
        if self.is_asked and "/sub" in self.path:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        else:
            super().do_GET()


def test_a_folder_that_could_not_be_listed_keeps_its_documents(
    db: Database,
    owner: Connection,
    loader: Connection,
    server: DocumentsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / name).write_text(name)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Resetting, directory=str(tmp_path))) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://127.0.0.1:{made.server_address[1]}"
        assert "2 loaded" in run(db, f"{url}/").output
        monkeypatch.setattr(Resetting, "is_asked", True)
        HTTPFileSystem.clear_instance_cache()
        result = run(db, f"{url}/")
        assert result.exit_code == 1
        assert "the address cannot be read" in result.output
        assert names(owner) == {f"{url}/a.txt", f"{url}/sub/b.txt"}
        made.shutdown()


class Telling(Quiet):
    """Answers for some names with a status of its own."""

    asked: ClassVar[list[str]] = []

    def send_head(self) -> Any:
        self.asked.append(self.path)
        name = self.path.rpartition("/")[2].partition(".")[0]
        if name.isdigit() and self.headers.get("Authorization"):
            self.send_error(int(name))
            return None
        if name == "reset" and self.headers.get("Authorization"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return None
        return super().send_head()


def test_documents_of_the_web_that_have_no_link_are_kept(
    db: Database, owner: Connection, loader: Connection, server: DocumentsServer, tmp_path: Path
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Telling, directory=str(tmp_path))) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://127.0.0.1:{made.server_address[1]}"
        there = ("linked", "alone", "403", "404", "410", "500", "reset", "deleted")
        for name in there:
            (tmp_path / f"{name}.txt").write_text(name)
        assert run(db, *(f"{url}/{name}.txt" for name in there)).exit_code == 0
        assert len(names(owner)) == 8
        (tmp_path / "index.html").write_text('<a href="linked.txt">1</a>')
        (tmp_path / "deleted.txt").unlink()
        result = run(db, f"{url.replace('://', '://bob:secret@')}/")
        assert "1 unchanged, 3 removed" in result.output
        assert names(owner) == {f"{url}/{name}.txt" for name in ("linked", "alone", "403", "500", "reset")}
        made.shutdown()


def test_a_planted_name_has_nothing_else_asked_for(
    db: Database, owner: Connection, loader: Connection, server: DocumentsServer, tmp_path: Path
) -> None:
    """Who may only INSERT has no request made of a site by whoever loads from it."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.html").write_text('<a href="linked.txt">1</a>')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Telling, directory=str(tmp_path))) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://127.0.0.1:{made.server_address[1]}"
        planted = ("../a.txt", "%2E%2e/a.txt", "..", "a/..%2fa.txt", "a.txt?delete=1", "a.txt#b", "a?" + "1" * 5000)
        for name in ("linked", *map(str, range(len(planted)))):
            (tmp_path / "docs" / f"{name}.txt").write_text(name)
        assert run(db, *(f"{url}/docs/{number}.txt" for number in range(len(planted)))).exit_code == 0
        for number, path in enumerate(planted):
            names_of = (f"{url}/docs/{path}", f"{url}/docs/{number}.txt")
            owner.execute("UPDATE new SET document_name = %s WHERE document_name = %s", names_of)
        Telling.asked.clear()
        assert "1 loaded, 7 removed" in run(db, f"{url}/docs/").output
        assert set(Telling.asked) == {"/docs/", "/docs/linked.txt"}
        made.shutdown()


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gs"), ("az", "az"), ("oci", "oci")])
def test_a_file_system_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, scheme: str, extra: str) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError(f"install the file system of {scheme}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(InvalidRequest) as caught:
        remote.Address(f"{scheme}://bucket/docs/")
    assert f"the file system of {scheme}:// is not installed" in caught.value.message
    assert f'pip install "ml-rag[{extra}]"' in (caught.value.hint or "")


def test_a_scheme_that_nobody_knows() -> None:
    with pytest.raises(InvalidRequest, match="the file system of nonsense:// is unknown"):
        remote.Address("nonsense://bucket/docs/")


@pytest.mark.parametrize("uri", ["s3://bucket/docs/", "https://example.com/a.pdf"])
def test_the_server_names_the_command_that_can(owner: Connection, uri: str) -> None:
    with error("22023", "only files can be loaded", f"ml-rag load --store … {uri}"):
        owner.execute("CALL vector_store_load(%s)", (uri,))


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"LastModified": "2026-01-02T03:04:05+01:00"}, "2026-01-02T02:04:05Z"),
        ({"mtime": 0.5, "size": 1}, "1970-01-01T00:00:00Z"),
        ({"updated": "2026-01-02T03:04:05.678Z"}, "2026-01-02T03:04:05Z"),
        ({"last_modified": "Fri, 02 Jan 2026 03:04:05 GMT"}, "2026-01-02T03:04:05Z"),
        ({"created": "yesterday"}, None),
        ({}, None),
    ],
)
def test_times_as_each_file_system_tells_them(info: dict[str, Any], said: str | None) -> None:
    assert remote._changed(info) == said


class Stuck(BaseHTTPRequestHandler):
    """A folder of two documents; no answer to a path with ``stuck``, but for a byte now and then if it ``drips``."""

    protocol_version = "HTTP/1.1"
    stuck = ""
    drips = False
    over: threading.Event
    asked: threading.Event

    def log_message(self, *arguments: Any) -> None:
        pass

    def head(self, kind: str, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def do_HEAD(self) -> None:
        self.head("text/plain", 100_000)

    def do_GET(self) -> None:
        if self.stuck in self.path:
            self.asked.set()
            if self.drips:
                self.head("text/plain", 100_000)
            while not self.over.wait(0.05):
                if self.drips:
                    self.wfile.write(b"x")
            self.close_connection = True
            return
        page = b'<a href="/docs/a.txt">a</a><a href="/docs/b.txt">b</a>'
        self.head("text/html", len(page))
        self.wfile.write(page)


@pytest.mark.parametrize(
    ("stuck", "drips", "jobs"),
    [("docs", False, 1), (".txt", False, 1), (".txt", False, 3), (".txt", True, 1), (".txt", True, 3)],
)
def test_an_interrupt_ends_what_a_server_holds_up(
    db: Database, owner: Connection, server: DocumentsServer, loader: Connection, stuck: str, drips: bool, jobs: int
) -> None:
    over, asked = threading.Event(), threading.Event()
    named = {"stuck": stuck, "drips": drips, "over": over, "asked": asked}
    with ThreadingHTTPServer(("127.0.0.1", 0), type("One", (Stuck,), named)) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        dsn = f"{db.dsn} dbname={db.name} options='-c role={loader_role(db)}'"
        address = f"http://127.0.0.1:{made.server_address[1]}/docs/"
        arguments = ("load", address, "--store", "new", "--dsn", dsn, "--jobs", str(jobs))
        process = subprocess.Popen(
            [sys.executable, "-m", "ml_rag.cli", *arguments],
            env={**os.environ, "PYTHONPATH": "plpy"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            # a program that was started in the background ignores it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            assert asked.wait(20)
            for left in (2, 1, 0):  # a busy machine may miss one
                process.send_signal(signal.SIGINT)
                try:
                    output, _ = process.communicate(timeout=5)
                    break
                except subprocess.TimeoutExpired:
                    if not left:
                        raise
        finally:
            process.kill()
            over.set()
            made.shutdown()
    assert (process.returncode, "Aborted!" in output) == (1, True), output
    assert "Traceback" not in output
    assert owner.execute("SELECT count(*) FROM new").fetchall() == [(0,)]
