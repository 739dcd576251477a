from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ml_rag.errors import EngineFailed, InvalidRequest, MlRagError, QueueFull
from ml_rag.server.batching import BATCH_TEXTS, EmbedBatcher, Worker
from ml_rag.server.cancellation import Cancellation, ClientGone
from ml_rag.server.catalogue import load_catalogue
from ml_rag.server.engines.fake import FakeEmbed
from ml_rag.server.registry import Registry
from support.remote_endpoint import RemoteEndpoint, replies


class Panic(BaseException):
    """As a library in Rust raises it."""


class Engine:
    """Vectors that tell a text's length; records each batch; waits for ``gate`` where one is given."""

    max_tokens = 100
    dimensions = 2

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.batches: list[list[str]] = []
        self.gate = gate

    def embed(self, texts: Sequence[str], cancelled) -> np.ndarray:
        self.batches.append(list(texts))
        if self.gate is not None:
            assert self.gate.wait(10)
        if any(text == "poison" for text in texts):
            raise RuntimeError("no")
        if any(text == "panic" for text in texts):
            raise Panic("no")
        return np.array([[len(text), 1] for text in texts], np.float32)

    def tokenizer(self) -> None:
        return None

    def close(self) -> None:
        pass


def never() -> bool:
    return False


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_lone_request_is_not_held_back() -> None:
    engine = Engine()
    vectors, tokens = await EmbedBatcher(Worker("m", 8), engine).embed(["ab c"], never)
    assert vectors.tolist() == [[4, 1]]
    assert tokens == 2
    assert engine.batches == [["ab c"]]


async def test_what_waits_is_merged_into_one_batch_and_given_back_in_order() -> None:
    gate = threading.Event()
    engine = Engine(gate)
    batcher = EmbedBatcher(Worker("m", 100), engine)
    first = asyncio.create_task(batcher.embed(["x"], never))
    await until(lambda: engine.batches)
    rest = [asyncio.create_task(batcher.embed(["y" * n, "z"], never)) for n in range(1, 20)]
    await asyncio.sleep(0)
    gate.set()
    await first
    for n, task in enumerate(rest, start=1):
        assert (await task)[0].tolist() == [[n, 1], [1, 1]]
    assert len(engine.batches) == 3  # 1, then 16 requests of 2 texts, then the last 3
    assert len(engine.batches[1]) == BATCH_TEXTS


async def test_a_query_waits_for_one_chunk_of_a_bulk_request_at_most() -> None:
    gate = threading.Event()
    engine = Engine(gate)
    batcher = EmbedBatcher(Worker("m", 100), engine, chunk_texts=4)
    bulk = asyncio.create_task(batcher.embed([f"bulk {n}" for n in range(40)], never))
    await until(lambda: engine.batches)
    query = asyncio.create_task(batcher.embed(["query"], never))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(bulk, query)
    assert engine.batches[1] == ["query"]
    assert bulk.result()[0].shape == (40, 2)
    assert max(map(len, engine.batches)) == 4


async def test_an_engine_can_take_more_of_a_bulk_request_at_once() -> None:
    engine = Engine()
    batcher = EmbedBatcher(Worker("m", 100), engine, chunk_texts=100, chunk_characters=32_000)
    await batcher.embed(["x" * 8000] * 10, never)
    assert [len(batch) for batch in engine.batches] == [4, 4, 2]


async def test_queries_do_not_wait_for_a_bulk_request_where_the_engine_runs_both_at_once() -> None:
    gate = threading.Event()
    engine = Engine()
    engine.bulk = Engine(gate)
    batcher = EmbedBatcher(Worker("m", 100), engine, chunk_texts=4)
    bulk = asyncio.create_task(batcher.embed([f"bulk {n}" for n in range(10)], never))
    await until(lambda: engine.bulk.batches)
    vectors, _ = await batcher.embed(["query"], never)  # the chunk is held by the gate
    assert vectors.tolist() == [[5, 1]]
    assert engine.batches == [["query"]]
    gate.set()
    assert (await bulk)[0].shape == (10, 2)
    assert [len(batch) for batch in engine.bulk.batches] == [4, 4, 2]
    assert engine.batches == [["query"]]
    batcher.close()


async def test_a_bulk_lane_is_given_the_error_of_its_own_batch_only() -> None:
    engine = Engine()
    engine.bulk = Engine()
    engine.bulk.dimensions = 3
    batcher = EmbedBatcher(Worker("m", 100), engine)
    bulk = asyncio.create_task(batcher.embed(["x"] * 10, never))
    assert (await batcher.embed(["query"], never))[0].tolist() == [[5, 1]]
    with pytest.raises(MlRagError, match="wrong shape"):
        await bulk
    batcher.close()


async def test_after_a_query_bulk_chunks_are_short_and_grow_again() -> None:
    """Where one query came others follow: on a busy machine they would wait long for a whole chunk."""
    gate = threading.Event()
    engine = Engine(gate)
    batcher = EmbedBatcher(Worker("m", 100), engine)
    bulk = asyncio.create_task(batcher.embed(["x" * 1000] * 40, never))
    await until(lambda: engine.batches)
    query = asyncio.create_task(batcher.embed(["query"], never))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(bulk, query)
    assert engine.batches[1] == ["query"]
    assert [len(batch) for batch in engine.batches if batch != ["query"]] == [8, 2, 4, 8, 8, 8, 2]


