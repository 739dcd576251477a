"""How each arm of a request searches each store: before the statement, by the statement, by another look."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_rag.backend import indexes
from ml_rag.backend.retrieval import filters, functions, kept, shards
from ml_rag.backend.retrieval import stores as discovery
from ml_rag.backend.retrieval.arms import KEYWORD
from ml_rag.backend.retrieval.filters import Filtered, Lookup
from ml_rag.backend.retrieval.plan import plan, widening
from ml_rag.backend.retrieval.request import AskedArm, Request
from ml_rag.backend.retrieval.shape import (
    GIVEN,
    Arm,
    Given,
    Near,
    Nodes,
    Shape,
    Slots,
    Source,
    Values,
    Words,
    filter_slot,
)
from ml_rag.backend.retrieval.sqltext import identifier, literal
from ml_rag.backend.retrieval.stores import Embedding, Store, record
from ml_rag.backend.retrieval.vectors import Vectors
from ml_rag.backend.sqlstate import sqlstate
from ml_rag.backend.statements import Statements
from ml_rag.errors import MlRagError

#: what pgvector has by default
EF_SEARCH, PROBES = "40", "1"
#: the settings of ml_rag._compile_question; at least ten lists of an IVFFlat index are read by default
_SET: tuple[str, str, str, str, str] = EF_SEARCH, "10", "off", "on", "force_generic_plan"
#: partitions of a store from which on a plan of all of them is not kept: each takes some kilobytes
_MANY_PARTS = 100
#: nodes that are looked at, at most
_MOST_NODES = 100_000

_run = Statements(
    {
        "settings": (
            "SELECT set_config('hnsw.ef_search', $1, true), set_config('ivfflat.probes', $2, true),"
            " set_config('enable_seqscan', $3, true), set_config('enable_sort', $4, true),"
            " set_config('plan_cache_mode', $5, true)",
            *("text", "text", "text", "text", "text"),
        ),
        "quantization": (
            "SELECT ml_rag._quantization(jsonb_populate_record(NULL::ml_rag.store, $1), $2) AS name",
            *("jsonb", "text"),
        ),
        "try": (
            "SELECT t.answer::text AS found, t.failure::text AS failure FROM ml_rag._try_statement($1,"
            " ARRAY(SELECT s FROM jsonb_populate_recordset(NULL::ml_rag.store, $2) AS s)) AS t",
            *("text", "jsonb"),
        ),
        "tokens": ("SELECT (ml_rag._tokens($1::regconfig, $2)).tokens::text AS tokens", *("text", "text")),
        "indexed rows": ("SELECT ml_rag._indexed_rows($1) AS rows", "oid"),
        # what lies below a relation that is not an ordinary table, in one pass: there may be a thousand partitions
        "parts": (
            "SELECT cardinality(p.parts) > $2 AS has_many, coalesce(o.are_small, false) AS are_small, o.rows,"
            # a scan of it can end before it has seen every row: by an approximate index, and who knows what of a view
            # or a shard
            " o.has_others OR EXISTS (SELECT FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid"
            " JOIN pg_am AS a ON a.oid = i.relam WHERE x.indrelid = ANY (p.parts)"
            " AND a.amname IN ('hnsw', 'ivfflat')) AS falls_short,"
            " (SELECT CASE WHEN ml_rag._is_distributed(c.oid) THEN 'distributed' ELSE c.relkind::text END"
            " FROM pg_class AS c WHERE c.oid = (p.store).relation) AS kind,"
            " ARRAY(SELECT quote_ident(a.attname) FROM pg_attribute AS a WHERE a.attrelid = (p.store).relation"
            " AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum) AS columns"
            " FROM (SELECT s.store, ml_rag._parts((s.store).relation) AS parts"
            " FROM (SELECT jsonb_populate_record(NULL::ml_rag.store, $1) AS store) AS s OFFSET 0) AS p"
            " CROSS JOIN LATERAL (SELECT bool_and(c.reltuples BETWEEN 0 AND 20000) AS are_small,"
            " coalesce(bool_or(c.relkind IN ('v', 'f')), false) AS has_others,"
            " coalesce(sum(greatest(0, c.reltuples)), 0)::float8 AS rows"
            " FROM pg_class AS c WHERE c.oid = ANY (p.parts) AND c.relkind <> 'p') AS o",
            *("jsonb", "int4"),
        ),
        "shards": (
            "SELECT to_jsonb(array(SELECT ml_rag._relation_name(l) FROM unnest(p.leaves) AS l))::text AS leaves,"
            " p.leaves IS NOT NULL AS has_leaves, ml_rag._has_shards((p.store).relation) AS has_shards"
            " FROM (SELECT s.store, ml_rag._leaves(s.store) AS leaves"
            " FROM (SELECT jsonb_populate_record(NULL::ml_rag.store, $1) AS store) AS s OFFSET 0) AS p",
            "jsonb",
        ),
        "hold": ("SELECT ml_rag._hold(ARRAY[c.oid]) FROM pg_class AS c WHERE c.oid = $1 AND c.relkind = 'p'", "oid"),
        "nodes": (
            # one that has children, which are not nodes, cannot be searched
            "SELECT to_jsonb(g)::text AS own, c.oid::int8 AS relation, ml_rag._type_name(k.atttypid) AS key_type,"
            " t.typname::text AS embedding_type, nullif(e.atttypmod, -1) AS dimensions"
            " FROM ml_rag._node_groups($1) AS g JOIN pg_class AS c ON c.oid = g.relation AND NOT c.relhassubclass"
            " JOIN pg_attribute AS k ON k.attrelid = c.oid AND k.attname = g.key[1]"
            " LEFT JOIN pg_attribute AS e ON e.attrelid = c.oid AND e.attname = 'node_embedding' AND NOT e.attisdropped"
            " LEFT JOIN pg_type AS t ON t.oid = e.atttypid"
            " WHERE g.name = $2 AND has_table_privilege(c.oid, 'SELECT')"
            " AND ($3 = 'named' OR ml_rag._are_trusted(ml_rag._read_with(c.oid)))",
            *("oid", "text", "text"),
        ),
    }
)


class Session(NamedTuple):
    """What the caller's session says: settings, before the function that runs this pins them."""

    role: str
    ef_search: str | None
    probes: str | None
    seqscan: str

    @classmethod
    def of(cls, session: list[str | None]) -> Session:
        """Of ml_rag._session_settings."""
        role, ef_search, probes, seqscan = session
        return cls(role or "", ef_search, probes, seqscan or "on")


