"""The steps of a call: what ``explain`` and ``ml_rag.stats`` show of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ml_rag.backend import calls


class Trace:
    """``call``: its number (ml_rag._begin); None where nothing is reported."""

    def __init__(self, plpy: Any, call: int | None) -> None:
        self._plpy, self._call = plpy, call
        #: ml_rag.step
        self.steps: list[dict[str, Any]] = []
        self.step("begin")

    def enter(self, stage: str, model: str = "") -> None:
        """Report that a stage begins, in which the call may wait for a model."""
        if self._call is not None:
            calls.stage(self._plpy, self._call, stage, model)

    def step(self, stage: str, facts: dict[str, Any] | None = None) -> None:
        """A stage has ended."""
        self.steps.append({"stage": stage, "ended": datetime.now(UTC), "facts": facts})
