"""ml_rag.run_vectorizer: the rows of a table that wait for their embedding, or for their segments (sql/vectorizer).

Claims are advisory locks of rows: several runs share a table, a run that is killed leaves nothing behind, and no lock
of a row or table is held while the model is asked.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from typing import Any

from ml_rag.backend import calls, segments
from ml_rag.backend.jobs import vectors
from ml_rag.backend.jobs.loop import COMMIT, Batch, Derived, Session, Statement, Steps, array, call, function, run
from ml_rag.backend.jobs.node_group import NodeGroups
from ml_rag.backend.retrieval.sqltext import identifier, literal

_JOB = "jsonb_populate_record(NULL::ml_rag._embedding_job, $1::jsonb)"
#: bytes of the texts of a batch; of those that become many segments
_MOST_BYTES, _MOST_BYTES_SPLIT = 4_000_000, 1_000_000
#: rows that are embedded at once in the transaction that writes them
_AT_ONCE = 256
_KEPT = {"sqlstate": "55000", "message": "a trigger of the table keeps the row as it is"}
#: of claims those that the session has; a lock that a cancelled statement has got is among them
_UNLOCK = """
SELECT pg_catalog.pg_advisory_unlock(c.claim) FROM pg_catalog.unnest($1) AS c (claim)
JOIN pg_catalog.pg_locks AS l ON l.pid = pg_catalog.pg_backend_pid() AND l.locktype = 'advisory' AND l.objsubid = 1
  AND (l.classid::bigint << 32 | l.objid::bigint) = c.claim