async def test_while_queries_come_every_bulk_chunk_is_short() -> None:
    engine = Engine()
    batcher = EmbedBatcher(Worker("m", 100), engine)
    compute = engine.embed
    loop = asyncio.get_running_loop()
    queries: list[asyncio.Task] = []

    def ask() -> None:
        queries.append(asyncio.create_task(batcher.embed(["query"], never)))

    def embed(texts: Sequence[str], cancelled) -> np.ndarray:
        if texts[0] != "query":  # one comes during every chunk, before its end is known
            asked = threading.Event()
            loop.call_soon_threadsafe(lambda: (ask(), loop.call_soon(asked.set)))
            assert asked.wait(10)
        return compute(texts, cancelled)

    engine.embed = embed  # type: ignore[method-assign]
    await batcher.embed(["x" * 1000] * 20, never)
    await asyncio.gather(*queries)
    chunks = [batch for batch in engine.batches if batch != ["query"]]
    assert [len(chunk) for chunk in chunks] == [8, 2, 2, 2, 2, 2, 2]
    assert engine.batches[1::2] == [["query"]] * len(queries)  # each waited for one chunk only


async def test_a_model_elsewhere_gets_no_more_requests_for_a_query_in_between(
    remote: RemoteEndpoint, tmp_path: Path
) -> None:
    gate = threading.Event()

    def embed(handler) -> None:
        assert gate.wait(10)
        rows = [{"index": n, "embedding": [1.0, 0.0]} for n in range(len(remote.requests[-1]["input"]))]
        replies(200, {"data": rows})(handler)

    remote.replies = [embed]
    config = tmp_path / "c.toml"
    model = f'[models.far]\ntask = "embed"\nengine = "openai"\nbase_url = "{remote.url}"\ndimensions = 2\n'
    config.write_text(model)
    registry = Registry(load_catalogue(config), tmp_path)

    try:
        bulk = asyncio.create_task(registry.embed("far", ["x" * 1000] * 24, never))
        await until(lambda: remote.requests)
        query = asyncio.create_task(registry.embed("far", ["query"], never))
        await until(lambda: registry._model("far").worker.admission.waiting)
        gate.set()
        await asyncio.gather(bulk, query)
    finally:
        registry.close()
    assert [len(request["input"]) for request in remote.requests] == [8, 1, 8, 8]


async def test_a_bulk_request_is_not_starved_by_queries() -> None:
    engine = Engine()
    batcher = EmbedBatcher(Worker("m", 100), engine, chunk_texts=1)
    bulk = asyncio.create_task(batcher.embed(["bulk"] * 8, never))
    stop = False

    async def ask() -> None:
        while not stop:
            await batcher.embed(["q"], never)

    askers = [asyncio.create_task(ask()) for _ in range(3)]
    async with asyncio.timeout(10):
        await bulk
    stop = True
    await asyncio.gather(*askers)


async def test_bulk_results_keep_their_order_through_sorting_by_length() -> None:
    texts = ["x" * (n * 7 % 50) for n in range(50)]
    vectors, _ = await EmbedBatcher(Worker("m", 8), Engine(), chunk_texts=7).embed(texts, never)
    assert vectors[:, 0].tolist() == [len(text) for text in texts]


@pytest.mark.parametrize(("text", "kind"), [("poison", "RuntimeError"), ("panic", "Panic")])
async def test_one_bad_request_does_not_fail_its_neighbours(text: str, kind: str) -> None:
    gate = threading.Event()
    engine = Engine(gate)
    batcher = EmbedBatcher(Worker("m", 100), engine)
    first = asyncio.create_task(batcher.embed(["x"], never))
    await until(lambda: engine.batches)
    good = asyncio.create_task(batcher.embed(["good"], never))
    bad = asyncio.create_task(batcher.embed([text], never))
    await asyncio.sleep(0)
    gate.set()
    await first
    assert (await good)[0].tolist() == [[4, 1]]
    with pytest.raises(EngineFailed) as caught:
        await bad
    assert caught.value.detail == kind


async def test_what_fails_a_whole_batch_is_told_to_each_request() -> None:
    def fail(texts: int) -> None:
        raise Panic("no")

    batcher = EmbedBatcher(Worker("m", 100), Engine(), fail)
    for texts in (["a"], ["a"] * 50):
        async with asyncio.timeout(10):
            with pytest.raises(EngineFailed):
                await batcher.embed(texts, never)


async def test_what_a_library_in_rust_raises_is_an_error_of_its_call() -> None:
    def fail() -> None:
        raise Panic("no")

    def begin() -> Iterator[int]:
        yield 1
        fail()

    worker = Worker("m", 2)
    with pytest.raises(RuntimeError, match="Panic: no"):
        await worker.run(never, fail)
    with pytest.raises(RuntimeError, match="Panic: no"):
        assert [item async for item in worker.stream(never, begin)] == []