class Context:
    """What runs a call. ``schema``: pgvector's, as it is written; ``keyword``: the module that scores words."""

    def __init__(self, plpy: Any, schema: str, session: Session, keyword: Callable[[], Any]) -> None:
        self.plpy, self.schema, self.session, self.keyword = plpy, schema, session, keyword
        #: as the function that runs this begins
        self.settings = _SET
        #: called when others have run before the statement: functions of the caller's, other servers
        self.after_pause: Callable[[], None] = lambda: None
        #: of what the call has found
        self.moment = discovery.Moment(None)

    def look_anew(self) -> discovery.Moment:
        """Of the catalog as it is now."""
        self.moment = discovery.now(self.plpy, self.schema)
        return self.moment

    def has_moved(self) -> bool:
        """Whether the catalog may be another one than when the call looked at it."""
        return discovery.now(self.plpy, self.schema) is not self.moment


def hold(plpy: Any, store: Store) -> None:
    """No partition of a store comes, goes or becomes a shard from here on.

    Before the moment that a search looks at: what a lock that is waited for lets others do would not be seen.
    """
    if not store.is_table:
        _run(plpy, "hold", store.relation)


class NoIndex(Exception):
    """The store has no keyword index, or no node group, that the arm could search."""


class BrokenIndex(MlRagError):
    """The keyword index of a store cannot be used: its configuration was dropped, or the type of its key changed."""

    sqlstate = "55000"


#: keyword indexes of stores, as the caller may read them: what a store is known by covers its privileges
_indexes: dict[Store, dict[str, Any]] = {}
_MOST_INDEXES = 1000
_quantizations: dict[tuple[Store, Embedding | None, str], str | None] = {}


