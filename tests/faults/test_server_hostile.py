"""The model server slow, hanging, answering garbage, breaking off, with wrong dimensions, with NaN: on every path."""

from __future__ import annotations

from typing import Any

import pytest

from support.cluster import Connection
from support.faulty_proxy import (
    Fault,
    FaultyProxy,
    change,
    closed,
    garbage,
    hang,
    infinite,
    no_json,
    not_a_number,
    one_more,
    other_json,
    trickle,
    truncate,
    web_page,
)
from support.invariants import documents_of
from support.loading import counts, rows
from support.site import STORE, Site
from support.stores import error

#: what a call sends: path -> a call that does
PATHS: dict[str, str] = {
    "/v1/embeddings": "SELECT count(*) FROM ml_rag_search('topic3')",
    "/v1/chat/completions": "SELECT ml_rag_answer('topic3')",
    "/v1/rerank": "SELECT count(*) FROM ml_rag_search('topic3', '{\"rerank\": {}}')",
}
#: fault -> SQLSTATE and words of its message
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "hangs": (hang, "57014", "statement timeout"),
    "answers garbage": (garbage, "08006", "something that is not HTTP"),
    "breaks off": (truncate, "08006", "was lost"),
    "closes": (closed, "08006", "was lost"),
    "answers no JSON": (no_json, "38000", "unexpected reply"),
    "answers other JSON": (other_json, "38000", "unexpected reply"),
    "answers a web page": (web_page, "08006", "cannot be reached"),
    "answers NaN": (change(not_a_number), "38000", "unexpected reply"),
    "answers infinity": (change(infinite), "38000", "unexpected reply"),
}
NUMBERS = ("answers NaN", "answers infinity")
LASTING = {
    ("hangs", "/v1/chat/completions"),
    ("breaks off", "/v1/embeddings"),
    ("answers garbage", "/v1/rerank"),
}


def cases() -> list[Any]:
    found = []
    for fault in FAULTS:
        for path in PATHS:
            if not (fault in NUMBERS and "chat" in path):
                marks = () if (fault, path) in LASTING else (pytest.mark.slow,)
                found.append(pytest.param(fault, path, marks=marks, id=f"{fault}: {path}"))
    return found


def wait_less(connection: Connection, seconds: float) -> None:
    connection.execute(f"SET statement_timeout = {int(seconds * 1000)}")


@pytest.mark.parametrize(("fault", "path"), cases())
def test_one_call(site: Site, proxy: FaultyProxy, fault: str, path: str) -> None:
    how, sqlstate, words = FAULTS[fault]
    session = site.loaded()
    before = rows(session, PATHS[path])
    wait_less(session, 2)
    proxy.arm(path, how)
    with error(sqlstate, words, ours=sqlstate != "57014") as caught:
        session.execute(PATHS[path])
    assert proxy.spoilt == 1
    if sqlstate == "08006":
        assert "ml-rag serve" in caught.hint
    proxy.disarm()
    wait_less(session, 30)
    assert rows(session, PATHS[path]) == before
    site.verify()


@pytest.mark.parametrize("path", [pytest.param(path, marks=pytest.mark.slow) for path in PATHS])
def test_a_slow_one_is_waited_for(site: Site, proxy: FaultyProxy, path: str) -> None:
    session = site.loaded()
    before = rows(session, PATHS[path])
    proxy.arm(path, trickle)
    assert rows(session, PATHS[path]) == before
    assert proxy.spoilt == 1


LOADS: dict[str, tuple[Fault, str, str]] = {
    **{name: fault for name, fault in FAULTS.items() if name not in NUMBERS},
    "answers NaN": (change(not_a_number), "38000", "the embedding model failed"),
    "answers infinity": (change(infinite), "38000", "the embedding model failed"),
    "answers other dimensions": (change(one_more), "22000", "do not fit the vector store"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name == "breaks off" else (pytest.mark.slow,)) for name in LOADS]
)
def test_a_load(site: Site, proxy: FaultyProxy, fault: str) -> None:
    how, sqlstate, words = LOADS[fault]
    session = site.connect()
    session.execute("SELECT ml_rag.create_store(%s)", (STORE,))
    wait_less(session, 3)
    proxy.arm("/v1/documents", how)
    with error(sqlstate, words, ours=sqlstate != "57014"):
        site.load(session)
    assert proxy.spoilt == 1
    proxy.disarm()
    wait_less(session, 60)
    kept = documents_of(session, STORE)
    assert kept.items() <= site.undisturbed.documents.items()
    result = counts(site.load(session))
    assert result.get("unchanged", 0) == len(kept)
    assert sum(result.values()) == 40
    site.verify()


