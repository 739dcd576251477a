"""The sources of the extension: what the manifest, the control file and the package say must agree."""

from __future__ import annotations

import re
from pathlib import Path

import ml_rag

ROOT = Path(__file__).parents[2]
SQL = ROOT / "sql"


def manifest() -> list[str]:
    return re.findall(r"^\\i (\S+)$", (SQL / "install.sql").read_text(), re.M)


def test_the_manifest_names_every_file_once_and_in_order() -> None:
    assert manifest() == sorted(path.name for path in SQL.glob("*.sql") if path.name != "install.sql")


def test_file_names_are_a_number_and_a_word() -> None:
    assert [name for name in manifest() if not re.fullmatch(r"\d\d_[a-z]+\.sql", name)] == []


def test_each_stage_is_a_function_of_its_name() -> None:
    for name in manifest():
        number, stage = name.removesuffix(".sql").split("_", 1)
        if 10 <= int(number) < 80:
            assert re.search(rf"^CREATE FUNCTION ml_rag\.{stage}\(", (SQL / name).read_text(), re.M), name


def test_each_source_has_its_test() -> None:
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "sql").glob("test_*.py")}
    assert {name.removesuffix(".sql").split("_", 1)[1] for name in manifest()} <= tests


def test_control_file_and_package_have_one_version() -> None:
    control = (ROOT / "ml_rag.control").read_text()
    assert re.findall(r"^default_version = '(.*)'$", control, re.M) == [ml_rag.__version__]


def test_what_runs_in_the_backend_imports_the_standard_library_only() -> None:
    """But for keyword search, which is imported when it is first needed: numpy, a package of the distribution."""
    with_numpy = {"keyword", "runs"}
    import ast
    import sys

    files = [*(ROOT / "plpy/ml_rag/backend").glob("*.py"), ROOT / "plpy/ml_rag/errors.py"]
    allowed = sys.stdlib_module_names | {"ml_rag"}
    for path in files:
        more = {"numpy"} if path.stem in with_numpy else set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                continue
            for module in modules:
                assert module.split(".")[0] in allowed | more, f"{path.name} imports {module}"
                if module.startswith("ml_rag."):
                    assert module.split(".")[1] in ("backend", "errors"), f"{path.name} imports {module}"
                    assert more or module.split(".")[-1] not in with_numpy, f"{path.name} imports numpy with {module}"
            if isinstance(node, ast.ImportFrom) and node.module == "ml_rag.backend":
                assert not with_numpy & {alias.name for alias in node.names}, f"{path.name} imports numpy"
