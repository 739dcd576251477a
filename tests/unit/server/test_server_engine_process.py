"""engines/process.py and worker.py: what an engine does to its own process stays there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ml_rag.abc import Delta, Sampling
from ml_rag.errors import EngineFailed, InvalidRequest, ModelUnavailable, QueueFull
from ml_rag.server.cancellation import ClientGone
from ml_rag.server.catalogue import ModelEntry
from ml_rag.server.engines import process
from ml_rag.server.engines.fake import FakeEmbed
from ml_rag.server.engines.process import BYTES_PER_TOKEN, EngineProcess
from support.engine_process import TESTS, ask, never, started
from support.processes import Background, children, gone, wait_until


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds that a cancelled call has to end."""
    monkeypatch.setattr(process, "CANCEL_SECONDS", 0.5)
    return process.CANCEL_SECONDS


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    made = started()
    yield made
    made.close()


def words(engine: EngineProcess, what: str) -> list[str]:
    return [delta.text for delta in ask(engine, what)[1:-1]]


def is_usable(engine: EngineProcess) -> bool:
    return words(engine, "one two three") == ["one", "two", "three"]


def test_what_the_engine_says_is_what_comes(engine: EngineProcess) -> None:
    assert (engine.max_tokens, engine.brief) == (65_432, True)
    assert engine.count_tokens([{"role": "user", "content": "one two \ud800"}]) == 3
    assert ask(engine, "größer 🙂") == [Delta("begun"), Delta("größer"), Delta("🙂"), Delta("\ud800é", "stop", 5, 8)]
    pid = engine.pid
    with pytest.raises(InvalidRequest, match="refused") as caught:
        ask(engine, "refuse")
    assert (caught.value.detail, caught.value.hint) == ("the detail", "The hint.")
    with pytest.raises(EngineFailed) as failed:
        ask(engine, "fail")
    assert failed.value.detail == "RuntimeError"  # not its words, which may be a caller's
    assert is_usable(engine)
    assert engine.pid == pid


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("SIGSEGV", "signal 11 (SIGSEGV)"),
        ("SIGABRT", "signal 6 (SIGABRT)"),
        ("SIGILL", "signal 4 (SIGILL)"),
        ("SIGKILL", "signal 9 (SIGKILL)"),
        ("exit", "exit status 3"),
    ],
)
def test_an_end_in_mid_call_fails_that_call_only(engine: EngineProcess, what: str, cause: str) -> None:
    pid = engine.pid
    with pytest.raises(EngineFailed) as caught:
        ask(engine, what)
    assert cause in str(caught.value.detail)
    assert caught.value.hint
    assert engine.pid is None
    assert is_usable(engine)
    assert engine.pid not in (None, pid)


def test_an_end_between_two_calls_is_not_noticed(engine: EngineProcess) -> None:
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: engine.pid is None)
    assert engine.count_tokens([{"role": "user", "content": "one"}]) == 1
    assert is_usable(engine)


def test_a_cancelled_call_ends_and_its_process_goes_on(engine: EngineProcess) -> None:
    pid, cancelled = engine.pid, threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    began = time.monotonic()
    assert ask(engine, "wait", cancelled.is_set) == [Delta("begun")]
    assert 0.25 < time.monotonic() - began < 1
    assert is_usable(engine)
    assert engine.pid == pid


def test_closing_the_answer_ends_it(engine: EngineProcess) -> None:
    pid = engine.pid
    answer: Any = engine.generate([{"role": "user", "content": "wait"}], Sampling(), never)
    assert next(answer) == Delta("begun")
    answer.close()
    assert is_usable(engine)
    assert engine.pid == pid


@pytest.mark.parametrize("counting", [False, True])
def test_one_that_does_not_end_when_cancelled_is_ended(engine: EngineProcess, patience: float, counting: bool) -> None:
    pid, cancelled = engine.pid, threading.Event()
    assert pid is not None
    threading.Timer(0.2, cancelled.set).start()
    began = time.monotonic()
    if counting:
        with pytest.raises(ClientGone):
            engine.count_tokens([{"role": "user", "content": "hang"}], cancelled.is_set)
    else:
        assert ask(engine, "hang", cancelled.is_set) == [Delta("begun")]
    assert patience < time.monotonic() - began < patience + 2
    assert gone(pid)
    assert is_usable(engine)


