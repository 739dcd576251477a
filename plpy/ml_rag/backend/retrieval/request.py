"""What a call asks for, read from its options once: the options of applications are the same from call to call."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ml_rag.backend.retrieval import stores
from ml_rag.backend.retrieval.plan import Arm, Shape
from ml_rag.backend.statements import Statements

#: requests that a session remembers, and the longest options of one
KEPT = 64
LONGEST = 4096

#: of retrieval_options: how far a hit may be
_LIMITS = {"max_distance", "percentage_distance"}
#: options that leave rows out (ml_rag.filter)
_FILTERS = ("document_name", "exclude_document_name", "filters", "required_keywords", "excluded_keywords")
_run = Statements({"parse": ("SELECT ml_rag._parse_rag_options($1) AS options", "jsonb")})


@dataclass(frozen=True, slots=True)
class Request:
    """Typed options: what the text of the statement depends on, and values."""

    shape: Shape
    wanted: stores.Wanted
    #: of parameters of the statement, by the name of the slot
    values: dict[str, Any]
    needs_embedding: bool
    skips_generation: bool
    #: whether hits are reranked after the statement, and then widened
    is_reranked: bool
    #: of option index_options: exact, and settings of an index
    is_exact: bool
    ef_search: int | None
    probes: int | None
    #: all options, checked and with their defaults, as JSON text
    options: str
    #: whether some of them leave rows out
    is_filtered: bool
    #: whether a call warns of names of documents that are not there
    names_documents: bool
    #: retrieval_info.search of the answer; None = by meaning
    search: str | None


_kept: OrderedDict[tuple[str, str, bool, bool], Request | None] = OrderedDict()


def read(plpy: Any, schema: str, options: str, form: str, *, is_parsed: bool, has_vector: bool) -> Request | None:
    """The request of a call with these options (JSON text, without ``query_embedding``); None = one that is left to the
    stages. ``form``: see ``Shape``. ``is_parsed``: whether the options are checked and have their defaults.

    Raises plpy.SPIError for options that are none.
    """
    key = options, form, is_parsed, has_vector
    if key in _kept:
        _kept.move_to_end(key)
        return _kept[key]
    parsed = options if is_parsed else _run(plpy, "parse", options)[0]["options"]
    request = _read(plpy, schema, parsed, form, has_vector)
    if len(options) <= LONGEST:
        _kept[key] = request
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    return request


def _read(plpy: Any, schema: str, text: str, form: str, has_vector: bool) -> Request | None:
    try:
        options: dict[str, Any] = json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError):  # jsonb takes more digits than Python, and deeper arrays
        return None
    limits = options.get("retrieval_options") or {}
    index = options.get("index_options") or {}
    rerank = options.get("rerank")
    arms, weights, fusion, values = _arms(options, rerank)
    if (
        not arms
        or options["n_citations"] == 0
        or "query_options" in options
        or options.get("explain")
        or options.get("partial")
        or options.get("return") == "node"
    ):
        return None
    n = options["n_citations"]
    if rerank is not None:
        n = max(n, rerank["candidates"])
    most, percentage = limits.get("max_distance"), limits.get("percentage_distance")
    is_hybrid = len(arms) == 2
    needs_embedding = any(arm.search == "semantic" for arm in arms) or bool(_LIMITS & limits.keys())
    if is_hybrid and fusion == "weighted":
        values |= {"near_weight": weights["semantic"], "words_weight": weights["keyword"]}
    values |= {
        "max_distance": most if most is None else str(most),
        "percentage_distance": percentage if percentage is None else str(percentage),
        "rrf_k": (options.get("hybrid_options") or {}).get("rrf_k", 60),
    }
    overlap = 200 if options.get("return") == "document" else limits.get("segment_overlap", 0)
    names, model = options.get("vector_store"), options.get("embed_model_id")
    columns = options.get("vector_store_columns") or {}
    return Request(
        Shape(
            arms=arms,
            n=n,
            metric=stores.metric(plpy, schema, options["distance_metric"]),
            has_vector=has_vector or needs_embedding,
            fusion=fusion,
            has_max_distance=most is not None,
            has_percentage=percentage is not None,
            overlap=0 if rerank is not None else overlap,
            rescore=index.get("rescore"),
            form=form,
            fields=tuple(options.get("citation_fields") or ()) if form == "citations" else (),
        ),
        stores.Wanted(
            _tuple(names),
            _tuple(options.get("exclude_vector_store")),
            _tuple(options.get("schema")),
            tuple(columns.items()),
            model,
            "vector_store_columns" in options and (has_vector or model is not None),
            model is None and names is None and needs_embedding,
        ),
        values,
        needs_embedding,
        skips_generation=bool(options.get("skip_generate")),
        is_reranked=rerank is not None,
        is_exact=bool(index.get("exact")),
        ef_search=index.get("ef_search"),
        probes=index.get("probes"),
        options=text,
        is_filtered=any(name in options for name in _FILTERS),
        names_documents="document_name" in options,
        search="hybrid" if is_hybrid else "keyword" if arms[0].search == "keyword" else None,
    )


def _tuple(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _arms(
    options: dict[str, Any], rerank: dict[str, Any] | None
) -> tuple[tuple[Arm, ...], dict[str, float], str, dict[str, Any]]:
    """The arms, their weights, how they are fused, and the limits of their own; no arms where they are others than one
    by meaning and one by words, each with the question."""
    least = options["n_citations"] if rerank is None else max(options["n_citations"], rerank["candidates"])
    hybrid = options.get("hybrid_options") or {}
    fusion = hybrid.get("fusion", "weighted")
    if "arms" not in options:
        searches = [search for search in ("semantic", "keyword") if options[f"{search}_search"]]
        candidates = max(least, hybrid.get("candidates", 100)) if options["keyword_search"] else least
        if searches == ["keyword"] and rerank is None and not _LIMITS & (options.get("retrieval_options") or {}).keys():
            candidates = least  # no other arm and no limit makes one of the others count
        weight = hybrid.get("semantic_weight")
        if fusion == "weighted" and weight is None:
            fusion = "auto"
        weights = {} if weight is None else _shares({"semantic": float(weight), "keyword": 1 - float(weight)})
        return tuple(Arm(search, candidates) for search in searches), weights, fusion, {}
    arms, weights, values = [], {}, {}
    for given in options["arms"]:
        search = given["search"]
        if (
            search not in ("semantic", "keyword")
            or search in weights
            or given.get("query", "question") != "question"
            or "query_embedding" in given
            or given.get("in", "segment") != "segment"
        ):
            return (), {}, fusion, {}
        limit = given.get("max_distance") if search == "semantic" else given.get("min_score")
        arms.append(Arm(search, max(least, given["candidates"]), limit is not None))
        values[f"{search}_limit"] = limit if limit is None else str(limit)
        weights[search] = float(given.get("weight", 1))
        if given["is_auto"]:
            fusion = "auto" if fusion == "weighted" else fusion
    return tuple(arms), _shares(_shares(weights)), fusion, values


def _shares(weights: dict[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
