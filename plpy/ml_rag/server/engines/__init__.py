"""The engines that run models. Each is imported when a model needs it, never before."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ml_rag.errors import ModelUnavailable
from ml_rag.server.kinds import ENGINES

if TYPE_CHECKING:
    from ml_rag.abc import Engine
    from ml_rag.server.catalogue import ModelEntry

# The threads of llama.cpp wait for one another hundreds of times a token, and libgomp lets them spin there for long
# before they sleep. Where other processes want the processors too, each spins away the time in which the other could
# have come: between two tokens 923 ms (median; 2 threads on 2 cores, load 16), and 39 so; on an idle machine 10.6 and
# 10.8 (15.4 where they never spin). libgomp reads this when it is loaded, hence before any engine is.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def load_engine(entry: ModelEntry, models_dir: Path) -> Engine:
    """Load a model. Blocks; raises ``ModelUnavailable``, or whatever the engine's library raises.

    Each engine module has a function ``load(entry, models_dir)``; ``entry.location(models_dir)`` is the file or folder.
    """
    kind = ENGINES[entry.engine]
    module = f"{__name__}.{kind.module}"
    if kind.own_process_for is not None:
        require(entry, kind.own_process_for)
        from ml_rag.server.engines.process import EngineProcess

        engine: Engine = EngineProcess(entry, models_dir, module)
    else:
        engine = importlib.import_module(module).load(entry, models_dir)
    found = getattr(engine, "dimensions", None)
    if entry.task == "embed" and entry.dimensions not in (None, found):
        engine.close()
        raise ModelUnavailable(
            f"model {entry.id} is not the one the catalogue describes",
            detail=f"it has {found} dimensions, the catalogue says {entry.dimensions}",
            hint="Correct dimensions in the catalogue, or get the right files.",
        )
    return engine


def require(entry: ModelEntry, package: str) -> None:
    """Raises ``ModelUnavailable`` where what the model runs in is not installed."""
    if _is_installed(package):
        return
    extra = ENGINES[entry.engine].extra
    wait = "Wait if it is still being compiled; otherwise install" if extra == "llama" else "Install"
    raise ModelUnavailable(
        f"model {entry.id} cannot be loaded",
        detail=f"the package that engine {entry.engine} needs is not installed",
        hint=f"{wait} what runs such models: "
        f"pip install 'ml-rag[server,{extra}]', or '.[server,{extra}]' in a checkout of ml_rag.",
    )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # somebody has put something without a specification in its place
        return False
