"""A column of embeddings, which ml_rag.add_embedding and ml_rag.run_vectorizer fill: rows without one wait.

They differ in where such rows are looked for. A run of a vectorizer has few rows of many to do, and an index has those,
in the order of their key. In a new column all rows wait, and the table may lack a key: it is read by blocks.
"""

from __future__ import annotations

import contextlib
import json
import time
from itertools import accumulate
from typing import Any

from ml_rag.backend.jobs import vectors
from ml_rag.backend.jobs.loop import MOST_BYTES, Batch, CreatedAgain, Derived, Session, Statement, Steps, array, run
from ml_rag.backend.retrieval.sqltext import identifier
from ml_rag.errors import MlRagError

#: error of a row
KEPT = {"sqlstate": "55000", "message": "a trigger of the table keeps the row as it is"}
#: of claims those that the session has; a lock that a cancelled statement has got is among them
_UNLOCK = """
SELECT pg_catalog.pg_advisory_unlock(c.claim) FROM pg_catalog.unnest($1) AS c (claim)
JOIN pg_catalog.pg_locks AS l ON l.pid = pg_catalog.pg_backend_pid() AND l.locktype = 'advisory' AND l.objsubid = 1
  AND (l.classid::bigint << 32 | l.objid::bigint) = c.claim
"""


