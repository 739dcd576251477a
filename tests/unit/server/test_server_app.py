"""The application's routes, without a socket."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from ml_rag import __version__
from ml_rag.errors import ModelUnavailable
from ml_rag.server.app import create_app
from ml_rag.server.catalogue import load_catalogue
from ml_rag.server.registry import Registry


def registry_of(tmp_path: Path, config: str) -> Registry:
    (tmp_path / "c.toml").write_text(config)
    return Registry(load_catalogue(tmp_path / "c.toml", fake_models=True), tmp_path)


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., httpx.Response]:
    registry = registry_of(tmp_path, "[server]\nmax_body_bytes = 4096\n")
    app = create_app(registry)

    def call(method: str, path: str, **options: Any) -> httpx.Response:
        async def main() -> httpx.Response:
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, **options)

        return asyncio.run(main())

    call.registry = registry  # type: ignore[attr-defined]
    return call


def embed(ask: Callable[..., httpx.Response], **body: Any) -> httpx.Response:
    return ask("POST", "/v1/embeddings", json=body)


def assert_error(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "code", "detail", "hint"}
    assert error["code"] == code
    assert reply.headers["X-ML-RAG-Version"] == __version__
    return error


def test_embeddings_as_floats(ask) -> None:
    reply = embed(ask, model="fake-embed", input=["red", "red blue"])
    assert reply.status_code == 200
    assert reply.headers["X-ML-RAG-Version"] == __version__
    body = reply.json()
    assert [row["index"] for row in body["data"]] == [0, 1]
    expected = np.zeros(16)
    expected[zlib.crc32(b"red") % 16] = 1
    assert body["data"][0]["embedding"] == expected.tolist()
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert body["model"] == "fake-embed"


@pytest.mark.parametrize(
    "body",
    [
        {"model": "fake-embed-matryoshka@4"},
        {"model": "fake-embed-matryoshka", "dimensions": 4},
        {"model": "fake-embed-matryoshka@4", "input_type": "query", "count_truncated": True},
    ],
)
def test_embeddings_are_cut_and_get_the_length_1_again(ask, body: dict[str, Any]) -> None:
    text = " ".join(f"w{i}" for i in range(40))
    whole = np.array(embed(ask, model="fake-embed-matryoshka", input=text).json()["data"][0]["embedding"])
    reply = embed(ask, input=[text, text], **body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == body["model"]
    for row in reply.json()["data"]:
        assert row["embedding"] == pytest.approx((whole[:4] / np.linalg.norm(whole[:4])).tolist(), abs=1e-6)


def test_a_vector_without_its_first_components_is_cut_to_zeros(ask) -> None:
    word = next(w for w in map(str, range(1000)) if zlib.crc32(w.encode()) % 16 >= 4)
    reply = embed(ask, model="fake-embed-matryoshka@4", input=word)
    assert reply.json()["data"][0]["embedding"] == [0.0] * 4


@pytest.mark.parametrize("n", ["4", "5", "16"])
def test_dimensions_within_the_range_are_taken(ask, n: str) -> None:
    reply = embed(ask, model=f"fake-embed-matryoshka@{n}", input="red")
    assert len(reply.json()["data"][0]["embedding"]) == int(n)
    assert ask("GET", f"/v1/models/fake-embed-matryoshka@{n}").json()["dimensions"] == int(n)


@pytest.mark.parametrize("n", ["3", "17", "0", "-4", "04", "4.0", "", " 4", "٤", "9" * 30])
def test_dimensions_outside_of_the_range_are_refused(ask, n: str) -> None:
    error = assert_error(embed(ask, model=f"fake-embed-matryoshka@{n}", input="red"), 400, "invalid_request")
    assert error["message"] == f"the vectors of model fake-embed-matryoshka cannot be cut to {n[:20]} dimensions"
    assert error["detail"] == "They can have 4 to 16."


def test_vectors_of_other_models_are_not_cut(ask) -> None:
    error = assert_error(embed(ask, model="fake-embed@8", input="red"), 400, "invalid_request")
    assert error["message"] == "the vectors of model fake-embed cannot be cut to 8 dimensions"
    assert error["detail"] == "They have 16; the model was not trained for fewer (Matryoshka)."
    assert len(embed(ask, model="fake-embed@16", input="red").json()["data"][0]["embedding"]) == 16
    # it is known before the model is loaded, which is not here
    error = assert_error(embed(ask, model="all_minilm_l6_v2", input="a", dimensions=256), 400, "invalid_request")
    assert "They have 384" in error["detail"]


def test_only_embedding_models_have_dimensions(ask) -> None:
    assert_error(
        ask("POST", "/v1/rerank", json={"model": "fake-rerank@4", "query": "a", "documents": []}),
        404,
        "model_not_found",
    )
    assert_error(embed(ask, model="fake-generate@4", input="a"), 400, "wrong_task")
    assert_error(embed(ask, model="none@4", input="a"), 404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "there", "hint"),
    [
        ("embeddings", {"input": "a"}, "fake-embed", "Did you mean 'bge-m3'?"),
        ("rerank", {"query": "a", "documents": []}, "fake-rerank", None),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "extractive", None),
    ],
)
def test_a_model_of_the_task_is_suggested(ask, path: str, body: dict[str, Any], there: str, hint: str | None) -> None:
    error = assert_error(ask("POST", f"/v1/{path}", json={"model": "bge-m4", **body}), 404, "model_not_found")
    assert error["detail"].endswith(", hybrid") == (path == "rerank")
    task = {"embeddings": "embed", "rerank": "rerank"}.get(path, "generate")
    assert error["detail"].startswith(f"models that are there for the task {task}: {there}")
    assert error["hint"] == (
        hint
        or "Add it as [models.ID] to the file that the model server reads (--config, ML_RAG_CONFIG,"
        " /etc/ml_rag/ml_rag.toml), and restart the server: docs/models.md#models-of-your-own."
    )


def test_models_that_are_there_are_suggested_for_one_of_another_task(ask) -> None:
    error = assert_error(embed(ask, model="fake-rerank", input="a"), 400, "wrong_task")
    assert error["hint"].startswith("Models for the task embed: fake-embed, ")


def test_embeddings_as_base64(ask) -> None:
    rows = embed(ask, model="fake-embed", input=["red", "red blue"], encoding_format="base64").json()["data"]
    floats = embed(ask, model="fake-embed", input=["red", "red blue"]).json()["data"]
    for row, expected in zip(rows, floats, strict=True):
        vector = np.frombuffer(base64.b64decode(row["embedding"]), "<f4")
        assert np.allclose(vector, expected["embedding"])


def test_embeddings_as_text(ask) -> None:
    rows = embed(ask, model="fake-embed", input=["red", "red blue"], encoding_format="text").json()["data"]
    floats = embed(ask, model="fake-embed", input=["red", "red blue"]).json()["data"]
    for row, expected in zip(rows, floats, strict=True):
        assert row["embedding"].startswith("[")
        assert json.loads(row["embedding"]) == expected["embedding"]


def test_embeddings_as_text_tell_how_many_tokens_the_model_takes_in(ask) -> None:
    usage = embed(ask, model="fake-embed", input="red", encoding_format="text").json()["usage"]
    assert usage == {"prompt_tokens": 1, "total_tokens": 1, "max_tokens": 256}


def test_texts_that_are_cut_are_counted_where_it_is_asked_for(ask) -> None:
    texts = ["w " * 256, "w " * 257, "short"]
    assert "truncated_texts" not in embed(ask, model="fake-embed", input=texts).json()["usage"]
    counted = embed(ask, model="fake-embed", input=texts, count_truncated=True).json()
    assert counted["usage"]["truncated_texts"] == 1
    assert counted["data"] == embed(ask, model="fake-embed", input=texts).json()["data"]


def test_a_single_text_and_a_huge_number_of_texts(ask) -> None:
    assert len(embed(ask, model="fake-embed", input="one").json()["data"]) == 1
    assert len(embed(ask, model="fake-embed", input=["a"] * 500).json()["data"]) == 500


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({"model": "fake-embed"}, 400, "invalid_request", "input"),
        ({"model": "fake-embed", "input": []}, 400, "invalid_request", "input"),
        ({"model": "fake-embed", "input": [1, 2]}, 400, "invalid_request", "input"),
        ({"model": 7, "input": "a"}, 400, "invalid_request", "model"),
        ({"model": "fake-embed", "input": "a", "encoding_format": "hex"}, 400, "invalid_request", "encoding_format"),
        ({"model": "fake-embed", "input": "a", "dimensions": 4}, 400, "invalid_request", "dimensions"),
        ({"model": "fake-embedd", "input": "a"}, 404, "model_not_found", "fake-embed"),
        ({"model": "fake-generate", "input": "a"}, 400, "wrong_task", "fake-embed"),
        ({"model": "all_minilm_l6_v2", "input": "a"}, 503, "model_unavailable", "ml-rag models pull all_minilm_l6_v2"),
        ({"model": "all_minilm_l6_v2", "input": "a"}, 503, "model_unavailable", "all_minilm_l6_v2 --models-dir /"),
        ({"model": "fake-embed-nan", "input": "a"}, 500, "engine_failed", "finite"),
        ({"model": "fake-embed-short", "input": "a"}, 500, "engine_failed", "1 x 15"),
    ],
)
def test_errors_have_their_form(ask, body: dict[str, Any], status: int, code: str, words: str) -> None:
    error = assert_error(embed(ask, **body), status, code)
    assert words in " ".join(str(value) for value in error.values())


def test_a_body_that_is_not_json(ask) -> None:
    reply = ask("POST", "/v1/embeddings", content=b"{nonsense", headers={"content-type": "application/json"})
    assert_error(reply, 400, "invalid_request")


def test_a_body_at_the_limit_and_past_it(ask) -> None:
    def body(length: int) -> bytes:
        head, tail = b'{"model": "fake-embed", "input": "', b'"}'
        return head + b"x" * (length - len(head) - len(tail)) + tail

    assert ask("POST", "/v1/embeddings", content=body(4096)).status_code == 200
    error = assert_error(ask("POST", "/v1/embeddings", content=body(4097)), 400, "invalid_request")
    assert "max_body_bytes" in error["hint"]

    async def pieces() -> Any:  # no content-length: the bytes themselves are counted
        yield body(4097)

    assert_error(ask("POST", "/v1/embeddings", content=pieces()), 400, "invalid_request")


def test_unknown_paths_and_methods(ask) -> None:
    assert_error(ask("GET", "/v1/nothing"), 404, "invalid_request")
    assert_error(ask("GET", "/v1/embeddings"), 405, "invalid_request")


def test_models(ask) -> None:
    rows = {row["id"]: row for row in ask("GET", "/v1/models").json()["data"]}
    assert rows["fake-embed"] == {
        "id": "fake-embed",
        "object": "model",
        "created": 0,
        "owned_by": "ml_rag",
        "task": "embed",
        "engine": "fake",
        "dimensions": 16,
        "max_tokens": 256,
        "available": True,
        "reason": None,
        "pull": None,
        "brief": False,
    }
    assert rows["smollm2-135m-instruct"]["brief"] is True
    missing = rows["all_minilm_l6_v2"]
    pull = missing["pull"].partition(" --models-dir ")
    assert (missing["available"], pull[0], bool(pull[2])) == (False, "ml-rag models pull all_minilm_l6_v2", True)
    assert "does not exist" in missing["reason"]
    assert ask("GET", "/v1/models/fake-embed").json() == rows["fake-embed"]
    assert_error(ask("GET", "/v1/models/none"), 404, "model_not_found")


def test_tokens_are_counted(ask) -> None:
    reply = ask("POST", "/v1/tokens", json={"model": "fake-embed", "input": ["", "red blue"]})
    assert reply.json() == {"model": "fake-embed", "tokens": [0, 2]}
    many = ask("POST", "/v1/tokens", json={"model": "fake-embed", "input": ["a b"] * 200}).json()
    assert many["tokens"] == [2] * 200
    assert ask("POST", "/v1/tokens", json={"model": "fake-embed", "input": []}).json()["tokens"] == []
    for body in ({"model": "fake-embed"}, {"model": "fake-embed", "input": "a"}, {"model": "fake-rerank", "input": []}):
        assert ask("POST", "/v1/tokens", json=body).status_code == 400


def test_rerank(ask) -> None:
    body = {"model": "fake-rerank", "query": "red blue", "documents": ["green", "blue red", {"text": "red"}]}
    assert ask("POST", "/v1/rerank", json=body).json() == {
        "model": "fake-rerank",
        "results": [
            {"index": 1, "relevance_score": 1.0},
            {"index": 2, "relevance_score": 0.5},
            {"index": 0, "relevance_score": 0.0},
        ],
    }
    reply = ask("POST", "/v1/rerank", json={**body, "top_n": 1, "return_documents": True}).json()
    assert reply["results"] == [{"index": 1, "relevance_score": 1.0, "document": {"text": "blue red"}}]
    assert ask("POST", "/v1/rerank", json={**body, "documents": []}).json()["results"] == []
    refused = ask("POST", "/v1/rerank", json={**body, "model": "hybrid"})
    assert refused.status_code == 404
    assert "in the database" in refused.json()["error"]["message"]
    assert "ml-rag gateway" in refused.json()["error"]["hint"]
    many = ask("POST", "/v1/rerank", json={**body, "documents": ["x" * n for n in range(70)] + ["red"]}).json()
    assert (len(many["results"]), many["results"][0]["index"]) == (71, 70)


def test_health_and_metrics(ask) -> None:
    embed(ask, model="fake-embed", input=["a b", "c"])
    embed(ask, model="nope", input="a")
    health = ask("GET", "/healthz").json()
    assert (health["status"], health["version"]) == ("ok", __version__)
    assert health["uptime_seconds"] >= 0
    assert health["models"]["fake-embed"] == "loaded"
    assert health["models"]["fake-rerank"] == "idle"
    assert health["models"]["all_minilm_l6_v2"] == "unavailable"
    assert set(health["parsers"]) == {"confined", "missing"}
    text = ask("GET", "/metrics").text
    for line in (
        'ml_rag_requests_total{model="fake-embed",route="/v1/embeddings",status="200"} 1.0',
        'ml_rag_requests_total{model="",route="/v1/embeddings",status="404"} 1.0',
        'ml_rag_tokens_total{direction="in",model="fake-embed"} 3.0',
        'ml_rag_model_loaded{model="fake-embed"} 1.0',
        'ml_rag_queue_depth{model="fake-embed"} 0.0',
        'ml_rag_running{model="fake-embed"} 0.0',
        'ml_rag_embed_batch_texts_sum{model="fake-embed"} 2.0',
    ):
        assert line in text.splitlines()


def test_an_unforeseen_error_shows_no_traceback_and_logs_no_text(ask, monkeypatch, caplog) -> None:
    class Broken:
        max_tokens, dimensions = 8, 16

        def rerank(self, query: str, texts: list[str], cancelled: object) -> None:
            raise ValueError(f"cannot score {texts}")

        def close(self) -> None:
            pass

    monkeypatch.setattr("ml_rag.server.models.load_engine", lambda entry, models_dir: Broken())
    with caplog.at_level(logging.DEBUG):
        reply = ask("POST", "/v1/rerank", json={"model": "fake-rerank", "query": "q", "documents": ["secret words"]})
    error = assert_error(reply, 500, "engine_failed")
    assert "Traceback" not in reply.text
    assert error["detail"].startswith("ValueError")
    assert "ValueError" in caplog.text
    assert "secret words" not in caplog.text


async def test_concurrent_requests_wait_for_one_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ml_rag.server import models as module

    loads = []
    load = module.load_engine

    def counting(entry, models_dir):
        loads.append(entry.id)
        return load(entry, models_dir)

    monkeypatch.setattr(module, "load_engine", counting)
    registry = Registry(load_catalogue(fake_models=True), tmp_path)

    await asyncio.gather(*(registry.embed("fake-embed", [str(n)], lambda: False) for n in range(20)))
    assert loads == ["fake-embed"]


async def test_idle_models_are_unloaded_and_leased_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ml_rag.server.registry.IDLE_CHECK_SECONDS", 0.01)
    registry = registry_of(
        tmp_path, "[models.fake-embed]\nidle_unload_seconds = 0.05\n[models.fake-rerank]\nidle_unload_seconds = 0\n"
    )

    unloading = asyncio.create_task(registry.unload_idle_forever())
    await registry.rerank("fake-rerank", "q", ["a"], lambda: False, chunk=8)
    async with registry.lease("fake-embed", "embed", lambda: False):
        await asyncio.sleep(0.2)
        assert registry.states()["fake-embed"] == "loaded"
    async with asyncio.timeout(5):
        while registry.states()["fake-embed"] != "idle":
            await asyncio.sleep(0.01)
    assert registry.states()["fake-rerank"] == "loaded"
    assert (await registry.embed("fake-embed", ["a"], lambda: False))[0].shape == (1, 16)
    unloading.cancel()


async def test_a_model_whose_first_client_left_during_the_load_can_be_unloaded_and_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ml_rag.server.registry.IDLE_CHECK_SECONDS", 0.01)
    registry = registry_of(tmp_path, "[models.fake-embed]\nidle_unload_seconds = 0.001\n")

    impatient = asyncio.create_task(registry.embed("fake-embed", ["a"], lambda: False))
    await asyncio.sleep(0)  # it has asked for the model
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    async with asyncio.timeout(5):
        while registry.states()["fake-embed"] != "loaded":
            await asyncio.sleep(0.001)
    unloading = asyncio.create_task(registry.unload_idle_forever())
    async with asyncio.timeout(5):
        while registry.states()["fake-embed"] != "idle":
            await asyncio.sleep(0.001)
    unloading.cancel()
    assert (await registry.embed("fake-embed", ["a"], lambda: False))[0].shape == (1, 16)
    assert registry.states()["fake-embed"] == "loaded"


async def test_prefixes_go_before_queries_and_documents(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, '[models.fake-embed]\nquery_prefix = "query: "\ndocument_prefix = "passage: "\n')

    async def vector(text: str, input_type: Any = None) -> list[float]:
        return (await registry.embed("fake-embed", [text], lambda: False, input_type))[0].tolist()

    assert await vector("a", "query") == await vector("query: a") != await vector("a")
    assert await vector("a", "document") == await vector("passage: a")


def test_preloaded_models_are_there_before_the_first_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = registry_of(tmp_path, '[server]\npreload = ["fake-embed", "all_minilm_l6_v2", "nothing"]\n')
    asyncio.run(registry.preload())
    assert registry.states()["fake-embed"] == "loaded"
    assert "model all_minilm_l6_v2 is not available" in caplog.text
    assert "model 'nothing' does not exist" in caplog.text


def test_too_many_texts(ask) -> None:
    ask.registry.catalogue.server.__dict__["max_body_bytes"] = 10**6
    error = assert_error(embed(ask, model="fake-embed", input=[""] * 16_385), 400, "invalid_request")
    assert "16384" in error["detail"]
    assert embed(ask, model="fake-embed", input=[""] * 16_384).status_code == 200


@pytest.mark.parametrize(
    "failure",
    [ModelUnavailable("the model file cannot be loaded"), RuntimeError("bad magic"), BaseException("a panic")],
)
def test_a_damaged_model_says_how_to_get_it_again_and_counts_as_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        '[models.mine]\ntask = "generate"\nengine = "llama-cpp"\n'
        'sources = [{ hub = "org/m", file = "m.gguf" }]\nfiles = { "m.gguf" = "unpinned" }\n'
    )
    file = tmp_path / "mine" / "m.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF?")
    registry = Registry(load_catalogue(config), tmp_path)
    loads: list[str] = []

    def load(entry: Any, models_dir: Path) -> Any:
        loads.append(entry.id)
        if file.read_bytes() == b"GGUF?":
            raise failure
        return SimpleNamespace(max_tokens=64, close=lambda: None)

    monkeypatch.setattr("ml_rag.server.models.load_engine", load)

    async def lease() -> None:
        async with registry.lease("mine", "generate", lambda: False):
            pass

    command = f"ml-rag models pull mine --force --models-dir {tmp_path}"
    assert registry.info("mine").available  # nobody knows yet
    for _ in range(2):
        with pytest.raises(ModelUnavailable) as caught:
            asyncio.run(lease())
        assert str(caught.value.hint).endswith(f"get them again with: {command}")
    info = registry.info("mine")
    assert (info.available, info.pull, registry.states()["mine"]) == (False, command, "unavailable")
    assert info.reason in (
        "the model file cannot be loaded", "RuntimeError: bad magic", "RuntimeError: BaseException: a panic"
    )  # fmt: skip
    file.write_bytes(b"GGUF!")
    assert registry.info("mine").available
    asyncio.run(lease())
    assert registry.states()["mine"] == "loaded"
    assert len(loads) == 3
    registry.close()
