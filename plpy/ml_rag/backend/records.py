"""What is counted and what is told of calls, as pages of the file that ``slots`` keeps: names, counters, activity.

Native byte order; every page has a checksum.
"""

from __future__ import annotations

import struct
import zlib
from math import log2

PAGE = 4096

# Their places are what the file holds, so a name is only ever added at the end.
ROUTINES = (
    *("ml_rag", "ml_rag_search", "ml_rag_table", "ml_generate", "ml_generate_table", "ml_embed_row", "ml_embed_table"),
    *("vector_store_load", "ml_rank", "ml_rank_rows", "ml_rag_evaluate", "ml_rag.load_documents"),
    *("ml_rag.enable_keyword_search", "ml_rag.add_embedding", "ml_rag.embed", "ml_rag.rerank", "ml_rag.generate"),
    *("ml_retrieve_schema_metadata", "ml_nl_sql", "ml_rag.rewrite"),
)
STAGES = (
    *("total", "discover", "embed", "search", "keyword", "rerank", "expand", "generate", "load", "index", "judge"),
    *("switch", "read", "rewrite"),
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

# A record: checksum and length of what is used, role, routine, epoch; errors; tokens; then the stages, those that are
# met most often first, so that what is used is short: sum, longest, errors, how many in each class of duration.
_RECORD = struct.Struct("=IIIIqq")
_Q_ERRORS = _RECORD.size // 8
_Q_TOKENS = _Q_ERRORS + _MAX_ERRORS
_Q_STAGES = _Q_TOKENS + 2
_Q_STAGE = 3 + BUCKETS // 2
_I_BUCKETS = 2 * (_Q_STAGES + 3)
# of the page of what is in flight: whether anything is, checksum of the rest; numbers; texts
_HEAD = struct.Struct("=II")
_NUMBERS = struct.Struct("=IIBBBxqqqqqqq")
_TEXTS = struct.Struct("=64s128s48s")
_MODEL = _HEAD.size + _NUMBERS.size
ACTIVITY_BYTES = _MODEL + _TEXTS.size
IDLE = bytes(4)


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
    return min(BUCKETS - 1, int(2 * log2(microseconds / SHORTEST))) if microseconds > SHORTEST else 0


class Record:
    """The counters of one role and routine: those of a slot, or a sum of them."""

    __slots__ = ("_bytes", "_i", "_q", "_used", "_view", "role", "routine")

    def __init__(self, role: int, routine: int, used: bytes = b"") -> None:
        self.role, self.routine = role, routine
        self._bytes = bytearray(PAGE)
        self._bytes[: len(used)] = used
        self._view = memoryview(self._bytes)
        self._q, self._i = self._view.cast("Q"), self._view.cast("I")
        self._used = max(len(used), 8 * (_Q_STAGES + _Q_STAGE))

    def _at(self, stage: int) -> int:
        at = _Q_STAGES + _Q_STAGE * stage
        if self._used < 8 * (at + _Q_STAGE):
            self._used = 8 * (at + _Q_STAGE)
        return at

    def add(self, stage: int, microseconds: int) -> None:
        """Count one that took so long."""
        at = self._at(stage)
        q, i = self._q, self._i
        q[at] += microseconds
        if microseconds > q[at + 1]:
            q[at + 1] = microseconds
        at = 2 * (at + 3) + bucket(microseconds)
        if i[at] < 0xFFFFFFFF:
            i[at] += 1

    def fail(self, stage: int, error: int) -> None:
        """Count a call that failed in this stage (0: in none)."""
        self._q[self._at(0) + 2] += 1
        if stage:
            self._q[self._at(stage) + 2] += 1
        self._q[_Q_ERRORS + error] += 1

    def add_tokens(self, prompt: int, generated: int) -> None:
        self._q[_Q_TOKENS] += prompt
        self._q[_Q_TOKENS + 1] += generated

    def merge(self, other: Record) -> None:
        """Add what the other has counted."""
        q, i = self._q, self._i
        for at in range(_Q_ERRORS, _Q_STAGES):
            q[at] += other._q[at]
        for stage in range(_MAX_STAGES):
            at = _Q_STAGES + _Q_STAGE * stage
            if other._used < 8 * (at + _Q_STAGE):
                break
            self._at(stage)
            q[at] += other._q[at]
            q[at + 1] = max(q[at + 1], other._q[at + 1])
            q[at + 2] += other._q[at + 2]
            for bucket_at in range(2 * (at + 3), 2 * (at + 3) + BUCKETS):
                i[bucket_at] = min(0xFFFFFFFF, i[bucket_at] + other._i[bucket_at])

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
        at = _Q_STAGES + _Q_STAGE * stage
        return self._q[at], self._q[at + 1], self._q[at + 2], list(self._i[2 * (at + 3) : 2 * (at + 3) + BUCKETS])

    def page(self, epoch: int) -> memoryview:
        """As it is written."""
        used = self._view[: self._used]
        _RECORD.pack_into(used, 0, 0, self._used, self.role, self.routine, epoch, 0)
        self._i[0] = zlib.crc32(used[4:])
        return used

    @classmethod
    def of_page(cls, page: bytes, epoch: int) -> Record | None:
        """None where it is damaged, half written, or of another epoch."""
        if len(page) < _RECORD.size:
            return None
        crc, used, role, routine, of_epoch, _ = _RECORD.unpack_from(page)
        if not _RECORD.size <= used <= min(len(page), PAGE) or crc != zlib.crc32(page[4:used]):
            return None
        return cls(role, routine, page[:used]) if of_epoch == epoch and routine < len(ROUTINES) else None


class Activity:
    """What a backend is doing. Times are µs since 1970; ``statement`` is PostgreSQL's own start of the statement.

    The texts stand in the page, which is kept, so that a stage that begins costs next to nothing.
    """

    __slots__ = (
        *("_body", "_page", "_texts", "command", "done", "failed", "in_flight", "pid", "progress_started", "role"),
        *("routine", "stage", "stage_started", "started", "statement", "total"),
    )

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.in_flight = False
        self.role = self.routine = self.stage = 0
        self.started = self.stage_started = self.statement = 0
        #: place in ``ROUTINES`` + 1; 0: no progress to tell of
        self.command = 0
        self.done = self.failed = self.progress_started = 0
        self.total = -1
        self._page = bytearray(ACTIVITY_BYTES)
        self._body = memoryview(self._page)[_HEAD.size :]
        self._texts: tuple[str, str, str] = ("", "", "")

    @property
    def texts(self) -> tuple[str, str, str]:
        """Model, relation, phase; cut to what the page holds of them."""
        return self._texts

    @texts.setter
    def texts(self, texts: tuple[str, str, str]) -> None:
        if texts != self._texts:
            self._texts = texts
            _TEXTS.pack_into(self._page, _MODEL, *(text.encode(errors="replace") for text in texts))

    def page(self) -> bytearray:
        """As it is written."""
        _NUMBERS.pack_into(
            *(self._page, _HEAD.size, self.pid, self.role, self.routine, self.stage, self.command, self.started),
            *(self.stage_started, self.statement, self.done, self.total, self.failed, self.progress_started),
        )
        _HEAD.pack_into(self._page, 0, self.in_flight, zlib.crc32(self._body))
        return self._page

    @classmethod
    def of_page(cls, page: bytes) -> Activity | None:
        """None where it is damaged, half written or empty."""
        page = page[:ACTIVITY_BYTES]
        if len(page) < ACTIVITY_BYTES:
            return None
        found = cls(0)
        in_flight, crc = _HEAD.unpack_from(page)
        if crc != zlib.crc32(page[_HEAD.size :]):
            return None
        found.in_flight = bool(in_flight)
        found.pid, found.role, found.routine, found.stage, found.command, *numbers = _NUMBERS.unpack_from(
            page, _HEAD.size
        )
        found.started, found.stage_started, found.statement, *numbers = numbers
        found.done, found.total, found.failed, found.progress_started = numbers
        if found.routine >= len(ROUTINES) or found.stage >= len(STAGES) or found.command > len(ROUTINES):
            return None
        # a text that was cut may end within a character
        model, relation, phase = (
            text.rstrip(b"\0").decode(errors="ignore") for text in _TEXTS.unpack_from(page, _MODEL)
        )
        found._texts = model, relation, phase
        return found
