"""How an answer came about: option ``explain`` of ``ml_rag``, and the candidates after each stage, which it counts.

They come from ``ml_rag_search`` with the same question and the options without those of the stages that follow: of each
arm alone, of all arms fused without thresholds, of the reranker without its smallest score.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from ml_rag.integrations.database import LAYERED, Rows, Schemas, asked, is_empty, layered, worded

#: candidates of one list
MOST = 100
#: what each citation tells beside its text, its document and its distance
FIELDS = [
    "document_id", "segment_number", "segment_range", "vector_store", "score", "keyword_score", "rerank_score", "rank",
    "metadata.page", "metadata.title", "highlights",
]  # fmt: skip
#: the stages in their order
STAGES = [
    "discover", "rewrite", "embed", "search", "keyword", "function", "fuse", "threshold", "text", "rerank", "expand",
    "read", "generate", "ground", "explain",
]  # fmt: skip

Key = tuple[Any, ...]


@dataclass
class Candidates:
    """What a stage left, best first, and the value by which it judged."""

    name: str
    #: what the value is: distance, BM25, score
    measure: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    #: the threshold, on the scale of the values; candidates beyond it are dropped
    threshold: float | None = None
    #: how many the call itself kept, which can be fewer
    taken: int | None = None
    #: why the list is missing
    error: str | None = None

    @property
    def is_distance(self) -> bool:
        """Whether less is better."""
        return self.measure == "distance"

    def value(self, row: Mapping[str, Any]) -> float | None:
        """What a row was judged by."""
        column = {"distance": "distance", "BM25": "keyword_score", "relevance": "rerank_score"}.get(
            self.measure, "score"
        )
        return None if row.get(column) is None else float(row[column])

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is on the right side of the threshold."""
        value = self.value(row)
        if self.threshold is None:
            return True
        if value is None:
            return False
        return value <= self.threshold if self.is_distance else value >= self.threshold


@dataclass
class Journey:
    """One question with one set of options."""

    query: str
    options: dict[str, Any]
    #: of ml_rag_answer without an answer; empty where it failed before there was anything to explain
    answer: dict[str, Any] = field(default_factory=dict)
    #: of ml_rag_answer with one
    written: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    lists: list[Candidates] = field(default_factory=list)

    @property
    def explain(self) -> dict[str, Any]:
        """What option ``explain`` tells."""
        told: dict[str, Any] = self.answer.get("explain") or {}
        return told

    @property
    def milliseconds(self) -> dict[str, float]:
        """Of each stage of the call, and in total; with the answer, once it is written."""
        told = self.written.get("explain") or self.explain
        return {name: float(ms) for name, ms in (told.get("milliseconds") or {}).items()}

    @property
    def is_other(self) -> bool:
        """Whether the answer was written from other citations: a model has rewritten the question anew."""
        return bool(self.written) and list(map(key, self.written.get("citations") or [])) != list(
            map(key, self.citations)
        )

    @property
    def citations(self) -> list[dict[str, Any]]:
        """Those of the answer."""
        found: list[dict[str, Any]] = self.answer.get("citations") or []
        return found

    @property
    def claims(self) -> list[dict[str, Any]]:
        """The sentences of the answer, each with the places of the citations that support it: sources."""
        grounding = (self.written.get("retrieval_info") or {}).get("grounding") or {}
        if not self.written.get("citations") or not grounding.get("claims"):
            return []
        places = [chunk["source"] + 1 for chunk in grounding["cited_chunks"]]
        return [{**claim, "sources": [places[n] for n in claim["citation_indices"]]} for claim in grounding["claims"]]

    def waterfall(self) -> list[tuple[str, float, float]]:
        """Each stage with its begin and its milliseconds, in their order."""
        times = {name: ms for name, ms in self.milliseconds.items() if name != "total"}
        made, begin = [], 0.0
        for name in [s for s in STAGES if s in times] + sorted(times.keys() - set(STAGES)):
            made.append((name, begin, times[name]))
            begin += times[name]
        return made


def key(row: Mapping[str, Any]) -> Key:
    """What identifies a segment."""
    return row.get("vector_store"), row.get("document_name"), row.get("document_id"), row.get("segment_number")


def moves(journeys: Sequence[Journey]) -> list[dict[str, Any]]:
    """Each candidate once, with its place in each list of each journey and among the citations; the best ones first."""
    found: dict[Key, dict[str, Any]] = {}

    def entry(row: Mapping[str, Any]) -> dict[str, Any]:
        return found.setdefault(key(row), {"row": row, "places": {}, "cited": [None] * len(journeys)})

    for side, journey in enumerate(journeys):
        for number, candidates in enumerate(journey.lists):
            for place, row in enumerate(candidates.rows, 1):
                entry(row)["places"][side, number] = (place, candidates.value(row), candidates.keeps(row))
        for place, row in enumerate(journey.citations, 1):
            entry(row)["cited"][side] = place
    last = [(side, n) for side, j in enumerate(journeys) for n in range(len(j.lists) - 1, -1, -1)]

    def order(entry: dict[str, Any]) -> tuple[Any, ...]:
        places = entry["places"]
        cited = min((place for place in entry["cited"] if place), default=math.inf)
        return (cited, *(places[list_][0] if list_ in places else math.inf for list_ in last))

    return sorted(found.values(), key=order)[: 2 * MOST]


