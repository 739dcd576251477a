"""What a client gets in place of an answer: an error object of OpenAI's."""

from __future__ import annotations

import psycopg

from ml_rag.integrations.database import worded

#: SQLSTATE -> status; all others are 500
_STATUS = {
    "22023": 400,
    "22P02": 400,
    "22P05": 400,
    "42501": 403,
    "P0002": 404,
    "53300": 429,
    "38000": 502,
    "08006": 503,
    "55000": 503,
    "57014": 504,
}


#: seconds after which a client that was too many may ask again
RETRY_AFTER = 5


class Refused(Exception):
    """What the client gets in place of an answer."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
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
                return {"retry-after": str(RETRY_AFTER)}
        return {}

    @classmethod
    def of(cls, error: psycopg.Error) -> Refused:
        state = error.sqlstate or "08006"
        return cls(_STATUS.get(state, 500), worded(error), state)
