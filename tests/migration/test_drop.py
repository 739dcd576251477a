"""CREATE and DROP EXTENSION: what goes with it, and what stays usable."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from support import content, objects
from support.cluster import Cluster, Connection, Database
from support.keywords import assert_exact
from support.stores import error

TABLES = ["docs", "plain", "half", "parted", "shared", "questions"]


@pytest.fixture
def filled(db: Database, owner: Connection) -> dict[str, str]:
    """The roles of a filled database."""
    roles = {name: db.role(name) for name in ("asker", "tenant")} | {"loader": db.role("stranger")}
    owner.execute(sql.SQL("GRANT ml_rag_loader TO {}").format(sql.Identifier(roles["loader"])))
    content.make(owner, roles)
    owner.execute(sql.SQL("REVOKE ml_rag_loader FROM {}").format(sql.Identifier(roles["loader"])))
    return roles


def counts(owner: Connection) -> list[tuple[int]]:
    return [owner.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(t))).fetchone() for t in TABLES]  # type: ignore[misc]


def test_what_users_have_built_upon_it_keeps_it_from_being_dropped(owner: Connection, filled: dict[str, str]) -> None:
    before = objects.objects(owner)
    with error("2BP01", "trigger ml_rag_keywords_insert on table docs", ours=False):
        owner.execute("DROP EXTENSION ml_rag")
    assert objects.objects(owner) == before
    assert_exact(owner, "copper violin")


def test_cascade_takes_triggers_and_views_and_leaves_the_tables(owner: Connection, filled: dict[str, str]) -> None:
    rows = counts(owner)
    owner.execute("DROP EXTENSION ml_rag CASCADE")
    assert counts(owner) == rows
    assert owner.execute("SELECT to_regclass('nearest')").fetchone() == (None,)
    assert owner.execute("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'ml_rag%'").fetchone() == (0,)
    assert owner.execute("SELECT count(*) FROM pg_event_trigger").fetchone() == (0,)
    assert owner.execute("SELECT to_regnamespace('ml_rag')").fetchone() == (None,)
    # the tables can be written, read by what pgvector offers, and dropped
    content.insert(owner, "docs", content.rows(5, 5000))
    owner.execute("UPDATE docs SET segment = 'x' WHERE document_id = 1; DELETE FROM docs WHERE document_id = 2")
    nearest = owner.execute("SELECT document_id FROM docs ORDER BY segment_embedding <=> %s LIMIT 3", (str([1] * 16),))
    assert len(nearest.fetchall()) == 3
    owner.execute('DROP TABLE half; TRUNCATE shared; DROP SCHEMA "Odd schema" CASCADE')


def test_created_anew_it_finds_the_stores_again(owner: Connection, filled: dict[str, str], cluster: Cluster) -> None:
    fresh = objects.objects(owner)
    stores = "SELECT array_agg(vector_store ORDER BY 1) FROM ml_rag.discover()"
    found = owner.execute(stores).fetchone()
    owner.execute("DROP EXTENSION ml_rag CASCADE; CREATE EXTENSION ml_rag")
    assert objects.differences(fresh, objects.objects(owner)) == []
    assert owner.execute(stores).fetchone() == found
    # its indexes and runs went with it
    keywords = ("ml_rag_internal.keyword_store", "ml_rag_internal.keyword_row")
    for table in (*keywords, "ml_rag.evaluation_run", "ml_rag.evaluation_question", "ml_rag.setting_value"):
        assert owner.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    assert_exact(owner, "copper violin")


def test_dropping_pgvector_takes_the_embeddings_and_the_extension(owner: Connection, filled: dict[str, str]) -> None:
    with error("2BP01", "extension ml_rag depends on extension vector", ours=False):
        owner.execute("DROP EXTENSION vector")
    owner.execute("DROP EXTENSION vector CASCADE")
    assert owner.execute("SELECT extname FROM pg_extension WHERE extname IN ('ml_rag', 'vector')").fetchall() == []
    assert owner.execute("SELECT count(*) FROM docs WHERE segment IS NOT NULL").fetchone() != (0,)


def test_in_one_transaction_with_other_things(owner: Connection, filled: dict[str, str]) -> None:
    before = objects.objects(owner)
    with owner.transaction(force_rollback=True):
        owner.execute("DROP TABLE docs CASCADE; DROP EXTENSION ml_rag CASCADE")
        owner.execute("CREATE EXTENSION ml_rag SCHEMA public; DROP EXTENSION ml_rag")
    assert objects.objects(owner) == before
    assert_exact(owner, "copper violin")


def test_it_needs_a_superuser(db: Database, owner: Connection) -> None:
    asker = db.connect("asker")
    with error("42501", ours=False):
        asker.execute("DROP EXTENSION ml_rag")
    owner.execute("DROP EXTENSION ml_rag")
    owner.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO PUBLIC").format(sql.Identifier(db.name)))
    with error("42501", ours=False):
        asker.execute("CREATE EXTENSION ml_rag")


def test_without_pgvector_it_says_what_is_missing(cluster: Cluster) -> None:
    with cluster.database("template0") as database, database.connect() as owner:
        with pytest.raises(psycopg.Error, match=r"plpython3u|vector") as caught:
            owner.execute("CREATE EXTENSION ml_rag")
        assert caught.value.diag.message_hint == "Use CREATE EXTENSION ... CASCADE to install required extensions too."
