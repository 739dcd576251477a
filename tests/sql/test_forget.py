"""evaluate/forget: what is kept for a role, forgotten by an administrator, and told by ml-rag doctor."""

from __future__ import annotations

from ml_rag.client import doctor
from support.cluster import Connection, Database
from support.stores import error

NAME = "Former 'employee'"


def keep(owner: Connection, role: str) -> None:
    """A conversation and an evaluation run of a role, which need not exist."""
    owner.execute("INSERT INTO ml_rag.conversation (role) VALUES (%s)", (role,))
    owner.execute(
        "INSERT INTO ml_rag.evaluation_run (role, started_at, seconds, source, questions, options, stores, models,"
        " versions, measures, counted, latency, errors)"
        " VALUES (%s, now(), 0, 'q', 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')",
        (role,),
    )


def kept(owner: Connection) -> list[tuple[str, int]]:
    return owner.execute(
        "SELECT k.role, count(*) FROM (SELECT role FROM ml_rag.conversation UNION ALL SELECT role FROM"
        " ml_rag.evaluation_run) AS k GROUP BY 1 ORDER BY 1"
    ).fetchall()


def test_what_is_left_of_a_role_is_told_and_forgotten(db: Database, owner: Connection) -> None:
    for role in (NAME, db.role("asker")):
        keep(owner, role)
    (finding,) = doctor.check_roles(owner)
    assert not finding.ok
    assert finding.found.endswith(f": 2 of {NAME}")
    assert "forget_role" in finding.hint
    assert owner.execute("SELECT ml_rag.forget_role(%s)", (NAME,)).fetchone() == (2,)
    assert kept(owner) == [(db.role("asker"), 2)]
    (finding,) = doctor.check_roles(owner)
    assert finding.ok
    assert owner.execute("SELECT ml_rag.forget_role(%s)", (NAME,)).fetchone() == (0,)


def test_a_role_of_the_same_name_sees_nothing_of_one_that_was_forgotten(db: Database, owner: Connection) -> None:
    keep(owner, db.role("asker"))
    asker = db.connect("asker")
    assert asker.execute("SELECT count(*) FROM ml_rag.conversation").fetchone() == (1,)
    owner.execute("SELECT ml_rag.forget_role(%s)", (db.role("asker"),))
    for table in ("conversation", "message", "evaluation_run", "evaluation_question"):
        assert asker.execute(f"SELECT count(*) FROM ml_rag.{table}").fetchone() == (0,)


def test_only_an_administrator_forgets_a_role_and_is_told_of_all(db: Database, owner: Connection) -> None:
    keep(owner, NAME)
    asker = db.connect("asker")
    with error("42501", ours=False):
        asker.execute("SELECT ml_rag.forget_role(%s)", (NAME,))
    assert list(doctor.check_roles(asker)) == []
    assert kept(owner) == [(NAME, 2)]
