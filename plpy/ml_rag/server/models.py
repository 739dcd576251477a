"""One model of a running server: loaded on demand, kept while used, unloaded when idle; leased to requests.

Everything here runs in the event loop; whatever blocks goes to the model's own thread (``batching.Worker``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ml_rag.abc import Cancelled, Delta, Engine
from ml_rag.errors import MlRagError, ModelUnavailable
from ml_rag.server.batching import CHUNK_CHARACTERS, EmbedBatcher, Worker
from ml_rag.server.catalogue import ModelEntry, ServerConfig
from ml_rag.server.engines import load_engine
from ml_rag.server.memory import Memory
from ml_rag.server.metrics import Metrics
from ml_rag.server.pins import check_pins
from ml_rag.shortage import shortage

log = logging.getLogger("ml_rag.server")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shared:
    """What all models of a server have together."""

    config: ServerConfig
    models_dir: Path
    metrics: Metrics
    memory: Memory


class Lease:
    """A loaded model for the time of one request. Comes from ``Registry.lease``."""

    def __init__(self, model: Model, engine: Any, cancelled: Cancelled, dimensions: int | None = None) -> None:
        self._model = model
        #: of its vectors, which may be fewer than the engine's (embed)
        self.dimensions = dimensions
        #: the task's kind of engine; call it through ``run`` and ``stream`` only
        self.engine = engine
        #: true once the client is gone or the server shuts down; hand this one to the engine
        self.cancelled = cancelled

    @property
    def entry(self) -> ModelEntry:
        return self._model.entry

    @property
    def batcher(self) -> EmbedBatcher:
        """What the vectors of a loaded embedding model come from."""
        assert self._model.batcher is not None
        return self._model.batcher

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function in the model's thread. Raises ``QueueFull``, ``ClientGone``."""
        return await self._model.worker.run(self.cancelled, fn, *args, **kwargs)

    def stream(self, fn: Callable[P, Iterator[T]], *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        """The items of a blocking generator that runs in the model's thread.

        Close it (``contextlib.aclosing``) or leave the lease to stop the generator at its next item. The first
        ``anext`` raises ``QueueFull``; ``ClientGone`` where ``cancelled`` turned true before the end.
        """
        return self._model.worker.stream(self.cancelled, self._count_tokens, functools.partial(fn, *args, **kwargs))

    def _count_tokens(self, iterate: Callable[[], Iterator[T]]) -> Iterator[T]:
        items = iterate()
        try:
            for item in items:
                if isinstance(item, Delta) and item.finish_reason is not None:
                    self._model.shared.metrics.tokens(
                        self._model.entry.id,
                        tokens_in=item.prompt_tokens or 0,
                        tokens_out=item.completion_tokens or 0,
                    )
                yield item
        finally:
            if isinstance(items, Generator):
                items.close()


class Model:
    """The state of one model of the catalogue."""

    def __init__(self, entry: ModelEntry, shared: Shared) -> None:
        self.entry = entry
        self.shared = shared
        server = shared.config
        max_queue = entry.max_queue if entry.max_queue is not None else server.max_queue
        self.worker = Worker(entry.id, max_queue, server.max_wait_seconds)
        idle = entry.idle_unload_seconds
        self.idle_seconds = server.idle_unload_seconds if idle is None else idle
        self.engine: Engine | None = None
        self.batcher: EmbedBatcher | None = None
        self.leases = 0
        self.last_used = time.monotonic()
        self._loading: asyncio.Task[Engine] | None = None
        #: why the last load failed, and the state of the files it failed with
        self._broken: tuple[str, object] | None = None
        admission = self.worker.admission
        shared.metrics.watch_model(
            entry.id, lambda: admission.waiting, lambda: admission.running, lambda: self.in_memory
        )

    def why_unavailable(self) -> str | None:
        """Why it cannot be loaded as far as one knows: files missing, or the same ones as when it last failed."""
        if self.engine is not None:
            return None
        if self._broken is not None and self._broken[1] == self._files():
            return self._broken[0]
        return self.entry.missing(self.shared.models_dir)

    def _file_bytes(self) -> int:
        """What its files have together: about what it takes in memory, at least."""
        if not self.entry.kind.has_files:
            return 0
        found = 0
        for path in self.entry.file_paths(self.shared.models_dir):
            with contextlib.suppress(OSError):
                found += path.stat().st_size
        return found

    def _files(self) -> object:
        """What changes when the files do."""
        if not self.entry.kind.has_files:
            return None
        states = []
        for path in (self.entry.location(self.shared.models_dir), *self.entry.file_paths(self.shared.models_dir)):
            with contextlib.suppress(OSError):
                status = path.stat()
                states.append((str(path), status.st_size, status.st_mtime_ns, status.st_ino))
        return states

    async def load(self) -> Engine:
        """The engine; callers that come while it is being loaded wait for that one load."""
        if self.engine is not None:
            return self.engine
        # a load that is done was abandoned by all that waited for it: its engine may be closed by now, its error be old
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load())
        return await asyncio.shield(self._loading)

    async def _load(self) -> Engine:
        models_dir = self.shared.models_dir
        began = time.perf_counter()
        self._broken = None
        try:
            if reason := self.entry.missing(models_dir):
                raise ModelUnavailable(
                    f"model {self.entry.id} is not available", detail=reason, hint=self._how_to_get()
                )
            self.shared.memory.admit_model(self.entry.id, self._file_bytes())
            engine = await asyncio.wrap_future(self.worker.submit(_load_in_thread, self.entry, models_dir))
        except ModelUnavailable as error:
            self._remember(error.detail or error.message)
            raise ModelUnavailable(
                error.message, detail=error.detail, hint=error.hint or self._how_to_mend()
            ) from error
        except MlRagError:
            raise
        except Exception as error:
            if (known := shortage(error)) is not None:
                log.error("loading model %s failed: %s (%s)", self.entry.id, known.message, known.detail)
                raise known from error
            log.exception("loading model %s failed", self.entry.id)
            reason = f"{type(error).__name__}: {error}"
            self._remember(reason)
            raise ModelUnavailable(
                f"model {self.entry.id} cannot be loaded",
                detail=reason,
                hint=f"See the model server's log. {self._how_to_mend()}",
            ) from error
        self.engine = engine
        if self.entry.task == "embed":
            observe = self.shared.metrics.batch_texts.labels(self.entry.id).observe
            own = {name: getattr(engine, name, None) for name in ("chunk_texts", "chunk_characters")}
            options: dict[str, int] = {name: value for name, value in own.items() if value is not None}
            if self.entry.kind.is_remote:
                options["first_chunk_characters"] = CHUNK_CHARACTERS
            self.batcher = EmbedBatcher(self.worker, engine, observe, **options)  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
        self.shared.metrics.load_seconds.labels(self.entry.id).observe(seconds)
        log.info("loaded model %s in %.2f s", self.entry.id, seconds)
        return engine

    def _remember(self, reason: str) -> None:
        if self.entry.kind.has_files:
            self._broken = (reason, self._files())

    def how_to_pull(self) -> str | None:
        """The command for its files; files that are there are got again by force only."""
        return self.entry.pull_into(self.shared.models_dir)

    def _how_to_mend(self) -> str:
        if command := self.how_to_pull():
            return f"Its files may be damaged; get them again with: {command}"
        return "Look at its entry in the model server's catalogue, and at its files, which may be damaged."

    def _how_to_get(self) -> str:
        if command := self.how_to_pull():
            return f"Get it with: {command}"
        return "Put it where the model server's catalogue says it is, or correct the catalogue."

    def unload(self) -> None:
        """Free the engine, in its thread."""
        engine, self.engine = self.engine, None
        batcher, self.batcher = self.batcher, None
        if batcher is not None:
            batcher.close()
        if engine is not None:
            self.worker.submit(_close, engine, self.entry.id)

    @property
    def in_memory(self) -> bool:
        """Whether it is loaded; one whose process has ended is again as soon as it is asked."""
        return self.engine is not None and getattr(self.engine, "pid", 0) is not None

    @property
    def is_unused(self) -> bool:
        """Whether it is loaded, and no request uses it or waits for it."""
        return self.engine is not None and self.leases == 0 and self.worker.admission.waiting == 0

    @property
    def is_idle(self) -> bool:
        return self.is_unused and 0 < self.idle_seconds <= time.monotonic() - self.last_used


def _load_in_thread(entry: ModelEntry, models_dir: Path) -> Engine:
    check_pins(entry, models_dir)
    return load_engine(entry, models_dir)


def _close(engine: Engine, model_id: str) -> None:
    try:
        engine.close()
    except Exception:
        log.exception("unloading model %s failed", model_id)
    else:
        log.info("unloaded model %s", model_id)
