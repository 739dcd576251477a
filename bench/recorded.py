"""Recorded completions: what a large language model wrote once, served as a model serves it, so that steps which need a
capable model are measured, repeatably, where none can run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.servers import RunningServer, remote_model, running_server, scripted_endpoint

#: the model of the endpoint in the catalogue of ``recorded_server``
MODEL = "recorded"

_QUESTION = re.compile(r"^Question: (.*)$", re.MULTILINE)
#: a text that nodes are made of
_TEXT = re.compile(r"Text:\n(.*)\n\nWrite a JSON object with this key:", re.DOTALL)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def rewrites(data: Path) -> dict[str, dict[str, Any]]:
    """Question -> what the model has written for it: the stand-alone question, synonyms, passage, filters …"""
    found: dict[str, dict[str, Any]] = {}
    for line in read_lines(data / "recorded" / "northwind_rewrites.jsonl"):
        found[line["question"]] = {**line, "question": line["question"]}
    for line in read_lines(data / "northwind" / "chats.jsonl"):
        found[line["question"]] = {"question": line["standalone"]}
    for line in read_lines(data / "shop" / "questions.jsonl"):
        found[line["question"]] = {"question": line["search_text"], "filters": line["filters"]}
    return found


def completion(body: Mapping[str, Any], recorded: Mapping[str, Mapping[str, Any]]) -> str:
    """The recorded document for the question or text of a request, with the keys that its schema asks for.

    Nothing where it is not recorded, or not all of it: that is not a model's answer, and no test shall take it for one.
    """
    asked = body["response_format"]["json_schema"]["schema"]["properties"]
    content = body["messages"][-1]["content"]
    about = _TEXT.match(content) or _QUESTION.search(content)
    answer = recorded.get(about[1], {}) if about else {}
    if not set(asked) <= set(answer):
        return ""
    return json.dumps({name: answer[name] for name in asked}, ensure_ascii=False)


@contextmanager
def recorded_server(
    data: Path,
    models_dir: Path | None,
    socket: Path | None = None,
    nodes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[RunningServer]:
    """A model server with the models of ``models_dir``, and what is recorded in ``data`` as model ``recorded``.

    ``nodes``: text -> what is recorded for it, see ``bench.nodes.enrichments``.
    """
    recorded = {**rewrites(data), **(nodes or {})}
    with served(lambda body: completion(body, recorded), models_dir, socket) as server:
        yield server


@contextmanager
def served(
    answer: Callable[[dict[str, Any]], str], models_dir: Path | None, socket: Path | None = None
) -> Iterator[RunningServer]:
    """The same, whose model ``recorded`` answers what the function gives for the body of a request."""
    with scripted_endpoint(answer) as url:
        config = f'[server]\nsocket_mode = "0666"\n{remote_model(MODEL, url)}'
        with running_server(fake_models=False, config=config, models_dir=models_dir, socket=socket) as server:
            yield server
