"""A retrieval: which stores, what is searched with, the statement, and what follows it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from ml_rag.backend import calls, rights
from ml_rag.backend.retrieval import explain, reasons, vectors
from ml_rag.backend.retrieval import request as requests
from ml_rag.backend.retrieval import stores as discovery
from ml_rag.backend.retrieval.arms import KEYWORD, SEMANTIC
from ml_rag.backend.retrieval.find import STORES, Failed, Finder, Found, ends
from ml_rag.backend.retrieval.request import FILTERS, Request
from ml_rag.backend.retrieval.search import Context, Search, Session, hold
from ml_rag.backend.retrieval.shards import Silent
from ml_rag.backend.retrieval.stores import Embedding, Store
from ml_rag.backend.retrieval.trace import Trace
from ml_rag.backend.retrieval.vectors import Vectors
from ml_rag.backend.sqlstate import sqlstate
from ml_rag.backend.statements import Statements
from ml_rag.errors import InvalidRequest, MlRagError
from ml_rag.protocol import SUCCESS

_REQUEST = "jsonb_populate_record(NULL::ml_rag.request, {})"
_run = Statements(
    {
        "check question": (
            "SELECT ml_rag._request($1, CASE WHEN $3 IS NULL THEN $2"
            " ELSE $2 || jsonb_build_object('query_embedding', $3) END)",
            *("text", "jsonb", "text"),
        ),
        "check names": (f"SELECT ml_rag._check_named($1, {STORES.format('$2')})", "jsonb", "jsonb"),
        "no store": ("SELECT ml_rag._no_store($1)", "jsonb"),
        "silent": (
            f"SELECT to_jsonb(l.answering)::text AS stores, to_jsonb(l.missing)::text AS missing"
            f" FROM ml_rag._leave_out_silent({STORES.format('$1')}) AS l",
            "jsonb",
        ),
        "rewrite": (
            "SELECT to_jsonb(r)::text AS rewritten, ($2"
            " || CASE WHEN r.document_names IS NULL THEN '{}'"
            " ELSE jsonb_build_object('document_name', r.document_names) END"
            " || CASE WHEN r.filters IS NULL THEN '{}' ELSE jsonb_build_object('filters',"
            " ml_rag._join_filters($2 -> 'filters', r.filters)) END)::text AS options"
            f" FROM ml_rag._rewrite($1, $2 -> 'query_options', {STORES.format('$3')}, $2, $4) AS r",
            *("text", "jsonb", "jsonb", "int4"),
        ),
        "change": ("SELECT ($1 || $2)::text AS record", "jsonb", "jsonb"),
        "read whole": (
            "SELECT to_jsonb(r.hits)::text AS hits, r.skipped"
            f" FROM ml_rag._read_documents({_REQUEST.format('$1')}, {STORES.format('$2')}) AS r",
            *("jsonb", "jsonb"),
        ),
        "not found": (
            f"SELECT ml_rag._not_found($1, s.stores, $3, $4, CASE WHEN ($1 -> 'semantic_search')::boolean"
            " THEN ml_rag._waiting_in(s.stores) END)::text AS error"
            f" FROM (SELECT {STORES.format('$2')} AS stores) AS s",
            *("jsonb", "jsonb", "int4", "text[]"),
        ),
        "left out": ("SELECT ml_rag._with_left_out($1, $2)::text AS error", *("jsonb", "jsonb")),
        "warn of names": (
            f"SELECT ml_rag._warn_of_unknown_names({STORES.format('$1')}, $2,"
            " ARRAY(SELECT h FROM jsonb_populate_recordset(NULL::ml_rag.hit, $3) AS h))",
            *("jsonb", "jsonb", "jsonb"),
        ),
        "column": (
            "SELECT a.attname::text AS column, t.typname::text AS type_name, nullif(a.atttypmod, -1) AS dimensions"
            " FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid"
            " WHERE a.attrelid = $1 AND a.attname = $2 AND NOT a.attisdropped AND t.typname IN ('vector', 'halfvec')",
            *("oid", "text"),
        ),
        "shard request": (f"SELECT to_jsonb({_REQUEST.format('$1')})::text AS request", "jsonb"),
        "rerank": (
            "SELECT count(*)::int4 AS n, max(r.rerank_score) AS best,"
            " max(r.distance) FILTER (WHERE r.is_kept)::text AS threshold,"
            # not by jsonb_agg, which takes the square of the number of strings, such as metadata can have
            " to_jsonb(array_agg(to_jsonb(r) - 'place' - 'is_kept' ORDER BY r.place)"
            " FILTER (WHERE r.is_kept))::text AS hits"
            " FROM (SELECT h.*, ($4 IS NULL OR h.rerank_score >= $4) AND row_number() OVER () <= $5 AS is_kept,"
            " row_number() OVER () AS place FROM ml_rag._rerank($1,"
            " ARRAY(SELECT h FROM jsonb_populate_recordset(NULL::ml_rag.hit, $2) AS h), $3, $6) AS h) AS r",
            *("text", "jsonb", "jsonb", "float8", "int4", "text"),
        ),
        "warn": ("SELECT ml_rag._warn_of_failures(ARRAY(SELECT f FROM jsonb_array_elements($1) AS f))", "jsonb"),
    }
)


#: the fields of an arm that a shard takes. Every role that may read the table of calls can send a request, and others
#: would become part of the statement
_OF_ARM = ("query", "query_embedding", "candidates", "min_score", "max_distance", "is_descending", "embedding")

_as_json = json.JSONEncoder(ensure_ascii=False).encode


class Unfit(MlRagError):
    """Not a call for one statement, and why."""

    sqlstate = "0A000"

    def __init__(self, why: str) -> None:
        super().__init__("the call cannot be answered by one statement", detail=f"{why[0].upper()}{why[1:]}.")


class Text(NamedTuple):
    """Hits as JSON text."""

    text: str


def corpus(asked: dict[str, Any]) -> tuple[int, int, list[int]] | None:
    """The statistics of all parts of a store, in what another server asks a shard."""
    found = asked.get("corpus")
    if isinstance(found, list) and len(found) == 3 and isinstance(found[2], list):
        rows, total, frequencies = found
        is_number = all(type(n) is int and 0 <= n < 2**62 for n in (rows, total, *frequencies))
        if is_number and len(frequencies) == len(asked["terms"]):
            return rows, total, frequencies
    if found is None:
        return None
    raise InvalidRequest("the statistics of the keyword index are not of these words", detail=f"Got {found!r:.200}.")


class Retrieval:
    """One call. ``call``: its number (ml_rag._begin); None where nothing is reported."""

    def __init__(
        self, plpy: Any, schema: str, session: Session, keyword: Callable[[], Any], call: int | None = None
    ) -> None:
        self._plpy, self._schema, self._session, self._call = plpy, schema, session, call
        self._context = Context(plpy, schema, session, keyword)
        self._began = time.time()
        self._trace = Trace(plpy, call)
        self._finder = Finder(self._context, self._trace, self._discover)
        self._missing_shards: list[str] | None = None
        #: of the question, once it is known
        self._vector: str | None = None

    # -- the forms of an answer ---------------------------------------------------------------------------------------

    def answer(self, question: str, options: str, vector: str | None, form: str) -> str | None:
        """JSON text: the answer document without a text (``form`` citations), or the rows of ml_rag_search (rows); None
        for a call that has more to do than retrieve."""
        request = requests.read(
            self._plpy, self._schema, options, "hits" if form == "rows" else form, has_vector=vector is not None
        )
        if (
            (form == "citations" and not request.skips_generation)
            or request.has_made_fields
            or not request.arms
            or request.explains
            or request.rerank is not None
            or request.has_names
            or request.rewrites
            or request.is_partial
        ):
            return None
        found = self._checked(request, question, vector)
        text = _document(request, found, form, self._finder.skipped(found))
        if self._call is not None:
            steps = [(step["stage"], step["ended"]) for step in self._trace.steps]
            calls.end(self._plpy, self._call, SUCCESS, steps, self._began, self._session.role)
        return text

    def statement(self, question: str, options: str, vector: str | None) -> str:
        """The statement that was run last, with its values in it, for the rows of ml_rag_search. Raises Unfit."""
        request = requests.read(self._plpy, self._schema, options, "hits", has_vector=vector is not None)
        if not request.arms:
            raise Unfit("nothing is retrieved")
        if request.rewrites:
            raise Unfit('"query_options" make another question of it')
        return self.text_of(request, self._checked(request, question, vector))

    def text_of(self, request: Request, found: Found) -> str:
        """A statement with its values in it."""
        text = found.search.text(found.sources, found.search.shape._replace(form="rows", told=""))
        ef_search, probes, seqscan, sort, _ = found.settings
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
        if request.rerank is not None:
            head += "-- What follows is not in it: the hits are reranked, and then widened by their neighbours.\n"
        return head + text

    def hits(self, record_text: str, question: str, vector: str | None, told: str) -> str:
        """The fields of ml_rag.request that have changed and of ml_rag.retrieval, as JSON text; of ``record_text``,
        ml_rag.request as JSON text. ``told``: all = with what each arm has found, and nothing is reranked away."""
        request = requests.of_record(
            *(self._plpy, self._schema, record_text, "hits"), has_vector=vector is not None, told=told
        )
        retrieval: dict[str, Any] = {"stores": [], "hits": [], "method": "n_citations"}
        changed = "{}"
        if request.arms:
            stores = self._discover(request, question)
            if request.rewrites:
                request, question, changed = self._rewrite(request, question, stores, vector, told)
            if request.names_documents and self._wants_whole(request, question):
                retrieval |= self._read_whole(request, stores)
            else:
                retrieval |= self._retrieved(request, question, stores, vector, told)
            retrieval["stores"] = [self._finder.record(store) for store in stores]
        retrieval |= {"trace": self._trace.steps, "missing_shards": self._missing_shards}
        hits = retrieval.pop("hits")
        # as it is: numbers have digits that Python would leave out
        text = hits.text if isinstance(hits, Text) else json.dumps(hits)
        if self._vector is not None:
            own = f'"query_embedding": {json.dumps(self._vector)}'
            changed = f"{{{own}}}" if changed == "{}" else f"{changed[:-1]}, {own}}}"
        found = json.dumps(retrieval, default=datetime.isoformat)
        return f'{{"request": {changed}, "retrieval": {found[:-1]}, "hits": {text}}}}}'

    def _retrieved(
        self, request: Request, question: str, stores: list[Store], vector: str | None, told: str
    ) -> dict[str, Any]:
        found = self._finder.find(request, question, stores, vector)
        row = found.row
        self._vector = found.search.values["vector"]
        method, threshold = _threshold(request, row)
        retrieval: dict[str, Any] = {"method": method, "threshold": threshold}
        retrieval["skipped"] = self._finder.skipped(found)
        hits: str = row["hits"] or "[]"
        if told == "all":
            *rankings, ranked = json.loads(row["lists"])
            retrieval["rankings"] = [
                {"arm": json.loads(asked.record) | {"query_embedding": self._own(found, place)}, "hits": ranking or []}
                for place, (asked, ranking) in enumerate(zip(request.arms, rankings, strict=True), 1)
            ]
            retrieval["ranked"] = ranked or []
            retrieval["threshold"] = row["limit"] or retrieval["threshold"]
        if request.explains:
            retrieval["statement"] = self.text_of(request, found)
        if not row["n"]:
            retrieval["missing"] = self._not_found(request, found)
        if request.has_names:
            _run(self._plpy, "warn of names", self._finder.records(stores), request.options, hits)
        if row["n"] and request.rerank is not None:
            hits = self._rerank(request, question, hits, retrieval, row["n"])
            if hits != "[]" and request.overlap and told != "all":
                hits = self._widen(request, found, hits)
        return retrieval | {"hits": Text(hits)}

    def _own(self, found: Found, place: int) -> str | None:
        """The vector that an arm has searched with, if it is one of its own and the only one."""
        own = {text for (one, _), text in found.search.vectors.own.items() if one == place}
        return own.pop() if len(own) == 1 and found.search.vectors.question not in own else None

    def as_shard(self, call: dict[str, Any]) -> str:
        """What an arm finds in a store that is a shard, as JSON text: {"hits", "facts"}. ``call``: what the other
        server has sent (request), and of the store its oid (relation) and ml_rag.store."""
        asked = call["request"]
        arm = {"search": asked["call"], "name": asked["call"]} | {name: asked["arm"].get(name) for name in _OF_ARM}
        own, given = arm["query_embedding"], asked["request"]
        # what is the same in all such requests: as many hits as the arm brings, no more
        same = {"n_citations": arm["candidates"], "fusion": "weighted", "segment_overlap": 0, "call": None}
        same |= {"arms": [arm], "options": given.get("options") or {}}
        text = _run(self._plpy, "shard request", json.dumps(given | same))[0]["request"]
        vector = given["query_embedding"]
        request = requests.of_record(self._plpy, self._schema, text, "hits", has_vector=vector is not None)
        store = discovery.of_record(self._plpy, self._schema, call["store"], call["relation"])
        # a function of one argument can be written as a column
        key = asked.get("metadata_key", [])
        columns = discovery.readable(self._plpy, self._schema, int(call["relation"]), key)
        store = store._replace(key=tuple(name for name in key if name in columns))
        vectors = Vectors(vector, {(1, None): own} if own else {})
        if asked.get("embedding") is not None:
            vectors.embeddings[1, store.relation] = self._embedding(store, asked["embedding"])
        search = Search(self._context, request, given["question"] or "", vectors, {}, corpus=corpus(asked))

        def find() -> Any:
            source = search.add(search.source(store), 1, 1)
            return search.run([source])

        hold(self._plpy, store)
        row, sources = rights.at_one_moment(self._plpy, find)
        found = Found(row, sources, search, self._context.settings)
        facts = None
        if request.explains:
            steps = explain.steps(self._context, found, [])
            facts = steps[0]["facts"]["stores"][store.vector_store]
        return f'{{"hits": {row["hits"] or "[]"}, "facts": {json.dumps(facts)}}}'

    def _embedding(self, store: Store, column: str) -> Embedding:
        """The embedding of a shard, which has no comments: a column of vectors."""
        found = _run(self._plpy, "column", store.relation, column)
        if not found:
            raise Failed(
                {"sqlstate": "42703", "message": f'shard "{store.vector_store}" has no column "{column}" of vectors'}
            )
        return Embedding(None, **found[0])

    # -- stages -------------------------------------------------------------------------------------------------------

    def _checked(self, request: Request, question: str, vector: str | None) -> Found:
        """What is found. Raises what is wrong with the question or its vector rather than what follows from it. If
        nothing is found, the error names the stores that were not searched because the call does not name them."""
        if not question.strip() or (vector is not None and not re.search("[1-9]", vector)):
            self._check(request, question, vector)
        try:
            found = self._finder.find(request, question, self._discover(request, question), vector)
        except (self._plpy.SPIError, MlRagError):
            if vector is not None:
                self._check(request, question, vector)
            raise
        if not found.row["n"]:
            missing = json.dumps(self._not_found(request, found))
            raise Failed(json.loads(_run(self._plpy, "left out", missing, request.options)[0]["error"]))
        return found

    def _check(self, request: Request, question: str, vector: str | None) -> None:
        _run(self._plpy, "check question", question, request.options, vector)

    def _discover(self, request: Request, question: str) -> list[Store]:
        stores = discovery.discover(self._plpy, self._schema, self._context.look_anew(), request.wanted)
        changed = map(reasons.given_away, discovery.changed)
        self._finder.failures += [failure for failure in changed if failure not in self._finder.failures]
        names = request.wanted.names
        if names is not None and (len(names) > 1 or len(stores) != 1):
            known = frozenset().union(*(store.names for store in stores))
            models = {store.embed_model_id for store in stores} - {None}
            if not known.issuperset(names) or len(models) > 1:
                _run(self._plpy, "check names", request.options, self._finder.records(stores))
        if not stores:
            if request.wanted.model is not None and request.needs_embedding:
                # a misspelt model is the likelier reason, and this says so
                vectors.embed(self._plpy, request, [(question,)], request.wanted.model)
            _run(self._plpy, "no store", request.options)
        if request.is_partial:
            found = _run(self._plpy, "silent", self._finder.records(stores))[0]
            missing = [own["missing"] for own in json.loads(found["stores"])]
            self._finder.missing = {store: own for store, own in zip(stores, missing, strict=True) if own}
            self._missing_shards = found["missing"] and json.loads(found["missing"])
        self._trace.step("discover")
        return stores

    def _rewrite(
        self, request: Request, question: str, stores: list[Store], vector: str | None, told: str
    ) -> tuple[Request, str, str]:
        """The request, the question, and as JSON text what of ml_rag.request has changed."""
        from ml_rag.backend.retrieval.parts import rewritten_arms

        row = _run(self._plpy, "rewrite", question, request.options, self._finder.records(stores), self._call)[0]
        rewritten = json.loads(row["rewritten"])
        question = rewritten["question"] or question
        arms = [json.loads(asked.record) | {"query_embedding": asked.vector} for asked in request.arms]
        fields = {"question": question, "rewritten": rewritten, "arms": rewritten_arms(arms, question, rewritten)}
        changed = f'{json.dumps(fields)[:-1]}, "options": {row["options"]}}}'
        self._trace.enter("discover")  # reported again: the next stage begins by itself only if none was reported
        self._trace.step("rewrite")
        record = _run(self._plpy, "change", request.record, changed)[0]["record"]
        values = self._plpy, self._schema, record, "hits"
        return requests.of_record(*values, has_vector=vector is not None, told=told), question, changed

    def _wants_whole(self, request: Request, question: str) -> bool:
        """Whether the documents that the call is limited to are to be read from end to end: the task is summarization,
        or the question asks for nothing but a summary of them."""
        from ml_rag.backend.documents import asks_for_summary

        options = json.loads(request.options)
        rewritten = json.loads(request.record)["rewritten"] or {}
        if (options.get("model_options") or {}).get("task") == "summarization" or rewritten.get("is_summary"):
            return True
        return asks_for_summary(question, options["document_name"], lambda: self._plpy.execute("SELECT 1"))

    def _read_whole(self, request: Request, stores: list[Store]) -> dict[str, Any]:
        self._trace.enter("read")
        row = _run(self._plpy, "read whole", request.record, self._finder.records(stores))[0]
        found: dict[str, Any] = {"hits": Text(row["hits"]), "skipped": list(row["skipped"] or [])}
        self._trace.step("read")
        _run(self._plpy, "warn of names", self._finder.records(stores), request.options, row["hits"])
        if row["hits"] == "[]":
            found["missing"] = self._nothing(request, stores, len(found["skipped"]))
        return found | {"method": "document_order"}

    # -- what follows the statement -----------------------------------------------------------------------------------

    def _rerank(self, request: Request, question: str, hits: str, retrieval: dict[str, Any], n: int) -> str:
        options = {name: value for name, value in (request.rerank or {}).items() if name != "min_score"}
        self._trace.enter("rerank", request.rerank_model or "")
        values = question, hits, json.dumps(options, default=float), request.min_score, request.n_citations
        kinds = {arm.kind for arm in request.shape.arms}
        known = "complement" if request.shape.metric.is_complement else "distance"
        found = _run(self._plpy, "rerank", *values, "fused" if {SEMANTIC, KEYWORD} <= kinds else known)[0]
        self._trace.step("rerank", {"candidates": found["n"], "best_score": found["best"]})
        if not found["n"]:
            retrieval["missing"] = {
                "sqlstate": "P0002",
                "message": "no segment left by the reranker",
                "detail": f"The function gave none of {n} segments a score.",
            }
        elif found["hits"] is None:
            retrieval["missing"] = {
                "sqlstate": "P0002",
                "message": "no segment within the score threshold",
                "detail": f"The best score is {found['best']}, min_score {(request.rerank or {})['min_score']}.",
                "hint": 'Lower "min_score", or leave it out.',
            }
        if retrieval["method"] == "n_citations":
            retrieval["threshold"] = found["threshold"]
        return found["hits"] or "[]"

    def _widen(self, request: Request, found: Found, hits: str) -> str:
        self._trace.enter("expand")
        shape = found.search.shape._replace(overlap=request.overlap, form="hits")
        stores = [source.store for source in found.sources]
        is_named = any(store.found == "named" for store in stores)
        try:
            now = self._finder.held(request, stores)
            if len(now) < len(stores):
                raise Silent(self._finder.failures[-1])
            # the hits have passed the filters
            sources = tuple(map(found.search.read_now, found.sources, now))
            row = found.search.widened(shape, sources, hits)
        except (self._plpy.SPIError, Silent) as e:
            if isinstance(e, Silent):
                failure = e.args[0]
                if is_named:
                    raise Failed(failure) from None
            elif is_named or ends(e):
                raise
            else:
                failure = {"sqlstate": sqlstate(e), "message": str(e)[:500]}
            warning = {
                "warning": "the neighbours of segments cannot be read",
                "skipped": f"{failure['sqlstate']}: {failure['message'].rstrip('.')}.",
                "warning_hint": 'Segments are cited without neighbours, as with "segment_overlap": 0.',
            }
            _run(self._plpy, "warn", json.dumps([warning]))
            return hits
        self._trace.step("expand")
        widened: str = row["hits"] or "[]"
        return widened

    def _not_found(self, request: Request, found: Found) -> dict[str, Any]:
        """The error that says that nothing is left, and why."""
        if found.row.get("has_candidates"):
            nearest = "not known" if found.row["nearest"] is None else found.row["nearest"]
            return {
                "sqlstate": "P0002",
                "message": "no segment within the distance threshold",
                "detail": f"The nearest distance is {nearest}, the threshold {found.row['limit']}.",
                "hint": 'Raise "max_distance", or leave it out.',
            }
        stores = [source.store for source in found.sources]
        return self._nothing(request, stores, len(self._finder.skipped(found)))

    def _nothing(self, request: Request, stores: list[Store], skipped: int) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(
            _run(self._plpy, "not found", request.options, self._finder.records(stores), skipped, [*FILTERS])[0][
                "error"
            ]
        )
        return error


def _threshold(request: Request, row: Any) -> tuple[str, str | None]:
    method = "n_citations"
    if request.shape.has_max_distance or request.shape.has_percentage:
        method = "percentage_distance" if row["is_percentage"] else "max_distance"
    return method, row["threshold"]


def _document(request: Request, found: Found, form: str, skipped: list[str]) -> str:
    """The finished JSON."""
    row = found.row
    if form == "rows":
        hits: str = row["hits"]
        return hits
    method, threshold = _threshold(request, row)
    names = [source.store.vector_store for source in found.sources if source.store.vector_store not in skipped]
    search = "" if request.search is None else f', "search": "{request.search}"'
    return (
        f'{{"citations": {row["hits"]}, "vector_store": {_as_json(names)},'
        f' "retrieval_info": {{"method": "{method}", "threshold": {threshold or "null"}{search}}}}}'
    )
