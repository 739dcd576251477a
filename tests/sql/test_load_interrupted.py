"""store/load: loads that are cancelled, meet another, or lose the model server or the store on the way."""

from __future__ import annotations

import time
from pathlib import Path

import psycopg
import pytest

from support.cluster import Connection, Database
from support.documents_server import DocumentsServer
from support.loading import connect_as_loader, counts, load, rows, segments, write
from support.processes import Background, wait_until
from support.stores import error

#: how long PostgreSQL may take to come back once the statement is to end
GRACE_SECONDS = 0.2


def many(folder: Path, n: int = 40, **more: str) -> None:
    write(folder, **{f"f{i:02}": f"text {i}" for i in range(n)})
    write(folder, **more)


def test_statement_timeout_ends_a_load_and_keeps_whole_documents_only(
    loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    many(folder, 20, f18="!hang")
    # time enough for the documents before the one that hangs, on a busy machine too
    loader.execute("SET statement_timeout = '3s'")
    started = time.monotonic()
    with error("57014", "statement timeout"):
        load(loader, f"{folder}/")
    assert time.monotonic() - started < 3 + GRACE_SECONDS
    assert len(segments(owner)) == 16
    assert rows(owner, "SELECT FROM pg_locks WHERE locktype = 'advisory'") == []
    loader.execute("RESET statement_timeout")
    write(folder, f18="text 18")
    assert counts(load(loader, f"{folder}/")) == {"unchanged": 16, "loaded": 4}


def test_pg_cancel_backend_ends_a_load(
    loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    many(folder, 3, f01="!hang")
    call = Background(lambda: load(loader, f"{folder}/"))
    wait_until(lambda: len(server.documents) == 2)
    started = time.monotonic()
    owner.execute("SELECT pg_cancel_backend(%s::integer)", (loader.info.backend_pid,))
    with error("57014"):
        call.result()
    assert time.monotonic() - started < GRACE_SECONDS
    assert rows(owner, "SELECT to_regclass('docs')") == [(None,)]


def test_a_connection_that_goes_ends_the_work_of_the_model_server(
    db: Database, loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    many(folder, 1, f00="!hang")
    call = Background(lambda: load(loader, f"{folder}/"))
    wait_until(lambda: server.documents)
    owner.execute("SELECT pg_terminate_backend(%s::integer)", (loader.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        call.result()
    wait_until(lambda: server.hung_up)
    db.connect("stranger")  # the server is well


def test_two_loads_of_one_folder_share_the_work(
    db: Database, loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    many(folder, 80)
    other = connect_as_loader(db)
    calls = [Background(lambda c=c: load(c, f"{folder}/")) for c in (loader, other)]
    results = [counts(call.result()) for call in calls]
    assert sum(result.get("loaded", 0) for result in results) == 80
    assert sum(result.get("unchanged", 0) for result in results) == 80
    assert len(server.documents) == 80
    assert rows(owner, "SELECT count(*), count(DISTINCT document_id), max(document_id) FROM docs") == [(80, 80, 80)]


def test_two_loads_of_different_folders_get_ids_of_their_own(
    db: Database, loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    another = folder.parent / "more"
    another.mkdir()
    many(folder)
    many(another)
    other = connect_as_loader(db)
    store = {"table_name": "docs"}
    calls = [Background(lambda c=c, f=f: load(c, f"{f}/", store)) for c, f in ((loader, folder), (other, another))]
    assert [counts(call.result()) for call in calls] == [{"loaded": 40}] * 2
    assert rows(owner, "SELECT count(*), count(DISTINCT document_id), max(document_id) FROM docs") == [(80, 80, 80)]


def test_a_load_that_waits_for_another_can_be_cancelled(
    db: Database, loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    many(folder, 2, f01="!hang")
    first = Background(lambda: load(loader, f"{folder}/"))
    wait_until(lambda: len(server.documents) == 2)
    other = connect_as_loader(db)
    other.execute("SET statement_timeout = '300ms'")
    started = time.monotonic()
    with error("57014", ours=False):
        load(other, f"{folder}/")
    assert time.monotonic() - started < 0.3 + GRACE_SECONDS
    owner.execute("SELECT pg_cancel_backend(%s::integer)", (loader.info.backend_pid,))
    with error("57014"):
        first.result()


def test_a_lost_model_server_ends_the_load_and_the_next_one_goes_on(
    loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    many(folder, 40, f35="!die")
    with error("08006", "was lost"):
        load(loader, f"{folder}/")
    assert len(segments(owner)) == 32
    write(folder, f35="text 35")
    assert counts(load(loader, f"{folder}/")) == {"unchanged": 32, "loaded": 8}
    indexes = rows(loader, "SELECT indexdef FROM pg_indexes WHERE tablename = 'docs' AND indexdef LIKE '%hnsw%'")
    assert len(indexes) == 1


def test_a_store_that_is_dropped_during_the_load_ends_it(
    db: Database, loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    many(folder, 140)
    drops: list[Background] = []

    def drop() -> None:
        # the batch under way holds the table; the drop gets it as soon as that is committed
        drops.append(Background(lambda: owner.execute("DROP TABLE docs")))
        wait_until(lambda: rows(watcher, "SELECT FROM pg_locks WHERE NOT granted"))

    watcher = db.connect()
    server.before_batch[1] = drop
    with error("42P01", "exist", ours=False):  # PostgreSQL's own words where a statement has the name already
        load(loader, f"{folder}/")
    drops[0].result()
    assert rows(owner, "SELECT to_regclass('docs')") == [(None,)]


def test_a_file_that_changes_between_two_loads_of_a_session_is_seen(
    loader: Connection, server: DocumentsServer, folder: Path
) -> None:
    write(folder, a="alpha")
    for i in range(4):
        write(folder, a=f"alpha {i}")
        assert counts(load(loader, f"{folder}/")) == ({"changed": 1} if i else {"loaded": 1})
    assert segments(loader) == {"a.txt": ["alpha 3"]}
    assert rows(loader, "SELECT DISTINCT document_id FROM docs") == [(1,)]


@pytest.mark.parametrize("how", ["block", "driver", "function"])
def test_inside_a_transaction_the_whole_load_is_the_callers(
    db: Database, owner: Connection, server: DocumentsServer, folder: Path, how: str
) -> None:
    many(folder, 20)
    connection = db.connect(autocommit=how == "block")
    if how == "block":
        connection.execute("BEGIN")
    if how == "function":
        connection.execute(
            "CREATE FUNCTION pg_temp.f(u text) RETURNS jsonb LANGUAGE plpgsql AS "
            "$$ DECLARE r jsonb; BEGIN CALL vector_store_load(u, NULL, r); RETURN r; END $$"
        )
        assert counts(rows(connection, "SELECT pg_temp.f(%s)", f"{folder}/")[0][0]) == {"loaded": 20}
    else:
        assert counts(load(connection, f"{folder}/")) == {"loaded": 20}
    assert len(segments(connection)) == 20
    connection.execute("ROLLBACK")
    assert rows(owner, "SELECT to_regclass('docs')") == [(None,)]


def test_from_a_do_block_outside_of_a_transaction_it_commits(
    loader: Connection, owner: Connection, server: DocumentsServer, folder: Path
) -> None:
    many(folder, 20, f18="!die")
    with error("08006"):
        loader.execute(f"DO $$ DECLARE r jsonb; BEGIN CALL vector_store_load('{folder}/', NULL, r); END $$")
    assert len(segments(owner)) == 16
