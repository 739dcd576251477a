"""What a client gets in place of an answer: an error object of OpenAI's.

Errors of the database name stores, roles and files, which concern its administrator: they go to the log, under an id
that the client gets with a sentence.
"""

from __future__ import annotations

import logging
import secrets

import psycopg

from ml_rag.errors import MlRagError, retry_after
from ml_rag.integrations.database import worded

_LOG = logging.getLogger("ml_rag.gateway")
#: SQLSTATE -> status and message for the client
_SAID = {
    "22021": (400, "the request has characters that text cannot hold"),
    "22023": (400, "the request has what cannot be served, such as too long a text or a schema beyond the limits"),
    "22P02": (400, "the request has a value that cannot be read"),
    "22P05": (400, "the request has characters that text cannot hold"),
    "42501": (403, "this token may not read what the question needs"),
    # not 404: proxies take that for a model which is not there, and send it no question for a while
    "P0002": (422, "nothing was found that answers the question"),
    "53300": (429, "too much is asked at the same time; ask again later"),
    "38000": (502, "the model failed"),
    "08006": (503, "the database or the model server cannot be reached"),
    "55000": (503, "the model is not available"),
    "57014": (504, "the answer took too long"),
}
_FAILED = 500, "the answer failed"
#: seconds after which a client that was too many may ask again, unless the error names others
RETRY_AFTER = 5


class Refused(Exception):
    """What the client gets in place of an answer."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, seconds: int = RETRY_AFTER
    ) -> None:
        super().__init__(message)
        self.status, self.code, self._seconds = status, code, seconds
        self.body = {
            "error": {
                "message": message,
                "type": "invalid_request_error" if status < 500 else "server_error",
                "param": param,
                "code": code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        match self.status:
            case 401:
                return {"www-authenticate": "Bearer"}
            case 429:
                return {"retry-after": str(self._seconds)}
        return {}

    @classmethod
    def of(cls, error: Exception) -> Refused:
        """An error that is logged, with its id."""
        number = secrets.token_hex(4)
        state, hint = None, None
        if isinstance(error, psycopg.Error):
            state, hint = error.sqlstate or "08006", error.diag.message_hint
            _LOG.warning("error %s: %s", number, worded(error))
        elif isinstance(error, MlRagError):
            state, hint = error.sqlstate, error.hint
            _LOG.warning("error %s: %s (SQLSTATE %s)\n%s", number, error.message, state, error.detail)
        else:
            _LOG.error("error %s", number, exc_info=error)
        status, sentence = _SAID.get(state or "", _FAILED)
        return cls(status, f"{sentence} (error {number})", state, seconds=retry_after(hint) or RETRY_AFTER)
