"""The model extractive in SQL: ml_rag, ml_generate, chat, many questions."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Connection, Database, value_of
from support.hostile_server import hostile, reply
from support.models_server import ModelsServer
from support.nodes import create
from support.stores import answer, create_store, error, fake_embedding, warnings_of

TEXTS = {
    "travel.md": [
        "Hotels are paid in full. The hotel limit is 180 euros in London. Ask your manager first.",
        "Trains are free.",
    ],
    "meals.md": ["- Breakfast is free.\n- Dinner costs up to 40 euros."],
}
MODEL = {"model_id": "extractive"}


@pytest.fixture
def store(owner: Connection) -> None:
    rows = [
        (name, number, place, text, fake_embedding(text))
        for number, (name, texts) in enumerate(TEXTS.items(), start=1)
        for place, text in enumerate(texts, start=1)
    ]
    create_store(owner, "handbook", rows, type="vector(16)")


def rag(connection: Connection, query: str, model_options: Any = None, **options: Any) -> Any:
    return answer(connection, query, {"model_options": {**MODEL, **(model_options or {})}, **options})


@pytest.mark.usefixtures("store")
def test_an_answer_is_sentences_of_its_citations(asker: Connection) -> None:
    for query in ("hotel limit in London", "what does dinner cost", "is breakfast free", "trains"):
        for n in (1, 2, 10):
            found = rag(asker, query, {"max_sentences": n}, n_citations=3)
            text = found["text"]
            for citation in found["citations"]:
                for sentence in citation["segment"].replace("\n", ". ").split(". "):
                    text = text.replace(sentence, "")
            assert not text.strip(" .\n"), found["text"]
    found = rag(asker, "the hotel limit in London", {"max_sentences": 1}, n_citations=2)
    assert found["text"] == "The hotel limit is 180 euros in London."


def test_without_citations_there_is_nothing_to_answer_from(asker: Connection) -> None:
    with error("22023", "answers from documents only", '"n_citations" is 0', "at least one citation", "model_options"):
        rag(asker, "the hotel limit in London", n_citations=0)
    assert rag(asker, "the hotel limit in London", n_citations=0, skip_generate=True)["citations"] == []


@pytest.mark.usefixtures("store")
def test_markers_name_the_citation(asker: Connection) -> None:
    found = rag(asker, "what does dinner cost", {"max_sentences": 1}, prompt={"citation_style": "numbered"})
    place = next(i for i, c in enumerate(found["citations"], start=1) if "Dinner" in c["segment"])
    assert found["text"] == f"- Dinner costs up to 40 euros. [{place}]"


@pytest.mark.usefixtures("store")
def test_it_abstains_where_no_sentence_is_good_enough(asker: Connection) -> None:
    limits = {"retrieval_options": {"max_distance": 2}, "abstain_text": "No idea."}
    found = rag(asker, "the hotel limit in London", {"min_support": 1}, **limits)
    assert (found["text"], found["citations"]) == ("No idea.", [])
    with warnings_of(asker) as warnings:
        found = rag(asker, "the hotel limit in London", {"min_support": 0}, **limits)
        assert found["text"].endswith("180 euros in London.")
        assert len(found["citations"]) == 2
    assert warnings == []


@pytest.mark.usefixtures("store")
def test_without_abstain_it_warns(asker: Connection) -> None:
    with warnings_of(asker) as warnings:
        found = rag(asker, "the hotel limit in London", {"min_support": 1})
    assert found["text"].endswith("180 euros in London.")
    assert len(found["citations"]) == 3
    assert warnings == [("WARNING", "01000", "no sentence answers the question well")]


def test_ml_generate_takes_them_out_of_the_context(module_asker: Connection) -> None:
    def generate(prompt: str, **options: Any) -> str:
        return value_of(module_asker, "SELECT ml_generate(%s, %s) ->> 'text'", (prompt, json.dumps(MODEL | options)))

    context = "\n".join(TEXTS["travel.md"])
    assert (
        generate("the hotel limit in London", context=context, max_sentences=1)
        == "The hotel limit is 180 euros in London."
    )
    assert generate(context, task="summarization", max_sentences=1) in context
    with error("22023", "documents only") as caught:
        generate("Who wrote Hamlet?")
    assert '"context"' in caught.hint
    with error("22023", "no JSON"):
        generate("q", context=context, json_schema={"type": "object"})


@pytest.mark.usefixtures("store")
def test_summaries_of_whole_documents(asker: Connection) -> None:
    found = rag(asker, "hotels", {"task": "summarization", "max_sentences": 1}, document_name=["travel.md"])
    assert found["retrieval_info"]["method"] == "document_order"
    assert found["text"] in " ".join(TEXTS["travel.md"])


@pytest.mark.usefixtures("store")
def test_chat_and_many_questions_take_it(owner: Connection, asker: Connection) -> None:
    options = json.dumps({"model_options": MODEL | {"max_sentences": 1}})
    found = value_of(asker, "SELECT ml_rag_chat('the hotel limit in London', %s)", (options,))
    assert "The hotel limit is 180 euros in London." in json.dumps(found)
    owner.execute("CREATE TABLE questions (id integer PRIMARY KEY, question text, answer jsonb)")
    owner.execute("INSERT INTO questions VALUES (1, 'the hotel limit in London')")
    owner.execute("CALL ml_rag_table('public.questions.question', 'public.questions.answer', %s)", (options,))
    row = owner.execute("SELECT answer ->> 'text' FROM questions").fetchone()
    assert row == ("The hotel limit is 180 euros in London.",)


@pytest.mark.usefixtures("store")
def test_it_is_a_setting_too(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('generate_model_id', 'extractive')")
    assert answer(asker, "trains", {"model_options": {"max_sentences": 1}})["text"]
    rows = asker.execute(
        "SELECT engine, task, available, is_default FROM ml_supported_models() WHERE model_id = 'extractive'"
    ).fetchall()
    assert rows == [("extractive", "generate", True, True)]


class AskedServer(ModelsServer):
    """A model server that keeps what it is asked to answer, and says nothing."""

    asked: dict[str, Any]

    def __call__(self, client: socket.socket, request: bytes) -> None:
        if b"/v1/chat/completions" not in request.split(b"\r\n")[0]:
            super().__call__(client, request)
            return
        self.asked = json.loads(request.partition(b"\r\n\r\n")[2])
        reply({"choices": [{"message": {"content": "."}, "finish_reason": "stop"}]})(client, request)

    @property
    def cosines(self) -> dict[str, float] | None:
        known = self.asked.get("known_cosines")
        return None if known is None else known["cosines"]


@pytest.fixture
def asked_server(owner: Connection, store: None, local_sockets: Path) -> Iterator[AskedServer]:
    with hostile(local_sockets, handler := AskedServer(), owner=owner):
        create(owner, "sentences", store="handbook", transform="sentence")
        yield handler


def test_sentences_of_a_node_group_are_known_by_their_stored_vectors(
    asker: Connection, asked_server: AskedServer
) -> None:
    rag(asker, "hotel limit", n_citations=1)
    vector = fake_embedding("hotel limit")
    sentences = ["Hotels are paid in full.", "The hotel limit is 180 euros in London.", "Ask your manager first."]
    cosines = [sum(a * b for a, b in zip(vector, fake_embedding(text), strict=True)) for text in sentences]
    assert asked_server.asked["known_cosines"]["vector"] == pytest.approx(vector, abs=1e-6)
    assert asked_server.cosines == pytest.approx(dict(zip(sentences, cosines, strict=True)), abs=1e-6)
    rag(asker, "hotel limit", n_citations=1, retrieval_options={"segment_overlap": 1})
    assert asked_server.cosines is not None
    assert set(asked_server.cosines) == {*sentences, "Trains are free."}
    assert "hotel limit" in asked_server.embedded("fake-embed")


def test_cosines_are_those_with_the_question_or_none(
    owner: Connection, asker: Connection, asked_server: AskedServer
) -> None:
    owner.execute("SELECT ml_rag.enable_keyword_search('handbook')")
    other = {"search": "semantic", "query": {"text": "trains"}}
    for options in (
        {"semantic_search": False, "keyword_search": True},
        {"arms": [other]},
        {"model_options": {**MODEL, "task": "summarization"}},
        {"model_options": {"model_id": "fake-generate"}},
    ):
        answer(asker, "hotel limit", {"model_options": MODEL, "n_citations": 1, **options})
        assert asked_server.cosines is None
    for options in ({"arms": [other, {"search": "semantic"}]}, {"arms": [{"search": "semantic", "in": "sentences"}]}):
        rag(asker, "hotel limit", n_citations=1, **options)
        assert asked_server.asked["known_cosines"]["vector"] == pytest.approx(fake_embedding("hotel limit"), abs=1e-6)


def test_a_node_group_of_another_model_is_left_alone(
    owner: Connection, asker: Connection, asked_server: AskedServer
) -> None:
    owner.execute("CALL ml_rag.add_embedding('handbook', 'next', '{\"embed_model_id\": \"other\"}')")
    owner.execute("SELECT ml_rag.use_embedding('handbook', 'next')")
    rag(asker, "hotel limit", n_citations=1, vector_store=["public.handbook"])
    assert asked_server.asked["embed_model"] == "other"
    assert asked_server.cosines is None


def test_a_node_group_that_cannot_be_read_ends_no_call(
    db: Database, owner: Connection, asker: Connection, asked_server: AskedServer
) -> None:
    """Nobody has asked for it: its vectors only spare the model some work."""
    asker.execute("SET statement_timeout = '5s'")
    for more in ({}, {"vector_store": ["public.handbook"]}):
        with db.connect().transaction(force_rollback=True) as transaction:
            transaction.connection.execute("LOCK TABLE handbook_sentences IN ACCESS EXCLUSIVE MODE")
            assert rag(asker, "hotel limit", n_citations=1, **more)["text"] == "."
        assert asked_server.cosines is None
        assert asker.execute("SHOW lock_timeout").fetchone() == ("0",)
    owner.execute(
        "CREATE FUNCTION fail() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN ASSERT false; END';"
        "CREATE POLICY p ON handbook_sentences AS RESTRICTIVE USING (public.fail())"
    )
    assert rag(asker, "hotel limit", n_citations=1)["text"] == "."
    assert asked_server.cosines is None


def test_hidden_sentences_are_not_read(owner: Connection, asker: Connection, asked_server: AskedServer) -> None:
    """Also those between segments that are cited as one, and where nodes may not be read at all."""
    owner.execute("ALTER TABLE handbook ENABLE ROW LEVEL SECURITY")
    owner.execute("CREATE POLICY p ON handbook USING (segment NOT LIKE 'Trains%')")
    rag(asker, "hotel limit", n_citations=1, retrieval_options={"segment_overlap": 1})
    assert asked_server.cosines is not None
    assert "Hotels are paid in full." in asked_server.cosines
    assert "Trains are free." not in asked_server.cosines
    owner.execute("REVOKE SELECT ON handbook_sentences FROM ml_rag_user")
    assert rag(asker, "hotel limit", n_citations=1)["text"] == "."
    assert asked_server.cosines is None


@pytest.mark.usefixtures("store")
def test_answers_are_the_same_with_stored_sentences(owner: Connection, asker: Connection) -> None:
    questions = ("hotel limit in London", "what does dinner cost", "is breakfast free", "trains")
    before = [rag(asker, question)["text"] for question in questions]
    create(owner, "sentences", store="handbook", transform="sentence")
    assert [rag(asker, question)["text"] for question in questions] == before
    # it is the stored vectors that count
    row = owner.execute("SELECT ml_rag.embed('what does dinner cost')").fetchone()
    assert row is not None
    owner.execute("UPDATE handbook_sentences SET node_embedding = %s WHERE node LIKE 'Trains%%'", row)
    one = {"max_sentences": 1, "min_support": 0.99}
    with warnings_of(asker) as warnings:
        assert rag(asker, "what does dinner cost", one)["text"] == "Trains are free."
    assert warnings == []
