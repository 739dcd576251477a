"""A parser's view of the file system: its own code and libraries to read, nothing to write.

Landlock (Linux 5.13 and newer), by ctypes; it needs no privilege. A process that is confined so, and those that it
starts, cannot open another file even if their user may: not the model server's configuration with its keys, not a
database's files. From Linux 6.7 on it cannot use TCP either, from 6.12 on it cannot signal other processes. What it
leaves open (modes, owners, times, attributes, before 6.2 the length of files) is ``ml_rag.ingest.seccomp``'s.

Why not a package: those on PyPI are a pre-release (landlock 1.0.0.dev5) or less than a year old (landlockpy 0.2.0,
py-landlock 0.1.1), and would take the place of two structures and three calls. Why not bubblewrap: it wants a user
namespace, which Docker's default profile refuses ("No permissions to create new namespace", 0.8.0).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

# the same numbers on all architectures
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
#: all accesses there are, by the ABI's version
_ALL_ACCESSES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_LATEST_ACCESSES = (1 << 16) - 1  # from 5 on
_TCP = 0b11  # bind, connect; from ABI 4 on
_SCOPED = 0b11  # abstract unix sockets, signals
ABI_SINCE_5_19, ABI_OF_SIGNALS = 2, 6

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _TRUNCATE
#: what a rule for a single file may say
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

#: libraries, programs, their data; single files of /etc, since keys lie there too
_SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/dev/urandom", "/dev/zero"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/fonts", "/etc/mime.types", "/etc/passwd", "/etc/nsswitch.conf"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu", "/sys/fs/cgroup"),
)  # fmt: skip


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _call(number: int, *arguments: object) -> int:
    wide = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *wide))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def version() -> int:
    """The version of the kernel's Landlock ABI. Raises OSError where there is none, or it is off."""
    return _call(_CREATE_RULESET, None, 0, _VERSION_FLAG)


def readable() -> Iterator[str]:
    """What a parser has to read: the system's libraries, this Python, this package, the OCR program and its data."""
    yield from _SYSTEM
    yield from {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path)}
    yield str(Path(__file__).resolve().parents[2])
    if data := os.environ.get("TESSDATA_PREFIX"):
        yield data
    if program := shutil.which("tesseract"):
        yield str(Path(program).resolve().parents[1])


def restrict(read: Iterable[str], write: Iterable[str]) -> int:
    """Let this process, which must have one thread and no_new_privs, open nothing but what lies below these paths.

    Paths that do not exist are left out. Returns the version of the kernel's Landlock ABI. Raises OSError where it has
    none.
    """
    abi = version()
    handled = _ALL_ACCESSES.get(abi, _LATEST_ACCESSES)
    attributes = _Ruleset(handled, _TCP, _SCOPED)
    size = 24 if abi >= ABI_OF_SIGNALS else 16 if abi >= 4 else 8
    ruleset = _call(_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    try:
        for path in read:
            _allow(ruleset, path, _READ & handled)
        for path in write:
            _allow(ruleset, path, _WRITE & handled)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return abi


def _allow(ruleset: int, path: str, access: int) -> None:
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(parent).st_mode):
                access &= _OF_FILES
            rule = _PathBeneath(access, parent)
            _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        finally:
            os.close(parent)


def confine_files() -> int:
    """Confine this process to what a parser needs; see ``restrict``."""
    return restrict(readable(), ["/dev/null"])
