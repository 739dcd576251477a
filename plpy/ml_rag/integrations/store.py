"""A vector store that a framework writes to, row by row under ids of its own.

The table is that of ``ml_rag.create_store`` with a column ``id``. Without vectors of the caller's the database embeds
with the model of each embedding that the store has.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from ml_rag.errors import MlRagError
from ml_rag.integrations.database import Database, asked
from ml_rag.integrations.documents import quoted

#: what a store without a marker, whose vectors the caller makes, is searched by
_COLUMNS = {"segment": "segment", "segment_embedding": "segment_embedding"}
#: the columns that every statement here names
_NEEDED = ("document_name", "metadata", "document_id", "segment_number", "segment", "segment_embedding")
#: what the options that leave rows out are in SQL
_CONDITION = sql.SQL(
    """SELECT f.condition, f.arguments
    FROM ml_rag.discover(%(names)s, vector_store_columns => %(columns)s, unmarked => %(unmarked)s) AS d
    CROSS JOIN LATERAL ml_rag.filter(d, ml_rag._parse_rag_options(%(options)s), %(parameter)s) AS f"""
)
#: the embeddings that are written, and until the end of the transaction the columns that they are in
_EMBEDDINGS = sql.SQL(
    """SELECT ml_rag._hold(ARRAY[{0}::pg_catalog.regclass::oid], true);
    SELECT e.column_name, e.model_id FROM ml_rag._embeddings({0}::pg_catalog.regclass) AS e
    WHERE e.column_name = 'segment_embedding'
      OR pg_catalog.has_column_privilege({0}::pg_catalog.regclass, e.attnum, 'INSERT')
        AND pg_catalog.has_column_privilege({0}::pg_catalog.regclass, e.attnum, 'UPDATE')"""
)
_ARGUMENTS = "(%(arguments)s::pg_catalog.text[])"
#: stands for the id of a row that has none
_KEY: LiteralString = "pg_catalog.concat(t.document_id, ':', t.segment_number)"
#: an id that can be the key of a segment
_AS_KEY = re.compile(r"(-?\d{1,19}):(-?\d{1,10})")
#: types of ids that none of these is a value of
_NO_KEYS = frozenset({"smallint", "integer", "bigint", "numeric", "uuid"})
#: stands for the question where there is only its vector: it has no words
NO_WORDS = "?"
_PREREQUISITE = psycopg.errors.ObjectNotInPrerequisiteState
#: of a column id that is not text, or not unique
_WRONG_ID = psycopg.errors.DatatypeMismatch, psycopg.errors.InvalidColumnReference
#: what is said of a name or a number that another session has taken meanwhile
_TAKEN = psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation
#: times that rows are written whose numbers in a document others take, or deleted that others write: each time one of
#: these is done
_ATTEMPTS = 20
Text = TypeVar("Text", bound=str | None)


class NotWritable(MlRagError):
    """A table that is not written to. Its text says what to use instead: a traceback shows no hint."""

    def __str__(self) -> str:
        return "\n".join(line for line in (self.message, self.detail, self.hint) if line)


@dataclass(frozen=True)
class Row:
    """A text with its id; ``document``: the number that texts of one document share, which stand in it as written.

    None: it is a document of its own, or stays where its id is.
    """

    id: str
    name: str
    text: str
    metadata: Mapping[str, Any]
    document: int | None = None
    vector: Sequence[float] | None = None


def number(name: str | None = None) -> int:
    """The number of a document of this name; of one without a name, a random one."""
    if name is None:
        return secrets.randbits(62)
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 2


def path(key: str) -> str:
    """A key of the metadata as option ``filters`` has it."""
    return "/" + key.replace("~", "~0").replace("/", "~1")


def narrowed(options: Mapping[str, Any], conditions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Options whose ``filters`` have further conditions, beside their own, which may keep tenants apart.

    The database adds what is under "and" to the filters of a preset and of the settings. Neighbours of a hit and whole
    documents need not pass them: row-level security holds for those too."""
    if not conditions:
        return dict(options)
    own = {} if options.get("filters") is None else options["filters"]
    if not isinstance(own, Mapping) or not isinstance(own.get("and", []), list):
        return {**options, "filters": {"and": [own, *conditions]}}  # the database says what is wrong with it
    return {**options, "filters": {**own, "and": [*own.get("and", []), *conditions]}}


