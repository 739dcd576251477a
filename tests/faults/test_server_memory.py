"""The model server's memory limit hit: it refuses what has no room, answers the rest, and lives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from support.cluster import value_of
from support.control_group import ControlGroup, control_group
from support.loading import counts, rows
from support.processes import wait_until
from support.site import Site
from support.stores import error
from support.supervised_server import SupervisedServer, supervised_server

MB = 1024 * 1024
LIMIT = 400 * MB
ASK = "SELECT count(*) FROM ml_rag_search('topic3')"


@pytest.fixture
def server(place: Path) -> Iterator[SupervisedServer]:
    """One whose memory may be short."""
    with supervised_server(place) as running:
        yield running


def limited(site: Site, how: str, group: ControlGroup | None) -> None:
    if group is not None:
        site.server.prefix = group.prefix
    elif how == "address space":
        site.server.prefix = ["prlimit", f"--as={700 * MB}", "--"]
    else:
        site.server.more = f"[server]\nmax_memory_bytes = {LIMIT}\n"
    site.server.kill()


LIMITS = ["control group", pytest.param("setting", marks=pytest.mark.slow)]
LIMITS.append(pytest.param("address space", marks=pytest.mark.slow))


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[ControlGroup | None]:
    if request.node.callspec.params["how"] != "control group":
        yield None
        return
    with control_group(LIMIT) as group:
        yield group
        # the server must leave the group before it can go
        server: SupervisedServer = request.getfixturevalue("server")
        server.close()


@pytest.mark.parametrize("how", LIMITS)
def test_more_prompts_than_have_room(site: Site, group: ControlGroup | None, how: str) -> None:
    """Forty prompts of 12 MB wait for a model that answers none: half of them would end the server."""
    session = site.loaded()
    limited(site, how, group)
    pid = site.server.pid
    errors: list[psycopg.Error] = []
    first = site.connect()
    held = "SELECT ml_generate('why?', '{\"model_id\": \"held-generate\"}')"
    occupant = site.background(lambda: first.execute(held))  # the others wait behind it
    wait_until(lambda: site.server.is_at_work("held-generate"))
    sessions = [site.connect() for _ in range(40)]
    prompt = "word " * (12 * MB // 5)

    def ask(connection: psycopg.Connection[object]) -> None:
        try:
            connection.execute('SELECT ml_generate(%s, \'{"model_id": "held-generate"}\')', (prompt,))
        except psycopg.Error as e:
            errors.append(e)

    calls = [site.background(lambda c=c: ask(c)) for c in sessions]
    wait_until(lambda: len(errors) >= 10, 60)
    # small calls are answered meanwhile
    assert rows(session, ASK) == [(3,)]
    assert site.server.pid == pid
    for connection in (*sessions, first):
        with site.connect() as other:
            other.execute("SELECT pg_cancel_backend(%s::integer)", (connection.info.backend_pid,))
    for call in calls:
        call.result(60)
    with error("57014"):
        occupant.result(60)
    told = {e.diag.sqlstate: f"{e.diag.message_primary} / {e.diag.message_detail}" for e in errors}
    assert set(told) == {"53300", "57014"}, told
    refused = [e for e in errors if e.diag.sqlstate == "53300"]
    assert all("not enough memory" in (e.diag.message_primary or "") and e.diag.message_hint for e in refused)
    assert site.server.pid == pid
    if group is not None:
        assert group.kills() == 0
    # there is room again: one of that size is taken
    short = json.dumps({"model_id": "fake-generate", "max_tokens": 2})

    def is_taken() -> bool:
        try:
            rows(session, "SELECT ml_generate(%s, %s)", "word " * (8 * MB // 5), short)
        except psycopg.errors.TooManyConnections:
            return False
        except psycopg.errors.InvalidParameterValue:
            pass  # more than the model's context holds: it was read
        return True

    wait_until(is_taken, 30)
    site.verify()


@pytest.mark.parametrize("how", ["control group"])
def test_a_model_that_has_no_room(site: Site, group: ControlGroup, how: str) -> None:
    """Refused by the size of its files, before it drives the server into the limit."""
    folder = site.server.folder / "models" / "huge"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (folder / name).touch()
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000 * MB)
    site.server.more = """
[models.huge]
task = "embed"
engine = "sentence-transformers"
dimensions = 16
files = { "model.safetensors" = "unpinned", "config.json" = "unpinned" }
"""
    session = site.loaded()
    limited(site, how, group)
    pid = site.server.pid
    with error("53300", "not enough memory to load model huge", str(1000 * MB), "raise the memory limit"):
        session.execute("SELECT ml_embed_row('a', '{\"embed_model_id\": \"huge\"}')")
    assert site.server.pid == pid
    assert group.kills() == 0
    site.verify()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["control group"])
def test_large_loads_go_on_within_the_limit(site: Site, group: ControlGroup, how: str) -> None:
    """Uploads lie on the disk: they take no memory of the server, whatever they have together."""
    limited(site, how, group)
    session = site.connect()
    pid = site.server.pid
    session.execute("SELECT ml_rag.create_store('public.docs')")
    text = b"alpha beta gamma. " * 60_000  # 1 MB
    names = [f"n{i}" for i in range(12)]
    options = json.dumps({"chunking": {"segment_tokens": 256, "split_by": "tokens"}})
    found = value_of(session, "SELECT ml_rag.load_documents('docs', %s, %s, %s)", (names, [text] * len(names), options))
    assert counts(found) == {"loaded": 12}
    assert site.server.pid == pid
    assert group.kills() == 0
    session.execute("DELETE FROM docs")
    site.load(session)
    site.verify()
