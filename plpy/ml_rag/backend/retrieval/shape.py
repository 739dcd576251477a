"""What the text of a statement depends on: the shape of a request, and how each of its arms searches each store."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ml_rag.backend.retrieval.arms import KINDS, Kind, Unit
from ml_rag.backend.retrieval.sqltext import literal
from ml_rag.backend.retrieval.stores import Embedding, Metric, Store

#: rows.Rows, which knows of these
Rows = Any

#: fetched beyond the n nearest, at most: to see whether the last place is shared. Of equal distances those that come
#: first by name are wanted, and an index does not know names
SPARE = 4
#: of more rows that share the last place all are sorted
MOST_FETCHED = 700


class Arm(NamedTuple):
    """One way to search. ``search``: the name of its kind."""

    search: str
    candidates: int
    #: how it is reported
    name: str = ""
    #: whether it drops what is beyond a limit of its own: a distance, or a score
    has_limit: bool = False
    #: whether it searches with another vector than the one that distances are measured from
    has_own_vector: bool = False
    #: whether it searches a node group: a segment counts as its best node does
    in_nodes: bool = False
    #: whether it compares vectors of another column than the stores' own
    has_embedding: bool = False
    #: of a function: whether more is better
    is_descending: bool = True
    #: arms of one part share what is the part's in a weighted fusion
    part: int = 1

    @property
    def kind(self) -> Kind:
        return KINDS[self.search]

    @property
    def unit(self) -> Unit:
        return self.kind.unit(self)

    @property
    def expression(self) -> str:
        """The name of its common table expression."""
        return (self.name or self.search).replace(" ", "")


class Shape(NamedTuple):
    """What of a request the text of its statement depends on."""

    arms: tuple[Arm, ...]
    n: int
    metric: Metric
    has_vector: bool
    #: weighted, auto (weights that the call does not give) or rrf
    fusion: str = "weighted"
    has_max_distance: bool = False
    has_percentage: bool = False
    #: neighbours on either side
    overlap: int = 0
    #: whether nodes that arms find are hits of their own
    returns_nodes: bool = False
    #: what comes out: rows, as ml_rag_search gives them; or one row with JSON, of citations or of whole hits; keys of
    #: rows and what the arm gives them
    form: str = "rows"
    #: of option citation_fields
    fields: tuple[str, ...] = ()
    #: counts: also the numbers of candidates after each step; all: also the candidates; "": neither
    told: str = ""

    def arm(self, search: str) -> Arm | None:
        return next((arm for arm in self.arms if arm.search == search), None)

    def reads_bytes(self, arm: Arm) -> bool:
        """Whether the weight of an arm depends on how long the texts are that it finds by their vectors."""
        return self.fusion == "auto" and arm.search == "semantic" and not arm.in_nodes


class Search(Protocol):
    """How the rows that an arm finds in a store are read."""

    def fragment(self, rows: Rows, i: int, source: Source, arm: Arm, place: int) -> str:
        """The common table expression of store number ``i`` and the arm at ``place``: columns of ``Rows.candidate``,
        the distance to the question, and the unit of the arm where that is another one."""


class Near(NamedTuple):
    """The nearest rows of a store: by ``index``; ``exact``, by an expression that no index serves; or ``total``, which
    settles equal distances too, at the cost of rounding each."""

    sort: str
    limit: int
    #: halfvec or binary where only an index of such smaller vectors serves the metric
    quantization: str | None = None
    #: the column, where it is not the store's own; and the parameter with what it is compared with
    embedding: Embedding | None = None
    slot: str = "vector"
    #: how many rows of such an index are scored again by the whole vectors; None = by default
    rescore: int | None = None

    @classmethod
    def first(cls, n: int) -> Near:
        return cls("index", n + min(1 + n // 10, SPARE))

    @classmethod
    def filtered(cls, n: int, *, is_narrow: bool) -> Near:
        """Under a filter: an index scan continues past rows that are left out, in a relaxed order."""
        return cls("exact" if is_narrow else "index", n + n // 10 + 8)

    def further(self, n: int) -> Near:
        """Where more rows share the last place."""
        if self.limit > MOST_FETCHED:
            return self._replace(sort="total", limit=n, quantization=None)
        return self._replace(limit=self.limit * 4)

    @property
    def rescored(self) -> int:
        """How many rows of an index of smaller vectors are scored again by the whole ones (docs/embeddings.md)."""
        default = max(400, 20 * self.limit) if self.quantization == "binary" else 2 * self.limit
        return max(self.limit, self.rescore or default)

    def fragment(self, rows: Rows, i: int, source: Source, arm: Arm, place: int) -> str:
        text: str = rows.near(i, source, arm, self)
        return text


class Words(NamedTuple):
    """Rows that the keyword index has found: the columns that tell its rows apart, their types, and the table."""

    key: tuple[str, ...]
    key_types: tuple[str, ...]
    rows: str

    def fragment(self, rows: Rows, i: int, source: Source, arm: Arm, place: int) -> str:
        text: str = rows.words(i, source, place, self)
        return text


class Nodes(NamedTuple):
    """Segments whose nodes an arm has found in a node group."""

    #: as it is written into a statement
    table: str
    #: columns of the store's key, in the group and in the store
    key: tuple[str, ...]
    store_key: tuple[str, ...]
    #: the column of the store that tells documents apart, where nodes are of whole documents
    document: str | None
    #: of its vectors, where their distance to the question is that of the store's; else None
    embedding_type: str | None

    def fragment(self, rows: Rows, i: int, source: Source, arm: Arm, place: int) -> str:
        text: str = rows.nodes(i, source, arm, place, self)
        return text


class Given:
    """Hits that were found elsewhere, as JSON: ``GIVEN``, the only one, for plans are kept by it."""

    def fragment(self, rows: Rows, i: int, source: Source, arm: Arm, place: int) -> str:
        text: str = rows.given(i, arm, place)
        return text


GIVEN = Given()


class Source(NamedTuple):
    """A store, and how each arm searches it; None = it cannot."""

    store: Store
    searches: tuple[Search | None, ...] = ()
    #: of ml_rag.filter: which rows count at all, in terms of its arguments; "" = all
    condition: str = ""
    #: which list of values that is, of those that the stores compare with
    filter: int = 1
    #: whether the rows that pass it are few, and given
    is_narrow: bool = False
    #: whether its vectors have as many dimensions as that of the question
    is_measured: bool = True
    #: partitions that are read one by one, as they are written into a statement; None = the store as a whole
    leaves: tuple[str, ...] | None = None
    #: names of its columns, where partitions are left out
    columns: tuple[str, ...] = ()

    @property
    def rows(self) -> str:
        """What has all of its rows."""
        if self.leaves is None or not self.columns:
            return self.store.rows
        columns = ", ".join(self.columns)
        return "(" + " UNION ALL ".join(f"SELECT {columns} FROM {leaf}" for leaf in self.leaves) + ")"


class Statement(NamedTuple):
    text: str
    #: names of its parameters, each with its type
    slots: dict[str, str]


class Slots:
    """The parameters of a statement, numbered as they are first used."""

    #: those that come first where rows are filtered: conditions are written for these numbers
    before_filter: tuple[tuple[str, str], ...] = (("nothing", "int4"),)

    def __init__(self) -> None:
        #: names, each with its type
        self.types: dict[str, str] = {}
        self._numbers: dict[str, int] = {}

    def __call__(self, name: str, type_name: str) -> str:
        self.types.setdefault(name, type_name)
        return f"${self._numbers.setdefault(name, len(self.types))}"

    @classmethod
    def filter(cls, place: int) -> str:
        """What the conditions of ml_rag.filter compare with; ``place``: of several lists of values, from 1."""
        return f"${2 + place}"

    def parts(self) -> list[tuple[str, str]]:
        """Common table expressions that come first."""
        return []


class Values(Slots):
    """The values themselves, as one row of the statement: for those who want to read it or run it."""

    before_filter = ()

    def __init__(self, values: dict[str, object]) -> None:
        super().__init__()
        self._values = values

    def __call__(self, name: str, type_name: str) -> str:
        self.types.setdefault(name, type_name)
        return f"(SELECT {name} FROM question)"

    @classmethod
    def filter(cls, place: int) -> str:
        return f"(SELECT {filter_slot(place)} FROM question)"

    def parts(self) -> list[tuple[str, str]]:
        columns = ",\n    ".join(
            f"{_constant(self._values[name])}::{type_name} AS {name}" for name, type_name in self.types.items()
        )
        return [("question AS MATERIALIZED", f"SELECT {columns}")] if columns else []


def filter_slot(place: int) -> str:
    """The name of the parameter with values of filters."""
    return "filter" if place == 1 else f"filter_{place}"


def _constant(value: object) -> str:
    """A value as it is written into a statement."""
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return "ARRAY[" + ", ".join(map(_constant, value)) + "]"
    return literal(value) if isinstance(value, str) else repr(value)
