"""mk/keep.sh: what it runs comes back, until it is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.processes import gone, wait_until

KEEP = Path(__file__).resolve().parents[2] / "mk" / "keep.sh"

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """keep.sh with a command that notes its process id in ``starts``, then runs the words given."""
    running: list[subprocess.Popen[bytes]] = []

    def keep(what: str) -> subprocess.Popen[bytes]:
        script = f'echo $$ >>"{tmp_path}/starts"; {what}'
        running.append(
            subprocess.Popen(
                ["bash", str(KEEP), "bash", "-c", script], stderr=subprocess.DEVNULL, start_new_session=True
            )
        )
        return running[-1]

    yield keep
    for process in running:
        process.terminate()
        process.wait(10)


def starts(folder: Path) -> list[int]:
    path = folder / "starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_what_is_killed_comes_back_and_ends_with_it(start: Start, tmp_path: Path) -> None:
    keep = start("exec sleep 60")
    for times in (1, 2, 3):
        wait_until(lambda times=times: len(starts(tmp_path)) == times)
        if times < 3:
            os.kill(starts(tmp_path)[-1], signal.SIGKILL)
    keep.terminate()
    assert keep.wait(5) == 0
    assert all(gone(pid) for pid in starts(tmp_path))


def test_it_waits_for_the_command_to_end(start: Start, tmp_path: Path) -> None:
    ready, cleaned = tmp_path / "ready", tmp_path / "cleaned"
    keep = start(f'trap "sleep 0.5; touch {cleaned}; exit 0" TERM; touch {ready}; while :; do sleep 0.1; done')
    wait_until(ready.exists)
    keep.terminate()
    assert keep.wait(5) == 0
    assert cleaned.exists()


def test_an_end_without_an_error_is_one_too(start: Start, tmp_path: Path) -> None:
    start("exit 0")
    wait_until(lambda: len(starts(tmp_path)) == 2)


def test_a_command_that_refuses_its_first_start_is_left_alone(start: Start, tmp_path: Path) -> None:
    assert start("exit 2").wait(5) == 2
    assert len(starts(tmp_path)) == 1


def test_one_that_refuses_a_later_start_is_not(start: Start, tmp_path: Path) -> None:
    start(f'[ "$(wc -l <"{tmp_path}/starts")" -eq 1 ] && kill -KILL $$; exit 2')
    wait_until(lambda: len(starts(tmp_path)) == 3)


def test_it_can_be_ended_while_it_pauses(start: Start, tmp_path: Path) -> None:
    keep = start("exit 0")
    wait_until(lambda: len(starts(tmp_path)) == 2)
    keep.terminate()  # the second pause takes two seconds
    assert keep.wait(1) == 0


def test_it_can_be_ended_at_any_moment(start: Start, tmp_path: Path) -> None:
    for i in range(60):
        keep = start("exec sleep 60")
        time.sleep(i / 2000)
        keep.terminate()
        # before it has its trap, the signal itself ends it
        assert keep.wait(10) in (0, -signal.SIGTERM)
    wait_until(lambda: all(gone(pid) for pid in starts(tmp_path)))
