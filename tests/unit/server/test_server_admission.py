"""server/admission.py: who may wait for a model, and when who may not is to come back."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ml_rag.errors import QueueFull, retry_after, try_again
from ml_rag.protocol import BULK, ROUTINES
from ml_rag.server.admission import Admission, Caller, current_caller
from support.model_server_process import client
from support.servers import running_server

ONE, OTHER = ("cluster", 10), ("cluster", 11)


@contextlib.contextmanager
def asked(admission: Admission, role: tuple[str, int] | None = None, *, is_bulk: bool = False) -> Iterator[None]:
    """A request that has been admitted."""
    token = current_caller.set(None if role is None else Caller(role, is_bulk))
    try:
        place = admission.place()
        place.__enter__()
    finally:
        current_caller.reset(token)
    with contextlib.ExitStack() as stack:
        stack.push(place)
        yield


def admitted(admission: Admission, role: tuple[str, int] | None = None, *, is_bulk: bool = False) -> list[QueueFull]:
    """How many more requests of a role are admitted, a list as long as that, and then the refusal."""
    with contextlib.ExitStack() as stack:
        for n in range(1000):
            try:
                stack.enter_context(asked(admission, role, is_bulk=is_bulk))
            except QueueFull as error:
                return [error] * n
    raise AssertionError("nothing was refused")


def test_a_role_takes_half_of_the_places_and_bulk_work_a_quarter() -> None:
    admission = Admission("m", 16, 0)
    # with the one that would be worked on
    refused = admitted(admission, ONE)
    assert (len(refused), refused[0].message) == (9, "the queue of model m is full for this role")
    refused = admitted(admission, ONE, is_bulk=True)
    assert (len(refused), refused[0].message) == (5, "the queue of model m is full for bulk work")
    refused = admitted(admission)
    assert (len(refused), refused[0].message) == (16, "the queue of model m is full")
    assert admission.waiting == 0
    assert refused[0].sqlstate == "53300"


def test_one_roles_bulk_leaves_others_their_questions() -> None:
    admission = Admission("m", 16, 0)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(asked(admission, ONE, is_bulk=True))
        # bulk work of others counts with it, questions of the role itself do not
        with pytest.raises(QueueFull, match="for bulk work"):
            stack.enter_context(asked(admission, OTHER, is_bulk=True))
        assert len(admitted(admission, OTHER)) == 9
        assert len(admitted(admission, ONE)) == 4
    assert len(admitted(admission, OTHER, is_bulk=True)) == 5


def test_a_small_queue_has_a_place_for_everybody() -> None:
    admission = Admission("m", 1, 0)
    for is_bulk in (False, True):
        assert len(admitted(admission, ONE, is_bulk=is_bulk)) == 1


def test_what_would_wait_too_long_is_refused_with_a_time_to_come_back() -> None:
    admission = Admission("m", 256, 40)
    admission.works(1)
    admission.worked(1, 10)
    (*_, error) = admitted(admission)
    assert len(admitted(admission)) == 4
    assert error.detail == "4 requests are waiting, which takes about 40 s"
    assert (error.hint or "").startswith("Try again in 10 s.")
    assert len(admitted(admission, ONE)) == 3
    assert len(admitted(admission, ONE, is_bulk=True)) == 2
    # those that take less may wait in greater number; a mean follows what they take
    for _ in range(30):
        admission.works(1)
        admission.worked(1, 1)
    assert len(admitted(admission)) == 40
    # no bound, and before anything is known
    for unbounded in (Admission("m", 20, 0), Admission("m", 20, 1e-3)):
        assert len(admitted(unbounded)) == 20


def test_the_mean_of_a_batch_is_that_of_its_requests() -> None:
    admission = Admission("m", 256, 40)
    admission.works(4)
    assert admission.running == 4
    admission.worked(4, 8)
    assert admission.running == 0
    assert len(admitted(admission)) == 20


@pytest.mark.parametrize(("seconds", "told"), [(0, 1), (0.2, 1), (1, 1), (1.01, 2), (119.5, 120)])
def test_a_hint_names_whole_seconds(seconds: float, told: int) -> None:
    assert retry_after(try_again(seconds)) == told
    assert retry_after(f"{try_again(seconds)} Or raise it. Leave it out.") == told


def test_another_hint_names_none() -> None:
    for hint in (None, "", "Try again.", "Try again in s.", "Try again in 12 minutes.", "Try again in 12345678 s."):
        assert retry_after(hint) is None


def test_bulk_work_is_of_routines_there_are() -> None:
    assert BULK < ROUTINES
    assert "ml_rag" not in BULK


def test_a_session_that_fills_a_table_waits_behind_those_that_ask(tmp_path: Path) -> None:
    config = "[server]\nmax_queue = 4\n[models.fake-generate-slow]\nfake_delay_seconds = 0.1\n"

    def ask(routine: str, role: int, replies: list[httpx.Response]) -> None:
        now = time.time()
        call = [f"6f-{role}", 5, 100, 1, [], [role, routine, now, "generate", now, "m", "", now, None]]
        body = {"model": "fake-generate-slow", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
        with client(running.socket, timeout=60) as http:
            headers = {"X-ML-RAG-Call": json.dumps(call)}
            replies.append(http.post("/v1/chat/completions", json=body, headers=headers))

    with running_server(socket=tmp_path / "s.sock", config=config) as running:
        bulk: list[httpx.Response] = []
        questions: list[httpx.Response] = []
        ask("ml_rag", 10, questions)
        assert questions[0].status_code == 200, questions[0].text
        threads = []
        for routine, role, replies, n in (("ml_rag_table", 10, bulk, 5), ("ml_rag", 11, questions, 2)):
            for _ in range(n):
                threads.append(threading.Thread(target=ask, args=(routine, role, replies)))
                threads[-1].start()
                time.sleep(0.05)
        for thread in threads:
            thread.join()
        assert [reply.status_code for reply in questions] == [200] * 3
        refused = [reply for reply in bulk if reply.status_code == 429]
        # one is worked on, one waits
        assert len(refused) == 3
        for reply in refused:
            assert "for bulk work" in reply.json()["error"]["message"]
            assert int(reply.headers["retry-after"]) == retry_after(reply.json()["error"]["hint"])
