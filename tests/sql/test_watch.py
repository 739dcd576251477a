"""05_watch: calls in flight, progress, statistics; and who sees what of others."""

from __future__ import annotations

from support.cluster import Connection
from support.stores import error


def test_a_role_without_privileges_sees_nothing(stranger: Connection) -> None:
    for relation in ("activity", "progress", "stats"):
        with error("42501", ours=False):
            stranger.execute(f"SELECT * FROM ml_rag.{relation}")


def test_reset_is_for_the_owner(owner: Connection, asker: Connection) -> None:
    asker.execute("DO $$ BEGIN PERFORM ml_rag._end(ml_rag._begin('ml_rag')); END $$")
    with error("42501", ours=False):
        asker.execute("SELECT ml_rag.reset_stats()")
    assert asker.execute("SELECT calls FROM ml_rag.stats").fetchall() == [(1,)]
    (since,) = owner.execute("SELECT ml_rag.reset_stats()").fetchone() or (None,)
    assert asker.execute("SELECT * FROM ml_rag.stats").fetchall() == []
    asker.execute("DO $$ BEGIN PERFORM ml_rag._end(ml_rag._begin('ml_rag')); END $$")
    assert asker.execute("SELECT calls, since FROM ml_rag.stats").fetchall() == [(1, since)]
