"""The account of the fuzz tests, at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest

from support import fuzzing

#: libFuzzer takes a minute a target
collect_ignore = [] if fuzzing.FULL else ["test_fuzz_libfuzzer.py"]


def pytest_report_header() -> str:
    return f"fuzzing: {'full' if fuzzing.FULL else 'short'}, FUZZ_SEED={fuzzing.SEED}"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not fuzzing.LEDGER:
        return
    terminalreporter.section(f"fuzzing, FUZZ_SEED={fuzzing.SEED}")
    for line in fuzzing.table():
        terminalreporter.write_line(line)
