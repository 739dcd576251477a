"""The sandbox: bounds on time and memory, crashes, cancellation, reuse. The parser is tests/support/parsers.py."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers

from ml_rag.errors import DocumentError, EngineFailed, InvalidRequest
from ml_rag.ingest import confine, landlock
from ml_rag.ingest.sandbox import DEFAULT_PARSER, Job, Limits, ModelTokenizer, Parsed, Sandbox, _log_refusal
from ml_rag.ingest.split import Chunking
from support import parsers

TESTS = str(Path(__file__).resolve().parents[2])
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


def job(content: bytes | IO[bytes], tokenizer: ModelTokenizer = PLAIN, name: str = "a.txt") -> Job:
    return Job(name, content, tokenizer, Chunking("auto", 256, 0))


def ask(sandbox: Sandbox, content: bytes | IO[bytes], **options: Any) -> Parsed:
    return asyncio.run(sandbox.run(job(content, **options)))


def pid(sandbox: Sandbox) -> int:
    return int(ask(sandbox, b"!facts").segments[0].text.split()[0])


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_document_comes_back_in_segments(make: Make) -> None:
    sandbox = make()
    parsed = asyncio.run(
        sandbox.run(Job("ä.md", b"hello there", PLAIN, Chunking("auto", 64, 0), ["text"], "de", ocr=True))
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


def test_one_child_serves_many_documents_and_is_replaced_in_time(make: Make) -> None:
    sandbox = make(documents_per_worker=3)
    pids = [pid(sandbox) for _ in range(6)]
    assert pids[0] == pids[1] == pids[2] != pids[3] == pids[4] == pids[5]
    assert eventually(lambda: not is_alive(pids[0]))


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


@pytest.fixture
def facts(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What a parser could reach for: a TCP port, a unix socket, a process and files of the same user."""
    for name in ("file", "victim"):
        (tmp_path / name).write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        yield {
            "tcp": tcp.getsockname()[1],
            "unix": str(tmp_path / "s"),
            "server": os.getpid(),
            "file": str(tmp_path / "file"),
        }


def confined(sandbox: Sandbox, facts: dict[str, Any]) -> dict[str, Any]:
    text = ask(sandbox, b"!confined " + json.dumps(facts).encode()).segments
    found: dict[str, Any] = json.loads("".join(segment.text for segment in text))
    return found


#: what a parser may not do to the server's files
FILES = ("read", "listing", "write", "append", "delete")


def test_nothing_is_confined_out_of_the_sandbox(facts: dict[str, Any]) -> None:
    """What the next test sees refused is possible here."""
    found = parsers.confined(facts)
    assert (found["tcp"], found["unix"], found["program"], found["no_new_privs"]) == (None, None, 0, "0")
    assert [found[what] for what in (*FILES, "own folder", "signal", "cat")] == [None] * 7 + [0]


def test_a_parser_has_no_network_no_privilege_and_no_other_process(make: Make, facts: dict[str, Any]) -> None:
    found = confined(make(), facts)
    assert found["tcp"] in ("EPERM", "ENETUNREACH")
    assert found["unix"] == "EPERM"
    assert found["ptrace"] == "EPERM"
    assert found["program"] != 0  # an OCR program has none either
    assert (found["no_new_privs"], found["seccomp"], found["dumpable"]) == ("1", "2", 0)
    assert found["uid"] == os.getuid()
    assert found["oom_score_adj"] == "1000"  # the kernel ends it before the server
    assert found["limits"] == {
        "CORE": [0, 0],
        "FSIZE": [confine.MOST_FILE_BYTES] * 2,
        "NOFILE": [confine.MOST_DESCRIPTORS] * 2,
    }
    # standard streams, the server's socket, and the listing's own
    assert len(found["descriptors"]) == 5


def test_a_parser_has_no_files_but_its_own_and_its_libraries(make: Make, facts: dict[str, Any]) -> None:
    """A hole in a parser must not show the keys of remote models, or a database, which its user may read."""
    try:
        abi = landlock.version()
    except OSError as error:
        pytest.skip(f"this kernel has no Landlock: {error}")
    found = confined(make(), facts)
    assert {what: found[what] for what in FILES} == dict.fromkeys(FILES, "EACCES")
    assert found["cat"] != 0  # neither does a program that it starts
    assert found["own folder"] is None
    assert found["signal"] == ("EPERM" if abi >= 6 else None)
    assert Path(facts["file"]).read_text() == "secret"


@pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not installed")
def test_ocr_has_what_it_needs(make: Make) -> None:
    """A program that gets pages as files, and data from wherever it was installed."""
    sandbox = make(parser=DEFAULT_PARSER)
    out = io.BytesIO()
    image = Image.new("L", (1200, 300), 255)
    ImageDraw.Draw(image).text((60, 60), "Grebes dive", fill=0, font_size=96)
    image.save(out, "PNG")
    parsed = asyncio.run(
        sandbox.run(Job("a.png", out.getvalue(), PLAIN, Chunking("auto", 64, 0), None, "en", ocr=True))
    )
    assert [segment.text for segment in parsed.segments] == ["Grebes dive"]


