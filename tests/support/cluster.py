"""A PostgreSQL server to test against, and databases on it that are made from one template."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from support.reuse import Keeper, reset

Connection = psycopg.Connection[Any]


def value_of(connection: Connection, query: LiteralString | bytes | sql.Composable, values: Any = None) -> Any:
    """The first value of a statement's first row, which it must have."""
    row = connection.execute(query, values).fetchone()
    assert row is not None
    return row[0]


def is_waiting(db: Database, connection: Connection) -> bool:
    """Whether the session waits for a lock."""
    query = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
    with db.connect() as watcher:
        return watcher.execute(query, (connection.info.backend_pid,)).fetchone() == (True,)


def noticed(
    connection: Connection, what: Callable[[psycopg.errors.Diagnostic], Any] = lambda d: d.message_primary or ""
) -> list[Any]:
    """What there is of each notice from now on: its message, where no more is asked for."""
    found: list[Any] = []
    connection.add_notice_handler(lambda notice: found.append(what(notice)))
    return found


def waits_for_a_lock(watcher: Connection, connection: Connection) -> bool:
    query = "SELECT FROM pg_locks WHERE pid = %s AND NOT granted"
    return watcher.execute(query, (connection.info.backend_pid,)).fetchone() is not None


#: role -> what it is a member of. `asker` and `tenant` may ask; `stranger` may nothing
ROLES = {"asker": "ml_rag_user", "tenant": "ml_rag_user", "stranger": None}
#: then its catalogs hold too much that is dead
_MOST_USES = 100


@dataclass
class Database:
    """One database. Connections opened here are closed with it."""

    dsn: str
    name: str
    prefix: str
    uses: int = 0
    _open: list[Connection] = field(default_factory=list)
    #: those of ``_open`` that another test can use after this one, and their roles
    _lent: dict[Connection, str | None] = field(default_factory=dict)
    #: sessions of earlier tests by role
    _idle: dict[str | None, list[Connection]] = field(default_factory=dict)
    _keeper: Keeper | None = None

    def role(self, name: str) -> str:
        """The real name of one of ``ROLES``: roles belong to the cluster, and another run may be going on."""
        return f"{self.prefix}_{name}"

    def connect(self, role: str | None = None, **kwargs: Any) -> Connection:
        """An autocommit connection: as the superuser of the DSN (owner of the extension), or as one of ``ROLES``."""
        if self._idle.get(role) and not kwargs:
            connection = self._idle[role].pop()
        else:
            connection = psycopg.connect(make_conninfo(self.dsn, dbname=self.name), **{"autocommit": True, **kwargs})
        if not kwargs:
            self._lent[connection] = role
        self._open.append(connection)
        if role is not None:
            # works whatever pg_hba.conf says about roles without a password
            name = sql.Identifier(self.role(role))
            connection.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(name))
            if not connection.autocommit:
                connection.commit()
        return connection

    def keep(self) -> None:
        """Remember what is in it, so that another test can use it after this one."""
        self._keeper = self._keeper or Keeper(
            psycopg.connect(make_conninfo(self.dsn, dbname=self.name), autocommit=True)
        )

    def release(self) -> None:
        """End what was opened; sessions can be had again, as new, by ``connect``."""
        for connection in self._open:
            reused = reset(connection) if connection in self._lent and not connection.closed else None
            if reused is None:
                connection.close()
            else:
                self._idle.setdefault(self._lent[connection], []).append(reused)
        self._open.clear()
        self._lent.clear()

    def put_back(self) -> bool:
        """Whether the next test can use it: it is as it was before this one, and so are the sessions it has left."""
        self.release()
        sessions = [connection.info.backend_pid for idle in self._idle.values() for connection in idle]
        return self._keeper is not None and self._keeper.put_back(sessions)

    def close(self) -> None:
        for connections in (self._open, *self._idle.values(), [self._keeper.connection] if self._keeper else []):
            for connection in connections:
                connection.close()
        self._open.clear()
        self._idle.clear()


