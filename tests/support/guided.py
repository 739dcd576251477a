"""``python -m support.guided TARGET [libFuzzer's arguments]``: one target under libFuzzer, by atheris."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import atheris

from ml_rag.ingest import formats

with atheris.instrument_imports(include=["ml_rag"]):
    # modules that are imported when their format is met
    for module in pkgutil.iter_modules(formats.__path__):
        importlib.import_module(f"ml_rag.ingest.formats.{module.name}")
    from support.fuzz_targets import TARGETS


if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
