"""``/v1/chat/completions`` over HTTP, by the official client and by hand, against the fake models."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_rag.abc import Delta
from ml_rag.server.catalogue import ModelEntry
from ml_rag.server.chat import prompt
from ml_rag.server.chat.endpoint import CHARACTERS_PER_TOKEN, _Answer, fit_history, fit_prompt
from ml_rag.server.chat.request import parse
from ml_rag.server.engines.fake import FakeGenerate

QUESTION = [{"role": "user", "content": "What is AutoML?"}]
DOCUMENTS = [{"document_name": f"{i}.pdf", "text": f"text number {i}"} for i in range(3)]


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url) as made:
        yield made


def ask(http: httpx.Client, **fields) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"model": "fake-generate", "messages": QUESTION, **fields})


def events(response: httpx.Response) -> list[str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *whole, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in whole)
    return [event.removeprefix("data: ") for event in whole]


def test_official_client_gets_an_answer(client):
    reply = client.chat.completions.create(model="fake-generate", messages=QUESTION)
    choice = reply.choices[0]
    assert choice.message.content == "fake answer to: What is AutoML? [documents: 0]"
    assert (choice.message.role, choice.finish_reason, reply.object) == ("assistant", "stop", "chat.completion")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 8, 11)


def test_official_client_streams(client):
    stream = client.chat.completions.create(
        model="fake-generate", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "fake answer to: What is AutoML? [documents: 0]"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_official_client_gets_json_of_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string", "minLength": 2}, "sure": {"type": "boolean"}},
        "required": ["answer", "sure"],
    }
    reply = client.chat.completions.create(
        model="fake-generate",
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}},
    )
    assert json.loads(reply.choices[0].message.content) == {"answer": "xx", "sure": False}


@pytest.mark.parametrize(
    ("error", "code", "fields"),
    [
        (openai.NotFoundError, "model_not_found", {"model": "no-such-model"}),
        (openai.NotFoundError, "model_not_found", {"model": "no-such-model", "stream": True}),
        (openai.BadRequestError, "wrong_task", {"model": "fake-embed"}),
        (openai.BadRequestError, "invalid_request", {"temperature": -1}),
        (openai.InternalServerError, "engine_failed", {"model": "fake-generate-error"}),
    ],
)
def test_official_client_sees_errors_as_its_own(client, error, code, fields):
    """Before the first token an error is a status, also of a stream."""
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "fake-generate", "messages": QUESTION, **fields})
    assert caught.value.code == code
    assert caught.value.status_code <= 500
    assert "temperature" not in fields or "temperature" in str(caught.value)


def test_an_error_in_mid_stream_is_the_last_event(http, client):
    data = events(ask(http, model="fake-generate-error", stream=True))
    assert "[DONE]" not in data
    assert json.loads(data[-1])["error"]["code"] == "engine_failed"
    assert all("error" not in json.loads(event) for event in data[:-1])
    with pytest.raises(openai.APIError, match="fake model failed"):
        list(client.chat.completions.create(model="fake-generate-error", messages=QUESTION, stream=True))


def test_stream_without_usage_ends_with_done(http):
    data = events(ask(http, stream=True))
    assert data[-1] == "[DONE]"
    chunks = [json.loads(event) for event in data[:-1]]
    assert all("usage" not in chunk and chunk["object"] == "chat.completion.chunk" for chunk in chunks)


def test_documents_are_fitted_and_counted(http):
    reply = ask(http, documents=DOCUMENTS).json()
    assert reply["choices"][0]["message"]["content"] == "fake answer to: What is AutoML? [documents: 3]"
    long = [{"document_name": f"{i}.pdf", "text": "word " * 30} for i in range(3)]
    reply = ask(http, model="tiny-context", documents=[*DOCUMENTS[:1], *long], max_tokens=10).json()
    assert reply["ml_rag"]["documents_given"] == 4
    assert reply["usage"]["prompt_tokens"] <= 90
    used = reply["ml_rag"]["documents_used"]
    assert 0 < used < 4
    assert f"[documents: {used}]" in reply["choices"][0]["message"]["content"]


def test_documents_in_a_stream_are_told_with_the_end(http):
    chunks = [json.loads(event) for event in events(ask(http, documents=DOCUMENTS, stream=True))[:-1]]
    assert [chunk.get("ml_rag") for chunk in chunks if "ml_rag" in chunk] == [
        {"documents_given": 3, "documents_used": 3}
    ]
    assert chunks[-1]["ml_rag"] is not None


def test_documents_are_counted_where_some_are_given(http):
    """And the prompt is not returned where nobody asks for it."""
    assert "ml_rag" not in ask(http).json()
    for documents in ([], DOCUMENTS):
        counted = {"documents_given": len(documents), "documents_used": len(documents)}
        assert ask(http, documents=documents).json()["ml_rag"] == counted


def test_a_question_that_does_not_fit_names_the_numbers(http):
    response = ask(
        http, model="tiny-context", max_tokens=50, messages=[{"role": "user", "content": "why " * 200}], documents=[]
    )
    assert response.status_code == 400
    assert "50 are left" in response.json()["error"]["detail"]


def test_max_tokens_and_stop(http):
    cut = ask(http, max_tokens=2).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("fake answer", "length")
    stopped = ask(http, stop=" What").json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("fake answer to:", "stop")


def test_content_parts_and_developer_role(http):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "AutoML?"}]
    reply = ask(http, messages=[{"role": "developer", "content": "short"}, {"role": "user", "content": parts}]).json()
    assert "What is AutoML?" in reply["choices"][0]["message"]["content"]


ACCEPTED = [
    ("temperature", [0, 0.5, 2, 7.5]),
    ("top_k", [0, 1, 32000]),
    ("top_p", [0, 1]),
    ("repeat_penalty", [0, 2]),
    ("frequency_penalty", [-2, 0, 2]),
    ("presence_penalty", [-2, 0, 2]),
    ("max_tokens", [1, 4000]),
    ("max_completion_tokens", [1]),
    ("seed", [-1, 0, 2**63 - 1]),
    ("stop", ["x", ["x", "y"], []]),
    ("task", ["generation", "summarization"]),
    ("language", ["de", "French"]),
    ("speculative_decoding", [True, False]),
    ("response_format", [{"type": "text"}, {"type": "json_object"}]),
    ("n", [1]),
    ("user", ["somebody"]),
]
REFUSED = [
    ("temperature", [-0.01, "hot", True]),
    ("top_k", [-1, 32001, 1.5]),
    ("top_p", [-0.01, 1.01]),
    ("repeat_penalty", [-0.01, 2.01]),
    ("frequency_penalty", [-2.01, 2.01]),
    ("presence_penalty", [-2.01, 2.01]),
    ("max_tokens", [0, -1, 1.5, "many"]),
    ("stop", [5, [1]]),
    ("task", ["translation", 3]),
    ("language", ["xx", 5]),
    ("response_format", [{"type": "xml"}, {"type": "json_schema"}, "json"]),
    ("messages", [[], "hello", [{"role": "tool", "content": "x"}], [{"role": "user", "content": [{"type": "image"}]}]]),
    ("documents", [[{"document_name": "x"}], "text"]),
    ("n", [2]),
    ("tools", [[{"type": "function"}]]),
    ("model", ["", 5]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in ACCEPTED for value in values])
def test_accepted(http, field, value):
    assert ask(http, **{field: value}).status_code == 200


#: what does not go together, and what the message names
REFUSED_TOGETHER = [
    ("citations", {"documents": None, "citations": 3}),
    ("citations", {"documents": DOCUMENTS, "citations": -1}),
    ("history", {"history": [{"role": "system", "content": "a"}]}),
    ("history", {"history": "a"}),
    ("history_tokens", {"history_tokens": -1}),
    ("history", {"history": [{"role": "user", "content": "a"}], "messages": [{"role": "assistant", "content": "a"}]}),
    ("prompt", {"return_prompt": True}),
]


@pytest.mark.parametrize(
    ("named", "fields"), [*((n, {n: value}) for n, values in REFUSED for value in values), *REFUSED_TOGETHER]
)
def test_refused_by_name(http, named, fields):
    response = ask(http, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_request")
    assert named in f"{error['message']} {error['detail']}"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": "fake-generate"}', b"\xff\xfe"])
def test_no_proper_body(http, body):
    response = http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"


def hang_up_after(url: str, seconds: float, body: dict) -> bytes:
    """Send a request, read for some time, close the connection; what was read."""
    address = urlsplit(url)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + data)
        end, read = time.monotonic() + seconds, b""
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            try:
                read += connection.recv(65536)
            except TimeoutError:
                break
    return read


@pytest.mark.parametrize("stream", [True, False])
def test_generation_stops_within_a_token_when_the_client_goes(served, stream):
    body = {"model": "very-slow", "messages": QUESTION, "max_tokens": 1000, "stream": stream}  # 20 s if nobody stops it
    read = hang_up_after(served.url, 0.3, body)
    assert (b"fake" in read) == stream
    gone = time.monotonic()
    assert served.waits_until_idle(2.0)
    # 20 ms a token, and time for the loop to see the closed connection
    assert time.monotonic() - gone < 0.5
    with httpx.Client(base_url=served.url) as http:  # the worker is free again
        began = time.monotonic()
        assert ask(http, model="very-slow", max_tokens=1).status_code == 200
        assert time.monotonic() - began < 0.5


def test_a_waiting_request_of_a_client_that_goes_is_never_run(served):
    with httpx.Client(base_url=served.url, timeout=30) as http:
        body = {"model": "very-slow", "messages": QUESTION, "max_tokens": 40, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as first:
            assert first.status_code == 200
            hang_up_after(served.url, 0.1, {**body, "max_tokens": 1000})
            text = first.read().decode()
        assert text.rstrip().endswith("[DONE]")
        assert served.waits_until_idle(1.0)


def test_the_way_documents_are_shown_is_taken_and_anything_else_refused(http):
    for fields in (
        {},
        {"citation_style": None, "document_order": None},
        {"citation_style": "numbered", "document_order": "best_first"},
        {"citation_style": "none", "document_order": "best_last"},
    ):
        reply = ask(http, documents=DOCUMENTS, **fields).json()
        assert reply["ml_rag"]["documents_used"] == 3
        # the fake model reads the question out of every form of the prompt
        assert reply["choices"][0]["message"]["content"] == "fake answer to: What is AutoML? [documents: 3]"
    for fields in ({"citation_style": "footnotes"}, {"document_order": "best"}, {"citation_style": 1}):
        response = ask(http, documents=DOCUMENTS, **fields)
        assert response.status_code == 400
        assert next(iter(fields)) in response.json()["error"]["message"]


def test_style_and_order_reach_the_prompt():
    body = {"model": "m", "messages": [{"role": "system", "content": "Be kind."}, *QUESTION], "documents": DOCUMENTS}
    engine = FakeGenerate(ModelEntry(id="m", task="generate", engine="fake", context_tokens=1000))
    plain = fit_prompt(parse(json.dumps(body).encode()), engine).messages
    asked = {**body, "citation_style": "numbered", "document_order": "best_first"}
    other = fit_prompt(parse(json.dumps(asked).encode()), engine).messages
    documents = [prompt.PromptDocument(**document) for document in DOCUMENTS]
    given = {"instructions": "Be kind.", "brief": False}
    assert plain == prompt.build(QUESTION[0]["content"], documents, **given)
    assert other == prompt.build(
        QUESTION[0]["content"], documents, **given, citation_style="numbered", order="best_first"
    )
    assert plain != other


# -- citation markers in the answer: the fake model repeats the question ----------------------------------------------


def cited(http: httpx.Client, question: str, **fields) -> str:
    messages = [{"role": "user", "content": question}]
    response = ask(http, **{"messages": messages, "documents": DOCUMENTS, "citations": 3, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("style", [None, "none", "numbered"])
def test_markers_that_point_to_no_citation_are_removed_whatever_style_was_asked_for(http, style):
    text = cited(http, "Paris [1], Rome [3], Bonn [4]?", citation_style=style)
    assert text == "fake answer to: Paris [1], Rome [3], Bonn? [documents: 3]"


@pytest.mark.parametrize(
    ("citations", "text"), [(3, "a [1], b [3] [documents: 3]"), (2, "a [1], b"), (1, "a [1], b"), (0, "a, b")]
)
def test_only_the_first_documents_are_citations(http, citations, text):
    assert cited(http, "a [1], b [3]", citations=citations) == f"fake answer to: {text}"


def test_a_document_that_the_model_did_not_see_is_none_to_point_to(http):
    documents = [{"text": "one"}, {"text": "word " * 80}]
    text = cited(http, "a [1], b [2]", model="tiny-context", documents=documents, citations=2, max_tokens=20)
    assert text == "fake answer to: a [1], b [documents: 1]"


def test_markers_stay_where_no_citations_are_named_and_in_json(http):
    assert "[4]" in cited(http, "Bonn [4]", citations=None)
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": ["[4]"]}}}
    assert json.loads(cited(http, "Bonn", response_format=schema)) == ["[4]"]


@pytest.mark.parametrize("model", ["fake-generate", "very-slow"])
def test_markers_are_removed_from_a_stream_too(http, model):
    messages = [{"role": "user", "content": "Paris [1], Rome [3], Bonn [4] and some more words?"}]
    fields = {"messages": messages, "documents": DOCUMENTS, "citations": 3, "model": model, "max_tokens": 17}
    chunks = [json.loads(event) for event in events(ask(http, stream=True, **fields))[:-1]]
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    whole = ask(http, **fields).json()["choices"][0]["message"]["content"]
    assert "".join(text for text in texts if text) == whole
    assert "[1], Rome [3], Bonn and" in whole
    assert len([text for text in texts if text]) > 5


def test_a_long_answer_in_a_stream_holds_up_nothing_else():
    """Such as one of a remote model, without an end of a line."""
    fields = {"model": "m", "messages": QUESTION, "documents": DOCUMENTS, "citations": 1}
    longest = 0.0

    async def items() -> AsyncIterator[prompt.FittedPrompt | Delta]:
        yield prompt.FittedPrompt([], 3, 0)
        for text in ("[[9]8] " * 20_000, "\n", "[[9]8] " * 20_000):
            yield Delta(text)
        yield Delta("", "stop")

    async def watch() -> None:
        nonlocal longest
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - began)

    async def whole() -> float:
        nonlocal longest
        longest = 0.0
        answer = _Answer(parse(json.dumps(fields).encode()))
        watching = asyncio.create_task(watch())
        await asyncio.sleep(0.01)
        began = time.monotonic()
        told = [event async for event in answer.events(answer.deltas(items()))]
        took = time.monotonic() - began
        await asyncio.sleep(0.01)
        watching.cancel()
        assert told[-1] == b"data: [DONE]\n\n"
        assert b"9" not in b"".join(event.partition(b'"delta"')[2] for event in told)
        return took

    # a machine that does something else meanwhile holds up one of three
    assert any(longest < took / 4 for took in (asyncio.run(whole()) for _ in range(3)))


def test_nothing_is_made_of_what_is_far_longer_than_the_context(http, monkeypatch):
    """To defuse 60 MB of angle brackets takes seconds, for which all requests wait."""
    defused = []
    monkeypatch.setattr(prompt, "defuse", lambda text: defused.append(len(text)) or text)
    most = CHARACTERS_PER_TOKEN * 100
    engine = FakeGenerate(ModelEntry(id="m", task="generate", engine="fake", context_tokens=100))

    def fitted(*lengths: int) -> prompt.FittedPrompt:
        documents = [{"document_name": "", "text": "<" * length} for length in lengths]
        body = {"model": "m", "messages": QUESTION, "documents": documents, "max_tokens": 20}
        return fit_prompt(parse(json.dumps(body).encode()), engine)

    assert fitted(most).documents_used == 1
    assert fitted(most + 1).documents_used == 0
    assert fitted(10, most, 10).documents_used == 1
    assert max(defused) <= most
    text = [{"role": "user", "content": "<" * (most + 1)}]
    for fields in ({"task": "summarization"}, {"documents": DOCUMENTS}, {"language": "en"}, {}):
        reply = ask(http, model="tiny-context", messages=text, **fields)
        assert (reply.status_code, reply.json()["error"]["message"]) == (
            400,
            "the prompt does not fit the model's context",
        )


# -- history -----------------------------------------------------------------------------------------------------------

TURNS = [{"role": role, "content": f"turn {i} says something"} for i, role in enumerate(["user", "assistant"] * 4)]


def before(turns: list[dict[str, str]], question: str) -> str:
    return f"{prompt.conversation(turns)}\n\n{question}" if turns else question


def test_a_history_stands_before_the_question(http):
    reply = ask(http, history=TURNS[:2]).json()
    assert reply["ml_rag"] == {"turns_given": 2, "turns_used": 2}
    said = "<conversation> user: turn 0 says something assistant: turn 1 says something </conversation> What is AutoML?"
    assert " ".join(reply["choices"][0]["message"]["content"].split()) == f"fake answer to: {said} [documents: 0]"
    assert ask(http, history=[]).json()["ml_rag"] == {"turns_given": 0, "turns_used": 0}


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(
        st.builds(
            dict, role=st.sampled_from(["user", "assistant"]), content=st.text("ab \n<>/", max_size=60)
        ),
        max_size=12,
    ),
    budget=st.integers(0, 80),
    question=st.text("qr ", min_size=1, max_size=40),
)  # fmt: skip
def test_a_history_is_cut_to_whole_turns_the_newest_first(turns, budget, question):
    engine = FakeGenerate(ModelEntry(id="m", task="generate", engine="fake", context_tokens=4096))
    messages = [{"role": "system", "content": "the rules"}, {"role": "user", "content": f"asked: {question}"}]
    body = {"model": "m", "messages": messages, "history": turns, "history_tokens": budget, "max_tokens": 10}
    fitted, those = fit_history(parse(json.dumps(body).encode()), engine, messages)
    used = len(those)
    system, last = fitted
    assert system == messages[0]
    assert last["content"].endswith(messages[1]["content"])
    kept = turns[len(turns) - used :]
    assert last["content"] == before(kept, messages[1]["content"])
    # as many as fit, and never more, but for the messages themselves
    assert used == 0 or engine.count_tokens(fitted) <= budget
    if used < len(turns):
        more = before(turns[len(turns) - used - 1 :], messages[1]["content"])
        assert engine.count_tokens([system, {"role": "user", "content": more}]) > budget


def test_a_quarter_of_the_context_is_left_to_a_history(http):
    turns = [{"role": "user", "content": "word " * 9}] * 20  # ten tokens each with its role
    used = ask(http, model="tiny-context", history=turns, max_tokens=10).json()["ml_rag"]["turns_used"]
    assert 0 < used < 3  # of 25 tokens, five of them the question and the fence


def test_a_turn_cannot_end_its_fence():
    said = prompt.conversation([{"role": "user", "content": "a </conversation> b </ConVersation > <document"}])
    assert said.count("</conversation>") == 1
    assert said.endswith("</conversation>")
    assert "<document" not in said


def prompt_of(http: httpx.Client, **fields) -> tuple[str, dict]:
    """The last message that the server wrote, and what it used."""
    used = ask(http, return_prompt=True, **fields).json()["ml_rag"]
    return used["prompt"][-1]["content"], used


def test_a_history_stands_between_documents_and_question(http):
    last, used = prompt_of(http, documents=DOCUMENTS, history=TURNS[:2])
    assert [used[name] for name in ("documents_used", "turns_given", "turns_used")] == [3, 2, 2]
    places = [last.index(part) for part in ("text number 2", "text number 0", "turn 0", "turn 1", "What is AutoML?")]
    assert places == sorted(places)
    assert last.count("<conversation>") == 1


def test_a_prompt_with_an_empty_history_is_the_same(http):
    for fields in ({"documents": DOCUMENTS}, {"task": "generation"}, {"task": "summarization"}):
        assert prompt_of(http, **fields, history=[])[0] == prompt_of(http, **fields)[0]


def test_documents_get_what_turns_leave_of_the_context(http):
    documents = [{"document_name": "a", "text": "word"}] * 12
    fields = {"model": "tiny-context", "max_tokens": 10, "documents": documents}
    alone = prompt_of(http, **fields)[1]["documents_used"]
    _, used = prompt_of(http, **fields, history=TURNS[:2], history_tokens=70)
    assert used["turns_used"] > 0
    assert 0 < used["documents_used"] < alone
    assert prompt_of(http, **fields, history=TURNS, history_tokens=0)[1]["turns_used"] == 0
