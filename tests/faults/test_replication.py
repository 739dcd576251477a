"""A store that a logical replication sends to another database gets another embedding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from psycopg.conninfo import make_conninfo

from support.cluster import Cluster, Connection, Database, noticed
from support.embeddings import TEXTS, add, assert_embedded, comment_on, rows, use, vectors
from support.models_server import ModelsServer, models
from support.private_cluster import PrivateCluster
from support.processes import wait_until
from support.stores import create_store, error, fake_embedding, mark, search
from support.vectorizers import create, run

__all__ = ["models"]

INSERT = "INSERT INTO docs VALUES ('late', '{}', %s, 1, %s, %s)"


@dataclass
class Replication:
    """Store docs at a publisher and at a subscriber; the publication is ``p``."""

    private: PrivateCluster
    publisher: Connection
    subscriber: Connection
    warnings: list[tuple[str, str]]

    def start(self, publication: str) -> None:
        """Publish as the statement says, and wait for the first copy."""
        self.publisher.execute(publication)
        slot = f"slot_{self.publisher.info.dbname}"
        # the two are databases of one cluster, where a subscription that makes its own slot would wait for itself
        self.publisher.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
        there = make_conninfo(self.private.dsn, dbname=self.publisher.info.dbname)
        self.subscriber.execute(
            f"CREATE SUBSCRIPTION s CONNECTION '{there}' PUBLICATION p WITH (create_slot = false, slot_name = '{slot}')"
        )
        self.wait_for_copy()

    def wait_for_copy(self) -> None:
        ready = "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel"
        wait_until(lambda: self.subscriber.execute(ready).fetchone() == (True,), 30)

    def caught_up(self) -> None:
        """Wait until the subscriber has what the publisher has committed."""
        row = self.publisher.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
        sent = "SELECT bool_and(confirmed_flush_lsn >= %s) FROM pg_replication_slots WHERE database = %s"
        values = (*(row or ()), self.publisher.info.dbname)
        wait_until(lambda: self.publisher.execute(sent, values).fetchone() == (True,), 30)

    def errors(self) -> int:
        row = self.subscriber.execute("SELECT apply_error_count FROM pg_stat_subscription_stats").fetchone()
        return int(row[0]) if row else 0

    def stop(self) -> None:
        self.subscriber.execute("ALTER SUBSCRIPTION s DISABLE; ALTER SUBSCRIPTION s SET (slot_name = NONE)")
        self.subscriber.execute("DROP SUBSCRIPTION s")
        slots = "FROM pg_replication_slots WHERE database = %s"
        mine = (self.publisher.info.dbname,)
        wait_until(lambda: not self.publisher.execute(f"SELECT {slots} AND active", mine).fetchall(), 30)
        self.publisher.execute(f"SELECT pg_drop_replication_slot(slot_name) {slots}", mine)


@pytest.fixture
def replication(
    private: PrivateCluster, cluster: Cluster, db: Database, owner: Connection, models: ModelsServer
) -> Iterator[Replication]:
    with cluster.database() as other:
        subscriber = other.connect()
        subscriber.execute(
            "SELECT ml_rag.configure('model_server', %s)",
            owner.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone(),
        )
        create_store(owner, rows=rows(TEXTS), type="vector(16)")
        create_store(subscriber, type="vector(16)")
        warnings = noticed(owner, lambda n: (n.message_primary or "", n.message_hint or ""))
        made = Replication(private, owner, subscriber, warnings)
        try:
            yield made
        finally:
            with contextlib.suppress(Exception):
                made.stop()


def told(replication: Replication) -> list[str]:
    """The hints of the warnings about subscribers."""
    return [hint for message, hint in replication.warnings if "subscribers" in message]


def test_a_subscriber_that_lacks_the_new_column_stops_and_goes_on_once_it_has_it(replication: Replication) -> None:
    publisher, subscriber = replication.publisher, replication.subscriber
    replication.start("CREATE PUBLICATION p FOR TABLE docs")
    add(publisher)
    (hint,) = told(replication)
    assert "ALTER TABLE public.docs ADD COLUMN segment_embedding_more public.vector(8);" in hint
    wait_until(lambda: replication.errors() > 0, 30)
    publisher.execute(INSERT, (30, "late frost", fake_embedding("late frost")))
    # it searches what it has, and gets the rest when it has the column
    assert search(subscriber, "green tree", {"n_citations": 1})[0][5:7] == ("green tree", 0)
    assert subscriber.execute("SELECT count(*) FROM docs").fetchone() == (7,)
    subscriber.execute("ALTER TABLE public.docs ADD COLUMN segment_embedding_more vector(8)")
    replication.caught_up()
    assert vectors(subscriber) == vectors(publisher)
    assert add(publisher)["segments"] == 1
    replication.caught_up()
    assert_embedded(subscriber)
    # once is enough
    assert len(told(replication)) == 1


def test_a_publication_of_new_rows_alone_stops_too(replication: Replication) -> None:
    publisher = replication.publisher
    replication.start("CREATE PUBLICATION p FOR TABLE docs WITH (publish = 'insert')")
    add(publisher)
    assert len(told(replication)) == 1
    publisher.execute(INSERT, (30, "late frost", fake_embedding("late frost")))
    wait_until(lambda: replication.errors() > 0, 30)


def test_a_subscriber_that_has_the_column_follows_and_switches_by_its_comments(replication: Replication) -> None:
    publisher, subscriber = replication.publisher, replication.subscriber
    replication.start("CREATE PUBLICATION p FOR TABLES IN SCHEMA public")
    # of as many dimensions as the other one: only the column tells them apart
    subscriber.execute("ALTER TABLE docs ADD COLUMN segment_embedding_more vector(16)")
    add(publisher, "more", "other")
    use(publisher, "more")
    publisher.execute("SELECT ml_rag.load_document('docs', 'later', 'red fish')")
    publisher.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    replication.caught_up()
    assert replication.errors() == 0
    assert vectors(subscriber) == vectors(publisher)
    assert vectors(subscriber, column="segment_embedding_more")["red hut"] is None
    for column in ("segment_embedding", "segment_embedding_more"):
        mark(subscriber, "docs", str(comment_on(publisher, column=column)), column)
    found = search(subscriber, "red fish", {"embed_model_id": "other", "n_citations": 1})
    assert found[0][5:7] == ("red fish", 0)


def test_a_publication_of_other_columns_does_not_notice(replication: Replication) -> None:
    publisher, subscriber = replication.publisher, replication.subscriber
    subscriber.execute("ALTER TABLE docs DROP COLUMN segment_embedding")
    listed = "document_name, metadata, document_id, segment_number, segment"
    replication.start(f"CREATE PUBLICATION p FOR TABLE docs ({listed})")
    add(publisher)
    publisher.execute("UPDATE docs SET segment = 'red hut' WHERE document_id = 1")
    replication.caught_up()
    assert told(replication) == []
    assert replication.errors() == 0
    assert subscriber.execute("SELECT segment FROM docs WHERE document_id = 1").fetchone() == ("red hut",)


def test_a_published_table_without_a_key_is_refused_by_postgresql(replication: Replication) -> None:
    publisher = replication.publisher
    publisher.execute("ALTER TABLE docs DROP CONSTRAINT docs_pkey; CREATE PUBLICATION p FOR TABLE docs")
    with error("55000", "replica identity", ours=False):
        add(publisher)
    publisher.execute("ALTER TABLE docs REPLICA IDENTITY FULL")
    assert add(publisher)["segments"] == 7
    assert_embedded(publisher)


def test_tables_with_a_vectorizer(replication: Replication) -> None:
    publisher, subscriber = replication.publisher, replication.subscriber
    for connection in (publisher, subscriber):
        for table, destination in (("beside", "column"), ("apart", "table")):
            connection.execute(f"CREATE TABLE {table} (id integer PRIMARY KEY, name text, price numeric)")
            create(connection, table, "name", destination=destination)
    for table in ("beside", "apart"):
        publisher.execute(f"INSERT INTO {table} VALUES (1, E'lamp\n\nred', 1), (2, 'tent', 2), (3, 'rope', 3)")
        run(publisher, table)
    replication.start("CREATE PUBLICATION p FOR TABLE beside, apart, apart_segments")
    for table in ("beside", "apart"):
        publisher.execute(f"INSERT INTO {table} VALUES (4, 'hat', 1); UPDATE {table} SET name = 'cap' WHERE id = 2")
        run(publisher, table)
        publisher.execute(f"UPDATE {table} SET name = 'waits' WHERE id = 1; DELETE FROM {table} WHERE id = 3")
        publisher.execute(f"UPDATE {table} SET id = 9 WHERE id = 4; UPDATE {table} SET price = 7")
    replication.caught_up()
    assert replication.errors() == 0
    for statement, n in (
        ("SELECT id, name, price, segment, segment_embedding::text FROM beside ORDER BY id", 3),
        ("SELECT source_id, segment_number, segment, segment_embedding::text FROM apart_segments ORDER BY 1, 2", 3),
    ):
        found = subscriber.execute(statement).fetchall()
        assert found == publisher.execute(statement).fetchall()
        assert len(found) == n
        assert [row[-1] for row in found].count(None) == 1
