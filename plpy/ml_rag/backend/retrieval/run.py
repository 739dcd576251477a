"""Runs the statement of a retrieval by a plan that the session keeps, and finds out whether another one is needed."""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ml_rag.backend import calls, indexes, rights
from ml_rag.backend.retrieval import request as requests
from ml_rag.backend.retrieval import stores as discovery
from ml_rag.backend.retrieval.plan import Read, Shape, Source, Statement, Values, plan, rescored
from ml_rag.backend.retrieval.request import Request
from ml_rag.backend.retrieval.stores import KeywordIndex, Store, record
from ml_rag.backend.statements import Statements
from ml_rag.errors import MlRagError
from ml_rag.protocol import SUCCESS

#: stores of one statement; more are searched one by one
MOST_STORES = 8
#: plans that a session keeps
KEPT = 64
#: what pgvector has by default
_EF_SEARCH, _PROBES = "40", "1"

_run = Statements(
    {
        "embed": (
            "SELECT (ml_rag._embed_queries(ARRAY[$1], $2, CASE WHEN $3 THEN ml_rag._hint_of_words($4) END))[1]"
            " AS vector",
            *("text", "text", "bool", "jsonb"),
        ),
        "settings": (
            "SELECT set_config('hnsw.ef_search', $1, true), set_config('ivfflat.probes', $2, true),"
            " set_config('enable_seqscan', $3, true), set_config('enable_sort', $4, true)",
            *("text", "text", "text", "text"),
        ),
        "quantization": (
            "SELECT ml_rag._quantization(jsonb_populate_record(NULL::ml_rag.store, $1), $2) AS name",
            *("jsonb", "text"),
        ),
        "filter": (
            "SELECT f.condition, f.arguments, f.row_keys::text AS row_keys, cardinality(f.row_keys) AS n, f.likely,"
            " ml_rag._compared_rows((s.store).relation, $4) AS compared"
            " FROM (SELECT jsonb_populate_record(NULL::ml_rag.store, $1) AS store) AS s"
            " CROSS JOIN LATERAL ml_rag._row_filter(s.store, $2, $3, $4, $5) AS f",
            *("jsonb", "jsonb", "text", "int4", "bool"),
        ),
        "condition": (
            "SELECT f.condition FROM ml_rag.filter(jsonb_populate_record(NULL::ml_rag.store, $1), $2, $3) AS f",
            *("jsonb", "jsonb", "text"),
        ),
        "likely": ("SELECT ml_rag._likely_rows($1, $2, $3, true) AS n", "oid", "int4", "float8"),
        "passing": (
            "SELECT ml_rag._passing_rows(jsonb_populate_record(NULL::ml_rag.store, $1), $2, $3)::text AS row_keys",
            *("jsonb", "text", "text[]"),
        ),
        "warn": (
            "SELECT ml_rag._warn_of_filters("
            "ARRAY(SELECT s FROM jsonb_populate_recordset(NULL::ml_rag.store, $1) AS s), $2)",
            *("jsonb", "jsonb"),
        ),
        "lock_timeout": (
            "SELECT set_config('lock_timeout', $1, true)",
            "text",
        ),
        "short wait": ("SELECT ml_rag._limit_wait(1000) AS former",),
        "tokens": (
            "SELECT (ml_rag._tokens($1::regconfig, $2)).tokens::text AS tokens",
            *("text", "text"),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Session:
    """What the caller's session says: settings, before the function that runs this pins them."""

    role: str
    #: when its statement began, seconds since 1970
    statement: float
    ef_search: str | None
    probes: str | None
    seqscan: str

    @classmethod
    def of(cls, session: list[str | None]) -> Session:
        """Of ml_rag._session_settings."""
        role, statement, ef_search, probes, seqscan = session
        return cls(role or "", float(statement or 0), ef_search, probes, seqscan or "on")


class Unfit(MlRagError):
    """Not a call for one statement, and why: the stages of sql/pipeline take it, and say what is wrong with it."""

    sqlstate = "0A000"

    def __init__(self, why: str) -> None:
        super().__init__("the call cannot be answered by one statement", detail=f"{why[0].upper()}{why[1:]}.")


@dataclass(frozen=True, slots=True)
class Filtered:
    """What ml_rag._row_filter has found out of a store."""

    condition: str
    arguments: list[str]
    #: the text of a tid[]; None = too many pass
    row_keys: str | None
    n: int | None
    #: how many of the best rows by words probably include enough that pass
    likely: int | None
    #: the most rows that are compared one by one
    compared: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the keyword index is asked for."""

    candidates: int
    #: the rows that alone are scored; None = all
    row_keys: str | None = None
    #: whether the number is an estimate that may fall short
    is_likely: bool = False


#: rows that an index is asked for where all are wanted
_ALL = 2_147_483_647


@dataclass(slots=True)
class Found:
    """The row of a statement, and what it was made of."""

    row: Any
    sources: tuple[Source, ...]
    values: dict[str, Any]
    settings: tuple[str, str, str, str]


class Retrieval:
    """One call. ``call``: its number (ml_rag._begin); None where nothing is reported."""

    def __init__(
        self, plpy: Any, schema: str, session: Session, keyword: Callable[[], Any], call: int | None = None
    ) -> None:
        self._plpy, self._schema, self._session, self._keyword, self._call = plpy, schema, session, keyword, call
        #: as the function that runs this begins
        self._settings = _EF_SEARCH, _PROBES, "off", "on"
        self._began = time.time()
        self._trace: list[dict[str, Any]] = []
        self._step("begin")

    def answer(self, question: str, options: str, vector: str | None, form: str, *, is_parsed: bool) -> str | None:
        """JSON text: the answer document without a text (``form`` citations), the rows of ml_rag_search (rows), or the
        hits for the stages that follow (hits). None = the call is one for the stages of sql/pipeline."""
        try:
            shape_form = "hits" if form == "rows" else form
            request = self._request(question, options, vector, shape_form, is_parsed=is_parsed)
            if form != "hits" and (request.is_reranked or request.names_documents):
                return None
            if form == "citations" and not request.skips_generation:
                return None
            found = self._find(request, question, vector)
        except Unfit:
            return None
        except NotEmbedded as e:
            raise e.args[0] from None
        except self._plpy.SPIError as e:
            if _ends(e):
                raise
            return None
        text = _document(request, found, form, self._trace)
        if form != "hits" and self._call is not None:
            calls.end(self._plpy, self._call, SUCCESS, self._session.role, json.dumps(self._trace), self._began)
        return text

    def statement(self, question: str, options: str, vector: str | None, *, is_parsed: bool) -> str:
        """The statement that was run last, with its values in it, for the rows of ml_rag_search. Raises Unfit."""
        request = self._request(question, options, vector, "hits", is_parsed=is_parsed)
        found = self._find(request, question, vector)
        sources = found.sources
        if request.is_filtered:
            sources = tuple(replace(source, condition=self._condition(request, source.store)) for source in sources)
        made = plan(replace(request.shape, form="rows"), sources, self._schema, Values(found.values))
        ef_search, probes, seqscan, sort = found.settings
        settings = {
            "hnsw.iterative_scan": "relaxed_order",
            "ivfflat.iterative_scan": "relaxed_order",
            "hnsw.ef_search": ef_search,
            "ivfflat.probes": probes,
            "enable_seqscan": seqscan,
            "enable_sort": sort,
            "jit": "off",
            "search_path": "pg_catalog, ml_rag, pg_temp",
        }
        notes = [f"SET {name} = {value};" for name, value in settings.items()]
        head = f"-- ml_rag runs it with: {' '.join(notes)}\n"
        if request.is_reranked:
            head += "-- What follows is not in it: the hits are reranked, and then widened by their neighbours.\n"
        return head + made.text

    def _condition(self, request: Request, store: Store) -> str:
        """Of the filters, in terms of values that stand in the statement."""
        found = _run(self._plpy, "condition", json.dumps(record(store)), request.options, Values.filter)
        condition: str = found[0]["condition"]
        return condition

    # -- stages -------------------------------------------------------------------------------------------------------

    def _request(self, question: str, options: str, vector: str | None, form: str, *, is_parsed: bool) -> Request:
        request = requests.read(
            self._plpy, self._schema, options, form, is_parsed=is_parsed, has_vector=vector is not None
        )
        if request is None:
            raise Unfit("some option needs more than one statement")
        if not question.strip():
            raise Unfit("the question is empty")
        if vector is not None and not re.search("[1-9]", vector):
            raise Unfit("the query embedding is all zeros")
        return request

    def _find(self, request: Request, question: str, vector: str | None) -> Found:
        stores = self._discover(request)
        self._step("discover")
        if len(stores) == 1 or all(store.found == "named" for store in stores):
            return self._read(request, stores, question, vector)
        # a store that nobody named must not hold up the call: if it is locked, the stages leave it out
        former = _run(self._plpy, "short wait")[0]["former"]
        try:
            return self._read(request, stores, question, vector)
        finally:
            _run(self._plpy, "lock_timeout", former)

    def _read(self, request: Request, stores: tuple[Store, ...], question: str, vector: str | None) -> Found:
        embeds = vector is None and request.needs_embedding
        if embeds or any(store.found == "trusted" for store in stores):
            self._hold(stores)
        if embeds:
            vector = self._embed(request, stores, question)
        self._step("embed")
        if vector is not None and any(s.dimensions not in (None, vector.count(",") + 1) for s in stores):
            raise Unfit("the vector stores have other dimensions")
        sources = [Source(store) for store in stores]
        if request.shape.arm("keyword") is None and not request.is_filtered:
            return self._search(request, sources, {"vector": vector})
        found = rights.at_one_moment(self._plpy, lambda: self._search_in_parts(request, sources, question, vector))
        if request.is_filtered:
            _run(self._plpy, "warn", json.dumps([record(store) for store in stores]), request.options)
        return found

    def _discover(self, request: Request) -> tuple[Store, ...]:
        stores = discovery.discover(self._plpy, self._schema, request.wanted)
        names = request.wanted.names
        if not 0 < len(stores) <= MOST_STORES:
            raise Unfit(f"{len(stores)} vector stores are searched")
        if not all(store.is_table for store in stores):
            raise Unfit("a vector store is not an ordinary table")
        if names is not None and (len(names) > 1 or len(stores) > 1):
            models = {store.embed_model_id for store in stores} - {None}
            if not set().union(*(store.names for store in stores)).issuperset(names):
                raise Unfit("a name is not that of a vector store")
            if request.wanted.model is None and len(models) > 1 and request.needs_embedding:
                raise Unfit("the vector stores are of different models")
        return tuple(stores)

    def _embed(self, request: Request, stores: tuple[Store, ...], question: str) -> str:
        model = request.wanted.model or stores[0].embed_model_id
        if self._call is not None:
            calls.stage(self._plpy, self._call, "embed", model or "", self._session.role, self._session.statement)
        has_words = request.shape.arm("keyword") is not None
        try:
            vector: str = _run(self._plpy, "embed", question, model, has_words, request.options)[0]["vector"]
        except self._plpy.SPIError as e:
            raise NotEmbedded(e) from None
        self._check_names(stores)  # locks do not keep the owner of a schema from renaming it
        return vector

    def _hold(self, stores: tuple[Store, ...]) -> None:
        """Nobody drops, renames or alters the stores until the end of the transaction: as ml_rag._hold."""
        for store in stores:
            self._plpy.prepare(f"SELECT FROM ONLY {store.table}")
        self._check_names(stores)

    def _check_names(self, stores: tuple[Store, ...]) -> None:
        if discovery.written(self._plpy, [store.relation for store in stores]) != [store.table for store in stores]:
            raise Unfit("a vector store has another name by now")

    def _search_in_parts(self, request: Request, sources: list[Source], question: str, vector: str | None) -> Found:
        """What is found out before the statement, at the same moment: which rows pass the filters, and which have the
        words."""
        values: dict[str, Any] = {"vector": vector}
        filtered: list[Filtered | None] = [None] * len(sources)
        if request.is_filtered:
            filtered, sources = self._filter(request, sources, values)
        arm = request.shape.arm("keyword")
        if arm is None:
            return self._search(request, sources, values)
        lookups = [
            self._first_lookup(source.store, own, arm.candidates) for source, own in zip(sources, filtered, strict=True)
        ]
        while True:
            for i, (source, lookup) in enumerate(zip(sources, lookups, strict=True), 1):
                index, (keys, scores) = self._by_words(source.store, question, lookup)
                values |= {f"keys_{i}": keys, f"scores_{i}": scores, f"candidates_{i}": lookup.candidates}
                sources[i - 1] = replace(source, index=KeywordIndex(tuple(index["key"]), tuple(index["key_types"])))
            self._step("keyword")
            found = self._search(request, sources, values)
            if not any(found.row["missing"]):
                return found
            lookups = [
                self._further_lookup(source.store, own, lookup, arm.candidates) if is_missing else lookup
                for source, own, lookup, is_missing in zip(
                    sources, filtered, lookups, found.row["missing"], strict=True
                )
            ]

    def _filter(
        self, request: Request, sources: list[Source], values: dict[str, Any]
    ) -> tuple[list[Filtered | None], list[Source]]:
        """Which rows pass the options that leave rows out. Where they are few they are compared one by one: that is
        exact, and an index has to go through as many times more rows as the filter leaves out."""
        semantic = request.shape.arm("semantic")
        arm = semantic or request.shape.arms[0]
        filtered: list[Filtered | None] = []
        narrowed = []
        for i, source in enumerate(sources, 1):
            store = source.store
            row = _run(
                self._plpy,
                "filter",
                *(json.dumps(record(store)), request.options, "keyword" if semantic is None else "search"),
                *(arm.candidates, semantic is not None or not store.is_secured),
            )[0]
            own = Filtered(**row)
            if values.setdefault("filter", own.arguments) != own.arguments:
                raise Unfit("the filters compare with other values in each vector store")
            values |= {f"row_keys_{i}": own.row_keys, "nothing": None}
            is_narrow = semantic is not None and own.n is not None and own.n <= own.compared
            narrowed.append(replace(source, condition=own.condition, is_narrow=is_narrow))
            filtered.append(own)
        return filtered, narrowed

    def _first_lookup(self, store: Store, filtered: Filtered | None, n: int) -> Lookup:
        """How many rows the keyword index is asked for: those beyond n may not pass the filters."""
        if filtered is None or not filtered.condition:
            return Lookup(n)
        likely = filtered.likely
        if filtered.n is not None and not store.is_secured:
            # where many rows pass, n of them are among the best of all, and looking up all that pass would take longer
            likely = _run(self._plpy, "likely", store.relation, n, filtered.n)[0]["n"]
        return Lookup(4 * n + 100, filtered.row_keys) if likely is None else Lookup(likely, is_likely=True)

    def _further_lookup(self, store: Store, filtered: Filtered | None, lookup: Lookup, n: int) -> Lookup:
        """Where too few of them pass."""
        if filtered is None or not filtered.condition:
            raise Unfit("rows that the keyword index has found are missing")
        if lookup.is_likely:
            row_keys = filtered.row_keys
            if row_keys is None:
                arguments = json.dumps(record(store)), filtered.condition, filtered.arguments
                row_keys = _run(self._plpy, "passing", *arguments)[0]["row_keys"]
            return Lookup(4 * n + 100, row_keys)
        return replace(lookup, candidates=10 * lookup.candidates if lookup.candidates < 10_000 else _ALL)

    def _by_words(
        self, store: Store, question: str, lookup: Lookup
    ) -> tuple[dict[str, Any], tuple[list[str], list[float]]]:
        """The keyword index of a store, and what it finds."""
        keyword = self._keyword()
        while True:
            index = _indexes.get(store)
            is_kept = index is not None
            if index is None:
                found = indexes.of_caller(self._plpy, store.relation)
                index = next((own for own in found if own["segment"] == store.segment), None)
            if index is None:
                raise Unfit("a vector store has no keyword index")
            if len(_indexes) > _MOST_INDEXES:
                _indexes.clear()
            _indexes[store] = index
            words = json.loads(_run(self._plpy, "tokens", index["configuration"], question)[0]["tokens"])
            terms = sorted(words)  # by code point, as COLLATE "C" has it
            try:
                weights = [words[term] for term in terms]
                # statistics of the visible rows are of those that do not pass, too
                is_whole = lookup.row_keys is None or (index["secured"] and index["statistics"] == "visible")
                row_keys = None if is_whole else _texts(lookup.row_keys or "{}")
                return index, keyword.find(self._plpy, index, terms, weights, lookup.candidates, row_keys)
            except keyword.OtherIndex:
                del _indexes[store]
                if not is_kept:
                    raise Unfit("the keyword index is being changed") from None

    def _search(self, request: Request, sources: list[Source], values: dict[str, Any]) -> Found:
        semantic = request.shape.arm("semantic")
        if semantic is not None:
            sources = [self._first_read(request, source, semantic.candidates) for source in sources]
        values |= request.values
        while True:
            settings = self._set(request, sources)
            kept = _statement(self._plpy, request.shape, tuple(sources), self._schema, settings[2:])
            row = kept.execute(self._plpy, [values[name] for name in kept.statement.slots])[0]
            if semantic is None or any(row["missing"]):
                break
            again = [
                _again(source, semantic.candidates, is_short=short, is_tied=tied)
                for source, short, tied in zip(sources, row["short"], row["tied"], strict=True)
            ]
            if again == sources:
                break
            sources = again
        if not row["n"] and not any(row["missing"]):
            raise Unfit("nothing was found")
        self._step("search")
        return Found(row, tuple(sources), values, settings)

    def _first_read(self, request: Request, source: Source, n: int) -> Source:
        read = Read.first(n)
        if source.condition:
            read = Read.filtered(n, is_narrow=source.is_narrow)
        if request.is_exact:
            read = replace(read, sort="exact")
        return replace(source, read=read, quantization=self._quantization(request, source.store))

    def _quantization(self, request: Request, store: Store) -> str | None:
        """halfvec or binary where only an index of such vectors serves the metric."""
        if not store.has_expressions:
            return None
        key = store, request.shape.metric.name
        if key not in _quantizations:
            if len(_quantizations) > _MOST_INDEXES:
                _quantizations.clear()
            found = _run(self._plpy, "quantization", json.dumps(record(store)), request.shape.metric.name)
            _quantizations[key] = found[0]["name"]
        return _quantizations[key]

    def _set(self, request: Request, sources: list[Source]) -> tuple[str, str, str, str]:
        """The settings of an index, which end with the function that runs this: hnsw.ef_search, ivfflat.probes,
        enable_seqscan and enable_sort."""
        session = self._session
        ef_search = request.ef_search or session.ef_search or _EF_SEARCH
        if (
            request.ef_search is None
            and ef_search == _EF_SEARCH
            and not all(source.store.is_small for source in sources)
        ):
            ef_search = "200"
        probes = request.probes or session.probes or _PROBES
        if request.probes is None and probes == _PROBES:
            probes = max(source.store.probes for source in sources)
        # The planner does not know what it costs to read vectors that are stored out of line, and would sort tables of
        # some thousand rows. Where nothing leaves rows out, their index is faster.
        has_all_rows = not any(source.store.is_secured for source in sources)
        by_index = [source for source in sources if source.read is not None and source.read.sort == "index"]
        seqscan = "off" if has_all_rows and by_index else session.seqscan
        # Many rows pass a filter here. The plan that is kept does not know its values: it follows the index.
        sort = "off" if any(source.condition for source in by_index) else "on"
        if request.ef_search is None:
            # an index goes on beyond it, but what it has gone past it does not come back to
            for source in sources:
                if source.quantization is not None and source.read is not None:
                    ef_search = max(int(ef_search), min(1000, rescored(request.shape, source, source.read)))
        settings = str(ef_search), str(probes), seqscan, sort
        if settings != self._settings:
            _run(self._plpy, "settings", *settings)
            self._settings = settings
        return settings

    def _step(self, stage: str) -> None:
        self._trace.append({"stage": stage, "ended": datetime.now(UTC).isoformat(), "facts": None})


class NotEmbedded(Exception):
    """The question could not be embedded: the error is one of the call. Its one argument is plpy.SPIError."""


def _ends(error: Any) -> bool:
    """Whether the statement is over: cancelled, shut down."""
    return str(error.sqlstate).startswith("57")


def _texts(array: str) -> list[str]:
    """The elements of a tid[], of its text."""
    return array[2:-2].split('","') if len(array) > 2 else []


def _again(source: Source, n: int, *, is_short: bool, is_tied: bool) -> Source:
    """How a store is read again where that is needed."""
    read = source.read
    assert read is not None
    if is_short and read.sort == "index" and source.store.is_approximate:
        return replace(source, read=replace(read, sort="exact"))
    if is_tied and read.sort != "total":
        return replace(source, read=read.further(n))
    return source


def _document(request: Request, found: Found, form: str, trace: list[dict[str, Any]]) -> str:
    """The finished JSON."""
    row, stores = found.row, [source.store for source in found.sources]
    if form == "rows":
        hits: str = row["hits"]
        return hits
    names = json.dumps([store.vector_store for store in stores], ensure_ascii=False)
    method = "n_citations"
    if request.shape.has_max_distance or request.shape.has_percentage:
        method = "percentage_distance" if row["is_percentage"] else "max_distance"
    threshold = row["threshold"] or "null"
    if form == "hits":
        records = json.dumps([record(store) for store in stores], ensure_ascii=False)
        nearest = {"nearest": row["nearest"] and float(row["nearest"])}
        steps = json.dumps([*trace[:-1], {**trace[-1], "facts": nearest}])
        return (
            f'{{"hits": {row["hits"]}, "stores": {records}, "method": "{method}", "threshold": {threshold},'
            f' "trace": {steps}}}'
        )
    search = "" if request.search is None else f', "search": "{request.search}"'
    return (
        f'{{"citations": {row["hits"]}, "vector_store": {names},'
        f' "retrieval_info": {{"method": "{method}", "threshold": {threshold}{search}}}}}'
    )


# -- plans that are kept ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Kept:
    """A prepared plan."""

    statement: Statement
    plan: Any

    def execute(self, plpy: Any, values: list[Any]) -> Any:
        return plpy.execute(self.plan, values)


_kept: OrderedDict[Any, Kept] = OrderedDict()
#: keyword indexes of stores, as the caller may read them: what a store is known by covers its privileges
_indexes: dict[Store, dict[str, Any]] = {}
_MOST_INDEXES = 1000
_quantizations: dict[tuple[Store, str], str | None] = {}


def _statement(plpy: Any, shape: Shape, sources: tuple[Source, ...], schema: str, ways: tuple[str, str]) -> Kept:
    """The plan of a statement. ``ways``: enable_seqscan and enable_sort, as they are when it is made."""
    key = shape, sources, ways
    if key not in _kept:
        made = plan(shape, sources, schema)
        _kept[key] = Kept(made, plpy.prepare(made.text, list(made.slots.values())))
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]
