"""server/pictures: what a model is asked about pictures, what is kept of it, and what becomes of failures."""

from __future__ import annotations

import asyncio
import base64
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml_rag.errors import InvalidRequest, UnknownModel
from ml_rag.server import pictures
from ml_rag.server.cancellation import Cancellation, ClientGone
from ml_rag.server.catalogue import load_catalogue
from ml_rag.server.pictures import Described, Describer, Kept, check_takes_images
from ml_rag.server.registry import Registry
from support.remote_endpoint import RemoteEndpoint, piece, replies, streams
from support.servers import remote_model

JPEG = b"\xff\xd8 a picture"

#: as OpenAI's gpt-4o-mini streams it, shortened to the keys that matter
RECORDED = streams(
    {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o-mini",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        "usage": None,
    },
    piece("# A bar chart\n\nSales rose from 3"),
    piece(" to 5 million.\n\n| year | sales |\n| --- | --- |\n| 2024 | 5 |"),
    piece("", "stop"),
    {"choices": [], "usage": {"prompt_tokens": 850, "completion_tokens": 30, "total_tokens": 880}},
    "[DONE]",
)  # fmt: skip
TEXT = "A bar chart\n\nSales rose from 3 to 5 million.\n\n| year | sales |\n| --- | --- |\n| 2024 | 5 |"


def registry_for(remote: RemoteEndpoint, folder: Path) -> Registry:
    config = folder / "ml_rag.toml"
    images = {"input": ["text", "image"]}
    config.write_text(
        remote_model("vision", remote.url, **images, remote_model="far")
        + remote_model("vision-2", remote.url, **images)
        + remote_model("blind", remote.url)
    )
    return Registry(load_catalogue(config, fake_models=True), folder)


def describe(
    remote: RemoteEndpoint,
    folder: Path,
    *jpegs: bytes,
    model: str = "vision",
    language: str | None = None,
    cancelled: Cancellation | None = None,
) -> Described:
    """What a server says of pictures that has what was kept in the folder."""

    async def run() -> Described:
        registry, kept = registry_for(remote, folder), Kept(folder)
        try:
            describer = Describer(registry, kept, model, language, cancelled or Cancellation())
            return await describer.describe(list(enumerate(jpegs)))
        finally:
            kept.close()
            registry.close()

    return asyncio.run(run())


def test_the_model_gets_the_picture_and_its_answer_is_the_text(remote: RemoteEndpoint, tmp_path: Path) -> None:
    remote.replies = [RECORDED]
    assert describe(remote, tmp_path, JPEG, language="de").texts == {0: TEXT}
    (request,) = remote.requests
    assert (request["path"], request["model"]) == ("/v1/chat/completions", "far")
    ((text, picture),) = [message["content"] for message in request["messages"]]
    assert picture == {
        "type": "image_url",
        "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(JPEG).decode()}"},
    }
    assert text["text"].endswith("Write the description in German.")


def test_a_picture_is_asked_about_once(remote: RemoteEndpoint, tmp_path: Path) -> None:
    remote.replies = [RECORDED]
    assert describe(remote, tmp_path, JPEG, JPEG, b"other").texts == dict.fromkeys(range(3), TEXT)
    assert len(remote.requests) == 2
    assert describe(remote, tmp_path, b"other", JPEG).texts == dict.fromkeys(range(2), TEXT)  # by another server
    assert len(remote.requests) == 2
    assert stat.S_IMODE((tmp_path / pictures.FILE_NAME).stat().st_mode) == 0o600


@pytest.mark.parametrize("other", [{"model": "vision-2"}, {"language": "fr"}])
def test_another_model_or_language_is_another_question(
    remote: RemoteEndpoint, tmp_path: Path, other: dict[str, Any]
) -> None:
    remote.replies = [RECORDED]
    describe(remote, tmp_path, JPEG)
    describe(remote, tmp_path, JPEG, **other)
    assert len(remote.requests) == 2


def test_a_failure_is_told_and_costs_its_picture_only(remote: RemoteEndpoint, tmp_path: Path) -> None:
    refused = replies(400, {"error": {"message": "your image is against our policy"}})
    remote.replies = [RECORDED, refused, RECORDED]
    found = describe(remote, tmp_path, b"1", b"2", b"3")
    assert found.texts == {0: TEXT, 2: TEXT}
    assert dict(found.failures) == {"the remote model failed: HTTP status 400: your image is against our policy": 1}
    assert not found.is_passing
    remote.replies = [RECORDED]
    assert describe(remote, tmp_path, b"1", b"2", b"3").texts == dict.fromkeys(range(3), TEXT)
    assert len(remote.requests) == 4  # that of the failure again, no other


@pytest.mark.parametrize(("status", "is_passing"), [(400, False), (413, False), (401, True), (500, True)])
def test_what_may_pass_is_tried_by_the_next_load(
    remote: RemoteEndpoint, tmp_path: Path, status: int, is_passing: bool
) -> None:
    remote.replies = [replies(status, {"error": {"message": "no"}})]
    assert describe(remote, tmp_path, JPEG).is_passing is is_passing


