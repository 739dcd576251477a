"""mk/audit.py: what it takes for a finding."""

from __future__ import annotations

import datetime
import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", Path(__file__).parents[2] / "mk" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("licence", "binding"),
    [
        ("MIT", False),
        ("GPL-3.0-or-later", True),
        ("AGPL-3.0-only", True),
        ("GNU Affero General Public License v3", True),
        ("GNU General Public License v2 (GPLv2)", True),
        ("LGPL-3.0-only", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("MIT OR GPL-2.0-only", False),
        ("MIT AND GPL-2.0-only", True),
        ("GPL-2.0-only OR AGPL-3.0-only", True),
        ("BSD-3-Clause AND GPL-3.0-or-later WITH GCC-exception-3.1", False),
        ("GPL-2.0-only AND GPL-3.0-or-later WITH GCC-exception-3.1", True),
    ],
)
def test_licences(audit: ModuleType, licence: str, binding: bool) -> None:
    assert audit.is_binding(licence) is binding


def test_what_is_shipped_is_what_the_product_requires(audit: ModuleType) -> None:
    found = audit.shipped()
    assert {"psycopg", "psycopg-binary", "torch", "onnxruntime", "starlette", "pydantic-core"} <= found
    assert not found & {"pgspot", "pglast", "pytest", "ruff"}


FOUND = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.0"]}
CLEAN: dict[str, Any] = {"name": "a", "version": "1.0", "vulns": []}


@pytest.mark.parametrize(
    ("told", "wrong", "says"),
    [
        ([CLEAN, {"name": "b", "version": "1.0", "vulns": [FOUND]}], 1, "2 packages audited"),
        ([CLEAN, {"name": "b", "skip_reason": "not found"}], 0, "no data of them: b"),
        ([{"name": "b", "skip_reason": "not found"}], 0, "no vulnerability data of any"),
        (None, 0, "cannot be reached (the network is down)"),
    ],
)
def test_vulnerabilities(
    audit: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    told: list[Any] | None,
    wrong: int,
    says: str,
) -> None:
    output = "" if told is None else json.dumps({"dependencies": told})
    done = subprocess.CompletedProcess([], 1, output, "Traceback\nthe network is down\n")
    monkeypatch.setattr(audit.subprocess, "run", lambda *_, **__: done)
    lines = audit.vulnerabilities()
    assert len(lines) == wrong
    assert says in capsys.readouterr().out
    if wrong:
        assert lines == ["b 1.0: CVE-1, PYSEC-1; mended in 2.0"]
        tomorrow = datetime.date.today() + datetime.timedelta(1)
        monkeypatch.setitem(audit.ACCEPTED, "CVE-1", ("we never call it", tomorrow))
        assert audit.vulnerabilities() == []
        monkeypatch.setitem(audit.ACCEPTED, "CVE-1", ("we never call it", datetime.date(2026, 1, 1)))
        assert audit.vulnerabilities() == lines
