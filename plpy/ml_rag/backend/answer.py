"""The text of an answer: generated or summarized from what was found, and checked by it where options ask for that."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from ml_rag.backend import calls
from ml_rag.errors import EngineFailed

#: texts of one request, which are sent again where they did not fit
MOST = 500

Generate = Callable[[dict[str, Any]], dict[str, Any]]
Check = Callable[[str], dict[str, Any]]


def write(plpy: Any, generate: Generate, check: Check, given: dict[str, Any]) -> dict[str, Any]:
    """``given``: a request for ``generate`` made by sql/pipeline/generate.sql, with ``rag``: what it is to know of the
    call of ml_rag. ``check`` is ml_check_grounding.

    Returns text (None: the call abstains), messages, tokens, finish_reason, grounding, and trace: the steps taken.
    """
    rag = given.get("rag") or {"asked": {}}
    asked = rag["asked"]
    written = _summary(plpy, generate, given, rag) if rag.get("summarizes") else _generated(plpy, generate, given, rag)
    text, grounding, trace = written["text"], None, []
    if not isinstance(written["prompt"], dict):  # a program that asks in place of this call has it counted itself
        trace.append(_step("generate"))
    if text is not None and rag.get("grounding") is not None:
        text, grounding = _supported(plpy, check, text, asked)
        trace.append(_step("ground"))
    tokens = {"prompt": written["prompt_tokens"], "generated": written["generated_tokens"]}
    rest = {"messages": written["prompt"], "finish_reason": written["finish_reason"]}
    return {"text": text, "tokens": tokens, "grounding": grounding, "trace": trace, **rest}


def _step(stage: str) -> dict[str, Any]:
    return {"stage": stage, "ended": datetime.now(UTC).isoformat()}


def _generated(plpy: Any, generate: Generate, given: dict[str, Any], rag: dict[str, Any]) -> dict[str, Any]:
    """The answer of ``generate``, without text where its support is too little and the call abstains."""
    asked, options = rag["asked"], given["options"]
    conversation = {"return_prompt": asked.get("return_prompt")}
    # what is changed or checked after it was written has to be there as a whole
    is_whole = rag.get("explains") or rag.get("grounding") or asked.get("return_prompt") or "json_schema" in options
    if options["model_id"] == "extractive":
        conversation |= {name: rag.get(name) or given.get(name) for name in ("embed_model", "known_cosines")}
    elif not is_whole:
        conversation["hold"] = asked.get("hold")
    if not rag.get("stands_alone"):
        rewriting = asked.get("query_options") or {}
        conversation |= {name: rewriting.get(name) for name in ("history", "history_tokens")}
    answer = generate(given | {"conversation": conversation})
    used, all_of_them = answer["documents_used"], answer["documents_given"]
    if used is not None and all_of_them is not None and used < all_of_them:
        plpy.warning(
            f"the answer is based on only {used} of {all_of_them} citations",
            detail="The last ones do not fit the context of the generation model.",
            hint='Lower "n_citations" or "segment_overlap", or choose a model with a larger context in'
            ' "model_options".',
            sqlstate="01000",
        )
    support, least = answer["support"], answer.get("min_support")
    if support is not None and least is not None and support < least:
        if asked.get("abstain"):
            return answer | {"text": None}
        plpy.warning(
            "no sentence answers the question well",
            detail=f'The support of the best one is {support}, and "min_support" is {least}.',
            hint='With "abstain" the answer is the abstain text; a lower "min_support" in "model_options" accepts it.',
            sqlstate="01000",
        )
    return answer


def _summary(plpy: Any, generate: Generate, given: dict[str, Any], rag: dict[str, Any]) -> dict[str, Any]:
    """A summary of the documents in their order. What exceeds the model's context is summarized in parts, each of as
    many documents as fit, and the summaries of the parts are summarized in the same way, until there is one."""
    from ml_rag.backend.documents import asks_for_summary

    question, names = rag["question"], rag["asked"].get("document_name") or ()
    if rag.get("is_summary") or asks_for_summary(question, names, lambda: plpy.execute("SELECT 1")):
        question = ""  # it says nothing of what the summary should be about
    request = {
        "prompt": question,
        "options": given["options"] | {"task": "summarization"},
        "prompt_options": given["prompt_options"] | {"order": "best_first", "citation_style": "none"},
        "citations": 0,
    }
    documents = [{"document_name": d["document_name"], "text": d["text"]} for d in given["documents"]]
    tokens = {"prompt_tokens": 0, "generated_tokens": 0}
    are_summaries = False
    while True:
        parts, done, n = [], 0, len(documents)
        while done < n:
            calls.progress(plpy, rag["call"], "", "summarizing", done, n, 0)
            part = generate(request | {"documents": documents[done : done + MOST]})
            if not part["documents_used"]:
                why = "It does not say how many documents the summary is of."
                raise EngineFailed("unexpected reply from the model server", detail=why)
            parts.append(part["text"])
            done += part["documents_used"]
            tokens = {name: so_far + (part[name] or 0) for name, so_far in tokens.items()}
        calls.progress(plpy, rag["call"], "", "summarizing", n, n, 0)
        documents = [{"document_name": "summary", "text": text} for text in parts if text.strip()]
        # if there are as many summaries as before, none of them fits beside another, and it will not get shorter
        if len(parts) == 1 or (are_summaries and len(parts) >= n) or not documents:
            return {"text": "\n\n".join(parts), "prompt": None, "finish_reason": part["finish_reason"], **tokens}
        are_summaries = True


def _supported(plpy: Any, check: Check, text: str, asked: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """What is left of an answer by options min_support and remove_unsupported (None: the call abstains), its check."""
    least = asked.get("min_support")
    found = check(text)
    if asked.get("remove_unsupported") and found["supported_text"] != text:
        text = found["supported_text"]
        if text:
            found = check(text)
    del found["supported_text"]
    support = found["support_score"]
    if text and (least is None or support is None or support >= least):
        return text, found
    if asked.get("abstain"):
        return None, found
    plpy.warning(
        "the citations do not support the answer well",
        detail=f'Its support is {support}, and "min_support" is {least}.'
        if text
        else "No sentence of it is supported.",
        hint='With "abstain" the answer is the abstain text. retrieval_info.grounding shows the support of each'
        " sentence.",
        sqlstate="01000",
    )
    return text, found