def test_the_folder_of_a_child_goes_with_it(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = make()
    ask(sandbox, b"text")
    assert len(list(tmp_path.iterdir())) == 1
    fails(sandbox, b"!abort")
    assert len(list(tmp_path.iterdir())) == 1  # of the next one
    sandbox.close()
    assert list(tmp_path.iterdir()) == []


def test_a_parser_sees_no_network_device_where_the_kernel_lets_it(make: Make, facts: dict[str, Any]) -> None:
    if subprocess.run(["unshare", "-Urn", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this kernel gives no network namespace to this user")
    assert confined(make(), facts)["devices"] == ["lo"]


def test_a_file_beyond_the_bound_is_not_written(make: Make) -> None:
    sandbox = make()
    assert ask(sandbox, b"!write 1000000").segments
    assert "File too large" in str(fails(sandbox, b"!write %d" % (confine.MOST_FILE_BYTES + 1)).detail)


def test_what_the_kernel_refuses_is_logged_once_and_parsing_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    # a user namespace needs one thread; this sitecustomize starts another before the worker's main
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    sandbox = make(documents_per_worker=1)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{tmp_path}")
    _log_refusal.cache_clear()
    with caplog.at_level("WARNING", "ml_rag.server"):
        for _ in range(3):
            assert ask(sandbox, b"text").segments
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "document parsers run without a network namespace of their own"
    ]


def fails(sandbox: Sandbox, content: bytes) -> DocumentError:
    with pytest.raises(DocumentError) as caught:
        ask(sandbox, content)
    # the next document has a child, the same or another
    assert ask(sandbox, b"next document").segments[0].text == "next document"
    return caught.value


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
    for _ in range(5):  # 3 s in all
        assert ask(sandbox, b"!burn 0.6").segments
    assert pid(sandbox) == child


def test_waiting_ends_at_the_clock(make: Make) -> None:
    began = time.monotonic()
    error = fails(make(wall_seconds=3.0), b"!sleep 60")
    assert 2.9 < time.monotonic() - began < 20
    assert error.message == "the document takes too long to read"


def test_memory_is_bounded_and_the_child_replaced(make: Make) -> None:
    sandbox = make(memory_bytes=512 * 1024**2)
    before = pid(sandbox)
    error = fails(sandbox, b"!memory")
    assert error.message == "the document needs too much memory"
    assert str(512 * 1024**2) in str(error.detail)
    assert pid(sandbox) != before


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
    with pytest.raises(InvalidRequest, match="unknown document format"):
        ask(sandbox, b"!request")
    assert pid(sandbox) == child


def test_what_a_parser_prints_does_no_harm(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(make(), b"!print hello").segments[0].text == "!print hello"
    assert capfd.readouterr() == ("", "")


def test_cancelling_kills_the_child_and_its_children(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = make()
    child = pid(sandbox)

    async def main() -> tuple[float, int]:
        task = asyncio.create_task(sandbox.run(job(b"!child pid")))
        while not (notes := [note.read_text() for note in tmp_path.glob("*/pid")]) or not notes[0]:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return began, int(notes[0])

    began, grandchild = asyncio.run(main())
    assert eventually(lambda: not is_alive(child) and not is_alive(grandchild), 5)
    assert time.monotonic() - began < 5
    assert ask(sandbox, b"next").segments[0].text == "next"


def test_a_document_that_waits_can_be_cancelled(make: Make) -> None:
    sandbox = make()

    async def main() -> None:
        running = asyncio.create_task(sandbox.run(job(b"!sleep 30")))
        waiting = asyncio.create_task(sandbox.run(job(b"text")))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 10


def test_a_slow_document_does_not_hold_up_another(make: Make) -> None:
    sandbox = make(workers=2)

    async def main() -> None:
        slow = asyncio.create_task(sandbox.run(job(b"!sleep 30")))
        await sandbox.run(job(b"quick"))
        assert not slow.done()
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 20


def test_a_child_that_died_while_idle_is_replaced(make: Make) -> None:
    sandbox = make()
    first = pid(sandbox)
    os.kill(first, 9)
    assert eventually(lambda: not is_alive(first))
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
    assert eventually(lambda: not is_alive(idle))


def test_a_sandbox_that_nobody_closed_ends_with_its_last_reference(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(workers=1, parser=PARSER)
    child = pid(sandbox)
    del sandbox
    gc.collect()
    assert eventually(lambda: not is_alive(child))


def test_a_parser_that_cannot_be_imported_is_no_documents_fault(make: Make) -> None:
    with pytest.raises(EngineFailed, match="cannot be started"):
        ask(make(parser="support.parsers:nothing"), b"text")
