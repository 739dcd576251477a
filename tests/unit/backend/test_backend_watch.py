"""backend/watch.py without a server; tests/sql/test_watch.py has what each role sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from ml_rag.backend import watch
from ml_rag.backend.slots import SLOT_BYTES, SlotFile


def test_whoever_adds_up_many_slots_can_be_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    SlotFile(str(path), create=True).close()
    with path.open("r+b") as file:
        file.truncate(300 * SLOT_BYTES)  # sparse

    class Cancelled(Exception):
        pass

    def cancel() -> None:
        raise Cancelled

    assert watch._records(str(path), lambda: None)[1] == {}
    with pytest.raises(Cancelled):
        watch._records(str(path), cancel)
