"""``python -m support.guided TARGET [libFuzzer's arguments]``: one target under libFuzzer, by atheris."""

from __future__ import annotations

import importlib
import sys

import atheris

with atheris.instrument_imports(include=["ml_rag"]):
    # modules that the parsers import when they are needed
    for name in ("archive", "detect", "encoding", "html", "mail", "odf", "rtf", "tables", "text", "xml"):
        importlib.import_module(f"ml_rag.ingest.formats.{name}")
    from support.fuzz_targets import TARGETS


if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
