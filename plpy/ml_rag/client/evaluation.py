"""Measures a dataset on a database: its documents into a store, its questions through the arms of the search.

It calls what users call: ``ml_rag.load_documents`` and ``ml_rag_evaluate``. Nothing is left half done: a document is
loaded whole or not at all, and so is a run; an interrupted load resumes when it is called again.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from ml_rag import files
from ml_rag.client.datasets import Dataset, Question
from ml_rag.errors import InvalidRequest
from ml_rag.search_path import PIN, refuse_borrowed_role

#: told how much of the work is done: (done, of)
Progress = Callable[[int, int], None]

#: documents and bytes of one call
CALL = (64, 2 * 1024 * 1024)

#: the comment of a store that is made here
_MADE = "made by ml-rag eval"
_IS_ANOTHER = """SELECT pg_catalog.obj_description(c.oid, 'pg_class') IS DISTINCT FROM %s
FROM pg_catalog.pg_class AS c WHERE c.oid = pg_catalog.to_regclass(%s)::oid"""

_COUNT = re.compile(r"asking questions: (\d+) of (\d+)\b")


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to search. ``options`` are those of ``ml_rag``; ``exact`` = without the approximate index."""

    title: str
    options: dict[str, Any]
    exact: bool = False


ARMS = {
    # whatever is the database's default
    "vector": Arm("semantic", {"keyword_search": False}),
    "exact": Arm("semantic, exact", {"keyword_search": False}, exact=True),
    "text": Arm("keyword", {"semantic_search": False, "keyword_search": True}),
    "hybrid": Arm("hybrid", {"keyword_search": True}),
    "ranker": Arm("hybrid, reranked", {"keyword_search": True, "rerank": {}}),
}


@dataclass(slots=True)
class Loaded:
    """What has become of the documents. ``seconds``: of this call, which costs nothing where all were there."""

    documents: int = 0
    new: int = 0
    segments: int = 0
    seconds: float = 0.0
    failed: list[dict[str, Any]] = field(default_factory=list)


def connect(dsn: str) -> psycopg.Connection[Any]:
    """An autocommit connection."""
    connection = psycopg.connect(dsn, autocommit=True, application_name="ml-rag eval")
    refuse_borrowed_role(connection, PIN)
    connection.execute("SELECT set_config('ml_rag.progress_seconds', '0.5', false)")
    return connection


def table_name(name: str) -> str:
    """The name of a dataset's store: letters, digits and underscores, at most 63 bytes."""
    return re.sub(r"\W+", "_", name.lower(), flags=re.ASCII).strip("_")[:63] or "dataset"


