"""What the engine for remote endpoints asks a second time, and what it does not."""

from __future__ import annotations

import time

import pytest

from ml_rag.errors import EngineFailed
from ml_rag.server.engines import openai_endpoint as endpoint_module
from support.remote_endpoint import (
    engine_for,
    never,
    piece,
    remote,
    replies,
    streams,
    text_of,
)

__all__ = ["engine_for", "remote"]


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_tries_again_after_a_passing_refusal(remote, engine_for, status):
    busy = replies(status, {"error": {"message": "busy"}}, Retry_After="0")
    remote.replies = [busy, busy, streams(piece("done", "stop"), "[DONE]")]
    assert text_of(engine_for(remote.url, "generate")) == "done"
    assert len(remote.requests) == 3


def test_gives_up_after_some_attempts_with_the_endpoints_words(remote, engine_for):
    remote.replies = [replies(503, {"error": {"message": "overloaded today"}})]
    with pytest.raises(EngineFailed) as caught:
        text_of(engine_for(remote.url, "generate"))
    assert caught.value.detail == "HTTP status 503: overloaded today"
    assert len(remote.requests) == endpoint_module.ATTEMPTS


def test_a_prompt_that_was_taken_is_not_sent_twice_and_texts_to_embed_are(remote, engine_for):
    """The endpoint may have died of it, or answered in vain for money."""
    remote.replies = [lambda handler: None]
    with pytest.raises(EngineFailed, match="cannot be reached"):
        text_of(engine_for(remote.url, "generate"))
    assert len(remote.requests) == 1
    remote.replies.append(replies(200, {"data": [{"index": 0, "embedding": [1.0, 0.0]}]}))
    assert engine_for(remote.url, "embed", dimensions=2).embed(["a"], never).shape == (1, 2)
    assert len(remote.requests) == 3


def test_a_silent_endpoint_times_out(remote, engine_for):
    remote.replies = [lambda handler: time.sleep(1)]
    engine = engine_for(remote.url, "generate", timeout_seconds=0.2)
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="cannot be reached"):
        text_of(engine)
    assert time.monotonic() - began < 0.9
    assert len(remote.requests) == 1  # what may be at work over there is not asked twice
