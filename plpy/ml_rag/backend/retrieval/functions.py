"""Arms by a function of the caller's: it scores all rows that pass, batch by batch.

The rows are read by a cursor and scored outside of it: an error of the function is not one of the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ml_rag.backend.retrieval.plan import scored_rows
from ml_rag.backend.retrieval.request import AskedArm
from ml_rag.backend.retrieval.shape import Arm, Shape, Source
from ml_rag.backend.statements import Statements

#: rows of a batch, and bytes of their texts
_MOST_ROWS, _MOST_BYTES = 1000, 4_194_304
#: rows that are fetched at a time
_PORTION = 50

_by_schema: dict[str, Statements] = {}


def _run(schema: str) -> Statements:
    if schema not in _by_schema:
        vector = f"{schema}.vector"
        text = (
            "SELECT c.scores, c.error::text AS error"
            f" FROM ml_rag._try_function($1, $2, $3, $4::{vector}, $5, $6::{vector}[], $7) AS c"
        )
        types = "text", "text", "text", "text", "text[]", "text[]", "jsonb"
        _by_schema[schema] = Statements({"call": (text, *types)})
    return _by_schema[schema]


class FunctionFailed(Exception):
    """An error of the caller's function. Its one argument is the error, as ml_rag._raise takes it."""


def score(
    context: Any, shape: Shape, source: Source, arm: Arm, asked: AskedArm, question: str, vector: str | None,
    values: dict[str, Any], i: int,
) -> tuple[str, int]:  # fmt: skip
    """The best hits of a store as JSON text, and how many rows were scored."""
    plpy = context.plpy
    made = scored_rows(shape, source, context.schema, i, takes_vectors=asked.takes_vectors)
    plan = plpy.prepare(made.text, list(made.slots.values()))
    cursor = plpy.cursor(plan, [values[name] for name in made.slots])
    best: list[tuple[Any, str]] = []
    n = 0
    try:
        for batch in _batches(cursor):
            inputs = [row["input"] for row in batch]
            given = (None, inputs) if asked.takes_vectors else (inputs, None)
            call = asked.function, asked.form, question, vector, *given, asked.arguments
            called = _run(context.schema)(plpy, "call", *call)[0]
            if called["error"] is not None:
                raise FunctionFailed(json.loads(called["error"]))
            scores = called["scores"]
            n += len(batch)
            for row, one in zip(batch, scores, strict=True):
                if one is not None:
                    order = _order(row, one, is_descending=arm.is_descending)
                    best.append((order, f'{row["hit"][:-1]}, "score": {one!r}}}'))
            best = sorted(best, key=lambda pair: pair[0])[: arm.candidates]
    finally:
        cursor.close()
    return f"[{', '.join(hit for _, hit in best)}]", n


def _batches(cursor: Any) -> Iterator[list[Any]]:
    """The rows, as many at a time as have a size: the next ones are taken to be as long as the longest before."""
    longest = _MOST_BYTES
    while True:
        batch: list[Any] = []
        left = _MOST_BYTES
        is_last = False
        while len(batch) < _MOST_ROWS and left > 0 and not is_last:
            portion = max(1, min(_MOST_ROWS - len(batch), _PORTION, left // longest))
            rows = cursor.fetch(portion)
            is_last = len(rows) < portion
            batch += rows
            sizes = [len(row["input"]) + len(row["hit"]) for row in rows]
            left -= sum(sizes)
            longest = max([1 if longest == _MOST_BYTES else longest, *sizes])
        if batch:
            yield batch
        if is_last:
            return


def _order(row: Any, score: float, *, is_descending: bool) -> tuple[Any, ...]:
    """Best first; of equals as COLLATE "C" has the names of their documents, null last."""

    def text(value: str | None) -> tuple[bool, bytes]:
        return value is None, (value or "").encode("utf-8", "surrogatepass")

    def number(value: int | None) -> tuple[bool, int]:
        return value is None, value or 0

    names = text(row["document_name"]), number(row["document_id"]), text(row["document_key"])
    return -score if is_descending else score, *names, number(row["segment_number"])
