"""The sandbox: bounds on time and memory, crashes, cancellation, reuse. The parser is tests/support/parsers.py."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import signal
import tempfile
import time
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ml_rag.errors import DocumentError, EngineFailed
from ml_rag.ingest import sandbox
from ml_rag.ingest.formats.pictures import MAX_BYTES, MAX_PICTURES
from ml_rag.ingest.sandbox import Job, ModelTokenizer
from ml_rag.ingest.split import Chunking
from support.processes import wait_until
from support.sandboxing import PLAIN, Make, ask, fails, is_alive, job, pid


def test_a_document_comes_back_in_segments(make: Make) -> None:
    sandbox = make()
    parsed = asyncio.run(
        sandbox.run(Job("ä.md", b"hello there", PLAIN, Chunking("auto", 64, 0), 16, ["text"], "de", ocr=True))
    )
    assert parsed.format == "orders"
    assert parsed.metadata == {"name": "ä.md", "formats": ["text"], "language": "de", "ocr": True}
    assert [(segment.text, segment.tokens) for segment in parsed.segments] == [("hello there", 2)]


@pytest.mark.parametrize("kind", ["bytes", "memory", "spooled", "rolled", "file", "empty"])
def test_content_of_each_kind(make: Make, kind: str, tmp_path: Path) -> None:
    sandbox = make()
    text = b"" if kind == "empty" else b"words " * (2000 if kind == "rolled" else 3)
    if kind in ("bytes", "empty"):
        parsed = ask(sandbox, text)
    elif kind == "memory":
        parsed = ask(sandbox, io.BytesIO(text))
    elif kind == "file":
        (tmp_path / "file").write_bytes(text)
        with (tmp_path / "file").open("rb") as file:
            file.seek(5)  # read from its beginning all the same
            parsed = ask(sandbox, file)
    else:
        with tempfile.SpooledTemporaryFile(max_size=1000) as file:
            file.write(text)
            parsed = ask(sandbox, file)  # type: ignore[arg-type]
            assert file._rolled == (kind == "rolled")  # type: ignore[attr-defined]
    assert sum(segment.tokens for segment in parsed.segments) == len(text) // 6


def test_the_models_own_tokenizer_counts_and_each_model_has_its_own(make: Make) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("e", "isolated")
    sandbox = make()
    other = ModelTokenizer("other", tokenizer.to_str())
    assert ask(sandbox, b"here there", tokenizer=other).segments[0].tokens == 8
    assert ask(sandbox, b"here there").segments[0].tokens == 2
    assert ask(sandbox, b"here there", tokenizer=other).segments[0].tokens == 8


def test_a_bad_tokenizer_is_the_models_fault(make: Make) -> None:
    with pytest.raises(EngineFailed, match="tokenizer"):
        ask(make(), b"text", tokenizer=ModelTokenizer("bad", "{}"))


def test_a_document_that_a_child_keeps_open_is_empty_afterwards() -> None:
    with contextlib.ExitStack() as stack:
        kept = os.dup(sandbox._descriptor(b"text", stack))
    assert os.fstat(kept).st_size == 0
    os.close(kept)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_child_can_only_read_the_document(is_large: bool) -> None:
    with contextlib.ExitStack() as stack, tempfile.SpooledTemporaryFile(max_size=1) as file:
        file.write(b"text")
        descriptor = sandbox._descriptor(file if is_large else b"text", stack)
        assert os.read(descriptor, 9) == b"text"
        for change in (lambda: os.write(descriptor, b"a"), lambda: os.posix_fallocate(descriptor, 0, 1_000_000)):
            with pytest.raises(OSError, match="Bad file descriptor"):
                change()


def test_one_child_serves_many_documents_and_is_replaced_in_time(make: Make) -> None:
    sandbox = make(documents_per_worker=3)
    pids = [pid(sandbox) for _ in range(6)]
    assert pids[0] == pids[1] == pids[2] != pids[3] == pids[4] == pids[5]
    wait_until(lambda: not is_alive(pids[0]))


def test_a_child_reads_documents_of_one_role(make: Make) -> None:
    sandbox = make()
    pids = {role: pid(sandbox, role=role) for role in ("alice", None, "bob")}
    assert len(set(pids.values())) == 3
    # each has taken the place of the one before
    assert pid(sandbox, role="bob") == pids["bob"]
    wait_until(lambda: not is_alive(pids["alice"]) and not is_alive(pids[None]))


def test_roles_that_take_turns_keep_their_children(make: Make) -> None:
    sandbox = make(workers=2)

    async def together(*roles: str) -> list[str]:
        orders = [replace(job(b"!facts"), role=role) for role in roles]
        found = await asyncio.gather(*map(sandbox.run, orders))
        return [parsed.segments[0].text.split()[0] for parsed in found]

    first = asyncio.run(together("alice", "bob"))
    assert [str(pid(sandbox, role=role)) for role in ("alice", "bob", "alice")] == [*first, first[0]]


def test_a_warm_child_answers_in_milliseconds(make: Make) -> None:
    sandbox = make()
    ask(sandbox, b"warm")

    def timed() -> float:
        began = time.perf_counter()
        ask(sandbox, b"a few words")
        return time.perf_counter() - began

    assert min(timed() for _ in range(20)) < 0.05


def test_the_child_has_no_model_library_and_no_secret(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "sk-1234")
    _, secret, *modules = ask(make(), b"!facts").segments[0].text.split()
    assert secret == "None"
    assert not {"torch", "onnxruntime", "transformers", "llama_cpp", "fastapi"} & set(modules)


def test_a_loop_ends_at_its_processor_time(make: Make) -> None:
    sandbox = make(cpu_seconds=1.0, wall_seconds=30.0)
    began = time.monotonic()
    error = fails(sandbox, b"!loop")
    assert time.monotonic() - began < 25
    assert error.message == "the document takes too long to read"
    assert "1 s of processor time" in str(error.detail)


def test_processor_time_is_counted_for_each_document_anew(make: Make) -> None:
    sandbox = make(cpu_seconds=1.0)
    child = pid(sandbox)
    for _ in range(3):  # 1.8 s in all
        assert ask(sandbox, b"!burn 0.6").segments
    assert pid(sandbox) == child


def test_waiting_ends_at_the_clock(make: Make) -> None:
    began = time.monotonic()
    error = fails(make(wall_seconds=3.0), b"!sleep 60")
    assert 2.9 < time.monotonic() - began < 20
    assert error.message == "the document takes too long to read"


def test_a_child_that_answers_in_drips_ends_at_the_clock(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WORKER", "support.drips")
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="cannot be started"):
        ask(make(wall_seconds=1.0), b"text")
    assert time.monotonic() - began < 20


def test_a_child_that_begins_with_nonsense_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    end = sandbox._Child.end
    monkeypatch.setattr(sandbox._Child, "end", lambda *given: ended.append(end(*given)) or ended[-1])
    monkeypatch.setattr(sandbox, "WORKER", "support.nonsense")
    with pytest.raises(EngineFailed, match="cannot be started"):
        ask(make(), b"text")
    assert ended == [-signal.SIGKILL]


@pytest.mark.parametrize(
    "said",
    [
        "nonsense",
        "[]",
        "{}",
        '{"pictures": [1]}',
        '{"format": 1, "metadata": {}, "segments": [{}]}',
        '{"format": "", "metadata": 1, "segments": []}',
        '{"format": "", "metadata": [[1, 2]], "segments": []}',
        '{"format": ["x"], "metadata": {}, "segments": []}',
        '{"format": "", "metadata": {"a": ' + "[" * 500 + "]" * 500 + '}, "segments": []}',
        '{"format": "", "metadata": {}, "segments": [{"text": ["a"], "tokens": 1}]}',
        '{"format": "", "metadata": {}, "segments": [{"text": " ", "tokens": 1}]}',
        '{"format": "", "metadata": {}, "segments": [{"text": "a", "tokens": "' + "9" * 99 + '"}]}',
        '{"format": "", "metadata": {}, "segments": [{"text": "a", "tokens": 1, "metadata": [1]}]}',
        '{"pictures": [[[1], "YQ=="]], "left_out": {}}',
        '{"pictures": [[0, "a"]], "left_out": {}}',
        '{"pictures": [], "left_out": {"too large": "1"}}',
        '{"pictures": [], "left_out": [["too large", 1]]}',
    ],
)
def test_a_parser_that_answers_nonsense_costs_one_document(make: Make, said: str) -> None:
    sandbox = make()
    before = pid(sandbox)
    fails(sandbox, b"!say " + said.encode())
    assert not is_alive(before)
    assert ask(sandbox, b"text").segments


SEGMENT = {"text": "a", "tokens": 1}


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        ({"metadata": {}, "segments": [SEGMENT] * 5}, "no document"),
        ({"metadata": {"a": [[]] * 1000}, "segments": [SEGMENT]}, "its JSON has more than 1000 values"),
        ({"metadata": {"a": "b" * 493}, "segments": [SEGMENT]}, "metadata of 501 bytes, limit 500"),
        (
            {"metadata": {}, "segments": [SEGMENT, {**SEGMENT, "metadata": {"a": "b" * 493}}]},
            "metadata of 501 bytes, limit 500",
        ),
        ({"format": "b" * 499, "metadata": {}, "segments": [SEGMENT]}, "metadata of 501 bytes, limit 500"),
        ({"pictures": [], "left_out": {"b" * 495: 1}}, "metadata of 501 bytes, limit 500"),
        (
            {"metadata": {}, "segments": [SEGMENT, {**SEGMENT, "text": "b" * 1600, "context": "c" * 401}]},
            "a segment of 2001 characters, limit 2000",
        ),
        ({"metadata": {}, "segments": [{**SEGMENT, "text": " \0 "}]}, "no document"),
    ],
)
def test_a_parser_that_answers_with_too_much_costs_one_document(make: Make, said: dict[str, Any], detail: str) -> None:
    sandbox = make(segments=4, values=1000, metadata_bytes=500, segment_characters=2000)
    before = pid(sandbox)
    error = fails(sandbox, b"!say " + json.dumps({"format": "", **said}).encode())
    assert (error.message, error.detail) == ("the document's parser sent an unexpected reply", detail)
    assert not is_alive(before)
    assert ask(sandbox, b"text").segments


@pytest.mark.parametrize(("count", "size"), [(MAX_PICTURES, 10), (2, MAX_BYTES // 2)])
def test_a_parser_sends_as_many_pictures_as_a_document_may_have(make: Make, count: int, size: int) -> None:
    """The endpoint that describes them may cost money, and a document can take over its parser."""

    def order(count: int) -> bytes:
        said = {"pictures": [[number, b64encode(bytes(size)).decode()] for number in range(count)], "left_out": {}}
        return b"!say " + json.dumps(said).encode()

    assert len(ask(make(), order(count)).pictures) == count
    assert fails(make(), order(count + 1)).message == "the document's parser sent an unexpected reply"


def test_metadata_of_as_many_bytes_as_there_may_be(make: Make) -> None:
    metadata = {"a": "b" * 492}
    said = {"format": "b" * 498, "metadata": metadata, "segments": [{**SEGMENT, "metadata": metadata}]}
    parsed = ask(make(metadata_bytes=500), b"!say " + json.dumps(said).encode())
    assert parsed.metadata == parsed.segments[0].metadata == metadata


def test_a_segment_of_as_many_characters_as_there_may_be_and_a_page_of_more(make: Make) -> None:
    for size, how in ((2000, Chunking("auto", 256, 0)), (2001, Chunking("none", 256, 0))):
        said = {"format": "", "metadata": {}, "segments": [{**SEGMENT, "text": "b" * size}]}
        order = replace(job(b"!say " + json.dumps(said).encode()), chunking=how)
        parsed = asyncio.run(make(segment_characters=2000).run(order))
        assert len(parsed.segments[0].text) == size


def test_an_answer_is_parsed_without_looking_for_garbage(make: Make) -> None:
    """All threads wait for that."""
    order = b"!say " + json.dumps({"format": "", "metadata": {"a": [[]] * 500_000}, "segments": []}).encode()
    sandbox = make()
    before = gc.get_stats()[0]["collections"]
    fails(sandbox, order)
    assert gc.get_stats()[0]["collections"] - before < 100
    assert gc.isenabled()


def test_memory_is_bounded_and_the_child_replaced(make: Make) -> None:
    sandbox = make(memory_bytes=512 * 1024**2)
    before = pid(sandbox)
    error = fails(sandbox, b"!memory")
    assert error.message == "the document needs too much memory"
    assert str(512 * 1024**2) in str(error.detail)
    assert pid(sandbox) != before


def test_what_comes_back_is_bounded(make: Make) -> None:
    sandbox = make(reply_bytes=10_000)
    child = pid(sandbox)
    assert len(ask(sandbox, b"word " * 1000).segments) > 1
    error = fails(sandbox, b"word " * 3000)
    assert error.message == "the document has too much text"
    assert "10000" in str(error.detail)
    assert pid(sandbox) == child


@pytest.mark.parametrize("limits", [{"segments": 4}, {"embedding_bytes": 4 * 16 * 4 + 63}])
def test_segments_and_the_bytes_of_their_embeddings_are_bounded(make: Make, limits: dict[str, int]) -> None:
    sandbox = make(**limits)
    child = pid(sandbox)
    assert len(ask(sandbox, b"word " * 1024).segments) == 4
    error = fails(sandbox, b"word " * 1025)
    assert error.message == "the document has too many segments"
    assert "may have 4 " in str(error.detail)
    assert pid(sandbox) == child


@pytest.mark.parametrize(
    ("order", "cause"),
    [(b"!exit 7", "exit status 7"), (b"!exit 0", "exit status 0"), (b"!abort", "SIGABRT"), (b"!segfault", "SIGSEGV")],
)
def test_a_crash_costs_one_document(make: Make, order: bytes, cause: str) -> None:
    error = fails(make(), order)
    assert error.message == "the document crashed its parser"
    assert cause in str(error.detail)


def test_a_parser_that_somebody_kills_is_said_to_be(make: Make) -> None:
    error = fails(make(), b"!kill")
    assert error.message == "the document's parser was killed"
    assert "SIGKILL" in str(error.detail)


def test_errors_travel(make: Make) -> None:
    sandbox = make()
    child = pid(sandbox)
    refused = fails(sandbox, b"!refuse it says no")
    assert (refused.message, refused.detail, refused.hint) == (
        "the document is no good",
        "it says no",
        "Write another.",
    )
    assert fails(sandbox, b"!raise odd").detail == "ValueError: odd"
    assert pid(sandbox) == child


@pytest.mark.parametrize("code", ["invalid_request", "disk_full", "queue_full", "engine_failed", "no code"])
def test_what_a_parser_reports_is_the_error_of_its_document(make: Make, code: str) -> None:
    """Other errors end a load, or a whole request."""
    said = {"message": "m" * 5000, "detail": "d" * 5000, "hint": ["h"], "code": code}
    error = fails(make(wall_seconds=3.0), b"!say " + json.dumps({"error": said, "spent": True}).encode())
    assert (error.message, error.detail, error.hint) == ("m" * 2000, "d" * 2000, None)


def test_what_a_parser_prints_does_no_harm(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(make(), b"!print hello").segments[0].text == "!print hello"
    assert capfd.readouterr() == ("", "")


def test_cancelling_kills_the_child_and_its_children(make: Make) -> None:
    sandbox = make()
    child = pid(sandbox)
    started = Path(f"/proc/{child}/task/{child}/children")

    async def main() -> tuple[float, int]:
        task = asyncio.create_task(sandbox.run(job(b"!child")))
        while not (found := started.read_text().split()):
            await asyncio.sleep(0.01)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return began, int(found[0])

    began, grandchild = asyncio.run(main())
    wait_until(lambda: not is_alive(child) and not is_alive(grandchild), 5)
    assert time.monotonic() - began < 5
    assert ask(sandbox, b"next").segments[0].text == "next"


def test_what_a_parser_has_started_goes_with_it(make: Make) -> None:
    """Also where the parser itself ends when it is asked to, or has ended before."""
    sandbox = make()
    left = int(ask(sandbox, b"!leave").segments[0].text)
    assert is_alive(left)
    ask(sandbox, b"text", role="another")
    wait_until(lambda: not is_alive(left))
    left = int(ask(sandbox, b"!leave").segments[0].text)
    os.kill(child := pid(sandbox), signal.SIGKILL)
    wait_until(lambda: not is_alive(child))
    assert is_alive(left)
    ask(sandbox, b"text")
    wait_until(lambda: not is_alive(left))
    left = int(ask(sandbox, b"!leave").segments[0].text)
    sandbox.close()
    wait_until(lambda: not is_alive(left))


async def test_a_document_that_waits_can_be_cancelled(make: Make) -> None:
    sandbox = make()
    began = time.monotonic()
    running = asyncio.create_task(sandbox.run(job(b"!sleep 30")))
    waiting = asyncio.create_task(sandbox.run(job(b"text")))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - began < 10


async def test_a_slow_document_does_not_hold_up_another(make: Make) -> None:
    sandbox = make(workers=2)
    began = time.monotonic()
    slow = asyncio.create_task(sandbox.run(job(b"!sleep 30")))
    await sandbox.run(job(b"quick"))
    assert not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert time.monotonic() - began < 20


def test_a_child_that_died_while_idle_is_replaced(make: Make) -> None:
    sandbox = make()
    first = pid(sandbox)
    os.kill(first, 9)
    wait_until(lambda: not is_alive(first))
    assert pid(sandbox) != first


def test_closing_ends_the_children_at_work_too(make: Make) -> None:
    sandbox = make(workers=2)
    idle = pid(sandbox)

    async def main() -> None:
        task = asyncio.create_task(sandbox.run(job(b"!sleep 60")))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(sandbox.close)
        with pytest.raises(DocumentError, match="cancelled"):
            await task

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 10
    wait_until(lambda: not is_alive(idle))


def test_a_parser_that_cannot_be_imported_is_no_documents_fault(make: Make) -> None:
    with pytest.raises(EngineFailed, match="cannot be started"):
        ask(make(parser="support.parsers:nothing"), b"text")
