"""What the engine for remote endpoints asks a second time, and what it does not."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest

from ml_rag.abc import Sampling
from ml_rag.errors import EngineFailed
from ml_rag.server.engines import openai_endpoint as endpoint_module
from support.remote_endpoint import never, piece, replies, streams, text_of

PASSING = [408, 409, 429, 500, 502, 503, 504]
VECTORS = replies(200, {"data": [{"index": 0, "embedding": [1.0, 0.0]}]})


def fails(engine) -> EngineFailed:
    with pytest.raises(EngineFailed) as caught:
        text_of(engine)
    return caught.value


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (429, {}),
        (429, {"Retry_After": "0"}),
        (503, {"Retry_After": "0"}),
        (503, {"Retry_After": "Sat, 21 Nov 2015 07:28:00 GMT"}),  # gone by
    ],
)
def test_a_prompt_that_was_refused_is_sent_again(remote, engine_for, status, headers):
    busy = replies(status, {"error": {"message": "busy"}}, **headers)
    remote.replies = [busy, busy, streams(piece("done", "stop"), "[DONE]")]
    assert text_of(engine_for(remote.url, "generate")) == "done"
    assert len(remote.requests) == 3


@pytest.mark.parametrize("status", [status for status in PASSING if status != 429])
@pytest.mark.parametrize("headers", [{}, {"Retry_After": "soon"}, {"Retry_After": "nan"}])
def test_a_prompt_that_may_have_been_carried_out_is_sent_once(remote, engine_for, status, headers):
    """A proxy says the same of an endpoint that was at work: an answer is paid for, and may have done its harm."""
    remote.replies = [replies(status, {"error": {"message": "no luck"}}, **headers)]
    assert fails(engine_for(remote.url, "generate")).detail == f"HTTP status {status}: no luck"
    assert len(remote.requests) == 1


@pytest.mark.parametrize("status", [status for status in PASSING if status not in (429, 503)])
def test_no_retry_after_makes_another_failure_a_refusal(remote, engine_for, status):
    remote.replies = [replies(status, {}, Retry_After="0")]
    fails(engine_for(remote.url, "generate"))
    assert len(remote.requests) == 1


@pytest.mark.parametrize("status", PASSING)
def test_texts_to_embed_are_sent_again(remote, engine_for, status):
    """Which costs little and changes nothing, and a load goes on."""
    remote.replies = [replies(status, {}), VECTORS]
    assert engine_for(remote.url, "embed", dimensions=2).embed(["a"], never).shape == (1, 2)
    assert len(remote.requests) == 2


@pytest.mark.parametrize(("status", "headers"), [(429, {}), (503, {"Retry_After": "0"})])
def test_gives_up_after_some_attempts_with_the_endpoints_words(remote, engine_for, status, headers):
    remote.replies = [replies(status, {"error": {"message": "overloaded today"}}, **headers)]
    assert fails(engine_for(remote.url, "generate")).detail == f"HTTP status {status}: overloaded today"
    assert len(remote.requests) == endpoint_module.ATTEMPTS


@pytest.mark.parametrize("asked", ["61", "1e999", "Sun, 31 Dec 9999 23:59:59 GMT"])
def test_an_endpoint_that_wants_a_long_wait_is_not_asked_before(remote, engine_for, asked):
    remote.replies = [replies(429, {"error": {"message": "come tomorrow"}}, Retry_After=asked)]
    assert "come tomorrow" in str(fails(engine_for(remote.url, "generate")).detail)
    with pytest.raises(EngineFailed):
        engine_for(remote.url, "embed", dimensions=2).embed(["a"], never)
    assert len(remote.requests) == 2


def test_waits_are_bounded_together(monkeypatch, remote, engine_for):
    monkeypatch.setattr(endpoint_module, "LONGEST_WAIT", 0.05)
    remote.replies = [replies(429, {}, Retry_After="0.03")]
    fails(engine_for(remote.url, "generate"))
    assert len(remote.requests) == 2


def test_where_nobody_listens_yet_a_prompt_is_sent_when_somebody_does(monkeypatch, engine_for):
    """Refused before anything of it was sent."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        engine = engine_for(f"http://127.0.0.1:{port.getsockname()[1]}/v1", "generate")
        taken: list[bytes] = []

        def answer() -> None:
            client, _ = port.accept()
            with client:
                taken.append(client.recv(65536))
                event = json.dumps(piece("done", "stop"))
                client.sendall(f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {event}\n\n".encode())
                # closed with a part of the request unread, it would be reset
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):
                    pass

        server = threading.Thread(target=answer, daemon=True)

        def listen(state) -> float:
            port.listen()
            server.start()
            return 0.0

        monkeypatch.setattr(endpoint_module, "_backoff", listen)
        assert text_of(engine) == "done"
        server.join(10)
        assert len(taken) == 1


@pytest.mark.parametrize("read", [1, 2000], ids=["at once", "in the middle"])
def test_a_prompt_whose_sending_broke_is_not_sent_again(engine_for, read):
    """The endpoint may have had enough of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = []

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    connections.append(client.recv(read))
                    # with unread data in it this resets the connection
                    client.close()

        threading.Thread(target=hang_up, daemon=True).start()
        engine = engine_for(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "generate")
        prompt = [{"role": "user", "content": "word " * 2_000_000}]
        with pytest.raises(EngineFailed, match="cannot be reached"):
            list(engine.generate(prompt, Sampling(), never))
        assert len(connections) == 1


def test_a_prompt_that_was_taken_is_not_sent_twice_and_texts_to_embed_are(remote, engine_for):
    """The endpoint may have died of it, or answered in vain for money."""
    remote.replies = [lambda handler: None]
    with pytest.raises(EngineFailed, match="cannot be reached"):
        text_of(engine_for(remote.url, "generate"))
    assert len(remote.requests) == 1
    remote.replies.append(VECTORS)
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