class Evaluation:
    """A dataset, and its store in ``schema``, which is made where there is none.

    Args:
        options: of ``ml_rag.load_documents`` (``language``, ``embed_model_id``, ``chunking``), null ones left out.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], dataset: Dataset, schema: str, options: dict[str, Any]
    ) -> None:
        self._connection = connection
        self.dataset = dataset
        self._options = {name: value for name, value in options.items() if value is not None}
        self._table = (schema, table_name(dataset.name))
        self.store = ".".join(self._table)
        self._oid: int | None = None

    def _value(self, query: LiteralString | sql.Composed, *arguments: Any) -> Any:
        row = self._connection.execute(query, arguments or None).fetchone()
        return row[0] if row else None

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """A transaction on the store. The table's name is known to all, so its owner must be trusted, and keep it."""
        with self._connection.transaction():
            self._value("SELECT ml_rag._refuse_untrusted(%s)", self._oid)
            self._value("SELECT ml_rag._hold_names(%s)", Jsonb({self._name: self._oid}))
            yield

    def _values(self, query: LiteralString, *arguments: Any) -> list[Any]:
        """What a statement on the store returns."""
        with self._judged():
            return [row[0] for row in self._connection.execute(query, (self._oid, *arguments)).fetchall()]

    def _routine(self, name: str) -> sql.Identifier:
        """A public routine of the extension."""
        query = (
            "SELECT n.nspname FROM pg_catalog.pg_extension AS e"
            " JOIN pg_catalog.pg_namespace AS n ON n.oid = e.extnamespace WHERE e.extname = 'ml_rag'"
        )
        return sql.Identifier(str(self._value(query)), name)

    def load(self, progress: Progress) -> Loaded:
        """Bring the store to what the dataset has: new and changed documents in, gone ones out, then the indexes."""
        began = time.monotonic()
        # one that is not there needs the privilege to make it, one that is there does not
        if self._value("SELECT pg_catalog.to_regnamespace(pg_catalog.quote_ident(%s))", self._table[0]) is None:
            self._connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._table[0])))
        wanted = {name: self._options.get(name) for name in ("embed_model_id", "language")}
        options = {"description": _MADE, **wanted}
        self._name = self._value("SELECT pg_catalog.format('%%I.%%I', %s::text, %s::text)", *self._table)
        if self._value(_IS_ANOTHER, _MADE, self._name):
            # documents that the folder does not have would be removed
            raise InvalidRequest(
                f"{self.store} is a table that ml-rag eval has not made",
                detail=f'Its comment is not "{_MADE}".',
                hint="Take another --schema, or rename the folder.",
            )
        made = self._value("SELECT ml_rag.create_store(%s, %s)::oid", self._name, Jsonb(options))
        # one that is refused is not dropped at the end
        self._value("SELECT ml_rag._refuse_untrusted(%s)", made)
        self._oid = made
        loaded = Loaded(documents=len(self.dataset.documents))
        sizes = [
            (name, len(content) if isinstance(content, bytes) else content.stat().st_size)
            for name, content in self.dataset.documents.items()
        ]
        done, of_name = 0, dict(sizes)
        for batch in files.batches(sizes, *CALL):
            self._load(batch, loaded)
            done += len(batch)
            progress(done, len(sizes))
        present = self._values("SELECT ml_rag.documents_below(%s, '')")
        if gone := [name for name in present if name not in of_name]:
            self._values("SELECT ml_rag.remove_documents(%s, %s)", gone)
        self._values("SELECT ml_rag.index_store(%s)")
        self._index_keywords()
        with self._judged():
            loaded.segments = self._value(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(*self._table)))
        loaded.seconds = time.monotonic() - began
        return loaded

    def _load(self, names: Sequence[str], loaded: Loaded) -> None:
        contents = {name: self.dataset.content(name) for name in names}
        hashes = [hashlib.sha256(content).hexdigest() for content in contents.values()]
        query = "SELECT ml_rag.unchanged_documents(%s, %s, %s, %s)"
        for name in self._values(query, list(contents), hashes, Jsonb(self._options)):
            del contents[name]
        if contents:
            query = "SELECT ml_rag.load_documents(%s, %s, %b, %s)"
            result = self._values(query, list(contents), list(contents.values()), Jsonb(self._options))[0]
            loaded.new += result["documents"]["loaded"] + result["documents"]["changed"]
            loaded.failed += result["failed"]

    def _index_keywords(self) -> None:
        """The keyword index, where a store that was there before lacks it or has that of another language."""
        query = (
            "SELECT EXISTS (SELECT FROM ml_rag.keyword_index WHERE store = %s::oid::regclass"
            " AND configuration = ml_rag.text_search_configuration(%s))"
        )
        language = self._options.get("language")
        if self._values(query, language) == [False]:
            self._values("SELECT ml_rag.enable_keyword_search(%s::oid::regclass, %s)", Jsonb({"language": language}))

    def missing(self, arm: Arm) -> str | None:
        """Why an arm cannot run here, or None."""
        if "rerank" in arm.options:
            query = sql.SQL(
                "SELECT s.value, coalesce((SELECT m.available FROM {}() AS m WHERE m.model_id = s.value), false)"
                " FROM ml_rag.setting AS s WHERE s.name = 'rerank_model_id'"
            ).format(self._routine("ml_supported_models"))
            row = self._connection.execute(query).fetchone()
            assert row is not None
            if not row[1]:
                return f"{row[0]} is missing: ml-rag models pull {row[0]}"
        return None

    def ask(self, questions: Sequence[Question]) -> None:
        """Make these the questions of the runs that follow."""
        self._connection.execute("DROP TABLE IF EXISTS pg_temp.ml_rag_questions")
        self._connection.execute(
            "CREATE TEMP TABLE ml_rag_questions (place integer, id text, question text, documents jsonb, answers jsonb,"
            " answerable boolean)"
        )
        with self._connection.cursor().copy("COPY pg_temp.ml_rag_questions FROM STDIN") as copy:
            for place, q in enumerate(questions):
                row = (place, q.id, q.text, Jsonb(q.documents) if q.documents else None, Jsonb(q.answers), q.answerable)
                copy.write_row(row)

    def run(self, arm: Arm, options: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """``ml_rag_evaluate``'s document for one arm; ``options`` are those of ``ml_rag_evaluate``."""
        search = {**(options.get("options") or {}), **arm.options, "vector_store": [self.store]}
        options = {
            # documents are loaded under the very names that the questions expect
            "match": "document_name",
            "name": f"{self.dataset.name}: {arm.title}",
            **options,
            "options": search,
        }
        with self._counted(progress), self._exact(arm.exact), self._judged():
            query = "SELECT * FROM pg_temp.ml_rag_questions ORDER BY place"
            evaluate = sql.SQL("SELECT {}(%s, %s)").format(self._routine("ml_rag_evaluate"))
            result: dict[str, Any] = self._value(evaluate, query, Jsonb(options))
        return result

    @contextmanager
    def _exact(self, exact: bool) -> Iterator[None]:
        if exact:
            self._connection.execute("SET enable_indexscan = off")
        try:
            yield
        finally:
            if exact and not self._connection.broken:
                self._connection.execute("RESET enable_indexscan")

    @contextmanager
    def _counted(self, progress: Progress) -> Iterator[None]:
        def count(diagnostic: psycopg.errors.Diagnostic) -> None:
            if match := _COUNT.search(diagnostic.message_primary or ""):
                progress(int(match[1]), int(match[2]))

        self._connection.add_notice_handler(count)
        try:
            yield
        finally:
            self._connection.remove_notice_handler(count)

    def drop(self) -> None:
        """Remove the store, if it is one."""
        if self._oid is None:
            return
        self._connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(*self._table)))
