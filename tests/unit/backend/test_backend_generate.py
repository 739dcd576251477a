"""backend/generate.py: what of a request is sent to the model server, under its names there."""

from __future__ import annotations

from typing import Any

from ml_rag.backend.generate import generate

DOCUMENTS = [{"document_name": name, "text": "t"} for name in "abc"]
DEFAULTS = {"citation_style": "none", "order": "best_last"}


class Server:
    def __init__(self) -> None:
        self.sent: dict[str, Any] = {}

    def call(self, method: str, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        self.sent = payload
        return {"choices": [{"message": {"content": "a"}}]}


def ask(**request: Any) -> dict[str, Any]:
    """What is sent for a request."""
    server = Server()
    usual = {"prompt": "q", "documents": DOCUMENTS, "citations": 3, "options": {}, "prompt_options": DEFAULTS}
    assert generate(server, usual | request)["text"] == "a"  # type: ignore[arg-type]
    return server.sent


def test_the_number_of_citations_goes_with_documents_only() -> None:
    assert ask()["citations"] == 3
    assert "citations" not in ask(citations=None)
    assert "citations" not in ask(documents=None, citations=0)


def test_the_options_of_the_prompt_under_their_protocol_names() -> None:
    sent = ask(prompt_options={"citation_style": "numbered", "order": "best_first", "system": "Be kind."})
    assert (sent["citation_style"], sent["document_order"]) == ("numbered", "best_first")
    assert sent["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "q"}]


def test_without_documents_only_the_system_text_and_the_length_are_sent() -> None:
    sent = ask(documents=None, citations=0, prompt_options={**DEFAULTS, "system": "Be kind.", "length": "long"})
    assert set(sent) == {"messages", "answer_length"}
    assert sent["answer_length"] == "long"
    sent = ask(documents=None, citations=0, options={"system": "Be kind."})
    assert set(sent) == {"messages"}
    assert sent["messages"][0] == {"role": "system", "content": "Be kind."}
