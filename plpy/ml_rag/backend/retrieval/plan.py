"""The statement of a retrieval: a pure function of the shape of a request and of the stores.

Common table expressions, in the order of the pipeline; names are those of arms:

    semantic_found  by meaning: the nearest rows of each store, in the order of its index
    semantic        the nearest of all stores
    keyword_found   by words: the rows that the keyword index has found, with their scores and distances
    keyword         the best of all stores
    found           what all arms have found (fuse.py)
    strength        how clear each arm is about the question, and how much of the texts its model has read
    weight          how much each arm counts
    ranked          the candidates as one list, each once
    threshold       how far a row may be
    cited           the rows that are within it, as many as wanted
    range           which neighbours of these are read, of each document without gaps
    widened         the texts of the ranges
    hit             the cited rows with their texts

Rows are known by store (its number) and row key (ctid), which hold within the snapshot of the statement. The texts of
rows are read last, except for a search by meaning alone, whose few rows have been read anyway, and for views, foreign
and partitioned tables, whose rows are known by what they hold.
"""

from __future__ import annotations

from ml_rag.backend.retrieval import fuse
from ml_rag.backend.retrieval.arms import WORDS
from ml_rag.backend.retrieval.rows import NAMES, Rows, nearest
from ml_rag.backend.retrieval.shape import (
    Arm,
    Given,
    Near,
    Nodes,
    Shape,
    Slots,
    Source,
    Statement,
    Words,
    filter_slot,
)
from ml_rag.backend.retrieval.sqltext import identifier, joined, literal
from ml_rag.backend.retrieval.stores import Store


def plan(shape: Shape, sources: tuple[Source, ...], schema: str, slots: Slots | None = None) -> Statement:
    """The statement. ``schema``: pgvector's, as it is written. ``slots``: how its values stand in it; None = as
    parameters."""
    return _Plan(shape, sources, schema, slots or Slots()).statement()


def widening(shape: Shape, sources: tuple[Source, ...], schema: str, slots: Slots) -> Statement:
    """The statement that widens hits, given as JSON, by their neighbours."""
    return _Plan(shape, sources, schema, slots).widening()


def scored_rows(shape: Shape, source: Source, schema: str, i: int, *, takes_vectors: bool) -> Statement:
    """The statement of all rows of a store that pass: a hit as JSON, and the text or vector that a function scores."""
    slots, store = Slots(), source.store
    rows = Rows(shape, schema, slots, has_tids=False)
    rows.vector()
    if source.condition:
        for name, type_name in (
            *slots.before_filter,
            *((filter_slot(k), "text[]") for k in range(1, source.filter + 1)),
        ):
            slots(name, type_name)
    condition = source.condition
    if source.is_narrow:
        condition = f" AND t.ctid = ANY ({slots(f'row_keys_{i}', 'text')}::tid[])"
    text = f"t.{identifier(store.segment)}"
    given = f"t.{identifier(store.segment_embedding)}::{schema}.vector" if takes_vectors else text
    key = "s.row_key::text" if store.is_table else "NULL::text"
    text_fields = "" if store.is_table else ", 'segment', s.segment, 'metadata', s.metadata"
    measured = rows.measured(source)
    if takes_vectors:
        condition = f" AND t.{identifier(store.segment_embedding)} IS NOT NULL{condition}"
    columns = rows.raw(store, is_early=not store.is_table)
    candidate = rows.candidate(i, store, "s.distance", is_early=False)
    pairs = ", ".join(f"'{name}', c.{name}" for name in NAMES)
    return Statement(
        f"SELECT json_build_object('vector_store', {literal(store.vector_store)}, 'row_key', c.key, {pairs},"
        f" 'distance', c.distance{text_fields.replace('s.', 'c.')})::text AS hit, c.input,"
        f" {', '.join(f'c.{name}' for name in NAMES)}\n"
        f"FROM (SELECT {candidate}, {key} AS key, {rows.known('s.distance')} AS distance, s.input"
        f"{'' if store.is_table else ', s.segment, s.metadata'}\n"
        f"  FROM (SELECT {columns}, {measured} AS distance, {given}::text AS input\n"
        f"    FROM {source.rows} AS t WHERE {text} IS NOT NULL"
        f"{condition}) AS s) AS c",
        slots.types,
    )


