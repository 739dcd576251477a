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
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator

from ml_rag.backend import locks
from ml_rag.backend.records import ACTIVITY_BYTES, IDLE, PAGE, Activity, Record, error_number

FOLDER = "pg_stat_tmp"
#: part of the file's name: raise it with any change of the layout but one more name at the end of a list in ``records``
FORMAT = 1
RECORDS = 31
SLOT_BYTES = PAGE * (1 + RECORDS)
MAX_SLOTS = 4096
MAX_OID = 2**32 - 1

_MAGIC = b"ml_rag%2d" % FORMAT
_HEADER = struct.Struct("=8sqI")
_EMPTY, _NOTHING = bytes(PAGE), bytes(ACTIVITY_BYTES)
_TERMINATED = error_number("terminated")


class SlotFile:
    """The file of one database, open. Raises OSError wherever it cannot be used."""

    def __init__(self, path: str, *, create: bool) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self.fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            self._status = os.fstat(self.fd)
            if not stat.S_ISREG(self._status.st_mode):
                raise OSError(f"{path} is no file")
            self._header, self._header_epoch = b"", 0
            self.epoch = self.read_epoch()
            if create and not self.epoch:
                self.start_epoch(only_if_none=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Its locks, a slot with them, are given up too."""
        os.close(self.fd)

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
        page = os.pread(self.fd, _HEADER.size, 0)
        if page == self._header:  # mostly
            return self._header_epoch
        if len(page) < _HEADER.size:
            return 0
        magic, epoch, crc = _HEADER.unpack(page)
        if magic != _MAGIC or crc != zlib.crc32(page[:16]):
            return 0
        self._header, self._header_epoch = page, epoch
        return int(epoch)

    def start_epoch(self, *, only_if_none: bool = False) -> int:
        """Count anew from now on. Raises OSError where another does just that and does not come to an end."""
        for _ in range(20):
            if locks.lock(self.fd, 0):
                break
            time.sleep(0.001)
        else:
            raise OSError("the first page is locked")
        try:
            self.epoch = self.read_epoch()
            if not (only_if_none and self.epoch):
                self.epoch = max(self.epoch + 1, time.time_ns() // 1000)
                head = _MAGIC + struct.pack("=q", self.epoch)
                os.pwrite(self.fd, head + struct.pack("=I", zlib.crc32(head)), 0)
        finally:
            locks.unlock(self.fd, 0)
        return self.epoch

    # -- slots --

    def claim(self) -> int | None:
        """A slot that nobody has, now this process's; None where all are taken."""
        return next((slot for slot in range(MAX_SLOTS) if locks.lock(self.fd, _place(slot))), None)

    def is_owned(self, slot: int) -> bool:
        """Whether another, which opened the file for itself, owns the slot."""
        if not locks.lock(self.fd, _place(slot), shared=True):
            return True
        locks.unlock(self.fd, _place(slot))
        return False

    def count(self) -> int:
        """How many slots there are or have been."""
        return min(MAX_SLOTS, max(0, -(-(os.fstat(self.fd).st_size - PAGE) // SLOT_BYTES)))

    def read_activity(self, slot: int) -> Activity | None:
        """None where there is none, or it is damaged."""
        for _ in range(3):  # its owner may just be writing it
            page = os.pread(self.fd, ACTIVITY_BYTES, _place(slot))
            if page == _NOTHING:
                return None
            if (found := Activity.of_page(page)) is not None:
                return found
        return None

    def read_records(self, slot: int, epoch: int) -> Iterator[tuple[int, Record]]:
        """The places and records of a slot that count in this epoch."""
        for place in range(RECORDS):
            for _ in range(3):  # its owner may just be writing it
                page = os.pread(self.fd, PAGE, _place(slot) + PAGE * (1 + place))
                if page == _EMPTY[: len(page)]:
                    return  # they are filled from the first one on
                record = Record.of_page(page, epoch)
                if record is not None:
                    yield place, record
                    break

    def write_record(self, slot: int, place: int, record: Record) -> None:
        os.pwrite(self.fd, record.page(self.epoch), _place(slot) + PAGE * (1 + place))


class Slot:
    """The slot of this backend, and what its pages hold."""

    def __init__(self, file: SlotFile, number: int) -> None:
        self.file, self.number = file, number
        self.activity = Activity(os.getpid())
        self._fd, self._place = file.fd, _place(number)
        self._records: dict[tuple[int, int], tuple[int, Record]] = {}
        #: the one used last
        self._key: tuple[int, int] | None = None
        former = file.read_activity(number)
        for place, record in file.read_records(number, file.epoch):
            self._records[record.role, record.routine] = place, record
        if former is not None and former.in_flight and former.pid != os.getpid():
            self.record(former.role, former.routine).fail(former.stage, _TERMINATED)
            self.write(former.role, former.routine)
        self.show()

    def record(self, role: int, routine: int) -> Record:
        """The counters of a role and a routine. Where there is no room for more, those used least recently ago are
        counted among those of no role in particular (0)."""
        key = role, routine
        if key == self._key:
            return self._records[key][1]
        self._key = None
        found = self._records.pop(key, None)
        if found is None:
            if len(self._records) < RECORDS:
                place = min(set(range(RECORDS)) - {place for place, _ in self._records.values()})
            else:
                place = self._make_room()
            found = place, Record(role, routine)
            self.file.write_record(self.number, *found)  # what was there counts no more
        self._records[key] = found  # the last one is the one used last
        self._key = key
        return found[1]

    def _make_room(self) -> int:
        oldest = next(key for key in self._records if key[0] != 0)
        place, record = self._records.pop(oldest)
        common = self._records.get((0, record.routine))
        if common is None:
            # its place becomes the common one; another has to go for the one that is to come
            common = place, Record(0, record.routine)
            self._records[0, record.routine] = common
            common[1].merge(record)
            self.file.write_record(self.number, *common)
            return self._make_room()
        common[1].merge(record)
        self.file.write_record(self.number, *common)
        return place

    def write(self, role: int, routine: int) -> None:
        self.file.write_record(self.number, *self._records[role, routine])

    def follow_epoch(self) -> None:
        """Forget what was counted before a reset."""
        epoch, former = self.file.read_epoch(), self.file.epoch
        if epoch and epoch == former:
            return
        if not epoch:  # truncated or damaged
            epoch = self.file.start_epoch(only_if_none=True)
        if epoch != former:
            self.file.epoch = epoch
            self.forget()

    def forget(self) -> None:
        """Count from 0."""
        self._records.clear()
        self._key = None

    def give_up(self) -> None:
        """Let others have it. What is in flight goes on, and must not be taken for a call whose backend is gone."""
        try:
            if self.activity.pid == os.getpid():
                os.pwrite(self._fd, IDLE, self._place)
        finally:
            self.file.close()

    def show(self) -> None:
        """Write what is in flight."""
        activity = self.activity
        os.pwrite(self._fd, activity.page() if activity.in_flight else IDLE, self._place)


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
            if len(parts) != 3 or parts[0] != "ml_rag" or not (parts[1].isdecimal() and parts[2].isdecimal()):
                continue
            if (oid := int(parts[1])) <= MAX_OID:
                yield oid, f"{FOLDER}/{name}"
