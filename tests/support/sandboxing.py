"""A sandbox with the parser of tests/support/parsers.py; import the fixture by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from ml_rag.errors import DocumentError
from ml_rag.ingest.sandbox import Job, Limits, ModelTokenizer, Parsed, Sandbox
from ml_rag.ingest.split import Chunking

TESTS = str(Path(__file__).resolve().parents[1])
PLAIN = ModelTokenizer("plain", None)
PARSER = "support.parsers:parse"

Make = Callable[..., Sandbox]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("PYTHONPATH", TESTS)
    made: list[Sandbox] = []

    def make(*, workers: int = 1, parser: str = PARSER, **limits: Any) -> Sandbox:
        bounds = {"cpu_seconds": 20.0, "wall_seconds": 40.0, **limits}
        made.append(Sandbox(Limits(**bounds), workers=workers, parser=parser))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.close()


def job(content: bytes | IO[bytes], tokenizer: ModelTokenizer = PLAIN, name: str = "a.txt", role: object = None) -> Job:
    return Job(name, content, tokenizer, Chunking("auto", 256, 0), 16, role=role)


def ask(sandbox: Sandbox, content: bytes | IO[bytes], **options: Any) -> Parsed:
    return asyncio.run(sandbox.run(job(content, **options)))


def pid(sandbox: Sandbox, **options: Any) -> int:
    return int(ask(sandbox, b"!facts", **options).segments[0].text.split()[0])


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def find_missing() -> dict[str, str] | None:
    """What the kernel refuses to a parser here."""
    sandbox = Sandbox()
    try:
        return asyncio.run(sandbox.find_missing())
    finally:
        sandbox.close()


def fails(sandbox: Sandbox, content: bytes) -> DocumentError:
    with pytest.raises(DocumentError) as caught:
        ask(sandbox, content)
    # the next document has a child, the same or another
    assert ask(sandbox, b"next document").segments[0].text == "next document"
    return caught.value
