"""The engine ``extractive``: its sentences by hand, and as a model of a running server."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest

from ml_rag.abc import Sampling
from ml_rag.server.engines import extractive
from ml_rag.server.engines.extractive import ExtractiveEngine, Question, words_of
from support.servers import RunningServer

TRAVEL = "# Travel\n\nHotels are paid in full. The limit is 140 euros in Germany, 180 euros in London. Ask Dr. Smith."
MEALS = (
    "## Meals\n- Breakfast is free.\n- Dinner costs up to 40 euros.\n\n| City | Breakfast |\n|---|---|\n| Oslo | 15 |"
)
ENGINE = ExtractiveEngine(32768)


def words_alone(questions: Sequence[str], texts: Sequence[str]) -> None:
    return None


def say(question: str, *documents: str, sentences: int = 1, sampling: Sampling | None = None, **keys: Any) -> str:
    asked = Question(question, documents, sentences, **keys)
    found = ENGINE.extract(asked, words_alone)
    return "".join(delta.text for delta in ENGINE.deltas(asked, found, sampling or Sampling()))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the hotel limit in London?", "The limit is 140 euros in Germany, 180 euros in London."),
        ("How much may dinner cost?", "- Dinner costs up to 40 euros."),
        ("Breakfast, Oslo", "| Oslo | 15 |"),
    ],
)
def test_the_best_sentence_is_taken_as_it_stands(question: str, answer: str) -> None:
    assert say(question, TRAVEL, MEALS) == answer


@pytest.mark.parametrize(
    ("question", "document", "answer"),
    [
        ("伦敦的限额是多少？", "酒店由公司承担。伦敦的限额是一百八十英镑。", "伦敦的限额是一百八十英镑。"),
        ("本社は何階ですか", "受付は一階です。本社は十二階です。駐車場はない。", "本社は十二階です。"),
        ("서울 지점은 언제 엽니까?", "부산 지점은 크다. 서울 지점은 2021년 개점.", "서울 지점은 2021년 개점."),
        ("Wann öffnet die Bar?", "Die Bar ist neu. Die Bar öffnet um 11 Uhr.", "Die Bar öffnet um 11 Uhr."),
        ("متى يفتح المكتب؟", "المكتب كبير. يفتح المكتب في 9 صباحا. شكرا.", "يفتح المكتب في 9 صباحا."),
    ],
)  # fmt: skip
def test_other_languages(question: str, document: str, answer: str) -> None:
    assert say(question, document) == answer


def test_a_heading_or_a_question_is_answered_by_what_follows() -> None:
    faq = "Where do I park my car?\n\nUse level B2.\n\nWhere do I eat?\n\nOn the third floor."
    assert say("Where do I park my car?", faq) == "Use level B2."
    assert say("hotel limits", "# Hotel limits\n\nAt most 140 euros.\n\nTrains are free.") == "At most 140 euros."


def test_a_row_of_a_table_has_the_words_of_its_header() -> None:
    table = "| City | Hotel limit a night |\n|---|---|\n| London | 180 euros |\n| Paris | 170 euros |"
    assert say("What is the hotel limit in Paris?", table) == "| Paris | 170 euros |"
    assert say("Is there a hotel limit?", "| City | Hotel limit |\n|---|---|") == ""


def test_the_first_row_of_a_table_without_a_header() -> None:
    table = "| Contact | Anna Smith |\n|---|---|\n| Manager | Bob Jones |"
    assert say("Who is the contact?", table).startswith("| Contact | Anna Smith |")
    assert say("Who is the manager?", table) == "| Manager | Bob Jones |"


def test_a_statement_in_the_words_of_the_question_answers_it() -> None:
    assert say("Is the gym free?", "# Gym\n\nThe gym is free. Courses cost 10 euros a month.") == "The gym is free."


def test_sentences_stand_in_the_order_of_the_documents_with_their_markers() -> None:
    text = say("London limit, dinner costs", TRAVEL, MEALS, sentences=2, markers=2)
    assert text == "The limit is 140 euros in Germany, 180 euros in London. [1]\n- Dinner costs up to 40 euros. [2]"
    assert say("London limit, dinner costs", TRAVEL, MEALS, sentences=2, markers=1).endswith("40 euros.")


def test_numbers_in_brackets_of_a_document_are_not_markers() -> None:
    text = "Dinner costs 40 euros [1], [2, 3] or 【1】 [1](http://a.example) [[1]2] [Document 1]."
    assert say("dinner costs", text) == text
    said = say("dinner costs", text, MEALS, markers=2)
    assert said == "Dinner costs 40 euros (1), (2, 3) or (1) (1)(http://a.example) [(1)2] (Document 1). [1]"


def test_at_most_max_sentences_and_none_twice() -> None:
    text = "Red apples are sweet. Red apples are cheap. Red apples are here."
    assert [len(say("red apples", text, text, sentences=n).split(". ")) for n in (1, 2, 3, 10)] == [1, 2, 3, 3]


def test_full_width_stops_need_no_blank() -> None:
    assert say("苹果", "苹果很甜。苹果很红。", sentences=2) == "苹果很甜。苹果很红。"
    assert say("苹果", "苹果很甜。苹果很红。", sentences=2, markers=1) == "苹果很甜。 [1] 苹果很红。 [1]"


def test_max_tokens_and_stop_sequences_end_the_text() -> None:
    assert say("hotels paid", TRAVEL, sampling=Sampling(max_tokens=2)) == "Hotels are"
    assert say("hotels paid", TRAVEL, sampling=Sampling(stop=(" paid",))) == "Hotels are"
    asked = Question("hotels paid", [TRAVEL], 1)
    for most, reason in ((2, "length"), (5, "stop"), (6, "stop")):
        *_, last = ENGINE.deltas(asked, ENGINE.extract(asked, words_alone), Sampling(max_tokens=most))
        assert (last.finish_reason, last.completion_tokens) == (reason, min(most, 5))


def test_similarity_counts_where_an_embedding_model_is_there() -> None:
    def embed(questions: Sequence[str], texts: Sequence[str]) -> Any:
        # the question is like the sentence about cats; nothing is like the rest
        rows = [[1.0, 0.0], *([0.8, 0.6] if "Cats" in text else [0.0, 1.0] for text in texts)]
        return np.array(rows, np.float32), np.array([[0.0, 1.0]], np.float32)

    asked = Question("felines", ["Dogs bark. Cats sleep. Birds sing."], 1)
    found = ENGINE.extract(asked, embed)
    assert [sentence.text for sentence in found.sentences] == ["Cats sleep."]
    assert (round(found.support, 4), found.min_support) == (0.8, extractive.MIN_SUPPORT)
    found = ENGINE.extract(asked, words_alone)
    assert (found.support, found.min_support) == (0.0, extractive.MIN_SUPPORT_WORDS)


def test_similarity_is_counted_from_what_unrelated_texts_have() -> None:
    """As some models find any two texts alike."""

    def embed(questions: Sequence[str], texts: Sequence[str]) -> Any:
        rows = [[1.0, 0.0], *([0.9, 0.1] for _ in texts)]
        return np.array(rows, np.float32), np.array([[0.8, 0.2]] * 2, np.float32)

    assert ENGINE.extract(Question("felines", ["Cats sleep."], 1), embed).support == pytest.approx(0.5)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_known_cosines_take_the_place_of_embeddings(dimensions: int) -> None:
    """All of them, one, or those of another model, which do not count: the answer is the same."""
    vectors = {"felines": [1.0, 0.0], "Dogs bark.": [0.0, 1.0], "Cats\nsleep.": [0.8, 0.6]}
    asked: list[list[str]] = []

    def embed(questions: Sequence[str], texts: Sequence[str]) -> Any:
        asked.append([*questions, *texts])
        rows = np.array([vectors[text] for text in asked[-1]], np.float32).reshape(-1, 2)
        return rows, np.array([[0.1, 1.0]], np.float32)

    for known, embedded in (
        ({}, ["felines", "Dogs bark.", "Cats\nsleep."]),
        ({"Cats sleep.": 0.8}, ["Dogs bark."]),
        ({"Dogs bark.": 0.0, "Cats sleep.": 0.8}, []),
    ):
        asked.clear()
        question = Question(
            "felines", ["Dogs bark. Cats\nsleep."], 1, vector=[1.0, 0.0, 0.0][:dimensions], cosines=known
        )
        found = ENGINE.extract(question, embed)
        assert [sentence.text for sentence in found.sentences] == ["Cats\nsleep."]
        assert found.support == pytest.approx(0.7 / 0.9)
        assert asked[-1] == (embedded if dimensions == 2 else ["felines", "Dogs bark.", "Cats\nsleep."])


def test_a_summary_is_the_central_sentences() -> None:
    text = (
        "The council met on Monday. The council agreed to build the new bridge over the river. It rained."
        " The bridge over the river will open in spring. Somebody coughed."
    )
    summary = say("", text, sentences=2, is_summary=True)
    assert "The council agreed to build the new bridge over the river." in summary
    assert "coughed" not in summary


def test_no_sentence_at_all() -> None:
    assert say("anything", " \n", "---") == ""
    assert ENGINE.extract(Question("anything", ["…"], 1), words_alone).support == 0


def test_words_are_stems_and_pairs_of_characters() -> None:
    assert words_of("Employees' employee_handbook 2024") == {"employ", "handbo", "2024"}
    assert words_of("北京大学A") == {"北京", "京大", "大学", "a"}


def test_texts_beyond_the_context_are_left_out() -> None:
    engine = ExtractiveEngine(10)
    assert engine.fitting(["a" * 20, "b" * 20, "c"]) == ["a" * 20, "b" * 20]
    assert engine.fitting(["a" * 20, "b" * 21, "c"]) == ["a" * 20]
    assert engine.fitting(["a" * 41, "b"]) == ["a" * 40]


def ask(server: RunningServer, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps({"model": "extractive", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return reply.read().decode() if body.get("stream") else json.load(reply)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_completion_of_the_server(server: RunningServer) -> None:
    documents = [{"document_name": "a", "text": f"{TRAVEL} See [7]."}, {"text": MEALS}]
    reply = ask(
        server, messages=user("What is the hotel limit in London?"), documents=documents, citations=2, max_sentences=1,
        citation_style="numbered", embed_model="fake-embed",
    )  # fmt: skip
    assert reply["choices"][0]["message"]["content"] == "The limit is 140 euros in Germany, 180 euros in London. [1]"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["ml_rag"].keys() == {"documents_given", "documents_used", "support", "min_support"}
    assert reply["ml_rag"]["min_support"] == extractive.MIN_SUPPORT
    assert reply["usage"]["completion_tokens"] == 12
    # numbers in brackets of a document cannot be taken for markers of the answer
    reply = ask(
        server, messages=user("See"), documents=documents, citations=2, citation_style="numbered", max_sentences=1
    )
    assert reply["choices"][0]["message"]["content"] == "See (7). [1]"


@pytest.mark.parametrize("embed_model", ["no-such-model", "fake-generate", "fake-embed-nan", "fake-embed-short"])
def test_an_embedding_model_that_fails_costs_no_answer(server: RunningServer, embed_model: str) -> None:
    reply = ask(
        server, messages=user("dinner"), documents=[{"text": MEALS}], embed_model=embed_model, max_sentences=1,
        min_support=0.9,
    )  # fmt: skip
    assert reply["choices"][0]["message"]["content"] == "- Dinner costs up to 40 euros."
    assert reply["ml_rag"] | {"documents_given": 1, "documents_used": 1} == reply["ml_rag"]
    assert reply["ml_rag"]["support"] == 1
    assert reply["ml_rag"]["min_support"] == 0.9


def test_what_the_caller_knows_of_similarity_is_taken(server: RunningServer) -> None:
    vector = [1.0, *[0.0] * 15]
    known = {"vector": vector, "cosines": {"Breakfast is free.": 1.0, "Dinner costs up to 40 euros.": -1.0}}
    documents = [{"text": "Breakfast is free. Dinner costs up to 40 euros."}]
    for name, text in (("fake-embed", "Breakfast is free."), ("none", "Dinner costs up to 40 euros.")):
        reply = ask(
            server, messages=user("dinner"), documents=documents, embed_model=name, max_sentences=1, known_cosines=known
        )
        assert reply["choices"][0]["message"]["content"] == text


def test_sentences_are_streamed(server: RunningServer) -> None:
    text = ask(
        server,
        messages=user("London limit, dinner costs"),
        documents=[{"text": TRAVEL}, {"text": MEALS}],
        stream=True,
        embed_model="none",
    )
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") for event in events]
    assert [piece for piece in pieces if piece] == [
        "The limit is 140 euros in Germany, 180 euros in London.", "\n- Dinner costs up to 40 euros."
    ]  # fmt: skip
    assert text.endswith("data: [DONE]\n\n")


def test_a_summary_needs_no_documents(server: RunningServer) -> None:
    reply = ask(server, messages=user(TRAVEL), task="summarization", max_sentences=1)
    assert reply["choices"][0]["message"]["content"] in TRAVEL
    assert "ml_rag" not in reply


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": user("Who wrote Hamlet?")}, "answers from documents only"),
        ({"messages": user("q"), "documents": []}, "answers from documents only"),
        ({"messages": user("q"), "documents": [{"text": "t"}], "response_format": {"type": "json_object"}}, "no JSON"),
        ({"messages": user("q"), "documents": [{"text": "t"}], "max_sentences": 11}, "max_sentences"),
        ({"messages": user("q"), "documents": [{"text": "t"}], "min_support": 1.5}, "min_support"),
        ({"messages": user("q"), "known_cosines": {"vector": [], "cosines": {}}}, "known_cosines.vector"),
        ({"messages": user("q"), "known_cosines": {"vector": [float("nan")], "cosines": {}}}, "known_cosines.vector.0"),
        ({"messages": user("q"), "known_cosines": {"vector": [1], "cosines": {"t": 1.1}}}, "known_cosines.cosines.t"),
    ],
)
def test_requests_that_it_refuses(server: RunningServer, body: dict[str, Any], message: str) -> None:
    with pytest.raises(HTTPError) as caught:
        ask(server, **body)
    assert caught.value.code == 400
    assert message in caught.value.read().decode()


def test_it_is_always_there(server: RunningServer) -> None:
    with urllib.request.urlopen(f"{server.url}/v1/models/extractive") as reply:
        model = json.load(reply)
    assert (model["task"], model["engine"], model["available"], model["brief"]) == (
        "generate",
        "extractive",
        True,
        False,
    )
