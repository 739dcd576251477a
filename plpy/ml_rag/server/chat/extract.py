"""Chat completions by a model that takes sentences out of the documents: they reach it as they are, in no prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ml_rag.abc import Cancelled, Delta
from ml_rag.errors import EngineFailed, InvalidRequest, ModelUnavailable, QueueFull, UnknownModel, WrongTask
from ml_rag.server.catalogue import DEFAULT_MODELS
from ml_rag.server.chat.prompt import FittedPrompt
from ml_rag.server.chat.request import ChatRequest
from ml_rag.server.engines import extractive
from ml_rag.server.engines.extractive import Embed, Extract, ExtractiveEngine, Question
from ml_rag.server.registry import InputType, Registry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

log = logging.getLogger("ml_rag.server")


def work(
    engine: ExtractiveEngine, body: ChatRequest, embed: Embed, cancelled: Cancelled
) -> Iterator[FittedPrompt | Extract | Delta]:
    """Everything, in the model's thread: what was read, how well it answers, then the sentences."""
    sampling = body.sampling()
    if sampling.json_schema is not None:
        raise InvalidRequest(
            f"model {body.model} writes no JSON",
            detail="It takes sentences out of documents.",
            hint='Leave out the schema, or name a language model in "model_id".',
        )
    is_summary = body.task == "summarization"
    asked, texts = body.messages[-1].content.strip(), [document.text for document in body.documents or ()]
    if not texts and is_summary:
        asked, texts = "", [asked]
    if not texts:
        yield from engine.generate(body.plain_messages(), sampling, cancelled)
    texts = engine.fitting(texts)
    sentences = body.max_sentences or (extractive.SUMMARY_SENTENCES if is_summary else extractive.SENTENCES)
    markers = min(body.citations or 0, len(texts)) if body.citation_style == "numbered" else 0
    known = body.known_cosines
    cosines = {} if known is None else {" ".join(text.split()): cosine for text, cosine in known.cosines.items()}
    question = Question(asked, texts, sentences, is_summary, markers, known.vector if known else (), cosines)
    yield FittedPrompt([], len(texts) if body.documents else 0, 0)
    found = engine.extract(question, embed)
    yield found
    yield from engine.deltas(question, found, sampling)


def embedder(registry: Registry, engine: ExtractiveEngine, named: str | None, cancelled: Cancelled) -> Embed:
    """Embeds by the model named, else by the first one that is here; None where there is none or it fails: an answer
    shall not. Called from another thread than the loop's.
    """
    loop = asyncio.get_running_loop()

    async def vectors(model_id: str, questions: Sequence[str], texts: Sequence[str]) -> tuple[Floats, Floats]:
        async def of(given: Sequence[str], input_type: InputType) -> list[Floats]:
            return [(await registry.embed(model_id, given, cancelled, input_type))[0]] if given else []

        async def unrelated() -> Floats:
            if model_id not in engine.unrelated:
                engine.unrelated[model_id], _ = await registry.embed(
                    model_id, extractive.UNRELATED, cancelled, "document"
                )
            return engine.unrelated[model_id]

        asked, found, base = await asyncio.gather(of(questions, "query"), of(texts, "document"), unrelated())
        return np.concatenate([base[:0], *asked, *found]), base

    def embed(questions: Sequence[str], texts: Sequence[str]) -> tuple[Floats, Floats] | None:
        model_id = named or _first_here(registry)
        if model_id is None:
            return None
        try:
            return asyncio.run_coroutine_threadsafe(vectors(model_id, questions, texts), loop).result()
        except (EngineFailed, InvalidRequest, ModelUnavailable, QueueFull, UnknownModel, WrongTask) as error:
            log.info("extractive answers by words alone: %s (%s)", error.message, error.detail)
            return None

    return embed


def _first_here(registry: Registry) -> str | None:
    here = [model.id for model in registry.models() if model.task == "embed" and model.available]
    return next((model_id for model_id in (*DEFAULT_MODELS, *here) if model_id in here), None)
