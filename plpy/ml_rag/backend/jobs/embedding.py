"""ml_rag.add_embedding: another embedding of a store's texts, made while the store is in use (sql/store/add.sql).

What was done stands in the table itself: the column, its comment, its trigger, its rows. So a call can end at any time.
"""

from __future__ import annotations

import json
import time
from typing import Any

from ml_rag.backend.jobs import vectors
from ml_rag.backend.jobs.loop import COMMIT, Batch, Derived, Session, Statement, Steps, call, function, run
from ml_rag.backend.retrieval.sqltext import identifier

_MOST_BLOCKS = 8192
_JOB = "jsonb_populate_record(NULL::ml_rag._embedding_job, $1::jsonb)"


class Embedding(Derived):
    """What waits are rows that have a text and no vector, in the order in which they lie in the table.

    Rows that come, change or are moved meanwhile can lie in blocks that were read before: so a store is read again
    until little is found, and then once more. One session at a time fills an embedding.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._began = time.monotonic()
        #: rows that were embedded, all of them and of this reading
        self._embedded = self._found = 0
        self._first_error: str | None = None
        #: the table that is being read: the store, or a partition or shard of it; where it is, if not here
        self._part = 0
        self._relation = ""
        self._shard: dict[str, Any] | None = None
        #: blocks of that table; None: the next one is to be read
        self._extent: int | None = None
        #: the last row that was read, and how many blocks are read at once
        self._after, self._blocks = "(0,0)", 32
        self._is_last = False

    def begin(self) -> Steps[None]:
        facts = yield Statement(function("_begin_embedding(oid, text, jsonb)"), self.session.given)
        #: the fields of ml_rag._embedding_job
        self._job: dict[str, Any] = facts | {"call": self.session.call}
        self.relation = facts["vector_store"]
        yield COMMIT
        yield from self._lock()
        yield from self._on_job("_prepare_embedding")
        yield COMMIT
        yield from self.enter("read")
        self.tell("counting rows")
        self.total = yield from self._pending()

    def _lock(self) -> Steps[None]:
        yield from call("_lock_filling(oid, text, text)", self._job["store"], "embedding", self._job["embedding"])

    def _on_job(self, name: str) -> Steps[None]:
        """Run a function that takes a ml_rag._embedding_job."""
        yield Statement(f"SELECT NULL FROM ml_rag.{name}({_JOB})", json.dumps(self._job))

    def _pending(self) -> Steps[int]:
        """Rows that have a text and no vector."""
        job = self._job
        n: int = yield from call("_pending(oid, name, name)", job["store"], job["column_name"], job["segment"])
        return n

    def _look_up(self) -> Steps[None]:
        """The column, which can have been renamed."""
        found = yield from call("_find_embedding(oid, text)", self._job["store"], self._job["embedding"])
        self._job["column_name"] = found["column_name"]
        self._column, self._segment = identifier(self._job["column_name"]), identifier(self._job["segment"])

    def enter(self, step: str) -> Steps[None]:
        yield from self._lock()
        yield from self._look_up()
        self.done = self._embedded + self.failed
        if step == "make":
            self.session.stage("embed", self._job["model_id"])
            self.tell("embedding")
        elif step == "finish":
            self.session.stage("index")
            self.tell("building index")

    def read(self) -> Steps[Batch | None]:
        if self._extent is None:
            part = yield from run(
                "SELECT to_json(p) FROM ml_rag._filled_parts(($1 ->> 'store')::oid) AS p"
                " WHERE p.oid > ($1 ->> 'part')::bigint ORDER BY p.oid LIMIT 1",
                store=self._job["store"], part=self._part,
            )  # fmt: skip
            if part is None:
                if self._is_last or self._found == 0:
                    return None
                self._is_last = self._found <= self._job["batch_size"]
                self._part = self._found = self.failed = 0
                self._first_error = None
                return {}
            self._part, self._relation, self._shard = part["oid"], part["name"], part["shard"]
            self._after = "(0,0)"
            self._extent = yield from run(
                "SELECT to_json(pg_relation_size(($1 ->> 'name')::regclass) / current_setting('block_size')::bigint)",
                on=self._shard, name=self._relation,
            )  # fmt: skip
        size, extent = self._job["batch_size"], self._extent
        end = min(int(self._after[1:].partition(",")[0]) + self._blocks, extent)
        rows = yield from run(
            "SELECT json_agg(json_build_array(r.place, r.text) ORDER BY r.place) FROM ("
            f"SELECT t.ctid AS place, t.{self._segment}::text AS text FROM ONLY {self._relation} AS t"
            " WHERE t.ctid > ($1 ->> 'after')::tid AND t.ctid < ($1 ->> 'end')::tid"
            f" AND t.{self._column} IS NULL AND t.{self._segment} ~ '[^[:space:]]'"
            " ORDER BY t.ctid LIMIT ($1 ->> 'size')::integer) AS r",
            by_index=True, on=self._shard, after=self._after, end=f"({end},0)", size=size,
        )  # fmt: skip
        rows = rows or []
        if len(rows) == size:
            self._after = rows[-1][0]
            self._blocks = max(1, self._blocks // 2)
        elif end == extent:
            self._extent = None
        else:
            self._after = f"({end},0)"
            if 2 * len(rows) < size:
                self._blocks = min(_MOST_BLOCKS, self._blocks * 2)
        return {"places": [place for place, _ in rows], "texts": [text for _, text in rows]} if rows else {}

    def make(self, batch: Batch) -> Steps[list[str | None]]:
        yield from ()
        texts, model = batch["texts"], self._job["model_id"]
        made, errors = vectors.embed_all(self.session, texts, model)
        for text, error in zip(texts, errors, strict=True):
            if error is not None:
                self.failed += 1
                self._first_error = self._first_error or f"{error.message} ({error.sqlstate}): {text[:60]}"
        return made

    def write(self, batch: Batch, made: list[str | None]) -> Steps[None]:
        written, kept = yield from vectors.write_vectors(
            *(self._relation, self._shard, self._column, self._segment, self._job["type"]),
            *(batch["places"], batch["texts"], made),
        )
        self._found += written
        self._embedded += written
        if kept:
            self.failed += len(kept)
            self._first_error = self._first_error or "a trigger of the table keeps rows as they are"

    def finish(self) -> Steps[None]:
        yield from self._on_job("_index_embedding")

    def end(self) -> Steps[dict[str, Any]]:
        name = self._job["embedding"]
        trigger = yield from run(
            "SELECT json_build_object('later', t.later, 'is_on', t.is_on, 'is_default', e.is_default,"
            " 'store', ($1 ->> 'store')::oid::regclass)"
            " FROM ml_rag._find_embedding(($1 ->> 'store')::oid, $1 ->> 'name') AS e,"
            " ml_rag._embedding_trigger(($1 ->> 'store')::oid, e.attnum) AS t",
            store=self._job["store"], name=name,
        )  # fmt: skip
        store = trigger["store"]
        if trigger["later"] is not None:
            yield from call("_later_trigger(oid, name)", self._job["store"], trigger["later"])
        elif trigger["is_on"] is False:
            self.warn(
                f'the trigger of embedding "{name}" of "{store}" was disabled',
                "Texts that changed without it have kept their old embedding.",
                "Add another embedding, use that, and drop this one."
                if trigger["is_default"]
                else "CALL it again: it starts from the beginning.",
            )
        if self.failed:
            self.warn(
                f'{self.failed} rows of "{store}" have no embedding "{name}"',
                "The result has the first error.",
                "What was done is kept: call again when the rows, or the model, are mended.",
            )
        yield from self._look_up()
        return {
            "vector_store": self.relation,
            "embedding": self._job["embedding"],
            "embed_model_id": self._job["model_id"],
            "segments": self._embedded,
            "failed": self.failed,
            "first_error": self._first_error,
            "pending": (yield from self._pending()),
            "seconds": round(time.monotonic() - self._began, 3),
        }
