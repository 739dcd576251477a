"""What the PL/Python functions of sql/ find as ``backend``: the one door to this package.

What calls tell of themselves is loaded with it, since most calls come by; what talks to models, when it is first used.
"""

from __future__ import annotations

import codecs
import importlib
import os
import sys
from typing import Any

from ml_rag import __version__
from ml_rag.backend import calls

__all__ = ["VERSION", "calls"]

VERSION = __version__

#: the folder of this package
_HERE = os.path.join(os.path.dirname(__file__), "")


def _decoded(error: UnicodeError) -> tuple[str | bytes, int]:
    """Question marks for bytes that are not valid UTF-8, if PL/Python decodes them for this package.

    Any role can make a text that is not valid in the database's encoding: an error of to_date cuts a value within a
    character. PL/Python also decodes errors as UTF-8 if the database has another encoding. If it cannot decode, it
    crashes, or jumps over Python's frames.
    """
    # none: of arguments, before a function runs
    frame = sys._getframe().f_back
    if isinstance(error, UnicodeDecodeError) and (frame is None or frame.f_code.co_filename.startswith(_HERE)):
        return "?" * (error.end - error.start), error.end
    return codecs.strict_errors(error)


codecs.register_error("strict", _decoded)


def __getattr__(name: str) -> Any:
    """A function of ``bridge``."""
    function = globals()[name] = getattr(importlib.import_module("ml_rag.backend.bridge"), name)
    return function
