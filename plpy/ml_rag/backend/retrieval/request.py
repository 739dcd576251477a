"""What a call asks for, read from its options once: the options of applications are the same from call to call."""

from __future__ import annotations

import json
from collections import OrderedDict
from decimal import Decimal
from typing import Any, NamedTuple

from ml_rag.backend.retrieval import stores
from ml_rag.backend.retrieval.arms import KINDS
from ml_rag.backend.retrieval.shape import Arm, Shape
from ml_rag.backend.sqlstate import sqlstate
from ml_rag.backend.statements import Statements

#: requests that a session remembers, and the longest options of one
KEPT = 64
LONGEST = 4096

#: of options those that are read here
_READ = [
    *("rerank", "index_options", "semantic_search", "keyword_search", "skip_generate", "partial", "return"),
    *("vector_store", "exclude_vector_store", "schema", "embed_model_id", "vector_store_columns", "citation_fields"),
    "has_own_limit",
]
#: options that leave rows out (ml_rag.filter)
FILTERS = ("document_name", "exclude_document_name", "filters", "required_keywords", "excluded_keywords")
_run = Statements(
    {
        "read": (
            "SELECT to_jsonb(ml_rag._request('?', ml_rag._parse_rag_options($1)))::text AS request,"
            " ml_rag._layered($1) = $1 AS is_laid",
            "jsonb",
        ),
        # without what only SQL reads: numbers of filters can have more digits than Python takes, and deeper arrays
        "options": (
            "SELECT o.options::text AS text, ml_rag._needs_embedding(o.options) AS needs_embedding,"
            # jsonb_object_agg takes a time that grows with the square of the texts in a value, and looks for no cancel
            " ($1 - 'rewritten' || jsonb_build_object('options', o.options || (SELECT coalesce("
            "jsonb_object_agg(k.key, true), '{}') FROM jsonb_object_keys(o.options) AS k (key) WHERE k.key <> ALL ($2))"
            "))::text AS record"
            " FROM (SELECT $1 -> 'options' AS options) AS o",
            *("jsonb", "text[]"),
        ),
        # the tree checks them
        "filters": (
            "SELECT ($1 - 'filters')::text AS others, ($1 -> 'filters')::text AS filters, $1 ? 'filters'"
            " AND ml_rag._filter_tree($1 -> 'filters') IS NOT NULL AS is_valid",
            "jsonb",
        ),
        "without filters": ("SELECT ($1 - 'filters')::text AS options", "jsonb"),
    }
)


class AskedArm(NamedTuple):
    """What an arm searches with (ml_rag.arm), beside what its statement depends on."""

    search: str
    #: texts: the mean of their vectors, any of their words; None = the question
    query: tuple[str, ...] | None
    vector: str | None
    #: of the caller's, as it is written into a statement, and what it takes
    function: str | None
    form: str | None
    node_group: str | None
    #: which of the store's; None = the one it was found with
    embedding: str | None
    #: what its function gets beside the texts, as JSON text; None = nothing
    arguments: str | None
    #: ml_rag.arm as JSON text
    record: str

    def text(self, question: str) -> str:
        return question if self.query is None else " ".join(self.query)

    @property
    def takes_vectors(self) -> bool:
        return KINDS[self.search].takes_vectors or (self.form or "").startswith("vector")


class Request(NamedTuple):
    """Typed options: what the text of the statement depends on, and values."""

    shape: Shape
    wanted: stores.Wanted
    arms: tuple[AskedArm, ...]
    #: of parameters of the statement, by the name of the slot
    values: dict[str, Any]
    #: whether the question has to be embedded, unless its vector is given
    needs_embedding: bool
    skips_generation: bool
    #: whether citations have fields that are made of the hits: highlights, single keys of the metadata
    has_made_fields: bool
    #: neighbours that hits get after they are reranked
    overlap: int
    #: hits that are cited, and with reranking the candidates of that; the least score, and the model
    n_citations: int
    rerank: dict[str, Any] | None
    rerank_model: str | None
    min_score: float | None
    #: whether max_distance is that of the stores, where one was kept for them
    has_own_limit: bool
    #: of option index_options: exact, and settings of an index
    index_options: dict[str, Any]
    #: whether a store of other dimensions than the vector's is left out: one with a wrong marker must not break calls
    #: that never named it
    skips_dimensions: bool
    explains: bool
    has_functions: bool
    is_partial: bool
    rewrites: bool
    #: all options, checked and with their defaults, as JSON text
    options: str
    #: whether some of them leave rows out; whether all but those of some documents; whether documents have names, which
    #: a call warns of that are not there
    is_filtered: bool
    names_documents: bool
    has_names: bool
    #: retrieval_info.search of the answer; None = by meaning
    search: str | None
    #: ml_rag.request as JSON text, without a vector; "" where it was made of options alone
    record: str