class _Plan:
    def __init__(self, shape: Shape, sources: tuple[Source, ...], schema: str, slots: Slots) -> None:
        self.shape, self.sources, self.schema, self.slots = shape, sources, schema, slots
        searches = [search for source in sources for search in source.searches if search is not None]
        has_given = any(isinstance(search, Given) for search in searches)
        nodes = ""
        if any(isinstance(search, Nodes) for search in searches):
            nodes = "node" if shape.returns_nodes else "segment"
        #: whether the statement is a later one than that which has found the hits
        self._is_later = False
        has_tids = not has_given and all(source.store.is_table for source in sources)
        #: whether candidates carry their texts: few rows of one arm were read anyway
        self.is_early = (
            len(shape.arms) == 1
            and shape.arms[0].candidates <= shape.n
            and all(isinstance(search, Near) for search in searches)
        )
        self.has_text = self.is_early or has_given or not all(source.store.is_table for source in sources)
        self.rows = Rows(
            shape, schema, slots, has_tids=has_tids, has_text=self.has_text, is_early=self.is_early, nodes=nodes
        )
        lists = {source.filter for source in sources if source.condition}
        if lists:
            self.rows.vector()
            for name, type_name in (*slots.before_filter, *((filter_slot(i), "text[]") for i in sorted(lists))):
                slots(name, type_name)

    def statement(self) -> Statement:
        parts: list[tuple[str, str]] = []
        for place, arm in enumerate(self.shape.arms, 1):
            fragments = [
                search.fragment(self.rows, i, source, arm, place)
                for i, source in self._of(place)
                if (search := source.searches[place - 1]) is not None
            ]
            # an expression for each store would have the planner walk the whole statement once a store
            parts.append((f"{arm.expression}_found AS", joined(fragments)))
            parts.append((f"{arm.expression} AS", self._best(arm, place)))
        if len(self.shape.arms) == 1:
            parts.append(("ranked AS", self._ranked(self.shape.arms[0])))
        else:
            parts += fuse.parts(self.shape, self.rows, self._of_documents())
        if self._is_limited:
            parts.append(("threshold AS", self._threshold()))
        if self.shape.form == "keys":
            body = ",\n".join(f"{head} (\n  {text}\n)" for head, text in parts)
            return Statement(f"WITH {body}\n{self._answer()}", self.slots.types)
        parts.append(("cited AS", self._cited()))
        return self._finished(parts, self._answer())

    def widening(self) -> Statement:
        columns = "vector_store text, document_name text, document_id bigint, document_key text, segment_number bigint,"
        columns += (
            " segment text, distance numeric, metadata jsonb, keyword_score float8, score float8, rerank_score float8,"
            " node text, node_distance numeric"
        )
        names = ", ".join(column.split()[0] for column in columns.split(", "))
        self.has_text = self.is_early = self._is_later = True
        stores = ", ".join(literal(source.store.vector_store) for source in self.sources)
        cited = (
            f"SELECT array_position(ARRAY[{stores}], h.vector_store) AS store, NULL::tid AS row_key, h.*\n"
            f"  FROM ROWS FROM (jsonb_to_recordset({self.slots('hits', 'jsonb')}) AS ({columns}))"
            f" WITH ORDINALITY AS h ({names}, place)"
        )
        fields = [*names.split(", "), "first_segment", "last_segment"]
        pairs = ", ".join(f"'{name}', h.{name}" for name in fields if name != "vector_store")
        answer = (
            f"SELECT json_agg(json_build_object('vector_store', (ARRAY[{stores}])[h.store], {pairs})"
            " ORDER BY h.place)::text AS hits\n"
            "FROM hit AS h"
        )
        return self._finished([("cited AS", cited)], answer, also=", rerank_score, node, node_distance")

    def _finished(self, parts: list[tuple[str, str]], answer: str, also: str = "") -> Statement:
        if self._widened_stores():
            parts += [("range AS", self._range()), ("widened AS", self._widened())]
        parts.append(("hit AS", self._hit(also)))
        body = ",\n".join(f"{head} (\n  {text}\n)" for head, text in self.slots.parts() + parts)
        return Statement(f"WITH {body}\n{answer}", self.slots.types)

    def _numbered(self) -> list[tuple[int, Source]]:
        return list(enumerate(self.sources, 1))

    def _of(self, place: int) -> list[tuple[int, Source]]:
        """The stores that an arm searches, each with its number."""
        return [(i, source) for i, source in self._numbered() if source.searches[place - 1] is not None]

    def _of_documents(self) -> list[tuple[int, int]]:
        """Arms and stores, by place and number, whose nodes are of whole documents."""
        return [
            (place, i)
            for place in range(1, len(self.shape.arms) + 1)
            for i, source in self._of(place)
            if isinstance(search := source.searches[place - 1], Nodes) and search.document is not None
        ]

    # -- arms ---------------------------------------------------------------------------------------------------------

    def _best(self, arm: Arm, place: int) -> str:
        """The best candidates of all stores, numbered; what is beyond a limit of the arm's own is left out."""
        unit = arm.unit
        condition = f" WHERE {unit.within} {self.slots(f'limit_{place}', unit.type_name)}" if arm.has_limit else ""
        value = f", {arm.kind.value(arm, self.rows)} AS value" if len(self.shape.arms) > 1 else ""
        return (
            f"SELECT *, row_number() OVER () AS place{value} FROM (\n"
            f"  SELECT * FROM {arm.expression}_found\n"
            f"  ORDER BY {unit.order}, {self.rows.ties} LIMIT {arm.candidates}) AS b{condition}"
        )

    def _ranked(self, arm: Arm) -> str:
        """What the only arm has found."""
        score = "score" if arm.unit == WORDS else "NULL::float8"
        own = "own::float8" if arm.unit.column == "own" else "NULL::float8"
        text = "segment, metadata, " if self.has_text else ""
        nodes = self.rows.node_columns
        text += "".join(f"{name}, " for name in nodes)
        distance = nearest("distance", "node_distance", nodes)
        return (
            f"SELECT store, row_key, {', '.join(NAMES)}, {text}{distance}{' AS distance' if nodes else ''},"
            f" {score} AS keyword_score, {own} AS score, place FROM {arm.expression}"
        )

    # -- what is cited ------------------------------------------------------------------------------------------------

    @property
    def _is_limited(self) -> bool:
        return self.shape.has_max_distance or self.shape.has_percentage

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

    def _cited(self) -> str:
        limit = "\n    WHERE distance <= (SELECT distance FROM threshold)" if self._is_limited else ""
        if len(self.shape.arms) == 1:
            most = f"\n    ORDER BY place LIMIT {self.shape.n}" if self.shape.arms[0].candidates > self.shape.n else ""
            return f"SELECT * FROM ranked{limit}{most}"
        return (
            f"SELECT *, row_number() OVER () AS place FROM (\n    SELECT * FROM ranked{limit}\n"
            f"    ORDER BY score DESC, distance, {self.rows.ties} LIMIT {self.shape.n}) AS r"
        )

    def _widened_stores(self) -> list[tuple[int, Source]]:
        """Stores whose segments have neighbours, if these are wanted."""
        return [
            (i, source)
            for i, source in self._numbered()
            if self.shape.overlap > 0
            and source.store.segment_number is not None
            and (source.store.document_id or source.store.document_name) is not None
        ]

    def _range(self) -> str:
        """Gaps and islands: a row opens a new range if its neighbours do not touch those of the rows before it."""
        overlap = self.shape.overlap
        numbers = ", ".join(str(i) for i, _ in self._widened_stores())
        before = (
            "max(segment_number) OVER (PARTITION BY store, document_key ORDER BY segment_number"
            " ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
        )
        return (
            f"SELECT store, document_key, greatest(min(segment_number), {overlap - 2**63}) - {overlap} AS first,"
            f" least(max(segment_number), {2**63 - 1 - overlap}) + {overlap} AS last, min(place) AS best\n"
            "  FROM (SELECT d.*, count(*) FILTER (WHERE opens)"
            " OVER (PARTITION BY store, document_key ORDER BY segment_number) AS island\n"
            "    FROM (SELECT store, document_key, segment_number, place,\n"
            f"        coalesce(segment_number - {before}::numeric > {2 * overlap + 1}, true) AS opens\n"
            f"      FROM cited WHERE store IN ({numbers}) AND segment_number IS NOT NULL"
            " AND document_key IS NOT NULL) AS d) AS i\n"
            "  GROUP BY store, document_key, island"
        )

    def _widened(self) -> str:
        def texts(i: int, source: Source) -> str:
            store = source.store
            document = identifier(store.document_id or store.document_name or "")
            type_name = "text" if store.document_id is None else store.document_id_type
            number = f"t.{identifier(store.segment_number or '')}"
            shipped = ""
            if not store.is_table:  # what another server can be asked for, which is not a join with what is here
                shipped = (
                    f" AND {number} = ANY (ARRAY(SELECT generate_series(r.first, r.last) FROM range AS r"
                    f" WHERE r.store = {i}))"
                )
            return (
                f"SELECT r.best, {number}::bigint AS segment_number, t.{identifier(store.segment)}::text AS segment\n"
                f"    FROM range AS r JOIN {source.rows} AS t ON r.store = {i}"
                f" AND t.{document} = r.document_key::{type_name} AND {number} BETWEEN r.first AND r.last\n"
                f"    WHERE t.{identifier(store.segment)} IS NOT NULL{shipped}"
            )

        texts_of = ", array_agg(segment ORDER BY segment_number) AS texts" if self._is_later else ""
        return (
            "SELECT best, ml_rag._joined(array_agg(segment ORDER BY segment_number)) AS segment,"
            f" min(segment_number) AS first_segment, max(segment_number) AS last_segment{texts_of} FROM (\n"
            f"    {joined([texts(i, source) for i, source in self._widened_stores()])}) AS n\n"
            "  GROUP BY best"
        )

    def _hit(self, also: str) -> str:
        """The best row of a range stands for all of it."""
        rows = "SELECT * FROM cited"
        columns = f"store, {', '.join(NAMES)}, distance, keyword_score, score, place{also}"
        columns += "".join(f", {name}" for name in self._nodes)
        columns = ", ".join(f"c.{name}" for name in columns.split(", "))
        if not self.is_early:
            rows = joined([self._with_text(i, source.store, columns) for i, source in self._numbered()])
        if not self._widened_stores():
            return rows
        # another document can have the key by now, or the segments of this one other numbers
        is_there = " AND (c.node IS NOT NULL OR c.segment = ANY (w.texts))" if self._is_later else ""
        return (
            f"SELECT {columns}, c.metadata,"
            " coalesce(w.segment, c.segment) AS segment, w.first_segment, w.last_segment\n"
            f"  FROM ({rows}) AS c\n"
            "  LEFT JOIN range AS r ON r.store = c.store AND r.document_key = c.document_key\n"
            "    AND c.segment_number BETWEEN r.first AND r.last\n"
            f"  LEFT JOIN widened AS w ON w.best = r.best{is_there}\n"
            "  WHERE r.best IS NULL OR r.best = c.place"
        )

    def _with_text(self, i: int, store: Store, columns: str) -> str:
        segment, metadata, key = "c.segment", "c.metadata", "c.row_key"
        if store.is_table:
            segment, metadata = self.rows.parts(store)
            if self.has_text:
                segment, metadata = f"coalesce(c.segment, {segment})", f"coalesce(c.metadata, {metadata})"
            if not self.rows.has_tids:
                key = "c.row_key::tid"
        if "node_key" in self.rows.node_columns:
            segment = f"coalesce(c.node, {segment})"
        text = f"SELECT {columns}, {segment} AS segment, {metadata} AS metadata FROM cited AS c"
        if not store.is_table:
            return f"{text} WHERE c.store = {i}"
        return f"{text} JOIN {store.rows} AS t ON c.store = {i} AND t.ctid = {key}"

    @property
    def _nodes(self) -> list[str]:
        """Columns of the node of a hit."""
        return [name for name in self.rows.node_columns if name != "node_key"]

    # -- the answer ---------------------------------------------------------------------------------------------------

    def _answer(self) -> str:
        if self.shape.form == "keys":
            value = "keyword_score" if self.shape.arms[0].unit == WORDS else "coalesce(score, distance)"
            return (
                f"SELECT coalesce(array_agg(row_key::text ORDER BY place), '{{}}') AS keys,\n"
                f"  coalesce(array_agg({value} ORDER BY place), '{{}}') AS scores, {self._checks()}\nFROM ranked"
            )
        names = ", ".join(literal(source.store.vector_store) for source in self.sources)
        store = f"(ARRAY[{names}])[h.store]"
        rank = "row_number() OVER (ORDER BY h.place)"
        if self.shape.form == "rows":
            return (
                f"SELECT {rank}::integer AS rank, {store} AS vector_store, h.document_name, h.document_id,"
                " CASE WHEN h.segment_number BETWEEN -2147483648 AND 2147483647 THEN h.segment_number END::integer"
                " AS segment_number, h.segment, h.distance, h.metadata, h.keyword_score, h.score,"
                " NULL::float8 AS rerank_score\nFROM hit AS h ORDER BY h.place"
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
            **{name: f"h.{name}" for name in self._nodes},
        }
        first, last = "h.segment_number", "h.segment_number"
        if self._widened_stores():
            first, last = (f"coalesce(h.{name}_segment, h.segment_number)" for name in ("first", "last"))
            values |= {"first_segment": "h.first_segment", "last_segment": "h.last_segment"}
        if self.shape.form == "citations":
            values = {"node": "NULL::text", "node_distance": "NULL::numeric"} | values
            values |= {
                "document_id": "coalesce(to_json(h.document_id), to_json(h.document_key))",
                "rerank_score": "NULL::float8",
                "rank": "h.rank",
                "segment_range": f"json_build_array({first}, {last})",
            }
            values = {name: values[name] for name in ("segment", "distance", "document_name", *self.shape.fields)}
        fields = ", ".join(f"'{name}', {value}" for name, value in values.items())
        # hits that are widened are fewer
        threshold = "(SELECT max(distance) FROM cited)" if self._widened_stores() else "max(h.distance)"
        is_percentage = "false"
        if self._is_limited:
            threshold, is_percentage = (f"(SELECT {name} FROM threshold)" for name in ("distance", "is_percentage"))
        told = self._told(f"(ARRAY[{names}])[r.store]")
        return (
            f"SELECT json_agg(json_build_object({fields}) ORDER BY h.place)::text AS hits, count(*) AS n,\n"
            f"  round({threshold}, 4)::text AS threshold, {is_percentage} AS is_percentage{told},\n"
            f"  {self._checks()}\n"
            f"FROM (SELECT h.*, {rank} AS rank FROM hit AS h) AS h"
        )

    def _told(self, store: str) -> str:
        """How near the nearest candidate is, whatever a limit leaves; how many there are, and which.

        ``store``: SQL of the name of the store of a candidate r."""
        if self.shape.form == "citations" and not self._is_limited and not self.shape.told:
            return ""
        limit = "(SELECT distance FROM threshold)::text" if self._is_limited else "NULL::text"
        nearest = "(SELECT min(distance) FROM ranked)::text AS nearest"
        told = f',\n  EXISTS (SELECT FROM ranked) AS has_candidates, {nearest}, {limit} AS "limit"'
        if not self.shape.told:
            return told
        counts = [f"(SELECT count(*) FROM {arm.expression})" for arm in self.shape.arms]
        within = " WHERE distance <= (SELECT distance FROM threshold)" if self._is_limited else ""
        counts += ["(SELECT count(*) FROM ranked)", f"(SELECT count(*) FROM ranked{within})"]
        found = [
            self._of_each(arm, place, ["0"] * len(self._of(place)), "coalesce(n.n, 0)")
            for place, arm in enumerate(self.shape.arms, 1)
        ]
        told += f",\n  ARRAY[{', '.join(counts)}] AS counts, ({' || '.join(found)})::bigint[] AS found"
        if self.shape.told != "all":
            return told
        names = ", ".join(f"'{name}', r.{name}" for name in (*NAMES, "distance"))
        fields = f"'vector_store', {store}, {names}"
        lists = []
        for arm in self.shape.arms:
            own = {"score": ", 'keyword_score', r.score", "own": ", 'score', r.own"}.get(arm.unit.column, "")
            pairs = f"{fields}{own}"
            lists.append(f"(SELECT json_agg(json_build_object({pairs}) ORDER BY r.place) FROM {arm.expression} AS r)")
        order = "r.place" if len(self.shape.arms) == 1 else f"r.score DESC, r.distance, {self.rows.ties}"
        pairs = f"{fields}, 'score', r.score, 'keyword_score', r.keyword_score"
        lists.append(f"(SELECT json_agg(json_build_object({pairs}) ORDER BY {order}) FROM ranked AS r)")
        return f"{told},\n  json_build_array({', '.join(lists)})::text AS lists"

    def _checks(self) -> str:
        """Of each arm in each store, by the order of arms: short if its index gave less than wanted; tied if more rows
        than were fetched share the last place; missing if rows that were found elsewhere are missing, or do not pass;
        else null."""
        checks: list[str] = []
        for place, arm in enumerate(self.shape.arms, 1):
            by = "own" if arm.has_own_vector else "distance"
            most = []
            for i, source in self._of(place):
                search = source.searches[place - 1]
                if isinstance(search, Near):
                    most.append(str(search.limit))
                elif isinstance(search, Words | Nodes):
                    keys = self.slots(f"keys_{place}_{i}", "text[]")
                    given = self.slots(f"candidates_{place}_{i}", "int4")
                    most.append(f"CASE WHEN cardinality({keys}) >= {given} THEN -1 END")
                else:
                    most.append("NULL::integer")
            check = (
                f"CASE WHEN coalesce(n.n, 0) < {arm.candidates} THEN CASE WHEN w.most < 0 THEN 'missing'"
                f" WHEN w.most > 0 THEN 'short' END"
                f" WHEN n.n = w.most AND n.farthest <= (SELECT max({by}) FROM {arm.expression}) THEN 'tied' END"
            )
            checks.append(self._of_each(arm, place, most, check))
        return f"({' || '.join(checks)})::text[] AS checks"

    def _of_each(self, arm: Arm, place: int, most: list[str], value: str) -> str:
        """An array of a value for each store that an arm searches. ``value``: of ``n``, how many rows the arm has found
        there and how far the farthest is, and of the store's own of ``most``."""
        by = "own" if arm.has_own_vector else "distance"
        found = f"count(*) AS n, max({by}) AS farthest FROM {arm.expression}_found"
        if len(most) == 1:
            return f"ARRAY[(SELECT {value} FROM (SELECT {found}) AS n, (SELECT {most[0]} AS most) AS w)]"
        numbers = ", ".join(str(i) for i, _ in self._of(place))
        # one pass over all: a subquery for each store would take memory that grows with their square
        return (
            f"ARRAY(SELECT {value} FROM unnest(ARRAY[{numbers}], ARRAY[{', '.join(most)}]) AS w (store, most)"
            f" LEFT JOIN (SELECT store, {found} GROUP BY store) AS n USING (store) ORDER BY store)"
        )
