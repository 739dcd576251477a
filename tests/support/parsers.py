"""Parsers for the sandbox's tests: the content is an order, carried out in the child process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_rag.abc import Block, Document
from ml_rag.errors import DocumentError


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
    elif order == "!draw" and "pictures" in options:  # a picture that no parser survives, described or left out
        options.pop("pictures").describe(lambda: os.kill(os.getpid(), signal.SIGABRT))
    elif order == "!raise":
        raise ValueError(argument)
    elif order == "!refuse":
        raise DocumentError("the document is no good", detail=argument, hint="Write another.")
    elif order == "!print":
        print(argument, flush=True)
        os.write(1, b"noise\n")
        os.write(2, b"noise\n")
    elif order == "!say":  # in place of the answer
        os.write(int(sys.argv[1]), len(argument).to_bytes(8, "big") + argument.encode())
        time.sleep(60)
    elif order == "!child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).wait()
    elif order == "!leave":  # a process that goes on
        return Document("orders", [Block(str(left_behind()))])
    elif order == "!processes":
        return Document("orders", [Block(str(started(int(argument))))])
    elif order == "!confined":
        return Document("confined", [Block(json.dumps(confined(json.loads(argument))))])
    elif order == "!values":  # in the metadata of each of 500 segments of 16 words
        return Document("orders", [Block("word " * 16 * 500, {"values": [[]] * int(argument)})])
    elif order == "!facts":
        facts = f"{os.getpid()} {os.environ.get('SECRET_KEY')} {' '.join(sorted(sys.modules))}"
        return Document("facts", [Block(facts)])
    return Document("orders", [Block(content.decode())], {"name": name, **options})


def left_behind() -> int:
    """A process that would leave its group, and waits."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        for leave in (os.setsid, os.setpgrp):
            attempt(leave)
        os.write(write, b".")
        time.sleep(60)
        os._exit(0)
    os.read(read, 1)
    return process


def started(most: int) -> int:
    """How many processes could be started of so many."""
    found: list[int] = []
    with contextlib.suppress(BlockingIOError):
        while len(found) < most:
            if (process := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            found.append(process)
    for process in found:
        os.kill(process, signal.SIGKILL)
    return len(found)


CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), -1)


def attempt(action: Callable[[], object]) -> str | None:
    """The name of the error it fails with, or None."""
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, repr(error))
    return None


def namespace(call: str) -> int:
    """The exit status of a process that asks for a namespace of its own: this one may be the tests'."""
    command = [sys.executable, "-c", f"import ctypes, os; os._exit({call} < 0)"]
    return subprocess.run(command, capture_output=True, check=False).returncode


def give_limits(process: int) -> None:
    resource.prlimit(process, resource.RLIMIT_CORE, resource.prlimit(process, resource.RLIMIT_CORE))


def tampering(file: Path, libc: ctypes.CDLL) -> dict[str, Any]:
    """What this process may do to a file by its name: nothing of it needs the file to be opened."""
    name, here = os.fsencode(file), ctypes.c_int(-100)

    def checked(result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), "")

    def shared_memory() -> None:
        checked(found := libc.shmget(0, 4096, 0o1600))
        libc.shmctl(found, 0, None)

    ends = os.pipe()
    with open(ends[0], "rb") as pipe, open(ends[1], "wb"):
        return {
            "chmod": attempt(lambda: os.chmod(file, 0o640)),
            "fchmodat": attempt(lambda: checked(libc.fchmodat(here, name, 0o640, 0))),
            "fchmodat2": attempt(lambda: checked(libc.syscall(452, here, name, 0o640, 0))),
            "chmod of an open file": attempt(lambda: os.fchmod(pipe.fileno(), 0o600)),
            "chown": attempt(lambda: os.chown(file, os.getuid(), os.getgid())),
            "lchown": attempt(lambda: os.lchown(file, os.getuid(), os.getgid())),
            "times": attempt(lambda: os.utime(file, (1, 1))),
            "attribute": attempt(lambda: os.setxattr(file, "user.a", b"a")),
            "attribute, a newer call": attempt(lambda: checked(libc.syscall(463, here, name, 0, b"user.a", None, 0))),
            "no attribute": attempt(lambda: os.removexattr(file, "user.a")),
            "flags": attempt(lambda: set_flags(Path(__file__))),
            "length": attempt(lambda: os.truncate(file, file.stat().st_size)),
            "shared memory": attempt(shared_memory),
            "files in memory": attempt(lambda: os.close(os.memfd_create("a"))),
            "/bin/chmod": subprocess.run(["/bin/chmod", "640", str(file)], capture_output=True, check=False).returncode,
        }


def set_flags(file: Path) -> None:
    """Those it has, to a file that is opened to be read."""
    flags = array("l", [0])
    with file.open("rb") as opened:
        fcntl.ioctl(opened, 0x80086601, flags)  # FS_IOC_GETFLAGS, SETFLAGS
        fcntl.ioctl(opened, 0x40086602, flags)


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

    def datagram() -> None:
        # one of a pair reaches any other socket by its address
        for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
            end.close()

    def watch() -> None:
        with open(libc.inotify_init(), "rb") as events:
            if libc.inotify_add_watch(events.fileno(), os.fsencode(file.parent), 0x100) < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch")

    file = Path(facts["file"])

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tampering(file, libc) | {
        "tcp": attempt(lambda: connect(socket.AF_INET, ("127.0.0.1", facts["tcp"]))),
        "unix": attempt(lambda: connect(socket.AF_UNIX, facts["unix"])),
        "datagram": attempt(datagram),
        "ptrace": attempt(attach),
        "descriptor of another": attempt(take_descriptor),
        "signal": attempt(lambda: os.kill(facts["server"], 0)),
        "read": attempt(file.read_bytes),
        "listing": attempt(lambda: os.listdir(file.parent)),
        "watch": attempt(watch),
        "write": attempt(lambda: file.with_name("new").write_text("")),
        "append": attempt(lambda: file.open("a").close()),
        "delete": attempt(file.with_name("victim").unlink),
        "temporary file": attempt(lambda: tempfile.TemporaryFile().close()),
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
        "capabilities": {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")},
        "limits of another": attempt(lambda: give_limits(facts["server"])),
        "priority of another": attempt(lambda: os.setpriority(0, facts["server"], os.getpriority(0, facts["server"]))),
        "namespace": namespace("ctypes.CDLL(None).unshare(0x10000000)"),  # CLONE_NEWUSER
        "namespace by clone": namespace(f"ctypes.CDLL(None).syscall({CLONE}, 0x10000000 | 17, 0, 0, 0, 0)"),
        "sibling": namespace(f"ctypes.CDLL(None).syscall({CLONE}, 0x8000 | 17, 0, 0, 0, 0)"),  # CLONE_PARENT
        "no_new_privs": status["NoNewPrivs"].strip(),
        "seccomp": status["Seccomp"].strip(),
        "dumpable": libc.prctl(3, 0, 0, 0, 0),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text().strip(),
        "environment": attempt(Path("/proc/self/environ").read_bytes),
    }