@pytest.mark.parametrize("length", [10, 3_000_000])
def test_one_that_is_stopped_is_given_up_when_the_call_is_cancelled(
    engine: EngineProcess, patience: float, length: int
) -> None:
    pid, cancelled = engine.pid, threading.Event()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.2, cancelled.set).start()
    began = time.monotonic()
    assert ask(engine, "x" * length, cancelled.is_set) == []
    assert patience < time.monotonic() - began < patience + 2
    assert gone(pid)
    assert is_usable(engine)


def test_one_that_stands_still_is_ended(engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STALL_SECONDS", 0.4)
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="stood still") as caught:
        ask(engine, "one")
    assert 0.4 <= time.monotonic() - began < 2
    assert "0.4 s" in str(caught.value.detail)
    assert gone(pid)
    with pytest.raises(EngineFailed, match="stood still"):
        started("stop")
    # silent, and at work
    assert is_usable(engine)
    pid = engine.pid
    assert ask(engine, "many steps")[-1].finish_reason == "stop"
    assert engine.pid == pid


@pytest.mark.parametrize(
    "said", ["\x00\x00\x00\x00\x7f\xff\xff\xff", "\xff" * 8 + "x", "\0\0\0\0\0\0\0\1{", "\0\0\0\0\0\0\0\2[]"]
)
def test_one_that_answers_nonsense_is_ended(engine: EngineProcess, said: str) -> None:
    pid = engine.pid
    with pytest.raises(EngineFailed, match="sent an unexpected reply"):
        ask(engine, "say " + said)
    assert pid is not None
    assert gone(pid)
    assert is_usable(engine)


@pytest.mark.usefixtures("patience")
def test_a_message_that_comes_in_part_is_given_up_when_the_call_is_cancelled(engine: EngineProcess) -> None:
    pid, cancelled = engine.pid, threading.Event()
    assert pid is not None
    threading.Timer(0.2, cancelled.set).start()
    assert ask(engine, "say \0\0\0\0\0\0\xff\xff{", cancelled.is_set) == [Delta("begun")]
    assert gone(pid)
    assert is_usable(engine)


def test_ends_leave_neither_processes_nor_descriptors(engine: EngineProcess) -> None:
    before = len(os.listdir("/proc/self/fd"))
    others = set(children(os.getpid())) - {engine.pid}
    for what in ("SIGSEGV", "exit", "SIGKILL", "say " + "\xff" * 8):
        with pytest.raises(EngineFailed):
            ask(engine, what)
    assert is_usable(engine)  # as it was when they were counted
    assert len(os.listdir("/proc/self/fd")) <= before
    assert set(children(os.getpid())) - {engine.pid} <= others


