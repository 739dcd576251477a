"""Prompt to text, through the model server."""

from __future__ import annotations

import json
from typing import Any

from ml_rag.backend import calls
from ml_rag.backend.client import ModelServer
from ml_rag.errors import EngineFailed, InvalidRequest, UnknownModel, WrongTask

#: option of ml_generate -> field of a chat completion, where the names differ
_FIELDS = {"model_id": "model", "stop_sequences": "stop"}
#: the same for the options of the prompt
_PROMPT_FIELDS = {"citation_style": "citation_style", "order": "document_order"}


def generate(server: ModelServer, request: dict[str, Any]) -> dict[str, Any]:
    """``request``: prompt, documents (array or null), options of ml_generate and prompt_options, both parsed, and
    citations: how many of the documents, the first ones, are citations of the answer (null: it has none to point to).
    conversation (or null): history (array of role and content), history_tokens, return_prompt, embed_model and
    known_cosines, as the model server has them; hold: nothing is asked, and prompt has the request and the address.

    Returns text, documents_given and documents_used (both None without documents), support and min_support (of
    extractive answers, else None), prompt_tokens and generated_tokens (None where the model server does not tell),
    finish_reason ("stop", "length" or None), prompt (messages; None where it was not asked for).
    """
    fields = {_FIELDS.get(name, name): value for name, value in request["options"].items()}
    if (schema := fields.pop("json_schema", None)) is not None:
        schema_format = {"name": "answer", "schema": schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema_format}
    fields["messages"] = [{"role": "user", "content": request["prompt"]}]
    prompt_options = request.get("prompt_options") or {}
    system = fields.pop("system", None) or prompt_options.get("system")
    if prompt_options.get("length") is not None:
        fields["answer_length"] = prompt_options["length"]
    if system:
        fields["messages"].insert(0, {"role": "system", "content": system})
    if request.get("documents") is not None:
        fields["documents"] = request["documents"]
        if request.get("citations") is not None:
            fields["citations"] = request["citations"]
            fields |= {_PROMPT_FIELDS[name]: value for name, value in prompt_options.items() if name in _PROMPT_FIELDS}
    fields |= {name: value for name, value in (request.get("conversation") or {}).items() if value is not None}
    if fields.pop("hold", False):
        nothing = dict.fromkeys(
            ("documents_given", "documents_used", "prompt_tokens", "generated_tokens", "finish_reason", "support")
        )
        completion = fields | {"counted_as": calls.counted_as()}
        return {"text": "", **nothing, "prompt": {"server": server.address, "completion": completion}}
    reply = server.call("POST", "/v1/chat/completions", fields)
    try:
        text = reply["choices"][0]["message"]["content"]
        used = reply.get("ml_rag") or {}
        if not isinstance(text, str):
            raise TypeError("content is not a text")
        counts = {name: used.get(name) for name in ("documents_given", "documents_used")}
        if not all(count is None or (isinstance(count, int) and 0 <= count < 2**31) for count in counts.values()):
            raise TypeError("no number of documents")
        tokens = tokens_of(reply)
        finish = reply["choices"][0].get("finish_reason")
        prompt = used.get("prompt")
        if prompt is not None and not isinstance(prompt, list):
            raise TypeError("prompt is not a list")
        support = {name: used.get(name) for name in ("support", "min_support")}
        if not all(value is None or type(value) in (int, float) for value in support.values()):
            raise TypeError("support is not a number")
    except (KeyError, IndexError, TypeError, AttributeError) as e:
        raise EngineFailed("unexpected reply from the model server", detail=f"No answer: {e!r}.") from None
    reason = {"finish_reason": finish if finish in ("stop", "length") else None}
    return {"text": text, **counts, **tokens, **reason, **support, "prompt": prompt}


def ask(server: ModelServer, fields: dict[str, Any]) -> tuple[str, dict[str, int | None]]:
    """Text and tokens of a chat completion that ml_rag itself requests; a text that does not fit is EngineFailed."""
    try:
        reply = server.call("POST", "/v1/chat/completions", fields)
    except (UnknownModel, WrongTask):
        raise
    except InvalidRequest as e:  # a text that does not fit is the model's limit
        raise EngineFailed(e.message, detail=e.detail, hint=e.hint) from None
    try:
        text = reply["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError("content is not a text")
    except (KeyError, IndexError, TypeError) as e:
        raise EngineFailed("unexpected reply from the model server", detail=f"No answer: {e!r}.") from None
    return text, tokens_of(reply)


def read_json(text: str, longest: int) -> Any:
    """What a model has written as JSON. Raises EngineFailed."""
    if len(text) > longest:
        raise unusable(f"It has more than {longest} characters.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise unusable("It is not JSON.") from None


def read_texts(name: str, value: Any) -> list[str]:
    """The distinct texts of that name in an answer that are not blank. Raises EngineFailed."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise unusable(f'Its "{name}" is neither a text nor a list of texts.')
    # a NUL and halves of surrogate pairs, which PostgreSQL's text cannot hold
    cleaned = [text.replace("\x00", "").encode("utf-8", "replace").decode().strip() for text in texts]
    return list(dict.fromkeys(text for text in cleaned if text))


def unusable(detail: str) -> EngineFailed:
    """``detail``: what is wrong with an answer, not what the model wrote."""
    return EngineFailed("the model's answer cannot be used", detail=detail)


def tokens_of(reply: dict[str, Any]) -> dict[str, int | None]:
    """prompt_tokens and generated_tokens of a chat completion.

    Statistics, for which no answer shall fail: None if a number is missing; an engine that does not know it says 0.
    """
    usage = reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    tokens = {"prompt_tokens": usage.get("prompt_tokens"), "generated_tokens": usage.get("completion_tokens")}
    return {name: n if isinstance(n, int) and 0 < n < 2**31 else None for name, n in tokens.items()}
