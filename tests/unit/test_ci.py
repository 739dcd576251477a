""".ci/run: what it runs, in which order, how it ends; and Makefile: no test is in neither of the lanes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
_REPORT = (
    '<testsuites><testsuite name="pytest" time="{seconds}">'
    '<testcase file="tests/a.py" time="2.0"/><testcase file="tests/{own}.py" time="3.5">{element}</testcase>'
    "</testsuite></testsuites>"
)


def run_ci(folder: Path, failing: str = "", **reports: tuple[float, str]) -> tuple[int, list[str], str]:
    """Its status, its calls and its output; the commands only write ``reports``: seconds, and an element."""
    for name in (".ci/run", "mk/durations.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "build").mkdir()
    for name in ("test", "test-rest"):
        (folder / "build" / f"{name}.xml").write_text("of an earlier run")
    made = folder / "made"
    made.mkdir()
    for name, (seconds, element) in reports.items():
        (made / f"{name.replace('_', '-')}.xml").write_text(_REPORT.format(seconds=seconds, own=name, element=element))
    called = (
        f'#!/usr/bin/env bash\ncall="$(basename "$0" .sh) $1"\necho "$call" >>{folder}/calls\n'
        f'cp {made}/"$1".xml {folder}/build/ 2>/dev/null\n[ "$call" != "{failing}" ]\n'
    )
    programs = folder / "bin"
    programs.mkdir()
    for path in (programs / "make", *(folder / "mk" / f"{name}.sh" for name in ("docker", "packages", "setup"))):
        path.write_text(called)
        path.chmod(0o755)
    done = subprocess.run(
        ["env", f"PATH={programs}:/usr/bin:/bin", "bash", str(folder / ".ci/run")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, (folder / "calls").read_text().splitlines(), done.stdout


def test_ci_runs_both_lanes_and_ends_with_the_count_of_both(tmp_path: Path) -> None:
    status, calls, output = run_ci(tmp_path, test=(60.0, ""), test_rest=(30.25, "<skipped/>"))
    assert status == 0
    tried = ["docker short-if-possible", "packages test-if-possible", "make test", "setup integrations"]
    assert calls == ["make check", *tried, "make test-rest"]
    *slowest, last = output.splitlines()
    assert [line.split() for line in slowest[-3:]] == [
        ["4.0", "tests/a.py"], ["3.5", "tests/test.py"], ["3.5", "tests/test_rest.py"],
    ]  # fmt: skip
    assert last.strip("= ") == "3 passed, 1 skipped in 90.25s"


@pytest.mark.parametrize(
    ("element", "told"), [("<failure/>", "1 failed, 3 passed"), ("<error/>", "3 passed, 1 errors")]
)
def test_what_failed_in_the_first_lane_is_in_the_last_line(tmp_path: Path, element: str, told: str) -> None:
    status, calls, output = run_ci(tmp_path, "make test", test=(1.0, element), test_rest=(2.0, ""))
    assert (status, calls[-1]) == (1, "make test-rest")
    assert output.splitlines()[-1].strip("= ") == f"{told} in 3.00s"


@pytest.mark.parametrize(
    "failing",
    [
        "make check",
        "docker short-if-possible",
        "packages test-if-possible",
        "setup integrations",
        "make test-rest",
        "none, but no report",
    ],
)
def test_ci_fails_with_each_of_its_parts_and_runs_the_others(tmp_path: Path, failing: str) -> None:
    reports = {"test": (1.0, "")} | ({} if "report" in failing else {"test_rest": (1.0, "")})
    status, calls, _ = run_ci(tmp_path, failing, **reports)
    assert (status, len(calls)) == (1, 6)


def test_each_test_is_in_one_of_the_lanes() -> None:
    def marks(command: str) -> str:
        told = subprocess.run(
            ["make", "-n", "--no-print-directory", command], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return shlex.split(told.stdout)[-1]

    rest = re.fullmatch(r"not slow and \((\w+(?: or \w+)*)\)", marks("test-rest"))
    assert rest is not None
    assert marks("test") == f"not (slow or {rest[1]})"
    assert marks("test-all") == ""
