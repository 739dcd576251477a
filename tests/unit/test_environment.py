"""support/environment: a test that changes the environment of later tests fails."""

from __future__ import annotations

import os

import pytest

from support.environment import unchanged


def change(variables: dict[str, str]) -> None:
    with unchanged():
        os.environ.update(variables)


def test_changes_are_an_error_and_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ML_RAG_OF_A_TEST", "before")
    monkeypatch.delenv("ML_RAG_OF_ANOTHER", raising=False)
    with pytest.raises(pytest.fail.Exception, match="later tests: ML_RAG_OF_ANOTHER, ML_RAG_OF_A_TEST;"):
        change({"ML_RAG_OF_A_TEST": "after", "ML_RAG_OF_ANOTHER": ""})
    assert os.environ["ML_RAG_OF_A_TEST"] == "before"
    assert "ML_RAG_OF_ANOTHER" not in os.environ


def test_every_test_is_watched(request: pytest.FixtureRequest) -> None:
    assert "environment" in request.fixturenames
