"""The database as the integrations reach it: connections, the calls that all of them make, the words of its errors.

Whatever comes from outside is a bound parameter or an identifier that psycopg.sql quotes. Statements run under the path
of ml_rag.search_path, by transaction: a pooler may give the session to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb, set_json_loads
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout, TooManyRequests

from ml_rag.errors import MlRagError
from ml_rag.search_path import PIN_TRANSACTION, pinned, pinned_async, refuse_borrowed_role, refuse_borrowed_role_async

#: the SQLSTATE of a search that has found nothing, and its message where there was nothing to search
NOTHING_FOUND = "P0002"
_NO_STORE = "no vector store found"

#: option citation_fields of answers whose options do not say
PLACE = ["metadata.page", "metadata.title"]
#: digits of a whole number that Python reads, and levels of JSON that what writes it again takes
_DIGITS, _LEVELS = 300, 100
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]')
#: a whole statement
Query = sql.SQL | sql.Composed
#: what gives the rows of one
Rows = Callable[[Query, Mapping[str, Any] | None], Awaitable[list[dict[str, Any]]]]

#: the presets of the database
PRESETS = sql.SQL("SELECT p.name, p.description, p.options FROM ml_rag.preset AS p ORDER BY p.name LIMIT 1000")
#: options over those of their preset and of the settings, none of which is checked
LAYERED = sql.SQL("SELECT ml_rag._layered(%(options)s) AS options")
_LAID = sql.SQL("SELECT ml_rag._lay_over(%(lower)s, %(higher)s) AS options")
_TAKE_ROLE = sql.SQL("SELECT pg_catalog.set_config('role', %(role)s, true)")


@dataclass(frozen=True)
class Schemas:
    """Where the two extensions are. What is called by its schema cannot be another's of the same name."""

    ml_rag: str
    vector: str

    @classmethod
    def of(cls, found: Mapping[str, str]) -> Schemas:
        """Of what ``refuse_borrowed_role`` gives."""
        if not {"ml_rag", "vector"} <= found.keys():
            raise MlRagError(
                "the extension ml_rag is not installed in this database", hint="Run CREATE EXTENSION ml_rag CASCADE."
            )
        return cls(found["ml_rag"], found["vector"])

    def refuse_others(self, found: Mapping[str, str]) -> None:
        """Raise Refused where the schemas of the extensions are others by now.

        Once an extension is dropped, a role that may create in its schema could otherwise run code with the rights of
        the connection."""
        if found != {"ml_rag": self.ml_rag, "vector": self.vector}:
            raise Refused("the extension ml_rag was dropped, or made again in another schema: restart this program")

    @property
    def likeness(self) -> str:
        """A cheap query: while its row stays the same, so does what refuse_borrowed_role and refuse_others find.

        The schema ml_rag is dropped with the extension.
        """
        vector = sql.Literal(sql.Identifier(self.vector, "vector").as_string()).as_string()
        return f"SELECT session_user, current_user, to_regnamespace('ml_rag')::oid, to_regtype({vector})::oid"

    def routine(self, name: str) -> sql.Identifier:
        """A routine that the extension has for its callers."""
        return sql.Identifier(self.ml_rag, name)

    @property
    def search(self) -> sql.Composed:
        """``ml_rag_search`` of the parameters ``query`` and ``options``."""
        return sql.SQL("SELECT s.* FROM {}(%(query)s, %(options)s) AS s ORDER BY s.rank").format(
            self.routine("ml_rag_search")
        )

    @property
    def answer(self) -> sql.Composed:
        """``ml_rag_answer`` of the same."""
        return sql.SQL("SELECT {}(%(query)s, %(options)s) AS answer").format(self.routine("ml_rag_answer"))

    @property
    def answer_to_stream(self) -> sql.SQL:
        """The same, but where its text can come in pieces the request for it; and the milliseconds that it may take."""
        return sql.SQL(
            "SELECT ml_rag._answer_to_stream(%(query)s, %(options)s) AS answer, s.setting::pg_catalog.int4 AS timeout"
            " FROM pg_catalog.pg_settings AS s WHERE s.name = 'statement_timeout'"
        )


class Busy(psycopg.OperationalError):
    """All connections to the database are in use."""

    sqlstate = "53300"


class Unstorable(psycopg.DataError):
    """A parameter has characters that a text of PostgreSQL cannot have."""

    sqlstate = "22021"


class Refused(psycopg.ProgrammingError):
    """Code of others could run with the rights of the session: by its role, or by where the extensions are now."""

    def __init__(self, message: str, sqlstate: str = "55000") -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Raise errors about the session as those of a statement, which programs answer: a pooler can give each another."""
    try:
        yield
    except MlRagError as error:
        raise Refused(str(error), error.sqlstate) from None


def layered(options: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of ``LAYERED``."""
    return {"options": Jsonb(dict(options))}


