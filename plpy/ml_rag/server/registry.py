"""The models of a running server, and what can be asked of them.

Everything here runs in the event loop; whatever blocks goes to the model's own thread (``batching.Worker``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ml_rag.abc import CHARACTERS_PER_TOKEN, Cancelled, Task
from ml_rag.errors import EngineFailed, InvalidRequest, MlRagError, UnknownModel, WrongTask
from ml_rag.server.cancellation import Cancellation, ClientGone
from ml_rag.server.catalogue import DEFAULT_CONFIG, Catalogue, ModelEntry
from ml_rag.server.memory import Memory
from ml_rag.server.metrics import Metrics, current_model
from ml_rag.server.models import Lease, Model, Shared
from ml_rag.server.replies import Model as ModelInfo
from ml_rag.server.replies import State

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("ml_rag.server")

InputType = Literal["query", "document"]

#: how often idle models are looked for
IDLE_CHECK_SECONDS = 1.0

_ADD = (
    f"Add it as [models.ID] to the file that the model server reads (--config, ML_RAG_CONFIG, {DEFAULT_CONFIG}), and "
    "restart the server: docs/models.md#models-of-your-own."
)

#: characters whose tokens are counted before other requests for the model come in, which takes about 0.1 s, and what
#: each text counts as beside its own
COUNTED_AT_ONCE, COUNTED_EACH = 256 * 1024, 128


class Registry:
    """The models of the server (``app.state.registry``)."""

    def __init__(self, catalogue: Catalogue, models_dir: Path) -> None:
        self.catalogue = catalogue
        self.models_dir = models_dir
        self.metrics = Metrics()
        self.memory = Memory(catalogue.server.max_memory_bytes, self.unload_unused, self._processes)
        self.metrics.watch_memory(self.memory.tightest)
        #: set when the server shuts down; every request's ``cancelled`` follows it
        self.closing = Cancellation()
        shared = Shared(catalogue.server, models_dir, self.metrics, self.memory)
        self._models = {entry.id: Model(entry, shared) for entry in catalogue}

    def _processes(self) -> list[int]:
        """Of the models that have one of their own."""
        return [pid for model in self._models.values() if (pid := getattr(model.engine, "pid", None)) is not None]

    def models(self) -> list[ModelInfo]:
        """Every model of the catalogue, in its order."""
        return [self._info(model) for model in self._models.values()]

    def info(self, model_id: str) -> ModelInfo:
        """One model. Raises ``UnknownModel``, ``InvalidRequest``."""
        name, asked = cut_of(model_id)
        info = self._info(self._model(name))
        if asked is None:
            return info
        return replace(info, id=model_id, dimensions=_dimensions(self._model(name).entry, info.dimensions, asked))

    def entry(self, model_id: str, task: Task | None = None) -> ModelEntry:
        """The catalogue's entry. Raises ``UnknownModel``, whose hint is one of ``task``."""
        return self._model(model_id, task).entry

    def _info(self, model: Model) -> ModelInfo:
        entry, engine = model.entry, model.engine
        reason = model.why_unavailable()
        return ModelInfo(
            id=entry.id,
            task=entry.task,
            engine=entry.engine,
            dimensions=entry.dimensions if engine is None else getattr(engine, "dimensions", entry.dimensions),
            max_tokens=engine.max_tokens if engine is not None else entry.max_tokens or entry.context_tokens,
            available=reason is None,
            reason=reason,
            pull=model.how_to_pull() if reason else None,
            brief=entry.brief,
        )

    def states(self) -> dict[str, State]:
        """Of every model of the catalogue."""
        return {
            name: "loaded" if model.in_memory else "unavailable" if model.why_unavailable() else "idle"
            for name, model in self._models.items()
        }

    def _available(self, task: Task | None) -> list[str]:
        return [name for name in self.catalogue.ids(task) if not self._models[name].why_unavailable()]

    def _model(self, model_id: str, task: Task | None = None) -> Model:
        model = self._models.get(model_id)
        if model is None:
            near = self.catalogue.nearest(model_id, task)
            there = self._available(task)
            if task == "rerank":
                there.append("hybrid")  # ranks in the database
            raise UnknownModel(
                f"model {model_id[:200]!r} does not exist",
                detail=f"models that are there{f' for the task {task}' if task else ''}: {', '.join(there) or 'none'}",
                hint=f"Did you mean {near!r}?" if near else _ADD,
            )
        return model

    @contextlib.asynccontextmanager
    async def lease(self, model_id: str, task: Task, cancelled: Cancelled) -> AsyncIterator[Lease]:
        """A loaded model for the time of the block; it is not unloaded meanwhile. Of an embedding model, ``ID@N`` has
        its vectors cut to N dimensions.

        Raises ``UnknownModel``, ``WrongTask``, ``ModelUnavailable``, ``InvalidRequest``.
        """
        name, asked = cut_of(model_id) if task == "embed" else (model_id, None)
        model = self._model(name, task)
        if (holder := current_model.get()) is not None:
            holder[0] = model.entry.id
        if model.entry.task != task:
            fitting = self._available(task) or self.catalogue.ids(task)
            raise WrongTask(
                f"model {model_id} cannot {task}",
                detail=f"its task is {model.entry.task}",
                hint=f"Models for the task {task}: {', '.join(fitting)}." if fitting else None,
            )
        model.leases += 1
        try:
            if asked is not None:
                _dimensions(model.entry, model.entry.dimensions, asked)  # before it is loaded
            engine = await model.load()
            dimensions = getattr(engine, "dimensions", None)
            yield Lease(model, engine, cancelled, _dimensions(model.entry, dimensions, asked))
        finally:
            model.leases -= 1
            model.last_used = time.monotonic()

    async def embed(
        self,
        model_id: str,
        texts: Sequence[str],
        cancelled: Cancelled,
        input_type: InputType | None = None,
        *,
        truncate: bool = True,
    ) -> tuple[NDArray[np.float32], int]:
        """Embeddings, shape (len(texts), dimensions), merged with concurrent requests for the model, and the number of
        tokens it read.

        ``input_type``: put the model's ``query_prefix`` or ``document_prefix`` before each text.
        Raises what ``lease`` raises, ``QueueFull``, ``EngineFailed``, ``ClientGone``; without ``truncate``
        ``InvalidRequest`` for a text beyond the model's limit, where its tokenizer is here.
        """
        async with self.lease(model_id, "embed", cancelled) as lease:
            prefix = getattr(lease.entry, f"{input_type}_prefix") if input_type else ""
            if prefix:
                texts = [prefix + text for text in texts]
            if not truncate and not lease.entry.kind.is_remote:
                _check_lengths(await _count(lease, texts), lease.engine.max_tokens)
            vectors, tokens = await lease.batcher.embed(texts, cancelled)
            self.metrics.tokens(lease.entry.id, tokens_in=tokens)
            return _cut(vectors, lease.dimensions), tokens

    async def count_truncated(
        self, model_id: str, texts: Sequence[str], cancelled: Cancelled, input_type: InputType | None = None
    ) -> int | None:
        """How many of the texts are beyond the model's limit, so that ``embed`` cuts them; None where its tokenizer is
        elsewhere. Raises what ``lease`` raises, ``QueueFull``."""
        async with self.lease(model_id, "embed", cancelled) as lease:
            if lease.entry.kind.is_remote:
                return None
            prefix = getattr(lease.entry, f"{input_type}_prefix") if input_type else ""
            most: int = lease.engine.max_tokens
            counts = await _count(lease, [prefix + text for text in texts])
            return sum(tokens is None or tokens > most for tokens in counts)

    async def count_tokens(self, model_id: str, texts: Sequence[str], cancelled: Cancelled) -> list[int | None] | None:
        """Tokens of each text as the embedding model reads it; None for one far beyond its limit, and in place of all
        where its tokenizer is elsewhere. Raises what ``lease`` raises, ``QueueFull``, ``ClientGone``."""
        async with self.lease(model_id, "embed", cancelled) as lease:
            return None if lease.entry.kind.is_remote else await _count(lease, texts)

    async def rerank(
        self, model_id: str, query: str, texts: Sequence[str], cancelled: Cancelled, *, chunk: int
    ) -> NDArray[np.float32]:
        """Relevance 0-1 of each text, shape (len(texts),); other requests may come in after each ``chunk`` of texts.

        Raises what ``lease`` raises, ``QueueFull``, ``EngineFailed``, ``ClientGone``.
        """
        scores = np.zeros(len(texts), np.float32)
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        async with self.lease(model_id, "rerank", cancelled) as lease:
            for start in range(0, len(order), chunk):
                indexes = order[start : start + chunk]
                part = [texts[index] for index in indexes]
                scored = await lease.run(lease.engine.rerank, query, part, cancelled)
                if cancelled():
                    raise ClientGone
                if scored.shape != (len(part),) or not np.isfinite(scored).all():
                    raise EngineFailed("the reranking model did not return one score per text")
                scores[indexes] = scored
        return scores

    async def preload(self) -> None:
        """Load the models that the configuration names under ``preload``; one that cannot be loaded is logged."""
        for model_id in self.catalogue.server.preload:
            try:
                await self._model(model_id).load()
            except MlRagError as error:
                log.warning("preload: %s (%s)", error.message, error.detail)

    async def unload_idle_forever(self) -> None:
        """Unload what has not been used for its ``idle_unload_seconds``; ends by cancellation."""
        while True:
            await asyncio.sleep(IDLE_CHECK_SECONDS)
            for model in self._models.values():
                if model.is_idle:
                    model.unload()

    def unload_unused(self) -> int:
        """Unload every model that is not in use, however short a time ago it was used; how many those are."""
        unused = [model for model in self._models.values() if model.is_unused]
        for model in unused:
            model.unload()
        return len(unused)

    def close(self) -> None:
        """Cancel what runs and what waits, free the engines."""
        self.closing.set()
        for model in self._models.values():
            model.unload()
            model.worker.shutdown()


