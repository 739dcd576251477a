"""Databases whose model server asks a scripted endpoint for its generation model ``scripted``; fixtures to import."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Database
from support.servers import remote_model, running_server, scripted_endpoint

#: the model of ``scripted_model``
MODEL = "scripted"
_numbers = itertools.count(1)


class Script:
    """What the endpoint answers: ``answer`` is a text, a document, or a function of the request. Keeps ``requests``."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.answer: Any = ""
        self.requests: list[dict[str, Any]] = []

    def attach(self, database: Database) -> None:
        """Make the server that of ``database``, and forget what was asked and is to be answered."""
        self.answer, self.requests = "", []
        database.connect().execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{self.socket}",))

    def __call__(self, body: dict[str, Any]) -> str:
        self.requests.append(body)
        answer = self.answer(body) if isinstance(self.answer, Callable) else self.answer  # type: ignore[arg-type]
        return answer if isinstance(answer, str) else json.dumps(answer)

    @property
    def prompt(self) -> str:
        """The last message of the last request."""
        return str(self.requests[-1]["messages"][-1]["content"])

    @property
    def asked(self) -> dict[str, Any]:
        """The properties of the last request's schema."""
        properties: dict[str, Any] = self.requests[-1]["response_format"]["json_schema"]["schema"]["properties"]
        return properties


#: servers that run and that no test has, by folder of their sockets, context and name of the model: to start one takes
#: longer than most tests
_idle: dict[tuple[Path, int, str], list[Script]] = {}
_running = ExitStack()


@contextmanager
def scripted_server(sockets: Path, context_tokens: int = 4096, model: str = MODEL) -> Iterator[Script]:
    """A model server that has the fake models and the scripted ``model``; other tests have it afterwards."""
    idle = _idle.setdefault((sockets, context_tokens, model), [])
    script = idle.pop() if idle else _start(sockets, context_tokens, model)
    script.answer, script.requests = "", []
    yield script
    idle.append(script)


def _start(sockets: Path, context_tokens: int, model: str) -> Script:
    script = Script(sockets / f"scripted{next(_numbers)}.sock")
    url = _running.enter_context(scripted_endpoint(script))
    config = f'[server]\nsocket_mode = "0666"\n{remote_model(model, url)}context_tokens = {context_tokens}\n'
    _running.enter_context(running_server(socket=script.socket, config=config, models_dir=sockets / "no-models"))
    return script


def stop_scripted_servers() -> None:
    _idle.clear()
    _running.close()


@contextmanager
def scripted_model(
    database: Database, sockets: Path, context_tokens: int = 4096, model: str = MODEL
) -> Iterator[Script]:
    """``database`` with a model server of its own, which has the fake models and the scripted ``model``."""
    with scripted_server(sockets, context_tokens, model) as script:
        script.attach(database)
        yield script


@pytest.fixture
def script(db: Database, local_sockets: Path) -> Iterator[Script]:
    """The model server of this test's database."""
    with scripted_model(db, local_sockets) as made:
        yield made


@pytest.fixture(scope="module")
def module_script(module_db: Database, reachable_dir: Path) -> Iterator[Script]:
    """The model server of the database of a module's tests."""
    with scripted_model(module_db, reachable_dir) as made:
        yield made
