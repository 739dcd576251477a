"""A package index on 127.0.0.1 with one wheel, which it may stop sending in the middle."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def wheel(name: str, version: str, members: Mapping[str, bytes]) -> bytes:
    """A wheel that pip takes."""
    info = f"{name}-{version}.dist-info"
    content = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path, data in content.items():
            archive.writestr(path, data)
    return file.getvalue()


class PackageIndex:
    """``environment`` makes pip look here and nowhere else. ``half``: send half of the wheel, then hang."""

    def __init__(self, name: str, version: str, members: Mapping[str, bytes]) -> None:
        self.half = False
        #: half of the wheel is on its way, no more will come
        self.is_stuck = threading.Event()
        file = f"{name}-{version}-py3-none-any.whl"
        data = wheel(name, version, members)
        page = f'<a href="/{file}#sha256={hashlib.sha256(data).hexdigest()}">{file}</a>'.encode()
        index = self
        end = self._end = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = data if self.path.endswith(".whl") else page
                self.send_response(200)
                self.send_header("Content-Type", "text/html" if body is page else "application/zip")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if body is data and index.half:
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    index.is_stuck.set()
                    end.wait()
                    return
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = {
            "PIP_INDEX_URL": f"{url}/simple",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_RETRIES": "0",
        }

    def close(self) -> None:
        self._end.set()
        self._server.shutdown()
        self._server.server_close()