class Cluster:
    """The server behind a superuser's DSN."""

    def __init__(self, dsn: str, *, ahead: bool = True) -> None:
        """``ahead``: make the next test's database while this one runs; not where a test may end the server."""
        self.dsn = dsn
        self._ahead = ahead
        self.prefix = f"t_ml_rag_{os.getpid()}"
        self.template = f"{self.prefix}_template"
        self._numbers = itertools.count(1)
        self._maintenance = psycopg.connect(dsn, autocommit=True)
        # Copying files takes a third of the processor time of copying blocks through the log, but two checkpoints:
        # those are dear where they wait for the disk.
        fsync = self._maintenance.execute("SELECT current_setting('fsync') = 'on'").fetchone()
        self._strategy = "WAL_LOG" if fsync == (True,) else "FILE_COPY"
        # databases are made and dropped while the tests run: that is waiting for the disk
        self._worker = ThreadPoolExecutor(1)
        self._next: Future[Database] | None = None
        #: databases that tests have used, and that are as new
        self._used: list[Database] = []

    def execute(self, statement: str, *names: str) -> None:
        composed = sql.SQL(statement).format(*map(sql.Identifier, names))
        try:
            self._maintenance.execute(composed)
        except psycopg.OperationalError:
            if not self._maintenance.closed:
                raise
            # the server was ended and started again
            self._maintenance = psycopg.connect(self.dsn, autocommit=True)
            self._maintenance.execute(composed)

    def prepare(self, model_server: str) -> None:
        """Make ``ROLES`` and the template, a database with the extension, whose model server is the one given."""
        template = self.create(template="template0", name=self.template)
        with template.connect() as connection:
            self.fill_template(connection)
            for setting, value in {
                "model_server": model_server,
                "embed_model_id": "fake-embed",
                "generate_model_id": "fake-generate",
                "rerank_model_id": "fake-rerank",
            }.items():
                connection.execute("SELECT ml_rag.configure(%s, %s)", (setting, value))
        template.close()
        for name, group in ROLES.items():
            self.execute("CREATE ROLE {} LOGIN", f"{self.prefix}_{name}")
            if group is not None:
                self.execute("GRANT {} TO {}", group, f"{self.prefix}_{name}")

    def fill_template(self, connection: Connection) -> None:
        connection.execute("CREATE EXTENSION ml_rag CASCADE")

    def drop(self) -> None:
        for database in self._used:
            database.close()
            self._worker.submit(self._drop, database)
        self._worker.shutdown()
        if self._next is not None:
            self._drop(self._next.result())
        self.execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.template)
        for name in ROLES:
            self.execute("DROP ROLE IF EXISTS {}", f"{self.prefix}_{name}")
        self._maintenance.close()

    def create(self, template: str | None = None, name: str | None = None) -> Database:
        name = name or f"{self.prefix}_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {{}} TEMPLATE {{}} STRATEGY {self._strategy}", name, template or self.template)
        return Database(self.dsn, name, self.prefix)

    @contextlib.contextmanager
    def database(self, template: str | None = None, *, fresh: bool = False) -> Iterator[Database]:
        """A database that is gone afterwards, or has another test after this one; ``fresh``: that no test has used."""
        is_reused = self._ahead and template is None and not fresh
        if template is not None:
            database = self.create(template)
        elif is_reused and self._used:
            database = self._used.pop()
        else:
            database = (self._next or self._worker.submit(self.create)).result()
            self._next = self._worker.submit(self.create) if self._ahead else None
        if is_reused:
            database.keep()
        try:
            yield database
        finally:
            database.uses += 1
            if is_reused and database.uses < _MOST_USES and database.put_back():
                self._used.append(database)
            else:
                database.close()
                self._worker.submit(self._drop, database)

    def _drop(self, database: Database) -> None:
        self.execute("DROP DATABASE {} WITH (FORCE)", database.name)
