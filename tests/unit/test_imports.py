"""Who imports whom in plpy/ml_rag: no circles, the packages in one order, slow libraries when they are needed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PLPY = Path(__file__).resolve().parents[2] / "plpy"

#: package, or module of the root -> the others that it may import; whoever is not named here may import nothing of ours
MAY_IMPORT = {
    "search_path": {"errors"},
    "shortage": {"errors"},
    "archives": {"errors"},
    "zstd": {"archives"},
    "files": {"archives", "errors"},
    "work": {"progress", "terminal"},
    "backend": {"errors", "files", "progress", "protocol", "sentences"},
    "ingest": {"abc", "archives", "errors", "priority", "protocol", "zstd"},
    "server": {"abc", "errors", "priority", "protocol", "scratch", "sentences", "shortage", "ingest", "work"},
    "client": {"errors", "files", "integrations", "protocol", "search_path", "terminal", "work", "zstd"},
    "integrations": {"errors", "protocol", "search_path"},
    "cli": {"errors", "terminal"},
}


def name_of(path: Path) -> str:
    parts = path.relative_to(PLPY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in (PLPY / "ml_rag").rglob("*.py")}


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a module imports anywhere in it, for its types only too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports have whole names"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            # from a module come its contents, from a package its modules or its own contents
            found = name if name in MODULES else name.rpartition(".")[0]
            if found in MODULES and found != "ml_rag":
                yield found


GRAPH = {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def room(name: str) -> str:
    """The package below ml_rag, or the module of the root."""
    return f"{name}.".split(".")[1]


def test_there_is_no_circle() -> None:
    waiting = {name: set(used) for name, used in GRAPH.items()}
    while free := [name for name, used in waiting.items() if not used & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert sorted(waiting) == []


def test_packages_import_what_they_may() -> None:
    used: dict[str, set[str]] = {}
    for name, others in GRAPH.items():
        used.setdefault(room(name), set()).update({room(other) for other in others} - {room(name)})
    assert {name: others for name, others in used.items() if others} == MAY_IMPORT


def modules_after(code: str, *options: str) -> set[str]:
    """What a fresh interpreter has imported."""
    code += "; import sys; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(PLPY)}
    done = subprocess.run(
        [sys.executable, *options, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


def test_the_first_call_of_a_session_imports_what_it_needs() -> None:
    after = modules_after("import ml_rag.backend.bridge", "-S")  # no .pth file imports anything besides
    assert not after & {"dataclasses", "inspect", "http.client", "email", "hashlib", "uuid", "numpy"}


SLOW = {"torch", "llama_cpp", "onnxruntime", "transformers", "sentence_transformers", "huggingface_hub"}
CLIENT = [name for name in MODULES if name.startswith("ml_rag.client.")]


@pytest.mark.parametrize("name", [*CLIENT, "ml_rag.cli", "ml_rag.server.app", "ml_rag.server.commands.serve"])
def test_models_are_imported_when_one_is_loaded(name: str) -> None:
    assert not modules_after(f"import {name}") & SLOW


def test_the_command_imports_a_subcommand_when_it_is_asked_for() -> None:
    after = modules_after("import ml_rag.cli; ml_rag.cli.main(['--help'], standalone_mode=False)")
    ours = {name for name in after if name.startswith(("ml_rag.", "psycopg.", "rich."))}
    assert ours == {"ml_rag.cli", "ml_rag.errors", "ml_rag.terminal"}


def test_the_client_needs_none_of_the_packages_of_the_server() -> None:
    after = modules_after("; ".join(f"import {name}" for name in CLIENT))
    assert not after & {"numpy", "pydantic", "starlette", "httpx", "uvicorn", "orjson", "tokenizers", "lxml"}


REFUSE = """
import sys
from importlib.abc import MetaPathFinder
class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import ml_rag.integrations.{name}, ml_rag.integrations.connections
"""


def brought(requirement: Requirement, into: set[tuple[str, str]]) -> None:
    """The distributions that one requires, with the extras for which it is wanted."""
    for extra in ("", *requirement.extras):
        one = (canonicalize_name(requirement.name), extra)
        if one in into:
            continue
        into.add(one)
        for other in map(Requirement, distribution(requirement.name).requires or []):
            if other.marker is None or other.marker.evaluate({"extra": extra}):
                brought(other, into)


@pytest.mark.parametrize("name", ["explore", "gateway", "mcp"])
def test_an_extra_brings_what_its_program_imports(name: str) -> None:
    project = tomllib.loads((PLPY.parent / "pyproject.toml").read_text())["project"]
    there: set[tuple[str, str]] = set()
    try:
        for wanted in (*project["dependencies"], *project["optional-dependencies"][name]):
            brought(Requirement(wanted), there)
    except PackageNotFoundError as error:
        pytest.skip(f"it is not installed: {error}")
    names = {one for one, _ in there}
    others = [
        module
        for module, given in packages_distributions().items()
        if module != "ml_rag" and not names & set(map(canonicalize_name, given))
    ]
    assert "numpy" in others
    modules_after(REFUSE.format(refused=set(others), name=name).strip())


def test_benchmarks_find_what_they_import() -> None:
    names = sorted(f"bench.{path.stem}" for path in (PLPY.parent / "bench").glob("*.py") if path.stem != "__main__")
    done = subprocess.run([sys.executable, "-c", f"import {', '.join(names)}"], cwd=PLPY.parent, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