async def test_a_cancelled_bulk_request_stops_between_chunks() -> None:
    gate = threading.Event()
    engine = Engine(gate)
    batcher = EmbedBatcher(Worker("m", 100), engine, chunk_texts=1)
    cancelled = Cancellation()
    bulk = asyncio.create_task(batcher.embed(["bulk"] * 50, cancelled))
    await until(lambda: engine.batches)
    cancelled.set()
    gate.set()
    with pytest.raises(ClientGone):
        await bulk
    assert len(engine.batches) == 1


async def test_the_queue_is_bounded() -> None:
    gate = threading.Event()
    engine = Engine(gate)
    worker = Worker("m", 2)
    batcher = EmbedBatcher(worker, engine)
    tasks = [asyncio.create_task(batcher.embed(["x"], never))]
    await until(lambda: engine.batches)
    tasks += [asyncio.create_task(batcher.embed(["y"], never)) for _ in range(2)]
    await asyncio.sleep(0)
    assert worker.admission.waiting == 2
    with pytest.raises(QueueFull) as caught:
        await batcher.embed(["z"], never)
    assert caught.value.status == 429
    gate.set()
    await asyncio.gather(*tasks)
    assert worker.admission.waiting == 0
    await batcher.embed(["z"], never)


def test_closing_the_registry_closes_its_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    monkeypatch.setattr(FakeEmbed, "close", lambda _: closed.set())
    registry = Registry(load_catalogue(fake_models=True), tmp_path)
    asyncio.run(registry.embed("fake-embed", ["x"], never))
    registry.close()
    assert closed.wait(5)


@pytest.mark.parametrize("counting", ["count_tokens", "count_truncated", "truncate"])
async def test_a_query_waits_for_a_portion_of_the_texts_whose_tokens_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting: str
) -> None:
    done: list[object] = []

    class Tokenizer:
        def encode(self, text: str) -> Any:
            done.append(text)
            time.sleep(0.002)
            return SimpleNamespace(ids=text.split())

    monkeypatch.setattr(FakeEmbed, "tokenizer", lambda _: Tokenizer())
    registry = Registry(load_catalogue(fake_models=True), tmp_path)
    # the longest is not looked into, and takes nobody's time
    texts = [*["w " * 500] * 800, "w" * 10_000_000, "w " * 257]

    async def count() -> object:
        if counting == "truncate":
            try:
                return await registry.embed("fake-embed", texts, never, truncate=False)
            except InvalidRequest as error:
                return error.detail
        return await getattr(registry, counting)("fake-embed", texts, never)

    try:
        await registry.embed("fake-embed", ["loaded"], never)
        counted = asyncio.create_task(count())
        await until(lambda: done)
        await registry.embed("fake-embed", ["query"], never)
        assert len(done) < 500
        found = await counted
    finally:
        registry.close()
    expected: dict[str, object] = {
        "count_tokens": [*[500] * 800, None, 257],
        "count_truncated": 802,
        "truncate": "Text 1 has 500 tokens; the model takes in 256.",
    }
    assert found == expected[counting]
    assert len(done) == 801


async def test_closing_a_stream_stops_its_generator() -> None:
    given: list[int] = []
    closed = threading.Event()

    def count() -> Iterator[int]:
        try:
            for n in range(10_000):
                given.append(n)
                yield n
                time.sleep(0.001)
        finally:
            closed.set()

    worker = Worker("m", 2)
    stream = worker.stream(never, count)
    assert [await anext(stream), await anext(stream)] == [0, 1]
    await stream.aclose()
    assert await asyncio.to_thread(closed.wait, 5)
    assert len(given) < 1000
    assert await worker.run(never, lambda: "free again") == "free again"


async def test_a_client_that_reads_slowly_keeps_no_place_in_the_queue() -> None:
    worker = Worker("m", 1)
    streams = [worker.stream(never, lambda: iter("abc")) for _ in range(3)]
    for stream in streams:
        assert await anext(stream) == "a"
        await until(lambda: worker.admission.waiting == 0)
    assert [[item async for item in stream] for stream in streams] == [["b", "c"]] * 3
    assert worker.admission.waiting == 0


async def test_a_streams_error_arrives_after_its_items() -> None:
    def fail() -> Iterator[int]:
        yield 1
        raise ValueError("late")

    stream = Worker("m", 2).stream(never, fail)
    assert await anext(stream) == 1
    with pytest.raises(ValueError, match="late"):
        await anext(stream)


async def test_a_request_that_waits_leaves_the_queue_when_its_client_goes() -> None:
    gate = threading.Event()
    worker = Worker("m", 4)
    first = asyncio.create_task(worker.run(never, gate.wait, 10))
    await until(lambda: worker.admission.running)
    cancelled = Cancellation()
    ran = []
    second = asyncio.create_task(worker.run(cancelled, ran.append, 1))
    await asyncio.sleep(0.01)
    assert worker.admission.waiting == 1
    cancelled.set()
    with pytest.raises(ClientGone):
        await second
    assert worker.admission.waiting == 0
    gate.set()
    await first
    assert ran == []
