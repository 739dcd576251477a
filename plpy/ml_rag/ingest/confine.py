"""What a parser's process gives up before it reads its first document: privileges, network, files, other processes.

Linux only, by ctypes. The order matters: a user namespace needs a process with one thread, and taking one clears the
parent-death signal; a filter of system calls needs no_new_privs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

from ml_rag.ingest.landlock import ABI_OF_SIGNALS, ABI_SINCE_5_19, confine_files
from ml_rag.ingest.seccomp import filter_calls

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

#: descriptors a parser may hold, the pipes of an OCR program included
MOST_DESCRIPTORS = 128
#: processes and threads of a parser and the programs it starts
MOST_PROCESSES = 64


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def _prctl(option: int, *values: object) -> None:
    arguments = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*values, 0, 0, 0, 0)[:4]]
    if _libc.prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def hide() -> None:
    """Let no process of the same user read this one's memory and environment (root's still do); no core dumps."""
    _prctl(_PR_SET_DUMPABLE, 0)


def end_with_parent() -> None:
    """Have this process killed as soon as the thread that started it ends, also where it is stopped."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def confine() -> dict[str, str]:
    """Confine this process, which must have one thread. What the kernel refused -> why.

    Keys: ``network namespace``, ``drop of capabilities``, ``view of the file system``, ``bound on signals``,
    ``system call filter``; the rest is never refused.
    """
    refused = {}
    with contextlib.suppress(OSError):  # /proc may be missing
        # if memory runs out, one document is the least to lose: not the model server, nor PostgreSQL
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        _leave_network()
    except OSError as error:
        refused["network namespace"] = str(error)
    try:
        _drop_capabilities()
    except OSError as error:
        refused["drop of capabilities"] = str(error)
    end_with_parent()
    hide()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    abi = 0
    try:
        abi = confine_files()
        if abi < ABI_OF_SIGNALS:
            refused["bound on signals"] = f"Landlock has version {abi} here, {ABI_OF_SIGNALS} is needed (Linux 6.12)"
    except OSError as error:
        refused["view of the file system"] = refused["bound on signals"] = f"no Landlock: {error}"
    try:
        filter_calls()
    except OSError as error:
        refused["system call filter"] = str(error)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, MOST_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if abi >= ABI_SINCE_5_19 and "network namespace" not in refused:
        # in a user namespace, from Linux 5.14 on, only those in it count: else all of the server's user
        most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        most = MOST_PROCESSES if most == resource.RLIM_INFINITY else min(most, MOST_PROCESSES)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    return refused


def _leave_network() -> None:
    """Into a network namespace without a device; a user namespace is what lets an ordinary user make one."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # with the ids as they were, so that files and the OCR program find their user; without a map all are overflow ids
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_DUMPABLE, 1)  # the maps can be written by a process that is dumpable only
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _drop_capabilities() -> None:
    """A user namespace of one's own comes with all of them in it; root has them anyway. Raises OSError."""
    # what programs started from here could get back; refused to who has no capability, and then there is nothing to get
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, *map(ctypes.c_ulong, (capability, 0, 0, 0))) == 0:
        capability += 1
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; of 32 each, twice
    if _libc.capset(ctypes.byref(header), nothing) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