def cut_of(model_id: str) -> tuple[str, str | None]:
    """``ID@N``: a model and the dimensions that its vectors are cut to. No id has an ``@`` itself."""
    name, at, asked = model_id.rpartition("@")
    return (name, asked) if at else (model_id, None)


def _dimensions(entry: ModelEntry, full: int | None, asked: str | None) -> int | None:
    """The dimensions of vectors cut as asked; ``full``: those of the model, None = not known yet.

    Raises ``InvalidRequest``.
    """
    if asked is None or full is None:
        return full
    least = entry.min_dimensions or full
    found = int(asked) if len(asked) <= 5 and asked.isascii() and asked.isdecimal() and asked[0] != "0" else 0
    if least <= found <= full:
        return found
    if entry.min_dimensions is None:
        raise InvalidRequest(
            f"the vectors of model {entry.id} cannot be cut to {asked[:20]} dimensions",
            detail=f"They have {full}; the model was not trained for fewer (Matryoshka).",
            hint='Leave out "dimensions". ml-rag models list shows a range for the models that it is for.',
        )
    raise InvalidRequest(
        f"the vectors of model {entry.id} cannot be cut to {asked[:20]} dimensions",
        detail=f"They can have {least} to {full}.",
    )


def _cut(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first components of the vectors, which then get the length 1 again."""
    if dimensions is None or dimensions >= vectors.shape[1]:
        return vectors
    vectors = vectors[:, :dimensions]
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    lengths[lengths == 0] = 1
    cut: NDArray[np.float32] = vectors / lengths
    return cut


async def _count(lease: Lease, texts: Sequence[str]) -> list[int | None]:
    """How many tokens each text has; None: more than any text of its length is split into to be counted. Other
    requests may come in meanwhile. Raises ``QueueFull``, ``ClientGone``."""
    longest = CHARACTERS_PER_TOKEN * lease.engine.max_tokens
    counts: list[int | None] = []
    portion: list[str] = []
    room = COUNTED_AT_ONCE
    for text in texts:
        portion.append(text)
        room -= COUNTED_EACH + (len(text) if len(text) <= longest else 0)
        if room <= 0 or len(counts) + len(portion) == len(texts):
            counts += await lease.run(_count_all, lease.engine, portion, longest)
            if lease.cancelled():
                raise ClientGone
            portion, room = [], COUNTED_AT_ONCE
    return counts


def _count_all(engine: Any, texts: Sequence[str], longest: int) -> list[int | None]:
    tokenizer = engine.tokenizer()

    def count(text: str) -> int:
        return len(text.split()) if tokenizer is None else len(tokenizer.encode(text).ids)

    return [None if len(text) > longest else count(text) for text in texts]


def _check_lengths(counts: Sequence[int | None], most: int) -> None:
    """Raises ``InvalidRequest`` for the first text that the model would cut."""
    for place, tokens in enumerate(counts, start=1):
        if tokens is None or tokens > most:
            count = "more" if tokens is None else str(tokens)
            raise InvalidRequest(
                "the text is longer than the model takes in",
                detail=f"Text {place} has {count} tokens; the model takes in {most}.",
                hint='Split it, or leave out "truncate": it is cut then.',
            )
