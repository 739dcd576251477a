"""backend/generate.py: the options of the prompt on their way out, the markers of the answer on their way in."""

from __future__ import annotations

from typing import Any

import pytest

from ml_rag.backend.generate import generate

DOCUMENTS = [{"document_name": name, "text": "t"} for name in "abc"]
DEFAULTS = {"citation_style": "none", "order": "best_last"}


class Server:
    def __init__(self, text: str, used: int | None) -> None:
        self.sent: dict[str, Any] = {}
        self._reply: dict[str, Any] = {"choices": [{"message": {"content": text}}]}
        if used is not None:
            self._reply["ml_rag"] = {"documents_given": len(DOCUMENTS), "documents_used": used}

    def call(self, method: str, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        self.sent = payload
        return self._reply


def ask(
    text: str = "Paris [1], Rome [3], Bonn [4].", used: int | None = 3, **request: Any
) -> tuple[str, dict[str, Any]]:
    server = Server(text, used)
    whole = {
        "prompt": "q",
        "documents": DOCUMENTS,
        "citations": 3,
        "options": {},
        "prompt_options": DEFAULTS,
        **request,
    }
    return generate(server, whole)["text"], server.sent  # type: ignore[arg-type]


@pytest.mark.parametrize("style", ["none", "numbered"])
def test_markers_point_to_citations_whatever_was_asked_for(style: str) -> None:
    text, _ = ask(prompt_options={**DEFAULTS, "citation_style": style})
    assert text == "Paris [1], Rome [3], Bonn."


@pytest.mark.parametrize(
    ("used", "expected"),
    [(3, "Paris [1], Rome [3], Bonn."), (2, "Paris [1], Rome, Bonn."), (0, "Paris, Rome, Bonn.")],
)
def test_a_citation_that_the_model_did_not_see_is_none_to_point_to(used: int, expected: str) -> None:
    assert ask(used=used)[0] == expected


def test_a_server_that_does_not_count_has_used_them_all() -> None:
    assert ask(used=None)[0] == "Paris [1], Rome [3], Bonn."


def test_text_without_citations_and_json_are_left_as_they_are() -> None:
    text = '["Paris [4]", [7]]'
    assert ask(text, options={"json_schema": {}})[0] == text
    assert ask(text, citations=None)[0] == text
    assert ask(text, documents=None, citations=0, used=None)[0] == text


def test_only_the_first_documents_are_citations() -> None:
    assert ask(citations=1)[0] == "Paris [1], Rome, Bonn."


def test_the_options_of_the_prompt_under_their_protocol_names() -> None:
    _, sent = ask(prompt_options={"citation_style": "numbered", "order": "best_first", "system": "Be kind."})
    assert (sent["citation_style"], sent["document_order"]) == ("numbered", "best_first")
    assert sent["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "q"}]


def test_without_documents_only_the_system_text_is_sent() -> None:
    _, sent = ask(documents=None, citations=0, used=None, prompt_options={**DEFAULTS, "system": "Be kind."})
    assert set(sent) == {"messages"}
    assert sent["messages"][0] == {"role": "system", "content": "Be kind."}
