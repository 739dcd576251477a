"""A JSON schema that is meant to hurt gets an error, and hurts nobody: json_schema of a role that may only ask."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.cluster import Cluster, Connection, value_of
from support.hostile_schemas import HOSTILE, LATE
from support.processes import children, command
from support.real_model import model_path
from support.servers import RunningServer, running_server

__all__ = ["model_path"]


def generate(asker: Connection, schema: dict[str, Any], **options: Any) -> Any:
    given = json.dumps({"max_tokens": 5, "json_schema": schema, **options})
    return value_of(asker, "SELECT ml_generate('hi', %s)", (given,))["text"]


def refused(asker: Connection, schema: dict[str, Any], **options: Any) -> str:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        generate(asker, schema, **options)
    diagnosis = caught.value.diag
    assert "json_schema" in (diagnosis.message_primary or "")
    assert diagnosis.message_hint
    assert len(diagnosis.message_detail or "") < 300
    return diagnosis.message_detail or ""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_with_the_limit(module_asker: Connection, name: str) -> None:
    detail = refused(module_asker, HOSTILE[name])
    limits = r"(may (be|have)|at most|from 0 to|than) (\d+)|may be empty|may \d+ times"
    assert re.search(limits, detail), detail


def test_a_schema_of_many_values_takes_no_memory_of_the_session(cluster: Cluster) -> None:
    with cluster.database() as database:
        owner, session = database.connect(), database.connect("asker")
        # reading so much JSON takes memory of PostgreSQL itself
        owner.execute(
            "CREATE TABLE public.options AS SELECT "
            """format('{"json_schema": {"enum": [%s[]]}}', repeat('[],', 1000000))::jsonb AS options"""
        )
        owner.execute("GRANT SELECT ON public.options TO PUBLIC")
        status = Path(f"/proc/{session.info.backend_pid}/status")

        def largest() -> int:
            return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])

        fits, exceeds = ({"const": "x" * (65536 - len('{"const": ""}') + more)} for more in (0, 1))
        generate(session, fits)
        assert refused(session, exceeds) == "It has 65537 bytes; at most 65536 are allowed."
        before = largest()
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="json_schema is too complex"):
            session.execute("SELECT ml_generate('hi', options) FROM public.options")
        assert largest() - before < 200_000  # kB
        assert generate(session, {"enum": ["yes"]})


@pytest.fixture(scope="module")
def native(reachable_dir: Path, model_path: Path) -> Iterator[RunningServer]:
    """A model server with a model of llama.cpp."""
    config = (
        '[server]\nsocket_mode = "0666"\n[models.native]\ntask = "generate"\nengine = "llama-cpp"\n'
        f'context_tokens = 512\nsources = [{{ path = "{model_path}" }}]\n'
    )
    with running_server(socket=reachable_dir / "native.sock", config=config) as server:
        yield server


@pytest.fixture(scope="module")
def native_asker(cluster: Cluster, native: RunningServer) -> Iterator[Connection]:
    with cluster.database() as database:
        owner = database.connect()
        owner.execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{native.socket}",))
        yield database.connect("asker")


def workers(server: RunningServer) -> list[int]:
    return [pid for pid in children(server.process.pid) if "engines.worker" in command(pid)]


@pytest.mark.models
def test_no_hostile_schema_reaches_llama_cpp(native: RunningServer, native_asker: Connection) -> None:
    generate(native_asker, {"enum": ["yes"]}, model_id="native")
    before = workers(native)
    assert len(before) == 1
    for schema in HOSTILE.values():
        refused(native_asker, schema, model_id="native")
        assert native_asker.execute("SELECT vector_dims(ml_embed_row('x'))").fetchone() == (16,)
    assert workers(native) == before
    assert generate(native_asker, {"enum": ["yes"]}, model_id="native") == '"yes"'


@pytest.mark.models
@pytest.mark.parametrize("name", LATE)
def test_what_only_the_grammar_shows_ends_one_process_at_most(
    native: RunningServer, native_asker: Connection, name: str
) -> None:
    refused(native_asker, LATE[name], model_id="native")
    assert native.process.poll() is None
    assert generate(native_asker, {"enum": ["yes"]}, model_id="native") == '"yes"'