"""


class Vectorizer(Derived):
    """What waits are rows without an embedding, whose last failure is not too recent.

    The table is gone through again until nothing is found, as rows come meanwhile.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._began = time.monotonic()
        #: rows that were embedded, all of them and since the table was begun
        self._embedded = self._found = 0
        #: texts that the model has cut, and those of them that are counted already
        self._truncated = self._counted = 0
        #: the table, or its partitions that are still to be read: oid, name and what waits as SQL; None: not begun
        self._parts: list[dict[str, Any]] | None = None
        #: the key of the last row that was read
        self._after: str | None = None
        #: advisory locks: those that the session has, or is about to ask for
        self._claims: list[int] = []

    def _make_run(self) -> Steps[None]:
        #: fields of ml_rag._embedding_job and what ml_rag._make_run has beside them
        self._job: dict[str, Any] = yield Statement(function("_make_run(oid, jsonb)"), self.session.given)
        self._job["call"] = self.session.call
        self.relation = self._job["vector_store"]
        #: batches that may still be read; None: all
        self._batches: int | None = self._job["batches"]

    def begin(self) -> Steps[None]:
        yield Statement(function("_check_embedding_table(oid)"), self.session.given)
        yield from self._make_run()

    def enter(self, step: str) -> Steps[None]:
        job = self._job
        if step == "make":
            self.session.stage("embed", job["model_id"])
            self.tell("embedding")
            return
        parts = [part["oid"] for part in (self._parts or [])[:1] if part["shard"] is None]
        held = [job["relation"], job["store"], *parts]
        yield from call(
            "_hold_filled(oid[], oid[], oid, oid)",
            *(f"{{{','.join(map(str, held))}}}", f"{{{job['store']}}}", job["store"], job["owner"]),
        )

    def read(self) -> Steps[Batch | None]:
        # given back after the commit of what they were for
        self._unlock()
        yield from self._count_truncated()
        if self._batches == 0:
            return None
        if not self._parts:
            if self._parts is not None and self._found == 0:
                return None
            if self._parts is None:
                yield from self._count()
            self._found = 0
            self._parts = yield from self._leaves()
            return {} if self._parts else None
        claimed = yield from self._claim(self._parts[0])
        if claimed is None:
            del self._parts[0]
            self._after = None
        return (yield from self._read_rows(self._parts[0], claimed)) if claimed else {}

    def _count(self) -> Steps[None]:
        """How many rows are pending, counted once the table is held."""
        self.tell("counting rows")
        self.total = yield from call("_count_waiting(oid)", self._job["relation"])
        if self._batches is not None:
            self.total = min(self.total or 0, self._batches * self._job["batch_size"])

    def _leaves(self) -> Steps[list[dict[str, Any]]]:
        parts = yield from run(
            "SELECT json_agg(json_build_object('oid', p.oid, 'name', p.name, 'shard', p.shard,"
            f" 'waiting', ml_rag._waiting(p.name, ($1 ->> 'relation')::oid, {array('key')}::name[]),"
            f" 'key', ml_rag._key_text('t', {array('key')}::name[])) ORDER BY p.oid)"
            " FROM ml_rag._filled_parts(($1 ->> 'store')::oid) AS p",
            **{name: self._job[name] for name in ("relation", "store", "key")},
        )
        return parts or []

    def _claim(self, part: dict[str, Any]) -> Steps[list[tuple[str, str]] | None]:
        """Place and key of the next rows that wait and that no other run has claimed; None: no more wait."""
        job = self._job
        columns = ", ".join(f"t.{identifier(name)}" for name in job["key"])
        values = ", ".join(f"(($1 ->> 'after')::text[])[{i}]::{name}" for i, name in enumerate(job["key_types"], 1))
        after = "" if self._after is None else f" AND ({columns}) > ({values})"
        found = yield from run(
            f"""
            SELECT json_agg(json_build_array(c.place, c.key,
              hashtextextended(format('ml_rag vectorizer %s %s', $1 ->> 'store', c.key), 0)) ORDER BY c.n)
            FROM (
              SELECT w.*, row_number() OVER former AS n, sum(w.bytes) OVER former - w.bytes AS former
              FROM (SELECT t.ctid AS place, {part["key"]} AS key, coalesce(octet_length(t.segment), 0) AS bytes
                    {part["waiting"]}{after} ORDER BY {columns} LIMIT ($1 ->> 'size')::integer) AS w
              WINDOW former AS (ROWS UNBOUNDED PRECEDING)
            ) AS c WHERE c.former <= ($1 ->> 'bytes')::bigint""",
            by_index=True, on=part["shard"], after=self._after, store=job["store"], size=job["batch_size"],
            bytes=_MOST_BYTES if job["request"] is None else _MOST_BYTES_SPLIT,
        )  # fmt: skip
        if not found:
            return None
        self._after = found[-1][1]
        self._claims = [claim for _, _, claim in found]
        are_free = yield from run(
            "SELECT json_agg(pg_try_advisory_lock(c.claim::bigint) ORDER BY c.n)"
            " FROM json_array_elements_text($1 -> 'claims') WITH ORDINALITY AS c (claim, n)",
            claims=self._claims,
        )
        self._claims = [claim for claim, is_free in zip(self._claims, are_free, strict=True) if is_free]
        return [(place, key) for (place, key, _), is_free in zip(found, are_free, strict=True) if is_free]

    def _read_rows(self, part: dict[str, Any], rows: list[tuple[str, str]]) -> Steps[Batch]:
        """The texts of rows, read after the claim: another run may have finished one before it.

        What needs no model to be refused is.
        """
        found = yield from run(
            f"""
            SELECT json_agg(json_build_array(r.place, r.key, r.text, CASE
              WHEN r.bytes > 1000000 THEN json_build_object('sqlstate', '54000', 'message', 'the text is too long',
                'detail', format('It has %s bytes; at most 1000000 are embedded.', r.bytes), 'final', true)
              WHEN coalesce(r.text, '') !~ '[^[:space:]]' THEN
                json_build_object('sqlstate', '22023', 'message', 'the text is empty', 'final', true) END) ORDER BY r.n)
            FROM (
              SELECT u.place, u.key, u.n, octet_length(t.segment) AS bytes, t.segment AS text
              FROM ROWS FROM (json_array_elements_text($1 -> 'places'), json_array_elements_text($1 -> 'keys'))
                WITH ORDINALITY AS u (place, key, n)
              JOIN ONLY {part["name"]} AS t ON t.ctid = u.place::tid WHERE t.segment_embedding IS NULL
            ) AS r""",
            on=part["shard"], places=[place for place, _ in rows], keys=[key for _, key in rows],
        )  # fmt: skip
        fields = zip(*found, strict=True) if found else ()
        return dict(zip(("places", "keys", "texts", "errors"), map(list, fields), strict=True)) if found else {}

    def make(self, batch: Batch) -> Steps[Any]:
        """Vectors, or segments; errors go into the batch."""
        yield from ()
        job, errors = self._job, batch["errors"]
        good = [i for i, error in enumerate(errors) if error is None]
        texts = [batch["texts"][i] for i in good]
        if job["request"] is None:
            made: list[str | None] = [None] * len(errors)
            found, failed, truncated = vectors.embed_apart(self.session, texts, job["model_id"])
            for i, vector, error in zip(good, found, failed, strict=True):
                made[i], errors[i] = vector, error and vectors.error_of(error)
            self._truncated += truncated
            return made
        if not good:
            return None
        with calls.waiting(self.session.plpy, "ml_rag.embed", "embed", job["model_id"]):
            split = segments.embed(self.session.server(), texts, job["request"])
        for i, error in zip(good, split["errors"], strict=True):
            errors[i] = error
        split["texts"] = [good[n - 1] + 1 for n in split["texts"]]
        return split

    def write(self, batch: Batch, made: Any) -> Steps[None]:
        errors, part = batch["errors"], (self._parts or [])[0]
        places, texts = batch["places"], batch["texts"]
        if self._job["request"] is None:
            written, kept = yield from vectors.write_vectors(
                *(part["name"], part["shard"]), "segment_embedding", "segment", self._job["type"], places, texts, made
            )
            for i in kept:
                errors[i] = _KEPT
        else:
            written = (yield from self._write_segments(places, texts, made)) if made else 0
        self._found += written
        self._embedded += written
        self.failed += yield from run(
            f"SELECT to_json(ml_rag._note_failures(($1 ->> 'relation')::oid, {array('keys')}, {array('texts')},"
            f" {array('errors', 'jsonb')}))",
            relation=self._job["relation"], keys=batch["keys"], texts=texts, errors=errors,
        )  # fmt: skip
        self.done = self._embedded + self.failed
        self._batches = None if self._batches is None else self._batches - 1

    def _write_segments(self, places: list[str], texts: list[str], made: dict[str, Any]) -> Steps[int]:
        """Write the segments of rows that still have that text and that no other transaction is changing."""
        job = self._job
        columns = ", ".join(map(identifier, job["key"]))
        of_free = ", ".join(f"f.{identifier(name)}" for name in job["key"])
        schema = job["type"].rpartition(".")[0]
        metadata = "m.metadata || f.metadata"  # which has columns of the row
        if job["key_types"] not in (["smallint"], ["integer"], ["bigint"]):  # a key that document_id cannot be
            pairs = (f"{literal(name[7:])}, f.{identifier(name)}" for name in job["key"])
            metadata += f" || jsonb_build_object({', '.join(pairs)})"
        written: int = yield from run(
            f"""
            WITH made AS MATERIALIZED (
              SELECT p.n::bigint, p.number::integer, p.segment, p.metadata::jsonb AS metadata,
                p.vector::{job["type"]} AS vector
              FROM ROWS FROM (json_array_elements_text($1 -> 'of'), json_array_elements_text($1 -> 'numbers'),
                json_array_elements_text($1 -> 'segments'), json_array_elements_text($1 -> 'metadata'),
                unnest($2::{schema}.vector[])) AS p (n, number, segment, metadata, vector)
            ), free AS MATERIALIZED (
              SELECT t.ctid AS place, t.*, u.n
              FROM ROWS FROM (json_array_elements_text($1 -> 'places'), json_array_elements_text($1 -> 'texts'))
                WITH ORDINALITY AS u (place, text, n)
              JOIN {job["table"]} AS t ON t.ctid = u.place::tid
              WHERE u.n IN (SELECT m.n FROM made AS m) AND t.segment_embedding IS NULL
                AND t.segment COLLATE "C" = u.text
              FOR NO KEY UPDATE OF t SKIP LOCKED
            ), written AS (
              UPDATE {job["table"]} AS t SET segment = m.segment, metadata = {metadata}, segment_embedding = m.vector
              FROM free AS f JOIN made AS m ON m.n = f.n AND m.number = 1 WHERE t.ctid = f.place
              RETURNING 1
            ), more AS (
              INSERT INTO {job["table"]} ({columns}, document_id, document_name, text_hash, segment_number, segment,
                metadata, segment_embedding)
              SELECT {of_free}, f.document_id, f.document_name, f.text_hash, m.number, m.segment, {metadata}, m.vector
              FROM free AS f JOIN made AS m ON m.n = f.n AND m.number > 1
            )
            SELECT to_json(count(*)) FROM written""",
            vectors=made["vectors"], places=places, texts=texts, of=made["texts"],
            **{name: made[name] for name in ("numbers", "segments", "metadata")},
        )  # fmt: skip
        return written

    def _count_truncated(self) -> Steps[None]:
        """Add to those of the vectorizer; in a short transaction, as runs wait for each other."""
        if self._truncated > self._counted:
            yield from run(
                "WITH counted AS (INSERT INTO ml_rag.vectorizer_truncated AS t (relation, texts)"
                " VALUES (($1 ->> 'relation')::oid, ($1 ->> 'n')::bigint)"
                " ON CONFLICT ON CONSTRAINT vectorizer_truncated_pkey DO UPDATE SET texts = t.texts + excluded.texts"
                " RETURNING 1) SELECT to_json(count(*)) FROM counted",
                relation=self._job["relation"], n=self._truncated - self._counted,
            )  # fmt: skip
            self._counted = self._truncated

    def finish(self) -> Steps[None]:
        # errors of rows that are deleted, have another key or an embedding by now
        key = yield from run(f"SELECT to_json(ml_rag._key_text('t', {array('key')}::name[]))", key=self._job["key"])
        yield from run(
            "WITH gone AS (UPDATE ml_rag.vectorizer_error AS e SET attempts = 0"
            " WHERE e.relation = ($1 ->> 'relation')::oid AND e.key IN ("
            "SELECT n.key FROM ml_rag.vectorizer_error AS n WHERE n.relation = ($1 ->> 'relation')::oid"
            f" EXCEPT SELECT {key} FROM {self._job['table']} AS t WHERE t.segment_embedding IS NULL)"
            " RETURNING 1) SELECT to_json(count(*)) FROM gone",
            relation=self._job["relation"],
        )
        if self._batches != 0 and self._embedded and self._job["index_method"] is not None:
            yield COMMIT
            yield from self.enter("finish")
            self.session.stage("index")
            self.tell("building index")
            yield Statement(f"SELECT NULL FROM ml_rag._index_vectorizer({_JOB})", json.dumps(self._job))

    def end(self) -> Steps[dict[str, Any]]:
        job = self._job
        pending = yield from call("_warn_of_run(oid, oid, bigint)", job["relation"], job["store"], self.failed)
        self._warn_of_truncation()
        return {
            "relation": self.relation,
            "embedded": self._embedded,
            "failed": self.failed,
            "pending": pending,
            "seconds": round(time.monotonic() - self._began, 3),
        }

    def _warn_of_truncation(self) -> None:
        if self._truncated:
            shown, quoted = self.relation, self.session.plpy.quote_literal(self.relation)
            self.warn(
                f'the model cut the texts of {self._truncated} rows of "{shown}"',
                f"They are longer than model {self._job['model_id']} takes in;"
                " searches by meaning do not see the rest.",
                f"To split texts into segments, first: SELECT ml_rag.drop_vectorizer({quoted}); then: "
                f'SELECT ml_rag.create_vectorizer({quoted}, \'{{"columns": …, "destination": "table"}}\');',
            )

    def followed_by(self, result: dict[str, Any]) -> Derived | None:
        self.session.fallback = {"result": result, "store": self.relation}
        return NodeGroups(replace(self.session, routine="fill_node_groups", given=json.dumps([self._job["relation"]])))

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


