"""A vector store as PL/Python reaches it: each method is one statement, mostly of sql/store/store.sql."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ml_rag.backend import rights
from ml_rag.backend.load import Rows, embed_segments
from ml_rag.backend.sqlstate import sqlstate
from ml_rag.backend.statements import Statements
from ml_rag.errors import DocumentError
from ml_rag.protocol import LOAD_KEYS, MAX_SEGMENTS

#: classes of SQL errors that are about the document's own data: bad value, constraint, limit exceeded
_ABOUT_THE_DATA = ("22", "23", "54")
_UNIQUE_VIOLATION = "23505"
#: ids tried for a new document
_ID_ATTEMPTS = 10

# Qualified throughout: where these run from a procedure the search_path is the caller's.
_STATEMENTS = {
    # across the transactions of a call
    "lock": (
        "SELECT k.key FROM (SELECT ml_rag._store_key($1) AS key OFFSET 0) AS k, pg_catalog.pg_advisory_lock(k.key)",
        "oid",
    ),
    "unlock": ("SELECT pg_catalog.pg_advisory_unlock($1)", "int8"),
    "judge": ("SELECT ml_rag._refuse_untrusted($1)", "oid"),
    "states": ("SELECT s.* FROM ml_rag._document_states($1, $2) AS s", "oid", "text[]"),
    "below": ("SELECT d.* FROM ml_rag.documents_below($1, $2) AS d (name)", "oid", "text"),
    "remove": ("SELECT ml_rag.remove_documents($1, $2) AS n", "oid", "text[]"),
    "replace": ("SELECT r.id, r.kept, r.lost FROM ml_rag._replace_document($1, $2, $3) AS r", "oid", "text", "text[]"),
    "label": ("SELECT ml_rag._label_document($1, $2, $3)", "oid", "text", "jsonb"),
    # those that the caller may write; none comes or goes while a transaction that has read the table lasts
    "others": (
        "SELECT e.column_name, e.model_id FROM ml_rag._embeddings($1) AS e"
        " WHERE NOT (e.column_name OPERATOR(pg_catalog.=) $2 AND e.model_id OPERATOR(pg_catalog.=) $3)"
        " AND pg_catalog.has_column_privilege($1, e.attnum, 'INSERT')",
        *("oid", "name", "text"),
    ),
    "has column": (
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute AS a"
        " WHERE a.attrelid OPERATOR(pg_catalog.=) $1 AND a.attname OPERATOR(pg_catalog.=) $2"
        " AND NOT a.attisdropped) AS it",
        *("oid", "name"),
    ),
    "insert": (
        "SELECT ml_rag._insert_segments($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        *("oid", "text", "int8", "jsonb", "int4", "jsonb[]", "text[]", "name[]", "text[]"),
    ),
}
_run = Statements(_STATEMENTS)

#: characters of all segments that a function makes of a document
MAX_SPLIT_CHARACTERS = 256 * 1024 * 1024

Embed = Callable[[list[str], str], list[str]]


#: What a function makes of a text, up to the first row that is one too many, or comes after too many characters. In
#: FROM all rows of the function would be made first. The order keeps rows for the fetches of a cursor: a function in
#: SQL that is read a part at a time begins anew in each subtransaction, which a fetch is.
_SPLIT = """
SELECT w.s FROM (
  SELECT f.s, pg_catalog.row_number() OVER former AS place, pg_catalog.sum(pg_catalog.length(f.s)) OVER former AS n
  FROM (SELECT {}($1) AS s LIMIT {}) AS f WINDOW former AS (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
) AS w WHERE coalesce(w.n, 0) OPERATOR(pg_catalog.<=) {} ORDER BY w.place
"""


def split_plan(plpy: Any, function: str) -> Any:
    """``function``: the name of one of the caller's, quoted."""
    statement = _SPLIT.format(function, MAX_SEGMENTS + 1, MAX_SPLIT_CHARACTERS)
    return plpy.prepare(statement, ["pg_catalog.text"])


def split(plpy: Any, plan: Any, function: str, text: str) -> list[str]:
    """What a function of the caller's (``plan`` is its ``split_plan``) makes of a text, without blank segments.

    Raises DocumentError where that is too much.
    """
    segments: list[str] = []
    left, rows_left = MAX_SPLIT_CHARACTERS, MAX_SEGMENTS
    cursor = plpy.cursor(plan, [text])
    while fetched := cursor.fetch(500):
        found = [row["s"] for row in fetched if row["s"] is not None and row["s"].strip()]
        left -= sum(map(len, found))
        rows_left -= len(fetched)
        if left < 0 or rows_left < 0:
            raise DocumentError(
                f"function {function} makes too much of the document",
                detail=f"It may return {MAX_SEGMENTS} segments, of {MAX_SPLIT_CHARACTERS} characters together.",
            )
        segments += found
    cursor.close()
    return segments


def _object(metadata: str) -> dict[str, Any]:
    """What somebody may have written into a row; empty where Python cannot read it, as of a number of 5000 digits."""
    try:
        found = json.loads(metadata)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class SqlStore:
    """The vector store of a job made by ml_rag._load_job."""

    def __init__(self, plpy: Any, job: dict[str, Any], embed: Embed, *, may_commit: bool) -> None:
        """``embed``: texts and a model to vectors, for the embeddings that the documents do not come with."""
        self._plpy = plpy
        self._store: int = job["store"]
        #: whether the call has not named it, so that its owner must be trusted in each transaction
        self._is_judged: bool = job.get("is_judged", False)
        self._column: str = job["embedding"]
        self._model: str = job["request"]["embed_model_id"]
        self._embed = embed
        self._may_commit = may_commit

    def _run(self, name: str, *arguments: Any) -> Any:
        return _run(self._plpy, name, self._store, *arguments)

    def _judge(self) -> None:
        if self._is_judged:
            self._run("judge")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other loads out of the store, also between two transactions."""
        key = self._run("lock")[0]["key"]
        try:
            yield
        finally:
            # A lock of the session outlives the call where it is not given back, so a cancel must not prevent that.
            for attempt in range(3):
                try:
                    _run(self._plpy, "unlock", key)
                    break
                except self._plpy.SPIError:
                    if attempt == 2:
                        raise

    def interrupt(self) -> None:
        """Raise where PostgreSQL wants the statement to end; executing anything makes it look."""
        self._plpy.execute("SELECT 1")

    def states(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """See ``ml_rag.backend.load.Store``."""
        self._judge()
        return {row["document_name"]: _object(row["metadata"]) for row in self._run("states", names)}

    def label(self, name: str, given: dict[str, Any]) -> None:
        """See ``ml_rag.backend.load.Store``."""
        self._judge()
        self._run("label", name, json.dumps(given))

    def write(self, name: str, portions: Iterable[Rows]) -> dict[str, list[str]] | None:
        """See ``ml_rag.backend.load.Store``."""
        former: dict[str, Any] = {}
        self._judge()
        try:
            with self._plpy.subtransaction():
                for rows in portions:
                    if former:
                        self._insert(name, former, rows)
                    else:
                        former = self._begin(name, rows)
        except self._plpy.SPIError as e:
            if not sqlstate(e).startswith(_ABOUT_THE_DATA):
                raise
            raise DocumentError("the document cannot be stored", detail=f"{e} ({sqlstate(e)})") from None
        return json.loads(former["lost"]) if former.get("lost") else None

    def _begin(self, name: str, rows: Rows) -> dict[str, Any]:
        """Delete the document's former version, insert the first of the new one; what ``replace`` returns.

        A new document's id may be another's that row-level security hides, or that was inserted meanwhile: the next
        one tried is drawn again.
        """
        attempts = itertools.count(1)
        while True:
            try:
                with self._plpy.subtransaction():
                    former: dict[str, Any] = self._run("replace", name, sorted(LOAD_KEYS))[0]
                    self._insert(name, former, rows)
                    return former
            except self._plpy.SPIError as e:
                if sqlstate(e) != _UNIQUE_VIOLATION or next(attempts) == _ID_ATTEMPTS:
                    raise

    def _insert(self, name: str, former: dict[str, Any], rows: Rows) -> None:
        # looked up in the transaction that writes: one that is added meanwhile waits for its end, and finds the rows
        others = self._run("others", self._column, self._model)
        columns = [other["column_name"] for other in others]
        vectors = [list(embed_segments(self._embed, rows.segments, other["model_id"])) for other in others]
        # while the documents were embedded, the store may have got another default embedding, and this one may be gone,
        # or one of another model
        if self._column not in columns and (not others or self._run("has column", self._column)[0]["it"]):
            columns, vectors = [self._column, *columns], [rows.vectors, *vectors]
        kept = (former["id"], former["kept"])
        self._run("insert", name, *kept, rows.first, rows.metadata, rows.segments, columns, vectors)

    def below(self, prefix: str) -> list[str]:
        """Names of the store's documents that begin so."""
        self._judge()
        return [row["name"] for row in self._run("below", prefix)]

    def remove(self, names: list[str]) -> int:
        """Delete documents that a load has made; returns how many there were."""
        self._judge()
        n: int = self._run("remove", names)[0]["n"]
        return n

    def commit(self) -> None:
        """See ``ml_rag.backend.load.Store``."""
        if self._may_commit:
            rights.commit(self._plpy)
