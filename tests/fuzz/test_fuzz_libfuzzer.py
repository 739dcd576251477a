"""Parsers of our own under libFuzzer, which coverage guides to inputs that reach new code. Runs in make fuzz-test only.

To keep what it finds: ``python -m support.guided TARGET -merge=1 tests/fuzz/corpus/TARGET NEW_INPUTS``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import fuzzing
from support.fuzz_targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).parents[2]
#: of libFuzzer for a target
GUIDED_SECONDS = 60.0
LONGEST_INPUT = 2048


@pytest.mark.parametrize("name", TARGETS)
def test_guided_by_coverage(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed: there is no wheel for this Python")
    found = ROOT / ".build" / "fuzz"
    found.mkdir(parents=True, exist_ok=True)
    (tmp_path / "new").mkdir()
    seconds = min(GUIDED_SECONDS, fuzzing.SECONDS)
    command = [sys.executable, "-m", "support.guided", name, str(tmp_path / "new"), str(CORPUS / name)]
    command += [f"-seed={fuzzing.SEED % 2**31 or 1}", f"-max_total_time={seconds:.0f}", f"-max_len={LONGEST_INPUT}"]
    command += ["-timeout=20", "-rss_limit_mb=2048", f"-artifact_prefix={found}/{name}-", "-print_final_stats=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "plpy"), str(ROOT / "tests")])}
    with fuzzing.target(f"libFuzzer on {name}", full=0, short=0) as account:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=seconds + 120, check=False, cwd=tmp_path
        )
        said = done.stderr.decode(errors="replace")
        if runs := re.findall(r"^#(\d+)", said, re.MULTILINE):
            account.cases = int(runs[-1])
        if states := re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said):
            edges, features, kept = states[-1]
            account.coverage = f"{edges} edges, {features} features, {kept} inputs"
        assert done.returncode == 0, f"{said[-6000:]}\nthe input lies in {found}"
