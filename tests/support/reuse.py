"""A database that one test after the other has, with its sessions: each test finds both as if they were new.

To make a database takes 20 ms of processor time, and a session that has called ml_rag has loaded Python and planned
what took it another 50 to 100. So after a test what it created is dropped, what the tables of the extension held is put
back, and its sessions are reset. Then the catalogs must be as they were: where anything else is left, as a privilege
on a routine, or a session that the test did not end, the database is dropped and the next test gets a new one.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import pq

from support.processes import wait_until

Connection = psycopg.Connection[Any]

#: like DISCARD ALL, which would take the plans, too
_RESET = b"""RESET ALL; CLOSE ALL; UNLISTEN *; DEALLOCATE ALL; DISCARD TEMP; DISCARD SEQUENCES;
SELECT pg_catalog.pg_advisory_unlock_all(); RESET SESSION AUTHORIZATION"""
#: what takes away what was created here, whose OID is above that of the database, as none in the template is; and what
#: was granted. Statements are told, not run, by one whose plan is kept: it takes longer to plan than to run.
_UNDO = """
SELECT c.command FROM (
  SELECT o.place, o.oid, concat_ws(' ', 'DROP', replace(replace(i.type, '-', ' '), 'composite ', ''), 'IF EXISTS',
    i.identity, 'CASCADE') AS command
  FROM (
    SELECT 1 AS place, 'pg_namespace'::regclass AS class, oid FROM pg_namespace WHERE nspname !~ '^pg_'
    UNION ALL SELECT 0, 'pg_extension'::regclass, oid FROM pg_extension
    UNION ALL SELECT 2, 'pg_event_trigger'::regclass, oid FROM pg_event_trigger
    UNION ALL SELECT 3, 'pg_class'::regclass, oid FROM pg_class
      WHERE relkind IN ('r', 'p', 'v', 'm', 'f', 'S', 'c') AND relpersistence <> 't'
    UNION ALL SELECT 4, 'pg_proc'::regclass, oid FROM pg_proc
    UNION ALL SELECT 5, 'pg_type'::regclass, oid FROM pg_type WHERE typtype IN ('d', 'e', 'r')
    UNION ALL SELECT 6, 'pg_ts_config'::regclass, oid FROM pg_ts_config
    UNION ALL SELECT 7, 'pg_publication'::regclass, oid FROM pg_publication
    UNION ALL SELECT 7, 'pg_collation'::regclass, oid FROM pg_collation
    UNION ALL SELECT 8, 'pg_foreign_data_wrapper'::regclass, oid FROM pg_foreign_data_wrapper
  ) AS o, pg_identify_object(o.class, o.oid, 0) AS i
  WHERE o.oid > (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
  UNION ALL
  SELECT 9, a.grantee, format('REVOKE ALL ON %s FROM %s', a.name, a.grantee::regrole) FROM (
    SELECT 'SCHEMA public' AS name, a.grantee FROM pg_namespace AS n, aclexplode(n.nspacl) AS a
    WHERE n.nspname = 'public' AND a.grantee NOT IN (0, 'pg_database_owner'::regrole)
    UNION SELECT format('DATABASE %I', d.datname), a.grantee FROM pg_database AS d, aclexplode(d.datacl) AS a
    WHERE d.datname = current_database() AND a.grantee NOT IN (0, d.datdba)
  ) AS a
  UNION ALL
  SELECT 9, 0, 'REVOKE CREATE ON SCHEMA public FROM PUBLIC' FROM pg_namespace AS n, aclexplode(n.nspacl) AS a
  WHERE n.nspname = 'public' AND a.grantee = 0 AND a.privilege_type = 'CREATE'
) AS c ORDER BY c.place, c.oid
"""
_SEQUENCES = """
SELECT setval(s.seqrelid, s.seqstart, false) FROM pg_sequence AS s JOIN pg_class AS c ON c.oid = s.seqrelid
WHERE c.relnamespace::regnamespace::text ~ '^ml_rag'
"""
#: statistics are no part of what a test finds
_CATALOGS = """
SELECT oid::regclass::text FROM pg_class
WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind = 'r' AND NOT relisshared AND relname !~ '^pg_statistic'
"""
_TABLES = """
SELECT oid::regclass::text FROM pg_class
WHERE relnamespace::regnamespace::text ~ '^ml_rag' AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY oid DESC
"""
#: how many rows there are, and how many versions of rows that are younger than the database
_VERSION = """
SELECT '{0}', count(*), count(*) FILTER (WHERE age(xmin) < (
  SELECT age(d.xmin) FROM pg_database AS d WHERE d.datname = current_database()))::text
FROM {0}
"""
_CONTENT = "SELECT '{0}', count(*), md5(string_agg(t::text, ' ' ORDER BY t::text)) FROM {0} AS t"
_SCHEMAS = """
SELECT 'pg_namespace', count(*), string_agg(concat_ws(' ', nspname, nspowner, nspacl), ', ' ORDER BY nspname)
FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp_'
"""
_DATABASE = """
SELECT 'database', s.n, concat_ws(' ', d.datdba, d.datallowconn, d.datconnlimit, d.datistemplate,
  coalesce(d.datacl, acldefault('d', d.datdba))) FROM pg_database AS d, LATERAL (
  SELECT (SELECT count(*) FROM pg_db_role_setting WHERE setdatabase = d.oid)
    + (SELECT count(*) FROM pg_prepared_xacts WHERE database = d.datname)
    + (SELECT count(*) FROM pg_replication_slots WHERE database = d.datname)) AS s (n)
WHERE d.datname = current_database()
"""
_OTHERS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type !~ '^(autovacuum worker|Citus)'
  AND application_name !~ '^citus_internal' AND pid <> pg_backend_pid() AND pid <> ALL (%s)
"""


class Keeper:
    """Puts back what tests have changed in a database; made while that is as it shall be."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        # no trigger runs: neither a test's, nor those by which the extension follows what is dropped
        connection.execute(
            "SET session_replication_role = replica; SET search_path = pg_catalog; SET lock_timeout = '5s';"
            "SET client_min_messages = error"
        )
        catalogs = [_VERSION.format(name) if name != "pg_namespace" else _SCHEMAS for name in self._names(_CATALOGS)]
        tables = self._names(_TABLES)
        self._look = " UNION ALL ".join([*catalogs, _DATABASE])
        self._look_at_tables = " UNION ALL ".join(map(_CONTENT.format, tables))
        self._rows = {
            name: self._one(f"SELECT coalesce(array_agg(t), '{{}}')::text FROM {name} AS t") for name in tables
        }
        self._state = self._found(self._look)
        self._content = self._found(self._look_at_tables)

    def put_back(self, sessions: list[int]) -> bool:
        """Whether the database is now as it was, with none but these sessions."""
        try:
            # one that was closed takes a moment to end
            wait_until(lambda: self.connection.execute(_OTHERS, (sessions,)).fetchone() == (0,), 2)
            undo = [command for (command,) in self.connection.execute(_UNDO, prepare=True)]
            self.connection.execute("; ".join(undo).encode())
            self.connection.execute(_SEQUENCES, prepare=True)
            for name, content in self._found(self._look_at_tables).items():
                if content != self._content[name]:
                    self.connection.execute(f"DELETE FROM {name}")
                    self.connection.execute(
                        f"INSERT INTO {name} OVERRIDING SYSTEM VALUE SELECT * FROM unnest(%s::{name}[])",
                        (self._rows[name],),
                    )
            return self._found(self._look) == self._state
        except (psycopg.Error, AssertionError):
            return False

    def _names(self, query: str) -> list[str]:
        return [name for (name,) in self.connection.execute(query)]

    def _one(self, query: str) -> str:
        (value,) = self.connection.execute(query).fetchone() or ("",)
        return str(value)

    def _found(self, query: str) -> dict[str, tuple[Any, ...]]:
        return {name: tuple(rest) for name, *rest in self.connection.execute(query, prepare=True)}


def reset(connection: Connection) -> Connection | None:
    """Another connection on the same session, which is as new; None where that cannot be."""
    session = connection.pgconn
    if session.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR):
        session.exec_(b"ROLLBACK")
    if session.transaction_status != pq.TransactionStatus.IDLE or session.pipeline_status:
        return None
    if session.exec_(_RESET).status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        return None
    del connection.pgconn  # who still has the test's connection can do nothing with it
    reused: Connection = psycopg.Connection(session)
    reused.autocommit = True
    return reused
