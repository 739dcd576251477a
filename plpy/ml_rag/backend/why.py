"""Where on its way through the stages a segment that was expected got lost, and which option would let it in.

The call is made again without its last limits; an arm that did not bring the segment is run again without its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Any

from ml_rag.backend.retrieval.find import STORES
from ml_rag.backend.retrieval.request import FILTERS
from ml_rag.backend.retrieval.sqltext import literal
from ml_rag.backend.statements import Statements

#: ml_rag.hit without its text, ml_rag.arm, ml_rag.request, ml_rag.retrieval, ml_rag.why_step
Hit = dict[str, Any]
Arm = dict[str, Any]
Request = dict[str, Any]
Retrieval = dict[str, Any]
Step = dict[str, Any]

#: candidates that an option can ask for; citations without a limit
_MOST, _ALL = 10_000, 1_000_000

_HITS = (
    "(SELECT coalesce(jsonb_agg(to_jsonb(h) - '{{segment,metadata,row_key}}'::text[] ORDER BY h.ordinality), '[]')"
    " FROM unnest({}) WITH ORDINALITY AS h)"
)
_run = Statements(
    {
        "retrieve": (
            "SELECT to_jsonb(r.request)::text AS request, jsonb_build_object('stores', (r.retrieval).stores,"  # noqa: S608
            " 'skipped', (r.retrieval).skipped, 'method', (r.retrieval).method, 'threshold', (r.retrieval).threshold,"
            f" 'hits', {_HITS.format('(r.retrieval).hits')}, 'ranked', {_HITS.format('(r.retrieval).ranked')},"
            f" 'rankings', (SELECT jsonb_agg(jsonb_build_object('arm', k.arm, 'hits', {_HITS.format('k.hits')})"
            " ORDER BY k.ordinality) FROM unnest((r.retrieval).rankings) WITH ORDINALITY AS k))::text AS retrieval"
            " FROM ml_rag._retrieve(jsonb_populate_record(NULL::ml_rag.request, $1), 'all') AS r",
            "jsonb",
        ),
        "segments": (
            f"SELECT {_HITS.format('r.hits')}::text AS hits FROM ml_rag._read_documents("  # noqa: S608
            f"jsonb_populate_record(NULL::ml_rag.request, $1), {STORES.format('$2')}) AS r",
            *("jsonb", "jsonb"),
        ),
        "documents": (f"SELECT ml_rag._list_documents({STORES.format('$1')}, false)::text AS listed", "jsonb"),
        "nearest": ("SELECT ml_rag._nearest_documents($1, $2) AS names", "text", "jsonb"),
    }
)


def follow(plpy: Any, request: Request, document: str, number: int | None, page: int | None) -> str:
    """The steps of ml_rag.why_not, up to the stage that drops the segment, as JSON text."""
    return json.dumps(_Following(plpy, request, number, page).steps(document), default=str)


class _Following:
    def __init__(self, plpy: Any, request: Request, number: int | None, page: int | None) -> None:
        self._plpy, self._number, self._page = plpy, number, page
        kept = {name: request[name] for name in ("n_citations", "min_score", "segment_overlap")}
        unlimited = {"n_citations": _ALL, "min_score": None, "segment_overlap": 0, "explain": False}
        found, self._retrieval = self._retrieve(request | unlimited)
        self._request = found | kept
        self._options: dict[str, Any] = self._request["options"]
        self._stores = json.dumps(self._retrieval["stores"])

    def _retrieve(self, request: Request) -> tuple[Request, Retrieval]:
        row = _run(self._plpy, "retrieve", json.dumps(request, default=float))[0]
        return json.loads(row["request"]), json.loads(row["retrieval"], parse_float=Decimal)

    def steps(self, document: str) -> list[Step]:
        unfiltered = self._without_filters()
        segments = self._segments(unfiltered, document)
        if not segments:
            known = self._segments(unfiltered, document, is_whole=True)
            whole = None if known else self._whole_name(document)
            if whole is not None:
                document = whole
                segments = self._segments(unfiltered, document)
                known = self._segments(unfiltered, document, is_whole=True)
            if not segments:
                return [self._unknown(document, known)]
        passing, steps = segments, []
        if any(name in self._options for name in FILTERS):
            passing = self._segments(self._options, document)
            steps = [_step("filter", is_kept=True, detail="It passes the filters.")]
            if not passing:
                steps = [self._filtered(document)]
        if passing and self._retrieval["method"] == "document_order":
            return [*steps, _step("read", is_kept=True, detail="The document is read as a whole.")]
        # of a document the segment that comes farthest
        last, ranked = _places(self._retrieval["hits"]), _places(self._retrieval["ranked"])

        def order(hit: Hit) -> list[float]:
            places = last.get(_key(hit)), ranked.get(_key(hit)), hit["segment_number"]
            return [math.inf if place is None else place for place in places]

        wanted = min(passing or segments, key=order)
        if passing:
            steps += self._ranked(wanted)
        if steps[-1]["is_kept"] is False and (beside := self._beside(wanted)) is not None:
            steps.append(beside)
        return steps

    # -- which segments -----------------------------------------------------------------------------------------------

    def _without_filters(self) -> dict[str, Any]:
        return {name: value for name, value in self._options.items() if name not in FILTERS}

    def _segments(self, options: dict[str, Any], document: str, *, is_whole: bool = False) -> list[Hit]:
        """The segments of a document that these options leave, all of them or those that are asked for."""
        if document not in options.get("document_name", [document]):
            return []
        options = options | {"document_name": [document]}
        if self._page is not None and not is_whole:
            own = options.get("filters", {})
            options["filters"] = own | {"and": [*own.get("and", []), {"page": self._page}]}
        request = json.dumps(self._request | {"options": options}, default=float)
        hits: list[Hit] = json.loads(_run(self._plpy, "segments", request, self._stores)[0]["hits"])
        return [hit for hit in hits if is_whole or self._number is None or hit["segment_number"] == self._number]

    def _documents(self) -> str:
        """[[name, [titles]]] as JSON text."""
        listed: str = _run(self._plpy, "documents", self._stores)[0]["listed"]
        return listed

    def _whole_name(self, name: str) -> str | None:
        """With its folders, where only one document is named so without."""
        names = {whole for whole, _ in json.loads(self._documents()) if re.split(r"[/\\]", whole)[-1] == name}
        return names.pop() if len(names) == 1 else None

    def _unknown(self, document: str, known: list[Hit]) -> Step:
        """Of a segment that is in no store; ``known``: those of its document that are."""
        if known:
            numbers = [hit["segment_number"] for hit in known if hit["segment_number"] is not None]
            detail = "The segments of the document have no numbers."
            if self._page is not None:
                detail = f"The document has no such segment of page {self._page}."
            elif numbers:
                detail = (
                    f"The document has no segment of that number; its segments are {min(numbers)} to {max(numbers)}."
                )
            what = "segment_number" if self._page is None else "page"
            hint = f'Leave "{what}" out, and the best segment of the document is followed.'
            return _step("discover", is_kept=False, detail=detail, hint=hint)
        nearest = _run(self._plpy, "nearest", document, self._documents())[0]["names"]
        names = ", ".join(store["vector_store"] for store in self._retrieval["stores"][:20])
        hint = 'Option "explain" says which other stores there are, and why they are not searched.'
        if nearest:
            quoted = " or ".join(f'"{name[:200]}"' for name in nearest)
            hint = f"Did you mean {quoted}?"
        detail = f"None of the vector stores that are searched ({names}) has a row of that document that you may see."
        return _step("discover", is_kept=False, detail=detail, hint=hint)

    def _filtered(self, document: str) -> Step:
        """Of a segment that the filters leave out: which of them do."""
        rewritten = self._request["rewritten"] or {}
        names = [
            f'"{name}"'
            for name in FILTERS
            if name in self._options
            and not self._segments(self._without_filters() | {name: self._options[name]}, document)
        ]
        hint = f"Leave {' and '.join(names) or 'one of them'} out, or change what it asks for."
        if '"filters"' in names and rewritten.get("filters") is not None:
            chosen = json.dumps(rewritten["filters"], ensure_ascii=False)[:500]
            hint = (
                f'A model chose the conditions {chosen}: leave "filters" out of query_options, or change that option.'
            )
        elif '"document_name"' in names and rewritten.get("document_names") is not None:
            hint = 'The question names other documents: leave "document_names" out of query_options.'
        detail = f"It does not pass {' and '.join(names) or 'the filters together'}."
        return _step("filter", is_kept=False, detail=detail, hint=hint)

    # -- stages -------------------------------------------------------------------------------------------------------

    def _ranked(self, wanted: Hit) -> list[Step]:
        """The steps of a segment that passes the filters, from the arms on."""
        request, retrieval = self._request, self._retrieval
        hits: list[Hit] = retrieval["ranked"]
        place = _places(hits).get(_key(wanted))
        rankings = retrieval["rankings"] or []
        steps = [self._arm(ranking["arm"], ranking["hits"], wanted) for ranking in rankings]
        if len(rankings) > 1:
            own = hits[place - 1] if place else {}
            detail = f"It is number {place} of {len(hits)}." if place else "No arm brought it."
            hint = None if place else "See the hints of the arms."
            step = _step("fuse", is_kept=place is not None, detail=detail, hint=hint)
            steps.append(step | {"rank": place, "distance": own.get("distance"), "score": own.get("score")})
        if place is None:
            return steps
        if request["max_distance"] is not None or request["percentage_distance"] is not None:
            limit = Decimal(retrieval["threshold"])
            nearest = min((hit["distance"] for hit in hits if hit["distance"] is not None), default=None)
            kept = [hit for hit in hits if hit["distance"] is not None and hit["distance"] <= limit]
            steps.append(self._far(limit, nearest, kept, hits[place - 1]))
            if not steps[-1]["is_kept"]:
                return steps
            hits = kept
        if request["rerank_model_id"] is not None:
            steps.append(self._reranked(hits, wanted))
            if not steps[-1]["is_kept"]:
                return steps
            hits = retrieval["hits"]
        return [*steps, self._cited(hits, wanted)]

    def _arm(self, arm: Arm, hits: list[Hit], wanted: Hit) -> Step:
        """What an arm did to a segment; ``hits``: what it brought.

        Where it did not bring the segment it is run again, without its limits: over the document alone for distance and
        score, then with as many candidates as an option can ask for, for the place.
        """
        is_semantic = arm["search"] == "semantic"
        rank = _places(hits).get(_key(wanted))
        step = _step("search" if is_semantic else arm["search"], is_kept=rank is not None) | {"arm": arm["name"]}
        unlimited = arm | {"candidates": _MOST, "max_distance": None, "min_score": None}
        alone: Retrieval = {}
        if rank is not None:
            hit: Hit | None = hits[rank - 1]
        else:
            own = self._options | {"document_name": [wanted["document_name"]], "vector_store": [wanted["vector_store"]]}
            alone = self._alone(unlimited, own)
            place = _places(alone["ranked"]).get(_key(wanted))
            hit = alone["ranked"][place - 1] if place else None
        value = None
        if hit is not None:
            score = hit["score"] if is_semantic else _first(hit["keyword_score"], hit["score"])
            value = _first(_numeric(score), hit["distance"] if is_semantic else None)
            step |= {"distance": value if is_semantic else hit["distance"], "score": None if is_semantic else score}
        if rank is not None:
            return step | {"rank": rank, "detail": f"It is number {rank} of {len(hits)} candidates."}
        if alone["skipped"]:
            store = wanted["vector_store"]
            return step | {"detail": f"The arm cannot search {store}.", "hint": "The warning says why."}
        if hit is None:
            detail, hint = self._nothing(arm, wanted)
        elif value is not None and arm["max_distance"] is not None and value > arm["max_distance"]:
            detail = f"The arm gives it {_rounded(value)}, and its max_distance is {arm['max_distance']}."
            hint = f'"max_distance": {Decimal(math.ceil(value * 10_000)) / 10_000} lets it in.'
        elif value is not None and arm["min_score"] is not None and value < arm["min_score"]:
            detail = f"The arm gives it {_rounded(value)}, and its min_score is {arm['min_score']}."
            hint = f'"min_score": {Decimal(math.floor(value * 10_000)) / 10_000} lets it in.'
        else:
            ranked = self._alone(unlimited, self._options)["ranked"]
            rank = step["rank"] = _places(ranked).get(_key(wanted))
            detail = f"It is number {rank}, and the arm brings {arm['candidates']}."
            where = '"candidates" of the arm'
            if "arms" not in self._options:
                where = '"candidates" of rerank' if "rerank" in self._options else '"n_citations"'
                where = '"candidates" of hybrid_options' if self._options["keyword_search"] else where
            hint = f"{where} of at least {rank} lets it in."
            if rank is None:
                detail = f"It is not among the best {_MOST}, and the arm brings {arm['candidates']}."
                hint = 'Ask in words that are nearer to it, or leave other rows out with "filters".'
        return step | {"detail": detail, "hint": hint}

    def _alone(self, arm: Arm, options: dict[str, Any]) -> Retrieval:
        """What one arm finds."""
        left_out = ("query_options", "rerank", "retrieval_options", "partial")
        fields = ("max_distance", "percentage_distance", "rerank_model_id", "rerank_candidates")
        request = self._request | dict.fromkeys(fields) | {"n_citations": _ALL, "explain": False}
        options = {name: value for name, value in options.items() if name not in left_out}
        return self._retrieve(request | {"arms": [arm], "options": options})[1]

    def _nothing(self, arm: Arm, wanted: Hit) -> tuple[str, str]:
        """Detail and hint of an arm that finds nothing in the segment."""
        if arm["search"] == "function":
            detail = f"The function {arm['function']} gives it no score, or one beyond the best {_MOST}."
            return detail, "Call the function with the text of the segment."
        if arm["node_group"] is not None:
            detail = f'Node group "{arm["node_group"]}" has no node of it that the arm finds.'
            return detail, "The view of node groups shows how many nodes are pending, and why some failed."
        if arm["search"] == "semantic":
            store = literal(wanted["vector_store"])
            return "It has no embedding yet.", (
                f"CALL ml_rag.run_vectorizer({store}) embeds the rows of a table with a vectorizer;"
                " others are embedded by ml_embed_table."
            )
        words = self._request["question"] if arm["query"] is None else " ".join(arm["query"])
        is_hybrid = any(other["search"] == "semantic" for other in self._request["arms"])
        has_synonyms = "synonyms" in self._options.get("query_options", {})
        return f'It has none of the words that the arm searches for: "{words[:500]}".', (
            f'{"Give" if is_hybrid else "Add semantic search, or give"} the arm other words: {{"query": {{"text":'
            f' "…"}}}}{"" if has_synonyms else ", or synonyms by query_options"}.'
        )

    def _far(self, limit: Decimal, nearest: Decimal | None, kept: list[Hit], hit: Hit) -> Step:
        """What the threshold did to a segment; ``kept``: all that it leaves."""
        rank, distance = _places(kept).get(_key(hit)), hit["distance"]
        told = "not known" if distance is None else distance
        step = _step("threshold", is_kept=rank is not None) | {
            "rank": rank,
            "distance": distance,
            "score": hit["score"],
            "detail": f"Its distance is {told}, the threshold {_rounded(limit)}.",
        }
        if rank is not None:
            return step
        hint = 'Use "max_distance" instead of "percentage_distance": the nearest distance is 0.'
        if distance is None:
            hint = "Leave the threshold out: the segment has no embedding to measure from."
        elif self._retrieval["method"] == "max_distance":
            hint = f'{{"retrieval_options": {{"max_distance": {distance}}}}} lets it in.'
        elif nearest:
            percent = math.ceil((distance - nearest) / abs(nearest) * 100)
            hint = f'{{"retrieval_options": {{"percentage_distance": {percent}}}}} lets it in.'
        return step | {"hint": hint}

    def _reranked(self, kept: list[Hit], wanted: Hit) -> Step:
        """What the reranker did to a segment; ``kept``: the hits before it."""
        before, least = _places(kept).get(_key(wanted)), self._request["min_score"]
        reranked = self._retrieval["hits"]
        rank = _places(reranked).get(_key(wanted))
        if rank is None:
            candidates = self._request["rerank_candidates"]
            detail = f"It is number {before}, and the first {candidates} are reranked."
            hint: str | None = f'{{"rerank": {{"candidates": {before}}}}} lets it be reranked.'
            return _step("rerank", is_kept=False, detail=detail, hint=hint)
        score = reranked[rank - 1]["rerank_score"]
        is_kept = score >= (least or 0)
        detail = f"It was number {before} and is number {rank}, with score {_rounded(score)}."
        hint = None
        if not is_kept:
            detail += f" min_score is {least}."
            hint = (
                f'{{"rerank": {{"min_score": {Decimal(score).quantize(Decimal("0.0001"), ROUND_DOWN)}}}}} lets it in.'
            )
        own = {"rank": rank, "distance": reranked[rank - 1]["distance"], "score": score}
        return _step("rerank", is_kept=is_kept, detail=detail, hint=hint) | own

    def _cited(self, hits: list[Hit], wanted: Hit) -> Step:
        """Whether a segment is one of those that are cited; ``hits``: all that are left, in their order."""
        n = self._request["n_citations"]
        rank = _places(hits)[_key(wanted)]
        hint: str | None = None
        if rank > n:
            hint = "Rerank the candidates, or ask in words that are nearer to it."
            hint = f'{{"n_citations": {rank}}} lets it in.' if rank <= 100 else hint
        detail = f"It is number {rank}, and {n} are cited."
        return _step("citations", is_kept=rank <= n, detail=detail, hint=hint) | {"rank": rank}

    def _beside(self, wanted: Hit) -> Step | None:
        """Of a segment that is not cited itself, but stands beside one that is; None = it does not."""
        request, number = self._request, wanted["segment_number"]
        for hit in self._retrieval["hits"][: request["n_citations"]]:
            is_same = hit["vector_store"] == wanted["vector_store"] and hit["document_key"] == wanted["document_key"]
            if not is_same or None in (number, hit["segment_number"], hit["document_key"]):
                continue
            is_near = abs(hit["segment_number"] - number) <= (request["segment_overlap"] or 0)
            if is_near and not _is_below(hit["rerank_score"], request["min_score"]):
                detail = f"Its text is cited all the same, as the neighbour of segment {hit['segment_number']}."
                return _step("expand", is_kept=True, detail=detail)
        return None


def _step(stage: str, *, is_kept: bool, detail: str | None = None, hint: str | None = None) -> Step:
    fields = {"arm": None, "rank": None, "distance": None, "score": None}
    return {"stage": stage, "is_kept": is_kept, "detail": detail, "hint": hint} | fields


def _key(hit: Hit) -> tuple[Any, ...]:
    return hit["vector_store"], hit["document_name"], hit["document_key"], hit["segment_number"]


def _places(hits: Iterable[Hit] | None) -> dict[tuple[Any, ...], int]:
    """Where each segment stands first."""
    places: dict[tuple[Any, ...], int] = {}
    for place, hit in enumerate(hits or [], 1):
        places.setdefault(_key(hit), place)
    return places


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _numeric(value: Any) -> Decimal | None:
    """As PostgreSQL makes a numeric of a double precision."""
    return None if value is None else Decimal(f"{value:.15g}")


def _rounded(value: Any) -> Decimal:
    return Decimal(value).quantize(Decimal("0.0001"), ROUND_HALF_UP)


def _is_below(score: Any, least: Any) -> bool:
    return score is not None and least is not None and score < least