class Store:
    """One table. ``options``: of ``ml_rag``; those that leave rows out count in each method."""

    def __init__(self, database: Database, name: str, dimensions: int | None = None) -> None:
        """Create the table unless it exists; ``dimensions``: of the caller's vectors, None if the database embeds.

        Raises MlRagError if the name has no schema, psycopg.Error if the table cannot be created.
        """
        self._database = database
        split = sql.SQL("SELECT pg_catalog.parse_ident(%(name)s) AS parts")
        parts = database.rows(split, {"name": name})[0]["parts"]
        if len(parts) != 2:
            raise MlRagError("invalid name of a vector store", detail=f"Got {name!r}; expected 'schema.table'.")
        # psycopg quotes it, and leaves a % to be read as the beginning of a parameter
        self.table = sql.SQL(sql.Identifier(*parts).as_string().replace("%", "%%"))
        # as ml_rag writes it: quoted where it must be
        quoted = sql.SQL("SELECT pg_catalog.format('%%I.%%I', %(schema)s::text, %(table)s::text) AS name")
        self.name: str = database.rows(quoted, {"schema": parts[0], "table": parts[1]})[0]["name"]
        self._embeds_itself = dimensions is not None
        columns = self._columns()
        if columns is None:
            with contextlib.suppress(*_TAKEN):  # another process has made it meanwhile
                self._make(dimensions)
            columns = self._columns() or {}
        if missing := [name for name in _NEEDED if name not in columns]:
            raise NotWritable(
                f"table {self.name} does not have the columns of a store that is written to",
                detail=f"It lacks {', '.join(missing)}.",
                hint="Search a table of your own, with a vectorizer or adopted, by MlRagRetriever with"
                f' options={{"vector_store": ["{self.name}"]}}. Or name a table that does not exist yet.',
            )
        if not self._tells_segments_apart():
            raise NotWritable(
                f"document_id and segment_number do not tell the rows of {self.name} apart",
                detail="Another tenant's rows of the same numbers, say, would be taken for what a search finds.",
                hint=f'Search it by MlRagRetriever with options={{"vector_store": ["{self.name}"]}}.',
            )
        self._is_marked = self._default_column() is not None
        if not self._is_marked and dimensions is None:
            raise self._unknown_model()
        self._has_id = "id" in columns
        self._ids_can_be_keys = columns.get("id") not in _NO_KEYS

    def _columns(self) -> dict[str, str] | None:
        """Those of the table, with their types; None where there is none."""
        query = sql.SQL(
            "SELECT pg_catalog.jsonb_object_agg(a.attname, a.atttypid::pg_catalog.regtype) AS columns"
            " FROM pg_catalog.pg_attribute AS a WHERE a.attrelid = pg_catalog.to_regclass(%(name)s)::oid"
            " AND a.attnum > 0 AND NOT a.attisdropped"
        )
        (found,) = self._database.rows(query, {"name": self.name})
        columns: dict[str, str] | None = found["columns"]
        return columns

    def _tells_segments_apart(self) -> bool:
        """Whether no two rows have the same numbers; not known of a view."""
        query = sql.SQL(
            "SELECT c.relkind NOT IN ('r', 'p') OR ml_rag._is_key(c.oid, '{document_id,segment_number}') AS answer"
            " FROM pg_catalog.pg_class AS c WHERE c.oid = pg_catalog.to_regclass(%(name)s)::oid"
        )
        return bool(self._database.rows(query, {"name": self.name})[0]["answer"])

    def _make(self, dimensions: int | None) -> None:
        with self._database.transaction() as connection:
            if dimensions is None:
                connection.execute("SELECT ml_rag.create_store(%s)", (self.name,))
                connection.execute(sql.SQL("ALTER TABLE {} ADD IF NOT EXISTS id text UNIQUE").format(self.table), {})
                return
            vector = sql.Identifier(self._database.schemas.vector, "vector")
            connection.execute(
                sql.SQL(
                    "CREATE TABLE IF NOT EXISTS {} (document_name text NOT NULL, metadata jsonb NOT NULL,"
                    " document_id bigint NOT NULL, segment_number integer NOT NULL, segment text NOT NULL,"
                    " segment_embedding {}({}) NOT NULL, id text UNIQUE, PRIMARY KEY (document_id, segment_number))"
                ).format(self.table, vector, sql.Literal(dimensions)),
                {},
            )
            try:
                with connection.transaction():
                    connection.execute("SELECT ml_rag.enable_keyword_search(%s::pg_catalog.regclass)", (self.name,))
            except _PREREQUISITE:  # a server without numpy: it can be searched by vectors
                pass

    def _default_column(self) -> str | None:
        """That of the default embedding as it is now; None where no column says its model."""
        query = sql.SQL("SELECT d.segment_embedding FROM ml_rag.discover(%(names)s) AS d")
        found = self._database.rows(query, {"names": [self.name]})
        return found[0]["segment_embedding"] if found else None

    def _unknown_model(self) -> MlRagError:
        return MlRagError(
            f"{self.name} is not a vector store whose embedding model is known",
            hint="Give an embedding, or see SELECT * FROM ml_rag.discover() for those that there are.",
        )

    @property
    def _id(self) -> sql.SQL:
        """The id of a row; of one that was loaded otherwise, the key of the segment."""
        return sql.SQL(f"coalesce(t.id::text, {_KEY})" if self._has_id else _KEY)

    @property
    def _is_listed(self) -> sql.SQL:
        """Whether the id of a row is among those that are given, if any are; by the index of ids."""
        listed = f"{_KEY} = ANY (%(ids)s)"
        if self._has_id:
            listed = f"(t.id::text = ANY (%(ids)s) OR (t.id IS NULL AND {listed}))"
        return sql.SQL(f"(%(ids)s::text[] IS NULL OR {listed})")

    def among(self, ids: Sequence[str]) -> dict[str, Any]:
        """The same as a condition of option ``filters``, of ids that are given."""
        documents: dict[int, list[int]] = {}
        segments: dict[int, list[int]] = {}
        for document, segment in _keys(ids):
            documents.setdefault(document, []).append(segment)
            segments.setdefault(segment, []).append(document)
        listed = [{"document_id": d, "segment_number": {"in": n}} for d, n in documents.items()]
        if len(segments) < len(documents):  # an option has at most 1000 conditions
            listed = [{"segment_number": n, "document_id": {"in": d}} for n, d in segments.items()]
        if not self._has_id:
            return {"or": listed}
        own = list(ids) if self._ids_can_be_keys else [one for one in ids if not _AS_KEY.fullmatch(one)]
        return {"or": [{"id": {"in": own}}, {"id": None, "or": listed}]}

    def _vectors(self, connection: psycopg.Connection[dict[str, Any]]) -> dict[str, sql.Composed]:
        """What goes into each embedding: vectors of its own model, or in place of these the caller's."""
        # in one message: the second statement sees what the first has waited for
        found = connection.execute(_EMBEDDINGS.format(sql.Literal(self.name)))
        found.nextset()
        vectors = {
            row["column_name"]: sql.SQL("ml_rag.embed(d.text, {}, 'document')").format(_literal(row["model_id"]))
            for row in found
            if not (self._embeds_itself and row["column_name"] == "segment_embedding")
        }
        if self._embeds_itself:
            vector = sql.Identifier(self._database.schemas.vector, "vector")
            vectors["segment_embedding"] = sql.SQL("d.vector::{}").format(vector)
        elif not vectors:
            raise self._unknown_model()
        return vectors

    def write(self, options: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Insert rows, or replace those whose ids are there, in any document. Of rows with the same id the last one
        counts.

        Raises NotWritable, and writes nothing, where an id is that of a row that the options leave out, or the table
        has no column for ids.
        """
        if not self._has_id:
            raise NotWritable(
                f"vector store {self.name} has no column for ids",
                hint="It can be searched, also by MlRagRetriever with"
                f' options={{"vector_store": ["{self.name}"]}}.'
                f" To write to it, run ALTER TABLE {self.name} ADD id text UNIQUE,"
                " or name a table that does not exist yet.",
            )
        rows = list({row.id: row for row in rows}.values())
        condition, arguments = self._condition(options)
        query = sql.SQL(
            """INSERT INTO {0} AS t
              (id, document_name, metadata, document_id, segment_number, segment, {1})
            SELECT d.id, d.name, d.metadata, n.document,
              coalesce((SELECT CASE WHEN max(o.segment_number) < 2000000000 THEN max(o.segment_number) END
                  FROM {0} AS o WHERE o.document_id = n.document), %(first)s)
                + row_number() OVER (PARTITION BY n.document ORDER BY d.place), d.text, {2}
            FROM ROWS FROM (pg_catalog.unnest(%(ids)s::text[]), pg_catalog.unnest(%(names)s::text[]),
              pg_catalog.unnest(%(metadata)s::jsonb[]), pg_catalog.unnest(%(documents)s::bigint[]),
              pg_catalog.unnest(%(new)s::bigint[]), pg_catalog.unnest(%(texts)s::text[]),
              pg_catalog.unnest(%(vectors)s::text[]))
              WITH ORDINALITY AS d (id, name, metadata, document, new, text, vector, place)
            CROSS JOIN LATERAL (
              SELECT coalesce(d.document, (SELECT o.document_id FROM {0} AS o WHERE o.id::text = d.id), d.new)
                AS document
            ) AS n ORDER BY d.id -- all writers lock ids in one order
            ON CONFLICT (id) DO UPDATE SET document_name = excluded.document_name, metadata = excluded.metadata,
              document_id = excluded.document_id, segment_number = CASE WHEN t.document_id = excluded.document_id
                THEN t.segment_number ELSE excluded.segment_number END,
              segment = excluded.segment, {3} WHERE true{4}"""
        )
        parameters = {
            "ids": [row.id for row in rows],
            "names": [row.name for row in rows],
            "metadata": [Jsonb(dict(row.metadata)) for row in rows],
            "documents": [row.document for row in rows],
            "new": [number() for _ in rows],
            "texts": [row.text for row in rows],
            "vectors": [None if row.vector is None else as_text(row.vector) for row in rows],
            **arguments,
        }
        # a row that was loaded otherwise has no id; what is read of it has its key as id, and comes back with that
        keys = _keys(parameters["ids"]) if self._ids_can_be_keys else []
        parameters |= {"key_documents": [key[0] for key in keys], "key_segments": [key[1] for key in keys]}
        lock = sql.SQL(
            "SELECT FROM {0} AS t WHERE t.id::text = ANY (%(ids)s) OR (t.id IS NULL AND {1} = ANY (%(ids)s)"
            # for the index
            " AND t.document_id = ANY (%(key_documents)s) AND t.segment_number = ANY (%(key_segments)s::integer[]))"
            " ORDER BY {2} FOR UPDATE"
        ).format(self.table, sql.SQL(_KEY), self._id)
        # of rows that the options leave out too: these are refused below, as with other ids
        own = sql.SQL(
            "UPDATE {0} AS t SET id = {1} WHERE t.id IS NULL AND (t.document_id, t.segment_number) IN ("
            "SELECT k.document, k.segment FROM ROWS FROM (pg_catalog.unnest(%(key_documents)s::bigint[]),"
            " pg_catalog.unnest(%(key_segments)s::integer[])) AS k (document, segment))"
            " AND NOT EXISTS (SELECT FROM {0} AS o WHERE o.id = {1})"
        ).format(self.table, sql.SQL(_KEY))
        for left in reversed(range(_ATTEMPTS)):
            # where policies hide rows of a document, another tenant's of the same name say, far from their numbers; so
            # where one has the last number, which each role that may write rows can give to one
            parameters["first"] = 0 if left == _ATTEMPTS - 1 else secrets.randbits(30)
            try:
                with self._database.transaction() as connection:
                    vectors = self._vectors(connection)
                    columns = [quoted(name) for name in vectors]
                    insert = query.format(
                        self.table,
                        sql.SQL(", ").join(columns),
                        sql.SQL(", ").join(vectors.values()),
                        sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(column) for column in columns),
                        condition,
                    )
                    if keys:
                        connection.execute(lock, parameters)
                        connection.execute(own, parameters)
                    left_out = len(rows) - connection.execute(insert, parameters).rowcount
                    if left_out:
                        raise NotWritable(
                            f"{left_out} of {len(rows)} texts have the ids of rows that the options leave out",
                            hint="Give them other ids.",
                        )
                return
            except _WRONG_ID as error:
                raise NotWritable(
                    f"column id of {self.name} cannot hold the ids of texts",
                    detail=error.diag.message_primary,
                    hint="It must be of type text, and UNIQUE.",
                ) from None
            except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                if not left:
                    raise

    def delete(
        self, options: Mapping[str, Any], *, ids: Iterable[str] | None = None, documents: Sequence[int] | None = None
    ) -> None:
        """Delete the rows of these ids and documents; None: of all."""
        condition, arguments = self._condition(options)
        query = sql.SQL(
            "DELETE FROM {} AS t WHERE {}"
            " AND (%(documents)s::bigint[] IS NULL OR t.document_id = ANY (%(documents)s)){}"
        ).format(self.table, self._is_listed, condition)
        parameters = {"ids": listed(ids), "documents": documents, **arguments}
        for left in reversed(range(_ATTEMPTS)):
            try:
                with self._database.transaction() as connection:
                    connection.execute(query, parameters)
                return
            except psycopg.errors.DeadlockDetected:  # to lock the rows in the order of their ids would need UPDATE
                if not left:
                    raise

    def rows(self, options: Mapping[str, Any], ids: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """Id, document_name, segment and metadata of the rows of these ids, in their order; None: all.

        Rows without a segment are left out, as by searches."""
        condition, arguments = self._condition(options)
        query = sql.SQL(
            "SELECT {0} AS id, t.document_name, t.segment, t.metadata FROM {1} AS t"
            " WHERE t.segment IS NOT NULL AND {2}{3} ORDER BY t.document_id, t.segment_number"
        ).format(self._id, self.table, self._is_listed, condition)
        ids = listed(ids)
        found = self._database.rows(query, {"ids": ids, **arguments})
        if ids is None:
            return found
        first = {key: place for place, key in reversed(list(enumerate(ids)))}
        return sorted(found, key=lambda row: first[row["id"]])

    def _condition(self, options: Mapping[str, Any]) -> tuple[sql.SQL, dict[str, Any]]:
        """The options that leave rows out, as a condition that begins with AND, or empty, and its parameters."""
        found = self._database.rows(
            _CONDITION,
            {
                "names": [self.name],
                "columns": None if self._is_marked else Jsonb(_COLUMNS),
                "unmarked": not self._is_marked,
                "options": Jsonb(dict(options)),
                "parameter": _ARGUMENTS,
            },
        )
        if not found:
            raise MlRagError(f"{self.name} is not a vector store that this role may read")
        # psycopg reads a % as the beginning of a parameter
        parts = [part.replace("%", "%%") for part in found[0]["condition"].split(_ARGUMENTS)]
        return sql.SQL(_ARGUMENTS.join(parts)), {"arguments": found[0]["arguments"]}

    def search(
        self,
        query: str,
        options: Mapping[str, Any],
        vector: Sequence[float] | None = None,
        *,
        with_embedding: bool = False,
    ) -> list[dict[str, Any]]:
        """The rows of ``ml_rag_search`` with their ``id``; ``vector``: of the query, given.

        ``with_embedding``: and with their default ``embedding``, as text."""
        options = {**options, "vector_store": [self.name]}
        if vector is not None:
            options["query_embedding"] = [float(x) for x in vector]
        if not self._is_marked:
            options.setdefault("vector_store_columns", _COLUMNS)
        embedding = sql.Composed([])
        if with_embedding:
            column = self._default_column() or "segment_embedding"
            embedding = sql.SQL(", t.{}::text AS embedding").format(quoted(column))
        statement = sql.SQL(
            "SELECT s.*, {} AS id{} FROM {}(%(query)s, %(options)s) AS s"
            " JOIN {} AS t ON t.document_id = s.document_id AND t.segment_number = s.segment_number ORDER BY s.rank"
        ).format(self._id, embedding, self._database.schemas.routine("ml_rag_search"), self.table)
        return self._database.found(statement, asked(query, options))

    def embedded(self, query: str) -> str:
        """The vector of a question by the model of the default embedding, as text."""
        statement = sql.SQL(
            "SELECT ml_rag.embed(%(query)s, d.embed_model_id, 'query')::text AS vector"
            " FROM ml_rag.discover(%(names)s) AS d"
        )
        found = self._database.rows(statement, {"query": query, "names": [self.name]})
        if not found:
            raise self._unknown_model()
        return str(found[0]["vector"])

    def index(self, distance_metric: str) -> None:
        """Build the approximate index unless it is there."""
        with self._database.transaction() as connection:
            connection.execute("SELECT ml_rag.index_store(%s::pg_catalog.regclass, %s)", (self.name, distance_metric))


def _literal(text: str) -> sql.SQL:
    """A text in a statement with parameters, where a % begins one."""
    return sql.SQL(sql.Literal(text).as_string().replace("%", "%%"))


def _keys(ids: Iterable[str]) -> list[tuple[int, int]]:
    """Document and segment of those ids that are keys of segments."""
    found = [(int(key[1]), int(key[2]), key[0]) for key in filter(None, map(_AS_KEY.fullmatch, ids))]
    return [(d, s) for d, s, key in found if f"{d}:{s}" == key and abs(d) < 2**63 and abs(s) < 2**31]


def listed(texts: Iterable[Text] | None) -> list[Text] | None:
    """Texts, such as ids, as a list. Raises TypeError for one text, which would be taken for those of its letters."""
    if isinstance(texts, str):
        raise TypeError(f"expected a list of texts, got the text {texts[:40]!r}")
    return None if texts is None else list(texts)


def as_text(vector: Sequence[float]) -> str:
    """A vector as pgvector reads it."""
    return "[" + ",".join(repr(float(x)) for x in vector) + "]"