_kept: OrderedDict[tuple[str, str, bool], Request] = OrderedDict()
#: requests with filters, which are often of a call alone, by their other options: of a request only the text of its
#: options depends on the filters, which are left out of these
_filtered: OrderedDict[tuple[str, str, bool], Request] = OrderedDict()


def read(plpy: Any, schema: str, options: str, form: str, *, has_vector: bool) -> Request:
    """The request of a call with these options: JSON text, without ``query_embedding``. ``form``: see ``Shape``.

    Raises plpy.SPIError for options that are none.
    """
    key = options, form, has_vector
    if key in _kept:
        _kept.move_to_end(key)
        return _kept[key]
    others = None
    if len(options) <= LONGEST and '"filters"' in options:
        others, request = _with_filters(plpy, options, form, has_vector=has_vector)
        if request is not None:
            _keep(_kept, key, request)
            return request
    found = _run(plpy, "read", options)[0]
    request = of_record(plpy, schema, found["request"], form, has_vector=has_vector)._replace(record="")
    # a function can be another one by now, and so can a setting that names a model
    is_fixed = request.rerank is None and not request.rewrites and not request.has_functions
    # a caller of the inner function can give options without the levels that its settings lay beneath them
    if len(options) <= LONGEST and is_fixed and found["is_laid"]:
        _keep(_kept, key, request)
        if others is not None and not request.explains:
            without = _run(plpy, "without filters", request.options)[0]["options"]
            _keep(_filtered, (others, form, has_vector), request._replace(options=without))
    return request


def _keep(kept: OrderedDict[tuple[str, str, bool], Request], key: tuple[str, str, bool], request: Request) -> None:
    kept[key] = request
    if len(kept) > KEPT:
        kept.popitem(last=False)


def _with_filters(plpy: Any, options: str, form: str, *, has_vector: bool) -> tuple[str | None, Request | None]:
    """The options but for the filters, where these are valid; the request, where one with the same others is known."""
    try:
        row = _run(plpy, "filters", options)[0]
    except plpy.SPIError as e:
        if sqlstate(e) != "22023":
            raise
        return None, None
    key = row["others"], form, has_vector
    if not row["is_valid"]:
        return None, None
    if key not in _filtered:
        return row["others"], None
    _filtered.move_to_end(key)
    request = _filtered[key]
    return None, request._replace(options=f'{request.options[:-1]}, "filters": {row["filters"]}}}')


