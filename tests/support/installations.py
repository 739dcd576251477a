"""The versions of PostgreSQL that are installed on this machine."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

#: what a server must have for ml_rag to run in it
EXTENSIONS = ("ml_rag", "vector", "plpython3u")


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
