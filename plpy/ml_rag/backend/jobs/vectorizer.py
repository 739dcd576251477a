"""ml_rag.run_vectorizer: the rows of a table that wait for their embedding, or for their segments (sql/vectorizer)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ml_rag.backend import calls, segments
from ml_rag.backend.jobs.column import KEPT, Column
from ml_rag.backend.jobs.loop import (
    COMMIT,
    Batch,
    Derived,
    Session,
    Statement,
    Steps,
    array,
    call,
    function,
    later,
    run,
)
from ml_rag.backend.jobs.node_group import NodeGroups
from ml_rag.backend.load import INSERT_SEGMENTS
from ml_rag.backend.retrieval.sqltext import identifier, literal
from ml_rag.files import batches

#: key of the row that it is of, number, text, metadata and vector of a segment
_Row = tuple[str, int, str, str, str]

#: rows that are embedded at once in the transaction that writes them
_AT_ONCE = 256
#: rows that are looked for at once, which can lie in many partitions
_LOOKED_FOR = 4096


class Vectorizer(Column):
    """What waits are rows without an embedding, whose last failure is not too recent."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        #: of the texts that the model has cut those that are counted already
        self._counted = 0

    def _make_run(self) -> Steps[None]:
        self._set_job((yield Statement(function("_make_run(oid, jsonb)"), self.session.given)))
        #: batches that may still be read; None: all
        self._batches: int | None = self._job["batches"]
        if self._job["request"] is not None:
            # texts that become many segments
            self.most_bytes = 1_000_000

    def begin(self) -> Steps[None]:
        yield Statement(function("_check_embedding_table(oid)"), self.session.given)
        yield from self._make_run()
        if self._job["store"] != self._job["relation"]:
            yield from call("_check_embedding_table(oid)", self._job["store"])

    def _look_up(self) -> Steps[dict[str, Any]]:
        found: dict[str, Any] = yield from call("_find_vectorizer(oid)", self._job["relation"])
        return found

    def read(self) -> Steps[Batch | None]:
        yield from self._count_truncated()
        return None if self._batches == 0 else (yield from super().read())

    def _count(self) -> Steps[int]:
        n: int = yield from call("_count_waiting(oid)", self._job["relation"])
        return n if self._batches is None else min(n, self._batches * self._job["batch_size"])

    def _key(self) -> Steps[tuple[str, str]]:
        """SQL of the rows t of the part that wait, and of the text of their key."""
        found = yield from run(
            f"SELECT json_build_array(ml_rag._waiting($1 ->> 'part', ($1 ->> 'relation')::oid, {array('key')}::name[]),"
            f" ml_rag._key_text('t', {array('key')}::name[]))",
            part=self._part["name"], relation=self._job["relation"], key=self._job["key"],
        )  # fmt: skip
        return found[0], found[1]

    def _has_key(self, alias: str, key: str) -> str:
        """SQL of the condition that a row has a key, which is given as text."""
        columns = zip(self._job["key"], self._job["key_equals"], self._job["key_types"], strict=True)
        return " AND ".join(
            f"{alias}.{identifier(name)} {equals} ({key}::text[])[{i}]::{kind}"
            for i, (name, equals, kind) in enumerate(columns, 1)
        )

    def _next_rows(self) -> Steps[list[list[Any]]]:
        job = self._job
        waiting, key = yield from self._key()
        columns = ", ".join(f"t.{identifier(name)}" for name in job["key"])
        after = "" if self._after is None else f" AND {later('t', job['key'], job['key_types'])}"
        claim = f"'vectorizer {job['store']} ', r.key"
        rows, _ = yield from self._find(waiting + after, order=columns, key=key, claim=claim)
        self._is_through = not rows
        if rows:
            self._after = rows[-1][1]
        return rows

    def make(self, batch: Batch) -> Steps[Any]:
        if self._job["request"] is None:
            return (yield from super().make(batch))
        errors = batch["errors"]
        good = [i for i, error in enumerate(errors) if error is None]
        if not good:
            return None
        with calls.waiting(self.session.plpy, "ml_rag.embed", "embed", self._job["model_id"]):
            found, failed = segments.embed(
                self.session.server(), [batch["texts"][i] for i in good], self._job["request"]
            )
        for i, error in zip(good, failed, strict=False):
            errors[i] = error
        if len(failed) < len(good):
            self._put_back(batch, good[len(failed)])
        return {i: lines for i, lines in zip(good, found, strict=False) if lines}

    def _put_back(self, batch: Batch, n: int) -> None:
        """Leave all but the first n rows of a batch to the next one."""
        self._after = batch["keys"][n - 1]
        for column in batch.values():
            del column[n:]

    def write(self, batch: Batch, made: Any) -> Steps[None]:
        yield from super().write(batch, made)
        self._batches = None if self._batches is None else self._batches - 1

    def _write_made(self, batch: Batch, made: Any) -> Steps[int]:
        if self._job["request"] is None:
            return (yield from super()._write_made(batch, made))
        return (yield from self._write_segments(batch, made)) if made else 0

    def _note(self, batch: Batch) -> Steps[int]:
        """Not the failures of rows that another transaction is changing: it may have noted them, and must not be waited
        for."""
        # one that a trigger has kept is locked, and may have another place since
        errors = zip(batch["places"], batch["errors"], strict=True)
        failed = [place for place, error in errors if error not in (None, KEPT)]
        free: list[str] = []
        if failed:
            free = yield from run(
                "SELECT coalesce(json_agg(f.place), '[]') FROM (SELECT u.place"
                " FROM json_array_elements_text($1 -> 'places') AS u (place)"
                f" JOIN ONLY {self._part['name']} AS t ON t.ctid = u.place::tid"
                " FOR NO KEY UPDATE OF t SKIP LOCKED) AS f",
                on=self._part["shard"], places=failed,
            )  # fmt: skip
        left_out = {*failed} - {*free}
        noted = [i for i, place in enumerate(batch["places"]) if place not in left_out]
        given: dict[str, Any] = {name: [batch[name][i] for i in noted] for name in ("keys", "texts", "errors")}
        n: int = yield from run(
            f"SELECT to_json(ml_rag._note_failures(($1 ->> 'relation')::oid, {array('keys')}, {array('texts')},"
            f" {array('errors', 'jsonb')}))",
            relation=self._job["relation"],
            **given,
        )
        return n

    def _write_segments(self, batch: Batch, made: dict[int, list[segments.Line]]) -> Steps[int]:
        """Write the segments of rows that still have that text and that no other transaction is changing; how many."""
        job, table = self._job, self._part["name"]
        metadata = "m.metadata::jsonb || t.metadata"  # which has columns of the row
        if job["key_types"] not in (["smallint"], ["integer"], ["bigint"]):  # a key that document_id cannot be
            pairs = (f"{literal(name[7:])}, t.{identifier(name)}" for name in job["key"])
            metadata += f" || jsonb_build_object({', '.join(pairs)})"
        source = (
            "FROM ROWS FROM (json_array_elements_text($1 -> 'keys'), json_array_elements_text($1 -> 'numbers'),"
            " json_array_elements_text($1 -> 'segments'), json_array_elements_text($1 -> 'metadata'),"
            f" unnest($2::{job['type'].rpartition('.')[0]}.vector[])) AS m (key, number, segment, metadata, vector)"
        )
        columns, values = (", ".join(f"{of}{identifier(name)}" for name in job["key"]) for of in ("", "t."))
        # not by its place: a trigger of the table can have changed it since. One by one, as for few rows
        row = f"FROM ONLY {table} AS x WHERE {self._has_key('x', 'm.key')} AND x.segment_number = 1 OFFSET 0"
        insert = (
            f"INSERT INTO {table} ({columns}, document_id, document_name, text_hash, segment_number, segment, metadata,"
            f" segment_embedding) SELECT {values}, t.document_id, t.document_name, t.text_hash, m.number::integer,"
            f" m.segment, {metadata}, m.vector::{job['type']} {source} CROSS JOIN LATERAL (SELECT x.* {row}) AS t"
        )
        update = (
            f"UPDATE ONLY {table} AS t SET segment = m.segment, metadata = {metadata},"
            f" segment_embedding = m.vector::{job['type']} {source}"
            f" CROSS JOIN LATERAL (SELECT x.ctid {row}) AS r (place) WHERE t.ctid = r.place"
        )
        free = yield from run(
            "SELECT coalesce(json_agg(f.n), '[]') FROM (SELECT u.n"
            " FROM ROWS FROM (json_array_elements_text($1 -> 'places'), json_array_elements_text($1 -> 'texts'),"
            " json_array_elements_text($1 -> 'keys'), json_array_elements_text($1 -> 'of')) AS u (place, text, key, n)"
            f" JOIN ONLY {table} AS t ON t.ctid = u.place::tid"
            # after a VACUUM another row can have the place, and the same text
            f" WHERE t.segment_embedding IS NULL AND t.segment COLLATE \"C\" = u.text AND {self._has_key('t', 'u.key')}"
            " FOR NO KEY UPDATE OF t SKIP LOCKED) AS f",
            places=[batch["places"][i] for i in made], texts=[batch["texts"][i] for i in made],
            keys=[batch["keys"][i] for i in made], of=[*made],
        )  # fmt: skip
        # the row itself last: until then it is all that it was
        firsts: list[_Row] = []
        more = (row for i in map(int, free) for row in self._rows(batch["keys"][i], made[i], firsts))
        for portion in batches(((row, len(row[2]) + len(row[3]) + len(row[4])) for row in more), INSERT_SEGMENTS):
            yield from self._write_rows(insert, portion)
        written = yield from self._write_rows(update, firsts)
        return written

    def _rows(self, key: str, lines: list[segments.Line], firsts: list[_Row]) -> Iterator[_Row]:
        """The segments of a row but for the first, which goes to ``firsts``."""
        for row in segments.numbered(lines):
            if row[0] == 1:
                firsts.append((key, *row))
            else:
                yield (key, *row)

    def _write_rows(self, statement: str, rows: list[_Row]) -> Steps[int]:
        if not rows:
            return 0
        keys, numbers, texts, metadata, vectors = map(list, zip(*rows, strict=True))
        n: int = yield from run(
            f"WITH written AS ({statement} RETURNING 1) SELECT to_json(count(*)) FROM written",
            vectors=vectors, keys=keys, numbers=numbers, segments=texts, metadata=metadata,
        )  # fmt: skip
        return n

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
        # errors of rows that are deleted, have another key or an embedding by now; no transaction that notes one is
        # waited for
        key, table = yield from run(
            f"SELECT json_build_array(ml_rag._key_text('t', {array('key')}::name[]),"
            " ml_rag._indexed_rows(($1 ->> 'store')::oid))",
            key=self._job["key"], store=self._job["store"],
        )  # fmt: skip
        yield from run(
            # the keys apart: Citus cannot read them below FOR UPDATE
            "WITH unfit AS MATERIALIZED (SELECT n.key FROM ml_rag.vectorizer_error AS n"
            " WHERE n.relation = ($1 ->> 'relation')::oid"
            f" EXCEPT SELECT ml_rag._error_key({key}) FROM {table} AS t WHERE t.segment_embedding IS NULL),"
            " gone AS (UPDATE ml_rag.vectorizer_error AS e SET attempts = 0 WHERE e.relation = ($1 ->> 'relation')::oid"
            # IS TRUE: as in ml_rag._note_failures
            " AND (e.key IN (SELECT n.key FROM ml_rag.vectorizer_error AS n WHERE n.relation"
            " = ($1 ->> 'relation')::oid AND (n.key IN (SELECT u.key FROM unfit AS u)) IS TRUE"
            " FOR UPDATE SKIP LOCKED)) IS TRUE RETURNING 1) SELECT to_json(count(*)) FROM gone",
            relation=self._job["relation"],
        )
        if self._batches != 0 and self._embedded and self._job["index_method"] is not None:
            yield COMMIT
            yield from self.enter("finish")
            yield from self._index(analyzes_all=True)

    def end(self) -> Steps[dict[str, Any]]:
        job = self._job
        yield from self.enter("finish")
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
            shown, quoted = self.relation, literal(self.relation)
            self.warn(
                f'the model cut the texts of {self._truncated} rows of "{shown}"',
                f"They are longer than model {self._job['model_id']} takes in;"
                " searches by meaning do not see the rest.",
                f"To split texts into segments, first: SELECT ml_rag.drop_vectorizer({quoted}); then: "
                f'SELECT ml_rag.create_vectorizer({quoted}, \'{{"columns": …, "destination": "table"}}\');',
            )

    def followed_by(self, result: dict[str, Any]) -> Derived | None:
        self.session.fallback = {"result": result, "store": self.relation}
        return NodeGroups(
            replace(
                self.session, routine="fill_node_groups", given=json.dumps([self._job["store"], self._job["is_judged"]])
            )
        )