class Search:
    """The search of one request. ``missing``: of stores, the shards that do not answer."""

    def __init__(
        self,
        context: Context,
        request: Request,
        question: str,
        vectors: Vectors,
        missing: dict[Store, list[str]],
        corpus: Any = None,
    ) -> None:
        self._context, self._plpy = context, context.plpy
        self.request, self.question, self.vectors = request, question, vectors
        self._missing, self._corpus = missing, corpus
        shape = request.shape
        if vectors.own or vectors.embeddings:
            arms = tuple(
                arm._replace(has_own_vector=True) if vectors.is_own(place) else arm
                for place, arm in enumerate(shape.arms, 1)
            )
            shape = shape._replace(arms=arms)
        if shape.has_vector != (vectors.question is not None):
            shape = shape._replace(has_vector=not shape.has_vector)
        self.shape = shape
        self.values = {"nothing": None, "read_bytes": None} | request.values | vectors.values
        for place, limit in vectors.read_bytes.items():
            self.values["read_bytes" if place == 0 else f"read_bytes_{place}"] = limit
        self._lists: list[list[str]] = []
        self._filters = filters.Filters(context.plpy, request.options)
        self._filtered: dict[Store, Filtered] = {}
        self._lookups: dict[tuple[int, int], Any] = {}
        self._kinds: dict[Store, Any] = {}
        #: of arms in stores, what option explain tells of them, by name of the arm and of the store
        self.facts: dict[tuple[str, str], dict[str, Any]] = {}
        #: how often the statement has been run
        self.reads = 0

    # -- before the statement -----------------------------------------------------------------------------------------

    def source(self, store: Store) -> Source:
        """A store, with what of it the filters leave; how its rows are read."""
        vector = self.vectors.question
        length = None if vector is None else self.vectors.dimensions(vector)
        source = Source(store, is_measured=store.dimensions in (None, length))
        if not store.is_table:
            source = self._in_parts(source)
        if not self.request.is_filtered:
            return source
        found = self._filter(store)
        if found.arguments not in self._lists:
            self._lists.append(found.arguments)
            self.values[filter_slot(len(self._lists))] = found.arguments
        place = 1 + self._lists.index(found.arguments)
        condition = found.condition
        if place > 1:
            condition, _ = self._filters.compiled(store, Slots.filter(place))
        return source._replace(condition=condition, filter=place)

    def has_moved(self) -> bool:
        """Whether stores have other parts by now than they were looked up with."""
        return any(found["leaves"] != self._parts(store)["leaves"] for store, found in self._kinds.items())

    def read_now(self, source: Source, store: Store) -> Source:
        """A source without its filter, with the parts that it has now."""
        source = source._replace(store=store, condition="", leaves=None)
        return source if store.is_table else self._in_parts(source)

    def _parts(self, store: Store) -> dict[str, Any]:
        given = json.dumps(record(store) | {"missing": self._missing.get(store)})
        found: dict[str, Any] = self._context.moment.look_up(
            ("parts", given), lambda: dict(_run(self._plpy, "parts", given, _MANY_PARTS)[0])
        )
        return found | dict(_run(self._plpy, "shards", given)[0])

    def _in_parts(self, source: Source) -> Source:
        store = source.store
        found = self._kinds[store] = self._parts(store)
        if not found["has_leaves"]:
            return source
        columns = tuple(found["columns"]) if self._missing.get(store) else ()
        return source._replace(leaves=tuple(json.loads(found["leaves"])), columns=columns)

    def _filter(self, store: Store) -> Filtered:
        if store not in self._filtered:
            arms = self.request.shape.arms
            arm = next((arm for arm in arms if arm.kind != KEYWORD), arms[0])
            is_estimated = not arm.in_nodes and arm.kind.has_index and not (arm.kind == KEYWORD and store.is_secured)
            found = self._kinds.get(store)
            rows = found["rows"] if found and found["kind"] == "p" and not found["has_shards"] else None
            self._filtered[store] = filters.of_store(
                *(self._plpy, store, self._filters, "" if arm.in_nodes else arm.kind.stage, arm.candidates),
                is_estimated=is_estimated,
                rows=rows,
            )
        return self._filtered[store]

    def add(self, source: Source, place: int, i: int) -> Source:
        """The source, with how an arm searches it. Raises NoIndex, BrokenIndex."""
        arm, asked = self.shape.arms[place - 1], self.request.arms[place - 1]
        is_split = not source.store.is_table and arm.kind.is_shipped
        search: Any
        if arm.in_nodes:
            search = self._nodes(source, arm, asked, place, i)
        elif is_split and (found := self._of_shards(source, arm, asked, place)) is not None:
            self.values[f"hits_{place}_{i}"] = found
            search = GIVEN
        else:
            source, search = arm.kind.look_up(self, source, arm, asked, place, i)
        return source._replace(searches=(*source.searches, search))

    def nothing(self, source: Source, place: int, i: int) -> Source:
        """The source, where an arm finds nothing in it that it could search."""
        self.values[f"hits_{place}_{i}"] = "[]"
        return source._replace(searches=(*source.searches, GIVEN))

    # -- by meaning ---------------------------------------------------------------------------------------------------

    def near(self, source: Source, arm: Arm, place: int, i: int) -> tuple[Source, Near]:
        """The rows that pass are compared one by one where they are few. Raises NoIndex where the store has no such
        embedding."""
        place_of = place, source.store.relation
        embedding = self.vectors.embeddings.get(place_of)
        if embedding is None and place_of in self.vectors.embeddings:
            raise NoIndex
        own = self._filtered.get(source.store)
        is_narrow = own is not None and own.is_narrow
        if own is not None and is_narrow and own.row_keys is not None:
            self.values[f"row_keys_{i}"] = own.row_keys
            source = source._replace(is_narrow=True)
        read = Near.first(arm.candidates)
        if source.condition:
            read = Near.filtered(arm.candidates, is_narrow=is_narrow)
        read = read._replace(embedding=embedding, slot=self.vectors.slot(place, source.store))
        if read.sort == "exact" or self.request.index_options.get("exact"):
            return source, read._replace(sort="exact")
        quantization = self._quantization(source, embedding)
        if quantization is None:
            return source, read
        tuned = source.store.tuned if embedding is None else None
        kept = tuned.rescore if tuned is not None and quantization == "binary" else None
        rescore = self.request.index_options.get("rescore") or kept
        return source, read._replace(quantization=quantization, rescore=rescore)

    def _quantization(self, source: Source, embedding: Embedding | None) -> str | None:
        """halfvec or binary where only an index of such vectors serves the metric."""
        store = source.store
        if not store.has_expressions or source.leaves is not None:
            return None
        key = store, embedding, self.shape.metric.name
        if key not in _quantizations:
            if len(_quantizations) > _MOST_INDEXES:
                _quantizations.clear()
            fields = record(store)
            if embedding is not None:
                fields |= {"segment_embedding": embedding.column, "embedding_type": embedding.type_name}
                fields |= {"dimensions": embedding.dimensions}
            found = _run(self._plpy, "quantization", json.dumps(fields), self.shape.metric.name)
            _quantizations[key] = found[0]["name"]
        return _quantizations[key]

    # -- by words -----------------------------------------------------------------------------------------------------

    def index(self, store: Store, *, is_fresh: bool = False) -> dict[str, Any]:
        """The keyword index of a store. Raises NoIndex."""
        if is_fresh or store not in _indexes:
            found = indexes.of_caller(self._plpy, store.relation)
            index = next((own for own in found if own["segment"] == store.segment), None)
            if index is None:
                raise NoIndex
            if len(_indexes) > _MOST_INDEXES:
                _indexes.clear()
            _indexes[store] = index
        return _indexes[store]

    def tokens(self, index: dict[str, Any], text: str) -> tuple[list[str], list[int]]:
        """The words of a text, by code point, as COLLATE "C" has it, and how often each stands in it."""
        words = json.loads(_run(self._plpy, "tokens", index["configuration"], text)[0]["tokens"])
        terms = sorted(words)
        return terms, [words[term] for term in terms]

    def words(self, source: Source, arm: Arm, asked: AskedArm, place: int, i: int) -> tuple[Source, Words]:
        lookup = filters.first_lookup(source.store, self._filtered.get(source.store), arm.candidates)
        index = self._look_up(source, arm, asked, place, i, lookup)
        rows = source.rows
        if not source.store.is_table and not source.columns:
            rows = _run(self._plpy, "indexed rows", source.store.relation)[0]["rows"]
        return source, Words(tuple(index["key"]), tuple(index["key_types"]), rows)

    def _look_up(self, source: Source, arm: Arm, asked: AskedArm, place: int, i: int, lookup: Lookup) -> dict[str, Any]:
        """Ask the keyword index, and keep what it finds as parameters of the statement."""
        keyword, store = self._context.keyword(), source.store
        while True:
            is_kept = store in _indexes
            index = self.index(store)
            try:
                terms, weights = self.tokens(index, asked.text(self.question))
                # statistics of the visible rows are of those that do not pass, too
                is_whole = index["secured"] and index["statistics"] == "visible"
                row_keys = None if is_whole else lookup.row_keys
                passing = None
                if lookup.most is not None and not is_whole:
                    own = self._filtered[store]
                    passing = own.condition, own.arguments, lookup.most
                keys, scores = keyword.find(
                    self._plpy, index, terms, weights, lookup.candidates, row_keys, self._corpus, passing
                )
                break
            except keyword.TooMany:
                lookup = filters.lookup_beyond(self._filtered[store], lookup, arm.candidates)
            except keyword.OtherIndex:
                del _indexes[store]
                if not is_kept:
                    raise NoIndex from None
            except self._plpy.SPIError as e:
                if sqlstate(e).startswith("57") or sqlstate(e) == "40001":
                    raise
                if is_kept:  # it may be another one by now
                    del _indexes[store]
                    continue
                if not sqlstate(e).startswith(("22", "38", "F0")) and sqlstate(e) != "42704":
                    raise
                raise BrokenIndex(str(e)) from None
        self.values |= {f"keys_{place}_{i}": keys, f"scores_{place}_{i}": scores}
        self.values[f"candidates_{place}_{i}"] = lookup.candidates
        self._lookups[place, i] = lookup
        self._tell(arm, store, configuration=index["configuration"], words=terms, limit=arm.candidates)
        return index

    # -- node groups --------------------------------------------------------------------------------------------------

    def _nodes(self, source: Source, arm: Arm, asked: AskedArm, place: int, i: int) -> Nodes:
        """Raises NoIndex where the store has no such group that the arm can search."""
        found = _run(self._plpy, "nodes", source.store.relation, asked.node_group, source.store.found)
        embedding = self.vectors.embeddings.get((place, source.store.relation))
        if not found or (asked.takes_vectors and embedding is None):
            raise NoIndex
        own = json.loads(found[0]["own"])
        fields = record(source.store) | {
            "embed_model_id": own["options"].get("embed_model_id"),
            "segment": "node",
            "segment_embedding": "node_embedding",
            "document_name": None,
            "metadata": None,
            # these settle ties
            "document_id": own["key"][0],
            "segment_number": "node_number",
            "document_id_type": found[0]["key_type"],
            "segment_number_type": "integer",
            "embedding_type": found[0]["embedding_type"],
            "dimensions": found[0]["dimensions"],
        }
        store = discovery.of_record(self._plpy, self._context.schema, fields, found[0]["relation"])
        inner = NodeSearch(self, source, store, own, arm, asked, place)
        self._lookups[place, i] = inner
        self._find_nodes(inner, place, i)
        return Nodes(
            *(store.table, tuple(own["key"]), tuple(own["store_key"]), own["options"].get("document")),
            store.embedding_type if store.embed_model_id == source.store.embed_model_id else None,
        )

    def _find_nodes(self, inner: NodeSearch, place: int, i: int) -> None:
        keys, scores = inner.find()
        self.values |= {f"keys_{place}_{i}": keys, f"scores_{place}_{i}": scores}
        self.values[f"candidates_{place}_{i}"] = inner.candidates

    # -- functions and shards -----------------------------------------------------------------------------------------

    def by_function(self, source: Source, arm: Arm, asked: AskedArm, place: int, i: int) -> tuple[Source, Given]:
        own = self._filtered.get(source.store)
        scored = source
        if own is not None and own.row_keys is not None:
            self.values[f"row_keys_{i}"] = own.row_keys
            scored = source._replace(is_narrow=True)
        vector = self.vectors.of(place, source.store)
        hits, rows = functions.score(
            self._context, self.shape, scored, arm, asked, asked.text(self.question), vector, self.values, i
        )
        self._tell(arm, source.store, rows=rows, function=asked.function, limit=arm.candidates)
        self.values[f"hits_{place}_{i}"] = hits
        self._context.after_pause()
        return source, GIVEN

    def _of_shards(self, source: Source, arm: Arm, asked: AskedArm, place: int) -> str | None:
        """What the shards of a store and its other partitions find, as JSON text; None = its rows are read here."""
        is_keyword = arm.kind == KEYWORD
        is_distributed = self.kind(source.store) == "distributed"
        if not is_distributed and self._kinds.get(source.store, {}).get("has_shards") is False:
            return None
        place_of = place, source.store.relation
        embedding = self.vectors.embeddings.get(place_of)
        if place_of in self.vectors.embeddings and (embedding is None or not is_distributed):
            return None  # it has none of the name; shards that are foreign tables have one
        settings = {"ef_search", "probes", "rescore"} & self.request.index_options.keys()
        # of a few rows without filters one statement takes less: postgres_fdw ships its ORDER BY and LIMIT, but reads
        # vectors as text, may read all rows where it cannot ship a filter, and has no settings of an index
        is_simple = arm.candidates <= 50 and not source.condition and not settings
        if not is_keyword and is_simple and not is_distributed:
            return None
        asking = shards.Asking(self, self._context, source, self._missing.get(source.store), arm, asked)
        question, own = self.vectors.question, self.vectors.of(place, source.store)
        column = None if embedding is None else embedding.column
        own = None if own == question else own
        hits = asking.hits(self.question, question, own, column, is_keyword=is_keyword)
        self._context.after_pause()
        return hits

    # -- the statement ------------------------------------------------------------------------------------------------

    def run(self, sources: list[Source]) -> tuple[Any, list[Source]]:
        """The row of the statement, and how the stores were read in the end."""
        while True:
            self.reads += 1
            ways = self.set(sources)[2:]
            reads_servers = any(map(self._reads_servers, sources))
            if reads_servers:
                row = self._try(self.text(sources, self.shape), sources)
            else:
                made = kept.statement(self._plpy, self.shape, tuple(sources), self._context.schema, ways)
                row = made.execute(self._plpy, self.values)[0]
            failed = [one for one in zip(self.searched(sources), row["checks"], strict=True) if one[1]]
            if not failed:
                return row, sources
            again = [source._replace(searches=list(source.searches)) for source in sources]  # type: ignore[arg-type]
            is_again = False
            for (place, i), check in failed:
                source, arm = sources[i - 1], self.shape.arms[place - 1]
                search = source.searches[place - 1]
                if isinstance(search, Near):
                    other = self._read_again(source, search, arm.candidates, check)
                    again[i - 1].searches[place - 1] = other  # type: ignore[index]
                    is_again = is_again or other != search
                elif check == "missing":
                    is_again = self._look_again(source, place, i) or is_again
            if not is_again:
                return row, sources
            sources = [source._replace(searches=tuple(source.searches)) for source in again]

    def alone(self, values: dict[str, Any]) -> Search:
        """The same with other parameters."""
        other = copy.copy(self)
        other.values = values
        return other

    def _reads_servers(self, source: Source) -> bool:
        """Whether the statement may read other servers: not where what its arms have found there is given."""
        is_given = all(search is None or isinstance(search, Given) for search in source.searches)
        return self._has_servers(source) and not (is_given and self.shape.overlap == 0)

    def _has_servers(self, source: Source) -> bool:
        found = self._kinds.get(source.store, {})
        return bool(found.get("has_shards") or found.get("kind") in ("f", "distributed"))

    def widened(self, shape: Shape, sources: tuple[Source, ...], hits: str) -> Any:
        """The row of the statement that widens hits by their neighbours. Raises Silent."""
        schema = self._context.schema
        if any(map(self._has_servers, sources)):
            return self._try(widening(shape, sources, schema, Values({"hits": hits})).text, sources)
        made = kept.prepare(self._plpy, widening(shape, sources, schema, Slots()))
        return made.execute(self._plpy, {"hits": hits})[0]

    def _is_planned_anew(self, source: Source) -> bool:
        """Whether the planner is to know the values of the call: it leaves out partitions whose rows do not pass."""
        found = self._kinds.get(source.store, {})
        return found.get("kind") == "p" and bool(source.condition or found["has_many"])

    def text(self, sources: list[Source], shape: Shape) -> str:
        """The statement with its values in it."""
        conditioned = [
            source._replace(condition=self._filters.compiled(source.store, Values.filter(source.filter))[0])
            if source.condition
            else source
            for source in sources
        ]
        return plan(shape, tuple(conditioned), self._context.schema, Values(self.values)).text

    def _try(self, text: str, sources: Sequence[Source]) -> Any:
        """The row of a statement that reads other servers. Raises Silent where one does not answer: only PL/pgSQL sees
        where an error comes from."""
        stores = json.dumps([record(source.store) for source in sources])
        found = _run(self._plpy, "try", text, stores)[0]
        if found["failure"] is not None:
            raise shards.Silent(json.loads(found["failure"]))
        return json.loads(found["found"])

    def searched(self, sources: list[Source]) -> list[tuple[int, int]]:
        """Arms and stores, by place and number, as the checks of the statement have them."""
        return [
            (place, i)
            for place in range(1, len(self.shape.arms) + 1)
            for i, source in enumerate(sources, 1)
            if source.searches[place - 1] is not None
        ]

    def _read_again(self, source: Source, read: Near, n: int, check: str) -> Near:
        """How a store is read again where that is needed."""
        falls_short = source.store.is_approximate
        if not source.store.is_table:
            falls_short = self._kinds[source.store]["falls_short"]
        if check == "short" and read.sort == "index" and falls_short:
            return read._replace(sort="exact", quantization=None)
        return read.further(n) if check == "tied" and read.sort != "total" else read

    def _look_again(self, source: Source, place: int, i: int) -> bool:
        """Whether another look at an index by words, or at nodes, may find more."""
        arm, asked, lookup = self.shape.arms[place - 1], self.request.arms[place - 1], self._lookups[place, i]
        if isinstance(lookup, NodeSearch):
            if lookup.candidates >= _MOST_NODES:
                return False
            self._find_nodes(lookup, place, i)
            return True
        own = self._filtered.get(source.store)
        further = filters.further_lookup(source.store, own, lookup, arm.candidates)
        if further is None:
            return False
        self._look_up(source, arm, asked, place, i, further)
        return True

    def set(self, sources: list[Source]) -> tuple[str, str, str, str, str]:
        """The settings of a statement, which end with the function that runs this: hnsw.ef_search, ivfflat.probes,
        enable_seqscan, enable_sort and plan_cache_mode."""
        session, index = self._context.session, self.request.index_options
        ef_search = index.get("ef_search") or session.ef_search or EF_SEARCH
        if "ef_search" not in index and str(ef_search) == EF_SEARCH:
            ef_search = max(map(self._ef_search, sources), default=int(EF_SEARCH))
        probes = index.get("probes") or session.probes or PROBES
        if "probes" not in index and str(probes) == PROBES:
            own = [(source.store.tuned and source.store.tuned.probes) or source.store.probes for source in sources]
            probes = max(own, default=PROBES)
        reads = [(source, search) for source in sources for search in source.searches if isinstance(search, Near)]
        # The planner does not know what it costs to read vectors that are stored out of line, and would sort tables of
        # some thousand rows. Where nothing leaves rows out, their index is faster.
        has_all_rows = not any(source.store.is_secured or source.condition for source in sources)
        has_all_rows = has_all_rows and all(self._kind(source) in ("r", "p") for source in sources)
        by_index = [source for source, read in reads if read.sort == "index"]
        seqscan = "off" if has_all_rows and by_index else session.seqscan
        # Many rows pass a filter here. The plan that is kept does not know its values: it follows the index.
        sort = "off" if any(source.condition for source in by_index) else "on"
        if "ef_search" not in index:
            # what an index has gone past it does not come back to
            for _, read in reads:
                if read.quantization is not None:
                    ef_search = max(int(ef_search), min(1000, read.rescored))
        mode = "force_custom_plan" if any(map(self._is_planned_anew, sources)) else "force_generic_plan"
        settings = str(ef_search), str(probes), seqscan, sort, mode
        if settings != self._context.settings:
            _run(self._plpy, "settings", *settings)
            self._context.settings = settings
        return settings

    def _ef_search(self, source: Source) -> int:
        """What an HNSW index of a store is searched with unless the call or the session says otherwise."""
        store = source.store
        if store.tuned is not None and store.tuned.ef_search is not None:
            return store.tuned.ef_search
        # with 40, of the ten nearest segments of 100,000 it misses two, and of 5,000 none; each partition has an index
        is_small = self._kinds[store]["are_small"] if store in self._kinds else store.is_small
        usual = int(EF_SEARCH) if is_small else 200
        # an index scan continues beyond it, but it takes less time to look at as many rows as are wanted at once
        wanted = [min(1000, search.limit) for search in source.searches if isinstance(search, Near)]
        return max([usual, *wanted])

    def here(self, source: Source, arm: Arm, asked: AskedArm, corpus: Any) -> tuple[str, dict[str, Any]]:
        """The hits of one arm in the partitions that are here, as JSON text, and their facts for option explain."""
        source = source._replace(columns=tuple(self._kinds[source.store]["columns"]))
        shape = self.shape._replace(arms=(arm._replace(part=1),), n=arm.candidates, form="hits", overlap=0)
        shape = shape._replace(has_max_distance=False, has_percentage=False)
        request = self.request._replace(shape=shape, arms=(asked,), values={"limit_1": self._limit(arm)})
        vectors = Vectors(self.vectors.question)
        if (own := self.vectors.own.get((1 + self.shape.arms.index(arm), None))) is not None:
            vectors.own[1, None] = own
        search = Search(self._context, request, self.question, vectors, {}, corpus)
        search._kinds, search._filtered = self._kinds, self._filtered
        search.values |= {name: value for name, value in self.values.items() if name.startswith("filter")}
        source, one = arm.kind.look_up(search, source, arm, asked, 1, 1)
        row, _ = search.run([source._replace(searches=(one,))])
        facts = search.facts.get((arm.name, source.store.vector_store), {})
        return row["hits"] or "[]", facts

    def _limit(self, arm: Arm) -> Any:
        return self.values.get(f"limit_{1 + self.shape.arms.index(arm)}")

    def _kind(self, source: Source) -> str:
        kind: str = "r" if source.store.is_table else self._kinds[source.store]["kind"]
        return kind

    def kind(self, store: Store) -> str | None:
        """Of a store that is not an ordinary table: distributed (by Citus), or its pg_class.relkind."""
        return self._kinds[store]["kind"] if store in self._kinds else None

    def _tell(self, arm: Arm, store: Store, **facts: Any) -> None:
        if self.request.explains:
            self.facts[arm.name, store.vector_store] = facts