@pytest.mark.slow
def test_a_search_with_other_dimensions(site: Site, proxy: FaultyProxy) -> None:
    session = site.loaded()
    proxy.arm("/v1/embeddings", change(one_more))
    with error("22000", "differ in dimensions") as caught:
        session.execute(PATHS["/v1/embeddings"])
    assert "17 dimensions" in caught.detail
    assert "16" in caught.detail
    proxy.disarm()
    site.verify()


BATCHES: dict[str, tuple[str, str, str]] = {
    "ml_rag_table": ("jsonb", "/v1/chat/completions", '{"batch_size": 3}'),
    "ml_generate_table": ("jsonb", "/v1/chat/completions", '{"batch_size": 3}'),
    "ml_embed_table": ("vector(16)", "/v1/embeddings", '{"batch_size": 3}'),
}


def batch_cases() -> list[Any]:
    found = []
    for fault in FAULTS:
        for routine in BATCHES:
            if not (fault in NUMBERS and routine != "ml_embed_table"):
                marks = () if (fault, routine) == ("answers no JSON", "ml_rag_table") else (pytest.mark.slow,)
                found.append(pytest.param(fault, routine, marks=marks, id=f"{fault}: {routine}"))
    return found


@pytest.mark.parametrize(("fault", "routine"), batch_cases())
def test_a_batch_routine(site: Site, proxy: FaultyProxy, fault: str, routine: str) -> None:
    """A lost server ends the call; what it answers wrongly is an error of its row. The next call mends both."""
    how, sqlstate, words = FAULTS[fault]
    column, path, options = BATCHES[routine]
    session = site.loaded()
    session.execute("CREATE TABLE questions (id integer PRIMARY KEY, question text)")
    session.execute("INSERT INTO questions SELECT i, 'question ' || i FROM generate_series(1, 9) AS i")
    session.execute(f"ALTER TABLE questions ADD COLUMN answer {column}")
    call = f"CALL {routine}('public.questions.question', 'public.questions.answer', '{options}')"
    wait_less(session, 2)
    after = 4 if routine != "ml_embed_table" else 3  # the first tells the dimensions, then one a batch
    proxy.arm(path, _after(after, how))
    if sqlstate == "38000":
        result = rows(session, call)[0][0]
        assert (result["rows"], result["succeeded"] + result["failed"]) == (9, 9)
        assert result["failed"] > 0
        assert words in result["first_error"]
        assert "(38000)" in result["first_error"]
    else:
        with error(sqlstate, words, ours=sqlstate != "57014"):
            session.execute(call)
    written = "SELECT id, xmin::text FROM questions WHERE answer IS NOT NULL"
    if column == "jsonb":
        written += " AND answer ->> 'error' IS NULL"
    kept = rows(session, written + " ORDER BY id")
    assert [row[0] for row in kept] == [1, 2, 3]
    proxy.disarm()
    wait_less(session, 30)
    assert rows(session, call) == [({"rows": 6, "succeeded": 6, "failed": 0, "first_error": None},)]
    everything = rows(session, written + " ORDER BY id")
    assert [row[0] for row in everything] == list(range(1, 10))
    assert everything[:3] == kept
    session.execute("DROP TABLE questions")
    site.verify()


def _after(n: int, fault: Fault) -> Fault:
    """The fault from the n-th reply on."""
    seen = 0

    def spoil(client: Any, request: bytes, reply: bytes) -> None:
        nonlocal seen
        seen += 1
        if seen >= n:
            fault(client, request, reply)
        else:
            client.sendall(reply)

    return spoil
