"""The tests themselves: what they share lies in tests/support, or in a conftest.py."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def imported(path: Path) -> set[str]:
    """The modules that a file names in its imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def test_nothing_imports_a_test_module() -> None:
    modules = {path.stem for path in TESTS.rglob("test_*.py")}
    assert len(modules) > 100
    for path in TESTS.rglob("*.py"):
        wrong = {name for name in imported(path) if modules & set(name.split("."))}
        assert not wrong, f"{path.relative_to(TESTS)} imports {wrong}: move what they share to tests/support"
