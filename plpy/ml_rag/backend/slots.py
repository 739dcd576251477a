"""The file that says what the backends of a database are doing and have done: one slot a backend.

Tables cannot hold this: a call that fails rolls back, nobody sees uncommitted rows, a hot standby cannot write. So it
is a file below the data directory, in the folder that PostgreSQL keeps for statistics and leaves out of base backups. A
slot belongs to the backend that has locked its first byte; the kernel gives that up when the process ends, however that
comes about. Only the owner writes its slot, so nothing is ever waited for; whoever owns it next goes on counting, so
the sum over the slots is the total. Every page has a checksum: a reader that meets one half written, or damaged, reads
again or leaves it out.

It is read and written by system calls and not mapped: where the disk is full or somebody has truncated the file, a
write to mapped memory would end the whole database server, and a system call only fails.

Layout (native byte order): a page with the epoch; then the slots, each a page of what is in flight and ``RECORDS``
pages of counters, one for each role and routine. A record of another epoch than the file's counts nothing: that is a
reset.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from math import log2

FOLDER = "pg_stat_tmp"
#: part of the file's name: raise it with any change of the layout that is not one more name at the end of a list below
FORMAT = 1
PAGE = 4096
RECORDS = 31
SLOT_BYTES = PAGE * (1 + RECORDS)
MAX_SLOTS = 4096

# Their places are what the file holds, so a name is only ever added at the end.
ROUTINES = (
    *("ml_rag", "ml_rag_search", "ml_rag_table", "ml_generate", "ml_generate_table", "ml_embed_row", "ml_embed_table"),
    *("vector_store_load", "ml_rank", "ml_rank_rows", "ml_rag_evaluate", "ml_rag.load_documents"),
    *("ml_rag.enable_keyword_search", "ml_rag.reembed", "ml_rag.embed", "ml_rag.rerank", "ml_rag.generate"),
)
STAGES = (
    *("total", "discover", "embed", "search", "keyword", "rerank", "expand", "generate", "load", "index", "judge"),
    *("switch", "read"),
)
#: what errors are counted by: SQLSTATEs, classes of them, and calls whose backend ended before they did
ERRORS = (
    *("22000", "22023", "42501", "42P01", "P0002", "55000", "08006", "53300", "57014", "38000"),
    *("22xxx", "23xxx", "25xxx", "40xxx", "42xxx", "53xxx", "54xxx", "55xxx", "57xxx", "P0xxx", "XXxxx"),
    *("other", "terminated"),
)
_MAX_STAGES, _MAX_ERRORS = 16, 24
#: durations fall into this many classes, each sqrt(2) times as long as the one before; the first ends at 141 µs
BUCKETS = 48
SHORTEST = 100

_ROUTINE_NUMBERS = {name: i for i, name in enumerate(ROUTINES)}
_STAGE_NUMBERS = {name: i for i, name in enumerate(STAGES)}
_ERROR_NUMBERS = {name: i for i, name in enumerate(ERRORS)}

_MAGIC = b"ml_rag%2d" % FORMAT
_HEADER = struct.Struct("=8sqI")
_RECORD = struct.Struct("=IIIIq")
# places in a record, as 8-byte integers: errors, tokens, for each stage sum, longest, errors; as 4-byte ones: buckets
_Q_ERRORS = _RECORD.size // 8
_Q_TOKENS = _Q_ERRORS + _MAX_ERRORS
_Q_STAGES = _Q_TOKENS + 2
_I_BUCKETS = 2 * (_Q_STAGES + 3 * _MAX_STAGES)
_ACTIVITY = struct.Struct("=IIIIBBBxqqq64s128s48sqqqq")
_EMPTY = bytes(PAGE)


def routine_number(name: str) -> int | None:
    """The place of a routine in ``ROUTINES``."""
    return _ROUTINE_NUMBERS.get(name)


def stage_number(name: str) -> int:
    """The place of a stage in ``STAGES``; 0 for a name that is none."""
    return _STAGE_NUMBERS.get(name, 0)


def error_number(sqlstate: str) -> int:
    """What an SQLSTATE counts as: a place in ``ERRORS``."""
    number = _ERROR_NUMBERS.get(sqlstate)
    return number if number is not None else _ERROR_NUMBERS.get(f"{sqlstate[:2]}xxx", _ERROR_NUMBERS["other"])


def bucket(microseconds: int) -> int:
    """The class of a duration."""
    return min(BUCKETS - 1, max(0, int(2 * log2(microseconds / SHORTEST)))) if microseconds > SHORTEST else 0


class Record:
    """The counters of one role and routine: those of a slot, or a sum of them."""

    __slots__ = ("_bytes", "_i", "_q", "role", "routine")

    def __init__(self, role: int, routine: int, page: bytes = _EMPTY) -> None:
        self.role, self.routine = role, routine
        self._bytes = bytearray(page)
        view = memoryview(self._bytes)
        self._q, self._i = view.cast("Q"), view.cast("I")

    def add(self, stage: int, microseconds: int) -> None:
        """Count one that took so long."""
        at = _Q_STAGES + 3 * stage
        self._q[at] += microseconds
        if microseconds > self._q[at + 1]:
            self._q[at + 1] = microseconds
        at = _I_BUCKETS + BUCKETS * stage + bucket(microseconds)
        if self._i[at] < 0xFFFFFFFF:
            self._i[at] += 1

    def fail(self, stage: int, error: int) -> None:
        """Count a call that failed in this stage (0: in none)."""
        self._q[_Q_STAGES + 2] += 1
        if stage:
            self._q[_Q_STAGES + 3 * stage + 2] += 1
        self._q[_Q_ERRORS + error] += 1

    def add_tokens(self, prompt: int, generated: int) -> None:
        self._q[_Q_TOKENS] += prompt
        self._q[_Q_TOKENS + 1] += generated

    def merge(self, other: Record) -> None:
        """Add what the other has counted."""
        for at in range(_Q_ERRORS, _I_BUCKETS // 2):
            is_longest = at >= _Q_STAGES and (at - _Q_STAGES) % 3 == 1
            self._q[at] = max(self._q[at], other._q[at]) if is_longest else self._q[at] + other._q[at]
        for at in range(_I_BUCKETS, _I_BUCKETS + BUCKETS * _MAX_STAGES):
            if other._i[at]:
                self._i[at] = min(0xFFFFFFFF, self._i[at] + other._i[at])

    @property
    def errors(self) -> list[int]:
        """By place in ``ERRORS``."""
        return list(self._q[_Q_ERRORS : _Q_ERRORS + len(ERRORS)])

    @property
    def tokens(self) -> tuple[int, int]:
        """Of prompts, generated."""
        return self._q[_Q_TOKENS], self._q[_Q_TOKENS + 1]

    def stage(self, stage: int) -> tuple[int, int, int, list[int]]:
        """Microseconds in all, the longest, failures, how many in each class of duration."""
        at, buckets = _Q_STAGES + 3 * stage, _I_BUCKETS + BUCKETS * stage
        return self._q[at], self._q[at + 1], self._q[at + 2], list(self._i[buckets : buckets + BUCKETS])

    def page(self, epoch: int) -> bytearray:
        """As it is written."""
        _RECORD.pack_into(self._bytes, 0, 0, self.role, self.routine, 0, epoch)
        self._i[0] = zlib.crc32(self._bytes)
        return self._bytes

    @classmethod
    def of_page(cls, page: bytes, epoch: int) -> Record | None:
        """None where it is damaged, half written, or of another epoch."""
        if len(page) < PAGE or not _is_whole(page):
            return None
        _, role, routine, _, of_epoch = _RECORD.unpack_from(page)
        return cls(role, routine, page) if of_epoch == epoch and routine < len(ROUTINES) else None


class Activity:
    """What a backend is doing. Times are µs since 1970; ``statement`` is PostgreSQL's own start of the statement."""

    __slots__ = (
        *("command", "done", "failed", "in_flight", "model", "phase", "pid", "progress_started", "relation", "role"),
        *("routine", "stage", "stage_started", "started", "statement", "total"),
    )

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.in_flight = False
        self.role = self.routine = self.stage = 0
        self.started = self.stage_started = self.statement = 0
        self.model = ""
        #: place in ``ROUTINES`` + 1; 0: no progress to tell of
        self.command = 0
        self.relation = self.phase = ""
        self.done = self.failed = self.progress_started = 0
        self.total = -1

    def page(self) -> bytes:
        """As it is written."""
        model, relation, phase = (text.encode(errors="replace") for text in (self.model, self.relation, self.phase))
        fields = (
            *(self.pid, self.in_flight, self.role, self.routine, self.stage, self.command),
            *(self.started, self.stage_started, self.statement, model, relation, phase),
            *(self.done, self.total, self.failed, self.progress_started),
        )
        return _ACTIVITY.pack(zlib.crc32(_ACTIVITY.pack(0, *fields)), *fields)

    @classmethod
    def of_page(cls, page: bytes) -> Activity | None:
        """None where it is damaged, half written or empty."""
        page = page[: _ACTIVITY.size]
        if len(page) < _ACTIVITY.size or not _is_whole(page):
            return None
        found = cls(0)
        _, *numbers, model, relation, phase, found.done, found.total, found.failed, found.progress_started = (
            _ACTIVITY.unpack(page)
        )
        found.pid, in_flight, found.role, found.routine, found.stage, found.command, *times = numbers
        found.started, found.stage_started, found.statement = times
        found.in_flight = bool(in_flight)
        if found.routine >= len(ROUTINES) or found.stage >= len(STAGES) or found.command > len(ROUTINES):
            return None
        # a text that was cut may end within a character
        found.model, found.relation, found.phase = (
            text.rstrip(b"\0").decode(errors="ignore") for text in (model, relation, phase)
        )
        return found


