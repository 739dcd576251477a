"""Documents that change, go, or become something else while they are loaded; the same one loaded twice at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.documents_server import DocumentsServer
from support.hostile_server import hostile
from support.invariants import assert_documents, documents_of
from support.loading import counts, rows
from support.processes import wait_until
from support.site import STORE, Gate, Site, text_of, write_corpus


@pytest.fixture
def own_folder(site: Site, place: Path) -> Iterator[Path]:
    """The documents of the site, in a folder that may change. 150 of them: more than one request takes."""
    folder = place / f"own{os.urandom(4).hex()}"
    folder.mkdir(mode=0o755)
    site.folder = folder
    write_corpus(folder, range(150))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def held(site: Site, own_folder: Path, place: Path) -> Iterator[DocumentsServer]:
    """A model server that does what the test says before it answers the first request of a load."""
    handler = DocumentsServer()
    with hostile(place, handler) as running:
        with site.connect() as connection:
            connection.execute("SELECT ml_rag.configure('model_server', %s)", (running.address,))
        yield handler
    with site.connect() as connection:
        connection.execute("SELECT ml_rag.configure('model_server', %s)", (site.server.address,))


#: after the first 128 were read, in the first batch: what happens to one of the second, and to one of the first
def overwrite(path: Path) -> None:
    path.write_text("other text, and more of it")


def delete(path: Path) -> None:
    path.unlink()


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def forbid(path: Path) -> None:
    path.chmod(0)


CHANGES: dict[str, tuple[Callable[[Path], None], str | None]] = {
    "changed": (overwrite, None),
    "deleted": (delete, "the file cannot be read"),
    "replaced by a link": (replace_by_link, "the file lies outside of the folder"),
    "replaced by a folder": (replace_by_folder, "the file cannot be read"),
    "replaced by a pipe": (replace_by_pipe, "the file is not a regular file"),
    "forbidden": (forbid, "the file cannot be read"),
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if "link" in what else (pytest.mark.slow,)) for what in CHANGES]
)
def test_a_document_that_is(site: Site, own_folder: Path, held: DocumentsServer, what: str) -> None:
    change, failure = CHANGES[what]
    sent, waiting = own_folder / "d010.txt", own_folder / "d140.txt"

    def happen() -> None:
        change(sent)  # read, being embedded
        change(waiting)  # found, not yet read

    held.before_batch[0] = happen
    session = site.connect()
    # as the fake model splits by paragraphs whatever it is told, the options stay the defaults
    result = rows(session, 'CALL vector_store_load(%s, \'{"table_name": "docs"}\')', f"{own_folder}/")[0][0]
    if failure is None:
        assert counts(result) == {"loaded": 150}
        assert documents_of(session, STORE)[str(waiting)] == ["other text, and more of it"]
    else:
        assert counts(result) == {"loaded": 149, "failed": 1}
        assert result["failed"][0]["document_name"] == str(waiting)
        assert result["failed"][0]["error"] == failure
        assert str(waiting) not in documents_of(session, STORE)
    # what had been read is there as it was then, whole
    assert documents_of(session, STORE)[str(sent)] == text_of(10).split("\n\n")
    # nothing of another file
    assert rows(session, "SELECT count(*) FROM docs WHERE segment LIKE '%root:%'") == [(0,)]
    # the next load has what there is then
    for path in (sent, waiting):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()
        elif path.is_dir():
            path.rmdir()
    sent.write_text("by now the second version")
    again = rows(session, 'CALL vector_store_load(%s, \'{"table_name": "docs"}\')', f"{own_folder}/")[0][0]
    assert counts(again)["changed"] == 1
    assert counts(again).get("removed", 0) == (1 if failure is None else 0)
    assert_documents(session, own_folder, STORE)


def client(site: Site, *arguments: str) -> subprocess.Popen[str]:
    dsn = f"{site.database.dsn} dbname={site.database.name}"
    command = [sys.executable, "-m", "ml_rag.cli", "load", str(site.folder), "--store", STORE, "--dsn", dsn]
    return subprocess.Popen(
        [*command, "--split-by", "paragraph", "--segment-tokens", "16", *arguments],
        env={**os.environ, "PYTHONPATH": "plpy"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_folder_loaded_by_two_sessions_and_a_client_at_once(site: Site) -> None:
    with client(site) as process:
        sessions = [site.connect() for _ in range(2)]
        calls = [site.background(lambda c=c: site.load(c)) for c in sessions]
        results = [counts(call.result(60)) for call in calls]
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert all(sum(result.values()) == 40 for result in results)
    assert all(set(result) <= {"loaded", "unchanged", "changed"} for result in results)
    site.verify()


def test_a_client_that_loses_the_cluster_goes_on_when_called_again(site: Site, gate: Callable[..., Gate]) -> None:
    site.connect().execute("SELECT ml_rag.create_store(%s)", (STORE,))
    held = gate("docs", "NEW.document_name LIKE '%d030.txt'")
    with client(site) as process:
        held.wait()
        site.kill_cluster()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in output
    assert "server closed the connection" in output
    after = site.connect()
    kept = documents_of(after, STORE)
    assert 0 < len(kept) < 40
    held.remove(after)
    with client(site) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert f"{len(kept)} unchanged" in output
    site.verify()


@pytest.mark.parametrize("same", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_document_loaded_twice_at_once(site: Site, gate: Callable[..., Gate], same: bool) -> None:
    """Whoever comes second waits, and finds what the first has left."""
    first, second = site.connect(), site.connect()
    first.execute("SELECT ml_rag.create_store(%s)", (STORE,))
    held = gate("docs", "NEW.segment_number = 1")
    texts = ["one\n\ntwo\n\nthree", "one\n\ntwo\n\nthree" if same else "other"]

    def load(connection: Any, text: str) -> Any:
        statement = "SELECT ml_rag.load_document('docs', 'a.txt', %s, '{\"chunking\": {\"split_by\": \"paragraph\"}}')"
        return rows(connection, statement, text.encode())[0][0]

    calls = [site.background(lambda: load(first, texts[0]))]
    held.wait()
    calls.append(site.background(lambda: load(second, texts[1])))
    waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND pid = %s"
    watcher = site.connect()
    wait_until(lambda: rows(watcher, waits, second.info.backend_pid) == [(1,)])
    held.open()
    assert counts(calls[0].result()) == {"loaded": 1}
    outcome = counts(calls[1].result())
    assert sum(outcome.values()) == 1
    watcher.execute("DROP TRIGGER gate ON docs")
    assert len(documents_of(watcher, STORE)) == 1
    assert rows(watcher, "SELECT min(document_id), max(document_id) FROM docs") == [(1, 1)]
    watcher.execute("DELETE FROM docs")
    site.load()
    site.verify()


@pytest.mark.slow
def test_a_client_without_a_database(site: Site) -> None:
    site.private.kill()
    with client(site) as process:
        output, _ = process.communicate(timeout=60)
    site.private.start()
    assert process.returncode == 1
    assert "Traceback" not in output
    assert "connection" in output
    with client(site) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    site.verify()
