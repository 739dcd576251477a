"""Parsers for the sandbox's tests: the content is an order, carried out in the child process."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_rag.abc import Block, Document
from ml_rag.errors import DocumentError, InvalidRequest


def parse(name: str, content: bytes, **options: Any) -> Document:
    """``text …`` is a document; ``!word argument`` is something a hostile document would make a parser do."""
    order, _, argument = content.decode().partition(" ")
    if order == "!loop":
        while True:
            pass
    elif order == "!burn":
        end = time.process_time() + float(argument)
        while time.process_time() < end:
            pass
    elif order == "!sleep":
        time.sleep(float(argument))
    elif order == "!memory":
        hoard = []
        while True:
            hoard.append(bytearray(16 * 1024 * 1024))
    elif order == "!exit":
        os._exit(int(argument))
    elif order == "!abort":
        os.kill(os.getpid(), signal.SIGABRT)
    elif order == "!kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif order == "!segfault":
        ctypes.string_at(0)
    elif order == "!raise":
        raise ValueError(argument)
    elif order == "!refuse":
        raise DocumentError("the document is no good", detail=argument, hint="Write another.")
    elif order == "!request":
        raise InvalidRequest("unknown document format")
    elif order == "!print":
        print(argument, flush=True)
        os.write(1, b"noise\n")
        os.write(2, b"noise\n")
    elif order == "!child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(tempfile.gettempdir(), argument).write_text(str(child.pid))
        time.sleep(60)
    elif order == "!confined":
        return Document("confined", [Block(json.dumps(confined(json.loads(argument))))])
    elif order == "!write":
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, int(argument))
    elif order == "!facts":
        facts = f"{os.getpid()} {os.environ.get('SECRET_KEY')} {' '.join(sorted(sys.modules))}"
        return Document("facts", [Block(facts)])
    return Document("orders", [Block(content.decode())], {"name": name, **options})


def attempt(action: Callable[[], object]) -> str | None:
    """The name of the error it fails with, or None."""
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, repr(error))
    return None


def confined(facts: dict[str, Any]) -> dict[str, Any]:
    """What this process may still do.

    ``facts``: tcp (a port that listens), unix (a socket), server (a process id), file (that its user may read).
    """

    def connect(family: int, address: Any) -> None:
        with socket.socket(family) as client:
            client.settimeout(2)
            client.connect(address)

    libc = ctypes.CDLL(None, use_errno=True)

    def attach() -> None:
        if libc.ptrace(16, facts["server"], 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")
        libc.ptrace(17, facts["server"], 0, 0)

    def take_descriptor() -> None:
        if libc.syscall(438, -1, 0, 0) != 0:  # pidfd_getfd; of no process, so that only a filter refuses it
            raise OSError(ctypes.get_errno(), "pidfd_getfd")

    file = Path(facts["file"])

    def write_own() -> None:
        with tempfile.NamedTemporaryFile() as own:
            own.write(b"a")

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "tcp": attempt(lambda: connect(socket.AF_INET, ("127.0.0.1", facts["tcp"]))),
        "unix": attempt(lambda: connect(socket.AF_UNIX, facts["unix"])),
        "ptrace": attempt(attach),
        "descriptor of another": attempt(take_descriptor),
        "signal": attempt(lambda: os.kill(facts["server"], 0)),
        "read": attempt(file.read_bytes),
        "listing": attempt(lambda: os.listdir(file.parent)),
        "write": attempt(lambda: file.with_name("new").write_text("")),
        "append": attempt(lambda: file.open("a").close()),
        "delete": attempt(file.with_name("victim").unlink),
        "own folder": attempt(write_own),
        "cat": subprocess.run(["/bin/cat", str(file)], capture_output=True, check=False).returncode,
        "program": subprocess.run(
            [sys.executable, "-c", "import socket; socket.socket(socket.AF_UNIX)"], capture_output=True, check=False
        ).returncode,
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        "devices": [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]],
        "uid": os.getuid(),
        "limits": {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("CORE", "FSIZE", "NOFILE")
        },
        "no_new_privs": status["NoNewPrivs"].strip(),
        "seccomp": status["Seccomp"].strip(),
        "dumpable": libc.prctl(3, 0, 0, 0, 0),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text().strip(),
        "environment": attempt(Path("/proc/self/environ").read_bytes),
    }
