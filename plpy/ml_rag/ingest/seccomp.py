"""The system calls that a parser and the programs it starts may not make, as a seccomp filter, by ctypes.

What Landlock leaves open is refused here: the mode, owner, times and attributes of files, their length by name (before
Linux 6.2), word of what happens in folders, namespaces of one's own with all capabilities in them, shared memory and
keys of the user's other processes, their limits and their share of the processors. Calls that are newer than this list
do not exist for a parser: the C library then takes an older one. x86_64 and aarch64.

Why not libseccomp: it knows numbers one by one, so "newer than this list" takes a rule for each of 463 calls: 624
instructions instead of 83, and 0.14 s more for each parser that starts (2 busy cores). Calls newer than the library
need their numbers here all the same (2.5.4, of Debian 12: mseal and later). pip cannot bring it; without it parsers
would have no filter. Its wrapper on PyPI (pyseccomp 0.1.2) is of 2021. The attacks of the tests fail with it as well.
"""

from __future__ import annotations

import ctypes
import errno
import platform

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2

#: machine -> how the kernel names it to a filter (AUDIT_ARCH)
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {machine: column for column, machine in enumerate(ARCHITECTURES)}

#: calls that fail with EPERM: numbers on x86_64 and aarch64, None if the machine has no such call
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # A socket in the file system, as PostgreSQL's, is in no network namespace; io_uring opens sockets too.
    "socket": (41, 198), "connect": (42, 203),
    "socketpair": (53, 199),  # a datagram socket of a pair sends to any address: the system's log
    "io_uring_setup": (425, 425),
    # the memory, the descriptors and the scheduling of the user's other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # what it starts stays in its group, which is ended with it
    "setpgid": (109, 154), "setsid": (112, 157),
    # what is not in the file system and belongs to the user: shared memory, such as a database's, queues, keys
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219),
    # files in memory, which no limit of a process counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # files: what Landlock does not look at
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "truncate": (76, 45),
    # blocks beyond the end of a file, which no limit counts
    "fallocate": (285, 47),
    # names of files in folders that it cannot list
    "inotify_add_watch": (254, 27), "fanotify_init": (300, 262),
    # a namespace of one's own gives all capabilities in it, and with them much more of the kernel to attack
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}  # fmt: skip
#: may make no namespaces, and no children of the server's, which it does not wait for; clone3 hides its flags from a
#: filter, and so does not exist: clone takes its place
CLONE, CLONE3 = (56, 220), (435, 435)
# CLONE_PARENT; CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_REFUSED_FLAGS = 0x7E028000
#: may change its own limits, not those of others
PRLIMIT64 = (302, 261)
#: may ask what terminals and pipes are asked, as Python does of each file; others set attributes of files
IOCTL = (16, 29)
_TERMINAL_REQUESTS = range(0x5400, 0x5500)
#: from here on calls do not exist; Linux 6.13 begins with setxattrat. The x32 calls are above it too
FIRST_UNKNOWN = 463

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# places in what the kernel shows of a call
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as instructions (code, lines to leap if so, if not, operand). Raises KeyError for other machines."""
    column = _COLUMN[machine]
    # a label in place of a number of lines; "" is the next line
    lines: list[tuple[int, str, str, int]] = [
        (_LOAD, "", "", _ARCHITECTURE),
        (_JUMP_IF_EQUAL, "", "refuse", ARCHITECTURES[machine]),
        (_LOAD, "", "", _NUMBER),
        (_JUMP_IF_AT_LEAST, "unknown", "", FIRST_UNKNOWN),
        *((_JUMP_IF_EQUAL, "refuse", "", number) for row in REFUSED.values() if (number := row[column]) is not None),
        (_JUMP_IF_EQUAL, "unknown", "", CLONE3[column]),
        (_JUMP_IF_EQUAL, "clone", "", CLONE[column]),
        (_JUMP_IF_EQUAL, "request", "", IOCTL[column]),
        (_JUMP_IF_EQUAL, "limits", "allow", PRLIMIT64[column]),
    ]
    labels = {}
    for label, more in {
        "clone": [(_LOAD, "", "", _FIRST_ARGUMENT), (_JUMP_IF_ANY, "refuse", "allow", _REFUSED_FLAGS)],
        "limits": [(_LOAD, "", "", _FIRST_ARGUMENT), (_JUMP_IF_EQUAL, "allow", "refuse", 0)],
        "request": [
            (_LOAD, "", "", _SECOND_ARGUMENT),
            (_JUMP_IF_AT_LEAST, "refuse", "", _TERMINAL_REQUESTS.stop),
            (_JUMP_IF_AT_LEAST, "allow", "refuse", _TERMINAL_REQUESTS.start),
        ],
        "allow": [(_RETURN, "", "", _ALLOW)],
        "refuse": [(_RETURN, "", "", _ERROR | errno.EPERM)],
        "unknown": [(_RETURN, "", "", _ERROR | errno.ENOSYS)],
    }.items():
        labels[label] = len(lines)
        lines += more

    def leap(place: int, label: str) -> int:
        return labels[label] - place - 1 if label else 0

    return [(code, leap(place, yes), leap(place, no), k) for place, (code, yes, no, k) in enumerate(lines)]


def filter_calls() -> None:
    """Make those calls fail, here and in every program started from here. Needs no_new_privs.

    Raises OSError where the kernel refuses, or the machine is another one.
    """
    if platform.machine() not in ARCHITECTURES:
        raise OSError(f"not known for {platform.machine()}")
    lines = program(platform.machine())
    instructions = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    found = _Program(len(lines), instructions)
    arguments = (ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(found), ctypes.c_ulong(0), ctypes.c_ulong(0))
    if _libc.prctl(_PR_SET_SECCOMP, *arguments) != 0:
        raise OSError(ctypes.get_errno(), "seccomp is refused")
