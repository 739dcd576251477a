"""ml_rag.add_embedding: another embedding of a store's texts, made while the store is in use (sql/store/add.sql).

What was done stands in the table itself: the column, its comment, its trigger, its rows. So a call can end at any time.
"""

from __future__ import annotations

import json
import time
from typing import Any

from ml_rag.backend.jobs import vectors
from ml_rag.backend.jobs.column import Column
from ml_rag.backend.jobs.loop import COMMIT, Batch, Session, Statement, Steps, call, function, run
from ml_rag.backend.retrieval.sqltext import identifier
from ml_rag.errors import MlRagError

_MOST_BLOCKS = 8192


class Embedding(Column):
    """What waits are rows that have a text and no vector, in the order in which they lie in the table.

    64 blocks are claimed at once. A row that failed waits for the next reading, and errors go with the call.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._first_error: str | None = None
        #: blocks of the table that is read, and how many of them are read at once
        self._extent = 0
        self._blocks = 32

    def begin(self) -> Steps[None]:
        self._set_job((yield Statement(function("_begin_embedding(oid, text, jsonb)"), self.session.given)))
        yield COMMIT
        yield Statement(
            "SELECT NULL FROM ml_rag._prepare_embedding(jsonb_populate_record(NULL::ml_rag._embedding_job, $1::jsonb))",
            json.dumps(self._job),
        )

    def _look_up(self) -> Steps[dict[str, Any]]:
        found: dict[str, Any] = yield from call(
            "_find_embedding(oid, text)", self._job["store"], self._job["embedding"]
        )
        # it can have been renamed
        self._job |= {"column_name": found["column_name"], "attnum": found["attnum"]}
        self._column = identifier(found["column_name"])
        return found

    def _count(self) -> Steps[int]:
        job = self._job
        n: int = yield from call("_pending(oid, name, name)", job["store"], job["column_name"], job["segment"])
        return n

    def _again(self) -> None:
        super()._again()
        self.failed, self._first_error = 0, None

    def _next_rows(self) -> Steps[list[list[Any]]]:
        part = self._part
        if self._after is None:
            self._after = "(0,0)"
            self._extent = yield from run(
                "SELECT to_json(pg_relation_size(($1 ->> 'name')::regclass) / current_setting('block_size')::bigint)",
                on=part["shard"], name=part["name"],
            )  # fmt: skip
        end = min(int(self._after[1:].partition(",")[0]) + self._blocks, self._extent)
        rows, has_more = yield from self._find(
            f"FROM ONLY {part['name']} AS t WHERE t.ctid > ($1 ->> 'after')::tid AND t.ctid < ($1 ->> 'end')::tid"
            f" AND t.{self._column} IS NULL AND (octet_length(t.{self._segment}) > 1000000"
            f" OR t.{self._segment} ~ '[^[:space:]]')",
            order="t.ctid", key="t.ctid::text",
            claim=f"'embedding {self._job['store']} {self._job['attnum']} {part['oid']} ',"
            " (r.key::point)[0]::bigint / 64",
            end=f"({end},0)",
        )  # fmt: skip
        if has_more:
            self._after = rows[-1][1]
            self._blocks = max(1, self._blocks // 2)
        else:
            self._after = f"({end},0)"
            self._blocks = min(_MOST_BLOCKS, self._blocks * 2)
            self._is_through = end == self._extent
        return rows

    def _embed(self, texts: list[str]) -> tuple[list[str | None], list[MlRagError | None], int]:
        return vectors.embed_all(self.session, texts, self._job["model_id"])

    def _note(self, batch: Batch) -> Steps[int]:
        yield from ()
        failed = [(error, text) for error, text in zip(batch["errors"], batch["texts"], strict=True) if error]
        for error, text in failed[:1]:
            self._first_error = self._first_error or f"{error['message']} ({error['sqlstate']}): {text[:60]}"
        return len(failed)

    def finish(self) -> Steps[None]:
        yield from self._index(analyzes_all=False)

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
        yield from self.enter("finish")
        return {
            "vector_store": self.relation,
            "embedding": self._job["embedding"],
            "embed_model_id": self._job["model_id"],
            "segments": self._embedded,
            "failed": self.failed,
            "first_error": self._first_error,
            "pending": (yield from self._count()),
            "seconds": round(time.monotonic() - self._began, 3),
        }
