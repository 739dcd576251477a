"""vectorizer/run, vectorizer/segments: random changes from several sessions, while runs are killed; in step."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database
from support.models_server import ModelsServer
from support.processes import over_and_over
from support.vectorizers import assert_in_step, assert_segments_in_step, create, failures, run

WORDS = ["lamp", "tent", "rope", "hat", "kettle", "jug", "bed", "!nan", " ", None]
KEYS = 12


def change(rng: random.Random, session: Connection) -> None:
    """One statement of any kind, which may fail: then its transaction is rolled back."""
    word, other, key = rng.choice(WORDS), rng.choice(WORDS), rng.randrange(KEYS)
    insert = "INSERT INTO items (id, name, notes) VALUES (%s, %s, %s)"
    statements: list[tuple[str, tuple[Any, ...]]] = [
        (insert, (key + 100, word, other)),
        (insert + " ON CONFLICT (id) DO UPDATE SET name = excluded.name", (key, word, other)),
        (
            "INSERT INTO items (id, name) SELECT i, %s || i FROM generate_series(%s, %s) AS i ON CONFLICT DO NOTHING",
            (word, key, key + 5),
        ),
        ("UPDATE items SET name = %s WHERE id = %s", (word, key)),
        ("UPDATE items SET notes = %s WHERE id %% 3 = %s", (word, key % 3)),
        ("UPDATE items SET price = coalesce(price, 0) + 1 WHERE id <= %s", (key,)),
        ("UPDATE items SET name = name, notes = notes", ()),
        ("UPDATE items SET id = %s WHERE id = %s", (rng.randrange(KEYS), key)),
        ("DELETE FROM items WHERE id = %s", (key,)),
        ("SAVEPOINT s", ()),
        ("ROLLBACK TO s", ()),
        *[("COMMIT", ())] * 6,
        ("ROLLBACK", ()),
        ("DELETE FROM items WHERE id > %s", (key,)),
        ("TRUNCATE items", ()),
    ]  # fmt: skip
    try:
        if rng.random() < 0.05:
            with session.cursor() as cursor, cursor.copy("COPY items (id, name) FROM STDIN") as copy:
                copy.write_row((key + 100 * rng.randrange(50), word))
        else:
            # the last two, which leave little, are rare
            session.execute(*statements[rng.randrange(len(statements) - 2 * (rng.random() < 0.9))])
    except psycopg.Error:
        session.rollback()


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("seed", "destination"), [(0, "column"), (1, "column"), (2, "column"), (3, "table"), (4, "table"), (5, "table")]
)
def test_whatever_happens_to_a_table_it_is_in_step_after_a_run(
    db: Database, owner: Connection, models: ModelsServer, seed: int, destination: str
) -> None:
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text, notes text, price numeric)")
    create(
        owner, columns={"column": "{name}: {notes}", "table": "{name}\n\n{notes}"}[destination], destination=destination
    )
    owner.execute("INSERT INTO items SELECT i, 'name ' || i FROM generate_series(0, %s) AS i", (KEYS + 20,))
    run(owner)
    sessions = [db.connect(autocommit=False) for _ in range(3)]
    for session in sessions:
        session.execute("SET lock_timeout = '20ms'")
        session.commit()
    ended = threading.Event()
    pids: list[int] = []

    def runs() -> None:
        while not ended.is_set():
            with contextlib.suppress(psycopg.Error), db.connect() as connection:
                pids.append(connection.info.backend_pid)
                while not ended.is_set():
                    run(connection, batch_size=3)

    running = [threading.Thread(target=runs) for _ in range(2)]
    for thread in running:
        thread.start()
    try:
        rng = random.Random(seed)
        for n in range(300):
            change(rng, rng.choice(sessions))
            if n % 20 == 0 and pids:
                owner.execute("SELECT pg_terminate_backend(%s::integer)", (rng.choice(pids[-2:]),))
    finally:
        ended.set()
        # a run may wait for a transaction that has truncated the table
        for session in sessions:
            session.commit()
        for thread in running:
            thread.join()
    owner.execute("SELECT ml_rag.retry_vectorizer('items')")
    run(owner)
    (assert_in_step if destination == "column" else assert_segments_in_step)(owner, "items")
    assert len(failures(owner)) == len(
        owner.execute("SELECT FROM items WHERE coalesce(segment, '') !~ '\\S' OR segment ~ '!nan'").fetchall()
    )
    # and a run that finds nothing asks the model for nothing
    models.requests.clear()
    assert run(owner)["embedded"] == 0
    assert models.requests == []


def test_no_row_gets_the_segments_of_another_that_has_its_former_place(
    db: Database, owner: Connection, models: ModelsServer
) -> None:
    """VACUUM makes places free between two transactions of a run, and rows of the same texts take them."""
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text)")
    create(owner, columns="{name}", destination="table", keyword_search=False)
    owner.execute("INSERT INTO items SELECT i, 'lamp' FROM generate_series(0, 8) AS i")
    sessions = [db.connect() for _ in range(3)]
    rng = random.Random(0)

    def change() -> None:
        with contextlib.suppress(psycopg.Error):
            sessions[0].execute(
                "UPDATE items SET name = CASE name WHEN 'lamp' THEN 'rope' ELSE 'lamp' END WHERE id = %s",
                (rng.randrange(6),),
            )
            sessions[0].execute("DELETE FROM items WHERE id = %s", (rng.randrange(6, 9),))
            sessions[0].execute(
                "INSERT INTO items VALUES (%s, %s) ON CONFLICT DO NOTHING",
                (rng.randrange(6, 9), rng.choice(("lamp", "rope"))),
            )

    def read() -> None:
        with contextlib.suppress(psycopg.Error):
            run(sessions[2])

    with (
        over_and_over(change),
        over_and_over(lambda: sessions[1].execute("VACUUM items_segments")),
        over_and_over(read),
    ):
        until = time.monotonic() + 8
        while time.monotonic() < until:
            other = owner.execute(
                "SELECT t.name, s.segment FROM items AS t JOIN items_segments AS s ON s.source_id = t.id"
                " WHERE s.segment <> t.name"
            ).fetchall()
            assert other == []
    run(owner)
    assert owner.execute(
        "SELECT count(*) FROM items AS t FULL JOIN items_segments AS s ON s.source_id = t.id"
        " WHERE s.segment IS DISTINCT FROM t.name"
    ).fetchone() == (0,)
