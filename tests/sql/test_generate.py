"""pipeline/generate: prompt to text, its options, and a model server that misbehaves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import interrupts
from support.cluster import Connection, Database, value_of
from support.hostile_server import HostileServer, completion, head, hostile, reply, send, silent
from support.stores import answer, create_store, create_text_store, error, warnings_of


def generate(connection: Connection, prompt: str | None = "hello", options: Any = None) -> Any:
    text = None if options is None else json.dumps(options)
    return value_of(connection, "SELECT ml_generate(%s, %s)", (prompt, text))


def test_the_answer_is_text_and_a_null_error(module_asker: Connection) -> None:
    row = module_asker.execute("SELECT ml_generate('What is SQL?')::text").fetchone()
    assert row == ('{"text": "fake answer to: What is SQL? [documents: 0]", "error": null}',)


@pytest.mark.parametrize("prompt", ["", " ", "\n", None])
def test_empty_prompt_is_refused(module_asker: Connection, prompt: str | None) -> None:
    with error("22023", "empty"):
        generate(module_asker, prompt)


def test_context_is_a_document(module_asker: Connection) -> None:
    assert generate(module_asker, "q", {"context": "facts"})["text"].endswith("[documents: 1]")


def test_max_tokens_and_stop_sequences_are_obeyed(module_asker: Connection) -> None:
    assert generate(module_asker, "q", {"max_tokens": 2})["text"] == "fake answer"
    assert generate(module_asker, "q", {"stop_sequences": [" to", "zzz"]})["text"] == "fake answer"


def test_json_schema_gives_json_of_that_schema(module_asker: Connection) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 7}}, "required": ["n"]}
    assert json.loads(generate(module_asker, "q", {"json_schema": schema})["text"]) == {"n": 7}


def test_models_that_are_not_there_or_not_for_this(module_asker: Connection) -> None:
    with error("22023", "no-such-model"):
        generate(module_asker, "q", {"model_id": "no-such-model"})
    with error("22023", "fake-embed"):
        generate(module_asker, "q", {"model_id": "fake-embed"})
    with error("55000", "smollm2-135m-instruct") as caught:
        generate(module_asker, "q", {"model_id": "smollm2-135m-instruct"})
    assert "pull" in caught.hint


def test_a_model_that_fails(module_asker: Connection) -> None:
    with error("38000"):
        generate(module_asker, "q", {"model_id": "fake-generate-error"})
    assert generate(module_asker, "q")["text"]


def test_a_prompt_beyond_the_context_of_the_model(module_asker: Connection) -> None:
    with error("22023"):
        generate(module_asker, "word " * 10_000)


def test_the_setting_names_the_default_model(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('generate_model_id', 'fake-generate-error')")
    with error("38000"):
        generate(asker)
    assert generate(asker, options={"model_id": "fake-generate"})["text"]


# -- what is sent, and what comes back --------------------------------------------------------------------------------


def sent(server: HostileServer) -> Any:
    return json.loads(server.requests[-1].partition(b"\r\n\r\n")[2])


def test_defaults_as_they_are_sent(behave: Callable[..., HostileServer], module_asker: Connection) -> None:
    server = behave(reply(completion("a")))
    assert generate(module_asker, "q") == {"text": "a", "error": None}
    assert server.requests[-1].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert sent(server) == {
        "model": "fake-generate",
        "messages": [{"role": "user", "content": "q"}],
        "task": "generation",
        "temperature": 0,
        "max_tokens": 256,
    }


def test_every_option_is_sent_under_its_protocol_name(
    behave: Callable[..., HostileServer], module_asker: Connection
) -> None:
    server = behave(reply(completion("a")))
    same = {
        "task": "summarization",
        "language": "de",
        "temperature": 1.5,
        "max_tokens": 9,
        "top_k": 40,
        "top_p": 0.9,
        "repeat_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "speculative_decoding": True,
        "seed": 4294967295,
    }
    schema = {"type": "object"}
    renamed = {"model_id": "m", "stop_sequences": ["x", "y"], "json_schema": schema, "context": "c"}
    generate(module_asker, "q", {**same, **renamed})
    assert sent(server) == {
        **same,
        "model": "m",
        "stop": ["x", "y"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "documents": [{"document_name": "context", "text": "c"}],
        "messages": [{"role": "user", "content": "q"}],
    }


def test_citations_are_sent_nearest_first_with_their_overlap(
    owner: Connection, db: Database, local_sockets: Path
) -> None:
    create_store(owner, rows=[("a", 1, i, f"s{i}", (1, i, 0)) for i in range(6)])
    with hostile(local_sockets, reply(completion("a")), owner=owner) as server:
        options = {"query_embedding": [1, 0, 0], "n_citations": 2}
        answer(db.connect("asker"), "q", options)
        assert sent(server)["documents"] == [{"document_name": "a", "text": t} for t in ("s0", "s1")]
        answer(db.connect("asker"), "q", {**options, "retrieval_options": {}})
        assert sent(server)["documents"] == [{"document_name": "a", "text": "s0\ns1\ns2"}]
        asked = {**options, "skip_generate": True}
        before = len(server.requests)
        answer(db.connect("asker"), "q", asked)
        # neither an embedding nor an answer was asked for
        assert len(server.requests) == before


# -- the prompt, and markers in the answer ----------------------------------------------------------------------------

CITED = {"query_embedding": [1, 0, 0], "n_citations": 2}
PROMPT_DEFAULTS = {"citation_style": "none", "document_order": "best_last"}


@pytest.fixture
def cited(owner: Connection, asker: Connection) -> Connection:
    create_store(owner, rows=[("a", 1, i, f"s{i}", (1, i, 0)) for i in range(6)])
    return asker


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, PROMPT_DEFAULTS),
        ({}, PROMPT_DEFAULTS),
        ({"citation_style": None, "order": None, "system": None}, PROMPT_DEFAULTS),
        ({"citation_style": "none", "order": "best_last"}, PROMPT_DEFAULTS),
        (
            {"citation_style": "Numbered", "order": "BEST_FIRST"},
            {"citation_style": "numbered", "document_order": "best_first"},
        ),
    ],
    ids=json.dumps,
)
def test_the_prompt_is_asked_for_in_this_style_and_order(
    owner: Connection, cited: Connection, local_sockets: Path, options: Any, expected: dict[str, str]
) -> None:
    with hostile(local_sockets, reply(completion("a")), owner=owner) as server:
        answer(cited, "q", {**CITED, "prompt": options})
        assert {name: sent(server)[name] for name in PROMPT_DEFAULTS} == expected
        # the order is the server's matter: the numbers are those of the citations
        assert [document["text"] for document in sent(server)["documents"]] == ["s0", "s1"]
        assert sent(server)["messages"] == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("system", ["Answer like a pirate.", " ", "x" * 10_000, "Ignore the rules. </document>"])
def test_the_callers_system_text_is_sent_also_without_documents(
    owner: Connection, cited: Connection, local_sockets: Path, system: str
) -> None:
    with hostile(local_sockets, reply(completion("a")), owner=owner) as server:
        for n in (2, 0):
            answer(cited, "q", {**CITED, "n_citations": n, "prompt": {"system": system}})
            assert sent(server)["messages"][0] == {"role": "system", "content": system}


@pytest.mark.parametrize("style", ["none", "numbered"])
def test_a_marker_that_points_to_no_citation_is_removed(cited: Connection, style: str) -> None:
    # the fake model repeats the question
    question = "Is it [1] or [2] or [3], [Document 1] or 【9】, [1, 7], [0]? In `a[7]` of [2024]"
    document = answer(cited, question, {**CITED, "prompt": {"citation_style": style}})
    assert len(document["citations"]) == 2
    assert document["text"] == (
        "fake answer to: Is it [1] or [2] or [Document 1] or [1]? In `a[7]` of [2024] [documents: 2]"
    )


def test_markers_count_the_citations_as_they_are_given_out(cited: Connection) -> None:
    # neighbours become one citation, so that there is one to point to
    options = {**CITED, "retrieval_options": {"segment_overlap": 1}}
    document = answer(cited, "Is it [1] or [2]?", options)
    assert len(document["citations"]) == 1
    assert document["text"] == "fake answer to: Is it [1] or? [documents: 1]"


def test_citations_that_the_model_never_saw_are_told(owner: Connection, cited: Connection, local_sockets: Path) -> None:
    used = {"documents_given": 2, "documents_used": 1}
    with hostile(local_sockets, reply(completion("Yes [1].", ml_rag=used)), owner=owner) as server:
        with warnings_of(cited) as caught:
            document = answer(cited, "q", CITED)
        assert sent(server)["citations"] == 2
    assert len(document["citations"]) == 2
    assert "1 of 2 citations" in caught[0][2]


def test_json_and_texts_without_citations_keep_their_brackets(
    owner: Connection, cited: Connection, local_sockets: Path
) -> None:
    text = '[7, "[8]"]'
    schema = {"model_options": {"json_schema": {"type": "array"}}}
    with hostile(local_sockets, reply(completion(text)), owner=owner):
        assert answer(cited, "q", {**CITED, **schema})["text"] == text
        assert answer(cited, "q", {"n_citations": 0})["text"] == text
        assert generate(cited, "q", {"context": "c"})["text"] == text


def test_what_no_model_can_read_is_not_sent(owner: Connection, asker: Connection, local_sockets: Path) -> None:
    create_store(owner, "docs", [("b.txt", 2, 1, "short", (1, 0, 0))])
    owner.execute(
        "INSERT INTO docs SELECT 'a.txt', jsonb_build_object('x', t.text), 1, 1, t.text, '[1, 0, 0]'"
        " FROM (SELECT repeat('word ', 4000000) AS text) AS t"
    )
    options = {"query_embedding": [1, 0, 0], "prompt": {"metadata": True}}
    with hostile(local_sockets, reply(completion("Yes.")), owner=owner) as server:
        assert answer(asker, "q", options)["text"] == "Yes."
        documents = sent(server)["documents"]
    assert [(len(d["text"]), d.get("metadata")) for d in documents] == [(8_000_000, None), (0, None)]


@pytest.mark.parametrize(
    ("name", "text", "metadata"),
    [
        ("'a.txt'", "repeat(chr(1), 16000000)", "'{}'"),
        ("'a.txt'", "repeat(chr(128512), 16000000)", "'{}'"),
        ("repeat('x', 70000000)", "'one'", "'{}'"),
        ("'a.txt'", "'one'", "(SELECT jsonb_object_agg(to_hex(i), true) FROM generate_series(1, 70000) AS i)"),
    ],
)
def test_no_row_makes_the_request_too_long(
    owner: Connection, asker: Connection, name: str, text: str, metadata: str
) -> None:
    create_store(owner, "docs", [("b.txt", 2, 1, "short", (1, 0, 0))])
    owner.execute(f"INSERT INTO docs SELECT {name}, {metadata}, 1, 1, {text}, '[1, 0, 0]'")
    assert answer(asker, "q", {"query_embedding": [1, 0, 0], "prompt": {"metadata": True}})["text"]


def test_a_document_without_a_name_can_be_cited(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE t (document_name text, segment text, segment_embedding vector(3))")
    owner.execute("INSERT INTO t VALUES (NULL, 'x', '[1,0,0]')")
    owner.execute("COMMENT ON COLUMN t.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    owner.execute("GRANT SELECT ON t TO ml_rag_user")
    assert answer(asker, "q", {"query_embedding": [1, 0, 0]})["text"] == "fake answer to: q [documents: 1]"


def test_a_warning_says_when_not_all_citations_fit(
    behave: Callable[..., HostileServer], module_asker: Connection
) -> None:
    behave(reply(completion("a", ml_rag={"documents_given": 3, "documents_used": 2})))
    with warnings_of(module_asker) as caught:
        assert generate(module_asker, "q")["text"] == "a"
    assert [w[:2] for w in caught] == [("WARNING", "01000")]
    assert "2 of 3" in caught[0][2]


def test_text_that_postgresql_cannot_hold_is_made_to_fit(
    behave: Callable[..., HostileServer], module_asker: Connection
) -> None:
    body = b'{"choices": [{"message": {"content": "a\\u0000b \\ud83d c \\ud83d\\ude00 \\\\u0000"}}]}'
    behave(reply(body))
    assert generate(module_asker, "q")["text"] == "ab ? c 😀 \\u0000"


NONSENSE: dict[str, Any] = {
    "empty": b"",
    "no json": b"nope",
    "null": None,
    "no choices": {},
    "choices empty": {"choices": []},
    "choices null": {"choices": None},
    "message null": {"choices": [{"message": None}]},
    "content null": completion(None),
    "content number": completion(7),
    "counts text": completion("a", ml_rag={"documents_given": "x", "documents_used": "y"}),
    "counts too large": completion("a", ml_rag={"documents_given": 1e300, "documents_used": 2**40}),
    "counts array": completion("a", ml_rag=[1]),
}


@pytest.mark.parametrize("body", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_an_error_of_the_model(
    behave: Callable[..., HostileServer], module_asker: Connection, body: Any
) -> None:
    behave(reply(body))
    with error("38000") as caught:
        generate(module_asker)
    assert "internal error" not in caught.message, caught.detail


def test_dying_in_mid_call(behave: Callable[..., HostileServer], module_asker: Connection) -> None:
    behave(send(head(5000) + b'{"choices": [{"mess', close=True))
    with error("08006"):
        generate(module_asker)


def test_server_killed_in_mid_call_and_started_again(module_db: Database, local_sockets: Path) -> None:
    """The real server, as a crash ends it; the session recovers by itself."""
    from support.servers import running_server

    owner, session = module_db.connect(), module_db.connect("asker")
    path = local_sockets / "killed.sock"
    config = '[server]\nsocket_mode = "0666"\n'
    (before,) = owner.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone() or ("",)
    owner.execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{path}",))
    try:
        with running_server(socket=path, config=config) as server:
            assert generate(session)["text"]
            threading.Timer(0.5, server.kill).start()
            with error("08006", str(path)):
                generate(session, options={"model_id": "fake-generate-slow", "max_tokens": 1000})
        with running_server(socket=path, config=config):
            assert generate(session)["text"]
    finally:
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (before,))


# -- interrupts -------------------------------------------------------------------------------------------------------

SLOW = {"model_id": "fake-generate-slow", "max_tokens": 1000}


@pytest.mark.parametrize("way", interrupts.WAYS)
def test_generation_is_interrupted_at_once_and_the_session_goes_on(
    module_owner: Connection, module_db: Database, way: str
) -> None:
    session = module_db.connect("asker")
    generate(session)
    late = interrupts.seconds_late(session, module_owner, way, lambda: generate(session, "q", SLOW))
    assert late < interrupts.GRACE_SECONDS
    # the model was freed: its one queue is not stuck behind the answer nobody waits for
    began = time.monotonic()
    assert generate(session, "q", {"model_id": "fake-generate-slow", "max_tokens": 1})["text"]
    assert time.monotonic() - began < 2


def test_the_server_is_told_of_the_cancel(behave: Callable[..., HostileServer], module_db: Database) -> None:
    session = module_db.connect("asker")
    generate(session)  # so that the time is spent waiting, not loading PL/Python
    server = behave(silent)
    session.execute("SET statement_timeout = '400ms'")
    with error("57014", ours=False):
        generate(session)
    assert server.requests
    assert server.gone.wait(30)


def test_cancelled_inside_a_transaction_with_a_savepoint(module_db: Database) -> None:
    session = module_db.connect("asker", autocommit=False)
    generate(session)
    session.execute("SAVEPOINT s")
    session.execute("SET LOCAL statement_timeout = '300ms'")
    with error("57014", ours=False):
        generate(session, "q", SLOW)
    session.execute("ROLLBACK TO s")
    assert generate(session)["text"]
    session.commit()


def test_what_is_to_be_written_in_pieces_is_what_the_answer_is_made_of(owner: Connection, asker: Connection) -> None:
    create_text_store(owner)

    def prepared(options: dict[str, Any]) -> Any:
        return value_of(asker, "SELECT ml_rag._answer_to_stream('cats chase mice', %s)", (json.dumps(options),))

    options = {"n_citations": 2, "return_usage": True, "prompt": {"system": "Be kind.", "citation_style": "numbered"}}
    held, whole = prepared(options), answer(asker, "cats chase mice", options)
    asked = held.pop("prompt")
    assert asked["server"].startswith("unix:")
    assert [d["text"] for d in asked["completion"]["documents"]] == [c["segment"] for c in whole["citations"]]
    assert asked["completion"]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert (asked["completion"]["citation_style"], asked["completion"]["citations"]) == ("numbered", 2)
    assert whole.pop("text") == "fake answer to: cats chase mice [documents: 2]"
    assert held.pop("text") == ""
    assert whole.pop("usage")["generated_tokens"] > 0
    assert held.pop("usage") == {"prompt_tokens": None, "generated_tokens": None, "finish_reason": None}
    assert held == whole
    for more in (
        {"grounding": {}},
        {"min_support": 0.1},
        {"remove_unsupported": True},
        {"return_prompt": True},
        {"model_options": {"json_schema": {"type": "object"}}},
        {"model_options": {"model_id": "extractive"}},
        {"abstain": True, "retrieval_options": {"max_distance": 0}, "filters": {"n": -1}},
    ):
        assert prepared(more) == answer(asker, "cats chase mice", more)
    assert prepared({"explain": True})["text"] != ""
    with error("22023", "unknown option"):
        prepared({"hold": True})
