"""ml_rag.scratch: folders that are removed also where their maker was killed."""

from __future__ import annotations

import contextlib
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


#: a process that stops where it is told while it makes a folder, says what is there, and goes on when its input ends
STOP = (
    "import os, sys, ml_rag.scratch as s; from pathlib import Path\n"
    "def stop(real):\n"
    "    def call(*arguments):\n"
    "        setattr(*place, real)\n"
    "        print(*os.listdir(sys.argv[1]), flush=True); sys.stdin.read()\n"
    "        return real(*arguments)\n"
    "    return call\n"
    "place = {'open': (os, 'open'), 'lock': (s.fcntl, 'flock'), 'rename': (Path, 'rename')}[sys.argv[2]]\n"
    "setattr(*place, stop(getattr(*place)))\n"
    "folder = s.Scratch(sys.argv[1], 'job-'); (folder.path / 'page.png').write_text('private')\n"
    "print(folder.path.name, flush=True); os._exit(0)"
)


@contextlib.contextmanager
def stopped(folder: Path, where: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process stopped in the middle of making a folder, and that one, which looks old."""
    command = [sys.executable, "-c", STOP, str(folder), where]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": "plpy"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        (name,) = process.stdout.readline().split()
        os.utime(folder / name, (1, 1))
        yield process, folder / name
        process.kill()


@pytest.mark.parametrize("where", ["open", "lock", "rename"])
def test_what_a_process_killed_while_making_it_has_left_is_removed(tmp_path: Path, where: str) -> None:
    with stopped(tmp_path, where) as (process, folder):
        assert folder.name.startswith(".new-job-")
        process.kill()
        process.wait()
        os.utime(folder)
        assert sweep(tmp_path, "job-") == []  # it could be one that is just being made
        os.utime(folder, (1, 1))
        assert sweep(tmp_path, "other-") == []
        assert sweep(tmp_path, "job-") == [folder.name]
    assert list(tmp_path.iterdir()) == []


def test_what_is_locked_is_left_to_its_maker(tmp_path: Path) -> None:
    with stopped(tmp_path, "rename") as (process, folder):
        assert sweep(tmp_path, "job-") == []
        out, _ = process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == [out.strip()] == [folder.name.removeprefix(".new-")]


@pytest.mark.parametrize("where", ["open", "lock"])
def test_a_maker_that_was_suspended_for_long_makes_another(tmp_path: Path, where: str) -> None:
    with stopped(tmp_path, where) as (process, folder):
        assert sweep(tmp_path, "job-") == [folder.name]
        out, _ = process.communicate()
    assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [out.strip()]
    assert (tmp_path / out.strip() / "page.png").exists()


def test_an_unlocked_folder_that_is_not_empty_is_nobody_elses(tmp_path: Path) -> None:
    """Scratch puts nothing in before it has the folder."""
    (tmp_path / ".new-job-mine").mkdir()
    (tmp_path / ".new-job-mine" / "kept").write_text("")
    os.utime(tmp_path / ".new-job-mine", (1, 1))
    assert sweep(tmp_path, "job-") == []
    assert (tmp_path / ".new-job-mine" / "kept").exists()


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