def without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Options without some of them."""
    return {name: value for name, value in options.items() if name not in names}


#: what concerns the answer, or how a citation looks, and not which segments are found
_OF_THE_ANSWER = (
    "explain", "skip_generate", "model_options", "prompt", "return_prompt", "return_usage", "abstain", "abstain_text",
    "citation_fields", "return", "grounding", "min_support", "remove_unsupported",
)  # fmt: skip


def _object(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = options.get(name)
    return dict(value) if isinstance(value, dict) else {}


def searches(options: Mapping[str, Any], told: Mapping[str, Any]) -> list[tuple[Candidates, dict[str, Any]]]:
    """The lists that there are to an answer, each with the options that search it. ``told``: of option ``explain``."""
    thresholds = told.get("thresholds") or {}
    counts = told.get("candidates") or {}
    limit = thresholds.get("threshold") if thresholds.get("method") != "n_citations" else None
    plain = without(options, *_OF_THE_ANSWER, "rerank", "retrieval_options", "n_citations", "arms")
    wanted = int(thresholds.get("n_citations") or 3)
    if "reranked" in counts:
        wanted = max(wanted, int(_object(options, "rerank").get("candidates") or 50))
    arms = options.get("arms")
    made: list[tuple[Candidates, dict[str, Any]]] = []

    def add(name: str, measure: str, bound: Any, search: dict[str, Any]) -> None:
        made.append((Candidates(name, measure, threshold=None if bound is None else float(bound)), search))

    def sized(candidates: Any) -> int:
        # no more than the arm brings in the call, where it brings at least as many as are wanted of it
        return min(MOST, max(int(candidates or 100), wanted))

    everything = dict(plain)
    if isinstance(arms, list):
        numbers: Counter[str] = Counter()
        for arm in arms:
            search = arm["search"]
            numbers[search] += 1
            name = search if numbers[search] == 1 else f"{search} {numbers[search]}"
            own = without(arm, "weight", "max_distance", "min_score")
            measure = {"semantic": "distance", "keyword": "BM25"}.get(search, "score")
            bound = arm.get("max_distance") if measure == "distance" else arm.get("min_score")
            if len(arms) == 1 and measure == "distance" and bound is None:
                bound = limit
            add(name, measure, bound, {**plain, "arms": [own], "n_citations": sized(arm.get("candidates"))})
        everything |= {"arms": arms, "n_citations": min(sized(arm.get("candidates")) for arm in arms)}
    else:
        everything["n_citations"] = sized(_object(options, "hybrid_options").get("candidates"))
        is_semantic, is_keyword = options.get("semantic_search") is not False, options.get("keyword_search") is True
        if is_semantic:
            only = {"semantic_search": True, "keyword_search": False}
            add("semantic", "distance", None if is_keyword else limit, {**everything, **only})
        if is_keyword:
            add("keyword", "BM25", None, {**everything, "semantic_search": False, "keyword_search": True})
    if len(made) > 1:
        add("fused", "score", None, everything)
        if limit is not None:
            add("distance", "distance", limit, everything)
    if "reranked" in counts:
        reranked = {
            "rerank": {**_object(options, "rerank"), "min_score": None},
            "retrieval_options": {**_object(options, "retrieval_options"), "segment_overlap": 0},
            "n_citations": min(MOST, wanted),
        }
        add("reranked", "relevance", thresholds.get("min_score"), {**everything, **reranked})
    return made


async def retrieve(run: Rows, schemas: Schemas, query: str, options: Mapping[str, Any]) -> Journey:
    """Search, without an answer."""
    wanted = {**options, "explain": True, "citation_fields": FIELDS, "skip_generate": True}
    journey = Journey(query, dict(options))
    try:
        rows = await run(schemas.answer, asked(query, wanted))
    except psycopg.Error as error:
        journey.error = worded(error)
        if not is_empty(error):
            return journey
        # an answer that abstains is explained, and asks no language model for it; without a limit of the call's it gets
        # one that drops nothing
        limits = {"max_distance": 999999.9999, **_object(options, "retrieval_options")}
        abstaining = {"skip_generate": False, "abstain": True, "retrieval_options": limits}
        try:
            rows = await run(schemas.answer, asked(query, {**wanted, **abstaining}))
        except psycopg.Error:
            return journey
    journey.answer = rows[0]["answer"]
    return journey


async def write(run: Rows, schemas: Schemas, journey: Journey) -> None:
    """The call as it was asked, with an answer: its text, prompt, tokens and times are those that are shown."""
    wanted = {"grounding": {}, **journey.options, "explain": True, "citation_fields": FIELDS, "return_prompt": True}
    try:
        rows = await run(schemas.answer, asked(journey.query, wanted))
    except psycopg.Error as error:
        journey.error = worded(error)
        return
    journey.error = None
    journey.written = rows[0]["answer"]


async def look(run: Rows, schemas: Schemas, journey: Journey) -> None:
    """The candidates of each stage; none where the model alone answers, or whole documents are read."""
    if not journey.explain.get("stores") or journey.answer["retrieval_info"]["method"] == "document_order":
        return
    query, options = journey.query, journey.options
    (row,) = await run(LAYERED, layered(options))
    laid = without(row["options"], "preset")
    # null, so that what a list leaves out does not come back from a preset or a setting
    unset = {} if laid == options else dict.fromkeys(laid)
    found: dict[str, list[dict[str, Any]]] = {}
    for candidates, search in searches(laid, journey.explain):
        if candidates.name == "distance":
            candidates.rows = sorted(
                (row for row in found.get("fused", []) if row["distance"] is not None), key=lambda row: row["distance"]
            )
        else:
            try:
                candidates.rows = await run(schemas.search, asked(query, {**unset, **search}))
            except psycopg.Error as error:
                if not is_empty(error):
                    candidates.error = worded(error)
        candidates.taken = (journey.explain["candidates"]).get(candidates.name)
        found[candidates.name] = candidates.rows
        journey.lists.append(candidates)
