"""A PostgreSQL cluster of the tests' own, made by initdb in a folder: to use quickly, or to kill."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
import pytest

from support.processes import children, exists, gone, wait_until

#: what mk/test.sh says the extension is installed into
PG_CONFIG = "ML_RAG_TEST_PG_CONFIG"
_PORT = 54331  # names the socket file only
_CONF = """
listen_addresses = ''
port = {port}
unix_socket_directories = '{sockets}'
unix_socket_permissions = 0700
shared_buffers = '64MB'
log_min_messages = warning
log_line_prefix = '%m [%p] '
max_wal_size = '128MB'
max_wal_senders = 4
# a table's rows can be sent to another database too
wal_level = logical
restart_after_crash = on
# to compile a statement takes longer than most tests, whose tables are small
jit_above_cost = -1
"""
#: as a real one has them: what is committed must be there after the crash
_DURABLE = """
fsync = on
full_page_writes = on
synchronous_commit = on
"""
_QUICK = """
fsync = off
full_page_writes = off
synchronous_commit = off
"""


class PrivateCluster:
    """``start``, ``stop``, ``kill`` and start it again; ``dsn`` is a superuser's."""

    def __init__(self, folder: Path, programs: Path, user: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.sockets = folder / "pg"
        self.log = folder / "pg" / "postgresql.log"
        self.dsn = f"host={self.sockets} port={_PORT} dbname=postgres user=postgres"
        self._programs = programs
        self._user = user
        #: of its programs, beside ours
        self._environment = {**os.environ, **(environment or {})}

    def run(self, program: str, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A program of PostgreSQL, as the cluster's user."""
        is_other = self._user != pwd.getpwuid(os.getuid()).pw_name
        return subprocess.run(
            [self._programs / program, *arguments],
            cwd="/",  # that user may not enter the folder we are in
            env=self._environment,
            stdin=subprocess.DEVNULL,
            # no pipe: the daemon would hold it
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=check,
            text=True,
            **({"user": self._user, "group": pwd.getpwnam(self._user).pw_gid, "extra_groups": []} if is_other else {}),
        )

    def make_folders(self) -> None:
        for path in (self.data, self.sockets):
            path.mkdir(mode=0o700)
            shutil.chown(path, self._user)

    def initialise(self, *, durable: bool = True) -> None:
        self.make_folders()
        sync = () if durable else ("--no-sync",)
        self.run(
            "initdb", "-k", *sync, "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8"
        )  # fmt: skip
        self.configure(_CONF.format(port=_PORT, sockets=self.sockets) + (_DURABLE if durable else _QUICK))

    def configure(self, settings: str) -> None:
        """Lines for postgresql.conf; the last one of a name holds."""
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(settings + "\n")

    def start(self) -> None:
        """Start, and wait until it has recovered from whatever was before."""
        if (self.data / "postmaster.pid").exists() and gone(self.postmaster):
            wait_until(lambda: not exists(self.postmaster), 30)  # a zombie looks like one that runs
        started = self.run(
            "pg_ctl", "-w", "-s", "-t", "120", "-D", self.data, "-l", self.log, "start", check=False
        )  # fmt: skip
        assert started.returncode == 0, self.log.read_text()[-4000:]

    def stop(self, mode: str = "immediate") -> None:
        if (self.data / "postmaster.pid").exists():
            self.run("pg_ctl", "-w", "-s", "-m", mode, "-D", self.data, "stop", check=False)

    def restart(self) -> None:
        self.stop()
        self.start()

    @property
    def postmaster(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def kill(self) -> None:
        """End all of it at once, as a machine that loses its power would: nothing is written any more."""
        first = self.postmaster
        others = children(first)
        for pid in (first, *others):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # the next postmaster looks for this one by its id
        wait_until(lambda: not any(map(exists, (first, *others))), 30)

    def kill_backend(self, pid: int) -> None:
        """End one session's process; PostgreSQL ends all others and recovers. Returns when it takes connections."""
        with psycopg.connect(self.dsn, autocommit=True) as witness:
            os.kill(pid, signal.SIGKILL)

            def witness_is_ended() -> bool:
                try:
                    witness.execute("SELECT 1")
                except psycopg.OperationalError:
                    return True
                return False

            wait_until(witness_is_ended)
        wait_until(self.answers, 60)

    def answers(self) -> bool:
        try:
            psycopg.connect(self.dsn).close()
        except psycopg.OperationalError:
            return False
        return True

    @contextlib.contextmanager
    def standby(self, name: str = "standby") -> Iterator[PrivateCluster]:
        """A hot standby of this cluster, by pg_basebackup and streaming replication."""
        other = PrivateCluster(self.folder / name, self._programs, self._user, self._environment)
        other.folder.mkdir(mode=0o711)
        other.make_folders()
        self.run("pg_basebackup", "-R", "-X", "stream", "-c", "fast", "-d", self.dsn, "-D", other.data)
        other.configure(f"unix_socket_directories = '{other.sockets}'")
        other.start()
        try:
            yield other
        finally:
            other.stop()
            shutil.rmtree(other.folder)

    def caught_up(self, standby: PrivateCluster) -> None:
        """Wait until the standby has applied what is committed here."""
        with psycopg.connect(self.dsn, autocommit=True) as here, psycopg.connect(standby.dsn, autocommit=True) as there:
            at = here.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
            applied = "SELECT pg_last_wal_replay_lsn() >= %s"
            wait_until(lambda: there.execute(applied, at).fetchone() == (True,), 30)


def programs() -> Path:
    """The folder of initdb, of the PostgreSQL that has the extension; the test is skipped where there is none."""
    config = os.environ.get(PG_CONFIG)
    if not config:
        pytest.skip(f"{PG_CONFIG} is not set: the database is another machine's, which cannot be killed from here")
    asked = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
    return _with_initdb(Path(asked.stdout.strip() if asked.returncode == 0 else "/nonexistent"))


def _with_initdb(folder: Path) -> Path:
    if not (folder / "initdb").exists():
        pytest.skip(f"there is no initdb in {folder}")
    return folder


def cluster_user() -> str:
    """Who runs the cluster: PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid()).pw_name
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")


#: waits for the end of its input, which is ours; then ends the postmaster and removes the two folders
_GUARD = """
cat
pid=$(head -n 1 "$0/postmaster.pid") && kill -QUIT "$pid"
for i in $(seq 100); do kill -0 "$pid" || break; sleep 0.05; done
rm -rf "$0" "$1"
"""


@contextlib.contextmanager
def _gone_with_us(cluster: PrivateCluster) -> Iterator[None]:
    """The cluster is gone afterwards, and also where this process is killed: it may be gigabytes of memory."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        ["sh", "-c", _GUARD, cluster.data, cluster.sockets], stdin=subprocess.PIPE, start_new_session=True, **quiet
    ):
        yield


@contextlib.contextmanager
def private_cluster(folder: Path, *, durable: bool = True, bindir: Path | None = None) -> Iterator[PrivateCluster]:
    """A cluster that runs; gone afterwards, whatever state it is in. ``durable``: what it commits survives a crash.

    ``bindir``: the folder of initdb, where it is not that of ``ML_RAG_TEST_PG_CONFIG``.
    """
    cluster = PrivateCluster(folder, _with_initdb(bindir) if bindir else programs(), cluster_user())
    with _gone_with_us(cluster):
        cluster.initialise(durable=durable)
        cluster.start()
        yield cluster
