"""docs/security.md and docs/faults.md: every test they name is there, and every actor of the model has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "security.md"
FAULTS = DOCUMENT.with_name("faults.md")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", DOCUMENT.read_text())))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_the_threat_model_names_exists(file: str, name: str) -> None:
    tree = ast.parse((TESTS / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_files_of_tests_that_the_table_of_faults_names_exist() -> None:
    rows = [line for line in FAULTS.read_text().splitlines() if re.match(r"\|.*\|.*\| .*`test_\w+`", line)]
    assert len(rows) >= 40
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    assert named - {path.stem for path in TESTS.rglob("test_*.py")} == set()


def test_each_line_of_the_threat_model_is_proved() -> None:
    text = DOCUMENT.read_text()
    stated = text.partition("## Who may do what\n")[2].partition("\n## ")[0]
    actors = dict(re.findall(r"### (.*?)\n(.*?)(?=\n### |\Z)", stated, re.DOTALL))
    assert len(actors) >= 12
    marks = []
    for actor, lines in actors.items():
        assert "\nCan: " in lines, actor
        denied = re.findall(r"^- .*?(?: \((\w\d+)\))?$", lines, re.MULTILINE)
        assert denied, actor
        assert all(denied), (actor, denied)
        marks += denied
    for part in ("ml_rag_user", "ml_rag_loader", "owner", "local user", "document", "question", "model"):
        assert any(part in actor for actor in actors), part
    proved = re.findall(r"^- (\w\d+)\n  - `[\w/]+\.py::\w+`$", text.partition("\n## Tests\n")[2], re.MULTILINE)
    assert proved == marks
