"""watch/track: what a call tells of itself; what goes wrong with that never becomes the caller's error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.cluster import Connection, Database
from support.processes import wait_until

# what a database has been called for is counted
pytestmark = pytest.mark.fresh


def begin(connection: Connection, routine: str = "ml_rag") -> Any:
    (call,) = connection.execute("SELECT ml_rag._begin(%s)", (routine,)).fetchone() or (None,)
    return call


def run(connection: Connection, body: str) -> None:
    """Statements of one call: ``c`` is what it is called."""
    connection.execute(f"DO $do$ DECLARE c integer := ml_rag._begin('ml_rag'); BEGIN {body} END $do$")


def stats(connection: Connection) -> dict[tuple[str, str], tuple[int, int]]:
    """(routine, stage) -> calls, errors."""
    rows = connection.execute("SELECT routine, stage, calls, errors FROM ml_rag.stats").fetchall()
    assert len({row[:2] for row in rows}) == len(rows)
    return {row[:2]: row[2:] for row in rows}


def test_a_call_its_stages_and_its_end_are_counted(asker: Connection) -> None:
    for _ in range(3):
        run(
            asker, "PERFORM ml_rag._stage(c, 'embed', 'm'); PERFORM ml_rag._stage(c, 'search'); PERFORM ml_rag._end(c);"
        )
    assert stats(asker) == {("ml_rag", "total"): (3, 0), ("ml_rag", "embed"): (3, 0), ("ml_rag", "search"): (3, 0)}


def test_a_stage_is_counted_each_time_it_is_entered(asker: Connection) -> None:
    run(asker, "FOR i IN 1..7 LOOP PERFORM ml_rag._stage(c, 'embed'); END LOOP; PERFORM ml_rag._end(c);")
    assert stats(asker) == {("ml_rag", "total"): (1, 0), ("ml_rag", "embed"): (7, 0)}


def test_an_error_is_counted_in_its_stage_by_its_sqlstate(asker: Connection) -> None:
    for sqlstate in ("22023", "22P02", "22012", "57014", "57P03", "42501", "42P01", "42703", "XX000", "ZZZZZ", "P0002"):
        run(asker, f"PERFORM ml_rag._stage(c, 'search'); PERFORM ml_rag._end(c, '{sqlstate}');")
    assert stats(asker) == {("ml_rag", "total"): (11, 11), ("ml_rag", "search"): (11, 11)}
    (found,) = asker.execute("SELECT errors_by_sqlstate FROM ml_rag.stats WHERE stage = 'total'").fetchone() or (None,)
    ones = dict.fromkeys(("22023", "57014", "57xxx", "42501", "42P01", "42xxx", "XXxxx", "other", "P0002"), 1)
    assert found == {**ones, "22xxx": 2}


def test_what_is_rolled_back_is_counted(asker: Connection) -> None:
    asker.execute("BEGIN")
    run(asker, "PERFORM ml_rag._end(c, '22012');")
    asker.execute("ROLLBACK")
    assert stats(asker) == {("ml_rag", "total"): (1, 1)}


def test_a_call_inside_a_call_counts_for_both(asker: Connection) -> None:
    run(
        asker,
        "DECLARE d integer := ml_rag._begin('ml_generate'); BEGIN"
        " PERFORM ml_rag._stage(d, 'generate', 'm'); PERFORM ml_rag._end(d); PERFORM ml_rag._end(c); END;",
    )
    assert stats(asker) == {("ml_rag", "total"): (1, 0), **{("ml_generate", s): (1, 0) for s in ("total", "generate")}}


def test_an_end_ends_what_was_begun_inside(asker: Connection) -> None:
    run(
        asker,
        "PERFORM ml_rag._begin('ml_generate'); PERFORM ml_rag._begin('ml_rank'); PERFORM ml_rag._end(c, '22012');",
    )
    assert stats(asker) == {(routine, "total"): (1, 1) for routine in ("ml_rag", "ml_generate", "ml_rank")}


def test_a_call_that_never_ended_is_an_error_once_the_next_begins(asker: Connection) -> None:
    run(asker, "PERFORM ml_rag._stage(c, 'search');")
    # what an earlier test has left running may not be over
    assert asker.execute("SELECT * FROM ml_rag.activity WHERE datname = current_database()").fetchall() == []
    run(asker, "PERFORM ml_rag._end(c);")
    assert stats(asker) == {("ml_rag", "total"): (2, 1), ("ml_rag", "search"): (1, 1)}


@pytest.mark.parametrize("routine", ["nonsense", "", "total", None, "x" * 10000])
def test_a_routine_that_is_none_is_not_counted(asker: Connection, routine: str | None) -> None:
    assert begin(asker, routine) is None  # type: ignore[arg-type]
    assert stats(asker) == {}


@pytest.mark.parametrize("call", ["0", "-3", "NULL", "2147483647"])
def test_a_call_that_is_none_is_ignored(asker: Connection, call: str) -> None:
    begin(asker)
    for statement in (f"_stage({call}, 'search')", f"_end({call})", f"_progress({call}, 'a.b', 'p')"):
        asker.execute(f"SELECT ml_rag.{statement}")
    assert stats(asker) == {}


def test_nothing_is_told_where_track_is_off(owner: Connection, asker: Connection) -> None:
    owner.execute("SELECT ml_rag.configure('track', 'off')")
    assert begin(asker) is None
    run(asker, "PERFORM ml_rag._stage(c, 'search'); PERFORM ml_rag._progress(c, 'a.b', 'p'); PERFORM ml_rag._end(c);")
    assert stats(asker) == {}
    owner.execute("SELECT ml_rag.configure('track', 'on')")
    run(asker, "PERFORM ml_rag._end(c);")
    assert stats(asker) == {("ml_rag", "total"): (1, 0)}


def test_a_session_that_tells_learns_that_track_is_off(owner: Connection, asker: Connection) -> None:
    assert begin(asker) is not None
    owner.execute("SELECT ml_rag.configure('track', 'off')")
    wait_until(lambda: begin(asker) is None)
    before = stats(asker)
    run(asker, "PERFORM ml_rag._end(c);")
    assert stats(asker) == before
    owner.execute("SELECT ml_rag.configure('track', NULL)")
    wait_until(lambda: begin(asker) is not None)


REPORTED = {
    "a call": "SELECT ml_rag._end(ml_rag._begin('ml_rag'))",
    "a question": "SELECT ml_rag._end(-1, '00000', '{}', now())",
    "a failed question": "SELECT ml_rag._end(-1, '22012')",
    "a question at a stage": "SELECT ml_rag._stage(-1, 'embed', 'm'), ml_rag._end(-1)",
}


def test_nobody_counts_for_the_owner_of_a_function_that_was_called(db: Database, owner: Connection) -> None:
    name = db.role("asker")
    owner.execute(
        "CREATE FUNCTION public.tell() RETURNS bool LANGUAGE sql SECURITY DEFINER AS "
        "$$ SELECT ml_rag._end(ml_rag._begin('ml_rag')) $$"
    )
    connection = db.connect()
    connection.execute(f"SET SESSION AUTHORIZATION {name}")
    connection.execute("SELECT public.tell()")
    for statement in REPORTED.values():
        connection.execute(statement)
    rows = owner.execute("SELECT role, calls FROM ml_rag.stats WHERE stage = 'total'").fetchall()
    assert sorted(rows) == sorted([(owner.info.user, 1), (name, len(REPORTED))])


NAMES = ['x"', "x\\", "x\n", 'ml_rag","total",1,"00000",0,0],[10,"ml_rag', "é" * 300, "total", ""]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_counts_for_another_role(db: Database, owner: Connection, asker: Connection, name: str) -> None:
    """What is told is JSON, and any role may call what tells of calls."""
    begin(asker)
    asker.execute("SELECT ml_rag._end(ml_rag._begin(%s, %s))", (name, name))
    asker.execute(
        "DO $do$ DECLARE c integer := ml_rag._begin('ml_rag'); BEGIN"
        f" PERFORM ml_rag._stage(c, $n${name}$n$, $n${name}$n$), ml_rag._progress(c, $n${name}$n$, $n${name}$n$),"
        f" ml_rag._end(c, $n${name}$n$); END $do$"
    )
    for trace, began in ("[]", 0), (json.dumps(name), 1), (json.dumps([{"stage": name, "ended": name}]), 1):
        asker.execute("SELECT ml_rag._report('end', -1, %s, '', %s, %s)", (name, trace, began))
    rows = owner.execute("SELECT DISTINCT role, routine, stage FROM ml_rag.stats").fetchall()
    assert set(rows) <= {(db.role("asker"), "ml_rag", "total")}


def test_a_call_counts_for_the_role_that_it_runs_as(db: Database, owner: Connection) -> None:
    connection = db.connect()
    for name in ("asker", "tenant", "asker"):
        connection.execute(f"SET ROLE {db.role(name)}")
        run(connection, "PERFORM ml_rag._end(c);")
        connection.execute("RESET ROLE")
    rows = owner.execute("SELECT role, calls FROM ml_rag.stats ORDER BY 1").fetchall()
    assert rows == [(db.role("asker"), 2), (db.role("tenant"), 1)]


def test_where_track_is_off_no_session_starts_python_for_it(owner: Connection, asker: Connection) -> None:
    def has_python() -> bool:
        maps = owner.execute("SELECT pg_read_file(format('/proc/%%s/maps', %s::int))", (asker.info.backend_pid,))
        (text,) = maps.fetchone() or ("",)
        assert "postgres" in text
        return "libpython" in text

    owner.execute("SELECT ml_rag.configure('track', 'off')")
    assert begin(asker) is None
    assert not has_python()
    owner.execute("SELECT ml_rag.configure('track', 'on')")
    assert begin(asker) is not None
    assert has_python()
