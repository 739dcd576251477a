"""A database with its model server and documents, all of which a test of tests/faults may break."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from support.cluster import Connection, Database, value_of
from support.invariants import (
    Answers,
    ask_all,
    assert_documents,
    assert_files_are_sound,
    assert_keyword_index,
    assert_nothing_left,
    documents_of,
)
from support.loading import load
from support.private_cluster import PrivateCluster
from support.processes import Background, wait_until
from support.supervised_server import SupervisedServer

#: several segments a document
CHUNKING = {"chunking": {"split_by": "paragraph", "segment_tokens": 16}}
DOCUMENTS = 40
STORE = "public.docs"


def options(**given: Any) -> str:
    return json.dumps(given)


#: routine -> a call of it that a model is held by, that model
MODEL_CALLS: dict[str, tuple[str, str]] = {
    "ml_embed_row": (f"SELECT ml_embed_row('a text', '{options(embed_model_id='held-embed')}')", "held-embed"),
    "ml_generate": (f"SELECT ml_generate('why?', '{options(model_id='held-generate')}')", "held-generate"),
    "ml_rag": (f"CALL ml_rag('topic3', '{options(model_options={'model_id': 'held-generate'})}')", "held-generate"),
    "ml_rag_answer": (
        f"SELECT ml_rag_answer('topic3', '{options(model_options={'model_id': 'held-generate'})}')",
        "held-generate",
    ),
    "ml_rag_search": (
        f"SELECT * FROM ml_rag_search('topic3', '{options(rerank={'model_id': 'held-rerank'})}')",
        "held-rerank",
    ),
    "ml_rank_rows": (
        f"SELECT * FROM ml_rank_rows('topic3', '{{1}}', '{{one}}', '{options(model='held-rerank')}')",
        "held-rerank",
    ),
    "ml_rag_evaluate": (
        "SELECT ml_rag_evaluate('SELECT ''topic3'' AS question',"
        f" '{options(generate=True, options={'model_options': {'model_id': 'held-generate'}})}')",
        "held-generate",
    ),
}


def text_of(i: int) -> str:
    """Document i: some paragraphs of words that it shares with others and of words of its own."""
    generator = random.Random(i)
    topic = [f"topic{i % 13}", f"only{i}"]
    paragraphs = []
    for p in range(2 + i % 4):
        words = [*topic, "alpha", "shared", f"item{p}", *(f"word{generator.randrange(40)}" for _ in range(9))]
        generator.shuffle(words)
        paragraphs.append(" ".join(words))
    return "\n\n".join(paragraphs)


def write_corpus(folder: Path, numbers: range = range(DOCUMENTS)) -> None:
    for i in numbers:
        (folder / f"d{i:03}.txt").write_text(text_of(i))


@dataclass
class Site:
    """A database, its model server, the documents; and what they answer while nothing is wrong."""

    private: PrivateCluster
    database: Database
    server: SupervisedServer
    folder: Path
    undisturbed: Answers
    _threads: list[Background] = field(default_factory=list)

    def connect(self, **options: Any) -> Connection:
        return self.database.connect(**options)

    def loaded(self) -> Connection:
        """A new session, by which the documents have been loaded."""
        session = self.connect()
        self.load(session)
        return session

    def load(self, connection: Connection | None = None, **options: Any) -> dict[str, Any]:
        """Load the folder into the store, all of it."""
        given = {"table_name": "docs", **CHUNKING, **options}
        return load(connection or self.connect(), f"{self.folder}/", given)

    def background(self, call: Callable[[], Any]) -> Background:
        self._threads.append(Background(call))
        return self._threads[-1]

    def kill_cluster(self) -> None:
        """As a power failure; then start it, as the machine would."""
        self.private.kill()
        self.private.start()

    def verify(self, *, answers: bool = True) -> None:
        """Everything of ``support.invariants``; the store has the documents of the folder."""
        with psycopg.connect(self.database.dsn, dbname=self.database.name, autocommit=True) as connection:
            assert_documents(connection, self.folder, STORE)
            found = documents_of(connection, STORE)
            if answers:
                assert found == self.undisturbed.documents
                assert ask_all(connection, STORE) == self.undisturbed.answers
            assert_keyword_index(connection, STORE)
            assert_files_are_sound(connection, STORE)
            assert_nothing_left(connection, self.server)

    def end(self) -> None:
        for thread in self._threads:
            thread.join()


class Gate:
    """Holds up whoever is about to write a certain row, until it is opened."""

    _KEY = 471_100

    def __init__(self, site: Site, table: str, condition: str, event: str = "INSERT") -> None:
        """``condition``: SQL over NEW; the first row it holds for stands before the gate."""
        self._keeper = site.connect()
        self._keeper.execute("SELECT pg_advisory_lock(%s)", (self._KEY,))
        self._keeper.execute(
            sql.SQL(
                "CREATE FUNCTION public.gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " PERFORM pg_catalog.pg_advisory_lock_shared({key});"
                " PERFORM pg_catalog.pg_advisory_unlock_shared({key}); RETURN NEW; END $$"
            ).format(key=sql.Literal(self._KEY))
        )
        self._keeper.execute(
            f"CREATE TRIGGER gate BEFORE {event} ON {table} FOR EACH ROW WHEN ({condition})"
            " EXECUTE FUNCTION public.gate()"
        )
        self._table = table

    def wait(self) -> int:
        """Until somebody stands before it; that session's process."""
        query = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"
        wait_until(lambda: self._keeper.execute(query, (self._KEY,)).fetchone(), 30)
        return int(value_of(self._keeper, query, (self._KEY,)))

    def open(self) -> None:
        self._keeper.execute("SELECT pg_advisory_unlock(%s)", (self._KEY,))

    def remove(self, connection: Connection) -> None:
        """With the cluster's crash the keeper's lock is gone, the trigger is not."""
        connection.execute(f"DROP TRIGGER gate ON {self._table}; DROP FUNCTION public.gate()")
