"""ml_rag.scratch: folders that are removed also where their maker was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ml_rag.scratch import Scratch, sweep

HOLD = (
    "import sys, ml_rag.scratch as s; from pathlib import Path; folder = s.Scratch(sys.argv[1], 'job-');"
    "Path(folder.path, 'page.png').write_text('private'); print(folder.path, flush=True); sys.stdin.read()"
)


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and its folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": "plpy"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_in_use_is_left_alone_and_one_left_behind_is_removed(
    maker: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, folder = maker
    assert sweep(tmp_path, "job-") == []
    assert (folder / "page.png").read_text() == "private"
    process.kill()
    process.wait()
    assert sweep(tmp_path, "job-") == [folder.name]
    assert list(tmp_path.iterdir()) == []


def test_it_goes_with_its_block_and_can_be_removed_twice(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, "job-")
    with scratch as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith("job-")
        (folder / "deep" / "er").mkdir(parents=True)
        assert sweep(tmp_path, "job-") == []  # not even by itself
    assert list(tmp_path.iterdir()) == []
    scratch.remove()


def test_only_folders_of_that_name_are_swept(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").write_text("")
    (tmp_path / "job-link").symlink_to(target)
    (tmp_path / "job-file").write_text("")
    (tmp_path / "other-1").mkdir()
    (tmp_path / "job-1").mkdir()
    assert sweep(tmp_path, "job-") == ["job-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-file", "job-link", "other-1", "target"]
    assert (target / "kept").exists()
    assert sweep(tmp_path / "missing", "job-") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "job-1").mkdir()
    os.chown(tmp_path / "job-1", 54321, 54321)
    assert sweep(tmp_path, "job-") == []
