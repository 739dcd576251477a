"""PostgreSQL servers of a test's own, made by initdb from whatever versions are installed on this machine."""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from support.cluster import Connection

#: what a server must have for ml_rag to run in it
EXTENSIONS = ("ml_rag", "vector", "plpython3u")

SETTINGS = "-c listen_addresses= -c fsync=off -c log_min_messages=warning"


@dataclass(frozen=True)
class Installation:
    """The programs of one major version."""

    bindir: Path
    sharedir: Path
    major: int

    @classmethod
    def of(cls, pg_config: Path) -> Installation:
        def told(option: str) -> str:
            return subprocess.run([pg_config, option], capture_output=True, text=True, check=True).stdout.strip()

        return cls(Path(told("--bindir")), Path(told("--sharedir")), int(told("--version").split()[1].split(".")[0]))

    def missing(self) -> list[str]:
        """Which of ``EXTENSIONS`` it has no control file of."""
        return [name for name in EXTENSIONS if not (self.sharedir / "extension" / f"{name}.control").exists()]

    def has_release(self, version: str) -> bool:
        """Whether that version of ml_rag can be created here."""
        return (self.sharedir / "extension" / f"ml_rag--{version}.sql").exists()


def installations() -> list[Installation]:
    """Those with a server, oldest first: of ``ML_RAG_PG_CONFIGS`` (paths joined by colons), else the distribution's."""
    named = os.environ.get("ML_RAG_PG_CONFIGS")
    paths = map(Path, named.split(":")) if named else Path("/usr/lib/postgresql").glob("*/bin/pg_config")
    found = [Installation.of(path) for path in paths]
    return sorted((i for i in found if (i.bindir / "postgres").exists()), key=lambda i: i.major)


def server_user() -> str | None:
    """Who runs a server: PostgreSQL refuses root. None: whoever we are."""
    if os.getuid() != 0:
        return None
    return pwd.getpwnam("postgres").pw_name


def run(command: list[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program as the servers' user. Standard output and error together; raises nothing."""
    user = server_user()
    who: dict[str, Any] = {} if user is None else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **who,
    )


@dataclass
class Server:
    """A cluster in ``folder``/data, on a socket in ``folder``; a folder of the servers' user, see ``own``."""

    installation: Installation
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def dsn(self, database: str = "postgres") -> str:
        return f"host={self.folder} user=postgres dbname={database}"

    def connect(self, database: str = "postgres") -> Connection:
        return psycopg.connect(self.dsn(database), autocommit=True)

    def initialise(self, *options: str) -> None:
        self._run("initdb", "--no-sync", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", *options)

    def start(self) -> None:
        # the log is a file: a pipe would be held open by the server
        settings = f"{SETTINGS} -c unix_socket_directories={self.folder}"
        self._run("pg_ctl", "-w", "-s", "-D", self.data, "-l", self.folder / "log", "-o", settings, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-w", "-s", "-m", "fast", "-D", self.data, "stop")

    def running(self) -> bool:
        return (self.data / "postmaster.pid").exists()

    def _run(self, program: str, *arguments: str | Path) -> None:
        done = run([self.installation.bindir / program, *arguments], self.folder, **self.environment)
        log = self.folder / "log"
        assert done.returncode == 0, done.stdout + (log.read_text() if log.exists() else "")


def own(folder: Path) -> Path:
    """Make it, for the servers' user."""
    folder.mkdir(mode=0o700)
    if (user := server_user()) is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
    return folder
