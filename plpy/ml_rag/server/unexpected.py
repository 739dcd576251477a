"""Unforeseen errors, as clients see them."""

from __future__ import annotations

import logging
import traceback

from ml_rag.errors import EngineFailed, MlRagError
from ml_rag.shortage import shortage

log = logging.getLogger("ml_rag.server")


def unexpected(error: BaseException, message: str = "the model server failed") -> MlRagError:
    """The error that a client sees for an unforeseen one. The log gets where it happened; no text of a request, which
    its message may hold, goes there or into PostgreSQL's log, where the detail of an error ends up.
    """
    if (known := shortage(error)) is not None:
        log.error("%s: %s", known.message, known.detail)
        return known
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("unexpected %s\n%s", type(error).__name__, frames)
    return EngineFailed(message, detail=type(error).__name__, hint="See the model server's log.")