class Written(Vectorizer):
    """Rows that a statement has written, in its own transaction."""

    must_commit = False

    def begin(self) -> Steps[None]:
        yield from self._make_run()
        keys = json.loads(self.session.given)[2]
        self.total = len(keys)
        self._portions = [keys[i : i + _AT_ONCE] for i in range(0, len(keys), _AT_ONCE)]
        self._parts = yield from self._leaves()
        self._left = list(self._portions)

    def enter(self, step: str) -> Steps[None]:
        yield from ()

    def read(self) -> Steps[Batch | None]:
        if not self._left and self._parts:
            del self._parts[0]
            self._left = list(self._portions)
        if not self._parts:
            return None
        part = self._parts[0]
        rows = yield from run(
            "SELECT json_agg(json_build_array(r.place, r.key) ORDER BY r.key) FROM ("
            f"SELECT t.ctid AS place, {part['key']} AS key FROM ONLY {part['name']} AS t"
            " WHERE t.segment_embedding IS NULL) AS r"
            f" WHERE r.key = ANY ({array('keys')})",
            by_index=True, keys=self._left.pop(0),
        )  # fmt: skip
        return (yield from self._read_rows(part, rows)) if rows else {}

    def finish(self) -> Steps[None]:
        yield from ()

    def followed_by(self, result: dict[str, Any]) -> Derived | None:
        return None

    def end(self) -> Steps[dict[str, Any]]:
        yield from ()
        self._warn_of_truncation()
        return {}
