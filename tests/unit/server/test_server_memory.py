"""server/memory.py: limits as the kernel tells them, and what is refused for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ml_rag.errors import QueueFull
from ml_rag.server import memory as module
from ml_rag.server.memory import BODY_FACTOR, SMALL_BYTES, Memory, Usage, default_limit, group_usage

MB = 1024 * 1024


def kernel(root: Path, cgroup: str, mountinfo: str) -> Path:
    """A /proc whose process is in these groups; ``{root}`` in mountinfo is where its cgroups are mounted."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    (root / "proc" / "self" / "mountinfo").write_text(mountinfo.format(root=root))
    return root / "proc"


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


V2 = "30 20 0:26 {mounted} {{root}}/cg rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "33 20 0:29 {mounted} {{root}}/cg rw,nosuid - cgroup cgroup rw,memory\n"


def test_version_2_counts_without_the_pages_of_files(tmp_path: Path) -> None:
    proc = kernel(tmp_path, "0::/system.slice/ml-rag.service\n", V2.format(mounted="/"))
    own = tmp_path / "cg" / "system.slice" / "ml-rag.service"
    write(own, memory__max=800 * MB, memory__high="max", memory__current=500 * MB)
    (own / "memory.stat").write_text(f"anon {90 * MB}\nfile {400 * MB}\nshmem {10 * MB}\n")
    write(tmp_path / "cg" / "system.slice", memory__max="max", memory__high="max", memory__current=900 * MB)
    assert list(group_usage(proc)) == [Usage("the control group", 110 * MB, 800 * MB)]


def test_the_limit_of_a_group_around_it_counts_too_and_memory_high_is_one(tmp_path: Path) -> None:
    proc = kernel(tmp_path, "0::/a/b\n", V2.format(mounted="/"))
    write(tmp_path / "cg" / "a" / "b", memory__max=300, memory__high=200, memory__current=100, memory__stat="file 0")
    write(tmp_path / "cg" / "a", memory__max=150, memory__high="max", memory__current=120, memory__stat="file 0")
    assert [(u.used, u.limit) for u in group_usage(proc)] == [(100, 200), (120, 150)]


def test_version_1(tmp_path: Path) -> None:
    proc = kernel(tmp_path, "4:memory:/docker/abc\n0::/docker/abc\n", V1.format(mounted="/docker/abc"))
    # inside of a container its own group is the root of the mount
    write(tmp_path / "cg", memory__limit_in_bytes=1000, memory__usage_in_bytes=700)
    (tmp_path / "cg" / "memory.stat").write_text("cache 1\ntotal_cache 300\ntotal_shmem 50\n")
    assert list(group_usage(proc)) == [Usage("the control group", 450, 1000)]


@pytest.mark.parametrize("unlimited", ["9223372036854771712", "max"])
def test_no_limit_is_none(tmp_path: Path, unlimited: str) -> None:
    proc = kernel(tmp_path, "4:memory:/\n", V1.format(mounted="/"))
    write(tmp_path / "cg", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=700)
    assert list(group_usage(proc)) == []


def test_without_control_groups(tmp_path: Path) -> None:
    assert list(group_usage(tmp_path / "nothing")) == []
    assert list(group_usage(kernel(tmp_path, "", ""))) == []


@pytest.fixture
def usage(monkeypatch: pytest.MonkeyPatch) -> list[Usage]:
    """What the guard finds; tests change it."""
    found: list[Usage] = [Usage("a limit", 100 * MB, 1000 * MB)]
    monkeypatch.setattr(module, "group_usage", lambda: iter(found))
    monkeypatch.setattr(module, "_READING_SECONDS", 0.0)
    monkeypatch.setattr(module, "_TRIM_SECONDS", 0.0)
    return found


def test_bodies_are_set_aside_until_they_are_released(usage: list[Usage]) -> None:
    memory = Memory()
    # 900 MB may be used, 100 are, each body takes its size four times
    first = memory.reserve(100 * MB)
    assert first == 100 * MB * BODY_FACTOR
    second = memory.reserve(100 * MB)
    with pytest.raises(QueueFull, match="not enough memory for this request") as caught:
        memory.reserve(1 * MB)
    assert "a limit allows 1048576000 bytes" in str(caught.value.detail)
    assert memory.reserve(SMALL_BYTES) > 0  # always taken, short of the limit itself
    memory.release(second)
    assert memory.reserve(50 * MB) == 50 * MB * BODY_FACTOR


def test_a_body_that_comes_in_small_pieces_is_no_small_one(usage: list[Usage]) -> None:
    usage[0] = Usage("a limit", 950 * MB, 1000 * MB)
    memory = Memory()
    memory.reserve(SMALL_BYTES)
    with pytest.raises(QueueFull):
        memory.reserve(1024, so_far=SMALL_BYTES)


def test_at_the_limit_nothing_is_taken(usage: list[Usage]) -> None:
    usage[0] = Usage("a limit", 1001 * MB, 1000 * MB)
    with pytest.raises(QueueFull):
        Memory().reserve(10)


def test_idle_models_are_unloaded_before_something_is_refused(usage: list[Usage]) -> None:
    unloaded: list[int] = []

    def unload() -> int:
        unloaded.append(1)
        usage[0] = Usage("a limit", 100 * MB, 1000 * MB)
        return 1

    usage[0] = Usage("a limit", 890 * MB, 1000 * MB)
    memory = Memory(unload_idle=unload)
    memory.admit_model("m", 500 * MB)
    assert unloaded == [1]
    memory.admit_model("m", 500 * MB)  # there is room now
    assert unloaded == [1]
    with pytest.raises(QueueFull, match="to load model m"):
        memory.admit_model("m", 900 * MB)


def test_without_any_other_limit_it_is_a_share_of_the_machine(usage: list[Usage]) -> None:
    usage.clear()
    tightest = Memory().tightest()
    assert tightest is not None
    machine = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert (tightest.name, tightest.limit) == ("max_memory_bytes", default_limit())
    assert tightest.limit == pytest.approx(0.8 * machine, rel=0.01)
    with pytest.raises(QueueFull, match="to load model m"):
        Memory().admit_model("m", machine)


def test_the_setting_counts_the_processes_of_models(usage: list[Usage]) -> None:
    usage.clear()
    script = f"held = b'x' * {200 * MB}; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        memory = Memory(10_000 * MB, processes=lambda: [child.pid])

        def used() -> int:
            tightest = memory.tightest()
            assert tightest is not None
            return tightest.used

        assert child.stdout is not None
        child.stdout.readline()
        with_child = used()
        child.kill()
        child.wait()
        assert with_child - used() > 200 * MB


def test_the_tightest_limit_is_the_one_with_the_least_room(usage: list[Usage]) -> None:
    usage.append(Usage("another", 10 * MB, 50 * MB))
    tightest = Memory().tightest()
    assert tightest is not None
    assert tightest.name == "another"


def test_the_setting_counts_what_the_server_itself_uses(usage: list[Usage]) -> None:
    usage.clear()
    tightest = Memory(64 * MB).tightest()
    assert tightest is not None
    assert (tightest.name, tightest.limit) == ("max_memory_bytes", 64 * MB)
    assert tightest.used > 10 * MB
