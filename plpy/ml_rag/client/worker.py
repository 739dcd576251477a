"""``ml-rag worker``: embeds what waits in tables that have a vectorizer, and sleeps until something does.

Several can run side by side, on several machines: what one has claimed the others leave to it. A turn at a table is a
few batches, so that a bulk load of one does not hold up the others.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click
import psycopg
from psycopg.types.json import Jsonb
from rich.console import Console

from ml_rag.client import metrics_server
from ml_rag.client.dsn import dsn_option
from ml_rag.search_path import PIN, refuse_borrowed_role
from ml_rag.terminal import printable
from ml_rag.work import Task, Work

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

#: at most this share of the time goes into looking for waiting rows: any role may send notifications
LOOKING = 0.1
#: seconds after the first failure, twice as long after each further one, up to the last
BACKOFF = (1.0, 300.0)
#: the tables, and changes of those that have node groups or failures; what one has, if it can be read
LISTED = "SELECT s.relation::bigint, s.relation::regclass::text, s.changes FROM ml_rag._served() AS s ORDER BY 1"
_STATE = "SELECT v.pending, v.failed FROM ml_rag._vectorizers(%s::oid) AS v WHERE v.pending IS NOT NULL"
#: the owner of what a run fills, if those of it and of the table are trusted, as ml_rag.vectorizer asks it
_OWNER = """SELECT pg_get_userbyid(c.relowner) FROM pg_class AS c
WHERE c.oid = coalesce(ml_rag._segment_table(%(relation)s::oid)::oid, %(relation)s::oid)
  AND ml_rag._are_trusted(%(relation)s::oid || ml_rag._parts(c.oid))"""

Got = TypeVar("Got")


@dataclass
class Backoff:
    """How long what failed is left alone."""

    failures: int = 0
    until: float = 0

    def fail(self, now: float) -> float:
        """The seconds to wait."""
        first, longest = BACKOFF
        seconds = min(longest, first * 2.0 ** min(self.failures, 20))
        self.failures += 1
        self.until = now + seconds
        return seconds


class Metrics:
    """What a worker counts. Labels are tables with a vectorizer and SQLSTATEs, so their number is bounded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        relation, outcome, sqlstate = ["relation"], ["relation", "outcome"], ["relation", "sqlstate"]
        self.rows = counter("ml_rag_worker_rows", "Rows that this worker has embedded, or that failed", outcome)
        self.errors = counter("ml_rag_worker_errors", "Runs of this worker that ended in an error", sqlstate)
        self.lost = counter("ml_rag_worker_lost_connections", "Connections that this worker lost")
        self.seconds = Histogram(
            "ml_rag_worker_turn_seconds", "Time of a turn at a table", relation,
            buckets=(0.01, 0.1, 1, 10, 60, 600), registry=registry,
        )  # fmt: skip
        self.pending = gauge("ml_rag_worker_pending_rows", "Rows that wait, when this worker last looked", relation)
        failed = "Rows in ml_rag.vectorizer_error, when this worker last looked"
        self.failed = gauge("ml_rag_worker_failed_rows", failed, relation)
        self.looked = gauge("ml_rag_worker_looked_timestamp_seconds", "When this worker last looked")

    def look(self, states: list[tuple[str, int, int]]) -> None:
        """Rows that wait, and that have failed, of each table there is now."""
        self.pending.clear()
        self.failed.clear()
        for relation, pending, failed in states:
            self.pending.labels(relation).set(pending)
            self.failed.labels(relation).set(failed)
        self.looked.set_to_current_time()


