"""Another embedding model for a store that stays in use: the loop around sql/store/reembed.sql and switch.sql.

What a stopped call has to know stands in the table itself; here is no more than how far this call is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

#: blocks read at a time: at first, and at most
BLOCKS = (32, 8192)
#: so often rows must come back as they were before a trigger is to blame, and not somebody who changed them just then
REFUSALS = 4

# Qualified throughout: where these run from a procedure the search_path is the caller's.
_STATEMENTS = {
    "extent": ("SELECT e.* FROM ml_rag._reembed_extent($1) AS e", "jsonb"),
    "column": ("SELECT ml_rag._begin_column($1, $2) AS value", "jsonb", "int4"),
    "read": ("SELECT r.* FROM ml_rag._reembed_read($1, $2, $3) AS r", "jsonb", "int8", "int8"),
    "pending": ("SELECT p.* FROM ml_rag._reembed_pending($1, $2) AS p", "jsonb", "int4"),
    "rows": ("SELECT r.* FROM ml_rag._reembed_rows($1, $2, $3) AS r", "jsonb", "text[]", "text[]"),
    "index": ("SELECT ml_rag._reembed_index($1, $2) AS value", "jsonb", "int4"),
    "settle": ("SELECT ml_rag._reembed_settle($1, $2) AS value", "jsonb", "int4"),
    "switch": ("SELECT ml_rag._reembed_switch($1, $2) AS value", "jsonb", "int4"),
    "too late": ("SELECT ml_rag._lock_too_late($1)", "jsonb"),
    "finish": ("SELECT ml_rag._reembed_finish($1, $2, $3) AS value", "jsonb", "int4", "int4"),
    "hold": ("SELECT ml_rag._hold_for_reembed($1, $2) AS value", "jsonb", "bool"),
    "release": ("SELECT pg_catalog.pg_advisory_unlock($1)", "int8"),
    "sleep": ("SELECT pg_catalog.pg_sleep($1)", "float8"),
    "progress": ("SELECT ml_rag._reembed_progress($1, $2, $3, $4, $5)", "jsonb", "text", "int8", "int8", "int8"),
}
_plans: dict[str, Any] = {}


class Reembedding:
    """One call of ml_rag.reembed, on a job made by ml_rag._begin_reembed."""

    def __init__(self, plpy: Any, job_text: str) -> None:
        self._plpy = plpy
        self._job_text = job_text
        self._job: dict[str, Any] = json.loads(job_text)
        self._size: int = self._job["batch_size"]
        self._blocks = BLOCKS[0]
        self._phase = "beginning"
        self._started = time.monotonic()
        self._segments = 0
        self._failed = 0
        self._first_error: str | None = None

    def run(self) -> dict[str, Any]:
        """The result, but for the names of store and models."""
        switched = False
        with self._held(everything=False):
            self._plpy.commit()
            if not self._job["same"]:
                self._repeat("column")
                self._fill()
                if self._job["switch"] and not self._failed:
                    switched = self._switch()
            if switched or self._job["same"]:
                self._finish()
        return {
            "segments": self._segments,
            "failed": self._failed,
            "first_error": self._first_error,
            "switched": switched,
            "seconds": round(time.monotonic() - self._started, 3),
        }

    def _fill(self) -> None:
        """Read the table again and again, until a reading finds little left to do."""
        self._enter("embedding")
        while self._pass() > self._size:
            pass

    def _pass(self) -> int:
        """Embed what has no new embedding, block by block; the number of rows written. Rows are moved by being written,
        but only to the end of the table or into blocks that the next pass reads."""
        extent = self._run("extent")
        self._failed, self._first_error = 0, None
        written = seen = first = 0
        while first < extent["blocks"]:
            last = min(first + self._blocks, extent["blocks"])
            found = self._run("read", first, last)
            places, texts = found["places"] or [], found["texts"] or []
            for start in range(0, len(places), self._size):
                portion = slice(start, start + self._size)
                done = self._run("rows", places[portion], texts[portion])
                written += done["written"]
                self._segments += done["written"]
                self._failed += done["failed"]
                self._first_error = self._first_error or done["first_error"]
                self._tell(seen + min(start + self._size, len(places)), extent["rows"])
                self._plpy.commit()
            seen += found["seen"]
            self._tell(seen, extent["rows"])
            self._plpy.commit()
            # neither more texts than a few batches at a time, nor a transaction for each handful of rows
            if len(places) > 4 * self._size:
                self._blocks = max(1, self._blocks // 2)
            elif len(places) < self._size:
                self._blocks = min(BLOCKS[1], self._blocks * 2)
            first = last
        return written

    def _switch(self) -> bool:
        """Whether the new column has taken the old one's place; not where rows fail."""
        held_up: float | None = None
        for attempt in itertools.count():
            self._build()
            self._catch_up()
            if self._failed:
                return False
            self._enter("waiting for loads")
            # loads that begin from here on wait, and find the new model
            with self._held(everything=True):
                self._catch_up()
                if self._failed:
                    return False
                self._enter("switching")
                began = time.monotonic()
                outcome = self._attempt("settle", attempt)
                if outcome["state"] == "busy":
                    outcome = self._attempt("switch", attempt)
            if outcome["state"] == "failed":
                self._failed, self._first_error = outcome["failed"], outcome["first_error"]
            if outcome["state"] in ("switched", "failed"):
                return bool(outcome["state"] == "switched")
            held_up = (held_up or began) if outcome["state"] == "locked" else None
            self._wait(attempt, held_up)
        return False

    def _attempt(self, name: str, attempt: int) -> Any:
        """What came of one of the two ways to switch."""
        outcome = json.loads(self._run(name, attempt)["value"])
        self._plpy.commit()
        self._segments += outcome.get("written") or 0
        return outcome

    def _build(self) -> None:
        """Build the indexes that the old column has and the new one lacks."""
        attempt, began = 0, time.monotonic()
        self._enter("building index")
        while done := self._run("index", attempt)["value"]:
            if done == "locked":
                self._wait(attempt, began)
                attempt += 1
            else:
                began = time.monotonic()
            self._plpy.commit()
        self._plpy.commit()

    def _catch_up(self) -> None:
        """Embed what has come in since the table was read, by the index of such rows, until nothing is left."""
        self._enter("catching up")
        refusals, began = 0, time.monotonic()
        for attempt in itertools.count():
            found = self._run("pending", self._size)
            if not found["places"]:
                break
            done = self._run("rows", found["places"], found["texts"])
            self._plpy.commit()
            self._segments += done["written"]
            if done["failed"]:
                self._failed, self._first_error = done["failed"], done["first_error"]
                return
            if done["written"]:
                refusals, began = 0, time.monotonic()
                continue
            refusals += done["refused"] > 0
            if refusals == REFUSALS:
                self._failed, self._first_error = done["refused"], "a trigger of the table keeps them as they are"
                return
            self._wait(attempt, began)  # others are changing just these rows
        self._plpy.commit()

    def _finish(self) -> None:
        self._enter("finishing")
        for step in (1, 2, 3):
            self._repeat("finish", step)

    def _repeat(self, name: str, *arguments: Any) -> None:
        """Try until the table's lock was to be had. Each attempt is short, as others wait behind it."""
        began = time.monotonic()
        for attempt in itertools.count():
            if self._run(name, *arguments, attempt)["value"]:
                break
            self._wait(attempt, began)
        self._plpy.commit()

    def _wait(self, attempt: int, since: float | None) -> None:
        """Let the others through, for about as long as they were held up.

        Where the caller has a ``lock_timeout``, that is an error once it has waited for so long ``since``.
        """
        pause = min(0.1 * 2 ** min(attempt, 20), self._job["lock_seconds"])
        if since is not None and (limit := self._job["lock_timeout"] / 1000):
            self._plpy.commit()
            left = since + limit - time.monotonic()
            if left <= 0:
                self._run("too late")
            pause = min(pause, left)
        phase = self._phase
        self._enter("waiting for a lock")
        self._plpy.commit()
        self._plpy.execute(self._plan("sleep"), [pause])
        self._plpy.commit()
        self._enter(phase)

    @contextlib.contextmanager
    def _held(self, *, everything: bool) -> Iterator[None]:
        """Hold the lock of whoever re-embeds the store, or that of everybody who writes vectors of its model."""
        key = self._run("hold", everything)["value"]
        try:
            yield
        finally:
            # A lock of the session outlives the call where it is not given back, so a cancel must not prevent that.
            for attempt in range(3):
                try:
                    self._plpy.execute(self._plan("release"), [key])
                    break
                except self._plpy.SPIError:
                    if attempt == 2:
                        raise

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._tell(0, -1)

    def _tell(self, done: int, total: int) -> None:
        self._run("progress", self._phase, done, total, self._failed)

    def _run(self, name: str, *arguments: Any) -> Any:
        return self._plpy.execute(self._plan(name), [self._job_text, *arguments])[0]

    def _plan(self, name: str) -> Any:
        if name not in _plans:
            statement, *types = _STATEMENTS[name]
            _plans[name] = self._plpy.prepare(statement, [f"pg_catalog.{type_name}" for type_name in types])
        return _plans[name]