class Column(Derived):
    """Claims are advisory locks: several runs share a table, and one that is killed leaves nothing behind.

    No lock of a row or table is held while the model is asked. Rows that come, change or move meanwhile can lie before
    those that are read: so the table is read again until little is found, and then once more.
    """

    #: bytes of the texts of a batch
    most_bytes = MOST_BYTES

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._began = time.monotonic()
        #: fields of ml_rag._embedding_job and what the routine has beside them
        self._job: dict[str, Any] = {}
        #: rows that were embedded, all of them and of this reading; None: nothing was read yet
        self._embedded = 0
        self._found: int | None = None
        self._is_last = False
        #: texts that the model has cut
        self._truncated = 0
        #: the table that is read: the store, or a partition or shard of it; {}: not begun
        self._part: dict[str, Any] = {}
        self._is_through = True
        self._reached = 0
        #: what was read of it last: a key, or a place
        self._after: str | None = None
        #: advisory locks: those that the session has, or is about to ask for
        self._claims: list[int] = []

    def _set_job(self, job: dict[str, Any]) -> None:
        self._job = job | {"call": self.session.call}
        self.relation = job["vector_store"]
        self._column, self._segment = identifier(job["column_name"]), identifier(job["segment"])

    def _look_up(self) -> Steps[dict[str, Any]]:
        """The embedding as it is now: its model_id."""
        raise NotImplementedError

    def _count(self) -> Steps[int]:
        """How many rows wait."""
        raise NotImplementedError

    def _next_rows(self) -> Steps[list[list[Any]]]:
        """The next rows of the part, in the form of ``_find``. Sets ``_is_through`` at its end."""
        raise NotImplementedError

    def _note(self, batch: Batch) -> Steps[int]:
        """Keep the errors of rows; how many have one."""
        raise NotImplementedError

    def _embed(self, texts: list[str]) -> tuple[list[str | None], list[MlRagError | None], int]:
        return vectors.embed_apart(self.session, texts, self._job["model_id"])

    def enter(self, step: str) -> Steps[None]:
        job, part = self._job, self._part
        if step == "make":
            self.session.stage("embed", job["model_id"])
            self.tell("embedding")
            return
        if step != "write":
            # given back after the commit of what they were for
            self._unlock()
        is_here = part and part["shard"] is None and (step == "write" or not self._is_through)
        # a table before its parts, and after its segments; all parts where all are read, to count their rows
        held = dict.fromkeys((job["store"], part["oid"] if is_here else job["store"], job["relation"]))
        with_parts = self._found is None or step == "finish"
        yield from run(
            f"SELECT NULL FROM ml_rag._hold_filled({array('held', 'oid')}, ARRAY[($1 ->> 'store')::oid],"
            " ($1 ->> 'store')::oid, ($1 ->> 'owner')::oid, ($1 ->> 'with_parts')::boolean,"
            " ($1 ->> 'is_judged')::boolean)",
            held=[*held], store=job["store"], owner=job["owner"], with_parts=with_parts,
            is_judged=job.get("is_judged", False),
        )  # fmt: skip
        if is_here:
            yield from self._name_part()
        found = yield from self._look_up()
        if found["model_id"] != job["model_id"]:
            detail = f"They are of model {found['model_id']} now."
        elif (found.get("options") or {}).get("chunking") != (job.get("request") or {}).get("chunking"):
            detail = "Texts are split in another way now."
        else:
            return
        raise CreatedAgain(
            f'the embeddings of "{self.relation}" were dropped and created again during the call',
            detail=detail,
            hint="Call again.",
        )

    def _name_part(self) -> Steps[None]:
        """It can have been renamed, and another have its name."""
        part = self._part
        part["name"] = yield from run("SELECT to_json(ml_rag._relation_name(($1 ->> 'oid')::oid))", oid=part["oid"])

    def read(self) -> Steps[Batch | None]:
        if self._is_through:
            return (yield from self._begin_part())
        rows = yield from self._claim((yield from self._next_rows()))
        return (yield from self._read_rows([row[0] for row in rows], [row[1] for row in rows])) if rows else {}

    def _begin_part(self) -> Steps[Batch | None]:
        if self._found is None:
            self.tell("counting rows")
            self.total = yield from self._count()
            self._found = 0
        self._after = None
        part = yield from run(
            "SELECT to_json(p) FROM ml_rag._filled_parts(($1 ->> 'store')::oid) AS p"
            " WHERE p.oid > ($1 ->> 'reached')::bigint ORDER BY p.oid LIMIT 1",
            store=self._job["store"], reached=self._reached,
        )  # fmt: skip
        if part is not None:
            self._part, self._reached, self._is_through = part, part["oid"], False
            return {}
        if self._is_last or self._found == 0:
            return None
        self._is_last = self._found <= self._job["batch_size"]
        self._again()
        return {}

    def _again(self) -> None:
        """Read the table from its beginning."""
        self._found = self._reached = 0

    def _find(
        self, waiting: str, order: str, key: str, claim: str, **given: Any
    ) -> Steps[tuple[list[list[Any]], bool]]:
        """Place, key, claim and bytes of the next rows t that wait, and whether there may be more. Takes SQL."""
        size = self._job["batch_size"]
        found = yield from run(
            f"""
            SELECT json_agg(json_build_array(r.place, r.key, hashtextextended(concat('ml_rag ', {claim}), 0), r.bytes)
              ORDER BY r.n)
            FROM (
              SELECT t.ctid AS place, {key} AS key, coalesce(octet_length(t.{self._segment}), 0) AS bytes,
                row_number() OVER (ORDER BY {order}) AS n
              {waiting} ORDER BY {order} LIMIT ($1 ->> 'size')::integer
            ) AS r""",
            by_index=True, on=self._part["shard"], after=self._after, size=size, **given,
        )  # fmt: skip
        found = found or []
        former = accumulate((row[3] for row in found), initial=0)
        rows = [row for row, n in zip(found, former, strict=False) if n <= self.most_bytes]
        return rows, len(rows) < len(found) or len(rows) == size

    def _claim(self, rows: list[list[Any]]) -> Steps[list[list[Any]]]:
        """Those of the rows that no other run has."""
        if not rows:
            return []
        self._claims = list(dict.fromkeys(claim for _, _, claim, _ in rows))
        are_free = yield from run(
            "SELECT json_agg(pg_try_advisory_lock(c.claim::bigint) ORDER BY c.n)"
            " FROM json_array_elements_text($1 -> 'claims') WITH ORDINALITY AS c (claim, n)",
            claims=self._claims,
        )
        free = {claim for claim, is_free in zip(self._claims, are_free, strict=True) if is_free}
        self._claims = list(free)
        return [row for row in rows if row[2] in free]

    def _read_rows(self, places: list[str], keys: list[str]) -> Steps[Batch]:
        """The texts of rows, read after the claim: another run may have finished one before that.

        Texts that are empty, too long or not valid get their errors here; of a too long one only the beginning is read.
        """
        found = yield from run(
            f"""
            SELECT json_agg(json_build_array(r.place, r.key,
              CASE WHEN r.bytes > 1000000 THEN left(r.text, 100) ELSE r.text END, CASE
              WHEN r.bytes > 1000000 THEN json_build_object('sqlstate', '54000', 'message', 'the text is too long',
                'detail', format('It has %s bytes; at most 1000000 are embedded.', r.bytes), 'final', true,
                'text_hash', ml_rag._text_hash(r.text))
              WHEN NOT ml_rag._is_text(r.text) THEN json_build_object('sqlstate', '22021', 'message',
                'the text is not valid in the encoding of the database', 'final', true,
                'text_hash', ml_rag._text_hash(r.text))
              WHEN coalesce(r.text, '') !~ '[^[:space:]]' THEN
                json_build_object('sqlstate', '22023', 'message', 'the text is empty', 'final', true) END) ORDER BY r.n)
            FROM (
              SELECT u.place, u.key, u.n, octet_length(t.{self._segment}) AS bytes, t.{self._segment}::text AS text
              FROM ROWS FROM (json_array_elements_text($1 -> 'places'), json_array_elements_text($1 -> 'keys'))
                WITH ORDINALITY AS u (place, key, n)
              JOIN ONLY {self._part["name"]} AS t ON t.ctid = u.place::tid WHERE t.{self._column} IS NULL
            ) AS r""",
            on=self._part["shard"], places=places, keys=keys,
        )  # fmt: skip
        fields = zip(*found, strict=True) if found else ()
        return dict(zip(("places", "keys", "texts", "errors"), map(list, fields), strict=True)) if found else {}

    def make(self, batch: Batch) -> Steps[Any]:
        """Vectors; errors go into the batch."""
        yield from ()
        errors = batch["errors"]
        good = [i for i, error in enumerate(errors) if error is None]
        made: list[str | None] = [None] * len(errors)
        found, failed, truncated = self._embed([batch["texts"][i] for i in good])
        for i, vector, error in zip(good, found, failed, strict=True):
            made[i], errors[i] = vector, error and vectors.error_of(error)
        self._truncated += truncated
        return made

    def write(self, batch: Batch, made: Any) -> Steps[None]:
        written = yield from self._write_made(batch, made)
        self._found = (self._found or 0) + written
        self._embedded += written
        self.failed += yield from self._note(batch)
        self.done = self._embedded + self.failed

    def _write_made(self, batch: Batch, made: Any) -> Steps[int]:
        """Write what was made; how many rows have it now."""
        written, kept = yield from vectors.write_vectors(
            *(self._part["name"], self._part["shard"], self._column, self._segment, self._job["type"]),
            *(batch["places"], batch["texts"], made),
        )
        for i in kept:
            batch["errors"][i] = KEPT
        return written

    def _index(self, analyzes_all: bool) -> Steps[None]:
        self.session.stage("index")
        self.tell("building index")
        yield Statement(
            "SELECT NULL FROM ml_rag._index_embedding(jsonb_populate_record(NULL::ml_rag._embedding_job,"
            f" $1::jsonb), {analyzes_all})",
            json.dumps(self._job),
        )

    def stop(self) -> None:
        # of the session, so a cancel must not prevent it
        for _ in range(2):
            with contextlib.suppress(self.session.plpy.SPIError):
                self._unlock()
                return
        self._unlock()

    def _unlock(self) -> None:
        if self._claims:
            plpy = self.session.plpy
            plpy.execute(plpy.prepare(_UNLOCK, ["pg_catalog.int8[]"]), [self._claims])
            self._claims = []
