"""What a parser's process gives up before it reads its first document: privileges, network, files, other processes.

Linux only, by ctypes. The order matters: a user namespace needs a process with one thread, and taking one clears the
parent-death signal; a filter of system calls needs no_new_privs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
from pathlib import Path

from ml_rag.ingest.landlock import confine_files

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

#: descriptors a parser may hold, the pipes of an OCR program included
MOST_DESCRIPTORS = 128
#: bytes of a file it may write: an OCR program gets a page as a file
MOST_FILE_BYTES = 512 * 1024 * 1024

#: machine -> (AUDIT_ARCH, calls that fail with EPERM): socket, connect, ptrace, process_vm_readv, process_vm_writev,
#: io_uring_setup (which opens sockets too), pidfd_getfd (which takes the descriptors of others). A socket in the file
#: system, as PostgreSQL's, is in no network namespace.
_CALLS = {
    "x86_64": (0xC000003E, (41, 42, 101, 310, 311, 425, 438)),
    "aarch64": (0xC00000B7, (198, 203, 117, 270, 271, 425, 438)),
}
_X32_BIT = 0x40000000
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def _prctl(option: int, *values: object) -> None:
    arguments = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*values, 0, 0, 0, 0)[:4]]
    if _libc.prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def hide() -> None:
    """Let no process of the same user read this one's memory and environment (root's still do); no core dumps."""
    _prctl(_PR_SET_DUMPABLE, 0)


def confine() -> dict[str, str]:
    """Confine this process, which must have one thread. What the kernel refused -> why.

    Keys: ``network namespace``, ``view of the file system``, ``system call filter``; the rest is never refused.
    """
    refused = {}
    with contextlib.suppress(OSError):  # where there is no /proc
        # where memory runs out, one document is the least to lose: not the model server, nor PostgreSQL
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        _leave_network()
    except OSError as error:
        refused["network namespace"] = str(error)
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    hide()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    try:
        confine_files()
    except OSError as error:
        refused["view of the file system"] = str(error)
    try:
        _filter_calls()
    except OSError as error:
        refused["system call filter"] = str(error)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, MOST_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return refused


def _leave_network() -> None:
    """Into a network namespace without a device; a user namespace is what lets an ordinary user make one."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # with the ids as they were, so that files and the OCR program find their user; without a map all is as nobody
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_DUMPABLE, 1)  # the maps can be written by a process that is dumpable only
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _filter_calls() -> None:
    """Make the calls of ``_CALLS`` fail, here and in every program started from here."""
    if platform.machine() not in _CALLS:
        raise OSError(f"not known for {platform.machine()}")
    architecture, calls = _CALLS[platform.machine()]
    last = 4 + len(calls) + 1  # the place of the line that refuses; a jump counts the lines it leaps over
    lines = [
        (_LOAD, 0, 0, 4),  # the architecture the call was made for
        (_JUMP_IF_EQUAL, 0, last - 2, architecture),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_JUMP_IF_AT_LEAST, last - 4, 0, _X32_BIT),
        *((_JUMP_IF_EQUAL, last - place - 1, 0, number) for place, number in enumerate(calls, start=4)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    instructions = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    program = _Program(len(lines), instructions)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))
