"""SHA-256 pins: a model file whose content is not the pinned one is never loaded.

Hashing gigabytes at every start would be slow, so a checked file is remembered by size, modification time and inode in
``.verified.json`` of the models folder. That guards against damaged or swapped downloads; a process that can write that
folder as the server's user could change the server itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from ml_rag.errors import ModelUnavailable
from ml_rag.server.catalogue import UNPINNED, ModelEntry

MEMORY = ".verified.json"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256(path: Path, models_dir: Path) -> str:
    """``sha256_of``, remembered for as long as the file's size, modification time and inode stay."""
    status = path.stat()
    state = [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]
    key = str(path.resolve())
    memory = _recall(models_dir)
    known = memory.get(key)
    if isinstance(known, dict) and known.get("state") == state and isinstance(known.get("sha256"), str):
        return str(known["sha256"])
    digest = sha256_of(path)
    # read again: another model may have been checked meanwhile
    _remember(models_dir, {**_recall(models_dir), key: {"state": state, "sha256": digest}})
    return digest


def _recall(models_dir: Path) -> dict[str, object]:
    try:
        memory = json.loads((models_dir / MEMORY).read_bytes())
    except (OSError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}


def _remember(models_dir: Path, memory: dict[str, object]) -> None:
    # a models folder that cannot be written to costs a hash at each start, nothing more
    with contextlib.suppress(OSError):
        models_dir.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=models_dir, prefix=MEMORY)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(memory, file)
            Path(name).replace(models_dir / MEMORY)
        except OSError:
            Path(name).unlink()


def check_pins(entry: ModelEntry, models_dir: Path) -> None:
    """Compare each pinned file with its pin. Raises ``ModelUnavailable``."""
    if not entry.kind.has_files:
        return
    for path, pin in entry.file_paths(models_dir).items():
        if pin == UNPINNED:
            continue
        try:
            found = cached_sha256(path, models_dir)
        except OSError as error:
            raise ModelUnavailable(f"model {entry.id} cannot be read", detail=str(error)) from error
        if found != pin:
            command = entry.pull_into(models_dir)
            raise ModelUnavailable(
                f"a file of model {entry.id} is not the one the catalogue names",
                detail=f"SHA-256 of {path} is {found}, expected {pin}",
                hint=f"Download it again with: {command}" if command else "Put the right file there.",
            )
