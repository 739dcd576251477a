"""Damaged documents of every format, sent to a model server: a document or an error for each, in time and in memory,
and the server goes on."""

from __future__ import annotations

import base64
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ml_rag.ingest.formats import FORMATS
from support import fuzzing
from support.mutate import mutated, seeds
from support.servers import RunningServer, running_server

FULL, SHORT = 5_000, 150
#: documents of a request
BATCH = 25
#: seconds of the clock that the server gives a document
LIMIT_SECONDS = 10.0
#: address space that it gives a parser
CHILD_BYTES = 1 << 30
#: how much the server itself may have grown in the end
GROWTH_BYTES = 96 << 20
CONFIG = f"[server]\ndocument_timeout_seconds = {LIMIT_SECONDS}\ndocument_memory_bytes = {CHILD_BYTES}\n"

#: what is said of a document that was ended by a limit
LIMITS = {
    "the document takes too long to read": "over time",
    "the document needs too much memory": "over memory",
    "the document crashed its parser": "crashed the parser",
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(config=CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(server.socket))
    with httpx.Client(transport=transport, base_url="http://ml_rag", timeout=BATCH * LIMIT_SECONDS + 60) as client:
        yield client


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def kilobytes(value: str) -> int:
    return int(value.split()[0])


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def peak_of_children(pid: int) -> int:
    """Bytes of memory that the largest parser has had at a time."""
    peak = 0
    for child in children(pid):
        try:
            peak = max(peak, 1024 * kilobytes(status(child)["VmHWM"]))
        except (OSError, KeyError):
            continue  # it has ended
    return peak


def send(client: httpx.Client, files: list[tuple[str, bytes]]) -> list[dict[str, Any]]:
    options = json.dumps({"embed_model_id": "fake-embed", "chunking": {"segment_tokens": 64}})
    parts = [("file", (name, content)) for name, content in files]
    reply = client.post("/v1/documents", data={"options": options}, files=parts)
    assert reply.status_code == 200, reply.text[:500]
    return [json.loads(line) for line in reply.text.splitlines()]


def check(line: dict[str, Any], described: str) -> str:
    """One line of the reply; how the document ended."""
    error = line["error"]
    if error is not None:
        assert set(error) == {"message", "type", "code", "detail", "hint"}, described
        assert error["code"] == "document_failed", f"{described}: {error}"
        assert error["message"], described
        assert error["message"][0].islower(), f"{described}: {error}"
        assert "Traceback" not in str(error), f"{described}: {error}"
        assert line["segments"] == []
        return LIMITS.get(error["message"], "refused")
    assert line["format"] in FORMATS, described
    assert line["segments"], described
    count = len(line["segments"])
    assert len(base64.b64decode(line["embeddings"])) == 4 * count * line["dimensions"], described
    for segment in line["segments"]:
        # what goes into the database: text that PostgreSQL can hold, metadata that jsonb can
        text = segment["text"]
        assert text.strip(), described
        assert "\0" not in text + json.dumps(segment["metadata"], ensure_ascii=False), described
        assert text.encode(), described
        assert 1 <= segment["tokens"] <= 64, described
    return "read"


def test_damaged_documents_end_in_a_document_or_its_error(server: RunningServer, client: httpx.Client) -> None:
    originals = seeds()
    names = sorted(originals)
    contents = [originals[name] for name in names]
    pid = server.process.pid
    ended: Counter[str] = Counter()
    formats: set[str] = set()
    slowest = 0.0
    peak = 0

    # each as it is: the formats that are there at all, and the memory of a server that has seen them
    for line in send(client, list(originals.items())):
        if check(line, line["name"]) == "read":
            formats.add(line["format"])
    before = 1024 * kilobytes(status(pid)["VmRSS"])

    with fuzzing.target("documents", full=FULL, short=SHORT) as account:
        number = 0
        running = True
        while running and number < account.wanted:
            batch: list[tuple[str, bytes]] = []
            while len(batch) < BATCH and number < account.wanted and (running := account.next()):
                # a case can be made again from its number alone
                chance = random.Random(f"{fuzzing.SEED} {number}")
                name = names[number % len(names)]
                batch.append((f"{number}-{name}", mutated(originals[name], chance, contents)))
                number += 1
            if not batch:
                break
            began = time.monotonic()
            lines = send(client, batch)
            slowest = max(slowest, time.monotonic() - began)
            # a document of very many segments comes in several lines
            found = [line["name"] for line in lines if not line["more"]]
            assert sorted(found) == sorted(name for name, _ in batch)
            for line in lines:
                ended[check(line, f"FUZZ_SEED={fuzzing.SEED} {line['name']}")] += not line["more"]
            peak = max(peak, peak_of_children(pid))
            assert client.get("/healthz").json()["status"] == "ok"
        grown = 1024 * kilobytes(status(pid)["VmRSS"]) - before
        account.coverage = (
            f"{len(formats)} of {len(FORMATS)} formats; {fuzzing.counted(ended)}; "
            f"parser at most {peak >> 20} MB, server {grown / (1 << 20):+.0f} MB"
        )
        assert server.process.poll() is None
        assert status(pid)["State"][0] not in "ZX"
        assert "unexpected" not in server.log(), server.log()[-3000:]
        assert peak <= CHILD_BYTES
        assert grown <= GROWTH_BYTES
        # it reads an unharmed document afterwards
        assert check(send(client, [("a.txt", b"one two")])[0], "afterwards") == "read"
    assert ended["read"] > account.cases / 10, ended