def test_an_endpoint_that_always_fails_is_given_up(remote: RemoteEndpoint, tmp_path: Path) -> None:
    remote.replies = [replies(500, {"error": {"message": "no"}})]
    found = describe(remote, tmp_path, *(b"%d" % i for i in range(10)))
    assert len(remote.requests) == 3
    assert dict(found.failures) == {
        "the remote model failed: HTTP status 500: no": 3,
        "not tried after 3 failures": 7,
    }


@pytest.mark.parametrize("said", ["", " \n# \n"])
def test_an_answer_without_text_is_a_failure(remote: RemoteEndpoint, tmp_path: Path, said: str) -> None:
    remote.replies = [streams(piece(said, "stop"), "[DONE]")]
    assert dict(describe(remote, tmp_path, JPEG).failures) == {"the model said nothing of a picture": 1}


def test_an_answer_without_end_is_cut(remote: RemoteEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_CHARACTERS", 100)
    remote.replies = [streams(*[piece("word ") for _ in range(100)], piece("", "length"), "[DONE]")]
    (text,) = describe(remote, tmp_path, JPEG).texts.values()
    assert len(text) == 99


def test_the_pictures_of_a_document_have_a_time_together(
    remote: RemoteEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "DOCUMENT_SECONDS", 2)
    remote.replies = [RECORDED, streams(*[piece("slow ")] * 100, pause=0.2)]
    began = time.monotonic()
    found = describe(remote, tmp_path, b"1", b"2", b"3")
    assert time.monotonic() - began < 10
    assert found.texts == {0: TEXT}
    assert dict(found.failures) == {"the pictures of a document took more than 2 s": 2}
    assert found.is_passing


@pytest.mark.parametrize("said", [(), (piece("a"),)])
def test_a_client_that_goes_ends_the_question(remote: RemoteEndpoint, tmp_path: Path, said: tuple[Any, ...]) -> None:
    remote.replies = [streams(*said, *[piece("")] * 100, pause=0.3)]
    took: list[float] = []
    for n in range(3):  # one of them on a busy machine
        cancelled = Cancellation()
        gone: list[float] = []

        def leave(cancelled: Cancellation = cancelled, gone: list[float] = gone) -> None:
            gone.append(time.monotonic())
            cancelled.set()

        threading.Timer(0.4, leave).start()
        with pytest.raises(ClientGone):
            describe(remote, tmp_path, b"%d" % n, cancelled=cancelled)
        took.append(time.monotonic() - gone[0])
    assert min(took) < 0.2


def test_a_model_that_takes_no_images_is_refused_with_those_that_do(remote: RemoteEndpoint, tmp_path: Path) -> None:
    registry = registry_for(remote, tmp_path)
    for model in ("blind", "fake-embed"):
        with pytest.raises(InvalidRequest, match=f"model {model} takes no images") as caught:
            check_takes_images(registry, model)
        assert caught.value.hint == "Models that take images: vision, vision-2."
    with pytest.raises(UnknownModel):
        check_takes_images(registry, "visoin")
    check_takes_images(registry, "vision")
    registry.close()


def test_without_any_the_hint_says_how_to_have_one(tmp_path: Path) -> None:
    (config := tmp_path / "ml_rag.toml").write_text("")
    registry = Registry(load_catalogue(config, fake_models=True), tmp_path)
    with pytest.raises(InvalidRequest) as caught:
        check_takes_images(registry, "fake-generate")
    assert 'input = ["text", "image"]' in (caught.value.hint or "")
    registry.close()


class TestKept:
    def test_what_was_not_used_for_long_goes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = Kept(tmp_path)
        now = 10**9
        monkeypatch.setattr(pictures, "_now", lambda: now)
        for key in (b"1", b"2"):
            kept.put(key, "text")
        now += pictures.KEPT_SECONDS
        assert kept.get(b"1") == "text"
        now += 1
        kept.put(b"3", "text")
        assert [kept.get(key) for key in (b"1", b"2", b"3")] == ["text", None, "text"]
        kept.close()

    def test_the_oldest_of_too_many_go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pictures, "MAX_KEPT", 20)
        clock = iter(range(100))
        monkeypatch.setattr(pictures, "_now", lambda: next(clock))
        monkeypatch.setattr(pictures, "KEPT_SECONDS", 1000)
        kept = Kept(tmp_path)
        for i in range(21):
            kept.put(b"%d" % i, "text")
        assert [i for i in range(21) if kept.get(b"%d" % i) is None] == [0, 1]
        kept.close()

    @pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"no database" * 100), lambda path: path.mkdir()])
    def test_a_file_that_cannot_be_used_is_done_without(self, tmp_path: Path, spoil: Callable[[Path], object]) -> None:
        spoil(tmp_path / pictures.FILE_NAME)
        kept = Kept(tmp_path)
        kept.put(b"1", "text")
        assert kept.get(b"1") == "text"
        kept.close()
        kept = Kept(tmp_path / "none")
        assert kept.get(b"1") is None
        kept.close()
