"""What a parser's process has given up: network, other processes, files. The parser is tests/support/parsers.py."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from ml_rag.ingest import confine, landlock
from ml_rag.ingest.sandbox import DEFAULT_PARSER, Job, Sandbox, log_missing
from ml_rag.ingest.split import Chunking
from support import parsers
from support.sandboxing import PLAIN, TESTS, Make, ask, find_missing


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
#: what it may not do to them without opening them, which Landlock does not look at
TAMPERING = ("chmod", "fchmodat", "fchmodat2", "chmod of an open file", "chown", "lchown", "times", "length")
ATTRIBUTES = ("attribute", "no attribute", "flags")


def state(path: str) -> tuple[object, ...]:
    found = os.stat(path)
    return found.st_mode, found.st_uid, found.st_mtime_ns, found.st_ctime_ns, Path(path).read_text()


def test_nothing_is_confined_out_of_the_sandbox(facts: dict[str, Any]) -> None:
    """What the next test sees refused is possible here."""
    found = parsers.confined(facts)
    assert (found["tcp"], found["unix"], found["datagram"]) == (None, None, None)
    assert (found["program"], found["no_new_privs"]) == (0, "0")
    assert [found[what] for what in (*FILES, "watch", "temporary file", "signal", "cat")] == [None] * 8 + [0]
    assert {found[what] for what in TAMPERING} <= {None, "ENOSYS"}  # fchmodat2 is of Linux 6.6
    assert {found[what] for what in ATTRIBUTES} <= {None, "ENOTSUP", "EOPNOTSUPP", "ENOTTY"}  # by the file system
    others = ("limits of another", "priority of another", "shared memory", "files in memory")
    assert [found[what] for what in (*others, "/bin/chmod")] == [None] * 4 + [0]


def test_a_parser_has_no_network_no_privilege_and_no_other_process(make: Make, facts: dict[str, Any]) -> None:
    found = confined(make(), facts)
    assert found["tcp"] in ("EPERM", "ENETUNREACH")
    assert found["unix"] == "EPERM"
    assert found["datagram"] == "EPERM"
    assert found["ptrace"] == "EPERM"
    assert found["descriptor of another"] == "EPERM"
    assert found["sibling"] != 0  # the server would have a child that it does not wait for
    assert found["program"] != 0  # an OCR program has none either
    assert (found["no_new_privs"], found["seccomp"], found["dumpable"]) == ("1", "2", 0)
    assert found["uid"] == os.getuid()
    assert found["oom_score_adj"] == "1000"  # the kernel ends it before the server
    assert found["limits"] == {
        "CORE": [0, 0],
        "FSIZE": [0, 0],
        "NOFILE": [confine.MOST_DESCRIPTORS] * 2,
    }
    # standard streams, the server's socket, and the listing's own
    assert len(found["descriptors"]) == 5


def test_a_parser_has_no_capability_and_gets_none(make: Make, facts: dict[str, Any]) -> None:
    """Its user namespace came with all of them, and another one would."""
    found = confined(make(), facts)
    held = found["capabilities"]
    if "network namespace" not in (find_missing() or ()):
        # it had a user namespace of its own, and so the right to drop what root could give
        assert held["CapBnd"] == 0
    assert {value for name, value in held.items() if name != "CapBnd"} == {0}
    assert found["namespace"] != 0
    assert found["namespace by clone"] != 0


def test_a_parser_cannot_tamper_with_files_or_processes_of_its_user(make: Make, facts: dict[str, Any]) -> None:
    """By their names, without opening them."""
    before = state(facts["file"])
    found = confined(make(), facts)
    assert {found[what] for what in (*TAMPERING, *ATTRIBUTES)} == {"EPERM"}
    assert found["attribute, a newer call"] == "ENOSYS"
    assert found["/bin/chmod"] != 0
    assert state(facts["file"]) == before
    for what in ("limits of another", "priority of another", "shared memory", "files in memory"):
        assert found[what] == "EPERM"


def test_a_parser_has_no_files_but_its_libraries(make: Make, facts: dict[str, Any]) -> None:
    """A hole in a parser must not show the keys of remote models, or a database, which its user may read."""
    try:
        abi = landlock.version()
    except OSError as error:
        pytest.skip(f"this kernel has no Landlock: {error}")
    found = confined(make(), facts)
    assert {what: found[what] for what in FILES} == dict.fromkeys(FILES, "EACCES")
    assert found["watch"] == "EPERM"  # which tells names of files
    assert found["cat"] != 0  # neither does a program that it starts
    assert found["temporary file"] == "ENOENT"  # there is no folder that takes one
    assert found["signal"] == ("EPERM" if abi >= 6 else None)
    assert Path(facts["file"]).read_text() == "secret"


@pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not installed")
def test_ocr_has_what_it_needs(make: Make) -> None:
    """A program, and its data from wherever it was installed."""
    sandbox = make(parser=DEFAULT_PARSER)
    out = io.BytesIO()
    image = Image.new("L", (1200, 300), 255)
    ImageDraw.Draw(image).text((60, 60), "Grebes dive", fill=0, font_size=96)
    image.save(out, "PNG")
    parsed = asyncio.run(
        sandbox.run(Job("a.png", out.getvalue(), PLAIN, Chunking("auto", 64, 0), 16, None, "en", ocr=True))
    )
    assert [segment.text for segment in parsed.segments] == ["Grebes dive"]


def test_a_parser_sees_no_network_device_where_the_kernel_lets_it(make: Make, facts: dict[str, Any]) -> None:
    if subprocess.run(["unshare", "-Urn", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this kernel gives no network namespace to this user")
    assert confined(make(), facts)["devices"] == ["lo"]


@pytest.mark.skipif(os.getuid() == 0, reason="the kernel does not bound the processes of root")
def test_the_processes_of_a_parser_are_bounded(make: Make) -> None:
    if "network namespace" in (find_missing() or ()) or landlock.version() < landlock.ABI_SINCE_5_19:
        pytest.skip("this kernel counts them with all others of the user")
    sandbox = make()
    assert 16 <= int(ask(sandbox, b"!processes 300").segments[0].text) < confine.MOST_PROCESSES
    assert ask(sandbox, b"next").segments[0].text == "next"


#: run before the worker: a user namespace needs one thread; other machines and older kernels
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
OTHER_MACHINE = "import platform; platform.machine = lambda: 'riscv64'"
OLD_LANDLOCK = "import ml_rag.ingest.landlock as l; l.version = lambda: 2"
NO_LANDLOCK = """
import errno, os, ml_rag.ingest.landlock as landlock
def version():
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
landlock.version = version
"""


@pytest.mark.parametrize(
    ("before", "missing"),
    [
        (THREAD, {"network namespace"}),
        (OTHER_MACHINE, {"system call filter"}),
        (OLD_LANDLOCK, {"bound on signals"}),
        (NO_LANDLOCK, {"view of the file system", "bound on signals"}),
    ],
    ids=["threads", "another machine", "an old Landlock", "no Landlock"],
)
def test_what_the_kernel_refuses_is_logged_once_and_parsing_goes_on(
    make: Make,
    facts: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    before: str,
    missing: set[str],
) -> None:
    usual = set(find_missing() or ())
    folder = tmp_path / "before"  # of its own: a parser may read where its code comes from
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(before)
    sandbox = make(documents_per_worker=1)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{folder}")
    log_missing.cache_clear()
    with caplog.at_level("WARNING", "ml_rag.server"):
        for _ in range(2):
            assert ask(sandbox, b"text").segments
        found = confined(sandbox, facts)
    told = [record.getMessage() for record in caplog.records]
    assert {line.removeprefix("document parsers run without a ").partition(":")[0] for line in told} == usual | missing
    assert len(told) == len(usual | missing)
    assert find_missing() is not None
    assert set(find_missing() or ()) == usual | missing
    if before in (OLD_LANDLOCK, NO_LANDLOCK):
        assert {found[what] for what in TAMPERING} == {"EPERM"}
    if before == OLD_LANDLOCK and "view of the file system" not in usual:
        assert {what: found[what] for what in FILES} == dict.fromkeys(FILES, "EACCES")
    if before == NO_LANDLOCK:
        assert found["read"] is None  # as docs/security.md says of such a kernel


def test_whether_parsers_are_confined_is_unknown_where_no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert find_missing() is None
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert find_missing() is None
