"""An answer document of ``ml_rag`` as chat clients get it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ml_rag.integrations.gateway.citations import BEGUN, grounded, listed, renumbered, sources, url_citations
from ml_rag.integrations.gateway.config import Config
from ml_rag.integrations.gateway.question import Question

#: pieces that wait for a slow client before the model does
_WAITING = 64


class Pieces:
    """The beginning of ``Answer.text`` that is there before all of it, piece by piece."""

    def __init__(self, config: Config) -> None:
        self.queue: asyncio.Queue[str] = asyncio.Queue(_WAITING)
        #: all of them together
        self.text = ""
        self._config, self._held = config, ""
        #: of each citation's document, where markers refer to citations
        self._numbers: list[int] | None = None

    async def add(self, document: Mapping[str, Any], piece: str) -> None:
        """The next piece that the model has written."""
        text = self._held + piece
        begun = BEGUN.search(text)
        ready = text if begun is None else text[: begun.start()]
        self._held = text[len(ready) :]
        if self._numbers is None:
            _, numbers = sources(document.get("citations") or [], self._config.document_url)
            self._numbers = numbers if has_markers(document) else []
        if ready := renumbered(ready, self._numbers):
            self.text += ready
            await self.queue.put(ready)


def has_markers(document: Mapping[str, Any]) -> bool:
    """Whether the model was asked for markers that refer to citations."""
    return document["retrieval_info"].get("citation_style") == "numbered"


@dataclass(frozen=True)
class Answer:
    """The text, and all that comes with it."""

    text: str
    #: the text says why there is none of the form that was asked for
    is_refusal: bool
    #: as in OpenAI's responses
    annotations: list[dict[str, Any]]
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    #: what OpenAI's protocol has no place for
    rest: dict[str, Any]

    @classmethod
    def nothing(cls) -> Answer:
        """To a task, where the model is too small: an object that has nothing for a program to show."""
        return cls("{}", False, [], "stop", 0, 0, {"citations": [], "sources": []})

    @classmethod
    def of(cls, asked: Question, document: Mapping[str, Any], config: Config) -> Answer:
        """From the document that ``ml_rag_answer`` returns."""
        text, usage = document["text"] or "", document.get("usage") or {}
        citations = document.get("citations") or []
        found, numbers = sources(citations, config.document_url)
        finish = usage.get("finish_reason") or "stop"
        rest = {name: value for name, value in document.items() if name not in ("text", "usage")}
        rest["citations"] = [
            {**citation, "document_name": found[number - 1].title, "source": number}
            for citation, number in zip(citations, numbers, strict=True)
        ]
        rest["sources"] = [asdict(one) for one in found]
        # elsewhere what looks like a marker is a document's own, or in JSON an array
        markers = numbers if has_markers(document) and not asked.is_json else []
        claims = []
        if (grounding := document["retrieval_info"].get("grounding")) is not None:
            grounding = grounded(grounding, text, numbers, markers)
            rest["retrieval_info"] = {**document["retrieval_info"], "grounding": grounding}
            claims = grounding.get("claims", [])
        text = renumbered(text, markers)
        return cls(
            text=text if asked.is_json else text + listed(found, config.citations),
            # an abstention, which is not JSON
            is_refusal=asked.is_json and finish == "stop" and not _is_json(text),
            annotations=url_citations(text, found, claims, has_markers=bool(markers)),
            finish_reason=finish,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            generated_tokens=usage.get("generated_tokens") or 0,
            rest=rest,
        )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
