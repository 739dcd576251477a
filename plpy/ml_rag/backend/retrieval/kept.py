"""Plans that a session keeps."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from ml_rag.backend.retrieval.plan import plan
from ml_rag.backend.retrieval.shape import Shape, Source, Statement

#: plans, and stores of a statement whose plan is kept
KEPT = 64
MOST_STORES = 8


class Kept(NamedTuple):
    """A prepared plan."""

    statement: Statement
    plan: Any

    def execute(self, plpy: Any, values: dict[str, Any]) -> Any:
        return plpy.execute(self.plan, [values[name] for name in self.statement.slots])


_kept: OrderedDict[Any, Kept] = OrderedDict()


def statement(plpy: Any, shape: Shape, sources: tuple[Source, ...], schema: str, ways: tuple[str, ...]) -> Kept:
    """The plan of a statement. ``ways``: enable_seqscan and enable_sort, as they are when it is made."""
    key = shape, sources, ways
    if key in _kept:
        _kept.move_to_end(key)
        return _kept[key]
    made = prepare(plpy, plan(shape, sources, schema))
    if len(sources) <= MOST_STORES:
        _kept[key] = made
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    return made


def prepare(plpy: Any, made: Statement) -> Kept:
    return Kept(made, plpy.prepare(made.text, list(made.slots.values())))
