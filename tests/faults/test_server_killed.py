"""kill -9 of the model server, or of a process of its own, in the middle of its work; it is started again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.invariants import documents_of
from support.loading import counts, load, rows
from support.processes import cpu_seconds, wait_until
from support.site import CHUNKING, MODEL_CALLS, STORE, Site
from support.stores import error
from support.supervised_server import FOREVER, SupervisedServer, supervised_server

HINT = "ml-rag serve"


@pytest.fixture
def server(place: Path) -> Iterator[SupervisedServer]:
    """One that may be killed."""
    with supervised_server(place) as running:
        yield running


#: those that run in the ordinary suite too
LASTING = {"ml_generate", "ml_rag"}


@pytest.mark.parametrize(
    "doing", [pytest.param(name, marks=() if name in LASTING else (pytest.mark.slow,)) for name in MODEL_CALLS]
)
def test_in_the_middle_of(site: Site, doing: str) -> None:
    statement, model = MODEL_CALLS[doing]
    session = site.loaded()
    call = site.background(lambda: session.execute(statement))
    wait_until(lambda: site.server.is_at_work(model))
    site.server.kill()
    with error("08006", "connection to the model server was lost", HINT):
        call.result()
    # the same session finds the new server by itself
    assert len(rows(session, "SELECT * FROM ml_rag_search('topic3')")) == 3
    assert rows(session, "SELECT count(*) FROM ml_rag.evaluation_run") == [(0,)]
    site.verify()


def test_while_it_is_down_and_after(site: Site) -> None:
    session = site.loaded()
    site.server.hold()
    for statement, _ in MODEL_CALLS.values():
        if "ml_rag_search" not in statement:
            with error("08006", "the model server cannot be reached", HINT):
                session.execute(statement)
    # what needs no model goes on
    own = json.dumps({"keyword_search": True, "semantic_search": False})
    assert len(rows(session, "SELECT * FROM ml_rag_search('topic3', %s)", own)) == 3
    site.server.release()
    site.verify()


def test_in_the_middle_of_a_load(site: Site) -> None:
    """The documents of before stay; those of the call are all there or not at all."""
    session = site.connect()
    store = {"table_name": "docs", "embed_model_id": "held-embed", **CHUNKING}
    site.server.delay = 0.0
    site.server.kill()
    assert counts(load(session, f"{site.folder}/d00*", store)) == {"loaded": 10}
    site.server.delay = FOREVER
    site.server.kill()
    call = site.background(lambda: load(session, f"{site.folder}/", store))
    wait_until(lambda: site.server.is_at_work("held-embed"))
    site.server.delay = 0.0
    site.server.kill()
    with error("08006", "was lost", HINT):
        call.result()
    assert len(documents_of(session, STORE)) == 10
    assert counts(load(session, f"{site.folder}/", store)) == {"unchanged": 10, "loaded": 30}
    site.verify()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routine", "column", "model", "delay"),
    [
        # half a second and more for a row
        ("ml_generate_table", "jsonb", "held-generate", 0.005),
        ("ml_embed_table", "vector(16)", "held-embed", 0.5),
    ],
)
def test_in_the_middle_of_a_batch_routine(site: Site, routine: str, column: str, model: str, delay: float) -> None:
    session = site.loaded()
    session.execute("CREATE TABLE questions (id integer PRIMARY KEY, question text)")
    session.execute("INSERT INTO questions SELECT i, 'question ' || i FROM generate_series(1, 30) AS i")
    session.execute(f"ALTER TABLE questions ADD COLUMN answer {column}")
    site.server.delay = delay
    site.server.kill()
    options = {"batch_size": 1, "embed_model_id" if "embed" in routine else "model_id": model}
    statement = f"CALL {routine}('public.questions.question', 'public.questions.answer', '{json.dumps(options)}')"
    call = site.background(lambda: session.execute(statement))
    watcher = site.connect()
    written = "SELECT id, xmin::text FROM questions WHERE answer IS NOT NULL ORDER BY id"
    wait_until(lambda: len(rows(watcher, written)) >= 3, 30)
    site.server.delay = 0.0
    site.server.kill()
    with error("08006", HINT):
        call.result()
    kept = rows(watcher, written)
    assert [row[0] for row in kept] == list(range(1, len(kept) + 1))
    left = 30 - len(kept)
    assert left > 0
    assert rows(session, statement) == [({"rows": left, "succeeded": left, "failed": 0, "first_error": None},)]
    everything = rows(watcher, written)
    assert [row[0] for row in everything] == list(range(1, 31))
    assert everything[: len(kept)] == kept
    session.execute("DROP TABLE questions")
    site.verify()


@pytest.fixture
def own_folder(place: Path) -> Iterator[Path]:
    folder = place / f"own{os.urandom(4).hex()}"
    folder.mkdir(mode=0o755)
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_a_parser_that_is_killed_costs_its_document_only(site: Site, own_folder: Path) -> None:
    site.folder = own_folder
    (own_folder / "a.txt").write_text("alpha text")
    session = site.connect()
    assert counts(site.load(session)) == {"loaded": 1}
    (own_folder / "b.txt").write_text("beta text")
    # takes seconds to split
    (own_folder / "heavy.txt").write_text(" ".join(f"word{i}" for i in range(600_000)))
    call = site.background(lambda: site.load(session))
    before = {pid: cpu_seconds(pid) for pid in site.server.parsers()}

    def the_busy_one() -> int | None:
        spent = {pid: cpu_seconds(pid) - before.get(pid, 0) for pid in site.server.parsers()}
        return next((pid for pid, seconds in spent.items() if seconds > 0.5), None)

    wait_until(the_busy_one, 30)
    busy = the_busy_one()
    assert busy is not None
    os.kill(busy, signal.SIGKILL)
    result = call.result(60)
    assert counts(result) == {"unchanged": 1, "loaded": 1, "failed": 1}
    failure = result["failed"][0]
    assert failure["document_name"].endswith("heavy.txt")
    assert failure["error"] == "the document's parser was killed"
    assert "signal 9" in failure["detail"]
    assert set(documents_of(session, STORE)) == {str(own_folder / "a.txt"), str(own_folder / "b.txt")}
    (own_folder / "heavy.txt").write_text("light by now")
    assert counts(site.load(session)) == {"unchanged": 2, "loaded": 1}
    site.verify(answers=False)


@pytest.mark.slow
def test_while_a_model_is_being_loaded(site: Site, place: Path) -> None:
    """A model's file that does not come, as on a disk that hangs: the check of its SHA-256 waits."""
    file = site.server.folder / "hangs.gguf"
    os.mkfifo(file)
    site.server.more = f"""
[models.hanging]
task = "generate"
engine = "llama-cpp"
context_tokens = 512
sources = [{{ path = "{file.parent}" }}]
files = {{ "hangs.gguf" = "{"0" * 64}" }}
"""
    site.server.kill()
    session = site.loaded()
    call = site.background(lambda: session.execute("SELECT ml_generate('why?', '{\"model_id\": \"hanging\"}')"))
    # opening a FIFO for writing succeeds once somebody has opened it for reading
    writer: list[int] = []

    def is_being_read() -> bool:
        try:
            writer.append(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    wait_until(is_being_read)
    # other models answer meanwhile
    assert len(rows(site.connect(), "SELECT * FROM ml_rag_search('topic3')")) == 3
    site.server.kill()
    os.close(writer[0])
    with error("08006", "was lost", HINT):
        call.result()
    file.unlink()
    with error("55000", "not available"):
        session.execute("SELECT ml_generate('why?', '{\"model_id\": \"hanging\"}')")
    site.verify()
