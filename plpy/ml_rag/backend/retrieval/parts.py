"""What the arms of a call search with once a question was rewritten.

A key of the query that an arm names ("query": "synonyms") is that arm's alone. Else all arms that search with the
question get it: a hypothetical document goes beside the question; sub-questions, the history and synonyms are parts of
the search, with a share of the score whatever their arms give. Arms of no given weight then have fixed ones. All of
this by measuring: docs/questions.md.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

#: the share of synonyms, and the weight of all semantic arms
_OF_SYNONYMS, _OF_SEMANTIC = 0.1, 0.4

#: the fields of ml_rag.arm
ArmRecord = dict[str, Any]


def rewritten_arms(arms: list[ArmRecord], question: str, rewritten: dict[str, Any]) -> list[ArmRecord]:
    """The arms with what they search with; ``rewritten``: the fields of ml_rag.rewritten."""
    taken = {arm["query_key"] for arm in arms}
    synonyms = rewritten["synonyms"] or []
    texts = (rewritten["sub_questions"] or []) if _is_free("sub_questions", taken) else []
    texts = texts + ([] if rewritten["history"] is None else [rewritten["history"]])
    found = _with_texts(arms, question, rewritten, taken)
    # how clear an arm is about the words of the question says nothing about other texts
    is_auto = rewritten["question"] is None and not (texts or synonyms or rewritten["hypothetical_documents"])
    for arm in found:
        arm["part"] = 1
        if arm["weight"] is None and not is_auto:
            weight = _OF_SEMANTIC if arm["search"] == "semantic" else 1 - _OF_SEMANTIC
            arm["weight"] = weight / sum(1 for other in found if other["search"] == arm["search"])
    for part, text in enumerate(texts, 2):
        found += _part(found, ("semantic", "keyword"), [text], part)
    left = 1.0
    if synonyms and _is_free("synonyms", taken):
        others = _part(found, ("keyword",), synonyms, 0)
        left = 1 - _OF_SYNONYMS if others else 1.0
        found += others
    of_a_kind: dict[str, int] = {}
    for arm in found:
        if len(found) > 1 and len(arms) == 1:  # one arm alone brings only what is cited
            arm["candidates"] = max(100, arm["candidates"])
        arm["share"] = left / (1 + len(texts)) if arm["part"] else _OF_SYNONYMS
        n = of_a_kind[arm["search"]] = of_a_kind.get(arm["search"], 0) + 1
        arm["name"] = arm["search"] if n == 1 else f"{arm['search']} {n}"
    return found


def _is_free(key: str, taken: Collection[str | None]) -> bool:
    """Whether no arm names a key, and none has a text of its own."""
    return key not in taken and None not in taken


def _with_texts(
    arms: list[ArmRecord], question: str, rewritten: dict[str, Any], taken: Collection[str | None]
) -> list[ArmRecord]:
    """The arms with the texts of their option query. Those without a text are left out."""
    sub_questions = rewritten["sub_questions"] or []
    found: list[ArmRecord] = []
    for arm in arms:
        key = arm["query_key"]
        if key == "sub_questions":
            weight = arm["weight"] and arm["weight"] / max(1, len(sub_questions))
            found += [arm | {"query": [text], "weight": weight} for text in sub_questions]
            continue
        if key == "question" and arm["search"] == "semantic" and arm["query_embedding"] is None:
            key = "hypothetical_document" if _is_free("hypothetical_document", taken) else key
        texts = None
        if key == "synonyms":
            texts = rewritten["synonyms"] or None
        elif key == "hypothetical_document" and (passages := rewritten["hypothetical_documents"]):
            texts = passages if arm["is_alone"] else [question, *passages]
        if texts is not None or arm["query_key"] not in ("synonyms", "hypothetical_document"):
            found.append(arm | {"query": arm["query"] or texts})
    return found or [arms[0] | {"query_key": "question", "weight": 1}]


def _part(arms: list[ArmRecord], searches: Collection[str], query: list[str], part: int) -> list[ArmRecord]:
    """Those arms that search with the question once more, with another text as another part."""
    return [
        arm | {"query": query, "query_embedding": None, "part": part}
        for arm in arms
        if arm["part"] == 1 and arm["query_key"] == "question" and arm["search"] in searches
    ]
