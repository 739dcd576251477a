"""The model extractive with the real embedding model beside it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from support.real_model import need_models
from support.servers import RunningServer, running_server

pytestmark = pytest.mark.models

TEXTS = [
    "# Travel\n\nHotels are paid in full. The limit is 140 euros in Germany, 180 euros in London. Trains are free.",
    "# Leave\n\nNew parents may stay at home for six months. Ask your manager. Sick days are not counted.",
    "# Office\n\nThe building opens at seven. Bicycles are kept in the basement.",
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    folder = need_models("all_minilm_l6_v2")
    with running_server(fake_models=False, tcp=True, models_dir=folder) as running:
        yield running


def ask(server: RunningServer, question: str, **keys: Any) -> Any:
    body = {"model": "extractive", "messages": [{"role": "user", "content": question}], "max_sentences": 1, **keys}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the hotel limit in London?", "The limit is 140 euros in Germany, 180 euros in London."),
        # no word of the question stands in the answer
        ("How long is maternity absence?", "New parents may stay at home for six months."),
        ("Where can I put my bike?", "Bicycles are kept in the basement."),
    ],
)
def test_the_sentence_that_answers(server: RunningServer, question: str, answer: str) -> None:
    reply = ask(server, question, documents=[{"text": text} for text in TEXTS])
    assert reply["choices"][0]["message"]["content"] == answer
    assert reply["ml_rag"]["support"] > reply["ml_rag"]["min_support"]


def test_what_the_documents_do_not_say_has_no_support(server: RunningServer) -> None:
    reply = ask(server, "Who painted the Mona Lisa?", documents=[{"text": text} for text in TEXTS])
    assert reply["ml_rag"]["support"] < reply["ml_rag"]["min_support"]


def test_the_central_sentence(server: RunningServer) -> None:
    text = (
        "The council met on Monday. The council agreed to build a new bridge over the river. Coffee was served. The"
        " bridge over the river will open in spring, the council says."
    )
    summary = ask(server, text, task="summarization")["choices"][0]["message"]["content"]
    assert summary in text
    assert "bridge over the river" in summary
