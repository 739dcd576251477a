"""An engine in a process of its own that misbehaves as it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ml_rag.abc import Delta, Sampling
from ml_rag.server.catalogue import ModelEntry
from ml_rag.server.engines.process import EngineProcess

#: what PYTHONPATH must be for the process
TESTS = Path(__file__).resolve().parents[1]


def never() -> bool:
    return False


def started(how: str = "") -> EngineProcess:
    entry = ModelEntry.model_validate({"id": "m", "task": "generate", "engine": "fake", "description": how})
    return EngineProcess(entry, Path("/"), "support.misbehaving_engine")


def ask(engine: EngineProcess, what: str, cancelled: Callable[[], bool] = never) -> list[Delta]:
    return list(engine.generate([{"role": "user", "content": what}], Sampling(stop=("a", "b")), cancelled))
