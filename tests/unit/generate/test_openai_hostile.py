"""The engine for remote endpoints against one that wants to fill its memory or lead it elsewhere."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import AsyncIterator

import pytest

from ml_rag.abc import Sampling
from ml_rag.errors import EngineFailed
from ml_rag.server.engines import openai_endpoint as endpoint_module
from support.remote_endpoint import RemoteEndpoint, endless, never, piece, replies, streams, text_of

EVENT = b"data: " + json.dumps(piece("word " * 1000)).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("start", "more"),
    [(b"", EVENT * 20), (b"data: ", b"a" * 65536), (b"", b": ping\n" * 9000)],
    ids=["text", "line", "comments"],
)
def test_a_stream_without_end_is_given_up(remote, engine_for, start, more):
    remote.replies = [endless(start, more)]
    with pytest.raises(EngineFailed, match="unexpected reply") as caught:
        text_of(engine_for(remote.url, "generate"), Sampling(max_tokens=8))
    assert "longer than anything" in caught.value.detail


def test_a_reply_or_a_refusal_without_end_is_given_up(remote, engine_for, monkeypatch):
    monkeypatch.setattr(endpoint_module, "MAX_REPLY_BYTES", 1 << 20)
    remote.replies = [endless(b'{"data": [', b" " * 65536)]
    engine = engine_for(remote.url, "embed", dimensions=2)
    with pytest.raises(EngineFailed, match="unexpected reply"):
        engine.embed(["a"], never)
    remote.replies = [replies(400, b"no " * 1_000_000)]
    with pytest.raises(EngineFailed, match="remote model failed") as caught:
        engine.embed(["a"], never)
    assert len(caught.value.detail) < 1100


def test_nothing_is_unpacked(remote, engine_for):
    """A few kilobytes could become gigabytes."""
    packed = gzip.compress(json.dumps({"data": [{"index": 0, "embedding": [1.0, 2.0]}]}).encode())
    remote.replies = [replies(200, packed, Content_Encoding="gzip")]
    with pytest.raises(EngineFailed, match="unexpected reply") as caught:
        engine_for(remote.url, "embed", dimensions=2).embed(["a"], never)
    assert "compressed" in caught.value.detail
    assert remote.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_redirect_is_followed(remote, engine_for, status):
    """The key would go to an address that the administrator did not write down."""
    other = RemoteEndpoint()
    other.replies = [streams(piece("elsewhere", "stop"), "[DONE]")]
    remote.replies = [replies(status, b"", Location=f"{other.url}/chat/completions")]
    try:
        with pytest.raises(EngineFailed, match="remote model failed"):
            text_of(engine_for(remote.url, "generate"))
        assert other.requests == []
    finally:
        other.server.shutdown()
        other.server.server_close()


def test_json_that_is_nested_without_end_is_nonsense(remote, engine_for):
    remote.replies = [streams("[" * 100_000)]
    with pytest.raises(EngineFailed, match="unexpected reply"):
        text_of(engine_for(remote.url, "generate"))
    remote.replies = [replies(200, b"[" * 100_000)]
    with pytest.raises(EngineFailed, match="unexpected reply"):
        engine_for(remote.url, "embed", dimensions=2).embed(["a"], never)


def test_an_event_without_end_is_given_up_where_the_stream_may_be_long(remote, engine_for):
    """What has come of a line is copied with each piece of it."""
    remote.replies = [endless(b"data: ", b"a" * 65536)]
    with pytest.raises(EngineFailed, match="unexpected reply") as caught:
        text_of(engine_for(remote.url, "generate"), Sampling(max_tokens=65_536))
    assert "an event that is too long" in caught.value.detail


@pytest.mark.parametrize(
    "event",
    [
        r'{"choices": [{"delta": {"content": "a\ud800"}, "finish_reason": "stop"}]}',
        '{"choices": [{"delta": {"content": {"a": 1}}, "finish_reason": "stop"}]}',
        '{"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": -5}}',
        f'{{"choices": [{{"delta": {{}}, "finish_reason": "stop"}}], "usage": {{"completion_tokens": {10**30}}}}}',
    ],
)
def test_what_an_answer_cannot_be_is_nonsense(remote, engine_for, event):
    remote.replies = [streams(event, "[DONE]")]
    with pytest.raises(EngineFailed, match="unexpected reply"):
        text_of(engine_for(remote.url, "generate"))


def test_a_refusal_cannot_break_what_reports_it(remote, engine_for):
    engine = engine_for(remote.url, "generate")
    remote.replies = [replies(400, b"[" * 60_000)]
    # Python 3.14 reads it, and finds that it is no JSON
    with pytest.raises(EngineFailed, match=r"unexpected reply|remote model failed"):
        text_of(engine)
    for refusal in (
        replies(400, rb'{"error": {"message": "no \ud800"}}'),
        streams(r'{"error": {"message": "no \ud800"}}'),
    ):
        remote.replies = [refusal]
        with pytest.raises(EngineFailed, match="remote model failed") as caught:
            text_of(engine)
        assert caught.value.detail.encode().endswith(b"no ?")


@pytest.mark.parametrize("value", ["[" * 990 + "]" * 990, '["1", "2"]', "[true, false]", "[1e39, 1]"])
def test_what_a_vector_cannot_be_is_nonsense(remote, engine_for, value):
    embeddings = ",".join(f'{{"index": {index}, "embedding": {value}}}' for index in (0, 1))
    places = ",".join(f'{{"index": {index}, "embedding": [1, 2]}}' for index in (value, value))
    for rows in (embeddings, places):
        remote.replies = [replies(200, f'{{"data": [{rows}]}}'.encode())]
        with pytest.raises(EngineFailed, match="unexpected reply"):
            engine_for(remote.url, "embed", dimensions=2).embed(["a", "b"], never)


def test_informational_replies_do_not_put_off_the_end(remote, engine_for):
    def flood(handler):
        for _ in range(200):
            handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            handler.wfile.flush()
            time.sleep(0.05)

    remote.replies = [flood]
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="unexpected reply") as caught:
        text_of(engine_for(remote.url, "generate", timeout_seconds=0.5))
    assert time.monotonic() - began < 5
    assert "none after 1 seconds" in caught.value.detail


def test_a_number_beyond_any_float_is_nonsense(remote, engine_for):
    reply = f'{{"data": [{{"index": 0, "embedding": [1{"0" * 400}, 1]}}]}}'
    remote.replies = [replies(200, reply.encode())]
    with pytest.raises(EngineFailed, match="unexpected reply"):
        engine_for(remote.url, "embed", dimensions=2).embed(["a"], never)


@pytest.mark.parametrize("value", [b"[],", b"{},", b"1,"])
def test_a_reply_of_millions_of_values_is_not_parsed(remote, engine_for, value):
    """Parsing it would take seconds, in which nothing else of the process runs, and a gigabyte."""
    remote.replies = [replies(200, b'{"data": [' + value * 3_000_000 + b"1]}")]
    with pytest.raises(EngineFailed, match="unexpected reply") as caught:
        engine_for(remote.url, "embed", dimensions=2).embed(["a"], never)
    assert "more values than were asked for" in caught.value.detail
    # as many as the longest vectors of a batch have
    vector = [0.5] * 16_000
    reply = {"data": [{"index": i, "embedding": vector} for i in range(64)]}
    remote.replies = [replies(200, json.dumps(reply).encode())]
    assert engine_for(remote.url, "embed", dimensions=16_000).embed(["a"] * 64, never).shape == (64, 16_000)


async def test_an_event_in_single_bytes_takes_no_longer(remote, engine_for):
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(1 << 20):
            yield b"a"
        for byte in b"\nb\r\n\nc":
            yield bytes([byte])

    began = time.monotonic()
    assert [line async for line in endpoint_module._lines(pieces())] == ["a" * (1 << 20), "b", "", "c"]
    assert time.monotonic() - began < 10
