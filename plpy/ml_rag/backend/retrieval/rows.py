"""How a row t of a store is read: what tells it apart, its text, how far it is, and the conditions on it."""

from __future__ import annotations

from ml_rag.backend.retrieval.shape import Arm, Near, Nodes, Shape, Slots, Source, Words
from ml_rag.backend.retrieval.sqltext import identifier, literal
from ml_rag.backend.retrieval.stores import Embedding, Store

_INTEGERS = ("smallint", "integer", "bigint")
#: of a candidate: what tells documents apart
NAMES = ("document_name", "document_id", "document_key", "segment_number")
#: settles ties, after what an arm or fusing orders by
TIES = 'store, document_name COLLATE "C", document_id, document_key COLLATE "C", segment_number'

#: columns of a candidate's node: where no node group is searched, where segments are cited, where nodes are
NODE_COLUMNS = {
    "": {},
    "segment": {"node": "text", "node_distance": "numeric"},
    "node": {"node": "text", "node_distance": "numeric", "node_key": "text"},
}


def nearest(distance: str, node_distance: str, nodes: dict[str, str]) -> str:
    """How far a candidate is: as the nearest text that it was found by, or as the node that is cited."""
    if "node_key" in nodes:
        return f"coalesce({node_distance}, {distance})"
    return f"least({distance}, {node_distance})" if nodes else distance


