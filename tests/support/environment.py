"""The environment variables of a process of tests, which all of its tests share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

#: set by pytest for each phase of a test, by ml_rag.server.engines and by torch when they are imported
_IGNORED = {
    *("PYTEST_CURRENT_TEST", "GOMP_SPINCOUNT"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"),
}


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """What runs within must leave the variables as they are; they are put back if it does not."""
    before = dict(os.environ)
    yield
    names = (before.keys() | os.environ.keys()) - _IGNORED
    if changed := sorted(name for name in names if before.get(name) != os.environ.get(name)):
        for name in changed:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        pytest.fail(f"changes the environment of later tests: {', '.join(changed)}; monkeypatch.setenv puts it back")
