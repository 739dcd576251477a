"""The statement of a retrieval: a pure function of the shape of a request and of the stores.

Common table expressions, in the order of the pipeline:

    near_1 …   by meaning: the nearest rows of each store, in the order of its index
    near       the nearest of all stores
    words_1 …  by words: the rows that the keyword index has found, with their scores and distances
    words      the best of all stores
    strength   how clear each arm is about the question
    weight     how much each arm counts
    ranked     what the arms have found, fused to one list
    threshold  how far a row may be
    cited      the rows that are within it, as many as wanted
    range      which neighbours of these are read, of each document without gaps
    widened    the texts of the ranges
    hit        the cited rows with their texts

Rows are known by store (its number) and row key (ctid), which hold within the snapshot of the statement. The texts of
rows are read last, but for a search by meaning alone, whose few rows have been read anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from ml_rag.backend.retrieval.sqltext import identifier, joined, literal
from ml_rag.backend.retrieval.stores import KeywordIndex, Metric, Store

#: fetched beyond the n nearest, at most: to see whether the last place is shared. Of equal distances those that come
#: first by name are wanted, and an index does not know names
SPARE = 4
#: of more rows that share the last place all are sorted
MOST_FETCHED = 700
#: the weights of arms whose scores are equally clear, and how many of its best candidates say how clear an arm is
PRIOR = {"semantic": 0.6, "keyword": 0.4}
CLEAR_BY = 30

#: settles ties, after what an arm or fusing orders by
_TIES = 'store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number'
_INTEGERS = ("smallint", "integer", "bigint")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to search: ``semantic`` or ``keyword``."""

    search: str
    candidates: int
    #: whether it drops what is beyond a limit of its own: a distance, or a score
    has_limit: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a request the text of its statement depends on."""

    arms: tuple[Arm, ...]
    n: int
    metric: Metric
    has_vector: bool
    #: weighted, auto (weighted by how clear the arms are) or rrf
    fusion: str = "weighted"
    has_max_distance: bool = False
    has_percentage: bool = False
    #: neighbours on either side
    overlap: int = 0
    #: how many rows of an index of smaller vectors are scored again by the whole ones; None = by default
    rescore: int | None = None
    #: what comes out: rows, as ml_rag_search gives them; or one row with JSON, of citations or of whole hits
    form: str = "rows"
    #: of option citation_fields
    fields: tuple[str, ...] = ()

    def arm(self, search: str) -> Arm | None:
        return next((arm for arm in self.arms if arm.search == search), None)


@dataclass(frozen=True, slots=True)
class Read:
    """How the nearest rows of a store are found: by ``index``; ``exact``, by an expression that no index serves; or
    ``total``, which settles equal distances too, at the cost of rounding each."""

    sort: str
    limit: int

    @classmethod
    def first(cls, n: int) -> Read:
        return cls("index", n + min(1 + n // 10, SPARE))

    @classmethod
    def filtered(cls, n: int, *, is_narrow: bool) -> Read:
        """Under a filter: an index goes on past what is left out, in a relaxed order."""
        return cls("exact" if is_narrow else "index", n + n // 10 + 8)

    def further(self, n: int) -> Read:
        """Where more rows share the last place."""
        return Read("total", n) if self.limit > MOST_FETCHED else Read(self.sort, self.limit * 4)


class Slots:
    """The parameters of a statement, numbered as they are first used."""

    #: what the conditions of ml_rag.filter compare with, and the parameters that are numbered before it
    filter = "$3"
    before_filter: tuple[tuple[str, str], ...] = (("nothing", "int4"),)

    def __init__(self) -> None:
        #: names, each with its type
        self.types: dict[str, str] = {}

    def __call__(self, name: str, type_name: str) -> str:
        self.types.setdefault(name, type_name)
        return f"${list(self.types).index(name) + 1}"

    def parts(self) -> list[tuple[str, str]]:
        """Common table expressions that come first."""
        return []


class Values(Slots):
    """The values themselves, as one row of the statement: for those who want to read it or run it."""

    filter = "(SELECT filter FROM question)"
    before_filter = ()

    def __init__(self, values: dict[str, object]) -> None:
        super().__init__()
        self._values = values

    def __call__(self, name: str, type_name: str) -> str:
        self.types.setdefault(name, type_name)
        return f"(SELECT {name} FROM question)"

    def parts(self) -> list[tuple[str, str]]:
        columns = ",\n    ".join(
            f"{_constant(self._values[name])}::{type_name} AS {name}" for name, type_name in self.types.items()
        )
        return [("question AS MATERIALIZED", f"SELECT {columns}")] if columns else []


def _constant(value: object) -> str:
    """A value as it is written into a statement."""
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return "ARRAY[" + ", ".join(map(_constant, value)) + "]"
    return literal(value) if isinstance(value, str) else repr(value)


@dataclass(frozen=True, slots=True)
class Statement:
    text: str
    #: names of its parameters, each with its type
    slots: dict[str, str]


@dataclass(frozen=True, slots=True)
class Source:
    """A store, and how it is searched: ``read`` by meaning, ``index`` by words."""

    store: Store
    read: Read | None = None
    index: KeywordIndex | None = None
    #: halfvec or binary where only an index of such smaller vectors serves the metric
    quantization: str | None = None
    #: of ml_rag.filter: which rows count at all, in terms of its arguments, $3; "" = all
    condition: str = ""
    #: whether the rows that pass it are few, and given
    is_narrow: bool = False


def rescored(shape: Shape, source: Source, read: Read) -> int:
    """How many rows of an index of smaller vectors are scored again by the whole ones. The defaults are measured:
    docs/embeddings.md."""
    default = max(400, 20 * read.limit) if source.quantization == "binary" else 2 * read.limit
    return max(read.limit, shape.rescore or default)


def plan(shape: Shape, sources: tuple[Source, ...], schema: str, slots: Slots | None = None) -> Statement:
    """The statement. ``schema``: pgvector's, as it is written. ``slots``: how its values stand in it; None = as
    parameters."""
    return _Plan(shape, sources, schema, slots or Slots()).statement()


class _Plan:
    def __init__(self, shape: Shape, sources: tuple[Source, ...], schema: str, slots: Slots) -> None:
        self.shape, self.sources, self.schema, self.slots = shape, sources, schema, slots
        self.semantic, self.keyword = shape.arm("semantic"), shape.arm("keyword")
        self.is_hybrid = self.semantic is not None and self.keyword is not None
        #: rows of one arm are few, and were read
        self.has_text = self.keyword is None
        if any(source.condition for source in sources):
            self._vector()
            for name, type_name in (*slots.before_filter, ("filter", "text[]")):
                slots(name, type_name)

    def statement(self) -> Statement:
        parts: list[tuple[str, str]] = []
        if self.semantic is not None:
            parts += [(f"near_{i} AS", self._near_of(i, source)) for i, source in self._numbered()]
            parts.append(("near AS", self._near(self.semantic)))
        if self.keyword is not None:
            parts += [(f"words_{i} AS", self._words_of(i, source)) for i, source in self._numbered()]
            parts.append(("words AS", self._words(self.keyword)))
        if self._is_weighted:
            if self.shape.fusion == "auto":
                parts.append(("strength AS MATERIALIZED", self._strength()))
            parts.append(("weight AS MATERIALIZED", self._weight()))
        parts.append(("ranked AS", self._ranked()))
        if self.shape.has_max_distance or self.shape.has_percentage:
            parts.append(("threshold AS", self._threshold()))
        parts.append(("cited AS", self._cited()))
        if self._widened_stores():
            parts += [("range AS", self._range()), ("widened AS", self._widened())]
        parts.append(("hit AS", self._hit()))
        answer = self._answer()
        body = ",\n".join(f"{head} (\n  {text}\n)" for head, text in self.slots.parts() + parts)
        return Statement(f"WITH {body}\n{answer}", self.slots.types)

    @property
    def _is_weighted(self) -> bool:
        return self.is_hybrid and self.shape.fusion != "rrf"

    def _numbered(self) -> list[tuple[int, Source]]:
        return list(enumerate(self.sources, 1))

    # -- rows of a store ----------------------------------------------------------------------------------------------

    def _vector(self) -> str:
        return self.slots("vector", f"{self.schema}.vector")

    def _distance(self, store: Store) -> str:
        """From a row to the question, what an index can serve."""
        operator = f"OPERATOR({self.schema}.{self.shape.metric.operator})"
        vector = self._vector()
        cast = "" if store.embedding_type == "vector" else f"::{self.schema}.{store.embedding_type}"
        return f"t.{identifier(store.segment_embedding)} {operator} {vector}{cast}"

    def _rounded(self, distance: str) -> str:
        return f"round(({distance} + {self.shape.metric.shift})::numeric, 4)"

    def _key(self, store: Store) -> str:
        """What tells rows apart, and documents: columns of a candidate."""
        name = _document_name(store)
        number = "NULL" if store.segment_number is None else f"t.{identifier(store.segment_number)}"
        if store.document_id is None:
            document = f"NULL::bigint AS document_id, {name} AS document_key"
        else:
            column = f"t.{identifier(store.document_id)}"
            integer = f"{column}::bigint" if store.document_id_type in _INTEGERS else "NULL::bigint"
            document = f"{integer} AS document_id, {column}::text AS document_key"
        return f"t.ctid AS row_key, {name} AS document_name, {document}, {number}::bigint AS segment_number"

    def _text(self, store: Store) -> str:
        metadata = "NULL::jsonb" if store.metadata is None else f"to_jsonb(t.{identifier(store.metadata)})"
        return f"t.{identifier(store.segment)}::text AS segment, {metadata} AS metadata"

    # -- arms ---------------------------------------------------------------------------------------------------------

    def _near_of(self, i: int, source: Source) -> str:
        store, read = source.store, source.read
        assert read is not None
        distance = self._distance(store)
        columns = self._key(store) + (f", {self._text(store)}" if self.has_text else "")
        if read.sort == "total":
            order = f"{self._rounded(f'({distance})')}, {_place(store)}"
        else:
            # an expression that no index has, neither here nor on another server
            distance = distance if read.sort == "index" else f"({distance}) + 0"
            order = distance
        return (
            f"SELECT {i} AS store, s.row_key, s.document_name, s.document_id, s.document_key, s.segment_number,"
            f"{' s.segment, s.metadata,' if self.has_text else ''} {self._rounded('s.distance')} AS distance\n"
            f"  FROM (SELECT {columns}, {distance} AS distance\n"
            f"    FROM {self._rows(i, source, read)}\n"
            f"    ORDER BY {order} LIMIT {read.limit}) AS s\n"
            "  WHERE abs(s.distance) < 'Infinity'"
        )

    def _rows(self, i: int, source: Source, read: Read) -> str:
        """The rows of a store that have a vector and a text, and pass the filter; those that an index of smaller
        vectors finds."""
        store = source.store
        condition = source.condition
        if source.is_narrow:
            condition = f" AND t.ctid = ANY ({self.slots(f'row_keys_{i}', 'text')}::tid[])"
        rows = (
            f"{store.table} AS t WHERE t.{identifier(store.segment_embedding)} IS NOT NULL"
            f" AND t.{identifier(store.segment)} IS NOT NULL{condition}"
        )
        if source.quantization is None or read.sort != "index":
            return rows
        names = {store.segment_embedding, store.segment, store.document_name, store.document_id}
        names |= {store.segment_number, store.metadata}
        columns = ", ".join(f"t.{identifier(name)}" for name in sorted(name for name in names if name is not None))
        is_binary = source.quantization == "binary"
        vector = f"{self._vector()}::{self.schema}.{store.embedding_type}"

        def smaller(embedding: str) -> str:
            if is_binary:
                return f"{self.schema}.binary_quantize({embedding})::bit({store.dimensions})"
            return f"{embedding}::{self.schema}.halfvec({store.dimensions})"

        operator = "<~>" if is_binary else self.shape.metric.operator
        return (
            f"(SELECT t.ctid, {columns} FROM {rows}\n      ORDER BY"
            f" {smaller(f't.{identifier(store.segment_embedding)}')}"
            f" OPERATOR({self.schema}.{operator}) {smaller(vector)}"
            f" LIMIT {rescored(self.shape, source, read)}) AS t"
        )

    def _near(self, arm: Arm) -> str:
        similarity = f", ({self._similarity('distance')})::float8 AS similarity" if self._is_weighted else ""
        limit = f" WHERE distance <= {self.slots('semantic_limit', 'numeric')}" if arm.has_limit else ""
        return self._best(f"distance, {_TIES}", arm, "near", similarity) + limit

    def _words_of(self, i: int, source: Source) -> str:
        store, index = source.store, source.index
        assert index is not None
        keys, scores = self.slots(f"keys_{i}", "text[]"), self.slots(f"scores_{i}", "float8[]")
        equal = " AND ".join(
            f"t.{identifier(name)} = (w.key::text[])[{place}]::{type_name}"
            for place, (name, type_name) in enumerate(zip(index.key, index.key_types, strict=True), 1)
        )
        distance = self._rounded(f"({self._distance(store)})") if self.shape.has_vector else "NULL::numeric"
        return (
            f"SELECT {i} AS store, {self._key(store)}, w.score, {distance} AS distance\n"
            f"  FROM unnest({keys}, {scores}) AS w (key, score) JOIN ONLY {store.table} AS t ON {equal}\n"
            f"  WHERE t.{identifier(store.segment)} IS NOT NULL{source.condition}"
        )

    def _words(self, arm: Arm) -> str:
        limit = f" WHERE score >= {self.slots('keyword_limit', 'float8')}" if arm.has_limit else ""
        return self._best(f"score DESC, {_TIES}", arm, "words") + limit

    def _best(self, order: str, arm: Arm, name: str, columns: str = "") -> str:
        """The best candidates of all stores; numbered where ranks are fused."""
        union = joined([f"SELECT * FROM {name}_{i}" for i, _ in self._numbered()])
        if len(self.sources) > 1:
            union = f"SELECT * FROM (\n  {union}) AS u"
        if self.is_hybrid and self.shape.fusion == "rrf":
            columns += ", row_number() OVER () AS place"
        return f"SELECT *{columns} FROM (\n  {union}\n  ORDER BY {order} LIMIT {arm.candidates}) AS b"

    # -- fusing -------------------------------------------------------------------------------------------------------

    def _ranked(self) -> str:
        if self.keyword is None:
            return "SELECT *, NULL::float8 AS keyword_score, NULL::float8 AS score FROM near"
        known = "CASE WHEN abs(w.distance) < 'Infinity' THEN w.distance END"
        names = ("document_name", "document_id", "document_key", "segment_number")
        if self.semantic is None:
            return (
                f"SELECT w.store, w.row_key, {', '.join(f'w.{name}' for name in names)}, {known} AS distance,"
                " w.score AS keyword_score, NULL::float8 AS score FROM words AS w"
            )
        columns = ", ".join(f"coalesce(n.{name}, w.{name}) AS {name}" for name in names)
        arms = "n.place AS near, w.place AS words" if self.shape.fusion == "rrf" else "n.similarity"
        return (
            f"SELECT b.*, {self._score()} AS score FROM (\n"
            f"    SELECT store, row_key, {columns}, coalesce(n.distance, {known}) AS distance,\n"
            f"      w.score AS keyword_score, {arms}\n"
            "    FROM near AS n FULL JOIN words AS w USING (store, row_key)) AS b"
            f"{', weight AS a' if self._is_weighted else ''}"
        )

    def _similarity(self, distance: str) -> str:
        return f"1 - {distance}" if self.shape.metric.is_complement else f"1 / (1 + {distance})"

    def _score(self) -> str:
        """0-1. Weighted: the sum of weight * what an arm gives, divided by the best it gives. By meaning that is the
        similarity, which each row has; a row that the words did not find has 0 there. rrf: the sum of 1 / (k + rank),
        as a share of the largest possible."""
        if self.shape.fusion == "rrf":
            k = self.slots("rrf_k", "float8")
            return f"(coalesce(1 / ({k} + b.near), 0) + coalesce(1 / ({k} + b.words), 0)) * ({k} + 1) / 2"
        similarity = f"coalesce(b.similarity, ({self._similarity('b.distance')})::float8)"
        return (
            "CASE WHEN a.near_best > 0 AND a.near > 0\n"
            f"      THEN a.near * least(1, greatest(0, {similarity}) / a.near_best) ELSE 0 END\n"
            "    + coalesce(CASE WHEN a.words_best > 0 THEN a.words * b.keyword_score / a.words_best END, 0)"
        )

    def _strength(self) -> str:
        """What each arm gives its best candidate, and how clearly it tells its best candidates from the others, 0-1:
        one minus the mean of the best thirty, where the first counts 1 and those missing 0. By meaning the last
        candidate counts as 0. An arm that has something to say gives a few rows much more than the rest; one that has
        not (a model that does not know the language, words that stand everywhere) gives all about the same."""
        near = "(SELECT similarity AS v FROM near) AS v"
        return (
            "SELECT n.best AS near_best, w.best AS words_best,\n"
            f"    {_decided(near, 'n')} AS near, {_decided('(SELECT score AS v FROM words) AS v', 'w')} AS words\n"
            "  FROM (SELECT max(similarity) AS best, min(similarity) AS nothing FROM near) AS n,\n"
            "    (SELECT max(score) AS best, 0::float8 AS nothing FROM words) AS w"
        )

    def _weight(self) -> str:
        """The best that each arm gives, and its weight; by how clear both are, or as the call says."""
        if self.shape.fusion == "weighted":
            near, words = self.slots("near_weight", "float8"), self.slots("words_weight", "float8")
            return (
                "SELECT (SELECT max(similarity) FROM near) AS near_best,"
                f" (SELECT max(score) FROM words) AS words_best, {near} AS near, {words} AS words"
            )
        names = {"semantic": "near", "keyword": "words"}
        first, last = (arm.search for arm in self.shape.arms)
        total = " + ".join(f"{PRIOR[arm]}::float8 * s.{names[arm]}" for arm in (first, last))
        return (
            f"SELECT s.near_best, s.words_best, s.share AS {names[first]}, 1 - s.share AS {names[last]}\n"
            f"  FROM (SELECT s.*, CASE WHEN {total} > 0 THEN {PRIOR[first]}::float8 * s.{names[first]} / ({total})\n"
            f"    ELSE {PRIOR[first]}::float8 / {PRIOR[first] + PRIOR[last]}::float8 END AS share\n"
            "    FROM strength AS s) AS s"
        )

    # -- what is cited ------------------------------------------------------------------------------------------------

    def _threshold(self) -> str:
        """Of two limits the smaller one, and whether that is the one in percent."""
        most = self.slots("max_distance", "numeric") if self.shape.has_max_distance else "NULL::numeric"
        if not self.shape.has_percentage:
            return f"SELECT {most} AS distance, false AS is_percentage"
        percentage = self.slots("percentage_distance", "numeric")
        return (
            "SELECT CASE WHEN p.is_percentage THEN p.by_percentage ELSE p.most END AS distance, p.is_percentage\n"
            "  FROM (SELECT b.*, coalesce(b.by_percentage < b.most, b.most IS NULL) AS is_percentage\n"
            f"    FROM (SELECT min(distance) + {percentage} / 100 * abs(min(distance)) AS by_percentage,"
            f" {most} AS most FROM ranked) AS b) AS p"
        )

    @property
    def _is_limited(self) -> bool:
        return self.shape.has_max_distance or self.shape.has_percentage

    def _cited(self) -> str:
        limit = "\n    WHERE distance <= (SELECT distance FROM threshold)" if self._is_limited else ""
        order = (
            "score DESC, distance" if self.is_hybrid else "distance" if self.keyword is None else "keyword_score DESC"
        )
        return (
            f"SELECT *, row_number() OVER () AS place FROM (\n    SELECT * FROM ranked{limit}\n"
            f"    ORDER BY {order}, {_TIES} LIMIT {self.shape.n}) AS r"
        )

    def _widened_stores(self) -> list[tuple[int, Store]]:
        """Stores whose segments have neighbours, where these are wanted."""
        return [
            (i, source.store)
            for i, source in self._numbered()
            if self.shape.overlap > 0
            and source.store.segment_number is not None
            and (source.store.document_id or source.store.document_name) is not None
        ]

    def _range(self) -> str:
        """Gaps and islands: a row opens a new range where its neighbours do not touch those of the rows before it."""
        overlap = self.shape.overlap
        numbers = ", ".join(str(i) for i, _ in self._widened_stores())
        before = (
            "max(segment_number) OVER (PARTITION BY store, document_key ORDER BY segment_number"
            " ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
        )
        return (
            f"SELECT store, document_key, min(segment_number) - {overlap} AS first,"
            f" max(segment_number) + {overlap} AS last, min(place) AS best\n"
            "  FROM (SELECT d.*, count(*) FILTER (WHERE opens)"
            " OVER (PARTITION BY store, document_key ORDER BY segment_number) AS island\n"
            "    FROM (SELECT store, document_key, segment_number, place,\n"
            f"        coalesce(segment_number > {2 * overlap + 1} + {before}, true) AS opens\n"
            f"      FROM cited WHERE store IN ({numbers}) AND segment_number IS NOT NULL"
            " AND document_key IS NOT NULL) AS d) AS i\n"
            "  GROUP BY store, document_key, island"
        )

    def _widened(self) -> str:
        def texts(i: int, store: Store) -> str:
            document = identifier(store.document_id or store.document_name or "")
            type_name = "text" if store.document_id is None else store.document_id_type
            number = f"t.{identifier(store.segment_number or '')}"
            return (
                f"SELECT r.best, {number}::bigint AS segment_number, t.{identifier(store.segment)}::text AS segment\n"
                f"    FROM range AS r JOIN {store.table} AS t ON r.store = {i}"
                f" AND t.{document} = r.document_key::{type_name} AND {number} BETWEEN r.first AND r.last\n"
                f"    WHERE t.{identifier(store.segment)} IS NOT NULL"
            )

        return (
            "SELECT best, ml_rag._joined(segment ORDER BY segment_number) AS segment,"
            " min(segment_number) AS first_segment, max(segment_number) AS last_segment FROM (\n"
            f"    {joined([texts(i, store) for i, store in self._widened_stores()])}) AS n\n"
            "  GROUP BY best"
        )

    def _hit(self) -> str:
        """The best row of a range stands for all of it."""
        rows = "SELECT * FROM cited"
        if not self.has_text:
            rows = joined(
                [
                    f"SELECT c.*, {self._text(source.store)} FROM cited AS c JOIN {source.store.table} AS t"
                    f" ON c.store = {i} AND t.ctid = c.row_key"
                    for i, source in self._numbered()
                ]
            )
        if not self._widened_stores():
            return rows
        columns = "document_name document_id document_key segment_number distance metadata keyword_score score place"
        return (
            f"SELECT c.store, {', '.join(f'c.{name}' for name in columns.split())},"
            " coalesce(w.segment, c.segment) AS segment, w.first_segment, w.last_segment\n"
            f"  FROM ({rows}) AS c\n"
            "  LEFT JOIN range AS r ON r.store = c.store AND r.document_key = c.document_key\n"
            "    AND c.segment_number BETWEEN r.first AND r.last\n"
            "  LEFT JOIN widened AS w ON w.best = r.best\n"
            "  WHERE r.best IS NULL OR r.best = c.place"
        )

    # -- the answer ---------------------------------------------------------------------------------------------------

    def _answer(self) -> str:
        names = ", ".join(literal(source.store.vector_store) for source in self.sources)
        store = f"(ARRAY[{names}])[h.store]"
        rank = "row_number() OVER (ORDER BY h.place)"
        if self.shape.form == "rows":
            return (
                f"SELECT {rank}::integer AS rank, {store} AS vector_store, h.document_name, h.document_id,"
                " h.segment_number::integer AS segment_number, h.segment, h.distance, h.metadata, h.keyword_score,"
                " h.score, NULL::float8 AS rerank_score\nFROM hit AS h ORDER BY h.place"
            )
        values = {
            "segment": "h.segment",
            "distance": "h.distance",
            "document_name": "h.document_name",
            "vector_store": store,
            "document_id": "h.document_id",
            "document_key": "h.document_key",
            "segment_number": "h.segment_number",
            "metadata": "h.metadata",
            "score": "h.score",
            "keyword_score": "h.keyword_score",
        }
        first, last = "h.segment_number", "h.segment_number"
        if self._widened_stores():
            first, last = (f"coalesce(h.{name}_segment, h.segment_number)" for name in ("first", "last"))
            values |= {"first_segment": "h.first_segment", "last_segment": "h.last_segment"}
        if self.shape.form == "citations":
            values |= {
                "document_id": "coalesce(to_json(h.document_id), to_json(h.document_key))",
                "rerank_score": "NULL::float8",
                "rank": "h.rank",
                "segment_range": f"json_build_array({first}, {last})",
            }
            values = {name: values[name] for name in ("segment", "distance", "document_name", *self.shape.fields)}
        fields = ", ".join(f"'{name}', {value}" for name, value in values.items())
        # how near the nearest candidate is, whatever a limit leaves of them
        nearest = ", (SELECT min(distance) FROM ranked)::text AS nearest" if self.shape.form == "hits" else ""
        threshold, is_percentage = "(SELECT max(distance) FROM cited)", "false"
        if self._is_limited:
            threshold, is_percentage = (f"(SELECT {name} FROM threshold)" for name in ("distance", "is_percentage"))
        return (
            f"SELECT json_agg(json_build_object({fields}) ORDER BY h.place)::text AS hits, count(*) AS n,\n"
            f"  round({threshold}, 4)::text AS threshold, {is_percentage} AS is_percentage{nearest},\n"
            f"  {self._checks()}\n"
            f"FROM (SELECT h.*, {rank} AS rank FROM hit AS h) AS h"
        )

    def _checks(self) -> str:
        """Of each store: whether its index gave less than wanted; more rows than were fetched share the last place;
        rows that the keyword index has found are missing, or do not pass."""
        short, tied, missing = [], [], []
        for i, source in self._numbered():
            if self.semantic is not None and source.read is not None:
                limit = source.read.limit
                short.append(f"(SELECT count(*) < {self.semantic.candidates} FROM near_{i})")
                tied.append(
                    f"(SELECT count(*) = {limit} AND max(distance) <= (SELECT max(distance) FROM near) FROM near_{i})"
                )
            if self.keyword is not None:
                keys = self.slots(f"keys_{i}", "text[]")
                given = self.slots(f"candidates_{i}", "int4")
                missing.append(
                    f"(SELECT count(*) < {self.keyword.candidates} AND cardinality({keys}) >= {given} FROM words_{i})"
                )
        arrays = {"short": short, "tied": tied, "missing": missing}
        return ", ".join(f"ARRAY[{', '.join(checks)}]::boolean[] AS {name}" for name, checks in arrays.items())


def _document_name(store: Store) -> str:
    """The name of a row's document: its column, else what programs keep of it in the metadata, else the store's."""
    if store.document_name is not None:
        return f"t.{identifier(store.document_name)}::text"
    if store.metadata is None:
        return f"{literal(store.vector_store)}::text"
    found = ", ".join(
        f"nullif(to_jsonb(t.{identifier(store.metadata)}) ->> '{key}', '')"
        for key in ("source", "file_path", "file_name", "url", "title")
    )
    return f"coalesce({found}, {literal(store.vector_store)})"


def _place(store: Store) -> str:
    """What settles ties among the rows of a store."""
    document = "NULL"
    if store.document_id is not None:
        column = f"t.{identifier(store.document_id)}"
        document = column if store.document_id_type in _INTEGERS else f'{column}::text COLLATE "C"'
    number = "NULL" if store.segment_number is None else f"t.{identifier(store.segment_number)}"
    return f'({_document_name(store)}) COLLATE "C", {document}, {number}::bigint'


def _decided(values: str, arm: str) -> str:
    return (
        f"coalesce((SELECT 1 - sum(greatest(b.v - {arm}.nothing, 0) / ({arm}.best - {arm}.nothing)) / {CLEAR_BY}\n"
        f"      FROM (SELECT v FROM {values} ORDER BY v DESC LIMIT {CLEAR_BY}) AS b\n"
        f"      WHERE {arm}.best > {arm}.nothing), 0)"
    )
