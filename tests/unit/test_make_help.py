"""Makefile: what `make help` prints."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_each_command_is_told_in_the_same_column() -> None:
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    named = {line.split()[1] for line in lines}
    told = [found for line in lines if (found := re.match(r"  make [a-z-]+  +(?=\S)", line))]
    assert {"demo", "integrations-test", "upgrade-test"} <= named
    assert len(told) == len(lines)
    assert len({found.end() for found in told}) == 1