class Rows:
    """Fragments for the stores of a statement."""

    def __init__(
        self,
        shape: Shape,
        schema: str,
        slots: Slots,
        *,
        has_tids: bool,
        has_text: bool = False,
        is_early: bool = False,
        nodes: str = "",
    ) -> None:
        self.shape, self.schema, self.slots = shape, schema, slots
        #: whether candidates carry their texts, and of ordinary tables too
        self.has_text, self.is_early = has_text, is_early
        #: of a candidate that a node group has found: its nearest node; where that is a hit, also what tells it apart
        self.node_columns = NODE_COLUMNS[nodes]
        #: whether all rows are known by ctid as such, else as text
        self.has_tids = has_tids

    # -- a row --------------------------------------------------------------------------------------------------------

    def vector(self, slot: str = "vector") -> str:
        """What is searched with: the vector of the question, or of an arm."""
        return self.slots(slot, f"{self.schema}.vector")

    def distance(self, embedding: Embedding, vector: str, row: str = "t") -> str:
        """From a row to a vector, what an index can serve."""
        operator = f"OPERATOR({self.schema}.{self.shape.metric.operator})"
        cast = "" if embedding.type_name == "vector" else f"::{self.schema}.{embedding.type_name}"
        return f"{row}.{identifier(embedding.column)} {operator} {vector}{cast}"

    def rounded(self, distance: str) -> str:
        return f"round(({distance} + {self.shape.metric.shift})::numeric, 4)"

    def known(self, distance: str) -> str:
        """The same, null where it is not finite."""
        return f"CASE WHEN abs({distance}) < 'Infinity' THEN {self.rounded(distance)} END"

    def similarity(self, distance: str) -> str:
        return f"1 - {distance}" if self.shape.metric.is_complement else f"1 / (1 + {distance})"

    def raw(self, store: Store, *, is_early: bool) -> str:
        """The columns of a row as they are stored, which another server can be asked for."""
        document = "NULL" if store.document_id is None else f"t.{identifier(store.document_id)}"
        number = "NULL" if store.segment_number is None else f"t.{identifier(store.segment_number)}"
        columns = [
            *(["t.ctid AS row_key"] if store.is_table else []),
            f"{document_name(store)} AS document_name",
            f"{document} AS document",
            f"{number}::bigint AS segment_number",
            *([self.text(store)] if is_early else []),
        ]
        return ", ".join(columns)

    def text(self, store: Store) -> str:
        segment, metadata = self.parts(store)
        return f"{segment} AS segment, {metadata} AS metadata"

    def parts(self, store: Store) -> tuple[str, str]:
        """The text of a row, and its metadata."""
        metadata = "NULL::jsonb" if store.metadata is None else as_jsonb(store.metadata)
        if store.key:
            pairs = (f"{literal(name)}, {as_jsonb(name)}" for name in store.key)
            of_row = f"jsonb_build_object({', '.join(pairs)})"
            own = f"CASE jsonb_typeof({metadata}) WHEN 'object' THEN {metadata} || {of_row} ELSE {of_row} END"
            metadata = of_row if store.metadata is None else own
        return f"t.{identifier(store.segment)}::text", metadata

    @property
    def ties(self) -> str:
        return f'{TIES}, node COLLATE "C"' if "node_key" in self.node_columns else TIES

    def candidate(self, i: int, store: Store, order: str, *, is_early: bool, has_node: bool = False) -> str:
        """The columns of a candidate, of a row s that ``raw`` has read. ``order``: of rows that hold the same."""
        if store.document_id is None:
            documents = "NULL::bigint AS document_id, s.document_name AS document_key"
        else:
            integer = "s.document::bigint" if store.document_id_type in _INTEGERS else "NULL::bigint"
            documents = f"{integer} AS document_id, s.document::text AS document_key"
        key = "s.row_key" if self.has_tids else "s.row_key::text AS row_key"
        if not store.is_table:
            # each node that is a hit comes with its segment, which is one row all the same
            node = "s.node_key" if has_node and "node_key" in self.node_columns else None
            document = "s.document::text" if store.document_id else "s.document_name"
            key = f"{self._content(document, order, node)} AS row_key"
        text = ""
        if self.has_text:
            text = ", s.segment, s.metadata" if is_early else ", NULL::text AS segment, NULL::jsonb AS metadata"
        for name, type_name in self.node_columns.items():
            text += f", s.{name}" if has_node else f", NULL::{type_name} AS {name}"
        return f"{i} AS store, {key}, s.document_name, {documents}, s.segment_number{text}"

    def _content(self, document: str, order: str, node: str | None = None) -> str:
        """The key of a row that has none (of views, foreign and partitioned tables): what it holds; rows that
        hold the same are numbered. ``node``: the column that tells the nodes of a row apart, if each comes as a row."""
        same = f"s.document_name, {document}, s.segment_number, s.segment"
        if node is not None:
            same += f", {node}"
        return (
            f"md5(concat_ws('|', coalesce(md5(s.document_name), '-'), coalesce(md5({document}), '-'),"
            f" coalesce(s.segment_number::text, '-'), md5(s.segment),"
            f" row_number() OVER (PARTITION BY {same} ORDER BY {order})))"
        )

    # -- arms over a store --------------------------------------------------------------------------------------------

    def near(self, i: int, source: Source, arm: Arm, read: Near) -> str:
        """The nearest rows, in the order of an index."""
        store = source.store
        is_early = self.is_early or not store.is_table
        sort = self.distance(read.embedding or store.embedding, self.vector(read.slot))
        # an expression that no index has, neither here nor on another server
        sort = f"({sort}) + 0" if read.sort == "exact" else sort
        order = sort
        if read.sort == "total":
            order = f"{self.rounded(f'({sort})')}, {_place(store)}"
        columns = self.raw(store, is_early=is_early)
        by = "distance"
        if arm.has_own_vector:
            by = "own"
            columns += f", {self.measured(source)} AS distance"
        if self.shape.reads_bytes(arm):
            columns += f", octet_length(t.{identifier(store.segment)}::text) AS bytes"
        columns += f", {sort} AS {by}"
        nearest = f"ORDER BY {order} LIMIT {read.limit}"
        if source.leaves is None:
            rows = f"SELECT {columns}\n    FROM {self._rows(i, source, read)}\n    {nearest}"
        else:
            # each has a limit of its own, and those of other servers run side by side below an order that is not theirs
            parts = [
                f"(SELECT {columns} FROM {self._filtered(leaf, i, source, read)} {nearest})" for leaf in source.leaves
            ]
            order = f"u.{by} + 0"
            if read.sort == "total":
                document = "u.document" if store.document_id_type in _INTEGERS else 'u.document::text COLLATE "C"'
                order = f'{self.rounded(f"u.{by}")}, u.document_name COLLATE "C", {document}, u.segment_number'
            rows = f"SELECT u.* FROM ({' UNION ALL '.join(parts)}) AS u ORDER BY {order} LIMIT {read.limit}"
        distance = f"{self.rounded('s.distance')} AS distance"
        if arm.has_own_vector:
            distance = f"{self.rounded('s.own')}::float8 AS own, {self.known('s.distance')} AS distance"
        if self.shape.reads_bytes(arm):
            distance = f"s.bytes, {distance}"
        return (
            f"SELECT {self.candidate(i, store, f's.{by}', is_early=is_early)}, {distance}\n"
            f"  FROM ({rows}) AS s\n"
            f"  WHERE abs(s.{by}) < 'Infinity'"
        )

    def _filtered(self, rows: str, i: int, source: Source, read: Near) -> str:
        """The rows of a store that have a vector and a text, and pass the filter."""
        condition = source.condition
        if source.is_narrow:
            condition = f" AND t.ctid = ANY ({self.slots(f'row_keys_{i}', 'text')}::tid[])"
        return (
            f"{rows} AS t WHERE t.{identifier((read.embedding or source.store.embedding).column)} IS NOT NULL"
            f" AND t.{identifier(source.store.segment)} IS NOT NULL{condition}"
        )

    def _rows(self, i: int, source: Source, read: Near) -> str:
        """The same; or those of them that an index of smaller vectors finds."""
        store, embedding = source.store, read.embedding or source.store.embedding
        rows = self._filtered(store.rows, i, source, read)
        if read.quantization is None or read.sort != "index":
            return rows
        names = {embedding.column, store.segment_embedding, store.segment, store.document_name, store.document_id}
        names |= {store.segment_number, store.metadata, *store.key}
        columns = [f"t.{identifier(name)}" for name in sorted(name for name in names if name is not None)]
        if store.is_table:
            columns.insert(0, "t.ctid")
        is_binary = read.quantization == "binary"
        vector = f"{self.vector(read.slot)}::{self.schema}.{embedding.type_name}"

        def smaller(given: str) -> str:
            if is_binary:
                return f"{self.schema}.binary_quantize({given})::bit({embedding.dimensions})"
            return f"{given}::{self.schema}.halfvec({embedding.dimensions})"

        operator = "<~>" if is_binary else self.shape.metric.operator
        return (
            f"(SELECT {', '.join(columns)} FROM {rows}\n      ORDER BY"
            f" {smaller(f't.{identifier(embedding.column)}')}"
            f" OPERATOR({self.schema}.{operator}) {smaller(vector)}"
            f" LIMIT {read.rescored}) AS t"
        )

    def measured(self, source: Source) -> str:
        """The distance to the question, where there is one to be measured."""
        has_vector = self.shape.has_vector and source.is_measured
        return self.distance(source.store.embedding, self.vector()) if has_vector else "NULL::float8"

    def words(self, i: int, source: Source, place: int, found: Words) -> str:
        """The rows that the keyword index has found."""
        store = source.store
        is_early = not store.is_table
        keys, scores = self.slots(f"keys_{place}_{i}", "text[]"), self.slots(f"scores_{place}_{i}", "float8[]")
        equal = " AND ".join(
            f"t.{identifier(name)} = (w.key::text[])[{at}]::{type_name}"
            for at, (name, type_name) in enumerate(zip(found.key, found.key_types, strict=True), 1)
        )
        return (
            f"SELECT {self.candidate(i, store, 's.score DESC', is_early=is_early)}, s.score,"
            f" {self.known('s.distance')} AS distance\n"
            f"  FROM (SELECT {self.raw(store, is_early=is_early)}, w.score, {self.measured(source)} AS distance\n"
            f"    FROM unnest({keys}, {scores}) AS w (key, score) JOIN {found.rows} AS t ON {equal}\n"
            # OFFSET 0: else the distance is computed twice, to be tested and to be rounded, each time from TOAST
            f"    WHERE t.{identifier(store.segment)} IS NOT NULL{source.condition} OFFSET 0) AS s"
        )

    def nodes(self, i: int, source: Source, arm: Arm, place: int, found: Nodes) -> str:
        """The segments that nodes came from, each once, by its best node; or each node, where nodes are cited.

        A node of a text that has changed counts no more. One of a document counts for all of its segments that pass the
        filter; as a hit it is one, of the first of these."""
        store, is_hit = source.store, "node_key" in self.node_columns
        keys, values = self.slots(f"keys_{place}_{i}", "text[]"), self.slots(f"scores_{place}_{i}", "float8[]")
        key = ", ".join(f"n.{identifier(name)}" for name in found.key)
        way = " DESC" if arm.unit.is_descending else ""
        of_key = "t" if found.document is None else "f"
        pairs = zip(found.key, found.store_key, strict=True)
        same = " AND ".join(f"b.{identifier(name)} = {of_key}.{identifier(other)}" for name, other in pairs)
        rows = f"JOIN {store.rows} AS {of_key} ON {same}"
        if found.document is None:
            segment = f"t.{identifier(store.segment)}"
            unchanged = f' AND b.text_hash = hashtextextended(concat({segment}) COLLATE "C", 0)'
        else:
            document = identifier(found.document)
            rows += f" JOIN {store.rows} AS t ON t.{document} = f.{document}"
            unchanged = ""
        distance = "NULL::float8"
        if self.shape.has_vector and found.embedding_type is not None:
            distance = self.distance(Embedding(None, "node_embedding", found.embedding_type), self.vector(), "n")
        columns = f"n.node, n.node_number, {distance} AS node_distance, {literal(found.table)} || u.row_key AS node_key"
        best = f"{key}, {columns}, n.text_hash, u.own"
        order = ""
        if not is_hit:
            best, order = f"DISTINCT ON ({key}) {best}", f"\n      ORDER BY {key}, u.own{way}, n.node_number"
        is_early = not store.is_table
        candidate = self.candidate(i, store, f"s.own{way}", is_early=is_early, has_node=True)
        candidate = candidate.replace("s.node_distance", f"{self.known('s.node_distance')} AS node_distance")
        value = "s.own" if arm.unit.column == "own" else f"s.own AS {arm.unit.column}"
        once = "DISTINCT ON (b.node_key) " if is_hit and found.document is not None else ""
        first = f"ORDER BY b.node_key, {_place(store)}" if once else ""
        joined = (
            f"SELECT {once}{self.raw(store, is_early=is_early)}, b.node, b.node_number, b.node_distance, b.node_key,"
            f" b.own, {self.measured(source)} AS distance FROM (\n"
            f"      SELECT {best}\n"
            f"      FROM unnest({keys}, {values}) AS u (row_key, own)"
            f" JOIN {found.table} AS n ON n.ctid = u.row_key::tid{order}) AS b {rows}\n"
            f"    WHERE t.{identifier(store.segment)} IS NOT NULL{unchanged}{source.condition}"
        )
        limit = f"ORDER BY b.own{way}, {_place(store)}, b.node_number LIMIT {arm.candidates}"
        if once:
            joined = f"SELECT s.* FROM ({joined} {first}) AS s"
            place_of = 's.document_name COLLATE "C", s.document, s.segment_number, s.node_number'
            limit = f"ORDER BY s.own{way}, {place_of} LIMIT {arm.candidates}"
        return (
            f"SELECT {candidate}, {value}, {self.known('s.distance')} AS distance\n  FROM ({joined}\n    {limit}) AS s"
        )

    def given(self, i: int, arm: Arm, place: int) -> str:
        """Hits as JSON, of a shard or a function."""
        hits = self.slots(f"hits_{place}_{i}", "jsonb")
        key = (
            "s.row_key::tid AS row_key"
            if self.has_tids
            else f"coalesce(s.row_key, {self._content('s.document_key', 's.place')}) AS row_key"
        )
        text = ", s.segment, s.metadata" if self.has_text else ""
        text += "".join(f", NULL::{type_name} AS {name}" for name, type_name in self.node_columns.items())
        columns = "vector_store text, document_name text, document_id bigint, document_key text, segment_number bigint,"
        columns += " segment text, distance numeric, metadata jsonb, keyword_score float8, score float8, row_key text"
        value = {"score": ", s.keyword_score AS score", "own": ", s.score AS own"}.get(arm.unit.column, "")
        if self.shape.reads_bytes(arm):
            value += ", octet_length(s.segment) AS bytes"
        return (
            f"SELECT {i} AS store, {key}, {', '.join(f's.{name}' for name in NAMES)}{text}{value},"
            f" round(s.distance, 4) AS distance\n"
            f"  FROM ROWS FROM (jsonb_to_recordset({hits}) AS ({columns})) WITH ORDINALITY AS s ({{names}})"
        ).replace("{names}", ", ".join(c.split()[0] for c in columns.split(", ")) + ", place")


def as_jsonb(column: str) -> str:
    """A column of a row; null where it is json that jsonb cannot hold: one such row must not break the search."""
    return f"ml_rag._as_jsonb(t.{identifier(column)})"


def document_name(store: Store) -> str:
    """The name of a row's document: its column, else what programs keep of it in the metadata, else the store's."""
    if store.document_name is not None:
        return f"t.{identifier(store.document_name)}::text"
    if store.metadata is None:
        return f"{literal(store.vector_store)}::text"
    found = ", ".join(
        f"nullif({as_jsonb(store.metadata)} ->> '{key}', '')"
        for key in ("source", "file_path", "file_name", "url", "title")
    )
    return f"coalesce({found}, {literal(store.vector_store)})"


def _place(store: Store) -> str:
    """What settles ties among the rows of a store."""
    document = "NULL::text"
    if store.document_id is not None:
        column = f"t.{identifier(store.document_id)}"
        document = column if store.document_id_type in _INTEGERS else f'{column}::text COLLATE "C"'
    number = "NULL" if store.segment_number is None else f"t.{identifier(store.segment_number)}"
    return f'({document_name(store)}) COLLATE "C", {document}, {number}::bigint'
