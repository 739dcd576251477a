"""The units of the model server and of a worker: what systemd says to it, and what it must agree in with the rest."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ml_rag.server.catalogue import DEFAULT_CONFIG, ServerConfig

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "systemd" / "ml-rag.service"
WORKER = ROOT / "systemd" / "ml-rag-worker.service"

analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def service() -> dict[str, str]:
    """The keys of [Service]; of one that stands there several times the last."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


@analyze
@pytest.mark.parametrize("unit", [UNIT, WORKER], ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path, unit: Path) -> None:
    """A misspelt key is a warning only: there must be no word at all."""
    copy = tmp_path / unit.name
    # the command need not be installed here
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text()))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False, timeout=60
    )
    about_it = [line for line in done.stderr.splitlines() if unit.name in line or str(copy) in line]
    assert (done.returncode, about_it) == (0, []), done.stderr


@analyze
@pytest.mark.parametrize(("unit", "threshold"), [(UNIT, 15), (WORKER, 25)], ids=["server", "worker"])
def test_its_exposure_is_small(unit: Path, threshold: int) -> None:
    """systemd's own figure, from 0 to 10; without the hardening it is 9.2."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={threshold}", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze judges no unit that is not running")
    assert done.returncode == 0, done.stdout[-500:]


def test_its_folders_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = service()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert f"/run/{unit['RuntimeDirectory']}" == str(Path(ServerConfig().socket).parent)
    assert f"/etc/{unit['ConfigurationDirectory']}" == str(DEFAULT_CONFIG.parent)
    assert f"HOME=/var/lib/{unit['StateDirectory']}" in unit["Environment"]


def test_its_user_is_made_by_sysusers() -> None:
    unit = service()
    lines = (ROOT / "systemd" / "ml-rag.sysusers.conf").read_text().splitlines()
    assert [line.split()[:2] for line in lines if not line.startswith("#")] == [["u", unit["User"]]]


def test_a_parser_may_still_confine_itself() -> None:
    """What ml_rag.ingest.confine asks of the kernel must not be among what the unit forbids."""
    unit = service()
    assert set(unit["RestrictNamespaces"].split()) == {"user", "net"}
    calls = {"capset", *(f"landlock_{call}" for call in ("create_ruleset", "add_rule", "restrict_self"))}
    assert calls <= set(unit["SystemCallFilter"].split())
    assert unit["OOMPolicy"] == "continue"
