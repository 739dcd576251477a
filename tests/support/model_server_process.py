"""A model server in a process of its own, and a client of it; import the fixture by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.servers import RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(tcp=True) as running:
        yield running


def client(path: Path, **options) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server", **options)


def metric(path: Path, line: str) -> float:
    with client(path) as http:
        return next(
            (float(row.split()[-1]) for row in http.get("/metrics").text.splitlines() if row.startswith(line)), 0
        )