def of_record(plpy: Any, schema: str, text: str, form: str, *, has_vector: bool, told: str = "") -> Request:
    """The same of ml_rag.request as JSON text."""
    found = _run(plpy, "options", text, _READ)[0]
    record: dict[str, Any] = json.loads(found["record"], parse_float=Decimal)
    options: dict[str, Any] = record["options"]
    if record["n_citations"] == 0:
        record |= {"arms": [], "distance_metric": "COSINE"}
    rerank = options.get("rerank")
    n = record["rerank_candidates"] or record["n_citations"]
    most, percentage = record["max_distance"], record["percentage_distance"]
    is_limited = most is not None or percentage is not None
    fusion = record["fusion"] or "weighted"
    arms, asked = [], []
    values: dict[str, Any] = {}
    for place, arm in enumerate(record["arms"], 1):
        candidates = arm["candidates"]
        if len(record["arms"]) == 1 and not (is_limited or rerank or record["explain"]):
            candidates = min(candidates, n)  # no other arm and no limit makes one of the others count
        own = Arm(
            arm["search"],
            candidates,
            arm["name"],
            in_nodes=arm["node_group"] is not None,
            has_embedding=arm["embedding"] is not None,
            is_descending=arm["is_descending"] is not False,
            part=1 if arm["part"] is None else arm["part"],
        )
        limit = arm["min_score" if own.unit.is_descending else "max_distance"]
        arms.append(own._replace(has_limit=limit is not None))
        query = arm["query"]
        asked.append(
            AskedArm(
                *(arm["search"], query and tuple(query), arm["query_embedding"], arm["function"], arm["form"]),
                *(
                    arm["node_group"],
                    arm["embedding"],
                    arm["arguments"] and json.dumps(arm["arguments"], default=float),
                ),
                json.dumps(arm | {"query_embedding": None}, default=float),
            )
        )
        values[f"limit_{place}"] = limit if limit is None else str(limit)
        values[f"weight_{place}"] = arm["weight"] and float(arm["weight"])
        values[f"share_{place}"] = 1.0 if arm["share"] is None else float(arm["share"])
        if arm["weight"] is None and fusion == "weighted":
            fusion = "auto"
    values |= {
        "max_distance": most if most is None else str(most),
        "percentage_distance": percentage if percentage is None else str(percentage),
        "rrf_k": record["rrf_k"] and float(record["rrf_k"]),
    }
    kinds = {arm.search for arm in arms}
    is_hybrid = options.get("semantic_search") and options.get("keyword_search")
    search = "hybrid" if is_hybrid else "keyword" if options.get("keyword_search") else None
    if "function" in kinds:
        search = "function" if len(arms) == 1 else "hybrid"
    # the ranking model "hybrid" reads how far the hits are
    needs_embedding: bool = bool(arms) and (found["needs_embedding"] or record["rerank_model_id"] == "hybrid")
    return Request(
        Shape(
            arms=tuple(arms),
            n=n,
            metric=stores.metric(plpy, schema, record["distance_metric"]),
            has_vector=has_vector or needs_embedding,
            fusion=fusion,
            has_max_distance=most is not None,
            has_percentage=percentage is not None,
            overlap=0 if rerank is not None or told == "all" else record["segment_overlap"] or 0,
            returns_nodes=options.get("return") == "node",
            form=form,
            fields=tuple(options.get("citation_fields") or ()) if form == "citations" else (),
            told=told or ("counts" if record["explain"] else ""),
        ),
        _wanted(options, has_vector=has_vector, needs_embedding=needs_embedding),
        tuple(asked),
        values,
        needs_embedding,
        skips_generation=bool(options.get("skip_generate")),
        has_made_fields=any(
            field == "highlights" or "." in field
            for field in options.get("citation_fields") or ()
            if form == "citations"
        ),
        overlap=record["segment_overlap"] or 0,
        n_citations=record["n_citations"],
        rerank=rerank,
        rerank_model=record["rerank_model_id"],
        has_own_limit="has_own_limit" in options and record["distance_metric"] == "COSINE",
        min_score=record["min_score"] and float(record["min_score"]),
        index_options=options.get("index_options") or {},
        skips_dimensions=not has_vector and "vector_store" not in options,
        explains=bool(record["explain"]),
        has_functions="function" in kinds,
        is_partial=bool(options.get("partial")),
        rewrites="query_options" in options,
        options=found["text"],
        is_filtered=any(name in options for name in FILTERS),
        names_documents="document_name" in options,
        has_names=bool(options.keys() & {"document_name", "exclude_document_name"}),
        search=search,
        record=text,
    )


def _wanted(options: dict[str, Any], *, has_vector: bool, needs_embedding: bool) -> stores.Wanted:
    names, model = options.get("vector_store"), options.get("embed_model_id")
    return stores.Wanted(
        _tuple(names),
        _tuple(options.get("exclude_vector_store")),
        _tuple(options.get("schema")),
        tuple((options.get("vector_store_columns") or {}).items()),
        model,
        "vector_store_columns" in options and (has_vector or model is not None),
        model is None and names is None and needs_embedding,
    )


def _tuple(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)