@dataclass
class Worker:
    """A connection, and the tables that the role behind it owns."""

    dsn: str
    #: batches of one turn at a table
    batches: int
    #: longest sleep, in seconds: what became due by itself is found then
    idle: float
    metrics: Metrics | None = None
    #: what shows how far it is, where it ends by itself
    work: Task | None = None
    #: rows that it is done with
    done: int = 0
    #: changes of tables, as it saw them last; of none at first, since a worker that was killed may have left some
    seen: dict[int, int | None] = field(default_factory=dict)
    #: tables that are run also if no row waits, as their rows have changed or their node groups could not be filled,
    #: and when they are tried again
    unfilled: dict[int, Backoff] = field(default_factory=dict)
    #: by the step that failed, and the table
    backoffs: dict[tuple[str, int], Backoff] = field(default_factory=dict)

    def connect(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(self.dsn, autocommit=True, application_name="ml-rag worker")
        refuse_borrowed_role(connection, PIN)
        # A lock on one table must not keep the worker from the others.
        connection.execute(
            "SELECT set_config('lock_timeout', '30s', false) WHERE current_setting('lock_timeout') = '0'"
        )
        return connection

    @contextmanager
    def listening(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection of its own, that is never read: one that waits for replies keeps in memory whatever any role
        notifies meanwhile."""
        with closing(psycopg.connect(self.dsn, autocommit=True, application_name="ml-rag worker")) as listener:
            refuse_borrowed_role(listener, PIN)
            listener.execute("LISTEN ml_rag_vectorizer")
            yield listener

    def run(self, *, once: bool) -> None:
        """Work until interrupted; ``once``: until nothing waits.

        Raises psycopg.Error where ``once`` meets an error, or the first connection fails.
        """
        connection = self.connect()
        if self.work:
            connection.add_notice_handler(self.work.heard)
        if once:
            while self.turn(connection, once=True):
                pass
            return
        lost = Backoff()
        while True:
            try:
                if connection.closed:
                    connection = self.connect()
                    self.seen = {}
                began = time.monotonic()
                with self.listening() as listener:  # before it looks, so that nothing is missed
                    if self.turn(connection, once=False):
                        lost = Backoff()
                        continue
                    until = began + min(self.idle, (time.monotonic() - began) / LOOKING)
                    self.sleep(listener, began)
                time.sleep(max(0.0, until - time.monotonic()))
                lost = Backoff()
            except psycopg.Error as error:
                if not (connection.closed or isinstance(error, psycopg.OperationalError)):
                    raise
                connection.close()
                if self.metrics:
                    self.metrics.lost.inc()
                seconds = lost.fail(time.monotonic())
                report(f"the database is not to be reached; again in {seconds:.0f} s: {reason(error)}")
                time.sleep(seconds)

    def turn(self, connection: psycopg.Connection[Any], *, once: bool) -> bool:
        """A turn at each table where something waits; whether anything was done."""
        refuse_borrowed_role(connection, PIN)  # the extension may have been dropped
        found = connection.execute(LISTED).fetchall()
        listed = {relation: name for relation, name, _ in found}
        for relation, _, changes in found:
            if changes is not None and self.seen.get(relation) != changes:
                self.unfilled.setdefault(relation, Backoff())
            self.seen[relation] = changes
        states = []
        for relation, name in listed.items():
            look = partial(connection.execute, _STATE, (relation,))
            state = self.apart(connection, ("look", relation), name, look, once=once)
            states += [(relation, name, *row) for row in state or ()]
        if self.metrics:
            self.metrics.look([(name, pending, failed) for _, name, pending, failed in states])
        if self.work:
            self.work.tell(self.done, self.done + sum(pending for _, _, pending, _ in states))
        done = False
        for relation, name, pending, _ in states:
            began = time.monotonic()
            if not pending and (relation not in self.unfilled or self.unfilled[relation].until > began):
                continue
            embed = partial(self.embed, connection, relation, name)
            was_done = self.apart(connection, ("embed", relation), name, embed, once=once)
            if was_done is not None:
                done |= was_done
                if self.metrics:
                    self.metrics.seconds.labels(name).observe(time.monotonic() - began)
        return done

    def apart(
        self,
        connection: psycopg.Connection[Any],
        key: tuple[str, int],
        name: str,
        step: Callable[[], Got],
        *,
        once: bool,
    ) -> Got | None:
        """What a step with a table gives; None if it fails, or has failed before and is left alone: others continue."""
        backoff = self.backoffs.setdefault(key, Backoff())
        if backoff.until > time.monotonic():
            return None
        try:
            result = step()
        except psycopg.Error as error:
            seconds = backoff.fail(time.monotonic())
            if connection.closed:  # by the table, perhaps: it is left alone for longer than the database
                backoff.until += seconds
            if self.metrics:
                self.metrics.errors.labels(name, error.sqlstate or "").inc()
            if once or connection.closed:
                raise
            report(f"{name}: again in {seconds:.0f} s: {reason(error)}")
            return None
        del self.backoffs[key]
        return result

    def embed(self, connection: psycopg.Connection[Any], relation: int, name: str) -> bool:
        """A few batches of one table; whether there were any. None of one that was given away since it was listed."""
        trusted = connection.execute(_OWNER, {"relation": relation}).fetchone()
        if trusted is None:
            return False
        # what is given away from here on is not run
        options = Jsonb({"batches": self.batches, "owner": trusted[0]})
        told: list[str | None] = []

        def note(diagnostic: psycopg.errors.Diagnostic) -> None:
            told.append(diagnostic.sqlstate)

        connection.add_notice_handler(note)
        try:
            call = "CALL ml_rag.run_vectorizer(%s::oid::regclass, %s)"
            row = connection.execute(call, (relation, options)).fetchone()
        finally:
            connection.remove_notice_handler(note)
        if "55006" in told or "01000" in told:  # the other session may be past what this run has embedded
            self.unfilled.setdefault(relation, Backoff()).fail(time.monotonic())
        else:
            self.unfilled.pop(relation, None)
        assert row is not None
        result: dict[str, Any] = row[0]
        self.done += result["embedded"] + result["failed"]
        if self.metrics:
            for outcome in ("embedded", "failed"):
                self.metrics.rows.labels(name, outcome).inc(result[outcome])
        if result["embedded"] or result["failed"]:
            why = " (why: ml_rag.vectorizer_error)" if result["failed"] else ""
            line = "{relation}: {embedded} embedded, {failed} failed{why}, {pending} pending, {seconds} s"
            report(line.format(**result, why=why))
        return bool(result["embedded"] or result["failed"])

    def sleep(self, listener: psycopg.Connection[Any], looked: float) -> None:
        """Until a table is written to, or a table that failed is due since it ``looked``, or long enough."""
        now = time.monotonic()
        waiting = [*self.backoffs.values(), *self.unfilled.values()]
        due = [backoff.until - now for backoff in waiting if backoff.until > looked]
        select.select([listener], [], [], max(0.05, min([self.idle, *due])))


def report(line: str) -> None:
    click.echo(printable(line), err=True)


def reason(error: psycopg.Error) -> str:
    """SQLSTATE and message; neither repeats a text."""
    message = error.diag.message_primary or str(error).partition("\n")[0]
    return f"{message} ({error.sqlstate})" if error.sqlstate else message


def serve_metrics(port: int, address: str) -> Metrics:
    """Metrics that a thread of their own serves. Raises ClickException where it cannot."""
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError:
        raise click.ClickException("--metrics-port needs the package prometheus-client: pip install it") from None
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    try:
        metrics_server.serve(make_wsgi_app(registry), address, port)
    except OSError as error:
        raise click.ClickException(f"metrics cannot be served at {address}:{port}: {error.strerror}") from error
    return metrics


@click.command()
@dsn_option
@click.option(
    "--batches", type=click.IntRange(1, 10000), default=10, show_default=True, help="Batches of a table's turn."
)
@click.option(
    "--idle", type=click.FloatRange(0.1, 3600), default=30, show_default=True, help="Longest sleep in seconds."
)
@click.option("--once", is_flag=True, help="End when nothing waits.")
@click.option(
    "--metrics-port", type=click.IntRange(1, 65535), help="Serve Prometheus metrics at /metrics of this port."
)
@click.option("--metrics-address", default="127.0.0.1", show_default=True, help="Address that --metrics-port is of.")
def worker(dsn: str, batches: int, idle: float, once: bool, metrics_port: int | None, metrics_address: str) -> None:
    """Embed what waits in tables with a vectorizer, for the role that owns them, until SIGTERM.

    Tables whose owner the role does not trust are left alone: a superuser's worker serves superusers' tables only.
    """
    metrics = None if metrics_port is None else serve_metrics(metrics_port, metrics_address)
    # psycopg cancels the statement of a connection that is interrupted; what was not committed waits for the next run
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if once:
            with Work(Console(stderr=True)) as work, work.task("rows") as task:
                Worker(dsn, batches, idle, metrics, task).run(once=True)
        else:
            Worker(dsn, batches, idle, metrics).run(once=False)
    except KeyboardInterrupt:
        report("ended")
    except psycopg.Error as error:
        if error.sqlstate is None:  # no server has answered
            raise
        raise click.ClickException(printable(reason(error))) from error
