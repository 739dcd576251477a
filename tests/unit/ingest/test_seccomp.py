"""The filter of system calls, run as the kernel runs it, for machines other than this one too."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from ml_rag.ingest import seccomp

ALLOWED = 0x7FFF0000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}
machines = pytest.mark.parametrize("machine", sorted(seccomp.ARCHITECTURES))


def verdict(
    machine: str, number: int, first_argument: int = 0, second_argument: int = 0x5401, architecture: int | None = None
) -> int:
    """What the program of ``machine`` says to a call."""
    arguments = {16: first_argument & 0xFFFFFFFF, 24: second_argument & 0xFFFFFFFF}
    shown = {0: number, 4: architecture or seccomp.ARCHITECTURES[machine], **arguments}
    program = seccomp.program(machine)
    place = value = 0
    while True:
        code, yes, no, k = program[place]
        assert 0 <= yes < 256
        assert 0 <= no < 256
        if code == 0x06:
            return k
        if code == 0x20:
            value = shown[k]
            place += 1
            continue
        true = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
        place += 1 + (yes if true else no)


@machines
def test_what_is_refused_and_what_is_not(machine: str) -> None:
    column = list(seccomp.ARCHITECTURES).index(machine)
    refused = {row[column] for row in seccomp.REFUSED.values()} - {None}
    clone, clone3, limits = seccomp.CLONE[column], seccomp.CLONE3[column], seccomp.PRLIMIT64[column]
    for number in range(seccomp.FIRST_UNKNOWN):
        expected = EPERM if number in refused else ENOSYS if number == clone3 else ALLOWED
        assert verdict(machine, number) == expected, number
    thread, user_namespace = 0x3D0F00, 0x10000000
    assert verdict(machine, clone, thread) == ALLOWED
    assert verdict(machine, clone, thread | user_namespace) == EPERM
    for bit in (15, 17, *range(25, 31)):  # CLONE_PARENT; NEWNS; CGROUP, UTS, IPC, USER, PID, NET
        assert verdict(machine, clone, 1 << bit) == EPERM
    assert verdict(machine, limits, 0) == ALLOWED
    assert verdict(machine, limits, 4711) == EPERM
    for request in (0x5400, 0x5421, 0x5451, 0x54FF):
        assert verdict(machine, seccomp.IOCTL[column], 3, request) == ALLOWED
    for request in (0x40086602, 0x40087602, 0x401C5820, 0x40806685, 0x6602, 0x53FF, 0x5500, 0):  # FS_IOC_SETFLAGS
        assert verdict(machine, seccomp.IOCTL[column], 3, request) == EPERM
    for number in (seccomp.FIRST_UNKNOWN, 999, 0x40000000, 0x40000029, 0xFFFFFFFF):
        assert verdict(machine, number) == ENOSYS
    assert verdict(machine, 0, architecture=0x40000003) == EPERM  # i386 on x86_64: other numbers


@machines
def test_the_numbers_are_the_kernels(machine: str) -> None:
    header = next((Path(name) for name in HEADERS[machine] if Path(name).exists()), None)
    if header is None:
        pytest.skip("the kernel's headers are not installed")
    names = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.MULTILINE))
    column = list(seccomp.ARCHITECTURES).index(machine)
    known = {**seccomp.REFUSED, "clone": seccomp.CLONE, "clone3": seccomp.CLONE3, "prlimit64": seccomp.PRLIMIT64}
    known["ioctl"] = seccomp.IOCTL
    wrong = {
        name: row[column]
        for name, row in known.items()
        if name != "fchmodat2" or name in names  # newer than some headers
        if names.get(name) != (None if row[column] is None else str(row[column]))
    }
    assert wrong == {}