class NodeSearch:
    """The search of one arm in a node group of a store: for nodes of as many segments as the arm brings, or for as many
    nodes, where these are cited."""

    def __init__(
        self, outer: Search, source: Source, nodes: Store, group: dict[str, Any], arm: Arm, asked: AskedArm, place: int
    ) -> None:
        self._outer, self._source, self._nodes, self._group = outer, source, nodes, group
        self._arm, self._asked, self._place = arm, asked, place
        self.candidates = -(-arm.candidates // 4) if outer.shape.returns_nodes else arm.candidates

    def find(self) -> tuple[list[str], list[float]]:
        """Row keys and values of the best nodes, of four times as many as before."""
        outer = self._outer
        self.candidates = min(4 * self.candidates, max(self._arm.candidates, _MOST_NODES))
        vector = outer.vectors.of(self._place, self._source.store) if self._asked.takes_vectors else None
        arm = self._arm._replace(
            candidates=self.candidates, in_nodes=False, has_own_vector=False, has_limit=False, part=1
        )
        shape = Shape((arm,), self.candidates, outer.shape.metric, has_vector=vector is not None, form="keys")
        request = outer.request._replace(
            shape=shape, arms=(self._asked._replace(node_group=None),), is_filtered=False, values={}
        )
        search = Search(outer._context, request, outer.question, Vectors(vector), {})
        source = Source(self._nodes)
        filtered = outer._filtered.get(self._source.store)
        if filtered is not None:
            own = search._filtered[self._nodes] = self._filter(filtered)
            search.values["filter"] = filtered.arguments
            source = source._replace(condition=own.condition)
        source = search.add(source, 1, 1)
        row, _ = search.run([source])
        if outer.request.explains:
            facts = search.facts.get((arm.name, self._nodes.vector_store), {})
            outer.facts[arm.name, self._source.store.vector_store] = facts
        return list(row["keys"]), list(row["scores"])

    def _filter(self, filtered: Filtered) -> Filtered:
        """A filter of the store as one of the nodes: of a document's nodes, where one of its segments passes."""
        store, group, rows = self._source.store, self._group, filters.rows_of(self._outer._plpy, self._nodes)
        made = filtered._replace(rows=rows, n=None, likely=None)
        if not made.condition:
            return made
        own, of_store = (", ".join(f"t.{identifier(name)}" for name in group[key]) for key in ("key", "store_key"))
        before, after = f"({own}) IN (SELECT {of_store} FROM {store.rows} AS t WHERE ", ")"
        if (document := group["options"].get("document")) is not None:
            name = f"t.{identifier(document)}"
            before, after = f"{before}{name} IN (SELECT {name} FROM {store.rows} AS t WHERE ", "))"
        if made.row_keys is not None:
            plpy = self._outer._plpy
            # as a constant: how many rows these are decides how the others are found
            keys = f"t.ctid = ANY ({literal(made.row_keys)}::tid[])"
            row = plpy.execute(
                f"SELECT coalesce(array_agg(t.ctid), '{{}}')::text AS row_keys, count(*) AS n"
                f" FROM {self._nodes.table} AS t WHERE t.node_number > 0 AND {before}{keys}{after}"
            )[0]
            made = made._replace(row_keys=row["row_keys"], n=row["n"])
        return made._replace(condition=f" AND {before}true{made.condition}{after}")
