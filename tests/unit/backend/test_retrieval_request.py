"""What is remembered of options, without a database."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import pytest

from ml_rag.backend.retrieval import request as requests

_NOTHING = requests.Request(*[None] * len(requests.Request._fields))  # type: ignore[arg-type]


class Plpy:
    """As much of plpy as reading options touches; ``ran``: names of statements; ``read``: options that were read."""

    class SPIError(Exception):
        sqlstate = "22023"

    def __init__(self) -> None:
        self.error: str | None = None
        self.ran: list[str] = []
        self.read: list[Any] = []

    def run(self, _: Plpy, name: str, text: str) -> list[dict[str, Any]]:
        self.ran.append(name)
        options = json.loads(text)
        filters = options.pop("filters", None)
        if name == "read":
            return [{"request": text, "is_laid": True}]
        if name == "filters" and self.error is not None:
            error = self.SPIError()
            error.sqlstate = self.error
            raise error
        others = json.dumps(options)
        return [{"others": others, "options": others, "filters": json.dumps(filters), "is_valid": filters is not None}]

    def of_record(self, _: Plpy, __: str, text: str, form: str, *, has_vector: bool) -> requests.Request:
        self.read.append((text, form, has_vector))
        rewrites = "query_options" in json.loads(text)
        return _NOTHING._replace(options=text, rewrites=rewrites, has_functions=False, explains=False)

    def ask(self, form: str = "hits", *, has_vector: bool = True, **options: Any) -> Any:
        """The options of the request of a call; how many were read for it."""
        before = len(self.read)
        found = requests.read(self, "ml_rag", json.dumps(options), form, has_vector=has_vector)
        return json.loads(found.options), len(self.read) - before


@pytest.fixture
def plpy(monkeypatch: pytest.MonkeyPatch) -> Plpy:
    plpy = Plpy()
    monkeypatch.setattr(requests, "_kept", OrderedDict())
    monkeypatch.setattr(requests, "_filtered", OrderedDict())
    monkeypatch.setattr(requests, "_run", plpy.run)
    monkeypatch.setattr(requests, "of_record", plpy.of_record)
    return plpy


def test_a_request_is_that_of_its_form_and_of_a_given_vector(plpy: Plpy) -> None:
    assert plpy.ask(n=1, filters={"a": 1}) == ({"n": 1, "filters": {"a": 1}}, 1)
    assert plpy.ask(n=1, filters={"a": 2}) == ({"n": 1, "filters": {"a": 2}}, 0)
    assert plpy.ask("citations", n=1, filters={"a": 3})[1] == 1
    assert plpy.ask(n=1, filters={"a": 4}, has_vector=False)[1] == 1
    assert plpy.ask(n=2, filters={"a": 5})[1] == 1


def test_of_the_same_filters_nothing_is_run(plpy: Plpy) -> None:
    for a in (1, 2):
        plpy.ask(n=1, filters={"a": a})
    del plpy.ran[:]
    for a in (1, 2):
        assert plpy.ask(n=1, filters={"a": a}) == ({"n": 1, "filters": {"a": a}}, 0)
    assert plpy.ran == []


def test_what_can_be_another_one_by_the_next_call_is_not_kept(plpy: Plpy) -> None:
    for a in (1, 1, 2):
        assert plpy.ask(query_options={}, filters={"a": a})[1] == 1


def test_those_that_were_asked_last_are_kept(plpy: Plpy) -> None:
    for n in range(requests.KEPT):
        plpy.ask(n=n, filters={"a": 0})
    assert plpy.ask(n=0, filters={"a": 1})[1] == 0
    plpy.ask(n=requests.KEPT, filters={"a": 0})
    assert len(requests._kept) == len(requests._filtered) == requests.KEPT
    assert plpy.ask(n=0, filters={"a": 2})[1] == 0
    assert plpy.ask(n=1, filters={"a": 2})[1] == 1


def test_long_options_are_not_kept(plpy: Plpy) -> None:
    for _ in range(2):
        assert plpy.ask(n="x" * requests.LONGEST, filters={"a": 0})[1] == 1
    assert not requests._kept
    assert not requests._filtered


def test_only_an_error_of_the_filters_is_left_to_what_reads_all_options(plpy: Plpy) -> None:
    plpy.error = "22023"
    assert plpy.ask(n=1, filters={"a": 1})[1] == 1
    plpy.error = "57014"
    with pytest.raises(Plpy.SPIError):
        plpy.ask(n=1, filters={"a": 2})
