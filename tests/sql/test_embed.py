"""pipeline/embed and the way to the model server: models, errors, and servers that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import hostile_server
from support.cluster import Connection
from support.embedding import UNIT, embed
from support.hostile_server import HostileServer, embeddings, encoded, endless, head, reply, send
from support.stores import create_store, error, fake_embedding, search


@pytest.mark.parametrize("text", ["cats chase mice", "one", "a a a b", "!", "MiXeD Case_1"])
def test_the_embedding_is_the_models(module_asker: Connection, text: str) -> None:
    expected = fake_embedding(text) if text != "!" else [1.0] + [0.0] * 15
    assert embed(module_asker, text) == pytest.approx(expected, abs=1e-6)
    assert embed(module_asker, text, embed_model_id="fake-embed") == pytest.approx(expected, abs=1e-6)


def test_the_stage_and_the_public_routine_agree(module_asker: Connection) -> None:
    assert module_asker.execute("SELECT ml_rag.embed('a b') = ml_embed_row('a b')").fetchone() == (True,)
    assert module_asker.execute("SELECT ml_rag.embed('a b', 'fake-embed') = ml_embed_row('a b')").fetchone() == (True,)


def test_empty_text_is_refused_and_no_text_has_no_embedding(module_asker: Connection) -> None:
    for text in ("", " ", "\n\t"):
        with error("22023", "empty"):
            embed(module_asker, text)
    assert module_asker.execute("SELECT ml_embed_row(NULL)").fetchone() == (None,)


@pytest.mark.parametrize(
    ("model", "state", "words", "hint"),
    [
        ("no-such-model", "22023", "no-such-model", ""),
        ("fake-generate", "22023", "fake-generate", ""),
        ("fake-rerank", "22023", "fake-rerank", ""),
        ("all_minilm_l6_v2", "55000", "all_minilm_l6_v2", "pull"),
        ("fake-embed-nan", "38000", "not finite", ""),
    ],
    ids=["unknown", "of another task", "of another task too", "without its files", "answers NaN"],
)
def test_a_model_that_cannot(module_asker: Connection, model: str, state: str, words: str, hint: str) -> None:
    with error(state, words) as caught:
        embed(module_asker, embed_model_id=model)
    assert hint in caught.hint


def test_embeddings_of_another_dimension_meet_the_store(owner: Connection, asker: Connection) -> None:
    create_store(owner, type="vector(7)")
    with error("22000", "16", "7"):
        search(asker, "hello")


# -- servers that misbehave -------------------------------------------------------------------------------------------


def test_a_proper_answer_passes(behave: Callable[..., HostileServer], session: Connection) -> None:
    server = behave(reply(embeddings([0.25, -1e-40, 3e38])))
    assert embed(session) == pytest.approx([0.25, -1e-40, 3e38], rel=1e-5, abs=1e-44)
    assert b"POST /v1/embeddings" in server.requests[0]
    assert b'"hello"' in server.requests[0]
    embed(session)
    embed(session)
    assert server.connections == 1


NONSENSE: dict[str, Any] = {
    "empty": b"",
    "no json": b"<html>it works</html>",
    "cut json": b'{"data": [',
    "not utf-8": b'{"data": "\xff\xfe"}',
    "null": None,
    "array": [],
    "number": 7,
    "text": "x",
    "no data": {},
    "data null": {"data": None},
    "data text": {"data": "abc"},
    "no embeddings": {"data": []},
    "two embeddings": embeddings(UNIT, UNIT),
    "items are numbers": {"data": [1]},
    "no index": {"data": [{"embedding": encoded(UNIT)}]},
    "wrong index": {"data": [{"index": 7, "embedding": encoded(UNIT)}]},
    "index text": {"data": [{"index": "0", "embedding": encoded(UNIT)}]},
    "embedding null": {"data": [{"index": 0, "embedding": None}]},
    "embedding number": {"data": [{"index": 0, "embedding": 1}]},
    "embedding of floats": {"data": [{"index": 0, "embedding": [1.0, 0.0]}]},
    "no vector": {"data": [{"index": 0, "embedding": "%%%"}]},
    "two brackets": {"data": [{"index": 0, "embedding": "[[1],[2]]"}]},
    "surrogate": b'{"data": [{"index": 0, "embedding": "[\\ud800]"}]}',
    "different dimensions": {"data": [{"index": 0, "embedding": "[0.5]"}, {"index": 1, "embedding": "[0.5,1]"}]},
    "empty embedding": embeddings([]),
    "nan": embeddings([1.0, float("nan")]),
    "infinity": embeddings([float("inf"), 0.0]),
    "too many dimensions": embeddings([0.5] * 16001),
    "deep": b"[" * 100_000,
    "long number": b'{"data": ' + b"9" * 5000 + b"}",
}
#: numbers that only pgvector can refuse
REFUSED = {
    vector: {"data": [{"index": 0, "embedding": vector}]}
    for vector in ("[1.2.3]", "[1,,2]", "[1,]", "1[]", "[0.5,3.5e38]")
}


@pytest.mark.parametrize("name", NONSENSE | REFUSED)
def test_nonsense_is_an_error_of_the_model(
    behave: Callable[..., HostileServer], session: Connection, name: str
) -> None:
    server = behave(reply((NONSENSE | REFUSED)[name]))
    with error("38000", *(["unexpected reply"] if name in REFUSED else [])) as caught:
        embed(session)
    assert "internal error" not in caught.message, caught.detail
    # the session goes on with a server that has come to its senses
    server.handler = reply(embeddings(UNIT))
    assert embed(session) == UNIT


@pytest.mark.parametrize(
    ("status", "body", "sqlstate"),
    [
        ("400 Bad Request", {"error": {"message": "bad thing", "code": "invalid_request"}}, "22023"),
        ("404 Not Found", {"error": {"message": "bad thing", "code": "model_not_found"}}, "22023"),
        ("400 Bad Request", {"error": {"message": "bad thing", "code": "wrong_task"}}, "22023"),
        ("400 Bad Request", {"error": {"message": "bad thing", "code": "dimension_mismatch"}}, "22000"),
        ("403 Forbidden", {"error": {"message": "bad thing", "code": "forbidden"}}, "42501"),
        ("503 Unavailable", {"error": {"message": "bad thing", "code": "model_unavailable"}}, "55000"),
        ("429 Too Many", {"error": {"message": "bad thing", "code": "queue_full"}}, "53300"),
        ("502 Bad Gateway", {"error": {"message": "bad thing", "code": "server_unreachable"}}, "08006"),
        ("500 Error", {"error": {"message": "bad thing", "code": "engine_failed"}}, "38000"),
        ("500 Error", {"error": {"message": "bad thing", "code": "of another kind"}}, "38000"),
        ("500 Error", {"error": {"message": "bad thing", "code": ["x"]}}, "38000"),
    ],
)
def test_the_servers_errors_come_out_as_sql_errors(
    behave: Callable[..., HostileServer], session: Connection, status: str, body: Any, sqlstate: str
) -> None:
    body["error"] |= {"detail": "these are the facts", "hint": "Do this."}
    behave(reply(body, status))
    with error(sqlstate) as caught:
        embed(session)
    assert (caught.message, caught.detail, caught.hint) == ("bad thing", "these are the facts", "Do this.")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *(
            (body, [])
            for body in (b"", b"<html>", {}, {"error": "x"}, {"error": {}}, {"error": {"message": 7}}, [], None)
        ),
        ({"error": {"message": ""}}, []),
        (
            b'{"error": {"message": "nul \\u0000 lone \\ud800 %s", "code": "engine_failed", "detail": "\\u0000"}}',
            ["nul"],
        ),
    ],
    ids=str,
)
def test_an_error_of_another_form(
    behave: Callable[..., HostileServer], session: Connection, body: Any, words: list[str]
) -> None:
    behave(reply(body, "500 Internal Server Error"))
    with error("38000", *words):
        embed(session)


BROKEN: dict[str, hostile_server.Handler] = {
    "garbage": send(b"\x00\xff\x13garbage\r\n\r\n", close=True),
    "garbage without end": endless(b"", b"garbage" * 100),
    "another protocol": send(b"SSH-2.0-OpenSSH_9.2\r\n", close=True),
    "closes at once": send(b"", close=True),
    "closes in the head": send(b"HTTP/1.1 200 OK\r\nContent-Le", close=True),
    "closes in the body": send(head(1000) + b'{"data": [', close=True),
    "closes in a chunk": send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc", close=True),
    "no chunk": send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}", close=True),
    "header without end": endless(b"HTTP/1.1 200 OK\r\n", b"X-Filler: abc\r\n"),
    "line without end": endless(b"HTTP/1.1 200 OK\r\nX: ", b"abc" * 100),
    "status of words": send(b"HTTP/1.1 two hundred\r\n\r\n", close=True),
    "length of words": send(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", close=True),
}


@pytest.mark.parametrize("handler", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_not_http_or_breaks_off_is_a_connection_failure(
    behave: Callable[..., HostileServer], session: Connection, handler: hostile_server.Handler
) -> None:
    server = behave(handler)
    with error("08006") as caught:
        embed(session)
    assert server.address in caught.detail
    assert "ml-rag serve" in caught.hint
    server.handler = reply(embeddings(UNIT))
    assert embed(session) == UNIT


def test_a_request_that_ended_the_server_is_not_sent_again(
    behave: Callable[..., HostileServer], session: Connection
) -> None:
    server = behave(reply(embeddings(UNIT)))
    embed(session)
    server.handler = send(b"", close=True)
    with error("08006", "was lost"):
        embed(session)
    assert len(server.requests) == 2
    server.handler = reply(embeddings(UNIT))
    assert embed(session) == UNIT
    assert (len(server.requests), server.connections) == (3, 2)


def test_server_down(module_owner: Connection, behave: Callable[..., HostileServer], session: Connection) -> None:
    server = behave(reply(embeddings(UNIT)))
    assert embed(session) == UNIT
    server.close()
    for _ in range(2):
        with error("08006", server.address) as caught:
            embed(session)
        assert "ml-rag serve" in caught.hint
    # and back, under the same address
    behave(reply(embeddings([0.0, 1.0])), Path(server.address.removeprefix("unix:")).name)
    assert embed(session) == [0.0, 1.0]


@pytest.mark.parametrize("name", ["restarted.sock", None])
def test_another_server_goes_unnoticed(
    behave: Callable[..., HostileServer], session: Connection, name: str | None
) -> None:
    """Restarted under its address, or under another one, between calls of a running session."""
    for vector in ([1.0], [2.0], [3.0]):
        server = behave(reply(embeddings(vector)), *([name] if name else []))
        assert embed(session) == vector
        if name:
            server.close()


@pytest.mark.parametrize(
    "address", ["unix:/no/such/socket", "unix:/" + "x" * 200, "http://127.0.0.1:1", "unix:/tmp", "http://[::1]:1/"]
)
def test_addresses_nobody_answers_at(module_owner: Connection, session: Connection, address: str) -> None:
    (before,) = module_owner.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone() or ("",)
    module_owner.execute("SELECT ml_rag.configure('model_server', %s)", (address,))
    try:
        with error("08006", address):
            embed(session)
    finally:
        module_owner.execute("SELECT ml_rag.configure('model_server', %s)", (before,))


def test_embedding_twice_in_one_statement(module_asker: Connection) -> None:
    rows = module_asker.execute("SELECT ml_embed_row(t)::text FROM unnest(ARRAY['a', 'b', 'a']) AS t").fetchall()
    assert rows[0] == rows[2] != rows[1]


def test_a_text_that_is_too_long_is_cut_or_an_error(module_asker: Connection) -> None:
    """fake-embed takes in 256 words."""
    longest, cut = " ".join(["a"] * 256), " ".join(["a"] * 256 + ["b"])
    for text in (longest, cut):
        assert embed(module_asker, text) == pytest.approx(fake_embedding("a"), abs=1e-6)
    assert embed(module_asker, longest, truncate=False) == pytest.approx(fake_embedding("a"), abs=1e-6)
    with error("22023", "longer than the model takes in", "257 tokens; the model takes in 256"):
        embed(module_asker, cut, truncate=False)
    with error("22023", "longer than the model takes in"):
        embed(module_asker, "a" * 1_000_000, truncate=False)
    assert embed(module_asker, "a" * 1_000_000) == pytest.approx(fake_embedding("a" * 1_000_000), abs=1e-6)
