"""Things that nobody may touch, and that tell when somebody does: an address, a socket, files with a word in them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: the content of the files; where it shows, somebody has read one
WORD = "canary-7Qx2"

_libc = ctypes.CDLL(None, use_errno=True)
_IN_OPEN, _IN_CREATE, _IN_MOVED_TO, _IN_DELETE = 0x20, 0x100, 0x80, 0x200


class Canaries:
    """``url``: of a server that counts; ``folder``: holds secret.txt, a.pdf and a pipe; ``socket``: of a listener."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "canary"
        self.folder.mkdir()
        self.folder.chmod(0o755)
        for name in ("secret.txt", "secret.md", "a.dtd"):
            (self.folder / name).write_text(f"{WORD}\n")
            (self.folder / name).chmod(0o644)
        self.secret = self.folder / "secret.txt"
        self.socket = place / "canary.sock"
        self._listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self._listeners[1].bind(str(self.socket))
        self._listeners[1].listen()
        self.socket.chmod(0o666)
        self.port = self._listeners[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/x"
        #: first bytes of what came, by connection
        self.heard: list[bytes] = []
        for listener in self._listeners:
            threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
        self._watch = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        events = _IN_OPEN | _IN_CREATE | _IN_MOVED_TO | _IN_DELETE
        assert _libc.inotify_add_watch(self._watch, bytes(self.folder), events) >= 0

    def _listen(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.settimeout(1)
                    with contextlib.suppress(OSError):
                        self.heard.append(client.recv(1000))
                        # whoever asks for a document gets one with the word in it
                        body = f"<p>{WORD}</p>".encode()
                        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    def touched(self) -> list[str]:
        """What has happened since the last call."""
        found = [f"connection: {data!r}" for data in self.heard]
        self.heard.clear()
        while select.select([self._watch], [], [], 0)[0]:
            data = os.read(self._watch, 65536)
            at = 0
            while at < len(data):
                _, mask, _, length = struct.unpack_from("iIII", data, at)
                name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
                found.append(f"file: {name or 'the folder'} ({mask & 0xFFF:#x})")
                at += 16 + length
        return found

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        os.close(self._watch)

    def baits(self) -> list[Any]:
        """Values that name one of them, in the forms that programs follow."""
        path = str(self.secret)
        up = "../" * 12 + path.lstrip("/")
        return [
            self.url,
            self.url.replace("http", "https"),
            f"//127.0.0.1:{self.port}/x",
            f"127.0.0.1:{self.port}",
            f"unix:{self.socket}",
            path,
            str(self.folder) + "/",
            f"file://{path}",
            f"file://localhost{path}",
            up,
            f"{path}\0.txt",
            f"|cat {path}",
            f"`cat {path}` $(cat {path})",
            f"'; COPY x FROM '{path}'; --",
            f"pg_read_file('{path}')",
            {"$ref": self.url},
            {"$ref": f"file://{path}"},
            {"base_url": self.url, "path": path},
            [self.url, path],
        ]


@pytest.fixture
def canaries() -> Iterator[Canaries]:
    with tempfile.TemporaryDirectory(prefix="ml_rag_canary_") as place:
        Path(place).chmod(0o755)
        made = Canaries(Path(place))
        try:
            yield made
        finally:
            made.close()
