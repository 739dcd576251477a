"""The client, ``pip install ml-rag``: what its commands import, and what those of the model server say without it."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from psycopg.conninfo import make_conninfo

from support.cluster import Database

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

CLIENT_MODULES = ["ml_rag.cli", *(f"ml_rag.client.{name}" for name in ("doctor", "dsn", "eval", "load"))]


def _distributions(lines: list[str]) -> set[str]:
    """The distributions that requirements bring, with theirs, by their normalized names."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in lines]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        for needed in map(Requirement, metadata.requires(name) or ()):
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                waiting.append(needed)
    return found


def _link(distributions: set[str], folder: Path) -> None:
    """Make the packages of distributions of this environment importable from a folder."""
    for name in distributions:
        for top in {file.parts[0] for file in metadata.distribution(name).files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(str(metadata.distribution(name).locate_file(top)))


@pytest.mark.parametrize("module", CLIENT_MODULES)
def test_a_command_of_the_client_imports_nothing_of_the_server(module: str) -> None:
    code = f"import sys, json, {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        # -S: no .pth file imports anything besides
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": os.pathsep.join([str(ROOT / "plpy"), *site.getsitepackages()])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    imported = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert {"click", "ml_rag"} <= imported
    owners = metadata.packages_distributions()
    brought = {canonicalize_name(owner) for name in imported for owner in owners.get(name, ())}
    assert brought - {"ml-rag"} <= _distributions(PROJECT["dependencies"])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client's packages and no others."""
    folder = tmp_path_factory.mktemp("client")
    _link(_distributions(PROJECT["dependencies"]), folder)
    (folder / "ml_rag").symlink_to(ROOT / "plpy" / "ml_rag")
    return folder


def _ml_rag(client: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # -S: without this environment's own packages
    code = "import sys; from ml_rag.cli import main; sys.argv[0] = 'ml-rag'; main()"
    return subprocess.run(
        [sys.executable, "-S", "-c", code, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(client), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_mistyped_command_gets_the_right_one(client: Path) -> None:
    done = _ml_rag(client, "docter")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "Error: No such command 'docter'. Did you mean 'doctor'?",
    )


@pytest.mark.parametrize("arguments", [["--help"], ["load", "--help"], ["doctor", "--help"], ["eval", "--help"]])
def test_the_client_alone_helps(client: Path, arguments: list[str]) -> None:
    done = _ml_rag(client, *arguments)
    assert done.returncode == 0, done.stderr
    assert "Usage: ml-rag" in done.stdout


@pytest.mark.parametrize("arguments", [["serve"], ["serve", "--help"], ["models", "list"], ["models", "pull", "a"]])
def test_the_model_servers_commands_name_the_extra(client: Path, arguments: list[str]) -> None:
    done = _ml_rag(client, *arguments)
    assert done.returncode == 2
    assert 'pip install ".[server]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_package_that_is_needed_later_names_the_extra_too(client: Path, tmp_path: Path) -> None:
    # pydantic, which the catalogue needs, may be there for another program; uvicorn, which serving needs, is not
    _link(_distributions(["pydantic"]), tmp_path)
    done = _ml_rag(client, "serve", "--no-socket", "--listen", "127.0.0.1:1", PYTHONPATH=f"{client}:{tmp_path}")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert 'pip install ".[server]"' in done.stderr


def test_another_missing_module_is_no_matter_of_the_extra(client: Path, tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("import a_module_that_is_not_there\n")
    done = _ml_rag(client, "load", "--help", PYTHONPATH=f"{tmp_path}:{client}")
    assert done.returncode == 1
    assert "a_module_that_is_not_there" in done.stderr
    assert ".[server]" not in done.stderr


def test_the_given_packages_come_with_the_server_and_its_extras() -> None:
    def names(lines: list[str]) -> set[str]:
        return {canonicalize_name(Requirement(line).name) for line in lines}

    extras = PROJECT["optional-dependencies"]
    assert {"pgvector", "psycopg", "numpy"} <= names(PROJECT["dependencies"] + extras["server"])
    # which are large, or compiled where no wheel fits
    assert names(extras["torch"]) == {"sentence-transformers", "torch"}
    assert names(extras["llama"]) == {"llama-cpp-python"}
    assert not names(extras["server"]) & {"torch", "llama-cpp-python"}


def test_the_client_checks_the_whole_chain(client: Path, db: Database) -> None:
    done = _ml_rag(client, "doctor", "--json", "--dsn", make_conninfo(db.dsn, dbname=db.name))
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert findings["model server, from the database"]["ok"]
    assert findings["embedding"]["ok"]