def asked(query: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of ``Schemas.search`` and ``Schemas.answer``."""
    return {"query": query, "options": Jsonb(dict(options))}


def citation_id(row: Mapping[str, Any]) -> str:
    """An id of a row of ``ml_rag_search``, which frameworks tell documents apart by.

    Store, document and number of the segment; of a store that has no such keys, the document's name and a hash of the
    text.
    """
    if row.get("document_id") is None or row.get("segment_number") is None:
        digest = hashlib.sha256(row["segment"].encode()).hexdigest()[:16]
        return f"{row['vector_store']}:{row['document_name']}:{digest}"
    return f"{row['vector_store']}:{row['document_id']}:{row['segment_number']}"


def keys_of(metadata: Any) -> dict[str, Any]:
    """Metadata of a row; empty if it is not a JSON object."""
    return metadata if isinstance(metadata, dict) else {}


def is_loaded(metadata: Mapping[str, Any]) -> bool:
    """Whether a load has written them: other keys are then what the document says. None says this of itself."""
    source = metadata.get("source")
    return isinstance(source, Mapping) and "sha256" in source


def with_source(metadata: Mapping[str, Any], document_name: str | None) -> dict[str, Any]:
    """Metadata whose ``source`` is the document's name; a load keeps there what the document was made from."""
    if is_loaded(metadata) and document_name is not None:
        return {**metadata, "source": document_name}
    return dict(metadata)


def is_empty(error: psycopg.Error) -> bool:
    """Whether stores were searched and nothing was found."""
    return error.sqlstate == NOTHING_FOUND and error.diag.message_primary != _NO_STORE


def worded(error: psycopg.Error) -> str:
    """Message and SQLSTATE, then detail and hint, a line each."""
    diagnostic = error.diag
    # without a message of the server's or ours it is one of libpq's, which may quote the connection string
    own = (
        str(error)
        if isinstance(error, Busy | Unstorable | Refused)
        else "the database cannot be reached, or the connection broke"
    )
    message = diagnostic.message_primary or own
    lines = [f"{message} (SQLSTATE {error.sqlstate or '08006'})", diagnostic.message_detail, diagnostic.message_hint]
    return "\n".join(line for line in lines if line)


def _number(digits: str) -> int | str:
    return int(digits) if len(digits) <= _DIGITS else digits


def _real(digits: str) -> float | str:
    return number if math.isfinite(number := float(digits)) else digits


def _shallow(text: str) -> str:
    """JSON with null in place of what lies deeper than ``_LEVELS``."""
    kept: list[str] = []
    level = read = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        if found[0] in ("[", "{"):
            level += 1
            if level == _LEVELS + 1:
                kept += [text[read : found.start()], "null"]
        elif found[0] in ("]", "}"):
            if level == _LEVELS + 1:
                read = found.end()
            level -= 1
    return "".join([*kept, text[read:]])


def _read_json(text: str | bytes) -> Any:
    """JSON of the database; what Python cannot read, or write again, of the metadata of a row fails no call.

    A longer whole number and one beyond floating point stay texts, and what is nested too deep is null.
    """
    text = text.decode() if isinstance(text, bytes) else text
    if text.count("[") + text.count("{") > _LEVELS:
        text = _shallow(text)
    return json.loads(text, parse_int=_number, parse_float=_real)


def _settings(name: str) -> dict[str, Any]:
    # what a session has prepared is another client's statement of the same name, where a pooler gives the session away
    return {"row_factory": dict_row, "application_name": name, "prepare_threshold": None}


class _Call:
    """A call in a thread. Once its task is cancelled, its statement is, and it makes no further one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._connection: psycopg.Connection[Any] | None = None
        self._is_cancelled = False

    @contextlib.contextmanager
    def using(self, connection: psycopg.Connection[Any]) -> Iterator[None]:
        """While this connection is the call's: it is not given to another call before it is cancelled for this one."""
        with self._changed:
            if self._is_cancelled:
                raise psycopg.errors.QueryCanceled("the task of the call was cancelled")
            self._connection = connection
        try:
            yield
        finally:
            with self._changed:
                self._connection = None
                self._changed.notify()

    def cancel(self) -> None:
        """Return once it has no connection. Again and again: between two statements there is none to end."""
        with self._changed:
            self._is_cancelled = True
            while self._connection is not None:
                with contextlib.suppress(psycopg.Error):
                    self._connection.cancel_safe(timeout=5)
                self._changed.wait(0.2)


#: the call of a task that this thread runs
_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


def in_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, which does not block the event loop. A task that is cancelled cancels its statement."""

    @functools.wraps(method)
    async def call(self: Any, *arguments: Any, **named: Any) -> Any:
        mine = _Call()

        def run() -> Any:
            _CALL.set(mine)  # in the copy of the context that to_thread makes
            try:
                return getattr(self, method.__name__)(*arguments, **named)
            except StopIteration as error:  # of an embedding, say: a future that had it would have no end
                raise RuntimeError(repr(error)) from error

        try:
            return await asyncio.to_thread(run)
        except asyncio.CancelledError:
            # not here: that would block the event loop, and a task can be cancelled again while it waits
            threading.Thread(target=mine.cancel, daemon=True).start()
            raise

    return call


class Database:
    """Up to four connections as the role of a DSN, each opened when it is needed. For several threads."""

    def __init__(self, dsn: str, *, name: str, read_only: bool = False) -> None:
        def configure(connection: psycopg.Connection[Any]) -> None:
            connection.read_only = read_only
            set_json_loads(_read_json, connection)

        def make() -> ConnectionPool[Any]:
            return ConnectionPool(
                dsn,
                kwargs=_settings(name),
                configure=configure,
                check=ConnectionPool.check_connection,
                min_size=0,
                max_size=4,
                open=True,
            )

        # the error of a wrong DSN is its own, and not that the pool had no connection in time
        with psycopg.connect(dsn, **_settings(name)) as connection:
            self.schemas = Schemas.of(refuse_borrowed_role(connection))
        #: of the session that was looked at last
        self._likeness: list[tuple[Any, ...]] = []
        self._make = make
        self._pool, self._process = make(), os.getpid()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[dict[str, Any]]]:
        """A connection, whose transaction is committed at the end."""
        if self._process != os.getpid():  # forked, as web servers do it: connections are still the other process's
            self._pool, self._process = self._make(), os.getpid()
        call = _CALL.get()
        with self._pool.connection() as connection, call.using(connection) if call else contextlib.nullcontext():
            # behind a pooler it can be another session each time
            likeness = pinned(connection, PIN_TRANSACTION, self.schemas.likeness)
            if likeness != self._likeness:
                with _refused():
                    self.schemas.refuse_others(refuse_borrowed_role(connection))
                self._likeness = likeness
            yield connection
            connection.commit()  # while it is the call's: what waits there, as for a standby, is cancelled, too

    def rows(self, query: Query, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """The rows of one statement in a transaction of its own."""
        with self.transaction() as connection:
            return connection.execute(query, parameters).fetchall()

    def laid(self, lower: Mapping[str, Any], higher: Mapping[str, Any] | None) -> dict[str, Any]:
        """Options of one search over those of all, as the database lays its levels over one another."""
        if not lower or not higher:
            return dict(higher or lower)
        values = {"lower": Jsonb(dict(lower)), "higher": Jsonb(dict(higher))}
        return dict(self.rows(_LAID, values)[0]["options"])

    def found(self, query: Query, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of a search; none where it has found nothing."""
        try:
            return self.rows(query, parameters)
        except psycopg.Error as error:
            if is_empty(error):
                return []
            raise

    def close(self) -> None:
        """End the connections."""
        self._pool.close()


class Reader:
    """The same for one event loop: each statement in a read-only transaction, as the role of the DSN or another one.

    A task that is cancelled cancels its statement. One waits ``patience`` seconds for a connection.
    """

    schemas: Schemas

    def __init__(self, dsn: str, *, name: str, connections: int, patience: float = 30.0) -> None:
        async def configure(connection: psycopg.AsyncConnection[Any]) -> None:
            await connection.set_read_only(True)
            set_json_loads(_read_json, connection)

        self._connect = dsn, _settings(name)
        self._connections, self._used = connections, 0
        self._likeness: list[tuple[Any, ...]] = []
        self._pool = AsyncConnectionPool(
            dsn,
            kwargs=_settings(name),
            configure=configure,
            check=AsyncConnectionPool.check_connection,
            min_size=0,
            max_size=connections,
            max_waiting=20 * connections,
            timeout=patience,
            open=False,
        )

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """While the server runs."""
        dsn, settings = self._connect
        async with await psycopg.AsyncConnection.connect(dsn, **settings) as connection:
            self.schemas = Schemas.of(await refuse_borrowed_role_async(connection))
        async with self._pool:
            yield

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Rows]:
        """The rows of one statement after the other, in one transaction."""
        from ml_rag.integrations.waiting import cancelled_once  # needs what not all integrations do

        async with contextlib.AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(self._pool.connection())
            except (PoolTimeout, TooManyRequests):
                if self._used < self._connections:  # none could be opened
                    raise
                raise Busy(f"all {self._connections} connections to the database are in use") from None
            self._used += 1
            stack.callback(self._give_back)
            likeness = await pinned_async(connection, self.schemas.likeness)
            if likeness != self._likeness:
                with _refused():
                    self.schemas.refuse_others(await refuse_borrowed_role_async(connection))
                self._likeness = likeness

            async def rows(query: Query, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
                try:
                    cursor = await cancelled_once(connection.execute(query, parameters))
                except (psycopg.DataError, UnicodeEncodeError) as error:
                    if getattr(error, "sqlstate", None) is not None:  # the server's
                        raise
                    raise Unstorable("a text has a NUL character or half of a surrogate pair") from None
                return await cursor.fetchall()

            yield rows

    def _give_back(self) -> None:
        self._used -= 1

    async def rows(
        self, query: Query, parameters: Mapping[str, Any] | None = None, role: str | None = None
    ) -> list[dict[str, Any]]:
        """The rows of one statement. ``role``: run it as that role, until the end of its transaction."""
        async with self.transaction() as rows:
            if role is not None:
                await rows(_TAKE_ROLE, {"role": role})
            return await rows(query, parameters)
