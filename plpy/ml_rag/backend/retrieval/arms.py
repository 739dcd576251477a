"""The kinds of arms, as records. CONTRIBUTING.md has the recipe for another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

#: shape.Arm and rows.Rows, which know of the kinds
Arm = Any
Rows = Any


class Unit(NamedTuple):
    """What the candidates of an arm are ordered by: a column of its common table expressions."""

    column: str
    is_descending: bool = False
    #: of a limit
    type_name: str = "float8"

    @property
    def order(self) -> str:
        return f"{self.column} DESC" if self.is_descending else self.column

    @property
    def within(self) -> str:
        return f"{self.column} {'>=' if self.is_descending else '<='}"


#: from the question; every candidate has it, whichever arm has found it
DISTANCE = Unit("distance", type_name="numeric")
#: of BM25: keyword_score of a hit
WORDS = Unit("score", is_descending=True)


class Kind(NamedTuple):
    """What ``search`` of an arm says.

    ``look_up``: how the arm searches a store, of (search.Search, shape.Source, shape.Arm, request.AskedArm, place of
    the arm, number of the store): the source, and what of the store is read (shape.Near and the like); it may look up
    something first, and put it into ``Search.values``. Raises search.NoIndex where it cannot search the store.

    ``value``: what fusing adds up of a candidate, as SQL: 0 or more.
    """

    name: str
    look_up: Callable[[Any, Any, Any, Any, int, int], tuple[Any, Any]]
    unit: Callable[[Arm], Unit]
    value: Callable[[Arm, Rows], str]
    #: where the call gives no weights, families count the same as far as their scores are as clear
    family: str
    #: how explain and ml_rag.activity call it
    stage: str
    #: whether it is searched with a vector, unless its function takes texts
    takes_vectors: bool = False
    #: whether something is found out before the statement runs
    looks_up: bool = True
    #: whether it asks an index for the best, so that a sample may say how many rows pass a filter
    has_index: bool = True
    #: whether a shard can run it by itself
    is_shipped: bool = True
    #: whether its worst candidate stands for nothing, when it is said how clear the arm is; else 0 does
    has_floor: bool = False


def _similarity(arm: Arm, rows: Rows) -> str:
    if arm.has_embedding:  # some models give all texts nearly the same: docs/embeddings.md
        return _share_of_range(arm, rows)
    return f"({rows.similarity(arm.unit.column)})::float8"


def _share_of_range(arm: Arm, rows: Rows) -> str:
    # halves, since the difference of two numbers can be more than there are
    best, worst = ("max", "min") if arm.unit.is_descending else ("min", "max")
    own, top, low = "own::float8 / 2", f"{best}(own::float8) OVER () / 2", f"{worst}(own::float8) OVER () / 2"
    return f"CASE WHEN {top} = {low} THEN 1 ELSE ({own} - {low}) / ({top} - {low}) END"


SEMANTIC = Kind(
    "semantic",
    look_up=lambda search, source, arm, asked, place, i: search.near(source, arm, place, i),
    unit=lambda arm: Unit("own") if arm.has_own_vector or arm.in_nodes else DISTANCE,
    value=_similarity,
    family="meaning",
    stage="search",
    takes_vectors=True,
    looks_up=False,
    has_floor=True,
)
KEYWORD = Kind(
    "keyword",
    look_up=lambda search, *asked: search.words(*asked),
    unit=lambda arm: WORDS,
    value=lambda arm, rows: "score",
    family="other",
    stage="keyword",
)
FUNCTION = Kind(
    "function",
    look_up=lambda search, *asked: search.by_function(*asked),
    unit=lambda arm: Unit("own", is_descending=arm.is_descending),
    value=_share_of_range,
    family="other",
    stage="function",
    has_index=False,
    is_shipped=False,
)
KINDS = {kind.name: kind for kind in (SEMANTIC, KEYWORD, FUNCTION)}
