"""Whether the document parsers of this machine are confined as they should be: for the log, /healthz and the doctor."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys

import orjson

from ml_rag import priority
from ml_rag.ingest.child import inherited

log = logging.getLogger("ml_rag.server")

#: what of the server's environment a parser may see: no keys of remote models
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TESSDATA_PREFIX", priority.VARIABLE)
_SECONDS = 30


def environment() -> dict[str, str]:
    """The environment of a parser's process."""
    # the models want the other cores
    single = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return inherited(_ENVIRONMENT) | single


@functools.cache
def log_missing(what: str, why: str) -> None:
    """Once for the life of the server, not for each child."""
    log.warning("document parsers run without a %s: %s", what, why)


async def find_missing() -> dict[str, str] | None:
    """What the kernel refuses of ``confine`` -> why, by a process that confines itself and ends; logged.

    None where that cannot be found out now, as where no process can be started.
    """
    command = [sys.executable, "-P", "-m", "ml_rag.ingest.confine"]
    none, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=none, stdout=pipe, stderr=none, env=environment(), start_new_session=True
        )
    except (OSError, RuntimeError):  # RuntimeError: no thread can be started
        return None
    try:
        async with asyncio.timeout(_SECONDS):
            told, _ = await process.communicate()
        missing: dict[str, str] = orjson.loads(told)
    except (OSError, TimeoutError, ValueError):
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    for what, why in missing.items():
        log_missing(what, why)
    if not missing:
        log.info("document parsers are confined: no network, no files but their own, no privilege")
    return missing
