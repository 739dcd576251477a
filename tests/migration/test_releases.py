"""Releases, as migrations/README.md has them: an archive that is sealed, and an upgrade script, hand-written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

import ml_rag
from support.extension import ROOT, releases, sealed

#: what a checkout must have to be built
SOURCES = [
    "ml_rag.control",
    "mk",
    "sql",
    *(
        f"plpy/ml_rag/{name}"
        for name in (
            *("__init__.py", "archives.py", "errors.py", "files.py", "progress.py", "protocol.py", "sentences.py"),
        )
    ),
]
SOURCES.append("plpy/ml_rag/backend")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def copied(folder: Path) -> Path:
    """A checkout of this version without a release."""
    (folder / "migrations").mkdir(parents=True)
    for name in SOURCES:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return folder


def build(checkout: Path) -> None:
    done = run("bash", checkout / "mk" / "build.sh")
    assert done.returncode == 0, done.stderr


def set_version(checkout: Path, version: str) -> None:
    path = checkout / "plpy/ml_rag/__init__.py"
    path.write_text(re.sub(r"(__version__ = \")[0-9.]+", rf"\g<1>{version}", path.read_text()))


def tags(checkout: Path) -> list[str]:
    """Versions of the releases that this commit is, or comes after."""
    if shutil.which("git") is None or not (checkout / ".git").exists():
        pytest.skip("the tags are not known: no git, or no checkout by it")
    told = run("git", "-c", "safe.directory=*", "-C", checkout, "tag", "--merged", "HEAD", "v[0-9]*")
    assert told.returncode == 0, told.stderr
    return [tag.removeprefix("v") for tag in told.stdout.split()]


def problems(checkout: Path, released: list[str], version: str) -> list[str]:
    """What a checkout of ``version`` that was built lacks for the releases there are."""
    migrations, built = checkout / "migrations", checkout / "build" / "extension"
    found = [f"{tag} is tagged and not sealed" for tag in released if tag not in releases(migrations)]
    for name, digest in sealed(migrations).items():
        path = migrations / name
        if not path.exists() or sha256(path.read_bytes()).hexdigest() != digest:
            return [*found, f"{name} is not what was sealed"]
    for release in releases(migrations):
        if release != version:
            if not list(migrations.glob(f"ml_rag--{release}--*.sql")):
                found.append(f"there is no upgrade script from {release}")
            continue
        files = contents(migrations / f"ml_rag--{release}.tar.gz")
        if files != {name: (built / name).read_bytes() for name in files}:
            found.append(f"{release} has changed since it was sealed: raise the version")
    return found


def contents(archive: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if file := tar.extractfile(member):
                found[member.name] = file.read()
    return found


def test_every_release_is_sealed_and_has_an_upgrade_script() -> None:
    if not releases():
        pytest.skip("no release is tagged yet: migrations/ has no archive of one")
    build(ROOT)
    assert problems(ROOT, [], ml_rag.__version__) == []


def test_every_tag_is_a_sealed_release() -> None:
    """Of another checkout than one by git nobody knows the tags; the test before this one needs none."""
    released = tags(ROOT)
    assert [tag for tag in released if tag not in releases()] == []
    if not released:
        pytest.skip("no release is tagged yet")


def test_an_archive_holds_what_is_installed(tmp_path: Path) -> None:
    checkout = copied(tmp_path)
    assert run("bash", checkout / "mk" / "seal.sh").returncode == 0
    archive = checkout / "migrations" / f"ml_rag--{ml_rag.__version__}.tar.gz"
    built = checkout / "build" / "extension"
    files = {str(path.relative_to(built)): path.read_bytes() for path in built.rglob("*") if path.is_file()}
    assert contents(archive) == {name: content for name, content in files.items() if name != "ml_rag.control"}
    assert f"ml_rag--{ml_rag.__version__}.sql" in files
    assert f"ml_rag-{ml_rag.__version__}/ml_rag/backend/bridge.py" in files
    assert sealed(checkout / "migrations") == {archive.name: sha256(archive.read_bytes()).hexdigest()}


def test_a_version_is_sealed_once(tmp_path: Path) -> None:
    checkout = copied(tmp_path)
    assert run("bash", checkout / "mk" / "seal.sh").returncode == 0
    again = run("bash", checkout / "mk" / "seal.sh")
    assert (again.returncode, "is sealed already" in again.stderr) == (3, True)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    """Each step of a release, left out."""
    checkout = copied(tmp_path)
    migrations = checkout / "migrations"
    build(checkout)
    assert problems(checkout, [], "1.0.0") == []

    # tagged before it was sealed
    set_version(checkout, "1.0.0")
    if shutil.which("git"):
        git = ("git", "-C", checkout, "-c", "user.name=a", "-c", "user.email=a@example.org")
        for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"], ["tag", "v1.0.0"]):
            assert run(*git, *command).returncode == 0
        assert tags(checkout) == ["1.0.0"]
    assert problems(checkout, ["1.0.0"], "1.0.0") == ["1.0.0 is tagged and not sealed"]
    assert run("bash", checkout / "mk" / "seal.sh").returncode == 0
    assert problems(checkout, ["1.0.0"], "1.0.0") == []

    # changed under the number of a release
    source = checkout / "sql" / "ground/schema.sql"
    text = source.read_text()
    source.write_text(text + "SELECT 1;\n")
    build(checkout)
    assert problems(checkout, ["1.0.0"], "1.0.0") == ["1.0.0 has changed since it was sealed: raise the version"]
    source.write_text(text)

    # the next version without a way to it
    assert problems(checkout, ["1.0.0"], "1.1.0") == ["there is no upgrade script from 1.0.0"]
    (migrations / "ml_rag--1.0.0--1.1.0.sql").write_text("")
    assert problems(checkout, ["1.0.0"], "1.1.0") == []

    # the way there is sealed with the next version, and stays as it is
    set_version(checkout, "1.1.0")
    assert run("bash", checkout / "mk" / "seal.sh").returncode == 0
    assert releases(migrations) == ["1.0.0", "1.1.0"]
    assert problems(checkout, ["1.0.0", "1.1.0"], "1.1.0") == []
    script = migrations / "ml_rag--1.0.0--1.1.0.sql"
    script.write_text("SELECT 1;")
    assert problems(checkout, [], "1.1.0") == [f"{script.name} is not what was sealed"]
    script.write_text("")

    # an archive made anew, or gone
    archive = migrations / "ml_rag--1.0.0.tar.gz"
    archive.write_bytes(archive.read_bytes() + b"\0")
    assert problems(checkout, [], "1.1.0") == [f"{archive.name} is not what was sealed"]
    archive.unlink()
    assert problems(checkout, [], "1.1.0") == [f"{archive.name} is not what was sealed"]


def test_installing_brings_upgrade_scripts_and_releases(tmp_path: Path) -> None:
    """`make install` the scripts, `install.sh released` what the archives hold: none but those that were sealed."""
    config = os.environ.get("ML_RAG_TEST_PG_CONFIG")
    if not config:
        pytest.skip("ML_RAG_TEST_PG_CONFIG is not set: the database is another machine's")
    checkout = copied(tmp_path / "checkout")
    set_version(checkout, "1.0.0")
    assert run("bash", checkout / "mk" / "seal.sh").returncode == 0
    set_version(checkout, "1.1.0")
    (checkout / "migrations" / "ml_rag--1.0.0--1.1.0.sql").write_text("SELECT 1;\n")

    def install(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run("bash", checkout / "mk" / "install.sh", *arguments, PG_CONFIG=config, DESTDIR=str(tmp_path / "root"))

    build(checkout)
    assert install("install").returncode == 0
    (folder,) = (tmp_path / "root").rglob("extension")
    names = {path.name for path in folder.iterdir()}
    assert names == {"ml_rag.control", "ml_rag--1.1.0.sql", "ml_rag-1.1.0", "ml_rag--1.0.0--1.1.0.sql"}
    assert install("released").returncode == 0
    assert {path.name for path in folder.iterdir()} - names == {"ml_rag--1.0.0.sql", "ml_rag-1.0.0"}
    assert "'1.0.0'" in (folder / "ml_rag--1.0.0.sql").read_text()

    archive = checkout / "migrations" / "ml_rag--1.0.0.tar.gz"
    archive.write_bytes(archive.read_bytes() + b"\0")
    refused = install("released")
    assert (refused.returncode, "is not the one that was sealed" in refused.stderr) == (3, True)
