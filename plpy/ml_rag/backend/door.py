"""What the PL/Python functions of sql/ find as ``backend``: the one door to this package.

What calls tell of themselves is loaded with it, since most calls come by; what talks to models, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from ml_rag import __version__
from ml_rag.backend import calls

__all__ = ["VERSION", "calls"]

VERSION = __version__


def __getattr__(name: str) -> Any:
    """A function of ``bridge``."""
    function = globals()[name] = getattr(importlib.import_module("ml_rag.backend.bridge"), name)
    return function
