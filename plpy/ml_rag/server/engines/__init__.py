"""The engines that run models. Each is imported when a model needs it, never before."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ml_rag.errors import ModelUnavailable

if TYPE_CHECKING:
    from ml_rag.abc import Engine
    from ml_rag.server.catalogue import ModelEntry

# The threads of llama.cpp wait for one another hundreds of times a token, and libgomp lets them spin there for long
# before they sleep. Where other processes want the processors too, each spins away the time in which the other could
# have come: between two tokens 923 ms (median; 2 threads on 2 cores, load 16), and 39 so; on an idle machine 10.6 and
# 10.8 (15.4 where they never spin). libgomp reads this when it is loaded, hence before any engine is.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_MODULES = {
    "fake": "ml_rag.server.engines.fake",
    "sentence-transformers": "ml_rag.server.engines.sentence_transformers",
    "llama-cpp": "ml_rag.server.engines.llama_cpp",
    "openai": "ml_rag.server.engines.openai",
}


#: engines whose native code a caller's options and texts can reach: each model of theirs has a process of its own
_OWN_PROCESS = frozenset({"llama-cpp"})


def load_engine(entry: ModelEntry, models_dir: Path) -> Engine:
    """Load a model. Blocks; raises ``ModelUnavailable``, or whatever the engine's library raises.

    Each engine module has a function ``load(entry, models_dir)``; ``entry.location(models_dir)`` is the file or folder.
    """
    module = _MODULES[entry.engine]
    if entry.engine in _OWN_PROCESS:
        if not _is_installed("llama_cpp"):
            raise ModelUnavailable(
                f"model {entry.id} cannot be loaded",
                detail="the package llama-cpp-python is not installed",
                hint="Where it is still being compiled, wait for it. Else install the model server's packages: "
                'pip install "ml-rag[server]".',
            )
        from ml_rag.server.engines.process import EngineProcess

        return EngineProcess(entry, models_dir, module)
    return cast("Engine", importlib.import_module(module).load(entry, models_dir))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # somebody has put something without a specification in its place
        return False
