"""One queue and one thread for each model, and micro-batching of embeddings on top of it.

A lone request is never held back to wait for company: whatever is waiting when the thread becomes free goes into one
batch. A big request is cut into chunks. They run beside the small requests, at a lower priority, where the engine can
run both at once (``bulk``); else between two chunks the small ones get their turn, so that a query waits for one chunk
of a bulk load at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from ml_rag.abc import Cancelled, EmbedEngine
from ml_rag.errors import EngineFailed, MlRagError
from ml_rag.server.admission import Admission
from ml_rag.server.cancellation import Cancellation, ClientGone
from ml_rag.server.unexpected import unexpected

if TYPE_CHECKING:
    from numpy.typing import NDArray

P = ParamSpec("P")
T = TypeVar("T")

#: most texts of small requests in one batch
BATCH_TEXTS = 32
#: a request with more texts, or more characters, than this is a bulk request
SMALL_TEXTS = 4
SMALL_CHARACTERS = 8000
#: what of a bulk request goes through at once, so the longest a query is held up: about 8 runs of 256 tokens, which is
#: also the size at which onnxruntime is fastest on 2 cores. An engine can have its own
CHUNK_TEXTS = 64
CHUNK_CHARACTERS = 8000
#: the same after a query: others are likely to follow. It doubles with every chunk that no query came before. Not for
#: models elsewhere, where each chunk is a request
FIRST_CHUNK_CHARACTERS = 2000


class Worker:
    """The single thread of one model, and its bounded queue."""

    def __init__(self, model_id: str, max_queue: int, max_wait_seconds: float = 0) -> None:
        self.model_id = model_id
        self.admission = Admission(model_id, max_queue, max_wait_seconds)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"model-{model_id}")

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` in the thread, after what was submitted before it. Takes no place in the queue."""
        call: Callable[[], T] = functools.partial(fn, *args, **kwargs)
        return self._executor.submit(_without_panics, call)

    async def run(self, cancelled: Cancelled, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function in the thread. Raises ``QueueFull``; ``ClientGone`` if cancelled while waiting."""
        with self.admission.place():
            call: Callable[[], T] = functools.partial(fn, *args, **kwargs)
            future = self.submit(self._counted, cancelled, call)
            with cancelling(cancelled, future):
                try:
                    return await asyncio.wrap_future(future)
                except asyncio.CancelledError:
                    if cancelled():
                        raise ClientGone from None
                    raise

    def _counted(self, cancelled: Cancelled, fn: Callable[[], T]) -> T:
        if cancelled():
            raise ClientGone
        with self.running(1):
            return fn()

    @contextlib.contextmanager
    def running(self, requests: int) -> Iterator[None]:
        """Around work in the thread, on so many of the admitted requests."""
        began = time.monotonic()
        self.admission.works(requests)
        try:
            yield
        finally:
            self.admission.worked(requests, time.monotonic() - began)

    async def stream(
        self, cancelled: Cancelled, fn: Callable[P, Iterator[T]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[T]:
        """The items of a blocking generator that runs in the thread; closing the iterator stops the generator."""
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        stop = threading.Event()

        def tell(kind: str, value: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server is going down
                loop.call_soon_threadsafe(items.put_nowait, (kind, value))

        def work() -> None:
            try:
                iterator = fn(*args, **kwargs)
                try:
                    for item in iterator:
                        if stop.is_set() or cancelled():
                            raise ClientGone
                        tell("item", item)
                finally:
                    close = getattr(iterator, "close", None)
                    if close is not None:
                        close()
                # an engine that saw `cancelled` ends early and quietly: that is not a complete answer
                tell("end", ClientGone() if stop.is_set() or cancelled() else None)
            except BaseException as error:  # noqa: BLE001 - it is raised again on the other side
                tell("end", _no_panic(error))

        with contextlib.ExitStack() as place:
            place.enter_context(self.admission.place())

            def ended(done: Future[None]) -> None:
                if done.cancelled():
                    tell("end", ClientGone())
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(place.close)  # a client that reads slowly holds up no other

            future = self.submit(self._counted, cancelled, work)
            future.add_done_callback(ended)
            try:
                with cancelling(cancelled, future):
                    while True:
                        kind, value = await items.get()
                        if kind == "item":
                            yield value
                        elif value is None:
                            return
                        else:
                            raise value
            finally:
                stop.set()
                future.cancel()

    def shutdown(self) -> None:
        """Take no more. Submitted work continues to its end in the thread, as does the closing of its engine."""
        self._executor.shutdown(wait=False)


def _without_panics(call: Callable[[], T]) -> T:
    """What ``call`` returns. A panic of a library in Rust, which is not an ``Exception``, comes out as RuntimeError."""
    try:
        return call()
    except Exception:
        raise
    except BaseException as error:
        raise _no_panic(error) from error


def _no_panic(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def cancelling(cancelled: Cancelled, future: Future[Any]) -> Iterator[None]:
    """Take ``future`` out of the queue as soon as its client goes away."""
    if isinstance(cancelled, Cancellation):
        with cancelled.on_set(future.cancel):
            yield
    else:
        yield


#: vectors and number of tokens, or why there are none
_Result = tuple["NDArray[np.float32]", int] | BaseException


@dataclass(eq=False)
class _Request:
    texts: Sequence[str]
    cancelled: Cancelled
    done: asyncio.Future[tuple[NDArray[np.float32], int]]
    #: indexes of ``texts``, longest first, so that a chunk holds texts of like length
    order: list[int] = field(default_factory=list)
    next: int = 0
    out: NDArray[np.float32] | None = None
    tokens: int = 0


#: a request, and the indexes of those of its texts that are in a batch
_Part = tuple[_Request, list[int]]


class _Lane:
    """A thread and an engine; one batch at a time."""

    def __init__(self, worker: Worker, engine: EmbedEngine) -> None:
        self.worker = worker
        self.engine = engine
        self.is_busy = False


class EmbedBatcher:
    """Merges concurrent requests for one loaded embedding engine. Its methods run in the event loop."""

    def __init__(
        self,
        worker: Worker,
        engine: EmbedEngine,
        observe: Callable[[int], None] = lambda texts: None,
        *,
        chunk_texts: int = CHUNK_TEXTS,
        chunk_characters: int = CHUNK_CHARACTERS,
        first_chunk_characters: int = FIRST_CHUNK_CHARACTERS,
    ) -> None:
        self._worker = worker
        self._lane = _Lane(worker, engine)
        bulk: EmbedEngine | None = getattr(engine, "bulk", None)
        #: where bulk requests have a lane of their own
        self._bulk_lane = (
            _Lane(Worker(f"{worker.model_id}-bulk", worker.admission.max_queue), bulk) if bulk is not None else None
        )
        self._observe = observe
        self._chunk_texts = chunk_texts
        self._small: deque[_Request] = deque()
        self._bulk: deque[_Request] = deque()
        self._bulk_turn = False
        self._first_chunk_characters = first_chunk_characters if bulk is None else chunk_characters
        self._most_chunk_characters = self._chunk_characters = chunk_characters

    def close(self) -> None:
        """End the thread that is not the model's own. Running work continues to its end."""
        if self._bulk_lane is not None:
            self._bulk_lane.worker.shutdown()

    async def embed(self, texts: Sequence[str], cancelled: Cancelled) -> tuple[NDArray[np.float32], int]:
        """Embeddings, shape (len(texts), dimensions), and the number of tokens read.

        Raises ``QueueFull``, ``EngineFailed``, ``ClientGone``.
        """
        dimensions = self._lane.engine.dimensions
        if not texts:
            return np.empty((0, dimensions), np.float32), 0
        request = _Request(texts, cancelled, asyncio.get_running_loop().create_future())
        small = len(texts) <= SMALL_TEXTS and sum(map(len, texts)) <= SMALL_CHARACTERS
        request.order = list(range(len(texts)))
        if not small:
            request.order.sort(key=lambda index: -len(texts[index]))
        request.out = np.empty((len(texts), dimensions), np.float32)
        with self._worker.admission.place():
            if small:
                self._small.append(request)
                self._chunk_characters = self._first_chunk_characters
            else:
                self._bulk.append(request)
            self._pump()
            try:
                return await request.done
            finally:
                request.done.cancel()  # no-op when it is done; otherwise the next pump drops the request

    def _pump(self) -> None:
        """Give each thread that is free its next batch."""
        self._drop_cancelled(self._small)
        self._drop_cancelled(self._bulk)
        if self._bulk_lane is not None:
            if self._small and not self._lane.is_busy:
                self._start(self._lane, self._next_small())
            if self._bulk and not self._bulk_lane.is_busy:
                self._start(self._bulk_lane, self._next_chunk())
        elif not self._lane.is_busy:
            is_bulk = bool(self._bulk) and (self._bulk_turn or not self._small)
            if is_bulk:
                self._start(self._lane, self._next_chunk())
            elif self._small:
                self._start(self._lane, self._next_small())
            self._bulk_turn = not is_bulk

    def _next_small(self) -> list[_Part]:
        parts: list[_Part] = []
        total = 0
        while self._small and total < BATCH_TEXTS:
            request = self._small.popleft()
            parts.append((request, request.order))
            total += len(request.order)
        return parts

    def _next_chunk(self) -> list[_Part]:
        request = self._bulk.popleft()
        return [(request, self._chunk(request))]

    def _start(self, lane: _Lane, parts: list[_Part]) -> None:
        lane.is_busy = True
        texts = [request.texts[index] for request, indexes in parts for index in indexes]
        loop = asyncio.get_running_loop()
        future = lane.worker.submit(self._compute, lane.engine, parts, texts)

        def finished(done: Future[list[_Result]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server is going down
                loop.call_soon_threadsafe(self._deliver, lane, parts, done)

        future.add_done_callback(finished)

    def _chunk(self, request: _Request) -> list[int]:
        """The next texts of a bulk request, at least one."""
        indexes: list[int] = []
        characters = 0
        for index in request.order[request.next : request.next + self._chunk_texts]:
            characters += len(request.texts[index])
            if indexes and characters > self._chunk_characters:
                break
            indexes.append(index)
        self._chunk_characters = min(2 * self._chunk_characters, self._most_chunk_characters)
        return indexes

    @staticmethod
    def _drop_cancelled(requests: deque[_Request]) -> None:
        for request in [request for request in requests if request.done.done() or request.cancelled()]:
            requests.remove(request)
            if not request.done.done():
                request.done.set_exception(ClientGone())

    def _compute(self, engine: EmbedEngine, parts: list[_Part], texts: list[str]) -> list[_Result]:
        """In the thread: a result, or error, for each part. A batch that fails is taken apart, to fail whom it must."""
        with self._worker.running(len(parts)):
            self._observe(len(texts))
            try:
                vectors, counts = self._checked(engine, texts, lambda: all(part[0].cancelled() for part in parts))
            except Exception as error:  # noqa: BLE001 - delivered to each request below
                if len(parts) == 1:
                    return [error]
                counts = None
        if counts is None:
            results: list[_Result] = []
            for request, indexes in parts:
                results.extend(self._compute(engine, [(request, indexes)], [request.texts[index] for index in indexes]))
            return results
        computed: list[_Result] = []
        start = 0
        for _, indexes in parts:
            end = start + len(indexes)
            computed.append((vectors[start:end], sum(counts[start:end])))
            start = end
        return computed

    @staticmethod
    def _checked(
        engine: EmbedEngine, texts: list[str], cancelled: Cancelled
    ) -> tuple[NDArray[np.float32], Sequence[int]]:
        try:
            vectors = engine.embed(texts, cancelled)
        except (MlRagError, ClientGone):
            raise
        except BaseException as error:  # also of a tokenizer in Rust that gives up
            raise unexpected(error, "the embedding model failed") from error
        if cancelled():
            raise ClientGone
        expected = (len(texts), engine.dimensions)
        if vectors.shape != expected:
            raise EngineFailed(
                "the embedding model answered with vectors of the wrong shape",
                detail=f"expected {expected[0]} x {expected[1]}, got {' x '.join(map(str, vectors.shape))}",
            )
        if not np.isfinite(vectors).all():
            raise EngineFailed("the embedding model answered with numbers that are not finite")
        # the counts of the call just made: this thread is the only one that calls the engine
        counts = getattr(engine, "last_token_counts", None)
        return vectors, counts if counts is not None else [len(text.split()) for text in texts]

    def _deliver(self, lane: _Lane, parts: list[_Part], done: Future[list[_Result]]) -> None:
        """In the event loop: hand out the results, put an unfinished bulk request back, and continue."""
        lane.is_busy = False
        results: list[_Result]
        if done.cancelled():
            results = [ClientGone() for _ in parts]
        elif (error := done.exception()) is not None:
            results = [unexpected(error, "the embedding model failed") for _ in parts]
        else:
            results = done.result()
        for (request, indexes), result in zip(parts, results, strict=True):
            if request.done.done():
                continue
            if isinstance(result, BaseException):
                request.done.set_exception(result)
                continue
            assert request.out is not None
            vectors, tokens = result
            request.out[indexes] = vectors
            request.tokens += tokens
            request.next += len(indexes)
            if request.next < len(request.texts):
                self._bulk.append(request)
            else:
                request.done.set_result((request.out, request.tokens))
        self._pump()