class Written(Vectorizer):
    """Rows that a statement has written, in its own transaction."""

    must_commit = False

    def begin(self) -> Steps[None]:
        yield from self._make_run()
        self._keys: list[str] = json.loads(self.session.given)[2]
        self._found, self._is_last = 0, True

    def enter(self, step: str) -> Steps[None]:
        if step == "write":
            yield from call("_hold_written(oid, oid)", self._job["relation"], self._job["store"])
            yield from self._name_part()

    def read(self) -> Steps[Batch | None]:
        if self._is_through:
            self._left = self._keys
            return (yield from self._begin_part())
        # one by one by the index of rows that wait, of which there can be many others
        found = yield from run(
            "SELECT json_agg(json_build_array(r.place, r.key, r.n) ORDER BY r.n) FROM (SELECT w.place, u.key, u.n"
            " FROM json_array_elements_text($1 -> 'keys') WITH ORDINALITY AS u (key, n)"
            f" CROSS JOIN LATERAL (SELECT t.ctid AS place FROM ONLY {self._part['name']} AS t"
            f" WHERE t.segment_embedding IS NULL AND {self._has_key('t', 'u.key')} OFFSET 0) AS w"
            f" LIMIT {_AT_ONCE}) AS r",
            by_index=True, keys=self._left[:_LOOKED_FOR],
        )  # fmt: skip
        found = found or []
        self._left = self._left[found[-1][2] if len(found) == _AT_ONCE else _LOOKED_FOR :]
        self._is_through = not self._left
        return (yield from self._read_rows([row[0] for row in found], [row[1] for row in found])) if found else {}

    def _put_back(self, batch: Batch, n: int) -> None:
        self._left = batch["keys"][n:] + self._left
        self._is_through = False
        for column in batch.values():
            del column[n:]

    def finish(self) -> Steps[None]:
        yield from ()

    def followed_by(self, result: dict[str, Any]) -> Derived | None:
        return None

    def end(self) -> Steps[dict[str, Any]]:
        yield from ()
        self._warn_of_truncation()
        return {}
