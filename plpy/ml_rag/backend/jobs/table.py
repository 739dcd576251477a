"""ml_rag, ml_generate and ml_embed for every row of a table (sql/batch)."""

from __future__ import annotations

import json
import re
from typing import Any

from ml_rag.backend import calls, embed
from ml_rag.backend.jobs.loop import (
    MOST_BYTES,
    Batch,
    CreatedAgain,
    Derived,
    Session,
    Statement,
    Steps,
    call,
    function,
    later,
    run,
)
from ml_rag.errors import MlRagError

_PHASES = {"ml_rag_table": "answering", "ml_generate_table": "generating", "ml_embed_table": "embedding"}
#: SQLSTATEs that end the call, not a row: each row would get 08006, and a cancel would not stop the rows after it
_OF_ALL = ("57014", "08006")


class Table(Derived):
    """What waits are the rows without a result, or with an error; none is claimed: the later of two results stays."""

    must_commit = False

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._phase = _PHASES[session.routine]
        self._last: str | None = None
        self._is_last = False
        #: rows whose texts the model has cut
        self._cut = 0
        self._first_error: str | None = None
        #: without key and detail, which can hold a row's text: for the warning, which PostgreSQL writes into its log
        self._first_told: str | None = None

    def begin(self) -> Steps[None]:
        #: of ml_rag._begin_table; as text, too, as Python's numbers are others than those of options
        job = yield Statement(
            function("_begin_table(text, text, text, jsonb)").replace("to_json(r)", "to_json(r::text)"),
            self.session.given,
        )
        self._job_text: str = job
        self._job = json.loads(job)
        self.relation = self._job["relation"]
        self.tell("counting rows")
        yield from self.enter("read")
        self.total = yield from run(self._job["count"])

    def enter(self, step: str) -> Steps[None]:
        # The statements refer to tables by name: if one is renamed, another role can create a view of its name.
        yield from call("_hold_names(jsonb)", self._job["names"])
        if (known := self._job["vectors"]) is None:
            return
        found = yield from call("_vectors_of(oid, name)", known["relation"], known["column"])
        if found != known:
            former, now = known["model_id"] or "no model", (found or {}).get("model_id") or "no model"
            raise CreatedAgain(
                f'column "{known["column"]}" of vectors was dropped, created again or marked during the call',
                detail=f"It was of {former}, and is of {now} now.",
                hint="Call again.",
            )

    def read(self) -> Steps[Batch | None]:
        if self._is_last:
            return None
        size = self._job["batch_size"]
        begin, end = self._job["read"]
        after = "" if self._last is None else f" AND {later('t', self._job['key'], self._job['key_types'])}"
        rows = (yield from run(begin + after + end, after=self._last, size=size, most=MOST_BYTES)) or []
        self._is_last = len(rows) < size and sum(row["size"] for row in rows) <= MOST_BYTES
        self.tell(self._phase)
        return {"rows": rows} if rows else None

    def make(self, batch: Batch) -> Steps[list[str | None]]:
        """Vectors of the rows, all at once; None where that fails: the rows are tried one by one then."""
        yield from ()
        rows = batch["rows"]
        texts = [row["input"] or "" for row in rows]
        if self.session.routine != "ml_embed_table":
            return [None] * len(rows)
        # a blank text, or one that is too long, is an error of its row, so it travels as something else
        asked = [text if text.strip() else "blank" for text in texts]
        model, truncate = self._job["model"], self._job["options"].get("truncate")
        try:
            with calls.waiting(self.session.plpy, "ml_rag.embed", "embed", model):
                if truncate:
                    vectors, cut = embed.embed_counted(self.session.server(), asked, model)
                    self._cut += cut
                else:
                    vectors = embed.embed(self.session.server(), asked, model, "document", truncate=False)
        except MlRagError as e:
            if e.sqlstate in _OF_ALL:
                raise
            return [None] * len(rows)
        return [vector if text.strip() else None for vector, text in zip(vectors, texts, strict=True)]

    def write(self, batch: Batch, made: list[str | None]) -> Steps[None]:
        rows = batch["rows"]
        # a row that is only written costs little more than to tell of it
        every = 100 if self.session.routine == "ml_embed_table" else 1
        for i, (row, vector) in enumerate(zip(rows, made, strict=True), 1):
            error = yield Statement(
                "SELECT to_json(ml_rag._run_row($1::jsonb -> 'job', $1::jsonb -> 'row',"
                f" $2[1]::{self.session.schema}.vector))",
                f'{{"job": {self._job_text}, "row": {json.dumps(row)}}}',
                [vector],
            )
            self.done += 1
            self._last = row["key"]
            if error is not None:
                self.failed += 1
                self._first_error = self._first_error or f"row {row['key']}: {error}"
                told = re.match(r".*? \([0-9A-Z]{5}\)", error, re.S)
                self._first_told = self._first_told or (told[0] if told else None)
            if i % every == 0 or i == len(rows):
                self.tell(self._phase)

    def end(self) -> Steps[dict[str, Any]]:
        yield from ()
        if self.failed:
            self.warn(
                f"{self.failed} of {self.done} rows failed",
                f"First error: {self._first_told}.",
                'The result names its row, under "first_error". The next call tries failed rows again.',
            )
        if self._cut:
            self.warn(
                f"the model cut the texts of {self._cut} rows",
                f"They are longer than model {self._job['model']} takes in; searches by meaning do not see the rest,"
                " and hybrid searches give them less weight.",
                'ml_rag.create_vectorizer with "destination": "table" splits texts into segments.',
            )
        return {
            "rows": self.done,
            "succeeded": self.done - self.failed,
            "failed": self.failed,
            "first_error": self._first_error,
        }
