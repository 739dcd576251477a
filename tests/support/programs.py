"""The client programs of PostgreSQL: pg_dump, pg_restore, psql."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from support.cluster import Database

FORMATS = {"plain": ["-Fp"], "custom": ["-Fc"], "directory": ["-Fd", "-j2"]}


def client(name: str, server_version: int) -> str:
    """The path of a program of the server's major version or newer: pg_dump reads no newer server."""
    folders = []
    if config := shutil.which(os.environ.get("PG_CONFIG", "pg_config")):
        folders = [subprocess.run([config, "--bindir"], capture_output=True, text=True, check=True).stdout.strip()]
    for folder in [*folders, *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None]:
        found = shutil.which(name, path=folder)
        if found:
            version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
            if int(re.findall(r"(\d+)", version)[0]) >= server_version // 10000:
                return found
    pytest.skip(f"there is no {name} here of the server's version")


def run(name: str, database: Database, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    """A client program on a database, as the superuser; it must succeed."""
    with database.connect() as connection:
        program = client(name, connection.info.server_version)
    dsn = make_conninfo(database.dsn, dbname=database.name)
    done = subprocess.run([program, "-d", dsn, *arguments], input=input, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def dump(database: Database, how: str, path: Path, *options: str) -> None:
    assert run("pg_dump", database, *FORMATS[how], "-f", str(path), *options).stderr == ""


def restore(database: Database, how: str, path: Path, *options: str) -> None:
    if how == "plain":
        run("psql", database, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(path), *options)
    else:
        jobs = ["-j2"] if how == "directory" else []
        assert run("pg_restore", database, "--exit-on-error", *jobs, str(path), *options).stderr == ""