def test_a_prompt_that_is_far_too_long_is_not_sent(engine: EngineProcess) -> None:
    most = BYTES_PER_TOKEN * engine.max_tokens
    fits, exceeds = ([{"role": "user", "content": "é" * (most // 2) + end}] for end in ("", " "))
    assert engine.count_tokens(fits) == 1
    assert engine.count_tokens(exceeds) == engine.max_tokens + 1
    assert list(engine.generate(fits, Sampling(), never))
    with pytest.raises(InvalidRequest, match="does not fit") as caught:
        list(engine.generate(exceeds, Sampling(), never))
    assert f"{most + 1} bytes" in str(caught.value.detail)


def test_its_memory_is_bounded(engine: EngineProcess) -> None:
    with pytest.raises(QueueFull, match="not enough memory"):
        ask(engine, "memory")
    assert is_usable(engine)


def test_a_step_that_takes_too_long_ends_it(engine: EngineProcess) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="json_schema takes too long"):
        ask(engine, "long step")
    assert time.process_time() - began < 1
    assert is_usable(engine)
    pid = engine.pid
    assert ask(engine, "many steps")[-1].finish_reason == "stop"
    assert engine.pid == pid


def test_it_sees_no_key_prints_nothing_and_leaves_no_core(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REMOTE_KEY", "secret")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    engine = started()
    try:
        names = words(engine, "environment")[0].split()
        assert "REMOTE_KEY" not in names
        assert {"PATH", "OMP_WAIT_POLICY"} <= set(names)
        assert words(engine, "limits") == ["0 500"]
        ask(engine, "print")
    finally:
        engine.close()
    assert capfd.readouterr() == ("", "")


def test_closing_ends_the_process_and_so_does_forgetting_it() -> None:
    engine = started()
    pid = engine.pid
    engine.close()
    assert pid is not None
    assert gone(pid)
    engine.close()
    forgotten = started().pid
    assert forgotten is not None
    wait_until(lambda: gone(forgotten))


@pytest.mark.parametrize(
    ("how", "error", "detail"),
    [
        ("unavailable", ModelUnavailable, "because"),
        ("broken", ModelUnavailable, "ValueError: it is broken"),
        ("SIGSEGV", ModelUnavailable, "signal 11 (SIGSEGV)"),
        # that says nothing of the model: it is tried again
        ("SIGKILL", EngineFailed, "signal 9 (SIGKILL)"),
    ],
)
def test_a_model_that_cannot_be_loaded(how: str, error: type[Exception], detail: str) -> None:
    with pytest.raises(error) as caught:
        started(how)
    assert detail in str(getattr(caught.value, "detail", ""))


@pytest.mark.parametrize("doing", ["nothing", "hang", "wait"])
def test_it_ends_with_the_server_that_is_killed(doing: str) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import time; from support.engine_process import ask, started\n"
        "engine = started()\n"
        "print(engine.pid, flush=True)\n"
        "ask(engine, sys.argv[2]) if sys.argv[2] != 'nothing' else time.sleep(60)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", script, str(TESTS), doing], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    time.sleep(0.3)
    assert not gone(pid)
    server.kill()
    server.wait()
    server.stdout.close()
    wait_until(lambda: gone(pid), 2)


def test_calls_of_two_models_do_not_wait_for_one_another(engine: EngineProcess) -> None:
    other = started()
    cancelled = threading.Event()
    try:
        call = Background(lambda: ask(other, "wait", cancelled.is_set))
        assert is_usable(engine)
        assert not call.ended
        cancelled.set()
        call.result()
    finally:
        other.close()


@pytest.fixture
def fake_embedder() -> Iterator[EngineProcess]:
    entry = {
        "id": "m",
        "task": "embed",
        "engine": "fake",
        "dimensions": 16,
        "fake_mode": "slow",
        "fake_delay_seconds": 0.02,
    }
    made = EngineProcess(ModelEntry.model_validate(entry), Path("/"), "ml_rag.server.engines.fake")
    yield made
    made.close()


def test_vectors_come_as_they_are(fake_embedder: EngineProcess) -> None:
    expected = FakeEmbed(ModelEntry.model_validate({"id": "m", "task": "embed", "engine": "fake", "dimensions": 16}))
    texts = ["one two", "größer \ud800", ""]
    vectors = fake_embedder.embed(texts, never)
    assert vectors.dtype == np.float32
    assert (vectors == expected.embed(texts, never)).all()
    assert fake_embedder.embed([], never).shape == (0, 16)
    assert (fake_embedder.dimensions, fake_embedder.max_tokens, fake_embedder.tokenizer()) == (16, 256, None)


def test_a_cancelled_embedding_ends_and_its_process_goes_on(fake_embedder: EngineProcess) -> None:
    pid, cancelled = fake_embedder.pid, threading.Event()
    threading.Timer(0.2, cancelled.set).start()
    began = time.monotonic()
    assert not fake_embedder.embed(["one"] * 100, cancelled.is_set).any()
    assert time.monotonic() - began < 100 * 0.02
    assert fake_embedder.embed(["one"], never).any()
    assert fake_embedder.pid == pid


def test_texts_that_are_far_too_long_are_cut_before_they_are_sent(fake_embedder: EngineProcess) -> None:
    most = BYTES_PER_TOKEN * 256
    just, past = fake_embedder.embed(["a " + "b" * (most - 2), "a " + "b" * (most + 5)], never)
    assert (just == past).all()


def test_scores_come_as_they_are() -> None:
    made = EngineProcess(
        ModelEntry.model_validate({"id": "m", "task": "rerank", "engine": "fake"}),
        Path("/"),
        "ml_rag.server.engines.fake",
    )
    assert made.rerank("one two", ["two", "three", "two one"], never).tolist() == [0.5, 0, 1]
    made.close()
