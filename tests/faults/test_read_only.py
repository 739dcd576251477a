"""The cluster read-only, and a hot standby: everything that reads works there, what writes says a clear 25006."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from support.cluster import Connection
from support.invariants import ask_all, documents_of
from support.loading import rows
from support.private_cluster import PrivateCluster
from support.site import STORE, Site
from support.stores import error

#: what reads, and asks the models
READS = [
    "SELECT ml_rag_answer('topic3')",
    "SELECT count(*) FROM ml_rag_search('topic3', '{\"keyword_search\": true}')",
    "SELECT count(*) FROM ml_rag_search('topic3', '{\"keyword_search\": true, \"semantic_search\": false}')",
    "SELECT count(*) FROM ml_rag_search('topic3', '{\"rerank\": {}}')",
    "SELECT count(*) FROM ml_rag_search('topic3', '{\"required_keywords\": [\"topic3\"]}')",
    "SELECT ml_generate('why?')",
    "SELECT ml_embed_row('a text')",
    "SELECT * FROM ml_rank_rows('topic3', '{1,2}', '{topic3,other}')",
    "SELECT count(*) FROM ml_supported_models()",
    "SELECT count(*) FROM ml_rag.discover()",
    "SELECT ml_rag_evaluate('SELECT ''topic3'' AS question', '{\"keep\": false}') ->> 'questions'",
]
#: what would write -> words of its message
WRITES = {
    'CALL vector_store_load(%(uri)s, \'{"table_name": "docs"}\')': "documents cannot be loaded in a read-only",
    'CALL vector_store_load(%(uri)s, \'{"table_name": "other"}\')': "documents cannot be loaded in a read-only",
    "SELECT ml_rag.load_document('docs', 'a.txt', 'text')": "documents cannot be loaded in a read-only",
    "SELECT ml_rag.create_store('public.other')": "a vector store cannot be made in a read-only",
    "CALL ml_rag_table('public.questions.question', 'public.questions.a')": "results cannot be written in a read-only",
    "CALL ml_generate_table('public.questions.question', 'public.o.a')": "results cannot be written in a read-only",
    "CALL ml_embed_table('public.questions.question', 'public.o.a')": "results cannot be written in a read-only",
    "SELECT ml_rag_evaluate('SELECT ''topic3'' AS question')": "cannot be kept in a read-only",
    "SELECT ml_rag.remove_documents('docs', '{a}')": "read-only transaction",
    "SELECT ml_rag.merge_keyword_index('docs')": "read-only transaction",
    "SELECT ml_rag.enable_keyword_search('docs')": "",
    "SELECT ml_rag.disable_keyword_search('docs')": "",
    "SELECT ml_rag.configure('abstain_text', 'no')": "read-only transaction",
}


def prepare(site: Site) -> dict[str, Any]:
    """The corpus and a table of questions; what everything that reads answers."""
    connection = site.loaded()
    connection.execute("CREATE TABLE questions (id integer PRIMARY KEY, question text)")
    connection.execute("INSERT INTO questions VALUES (1, 'topic3')")
    return {query: rows(connection, query) for query in READS}


def assert_reads(connection: Connection, before: dict[str, Any], site: Site) -> None:
    for query, expected in before.items():
        assert rows(connection, query) == expected, query
    assert documents_of(connection, STORE) == site.undisturbed.documents
    assert ask_all(connection, STORE) == site.undisturbed.answers


def assert_no_writes(connection: Connection, site: Site, hint: str) -> None:
    served = site.server.metric('ml_rag_requests_total{model="fake-embed",route="/v1/embeddings"')
    documents = site.server.metric('ml_rag_requests_total{model="fake-embed",route="/v1/documents"')
    assert served > 0
    for statement, words in WRITES.items():
        with error("25006", words, ours=False) as caught:
            connection.execute(statement, {"uri": f"{site.folder}/"} if "uri" in statement else None)
        if "cannot be loaded" in words or "cannot be written" in words:
            assert hint in caught.hint
            assert caught.detail
    # no model was asked in vain
    assert site.server.metric('ml_rag_requests_total{model="fake-embed",route="/v1/embeddings"') == served
    assert site.server.metric('ml_rag_requests_total{model="fake-embed",route="/v1/documents"') == documents


@pytest.mark.parametrize("role", [None, pytest.param("asker", marks=pytest.mark.slow)])
def test_a_read_only_cluster(site: Site, role: str | None) -> None:
    before = prepare(site)
    with psycopg.connect(site.private.dsn, autocommit=True) as maintenance:
        maintenance.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        maintenance.execute("SELECT pg_reload_conf()")
        try:
            owner = site.connect()
            if role:
                owner.execute("BEGIN READ WRITE; GRANT SELECT ON docs TO ml_rag_user; COMMIT")
            connection = site.database.connect(role)
            assert rows(connection, "SHOW default_transaction_read_only") == [("on",)]
            assert_reads(connection, before, site)
            if role is None:
                assert_no_writes(connection, site, "BEGIN READ WRITE")
                # who insists may
                connection.execute("SET default_transaction_read_only = off")
                assert site.load(connection)["documents"]["unchanged"] == 40
        finally:
            maintenance.execute("SET default_transaction_read_only = off")
            maintenance.execute("ALTER SYSTEM RESET default_transaction_read_only")
            maintenance.execute("SELECT pg_reload_conf()")
    after = site.connect()
    after.execute("SET default_transaction_read_only = off; DROP TABLE questions")
    site.database.close()
    site.verify()


@pytest.fixture(scope="module")
def standby(private: PrivateCluster) -> Iterator[PrivateCluster]:
    with private.standby() as standby:
        yield standby


def connect_to(standby: PrivateCluster, site: Site, role: str | None = None) -> Connection:
    connection: Connection = psycopg.connect(make_conninfo(standby.dsn, dbname=site.database.name), autocommit=True)
    if role:
        connection.execute(f"SET SESSION AUTHORIZATION {site.database.role(role)}")
    return connection


def test_a_hot_standby(site: Site, standby: PrivateCluster) -> None:
    before = prepare(site)
    site.connect().execute("GRANT SELECT ON docs TO ml_rag_user")
    site.private.caught_up(standby)
    with connect_to(standby, site) as connection:
        assert_reads(connection, before, site)
        assert_no_writes(connection, site, "primary")
        # what changes on the primary shows here
        site.connect().execute("DELETE FROM docs WHERE document_name LIKE '%d003.txt'")
        site.private.caught_up(standby)
        only = "SELECT count(*) FROM ml_rag_search('only3', '{\"required_keywords\": [\"only3\"]}')"
        with error("P0002"):
            rows(connection, only)
        site.load()
        site.private.caught_up(standby)
        assert rows(connection, only) == [(3,)]
    with connect_to(standby, site, "asker") as asker:
        assert_reads(asker, before, site)
    site.connect().execute("DROP TABLE questions")
    site.verify()


@pytest.mark.slow
def test_a_standby_that_is_promoted(site: Site, private: PrivateCluster) -> None:
    """It goes on from there: a load finds what was loaded on the former primary."""
    prepare(site)
    with private.standby("promoted") as promoted:
        site.connect().execute("DELETE FROM docs WHERE document_name LIKE '%d00%'")
        private.caught_up(promoted)
        with psycopg.connect(promoted.dsn, autocommit=True) as maintenance:
            maintenance.execute("SELECT pg_promote()")
        with connect_to(promoted, site) as connection:
            result = site.load(connection)
            assert (result["documents"]["unchanged"], result["documents"]["loaded"]) == (30, 10)
            assert documents_of(connection, STORE) == site.undisturbed.documents
            assert ask_all(connection, STORE) == site.undisturbed.answers
    site.connect().execute("DROP TABLE questions")
    site.load()
    site.verify()