def _is_whole(page: bytes) -> bool:
    (crc,) = struct.unpack_from("=I", page)
    return bool(crc) and zlib.crc32(page[4:], zlib.crc32(b"\0\0\0\0")) == crc


class SlotFile:
    """The file of one database, open. Raises OSError wherever it cannot be used."""

    def __init__(self, path: str, *, create: bool) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self._fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            self._status = os.fstat(self._fd)
            if not stat.S_ISREG(self._status.st_mode):
                raise OSError(f"{path} is no file")
            self.epoch = self.read_epoch()
            if create and not self.epoch:
                self.start_epoch(only_if_none=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Any slot of this process is given up with it: closing a file gives up all its locks."""
        os.close(self._fd)

    def is_current(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            now = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (self._status.st_dev, self._status.st_ino)

    # -- the epoch --

    def read_epoch(self) -> int:
        """When counting began, µs since 1970; 0 where the page is missing or damaged."""
        page = os.pread(self._fd, _HEADER.size, 0)
        if len(page) < _HEADER.size:
            return 0
        magic, epoch, crc = _HEADER.unpack(page)
        return epoch if magic == _MAGIC and crc == zlib.crc32(page[:16]) else 0

    def start_epoch(self, *, only_if_none: bool = False) -> int:
        """Count anew from now on. Raises OSError where another does just that and does not come to an end."""
        for _ in range(100):
            if self._lock(0):
                break
            time.sleep(0.001)
        else:
            raise OSError("the first page is locked")
        try:
            self.epoch = self.read_epoch()
            if not (only_if_none and self.epoch):
                self.epoch = max(self.epoch + 1, time.time_ns() // 1000)
                head = _MAGIC + struct.pack("=q", self.epoch)
                os.pwrite(self._fd, head + struct.pack("=I", zlib.crc32(head)), 0)
        finally:
            self._unlock(0)
        return self.epoch

    # -- slots --

    def _lock(self, at: int, *, shared: bool = False) -> bool:
        try:
            fcntl.lockf(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, 1, at)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, at: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, at)

    def claim(self) -> int | None:
        """A slot that nobody has, now this process's; None where all are taken."""
        return next((slot for slot in range(MAX_SLOTS) if self._lock(_place(slot))), None)

    def is_owned(self, slot: int) -> bool:
        """Whether a process other than this one owns the slot."""
        if not self._lock(_place(slot), shared=True):
            return True
        self._unlock(_place(slot))
        return False

    def count(self) -> int:
        """How many slots there are or have been."""
        return min(MAX_SLOTS, max(0, -(-(os.fstat(self._fd).st_size - PAGE) // SLOT_BYTES)))

    def read_activity(self, slot: int) -> Activity | None:
        for _ in range(3):
            page = os.pread(self._fd, _ACTIVITY.size, _place(slot))
            if (found := Activity.of_page(page)) is not None or page == _EMPTY[: len(page)]:
                return found
        return None

    def write_activity(self, slot: int, page: bytes) -> None:
        os.pwrite(self._fd, page, _place(slot))

    def read_records(self, slot: int, epoch: int) -> Iterator[tuple[int, Record]]:
        """The places and records of a slot that count in this epoch."""
        pages = os.pread(self._fd, SLOT_BYTES - PAGE, _place(slot) + PAGE)
        for place in range(RECORDS):
            page = pages[PAGE * place : PAGE * (place + 1)]
            record = Record.of_page(page, epoch)
            if record is None and page and page != _EMPTY:
                # its owner may just have written it
                record = Record.of_page(os.pread(self._fd, PAGE, _place(slot) + PAGE * (1 + place)), epoch)
            if record is not None:
                yield place, record

    def write_record(self, slot: int, place: int, record: Record) -> None:
        os.pwrite(self._fd, record.page(self.epoch), _place(slot) + PAGE * (1 + place))


def _place(slot: int) -> int:
    return PAGE + SLOT_BYTES * slot


def path_of(database: int) -> str:
    """Where the file of a database is, seen from the data directory, in which every backend works."""
    return f"{FOLDER}/ml_rag.{database}.{FORMAT}"


def databases() -> Iterator[tuple[int, str]]:
    """The databases (oid, path) that have a file, of this format or another one."""
    with contextlib.suppress(OSError):
        for name in os.listdir(FOLDER):
            parts = name.split(".")
            if len(parts) == 3 and parts[0] == "ml_rag" and parts[1].isdecimal() and parts[2].isdecimal():
                yield int(parts[1]), f"{FOLDER}/{name}"
