"""The errors of ml_rag, each with the SQLSTATE a caller sees and the HTTP status the model server answers.

    MlRagError                     38000  500  engine_failed
    ├── InvalidRequest             22023  400  invalid_request
    │   ├── UnknownModel           22023  404  model_not_found
    │   └── WrongTask              22023  400  wrong_task
    ├── DimensionMismatch          22000  400  dimension_mismatch
    ├── PrivilegeError             42501  403  forbidden
    ├── ModelUnavailable           55000  503  model_unavailable
    ├── ServerUnreachable          08006  502  server_unreachable   (raised by clients only)
    ├── QueueFull                  53300  429  queue_full
    ├── DiskFull                   53100  507  disk_full
    ├── EngineFailed               38000  500  engine_failed
    └── DocumentError              38000  422  document_failed      (one document; the load goes on)

A message is short, lower case, without a full stop; ``detail`` holds the facts; ``hint`` says what to do.
Over HTTP an error travels in OpenAI's form: ``{"error": {"message", "type", "code", "detail", "hint"}}``.
Standard library only: this module is imported in the PostgreSQL backend too.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar


class MlRagError(Exception):
    """Base of every error this package raises on purpose."""

    sqlstate: ClassVar[str] = "38000"
    status: ClassVar[int] = 500
    code: ClassVar[str] = "engine_failed"

    def __init__(self, message: str, *, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint

    def to_json(self) -> dict[str, Any]:
        """The body of an HTTP error reply."""
        return {
            "error": {
                "message": self.message,
                "type": "invalid_request_error" if self.status < 500 else "server_error",
                "code": self.code,
                "detail": self.detail,
                "hint": self.hint,
            }
        }


class InvalidRequest(MlRagError):
    """A bad option or value."""

    sqlstate, status, code = "22023", 400, "invalid_request"


class UnknownModel(InvalidRequest):
    """No model of that id in the catalogue."""

    status, code = 404, "model_not_found"


class WrongTask(InvalidRequest):
    """The model exists but is for another task."""

    code = "wrong_task"


class DimensionMismatch(MlRagError):
    """Two vectors of different dimensions meet."""

    sqlstate, status, code = "22000", 400, "dimension_mismatch"


class PrivilegeError(MlRagError):
    """The caller may not do that."""

    sqlstate, status, code = "42501", 403, "forbidden"


class ModelUnavailable(MlRagError):
    """The model is known but its files are missing, wrong or cannot be loaded."""

    sqlstate, status, code = "55000", 503, "model_unavailable"


class ServerUnreachable(MlRagError):
    """The model server cannot be reached, or broke off in mid-reply."""

    sqlstate, status, code = "08006", 502, "server_unreachable"


_TRY_AGAIN = "Try again in {} s."


def try_again(seconds: float) -> str:
    """The hint of an error that passes, whole seconds and at least one; clients read it (``retry_after``)."""
    return _TRY_AGAIN.format(max(1, math.ceil(seconds)))


def retry_after(hint: str | None) -> int | None:
    """The seconds that such a hint names; None for another one."""
    found = re.search(re.escape(_TRY_AGAIN).replace(r"\{\}", "([0-9]{1,6})"), hint or "")
    return int(found[1]) if found else None


class QueueFull(MlRagError):
    """The queue of the model, or the server itself, is at its bound."""

    sqlstate, status, code = "53300", 429, "queue_full"


class DiskFull(MlRagError):
    """The model server has no room for what it must write."""

    sqlstate, status, code = "53100", 507, "disk_full"


class EngineFailed(MlRagError):
    """The model or a parser failed; the detail carries its message."""


class DocumentError(MlRagError):
    """One document cannot be read: encrypted, empty, truncated, without text, of an unknown format."""

    status, code = 422, "document_failed"


BY_CODE: dict[str, type[MlRagError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest, UnknownModel, WrongTask, DimensionMismatch, PrivilegeError, ModelUnavailable, ServerUnreachable,
        QueueFull, DiskFull, EngineFailed, DocumentError,
    )
}  # fmt: skip


def from_json(body: Any, status: int) -> MlRagError:
    """The error an HTTP error body stands for; a body of another form becomes ``EngineFailed``."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
        return EngineFailed("the model server answered with an error", detail=f"HTTP status {status}")
    cls = BY_CODE.get(str(error.get("code")), EngineFailed)

    def text(key: str) -> str | None:
        value = error.get(key)
        return value if isinstance(value, str) and value else None

    return cls(error["message"], detail=text("detail"), hint=text("hint"))


def reasons(failed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Failed documents by reason, the most frequent first; example: the first one of it, with its detail."""
    found: dict[tuple[str, str | None], dict[str, Any]] = {}
    for one in failed:
        new: dict[str, Any] = {name: one[name] for name in ("error", "hint", "detail") if name in one}
        new |= {"example": one["document_name"], "documents": 0}
        found.setdefault((one["error"], one.get("hint")), new)["documents"] += 1
    return sorted(found.values(), key=lambda reason: -reason["documents"])
