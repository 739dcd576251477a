"""The process of a generation model ends, hangs, or is cancelled in the middle of its work; all else goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import Connection
from support.loading import rows
from support.processes import children, command, cpu_seconds, gone, wait_until
from support.real_model import model_path
from support.site import Site
from support.stores import error
from support.supervised_server import SupervisedServer, supervised_server

__all__ = ["model_path"]

pytestmark = pytest.mark.models

IDLE_SECONDS = 3
LONG = json.dumps({"model_id": "native", "max_tokens": 1500, "temperature": 1})
SHORT = json.dumps({"model_id": "native", "max_tokens": 3})
ASK = "SELECT ml_generate('Tell me a very long story about a whale.', %s)"
SEARCH = "SELECT count(*) FROM ml_rag_search('topic3')"


@pytest.fixture(scope="module")
def server(place: Path, model_path: Path) -> Iterator[SupervisedServer]:
    more = f"""
[models.native]
task = "generate"
engine = "llama-cpp"
context_tokens = 2048
loop_guard = false
idle_unload_seconds = {IDLE_SECONDS}
sources = [{{ path = "{model_path}" }}]
"""
    with supervised_server(place, more=more) as running:
        yield running


def workers(site: Site) -> list[int]:
    return [pid for pid in children(site.server.pid) if "engines.worker" in command(pid)]


def at_work(site: Site) -> int:
    """The process once it generates."""
    wait_until(lambda: site.server.is_at_work("native"), 30)
    wait_until(lambda: workers(site) and cpu_seconds(workers(site)[0]) > 1, 30)
    return workers(site)[0]


def generates(session: Connection) -> bool:
    answer = rows(session, ASK, SHORT)[0][0]
    return bool(answer["text"]) and answer["error"] is None


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_ended_in_mid_call(site: Site, number: signal.Signals) -> None:
    session, other = site.connect(), site.loaded()
    server = site.server.pid
    call = site.background(lambda: session.execute(ASK, (LONG,)))
    engine = at_work(site)
    queued = site.background(lambda: generates(site.connect()))
    wait_until(lambda: site.server.metric('ml_rag_queue_depth{model="native"}') > 0)
    os.kill(engine, number)
    assert rows(other, SEARCH) == [(3,)]
    with error("38000", "process of model native", f"signal {int(number)} ({number.name})"):
        call.result()
    assert queued.result(60)
    assert site.server.pid == server
    assert workers(site) != [engine]
    site.verify()


def test_ended_between_two_calls(site: Site) -> None:
    session = site.loaded()
    assert generates(session)
    engine = workers(site)[0]
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: site.server.metric('ml_rag_model_loaded{model="native"}') == 0)
    assert generates(session)
    assert site.server.metric('ml_rag_model_loaded{model="native"}') == 1
    site.verify()


def test_cancelled_in_mid_call(site: Site) -> None:
    session, other = site.connect(), site.loaded()
    call = site.background(lambda: session.execute(ASK, (LONG,)))
    engine = at_work(site)
    other.execute("SELECT pg_cancel_backend(%s::integer)", (session.info.backend_pid,))
    with error("57014"):
        call.result()
    wait_until(lambda: not site.server.is_at_work("native"), 1)
    before = cpu_seconds(engine)
    assert generates(session)
    assert workers(site) == [engine]
    assert cpu_seconds(engine) - before < 5
    site.verify()


def test_one_that_does_not_stop_when_it_is_cancelled(site: Site) -> None:
    session, other = site.connect(), site.loaded()
    call = site.background(lambda: session.execute(ASK, (LONG,)))
    engine = at_work(site)
    os.kill(engine, signal.SIGSTOP)
    other.execute("SELECT pg_cancel_backend(%s::integer)", (session.info.backend_pid,))
    with error("57014"):
        call.result()
    assert rows(other, SEARCH) == [(3,)]
    wait_until(lambda: gone(engine), 5)
    assert generates(session)
    site.verify()


def test_an_idle_model_gives_its_memory_back(site: Site) -> None:
    session = site.loaded()
    assert generates(session)
    engine = workers(site)[0]
    assert site.server.metric('ml_rag_model_loaded{model="native"}') == 1
    wait_until(lambda: gone(engine), IDLE_SECONDS + 10)
    assert workers(site) == []
    assert site.server.metric('ml_rag_model_loaded{model="native"}') == 0
    assert generates(session)
    site.verify()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_it_ends_with_its_server(site: Site, is_stopped: bool) -> None:
    session = site.loaded()
    call = site.background(lambda: session.execute(ASK, (LONG,)))
    engine = at_work(site)
    if is_stopped:
        os.kill(engine, signal.SIGSTOP)
    site.server.kill()
    with error("08006"):
        call.result()
    wait_until(lambda: gone(engine), 2)
    assert generates(session)
    site.verify()
